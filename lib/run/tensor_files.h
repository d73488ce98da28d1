// tensor_files.h: flat arrays as named tensors in files; lib/verbs/model_files.h has those of a checkpoint. A list of
// specs names the tensors of a flat array, see lib/model/tensors.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "../base/safetensors.h"
#include "../model/shape.h"
#include "../model/tensors.h"

// The tensors in the first chunk whose sum of squares is not finite, for messages. chunk: elements of a chunk; squares:
// one sum for each.
template <class Sum>
std::string first_bad_tensor(const std::vector<TensorSpec>& specs, const std::vector<Sum>& squares, size_t chunk) {
    for (size_t i = 0; i < squares.size(); i++) {
        if (std::isfinite(squares[i])) continue;
        std::string names;
        for (const TensorSpec& t : specs)
            if (t.offset < (i + 1) * chunk && t.offset + t.size > i * chunk)
                names += (names.empty() ? "gradient of " : " or ") + t.name;
        return names;
    }
    return "none, only the loss";
}

// With weights that are not finite nothing can be computed.
void require_finite(const SafeTensors& file);

// A checkpoint's weights. Every tensor's name and shape are checked, before memory is allocated for what a config.json
// says.
std::unique_ptr<SafeTensors> open_weights(const std::string& checkpoint, const std::vector<TensorSpec>& specs);

// ---------------------------------------------------------------------------------------------------------------------
// --dump-state: what another program needs to compare itself with this one.

struct StateDump {
    std::string precision;            // format() of the engine
    std::vector<TensorView> tensors;  // parameters, and gradients named grad.<tensor>
    NsaShape shape;
    int64_t V = 0;                                 // vocabulary
    std::vector<int32_t> inputs, targets;          // [B, T]
    std::vector<float> logits;                     // [B, T, V]
    float loss = 0;                                // mean over the tokens
    std::vector<std::vector<uint32_t>> selection;  // per layer the bitmasks [B, G, T]; none of layers without NSA

    void add(const std::vector<TensorView>& more) { tensors.insert(tensors.end(), more.begin(), more.end()); }
};

void write_state_dump(const std::string& path, StateDump d, const std::string& config, const std::string& command);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "tensor_files.cpp"
#endif
