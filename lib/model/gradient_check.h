// gradient_check.h: a backward pass against finite differences of its forward pass. Used by the verb `check`,
// lib/verbs/check.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../base/progress.h"
#include "../base/random.h"
#include "tensors.h"

// The larger of two errors, and NaN if either is: std::max(0.0, NAN) is 0, which every limit lets pass.
inline double worse_error(double a, double b) { return a > b || std::isnan(a) ? a : b; }

// Test tokens, bytes each.
inline std::vector<int32_t> bytes_to_check(size_t count, uint64_t seed) {
    std::vector<int32_t> tokens(count);
    for (size_t i = 0; i < count; i++) tokens[i] = int32_t(random_below(256, seed, random_stream(RANDOM_TEST), i));
    return tokens;
}

struct GradientErrors {
    double worst = 0;  // relative to the L2 norm of a tensor's gradient
    int flipped = 0;   // directions passed over because a step along them changed the selection
};

// The central difference of the loss along a direction against the slope that the gradient promises, relative to the
// gradient's L2 norm. Infinite if the selection differs between the two sides: there the loss jumps and has no slope.
template <class Loss, class Selection>
double error_along(const std::vector<double>& direction, double* params, const double* grads, Loss loss,
                   Selection selection) {
    const double step = 1e-5;  // in fp64 it leaves about 1e-8 of rounding, and less of truncation
    const std::vector<double> saved(params, params + direction.size());
    double slope = 0, square = 0, value[2];
    decltype(selection()) selected[2];
    for (size_t i = 0; i < direction.size(); i++) {
        slope += direction[i] * grads[i];
        square += grads[i] * grads[i];
    }
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < direction.size(); i++) params[i] = saved[i] + (side ? -step : step) * direction[i];
        value[side] = loss();
        selected[side] = selection();
    }
    std::copy(saved.begin(), saved.end(), params);
    if (selected[0] != selected[1]) return INFINITY;
    return std::fabs((value[0] - value[1]) / (2 * step) - slope) / std::sqrt(square);
}

// For each tensor of a flat array along a random direction; where a direction flips the selection, along another one.
// loss() and selection() compute from params; grads holds the gradient there.
template <class Loss, class Selection>
GradientErrors gradient_errors(const std::vector<TensorSpec>& specs, double* params, const double* grads, Loss loss,
                               Selection selection) {
    const uint64_t directions = 3;  // tried at most
    GradientErrors errors;
    Progress progress("gradient check", double(specs.size()));
    for (size_t index = 0; index < specs.size(); index++) {
        progress.done = double(index);
        const size_t offset = specs[index].offset, size = specs[index].size;
        std::vector<double> direction(size);
        double error = INFINITY;
        for (uint64_t trial = 0; trial < directions && error == INFINITY; trial++) {
            for (size_t i = 0; i < size; i++)
                direction[i] = random_normal(3, random_stream(RANDOM_TEST, index), trial * size + i);
            error = error_along(direction, params + offset, grads + offset, loss, selection);
            errors.flipped += error == INFINITY;
        }
        errors.worst = worse_error(errors.worst, error);
    }
    return errors;
}
