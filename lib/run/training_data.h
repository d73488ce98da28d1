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

inline LoaderOptions loader_options(const ModelConfig& c, const World& world, const char* name, bool shuffle) {
    LoaderOptions o;
    o.name = name;
    o.seq_len = int(c.seq_len);
    o.vocab_size = int(c.vocab_size);
    o.vocab_digest = c.vocab_digest;
    o.seed = uint64_t(c.seed);
    o.shuffle = shuffle;
    o.rank = world.rank;
    o.world_size = world.size;
    return o;
}

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

// What a run learns from and is validated on, or what `eval` measures on, which trains on nothing.
struct TrainingData {
    std::unique_ptr<DataLoader> train;
    std::vector<ValidationSet> val;  // the first decides; may be empty
    ChoiceTask choices;              // --hellaswag
};

// val: the option. synthetic(): the source that stands for that word.
inline std::vector<ValidationSet> open_validation(const std::string& val, LoaderOptions options,
                                                  const std::function<TokenSource()>& synthetic) {
    options.name = "--val-data";
    options.shuffle = false;
    options.sets = {{}};
    std::vector<ValidationSet> all;
    if (val.empty()) return all;
    for (const DataSet& set : named_sets(val, "--val-data")) {
        std::vector<TokenSource> sources;
        if (set.pattern == "synthetic") sources = {synthetic()};
        else sources = open_shards(shard_files(set.pattern, "--val-data"));
        all.push_back({set.name, std::make_unique<DataLoader>(std::move(sources), options)});
    }
    return all;
}

// --hellaswag, with a warning where rows do not fit into what the model reads at a time.
inline ChoiceTask open_choices(const TrainConfig& c, const World& world, const Tokenizer* tokenizer) {
    ChoiceTask task = read_choices(c.hellaswag, tokenizer, int(c.vocab_size), size_t(c.seq_len));
    if (world.rank == 0) warn_of_end_of_text({read_file(c.hellaswag)}, "--hellaswag " + c.hellaswag);
    if (task.cut && world.rank == 0)
        complain(
            "--hellaswag %s: %d of %d rows are longer than --seq-len %d and lost their beginning, %d "
            "of them down into the ending that is scored",
            c.hellaswag, task.cut, task.rows.size(), c.seq_len, task.cut_endings);
    return task;
}

// What the options of a run ask for. tokenizer: null where GPT-2's vocabulary is not known.
inline TrainingData open_training_data(const TrainConfig& c, const World& world, const Tokenizer* tokenizer) {
    TrainingData data;
    LoaderOptions options = loader_options(c, world, "--data", true);
    std::vector<TokenSource> sources;
    const bool synthetic = c.data == "synthetic";
    if (synthetic) {
        sources = {synthetic_source(options.seed, SYNTHETIC_TOKENS, 0)};
    } else {
        options.sets = weighted_sets(c.data, "--data");
        const std::vector<std::vector<std::string>> files = files_of(options.sets, "--data");
        for (size_t set = 0; set < files.size(); set++)
            for (const std::string& file : files[set]) sources.push_back(open_shard(file, set));
    }
    data.train = std::make_unique<DataLoader>(std::move(sources), options);
    data.val = open_validation(c.val_data.empty() && synthetic ? "synthetic" : c.val_data, options, [&] {
        return synthetic_validation(options.seed, uint64_t(c.eval_batches * c.total_batch), options.seq_len);
    });
    for (const auto& set : data.val) check_disjoint(data.train->files(), set.loader->files());
    data.train->require_global_batch(uint64_t(c.total_batch / c.seq_len));
    if (!c.hellaswag.empty()) data.choices = open_choices(c, world, tokenizer);
    return data;
}

// A resume: the data go on where the checkpoint was written, with --allow-new-data on other shards too. says: on the
// rank that prints.
inline void resume_data(DataLoader& loader, const TrainConfig& c, const TrainState& state, bool says) {
    const LoaderState& saved = state.loader;
    if (!c.allow_new_data || loader.has_same_corpus(saved)) return loader.restore(saved);
    loader.restore_other_corpus(saved);
    const std::string changes = changed_shards(state.shards, loader.files());
    if (says)
        print("resume: new data: %s; all of it in a new order from now on, after %d samples of the old one\n",
              state.shards.empty() ? "the checkpoint names no shards of its own"
              : changes.empty()    ? "the same files with other contents or weights"
                                   : printable(changes),
              saved.next_sample);
}

// --text: the documents of a file, each after an end-of-text. says: on the rank that prints.
inline TokenSource text_source(const std::string& file, const Tokenizer& tokenizer, bool says) {
    const Progress progress("reading " + file);
    std::vector<uint16_t> tokens;
    Encoder encoder(tokenizer);
    const Documents of_file = read_documents(file, "eval --text");
    if (says) warn_of_documents(of_file, "--text " + file);
    for (const std::string& document : of_file.texts) {
        if (document.empty()) continue;
        tokens.push_back(tokenizer.end_of_text);
        encoder.append(document, tokens);
    }
    if (tokens.size() < 2) fail("--text %s holds no text", file);
    return memory_source(file, std::move(tokens), {}, tokenizer.vocab_size());
}

// For `eval`. checkpoint: whose training says what "synthetic" is: the samples that the run itself was validated on.
inline TrainingData open_evaluation_data(const Config& c, const Checkpoint& checkpoint, const World& world,
                                         const Tokenizer* tokenizer) {
    if (c.val_data.empty() && c.hellaswag.empty() && c.text.empty())
        fail_usage(
            "eval: --val-data is missing: a glob of validation shards, in quotes, or synthetic; or --text FILE..., or "
            "--hellaswag FILE");
    require_output_file("json", c.json);
    require_no_bytes(c);
    TrainingData data;
    LoaderOptions options = loader_options(c, world, "--val-data", false);
    options.tail = true;
    data.val = open_validation(c.val_data, options, [&] {
        const std::string& path = checkpoint.path;
        if (path.empty())
            fail("%s/manifest.json is missing, which says what the run was validated on: give shards to --val-data",
                 checkpoint.folder);
        const Json& then = checkpoint.state.get("options", path);
        const int64_t wanted = then.integer("eval_batches", path) * then.integer("total_batch", path);
        return synthetic_validation(uint64_t(then.integer("seed", path)), uint64_t(wanted), c.seq_len);
    });
    for (const std::string& file : c.text) {
        if (!tokenizer) fail_usage("--text %s: --vocab-dir is missing, which has GPT-2's tokens", file);
        if (file == "-" && world.size > 1)
            fail_usage("--text -: of several ranks only the first has stdin: give a file");
        options.name = "--text " + file;
        data.val.push_back(
            {file, std::make_unique<DataLoader>(
                       std::vector<TokenSource>{text_source(file, *tokenizer, world.rank == 0)}, options)});
    }
    if (!c.hellaswag.empty()) data.choices = open_choices(c, world, tokenizer);
    return data;
}

// All ranks have their next B samples, or all fail with the first one's error.
inline void read_samples(DataLoader& loader, const World& world, std::vector<int32_t>& inputs,
                         std::vector<int32_t>& targets, int B, uint8_t* answer = nullptr) {
    const ProfileRange range("data");
    fail_together(world, error_of([&] { loader.next_batch(inputs.data(), targets.data(), B, answer); }));
}
