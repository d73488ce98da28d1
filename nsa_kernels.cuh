// nsa_kernels.cuh: struct Cuda, every operation of the model on an NVIDIA GPU, with the members and signatures of
// struct Cpu in nsa_cpu.h, which is their specification. Matrix products are cuBLASLt's; everything else is written
// here. To port the model to another kind of GPU is to write this file again.
//
// Words. A lane is a thread's place among the 32 threads of its warp, which run together and can read each other's
// registers (shuffles). A block is a thread block, whose threads share memory and meet at barriers. The model's blocks
// always have a name in front or of their own: a compressed block (l tokens), a selection block (l' tokens).
//
// The file reads in this order:  row operations (embedding to classifier)  ->  attention and selection
// by plain kernels, which compute what the paper says in the fewest ideas  ->  heads and RoPE  ->  compression  ->  the
// gated sum  ->  attention and selection on tensor cores  ->  struct Cuda, which launches them all. lib/cuda holds the
// rest: common.cuh (the seam to CUDA), vectors.cuh (loads and stores), optimiser.cuh (AdamW and Muon, with their
// launches), runtime.cuh (memory, streams, cuBLASLt), tiles.cuh and attention_tiles.cuh (what the tensor-core kernels
// are built from), attention_gathered.cuh (the selected branch for long sequences).
//
// Precision. Parameters and activations are bf16, or fp32 when compiled with -DPRECISION_FP32; attention is then
// computed by the plain kernels. All arithmetic is in fp32; statistics, the gradients of parameters, the optimiser's
// moments and its master copy of the parameters are fp32 in memory too. No sum is atomic: each output has one owner and
// the order of every sum is fixed by the shapes alone, so the same input gives the same bits.
#pragma once
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 && !defined(PRECISION_FP32)
#error "the bf16 kernels need compute capability 8.0 (A100, RTX 30) or later; for older GPUs build with PRECISION=FP32"
#endif

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "lib/cuda/common.cuh"
#include "lib/cuda/devices.cuh"
#include "nsa_cpu.h"
#include "lib/cuda/optimiser.cuh"
#include "lib/cuda/runtime.cuh"
#include "lib/cuda/attention_gathered.cuh"
#include "lib/cuda/best_blocks.cuh"
#include "lib/cuda/vectors.cuh"

namespace kernels {

// ---------------------------------------------------------------------------------------------------------------------
// Embedding.

// x [N, C] = embed[token]; one thread per W elements
template <int W>
__global__ void embedding_forward_kernel(cuda_real* x, const int32_t* tokens, const cuda_real* embed, int N, int C) {
    wait_for_earlier_kernels();
    const size_t i = thread_index() * W;
    if (i >= size_t(N) * C) return;
    float values[W];
    load(values, embed + size_t(tokens[i / C]) * C + i % C);
    store(x + i, values);
}

// The gradient is a sum over the positions that hold a token, so the positions are first sorted by token, and by
// position within a token. The place of a position in that order is the number of positions before it: N^2 comparisons
// of integers in shared memory, 10^9 at N = 32768, once per micro-step, but no counters, no atomics, no passes over
// digits, and only one possible order. sorted [N]
constexpr int SORT_THREADS = 256;
__global__ void __launch_bounds__(SORT_THREADS) sort_positions_kernel(int32_t* sorted, const int32_t* tokens, int N) {
    wait_for_earlier_kernels();
    SHARED(int32_t, tile, [SORT_THREADS]);
    const int own = int(blockIdx.x) * SORT_THREADS;
    const int thread = int(threadIdx.x);
    const int token = own + thread < N ? tokens[own + thread] : 0;
    int place = 0;
    for (int start = 0; start < N; start += SORT_THREADS) {
        __syncthreads();                                                       // the last tile is no longer read
        tile[thread] = start + thread < N ? tokens[start + thread] : INT_MAX;  // is before nothing
        __syncthreads();
        // An equal token counts if its position is earlier: in every tile but the block's own that is true of all or
        // none.
        if (start == own) {
#pragma unroll 16
            for (int i = 0; i < SORT_THREADS; i++) place += tile[i] < token + (i < thread);
        } else {
            const int limit = token + (start < own);
#pragma unroll 16
            for (int i = 0; i < SORT_THREADS; i++)
                place += unsigned(tile[i] - limit) >> 31;  // less: a sign bit, since both are at least 0
        }
    }
    if (own + thread < N) sorted[place] = own + thread;
}
// dembed [V, C] += rows of dx [N, C]. A thread block takes place blockIdx.x of the sorted order and columns
// blockIdx.y * blockDim.x * W onwards; the first place of each token adds up all places of that token.
template <int W>
__global__ void __launch_bounds__(128)
    embedding_backward_kernel(float* dembed, const cuda_real* dx, const int32_t* tokens, const int32_t* sorted, int N,
                              int C) {
    wait_for_earlier_kernels();
    const int place = blockIdx.x, token = tokens[sorted[place]], c = int(blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (c >= C || (place > 0 && tokens[sorted[place - 1]] == token)) return;
    float sum[W];
    load(sum, dembed + size_t(token) * C + c);
    // A frequent token has many places, and a row's address takes two loads, one after the other: 8 rows are loaded at
    // once.
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
            for (int k = 0; k < W; k++) sum[k] += rows[u][k];  // 0 where the token has no more places
    }
    store(dembed + size_t(token) * C + c, sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// RMSNorm, one warp per row of C.

constexpr int NORM_ROWS = 8;  // per block

template <int W>
__global__ void __launch_bounds__(NORM_ROWS * 32)
    rmsnorm_forward_kernel(cuda_real* out, float* rstd, const cuda_real* x, const cuda_real* weight, int N, int C) {
    wait_for_earlier_kernels();
    const int n = blockIdx.x * NORM_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;  // a whole warp
    x += size_t(n) * C;
    out += size_t(n) * C;
    float squares = 0, a[W], g[W];
    for (int c = lane * W; c < C; c += 32 * W) {
        load(a, x + c);
        for (int k = 0; k < W; k++) squares += a[k] * a[k];
    }
    const float s = 1 / sqrtf(lane_sum(squares) / C + float(NORM_EPS));
    for (int c = lane * W; c < C; c += 32 * W) {
        load(a, x + c);
        load(g, weight + c);
        for (int k = 0; k < W; k++) a[k] *= s * g[k];
        store(out + c, a);
    }
    if (lane == 0) rstd[n] = s;
}

// A block's sums over rows, with one owner for each: every warp has `width` of its own in shared memory.
struct WarpSums {
    int width;
    float *all, *own;
    __device__ WarpSums(DynamicShared& shared, int width) : width(width) {
        all = shared.take<float>(size_t(blockDim.x) / 32 * width);
        own = all + threadIdx.x / 32 * width;
        for (int i = threadIdx.x % 32; i < width; i += 32) own[i] = 0;
        __syncwarp();
    }
    // partial [blocks, width]: the block's row = the sum over its warps
    __device__ void store(float* partial) const {
        __syncthreads();
        for (int i = threadIdx.x; i < width; i += int(blockDim.x)) {
            float sum = 0;
            for (int warp = 0; warp < int(blockDim.x) / 32; warp++) sum += all[warp * width + i];
            partial[size_t(blockIdx.x) * width + i] = sum;
        }
    }
};

// dx += rstd * (g - x * rstd^2 * mean(g * x)),  g = dout * weight, and dout * x * rstd, summed over the block's
// `rows` rows, in partial [blocks, C]. What a row is read for a second time is still in the caches.
template <int W>
__global__ void __launch_bounds__(NORM_ROWS * 32)
    rmsnorm_backward_kernel(cuda_real* dx, float* partial, const cuda_real* dout, const cuda_real* x, const float* rstd,
                            const cuda_real* weight, int N, int C, int rows) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const WarpSums dweight(shared, C);
    const int begin = int(blockIdx.x) * rows, end = min(N, begin + rows);
    const int lane = threadIdx.x % 32;
    for (int n = begin + int(threadIdx.x) / 32; n < end; n += int(blockDim.x) / 32) {
        const size_t row = size_t(n) * C;
        float dot = 0, a[W], d[W], g[W], sum[W];
        for (int c = lane * W; c < C; c += 32 * W) {
            load(a, x + row + c);
            load(d, dout + row + c);
            load(g, weight + c);
            for (int k = 0; k < W; k++) dot += d[k] * g[k] * a[k];
        }
        const float s = rstd[n], correction = lane_sum(dot) * s * s / C;
        for (int c = lane * W; c < C; c += 32 * W) {
            load(a, x + row + c);
            load(d, dout + row + c);
            load(g, weight + c);
            load(sum, dx + row + c);
            for (int k = 0; k < W; k++) sum[k] += s * (d[k] * g[k] - a[k] * correction);
            store(dx + row + c, sum);
            load(sum, dweight.own + c);
            for (int k = 0; k < W; k++) sum[k] += d[k] * a[k] * s;
            store(dweight.own + c, sum);
        }
    }
    dweight.store(partial);
}

// Smear, one warp per row of C: x[t] += g[t] * (scale o e[t-1]) with e = embed[token], g[t] = sigmoid(gate . e[t]).
// What it reads. Row n of the call is position first + n % queries.
struct SmearInput {
    const int32_t* tokens;
    const cuda_real *embed, *gate, *scale;
    int first, queries, C;
    __device__ bool begins_sequence(int n) const { return first + n % queries == 0; }
    __device__ const cuda_real* embedding(int n) const { return embed + size_t(tokens[n]) * C; }
};
template <int W>
__global__ void __launch_bounds__(NORM_ROWS * 32) smear_forward_kernel(cuda_real* x, SmearInput in, int N) {
    wait_for_earlier_kernels();
    const int n = blockIdx.x * NORM_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N || in.begins_sequence(n)) return;  // a whole warp
    const cuda_real *e = in.embedding(n), *before = in.embedding(n - 1);
    x += size_t(n) * in.C;
    float dot = 0, a[W], b[W], sum[W];
    for (int c = lane * W; c < in.C; c += 32 * W) {
        load(a, e + c);
        load(b, in.gate + c);
        for (int k = 0; k < W; k++) dot += a[k] * b[k];
    }
    const float g = sigmoid(lane_sum(dot));
    for (int c = lane * W; c < in.C; c += 32 * W) {
        load(a, before + c);
        load(b, in.scale + c);
        load(sum, x + c);
        for (int k = 0; k < W; k++) sum[k] += g * b[k] * a[k];
        store(x + c, sum);
    }
}
// g [N] and dz [N] = g (1 - g) * sum of dx[t] o scale o e[t-1]; both 0 where a sequence begins
template <int W>
__global__ void __launch_bounds__(NORM_ROWS * 32)
    smear_rows_kernel(float* g, float* dz, const cuda_real* dx, SmearInput in, int N) {
    wait_for_earlier_kernels();
    const int n = blockIdx.x * NORM_ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= N) return;
    const bool begins = in.begins_sequence(n);
    const cuda_real *e = in.embedding(n), *before = in.embedding(begins ? n : n - 1);
    dx += size_t(n) * in.C;
    float logit = 0;
    float dot = 0;
    float a[W], b[W], d[W];
    for (int c = lane * W; c < in.C; c += 32 * W) {
        load(a, e + c);
        load(b, in.gate + c);
        for (int k = 0; k < W; k++) logit += a[k] * b[k];
        load(a, before + c);
        load(b, in.scale + c);
        load(d, dx + c);
        for (int k = 0; k < W; k++) dot += d[k] * b[k] * a[k];
    }
    const float value = sigmoid(lane_sum(logit)), slope = value * (1 - value) * lane_sum(dot);
    if (lane > 0) return;
    g[n] = begins ? 0 : value;
    dz[n] = begins ? 0 : slope;
}
// de[t] = dx[t] + dz[t] gate + g[t+1] scale o dx[t+1]; one thread per W elements
template <int W>
__global__ void smear_backward_kernel(cuda_real* de, const cuda_real* dx, const float* g, const float* dz,
                                      SmearInput in, int N) {
    wait_for_earlier_kernels();
    const size_t i = thread_index() * W;
    const size_t n = i / in.C;
    const size_t c = i % in.C;
    if (n >= size_t(N)) return;
    float sum[W], a[W], b[W];
    load(sum, dx + i);
    load(a, in.gate + c);
    for (int k = 0; k < W; k++) sum[k] += dz[n] * a[k];
    if (n + 1 < size_t(N)) {
        load(a, in.scale + c);
        load(b, dx + i + in.C);
        for (int k = 0; k < W; k++) sum[k] += g[n + 1] * a[k] * b[k];
    }
    store(de + i, sum);
}

// Sums over the rows of a matrix [N, C], in two stages: over parts of `part_rows` rows, then over the parts. Term says
// what is summed.
struct FirstPartOf {  // every block's gradient once: column 0 of each `parts` columns of x [N, C*parts]
    const cuda_real* x;
    int parts;
    template <int W>
    __device__ void load_terms(float (&term)[W], int n, int c, int C) const {
        for (int k = 0; k < W; k++) term[k] = float(x[(size_t(n) * C + c + k) * parts]);
    }
};
struct SmearGateGradient {  // dz[t] e[t]
    const float* dz;
    SmearInput in;
    template <int W>
    __device__ void load_terms(float (&term)[W], int n, int c, int) const {
        load(term, in.embedding(n) + c);
        for (int k = 0; k < W; k++) term[k] *= dz[n];
    }
};
struct SmearScaleGradient {  // g[t] dx[t] o e[t-1]
    const float* g;
    const cuda_real* dx;
    SmearInput in;
    template <int W>
    __device__ void load_terms(float (&term)[W], int n, int c, int C) const {
        float a[W];
        load(term, dx + size_t(n) * C + c);
        load(a, in.embedding(max(n - 1, 0)) + c);
        for (int k = 0; k < W; k++) term[k] *= g[n] * a[k];
    }
};
// partial [parts, C], part blockIdx.y
template <int W, class Term>
__global__ void __launch_bounds__(128) column_parts_kernel(float* partial, Term terms, int N, int C, int part_rows) {
    wait_for_earlier_kernels();
    const int c = int(thread_index()) * W;
    const int begin = blockIdx.y * part_rows, end = min(N, begin + part_rows);
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
    wait_for_earlier_kernels();
    SHARED(float, sums, [8][32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int c = int(blockIdx.x) * 32 + lane;
    float sum = 0;
    for (int part = warp; part < parts && c < columns; part += 8) sum += partial[size_t(part) * columns + c];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= columns) return;
    for (int i = 1; i < 8; i++) sum += sums[i][lane];
    out[c] += sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// SiLU, x * sigmoid(x). NaN stays NaN.

template <int W>
__global__ void silu_forward_kernel(cuda_real* out, const cuda_real* x, size_t count) {
    wait_for_earlier_kernels();
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
    wait_for_earlier_kernels();
    const size_t i = thread_index() * W;
    if (i >= count) return;
    float a[W], d[W];
    load(a, x + i);
    load(d, dout + i);
    for (int k = 0; k < W; k++) {
        const float s = sigmoid(a[k]);
        d[k] *= s * (1 + a[k] * (1 - s));
    }
    store(dx + i, d);
}

// ---------------------------------------------------------------------------------------------------------------------
// Classifier, one block per row of logits. The first pass reads the row and keeps a running maximum and the sum of
// exponentials relative to it; the second overwrites the row with the gradient. Where two rows fit into a
// multiprocessor's shared memory, the first pass leaves its row there for the second.

struct Softmax {
    float largest, sum;  // of e^(x - largest)
    __device__ void add(float other_largest, float other_sum) {
        const float m = fmaxf(largest, other_largest);
        if (m == -INFINITY) return;  // nothing yet on either side
        sum = sum * exp_approx(largest - m) + other_sum * exp_approx(other_largest - m);
        largest = m;
    }
};
// x = logits v0.. of a row; the padded columns from V on, which may hold anything, weigh nothing.
template <int W>
__device__ inline void load_logits(float (&x)[W], const cuda_real* row, int v0, int V) {
    if (v0 < V) load(x, row + v0);
    if (v0 + W <= V) return;
    for (int k = 0; k < W; k++) x[k] = v0 + k < V ? x[k] : -INFINITY;
}

// Two blocks, with 32 registers a thread, fill a multiprocessor. More rows at a time would not stay in L2 until they
// are read again: of GPT-2's vocabulary, four on each of an H100's 132 multiprocessors are 53 MB.
constexpr int CLASSIFIER_THREADS = 1024;

template <int W, bool KEEPS_ROW>
__global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier_kernel(float* losses, cuda_real* logits, const int32_t* targets, float dloss, bool want_gradient, int V,
                      int Vp) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    Softmax* of_warps = shared.take<Softmax>(CLASSIFIER_THREADS / 32);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int target = targets[blockIdx.x];
    cuda_real* row = logits + size_t(blockIdx.x) * Vp;
    cuda_real* kept = KEEPS_ROW ? shared.take<cuda_real>(size_t(Vp)) : row;
    Softmax softmax = {-INFINITY, 0};
    float x[W];
    for (int v0 = threadIdx.x * W; v0 < V; v0 += CLASSIFIER_THREADS * W) {
        load_logits(x, row, v0, V);
        if constexpr (KEEPS_ROW) store(kept + v0, x);  // what this thread will read again
        float largest = -INFINITY, sum = 0;
        for (int k = 0; k < W; k++) largest = fmaxf(largest, x[k]);
        for (int k = 0; k < W; k++) sum += exp_approx(x[k] - largest);
        softmax.add(largest, sum);
    }
    for (int flip = 16; flip > 0; flip /= 2) {
        const float largest = __shfl_xor_sync(~0u, softmax.largest, flip);
        const float sum = __shfl_xor_sync(~0u, softmax.sum, flip);
        softmax.add(largest, sum);
    }
    if (lane == 0) of_warps[warp] = softmax;
    const float target_logit = threadIdx.x == 0 ? float(row[target]) : 0;  // before anyone writes the row
    __syncthreads();
    softmax = of_warps[0];
    for (int i = 1; i < CLASSIFIER_THREADS / 32; i++) softmax.add(of_warps[i].largest, of_warps[i].sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(softmax.sum) + softmax.largest - target_logit;
    if (!want_gradient) return;
    const float factor = dloss / softmax.sum;
    // Backwards, since the end of the row was read last.
    const int passes = (Vp - int(threadIdx.x) * W + CLASSIFIER_THREADS * W - 1) / (CLASSIFIER_THREADS * W);
    for (int pass = passes - 1; pass >= 0; pass--) {
        const int v0 = (pass * CLASSIFIER_THREADS + int(threadIdx.x)) * W;
        load_logits(x, kept, v0, V);
        for (int k = 0; k < W; k++) x[k] = exp_approx(x[k] - softmax.largest) * factor;
        if (unsigned(target - v0) < unsigned(W))
            for (int k = 0; k < W; k++) x[k] -= v0 + k == target ? dloss : 0;
        store(row + v0, x);
    }
}

}  // namespace kernels

// =====================================================================================================================
// The three attention branches and block selection by plain kernels: one warp per query row (or per key, or per
// choice), fp32 arithmetic, no tensor cores. Any D, l, d, l', heads per group. PRECISION=FP32 runs these; the kernels
// on tensor cores compute the same, and are compared with them.
//
// A warp's 32 lanes take 32 keys, one dot product each; then they take the columns of the output and go through the 32
// weights, which are in shared memory now. Every row reads everything from device memory again, which is what the
// faster kernels avoid.
// =====================================================================================================================

namespace plain {

// Of a block. The bounds ask for one block per multiprocessor, else ptxas spills to save registers.
constexpr int WARPS = 4;

// ---------------------------------------------------------------------------------------------------------------------
// What the kernels share.

// Where a query's data is. row = (b*H + head)*queries + j counts the rows of q, the branch outputs and the LSEs.
struct Query {
    int t;                 // position
    size_t group;          // b*G + g
    size_t dout;           // its row in [B*queries, H]
    const uint32_t* mask;  // its selection
    __device__ Query(size_t row, const uint32_t* selection, const NsaShape& s) {
        const int j = int(row % s.queries), head = int(row / s.queries % s.H);
        const size_t b = row / s.queries / s.H;
        t = s.first + j;
        group = b * s.G + head / s.heads_per_group();
        dout = (b * s.queries + j) * s.H + head;
        mask = s.selection_mask(selection, group, t);
    }
};
// a in shared memory, b in device memory
__device__ inline float dot(const float* a, const cuda_real* b, int D) {
    float sum = 0;
    for (int x = 0; x < D; x++) sum += a[x] * float(b[x]);
    return sum;
}
// shared [D] = scale * row, by the whole warp
__device__ inline void load_row(float* shared, const cuda_real* row, float scale, int D) {
    for (int x = threadIdx.x % 32; x < D; x += 32) shared[x] = float(row[x]) * scale;
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward.

// out [.., D] = softmax(q k^T / sqrt(D)) v and its LSE, one warp per query row, 32 keys at a time. Softmax wants the
// largest score first, and that is not known before the last key. So weights are taken relative to the largest score so
// far, m, and when a larger one comes, all sums so far are multiplied by e^(old m - new m), as if they had been taken
// relative to the new one (Milakov & Gimelshein 2018).
__global__ void __launch_bounds__(WARPS * 32, 1)
    forward_kernel(Branch branch, cuda_real* out, float* lse, const cuda_real* q, const cuda_real* k,
                   const cuda_real* v, const uint32_t* selection, NsaShape s, float scale, size_t rows) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const int D = s.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32, room = 2 * D + 32;
    float* query = shared.take<float>(WARPS * room) + warp * room;
    float* sums = query + D;
    float* weights = sums + D;
    const size_t row = size_t(blockIdx.x) * WARPS + warp;
    if (row >= rows) return;  // a whole warp; there is no barrier below
    const Query at(row, selection, s);
    k += at.group * s.key_stride(branch) * D;
    v += at.group * s.key_stride(branch) * D;
    load_row(query, q + row * D, scale, D);
    for (int x = lane; x < D; x += 32) sums[x] = 0;  // a column belongs to one lane from here to the end
    __syncwarp();
    float largest = -INFINITY, total = 0;  // total: of the keys of this lane
    for (int range = 0; range < range_count(branch, at.t, s); range++) {
        const KeyRange keys = key_range(branch, range, at.t, at.mask, s);
        for (int key0 = keys.begin; key0 < keys.end; key0 += 32) {
            const int key = key0 + lane, count = min(32, keys.end - key0);
            const float score = lane < count ? dot(query, k + size_t(key) * D, D) : -INFINITY;
            // the first time, largest is -infinity and rescale 0
            const float m = fmaxf(largest, lane_max(score));
            const float rescale = expf(largest - m);
            const float weight = expf(score - m);
            largest = m;
            total = total * rescale + weight;
            weights[lane] = weight;
            __syncwarp();
            for (int x = lane; x < D; x += 32) {
                float sum = sums[x] * rescale;
                for (int i = 0; i < count; i++) sum += weights[i] * float(v[size_t(key0 + i) * D + x]);
                sums[x] = sum;
            }
            __syncwarp();  // the weights have been read; the next 32 may be written
        }
    }
    total = lane_sum(total);
    const float inverse = total > 0 ? 1 / total : 0;  // no key: out 0, LSE +infinity
    for (int x = lane; x < D; x += 32) out[row * D + x] = cuda_real(sums[x] * inverse);
    if (lane == 0) lse[row] = total > 0 ? largest + logf(total) : INFINITY;
}

// dq = dS k / sqrt(D), or += with `add`, one warp per query row.  P' = e^(score - lse_gated), dS = P' o (dout v^T -
// row_dot)
__global__ void __launch_bounds__(WARPS * 32, 1)
    dq_kernel(Branch branch, BackwardArrays<cuda_real, float> d, InputArrays<cuda_real> in, NsaShape s, float scale,
              size_t rows) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const int D = s.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32, room = 3 * D + 32;
    float* query = shared.take<float>(WARPS * room) + warp * room;
    float* gradient = query + D;
    float* sums = gradient + D;
    float* weights = sums + D;
    const size_t row = size_t(blockIdx.x) * WARPS + warp;
    if (row >= rows) return;
    const Query at(row, in.selection, s);
    in.k += at.group * s.key_stride(branch) * D;
    in.v += at.group * s.key_stride(branch) * D;
    load_row(query, in.q + row * D, scale, D);
    load_row(gradient, d.dout + at.dout * D, 1, D);
    for (int x = lane; x < D; x += 32) sums[x] = 0;
    __syncwarp();
    const float shift = d.lse_gated[row], r = d.row_dot[row];
    for (int range = 0; range < range_count(branch, at.t, s); range++) {
        const KeyRange keys = key_range(branch, range, at.t, at.mask, s);
        for (int key0 = keys.begin; key0 < keys.end; key0 += 32) {
            const int key = key0 + lane, count = min(32, keys.end - key0);
            if (lane < count) {
                const float p = expf(dot(query, in.k + size_t(key) * D, D) - shift);
                weights[lane] = p * (dot(gradient, in.v + size_t(key) * D, D) - r);  // dS
            }
            __syncwarp();
            for (int x = lane; x < D; x += 32) {
                float sum = sums[x];
                for (int i = 0; i < count; i++) sum += weights[i] * float(in.k[size_t(key0 + i) * D + x]);
                sums[x] = sum;
            }
            __syncwarp();
        }
    }
    for (int x = lane; x < D; x += 32) d.dq[row * D + x] = (d.add ? d.dq[row * D + x] : 0) + sums[x] * scale;
}

// dk = dS^T q / sqrt(D), dv = P'^T dout, one warp per key, which goes through the heads of its group and the queries
// that see it, 32 at a time.
__global__ void __launch_bounds__(WARPS * 32, 1)
    dkdv_kernel(Branch branch, BackwardArrays<cuda_real, float> d, InputArrays<cuda_real> in, NsaShape s, float scale,
                size_t rows) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const int D = s.D, warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = s.H / s.G, room = 4 * D + 64;
    float* key_row = shared.take<float>(WARPS * room) + warp * room;
    float* value_row = key_row + D;
    float* dk_sums = value_row + D;
    float* dv_sums = dk_sums + D;
    float* p_weights = dv_sums + D;
    float* ds_weights = p_weights + 32;
    const size_t row = size_t(blockIdx.x) * WARPS + warp;
    if (row >= rows) return;
    const int stride = s.key_stride(branch);
    const int key = int(row % stride);
    const int block = key / s.slc_block;
    const size_t bg = row / stride;
    const size_t b = bg / s.G;
    const size_t g = bg % s.G;
    const KeyRange queries = query_range(branch, key, s);
    load_row(key_row, in.k + row * D, scale, D);
    load_row(value_row, in.v + row * D, 1, D);
    for (int x = lane; x < 2 * D; x += 32) dk_sums[x] = 0;  // and dv_sums
    __syncwarp();
    for (int i = 0; i < h; i++) {
        const size_t head = g * h + i, first_row = (b * s.H + head) * s.T;  // of q, row_dot and lse_gated
        for (int t0 = queries.begin; t0 < queries.end; t0 += 32) {
            const int t = t0 + lane;
            bool sees = t < queries.end;
            if (branch == SLC && sees) sees = is_selected(s.selection_mask(in.selection, bg, t), block);
            const unsigned seen_by = __ballot_sync(~0u, sees);
            if (!seen_by) continue;
            if (sees) {
                const float p = expf(dot(key_row, in.q + (first_row + t) * D, D) - d.lse_gated[first_row + t]);
                p_weights[lane] = p;
                ds_weights[lane] =
                    p * (dot(value_row, d.dout + ((b * s.T + t) * s.H + head) * D, D) - d.row_dot[first_row + t]);
            }
            __syncwarp();
            for (int x = lane; x < D; x += 32) {
                float dk_sum = dk_sums[x], dv_sum = dv_sums[x];
                for (unsigned rest = seen_by; rest; rest &= rest - 1) {
                    const int j = __ffs(int(rest)) - 1;
                    dk_sum += ds_weights[j] * float(in.q[(first_row + t0 + j) * D + x]);
                    dv_sum += p_weights[j] * float(d.dout[((b * s.T + t0 + j) * s.H + head) * D + x]);
                }
                dk_sums[x] = dk_sum;
                dv_sums[x] = dv_sum;
            }
            __syncwarp();
        }
    }
    for (int x = lane; x < D; x += 32) {
        d.dk[row * D + x] = cuda_real(dk_sums[x] * scale);
        d.dv[row * D + x] = cuda_real(dv_sums[x]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Block selection, one warp per (sequence, group, token); paper eq. 8 to 12.

// The importance of a selection block (eq. 9 and 10): the attention weights of the compressed blocks that share tokens
// with it, by the number of tokens they share, summed over the group's heads. queries [heads, D] in shared memory,
// scaled; kc of the group; lse of the token and the group's first head; visible: the compressed blocks that the token
// sees.
__device__ inline float importance_of(int block, const float* queries, const cuda_real* kc, const float* lse,
                                      KeyRange visible, const NsaShape& s) {
    const int begin = block * s.slc_block, end = begin + s.slc_block;
    float sum = 0;
    for (int i = max(visible.begin, (begin - s.l) / s.d); i < visible.end && i * s.d < end; i++) {
        const int common = min(end, i * s.d + s.l) - max(begin, i * s.d);
        if (common <= 0) continue;
        float weight = 0;
        for (int head = 0; head < s.H / s.G; head++)
            weight += expf(dot(queries + head * s.D, kc + size_t(i) * s.D, s.D) - lse[size_t(head) * s.queries]);
        sum += weight * common / s.d;
    }
    return sum;
}
// The most important block of 0 .. last that is not taken (importance -1); of equal ones the lowest; last + 1 if none.
__device__ inline int best_block(const float* importance, int last) {
    float best = -1;
    int at = last + 1;
    for (int block = int(threadIdx.x); block <= last; block += 32)
        if (importance[block] > best) {
            best = importance[block];
            at = block;
        }
    for (int flip = 16; flip > 0; flip /= 2) {
        const float other = __shfl_xor_sync(~0u, best, flip);
        const int other_at = __shfl_xor_sync(~0u, at, flip);
        if (other > best || (other == best && other_at < at)) {
            best = other;
            at = other_at;
        }
    }
    return at;
}
// Marks in `mask` the first, the two last and the slc_count - 3 most important blocks of 0 .. last; returns their share
// of all importance. A lane owns every 32nd block.
__device__ inline float choose_blocks(uint32_t* mask, float* importance, int last, int slc_count) {
    float sum = 0;
    for (int block = int(threadIdx.x); block <= last; block += 32) sum += importance[block];
    sum = lane_sum(sum);
    float chosen = importance[0] + importance[last - 1] + importance[last];
    __syncwarp();
    auto take = [&](int block) {
        mask[block / 32] |= 1u << (block % 32);
        importance[block] = -1;
    };
    if (threadIdx.x == 0)
        for (const int forced : {0, last - 1, last}) take(forced);
    __syncwarp();
    for (int round = 3; round < slc_count; round++) {
        const int best = best_block(importance, last);
        if (best > last) break;  // the others are NaN
        chosen += importance[best];
        __syncwarp();  // all have read it
        if (threadIdx.x == 0) take(best);
        __syncwarp();
    }
    return sum > 0 ? chosen / sum : 1;
}
__global__ void __launch_bounds__(32) select_kernel(uint32_t* selection, float* chosen_importance, const cuda_real* q,
                                                    const cuda_real* kc, const float* lse, NsaShape s, float scale) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const int D = s.D, lane = threadIdx.x, h = s.H / s.G;
    const int blocks = s.slc_blocks();
    const int words = s.selection_words();
    float *queries = shared.take<float>(h * D), *importance = shared.take<float>(blocks);
    uint32_t* mask = shared.take<uint32_t>(words);
    const size_t row = blockIdx.x, bg = row / s.queries;
    const int j = int(row % s.queries), t = s.first + j;
    const int last = t / s.slc_block;
    const KeyRange visible = key_range(CMP, 0, t, nullptr, s);
    const bool takes_all = last + 1 <= s.slc_count;
    for (int word = lane; word < words; word += 32) {
        uint32_t bits = 0;
        for (int block = word * 32; takes_all && block <= min(last, word * 32 + 31); block++)
            bits |= 1u << (block % 32);
        mask[word] = bits;
    }
    float share = 1;
    if (!takes_all) {
        // of the group's first head; the others follow at a distance of `queries`
        const size_t first_row = (bg / s.G * s.H + bg % s.G * h) * s.queries + j;
        for (int head = 0; head < h; head++)
            load_row(queries + head * D, q + (first_row + size_t(head) * s.queries) * D, scale, D);
        __syncwarp();
        for (int block = lane; block <= last; block += 32)
            importance[block] =
                importance_of(block, queries, kc + bg * s.key_stride(CMP) * D, lse + first_row, visible, s);
        __syncwarp();
        share = choose_blocks(mask, importance, last, s.slc_count);
    }
    __syncwarp();
    for (int word = lane; word < words; word += 32) selection[row * words + word] = mask[word];
    if (chosen_importance && lane == 0) chosen_importance[row] = share;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches. Shapes, "=" and "+=" as in struct Cpu.

inline void attention_forward(Branch branch, cuda_real* out, float* lse, const cuda_real* q, const cuda_real* k,
                              const cuda_real* v, const uint32_t* selection, const NsaShape& s, cudaStream_t stream) {
    const size_t rows = s.query_rows();
    launch<forward_kernel>(blocks_for(rows, WARPS), WARPS * 32, WARPS * (2 * s.D + 32) * sizeof(float), stream, branch,
                           out, lse, q, k, v, selection, s, float(s.scale()), rows);
}
// Training shapes (first = 0, queries = T).
inline void attention_backward(Branch branch, const BackwardArrays<cuda_real, float>& d,
                               const InputArrays<cuda_real>& in, const NsaShape& s, cudaStream_t stream) {
    const size_t rows = s.query_rows(), keys = branch == CMP ? s.cmp_rows() : s.key_rows();
    const float scale = float(s.scale());
    launch<dq_kernel>(blocks_for(rows, WARPS), WARPS * 32, WARPS * (3 * s.D + 32) * sizeof(float), stream, branch, d,
                      in, s, scale, rows);
    if (keys == 0) return;
    launch<dkdv_kernel>(blocks_for(keys, WARPS), WARPS * 32, WARPS * (4 * s.D + 64) * sizeof(float), stream, branch, d,
                        in, s, scale, keys);
}
// A group's queries, the importance of every block and its bit.
inline size_t select_shared_bytes(const NsaShape& s) {
    return shared_bytes({size_t(s.heads_per_group()) * s.D * sizeof(float), size_t(s.slc_blocks()) * sizeof(float),
                         size_t(s.selection_words()) * sizeof(uint32_t)});
}
inline void check_shape(const NsaShape& s) {
    if (s.window_only) return;
    const size_t bytes = select_shared_bytes(s);
    if (bytes > max_shared_of_device())
        fail_usage(
            "the plain kernel that chooses among %d blocks for %d heads of dimension %d in a group takes %d bytes of "
            "shared memory, this GPU has %d; choose a larger --slc-block or more --kv-groups",
            s.slc_blocks(), s.heads_per_group(), s.D, bytes, max_shared_of_device());
}
inline void select_blocks(uint32_t* selection, float* chosen_importance, const cuda_real* q, const cuda_real* kc,
                          const float* lse, const NsaShape& s, cudaStream_t stream) {
    launch<select_kernel>(unsigned(size_t(s.B) * s.G * s.queries), 32, select_shared_bytes(s), stream, selection,
                          chosen_importance, q, kc, lse, s, float(s.scale()));
}

}  // namespace plain

namespace kernels {

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE. One row of `projected` [B*queries, P] is  q | k_cmp v_cmp k_slc v_slc k_win v_win | gate logits |
// padding.

// cosine and sine [positions, D/2]
struct Rope {
    const float *cosine, *sine;
    // Rotates W pairs of a head, elements i.. of its lower and upper half, by their angles at a position; direction -1
    // rotates back.
    template <int W>
    __device__ void rotate(float (&low)[W], float (&high)[W], int position, int i, int D, int direction) const {
        float c[W], s[W];
        load(c, cosine + size_t(position) * (D / 2) + i);
        load(s, sine + size_t(position) * (D / 2) + i);
        for (int k = 0; k < W; k++) {
            const float a = low[k];
            const float b = high[k];
            const float turn = direction * s[k];
            low[k] = a * c[k] - b * turn;
            high[k] = a * turn + b * c[k];
        }
    }
    // Rotates back elements i and i + 1 of the halves of a head.
    __device__ void turn_back(float* low, float* high, int position, int i, int D) const {
        const size_t at = size_t(position) * (D / 2) + i;
        const float2 c = *reinterpret_cast<const float2*>(cosine + at), s = *reinterpret_cast<const float2*>(sine + at);
        const float a[2] = {low[0], low[1]};
        low[0] = a[0] * c.x + high[0] * s.x;
        low[1] = a[1] * c.y + high[1] * s.y;
        high[0] = high[0] * c.x - a[0] * s.x;
        high[1] = high[1] * c.y - a[1] * s.y;
    }
};

// Where head `unit` of a token's row belongs: units are the query heads, then each group's key or value of every slot;
// the gates follow.
struct HeadPlace {
    bool query, rotated, normed;
    int slot;    // HeadSlot of a key or value
    size_t row;  // of q, or of the slot's buffer
    int column;  // where it begins in the token's row
    __device__ HeadPlace(int unit, size_t b, int j, const NsaShape& s) {
        query = unit < s.H;
        slot = query ? 0 : (unit - s.H) / s.G + s.first_slot();
        column = unit * s.D;
        rotated = query || slot == K_SLC || slot == K_WIN;
        normed = s.qk_norm && (query || !s.holds_values(slot));  // by kernels of their own
        row = query ? (b * s.H + unit) * s.queries + j : (b * s.G + (unit - s.H) % s.G) * s.T + s.first + j;
    }
};
// Each pointer has a name and is chosen by comparisons: every thread would copy an array that is indexed at run time to
// local memory.
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
// One block per token; a thread takes W pairs of elements of a head at a time. The gates [BRANCHES, B, H, queries] are
// in the row head by head: BRANCHES * head + branch.
template <int W>
__global__ void __launch_bounds__(128)
    split_heads_forward_kernel(HeadPointers out, const cuda_real* projected, Rope rope, NsaShape s, int P) {
    wait_for_earlier_kernels();
    const int pieces = s.D / 2 / W, half = s.D / 2, units = s.head_units();
    const int j = blockIdx.x % s.queries, t = s.first + j;
    const size_t b = blockIdx.x / s.queries, rows = size_t(s.B) * s.H * s.queries;
    const cuda_real* in = projected + size_t(blockIdx.x) * P;
    for (int piece = threadIdx.x; piece < units * pieces; piece += blockDim.x) {
        const int unit = piece / pieces, i = piece % pieces * W;
        const HeadPlace place(unit, b, j, s);
        if (place.normed) continue;
        float low[W], high[W];
        load(low, in + place.column + i);
        load(high, in + place.column + half + i);
        if (place.rotated) rope.rotate(low, high, t, i, s.D, +1);
        cuda_real* to = (place.query ? out.q : out.kv(place.slot)) + place.row * s.D;
        store(to + i, low);
        store(to + half + i, high);
    }
    if (s.window_only) return;
    for (int i = threadIdx.x; i < BRANCHES * s.H; i += blockDim.x)
        out.gate[i % BRANCHES * rows + (b * s.H + i / BRANCHES) * s.queries + j] =
            s.left_out >> i % BRANCHES & 1 ? 0 : sigmoid(float(in[units * s.D + i]));
}
template <int W>
__global__ void __launch_bounds__(128)
    split_heads_backward_kernel(cuda_real* dprojected, HeadGradientPointers d, Rope rope, NsaShape s, int P) {
    wait_for_earlier_kernels();
    const int pieces = s.D / 2 / W, half = s.D / 2, t = blockIdx.x % s.T, units = s.head_units(),
              heads_end = units * s.D;
    const size_t b = blockIdx.x / s.T, rows = size_t(s.B) * s.H * s.T;
    cuda_real* out = dprojected + size_t(blockIdx.x) * P;
    for (int piece = (d.q ? 0 : s.H * pieces) + threadIdx.x; piece < units * pieces; piece += blockDim.x) {
        const int unit = piece / pieces, i = piece % pieces * W;
        const HeadPlace place(unit, b, t, s);
        if (place.normed) continue;
        float low[W], high[W];
        if (place.query) {
            load(low, d.q + place.row * s.D + i);
            load(high, d.q + place.row * s.D + half + i);
        } else {
            const cuda_real* from = d.kv(place.slot) + place.row * s.D;
            load(low, from + i);
            load(high, from + half + i);
        }
        if (place.rotated) rope.rotate(low, high, t, i, s.D, -1);
        store(out + place.column + i, low);
        store(out + place.column + half + i, high);
    }
    for (int i = threadIdx.x; i < P - heads_end; i += blockDim.x) {  // gates, then padding; neither in full attention
        const bool gate = i < BRANCHES * s.H;
        out[heads_end + i] = cuda_real(gate ? d.gate[i % BRANCHES * rows + (b * s.H + i / BRANCHES) * s.T + t] : 0.0f);
    }
}

// --qk-norm: a warp takes a whole head of q or of the keys at a time, and a lane pairs of its elements.
constexpr int NORMED_WARPS = 4;
struct NormedHead {
    int unit, gain_row;
    __device__ NormedHead(int head, const NsaShape& s) {  // heads are those of q, then each branch's keys
        const int key = head - s.H, branch = key / s.G;
        unit = key < 0 ? head : s.H + 2 * branch * s.G + key % s.G;
        gain_row = key < 0 ? 0 : 1 + branch;
    }
    __device__ static int count(const NsaShape& s) { return s.H + s.branches() * s.G; }
};
__device__ inline float head_rstd(const cuda_real* x, int lane, int D) {
    float squares = 0;
    for (int i = lane; i < D; i += 32) squares += float(x[i]) * float(x[i]);
    return 1 / sqrtf(lane_sum(squares) / D + float(NORM_EPS));
}
// One block per token.
__global__ void __launch_bounds__(NORMED_WARPS * 32)
    normed_heads_forward_kernel(HeadPointers out, const cuda_real* projected, const cuda_real* gains, Rope rope,
                                NsaShape s, int P) {
    wait_for_earlier_kernels();
    const int lane = threadIdx.x % 32, j = blockIdx.x % s.queries, half = s.D / 2;
    for (int head = threadIdx.x / 32; head < NormedHead::count(s); head += NORMED_WARPS) {
        const NormedHead at(head, s);
        const HeadPlace place(at.unit, blockIdx.x / s.queries, j, s);
        const cuda_real *in = projected + size_t(blockIdx.x) * P + place.column, *gain = gains + at.gain_row * s.D;
        cuda_real* to = (place.query ? out.q : out.kv(place.slot)) + place.row * s.D;
        const float rstd = head_rstd(in, lane, s.D);
        for (int i = lane; i < half; i += 32) {
            float low[1] = {float(in[i]) * rstd * float(gain[i])};
            float high[1] = {float(in[half + i]) * rstd * float(gain[half + i])};
            if (place.rotated) rope.rotate(low, high, s.first + j, i, s.D, +1);
            store(to + i, low);
            store(to + half + i, high);
        }
    }
}
// In dprojected, which holds what was projected, and in partial [blocks, s.gain_rows(), D] = the gains' gradients, a
// block's `tokens` summed. Eight blocks for a multiprocessor: without a number ptxas spills on sm_80, at 48 registers.
__global__ void __launch_bounds__(NORMED_WARPS * 32, 8)
    normed_heads_backward_kernel(cuda_real* dprojected, float* partial, HeadGradientPointers d, const cuda_real* gains,
                                 Rope rope, NsaShape s, int P, int tokens) {
    wait_for_earlier_kernels();
    DynamicShared shared;
    const WarpSums dgains(shared, s.gain_rows() * s.D);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = s.D / 2;
    const int begin = blockIdx.x * tokens, end = min(s.B * s.T, begin + tokens);
    for (int n = begin; n < end; n++)
        for (int head = warp; head < NormedHead::count(s); head += NORMED_WARPS) {
            const NormedHead at(head, s);
            const HeadPlace place(at.unit, n / s.T, n % s.T, s);
            cuda_real* x = dprojected + size_t(n) * P + place.column;
            const cuda_real* gain = gains + at.gain_row * s.D;
            float* const dgain = dgains.own + at.gain_row * s.D;
            const auto load_gradient = [&](float(&low)[1], float(&high)[1], int i) {
                const size_t from = place.row * s.D + i;
                low[0] = place.query ? d.q[from] : float(d.kv(place.slot)[from]);
                high[0] = place.query ? d.q[from + half] : float(d.kv(place.slot)[from + half]);
                if (place.rotated) rope.rotate(low, high, n % s.T, i, s.D, -1);
            };
            const float rstd = head_rstd(x, lane, s.D);
            float low[1], high[1], dot = 0;
            for (int i = lane; i < half; i += 32) {
                load_gradient(low, high, i);
                dot += low[0] * float(gain[i]) * float(x[i]) + high[0] * float(gain[half + i]) * float(x[half + i]);
            }
            const float correction = lane_sum(dot) * rstd * rstd / s.D;
            __syncwarp();  // the head has been read by lanes that do not write it
            for (int i = lane; i < half; i += 32) {
                load_gradient(low, high, i);
                const float a = float(x[i]), b = float(x[half + i]);
                dgain[i] += low[0] * a * rstd;
                dgain[half + i] += high[0] * b * rstd;
                x[i] = cuda_real(rstd * (low[0] * float(gain[i]) - a * correction));
                x[half + i] = cuda_real(rstd * (high[0] * float(gain[half + i]) - b * correction));
            }
        }
    dgains.store(partial);
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression. Scratch matrices are packed: row bg*count + i is block begin + i of (sequence, group) bg.
//
// Keys and values are computed together: (sequence, group) bg counts through the keys and goes on through the values.
// So phi takes half as many launches, which are short.
//
// A block of l tokens is `parts` = l/d chunks of d tokens, each of which is part of as many blocks. So fc1 [F, l*D] is
// read as [F*parts, d*D], and one product gives what each chunk adds in every place that it can have in a block: column
// f*parts + p of a chunk's row, for the block that begins p chunks earlier.

// hidden [2, B, G, NC, F] = the sum of its chunks' columns + bias, activated [2*B*G*count, F] = silu(hidden). chunks
// [2*B*G * (count + parts - 1), F*parts], from chunk `begin` on. One thread per element. `groups` (sequence, group)s
// have the bias of the keys; those of the values have the one that is `to_v` elements further on.
__global__ void compress_activate_kernel(cuda_real* hidden, cuda_real* activated, const float* chunks,
                                         const cuda_real* bias, size_t to_v, size_t groups, int rows, int count,
                                         int begin, int NC, int F, int parts) {
    wait_for_earlier_kernels();
    const size_t i = thread_index();
    if (i >= size_t(rows) * F) return;
    const size_t row = i / F, bg = row / count;
    const size_t f = i % F;
    const size_t at = (bg * NC + begin + row % count) * F + f;
    const float* part = chunks + ((row + bg * (parts - 1)) * F + f) * parts;
    float sum = 0;
    for (int p = 0; p < parts; p++) sum += part[size_t(p) * F * parts + p];
    hidden[at] = cuda_real(sum + float(bias[bg < groups ? f : to_v + f]));
    const float h = float(hidden[at]);
    activated[i] = cuda_real(h * sigmoid(h));
}
// out [2, B, G, NC, D] = mean of the block's l tokens + sum, the keys rotated by the angles at the block's first token.
// sum [2*B*G*count, D]; k [B, G, T, D], whose values are `to_v` elements further on; one thread per pair.
__global__ void compress_output_kernel(cuda_real* out, const float* sum, const cuda_real* k, size_t to_v, Rope rope,
                                       int rows, int count, int begin, int NC, NsaShape s) {
    wait_for_earlier_kernels();
    const int pairs = s.D / 2, groups = s.B * s.G;
    const size_t index = thread_index();
    if (index >= size_t(rows) * pairs) return;
    const int row = int(index / pairs), bg = row / count;
    const int x = int(index % pairs), block = begin + row % count;
    const cuda_real* tokens = k + (bg < groups ? 0 : to_v) + (size_t(bg % groups) * s.T + size_t(block) * s.d) * s.D;
    float low[1] = {0}, high[1] = {0};
    for (int i = 0; i < s.l; i++) {
        low[0] += float(tokens[size_t(i) * s.D + x]);
        high[0] += float(tokens[size_t(i) * s.D + pairs + x]);
    }
    low[0] = low[0] / s.l + sum[size_t(row) * s.D + x];
    high[0] = high[0] / s.l + sum[size_t(row) * s.D + pairs + x];
    if (bg < groups) rope.rotate(low, high, block * s.d, x, s.D, +1);
    cuda_real* to = out + (size_t(bg) * NC + block) * s.D;
    to[x] = cuda_real(low[0]);
    to[pairs + x] = cuda_real(high[0]);
}
// Rotates dout [B, G, NC, D] back, in place.
__global__ void compress_rotate_back_kernel(cuda_real* dout, Rope rope, int rows, int NC, int d, int D) {
    wait_for_earlier_kernels();
    const int pairs = D / 2;
    const size_t index = thread_index();
    if (index >= size_t(rows) * pairs) return;
    const size_t row = index / pairs;
    const int x = int(index % pairs);
    float low[1] = {float(dout[row * D + x])}, high[1] = {float(dout[row * D + pairs + x])};
    rope.rotate(low, high, int(row % NC) * d, x, D, -1);
    dout[row * D + x] = cuda_real(low[0]);
    dout[row * D + pairs + x] = cuda_real(high[0]);
}
// dhidden = dactivated * silu'(hidden), spread over the columns of dchunks [B*G*chunks, F*parts], of which those that
// belong to no block get 0; activated = silu(hidden), which the forward pass did not keep. One thread per element of
// [B*G*chunks, F]; hidden, dactivated, activated [B*G*NC, F].
__global__ void compress_dchunks_kernel(cuda_real* dchunks, cuda_real* activated, const float* dactivated,
                                        const cuda_real* hidden, int rows, int chunks, int NC, int F, int parts) {
    wait_for_earlier_kernels();
    const size_t i = thread_index();
    if (i >= size_t(rows) * F) return;
    const int chunk = int(i / F % chunks);
    const size_t f = i % F, bg = i / F / chunks;
    for (int p = 0; p < parts; p++) {
        const int block = chunk - p;
        const size_t at = (bg * NC + block) * F + f;
        float gradient = 0;
        if (block >= 0 && block < NC) {
            const float h = float(hidden[at]), s = sigmoid(h);
            gradient = dactivated[at] * s * (1 + h * (1 - s));
            if (p == 0) activated[at] = cuda_real(h * s);
        }
        dchunks[i * parts + p] = cuda_real(gradient);
    }
}
// dk [B, G, T, D] = sum (the gradient through fc1) + a token's share in the means of the blocks that hold it;
// (sequence, group)s from B*G on are `to_v` elements further on. D is a multiple of WIDE, since the products before
// this want it so.
__global__ void __launch_bounds__(256) compress_dk_kernel(cuda_real* dk, size_t to_v, const float* sum,
                                                          const cuda_real* dout, size_t rows, int NC, NsaShape s) {
    wait_for_earlier_kernels();
    constexpr int W = WIDE;
    const size_t row = row_index();
    if (row >= rows) return;
    // fewer than 2^32 rows, as in RowPlace
    const int bg = int(unsigned(row) / unsigned(s.T)), t = int(unsigned(row) % unsigned(s.T)), groups = s.B * s.G;
    cuda_real* const to = dk + (bg < groups ? 0 : to_v) + (size_t(bg % groups) * s.T + t) * s.D;
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
        store(to + x, a);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The gated sum of the branches, and the row terms that their backward starts from.

// Where row (b, head, j) of [B, H, queries] is in [B, queries, H]. There are fewer than 2^32 rows, and divisions of 64
// bits are slow.
struct RowPlace {
    size_t by_token;
    __device__ RowPlace(unsigned row, const NsaShape& s) {
        const unsigned queries = unsigned(s.queries);
        const unsigned H = unsigned(s.H);
        const unsigned j = row % queries;
        const unsigned head = row / queries % H;
        const unsigned b = row / queries / H;
        by_token = (size_t(b) * queries + j) * H + head;
    }
};

// out [W] = sum over branches of gate * o; paper eq. 5. o and gate: this row's in the first of them, each of which has
// `rows` rows of D; gate: null stands for 1.
template <int W>
__device__ inline void combine(cuda_real* out, const cuda_real* o, const float* gate, int branches, size_t rows,
                               int D) {
    float sum[W] = {}, term[W];
    for (int i = 0; i < branches; i++) {
        const float g = gate ? gate[i * rows] : 1;
        load(term, o + i * rows * D);
        for (int k = 0; k < W; k++) sum[k] += g * term[k];
    }
    store(out, sum);
}
// out [B*queries, H*D] of all rows
template <int W>
__global__ void __launch_bounds__(256)
    combine_forward_kernel(cuda_real* out, const cuda_real* o, const float* gate, size_t rows, NsaShape s) {
    wait_for_earlier_kernels();
    const size_t row = row_index();
    if (row >= rows) return;
    const RowPlace place(unsigned(row), s);
    const float* const of_row = s.window_only ? nullptr : gate + row;
    for (int x = threadIdx.x % ROW_LANES * W; x < s.D; x += ROW_LANES * W)
        combine<W>(out + place.by_token * s.D + x, o + row * s.D + x, of_row, s.branches(), rows, s.D);
}
// row_dot = dout . o     lse_gated = lse - ln(gate)     dgate_logit = row_dot * gate * (1 - gate), per branch
template <int W>
__global__ void __launch_bounds__(256)
    attention_backward_rows_kernel(float* row_dot, float* lse_gated, float* dgate_logit, const cuda_real* dout,
                                   const cuda_real* o, const float* gate, const float* lse, size_t rows, NsaShape s) {
    wait_for_earlier_kernels();
    const size_t index = row_index(), row = index < rows ? index : rows - 1;  // every lane takes part in the sums
    const int D = s.D;
    const cuda_real* d = dout + RowPlace(unsigned(row), s).by_token * D;
    for (int i = 0; i < s.branches(); i++) {
        const size_t at = i * rows + row;
        float dot = 0, a[W], c[W];
        for (int x = threadIdx.x % ROW_LANES * W; x < D; x += ROW_LANES * W) {
            load(a, d + x);
            load(c, o + at * D + x);
            for (int k = 0; k < W; k++) dot += a[k] * c[k];
        }
        dot = lane_sum<ROW_LANES>(dot);
        if (threadIdx.x % ROW_LANES != 0 || index >= rows) continue;
        const float g = s.window_only ? 1 : gate[at];
        row_dot[at] = dot;
        lse_gated[at] = lse[at] - logf(g);
        if (!s.window_only) dgate_logit[at] = dot * g * (1 - g);
    }
}

}  // namespace kernels

#ifndef PRECISION_FP32

// =====================================================================================================================
// Attention of the three branches and block selection on tensor cores, in bf16 with fp32 sums. Tiles of 64 keys are
// shared by the queries of all heads of a group, and arrive while the tile before is used. The pieces are in
// lib/cuda/attention_tiles.cuh: tiles, masks (which keys a query sees), the walk over tiles.
// =====================================================================================================================

// ---------------------------------------------------------------------------------------------------------------------
// Forward. One block per tile of queries; each warp has rows of its own.

// How far a score in base 2 may exceed the shift that is subtracted from it; see online_softmax.
constexpr float MOST_GROWTH = 8;

// One step of the online softmax: the scores p of a tile of keys become exponentials, `total` grows by this lane's
// columns of them, and sums and total are rescaled where the shift, which is subtracted from scores in base 2, has to
// move.
//
// A row's shift follows its largest score only when that exceeds it by more than 8: the quotient at the end is the
// same, exponentials up to 2^8 and their sums are far from fp32's limits, and in most steps no sum has to be rescaled.
// It starts at -FLT_MAX and so is always finite: infinity is never subtracted from infinity.
template <Branch branch, int D, int M, int N>
__device__ inline void online_softmax(float (&p)[M][N][4], float (&sums)[M][D / 8][4], float (&shift)[M][2],
                                      float (&total)[M][2], const TileView& view, float scale) {
    float next[M][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = -INFINITY;
#pragma unroll
            for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(p[m][n][2 * i], p[m][n][2 * i + 1]));
            most = row_max(most) * (scale * LOG2_E);
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
                for (int x = 0; x < D / 8; x++) {
                    sums[m][x][2 * i] *= rescale;
                    sums[m][x][2 * i + 1] *= rescale;
                }
            }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float minus_shift = view.hidden<branch>(m, i) ? -INFINITY : -shift[m][i];
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; e++) {
                    p[m][n][e] = exp2_approx(fmaf(p[m][n][e], scale * LOG2_E, minus_shift));
                    total[m][i] += p[m][n][e];
                }
        }
}
// The walk of a warpgroup, with three buffers. A turn starts the sums over a tile's values and the scores of the next
// tile, then copies the one after; while the tensor cores work at them, other warps compute exponentials.
template <Branch branch, int D>
__device__ inline void attend_by_warpgroups(const QueryBlock<branch, D, false, WARPGROUP>& block, int tile,
                                            const unsigned (&q_rows)[1][D / 16][4], float (&sums)[1][D / 8][4],
                                            float (&shift)[1][2], float (&total)[1][2], const AttentionShape& s) {
    if (tile >= block.end_tile) return;
    constexpr int TILE_BYTES = KEY_TILE * D * sizeof(bf16);
    const WgmmaTile k_tiles = wgmma_rows<D>(block.keys.k_tiles), v_tiles = wgmma_rows<D>(block.keys.v_tiles);
    float p[1][KEY_TILE / 8][4];
    unsigned rounded[KEY_TILE / 16][4];
    bool used;  // whether a query of this warpgroup chose something of the tile that is scored
    const auto start_scores = [&](int key_tile, WgmmaTile k_tile) {
        used = key_tile < block.end_tile && block.uses(key_tile);
        if (!used) return;
        wgmma_fence();
        if constexpr (q_in_registers<D>()) start_product<D>(p[0], q_rows[0], k_tile);
        else start_product<D>(p[0], wgmma_rows<D>(block.q_tile + warpgroup_index() * WARPGROUP_ROWS * D), k_tile);
        wgmma_commit();
    };
    int next = block.next(tile + 1);
    cp_async_wait<0>();
    async_fence();
    __syncthreads();  // the first tile has arrived
    if (next < block.end_tile) block.keys.copy(1, next, s);
    start_scores(tile, k_tiles);
    TileView view = look_at_tile<branch, 1>(tile, block.first_end, block.ends, block.selection, s);
    wgmma_wait<0>(p[0]);
    for (int buffer = 0; tile < block.end_tile;) {
        const int after = block.next(next + 1);
        const int next_buffer = buffer == 2 ? 0 : buffer + 1, buffer_after = next_buffer == 2 ? 0 : next_buffer + 1;
        if (used) {
            if (view.masked) hide_keys<branch>(p, view, 0, block.ends, s);
            online_softmax<branch, D>(p, sums, shift, total, view, s.scale);
            round_rows(rounded, p[0]);
            wgmma_fence();
            start_sum(sums[0], rounded, v_tiles + buffer * TILE_BYTES);
            wgmma_commit();
        }
        cp_async_wait<0>();
        async_fence();
        __syncthreads();  // the next tile has arrived, and all warps are done with the one before this
        start_scores(next, k_tiles + next_buffer * TILE_BYTES);
        if (after < block.end_tile) block.keys.copy(buffer_after, after, s);
        view = look_at_tile<branch, 1>(min(next, block.end_tile - 1), block.first_end, block.ends, block.selection, s);
        wgmma_wait<0>(sums[0]);
        wgmma_wait<0>(p[0]);
        buffer = next_buffer, tile = next, next = after;
    }
}
// What the forward kernels are told beside their arrays.
struct ForwardOptions {
    unsigned branches;             // bits
    int first_branch;              // that the arrays [branches, ...] begin with
    const SelectedChoice* choice;  // AUTO's for the selected branch, where there is one
};
// o and lse of a branch = softmax(q k^T / sqrt(D)) v over its keys, for the rows of a tile; a query without a key gets
// 0 and +infinity.
template <Branch branch, int D, Multiplier by>
__device__ inline void attend(const LayerOutputs<bf16, float>& out, const LayerInputs<bf16, float>& in,
                              const ForwardOptions& options, const AttentionShape& s) {
    constexpr int M = row_pieces<D, false, by>(), KEYS = forward_keys<D>();  // keys at a time
    QueryBlock<branch, D, false, by> block(in.k[branch], in.v[branch], in.selection, s);
    const int first_tile = block.start(s);
    unsigned q_rows[M][D / 16][4];
    if (q_in_registers<D>()) load_rows<D>(q_rows, block.q_tile, block.first_row);
    float sums[M][D / 8][4] = {}, shift[M][2], total[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) shift[m][i] = -FLT_MAX;

    if constexpr (by == WARPGROUP) attend_by_warpgroups(block, first_tile, q_rows, sums, shift, total, s);
    else
        block.walk(first_tile, s, [&](const TileView& view, const bf16* k_tile, const bf16* v_tile) {
#pragma unroll 1
            for (int first = 0; first < KEY_TILE; first += KEYS) {
                float p[M][KEYS / 8][4] = {};
                if constexpr (q_in_registers<D>()) multiply_rows<D, M, KEYS / 16>(p, q_rows, k_tile, first);
                else multiply_rows<D, M, KEYS / 16>(p, block.q_tile, block.first_row, k_tile, first);
                if (view.masked) hide_keys<branch>(p, view, first, block.ends, s);
                online_softmax<branch, D>(p, sums, shift, total, view, s.scale);
                multiply_add<D, M, KEYS / 16>(sums, p, v_tile, first);
            }
        });

    const size_t rows_before = rows_before_branch(branch, options.first_branch, s);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float sum = row_sum(total[m][i]);
            const long long row = block.row(m, i, s).row;
            store_row(out.o + (rows_before + row) * D, sums[m], i, sum > 0 ? 1 / sum : 0, row >= 0);
            if (row >= 0 && threadIdx.x % 4 == 0)
                out.lse[rows_before + row] = sum > 0 ? shift[m][i] / LOG2_E + logf(sum) : INFINITY;
        }
}
// attn of the tile's rows, from the outputs of all branches.
template <int D>
__device__ inline void combine_branches(const LayerOutputs<bf16, float>& out, const float* gate,
                                        const ForwardOptions& options, const AttentionShape& s) {
    const Indices again = indices_again();
    const QueryTile tile = query_tile(s, int(again.block));
    const size_t rows = size_t(s.batch_groups) * s.heads * s.queries;
    for (int i = int(again.thread); i < s.heads * s.tile_tokens * (D / 8); i += blockDim.x) {
        const RowOfTile r = row_of_tile(tile, i / (D / 8), s);
        if (!r.query) continue;
        const size_t row = size_t(row_of_query(tile, r.head, r.token, s)), x = i % (D / 8) * 8;
        const size_t to = dout_offset<D>(tile, s) + (size_t(r.token) * s.H + r.head) * D + x;
        kernels::combine<8>(out.attn + to, out.o + row * D + x, gate ? gate + row : nullptr,
                            BRANCHES - options.first_branch, rows, D);
    }
}
// Which branches a forward kernel is compiled for, as bits.
constexpr unsigned COMPRESSED = 1u << CMP, OTHERS = 1u << SLC | 1u << WIN;
// The branches of SET that options.branches names, and then, where out.attn is given, the gated sum of all.
template <unsigned SET, int D, Multiplier by>
__device__ inline void attend_to(const LayerOutputs<bf16, float>& out, const LayerInputs<bf16, float>& in,
                                 const ForwardOptions& options, const AttentionShape& s) {
    const bool selects = SET == OTHERS && options.branches >> SLC & 1 && !(options.choice && options.choice->gather);
    if (SET == OTHERS && options.branches == 1u << SLC && !selects) return;  // gathered rows have made it
    QueryRows<D, false, by>(s).copy(in.q, nullptr, selects, in.selection, s);
    if constexpr (SET == COMPRESSED) return attend<CMP, D, by>(out, in, options, s);
    if (selects) attend<SLC, D, by>(out, in, options, s);
    if (options.branches >> WIN & 1) {
        __syncthreads();  // the selected branch's tiles are no longer read
        attend<WIN, D, by>(out, in, options, s);
    }
    if (!out.attn) return;
    __syncthreads();  // the block's rows of o are written
    combine_branches<D>(out, in.gate, options, s);
}
// The budgets of this and the following kernels: cycles of an sm_90 multiprocessor for 16 rows and 64 keys (one head),
// D = 64 / 128, by the inner loop's machine code and the data sheet's rates. The largest bounds the loop.
//     mma 102 / 205, ldmatrix 64 / 192, exponentials 68 / 72, instructions 124 / 179, L2 87 / 174
template <unsigned SET, int D, Multiplier by>
__global__ void __launch_bounds__(MOST_TILE_THREADS<D, false, by>, TILE_BLOCKS<D, false, by>)
    attention_forward_kernel(LayerOutputs<bf16, float> out, LayerInputs<bf16, float> in, ForwardOptions options,
                             AttentionShape s) {
    wait_for_earlier_kernels();
    if constexpr (by == WARP || COMPILED_FOR_WGMMA) attend_to<SET, D, by>(out, in, options, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward, with P' = e^(q k^T / sqrt(D) - lse_gated) and dS = P' o (dout v^T - row_dot). The products q k^T and dout
// v^T are computed twice: in the dQ kernel, where a thread block keeps its queries, and in the dK/dV kernel, where it
// keeps its keys. So each gradient has one owner.

// sums += dS k by warpgroups, which read q and dout from shared memory.
template <Branch branch, int D>
__device__ inline void add_keys_by_warpgroups(const QueryBlock<branch, D, true, WARPGROUP>& block, int tile,
                                              float (&sums)[1][D / 8][4], const float (&minus_shift)[1][2],
                                              const float (&dot)[1][2], const AttentionShape& s) {
    const int group = warpgroup_index() * WARPGROUP_ROWS * D;
    const WgmmaTile q_tile = wgmma_rows<D>(block.q_tile + group), dout_tile = wgmma_rows<D>(block.dout_tile + group);
    for (int buffer = 0; tile < block.end_tile; buffer ^= 1) {
        const int this_tile = tile;
        tile = block.next(tile + 1);
        const WgmmaTile k_tile = wgmma_rows<D>(block.keys.k_tiles + buffer * KEY_TILE * D);
        const WgmmaTile v_tile = wgmma_rows<D>(block.keys.v_tiles + buffer * KEY_TILE * D);
        float p[1][KEY_TILE / 8][4], ds[1][KEY_TILE / 8][4];
        unsigned rounded[KEY_TILE / 16][4];
        cp_async_wait<0>();
        async_fence();
        __syncthreads();  // this tile has arrived, and all warps are done with the last one
        const auto copy_next = [&] {
            if (tile < block.end_tile) block.keys.copy(buffer ^ 1, tile, s);
        };
        if (!block.uses(this_tile)) {
            copy_next();
            continue;
        }
        wgmma_fence();
        start_product<D>(p[0], q_tile, k_tile);
        wgmma_commit();
        start_product<D>(ds[0], dout_tile, v_tile);
        wgmma_commit();
        copy_next();
        const TileView view = look_at_tile<branch, 1>(this_tile, block.first_end, block.ends, block.selection, s);
        wgmma_wait<1>(p[0]);
        if (view.masked) hide_keys<branch>(p, view, 0, block.ends, s);
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float minus_lse = view.hidden<branch>(0, e / 2) ? -INFINITY : minus_shift[0][e / 2];
                p[0][n][e] = exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, minus_lse));
            }
        wgmma_wait<0>(ds[0]);
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - dot[0][e / 2]);
        round_rows(rounded, ds[0]);
        wgmma_fence();
        start_sum(sums[0], rounded, k_tile);
        wgmma_commit();
        wgmma_wait<0>(sums[0]);
    }
}
// What dQ is told beside its arrays. Without LayerGradients::dq it turns the sums back and stores them in dprojected.
// gathered [B, H, T, D]: where given, and where AUTO has chosen it, what gathered rows have made of the selected
// branch.
struct DqOptions {
    kernels::Rope rope;
    int columns;  // of dprojected
    const float* gathered;
    const SelectedChoice* choice;
    unsigned branches;  // bits
    int first_branch;   // that the arrays [branches, ...] begin with
};
// sums += dS k of a branch.
template <Branch branch, int D, Multiplier by, int M>
__device__ inline void add_branch(float (&sums)[M][D / 8][4], const QueryBlock<branch, D, true, by>& block,
                                  int first_tile, const unsigned (&q_rows)[M][D / 16][4],
                                  const unsigned (&dout_rows)[M][D / 16][4], const LayerGradients<bf16, float>& d,
                                  const LayerInputs<bf16, float>& in, const DqOptions& options,
                                  const AttentionShape& s) {
    constexpr int KEYS = 16;  // keys at a time, as many as there are registers for
    float minus_shift[M][2], dot[M][2];
    const size_t rows_before = rows_before_branch(branch, options.first_branch, s);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto r = block.row(m, i, s);
            const float2 terms = make_row_terms<D, tile_columns<D, by>()>(d, in, rows_before + size_t(r.row),
                                                                          r.row >= 0, block.dout_tile, r.place);
            minus_shift[m][i] = terms.x;
            dot[m][i] = terms.y;
        }

    if constexpr (by == WARPGROUP) add_keys_by_warpgroups(block, first_tile, sums, minus_shift, dot, s);
    else
        block.walk(first_tile, s, [&](const TileView& view, const bf16* k_tile, const bf16* v_tile) {
#pragma unroll 1
            for (int first = 0; first < KEY_TILE; first += KEYS) {
                float p[M][KEYS / 8][4] = {}, ds[M][KEYS / 8][4] = {};
                multiply_rows<D, M, KEYS / 16>(p, q_rows, k_tile, first);
                if constexpr (COMPILED_GENERATION.dout_in_registers)
                    multiply_rows<D, M, KEYS / 16>(ds, dout_rows, v_tile, first);
                else multiply_rows<D, M, KEYS / 16>(ds, block.dout_tile, block.first_row, v_tile, first);
                if (view.masked) hide_keys<branch>(p, view, first, block.ends, s);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float minus_lse = view.hidden<branch>(m, i) ? -INFINITY : minus_shift[m][i];
#pragma unroll
                        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                            for (int e = 2 * i; e < 2 * i + 2; e++)
                                ds[m][n][e] = exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, minus_lse)) *
                                              (ds[m][n][e] - dot[m][i]);
                    }
                multiply_add<D, M, KEYS / 16>(sums, ds, k_tile, first);
            }
        });
}
// The sums over all branches, dS k / sqrt(D). The forward's structure, with dout in place of the softmax.
template <int D, Multiplier by>
__device__ inline void compute_dq(const LayerGradients<bf16, float>& d, const LayerInputs<bf16, float>& in,
                                  const DqOptions& options, const AttentionShape& s, const AttentionShape& cmp) {
    constexpr int M = row_pieces<D, true, by>();
    // Asked again each time: the answer would take a register throughout the walks.
    const auto has_gathered = [&] { return options.gathered && (!options.choice || options.choice->gather); };
    const auto selects = [&] { return options.branches >> SLC & 1 && !has_gathered(); };
    QueryRows<D, true, by>(s).copy(in.q, in.dout, selects(), in.selection, s);
    float sums[M][D / 8][4] = {};
    unsigned q_rows[M][D / 16][4], dout_rows[M][D / 16][4];
    {
        QueryBlock<WIN, D, true, by> block(in.k[WIN], in.v[WIN], nullptr, s);
        if (!(options.branches >> WIN & 1)) block.end_tile = 0;
        const int first_tile = block.start(s);
        if (by == WARP) load_rows<D>(q_rows, block.q_tile, block.first_row);
        if (by == WARP && COMPILED_GENERATION.dout_in_registers)
            load_rows<D>(dout_rows, block.dout_tile, block.first_row);
        if (options.branches >> WIN & 1) add_branch<WIN>(sums, block, first_tile, q_rows, dout_rows, d, in, options, s);
    }
    if (selects()) {
        QueryBlock<SLC, D, true, by> block(in.k[SLC], in.v[SLC], in.selection, s);
        __syncthreads();  // the tiles of the branch before are no longer read
        const int first_tile = block.start(s);
        add_branch<SLC>(sums, block, first_tile, q_rows, dout_rows, d, in, options, s);
    }
    if (options.branches >> CMP & 1) {
        QueryBlock<CMP, D, true, by> block(in.k[CMP], in.v[CMP], nullptr, cmp);
        __syncthreads();
        const int first_tile = block.start(cmp);
        add_branch<CMP>(sums, block, first_tile, q_rows, dout_rows, d, in, options, cmp);
    }
    const bool gathered = has_gathered();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto r = QueryRows<D, true, by>(s).row(m, i, s);
            const int column = threadIdx.x % 4 * 2;
            if (gathered && r.row >= 0)
#pragma unroll
                for (int x = 0; x < D / 8; x++) {
                    const float2 more = *reinterpret_cast<const float2*>(options.gathered + r.row * D + x * 8 + column);
                    sums[m][x][2 * i] += more.x;
                    sums[m][x][2 * i + 1] += more.y;
                }
            if (d.dq) {
                if (r.row < 0) continue;
#pragma unroll
                for (int x = 0; x < D / 8; x++)
                    *reinterpret_cast<float2*>(d.dq + r.row * D + x * 8 + column) =
                        make_float2(sums[m][x][2 * i] * s.scale, sums[m][x][2 * i + 1] * s.scale);
                continue;
            }
#pragma unroll
            for (int x = 0; x < D / 16; x++)
                options.rope.turn_back(&sums[m][x][2 * i], &sums[m][x + D / 16][2 * i], r.token, x * 8 + column, D);
            store_row(d.dprojected + r.token_row * options.columns + r.head * D, sums[m], i, s.scale, r.row >= 0);
        }
}
// Budget, as attention_forward_kernel has it:
//     mma 154 / 307, ldmatrix 96 / 384, exponentials 64 / 64, instructions 114 / 182, L2 87 / 174
template <int D, Multiplier by>
__global__ void __launch_bounds__(MOST_TILE_THREADS<D, true, by>, TILE_BLOCKS<D, true, by>)
    attention_dq_kernel(LayerGradients<bf16, float> d, LayerInputs<bf16, float> in, DqOptions options, AttentionShape s,
                        AttentionShape cmp) {
    wait_for_earlier_kernels();
    if constexpr (by == WARP || COMPILED_FOR_WGMMA) compute_dq<D, by>(d, in, options, s, cmp);
}

// In the compressed branch the queries are cut into parts: the keys are few, so their tiles alone would not fill a GPU,
// and the first are seen by almost all queries. The first part that sees a key of the tile:
__device__ inline int first_part(int key_tile, const AttentionShape& s) {
    return max(first_query<CMP>(key_tile * KEY_TILE, s) - s.first, 0) / s.part_tokens;
}
// The tokens that may see one of KEYS keys, counted from s.first: first .. end-1, of one part in the compressed branch.
struct TokenRange {
    int first, end;
};
template <Branch branch, int KEYS>
__device__ inline TokenRange tokens_of_tile(int first_key, int part, const AttentionShape& s) {
    const int first = max(first_query<branch>(first_key, s) - s.first, branch == CMP ? part * s.part_tokens : 0);
    const int end = min(s.queries, branch == WIN   ? first_key + KEYS - 1 + s.window - s.first
                                   : branch == CMP ? (part + 1) * s.part_tokens
                                                   : s.queries);
    return {max(first, 0), end};
}

// Where a part's sums for a tile of keys go.
template <int D>
__device__ inline float* sums_of_part(float* partial, int bg, int tile, int part, const AttentionShape& s) {
    return partial + ((size_t(bg) * key_tiles(s) + tile) * s.parts + part) * 2 * KEY_TILE * D;
}

// dk [keys] = dS^T q / sqrt(D), dv [keys] = P'^T dout.  One block per dkdv_keys(), which stay in registers, 32 in each
// warp (D = 128: 16), or for warpgroups in shared memory. partial [B*G, tiles of keys, parts, 2, KEY_TILE, D], where
// there is more than one part. Single arguments in place of two structs: those cost registers that sm_100 and sm_120 do
// not have.
template <Branch branch, int D, Multiplier by>
__device__ inline void compute_dkdv(bf16* dk, bf16* dv, float* partial, const bf16* dout, const bf16* q, const bf16* k,
                                    const bf16* v, const float* row_dot, const float* lse_gated,
                                    const uint32_t* selection, const AttentionShape& s) {
    constexpr int KEYS = dkdv_keys<branch, D, by>(), THREADS = dkdv_threads<D, KEYS, by>();
    constexpr int COLUMNS = tile_columns<D, by>();
    // Early keys are seen by more queries and start first.
    const int parts = branch == CMP ? s.parts : 1, part = branch == CMP ? int(blockIdx.x) / s.batch_groups % parts : 0;
    const int tile = int(blockIdx.x) / s.batch_groups / parts * (KEYS / KEY_TILE);
    const int bg = int(blockIdx.x) % s.batch_groups;
    const int first_key = tile * KEY_TILE;
    if (branch == CMP && part < first_part(tile, s)) return;
    DynamicShared shared;
    TokenBuffers<branch, D, KEYS, by> buffers(shared);
    buffers.copy_keys(k, v, bg, first_key, s);
    uint32_t* used = nullptr;
    if (branch == SLC) {
        used = shared.take<uint32_t>(tile_words(s.queries));
        find_used_token_tiles<KEYS>(used, selection + size_t(bg) * s.queries * s.words, tile, s);
    }
    cp_async_wait<0>();
    if (by == WARPGROUP) async_fence();
    __syncthreads();
    WarpKeys<branch, D, KEYS, by> keys;
    keys.load(buffers.k_tile, buffers.v_tile, first_key);

    // there are fewer than 2^31 rows
    const int first_token = bg * s.queries;  // in `selection`
    const int dout_row = bg / s.G * s.queries * s.H + bg % s.G * s.heads;
    auto fetch = [&](int buffer, int token_tile, int head) {
        const int j0 = token_tile * KEY_TILE, to = buffer * KEY_TILE * D;
        const int q_row = first_token * s.heads + head * s.queries;
        copy_tile<D, THREADS, COLUMNS>(buffers.q_tiles + to, q + size_t(q_row + j0) * D, D, s.queries - j0);
        copy_tile<D, THREADS, COLUMNS>(buffers.dout_tiles + to, dout + size_t(dout_row + j0 * s.H + head) * D,
                                       size_t(s.H) * D, s.queries - j0);
        cp_async_commit();
        const int j = j0 + buffers.rows.own_row();
        buffers.rows.load(j < s.queries, q_row + j, lse_gated, row_dot);
        if (branch == SLC && j < s.queries && head == 0) {
            const int same_tile = int(block_index_again()) / s.batch_groups * (KEYS / KEY_TILE);
            buffers.rows.choose(selection + size_t(first_token + j) * s.words, same_tile, s);
        }
    };
    const TokenRange tokens = tokens_of_tile<branch, KEYS>(first_key, part, s);
    const int end_tile = (tokens.end + KEY_TILE - 1) / KEY_TILE;
    for_token_tiles<decltype(keys)>(
        next_tile<branch>(used, tokens.first / KEY_TILE, end_tile), end_tile, s.heads,
        [&](int token_tile) { return next_tile<branch>(used, token_tile + 1, end_tile); }, fetch,
        [&](int buffer) { buffers.rows.store(buffer, s); },
        [&](int buffer, int token_tile, auto prefetch) {
            // The first and last key of the warp, or warpgroup, say what it sees of the tile.
            const int low_key = keys.low_key(), high_key = low_key + keys.TOGETHER - 1;
            const int t0 = s.first + token_tile * KEY_TILE;
            if (first_query<branch>(low_key, s) >= t0 + KEY_TILE || (branch == WIN && t0 >= high_key + s.window))
                return prefetch();
            const bool masked =
                !query_sees<branch>(t0, high_key, s) || !query_sees<branch>(t0 + KEY_TILE - 1, low_key, s);
            keys.add_tokens(
                buffers, buffer, masked, [&](int row) { return t0 + row; }, prefetch, s);
        });
    const int index = int(block_index_again());
    const int same_bg = index % s.batch_groups;
    float* sums = nullptr;
    if constexpr (branch == CMP)
        if (s.parts > 1) {
            const int item = index / s.batch_groups;
            const int own_tile = item / s.parts * (KEYS / KEY_TILE) + keys.group_key() / KEY_TILE;
            sums = sums_of_part<D>(partial, same_bg, own_tile, item % s.parts, s);
        }
    keys.store(dk, dv, sums, same_bg, s);
}
// Budget of 16 keys and 64 rows:
//     mma 205 / 410, ldmatrix 192 / 640, exponentials 64 / 64, instructions 129 / 223, L2 174 (selected 87) / 347
template <Branch branch, int D, Multiplier by>
__global__ void __launch_bounds__(dkdv_threads<D, dkdv_keys<branch, D, by>(), by>(),
                                  dkdv_blocks<D, dkdv_keys<branch, D, by>(), by>())
    attention_dkdv_kernel(bf16* dk, bf16* dv, float* partial, const bf16* dout, const bf16* q, const bf16* k,
                          const bf16* v, const float* row_dot, const float* lse_gated, const uint32_t* selection,
                          AttentionShape s) {
    wait_for_earlier_kernels();
    if constexpr (by == WARP || COMPILED_FOR_WGMMA)
        compute_dkdv<branch, D, by>(dk, dv, partial, dout, q, k, v, row_dot, lse_gated, selection, s);
}
// dk, dv [B, G, key_stride, D] = the sums of the parts; one block per tile of keys and (sequence, group)
template <int D>
__global__ void __launch_bounds__(256) add_parts_kernel(bf16* dk, bf16* dv, const float* partial, AttentionShape s) {
    wait_for_earlier_kernels();
    const int tile = int(blockIdx.x) / s.batch_groups, bg = int(blockIdx.x) % s.batch_groups;
    const int first = first_part(tile, s);
    const size_t size = 2 * KEY_TILE * D;
    partial += ((size_t(bg) * key_tiles(s) + tile) * s.parts + first) * size;
    add_partial_sums<D>(dk, partial, size, s.parts - first, bg, tile, s);
    add_partial_sums<D>(dv, partial + KEY_TILE * D, size, s.parts - first, bg, tile, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Selection, paper eq. 8 to 12, by two kernels. Scoring computes the weights of the compressed branch again from its
// lse, sums them over the group's heads in registers and folds them into importances, which it leaves in memory;
// choosing reads these. Both have a block per 16 tokens. What a block of the scoring keeps does not grow with the
// sequence.

constexpr int SCORE_TOKENS = 16;          // of a tile of the selection
constexpr int SCORE_PIECES = 2;           // pieces of 16 compressed blocks that a warp multiplies at once
constexpr int SCORE_KEYS = 2 * KEY_TILE;  // compressed blocks of a tile
constexpr int SCORE_THREADS = SCORE_KEYS / SCORE_PIECES / 16 * 32;
// Odd, so that the same place of several tokens is in different banks.
constexpr int WEIGHT_STRIDE = SCORE_KEYS + 1;
// Selection blocks up to the last token's: floats of importances that a token has.
HOST_DEVICE inline int importance_stride(const AttentionShape& s) {
    return (s.first + s.queries - 1) / s.slc_block + 1;
}
// How many compressed blocks share tokens with a selection block
HOST_DEVICE inline int overlaps(const AttentionShape& s) { return s.slc_block / s.d + (s.l + s.d - 1) / s.d - 1; }

// The shared memory of a block of the scoring.
template <int D>
struct ScoreBuffers {
    bf16 *k_tile, *q_tile;  // [SCORE_KEYS, D], [heads * SCORE_TOKENS, D]
    float* minus_shifts;    // [heads * SCORE_TOKENS]: -lse in base 2
    float* weights;         // [SCORE_TOKENS, WEIGHT_STRIDE]: of the tile's compressed blocks, summed over heads
    float* overlap;         // [overlaps]: how much a compressed block counts for a selection block
    __device__ explicit ScoreBuffers(const AttentionShape& s) {
        DynamicShared shared;
        k_tile = shared.take<bf16>(SCORE_KEYS * D);
        q_tile = shared.take<bf16>(s.heads * SCORE_TOKENS * D);
        minus_shifts = shared.take<float>(s.heads * SCORE_TOKENS);
        weights = shared.take<float>(SCORE_TOKENS * WEIGHT_STRIDE);
        overlap = shared.take<float>(overlaps(s));
    }
    static size_t bytes(const AttentionShape& s) {
        const size_t rows = size_t(s.heads) * SCORE_TOKENS;
        const size_t bytes =
            shared_bytes({SCORE_KEYS * D * sizeof(bf16), rows * D * sizeof(bf16), rows * sizeof(float),
                          SCORE_TOKENS * WEIGHT_STRIDE * sizeof(float), size_t(overlaps(s)) * sizeof(float)});
        return check_shared_bytes(bytes, D);
    }
};
// Eq. 9, as Cpu::fold_importance: a compressed block counts for a selection block by the tokens they share, over d.
// Relative to where the selection block begins these are always compressed blocks first_overlap .. first_overlap +
// overlaps - 1.
__device__ inline int first_overlap(const AttentionShape& s) { return 1 - (s.l + s.d - 1) / s.d; }
// Selection blocks from this one on, or from last_block + 1 on, share no token with compressed blocks 0 .. end-1.
__device__ inline int end_of_shared_blocks(int end, int last_block, const AttentionShape& s) {
    return end ? min(((end - 1) * s.d + s.l - 1) / s.slc_block, last_block) + 1 : 0;
}
// The last selection block of the tile's tokens
__device__ inline int last_block_of(const QueryTile& tile, const AttentionShape& s) {
    return (s.first + tile.j0 + tile.tokens - 1) / s.slc_block;
}

// sums = the attention weights of this warp's compressed blocks, summed over the group's heads. Compressed blocks are
// the rows of the product, tokens its columns: of every 16 blocks this lane has lane / 4 and lane / 4 + 8, and tokens
// column, column + 1, + 8 and + 9, whose end_of_keys, counted from the lane's first block, are `ends`.
template <int D>
__device__ inline void sum_over_heads(float (&sums)[SCORE_PIECES][SCORE_TOKENS / 8][4],
                                      const unsigned (&k_rows)[SCORE_PIECES][D / 16][4], const ScoreBuffers<D>& buffers,
                                      const int (&ends)[SCORE_TOKENS / 8][2], bool masked, const AttentionShape& s) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int head = 0; head < s.heads; head++) {
        float p[SCORE_PIECES][SCORE_TOKENS / 8][4] = {};
        multiply_rows<D, SCORE_PIECES, SCORE_TOKENS / 16>(p, k_rows, buffers.q_tile, head * SCORE_TOKENS);
        if (masked) {
#pragma unroll
            for (int m = 0; m < SCORE_PIECES; m++)
#pragma unroll
                for (int n = 0; n < SCORE_TOKENS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (ends[n][e % 2] <= m * 16 + e / 2 * 8) p[m][n][e] = -INFINITY;
        }
#pragma unroll
        for (int n = 0; n < SCORE_TOKENS / 8; n++) {
            const float2 minus_lse =
                *reinterpret_cast<const float2*>(buffers.minus_shifts + head * SCORE_TOKENS + n * 8 + column);
#pragma unroll
            for (int m = 0; m < SCORE_PIECES; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sums[m][n][e] += exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, e % 2 ? minus_lse.y : minus_lse.x));
        }
    }
}
// importances [tokens, importance_stride] += the weights of the compressed blocks from `begin` on that are in the
// buffers; a selection block that shares no token with those before `begin` has no sum yet. Added in the order of the
// compressed blocks.
template <int D>
__device__ inline void fold_importances(float* importances, const ScoreBuffers<D>& buffers, int begin,
                                        const QueryTile& tile, const AttentionShape& s) {
    const int end = min(begin + SCORE_KEYS, s.keys), end_block = end_of_shared_blocks(end, last_block_of(tile, s), s);
    for (int token = threadIdx.x / 32; token < tile.tokens; token += SCORE_THREADS / 32)
        for (int block = begin * s.d / s.slc_block + threadIdx.x % 32; block < end_block; block += 32) {
            const int first = block * (s.slc_block / s.d) + first_overlap(s) - begin;
            const float* weight = buffers.weights + token * WEIGHT_STRIDE + first;
            float* importance = importances + size_t(token) * importance_stride(s) + block;
            float sum = begin > 0 && first < 0 ? *importance : 0;
            for (int i = max(0, -first); i < min(overlaps(s), end - begin - first); i++)
                sum += weight[i] * buffers.overlap[i];
            *importance = sum;
        }
}
// Where a launch on the selection's tiles from first_block on keeps the importances of a block's tokens.
__device__ inline float* importances_of_block(float* importances, const AttentionShape& s) {
    return importances + size_t(blockIdx.x) * SCORE_TOKENS * importance_stride(s);
}
// importances of the tiles' tokens, unless these take all blocks. Budget
//     of 16 tokens and 32 compressed blocks of one head: mma 26 / 52, ldmatrix 16 / 32, exponentials 32 / 32
template <int D>
__global__ void __launch_bounds__(SCORE_THREADS)
    score_blocks_kernel(float* importances, const bf16* q, const bf16* kc, const float* lse, int first_block,
                        AttentionShape s) {
    wait_for_earlier_kernels();
    const QueryTile tile = query_tile(s, first_block + int(blockIdx.x));
    const int last_block = last_block_of(tile, s);
    if (last_block + 1 <= s.slc_count) return;
    const ScoreBuffers<D> buffers(s);
    importances = importances_of_block(importances, s);
    const int lane = threadIdx.x % 32;
    const int warp_key = int(threadIdx.x) / 32 * SCORE_PIECES * 16;  // this warp's first compressed block of a tile
    auto copy_keys = [&](int begin) {
        const bf16* from = kc + size_t(tile.bg * s.key_stride + begin) * D;
#pragma unroll
        for (int i = 0; i < SCORE_KEYS; i += KEY_TILE)
            copy_tile<D, SCORE_THREADS>(buffers.k_tile + i * D, from + i * D, D, s.keys - begin - i);
        cp_async_commit();
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < s.heads * SCORE_TOKENS * (D / 8); i += SCORE_THREADS) {  // head by head
        const int row = i / (D / 8), chunk = i % (D / 8), head = row / SCORE_TOKENS, token = row % SCORE_TOKENS;
        const bool there = token < tile.tokens;
        const int from = there ? int(row_of_query(tile, head, token, s)) : 0;
        cp_async_16(buffers.q_tile + chunk_at<D>(row, chunk), q + size_t(from) * D + chunk * 8, there);
        if (chunk == 0) buffers.minus_shifts[row] = there ? -lse[from] * LOG2_E : -INFINITY;
    }
    copy_keys(0);
    for (int i = threadIdx.x; i < overlaps(s); i += SCORE_THREADS) {
        const int begin = (first_overlap(s) + i) * s.d;
        buffers.overlap[i] = float(min(s.slc_block, begin + s.l) - max(0, begin)) / s.d;
    }
    const int column = lane % 4 * 2;
    const int t0 = s.first + tile.j0;
    const int first_end = end_of_keys<CMP>(t0, s), last_end = end_of_keys<CMP>(t0 + tile.tokens - 1, s);

    for (int begin = 0; begin < last_end; begin += SCORE_KEYS) {
        cp_async_wait<0>();
        __syncthreads();  // this tile has arrived, the last one is folded
        unsigned k_rows[SCORE_PIECES][D / 16][4];
        load_rows<D>(k_rows, buffers.k_tile, warp_key);
        __syncthreads();  // every warp has its rows, so the next tile may come
        if (begin + SCORE_KEYS < last_end) copy_keys(begin + SCORE_KEYS);
        const int first_key = begin + warp_key;
        int ends[SCORE_TOKENS / 8][2];
        for (int n = 0; n < SCORE_TOKENS / 8; n++)
            for (int odd = 0; odd < 2; odd++)
                ends[n][odd] = end_of_keys<CMP>(t0 + n * 8 + column + odd, s) - first_key - lane / 4;
        float sums[SCORE_PIECES][SCORE_TOKENS / 8][4] = {};
        const bool masked = first_end < first_key + SCORE_PIECES * 16;
        if (first_key < last_end) sum_over_heads(sums, k_rows, buffers, ends, masked, s);
#pragma unroll
        for (int m = 0; m < SCORE_PIECES; m++)
#pragma unroll
            for (int n = 0; n < SCORE_TOKENS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    buffers
                        .weights[(n * 8 + column + e % 2) * WEIGHT_STRIDE + warp_key + m * 16 + e / 2 * 8 + lane / 4] =
                        sums[m][n][e];
        __syncthreads();
        fold_importances(importances, buffers, begin, tile, s);
    }
    cp_async_wait<0>();
    // Blocks so late that no compressed block of theirs is complete have no importance.
    const int end = min((last_end + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS, s.keys);
    for (int token = threadIdx.x / 32; token < tile.tokens; token += SCORE_THREADS / 32)
        for (int block = end_of_shared_blocks(end, last_block, s) + lane; block <= last_block; block += 32)
            importances[size_t(token) * importance_stride(s) + block] = 0;
}
// selection [B, G, queries, words]; chosen_importance [B, G, queries], where given. A warp for each token of a tile.
__global__ void __launch_bounds__(SCORE_TOKENS * 32)
    choose_blocks_kernel(uint32_t* selection, float* chosen_importance, float* importances, int first_block,
                         AttentionShape s) {
    wait_for_earlier_kernels();
    const int lane = threadIdx.x % 32, token = threadIdx.x / 32;
    const QueryTile tile = query_tile(s, first_block + int(blockIdx.x));
    if (token >= tile.tokens) return;  // a whole warp
    const int last = (s.first + tile.j0 + token) / s.slc_block;
    const size_t row = size_t(tile.bg) * s.queries + tile.j0 + token;
    const bool takes_all = last + 1 <= s.slc_count;
    float* importance = importances_of_block(importances, s) + size_t(token) * importance_stride(s);
    const float share = takes_all ? 1 : choose_best(importance, last, s.slc_count);
    __syncwarp();  // a lane reads what others have taken
    for (int word = 0; word < s.words; word++) {
        const int block = word * 32 + lane;
        const unsigned bits = __ballot_sync(~0u, block <= last && (takes_all || importance[block] < 0));
        if (lane == 0) selection[row * s.words + word] = bits;
    }
    if (chosen_importance && lane == 0) chosen_importance[row] = share;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches: struct Cpu's functions, with device pointers and a stream.

// What forward_on_tensor_cores and backward_on_tensor_cores need besides their arrays: scratch memory on the GPU, as
// many bytes as attention_forward_bytes() or attention_backward_bytes() says, and a place for AUTO's choice.
struct AttentionWorkspace {
    void* data = nullptr;
    SelectedChoice* choice = nullptr;
};
template <int D>
inline float* cmp_partial_sums(WorkspacePieces& pieces, const NsaShape& s) {
    const AttentionShape a = attention_shape(CMP, s, 0);
    const size_t tiles = size_t(a.batch_groups) * size_t(key_tiles(a));
    return pieces.take<float>(a.parts == 1 ? 0 : tiles * size_t(a.parts) * 2 * KEY_TILE * D);
}
// Bytes of scratch memory that the forward pass of a branch needs, and the backward pass of all of them.
inline size_t attention_forward_bytes(Branch branch, const NsaShape& s, AttentionPath asked) {
    WorkspacePieces pieces{nullptr};
    with_head_dimension(s.D, [&](auto D) {
        if (branch == SLC && s.query_rows() && resolve_selected<D()>(asked, s, false) == SelectedKernel::AUTO)
            selection_counts<D()>(pieces, s);
    });
    return pieces.used;
}
inline size_t attention_backward_bytes(const NsaShape& s, AttentionPath asked) {
    WorkspacePieces of_queries{nullptr}, of_selected{nullptr}, of_compressed{nullptr};  // one after the other
    with_head_dimension(s.D, [&](auto dimension) {
        constexpr int D = decltype(dimension)::value;
        if (s.window_only || s.query_rows() == 0) return;
        const SelectedKernel dq = resolve_dq<D>(asked, s);
        if (dq == SelectedKernel::AUTO) selection_counts<D>(of_queries, s);
        if (dq != SelectedKernel::TILES) gathered_dq<D>(of_queries, s);
        if (resolve_selected<D>(asked, s) != SelectedKernel::TILES) gather_plan<D>(of_selected, s);
        cmp_partial_sums<D>(of_compressed, s);
    });
    return std::max({of_queries.used, of_selected.used, of_compressed.used});
}
template <unsigned SET, int D>
inline void launch_forward_kernel(const LayerOutputs<bf16, float>& out, const LayerInputs<bf16, float>& in,
                                  const NsaShape& s, const ForwardOptions& options, bool warpgroups,
                                  cudaStream_t stream) {
    with_multiplier<D>(warpgroups, [&](auto by) {
        using Rows = QueryRows<D, false, by()>;
        const AttentionShape a =
            attention_shape(SET == COMPRESSED ? CMP : WIN, s, 0, query_rows_of_device(D, false, by()));
        launch<attention_forward_kernel<SET, D, by()>>(unsigned(a.tiles * a.batch_groups), Rows::threads(a),
                                                       Rows::bytes(a), stream, out, in, options, a);
    });
}
// The branches of options.branches and, where out.attn is given, the gated sum. The compressed branch has a launch of
// its own, since the keys that it makes the others choose come in between.
template <int D>
inline void launch_forward_kernels(const LayerOutputs<bf16, float>& out, const LayerInputs<bf16, float>& in,
                                   const NsaShape& s, ForwardOptions options, AttentionPath asked,
                                   AttentionWorkspace workspace, cudaStream_t stream) {
    if (options.branches == COMPRESSED)
        return launch_forward_kernel<COMPRESSED, D>(out, in, s, options, asked.warpgroups, stream);
    if (options.branches >> SLC & 1) {
        const SelectedKernel kernel = resolve_selected<D>(asked, s, false);
        const size_t rows_before = size_t(SLC - options.first_branch) * s.query_rows();
        WorkspacePieces pieces{static_cast<char*>(workspace.data)};
        options.choice =
            choose_selected<D>(kernel, asked.warpgroups, pieces, workspace.choice, in.selection, s, stream);
        if (kernel != SelectedKernel::TILES)
            launch_gather_forward<D>(out.o + rows_before * D, out.lse + rows_before, in.q, in.k[SLC], in.v[SLC],
                                     in.selection, s, options.choice, stream);
        if (kernel == SelectedKernel::GATHER) options.branches &= ~(1u << SLC);
    }
    if (options.branches || out.attn) launch_forward_kernel<OTHERS, D>(out, in, s, options, asked.warpgroups, stream);
}
template <Branch branch, int D>
inline void launch_dkdv(const LayerGradients<bf16, float>& to, const LayerInputs<bf16, float>& from, const NsaShape& s,
                        bool warpgroups, WorkspacePieces pieces, cudaStream_t stream) {
    const BackwardArrays<bf16, float> d = to.of(branch, false, from.dout, s);
    const InputArrays<bf16> in = from.of(branch);
    const AttentionShape a = attention_shape(branch, s, 0);
    if (a.keys == 0) return;  // dk and dv have no element
    float* partial = nullptr;
    if constexpr (branch == CMP) partial = cmp_partial_sums<D>(pieces, s);
    const size_t used_bytes = shared_bytes({branch == SLC ? tile_words(a.queries) * sizeof(uint32_t) : 0});
    with_multiplier<D>(warpgroups, [&](auto by) {
        constexpr int KEYS = dkdv_keys<branch, D, by()>();
        const unsigned blocks = unsigned((a.keys + KEYS - 1) / KEYS * a.batch_groups * a.parts);
        const size_t bytes = TokenBuffers<branch, D, KEYS, by()>::bytes() + used_bytes;
        launch<attention_dkdv_kernel<branch, D, by()>>(blocks, dkdv_threads<D, KEYS, by()>(), bytes, stream, d.dk, d.dv,
                                                       partial, d.dout, in.q, in.k, in.v, d.row_dot, d.lse_gated,
                                                       in.selection, a);
    });
    if constexpr (branch == CMP)
        if (a.parts > 1)
            launch<add_parts_kernel<D>>(unsigned(key_tiles(a) * a.batch_groups), 256, 0, stream, d.dk, d.dv, partial,
                                        a);
}
// One kernel makes dQ of all branches, row terms included, which dK and dV then read. Gathered rows, where they may be
// chosen, have made the selected branch's share before. scratch: from its beginning for each of these.
template <int D>
inline void launch_attention_backward(const LayerGradients<bf16, float>& d, const LayerInputs<bf16, float>& in,
                                      const kernels::Rope& rope, const NsaShape& s, unsigned branches,
                                      AttentionPath asked, AttentionWorkspace workspace, cudaStream_t stream) {
    const WorkspacePieces scratch{static_cast<char*>(workspace.data)};
    const bool selects = branches >> SLC & 1;
    const SelectedKernel dq = selects ? resolve_dq<D>(asked, s) : SelectedKernel::TILES;
    DqOptions options = {rope, s.projected(), nullptr, nullptr, branches, s.window_only ? WIN : CMP};
    if (dq != SelectedKernel::TILES) {
        WorkspacePieces pieces = scratch;
        options.choice = choose_selected<D>(dq, asked.warpgroups, pieces, workspace.choice, in.selection, s, stream);
        float* const gathered = gathered_dq<D>(pieces, s);
        launch_gather_dq<D>(gathered, d, in, s, options.choice, stream);
        options.gathered = gathered;
    }
    with_multiplier<D>(asked.warpgroups, [&](auto by) {
        using Rows = QueryRows<D, true, by()>;
        const int rows = query_rows_of_device(D, true, by());
        const AttentionShape a = attention_shape(WIN, s, 0, rows);  // SLC's too
        const AttentionShape cmp = attention_shape(CMP, s, 0, rows);
        launch<attention_dq_kernel<D, by()>>(unsigned(a.tiles * a.batch_groups), Rows::threads(a), Rows::bytes(a),
                                             stream, d, in, options, a, cmp);
    });
    if (branches >> WIN & 1) launch_dkdv<WIN, D>(d, in, s, asked.warpgroups, scratch, stream);
    if (branches >> CMP & 1) launch_dkdv<CMP, D>(d, in, s, asked.warpgroups, scratch, stream);
    if (!selects) return;
    if (resolve_selected<D>(asked, s) == SelectedKernel::TILES)
        launch_dkdv<SLC, D>(d, in, s, asked.warpgroups, scratch, stream);
    else launch_gather_dkdv<D>(d.of(SLC, false, in.dout, s), in.of(SLC), s, asked.warpgroups, scratch, stream);
}

// Floats of scratch memory for select_blocks: all importances, or those of as many of its blocks as 64 MiB hold.
inline size_t select_blocks_room(const NsaShape& s) {
    const AttentionShape a = attention_shape(CMP, s, SCORE_TOKENS);
    const size_t of_block = SCORE_TOKENS * size_t(importance_stride(a)), most = (size_t(64) << 20) / sizeof(float);
    return of_block * std::max<size_t>(1, std::min(most / of_block, size_t(a.tiles) * size_t(a.batch_groups)));
}
// Refuses shapes that the kernels do not have, before anything is allocated for them.
inline void check_shape(const NsaShape& s, AttentionPath asked = SelectedKernel::AUTO) {
    with_head_dimension(s.D, [&](auto D) {
        check_attention_shape(s.window_only ? 1u << WIN : EVERY_BRANCH, s);
        if (s.window_only) return;
        resolve_selected<D()>(asked, s);
        ScoreBuffers<D()>::bytes(attention_shape(CMP, s, SCORE_TOKENS));
    });
}
// out.o and out.lse of these branches, bits, of the shape; then out.attn of all branches, where it is given. A query
// without a key: 0, and +infinity for lse, the natural logarithm of the softmax's denominator.
// check_attention_shape() says which shapes there are, `path` which kernels; where the selected branch's is AUTO, the
// workspace needs a place for the choice.
inline void forward_on_tensor_cores(const LayerOutputs<bf16, float>& out, const LayerInputs<bf16, float>& in,
                                    const NsaShape& s, ForwardOptions options, AttentionPath path,
                                    AttentionWorkspace workspace, cudaStream_t stream) {
    check_attention_shape(options.branches, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D,
                        [&](auto D) { launch_forward_kernels<D()>(out, in, s, options, path, workspace, stream); });
}
// Of one branch: out [B, H, queries, D], lse [B, H, queries]; q [B, H, queries, D], keys and values [B, G, T, D]
// (compressed: [B, G, NC, D]), selection [B, G, queries, words].
inline void forward_on_tensor_cores(Branch branch, bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v,
                                    const uint32_t* selection, const NsaShape& s, AttentionPath path,
                                    AttentionWorkspace workspace, cudaStream_t stream) {
    LayerInputs<bf16, float> in = {};
    in.q = q, in.k[branch] = k, in.v[branch] = v, in.selection = selection;
    forward_on_tensor_cores({nullptr, out, lse}, in, s, {1u << branch, branch, nullptr}, path, workspace, stream);
}
// Shapes and formulas as in Cpu::branches_backward, of these branches, bits. A query has chosen at most max(slc_count,
// 3) blocks.
inline void backward_on_tensor_cores(const LayerGradients<bf16, float>& d, const LayerInputs<bf16, float>& in,
                                     const kernels::Rope& rope, const NsaShape& s, unsigned branches,
                                     AttentionPath path, AttentionWorkspace workspace, cudaStream_t stream) {
    check_attention_shape(branches, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(
        s.D, [&](auto D) { launch_attention_backward<D()>(d, in, rope, s, branches, path, workspace, stream); });
}
// selection [B, G, queries, words] = the blocks that each query and group attends to, by q [B, H, queries, D], kc [B,
// G, NC, D] and the compressed branch's lse [B, H, queries]; chosen_importance [B, G, queries], where given: their
// share of all importance. The rule is Cpu's. The importances of as many tiles as `room` has place for, of one at
// least, are under way at once; select_blocks_room() says how many floats make few launches.
inline void select_blocks(uint32_t* selection, float* chosen_importance, const bf16* q, const bf16* kc,
                          const float* lse, const NsaShape& s, float* importances, size_t room, cudaStream_t stream) {
    check_attention_shape(COMPRESSED, s);
    if (s.query_rows() == 0) return;
    with_head_dimension(s.D, [&](auto D) {
        const AttentionShape a = attention_shape(CMP, s, SCORE_TOKENS);
        const size_t bytes = ScoreBuffers<D()>::bytes(a);
        const int blocks = a.tiles * a.batch_groups,
                  at_once = int(room / (SCORE_TOKENS * size_t(importance_stride(a))));
        for (int first = 0; first < blocks; first += at_once) {
            const unsigned count = unsigned(std::min(at_once, blocks - first));
            launch<score_blocks_kernel<D()>>(count, SCORE_THREADS, bytes, stream, importances, q, kc, lse, first, a);
            launch<choose_blocks_kernel>(count, SCORE_TOKENS * 32, 0, stream, selection, chosen_importance, importances,
                                         first, a);
        }
    });
}

#endif  // PRECISION_FP32

// =====================================================================================================================
// The engine.
// =====================================================================================================================

// Each operation computes what that of Cpu in nsa_cpu.h does, from the same arrays; what is said here is how.
struct Cuda : CudaOptimiser {
    static constexpr bool has_master = true;
    static constexpr bool on_host = false;
    static constexpr unsigned steps_ahead = 1;
    static constexpr int WIDE = kernels::WIDE;

    // Which rows of ATTENTION_KERNELS compute attention; choose_attention() sets all three.
    bool plain_attention, warpgroups;
    SelectedKernel selected_kernel;

    static EngineInfo info() { return cuda_info(FP32); }
    static GpuSearch search() { return search_for_cuda(FP32); }
    static Versions versions() { return cuda_versions(); }

    explicit Cuda(int device_index = 0, size_t workspace = WORKSPACE) : CudaOptimiser(device_index, workspace) {
        selected_choice = allocate<SelectedChoice>(1);
        zero(selected_choice, 1);
        choose_attention("auto");
    }
    ~Cuda() {
        cudaStreamSynchronize(stream);
        release(selected_choice);
        release(rope_table);
    }

    std::string describe() const {
        return format_text(
            "GPU %d, %s, compute capability %d.%d, code for %s, %d multiprocessors, %.1f GiB, %s, attention by %s",
            device, properties.name, properties.major, properties.minor, code, properties.multiProcessorCount,
            double(properties.totalGlobalMem) / (1 << 30), FP32 ? "fp32" : "bf16",
            asked_kernel ? asked_kernel->name : automatic_attention_kernels(FP32, gpu_code()));
    }
    GpuCode gpu_code() const { return {capability(), exact}; }
    // --attention-kernel, for all calls from here on: a name that info() lists, or auto.
    void choose_attention(const std::string& name) {
        asked_kernel = attention_kernel_named(name);
        plain_attention = asked_kernel ? asked_kernel == &ATTENTION_KERNELS[PLAIN_KERNEL]
                                       : !has_attention_kernel(ATTENTION_KERNELS[TENSOR_CORES_KERNEL], FP32);
        selected_kernel = asked_kernel ? asked_kernel->selected : SelectedKernel::AUTO;
        warpgroups = asked_kernel != &ATTENTION_KERNELS[TENSOR_CORES_KERNEL] &&
                     has_attention_kernel(ATTENTION_KERNELS[WARPGROUPS_KERNEL], FP32, gpu_code());
    }
    std::string format() const { return FP32 ? "fp32" : "bf16"; }
    // FLOP/s of the tensor cores at best; 0: unknown, or not used.
    double peak_flops() const { return FP32 ? 0 : bf16_peak_flops(properties.name); }

    // ----- embedding
    void embedding_forward(real* x, const int32_t* tokens, const real* embed, int N, int C) {
        with_width(is_wide(C, x, embed), [&](auto W) {
            launch<kernels::embedding_forward_kernel<W()>>(blocks_for(size_t(N) * C, 256 * W()), 256, 0, stream, x,
                                                           tokens, embed, N, C);
        });
    }
    void embedding_backward(Grad* dembed, const real* dx, const int32_t* tokens, int N, int C) {
        int32_t* sorted = scratch<int32_t>(0, size_t(N));
        launch<kernels::sort_positions_kernel>(blocks_for(size_t(N), kernels::SORT_THREADS), kernels::SORT_THREADS, 0,
                                               stream, sorted, tokens, N);
        with_width(is_wide(C, dembed, dx), [&](auto W) {
            launch<kernels::embedding_backward_kernel<W()>>(dim3(unsigned(N), blocks_for(size_t(C), 128 * W())), 128, 0,
                                                            stream, dembed, dx, tokens, sorted, N, C);
        });
    }

    // ----- smear
    void smear_forward(real* x, const int32_t* tokens, const real* embed, const SmearOf<real>& w, const NsaShape& s,
                       int C) {
        const kernels::SmearInput in{tokens, embed, w.gate, w.scale, s.first, s.queries, C};
        const int N = s.B * s.queries;
        with_width(is_wide(C, x, embed, w.gate, w.scale), [&](auto W) {
            launch<kernels::smear_forward_kernel<W()>>(blocks_for(size_t(N), kernels::NORM_ROWS),
                                                       kernels::NORM_ROWS * 32, 0, stream, x, in, N);
        });
    }
    void smear_backward(real* de, const SmearOf<Grad>& dw, const real* dx, const int32_t* tokens, const real* embed,
                        const SmearOf<real>& w, const NsaShape& s, int C) {
        const kernels::SmearInput in{tokens, embed, w.gate, w.scale, 0, s.T, C};
        const int N = s.B * s.T;
        float *const g = scratch<float>(0, 2 * size_t(N)), *const dz = g + N;
        with_width(is_wide(C, de, dx, embed, w.gate, w.scale), [&](auto W) {
            launch<kernels::smear_rows_kernel<W()>>(blocks_for(size_t(N), kernels::NORM_ROWS), kernels::NORM_ROWS * 32,
                                                    0, stream, g, dz, dx, in, N);
            launch<kernels::smear_backward_kernel<W()>>(blocks_for(size_t(N) * C, 256 * W()), 256, 0, stream, de, dx, g,
                                                        dz, in, N);
            add_column_sums<W()>(dw.gate, kernels::SmearGateGradient{dz, in}, N, C);
            add_column_sums<W()>(dw.scale, kernels::SmearScaleGradient{g, dx, in}, N, C);
        });
    }

    // ----- RMSNorm
    void rmsnorm_forward(real* out, Stat* rstd, const real* x, const real* weight, int N, int C) {
        with_width(is_wide(C, out, x, weight), [&](auto W) {
            launch<kernels::rmsnorm_forward_kernel<W()>>(blocks_for(size_t(N), kernels::NORM_ROWS),
                                                         kernels::NORM_ROWS * 32, 0, stream, out, rstd, x, weight, N,
                                                         C);
        });
    }
    void rmsnorm_backward(real* dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd,
                          const real* weight, int N, int C) {
        // As many warps as have room for their sums in the 48 KiB that every GPU grants, and at least one.
        const int warps = std::max(1, std::min(kernels::NORM_ROWS, 12 * 1024 / C));
        const int rows = std::max(warps, (N + 511) / 512), blocks = (N + rows - 1) / rows;
        const size_t bytes = shared_bytes({size_t(warps) * C * sizeof(float)});
        if (bytes > max_shared_of_device())
            fail_usage("--dim %d: RMSNorm's gradient takes %d bytes of shared memory, this GPU has %d; choose less", C,
                       bytes, max_shared_of_device());
        float* partial = scratch<float>(SCRATCH_PIECES - 1, size_t(blocks) * C);
        with_width(is_wide(C, dx, dout, x, weight), [&](auto W) {
            launch<kernels::rmsnorm_backward_kernel<W()>>(unsigned(blocks), unsigned(warps * 32), bytes, stream, dx,
                                                          partial, dout, x, rstd, weight, N, C, rows);
        });
        launch<kernels::column_totals_kernel>(blocks_for(size_t(C), 32), 256, 0, stream, dweight, partial, blocks, C);
    }

    // ----- linear layers
    void matmul_forward(real* out, const real* inp, const real* weight, const real* residual, int N, int C, int OC) {
        gemm(NT, {N, OC, C}, inp, C, weight, C, residual, out, OC);
    }
    void matmul_backward_input(real* dinp, const real* dout, const real* weight, int N, int C, int OC) {
        gemm(NN, {N, C, OC}, dout, OC, weight, C, nullptr, dinp, C);
    }
    void matmul_backward_weight(Grad* dweight, const real* dout, const real* inp, int N, int C, int OC) {
        gemm(TN, {OC, C, N}, dout, OC, inp, C, dweight, dweight, C);
    }

    // ----- SiLU
    void silu_forward(real* out, const real* x, size_t count) {
        if (count == 0) return;
        with_width(is_wide(count, out, x), [&](auto W) {
            launch<kernels::silu_forward_kernel<W()>>(blocks_for(count, 256 * W()), 256, 0, stream, out, x, count);
        });
    }
    void silu_backward(real* dx, const real* dout, const real* x, size_t count) {
        if (count == 0) return;
        with_width(is_wide(count, dx, dout, x), [&](auto W) {
            launch<kernels::silu_backward_kernel<W()>>(blocks_for(count, 256 * W()), 256, 0, stream, dx, dout, x,
                                                       count);
        });
    }

    // ----- classifier
    void classifier(Stat* losses, real* logits, const int32_t* targets, double dloss, bool want_gradient, int N, int V,
                    int Vp) {
        // A multiprocessor has 1 KiB more than a block can have, and takes 1 KiB for each block.
        const size_t of_warps = sizeof(kernels::Softmax) * kernels::CLASSIFIER_THREADS / 32;
        const size_t bytes = shared_bytes({of_warps, size_t(Vp) * sizeof(real)}), room = max_shared_of_device() + 1024;
        const bool keeps_row = want_gradient && 2 * (bytes + 1024) <= room;
        with_width(is_wide(Vp, logits), [&](auto W) {
            if (keeps_row)
                launch<kernels::classifier_kernel<W(), true>>(unsigned(N), kernels::CLASSIFIER_THREADS, bytes, stream,
                                                              losses, logits, targets, float(dloss), want_gradient, V,
                                                              Vp);
            else
                launch<kernels::classifier_kernel<W(), false>>(unsigned(N), kernels::CLASSIFIER_THREADS, of_warps,
                                                               stream, losses, logits, targets, float(dloss),
                                                               want_gradient, V, Vp);
        });
    }

    // ----- heads.
    struct Heads {
        real* q;               // [B, H, queries, D], rotated
        real* kv[HEAD_SLOTS];  // [B, G, T, D]; k_slc and k_win rotated, k_cmp not (its compressed blocks are)
        Stat* gate;            // [3, B, H, queries], after the sigmoid
    };
    struct HeadGradients {
        Stat* q;               // [B, H, T, D]
        real* kv[HEAD_SLOTS];  // [B, G, T, D]
        Stat* gate;            // [3, B, H, T], of the logit
    };
    void split_heads_forward(Heads out, const real* projected, const real* gains, const NsaShape& s) {
        const kernels::Rope rope = prepare_rope(s);
        with_width(heads_are_wide(projected, out, s), [&](auto W) {
            launch<kernels::split_heads_forward_kernel<W()>>(unsigned(s.B) * unsigned(s.queries), 128, 0, stream,
                                                             pointers_of<kernels::HeadPointers>(out), projected, rope,
                                                             s, s.projected());
        });
        if (gains)
            launch<kernels::normed_heads_forward_kernel>(
                unsigned(s.B) * unsigned(s.queries), kernels::NORMED_WARPS * 32, 0, stream,
                pointers_of<kernels::HeadPointers>(out), projected, gains, rope, s, s.projected());
    }
    void split_heads_backward(real* dprojected, Grad* dgains, HeadGradients d, const real* gains, const NsaShape& s) {
        const kernels::Rope rope = prepare_rope(s);
        with_width(heads_are_wide(dprojected, d, s), [&](auto W) {
            launch<kernels::split_heads_backward_kernel<W()>>(unsigned(s.B) * unsigned(s.T), 128, 0, stream, dprojected,
                                                              pointers_of<kernels::HeadGradientPointers>(d), rope, s,
                                                              s.projected());
        });
        if (!gains) return;
        const int N = s.B * s.T, tokens = std::max(8, (N + 1023) / 1024), blocks = (N + tokens - 1) / tokens,
                  threads = kernels::NORMED_WARPS * 32, width = s.gain_rows() * s.D;
        float* partial = scratch<float>(SCRATCH_PIECES - 1, size_t(blocks) * width);
        launch<kernels::normed_heads_backward_kernel>(
            unsigned(blocks), threads, shared_bytes({kernels::NORMED_WARPS * width * sizeof(float)}), stream,
            dprojected, partial, pointers_of<kernels::HeadGradientPointers>(d), gains, rope, s, s.projected(), tokens);
        launch<kernels::column_totals_kernel>(blocks_for(size_t(width), 32), 256, 0, stream, dgains, partial, blocks,
                                              width);
    }

    // ----- compression, paper eq. 7
    using Phis = PhisOf<real>;
    using PhiGradients = PhisOf<Grad>;
    static constexpr int SETS = 2;  // of heads: keys and values
    void compress_forward(real* out, real* hidden, const real* k, const real* v, const Phis& phi, const NsaShape& s) {
        const ProfileRange range("compression");
        const int D = s.D, F = s.F, begin = s.cmp_blocks(s.first), count = s.cmp_blocks(s.first + s.queries) - begin,
                  NC = s.cmp_capacity(), groups = s.B * s.G, rows = groups * count;
        if (count <= 0) return;
        const kernels::Rope rope = prepare_rope(s);
        const size_t to_v = size_t(v - k);
        const int parts = s.l / s.d, chunks = count + parts - 1, width = s.d * D;
        const size_t columns = size_t(F) * parts, size = size_t(groups) * chunks * columns;
        float *of_chunks = scratch<float>(0, SETS * size), *out_sum = scratch<float>(1, size_t(SETS) * rows * D);
        real* activated = scratch<real>(2, size_t(SETS) * rows * F);
        // the products of fc1 with the chunks: one where the chunks of all sequences and groups follow each other
        const bool packed = chunks * s.d == s.T;
        for (int set = 0; set < (packed ? 1 : SETS); set++)
            gemm(NT, {packed ? groups * chunks : chunks, int(columns), width}, k + set * to_v + size_t(begin) * width,
                 width, phi.k.fc1 + set * phi.to_v_fc1(), width, nullptr, of_chunks + set * size, columns,
                 packed ? Batch{SETS, to_v, phi.to_v_fc1(), size}
                        : Batch{groups, size_t(s.T) * D, 0, size_t(chunks) * columns});
        launch<kernels::compress_activate_kernel>(blocks_for(size_t(SETS) * rows * F, 256), 256, 0, stream, hidden,
                                                  activated, of_chunks, phi.k.bias, phi.to_v_bias(), size_t(groups),
                                                  SETS * rows, count, begin, NC, F, parts);
        gemm(NT, {rows, D, F}, activated, F, phi.k.fc2, F, nullptr, out_sum, D,
             {SETS, size_t(rows) * F, phi.to_v_fc2(), size_t(rows) * D});
        launch<kernels::compress_output_kernel>(blocks_for(size_t(SETS) * rows * D / 2, 128), 128, 0, stream, out,
                                                out_sum, k, to_v, rope, SETS * rows, count, begin, NC, s);
    }
    void compress_backward(real* dk, real* dv, const PhiGradients& dphi, real* dout, const real* hidden, const real* k,
                           const real* v, const Phis& phi, const NsaShape& s) {
        const ProfileRange range("compression");
        const int D = s.D, F = s.F, NC = s.cmp_capacity(), groups = s.B * s.G, rows = groups * NC;
        const size_t tokens = s.key_rows() * D;  // of a set
        if (NC == 0) {
            zero(dk, tokens);
            return zero(dv, tokens);
        }
        const kernels::Rope rope = prepare_rope(s);
        const size_t to_v = size_t(v - k);
        const int parts = s.l / s.d, chunks = s.T / s.d, width = s.d * D, columns = F * parts,
                  chunk_rows = groups * chunks;
        const size_t size = size_t(rows) * F, of_chunks = size_t(chunk_rows) * columns;
        real *activated = scratch<real>(0, SETS * size), *dchunks = scratch<real>(1, SETS * of_chunks);
        float* sums = scratch<float>(2, SETS * std::max(size, tokens));  // dactivated, then the tokens' gradient
        launch<kernels::compress_rotate_back_kernel>(blocks_for(size_t(rows) * D / 2, 256), 256, 0, stream, dout, rope,
                                                     rows, NC, s.d, D);
        // dactivated = dout fc2
        gemm(NN, {rows, F, D}, dout, D, phi.k.fc2, F, nullptr, sums, F, {SETS, size_t(rows) * D, phi.to_v_fc2(), size});
        launch<kernels::compress_dchunks_kernel>(blocks_for(SETS * size_t(chunk_rows) * F, 256), 256, 0, stream,
                                                 dchunks, activated, sums, hidden, SETS * chunk_rows, chunks, NC, F,
                                                 parts);
        // dfc2 += dout^T activated
        gemm(TN, {D, F, rows}, dout, D, activated, F, dphi.k.fc2, dphi.k.fc2, F,
             {SETS, size_t(rows) * D, size, dphi.to_v_fc2()});
        for (int set = 0; set < SETS; set++)
            add_column_sums<1>(dphi.k.bias + set * dphi.to_v_bias(),
                               kernels::FirstPartOf{dchunks + set * of_chunks, parts}, chunk_rows, F);
        // dfc1 += dchunks^T chunks; the tokens' gradient = dchunks fc1. One product each where the chunks of all
        // sequences and groups follow each other; otherwise the last tokens of a sequence are in no chunk.
        const bool packed = s.T % s.d == 0;
        const size_t sequence = size_t(s.T) * D, of_sequence = size_t(chunks) * columns;
        if (!packed) zero(sums, SETS * tokens);
        for (int set = 0; set < (packed ? 1 : SETS); set++) {
            const real *from = dchunks + set * of_chunks, *heads = k + set * to_v;
            Grad* const dfc1 = dphi.k.fc1 + set * dphi.to_v_fc1();
            for (int bg = 0; bg < (packed ? 1 : groups); bg++)
                gemm(TN, {columns, width, packed ? chunk_rows : chunks}, from + bg * of_sequence, columns,
                     heads + bg * sequence, width, dfc1, dfc1, width,
                     {packed ? SETS : 1, of_chunks, to_v, dphi.to_v_fc1()});
            gemm(NN, {packed ? chunk_rows : chunks, width, columns}, from, columns, phi.k.fc1 + set * phi.to_v_fc1(),
                 width, nullptr, sums + set * tokens, width,
                 packed ? Batch{SETS, of_chunks, phi.to_v_fc1(), tokens} : Batch{groups, of_sequence, 0, sequence});
        }
        check_aligned(reinterpret_cast<size_t>(dk), sizeof(real));
        const size_t all_rows = SETS * s.key_rows();
        launch<kernels::compress_dk_kernel>(blocks_for(all_rows * kernels::ROW_LANES, 256), 256, 0, stream, dk,
                                            size_t(dv - dk), sums, dout, all_rows, NC, s);
    }

    // ----- attention, by the kernels on tensor cores or by the plain ones
    void attention_forward(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v,
                           const uint32_t* selection, const NsaShape& s) {
        const ProfileRange range(ATTENTION_NAMES[branch]);
#ifndef PRECISION_FP32
        if (!plain_attention)
            return forward_on_tensor_cores(branch, out, lse, q, k, v, selection, s, attention_path(),
                                           attention_workspace(attention_forward_bytes(branch, s, attention_path())),
                                           stream);
#endif
        plain::attention_forward(branch, out, lse, q, k, v, selection, s, stream);
    }
    // From dout to the gradients of a layer's q, keys, values and gates. The kernels on tensor cores need no dq in
    // memory but for the norm of q.
    bool wants_dq(const NsaShape& s) const { return plain_attention || s.qk_norm; }
    void branches_backward(const LayerGradients<real, Stat>& d, const LayerInputs<real, Stat>& in, const NsaShape& s) {
        if (plain_attention) return backward_by_branches(*this, d, in, s);
#ifndef PRECISION_FP32
        const ProfileRange range("attention backward");
        backward_on_tensor_cores(s.window_only ? 1u << WIN : EVERY_BRANCH, d, in, s);
#endif
    }
#ifndef PRECISION_FP32
    // Of these branches, bits.
    void backward_on_tensor_cores(unsigned branches, const LayerGradients<real, Stat>& d,
                                  const LayerInputs<real, Stat>& in, const NsaShape& s) {
        ::backward_on_tensor_cores(d, in, d.dq ? kernels::Rope() : prepare_rope(s), s, branches, attention_path(),
                                   attention_workspace(attention_backward_bytes(s, attention_path())), stream);
    }
#endif
    // Of a branch, by the plain kernels.
    void attention_backward(Branch branch, const BackwardArrays<real, Stat>& d, const InputArrays<real>& in,
                            const NsaShape& s) {
        const ProfileRange range(ATTENTION_NAMES[branch]);
        plain::attention_backward(branch, d, in, s, stream);
    }
    void select_blocks(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse,
                       const NsaShape& s) {
        const ProfileRange range("selection");
#ifndef PRECISION_FP32
        if (!plain_attention) {
            const size_t room = select_blocks_room(s);
            return ::select_blocks(selection, chosen_importance, q, kc, lse, s, scratch<float>(0, room), room, stream);
        }
#endif
        plain::select_blocks(selection, chosen_importance, q, kc, lse, s, stream);
    }
    void attend_and_select(real* out, Stat* lse, uint32_t* selection, Stat* chosen_importance, const real* q,
                           const real* kc, const real* vc, const NsaShape& s) {
        attention_forward(CMP, out, lse, q, kc, vc, nullptr, s);
        if (selection) select_blocks(selection, chosen_importance, q, kc, lse, s);
    }
    void attend_and_combine(const LayerOutputs<real, Stat>& out, const LayerInputs<real, Stat>& in, const NsaShape& s) {
        if (plain_attention) return combine_by_branches(*this, out, in, s);
#ifndef PRECISION_FP32
        const ProfileRange range("attention: selected and window");
        const ForwardOptions options = {s.window_only ? 1u << WIN : OTHERS, s.window_only ? WIN : CMP, nullptr};
        forward_on_tensor_cores(
            out, in, s, options, attention_path(),
            attention_workspace(attention_forward_bytes(s.window_only ? WIN : SLC, s, attention_path())), stream);
#endif
    }
    void combine_forward(real* out, const real* o, const Stat* gate, const NsaShape& s) {
        const size_t rows = s.query_rows();
        with_width(is_wide(s.D, out, o), [&](auto W) {
            launch<kernels::combine_forward_kernel<W()>>(blocks_for(rows * kernels::ROW_LANES, 256), 256, 0, stream,
                                                         out, o, gate, rows, s);
        });
    }
    void attention_backward_rows(Stat* row_dot, Stat* lse_gated, Stat* dgate_logit, const real* dout, const real* o,
                                 const Stat* gate, const Stat* lse, const NsaShape& s) {
        const size_t rows = s.query_rows();
        with_width(is_wide(s.D, dout, o), [&](auto W) {
            launch<kernels::attention_backward_rows_kernel<W()>>(blocks_for(rows * kernels::ROW_LANES, 256), 256, 0,
                                                                 stream, row_dot, lse_gated, dgate_logit, dout, o, gate,
                                                                 lse, rows, s);
        });
    }
    // Refuses shapes that the attention kernels do not have.
    void check_shape(const NsaShape& s) const {
        const GpuCode gpu = gpu_code();
        if (asked_kernel && !has_attention_kernel(*asked_kernel, FP32, gpu, s.D))
            fail_usage(
                "--attention-kernel %s is not for heads of dimension %d on a GPU of %d.%d that runs code for %s; "
                "choose %s",
                asked_kernel->name, s.D, properties.major, properties.minor, code,
                joined_words(attention_kernel_names(FP32, gpu, s.D), " or "));
        if (plain_attention) return plain::check_shape(s);
#ifndef PRECISION_FP32
        ::check_shape(s, attention_path());
#endif
    }
    // How the selected branch is computed for this shape, in words; AUTO: as the last forward or backward pass chose.
    // Waits for the GPU.
    std::string describe_selected(const NsaShape& s) {
        if (s.window_only) return "no selected branch";
        if (plain_attention) return format_text("selected branch by %s", ATTENTION_KERNELS[PLAIN_KERNEL].words);
        SelectedKernel kernel = selected_kernel, dkdv = kernel;
        const bool on_warpgroups = warpgroups && has_warpgroups(s.D);
#ifndef PRECISION_FP32
        with_head_dimension(s.D, [&](auto D) {
            kernel = resolve_dq<D()>(attention_path(), s);
            dkdv = resolve_selected<D()>(attention_path(), s);
        });
#endif
        if (kernel == SelectedKernel::AUTO) {
            SelectedChoice choice;
            copy(&choice, selected_choice, 1);
            if (choice.tile_tokens > 0) return ::describe(choice, s, on_warpgroups);
            return "selected branch by masked tiles or gathered rows, as the selection will show";
        }
        return format_text(
            "selected branch by %s, %s%s",
            ATTENTION_KERNELS[kernel != SelectedKernel::TILES ? GATHERED_ROWS_KERNEL
                              : on_warpgroups                 ? WARPGROUPS_KERNEL
                                                              : TENSOR_CORES_KERNEL]
                .words,
            selected_kernel == kernel
                ? "as asked"
                : "since gathering rows cannot pay in sequences so short, or has no room for so many heads",
            kernel == dkdv ? "" : "; dK and dV by gathered rows");
    }

  private:
    const AttentionKernel* asked_kernel = nullptr;  // null: auto
    SelectedChoice* selected_choice = nullptr;
    float* rope_table = nullptr;
    int rope_positions = 0, rope_dim = 0, rope_base = 0;

    AttentionPath attention_path() const { return {selected_kernel, warpgroups}; }
#ifndef PRECISION_FP32
    AttentionWorkspace attention_workspace(size_t bytes) {
        return {bytes ? scratch<char>(0, bytes) : nullptr, selected_choice};
    }
#endif

    template <class H>
    static bool heads_are_wide(const real* projected, const H& h, const NsaShape& s) {
        bool wide = is_wide(s.D / 2, projected, h.q) && is_wide(s.projected());
        for (int slot = s.first_slot(); slot < HEAD_SLOTS; slot++) wide = wide && is_wide(s.D / 2, h.kv[slot]);
        return wide;
    }
    template <class Pointers, class H>
    static Pointers pointers_of(const H& h) {
        return {h.q, h.kv[K_CMP], h.kv[V_CMP], h.kv[K_SLC], h.kv[V_SLC], h.kv[K_WIN], h.kv[V_WIN], h.gate};
    }

    // out [C] += the sums over the N rows of what Term gives
    template <int W, class Term>
    void add_column_sums(float* out, const Term& term, int N, int C) {
        const int part_rows = std::max(16, (N + 511) / 512), parts = (N + part_rows - 1) / part_rows;
        float* partial = scratch<float>(SCRATCH_PIECES - 1, size_t(parts) * C);
        launch<kernels::column_parts_kernel<W, Term>>(dim3(blocks_for(size_t(C), 128 * W), unsigned(parts)), 128, 0,
                                                      stream, partial, term, N, C, part_rows);
        launch<kernels::column_totals_kernel>(blocks_for(size_t(C), 32), 256, 0, stream, out, partial, parts, C);
    }

    // RoPE's table on the GPU: cosines [positions, D/2], then sines, of angles computed in fp64.
    kernels::Rope prepare_rope(const NsaShape& s) {
        const size_t half = size_t(s.D) / 2, angles = size_t(s.T) * half;
        if (s.T > rope_positions || s.D != rope_dim || s.rope_base != rope_base) {
            std::vector<float> table;
            table.reserve(2 * angles);
            for (const bool sine : {false, true})
                for (size_t i = 0; i < angles; i++) {
                    const double angle =
                        double(i / half) * std::pow(double(s.rope_base), -2.0 * double(i % half) / s.D);
                    table.push_back(float(sine ? std::sin(angle) : std::cos(angle)));
                }
            release(rope_table);
            rope_table = allocate<float>(table.size());
            copy(rope_table, table.data(), table.size());
            rope_positions = s.T;
            rope_dim = s.D;
            rope_base = s.rope_base;
        }
        return {rope_table, rope_table + rope_positions * half};
    }
};
static_assert(is_engine<Cuda>);
