// config_files.cpp: the functions of config_files.h.
#include "config_files.h"

NsaShape shape_of(const ModelConfig& c, int64_t B, int64_t T) {
    NsaShape s;
    s.B = int(B);
    s.T = int(T);
    s.first = 0;
    s.queries = int(T);
    s.H = int(c.heads);
    s.G = int(c.kv_groups);
    s.D = int(c.head_dim);
    s.l = int(c.cmp_block);
    s.d = int(c.cmp_stride);
    s.slc_block = int(c.slc_block);
    s.slc_count = int(c.slc_count);
    s.window = int(c.window);
    s.F = int(c.phi_hidden);
    s.rope_base = int(c.rope_base);
    s.qk_norm = c.qk_norm;
    s.period = 0;
    for (const LayerKind kind : layer_kinds(c.attention)) s.kinds |= unsigned(kind) << 2 * s.period++;
    s.window_only = !has_layers(c, NSA_LAYER);
    s.sees_all = s.window_only && has_layers(c, FULL_LAYER);
    for (int branch = 0; branch < BRANCHES; branch++)
        if (c.branches != "all" && c.branches.find(BRANCH_NAMES[branch]) == std::string::npos)
            s.left_out |= 1u << branch;
    return s;
}

std::string config_json(const ModelConfig& model) {
    Config c;
    static_cast<ModelConfig&>(c) = model;
    Json root = {{"architecture", "nsa"}};
    for (const Option& o : OPTIONS)
        if (o.traits & OF_MODEL) root.add(underscored(o.name), o.integer ? Json(c.*o.integer) : Json(value_text(c, o)));
    root.add("vocab_size", c.vocab_size);
    if (c.vocab_digest) root.add("vocab_digest", format_text("%08x", c.vocab_digest));
    return root.add("norm_eps", {NORM_EPS, "%g"}).to_text() + "\n";
}

void read_config_json(Config& c, const std::string& path) {
    const Json root = parse_json(read_file(path), path);
    if (root.string("architecture", path) != "nsa")
        fail("%s: architecture is '%s', expected 'nsa'", path, root.string("architecture", path));
    std::vector<std::pair<const Option*, std::string>> values;  // read first: those errors name the path themselves
    for (const Option& o : OPTIONS) {
        if (!(o.traits & OF_MODEL)) continue;
        const std::string key = underscored(o.name);
        values.emplace_back(&o, o.integer ? std::to_string(root.get(key, path).whole_number(path + ": " + key))
                                          : root.string(key, path));
    }
    const std::string error = error_of([&] {
        for (const auto& [option, value] : values) set_option(c, *option, value);
        validate_model(c, "contradiction");
    });
    if (!error.empty()) fail("%s: %s", path, error);
    c.vocab_size = root.get("vocab_size", path).whole_number(path + ": vocab_size");
    const bool is_bytes = c.tokenizer == "bytes";
    if (is_bytes ? c.vocab_size != 256 : c.vocab_size < 257 || c.vocab_size > 65536)
        fail("%s: vocab_size is %d, tokenizer %s has %s", path, c.vocab_size, c.tokenizer,
             is_bytes ? "256" : "257 to 65536");
    c.vocab_digest = 0;
    if (root.find("vocab_digest")) {
        const std::string digits = root.string("vocab_digest", path);
        if (digits.size() != 8 || digits.find_first_not_of("0123456789abcdef") != std::string::npos || is_bytes)
            fail("%s: vocab_digest is %s, expected 8 digits of 0-9a-f, and none for bytes", path, json_quote(digits));
        c.vocab_digest = uint32_t(std::stoul(digits, nullptr, 16));
    }
    if (root.number("norm_eps", path) != NORM_EPS) fail("%s: norm_eps differs from this program's %g", path, NORM_EPS);
}

// The vocabulary of a checkpoint: beside its weights, in its run, or where the training found it; "": it had none, or
// none is there any more.
static std::string vocabulary_of_checkpoint(const std::string& folder) {
    if (holds_vocabulary(folder)) return folder;
    if (!file_exists(folder + "/manifest.json")) return "";
    const std::string of_run = folder_of(folder) + "/" + VOCABULARY_OF_RUN;
    if (holds_vocabulary(of_run)) return of_run;
    const Checkpoint manifest = read_manifest(folder);
    const std::string trained = manifest.state.get("options", manifest.path).string("vocab_dir", manifest.path);
    return file_exists(trained) ? trained : "";
}

// --init-from: what was not given of the model is as it is there. Refusals are left to find_checkpoint().
static void inherit_model(Config& c) {
    if (!is_folder(c.init_from)) return;
    std::string path = c.init_from + "/config.json";
    for (const int64_t step : checkpoint_steps(c.init_from))
        if (!file_exists(path)) path = checkpoint_folder(c.init_from, step) + "/config.json";
    if (!file_exists(path)) return;
    Config there = c;
    read_config_json(there, path);
    for (const Option& o : OPTIONS)
        if (o.traits & OF_MODEL) overlay(c, o, value_text(there, o), Source::CHECKPOINT);
    c.vocab_size = there.vocab_size;
    c.vocab_digest = there.vocab_digest;
    std::string vocabulary;
    if (c.tokenizer == "gpt2") error_of([&] { vocabulary = vocabulary_of_checkpoint(folder_of(path)); });
    if (c.vocab_dir.empty()) c.vocab_dir = vocabulary;
}

void require_same_model(const ModelConfig& c, const std::string& checkpoint, const char* verb) {
    const std::string path = checkpoint + "/config.json";
    const Json saved = parse_json(read_file(path), path), asked = parse_json(config_json(c), "this run's options");
    for (size_t i = 0; i < asked.keys.size(); i++) {
        const bool may_begin = asked.keys[i] == "seq_len" || asked.keys[i] == "rope_base";  // no shape depends on it
        if (may_begin && !std::strcmp(verb, "begin")) continue;
        if (asked.keys[i] == "vocab_digest" && !saved.find("vocab_digest")) continue;  // it was not known
        const Json& now = asked.items[i];
        const Json& then = saved.get(asked.keys[i], path);
        if (now.kind == Json::String ? then.string(path) == now.text : then.number(path) == now.number_value) continue;
        fail("cannot %s from %s: %s is %s there and %s in this run; leave the option out, or %s", verb, path,
             asked.keys[i] == "vocab_digest" ? "the digest of --vocab-dir" : asked.keys[i], then.text, now.text,
             may_begin ? "begin a new run with --init-from" : "give the same");
    }
}

std::string options_json(const Config& c) {
    Json root = {{"program", "train_nsa"}};
    for (const Option& o : OPTIONS) {
        const std::string name = o.name;
        if (!(o.verbs & TRAIN) || name == "help" || name == "version" || name == "resume") continue;
        root.add(underscored(name), o.integer ? Json(c.*o.integer)
                                    : o.real  ? Json(c.*o.real, "%.15g")
                                              : Json(value_text(c, o), true));
    }
    return root.to_text(Json::LINES) + "\n";
}

std::string same_run_lines(const Config& c, const std::string& program, uint64_t train, uint64_t val) {
    std::string lines = "program: " + program + "\n";
    std::istringstream options(options_json(c));
    for (std::string line; std::getline(options, line);)
        if (line.find("\"threads\"") == std::string::npos) lines += "option " + line + "\n";
    if (!c.hellaswag.empty()) lines += "--hellaswag: " + digest_text(read_record(c.hellaswag)) + "\n";
    if (train) lines += format_text("training data: %016x\n", train);
    return lines + (val ? format_text("validation data: %016x\n", val) : "");
}

Config with_absolute_paths(Config c) {
    for (std::string* path : {&c.vocab_dir, &c.hellaswag, &c.init_from, &c.config})
        if (!path->empty()) *path = absolute_path(*path);
    if (!c.data.empty()) c.data = with_absolute_patterns(c.data, false);
    if (!c.val_data.empty()) c.val_data = with_absolute_patterns(c.val_data, true);
    return c;
}

std::string value_text(const Json& value, const Option& o) {
    if (value.kind == Json::String) return value.text;
    value.require(Json::Number, underscored(o.name));
    return o.integer && value.is_integer ? std::to_string(value.integer_value)
                                         : format_text("%.17g", value.number_value);
}

bool is_automatic(const Option& o, const std::string& value) {
    return o.integer && o.low > 0 && value == "0" && !std::strcmp(o.default_text, "auto");
}

bool is_inherited(const Option& o) { return (o.verbs & TRAIN) && !(o.traits & PER_START); }

static const char* const MEND_RUN_JSON = "mend it, or remove the file: the checkpoints hold the options too";

// The options of the run in this folder: its run.json or, where that is missing, the manifest of its newest checkpoint.
// Returns the file; "" where there is neither.
static std::string find_run_options(const std::string& folder, Json& options) {
    const std::string path = folder + "/run.json";
    if (file_exists(path)) {
        try {
            options = parse_own_json(read_file(path), path);
            options.string("program", path);
            return path;
        } catch (const Error& e) {
            fail("%s; %s", e.what(), MEND_RUN_JSON);
        }
    }
    for (const int64_t step : checkpoint_steps(folder)) {
        try {
            const Checkpoint manifest = read_manifest(checkpoint_folder(folder, step));
            options = manifest.state.get("options", manifest.path);
            return manifest.path;
        } catch (const Error&) {  // a damaged checkpoint is reported when the one to resume is chosen
        }
    }
    return "";
}

// The checkpoints of a run hang on some of its options.
static void require_unchanged(const Config& c, const Option& o, const std::string& was, const std::string& folder) {
    static const struct {
        const char *option, *because;
    } kept[] = {{"seed", "data order and rounding follow from it, and the run began with"},
                {"optimizer", "its moments are those of"},
                {"model", "it has the shape of"}};
    for (const auto& [name, because] : kept)
        if (!std::strcmp(o.name, name) && value_text(c, o) != was && !checkpoint_steps(folder).empty())
            fail("cannot resume from %s with --%s %s: %s %s; leave --%s out, or begin a new run with --init-from",
                 folder, name, value_text(c, o), because, was, name);
}

bool inherit_options(Config& c) {
    const std::string folder = c.is_given("out") ? c.out : "runs/" + c.model;
    Json then;
    const std::string path = find_run_options(folder, then);
    if (path.empty()) return false;
    for (const Option& o : OPTIONS) {
        const Json* const old = then.find(underscored(o.name));
        if (!old || !is_inherited(o)) continue;
        std::string was;
        const std::string error = error_of([&] {
            was = value_text(*old, o);
            if (!is_automatic(o, was)) overlay(c, o, was, Source::RUN_JSON);
        });
        if (!error.empty()) fail("%s: %s; %s", path, error, MEND_RUN_JSON);
        require_unchanged(c, o, was, folder);
    }
    const std::string of_run = folder + "/" + VOCABULARY_OF_RUN;
    if (!c.vocab_dir.empty() && !file_exists(c.vocab_dir) && holds_vocabulary(of_run)) c.vocab_dir = of_run;
    return true;
}

void complete_options(Config& c) {
    const bool resumes = c.resume && inherit_options(c);
    if (!resumes && !c.init_from.empty()) inherit_model(c);
    apply_preset(c);
    validate_model(c, "options");
    validate_given(c);
}

void read_options_file(Config& c, bool prints) {
    const std::string& path = c.config;
    const std::string bytes = read_file(path);
    refuse_no_text(path, bytes.substr(0, 256), "");
    const Json file = parse_own_json(bytes, path);
    file.require(Json::Object, path);
    const bool of_run = file.find("program");  // a run.json; by hand, everything in it is meant
    if (file.find("architecture")) fail_usage("%s is the config of a checkpoint: give the run.json of its run", path);
    const Json* const attention = file.find("attention");
    ModelConfig of_file;
    of_file.attention = attention ? attention->text : "nsa";
    size_t count = 0;
    std::string overridden;
    for (size_t i = 0; i < file.keys.size(); i++) {
        std::string name = file.keys[i];
        std::replace(name.begin(), name.end(), '_', '-');
        if (of_run && (name == "program" || file.items[i].kind == Json::Object)) continue;
        const Option* const o = find_option(name);
        if (of_run && o && is_of_no_layer(*o, of_file)) continue;
        if (!o || !(o->verbs & TRAIN)) fail_usage("%s: --%s is no option (--help lists them)", path, name);
        if (of_run && !is_inherited(*o)) continue;
        if (name == "config") fail_usage("%s: --config is for the command line alone", path);
        const Json& value = file.items[i];
        if (value.kind == Json::Object || value.kind == Json::Array || value.kind == Json::Null)
            fail_usage("%s: --%s is neither a number nor a text", path, o->name);
        const std::string text = value.kind == Json::Bool ? (value.is_true ? "on" : "off") : value_text(value, *o);
        if (of_run && is_automatic(*o, text)) continue;
        if (name == "batch" && text == "auto") continue;  // as if it were not there
        if (c.setting_of(name).source == Source::CONFIG_FILE) fail_usage("%s: --%s stands there twice", path, o->name);
        Config there = c;
        const std::string error = error_of([&] { set_option(there, *o, text); });
        if (!error.empty()) fail_usage("%s: %s", path, error);
        if (overlay(c, *o, text, Source::CONFIG_FILE)) count++;
        else
            overridden += format_text("%s --%s %s (there %s)", overridden.empty() ? "; the command line:" : ",",
                                      o->name, value_text(c, *o), value_text(there, *o));
    }
    if (prints)
        print("config: %s from %s%s\n", counted(int64_t(count), "option"), printable(path), printable(overridden));
}

// One line for each option that differs from the run that wrote the checkpoint, as far as a resume allows it. then: its
// options.
static void print_changed_options(const Config& c, const Json& then) {
    for (const Option& o : OPTIONS) {
        const Json* old = then.find(underscored(o.name));
        if (!old || !is_inherited(o)) continue;
        const std::string was = value_text(*old, o), now = value_text(with_absolute_paths(c), o);
        const bool same = o.real ? old->number_value == c.*o.real : was == now;
        if (same) continue;
        const std::string reason = c.setting_of(o.name).reason;
        print("resume: --%s is %s, was %s%s\n", o.name, is_automatic(o, now) ? "auto" : printable(now),
              is_automatic(o, was) ? "auto"
              : o.real             ? format_text("%.15g", old->number_value)
                                   : printable(was),
              reason.empty() ? "" : ": " + reason);
    }
}

void print_resume(const Config& c, const Checkpoint& checkpoint) {
    if (checkpoint.folder.empty()) {
        if (c.resume) complain("--resume: nothing to resume under %s, this run starts at step 0", printable(c.out));
        return;
    }
    print("resume: %s, step %d\n", printable(checkpoint.folder), checkpoint.step);
    print_changed_options(c, checkpoint.state.get("options", checkpoint.path));
}

Checkpoint chosen_checkpoint(const Config& c) {
    if (c.from.empty()) fail_usage("--from is missing: the folder of a run, such as runs/tiny");
    if (c.at_step == "last") return find_checkpoint(c.from, "--from");
    const bool best = c.at_step == "best", is_number = c.at_step.find_first_not_of("0123456789") == std::string::npos;
    if (!best && (c.at_step.empty() || c.at_step.size() > 18 || !is_number))
        fail_usage("--step is '%s'; expected a step, or best, or last", c.at_step);
    if (is_checkpoint(c.from))
        fail("--step %s: %s is one checkpoint: leave --step out, or give the folder of its run", c.at_step, c.from);
    const int64_t step = best ? best_step(c.from) : std::atoll(c.at_step.c_str());
    const std::string folder = checkpoint_folder(c.from, step);
    std::string steps;
    for (const int64_t other : checkpoint_steps(c.from)) steps = " " + std::to_string(other) + steps;
    if (steps.empty()) steps = " none";
    if (best && step < 0)
        fail(
            "--step best: none of the checkpoints of %s was validated, take one of:%s (a run validates what it saves "
            "where --save-every is a multiple of --eval-every)",
            c.from, steps);
    if (!file_exists(folder))
        fail("--step %s: %s has no checkpoint of this step, only of:%s", c.at_step, c.from, steps);
    return open_checkpoint(folder, Wanted::MODEL);
}

void read_trained_config(Config& c, const std::string& folder) {
    const int64_t seq_len = c.seq_len;
    const std::string branches = c.branches;
    read_config_json(c, folder + "/config.json");
    c.trained_seq_len = c.seq_len;
    if (seq_len) c.seq_len = seq_len;
    if (branches != "all") c.branches = branches;
    if (c.vocab_dir.empty() && c.tokenizer == "gpt2") c.vocab_dir = vocabulary_of_checkpoint(folder);
}
