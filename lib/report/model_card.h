// model_card.h: the README.md of an exported model: what it is, what it was trained on and how to load it. Used by
// export.h.
#pragma once
#include <filesystem>
#include <numeric>
#include <string>

#include "../base/files.h"
#include "../base/json.h"
#include "../run/build_info.h"
#include "../run/checkpoint.h"
#include "../run/config_files.h"
#include "../data/data_sets.h"
#include "../run/options.h"
#include "../run/train_state.h"

// What a checkpoint's manifest says of its training, an item a line; the data by the names of its files, not by their
// folders. "" for weights alone, and for those that import wrote.
static std::string describe_training(const Checkpoint& checkpoint) {
    const std::string& path = checkpoint.path;
    if (path.empty() || checkpoint.state.find("imported")) return "";
    const TrainState state = read_state(checkpoint);
    const Json& options = checkpoint.state.get("options", path);
    std::string data, loss, begun;
    for (const std::string& set : set_texts(options.string("data", path)))
        data += (data.empty() ? "`" : ", `") + printable(name_of(set)) + "`";
    const LoaderState loader = loader_state(state.loader);  // of these data alone
    if (const uint64_t before = state.tokens - loader.next_sample * loader.seq_len)
        data += format_text(" since token %d, other data before (--allow-new-data)", before);
    const std::string from = options.string("init_from", path);
    const bool is_one = parse_step(name_of(from)) >= 0;  // of a run's checkpoints
    if (!from.empty())
        begun = "- began with the weights of `" + printable(name_of(is_one ? folder_of(from) : from)) + "`\n";
    const std::vector<double>& losses = state.losses.values;
    if (!losses.empty())
        loss = format_text("; loss of the last %s %.4f nats a token", counted(int64_t(losses.size()), "step"),
                           std::accumulate(losses.begin(), losses.end(), 0.0) / double(losses.size()));
    if (const Json* const validation = checkpoint.state.find("validation"))
        loss += format_text("; validation loss %.4f", validation->number("loss", path));
    return begun + format_text("- data: %s\n- training: %s, %d tokens%s\n", data, counted(state.step, "step"),
                               state.tokens, loss);
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
