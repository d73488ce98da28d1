// schedule.h: the learning rate of each step. Used by the training loop in train_nsa.cu and when a run resumes.
#pragma once
#include <algorithm>
#include <cmath>

#include "options.h"

// Of a step, counted from 1: linear warm-up, then the schedule down to lr * lr_final at the last step.
inline double learning_rate(const Config& c, int64_t step) {
    if (step <= c.warmup) return c.lr * double(step) / double(c.warmup);
    const double progress =
        c.steps > c.warmup ? std::min(1.0, double(step - c.warmup) / double(c.steps - c.warmup)) : 1.0;
    double fraction = 1;  // of the way from lr_final up to 1
    if (c.schedule == "cosine") fraction = 0.5 * (1 + std::cos(M_PI * progress));
    if (c.schedule == "linear") fraction = 1 - progress;
    if (c.schedule == "wsd") fraction = std::min(1.0, (1 - progress) / 0.2);
    return c.lr * (c.lr_final + (1 - c.lr_final) * fraction);
}
