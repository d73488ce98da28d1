// tensors.h: named tensors in one flat array, and the values that they begin with. Used by the list of the model's
// tensors in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../base/random.h"

enum Init { INIT_ONE, INIT_ZERO, INIT_ZERO_TWO, INIT_WEIGHT, INIT_RESIDUAL, INIT_PHI };

// What a list says of a tensor, as in matrix_of(rows, columns).with(INIT_PHI).joined().
struct TensorForm {
    int64_t rows;
    int64_t columns;          // 0: a vector
    int64_t memory_rows;      // rows of zeros follow in memory, up to these
    Init init = INIT_WEIGHT;  // the values that it begins with, see initial_value()
    bool is_joined = false;   // follows the tensor before it without a gap; else it begins at a multiple of 64 elements
    bool only_nsa = false;    // a layer without NSA has no such tensor
    bool is_there = true;     // false: this model has no such tensor
    bool by_element = false;  // a matrix whose elements are updated one by one, whatever --optimizer says

    TensorForm with(Init i) const { return changed(&TensorForm::init, i); }
    TensorForm padded_to(int64_t r) const { return changed(&TensorForm::memory_rows, r); }
    TensorForm joined() const { return changed(&TensorForm::is_joined, true); }
    TensorForm of_nsa() const { return changed(&TensorForm::only_nsa, true); }
    TensorForm when(bool there) const { return changed(&TensorForm::is_there, there); }
    TensorForm elementwise() const { return changed(&TensorForm::by_element, true); }

    // A copy with another value of this member.
    template <class T>
    TensorForm changed(T TensorForm::*member, T value) const {
        TensorForm form = *this;
        form.*member = value;
        return form;
    }
};
inline TensorForm matrix_of(int64_t rows, int64_t columns) { return {rows, columns, rows}; }
inline TensorForm vector_of(int64_t elements) { return {elements, 0, elements}; }

struct TensorSpec {
    std::string name;
    int64_t rows, columns;  // columns 0: a vector
    Init init;
    bool decay;           // of matrices alone
    bool orthogonal;      // Muon updates it as a whole; of joined tensors each by itself
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

    void add(const std::string& name, const TensorForm& f) {
        const size_t width = size_t(f.columns ? f.columns : 1), offset = f.is_joined ? total : (total + 63) / 64 * 64;
        specs.push_back({name, f.rows, f.columns, f.init, f.columns > 0, f.columns > 0 && !f.by_element, offset,
                         size_t(f.rows) * width, size_t(f.memory_rows) * width});
        total = offset + specs.back().padded;
        parameters += f.rows * int64_t(width);
    }

    static std::string name_in_layer(int64_t layer, const char* name) {
        return "layers." + std::to_string(layer) + "." + name;
    }
};

// Element i of the tensor with this index in the list, of a model with so many layers: GPT-2's initialisation, normal
// with a deviation of 0.02, divided by sqrt(2 layers) where a matrix adds to the residual stream. "narrow": with one of
// 1/sqrt(inputs). Narrow models need that: at width 128, 0.02 makes every score nearly 0, and what to attend to is
// learnt late or never. "random": besides, every tensor is drawn, so that a comparison sees every path.
inline float initial_value(const TensorSpec& t, size_t index, size_t i, uint64_t seed, int64_t layers,
                           const std::string& way) {
    const bool random = way == "random", narrow = random || way == "narrow";
    const double normal = t.init == INIT_ONE && !random ? 0 : random_normal(seed, random_stream(RANDOM_INIT, index), i);
    const double deviation = 1 / std::sqrt(double(std::max<int64_t>(1, t.columns)));
    switch (t.init) {
        case INIT_ONE: return float(1 + (random ? 0.1 * normal : 0));
        case INIT_ZERO: return float(random ? normal * (t.columns ? deviation : 0.1) : 0);
        case INIT_ZERO_TWO: return float(i % 2 * 2.0 + (random ? 0.1 * normal : 0));  // in turn
        case INIT_WEIGHT: return float(normal * (narrow && t.columns ? deviation : 0.02));
        case INIT_RESIDUAL: return float(normal * (narrow ? deviation : 0.02 / std::sqrt(2.0 * double(layers))));
        case INIT_PHI: return float(normal / std::sqrt(double(t.columns)));
    }
    return 0;
}
