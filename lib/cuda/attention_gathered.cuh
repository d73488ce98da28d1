// attention_gathered.cuh: the selected branch by gathered rows, which nsa_kernels.cuh launches instead of masked tiles
// where it costs less. It is in a file of its own because it is an optimisation for long sequences only: it computes
// what the masked tiles of nsa_kernels.cuh compute, and somebody who reads or ports the model can leave it out.
//
// In a long sequence the tokens of a tile choose many blocks together and each block is chosen by few of them. Masked
// tiles visit every block that one token of a tile chose, and mask the other tokens; here each block is visited only by
// the rows that chose it. Nothing is sorted: a 32 x 32 transposition of bits turns "which blocks did this token choose"
// into "which tokens chose this block", and the set bits, from the lowest on, are the list of tokens.
//
// A unit is the smallest thing that such a list belongs to: a selection block, or the several that share a tile of
// keys.
#pragma once
#include <cassert>
#include <cfloat>
#include <string>

#ifndef PRECISION_FP32
#include "../base/random.h"  // HOST_DEVICE
#include "attention_tiles.cuh"
#endif
#include "../model/shape.h"
#include "attention_kernels.h"
#include "runtime.cuh"

// Forward, AUTO does not gather for heads of 128: at 2048 to 65536 tokens an H200 took 1.2 to 2.0 times as long with
// gathered rows, whatever neighbours had in common.
constexpr bool auto_may_gather(int D, bool backward) { return backward || D <= 64; }

// AUTO's decision for the forward pass (heads of up to 64) and dQ, and its reasons, in GPU memory. Both sets of kernels
// are launched; those that were not chosen return at once. dK and dV are left to gathered rows where AUTO is open: on
// an H100 they took 0.94 of the time of masked tiles at 2048 tokens and 0.17 at 16384.
struct SelectedChoice {
    int gather;         // 1: gathered rows, 0: masked tiles
    float tile_tokens;  // of the tiles that were examined
    float tile_blocks;  // tiles of 64 keys that a tile of tokens visits, on average
    float cost;         // of gathered rows, relative to masked tiles
};

// In words, for the log.
inline std::string describe(const SelectedChoice& c, const NsaShape& s, bool on_warpgroups = false) {
    const std::string tiles = ATTENTION_KERNELS[on_warpgroups ? WARPGROUPS_KERNEL : TENSOR_CORES_KERNEL].words;
    return format_text(
        "selected branch by %s%s, dK and dV by gathered rows: %.0f tokens visit %.1f of %d tiles of keys together; "
        "gathering their rows has an estimated cost of %.2f of that of masked tiles",
        auto_may_gather(s.D, false) ? "" : tiles + ", dQ by ",
        c.gather ? ATTENTION_KERNELS[GATHERED_ROWS_KERNEL].words : tiles, double(c.tile_tokens), double(c.tile_blocks),
        (s.first + s.queries + 64 - 1) / 64, double(c.cost));
}

#ifndef PRECISION_FP32

// ---------------------------------------------------------------------------------------------------------------------
// Which tokens chose a block.

constexpr int GATHER_WARPS = 6;     // of a block that owns a tile of queries
constexpr int GATHER_TOKENS = 32;   // of a tile of queries at most: one bit each
constexpr int GATHER_CHUNK = 2048;  // tokens of a tile of keys that one thread block handles; longer lists are split
// Rows of a tile of queries: two tiles fit into the shared memory of an sm_90 multiprocessor (D = 128, and sm_80: one).
template <int D>
HOST_DEVICE constexpr int gather_rows(bool backward) {
    return (backward ? 96 : 192) / (D > 64 ? 2 : 1);
}

// The unit of a tile of keys.
HOST_DEVICE inline int unit_of_tile(int tile, const AttentionShape& s) { return s.by_slc_tiles.of(tile); }
HOST_DEVICE inline int units(int keys, const AttentionShape& s) {
    return (keys + KEY_TILE * s.slc_tiles - 1) / (KEY_TILE * s.slc_tiles);
}
HOST_DEVICE inline int units_per_word(const AttentionShape& s) {
    return 32 * s.slc_block / (KEY_TILE < s.slc_block ? s.slc_block : KEY_TILE);
}

// Each lane passes one word of a token's selection; lane i gets the bitmask of the lanes whose token chose a block of
// the word's i-th unit.
__device__ inline uint32_t transpose_choices(uint32_t word, const AttentionShape& s) {
    const int blocks = 32 / units_per_word(s);
    uint32_t tokens = 0;
    for (int unit = 0; unit < units_per_word(s); unit++) {
        const unsigned choosers = __ballot_sync(~0u, (word >> (unit * blocks) & ((1u << blocks) - 1)) != 0);
        if (int(threadIdx.x % 32) == unit) tokens = choosers;
    }
    return tokens;
}
// The place of the n-th set bit of `bits`, counting from 0 at the lowest; more than n bits must be set.
__device__ inline int nth_bit(unsigned bits, int n) {
    int place = 0;
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        const int below = __popc(bits & ((1u << half) - 1));
        if (n >= below) {
            n -= below;
            bits >>= half;
            place += half;
        }
    }
    return place;
}
// The sum over the lanes up to this one.
__device__ inline int sum_up_to_lane(int x) {
    for (int delta = 1; delta < 32; delta *= 2) {
        const int other = __shfl_up_sync(~0u, x, unsigned(delta));
        if (int(threadIdx.x % 32) >= delta) x += other;
    }
    return x;
}

// choosers [units] = which of the tile's tokens chose the unit; used = bitmask over tiles of keys: whether one did.
// selected: the bitmasks of the tile's tokens. Called by all threads of the block; a barrier must follow.
__device__ inline void find_choosers(uint32_t* choosers, uint32_t* used, const uint32_t* selected, int tokens,
                                     int key_tiles, const AttentionShape& s) {
    const int lane = threadIdx.x % 32, per_word = units_per_word(s), count = units(key_tiles * KEY_TILE, s);
    for (int word = threadIdx.x / 32; word * per_word < count; word += blockDim.x / 32) {
        const uint32_t mine = transpose_choices(lane < tokens ? selected[lane * s.words + word] : 0, s);
        if (lane < per_word && word * per_word + lane < count) choosers[word * per_word + lane] = mine;
    }
    __syncthreads();
    for (int word = threadIdx.x / 32; word * 32 < key_tiles; word += blockDim.x / 32) {
        const int tile = word * 32 + lane;
        const unsigned bits = __ballot_sync(~0u, tile < key_tiles && choosers[unit_of_tile(tile, s)] != 0);
        if (lane == 0) used[word] = bits;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and dQ. A block owns a tile of tokens; its queries and sums are in shared memory, row token * heads + head.
// For each tile of keys that some token chose, the warps take turns at 16 of the rows that see it.

// Up to 16 rows of a tile of queries, from index `first` of the list of those whose tokens chose the tile of keys, in
// the order of tokens, then heads. Where fewer remain, the last one is repeated and its results are dropped.
struct GatheredRows {
    int source;            // the row whose part of the A fragments this lane loads
    int row[2], token[2];  // this lane's rows of the products, lane / 4 and that + 8; row -1: a repeated one
};
__device__ inline GatheredRows gather(uint32_t choosers, int first, int items, const AttentionShape& s) {
    const int lane = threadIdx.x % 32;
    const int item = min(first + lane % 16, items - 1);
    const int number = s.by_heads.of(item);
    const int token = nth_bit(choosers, number);
    const int source = token * s.heads + item - number * s.heads;
    const int place = first + lane % 16 < items ? source << 8 | token : -1;
    GatheredRows rows;
    rows.source = source;
    const int low = __shfl_sync(~0u, place, lane / 4);
    const int high = __shfl_sync(~0u, place, lane / 4 + 8);
    rows.row[0] = low >> 8;
    rows.token[0] = low & 255;
    rows.row[1] = high >> 8;
    rows.token[1] = high & 255;
    return rows;
}
// a = the A fragments of the gathered rows of a tile: ldmatrix takes an address from each lane, so scattered rows cost
// what a run of rows does.
template <int D>
__device__ inline void load_gathered(unsigned (&a)[D / 16][4], const bf16* tile, const GatheredRows& rows) {
    const int at = chunk_at<D>(rows.source, threadIdx.x % 32 / 16);
#pragma unroll
    for (int x = 0; x < D; x += 16) ldmatrix_x4(a[x / 16], tile + (at ^ x));
}
// Sums in shared memory, [rows, D] in fp32. A product leaves in lane 4 g + t, of row g, the columns 8 x + 2 t and the
// next; those of x = 2 i and 2 i + 1 are stored together, 16 bytes, at place 4 i + t of the row, in odd rows at the
// place with bit 2 flipped, so that neighbouring rows use different banks.
template <int D>
__device__ inline float4* sums_at(float* sums, int row, int i, int t) {
    return reinterpret_cast<float4*>(sums + row * D) + ((i * 4 + t) ^ (D > 16 ? (row & 1) << 2 : 0));
}
// c += p b over the 64 keys of a tile for the gathered rows, whose sums c are in shared memory and are first multiplied
// by `rescale`.
template <int D>
__device__ inline void add_to_sums(float* sums, const GatheredRows& rows, const float (&rescale)[2],
                                   const float (&p)[1][KEY_TILE / 8][4], const bf16* b_tile) {
    const int t = threadIdx.x % 4;
    float c[1][D / 8][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int x = 0; x < D / 8; x += 2) {
            const float4 four = rows.row[i] < 0 ? make_float4(0, 0, 0, 0) : *sums_at<D>(sums, rows.row[i], x / 2, t);
            c[0][x][2 * i] = four.x * rescale[i];
            c[0][x][2 * i + 1] = four.y * rescale[i];
            c[0][x + 1][2 * i] = four.z * rescale[i];
            c[0][x + 1][2 * i + 1] = four.w * rescale[i];
        }
    multiply_add<D, 1, KEY_TILE / 16>(c, p, b_tile, 0);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int x = 0; x < D / 8; x += 2)
            if (rows.row[i] >= 0)
                *sums_at<D>(sums, rows.row[i], x / 2, t) =
                    make_float4(c[0][x][2 * i], c[0][x][2 * i + 1], c[0][x + 1][2 * i], c[0][x + 1][2 * i + 1]);
}

// BACKWARD: dQ, which needs the rows of dout too.
template <int D, bool BACKWARD>
struct GatherBlock {
    QueryTile tile;
    int rows, end_tile;         // rows of the tile that exist; where the tiles of keys end
    const uint32_t* selection;  // of the tile's tokens
    KeyBuffers<D, BACKWARD> keys;
    bf16 *q_tile, *dout_tile;
    float* sums;
    float2* statistics;  // two numbers per row, set by the kernel
    uint32_t *choosers, *used;

    // dout: not read in the forward pass
    __device__ GatherBlock(const bf16* q, const bf16* dout, const bf16* k, const bf16* v,
                           const uint32_t* all_selections, const AttentionShape& s) {
        DynamicShared shared;
        tile = query_tile(s);
        rows = tile.tokens * s.heads;
        end_tile = end_of_key_tiles<SLC>(tile, s);
        keys.k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
        keys.v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
        keys.k = k;
        keys.v = v;
        keys.group_row = tile.bg * s.key_stride;
        const int tile_rows = s.tile_tokens * s.heads;
        q_tile = shared.take<bf16>(tile_rows * D);
        dout_tile = nullptr;
        if constexpr (BACKWARD) dout_tile = shared.take<bf16>(tile_rows * D);
        sums = shared.take<float>(tile_rows * D);
        statistics = shared.take<float2>(tile_rows);
        choosers = shared.take<uint32_t>(units(s.key_stride, s));
        used = shared.take<uint32_t>(tile_words(s.key_stride));

        copy_queries<D>(q_tile, q + q_offset<D>(tile, s), size_t(s.queries) * D, D, rows, tile, s);
        if constexpr (BACKWARD)
            copy_queries<D>(dout_tile, dout + dout_offset<D>(tile, s), D, size_t(s.H) * D, rows, tile, s);
        cp_async_commit();
        selection = all_selections + (size_t(tile.bg) * s.queries + tile.j0) * s.words;
        find_choosers(choosers, used, selection, tile.tokens, end_tile, s);
        for (int i = threadIdx.x; i < rows * D; i += blockDim.x) sums[i] = 0;
    }
    // Row of [B, H, queries] for a row of the tile
    __device__ size_t place_of(int row, const AttentionShape& s) const {
        return size_t(row_of_query(tile, row % s.heads, row / s.heads, s));
    }
    // Calls visit(rows, key_tile, k_tile, v_tile) for the rows that see something of a tile of keys, 16 at a time.
    // Begins and ends with a barrier.
    template <class Visit>
    __device__ void walk(const AttentionShape& s, Visit visit) const {
        const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
        __syncthreads();
        const int first_tile = next_tile<SLC>(used, 0, end_tile);
        if (first_tile < end_tile) keys.copy(0, first_tile, s);
        for_key_tiles<SLC>(keys, used, first_tile, end_tile, s,
                           [&](int key_tile, const bf16* k_tile, const bf16* v_tile) {
                               const uint32_t tokens = choosers[unit_of_tile(key_tile, s)];
                               const int items = __popc(tokens) * s.heads;
                               for (int first = warp * 16; first < items; first += warps * 16)
                                   visit(gather(tokens, first, items, s), key_tile, k_tile, v_tile);
                           });
        cp_async_wait<0>();  // for the queries, in case there was no tile of keys
        __syncthreads();
    }
    // The scores p of the keys that a row does not see become -infinity; the exponential turns that into 0.
    __device__ void hide_keys(float (&p)[1][KEY_TILE / 8][4], const GatheredRows& r, int key_tile,
                              const AttentionShape& s) const {
        const bool shared_tile = blocks_per_tile(s) > 1;
        if (!shared_tile && key_tile * KEY_TILE + KEY_TILE - 1 <= s.first + tile.j0) return;
        const TileBlocks blocks = tile_blocks(key_tile, s);
        int end[2];  // the row sees the first `end` keys of the selection blocks in `chosen`
        unsigned chosen[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            end[i] = s.first + tile.j0 + r.token[i] + 1 - key_tile * KEY_TILE;
            chosen[i] = shared_tile && r.row[i] >= 0 ? chosen_blocks(selection, r.token[i], blocks, s) : 1;
        }
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool is_chosen = chosen[i] >> (n * 8 >> s.slc_shift) & 1;
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (!is_chosen || n * 8 + int(threadIdx.x) % 4 * 2 + e >= end[i]) p[0][n][2 * i + e] = -INFINITY;
            }
    }
    // Calls put(row, column, four) for all sums: `four` are those of column, column + 1, column + 8 and column + 9.
    template <class Put>
    __device__ void for_sums(Put put) const {
        for (int i = threadIdx.x; i < rows * (D / 4); i += blockDim.x) {
            const int row = i / (D / 4);
            const int pair = i % (D / 4) / 4;
            const int t = i % 4;
            put(row, pair * 16 + t * 2, *sums_at<D>(sums, row, pair, t));
        }
    }
};

// One step of the online softmax over the scores p of 64 keys, as online_softmax(), but with the shift (the
// largest score in base 2) and the sum of the exponentials in shared memory. p become the exponentials, rescale the
// factors of the earlier sums.
__device__ inline void gathered_softmax(float (&p)[1][KEY_TILE / 8][4], float (&rescale)[2], float2* softmax,
                                        const GatheredRows& r, float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // The first of the four lanes that share a row keeps its statistics.
        const bool keeper = lane % 4 == 0 && r.row[i] >= 0;
        const float2 before = keeper ? softmax[r.row[i]] : make_float2(-FLT_MAX, 0);
        const float largest = __shfl_sync(~0u, before.x, lane & ~3);
        float most = -INFINITY;
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++) most = fmaxf(most, fmaxf(p[0][n][2 * i], p[0][n][2 * i + 1]));
        const float shift = fmaxf(largest, row_max(most) * (scale * LOG2_E));  // always finite
        rescale[i] = exp2_approx(largest - shift);
        float total = before.y * rescale[i];
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int e = 2 * i; e < 2 * i + 2; e++) {
                p[0][n][e] = exp2_approx(fmaf(p[0][n][e], scale * LOG2_E, -shift));
                total += p[0][n][e];
            }
        total = row_sum(total);
        if (keeper) softmax[r.row[i]] = make_float2(shift, total);
    }
}
// As attend<SLC>. Its budget, in the same units; sums are what fp32 sums cost in shared memory beside
// ldmatrix:
//     mma 102 / 205, ldmatrix and sums 208 / 416, exponentials 68 / 68, instructions 167 / 232
template <int D>
__global__ void __launch_bounds__(GATHER_WARPS * 32, D > 64 ? 1 : 2)
    gather_forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const uint32_t* selection,
                          const SelectedChoice* choice, AttentionShape s) {
    wait_for_earlier_kernels();
    if (choice && !choice->gather) return;
    const GatherBlock<D, false> block(q, nullptr, k, v, selection, s);
    for (int i = threadIdx.x; i < block.rows; i += blockDim.x) block.statistics[i] = make_float2(-FLT_MAX, 0);
    block.walk(s, [&](const GatheredRows& r, int key_tile, const bf16* k_tile, const bf16* v_tile) {
        float p[1][KEY_TILE / 8][4] = {}, rescale[2];
        {
            unsigned q_rows[1][D / 16][4];
            load_gathered<D>(q_rows[0], block.q_tile, r);
            multiply_rows<D, 1, KEY_TILE / 16>(p, q_rows, k_tile, 0);
        }
        block.hide_keys(p, r, key_tile, s);
        gathered_softmax(p, rescale, block.statistics, r, s.scale);
        add_to_sums<D>(block.sums, r, rescale, p, v_tile);
    });
    block.for_sums([&](int row, int column, const float4& four) {
        const float2 softmax = block.statistics[row];
        const float inverse = softmax.y > 0 ? 1 / softmax.y : 0;
        const size_t to = block.place_of(row, s);
        __nv_bfloat162* const columns = reinterpret_cast<__nv_bfloat162*>(out + to * D + column);
        columns[0] = __floats2bfloat162_rn(four.x * inverse, four.y * inverse);
        columns[4] = __floats2bfloat162_rn(four.z * inverse, four.w * inverse);
        if (column == 0) lse[to] = softmax.y > 0 ? softmax.x / LOG2_E + logf(softmax.y) : INFINITY;
    });
}

// dq [B, H, queries, D] = dS k of the selected branch, without the scale, as add_branch<SLC>.
//     mma 154 / 307, ldmatrix and sums 288 / 576, exponentials 64 / 64, instructions 182 / 267
template <int D>
__global__ void __launch_bounds__(GATHER_WARPS * 32, D > 64 ? 1 : 2)
    gather_dq_kernel(float* dq, LayerGradients<bf16, float> d, LayerInputs<bf16, float> in,
                     const SelectedChoice* choice, AttentionShape s) {
    wait_for_earlier_kernels();
    if (choice && !choice->gather) return;
    const GatherBlock<D, true> block(in.q, in.dout, in.k[SLC], in.v[SLC], in.selection, s);
    cp_async_wait<0>();
    __syncthreads();  // the rows have arrived
    for (int first = threadIdx.x / 32 * 8; first < block.rows; first += int(blockDim.x) / 4) {
        const int row = first + int(threadIdx.x) % 32 / 4;
        const bool exists = row < block.rows;
        const size_t rows_before = size_t(SLC) * s.batch_groups * s.heads * s.queries;
        const float2 of_row =
            make_row_terms<D>(d, in, rows_before + block.place_of(row, s), exists, block.dout_tile, row);
        if (exists && threadIdx.x % 4 == 0) block.statistics[row] = of_row;
    }
    block.walk(s, [&](const GatheredRows& r, int key_tile, const bf16* k_tile, const bf16* v_tile) {
        float2 of_row[2];
#pragma unroll
        for (int i = 0; i < 2; i++) of_row[i] = r.row[i] < 0 ? make_float2(-INFINITY, 0) : block.statistics[r.row[i]];
        float p[1][KEY_TILE / 8][4] = {}, ds[1][KEY_TILE / 8][4] = {};
        {
            unsigned a[1][D / 16][4];
            load_gathered<D>(a[0], block.q_tile, r);
            multiply_rows<D, 1, KEY_TILE / 16>(p, a, k_tile, 0);
            load_gathered<D>(a[0], block.dout_tile, r);
            multiply_rows<D, 1, KEY_TILE / 16>(ds, a, v_tile, 0);
        }
        block.hide_keys(p, r, key_tile, s);
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[0][n][e] =
                    exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, of_row[e / 2].x)) * (ds[0][n][e] - of_row[e / 2].y);
        const float keep[2] = {1, 1};
        add_to_sums<D>(block.sums, r, keep, ds, k_tile);
    });
    block.for_sums([&](int row, int column, const float4& four) {
        float2* const columns = reinterpret_cast<float2*>(dq + block.place_of(row, s) * D + column);
        columns[0] = make_float2(four.x, four.y);
        columns[4] = make_float2(four.z, four.w);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// dK and dV. First, for all keys, the lists of tokens; lists that are too long for one thread block are cut into
// chunks.

// All arrays are in the workspace of backward_on_tensor_cores.
struct GatherPlan {
    uint32_t* choosers;  // [B*G, units, token_words]: which tokens chose the unit
    int* counts;         // [B*G, units]: how many did
    int* extra;          // [B*G, tiles + 1]: the chunks beyond the first of all tiles of keys before this one
    float* partial;      // [B*G, 2 * max_extra, 2, KEY_TILE, D]: sums of the chunks of lists that are split
    int tiles, units, token_words;
    int max_extra;  // extra chunks of one (sequence, group) at most
    // Where the sums of a tile's chunk are stored. A tile with e > 0 extra chunks stores e + 1 sums; 2 e places are
    // reserved for it.
    __device__ size_t place_of_sums(int bg, int tile, int chunk) const {
        return size_t(bg) * 2 * max_extra + 2 * extra[size_t(bg) * (tiles + 1) + tile] + chunk;
    }
    // Which chunk of its tile a thread block has; its number is `item` among those of the (sequence, group).
    __device__ int chunk_of_item(int bg, int tile, int item) const {
        return item < max_extra ? item - extra[size_t(bg) * (tiles + 1) + tile] + 1 : 0;
    }
    __device__ int chunks(int bg, int tile) const {
        const int* e = extra + size_t(bg) * (tiles + 1) + tile;
        return e[1] - e[0] + 1;
    }
};

// choosers [B*G, units, token_words]; a warp transposes one word of 32 tokens' selections
__global__ void __launch_bounds__(128)
    transpose_selection_kernel(GatherPlan plan, const uint32_t* selection, AttentionShape s) {
    wait_for_earlier_kernels();
    const int lane = threadIdx.x % 32;
    const int token_word = int(blockIdx.x) % plan.token_words;
    const int bg = int(blockIdx.x) / plan.token_words;
    const int j = token_word * 32 + lane, per_word = units_per_word(s);
    for (int word = threadIdx.x / 32; word * per_word < plan.units; word += 4) {
        const uint32_t mine =
            transpose_choices(j < s.queries ? selection[(size_t(bg) * s.queries + j) * s.words + word] : 0, s);
        const int unit = word * per_word + lane;
        if (lane < per_word && unit < plan.units)
            plan.choosers[(size_t(bg) * plan.units + unit) * plan.token_words + token_word] = mine;
    }
}
// counts [B*G, units]; one warp each
__global__ void __launch_bounds__(128) count_choosers_kernel(GatherPlan plan, int all_units) {
    wait_for_earlier_kernels();
    const int unit = int(blockIdx.x) * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (unit >= all_units) return;  // a whole warp
    int count = 0;
    for (int word = lane; word < plan.token_words; word += 32)
        count += __popc(plan.choosers[size_t(unit) * plan.token_words + word]);
    count = lane_sum(count);
    if (lane == 0) plan.counts[unit] = count;
}
// extra [B*G, tiles + 1]; one warp for each (sequence, group)
__global__ void __launch_bounds__(32) plan_chunks_kernel(GatherPlan plan, AttentionShape s) {
    wait_for_earlier_kernels();
    const int lane = threadIdx.x, bg = blockIdx.x;
    int* extra = plan.extra + size_t(bg) * (plan.tiles + 1);
    int before = 0;
    for (int first = 0; first < plan.tiles; first += 32) {
        const int tile = first + lane;
        const int count = tile < plan.tiles ? plan.counts[size_t(bg) * plan.units + unit_of_tile(tile, s)] : 0;
        const int own = count ? (count - 1) / GATHER_CHUNK : 0, sum = sum_up_to_lane(own);
        if (tile < plan.tiles) extra[tile] = before + sum - own;
        before += __shfl_sync(~0u, sum, 31);
    }
    assert(before <= plan.max_extra);  // else some query has chosen more blocks than slc_count allows
    if (lane == 0) extra[plan.tiles] = before;
}

// list = the places of the set bits of row [words], numbers first .. first + GATHER_CHUNK - 1 of them in ascending
// order, then -1 up to a multiple of 64. Returns how many there are. Called by all threads of the block; counts: a
// number for each warp. Begins and ends with a barrier.
__device__ inline int list_tokens(int* list, int* counts, const uint32_t* row, int words, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int before = 0;  // set bits in the words of earlier rounds
    for (int first_word = 0; first_word < words && before < first + GATHER_CHUNK; first_word += int(blockDim.x)) {
        const int word = first_word + int(threadIdx.x);
        uint32_t bits = word < words ? row[word] : 0;
        int number = sum_up_to_lane(__popc(bits));
        __syncthreads();  // the last round's counts have been read
        if (lane == 31) counts[warp] = number;
        __syncthreads();
        number += before - __popc(bits);  // the number of set bits before this lane's word
        for (int w = 0; w < warps; w++) {
            if (w < warp) number += counts[w];
            before += counts[w];
        }
        for (; bits; bits &= bits - 1) {
            if (number >= first && number < first + GATHER_CHUNK)
                list[number - first] = word * 32 + __ffs(int(bits)) - 1;
            number++;
        }
    }
    const int found = max(0, min(before - first, GATHER_CHUNK));
    for (int i = found + int(threadIdx.x); i < (found + KEY_TILE - 1) / KEY_TILE * KEY_TILE; i += int(blockDim.x))
        list[i] = -1;
    __syncthreads();
    return found;
}
// The tile of keys of the item-th thread block of a (sequence, group): the first max_extra take the extra chunks, the
// others the first chunk of each tile. -1: there is no such extra chunk.
__device__ inline int tile_of_item(const GatherPlan& plan, const int* extra, int item) {
    if (item >= plan.max_extra) return item - plan.max_extra;
    if (item >= extra[plan.tiles]) return -1;
    int low = 0, high = plan.tiles;  // the last tile with extra[tile] <= item
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (extra[middle] <= item) low = middle;
        else high = middle;
    }
    return low;
}

// As attention_dkdv_kernel<SLC>, but the tiles of 64 tokens are gathered: they hold only tokens that chose a block of
// the tile of keys. A list of more than GATHER_CHUNK tokens (block 0 is chosen by all) is split into chunks, whose sums
// go to plan.partial. The first max_extra * B*G thread blocks take the chunks beyond the first.
template <int D, Multiplier by>
__device__ inline void compute_gathered_dkdv(const BackwardArrays<bf16, float>& d, const InputArrays<bf16>& in,
                                             const GatherPlan& plan, const AttentionShape& s) {
    constexpr int THREADS = dkdv_threads<D, KEY_TILE, by>(), COLUMNS = tile_columns<D, by>();
    const int bg = int(blockIdx.x) % s.batch_groups, item = int(blockIdx.x) / s.batch_groups;
    const int* extra = plan.extra + size_t(bg) * (plan.tiles + 1);
    const int tile = tile_of_item(plan, extra, item);
    if (tile < 0) return;
    const int first_key = tile * KEY_TILE;
    DynamicShared shared;
    TokenBuffers<SLC, D, KEY_TILE, by> buffers(shared);
    int* counts = shared.take<int>(THREADS / 32);
    int* list = shared.take<int>(GATHER_CHUNK);
    buffers.copy_keys(in.k, in.v, bg, first_key, s);
    // a plain division: Divisor would take registers that are not there
    const uint32_t* choosers = plan.choosers + size_t(bg * plan.units + tile / s.slc_tiles) * plan.token_words;
    const int first_token = plan.chunk_of_item(bg, tile, item) * GATHER_CHUNK;
    const int tokens = list_tokens(list, counts, choosers, plan.token_words, first_token);
    cp_async_wait<0>();
    if (by == WARPGROUP) async_fence();
    __syncthreads();
    WarpKeys<SLC, D, KEY_TILE, by> keys;
    keys.load(buffers.k_tile, buffers.v_tile, first_key);

    // there are fewer than 2^31 rows
    const int dout_row = bg / s.G * s.queries * s.H + bg % s.G * s.heads;
    auto fetch = [&](int buffer, int first, int head) {
        const int q_row = int(block_index_again()) % s.batch_groups * s.heads * s.queries;
        const bf16* q_head = in.q + size_t(q_row + head * s.queries) * D;
        const bf16* dout_head = d.dout + size_t(dout_row + head) * D;
        const int chunk = threadIdx.x % (D / 8), first_row = threadIdx.x / (D / 8);
#pragma unroll
        for (int done = 0; done < KEY_TILE; done += THREADS / (D / 8)) {  // as in copy_tile
            const int j = list[first + done + first_row];
            const int at = buffer * KEY_TILE * D + chunk_at<D, COLUMNS>(first_row, chunk) + done * COLUMNS;
            cp_async_16(buffers.q_tiles + at, q_head + size_t(max(j, 0)) * D + chunk * 8, j >= 0);
            cp_async_16(buffers.dout_tiles + at, dout_head + size_t(max(j, 0)) * s.H * D + chunk * 8, j >= 0);
        }
        cp_async_commit();
        const int j = list[first + buffers.rows.own_row()];
        buffers.rows.load(j >= 0, q_row + head * s.queries + j, d.lse_gated, d.row_dot);
        if (j >= 0 && head == 0 && s.slc_block < KEY_TILE)
            buffers.rows.choose(in.selection + size_t(bg * s.queries + j) * s.words, tile, s);
    };
    for_token_tiles<decltype(keys)>(
        0, tokens, s.heads, [](int first) { return first + KEY_TILE; }, fetch,
        [&](int buffer) { buffers.rows.store(buffer, s); },
        [&](int buffer, int first, auto prefetch) {
            const bool masked = s.first + list[first] < first_key + KEY_TILE - 1;  // its first token is the earliest
            keys.add_tokens(
                buffers, buffer, masked, [&](int row) { return s.first + list[first + row]; }, prefetch, s);
        });
    // computed again, because no register is free to keep it
    const int same_tile = int(unsigned(keys.first_key) / KEY_TILE);
    const int index = int(block_index_again());
    const int same_bg = index % s.batch_groups;
    const int chunk = plan.chunk_of_item(same_bg, same_tile, index / s.batch_groups);
    float* sums = nullptr;
    if (plan.chunks(same_bg, same_tile) > 1)
        sums = plan.partial + plan.place_of_sums(same_bg, same_tile, chunk) * 2 * KEY_TILE * D;
    keys.store(d.dk, d.dv, sums, same_bg, s);
}
//     mma 205 / 410, ldmatrix 192 / 640, exponentials 64 / 64, instructions 125 / 220, L2 174 / 347
template <int D, Multiplier by>
__global__ void __launch_bounds__(dkdv_threads<D, KEY_TILE, by>(), dkdv_blocks<D, KEY_TILE, by>())
    gather_dkdv_kernel(BackwardArrays<bf16, float> d, InputArrays<bf16> in, GatherPlan plan, AttentionShape s) {
    wait_for_earlier_kernels();
    if constexpr (by == WARP || COMPILED_FOR_WGMMA) compute_gathered_dkdv<D, by>(d, in, plan, s);
}
// dk, dv [B, G, key_stride, D] = the sums of the chunks; one block per tile of keys and (sequence, group)
template <int D>
__global__ void __launch_bounds__(256) add_chunks_kernel(bf16* dk, bf16* dv, GatherPlan plan, AttentionShape s) {
    wait_for_earlier_kernels();
    const int tile = int(blockIdx.x) / s.batch_groups, bg = int(blockIdx.x) % s.batch_groups;
    const int chunks = plan.chunks(bg, tile);
    const size_t size = 2 * KEY_TILE * D;
    if (chunks == 1) return;
    const float* partial = plan.partial + plan.place_of_sums(bg, tile, 0) * size;
    add_partial_sums<D>(dk, partial, size, chunks, bg, tile, s);
    add_partial_sums<D>(dv, partial + KEY_TILE * D, size, chunks, bg, tile, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// AUTO. The cost of 16 rows and 64 keys, forward and dQ together, in cycles of one multiprocessor: the traffic between
// shared memory and registers at 128 bytes a cycle, or the products, whichever takes longer. Bytes in units of D:
//   masked tiles     forward: K and V 256 for `row_pieces` 16-row pieces at once, at D = 128 Q 32; dQ: K, V, K 384
//                    likewise
//   gathered rows    forward: Q 32, K and V 256, sums in and out 128; dQ: Q and dout 64, K, V, K 384, sums 128
// An H100 agreed where D = 64: at 4096 and 8192 tokens gathered rows took 1.0 to 1.5 times what these counts say, and
// were faster where they should be. Where D = 128 they took 1.4 to 2.0 times that, hence the factor. When that was
// measured no warp could pass over a tile, since rows went head by head. Now masked tiles cost less; no GPU has said
// how much.
constexpr float GATHERED_128 = 2;
// Beside masked tiles on warpgroups. At 4 x 8192, where the counts say 0.55 to 0.62, an H200 took 1049 + 1527 us for
// gathered rows, forward and dQ, and 1076 + 1280 us for a prototype of these tiles: 1.09.
constexpr float GATHERED_BESIDE_WARPGROUPS = 1.86f;

template <int D>
HOST_DEVICE constexpr float gathered_piece_cost(float mma_cycles) {
    // 2.5 D mma
    const float products = mma_cycles * 2.5f * D;
    const float masked =
        (256.0f / row_pieces<D, false>() + (D > 64 ? 32.0f : 0) + 384.0f / row_pieces<D, true>()) * D / 128;
    const float gathered = (416.0f + 576.0f) * D / 128;
    const float ratio = (gathered > products ? gathered : products) / (masked > products ? masked : products);
    return D > 64 ? GATHERED_128 * ratio : ratio;
}

// counts [B*G * tiles, 2]: the tiles of keys that a tile of tokens visits, and the pieces of 16 gathered rows in them;
// one warp each
__global__ void __launch_bounds__(128)
    measure_selections_kernel(int* counts, const uint32_t* selection, AttentionShape s) {
    wait_for_earlier_kernels();
    const int item = int(blockIdx.x) * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (item >= s.tiles * s.batch_groups) return;  // a whole warp
    const int j0 = item % s.tiles * s.tile_tokens;
    const int tokens = min(s.tile_tokens, s.queries - j0);
    const int per_word = units_per_word(s);
    const uint32_t* selected = selection + (size_t(item / s.tiles) * s.queries + j0) * s.words;
    int visited = 0, pieces = 0;
    for (int word = 0; word < s.words; word++) {
        const int choosers = __popc(transpose_choices(lane < tokens ? selected[lane * s.words + word] : 0, s));
        const int unit = word * per_word + lane, in_unit = min(s.slc_tiles, key_tiles(s) - unit * s.slc_tiles);
        if (lane < per_word && choosers) {
            visited += in_unit;
            pieces += in_unit * ((choosers * s.heads + 15) / 16);
        }
    }
    visited = lane_sum(visited);
    pieces = lane_sum(pieces);
    if (lane == 0) {
        counts[2 * item] = visited;
        counts[2 * item + 1] = pieces;
    }
}
// choice = what costs less by the counts of measure_selections_kernel; one block
__global__ void __launch_bounds__(256)
    choose_selected_kernel(SelectedChoice* choice, const int* counts, float piece_cost, AttentionShape s) {
    wait_for_earlier_kernels();
    SHARED(double, sums, [3][8]);
    double visited = 0, pieces = 0, masked = 0;  // whole numbers, exact in any order
    for (int item = threadIdx.x; item < s.tiles * s.batch_groups; item += int(blockDim.x)) {
        const int tokens = min(s.tile_tokens, s.queries - item % s.tiles * s.tile_tokens);
        visited += counts[2 * item];
        pieces += counts[2 * item + 1];
        masked += double(counts[2 * item]) * ((tokens * s.heads + 15) / 16);
    }
    visited = lane_sum(visited);
    pieces = lane_sum(pieces);
    masked = lane_sum(masked);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        sums[0][warp] = visited;
        sums[1][warp] = pieces;
        sums[2][warp] = masked;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < 8; i++) {
        visited += sums[0][i];
        pieces += sums[1][i];
        masked += sums[2][i];
    }
    const float cost = masked > 0 ? float(piece_cost * pieces / masked) : 1;
    *choice = {cost < 1, float(s.tile_tokens), float(visited / (double(s.tiles) * s.batch_groups)), cost};
}

// ---------------------------------------------------------------------------------------------------------------------
// Host side: shapes, workspace, launches.

// Bytes of shared memory of a GatherBlock.
template <int D>
inline size_t gather_shared_bytes(const AttentionShape& a, bool backward) {
    const size_t rows = size_t(a.tile_tokens) * size_t(a.heads);
    const size_t row_tile = rows * D * sizeof(bf16);
    const size_t key_tiles = 2 * KEY_TILE * D * sizeof(bf16);
    return shared_bytes({key_tiles, key_tiles, row_tile, backward ? row_tile : 0, rows * D * sizeof(float),
                         rows * sizeof(float2), size_t(units(a.key_stride, a)) * sizeof(uint32_t),
                         size_t(tile_words(a.key_stride)) * sizeof(uint32_t)});
}
inline unsigned gather_threads(const AttentionShape& a) {
    return unsigned(std::min(GATHER_WARPS, (a.tile_tokens * a.heads + 15) / 16) * 32);
}
// As many tokens in a tile as fit. Their number changes no bit: every row is computed by itself, its keys in their
// order.
template <int D>
inline AttentionShape gather_shape(const NsaShape& s, bool backward, size_t max_shared = max_shared_of_device()) {
    int tokens = std::max(1, std::min({GATHER_TOKENS, gather_rows<D>(backward) / s.heads_per_group(), s.queries}));
    AttentionShape a = attention_shape(SLC, s, tokens);
    while (tokens > 1 && gather_shared_bytes<D>(a, backward) > max_shared) a = attention_shape(SLC, s, --tokens);
    return a;
}
template <int D>
inline bool gather_possible(const NsaShape& s) {
    return has_attention_kernel(ATTENTION_KERNELS[GATHERED_ROWS_KERNEL], false, {}, D) &&
           s.heads_per_group() <= gather_rows<D>(true) &&
           gather_shared_bytes<D>(gather_shape<D>(s, true), true) <= max_shared_of_device() &&
           gather_shared_bytes<D>(gather_shape<D>(s, false), false) <= max_shared_of_device();
}
// Which kernels a call of the selected branch may use. What remains AUTO is decided on the GPU, from the selection
// itself. With at most 2 n blocks in the sequence, masked tiles visit at most twice what a query chose: by sm_90's
// costs gathering cannot pay then. Warpgroups take dK and dV by lists wherever a query does not choose all blocks.
template <int D>
inline SelectedKernel resolve_selected(AttentionPath asked, const NsaShape& s, bool backward = true) {
    const bool possible = gather_possible<D>(s);
    if (asked.selected == SelectedKernel::GATHER && !possible)
        fail_usage(
            "%d query heads in a group, of dimension %d: gathered rows have room for %d, and need less shared memory "
            "than the %d bytes of this GPU; choose --attention-kernel %s",
            s.heads_per_group(), D, gather_rows<D>(true), max_shared_of_device(),
            ATTENTION_KERNELS[TENSOR_CORES_KERNEL].name);
    if (asked.selected != SelectedKernel::AUTO) return asked.selected;
    const int blocks = (s.first + s.queries + s.slc_block - 1) / s.slc_block;
    const int few = backward && asked.warpgroups && has_warpgroups(D) ? s.slc_count : 2 * s.slc_count;
    const bool may = possible && auto_may_gather(D, backward);
    return may && s.queries >= GATHER_TOKENS && blocks > few ? SelectedKernel::AUTO : SelectedKernel::TILES;
}
// The same of dQ, whose gathered rows are multiplied by mma.sync.
template <int D>
inline SelectedKernel resolve_dq(AttentionPath asked, const NsaShape& s) {
    return resolve_selected<D>({asked.selected, false}, s);
}

template <int D>
inline int* selection_counts(WorkspacePieces& pieces, const NsaShape& s) {
    return pieces.take<int>(2 * size_t(gather_shape<D>(s, false).tiles) * size_t(s.B) * size_t(s.G));
}
// A query has chosen at most max(slc_count, 3) blocks, which bounds the extra chunks.
template <int D>
inline GatherPlan gather_plan(WorkspacePieces& pieces, const NsaShape& s) {
    const AttentionShape a = gather_shape<D>(s, true);
    GatherPlan plan = {};
    plan.tiles = key_tiles(a);
    plan.units = units(a.keys, a);
    plan.token_words = (s.queries + 31) / 32;
    plan.max_extra = int(size_t(s.queries) * size_t(std::max(s.slc_count, 3)) * size_t(a.slc_tiles) / GATHER_CHUNK);
    plan.max_extra = int(std::min(size_t(plan.max_extra), size_t(plan.tiles) * size_t(s.queries / GATHER_CHUNK)));
    const size_t groups = size_t(a.batch_groups);
    plan.choosers = pieces.take<uint32_t>(groups * size_t(plan.units) * size_t(plan.token_words));
    plan.counts = pieces.take<int>(groups * size_t(plan.units));
    plan.extra = pieces.take<int>(groups * size_t(plan.tiles + 1));
    plan.partial = pieces.take<float>(groups * 2 * size_t(plan.max_extra) * 2 * KEY_TILE * D);
    return plan;
}

// Where AUTO is still open, has the GPU choose, and returns where the choice will be; otherwise null.
template <int D>
inline const SelectedChoice* choose_selected(SelectedKernel kernel, bool warpgroups, WorkspacePieces& pieces,
                                             SelectedChoice* choice, const uint32_t* selection, const NsaShape& s,
                                             cudaStream_t stream) {
    if (kernel != SelectedKernel::AUTO) return nullptr;
    const AttentionShape a = gather_shape<D>(s, false);
    int* counts = selection_counts<D>(pieces, s);
    const float beside = warpgroups && has_warpgroups(D) ? GATHERED_BESIDE_WARPGROUPS : 1;
    launch<measure_selections_kernel>(unsigned(a.tiles * a.batch_groups + 3) / 4, 128, 0, stream, counts, selection, a);
    launch<choose_selected_kernel>(1, 256, 0, stream, choice, counts,
                                   beside * gathered_piece_cost<D>(generation_of_device().mma_cycles), a);
    return choice;
}
template <int D>
inline void launch_gather_forward(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                  const uint32_t* selection, const NsaShape& s, const SelectedChoice* choice,
                                  cudaStream_t stream) {
    const AttentionShape a = gather_shape<D>(s, false);
    launch<gather_forward_kernel<D>>(unsigned(a.tiles * a.batch_groups), gather_threads(a),
                                     gather_shared_bytes<D>(a, false), stream, out, lse, q, k, v, selection, choice, a);
}
template <int D>
inline float* gathered_dq(WorkspacePieces& pieces, const NsaShape& s) {
    return pieces.take<float>(s.query_rows() * D);
}
template <int D>
inline void launch_gather_dq(float* dq, const LayerGradients<bf16, float>& d, const LayerInputs<bf16, float>& in,
                             const NsaShape& s, const SelectedChoice* choice, cudaStream_t stream) {
    const AttentionShape a = gather_shape<D>(s, true);
    launch<gather_dq_kernel<D>>(unsigned(a.tiles * a.batch_groups), gather_threads(a), gather_shared_bytes<D>(a, true),
                                stream, dq, d, in, choice, a);
}
template <int D>
inline void launch_gather_dkdv(const BackwardArrays<bf16, float>& d, const InputArrays<bf16>& in, const NsaShape& s,
                               bool warpgroups, WorkspacePieces pieces, cudaStream_t stream) {
    const AttentionShape a = gather_shape<D>(s, true);
    const GatherPlan plan = gather_plan<D>(pieces, s);
    const int all_units = plan.units * a.batch_groups;
    launch<transpose_selection_kernel>(unsigned(plan.token_words * a.batch_groups), 128, 0, stream, plan, in.selection,
                                       a);
    launch<count_choosers_kernel>(unsigned(all_units + 3) / 4, 128, 0, stream, plan, all_units);
    launch<plan_chunks_kernel>(unsigned(a.batch_groups), 32, 0, stream, plan, a);
    const unsigned blocks = unsigned((plan.max_extra + plan.tiles) * a.batch_groups);
    with_multiplier<D>(warpgroups, [&](auto by) {
        constexpr unsigned THREADS = unsigned(dkdv_threads<D, KEY_TILE, by()>());
        const size_t bytes = TokenBuffers<SLC, D, KEY_TILE, by()>::bytes() +
                             shared_bytes({THREADS / 32 * sizeof(int), GATHER_CHUNK * sizeof(int)});
        launch<gather_dkdv_kernel<D, by()>>(blocks, THREADS, bytes, stream, d, in, plan, a);
    });
    if (plan.max_extra)
        launch<add_chunks_kernel<D>>(unsigned(plan.tiles * a.batch_groups), 256, 0, stream, d.dk, d.dv, plan, a);
}

#endif  // PRECISION_FP32
