// bench_tests.h: what the benchmarks count, against independent counts; and that they run. The times mean nothing in emulation.
#pragma once
#include "cuda_model_tests.h"
#include "../bench/attention.h"

namespace bench_tests {

inline NsaShape bench_shape(int T, bool full = false) {
    NsaShape s;
    s.B = 2, s.T = s.queries = T, s.H = 6, s.G = 2, s.D = 16, s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 4, s.window = 24, s.F = 8, s.full = full;
    return s;
}
// Pairs of queries and keys, one by one, by the definition of the branch.
inline double counted_pairs(Branch branch, const NsaShape& s, bool only_choosing) {
    double pairs = 0;
    for (int t = 0; t < s.T; t++) {
        const int own = t / s.slc_block;
        if (only_choosing && own + 1 <= s.slc_count) continue;
        for (int key = 0; key < s.T; key++) {
            if (branch == CMP) pairs += key * s.d + s.l - 1 <= t;
            else if (branch == WIN) pairs += key <= t && (s.full || key > t - s.window);
            else pairs += key <= t && (own + 1 <= s.slc_count || key / s.slc_block > own - s.slc_count);  // any n blocks with its own: the last n, here
        }
    }
    return pairs * s.B * s.H;
}

// What a benchmark has printed.
struct Report {
    std::FILE* file = std::tmpfile();
    ~Report() { std::fclose(file); }
    std::string text() const {
        std::string all;
        std::rewind(file);
        for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) all += char(c);
        return all;
    }
};

}  // namespace bench_tests

TEST(cuda_bench_counts) {
    using namespace bench_tests;
    for (const bool full : {false, true})
        for (const int T : {8, 30, 64, 65, 150}) {
            const NsaShape s = bench_shape(T, full);
            for (const Branch branch : {CMP, SLC, WIN}) {
                if (!s.has(branch)) continue;
                // Two products of D multiply-adds for each pair forward, four backward.
                const double pairs = counted_pairs(branch, s, false);
                CHECK_EQUAL(attention_forward_work(branch, s, 2).flops, 2.0 * 2 * s.D * pairs);
                CHECK_EQUAL(attention_backward_work(branch, s, 2).flops, 4.0 * 2 * s.D * pairs);
                // The arrays, one by one.
                const size_t keys = branch == CMP ? size_t(s.B) * s.G * s.cmp_blocks(T) : size_t(s.B) * s.G * T, rows = size_t(s.B) * s.H * T;
                const std::vector<uint16_t> q(rows * s.D), k(keys * s.D);
                const std::vector<float> lse(rows), dq(rows * s.D);
                const std::vector<uint32_t> selection(branch == SLC ? size_t(s.B) * s.G * T * ((s.slc_blocks() + 31) / 32) : 0);
                const double wide = double(q.size() * sizeof(uint16_t)), key = double(k.size() * sizeof(uint16_t)), statistic = double(lse.size() * sizeof(float)), masks = double(selection.size() * sizeof(uint32_t));
                CHECK_EQUAL(attention_forward_work(branch, s, 2).bytes, wide + wide + key + key + statistic + masks);
                CHECK_EQUAL(attention_backward_work(branch, s, 2).bytes, wide + wide + 4 * key + 2 * double(dq.size() * sizeof(float)) + 2 * statistic + masks);
            }
            if (!full) CHECK_EQUAL(select_blocks_work(s, 2).flops, 2.0 * s.D * counted_pairs(CMP, s, true));
        }
}
// The operations beside attention: array by array, and their arithmetic in loops.
TEST(cuda_bench_counts_beside_attention) {
    using namespace bench_tests;
    for (const bool full : {false, true})
        for (const int T : {6, 8, 65, 150}) {
            const NsaShape s = bench_shape(T, full);
            const double real = 2, N = s.B * T, wide = N * s.H * s.D * real, narrow = N * s.G * s.D * real, statistic = N * s.H * 4.0;
            // Heads. In: a row of the projection. Out: q, keys and values of one branch or of three, three gates a head. Rotated: q and every key but the compressed branch's.
            const int branches = full ? 1 : 3;
            double rotations = 0;
            for (int token = 0; token < s.B * T; token++)
                for (int head = 0; head < s.H + (full ? 1 : 2) * s.G; head++)
                    for (int pair = 0; pair < s.D / 2; pair++) rotations++;
            const double heads = wide + 2 * branches * narrow + (full ? 0 : 3 * statistic), row = N * s.projected() * real;
            CHECK_EQUAL(split_heads_forward_work(s, real).flops, 6 * rotations);
            CHECK_EQUAL(split_heads_forward_work(s, real).bytes, row + heads);
            CHECK_EQUAL(split_heads_backward_work(s, real).flops, 6 * rotations);
            CHECK_EQUAL(split_heads_backward_work(s, real).bytes, row + heads + wide);  // dq has twice the bytes
            // Gated sum: a product and an addition a branch and element. Backwards the dot products.
            CHECK_EQUAL(combine_forward_work(s, real).flops, 2.0 * branches * N * s.H * s.D);
            CHECK_EQUAL(combine_forward_work(s, real).bytes, branches * wide + wide + (full ? 0 : 3 * statistic));
            CHECK_EQUAL(attention_backward_rows_work(s, real).flops, 2.0 * branches * N * s.H * s.D);
            CHECK_EQUAL(attention_backward_rows_work(s, real).bytes, branches * wide + wide + (full ? 3 : 15) * statistic);
            if (full) continue;
            // phi: for each block that fits, F sums of l D products, and D sums of F.
            double products = 0, blocks = 0;
            for (int sequence = 0; sequence < s.B * s.G; sequence++)
                for (int begin = 0; begin + s.l <= T; begin += s.d) blocks++, products += s.F * (s.l * s.D) + s.D * s.F;
            const double weights = s.F * s.l * s.D + s.F + s.D * s.F;
            CHECK_EQUAL(compress_forward_work(s, real).flops, 2 * products);
            CHECK_EQUAL(compress_forward_work(s, real).bytes, narrow + real * (blocks * s.D + blocks * s.F + weights));
            CHECK_EQUAL(compress_backward_work(s, real).flops, 2 * 2 * products);
            CHECK_EQUAL(compress_backward_work(s, real).bytes, 2 * narrow + real * (blocks * s.D + blocks * s.F + weights) + 2 * 4 * weights);
        }
}
TEST(cuda_bench_selections) {
    using namespace bench_tests;
    const NsaShape s = bench_shape(300);
    for (const int common : {0, 1}) {
        const std::vector<uint32_t> masks = AttentionSet::selection(s, 7, common, 1);
        for (int row = 0; row < s.B * s.G * s.T; row++) {
            const int last = row % s.T / s.slc_block;
            int count = 0;
            for (int block = 0; block < s.selection_words() * 32; block++) {
                const bool bit = masks[size_t(row) * s.selection_words() + block / 32] >> block % 32 & 1;
                count += bit;
                if (bit) CHECK(block <= last);
                else CHECK(block != 0 && block != last && block != last - 1);
            }
            CHECK_EQUAL(count, std::min(last + 1, s.slc_count));
        }
    }
}
TEST(cuda_bench_attention_runs) {
    if (MODEL_FP32) return skip("the attention benchmark: PRECISION=FP32 has the scalar kernels only");
    Config c = cuda_config();
#ifdef EMU_CHECK
    const int lengths = 1, sets = 1;  // every access is judged, which takes its time
#else
    const int lengths = 2, sets = 2;
#endif
    c.seq_len = 64 * lengths, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    const std::vector<AttentionRow> rows = run_attention(dev, c, 64, sets, sets, 64, report.file);
    REQUIRE(rows.size() == size_t(lengths * 12));
    for (size_t length = 0; length < size_t(lengths); length++) {
        Work total[2];
        for (size_t i = length * 12; i < (length + 1) * 12; i++) {
            CHECK_EQUAL(rows[i].T, length ? 128 : 64);
            CHECK_EQUAL(rows[i].B, length ? 1 : lengths);
            CHECK(rows[i].us[0] > 0 && (rows[i].us[1] > 0 || rows[i].name == "scores and choice"));
            const std::string& name = rows[i].name;
            if (name == "compressed" || name == "scores and choice" || name == "selected, shared, auto" || name == "window" || name == "gated sum, row terms")
                for (int pass = 0; pass < 2; pass++) total[pass].flops += rows[i].work[pass].flops, total[pass].bytes += rows[i].work[pass].bytes;
        }
        for (int pass = 0; pass < 2; pass++) {
            CHECK_EQUAL(rows[length * 12 + 11].work[pass].flops, total[pass].flops);
            CHECK_EQUAL(rows[length * 12 + 11].work[pass].bytes, total[pass].bytes);
        }
    }
    const std::string text = report.text();
    for (const char* part : {"ceilings measured in this run", "T 64, scattered: selected branch by", "selected, shared, gathered", "NSA / full attention"}) CHECK(text.find(part) != std::string::npos);
    CHECK(text.find("nan") == std::string::npos && text.find("inf ") == std::string::npos);
}
// The clock around a whole training step: every operation is timed, and the sum of the products' arithmetic is that of the layers.
TEST(cuda_bench_step_runs) {
    Config c = cuda_config();
    c.seq_len = 64, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    CHECK_EQUAL(perf_on<Cuda>(dev, c, 2, 64, report.file), 0);
    CHECK(report.text().find("\nall operations ") != std::string::npos && report.text().find("the median of 2") != std::string::npos);
    const auto& times = dev.times;
    for (const char* name : {"embedding_forward", "rmsnorm_backward", "matmul_forward", "attention_forward, compressed", "attention_forward, selected", "attention_forward, window",
                             "attention_backward, selected", "select_blocks", "compress_backward", "classifier", "adamw"}) {
        REQUIRE(times.count(name) == 1);
        CHECK(times.at(name).seconds > 0 && times.at(name).calls > 0);
    }
    const double N = 64, C = double(c.dim), P = shape_of(c, 1, 64).projected(), HD = double(c.heads * c.head_dim), M = double(c.mlp_hidden), Vp = double(TensorTable(c).padded_vocab);
    CHECK_EQUAL(times.at("matmul_forward").flops, 2 * N * (double(c.layers) * (C * P + HD * C + 2 * C * M) + C * Vp));
    CHECK_EQUAL(times.at("attention_forward, window").calls, c.layers);
    CHECK_EQUAL(times.at("split_heads_forward").bytes, c.layers * split_heads_forward_work(shape_of(c, 1, 64), sizeof(Cuda::real)).bytes);
    CHECK_EQUAL(times.at("compress_backward").flops, 2 * c.layers * compress_backward_work(shape_of(c, 1, 64), sizeof(Cuda::real)).flops);  // keys and values
    CHECK_EQUAL(times.at("classifier").bytes, 2 * N * Vp * sizeof(Cuda::real));  // logits read, gradients written
}
// Full attention has names of its own.
TEST(cuda_bench_full_step_runs) {
    Config c = cuda_config("--attention full --recompute 1");
    c.seq_len = 64, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    CHECK_EQUAL(perf_on<Cuda>(dev, c, 1, 64, report.file), 0);
    for (const char* name : {"attention_forward, full attention", "attention_backward, full attention"}) CHECK(dev.times.count(name) == 1);
    for (const auto& [name, time] : dev.times) CHECK(name.find("window") == std::string::npos);
}
#ifndef PRECISION_FP32
// 64k tokens on one GPU of 80 GB (80 GiB less what driver and context take: 79 GiB are counted on): the preset 125m at B = 1 with --recompute 1 or 2, with
// parameters, gradients and moments, cuBLASLt's workspace, and the scratch memory of the kernels.
TEST(cuda_bench_64k_tokens_fit_80_gb) {
    Cuda dev(0, size_t(1) << 20);
    double before = 1e30;
    for (const char* recompute : {"0", "1", "2"}) {
        const char* words[] = {"train_nsa", "--model", "125m", "--seq-len", "65536", "--total-batch", "65536", "--batch", "1", "--recompute", recompute};
        std::set<std::string> given;
        Config c = parse_options(int(std::size(words)), words, given);
        apply_preset(c, given);
        validate_model(c, "test");
        const NsaShape s = shape_of(c, 1, 65536);
        size_t scratch = 0;
        for (const Branch branch : {CMP, SLC, WIN})
            for (const bool backward : {false, true}) scratch = std::max(scratch, attention_workspace_bytes(branch, s, SelectedKernel::GATHER, backward));
        scratch += 2 * s.key_rows() * s.D * sizeof(float) + s.cmp_rows() * s.F * (sizeof(float) + 2 * sizeof(uint16_t));  // of compress_backward
        const double GiB = double(size_t(1) << 30), per_parameter = 2 + 4 + 4 + 2 * 4;  // bf16, its master, gradient, two moments
        const double fixed = (double(TensorTable(c).total) * per_parameter + double(Cuda::WORKSPACE)) / GiB;
        const double activations = double(Activations<Cuda>::bytes_needed(dev, c, 1, 65536, TRAINING)) / GiB, all = fixed + activations + double(scratch) / GiB;
        std::printf("    125m, 1 x 65536, --recompute %s: %.2f GiB = activations %.2f, parameters, gradients and moments %.2f, scratch %.2f\n", recompute, all, activations, fixed, double(scratch) / GiB);
        if (c.recompute > 0) CHECK(all < 79);
        CHECK(double(scratch) / GiB < 0.5);
        CHECK(all < before);
        before = all;
    }
}
#endif
