// attention.h: test_nsa --perf-attention [options of train]: attention alone, every branch, forward and backward, from 2048 tokens to --seq-len (default 65536)
// at a constant number of tokens (--batch times --seq-len). On a GPU, or in emulation at a toy size, where only the arithmetic means something.
//
// A time is the median of CUDA-event timings after warm-up. Three sets of inputs take turns, each larger than any GPU's L2 cache at 64k tokens, so nothing is found warm
// that training would not find warm. Arithmetic and bytes are counted from the shapes (perf.h), ceilings are measured in the same run.
// The selected branch is timed on two selections, since its price depends on what neighbouring tokens have in common: "shared", where 64 neighbours share three
// quarters of what they may choose, and "scattered", where they share only what all are given; by masked tiles and by gathered rows each.
#pragma once
#include "../../nsa_kernels.cuh"
#include "perf.h"

// A floor per layer in microseconds on an H200 at 790 TFLOP/s and 4.8 TB/s, counted by hand (all branches, scores, exponentials), for 12 heads of 64 in 2
// groups and the paper's l, d, l', n, w; given for `sequences` of T tokens.
struct CountedFloor {
    int T, sequences;
    double forward, backward, dense_forward, dense_backward;
};
constexpr CountedFloor COUNTED_FLOORS[] = {{2048, 16, 233, 465, 131, 326}, {8192, 1, 72, 146, 130, 326}, {32768, 1, 473, 847, 2088, 5219}, {65536, 1, 1427, 2352, 8351, 20877}};

struct AttentionRow {
    int T, B;
    std::string name;
    Work work[2];            // forward, backward
    double us[2] = {0, 0};   // 0: there is no such pass
    bool in_total = false;   // of an NSA layer
};

// Every array that attention reads and writes.
struct AttentionSet {
    Timed<Cuda>& dev;
    Cuda::real *q, *dout, *o, *combined, *k, *v, *dk, *dv;
    float *lse, *lse_gated, *row_dot, *gate, *dgate, *dq;
    uint32_t *shared, *scattered, *chosen;

    AttentionSet(Timed<Cuda>& device, const NsaShape& s, uint64_t seed) : dev(device) {
        const size_t rows = s.query_rows(), D = size_t(s.D), keys = s.key_rows(), words = size_t(s.B) * s.G * s.T * size_t(s.selection_words());
        std::vector<float> pool(size_t(1) << 16);
        for (size_t i = 0; i < pool.size(); i++) pool[i] = float(random_normal(seed, random_stream(RANDOM_TEST, 90), i));
        std::vector<float> values(std::max(rows, keys) * D);
        auto filled = [&](size_t count, size_t stride) {  // numbers of the pool, in another order for each array
            for (size_t i = 0; i < count; i++) values[i] = pool[(i * stride + i / pool.size() * 40503) % pool.size()];
            Cuda::real* p = dev.allocate<Cuda::real>(count);
            dev.from_host(p, values.data(), count);
            return p;
        };
        q = filled(rows * D, 1), dout = filled(rows * D, 3), k = filled(keys * D, 5), v = filled(keys * D, 7);
        o = dev.allocate<Cuda::real>(3 * rows * D), combined = dev.allocate<Cuda::real>(rows * D), dk = dev.allocate<Cuda::real>(keys * D), dv = dev.allocate<Cuda::real>(keys * D);
        for (float** p : {&lse, &lse_gated, &row_dot, &gate, &dgate}) *p = dev.allocate<float>(3 * rows);
        dq = dev.allocate<float>(rows * D);
        dev.zero(dq, rows * D), dev.zero(row_dot, 3 * rows);
        const std::vector<float> half(3 * rows, 0.5f);
        dev.copy(gate, half.data(), half.size());
        for (uint32_t** p : {&shared, &scattered, &chosen}) *p = dev.allocate<uint32_t>(words);
        const std::vector<uint32_t> a = selection(s, seed, 3, 4), b = selection(s, seed, 0, 1);
        dev.copy(shared, a.data(), words), dev.copy(scattered, b.data(), words);
    }
    ~AttentionSet() {
        for (Cuda::real* p : {q, dout, o, combined, k, v, dk, dv}) dev.release(p);
        for (float* p : {lse, lse_gated, row_dot, gate, dgate, dq}) dev.release(p);
        for (uint32_t* p : {shared, scattered, chosen}) dev.release(p);
    }
    // Each query its forced blocks, then as many others as it may take, of which 64 neighbours share common / of.
    static std::vector<uint32_t> selection(const NsaShape& s, uint64_t seed, int common, int of) {
        const size_t words = size_t(s.selection_words());
        std::vector<uint32_t> masks(size_t(s.B) * s.G * s.T * words);
#pragma omp parallel for schedule(static)
        for (size_t row = 0; row < masks.size() / words; row++) {
            const int last = int(row % size_t(s.T)) / s.slc_block, count = std::min(last + 1, s.slc_count);
            int chosen = 0;
            auto take = [&](int block) {
                uint32_t& word = masks[row * words + size_t(block) / 32];
                if (!(word >> (block % 32) & 1)) word |= 1u << (block % 32), chosen++;
            };
            for (int block : {0, std::max(last - 1, 0), last}) take(block);
            const int together = chosen + (count - chosen) * common / of;
            const uint64_t blocks = uint64_t(last) + 1;
            for (uint64_t i = 0; chosen < together; i++) take(int(random_below(blocks, seed, random_stream(RANDOM_TEST, 91 + row / 64), i)));
            for (uint64_t i = 0; chosen < count; i++) take(int(random_below(blocks, seed, random_stream(RANDOM_TEST, 1000000007 + row), i)));
        }
        return masks;
    }
};

// The median of `repetitions` timings of operation(set), in microseconds; the sets take turns, and each is used once before.
template <class F>
double median_us(Timed<Cuda>& dev, std::vector<std::unique_ptr<AttentionSet>>& sets, int repetitions, F operation) {
    for (auto& set : sets) operation(*set);
    struct Marks {
        cudaEvent_t begin, end;
    };
    std::vector<Marks> marks(size_t(repetitions), Marks{});
    for (size_t i = 0; i < marks.size(); i++) {
        CUDA_CHECK(cudaEventCreate(&marks[i].begin));
        CUDA_CHECK(cudaEventCreate(&marks[i].end));
        CUDA_CHECK(cudaEventRecord(marks[i].begin, dev.stream));
        operation(*sets[i % sets.size()]);
        CUDA_CHECK(cudaEventRecord(marks[i].end, dev.stream));
    }
    dev.wait();
    std::vector<double> us;
    for (Marks& m : marks) {
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, m.begin, m.end));
        us.push_back(1e3 * double(ms));
        cudaEventDestroy(m.begin), cudaEventDestroy(m.end);
    }
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

// One length: every branch of s, then full attention of the same shape.
inline std::vector<AttentionRow> time_attention(Timed<Cuda>& dev, const NsaShape& s, int set_count, int repetitions, std::FILE* out) {
    std::vector<std::unique_ptr<AttentionSet>> sets;
    for (int i = 0; i < set_count; i++) sets.push_back(std::make_unique<AttentionSet>(dev, s, uint64_t(i + 1)));
    std::vector<AttentionRow> rows;
    const size_t n = s.query_rows(), D = size_t(s.D);
    const double real = sizeof(Cuda::real);
    // The engine's own functions, without the clocks of Timed.
    auto branch = [&](const std::string& name, Branch b, const NsaShape& shape, uint32_t* AttentionSet::*selection, bool in_total) {
        AttentionRow row{s.T, s.B, name, {attention_forward_work(b, shape, real), attention_backward_work(b, shape, real)}};
        auto selected = [&](AttentionSet& x) { return selection ? x.*selection : nullptr; };
        row.us[0] = median_us(dev, sets, repetitions, [&](AttentionSet& x) { dev.Cuda::attention_forward(b, x.o + b * n * D, x.lse + b * n, x.q, x.k, x.v, selected(x), shape); });
        row.us[1] = median_us(dev, sets, repetitions,
                              [&](AttentionSet& x) { dev.Cuda::attention_backward(b, x.dq, x.dk, x.dv, x.dout, x.q, x.k, x.v, x.row_dot + b * n, x.lse + b * n, selected(x), shape); });
        row.in_total = in_total;
        rows.push_back(row);
    };
    branch("compressed", CMP, s, nullptr, true);
    AttentionRow scores{s.T, s.B, "scores and choice", {select_blocks_work(s, real), {}}};
    scores.us[0] = median_us(dev, sets, repetitions, [&](AttentionSet& x) { dev.Cuda::select_blocks(x.chosen, nullptr, x.q, x.k, x.lse, s); });
    scores.in_total = true;
    rows.push_back(scores);
    const SelectedKernel asked = dev.selected_kernel;
    for (uint32_t* AttentionSet::*selection : {&AttentionSet::shared, &AttentionSet::scattered}) {
        const std::string kind = selection == &AttentionSet::shared ? "shared" : "scattered";
        for (const SelectedKernel kernel : {SelectedKernel::TILES, SelectedKernel::GATHER}) {
            dev.selected_kernel = kernel;
            branch("selected, " + kind + (kernel == SelectedKernel::TILES ? ", tiles" : ", gathered"), SLC, s, selection, false);
        }
        dev.selected_kernel = SelectedKernel::AUTO;
        branch("selected, " + kind + ", auto", SLC, s, selection, selection == &AttentionSet::shared);
        std::fprintf(out, "T %d, %s: %s\n", s.T, kind.c_str(), dev.describe_selected(s).c_str());
    }
    dev.selected_kernel = asked;
    branch("window", WIN, s, nullptr, true);
    AttentionRow sum{s.T, s.B, "gated sum, row terms", {{6 * double(n) * s.D, real * 4 * double(n) * s.D + 12 * double(n)}, {6 * double(n) * s.D, real * 4 * double(n) * s.D + 60 * double(n)}}};
    sum.us[0] = median_us(dev, sets, repetitions, [&](AttentionSet& x) { dev.Cuda::combine_forward(x.combined, x.o, x.gate, s); });
    sum.us[1] = median_us(dev, sets, repetitions, [&](AttentionSet& x) { dev.Cuda::attention_backward_rows(x.row_dot, x.lse_gated, x.dgate, x.dout, x.o, x.gate, x.lse, s); });
    sum.in_total = true;
    rows.push_back(sum);
    NsaShape full = s;
    full.full = true;
    branch("full attention", WIN, full, nullptr, false);
    AttentionRow total{s.T, s.B, "NSA, all of the above", {}};
    for (const AttentionRow& row : rows)
        for (int pass = 0; pass < 2 && row.in_total; pass++) total.us[pass] += row.us[pass], total.work[pass].flops += row.work[pass].flops, total.work[pass].bytes += row.work[pass].bytes;
    rows.push_back(total);
    return rows;
}

inline void print_attention_rows(const std::vector<AttentionRow>& rows, const Ceilings& ceilings, std::FILE* out) {
    std::fprintf(out, "\n%7s %4s %-32s %-9s %11s %10s %10s %9s %7s %9s %7s\n", "T", "B", "operation", "pass", "us", "GFLOP", "MB", "TFLOP/s", "of peak", "GB/s", "of peak");
    for (const AttentionRow& row : rows)
        for (int pass = 0; pass < 2; pass++) {
            if (row.us[pass] <= 0) continue;
            const double seconds = row.us[pass] * 1e-6, flops = row.work[pass].flops / seconds, bytes = row.work[pass].bytes / seconds;
            std::fprintf(out, "%7d %4d %-32s %-9s %11.1f %10.2f %10.2f %9.2f %6.1f%% %9.1f %6.1f%%\n", row.T, row.B, row.name.c_str(), pass ? "backward" : "forward", row.us[pass], row.work[pass].flops * 1e-9,
                        row.work[pass].bytes * 1e-6, flops * 1e-12, 100 * flops / ceilings.flops_per_second, bytes * 1e-9, 100 * bytes / ceilings.bytes_per_second);
        }
    const AttentionRow &full = rows[rows.size() - 2], &nsa = rows.back();
    std::fprintf(out, "        NSA / full attention: %.2f forward, %.2f backward\n", nsa.us[0] / full.us[0], nsa.us[1] / full.us[1]);
    for (const CountedFloor& f : COUNTED_FLOORS)
        if (f.T == nsa.T) {
            const double scale = double(nsa.B) / f.sequences;
            std::fprintf(out, "        floor on an H200, counted for 12 heads of 64: NSA %.0f forward, %.0f backward; full attention %.0f, %.0f\n", f.forward * scale, f.backward * scale, f.dense_forward * scale,
                        f.dense_backward * scale);
        }
    std::fflush(out);
}

// Lengths first_length, twice that, ... c.seq_len, of c.batch * c.seq_len tokens each; the report goes to `out`.
inline std::vector<AttentionRow> run_attention(Timed<Cuda>& dev, const Config& c, int first_length, int set_count, int repetitions, int ceiling_size, std::FILE* out) {
    const Ceilings ceilings = measure_ceilings(dev, ceiling_size);
    std::fprintf(out, "attention of one layer, %lld tokens in all, %lld heads in %lld groups of dimension %lld, on %s\n", (long long)(c.batch * c.seq_len), (long long)c.heads, (long long)c.kv_groups, (long long)c.head_dim,
                dev.describe().c_str());
    ceilings.print(out);
    std::vector<AttentionRow> all;
    for (int64_t T = first_length; T <= c.seq_len; T *= 2) {
        const std::vector<AttentionRow> rows = time_attention(dev, shape_of(c, c.batch * c.seq_len / T, T), set_count, repetitions, out);
        print_attention_rows(rows, ceilings, out);
        all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
}
inline int run_attention_bench(int argc, const char* const* argv) {
    std::set<std::string> given;
    Config c = parse_options(argc, argv, given);
    if (!given.count("model")) c.model = "125m";
    if (!given.count("seq-len")) c.seq_len = 65536, given.insert("seq-len");
    if (!given.count("batch")) c.batch = 1, given.insert("batch");
    apply_preset(c, given);
    validate_model(c, "options");
    World world;
    if (!choose_device(c, world).gpu) fail("--perf-attention: there is no GPU to time attention on (or the build holds no CUDA engine)");
    Timed<Cuda> dev(0);
    run_attention(dev, c, 2048, 3, 15, 0, stdout);
    return 0;
}
