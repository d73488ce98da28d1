// flops.h: the arithmetic that a model needs, for MFU and for the benchmarks. Used by train_nsa.cu.
#pragma once
#include <algorithm>
#include <string>

#include "shape.h"

// Pairs of a key and a query that a branch's mask allows, over all heads. Each costs 4*D FLOPs in the forward pass (two
// products) and 8*D in the backward pass (dV, dP, dQ, dK; computing the scores a second time does not count). Counted,
// not estimated, except that every selected block counts as full; a query that may choose has n of them, the last cut
// by causality.
inline double attention_pairs(Branch branch, const NsaShape& s) {
    double pairs = 0;
    for (int t = s.first; t < s.first + s.queries; t++) {
        if (branch == CMP) pairs += s.cmp_blocks(t + 1);
        else if (branch == WIN) pairs += s.full ? t + 1 : std::min(t + 1, s.window);
        else pairs += std::min(t / s.slc_block, s.slc_count - 1) * s.slc_block + t % s.slc_block + 1;
    }
    return pairs * s.B * s.H;
}

// FLOPs that the model needs for one token in training, counted as model FLOPs utilisation counts them (PaLM, arXiv
// 2204.02311, appendix B): 6 for each weight of a matrix and row that it multiplies, 12 D for each pair of a query and
// a key. Work done twice, scores, norms and the update do not count.
// s: one sequence; specs: the model's tensors, with name, size and columns.
template <class Specs>
double model_flops_per_token(const Specs& specs, const NsaShape& s, int64_t layers) {
    double flops = 0;
    for (const auto& t : specs) {
        // phi multiplies compressed blocks, everything else tokens; the embedding counts as the head
        const double rows = t.name.find(".phi_") == std::string::npos ? double(s.T) : double(s.cmp_rows());
        if (t.columns) flops += 6 * rows * double(t.size);
    }
    for (const Branch branch : {CMP, SLC, WIN})
        if (s.has(branch)) flops += 12.0 * s.D * attention_pairs(branch, s) * double(layers);
    return flops / s.T;
}
