// verbs.h: the verbs `vocabulary`, `tokenize`, `sample` and `eval`. Used by run_verb() in train_nsa.cu, whose types and
// functions these templates take. with_model(options, weights, use) calls use(model) with a model of these weights.
#pragma once
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "../data/bpe_trainer.h"
#include "../model/arena.h"
#include "config_files.h"
#include "options.h"
#include "prompts.h"
#include "report.h"
#include "training_data.h"

inline TokenizeOptions tokenize_options(const Config& c) {
    TokenizeOptions o;
    static_cast<TokenizeConfig&>(o) = c;
    o.out = c.out;
    o.seed = uint64_t(c.seed);
    o.vocab_dir = c.vocab_dir;
    o.threads = int(c.threads ? c.threads : usable_processors());
    if (!c.tokenizer.empty()) o.tokenizer = c.tokenizer;
    return o;
}

// vocabulary or tokenize.
inline void run_on_texts(const Config& c, Verb verb) {
    if (verb == VOCABULARY) train_vocabulary(tokenize_options(c));
    else tokenize_files(tokenize_options(c));
}

template <class Table, template <class> class Decoder, class WithModel>
void run_sample(Config c, WithModel with_model) {
    const TrainedModel trained = open_trained_model<Table>(c);
    const auto tokenizer = tokenizer_of_model(c);
    const std::vector<std::string> prompts = prompts_of(c);
    with_model(c, *trained.weights, [&](auto& model) {
        if (c.interactive) {
            Decoder<std::decay_t<decltype(model.dev)>> decoder(model, c.seq_len, c.seq_len);
            converse(*tokenizer, c.seq_len, c.tokens, [&](auto& tokens) { return decoder.next(tokens, c); });
            return;
        }
        for (size_t i = 0; i < prompts.size(); i++) {
            if (prompts.size() > 1) std::printf("%s--- prompt %zu of %zu ---\n", i ? "\n" : "", i + 1, prompts.size());
            print_sample(model, *tokenizer, c, c.tokens, false, prompts[i]);
        }
    });
}

template <class Table, template <class> class Activations, class WithModel>
void run_eval(Config c, const std::set<std::string>& given, World& world, WithModel with_model) {
    const TrainedModel trained = open_trained_model<Table>(c);
    if (!given.count("batch")) c.batch = 1;
    const std::unique_ptr<Tokenizer> tokenizer =
        Tokenizer::find(c.tokenizer, c.vocab_dir, c.vocab_size, c.vocab_digest);
    const EvaluationData data = open_evaluation_data(c, trained.folder, world, tokenizer.get());
    const int64_t samples =
        given.count("eval-batches") ? std::min(data.samples(), c.eval_batches * c.batch) : data.samples();
    c.batch = std::min(c.batch, std::max<int64_t>(1, (samples + world.size - 1) / world.size));
    with_model(c, *trained.weights, [&](auto& model) {
        auto& dev = model.dev;
        using Buffers = Activations<std::decay_t<decltype(dev)>>;
        dev.check_shape(shape_of(c, c.batch, c.seq_len));
        require_memory_to_evaluate(c, Buffers::bytes_needed(dev, c, c.batch, c.seq_len, INFERENCE),
                                   dev.available_bytes(world.device_sharers));
        std::string json;
        for (const auto& set : data.sets) {
            Buffers a(dev, c, c.batch, c.seq_len, INFERENCE);
            const int64_t wanted = std::min(samples, set.samples());
            const EvalResult r(evaluate(model, a, *set.loader, wanted, world, tokenizer.get()));
            if (world.rank == 0) print_evaluation(trained.folder, set.name, r, c, set.samples());
            json += evaluation_json(trained.folder, set.name.empty() ? c.val_data : set.name, r, c.seq_len);
        }
        if (!data.choices.items.empty()) {
            const ChoiceResult r = data.choices.result(evaluate_choices(model, data.choices, world));
            if (world.rank == 0) print_choices(trained.folder, data.choices, r);
            json += choice_items_text(data.choices, r);
        }
        if (world.rank == 0 && !c.json.empty()) write_output_file("json", c.json, json);
    });
}
