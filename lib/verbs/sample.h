// sample.h: the verb `sample`, and the samples of a run. Included by train_nsa.cu behind the model.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../run/prompts.h"
#include "trained_model.h"

// Prints and returns a sample: the prompt, or the beginning of a new document, and what the model makes of it.
template <class Dev>
std::string print_sample(Model<Dev>& model, const Tokenizer& tokenizer, const SampleConfig& c, int64_t count,
                         bool in_training, const std::string& prompt) {
    std::vector<int32_t> ids = {tokenizer.end_of_text};
    for (const uint16_t id : tokenizer.encode(prompt)) ids.push_back(id);
    if (!in_training) warn_beyond_trained(int64_t(ids.size()), count, model.config.seq_len);
    TokenPrinter printer = {tokenizer, in_training || c.past_end, prompt};
    generate(
        model, ids, count, c, [&](int32_t token) { return printer.print(token) && stop_signal == 0; },
        [&] { printer.end(); });
    return printer.all;
}

inline void run_sample(Config c, World& world) {
    const TrainedModel trained = open_trained_model(c);
    const auto tokenizer = find_tokenizer(c);
    const std::vector<std::string> prompts = read_prompts(c);
    with_trained_model(c, *trained.weights, world, [&](auto& model) {
        if (c.interactive) {
            Decoder decoder(model, c.seq_len, c.seq_len);
            converse(*tokenizer, c.seq_len, c.tokens, [&](auto& tokens) { return decoder.next(tokens, c); });
            return;
        }
        for (size_t i = 0; i < prompts.size(); i++) {
            if (prompts.size() > 1) print("%s--- prompt %d of %d ---\n", i ? "\n" : "", i + 1, prompts.size());
            print_sample(model, *tokenizer, c, c.tokens, false, prompts[i]);
        }
    });
}
