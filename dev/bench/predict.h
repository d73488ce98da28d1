// predict.h: what an H100 should take, from counts alone, made before one was there. Measured on one (dev/LOG.md)
// are 0.8 to 1.0 times that for products, 1.1 to 1.4 for what passes through memory once, 2.0 to 2.2 for attention, 2.7
// for compression and 5.8 for the choice of blocks: short launches, and instructions that wait for one another.
//   build/cuda_tests --predict-attention   attention, branch by branch, in the shape for which others have published
//                                          times; build/test_device too, without a GPU. With --selections FILE
//                                          also for what a trained model chose, see selections.h
//   build/cuda_tests --predict-step        every operation of a training step of 125m at 16 x 2048, and its counts;
//                                          build/test_device --perf prints the same beside what it has measured
//
// Counted exactly, for the very selections that --perf-attention times: which tiles every thread block visits, and so
// its products (mma), its loads from shared memory, exponentials, instructions and the bytes it fetches from the L2
// cache. Instructions are those of the inner loops in sm_90's machine code (dev/loop_report.sh, CUDA 13.0), masks
// included. Blocks go to the multiprocessor that has least to do, in the order of their numbers.
//
// A pass takes at least as long as the busiest of these, if all others hide behind it ("overlapped"), and at most as
// long as all of them one after the other, unless latency is exposed ("in turn"). Memory counts each array once.
//
// Everything else takes as long as the longest of its products, its memory and its instructions, and a launch's time
// for each of its kernels.
#pragma once
#include <numeric>
#include <queue>

#include "attention.h"

#ifndef PRECISION_FP32

// NVIDIA's data sheet for the H100 SXM: 989.4 TFLOP/s dense in bf16, 132 multiprocessors, 3.35 TB/s. Its clock is the
// one at which 132 multiprocessors of 2048 multiply-adds a cycle reach the former. Shared memory (128 bytes),
// exponentials (16) and instructions (4) per cycle and multiprocessor: CUDA's programming guide for 9.0. L2: what
// published microbenchmarks read from it, since NVIDIA gives no figure. GENERATIONS has mma.sync at 62 % of that peak.
// Assumed: cuBLASLt reaches 65 % of it, and a kernel that has nothing to do takes 2 us of its stream.
constexpr double H100_FLOPS = 989.4e12, H100_BYTES = 3.35e12, H100_L2_BYTES = 5.7e12;
constexpr double CUBLAS_SHARE = 0.65, LAUNCH_SECONDS = 2e-6;
constexpr int H100_MULTIPROCESSORS = 132;
constexpr double H100_CLOCK = H100_FLOPS / (2.0 * 2048 * H100_MULTIPROCESSORS);
constexpr size_t H100_SHARED_BYTES = 232448;  // of a block

// What keeps a multiprocessor busy, in cycles.
enum Resource { PRODUCTS, SHARED_MEMORY, EXPONENTIALS, INSTRUCTIONS, L2, MEMORY, RESOURCES };
constexpr const char* RESOURCE_NAMES[] = {"products", "shared memory", "exponentials", "instructions", "L2", "memory"};
struct Cycles {
    double of[RESOURCES] = {};
    double longest() const { return *std::max_element(of, of + RESOURCES); }
    double sum() const { return std::accumulate(of, of + RESOURCES, 0.0); }
    const char* busiest() const { return RESOURCE_NAMES[std::max_element(of, of + RESOURCES) - of]; }
    void add(const Cycles& other, double factor) {
        for (int i = 0; i < RESOURCES; i++) of[i] += factor * other.of[i];
    }
};

// One warp at one piece of 16 rows and 64 keys (scores: 16 compressed blocks, 16 tokens of one head), by the loops of
// the machine code; sums: bytes of fp32 sums that pass through shared memory.
struct PieceCounts {
    int mma, ldmatrix, exponentials, instructions, sums;
};
struct DimensionCounts {
    int D;
    // What a warp has: rows forward and in dQ, keys in dK and dV. It does all of them or none.
    int forward_rows, dq_rows, keys;
    int selected_keys;  // of a block, in dK and dV of the selected branch by masked tiles
    PieceCounts forward, dq, dkdv, gather_forward, gather_dq, score;
};
// clang-format off
constexpr DimensionCounts COUNTS[] = {
    {64, 32, 32, 32, dkdv_keys<SLC, 64>(),
                 { 64, 16, 34,  495,     0}, { 96, 24, 32,  454,     0}, {128,  48, 32,  514,     0},
                 { 64, 36, 34,  668,  8192}, { 96, 56, 32,  729,  8192}, {  8,   4,  8,   77,     0}},
    {128, 32, 16, 16, dkdv_keys<SLC, 128>(),
                 {128, 48, 36, 715,     0}, {192, 96, 32,  728,     0}, {256, 160, 32,  892,     0},
                 {128, 72, 34,  926, 16384}, {192, 112, 32, 1066, 16384}, {16,   8,  8,   89,     0}}};
// clang-format on
inline const DimensionCounts& counts_of(const NsaShape& s) {
    for (const DimensionCounts& c : COUNTS)
        if (c.D == s.D) return c;
    fail("no machine code was counted for heads of dimension %d", s.D);
}
// `pieces` of them and `fetched` bytes that come from the L2 cache into shared memory.
inline Cycles cycles_of(const PieceCounts& p, double pieces, double fetched) {
    Cycles c;
    c.of[PRODUCTS] = pieces * p.mma * double(generation_of(90).mma_cycles);
    c.of[SHARED_MEMORY] = (pieces * (p.ldmatrix * 512.0 + p.sums) + fetched) / 128;
    c.of[EXPONENTIALS] = pieces * p.exponentials * 32 / 16;
    c.of[INSTRUCTIONS] = pieces * p.instructions / 4;
    c.of[L2] = fetched * H100_MULTIPROCESSORS / H100_L2_BYTES * H100_CLOCK;
    return c;
}

// A kernel's thread blocks, given one after the other.
struct PredictedKernel {
    using Load = std::pair<double, int>;  // longest resource's cycles so far, multiprocessor
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> order;
    std::vector<Cycles> of = std::vector<Cycles>(H100_MULTIPROCESSORS);
    PredictedKernel() {
        for (int i = 0; i < H100_MULTIPROCESSORS; i++) order.push({0, i});
    }
    void block(const PieceCounts& piece, double pieces, double fetched) {
        const int multiprocessor = order.top().second;
        order.pop();
        of[size_t(multiprocessor)].add(cycles_of(piece, pieces, fetched), 1);
        order.push({of[size_t(multiprocessor)].longest(), multiprocessor});
    }
    // The multiprocessor that ends last.
    Cycles last() const {
        return *std::max_element(of.begin(), of.end(),
                                 [](const Cycles& a, const Cycles& b) { return a.longest() < b.longest(); });
    }
};
// Milliseconds of a pass: the sums over its kernels.
struct Prediction {
    double overlapped = 0, in_turn = 0;
    Cycles of_last, of_all_blocks;  // of the multiprocessors that end last; of all of them
    void add(const PredictedKernel& kernel, double memory_bytes) {
        Cycles c = kernel.last();
        for (const Cycles& multiprocessor : kernel.of) of_all_blocks.add(multiprocessor, 1);
        c.of[MEMORY] = memory_bytes / H100_BYTES * H100_CLOCK;
        overlapped += 1e3 * c.longest() / H100_CLOCK, in_turn += 1e3 * c.sum() / H100_CLOCK;
        of_last.add(c, 1);
    }
    // Of operations that are no kernel of attention: at the data sheet's rates.
    void add_floor(const Work& work) {
        Cycles c;
        c.of[PRODUCTS] = work.flops / H100_FLOPS * H100_CLOCK, c.of[MEMORY] = work.bytes / H100_BYTES * H100_CLOCK;
        overlapped += 1e3 * c.longest() / H100_CLOCK, in_turn += 1e3 * c.sum() / H100_CLOCK;
        of_last.add(c, 1);
    }
    void add(const Prediction& other) {
        overlapped += other.overlapped, in_turn += other.in_turn;
        of_last.add(other.of_last, 1), of_all_blocks.add(other.of_all_blocks, 1);
    }
};

inline double tile_bytes(const NsaShape& s) { return KEY_TILE * s.D * 2.0; }
// Pieces of 16 among so many rows or keys, where a warp has `unit` of them.
inline double pieces_of(int rows, int unit) { return (rows + unit - 1) / unit * (unit / 16); }

inline AttentionShape h100_shape(Branch branch, const NsaShape& s, bool backward) {
    return attention_shape(branch, s, 0, query_rows_of(generation_of(90), s.D, backward));
}

// Forward and dQ of a branch without a selection: tiles of queries, the last first, as query_tile() has them.
inline void predict_query_tiles(PredictedKernel& kernel, Branch branch, bool backward, const NsaShape& s) {
    const DimensionCounts& c = counts_of(s);
    const AttentionShape a = h100_shape(branch, s, backward);
    const double pieces = pieces_of(a.heads * a.tile_tokens, backward ? c.dq_rows : c.forward_rows);
    for (int tile = a.tiles - 1; tile >= 0; tile--) {
        const int first = tile * a.tile_tokens, last = std::min(first + a.tile_tokens, s.T) - 1;
        const int keys = branch == CMP ? s.cmp_blocks(last + 1) : last + 1;
        const int begin = branch == WIN ? std::max(0, first + 1 - a.window) / KEY_TILE : 0;
        const double visits = (keys + KEY_TILE - 1) / KEY_TILE - begin;
        for (int bg = 0; bg < a.batch_groups; bg++)
            kernel.block(backward ? c.dq : c.forward, visits * pieces, visits * 2 * tile_bytes(s));
    }
}
// dK and dV: tiles of keys, each of which meets tiles of tokens once for every head; each warp leaves out what none of
// its keys is seen by.
inline void predict_key_tiles(PredictedKernel& kernel, Branch branch, const NsaShape& s) {
    const AttentionShape a = h100_shape(branch, s, true);
    const int keys = counts_of(s).keys;
    auto seen_from = [&](int key) { return branch == CMP ? key * s.d + s.l - 1 : key; };
    for (int tile = 0; tile < key_tiles(a); tile++)
        for (int part = 0; part < a.parts; part++) {
            const int key = tile * KEY_TILE;
            const int first = std::max(seen_from(key), branch == CMP ? part * a.part_tokens : 0),
                      end = std::min(s.T, branch == WIN   ? key + KEY_TILE - 1 + a.window
                                          : branch == CMP ? (part + 1) * a.part_tokens
                                                          : s.T);
            if (first >= end) continue;
            double tiles = 0, pieces = 0;
            for (int t0 = first / KEY_TILE * KEY_TILE; t0 < end; t0 += KEY_TILE, tiles++)
                for (int low = key; low < key + KEY_TILE; low += keys)
                    if (seen_from(low) < t0 + KEY_TILE && (branch != WIN || t0 < low + keys - 1 + a.window))
                        pieces += keys / 16;
            for (int bg = 0; bg < a.batch_groups; bg++)
                kernel.block(counts_of(s).dkdv, pieces * a.heads, (tiles * a.heads + 1) * 2 * tile_bytes(s));
        }
}
inline Prediction predict_scores(const NsaShape& s) {
    PredictedKernel kernel;
    const AttentionShape a = attention_shape(CMP, s, SCORE_TOKENS);
    for (int tile = a.tiles - 1; tile >= 0; tile--) {
        const int last = std::min((tile + 1) * SCORE_TOKENS, s.T) - 1;
        const double visits =
            last / s.slc_block + 1 > s.slc_count ? (s.cmp_blocks(last + 1) + KEY_TILE - 1) / KEY_TILE : 0;
        for (int bg = 0; bg < a.batch_groups; bg++)
            kernel.block(counts_of(s).score, visits * 4 * a.heads, visits * tile_bytes(s));
    }
    Prediction p;
    p.add(kernel, select_blocks_work(s, 2).bytes);
    return p;
}

// The selected branch, for a selection [B*G, T, words] whose blocks are tiles of keys.
struct SelectedPrediction {
    const NsaShape& s;
    const std::vector<uint32_t>& selection;
    size_t words = size_t(s.selection_words());

    // Calls f(block, choosers) for every block that one of these tokens chose.
    template <class F>
    void for_blocks(int bg, int first, int tokens, F f) const {
        const uint32_t* row = &selection[(size_t(bg) * size_t(s.T) + size_t(first)) * words];
        for (size_t word = 0; word < words; word++) {
            uint32_t any = 0;
            for (int j = 0; j < tokens; j++) any |= row[size_t(j) * words + word];
            for (; any; any &= any - 1) {
                const int bit = __builtin_ctz(any);
                int choosers = 0;
                for (int j = 0; j < tokens; j++) choosers += int(row[size_t(j) * words + word] >> bit & 1);
                f(int(word) * 32 + bit, choosers);
            }
        }
    }
    // Tiles of keys that a tile of tokens visits, and the pieces of 16 gathered rows in them.
    struct Visits {
        double tiles = 0, pieces = 0;
    };
    Visits visits(const AttentionShape& a, int bg, int tile) const {
        Visits v;
        const int first = tile * a.tile_tokens;
        for_blocks(bg, first, std::min(a.tile_tokens, s.T - first),
                   [&](int, int choosers) { v.tiles++, v.pieces += (choosers * a.heads + 15) / 16; });
        return v;
    }
    void predict_tiles(PredictedKernel& kernel, const AttentionShape& a, bool backward, bool gathered) const {
        const DimensionCounts& c = counts_of(s);
        const double rows = pieces_of(a.heads * a.tile_tokens, backward ? c.dq_rows : c.forward_rows);
        const PieceCounts& piece = gathered ? (backward ? c.gather_dq : c.gather_forward) : backward ? c.dq : c.forward;
        for (int tile = a.tiles - 1; tile >= 0; tile--)
            for (int bg = 0; bg < a.batch_groups; bg++) {
                const Visits v = visits(a, bg, tile);
                kernel.block(piece, gathered ? v.pieces : v.tiles * rows, v.tiles * 2 * tile_bytes(s));
            }
    }
    void predict_dkdv(PredictedKernel& kernel, bool gathered) const {
        const AttentionShape a = h100_shape(SLC, s, true);
        const int own = gathered ? 1 : counts_of(s).selected_keys / KEY_TILE;  // tiles of keys of a block
        const size_t blocks = size_t((key_tiles(a) + own - 1) / own) * size_t(a.batch_groups);
        std::vector<double> visits(blocks);  // of tiles of 64 tokens, or tokens
        std::vector<double> pairs(blocks);   // of a tile of tokens and one of keys that it may see
        for (int bg = 0; bg < a.batch_groups; bg++)
            for (int first = 0; first < s.T; first += KEY_TILE) {
                int before = -1;
                for_blocks(bg, first, std::min(KEY_TILE, s.T - first), [&](int block, int choosers) {
                    const size_t i = size_t(block / own) * size_t(a.batch_groups) + size_t(bg);
                    if (block / own == before) return;
                    before = block / own;
                    visits[i] += gathered ? choosers : 1;
                    pairs[i] += std::min(own, first / KEY_TILE - block / own * own + 1);
                });
            }
        auto block = [&](double token_tiles, double tile_pairs) {
            kernel.block(counts_of(s).dkdv, 4 * tile_pairs * a.heads,
                         (token_tiles * a.heads + own) * 2 * tile_bytes(s));
        };
        for (double& count : visits)  // chunks beyond the first come first
            for (; gathered && count > GATHER_CHUNK; count -= GATHER_CHUNK)
                block(GATHER_CHUNK / KEY_TILE, GATHER_CHUNK / KEY_TILE);
        for (size_t i = 0; i < blocks; i++) {
            const double tiles = gathered ? std::ceil(visits[i] / KEY_TILE) : visits[i];
            block(tiles, gathered ? tiles : pairs[i]);
        }
    }
    // Where AUTO is open; dK and dV are gathered there.
    bool may_gather() const { return s.slc_blocks() > 2 * s.slc_count; }
    // dQ and, where AUTO may gather there, the forward pass, by the rule of choose_selected_kernel.
    bool gathers() const {
        bool yes = false;
        with_head_dimension(s.D, [&](auto D) { yes = gathers<D()>(); });
        return yes;
    }
    template <int D>
    bool gathers() const {
        if (!may_gather()) return false;
        const AttentionShape a = gather_shape<D>(s, false, H100_SHARED_BYTES);
        double pieces = 0, masked = 0;
        for (int tile = 0; tile < a.tiles; tile++)
            for (int bg = 0; bg < a.batch_groups; bg++) {
                const Visits v = visits(a, bg, tile);
                const int tokens = std::min(a.tile_tokens, s.T - tile * a.tile_tokens);
                pieces += v.pieces, masked += v.tiles * ((tokens * a.heads + 15) / 16);
            }
        return double(gathered_piece_cost<D>(generation_of(90).mma_cycles)) * pieces < masked;
    }
    Prediction pass(bool backward, bool gathered) const {
        AttentionShape a = h100_shape(SLC, s, backward);
        if (gathered) with_head_dimension(s.D, [&](auto D) { a = gather_shape<D()>(s, backward, H100_SHARED_BYTES); });
        PredictedKernel of_queries, of_keys;
        Prediction p;
        predict_tiles(of_queries, a, backward, gathered);
        p.add(of_queries, attention_forward_work(SLC, s, 2).bytes);
        if (backward)
            predict_dkdv(of_keys, gathered || may_gather()), p.add(of_keys, attention_backward_work(SLC, s, 2).bytes);
        return p;
    }
};

inline Prediction predict_branch(Branch branch, const NsaShape& s, bool backward) {
    PredictedKernel of_queries, of_keys;
    Prediction p;
    predict_query_tiles(of_queries, branch, backward, s);
    p.add(of_queries, attention_forward_work(branch, s, 2).bytes);
    if (backward) predict_key_tiles(of_keys, branch, s), p.add(of_keys, attention_backward_work(branch, s, 2).bytes);
    return p;
}
// phi of keys and values, split heads, the gated sum: at the data sheet's rates.
inline Prediction predict_rest(const NsaShape& s, bool backward) {
    const Work phi = backward ? compress_backward_work(s, 2) : compress_forward_work(s, 2);
    Prediction p;
    if (!s.full) p.add_floor(phi);
    p.add_floor(backward ? split_heads_backward_work(s, 2) : split_heads_forward_work(s, 2));
    p.add_floor(backward ? attention_backward_rows_work(s, 2) : combine_forward_work(s, 2));
    return p;
}

// One length: prints a line for every branch and pass, with others' times beside it.
inline void print_predicted_length(const NsaShape& s, const TrainedSelections* model, std::FILE* out) {
    NsaShape full = s;
    full.full = true;
    auto print = [&](const std::string& name, const char* published, const Prediction(&p)[2]) {
        for (const int pass : {0, 1}) {
            if (p[pass].in_turn <= 0) continue;
            std::string theirs;
            for (const PublishedTime& t : PUBLISHED_TIMES)
                if (t.T == s.T && published && !std::strcmp(t.what, published))
                    theirs += format_text("%s%.2f on an %s", theirs.empty() ? "" : ", ", t.ms[pass], t.device);
            std::fprintf(out, "%7d %-34s %-9s %11.2f %9.2f  %-14s %s\n", s.T, name.c_str(),
                         pass ? "backward" : "forward", p[pass].overlapped, p[pass].in_turn, p[pass].of_last.busiest(),
                         theirs.c_str());
        }
    };
    auto both = [](auto of) -> std::array<Prediction, 2> { return {of(false), of(true)}; };
    const auto cmp = both([&](bool backward) { return predict_branch(CMP, s, backward); }),
               win = both([&](bool backward) { return predict_branch(WIN, s, backward); }),
               dense = both([&](bool backward) { return predict_branch(WIN, full, backward); }),
               rest = both([&](bool backward) { return predict_rest(s, backward); });
    Prediction scored[2] = {cmp[0], cmp[1]};
    scored[0].add(predict_scores(s));
    print("compressed", nullptr, {cmp[0], cmp[1]});
    print(COMPRESSED_SCORED, COMPRESSED_SCORED, scored);
    print("window", nullptr, {win[0], win[1]});
    for (const std::string kind : {"uniform", "scattered", "shared", "trained"}) {
        if (kind == "trained" && !model) continue;
        const std::vector<uint32_t> masks = kind == "trained"     ? model->masks(s, 1)
                                            : kind == "uniform"   ? uniform_selection(s, 1)
                                            : kind == "scattered" ? AttentionSet::selection(s, 1, 0, 1)
                                                                  : AttentionSet::selection(s, 1, 3, 4);
        std::fprintf(out, "%7d %s\n", s.T, describe_selection(kind, masks, s).c_str());
        const SelectedPrediction selected{s, masks};
        const bool dq = selected.gathers(), forward = dq && auto_may_gather(s.D, false);
        const Prediction p[2] = {selected.pass(false, forward), selected.pass(true, dq)};
        print(format_text("selected, %s, %s", kind.c_str(), dq ? "gathered" : "tiles"), SELECTED_ALONE, p);
        Prediction whole[2] = {p[0], p[1]};
        for (const int pass : {0, 1})
            whole[pass].add(scored[pass]), whole[pass].add(win[size_t(pass)]), whole[pass].add(rest[size_t(pass)]);
        print(format_text("NSA, all of it, %s", kind.c_str()), WHOLE_NSA, whole);
    }
    print("dense", DENSE_3, {dense[0], dense[1]});
    std::fflush(out);
}
inline int run_prediction(int first_length, int last_length, std::FILE* out, const TrainedSelections* model = nullptr) {
    Config c;
    c.model = "125m";
    apply_preset(c, {});
    apply_named_shape(c, NAMED_SHAPES[0], {});
    const NsaShape shape = shape_of(c, 1, last_length);
    std::fprintf(
        out,
        "PREDICTED, from counts alone: milliseconds of one layer on an H100 SXM, one sequence, %d heads in %d "
        "groups of dimension %d\n"
        "assumed: %d multiprocessors at %.2f GHz; mma.sync at 62 %% of %.1f TFLOP/s; %.2f TB/s of memory, %.2f "
        "of L2; 128 bytes of shared memory, 16 exponentials, 4 instructions a cycle; dev/bench/predict.h says "
        "why\n"
        "overlapped: the busiest of these hides all others; in turn: none hides another; latency is not "
        "counted\n\n%7s %-34s %-9s %11s %9s  %-14s %s\n",
        shape.H, shape.G, shape.D, H100_MULTIPROCESSORS, H100_CLOCK * 1e-9, H100_FLOPS * 1e-12, H100_BYTES * 1e-12,
        H100_L2_BYTES * 1e-12, "T", "what", "pass", "overlapped", "in turn", "busiest", "published");
    for (int T = first_length; T <= last_length; T *= 2) print_predicted_length(shape_of(c, 1, T), model, out);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// A whole training step.

// What an operation of the model launches, and what a thread of its main kernel does and moves; the instructions are
// those of sm_90's machine code for 16 bytes at a time, 0 where they were not counted. Keys are rotated back by one
// launch more than values take.
struct OperationCounts {
    const char* name;
    double launches, instructions, bytes;
};
constexpr OperationCounts OPERATIONS[] = {{"product", 1, 0, 0},
                                          {"embedding_forward", 1, 160, 32},
                                          {"embedding_backward", 2, 0, 0},
                                          {"smear_forward", 1, 0, 0},
                                          {"smear_backward", 6, 0, 0},
                                          {"rmsnorm_forward", 1, 546, 96},
                                          {"rmsnorm_backward", 2, 573, 192},
                                          {"silu_forward", 1, 148, 32},
                                          {"silu_backward", 1, 187, 48},
                                          {"classifier", 1, 75 + 63, 32},
                                          {"chunk_squares", 1, 0, 0},
                                          {"adamw", 1, 544, 240},
                                          {"split_heads_forward", 1, 0, 0},
                                          {"split_heads_backward", 1, 0, 0},
                                          {"compress_forward", 4, 0, 0},
                                          {"compress_backward", 11, 0, 0},
                                          {"select_blocks", 1, 0, 0},
                                          {"combine_forward", 1, 196, 64},
                                          {"attention_backward_rows", 1, 671, 64},
                                          {"attention_forward", 1, 0, 0},
                                          {"attention_backward, compressed", 3, 0, 0},
                                          {"attention_backward", 2, 0, 0}};
struct OperationPrediction {
    double us = 0;
    int64_t launches = 0;
    std::string count;  // the figure that it comes from
};
// Attention's kernels, by tile: forward is the last pass that `count` names.
inline Prediction predict_attention_operation(const std::string& name, const NsaShape& s) {
    const bool backward = name.compare(0, 18, "attention_backward") == 0;
    if (name == "select_blocks") return predict_scores(s);
    if (name.find(", selected") == std::string::npos)
        return predict_branch(name.find(", compressed") == std::string::npos ? WIN : CMP, s, backward);
    const std::vector<uint32_t> masks = AttentionSet::selection(s, 1, 3, 4);
    const SelectedPrediction selected{s, masks};
    return selected.pass(backward, auto_may_gather(s.D, backward) && selected.gathers());
}
// The row of an operation that Timed names so; null: there is none.
inline const OperationCounts* counts_of_operation(const std::string& name) {
    const auto is = [&](const OperationCounts& c) {
        const size_t length = std::strlen(c.name);
        return name.compare(0, length, c.name) == 0 && (name.size() == length || std::strchr(", ", name[length]));
    };
    const OperationCounts* const found = std::find_if(std::begin(OPERATIONS), std::end(OPERATIONS), is);
    return found == std::end(OPERATIONS) ? nullptr : found;
}
// o: its calls in a step, and their arithmetic and bytes.
inline OperationPrediction predict_operation(const std::string& name, const OperationTime& o, const NsaShape& s) {
    const OperationCounts* const found = counts_of_operation(name);
    if (!found) return {};
    OperationPrediction p;
    p.launches = std::llround(found->launches * double(o.calls));
    const double launches_us = 1e6 * LAUNCH_SECONDS * double(p.launches);
    if (name == "select_blocks" || name.compare(0, 18, "attention_forward,") == 0 ||
        name.compare(0, 19, "attention_backward,") == 0) {
        const Prediction one = predict_attention_operation(name, s);
        p.us = 1e3 * one.overlapped * double(o.calls) + launches_us;
        p.count = format_text("%.3g mma, %s; %.0f us if nothing overlaps",
                              one.of_all_blocks.of[PRODUCTS] / double(generation_of(90).mma_cycles) * double(o.calls),
                              one.of_last.busiest(), 1e3 * one.in_turn * double(o.calls) + launches_us);
        return p;
    }
    const bool multiplies = name.compare(0, 8, "product ") == 0 || name.compare(0, 9, "compress_") == 0;
    const double instructions = found->bytes > 0 ? o.bytes / found->bytes * found->instructions / 32 : 0;
    const std::pair<double, std::string> bounds[] = {
        {multiplies ? o.flops / (H100_FLOPS * CUBLAS_SHARE) : 0, format_text("%.4g GFLOP", o.flops * 1e-9)},
        {o.bytes / H100_BYTES, format_text("%.4g MB", o.bytes * 1e-6)},
        {instructions / (4 * H100_MULTIPROCESSORS * H100_CLOCK), format_text("%.3g warp instructions", instructions)}};
    const auto& longest = *std::max_element(std::begin(bounds), std::end(bounds));
    p.us = 1e6 * longest.first + launches_us;
    p.count = longest.second;
    return p;
}
// A line for each operation: predicted and, where the times hold any, measured.
inline void print_step_prediction(const std::map<std::string, OperationTime>& times, const NsaShape& s,
                                  std::FILE* out) {
    if (s.D != 64 && s.D != 128) return;
    std::fprintf(out,
                 "\nPREDICTED for an H100 SXM, from counts alone: products at %.0f %% of %.1f TFLOP/s, %.2f TB/s of "
                 "memory, %.2f of L2, %.0f us a launch\n",
                 100 * CUBLAS_SHARE, H100_FLOPS * 1e-12, H100_BYTES * 1e-12, H100_L2_BYTES * 1e-12,
                 1e6 * LAUNCH_SECONDS);
    double us = 0, measured = 0;
    int64_t launches = 0;
    for (const auto& [name, o] : times) {
        const OperationPrediction p = predict_operation(name, o, s);
        us += p.us;
        launches += p.launches;
        measured += o.seconds * 1e6;
        std::fprintf(out, "predicted: %s | %.1f | us | %lld launches; %s%s\n", name.c_str(), p.us,
                     (long long)p.launches, p.count.c_str(),
                     o.seconds > 0 ? format_text("; measured %.1f us, %.2f times that", o.seconds * 1e6,
                                                 o.seconds * 1e6 / std::max(p.us, 1e-9))
                                         .c_str()
                                   : "");
    }
    std::fprintf(out, "predicted: all operations | %.0f | us | %lld launches; %.0f tokens/s%s\n", us,
                 (long long)launches, double(s.B) * s.T / us * 1e6,
                 measured > 0 ? format_text("; measured %.0f us", measured).c_str() : "");
}
// The operations of a training step, counted without one.
inline std::map<std::string, OperationTime> count_step(const Config& c) {
    Timed<Cuda> dev(0, size_t(1) << 20);
    dev.counts_only = true;
    Model<Timed<Cuda>> model(dev, c, true);
    Activations<Timed<Cuda>> a(dev, c, c.batch, c.seq_len, TRAINING);
    PerfStep<Cuda> step(model, a);
    step.run();
    return dev.times;
}
inline int run_step_prediction(std::FILE* out) {
    Config c;
    c.model = "125m";
    apply_preset(c, {});
    c.batch = 16;
    print_step_prediction(count_step(c), shape_of(c, c.batch, c.seq_len), out);
    return 0;
}
// --predict-attention, --predict-step; -1: something else is asked for.
inline int prediction_main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "--predict-step")) return run_step_prediction(stdout);
    if (argc < 2 || std::strcmp(argv[1], "--predict-attention")) return -1;
    std::vector<const char*> words(argv + 1, argv + argc);
    const std::unique_ptr<TrainedSelections> model = take_selections(words);
    return run_prediction(NAMED_SHAPES[0].first_length, NAMED_SHAPES[0].last_length, stdout, model.get());
}
#else
inline void print_step_prediction(const std::map<std::string, OperationTime>&, const NsaShape&, std::FILE*) {}
inline int prediction_main(int, char**) { return -1; }
#endif
