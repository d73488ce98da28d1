// op_attention_tests.h: of attention and selection on struct Cpu what is known without comparing with an oracle, and
// --cpu-dtype bf16. attention_tests.h has what every engine is asked.
#pragma once
#include "attention_tests.h"

TEST(cpu_attention_bf16) {
    if (!HAVE_BF16) return skip("attention in bf16: this build's processor has no AVX512_BF16");
    const auto dev = CpuEngine<float>::open();
    dev->gemm.bf16 = true;
    std::vector<AttentionSetup> table = attention_parts(false);
    for (const NsaShape& s : attention_shapes(false))
        if (s.T <= 130) table.push_back({s});
    for (const AttentionSetup& x : full_attention()) table.push_back(x);
    for (AttentionSetup& x : table) x.bf16 = true, check_attention<CpuEngine<float>>(*dev, x);
}

// One compressed block alone has weight. Each selection block gets the tokens that both share, counted one by one, over
// d; only blocks that t sees count. With the paper's 32/16/64 these are 1, 2, 2, 2, 1.
TEST(op_importance_weights) {
    std::vector<NsaShape> shapes = {nsa_shape(1, 300, 1, 1, 2, 32, 16, 64, 16, 512)};
    for (const NsaShape& s : attention_shapes(true))
        if (s.T <= 130) shapes.push_back(s);
    for (const NsaShape& s : shapes)
        for (int t = s.T - 1; t >= 0; t -= 1 + s.T / 20) {
            const int seen = oracle::blocks(t + 1, s), selection_blocks = t / s.slc_block + 1;
            for (int i = 0; i < oracle::blocks(s.T, s); i++) {
                Buffer<double> weight(size_t(oracle::blocks(s.T, s)), "weight"),
                    importance(size_t(selection_blocks), "importance");
                Buffer<float> weight_fp32(weight.size(), "weight"), tiled(importance.size(), "importance");
                weight.zero(), weight_fp32.zero();
                weight[i] = weight_fp32[i] = 1;
                Cpu<double>::fold_importance(importance, weight, t, s);
                TiledAttention::fold_importance(tiled, weight_fp32, t, s);
                for (int j = 0; j < selection_blocks; j++) {
                    int shared = 0;
                    for (int token = i * s.d; token < i * s.d + s.l; token++) shared += token / s.slc_block == j;
                    CHECK_EQUAL(importance[j], i < seen ? double(shared) / s.d : 0.0);
                    CHECK_EQUAL(tiled[j], i < seen ? float(shared) / float(s.d) : 0.0f);
                }
            }
        }
}

// Finite differences, in fp64, of attention_forward of the three branches and combine_forward, with the gates behind a
// sigmoid; the selection stays what it was. The loss is the sum of weight * output, with random weights, which then are
// the output's gradient.
TEST(op_gradient_attention) {
    for (NsaShape s : {nsa_shape(2, 21, 2, 2, 4, 4, 2, 4, 3, 5), nsa_shape(1, 70, 1, 3, 2, 8, 4, 8, 4, 66),
                       nsa_shape(1, 3, 1, 1, 2, 4, 2, 4, 3, 1), nsa_shape(1, 19, 1, 2, 6, 1, 1, 3, 3, 4)})
        for (bool full : {false, true}) {
            s.window_only = s.sees_all = full;
            Random random(270);
            Cpu<double> cpu;
            AttentionInputs<CpuEngine<double>> in({s}, random);
            const size_t rows = s.query_rows(), values = rows * s.D, count = size_t(s.branches());
            Buffer<double> z(full ? 0 : 3 * rows, "z"), o(count * values, "o"), lse(count * rows, "lse"),
                out(values, "out"), dz(z.size(), "dz"), dq(values, "dq"), row_dot(count * rows, "row_dot"),
                lse_gated(count * rows, "lse_gated");
            Buffer<uint32_t> selection(full ? 0 : size_t(s.B) * s.G * s.T * s.selection_words(), "selection");
            z.fill(random);
            const double *const q = in.q.data(), *const dout = in.dout.data(),
                                *const gate = full ? nullptr : in.gate.data();
            const auto at = [&](Branch branch) { return size_t(s.branch_slot(branch)) * rows; };
            const auto forward = [&](Branch branch) {
                cpu.attention_forward(branch, o + at(branch) * s.D, lse + at(branch), q, in.k[branch].data(),
                                      in.v[branch].data(), selection, s);
            };
            if (!full) forward(CMP), cpu.select_blocks(selection, nullptr, q, in.k[CMP].data(), lse, s);
            const auto loss = [&] {
                for (size_t i = 0; i < z.size(); i++) in.gate[i] = 1 / (1 + std::exp(-z[i]));
                for (Branch branch : branches_of(s)) forward(branch);
                cpu.combine_forward(out, o, gate, s);
                return weigh(out.data(), dout, out.size());
            };
            loss();
            dq.zero();
            cpu.attention_backward_rows(row_dot, lse_gated, dz, dout, o, gate, lse, s);
            for (Branch branch : branches_of(s)) {
                Buffer<double> dk(in.k[branch].size(), "dk"), dv(in.v[branch].size(), "dv");
                cpu.attention_backward(branch, {dq, true, dk, dv, dout, row_dot + at(branch), lse_gated + at(branch)},
                                       {q, in.k[branch].data(), in.v[branch].data(), selection}, s);
                if (dk.size() == 0) continue;  // T < l
                CHECK_GRADIENT(in.k[branch], dk, loss);
                CHECK_GRADIENT(in.v[branch], dv, loss);
            }
            CHECK_GRADIENT(in.q, dq, loss);
            if (!full) CHECK_GRADIENT(z, dz, loss);
        }
}
