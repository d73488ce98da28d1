// op_attention_tests.h: of heads, compression, attention and selection on struct Cpu what is known without comparing
// with an oracle, and --cpu-dtype bf16. attention_tests.h has what every engine is asked.
#pragma once
#include <string>
#include <vector>

#include "../../../nsa_cpu.h"
#include "../harness.h"
#include "attention_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE.

template <class real>
struct HeadBuffers {
    Buffer<real> q, gate;
    std::vector<Buffer<real>> kv;
    explicit HeadBuffers(const NsaShape& s)
        : q(size_t(s.B) * s.H * s.queries * s.D, "q"), gate(s.full ? 0 : size_t(3) * s.B * s.H * s.queries, "gate") {
        for (int slot = 0; slot < 6; slot++) kv.emplace_back(s.full && slot < K_WIN ? 0 : s.key_rows() * s.D, "kv");
    }
    typename Cpu<real>::Heads heads() { return {q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, gate}; }
    typename Cpu<real>::HeadGradients gradients() { return {q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, gate}; }
};

// q(t) . k(u) of the same projected rows, once at positions 0.. and once at first..: equal but for rounding. Each
// element of q and k carries the rotation's error e; a dot product of D terms then differs by at most twice the sum of
// |q| e(k) + |k| e(q).
static void check_scores_by_distance(bool normed) {
    NsaShape here = nsa_shape(1, 40, 1, 1, 64, 8, 4, 16, 3, 9);
    here.qk_norm = normed;
    NsaShape there = here;
    there.first = 777, there.T = there.first + there.queries;
    Random random(75);
    Cpu<float> cpu;
    Buffer<float> projected(size_t(here.queries) * here.projected(), "projected");
    projected.fill(random);
    Buffer<float> gains(size_t(here.gain_rows()) * 64, "gains");
    gains.fill(random);
    HeadBuffers<float> a(here), b(there);
    cpu.split_heads_forward(a.heads(), projected, normed ? gains.data() : nullptr, here);
    cpu.split_heads_forward(b.heads(), projected, normed ? gains.data() : nullptr, there);
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
TEST(op_rope_scores_depend_on_distance_alone) { check_scores_by_distance(false); }
TEST(op_normed_scores_depend_on_distance_alone) { check_scores_by_distance(true); }

// What multiplies q or a key changes nothing under --qk-norm, but that its square is larger beside epsilon: of rows
// whose mean square is m, epsilon takes the share 1e-6 / 2m, and less of larger ones. Values change as ever.
TEST(op_scale_of_normed_heads_changes_nothing) {
    NsaShape s = nsa_shape(1, 20, 2, 2, 16, 8, 4, 16, 3, 9);
    s.qk_norm = 1;
    Random random(76);
    Cpu<double> cpu;
    Buffer<double> projected(size_t(s.queries) * s.projected(), "projected"),
        gains(size_t(s.gain_rows()) * s.D, "gains");
    projected.fill(random), gains.fill(random);
    HeadBuffers<double> one(s), other(s);
    cpu.split_heads_forward(one.heads(), projected, gains, s);
    for (size_t i = 0; i < projected.size(); i++) projected[i] *= 64;
    cpu.split_heads_forward(other.heads(), projected, gains, s);
    const auto check = [&](const Buffer<double>& a, const Buffer<double>& b, double factor) {
        for (size_t i = 0; i < a.size(); i++) CHECK_NEAR(b[i], a[i] * factor, 1e-4 * std::fabs(a[i]));
    };
    check(one.q, other.q, 1);
    for (const size_t slot : {K_CMP, K_SLC, K_WIN}) check(one.kv[slot], other.kv[slot], 1);
    for (const size_t slot : {V_CMP, V_SLC, V_WIN}) check(one.kv[slot], other.kv[slot], 64);
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
    PhiOf<real> phi() { return {fc1, bias, fc2}; }
};

// The inputs of attention_tests.h in guarded buffers.
template <class real>
struct BranchInputs {
    Buffer<real> q, gate, dout;
    std::vector<Buffer<real>> k, v;  // by branch

    BranchInputs(const AttentionSetup& x, Random& random) : BranchInputs(AttentionInputs<CpuEngine<real>>(x, random)) {}
    explicit BranchInputs(const AttentionInputs<CpuEngine<real>>& in)
        : q(buffer(in.q)), gate(buffer(in.gate)), dout(buffer(in.dout)) {
        for (size_t branch = 0; branch < 3; branch++) {
            k.push_back(buffer(in.k[branch]));
            v.push_back(buffer(in.v[branch]));
        }
    }
    static Buffer<real> buffer(const std::vector<real>& from) {
        Buffer<real> to(from.size(), "an input");
        std::copy(from.begin(), from.end(), to.data());
        return to;
    }
};

TEST(cpu_attention_bf16) {
    if (!HAVE_BF16) return skip("attention in bf16: this build's processor has no AVX512_BF16");
    const auto dev = CpuEngine<float>::open();
    dev->gemm.bf16 = true;
    std::vector<AttentionSetup> table = attention_parts(true);
    for (const NsaShape& s : attention_shapes(true)) table.push_back({s});
    for (const AttentionSetup& x : full_attention()) table.push_back(x);
    for (AttentionSetup& x : table) x.bf16 = true, check_attention<CpuEngine<float>>(*dev, x);
}

// A prompt shorter than the caches: what lies behind position first + queries is NaN here, and not read.
TEST(op_attention_reads_nothing_behind_its_positions) {
    for (int queries : {1, 31, 32, 64, 100}) {
        NsaShape s = nsa_shape(2, 130, 2, 3, 16, 8, 4, 16, 4, 40), prefix = s;
        s.queries = queries;
        prefix.T = prefix.queries = queries;
        Random random(95);
        Cpu<float> cpu;
        BranchInputs<float> in({s}, random);
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
    BranchInputs<real> in({s}, random);
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
    cpu.compress_heads(kc, hidden, in.k[WIN], phi.phi(), true, s);
    cpu.compress_heads(vc, hidden, in.v[WIN], phi.phi(), false, s);
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
    for (const NsaShape& shape : attention_shapes(true)) {
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

// Three classes of compressed keys, each class one vector: blocks of a class tie exactly, however they fall into tiles
// and vectors.
template <class real>
void check_ties_of_classes(int heads, int first, int queries) {
    NsaShape s = nsa_shape(1, 400, 1, heads, 2, 4, 4, 4, 8,
                           64);  // l = d = l' = 4: compressed and selected blocks are the same 100
    s.first = first, s.queries = queries;
    Random random(111);
    Cpu<real> cpu;
    BranchInputs<real> in({s}, random);
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
    BranchInputs<real> in({s}, random);
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
