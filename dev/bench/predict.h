// predict.h: build/test_device --predict-attention, or build/cuda_tests: what attention should take on an H100 in the
// shape for which others have published times, branch by branch, from counts alone. It needs no GPU. Nothing here was
// ever measured; the first measurement says which count is wrong.
//
// Counted exactly, for the very selections that --perf-attention times: which tiles every thread block visits, and so
// its products (mma), its loads from shared memory, exponentials, instructions and the bytes it fetches from the L2
// cache. Instructions are those of the inner loops in sm_90's machine code (dev/loop_report.sh, CUDA 13.0, D = 128),
// masks included. Blocks go to the multiprocessor that has least to do, in the order of their numbers.
//
// A pass takes at least as long as the busiest of these, if all others hide behind it ("overlapped"), and at most as
// long as all of them one after the other, unless latency is exposed ("in turn"). Memory counts each array once.
#pragma once
#include <numeric>
#include <queue>

#include "attention.h"

#ifndef PRECISION_FP32

// NVIDIA's data sheet for the H100 SXM: 989.4 TFLOP/s dense in bf16, 132 multiprocessors, 3.35 TB/s. Its clock is the
// one at which 132 multiprocessors of 2048 multiply-adds a cycle reach the former. Shared memory (128 bytes),
// exponentials (16) and instructions (4) per cycle and multiprocessor: CUDA's programming guide for 9.0. L2: the 5120
// bytes a cycle of the A100's white paper, since none is given for the H100. GENERATIONS has mma.sync at 62 % of that
// peak.
constexpr double H100_FLOPS = 989.4e12, H100_BYTES = 3.35e12, H100_L2_BYTES_PER_CYCLE = 5120;
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

// One warp at one piece of 16 rows and 64 keys at D = 128 (scores: 16 compressed blocks, 16 tokens of one head), by the
// loops of the machine code; sums: bytes of fp32 sums that pass through shared memory.
struct PieceCounts {
    int mma, ldmatrix, exponentials, instructions, sums;
};
// clang-format off
constexpr PieceCounts FORWARD_PIECE        = {128,  64, 34,  732,     0},
                      DQ_PIECE             = {192,  96, 32,  728,     0},
                      DKDV_PIECE           = {256, 160, 32,  892,     0},
                      GATHER_FORWARD_PIECE = {128,  72, 34,  926, 16384},
                      GATHER_DQ_PIECE      = {192, 112, 32, 1066, 16384},
                      SCORE_PIECE          = { 16,   8,  8,   89,     0};
// clang-format on
// `pieces` of them and `fetched` bytes that come from the L2 cache into shared memory.
inline Cycles cycles_of(const PieceCounts& p, double pieces, double fetched) {
    Cycles c;
    c.of[PRODUCTS] = pieces * p.mma * double(generation_of(90).mma_cycles);
    c.of[SHARED_MEMORY] = (pieces * (p.ldmatrix * 512.0 + p.sums) + fetched) / 128;
    c.of[EXPONENTIALS] = pieces * p.exponentials * 32 / 16;
    c.of[INSTRUCTIONS] = pieces * p.instructions / 4;
    c.of[L2] = fetched * H100_MULTIPROCESSORS / H100_L2_BYTES_PER_CYCLE;
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

constexpr int PREDICTED_D = 128;
constexpr double TILE_BYTES = KEY_TILE * PREDICTED_D * 2.0;

// Forward and dQ of a branch without a selection: tiles of queries, the last first, as query_tile() has them.
inline void predict_query_tiles(PredictedKernel& kernel, const PieceCounts& piece, Branch branch, const NsaShape& s) {
    const AttentionShape a = attention_shape(branch, s, 0, QUERY_ROWS);
    const double pieces = (a.heads * a.tile_tokens + 15) / 16;
    for (int tile = a.tiles - 1; tile >= 0; tile--) {
        const int first = tile * a.tile_tokens, last = std::min(first + a.tile_tokens, s.T) - 1;
        const int keys = branch == CMP ? s.cmp_blocks(last + 1) : last + 1;
        const int begin = branch == WIN ? std::max(0, first + 1 - a.window) / KEY_TILE : 0;
        const double visits = (keys + KEY_TILE - 1) / KEY_TILE - begin;
        for (int bg = 0; bg < a.batch_groups; bg++) kernel.block(piece, visits * pieces, visits * 2 * TILE_BYTES);
    }
}
// dK and dV: tiles of keys, each of which meets tiles of tokens once for every head; four warps of 16 keys, each of
// which leaves out what none of its keys is seen by.
inline void predict_key_tiles(PredictedKernel& kernel, Branch branch, const NsaShape& s) {
    const AttentionShape a = attention_shape(branch, s, 0, QUERY_ROWS);
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
                for (int low = key; low < key + KEY_TILE; low += 16)
                    pieces += seen_from(low) < t0 + KEY_TILE && (branch != WIN || t0 < low + 15 + a.window);
            for (int bg = 0; bg < a.batch_groups; bg++)
                kernel.block(DKDV_PIECE, pieces * a.heads, (tiles * a.heads + 1) * 2 * TILE_BYTES);
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
            kernel.block(SCORE_PIECE, visits * 4 * a.heads, visits * TILE_BYTES);
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
    void predict_tiles(PredictedKernel& kernel, const PieceCounts& piece, const AttentionShape& a,
                       bool gathered) const {
        const double rows = (a.heads * a.tile_tokens + 15) / 16;
        for (int tile = a.tiles - 1; tile >= 0; tile--)
            for (int bg = 0; bg < a.batch_groups; bg++) {
                const Visits v = visits(a, bg, tile);
                kernel.block(piece, gathered ? v.pieces : v.tiles * rows, v.tiles * 2 * TILE_BYTES);
            }
    }
    void predict_dkdv(PredictedKernel& kernel, bool gathered) const {
        const AttentionShape a = attention_shape(SLC, s, 0, QUERY_ROWS);
        const size_t tiles = size_t(key_tiles(a));
        std::vector<double> visits(tiles * size_t(a.batch_groups));  // of tiles of 64 tokens, or tokens
        for (int bg = 0; bg < a.batch_groups; bg++)
            for (int first = 0; first < s.T; first += KEY_TILE)
                for_blocks(bg, first, std::min(KEY_TILE, s.T - first), [&](int block, int choosers) {
                    visits[size_t(block) * size_t(a.batch_groups) + size_t(bg)] += gathered ? choosers : 1;
                });
        auto block = [&](double token_tiles) {
            kernel.block(DKDV_PIECE, 4 * token_tiles * a.heads, (token_tiles * a.heads + 1) * 2 * TILE_BYTES);
        };
        for (double& count : visits)  // chunks beyond the first come first
            for (; gathered && count > GATHER_CHUNK; count -= GATHER_CHUNK) block(GATHER_CHUNK / KEY_TILE);
        for (const double count : visits) block(gathered ? std::ceil(count / KEY_TILE) : count);
    }
    // By the rule of choose_selected_kernel.
    bool gathers() const {
        if (s.slc_blocks() <= 2 * s.slc_count) return false;
        const AttentionShape a = gather_shape<PREDICTED_D>(s, false, H100_SHARED_BYTES);
        double pieces = 0, masked = 0;
        for (int tile = 0; tile < a.tiles; tile++)
            for (int bg = 0; bg < a.batch_groups; bg++) {
                const Visits v = visits(a, bg, tile);
                const int tokens = std::min(a.tile_tokens, s.T - tile * a.tile_tokens);
                pieces += v.pieces, masked += v.tiles * ((tokens * a.heads + 15) / 16);
            }
        return double(gathered_piece_cost<PREDICTED_D>(generation_of(90).mma_cycles)) * pieces < masked;
    }
    Prediction pass(bool backward, bool gathered) const {
        const AttentionShape a = gathered ? gather_shape<PREDICTED_D>(s, backward, H100_SHARED_BYTES)
                                          : attention_shape(SLC, s, 0, QUERY_ROWS);
        PredictedKernel of_queries, of_keys;
        Prediction p;
        predict_tiles(
            of_queries,
            gathered ? (backward ? GATHER_DQ_PIECE : GATHER_FORWARD_PIECE) : (backward ? DQ_PIECE : FORWARD_PIECE), a,
            gathered);
        p.add(of_queries, attention_forward_work(SLC, s, 2).bytes);
        if (backward) predict_dkdv(of_keys, gathered), p.add(of_keys, attention_backward_work(SLC, s, 2).bytes);
        return p;
    }
};

inline Prediction predict_branch(Branch branch, const NsaShape& s, bool backward) {
    PredictedKernel of_queries, of_keys;
    Prediction p;
    predict_query_tiles(of_queries, backward ? DQ_PIECE : FORWARD_PIECE, branch, s);
    p.add(of_queries, attention_forward_work(branch, s, 2).bytes);
    if (backward) predict_key_tiles(of_keys, branch, s), p.add(of_keys, attention_backward_work(branch, s, 2).bytes);
    return p;
}
// phi of keys and values, split heads, the gated sum: at the data sheet's rates.
inline Prediction predict_rest(const NsaShape& s, bool backward) {
    const Work phi = backward ? compress_backward_work(s, 2) : compress_forward_work(s, 2);
    Prediction p;
    if (!s.full) p.add_floor({2 * phi.flops, 2 * phi.bytes});
    p.add_floor(backward ? split_heads_backward_work(s, 2) : split_heads_forward_work(s, 2));
    p.add_floor(backward ? attention_backward_rows_work(s, 2) : combine_forward_work(s, 2));
    return p;
}

// One length: prints a line for every branch and pass, with others' times beside it.
inline void print_predicted_length(const NsaShape& s, std::FILE* out) {
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
    for (const bool shared : {true, false}) {
        const std::vector<uint32_t> masks = AttentionSet::selection(s, 1, shared ? 3 : 0, shared ? 4 : 1);
        const SelectedPrediction selected{s, masks};
        const bool gathered = selected.gathers();
        const Prediction p[2] = {selected.pass(false, gathered), selected.pass(true, gathered)};
        const char* const kind = shared ? "shared" : "scattered";
        print(format_text("selected, %s, %s", kind, gathered ? "gathered" : "tiles"), SELECTED_ALONE, p);
        Prediction whole[2] = {p[0], p[1]};
        for (const int pass : {0, 1})
            whole[pass].add(scored[pass]), whole[pass].add(win[size_t(pass)]), whole[pass].add(rest[size_t(pass)]);
        print(format_text("NSA, all of it, %s", kind), WHOLE_NSA, whole);
    }
    print("dense", DENSE_3, {dense[0], dense[1]});
    std::fflush(out);
}
inline int run_prediction(int first_length, int last_length, std::FILE* out) {
    Config c;
    c.model = "125m";
    apply_preset(c, {});
    apply_named_shape(c, NAMED_SHAPES[0], {});
    const NsaShape shape = shape_of(c, 1, last_length);
    std::fprintf(
        out,
        "PREDICTED, NEVER MEASURED: milliseconds of one layer on an H100 SXM, one sequence, %d heads in %d "
        "groups of dimension %d\n"
        "assumed: %d multiprocessors at %.2f GHz; mma.sync at 62 %% of %.1f TFLOP/s; %.2f TB/s of memory, %.1f "
        "of L2; 128 bytes of shared memory, 16 exponentials, 4 instructions a cycle; dev/bench/predict.h says "
        "why\n"
        "overlapped: the busiest of these hides all others; in turn: none hides another; latency is not "
        "counted\n\n%7s %-34s %-9s %11s %9s  %-14s %s\n",
        shape.H, shape.G, shape.D, H100_MULTIPROCESSORS, H100_CLOCK * 1e-9, H100_FLOPS * 1e-12, H100_BYTES * 1e-12,
        H100_L2_BYTES_PER_CYCLE * H100_CLOCK * 1e-12, "T", "what", "pass", "overlapped", "in turn", "busiest",
        "published");
    for (int T = first_length; T <= last_length; T *= 2) print_predicted_length(shape_of(c, 1, T), out);
    return 0;
}
// --predict-attention; -1: something else is asked for.
inline int prediction_main(int argc, char** argv) {
    if (argc < 2 || std::strcmp(argv[1], "--predict-attention")) return -1;
    return run_prediction(NAMED_SHAPES[0].first_length, NAMED_SHAPES[0].last_length, stdout);
}
#else
inline int prediction_main(int, char**) { return -1; }
#endif
