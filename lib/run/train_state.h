// train_state.h: where a run stands, beside its tensors, and how a checkpoint's manifest keeps it. Used by the training
// loop and the checkpoints in train_nsa.cu.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "../base/json.h"
#include "../data/data_sets.h"

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
    LoaderState loader = {};              // where the data loader stands
    std::vector<std::string> shards;      // of a checkpoint: those it was trained on, with their paths
    Validation validation;                // the last; not resumed: it is of no later step
    bool was_validated = false;           // of a checkpoint: its weights were
    bool validation_interrupted = false;  // a validation of these weights was begun and not finished
};

// The manifest's state; options: the run's own, as a JSON object; shards: those it trains on. JSON's integers are
// int64 here, so the loader's four are written as such.
inline std::string state_json(const TrainState& s, const std::string& options, int ranks,
                              const std::vector<std::string>& shards = {}) {
    std::string text = format_text("{\"tokens\": %d, \"last_update\": %d, \"bad_steps\": %d, \"ranks\": %d", s.tokens,
                                   s.last_update, s.bad_steps, ranks);
    const LoaderState& l = s.loader;
    const std::vector<int64_t> loader = {int64_t(l.seed), int64_t(l.seq_len), int64_t(l.corpus),
                                         int64_t(l.next_sample)};
    text += ",\n \"loader\": " + Json::list(loader).to_text() + ",\n \"shards\": [";
    for (size_t i = 0; i < shards.size(); i++) text += (i ? ",\n  " : "") + json_quote(shards[i], true);
    text += "]";
    const Validation& v = s.validation;
    if (v.step == s.step && std::isfinite(v.loss))  // see best_step
        text += ",\n \"validation\": " + Json{{"loss", {v.loss, "%.17g"}}, {"data", v.data}}.to_text();
    if (s.validation_interrupted) text += ",\n \"left_validation\": true";
    return text + ",\n \"options\": " + options + "}";
}

inline TrainState read_state(const Checkpoint& checkpoint) {
    const std::string& path = checkpoint.path;
    if (checkpoint.state.find("imported"))
        fail("%s: import wrote weights alone, no state to resume: begin a run with them by --init-from", path);
    TrainState state;
    state.step = checkpoint.step;
    state.last_update = checkpoint.state.integer("last_update", path);
    state.bad_steps = checkpoint.state.integer("bad_steps", path);
    std::vector<uint64_t> loader;
    for (const Json& number : checkpoint.state.array("loader", path))
        loader.push_back(uint64_t(number.integer(path + ": loader")));
    if (loader.size() != 4) fail("%s: loader has %d integers, expected 4", path, loader.size());
    state.loader = {loader[0], loader[1], loader[2], loader[3]};
    state.tokens = uint64_t(checkpoint.state.integer("tokens", path));
    for (const Json& name : checkpoint.state.array("shards", path))
        state.shards.push_back(name.string(path + ": shards"));
    state.was_validated = checkpoint.state.find("validation");
    state.validation_interrupted = checkpoint.state.find("left_validation");
    return state;
}
