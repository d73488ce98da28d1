// attention_level1.cuh: the second rung of the ladder, attention with tiles of keys in shared memory and scalar
// arithmetic.
//
// The plain kernels of nsa_kernels.cuh read every key once for each query row that sees it. Here a block of 4 warps
// owns 32 queries of one head and loads each tile of 32 keys once for all of them, so device memory is read 32 times
// less; a query and a key meet in shared memory, and each lane has a key, then a column. What is left is arithmetic,
// one multiply-add at a time, and each one still waits for two loads from shared memory: that is what tensor cores
// change on the next rung.
//
// Any D that fits, fp32 arithmetic, the same selection, LSE and gradients as the plain kernels; training shapes only
// (first = 0, queries = T).
#pragma once
#include "../../nsa_kernels.cuh"

namespace level1 {

constexpr int TILE = 32, WARPS = 4, ROWS = TILE / WARPS;  // queries and keys of a tile; of these, the rows of a warp

using plain::Query;

// A tile [TILE, D] in fp32; one more column puts the same column of all rows in different banks.
struct Tile {
    float* data;
    int stride;
    __device__ Tile(DynamicShared& shared, int D) : data(shared.take<float>(size_t(TILE) * (D + 1))), stride(D + 1) {}
    __device__ float* row(int i) const { return data + i * stride; }
    // rows 0 .. count-1 = scale * those of in, `step` elements apart; zeros below
    __device__ void load(const cuda_real* in, size_t step, int count, float scale, int D) const {
        for (int i = threadIdx.x; i < TILE * D; i += WARPS * 32) {
            const int r = i / D, x = i % D;
            row(r)[x] = r < count ? float(in[r * step + x]) * scale : 0;
        }
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
    if (key > t || (branch == WIN && !s.full && t - key >= s.window)) return false;
    return branch != SLC || is_selected(Query(row, selection, s).mask, key / s.slc_block);
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

// The part of a block's work that is the same in all kernels: which tile of which (sequence, head) or (sequence,
// group).
struct Place {
    int tile, which;
    __device__ explicit Place(int tiles) : tile(int(blockIdx.x) % tiles), which(int(blockIdx.x) / tiles) {}
};
HOST_DEVICE inline int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }
// The tiles of keys that queries t0 .. t0 + TILE - 1 may see: begin .. end-1
__device__ inline KeyRange key_tiles(Branch branch, int t0, const NsaShape& s) {
    const int last = min(t0 + TILE, s.T), end = branch == CMP ? s.cmp_blocks(last) : last;
    return {branch == WIN && !s.full ? max(0, t0 + 1 - s.window) / TILE : 0, tiles_of(end)};
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
    const Place at(tiles_of(s.T));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t0 = at.tile * TILE, stride = s.key_stride(branch);
    const size_t first_row = size_t(at.which) * s.T + t0, group = size_t(at.which / (s.H / s.G)) * stride;
    queries.load(q + first_row * s.D, s.D, s.T - t0, scale, s.D);
    sums.clear();
    if (threadIdx.x < TILE) softmax[threadIdx.x] = make_float2(-INFINITY, 0);
    const KeyRange tiles = key_tiles(branch, t0, s);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const int key0 = tile * TILE;
        if (!find_visible(visible, branch, first_row, t0, key0, stride, selection, s)) continue;
        keys.load(k + (group + key0) * s.D, s.D, stride - key0, 1, s.D);
        values.load(v + (group + key0) * s.D, s.D, stride - key0, 1, s.D);
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

// As plain::dq_kernel. One block per 32 queries of a head.
__global__ void __launch_bounds__(WARPS * 32, 1)
    dq_kernel(Branch branch, BackwardArrays<cuda_real, float> d, InputArrays<cuda_real> in, NsaShape s, float scale) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const Tile queries(shared, s.D), gradients(shared, s.D), keys(shared, s.D), values(shared, s.D), sums(shared, s.D);
    unsigned* visible = shared.take<unsigned>(TILE);
    const Place at(tiles_of(s.T));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t0 = at.tile * TILE, stride = s.key_stride(branch);
    const size_t first_row = size_t(at.which) * s.T + t0, group = size_t(at.which / (s.H / s.G)) * stride;
    queries.load(in.q + first_row * s.D, s.D, s.T - t0, scale, s.D);
    gradients.load(d.dout + Query(first_row, in.selection, s).dout * s.D, size_t(s.H) * s.D, s.T - t0, 1, s.D);
    sums.clear();
    const KeyRange tiles = key_tiles(branch, t0, s);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
        const int key0 = tile * TILE;
        if (!find_visible(visible, branch, first_row, t0, key0, stride, in.selection, s)) continue;
        keys.load(in.k + (group + key0) * s.D, s.D, stride - key0, 1, s.D);
        values.load(in.v + (group + key0) * s.D, s.D, stride - key0, 1, s.D);
        __syncthreads();
        for (int row = warp * ROWS; row < (warp + 1) * ROWS; row++) {
            if (!visible[row]) continue;
            float ds = 0;
            if (visible[row] >> lane & 1) {
                const float p = expf(dot(queries.row(row), keys.row(lane), s.D) - d.lse_gated[first_row + row]);
                ds = p * (dot(gradients.row(row), values.row(lane), s.D) - d.row_dot[first_row + row]);
            }
            add_rows(sums.row(row), keys, ds, visible[row], s.D);
        }
    }
    __syncthreads();
    for (int row = warp * ROWS; row < (warp + 1) * ROWS && t0 + row < s.T; row++)
        for (int x = lane; x < s.D; x += 32) {
            float* to = d.dq + (first_row + row) * s.D + x;
            *to = (d.add ? *to : 0) + sums.row(row)[x] * scale;
        }
}

// As plain::dkdv_kernel. One block per 32 keys of a group; tiles of 32 queries go by, head by head.
__global__ void __launch_bounds__(WARPS * 32, 1)
    dkdv_kernel(Branch branch, BackwardArrays<cuda_real, float> d, InputArrays<cuda_real> in, NsaShape s, float scale) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const Tile queries(shared, s.D), gradients(shared, s.D), keys(shared, s.D), values(shared, s.D),
        dk_sums(shared, s.D), dv_sums(shared, s.D);
    unsigned* visible = shared.take<unsigned>(TILE);
    const int stride = s.key_stride(branch), heads = s.H / s.G;
    const Place at(tiles_of(stride));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key0 = at.tile * TILE;
    const size_t group = size_t(at.which) * stride;
    keys.load(in.k + (group + key0) * s.D, s.D, stride - key0, scale, s.D);
    values.load(in.v + (group + key0) * s.D, s.D, stride - key0, 1, s.D);
    dk_sums.clear(), dv_sums.clear();
    const int begin = query_range(branch, key0, s).begin / TILE;
    const int end = tiles_of(min(s.T, query_range(branch, min(key0 + TILE, stride) - 1, s).end));
    for (int head = 0; head < heads; head++)
        for (int tile = begin; tile < end; tile++) {
            const int t0 = tile * TILE;
            const size_t first_row = (size_t(at.which) * heads + head) * s.T + t0;
            if (!find_visible(visible, branch, first_row, t0, key0, stride, in.selection, s)) continue;
            queries.load(in.q + first_row * s.D, s.D, s.T - t0, 1, s.D);
            gradients.load(d.dout + Query(first_row, in.selection, s).dout * s.D, size_t(s.H) * s.D, s.T - t0, 1, s.D);
            __syncthreads();
            for (int row = warp * ROWS; row < (warp + 1) * ROWS; row++) {  // keys; lanes are queries
                const bool yes = visible[lane] >> row & 1;
                const unsigned seen_by = __ballot_sync(~0u, yes);
                float p = 0, ds = 0;
                if (yes) {
                    p = expf(dot(keys.row(row), queries.row(lane), s.D) - d.lse_gated[first_row + lane]);
                    ds = p * (dot(values.row(row), gradients.row(lane), s.D) - d.row_dot[first_row + lane]);
                }
                add_rows(dk_sums.row(row), queries, ds, seen_by, s.D);
                add_rows(dv_sums.row(row), gradients, p, seen_by, s.D);
            }
        }
    __syncthreads();
    for (int row = warp * ROWS; row < (warp + 1) * ROWS && key0 + row < stride; row++)
        for (int x = lane; x < s.D; x += 32) {
            const size_t to = (group + key0 + row) * s.D + x;
            d.dk[to] = cuda_real(dk_sums.row(row)[x] * scale), d.dv[to] = cuda_real(dv_sums.row(row)[x]);
        }
}

// Shared memory of a block with so many tiles.
inline size_t block_bytes(int tiles, int D) {
    return size_t(tiles) * tile_bytes(D) + shared_bytes({TILE * sizeof(unsigned), TILE * sizeof(float2)});
}

inline void attention_forward(Branch branch, cuda_real* out, float* lse, const cuda_real* q, const cuda_real* k,
                              const cuda_real* v, const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    launch<forward_kernel>(unsigned(s.B * s.H * tiles_of(s.T)), WARPS * 32, block_bytes(4, s.D), stream, branch, out,
                           lse, q, k, v, selection, s, float(s.scale()));
}
inline void backward_keys(Branch branch, const BackwardArrays<cuda_real, float>& d, const InputArrays<cuda_real>& in,
                          const NsaShape& s, cudaStream_t stream) {
    const int keys = branch == CMP ? s.cmp_capacity() : s.T;
    if (keys == 0) return;
    launch<dkdv_kernel>(unsigned(s.B * s.G * tiles_of(keys)), WARPS * 32, block_bytes(6, s.D), stream, branch, d, in, s,
                        float(s.scale()));
}
inline void attention_backward(Branch branch, const BackwardArrays<cuda_real, float>& d,
                               const InputArrays<cuda_real>& in, const NsaShape& s, cudaStream_t stream) {
    launch<dq_kernel>(unsigned(s.B * s.H * tiles_of(s.T)), WARPS * 32, block_bytes(5, s.D), stream, branch, d, in, s,
                      float(s.scale()));
    backward_keys(branch, d, in, s, stream);
}

}  // namespace level1
