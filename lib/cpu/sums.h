// sums.h: the sums of the CPU engine over the batch and over all gradients, of fp32 or fp64, each in an order that the
// shapes fix. Used by nsa_cpu.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "../model/engine.h"

// T: of losses and gradients
template <class T>
struct HostSums {
    // *total += sum of x [count], in order
    void add_sum(double* total, const T* x, size_t count) {
        double sum = 0;
        for (size_t i = 0; i < count; i++) sum += x[i];
        *total += sum;
    }
    // squares[i] = sum of the squares of chunk i of x [total], in fp64; the chunks that begin in [begin, begin + count)
    void chunk_squares(double* squares, const T* x, size_t total, size_t begin, size_t count) {
#pragma omp parallel for schedule(static)
        for (size_t chunk = begin / CHUNK; chunk < (begin + count) / CHUNK; chunk++) {
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t i = chunk * CHUNK; i < std::min(total, (chunk + 1) * CHUNK); i++)
                sum += double(x[i]) * double(x[i]);
            squares[chunk] = sum;
        }
    }
    // *sum = squares[0] + squares[1] + ... in this order, or NaN if *guard is not finite
    void total_squares(double* sum, const double* squares, size_t chunks, const T* guard) {
        *sum = 0;
        for (size_t i = 0; i < chunks; i++) *sum += squares[i];
        if (!std::isfinite(*guard)) *sum = std::numeric_limits<double>::quiet_NaN();
    }
    // *guard = *loss
    template <class To>
    void set_guard(To* guard, const double* loss) {
        *guard = To(*loss);
    }
};
