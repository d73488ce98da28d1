// nsa_kernels.cuh: struct Cuda, every operation of the model on an NVIDIA GPU: the same members and
// signatures as struct Cpu of nsa_cpu.h, which is their specification. Matrix products are cuBLASLt's,
// everything else is written here. The seam to CUDA (launches, PTX) is lib/cuda_common.cuh; the same source
// runs on a CPU in dev/emulator/cuda_on_cpu.h. Attention in PRECISION=FP32 is by the scalar kernels of dev/ladder.
//
// The file reads in this order:  loads, stores and sums  ->  kernels of the row operations (embedding, norm, SiLU,
// classifier, optimiser)  ->  of heads and RoPE  ->  of compression  ->  attention on tensor cores  ->  struct Cuda,
// which launches them all.
//
// Precision. Parameters and activations are bf16, or fp32 when compiled with -DPRECISION_FP32. Everything is computed
// in fp32; statistics, the gradients of parameters, the optimiser's moments and its master copy of the parameters are
// fp32 in memory too. No atomics: each output has one owner and the order of every sum is fixed by the shapes alone, so
// the same input gives the same bits.
#pragma once
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && !defined(PRECISION_FP32)
#error "the bf16 kernels need compute capability 8.0 (A100, RTX 30) or later; for older GPUs build with PRECISION=FP32"
#endif

#include <array>
#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "lib/cuda_common.cuh"
#include "dev/ladder/attention_level0.cuh"
#include "nsa_cpu.h"

// =====================================================================================================================
// Row operations, heads and RoPE, compression.
// =====================================================================================================================

#ifdef PRECISION_FP32
using cuda_real = float;
#else
using cuda_real = __nv_bfloat16;
#endif

namespace kernels {

// ---------------------------------------------------------------------------------------------------------------------
// Loads and stores. Kernels are written for W elements at a time: 16 bytes of cuda_real
// where rows and pointers allow it, else 1. In registers the elements are always fp32.

constexpr int WIDE = 16 / int(sizeof(cuda_real));

template <int W>
__device__ inline void load(float (&x)[W], const float* p) {
    if constexpr (W == 1) {
        x[0] = *p;
    } else {
        for (int i = 0; i < W; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(p + i);
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    }
}
template <int W>
__device__ inline void store(float* p, const float (&x)[W]) {
    if constexpr (W == 1) {
        *p = x[0];
    } else {
        for (int i = 0; i < W; i += 4)
            *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}
#ifndef PRECISION_FP32
template <int W>
__device__ inline void load(float (&x)[W], const __nv_bfloat16* p) {
    if constexpr (W == 1) {
        x[0] = float(*p);
    } else {
        const uint4 eight = *reinterpret_cast<const uint4*>(p);
        const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
        for (int i = 0; i < 4; i++)
            x[2 * i] = __uint_as_float(pairs[i] << 16), x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}
template <int W>
__device__ inline void store(__nv_bfloat16* p, const float (&x)[W]) {
    if constexpr (W == 1) {
        *p = __float2bfloat16_rn(x[0]);
    } else {
        unsigned pairs[4];
        for (int i = 0; i < 4; i++) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
            memcpy(&pairs[i], &pair, 4);
        }
        *reinterpret_cast<uint4*>(p) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
#endif

// The index of this thread among all of the launch.
__device__ inline size_t thread_index() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// The row of D elements that this thread and its neighbours share.
constexpr int ROW_LANES = 8;
__device__ inline size_t row_index() { return size_t(blockIdx.x) * (blockDim.x / ROW_LANES) + threadIdx.x / ROW_LANES; }

// The sum over groups of `lanes` neighbouring lanes (a power of two), in each of them.
template <int lanes = 32, class T>
__device__ inline T lane_sum(T x) {
    for (int flip = lanes / 2; flip > 0; flip /= 2) x += __shfl_xor_sync(0xffffffffu, x, flip);
    return x;
}

// 1 / (1 + e^-x), rounded as a division rounds it: a reciprocal and one Newton step, without the branch to a
// division's rare cases. Where those would be (x below -87.3, and the result below 2^-126), it is 0.
__device__ inline float sigmoid(float x) {
    const float y = 1 + expf(-x), r = reciprocal_approx(y);
    return y > 0x1p126f ? 0 : fmaf(r, fmaf(-y, r, 1), r);
}

// ---------------------------------------------------------------------------------------------------------------------
// Does this binary hold code for this GPU?
__global__ void probe_kernel() {}

// ---------------------------------------------------------------------------------------------------------------------
// Embedding.

// x [N, C] = embed[token]; one thread per W elements
template <int W>
__global__ void embedding_forward_kernel(cuda_real* x, const int32_t* tokens, const cuda_real* embed, int N, int C) {
    const size_t i = thread_index() * W;
    if (i >= size_t(N) * C) return;
    float values[W];
    load(values, embed + size_t(tokens[i / C]) * C + i % C);
    store(x + i, values);
}

// The gradient is a sum over the positions that hold a token, so the positions are first sorted by token,
// equal ones in their order. The place of a position is the number of positions that come before it: N^2
// comparisons of integers in shared memory, 10^9 at N = 32768, once per micro-step; with no counters,
// no atomics, no passes over digits and no choice of the order. sorted [N]
constexpr int SORT_THREADS = 256;
__global__ void __launch_bounds__(SORT_THREADS) sort_positions_kernel(int32_t* sorted, const int32_t* tokens, int N) {
    SHARED(int32_t, tile, [SORT_THREADS]);
    const int own = int(blockIdx.x) * SORT_THREADS, thread = int(threadIdx.x),
              token = own + thread < N ? tokens[own + thread] : 0;
    int place = 0;
    for (int start = 0; start < N; start += SORT_THREADS) {
        __syncthreads();                                                       // the last tile is no longer read
        tile[thread] = start + thread < N ? tokens[start + thread] : INT_MAX;  // comes before nothing
        __syncthreads();
        // Of equal tokens those of earlier positions come before; in all tiles but the block's own these are all or
        // none.
        if (start == own) {
#pragma unroll 16
            for (int i = 0; i < SORT_THREADS; i++) place += tile[i] < token + (i < thread);
        } else {
            const int limit = token + (start < own);
#pragma unroll 16
            for (int i = 0; i < SORT_THREADS; i++)
                place += unsigned(tile[i] - limit) >> 31;  // less: a sign, as both are at least 0
        }
    }
    if (own + thread < N) sorted[place] = own + thread;
}
// dembed [V, C] += rows of dx [N, C]. Block column blockIdx.y, place blockIdx.x; the first place of a token's run walks
// the run.
template <int W>
__global__ void __launch_bounds__(128)
    embedding_backward_kernel(float* dembed, const cuda_real* dx, const int32_t* tokens, const int32_t* sorted, int N,
                              int C) {
    const int place = blockIdx.x, token = tokens[sorted[place]], c = int(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C || (place > 0 && tokens[sorted[place - 1]] == token)) return;
    float sum[W];
    load(sum, dembed + size_t(token) * C + c);
    // A frequent token's run is long, and a row's address takes two loads one after the other: those of 8 rows are
    // under way at once.
    constexpr int AHEAD = 8;
    for (int i = place, last = token; i < N && last == token; i += AHEAD) {
        int n[AHEAD], tokens_ahead[AHEAD];
        float rows[AHEAD][W] = {};
        for (int u = 0; u < AHEAD; u++) n[u] = sorted[min(i + u, N - 1)];
        for (int u = 0; u < AHEAD; u++) tokens_ahead[u] = i + u < N ? tokens[n[u]] : -1;
        for (int u = 0; u < AHEAD; u++)
            if (tokens_ahead[u] == token) load(rows[u], dx + size_t(n[u]) * C + c);
        last = tokens_ahead[AHEAD - 1];
        for (int u = 0; u < AHEAD; u++)
            for (int k = 0; k < W; k++) sum[k] += rows[u][k];  // 0 behind the run's end
    }
    store(dembed + size_t(token) * C + c, sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// RMSNorm, one warp per row of C.

constexpr int NORM_ROWS = 8;  // per block

template <int W>
__global__ void __launch_bounds__(NORM_ROWS * 32)
    rmsnorm_forward_kernel(cuda_real* out, float* rstd, const cuda_real* x, const cuda_real* weight, int N, int C) {
    const int n = blockIdx.x * NORM_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;  // a whole warp
    x += size_t(n) * C, out += size_t(n) * C;
    float squares = 0, a[W], g[W];
    for (int c = lane * W; c < C; c += 32 * W) {
        load(a, x + c);
        for (int k = 0; k < W; k++) squares += a[k] * a[k];
    }
    const float s = 1 / sqrtf(lane_sum(squares) / C + float(NORM_EPS));
    for (int c = lane * W; c < C; c += 32 * W) {
        load(a, x + c), load(g, weight + c);
        for (int k = 0; k < W; k++) a[k] *= s * g[k];
        store(out + c, a);
    }
    if (lane == 0) rstd[n] = s;
}

// dx += rstd * (g - x * rstd^2 * mean(g * x)),  g = dout * weight
template <int W>
__global__ void __launch_bounds__(NORM_ROWS * 32)
    rmsnorm_backward_kernel(cuda_real* dx, const cuda_real* dout, const cuda_real* x, const float* rstd,
                            const cuda_real* weight, int N, int C) {
    const int n = blockIdx.x * NORM_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    x += size_t(n) * C, dx += size_t(n) * C, dout += size_t(n) * C;
    float dot = 0, a[W], d[W], g[W], sum[W];
    for (int c = lane * W; c < C; c += 32 * W) {
        load(a, x + c), load(d, dout + c), load(g, weight + c);
        for (int k = 0; k < W; k++) dot += d[k] * g[k] * a[k];
    }
    const float s = rstd[n], correction = lane_sum(dot) * s * s / C;
    for (int c = lane * W; c < C; c += 32 * W) {
        load(a, x + c), load(d, dout + c), load(g, weight + c), load(sum, dx + c);
        for (int k = 0; k < W; k++) sum[k] += s * (d[k] * g[k] - a[k] * correction);
        store(dx + c, sum);
    }
}

// Sums over the rows of a matrix [N, C], in two stages: parts of `part_rows` rows, then the parts. What is summed says
// Term.
struct RowsOf {  // the matrix itself
    const cuda_real* x;
    template <int W>
    __device__ void load_terms(float (&term)[W], int n, int c, int C) const {
        load(term, x + size_t(n) * C + c);
    }
};
struct NormWeightGradient {  // dout * x * rstd
    const cuda_real *dout, *x;
    const float* rstd;
    template <int W>
    __device__ void load_terms(float (&term)[W], int n, int c, int C) const {
        float a[W];
        load(term, dout + size_t(n) * C + c), load(a, x + size_t(n) * C + c);
        for (int k = 0; k < W; k++) term[k] *= a[k] * rstd[n];
    }
};
// partial [parts, C], part blockIdx.y
template <int W, class Term>
__global__ void __launch_bounds__(128) column_parts_kernel(float* partial, Term terms, int N, int C, int part_rows) {
    const int c = int(thread_index()) * W, begin = blockIdx.y * part_rows, end = min(N, begin + part_rows);
    if (c >= C) return;
    float sum[W] = {}, term[W];
    for (int n = begin; n < end; n++) {
        terms.load_terms(term, n, c, C);
        for (int k = 0; k < W; k++) sum[k] += term[k];
    }
    store(partial + size_t(blockIdx.y) * C + c, sum);
}
// out [columns] += sum over parts of partial [parts, columns]; a block takes 32 columns, each of its 8 warps every
// eighth part
__global__ void __launch_bounds__(256) column_totals_kernel(float* out, const float* partial, int parts, int columns) {
    SHARED(float, sums, [8][32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = int(blockIdx.x) * 32 + lane;
    float sum = 0;
    for (int part = warp; part < parts && c < columns; part += 8) sum += partial[size_t(part) * columns + c];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= columns) return;
    for (int i = 1; i < 8; i++) sum += sums[i][lane];
    out[c] += sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// SiLU.

template <int W>
__global__ void silu_forward_kernel(cuda_real* out, const cuda_real* x, size_t count) {
    const size_t i = thread_index() * W;
    if (i >= count) return;
    float a[W];
    load(a, x + i);
    for (int k = 0; k < W; k++) a[k] *= sigmoid(a[k]);
    store(out + i, a);
}
// dx = dout * s * (1 + x * (1 - s)), s = sigmoid(x); dx may be dout
template <int W>
__global__ void silu_backward_kernel(cuda_real* dx, const cuda_real* dout, const cuda_real* x, size_t count) {
    const size_t i = thread_index() * W;
    if (i >= count) return;
    float a[W], d[W];
    load(a, x + i), load(d, dout + i);
    for (int k = 0; k < W; k++) {
        const float s = sigmoid(a[k]);
        d[k] *= s * (1 + a[k] * (1 - s));
    }
    store(dx + i, d);
}

// ---------------------------------------------------------------------------------------------------------------------
// Classifier, one block per row of logits: one pass reads the row and keeps the running
// maximum and the sum of exponentials under it, a second one writes the gradient over it.

struct Softmax {
    float largest, sum;  // of e^(x - largest)
    __device__ void add(float other_largest, float other_sum) {
        const float m = fmaxf(largest, other_largest);
        if (m == -INFINITY) return;  // nothing yet on either side
        sum = sum * expf(largest - m) + other_sum * expf(other_largest - m), largest = m;
    }
};

constexpr int CLASSIFIER_THREADS = 512;

template <int W>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_kernel(float* losses, cuda_real* logits, const int32_t* targets, float dloss, bool want_gradient, int V,
                      int Vp) {
    SHARED(Softmax, of_warps, [CLASSIFIER_THREADS / 32]);
    SHARED(float, target_logit, [1]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, target = targets[blockIdx.x];
    cuda_real* row = logits + size_t(blockIdx.x) * Vp;
    Softmax softmax = {-INFINITY, 0};
    float x[W];
    for (int v0 = threadIdx.x * W; v0 < V; v0 += CLASSIFIER_THREADS * W) {
        load(x, row + v0);
        float largest = -INFINITY, sum = 0;
        for (int k = 0; k < W; k++)
            if (v0 + k < V) largest = fmaxf(largest, x[k]);  // the padded columns may hold anything
        for (int k = 0; k < W; k++)
            if (v0 + k < V) sum += expf(x[k] - largest);
        softmax.add(largest, sum);
    }
    for (int flip = 16; flip > 0; flip /= 2) {
        const float largest = __shfl_xor_sync(0xffffffffu, softmax.largest, flip);
        const float sum = __shfl_xor_sync(0xffffffffu, softmax.sum, flip);
        softmax.add(largest, sum);
    }
    if (lane == 0) of_warps[warp] = softmax;
    if (threadIdx.x == 0) target_logit[0] = float(row[target]);  // before anyone writes the row
    __syncthreads();
    softmax = of_warps[0];
    for (int i = 1; i < CLASSIFIER_THREADS / 32; i++) softmax.add(of_warps[i].largest, of_warps[i].sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(softmax.sum) + softmax.largest - target_logit[0];
    if (!want_gradient) return;
    const float factor = dloss / softmax.sum;
    for (int v0 = threadIdx.x * W; v0 < Vp; v0 += CLASSIFIER_THREADS * W) {
        load(x, row + v0);
        for (int k = 0; k < W; k++)
            x[k] = v0 + k < V ? expf(x[k] - softmax.largest) * factor - (v0 + k == target ? dloss : 0) : 0;
        store(row + v0, x);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Optimiser.

constexpr int PARTS = 1024, PARTS_THREADS = 256;

// partial[blockIdx.x] = sum of x over every PARTS-th piece, in fp64
template <int W>
__global__ void __launch_bounds__(PARTS_THREADS) sum_parts_kernel(double* partial, const float* x, size_t count) {
    SHARED(double, sums, [PARTS_THREADS / 32]);
    double sum = 0;
    for (size_t i = thread_index() * W; i < count; i += size_t(gridDim.x) * blockDim.x * W) {
        float a[W];
        load(a, x + i);
        for (int k = 0; k < W; k++) sum += a[k];
    }
    sum = lane_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < PARTS_THREADS / 32; i++) sum += sums[i];
    partial[blockIdx.x] = sum;
}

// total += the parts, in a fixed order. One warp.
__global__ void sum_total_kernel(double* total, const double* partial, int parts) {
    double sum = 0;
    for (int i = threadIdx.x; i < parts; i += 32) sum += partial[i];
    sum = lane_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

constexpr int CHUNK_THREADS = 256;

// One block per chunk.
__global__ void __launch_bounds__(CHUNK_THREADS)
    chunk_squares_kernel(double* squares, const float* x, size_t total, size_t first_chunk) {
    SHARED(double, sums, [CHUNK_THREADS / 32]);
    const size_t chunk = first_chunk + blockIdx.x;
    double sum = 0;
    for (size_t i = chunk * CHUNK + threadIdx.x; i < total && i < (chunk + 1) * CHUNK; i += CHUNK_THREADS)
        sum += double(x[i]) * double(x[i]);
    sum = lane_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < CHUNK_THREADS / 32; i++) sum += sums[i];
    squares[chunk] = sum;
}
// One block: a fixed order too, if not the host's.
__global__ void __launch_bounds__(CHUNK_THREADS)
    total_squares_kernel(double* total, const double* squares, size_t chunks, const float* guard) {
    SHARED(double, sums, [CHUNK_THREADS / 32]);
    double sum = 0;
    for (size_t i = threadIdx.x; i < chunks; i += CHUNK_THREADS) sum += squares[i];
    sum = lane_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < CHUNK_THREADS / 32; i++) sum += sums[i];
    *total = sum + 0.0 * double(*guard);  // 0 * infinity and 0 * NaN are NaN
}
template <class T>
__global__ void set_guard_kernel(T* guard, const double* loss) {
    if (threadIdx.x == 0) *guard = T(*loss);
}
__global__ void add_arrays_kernel(float* x, const float* y, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) x[i] += y[i];
}
inline unsigned grid_of(size_t count) { return unsigned(std::min<size_t>(1024, (count + 255) / 256)); }

struct AdamWConstants {
    float beta1, beta2, eps;
    double decay;
    uint64_t seed, counter;
    const double* squares;  // of the whole gradient, or null; see HyperAdamW
    double grad_clip;
};
// What changes from step to step, in device memory: so the launches of an update are the same every time.
struct AdamWStep {
    double lr;
    float step_size, v_correction;
    uint64_t stream;  // random, of the rounding
};
// The parameter that belongs to its fp32 master. In bf16 it is rounded upwards in magnitude
// with the probability that keeps the mean: 16 random bits are added to the 16 that go.
__device__ inline cuda_real parameter(float master, uint64_t seed, uint64_t stream, uint64_t counter) {
#ifdef PRECISION_FP32
    (void)seed, (void)stream, (void)counter;
    return master;
#else
    const uint32_t bits = __float_as_uint(master), random = philox4x32(counter, stream, seed).word[0];
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return __ushort_as_bfloat16((unsigned short)((bits + (finite ? random & 0xffffu : 0)) >> 16));
#endif
}
__global__ void adamw_kernel(cuda_real* param, float* master, float* m, float* v, const float* grad, size_t count,
                             AdamWConstants h, const AdamWStep* step) {
    // What multiplies the gradient (NaN: no update) and the parameter comes
    // from fp64, which many GPUs compute at 1/64 of the rate: once a block.
    SHARED(float, factors, [2]);
    if (threadIdx.x == 0) {
        const double norm = h.squares ? sqrt(*h.squares) : 0;
        factors[0] = !(norm < INFINITY)                      ? NAN
                     : h.grad_clip > 0 && norm > h.grad_clip ? float(h.grad_clip / norm)
                                                             : 1.0f;
        factors[1] = float(1 - step->lr * h.decay);
    }
    __syncthreads();
    const size_t i = thread_index();
    const float scale = factors[0], keep = factors[1];
    if (i >= count || scale != scale) return;
    const float g = grad[i] * scale;
    const float m_new = h.beta1 * m[i] + (1 - h.beta1) * g, v_new = h.beta2 * v[i] + (1 - h.beta2) * g * g;
    const float updated = master[i] * keep - step->step_size * m_new / (sqrtf(v_new) * step->v_correction + h.eps);
    m[i] = m_new, v[i] = v_new, master[i] = updated;
    param[i] = parameter(updated, h.seed, step->stream, h.counter + i);
}
__global__ void round_master_kernel(cuda_real* param, const float* master, size_t count, uint64_t seed, uint64_t stream,
                                    uint64_t counter) {
    const size_t i = thread_index();
    if (i < count) param[i] = parameter(master[i], seed, stream, counter + i);
}

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE. One row of `projected` [B*queries, P] is  q | k_cmp v_cmp k_slc v_slc k_win v_win | gate logits |
// padding.

// cosine and sine [positions, D/2]
struct Rope {
    const float *cosine, *sine;
    // Turns W pairs of a head, elements i.. of its lower and upper half, by their angles at a position; direction -1
    // turns back.
    template <int W>
    __device__ void rotate(float (&low)[W], float (&high)[W], int position, int i, int D, int direction) const {
        float c[W], s[W];
        load(c, cosine + size_t(position) * (D / 2) + i), load(s, sine + size_t(position) * (D / 2) + i);
        for (int k = 0; k < W; k++) {
            const float a = low[k], b = high[k], turn = direction * s[k];
            low[k] = a * c[k] - b * turn, high[k] = a * turn + b * c[k];
        }
    }
};

// Of one token's row: head `unit` is a query head, or a group's key or value (slot, group); after them come the gates.
struct HeadPlace {
    bool query, rotated;
    int slot;    // HeadSlot of a key or value
    size_t row;  // of q, or of the slot's buffer
    __device__ HeadPlace(int unit, size_t b, int j, const NsaShape& s) {
        query = unit < s.H, slot = query ? 0 : (unit - s.H) / s.G + (s.full ? K_WIN : K_CMP);
        rotated = query || slot == K_SLC || slot == K_WIN;
        row = query ? (b * s.H + unit) * s.queries + j : (b * s.G + (unit - s.H) % s.G) * s.T + s.first + j;
    }
};
// Each pointer has a name, and is chosen by comparisons: an array indexed at run time would be copied to local memory
// by every thread.
template <class Q, class KV, class Gate>
struct HeadArrays {
    Q* q;
    KV *k_cmp, *v_cmp, *k_slc, *v_slc, *k_win, *v_win;
    Gate* gate;
    __device__ KV* kv(int slot) const {
        return slot == K_CMP   ? k_cmp
               : slot == V_CMP ? v_cmp
               : slot == K_SLC ? k_slc
               : slot == V_SLC ? v_slc
               : slot == K_WIN ? k_win
                               : v_win;
    }
};
using HeadPointers = HeadArrays<cuda_real, cuda_real, float>;
using HeadGradientPointers = HeadArrays<const float, const cuda_real, const float>;
// One block per token; a thread takes W pairs of elements of a head at a time.
template <int W>
__global__ void __launch_bounds__(128)
    split_heads_forward_kernel(HeadPointers out, const cuda_real* projected, Rope rope, NsaShape s, int P, int units) {
    const int pieces = s.D / 2 / W, j = blockIdx.x % s.queries, t = s.first + j;
    const size_t b = blockIdx.x / s.queries, rows = size_t(s.B) * s.H * s.queries;
    const cuda_real* in = projected + size_t(blockIdx.x) * P;
    for (int piece = threadIdx.x; piece < units * pieces; piece += blockDim.x) {
        const int unit = piece / pieces, i = piece % pieces * W;
        const HeadPlace place(unit, b, j, s);
        float low[W], high[W];
        load(low, in + unit * s.D + i), load(high, in + unit * s.D + s.D / 2 + i);
        if (place.rotated) rope.rotate(low, high, t, i, s.D, +1);
        cuda_real* to = (place.query ? out.q : out.kv(place.slot)) + place.row * s.D;
        store(to + i, low), store(to + s.D / 2 + i, high);
    }
    if (s.full) return;
    for (int i = threadIdx.x; i < 3 * s.H; i += blockDim.x)  // 3*head + branch
        out.gate[i % 3 * rows + (b * s.H + i / 3) * s.queries + j] = sigmoid(float(in[units * s.D + i]));
}
template <int W>
__global__ void __launch_bounds__(128) split_heads_backward_kernel(cuda_real* dprojected, HeadGradientPointers d,
                                                                   Rope rope, NsaShape s, int P, int units) {
    const int pieces = s.D / 2 / W, t = blockIdx.x % s.T;
    const size_t b = blockIdx.x / s.T, rows = size_t(s.B) * s.H * s.T;
    cuda_real* out = dprojected + size_t(blockIdx.x) * P;
    for (int piece = threadIdx.x; piece < units * pieces; piece += blockDim.x) {
        const int unit = piece / pieces, i = piece % pieces * W;
        const HeadPlace place(unit, b, t, s);
        float low[W], high[W];
        if (place.query) load(low, d.q + place.row * s.D + i), load(high, d.q + place.row * s.D + s.D / 2 + i);
        else
            load(low, d.kv(place.slot) + place.row * s.D + i),
                load(high, d.kv(place.slot) + place.row * s.D + s.D / 2 + i);
        if (place.rotated) rope.rotate(low, high, t, i, s.D, -1);
        store(out + unit * s.D + i, low), store(out + unit * s.D + s.D / 2 + i, high);
    }
    for (int i = threadIdx.x; i < P - units * s.D; i += blockDim.x)  // gates, then padding; neither in full attention
        out[units * s.D + i] = cuda_real(i < 3 * s.H ? d.gate[i % 3 * rows + (b * s.H + i / 3) * s.T + t] : 0.0f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression. Scratch matrices are packed: row bg*count + i is block begin + i of (sequence, group) bg.

// hidden [B, G, NC, F] = sum + bias, activated = silu(hidden); sum, activated [B*G*count, F]. One thread per element.
__global__ void compress_activate_kernel(cuda_real* hidden, cuda_real* activated, const float* sum,
                                         const cuda_real* bias, int rows, int count, int begin, int NC, int F) {
    const size_t i = thread_index();
    if (i >= size_t(rows) * F) return;
    const size_t row = i / F, at = (row / count * NC + begin + row % count) * F + i % F;
    hidden[at] = cuda_real(sum[i] + float(bias[i % F]));
    const float h = float(hidden[at]);
    activated[i] = cuda_real(h * sigmoid(h));
}
// out [B, G, NC, D] = mean of the block's l tokens + sum, rotated at the position
// of the block's first token where asked. sum [B*G*count, D]; one thread per pair.
__global__ void compress_output_kernel(cuda_real* out, const float* sum, const cuda_real* k, Rope rope, bool rotated,
                                       int rows, int count, int begin, int NC, NsaShape s) {
    const int pairs = s.D / 2;
    const size_t index = thread_index();
    if (index >= size_t(rows) * pairs) return;
    const size_t row = index / pairs, bg = row / count;
    const int x = int(index % pairs), block = begin + int(row % count);
    const cuda_real* tokens = k + (bg * s.T + size_t(block) * s.d) * s.D;
    float low[1] = {0}, high[1] = {0};
    for (int i = 0; i < s.l; i++)
        low[0] += float(tokens[size_t(i) * s.D + x]), high[0] += float(tokens[size_t(i) * s.D + pairs + x]);
    low[0] = low[0] / s.l + sum[row * s.D + x], high[0] = high[0] / s.l + sum[row * s.D + pairs + x];
    if (rotated) rope.rotate(low, high, block * s.d, x, s.D, +1);
    cuda_real* to = out + (bg * NC + block) * s.D;
    to[x] = cuda_real(low[0]), to[pairs + x] = cuda_real(high[0]);
}
// dout [B, G, NC, D] turned back in place
__global__ void compress_turn_back_kernel(cuda_real* dout, Rope rope, int rows, int NC, int d, int D) {
    const int pairs = D / 2;
    const size_t index = thread_index();
    if (index >= size_t(rows) * pairs) return;
    const size_t row = index / pairs;
    const int x = int(index % pairs);
    float low[1] = {float(dout[row * D + x])}, high[1] = {float(dout[row * D + pairs + x])};
    rope.rotate(low, high, int(row % NC) * d, x, D, -1);
    dout[row * D + x] = cuda_real(low[0]), dout[row * D + pairs + x] = cuda_real(high[0]);
}
// dhidden = dactivated * silu'(hidden)
__global__ void compress_dhidden_kernel(cuda_real* dhidden, const float* dactivated, const cuda_real* hidden,
                                        size_t count) {
    const size_t i = thread_index();
    if (i >= count) return;
    const float h = float(hidden[i]), s = sigmoid(h);
    dhidden[i] = cuda_real(dactivated[i] * s * (1 + h * (1 - s)));
}
// dfc1[f, first + x] += sum over (sequence, group) of partial [B*G, F, width]: one chunk's columns of fc1 [F, all]
__global__ void compress_dfc1_kernel(float* dfc1, const float* partial, int groups, int F, int width, int first,
                                     int all) {
    const size_t i = thread_index(), size = size_t(F) * width;
    if (i >= size) return;
    float sum = 0;
    for (int bg = 0; bg < groups; bg++) sum += partial[bg * size + i];
    dfc1[i / width * all + first + i % width] += sum;
}
// dk [B, G, T, D] = sum (what came through fc1) + the share of a token in the means of the blocks that hold it
template <int W>
__global__ void __launch_bounds__(256)
    compress_dk_kernel(cuda_real* dk, const float* sum, const cuda_real* dout, size_t rows, int NC, NsaShape s) {
    const size_t row = row_index();
    if (row >= rows) return;
    const int bg = int(unsigned(row) / unsigned(s.T)),
              t = int(unsigned(row) % unsigned(s.T));  // fewer than 2^32 rows, as in RowPlace
    const int first = t < s.l ? 0 : (t - s.l) / s.d + 1, end = min(NC, t / s.d + 1);
    const float share = 1.0f / s.l;  // exact where l is a power of two
    for (int x = threadIdx.x % ROW_LANES * W; x < s.D; x += ROW_LANES * W) {
        float mean[W] = {}, a[W];
        for (int i = first; i < end; i++) {
            load(a, dout + (size_t(bg) * NC + i) * s.D + x);
            for (int k = 0; k < W; k++) mean[k] += a[k];
        }
        load(a, sum + row * s.D + x);
        for (int k = 0; k < W; k++) a[k] += mean[k] * share;
        store(dk + row * s.D + x, a);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The sum of the branches, and what their backward starts from.

// Where row (b, head, j) of [B, H, queries] lies in [B, queries, H]. There are fewer than 2^32 rows: divisions of 64
// bits are long.
struct RowPlace {
    size_t by_token;
    __device__ RowPlace(unsigned row, const NsaShape& s) {
        const unsigned queries = unsigned(s.queries), H = unsigned(s.H), j = row % queries, head = row / queries % H,
                       b = row / queries / H;
        by_token = (size_t(b) * queries + j) * H + head;
    }
};

// out [B*queries, H*D] = sum over branches of gate * branch output; paper eq. 5
template <int W>
__global__ void __launch_bounds__(256)
    combine_forward_kernel(cuda_real* out, const cuda_real* o, const float* gate, size_t rows, NsaShape s) {
    const size_t row = row_index();
    if (row >= rows) return;
    const RowPlace place(unsigned(row), s);
    cuda_real* to = out + place.by_token * s.D;
    for (int x = threadIdx.x % ROW_LANES * W; x < s.D; x += ROW_LANES * W) {
        float sum[W] = {}, term[W];
        for (int i = 0; i < (s.full ? 1 : 3); i++) {
            const float g = s.full ? 1 : gate[i * rows + row];
            load(term, o + (i * rows + row) * s.D + x);
            for (int k = 0; k < W; k++) sum[k] += g * term[k];
        }
        store(to + x, sum);
    }
}
// row_dot = dout . o     lse_gated = lse - ln(gate)     dgate_logit = row_dot * gate * (1 - gate), per branch
template <int W>
__global__ void __launch_bounds__(256)
    attention_backward_rows_kernel(float* row_dot, float* lse_gated, float* dgate_logit, const cuda_real* dout,
                                   const cuda_real* o, const float* gate, const float* lse, size_t rows, NsaShape s) {
    const size_t index = row_index(), row = index < rows ? index : rows - 1;  // every lane takes part in the sums
    const cuda_real* d = dout + RowPlace(unsigned(row), s).by_token * s.D;
    for (int i = 0; i < (s.full ? 1 : 3); i++) {
        const size_t at = i * rows + row;
        float dot = 0, a[W], c[W];
        for (int x = threadIdx.x % ROW_LANES * W; x < s.D; x += ROW_LANES * W) {
            load(a, d + x), load(c, o + at * s.D + x);
            for (int k = 0; k < W; k++) dot += a[k] * c[k];
        }
        dot = lane_sum<ROW_LANES>(dot);
        if (threadIdx.x % ROW_LANES != 0 || index >= rows) continue;
        const float g = s.full ? 1 : gate[at];
        row_dot[at] = dot;
        lse_gated[at] = lse[at] - logf(g);
        if (!s.full) dgate_logit[at] = dot * g * (1 - g);
    }
}

inline unsigned blocks(size_t count, size_t per_block) { return unsigned((count + per_block - 1) / per_block); }

}  // namespace kernels

// =====================================================================================================================
// Attention of the three branches and the selection of blocks, on tensor cores, in bf16 with fp32 sums.
//
// The operations are those of struct Cpu (nsa_cpu.h), which is the specification. Reads in this order:
//   shape  ->  tiles in shared memory and their products  ->  which keys a query sees  ->  forward  ->  backward
//   ->  the selected branch by gathered rows, for long sequences  ->  selection  ->  host side.
//
// A tile of queries has as its rows all query heads of one group for a few consecutive tokens, head by head: row r is
// head r / tile_tokens, token r % tile_tokens. All of them share the tile's keys, so any number of heads per group
// fills the tensor cores. A tile of keys has 64 rows. Softmax is in base 2 inside: 2^(c q.k - lse), c = log2(e) /
// sqrt(D); the lse in memory is the natural one. The same in scalar code, with which it is compared:
// dev/ladder/attention_level0.cuh.
// =====================================================================================================================
// The selected branch has two sets of kernels: masked tiles, where a tile of tokens visits every
// block that one of them chose, and gathered rows, where each block is visited by the rows that
// chose it. AUTO takes what costs less for the selection at hand, see measure_selections_kernel.
enum class SelectedKernel { AUTO, TILES, GATHER };
// AUTO's decision and its reasons, in the GPU's memory. Both sets of kernels are launched; those that were not chosen
// return at once.
struct SelectedChoice {
    int gather;         // 1: gathered rows, 0: masked tiles
    float tile_tokens;  // of the tiles that were looked at
    float tile_blocks;  // tiles of 64 keys that a tile of tokens visits, on average
    float cost;         // of gathered rows, as a share of that of masked tiles
};

// In words, for the log.
inline std::string describe(const SelectedChoice& c, const NsaShape& s) {
    return format_text(
        "selected branch by %s: %.0f tokens visit %.1f of %d tiles of keys together; gathering their rows has an "
        "estimated cost of %.2f "
        "of that of masked tiles",
        c.gather ? "gathered rows" : "masked tiles", double(c.tile_tokens), double(c.tile_blocks),
        (s.first + s.queries + 64 - 1) / 64, double(c.cost));
}

#ifndef PRECISION_FP32

using bf16 = __nv_bfloat16;

// ---------------------------------------------------------------------------------------------------------------------
// Shape.

constexpr int KEY_TILE = 64;          // keys of a tile; of the token tile in dK and dV
constexpr int QUERY_ROWS = 128;       // of a tile of queries, at most
constexpr int MOST_TILE_TOKENS = 64;  // more would make the union of a tile's selections too large
constexpr int SCORE_TOKENS = 16;      // tokens of a tile of the selection
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float MOST_GROWTH =
    8;  // of a score in base 2 over the shift that is subtracted from it, see attention_forward_kernel

// 16-row pieces of a query tile in one warp: two share each piece of K and V that is loaded, while registers suffice.
// Queries (and dout) stay in registers; eight warps of 255 registers fill a multiprocessor: two blocks, or one at D =
// 128.
template <int D>
HOST_DEVICE constexpr int row_pieces() {
    return D > 64 ? 1 : 2;
}
template <int D>
HOST_DEVICE constexpr int tile_threads() {
    return QUERY_ROWS / 16 / row_pieces<D>() * 32;
}

// A number of the shape to divide by, without the 20 instructions of an integer
// division: i / n = i * ceil(2^31 / n) >> 31 for all i with i * (n - 1) < 2^31.
struct Divisor {
    unsigned reciprocal = 0;
    Divisor() = default;
    explicit Divisor(int n) : reciprocal(((1u << 31) + unsigned(n) - 1) / unsigned(n)) {}
    HOST_DEVICE int of(int i) const { return int(uint64_t(unsigned(i)) * reciprocal >> 31); }
};

// What kernels need to know of NsaShape. Index bg = b * G + g counts the groups of all sequences.
struct AttentionShape {
    int batch_groups, G, heads;  // B * G; groups; query heads of a group
    Divisor by_heads, by_slc_tiles;
    int first, queries;      // positions first .. first + queries - 1
    int keys, key_stride;    // keys that the last query may see; rows of the key arrays per group
    int tile_tokens, tiles;  // tokens of a tile, number of tiles: of queries, in dK and dV of keys
    int l, d, window;        // compression block and stride; keys of the window
    int slc_block, slc_count, words;
    int slc_shift;           // selection block of a key within a tile: key >> slc_shift, 0 where a block fills the tile
    int slc_tiles;           // tiles of keys of a selection block, at least 1
    float scale;             // 1 / sqrt(D)
    int parts, part_tokens;  // dK and dV: the queries are cut into so many parts of so many tokens, whose sums are
                             // added at the end
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles. A tile in shared memory is [rows, D] in bf16, in 16-byte chunks. Chunk c of row r lies at place c ^ (r % 8) of
// its row (rows shorter than 128 bytes: the same within 128 bytes), so that the eight rows which ldmatrix reads at once
// come from different banks.

template <int D>
__device__ inline int chunk_at(int row, int chunk) {
    constexpr int chunks = D / 8, rows_per_line = chunks < 8 ? 8 / chunks : 1, swizzled = chunks < 8 ? chunks : 8;
    return (row * chunks + (chunk ^ row / rows_per_line % swizzled)) * 8;
}

// tile [KEY_TILE, D] = rows 0 .. valid-1 of in, which are `stride` elements apart; zeros below. Asynchronous.
// The compiler knows the block's THREADS, so a thread's rows lie at fixed distances in the tile.
template <int D, int THREADS>
__device__ inline void copy_tile(bf16* tile, const bf16* in, size_t stride, int valid) {
    constexpr int step = THREADS / (D / 8);
    static_assert(step % 8 == 0 && KEY_TILE % step == 0, "the chunks of a row change places by row % 8");
    const int first = threadIdx.x / (D / 8), chunk = threadIdx.x % (D / 8);
    if (valid >= KEY_TILE) {
        bf16* const first_chunk = tile + chunk_at<D>(first, chunk);
        in += first * stride + chunk * 8;
#pragma unroll
        for (int done = 0; done < KEY_TILE; done += step, in += step * stride) cp_async_16(first_chunk + done * D, in);
    } else {
#pragma unroll 1
        for (int row = first; row < KEY_TILE; row += step)
            cp_async_16(tile + chunk_at<D>(row, chunk), row < valid ? in + row * stride + chunk * 8 : in, row < valid);
    }
}
// A tile of keys, and of values, on their way into one of two buffers: a group
// of copies of its own. group: where the keys of (sequence, group) begin.
template <int D>
__device__ inline void copy_keys_and_values(bf16* k_tiles, bf16* v_tiles, int buffer, const bf16* k, const bf16* v,
                                            size_t group, int key_tile, const AttentionShape& s) {
    constexpr int THREADS = tile_threads<D>();  // which most blocks have, so that a whole tile has fixed distances
    const int valid = s.keys - key_tile * KEY_TILE, chunk = threadIdx.x % (D / 8);
    const size_t from = group + size_t(key_tile) * KEY_TILE * D;
    if (blockDim.x == THREADS && valid >= KEY_TILE) {
        copy_tile<D, THREADS>(k_tiles + buffer * KEY_TILE * D, k + from, D, KEY_TILE);
        copy_tile<D, THREADS>(v_tiles + buffer * KEY_TILE * D, v + from, D, KEY_TILE);
        return cp_async_commit();
    }
    for (int row = threadIdx.x / (D / 8); row < KEY_TILE; row += blockDim.x / (D / 8)) {
        const int to = buffer * KEY_TILE * D + chunk_at<D>(row, chunk);
        const size_t at = from + (row < valid ? row * D + chunk * 8 : 0);
        cp_async_16(k_tiles + to, k + at, row < valid);
        cp_async_16(v_tiles + to, v + at, row < valid);
    }
    cp_async_commit();
}
// The rows of a tile of queries, from heads and tokens that are head_stride
// and token_stride elements apart; the first `tokens` of the tile exist.
template <int D>
__device__ inline void copy_queries(bf16* tile, const bf16* in, size_t head_stride, size_t token_stride, int rows,
                                    int tokens, const AttentionShape& s) {
    for (int i = threadIdx.x; i < rows * (D / 8); i += blockDim.x) {
        const int row = i / (D / 8), chunk = i % (D / 8), head = row / s.tile_tokens, token = row % s.tile_tokens;
        const bool valid = head < s.heads && token < tokens;
        cp_async_16(tile + chunk_at<D>(row, chunk),
                    valid ? in + head * head_stride + token * token_stride + chunk * 8 : in, valid);
    }
}

// Fragments of m16n8k16, by the PTX manual: lane 4 g + t holds of C the rows g and g + 8, columns 2 t and 2 t + 1:
// c[0], c[1] and c[2], c[3]. a (16 x 16) = rows row.. of the tile, columns column..
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
// The same; A (M*16 x D) in registers.
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
// c (M*16 x D) += P B; P (M*16 x K*16) as a product left it, rounded to bf16; B: rows b_row.. of its tile.
// The C fragments of two neighbouring products are the A fragment of the next one, so P does not go through shared
// memory.
template <int D, int M, int K>
__device__ inline void multiply_add(float (&c)[M][D / 8][4], const float (&p)[M][2 * K][4], const bf16* b_tile,
                                    int b_row) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < 4; r++)
                a[m][r] = pack_bf16(p[m][2 * k + r / 2][r % 2 * 2], p[m][2 * k + r / 2][r % 2 * 2 + 1]);
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
__device__ inline int first_query(int key, const AttentionShape& s) {
    return branch == CMP ? key * s.d + s.l - 1 : key;
}
// Whether the query at position t sees the key, where it chose the key's selection block.
template <Branch branch>
__device__ inline bool query_sees(int t, int key, const AttentionShape& s) {
    return first_query<branch>(key, s) <= t && (branch != WIN || t < key + s.window);
}

// Bit i is set where a token chose the i-th selection block of a tile of keys. A selection block of 64 or more tokens
// is the only one in each of its tiles. selected: the bitmasks of a tile of tokens (at most 64, so 32 bits are enough
// for the index).
__device__ inline int blocks_per_tile(const AttentionShape& s) { return KEY_TILE >> s.slc_shift; }
struct TileBlocks {
    int word, bit;  // where the bits of the tile's blocks lie in a bitmask
    unsigned all;   // a bit for each of them
};
__device__ inline TileBlocks tile_blocks(int tile, const AttentionShape& s) {
    const int block = s.by_slc_tiles.of(tile) * blocks_per_tile(s);  // one of the two is 1
    return {block / 32, block % 32, (1u << blocks_per_tile(s)) - 1};
}
__device__ inline unsigned chosen_blocks(const uint32_t* selected, int token, const TileBlocks& blocks,
                                         const AttentionShape& s) {
    return selected[token * s.words + blocks.word] >> blocks.bit & blocks.all;
}

// Words of a bitmask over the 64-row tiles of so many rows.
HOST_DEVICE inline int tile_words(int rows) { return (rows + KEY_TILE * 32 - 1) / (KEY_TILE * 32); }
// The next tile in [tile, end) to visit; end or more where there is none. The selected
// branch visits the tiles whose bit is set in the bitmask `used`, the others all.
template <Branch branch>
__device__ inline int next_tile(const uint32_t* used, int tile, int end) {
    while (branch == SLC && tile < end) {
        const uint32_t rest = used[tile / 32] >> tile % 32;
        if (rest) return tile + __ffs(int(rest)) - 1;
        tile = (tile / 32 + 1) * 32;
    }
    return tile;
}
// used = bitmask over tiles of keys: whether one of the tile's `tokens` tokens, with bitmasks
// `selected`, chose a block in it. The block's threads share the work; a barrier must follow.
__device__ inline void find_used_key_tiles(uint32_t* used, const uint32_t* selected, int tokens, int tiles,
                                           const AttentionShape& s) {
    const int lane = threadIdx.x % 32;
    for (int word = threadIdx.x / 32; word * 32 < tiles; word += blockDim.x / 32) {
        const int tile = word * 32 + lane;
        const TileBlocks blocks = tile_blocks(tile, s);
        unsigned chosen = 0;
        for (int j = 0; j < tokens && tile < tiles; j++) chosen |= chosen_blocks(selected, j, blocks, s);
        const unsigned bits = __ballot_sync(~0u, chosen != 0);
        if (lane == 0) used[word] = bits;
    }
}
// used = bitmask over tiles of tokens: whether one of the tile's tokens chose a block in tile `key_tile` of keys.
// selected: the bitmasks of all tokens. A barrier must follow.
__device__ inline void find_used_token_tiles(uint32_t* used, const uint32_t* selected, int key_tile,
                                             const AttentionShape& s) {
    const int lane = threadIdx.x % 32, tiles = (s.queries + KEY_TILE - 1) / KEY_TILE;
    const TileBlocks blocks = tile_blocks(key_tile, s);
    for (int word = threadIdx.x / 32; word * 32 < tiles; word += blockDim.x / 32) {
        unsigned bits = 0;
        for (int tile = word * 32; tile < min(word * 32 + 32, tiles); tile++) {
            unsigned chosen = 0;
            for (int j = lane; j < min(KEY_TILE, s.queries - tile * KEY_TILE); j += 32)
                chosen |= chosen_blocks(selected + size_t(tile) * KEY_TILE * s.words, j, blocks, s);
            if (__any_sync(~0u, chosen != 0)) bits |= 1u << tile % 32;
        }
        if (lane == 0) used[word] = bits;
    }
}

// Which keys a query sees, counted from some key of a tile: begin .. end-1.
struct Visible {
    int begin, end;
};
// end: the query's end_of_keys, counted likewise. chosen: whether the query chose the selection block that the keys
// belong to.
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
    return head < s.heads && token < tile.tokens ? ((long long)tile.bg * s.heads + head) * s.queries + tile.j0 + token
                                                 : -1;
}
// Of every 16-row piece m a lane owns rows lane / 4 (i = 0) and lane / 4 + 8 (i = 1). One register holds a byte for
// each of them.
__device__ inline int row_byte(unsigned bytes, int m, int i) { return int(bytes >> (m * 16 + i * 8) & 255); }
// The rows' end_of_keys, as differences from that of the tile's first token, which are below 64; NO_QUERY for rows that
// are no query.
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
// What the rows of a warp see of a tile of keys. In the selected branch most tiles are seen by some rows
// whole and by the others not at all; those others are `hidden` as rows, which costs nothing per key.
struct TileView {
    int first_end;  // of the tile of queries, counted from the tile's first key; with `ends`, see ends_of_rows
    bool some,
        masked;       // of the whole warp: whether a row sees a key; whether a row that is not hidden sees only a part
    unsigned blocks;  // this lane's rows' chosen_blocks, a byte each
    template <Branch branch>
    __device__ bool hidden(int m, int i) const {
        return branch == SLC && row_byte(blocks, m, i) == 0;
    }
};
// selected: the bitmasks of the tile of queries.
template <Branch branch, int M>
__device__ inline TileView look_at_tile(int key_tile, int first_end, unsigned ends, const uint32_t* selected,
                                        const AttentionShape& s) {
    TileView view = {first_end - key_tile * KEY_TILE, false, false, 0};
    const TileBlocks blocks = branch == SLC ? tile_blocks(key_tile, s) : TileBlocks{0, 0, 0};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token =
                row_byte(ends, m, i);  // in the selected branch, where the end is the token's own place + 1
            const bool query = token != NO_QUERY;
            const unsigned chosen = branch == SLC && query ? chosen_blocks(selected, token, blocks, s) : 0;
            view.blocks |= chosen << (m * 16 + i * 8);
            const Visible visible = visible_keys<branch>(end_of_row(view.first_end, ends, m, i), chosen, s);
            const bool all = sees_all(visible, KEY_TILE) && (branch != SLC || chosen == blocks.all);
            view.some = view.some || sees_some(visible, KEY_TILE);
            view.masked = view.masked || (query && !all && !view.hidden<branch>(m, i));
        }
    view.some = __any_sync(~0u, view.some);
    view.masked = __any_sync(~0u, view.masked);
    return view;
}
// The scores p of keys first .. first + 8 N - 1 of a tile become -infinity
// where the row does not see the key; the exponential makes that 0.
template <Branch branch, int M, int N>
__device__ inline void hide_keys(float (&p)[M][N][4], const TileView& view, int first, unsigned ends,
                                 const AttentionShape& s) {
#pragma unroll
    for (int part = 0; part < N; part += 2)  // 16 keys, which are of one selection block
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = first + part * 8;
                const bool chosen = row_byte(view.blocks, m, i) >> (key >> s.slc_shift) & 1;
                const Visible visible = visible_keys<branch>(end_of_row(view.first_end - key, ends, m, i), chosen, s);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (!sees(visible, n * 8 + threadIdx.x % 4 * 2 + e)) p[m][part + n][2 * i + e] = -INFINITY;
            }
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
// Forward. One block per tile of queries; each warp has rows of its own.
// Tiles of K and V come in two buffers: while one is used, the next arrives.

// out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys, lse [B, H, queries]; without a key 0 and
// +infinity.
template <Branch branch, int D>
__global__ void __launch_bounds__(tile_threads<D>(), 256 / tile_threads<D>())
    attention_forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                             const uint32_t* selection, const SelectedChoice* choice, AttentionShape s) {
    constexpr int M = row_pieces<D>();
    if (branch == SLC && choice && choice->gather) return;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * M, rows = blockDim.x / 32 * 16 * M;
    const QueryTile tile = query_tile(s);
    const int end_tile = end_of_key_tiles<branch>(tile, s);
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(QUERY_ROWS * D);
    uint32_t* used = nullptr;

    copy_queries<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D, D, rows,
                    tile.tokens, s);
    cp_async_commit();
    if (branch == SLC) {
        used = shared.take<uint32_t>(tile_words(s.key_stride));
        selection += (size_t(tile.bg) * s.queries + tile.j0) * s.words;
        find_used_key_tiles(used, selection, tile.tokens, end_tile, s);
        __syncthreads();
    }
    const size_t group = size_t(tile.bg) * s.key_stride * D;
    auto copy_keys = [&](int buffer, int key_tile) {
        copy_keys_and_values<D>(k_tiles, v_tiles, buffer, k, v, group, key_tile, s);
    };
    int key_tile = next_tile<branch>(used, first_key_tile<branch>(tile, s), end_tile);
    if (key_tile >= end_tile) cp_async_commit();  // an empty group
    else copy_keys(0, key_tile);
    cp_async_wait<1>();
    __syncthreads();  // the queries have arrived
    unsigned q_rows[M][D / 16][4];
    load_rows<D>(q_rows, q_tile, first_row);

    // This lane's rows: first_row + m * 16 + i * 8 + lane / 4.
    const int first_end = end_of_keys<branch>(s.first + tile.j0, s);
    const unsigned ends = ends_of_rows<branch, M>(tile, first_row, s);
    float sums[M][D / 8][4], shift[M][2],
        total[M][2];  // shift: subtracted from the scores in base 2; total: of this lane's columns
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) shift[m][i] = -FLT_MAX, total[m][i] = 0;
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
        if (!view.some) continue;

        float p[M][KEY_TILE / 8][4] = {};
        multiply_rows<D, M, KEY_TILE / 16>(p, q_rows, k_tiles + buffer * KEY_TILE * D, 0);
        if (view.masked) hide_keys<branch>(p, view, 0, ends, s);

        // A row's shift follows its largest score only where that has grown by more than 2^8: the quotient at the end
        // is the same, exponentials up to 2^8 and their sums are far from fp32's limits, and in most steps no sum has
        // to be rescaled. Starting from -FLT_MAX a shift is always finite: no infinity is ever subtracted from another.
        float next[M][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float most = -INFINITY;
#pragma unroll
                for (int n = 0; n < KEY_TILE / 8; n++) most = fmaxf(most, fmaxf(p[m][n][2 * i], p[m][n][2 * i + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                most *= s.scale * LOG2_E;
                next[m][i] = most > shift[m][i] + MOST_GROWTH && !view.hidden<branch>(m, i) ? most : shift[m][i];
                grown = grown || next[m][i] != shift[m][i];
            }
        if (__any_sync(~0u, grown)) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float rescale = exp2_approx(shift[m][i] - next[m][i]);  // 1 where the shift stays
                    shift[m][i] = next[m][i];
                    total[m][i] *= rescale;
#pragma unroll
                    for (int x = 0; x < D / 8; x++) sums[m][x][2 * i] *= rescale, sums[m][x][2 * i + 1] *= rescale;
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float minus_shift = view.hidden<branch>(m, i) ? -INFINITY : -shift[m][i];
#pragma unroll
                for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        p[m][n][e] = exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, minus_shift));
                        total[m][i] += p[m][n][e];
                    }
            }
        multiply_add<D, M, KEY_TILE / 16>(sums, p, v_tiles + buffer * KEY_TILE * D, 0);
    }
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
            if (lane % 4 == 0) lse[row] = sum > 0 ? shift[m][i] / LOG2_E + logf(sum) : INFINITY;
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward, with P' = e^(q k^T / sqrt(D) - lse_gated) and dS = P' o (dout v^T - row_dot). The products q k^T and dout
// v^T are computed twice, in the dQ kernel, where a thread block keeps its queries, and in the dK/dV kernel, where it
// keeps its keys: so each gradient has one owner.

// dq [B, H, queries, D] = dS k / sqrt(D), or += with `add`.  The forward's structure with dout in place of the online
// softmax.
template <Branch branch, int D>
__global__ void __launch_bounds__(tile_threads<D>(), 256 / tile_threads<D>())
    attention_dq_kernel(float* dq, bool add, const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                        const float* row_dot, const float* lse_gated, const uint32_t* selection,
                        const SelectedChoice* choice, AttentionShape s) {
    constexpr int M = row_pieces<D>(), KEYS = 16;  // keys at a time, as many as there are registers for
    if (branch == SLC && choice && choice->gather) return;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * M, rows = blockDim.x / 32 * 16 * M;
    const QueryTile tile = query_tile(s);
    const int end_tile = end_of_key_tiles<branch>(tile, s);
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(QUERY_ROWS * D);
    bf16* dout_tile = shared.take<bf16>(QUERY_ROWS * D);
    uint32_t* used = nullptr;

    copy_queries<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D, D, rows,
                    tile.tokens, s);
    const size_t H = size_t(s.G) * s.heads,
                 dout_at = ((size_t(tile.bg / s.G) * s.queries + tile.j0) * H + size_t(tile.bg % s.G) * s.heads) * D;
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
        copy_keys_and_values<D>(k_tiles, v_tiles, buffer, k, v, group, key_tile, s);
    };
    int key_tile = next_tile<branch>(used, first_key_tile<branch>(tile, s), end_tile);
    if (key_tile >= end_tile) cp_async_commit();  // an empty group
    else copy_keys(0, key_tile);
    cp_async_wait<1>();
    __syncthreads();  // the queries have arrived
    unsigned q_rows[M][D / 16][4], dout_rows[M][D / 16][4];
    load_rows<D>(q_rows, q_tile, first_row);
    load_rows<D>(dout_rows, dout_tile, first_row);

    const int first_end = end_of_keys<branch>(s.first + tile.j0, s);
    const unsigned ends = ends_of_rows<branch, M>(tile, first_row, s);
    float sums[M][D / 8][4], minus_shift[M][2], dot[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long row = query_row(tile, first_row + m * 16 + i * 8 + lane / 4, s);
            minus_shift[m][i] = row < 0 ? -INFINITY : -lse_gated[row] * LOG2_E, dot[m][i] = row < 0 ? 0 : row_dot[row];
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
        if (!view.some) continue;
#pragma unroll 1
        for (int first = 0; first < KEY_TILE; first += KEYS) {
            float p[M][KEYS / 8][4] = {}, ds[M][KEYS / 8][4] = {};
            multiply_rows<D, M, KEYS / 16>(p, q_rows, k_tiles + buffer * KEY_TILE * D, first);
            multiply_rows<D, M, KEYS / 16>(ds, dout_rows, v_tiles + buffer * KEY_TILE * D, first);
            if (view.masked) hide_keys<branch>(p, view, first, ends, s);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float minus_lse = view.hidden<branch>(m, i) ? -INFINITY : minus_shift[m][i];
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int e = 2 * i; e < 2 * i + 2; e++)
                            ds[m][n][e] =
                                exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, minus_lse)) * (ds[m][n][e] - dot[m][i]);
                }
            multiply_add<D, M, KEYS / 16>(sums, ds, k_tiles + buffer * KEY_TILE * D, first);
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long row = query_row(tile, first_row + m * 16 + i * 8 + lane / 4, s);
            if (row < 0) continue;
#pragma unroll
            for (int x = 0; x < D / 8; x++) {
                float2* to = reinterpret_cast<float2*>(dq + size_t(row) * D + x * 8 + lane % 4 * 2);
                const float2 before = add ? *to : make_float2(0, 0);
                *to = make_float2(before.x + sums[m][x][2 * i] * s.scale, before.y + sums[m][x][2 * i + 1] * s.scale);
            }
        }
}

// dk [keys] = dS^T q / sqrt(D), dv [keys] = P'^T dout.  One block per tile of keys, which stay
// in registers, 32 in each of 2 warps (D = 128: 16 in each of 4); the tokens go by in tiles of
// 64, once for each head. S^T = k q^T and v dout^T come out as what the next products need.
//
// Pieces of 16 keys in a warp: two share each piece of q and dout that is loaded.
template <int D>
HOST_DEVICE constexpr int key_pieces() {
    return D > 64 ? 1 : 2;
}
template <int D>
HOST_DEVICE constexpr int dkdv_threads() {
    return KEY_TILE / 16 / key_pieces<D>() * 32;
}
HOST_DEVICE constexpr int sub_blocks(Branch branch) {
    return branch == SLC ? KEY_TILE / 16 : 1;
}  // selection blocks of a tile, at most
template <int D>
HOST_DEVICE constexpr bool keeps_v() {
    return D > 32;
}  // in shared memory, for want of registers

// What a row of a tile of tokens (one head) brings along, in shared memory, for each of the two buffers. A
// token that does not exist, or did not choose the selection block, has a shift that makes its weights 0.
struct RowStatistics {
    float* minus_shift;  // [2, selection blocks of a tile of keys, KEY_TILE]: -lse_gated in base 2, or -infinity
    float* dot;          // [2, KEY_TILE]: row_dot
};

// The sums of a warp's keys, and the keys themselves as A fragments (v: or in shared memory).
template <Branch branch, int D>
struct WarpKeys {
    static constexpr int M = key_pieces<D>();
    int first_key;  // of the tile
    unsigned k_rows[M][D / 16][4], v_rows[M][D / 16][4];
    const bf16* v_tile;
    float dk[M][D / 8][4], dv[M][D / 8][4];
    // The warp's first key, counted from the tile's; this lane's keys are lane / 4 behind it, and i * 8 and m * 16
    // further.
    __device__ int warp_key() const { return threadIdx.x / 32 * 16 * M; }
    __device__ int lane_key() const { return warp_key() + threadIdx.x % 32 / 4; }
    // A barrier must lie between the arrival of the tiles and this.
    __device__ void load(const bf16* k_tile, const bf16* v, int first) {
        first_key = first, v_tile = v;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int x = 0; x < D; x += 16) {
                load_a<D>(k_rows[m][x / 16], k_tile, warp_key() + m * 16, x);
                if (!keeps_v<D>()) load_a<D>(v_rows[m][x / 16], v_tile, warp_key() + m * 16, x);
            }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int x = 0; x < D / 8; x++)
#pragma unroll
                for (int e = 0; e < 4; e++) dk[m][x][e] = 0, dv[m][x][e] = 0;
    }
    // dv += P'^T dout and dk += dS^T q over the 64 rows of a tile of tokens. token(row): the position of the row's
    // token; only asked where `masked`: else all tokens see all keys of the warp whose selection block they chose.
    template <class Token>
    __device__ void add_tokens(const bf16* q_tile, const bf16* dout_tile, const RowStatistics& rows, int buffer,
                               bool masked, Token token, const AttentionShape& s) {
        constexpr int TOKENS = 16;  // at a time, as many as there are registers for
        const int column = threadIdx.x % 4 * 2;
        const float* dot = rows.dot + buffer * KEY_TILE + column;
        const float* minus_shift = rows.minus_shift + buffer * sub_blocks(branch) * KEY_TILE + column;
#pragma unroll 1
        for (int first = 0; first < KEY_TILE; first += TOKENS) {
            float p[M][TOKENS / 8][4] = {}, ds[M][TOKENS / 8][4] = {};
            multiply_rows<D, M, TOKENS / 16>(p, k_rows, q_tile, first);
            if constexpr (keeps_v<D>()) multiply_rows<D, M, TOKENS / 16>(ds, v_tile, warp_key(), dout_tile, first);
            else multiply_rows<D, M, TOKENS / 16>(ds, v_rows, dout_tile, first);
            if (masked) {
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int odd = 0; odd < 2; odd++) {
                        const int age =
                            token(first + n * 8 + column + odd) - first_query<branch>(first_key + lane_key(), s);
#pragma unroll
                        for (int m = 0; m < M; m++)
#pragma unroll
                            for (int i = 0; i < 2; i++) {  // query_sees(), for a key further on
                                const int key = m * 16 + i * 8;
                                if (age < (branch == CMP ? key * s.d : key) || (branch == WIN && age >= key + s.window))
                                    p[m][n][2 * i + odd] = -INFINITY;
                            }
                    }
            }
#pragma unroll
            for (int m = 0; m < M; m++) {
                const int sub_block = branch == SLC ? (warp_key() + m * 16) >> s.slc_shift : 0;
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++) {
                    const float2 minus_lse =
                        *reinterpret_cast<const float2*>(minus_shift + sub_block * KEY_TILE + first + n * 8);
                    const float2 of_dot = *reinterpret_cast<const float2*>(dot + first + n * 8);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        p[m][n][e] = exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, e % 2 ? minus_lse.y : minus_lse.x));
                        ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? of_dot.y : of_dot.x));
                    }
                }
            }
            multiply_add<D, M, TOKENS / 16>(dv, p, dout_tile, first);
            multiply_add<D, M, TOKENS / 16>(dk, ds, q_tile, first);
        }
    }
    // The sums go to rows first_key.. of dk and dv [B, G, key_stride, D], or, where given, as they are to partial [2,
    // KEY_TILE, D].
    __device__ void store(bf16* dk_out, bf16* dv_out, float* partial, int bg, const AttentionShape& s) const {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int row = 0; row < 2 * M; row++) {
            const int m = row / 2, i = row % 2, key = lane_key() + row * 8;
            if (first_key + key >= s.keys) continue;
            const size_t at = size_t(bg * s.key_stride + first_key + key) * D + column;
#pragma unroll
            for (int x = 0; x < D / 8; x++) {
                const float2 dk_pair = make_float2(dk[m][x][2 * i] * s.scale, dk[m][x][2 * i + 1] * s.scale);
                const float2 dv_pair = make_float2(dv[m][x][2 * i], dv[m][x][2 * i + 1]);
                if (partial) {
                    *reinterpret_cast<float2*>(partial + key * D + column + x * 8) = dk_pair;
                    *reinterpret_cast<float2*>(partial + (KEY_TILE + key) * D + column + x * 8) = dv_pair;
                } else {
                    *reinterpret_cast<__nv_bfloat162*>(dk_out + at + x * 8) =
                        __floats2bfloat162_rn(dk_pair.x, dk_pair.y);
                    *reinterpret_cast<__nv_bfloat162*>(dv_out + at + x * 8) =
                        __floats2bfloat162_rn(dv_pair.x, dv_pair.y);
                }
            }
        }
    }
};
// In the compressed branch the queries are cut into parts: the keys are few, so their tiles alone would not
// fill a GPU, and the first are seen by almost all queries. The first part that sees a key of the tile:
__device__ inline int first_part(int key_tile, const AttentionShape& s) {
    return max(first_query<CMP>(key_tile * KEY_TILE, s) - s.first, 0) / s.part_tokens;
}

// partial [B*G, tiles of keys, parts, 2, KEY_TILE, D], where there is more than one part
template <Branch branch, int D>
__global__ void __launch_bounds__(dkdv_threads<D>(), D > 64 ? 2 : 4)
    attention_dkdv_kernel(bf16* dk, bf16* dv, float* partial, const bf16* dout, const bf16* q, const bf16* k,
                          const bf16* v, const float* row_dot, const float* lse_gated, const uint32_t* selection,
                          const SelectedChoice* choice, AttentionShape s) {
    constexpr int THREADS = dkdv_threads<D>(), SUB_BLOCKS = sub_blocks(branch);
    if (branch == SLC && choice && choice->gather) return;
    // Early keys are seen by more queries and start first.
    const int parts = branch == CMP ? s.parts : 1, part = branch == CMP ? int(blockIdx.x) / s.batch_groups % parts : 0;
    const int tile = int(blockIdx.x) / s.batch_groups / parts, bg = int(blockIdx.x) % s.batch_groups,
              first_key = tile * KEY_TILE;
    if (branch == CMP && part < first_part(tile, s)) return;
    DynamicShared shared;
    bf16* q_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* dout_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    const RowStatistics rows = {shared.take<float>(2 * SUB_BLOCKS * KEY_TILE), shared.take<float>(2 * KEY_TILE)};
    // The keys pass through the second buffers into registers, as A fragments.
    bf16* k_tile = q_tiles + KEY_TILE * D;
    bf16* v_tile = keeps_v<D>() ? shared.take<bf16>(KEY_TILE * D) : dout_tiles + KEY_TILE * D;
    uint32_t* used = nullptr;
    const size_t group = size_t(bg * s.key_stride + first_key) * D;
    copy_tile<D, THREADS>(k_tile, k + group, D, s.keys - first_key);
    copy_tile<D, THREADS>(v_tile, v + group, D, s.keys - first_key);
    cp_async_commit();
    if (branch == SLC) {
        used = shared.take<uint32_t>(tile_words(s.queries));
        selection += size_t(bg) * s.queries * s.words;
        find_used_token_tiles(used, selection, tile, s);
    }
    cp_async_wait<0>();
    __syncthreads();
    WarpKeys<branch, D> keys;
    keys.load(k_tile, v_tile, first_key);

    // there are fewer than 2^31 rows
    const int H = s.G * s.heads, q_row = bg * s.heads * s.queries,
              dout_row = bg / s.G * s.queries * H + bg % s.G * s.heads;
    auto copy_tokens = [&](int buffer, int token_tile, int head) {
        const int j = token_tile * KEY_TILE;
        copy_tile<D, THREADS>(q_tiles + buffer * KEY_TILE * D, q + size_t(q_row + head * s.queries + j) * D, D,
                              s.queries - j);
        copy_tile<D, THREADS>(dout_tiles + buffer * KEY_TILE * D, dout + size_t(dout_row + j * H + head) * D,
                              size_t(H) * D, s.queries - j);
        cp_async_commit();
    };
    // A thread for each row of the tile of tokens.
    const bool has_row = threadIdx.x < KEY_TILE;
    float minus_shift = 0, dot = 0;
    unsigned chosen = ~0u;
    auto load_statistics = [&](int token_tile, int head) {
        const int j = token_tile * KEY_TILE + int(threadIdx.x);
        const bool query = has_row && j < s.queries;
        const int row = q_row + head * s.queries + j;
        minus_shift = query ? -lse_gated[row] * LOG2_E : -INFINITY, dot = query ? row_dot[row] : 0;
        if (branch == SLC && query)
            chosen = chosen_blocks(selection + size_t(token_tile) * KEY_TILE * s.words, threadIdx.x,
                                   tile_blocks(tile, s), s);
    };
    auto store_statistics = [&](int buffer) {
        if (!has_row) return;
        rows.dot[buffer * KEY_TILE + threadIdx.x] = dot;
        for (int sub = 0; sub < (branch == SLC ? blocks_per_tile(s) : 1); sub++)
            rows.minus_shift[(buffer * SUB_BLOCKS + sub) * KEY_TILE + threadIdx.x] =
                chosen >> sub & 1 ? minus_shift : -INFINITY;
    };

    // Tokens that may see a key of the tile, counted from s.first.
    const int first_token = max(first_query<branch>(first_key, s) - s.first, branch == CMP ? part * s.part_tokens : 0);
    const int end_token = min(s.queries, branch == WIN   ? first_key + KEY_TILE - 1 + s.window - s.first
                                         : branch == CMP ? (part + 1) * s.part_tokens
                                                         : s.queries);
    const int end_tile = (end_token + KEY_TILE - 1) / KEY_TILE;
    // The warp's first and last key say what it sees of a tile of tokens.
    const int low_key = first_key + keys.warp_key(), high_key = low_key + 16 * key_pieces<D>() - 1;
    int token_tile = next_tile<branch>(used, max(first_token, 0) / KEY_TILE, end_tile), head = 0;
    if (token_tile < end_tile) {
        copy_tokens(0, token_tile, head);
        load_statistics(token_tile, head);
        store_statistics(0);
    }
    for (int buffer = 0; token_tile < end_tile; buffer ^= 1) {
        const int t0 = s.first + token_tile * KEY_TILE;
        if (++head == s.heads) head = 0, token_tile = next_tile<branch>(used, token_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other
        if (token_tile < end_tile) {
            copy_tokens(buffer ^ 1, token_tile, head);
            load_statistics(token_tile, head);
        }
        const bool some =
            first_query<branch>(low_key, s) < t0 + KEY_TILE && (branch != WIN || t0 < high_key + s.window);
        const bool masked = !query_sees<branch>(t0, high_key, s) || !query_sees<branch>(t0 + KEY_TILE - 1, low_key, s);
        if (some)
            keys.add_tokens(
                q_tiles + buffer * KEY_TILE * D, dout_tiles + buffer * KEY_TILE * D, rows, buffer, masked,
                [&](int row) { return t0 + row; }, s);
        if (token_tile < end_tile) store_statistics(buffer ^ 1);  // only now, so that nobody waits for the load
    }
    if (branch == CMP && parts > 1)
        partial += ((size_t(bg) * ((s.keys + KEY_TILE - 1) / KEY_TILE) + tile) * parts + part) * 2 * KEY_TILE * D;
    keys.store(dk, dv, branch == CMP && parts > 1 ? partial : nullptr, bg, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// The selected branch by gathered rows, for long sequences, where the tokens of a tile choose many blocks together and
// each of them few. Nothing is sorted: a selection is turned from "which blocks did this token choose" to "which tokens
// chose this block" by a 32 x 32 transposition of bits, and the set bits, from the lowest on, are the list of tokens.
//
// A unit is what can be told apart in such a list: a selection block, or the several that share a tile of keys.

constexpr int GATHER_WARPS = 6;     // of a block that owns a tile of queries
constexpr int GATHER_TOKENS = 32;   // of a tile of queries at most: one bit each
constexpr int GATHER_CHUNK = 2048;  // tokens of a tile of keys that one thread block handles; longer lists are split
// Rows of a tile of queries: what fits twice into the shared memory of an sm_90 multiprocessor (D = 128: once, as on
// sm_80).
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

// Each lane gives one word of a token's selection; lane i gets the bitmask of the lanes whose token chose a block of
// the word's i-th unit.
__device__ inline uint32_t transpose_choices(uint32_t word, const AttentionShape& s) {
    const int blocks = 32 / units_per_word(s);
    uint32_t tokens = 0;
    for (int unit = 0; unit < units_per_word(s); unit++) {
        const unsigned those = __ballot_sync(~0u, (word >> (unit * blocks) & ((1u << blocks) - 1)) != 0);
        if (int(threadIdx.x % 32) == unit) tokens = those;
    }
    return tokens;
}
// The place of the n-th set bit of bits, the lowest being the 0th; there have to be so many.
__device__ inline int nth_bit(unsigned bits, int n) {
    int place = 0;
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        const int below = __popc(bits & ((1u << half) - 1));
        if (n >= below) n -= below, bits >>= half, place += half;
    }
    return place;
}

// choosers [units] = which of the tile's tokens chose the unit; used = bitmask over tiles of keys: whether
// one did. selected: the bitmasks of the tile's tokens. By all threads of the block; a barrier must follow.
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

// Up to 16 rows (token * heads + head) of a tile of queries, from index `first` of the list of those whose tokens chose
// the tile of keys, in the order of tokens, then heads. Where fewer remain, the last one is repeated and its results
// are dropped.
struct GatheredRows {
    int source;            // the row whose part of the A fragments this lane loads
    int row[2], token[2];  // this lane's rows of the products, lane / 4 and that + 8; row -1: a repeated one
};
__device__ inline GatheredRows gather(uint32_t choosers, int first, int items, const AttentionShape& s) {
    const int lane = threadIdx.x % 32, item = min(first + lane % 16, items - 1), number = s.by_heads.of(item),
              token = nth_bit(choosers, number);
    const int source = token * s.heads + item - number * s.heads,
              place = first + lane % 16 < items ? source << 8 | token : -1;
    GatheredRows rows;
    rows.source = source;
    const int low = __shfl_sync(~0u, place, lane / 4);
    const int high = __shfl_sync(~0u, place, lane / 4 + 8);
    rows.row[0] = low >> 8, rows.token[0] = low & 255, rows.row[1] = high >> 8, rows.token[1] = high & 255;
    return rows;
}
// a = the A fragments of the gathered rows of a tile: ldmatrix takes an
// address from each lane, so that scattered rows cost what a run of rows does.
template <int D>
__device__ inline void load_gathered(unsigned (&a)[D / 16][4], const bf16* tile, const GatheredRows& rows) {
    const int at = chunk_at<D>(rows.source, threadIdx.x % 32 / 16);
#pragma unroll
    for (int x = 0; x < D; x += 16) ldmatrix_x4(a[x / 16], tile + (at ^ x));
}
// tile [tokens * heads, D] = the queries of a tile, token by token, from
// heads and tokens that are head_stride and token_stride elements apart.
template <int D>
__device__ inline void copy_queries_by_token(bf16* tile, const bf16* in, size_t head_stride, size_t token_stride,
                                             int tokens, const AttentionShape& s) {
    for (int i = threadIdx.x; i < tokens * s.heads * (D / 8); i += blockDim.x) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        cp_async_16(tile + chunk_at<D>(row, chunk),
                    in + row % s.heads * head_stride + row / s.heads * token_stride + chunk * 8, true);
    }
}
// Sums in shared memory, [rows, D] in fp32. A product leaves in lane 4 g + t of row g the columns
// 8 x + 2 t and + 1; those of x = 2 i and 2 i + 1 lie together, 16 bytes, at place 4 i + t of the
// row, in odd rows at the place with bit 2 flipped, so that neighbouring rows use different banks.
template <int D>
__device__ inline float4* sums_at(float* sums, int row, int i) {
    const int place = (i * 4 + threadIdx.x % 4) ^ (D > 16 ? (row & 1) << 2 : 0);
    return reinterpret_cast<float4*>(sums + row * D) + place;
}
// The same for any thread: pair i, t of a row.
template <int D>
__device__ inline float4 sums_of(const float* sums, int row, int i, int t) {
    return reinterpret_cast<const float4*>(sums + row * D)[(i * 4 + t) ^ (D > 16 ? (row & 1) << 2 : 0)];
}
// c += p b over the 64 keys of a tile for the gathered rows, whose sums lie in shared memory and are first multiplied
// by `rescale`.
template <int D>
__device__ inline void add_to_sums(float* sums, const GatheredRows& rows, const float (&rescale)[2],
                                   const float (&p)[1][KEY_TILE / 8][4], const bf16* b_tile) {
    float c[1][D / 8][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int x = 0; x < D / 8; x += 2) {
            const float4 four = rows.row[i] < 0 ? make_float4(0, 0, 0, 0) : *sums_at<D>(sums, rows.row[i], x / 2);
            c[0][x][2 * i] = four.x * rescale[i], c[0][x][2 * i + 1] = four.y * rescale[i];
            c[0][x + 1][2 * i] = four.z * rescale[i], c[0][x + 1][2 * i + 1] = four.w * rescale[i];
        }
    multiply_add<D, 1, KEY_TILE / 16>(c, p, b_tile, 0);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int x = 0; x < D / 8; x += 2)
            if (rows.row[i] >= 0)
                *sums_at<D>(sums, rows.row[i], x / 2) =
                    make_float4(c[0][x][2 * i], c[0][x][2 * i + 1], c[0][x + 1][2 * i], c[0][x + 1][2 * i + 1]);
}
// Which keys of a tile the gathered rows see: the first `end`, where the key's selection block is in `blocks`.
struct GatheredView {
    bool masked;
    int end[2];
    unsigned blocks[2];
    // The scores of keys that a row does not see become -infinity; the exponential makes that 0.
    __device__ void hide_keys(float (&p)[1][KEY_TILE / 8][4], const AttentionShape& s) const {
        if (!masked) return;
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool chosen = blocks[i] >> (n * 8 >> s.slc_shift) & 1;
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (!chosen || n * 8 + int(threadIdx.x) % 4 * 2 + e >= end[i]) p[0][n][2 * i + e] = -INFINITY;
            }
    }
};
__device__ inline GatheredView look_at_gathered(int key_tile, const TileBlocks& blocks, const GatheredRows& rows,
                                                const uint32_t* selected, const QueryTile& tile,
                                                const AttentionShape& s) {
    GatheredView view;
    const bool shared_tile = blocks_per_tile(s) > 1;
    view.masked = shared_tile || key_tile * KEY_TILE + KEY_TILE - 1 > s.first + tile.j0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        view.end[i] = s.first + tile.j0 + rows.token[i] + 1 - key_tile * KEY_TILE;
        view.blocks[i] = shared_tile && rows.row[i] >= 0 ? chosen_blocks(selected, rows.token[i], blocks, s) : 1;
    }
    return view;
}
// Bytes of shared memory for what both kernels below need besides their rows.
template <int D>
HOST_DEVICE constexpr size_t gather_key_bytes() {
    return 4 * KEY_TILE * D * sizeof(bf16);
}

// As attention_forward_kernel<SLC>. A block owns a tile of tokens; its queries and sums lie in shared memory, row token
// * heads + head. For each tile of keys that some token chose, the warps take turns at 16 of the rows that see it.
template <int D>
__global__ void __launch_bounds__(GATHER_WARPS * 32, D > 64 ? 1 : 2)
    gather_forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, const uint32_t* selection,
                          const SelectedChoice* choice, AttentionShape s) {
    if (choice && !choice->gather) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const QueryTile tile = query_tile(s);
    const int rows = tile.tokens * s.heads, end_tile = end_of_key_tiles<SLC>(tile, s);
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(s.tile_tokens * s.heads * D);
    float* sums = shared.take<float>(s.tile_tokens * s.heads * D);
    float2* softmax = shared.take<float2>(s.tile_tokens * s.heads);  // largest score in base 2, sum of the exponentials
    uint32_t* choosers = shared.take<uint32_t>(units(s.key_stride, s));
    uint32_t* used = shared.take<uint32_t>(tile_words(s.key_stride));

    copy_queries_by_token<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D,
                             D, tile.tokens, s);
    cp_async_commit();
    selection += (size_t(tile.bg) * s.queries + tile.j0) * s.words;
    find_choosers(choosers, used, selection, tile.tokens, end_tile, s);
    for (int i = threadIdx.x; i < rows * D; i += blockDim.x) sums[i] = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) softmax[i] = make_float2(-FLT_MAX, 0);
    __syncthreads();

    const size_t group = size_t(tile.bg) * s.key_stride * D;
    auto copy_keys = [&](int buffer, int key_tile) {
        copy_keys_and_values<D>(k_tiles, v_tiles, buffer, k, v, group, key_tile, s);
    };
    int key_tile = next_tile<SLC>(used, 0, end_tile);
    if (key_tile < end_tile) copy_keys(0, key_tile);
    for (int buffer = 0; key_tile < end_tile; buffer ^= 1) {
        const int this_tile = key_tile;
        key_tile = next_tile<SLC>(used, key_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, all warps are done with the other and with the rows of the last
                          // tile
        if (key_tile < end_tile) copy_keys(buffer ^ 1, key_tile);

        const uint32_t tokens = choosers[unit_of_tile(this_tile, s)];
        const TileBlocks blocks = tile_blocks(this_tile, s);
        const int items = __popc(tokens) * s.heads;
        for (int first = warp * 16; first < items; first += warps * 16) {
            const GatheredRows r = gather(tokens, first, items, s);
            float p[1][KEY_TILE / 8][4] = {}, rescale[2];
            {
                unsigned q_rows[1][D / 16][4];
                load_gathered<D>(q_rows[0], q_tile, r);
                multiply_rows<D, 1, KEY_TILE / 16>(p, q_rows, k_tiles + buffer * KEY_TILE * D, 0);
            }
            look_at_gathered(this_tile, blocks, r, selection, tile, s).hide_keys(p, s);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // The first of the four lanes that share a row keeps its statistics.
                const bool keeper = lane % 4 == 0 && r.row[i] >= 0;
                const float2 before = keeper ? softmax[r.row[i]] : make_float2(-FLT_MAX, 0);
                const float largest = __shfl_sync(~0u, before.x, lane & ~3);
                float most = -INFINITY;
#pragma unroll
                for (int n = 0; n < KEY_TILE / 8; n++) most = fmaxf(most, fmaxf(p[0][n][2 * i], p[0][n][2 * i + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                const float shift =
                    fmaxf(largest, most * (s.scale * LOG2_E));  // finite, as in attention_forward_kernel
                rescale[i] = exp2_approx(largest - shift);
                float total = before.y * rescale[i];
#pragma unroll
                for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        p[0][n][e] = exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, -shift));
                        total += p[0][n][e];
                    }
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                if (keeper) softmax[r.row[i]] = make_float2(shift, total);
            }
            add_to_sums<D>(sums, r, rescale, p, v_tiles + buffer * KEY_TILE * D);
        }
    }
    cp_async_wait<0>();  // q, where there was no tile of keys
    __syncthreads();
    for (int i = threadIdx.x; i < rows * (D / 4); i += blockDim.x) {
        const int row = i / (D / 4), pair = i % (D / 4) / 4, t = i % 4;
        const float2 statistics = softmax[row];
        const float inverse = statistics.y > 0 ? 1 / statistics.y : 0;
        const float4 four = sums_of<D>(sums, row, pair, t);
        const size_t to = (size_t(tile.bg) * s.heads + row % s.heads) * s.queries + tile.j0 + row / s.heads;
        __nv_bfloat162* const columns = reinterpret_cast<__nv_bfloat162*>(out + to * D + pair * 16 + t * 2);
        columns[0] = __floats2bfloat162_rn(four.x * inverse, four.y * inverse);
        columns[4] = __floats2bfloat162_rn(four.z * inverse, four.w * inverse);
        if (i % (D / 4) == 0) lse[to] = statistics.y > 0 ? statistics.x / LOG2_E + logf(statistics.y) : INFINITY;
    }
}

// As attention_dq_kernel<SLC>; the structure of gather_forward_kernel.
template <int D>
__global__ void __launch_bounds__(GATHER_WARPS * 32, D > 64 ? 1 : 2)
    gather_dq_kernel(float* dq, bool add, const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                     const float* row_dot, const float* lse_gated, const uint32_t* selection,
                     const SelectedChoice* choice, AttentionShape s) {
    if (choice && !choice->gather) return;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const QueryTile tile = query_tile(s);
    const int rows = tile.tokens * s.heads, end_tile = end_of_key_tiles<SLC>(tile, s);
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* v_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(s.tile_tokens * s.heads * D);
    bf16* dout_tile = shared.take<bf16>(s.tile_tokens * s.heads * D);
    float* sums = shared.take<float>(s.tile_tokens * s.heads * D);
    float2* statistics = shared.take<float2>(s.tile_tokens * s.heads);  // -lse_gated in base 2, row_dot
    uint32_t* choosers = shared.take<uint32_t>(units(s.key_stride, s));
    uint32_t* used = shared.take<uint32_t>(tile_words(s.key_stride));

    const size_t H = size_t(s.G) * s.heads,
                 dout_at = ((size_t(tile.bg / s.G) * s.queries + tile.j0) * H + size_t(tile.bg % s.G) * s.heads) * D;
    copy_queries_by_token<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D,
                             D, tile.tokens, s);
    copy_queries_by_token<D>(dout_tile, dout + dout_at, D, H * D, tile.tokens, s);
    cp_async_commit();
    // in [B, H, queries]
    auto place_of = [&](int row) {
        return (size_t(tile.bg) * s.heads + row % s.heads) * s.queries + tile.j0 + row / s.heads;
    };
    selection += (size_t(tile.bg) * s.queries + tile.j0) * s.words;
    find_choosers(choosers, used, selection, tile.tokens, end_tile, s);
    for (int i = threadIdx.x; i < rows * D; i += blockDim.x) sums[i] = 0;
    for (int i = threadIdx.x; i < rows; i += blockDim.x)
        statistics[i] = make_float2(-lse_gated[place_of(i)] * LOG2_E, row_dot[place_of(i)]);
    __syncthreads();

    const size_t group = size_t(tile.bg) * s.key_stride * D;
    auto copy_keys = [&](int buffer, int key_tile) {
        copy_keys_and_values<D>(k_tiles, v_tiles, buffer, k, v, group, key_tile, s);
    };
    int key_tile = next_tile<SLC>(used, 0, end_tile);
    if (key_tile < end_tile) copy_keys(0, key_tile);
    for (int buffer = 0; key_tile < end_tile; buffer ^= 1) {
        const int this_tile = key_tile;
        key_tile = next_tile<SLC>(used, key_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, all warps are done with the other and with the rows of the last
                          // tile
        if (key_tile < end_tile) copy_keys(buffer ^ 1, key_tile);

        const uint32_t tokens = choosers[unit_of_tile(this_tile, s)];
        const TileBlocks blocks = tile_blocks(this_tile, s);
        const int items = __popc(tokens) * s.heads;
        for (int first = warp * 16; first < items; first += warps * 16) {
            const GatheredRows r = gather(tokens, first, items, s);
            float2 of_row[2];
#pragma unroll
            for (int i = 0; i < 2; i++) of_row[i] = r.row[i] < 0 ? make_float2(-INFINITY, 0) : statistics[r.row[i]];
            float p[1][KEY_TILE / 8][4] = {}, ds[1][KEY_TILE / 8][4] = {};
            {
                unsigned a[1][D / 16][4];
                load_gathered<D>(a[0], q_tile, r);
                multiply_rows<D, 1, KEY_TILE / 16>(p, a, k_tiles + buffer * KEY_TILE * D, 0);
                load_gathered<D>(a[0], dout_tile, r);
                multiply_rows<D, 1, KEY_TILE / 16>(ds, a, v_tiles + buffer * KEY_TILE * D, 0);
            }
            look_at_gathered(this_tile, blocks, r, selection, tile, s).hide_keys(p, s);
#pragma unroll
            for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    ds[0][n][e] = exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, of_row[e / 2].x)) *
                                  (ds[0][n][e] - of_row[e / 2].y);
            const float keep[2] = {1, 1};
            add_to_sums<D>(sums, r, keep, ds, k_tiles + buffer * KEY_TILE * D);
        }
    }
    cp_async_wait<0>();  // q and dout, where there was no tile of keys
    __syncthreads();
    for (int i = threadIdx.x; i < rows * (D / 4); i += blockDim.x) {
        const int row = i / (D / 4), pair = i % (D / 4) / 4, t = i % 4;
        const float4 four = sums_of<D>(sums, row, pair, t);
        float2* const columns = reinterpret_cast<float2*>(dq + place_of(row) * D + pair * 16 + t * 2);
        const float2 low = add ? columns[0] : make_float2(0, 0), high = add ? columns[4] : make_float2(0, 0);
        columns[0] = make_float2(low.x + four.x * s.scale, low.y + four.y * s.scale);
        columns[4] = make_float2(high.x + four.z * s.scale, high.y + four.w * s.scale);
    }
}

// Where dK and dV by gathered rows keep what they need; all arrays are in the workspace of attention_backward.
struct GatherPlan {
    uint32_t* choosers;  // [B*G, units, token_words]: which tokens chose the unit
    int* counts;         // [B*G, units]: how many
    int* extra;          // [B*G, tiles + 1]: chunks beyond their first that the tiles of keys before this one have
    float* partial;      // [B*G, 2 * most_extra, 2, KEY_TILE, D]: sums of the chunks of lists that are split
    int tiles, units, token_words;
    int most_extra;  // extra chunks of one (sequence, group) at most
    // Where the sums of a tile's chunk lie. A tile with e > 0 extra chunks stores e + 1 sums; 2 e slots are reserved
    // for it.
    __device__ size_t slot(int bg, int tile, int chunk) const {
        return size_t(bg) * 2 * most_extra + 2 * extra[size_t(bg) * (tiles + 1) + tile] + chunk;
    }
    __device__ int chunks(int bg, int tile) const {
        const int* e = extra + size_t(bg) * (tiles + 1) + tile;
        return e[1] - e[0] + 1;
    }
};

// choosers [B*G, units, token_words]; a warp transposes one word of 32 tokens' selections
__global__ void __launch_bounds__(128) transpose_selection_kernel(GatherPlan plan, const uint32_t* selection,
                                                                  const SelectedChoice* choice, AttentionShape s) {
    if (choice && !choice->gather) return;
    const int lane = threadIdx.x % 32, token_word = int(blockIdx.x) % plan.token_words,
              bg = int(blockIdx.x) / plan.token_words;
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
__global__ void __launch_bounds__(128)
    count_choosers_kernel(GatherPlan plan, int all_units, const SelectedChoice* choice) {
    if (choice && !choice->gather) return;
    const int unit = int(blockIdx.x) * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (unit >= all_units) return;  // a whole warp
    int count = 0;
    for (int word = lane; word < plan.token_words; word += 32)
        count += __popc(plan.choosers[size_t(unit) * plan.token_words + word]);
    for (int flip = 16; flip > 0; flip /= 2) count += __shfl_xor_sync(~0u, count, flip);
    if (lane == 0) plan.counts[unit] = count;
}
// extra [B*G, tiles + 1]; one warp for each (sequence, group)
__global__ void __launch_bounds__(32)
    plan_chunks_kernel(GatherPlan plan, const SelectedChoice* choice, AttentionShape s) {
    if (choice && !choice->gather) return;
    const int lane = threadIdx.x, bg = blockIdx.x;
    int* extra = plan.extra + size_t(bg) * (plan.tiles + 1);
    int before = 0;
    for (int first = 0; first < plan.tiles; first += 32) {
        const int tile = first + lane,
                  count = tile < plan.tiles ? plan.counts[size_t(bg) * plan.units + unit_of_tile(tile, s)] : 0;
        const int own = count ? (count - 1) / GATHER_CHUNK : 0;
        int sum = own;  // of the lanes up to this one
        for (int delta = 1; delta < 32; delta *= 2) {
            const int other = __shfl_up_sync(~0u, sum, unsigned(delta));
            if (lane >= delta) sum += other;
        }
        if (tile < plan.tiles) extra[tile] = before + sum - own;
        before += __shfl_sync(~0u, sum, 31);
    }
    assert(before <= plan.most_extra);  // else some query has chosen more blocks than the host was told
    if (lane == 0) extra[plan.tiles] = before;
}

// list = the places of the set bits of row [words], number first .. first + GATHER_CHUNK - 1 of them in ascending
// order, then -1 up to a multiple of 64. Returns how many there are. By all threads of the block; counts: a number for
// each warp. Begins and ends with a barrier.
__device__ inline int list_tokens(int* list, int* counts, const uint32_t* row, int words, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int before = 0;  // set bits in the words of earlier rounds
    for (int first_word = 0; first_word < words && before < first + GATHER_CHUNK; first_word += int(blockDim.x)) {
        const int word = first_word + int(threadIdx.x);
        uint32_t bits = word < words ? row[word] : 0;
        int number = __popc(bits);  // becomes the number of set bits up to and with this lane's word
        for (int delta = 1; delta < 32; delta *= 2) {
            const int other = __shfl_up_sync(~0u, number, unsigned(delta));
            if (lane >= delta) number += other;
        }
        __syncthreads();  // the counts of the round before have been read
        if (lane == 31) counts[warp] = number;
        __syncthreads();
        number += before - __popc(bits);
        for (int w = 0; w < warps; w++) {
            if (w < warp) number += counts[w];
            before += counts[w];
        }
        for (; bits; bits &= bits - 1, number++)
            if (number >= first && number < first + GATHER_CHUNK)
                list[number - first] = word * 32 + __ffs(int(bits)) - 1;
    }
    const int found = max(0, min(before - first, GATHER_CHUNK));
    for (int i = found + int(threadIdx.x); i < (found + KEY_TILE - 1) / KEY_TILE * KEY_TILE; i += int(blockDim.x))
        list[i] = -1;
    __syncthreads();
    return found;
}

// As attention_dkdv_kernel<SLC>, but the tiles of 64 tokens are gathered: they hold only tokens that chose a
// block of the tile of keys. A list of more than GATHER_CHUNK tokens (block 0 is chosen by all) is split into
// chunks, whose sums go to plan.partial. The first most_extra * B*G blocks take the chunks beyond the first.
template <int D>
__global__ void __launch_bounds__(dkdv_threads<D>(), D > 64 ? 2 : 4)
    gather_dkdv_kernel(bf16* dk, bf16* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v,
                       const float* row_dot, const float* lse_gated, const uint32_t* selection, GatherPlan plan,
                       const SelectedChoice* choice, AttentionShape s) {
    if (choice && !choice->gather) return;
    constexpr int THREADS = dkdv_threads<D>(), SUB_BLOCKS = sub_blocks(SLC);
    const int bg = int(blockIdx.x) % s.batch_groups, item = int(blockIdx.x) / s.batch_groups;
    const int* extra = plan.extra + size_t(bg) * (plan.tiles + 1);
    int tile = item - plan.most_extra;
    if (tile < 0) {  // the item-th extra chunk belongs to the last tile with extra[tile] <= item
        if (item >= extra[plan.tiles]) return;
        int low = 0, high = plan.tiles;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (extra[middle] <= item) low = middle;
            else high = middle;
        }
        tile = low;
    }
    auto chunk_of = [&](int of_tile) { return item < plan.most_extra ? item - extra[of_tile] + 1 : 0; };
    const int first_key = tile * KEY_TILE;
    DynamicShared shared;
    bf16* q_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* dout_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    const RowStatistics rows = {shared.take<float>(2 * SUB_BLOCKS * KEY_TILE), shared.take<float>(2 * KEY_TILE)};
    int* counts = shared.take<int>(THREADS / 32);
    int* list = shared.take<int>(GATHER_CHUNK);
    bf16* k_tile = q_tiles + KEY_TILE * D;
    bf16* v_tile = keeps_v<D>() ? shared.take<bf16>(KEY_TILE * D) : dout_tiles + KEY_TILE * D;
    const size_t group = size_t(bg * s.key_stride + first_key) * D;
    copy_tile<D, THREADS>(k_tile, k + group, D, s.keys - first_key);
    copy_tile<D, THREADS>(v_tile, v + group, D, s.keys - first_key);
    cp_async_commit();
    // by Divisor it would spill
    const uint32_t* choosers = plan.choosers + size_t(bg * plan.units + tile / s.slc_tiles) * plan.token_words;
    const int tokens = list_tokens(list, counts, choosers, plan.token_words, chunk_of(tile) * GATHER_CHUNK);
    cp_async_wait<0>();
    __syncthreads();
    WarpKeys<SLC, D> keys;
    keys.load(k_tile, v_tile, first_key);

    // there are fewer than 2^31 rows
    const int H = s.G * s.heads, q_row = bg * s.heads * s.queries,
              dout_row = bg / s.G * s.queries * H + bg % s.G * s.heads;
    auto copy_tokens = [&](int buffer, int first, int head) {
        const bf16 *q_head = q + size_t(q_row + head * s.queries) * D, *dout_head = dout + size_t(dout_row + head) * D;
        const int chunk = threadIdx.x % (D / 8), first_row = threadIdx.x / (D / 8);
#pragma unroll
        for (int done = 0; done < KEY_TILE; done += THREADS / (D / 8)) {
            // as copy_tile
            const int j = list[first + done + first_row],
                      at = buffer * KEY_TILE * D + chunk_at<D>(first_row, chunk) + done * D;
            cp_async_16(q_tiles + at, q_head + size_t(max(j, 0)) * D + chunk * 8, j >= 0);
            cp_async_16(dout_tiles + at, dout_head + size_t(max(j, 0)) * H * D + chunk * 8, j >= 0);
        }
        cp_async_commit();
    };
    // A thread for each row, as in attention_dkdv_kernel.
    const bool has_row = threadIdx.x < KEY_TILE;
    float minus_shift = 0, dot = 0;
    unsigned chosen = ~0u;
    auto load_statistics = [&](int first, int head) {
        const int j = has_row ? list[first + int(threadIdx.x)] : -1;
        const int row = q_row + head * s.queries + j;
        minus_shift = j < 0 ? -INFINITY : -lse_gated[row] * LOG2_E, dot = j < 0 ? 0 : row_dot[row];
        if (j >= 0 && s.slc_block < KEY_TILE)
            chosen = chosen_blocks(selection + size_t(bg * s.queries + j) * s.words, 0, tile_blocks(tile, s), s);
    };
    auto store_statistics = [&](int buffer) {
        if (!has_row) return;
        rows.dot[buffer * KEY_TILE + threadIdx.x] = dot;
        for (int sub = 0; sub < blocks_per_tile(s); sub++)
            rows.minus_shift[(buffer * SUB_BLOCKS + sub) * KEY_TILE + threadIdx.x] =
                chosen >> sub & 1 ? minus_shift : -INFINITY;
    };

    int first = 0, head = 0;  // of the list
    if (first < tokens) {
        copy_tokens(0, first, head);
        load_statistics(first, head);
        store_statistics(0);
    }
    for (int buffer = 0; first < tokens; buffer ^= 1) {
        const int this_first = first;
        if (++head == s.heads) head = 0, first += KEY_TILE;
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other
        if (first < tokens) {
            copy_tokens(buffer ^ 1, first, head);
            load_statistics(first, head);
        }
        const bool masked =
            s.first + list[this_first] < first_key + KEY_TILE - 1;  // the first token of the tile is the earliest
        keys.add_tokens(
            q_tiles + buffer * KEY_TILE * D, dout_tiles + buffer * KEY_TILE * D, rows, buffer, masked,
            [&](int row) { return s.first + list[this_first + row]; }, s);
        if (first < tokens) store_statistics(buffer ^ 1);
    }
    // found anew, since no register is free to keep what was computed from it
    const int same_tile = int(unsigned(keys.first_key) / KEY_TILE);
    float* partial = plan.chunks(bg, same_tile) > 1
                         ? plan.partial + plan.slot(bg, same_tile, chunk_of(same_tile)) * 2 * KEY_TILE * D
                         : nullptr;
    keys.store(dk, dv, partial, bg, s);
}

// dk, dv [B, G, key_stride, D] = the sums of the chunks or parts in their order; one block per tile of keys and
// (sequence, group)
template <int D>
__device__ inline void add_partial_sums(bf16* out, const float* first, size_t stride, int count, int bg, int tile,
                                        const AttentionShape& s) {
    const int keys = min(KEY_TILE, s.keys - tile * KEY_TILE);
    for (int i = threadIdx.x * 2; i < keys * D; i += int(blockDim.x) * 2) {
        float2 sum = make_float2(0, 0);
        for (int part = 0; part < count; part++) {
            const float2 term = *reinterpret_cast<const float2*>(first + part * stride + i);
            sum.x += term.x, sum.y += term.y;
        }
        *reinterpret_cast<__nv_bfloat162*>(out + (size_t(bg) * s.key_stride + size_t(tile) * KEY_TILE) * D + i) =
            __floats2bfloat162_rn(sum.x, sum.y);
    }
}
template <int D>
__global__ void __launch_bounds__(256) add_parts_kernel(bf16* dk, bf16* dv, const float* partial, AttentionShape s) {
    const int tile = int(blockIdx.x) / s.batch_groups, bg = int(blockIdx.x) % s.batch_groups,
              first = first_part(tile, s);
    const size_t tiles = size_t((s.keys + KEY_TILE - 1) / KEY_TILE), size = 2 * KEY_TILE * D;
    partial += ((bg * tiles + tile) * s.parts + first) * size;
    add_partial_sums<D>(dk, partial, size, s.parts - first, bg, tile, s);
    add_partial_sums<D>(dv, partial + KEY_TILE * D, size, s.parts - first, bg, tile, s);
}
template <int D>
__global__ void __launch_bounds__(256)
    add_chunks_kernel(bf16* dk, bf16* dv, GatherPlan plan, const SelectedChoice* choice, AttentionShape s) {
    if (choice && !choice->gather) return;
    const int tile = int(blockIdx.x) / s.batch_groups, bg = int(blockIdx.x) % s.batch_groups,
              chunks = plan.chunks(bg, tile);
    const size_t size = 2 * KEY_TILE * D;
    if (chunks == 1) return;
    const float* partial = plan.partial + plan.slot(bg, tile, 0) * size;
    add_partial_sums<D>(dk, partial, size, chunks, bg, tile, s);
    add_partial_sums<D>(dv, partial + KEY_TILE * D, size, chunks, bg, tile, s);
}

// ---- AUTO. The cost of 16 rows and 64 keys, forward and dQ together, in cycles of one multiprocessor:
// what passes between shared memory and registers at 128 bytes a cycle, or the products, whichever is more. Bytes in
// units of D:
//   masked tiles     forward: K and V 256 for `row_pieces` 16-row pieces at once; dQ: K, V, K 384 likewise
//   gathered rows    forward: Q 32, K and V 256, sums in and out 128;             dQ: Q and dout 64, K, V, K 384, sums
//   128
// dK and dV by gathered rows never cost more. Counted, not measured: a GPU may say otherwise.
template <int D>
HOST_DEVICE constexpr float gathered_piece_cost(float mma_cycles) {
    // 2.5 D mma
    const float products = mma_cycles * 2.5f * D, masked = 640.0f * D / 128 / row_pieces<D>(),
                gathered = (416.0f + 576.0f) * D / 128;
    return (gathered > products ? gathered : products) / (masked > products ? masked : products);
}

// counts [B*G * tiles, 2]: of a tile of tokens, the tiles of keys that it visits, and the pieces of 16 gathered rows in
// them; one warp each
__global__ void __launch_bounds__(128)
    measure_selections_kernel(int* counts, const uint32_t* selection, AttentionShape s) {
    const int item = int(blockIdx.x) * 4 + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (item >= s.tiles * s.batch_groups) return;  // a whole warp
    const int j0 = item % s.tiles * s.tile_tokens, tokens = min(s.tile_tokens, s.queries - j0),
              per_word = units_per_word(s);
    const uint32_t* selected = selection + (size_t(item / s.tiles) * s.queries + j0) * s.words;
    int visited = 0, pieces = 0;
    for (int word = 0; word < s.words; word++) {
        const int choosers = __popc(transpose_choices(lane < tokens ? selected[lane * s.words + word] : 0, s));
        const int unit = word * per_word + lane,
                  key_tiles = min(s.slc_tiles, (s.keys + KEY_TILE - 1) / KEY_TILE - unit * s.slc_tiles);
        if (lane < per_word && choosers) visited += key_tiles, pieces += key_tiles * ((choosers * s.heads + 15) / 16);
    }
    for (int flip = 16; flip > 0; flip /= 2) {
        visited += __shfl_xor_sync(~0u, visited, flip);
        pieces += __shfl_xor_sync(~0u, pieces, flip);
    }
    if (lane == 0) counts[2 * item] = visited, counts[2 * item + 1] = pieces;
}
// choice = what costs less by the counts of measure_selections_kernel; one block
__global__ void __launch_bounds__(256)
    choose_selected_kernel(SelectedChoice* choice, const int* counts, float piece_cost, AttentionShape s) {
    SHARED(double, sums, [3][8]);
    double visited = 0, pieces = 0, masked = 0;  // whole numbers, exact in any order
    for (int item = threadIdx.x; item < s.tiles * s.batch_groups; item += int(blockDim.x)) {
        const int tokens = min(s.tile_tokens, s.queries - item % s.tiles * s.tile_tokens);
        visited += counts[2 * item], pieces += counts[2 * item + 1];
        masked += double(counts[2 * item]) * ((tokens * s.heads + 15) / 16);
    }
    for (int flip = 16; flip > 0; flip /= 2) {
        visited += __shfl_xor_sync(~0u, visited, flip);
        pieces += __shfl_xor_sync(~0u, pieces, flip);
        masked += __shfl_xor_sync(~0u, masked, flip);
    }
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) sums[0][warp] = visited, sums[1][warp] = pieces, sums[2][warp] = masked;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < 8; i++) visited += sums[0][i], pieces += sums[1][i], masked += sums[2][i];
    const float cost = masked > 0 ? float(piece_cost * pieces / masked) : 1;
    *choice = {cost < 1, float(s.tile_tokens), float(visited / (double(s.tiles) * s.batch_groups)), cost};
}

// ---------------------------------------------------------------------------------------------------------------------
// Selection, paper eq. 8 to 12. One thread block per 16 tokens. The weights of the compressed branch are computed again
// from its lse, added over the group's heads in registers and folded into importances in shared memory, one tile of 64
// compressed blocks at a time.

constexpr unsigned SCORE_THREADS = KEY_TILE / 16 * 32;
constexpr int WEIGHT_STRIDE =
    KEY_TILE + 1;  // odd, as the next, so that the same place of several tokens lies in different banks
HOST_DEVICE inline int importance_stride(const AttentionShape& s) {
    return ((s.first + s.queries - 1) / s.slc_block + 1) | 1;
}
// compressed blocks that share tokens with a selection block
HOST_DEVICE inline int overlaps(const AttentionShape& s) { return s.slc_block / s.d + (s.l + s.d - 1) / s.d - 1; }
constexpr float TAKEN = -1;  // in place of the importance of a chosen block, which is never negative

__device__ inline float sum_of_warp(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

// A block and its importance as an integer, in the same order since importances are not negative; -1: none.
struct Best {
    int bits, block;
    __device__ void compare(const float* importance,
                            int other) {  // others come in ascending order; equal ones: the lower stays
        const int other_bits = importance[other] < 0 ? -1 : __float_as_int(importance[other]);
        if (other_bits > bits) bits = other_bits, block = other;
    }
};
// The best of all lanes, equal ones: the lowest block.
__device__ inline Best best_of_warp(const Best& mine) {
    Best best;
    best.bits = __reduce_max_sync(~0u, mine.bits);
    best.block = __reduce_min_sync(~0u, mine.bits == best.bits ? mine.block : INT_MAX);
    return best;
}
// Marks blocks 0, last-1, last and the slc_count-3 best others of importance[0 .. last] as TAKEN, by
// one warp; equal ones: the lowest index. Returns their share of all importance. Lane i knows the
// best of elements i, i + 32, ...; when that is taken, all lanes together look for the next best.
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
    Best mine = {-1, INT_MAX};
    for (int block = lane; block <= last; block += 32) mine.compare(importance, block);
    for (int round = 3; round < slc_count; round++) {
        const Best best = best_of_warp(mine);
        if (best.bits < 0) break;
        take(best.block);
        __syncwarp();
        Best next = {-1, INT_MAX};
        for (int block = best.block % 32 + lane * 32; block <= last; block += 32 * 32) next.compare(importance, block);
        next = best_of_warp(next);
        if (best.block % 32 == lane) mine = next;
        __syncwarp();  // all have read before the next is taken
    }
    all = sum_of_warp(all);
    chosen = sum_of_warp(chosen);
    return all > 0 ? chosen / all : 1;
}

// selection [B, G, queries, words]; chosen_importance [B, G, queries], where given
template <int D>
__global__ void __launch_bounds__(SCORE_THREADS)
    select_blocks_kernel(uint32_t* selection, float* chosen_importance, const bf16* q, const bf16* kc, const float* lse,
                         AttentionShape s) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = importance_stride(s),
              rows = s.heads * SCORE_TOKENS;
    const QueryTile tile = query_tile(s);
    const int last_block = (s.first + tile.j0 + tile.tokens - 1) / s.slc_block;
    DynamicShared shared;
    bf16* k_tiles = shared.take<bf16>(2 * KEY_TILE * D);
    bf16* q_tile = shared.take<bf16>(rows * D);
    float* minus_shifts = shared.take<float>(rows);  // -lse in base 2
    float* weights =
        shared.take<float>(SCORE_TOKENS * WEIGHT_STRIDE);  // [token][compressed block of the tile], summed over heads
    float* importances = shared.take<float>(SCORE_TOKENS * stride);  // [token][selection block]
    // Eq. 9, see Cpu::fold_importance: a compressed block counts for a selection block by the tokens they share, over
    // d. Relative to where the selection block begins these are compressed blocks first_overlap .. first_overlap +
    // overlap_count - 1, always.
    const int first_overlap = 1 - (s.l + s.d - 1) / s.d, overlap_count = overlaps(s);
    float* overlap = shared.take<float>(overlap_count);

    if (last_block + 1 > s.slc_count) {
        const int end_tile = end_of_key_tiles<CMP>(tile, s);
        auto copy_keys = [&](int buffer, int key_tile) {
            const bf16* from = kc + (size_t(tile.bg) * s.key_stride + size_t(key_tile) * KEY_TILE) * D;
            copy_tile<D, int(SCORE_THREADS)>(k_tiles + buffer * KEY_TILE * D, from, D, s.keys - key_tile * KEY_TILE);
            cp_async_commit();
        };
        copy_queries<D>(q_tile, q + (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D, size_t(s.queries) * D, D,
                        rows, tile.tokens, s);
        copy_keys(0, 0);
        for (int row = threadIdx.x; row < rows; row += int(SCORE_THREADS)) {
            const long long at = query_row(tile, row, s);
            minus_shifts[row] = at < 0 ? -INFINITY : -lse[at] * LOG2_E;
        }
        for (int i = threadIdx.x; i < overlap_count; i += int(SCORE_THREADS)) {
            const int begin = (first_overlap + i) * s.d;
            overlap[i] = float(min(s.slc_block, begin + s.l) - max(0, begin)) / s.d;
        }
        // Compressed blocks are the rows of the product, tokens its columns: this lane has blocks
        // lane / 4 and lane / 4 + 8 of the warp's 16, and tokens column, column + 1, + 8 and + 9.
        const int column = lane % 4 * 2, first_end = end_of_keys<CMP>(s.first + tile.j0, s);
        int ends[SCORE_TOKENS / 8][2];  // of the tokens, counted from this lane's first block in the tile
        for (int n = 0; n < SCORE_TOKENS / 8; n++)
            for (int odd = 0; odd < 2; odd++)
                ends[n][odd] = end_of_keys<CMP>(s.first + tile.j0 + n * 8 + column + odd, s) - warp * 16 - lane / 4;
        for (int i = threadIdx.x; i < SCORE_TOKENS * stride; i += int(SCORE_THREADS)) importances[i] = 0;

        for (int key_tile = 0; key_tile < end_tile; key_tile++) {
            const bf16* k_tile = k_tiles + key_tile % 2 * KEY_TILE * D;
            cp_async_wait<0>();
            __syncthreads();  // this tile has arrived, the last one is folded
            if (key_tile + 1 < end_tile) copy_keys((key_tile + 1) % 2, key_tile + 1);
            unsigned k_rows[1][D / 16][4];
#pragma unroll
            for (int x = 0; x < D; x += 16) load_a<D>(k_rows[0][x / 16], k_tile, warp * 16, x);
            const bool masked = first_end < (key_tile + 1) * KEY_TILE;
            float sums[SCORE_TOKENS / 8][4] = {};
#pragma unroll 2
            for (int head = 0; head < s.heads; head++) {
                float p[1][SCORE_TOKENS / 8][4] = {};
                multiply_rows<D, 1, SCORE_TOKENS / 16>(p, k_rows, q_tile, head * SCORE_TOKENS);
                if (masked) {
#pragma unroll
                    for (int n = 0; n < SCORE_TOKENS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (ends[n][e % 2] <= key_tile * KEY_TILE + e / 2 * 8) p[0][n][e] = -INFINITY;
                }
#pragma unroll
                for (int n = 0; n < SCORE_TOKENS / 8; n++) {
                    const float2 minus_lse =
                        *reinterpret_cast<const float2*>(minus_shifts + head * SCORE_TOKENS + n * 8 + column);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sums[n][e] +=
                            exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, e % 2 ? minus_lse.y : minus_lse.x));
                }
            }
#pragma unroll
            for (int n = 0; n < SCORE_TOKENS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    weights[(n * 8 + column + e % 2) * WEIGHT_STRIDE + warp * 16 + e / 2 * 8 + lane / 4] = sums[n][e];
            __syncthreads();
            // Each (token, selection block) has one thread, which adds in the order of the compressed blocks.
            const int begin = key_tile * KEY_TILE,
                      end = min(begin + KEY_TILE, s.keys);  // compressed blocks of this tile
            const int first_block = begin * s.d / s.slc_block;
            const int blocks = min(((end - 1) * s.d + s.l - 1) / s.slc_block, last_block) + 1 - first_block;
            for (int item = threadIdx.x; item < blocks * SCORE_TOKENS; item += int(SCORE_THREADS)) {
                const int token = item % SCORE_TOKENS, block = first_block + item / SCORE_TOKENS,
                          first = block * (s.slc_block / s.d) + first_overlap - begin;
                const float* weight = weights + token * WEIGHT_STRIDE + first;
                float sum = importances[token * stride + block];
                for (int i = max(0, -first); i < min(overlap_count, end - begin - first); i++)
                    sum += weight[i] * overlap[i];
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
    a.batch_groups = s.B * s.G, a.G = s.G, a.heads = s.heads_per_group(), a.by_heads = Divisor(a.heads),
    a.first = s.first, a.queries = s.queries;
    a.keys = branch == CMP ? s.cmp_blocks(s.first + s.queries) : s.first + s.queries;
    a.key_stride = branch == CMP ? s.cmp_capacity() : s.T;
    a.tile_tokens = tile_tokens ? tile_tokens : std::min({MOST_TILE_TOKENS, QUERY_ROWS / a.heads, s.queries});
    a.tiles = (s.queries + a.tile_tokens - 1) / a.tile_tokens;
    a.l = s.l, a.d = s.d, a.window = s.full ? s.T : s.window;
    a.slc_block = s.slc_block, a.slc_count = s.slc_count, a.words = s.full ? 0 : s.selection_words();
    a.slc_tiles = std::max(1, s.slc_block / KEY_TILE), a.by_slc_tiles = Divisor(a.slc_tiles);
    while (a.slc_shift < 6 && (1 << a.slc_shift) < s.slc_block) a.slc_shift++;
    a.scale = float(s.scale());
    a.parts = 1, a.part_tokens = s.queries;
    // few tiles of keys, each seen by most queries: parts of 256 tokens, up to 64, and then 32 longer ones, for their
    // sums take memory
    if (branch == CMP) {
        a.part_tokens = s.queries <= 64 * 256 ? 256 : (s.queries / 32 + KEY_TILE - 1) / KEY_TILE * KEY_TILE;
        a.parts = (s.queries + a.part_tokens - 1) / a.part_tokens;
    }
    return a;
}
inline void check_attention_shape(Branch branch, const NsaShape& s) {
    if (s.heads_per_group() * s.G != s.H || s.heads_per_group() > QUERY_ROWS)
        fail_usage("%d query heads in %d groups: the CUDA attention wants 1 to %d query heads for each group", s.H, s.G,
                   QUERY_ROWS);
    if (branch == SLC && s.slc_block != 16 && s.slc_block != 32 && (s.slc_block < KEY_TILE || s.slc_block % KEY_TILE))
        fail_usage(
            "selection blocks of %d tokens: the CUDA attention has 16, 32 and multiples of 64; choose one of them, or "
            "the CPU",
            s.slc_block);
    if (branch != WIN && s.slc_block % s.d)
        fail_usage(
            "selection blocks of %d tokens and compression blocks every %d: the CUDA attention wants a multiple; "
            "choose one, or the CPU",
            s.slc_block, s.d);
}
// Calls f(std::integral_constant<int, D>()) for the head dimension D.
template <class F>
inline void with_head_dimension(int D, F f) {
    switch (D) {
        case 16: return f(std::integral_constant<int, 16>());
        case 32: return f(std::integral_constant<int, 32>());
        case 64: return f(std::integral_constant<int, 64>());
        case 128: return f(std::integral_constant<int, 128>());
        default:
            fail_usage(
                "a head dimension of %d: the CUDA attention has 16, 32, 64 and 128; choose one of them, or the CPU", D);
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

// What the functions below need besides their arrays: attention_workspace_bytes()
// of scratch memory on the GPU, and a place for AUTO's choice.
struct AttentionWorkspace {
    void* data = nullptr;
    SelectedChoice* choice = nullptr;
};
// Hands out pieces of the workspace, or from null their sizes.
struct WorkspacePieces {
    char* base;
    size_t used = 0;
    template <class T>
    T* take(size_t count) {
        T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += (count * sizeof(T) + 255) / 256 * 256;
        return piece;
    }
};
template <int D>
inline size_t gather_shared_bytes(const AttentionShape& a, bool backward) {
    const size_t rows = size_t(a.tile_tokens) * size_t(a.heads), row_tile = rows * D * sizeof(bf16),
                 key_tiles = 2 * KEY_TILE * D * sizeof(bf16);
    return shared_bytes({key_tiles, key_tiles, row_tile, backward ? row_tile : 0, rows * D * sizeof(float),
                         rows * sizeof(float2), size_t(units(a.key_stride, a)) * sizeof(uint32_t),
                         size_t(tile_words(a.key_stride)) * sizeof(uint32_t)});
}
inline const cudaDeviceProp& properties_of_device() {
    static const cudaDeviceProp properties = [] {
        int device;
        cudaDeviceProp found;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaGetDeviceProperties(&found, device));
        return found;
    }();
    return properties;
}
// Bytes of shared memory that a block can have on this GPU: 227 KB on sm_90, 163 on sm_80, 99 on most others.
inline size_t most_shared_of_device() { return properties_of_device().sharedMemPerBlockOptin; }
// Cycles of one multiprocessor for an mma_m16n8k16, 2048 multiply-adds: by NVIDIA's figures sm_80 does 1024 a cycle,
// sm_90 2048, of which some 62 % this way (sm_100 is taken to be like it), 8.6, 8.9 and 12.0 512 (GeForce 256, with
// which the costs have the same ratio).
inline float mma_cycles(int major, int minor) {
    return major == 9 || major == 10 ? 1.6f : major == 8 && minor == 0 ? 2.0f : 4.0f;
}
inline float mma_cycles_of_device() { return mma_cycles(properties_of_device().major, properties_of_device().minor); }
// Head dimensions of 128 do not fit everywhere.
inline void check_shared_bytes(size_t bytes, int D, size_t most_shared = most_shared_of_device()) {
    if (bytes > most_shared)
        fail_usage(
            "a head dimension of %d: attention takes %zu bytes of shared memory for a block, this GPU has %zu; choose "
            "--head-dim 64, or "
            "PRECISION=FP32",
            D, bytes, most_shared);
}
// As many tokens in a tile as fit. How many there are changes no bit: every row is computed by itself, its keys in
// their order.
template <int D>
inline AttentionShape gather_shape(const NsaShape& s, bool backward, size_t most_shared = most_shared_of_device()) {
    int tokens = std::max(1, std::min({GATHER_TOKENS, gather_rows<D>(backward) / s.heads_per_group(), s.queries}));
    AttentionShape a = attention_shape<D>(SLC, s, tokens);
    while (tokens > 1 && gather_shared_bytes<D>(a, backward) > most_shared) a = attention_shape<D>(SLC, s, --tokens);
    return a;
}
template <int D>
inline bool gather_possible(const NsaShape& s) {
    return s.heads_per_group() <= gather_rows<D>(true) &&
           gather_shared_bytes<D>(gather_shape<D>(s, true), true) <= most_shared_of_device() &&
           gather_shared_bytes<D>(gather_shape<D>(s, false), false) <= most_shared_of_device();
}
// A query has chosen at most max(slc_count, 3) blocks, which bounds the extra chunks.
template <int D>
inline GatherPlan gather_plan(WorkspacePieces& pieces, const NsaShape& s) {
    const AttentionShape a = gather_shape<D>(s, true);
    GatherPlan plan = {};
    plan.tiles = (a.keys + KEY_TILE - 1) / KEY_TILE, plan.units = units(a.keys, a),
    plan.token_words = (s.queries + 31) / 32;
    plan.most_extra = int(size_t(s.queries) * size_t(std::max(s.slc_count, 3)) * size_t(a.slc_tiles) / GATHER_CHUNK);
    plan.most_extra = int(std::min(size_t(plan.most_extra), size_t(plan.tiles) * size_t(s.queries / GATHER_CHUNK)));
    const size_t groups = size_t(a.batch_groups);
    plan.choosers = pieces.take<uint32_t>(groups * size_t(plan.units) * size_t(plan.token_words));
    plan.counts = pieces.take<int>(groups * size_t(plan.units));
    plan.extra = pieces.take<int>(groups * size_t(plan.tiles + 1));
    plan.partial = pieces.take<float>(groups * 2 * size_t(plan.most_extra) * 2 * KEY_TILE * D);
    return plan;
}
template <int D>
inline int* selection_counts(WorkspacePieces& pieces, const NsaShape& s) {
    return pieces.take<int>(2 * size_t(gather_shape<D>(s, false).tiles) * size_t(s.B) * size_t(s.G));
}
template <int D>
inline float* cmp_partial_sums(WorkspacePieces& pieces, const NsaShape& s) {
    const AttentionShape a = attention_shape<D>(CMP, s, 0);
    return pieces.take<float>(a.parts == 1 ? 0
                                           : size_t(a.batch_groups) * size_t((a.keys + KEY_TILE - 1) / KEY_TILE) *
                                                 size_t(a.parts) * 2 * KEY_TILE * D);
}

// Which kernels a call of the selected branch may use. What stays AUTO is decided on the GPU, from the selection
// itself. With at most 2 n blocks in the sequence masked tiles visit at most twice what a query chose: by sm_90's costs
// gathering cannot pay then.
template <int D>
inline SelectedKernel resolve_selected(SelectedKernel asked, const NsaShape& s) {
    const bool possible = gather_possible<D>(s);
    if (asked == SelectedKernel::GATHER && !possible)
        fail_usage(
            "%d query heads in a group, of dimension %d: gathered rows have room for %d, and need less shared memory "
            "than the %zu bytes of "
            "this GPU; choose masked tiles",
            s.heads_per_group(), D, gather_rows<D>(true), most_shared_of_device());
    if (asked != SelectedKernel::AUTO) return asked;
    const int blocks = (s.first + s.queries + s.slc_block - 1) / s.slc_block;
    return possible && s.queries >= GATHER_TOKENS && blocks > 2 * s.slc_count ? SelectedKernel::AUTO
                                                                              : SelectedKernel::TILES;
}
// Bytes of scratch memory that forward or backward of a branch need.
inline size_t attention_workspace_bytes(Branch branch, const NsaShape& s, SelectedKernel asked, bool backward) {
    WorkspacePieces pieces{nullptr};
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        if (branch == CMP && backward) cmp_partial_sums<D>(pieces, s);
        if (branch != SLC || s.query_rows() == 0) return;
        const SelectedKernel kernel = resolve_selected<D>(asked, s);
        if (kernel == SelectedKernel::AUTO) selection_counts<D>(pieces, s);
        if (kernel != SelectedKernel::TILES && backward) gather_plan<D>(pieces, s);
    });
    return pieces.used;
}
// Where AUTO is open, has the GPU choose, and returns where the choice will lie; else null.
template <int D>
inline const SelectedChoice* choose_selected(SelectedKernel kernel, WorkspacePieces& pieces, SelectedChoice* choice,
                                             const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    if (kernel != SelectedKernel::AUTO) return nullptr;
    const AttentionShape a = gather_shape<D>(s, false);
    int* counts = selection_counts<D>(pieces, s);
    launch<measure_selections_kernel>(unsigned(a.tiles * a.batch_groups + 3) / 4, 128, 0, stream, counts, selection, a);
    launch<choose_selected_kernel>(1, 256, 0, stream, choice, (const int*)counts,
                                   gathered_piece_cost<D>(mma_cycles_of_device()), a);
    return choice;
}
inline unsigned gather_threads(const AttentionShape& a) {
    return unsigned(std::min(GATHER_WARPS, (a.tile_tokens * a.heads + 15) / 16) * 32);
}

template <Branch branch, int D>
inline void launch_attention_forward(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                     const uint32_t* selection, const NsaShape& s, SelectedKernel asked,
                                     AttentionWorkspace workspace, cudaStream_t stream) {
    const AttentionShape a = attention_shape<D>(branch, s, 0);
    const SelectedChoice* choice = nullptr;
    if constexpr (branch == SLC) {
        const SelectedKernel kernel = resolve_selected<D>(asked, s);
        WorkspacePieces pieces{static_cast<char*>(workspace.data)};
        choice = choose_selected<D>(kernel, pieces, workspace.choice, selection, s, stream);
        if (kernel != SelectedKernel::TILES) {
            const AttentionShape g = gather_shape<D>(s, false);
            launch<gather_forward_kernel<D>>(unsigned(g.tiles * g.batch_groups), gather_threads(g),
                                             gather_shared_bytes<D>(g, false), stream, out, lse, q, k, v, selection,
                                             choice, g);
        }
        if (kernel == SelectedKernel::GATHER) return;
    }
    const unsigned blocks = unsigned(a.tiles * a.batch_groups), threads = query_tile_threads<D>(a);
    const size_t query_tile = QUERY_ROWS * D * sizeof(bf16), key_tiles = 2 * KEY_TILE * D * sizeof(bf16);
    const size_t bytes = shared_bytes(
        {query_tile, key_tiles, key_tiles, branch == SLC ? tile_words(a.key_stride) * sizeof(uint32_t) : 0});
    check_shared_bytes(bytes, D);
    launch<attention_forward_kernel<branch, D>>(blocks, threads, bytes, stream, out, lse, q, k, v, selection, choice,
                                                a);
}
template <int D>
inline void launch_gather_backward(float* dq, bool add, bf16* dk, bf16* dv, const bf16* dout, const bf16* q,
                                   const bf16* k, const bf16* v, const float* row_dot, const float* lse_gated,
                                   const uint32_t* selection, const NsaShape& s, const SelectedChoice* choice,
                                   WorkspacePieces& pieces, cudaStream_t stream) {
    const AttentionShape a = gather_shape<D>(s, true);
    const GatherPlan plan = gather_plan<D>(pieces, s);
    launch<gather_dq_kernel<D>>(unsigned(a.tiles * a.batch_groups), gather_threads(a), gather_shared_bytes<D>(a, true),
                                stream, dq, add, dout, q, k, v, row_dot, lse_gated, selection, choice, a);

    const int all_units = plan.units * a.batch_groups;
    launch<transpose_selection_kernel>(unsigned(plan.token_words * a.batch_groups), 128, 0, stream, plan, selection,
                                       choice, a);
    launch<count_choosers_kernel>(unsigned(all_units + 3) / 4, 128, 0, stream, plan, all_units, choice);
    launch<plan_chunks_kernel>(unsigned(a.batch_groups), 32, 0, stream, plan, choice, a);
    const size_t tiles = 2 * KEY_TILE * D * sizeof(bf16), statistics = 2 * KEY_TILE * sizeof(float);
    const size_t bytes =
        shared_bytes({tiles, tiles, statistics * sub_blocks(SLC), statistics, dkdv_threads<D>() / 32 * sizeof(int),
                      GATHER_CHUNK * sizeof(int), keeps_v<D>() ? tiles / 2 : 0});
    launch<gather_dkdv_kernel<D>>(unsigned((plan.most_extra + plan.tiles) * a.batch_groups),
                                  unsigned(dkdv_threads<D>()), bytes, stream, dk, dv, dout, q, k, v, row_dot, lse_gated,
                                  selection, plan, choice, a);
    if (plan.most_extra)
        launch<add_chunks_kernel<D>>(unsigned(plan.tiles * a.batch_groups), 256, 0, stream, dk, dv, plan, choice, a);
}
template <Branch branch, int D>
inline void launch_attention_backward(float* dq, bool add, bf16* dk, bf16* dv, const bf16* dout, const bf16* q,
                                      const bf16* k, const bf16* v, const float* row_dot, const float* lse_gated,
                                      const uint32_t* selection, const NsaShape& s, SelectedKernel asked,
                                      AttentionWorkspace workspace, cudaStream_t stream) {
    const AttentionShape a = attention_shape<D>(branch, s, 0);
    const SelectedChoice* choice = nullptr;
    if (a.keys == 0) {  // no element of dk and dv
        if (!add) CUDA_CHECK(cudaMemsetAsync(dq, 0, s.query_rows() * D * sizeof(float), stream));
        return;
    }
    WorkspacePieces pieces{static_cast<char*>(workspace.data)};
    float* partial = nullptr;
    if constexpr (branch == CMP) partial = cmp_partial_sums<D>(pieces, s);
    if constexpr (branch == SLC) {
        const SelectedKernel kernel = resolve_selected<D>(asked, s);
        choice = choose_selected<D>(kernel, pieces, workspace.choice, selection, s, stream);
        if (kernel != SelectedKernel::TILES)
            launch_gather_backward<D>(dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s, choice, pieces,
                                      stream);
        if (kernel == SelectedKernel::GATHER) return;
    }
    const size_t query_tile = QUERY_ROWS * D * sizeof(bf16), tiles = 2 * KEY_TILE * D * sizeof(bf16),
                 statistics = 2 * KEY_TILE * sizeof(float);
    const unsigned query_blocks = unsigned(a.tiles * a.batch_groups), threads = query_tile_threads<D>(a);
    const size_t dq_bytes = shared_bytes(
        {query_tile, query_tile, tiles, tiles, branch == SLC ? tile_words(a.key_stride) * sizeof(uint32_t) : 0});
    check_shared_bytes(dq_bytes, D);
    launch<attention_dq_kernel<branch, D>>(query_blocks, threads, dq_bytes, stream, dq, add, dout, q, k, v, row_dot,
                                           lse_gated, selection, choice, a);

    const unsigned key_tiles = unsigned((a.keys + KEY_TILE - 1) / KEY_TILE * a.batch_groups);
    const size_t dkdv_bytes =
        shared_bytes({tiles, tiles, statistics * sub_blocks(branch), statistics, keeps_v<D>() ? tiles / 2 : 0,
                      branch == SLC ? tile_words(a.queries) * sizeof(uint32_t) : 0});
    launch<attention_dkdv_kernel<branch, D>>(key_tiles * unsigned(a.parts), unsigned(dkdv_threads<D>()), dkdv_bytes,
                                             stream, dk, dv, partial, dout, q, k, v, row_dot, lse_gated, selection,
                                             choice, a);
    if constexpr (branch == CMP)
        if (a.parts > 1) launch<add_parts_kernel<D>>(key_tiles, 256, 0, stream, dk, dv, (const float*)partial, a);
}

// Shared memory of a block of select_blocks_kernel; the importances of all selection blocks of some tokens are in
// there.
template <int D>
inline size_t select_shared_bytes(const AttentionShape& a) {
    const size_t rows = size_t(a.heads) * SCORE_TOKENS, weights = SCORE_TOKENS * WEIGHT_STRIDE,
                 importances = SCORE_TOKENS * size_t(importance_stride(a));
    const size_t bytes =
        shared_bytes({2 * KEY_TILE * D * sizeof(bf16), rows * D * sizeof(bf16), rows * sizeof(float),
                      weights * sizeof(float), importances * sizeof(float), size_t(overlaps(a)) * sizeof(float)});
    if (bytes > most_shared_of_device())
        fail_usage(
            "%d tokens in selection blocks of %d: choosing takes %zu bytes of shared memory, this GPU has %zu; choose "
            "larger blocks or "
            "fewer tokens",
            a.first + a.queries, a.slc_block, bytes, most_shared_of_device());
    return bytes;
}
// Refuses shapes that the kernels do not have, before anything is allocated for them.
inline void check_shape(const NsaShape& s) {
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        for (const Branch branch : {WIN, CMP, SLC})
            if (s.has(branch)) check_attention_shape(branch, s);
        if (!s.full) select_shared_bytes<D>(attention_shape<D>(CMP, s, SCORE_TOKENS));
    });
}

// out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys, lse [B, H, queries] the natural logarithm
// of the softmax's denominator; a query without a key: 0, +infinity. q [B, H, queries, D], keys and values [B, G, T, D]
// (compressed: [B, G, NC, D]), selection [B, G, queries, words]. Selection blocks: 16, 32 or a multiple of 64 tokens.
// Query heads per group: up to 128, no padding but the last row tile's. In the selected branch `kernel` says how; the
// workspace's choice has to exist where it is AUTO.
inline void attention_forward(Branch branch, bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                              const uint32_t* selection, const NsaShape& s, SelectedKernel kernel,
                              AttentionWorkspace workspace, cudaStream_t stream) {
    check_attention_shape(branch, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        switch (branch) {
            case CMP:
                return launch_attention_forward<CMP, D>(out, lse, q, k, v, selection, s, kernel, workspace, stream);
            case SLC:
                return launch_attention_forward<SLC, D>(out, lse, q, k, v, selection, s, kernel, workspace, stream);
            case WIN:
                return launch_attention_forward<WIN, D>(out, lse, q, k, v, selection, s, kernel, workspace, stream);
        }
    });
}
// dq [B, H, queries, D] = , or += with `add`, dk and dv [keys] = , from dout [B*queries, H*D], row_dot and
// lse_gated [B, H, queries]; shapes and formulas as in Cpu. A query has chosen at most max(slc_count, 3) blocks.
inline void attention_backward(Branch branch, float* dq, bool add, bf16* dk, bf16* dv, const bf16* dout, const bf16* q,
                               const bf16* k, const bf16* v, const float* row_dot, const float* lse_gated,
                               const uint32_t* selection, const NsaShape& s, SelectedKernel kernel,
                               AttentionWorkspace workspace, cudaStream_t stream) {
    check_attention_shape(branch, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        switch (branch) {
            case CMP:
                return launch_attention_backward<CMP, D>(dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated, selection,
                                                         s, kernel, workspace, stream);
            case SLC:
                return launch_attention_backward<SLC, D>(dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated, selection,
                                                         s, kernel, workspace, stream);
            case WIN:
                return launch_attention_backward<WIN, D>(dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated, selection,
                                                         s, kernel, workspace, stream);
        }
    });
}
// selection [B, G, queries, words] = the blocks that each query and group attends to, by q [B, H,
// queries, D], kc [B, G, NC, D] and the compressed branch's lse [B, H, queries]; chosen_importance
// [B, G, queries], where given: their share of all importance. The rule is Cpu's.
inline void select_blocks(uint32_t* selection, float* chosen_importance, const bf16* q, const bf16* kc,
                          const float* lse, const NsaShape& s, cudaStream_t stream) {
    check_attention_shape(CMP, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        const AttentionShape a = attention_shape<D>(CMP, s, SCORE_TOKENS);
        const size_t bytes = select_shared_bytes<D>(a);
        const unsigned blocks = unsigned(a.tiles * a.batch_groups);
        launch<select_blocks_kernel<D>>(blocks, SCORE_THREADS, bytes, stream, selection, chosen_importance, q, kc, lse,
                                        a);
    });
}

#endif  // PRECISION_FP32

// ---------------------------------------------------------------------------------------------------------------------

struct Cuda {
    using real = cuda_real;
    using Stat = float;
    using Grad = float;
    using Master = float;
    static constexpr bool has_master = true;
    static constexpr bool on_host = false;
    static constexpr int WIDE = kernels::WIDE;
    static constexpr size_t WORKSPACE = size_t(32) << 20;  // what NVIDIA advises for cuBLASLt on sm_90

    int device;
    cudaDeviceProp properties;
    cudaStream_t stream = nullptr;
    bool poison = false;  // tests: fresh memory holds NaN, so that a read before the first write shows
    bool level0 =
        std::is_same<real, float>::value;  // attention by the scalar kernels of dev/ladder; fp32 has no others
    SelectedKernel selected_kernel = SelectedKernel::AUTO;
    bool use_graphs = false;  // --cuda-graph, see run()
    // of the GPU's memory, now and at most, without what the driver and cuBLASLt take for themselves
    size_t live_bytes = 0, peak_bytes = 0;

    explicit Cuda(int device_index = 0, size_t workspace = WORKSPACE)
        : device(device_index), workspace_bytes(workspace) {
        CUDA_CHECK(cudaSetDevice(device));
        CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
        if (!std::is_same<real, float>::value && properties.major < 8)
            fail(
                "GPU %d, %s, has compute capability %d.%d; bf16 needs 8.0 or later: build again with PRECISION=FP32 "
                "GPU_COMPUTE_CAPABILITY=%d%d, or use --device cpu",
                device, properties.name, properties.major, properties.minor, properties.major, properties.minor);
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        try {
            launch<kernels::probe_kernel>(1, 32, 0, stream);
        } catch (const Error& e) {
            fail(
                "this program was not built for GPU %d, %s, of compute capability %d.%d: build it again with make "
                "GPU_COMPUTE_CAPABILITY=%d%d (%s)",
                device, properties.name, properties.major, properties.minor, properties.major, properties.minor,
                e.what());
        }
        CUDA_CHECK(cudaStreamSynchronize(stream));
        CUBLAS_CHECK(cublasLtCreate(&cublas));
        CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                          &workspace_bytes, sizeof workspace_bytes));
#ifdef __CUDACC__  // 16 is what gemm() checks; unasked, cuBLASLt takes 256 for granted. Where it splits a long sum, the
                   // parts stay in fp32.
        const uint32_t alignment = 16, reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                          &reduction, sizeof reduction));
        for (const auto which :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment));
#endif
        cublas_workspace = allocate<char>(workspace_bytes);
        result = allocate<double>(kernels::PARTS);
        selected_choice = allocate<SelectedChoice>(1);
        zero(selected_choice, 1);
        adamw_step = allocate<kernels::AdamWStep>(1);
    }
    Cuda(const Cuda&) = delete;
    Cuda& operator=(const Cuda&) = delete;
    ~Cuda() {  // errors are of no use here
        cudaStreamSynchronize(stream);
        for (auto& [shape, matmul] : matmuls) matmul.destroy();
        for (Scratch& s : scratches) release(s.data);
        for (Pinned& slot : uploads) slot.destroy();
        for (Pinned& slot : downloads) slot.destroy();
        for (Pinned& slot : step_uploads) slot.destroy();
        release(cublas_workspace), release(result), release(selected_choice), release(adamw_step), release(rope_table);
        cublasLtMatmulPreferenceDestroy(preference);
        cublasLtDestroy(cublas);
        cudaStreamDestroy(stream);
    }

    // ----- memory. `count` elements, aligned to 256 bytes (cudaMalloc's promise); fatal when there is none.
    template <class T>
    T* allocate(size_t count) {
        const size_t bytes = std::max<size_t>(count, 1) * sizeof(T);
        T* p = nullptr;
        const cudaError_t error = cudaMalloc(&p, bytes);
        if (error == cudaErrorMemoryAllocation) {
            cudaGetLastError();  // it is told here, not by the next launch
            size_t free = 0, total = 0;
            CUDA_CHECK(cudaMemGetInfo(&free, &total));
            fail(
                "out of GPU memory: %.1f MiB were asked for, %.1f of %.1f MiB are free on GPU %d; choose a smaller "
                "--batch or --seq-len; "
                "nvidia-smi shows who else uses the GPU",
                double(bytes) / (1 << 20), double(free) / (1 << 20), double(total) / (1 << 20), device);
        }
        CUDA_CHECK(error);
        live_bytes += allocated[p] = bytes, peak_bytes = std::max(peak_bytes, live_bytes);
        if (poison) CUDA_CHECK(cudaMemsetAsync(p, 0xFF, bytes, stream));
        return p;
    }
    template <class T>
    void release(T* p) {
        const auto found = allocated.find(p);
        if (found != allocated.end()) live_bytes -= found->second, allocated.erase(found);
        if (cudaFree(p) != cudaSuccess) cudaGetLastError();  // of no use here, and no fault of the next launch
    }
    double available_bytes() const {
        size_t free = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        return free;
    }
    std::string describe() const {
        return format_text("GPU %d, %s, compute capability %d.%d, %d multiprocessors, %.1f GiB, %s, attention %s",
                           device, properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                           double(properties.totalGlobalMem) / (1 << 30),
                           std::is_same<real, float>::value ? "fp32" : "bf16", level0 ? "scalar" : "on tensor cores");
    }
    // FLOP/s of the tensor cores at best, dense bf16 with fp32 sums, by NVIDIA's data sheets; 0: not known here.
    double peak_flops() const {
        static constexpr struct {
            const char* name;
            double teraflops;
        } PEAKS[] = {{"H100 PCIe", 756}, {"H100 NVL", 835.5}, {"H200 NVL", 835.5}, {"H100", 989.4},
                     {"H200", 989.4},    {"H800", 989.4},     {"B200", 2250},      {"A100", 312},
                     {"A800", 312},      {"L40S", 362},       {"RTX 4090", 165.2}, {"RTX 3090", 71}};
        if (!std::is_same<real, float>::value)
            for (const auto& peak : PEAKS)
                if (std::strstr(properties.name, peak.name)) return peak.teraflops * 1e12;
        return 0;
    }
    template <class T>
    void zero(T* p, size_t count) {
        if (count) CUDA_CHECK(cudaMemsetAsync(p, 0, count * sizeof(T), stream));
    }
    // Bytes as they are, between host and device in any direction; done when it returns, since the host may read or
    // reuse its side.
    template <class T>
    void copy(T* out, const T* in, size_t count) {
        if (count) CUDA_CHECK(cudaMemcpyAsync(out, in, count * sizeof(T), cudaMemcpyDefault, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
    // Tokens to the GPU without waiting for it; the caller may reuse its memory at once. Runs ahead of the GPU by two
    // micro-steps at most.
    void upload(int32_t* out, const int32_t* in, size_t count) {
        upload_through(uploads[uploaded++ % 4], out, in, count * sizeof(int32_t));
    }
    // Numbers to the host, to be received later, in order; two may be under way.
    void send(const double* numbers, size_t count) {
        refuse_in_recording("Cuda::send");
        if (sent - received == 2) fail("Cuda::send: two results are waiting to be received already");
        Pinned& slot = downloads[sent++ % 2];
        slot.prepare(count * sizeof(double)), slot.count = count;
        CUDA_CHECK(cudaMemcpyAsync(slot.data, numbers, count * sizeof(double), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaEventRecord(slot.passed, stream));
    }
    std::vector<double> receive() {
        Pinned& slot = downloads[received++ % 2];
        CUDA_CHECK(cudaEventSynchronize(slot.passed));
        const double* numbers = static_cast<const double*>(slot.data);
        return {numbers, numbers + slot.count};
    }
    // Between the engine's numbers, real or fp32, and fp32 on the host.
    template <class T>
    void to_host(float* out, const T* in, size_t count) {
        if constexpr (std::is_same<T, float>::value) {
            copy(out, in, count);
        } else {
            std::vector<T> values(count);
            copy(values.data(), in, count);
            for (size_t i = 0; i < count; i++) out[i] = float(values[i]);
        }
    }
    template <class T>
    void from_host(T* out, const float* in, size_t count) {
        if constexpr (std::is_same<T, float>::value) {
            copy(out, in, count);
        } else {
            std::vector<T> values(count);
            for (size_t i = 0; i < count; i++) values[i] = T(in[i]);
            copy(out, values.data(), count);
        }
    }

    // ----- work that repeats. A sequence of launches that is the same every time, down to the arguments. With
    // use_graphs, run() launches it as it is the first time, when scratch memory grows, tables are made and algorithms
    // are chosen; the second time it is recorded as a CUDA graph; from then on one call gives all of it to the GPU.
    // What differs from time to time has to lie in the GPU's memory, and to be sent there before. It may outlive the
    // memory that it works on, but not run again then.
    struct Sequence {
        cudaGraphExec_t graph = nullptr;
        int64_t memory = -1;  // the engine's memory_version when it was last launched as it is

        Sequence() = default;
        Sequence(const Sequence&) = delete;
        Sequence& operator=(const Sequence&) = delete;
        ~Sequence() { forget(); }
        void forget() {
            if (graph) cudaGraphExecDestroy(graph);
            graph = nullptr;
        }
    };
    template <class Work>
    void run(Sequence& s, Work work) {
        if (!use_graphs) return work();
        if (s.memory != memory_version) {  // never launched, or memory that a graph would name has been replaced since
            s.forget();
            work();
            s.memory = memory_version;
            return;
        }
        if (!s.graph) record(s, work);
        CUDA_CHECK(cudaGraphLaunch(s.graph, stream));
    }

    // ----- embedding.  x = embed[token].  tokens [N], embed [V, C], x [N, C]
    void embedding_forward(real* x, const int32_t* tokens, const real* embed, int N, int C) {
        with_width(is_wide(C, x, embed), [&](auto W) {
            launch<kernels::embedding_forward_kernel<W()>>(kernels::blocks(size_t(N) * C, 256 * W()), 256, 0, stream, x,
                                                           tokens, embed, N, C);
        });
    }
    // dembed [V, C] += rows of dx [N, C]
    void embedding_backward(Grad* dembed, const real* dx, const int32_t* tokens, int N, int C) {
        int32_t* sorted = scratch<int32_t>(0, size_t(N));
        launch<kernels::sort_positions_kernel>(kernels::blocks(size_t(N), kernels::SORT_THREADS), kernels::SORT_THREADS,
                                               0, stream, sorted, tokens, N);
        with_width(is_wide(C, dembed, dx), [&](auto W) {
            launch<kernels::embedding_backward_kernel<W()>>(dim3(unsigned(N), kernels::blocks(size_t(C), 128 * W())),
                                                            128, 0, stream, dembed, dx, tokens, (const int32_t*)sorted,
                                                            N, C);
        });
    }

    // ----- RMSNorm.  out = x * rstd * weight,  rstd = 1/sqrt(mean(x^2) + eps).  x, out [N, C], rstd [N], weight [C]
    void rmsnorm_forward(real* out, Stat* rstd, const real* x, const real* weight, int N, int C) {
        with_width(is_wide(C, out, x, weight), [&](auto W) {
            launch<kernels::rmsnorm_forward_kernel<W()>>(kernels::blocks(size_t(N), kernels::NORM_ROWS),
                                                         kernels::NORM_ROWS * 32, 0, stream, out, rstd, x, weight, N,
                                                         C);
        });
    }
    // dx += rstd * (g - x * rstd^2 * mean(g * x)) with g = dout * weight;  dweight += sum over rows of dout * x * rstd
    void rmsnorm_backward(real* dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd,
                          const real* weight, int N, int C) {
        with_width(is_wide(C, dx, dout, x, weight), [&](auto W) {
            launch<kernels::rmsnorm_backward_kernel<W()>>(kernels::blocks(size_t(N), kernels::NORM_ROWS),
                                                          kernels::NORM_ROWS * 32, 0, stream, dx, dout, x, rstd, weight,
                                                          N, C);
        });
        add_column_sums(dweight, kernels::NormWeightGradient{dout, x, rstd}, is_wide(C, dout, x), N, C);
    }

    // ----- linear layers, weight [OC, C].
    // out [N, OC] = inp [N, C] weight^T  (+ residual [N, OC], where given)
    void matmul_forward(real* out, const real* inp, const real* weight, const real* residual, int N, int C, int OC) {
        gemm(false, true, N, OC, C, inp, C, weight, C, residual, out, OC);
    }
    // dinp [N, C] = dout [N, OC] weight
    void matmul_backward_input(real* dinp, const real* dout, const real* weight, int N, int C, int OC) {
        gemm(false, false, N, C, OC, dout, OC, weight, C, (const real*)nullptr, dinp, C);
    }
    // dweight [OC, C] += dout^T inp
    void matmul_backward_weight(Grad* dweight, const real* dout, const real* inp, int N, int C, int OC) {
        gemm(true, false, OC, C, N, dout, OC, inp, C, (const Grad*)dweight, dweight, C);
    }

    // ----- SiLU.  out = x * sigmoid(x), elementwise
    void silu_forward(real* out, const real* x, size_t count) {
        if (count == 0) return;
        with_width(is_wide(count, out, x), [&](auto W) {
            launch<kernels::silu_forward_kernel<W()>>(kernels::blocks(count, 256 * W()), 256, 0, stream, out, x, count);
        });
    }
    // dx = dout * s * (1 + x * (1 - s)), s = sigmoid(x); dx may be dout
    void silu_backward(real* dx, const real* dout, const real* x, size_t count) {
        if (count == 0) return;
        with_width(is_wide(count, dx, dout, x), [&](auto W) {
            launch<kernels::silu_backward_kernel<W()>>(kernels::blocks(count, 256 * W()), 256, 0, stream, dx, dout, x,
                                                       count);
        });
    }

    // ----- classifier.  losses [N] = cross-entropy of logits [N, Vp] against targets [N], columns V..Vp-1 left out.
    // With want_gradient, logits become dlogits = (softmax - onehot) * dloss in place, 0 in the padded columns.
    void classifier(Stat* losses, real* logits, const int32_t* targets, double dloss, bool want_gradient, int N, int V,
                    int Vp) {
        with_width(is_wide(Vp, logits), [&](auto W) {
            launch<kernels::classifier_kernel<W()>>(unsigned(N), kernels::CLASSIFIER_THREADS, 0, stream, losses, logits,
                                                    targets, float(dloss), want_gradient, V, Vp);
        });
    }

    // ----- optimiser.
    // total (on the GPU) += sum of x
    void add_sum(double* total, const Stat* x, size_t count) {
        with_width(is_wide(count, x), [&](auto W) {
            // A short array has fewer parts: the others would be zeros.
            const size_t full = (count + kernels::PARTS_THREADS * W() - 1) / (kernels::PARTS_THREADS * W());
            const int parts = int(std::min<size_t>(kernels::PARTS, std::max<size_t>(1, full)));
            launch<kernels::sum_parts_kernel<W()>>(unsigned(parts), kernels::PARTS_THREADS, 0, stream, result, x,
                                                   count);
            launch<kernels::sum_total_kernel>(1, 32, 0, stream, total, (const double*)result, parts);
        });
    }
    // squares[i] = sum of the squares of chunk i of x [total], in fp64, for the chunks that begin in [begin, begin +
    // count).
    void chunk_squares(double* squares, const Grad* x, size_t total, size_t begin, size_t count) {
        if (count)
            launch<kernels::chunk_squares_kernel>(unsigned(count / CHUNK), kernels::CHUNK_THREADS, 0, stream, squares,
                                                  x, total, begin / CHUNK);
    }
    // *sum = the chunks' sums in a fixed order, but NaN if *guard is not finite.
    void total_squares(double* sum, const double* squares, size_t chunks, const Grad* guard) {
        launch<kernels::total_squares_kernel>(1, kernels::CHUNK_THREADS, 0, stream, sum, squares, chunks, guard);
    }
    // *guard = *loss
    template <class T>
    void set_guard(T* guard, const double* loss) {
        launch<kernels::set_guard_kernel<T>>(1, 32, 0, stream, guard, loss);
    }
    // x += y
    void add(Grad* x, const Grad* y, size_t count) {
        if (count) launch<kernels::add_arrays_kernel>(kernels::grid_of(count), 256, 0, stream, x, y, count);
    }
    // AdamW (Loshchilov & Hutter 2019), decoupled decay, bias-corrected moments m, v. All arrays
    // [count]. master is updated and rounded to param: in bf16 stochastically, by the random stream
    // (RANDOM_ROUNDING, step) at h.offset + i, since the nearest bf16 would lose most updates.
    void adamw(real* param, Master* master, Stat* m, Stat* v, const Grad* grad, size_t count, const HyperAdamW& h) {
        if (count == 0) return;
        set_step(h);
        const kernels::AdamWConstants constants = {float(h.beta1), float(h.beta2), float(h.eps), h.decay,
                                                   h.seed,         h.offset,       h.squares,    h.grad_clip};
        launch<kernels::adamw_kernel>(kernels::blocks(count, 256), 256, 0, stream, param, master, m, v, grad, count,
                                      constants, (const kernels::AdamWStep*)adamw_step);
    }
    // Sends what adamw() needs of this step (h.lr, h.step) to the GPU, unless
    // it is there. To be called before an update that may be replayed.
    void set_step(const HyperAdamW& h) {
        const kernels::AdamWStep now = {h.lr, float(h.lr / (1 - std::pow(h.beta1, double(h.step)))),
                                        float(1 / std::sqrt(1 - std::pow(h.beta2, double(h.step)))),
                                        random_stream(RANDOM_ROUNDING, uint64_t(h.step))};
        if (now.lr == sent_step.lr && now.step_size == sent_step.step_size &&
            now.v_correction == sent_step.v_correction && now.stream == sent_step.stream)
            return;
        upload_through(step_uploads[steps_sent++ % 2], adamw_step, &now, sizeof now);
        sent_step = now;
    }
    // The parameters as adamw left them after this step, from the master copy alone:
    // so that a resumed run goes on with the same bits. Arguments as in HyperAdamW.
    void round_master(real* param, const Master* master, size_t count, uint64_t seed, int64_t step, size_t offset) {
        if (count == 0) return;
        launch<kernels::round_master_kernel>(kernels::blocks(count, 256), 256, 0, stream, param, master, count, seed,
                                             random_stream(RANDOM_ROUNDING, uint64_t(step)), offset);
    }

    // ----- heads.
    struct Heads {
        real* q;      // [B, H, queries, D], rotated
        real* kv[6];  // [B, G, T, D] each, by HeadSlot; k_slc and k_win rotated, k_cmp not (its compressed blocks are)
        Stat* gate;   // [3, B, H, queries], after the sigmoid
    };
    struct HeadGradients {
        Stat* q;      // [B, H, T, D]
        real* kv[6];  // [B, G, T, D]
        Stat* gate;   // [3, B, H, T], of the logit
    };
    // heads = projected, split, rotated and gated
    void split_heads_forward(Heads out, const real* projected, const NsaShape& s) {
        const kernels::Rope rope = prepare_rope(s.T, s.D);
        const kernels::HeadPointers pointers = {out.q,         out.kv[K_CMP], out.kv[V_CMP], out.kv[K_SLC],
                                                out.kv[V_SLC], out.kv[K_WIN], out.kv[V_WIN], out.gate};
        bool wide = is_wide(s.D / 2, projected, out.q) && is_wide(s.projected());
        for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++) wide = wide && is_wide(s.D / 2, out.kv[slot]);
        with_width(wide, [&](auto W) {
            launch<kernels::split_heads_forward_kernel<W()>>(unsigned(s.B) * unsigned(s.queries), 128, 0, stream,
                                                             pointers, projected, rope, s, s.projected(),
                                                             head_units(s));
        });
    }
    // dprojected = gradients of the heads, turned back and merged; the padding gets 0. Training shapes (first = 0,
    // queries = T).
    void split_heads_backward(real* dprojected, HeadGradients d, const NsaShape& s) {
        const kernels::Rope rope = prepare_rope(s.T, s.D);
        const kernels::HeadGradientPointers pointers = {d.q,         d.kv[K_CMP], d.kv[V_CMP], d.kv[K_SLC],
                                                        d.kv[V_SLC], d.kv[K_WIN], d.kv[V_WIN], d.gate};
        bool wide = is_wide(s.D / 2, dprojected, d.q) && is_wide(s.projected());
        for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++) wide = wide && is_wide(s.D / 2, d.kv[slot]);
        with_width(wide, [&](auto W) {
            launch<kernels::split_heads_backward_kernel<W()>>(unsigned(s.B) * unsigned(s.T), 128, 0, stream, dprojected,
                                                              pointers, rope, s, s.projected(), head_units(s));
        });
    }

    // ----- compression, paper eq. 7, with phi(X_i) = mean over the l rows + fc2 silu(fc1 X_i + bias).
    template <class T>
    struct PhiOf {
        T *fc1, *bias, *fc2;  // [F, l*D], [F], [D, F]
    };
    using Phi = PhiOf<real>;
    using PhiGradients = PhiOf<Grad>;
    // out [B, G, NC, D] = phi(blocks of k [B, G, T, D]), rotated at position i*d where asked; hidden
    // [B, G, NC, F] before the SiLU. Computes the blocks that end inside this call's positions.
    // fc1's product over a block is the sum of its products over the block's l/d chunks of d
    // tokens: overlapping blocks are matrices with a row stride of d*D, one
    // product per chunk over all sequences and groups, and nothing is copied.
    void compress_forward(real* out, real* hidden, const real* k, const Phi& phi, bool rotated, const NsaShape& s) {
        const int D = s.D, F = s.F, begin = s.cmp_blocks(s.first), count = s.cmp_blocks(s.first + s.queries) - begin,
                  NC = s.cmp_capacity(), groups = s.B * s.G, rows = groups * count;
        if (count <= 0) return;
        const kernels::Rope rope = prepare_rope(s.T, D);
        const size_t chunk_size = size_t(s.d) * D;
        float *hidden_sum = scratch<float>(0, size_t(rows) * F), *out_sum = scratch<float>(1, size_t(rows) * D);
        real* activated = scratch<real>(2, size_t(rows) * F);
        for (int chunk = 0; chunk < s.l / s.d; chunk++)
            gemm(false, true, count, F, int(chunk_size), k + size_t(begin + chunk) * chunk_size, chunk_size,
                 phi.fc1 + chunk * chunk_size, size_t(s.l) * D, chunk ? hidden_sum : nullptr, hidden_sum, size_t(F),
                 {groups, size_t(s.T) * D, 0, size_t(count) * F});
        launch<kernels::compress_activate_kernel>(kernels::blocks(size_t(rows) * F, 256), 256, 0, stream, hidden,
                                                  activated, (const float*)hidden_sum, (const real*)phi.bias, rows,
                                                  count, begin, NC, F);
        gemm(false, true, rows, D, F, activated, size_t(F), phi.fc2, size_t(F), (const float*)nullptr, out_sum,
             size_t(D));
        launch<kernels::compress_output_kernel>(kernels::blocks(size_t(rows) * D / 2, 128), 128, 0, stream, out,
                                                (const float*)out_sum, k, rope, rotated, rows, count, begin, NC, s);
    }
    // dk [B, G, T, D] =, dphi +=, from dout [B, G, NC, D] (turned back in place). Training shapes.
    void compress_backward(real* dk, const PhiGradients& dphi, real* dout, const real* hidden, const real* k,
                           const Phi& phi, bool rotated, const NsaShape& s) {
        const int D = s.D, F = s.F, NC = s.cmp_capacity(), groups = s.B * s.G, rows = groups * NC;
        if (NC == 0) return zero(dk, s.key_rows() * D);
        const kernels::Rope rope = prepare_rope(s.T, D);
        const size_t chunk_size = size_t(s.d) * D, width = size_t(s.l) * D, tokens = size_t(s.T) * D,
                     size = size_t(rows) * F;
        real *activated = scratch<real>(0, size), *dhidden = scratch<real>(1, size);
        float* sums = scratch<float>(
            2, std::max({size, size_t(groups) * F * chunk_size, groups * tokens}));  // one after the other
        if (rotated)
            launch<kernels::compress_turn_back_kernel>(kernels::blocks(size_t(rows) * D / 2, 256), 256, 0, stream, dout,
                                                       rope, rows, NC, s.d, D);
        silu_forward(activated, hidden, size);
        // dfc2 += dout^T act
        gemm(true, false, D, F, rows, dout, size_t(D), activated, size_t(F), (const float*)dphi.fc2, dphi.fc2,
             size_t(F));
        // dact = dout fc2
        gemm(false, false, rows, F, D, dout, size_t(D), phi.fc2, size_t(F), (const float*)nullptr, sums, size_t(F));
        launch<kernels::compress_dhidden_kernel>(kernels::blocks(size, 256), 256, 0, stream, dhidden,
                                                 (const float*)sums, hidden, size);
        add_column_sums(dphi.bias, kernels::RowsOf{dhidden}, is_wide(F, dhidden), rows, F);
        for (int chunk = 0; chunk < s.l / s.d;
             chunk++) {  // dfc1 += dhidden^T chunk: a product per (sequence, group), then their sum
            gemm(true, false, F, int(chunk_size), NC, dhidden, size_t(F), k + chunk * chunk_size, chunk_size,
                 (const float*)nullptr, sums, chunk_size, {groups, size_t(NC) * F, tokens, F * chunk_size});
            launch<kernels::compress_dfc1_kernel>(kernels::blocks(F * chunk_size, 256), 256, 0, stream, dphi.fc1,
                                                  (const float*)sums, groups, F, int(chunk_size),
                                                  int(chunk * chunk_size), int(width));
        }
        zero(sums, groups * tokens);
        for (int chunk = 0; chunk < s.l / s.d; chunk++)  // dchunk += dhidden fc1
            gemm(false, false, NC, int(chunk_size), F, dhidden, size_t(F), phi.fc1 + chunk * chunk_size, width,
                 (const float*)sums + chunk * chunk_size, sums + chunk * chunk_size, chunk_size,
                 {groups, size_t(NC) * F, 0, tokens});
        const size_t all_rows = s.key_rows();
        with_width(is_wide(s.D, dk, sums, dout), [&](auto W) {
            launch<kernels::compress_dk_kernel<W()>>(kernels::blocks(all_rows * kernels::ROW_LANES, 256), 256, 0,
                                                     stream, dk, (const float*)sums, (const real*)dout, all_rows, NC,
                                                     s);
        });
    }

    // ----- attention: the tensor-core kernels above, or the scalar ones of dev/ladder.
    // out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys; lse [B, H, queries]
    void attention_forward(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v,
                           const uint32_t* selection, const NsaShape& s) {
#ifndef PRECISION_FP32
        if (!level0)
            return ::attention_forward(branch, out, lse, q, k, v, selection, s, selected_kernel,
                                       attention_workspace(branch, s, false), stream);
#endif
        attention_level0_forward(branch, out, lse, q, k, v, selection, s, stream);
    }
    // dq [B, H, queries, D] =, or += with `add`, dk, dv [keys] =
    void attention_backward(Branch branch, Stat* dq, bool add, real* dk, real* dv, const real* dout, const real* q,
                            const real* k, const real* v, const Stat* row_dot, const Stat* lse_gated,
                            const uint32_t* selection, const NsaShape& s) {
#ifndef PRECISION_FP32
        if (!level0)
            return ::attention_backward(branch, dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s,
                                        selected_kernel, attention_workspace(branch, s, true), stream);
#endif
        attention_level0_backward(branch, dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s, stream);
    }
    // Refuses shapes that the attention kernels do not have.
    void check_shape(const NsaShape& s) const {
#ifndef PRECISION_FP32
        if (!level0) ::check_shape(s);
#endif
        (void)s;
    }
    // How the selected branch is computed for this shape, in words; AUTO: as the last forward or backward pass found
    // it. Waits for the GPU.
    std::string describe_selected(const NsaShape& s) {
        if (s.full) return "no selected branch";
        if (level0) return "selected branch by scalar kernels";
        SelectedKernel kernel = selected_kernel;
#ifndef PRECISION_FP32
        with_head_dimension(
            s.D, [&](auto dimension) { kernel = resolve_selected<decltype(dimension)::value>(selected_kernel, s); });
#endif
        if (kernel == SelectedKernel::AUTO) {
            SelectedChoice choice;
            copy(&choice, (const SelectedChoice*)selected_choice, 1);
            if (choice.tile_tokens > 0) return ::describe(choice, s);
            return "selected branch by masked tiles or gathered rows, as the selection will show";
        }
        return format_text(
            "selected branch by %s, %s", kernel == SelectedKernel::TILES ? "masked tiles" : "gathered rows",
            selected_kernel == kernel
                ? "as asked"
                : "since gathering rows cannot pay in sequences so short, or has no room for so many heads");
    }
    // selection [B, G, queries, words]; chosen_importance, where given, [B, G, queries]
    void select_blocks(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse,
                       const NsaShape& s) {
#ifndef PRECISION_FP32
        if (!level0) return ::select_blocks(selection, chosen_importance, q, kc, lse, s, stream);
#endif
        attention_level0_select(selection, chosen_importance, q, kc, lse, s, stream);
    }
    // out [B*queries, H*D] = sum over branches of gate * branch output.  o [3, B, H, queries, D], gate [3, B, H,
    // queries]; paper eq. 5
    void combine_forward(real* out, const real* o, const Stat* gate, const NsaShape& s) {
        const size_t rows = s.query_rows();
        with_width(is_wide(s.D, out, o), [&](auto W) {
            launch<kernels::combine_forward_kernel<W()>>(kernels::blocks(rows * kernels::ROW_LANES, 256), 256, 0,
                                                         stream, out, o, gate, rows, s);
        });
    }
    // row_dot = dout . o, lse_gated = lse - ln(gate), dgate_logit = row_dot * gate * (1 - gate), all [3, B, H, queries]
    void attention_backward_rows(Stat* row_dot, Stat* lse_gated, Stat* dgate_logit, const real* dout, const real* o,
                                 const Stat* gate, const Stat* lse, const NsaShape& s) {
        const size_t rows = s.query_rows();
        with_width(is_wide(s.D, dout, o), [&](auto W) {
            launch<kernels::attention_backward_rows_kernel<W()>>(kernels::blocks(rows * kernels::ROW_LANES, 256), 256,
                                                                 0, stream, row_dot, lse_gated, dgate_logit, dout, o,
                                                                 gate, lse, rows, s);
        });
    }

  private:
    std::map<const void*, size_t> allocated;  // bytes by address
    cublasLtHandle_t cublas = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
    uint64_t workspace_bytes;
    char* cublas_workspace = nullptr;
    double* result = nullptr;  // parts of a sum
    SelectedChoice* selected_choice = nullptr;
#ifndef PRECISION_FP32
    AttentionWorkspace attention_workspace(Branch branch, const NsaShape& s, bool backward) {
        const size_t bytes = attention_workspace_bytes(branch, s, selected_kernel, backward);
        return {bytes ? scratch<char>(0, bytes) : nullptr, selected_choice};
    }
#endif

    // Pinned host memory on its way to or from the GPU; `passed` is reached when the copy is done.
    struct Pinned {
        void* data = nullptr;
        size_t bytes = 0, count = 0;
        cudaEvent_t passed = nullptr;

        void* prepare(size_t needed) {  // waits until the last copy of this slot is done
            if (passed) CUDA_CHECK(cudaEventSynchronize(passed));
            else CUDA_CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
            if (needed > bytes) {
                if (data) CUDA_CHECK(cudaFreeHost(data));
                CUDA_CHECK(cudaMallocHost(&data, needed));
                bytes = needed;
            }
            return data;
        }
        void destroy() {
            if (passed) cudaEventDestroy(passed);
            if (data) cudaFreeHost(data);
        }
    };
    Pinned uploads[4], step_uploads[2],
        downloads[2];  // two micro-steps of tokens and targets; two steps' numbers, and results
    size_t uploaded = 0, steps_sent = 0, sent = 0, received = 0;
    void upload_through(Pinned& slot, void* out, const void* in, size_t bytes) {
        refuse_in_recording("an upload");
        std::memcpy(slot.prepare(bytes), in, bytes);
        CUDA_CHECK(cudaMemcpyAsync(out, slot.data, bytes, cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaEventRecord(slot.passed, stream));
    }
    kernels::AdamWStep* adamw_step = nullptr;      // on the GPU
    kernels::AdamWStep sent_step = {-1, 0, 0, 0};  // what was sent there last; no learning rate is negative

    // Recording. Within it nothing runs; CUDA itself refuses what allocates or waits, which would not
    // happen again at the replay. What would repeat an old slot of pinned memory is refused here.
    bool recording = false;
    int64_t memory_version =
        0;  // counts the replacements of memory whose address launches hold: scratch memory, RoPE's table
    void refuse_in_recording(const char* what) const {
        if (recording)
            fail("%s is no part of a sequence that repeats: every replay would copy the same numbers again", what);
    }
    template <class Work>
    void record(Sequence& s, Work work) {
        cudaGraph_t graph = nullptr;
        std::string error;
        CUDA_CHECK(
            cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));  // other threads, such as NCCL's, go on
        recording = true;
        try {
            work();
        } catch (const Error& e) {
            error = e.what();
        }
        recording = false;
        const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        if (error.empty() && ended != cudaSuccess)
            error = format_text("%s, %s", cudaGetErrorName(ended), cudaGetErrorString(ended));
        if (!error.empty()) {
            cudaGetLastError();  // it is told here, not by the next launch
            if (graph) cudaGraphDestroy(graph);
            fail(
                "a part of the training step cannot be recorded as a CUDA graph: leave --cuda-graph out, and please "
                "report this line: %s",
                error.c_str());
        }
        const cudaError_t made = cudaGraphInstantiate(&s.graph, graph, 0);
        cudaGraphDestroy(graph);
        CUDA_CHECK(made);
    }

    // Rows of `width` elements that begin at these arrays can be read 16 bytes at a time.
    template <class... T>
    static bool is_wide(size_t width, const T*... arrays) {
        return width % WIDE == 0 && ((reinterpret_cast<size_t>(arrays) % 16 == 0) && ...);
    }
    // launch_with(W), W a constant: the kernel for whole 16 bytes, or the one for single elements.
    template <class F>
    static void with_width(bool wide, F launch_with) {
        if (wide) launch_with(std::integral_constant<int, WIDE>());
        else launch_with(std::integral_constant<int, 1>());
    }
    static int head_units(const NsaShape& s) { return s.H + (s.full ? 2 : 6) * s.G; }

    // Temporary memory that only grows; a slot's content is valid until its next
    // use. Slot 3 is add_column_sums' own, the others belong to whoever is running.
    struct Scratch {
        char* data = nullptr;
        size_t bytes = 0;
    };
    Scratch scratches[4];
    template <class T>
    T* scratch(int slot, size_t count) {
        Scratch& s = scratches[slot];
        if (count * sizeof(T) > s.bytes) {
            CUDA_CHECK(cudaStreamSynchronize(stream));
            memory_version++;
            release(s.data), s = Scratch();
            s.data = allocate<char>(count * sizeof(T)), s.bytes = count * sizeof(T);
        }
        return reinterpret_cast<T*>(s.data);
    }

    // out [C] += the sums over the N rows of what Term gives
    template <class Term>
    void add_column_sums(float* out, const Term& term, bool wide, int N, int C) {
        const int part_rows = std::max(16, (N + 511) / 512), parts = (N + part_rows - 1) / part_rows;
        float* partial = scratch<float>(3, size_t(parts) * C);
        with_width(wide, [&](auto W) {
            launch<kernels::column_parts_kernel<W(), Term>>(
                dim3(kernels::blocks(size_t(C), 128 * W()), unsigned(parts)), 128, 0, stream, partial, term, N, C,
                part_rows);
        });
        launch<kernels::column_totals_kernel>(kernels::blocks(size_t(C), 32), 256, 0, stream, out,
                                              (const float*)partial, parts, C);
    }

    // RoPE's table on the GPU: cosines [positions, D/2], then sines, from angles in fp64.
    float* rope_table = nullptr;
    int rope_positions = 0, rope_dim = 0;
    kernels::Rope prepare_rope(int positions, int D) {
        const size_t half = size_t(D) / 2, angles = size_t(positions) * half;
        if (positions > rope_positions || D != rope_dim) {
            std::vector<float> table;
            table.reserve(2 * angles);
            for (const bool sine : {false, true})
                for (size_t i = 0; i < angles; i++) {
                    const double angle = double(i / half) * std::pow(ROPE_BASE, -2.0 * double(i % half) / D);
                    table.push_back(float(sine ? std::sin(angle) : std::cos(angle)));
                }
            CUDA_CHECK(cudaStreamSynchronize(stream));
            memory_version++;
            release(rope_table);
            rope_table = allocate<float>(table.size());
            copy(rope_table, (const float*)table.data(), table.size());
            rope_positions = positions, rope_dim = D;
        }
        return {rope_table, rope_table + rope_positions * half};
    }

    // ----- the one seam to cuBLASLt.
    struct Batch {
        int count;
        size_t a, b, c;  // elements from one matrix to the next
    };
    // A matrix product as cuBLASLt describes it, and the algorithm it chose; made once per shape.
    struct Matmul {
        cublasLtMatmulDesc_t description;
        cublasLtMatrixLayout_t a, b, c;
        cublasLtMatmulAlgo_t algorithm;
        void destroy() {
            cublasLtMatmulDescDestroy(description);
            for (cublasLtMatrixLayout_t layout : {a, b, c}) cublasLtMatrixLayoutDestroy(layout);
        }
    };
    std::map<std::array<int64_t, 13>, Matmul> matmuls;

    template <class T>
    static constexpr cudaDataType_t type_of() {
        return std::is_same<T, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    }

    static cublasLtMatrixLayout_t layout(cudaDataType_t type, bool transposed, int rows, int columns, size_t leading,
                                         int batches, size_t stride) {
        cublasLtMatrixLayout_t layout;
        CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type, uint64_t(transposed ? columns : rows),
                                                uint64_t(transposed ? rows : columns), int64_t(leading)));
        const int64_t offset = int64_t(stride);
        const int32_t count = batches;
        CUBLAS_CHECK(
            cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset,
                                                      sizeof offset));
        return layout;
    }

    // C[M,N] = op(A)[M,K] op(B)[K,N] (+ addend[M,N], where given, which may be C), row-major as everywhere. cuBLASLt
    // is column-major, where the same memory is the transposed matrix: it is asked for C^T = op(B)^T op(A)^T.
    template <class Out>
    void gemm(bool transpose_a, bool transpose_b, int M, int N, int K, const real* A, size_t lda, const real* B,
              size_t ldb, const Out* addend, Out* C, size_t ldc, Batch batch = {1, 0, 0, 0}) {
        const size_t row_bytes[] = {lda * sizeof(real),     ldb * sizeof(real),     ldc * sizeof(Out),
                                    batch.a * sizeof(real), batch.b * sizeof(real), batch.c * sizeof(Out)};
        const void* const pointers[] = {A, B, C, addend};
        for (const size_t bytes : row_bytes)
            if (bytes % 16) fail_narrow(bytes);
        for (const void* p : pointers)
            if (reinterpret_cast<size_t>(p) % 16) fail_narrow(reinterpret_cast<size_t>(p) % 16);
        const std::array<int64_t, 13> shape = {transpose_a,
                                               transpose_b,
                                               M,
                                               N,
                                               K,
                                               int64_t(lda),
                                               int64_t(ldb),
                                               int64_t(ldc),
                                               batch.count,
                                               int64_t(batch.a),
                                               int64_t(batch.b),
                                               int64_t(batch.c),
                                               type_of<Out>() == CUDA_R_32F};
        auto found = matmuls.find(shape);
        if (found == matmuls.end()) {
            Matmul m;
            CUBLAS_CHECK(cublasLtMatmulDescCreate(&m.description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
            const cublasOperation_t first = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                    second = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
            CUBLAS_CHECK(
                cublasLtMatmulDescSetAttribute(m.description, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
            CUBLAS_CHECK(
                cublasLtMatmulDescSetAttribute(m.description, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
            m.a = layout(type_of<real>(), transpose_b, N, K, ldb, batch.count, batch.b);
            m.b = layout(type_of<real>(), transpose_a, K, M, lda, batch.count, batch.a);
            m.c = layout(type_of<Out>(), false, N, M, ldc, batch.count, batch.c);
            cublasLtMatmulHeuristicResult_t best;
            int count = 0;
            const cublasStatus_t answer =
                cublasLtMatmulAlgoGetHeuristic(cublas, m.description, m.a, m.b, m.c, m.c, preference, 1, &best, &count);
            if (answer == CUBLAS_STATUS_NOT_SUPPORTED) count = 0;  // says the same
            else cublas_check(answer, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
            if (count == 0)
                fail(
                    "cuBLASLt knows no way to multiply %d x %d x %d (%d at a time) on %s; please report the GPU and "
                    "this line",
                    M, N, K, batch.count, properties.name);
            m.algorithm = best.algo;
            found = matmuls.emplace(shape, m).first;
        }
        const Matmul& m = found->second;
        const float alpha = 1, beta = addend ? 1 : 0;
        CUBLAS_CHECK(cublasLtMatmul(cublas, m.description, &alpha, B, m.a, A, m.b, &beta, addend ? addend : C, m.c, C,
                                    m.c, &m.algorithm, cublas_workspace, workspace_bytes, stream));
    }
    [[noreturn]] static void fail_narrow(size_t bytes) {
        fail_usage(
            "a row of a matrix begins %zu bytes after a multiple of 16, which tensor cores cannot read: on a GPU "
            "--dim, --head-dim, "
            "--mlp-hidden and --phi-hidden have to be multiples of %d; "
            "or use --device cpu",
            bytes % 16, WIDE);
    }
};
