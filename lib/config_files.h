// config_files.h: options in files: a model's config.json, a run's run.json and manifest, and what they mean for a
// resume. Used by the verbs in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include "checkpoint.h"
#include "json.h"
#include "options.h"
#include "run_folder.h"
#include "shape.h"
#include "util.h"

// The options that make the model: its config.json.
static const char* const MODEL_OPTIONS[] = {"layers",     "dim",        "heads",     "kv-groups", "head-dim",
                                            "cmp-block",  "cmp-stride", "slc-block", "slc-count", "window",
                                            "phi-hidden", "mlp-hidden", "seq-len"};

static std::string config_json(const Config& c) {
    std::string text = "{\"architecture\": \"nsa\"";
    for (const char* name : MODEL_OPTIONS)
        text += ", \"" + underscored(name) + "\": " + value_text(c, option_named(name));
    return text + ", \"attention\": \"" + c.attention + "\", \"tokenizer\": \"" + c.tokenizer +
           "\", \"vocab_size\": " + std::to_string(c.vocab_size) +
           format_text(", \"rope_base\": %g, \"norm_eps\": %g}\n", ROPE_BASE, NORM_EPS);
}

// Reads a config.json into c, every field checked as the same option on the command line would be.
static void read_config_json(Config& c, const std::string& path) {
    const Json root = parse_json(read_file(path), path);
    if (root.string("architecture", path) != "nsa")
        fail("%s: architecture is '%s', expected 'nsa'", path.c_str(), root.string("architecture", path).c_str());
    try {
        for (const char* name : MODEL_OPTIONS)
            set_option(c, option_named(name), std::to_string(root.integer(underscored(name), path)));
        set_option(c, option_named("attention"), root.string("attention", path));
        set_option(c, option_named("tokenizer"), root.string("tokenizer", path));
        validate_model(c, "contradiction");
    } catch (const Error& e) {
        fail("%s: %s", path.c_str(), e.what());
    }
    c.vocab_size = c.tokenizer == "gpt2" ? 50257 : 256;
    if (root.integer("vocab_size", path) != c.vocab_size)
        fail("%s: vocab_size is %lld, tokenizer %s has %lld", path.c_str(), (long long)root.integer("vocab_size", path),
             c.tokenizer.c_str(), (long long)c.vocab_size);
    if (root.number("rope_base", path) != ROPE_BASE || root.number("norm_eps", path) != NORM_EPS)
        fail("%s: rope_base or norm_eps differ from this program's %g and %g", path.c_str(), ROPE_BASE, NORM_EPS);
}

// verb: what cannot be done otherwise, "resume" or "begin".
static void require_same_model(const Config& c, const std::string& checkpoint, const char* verb) {
    const std::string path = checkpoint + "/config.json";
    const Json saved = parse_json(read_file(path), path), asked = parse_json(config_json(c), "this run's options");
    for (size_t i = 0; i < asked.keys.size(); i++) {
        if (asked.keys[i] == "seq_len" && !std::strcmp(verb, "begin")) continue;  // no weight depends on it
        const Json& now = asked.items[i];
        const Json& then = saved.get(asked.keys[i], path);
        const bool same =
            now.kind == Json::String ? then.string(path) == now.text : then.number(path) == now.number_value;
        if (same) continue;
        fail("cannot %s from %s: %s is %s there and %s in this run; give the same model options", verb, path.c_str(),
             asked.keys[i].c_str(),
             then.kind == Json::String ? then.text.c_str() : format_text("%g", then.number_value).c_str(),
             now.kind == Json::String ? now.text.c_str() : format_text("%g", now.number_value).c_str());
    }
}

// All options of a run, for run.json and the manifest; a resume reads them.
static std::string manifest_json(const Config& c) {
    std::string text = "{\"program\": \"train_nsa\"";
    for (const Option& o : option_table()) {
        const std::string name = o.name;
        if (!(o.verbs & TRAIN) || name == "help" || name == "version" || name == "resume") continue;
        text += ",\n \"" + underscored(name) +
                "\": " + (o.integer || o.real ? value_text(c, o) : json_quote(value_text(c, o)));
    }
    return text + "}\n";
}

// An option's value in a manifest, as on the command line.
static std::string value_text(const Json& value, const Option& o) {
    if (value.kind == Json::String) return value.text;
    return o.integer ? std::to_string(value.integer_value) : format_text("%.17g", value.number_value);
}

// These belong to the machine rather than to the run.
static bool is_machine_option(const std::string& name) {
    for (const char* other : {"out", "batch", "threads", "device", "cpu-dtype", "cuda-graph", "selected-kernels",
                              "stats-every", "dump-state"})
        if (name == other) return true;
    return false;
}

// --resume: what was not given is as in the run that is resumed.
static void inherit_options(Config& c, std::set<std::string>& given) {
    const std::string folder = given.count("out") ? c.out : "runs/" + c.model, path = folder + "/run.json";
    if (!file_exists(path)) return;
    const Json then = parse_json(read_file(path), path);
    for (const Option& o : option_table()) {
        const Json* old = then.find(underscored(o.name));
        const std::string name = o.name;
        if (!old || !(o.verbs & TRAIN) || given.count(name) || is_machine_option(name)) continue;
        try {
            set_option(c, o, value_text(*old, o));
        } catch (const Error& e) {
            fail("%s: %s", path.c_str(), e.what());
        }
        given.insert(name);
    }
}

// One line for each option that differs from the run that wrote the checkpoint, as far as a resume allows it. then: its
// options. Returns them as a Config.
static Config print_changed_options(const Config& c, const Json& then) {
    Config before = c;
    for (const Option& o : option_table()) {
        const Json* old = then.find(underscored(o.name));
        const std::string name = o.name;
        if (!old || !(o.verbs & TRAIN) || name == "out" || name == "threads") continue;
        const bool same = old->kind == Json::String ? old->text == value_text(c, o)
                          : o.integer               ? old->integer_value == c.*o.integer
                          : o.real                  ? old->number_value == c.*o.real
                                                    : true;
        if (same) continue;
        std::printf("resume: --%s is %s, was %s\n", o.name, value_text(c, o).c_str(),
                    old->kind == Json::String ? old->text.c_str() : format_text("%.15g", old->number_value).c_str());
        if (o.integer) before.*o.integer = old->integer_value;
        else if (o.real) before.*o.real = old->number_value;
        else if (o.text) before.*o.text = old->text;
    }
    return before;
}

// What a resumed run says about itself. checkpoint "": there was none. learning_rate(config, step): of a step.
template <class LearningRate>
void print_resume(const Config& c, const std::string& checkpoint, int64_t step, LearningRate learning_rate) {
    if (checkpoint.empty()) {
        if (c.resume) std::printf("resume: nothing to resume under %s, this run starts at step 0\n", c.out.c_str());
        return;
    }
    std::printf("resume: %s, step %lld\n", checkpoint.c_str(), (long long)step);
    const Manifest manifest = read_manifest(checkpoint);
    const Config before = print_changed_options(c, manifest.state.get("options", manifest.path));
    const double is = learning_rate(c, step + 1), was = learning_rate(before, step + 1);
    if (std::fabs(is - was) > 0.01 * std::max(is, was))
        std::printf("resume: the learning rate of step %lld is %.2e, by the earlier options %.2e\n",
                    (long long)step + 1, is, was);
}

// --from: the checkpoint it names. Puts the options of the trained model over those given, which say where the
// vocabulary is, what to sample and so on.
static std::string read_trained_config(Config& c) {
    if (c.from.empty()) fail_usage("--from is missing: the folder of a run, such as runs/tiny");
    const std::string folder = checkpoint_of(c.from, "--from");
    read_config_json(c, folder + "/config.json");
    if (c.vocab_dir.empty() && file_exists(folder + "/manifest.json")) {  // where training found it
        const Manifest manifest = read_manifest(folder);
        c.vocab_dir = manifest.state.get("options", manifest.path).string("vocab_dir", manifest.path);
    }
    return folder;
}

// The options that decided what the run behind a checkpoint was validated on.
static Config trained_options(Config c, const std::string& checkpoint) {
    const Manifest manifest = read_manifest(checkpoint);
    const Json& then = manifest.state.get("options", manifest.path);
    c.seed = then.integer("seed", manifest.path);
    c.eval_batches = then.integer("eval_batches", manifest.path);
    c.total_batch = then.integer("total_batch", manifest.path);
    return c;
}
