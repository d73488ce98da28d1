// attention_tests.h: heads and RoPE, compression, the attention branches, selection and the gated sum of every engine
// against the oracles of oracle.h.
#pragma once
#include "../engines.h"

// ---------------------------------------------------------------------------------------------------------------------
// Shapes: B, T, G, heads per group, D, l, d, l', n, w.

inline NsaShape nsa_shape(int B, int T, int G, int h, int D, int l, int d, int slc_block, int slc_count, int window) {
    NsaShape s;
    s.B = B, s.T = T, s.first = 0, s.queries = T, s.H = G * h, s.G = G, s.D = D, s.l = l, s.d = d;
    s.slc_block = slc_block, s.slc_count = slc_count, s.window = window, s.F = 8;
    return s;
}
inline NsaShape part_of(NsaShape s, int first, int queries) {
    s.first = first, s.queries = queries;
    return s;
}
inline NsaShape full(NsaShape s) {
    s.window_only = s.sees_all = true;
    return s;
}
inline NsaShape with_base(NsaShape s) {
    s.rope_base = 500;
    return s;
}
// And as in decoding: a prompt, one position, the rest.
inline std::vector<NsaShape> with_parts(const std::vector<NsaShape>& shapes) {
    std::vector<NsaShape> all = shapes;
    for (const NsaShape& s : shapes)
        if (s.T > 2)
            for (const auto& [first, queries] :
                 {std::pair<int, int>{0, s.T / 2}, {s.T / 2, 1}, {s.T - 1, 1}, {s.T / 3, s.T - s.T / 3}})
                all.push_back(part_of(s, first, queries));
    return all;
}
// Engines that are fast are asked for more shapes; but in fp64 the CPU's is the specification itself, of which tests
// show that it writes all of its outputs and nothing else, and reads nothing that was not written.
template <class E>
constexpr bool MORE_SHAPES = E::FAST && sizeof(typename E::Value) == 4;
inline std::vector<NsaShape> attention_shapes(bool more) {
    std::vector<NsaShape> shapes = {
        nsa_shape(2, 1, 2, 3, 2, 1, 1, 1, 3, 1),          // one token
        nsa_shape(1, 31, 1, 1, 16, 32, 16, 64, 16, 512),  // no compressed block at all
        nsa_shape(2, 33, 1, 6, 16, 32, 16, 16, 3, 2),     // one or two, for the last queries
        nsa_shape(2, 65, 1, 3, 64, 8, 4, 16, 3, 33),
        nsa_shape(1, 40, 2, 3, 2, 1, 1, 1, 16, 64),      // l = d = l' = 1: blocks are tokens
        nsa_shape(2, 65, 2, 1, 16, 32, 16, 48, 3, 65),   // l' = 48
        nsa_shape(1, 130, 1, 3, 40, 32, 16, 16, 4, 64),  // l > l'; D no multiple of 32
        nsa_shape(1, 130, 2, 2, 16, 16, 4, 20, 3, 7),    // l = 4 d
        nsa_shape(1, 270, 1, 2, 2, 8, 4, 4, 5, 300),     // 68 selection blocks: three words; w > T
        nsa_shape(2, 70, 2, 3, 24, 8, 4, 16, 3, 33),
        nsa_shape(1, 65, 1, 3, 192, 8, 4, 16, 3, 33),  // the paper's D
    };
    if (more)
        for (const NsaShape& s :
             {nsa_shape(2, 1, 1, 1, 64, 32, 16, 64, 16, 512), nsa_shape(2, 32, 1, 6, 16, 32, 16, 64, 16, 2),
              nsa_shape(1, 33, 2, 12, 2, 32, 16, 16, 3, 1), nsa_shape(2, 33, 1, 3, 64, 8, 4, 16, 3, 63),
              nsa_shape(1, 63, 1, 1, 16, 8, 4, 16, 3, 63), nsa_shape(2, 64, 2, 3, 2, 1, 1, 1, 16, 64),
              nsa_shape(1, 64, 1, 6, 64, 8, 4, 16, 4, 65), nsa_shape(1, 65, 1, 12, 16, 8, 4, 8, 4, 64),
              nsa_shape(1, 130, 1, 3, 64, 32, 16, 16, 4, 64), nsa_shape(2, 130, 2, 6, 16, 8, 4, 16, 5, 63),
              nsa_shape(1, 130, 1, 12, 2, 1, 1, 48, 3, 65), nsa_shape(1, 130, 1, 1, 2, 4, 4, 12, 3, 300),  // l = d
              // the 17th block: the first query that must choose
              nsa_shape(1, 1025, 2, 1, 2, 32, 16, 64, 16, 512)})
            shapes.push_back(s);
    return shapes;
}
inline std::vector<Branch> branches_of(const NsaShape& s) {
    return s.window_only ? std::vector<Branch>{WIN} : std::vector<Branch>{CMP, SLC, WIN};
}

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE.

template <class E>
struct HeadArrays {
    std::vector<std::unique_ptr<Reals<E>>> kv;
    // q and gate of the type that Heads or HeadGradients has them in
    template <class Heads, class Q, class Gate>
    Heads pointers(Q* q, Gate* gate) {
        return {q, {*kv[0], *kv[1], *kv[2], *kv[3], *kv[4], *kv[5]}, gate};
    }
};

template <class E>
void check_split_heads(typename E::Dev& dev, const NsaShape& s) {
    using Num = typename E::Num;
    using Nums = typename E::Nums;
    using Values = typename E::Values;
    const ShapeReport report(s, E::name);
    Random random(70);
    const int P = s.projected(), D = s.D, first_slot = s.window_only ? K_WIN : K_CMP;
    Values projected = E::random_reals(random, size_t(s.B) * s.queries * P);
    const auto turned_in = [](int slot) { return slot == K_SLC || slot == K_WIN; };
    const Values gains = E::random_reals(random, s.qk_norm ? size_t(s.window_only ? 2 : 4) * D : 0),
                 dgains = E::random_values(random, gains.size());
    const auto gain_row = [&](int slot) {  // of q, slot -1, then of k_cmp, k_slc, k_win; -1: none
        return !s.qk_norm || slot == V_CMP || slot == V_SLC || slot == V_WIN ? -1 : (slot - first_slot + 2) / 2;
    };
    const auto placed = [&](const typename E::Value* row, int slot, int position) {
        const int gain = slot < 0 ? gain_row(first_slot - 2) : gain_row(slot);
        const bool turned = slot < 0 || turned_in(slot);
        const Nums x =
            gain < 0 ? oracle::numbers(row, size_t(D)) : oracle::rmsnorm(row, &gains[size_t(gain) * D], D).out;
        if (!turned) return gain < 0 ? x : E::stored(x);
        return E::stored(oracle::rope(x.data(), position, D, +1, s.rope_base));
    };
    Nums q(s.query_rows() * D), gate(s.window_only ? 0 : 3 * s.query_rows());
    std::vector<Nums> kv;
    for (int slot = 0; slot < 6; slot++) kv.emplace_back(s.key_rows() * D);
    for (int b = 0; b < s.B; b++)
        for (int j = 0; j < s.queries; j++) {
            auto* row = &projected[(size_t(b) * s.queries + j) * P];
            for (int head = 0; head < s.H; head++, row += D) {
                const Nums turned = placed(row, -1, s.first + j);
                std::copy(turned.begin(), turned.end(), &q[((size_t(b) * s.H + head) * s.queries + j) * D]);
            }
            for (int slot = first_slot; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++, row += D) {
                    const Nums values = placed(row, slot, s.first + j);
                    std::copy(values.begin(), values.end(),
                              &kv[size_t(slot)][((size_t(b) * s.G + g) * s.T + s.first + j) * D]);
                }
            if (s.window_only) continue;
            if (j == 0) row[0] = 1000;
            for (int i = 0; i < 3 * s.H; i++)  // column 3*head + branch
                gate[i % 3 * s.query_rows() + (size_t(b) * s.H + i / 3) * s.queries + j] = oracle::sigmoid(Num(row[i]));
            for (int i = 3 * s.H; i < s.gate_columns(); i++)  // padding is not read
                row[i] = std::numeric_limits<typename E::Value>::quiet_NaN();
        }
    const auto make_kv = [&](const std::vector<Values>& from) {
        HeadArrays<E> heads;
        for (size_t slot = 0; slot < 6; slot++) {
            const bool unused = int(slot) < first_slot;
            if (from.empty()) heads.kv.push_back(std::make_unique<Reals<E>>(dev, unused ? 0 : kv[slot].size()));
            else heads.kv.push_back(std::make_unique<Reals<E>>(dev, unused ? Values() : from[slot]));
        }
        return heads;
    };
    const auto outputs = in_every_order<E>([&]() -> std::vector<Values> {
        const Reals<E> in(dev, projected), gain(dev, gains);
        Reals<E> q_out(dev, q.size());
        Stats<E> gate_out(dev, gate.size());
        HeadArrays<E> heads = make_kv({});
        dev.split_heads_forward(heads.template pointers<typename E::Dev::Heads>(q_out.data, gate_out.data), in,
                                s.qk_norm ? gain.data : nullptr, s);
        std::vector<Values> all = {q_out.host(), gate_out.host()};
        for (int slot = first_slot; slot <= V_WIN; slot++) {
            const long outside = long(s.B) * s.G * (s.T - s.queries);  // positions of other calls
            CHECK_EQUAL(heads.kv[size_t(slot)]->unwritten(), outside * D);
            all.push_back(heads.kv[size_t(slot)]->host());
            for (size_t i = 0; i < all.back().size(); i++)
                if (const int t = int(i / D % s.T); t < s.first || t >= s.first + s.queries)
                    all.back()[i] = 0;  // as in the oracle's array
        }
        return all;
    });
    CHECK_ARRAY(outputs[0], q, s.B, s.H, s.queries, D);
    CHECK_ARRAY(outputs[1], gate, 3, s.B, s.H, s.queries);
    for (size_t i = 2; i < outputs.size(); i++)
        CHECK_ARRAY(outputs[i], kv[size_t(first_slot) + i - 2], s.B, s.G, s.T, D);
    if (s.queries != s.T) return;

    // Backward: each gradient goes to the columns its head came from, turned back.
    const Values dq = E::random_values(random, q.size()), dgate = E::random_values(random, gate.size());
    std::vector<Values> dkv;
    for (int slot = 0; slot < 6; slot++) dkv.push_back(E::random_reals(random, kv[size_t(slot)].size()));
    const auto gradients = in_every_order<E>([&]() -> std::vector<Values> {
        Stats<E> q_in(dev, dq), gate_in(dev, dgate);
        HeadArrays<E> heads = make_kv(dkv);
        const Reals<E> gain(dev, gains);
        Reals<E> out(dev, projected);
        Stats<E> dgain(dev, dgains);
        dev.split_heads_backward(
            out, s.qk_norm ? dgain.data : nullptr,
            heads.template pointers<typename E::Dev::HeadGradients>(q_in.data, s.window_only ? nullptr : gate_in.data),
            s.qk_norm ? gain.data : nullptr, s);
        return {out.host(), dgain.host()};
    });
    Nums expected;
    std::vector<typename E::Sum> sums(dgains.size());
    for (size_t i = 0; i < dgains.size(); i++) sums[i].add(dgains[i]);
    // d: a head's gradient, x: what was projected there
    const auto append = [&](const typename E::Value* d, const typename E::Value* x, int slot, int t) {
        const int row = slot < 0 ? gain_row(first_slot - 2) : gain_row(slot);
        const bool turned = slot < 0 || turned_in(slot);
        Nums values = turned ? oracle::rope(d, t, D, -1, s.rope_base) : oracle::numbers(d, size_t(D));
        if (row >= 0) {
            const auto* gain = &gains[size_t(row) * D];
            const Num rstd = oracle::rmsnorm(x, gain, D).rstd;
            for (int i = 0; i < D; i++) sums[size_t(row * D + i)].add(values[size_t(i)] * Num(x[i]) * rstd);
            values = oracle::rmsnorm_dx(values.data(), x, rstd, gain, D);
        }
        if (turned || row >= 0) values = E::stored(values);
        expected.insert(expected.end(), values.begin(), values.end());
    };
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++) {
            const auto* x = &projected[(size_t(b) * s.T + t) * P];
            for (int head = 0; head < s.H; head++, x += D)
                append(&dq[((size_t(b) * s.H + head) * s.T + t) * D], x, -1, t);
            for (int slot = first_slot; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++, x += D)
                    append(&dkv[size_t(slot)][((size_t(b) * s.G + g) * s.T + t) * D], x, slot, t);
            for (int i = 0; i < s.gate_columns(); i++)
                expected.push_back(
                    i < 3 * s.H ? E::stored(Num(dgate[((size_t(i % 3) * s.B + b) * s.H + i / 3) * s.T + t])) : Num(0));
        }
    CHECK_ARRAY(gradients[0], expected, s.B * s.T, P);
    if (s.qk_norm) CHECK_ARRAY(gradients[1], oracle::numbers(sums), int(gains.size()) / D, D);
}
ENGINE_TEST(split_heads) {
    const auto dev = E::open();  // one engine for all: its RoPE table has to follow D, T and the base
    for (const NsaShape& s :
         with_parts({nsa_shape(2, 33, 2, 3, 16, 8, 4, 16, 3, 9), nsa_shape(1, 70, 1, 1, 64, 8, 4, 16, 3, 9),
                     nsa_shape(1, 513, 1, 2, 2, 8, 4, 16, 3, 9), nsa_shape(1, 5, 2, 4, 32, 8, 4, 16, 3, 9),
                     nsa_shape(1, 7, 3, 5, 6, 8, 4, 16, 3, 9), nsa_shape(2, 5, 1, 3, 58, 8, 4, 16, 3, 9),
                     nsa_shape(2, 9, 2, 3, 48, 8, 4, 16, 3, 9), nsa_shape(2, 40, 1, 1, 16, 8, 4, 16, 3, 9),
                     with_base(nsa_shape(2, 40, 1, 1, 16, 8, 4, 16, 3, 9))}))
        for (NsaShape shape : {s, full(s)})
            for (shape.qk_norm = 0; shape.qk_norm < 2; shape.qk_norm++)
                if (has_shape<E>(*dev, "split_heads", shape)) check_split_heads<E>(*dev, shape);
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression, by plain loops, with the roundings of what an engine stores on the way: the hidden values, the activated
// ones, dout turned back, and the gradient of the hidden values.

template <class E>
struct HostPhi {
    typename E::Values fc1, bias, fc2;
    HostPhi(Random& random, const NsaShape& s)
        : fc1(E::random_reals(random, size_t(s.F) * s.l * s.D, 0.3)),
          bias(E::random_reals(random, size_t(s.F))),
          fc2(E::random_reals(random, size_t(s.D) * s.F)) {}
};
// Arrays of keys and of values as an engine gets them: in one allocation, and between them numbers that nobody may use.
constexpr size_t BETWEEN_HEADS = 8;
template <class Values>
Values joined(const Values& k, const Values& v) {
    Values both = k;
    both.insert(both.end(), BETWEEN_HEADS, std::numeric_limits<typename Values::value_type>::quiet_NaN());
    both.insert(both.end(), v.begin(), v.end());
    return both;
}
template <class Values>
Values slice_of(const Values& all, size_t begin, size_t count) {
    return Values(all.begin() + long(begin), all.begin() + long(begin + count));
}
// The values' part of joined() arrays, of which the keys have so many.
template <class Values>
Values behind(const Values& both, size_t keys) {
    return slice_of(both, keys + BETWEEN_HEADS, both.size() - keys - BETWEEN_HEADS);
}

// gradients: dk, dfc1, dbias, dfc2, from dout and hidden; before: the last three as they were. Keys are rotated, values
// not.
template <class E>
void check_compress_gradients(const std::vector<typename E::Values>& gradients, const HostPhi<E>& before,
                              const typename E::Values& dout, const typename E::Values& hidden,
                              const typename E::Values& k, const HostPhi<E>& phi, bool rotated, const NsaShape& s) {
    using Num = typename E::Num;
    using Sum = typename E::Sum;
    const int NC = oracle::blocks(s.T, s), D = s.D, F = s.F, width = s.l * D;
    const size_t groups = size_t(s.B) * s.G;
    std::vector<Sum> sum_dk(k.size()), sum_d1(phi.fc1.size()), sum_db(phi.bias.size()), sum_d2(phi.fc2.size());
    for (size_t i = 0; i < sum_d1.size(); i++) sum_d1[i].add(before.fc1[i]);
    for (size_t i = 0; i < sum_db.size(); i++) sum_db[i].add(before.bias[i]);
    for (size_t i = 0; i < sum_d2.size(); i++) sum_d2[i].add(before.fc2[i]);
    for (size_t bg = 0; bg < groups; bg++)
        for (int block = 0; block < NC; block++) {
            const size_t at = (bg * s.T + size_t(block) * s.d) * D;
            auto o = oracle::numbers(&dout[(bg * NC + block) * D], size_t(D));
            if (rotated) o = E::stored(oracle::rope(o.data(), block * s.d, D, -1, s.rope_base));
            for (int token = 0; token < s.l; token++)
                for (int x = 0; x < D; x++) sum_dk[at + size_t(token) * D + x].add(o[size_t(x)] / Num(s.l));
            for (int f = 0; f < F; f++) {
                const Num h(hidden[(bg * NC + block) * F + f]), active = E::stored(oracle::silu(h));
                Sum dactive;
                for (int x = 0; x < D; x++) {
                    sum_d2[size_t(x) * F + f].add(o[size_t(x)] * active);
                    dactive.add(o[size_t(x)] * Num(phi.fc2[size_t(x) * F + f]));
                }
                const Num dh = E::stored(Num(dactive) * oracle::silu_slope(h));
                sum_db[size_t(f)].add(dh);
                for (int i = 0; i < width; i++) {
                    sum_d1[size_t(f) * width + i].add(dh * Num(k[at + i]));
                    sum_dk[at + i].add(dh * Num(phi.fc1[size_t(f) * width + i]));
                }
            }
        }
    CHECK_ARRAY(gradients[0], E::stored(oracle::numbers(sum_dk)), int(groups), s.T, D);
    CHECK_ARRAY(gradients[1], oracle::numbers(sum_d1), F, s.l, D);
    CHECK_ARRAY(gradients[2], oracle::numbers(sum_db));
    CHECK_ARRAY(gradients[3], oracle::numbers(sum_d2), D, F);
}
template <class E>
void check_compress_backward(typename E::Dev& dev, const NsaShape& s, Random& random, const typename E::Values& k,
                             const typename E::Values& v, const HostPhi<E>& phi_k, const HostPhi<E>& phi_v) {
    using Values = typename E::Values;
    const size_t rows = size_t(s.B) * s.G * oracle::blocks(s.T, s), keys = rows * s.D;
    const Values dout = E::random_reals(random, rows * 2 * s.D), hidden = E::random_reals(random, 2 * rows * s.F);
    const HostPhi<E> before_k(random, s), before_v(random, s);
    const auto all = in_every_order<E>([&]() -> std::vector<Values> {
        Reals<E> in(dev, joined(k, v)), fc1(dev, joined(phi_k.fc1, phi_v.fc1)),
            bias(dev, joined(phi_k.bias, phi_v.bias)), fc2(dev, joined(phi_k.fc2, phi_v.fc2)), d(dev, dout),
            h(dev, hidden), dk(dev, in.count);
        Stats<E> d1(dev, joined(before_k.fc1, before_v.fc1)), db(dev, joined(before_k.bias, before_v.bias)),
            d2(dev, joined(before_k.fc2, before_v.fc2));
        const size_t to_v = k.size() + BETWEEN_HEADS, to_fc1 = phi_k.fc1.size() + BETWEEN_HEADS,
                     to_bias = size_t(s.F) + BETWEEN_HEADS, to_fc2 = phi_k.fc2.size() + BETWEEN_HEADS;
        dev.compress_backward(dk, dk + to_v, {{d1, db, d2}, {d1 + to_fc1, db + to_bias, d2 + to_fc2}}, d, h, in,
                              in + to_v, {{fc1, bias, fc2}, {fc1 + to_fc1, bias + to_bias, fc2 + to_fc2}}, s);
        CHECK_EQUAL(dk.unwritten(), long(BETWEEN_HEADS));
        return {dk.host(), d1.host(), db.host(), d2.host()};
    });
    std::vector<Values> of_keys, of_values;
    for (size_t i = 0; i < 4; i++) {
        const size_t count[] = {k.size(), phi_k.fc1.size(), phi_k.bias.size(), phi_k.fc2.size()};
        of_keys.push_back(slice_of(all[i], 0, count[i]));
        of_values.push_back(behind(all[i], count[i]));
    }
    check_compress_gradients<E>(of_keys, before_k, slice_of(dout, 0, keys), slice_of(hidden, 0, rows * s.F), k, phi_k,
                                true, s);
    check_compress_gradients<E>(of_values, before_v, slice_of(dout, keys, rows * s.D),
                                slice_of(hidden, rows * s.F, rows * s.F), v, phi_v, false, s);
}
// out and hidden: those of blocks begin .. end-1.
template <class E>
void check_compressed(const typename E::Values& out, const typename E::Values& out_hidden, int begin, int end,
                      const typename E::Values& k, const HostPhi<E>& phi, bool rotated, const NsaShape& s) {
    using Num = typename E::Num;
    using Sum = typename E::Sum;
    const int D = s.D, F = s.F, width = s.l * D;
    const size_t groups = size_t(s.B) * s.G;
    typename E::Nums expected, expected_hidden;
    for (size_t bg = 0; bg < groups; bg++)
        for (int block = begin; block < end; block++) {
            const auto* X = &k[(bg * s.T + size_t(block) * s.d) * D];
            typename E::Nums active, row;
            for (int f = 0; f < F; f++) {
                Sum sum;
                for (int i = 0; i < width; i++) sum.add(Num(phi.fc1[size_t(f) * width + i]) * Num(X[i]));
                sum.add(phi.bias[size_t(f)]);
                expected_hidden.push_back(E::stored(Num(sum)));
                active.push_back(E::stored(oracle::silu(expected_hidden.back())));
                // |silu'| <= 1.0999 amplifies; Number takes x and sigmoid(x) as independent, which covers it
                active.back().error += expected_hidden.back().error * 0.1;
            }
            for (int x = 0; x < D; x++) {
                Sum mean, sum;
                for (int token = 0; token < s.l; token++) mean.add(X[token * D + x]);
                sum.add(Num(mean) / Num(s.l));
                for (int f = 0; f < F; f++) sum.add(Num(phi.fc2[size_t(x) * F + f]) * active[size_t(f)]);
                row.push_back(sum);
            }
            if (rotated) row = oracle::rope(row.data(), block * s.d, D, +1, s.rope_base);
            for (const Num& x : row) expected.push_back(E::stored(x));
        }
    CHECK_ARRAY(out, expected, int(groups), end - begin, D);
    CHECK_ARRAY(out_hidden, expected_hidden, int(groups), end - begin, F);
}
template <class E>
void check_compress(typename E::Dev& dev, const NsaShape& s) {
    using Values = typename E::Values;
    if (s.D % E::COLUMNS || s.F % E::COLUMNS) return;
    const ShapeReport report(s, E::name);
    Random random(80);
    const int NC = oracle::blocks(s.T, s), begin = oracle::blocks(s.first, s),
              end = oracle::blocks(s.first + s.queries, s), widths[] = {s.D, s.D, s.F, s.F};
    const size_t groups = size_t(s.B) * s.G, tokens = groups * s.T, rows = groups * NC;
    const Values k = E::random_reals(random, tokens * s.D), v = E::random_reals(random, tokens * s.D);
    const HostPhi<E> phi_k(random, s), phi_v(random, s);
    const auto outputs = in_every_order<E>([&]() -> std::vector<Values> {
        Reals<E> in(dev, joined(k, v)), fc1(dev, joined(phi_k.fc1, phi_v.fc1)),
            bias(dev, joined(phi_k.bias, phi_v.bias)), fc2(dev, joined(phi_k.fc2, phi_v.fc2)), out(dev, rows * 2 * s.D),
            hidden(dev, 2 * rows * s.F);
        const size_t to_v = BETWEEN_HEADS;
        dev.compress_forward(
            out, hidden, in, in + k.size() + to_v,
            {{fc1, bias, fc2}, {fc1 + phi_k.fc1.size() + to_v, bias + s.F + to_v, fc2 + phi_k.fc2.size() + to_v}}, s);
        const long left = long(groups) * (NC - (end - begin));
        CHECK_EQUAL(out.unwritten(), left * 2 * s.D);
        CHECK_EQUAL(hidden.unwritten(), left * 2 * s.F);
        const Values all = out.host(), all_hidden = hidden.host();
        const Values whole[] = {slice_of(all, 0, rows * s.D), slice_of(all, rows * s.D, rows * s.D),
                                slice_of(all_hidden, 0, rows * s.F), slice_of(all_hidden, rows * s.F, rows * s.F)};
        std::vector<Values> computed(4);  // the blocks of this call
        for (size_t i = 0; i < 4; i++)
            for (size_t bg = 0; bg < groups; bg++)
                for (size_t x = (bg * NC + begin) * widths[i]; x < (bg * NC + end) * widths[i]; x++)
                    computed[i].push_back(whole[i][x]);
        return computed;
    });
    check_compressed<E>(outputs[0], outputs[2], begin, end, k, phi_k, true, s);
    check_compressed<E>(outputs[1], outputs[3], begin, end, v, phi_v, false, s);
    if (s.queries == s.T) check_compress_backward<E>(dev, s, random, k, v, phi_k, phi_v);
}
ENGINE_TEST(compress) {
    const auto dev = E::open();
    std::vector<NsaShape> shapes =
        with_parts({nsa_shape(2, 33, 2, 1, 8, 8, 4, 16, 3, 9), nsa_shape(1, 31, 1, 1, 8, 32, 16, 64, 3, 9),
                    nsa_shape(2, 32, 1, 1, 16, 32, 16, 64, 3, 9), nsa_shape(1, 70, 2, 1, 16, 16, 4, 16, 3, 9),
                    nsa_shape(1, 9, 1, 1, 8, 1, 1, 4, 3, 9), nsa_shape(1, 41, 1, 1, 8, 12, 4, 16, 3, 9),
                    nsa_shape(2, 50, 1, 1, 8, 4, 4, 16, 3, 9), with_base(nsa_shape(2, 50, 1, 1, 8, 4, 4, 16, 3, 9)),
                    nsa_shape(2, 36, 2, 1, 16, 8, 4, 16, 3, 9)});
    for (const NsaShape& s : attention_shapes(true))
        if (MORE_SHAPES<E> && s.T * s.D * s.l / s.d < 20000) shapes.push_back(s);
    shapes.push_back(nsa_shape(1, 100, 1, 1, 64, 32, 16, 64, 16, 512));  // the preset's l, d, D
    shapes.back().F = 24;
    for (const NsaShape& s : shapes)
        if (has_shape<E>(*dev, "compress", s)) check_compress<E>(*dev, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Selection.

// An engine may have select_blocks for itself, which lib/model/engine.h does not ask for.
template <class Dev, class = void>
struct SelectsAlone : std::false_type {};
template <class Dev>
struct SelectsAlone<Dev, std::void_t<decltype(&Dev::select_blocks)>> : std::true_type {};
template <class Dev, class real, class Stat>
void select_alone(Dev& dev, uint32_t* selection, Stat* share, const real* q, const real* kc, const real* vc,
                  const Stat* lse, const NsaShape& s) {
    if constexpr (SelectsAlone<Dev>::value) {
        dev.select_blocks(selection, share, q, kc, lse, s);
    } else {
        real* const out = dev.template allocate<real>(s.query_rows() * s.D);
        Stat* const again = dev.template allocate<Stat>(s.query_rows());
        dev.attend_and_select(out, again, selection, share, q, kc, vc, s);
        dev.release(out);
        dev.release(again);
    }
}
// Whether masks are what the rule gives: forced blocks, count, no block of the future, and no block left out that is
// more important than one taken by more than the rounding of both. share: what select_blocks says about the share of
// the importance that fell on the taken.
template <class real>
void check_selection(const uint32_t* found, const real* share, const real* q, const real* kc, const real* lse,
                     const NsaShape& s, bool bf16 = false) {
    const int words = oracle::selection_words(s), h = s.H / s.G, NC = oracle::blocks(s.T, s);
    for (int b = 0; b < s.B; b++)
        for (int g = 0; g < s.G; g++)
            for (int j = 0; j < s.queries; j++) {
                const int t = s.first + j, last = t / s.slc_block;
                const size_t at = (size_t(b) * s.G + g) * s.queries + j,
                             row = (size_t(b) * s.H + g * h) * s.queries + j;
                const std::vector<int> chosen = blocks_of(found + at * words, words);
                CHECK_EQUAL(int(chosen.size()), std::min(s.slc_count, last + 1));
                REQUIRE(!chosen.empty());
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

// ---------------------------------------------------------------------------------------------------------------------
// The attention branches and the gated sum. o [branches, B, H, queries, D], gate and lse [branches, B, H, queries],
// out and dout [B, queries, H, D]; full attention has one branch, whose gate is 1.

// Calls visit(row of [branches, B, H, queries], row of [B, queries, H]).
template <class Visit>
void for_branch_rows(const NsaShape& s, Visit visit) {
    for (size_t row = 0; row < s.branches() * s.query_rows(); row++) {
        const size_t j = row % s.queries, head = row / s.queries % s.H, b = row / s.queries / s.H % s.B;
        visit(row, (b * s.queries + j) * s.H + head);
    }
}
template <class E>
typename E::Nums expected_gated_sum(const typename E::Values& o, const typename E::Values& gate, const NsaShape& s) {
    const int D = s.D;
    std::vector<typename E::Sum> sums(s.query_rows() * D);
    for_branch_rows(s, [&](size_t row, size_t by_token) {
        for (int x = 0; x < D; x++)
            sums[by_token * D + x].add(typename E::Num(s.window_only ? 1 : gate[row]) *
                                       typename E::Num(o[row * D + x]));
    });
    return E::stored(oracle::numbers(sums));
}
template <class E>
struct RowTerms {
    typename E::Values row_dot, lse_gated;
};
// The gated sum and the row terms of the backward pass, checked.
template <class E>
RowTerms<E> check_sum_and_rows(typename E::Dev& dev, const typename E::Values& dout, const typename E::Values& o,
                               const typename E::Values& gate, const typename E::Values& lse, const NsaShape& s) {
    using Num = typename E::Num;
    const size_t count = s.branches() * s.query_rows();
    const auto found = in_every_order<E>([&]() -> std::vector<typename E::Values> {
        Reals<E> o_on_device(dev, o), d(dev, dout), out(dev, dout.size());
        Stats<E> lse_on_device(dev, lse), gates(dev, gate), row_dot(dev, count), lse_gated(dev, count),
            dz(dev, s.window_only ? 0 : count);
        const typename E::Value* const open = s.window_only ? nullptr : gates.data;
        dev.combine_forward(out, o_on_device, open, s);
        dev.attention_backward_rows(row_dot, lse_gated, s.window_only ? nullptr : dz.data, d, o_on_device, open,
                                    lse_on_device, s);
        return {row_dot.host(), lse_gated.host(), dz.host(), out.host()};
    });
    typename E::Nums expected_dot, expected_gated, expected_dz;
    for_branch_rows(s, [&](size_t row, size_t by_token) {
        typename E::Sum dot;
        for (int x = 0, D = s.D; x < D; x++) dot.add(Num(dout[by_token * D + x]) * Num(o[row * D + x]));
        const Num g(s.window_only ? 1 : gate[row]), shift(lse[row]);
        expected_dot.push_back(dot);
        expected_gated.push_back(std::isinf(shift.value) ? shift : shift - log(g));
        if (!s.window_only) expected_dz.push_back(Num(dot) * g * (Num(1) - g));
    });
    CHECK_ARRAY(found[0], expected_dot);
    CHECK_ARRAY(found[1], expected_gated);
    CHECK_ARRAY(found[2], expected_dz);
    CHECK_ARRAY(found[3], expected_gated_sum<E>(o, gate, s), s.B, s.queries, s.H, s.D);
    return {found[0], found[1]};
}
template <class E>
typename E::Values random_gates(Random& random, size_t count, bool extreme = false) {
    typename E::Values gate(count);
    for (auto& g : gate) g = typename E::Value(1 / (1 + std::exp(-2 * random.normal())));
    if (extreme)  // sigmoid(-87), and a gate that rounds to 1
        for (size_t i = 0; i < count; i += 3) gate[i] = typename E::Value(i % 2 ? 1 : std::exp(-87.0));
    return gate;
}
// Dimensions that whole attention may not have, odd ones too, and more than lanes take at once.
ENGINE_TEST(gated_sum_and_row_terms) {
    const auto dev = E::open();
    for (const int D : {1, 3, 37, 63, 64, 128, 296, 320})
        for (const bool is_full : {false, true}) {
            NsaShape s = part_of(nsa_shape(2, 17, 2, 3, D, 8, 4, 16, 3, 9), 4, 13);
            s.window_only = s.sees_all = is_full;
            const ShapeReport report(s, E::name);
            Random random(97);
            const size_t rows = s.query_rows(), count = s.branches() * rows;
            const auto o = E::random_reals(random, count * D), dout = E::random_reals(random, rows * D),
                       gate = random_gates<E>(random, count), lse = E::random_values(random, count, 10);
            check_sum_and_rows<E>(*dev, dout, o, gate, lse, s);
        }
}

// One row of a table: a shape, and how it is tried.
struct AttentionSetup {
    NsaShape s;
    double score_scale = 1;
    bool extreme_gates = false;
    bool bf16 = false;                  // Cpu<float> with --cpu-dtype bf16
    std::vector<uint32_t> chosen = {};  // what the selected branch reads in place of the engine's own choice
};
// Keys and values behind the last position are NaN: nobody may read them.
template <class E>
struct AttentionInputs {
    typename E::Values q, dout, gate;
    std::vector<typename E::Values> k, v;  // by branch
    AttentionInputs(const AttentionSetup& x, Random& random) {
        const NsaShape& s = x.s;
        q = E::random_reals(random, s.query_rows() * s.D, x.score_scale);
        dout = E::random_reals(random, s.query_rows() * s.D);
        gate = random_gates<E>(random, 3 * s.query_rows(), x.extreme_gates);
        for (Branch branch : {CMP, SLC, WIN}) {
            const size_t stride = s.has(branch) ? size_t(oracle::key_rows(branch, s)) : 0,
                         count = size_t(s.B) * s.G * stride * s.D;
            for (auto* heads : {&k, &v}) {
                heads->push_back(E::random_reals(random, count));
                for (size_t i = 0; i < count; i++)
                    if (int(i / s.D % stride) >= s.key_count(branch))
                        heads->back()[i] = std::numeric_limits<typename E::Value>::quiet_NaN();
            }
        }
    }
};
// Forward of each branch, selection by itself and together with the compressed branch.
template <class E>
struct AttentionOutputs {
    typename E::Values o, lse;
    std::vector<uint32_t> masks;
};
template <class E>
AttentionOutputs<E> run_attention(typename E::Dev& dev, const AttentionInputs<E>& in, const AttentionSetup& x) {
    using Values = typename E::Values;
    const NsaShape& s = x.s;
    const size_t rows = s.query_rows(), values = rows * s.D, tokens = size_t(s.B) * s.G * s.queries,
                 words = s.window_only ? 0 : tokens * oracle::selection_words(s);
    std::vector<uint32_t> masks, masks_alone;
    const auto outputs = in_every_order<E>([&]() -> std::vector<Values> {
        const Reals<E> q(dev, in.q);
        Reals<E> o(dev, s.branches() * values);
        Stats<E> lse(dev, s.branches() * rows), share(dev, tokens), share_alone(dev, tokens);
        Array<E, uint32_t> selection(dev, words), alone(dev, words), without_share(dev, words);
        for (Branch branch : branches_of(s)) {
            const Reals<E> k(dev, in.k[branch]), v(dev, in.v[branch]);
            Reals<E> twice(dev, values);
            Stats<E> lse_twice(dev, rows);
            const size_t slot = size_t(s.branch_slot(branch));
            dev.attention_forward(branch, o + slot * values, lse + slot * rows, q, k, v,
                                  branch == SLC ? selection.data : nullptr, s);
            if (branch != CMP) continue;
            dev.attend_and_select(twice, lse_twice, selection, share, q, k, v, s);
            CHECK(std::memcmp(twice.raw().data(), o.raw().data(), values * sizeof(typename E::Real)) == 0);
            CHECK(std::memcmp(lse_twice.raw().data(), lse.raw().data(), rows * sizeof(typename E::Value)) == 0);
            const auto select = [&](uint32_t* to, typename E::Value* its_share) {
                select_alone<typename E::Dev, typename E::Real, typename E::Value>(dev, to, its_share, q, k, v, lse, s);
            };
            select(alone, share_alone);
            select(without_share, nullptr);
            masks = selection.raw(), masks_alone = alone.raw();
            CHECK(without_share.raw() == masks_alone);
            if (!x.chosen.empty()) dev.copy(selection.data, x.chosen.data(), words);
        }
        if (s.window_only) return {o.host(), lse.host()};
        return {o.host(),
                lse.host(),
                Values(masks.begin(), masks.end()),
                share.host(),
                Values(masks_alone.begin(), masks_alone.end()),
                share_alone.host()};
    });
    if (!s.window_only) {
        const auto *q = in.q.data(), *kc = in.k[CMP].data(), *lse = outputs[1].data();
        check_selection<typename E::Value>(masks.data(), outputs[3].data(), q, kc, lse, s, x.bf16);
        check_selection<typename E::Value>(masks_alone.data(), outputs[5].data(), q, kc, lse, s, x.bf16);
    }
    return {outputs[0], outputs[1], x.chosen.empty() ? masks : x.chosen};
}
template <class E>
void check_attention(typename E::Dev& dev, const AttentionSetup& x) {
    using Values = typename E::Values;
    using Nums = typename E::Nums;
    const NsaShape& s = x.s;
    const ShapeReport report(s, E::name);
    Random random(90);
    const AttentionInputs<E> in(x, random);
    const size_t rows = s.query_rows(), values = rows * s.D, elements = rows * s.D;
    const auto numbers = [](const Values& all) { return Nums(all.begin(), all.end()); };
    const auto part = [&](const Values& all, Branch branch, size_t count) {
        const auto from = all.begin() + ptrdiff_t(size_t(s.branch_slot(branch)) * count);
        return Values(from, from + ptrdiff_t(count));
    };
    const AttentionOutputs<E> found = run_attention<E>(dev, in, x);
    for (Branch branch : branches_of(s)) {
        const auto expected = oracle::attention<typename E::Value>(
            branch, numbers(in.q), numbers(in.k[branch]), numbers(in.v[branch]), found.masks.data(), s, x.bf16);
        CHECK_ARRAY(part(found.o, branch, values), E::stored(expected.out), s.B, s.H, s.queries, s.D);
        CHECK_ARRAY(part(found.lse, branch, rows), expected.lse, s.B, s.H, s.queries);
    }
    // From the outputs as they were stored.
    const RowTerms<E> terms = check_sum_and_rows<E>(dev, in.dout, found.o, in.gate, found.lse, s);
    if (s.queries != s.T) return;

    const Values dq = E::random_values(random, elements);  // the operation adds to it
    for (Branch branch : branches_of(s)) {
        const Values row_dot = part(terms.row_dot, branch, rows), lse_gated = part(terms.lse_gated, branch, rows);
        const auto gradients = in_every_order<E>([&]() -> std::vector<Values> {
            const Reals<E> q(dev, in.q), k(dev, in.k[branch]), v(dev, in.v[branch]), d(dev, in.dout);
            Reals<E> dk(dev, in.k[branch].size()), dv(dev, in.v[branch].size());
            Stats<E> added(dev, dq), written(dev, elements), dots(dev, row_dot), gated(dev, lse_gated);
            const Array<E, uint32_t> selection(dev, found.masks);
            for (const bool add : {true, false})
                dev.attention_backward(branch, {add ? added.data : written.data, add, dk, dv, d, dots, gated},
                                       {q, k, v, selection}, s);
            return {added.host(), dk.host(), dv.host(), written.host()};
        });
        auto expected = oracle::branch_gradients<typename E::Value>(
            branch, numbers(in.q), numbers(in.k[branch]), numbers(in.v[branch]), numbers(in.dout), numbers(row_dot),
            numbers(lse_gated), found.masks.data(), s, x.bf16);
        const int key_rows = oracle::key_rows(branch, s);
        CHECK_ARRAY(gradients[1], E::stored(oracle::numbers(expected.dk)), s.B, s.G, key_rows, s.D);
        CHECK_ARRAY(gradients[2], E::stored(oracle::numbers(expected.dv)), s.B, s.G, key_rows, s.D);
        CHECK_ARRAY(gradients[3], oracle::numbers(expected.dq), s.B, s.H, s.T, s.D);
        for (size_t i = 0; i < elements; i++) {
            expected.dq[i].add(dq[i]);
            if (E::ADDS_TERM_BY_TERM)
                expected.dq[i].error += oracle::gamma<typename E::Value>(key_rows + 1) * std::fabs(double(dq[i]));
        }
        CHECK_ARRAY(gradients[0], oracle::numbers(expected.dq), s.B, s.H, s.T, s.D);
    }
}
template <class E>
void check_attention_table(const char* test, const std::vector<AttentionSetup>& table) {
    const auto dev = E::open();
    for (const AttentionSetup& x : table)
        if (has_shape<E>(*dev, test, x.s)) check_attention<E>(*dev, x);
}
ENGINE_TEST(attention) {
    std::vector<AttentionSetup> table;
    for (const NsaShape& s : attention_shapes(MORE_SHAPES<E>)) table.push_back({s});
    check_attention_table<E>("attention", table);
}
// Decoding: some positions of a sequence, or one, that starts anywhere.
inline std::vector<AttentionSetup> attention_parts(bool more) {
    std::vector<AttentionSetup> table;
    std::vector<NsaShape> shapes = {nsa_shape(2, 65, 1, 3, 16, 8, 4, 16, 3, 33),
                                    nsa_shape(1, 130, 2, 2, 8, 16, 4, 20, 4, 7),
                                    nsa_shape(1, 70, 2, 2, 24, 8, 4, 16, 3, 20)};
    if (more) shapes = attention_shapes(false);
    for (const NsaShape& s : with_parts(shapes))
        if (s.queries < s.T && (s.first > 0 || s.T <= 130))
            table.push_back({part_of(s, s.first, std::min(s.queries, 90))});
    return table;
}
ENGINE_TEST(attention_in_parts) { check_attention_table<E>("attention_in_parts", attention_parts(MORE_SHAPES<E>)); }
inline std::vector<AttentionSetup> full_attention() {
    std::vector<AttentionSetup> table;  // over all tokens, whatever the window
    for (const NsaShape& s : {nsa_shape(2, 1, 1, 2, 16, 8, 4, 16, 3, 1), nsa_shape(1, 65, 2, 3, 16, 8, 4, 16, 3, 2),
                              nsa_shape(2, 70, 2, 3, 16, 8, 4, 16, 3, 5), nsa_shape(1, 130, 1, 2, 2, 8, 4, 16, 3, 2),
                              nsa_shape(2, 70, 2, 3, 24, 8, 4, 16, 3, 5)})
        table.push_back({full(s)});
    return table;
}
ENGINE_TEST(attention_full) { check_attention_table<E>("attention_full", full_attention()); }
// Scores q.k/sqrt(D) of standard deviation 1e3, and gates down to sigmoid(-87): within limits that grow with them.
ENGINE_TEST(attention_large_logits) {
    std::vector<AttentionSetup> table = {{nsa_shape(1, 65, 1, 3, 16, 8, 4, 16, 4, 33), 300}};
    for (const NsaShape& s : attention_shapes(false))
        if (MORE_SHAPES<E> && s.T <= 130) table.push_back({s, 1e3, true});
    check_attention_table<E>("attention_large_logits", table);
}

// Any blocks, one query without any, and blocks that no query takes: block 2 in group 0, 0 and 3 in group 1.
ENGINE_TEST(unselected_blocks_get_no_gradient) {
    AttentionSetup x = {nsa_shape(1, 70, 2, 3, 16, 8, 4, 16, 3, 9)};
    Random random(120);
    for (int g = 0; g < x.s.G; g++)
        for (int t = 0; t < x.s.T; t++) {
            uint32_t mask = 0;
            for (int block = 0; block <= t / x.s.slc_block; block++)
                if (t != 50 && random.below(2) && (g == 0 ? block != 2 : block != 0 && block != 3)) mask |= 1u << block;
            x.chosen.push_back(mask);
        }
    check_attention_table<E>("unselected_blocks_get_no_gradient", {x});
}

// Compressed keys of three ranks in turn: blocks of a rank tie exactly, however they fall into tiles, vectors and
// lanes, and the rule alone decides. With l = 2d a block's importance is a sum; there all tie but the forced ones.
ENGINE_TEST(ties_go_to_the_lower_block) {
    const struct {
        NsaShape s;
        double rank[3];
    } rows[] = {{nsa_shape(1, 200, 1, 2, 8, 8, 4, 8, 6, 16), {0, 0, 0}},
                {nsa_shape(1, 200, 1, 3, 2, 8, 4, 16, 6, 64), {1, 1, 1}},
                {nsa_shape(1, 270, 1, 1, 2, 4, 4, 4, 8, 64), {-1, 2, 1}},
                {nsa_shape(1, 270, 1, 3, 2, 4, 4, 4, 8, 64), {-1, 2, 1}},
                {part_of(nsa_shape(1, 400, 1, 3, 2, 4, 4, 4, 8, 64), 63, 1), {-1, 2, 1}},
                {part_of(nsa_shape(1, 400, 1, 3, 2, 4, 4, 4, 8, 64), 397, 1), {-1, 2, 1}},
                // for tensor cores too: up to 19 blocks; 66 to 69, of which a lane has several
                {nsa_shape(1, 300, 1, 3, 16, 8, 4, 16, 6, 64), {0, 0, 0}},
                {part_of(nsa_shape(1, 1100, 1, 3, 16, 8, 4, 16, 6, 64), 1050, 50), {0, 0, 0}}};
    for (const auto& [s, rank] : rows)
        for (int way = 0; way < (s.D == 16 ? E::WAYS : 1); way++) {
            const auto dev = E::open();
            E::set_way(*dev, way);
            if (!has_shape<E>(*dev, "ties_go_to_the_lower_block", s)) continue;
            typename E::Values q(s.query_rows() * s.D, 0), kc(s.cmp_rows() * s.D, 0);
            for (size_t i = 0; i < q.size(); i += size_t(s.D)) q[i] = E::as_real(0.7);
            for (size_t i = 0; i < kc.size(); i += size_t(s.D)) kc[i] = E::as_real(rank[i / s.D % 3]);
            const Reals<E> queries(*dev, q), keys(*dev, kc);
            Reals<E> o(*dev, q.size());
            Stats<E> lse(*dev, s.query_rows());
            Array<E, uint32_t> selection(*dev, size_t(s.queries) * s.selection_words()), alone(*dev, selection.count);
            dev->attend_and_select(o, lse, selection, nullptr, queries, keys, keys, s);
            select_alone<typename E::Dev, typename E::Real, typename E::Value>(*dev, alone, nullptr, queries, keys,
                                                                               keys, lse, s);
            for (const std::vector<uint32_t>& masks : {selection.raw(), alone.raw()})
                for (int t = s.first; t < s.first + s.queries; t++) {
                    std::vector<double> importance;
                    for (int block = 0; block <= t / s.slc_block; block++)  // which is seen from its end on
                        importance.push_back((block + 1) * s.slc_block <= t + 1 ? rank[block % 3] : -2);
                    CHECK(blocks_of(s.selection_mask(masks.data(), 0, t), s.selection_words()) ==
                          oracle::select(importance, s.slc_count));
                }
        }
}
