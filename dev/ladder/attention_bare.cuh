// attention_bare.cuh: the third rung of the ladder, attention on bare tensor cores. A warp is a block and owns 16
// queries of one head. It reads every fragment of an mma from device memory, where it lies: no shared memory, no
// ldmatrix, no copies that run ahead, no other warp. So this is what mma_m16n8k16 wants of its 32 lanes, and nothing
// else:
//
//     a, 16 x 16: lane l has rows l / 4 and l / 4 + 8, columns l % 4 * 2 and those 8 further, two neighbours a register
//     b, 16 x 8:  rows l % 4 * 2 and those 8 further, column l / 4
//     c, 16 x 8:  rows l / 4 and l / 4 + 8, columns l % 4 * 2 and the next
//
// The c of two products side by side has the places of an a: so the scores become a factor without leaving the
// registers. What is left is to wait: each product waits for three loads from device memory, which the next rung brings
// into shared memory before they are wanted, for eight products at once.
//
// Training shapes only.
#pragma once
#include "attention_level1.cuh"

#ifndef PRECISION_FP32

namespace bare {

using bf16 = __nv_bfloat16;
constexpr int ROWS = 16, KEYS = 16;  // of a warp; of a step of its loop

__device__ inline unsigned pair_at(const bf16* p) { return *reinterpret_cast<const unsigned*>(p); }

// a = columns x .. x+15 of 16 rows; the last of `rows` stands for those below it.
template <int D>
__device__ inline void load_a_of_rows(unsigned (&a)[4], const bf16* in, int rows, int x) {
    const int lane = threadIdx.x % 32, column = x + lane % 4 * 2;
    for (int i = 0; i < 2; i++) {
        const bf16* row = in + size_t(min(lane / 4 + 8 * i, rows - 1)) * D + column;
        a[i] = pair_at(row);
        a[i + 2] = pair_at(row + 8);
    }
}
// b = columns x .. x+15 of rows row .. row+7 of a matrix, transposed: the keys of a product with queries
template <int D>
__device__ inline void load_b_of_rows(unsigned (&b)[2], const bf16* in, int rows, int row, int x) {
    const int lane = threadIdx.x % 32;
    const bf16* from = in + size_t(min(row + lane / 4, rows - 1)) * D + x + lane % 4 * 2;
    b[0] = pair_at(from);
    b[1] = pair_at(from + 8);
}
// b = columns x .. x+7 of rows row .. row+15: the values of a product with weights. Neighbours in a register come from
// two rows.
template <int D>
__device__ inline void load_b_of_columns(unsigned (&b)[2], const bf16* in, int rows, int row, int x) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 2; i++) {
        const int low = row + 8 * i + lane % 4 * 2;
        const bf16* column = in + x + lane / 4;
        b[i] =
            pack_bf16(float(column[size_t(min(low, rows - 1)) * D]), float(column[size_t(min(low + 1, rows - 1)) * D]));
    }
}
// c [16, KEYS] = a rows^T, for the 16 rows (keys or values) from `row` on
template <int D>
__device__ inline void multiply_rows(float (&c)[KEYS / 8][4], const unsigned (&a)[D / 16][4], const bf16* in, int rows,
                                     int row) {
    for (int n = 0; n < KEYS / 8; n++)
        for (int x = 0; x < D / 16; x++) {
            unsigned b[2];
            load_b_of_rows<D>(b, in, rows, row + n * 8, x * 16);
            mma_m16n8k16(c[n], a[x], b, c[n]);
        }
}
// sums [16, D] += weights [16, KEYS] times the 16 rows from `row` on
template <int D>
__device__ inline void add_rows(float (&sums)[D / 8][4], const float (&weights)[KEYS / 8][4], const bf16* in, int rows,
                                int row) {
    const unsigned a[4] = {pack_bf16(weights[0][0], weights[0][1]), pack_bf16(weights[0][2], weights[0][3]),
                           pack_bf16(weights[1][0], weights[1][1]), pack_bf16(weights[1][2], weights[1][3])};
    for (int x = 0; x < D / 8; x++) {
        unsigned b[2];
        load_b_of_columns<D>(b, in, rows, row, x * 8);
        mma_m16n8k16(sums[x], a, b, sums[x]);
    }
}

// What a warp works on.
struct Tile {
    Branch branch;
    const uint32_t* selection;
    int t0, stride, begin, end;  // the first query; keys of a group, and those to go through
    size_t first_row, group;     // of queries and keys
    __device__ Tile(Branch b, const uint32_t* chosen, const NsaShape& s) : branch(b), selection(chosen) {
        const int tiles = (s.T + ROWS - 1) / ROWS, which = int(blockIdx.x) / tiles;
        t0 = int(blockIdx.x) % tiles * ROWS;
        stride = s.key_stride(branch);
        const KeyRange range = level1::key_tiles(branch, t0, s);
        begin = range.begin * level1::TILE;
        end = min(range.end * level1::TILE, stride);
        first_row = size_t(which) * s.T + t0;
        group = size_t(which / (s.H / s.G)) * stride;
    }
    // This lane's rows and keys of a c: i = 0 or 1, e = 0 .. 3.
    __device__ int row(int i) const { return int(threadIdx.x) / 4 + 8 * i; }
    __device__ bool sees(int key0, int n, int e, const NsaShape& s) const {
        const int r = row(e / 2), key = key0 + n * 8 + int(threadIdx.x) % 4 * 2 + e % 2;
        return t0 + r < s.T && key < stride && level1::sees(branch, first_row + r, t0 + r, key, selection, s);
    }
};

// As plain::forward_kernel. One warp per 16 queries of a head.
template <int D>
__global__ void __launch_bounds__(32)
    forward_kernel(Branch branch, bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                   const uint32_t* selection, NsaShape s, float scale) {
    wait_for_earlier_kernels();
    const Tile tile(branch, selection, s);
    unsigned q_rows[D / 16][4];
    for (int x = 0; x < D / 16; x++) load_a_of_rows<D>(q_rows[x], q + tile.first_row * D, s.T - tile.t0, x * 16);
    float sums[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
    for (int key0 = tile.begin; key0 < tile.end; key0 += KEYS) {
        float p[KEYS / 8][4] = {};
        multiply_rows<D>(p, q_rows, k + tile.group * D, tile.stride, key0);
        float most[2] = {largest[0], largest[1]};
        for (int n = 0; n < KEYS / 8; n++)
            for (int e = 0; e < 4; e++) {
                p[n][e] = tile.sees(key0, n, e, s) ? p[n][e] * scale : -INFINITY;
                most[e / 2] = fmaxf(most[e / 2], p[n][e]);
            }
        for (int i = 0; i < 2; i++) {
            most[i] = row_max(most[i]);
            const bool none = most[i] == -INFINITY;  // this row has seen no key yet
            const float rescale = none ? 1 : expf(largest[i] - most[i]);
            total[i] *= rescale;
            for (int x = 0; x < D / 8; x++) {
                sums[x][2 * i] *= rescale;
                sums[x][2 * i + 1] *= rescale;
            }
            for (int n = 0; n < KEYS / 8; n++)
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    p[n][e] = none ? 0 : expf(p[n][e] - most[i]);
                    total[i] += p[n][e];
                }
            largest[i] = most[i];
        }
        add_rows<D>(sums, p, v + tile.group * D, tile.stride, key0);
    }
    for (int i = 0; i < 2; i++) {
        const float sum = row_sum(total[i]), inverse = sum > 0 ? 1 / sum : 0;
        if (tile.t0 + tile.row(i) >= s.T) continue;
        const size_t row = tile.first_row + tile.row(i);
        for (int x = 0; x < D / 8; x++)
            for (int e = 0; e < 2; e++)
                out[row * D + x * 8 + threadIdx.x % 4 * 2 + e] = bf16(sums[x][2 * i + e] * inverse);
        if (threadIdx.x % 4 == 0) lse[row] = sum > 0 ? largest[i] + logf(sum) : INFINITY;
    }
}

inline void attention_forward(Branch branch, bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                              const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    const unsigned tiles = unsigned(s.B * s.H * ((s.T + ROWS - 1) / ROWS));
    with_head_dimension(s.D, [&](auto D) {
        launch<forward_kernel<D()>>(tiles, 32, 0, stream, branch, out, lse, q, k, v, selection, s, float(s.scale()));
    });
}

}  // namespace bare

#endif
