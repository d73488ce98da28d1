// device_results.h: do two devices, or two orders of threads, give the same?
//     build/cuda_tests --write-results FILE         in emulation
//     build/test_device --compare-results FILE      on a GPU: the same inputs; exit status 1 if something differs
// Selections have to be the same bits. Each number is within its limit of exact arithmetic (attention_kernel_tests.h)
// on either device, so the two may be two limits apart. Where this passes, what the emulator shows holds on the GPU.
#pragma once
#include <array>
#include <map>
#include <tuple>

#include "attention_kernel_tests.h"
#include "../../../lib/base/safetensors.h"

namespace device_results {

#ifndef PRECISION_FP32  // which has the plain kernels only
using namespace attention_tests;

struct DeviceResult {
    std::vector<float> found;
    std::vector<double> limit;  // none: bits, as numbers
};
using AllResults = std::map<std::string, DeviceResult>;

template <class T>
void put(AllResults& all, const std::string& name, const std::vector<T>& found, const std::vector<double>& limit = {}) {
    DeviceResult& array = all[name];
    for (const T& x : found) array.found.push_back(float(x));
    array.limit = limit;
}
// What this device makes of inputs that are the same everywhere.
inline AllResults run_all() {
    AllResults all;
    for (const auto& [T, heads, G, D] : {std::array<int, 4>{130, 6, 2, 64}, {80, 16, 1, 128}, {150, 5, 1, 32}})
        for (const auto& [what, branch, kernel] : {std::tuple("compressed", CMP, SelectedKernel::TILES),
                                                   {"window", WIN, SelectedKernel::TILES},
                                                   {"selected, tiles", SLC, SelectedKernel::TILES},
                                                   {"selected, gathered", SLC, SelectedKernel::GATHER}}) {
            NsaShape s = shape(T, heads, G, D);
            s.l = 8, s.d = 4;
            if (branch == SLC) s.slc_count = s.slc_blocks();  // a query may choose them all
            const Inputs in(s, branch, 1, uint64_t(T) * 1000 + s.H);
            Expected e = expected_forward(in);
            expect_backward(e, in);
            const AttentionPath path = {kernel, device_has_warpgroups(D)};
            const Results r = run_branch(in, path, path, &e);
            const std::string name = format_text("%d heads of %d, %s: ", s.H, D, what);
            put(all, name + "out", r.out, e.out_limit), put(all, name + "lse", r.lse, e.lse_limit);
            put(all, name + "dq", r.dq, e.dq_limit), put(all, name + "dk", r.dk, e.dk_limit);
            put(all, name + "dv", r.dv, e.dv_limit);
        }
    NsaShape s = shape(500, 6, 2);
    s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 6;
    const Inputs in(s, CMP, 1, 5);
    const std::vector<double> lse = expected_forward(in).lse;
    std::vector<uint8_t> bits;
    for (const uint32_t word : run_selection(in, std::vector<float>(lse.begin(), lse.end())).selection)
        for (int i = 0; i < 32; i++) bits.push_back(word >> i & 1);
    put(all, "selection", bits);
    return all;
}
// Prints a line for each array; returns how many differ by more than they may.
inline int compare(const AllResults& found, const SafeTensors& file, std::FILE* out) {
    int bad = 0;
    std::fprintf(out, "%-40s %9s %16s %24s\n", "array", "elements", "other values in", "worst share of its limit");
    for (const auto& [name, array] : found) {
        const size_t n = array.found.size();
        const float* const theirs = static_cast<const float*>(file.get(name, "F32", {int64_t(n)}).data);
        size_t others = 0;
        double worst = 0;
        for (size_t i = 0; i < n; i++) {
            if (array.found[i] == theirs[i]) continue;  // infinities too
            others++;
            const double share = array.limit.empty()
                                     ? INFINITY
                                     : std::fabs(double(array.found[i]) - double(theirs[i])) / (2 * array.limit[i]);
            if (!(share <= worst)) worst = std::isnan(share) ? INFINITY : share;
        }
        bad += worst > 1;
        std::fprintf(out, "%-40s %9zu %16zu %24.3g%s\n", name.c_str(), n, others, worst, worst > 1 ? "   BEYOND" : "");
    }
    std::fprintf(out, "%zu arrays, %d beyond the limits\n", found.size(), bad);
    return bad;
}
inline void write_results(const AllResults& all, const std::string& path) {
    std::vector<TensorView> views;
    for (const auto& [name, array] : all)
        views.push_back(tensor_view(name, {int64_t(array.found.size())}, array.found.data()));
    write_safetensors(path, {}, views);
}
#endif

// The program's exit status; -1: the words ask for neither.
inline int main_of([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
#ifndef PRECISION_FP32
    const std::string mode = argc == 3 ? argv[1] : "";
    try {
        if (mode == "--write-results") return write_results(run_all(), argv[2]), 0;
        if (mode == "--compare-results") return compare(run_all(), SafeTensors(argv[2]), stdout) ? 1 : 0;
    } catch (const Error& e) {
        std::fprintf(stderr, "tests: error: %s\n", e.what());
        return e.status;
    }
#endif
    return -1;
}

}  // namespace device_results

// Two orders of threads, and approximations that are off or not, agree; a selection or a number that is wrong does not.
#if defined(CUDA_ON_CPU) && !defined(EMU_CHECK)
TEST(cuda_results_of_two_schedules_agree) {
    using namespace device_results;
    TempFolder folder;
    const std::string path = folder.file("results.safetensors");
    std::FILE* const out = std::tmpfile();
    emu::machine.rough = false;
    write_results(run_all(), path);
    emu::seed(3), emu::machine.rough = true;
    const AllResults second = run_all();
    emu::seed(0);
    CHECK_EQUAL(compare(second, SafeTensors(path), out), 0);
    for (const std::string name : {"12 heads of 64, window: dk", "selection"}) {
        AllResults wrong = second;
        DeviceResult& array = wrong.at(name);
        array.found.at(70) += array.limit.empty() ? 1 : float(6 * array.limit.at(70));
        CHECK_EQUAL(compare(wrong, SafeTensors(path), out), 1);
    }
    std::fclose(out);
}
#endif
