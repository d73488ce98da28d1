// options.h: what the user can set. One table makes parsing, validation, --help and the run's manifest. Used by
// train_nsa.cu; options in files are in config_files.h, the printing of --help in help.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <unistd.h>

#include "../data/data_sets.h"
#include "../data/tokenize.h"
#include "../data/vocabulary.h"
#include "../base/gpu_search.h"
#include "../base/files.h"
#include "../model/shape.h"

// What Model and Activations see: the architecture, which config.json keeps, and what a step does with it. 0 and ""
// mean "as the preset has it".
struct ModelConfig {
    std::string attention = "nsa", branches, tokenizer;
    int64_t layers = 0, dim = 0, heads = 0, kv_groups = 0, head_dim = 0, cmp_block = 0, cmp_stride = 0, slc_block = 0,
            slc_count = 0, window = 0, phi_hidden = 0, mlp_hidden = 0, seq_len = 0, rope_base = 10000;
    bool qk_norm = false, smear = false;
    std::string head;
    int64_t vocab_size = 0;     // follows from the tokenizer and its --vocab-dir
    uint32_t vocab_digest = 0;  // of its tokens, see Tokenizer::digest; 0: not known, or bytes
    // its weights and their update
    std::string init, optimizer;
    int64_t seed = 0;
    double weight_decay = 0, grad_clip = 0;
    // a step on the ranks
    int64_t batch = 0, total_batch = 0, recompute = 0, zero = 0;
    double bucket_mb = 0;
};

// What choose_device() sees.
struct MachineConfig {
    std::string device, attention_kernel = "auto", cpu_dtype;
    int64_t threads = 0;
};

// How a model writes text: in training, and in the verb `sample`.
struct SampleConfig {
    std::string prompt;
    std::vector<std::string> prompt_file;
    double temperature = 0, top_p = 0;
    int64_t top_k = 0, tokens = 0;
    bool interactive = false, past_end = false;
};

// Who has set an option, the weakest first.
enum class Source { DEFAULT, PRESET, CHECKPOINT, RUN_JSON, MACHINE, CONFIG_FILE, COMMAND_LINE };

struct Setting {
    Source source = Source::DEFAULT;
    std::string reason;  // of MACHINE: why it cannot give what the run had
};

// What the training loop sees.
struct TrainConfig : ModelConfig, MachineConfig, SampleConfig {
    std::string model, init_from, data, val_data, vocab_dir, hellaswag;
    int64_t steps = 0;
    double lr = 0, lr_final = 0;
    std::string warmup, schedule, grad_reduce;
    int64_t eval_every = 0, eval_batches = 0, log_every = 0, sample_every = 0, sample_tokens = 0, save_every = 0,
            keep = 0, keep_every = 0;
    double stall_timeout = 0;
    std::string out, config, dump_state;
    bool resume = false, tensorboard = false, allow_new_data = false;
    std::map<std::string, Setting> settings;  // of the options that somebody has set; the others have their default

    Setting setting_of(const std::string& option) const {
        const auto found = settings.find(option);
        return found == settings.end() ? Setting() : found->second;
    }
    // For this start of the program; or for it, or when the run or the model began that it goes on with.
    bool is_given(const std::string& option) const { return setting_of(option).source >= Source::CONFIG_FILE; }
    bool is_chosen(const std::string& option) const { return setting_of(option).source > Source::PRESET; }
};

// The checkpoint that a verb reads. eval and inspect take texts too, inspect and report write a page.
struct CheckpointConfig {
    std::string from, at_step;
    std::vector<std::string> runs;  // every --from, in order
    int64_t trained_seq_len = 0;
    std::string html, json;
    std::vector<std::string> text;
};

// All that a command line can give. Whoever needs a part takes one of the structs above, or TokenizeConfig.
struct Config : TrainConfig, CheckpointConfig, TokenizeConfig {
    std::string verb = "train";
    bool help = false, version = false;
};

enum Verb : unsigned {
    TRAIN = 1,
    TOKENIZE = 2,
    SAMPLE = 4,
    EVAL = 8,
    CHECK_VERB = 16,
    EXPORT = 32,
    IMPORT = 64,
    REPORT = 128,
    INSPECT = 256,
    VOCABULARY = 512,
    EVERY_VERB = 1023
};

// The values that an option takes: a range of numbers, words "a|b|c", or, where there is neither, any text.
struct Values {
    double low = 0, high = 0;
    const char* choices = nullptr;

    Values(const char* choices) : choices(choices) {}
    Values(double low, double high) : low(low), high(high) {}
};
using between = Values;
inline const Values ANY(nullptr);

// What else is true of an option.
enum Trait : unsigned {
    OF_MODEL = 1,   // stands in config.json
    NSA_ONLY = 2,   // says nothing where no layer is of NSA; the window's size is for layers of windows too
    PER_START = 4,  // of one start of the program: a resume does not inherit it
    PATH = 8        // names files or a folder
};

struct Option : Values {
    const char* name;
    unsigned verbs, traits;
    const char *default_text, *help;  // "preset" and "auto" are worked out later
    // Where its value is; one of these.
    int64_t Config::*integer = nullptr;
    double Config::*real = nullptr;
    std::string Config::*text = nullptr;
    bool Config::*flag = nullptr;
    std::vector<std::string> Config::*list = nullptr;

    template <class Part, class T>
    Option(const char* name, unsigned verbs, T Part::*field, const char* default_text, Values values, const char* help,
           unsigned traits = 0)
        : Values(values), name(name), verbs(verbs), traits(traits), default_text(default_text), help(help) {
        if constexpr (std::is_same_v<T, int64_t>) integer = field;
        else if constexpr (std::is_same_v<T, double>) real = field;
        else if constexpr (std::is_same_v<T, std::string>) text = field;
        else if constexpr (std::is_same_v<T, bool>) flag = field;
        else list = field;
    }
};

constexpr double THOUSAND = 1e3, MILLION = 1e6, TRILLION = 1e12;

inline const Option OPTIONS[] = {
    // the model; the letters are those of dev/MODEL.md and the paper
    {"model", TRAIN | CHECK_VERB, &TrainConfig::model, "tiny", "tiny|2m|50m|125m|350m",
     "preset for the options whose default is 'preset'; 2m: an hour on a laptop's CPU; 50m: an evening on a "
     "GPU of 8 GB, untuned; 350m: a GPU of 80 GB, untuned; check: whose memory and FLOPs, 125m without it"},
    {"attention", TRAIN, &ModelConfig::attention, "nsa", ANY,
     "of each layer: nsa, full (dense causal attention, the baseline), window (the last --window tokens alone); or a "
     "pattern of them that repeats: window,nsa",
     OF_MODEL},
    {"branches", TRAIN | EVAL, &ModelConfig::branches, "all", "all|cmp,slc|cmp,win|slc,win|cmp|slc|win",
     "leaves the other branches' gates at 0, for comparisons; eval: all means those of the training",
     OF_MODEL | NSA_ONLY},
    {"layers", TRAIN, &ModelConfig::layers, "preset", between(1, THOUSAND), "transformer layers", OF_MODEL},
    {"dim", TRAIN, &ModelConfig::dim, "preset", between(1, 64 * THOUSAND), "width of the residual stream, C", OF_MODEL},
    {"heads", TRAIN, &ModelConfig::heads, "preset", between(1, THOUSAND), "query heads, H", OF_MODEL},
    {"kv-groups", TRAIN, &ModelConfig::kv_groups, "preset", between(1, THOUSAND),
     "groups of heads that share keys and values, G; divides --heads", OF_MODEL},
    {"head-dim", TRAIN, &ModelConfig::head_dim, "preset", between(2, 512), "dimension of a head, D; even", OF_MODEL},
    {"cmp-block", TRAIN, &ModelConfig::cmp_block, "preset", between(1, 4096), "tokens of a compressed block, l",
     OF_MODEL | NSA_ONLY},
    {"cmp-stride", TRAIN, &ModelConfig::cmp_stride, "preset", between(1, 4096),
     "tokens between compressed blocks, d; divides --cmp-block and --slc-block", OF_MODEL | NSA_ONLY},
    {"slc-block", TRAIN, &ModelConfig::slc_block, "preset", between(1, 4096), "tokens of a selection block, l'",
     OF_MODEL | NSA_ONLY},
    {"slc-count", TRAIN, &ModelConfig::slc_count, "preset", between(3, 4096),
     "selected blocks per query and group, n; the first, the last two are always among them", OF_MODEL | NSA_ONLY},
    {"window", TRAIN, &ModelConfig::window, "preset", between(1, MILLION),
     "keys of the sliding window, w; the query's own included", OF_MODEL | NSA_ONLY},
    {"phi-hidden", TRAIN, &ModelConfig::phi_hidden, "preset", between(1, 64 * THOUSAND),
     "hidden width of the block compressor, F", OF_MODEL | NSA_ONLY},
    {"mlp-hidden", TRAIN, &ModelConfig::mlp_hidden, "preset", between(1, 256 * THOUSAND), "hidden width of the MLP",
     OF_MODEL},
    {"qk-norm", TRAIN, &ModelConfig::qk_norm, "off", ANY,
     "RMSNorm, with learnt gains, of every head of the queries and keys, before RoPE", OF_MODEL},
    {"rope-base", TRAIN, &ModelConfig::rope_base, "10000", between(1, 1e9),
     "base of RoPE's angles; with --init-from and a longer --seq-len a larger one, such as 500000, lengthens a trained "
     "model's context",
     OF_MODEL},
    {"smear", TRAIN, &ModelConfig::smear, "off", ANY,
     "each position's input gets a learnt, gated part of the token before it", OF_MODEL},
    {"head", TRAIN, &ModelConfig::head, "tied", "tied|untied",
     "untied: a matrix of its own in place of the embedding; it starts at zero, and so do the layers' output "
     "projections, but under --init random",
     OF_MODEL},
    {"init-from", TRAIN, &TrainConfig::init_from, "", ANY,
     "folder of a run or of one checkpoint whose weights this run begins with, at step 0; the model's options are "
     "taken from there",
     PATH},
    {"init", TRAIN, &ModelConfig::init, "preset", "standard|narrow|random",
     "standard: GPT-2's deviation of 0.02; narrow: 1/sqrt(inputs) for it; random: the same, and every tensor drawn; "
     "with --head untied, narrow takes the place of a preset's random"},
    // data
    {"data", TRAIN, &TrainConfig::data, "synthetic", ANY,
     "training shards, a glob in quotes, or several with weights, 'a_*.bin:3,b_*.bin:1', which are mixed exactly; or "
     "synthetic: the built-in corpus",
     PATH},
    {"val-data", TRAIN | EVAL, &TrainConfig::val_data, "", ANY,
     "validation shards, a glob in quotes, or several by name, 'web=a_*.bin,code=b_*.bin', of which the first decides; "
     "or synthetic: of the built-in corpus",
     PATH},
    {"hellaswag", TRAIN | EVAL, &TrainConfig::hellaswag, "", ANY,
     "multiple choice: HellaSwag's .jsonl, llm.c's .bin of it, or any file of these forms; in training with every "
     "validation",
     PATH},
    {"tokenizer", TRAIN | TOKENIZE, &ModelConfig::tokenizer, "preset", "bytes|gpt2",
     "vocabulary: 256 bytes, or a BPE of GPT-2's kind, GPT-2's 50257 tokens or those of --vocab-dir; tokenize "
     "without it: gpt2",
     OF_MODEL},
    {"vocab-dir", TRAIN | TOKENIZE | SAMPLE | EVAL | EXPORT | INSPECT, &TrainConfig::vocab_dir, "", ANY,
     "folder with vocab.bpe + encoder.json or tokenizer.json of any size, a .tiktoken file or gpt2_tokenizer.bin",
     PATH},
    // the optimiser
    {"batch", TRAIN | EVAL, &ModelConfig::batch, "auto", between(1, 64 * THOUSAND),
     "sequences per rank and micro-step"},
    {"seq-len", TRAIN | EVAL, &ModelConfig::seq_len, "preset", between(1, MILLION),
     "tokens per sequence, T; in eval without it the trained length", OF_MODEL},
    {"total-batch", TRAIN, &ModelConfig::total_batch, "preset", between(1, 1e10),
     "tokens per optimiser step, over all ranks and micro-steps; without it near the preset's, in whole micro-batches; "
     "50m and larger on a CPU: one sequence per rank"},
    {"recompute", TRAIN, &ModelConfig::recompute, "0", between(0, 2),
     "activations kept: 0 all, 1 not the cheap elementwise ones, 2 only each layer's input; same results, less memory"},
    {"steps", TRAIN, &TrainConfig::steps, "preset", between(0, TRILLION), "optimiser steps"},
    {"lr", TRAIN, &TrainConfig::lr, "preset", between(0, 10), "highest learning rate"},
    {"warmup", TRAIN, &TrainConfig::warmup, "preset", ANY,
     "steps of linear warm-up; or tokens, with K, M or B behind the number: 2M"},
    {"schedule", TRAIN, &TrainConfig::schedule, "cosine", "cosine|linear|constant|wsd",
     "after warm-up; wsd: constant, then linear over the last fifth, to zero with --lr-final 0"},
    {"lr-final", TRAIN, &TrainConfig::lr_final, "0.1", between(0, 1), "the schedule ends at this fraction of --lr"},
    {"optimizer", TRAIN, &ModelConfig::optimizer, "preset", "adamw|muon",
     "muon: orthogonal updates for the layers' matrices, but AdamW for embedding, norms, biases and gates"},
    {"weight-decay", TRAIN, &ModelConfig::weight_decay, "0.1", between(0, 10),
     "of matrices; norms and biases have none"},
    {"grad-clip", TRAIN, &ModelConfig::grad_clip, "1.0", between(0, TRILLION),
     "largest global L2 norm of the gradient; 0: no clipping"},
    // ranks
    {"bucket-mb", TRAIN, &ModelConfig::bucket_mb, "25", between(0.001, 4096),
     "megabytes of fp32 gradients that are reduced at a time, while the backward pass goes on"},
    {"grad-reduce", TRAIN, &TrainConfig::grad_reduce, "fp32", "fp32|bf16",
     "format in which gradients travel between ranks"},
    {"zero", TRAIN, &ModelConfig::zero, "0", between(0, 1),
     "1: optimiser state (moments, fp32 master weights) is shared out over the ranks, and with it the work of muon"},
    // the run
    {"seed", TRAIN | SAMPLE | TOKENIZE, &ModelConfig::seed, "1337", between(0, 9e15),
     "of weights, data order and samples; of tokenize: of the documents drawn for validation"},
    {"eval-every", TRAIN, &TrainConfig::eval_every, "preset", between(0, TRILLION),
     "steps between validations; 0: only at the end"},
    {"eval-batches", TRAIN | EVAL, &TrainConfig::eval_batches, "8", between(1, MILLION),
     "validation tokens, in units of --total-batch; in eval of --batch sequences, where all is the default"},
    {"log-every", TRAIN, &TrainConfig::log_every, "auto", between(1, TRILLION),
     "steps between the lines printed; auto: a line a second at most; the first, the last and those that changed no "
     "weight have theirs always, and the logs have all"},
    {"sample-every", TRAIN, &TrainConfig::sample_every, "0", between(0, TRILLION),
     "steps between samples; 0: only at the end"},
    {"sample-tokens", TRAIN, &TrainConfig::sample_tokens, "256", between(0, MILLION),
     "tokens of such a sample; 0: none"},
    {"prompt", TRAIN | SAMPLE, &SampleConfig::prompt, "", ANY, "text to continue; none: a new document"},
    {"save-every", TRAIN, &TrainConfig::save_every, "preset", between(0, TRILLION),
     "steps between checkpoints; 0: only at the end, whatever ends the run"},
    {"keep", TRAIN, &TrainConfig::keep, "0", between(0, MILLION),
     "newest checkpoints to keep, beside the one with the lowest validation loss; 0: all"},
    {"keep-every", TRAIN, &TrainConfig::keep_every, "0", between(0, TRILLION),
     "checkpoints of steps divisible by this are kept for ever; 0: none"},
    {"stall-timeout", TRAIN | EVAL, &TrainConfig::stall_timeout, "180", between(0, MILLION),
     "seconds without any progress on a rank after which the program ends, ten times that while a checkpoint is "
     "written; 0: wait for ever"},
    {"out", TRAIN | TOKENIZE | EXPORT | IMPORT | VOCABULARY, &TrainConfig::out, "auto", ANY,
     "folder of the run; of tokenize: prefix of the shards; of export, import and vocabulary: a new or an empty "
     "folder",
     PER_START | PATH},
    {"resume", TRAIN, &TrainConfig::resume, "off", ANY,
     "continue from the newest checkpoint under --out; --resume RUN is --resume --out RUN", PER_START},
    {"allow-new-data", TRAIN, &TrainConfig::allow_new_data, "off", ANY,
     "a resume may go on with other shards than the checkpoint's, in a new order, and says what has changed",
     PER_START},
    {"config", TRAIN, &TrainConfig::config, "", ANY,
     "JSON file of options: the run.json of a run, of which all but --out count, or one by hand, {\"lr\": 1e-3, ...}; "
     "the command line goes before it",
     PER_START | PATH},
    {"tensorboard", TRAIN, &TrainConfig::tensorboard, "off", ANY,
     "the numbers of log.jsonl go into TensorBoard's event files too, beside it"},
    {"device", TRAIN | SAMPLE | EVAL | CHECK_VERB | INSPECT, &MachineConfig::device, "auto", DEVICE_CHOICES,
     "auto: a GPU if there is one"},
    {"attention-kernel", TRAIN | SAMPLE | EVAL | CHECK_VERB | INSPECT, &MachineConfig::attention_kernel, "auto", ANY,
     "kernels of attention on a GPU; auto: the fastest that fit; plain: the simplest; check lists those of this build"},
    {"cpu-dtype", TRAIN | SAMPLE | EVAL | INSPECT, &MachineConfig::cpu_dtype, "fp32", "fp32|bf16",
     "of the CPU engine; bf16: the inputs of its matrix products are rounded to bf16, the sums stay fp32; needs "
     "AVX512_BF16"},
    {"threads", EVERY_VERB & ~(EXPORT | IMPORT), &MachineConfig::threads, "auto", between(1, 1024),
     "CPU threads of this rank; auto: its share of the machine's cores, or OMP_NUM_THREADS where that is less"},
    {"dump-state", TRAIN, &TrainConfig::dump_state, "", ANY,
     "write parameters, gradients, logits, loss and selection of the first batch to this safetensors file, and end",
     PER_START | PATH},
    // the other verbs
    {"from", SAMPLE | EVAL | EXPORT | IMPORT | REPORT | INSPECT, &CheckpointConfig::from, "", ANY,
     "folder of a run or of one checkpoint; of import: a folder that export wrote; of report: a run, or several laid "
     "over each other",
     PATH},
    {"step", SAMPLE | EVAL | EXPORT | INSPECT, &CheckpointConfig::at_step, "last", ANY,
     "which of the run's checkpoints: that of this step; best: with the lowest validation loss; last: the newest that "
     "is whole"},
    {"html", REPORT | INSPECT, &CheckpointConfig::html, "", ANY,
     "page to write; without it the report is text on the terminal", PATH},
    {"json", EVAL | INSPECT, &CheckpointConfig::json, "", ANY,
     "file to write: what the page of inspect shows; of eval a line for each set or text, with its loss, and for "
     "--hellaswag, with its accuracies",
     PATH},
    {"text", EVAL | INSPECT, &CheckpointConfig::text, "", ANY,
     "files of text as it is, or .jsonl; - for stdin; inspect shows one, eval measures each", PATH},
    {"prompt-file", SAMPLE, &SampleConfig::prompt_file, "", ANY,
     "files with a prompt each, or of .jsonl one in each line's \"text\"; - for stdin", PATH},
    {"interactive", SAMPLE, &SampleConfig::interactive, "off", ANY, "continue each line of stdin in turn, as --prompt"},
    {"tokens", SAMPLE, &SampleConfig::tokens, "256", between(0, MILLION), "tokens to write at most"},
    {"past-end", SAMPLE, &SampleConfig::past_end, "off", ANY, "go on behind an end-of-text, in place of ending there"},
    {"temperature", TRAIN | SAMPLE, &SampleConfig::temperature, "0.8", between(0, 100),
     "0: always the likeliest token"},
    {"top-k", TRAIN | SAMPLE, &SampleConfig::top_k, "0", between(0, MILLION),
     "choose among the k likeliest tokens; 0: all"},
    {"top-p", TRAIN | SAMPLE, &SampleConfig::top_p, "1", between(0, 1),
     "choose among the likeliest tokens of this total probability"},
    {"in", TOKENIZE | VOCABULARY, &TokenizeConfig::in, "", ANY,
     "text: files .txt (one document each) or .jsonl (an object a line); folders, with all such files under them; "
     "patterns; - for stdin",
     PATH},
    {"text-key", TOKENIZE | VOCABULARY, &TokenizeConfig::text_key, "text", ANY, "key of the text in a line of .jsonl"},
    {"val-fraction", TOKENIZE, &TokenizeConfig::val_fraction, "0.01", between(0, 1),
     "share of the tokens that goes to the validation shards"},
    {"shard-tokens", TOKENIZE, &TokenizeConfig::shard_tokens, "100000000", between(1024, 2e9), "tokens per shard"},
    {"split-documents", TOKENIZE | VOCABULARY, &TokenizeConfig::split_documents, "", ANY,
     "text that separates documents inside a .txt"},
    {"skip-bad", TOKENIZE | VOCABULARY, &TokenizeConfig::skip_bad, "off", ANY,
     "pass over what cannot be read, files and lines of .jsonl, and say how many"},
    {"size", VOCABULARY, &TokenizeConfig::size, "8192", between(257, 65536),
     "tokens of the new vocabulary, with the 256 bytes and end-of-text"},
    {"help", EVERY_VERB, &Config::help, "off", ANY, "this text", PER_START},
    {"version", EVERY_VERB, &Config::version, "off", ANY, "what was built: version, compiler, engines; and end",
     PER_START},
};

// What --model stands for: the options whose default is 'preset', and --batch. A column a preset:
//   tiny  learns the built-in corpus in minutes on two cores
//   2m    for an hour on a laptop's CPU; of bytes, so that it needs no vocabulary. Blocks, optimiser and learning rate
//         are the best of the sweeps in dev/EVIDENCE.md, "Optimiser and options", and the batch is theirs
//   50m   for an evening on a GPU of 8 GB. Untuned, as is 350m: sizes by the memory that `check` works out, batch and
//         learning rate by analogy
//   125m  a model of the paper's kind, and of the size of GPT-2 small
//   350m  for GPUs of 80 GB; 20 tokens for each parameter
// clang-format off
inline const struct {
    const char *option, *values[5];
} PRESET_VALUES[] = {
    {"model",        {    "tiny",       "2m",      "50m",     "125m",     "350m"}},
    {"layers",       {       "2",        "4",        "8",       "12",       "24"}},
    {"dim",          {     "128",      "192",      "512",      "768",     "1024"}},
    {"heads",        {       "4",        "6",        "8",       "12",       "16"}},
    {"kv-groups",    {       "2",        "2",        "2",        "2",        "4"}},
    {"head-dim",     {      "32",       "32",       "64",       "64",       "64"}},
    {"cmp-block",    {       "8",        "4",       "32",       "32",       "32"}},
    {"cmp-stride",   {       "4",        "4",       "16",       "16",       "16"}},
    {"slc-block",    {      "16",       "16",       "64",       "64",       "64"}},
    {"slc-count",    {       "6",        "8",       "16",       "16",       "16"}},
    {"window",       {      "16",       "56",      "512",      "512",      "512"}},
    {"phi-hidden",   {      "32",       "32",      "128",      "128",      "128"}},
    {"mlp-hidden",   {     "512",      "768",     "2048",     "3072",     "4096"}},
    {"init",         {  "random",   "narrow", "standard", "standard", "standard"}},
    {"tokenizer",    {   "bytes",    "bytes",     "gpt2",     "gpt2",     "gpt2"}},
    {"batch",        {       "8",        "8",        "8",       "16",       "16"}},
    {"seq-len",      {     "256",     "1024",     "2048",     "2048",     "2048"}},
    {"total-batch",  {    "2048",     "8192",    "65536",   "524288",   "524288"}},
    {"steps",        {    "2100",     "1024",     "6000",    "19000",    "13500"}},
    {"warmup",       {      "20",       "50",      "20M",      "700",     "350M"}},
    {"optimizer",    {   "adamw",     "muon",    "adamw",    "adamw",    "adamw"}},
    {"lr",           {    "2e-3",     "8e-3",     "1e-3",     "6e-4",     "3e-4"}},
    {"eval-every",   {     "100",      "100",      "250",      "250",      "250"}},
    {"save-every",   {       "0",      "200",     "1000",     "1000",     "1000"}},
};
// clang-format on
std::vector<Config> make_presets();
inline const std::vector<Config> PRESETS = make_presets();

struct VerbName {
    const char* name;
    Verb verb;
    const char* help;
};
inline const VerbName VERBS[] = {
    {"train", TRAIN, "train a model (this is the verb when none is given)"},
    {"vocabulary", VOCABULARY, "learn a vocabulary from text: --in FILE... --size 8192 --out DIR"},
    {"tokenize", TOKENIZE, "turn text into token shards: --in FILE... --out PREFIX"},
    {"sample", SAMPLE, "continue a prompt: --from RUN_DIR --prompt TEXT"},
    {"eval", EVAL, "loss, perplexity and bits per byte: --from RUN_DIR --val-data GLOB, or --text FILE..."},
    {"export", EXPORT, "a folder for Hugging Face's transformers: --from RUN_DIR --out DIR"},
    {"import", IMPORT, "such a folder as a run to begin from: --from DIR --out RUN_DIR"},
    {"report", REPORT, "loss curves and numbers of a run, or of several: --from RUN_DIR [--html FILE]"},
    {"inspect", INSPECT, "which blocks a model selects in a text: --from RUN_DIR --text FILE --html FILE"},
    {"check", CHECK_VERB, "what this build and machine have, and a gradient self-test"},
};

inline const VerbName* verb_named(const std::string& name) { return row_named(VERBS, name); }
inline const Option* find_option(const std::string& name) { return row_named(OPTIONS, name); }
inline const Option& option_named(const std::string& name) { return *find_option(name); }

// "seq-len" as JSON files spell it.
std::string underscored(std::string name);

std::string value_text(const Config& c, const Option& o);

std::string range_text(const Option& o);

bool is_choice(const std::string& word, const std::string& choices);

// An option as it can be typed.
std::string option_words(const std::string& name, const std::string& value);

void set_option(Config& c, const Option& o, const std::string& value);

// Sets an option unless a stronger source has set it; returns whether it did. So the sources may come in any order.
bool overlay(Config& c, const Option& o, const std::string& value, Source source, const std::string& reason = "");

// Is this command line for one process alone, whatever a shell of a cluster has in its environment? Only mpirun starts
// several of these, which are refused.
bool is_for_one_process(int argc, const char* const* argv, bool by_mpirun);

// What was asked for: the command line over the table's defaults.
Config parse_options(int argc, const char* const* argv);

const Config& preset_of(const TrainConfig& c);

// What the preset decides, where nobody else has.
void apply_preset(Config& c);

// A configuration as this command line would make it.
Config options_of(const std::string& words);

// The layers of --attention; none where the text is no pattern of them.
std::vector<LayerKind> layer_kinds(const std::string& pattern);
bool has_layers(const ModelConfig& c, LayerKind kind);

// Contradictions between options of the model. `where` names the source: the command line or a config.json.
void validate_model(const ModelConfig& c, const char* where);

// A step takes minutes to hours on a CPU, so there it is one sequence per rank unless the user says otherwise.
inline bool is_too_large_for_cpu(const TrainConfig& c) { return preset_of(c).total_batch > 16384; }

// Batch sizes. What was not given follows from the preset, the device and the number of ranks; what was given must fit
// together.
void resolve_batch(TrainConfig& c, int ranks, bool gpu);

// Does no layer of this model have what the option is of?
bool is_of_no_layer(const Option& o, const ModelConfig& c);

// Steps of warm-up. Tokens become whole steps, which --total-batch makes more or fewer.
int64_t warmup_steps(const TrainConfig& c);

// Options given for what no layer has, or for a file that is there.
void validate_given(const TrainConfig& c);

// A warning where a run ends within its warm-up.
void warn_of_short_run(const TrainConfig& c);

// The built-in corpus is no text of GPT-2's tokens.
void require_no_bytes(const TrainConfig& c);

// What only some numbers of ranks can do.
void validate_run(const TrainConfig& c, int ranks);

// How the user calls the program, for commands that are printed.
inline std::string program_name = "./train_nsa";

// The command that gives the same options again, but for one.
std::string command_line(const Config& c, const std::string& without);

// Of a step, counted from 1: linear warm-up, then --schedule down to lr * lr_final at the last step.
double learning_rate(const TrainConfig& c, int64_t step);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "options.cpp"
#endif
