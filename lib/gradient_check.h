// gradient_check.h: a backward pass against finite differences of its forward pass. Used by the verb `check` in
// train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "progress.h"
#include "util.h"

// Test tokens, bytes each.
inline std::vector<int32_t> bytes_to_check(size_t count, uint64_t seed) {
    std::vector<int32_t> tokens(count);
    for (size_t i = 0; i < count; i++) tokens[i] = int32_t(random_below(256, seed, random_stream(RANDOM_TEST), i));
    return tokens;
}

// For each tensor of a flat array (specs with offset and size): the loss's central difference along a random direction
// against the gradient. Returns the worst difference, relative to the L2 norm of that tensor's gradient. loss()
// computes the loss from params; grads holds its gradient at the params given. With a step of 1e-5 in fp64, rounding
// leaves about 1e-8, and truncation less.
template <class Specs, class Loss>
double worst_gradient_error(const Specs& specs, double* params, const double* grads, Loss loss) {
    const double step = 1e-5;
    double worst = 0;
    Progress progress("gradient check", double(specs.size()));
    for (size_t index = 0; index < specs.size(); index++) {
        progress.done = double(index);
        const size_t offset = specs[index].offset, size = specs[index].size;
        const std::vector<double> saved(params + offset, params + offset + size);
        std::vector<double> direction(size);
        double slope = 0, square = 0, value[2];
        for (size_t i = 0; i < size; i++) {
            const double g = grads[offset + i];
            direction[i] = random_normal(3, random_stream(RANDOM_TEST, index), i);
            slope += direction[i] * g, square += g * g;
        }
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < size; i++) params[offset + i] = saved[i] + (side ? -step : step) * direction[i];
            value[side] = loss();
        }
        std::copy(saved.begin(), saved.end(), params + offset);
        worst = std::max(worst, std::fabs((value[0] - value[1]) / (2 * step) - slope) / std::sqrt(square));
    }
    return worst;
}
