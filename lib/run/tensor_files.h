// tensor_files.h: flat arrays as named tensors in files; lib/verbs/model_files.h has those of a checkpoint. A list of
// specs names the tensors of a flat array, see lib/model/tensors.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "../base/safetensors.h"
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
inline void require_finite(const SafeTensors& file) {
    for (const TensorView& t : file.tensors) {
        const float* const values = static_cast<const float*>(t.data);
        const size_t n = size_t(t.bytes / sizeof *values);
        const float* const bad = std::find_if(values, values + n, [](float x) { return !std::isfinite(x); });
        if (t.dtype == "F32" && bad != values + n)
            fail("%s: number %d of %s is %g: the weights are no use; take an earlier checkpoint", file.path,
                 size_t(bad - values), t.name, double(*bad));
    }
}

// A checkpoint's weights. Every tensor's name and shape are checked, before memory is allocated for what a config.json
// says.
inline std::unique_ptr<SafeTensors> open_weights(const std::string& checkpoint, const std::vector<TensorSpec>& specs) {
    auto weights = std::make_unique<SafeTensors>(checkpoint + "/model.safetensors");
    for (const TensorSpec& t : specs) weights->get(t.name, "F32", t.shape());
    require_finite(*weights);
    return weights;
}
