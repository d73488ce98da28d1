// op_layer_tests.h: the operations of struct Cpu against finite differences in fp64, and products on any number of
// threads. Limits as in op_tests.h.
#pragma once
#include "op_attention_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// Finite differences, in fp64. The loss is always sum of weight * output, with random weights, which then are the
// output's gradient.

TEST(op_gradient_embedding) {
    const int N = 12, C = 5, V = 7;
    Random random(200);
    Cpu<double> cpu;
    Buffer<int32_t> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = random.below(V);
    Buffer<double> embed(V * C, "embed"), x(N * C, "x"), dx(N * C, "dx"), dembed(V * C, "dembed");
    embed.fill(random), dx.fill(random), dembed.zero();
    cpu.embedding_backward(dembed, dx, tokens, N, C);
    CHECK_GRADIENT(embed, dembed,
                   [&] { return cpu.embedding_forward(x, tokens, embed, N, C), weigh(x.data(), dx, x.size()); });
}

TEST(op_gradient_smear) {
    const int C = 5, V = 7;
    Random random(205);
    Cpu<double> cpu;
    NsaShape s;
    s.B = 2, s.T = s.queries = 6;
    const int N = s.B * s.T;
    Buffer<int32_t> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = random.below(V);
    Buffer<double> embed(V * C, "embed"), gate(C, "gate"), scale(C, "scale"), x(N * C, "x"), dx(N * C, "dx"),
        de(N * C, "de"), dembed(V * C, "dembed"), dgate(C, "dgate"), dscale(C, "dscale");
    for (auto* input : {&embed, &gate, &scale, &dx}) input->fill(random);
    for (auto* sum : {&dembed, &dgate, &dscale}) sum->zero();
    const SmearOf<double> w{gate.data(), scale.data()};
    cpu.smear_backward(de, {dgate.data(), dscale.data()}, dx, tokens, embed, w, s, C);
    cpu.embedding_backward(dembed, de, tokens, N, C);
    const auto loss = [&] {
        cpu.embedding_forward(x, tokens, embed, N, C);
        cpu.smear_forward(x, tokens, embed, w, s, C);
        return weigh(x.data(), dx, x.size());
    };
    CHECK_GRADIENT(embed, dembed, loss);
    CHECK_GRADIENT(gate, dgate, loss);
    CHECK_GRADIENT(scale, dscale, loss);
}

TEST(op_gradient_rmsnorm) {
    const int N = 4, C = 9;
    Random random(210);
    Cpu<double> cpu;
    Buffer<double> x(N * C, "x"), weight(C, "weight"), out(N * C, "out"), rstd(N, "rstd"), dout(N * C, "dout"),
        dx(N * C, "dx"), dweight(C, "dweight");
    x.fill(random), weight.fill(random), dout.fill(random), dx.zero(), dweight.zero();
    auto loss = [&] { return cpu.rmsnorm_forward(out, rstd, x, weight, N, C), weigh(out.data(), dout, out.size()); };
    loss();
    cpu.rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C);
    CHECK_GRADIENT(x, dx, loss);
    CHECK_GRADIENT(weight, dweight, loss);
}

TEST(op_gradient_matmul) {
    const int N = 6, C = 7, OC = 9;
    Random random(220);
    Cpu<double> cpu;
    Buffer<double> inp(N * C, "inp"), weight(OC * C, "weight"), residual(N * OC, "residual"), out(N * OC, "out"),
        dout(N * OC, "dout"), dinp(N * C, "dinp"), dweight(OC * C, "dweight");
    inp.fill(random), weight.fill(random), residual.fill(random), dout.fill(random), dweight.zero();
    auto loss = [&] {
        return cpu.matmul_forward(out, inp, weight, residual, N, C, OC), weigh(out.data(), dout, out.size());
    };
    cpu.matmul_backward_input(dinp, dout, weight, N, C, OC);
    cpu.matmul_backward_weight(dweight, dout, inp, N, C, OC);
    CHECK_GRADIENT(inp, dinp, loss);
    CHECK_GRADIENT(weight, dweight, loss);
    CHECK_GRADIENT(residual, dout, loss);  // the residual's gradient is the output's
}

TEST(op_gradient_silu) {
    Random random(230);
    Cpu<double> cpu;
    Buffer<double> x(50, "x"), out(50, "out"), dout(50, "dout"), dx(50, "dx");
    x.fill(random, 2), dout.fill(random);
    cpu.silu_backward(dx, dout, x, 50);
    CHECK_GRADIENT(x, dx, [&] { return cpu.silu_forward(out, x, 50), weigh(out.data(), dout, 50); });
}

TEST(op_gradient_classifier) {
    const int N = 5, V = 11, Vp = 16;
    Random random(240);
    Cpu<double> cpu;
    Buffer<double> logits(N * Vp, "logits"), dlogits(N * Vp, "dlogits");
    Buffer<double> losses(N, "losses");
    Buffer<int32_t> targets(N);
    logits.fill(random);
    for (int n = 0; n < N; n++) targets[n] = random.below(V);
    std::copy_n(logits.data(), logits.size(), dlogits.data());
    cpu.classifier(losses, dlogits, targets, 0.25, true, N, V, Vp);
    const std::vector<double> weight(N, 0.25);
    CHECK_GRADIENT(logits, dlogits, [&] {
        return cpu.classifier(losses, logits, targets, 0.25, false, N, V, Vp), weigh(losses.data(), weight.data(), N);
    });
}

TEST(op_gradient_split_heads) {
    for (const int kind : {0, 1, 2, 3}) {
        NsaShape s = nsa_shape(2, 7, 2, 3, 4, 4, 2, 4, 3, 3);
        s.full = kind % 2;
        s.qk_norm = kind / 2 % 2;
        Random random(250);
        Cpu<double> cpu;
        HeadBuffers<double> out(s), weight(s);
        Buffer<double> projected(size_t(s.B) * s.T * s.projected(), "projected"),
            dprojected(projected.size(), "dprojected"), gains(size_t(s.gain_rows()) * s.D, "gains"),
            dgains(gains.size(), "dgains");
        gains.fill(random), dgains.zero();
        double *const gain = s.qk_norm ? gains.data() : nullptr, *const dgain = s.qk_norm ? dgains.data() : nullptr;
        projected.fill(random), weight.q.fill(random), weight.gate.fill(random);
        for (Buffer<double>& x : weight.kv) x.fill(random);
        auto loss = [&] {
            cpu.split_heads_forward(out.heads(), projected, gain, s);
            Loss sum = weigh(out.q.data(), weight.q, out.q.size());
            for (size_t slot = 0; slot < 6; slot++)
                for (size_t i = 0; i < out.kv[slot].size(); i++) sum.add(out.kv[slot][i] * weight.kv[slot][i]);
            for (size_t i = 0; i < out.gate.size(); i++) sum.add(out.gate[i] * weight.gate[i]);
            return sum;
        };
        loss();
        HeadBuffers<double> d(s);
        std::copy_n(weight.q.data(), d.q.size(), d.q.data());
        for (size_t slot = 0; slot < 6; slot++)
            std::copy_n(weight.kv[slot].data(), d.kv[slot].size(), d.kv[slot].data());
        for (size_t i = 0; i < d.gate.size(); i++)
            d.gate[i] = weight.gate[i] * out.gate[i] * (1 - out.gate[i]);  // heads carry the logit's gradient
        std::copy_n(projected.data(), projected.size(), dprojected.data());
        cpu.split_heads_backward(dprojected, dgain, d.gradients(), gain, s);
        CHECK_GRADIENT(projected, dprojected, loss);
        CHECK_GRADIENT(gains, dgains, loss);
    }
}

TEST(op_gradient_compress) {
    for (const NsaShape& s : {nsa_shape(2, 23, 2, 1, 4, 8, 4, 8, 3, 3), nsa_shape(1, 9, 1, 1, 6, 4, 1, 4, 3, 3),
                              nsa_shape(1, 6, 1, 1, 2, 1, 1, 1, 3, 3), nsa_shape(1, 3, 1, 1, 2, 4, 2, 4, 3, 3)})
        for (bool rotated : {false, true}) {
            const size_t rows = size_t(s.B) * s.G * oracle::blocks(s.T, s);
            Random random(260);
            Cpu<double> cpu;
            Buffer<double> k(size_t(s.B) * s.G * s.T * s.D, "k"), out(rows * s.D, "out"), hidden(rows * s.F, "hidden"),
                weight(out.size(), "weight"), dout(out.size(), "dout"), dk(k.size(), "dk");
            PhiBuffers<double> phi(s), dphi(s);
            k.fill(random), phi.fill(random), weight.fill(random), dphi.zero();
            auto loss = [&] {
                return cpu.compress_heads(out, hidden, k, phi.phi(), rotated, s), weigh(out.data(), weight, out.size());
            };
            loss();
            std::copy_n(weight.data(), weight.size(), dout.data());
            cpu.compress_heads_backward(dk, dphi.phi(), dout, hidden, k, phi.phi(), rotated, s);
            CHECK_GRADIENT(k, dk, loss);
            CHECK_GRADIENT(phi.fc1, dphi.fc1, loss);
            CHECK_GRADIENT(phi.bias, dphi.bias, loss);
            CHECK_GRADIENT(phi.fc2, dphi.fc2, loss);
        }
}

// attention_forward of the three branches and combine_forward, with the gates behind a sigmoid; the selection stays
// what it was.
TEST(op_gradient_attention) {
    for (NsaShape s : {nsa_shape(2, 21, 2, 2, 4, 4, 2, 4, 3, 5), nsa_shape(1, 70, 1, 3, 2, 8, 4, 8, 4, 66),
                       nsa_shape(1, 3, 1, 1, 2, 4, 2, 4, 3, 1), nsa_shape(1, 19, 1, 2, 6, 1, 1, 3, 3, 4)})
        for (bool full : {false, true}) {
            s.full = full;
            Random random(270);
            Cpu<double> cpu;
            BranchInputs<double> in({s}, random);
            const size_t rows = s.query_rows(), values = rows * s.D, count = full ? 1 : 3;
            Buffer<double> z(full ? 0 : 3 * rows, "z"), o(count * values, "o"), lse(count * rows, "lse"),
                out(values, "out"), dz(z.size(), "dz"), dq(in.q.size(), "dq");
            Buffer<double> row_dot(count * rows, "row_dot"), lse_gated(count * rows, "lse_gated");
            Buffer<uint32_t> selection(full ? 0 : size_t(s.B) * s.G * s.T * s.selection_words(), "selection");
            z.fill(random);
            const std::vector<Branch> branches = full ? std::vector<Branch>{WIN} : std::vector<Branch>{CMP, SLC, WIN};
            if (!full) {
                cpu.attention_forward(CMP, o, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
                cpu.select_blocks(selection, nullptr, in.q, in.k[CMP], lse, s);
            }
            auto loss = [&] {
                for (size_t i = 0; i < z.size(); i++) in.gate[i] = 1 / (1 + std::exp(-z[i]));
                for (Branch branch : branches) {
                    const size_t at = full ? 0 : branch;
                    cpu.attention_forward(branch, o + at * values, lse + at * rows, in.q, in.k[branch], in.v[branch],
                                          selection, s);
                }
                cpu.combine_forward(out, o, full ? nullptr : in.gate.data(), s);
                return weigh(out.data(), in.dout, out.size());
            };
            loss();
            dq.zero();
            cpu.attention_backward_rows(row_dot, lse_gated, dz, in.dout, o, full ? nullptr : in.gate.data(), lse, s);
            for (Branch branch : branches) {
                Buffer<double> dk(in.k[branch].size(), "dk"), dv(in.v[branch].size(), "dv");
                const size_t at = full ? 0 : branch * rows;
                cpu.attention_backward(branch, {dq, true, dk, dv, in.dout, row_dot + at, lse_gated + at},
                                       {in.q, in.k[branch], in.v[branch], selection}, s);
                if (dk.size() == 0) continue;  // T < l
                CHECK_GRADIENT(in.k[branch], dk, loss);
                CHECK_GRADIENT(in.v[branch], dv, loss);
            }
            CHECK_GRADIENT(in.q, dq, loss);
            if (full) continue;
            CHECK_GRADIENT(z, dz, loss);
            for (int branch = 0; branch < 3; branch++)  // each branch's gate by itself
                check_gradient(__FILE__, __LINE__ + branch, "z of one branch", z + branch * rows, dz + branch * rows,
                               rows, loss);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The number of threads changes no bit: of products that are cut into many blocks. The other operations run with
// several numbers of threads wherever they are tested, see in_every_order().

template <class real>
std::vector<std::vector<real>> products_of_many_blocks() {
    Random random(600);
    Cpu<real> cpu;
    Gemm<real> gemm;
    std::vector<std::vector<real>> results;
    const auto keep = [&](const Buffer<real>& x) { results.emplace_back(x.data(), x.data() + x.size()); };
    const int N = 203, C = 300, V = 60, wide = 1100;
    Buffer<real> a(N * C), b(V * C), large_weight(size_t(wide) * C), product(N * V), large(size_t(N) * wide),
        dinp(a.size()), dw(b.size());
    a.fill(random), b.fill(random), large_weight.fill(random);
    gemm.template blocked<real>(false, true, N, V, C, a, C, b, C, false, product, V), keep(product);
    for (const bool bf16 : {false, true}) {
        if (bf16 && (!HAVE_BF16 || sizeof(real) == 8)) continue;
        cpu.gemm.bf16 = gemm.bf16 = bf16;
        if constexpr (sizeof(real) == 4 && HAVE_BF16)
            gemm.template blocked<Bf16Pair>(false, true, N, V, C, a, C, b, C, false, product, V), keep(product);
        dw.fill(random);
        cpu.matmul_forward(product, a, b, nullptr, N, C, V), keep(product);
        cpu.matmul_backward_input(dinp, product, b, N, C, V), keep(dinp);
        cpu.matmul_backward_weight(dw, product, a, N, C, V), keep(dw);
        cpu.matmul_forward(large, a, large_weight, nullptr, N, C, wide), keep(large);
    }
    return results;
}
template <class real>
void check_threads() {
    const ThreadCount one(1);
    const std::vector<std::vector<real>> alone = products_of_many_blocks<real>();
    for (int count : {2, 3, 4}) {
        const ThreadCount several(count);
        CHECK(products_of_many_blocks<real>() == alone);
    }
}
TEST(op_threads_change_no_bit) { check_threads<float>(), check_threads<double>(); }
