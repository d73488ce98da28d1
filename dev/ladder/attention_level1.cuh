// attention_level1.cuh: the second rung of the ladder, attention with tiles of keys in shared memory and scalar
// arithmetic.
//
// The plain kernels of nsa_kernels.cuh read every key once for each query row that sees it. Here a block of 4 warps
// owns 32 queries of one head and loads each tile of 32 keys once for all of them, so device memory is read 32 times
// less; a query and a key meet in shared memory, and each lane has a key, then a column. What is left is arithmetic,
// one multiply-add at a time, and each one still waits for two loads from shared memory: that is what tensor cores
// change on the next rung.
//
// The forward pass, for any D that fits, with the plain kernel's selection and LSE; training shapes only (first = 0,
// queries = T).
#pragma once
#include "../../nsa_kernels.cuh"

namespace level1 {

constexpr int TILE = 32, WARPS = 4, ROWS = TILE / WARPS;  // queries and keys of a tile; of these, the rows of a warp

// A tile [TILE, D] in fp32; one more column puts the same column of all rows in different banks.
struct Tile {
    float* data;
    int stride;
    __device__ Tile(DynamicShared& shared, int D) : data(shared.take<float>(size_t(TILE) * (D + 1))), stride(D + 1) {}
    __device__ float* row(int i) const { return data + i * stride; }
    // rows 0 .. count-1 = scale * those of in; zeros below
    __device__ void load(const cuda_real* in, int count, float scale, int D) const {
        for (int i = threadIdx.x; i < TILE * D; i += WARPS * 32)
            row(i / D)[i % D] = i / D < count ? float(in[i]) * scale : 0;
    }
    __device__ void clear() const {
        for (int i = threadIdx.x; i < TILE * stride; i += WARPS * 32) data[i] = 0;
    }
};
inline size_t tile_bytes(int D) { return shared_bytes({size_t(TILE) * (D + 1) * sizeof(float)}); }

__device__ inline float dot(const float* a, const float* b, int D) {
    float sum = 0;
    for (int x = 0; x < D; x++) sum += a[x] * b[x];
    return sum;
}
// Whether query `row` of [B, H, T], at position t, sees a key.
__device__ inline bool sees(Branch branch, size_t row, int t, int key, const uint32_t* selection, const NsaShape& s) {
    if (branch == CMP) return key < s.cmp_blocks(t + 1);
    if (key > t || (branch == WIN && !s.sees_all && t - key >= s.window)) return false;
    return branch != SLC || is_selected(plain::Query(row, selection, s).mask, key / s.slc_block);
}
// visible [TILE]: for each query of a tile, bit i is set where it sees key key0 + i. Returns whether one of them sees
// one. Begins and ends with a barrier.
__device__ inline bool find_visible(unsigned* visible, Branch branch, size_t first_row, int t0, int key0, int keys,
                                    const uint32_t* selection, const NsaShape& s) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ROWS, key = key0 + lane;
    __syncthreads();  // the last tile is no longer used
    for (int i = first; i < first + ROWS; i++) {
        const bool yes = t0 + i < s.T && key < keys && sees(branch, first_row + i, t0 + i, key, selection, s);
        const unsigned bits = __ballot_sync(~0u, yes);
        if (lane == 0) visible[i] = bits;
    }
    __syncthreads();
    return __any_sync(~0u, visible[lane] != 0);
}
// sums [D] += the rows i of a tile, times lane i's weight, for the set bits i of `which`
__device__ inline void add_rows(float* sums, const Tile& tile, float weight, unsigned which, int D) {
    for (int i = 0; i < TILE; i++) {
        const float w = __shfl_sync(~0u, weight, i);
        if (which >> i & 1)
            for (int x = threadIdx.x % 32; x < D; x += 32) sums[x] += w * tile.row(i)[x];
    }
}

HOST_DEVICE inline int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }
// The tiles of keys that queries t0 .. t0 + TILE - 1 may see: begin .. end-1
__device__ inline KeyRange key_tiles(Branch branch, int t0, const NsaShape& s) {
    const int last = min(t0 + TILE, s.T), end = branch == CMP ? s.cmp_blocks(last) : last;
    return {branch == WIN && !s.sees_all ? max(0, t0 + 1 - s.window) / TILE : 0, tiles_of(end)};
}

// As plain::forward_kernel. One block per 32 queries of a head.
__global__ void __launch_bounds__(WARPS * 32, 1)
    forward_kernel(Branch branch, cuda_real* out, float* lse, const cuda_real* q, const cuda_real* k,
                   const cuda_real* v, const uint32_t* selection, NsaShape s, float scale) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const Tile queries(shared, s.D), keys(shared, s.D), values(shared, s.D), sums(shared, s.D);
    unsigned* visible = shared.take<unsigned>(TILE);
    float2* softmax = shared.take<float2>(TILE);  // largest score, sum of the exponentials
    const int tiles_of_head = tiles_of(s.T), head = blockIdx.x / tiles_of_head;  // of all sequences
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t0 = blockIdx.x % tiles_of_head * TILE;
    const int stride = s.key_stride(branch);
    const size_t first_row = size_t(head) * s.T + t0, group = size_t(head / (s.H / s.G)) * stride;
    queries.load(q + first_row * s.D, s.T - t0, scale, s.D);
    sums.clear();
    if (threadIdx.x < TILE) softmax[threadIdx.x] = make_float2(-INFINITY, 0);
    const KeyRange tiles = key_tiles(branch, t0, s);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const int key0 = tile * TILE;
        if (!find_visible(visible, branch, first_row, t0, key0, stride, selection, s)) continue;
        keys.load(k + (group + key0) * s.D, stride - key0, 1, s.D);
        values.load(v + (group + key0) * s.D, stride - key0, 1, s.D);
        __syncthreads();
        for (int row = warp * ROWS; row < (warp + 1) * ROWS; row++) {
            if (!visible[row]) continue;
            const float score = visible[row] >> lane & 1 ? dot(queries.row(row), keys.row(lane), s.D) : -INFINITY;
            const float2 before = softmax[row];
            const float largest = fmaxf(before.x, lane_max(score)), rescale = expf(before.x - largest),
                        weight = expf(score - largest), total = before.y * rescale + lane_sum(weight);
            __syncwarp();  // all have read it
            if (lane == 0) softmax[row] = make_float2(largest, total);
            for (int x = lane; x < s.D; x += 32) sums.row(row)[x] *= rescale;
            add_rows(sums.row(row), values, weight, visible[row], s.D);
        }
    }
    __syncthreads();
    for (int row = warp * ROWS; row < (warp + 1) * ROWS && t0 + row < s.T; row++) {
        const float total = softmax[row].y, inverse = total > 0 ? 1 / total : 0;
        for (int x = lane; x < s.D; x += 32) out[(first_row + row) * s.D + x] = cuda_real(sums.row(row)[x] * inverse);
        if (lane == 0) lse[first_row + row] = total > 0 ? softmax[row].x + logf(total) : INFINITY;
    }
}

inline void attention_forward(Branch branch, cuda_real* out, float* lse, const cuda_real* q, const cuda_real* k,
                              const cuda_real* v, const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    const size_t bytes = 4 * tile_bytes(s.D) + shared_bytes({TILE * sizeof(unsigned), TILE * sizeof(float2)});
    launch<forward_kernel>(unsigned(s.B * s.H * tiles_of(s.T)), WARPS * 32, bytes, stream, branch, out, lse, q, k, v,
                           selection, s, float(s.scale()));
}

}  // namespace level1
