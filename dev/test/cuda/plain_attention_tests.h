// plain_attention_tests.h: attention and selection by the plain kernels of nsa_kernels.cuh, and the row operations
// around them, against the oracles of oracle.h; by g++ in the emulator, by nvcc on a GPU. The error limits are those of
// cuda_op_tests.h.
#pragma once
#include "cuda_op_tests.h"

inline const std::vector<NsaShape>& cuda_attention_shapes() {
    static const std::vector<NsaShape> shapes = {
        cuda_shape(2, 1, 2, 3, 2, 1, 1, 1, 3, 1),          // one token
        cuda_shape(1, 31, 1, 1, 16, 32, 16, 64, 16, 512),  // no compressed block at all
        cuda_shape(2, 33, 1, 6, 16, 32, 16, 16, 3, 2),     // one or two, for the last queries
        cuda_shape(2, 65, 1, 3, 64, 8, 4, 16, 3, 33),
        cuda_shape(1, 40, 2, 3, 2, 1, 1, 1, 16, 64),      // l = d = l' = 1: blocks are tokens
        cuda_shape(2, 65, 2, 1, 16, 32, 16, 48, 3, 65),   // l' = 48
        cuda_shape(1, 130, 1, 3, 40, 32, 16, 16, 4, 64),  // l > l'; D no multiple of 32
        cuda_shape(1, 130, 2, 2, 16, 16, 4, 20, 3, 7),    // l = 4 d
        cuda_shape(1, 270, 1, 2, 2, 8, 4, 4, 5, 300),     // 68 selection blocks: three words; w > T
    };
    return shapes;
}

// Checks that masks follow the rule: the forced blocks, the right number, no future block, and no block left out that
// is more important than a chosen one by more than the rounding of both. share: the chosen blocks' share of all
// importance.
inline void check_cuda_selection(const std::vector<uint32_t>& masks, const HostArray& share, const HostArray& q,
                                 const HostArray& kc, const HostArray& lse, const NsaShape& s) {
    const int words = oracle::selection_words(s), h = s.H / s.G, NC = oracle::blocks(s.T, s);
    for (int b = 0; b < s.B; b++)
        for (int g = 0; g < s.G; g++)
            for (int j = 0; j < s.queries; j++) {
                const int t = s.first + j, last = t / s.slc_block;
                const size_t at = (size_t(b) * s.G + g) * s.queries + j,
                             row = (size_t(b) * s.H + g * h) * s.queries + j;
                const std::vector<int> chosen = blocks_of(&masks[at * words], words);
                CHECK_EQUAL(int(chosen.size()), std::min(s.slc_count, last + 1));
                CHECK(!chosen.empty() && chosen.front() == 0 && chosen.back() == last);
                if (last > 0) CHECK(std::count(chosen.begin(), chosen.end(), last - 1) == 1);
                if (last + 1 <= s.slc_count) {
                    CHECK_EQUAL(share[at], 1.0f);
                    continue;
                }
                const CudaNumbers importance = oracle::importance(&q[row * s.D], &lse[row], size_t(s.queries),
                                                                  &kc[(size_t(b) * s.G + g) * NC * s.D], t, s);
                CudaSum taken, all;
                double least = 1e300,
                       most = -1e300;  // the least important block taken (at most), the most important left (at least)
                for (int block = 0; block <= last; block++) {
                    const CudaNumber x = importance[size_t(block)];
                    const bool is_chosen = std::count(chosen.begin(), chosen.end(), block) == 1,
                               forced = block == 0 || block >= last - 1;
                    all.add(x);
                    if (is_chosen) taken.add(x);
                    if (is_chosen && !forced) least = std::min(least, x.value + x.error);
                    if (!is_chosen) most = std::max(most, x.value - x.error);
                }
                CHECK(all.value >= 0);  // no importance is NaN, which `least` and `most` would pass over
                CHECK(s.slc_count == 3 || least >= most);
                const CudaNumber expected = CudaNumber(taken) / CudaNumber(all);
                if (all.value > 0) CHECK_NEAR(share[at], expected.value, expected.error);
            }
}

// Gradients of one branch from row_dot and lse_gated, as the operation receives them.
inline oracle::AttentionGradients<float> plain_gradients(Branch branch, const HostArray& q, const HostArray& k,
                                                         const HostArray& v, const HostArray& dout,
                                                         const HostArray& row_dot, const HostArray& lse_gated,
                                                         const uint32_t* selection, const NsaShape& s) {
    const auto numbers = [](const HostArray& x) { return CudaNumbers(x.begin(), x.end()); };
    return oracle::branch_gradients<float>(branch, numbers(q), numbers(k), numbers(v), numbers(dout), numbers(row_dot),
                                           numbers(lse_gated), selection, s);
}

// The row operations around the branches. o [branches, B, H, queries, D], gate and lse [branches, B, H, queries], out
// and dout [B, queries, H, D]; full attention has one branch, whose gate is 1.
inline size_t cuda_branches(const NsaShape& s) { return s.full ? 1 : 3; }
// Calls visit(branch, row of [B, H, queries], row of [B, queries, H]).
template <class Visit>
void for_branch_rows(const NsaShape& s, Visit visit) {
    const size_t rows = s.query_rows();
    for (size_t branch = 0; branch < cuda_branches(s); branch++)
        for (size_t row = 0; row < rows; row++) {
            const size_t j = row % s.queries, head = row / s.queries % s.H, b = row / s.queries / s.H;
            visit(branch, row, (b * s.queries + j) * s.H + head);
        }
}
inline CudaNumbers expected_gated_sum(const HostArray& o, const HostArray& gate, const NsaShape& s) {
    const size_t rows = s.query_rows();
    std::vector<CudaSum> sums(rows * s.D);
    for_branch_rows(s, [&](size_t branch, size_t row, size_t by_token) {
        for (int x = 0; x < s.D; x++)
            sums[by_token * s.D + x].add(CudaNumber(s.full ? 1 : gate[branch * rows + row]) *
                                         CudaNumber(o[(branch * rows + row) * s.D + x]));
    });
    return stored(oracle::numbers(sums));
}
struct RowTerms {
    HostArray row_dot, lse_gated;
};
// The row terms of the backward pass, checked.
inline RowTerms check_cuda_backward_rows(Cuda& dev, const HostArray& dout, const HostArray& o, const HostArray& gate,
                                         const HostArray& lse, const NsaShape& s) {
    const size_t rows = s.query_rows(), count = cuda_branches(s) * rows;
    const auto found = in_every_order([&] {
        DeviceReal o_on_device(dev, o), d(dev, dout);
        DeviceFloat lse_on_device(dev, lse), gates(dev, gate), row_dot(dev, count), lse_gated(dev, count),
            dz(dev, count);
        dev.attention_backward_rows(row_dot, lse_gated, s.full ? nullptr : dz.data, d, o_on_device,
                                    s.full ? nullptr : gates.data, lse_on_device, s);
        CHECK_EQUAL(row_dot.unwritten() + lse_gated.unwritten() + (s.full ? 0 : dz.unwritten()), 0L);
        return std::vector<HostArray>{row_dot.host(), lse_gated.host(), dz.host()};
    });
    CudaNumbers expected_dot, expected_gated, expected_dz;
    for_branch_rows(s, [&](size_t branch, size_t row, size_t by_token) {
        CudaSum dot;
        for (int x = 0; x < s.D; x++)
            dot.add(CudaNumber(dout[by_token * s.D + x]) * CudaNumber(o[(branch * rows + row) * s.D + x]));
        const CudaNumber g(s.full ? 1 : gate[branch * rows + row]), shift(lse[branch * rows + row]);
        expected_dot.push_back(dot);
        expected_gated.push_back(std::isinf(shift.value) ? shift : shift - log(g));
        expected_dz.push_back(CudaNumber(dot) * g * (CudaNumber(1) - g));
    });
    CHECK_ARRAY(found[0], expected_dot);
    CHECK_ARRAY(found[1], expected_gated);
    if (!s.full) CHECK_ARRAY(found[2], expected_dz);
    return {found[0], found[1]};
}
inline HostArray random_gates(Random& random, size_t count) {
    HostArray gate(count);
    for (float& g : gate) g = float(1 / (1 + std::exp(-2 * random.normal())));
    return gate;
}
// Head dimensions that whole attention does not have on this engine, odd ones too, and more than lanes take at once.
TEST(cuda_gated_sum_and_row_terms) {
    Cuda dev(0, TEST_WORKSPACE);
    for (const int D : {1, 3, 37, 63, 64, 128, 296, 320})
        for (const bool full : {false, true}) {
            NsaShape s = part_of(cuda_shape(2, 17, 2, 3, D, 8, 4, 16, 3, 9), 4, 13);
            s.full = full;
            const CudaShapeReport report(s);
            Random random(97);
            const size_t rows = s.query_rows(), count = cuda_branches(s) * rows;
            const HostArray o = random_reals(random, count * D), dout = random_reals(random, rows * D),
                            gate = random_gates(random, count), lse = random_floats(random, count, 10);
            const auto outputs = in_every_order([&] {
                DeviceReal o_on_device(dev, o), out(dev, rows * D);
                DeviceFloat gates(dev, gate);
                dev.combine_forward(out, o_on_device, full ? nullptr : gates.data, s);
                CHECK_EQUAL(out.unwritten(), 0L);
                return std::vector<HostArray>{out.host()};
            });
            CHECK_ARRAY(outputs[0], expected_gated_sum(o, gate, s), s.B, s.queries, s.H, D);
            check_cuda_backward_rows(dev, dout, o, gate, lse, s);
        }
}

inline void check_cuda_attention(const NsaShape& s, double score_scale = 1) {
    const CudaShapeReport report(s);
    Cuda dev(0, TEST_WORKSPACE);
    dev.plain_attention = true;
    Random random(90);
    const size_t rows = s.query_rows(), values = rows * s.D,
                 masks_count = size_t(s.B) * s.G * s.queries * oracle::selection_words(s);
    const HostArray q = random_reals(random, values, score_scale),
                    dout = random_reals(random, size_t(s.B) * s.queries * s.H * s.D);
    const HostArray gate = random_gates(random, 3 * rows);
    std::vector<HostArray> k, v;
    for (Branch branch : {CMP, SLC, WIN}) {
        const size_t count = size_t(s.B) * s.G * oracle::key_rows(branch, s) * s.D;
        k.push_back(random_reals(random, count)), v.push_back(random_reals(random, count));
    }
    const std::vector<Branch> branches = s.full ? std::vector<Branch>{WIN} : std::vector<Branch>{CMP, SLC, WIN};
    const size_t count = branches.size();
    const auto slot = [&](Branch branch) { return s.full ? 0 : size_t(branch); };

    std::vector<uint32_t> masks(masks_count);
    HostArray share(size_t(s.B) * s.G * s.queries);
    const auto outputs = in_every_order([&] {
        DeviceReal q_on_device(dev, q), o(dev, count * values), out(dev, dout.size());
        DeviceFloat lse(dev, count * rows), gates(dev, gate), chosen(dev, share.size());
        OnDevice<uint32_t> selection(dev, masks_count);
        for (Branch branch : branches) {
            DeviceReal keys(dev, k[branch]), v_on_device(dev, v[branch]);
            dev.attention_forward(branch, o + slot(branch) * values, lse + slot(branch) * rows, q_on_device, keys,
                                  v_on_device, branch == SLC ? selection.data : nullptr, s);
            if (branch != CMP) continue;
            dev.select_blocks(selection, nullptr, q_on_device, keys, lse, s);
            dev.select_blocks(selection, chosen, q_on_device, keys, lse, s);
            CHECK_EQUAL(selection.unwritten() + chosen.unwritten(), 0L);
            dev.copy(masks.data(), (const uint32_t*)selection.data, masks_count);
            share = chosen.host();
        }
        dev.combine_forward(out, o, s.full ? nullptr : gates.data, s);
        CHECK_EQUAL(out.unwritten() + o.unwritten() + lse.unwritten(), 0L);
        HostArray as_floats(masks.begin(), masks.end());
        return std::vector<HostArray>{o.host(), lse.host(), out.host(), share, as_floats};
    });
    const HostArray &o = outputs[0], &lse = outputs[1];
    if (!s.full) check_cuda_selection(masks, share, q, k[CMP], HostArray(lse.begin(), lse.begin() + long(rows)), s);
    const CudaNumbers numbers_q(q.begin(), q.end());
    for (Branch branch : branches) {
        const oracle::Attended<float> expected =
            oracle::attention<float>(branch, numbers_q, CudaNumbers(k[branch].begin(), k[branch].end()),
                                     CudaNumbers(v[branch].begin(), v[branch].end()), masks.data(), s);
        const long at = long(slot(branch));
        const HostArray branch_o(o.begin() + at * long(values), o.begin() + (at + 1) * long(values)),
            branch_lse(lse.begin() + at * long(rows), lse.begin() + (at + 1) * long(rows));
        CHECK_ARRAY(branch_o, stored(expected.out), s.B, s.H, s.queries, s.D);
        CHECK_ARRAY(branch_lse, expected.lse, s.B, s.H, s.queries);
    }
    CHECK_ARRAY(outputs[2], expected_gated_sum(o, gate, s), s.B, s.queries, s.H, s.D);
    // The row terms of the backward pass, from the outputs as they were stored.
    const RowTerms terms = check_cuda_backward_rows(dev, dout, o, gate, lse, s);
    if (s.queries != s.T) return;

    const HostArray dq = random_floats(random, values);  // the operation adds to it
    for (size_t i = 0; i < branches.size(); i++) {
        const Branch branch = branches[i];
        const auto part = [&](const HostArray& all) {
            return HostArray(all.begin() + long(i * rows), all.begin() + long((i + 1) * rows));
        };
        const HostArray row_dot = part(terms.row_dot), lse_gated = part(terms.lse_gated);
        const auto gradients = in_every_order([&] {
            DeviceReal q_on_device(dev, q), keys(dev, k[branch]), v_on_device(dev, v[branch]), d(dev, dout),
                dk(dev, k[branch].size()), dv(dev, v[branch].size());
            DeviceFloat dq_on_device(dev, dq), only_dq(dev, values), dots(dev, row_dot), gated(dev, lse_gated);
            OnDevice<uint32_t> selection(dev, masks_count);
            dev.copy(selection.data, (const uint32_t*)masks.data(), masks_count);
            dev.attention_backward(branch, {dq_on_device, true, dk, dv, d, dots, gated},
                                   {q_on_device, keys, v_on_device, selection}, s);
            dev.attention_backward(branch, {only_dq, false, dk, dv, d, dots, gated},
                                   {q_on_device, keys, v_on_device, selection}, s);
            CHECK_EQUAL(only_dq.unwritten(), 0L);
            CHECK_EQUAL((dk.count ? dk.unwritten() : 0) + (dv.count ? dv.unwritten() : 0), 0L);
            return std::vector<HostArray>{dq_on_device.host(), dk.host(), dv.host(), only_dq.host()};
        });
        oracle::AttentionGradients<float> expected =
            plain_gradients(branch, q, k[branch], v[branch], dout, row_dot, lse_gated, masks.data(), s);
        CHECK_ARRAY(gradients[3], oracle::numbers(expected.dq), s.B, s.H, s.T, s.D);
        for (size_t x = 0; x < values; x++) expected.dq[x].add(CudaNumber(dq[x]));
        CHECK_ARRAY(gradients[0], oracle::numbers(expected.dq), s.B, s.H, s.T, s.D);
        CHECK_ARRAY(gradients[1], stored(oracle::numbers(expected.dk)), s.B, s.G, oracle::key_rows(branch, s), s.D);
        CHECK_ARRAY(gradients[2], stored(oracle::numbers(expected.dv)), s.B, s.G, oracle::key_rows(branch, s), s.D);
    }
}
TEST(cuda_plain_attention) {
    for (const NsaShape& s : cuda_attention_shapes()) check_cuda_attention(s);
}
TEST(cuda_plain_attention_in_parts) {
    for (const NsaShape& s :
         {cuda_shape(2, 65, 1, 3, 16, 8, 4, 16, 3, 33), cuda_shape(1, 130, 2, 2, 8, 16, 4, 20, 4, 7)})
        for (const NsaShape& part : {part_of(s, 0, s.T / 2), part_of(s, s.T / 2, 1), part_of(s, s.T - 1, 1),
                                     part_of(s, s.T / 3, s.T - s.T / 3)})
            check_cuda_attention(part);
}
TEST(cuda_plain_attention_full) {
    NsaShape s = cuda_shape(2, 70, 2, 3, 16, 8, 4, 16, 3, 5);
    s.full = true;
    check_cuda_attention(s);
}
TEST(cuda_plain_attention_large_logits) { check_cuda_attention(cuda_shape(1, 65, 1, 3, 16, 8, 4, 16, 4, 33), 300); }

TEST(cuda_plain_equal_importance_goes_to_the_lower_block) {
    NsaShape s = cuda_shape(1, 200, 1, 2, 8, 8, 4, 8, 6, 16);
    Cuda dev(0, TEST_WORKSPACE);
    dev.plain_attention = true;
    Random random(95);
    const HostArray q = random_reals(random, s.query_rows() * s.D),
                    kc(s.cmp_rows() * s.D, 0.5f);  // all compressed keys are the same
    DeviceReal q_on_device(dev, q), keys(dev, kc), o(dev, q.size());
    DeviceFloat lse(dev, s.query_rows());
    OnDevice<uint32_t> selection(dev, size_t(s.T) * s.selection_words());
    dev.attention_forward(CMP, o, lse, q_on_device, keys, keys, nullptr, s);
    dev.select_blocks(selection, nullptr, q_on_device, keys, lse, s);
    std::vector<uint32_t> masks(selection.count);
    dev.copy(masks.data(), (const uint32_t*)selection.data, masks.size());
    // l = l' = 2d: block 0 shares 8 + 4 tokens with compressed blocks, every later one 4 + 8 + 4. So 1, 2, 3 come
    // before the rest.
    for (int t = 56; t < s.T; t++)
        CHECK(blocks_of(&masks[size_t(t) * s.selection_words()], s.selection_words()) ==
              (std::vector<int>{0, 1, 2, 3, t / 8 - 1, t / 8}));
}
