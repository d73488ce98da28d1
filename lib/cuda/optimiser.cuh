// optimiser.cuh: what the optimiser's kernels in nsa_kernels.cuh are given of a step, and how they find what belongs to
// an element.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../model/engine.h"
#include "common.cuh"

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
