// model_card.h: the README.md of an exported model: its shape, its training and its losses, from the checkpoint's own
// files, and the command that trains it again. Used by export.h.
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
#include "../run/report.h"
#include "../run/train_state.h"

// 123,296,256
inline std::string with_commas(int64_t n) {
    std::string text = std::to_string(n);
    for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
    return text;
}

// A value of an option as strangers may see it: of paths the last name, not where it lies; of a checkpoint in a run's
// folder the run's too.
static std::string published(const Option& o, const std::string& value) {
    if (is_choice(o.name, "data|val-data")) {
        std::string names;
        for (const std::string& set : set_texts(value)) {
            const size_t slash = set.rfind('/'), equals = set.find('=');
            const bool named = !std::strcmp(o.name, "val-data") && equals < slash;
            names += "," +
                     (slash == std::string::npos ? set : set.substr(0, named ? equals + 1 : 0) + set.substr(slash + 1));
        }
        return names.substr(1);
    }
    if (!is_choice(o.name, "vocab-dir|hellaswag|init-from")) return value;
    const std::string name = name_of(value);
    return step_of_name(name) < 0 ? name : name_of(folder_of(value)) + "/" + name;
}

// The command of the run, by what differs from its preset. then: the options that a checkpoint holds.
static std::string command_of_run(const Json& then, const std::string& path) {
    const std::string preset = then.find("model") ? then.string("model", path) : "tiny";
    const Config standard = options_of("--model " + preset);
    std::string command = "./train_nsa --model " + preset;
    size_t line = 0;  // where the last one begins
    for (const Option& o : OPTIONS) {
        const Json* value = then.find(underscored(o.name));
        if (!value || !is_inherited(o) || is_choice(o.name, "model|threads")) continue;
        if (is_automatic(o, value_text(*value, o))) continue;
        Config c;
        set_option(c, o, value_text(*value, o));
        const std::string text = value_text(c, o);
        if (text.empty() || text == value_text(standard, o)) continue;
        const std::string word = " " + option_words(o.name, published(o, text));
        if (command.size() + word.size() - line > 110) {
            line = command.size();
            command += " \\\n   ";
        }
        command += word;
    }
    return command;
}

static std::string table_row(const char* name, const std::string& value) {
    return format_text("| %s | %s |\n", name, value.c_str());
}

static std::string attention_text(const Config& c) {
    if (!has_layers(c, NSA_LAYER))
        return c.attention +
               (has_layers(c, WINDOW_LAYER) ? format_text("; windows of %lld tokens", (long long)c.window) : "");
    return (c.attention == "nsa" ? "" : c.attention + " in turn; ") +
           format_text("NSA: blocks of %lld every %lld tokens, %lld selected of %lld, window of %lld, branches: %s",
                       (long long)c.cmp_block, (long long)c.cmp_stride, (long long)c.slc_count, (long long)c.slc_block,
                       (long long)c.window, c.branches.c_str());
}

// What a checkpoint's manifest says of its training, as rows of the table; command: of the run. Both are empty for
// weights alone, and for those that import wrote.
static std::string rows_of_training(const std::string& checkpoint, std::string& command) {
    if (!file_exists(checkpoint + "/manifest.json")) return "";
    const Manifest manifest = read_manifest(checkpoint);
    const std::string& path = manifest.path;
    if (manifest.state.find("imported")) return "";
    const TrainState state = read_state(manifest);
    const Json& then = manifest.state.get("options", path);
    command = command_of_run(then, path);
    std::string text = table_row("steps, tokens", with_commas(state.step) + ", " + with_commas(int64_t(state.tokens)));
    const Json* const origin = then.find("init_from");
    if (origin && !origin->string(path).empty())
        text += table_row("its weights began as those of",
                          printable(published(option_named("init-from"), origin->string(path))) + " (--init-from)");
    const std::vector<double>& losses = state.losses.values;
    if (!losses.empty())
        text += table_row("training loss, nats a token",
                          format_text("%.4f, mean of the last %s",
                                      std::accumulate(losses.begin(), losses.end(), 0.0) / double(losses.size()),
                                      counted(int64_t(losses.size()), "step").c_str()));
    const Json* const validation = manifest.state.find("validation");
    return text + table_row("validation loss, nats a token",
                            validation ? format_text("%.4f over %s (digest of the data, tokens)",
                                                     validation->number("loss", path),
                                                     validation->string("data", path).c_str())
                                       : "this step was not validated");
}

// c: the options of the model; checkpoint: its folder; folder: where the export goes, whose real name is the model's.
inline std::string model_card(const Config& c, const std::string& checkpoint, const std::string& folder,
                              int64_t parameters) {
    const std::string name = printable(std::filesystem::weakly_canonical(absolute_path(folder)).filename().string());
    std::string command;
    const std::string training = rows_of_training(checkpoint, command);
    const std::string tokenizer_class = c.tokenizer == "bytes" ? "PreTrainedTokenizerFast" : "GPT2TokenizerFast";
    return "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# " + name +
           "\nA language model with Native Sparse Attention (arXiv 2502.11089), trained and exported by train_nsa " +
           version_text() +
           ". It continues text and follows no instructions.\nNo licence is stated: whoever publishes the weights "
           "chooses one that the training text allows.\n\n| | |\n|---|---|\n" +
           table_row("parameters", with_commas(parameters)) +
           table_row("layers, width, MLP's width; heads, groups, head dimension",
                     format_text("%lld, %lld, %lld; %lld, %lld, %lld", (long long)c.layers, (long long)c.dim,
                                 (long long)c.mlp_hidden, (long long)c.heads, (long long)c.kv_groups,
                                 (long long)c.head_dim)) +
           table_row("attention", attention_text(c)) +
           table_row("vocabulary, tokens of a sequence", format_text("%s, %lld; %lld", c.tokenizer.c_str(),
                                                                     (long long)c.vocab_size, (long long)c.seq_len)) +
           training +
           (command.empty()
                ? ""
                : "\nThe command, with the names of files but not their folders:\n```\n" + command + "\n```\n") +
           "\n```python\nfrom transformers import AutoModelForCausalLM, " + tokenizer_class +
           "\ntokenizer = " + tokenizer_class + ".from_pretrained(" + json_quote(name) +
           ")\nmodel = AutoModelForCausalLM.from_pretrained(" + json_quote(name) +
           ", trust_remote_code=True)\n```\n`trust_remote_code` runs modeling_nsa.py of this folder: read it "
           "first.\n";
}
