// op_layer_tests.h: the operations of struct Cpu together: finite differences in fp64, a whole attention layer,
// causality, decoding, independence of the number of threads. Limits as in op_tests.h.
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
    for (bool full : {false, true}) {
        NsaShape s = nsa_shape(2, 7, 2, 3, 4, 4, 2, 4, 3, 3);
        s.full = full;
        Random random(250);
        Cpu<double> cpu;
        HeadBuffers<double> out(s), weight(s);
        Buffer<double> projected(size_t(s.B) * s.T * s.projected(), "projected"),
            dprojected(projected.size(), "dprojected");
        projected.fill(random), weight.q.fill(random), weight.gate.fill(random);
        for (Buffer<double>& x : weight.kv) x.fill(random);
        auto loss = [&] {
            cpu.split_heads_forward(out.heads(), projected, s);
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
        cpu.split_heads_backward(dprojected, d.gradients(), s);
        CHECK_GRADIENT(projected, dprojected, loss);
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
                return cpu.compress_forward(out, hidden, k, phi.phi(), rotated, s),
                       weigh(out.data(), weight, out.size());
            };
            loss();
            std::copy_n(weight.data(), weight.size(), dout.data());
            cpu.compress_backward(dk, dphi.phi(), dout, hidden, k, phi.phi(), rotated, s);
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
            AttentionInputs<double> in(s, random);
            const size_t rows = s.query_rows(), values = rows * s.D, count = full ? 1 : 3;
            Buffer<double> z(full ? 0 : 3 * rows, "z"), o(count * values, "o"), lse(count * rows, "lse"),
                out(values, "out"), dz(z.size(), "dz"), dq(values, "dq");
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
// A whole attention layer between `projected` and the combined output: the operations in the order in which a model
// calls them.

template <class real>
struct LayerActivations {  // of one call: positions first .. first + queries - 1
    Buffer<real> q, gate, o, lse, out;
    Buffer<uint32_t> selection;
    explicit LayerActivations(const NsaShape& s)
        : q(s.query_rows() * s.D, "q"),
          gate(3 * s.query_rows(), "gate"),
          o(3 * s.query_rows() * s.D, "o"),
          lse(3 * s.query_rows(), "lse"),
          out(s.query_rows() * s.D, "out"),
          selection(size_t(s.B) * s.G * s.queries * s.selection_words(), "selection") {}
};
template <class real>
struct Layer {
    NsaShape s;
    Cpu<real> cpu;
    PhiBuffers<real> phi_k, phi_v;
    std::vector<Buffer<real>> kv;             // caches [B, G, T, D]
    Buffer<real> kc, vc, hidden_k, hidden_v;  // caches [B, G, NC, ..]

    Layer(const NsaShape& s, Random& random)
        : s(s),
          phi_k(s),
          phi_v(s),
          kc(s.cmp_rows() * s.D, "kc"),
          vc(s.cmp_rows() * s.D, "vc"),
          hidden_k(s.cmp_rows() * s.F, "hidden_k"),
          hidden_v(s.cmp_rows() * s.F, "hidden_v") {
        for (int slot = 0; slot < 6; slot++) kv.emplace_back(s.key_rows() * s.D, "kv");
        phi_k.fill(random), phi_v.fill(random);
    }
    NsaShape part(int first, int queries) const {
        NsaShape p = s;
        p.first = first, p.queries = queries;
        return p;
    }
    // projected [B*queries, P]. selection: fixed where given.
    LayerActivations<real> forward(const real* projected, int first, int queries,
                                   const Buffer<uint32_t>* selection = nullptr) {
        const NsaShape p = part(first, queries);
        LayerActivations<real> a(p);
        cpu.split_heads_forward({a.q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, a.gate}, projected, p);
        cpu.compress_forward(kc, hidden_k, kv[K_CMP], phi_k.phi(), true, p);
        cpu.compress_forward(vc, hidden_v, kv[V_CMP], phi_v.phi(), false, p);
        const size_t rows = p.query_rows();
        cpu.attend_and_select(a.o, a.lse, selection ? nullptr : a.selection.data(), nullptr, a.q, kc, vc, p);
        if (selection) std::copy_n(selection->data(), a.selection.size(), a.selection.data());
        cpu.attention_forward(SLC, a.o + rows * s.D, a.lse + rows, a.q, kv[K_SLC], kv[V_SLC], a.selection, p);
        cpu.attention_forward(WIN, a.o + 2 * rows * s.D, a.lse + 2 * rows, a.q, kv[K_WIN], kv[V_WIN], nullptr, p);
        cpu.combine_forward(a.out, a.o, a.gate, p);
        return a;
    }
    // After a forward of all positions.
    void backward(Buffer<real>& dprojected, PhiBuffers<real>& dphi_k, PhiBuffers<real>& dphi_v, const real* dout,
                  LayerActivations<real>& a) {
        const size_t rows = s.query_rows();
        Buffer<real> row_dot(3 * rows, "row_dot"), lse_gated(3 * rows, "lse_gated"), dkc(kc.size(), "dkc"),
            dvc(vc.size(), "dvc");
        HeadBuffers<real> d(s);
        d.q.zero(), dphi_k.zero(), dphi_v.zero();
        cpu.attention_backward_rows(row_dot, lse_gated, d.gate, dout, a.o, a.gate, a.lse, s);
        cpu.attention_backward(CMP, {d.q, true, dkc, dvc, dout, row_dot, lse_gated}, {a.q, kc, vc, nullptr}, s);
        cpu.attention_backward(SLC, {d.q, true, d.kv[K_SLC], d.kv[V_SLC], dout, row_dot + rows, lse_gated + rows},
                               {a.q, kv[K_SLC], kv[V_SLC], a.selection}, s);
        cpu.attention_backward(WIN,
                               {d.q, true, d.kv[K_WIN], d.kv[V_WIN], dout, row_dot + 2 * rows, lse_gated + 2 * rows},
                               {a.q, kv[K_WIN], kv[V_WIN], nullptr}, s);
        cpu.compress_backward(d.kv[K_CMP], dphi_k.phi(), dkc, hidden_k, kv[K_CMP], phi_k.phi(), true, s);
        cpu.compress_backward(d.kv[V_CMP], dphi_v.phi(), dvc, hidden_v, kv[V_CMP], phi_v.phi(), false, s);
        cpu.split_heads_backward(dprojected, d.gradients(), s);
    }
};

TEST(op_gradient_of_a_whole_layer) {
    const NsaShape s = nsa_shape(2, 26, 2, 2, 4, 4, 2, 4, 3, 5);
    Random random(300);
    Layer<double> layer(s, random);
    Buffer<double> projected(size_t(s.B) * s.T * s.projected(), "projected"),
        dprojected(projected.size(), "dprojected"), dout(s.query_rows() * s.D, "dout");
    projected.fill(random), dout.fill(random);
    PhiBuffers<double> dphi_k(s), dphi_v(s);
    LayerActivations<double> a = layer.forward(projected, 0, s.T);
    layer.backward(dprojected, dphi_k, dphi_v, dout, a);
    auto loss = [&] {
        const LayerActivations<double> again = layer.forward(projected, 0, s.T, &a.selection);
        return weigh(again.out.data(), dout, again.out.size());
    };
    CHECK_GRADIENT(projected, dprojected, loss);
    CHECK_GRADIENT(layer.phi_k.fc1, dphi_k.fc1, loss);
    CHECK_GRADIENT(layer.phi_k.bias, dphi_k.bias, loss);
    CHECK_GRADIENT(layer.phi_k.fc2, dphi_k.fc2, loss);
    CHECK_GRADIENT(layer.phi_v.fc1, dphi_v.fc1, loss);
    CHECK_GRADIENT(layer.phi_v.bias, dphi_v.bias, loss);
    CHECK_GRADIENT(layer.phi_v.fc2, dphi_v.fc2, loss);
}

TEST(op_layer_with_large_logits_stays_finite) {
    const NsaShape s = nsa_shape(1, 100, 2, 3, 16, 8, 4, 16, 4, 20);
    Random random(310);
    Layer<float> layer(s, random);
    Buffer<float> projected(size_t(s.T) * s.projected(), "projected"), dprojected(projected.size(), "dprojected"),
        dout(s.query_rows() * s.D, "dout");
    projected.fill(random, 40), dout.fill(random);  // scores of 40 * 40 * sqrt(16) / 4, beyond +-1e3
    for (int t = 0; t < s.T; t++)                   // gate logits of +-1e3
        for (int i = 0; i < 3 * s.H; i++) projected[t * s.projected() + s.projected() - s.gate_columns() + i] *= 25;
    PhiBuffers<float> dphi_k(s), dphi_v(s);
    LayerActivations<float> a = layer.forward(projected, 0, s.T);
    layer.backward(dprojected, dphi_k, dphi_v, dout, a);
    CHECK_FINITE(a.out);
    CHECK_FINITE(a.o);
    CHECK_FINITE(a.gate);
    CHECK_FINITE(dprojected);
    for (PhiBuffers<float>* d : {&dphi_k, &dphi_v}) {
        CHECK_FINITE(d->fc1);
        CHECK_FINITE(d->bias);
        CHECK_FINITE(d->fc2);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Causality, bit for bit: whatever stands at positions >= j, everything before j stays the same.

TEST(op_causality_bit_for_bit) {
    for (const NsaShape& s :
         {nsa_shape(1, 150, 2, 3, 16, 8, 4, 16, 4, 20), nsa_shape(2, 201, 1, 2, 2, 32, 16, 16, 5, 70),
          nsa_shape(1, 131, 1, 1, 64, 1, 1, 1, 16, 1)}) {
        const ShapeReport report{s, "cpu fp32"};
        Random random(400);
        Layer<float> layer(s, random);
        const int P = s.projected();
        Buffer<float> projected(size_t(s.B) * s.T * P, "projected");
        projected.fill(random);
        const LayerActivations<float> before = layer.forward(projected, 0, s.T);
        Buffer<float> kc(layer.kc.size()), vc(layer.vc.size());
        std::copy_n(layer.kc.data(), kc.size(), kc.data());
        std::copy_n(layer.vc.data(), vc.size(), vc.data());
        for (int j : {s.T - 1, 130, 128, 65, 64, 63, 37, 16, 1}) {  // downwards: each changes more
            for (int b = 0; b < s.B; b++)
                for (int t = j; t < s.T; t++) fill_normal(projected + (size_t(b) * s.T + t) * P, size_t(P), random, 10);
            const LayerActivations<float> after = layer.forward(projected, 0, s.T);
            bool changed = false;
            for (int b = 0; b < s.B; b++) {
                CHECK_SAME_BITS(before.out + size_t(b) * s.T * s.H * s.D, after.out + size_t(b) * s.T * s.H * s.D,
                                size_t(j) * s.H * s.D, j, s.H, s.D);
                changed |= std::memcmp(before.out + (size_t(b) * s.T + j) * s.H * s.D,
                                       after.out + (size_t(b) * s.T + j) * s.H * s.D, 4 * size_t(s.D)) != 0;
                for (int branch = 0; branch < 3; branch++)
                    for (int head = 0; head < s.H; head++) {
                        const size_t row = ((size_t(branch) * s.B + b) * s.H + head) * s.T;
                        CHECK_SAME_BITS(before.o + row * s.D, after.o + row * s.D, size_t(j) * s.D, j, s.D);
                        CHECK_SAME_BITS(before.lse + row, after.lse + row, size_t(j));
                    }
                for (int g = 0; g < s.G; g++) {
                    const size_t masks = (size_t(b) * s.G + g) * s.T * s.selection_words(),
                                 rows = (size_t(b) * s.G + g) * s.cmp_capacity() * s.D;
                    CHECK_SAME_BITS(before.selection + masks, after.selection + masks, size_t(j) * s.selection_words());
                    CHECK_SAME_BITS(kc + rows, layer.kc + rows, size_t(oracle::blocks(j, s)) * s.D);
                    CHECK_SAME_BITS(vc + rows, layer.vc + rows, size_t(oracle::blocks(j, s)) * s.D);
                }
            }
            CHECK(changed);  // position j itself does see the change
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding: the operations on a few positions at a time, with caches, equal the prefill of all.
// Each side is within the oracle's limit of the truth, so they are within twice that of each other.
// Caches hold NaN behind the present; each chunk starts from the prefill's values before it.

template <class real>
void check_decoding(const NsaShape& s, const std::vector<int>& chunks) {
    using Num = oracle::Number<real>;
    const ShapeReport report{s, engine_name<real>()};
    const ThreadCount one(1);
    Random random(500);
    Layer<real> whole(s, random), parts(s, random);
    for (auto pair : {std::make_pair(&whole.phi_k, &parts.phi_k), std::make_pair(&whole.phi_v, &parts.phi_v)}) {
        std::copy_n(pair.first->fc1.data(), pair.first->fc1.size(), pair.second->fc1.data());
        std::copy_n(pair.first->bias.data(), pair.first->bias.size(), pair.second->bias.data());
        std::copy_n(pair.first->fc2.data(), pair.first->fc2.size(), pair.second->fc2.data());
    }
    const int P = s.projected(), D = s.D, T = s.T, words = s.selection_words(), NC = s.cmp_capacity();
    Buffer<real> projected(size_t(s.B) * T * P, "projected");
    projected.fill(random);
    const LayerActivations<real> all = whole.forward(projected, 0, T);
    // Twice the oracles' limits, around the prefill's values.
    auto twice = [](const real* x, oracle::Numbers<real> expected) {
        for (size_t i = 0; i < expected.size(); i++) expected[i] = Num(x[i], 2 * expected[i].error);
        return expected;
    };
    const oracle::Numbers<real> kc =
        twice(whole.kc, oracle::compress(whole.kv[K_CMP].data(), whole.phi_k.weights(), true, s).out);
    const oracle::Numbers<real> vc =
        twice(whole.vc, oracle::compress(whole.kv[V_CMP].data(), whole.phi_v.weights(), false, s).out);
    const Buffer<real>* keys[] = {&whole.kc, &whole.kv[K_SLC], &whole.kv[K_WIN]};
    const Buffer<real>* values[] = {&whole.vc, &whole.kv[V_SLC], &whole.kv[V_WIN]};
    std::vector<oracle::Numbers<real>> out, lse;
    for (Branch branch : {CMP, SLC, WIN}) {
        const oracle::Attended<real> expected =
            oracle::attention(branch, oracle::numbers(all.q), oracle::numbers(*keys[branch]),
                              oracle::numbers(*values[branch]), all.selection.data(), s);
        out.push_back(twice(all.o + branch * all.q.size(), expected.out));
        lse.push_back(twice(all.lse + branch * s.query_rows(), expected.lse));
    }
    size_t chunk = 0;
    for (int first = 0; first < T;) {
        const int queries = std::min(chunks[chunk++ % chunks.size()], T - first),
                  seen = oracle::blocks(first + queries, s);
        const NsaShape p = parts.part(first, queries);
        Buffer<real> rows(size_t(s.B) * queries * P, "projected");
        for (int b = 0; b < s.B; b++)
            std::copy_n(projected + (size_t(b) * T + first) * P, size_t(queries) * P, rows + size_t(b) * queries * P);
        LayerActivations<real> a(p);
        parts.cpu.split_heads_forward(
            {a.q, {parts.kv[0], parts.kv[1], parts.kv[2], parts.kv[3], parts.kv[4], parts.kv[5]}, a.gate}, rows, p);
        parts.cpu.compress_forward(parts.kc, parts.hidden_k, parts.kv[K_CMP], parts.phi_k.phi(), true, p);
        parts.cpu.compress_forward(parts.vc, parts.hidden_v, parts.kv[V_CMP], parts.phi_v.phi(), false, p);
        for (int bg = 0; bg < s.B * s.G; bg++) {
            for (size_t slot = 0; slot < 6; slot++)  // the same arithmetic on each element: the same bits
                CHECK_SAME_BITS(parts.kv[slot] + size_t(bg) * T * D, whole.kv[slot] + size_t(bg) * T * D,
                                size_t(first + queries) * D, T, D);
            const size_t at = size_t(bg) * NC * D, count = size_t(seen) * D;
            check_array(__FILE__, __LINE__, "kc", parts.kc + at, count,
                        oracle::Numbers<real>(kc.begin() + ptrdiff_t(at), kc.begin() + ptrdiff_t(at + count)),
                        {seen, D});
            check_array(__FILE__, __LINE__, "vc", parts.vc + at, count,
                        oracle::Numbers<real>(vc.begin() + ptrdiff_t(at), vc.begin() + ptrdiff_t(at + count)),
                        {seen, D});
            for (size_t i = count; i < size_t(NC) * D; i++)
                CHECK(std::isnan(parts.kc[at + i]) && std::isnan(parts.vc[at + i]));
            std::copy_n(whole.kc + at, count, parts.kc + at);  // equal inputs for what follows
            std::copy_n(whole.vc + at, count, parts.vc + at);
        }
        const size_t n = p.query_rows();
        for (Branch branch : {CMP, SLC, WIN}) {
            if (branch != CMP) {
                const bool slc = branch == SLC;
                parts.cpu.attention_forward(branch, a.o + branch * n * D, a.lse + branch * n, a.q,
                                            parts.kv[slc ? K_SLC : K_WIN], parts.kv[slc ? V_SLC : V_WIN], a.selection,
                                            p);
                continue;
            }
            parts.cpu.attend_and_select(a.o, a.lse, a.selection, nullptr, a.q, parts.kc, parts.vc, p);
            // kc as the oracle sees it: all of the prefill's, of which only what each query sees counts.
            check_selection<real>(a.selection, nullptr, a.q, whole.kc, a.lse, p);
            for (int bg = 0; bg < s.B * s.G; bg++)
                std::copy_n(all.selection + (size_t(bg) * T + first) * words, size_t(queries) * words,
                            a.selection + size_t(bg) * queries * words);
        }
        parts.cpu.combine_forward(a.out, a.o, a.gate, p);
        for (int branch = 0; branch < 3; branch++)
            for (int row = 0; row < s.B * s.H; row++) {
                const size_t here = size_t(row) * queries, there = size_t(row) * T + first;
                CHECK_SAME_BITS(a.gate + branch * n + here, all.gate + branch * s.query_rows() + there,
                                size_t(queries));
                check_array(__FILE__, __LINE__, "lse", a.lse + branch * n + here, size_t(queries),
                            oracle::Numbers<real>(&lse[size_t(branch)][there], &lse[size_t(branch)][there] + queries),
                            {queries});
                check_array(__FILE__, __LINE__, "out", a.o + (branch * n + here) * D, size_t(queries) * D,
                            oracle::Numbers<real>(&out[size_t(branch)][there * D],
                                                  &out[size_t(branch)][there * D] + queries * D),
                            {queries, D});
            }
        for (int b = 0; b < s.B; b++)
            for (int j = 0; j < queries; j++)
                for (int i = 0; i < s.H * D; i++) {
                    Num sum;  // the gated sum of three branches, each within its limit, and 5 roundings of its own
                    for (int branch = 0; branch < 3; branch++) {
                        const size_t row = (size_t(b) * s.H + i / D) * T + first + j;
                        sum = sum + Num(all.gate[branch * s.query_rows() + row]) * out[size_t(branch)][row * D + i % D];
                    }
                    CHECK_NEAR(a.out[(size_t(b) * queries + j) * s.H * D + i],
                               all.out[(size_t(b) * T + first + j) * s.H * D + i], 2 * sum.error);
                }
        first += queries;
    }
}
TEST(op_decoding_equals_prefill) {
    const NsaShape small = nsa_shape(2, 75, 2, 3, 16, 8, 4, 16, 3, 20),
                   tall = nsa_shape(1, 140, 1, 2, 2, 32, 16, 16, 4, 65);
    for (const std::vector<int>& chunks :
         {std::vector<int>{1}, std::vector<int>{33, 1, 1}, std::vector<int>{2, 5, 17, 64}}) {
        check_decoding<float>(small, chunks), check_decoding<double>(small, chunks);
        check_decoding<float>(tall, chunks);
    }
    check_decoding<float>(nsa_shape(1, 40, 1, 1, 2, 1, 1, 1, 16, 1), {1});
    check_decoding<float>(nsa_shape(1, 20, 1, 1, 2, 32, 16, 64, 16, 512), {1, 3});  // never a compressed block
}

// ---------------------------------------------------------------------------------------------------------------------
// The number of threads changes no bit, in any operation.

template <class real>
std::vector<std::vector<real>> run_every_operation() {
    Random random(600);
    Cpu<real> cpu;
    std::vector<std::vector<real>> results;
    auto keep = [&](const Buffer<real>& x) { results.emplace_back(x.data(), x.data() + x.size()); };
    const int N = 203, C = 131, V = 60, Vp = 64;
    Buffer<int32_t> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = random.below(V);
    Buffer<real> embed(V * C), x(N * C), weight(C), out(N * C), rstd(N), dout(N * C), dx(N * C), dweight(C),
        dembed(V * C), logits(N * Vp);
    embed.fill(random), weight.fill(random), dout.fill(random), dx.fill(random), dweight.fill(random),
        dembed.fill(random), logits.fill(random);
    cpu.embedding_forward(x, tokens, embed, N, C), keep(x);
    cpu.embedding_backward(dembed, dout, tokens, N, C), keep(dembed);
    cpu.rmsnorm_forward(out, rstd, x, weight, N, C), keep(out), keep(rstd);
    cpu.rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C), keep(dx), keep(dweight);
    cpu.silu_forward(out, x, x.size()), keep(out);
    cpu.silu_backward(out, dout, x, x.size()), keep(out);
    Buffer<real> losses(N);
    cpu.classifier(losses, logits, tokens, 0.1, true, N, V, Vp), keep(logits), keep(losses);
    Buffer<real> param(99991), m(99991), v(99991), grad(99991);
    param.fill(random), m.fill(random), v.fill(random), grad.fill(random);
    for (size_t i = 0; i < v.size(); i++) v[i] *= v[i];
    const double squares = sum_of_squares(cpu, grad.data(), grad.size());
    results.push_back({real(squares), real((squares - double(real(squares))) * 0x1p30)});  // all bits of the fp64 sum
    cpu.adamw(param, nullptr, m, v, grad, grad.size(), HyperAdamW{1e-3, 0.9, 0.95, 1e-8, 0.1, 7, 0, 0}), keep(param),
        keep(m), keep(v);
    Buffer<real> zeros(99991);
    cpu.zero(zeros.data(), zeros.size()), keep(zeros);

    Buffer<real> product(N * V), a(N * 300), b(V * 300);
    a.fill(random), b.fill(random);
    Gemm<real> gemm;
    gemm.template blocked<real>(false, true, N, V, 300, a, 300, b, 300, false, product, V), keep(product);
    Buffer<real> dinp(a.size()), dw(b.size());
    for (bool bf16 : {false, true}) {
        if (bf16 && (!HAVE_BF16 || sizeof(real) == 8)) continue;
        cpu.gemm.bf16 = gemm.bf16 = bf16;
        if constexpr (sizeof(real) == 4 && HAVE_BF16)
            gemm.template blocked<Bf16Pair>(false, true, N, V, 300, a, 300, b, 300, false, product, V), keep(product);
        dw.fill(random);
        cpu.matmul_forward(product, a, b, nullptr, N, 300, V), keep(product);
        cpu.matmul_backward_input(dinp, product, b, N, 300, V), keep(dinp);
        cpu.matmul_backward_weight(dw, product, a, N, 300, V), keep(dw);
        Buffer<real> large(size_t(N) * 1100), weight_of_large(size_t(1100) * 300);  // blocks of every size
        weight_of_large.fill(random);
        cpu.matmul_forward(large, a, weight_of_large, nullptr, N, 300, 1100), keep(large);
    }

    for (NsaShape s : {nsa_shape(2, 133, 2, 3, 16, 8, 4, 16, 4, 70), nsa_shape(1, 133, 1, 3, 6, 8, 4, 12, 3, 300)}) {
        Layer<real> layer(s, random);
        Buffer<real> projected(size_t(s.B) * s.T * s.projected()), dprojected(projected.size()),
            layer_dout(s.query_rows() * s.D);
        projected.fill(random), layer_dout.fill(random);
        PhiBuffers<real> dphi_k(s), dphi_v(s);
        LayerActivations<real> act = layer.forward(projected, 0, s.T);
        layer.backward(dprojected, dphi_k, dphi_v, layer_dout, act);
        keep(act.q), keep(act.gate), keep(act.o), keep(act.lse), keep(act.out), keep(layer.kc), keep(layer.vc),
            keep(dprojected);
        for (const Buffer<real>& cache : layer.kv) keep(cache);
        for (PhiBuffers<real>* d : {&dphi_k, &dphi_v}) keep(d->fc1), keep(d->bias), keep(d->fc2);
        results.emplace_back(act.selection.data(), act.selection.data() + act.selection.size());
    }
    return results;
}
template <class real>
void check_threads() {
    const ThreadCount one(1);
    const std::vector<std::vector<real>> alone = run_every_operation<real>();
    for (int count : {2, 3, 4}) {
        const ThreadCount several(count);
        const std::vector<std::vector<real>> together = run_every_operation<real>();
        CHECK_EQUAL(together.size(), alone.size());
        for (size_t i = 0; i < alone.size(); i++) {
            const std::string what =
                format_text("result %zu of run_every_operation, %s, %d threads", i, engine_name<real>(), count);
            check_same_bits(__FILE__, __LINE__, what.c_str(), alone[i].data(), together[i].data(), alone[i].size(), {});
        }
    }
}
TEST(op_threads_change_no_bit) { check_threads<float>(), check_threads<double>(); }
