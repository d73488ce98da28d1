// attention_kernels.cuh: attention of the three branches and the selection of blocks, on tensor cores, in bf16 with fp32 sums.
//
// The operations are those of struct Cpu (nsa_cpu.h), which is the specification. Reads in this order:
//   shape  ->  tiles in shared memory and their products  ->  which keys a query sees  ->  forward  ->  backward  ->  selection  ->  host side.
//
// A tile of queries has as its rows all query heads of one group for a few consecutive tokens, head by head: row r is head r / tile_tokens, token
// r % tile_tokens. All of them share the tile's keys, so any number of heads per group fills the tensor cores. A tile of keys has 64 rows.
// Softmax is in base 2 inside: 2^(c q.k - lse), c = log2(e) / sqrt(D); the lse in memory is the natural one.
// There are no atomics: every output has one owner and every sum one order, so the same input gives the same bits.
#pragma once
#include <cfloat>
#include <initializer_list>
#include <type_traits>

#include "../nsa_cpu.h"
#include "cuda_common.cuh"

using bf16 = __nv_bfloat16;

// ---------------------------------------------------------------------------------------------------------------------
// Shape.

constexpr int KEY_TILE = 64;          // keys of a tile; of the token tile in dK and dV
constexpr int MOST_WARPS = 6;         // of a block that owns a tile of queries
constexpr int MOST_TILE_TOKENS = 64;  // more would make the union of a tile's selections too large
constexpr int SCORE_TOKENS = 16;      // tokens of a tile of the selection
constexpr size_t MOST_SHARED = 227 * 1024;  // bytes of shared memory that a block can have, on the GPU that has most
constexpr float LOG2_E = 1.4426950408889634f;

// 16-row pieces of a query tile in one warp: two share each piece of K and V that is loaded, while registers suffice.
template <int D>
HOST_DEVICE constexpr int row_pieces() { return D > 64 ? 1 : 2; }
template <int D>
HOST_DEVICE constexpr int most_rows() { return MOST_WARPS * 16 * row_pieces<D>(); }

// What kernels need to know of NsaShape. Index bg = b * G + g counts the groups of all sequences.
struct AttentionShape {
    int batch_groups, G, heads;    // B * G; groups; query heads of a group
    int first, queries;            // positions first .. first + queries - 1
    int keys, key_stride;          // keys that the last query may see; rows of the key arrays per group
    int tile_tokens, tiles;        // tokens of a tile, number of tiles: of queries, in dK and dV of keys
    int l, d, window;              // compression block and stride; keys of the window
    int slc_block, slc_count, words;
    int slc_shift;                 // selection block of a key within a tile: key >> slc_shift, 0 where a block fills the tile
    float scale;                   // 1 / sqrt(D)
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles. A tile in shared memory is [rows, D] in bf16, in 16-byte chunks. Chunk c of row r lies at place c ^ (r % 8) of its row (rows shorter
// than 128 bytes: the same within 128 bytes), so that the eight rows which ldmatrix reads at once come from different banks.

template <int D>
__device__ inline int chunk_at(int row, int chunk) {
    constexpr int chunks = D / 8, rows_per_line = chunks < 8 ? 8 / chunks : 1, swizzled = chunks < 8 ? chunks : 8;
    return (row * chunks + (chunk ^ row / rows_per_line % swizzled)) * 8;
}

// tile [rows, D] = rows 0 .. valid-1 of in, which are `stride` elements apart; zeros below. Asynchronous.
template <int D>
__device__ inline void copy_tile(bf16* tile, const bf16* in, size_t stride, int rows, int valid) {
    for (int i = threadIdx.x; i < rows * (D / 8); i += blockDim.x) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        cp_async_16(tile + chunk_at<D>(row, chunk), row < valid ? in + row * stride + chunk * 8 : in, row < valid);
    }
}
// The rows of a tile of queries, from heads and tokens that are head_stride and token_stride elements apart; the first `tokens` of the tile exist.
template <int D>
__device__ inline void copy_queries(bf16* tile, const bf16* in, size_t head_stride, size_t token_stride, int rows, int tokens,
                                    const AttentionShape& s) {
    for (int i = threadIdx.x; i < rows * (D / 8); i += blockDim.x) {
        const int row = i / (D / 8), chunk = i % (D / 8), head = row / s.tile_tokens, token = row % s.tile_tokens;
        const bool valid = head < s.heads && token < tokens;
        cp_async_16(tile + chunk_at<D>(row, chunk), valid ? in + head * head_stride + token * token_stride + chunk * 8 : in, valid);
    }
}

// Fragments of m16n8k16, by the PTX manual: lane 4 g + t holds of C the rows g and g + 8, columns 2 t and 2 t + 1: c[0], c[1] and c[2], c[3].
// a (16 x 16) = rows row.. of the tile, columns column..
template <int D>
__device__ inline void load_a(unsigned (&a)[4], const bf16* tile, int row, int column) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile + row * D + (chunk_at<D>(lane % 16, lane / 16) ^ column));
}
// Two b (16 x 8 each) with b[k][n] = tile[n0 + n][k0 + k], n of 16
template <int D>
__device__ inline void load_b_transposed(unsigned (&b)[4], const bf16* tile, int n0, int k0) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(b, tile + n0 * D + (chunk_at<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ k0));
}
// Two b (16 x 8 each) with b[k][n] = tile[k0 + k][n0 + n], n of 16
template <int D>
__device__ inline void load_b(unsigned (&b)[4], const bf16* tile, int k0, int n0) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(b, tile + k0 * D + (chunk_at<D>(lane % 16, lane / 16) ^ n0));
}
// c0, c1 += a b
__device__ inline void multiply_pair(float (&c0)[4], float (&c1)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    const unsigned b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
    mma_m16n8k16(c0, a, b0, c0);
    mma_m16n8k16(c1, a, b1, c1);
}
__device__ inline unsigned pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

// c (M*16 x N*16) = A B^T; A: rows a_row.. of its tile, B: rows b_row.. of its tile, both over all D columns.
template <int D, int M, int N>
__device__ inline void multiply_rows(float (&c)[M][2 * N][4], const bf16* a_tile, int a_row, const bf16* b_tile, int b_row) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < 2 * N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[m][n][e] = 0;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_a<D>(a[m], a_tile, a_row + m * 16, k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned b[4];
            load_b_transposed<D>(b, b_tile, b_row + n * 16, k);
#pragma unroll
            for (int m = 0; m < M; m++) multiply_pair(c[m][2 * n], c[m][2 * n + 1], a[m], b);
        }
    }
}
// c (16 x N*16) = A B^T; A (16 x D) in registers, B: rows b_row.. of its tile.
template <int D, int N>
__device__ inline void multiply_rows(float (&c)[1][2 * N][4], const unsigned (&a)[D / 16][4], const bf16* b_tile, int b_row) {
#pragma unroll
    for (int n = 0; n < 2 * N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[0][n][e] = 0;
#pragma unroll
    for (int k = 0; k < D; k += 16)
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned b[4];
            load_b_transposed<D>(b, b_tile, b_row + n * 16, k);
            multiply_pair(c[0][2 * n], c[0][2 * n + 1], a[k / 16], b);
        }
}
// c (M*16 x D) += P B; P (M*16 x K*16) as a product left it, rounded to bf16; B: rows b_row.. of its tile.
// The C fragments of two neighbouring products are the A fragment of the next one, so P does not go through shared memory.
template <int D, int M, int K>
__device__ inline void multiply_add(float (&c)[M][D / 8][4], const float (&p)[M][2 * K][4], const bf16* b_tile, int b_row) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) a[m][r] = pack_bf16(p[m][2 * k + r / 2][r % 2 * 2], p[m][2 * k + r / 2][r % 2 * 2 + 1]);
#pragma unroll
        for (int x = 0; x < D; x += 16) {
            unsigned b[4];
            load_b<D>(b, b_tile, b_row + k * 16, x);
#pragma unroll
            for (int m = 0; m < M; m++) multiply_pair(c[m][x / 8], c[m][x / 8 + 1], a[m], b);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Which keys a query sees.

// The query at position t sees no key from this one on.
template <Branch branch>
__device__ inline int end_of_keys(int t, const AttentionShape& s) {
    if (branch == CMP) return t + 1 < s.l ? 0 : (t + 1 - s.l) / s.d + 1;
    return t + 1;
}
// No query before this position sees the key.
template <Branch branch>
__device__ inline int first_query(int key, const AttentionShape& s) { return branch == CMP ? key * s.d + s.l - 1 : key; }

// Bit i: whether a token chose the i-th of the selection blocks that a tile of keys holds; a block of 64 or more tokens is the only one in each of
// its tiles. selected: the bitmasks of a tile of tokens (at most 64, so 32 bits are enough for the index).
__device__ inline int blocks_per_tile(const AttentionShape& s) { return KEY_TILE >> s.slc_shift; }
__device__ inline unsigned chosen_blocks(const uint32_t* selected, int token, int tile, const AttentionShape& s) {
    const int block = s.slc_block < KEY_TILE ? tile * blocks_per_tile(s) : tile / (s.slc_block / KEY_TILE);
    return selected[token * s.words + block / 32] >> block % 32 & ((1u << blocks_per_tile(s)) - 1);
}

// Words of a bitmask over the 64-row tiles of so many rows.
HOST_DEVICE inline int tile_words(int rows) { return (rows + KEY_TILE * 32 - 1) / (KEY_TILE * 32); }
// The first of the tiles tile .. end-1 that counts, or one not below end. In the selected branch those count whose bit is set in the bitmask `used`,
// else all.
template <Branch branch>
__device__ inline int next_tile(const uint32_t* used, int tile, int end) {
    while (branch == SLC && tile < end) {
        const uint32_t rest = used[tile / 32] >> tile % 32;
        if (rest) return tile + __ffs(int(rest)) - 1;
        tile = (tile / 32 + 1) * 32;
    }
    return tile;
}
// used = bitmask over tiles of keys: whether one of the tile's `tokens` tokens, with bitmasks `selected`, chose a block in it. The block's threads
// share the work; a barrier must follow.
__device__ inline void find_used_key_tiles(uint32_t* used, const uint32_t* selected, int tokens, int tiles, const AttentionShape& s) {
    const int lane = threadIdx.x % 32;
    for (int word = threadIdx.x / 32; word * 32 < tiles; word += blockDim.x / 32) {
        const int tile = word * 32 + lane;
        unsigned chosen = 0;
        for (int j = 0; j < tokens && tile < tiles; j++) chosen |= chosen_blocks(selected, j, tile, s);
        const unsigned bits = __ballot_sync(~0u, chosen != 0);
        if (lane == 0) used[word] = bits;
    }
}
// used = bitmask over tiles of tokens: whether one of the tile's tokens chose a block in tile `key_tile` of keys. selected: the
// bitmasks of all tokens. A barrier must follow.
__device__ inline void find_used_token_tiles(uint32_t* used, const uint32_t* selected, int key_tile, const AttentionShape& s) {
    const int lane = threadIdx.x % 32, tiles = (s.queries + KEY_TILE - 1) / KEY_TILE;
    for (int word = threadIdx.x / 32; word * 32 < tiles; word += blockDim.x / 32) {
        unsigned bits = 0;
        for (int tile = word * 32; tile < min(word * 32 + 32, tiles); tile++) {
            unsigned chosen = 0;
            for (int j = lane; j < min(KEY_TILE, s.queries - tile * KEY_TILE); j += 32)
                chosen |= chosen_blocks(selected + size_t(tile) * KEY_TILE * s.words, j, key_tile, s);
            if (__any_sync(~0u, chosen != 0)) bits |= 1u << tile % 32;
        }
        if (lane == 0) used[word] = bits;
    }
}

// Which keys a query sees, counted from some key of a tile: begin .. end-1.
struct Visible {
    int begin, end;
};
// end: the query's end_of_keys, counted likewise. chosen: whether the query chose the selection block that the keys belong to.
template <Branch branch>
__device__ inline Visible visible_keys(int end, bool chosen, const AttentionShape& s) {
    return {branch == WIN ? end - s.window : 0, branch != SLC || chosen ? end : 0};
}
__device__ inline bool sees_all(const Visible& v, int keys) { return v.begin <= 0 && v.end >= keys; }
__device__ inline bool sees_some(const Visible& v, int keys) { return v.begin < keys && v.end > 0 && v.begin < v.end; }
__device__ inline bool sees(const Visible& v, int key) { return v.begin <= key && v.end > key; }

// The tile of queries of this block. Later tiles have more keys and start first.
struct QueryTile {
    int bg, j0, tokens;  // group; first token, counted from s.first; how many there are
};
__device__ inline QueryTile query_tile(const AttentionShape& s) {
    const int tile = s.tiles - 1 - int(blockIdx.x) / s.batch_groups, j0 = tile * s.tile_tokens;
    return {int(blockIdx.x) % s.batch_groups, j0, min(s.tile_tokens, s.queries - j0)};
}
// The place of a row of the tile in [B, H, queries], or -1 for a row that is no query.
__device__ inline long long query_row(const QueryTile& tile, int row, const AttentionShape& s) {
    const int head = row / s.tile_tokens, token = row % s.tile_tokens;
    return head < s.heads && token < tile.tokens ? ((long long)tile.bg * s.heads + head) * s.queries + tile.j0 + token : -1;
}
// What a lane knows of its rows, the m-th 16-row piece's row lane / 4 (i = 0) and that + 8 (i = 1): a byte for each in one register.
__device__ inline int row_byte(unsigned bytes, int m, int i) { return int(bytes >> (m * 16 + i * 8) & 255); }
// The rows' end_of_keys, as differences from that of the tile's first token, which are below 64; NO_QUERY for rows that are no query.
constexpr int NO_QUERY = 255;
template <Branch branch, int M>
__device__ inline unsigned ends_of_rows(const QueryTile& tile, int first_row, const AttentionShape& s) {
    unsigned bytes = 0;
    for (int m = 0; m < M; m++)
        for (int i = 0; i < 2; i++) {
            const int row = first_row + m * 16 + i * 8 + threadIdx.x % 32 / 4, t0 = s.first + tile.j0;
            const int difference = end_of_keys<branch>(t0 + row % s.tile_tokens, s) - end_of_keys<branch>(t0, s);
            bytes |= unsigned(query_row(tile, row, s) < 0 ? NO_QUERY : difference) << (m * 16 + i * 8);
        }
    return bytes;
}
__device__ inline int end_of_row(int first_end, unsigned ends, int m, int i) {
    const int difference = row_byte(ends, m, i);
    return difference == NO_QUERY ? 0 : first_end + difference;
}
// What a lane's rows see of a tile of keys: whether all of them see all, whether one sees some; and the rows' chosen_blocks, a byte each.
struct TileView {
    bool all, some;
    unsigned blocks;
};
// selected: the bitmasks of the tile of queries. first_end, ends: see ends_of_rows.
template <Branch branch, int M>
__device__ inline TileView look_at_tile(int key_tile, int first_end, unsigned ends, const uint32_t* selected, const AttentionShape& s) {
    TileView view = {true, false, 0};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = row_byte(ends, m, i);  // in the selected branch, where the end is the token's own place + 1
            const unsigned chosen = branch == SLC && token != NO_QUERY ? chosen_blocks(selected, token, key_tile, s) : 0;
            const Visible visible = visible_keys<branch>(end_of_row(first_end - key_tile * KEY_TILE, ends, m, i), chosen, s);
            view.all = view.all && sees_all(visible, KEY_TILE) && (branch != SLC || chosen == (1u << blocks_per_tile(s)) - 1);
            view.some = view.some || sees_some(visible, KEY_TILE);
            view.blocks |= chosen << (m * 16 + i * 8);
        }
    return view;
}
// The tiles of keys that some query of the tile may see: begin .. end-1.
template <Branch branch>
__device__ inline int first_key_tile(const QueryTile& tile, const AttentionShape& s) {
    return branch == WIN ? max(0, s.first + tile.j0 + 1 - s.window) / KEY_TILE : 0;
}
template <Branch branch>
__device__ inline int end_of_key_tiles(const QueryTile& tile, const AttentionShape& s) {
    return (end_of_keys<branch>(s.first + tile.j0 + tile.tokens - 1, s) + KEY_TILE - 1) / KEY_TILE;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward. One block per tile of queries; each warp has rows of its own. Tiles of K and V come in two buffers: while one is used, the next arrives.

// out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys, lse [B, H, queries]; without a key 0 and +infinity.
template <Branch branch, int D>
__global__ void __launch_bounds__(MOST_WARPS * 32, 2)
    attention_forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const uint32_t* selection, AttentionShape s) {
    constexpr int M = row_pieces<D>(), KEYS = 32;  // keys at a time, as many as there are registers for
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * M, rows = blockDim.x / 32 * 16 * M;
    const QueryTile tile = query_tile(s);
    const int end_tile = end_of_key_tiles<branch>(tile, s);
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(most_rows<D>() * D);
    uint32_t* used = nullptr;

    copy_queries<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D, D, rows, tile.tokens, s);
    cp_async_commit();
    if (branch == SLC) {
        used = shared.take<uint32_t>(tile_words(s.key_stride));
        selection += (size_t(tile.bg) * s.queries + tile.j0) * s.words;
        find_used_key_tiles(used, selection, tile.tokens, end_tile, s);
        __syncthreads();
    }
    const size_t group = size_t(tile.bg) * s.key_stride * D;
    auto copy_keys = [&](int buffer, int key_tile) {
        const size_t at = group + size_t(key_tile) * KEY_TILE * D;
        copy_tile<D>(k_tiles + buffer * KEY_TILE * D, k + at, D, KEY_TILE, s.keys - key_tile * KEY_TILE);
        copy_tile<D>(v_tiles + buffer * KEY_TILE * D, v + at, D, KEY_TILE, s.keys - key_tile * KEY_TILE);
        cp_async_commit();
    };
    int key_tile = next_tile<branch>(used, first_key_tile<branch>(tile, s), end_tile);
    if (key_tile < end_tile) copy_keys(0, key_tile);

    // This lane's rows: first_row + m * 16 + i * 8 + lane / 4.
    const int first_end = end_of_keys<branch>(s.first + tile.j0, s);
    const unsigned ends = ends_of_rows<branch, M>(tile, first_row, s);
    float sums[M][D / 8][4], largest[M][2], total[M][2];  // largest: of the scores in base 2; total: of this lane's columns
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) largest[m][i] = -FLT_MAX, total[m][i] = 0;
#pragma unroll
        for (int x = 0; x < D / 8; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[m][x][e] = 0;
    }
    for (int buffer = 0; key_tile < end_tile; buffer ^= 1) {
        const int this_tile = key_tile;
        key_tile = next_tile<branch>(used, key_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other
        if (key_tile < end_tile) copy_keys(buffer ^ 1, key_tile);

        const TileView view = look_at_tile<branch, M>(this_tile, first_end, ends, selection, s);
        if (!__any_sync(~0u, view.some)) continue;
        const bool masked = !__all_sync(~0u, view.all);

#pragma unroll 1
        for (int first = 0; first < KEY_TILE; first += KEYS) {
            float p[M][KEYS / 8][4];
            multiply_rows<D, M, KEYS / 16>(p, q_tile, first_row, k_tiles + buffer * KEY_TILE * D, first);
            if (masked) {
#pragma unroll
                for (int part = 0; part < KEYS; part += 16)  // keys of one selection block
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int end = end_of_row(first_end - this_tile * KEY_TILE - first - part, ends, m, i);
                            const bool chosen = row_byte(view.blocks, m, i) >> ((first + part) >> s.slc_shift) & 1;
                            const Visible visible = visible_keys<branch>(end, chosen, s);
#pragma unroll
                            for (int n = 0; n < 2; n++)
#pragma unroll
                                for (int e = 0; e < 2; e++)
                                    if (!sees(visible, n * 8 + lane % 4 * 2 + e)) p[m][part / 8 + n][2 * i + e] = -INFINITY;
                        }
            }
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float most = -INFINITY;
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(p[m][n][2 * i], p[m][n][2 * i + 1]));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                    // Starting from -FLT_MAX the maximum is always finite: no infinity is ever subtracted from another.
                    const float shift = fmaxf(largest[m][i], most * (s.scale * LOG2_E)), rescale = exp2_approx(largest[m][i] - shift);
                    largest[m][i] = shift;
                    total[m][i] *= rescale;
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int e = 2 * i; e < 2 * i + 2; e++) {
                            p[m][n][e] = exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, -shift));
                            total[m][i] += p[m][n][e];
                        }
#pragma unroll
                    for (int x = 0; x < D / 8; x++) sums[m][x][2 * i] *= rescale, sums[m][x][2 * i + 1] *= rescale;
                }
            multiply_add<D, M, KEYS / 16>(sums, p, v_tiles + buffer * KEY_TILE * D, first);
        }
    }
    cp_async_wait<0>();  // q, where there was no tile of keys
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = total[m][i];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const long long row = query_row(tile, first_row + m * 16 + i * 8 + lane / 4, s);
            if (row < 0) continue;
            const float inverse = sum > 0 ? 1 / sum : 0;
#pragma unroll
            for (int x = 0; x < D / 8; x++)
                *reinterpret_cast<__nv_bfloat162*>(out + size_t(row) * D + x * 8 + lane % 4 * 2) =
                    __floats2bfloat162_rn(sums[m][x][2 * i] * inverse, sums[m][x][2 * i + 1] * inverse);
            if (lane % 4 == 0) lse[row] = sum > 0 ? largest[m][i] / LOG2_E + logf(sum) : INFINITY;
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward, with P' = e^(q k^T / sqrt(D) - lse_gated) and dS = P' o (dout v^T - row_dot). Twice the products q k^T and dout v^T, once with
// the queries and once with the keys at rest, so that each gradient has one owner.

// dq [B, H, queries, D] += dS k / sqrt(D).  The forward's structure with dout in place of the online softmax.
template <Branch branch, int D>
__global__ void __launch_bounds__(MOST_WARPS * 32, 2)
    attention_dq_kernel(float* dq, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* row_dot, const float* lse_gated,
                        const uint32_t* selection, AttentionShape s) {
    constexpr int M = row_pieces<D>(), KEYS = 16;  // keys at a time, as many as there are registers for
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * M, rows = blockDim.x / 32 * 16 * M;
    const QueryTile tile = query_tile(s);
    const int end_tile = end_of_key_tiles<branch>(tile, s);
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(most_rows<D>() * D);
    bf16* dout_tile = shared.take<bf16>(most_rows<D>() * D);
    uint32_t* used = nullptr;

    copy_queries<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D, D, rows, tile.tokens, s);
    const size_t H = size_t(s.G) * s.heads, dout_at = ((size_t(tile.bg / s.G) * s.queries + tile.j0) * H + size_t(tile.bg % s.G) * s.heads) * D;
    copy_queries<D>(dout_tile, dout + dout_at, D, H * D, rows, tile.tokens, s);
    cp_async_commit();
    if (branch == SLC) {
        used = shared.take<uint32_t>(tile_words(s.key_stride));
        selection += (size_t(tile.bg) * s.queries + tile.j0) * s.words;
        find_used_key_tiles(used, selection, tile.tokens, end_tile, s);
        __syncthreads();
    }
    const size_t group = size_t(tile.bg) * s.key_stride * D;
    auto copy_keys = [&](int buffer, int key_tile) {
        const size_t at = group + size_t(key_tile) * KEY_TILE * D;
        copy_tile<D>(k_tiles + buffer * KEY_TILE * D, k + at, D, KEY_TILE, s.keys - key_tile * KEY_TILE);
        copy_tile<D>(v_tiles + buffer * KEY_TILE * D, v + at, D, KEY_TILE, s.keys - key_tile * KEY_TILE);
        cp_async_commit();
    };
    int key_tile = next_tile<branch>(used, first_key_tile<branch>(tile, s), end_tile);
    if (key_tile < end_tile) copy_keys(0, key_tile);

    const int first_end = end_of_keys<branch>(s.first + tile.j0, s);
    const unsigned ends = ends_of_rows<branch, M>(tile, first_row, s);
    float sums[M][D / 8][4], shift[M][2], dot[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long row = query_row(tile, first_row + m * 16 + i * 8 + lane / 4, s);
            shift[m][i] = row < 0 ? INFINITY : lse_gated[row] * LOG2_E, dot[m][i] = row < 0 ? 0 : row_dot[row];
        }
#pragma unroll
        for (int x = 0; x < D / 8; x++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[m][x][e] = 0;
    }
    for (int buffer = 0; key_tile < end_tile; buffer ^= 1) {
        const int this_tile = key_tile;
        key_tile = next_tile<branch>(used, key_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other
        if (key_tile < end_tile) copy_keys(buffer ^ 1, key_tile);

        const TileView view = look_at_tile<branch, M>(this_tile, first_end, ends, selection, s);
        if (!__any_sync(~0u, view.some)) continue;
        const bool masked = !__all_sync(~0u, view.all);
#pragma unroll 1
        for (int first = 0; first < KEY_TILE; first += KEYS) {
            float p[M][KEYS / 8][4], ds[M][KEYS / 8][4];
            multiply_rows<D, M, KEYS / 16>(p, q_tile, first_row, k_tiles + buffer * KEY_TILE * D, first);
            multiply_rows<D, M, KEYS / 16>(ds, dout_tile, first_row, v_tiles + buffer * KEY_TILE * D, first);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int end = end_of_row(first_end - this_tile * KEY_TILE - first, ends, m, i);
                    const bool chosen = row_byte(view.blocks, m, i) >> (first >> s.slc_shift) & 1;  // the keys are of one selection block
                    const Visible visible = visible_keys<branch>(end, chosen, s);
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const bool seen = !masked || sees(visible, n * 8 + lane % 4 * 2 + e);
                            const float weight = seen ? exp2_approx(fmaf(p[m][n][2 * i + e], s.scale * LOG2_E, -shift[m][i])) : 0;
                            ds[m][n][2 * i + e] = weight * (ds[m][n][2 * i + e] - dot[m][i]);
                        }
                }
            multiply_add<D, M, KEYS / 16>(sums, ds, k_tiles + buffer * KEY_TILE * D, first);
        }
    }
    cp_async_wait<0>();  // q and dout, where there was no tile of keys
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long row = query_row(tile, first_row + m * 16 + i * 8 + lane / 4, s);
            if (row < 0) continue;
#pragma unroll
            for (int x = 0; x < D / 8; x++) {
                float2* to = reinterpret_cast<float2*>(dq + size_t(row) * D + x * 8 + lane % 4 * 2);
                const float2 before = *to;
                *to = make_float2(before.x + sums[m][x][2 * i] * s.scale, before.y + sums[m][x][2 * i + 1] * s.scale);
            }
        }
}

// dk [keys] = dS^T q / sqrt(D), dv [keys] = P'^T dout.  One block per tile of keys, which stay in registers, 16 in each of 4 warps; the tokens go by
// in tiles of 64, once for each head. S^T = k q^T and v dout^T come out as what the next products need.
constexpr unsigned DKDV_THREADS = KEY_TILE / 16 * 32;
HOST_DEVICE constexpr int sub_blocks(Branch branch) { return branch == SLC ? KEY_TILE / 16 : 1; }  // selection blocks of a tile, at most
template <int D>
HOST_DEVICE constexpr bool keeps_v() { return D > 64; }  // in shared memory, for want of registers
template <Branch branch, int D>
__global__ void __launch_bounds__(DKDV_THREADS, D > 64 ? 2 : 3)
    attention_dkdv_kernel(bf16* dk, bf16* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* row_dot,
                          const float* lse_gated, const uint32_t* selection, AttentionShape s) {
    constexpr int TOKENS = 16;  // tokens at a time, as many as there are registers for
    constexpr int SUB_BLOCKS = sub_blocks(branch);
    const int lane = threadIdx.x % 32, warp_key = threadIdx.x / 32 * 16;
    // Early keys are seen by more queries and start first.
    const int tile = int(blockIdx.x) / s.batch_groups, bg = int(blockIdx.x) % s.batch_groups, first_key = tile * KEY_TILE;
    DynamicShared shared;
    bf16* q_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* dout_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    // Per token: lse_gated in base 2, +infinity where the query does not exist or did not choose the selection block; and row_dot.
    float* shifts = shared.take<float>(2 * SUB_BLOCKS * KEY_TILE);
    float* dots = shared.take<float>(2 * KEY_TILE);
    // The keys pass through the second buffers into registers, as A fragments.
    constexpr bool KEEP_V = keeps_v<D>();
    bf16* k_tile = q_tiles + KEY_TILE * D;
    bf16* v_tile = KEEP_V ? shared.take<bf16>(KEY_TILE * D) : dout_tiles + KEY_TILE * D;
    uint32_t* used = nullptr;
    const size_t group = (size_t(bg) * s.key_stride + first_key) * D;
    copy_tile<D>(k_tile, k + group, D, KEY_TILE, s.keys - first_key);
    copy_tile<D>(v_tile, v + group, D, KEY_TILE, s.keys - first_key);
    cp_async_commit();
    if (branch == SLC) {
        used = shared.take<uint32_t>(tile_words(s.queries));
        selection += size_t(bg) * s.queries * s.words;
        find_used_token_tiles(used, selection, tile, s);
    }
    cp_async_wait<0>();
    __syncthreads();
    unsigned k_rows[D / 16][4], v_rows[D / 16][4];
#pragma unroll
    for (int x = 0; x < D; x += 16) {
        load_a<D>(k_rows[x / 16], k_tile, warp_key, x);
        if (!KEEP_V) load_a<D>(v_rows[x / 16], v_tile, warp_key, x);
    }

    const size_t H = size_t(s.G) * s.heads;
    auto copy_tokens = [&](int buffer, int token_tile, int head) {
        const int j = token_tile * KEY_TILE;
        copy_tile<D>(q_tiles + buffer * KEY_TILE * D, q + ((size_t(bg) * s.heads + head) * s.queries + j) * D, D, KEY_TILE, s.queries - j);
        const size_t at = ((size_t(bg / s.G) * s.queries + j) * H + size_t(bg % s.G) * s.heads + head) * D;
        copy_tile<D>(dout_tiles + buffer * KEY_TILE * D, dout + at, H * D, KEY_TILE, s.queries - j);
        cp_async_commit();
    };
    // Half of the threads each: one token's lse and chosen blocks, one token's row_dot.
    const bool has_shift = threadIdx.x < KEY_TILE;
    const int column = threadIdx.x % KEY_TILE;
    float statistic = 0;
    unsigned chosen = ~0u;
    auto load_statistic = [&](int token_tile, int head) {
        const int j = token_tile * KEY_TILE + column;
        const size_t row = (size_t(bg) * s.heads + head) * s.queries + j;
        statistic = j >= s.queries ? (has_shift ? INFINITY : 0) : has_shift ? lse_gated[row] * LOG2_E : row_dot[row];
        if (branch == SLC && has_shift && j < s.queries)
            chosen = chosen_blocks(selection + size_t(token_tile) * KEY_TILE * s.words, column, tile, s);
    };
    auto store_statistic = [&](int buffer) {
        if (!has_shift) dots[buffer * KEY_TILE + column] = statistic;
        else
            for (int sub = 0; sub < SUB_BLOCKS; sub++)
                shifts[(buffer * SUB_BLOCKS + sub) * KEY_TILE + column] = chosen >> sub & 1 ? statistic : INFINITY;
    };
    const int sub_block = branch == SLC ? warp_key >> s.slc_shift : 0;

    // Tokens that may see a key of the tile; then, for each of this lane's keys warp_key + i * 8 + lane / 4, those that see it. Counted from s.first.
    const int first_token = first_query<branch>(first_key, s) - s.first;
    const int end_token = branch == WIN ? min(s.queries, first_key + KEY_TILE - 1 + s.window - s.first) : s.queries;
    const int end_tile = (end_token + KEY_TILE - 1) / KEY_TILE;
    int begin[2], end[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int key = first_key + warp_key + i * 8 + lane / 4;
        begin[i] = first_query<branch>(key, s) - s.first;
        end[i] = branch == WIN ? min(s.queries, key + s.window - s.first) : s.queries;
    }
    float dk_sums[1][D / 8][4], dv_sums[1][D / 8][4];
#pragma unroll
    for (int x = 0; x < D / 8; x++)
#pragma unroll
        for (int e = 0; e < 4; e++) dk_sums[0][x][e] = 0, dv_sums[0][x][e] = 0;

    int token_tile = next_tile<branch>(used, max(first_token, 0) / KEY_TILE, end_tile), head = 0;
    if (token_tile < end_tile) {
        copy_tokens(0, token_tile, head);
        load_statistic(token_tile, head);
        store_statistic(0);
    }
    for (int buffer = 0; token_tile < end_tile; buffer ^= 1) {
        const int j0 = token_tile * KEY_TILE;
        if (++head == s.heads) head = 0, token_tile = next_tile<branch>(used, token_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other
        if (token_tile < end_tile) {
            copy_tokens(buffer ^ 1, token_tile, head);
            load_statistic(token_tile, head);
        }
        bool all = true, some = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            all = all && begin[i] <= j0 && end[i] >= j0 + KEY_TILE;
            some = some || (begin[i] < j0 + KEY_TILE && end[i] > j0);
        }
        if (__any_sync(~0u, some)) {
            const bool masked = !__all_sync(~0u, all);
            const bf16 *q_tile = q_tiles + buffer * KEY_TILE * D, *dout_tile = dout_tiles + buffer * KEY_TILE * D;
            const float *shift = shifts + (buffer * SUB_BLOCKS + sub_block) * KEY_TILE, *dot = dots + buffer * KEY_TILE;
#pragma unroll 1
            for (int first = 0; first < KEY_TILE; first += TOKENS) {
                float p[1][TOKENS / 8][4], ds[1][TOKENS / 8][4];
                multiply_rows<D, TOKENS / 16>(p, k_rows, q_tile, first);
                if constexpr (KEEP_V) multiply_rows<D, 1, TOKENS / 16>(ds, v_tile, warp_key, dout_tile, first);
                else multiply_rows<D, TOKENS / 16>(ds, v_rows, dout_tile, first);
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int token = first + n * 8 + lane % 4 * 2 + e % 2;
                        const bool seen = !masked || (begin[e / 2] <= j0 + token && end[e / 2] > j0 + token);
                        p[0][n][e] = seen ? exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, -shift[token])) : 0;
                        ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - dot[token]);
                    }
                multiply_add<D, 1, TOKENS / 16>(dv_sums, p, dout_tile, first);
                multiply_add<D, 1, TOKENS / 16>(dk_sums, ds, q_tile, first);
            }
        }
        if (token_tile < end_tile) store_statistic(buffer ^ 1);  // only now, so that nobody waits for the load
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int key = first_key + warp_key + i * 8 + lane / 4;
        if (key >= s.keys) continue;
        const size_t at = (size_t(bg) * s.key_stride + key) * D + lane % 4 * 2;
#pragma unroll
        for (int x = 0; x < D / 8; x++) {
            *reinterpret_cast<__nv_bfloat162*>(dk + at + x * 8) =
                __floats2bfloat162_rn(dk_sums[0][x][2 * i] * s.scale, dk_sums[0][x][2 * i + 1] * s.scale);
            *reinterpret_cast<__nv_bfloat162*>(dv + at + x * 8) = __floats2bfloat162_rn(dv_sums[0][x][2 * i], dv_sums[0][x][2 * i + 1]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Selection, paper eq. 8 to 12. One block per 16 tokens. The weights of the compressed branch are computed again from its lse, added over the
// group's heads in registers and folded into importances in shared memory, one tile of 64 compressed blocks at a time.

constexpr unsigned SCORE_THREADS = KEY_TILE / 16 * 32;
constexpr int WEIGHT_STRIDE = KEY_TILE + 1;  // odd, as the next, so that the same place of several tokens lies in different banks
HOST_DEVICE inline int importance_stride(const AttentionShape& s) { return ((s.first + s.queries - 1) / s.slc_block + 1) | 1; }
constexpr float TAKEN = -1;  // in place of the importance of a chosen block, which is never negative

__device__ inline float sum_of_warp(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

// Marks blocks 0, last-1, last and the slc_count-3 best others of importance[0 .. last] as TAKEN, by one warp; equal ones: the lowest index.
// Returns their share of all importance. Lane i alone reads and writes elements i, i + 32, ...
__device__ inline float choose_best(float* importance, int last, int slc_count) {
    const int lane = threadIdx.x % 32;
    float all = 0, chosen = 0;
    for (int block = lane; block <= last; block += 32) all += importance[block];
    auto take = [&](int block) {
        if (block % 32 != lane || importance[block] < 0) return;
        chosen += importance[block];
        importance[block] = TAKEN;
    };
    take(0);
    take(last - 1);
    take(last);
    for (int round = 3; round < slc_count; round++) {
        int best = last + 1;  // none
        for (int block = lane; block <= last; block += 32)
            if (importance[block] >= 0 && (best > last || importance[block] > importance[best])) best = block;
        // The order of the bits of non-negative floats is their own.
        const int bits = best <= last ? __float_as_int(importance[best]) : -1;
        const int largest = __reduce_max_sync(~0u, bits);
        const int winner = __reduce_min_sync(~0u, bits == largest ? best : last + 1);
        if (winner <= last) take(winner);
    }
    all = sum_of_warp(all);
    chosen = sum_of_warp(chosen);
    return all > 0 ? chosen / all : 1;
}

// selection [B, G, queries, words]; chosen_importance [B, G, queries], where given
template <int D>
__global__ void __launch_bounds__(SCORE_THREADS)
    select_blocks_kernel(uint32_t* selection, float* chosen_importance, const bf16* q, const bf16* kc, const float* lse, AttentionShape s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = importance_stride(s), rows = s.heads * SCORE_TOKENS;
    const QueryTile tile = query_tile(s);
    const int last_block = (s.first + tile.j0 + tile.tokens - 1) / s.slc_block;
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(rows * D);
    float* shifts = shared.take<float>(rows);                                 // lse in base 2
    float* weights = shared.take<float>(SCORE_TOKENS * WEIGHT_STRIDE);        // [token][compressed block of the tile], summed over heads
    float* importances = shared.take<float>(SCORE_TOKENS * stride);           // [token][selection block]

    if (last_block + 1 > s.slc_count) {
        const int end_tile = end_of_key_tiles<CMP>(tile, s);
        auto copy_keys = [&](int buffer, int key_tile) {
            const bf16* from = kc + (size_t(tile.bg) * s.key_stride + size_t(key_tile) * KEY_TILE) * D;
            copy_tile<D>(k_tiles + buffer * KEY_TILE * D, from, D, KEY_TILE, s.keys - key_tile * KEY_TILE);
            cp_async_commit();
        };
        copy_queries<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D, D, rows, tile.tokens, s);
        copy_keys(0, 0);
        for (int row = threadIdx.x; row < rows; row += int(SCORE_THREADS)) {
            const long long at = query_row(tile, row, s);
            shifts[row] = at < 0 ? INFINITY : lse[at] * LOG2_E;
        }
        for (int i = threadIdx.x; i < SCORE_TOKENS * stride; i += int(SCORE_THREADS)) importances[i] = 0;

        for (int key_tile = 0; key_tile < end_tile; key_tile++) {
            const bf16* k_tile = k_tiles + key_tile % 2 * KEY_TILE * D;
            cp_async_wait<0>();
            __syncthreads();  // this tile has arrived, the last one is folded
            if (key_tile + 1 < end_tile) copy_keys((key_tile + 1) % 2, key_tile + 1);
            // Compressed blocks are the rows of the product, tokens its columns: this lane has blocks lane / 4 and lane / 4 + 8 of the warp's 16.
            unsigned k_rows[D / 16][4];
#pragma unroll
            for (int x = 0; x < D; x += 16) load_a<D>(k_rows[x / 16], k_tile, warp * 16, x);
            float sums[SCORE_TOKENS / 8][4] = {};
            for (int head = 0; head < s.heads; head++) {
                float p[1][SCORE_TOKENS / 8][4];
                multiply_rows<D, SCORE_TOKENS / 16>(p, k_rows, q_tile, head * SCORE_TOKENS);
#pragma unroll
                for (int n = 0; n < SCORE_TOKENS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int token = n * 8 + lane % 4 * 2 + e % 2, key = key_tile * KEY_TILE + warp * 16 + e / 2 * 8 + lane / 4;
                        const bool visible = key < end_of_keys<CMP>(s.first + tile.j0 + token, s);
                        sums[n][e] += visible ? exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, -shifts[head * SCORE_TOKENS + token])) : 0;
                    }
            }
#pragma unroll
            for (int n = 0; n < SCORE_TOKENS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) weights[(n * 8 + lane % 4 * 2 + e % 2) * WEIGHT_STRIDE + warp * 16 + e / 2 * 8 + lane / 4] = sums[n][e];
            __syncthreads();
            // Each (token, selection block) has one thread, which adds in the order of the compressed blocks.
            const int begin = key_tile * KEY_TILE, end = min(begin + KEY_TILE, s.keys);  // compressed blocks of this tile
            const int first_block = begin * s.d / s.slc_block;
            const int blocks = min(((end - 1) * s.d + s.l - 1) / s.slc_block, last_block) + 1 - first_block;
            for (int item = threadIdx.x; item < blocks * SCORE_TOKENS; item += int(SCORE_THREADS)) {
                const int token = item % SCORE_TOKENS, block = first_block + item / SCORE_TOKENS;
                const int block_begin = block * s.slc_block, block_end = block_begin + s.slc_block;
                float sum = importances[token * stride + block];
                for (int i = max(begin, (block_begin - s.l) / s.d); i < end && i * s.d < block_end; i++) {
                    const int in_both = min(block_end, i * s.d + s.l) - max(block_begin, i * s.d);  // tokens; eq. 9 for any l, d, l'
                    if (in_both > 0) sum += weights[token * WEIGHT_STRIDE + i - begin] * in_both / s.d;
                }
                importances[token * stride + block] = sum;
            }
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    for (int token = warp; token < tile.tokens; token += int(SCORE_THREADS) / 32) {
        const int last = (s.first + tile.j0 + token) / s.slc_block;
        const size_t row = size_t(tile.bg) * s.queries + tile.j0 + token;
        const bool takes_all = last + 1 <= s.slc_count;
        float* importance = importances + token * stride;
        const float share = takes_all ? 1 : choose_best(importance, last, s.slc_count);
        for (int word = 0; word < s.words; word++) {
            const int block = word * 32 + lane;
            const unsigned bits = __ballot_sync(~0u, block <= last && (takes_all || importance[block] < 0));
            if (lane == 0) selection[row * s.words + word] = bits;
        }
        if (chosen_importance && lane == 0) chosen_importance[row] = share;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Host side: struct Cpu's functions, with device pointers and a stream.

// branch: whose keys; tile_tokens 0: as many tokens as fill a block
template <int D>
inline AttentionShape attention_shape(Branch branch, const NsaShape& s, int tile_tokens) {
    AttentionShape a = {};
    a.batch_groups = s.B * s.G, a.G = s.G, a.heads = s.heads_per_group(), a.first = s.first, a.queries = s.queries;
    a.keys = branch == CMP ? s.cmp_blocks(s.first + s.queries) : s.first + s.queries;
    a.key_stride = branch == CMP ? s.cmp_capacity() : s.T;
    a.tile_tokens = tile_tokens ? tile_tokens : std::min({MOST_TILE_TOKENS, most_rows<D>() / a.heads, s.queries});
    a.tiles = (s.queries + a.tile_tokens - 1) / a.tile_tokens;
    a.l = s.l, a.d = s.d, a.window = s.full ? s.T : s.window;
    a.slc_block = s.slc_block, a.slc_count = s.slc_count, a.words = s.full ? 0 : s.selection_words();
    while (a.slc_shift < 6 && (1 << a.slc_shift) < s.slc_block) a.slc_shift++;
    a.scale = float(s.scale());
    return a;
}
inline void check_attention_shape(Branch branch, const NsaShape& s) {
    if (s.heads_per_group() * s.G != s.H || s.heads_per_group() > most_rows<128>())
        fail_usage("%d query heads in %d groups: the CUDA attention wants 1 to %d query heads for each group", s.H, s.G, most_rows<128>());
    if (branch == SLC && s.slc_block != 16 && s.slc_block != 32 && (s.slc_block < KEY_TILE || s.slc_block % KEY_TILE))
        fail_usage("selection blocks of %d tokens: the CUDA attention has 16, 32 and multiples of 64; choose one of them, or the CPU", s.slc_block);
}
// Calls f(std::integral_constant<int, D>()) for the head dimension D.
template <class F>
inline void with_head_dimension(int D, F f) {
    switch (D) {
        case 16: return f(std::integral_constant<int, 16>());
        case 32: return f(std::integral_constant<int, 32>());
        case 64: return f(std::integral_constant<int, 64>());
        case 128: return f(std::integral_constant<int, 128>());
        default: fail_usage("a head dimension of %d: the CUDA attention has 16, 32, 64 and 128; choose one of them, or the CPU", D);
    }
}
// Threads of a block that owns a tile of queries: as many warps as its rows fill.
template <int D>
inline unsigned query_tile_threads(const AttentionShape& a) {
    constexpr int warp_rows = 16 * row_pieces<D>();
    return unsigned((a.heads * a.tile_tokens + warp_rows - 1) / warp_rows * 32);
}
// Bytes that DynamicShared hands out for the pieces.
inline size_t shared_bytes(std::initializer_list<size_t> pieces) {
    size_t sum = 0;
    for (const size_t bytes : pieces) sum += (bytes + 127) / 128 * 128;
    return sum;
}

template <Branch branch, int D>
inline void launch_attention_forward(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const uint32_t* selection, const NsaShape& s,
                                     cudaStream_t stream) {
    const AttentionShape a = attention_shape<D>(branch, s, 0);
    const unsigned blocks = unsigned(a.tiles * a.batch_groups), threads = query_tile_threads<D>(a);
    const size_t query_tile = most_rows<D>() * D * sizeof(bf16), key_tiles = 2 * KEY_TILE * D * sizeof(bf16);
    const size_t bytes = shared_bytes({query_tile, key_tiles, key_tiles, branch == SLC ? tile_words(a.key_stride) * sizeof(uint32_t) : 0});
    launch<attention_forward_kernel<branch, D>>(blocks, threads, bytes, stream, out, lse, q, k, v, selection, a);
}
template <Branch branch, int D>
inline void launch_attention_backward(float* dq, bf16* dk, bf16* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                                      const float* row_dot, const float* lse_gated, const uint32_t* selection, const NsaShape& s,
                                      cudaStream_t stream) {
    const AttentionShape a = attention_shape<D>(branch, s, 0);
    if (a.keys == 0) return;  // nothing to add to dq, no element of dk and dv
    const size_t query_tile = most_rows<D>() * D * sizeof(bf16), tiles = 2 * KEY_TILE * D * sizeof(bf16), statistics = 2 * KEY_TILE * sizeof(float);
    const unsigned query_blocks = unsigned(a.tiles * a.batch_groups), threads = query_tile_threads<D>(a);
    const size_t dq_bytes = shared_bytes({query_tile, query_tile, tiles, tiles, branch == SLC ? tile_words(a.key_stride) * sizeof(uint32_t) : 0});
    launch<attention_dq_kernel<branch, D>>(query_blocks, threads, dq_bytes, stream, dq, dout, q, k, v, row_dot, lse_gated, selection, a);

    const unsigned key_blocks = unsigned((a.keys + KEY_TILE - 1) / KEY_TILE * a.batch_groups);
    const size_t dkdv_bytes = shared_bytes({tiles, tiles, statistics * sub_blocks(branch), statistics, keeps_v<D>() ? tiles / 2 : 0,
                                            branch == SLC ? tile_words(a.queries) * sizeof(uint32_t) : 0});
    launch<attention_dkdv_kernel<branch, D>>(key_blocks, DKDV_THREADS, dkdv_bytes, stream, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, a);
}

// out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys, lse [B, H, queries] the natural logarithm of the softmax's denominator;
// a query without a key: 0, +infinity. q [B, H, queries, D], keys and values [B, G, T, D] (compressed: [B, G, NC, D]), selection
// [B, G, queries, words]. Selection blocks: 16, 32 or a multiple of 64 tokens. Query heads per group: up to 96, no padding but the last row tile's.
inline void attention_forward(Branch branch, bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const uint32_t* selection,
                              const NsaShape& s, cudaStream_t stream) {
    check_attention_shape(branch, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        switch (branch) {
            case CMP: return launch_attention_forward<CMP, D>(out, lse, q, k, v, selection, s, stream);
            case SLC: return launch_attention_forward<SLC, D>(out, lse, q, k, v, selection, s, stream);
            case WIN: return launch_attention_forward<WIN, D>(out, lse, q, k, v, selection, s, stream);
        }
    });
}
// dq [B, H, queries, D] += , dk and dv [keys] = , from dout [B*queries, H*D], row_dot and lse_gated [B, H, queries]; shapes and formulas as in Cpu.
inline void attention_backward(Branch branch, float* dq, bf16* dk, bf16* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                               const float* row_dot, const float* lse_gated, const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    check_attention_shape(branch, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        switch (branch) {
            case CMP: return launch_attention_backward<CMP, D>(dq, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s, stream);
            case SLC: return launch_attention_backward<SLC, D>(dq, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s, stream);
            case WIN: return launch_attention_backward<WIN, D>(dq, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s, stream);
        }
    });
}
// selection [B, G, queries, words] = the blocks that each query and group attends to, by q [B, H, queries, D], kc [B, G, NC, D] and the compressed
// branch's lse [B, H, queries]; chosen_importance [B, G, queries], where given: their share of all importance. The rule is Cpu's.
inline void select_blocks(uint32_t* selection, float* chosen_importance, const bf16* q, const bf16* kc, const float* lse, const NsaShape& s,
                          cudaStream_t stream) {
    check_attention_shape(CMP, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        const AttentionShape a = attention_shape<D>(CMP, s, SCORE_TOKENS);
        const size_t rows = size_t(a.heads) * SCORE_TOKENS, weights = SCORE_TOKENS * WEIGHT_STRIDE;
        const size_t importances = SCORE_TOKENS * size_t(importance_stride(a));
        const size_t bytes = shared_bytes({2 * KEY_TILE * D * sizeof(bf16), rows * D * sizeof(bf16), rows * sizeof(float), weights * sizeof(float),
                                           importances * sizeof(float)});
        if (bytes > MOST_SHARED)
            fail_usage("%d tokens in selection blocks of %d: choosing takes %zu bytes of shared memory, a GPU has %zu; choose larger blocks or fewer tokens",
                       s.first + s.queries, s.slc_block, bytes, MOST_SHARED);
        const unsigned blocks = unsigned(a.tiles * a.batch_groups);
        launch<select_blocks_kernel<D>>(blocks, SCORE_THREADS, bytes, stream, selection, chosen_importance, q, kc, lse, a);
    });
}
