// op_attention_tests.h: heads and RoPE, compression, the attention branches and the selection of struct Cpu, in fp32
// and fp64, against the oracles of oracle.h. Limits as in op_tests.h.

#pragma once
#include <string>
#include <vector>

#include "../../../nsa_cpu.h"
#include "../harness.h"
#include "oracle.h"

// ---------------------------------------------------------------------------------------------------------------------
// Shapes of the attention tests: B, T, G, heads per group, D, l, d, l', n, w.

inline NsaShape nsa_shape(int B, int T, int G, int h, int D, int l, int d, int slc_block, int slc_count, int window) {
    NsaShape s;
    s.B = B, s.T = T, s.first = 0, s.queries = T, s.H = G * h, s.G = G, s.D = D, s.l = l, s.d = d;
    s.slc_block = slc_block, s.slc_count = slc_count, s.window = window, s.F = 8;
    return s;
}
inline const std::vector<NsaShape>& nsa_shapes() {
    static const std::vector<NsaShape> shapes = {
        nsa_shape(2, 1, 2, 3, 2, 1, 1, 1, 3, 1),  // one token
        nsa_shape(2, 1, 1, 1, 64, 32, 16, 64, 16, 512),
        nsa_shape(1, 31, 1, 1, 16, 32, 16, 64, 16, 512),  // no compressed block at all
        nsa_shape(2, 32, 1, 6, 16, 32, 16, 64, 16, 2),    // exactly one, for the last query
        nsa_shape(1, 33, 2, 12, 2, 32, 16, 16, 3, 1),
        nsa_shape(2, 33, 1, 3, 64, 8, 4, 16, 3, 63),
        nsa_shape(1, 63, 1, 1, 16, 8, 4, 16, 3, 63),
        nsa_shape(2, 64, 2, 3, 2, 1, 1, 1, 16, 64),  // l = d = l' = 1: blocks are tokens
        nsa_shape(1, 64, 1, 6, 64, 8, 4, 16, 4, 65),
        nsa_shape(1, 65, 1, 12, 16, 8, 4, 8, 4, 64),
        nsa_shape(2, 65, 2, 1, 16, 32, 16, 48, 3, 65),   // l' = 48
        nsa_shape(1, 130, 1, 3, 64, 32, 16, 16, 4, 64),  // l > l'
        nsa_shape(2, 130, 2, 6, 16, 8, 4, 16, 5, 63),
        nsa_shape(1, 130, 1, 12, 2, 1, 1, 48, 3, 65),
        nsa_shape(1, 130, 1, 1, 2, 4, 4, 12, 3, 300),  // l = d, w > T
        nsa_shape(1, 130, 2, 2, 16, 16, 4, 20, 3, 7),  // l = 4 d
        nsa_shape(1, 1023, 1, 3, 2, 32, 16, 64, 4, 512),
        nsa_shape(1, 1025, 2, 1, 2, 32, 16, 64, 16, 65),  // the 17th block: the first query that must choose
        nsa_shape(1, 1025, 1, 6, 2, 8, 4, 16, 16, 64),    // 65 selection blocks: three words
    };
    return shapes;
}
template <class real>
const char* engine_name() {
    return sizeof(real) == 4 ? "cpu fp32" : "cpu fp64";
}
// A failing check prints only what differs; this adds where.
struct ShapeReport {
    const NsaShape& s;
    const char* engine;
    int failed = tests().failed_checks;
    ~ShapeReport() {
        if (tests().failed_checks > failed && tests().failed_checks <= 10)
            std::printf("    with %s, B %d T %d first %d queries %d H %d G %d D %d l %d d %d l' %d n %d w %d full %d\n",
                        engine, s.B, s.T, s.first, s.queries, s.H, s.G, s.D, s.l, s.d, s.slc_block, s.slc_count,
                        s.window, int(s.full));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE.

template <class real>
struct HeadBuffers {
    Buffer<real> q, gate;
    std::vector<Buffer<real>> kv;
    explicit HeadBuffers(const NsaShape& s)
        : q(size_t(s.B) * s.H * s.queries * s.D, "q"), gate(s.full ? 0 : size_t(3) * s.B * s.H * s.queries, "gate") {
        for (int slot = 0; slot < 6; slot++)
            kv.emplace_back(s.full && slot < K_WIN ? 0 : size_t(s.B) * s.G * s.T * s.D, "kv");
    }
    typename Cpu<real>::Heads heads() { return {q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, gate}; }
    typename Cpu<real>::HeadGradients gradients() { return {q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, gate}; }
};

// first, queries: part of the positions; whatever lies outside must stay as it was.
template <class real>
void check_split_heads(NsaShape s, Cpu<real>& cpu) {
    using Num = oracle::Number<real>;
    const ShapeReport report{s, engine_name<real>()};
    Random random(70);
    const int P = s.projected(), D = s.D;
    Buffer<real> projected(size_t(s.B) * s.queries * P, "projected");
    projected.fill(random);
    HeadBuffers<real> out(s);
    oracle::Numbers<real> q(out.q.size()), gate(out.gate.size());
    std::vector<oracle::Numbers<real>> kv(6);
    for (int slot = 0; slot < 6; slot++) kv[size_t(slot)].resize(out.kv[size_t(slot)].size());
    for (int b = 0; b < s.B; b++)
        for (int j = 0; j < s.queries; j++) {
            real* row = projected + (size_t(b) * s.queries + j) * P;
            for (int head = 0; head < s.H; head++) {
                const oracle::Numbers<real> turned = oracle::rope(row + head * D, s.first + j, D, +1);
                std::copy(turned.begin(), turned.end(), &q[((size_t(b) * s.H + head) * s.queries + j) * D]);
            }
            int column = s.H * D;
            for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++, column += D) {
                    const oracle::Numbers<real> plain = oracle::numbers(row + column, size_t(D)),
                                                turned = oracle::rope(row + column, s.first + j, D, +1);
                    const bool rotated = slot == K_SLC || slot == K_WIN;
                    std::copy_n(rotated ? turned.begin() : plain.begin(), D,
                                &kv[size_t(slot)][((size_t(b) * s.G + g) * s.T + s.first + j) * D]);
                }
            if (s.full) continue;
            for (int head = 0; head < s.H; head++)
                for (int branch = 0; branch < 3; branch++) {
                    if (head + branch == 0 && j == 0) row[column] = 1000;
                    gate[((size_t(branch) * s.B + b) * s.H + head) * s.queries + j] =
                        oracle::sigmoid(Num(row[column + 3 * head + branch]));
                }
            for (int i = column + 3 * s.H; i < P; i++)
                row[i] = std::numeric_limits<real>::quiet_NaN();  // padding is not read
        }
    cpu.split_heads_forward(out.heads(), projected, s);
    CHECK_ARRAY(out.q, q, s.B, s.H, s.queries, D);
    CHECK_ARRAY(out.gate, gate, 3, s.B, s.H, s.queries);
    for (int slot = 0; slot < 6; slot++) {
        Buffer<real>& found = out.kv[size_t(slot)];
        for (size_t i = 0; i < found.size(); i++)
            if (const int t = int(i / D % s.T); t < s.first || t >= s.first + s.queries) {
                CHECK(std::isnan(found[i]));
                found[i] = 0;  // as in the oracle's array
            }
        CHECK_ARRAY(found, kv[size_t(slot)], s.B, s.G, s.T, D);
    }
    if (s.first != 0 || s.queries != s.T) return;

    // Backward: each gradient goes to the columns its head came from, turned back.
    HeadBuffers<real> d(s);
    d.q.fill(random), d.gate.fill(random);
    for (Buffer<real>& x : d.kv) x.fill(random);
    oracle::Numbers<real> expected;
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++) {
            for (int head = 0; head < s.H; head++) {
                const oracle::Numbers<real> turned =
                    oracle::rope(d.q + ((size_t(b) * s.H + head) * s.T + t) * D, t, D, -1);
                expected.insert(expected.end(), turned.begin(), turned.end());
            }
            for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++) {
                    const real* in = d.kv[size_t(slot)] + ((size_t(b) * s.G + g) * s.T + t) * D;
                    const oracle::Numbers<real> row =
                        slot == K_SLC || slot == K_WIN ? oracle::rope(in, t, D, -1) : oracle::numbers(in, size_t(D));
                    expected.insert(expected.end(), row.begin(), row.end());
                }
            if (s.full) continue;
            for (int i = 0; i < s.gate_columns(); i++)  // column 3*head + branch; the padding 0
                expected.push_back(i < 3 * s.H ? Num(d.gate[((size_t(i % 3) * s.B + b) * s.H + i / 3) * s.T + t])
                                               : Num(0));
        }
    Buffer<real> dprojected(projected.size(), "dprojected");
    cpu.split_heads_backward(dprojected, d.gradients(), s);
    CHECK_ARRAY(dprojected, expected, s.B * s.T, P);
}
template <class real>
void check_split_heads_shapes() {
    Cpu<real> cpu;  // one engine for all: its RoPE table has to follow D and T
    for (NsaShape s : {nsa_shape(2, 33, 2, 3, 16, 8, 4, 16, 3, 9), nsa_shape(2, 70, 1, 1, 64, 8, 4, 16, 3, 9),
                       nsa_shape(1, 40, 1, 1, 16, 8, 4, 16, 3, 9), nsa_shape(1, 1025, 1, 2, 2, 8, 4, 16, 3, 9),
                       nsa_shape(1, 5, 2, 4, 16, 8, 4, 16, 3, 9)})
        for (bool full : {false, true}) {
            s.full = full;
            check_split_heads(s, cpu);
            NsaShape part = s;
            part.first = s.T / 2, part.queries = 1;
            check_split_heads(part, cpu);
            part.queries = s.T - part.first;
            check_split_heads(part, cpu);
        }
}
TEST(op_split_heads) { check_split_heads_shapes<float>(), check_split_heads_shapes<double>(); }

// q(t) . k(u) of the same projected rows, once at positions 0.. and once at first..: equal but for rounding. Each
// element of q and k carries the rotation's error e; a dot product of D terms then differs by at most twice the sum of
// |q| e(k) + |k| e(q).
TEST(op_rope_scores_depend_on_distance_alone) {
    NsaShape here = nsa_shape(1, 40, 1, 1, 64, 8, 4, 16, 3, 9), there = here;
    there.first = 777, there.T = there.first + there.queries;
    Random random(75);
    Cpu<float> cpu;
    Buffer<float> projected(size_t(here.queries) * here.projected(), "projected");
    projected.fill(random);
    HeadBuffers<float> a(here), b(there);
    cpu.split_heads_forward(a.heads(), projected, here);
    cpu.split_heads_forward(b.heads(), projected, there);
    double most = 0;
    for (int slot : {K_SLC, K_WIN})
        for (int t = 0; t < here.queries; t++)
            for (int u = 0; u < here.queries; u++) {
                double one = 0, other = 0, limit = 0;
                const float *q1 = a.q + t * 64, *q2 = b.q + t * 64, *k1 = a.kv[size_t(slot)] + u * 64,
                            *k2 = b.kv[size_t(slot)] + (u + there.first) * 64;
                for (int x = 0; x < 64; x++) {
                    one += double(q1[x]) * k1[x], other += double(q2[x]) * k2[x];
                    // An element is a c - b s: tables and products rounded to u each, and the difference: 3u (|a| +
                    // |b|) at most.
                    const int pair = (x + 32) % 64;
                    // |a| + |b| <= sqrt(2) * the length of the pair, which the rotation keeps.
                    const double reach_q = std::hypot(q1[x], q1[pair]), reach_k = std::hypot(k1[x], k1[pair]);
                    limit += 2 * 2 * 3 * std::sqrt(2.0) * oracle::Number<float>::u * reach_q * reach_k;
                }
                CHECK_NEAR(one, other, limit);
                most = std::fmax(most, std::fabs(float(q1[0]) - q2[0]));
            }
    CHECK(most > 0.1);  // the positions did matter to the vectors themselves
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression.

template <class real>
struct PhiBuffers {
    Buffer<real> fc1, bias, fc2;
    explicit PhiBuffers(const NsaShape& s)
        : fc1(size_t(s.F) * s.l * s.D, "fc1"), bias(size_t(s.F), "bias"), fc2(size_t(s.D) * s.F, "fc2") {}
    void fill(Random& random) { fc1.fill(random, 0.3), bias.fill(random), fc2.fill(random); }
    void zero() { fc1.zero(), bias.zero(), fc2.zero(); }
    typename Cpu<real>::Phi phi() { return {fc1, bias, fc2}; }
    oracle::PhiWeights<real> weights() const { return {fc1.data(), bias.data(), fc2.data()}; }
};

template <class real>
void check_compress(const NsaShape& s, bool rotated) {
    const ShapeReport report{s, engine_name<real>()};
    Random random(80);
    Cpu<real> cpu;
    const int NC = oracle::blocks(s.T, s);
    const size_t rows = size_t(s.B) * s.G * NC;
    Buffer<real> k(size_t(s.B) * s.G * s.T * s.D, "k"), out(rows * s.D, "out"), hidden(rows * s.F, "hidden"),
        dout(out.size(), "dout"), dk(k.size(), "dk");
    PhiBuffers<real> phi(s), dphi(s);
    k.fill(random), phi.fill(random), dout.fill(random), dphi.fill(random);
    cpu.compress_forward(out, hidden, k, phi.phi(), rotated, s);
    const oracle::Compressed<real> expected = oracle::compress(k.data(), phi.weights(), rotated, s);
    CHECK_ARRAY(out, expected.out, s.B * s.G, NC, s.D);
    CHECK_ARRAY(hidden, expected.hidden, s.B * s.G, NC, s.F);

    oracle::CompressGradients<real> d;
    d.dfc1 = oracle::numbers(dphi.fc1), d.dbias = oracle::numbers(dphi.bias), d.dfc2 = oracle::numbers(dphi.fc2);
    oracle::compress_backward(d, dout.data(), hidden.data(), k.data(), phi.weights(), rotated, s);
    cpu.compress_backward(dk, dphi.phi(), dout, hidden, k, phi.phi(), rotated, s);
    CHECK_ARRAY(dk, d.dk, s.B * s.G, s.T, s.D);
    CHECK_ARRAY(dphi.fc1, d.dfc1, s.F, s.l, s.D);
    CHECK_ARRAY(dphi.bias, d.dbias);
    CHECK_ARRAY(dphi.fc2, d.dfc2, s.D, s.F);
}
TEST(op_compress) {
    for (const NsaShape& s : nsa_shapes())
        if (s.T * s.D * s.l / s.d < 20000)
            for (bool rotated : {false, true}) check_compress<float>(s, rotated), check_compress<double>(s, rotated);
    NsaShape wide = nsa_shape(1, 100, 1, 1, 64, 32, 16, 64, 16, 512);  // the preset's l, d, D, F
    wide.F = 128;
    check_compress<float>(wide, true);
}
TEST(op_compress_is_average_pooling_while_fc2_is_zero) {
    const NsaShape s = nsa_shape(1, 100, 1, 1, 16, 32, 16, 64, 16, 512);
    Random random(81);
    Cpu<float> cpu;
    const int NC = 5;  // (100 - 32) / 16 + 1
    PhiBuffers<float> phi(s);
    phi.fill(random), phi.fc2.zero();
    Buffer<float> k(100 * 16, "k"), out(NC * 16, "out"), hidden(size_t(NC) * s.F, "hidden");
    k.fill(random);
    cpu.compress_forward(out, hidden, k, phi.phi(), false, s);
    for (int block = 0; block < NC; block++)
        for (int x = 0; x < 16; x++) {
            oracle::Sum<float> sum;
            for (int t = 16 * block; t < 16 * block + 32; t++) sum.add(oracle::Number<float>(k[t * 16 + x]));
            const oracle::Number<float> mean = oracle::Number<float>(sum) / oracle::Number<float>(32);
            CHECK_NEAR(out[block * 16 + x], mean.value, mean.error);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The attention branches, against an independent softmax.

template <class real>
struct AttentionInputs {
    Buffer<real> q, gate, dout;
    std::vector<Buffer<real>> k, v;  // by branch
    AttentionInputs(const NsaShape& s, Random& random, double score_scale = 1)
        : q(size_t(s.B) * s.H * s.queries * s.D, "q"),
          gate(size_t(3) * s.B * s.H * s.queries, "gate"),
          dout(size_t(s.B) * s.queries * s.H * s.D, "dout") {
        q.fill(random, score_scale), dout.fill(random);
        for (size_t i = 0; i < gate.size(); i++) gate[i] = real(1 / (1 + std::exp(-2 * random.normal())));
        for (Branch branch : {CMP, SLC, WIN}) {
            const size_t count = s.full && branch != WIN ? 0 : size_t(s.B) * s.G * oracle::key_rows(branch, s) * s.D;
            k.emplace_back(count, "k"), v.emplace_back(count, "v");
            k.back().fill(random), v.back().fill(random);
        }
    }
};

template <class real>
void check_selection(const uint32_t* found, const real* share, const real* q, const real* kc, const real* lse,
                     const NsaShape& s, bool bf16 = false);

// The compressed branch, with and without the selection that its scores lead to.
template <class real>
void check_both_ways(Cpu<real>& cpu, Buffer<real>& out, Buffer<real>& lse, Buffer<uint32_t>& selection,
                     const AttentionInputs<real>& in, const NsaShape& s) {
    Buffer<real> share(size_t(s.B) * s.G * s.queries, "chosen_importance"), alone(out.size(), "out"),
        alone_lse(lse.size(), "lse");
    cpu.attend_and_select(out, lse, selection, share, in.q, in.k[CMP], in.v[CMP], s);
    check_selection<real>(selection, share, in.q, in.k[CMP], lse, s, cpu.gemm.bf16);
    cpu.attention_forward(CMP, alone, alone_lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
    CHECK_SAME_BITS(alone.data(), out.data(), out.size());
    CHECK_SAME_BITS(alone_lse.data(), lse.data(), lse.size());
}

// Forward of each branch, selection, combination; in training shapes the backward too, as one chain from the same
// inputs as the oracle's.
template <class real>
void check_attention(const NsaShape& s, double score_scale = 1, bool extreme_gates = false, bool bf16 = false) {
    using Num = oracle::Number<real>;
    const ShapeReport report{s, engine_name<real>()};
    Random random(90);
    Cpu<real> cpu;
    cpu.gemm.bf16 = bf16;
    AttentionInputs<real> in(s, random, score_scale);
    if (extreme_gates)  // sigmoid(-87), and a gate that rounds to 1
        for (size_t i = 0; i < in.gate.size(); i += 3) in.gate[i] = i % 2 ? real(1) : real(std::exp(-87.0));
    const size_t rows = s.query_rows(), values = rows * s.D;
    const std::vector<Branch> branches = s.full ? std::vector<Branch>{WIN} : std::vector<Branch>{CMP, SLC, WIN};
    const size_t count = branches.size();
    Buffer<real> o(count * values, "o"), lse(count * rows, "lse"), out(in.dout.size(), "out");
    Buffer<uint32_t> selection(s.full ? 0 : size_t(s.B) * s.G * s.queries * oracle::selection_words(s), "selection");
    const oracle::Numbers<real> q = oracle::numbers(in.q);
    std::vector<oracle::Numbers<real>> k, v;
    for (int branch = 0; branch < 3; branch++) {
        k.push_back(oracle::numbers(in.k[size_t(branch)]));
        v.push_back(oracle::numbers(in.v[size_t(branch)]));
    }
    std::vector<oracle::Sum<real>> combined(out.size());
    for (Branch branch : branches) {
        Buffer<real> branch_out(values, "branch output"), branch_lse(rows, "branch lse");
        if (branch == CMP) check_both_ways(cpu, branch_out, branch_lse, selection, in, s);
        else cpu.attention_forward(branch, branch_out, branch_lse, in.q, in.k[branch], in.v[branch], selection, s);
        const oracle::Attended<real> expected =
            oracle::attention(branch, q, k[branch], v[branch], selection.data(), s, bf16);
        CHECK_ARRAY(branch_out, expected.out, s.B, s.H, s.queries, s.D);
        CHECK_ARRAY(branch_lse, expected.lse, s.B, s.H, s.queries);
        const size_t at = s.full ? 0 : branch;  // full attention has one branch
        std::copy_n(branch_out.data(), values, o + at * values);
        std::copy_n(branch_lse.data(), rows, lse + at * rows);
        for (int b = 0; b < s.B; b++)
            for (int head = 0; head < s.H; head++)
                for (int j = 0; j < s.queries; j++) {
                    const size_t row = (size_t(b) * s.H + head) * s.queries + j;
                    const Num gate = s.full ? Num(1) : Num(in.gate[branch * rows + row]);
                    for (int x = 0; x < s.D; x++)
                        combined[((size_t(b) * s.queries + j) * s.H + head) * s.D + x].add(gate *
                                                                                           expected.out[row * s.D + x]);
                }
    }
    cpu.combine_forward(out, o, s.full ? nullptr : in.gate.data(), s);
    CHECK_ARRAY(out, oracle::numbers(combined), s.B, s.queries, s.H, s.D);
    if (s.first != 0 || s.queries != s.T) return;

    Buffer<real> row_dot(count * rows, "row_dot"), lse_gated(count * rows, "lse_gated"),
        dz(s.full ? 0 : 3 * rows, "dgate_logit"), dq(values, "dq");
    dq.fill(random);  // accumulates over the branches
    std::vector<oracle::Sum<real>> dq_sums(values);
    for (size_t i = 0; i < values; i++) dq_sums[i].add(Num(dq[i]));
    cpu.attention_backward_rows(row_dot, lse_gated, dz, in.dout, o, s.full ? nullptr : in.gate.data(), lse, s);
    oracle::Numbers<real> expected_dz;
    for (Branch branch : branches) {
        Buffer<real> dk(in.k[branch].size(), "dk"), dv(in.v[branch].size(), "dv");
        Buffer<real> only_dq(values, "dq, written");
        const size_t at = s.full ? 0 : branch * rows;
        cpu.attention_backward(branch, {only_dq, false, dk, dv, in.dout, row_dot + at, lse_gated + at},
                               {in.q, in.k[branch], in.v[branch], selection}, s);
        cpu.attention_backward(branch, {dq, true, dk, dv, in.dout, row_dot + at, lse_gated + at},
                               {in.q, in.k[branch], in.v[branch], selection}, s);
        const oracle::AttentionGradients<real> d =
            oracle::attention_backward(branch, q, k[branch], v[branch], s.full ? nullptr : in.gate + branch * rows,
                                       in.dout.data(), selection.data(), s, bf16);
        CHECK_ARRAY(dk, oracle::numbers(d.dk), s.B, s.G, oracle::key_rows(branch, s), s.D);
        CHECK_ARRAY(dv, oracle::numbers(d.dv), s.B, s.G, oracle::key_rows(branch, s), s.D);
        CHECK_ARRAY(only_dq, oracle::numbers(d.dq), s.B, s.H, s.queries, s.D);
        for (size_t i = 0; i < values; i++) dq_sums[i].add(d.dq[i]);
        expected_dz.insert(expected_dz.end(), d.dz.begin(), d.dz.end());
    }
    CHECK_ARRAY(dq, oracle::numbers(dq_sums), s.B, s.H, s.queries, s.D);
    if (!s.full) CHECK_ARRAY(dz, expected_dz, 3, s.B, s.H, s.queries);
}

// Whether masks are what the rule gives: forced blocks, count, no block of the future, and no block left out that is
// more important than one taken by more than the rounding of both. share: what select_blocks says about the share of
// the importance that fell on the taken.
template <class real>
void check_selection(const uint32_t* found, const real* share, const real* q, const real* kc, const real* lse,
                     const NsaShape& s, bool bf16) {
    const int words = oracle::selection_words(s), h = s.H / s.G, NC = oracle::blocks(s.T, s);
    for (int b = 0; b < s.B; b++)
        for (int g = 0; g < s.G; g++)
            for (int j = 0; j < s.queries; j++) {
                const int t = s.first + j, last = t / s.slc_block;
                const size_t at = (size_t(b) * s.G + g) * s.queries + j,
                             row = (size_t(b) * s.H + g * h) * s.queries + j;
                const std::vector<int> chosen = blocks_of(found + at * words, words);
                CHECK_EQUAL(int(chosen.size()), std::min(s.slc_count, last + 1));
                CHECK(chosen.back() == last && chosen.front() == 0);
                if (last > 0) CHECK(std::count(chosen.begin(), chosen.end(), last - 1) == 1);
                if (last + 1 <= s.slc_count) {
                    if (share) CHECK_EQUAL(share[at], real(1));
                    continue;
                }
                const oracle::Numbers<real> importance = oracle::importance(
                    q + row * s.D, lse + row, size_t(s.queries), kc + (size_t(b) * s.G + g) * NC * s.D, t, s, bf16);
                oracle::Sum<real> taken, all;
                double least = 1e300,
                       most = -1e300;  // the least important block taken (at most), the most important left (at least)
                for (int block = 0; block <= last; block++) {
                    const oracle::Number<real> x = importance[size_t(block)];
                    const bool is_chosen = std::count(chosen.begin(), chosen.end(), block) == 1,
                               forced = block == 0 || block >= last - 1;
                    all.add(x);
                    if (is_chosen) taken.add(x);
                    if (is_chosen && !forced) least = std::min(least, x.value + x.error);
                    if (!is_chosen) most = std::max(most, x.value - x.error);
                }
                CHECK(all.value >= 0);  // no importance is NaN, which `least` and `most` would pass over
                CHECK(s.slc_count == 3 || least >= most);
                const oracle::Number<real> expected = oracle::Number<real>(taken) / oracle::Number<real>(all);
                if (share && all.value > 0) CHECK_NEAR(share[at], expected.value, expected.error);
            }
}

TEST(op_attention_fp32) {
    for (const NsaShape& s : nsa_shapes()) check_attention<float>(s);
}
// In fp64 both sides are the specification: what shows here is that it writes all of its outputs and nothing else, and
// reads nothing that was not written.
TEST(op_attention_fp64) {
    for (const NsaShape& s : nsa_shapes())
        if (s.T <= 130) check_attention<double>(s);
}
// Decoding: some positions of a sequence, or one, that starts anywhere.
TEST(op_attention_in_parts) {
    for (NsaShape s : nsa_shapes())
        for (const auto& [first, queries] :
             {std::pair<int, int>{0, s.T / 2}, {s.T / 2, 1}, {s.T - 1, 1}, {s.T / 3, std::min(s.T - s.T / 3, 40)}}) {
            if (queries == 0 || (first == 0 && s.T > 130)) continue;
            s.first = first, s.queries = queries;
            check_attention<float>(s);
            if (HAVE_BF16) check_attention<float>(s, 1, false, true);
        }
}
TEST(op_attention_bf16) {
    if (!HAVE_BF16) return skip("attention in bf16: this build's processor has no AVX512_BF16");
    for (const NsaShape& s : nsa_shapes()) check_attention<float>(s, 1, false, true);
}
TEST(op_attention_full) {
    for (NsaShape s : {nsa_shape(2, 1, 1, 2, 16, 8, 4, 16, 3, 1), nsa_shape(1, 65, 2, 3, 16, 8, 4, 16, 3, 2),
                       nsa_shape(1, 200, 1, 2, 2, 8, 4, 16, 3, 2)}) {
        s.full = true;  // over all tokens, whatever the window
        check_attention<float>(s), check_attention<double>(s);
        if (HAVE_BF16) check_attention<float>(s, 1, false, true);
    }
}
TEST(op_attention_large_logits_stay_finite) {
    // Scores q.k/sqrt(D) of standard deviation 1e3, and gates down to
    // sigmoid(-87): finite and within the limits, which grow with the scores.
    for (const NsaShape& s : nsa_shapes())
        if (s.T <= 130) check_attention<float>(s, 1e3, true);
    for (const NsaShape& s : nsa_shapes())
        if (s.T <= 65) check_attention<double>(s, 1e3, true);
}

// A prompt shorter than the caches: what lies behind position first + queries is NaN here, and not read.
TEST(op_attention_reads_nothing_behind_its_positions) {
    for (int queries : {1, 31, 32, 64, 100}) {
        NsaShape s = nsa_shape(2, 130, 2, 3, 16, 8, 4, 16, 4, 40), prefix = s;
        s.queries = queries;
        prefix.T = prefix.queries = queries;
        Random random(95);
        Cpu<float> cpu;
        AttentionInputs<float> in(s, random);
        for (Branch branch : {CMP, SLC, WIN}) {
            const int stride = oracle::key_rows(branch, s), used = oracle::key_rows(branch, prefix);
            Buffer<float> short_k(size_t(s.B) * s.G * used * s.D), short_v(short_k.size());
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int key = 0; key < stride; key++)
                    for (int x = 0; x < s.D; x++)
                        for (bool is_key : {true, false}) {
                            float& value = (is_key ? in.k : in.v)[branch][(size_t(bg) * stride + key) * s.D + x];
                            if (key < used) (is_key ? short_k : short_v)[(size_t(bg) * used + key) * s.D + x] = value;
                            else value = std::numeric_limits<float>::quiet_NaN();
                        }
            in.k.push_back(std::move(short_k)), in.v.push_back(std::move(short_v));
        }
        Buffer<uint32_t> selection(size_t(s.B) * s.G * queries * s.selection_words(), "selection"),
            short_selection(size_t(s.B) * s.G * queries * prefix.selection_words());
        for (Branch branch : {CMP, SLC, WIN}) {
            Buffer<float> out(in.q.size(), "out"), lse(s.query_rows(), "lse"), short_out(out.size()),
                short_lse(lse.size());
            const auto forward = [&](float* o, float* l, uint32_t* chosen, size_t i, const NsaShape& shape) {
                if (branch == CMP) cpu.attend_and_select(o, l, chosen, nullptr, in.q, in.k[i], in.v[i], shape);
                else cpu.attention_forward(branch, o, l, in.q, in.k[i], in.v[i], chosen, shape);
            };
            forward(out, lse, selection, size_t(branch), s);
            forward(short_out, short_lse, short_selection, size_t(branch) + 3, prefix);
            CHECK_SAME_BITS(out.data(), short_out.data(), out.size());
            CHECK_SAME_BITS(lse.data(), short_lse.data(), lse.size());
        }
        for (int row = 0; row < s.B * s.G * queries; row++)
            CHECK(blocks_of(selection + row * s.selection_words(), s.selection_words()) ==
                  blocks_of(short_selection + row * prefix.selection_words(), prefix.selection_words()));
    }
}

// ----- the branches equal dense causal attention where they should.

// Dense causal attention: every token up to its own, whatever the branch's blocks and window are.
template <class real>
oracle::Attended<real> dense_causal(const oracle::Numbers<real>& q, const oracle::Numbers<real>& k,
                                    const oracle::Numbers<real>& v, int tile, NsaShape s) {
    s.full = true;
    return oracle::attention(WIN, q, k, v, nullptr, s, false, tile);
}
template <class real>
void check_dense_equivalences() {
    Random random(100);
    Cpu<real> cpu;
    // slc: T = n l', the last length at which a query may take all its blocks. win: w = T. cmp: l = d = 1, fc2 = 0.
    NsaShape s = nsa_shape(2, 96, 2, 3, 16, 1, 1, 16, 6, 96);
    AttentionInputs<real> in(s, random);
    const oracle::Numbers<real> q = oracle::numbers(in.q), v = oracle::numbers(in.v[WIN]);
    Buffer<real> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    Buffer<uint32_t> selection(size_t(s.B) * s.G * s.T * s.selection_words(), "selection");

    cpu.attend_and_select(out, lse, selection, nullptr, in.q, in.k[CMP], in.v[CMP], s);
    const oracle::Attended<real> dense_slc =
        dense_causal(q, oracle::numbers(in.k[SLC]), oracle::numbers(in.v[SLC]), 16, s);
    cpu.attention_forward(SLC, out, lse, in.q, in.k[SLC], in.v[SLC], selection, s);
    CHECK_ARRAY(out, dense_slc.out, s.B, s.H, s.T, s.D);
    CHECK_ARRAY(lse, dense_slc.lse, s.B, s.H, s.T);

    const oracle::Attended<real> dense_win = dense_causal(q, oracle::numbers(in.k[WIN]), v, 64, s);
    for (int window : {96, 97, 1000}) {
        s.window = window;
        out.poison(), lse.poison();
        cpu.attention_forward(WIN, out, lse, in.q, in.k[WIN], in.v[WIN], nullptr, s);
        CHECK_ARRAY(out, dense_win.out, s.B, s.H, s.T, s.D);
        CHECK_ARRAY(lse, dense_win.lse, s.B, s.H, s.T);
    }

    PhiBuffers<real> phi(s);
    phi.fill(random), phi.fc2.zero();
    Buffer<real> kc(in.k[WIN].size(), "kc"), vc(kc.size(), "vc"), hidden(size_t(s.B) * s.G * s.T * s.F, "hidden");
    cpu.compress_forward(kc, hidden, in.k[WIN], phi.phi(), true, s);
    cpu.compress_forward(vc, hidden, in.v[WIN], phi.phi(), false, s);
    oracle::Numbers<real> turned;
    for (int row = 0; row < s.B * s.G * s.T; row++) {
        const oracle::Numbers<real> key = oracle::rope(in.k[WIN] + row * s.D, row % s.T, s.D, +1);
        turned.insert(turned.end(), key.begin(), key.end());
    }
    const oracle::Attended<real> dense_cmp = dense_causal(q, turned, v, 64, s);
    cpu.attention_forward(CMP, out, lse, in.q, kc, vc, nullptr, s);
    CHECK_ARRAY(out, dense_cmp.out, s.B, s.H, s.T, s.D);
    CHECK_ARRAY(lse, dense_cmp.lse, s.B, s.H, s.T);
}
TEST(op_branches_equal_dense_attention) { check_dense_equivalences<float>(), check_dense_equivalences<double>(); }

// Window attention on rotated heads: the same rows at other positions give the same output, once the window lies
// inside. Both sides are within the oracle's limit of the truth (its q and k carry the rotation's errors), hence within
// the sum of both limits of each other.
TEST(op_window_attention_does_not_see_absolute_positions) {
    NsaShape here = nsa_shape(1, 90, 1, 2, 16, 8, 4, 16, 3, 20), there = here;
    there.first = 333, there.T = there.first + there.queries;
    Random random(105);
    Cpu<float> cpu;
    Buffer<float> projected(size_t(here.queries) * here.projected(), "projected");
    projected.fill(random);
    HeadBuffers<float> a(here), b(there);
    cpu.split_heads_forward(a.heads(), projected, here);
    for (Buffer<float>& x : b.kv) x.zero();
    cpu.split_heads_forward(b.heads(), projected, there);
    Buffer<float> out_a(a.q.size(), "out"), out_b(a.q.size(), "out"), lse_a(here.query_rows(), "lse"),
        lse_b(here.query_rows(), "lse");
    cpu.attention_forward(WIN, out_a, lse_a, a.q, a.kv[K_WIN], a.kv[V_WIN], nullptr, here);
    cpu.attention_forward(WIN, out_b, lse_b, b.q, b.kv[K_WIN], b.kv[V_WIN], nullptr, there);
    // x with twice the error that a rotation leaves in it: 3u (|a| + |b|) <= 3 sqrt(2) u |pair|
    auto turned = [](const Buffer<float>& x, int D) {
        oracle::Numbers<float> n = oracle::numbers(x);
        for (size_t i = 0; i < n.size(); i++) {
            const size_t pair = i / D * D + (i % D + D / 2) % D;
            n[i].error = 2 * 3 * std::sqrt(2.0) * oracle::Number<float>::u * std::hypot(n[i].value, n[pair].value);
        }
        return n;
    };
    const oracle::Attended<float> expected =
        oracle::attention(WIN, turned(a.q, 16), turned(a.kv[K_WIN], 16), oracle::numbers(a.kv[V_WIN]), nullptr, here);
    for (int head = 0; head < here.H; head++)
        for (int t = here.window; t < here.T; t++)  // all of (t-w, t] is inside
            for (int x = 0; x < here.D; x++) {
                const size_t at = (size_t(head) * here.T + t) * here.D + x;
                CHECK_NEAR(out_b[at], out_a[at], 2 * expected.out[at].error);
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// Selection.

TEST(op_importance_weights) {
    // One compressed block alone has weight: what it gives to each selection
    // block. 32/16/64: 1, 2, 2, 2, 1 at blocks 4j-1 .. 4j+3, exactly.
    NsaShape s = nsa_shape(1, 1024, 1, 1, 2, 32, 16, 64, 16, 512);
    const int NC = oracle::blocks(s.T, s);
    for (int i = 0; i < NC; i++) {
        Buffer<float> weight(size_t(NC), "weight"), importance(16, "importance");
        weight.zero();
        weight[i] = 1;
        for (bool tiled : {false, true}) {
            (tiled ? TiledAttention::fold_importance : Cpu<float>::fold_importance)(importance, weight, s.T - 1, s);
            for (int j = 0; j < 16; j++) {
                const int offset = i - 4 * j;
                CHECK_EQUAL(importance[j], offset == -1 || offset == 3  ? 1.0f
                                           : offset >= 0 && offset <= 2 ? 2.0f
                                                                        : 0.0f);
            }
        }
    }
    // Any l, d, l': the tokens that both share, counted one by one, over d; only blocks that t sees count.
    for (const NsaShape& shape : nsa_shapes()) {
        if (shape.T > 130) continue;
        s = shape;
        for (int t = 0; t < s.T; t += 1 + s.T / 20) {
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
}

// Queries of zero: all softmax weights are the same number, so all inner blocks tie, and the rule alone decides: 0, 1,
// .., n-3, b-1, b.
template <class real>
void check_ties_of_zero_queries() {
    const NsaShape s = nsa_shape(1, 900, 1, 3, 2, 32, 16, 64, 6, 64);
    Random random(110);
    Cpu<real> cpu;
    AttentionInputs<real> in(s, random, 0);
    Buffer<real> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    Buffer<uint32_t> selection(size_t(s.T) * s.selection_words(), "selection");
    cpu.attend_and_select(out, lse, selection, nullptr, in.q, in.k[CMP], in.v[CMP], s);
    for (int t = 0; t < s.T; t++) {
        const int b = t / 64;
        std::vector<int> expected;
        for (int block = 0; block <= b; block++)
            if (b + 1 <= 6 || block <= 3 || block >= b - 1) expected.push_back(block);
        CHECK(blocks_of(selection + size_t(t) * s.selection_words(), s.selection_words()) == expected);
    }
}
// Three classes of compressed keys, each class one vector: blocks of a class tie exactly, however they fall into tiles
// and vectors.
template <class real>
void check_ties_of_classes(int heads, int first, int queries) {
    NsaShape s = nsa_shape(1, 400, 1, heads, 2, 4, 4, 4, 8,
                           64);  // l = d = l' = 4: compressed and selected blocks are the same 100
    s.first = first, s.queries = queries;
    Random random(111);
    Cpu<real> cpu;
    AttentionInputs<real> in(s, random);
    const double rank[] = {-1, 2, 1};  // class of block i: i % 3; its key: rank * (1, 0); queries (1, 0) scaled
    for (int i = 0; i < 100; i++) in.k[CMP][2 * i] = real(rank[i % 3]), in.k[CMP][2 * i + 1] = 0;
    for (size_t i = 0; i < in.q.size(); i += 2) in.q[i] = real(0.7), in.q[i + 1] = 0;
    Buffer<real> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    Buffer<uint32_t> selection(size_t(s.queries) * s.selection_words(), "selection");
    cpu.attend_and_select(out, lse, selection, nullptr, in.q, in.k[CMP], in.v[CMP], s);
    for (int t = first; t < first + queries; t++) {
        std::vector<double> importance;
        for (int block = 0; block <= t / 4; block++)
            importance.push_back(4 * block + 3 <= t ? rank[block % 3] : -2);  // seen from its end on
        CHECK(blocks_of(selection + size_t(t - first) * s.selection_words(), s.selection_words()) ==
              oracle::select(importance, 8));
    }
}
TEST(op_ties_go_to_the_lower_block) {
    check_ties_of_zero_queries<float>(), check_ties_of_zero_queries<double>();
    for (int heads : {1, 3}) {
        check_ties_of_classes<float>(heads, 0, 400), check_ties_of_classes<double>(heads, 0, 400);
        for (int t : {63, 255, 397}) check_ties_of_classes<float>(heads, t, 1);
    }
}

// Masks of the test's own: any mask is obeyed; blocks that no query selects get
// gradient 0, to the bit; a query whose mask is empty gives out 0 and lse +infinity.
template <class real>
void check_given_selection() {
    const NsaShape s = nsa_shape(1, 100, 2, 3, 16, 8, 4, 16, 3, 9);
    Random random(120);
    Cpu<real> cpu;
    AttentionInputs<real> in(s, random);
    const int words = s.selection_words(), T = s.T, empty = 50;
    Buffer<uint32_t> selection(size_t(s.G) * T * words, "selection");
    selection.zero();
    for (int g = 0; g < s.G; g++)
        for (int t = 0; t < T; t++)
            for (int block = 0; block <= t / 16; block++)  // group 0 never takes block 2, group 1 never block 0 and 3
                if (t != empty && random.below(2) && (g == 0 ? block != 2 : block != 0 && block != 3))
                    selection[(g * T + t) * words] |= 1u << block;
    const oracle::Numbers<real> q = oracle::numbers(in.q), k = oracle::numbers(in.k[SLC]),
                                v = oracle::numbers(in.v[SLC]);
    const size_t rows = s.query_rows();
    // The other branches' outputs are 0 and their lse too: only the selected branch counts here.
    Buffer<real> out(rows * s.D, "out"), lse(rows, "lse"), o(3 * rows * s.D), lses(3 * rows), row_dot(3 * rows),
        lse_gated(3 * rows), dz(3 * rows);
    cpu.attention_forward(SLC, out, lse, in.q, in.k[SLC], in.v[SLC], selection, s);
    const oracle::Attended<real> expected = oracle::attention(SLC, q, k, v, selection.data(), s);
    CHECK_ARRAY(out, expected.out, s.B, s.H, T, s.D);
    CHECK_ARRAY(lse, expected.lse, s.B, s.H, T);
    for (int head = 0; head < s.H; head++) {
        CHECK_EQUAL(lse[head * T + empty], std::numeric_limits<real>::infinity());
        for (int x = 0; x < s.D; x++) CHECK_EQUAL(out[(head * T + empty) * s.D + x], real(0));
    }
    o.zero(), lses.zero();
    std::copy_n(out.data(), out.size(), o + SLC * out.size());
    std::copy_n(lse.data(), rows, lses + SLC * rows);
    cpu.attention_backward_rows(row_dot, lse_gated, dz, in.dout, o, in.gate, lses, s);
    Buffer<real> dq(out.size(), "dq"), dk(in.k[SLC].size(), "dk"), dv(dk.size(), "dv");
    cpu.attention_backward(SLC, {dq, false, dk, dv, in.dout, row_dot + SLC * rows, lse_gated + SLC * rows},
                           {in.q, in.k[SLC], in.v[SLC], selection}, s);
    const oracle::AttentionGradients<real> d =
        oracle::attention_backward(SLC, q, k, v, in.gate + SLC * rows, in.dout.data(), selection.data(), s);
    CHECK_ARRAY(dq, oracle::numbers(d.dq), s.B, s.H, T, s.D);
    CHECK_ARRAY(dk, oracle::numbers(d.dk), s.B, s.G, T, s.D);
    CHECK_ARRAY(dv, oracle::numbers(d.dv), s.B, s.G, T, s.D);
    for (int head = 0; head < s.H; head++) CHECK_EQUAL(dz[SLC * rows + head * T + empty], real(0));
    for (int g = 0; g < s.G; g++)
        for (int block : {0, 2, 3}) {
            if (g == 0 ? block != 2 : block == 2) continue;
            for (int i = 16 * block * s.D; i < 16 * (block + 1) * s.D; i++) {
                CHECK_EQUAL(dk[g * T * s.D + i], real(0));
                CHECK_EQUAL(dv[g * T * s.D + i], real(0));
            }
        }
}
TEST(op_unselected_blocks_get_no_gradient) { check_given_selection<float>(), check_given_selection<double>(); }

TEST(op_rows_without_a_compressed_block) {
    NsaShape s = nsa_shape(2, 70, 2, 3, 16, 32, 16, 64, 16, 9);
    Random random(125);
    Cpu<float> cpu;
    AttentionInputs<float> in(s, random);
    Buffer<float> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    cpu.attention_forward(CMP, out, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
    for (size_t row = 0; row < s.query_rows(); row++) {
        const bool sees = row % size_t(s.T) >= 31;  // block 0 ends at token l - 1
        CHECK_EQUAL(std::isinf(lse[row]), !sees);
        if (!sees) CHECK(lse[row] > 0);
        for (int x = 0; x < s.D; x++) CHECK_EQUAL(out[row * s.D + x] == 0, !sees);
    }
}
