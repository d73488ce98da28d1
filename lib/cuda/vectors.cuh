// vectors.cuh: what a thread of the row operations works with: loads and stores of several elements at a time, the
// element or the row that is its own, sums over a block, and the sigmoid. Used by nsa_kernels.cuh and optimiser.cuh.
#pragma once
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "common.cuh"

#ifdef PRECISION_FP32
using cuda_real = float;
#else
using cuda_real = __nv_bfloat16;

__device__ inline unsigned pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    unsigned bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
#endif

namespace kernels {

// Loads and stores. Kernels are written for W elements at a time: 16 bytes of cuda_real where rows and pointers allow
// it, else 1. In registers the elements are always fp32.

constexpr int WIDE = 16 / int(sizeof(cuda_real));

template <int W>
__device__ inline void load(float (&x)[W], const float* p) {
    if constexpr (W == 1) {
        x[0] = *p;
    } else {
        for (int i = 0; i < W; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(p + i);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
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
        for (int i = 0; i < 4; i++) {
            x[2 * i] = __uint_as_float(pairs[i] << 16);
            x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
}
template <int W>
__device__ inline void store(__nv_bfloat16* p, const float (&x)[W]) {
    if constexpr (W == 1) {
        *p = __float2bfloat16_rn(x[0]);
    } else {
        unsigned pairs[4];
        for (int i = 0; i < 4; i++) pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
        *reinterpret_cast<uint4*>(p) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
#endif

// The index of this thread among all threads of the launch.
__device__ inline size_t thread_index() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// The row of D elements that this thread and its neighbours share.
constexpr int ROW_LANES = 8;
__device__ inline size_t row_index() { return size_t(blockIdx.x) * (blockDim.x / ROW_LANES) + threadIdx.x / ROW_LANES; }

// The sum over the threads of a block of SUM_THREADS, in a fixed order; only thread 0 gets it. of_warps: in shared
// memory.
constexpr int SUM_THREADS = 256, SUM_WARPS = SUM_THREADS / 32;
__device__ inline double block_sum(double sum, double* of_warps) {
    sum = lane_sum(sum);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < SUM_WARPS; i++) sum += of_warps[i];
    return sum;
}

// 1 / (1 + e^-x), rounded as a division would round it: a reciprocal and one Newton step, without a division's branch
// to rare cases. Those (x below -87.3, where the result is below 2^-126) give 0.
__device__ inline float sigmoid(float x) {
    const float y = 1 + expf(-x), r = reciprocal_approx(y);
    return y > 0x1p126f ? 0 : fmaf(r, fmaf(-y, r, 1), r);
}

// e^x for x <= 0, to within 2^-22 (1 + |x|): a product and an exponential, a third of what expf takes.
__device__ inline float exp_approx(float x) { return exp2_approx(x * LOG2_E); }

}  // namespace kernels

// For launches.

// Whether rows of `width` elements that begin at these arrays can be read 16 bytes at a time.
template <class... T>
inline bool is_wide(size_t width, const T*... arrays) {
    return width % kernels::WIDE == 0 && ((reinterpret_cast<size_t>(arrays) % 16 == 0) && ...);
}
// launch_with(W), W a constant: the kernel for whole 16 bytes, or the one for single elements.
template <class F>
inline void with_width(bool wide, F launch_with) {
    if (wide) launch_with(std::integral_constant<int, kernels::WIDE>());
    else launch_with(std::integral_constant<int, 1>());
}
