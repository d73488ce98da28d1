// model_card.h: the README.md of an exported model: its shape, its training and its losses, from the checkpoint's own
// files, and the command that trains it again. Used by export.h.
#pragma once
#include <string>

#include "../base/files.h"
#include "../base/json.h"
#include "../run/build_info.h"
#include "../run/checkpoint.h"
#include "../run/config_files.h"
#include "../run/options.h"

// 123,296,256
inline std::string with_commas(int64_t n) {
    std::string text = std::to_string(n);
    for (size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
    return text;
}

// A path of --data as strangers may see it: the files' names, not where they lay.
static std::string published(const Option& o, const std::string& value) {
    const std::string name = o.name;
    return name == "data" || name == "val-data" || name == "vocab-dir" ? name_of(value) : value;
}

// The command of the run, by what differs from its preset. then: the options that a checkpoint holds.
static std::string command_of_run(const Json& then, const std::string& path) {
    const std::string preset = then.find("model") ? then.string("model", path) : "tiny";
    const Config standard = options_of("--model " + preset);
    std::string command = "./train_nsa --model " + preset;
    for (const Option& o : OPTIONS) {
        const Json* value = then.find(underscored(o.name));
        if (!value || !is_inherited(o) || is_choice(o.name, "model|threads|init-from")) continue;
        if (is_automatic(o, value_text(*value, o))) continue;
        Config c;
        set_option(c, o, value_text(*value, o));
        const std::string text = value_text(c, o);
        if (text.empty() || text == value_text(standard, o)) continue;
        command += format_text(" \\\n    --%s '%s'", o.name, published(o, text).c_str());
    }
    return command;
}

static std::string table_row(const char* name, const std::string& value) {
    return format_text("| %s | %s |\n", name, value.c_str());
}

static std::string rows_of_model(const Config& c, int64_t parameters) {
    std::string text = table_row("parameters", with_commas(parameters));
    text += table_row("layers, width, MLP's hidden width",
                      format_text("%lld, %lld, %lld", (long long)c.layers, (long long)c.dim, (long long)c.mlp_hidden));
    text +=
        table_row("query heads, key-value groups, head dimension",
                  format_text("%lld, %lld, %lld", (long long)c.heads, (long long)c.kv_groups, (long long)c.head_dim));
    if (c.v_head_dim) text += table_row("head dimension of the values", std::to_string(c.v_head_dim));
    text += table_row(
        "attention",
        !has_layers(c, NSA_LAYER)
            ? c.attention +
                  (has_layers(c, WINDOW_LAYER) ? format_text("; windows of %lld tokens", (long long)c.window) : "")
            : (c.attention == "nsa" ? "" : "layers in turn " + c.attention + "; ") +
                  format_text("NSA: blocks of %lld every %lld tokens, %lld selected of %lld, "
                              "window of %lld, branches: %s",
                              (long long)c.cmp_block, (long long)c.cmp_stride, (long long)c.slc_count,
                              (long long)c.slc_block, (long long)c.window, c.branches.c_str()));
    text += table_row("vocabulary", format_text("%s, %lld tokens", c.tokenizer.c_str(), (long long)c.vocab_size));
    return text + table_row("trained on sequences of", counted(c.seq_len, "token"));
}

// What a checkpoint's manifest says of its training. Empty for weights alone, and for those that import wrote.
static std::string training_of(const std::string& checkpoint) {
    if (!file_exists(checkpoint + "/manifest.json")) return "";
    const Manifest manifest = read_manifest(checkpoint);
    const std::string& path = manifest.path;
    if (manifest.state.find("imported")) return "";
    const Json& then = manifest.state.get("options", path);
    const int64_t batch = then.integer("total_batch", path);
    std::string text = "## Training\n| | |\n|---|---|\n";
    text += table_row("steps, tokens a step, tokens", with_commas(manifest.step) + ", " + with_commas(batch) + ", " +
                                                          with_commas(manifest.step * batch));
    const std::vector<Json>& losses = manifest.state.array("losses", path);
    double sum = 0;
    for (const Json& loss : losses) sum += loss.number_value;
    if (!losses.empty())
        text += table_row("training loss, nats a token",
                          format_text("%.4f, mean of the last %s", sum / double(losses.size()),
                                      counted(int64_t(losses.size()), "step").c_str()));
    const Json* const validation = manifest.state.find("validation");
    text +=
        table_row("validation loss, nats a token",
                  validation ? format_text("%.4f over %s (digest of the data, tokens)",
                                           validation->number("loss", path), validation->string("data", path).c_str())
                             : "this step was not validated");
    return text + "\nThe command, with the names of the data's files but not their folders:\n```\n" +
           command_of_run(then, path) + "\n```\n";
}

// c: the options of the model; checkpoint: its folder; folder: where the export goes.
inline std::string model_card(const Config& c, const std::string& checkpoint, const std::string& folder,
                              int64_t parameters) {
    const std::string name = name_of(folder);
    return "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# " + name +
           "\nA language model with Native Sparse Attention (arXiv 2502.11089), trained and exported by train_nsa " +
           version_text() + ".\n\n| | |\n|---|---|\n" + rows_of_model(c, parameters) + "\n" + training_of(checkpoint) +
           "\n## Use\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
           "tokenizer = AutoTokenizer.from_pretrained(\"" +
           name + "\")\nmodel = AutoModelForCausalLM.from_pretrained(\"" + name +
           "\", trust_remote_code=True)\n```\n`trust_remote_code` runs modeling_nsa.py of this folder: read it "
           "first.\n\n## Limits and licence\nA base model: it continues text and follows no instructions, and it "
           "repeats what its training text says, right or wrong.\nNo licence is stated here: whoever publishes the "
           "weights chooses one that the training text allows.\n";
}
