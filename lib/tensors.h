// tensors.h: named tensors in one flat array, and the values that they begin with. Used by the list of the model's
// tensors in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "util.h"

enum Init { INIT_ONE, INIT_ZERO, INIT_WEIGHT, INIT_RESIDUAL, INIT_PHI };

struct TensorSpec {
    std::string name;
    int64_t rows, columns;  // columns 0: a vector
    Init init;
    bool decay;
    size_t offset;        // in elements, into each flat array (parameters, gradients, moments)
    size_t size, padded;  // elements on disk; in memory, where rows of zeros follow

    std::vector<int64_t> shape() const {
        return columns ? std::vector<int64_t>{rows, columns} : std::vector<int64_t>{rows};
    }
};

struct TensorList {
    std::vector<TensorSpec> specs;
    size_t total = 0;        // elements of a flat array, padding included
    int64_t parameters = 0;  // without padding

    // joined: without a gap behind the tensor before it; else at the next multiple of 64 elements.
    void add(const std::string& name, int64_t rows, int64_t columns, int64_t memory_rows, Init init, bool decay,
             bool joined) {
        const size_t width = size_t(columns ? columns : 1), offset = joined ? total : (total + 63) / 64 * 64;
        specs.push_back({name, rows, columns, init, decay, offset, size_t(rows) * width, size_t(memory_rows) * width});
        total = offset + specs.back().padded;
        parameters += rows * int64_t(width);
    }
};

// Element i of the tensor with this index in the list, of a model with so many layers: GPT-2's initialisation, normal
// with a deviation of 0.02, divided by sqrt(2 layers) where a matrix adds to the residual stream. random: every tensor
// is drawn, so that a comparison sees every path, with a deviation of 1/sqrt(inputs). Narrow models need that: at width
// 128, 0.02 makes every score nearly 0, and what to attend to is learnt late or never.
inline float initial_value(const TensorSpec& t, size_t index, size_t i, uint64_t seed, int64_t layers, bool random) {
    const double normal = t.init == INIT_ONE && !random ? 0 : random_normal(seed, random_stream(RANDOM_INIT, index), i);
    const double fan_in = 1 / std::sqrt(double(std::max<int64_t>(1, t.columns)));
    switch (t.init) {
        case INIT_ONE: return float(1 + (random ? 0.1 * normal : 0));
        case INIT_ZERO: return float(random ? normal * (t.columns ? fan_in : 0.1) : 0);
        case INIT_WEIGHT: return float(normal * (random && t.columns ? fan_in : 0.02));
        case INIT_RESIDUAL: return float(normal * (random ? fan_in : 0.02 / std::sqrt(2.0 * double(layers))));
        case INIT_PHI: return float(normal / std::sqrt(double(t.columns)));
    }
    return 0;
}
