// tiles.cuh: tiles of bf16 in shared memory and their products on tensor cores. The attention kernels
// (nsa_kernels.cuh, attention_tiles.cuh, attention_gathered.cuh) are built from these; nothing here knows of attention.
//
// A tile is [rows, D] in chunks of 16 bytes. Chunk c of row r is stored at place c ^ (r % 8) of its row (rows shorter
// than 128 bytes: the same within 128 bytes), so that the eight rows that ldmatrix reads at once are in different
// banks. A tile may also lie in pieces of fewer COLUMNS than D, one behind the other, each of KEY_TILE rows.
#pragma once
#include "common.cuh"
#include "vectors.cuh"

using bf16 = __nv_bfloat16;

constexpr int KEY_TILE = 64;  // rows of a tile of keys, and of the tiles of tokens that dK and dV walk

template <int D, int COLUMNS = D>
__device__ inline int chunk_at(int row, int chunk) {
    if constexpr (COLUMNS < D) {
        const int piece = row / KEY_TILE * (D / COLUMNS) + chunk / (COLUMNS / 8);
        return piece * KEY_TILE * COLUMNS + chunk_at<COLUMNS>(row % KEY_TILE, chunk % (COLUMNS / 8));
    }
    constexpr int chunks = D / 8;
    constexpr int rows_per_line = chunks < 8 ? 8 / chunks : 1;
    constexpr int swizzled = chunks < 8 ? chunks : 8;
    return (row * chunks + (chunk ^ row / rows_per_line % swizzled)) * 8;
}

// tile [KEY_TILE, D] = rows 0 .. valid-1 of in, which are `stride` elements apart; zeros below. Asynchronous. THREADS
// is the block's size: as the compiler knows it, a thread's rows are at fixed distances in the tile.
template <int D, int THREADS, int COLUMNS = D>
__device__ inline void copy_tile(bf16* tile, const bf16* in, size_t stride, int valid) {
    constexpr int step = THREADS / (D / 8);
    static_assert(step % 8 == 0, "the chunks of a row change places by row % 8");
    const int first = threadIdx.x / (D / 8), chunk = threadIdx.x % (D / 8);
    if (valid >= KEY_TILE) {
        bf16* const first_chunk = tile + chunk_at<D, COLUMNS>(first, chunk);
        in += first * stride + chunk * 8;
#pragma unroll
        for (int done = 0; done < KEY_TILE; done += step, in += step * stride)
            if (done + step <= KEY_TILE || first < KEY_TILE - done) cp_async_16(first_chunk + done * COLUMNS, in);
    } else {
#pragma unroll 1
        for (int row = first; row < KEY_TILE; row += step)
            cp_async_16(tile + chunk_at<D, COLUMNS>(row, chunk), row < valid ? in + row * stride + chunk * 8 : in,
                        row < valid);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Fragments of m16n8k16, by the PTX manual. An a or b is a register with two bf16. Lane 4 g + t of the warp holds
//   of A (16 x 16)  a[0], a[1]: rows g and g + 8 in columns 2 t, 2 t + 1; a[2], a[3]: the same rows, 8 columns on
//   of B (16 x 8)   b[0]: rows 2 t, 2 t + 1 of column g; b[1]: 8 rows on
//   of C (16 x 8)   c[0], c[1]: row g in columns 2 t, 2 t + 1; c[2], c[3]: row g + 8
// So of two C side by side, rounded to bf16, the first is a[0], a[1] and the second a[2], a[3] in the same lane.

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

// ---------------------------------------------------------------------------------------------------------------------
// Products. M, N and K count pieces of 16 rows or columns.

// The A fragments of rows row.. of a tile, all D columns.
template <int D, int M>
__device__ inline void load_rows(unsigned (&a)[M][D / 16][4], const bf16* tile, int row) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int x = 0; x < D; x += 16) load_a<D>(a[m][x / 16], tile, row + m * 16, x);
}
// c (M*16 x N*16) += A B^T; A: rows a_row.. of its tile, B: rows b_row.. of its tile, both over all D columns.
template <int D, int M, int N>
__device__ inline void multiply_rows(float (&c)[M][2 * N][4], const bf16* a_tile, int a_row, const bf16* b_tile,
                                     int b_row) {
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
// The same with A (M*16 x D) in registers.
template <int D, int M, int N>
__device__ inline void multiply_rows(float (&c)[M][2 * N][4], const unsigned (&a)[M][D / 16][4], const bf16* b_tile,
                                     int b_row) {
#pragma unroll
    for (int k = 0; k < D; k += 16)
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned b[4];
            load_b_transposed<D>(b, b_tile, b_row + n * 16, k);
#pragma unroll
            for (int m = 0; m < M; m++) multiply_pair(c[m][2 * n], c[m][2 * n + 1], a[m][k / 16], b);
        }
}
// a = columns 16 k .. 16 k + 15 of P, as a product left it, rounded to bf16: the C fragments of two neighbouring
// products are the A fragment of the next one, see above, so P never goes through shared memory.
template <int N>
__device__ inline void round_piece(unsigned (&a)[4], const float (&p)[N][4], int k) {
#pragma unroll
    for (int r = 0; r < 4; r++) a[r] = pack_bf16(p[2 * k + r / 2][r % 2 * 2], p[2 * k + r / 2][r % 2 * 2 + 1]);
}
// c (M*16 x D) += P B; P (M*16 x K*16) as a product left it, rounded to bf16; B: rows b_row.. of its tile.
template <int D, int M, int K>
__device__ inline void multiply_add(float (&c)[M][D / 8][4], const float (&p)[M][2 * K][4], const bf16* b_tile,
                                    int b_row) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) round_piece(a[m], p[m], k);
#pragma unroll
        for (int x = 0; x < D; x += 16) {
            unsigned b[4];
            load_b<D>(b, b_tile, b_row + k * 16, x);
#pragma unroll
            for (int m = 0; m < M; m++) multiply_pair(c[m][x / 8], c[m][x / 8 + 1], a[m], b);
        }
    }
}
template <int M, int N>
__device__ inline void clear(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[m][n][e] = 0;
}
// to [8 N] = factor * row lane / 4 + 8 i of c (16 x 8 N), if it `exists`. All lanes take part: unless registers are
// short the four of a row exchange what they hold, so that each stores 16 bytes, of pieces of 8 columns that are four
// apart.
template <bool EXCHANGE = true, int N>
__device__ inline void store_row(bf16* to, const float (&c)[N][4], int i, float factor, bool exists) {
    const int lane = threadIdx.x % 4;
    unsigned pairs[N];
#pragma unroll
    for (int n = 0; n < N; n++) pairs[n] = pack_bf16(c[n][2 * i] * factor, c[n][2 * i + 1] * factor);
    if constexpr (N < 4 || !EXCHANGE) {
#pragma unroll
        for (int n = 0; n < N && exists; n++) *reinterpret_cast<unsigned*>(to + n * 8 + lane * 2) = pairs[n];
    } else {
#pragma unroll
        for (int step = 1; step <= 2; step *= 2)
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (n & step) continue;
                const bool upper = lane & step;  // keeps the piece with the bit, as its number has it
                const unsigned other = __shfl_xor_sync(~0u, upper ? pairs[n] : pairs[n + step], step);
                if (upper) pairs[n] = other;
                else pairs[n + step] = other;
            }
#pragma unroll
        for (int n = 0; n < N; n += 4)
            if (exists)
                *reinterpret_cast<uint4*>(to + (n + lane) * 8) =
                    make_uint4(pairs[n], pairs[n + 1], pairs[n + 2], pairs[n + 3]);
    }
}
// The largest value, or the sum, of the four lanes that share a row of C.
__device__ inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
