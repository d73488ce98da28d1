// eval.h: the verb `eval`. Included by train_nsa.cu behind the model.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <type_traits>

#include "../../tokenizer.h"
#include "../run/evaluation.h"
#include "../run/memory_needs.h"
#include "../run/training_data.h"
#include "../base/json.h"
#include "../data/synthetic.h"
#include "trained_model.h"

// What is printed of a set. samples: how many it has.
inline void print_evaluation(const std::string& checkpoint, const std::string& set, const EvalResult& r,
                             const Config& c, int64_t samples) {
    print("%s on %s%s%d tokens (%d of %d samples of %d): loss %.4f, perplexity %.3f", printable(checkpoint),
          printable(set), set.empty() ? "" : ", ", r.tokens, r.samples, samples, c.seq_len, r.loss, std::exp(r.loss));
    if (r.answers) print(", recall loss %.4f (chance %.4f)", r.answer_loss, std::log(SYNTHETIC_ALPHABET));
    if (r.bytes) print(", bits per byte %.4f\n", r.bits_per_byte());
    else print("; bits per byte are unknown without --vocab-dir\n");
    print("  tokens in sight        loss      tokens\n");
    for (size_t i = 0; i < POSITION_RANGES && r.range_tokens[i]; i++) {
        const size_t first = range_begin(i) + 1, last = std::min(range_begin(i + 1), size_t(c.seq_len));
        print("  %15s  %10.4f  %10d%s\n", format_text("%d..%d", first, last), r.range_loss[i], r.range_tokens[i],
              first > size_t(c.trained_seq_len)  ? "  beyond the trained length"
              : last > size_t(c.trained_seq_len) ? "  in part beyond the trained length"
                                                 : "");
    }
}

// The same as a line of JSON.
inline std::string evaluation_json(const std::string& checkpoint, const std::string& set, const EvalResult& r,
                                   int64_t seq_len) {
    Json line = {{"checkpoint", Json(checkpoint, true)},
                 {"set", Json(set, true)},
                 {"seq_len", seq_len},
                 {"samples", r.samples},
                 {"tokens", r.tokens},
                 {"loss", {r.loss, "%.9g"}},
                 {"perplexity", {std::exp(r.loss), "%.9g"}}};
    if (r.bytes) line.add("bits_per_byte", {r.bits_per_byte(), "%.9g"});
    if (r.answers) line.add("recall_loss", {r.answer_loss, "%.9g"});
    Json ranges(Json::Array);
    for (size_t i = 0; i < POSITION_RANGES && r.range_tokens[i]; i++)
        ranges.items.push_back({{"first", range_begin(i) + 1},
                                {"last", std::min(range_begin(i + 1), size_t(seq_len))},
                                {"tokens", r.range_tokens[i]},
                                {"loss", {r.range_loss[i], "%.9g"}}});
    return line.add("by_tokens_in_sight", ranges).to_text() + "\n";
}

inline std::string choices_json(const std::string& checkpoint, const std::string& file, const ChoiceResult& r) {
    const Json line = {{"checkpoint", Json(checkpoint, true)},
                       {"set", Json(file, true)},
                       {"items", r.items},
                       {"accuracy_per_token", {r.accuracy_per_token(), "%.9g"}},
                       {"accuracy", {r.accuracy(), "%.9g"}}};
    return line.to_text() + "\n";
}

inline void run_eval(Config c, World& world) {
    world.watchdog.start(c.stall_timeout, world.size);
    const TrainedModel trained = open_trained_model(c);
    const std::string& folder = trained.checkpoint.folder;
    if (!c.is_given("batch")) c.batch = 1;
    const std::unique_ptr<Tokenizer> tokenizer =
        Tokenizer::find(c.tokenizer, c.vocab_dir, c.vocab_size, c.vocab_digest);
    const TrainingData data = open_evaluation_data(c, trained.checkpoint, world, tokenizer.get());
    if (world.size > 1)
        require_same(world,
                     "weights: " + weights_digest(trained.checkpoint) + "\n" +
                         same_run_lines(c, binary_digest(), 0, corpus_of(data.val)),
                     "start all ranks with the same program, options, model and data");
    int64_t samples = 0;  // of the largest set
    for (const auto& set : data.val) samples = std::max(samples, set.samples());
    if (c.is_given("eval-batches")) samples = std::min(samples, c.eval_batches * c.batch);
    c.batch = std::min(c.batch, std::max<int64_t>(1, (samples + world.size - 1) / world.size));
    with_trained_model(c, *trained.weights, world, [&](auto& model) {
        auto& dev = model.dev;
        model.watchdog = &world.watchdog;
        model.step = -1;  // of no step
        // No rank is further than a micro-batch ahead, so that one that stands still is found out.
        const auto wait_for_others = [&] { return world.barrier(), false; };
        const auto stop_watching = [&] { model.note_phase(nullptr); };  // whoever reads the terminal may take long
        using EvalActivations = Activations<std::decay_t<decltype(dev)>>;
        dev.check_shape(shape_of(c, c.batch, c.seq_len));
        require_memory_for(EvalActivations::bytes_needed(dev, c, c.batch, c.seq_len, INFERENCE),
                           dev.available_bytes(world.device_sharers),
                           format_text("eval: --batch %d with sequences of %d", c.batch, c.seq_len),
                           c.batch > 1 ? "choose a smaller --batch" : "choose a smaller --seq-len");
        std::string json;
        for (const auto& set : data.val) {
            EvalActivations a(dev, c, c.batch, c.seq_len, INFERENCE);
            const int64_t wanted = std::min(samples, set.samples());
            const EvalResult r(evaluate(model, a, *set.loader, wanted, world, tokenizer.get(), wait_for_others));
            stop_watching();
            if (world.rank == 0) print_evaluation(folder, set.name, r, c, set.samples());
            json += evaluation_json(folder, set.name.empty() ? c.val_data : set.name, r, c.seq_len);
        }
        if (!data.choices.items.empty()) {
            const ChoiceResult r = data.choices.result(evaluate_choices(model, data.choices, world, wait_for_others));
            stop_watching();
            if (world.rank == 0)
                print("%s on %s: %s\n", printable(folder), printable(data.choices.file), describe_choices(r));
            json += choices_json(folder, data.choices.file, r);
        }
        if (world.rank == 0 && !c.json.empty()) write_output_file("json", c.json, json);
    });
}
