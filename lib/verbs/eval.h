// eval.h: the verb `eval`. Included by train_nsa.cu behind the model.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>

#include "../../tokenizer.h"
#include "../run/evaluation.h"
#include "../run/memory_needs.h"
#include "../run/training_data.h"
#include "trained_model.h"

inline void run_eval(Config c, World& world) {
    world.watchdog.start(c.stall_timeout, world.size);
    const TrainedModel trained = open_trained_model(c);
    const std::string& folder = trained.checkpoint.folder;
    if (!c.is_given("batch")) c.batch = 1;
    const std::unique_ptr<Tokenizer> tokenizer =
        Tokenizer::find(c.tokenizer, c.vocab_dir, c.vocab_size, c.vocab_digest);
    const EvaluationData data = open_evaluation_data(c, trained.checkpoint, world, tokenizer.get());
    if (world.size > 1)
        require_same(world,
                     "weights: " + weights_digest(trained.checkpoint) + "\n" +
                         same_run_lines(c, binary_digest(), 0, corpus_of(data.sets)),
                     "start all ranks with the same program, options, model and data");
    const int64_t samples =
        c.is_given("eval-batches") ? std::min(data.samples(), c.eval_batches * c.batch) : data.samples();
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
        for (const auto& set : data.sets) {
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
            if (world.rank == 0) print_choices(folder, data.choices, r);
            json += choice_items_text(data.choices, r);
        }
        if (world.rank == 0 && !c.json.empty()) write_output_file("json", c.json, json);
    });
}
