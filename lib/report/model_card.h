// model_card.h: the README.md of an exported model: what it is, how long it was trained and how to load it. Used by
// export.h.
#pragma once
#include <filesystem>
#include <string>

#include "../base/files.h"
#include "../base/json.h"
#include "../run/build_info.h"
#include "../run/checkpoint.h"
#include "../run/config_files.h"
#include "../run/options.h"
#include "../run/train_state.h"

// What a checkpoint's manifest says of its training. "" for weights alone, and for those that import wrote.
static std::string describe_training(const Checkpoint& checkpoint) {
    const std::string& path = checkpoint.path;
    if (path.empty() || checkpoint.state.find("imported")) return "";
    const TrainState state = read_state(checkpoint);
    std::string loss;
    if (const Json* const validation = checkpoint.state.find("validation"))
        loss = format_text("; validation loss %.4f nats a token", validation->number("loss", path));
    return format_text("- training: %s, %d tokens%s\n", counted(state.step, "step"), state.tokens, loss);
}

// c: the options of the model; folder: where the export goes, whose real name is the model's.
inline std::string model_card(const Config& c, const Checkpoint& checkpoint, const std::string& folder,
                              int64_t parameters) {
    const std::string name = std::filesystem::weakly_canonical(absolute_path(folder)).filename().string(),
                      attention = has_layers(c, NSA_LAYER) ? "Native Sparse Attention (arXiv 2502.11089)"
                                                           : "attention of the kind " + c.attention,
                      tokenizer = c.tokenizer == "bytes" ? "PreTrainedTokenizerFast" : "GPT2TokenizerFast";
    return "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# " + printable(name) +
           "\nA language model with " + attention + ", trained and exported by train_nsa " + version_text() +
           ". It continues text and follows no instructions.\nNo licence is stated: whoever publishes the weights "
           "chooses one that the training text allows.\n\n" +
           format_text("- %d parameters; config.json has the shape\n- tokenizer: %s, %d tokens; sequences of %d\n",
                       parameters, c.tokenizer, c.vocab_size, c.seq_len) +
           describe_training(checkpoint) + "\n```python\nfrom transformers import AutoModelForCausalLM, " + tokenizer +
           "\ntokenizer = " + tokenizer + ".from_pretrained(" + json_quote(name, true) +
           ")\nmodel = AutoModelForCausalLM.from_pretrained(" + json_quote(name, true) +
           ", trust_remote_code=True)\n```\n`trust_remote_code` runs modeling_nsa.py of this folder: read it "
           "first.\n";
}
