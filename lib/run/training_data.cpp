// training_data.cpp: the functions of training_data.h.
#include "training_data.h"

LoaderOptions loader_options(const ModelConfig& c, const World& world, const char* name, bool shuffle) {
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

// val: the option. synthetic(): the source that stands for that word.
static std::vector<ValidationSet> open_validation(const std::string& val, LoaderOptions options,
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

TrainingData open_training_data(const std::string& train, const std::string& val, uint64_t val_tokens,
                                LoaderOptions options) {
    TrainingData data;
    std::vector<TokenSource> sources;
    if (train == "synthetic") {
        sources = {synthetic_source(options.seed, SYNTHETIC_TOKENS, 0)};
    } else {
        options.sets = weighted_sets(train, "--data");
        const std::vector<std::vector<std::string>> files = files_of(options.sets, "--data");
        for (size_t set = 0; set < files.size(); set++)
            for (const std::string& file : files[set]) sources.push_back(open_shard(file, set));
    }
    options.name = "--data";
    options.shuffle = true;
    data.train = std::make_unique<DataLoader>(std::move(sources), options);
    data.val = open_validation(val.empty() && train == "synthetic" ? "synthetic" : val, options,
                               [&] { return synthetic_validation(options.seed, val_tokens, options.seq_len); });
    for (const auto& set : data.val) check_disjoint(data.train->files(), set.loader->files());
    data.train->scan_shards();
    for (const auto& set : data.val) set.loader->scan_shards();
    return data;
}

// --hellaswag, with a warning where rows do not fit into what the model reads at a time.
static ChoiceTask open_choices(const TrainConfig& c, const World& world, const Tokenizer* tokenizer) {
    ChoiceTask task = read_choices(c.hellaswag, tokenizer, int(c.vocab_size), size_t(c.seq_len));
    if (world.rank == 0) warn_of_end_of_text({read_file(c.hellaswag)}, "--hellaswag " + c.hellaswag);
    if (task.cut && world.rank == 0)
        complain(
            "--hellaswag %s: %d of %d rows are longer than --seq-len %d and lost their beginning, %d "
            "of them down into the ending that is scored",
            c.hellaswag, task.cut, task.rows.size(), c.seq_len, task.cut_endings);
    return task;
}

TrainingData open_training_data(const TrainConfig& c, const World& world, const Tokenizer* tokenizer) {
    const uint64_t val_tokens = uint64_t(c.eval_batches) * uint64_t(c.total_batch);
    LoaderOptions options = loader_options(c, world, "--data", true);
    TrainingData data = open_training_data(c.data, c.val_data, val_tokens, options);
    data.train->require_global_batch(uint64_t(c.total_batch / c.seq_len));
    if (!c.hellaswag.empty()) data.choices = open_choices(c, world, tokenizer);
    return data;
}

void resume_data(DataLoader& loader, const TrainConfig& c, const TrainState& state, bool says) {
    const LoaderState saved = loader_state(state.loader);
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
static TokenSource text_source(const std::string& file, const Tokenizer& tokenizer, bool says) {
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

EvaluationData open_evaluation_data(const Config& c, const Checkpoint& checkpoint, const World& world,
                                    const Tokenizer* tokenizer) {
    if (c.val_data.empty() && c.hellaswag.empty() && c.text.empty())
        fail_usage(
            "eval: --val-data is missing: a glob of validation shards, in quotes, or synthetic; or --text FILE..., or "
            "--hellaswag FILE");
    require_output_file("json", c.json);
    require_no_bytes(c);
    EvaluationData data;
    LoaderOptions options = loader_options(c, world, "--val-data", false);
    options.tail = true;
    data.sets = open_validation(c.val_data, options, [&] {
        const TrainConfig trained = trained_options(c, checkpoint);
        const uint64_t wanted = uint64_t(trained.eval_batches * trained.total_batch);
        return synthetic_validation(uint64_t(trained.seed), wanted, c.seq_len);
    });
    for (const std::string& file : c.text) {
        if (!tokenizer) fail_usage("--text %s: --vocab-dir is missing, which has GPT-2's tokens", file);
        if (file == "-" && world.size > 1)
            fail_usage("--text -: of several ranks only the first has stdin: give a file");
        options.name = "--text " + file;
        data.sets.push_back(
            {file, std::make_unique<DataLoader>(
                       std::vector<TokenSource>{text_source(file, *tokenizer, world.rank == 0)}, options)});
    }
    if (!c.hellaswag.empty()) data.choices = open_choices(c, world, tokenizer);
    return data;
}
