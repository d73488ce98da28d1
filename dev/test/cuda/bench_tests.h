// bench_tests.h: what the benchmark of attention counts, that the benchmarks run, and what fits a GPU's memory. The
// times mean nothing in emulation.
#pragma once
#include "../ops/attention_tests.h"
#include "cuda_model_tests.h"
#include "../../bench/attention.h"

namespace bench_tests {

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

// The pairs are counted one by one in model_flops_are_those_of_its_products, except those of the queries that choose.
TEST(cuda_bench_counts) {
    for (const int T : {30, 64, 65, 150}) {
        const NsaShape s = nsa_shape(2, T, 2, 3, 16, 8, 4, 16, 4, 24);
        for (const Branch branch : {CMP, SLC, WIN}) {
            // Two products of D multiply-adds for each pair forward, four backward; and dout . o of each row.
            const double product = 2.0 * s.D * attention_pairs(branch, s);
            CHECK_EQUAL(attention_forward_work(branch, s, 2).flops, 2 * product);
            CHECK_EQUAL(attention_backward_work(branch, s, 2).flops, 4 * product);
            CHECK_EQUAL(branches_backward_work(s, 2, 1u << branch).flops, 4 * product + 2.0 * s.D * s.B * s.H * T);
        }
        double pairs = 0;
        for (int t = s.slc_count * s.slc_block; t < T; t++)
            for (int block = 0; block * s.d + s.l - 1 <= t; block++) pairs++;
        CHECK_EQUAL(select_blocks_work(s, 2).flops, 2.0 * s.D * s.B * s.H * pairs);
    }
}
// Attention alone, with every kind of selection: each row has a time, and the sums of the table are those of their
// rows.
TEST(cuda_bench_attention_runs) {
    if (Cuda::FP32) return skip("the attention benchmark: PRECISION=FP32 has the plain kernels only");
    Config c = engine_config();
    c.seq_len = 64, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    double parts = 0, whole = 0;
    for (const AttentionRow& row : run_attention(dev, c, 64, 1, 1, 64, report.file)) {
        CHECK(row.us[0] > 0 && row.T == 64 && row.B == 1);
        if (row.name == WHOLE_UNIFORM) whole = row.us[0];
        if (row.whole[0] & NSA_UNIFORM) parts += row.us[0];
    }
    CHECK(whole > 0);
    CHECK_NEAR(whole, parts, 1e-9 * parts);
    const std::string text = report.text();
    CHECK(text.find("\nresult: ") != std::string::npos && text.find("nan") == std::string::npos);
}
// The clock around a whole training step: every operation is timed, and the sum of the products' arithmetic is that of
// the layers. Full attention has names of its own, and so has a step that computes again what was not kept.
TEST(cuda_bench_step_runs) {
    for (const bool full : {false, true}) {
        Config c = engine_config(full ? "--attention full --recompute 1" : "");
        c.seq_len = 64, c.batch = 1;
        Timed<Cuda> dev(0, size_t(1) << 20);
        const bench_tests::Report report;
        CHECK_EQUAL(perf_on<Cuda>(dev, c, 1, 64, report.file), 0);
        CHECK(report.text().find("\nresult: ") != std::string::npos);
        std::vector<const char*> names = {"embedding_forward", "rmsnorm_backward", "classifier", "adamw"};
        const char* const sum = dev.plain_attention ? "combine_forward" : "attention_forward, selected, window, sum";
        if (full) names.push_back("attention_forward, full attention");
        else names.insert(names.end(), {sum, "select_blocks", "compress_backward"});
        for (const char* name : names) {
            REQUIRE(dev.times.count(name) == 1);
            CHECK(dev.times.at(name).seconds > 0 && dev.times.at(name).calls > 0);
        }
        if (full) continue;
        // Three products for every matrix, of the same size.
        const double N = 64, C = double(c.dim), P = shape_of(c, 1, 64).projected(), HD = double(c.heads * c.head_dim),
                     M = double(c.mlp_hidden), Vp = double(TensorTable(c).padded_vocab);
        double flops = 0;
        for (const auto& [name, time] : dev.times)
            if (name.compare(0, 8, "product ") == 0) flops += time.flops;
        CHECK_EQUAL(flops, 6 * N * (double(c.layers) * (C * P + HD * C + 2 * C * M) + C * Vp));
    }
    Config c = engine_config();
    c.seq_len = 64, c.batch = 1;
    Timed<Cpu<float>> cpu;
    const bench_tests::Report report;
    CHECK_EQUAL(perf_on<Cpu<float>>(cpu, c, 1, 64, report.file), 0);
    CHECK(report.text().find("\nresult: ") != std::string::npos);
}
#ifndef PRECISION_FP32
// What training takes fits the GPUs that it is for, less what driver, context and a desktop take: activations,
// parameters, gradients and moments, cuBLASLt's workspace, and the scratch memory of the kernels. The presets; and 64k
// tokens on one GPU of 80 GB with --recompute, which takes less the more is computed again.
TEST(cuda_bench_training_fits_its_gpus) {
    Cuda dev(0, size_t(1) << 20);
    const std::string long_context = "125m --seq-len 65536 --total-batch 65536 --batch 1 --recompute ";
    const std::pair<std::string, double> cards[] = {{"50m", 7},
                                                    {"125m", 23},
                                                    {"350m", 79},
                                                    {long_context + "0", 1e30},
                                                    {long_context + "1", 79},
                                                    {long_context + "2", 79}};
    const double GiB = double(size_t(1) << 30),
                 per_parameter = 2 + 4 + 4 + 2 * 4;  // bf16, its master, gradient, two moments
    std::vector<double> taken;
    for (const auto& [options, room] : cards) {
        Config c = options_of("--model " + options);
        if (!c.is_given("batch")) c.batch = preset_of(c).batch;
        const NsaShape s = shape_of(c, c.batch, c.seq_len);
        dev.check_shape(s);
        size_t scratch =
            std::max(attention_backward_bytes(s, SelectedKernel::GATHER), select_blocks_room(s) * sizeof(float));
        for (const Branch branch : {CMP, SLC, WIN})
            scratch = std::max(scratch, attention_forward_bytes(branch, s, SelectedKernel::GATHER));
        // of compress_backward: the tokens' gradient, activated and the chunks' columns, of keys and values
        const size_t columns = s.key_rows() / size_t(s.d) * size_t(s.F * (s.l / s.d));
        scratch += 2 * (s.key_rows() * s.D * sizeof(float) + (s.cmp_rows() * s.F + columns) * sizeof(uint16_t));
        CHECK(double(scratch) / GiB < 0.5);
        taken.push_back((double(TensorTable(c).total) * per_parameter + double(Cuda::WORKSPACE) + double(scratch) +
                         double(Activations<Cuda>::bytes_needed(dev, c, c.batch, c.seq_len, TRAINING))) /
                        GiB);
        std::printf("    --model %s: %.2f GiB\n", options.c_str(), taken.back());
        CHECK(taken.back() < room);
    }
    CHECK(taken[3] > taken[4] && taken[4] > taken[5]);
}
#endif
