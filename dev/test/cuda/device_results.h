// device_results.h: two devices, or two orders of threads, side by side:
//     build/cuda_tests --write-results FILE         in emulation: inputs, what the kernels made of them, and limits
//     build/test_device --compare-results FILE      on a GPU: the same inputs; exit status 1 if something differs
// Either program writes and either compares. Selections have to be the same bits. Each number is within its limit of
// exact arithmetic (attention_kernel_tests.h) on either device, so the two may be two limits apart. Where this passes,
// what the emulator shows of the kernels holds on the GPU.
#pragma once
#include "long_context_tests.h"
#include "../../../lib/base/safetensors.h"

#ifndef PRECISION_FP32  // which has the plain kernels only

namespace device_results {

using namespace attention_tests;

struct Case {
    std::string name;
    NsaShape s;
    Branch branch;
    SelectedKernel kernel;
};
inline std::vector<Case> cases() {
    std::vector<Case> all;
    for (const auto& [T, heads, G, D] : {std::array<int, 4>{130, 6, 2, 64}, {80, 16, 1, 128}, {150, 5, 1, 32}}) {
        NsaShape s = shape(T, heads, G, D);
        s.l = 8, s.d = 4;
        const std::string at = format_text("%d heads of %d, ", heads * G, D);
        all.push_back({at + "compressed", s, CMP, SelectedKernel::TILES});
        all.push_back({at + "window", s, WIN, SelectedKernel::TILES});
        s.slc_count = s.slc_blocks();  // a query may choose them all
        all.push_back({at + "selected, tiles", s, SLC, SelectedKernel::TILES});
        all.push_back({at + "selected, gathered", s, SLC, SelectedKernel::GATHER});
    }
    return all;
}
inline NsaShape selection_shape() {
    NsaShape s = shape(500, 6, 2);
    s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 6;
    return s;
}

// The arrays of a file by name; numbers are fp32, selections int32.
struct Arrays {
    std::map<std::string, std::vector<float>> numbers;
    std::map<std::string, std::vector<int32_t>> bits;

    void write(const std::string& path, const std::string& device) const {
        std::vector<TensorView> views;
        for (const auto& [name, x] : numbers) views.push_back(tensor_view(name, {int64_t(x.size())}, x.data()));
        for (const auto& [name, x] : bits)
            views.push_back({name, "I32", {int64_t(x.size())}, x.data(), x.size() * sizeof(int32_t)});
        write_safetensors(path, {{"device", device}}, views);
    }
    void read(const SafeTensors& file) {
        for (const TensorView& t : file.tensors) {
            const size_t n = size_t(t.elements());
            if (t.dtype == "I32") bits[t.name].resize(n), std::memcpy(bits[t.name].data(), t.data, t.bytes);
            else numbers[t.name].resize(n), std::memcpy(numbers[t.name].data(), t.data, t.bytes);
        }
    }
    // What kernels made: the numbers that have a limit, and the choice.
    Arrays results() const {
        Arrays found;
        for (const auto& [name, x] : numbers)
            if (numbers.count(name + " limit")) found.numbers[name] = x;
        found.bits["choice: selection"] = bits.at("choice: selection");
        return found;
    }
    // The array of this name, which has to be there with this many elements.
    template <class T>
    static const std::vector<T>& at(const std::map<std::string, std::vector<T>>& all, const std::string& name,
                                    size_t count) {
        const auto found = all.find(name);
        if (found == all.end() || found->second.size() != count)
            fail("no array %s of %zu elements: was the file written by other sources? write it again", name, count);
        return found->second;
    }
};

inline std::vector<float> narrowed(const std::vector<double>& x) { return {x.begin(), x.end()}; }

// Inputs and, with their limits, what exact arithmetic gives for them.
inline void put_inputs(Arrays& file, const Case& c, const Inputs& in, const Expected& e) {
    const std::pair<const char*, std::vector<float>> arrays[] = {{"q", narrowed(in.q)},
                                                                 {"k", narrowed(in.k)},
                                                                 {"v", narrowed(in.v)},
                                                                 {"dout", narrowed(in.dout)},
                                                                 {"o", narrowed(e.o)},
                                                                 {"lse given", narrowed(e.lse_given)},
                                                                 {"gate", narrowed(e.gate)},
                                                                 {"out limit", narrowed(e.out_limit)},
                                                                 {"lse limit", narrowed(e.lse_limit)},
                                                                 {"dq limit", narrowed(e.dq_limit)},
                                                                 {"dk limit", narrowed(e.dk_limit)},
                                                                 {"dv limit", narrowed(e.dv_limit)}};
    for (const auto& [name, x] : arrays) file.numbers[c.name + ": " + name] = x;
    file.bits[c.name + ": chosen"] = {in.selection.begin(), in.selection.end()};
}
// found = what this device makes of the file's inputs.
inline void run_case(Arrays& found, const Arrays& file, const Case& c) {
    Inputs in(c.s, c.branch, 1, 0);
    const size_t rows = in.rows(), D = size_t(c.s.D);
    const auto read = [&](const char* name, size_t count) {
        const std::vector<float>& from = Arrays::at(file.numbers, c.name + ": " + name, count);
        return std::vector<double>(from.begin(), from.end());
    };
    in.q = read("q", rows * D), in.k = read("k", in.k.size()), in.v = read("v", in.v.size());
    in.dout = read("dout", rows * D);
    const std::vector<int32_t>& chosen = file.bits.at(c.name + ": chosen");
    in.selection = {chosen.begin(), chosen.end()};
    Expected given;
    given.o = read("o", rows * D), given.gate = read("gate", rows), given.lse_given = read("lse given", rows);
    const AttentionPath path = {c.kernel, device_has_warpgroups(c.s.D)};
    const Results made = run_branch(in, path, path, &given);
    const auto put = [&](const char* name, const auto& x) {
        std::vector<float>& to = found.numbers[c.name + ": " + name];
        for (const auto& number : x) to.push_back(float(number));
    };
    put("out", made.out), put("lse", made.lse), put("dq", made.dq), put("dk", made.dk), put("dv", made.dv);
}
inline void run_choice(Arrays& found, const Arrays& file) {
    const NsaShape s = selection_shape();
    Inputs in(s, CMP, 1, 5);
    const auto read = [&](std::vector<double>& x, const char* name) {
        const std::vector<float>& from = Arrays::at(file.numbers, name, x.size());
        x.assign(from.begin(), from.end());
    };
    read(in.q, "choice: q"), read(in.k, "choice: k");
    const std::vector<uint32_t> chosen =
        run_selection(in, Arrays::at(file.numbers, "choice: lse", s.query_rows())).selection;
    found.bits["choice: selection"] = {chosen.begin(), chosen.end()};
}

inline Arrays run_all(const Arrays& inputs) {
    Arrays found;
    for (const Case& c : cases()) run_case(found, inputs, c);
    run_choice(found, inputs);
    return found;
}
inline Arrays make_inputs() {
    Arrays file;
    for (const Case& c : cases()) {
        const Inputs in(c.s, c.branch, 1, uint64_t(c.s.T) * 1000 + c.s.H);
        Expected e = expected_forward(in);
        expect_backward(e, in);
        put_inputs(file, c, in, e);
    }
    const Inputs in(selection_shape(), CMP, 1, 5);
    file.numbers["choice: q"] = narrowed(in.q), file.numbers["choice: k"] = narrowed(in.k);
    file.numbers["choice: lse"] = narrowed(expected_forward(in).lse);
    return file;
}
// Prints a line for each array; returns how many differ by more than they may.
inline int compare(const Arrays& found, const Arrays& file, std::FILE* out) {
    int bad = 0;
    std::fprintf(out, "%-48s %9s %16s %24s\n", "array", "elements", "other bits in", "worst share of its limit");
    for (const auto& [name, x] : found.numbers) {
        const std::vector<float>&theirs = Arrays::at(file.numbers, name, x.size()),
              &limit = Arrays::at(file.numbers, name + " limit", x.size());
        size_t others = 0;
        double worst = 0;
        for (size_t i = 0; i < x.size(); i++) {
            if (x[i] == theirs[i]) continue;  // infinities too
            const double share = std::fabs(double(x[i]) - double(theirs[i])) / (2 * double(limit[i]));
            others++;
            if (!(share <= worst)) worst = std::isnan(share) ? INFINITY : share;
        }
        bad += worst > 1;
        std::fprintf(out, "%-48s %9zu %16zu %24.3g%s\n", name.c_str(), x.size(), others, worst,
                     worst > 1 ? "   BEYOND" : "");
    }
    for (const auto& [name, x] : found.bits) {
        const std::vector<int32_t>& theirs = Arrays::at(file.bits, name, x.size());
        size_t others = 0;
        for (size_t i = 0; i < x.size(); i++) others += x[i] != theirs[i];
        bad += others > 0;
        std::fprintf(out, "%-48s %9zu %16zu %24s%s\n", name.c_str(), x.size(), others, "",
                     others ? "   DIFFERENT" : "");
    }
    return bad;
}

inline std::string device_name() {
#ifndef CUDA_ON_CPU
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    return format_text("%s, compute capability %d.%d", p.name, p.major, p.minor);
#else
    return "emulator";
#endif
}
inline int write_results(const std::string& path, std::FILE* out) {
    Arrays file = make_inputs();
    const Arrays found = run_all(file);
    file.numbers.insert(found.numbers.begin(), found.numbers.end());
    file.bits.insert(found.bits.begin(), found.bits.end());
    file.write(path, device_name());
    std::fprintf(out, "%zu results of %s in %s; on the other device: build/test_device --compare-results %s\n",
                 found.numbers.size() + found.bits.size(), device_name().c_str(), path.c_str(), path.c_str());
    return 0;
}
inline int compare_results(const std::string& path, std::FILE* out) {
    const SafeTensors tensors(path);
    Arrays file;
    file.read(tensors);
    const Arrays found = run_all(file);
    const int bad = compare(found, file, out);
    std::fprintf(out, "%s against %s (%s): %zu arrays, %d beyond the limits\n", device_name().c_str(),
                 tensors.metadata.at("device").c_str(), path.c_str(), found.numbers.size() + found.bits.size(), bad);
    return bad ? 1 : 0;
}
// The program's exit status; -1: the words ask for neither.
inline int main_of(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode != "--write-results" && mode != "--compare-results") return -1;
    try {
        if (argc != 3) fail_usage("usage: %s --write-results FILE or --compare-results FILE", argv[0]);
        return mode == "--write-results" ? write_results(argv[2], stdout) : compare_results(argv[2], stdout);
    } catch (const Error& e) {
        std::fprintf(stderr, "test_device: error: %s\n", e.what());
        return e.status;
    }
}

}  // namespace device_results

// Two orders of threads, and approximations that are off or not, agree; a selection or a number that is wrong does not.
#ifndef EMU_CHECK
TEST(cuda_results_of_two_schedules_agree) {
    using namespace device_results;
    TempFolder folder;
    const std::string path = folder.file("results.safetensors");
    std::FILE* const out = std::tmpfile();
#ifdef CUDA_ON_CPU
    emu::machine.rough = false;
#endif
    CHECK_EQUAL(write_results(path, out), 0);
#ifdef CUDA_ON_CPU
    emu::seed(3), emu::machine.rough = true;
#endif
    CHECK_EQUAL(compare_results(path, out), 0);
#ifdef CUDA_ON_CPU
    emu::seed(0);
#endif
    Arrays file;
    file.read(SafeTensors(path));
    const Arrays true_file = file;
    CHECK_EQUAL(file.numbers.size(), cases().size() * 17 + 3);  // inputs, results and limits; of the choice inputs only
    std::vector<float>& dk = file.numbers["12 heads of 64, window: dk"];
    dk.at(70) += 4 * file.numbers["12 heads of 64, window: dk limit"].at(70);
    CHECK_EQUAL(compare(true_file.results(), file, out), 1);
    file = true_file, file.bits["choice: selection"].at(100) ^= 1;
    CHECK_EQUAL(compare(true_file.results(), file, out), 1);
    file = true_file, file.numbers.erase(cases()[0].name + ": q");
    CHECK_FAILS(1, "no array 12 heads of 64, compressed: q of 99840 elements", run_all(file));
    std::fclose(out);
}
#endif
#else
namespace device_results {
inline int main_of(int, char**) { return -1; }
}  // namespace device_results
#endif
