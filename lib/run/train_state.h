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
#include "../base/util.h"

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

// The last validation.
struct Validation {
    int64_t step = -1;  // whose weights were validated; -1: none yet
    double loss = 0;
    uint64_t corpus = 0, tokens = 0;  // what they were validated on
};

struct TrainState {
    int64_t step = 0;                     // finished optimiser steps
    uint64_t tokens = 0;                  // that they were given, whatever --total-batch and --data were meanwhile
    int64_t last_update = 0;              // the last of them that changed the weights
    int64_t bad_steps = 0;                // steps in a row, up to now, whose loss or gradient was not finite
    std::array<uint64_t, 4> loader = {};  // the data loader's four integers
    std::vector<std::string> shards;      // of a checkpoint: those it was trained on, with their paths
    OutlierWindow losses, norms;
    Validation validation;         // not resumed: it is of no later step
    bool was_validated = false;    // of a checkpoint: its weights were
    bool left_validation = false;  // a validation of these weights was begun and not finished
};

inline std::string numbers_json(const std::vector<double>& values) {
    std::string text = "[";
    for (double v : values) text += format_text("%s%.17g", text.size() > 1 ? ", " : "", v);
    return text + "]";
}

// The manifest's state; options: the run's own, as a JSON object; shards: those it trains on. Some JSON readers hold
// integers as doubles, so the loader's four are strings.
inline std::string state_json(const TrainState& s, const std::string& options, int ranks,
                              const std::vector<std::string>& shards = {}) {
    std::string text =
        format_text("{\"tokens\": %llu, \"last_update\": %lld, \"bad_steps\": %lld, \"ranks\": %d",
                    (unsigned long long)s.tokens, (long long)s.last_update, (long long)s.bad_steps, ranks);
    text += ",\n \"loader\": [";
    for (size_t i = 0; i < s.loader.size(); i++)
        text += format_text("%s\"%llu\"", i ? ", " : "", (unsigned long long)s.loader[i]);
    text += "],\n \"shards\": [";
    for (size_t i = 0; i < shards.size(); i++) text += (i ? ",\n  " : "") + json_quote(shards[i], true);
    text += "],\n \"losses\": " + numbers_json(s.losses.values) + ",\n \"norms\": " + numbers_json(s.norms.values);
    if (s.validation.step == s.step && std::isfinite(s.validation.loss))  // see best_step
        text +=
            format_text(",\n \"validation\": {\"loss\": %.17g, \"data\": \"%016llx, %llu tokens\"}", s.validation.loss,
                        (unsigned long long)s.validation.corpus, (unsigned long long)s.validation.tokens);
    if (s.left_validation) text += ",\n \"left_validation\": true";
    return text + ",\n \"options\": " + options + "}";
}

inline uint64_t read_loader_integer(const std::string& text, const std::string& path, size_t i) {
    char* end = nullptr;
    errno = 0;
    const uint64_t value = std::strtoull(text.c_str(), &end, 10);
    if (text.empty() || text[0] < '0' || text[0] > '9' || *end || errno)
        fail("%s: loader[%zu] is %s, expected an integer", path.c_str(), i, json_quote(text).c_str());
    return value;
}

inline void read_window(OutlierWindow& window, const Manifest& manifest, const char* name) {
    const std::string& path = manifest.path;
    for (const Json& value : manifest.state.array(name, path))
        window.values.push_back(value.number(path + ": " + name));
    if (window.values.size() > OutlierWindow::SIZE)
        fail("%s: %s has %zu values, expected at most %zu", path.c_str(), name, window.values.size(),
             OutlierWindow::SIZE);
}

inline TrainState read_state(const Manifest& manifest) {
    const std::string& path = manifest.path;
    if (manifest.state.find("imported"))
        fail("%s: import wrote weights alone, no state to resume: begin a run with them by --init-from", path.c_str());
    TrainState state;
    state.step = manifest.step;
    state.last_update = manifest.state.integer("last_update", path);
    state.bad_steps = manifest.state.integer("bad_steps", path);
    const std::vector<Json>& loader = manifest.state.array("loader", path);
    if (loader.size() != state.loader.size())
        fail("%s: loader has %zu integers, expected %zu", path.c_str(), loader.size(), state.loader.size());
    for (size_t i = 0; i < loader.size(); i++)
        state.loader[i] = read_loader_integer(loader[i].string(path + ": loader"), path, i);
    state.tokens = uint64_t(manifest.state.integer("tokens", path));
    for (const Json& name : manifest.state.array("shards", path))
        state.shards.push_back(name.string(path + ": shards"));
    state.was_validated = manifest.state.find("validation");
    state.left_validation = manifest.state.find("left_validation");
    read_window(state.losses, manifest, "losses");
    read_window(state.norms, manifest, "norms");
    return state;
}
