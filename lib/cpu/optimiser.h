// optimiser.h: an optimiser step of the CPU engine in fp32 or fp64: the sums over the batch and over all gradients,
// each in an order that the shapes fix, then AdamW and Muon. A part of struct Cpu in nsa_cpu.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "../model/engine.h"

// The update of a tensor of so few elements is over before another thread has woken up.
constexpr size_t FEW = 8192;

// T: of parameters, moments, losses and gradients
template <class T>
struct HostOptimiser {
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

    // What clipping multiplies the gradient by; NaN: no update.
    static double clip_factor(const HyperAdamW& h) {
        const double norm = h.squares ? std::sqrt(*h.squares) : 0;
        if (!std::isfinite(norm)) return std::numeric_limits<double>::quiet_NaN();
        return h.grad_clip > 0 && norm > h.grad_clip ? h.grad_clip / norm : 1;
    }
    // AdamW (Loshchilov & Hutter 2019): decoupled decay, bias-corrected moments m, v. An engine with a master copy
    // updates that and rounds it to param.
    void adamw(T* param, T*, T* m, T* v, const T* grad, const std::vector<AdamWSpan>& spans, const HyperAdamW& h) {
        const double clip = clip_factor(h);
        if (std::isnan(clip)) return;
        const T beta1 = T(h.beta1), beta2 = T(h.beta2), eps = T(h.eps), scale = T(clip);
        const T step_size = T(h.lr / (1 - std::pow(h.beta1, double(h.step))));
        const T v_correction = T(1 / std::sqrt(1 - std::pow(h.beta2, double(h.step))));
        for (const AdamWSpan& span : spans) {
            const T keep = T(span.decays ? 1 - h.lr * h.decay : 1);
#pragma omp parallel for simd schedule(static) if (span.end - span.begin > FEW)
            for (size_t i = span.begin; i < span.end; i++) {
                const T g = grad[i] * scale;
                m[i] = beta1 * m[i] + (1 - beta1) * g;
                v[i] = beta2 * v[i] + (1 - beta2) * g * g;
                param[i] = param[i] * keep - step_size * m[i] / (std::sqrt(v[i]) * v_correction + eps);
            }
        }
    }
    // Muon, lib/model/muon.h, for matrices [rows, columns]. work(i, j): element i of a matrix is element j of direction
    // and y, which hold a matrix that is taller than wide transposed. By 16 columns, a cache line of either.
    template <class Work>
    static void for_muon_elements(const MuonBatch& b, const Work& work) {
        const int64_t rows = b.rows, columns = b.columns;
        const size_t next_row = rows > columns ? 1 : size_t(columns), next_column = rows > columns ? size_t(rows) : 1;
#pragma omp parallel for schedule(static)
        for (int64_t c0 = 0; c0 < columns; c0 += 16)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = c0; c < std::min(columns, c0 + 16); c++)
                    work(size_t(r * columns + c), size_t(r) * next_row + size_t(c) * next_column);
    }
    // Momentum with Nesterov's look ahead: m = beta1 m + (1 - beta1) grad, direction = beta1 m + (1 - beta1) grad.
    void muon_momentum(T* directions, T* ms, const T* grads, const MuonBatch& b, const HyperAdamW& h) {
        const double clip = clip_factor(h);
        if (std::isnan(clip)) return;
        const T beta1 = T(h.beta1), scale = T(clip);
        for (const MuonMatrix& matrix : b.matrices) {
            T* const m = ms + matrix.m_at;
            const T* const grad = grads + matrix.begin;
            T* const direction = directions;
            for_muon_elements(b, [=](size_t i, size_t j) {
                const T g = grad[i] * scale;
                m[i] = beta1 * m[i] + (1 - beta1) * g;
                direction[j] = beta1 * m[i] + (1 - beta1) * g;
            });
            std::fill(direction + b.size(), direction + b.padded_size(), T(0));
            directions += b.padded_size();
        }
    }
    // y = factor * direction / sqrt(squares), 0 where all is 0
    void muon_normalise(T* y, const T* direction, const double* squares, double factor, const MuonBatch& b) {
        const size_t size = b.size(), padded = b.padded_size();
        for (size_t k = 0; k < b.matrices.size(); k++) {
            const T scale = T(squares[k] > 0 ? factor / std::sqrt(squares[k]) : 0);
#pragma omp parallel for simd schedule(static)
            for (size_t i = 0; i < size; i++) y[k * size + i] = direction[k * padded + i] * scale;
        }
    }
    // param = param * (1 - lr * decay) - step_size * y
    void muon_apply(T* params, T*, const T* ys, double step_size, const MuonBatch& b, const HyperAdamW& h) {
        if (std::isnan(clip_factor(h))) return;
        const T keep = T(1 - h.lr * h.decay), step = T(step_size);
        for (const MuonMatrix& matrix : b.matrices) {
            T* const param = params + matrix.begin;
            const T* const y = ys;
            for_muon_elements(b, [=](size_t i, size_t j) { param[i] = param[i] * keep - step * y[j]; });
            ys += b.size();
        }
    }
};
