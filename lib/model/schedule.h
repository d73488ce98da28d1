// schedule.h: the learning rate of each step. Used by the training loop in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

struct Schedule {
    std::string kind;     // constant, cosine, linear or wsd (warm-up, stable, decay over the last fifth)
    double lr, lr_final;  // after the warm-up; at the last step, as a share of lr
    int64_t warmup, steps;
};

// Of a step, counted from 1: linear warm-up, then the schedule down to lr * lr_final at the last step.
inline double learning_rate(const Schedule& s, int64_t step) {
    if (step <= s.warmup) return s.lr * double(step) / double(s.warmup);
    const double progress =
        s.steps > s.warmup ? std::min(1.0, double(step - s.warmup) / double(s.steps - s.warmup)) : 1.0;
    double fraction = 1;  // of the way from lr_final up to 1
    if (s.kind == "cosine") fraction = 0.5 * (1 + std::cos(M_PI * progress));
    if (s.kind == "linear") fraction = 1 - progress;
    if (s.kind == "wsd") fraction = std::min(1.0, (1 - progress) / 0.2);
    return s.lr * (s.lr_final + (1 - s.lr_final) * fraction);
}
