// long_context_tests.h: what long sequences need: the selected branch by gathered rows, lists that are split, AUTO's
// choice, the compressed branch in parts, and whether 64k tokens fit. Compared with Cpu in fp64 within the derived
// limits of attention_kernel_tests.h, with masked tiles, and bit by bit with themselves; on a GPU, or in emulation with
// several orders of threads and blocks.
#pragma once
#include "attention_kernel_tests.h"

#ifndef PRECISION_FP32  // which has the plain kernels only

namespace long_context_tests {

using namespace attention_tests;

// Every query has the blocks `always`, its own, and one at random.
inline std::vector<uint32_t> popular_selection(const NsaShape& s, const std::vector<int>& always) {
    std::vector<uint32_t> selection(size_t(s.B) * s.G * s.queries * s.selection_words());
    for (size_t row = 0; row < size_t(s.B) * s.G * s.queries; row++) {
        const int own = (s.first + int(row % size_t(s.queries))) / s.slc_block;
        auto take = [&](int block) {
            if (block <= own) selection[row * s.selection_words() + block / 32] |= 1u << block % 32;
        };
        take(own), take(int(random_below(uint64_t(own) + 1, 11, random_stream(RANDOM_TEST, 80), row)));
        for (int block : always) take(block);
    }
    return selection;
}

inline Results run_selected(const Inputs& in, AttentionPath path, AttentionPath path_backward) {
    return run_branch(in, path, path_backward, nullptr);
}
inline Results run_selected(const Inputs& in, AttentionPath path) { return run_selected(in, path, path); }
template <class T>
double relative_difference(const std::vector<T>& a, const std::vector<T>& b) {
    double difference = 0, square = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (float(a[i]) == float(b[i])) continue;  // infinities too
        difference += std::pow(double(float(a[i])) - double(float(b[i])), 2);
    }
    for (const T& x : b) square += std::isinf(float(x)) ? 0 : std::pow(double(float(x)), 2);
    return std::sqrt(difference / square);
}
// Both round the same weights to bf16 once and store bf16 once: each is off by at most 2^-8 of its terms' root mean
// square in either, as in ladder_tests.h.
inline void check_close(const Results& a, const Results& b) {
    CHECK_NEAR(relative_difference(a.out, b.out), 0, 4 * U16);
    CHECK_NEAR(relative_difference(a.lse, b.lse), 0, 1e-5);
    CHECK_NEAR(relative_difference(a.dq, b.dq), 0, 4 * U16);
    CHECK_NEAR(relative_difference(a.dk, b.dk), 0, 4 * U16);
    CHECK_NEAR(relative_difference(a.dv, b.dv), 0, 4 * U16);
}

}  // namespace long_context_tests

// A tile of tokens that chose nothing, or all of them.
TEST(attention_kernels_gather_empty_selections) {
    using namespace long_context_tests;
    Inputs in = gather_inputs(shape(150, 3));
    for (int j = 30; j < 100; j++) in.selection[size_t(j) * in.s.selection_words()] = 0;
    check_attention(in, true, SelectedKernel::GATHER);
    std::fill(in.selection.begin(), in.selection.end(), 0);
    check_attention(in, true, SelectedKernel::GATHER);
}
// 1024 selection blocks, as 64k tokens have, chosen by the kernel, attended to by gathered rows: the first tiles of
// tokens, and the last.
TEST(attention_kernels_gather_1024_blocks) {
    using namespace long_context_tests;
    for (const int first : {0, 16384 - 40}) {
        NsaShape s = shape(16384, 3, 1, 16);
        s.slc_block = 16, s.l = 8, s.d = 4, s.slc_count = 16, s.first = first, s.queries = 40;
        const Inputs scores(s, CMP, 1, 21);
        std::vector<double> out(scores.rows() * s.D), lse(scores.rows());
        Cpu<double>().attention_forward(CMP, out.data(), lse.data(), scores.q.data(), scores.k.data(), scores.v.data(),
                                        nullptr, s);
        Inputs in(s, SLC, 1, 22);
        in.selection = run_selection(scores, std::vector<float>(lse.begin(), lse.end())).selection;
        check_attention(in, false, SelectedKernel::GATHER);
    }
}
// Lists longer than GATHER_CHUNK: everyone chooses blocks 0 and 5, so two tiles of keys (or six, of two blocks) are
// split, into three chunks (or two). The selection's bits are nine words, and more tiles than a warp has lanes.
TEST(attention_kernels_gather_splits_long_lists) {
    using namespace long_context_tests;
    for (const int block : {16, 192}) {
#ifdef EMU_CHECK
        NsaShape s = shape(GATHER_CHUNK + 100, 1, 1, 16);
        if (block == 192) continue;
#else
        NsaShape s = shape(block == 16 ? 2 * GATHER_CHUNK + 100 : GATHER_CHUNK + 150, 1, block == 16 ? 1 : 2, 16);
#endif
        s.slc_block = block;
        Inputs in(s, SLC, 1, 23);
        in.s.slc_count = 4;
        in.selection = popular_selection(s, {0, 5});
        check_attention(in, true, SelectedKernel::GATHER);
    }
}
// AUTO counts what plain loops count, takes what costs less, and then gives the same bits as the kernels it took; dK
// and dV are those of gathered rows.
TEST(attention_kernels_gather_automatic_choice) {
    using namespace long_context_tests;
    for (const int block : {16, 64, 128})
        for (const bool together : {false, true}) {
            NsaShape s = shape(block == 128 ? 2060 : 1030, 3, 1, 16);
            s.slc_block = block, s.slc_count = 3;
            Inputs in(s, SLC, 1, 41);
            for (int t = 0; t < s.T; t++) {  // three blocks each: the same for all tokens of a tile, or different ones
                uint32_t* words = &in.selection[size_t(t) * s.selection_words()];
                std::fill_n(words, s.selection_words(), 0u);
                const int own = t / 32 * 32 / block;  // the block of the tile's first token
                for (int i = 0; i < 3; i++) {
                    const int b = together ? std::max(0, own - i)
                                           : int(random_below(uint64_t(own) + 1, 5, random_stream(RANDOM_TEST, 81),
                                                              uint64_t(t) * 3 + i));
                    words[b / 32] |= 1u << b % 32;
                }
            }
            const Results found = run_selected(in, SelectedKernel::AUTO);
            double visited = 0, pieces = 0, masked = 0;
            const int key_tiles = (s.T + 63) / 64, token_tiles = (s.T + 31) / 32;
            for (int tile = 0; tile < token_tiles; tile++)
                for (int key_tile = 0; key_tile < key_tiles; key_tile++) {
                    int tokens = 0, all = 0;
                    for (int t = tile * 32; t < std::min(s.T, tile * 32 + 32); t++) {
                        bool chose = false;
                        for (int key = key_tile * 64; key < std::min(s.T, key_tile * 64 + 64); key += 16)
                            chose = chose || (in.selection[size_t(t) * s.selection_words() + key / block / 32] >>
                                                  (key / block % 32) &
                                              1);
                        tokens += chose, all++;
                    }
                    if (tokens) visited++, pieces += (tokens * 3 + 15) / 16, masked += (all * 3 + 15) / 16;
                }
            CHECK_NEAR(found.choice.tile_blocks, visited / token_tiles, 1e-4 * visited / token_tiles);
            CHECK_NEAR(found.choice.cost,
                       double(gathered_piece_cost<16>(generation_of_device().mma_cycles)) * pieces / masked, 1e-5);
            CHECK_EQUAL(found.choice.gather, int(found.choice.cost < 1));
            CHECK_EQUAL(found.choice.gather, int(!together));
            const SelectedKernel taken = together ? SelectedKernel::TILES : SelectedKernel::GATHER;
            Results expected = run_selected(in, taken);
            const Results gathered = run_selected(in, taken, SelectedKernel::GATHER);
            expected.dk = gathered.dk, expected.dv = gathered.dv;
            check_same(found, expected);
            CHECK(describe(found.choice, s).find(together ? "by masked tiles" : "by gathered rows") !=
                  std::string::npos);
        }
    CHECK_NEAR(gathered_piece_cost<64>(generation_of(90).mma_cycles), 1.94, 0.005);
    CHECK_NEAR(gathered_piece_cost<64>(generation_of(80).mma_cycles), 1.55, 0.005);
    CHECK_EQUAL(gathered_piece_cost<64>(generation_of(86).mma_cycles), 1.0f);  // bound by the products, both ways
    CHECK_EQUAL(gathered_piece_cost<64>(generation_of(120).mma_cycles), gathered_piece_cost<64>(8.0f));
    // 992 against 256 / 2 + 32 + 384
    CHECK_NEAR(gathered_piece_cost<128>(generation_of(90).mma_cycles), 2 * 992 / 544.0, 0.005);
    NsaShape s = shape(512, 3);
    CHECK(resolve_selected<64>(SelectedKernel::AUTO, s) ==
          SelectedKernel::TILES);  // 8 blocks, of which a query takes 4
    // Warpgroups take dK and dV by lists all the same.
    const AttentionPath warpgroups = {SelectedKernel::AUTO, true};
    CHECK(resolve_selected<64>(warpgroups, s, false) == SelectedKernel::TILES);
    CHECK(resolve_selected<64>(warpgroups, s, true) == SelectedKernel::AUTO);
    CHECK(resolve_dq<64>(warpgroups, s) == SelectedKernel::TILES);
    CHECK(resolve_selected<32>(warpgroups, s, true) == SelectedKernel::TILES);
    s.T = s.queries = 513;
    CHECK(resolve_selected<64>(SelectedKernel::AUTO, s) == SelectedKernel::AUTO);
    s.first = 512, s.queries = 1;
    CHECK(resolve_selected<64>(SelectedKernel::AUTO, s) == SelectedKernel::TILES);
    s = shape(4096, 49, 1, 128);
    CHECK(resolve_selected<128>(SelectedKernel::AUTO, s) == SelectedKernel::TILES);
    CHECK(gather_possible<64>(shape(65536, 6)));
    s = shape(65536, 6);  // where a block has 99 KB of shared memory, tiles are smaller
    const AttentionShape wide = gather_shape<64>(s, false), narrow = gather_shape<64>(s, false, 99 * 1024);
    CHECK_EQUAL(wide.tile_tokens, max_shared_of_device() > (99 << 10) ? 32 : narrow.tile_tokens);
    CHECK(narrow.tile_tokens >= 16 && narrow.tile_tokens < 32 && gather_shared_bytes<64>(narrow, false) <= 99 * 1024);
    CHECK_EQUAL(narrow.tiles, (65536 + narrow.tile_tokens - 1) / narrow.tile_tokens);
    s = shape(4096, 49, 1, 128);
    CHECK_FAILS(2, "gathered rows have room for 48", resolve_selected<128>(SelectedKernel::GATHER, s));
}
// Beside tiles on warpgroups gathering has another cost. At 512 tokens dQ and the forward pass are tiles', dK and dV
// lists'.
TEST(attention_kernels_gather_beside_warpgroups) {
    using namespace long_context_tests;
    if (!device_has_warpgroups(64)) return;
    const Inputs in(shape(512, 3), SLC, 1, 44, 0.2);
    const SelectedKernel automatic = SelectedKernel::AUTO, tiles = SelectedKernel::TILES,
                         lists = SelectedKernel::GATHER;
    const Results found = run_selected(in, {automatic, true});
    Results expected = run_selected(in, {tiles, true});
    const Results gathered = run_selected(in, {tiles, true}, {lists, true});
    expected.dk = gathered.dk, expected.dv = gathered.dv;
    check_same(found, expected);
    check_close(found, run_selected(in, tiles));
    // Long enough that the forward pass is AUTO's by mma too: the costs have the ratio that was measured.
    const Inputs longer(shape(544, 3), SLC, 1, 45, 0.2);
    CHECK_NEAR(run_selected(longer, {automatic, true}).choice.cost,
               GATHERED_BESIDE_WARPGROUPS * run_selected(longer, automatic).choice.cost, 1e-5);
}
// For heads of 128 AUTO takes masked tiles forward, also where it gathers for dQ.
TEST(attention_kernels_gather_forward_of_wide_heads) {
    using namespace long_context_tests;
    NsaShape s = shape(1032, 3, 1, 128);
    s.slc_block = 16, s.slc_count = 3;
    Inputs in(s, SLC, 1, 43);
    for (int t = 0; t < s.T; t++) {  // one block each, so that neighbours have little in common
        uint32_t* words = &in.selection[size_t(t) * s.selection_words()];
        std::fill_n(words, s.selection_words(), 0u);
        const int b = int(random_below(uint64_t(t / 16 + 1), 5, random_stream(RANDOM_TEST, 82), uint64_t(t)));
        words[b / 32] |= 1u << b % 32;
    }
    const Results found = run_selected(in, SelectedKernel::AUTO);
    CHECK_EQUAL(found.choice.gather, 1);
    CHECK(describe(found.choice, s).find("by masked tiles, dQ by gathered rows, dK") != std::string::npos);
    check_same(found, run_selected(in, SelectedKernel::TILES, SelectedKernel::GATHER));
    // Either way gives these bits, so what tells is that nothing is chosen.
    const AttentionScratch forward(SLC, s, SelectedKernel::AUTO, false);
    const SelectedChoice before = {7, 0, 0, 0};
    CUDA_CHECK(cudaMemcpy(forward.choice.data, &before, sizeof before, cudaMemcpyHostToDevice));
    DeviceArray<bf16> q(in.q), k(in.k), v(in.v), out(in.rows() * size_t(s.D));
    DeviceArray<float> lse(in.rows());
    const DeviceArray<uint32_t> selection(in.selection);
    forward_on_tensor_cores(SLC, out.data, lse.data, q.data, k.data, v.data, selection.data, s, SelectedKernel::AUTO,
                            forward, nullptr);
    CHECK_EQUAL(forward.choice.raw()[0].gather, 7);
}
// struct Cuda says how it computes the selected branch, and why.
TEST(attention_kernels_gather_is_described) {
    using namespace long_context_tests;
    NsaShape s = shape(600, 1, 1, 16);
    s.slc_count = 3;
    const Inputs in(s, SLC, 1, 51, 0.2);
    Cuda dev(0, size_t(1) << 20);
    auto says = [&](const char* text) { return dev.describe_selected(s).find(text) != std::string::npos; };
    CHECK(says("as the selection will show"));
    const DeviceArray<bf16> q(in.q), k(in.k), v(in.v), out(in.rows() * s.D);
    const DeviceArray<uint32_t> selection(in.selection);
    const DeviceArray<float> lse(in.rows());
    CUDA_CHECK(cudaDeviceSynchronize());  // the arrays were copied on another stream
    dev.attention_forward(SLC, out.data, lse.data, q.data, k.data, v.data, selection.data, s);
    CHECK(says("32 tokens visit") && says("of 10 tiles of keys"));
    dev.selected_kernel = SelectedKernel::TILES;
    CHECK(says("masked tiles, as asked"));
    dev.selected_kernel = SelectedKernel::GATHER;
    CHECK(says("gathered rows, as asked"));
    dev.selected_kernel = SelectedKernel::AUTO, s.slc_count = 5;
    CHECK(says("masked tiles, since gathering rows cannot pay"));
    dev.choose_attention("plain");
    CHECK(says("plain kernels"));
}
// The compressed branch's queries in parts of 256 tokens; the second shape has keys that only the last parts see.
TEST(attention_kernels_compressed_in_parts) {
    using namespace long_context_tests;
    for (const int d : {16, 8}) {
        NsaShape s = shape(d == 16 ? 1100 : 1300, 1, d == 16 ? 2 : 1, 16);
        s.l = 2 * d, s.d = d;
#ifdef EMU_CHECK
        if (d == 8) continue;
        s.T = s.queries = 600;
#endif
        CHECK(attention_shape(CMP, s, 0).parts > 1);
        check_setups({{BY_CMP, s}});
    }
    for (const std::array<int, 2> c : {std::array<int, 2>{256, 1}, {2048, 8}, {16384, 64}, {49152, 32}, {65536, 32}})
        CHECK_EQUAL((attention_shape(CMP, shape(c[0], 6), 0).parts), c[1]);
}
#endif
