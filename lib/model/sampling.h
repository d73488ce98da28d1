// sampling.h: from logits to a token. Used by generate() in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../base/errors.h"

// The logits at a position, before a token is drawn from them.
inline void require_finite(const std::vector<float>& logits, int position) {
    for (const float x : logits)
        if (!std::isfinite(x))
            fail("sample: the model's logits at position %d are not finite: its weights are no use", position);
}

// The next token from its logits [V]: temperature, then the top_k likeliest, then the likeliest of total probability
// top_p. uniform: a random number in [0, 1).
inline int32_t choose_token(const std::vector<float>& logits, double temperature, int64_t top_k, double top_p,
                            double uniform) {
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const size_t keep = top_k > 0 ? std::min<size_t>(size_t(top_k), order.size()) : order.size();
    const auto likelier = [&](int32_t a, int32_t b) {
        return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
    };
    if (temperature == 0) return *std::min_element(order.begin(), order.end(), likelier);
    if (keep < order.size() || top_p < 1) std::sort(order.begin(), order.end(), likelier);
    order.resize(keep);
    std::vector<double> weight(keep);
    double total = 0, largest = logits[size_t(*std::min_element(order.begin(), order.end(), likelier))];
    for (size_t i = 0; i < keep; i++) total += weight[i] = std::exp((logits[size_t(order[i])] - largest) / temperature);
    if (top_p < 1) {  // the shortest prefix that holds top_p of the mass, at least one token
        double sum = 0;
        size_t n = 0;
        while (n < keep && (n == 0 || sum < top_p * total)) sum += weight[n++];
        order.resize(n);
        total = sum;
    }
    double left = uniform * total;
    size_t chosen = 0;  // the last token of non-zero weight, if rounding leaves anything over
    for (size_t i = 0; i < order.size() && left >= 0; i++) {
        if (weight[i] <= 0) continue;
        chosen = i;
        left -= weight[i];
    }
    return order[chosen];
}
