// training_data.h: the data that a run trains on and is validated on, and those that the verb `eval` measures, as the
// options name them. Used by train_nsa.cu.
#pragma once
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../base/random.h"
#include "../../dataloader.h"
#include "../../tokenizer.h"
#include "../base/profile.h"
#include "../base/progress.h"
#include "../data/data_sets.h"
#include "../data/multiple_choice.h"
#include "../data/token_source.h"
#include "../data/tokenize.h"
#include "config_files.h"
#include "options.h"
#include "train_state.h"
#include "world.h"

LoaderOptions loader_options(const ModelConfig& c, const World& world, const char* name, bool shuffle);

// A set of --val-data.
struct ValidationSet {
    std::string name;  // "": it is the only one
    std::unique_ptr<DataLoader> loader;

    int64_t samples() const { return int64_t(loader->samples_per_epoch()); }
};

// Of all sets together; 0: there are none.
inline uint64_t corpus_of(const std::vector<ValidationSet>& sets) {
    uint64_t hash = 0;
    for (const auto& set : sets) hash = random_bits(hash, set.loader->state().corpus, 0);
    return hash;
}

struct TrainingData {
    std::unique_ptr<DataLoader> train;
    std::vector<ValidationSet> val;  // the first decides; may be empty
    ChoiceTask choices;              // --hellaswag

    std::string describe_val() const {
        std::string text;
        for (const auto& set : val)
            text += (text.empty() ? "" : "\n        ") + set.name + (set.name.empty() ? "" : ": ") +
                    printable(set.loader->describe());
        return text;
    }
};

// train, val: the options --data and --val-data. val "": none, or the synthetic corpus' own. val_tokens: of that
// validation.
TrainingData open_training_data(const std::string& train, const std::string& val, uint64_t val_tokens,
                                LoaderOptions options);

// What the options of a run ask for. tokenizer: null where GPT-2's vocabulary is not known.
TrainingData open_training_data(const TrainConfig& c, const World& world, const Tokenizer* tokenizer);

// A resume: the data go on where the checkpoint was written, with --allow-new-data on other shards too. says: on the
// rank that prints.
void resume_data(DataLoader& loader, const TrainConfig& c, const TrainState& state, bool says);

// What `eval` measures on, each where it was asked for.
struct EvaluationData {
    std::vector<ValidationSet> sets;
    ChoiceTask choices;

    // Of the largest set.
    int64_t samples() const {
        int64_t largest = 0;
        for (const auto& set : sets) largest = std::max(largest, set.samples());
        return largest;
    }
};

// checkpoint: whose training says what "synthetic" is: the samples that the run itself was validated on.
EvaluationData open_evaluation_data(const Config& c, const Checkpoint& checkpoint, const World& world,
                                    const Tokenizer* tokenizer);

// All ranks have their next B samples, or all fail with the first one's error.
inline void read_samples(DataLoader& loader, const World& world, std::vector<int32_t>& inputs,
                         std::vector<int32_t>& targets, int B, uint8_t* answer = nullptr) {
    const ProfileRange range("data");
    fail_together(world, error_of([&] { loader.next_batch(inputs.data(), targets.data(), B, answer); }));
}

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "training_data.cpp"
#endif
