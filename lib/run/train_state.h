// train_state.h: where a run stands, beside its tensors, and how a checkpoint's manifest keeps it. Used by the training
// loop and the checkpoints in train_nsa.cu.
#pragma once
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "../base/json.h"

// The last 128 values of something that should move slowly. Its z-score says how many standard deviations a value lies
// above their mean; llm.c reports the same.
struct OutlierWindow {
    static constexpr size_t SIZE = 128;
    std::vector<double> values;  // oldest first

    // Appends the value, then measures it against the window, itself included. NaN until the window is full.
    double z_score(double value) {
        values.push_back(value);
        if (values.size() <= SIZE) return std::numeric_limits<double>::quiet_NaN();
        values.erase(values.begin());
        double mean = 0, variance = 0;
        for (double v : values) mean += v / double(SIZE);
        for (double v : values) variance += (v - mean) * (v - mean) / double(SIZE);
        return variance > 0 ? (value - mean) / std::sqrt(variance) : 0;
    }
};

struct Validation {
    int64_t step = -1;  // whose weights were validated; -1: none yet
    double loss = 0;
    std::string data;  // what they were validated on
};

struct TrainState {
    int64_t step = 0;                     // finished optimiser steps
    uint64_t tokens = 0;                  // that they were given, whatever --total-batch and --data were meanwhile
    int64_t last_update = 0;              // the last of them that changed the weights
    int64_t bad_steps = 0;                // steps in a row, up to now, whose loss or gradient was not finite
    std::array<uint64_t, 4> loader = {};  // the data loader's four integers
    std::vector<std::string> shards;      // of a checkpoint: those it was trained on, with their paths
    OutlierWindow losses, norms;
    Validation validation;         // the last; not resumed: it is of no later step
    Validation first_validation;   // of the run, on the same data
    double first_loss = NAN;       // of the run's first step on this data
    bool was_validated = false;    // of a checkpoint: its weights were
    bool left_validation = false;  // a validation of these weights was begun and not finished
};

// The manifest's state; options: the run's own, as a JSON object; shards: those it trains on. Some JSON readers hold
// integers as doubles, so the loader's four are strings.
std::string state_json(const TrainState& s, const std::string& options, int ranks,
                       const std::vector<std::string>& shards = {});

TrainState read_state(const Checkpoint& checkpoint);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "train_state.cpp"
#endif
