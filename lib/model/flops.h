// flops.h: the arithmetic that a model needs, for MFU. Used by lib/run/start.h and lib/verbs/check.h.
#pragma once
#include <algorithm>
#include <string>

#include "shape.h"
#include "tensors.h"

// FLOPs that the model needs for one token in training, counted as model FLOPs utilisation counts them (PaLM, arXiv
// 2204.02311, appendix B): 6 for each weight of a matrix and row that it multiplies, 12 D for each pair of a query
// and a key. Work done twice, the choice of blocks, norms and the update do not count.
// s: one sequence; specs: the model's tensors.
inline double model_flops_per_token(const std::vector<TensorSpec>& specs, const NsaShape& s, int64_t layers) {
    double flops = 0;
    const bool tied = specs.back().name != "head.weight";
    for (const TensorSpec& t : specs) {
        if (!tied && t.name == "embed_tokens.weight") continue;  // rows are looked up; tied, it counts as the head
        // phi multiplies compressed blocks, everything else tokens
        const double rows = t.name.find(".phi_") == std::string::npos ? double(s.T) : double(s.cmp_rows());
        if (t.columns) flops += 6 * rows * double(t.size);
    }
    for (int64_t i = 0; i < std::min<int64_t>(layers, s.period); i++) {
        const NsaShape layer = s.of_layer(size_t(i));
        const double alike = double((layers - i + s.period - 1) / s.period);  // layers of this place in the pattern
        for (const Branch branch : {CMP, SLC, WIN})
            if (layer.has(branch)) flops += 12.0 * s.D * attention_pairs(branch, layer) * alike;
    }
    return flops / s.T;
}
