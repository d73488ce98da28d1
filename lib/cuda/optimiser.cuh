// optimiser.cuh: the kernels of an optimiser step: the sums of losses and of squared gradients, then AdamW and Muon;
// then struct CudaOptimiser, which launches them.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../base/random.h"
#include "../model/engine.h"
#include "common.cuh"
#include "runtime.cuh"
#include "vectors.cuh"

struct AdamWConstants {
    float beta1, beta2, eps;
    float step_size, v_correction;  // with the bias corrections of this step
    double lr, decay;
    uint64_t seed, stream, counter;  // of random numbers for the rounding
    const double* squares;           // of the whole gradient, or null; see HyperAdamW
    double grad_clip;

    AdamWConstants(const HyperAdamW& h, double size)
        : beta1(float(h.beta1)),
          beta2(float(h.beta2)),
          eps(float(h.eps)),
          step_size(float(size)),
          v_correction(float(1 / std::sqrt(1 - std::pow(h.beta2, double(h.step))))),
          lr(h.lr),
          decay(h.decay),
          seed(h.seed),
          stream(random_stream(RANDOM_ROUNDING, uint64_t(h.step))),
          counter(h.offset),
          squares(h.squares),
          grad_clip(h.grad_clip) {}
};
// What clipping multiplies the gradient by; NaN: no update.
__device__ inline float clip_factor(const AdamWConstants& h) {
    const double norm = h.squares ? sqrt(*h.squares) : 0;
    if (!(norm < INFINITY)) return NAN;
    return h.grad_clip > 0 && norm > h.grad_clip ? float(h.grad_clip / norm) : 1.0f;
}
// The first span that ends after element i; span_count: none does.
__device__ inline int span_at(size_t i, const AdamWSpan* spans, int span_count) {
    int low = 0, high = span_count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (spans[middle].end > i) high = middle;
        else low = middle + 1;
    }
    return low;
}
// The span that element i is in, among those from `span` to `end`; null: none.
__device__ inline const AdamWSpan* span_of(size_t i, const AdamWSpan* span, const AdamWSpan* end) {
    while (span < end && span->end <= i) span++;
    return span < end && span->begin <= i ? span : nullptr;
}

namespace kernels {

constexpr int SUM_PARTS = 1024;

// partial[blockIdx.x] = sum of x over every SUM_PARTS-th piece, in fp64
template <int W>
__global__ void __launch_bounds__(SUM_THREADS) sum_parts_kernel(double* partial, const float* x, size_t count) {
    wait_for_earlier_kernels();
    SHARED(double, of_warps, [SUM_WARPS]);
    double sum = 0;
    for (size_t i = thread_index() * W; i < count; i += size_t(gridDim.x) * blockDim.x * W) {
        float a[W];
        load(a, x + i);
        for (int k = 0; k < W; k++) sum += a[k];
    }
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
// total += the parts, in a fixed order. One warp.
__global__ void sum_total_kernel(double* total, const double* partial, int parts) {
    wait_for_earlier_kernels();
    double sum = 0;
    for (int i = threadIdx.x; i < parts; i += 32) sum += partial[i];
    sum = lane_sum(sum);
    if (threadIdx.x == 0) *total += sum;
}

// squares[chunk] = sum of the squares of a chunk of x [total]; one block per chunk
__global__ void __launch_bounds__(SUM_THREADS)
    chunk_squares_kernel(double* squares, const float* x, size_t total, size_t first_chunk) {
    wait_for_earlier_kernels();
    SHARED(double, of_warps, [SUM_WARPS]);
    const size_t chunk = first_chunk + blockIdx.x;
    double sum = 0;
    for (size_t i = chunk * CHUNK + threadIdx.x; i < total && i < (chunk + 1) * CHUNK; i += SUM_THREADS)
        sum += double(x[i]) * double(x[i]);
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) squares[chunk] = sum;
}
// One block, so that the order is fixed; it is not the order of struct Cpu.
__global__ void __launch_bounds__(SUM_THREADS)
    total_squares_kernel(double* total, const double* squares, size_t chunks, const float* guard) {
    wait_for_earlier_kernels();
    SHARED(double, of_warps, [SUM_WARPS]);
    double sum = 0;
    for (size_t i = threadIdx.x; i < chunks; i += SUM_THREADS) sum += squares[i];
    sum = block_sum(sum, of_warps);
    if (threadIdx.x == 0) *total = sum + 0.0 * double(*guard);  // 0 * infinity and 0 * NaN are NaN
}
template <class T>
__global__ void set_guard_kernel(T* guard, const double* loss) {
    wait_for_earlier_kernels();
    if (threadIdx.x == 0) *guard = T(*loss);
}

#ifdef USE_NCCL
// Gradients that travel between ranks as bf16.
template <class To, class From>
__global__ void convert_kernel(To* y, const From* x, size_t count) {
    wait_for_earlier_kernels();
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = To(x[i]);
}
#endif

// The parameters that belong to their fp32 masters, the first of which is element `place` of all. In bf16 they are
// rounded up in magnitude with the probability that keeps the mean: 16 random bits are added to the 16 that are cut
// off.
template <int W>
__device__ inline void round_to(cuda_real* param, const float (&master)[W], [[maybe_unused]] uint64_t seed,
                                [[maybe_unused]] uint64_t stream, [[maybe_unused]] uint64_t place) {
#ifdef PRECISION_FP32
    store(param, master);
#else
    const Philox random = philox4x32(place / 8, stream, seed);
    float rounded[W];
    for (int k = 0; k < W; k++) {
        const uint32_t bits = __float_as_uint(master[k]), drawn = bits16(random, W == 8 ? k : int(place % 8));
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        rounded[k] = __uint_as_float((bits + (finite ? drawn : 0)) & 0xffff0000u);
    }
    store(param, rounded);
#endif
}
// One thread per W elements, which are in the same span or between two.
template <int W>
__global__ void adamw_kernel(cuda_real* param, float* master, float* m, float* v, const float* grad,
                             const AdamWSpan* spans, int span_count, AdamWConstants h) {
    wait_for_earlier_kernels();
    // The factors of the gradient and of the parameter are computed in fp64, which is slow on many GPUs (1/64 of the
    // rate of fp32), so only once per block; and so are the spans of its first element and of that behind its last.
    SHARED(float, factors, [2]);
    SHARED(int, block_spans, [2]);
    const size_t i = thread_index() * W;
    if (threadIdx.x < 2) factors[threadIdx.x] = threadIdx.x == 0 ? clip_factor(h) : float(1 - h.lr * h.decay);
    if (threadIdx.x < 2)
        block_spans[threadIdx.x] = span_at(size_t(blockIdx.x + threadIdx.x) * blockDim.x * W, spans, span_count);
    __syncthreads();
    const AdamWSpan* span = span_of(i, spans + block_spans[0], spans + min(block_spans[1] + 1, span_count));
    const float scale = factors[0];
    if (!span || scale != scale) return;
    const float keep = span->decays ? factors[1] : 1;
    float g[W], m_new[W], v_new[W], updated[W];
    load(g, grad + i);
    load(m_new, m + i);
    load(v_new, v + i);
    load(updated, master + i);
    for (int k = 0; k < W; k++) {
        g[k] *= scale;
        m_new[k] = h.beta1 * m_new[k] + (1 - h.beta1) * g[k];
        v_new[k] = h.beta2 * v_new[k] + (1 - h.beta2) * g[k] * g[k];
        updated[k] = updated[k] * keep - h.step_size * m_new[k] / (sqrtf(v_new[k]) * h.v_correction + h.eps);
    }
    store(m + i, m_new);
    store(v + i, v_new);
    store(master + i, updated);
    round_to(param + i, updated, h.seed, h.stream, h.counter + i);
}
// Muon, as Cpu has it, with a row of blocks for each matrix of a batch: they are [rows, columns], but transposed in
// direction and y where rows > columns.
__device__ inline size_t muon_index(size_t i, size_t rows, size_t columns) {
    return rows > columns ? i % columns * rows + i / columns : i;
}
// Element i of the matrix, and i below `padded`, behind it.
__global__ void muon_momentum_kernel(float* direction, float* m, const float* grad, const MuonMatrix* matrices,
                                     size_t rows, size_t columns, size_t padded, AdamWConstants h) {
    wait_for_earlier_kernels();
    SHARED(float, scale, [1]);
    if (threadIdx.x == 0) scale[0] = clip_factor(h);
    __syncthreads();
    const size_t i = thread_index();
    if (i >= padded || scale[0] != scale[0]) return;
    direction += blockIdx.y * padded;
    if (i >= rows * columns) {
        direction[i] = 0;
        return;
    }
    m += matrices[blockIdx.y].m_at;
    const float g = grad[matrices[blockIdx.y].begin + i] * scale[0], m_new = h.beta1 * m[i] + (1 - h.beta1) * g;
    m[i] = m_new;
    direction[muon_index(i, rows, columns)] = h.beta1 * m_new + (1 - h.beta1) * g;
}
__global__ void muon_normalise_kernel(cuda_real* y, const float* direction, const double* squares, double factor,
                                      size_t size, size_t padded) {
    wait_for_earlier_kernels();
    SHARED(float, scale, [1]);
    const double square = squares[blockIdx.y];
    if (threadIdx.x == 0) scale[0] = float(square > 0 ? factor / sqrt(square) : 0);
    __syncthreads();
    const size_t i = thread_index();
    if (i < size) y[blockIdx.y * size + i] = cuda_real(direction[blockIdx.y * padded + i] * scale[0]);
}
__global__ void muon_apply_kernel(cuda_real* params, float* masters, const cuda_real* y, const MuonMatrix* matrices,
                                  size_t rows, size_t columns, AdamWConstants h) {
    wait_for_earlier_kernels();
    SHARED(float, factors, [2]);
    if (threadIdx.x < 2) factors[threadIdx.x] = threadIdx.x == 0 ? clip_factor(h) : float(1 - h.lr * h.decay);
    __syncthreads();
    const size_t i = thread_index();
    if (i >= rows * columns || factors[0] != factors[0]) return;
    const size_t place = matrices[blockIdx.y].begin + i;
    float* const master = masters + matrices[blockIdx.y].m_at + i;
    y += blockIdx.y * rows * columns;
    const float updated[1] = {*master * factors[1] - h.step_size * float(y[muon_index(i, rows, columns)])};
    store(master, updated);
    round_to(params + place, updated, h.seed, h.stream, h.counter + place);
}
__global__ void round_master_kernel(cuda_real* param, const float* master, size_t count, uint64_t seed, uint64_t stream,
                                    uint64_t counter) {
    wait_for_earlier_kernels();
    const size_t i = thread_index();
    if (i < count) round_to(param + i, {master[i]}, seed, stream, counter + i);
}

}  // namespace kernels

// What struct Cuda (nsa_kernels.cuh) has of an optimiser step; lib/model/engine.h says what each operation computes.
struct CudaOptimiser : CudaRuntime {
    using real = cuda_real;
    using Stat = float;
    using Grad = float;
    using Master = float;
    using Sum = double;
    static constexpr bool FP32 = std::is_same<real, float>::value;

    CudaOptimiser(int device_index, size_t workspace) : CudaRuntime(device_index, workspace, !FP32) {
        sum_parts = allocate<double>(kernels::SUM_PARTS);
    }
    ~CudaOptimiser() {
        cudaStreamSynchronize(stream);
        release(sum_parts);
    }

    void add_sum(double* total, const Stat* x, size_t count) {
        with_width(is_wide(count, x), [&](auto W) {
            // A short array has fewer parts: the others would be zeros.
            const size_t full = (count + kernels::SUM_THREADS * W() - 1) / (kernels::SUM_THREADS * W());
            const int parts = int(std::min<size_t>(kernels::SUM_PARTS, std::max<size_t>(1, full)));
            launch<kernels::sum_parts_kernel<W()>>(unsigned(parts), kernels::SUM_THREADS, 0, stream, sum_parts, x,
                                                   count);
            launch<kernels::sum_total_kernel>(1, 32, 0, stream, total, sum_parts, parts);
        });
    }
    void chunk_squares(double* squares, const Grad* x, size_t total, size_t begin, size_t count) {
        if (count)
            launch<kernels::chunk_squares_kernel>(unsigned(count / CHUNK), kernels::SUM_THREADS, 0, stream, squares, x,
                                                  total, begin / CHUNK);
    }
    void total_squares(double* sum, const double* squares, size_t chunks, const Grad* guard) {
        launch<kernels::total_squares_kernel>(1, kernels::SUM_THREADS, 0, stream, sum, squares, chunks, guard);
    }
    template <class T>
    void set_guard(T* guard, const double* loss) {
        launch<kernels::set_guard_kernel<T>>(1, 32, 0, stream, guard, loss);
    }
    // AdamW (Loshchilov & Hutter 2019), decoupled decay, bias-corrected moments m, v. master is updated and rounded to
    // param: in bf16 stochastically, by the random stream (RANDOM_ROUNDING, step) at h.offset + i, so that weights with
    // like masters do not all err to one side (dev/tour/12_rounding.md).
    void adamw(real* param, Master* master, Stat* m, Stat* v, const Grad* grad, const std::vector<AdamWSpan>& spans,
               const HyperAdamW& h) {
        if (spans.empty()) return;
        size_t places = h.offset;  // the bits that any of them has
        for (const AdamWSpan& span : spans) places |= span.begin | span.end;
        with_width(is_wide(places, param, master, m, v, grad), [&](auto W) {
            launch<kernels::adamw_kernel<W()>>(blocks_for(spans.back().end, 256 * W()), 256, 0, stream, param, master,
                                               m, v, grad, on_device(spans), int(spans.size()),
                                               AdamWConstants(h, h.lr / (1 - std::pow(h.beta1, double(h.step)))));
        });
    }
    // Muon, lib/model/muon.h: a launch for all matrices of one shape.
    void muon_momentum(Grad* direction, Stat* m, const Grad* grad, const MuonBatch& b, const HyperAdamW& h) {
        launch<kernels::muon_momentum_kernel>(grid_of_batch(b, b.padded_size()), 256, 0, stream, direction, m, grad,
                                              on_device(b.matrices), size_t(b.rows), size_t(b.columns), b.padded_size(),
                                              AdamWConstants(h, 0));
    }
    void muon_normalise(real* y, const Grad* direction, const double* squares, double factor, const MuonBatch& b) {
        launch<kernels::muon_normalise_kernel>(grid_of_batch(b, b.size()), 256, 0, stream, y, direction, squares,
                                               factor, b.size(), b.padded_size());
    }
    void muon_apply(real* param, Master* master, const real* y, double step_size, const MuonBatch& b,
                    const HyperAdamW& h) {
        launch<kernels::muon_apply_kernel>(grid_of_batch(b, b.size()), 256, 0, stream, param, master, y,
                                           on_device(b.matrices), size_t(b.rows), size_t(b.columns),
                                           AdamWConstants(h, step_size));
    }
    void muon_product(real* out, const real* x, const real* y, bool transposed, const real* addend, double beta,
                      int count, int M, int N, int K) {
        const Batch batch = {count, size_t(M) * K, size_t(N) * K, size_t(M) * N, float(beta)};
        if (transposed) gemm(NT, {M, N, K}, x, K, y, K, addend, out, N, batch);
        else gemm(NN, {M, N, K}, x, K, y, N, addend, out, N, batch);
    }
    // The parameters as adamw left them after this step, from the master copy alone, so that a resumed run goes on with
    // the same bits. Arguments as in HyperAdamW.
    void round_master(real* param, const Master* master, size_t count, uint64_t seed, int64_t step, size_t offset) {
        if (count == 0) return;
        launch<kernels::round_master_kernel>(blocks_for(count, 256), 256, 0, stream, param, master, count, seed,
                                             random_stream(RANDOM_ROUNDING, uint64_t(step)), offset);
    }

  private:
    double* sum_parts;  // of add_sum
    static dim3 grid_of_batch(const MuonBatch& b, size_t count) {
        return dim3(blocks_for(count, 256), unsigned(b.matrices.size()));
    }
};
