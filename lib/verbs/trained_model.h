// trained_model.h: the model that --from names, for the verbs that use one. Included by train_nsa.cu behind the model.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "../../tokenizer.h"
#include "../run/config_files.h"
#include "model_files.h"

struct TrainedModel {
    Checkpoint checkpoint;
    std::unique_ptr<SafeTensors> weights;
};

// The model that --from names; c gets its options. A run that goes on training removes old checkpoints (--keep): where
// one goes while it is read here, the newest of then takes its place.
inline TrainedModel open_trained_model(Config& c) {
    while (true) {
        Config trained = c;
        Checkpoint checkpoint = chosen_checkpoint(c);
        const std::string folder = checkpoint.folder;
        try {
            read_trained_config(trained, folder);
            TrainedModel model = {std::move(checkpoint), open_weights(folder, TensorTable(trained).specs)};
            c = trained;
            return model;
        } catch (const Error&) {
            if (c.at_step != "last" || folder == c.from || !is_gone(folder)) throw;
        }
    }
}

// Its vocabulary, for a verb that cannot do without. c: its options.
inline std::unique_ptr<Tokenizer> find_tokenizer(const Config& c) {
    std::unique_ptr<Tokenizer> tokenizer = Tokenizer::find(c.tokenizer, c.vocab_dir, c.vocab_size, c.vocab_digest);
    if (!tokenizer) fail_usage("%s: --vocab-dir is missing: this model writes gpt2 tokens", c.verb);
    return tokenizer;
}

// Calls use(model) with a model of these options and weights.
template <class Use>
void with_trained_model(const Config& c, const SafeTensors& weights, World& world, Use use) {
    with_engine(choose_device(c, world, search_gpus()), world, [&](auto& dev, const Machine&) {
        Model model(dev, c, false);
        read_parameters(model, weights);
        use(model);
    });
}
