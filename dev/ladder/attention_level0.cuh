// attention_level0.cuh: the first rung of the ladder. The three attention
// branches and block selection as a GPU can run them with the fewest
// ideas: one warp per query row (or per key, or per choice), fp32 arithmetic, no tensor cores, no atomics. Any D, l, d,
// l', heads per group; fp32 or bf16. It is the path of PRECISION=FP32, and what the faster kernels of nsa_kernels.cuh
// are compared with.
//
// What a warp does: its 32 lanes take 32 keys, one dot product each; then they take the columns of the output, and walk
// the 32 weights that now lie in shared memory. Everything is read from device memory again by every row, which is why
// the next rungs are faster. The same input gives the same bits: each output has one owner, and the order of every sum
// is fixed by the shapes.
#pragma once
#include <cmath>
#include <cstdint>

#include "../../nsa_cpu.h"
#include "../../lib/cuda_common.cuh"

namespace level0 {

constexpr int WARPS =
    4;  // of a block; the bounds ask for one block per multiprocessor, else ptxas saves registers until it spills
constexpr unsigned ALL = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------------------------
// What a query sees.

struct KeyRange {
    int begin, end;
};
__device__ inline int blocks_before(int tokens, const NsaShape& s) {
    return tokens < s.l ? 0 : (tokens - s.l) / s.d + 1;
}
__device__ inline bool is_selected(const uint32_t* mask, int block) { return mask[block / 32] >> (block % 32) & 1; }

// The keys of query t are the union of these ranges: one, or in the selected branch one per block, empty where the
// block was not chosen.
__device__ inline int range_count(Branch branch, int t, const NsaShape& s) {
    return branch == SLC ? t / s.slc_block + 1 : 1;
}
__device__ inline KeyRange key_range(Branch branch, int range, int t, const uint32_t* mask, const NsaShape& s) {
    if (branch == CMP) return {0, blocks_before(t + 1, s)};
    if (branch == WIN) return {s.full || t < s.window ? 0 : t - s.window + 1, t + 1};
    const int begin = range * s.slc_block, end = min(begin + s.slc_block, t + 1);
    return {begin, is_selected(mask, range) ? end : begin};
}

// Where a query's rows lie. row = (b*H + head)*queries + j counts q, the branch outputs and the LSEs.
struct Query {
    int t;                 // position
    size_t group;          // b*G + g
    size_t dout;           // its row in [B*queries, H]
    const uint32_t* mask;  // its selection
    __device__ Query(size_t row, const uint32_t* selection, const NsaShape& s) {
        const int j = int(row % s.queries), head = int(row / s.queries % s.H),
                  words = ((s.T + s.slc_block - 1) / s.slc_block + 31) / 32;
        const size_t b = row / s.queries / s.H;
        t = s.first + j, group = b * s.G + head / (s.H / s.G), dout = (b * s.queries + j) * s.H + head;
        mask = selection ? selection + (group * s.queries + j) * words : nullptr;
    }
};
__device__ inline int key_stride(Branch branch, const NsaShape& s) {
    return branch == CMP ? blocks_before(s.T, s) : s.T;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums over the lanes, and dot products of a row in shared memory with one in device memory.

__device__ inline float warp_sum(float x) {
    for (int flip = 16; flip > 0; flip /= 2) x += __shfl_xor_sync(ALL, x, flip);
    return x;
}
__device__ inline float warp_max(float x) {
    for (int flip = 16; flip > 0; flip /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, flip));
    return x;
}
template <class real>
__device__ inline float dot(const float* a, const real* b, int D) {
    float sum = 0;
    for (int x = 0; x < D; x++) sum += a[x] * float(b[x]);
    return sum;
}
// shared [D] = scale * row, by the whole warp
template <class real>
__device__ inline void load_row(float* shared, const real* row, float scale, int D) {
    for (int x = threadIdx.x % 32; x < D; x += 32) shared[x] = float(row[x]) * scale;
}

// ---------------------------------------------------------------------------------------------------------------------
// out = softmax(q k^T / sqrt(D)) v and its LSE, one warp per query row;
// softmax is accumulated over 32 keys at a time (Milakov & Gimelshein 2018).
template <class real>
__global__ void __launch_bounds__(WARPS * 32, 1)
    forward_kernel(Branch branch, real* out, float* lse, const real* q, const real* k, const real* v,
                   const uint32_t* selection, NsaShape s, float scale, size_t rows) {
    DynamicShared shared;
    const int D = s.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *query = shared.take<float>(WARPS * (2 * D + 32)) + warp * (2 * D + 32), *sums = query + D,
          *weights = sums + D;
    const size_t row = size_t(blockIdx.x) * WARPS + warp;
    if (row >= rows) return;  // a whole warp; there is no barrier below
    const Query at(row, selection, s);
    k += at.group * key_stride(branch, s) * D, v += at.group * key_stride(branch, s) * D;
    load_row(query, q + row * D, scale, D);
    for (int x = lane; x < D; x += 32) sums[x] = 0;  // a column belongs to one lane from here to the end
    __syncwarp();
    float largest = -INFINITY, total = 0;  // total: of the keys of this lane
    for (int range = 0; range < range_count(branch, at.t, s); range++) {
        const KeyRange keys = key_range(branch, range, at.t, at.mask, s);
        for (int key0 = keys.begin; key0 < keys.end; key0 += 32) {
            const int key = key0 + lane, count = min(32, keys.end - key0);
            const float score = lane < count ? dot(query, k + size_t(key) * D, D) : -INFINITY;
            // at first largest = -inf: rescale 0
            const float m = fmaxf(largest, warp_max(score)), rescale = expf(largest - m), weight = expf(score - m);
            largest = m, total = total * rescale + weight;
            weights[lane] = weight;
            __syncwarp();
            for (int x = lane; x < D; x += 32) {
                float sum = sums[x] * rescale;
                for (int i = 0; i < count; i++) sum += weights[i] * float(v[size_t(key0 + i) * D + x]);
                sums[x] = sum;
            }
            __syncwarp();  // the weights are read; the next 32 may be written
        }
    }
    total = warp_sum(total);
    const float inverse = total > 0 ? 1 / total : 0;  // no key: out 0, LSE +infinity
    for (int x = lane; x < D; x += 32) out[row * D + x] = real(sums[x] * inverse);
    if (lane == 0) lse[row] = total > 0 ? largest + logf(total) : INFINITY;
}

// dq = dS k / sqrt(D), or += with `add`, one warp per query row.  P' = e^(score - lse_gated),  dS = P' o (dout v^T -
// row_dot)
template <class real>
__global__ void __launch_bounds__(WARPS * 32, 1)
    backward_queries_kernel(Branch branch, float* dq, bool add, const real* dout, const real* q, const real* k,
                            const real* v, const float* row_dot, const float* lse_gated, const uint32_t* selection,
                            NsaShape s, float scale, size_t rows) {
    DynamicShared shared;
    const int D = s.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *query = shared.take<float>(WARPS * (3 * D + 32)) + warp * (3 * D + 32), *gradient = query + D,
          *sums = gradient + D, *weights = sums + D;
    const size_t row = size_t(blockIdx.x) * WARPS + warp;
    if (row >= rows) return;
    const Query at(row, selection, s);
    k += at.group * key_stride(branch, s) * D, v += at.group * key_stride(branch, s) * D;
    load_row(query, q + row * D, scale, D);
    load_row(gradient, dout + at.dout * D, 1, D);
    for (int x = lane; x < D; x += 32) sums[x] = 0;
    __syncwarp();
    const float shift = lse_gated[row], r = row_dot[row];
    for (int range = 0; range < range_count(branch, at.t, s); range++) {
        const KeyRange keys = key_range(branch, range, at.t, at.mask, s);
        for (int key0 = keys.begin; key0 < keys.end; key0 += 32) {
            const int key = key0 + lane, count = min(32, keys.end - key0);
            if (lane < count) {
                const float p = expf(dot(query, k + size_t(key) * D, D) - shift);
                weights[lane] = p * (dot(gradient, v + size_t(key) * D, D) - r);  // dS
            }
            __syncwarp();
            for (int x = lane; x < D; x += 32) {
                float sum = sums[x];
                for (int i = 0; i < count; i++) sum += weights[i] * float(k[size_t(key0 + i) * D + x]);
                sums[x] = sum;
            }
            __syncwarp();
        }
    }
    for (int x = lane; x < D; x += 32) dq[row * D + x] = (add ? dq[row * D + x] : 0) + sums[x] * scale;
}

// dk = dS^T q / sqrt(D), dv = P'^T dout, one warp per key, which walks the heads of its group and the queries that see
// it, 32 at a time.
template <class real>
__global__ void __launch_bounds__(WARPS * 32, 1)
    backward_keys_kernel(Branch branch, real* dk, real* dv, const real* dout, const real* q, const real* k,
                         const real* v, const float* row_dot, const float* lse_gated, const uint32_t* selection,
                         NsaShape s, float scale, size_t rows) {
    DynamicShared shared;
    const int D = s.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = s.H / s.G;
    float *key_row = shared.take<float>(WARPS * (4 * D + 64)) + warp * (4 * D + 64), *value_row = key_row + D,
          *dk_sums = value_row + D, *dv_sums = dk_sums + D;
    float *p_weights = dv_sums + D, *ds_weights = p_weights + 32;
    const size_t row = size_t(blockIdx.x) * WARPS + warp;
    if (row >= rows) return;
    const int stride = key_stride(branch, s), key = int(row % stride), block = key / s.slc_block;
    const size_t bg = row / stride, b = bg / s.G, g = bg % s.G;
    const int begin = branch == CMP ? key * s.d + s.l - 1 : key;
    const int end = branch == WIN && !s.full ? int(min(int64_t(s.T), int64_t(key) + s.window)) : s.T;
    load_row(key_row, k + row * D, scale, D);
    load_row(value_row, v + row * D, 1, D);
    for (int x = lane; x < D; x += 32) dk_sums[x] = dv_sums[x] = 0;
    __syncwarp();
    for (int i = 0; i < h; i++) {
        const size_t head = g * h + i, first_row = (b * s.H + head) * s.T;  // of q, row_dot and lse_gated
        for (int t0 = begin; t0 < end; t0 += 32) {
            const int t = t0 + lane;
            bool sees = t < end;
            if (branch == SLC && sees) sees = is_selected(Query(first_row + t, selection, s).mask, block);
            const unsigned seen_by = __ballot_sync(ALL, sees);
            if (!seen_by) continue;
            if (sees) {
                const float p = expf(dot(key_row, q + (first_row + t) * D, D) - lse_gated[first_row + t]);
                p_weights[lane] = p;
                ds_weights[lane] =
                    p * (dot(value_row, dout + ((b * s.T + t) * s.H + head) * D, D) - row_dot[first_row + t]);
            }
            __syncwarp();
            for (int x = lane; x < D; x += 32) {
                float dk_sum = dk_sums[x], dv_sum = dv_sums[x];
                for (unsigned rest = seen_by; rest; rest &= rest - 1) {
                    const int j = __ffs(int(rest)) - 1;
                    dk_sum += ds_weights[j] * float(q[(first_row + t0 + j) * D + x]);
                    dv_sum += p_weights[j] * float(dout[((b * s.T + t0 + j) * s.H + head) * D + x]);
                }
                dk_sums[x] = dk_sum, dv_sums[x] = dv_sum;
            }
            __syncwarp();
        }
    }
    for (int x = lane; x < D; x += 32) dk[row * D + x] = real(dk_sums[x] * scale), dv[row * D + x] = real(dv_sums[x]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Block selection, one warp per (sequence, group, token); paper eq. 8 to 12. A lane owns every 32nd
// selection block: it sums the weights of the compressed blocks that share tokens with it, over the
// group's heads. Then n-3 rounds find the largest that is left; equal ones go to the lower index.
template <class real>
__global__ void __launch_bounds__(32) select_kernel(uint32_t* selection, float* chosen_importance, const real* q,
                                                    const real* kc, const float* lse, NsaShape s, float scale) {
    DynamicShared shared;
    const int D = s.D, lane = threadIdx.x, h = s.H / s.G, blocks = (s.T + s.slc_block - 1) / s.slc_block,
              words = (blocks + 31) / 32;
    float *queries = shared.take<float>(h * D), *importance = shared.take<float>(blocks);
    uint32_t* mask = shared.take<uint32_t>(words);
    const size_t row = blockIdx.x, bg = row / s.queries;
    const int j = int(row % s.queries), t = s.first + j, last = t / s.slc_block, visible = blocks_before(t + 1, s);
    const bool all_taken = last + 1 <= s.slc_count;
    for (int word = lane; word < words; word += 32) {
        const int bits = all_taken ? min(32, max(0, last + 1 - word * 32)) : 0;
        mask[word] = bits == 32 ? ALL : (1u << bits) - 1;
    }
    float share = 1;
    if (!all_taken) {
        // of the group's first head; the others follow by `queries`
        const size_t first_row = (bg / s.G * s.H + bg % s.G * h) * s.queries + j;
        for (int head = 0; head < h; head++)
            load_row(queries + head * D, q + (first_row + size_t(head) * s.queries) * D, scale, D);
        __syncwarp();
        float sum = 0;
        for (int block = lane; block <= last; block += 32) {
            const int begin = block * s.slc_block, end = begin + s.slc_block;
            float of_block = 0;
            for (int i = max(0, (begin - s.l) / s.d); i < visible && i * s.d < end; i++) {
                const int common =
                    min(end, i * s.d + s.l) - max(begin, i * s.d);  // tokens that compressed block i and this one share
                if (common <= 0) continue;
                float weight = 0;
                for (int head = 0; head < h; head++)
                    weight += expf(dot(queries + head * D, kc + (bg * key_stride(CMP, s) + i) * D, D) -
                                   lse[first_row + size_t(head) * s.queries]);
                of_block += weight * common / s.d;
            }
            importance[block] = of_block, sum += of_block;
        }
        sum = warp_sum(sum);
        __syncwarp();
        float chosen = importance[0] + importance[last - 1] + importance[last];
        __syncwarp();
        auto take = [&](int block) { mask[block / 32] |= 1u << (block % 32), importance[block] = -1; };
        if (lane == 0) take(0), take(last - 1), take(last);
        __syncwarp();
        for (int round = 3; round < s.slc_count; round++) {
            float best = -1;
            int best_block = last + 1;
            for (int block = lane; block <= last; block += 32)
                if (importance[block] > best) best = importance[block], best_block = block;
            for (int flip = 16; flip > 0; flip /= 2) {
                const float other = __shfl_xor_sync(ALL, best, flip);
                const int other_block = __shfl_xor_sync(ALL, best_block, flip);
                if (other > best || (other == best && other_block < best_block)) best = other, best_block = other_block;
            }
            __syncwarp();  // all have looked
            if (lane == 0 && best_block <= last)
                take(best_block), chosen += best;  // NaN importances are never the best
            __syncwarp();
        }
        share = sum > 0 ? chosen / sum : 1;
    }
    __syncwarp();
    for (int word = lane; word < words; word += 32) selection[row * words + word] = mask[word];
    if (chosen_importance && lane == 0) chosen_importance[row] = share;
}

inline unsigned blocks_of_warps(size_t rows) { return unsigned((rows + WARPS - 1) / WARPS); }

}  // namespace level0

// ---------------------------------------------------------------------------------------------------------------------
// What struct Cuda calls. Shapes, "=" and "+=" as in struct Cpu.

template <class real>
void attention_level0_forward(Branch branch, real* out, float* lse, const real* q, const real* k, const real* v,
                              const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    const size_t rows = s.query_rows();
    launch<level0::forward_kernel<real>>(level0::blocks_of_warps(rows), level0::WARPS * 32,
                                         level0::WARPS * (2 * s.D + 32) * sizeof(float), stream, branch, out, lse, q, k,
                                         v, selection, s, float(s.scale()), rows);
}

// Training shapes (first = 0, queries = T).
template <class real>
void attention_level0_backward(Branch branch, float* dq, bool add, real* dk, real* dv, const real* dout, const real* q,
                               const real* k, const real* v, const float* row_dot, const float* lse_gated,
                               const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    const size_t rows = s.query_rows(), keys = branch == CMP ? s.cmp_rows() : s.key_rows();
    const float scale = float(s.scale());
    launch<level0::backward_queries_kernel<real>>(level0::blocks_of_warps(rows), level0::WARPS * 32,
                                                  level0::WARPS * (3 * s.D + 32) * sizeof(float), stream, branch, dq,
                                                  add, dout, q, k, v, row_dot, lse_gated, selection, s, scale, rows);
    if (keys == 0) return;
    launch<level0::backward_keys_kernel<real>>(level0::blocks_of_warps(keys), level0::WARPS * 32,
                                               level0::WARPS * (4 * s.D + 64) * sizeof(float), stream, branch, dk, dv,
                                               dout, q, k, v, row_dot, lse_gated, selection, s, scale, keys);
}

template <class real>
void attention_level0_select(uint32_t* selection, float* chosen_importance, const real* q, const real* kc,
                             const float* lse, const NsaShape& s, cudaStream_t stream) {
    const size_t pieces[] = {size_t(s.heads_per_group()) * s.D, size_t(s.slc_blocks()), size_t(s.selection_words())};
    size_t shared_bytes = 0;
    for (const size_t piece : pieces) shared_bytes += (piece * 4 + 127) / 128 * 128;  // as DynamicShared aligns them
    const size_t rows = size_t(s.B) * s.G * s.queries;
    launch<level0::select_kernel<real>>(unsigned(rows), 32, shared_bytes, stream, selection, chosen_importance, q, kc,
                                        lse, s, float(s.scale()));
}
