// options.cpp: the functions of options.h.
#include "options.h"

std::string underscored(std::string name) {
    std::replace(name.begin(), name.end(), '-', '_');
    return name;
}

std::string value_text(const Config& c, const Option& o) {
    if (o.integer) return std::to_string(c.*o.integer);
    if (o.real) return format_text("%.15g", c.*o.real);
    if (o.text) return c.*o.text;
    if (o.flag) return c.*o.flag ? "on" : "off";
    std::string all;
    for (const std::string& s : c.*o.list) all += (all.empty() ? "" : " ") + s;
    return all;
}

std::string range_text(const Option& o) {
    if (o.integer || o.real) return format_text("%s %.7g..%.7g", o.integer ? "integer" : "number", o.low, o.high);
    if (o.choices) return o.choices;
    return o.flag ? "flag" : o.list ? "text..." : "text";
}

bool is_choice(const std::string& word, const std::string& choices) {
    return ("|" + choices + "|").find("|" + word + "|") != std::string::npos && word.find('|') == std::string::npos;
}

std::string option_words(const std::string& name, const std::string& value) {
    return "--" + name + (value.compare(0, 2, "--") ? " " : "=") + shell_word(value);
}

void set_option(Config& c, const Option& o, const std::string& value) {
    if (o.traits & PATH && value.compare(0, 2, "~/") == 0)
        fail_usage("--%s is '%s': a shell leaves ~ as it is in quotes and behind a =; give the whole path", o.name,
                   value);
    if (o.flag) {
        if (!is_choice(value, "on|off|1|0"))
            fail_usage("--%s is '%s'; it is a flag: give it without a value, or 0 for off", o.name, value);
        c.*o.flag = value == "on" || value == "1";
    } else if (o.list) {
        (c.*o.list).push_back(value);
    } else if (o.text) {
        if (o.text == &Config::from) c.runs.push_back(value);
        if (o.choices && !is_choice(value, o.choices))
            fail_usage("--%s is '%s'; expected one of %s", o.name, value, o.choices);
        c.*o.text = value;
    } else if (o.integer && value == "auto" && value == o.default_text) {
        c.*o.integer = 0;  // worked out later
    } else {
        char* end = nullptr;
        const double number = std::strtod(value.c_str(), &end);  // takes more: hexadecimal, nan, blanks in front
        const bool decimal =
            value.find_first_not_of(o.integer ? "-0123456789" : "+-.0123456789eE") == std::string::npos;
        if (value.empty() || *end || !decimal || !(number >= o.low && number <= o.high))
            fail_usage("--%s is '%s'; expected %s in %.15g..%.15g", o.name, value,
                       o.integer ? "an integer, in decimal digits," : "a number", o.low, o.high);
        if (o.integer) c.*o.integer = int64_t(number);
        else c.*o.real = number;
    }
}

bool overlay(Config& c, const Option& o, const std::string& value, Source source, const std::string& reason) {
    if (c.setting_of(o.name).source > source) return false;
    set_option(c, o, value);
    c.settings[o.name] = {source, reason};
    return true;
}

// The option that a word without one is the value of: the folder of a run after a verb that reads one, or after
// --resume. "": none.
static std::string option_of_folder(const std::string& word, Verb verb, const std::string& last, const Config& c) {
    if (word.empty()) return "";
    if (verb == TRAIN) return last == "resume" && !c.is_given("out") ? "out" : "";
    if (file_exists(word) && !is_folder(word)) return "";
    const bool reads_runs = verb & (SAMPLE | EVAL | EXPORT | IMPORT | REPORT | INSPECT);
    return reads_runs && (verb == REPORT || !c.is_given("from")) ? "from" : "";
}

// The verb that a command line begins with, `train` where it names none. at: gets the place of the word after it.
static Verb read_verb(int argc, const char* const* argv, Config& c, int& at) {
    at = 1;
    while (argc > at && !std::strcmp(argv[at], "help")) at++;  // `help sample` is `sample --help`
    c.help = at > 1;
    if (argc == at || argv[at][0] == '-') return TRAIN;
    c.verb = argv[at++];
    std::string names;
    for (const VerbName& v : VERBS) names += std::string(v.name) + ", ";
    if (!verb_named(c.verb)) fail_usage("'%s' is no verb; expected one of %shelp", c.verb, names);
    return verb_named(c.verb)->verb;
}

bool is_for_one_process(int argc, const char* const* argv, bool by_mpirun) {
    Config c;
    int at;
    Verb verb = TRAIN;
    error_of([&] { verb = read_verb(argc, argv, c, at); });
    const auto prints = [](const std::string& word) { return is_choice(word, "-h|--help|--version"); };
    return c.help || std::any_of(argv + std::min(1, argc), argv + argc, prints) ||
           (!(verb & (TRAIN | EVAL)) && !by_mpirun);
}

Config parse_options(int argc, const char* const* argv) {
    Config c;
    std::string option;  // the last one so far
    for (const Option& o : OPTIONS)
        if (*o.default_text &&
            (o.choices ? is_choice(o.default_text, o.choices)
                       : std::strcmp(o.default_text, "preset") && std::strcmp(o.default_text, "auto")))
            set_option(c, o, o.default_text);
    int at;
    const Verb verb = read_verb(argc, argv, c, at);
    const auto set = [&](const Option& o, const std::string& value) { overlay(c, o, value, Source::COMMAND_LINE); };
    while (at < argc) {
        std::string word = argv[at++];
        if (word == "-h") word = "--help";
        if (word.compare(0, 2, "--") != 0) {
            const std::string name = verb_named(word) ? "" : option_of_folder(word, verb, option, c);
            if (name.empty())
                fail_usage(
                    "'%s' is no option: a verb comes first, options begin with --, and a pattern of files stands in "
                    "quotes, else the shell puts their names in its place (--help lists the options)",
                    word);
            set(option_named(name), word);
            if (name == "out" && !is_folder(word))
                fail_usage("--resume %s: there is no such folder; a new run is begun by --out", word);
            continue;
        }
        const size_t equals = word.find('=');
        const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
        const Option* const o = find_option(name);
        if (!o) fail_usage("--%s is no option (--help lists them)", name);
        if (!(o->verbs & verb))
            fail_usage("--%s is no option of '%s' (./train_nsa %s --help lists its options)", name, c.verb, c.verb);
        const bool several = o->list || (verb == REPORT && name == "from");  // runs to be laid over each other
        if (c.is_given(name) && (o->list || !several)) fail_usage("--%s is given twice", name);
        option = name;
        if (o->flag && equals == std::string::npos) {
            const bool has_value = at < argc && is_choice(argv[at], "on|off|1|0");
            set(*o, has_value ? argv[at++] : "on");
            continue;
        }
        if (equals != std::string::npos) {
            set(*o, word.substr(equals + 1));
            continue;
        }
        if (at == argc || !std::strncmp(argv[at], "--", 2))
            fail_usage("--%s needs a value: %s%s", name, range_text(*o),
                       at == argc || o->choices || !(o->text || o->list)
                           ? ""
                           : "; one that begins with -- is given as " + option_words(name, argv[at]));
        set(*o, argv[at++]);
        while (several && at < argc && std::strncmp(argv[at], "--", 2)) set(*o, argv[at++]);
    }
    if (!c.batch) c.settings.erase("batch");  // --batch auto
    return c;
}

std::vector<Config> make_presets() {
    std::vector<Config> presets(std::size(PRESET_VALUES[0].values));
    for (const auto& row : PRESET_VALUES)
        for (size_t i = 0; i < presets.size(); i++) set_option(presets[i], option_named(row.option), row.values[i]);
    return presets;
}

const Config& preset_of(const TrainConfig& c) {
    return *std::find_if(std::begin(PRESETS), std::end(PRESETS), [&](const Config& p) { return c.model == p.model; });
}

void apply_preset(Config& c) {
    for (const Option& o : OPTIONS)
        if (!std::strcmp(o.default_text, "preset")) overlay(c, o, value_text(preset_of(c), o), Source::PRESET);
    if (c.head == "untied" && c.init == "random" && !c.is_chosen("init")) c.init = "narrow";
    if (!c.is_given("out")) c.out = "runs/" + c.model;
    while (c.out.size() > 1 && c.out.back() == '/') c.out.pop_back();
    if (c.out.empty()) fail_usage("--out is empty; expected a folder for the run");
    if (c.tokenizer == "bytes") c.vocab_size = 256;
    else if (!c.vocab_dir.empty()) c.vocab_size = int64_t(vocabulary_size(c.vocab_dir));
    else if (!c.vocab_size) c.vocab_size = GPT2_VOCABULARY;
}

Config options_of(const std::string& words) {
    const std::vector<std::string> all = split_words("train_nsa " + words);
    std::vector<const char*> argv;
    for (const std::string& word : all) argv.push_back(word.c_str());
    Config c = parse_options(int(argv.size()), argv.data());
    apply_preset(c);
    return c;
}

std::vector<LayerKind> layer_kinds(const std::string& pattern) {
    std::vector<LayerKind> kinds;
    for (const std::string& name : set_texts(pattern)) {
        const auto found = std::find(std::begin(LAYER_KIND_NAMES), std::end(LAYER_KIND_NAMES), name);
        if (found == std::end(LAYER_KIND_NAMES) || kinds.size() == MAX_PATTERN) return {};
        kinds.push_back(LayerKind(found - LAYER_KIND_NAMES));
    }
    return kinds;
}

bool has_layers(const ModelConfig& c, LayerKind kind) {
    const std::vector<LayerKind> kinds = layer_kinds(c.attention);
    return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

void validate_model(const ModelConfig& c, const char* where) {
    if (c.heads % c.kv_groups)
        fail_usage("%s: --heads %d is not divisible by --kv-groups %d", where, c.heads, c.kv_groups);
    if (c.head_dim % 2) fail_usage("%s: --head-dim %d is odd; rotary embedding pairs its elements", where, c.head_dim);
    if (c.cmp_block % c.cmp_stride)
        fail_usage("%s: --cmp-block %d is not a multiple of --cmp-stride %d", where, c.cmp_block, c.cmp_stride);
    if (c.slc_block % c.cmp_stride)
        fail_usage("%s: --slc-block %d is not a multiple of --cmp-stride %d", where, c.slc_block, c.cmp_stride);
    const std::vector<LayerKind> kinds = layer_kinds(c.attention);
    if (kinds.empty())
        fail_usage(
            "%s: --attention is '%s'; expected nsa, full or window, or a pattern of at most %d of them, such as "
            "window,nsa",
            where, c.attention, MAX_PATTERN);
    if (int64_t(kinds.size()) > c.layers)
        fail_usage("%s: --attention %s names %d layers, and --layers is %d: leave the last ones out", where,
                   c.attention, kinds.size(), c.layers);
}

void resolve_batch(TrainConfig& c, int ranks, bool gpu) {
    const Config& p = preset_of(c);
    const bool as_preset = gpu || !is_too_large_for_cpu(c);
    int64_t sequences = as_preset ? p.total_batch / c.seq_len : 1;
    if (c.is_chosen("total-batch")) {
        sequences = c.total_batch / c.seq_len;
        if (c.total_batch % c.seq_len)
            fail_usage("--total-batch %d is not a multiple of --seq-len %d", c.total_batch, c.seq_len);
    } else {
        const int64_t unit = ranks * (c.is_given("batch") ? c.batch : 1);
        sequences = std::max<int64_t>(sequences / unit, 1) * unit;
    }
    c.total_batch = sequences * c.seq_len;
    const int64_t per_rank = sequences / ranks;
    if (sequences % ranks)
        fail_usage("--total-batch %d is %s of --seq-len %d, not divisible by %d ranks", c.total_batch,
                   counted(sequences, "sequence"), c.seq_len, ranks);
    if (!c.is_given("batch"))
        for (c.batch = std::min(c.batch ? c.batch : as_preset ? p.batch : 1, per_rank); per_rank % c.batch; c.batch--) {
        }  // a resumed run has one already
    if (per_rank % c.batch)
        fail_usage("--total-batch %d is %s for each rank, not divisible by --batch %d", c.total_batch,
                   counted(per_rank, "sequence"), c.batch);
}

bool is_of_no_layer(const Option& o, const ModelConfig& c) {
    if (has_layers(c, NSA_LAYER) || (o.integer == &Config::window && has_layers(c, WINDOW_LAYER))) return false;
    return o.traits & NSA_ONLY;
}

int64_t warmup_steps(const TrainConfig& c) {
    std::string digits = c.warmup;
    int64_t unit = 0;
    for (const auto& [letter, factor] : {std::pair('K', 1e3), std::pair('M', 1e6), std::pair('B', 1e9)})
        if (!digits.empty() && digits.back() == letter) unit = int64_t(factor);
    if (unit) digits.pop_back();
    if (digits.empty() || digits.size() > (unit ? 6 : 12) ||
        digits.find_first_not_of("0123456789") != std::string::npos)
        fail_usage("--warmup is '%s'; expected steps, or tokens with K, M or B behind the number, such as 2M",
                   c.warmup);
    const int64_t number = std::stoll(digits);
    return unit ? (number * unit + c.total_batch - 1) / std::max<int64_t>(c.total_batch, 1) : number;
}

void validate_given(const TrainConfig& c) {
    require_output_file("dump-state", c.dump_state);
    warmup_steps(c);
    if (c.allow_new_data && !c.resume) fail_usage("--allow-new-data is for a resume: give --resume, or leave it out");
    for (const Option& o : OPTIONS)
        if (c.is_given(o.name) && is_of_no_layer(o, c))
            fail_usage("--%s is of --attention nsa, and this run has --attention %s: leave one of them out", o.name,
                       c.attention);
}

void warn_of_short_run(const TrainConfig& c) {
    const int64_t warmup = warmup_steps(c);
    if (c.dump_state.empty() && c.steps > 0 && c.steps < warmup)
        complain(
            "--steps %d ends within the %d steps of --warmup: the learning rate never gets "
            "beyond %.2g of --lr %g",
            c.steps, warmup, double(c.steps) / double(warmup), c.lr);
}

void require_no_bytes(const TrainConfig& c) {
    if (c.tokenizer != "gpt2" || c.val_data.empty()) return;
    for (const DataSet& set : named_sets(c.val_data, "--val-data"))
        if (set.pattern == "synthetic")
            fail_usage("--val-data synthetic is bytes, and this model reads gpt2 tokens: give shards of them");
}

void validate_run(const TrainConfig& c, int ranks) {
    if (!c.dump_state.empty() && (ranks > 1 || c.batch * c.seq_len != c.total_batch))
        fail_usage(
            "--dump-state needs one rank and no accumulation: --total-batch %d must be --batch %d x --seq-len %d",
            c.total_batch, c.batch, c.seq_len);
    if (c.data != "synthetic") require_no_bytes(c);
}

std::string command_line(const Config& c, const std::string& without) {
    std::string command = shell_word(program_name);
    for (const Option& o : OPTIONS)
        if (c.is_chosen(o.name) && o.name != without) command += " " + option_words(o.name, value_text(c, o));
    return command;
}

double learning_rate(const TrainConfig& c, int64_t step) {
    const int64_t warmup = warmup_steps(c);
    if (step <= warmup) return c.lr * double(step) / double(warmup);
    const double progress = c.steps > warmup ? std::min(1.0, double(step - warmup) / double(c.steps - warmup)) : 1.0;
    double fraction = 1;  // of the way from lr_final up to 1
    if (c.schedule == "cosine") fraction = 0.5 * (1 + std::cos(M_PI * progress));
    if (c.schedule == "linear") fraction = 1 - progress;
    if (c.schedule == "wsd") fraction = std::min(1.0, (1 - progress) / 0.2);
    return c.lr * (c.lr_final + (1 - c.lr_final) * fraction);
}
