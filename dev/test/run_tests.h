// run_tests.h: the program as its user meets it. Most tests start the built ./train_nsa in a folder of their own and
// look at exit status, stderr and the files it leaves: options, errors, resuming, ranks, checkpoints and logs, the way
// from a text to a sample. The rest calls the functions around the model (sampling, schedule, batch sizes, the
// safetensors reader) and compares them with oracles written here.
#pragma once
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "harness.h"

#ifndef NSA_WITHOUT_MAIN
#define NSA_WITHOUT_MAIN
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"  // main's helpers, which nobody calls here
#include "../../train_nsa.cu"
#pragma GCC diagnostic pop
#endif

extern char** environ;

// ---------------------------------------------------------------------------------------------------------------------
// Starting the program, on the CPU engine: GPUs are hidden from it, whose bf16 sums no limit here is made for.

namespace program {

using Words = std::vector<std::string>;
using Options = std::map<std::string, std::string>;  // name without dashes -> value

struct Result {
    int status = 0;  // of exit; 128 + number of the signal that ended it; 1000: it ran past the limit and was killed
    double seconds = 0;
    std::string out, err;
};

struct Start {
    Words environment;  // NAME=VALUE, over the test's own without what MPI launchers set
    bool only_this_environment = false;
    uint64_t largest_file = 0;   // bytes; 0: no limit. Writing beyond it fails like a full disk
    uint64_t address_space = 0;  // bytes; 0: no limit
    std::string kill_after;      // SIGKILL when stdout holds this
    double seconds = 60;         // limit
};

// ./train_nsa of the folder the tests were started in.
inline const std::string& path() {
    static const std::string absolute = std::filesystem::absolute("train_nsa").string();
    return absolute;
}

inline std::vector<std::string> child_environment(const Start& start) {
    std::vector<std::string> all = start.environment;
    all.push_back("CUDA_VISIBLE_DEVICES=");
    for (char** e = environ; *e && !start.only_this_environment; e++) {
        const std::string variable = *e, name = variable.substr(0, variable.find('=') + 1);
        // the last: the tests' own, see set_passive_omp_wait
        bool launcher = name == "RANK=" || name == "WORLD_SIZE=" || name == "OMP_WAIT_POLICY=";
        for (const char* beginning : {"PMI_", "PMIX_", "OMPI_", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_"})
            launcher = launcher || name.compare(0, std::strlen(beginning), beginning) == 0;
        const bool replaced = std::any_of(start.environment.begin(), start.environment.end(),
                                          [&](const std::string& s) { return s.compare(0, name.size(), name) == 0; });
        if (!launcher && !replaced) all.push_back(variable);
    }
    return all;
}

// Runs words[0] with the others as arguments, without a shell, stdin empty, in a process group of its own; waits for
// its end.
inline Result execute(const Words& words, const Start& start = {}) {
    const std::vector<std::string> environment = child_environment(start);
    std::vector<char*> argv, envp;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    for (const std::string& variable : environment) envp.push_back(const_cast<char*>(variable.c_str()));
    argv.push_back(nullptr), envp.push_back(nullptr);
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) fail("cannot make a pipe: %s", std::strerror(errno));
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const double begin = seconds_now();
    const pid_t child = fork();
    if (child < 0) fail("cannot fork: %s", std::strerror(errno));
    if (child == 0) {
        setpgid(0, 0);
        if (start.largest_file) {
            const struct rlimit limit = {start.largest_file, start.largest_file};
            setrlimit(RLIMIT_FSIZE, &limit);
            signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG
        }
        if (start.address_space) {
            const struct rlimit limit = {start.address_space, start.address_space};
            setrlimit(RLIMIT_AS, &limit);
        }
        if (dup2(null, 0) < 0 || dup2(out[1], 1) < 0 || dup2(err[1], 2) < 0) _exit(127);
        execve(argv[0], argv.data(), envp.data());
        _exit(127);
    }
    setpgid(child, child);
    close(out[1]), close(err[1]), close(null);
    Result result;
    bool killed = false, late = false;
    struct pollfd streams[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
        poll(streams, 2, 100);
        for (int i = 0; i < 2; i++) {
            if (streams[i].fd < 0 || !streams[i].revents) continue;
            char bytes[4096];
            const ssize_t n = read(streams[i].fd, bytes, sizeof bytes);
            if (n > 0) (i ? result.err : result.out).append(bytes, size_t(n));
            else if (n == 0 || errno != EINTR) close(streams[i].fd), streams[i].fd = -1;
        }
        late = seconds_now() - begin > start.seconds;
        if (!killed &&
            (late || (!start.kill_after.empty() && result.out.find(start.kill_after) != std::string::npos))) {
            kill(-child, SIGKILL);  // the group: its own children too
            killed = true;
        }
    }
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    result.seconds = seconds_now() - begin;
    result.status = late ? 1000 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
}

inline Words joined(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
}

inline Result run(const Words& arguments, const Start& start = {}) {
    return execute(joined({path()}, arguments), start);
}

inline Words words_of(const Options& options) {
    Words words;
    for (const auto& [name, value] : options) words.push_back("--" + name + "=" + value);
    return words;
}

// The smallest model in which every branch has something to do: 7712 parameters, a step takes a millisecond.
inline Options small(const Options& more = {}) {
    Options options = {{"layers", "1"},    {"dim", "16"},      {"heads", "2"},        {"kv-groups", "1"},
                       {"head-dim", "8"},  {"cmp-block", "8"}, {"cmp-stride", "4"},   {"slc-block", "8"},
                       {"slc-count", "4"}, {"window", "16"},   {"phi-hidden", "8"},   {"mlp-hidden", "32"},
                       {"seq-len", "64"},  {"threads", "1"},   {"batch", "2"},        {"total-batch", "128"},
                       {"warmup", "0"},    {"lr", "0.01"},     {"eval-batches", "2"}, {"sample-tokens", "0"},
                       {"steps", "2"}};
    for (const auto& [name, value] : more) {
        if (value == "-") options.erase(name);  // not given
        else options[name] = value;
    }
    return options;
}
inline Words small_words(const Options& more = {}) { return words_of(small(more)); }
inline Result train(const Options& more, const Start& start = {}) { return run(small_words(more), start); }

// What lies wrong with a refusal, "" if nothing: the status, one line on stderr that begins as all errors do and holds
// all of `expected`.
inline std::string refusal_fault(const Result& r, int status, const Words& expected) {
    const std::string prefix = "train_nsa: error: ";
    std::string fault;
    if (r.status != status) fault += format_text("status %d, expected %d; ", r.status, status);
    if (r.err.compare(0, prefix.size(), prefix) != 0 || r.err.back() != '\n' ||
        std::count(r.err.begin(), r.err.end(), '\n') != 1)
        fault += "not one line of error; ";
    for (const std::string& word : expected)
        if (r.err.find(word) == std::string::npos) fault += "'" + word + "' is missing; ";
    return fault.empty() ? "" : fault + "stderr: '" + r.err + "'";
}

// The words are those that make the case; __VA_ARGS__: what the line must name.
#define CHECK_REFUSED(result, status, ...)                                                        \
    do {                                                                                          \
        tests().checks++;                                                                         \
        const std::string fault_ = program::refusal_fault(result, status, {__VA_ARGS__});         \
        if (!fault_.empty()) check_failed(__FILE__, __LINE__, "%s: %s", #result, fault_.c_str()); \
    } while (0)

// It ended well and had nothing to complain about.
#define REQUIRE_GOOD(result)                                                                                 \
    do {                                                                                                     \
        tests().checks++;                                                                                    \
        const program::Result& result_ = (result);                                                           \
        if (result_.status != 0 || !result_.err.empty()) {                                                   \
            check_failed(__FILE__, __LINE__, "status %d, stderr '%s'", result_.status, result_.err.c_str()); \
            throw TestAbort();                                                                               \
        }                                                                                                    \
    } while (0)

// A value of each option that it accepts; text options get a word.
inline std::string good_value(const Option& o) {
    if (o.integer || o.real) return format_text("%.17g", o.low);
    if (o.choices) return std::string(o.choices).substr(0, std::string(o.choices).find('|'));
    return o.flag ? "on" : "word";
}
inline std::string first_verb(const Option& o) {
    for (const VerbName& v : VERBS)
        if (o.verbs & v.verb) return v.name;
    return "";
}

// parse_options on a list of words, in this process.
inline Config parse(const Words& words, std::set<std::string>* given_out = nullptr) {
    std::vector<const char*> argv = {"train_nsa"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    std::set<std::string> given;
    Config c = parse_options(int(argv.size()), argv.data(), given);
    if (given_out) *given_out = given;
    return c;
}
inline Config parse_and_preset(const Words& words) {
    std::set<std::string> given;
    Config c = parse(words, &given);
    apply_preset(c, given);
    return c;
}

// ----- files

inline std::string shard(const std::vector<uint16_t>& tokens, int32_t vocab_size = 0) {
    std::vector<int32_t> header(256, 0);
    header[0] = 20240520, header[1] = 1, header[2] = int32_t(tokens.size()), header[3] = vocab_size;
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
           std::string(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
}
inline std::vector<uint16_t> random_tokens(size_t n, uint64_t seed, uint64_t below = 256) {
    std::vector<uint16_t> tokens(n);
    for (size_t i = 0; i < n; i++) tokens[i] = uint16_t(random_below(below, seed, random_stream(RANDOM_TEST), i));
    return tokens;
}

inline void copy_folder(const std::string& from, const std::string& to) {
    std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
}

inline void replace_in_file(const std::string& file, const std::string& old, const std::string& now) {
    std::string text = read_file(file);
    const size_t at = text.find(old);
    if (at == std::string::npos) fail("%s does not hold %s", file.c_str(), old.c_str());
    write_file(file, text.replace(at, old.size(), now));
}

// The value of a key in one of the program's JSON files, replaced as text: "dim": 16 -> "dim": `value`.
inline std::string with_json_value(std::string text, const std::string& key, const std::string& value) {
    const std::string quoted = "\"" + key + "\": ";
    const size_t at = text.find(quoted);
    if (at == std::string::npos) fail("no key %s in %s", key.c_str(), text.c_str());
    const size_t begin = at + quoted.size(),
                 end = text[begin] == '[' ? text.find(']', begin) + 1 : text.find_first_of(",}\n", begin);
    return text.replace(begin, end - begin, value);
}

inline std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}

// log.jsonl, a value per line.
inline std::vector<Json> log_of(const std::string& folder) {
    std::vector<Json> values;
    const std::string file = folder + "/log.jsonl";
    for (const std::string& line : lines_of(read_file(file))) values.push_back(parse_json(line, file));
    return values;
}
// A field of every line that has it, in order.
inline std::vector<double> logged(const std::string& folder, const std::string& field) {
    std::vector<double> values;
    for (const Json& line : log_of(folder))
        if (line.find(field) && (field != "tokens" || line.find("loss")))
            values.push_back(line.number(field, "log.jsonl"));  // of steps
    return values;
}

// A safetensors file read by this file's own few lines: the JSON header, offsets that follow each other without holes,
// nothing behind.
struct RawTensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;

    size_t count() const {
        size_t n = 1;
        for (int64_t extent : shape) n *= size_t(extent);
        return n;
    }
    template <class T>
    std::vector<T> values() const {
        std::vector<T> v(bytes.size() / sizeof(T));
        std::memcpy(v.data(), bytes.data(), v.size() * sizeof(T));
        return v;
    }
};
struct RawFile {
    std::map<std::string, RawTensor> tensors;
    std::map<std::string, std::string> metadata;
};
inline RawFile read_raw(const std::string& file) {
    const std::string bytes = read_file(file);
    RawFile raw;
    uint64_t length = 0;
    REQUIRE(bytes.size() >= 8);
    std::memcpy(&length, bytes.data(), 8);
    REQUIRE(length <= bytes.size() - 8);
    CHECK_EQUAL(length % 8, 0u);
    const Json header = parse_json(bytes.substr(8, length), file);
    const size_t data = 8 + length;
    std::map<int64_t, int64_t> spans;
    for (size_t i = 0; i < header.keys.size(); i++) {
        const Json& entry = header.items[i];
        if (header.keys[i] == "__metadata__") {
            for (size_t j = 0; j < entry.keys.size(); j++) raw.metadata[entry.keys[j]] = entry.items[j].string(file);
            continue;
        }
        RawTensor t;
        t.dtype = entry.string("dtype", file);
        for (const Json& extent : entry.array("shape", file)) t.shape.push_back(extent.integer(file));
        const int64_t begin = entry.array("data_offsets", file)[0].integer(file),
                      end = entry.array("data_offsets", file)[1].integer(file);
        REQUIRE(begin >= 0 && end >= begin && uint64_t(end) <= bytes.size() - data);
        t.bytes = bytes.substr(data + size_t(begin), size_t(end - begin));
        CHECK_EQUAL(t.bytes.size(), t.count() * (t.dtype == "U8" ? 1 : 4));
        CHECK(spans.emplace(begin, end).second);
        raw.tensors[header.keys[i]] = t;
    }
    int64_t at = 0;
    for (const auto& [begin, end] : spans) {
        CHECK_EQUAL(begin, at);
        at = end;
    }
    CHECK_EQUAL(data + size_t(at), bytes.size());
    return raw;
}

// The tensors of MODEL.md with their shapes.
inline std::map<std::string, std::vector<int64_t>> tensors_of_the_design(int64_t V, int64_t C, int64_t L, int64_t H,
                                                                         int64_t G, int64_t D, int64_t l, int64_t F,
                                                                         int64_t M, bool nsa) {
    std::map<std::string, std::vector<int64_t>> t = {{"embed_tokens.weight", {V, C}}, {"norm.weight", {C}}};
    for (int64_t i = 0; i < L; i++) {
        const std::string layer = "layers." + std::to_string(i) + ".", attn = layer + "attn.";
        t[layer + "attn_norm.weight"] = t[layer + "mlp_norm.weight"] = {C};
        t[attn + "q_proj.weight"] = {H * D, C}, t[attn + "o_proj.weight"] = {C, H * D};
        t[attn + "k_win_proj.weight"] = t[attn + "v_win_proj.weight"] = {G * D, C};
        t[layer + "mlp.fc1.weight"] = {M, C}, t[layer + "mlp.fc2.weight"] = {C, M};
        if (!nsa) continue;
        for (const char* name : {"k_cmp_proj", "v_cmp_proj", "k_slc_proj", "v_slc_proj"})
            t[attn + name + ".weight"] = {G * D, C};
        t[attn + "gate_proj.weight"] = {3 * H, C};
        for (const char* phi : {"phi_k", "phi_v"}) {
            t[attn + phi + ".fc1.weight"] = {F, l * D}, t[attn + phi + ".fc1.bias"] = {F},
                           t[attn + phi + ".fc2.weight"] = {D, F};
        }
    }
    return t;
}

// Every tensor of `expected` is there under the prefix as F32; returns how many.
inline size_t check_tensors(const RawFile& raw, const std::map<std::string, std::vector<int64_t>>& expected,
                            const std::string& prefix) {
    for (const auto& [name, shape] : expected) {
        const auto found = raw.tensors.find(prefix + name);
        tests().checks++;
        if (found == raw.tensors.end())
            check_failed(__FILE__, __LINE__, "tensor %s%s is missing", prefix.c_str(), name.c_str());
        else if (found->second.dtype != "F32" || found->second.shape != shape)
            check_failed(__FILE__, __LINE__, "tensor %s%s has another type or shape", prefix.c_str(), name.c_str());
    }
    return expected.size();
}

}  // namespace program

// ---------------------------------------------------------------------------------------------------------------------
// Options.

// Numbers beyond either end of their range, words outside their list, flags with a value: through the binary, for every
// option of the table.
TEST(run_options_out_of_range_are_refused) {
    using namespace program;
    for (const Option& o : option_table()) {
        const std::string name = "--" + std::string(o.name), verb = first_verb(o);
        Words wrong;
        if (o.integer || o.real)
            wrong = {format_text("%.17g", o.low - (o.integer ? 1 : 1e-3)),
                     format_text("%.17g", o.integer ? o.high + 1 : o.high * 1.001)};
        else if (o.choices) wrong = {"no_such_word"};
        else if (o.flag) wrong = {"maybe"};
        // (--help behind it would be obeyed by a program that took the value, instead of a training run.)
        for (const std::string& value : wrong)
            CHECK_REFUSED(run({verb, name + "=" + value, "--help"}), 2, name + " is '" + value + "'",
                          o.flag      ? "flag"
                          : o.choices ? o.choices
                                      : "..");
    }
}

TEST(run_options_are_parsed_strictly) {
    using namespace program;
    for (const Option& o : option_table()) {
        const std::string name = "--" + std::string(o.name), verb = first_verb(o);
        if (o.integer || o.real) {
            for (const char* wrong :
                 {"", "nan", "-nan", "inf", "-inf", "1e999", "x", "1x", "1 ", " 1", "\t1", "1,5", "--1", "1 2"})
                CHECK_FAILS(2, name.c_str(), parse({verb, name + "=" + wrong}));
            if (o.integer) CHECK_FAILS(2, name.c_str(), parse({verb, name + "=" + format_text("%.17g", o.low + 0.5)}));
            for (const double end : {o.low, o.high}) {  // both ends belong to the range
                const Config c = parse({verb, name, format_text("%.17g", end)});
                CHECK_EQUAL(o.integer ? double(c.*o.integer) : c.*o.real, end);
            }
        } else if (o.choices) {
            const std::string choices = o.choices;
            for (const std::string& wrong :
                 {std::string(), choices, choices + "|", choices.substr(0, choices.find('|') + 1), choices.substr(1)})
                CHECK_FAILS(2, name.c_str(), parse({verb, name + "=" + wrong}));
            std::istringstream words(choices);
            for (std::string word; std::getline(words, word, '|');)
                CHECK_EQUAL(parse({verb, name, word}).*o.text, word);
        } else if (o.text) {
            CHECK_EQUAL(parse({verb, name, "a b=c"}).*o.text, std::string("a b=c"));
            CHECK_EQUAL(parse({verb, name + "=--a=b"}).*o.text, std::string("--a=b"));
        } else if (o.list) {
            CHECK((parse({verb, name, "a.txt", "b.txt", "--threads", "1"}).*o.list ==
                   std::vector<std::string>{"a.txt", "b.txt"}));
        } else {
            CHECK(parse({verb, name}).*o.flag && parse({verb, name + "=on"}).*o.flag &&
                  !(parse({verb, name + "=off"}).*o.flag) && !(parse({verb}).*o.flag));
        }
        // A verb takes the options that the table gives it, and no other.
        for (const VerbName& v : VERBS) {
            const Words words = {v.name, name + "=" + good_value(o)};
            if (o.verbs & v.verb) CHECK((parse(words), true));
            else CHECK_FAILS(2, (name + " is no option of '" + v.name + "'").c_str(), parse(words));
        }
        CHECK_FAILS(2, (name + " is given twice").c_str(),
                    parse({verb, name + "=" + good_value(o), name + "=" + good_value(o)}));
        if (!o.flag) CHECK_FAILS(2, (name + " needs a value").c_str(), parse({verb, name}));
        if (!o.flag) CHECK_FAILS(2, (name + " needs a value").c_str(), parse({verb, name, "--threads=1"}));
        // A slip of the finger, the last letter twice, is told with the name that was meant.
        const std::string slip = std::string(o.name) + o.name[std::strlen(o.name) - 1];
        CHECK_FAILS(2, ("--" + slip + " is no option; did you mean " + name + "?").c_str(),
                    parse({verb, "--" + slip + "=1"}));
    }
}

TEST(run_usage_errors_end_with_status_2) {
    using namespace program;
    CHECK_REFUSED(run({"--layer", "2"}), 2, "--layer is no option", "did you mean --layers?");
    CHECK_REFUSED(run({"--val-dta=x"}), 2, "--val-dta", "did you mean --val-data?");
    const Result far = run({"--qwertyuiop", "2"});
    CHECK_REFUSED(far, 2, "--qwertyuiop is no option", "--help");
    CHECK(far.err.find("did you mean") == std::string::npos);
    CHECK_REFUSED(run({"--steps"}), 2, "--steps needs a value");
    CHECK_REFUSED(run({"--steps", "--resume"}), 2, "--steps needs a value");
    CHECK_REFUSED(run({"--steps", "1", "--steps=2"}), 2, "--steps is given twice");
    CHECK_REFUSED(run({"sample", "--steps", "1"}), 2, "--steps is no option of 'sample'");
    CHECK_REFUSED(run({"tokenize", "--from", "x"}), 2, "--from is no option of 'tokenize'");
    CHECK_REFUSED(run({"fly"}), 2, "'fly' is no verb");
    CHECK_REFUSED(run({""}), 2, "'' is no verb");
    CHECK_REFUSED(run({"train", "steps"}), 2, "'steps' is no option");
    CHECK_REFUSED(run({"-s", "1"}), 2, "'-s' is no option");
    CHECK_REFUSED(run({"--resume=perhaps"}), 2, "--resume");
    CHECK_REFUSED(run({"sample"}), 2, "--from");
    CHECK_REFUSED(run({"eval"}), 2, "--from");
    CHECK_REFUSED(run({"tokenize", "--out", "x"}), 2, "--in");
    CHECK_REFUSED(run({"tokenize", "--in", "x.txt"}), 2, "--out");
    TempFolder folder;
    write_file(folder.file("a.txt"), "words");
    CHECK_REFUSED(run({"tokenize", "--in", folder.file("a.txt"), "--out", folder.file("t")}), 2, "--vocab-dir");
    CHECK_REFUSED(run({"tokenize", "--in", folder.file("a.png"), "--out", folder.file("t"), "--tokenizer", "bytes"}), 2,
                  "--in", "a.png");
    CHECK_EQUAL(glob_files(folder.file("t*")).size(), 0u);
}

TEST(run_contradictions_between_options_are_refused) {
    using namespace program;
    TempFolder folder;
    struct {
        Options options;
        Words named;
    } const cases[] = {
        {{{"heads", "3"}, {"kv-groups", "2"}}, {"--heads 3", "--kv-groups 2"}},
        {{{"heads", "2"}, {"kv-groups", "4"}}, {"--heads 2", "--kv-groups 4"}},
        {{{"head-dim", "9"}}, {"--head-dim 9"}},
        {{{"cmp-block", "10"}}, {"--cmp-block 10", "--cmp-stride 4"}},
        {{{"cmp-block", "4"}, {"cmp-stride", "8"}}, {"--cmp-block 4", "--cmp-stride 8"}},
        {{{"slc-block", "10"}}, {"--slc-block 10", "--cmp-stride 4"}},
        {{{"slc-count", "2"}}, {"--slc-count", "2"}},
        {{{"total-batch", "100"}}, {"--total-batch 100", "--seq-len 64"}},
        {{{"total-batch", "32"}}, {"--total-batch 32", "--seq-len 64"}},
        {{{"total-batch", "192"}}, {"--total-batch 192", "--batch 2"}},
        {{{"cuda-graph", "1"}}, {"--cuda-graph 1", "on the CPU"}},
        {{{"stall-timeout", "0.5"}}, {"--stall-timeout 0.5", "at least 1"}},
        {{{"batch", "1"}, {"dump-state", folder.file("state.safetensors")}},
         {"--dump-state", "--total-batch 128", "--batch 1"}},
    };
    for (const auto& c : cases) {
        Options options = c.options;
        options["out"] = folder.file("run");
        const Result r = train(options);
        CHECK_REFUSED(r, 2, c.named[0], c.named.back());
    }
    CHECK_EQUAL(glob_files(folder.file("*")).size(), 0u);  // none of them began a run
}

TEST(run_device_cuda_is_refused_where_there_is_none) {
    using namespace program;
    TempFolder folder;
    REQUIRE_GOOD(train({{"steps", "1"}, {"out", folder.file("run")}}));
    write_file(folder.file("val.bin"), shard(random_tokens(200, 1)));
    CHECK_REFUSED(train({{"device", "cuda"}, {"out", folder.file("other")}}), 2, "--device cuda");
    CHECK_REFUSED(run({"check", "--device", "cuda"}), 2, "--device cuda");
    CHECK_REFUSED(run({"sample", "--from", folder.file("run"), "--device", "cuda"}), 2, "--device cuda");
    CHECK_REFUSED(run({"eval", "--from", folder.file("run"), "--val-data", folder.file("val.bin"), "--device", "cuda"}),
                  2, "--device cuda");
    CHECK(!file_exists(folder.file("other")));
}

// Sizes that no machine holds must be refused by name before the memory is asked for, not end in std::bad_alloc or an
// overflow.
TEST(run_sizes_beyond_any_machine_are_refused_by_name) {
    using namespace program;
    TempFolder folder;
    write_file(folder.file("train.bin"), shard(random_tokens(1000, 1)));
    Start start;
    start.seconds = 20;
#if defined(__SANITIZE_ADDRESS__)  // which reserves terabytes of addresses for itself
    start.environment = {"ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0"};
#else
    start.address_space = uint64_t(8) << 30;
#endif
    const Result validation = train({{"eval-batches", "1000000000000"}, {"out", folder.file("run")}}, start);
    CHECK(validation.status == 1 || validation.status == 2);
    CHECK_REFUSED(validation, validation.status, "--eval-batches");
    const Result overflow = train({{"eval-batches", "1000000000000"},
                                   {"total-batch", "64000000000"},
                                   {"batch", "2"},
                                   {"out", folder.file("run")}},
                                  start);
    CHECK(overflow.status == 1 || overflow.status == 2);
    CHECK_REFUSED(overflow, overflow.status, "--");
    const Result batch = train({{"batch", "64000"},
                                {"seq-len", "1000000"},
                                {"total-batch", "64000000000"},
                                {"eval-batches", "1"},
                                {"out", folder.file("run")}},
                               start);
    CHECK(batch.status == 1 || batch.status == 2);
    CHECK_REFUSED(batch, batch.status, "--");
    const Result model = train({{"layers", "1000"}, {"dim", "64000"}, {"out", folder.file("run")}}, start);
    CHECK(model.status == 1 || model.status == 2);
    CHECK_REFUSED(model, model.status, "--");
    CHECK_REFUSED(
        train(
            {{"batch", "64"}, {"total-batch", "4096"}, {"data", folder.file("train.bin")}, {"out", folder.file("run")}},
            start),
        1, "--total-batch");
    CHECK(!file_exists(folder.file("run")));
}

TEST(run_help_lists_every_option_with_default_and_range) {
    using namespace program;
    for (const VerbName& v : VERBS) {
        const Result help = run({v.name, "--help"});
        REQUIRE_GOOD(help);
        const std::vector<std::string> lines = lines_of(help.out.substr(0, help.out.find("\npresets:")));
        for (const VerbName& other : VERBS)
            CHECK(help.out.find("\n  " + std::string(other.name) + " ") != std::string::npos);
        for (const Option& o : option_table()) {
            const std::string start = "  --" + std::string(o.name) + " ";
            const auto line = std::find_if(lines.begin(), lines.end(), [&](const std::string& s) {
                return s.compare(0, start.size(), start) == 0;
            });
            tests().checks++;
            if ((line != lines.end()) != bool(o.verbs & v.verb))
                check_failed(__FILE__, __LINE__, "help of %s: --%s is %s", v.name, o.name,
                             line == lines.end() ? "missing" : "listed");
            if (line == lines.end()) continue;
            CHECK(line->find(o.help) != std::string::npos && std::strlen(o.help) > 3);
            CHECK(line->find(std::string("default ") + (*o.standard ? o.standard : "none") + " ") != std::string::npos);
            char kind[16] = "", range[32] = "";
            if (o.integer || o.real) {
                CHECK_EQUAL(std::sscanf(line->c_str() + start.size(), "%15s %31s", kind, range), 2);
                const std::string numbers = range;
                const size_t dots = numbers.find("..");
                REQUIRE(dots != std::string::npos);
                CHECK_EQUAL(std::string(kind), std::string(o.integer ? "integer" : "number"));
                CHECK_EQUAL(std::stod(numbers.substr(0, dots)), o.low);
                CHECK_EQUAL(std::stod(numbers.substr(dots + 2)), o.high);
            } else if (o.choices) {
                CHECK(line->find(std::string(" ") + o.choices + " ") != std::string::npos);
            }
        }
    }
    CHECK_EQUAL(run({"-h"}).out, run({"train", "--help"}).out);
    CHECK_EQUAL(run({"--help"}).out, run({"train", "--help"}).out);
    CHECK_EQUAL(run({"--help", "--steps", "3"}).status, 0);
}

// The line of a preset in --help, given as options, is the preset.
TEST(run_help_tells_the_presets_as_they_are) {
    using namespace program;
    const std::string help = run({"--help"}).out;
    for (const Preset& p : PRESETS) {
        const std::string start = "  --model " + std::string(p.name) + " = ";
        const auto lines = lines_of(help);
        const auto line = std::find_if(lines.begin(), lines.end(),
                                       [&](const std::string& s) { return s.compare(0, start.size(), start) == 0; });
        REQUIRE(line != lines.end());
        Words words;
        std::istringstream in(line->substr(start.size()));
        for (std::string word; in >> word;) words.push_back(word);
        std::set<std::string> given;
        const Config told = parse(words, &given), preset = parse_and_preset({"--model", p.name});
        for (const Option& o : option_table()) {
            if (std::string(o.standard) != "preset") continue;
            CHECK(given.count(o.name) == 1);
            if (std::string(o.name) != "total-batch") CHECK_EQUAL(value_text(told, o), value_text(preset, o));
        }
        CHECK_EQUAL(told.total_batch, p.total_batch);
    }
}

TEST(run_without_environment) {
    using namespace program;
    TempFolder folder;
    Start start;
    start.only_this_environment = true, start.environment = {"PATH=/usr/bin:/bin"};
    REQUIRE_GOOD(train({{"out", folder.file("bare")}}, start));
    REQUIRE_GOOD(train({{"out", folder.file("usual")}}));
    CHECK(read_file(folder.file("bare/step_00000002/model.safetensors")) ==
          read_file(folder.file("usual/step_00000002/model.safetensors")));
}

// ---------------------------------------------------------------------------------------------------------------------
// Bad data.

TEST(run_bad_training_data_is_named) {
    using namespace program;
    TempFolder folder;
    const std::string good = folder.file("good.bin"), bad = folder.file("bad.bin"), out = folder.file("run");
    write_file(good, shard(random_tokens(1000, 1)));
    const auto with_data = [&](const std::string& data, Options more = {}) {
        more["data"] = data, more["out"] = out;
        return train(more);
    };
    CHECK_REFUSED(with_data(folder.file("none_*.bin")), 1, "--data", folder.file("none_*.bin"));
    CHECK_REFUSED(with_data(""), 1, "--data");
    CHECK_REFUSED(with_data(good, {{"val-data", folder.file("none_*.bin")}}), 1, "--val-data",
                  folder.file("none_*.bin"));

    std::string bytes = read_file(good);
    write_file(bad, bytes.substr(0, bytes.size() - 1));
    CHECK_REFUSED(with_data(bad), 1, bad, "cut off", "byte 8");
    write_file(bad, bytes.substr(0, 1000));
    CHECK_REFUSED(with_data(bad), 1, bad, "cut off");
    write_file(bad, "");
    CHECK_REFUSED(with_data(bad), 1, bad, "empty");
    write_file(bad, std::string(1, '\1') + bytes.substr(1));
    CHECK_REFUSED(with_data(bad), 1, bad, "20240520");
    write_file(bad, bytes.substr(0, 40) + '\1' + bytes.substr(41));
    CHECK_REFUSED(with_data(bad), 1, bad, "byte 40");
    write_file(bad, "It was a dark and stormy night.");
    CHECK_REFUSED(with_data(bad), 1, bad, "tokenize");
    CHECK_REFUSED(with_data(folder.path), 1, folder.path, "folder");

    write_file(bad, shard(random_tokens(1000, 1), 50257));
    CHECK_REFUSED(with_data(bad), 1, bad, "50257", "256");
    CHECK_REFUSED(with_data(good, {{"val-data", bad}}), 1, bad, "50257", "256");

    // A token outside the vocabulary, somewhere in the only three samples, is found when it is read, with its byte in
    // the file.
    std::vector<uint16_t> tokens = random_tokens(193, 2);
    tokens[100] = 256;
    write_file(bad, shard(tokens));
    CHECK_REFUSED(with_data(bad, {{"steps", "3"}, {"batch", "1"}, {"total-batch", "64"}}), 1, bad, "token 256",
                  "byte 1224", "256");
    CHECK_REFUSED(
        with_data(good, {{"val-data", bad}, {"eval-batches", "9"}, {"batch", "1"}, {"out", folder.file("unseen")}}), 1,
        bad, "byte 1224");

    write_file(bad, shard(random_tokens(64, 3)));
    CHECK_REFUSED(with_data(bad), 1, "--data", "64", "--seq-len");
    write_file(bad, shard(random_tokens(128, 3)));  // one sample, the step needs two
    CHECK_REFUSED(with_data(bad), 1, "--data", "128", "--total-batch");
    // One sample is enough to validate with: the rest of the micro-batch is not counted.
    REQUIRE_GOOD(train({{"data", good}, {"val-data", bad}, {"steps", "1"}, {"out", folder.file("one")}}));
    CHECK_EQUAL(logged(folder.file("one"), "val_tokens")[0], 64.0);
    write_file(bad, shard(random_tokens(30, 3)));
    CHECK_REFUSED(with_data(good, {{"val-data", bad}}), 1, "--val-data");

    // The same file for both, under whatever name.
    CHECK_REFUSED(with_data(good, {{"val-data", good}}), 2, good, "training");
    std::filesystem::create_symlink(good, folder.file("link.bin"));
    CHECK_REFUSED(with_data(good, {{"val-data", folder.file("li*.bin")}}), 2, good, folder.file("link.bin"));
    CHECK_REFUSED(with_data(folder.file("*.bin"), {{"val-data", folder.file("good.bin")}}), 2, good);
}

TEST(run_bad_input_of_tokenize_is_named) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("shards");
    const auto tokenize = [&](const std::string& name, const std::string& text, const Words& more = {}) {
        write_file(folder.file(name), text);
        return run(joined(
            {"tokenize", "--tokenizer", "bytes", "--threads", "1", "--in", folder.file(name), "--out", out}, more));
    };
    CHECK_REFUSED(tokenize("a.txt", ""), 1, "--in", "a.txt");
    CHECK_REFUSED(tokenize("a.jsonl", "{\"text\": \"one\"}\n{\"text\": 2}\n"), 1, "a.jsonl", "line 2");
    CHECK_REFUSED(tokenize("a.jsonl", "{\"text\": \"one\"}\n\n{\"txt\": \"three\"}\n"), 1, "a.jsonl", "line 3", "text");
    CHECK_REFUSED(tokenize("a.jsonl", "{\"text\": \"one\""), 1, "a.jsonl", "line 1", "byte 14");
    CHECK_REFUSED(tokenize("a.txt", std::string("\xFF\xFEw\0", 4)), 1, "a.txt", "UTF-16", "iconv");
    CHECK_REFUSED(tokenize("a.jsonl", std::string("\xFE\xFF\0{", 4)), 1, "a.jsonl", "UTF-16", "iconv");
    CHECK_REFUSED(tokenize("b.txt", "words", {"--split-documents", "\\q"}), 2, "--split-documents");
    CHECK_REFUSED(run({"tokenize", "--tokenizer", "bytes", "--in", folder.file("none.txt"), "--out", out}), 1,
                  "none.txt");
    CHECK_REFUSED(run({"tokenize", "--in", folder.file("b.txt"), "--out", out, "--vocab-dir", folder.file("none")}), 1,
                  folder.file("none"));
    CHECK_REFUSED(run({"tokenize", "--in", folder.file("b.txt"), "--out", out, "--vocab-dir", folder.path}), 1,
                  folder.path);
    CHECK_EQUAL(glob_files(out + "*").size(), 0u);
    CHECK_EQUAL(tokenize("b.txt", "words").status, 0);
    CHECK_REFUSED(tokenize("b.txt", "words"), 1, "--out", out + "_train_000001.bin", "exists");
}

TEST(run_places_that_cannot_be_written_are_named) {
    using namespace program;
    TempFolder folder;
    write_file(folder.file("file"), "");
    CHECK_REFUSED(train({{"out", folder.file("file")}}), 1, folder.file("file"));
    CHECK_REFUSED(train({{"out", folder.file("file/run")}}), 1, folder.file("file/run"));
    CHECK_REFUSED(train({{"dump-state", folder.file("none/state.safetensors")}}), 1,
                  folder.file("none/state.safetensors"));
    // An empty name is no folder; taken as a prefix, it would write into the root of the file system.
    // (Without data, so that a program that does not look at the name ends before it writes.)
    CHECK_REFUSED(train({{"out", ""}, {"data", folder.file("none")}}), 2, "--out");
}

// ---------------------------------------------------------------------------------------------------------------------
// Damaged checkpoints.

// Writes a checkpoint's manifest anew for the files as they are now: damage
// that checksums cannot see. state: the manifest's, if it is to be another.
inline void seal(const std::string& checkpoint, const std::string& state = "") {
    const Manifest manifest = read_manifest(checkpoint);
    std::vector<FileRecord> records;
    for (const FileRecord& file : manifest.files) {
        if (!file_exists(checkpoint + "/" + file.name)) continue;
        const std::string bytes = read_file(checkpoint + "/" + file.name);
        records.push_back({file.name, bytes.size(), crc32c(0, bytes.data(), bytes.size())});
    }
    const std::string old_state = manifest.state_text;
    write_file(checkpoint + "/manifest.json", manifest_text(manifest.step, records, state.empty() ? old_state : state));
}

constexpr const char* OPTIMIZER = "optimizer_00000-of-00001.safetensors";

// Damage that the manifest tells, and damage under a manifest that fits it.
TEST(run_damaged_checkpoints_are_named) {
    using namespace program;
    TempFolder folder;
    const std::string run_folder = folder.file("run"), checkpoint = run_folder + "/step_00000002",
                      name = "/step_00000002/";
    REQUIRE_GOOD(train({{"out", run_folder}}));
    write_file(folder.file("val.bin"), shard(random_tokens(300, 1)));
    const std::string whole_model = read_file(run_folder + name + "model.safetensors"),
                      whole_config = read_file(run_folder + name + "config.json"),
                      whole_manifest = read_file(run_folder + name + "manifest.json"),
                      whole_optimizer = read_file(run_folder + name + OPTIMIZER);
    const auto sample = [&] { return run({"sample", "--from", run_folder, "--tokens", "4", "--threads", "1"}); };
    const auto evaluate = [&] {
        return run({"eval", "--from", run_folder, "--val-data", folder.file("val.bin"), "--threads", "1"});
    };
    const auto resume = [&] { return train({{"out", run_folder}, {"steps", "3"}, {"resume", "on"}}); };
    const auto sealed = [&](const std::function<Result()>& verb) {
        seal(checkpoint);
        const Result result = verb();
        write_file(checkpoint + "/manifest.json", whole_manifest);
        return result;
    };
    REQUIRE_GOOD(sample());
    REQUIRE_GOOD(evaluate());

    const std::string model = run_folder + name + "model.safetensors";
    for (const size_t left : {whole_model.size() - 1, whole_model.size() / 2, size_t(100), size_t(7), size_t(0)}) {
        write_file(model, whole_model.substr(0, left));
        CHECK_REFUSED(sample(), 1, model, std::to_string(left), "manifest");
        CHECK_REFUSED(resume(), 1, model, std::to_string(left), "manifest");
        CHECK_REFUSED(sealed(sample), 1, model);
        CHECK_REFUSED(sealed(resume), 1, model);
    }
    write_file(model, whole_model + '\0');
    CHECK_REFUSED(sample(), 1, model, "bytes");
    CHECK_REFUSED(sealed(sample), 1, model, "byte");
    write_file(model, whole_model);
    replace_in_file(model, "layers.0.attn.q_proj", "layers.0.attn.q_proi");
    CHECK_REFUSED(evaluate(), 1, model, "checksum");
    CHECK_REFUSED(sealed(evaluate), 1, model, "layers.0.attn.q_proj.weight", "missing");
    write_file(model, whole_model);
    replace_in_file(model, "\"norm.weight\":{\"dtype\":\"F32\"", "\"norm.weight\":{\"dtype\":\"I32\"");
    CHECK_REFUSED(sealed(sample), 1, model, "norm.weight", "I32", "F32");
    write_file(model, whole_model);
    replace_in_file(model, "\"shape\":[256,16]", "\"shape\":[16,256]");
    CHECK_REFUSED(sealed(sample), 1, model, "embed_tokens.weight", "[16, 256]", "[256, 16]");
    CHECK_REFUSED(sealed(resume), 1, model, "embed_tokens.weight", "[16, 256]", "[256, 16]");
    std::filesystem::remove(model);
    CHECK_REFUSED(sample(), 1, model, "missing");
    write_file(model, whole_model);

    const std::string config = run_folder + name + "config.json";
    write_file(config, with_json_value(whole_config, "dim", "32"));  // a valid model, but another
    CHECK_REFUSED(sealed(sample), 1, model, "embed_tokens.weight", "[256, 16]", "[256, 32]");
    CHECK_REFUSED(sealed(resume), 1, run_folder + "/step_00000002", "dim", "32", "16");
    write_file(config, whole_config.substr(0, 40));
    CHECK_REFUSED(sealed(sample), 1, config, "byte");
    std::filesystem::remove(config);
    CHECK_REFUSED(evaluate(), 1, config, "missing");
    write_file(config, whole_config);

    const std::string manifest = run_folder + name + "manifest.json",
                      whole_state = read_manifest(checkpoint).state_text;
    write_file(manifest, whole_manifest.substr(0, 60));
    CHECK_REFUSED(resume(), 1, manifest, "byte");
    struct {
        const char *key, *value, *named;
    } const states[] = {{"last_update", "\"2\"", "last_update"},
                        {"bad_steps", "1.5", "bad_steps"},
                        {"loader", "[\"1337\", \"64\", \"4194304\"]", "loader"},
                        {"loader", "7", "loader"},
                        {"best_val_loss", "null", "best_val_loss"},
                        {"losses", "7", "losses"},
                        {"norms", "[\"x\"]", "norms"},
                        {"loader", "[\"x\", \"64\", \"4194304\", \"4\"]", "loader[0]"},
                        {"loader", "[\"1337\", \"-64\", \"4194304\", \"4\"]", "loader[1]"},
                        {"loader", "[\"1337\", \"64\", \"4194304\", \"99999999999999999999\"]", "loader[3]"},
                        {"loader", "[1337, 64, 4194304, 4]", "loader"}};
    write_file(manifest, whole_manifest);
    for (const auto& s : states) {
        seal(checkpoint, with_json_value(whole_state, s.key, s.value));
        CHECK_REFUSED(resume(), 1, manifest, s.named);
        write_file(manifest, whole_manifest);
    }
    seal(checkpoint, with_json_value(whole_state, "loader", "[\"1337\", \"32\", \"4194304\", \"4\"]"));
    CHECK_REFUSED(resume(), 1, "--seq-len", "32", "64");
    std::filesystem::remove(manifest);
    CHECK_REFUSED(resume(), 1, manifest, "missing");
    // a folder of weights is enough where it is named itself
    const Result unchecked = run({"sample", "--from", checkpoint, "--tokens", "4", "--threads", "1"});
    CHECK(unchecked.status == 0 &&
          unchecked.err.find("warning: " + checkpoint + " has no manifest.json") != std::string::npos);
    write_file(manifest, whole_manifest);

    const std::string optimizer = run_folder + name + OPTIMIZER;
    write_file(optimizer, whole_optimizer.substr(0, whole_optimizer.size() - 4));
    CHECK_REFUSED(resume(), 1, optimizer);
    CHECK_REFUSED(sealed(resume), 1, optimizer);
    write_file(optimizer, whole_optimizer);
    for (const auto& [from, to] : {std::make_pair("v.norm.weight[0:16]", "w.norm.weight[0:16]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weighs[0:16]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weight[1:17]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weight[16:0]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weight[0:16x")}) {
        replace_in_file(optimizer, from, to);
        CHECK_REFUSED(sealed(resume), 1, optimizer, to);
        write_file(optimizer, whole_optimizer);
    }
    // One of two ranks' files is missing, and the manifest does not know of it.
    std::filesystem::rename(optimizer, folder.file("away"));
    CHECK_REFUSED(resume(), 1, optimizer, "missing");
    CHECK_REFUSED(sealed(resume), 1, manifest, "0 of ", "moments");
    std::filesystem::rename(folder.file("away"), optimizer);

    // Weights that are no numbers: three steps that change nothing, and the end, with nothing saved.
    std::string poisoned = whole_model;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(&poisoned[poisoned.size() - 4], &nan, 4);
    write_file(model, poisoned);
    seal(checkpoint);
    const Result bad = train({{"out", run_folder}, {"steps", "9"}, {"resume", "on"}});
    CHECK_EQUAL(bad.status, 1);
    for (const char* words : {"step 3: ", "step 4: ", "step 5: ", "not finite", "--max-bad-steps", "step_00000002"})
        CHECK(bad.err.find(words) != std::string::npos);
    CHECK_EQUAL(lines_of(bad.err).size(), 3u);
    CHECK(!file_exists(run_folder + "/step_00000005") && file_exists(run_folder + "/bad_step_00000005_rank0.json"));
    write_file(model, whole_model);
    write_file(manifest, whole_manifest);
    REQUIRE_GOOD(resume());  // nothing of all that has touched the checkpoint
}

// Every field of config.json: missing, of another kind, out of the option's range.
TEST(run_config_json_is_checked_field_by_field) {
    using namespace program;
    TempFolder folder;
    const std::string path = folder.file("config.json");
    Config c = parse_and_preset({});
    const std::string whole = config_json(c);
    const Json root = parse_json(whole, path);
    write_file(path, whole);
    Config read;
    read_config_json(read, path);
    CHECK_EQUAL(config_json(read), whole);
    CHECK_EQUAL(root.keys.size(), 19u);
    const auto refused = [&](const std::string& text, const std::string& key) {
        write_file(path, text);
        Config config;
        tests().checks++;
        try {
            read_config_json(config, path);
            check_failed(__FILE__, __LINE__, "accepted: %s", text.c_str());
        } catch (const Error& e) {
            // Options are named as on the command line.
            std::string option = key;
            std::replace(option.begin(), option.end(), '_', '-');
            const std::string line = e.what();
            if (e.status != 1 || line.find(path) != 0 ||
                (line.find(key) == std::string::npos && line.find(option) == std::string::npos))
                check_failed(__FILE__, __LINE__, "status %d, '%s': expected 1 and a line with %s", e.status, e.what(),
                             key.c_str());
        }
    };
    for (const std::string& key : root.keys) {
        std::string renamed = whole;
        refused(renamed.replace(renamed.find("\"" + key + "\""), key.size() + 2, "\"other\""), key);
        refused(with_json_value(whole, key, "null"), key);
        refused(with_json_value(whole, key, "[]"), key);
        const bool word = root.get(key, path).kind == Json::String;
        for (const char* wrong : {"\"llama\"", "\"\""})
            if (word) refused(with_json_value(whole, key, wrong), key);
        for (const char* wrong : {"0", "-1", "1.5", "\"16\"", "1e3", "99999999999", "999999999999999999999"})
            if (!word) refused(with_json_value(whole, key, wrong), key);
    }
    refused(with_json_value(whole, "heads", "3"), "heads");
    refused(with_json_value(whole, "head_dim", "31"), "head_dim");
    refused(with_json_value(whole, "cmp_block", "20"), "cmp_block");
    refused(with_json_value(whole, "slc_block", "20"), "slc_block");
    refused(with_json_value(whole, "slc_count", "2"), "slc_count");
    refused(with_json_value(whole, "tokenizer", "\"gpt2\""), "vocab_size");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints and resuming.

// Training data of which twelve steps see more than one epoch, so that the loader's state matters.
inline std::string write_small_corpus(const TempFolder& folder, const std::string& name, uint64_t seed) {
    write_file(folder.file(name), program::shard(program::random_tokens(64 * 15 + 1, seed, 64)));
    return folder.file(name);
}

TEST(run_resumed_equals_uninterrupted) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1), val = write_small_corpus(folder, "val.bin", 2);
    for (const char* batch : {"2", "1"}) {  // accumulation over 1 and 2 micro-steps
        const std::string whole = folder.file(std::string("whole") + batch),
                          parts = folder.file(std::string("parts") + batch);
        const Options options = {{"data", data},           {"val-data", val},     {"batch", batch},
                                 {"schedule", "constant"}, {"eval-every", "2"},   {"seed", "5"},
                                 {"recompute", batch},     {"sample-every", "3"}, {"sample-tokens", "5"},
                                 {"skip-outliers", "11"}};
        const auto run_to = [&](const char* steps, const std::string& out, const char* resume) {
            Options more = options;
            more["steps"] = steps, more["out"] = out, more["resume"] = resume;
            return train(more);
        };
        REQUIRE_GOOD(run_to("12", whole, "off"));
        REQUIRE_GOOD(run_to("5", parts, "off"));
        // A validation loss that no later one undercuts stays the best to the end.
        seal(parts + "/step_00000005",
             with_json_value(read_manifest(parts + "/step_00000005").state_text, "best_val_loss", "0.25"));
        const Result resumed = run_to("9", parts, "on");
        REQUIRE_GOOD(resumed);
        CHECK(resumed.out.find("resume: " + parts + "/step_00000005, step 5\n") != std::string::npos);
        REQUIRE_GOOD(run_to("12", parts, "on"));
        for (const char* file : {"model.safetensors", OPTIMIZER, "config.json"})
            CHECK(read_file(whole + "/step_00000012/" + file) == read_file(parts + "/step_00000012/" + file));
        const Json state_whole = read_manifest(whole + "/step_00000012").state,
                   state_parts = read_manifest(parts + "/step_00000012").state;
        for (const Json* state : {&state_whole, &state_parts})
            CHECK_EQUAL(state->array("loader", "state")[3].text, std::string("24"));  // 12 steps of 2 samples
        CHECK_EQUAL(state_parts.number("best_val_loss", ""), 0.25);
        for (const char* field : {"loss", "lr", "grad_norm", "tokens", "epoch"}) {
            const std::vector<double> a = logged(whole, field), b = logged(parts, field);
            CHECK_EQUAL(a.size(), 12u);
            CHECK(a == b);
        }
        // Validation at even steps of both, and where a part ended.
        std::map<int64_t, double> losses[2];
        for (int i = 0; i < 2; i++)
            for (const Json& line : log_of(i ? parts : whole))
                if (line.find("val_loss")) losses[i][line.integer("step", "")] = line.number("val_loss", "");
        CHECK_EQUAL(losses[0].size(), 7u);
        for (const auto& [step, loss] : losses[0]) CHECK_EQUAL(losses[1][step], loss);
        CHECK_EQUAL(glob_files(parts + "*").size(), 1u);  // nothing was moved aside
    }
    // The two divisions of a batch are the same step up to the order of sums.
    CHECK_NEAR(logged(folder.file("whole1"), "loss")[0], logged(folder.file("whole2"), "loss")[0], 2e-6);
}

TEST(run_resume_without_checkpoint_says_so_and_starts) {
    using namespace program;
    TempFolder folder;
    const Result first = train({{"out", folder.file("run")}, {"resume", "on"}});
    REQUIRE_GOOD(first);
    CHECK(first.out.find("nothing to resume under " + folder.file("run")) != std::string::npos);
    CHECK(first.out.find("step 0001 |") != std::string::npos);
    const Result again = train({{"out", folder.file("run")}, {"resume", "on"}});  // already finished
    REQUIRE_GOOD(again);
    CHECK(again.out.find("nothing to resume") == std::string::npos &&
          again.out.find("step 0001 |") == std::string::npos);
    CHECK(!file_exists(folder.file("run.1")));
}

TEST(run_resume_with_another_model_or_data_is_refused) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1),
                      other = write_small_corpus(folder, "other.bin", 2), longer = folder.file("longer.bin"),
                      out = folder.file("run");
    write_file(longer, shard(random_tokens(64 * 20, 3, 64)));
    REQUIRE_GOOD(train({{"out", out}, {"data", data}}));
    const auto resume = [&](const Options& more) {
        Options options = {{"out", out}, {"data", data}, {"resume", "on"}, {"steps", "3"}};
        for (const auto& [name, value] : more) options[name] = value;
        return train(options);
    };
    const Options changes = {{"layers", "2"},     {"dim", "32"},       {"heads", "4"},       {"head-dim", "16"},
                             {"cmp-block", "12"}, {"cmp-stride", "8"}, {"slc-block", "16"},  {"slc-count", "5"},
                             {"window", "17"},    {"phi-hidden", "9"}, {"mlp-hidden", "33"}, {"attention", "full"}};
    for (const auto& [name, value] : changes) {
        std::string field = name;
        std::replace(field.begin(), field.end(), '-', '_');
        CHECK_REFUSED(resume({{name, value}}), 1, "resume", out, field, value);
    }
    const std::string manifest = read_file(out + "/run.json");
    CHECK_REFUSED(resume({{"heads", "4"}, {"kv-groups", "2"}}), 1, "resume");
    CHECK_REFUSED(resume({{"seq-len", "32"}}), 1, "seq_len", "64", "32");
    CHECK_REFUSED(resume({{"data", longer}}), 1, "--data", "another corpus");
    CHECK_REFUSED(resume({{"data", "synthetic"}}), 1, "--data", "another corpus");
    // As many tokens, but others: the run would go on silently with data that it was not made on.
    CHECK_REFUSED(resume({{"data", other}}), 1, "--data");
    CHECK_EQUAL(read_file(out + "/run.json"), manifest);  // what is refused leaves everything as it was
    CHECK(!file_exists(out + "/step_00000003") && !file_exists(out + ".1"));
    REQUIRE_GOOD(resume({}));
}

// The synthetic corpus is made from --seed: another seed is another corpus of the same size.
TEST(run_resume_of_the_synthetic_corpus_keeps_the_seed) {
    using namespace program;
    TempFolder folder;
    const Options options = {{"schedule", "constant"}, {"steps", "4"}};
    const auto with = [&](Options more) {
        more.insert(options.begin(), options.end());
        return train(more);
    };
    REQUIRE_GOOD(with({{"seed", "5"}, {"out", folder.file("whole")}}));
    REQUIRE_GOOD(train({{"schedule", "constant"}, {"steps", "2"}, {"seed", "5"}, {"out", folder.file("parts")}}));
    const Result other = with({{"seed", "6"}, {"out", folder.file("parts")}, {"resume", "on"}});
    if (other.status != 0)
        CHECK_REFUSED(other, 1,
                      "seed");  // refusing is one right answer, going on with the corpus of the checkpoint the other
    else CHECK(logged(folder.file("whole"), "loss") == logged(folder.file("parts"), "loss"));
}

TEST(run_earlier_run_is_moved_aside) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    std::vector<std::string> models;
    for (const char* seed : {"1", "2", "3"}) {
        const Result r = train({{"out", out}, {"seed", seed}});
        REQUIRE_GOOD(r);
        CHECK_EQUAL(r.out.find("moved to") != std::string::npos, seed[0] != '1');
        models.push_back(read_file(out + "/step_00000002/model.safetensors"));
    }
    CHECK(models[0] != models[1] && models[1] != models[2]);
    CHECK(read_file(out + ".1/step_00000002/model.safetensors") == models[0]);
    CHECK(read_file(out + ".2/step_00000002/model.safetensors") == models[1]);
    CHECK(file_exists(out + ".1/main.log") && file_exists(out + ".1/log.jsonl") && file_exists(out + ".1/run.json"));
    CHECK_EQUAL(lines_of(read_file(out + "/main.log")).size(), 4u);  // this run's lines alone
}

// A folder that is no run's, or not only: what is not the run's stays where it is, and nothing of it is written over.
TEST(run_leaves_the_files_of_others_alone) {
    using namespace program;
    TempFolder folder;
    for (const char* name : {"run.json", "main.log", "log.jsonl", "heartbeat_rank0.jsonl"}) {
        const std::string project = folder.file(std::string("project_") + name);
        make_folders(project);
        write_file(project + "/" + name, "not yours");
        CHECK_REFUSED(train({{"out", project}}), 1, "--out " + project, name, "another folder");
        CHECK_EQUAL(read_file(project + "/" + name), "not yours");
        CHECK_EQUAL(glob_files(project + "/*").size(), 1u);
    }
    // Beside a run, which is moved aside alone; and through a link, which stays one.
    const std::string real = folder.file("disk"), link = folder.file("link");
    make_folders(real + "/src");
    write_file(real + "/thesis.txt", "mine");
    CHECK_EQUAL(symlink(real.c_str(), link.c_str()), 0);
    REQUIRE_GOOD(train({{"out", link}}));
    const std::string model = read_file(real + "/step_00000002/model.safetensors");
    const Result again = train({{"out", link}, {"seed", "2"}});
    REQUIRE_GOOD(again);
    CHECK(again.out.find("moved to " + real + ".1;") != std::string::npos);
    CHECK(read_file(real + ".1/step_00000002/model.safetensors") == model && file_exists(real + ".1/main.log"));
    CHECK(!file_exists(real + ".1/thesis.txt") && file_exists(real + "/thesis.txt") && file_exists(real + "/src"));
    CHECK(file_exists(real + "/step_00000002") && file_exists(link + "/main.log"));
}

// --resume alone goes on with the run's own options: the same bits as with all of them given again.
TEST(run_resume_inherits_the_options_that_are_not_given) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1), whole = folder.file("whole"),
                      parts = folder.file("parts");
    const Options options = {{"data", data},          {"schedule", "linear"}, {"lr", "0.003"},     {"warmup", "3"},
                             {"weight-decay", "0.3"}, {"seed", "9"},          {"save-every", "2"}, {"batch", "1"}};
    const auto with = [&](Options more) {
        more.insert(options.begin(), options.end());
        return train(more);
    };
    REQUIRE_GOOD(with({{"steps", "6"}, {"out", whole}}));
    REQUIRE_GOOD(with({{"steps", "6"}, {"out", parts}}));
    for (const char* step : {"step_00000004", "step_00000006"})
        std::filesystem::remove_all(parts + "/" + step);  // as if it had been killed
    const Result resumed = run({"--resume", "--out", parts, "--threads", "1", "--batch", "1"});
    REQUIRE_GOOD(resumed);
    CHECK(resumed.out.find("resume: --") == std::string::npos);  // nothing has changed
    for (const char* file : {"model.safetensors", OPTIMIZER})
        CHECK(read_file(whole + "/step_00000006/" + file) == read_file(parts + "/step_00000006/" + file));
    CHECK(file_exists(parts + "/step_00000004"));
    // What is given counts, and what it does to the learning rate is said.
    const Result longer = run({"--resume", "--out", parts, "--threads", "1", "--batch", "1", "--steps", "9"});
    REQUIRE_GOOD(longer);
    CHECK(longer.out.find("resume: --steps is 9, was 6") != std::string::npos);
    // linear, warm-up 3: at step 7 of 9 a third of the way from a tenth is left, where step 6 of 6 was the end
    CHECK(longer.out.find("resume: the learning rate of step 7 is 1.20e-03, by the earlier options 3.00e-04") !=
          std::string::npos);
    write_file(parts + "/run.json", "{\"program\": \"train_nsa\", \"lr\": 11}");
    CHECK_REFUSED(run({"--resume", "--out", parts}), 1, parts + "/run.json", "--lr");
}

// Weights of one run are the beginning of another, of other data and length of sequences; the first loss is the one
// they had.
TEST(run_begins_with_the_weights_of_another) {
    using namespace program;
    TempFolder folder;
    const std::string first = folder.file("first"), second = folder.file("second");
    REQUIRE_GOOD(train({{"out", first}, {"steps", "30"}, {"warmup", "2"}, {"lr", "0.003"}}));
    const Result r = train({{"out", second}, {"init-from", first}, {"steps", "0"}, {"eval-every", "1"}});
    REQUIRE_GOOD(r);
    CHECK(r.out.find("weights: those of " + first + "/step_00000030") != std::string::npos);
    CHECK_EQUAL(logged(second, "val_loss").at(0), logged(first, "val_loss").back());
    const std::string shorter = folder.file("shorter");
    REQUIRE_GOOD(train({{"out", shorter},
                        {"init-from", first + "/step_00000030"},
                        {"steps", "1"},
                        {"lr", "0"},
                        {"seq-len", "32"},
                        {"total-batch", "64"},
                        {"weight-decay", "0"}}));
    CHECK(read_file(shorter + "/step_00000001/model.safetensors") ==
          read_file(first + "/step_00000030/model.safetensors"));
    CHECK_REFUSED(train({{"out", folder.file("x")}, {"init-from", first}, {"layers", "3"}}), 1, "cannot begin from",
                  "layers", "3");
    CHECK_REFUSED(train({{"out", folder.file("x")}, {"init-from", folder.file("none")}}), 1, "none");
    CHECK_REFUSED(train({{"out", folder.file("x")}, {"init-from", first + "/run.json"}}), 1, "--init-from",
                  "is a file");
    CHECK(!file_exists(folder.file("x")));
    // The built-in corpus can be evaluated on, as the run itself was.
    const Result evaluated = run({"eval", "--from", first, "--val-data", "synthetic", "--threads", "1"});
    REQUIRE_GOOD(evaluated);
    CHECK(evaluated.out.find(format_text("loss %.4f", logged(first, "val_loss").back())) != std::string::npos);
}

// Activations computed again are the ones that were thrown away.
TEST(run_recompute_changes_no_bit) {
    using namespace program;
    TempFolder folder;
    for (const char* attention : {"nsa", "full"}) {
        for (const char* level : {"0", "1", "2"})
            REQUIRE_GOOD(train({{"recompute", level},
                                {"attention", attention},
                                {"layers", "3"},
                                {"batch", "1"},
                                {"steps", "3"},
                                {"init", "random"},
                                {"out", folder.file(std::string(attention) + level)}}));
        for (const char* level : {"1", "2"})
            for (const char* file : {"model.safetensors", OPTIMIZER})
                CHECK(read_file(folder.file(std::string(attention) + "0/step_00000003/" + file)) ==
                      read_file(folder.file(std::string(attention) + level + "/step_00000003/" + file)));
    }
}

// A name completed by the shell ends in a slash.
TEST(run_folder_name_with_a_slash_behind_it) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out + "/"}}));
    REQUIRE_GOOD(train({{"out", out + "/"}, {"resume", "on"}, {"steps", "3"}}));
    REQUIRE_GOOD(train({{"out", out + "/"}}));
    CHECK(file_exists(out + ".1/step_00000003/model.safetensors") && !file_exists(out + "/step_00000003"));
    REQUIRE_GOOD(run({"sample", "--from", out + "/", "--tokens", "2"}));
}

// What stands for itself in a folder's name is no pattern.
TEST(run_folder_name_with_pattern_characters) {
    using namespace program;
    TempFolder folder;
    for (const char* name : {"lr[1]", "what?", "a*b", "two words", "back\\slash"}) {
        const std::string out = folder.file(name);
        REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
        const Result resumed = train({{"out", out}, {"resume", "on"}, {"steps", "2"}});
        CHECK(resumed.status == 0 && resumed.out.find("step_00000001, step 1\n") != std::string::npos);
        CHECK_EQUAL(run({"sample", "--from", out, "--tokens", "2", "--threads", "1"}).status, 0);
    }
}

TEST(run_newest_checkpoint_is_taken) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"steps", "10"}, {"save-every", "3"}}));
    const std::vector<std::string> found = glob_files(out + "/step_*");
    CHECK((found == std::vector<std::string>{out + "/step_00000003", out + "/step_00000006", out + "/step_00000009",
                                             out + "/step_00000010"}));
    CHECK_EQUAL(newest_checkpoint(out), out + "/step_00000010");
    std::filesystem::create_directory(out + "/step_00000012.writing");
    write_file(out + "/step_00000012.writing/model.safetensors", "");
    CHECK_EQUAL(newest_checkpoint(out), out + "/step_00000010");
    CHECK_EQUAL(newest_checkpoint(folder.path), "");
}

// SIGKILL again and again, most often while a checkpoint is being written: a step's folder is always whole, and the run
// continued from the newest ends with the bytes of a run that was left alone.
TEST(run_killed_and_resumed_equals_uninterrupted) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    Options options = {{"steps", "12"}, {"save-every", "1"}, {"out", folder.file("whole")}};
    REQUIRE_GOOD(train(options));
    options["out"] = out, options["resume"] = "on";
    for (const int step : {2, 4, 6, 7, 9, 11}) {
        Start start;
        start.kill_after = format_text("step %04d | loss", step);
        const Result killed = train(options, start);
        if (killed.status != 0) CHECK_EQUAL(killed.status, 128 + SIGKILL);
        for (const std::string& checkpoint : glob_files(out + "/step_????????"))
            CHECK_EQUAL(verify_checkpoint(checkpoint).files.size(), 3u);
    }
    const Result last = train(options);
    REQUIRE_GOOD(last);
    CHECK(last.out.find("nothing to resume") == std::string::npos);
    for (const char* file : {"model.safetensors", OPTIMIZER})
        CHECK(read_file(folder.file("whole/step_00000012/") + file) == read_file(out + "/step_00000012/" + file));
}

// A full disk at the last checkpoint: the run ends with an error, there is no half checkpoint, and the one before still
// serves.
TEST(run_full_disk_leaves_no_half_checkpoint) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
    Start full;  // the weights fit, the moments, twice as large, do not
    full.largest_file = file_size(out + "/step_00000001/model.safetensors") + 4096;
    const Options options = {{"out", out}, {"steps", "2"}, {"resume", "on"}};
    const Result refused = train(options, full);
    CHECK_EQUAL(refused.status, 1);
    for (const char* words : {OPTIMIZER, "File too large", "step_00000001", "the last checkpoint could not be written"})
        CHECK(refused.err.find(words) != std::string::npos);
    CHECK(!file_exists(out + "/step_00000002"));
    const Result resumed = train(options);  // over what the failed attempt left
    REQUIRE_GOOD(resumed);
    CHECK(resumed.out.find("step_00000001, step 1\n") != std::string::npos);
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 2u);
    REQUIRE_GOOD(train({{"out", folder.file("whole")}, {"steps", "1"}}));
    REQUIRE_GOOD(train({{"out", folder.file("whole")}, {"steps", "2"}, {"resume", "on"}}));
    for (const char* file : {"model.safetensors", OPTIMIZER})
        CHECK(read_file(folder.file("whole/step_00000002/") + file) == read_file(out + "/step_00000002/" + file));
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, and neighbours in the folder.

namespace program {
// The program with small_words(more) behind `verb`, under a shell that does what `redirection` says, such as ">&-".
inline Result in_shell(const Words& words, const std::string& redirection) {
    return execute(joined({"/bin/bash", "-c", "set -o pipefail; \"$0\" \"$@\" " + redirection, path()}, words));
}
}  // namespace program

// What is printed does not go into the first file that is opened, where stdout, stderr or stdin is closed.
TEST(run_with_closed_streams) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    CHECK_EQUAL(in_shell(small_words({{"out", out}, {"steps", "3"}}), ">&-").status, 0);
    const std::vector<std::string> beats = lines_of(read_file(out + "/heartbeat_rank0.jsonl"));
    CHECK_EQUAL(beats.size(), 3u);
    for (const std::string& line : beats)
        CHECK_EQUAL(parse_json(line, "heartbeat").string("phase", "heartbeat").empty(), false);
    write_file(folder.file("a.txt"), std::string(100000, 'a'));
    for (const char* redirection : {"", "2>&-"}) {
        const std::string prefix = folder.file(*redirection ? "closed" : "open");
        CHECK_EQUAL(
            in_shell({"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out", prefix}, redirection)
                .status,
            0);
    }
    for (const char* shard : {"_train_000001.bin", "_val_000000.bin"})
        CHECK(read_file(folder.file(std::string("closed") + shard)) ==
              read_file(folder.file(std::string("open") + shard)));
}
// Output that does not arrive: all there is of a sample is lost, which is an error; of a run it is its log's copy.
TEST(run_output_that_is_lost_is_an_error) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    const Result lost = in_shell(small_words({{"out", out}}), ">/dev/full");
    CHECK_EQUAL(lost.status, 0);
    CHECK(lost.err.find("warning: not all of the output could be written to stdout") != std::string::npos);
    CHECK_EQUAL(logged(out, "loss").size(), 2u);
    CHECK_REFUSED(in_shell({"sample", "--from", out, "--tokens", "5"}, ">/dev/full"), 1, "stdout", "make room");
    CHECK_EQUAL(in_shell({"sample", "--from", out, "--tokens", "5"}, ">/dev/null").status, 0);
    // The reader is gone after a line: a checkpoint is written, as after SIGTERM.
    const Result piped = in_shell(
        small_words({{"out", folder.file("piped")}, {"steps", "1000000"}, {"eval-every", "0"}}), "| head -n 1");
    CHECK_EQUAL(piped.status, 75);
    CHECK_EQUAL(lines_of(piped.out).size(), 1u);
    CHECK_EQUAL(glob_files(folder.file("piped") + "/step_*").size(), 1u);
}
TEST(run_has_its_folder_to_itself) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}}));
    const int other = open(out.c_str(), O_RDONLY | O_DIRECTORY);  // as another run does
    CHECK_EQUAL(flock(other, LOCK_EX | LOCK_NB), 0);
    for (const char* resume : {"-", "on"})
        CHECK_REFUSED(train({{"out", out}, {"resume", resume}, {"steps", "3"}}), 1, "--out", out, "another run");
    CHECK(!file_exists(out + ".1"));
    close(other);
    REQUIRE_GOOD(train({{"out", out}, {"resume", "on"}, {"steps", "3"}}));
    REQUIRE_GOOD(train({{"out", out}}));  // and moves the earlier one aside
    CHECK(file_exists(out + ".1/main.log"));
}
TEST(run_closing_lines_can_be_followed) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("a run of mine");
    const Result first = train({{"out", out}});
    REQUIRE_GOOD(first);
    CHECK(first.out.find("next:   ./train_nsa sample --from '" + out + "' --prompt") != std::string::npos);
    const Result again = train({{"out", out}, {"resume", "on"}});
    CHECK(again.out.find("no step was to be done: --steps is 2, and step 2 is reached already") != std::string::npos);
    const Result none = train({{"out", folder.file("none")}, {"steps", "0"}});
    CHECK(none.out.find("no step was to be done: --steps is 0\n") != std::string::npos &&
          none.out.find("next:") == std::string::npos);
}
// A shard that is cut off while it is read: the kernel sends SIGBUS, and the program says which.
TEST(run_shard_cut_off_while_it_is_read) {
    using namespace program;
    TempFolder folder;
    const std::string file = folder.file("train.bin");
    write_file(file, shard(random_tokens(64 * 4000 + 1, 1)));
    std::thread cut([&] {
        for (int i = 0; i < 3000 && (!file_exists(folder.file("run/main.log")) ||
                                     read_file(folder.file("run/main.log")).find("s:3 ") == std::string::npos);
             i++)
            usleep(10000);
        std::filesystem::resize_file(file, 1024);
    });
    const Result r = train({{"data", file}, {"out", folder.file("run")}, {"steps", "1000000"}, {"eval-every", "0"}});
    cut.join();
    CHECK_REFUSED(r, 1, file, "was cut off", "--resume");
}

// ---------------------------------------------------------------------------------------------------------------------
// Ranks.

// mpirun of the machine, "" with a note where the build or the machine has none.
inline std::string find_mpirun(const char* what) {
    if (!mpi_name()) return skip(format_text("%s: this build has no MPI", what)), "";
    std::istringstream folders(std::getenv("PATH") ? std::getenv("PATH") : "");
    for (std::string folder; std::getline(folders, folder, ':');)
        if (access((folder + "/mpirun").c_str(), X_OK) == 0) return folder + "/mpirun";
    return skip(format_text("%s: no mpirun on this machine", what)), "";
}

// Open MPI refuses root and more ranks than cores unless told; MPICH does not look at these.
inline program::Start ranks_start() {
    program::Start start;
    start.environment = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                         "OMPI_MCA_rmaps_base_oversubscribe=1", "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"};
    return start;
}
inline program::Result train_on_ranks(const std::string& mpirun, int ranks, const program::Options& more) {
    return program::execute(
        program::joined({mpirun, "-np", std::to_string(ranks), program::path()}, program::small_words(more)),
        ranks_start());
}

// The same global batch, divided over ranks or micro-steps, is the same run but for the order of fp32 sums.
//
// The limit on losses: an error e of the gradient moves an AdamW step by at most lr |e_i| / |g_i|, or 2 lr where the
// sign of a tiny g_i is lost, and the loss by lr |e_i| per step: at most steps * lr * |e|_1 <= steps * lr * sqrt(P)
// |e|_2. Sums of N = 256 terms that cancel to their root leave |e|_2 <= 2^-24 * N * |g|_2 (N roundings, each at most
// 2^-24 of the sum of magnitudes ~ sqrt(N) |g|, adding as a random walk). With 8 steps of 1e-3, P = 7712, |g|
// <= 1.5: 1.6e-5. The logits' own rounding, 2^-24 * |logit| a few, and the six digits of the log add 2e-6. All 8 blocks
// are selected (--slc-count 8): otherwise a rounding could swap two blocks of nearly equal score.
TEST(run_ranks_and_accumulation_give_one_loss_curve) {
    using namespace program;
    TempFolder folder;
    const double limit = 8 * 1e-3 * std::sqrt(7712.0) * std::ldexp(256.0, -24) * 1.5 + 2e-6;
    const std::string mpirun = find_mpirun("1 rank against 2 ranks");
    const Options common = {{"total-batch", "256"}, {"slc-count", "8"},  {"lr", "0.001"},
                            {"steps", "8"},         {"eval-every", "4"}, {"eval-batches", "4"}};
    const auto with = [&](const char* batch, const std::string& out) {
        Options options = common;
        options["batch"] = batch, options["out"] = folder.file(out);
        return options;
    };
    REQUIRE_GOOD(train(with("4", "one")));
    REQUIRE_GOOD(train(with("1", "accumulated")));
    std::vector<std::string> others = {"accumulated"};
    if (!mpirun.empty()) {
        const Result two = train_on_ranks(mpirun, 2, with("2", "two"));
        CHECK_EQUAL(two.status, 0);
        CHECK(two.out.find("2 ranks") != std::string::npos);
        CHECK_EQUAL(train_on_ranks(mpirun, 2, with("1", "two_accumulated")).status, 0);
        others.insert(others.end(), {"two", "two_accumulated"});
    }
    const std::vector<double> loss = logged(folder.file("one"), "loss"), val = logged(folder.file("one"), "val_loss"),
                              norm = logged(folder.file("one"), "grad_norm");
    REQUIRE(loss.size() == 8 && val.size() == 3);
    CHECK(loss[7] < loss[0] - 20 * limit && val[2] < val[0] - 20 * limit);  // so that the limit could be missed
    for (const std::string& other : others) {
        const std::vector<double> loss2 = logged(folder.file(other), "loss"),
                                  val2 = logged(folder.file(other), "val_loss"),
                                  norm2 = logged(folder.file(other), "grad_norm");
        REQUIRE(loss2.size() == 8 && val2.size() == 3 && norm2.size() == 8);
        for (size_t i = 0; i < 8; i++) CHECK_NEAR(loss2[i], loss[i], limit);
        for (size_t i = 0; i < 8; i++) CHECK_NEAR(norm2[i], norm[i], norm[i] * std::ldexp(256.0, -24) + 100 * limit);
        CHECK_NEAR(val2[0], val[0], 2e-6);  // equal weights: only the logits' rounding
        for (size_t i = 1; i < 3; i++) CHECK_NEAR(val2[i], val[i], limit);
        CHECK(logged(folder.file(other), "val_tokens") == logged(folder.file("one"), "val_tokens"));
        CHECK(logged(folder.file(other), "lr") == logged(folder.file("one"), "lr") &&
              logged(folder.file(other), "epoch") == logged(folder.file("one"), "epoch"));
        CHECK_EQUAL(lines_of(read_file(folder.file(other + "/main.log"))).size(), 11u);  // rank 0 alone writes
    }
    if (mpirun.empty()) return;
    // A checkpoint of two ranks is continued by one, and the other way round.
    const auto resume = [&](const char* batch, const std::string& out) {
        Options options = with(batch, out);
        options["resume"] = "on", options["steps"] = "10", options["schedule"] = "constant";
        return options;
    };
    REQUIRE_GOOD(train(resume("4", "two")));
    CHECK_EQUAL(train_on_ranks(mpirun, 2, resume("2", "one")).status, 0);
    const std::vector<double> a = logged(folder.file("one"), "loss"), b = logged(folder.file("two"), "loss");
    REQUIRE(a.size() == 10 && b.size() == 10);
    for (size_t i = 8; i < 10; i++) CHECK_NEAR(a[i], b[i], 2 * limit);
}

TEST(run_error_on_one_rank_ends_all) {
    using namespace program;
    const std::string mpirun = find_mpirun("an error on one rank");
    if (mpirun.empty()) return;
    TempFolder folder;
    // 40 samples in order of the shuffle: number 1 goes to rank 1 in the first step; the token in its middle is in no
    // other sample.
    std::vector<uint16_t> tokens = random_tokens(64 * 40 + 1, 1);
    tokens[shuffled_position(1, 40, 1337, 0) * 64 + 32] = 300;
    write_file(folder.file("train.bin"), shard(tokens));
    const Result r = train_on_ranks(mpirun, 2,
                                    {{"data", folder.file("train.bin")},
                                     {"batch", "1"},
                                     {"total-batch", "128"},
                                     {"steps", "20"},
                                     {"out", folder.file("run")}});
    CHECK(r.status != 0 && r.status != 1000);
    CHECK(r.seconds < 20);
    CHECK(r.err.find("train_nsa: rank 1 on ") != std::string::npos && r.err.find("token 300") != std::string::npos &&
          r.err.find(folder.file("train.bin")) != std::string::npos);
    CHECK(!file_exists(folder.file("run/step_00000020")));
    // Errors of all ranks, and usage.
    const Result none =
        train_on_ranks(mpirun, 2, {{"data", folder.file("none*")}, {"batch", "1"}, {"out", folder.file("run2")}});
    CHECK(none.status != 0 && none.status != 1000 && none.err.find(folder.file("none*")) != std::string::npos &&
          none.err.find("rank ") != std::string::npos);
    const Result odd =
        train_on_ranks(mpirun, 2, {{"total-batch", "192"}, {"batch", "1"}, {"out", folder.file("run2")}});
    CHECK(odd.status != 0 && odd.err.find("--total-batch 192") != std::string::npos &&
          odd.err.find("2 ranks") != std::string::npos);
    const Result dump =
        train_on_ranks(mpirun, 2, {{"dump-state", folder.file("state")}, {"batch", "1"}, {"out", folder.file("run2")}});
    CHECK(dump.status != 0 && dump.err.find("--dump-state") != std::string::npos);
    const Result sample = execute({mpirun, "-np", "2", program::path(), "sample", "--from", "x"});
    CHECK(sample.status != 0 && sample.err.find("without mpirun") != std::string::npos);
    CHECK(!file_exists(folder.file("run2")));
}

TEST(run_eval_on_two_ranks_equals_one) {
    using namespace program;
    const std::string mpirun = find_mpirun("eval on 2 ranks");
    if (mpirun.empty()) return;
    TempFolder folder;
    REQUIRE_GOOD(train({{"out", folder.file("run")}}));
    write_file(folder.file("val.bin"), shard(random_tokens(64 * 8 + 1, 1)));
    const Words words = {path(),      "eval", "--from", folder.file("run"), "--val-data", folder.file("val.bin"),
                         "--threads", "1"};
    const Result one = execute(words), two = execute(joined({mpirun, "-np", "2"}, words));
    REQUIRE_GOOD(one);
    CHECK(one.out.find("on 512 tokens (8 of 8 samples of 64)") != std::string::npos);
    CHECK_EQUAL(two.out, one.out);
}

// Where a launcher's variables say that there are two processes and MPI sees one, two runs would write over each other.
TEST(run_refuses_to_be_independent_copies) {
    using namespace program;
    TempFolder folder;
    for (const char* variable : {"PMI_SIZE=2", "OMPI_COMM_WORLD_SIZE=2"}) {
        Start start;
        start.environment = {variable};
        const Result r = train({{"out", folder.file("run")}}, start);
        CHECK(r.status == 1 || r.status == 2);
        CHECK_REFUSED(r, r.status, "2 ", "mpirun");
    }
    CHECK_EQUAL(glob_files(folder.file("*")).size(), 0u);
}

// ---------------------------------------------------------------------------------------------------------------------
// Files.

TEST(run_writes_the_tensors_of_the_design) {
    using namespace program;
    TempFolder folder;
    struct {
        const char* name;
        Options options;
        std::map<std::string, std::vector<int64_t>> tensors;
    } const cases[] = {{"small", small(), tensors_of_the_design(256, 16, 1, 2, 1, 8, 8, 8, 32, true)},
                       {"full", small({{"attention", "full"}, {"layers", "2"}}),
                        tensors_of_the_design(256, 16, 2, 2, 1, 8, 8, 8, 32, false)},
                       {"tiny",
                        {{"total-batch", "512"}, {"eval-batches", "1"}, {"sample-tokens", "0"}},
                        tensors_of_the_design(256, 128, 2, 4, 2, 32, 16, 32, 512, true)}};
    for (const auto& c : cases) {
        Options options = c.options;
        options["steps"] = "1", options["out"] = folder.file(c.name);
        REQUIRE_GOOD(run(words_of(options)));
        const std::string checkpoint = folder.file(c.name) + "/step_00000001/";
        const RawFile model = read_raw(checkpoint + "model.safetensors");
        CHECK_EQUAL(model.tensors.size(), check_tensors(model, c.tensors, ""));
        CHECK_EQUAL(model.metadata.at("format"), std::string("pt"));  // transformers' loaders look for it
        const RawFile moments = read_raw(checkpoint + OPTIMIZER);     // of one rank: every tensor whole, as a row
        std::map<std::string, std::vector<int64_t>> rows;
        for (const auto& [tensor, shape] : c.tensors) {
            const int64_t count = shape.size() == 2 ? shape[0] * shape[1] : shape[0];
            rows[format_text("%s[0:%lld]", tensor.c_str(), (long long)count)] = {count};
        }
        CHECK_EQUAL(moments.tensors.size(), check_tensors(moments, rows, "m.") + check_tensors(moments, rows, "v."));
        bool moved = false;
        for (const auto& [name, tensor] : moments.tensors)
            for (const float x : tensor.values<float>())
                moved = moved || x != 0, tests().failed_checks += !(name[0] == 'm' ? std::isfinite(x) : x >= 0);
        CHECK(moved && tests().failed_checks == 0);

        // The count that the program prints is that of the file.
        size_t parameters = 0;
        for (const auto& [name, tensor] : model.tensors) parameters += tensor.count();
        options["steps"] = "0", options["out"] = folder.file(std::string(c.name) + "_none");
        CHECK(run(words_of(options)).out.find(", " + std::to_string(parameters) + " parameters (") !=
              std::string::npos);
    }
}

TEST(run_config_and_manifest_hold_every_field) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("quote\" and \\");
    REQUIRE_GOOD(train({{"out", out},
                        {"prompt", "two\nlines \"quoted\" \xff"},
                        {"seed", "9000000000000000"},
                        {"lr", "0.00123456789012345"},
                        {"steps", "1"}}));
    const std::string checkpoint = out + "/step_00000001/";
    const Json config = parse_json(read_file(checkpoint + "config.json"), "config.json");
    const std::map<std::string, double> numbers = {
        {"layers", 1},    {"dim", 16},         {"heads", 2},         {"kv_groups", 1},
        {"head_dim", 8},  {"cmp_block", 8},    {"cmp_stride", 4},    {"slc_block", 8},
        {"slc_count", 4}, {"window", 16},      {"phi_hidden", 8},    {"mlp_hidden", 32},
        {"seq_len", 64},  {"vocab_size", 256}, {"rope_base", 10000}, {"norm_eps", 1e-6}};
    const std::map<std::string, std::string> texts = {
        {"architecture", "nsa"}, {"attention", "nsa"}, {"tokenizer", "bytes"}};
    for (const auto& [key, value] : numbers) CHECK_EQUAL(config.number(key, "config.json"), value);
    for (const auto& [key, value] : texts) CHECK_EQUAL(config.string(key, "config.json"), value);
    CHECK_EQUAL(config.keys.size(), numbers.size() + texts.size());

    const Json manifest = parse_json(read_file(out + "/run.json"), "run.json");
    const Manifest saved = read_manifest(out + "/step_00000001");
    const Json& state = saved.state;
    for (const Json* run : {&manifest, state.find("options")}) {
        REQUIRE(run != nullptr);
        CHECK_EQUAL(run->string("program", ""), std::string("train_nsa"));
        for (const Option& o : option_table()) {
            if (!(o.verbs & TRAIN) || o.flag) continue;
            const Json* value = run->find(underscored(o.name));
            tests().checks++;
            if (!value || value->kind != (o.integer || o.real ? Json::Number : Json::String))
                check_failed(__FILE__, __LINE__, "%s is missing or of another kind", o.name);
        }
        CHECK_EQUAL(run->string("out", ""), out);
        CHECK_EQUAL(run->string("prompt", ""), std::string("two\nlines \"quoted\" \xEF\xBF\xBD"));
        CHECK_EQUAL(run->integer("seed", ""), int64_t(9000000000000000));
        CHECK_EQUAL(run->number("lr", ""), 0.00123456789012345);
        CHECK_EQUAL(run->integer("total_batch", ""), int64_t(128));
    }
    CHECK_EQUAL(saved.step, int64_t(1));
    CHECK_EQUAL(state.integer("last_update", ""), int64_t(1));
    const char* const loader[] = {"9000000000000000", "64", "", "2"};  // the third is the corpus's fingerprint
    REQUIRE(state.array("loader", "").size() == 4);
    for (size_t i : {0, 1, 3}) CHECK_EQUAL(state.array("loader", "")[i].text, std::string(loader[i]));
    CHECK_EQUAL(state.number("best_val_loss", ""), state.number("best_val_loss", ""));
}

TEST(run_logs_have_the_promised_form) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    const int steps = 6, slc_count = 5;
    REQUIRE_GOOD(train({{"out", out},
                        {"layers", "2"},
                        {"steps", "6"},
                        {"eval-every", "2"},
                        {"slc-count", "5"},
                        {"schedule", "linear"},
                        {"warmup", "2"}}));
    const std::regex validation("s:([0-9]+) tel:([0-9]+\\.[0-9]+)"),
        training("s:([0-9]+) trl:([0-9]+\\.[0-9]+) lr:([0-9.]+e[+-][0-9]+) norm:([0-9]+\\.[0-9]+)");
    std::vector<int> validated, trained;
    std::map<int, double> val_loss, train_loss;
    for (const std::string& line : lines_of(read_file(out + "/main.log"))) {
        std::smatch m;
        if (std::regex_match(line, m, validation)) {
            validated.push_back(std::stoi(m[1])), val_loss[std::stoi(m[1])] = std::stod(m[2]);
        } else if (std::regex_match(line, m, training)) {
            trained.push_back(std::stoi(m[1])), train_loss[std::stoi(m[1])] = std::stod(m[2]);
            // %.6e of the schedule: linear, warm-up over two steps
            const int s = trained.back();
            CHECK_NEAR(std::stod(m[3]), s <= 2 ? 0.01 * s / 2 : 0.01 * (0.1 + 0.9 * (1 - (s - 2) / 4.0)), 1e-8);
        } else {
            check_failed(__FILE__, __LINE__, "main.log: '%s'", line.c_str());
        }
    }
    CHECK((validated == std::vector<int>{0, 2, 4, 6}) && (trained == std::vector<int>{1, 2, 3, 4, 5, 6}));

    int lines = 0;
    for (const Json& line : log_of(out)) {
        lines++;
        const int step = int(line.integer("step", ""));
        if (line.find("val_loss")) {
            CHECK_EQUAL(line.number("val_loss", ""), val_loss.at(step));
            CHECK_EQUAL(line.integer("val_tokens", ""), int64_t(256));
            CHECK_NEAR(line.number("bits_per_byte", ""), line.number("val_loss", "") / std::log(2.0),
                       0.03);  // 0: documents' separators are tokens but no text
            continue;
        }
        CHECK_EQUAL(line.number("loss", ""), train_loss.at(step));
        CHECK(step == line.integer("tokens", "") / 128 && line.integer("tokens", "") % 128 == 0);
        CHECK_NEAR(line.number("epoch", ""), step * 2 / 262143.0, 1e-6);
        for (const char* positive : {"time", "lr", "grad_norm", "ms", "tokens_per_s", "peak_memory_mib"})
            CHECK(line.number(positive, "") > 0);
        CHECK_NEAR(line.number("tokens_per_s", "") * line.number("ms", ""), 128e3, 0.01 * 128e3);
        const std::vector<Json>& layers = line.array("layers", "");
        CHECK_EQUAL(layers.size(), 2u);
        for (const Json& layer : layers) {
            double gates = 0, shares = 0;
            REQUIRE(layer.array("gate", "").size() == 3 && layer.array("gate_share", "").size() == 3);
            for (size_t b = 0; b < 3; b++) {
                const double gate = layer.array("gate", "")[b].number(""),
                             share = layer.array("gate_share", "")[b].number("");
                CHECK(gate > 0 && gate < 1 && share > 0 && share < 1);
                gates += gate, shares += share;
            }
            for (size_t b = 0; b < 3; b++)
                CHECK_NEAR(layer.array("gate_share", "")[b].number(""), layer.array("gate", "")[b].number("") / gates,
                           2e-4);
            CHECK_NEAR(shares, 1, 2e-4);  // four digits each
            CHECK(layer.number("gate_entropy", "") > 0 && layer.number("gate_entropy", "") <= std::log(3.0) + 1e-4);
            CHECK(layer.integer("blocks_max", "") == slc_count);
            // Of 8 blocks of 8 queries the first 5 see 1..5 blocks, the rest 5.
            CHECK_NEAR(layer.number("blocks_mean", ""), (1 + 2 + 3 + 4 + 5 * 4) / 8.0, 0.005);
            const double importance = layer.number("importance_selected", "");
            CHECK(importance > 0.3 && importance <= 1.0001);
        }
    }
    CHECK_EQUAL(lines, steps + 4);
}

// Validation sees the same tokens every time: with a learning rate of 0 nothing changes, not even the last digit.
TEST(run_validation_is_always_on_the_same_tokens) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1), val = write_small_corpus(folder, "val.bin", 2);
    REQUIRE_GOOD(train({{"out", folder.file("run")},
                        {"data", data},
                        {"val-data", val},
                        {"lr", "0"},
                        {"steps", "4"},
                        {"eval-every", "1"},
                        {"init", "random"}}));
    const std::vector<double> losses = logged(folder.file("run"), "val_loss");
    CHECK_EQUAL(losses.size(), 5u);
    for (const double loss : losses) CHECK_EQUAL(loss, losses[0]);
    // More than there is is all there is: 15 samples, in micro-batches of 2.
    REQUIRE_GOOD(train(
        {{"out", folder.file("all")}, {"data", data}, {"val-data", val}, {"steps", "1"}, {"eval-batches", "1000"}}));
    CHECK_EQUAL(logged(folder.file("all"), "val_tokens")[0], 15 * 64.0);
}

// ---------------------------------------------------------------------------------------------------------------------
// The safetensors reader against damaged files.

namespace program {

inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// Addresses this process may take beyond what it has, while the object lives: an allocation after a hostile length
// fails at once.
struct AddressLimit {
    struct rlimit before;
    explicit AddressLimit(uint64_t bytes) {
        getrlimit(RLIMIT_AS, &before);
        std::ifstream in("/proc/self/statm");
        uint64_t pages = 0;
        in >> pages;
        struct rlimit limit = before;
        if (pages) limit.rlim_cur = std::min<rlim_t>(before.rlim_max, pages * uint64_t(sysconf(_SC_PAGESIZE)) + bytes);
        setrlimit(RLIMIT_AS, &limit);
    }
    ~AddressLimit() { setrlimit(RLIMIT_AS, &before); }
};

}  // namespace program

TEST(run_safetensors_reader_refuses_damaged_files) {
    using namespace program;
    TempFolder folder;
    const std::string path = folder.file("x.safetensors"), data(24, '\1');
    const std::string a = "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}",
                      b = "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[16,24]}";
    const std::string whole = safetensors_bytes("{\"__metadata__\":{\"k\":\"v\"}," + a + "," + b + "}", data);
    AddressLimit limit(64 << 20);
    const auto open = [&](const std::string& bytes) {
        write_file(path, bytes);
        return SafeTensors(path);
    };
    const auto header = [&](const std::string& text) { return safetensors_bytes(text, data); };
    {
        const SafeTensors good = open(whole);
        CHECK_EQUAL(good.tensors.size(), 2u);
        CHECK_EQUAL(good.metadata.at("k"), std::string("v"));
        CHECK(good.find("a")->bytes == 16 && good.find("b")->bytes == 8 && !good.find("c"));
        CHECK_FAILS(1, "c is missing", good.get("c", "F32", {1}));
        CHECK_FAILS(1, "U8", good.get("b", "F32", {8}));
        CHECK_FAILS(1, "[2, 2]", good.get("a", "F32", {4}));
        CHECK_EQUAL(static_cast<const char*>(good.get("b", "U8", {8}).data)[7], '\1');
    }
    CHECK_EQUAL(open(header("{" + b + "," + a + "}")).tensors.size(), 2u);  // the order of the header is free
    CHECK_EQUAL(open(safetensors_bytes("{}   ", "")).tensors.size(), 0u);
    CHECK_EQUAL(open(safetensors_bytes(
                         "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[0,0]},\"s\":{\"dtype\":\"F64\","
                         "\"shape\":[],\"data_offsets\":[0,8]}}",
                         std::string(8, '\0')))
                    .tensors.size(),
                2u);

    for (size_t n = 0; n < whole.size(); n++) CHECK_FAILS(1, path.c_str(), open(whole.substr(0, n)));
    CHECK_FAILS(1, path.c_str(), open(whole + '\0'));
    for (const uint64_t length : {uint64_t(0), uint64_t(whole.size()), uint64_t(1) << 31, uint64_t(1) << 62,
                                  uint64_t(1) << 63, ~uint64_t(0), ~uint64_t(0) - 7}) {
        std::string bytes = whole;
        std::memcpy(&bytes[0], &length, 8);
        CHECK_FAILS(1, path.c_str(), open(bytes));
    }
    const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return "{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
    };
    const std::string headers[] = {
        "",
        " ",
        "[]",
        "7",
        "null",
        "{",
        "{}",
        "{\"a\":1}",
        "{\"a\":{}}",
        "{\"a\":[]}",
        "{\"__metadata__\":[]," + a + "," + b + "}",
        "{\"__metadata__\":{\"k\":1}," + a + "," + b + "}",
        "{" + a + "," + a + "}",
        "{" + a + "}",
        "{" + a + "," + b + ",}",
        "{" + a + "," + b + "}x",
        "\xff{" + a + "," + b + "}",
        std::string(200, '['),
        entry("\"F32\"", "[6]", "[0]"),
        entry("\"F32\"", "[6]", "[0,24,24]"),
        entry("\"F32\"", "[6]", "[]"),
        entry("\"F32\"", "[6]", "\"0,24\""),
        entry("\"F32\"", "6", "[0,24]"),
        entry("\"F32\"", "[6.0]", "[0,24]"),
        entry("\"F32\"", "[\"6\"]", "[0,24]"),
        entry("\"F32\"", "[6]", "[0.0,24]"),
        entry("\"F32\"", "[6]", "[\"0\",24]"),
        entry("\"F31\"", "[6]", "[0,24]"),
        entry("\"f32\"", "[6]", "[0,24]"),
        entry("\"\"", "[6]", "[0,24]"),
        entry("4", "[6]", "[0,24]"),
        entry("null", "[6]", "[0,24]"),
        entry("\"F32\"", "[6]", "[-24,0]"),
        entry("\"F32\"", "[6]", "[24,0]"),
        entry("\"F32\"", "[6]", "[-1,23]"),
        entry("\"F32\"", "[6]", "[1,25]"),
        entry("\"F32\"", "[6]", "[0,25]"),
        entry("\"F32\"", "[5]", "[0,20]"),
        entry("\"F32\"", "[5]", "[4,24]"),
        entry("\"F32\"", "[7]", "[0,28]"),
        entry("\"F32\"", "[6]", "[0,23]"),
        entry("\"U8\"", "[6]", "[0,24]"),
        entry("\"F32\"", "[6]", "[0,9223372036854775807]"),
        entry("\"F32\"", "[6]", "[9223372036854775800,9223372036854775807]"),
        entry("\"F32\"", "[6]", "[0,18446744073709551616]"),
        entry("\"F32\"", "[-6]", "[0,24]"),
        entry("\"F32\"", "[-2,-3]", "[0,24]"),
        entry("\"F32\"", "[9223372036854775807]", "[0,24]"),
        entry("\"F32\"", "[4611686018427387905,4]", "[0,24]"),  // 4 * 4 * (2^62 + 1) is 16 modulo 2^64
        entry("\"F64\"", "[4294967296,4294967296]", "[0,0]"),
        entry("\"F32\"", "[2147483648,2147483648,4]", "[0,0]"),
        entry("\"U8\"", "[18446744073709551640]", "[0,24]"),
        "{" + a + ",\"b\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[8,24]}}",  // overlap
        "{" + a + ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[20,24]}}",  // hole
        "{" + a + ",\"b\":{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16]}}",  // the same bytes twice, the
                                                                                        // last left over
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[24],\"data_offsets\":[0,24]},\"b\":{\"dtype\":\"U8\",\"shape\":[24],"
        "\"data_offsets\":[0,24]}}",
    };
    for (const std::string& h : headers) CHECK_FAILS(1, path.c_str(), open(header(h)));
    CHECK_FAILS(1, path.c_str(), open(std::string(7, '\0')));
    CHECK_FAILS(1, folder.path.c_str(), SafeTensors(folder.path));
    CHECK_FAILS(1, "none", SafeTensors(folder.file("none")));
}

// Any byte of a small file replaced by any of a few others: an Error, or a file whose tensors lie inside it.
TEST(run_safetensors_reader_survives_any_byte) {
    using namespace program;
    TempFolder folder;
    const std::string path = folder.file("x.safetensors");
    const std::string whole = safetensors_bytes(
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},\"b\":{\"dtype\":\"U8\",\"shape\":[8],"
        "\"data_offsets\":[16,24]}"
        "}",
        std::string(24, '\1'));
    AddressLimit limit(64 << 20);
    int refused = 0, read = 0;
    for (size_t i = 0; i < whole.size(); i++)
        for (const char other : {'\0', '\xff', '0', '9', '-', '"', '}'}) {
            std::string bytes = whole;
            if (bytes[i] == other) continue;
            bytes[i] = other;
            write_file(path, bytes);
            try {
                const SafeTensors file(path);
                uint64_t sum = 0, length = 0;
                for (const TensorView& t : file.tensors) {
                    for (uint64_t k = 0; k < t.bytes; k++)
                        sum += static_cast<const unsigned char*>(t.data)[k];  // faults far outside the file
                    length += t.bytes;
                }
                CHECK(sum > 0 && length == 24);
                read++;
            } catch (const Error& e) {
                CHECK(e.status == 1 && !std::strchr(e.what(), '\n') && std::strstr(e.what(), path.c_str()));
                refused++;
            }
        }
    CHECK(refused > 500 && read > 20);
}

// ---------------------------------------------------------------------------------------------------------------------
// --dump-state.

// The file against what can be computed from it alone: loss from logits; the last norm's output from logits = normed .
// embed^T by least squares; from that and the softmax the gradients of the last norm and of the embedding's rows that
// no input token reads.
inline void check_dumped_gradients(const program::RawFile& dump, size_t N, size_t V, size_t C) {
    const std::vector<float> logits = dump.tensors.at("logits").values<float>(),
                             embed = dump.tensors.at("embed_tokens.weight").values<float>(),
                             gain = dump.tensors.at("norm.weight").values<float>();
    const std::vector<float> dembed = dump.tensors.at("grad.embed_tokens.weight").values<float>(),
                             dgain = dump.tensors.at("grad.norm.weight").values<float>();
    const std::vector<int32_t> inputs = dump.tensors.at("inputs").values<int32_t>(),
                               targets = dump.tensors.at("targets").values<int32_t>();
    // Inverse of embed^T embed [C, C] by Gauss-Jordan; random rows make it well conditioned.
    std::vector<double> matrix(C * 2 * C, 0);
    for (size_t i = 0; i < C; i++) {
        for (size_t j = 0; j < C; j++)
            for (size_t v = 0; v < V; v++) matrix[i * 2 * C + j] += double(embed[v * C + i]) * embed[v * C + j];
        matrix[i * 2 * C + C + i] = 1;
    }
    for (size_t k = 0; k < C; k++)
        for (size_t i = 0; i < C; i++) {
            const double factor =
                i == k ? 1 - 1 / matrix[k * 2 * C + k] : matrix[i * 2 * C + k] / matrix[k * 2 * C + k];
            const std::vector<double> pivot(matrix.begin() + ptrdiff_t(k * 2 * C),
                                            matrix.begin() + ptrdiff_t((k + 1) * 2 * C));
            for (size_t j = 0; j < 2 * C; j++) matrix[i * 2 * C + j] -= factor * pivot[j];
        }
    std::vector<double> expected_embed(V * C, 0), expected_gain(C, 0), scale_gain(C, 0);
    double loss = 0;
    for (size_t n = 0; n < N; n++) {
        const float* z = &logits[n * V];
        const double largest = *std::max_element(z, z + V);
        double sum = 0;
        for (size_t v = 0; v < V; v++) sum += std::exp(z[v] - largest);
        loss += std::log(sum) + largest - z[targets[n]];
        std::vector<double> projected(C, 0), normed(C, 0), dnormed(C, 0);
        for (size_t v = 0; v < V; v++)
            for (size_t c = 0; c < C; c++) projected[c] += double(z[v]) * embed[v * C + c];
        for (size_t i = 0; i < C; i++)
            for (size_t j = 0; j < C; j++) normed[i] += matrix[i * 2 * C + C + j] * projected[j];
        for (size_t v = 0; v < V; v++) {
            const double dlogit = (std::exp(z[v] - largest) / sum - (size_t(targets[n]) == v)) / double(N);
            for (size_t c = 0; c < C; c++)
                expected_embed[v * C + c] += dlogit * normed[c], dnormed[c] += dlogit * embed[v * C + c];
        }
        for (size_t c = 0; c < C; c++)
            expected_gain[c] += dnormed[c] * normed[c] / gain[c],
                scale_gain[c] += std::fabs(dnormed[c] * normed[c] / gain[c]);
    }
    // Sums of N fp32 terms of this size; the logits that the oracle starts from are rounded too, by a few 2^-24 of
    // their size.
    CHECK_NEAR(dump.tensors.at("loss").values<float>()[0], loss / double(N), 1e-5);
    for (size_t c = 0; c < C; c++) CHECK_NEAR(dgain[c], expected_gain[c], 1e-4 * scale_gain[c]);
    const std::set<int32_t> read(inputs.begin(), inputs.end());
    double worst = 0, largest = 0;
    for (size_t v = 0; v < V; v++)
        for (size_t c = 0; c < C && !read.count(int32_t(v)); c++) {
            worst = std::max(worst, std::fabs(dembed[v * C + c] - expected_embed[v * C + c]));
            largest = std::max(largest, std::fabs(expected_embed[v * C + c]));
        }
    CHECK(largest > 0);
    CHECK_NEAR(worst, 0, 1e-4 * largest);
}

TEST(run_dump_state_holds_what_it_promises) {
    using namespace program;
    TempFolder folder;
    const int64_t B = 2, T = 64, V = 256, C = 16, L = 2, blocks = 8, count = 4, block = 8, groups = 2;
    const Options options =
        small({{"init", "random"}, {"layers", "2"}, {"heads", "4"}, {"kv-groups", "2"}, {"out", folder.file("none")}});
    for (const bool nsa : {true, false}) {
        const std::string path = folder.file(nsa ? "nsa.safetensors" : "full.safetensors");
        Options more = options;
        more["attention"] = nsa ? "nsa" : "full", more["dump-state"] = path;
        const Result r = run(words_of(more));
        REQUIRE_GOOD(r);
        CHECK(!file_exists(folder.file("none")));  // no run was begun
        const RawFile dump = read_raw(path);
        const auto expected = tensors_of_the_design(V, C, L, 4, groups, 8, 8, 8, 32, nsa);
        const size_t named = check_tensors(dump, expected, "") + check_tensors(dump, expected, "grad.");
        CHECK_EQUAL(dump.tensors.size(), named + 4 + (nsa ? size_t(L) : 0));
        for (const char* name : {"inputs", "targets"}) {
            const RawTensor& t = dump.tensors.at(name);
            CHECK(t.dtype == "I32" && t.shape == (std::vector<int64_t>{B, T}));
        }
        CHECK(dump.tensors.at("logits").dtype == "F32" &&
              dump.tensors.at("logits").shape == (std::vector<int64_t>{B, T, V}));
        CHECK(dump.tensors.at("loss").dtype == "F32" && dump.tensors.at("loss").shape == std::vector<int64_t>{1});
        const std::vector<int32_t> inputs = dump.tensors.at("inputs").values<int32_t>(),
                                   targets = dump.tensors.at("targets").values<int32_t>();
        for (int64_t b = 0; b < B; b++)
            for (int64_t t = 0; t + 1 < T; t++) CHECK_EQUAL(targets[size_t(b * T + t)], inputs[size_t(b * T + t + 1)]);
        const Json config = parse_json(dump.metadata.at("config"), "config");
        CHECK(config.integer("layers", "") == L && config.string("attention", "") == (nsa ? "nsa" : "full"));
        CHECK(dump.metadata.at("options").find("--init random") != std::string::npos);
        check_dumped_gradients(dump, size_t(B * T), size_t(V), size_t(C));
        for (const auto& [name, shape] : expected) {  // with every tensor random no gradient is silent
            double square = 0;
            for (const float g : dump.tensors.at("grad." + name).values<float>()) square += double(g) * g;
            tests().checks++;
            if (!(square > 0 && std::isfinite(square)))
                check_failed(__FILE__, __LINE__, "grad.%s has the norm %g", name.c_str(), std::sqrt(square));
        }
        for (int64_t layer = 0; layer < L && nsa; layer++) {
            const RawTensor& t = dump.tensors.at(format_text("layers.%lld.selection", (long long)layer));
            CHECK(t.dtype == "U8" && t.shape == (std::vector<int64_t>{B, groups, T, blocks}));
            REQUIRE(t.bytes.size() == size_t(B * groups * T * blocks));
            for (int64_t row = 0; row < B * groups * T; row++) {
                const char* chosen = &t.bytes[size_t(row * blocks)];
                const int64_t own = row % T / block;
                CHECK_EQUAL(int64_t(std::count(chosen, chosen + blocks, '\1')), std::min(own + 1, count));
                CHECK_EQUAL(int64_t(std::count(chosen, chosen + blocks, '\0')), blocks - std::min(own + 1, count));
                CHECK(chosen[0] == 1 && chosen[own] == 1 && chosen[std::max<int64_t>(own - 1, 0)] == 1);
                CHECK_EQUAL(int64_t(std::count(chosen + own + 1, chosen + blocks, '\1')), int64_t(0));
            }
        }
    }
    // The parameters are those that training starts from: with a learning rate of 0 they are the checkpoint's.
    Options still = options;
    still["lr"] = "0", still["steps"] = "1", still["out"] = folder.file("still");
    REQUIRE_GOOD(run(words_of(still)));
    const RawFile first = read_raw(folder.file("nsa.safetensors")),
                  model = read_raw(folder.file("still/step_00000001/model.safetensors"));
    for (const auto& [name, tensor] : model.tensors) CHECK(first.tensors.at(name).bytes == tensor.bytes);
    // And so is the loss the first step's, and the gradient's norm.
    double square = 0;
    for (const auto& [name, tensor] : first.tensors)
        if (name.compare(0, 5, "grad.") == 0)
            for (const float g : tensor.values<float>()) square += double(g) * g;
    CHECK_NEAR(logged(folder.file("still"), "loss")[0], first.tensors.at("loss").values<float>()[0], 1e-6);
    CHECK_NEAR(logged(folder.file("still"), "grad_norm")[0], std::sqrt(square), 1e-5 * std::sqrt(square) + 1e-6);
    // With --resume: of the checkpoint.
    Options resumed = options;
    resumed["out"] = folder.file("moved"), resumed["steps"] = "2";
    REQUIRE_GOOD(run(words_of(resumed)));
    resumed["resume"] = "on", resumed["dump-state"] = folder.file("resumed.safetensors");
    REQUIRE_GOOD(run(words_of(resumed)));
    const RawFile second = read_raw(folder.file("resumed.safetensors")),
                  moved = read_raw(folder.file("moved/step_00000002/model.safetensors"));
    for (const auto& [name, tensor] : moved.tensors) CHECK(second.tensors.at(name).bytes == tensor.bytes);
    CHECK(second.tensors.at("inputs").bytes != first.tensors.at("inputs").bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// From a text to a sample.

namespace program {

// About `bytes` of text: FineWeb-Edu where it lies beside the checkout, else sentences of the synthetic corpus.
inline std::string real_text(size_t bytes) {
    const std::string file = "../shared/data/fineweb_edu_sample.txt";
    std::string text;
    if (file_exists(file)) return read_file(file).substr(0, bytes);
    SyntheticRandom random(1, 1);
    while (text.size() < bytes) append_synthetic_sentence(text, random, "tailor");
    return text;
}

struct EvalLine {
    unsigned long long tokens = 0, samples = 0, all_samples = 0;
    double loss = 0, perplexity = 0, bits_per_byte = 0;
};
inline EvalLine parse_eval(const std::string& out) {
    EvalLine e;
    std::smatch m;
    static const std::regex form(
        ".* on ([0-9]+) tokens \\(([0-9]+) of ([0-9]+) samples of 64\\): loss ([0-9.]+), perplexity ([0-9.]+), bits "
        "per byte ([0-9.]+)\n");
    REQUIRE(std::regex_match(out, m, form));
    e.tokens = std::stoull(m[1]), e.samples = std::stoull(m[2]), e.all_samples = std::stoull(m[3]);
    e.loss = std::stod(m[4]), e.perplexity = std::stod(m[5]), e.bits_per_byte = std::stod(m[6]);
    CHECK_NEAR(e.perplexity, std::exp(e.loss),
               5e-5 * std::exp(e.loss) + 5e-4);  // loss and perplexity were rounded to 4 and 3 digits
    return e;
}

// What every trained model must do with a prompt.
inline void check_samples(const std::string& from, const Words& more) {
    const auto sample = [&](const Words& words) {
        const Result r = run(joined(
            joined({"sample", "--from", from, "--prompt", "The history of", "--tokens", "24", "--threads", "1"}, more),
            words));
        REQUIRE_GOOD(r);
        CHECK_EQUAL(r.out.substr(0, 14), std::string("The history of"));
        CHECK(r.out.size() > 15 && r.out.back() == '\n');
        return r.out;
    };
    const std::string first = sample({"--seed", "1"});
    CHECK_EQUAL(sample({"--seed", "1"}), first);
    CHECK(sample({"--seed", "2"}) != first);
    const std::string likeliest = sample({"--seed", "1", "--temperature", "0"});
    CHECK_EQUAL(sample({"--seed", "2", "--temperature", "0"}), likeliest);
    CHECK_EQUAL(sample({"--seed", "3", "--top-k", "1"}), likeliest);
    CHECK_EQUAL(sample({"--seed", "4", "--top-p", "0"}), likeliest);
    CHECK_EQUAL(run(joined({"sample", "--from", from, "--prompt=--x", "--tokens", "0"}, more)).out,
                std::string("--x\n"));
    const Result new_document = run(joined({"sample", "--from", from, "--tokens", "5"}, more));
    CHECK(new_document.status == 0 && new_document.out.size() >= 2);
}

}  // namespace program

TEST(run_from_text_to_sample_with_bytes) {
    using namespace program;
    TempFolder folder;
    write_file(folder.file("a.txt"), real_text(200000));
    const Result tokenized = run({"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out",
                                  folder.file("shards/a"), "--val-fraction", "0.05", "--threads", "2"});
    CHECK_EQUAL(tokenized.status, 0);
    CHECK_EQUAL(file_size(folder.file("shards/a_train_000001.bin")) + file_size(folder.file("shards/a_val_000000.bin")),
                2 * 1024 + 2 * (file_size(folder.file("a.txt")) + 2));
    const std::string out = folder.file("run"), val = folder.file("shards/a_val_*.bin");
    const Result trained = train({{"data", folder.file("shards/a_train_*.bin")},
                                  {"val-data", val},
                                  {"out", out},
                                  {"steps", "30"},
                                  {"batch", "8"},
                                  {"total-batch", "1024"},
                                  {"dim", "32"},
                                  {"eval-batches", "1000"},
                                  {"sample-tokens", "40"},
                                  {"prompt", "The"},
                                  {"seed", "3"}});
    REQUIRE_GOOD(trained);
    const std::vector<double> losses = logged(out, "val_loss");
    REQUIRE(losses.size() == 2);
    CHECK_NEAR(losses[0], std::log(256.0), 0.2);  // an untrained model knows nothing
    CHECK(losses[1] < losses[0] - 1.5);
    CHECK_NEAR(logged(out, "bits_per_byte")[1], losses[1] / std::log(2.0), 1e-5);  // a token is a byte

    const Words eval = {"eval", "--from", out, "--val-data", val, "--threads", "1"};
    const Result all = run(eval), same = run(joined(eval, {"--batch", "8"})),
                 part = run(joined(eval, {"--batch", "8", "--eval-batches", "2"}));
    for (const Result* r : {&all, &same, &part}) REQUIRE_GOOD(*r);
    const EvalLine a = parse_eval(all.out), s = parse_eval(same.out), p = parse_eval(part.out);
    CHECK(a.samples == a.all_samples && a.tokens == a.samples * 64);
    CHECK_EQUAL(a.all_samples, (file_size(folder.file("shards/a_val_000000.bin")) - 1024) / 2 / 64 -
                                   (((file_size(folder.file("shards/a_val_000000.bin")) - 1024) / 2) % 64 == 0));
    CHECK_EQUAL(s.samples, a.samples);
    CHECK_NEAR(s.loss, losses[1], 1e-4);  // what training said at its end, on the same samples
    CHECK_EQUAL(p.tokens, 2 * 8 * 64ull);
    for (const EvalLine* e : {&a, &s, &p})
        CHECK_NEAR(e->bits_per_byte, e->loss / std::log(2.0), 1.3e-4);  // both rounded to four digits
    CHECK_REFUSED(run({"eval", "--from", out}), 2, "--val-data");
    const Result whole = run(joined(eval, {"--batch", "60000"}));  // more than there are samples
    REQUIRE_GOOD(whole);
    CHECK_NEAR(parse_eval(whole.out).loss, a.loss, 1e-4);
    CHECK_NEAR(s.loss, a.loss, 1e-4);  // printed with four digits
    CHECK_REFUSED(run({"eval", "--from", out, "--val-data", folder.file("none*")}), 1, "--val-data",
                  folder.file("none*"));
    CHECK_REFUSED(run({"sample", "--from", folder.file("none")}), 1, "--from", folder.file("none"));

    // The sample that training wrote at its end is the one that the verb writes.
    const size_t begin = trained.out.find("--- sample at step 30, 40 tokens ---\n");
    REQUIRE(begin != std::string::npos);
    const size_t text = trained.out.find('\n', begin) + 1, end = trained.out.rfind("---\ndone:");
    REQUIRE(end != std::string::npos && end > text);
    CHECK_EQUAL(
        run({"sample", "--from", out, "--prompt", "The", "--tokens", "40", "--seed", "3", "--threads", "1"}).out,
        trained.out.substr(text, end - text));
    check_samples(out, {});
}

TEST(run_from_text_to_sample_with_gpt2) {
    using namespace program;
    const std::string vocab = std::filesystem::absolute("../shared/data/gpt2").string();
    if (!file_exists(vocab + "/vocab.bpe"))
        return skip(
            "from a text to a sample with GPT-2's vocabulary: no vocab.bpe and encoder.json in ../shared/data/gpt2");
    TempFolder folder;
    write_file(folder.file("a.txt"), real_text(100000));
    CHECK_EQUAL(run({"tokenize", "--tokenizer", "gpt2", "--vocab-dir", vocab, "--in", folder.file("a.txt"), "--out",
                     folder.file("a"), "--val-fraction", "0.1", "--threads", "2"})
                    .status,
                0);
    const auto with = [&](Options more) {
        const Options common = {{"data", folder.file("a_train_*.bin")},
                                {"val-data", folder.file("a_val_*.bin")},
                                {"tokenizer", "gpt2"},
                                {"dim", "8"},
                                {"threads", "-"},
                                {"batch", "4"},
                                {"total-batch", "256"},
                                {"eval-batches", "2"}};
        more.insert(common.begin(), common.end());
        return train(more);
    };
    const std::string out = folder.file("run");
    REQUIRE_GOOD(with({{"out", out}, {"steps", "30"}, {"vocab-dir", vocab}, {"lr", "0.03"}}));
    const std::vector<double> losses = logged(out, "val_loss");
    REQUIRE(losses.size() == 2);
    CHECK_NEAR(losses[0], std::log(50257.0), 0.1);
    CHECK(losses[1] < losses[0] - 1);
    CHECK(logged(out, "bits_per_byte")[1] <
          losses[1] / std::log(2.0) / 2);  // a token of GPT-2 is some four bytes of English
    const Words eval = {"eval", "--from",         out, "--val-data", folder.file("a_val_*.bin"), "--batch",
                        "4",    "--eval-batches", "2"};
    const Result evaluated = run(eval);
    REQUIRE_GOOD(evaluated);
    const EvalLine e = parse_eval(evaluated.out);
    CHECK_NEAR(e.loss, losses[1], 1e-4);
    CHECK_NEAR(e.bits_per_byte, logged(out, "bits_per_byte")[1], 1e-4);
    check_samples(out, {});  // the run remembers where the vocabulary lies

    // Without a vocabulary: training and loss work, text does not, and everyone says so.
    const std::string dumb = folder.file("dumb");
    const Result trained = with({{"out", dumb}, {"steps", "1"}, {"sample-tokens", "5"}});
    REQUIRE_GOOD(trained);
    CHECK(trained.out.find("--vocab-dir") != std::string::npos);
    CHECK_REFUSED(run({"sample", "--from", dumb}), 2, "--vocab-dir");
    CHECK_REFUSED(run({"sample", "--from", dumb, "--vocab-dir", folder.file("none")}), 1, folder.file("none"));
    REQUIRE_GOOD(run({"sample", "--from", dumb, "--vocab-dir", vocab, "--tokens", "3"}));
    const Result unknown =
        run({"eval", "--from", dumb, "--val-data", folder.file("a_val_*.bin"), "--eval-batches", "1"});
    REQUIRE_GOOD(unknown);
    CHECK(unknown.out.find("--vocab-dir") != std::string::npos &&
          unknown.out.find("bits per byte") != std::string::npos);
    // Shards of one vocabulary, a model of the other.
    CHECK_REFUSED(train({{"data", folder.file("a_train_*.bin")}, {"out", folder.file("bytes")}}), 1,
                  folder.file("a_train_000001.bin"), "50257", "256");
}

// A header of odd length is valid; its tensors then lie at odd addresses, which must not matter.
TEST(run_reads_weights_at_any_alignment) {
    using namespace program;
    TempFolder folder;
    REQUIRE_GOOD(train({{"out", folder.file("run")}}));
    const auto sample = [&] {
        return run({"sample", "--from", folder.file("run"), "--tokens", "20", "--threads", "1"});
    };
    const Result before = sample();
    REQUIRE_GOOD(before);
    const std::string path = folder.file("run/step_00000002/model.safetensors"), bytes = read_file(path);
    uint64_t length;
    std::memcpy(&length, bytes.data(), 8);
    write_file(path, safetensors_bytes(bytes.substr(8, length) + " ", bytes.substr(8 + length)));
    seal(folder.file("run/step_00000002"));
    const Result after = sample();
    REQUIRE_GOOD(after);
    CHECK_EQUAL(after.out, before.out);
}

// ---------------------------------------------------------------------------------------------------------------------
// Functions around the model.

// Frequencies over evenly spread uniforms: of K of them a token of probability p gets K p, give or take one at each end
// of its interval.
TEST(run_choose_token_has_the_right_frequencies) {
    const int K = 20000;
    struct {
        std::vector<float> logits;
        double temperature;
        int64_t top_k;
        double top_p;
    } const cases[] = {
        {{1, 3, 2, 0, -1, 2.5f}, 1, 0, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 0.5, 0, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 3, 0, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 1, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 3, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 6, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 99, 1},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 0, 0.5},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 0, 0.99},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 0, 0},
        {{1, 3, 2, 0, -1, 2.5f}, 1, 4, 0.7},
        {{1, 3, 2, 0, -1, 2.5f}, 0.7, 4, 0.9},
        {{5, 5, 5, 5}, 1, 0, 0.5},
        {{5, 5, 5, 5}, 1, 3, 1},
        {{5, 5, 5, 5}, 1, 2, 0.5},
        {{0, 1000, -1000, 999}, 1, 0, 1},
        {{-1e4f, 1e4f}, 100, 0, 1},
        {{0.5f}, 1, 0, 1},
        {{2, 2, 1, 1, 3, 3}, 1, 3, 1},
        {{2, 2, 1, 1, 3, 3}, 1, 0, 0.8},
    };
    for (const auto& c : cases) {
        // The oracle: by decreasing probability, the first k, of those the shortest prefix that holds top_p of the
        // mass.
        std::vector<size_t> order(c.logits.size());
        for (size_t i = 0; i < order.size(); i++) order[i] = i;
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return c.logits[a] > c.logits[b]; });
        if (c.top_k > 0 && size_t(c.top_k) < order.size()) order.resize(size_t(c.top_k));
        std::vector<double> p(c.logits.size(), 0);
        double total = 0, kept = 0;
        for (size_t i : order) total += p[i] = std::exp((double(c.logits[i]) - c.logits[order[0]]) / c.temperature);
        for (size_t i : order) {
            if (c.top_p < 1 && kept > 0 && kept >= c.top_p * total) p[i] = 0;
            kept += p[i];
        }
        std::vector<int> count(c.logits.size(), 0);
        for (int k = 0; k < K; k++)
            count[size_t(choose_token(c.logits, c.temperature, c.top_k, c.top_p, (k + 0.5) / K))]++;
        for (size_t i = 0; i < p.size(); i++) CHECK_NEAR(count[i], K * p[i] / kept, p[i] > 0 ? 1 + 1e-6 : 0);
    }
    for (const double uniform : {0.0, 0.3, 1 - 0x1p-53}) {  // temperature 0: the likeliest, of equals the first
        CHECK_EQUAL(choose_token({1, 3, 2}, 0, 0, 1, uniform), 1);
        CHECK_EQUAL(choose_token({3, 1, 3}, 0, 0, 0.5, uniform), 0);
        CHECK_EQUAL(choose_token({-5, -7, -5}, 0, 2, 1, uniform), 0);
    }
}

// A token that cannot come does not come, whatever the uniform: here the last of the list has a probability of
// exp(-1000) = 0.
TEST(run_choose_token_never_takes_an_impossible_one) {
    for (uint64_t i = 0; i < 2000; i++) {
        std::vector<float> logits;
        const size_t n = 2 + i % 40;
        for (size_t k = 0; k < n; k++) logits.push_back(float(random_normal(11, random_stream(RANDOM_TEST, i), k)));
        logits.push_back(-1e3f);
        for (const double top_p : {1.0, 0.9999999999})
            CHECK(choose_token(logits, 1, 0, top_p, 1 - 0x1p-53) != int32_t(n));
        CHECK(choose_token(logits, 1, 0, 1, 0) != int32_t(n));
    }
}

TEST(run_learning_rate_at_the_key_steps) {
    Config c;
    c.lr = 8e-4, c.lr_final = 0.25, c.warmup = 100, c.steps = 1100;
    const double low = 2e-4, middle = 5e-4, limit = 1e-15;
    for (const char* schedule : {"cosine", "linear", "constant", "wsd"}) {
        c.schedule = schedule;
        const std::string s = schedule;
        CHECK_NEAR(learning_rate(c, 1), 8e-6, limit);
        CHECK_NEAR(learning_rate(c, 50), 4e-4, limit);
        CHECK_NEAR(learning_rate(c, 100), 8e-4, limit);
        CHECK_NEAR(learning_rate(c, 600), s == "cosine" || s == "linear" ? middle : 8e-4, limit);
        CHECK_NEAR(learning_rate(c, 350),
                   s == "cosine"   ? low + 6e-4 * (0.5 + std::sqrt(0.125))
                   : s == "linear" ? low + 6e-4 * 0.75
                                   : 8e-4,
                   limit);
        CHECK_NEAR(learning_rate(c, 900),
                   s == "cosine"   ? low + 6e-4 * (1 + std::cos(0.8 * M_PI)) / 2
                   : s == "linear" ? low + 6e-4 * 0.2
                                   : 8e-4,
                   limit);
        CHECK_NEAR(learning_rate(c, 1000),
                   s == "cosine"   ? low + 6e-4 * (1 + std::cos(0.9 * M_PI)) / 2
                   : s == "linear" ? low + 6e-4 * 0.1
                   : s == "wsd"    ? middle
                                   : 8e-4,
                   limit);
        CHECK_NEAR(learning_rate(c, 1100), s == "constant" ? 8e-4 : low, limit);
        CHECK_NEAR(learning_rate(c, 5000), s == "constant" ? 8e-4 : low, limit);
        for (int64_t step = 2; step <= 1100; step++)
            CHECK(step <= 100 ? learning_rate(c, step) > learning_rate(c, step - 1)
                              : learning_rate(c, step) <= learning_rate(c, step - 1));
        Config d = c;
        d.warmup = 0, d.steps = 1;
        CHECK_NEAR(learning_rate(d, 1), s == "constant" ? 8e-4 : low, limit);
        d.warmup = 10, d.steps = 10;
        CHECK_NEAR(learning_rate(d, 10), 8e-4, limit);
        d.steps = 5;  // a run that ends in its warm-up
        CHECK_NEAR(learning_rate(d, 5), 4e-4, limit);
    }
}

TEST(run_batch_sizes_follow_from_what_was_given) {
    using program::Words;
    struct {
        Words words;
        int ranks;
        int64_t batch, total;
    } const good[] = {
        // tiny: 8 sequences of 512 a step, however they are dealt
        {{}, 1, 8, 4096},
        {{}, 2, 4, 4096},
        {{}, 8, 1, 4096},
        {{}, 3, 2, 3072},
        {{}, 16, 1, 8192},
        {{"--seq-len", "64"}, 1, 8, 4096},
        {{"--seq-len", "1024"}, 2, 2, 4096},
        {{"--seq-len", "8192"}, 1, 1, 8192},
        {{"--batch", "4"}, 1, 4, 4096},
        {{"--batch", "1"}, 2, 1, 4096},
        {{"--batch", "3"}, 1, 3, 3072},
        {{"--batch", "16"}, 1, 16, 8192},
        {{"--batch", "16"}, 2, 16, 16384},
        {{"--total-batch", "2048"}, 1, 4, 2048},
        {{"--total-batch", "5120"}, 1, 5, 5120},
        {{"--total-batch", "6656"}, 1, 1, 6656},
        {{"--total-batch", "16384"}, 4, 8, 16384},
        {{"--total-batch", "4096", "--batch", "2"}, 2, 2, 4096},
    };
    for (const auto& g : good) {
        std::set<std::string> given;
        Config c = program::parse(g.words, &given);
        apply_preset(c, given);
        World world;
        world.size = g.ranks;
        resolve_batch(c, given, world, false);
        CHECK_EQUAL(c.batch, g.batch);
        CHECK_EQUAL(c.total_batch, g.total);
    }
    struct {
        Words words;
        int ranks;
        const char* named;
    } const bad[] = {{{"--total-batch", "1000"}, 1, "--total-batch 1000"},
                     {{"--total-batch", "511"}, 1, "--seq-len 512"},
                     {{"--total-batch", "1536"}, 2, "2 ranks"},
                     {{"--total-batch", "4096", "--batch", "3"}, 1, "--batch 3"},
                     {{"--total-batch", "4096", "--batch", "8"}, 2, "--batch 8"},
                     {{"--total-batch", "4096", "--batch", "16"}, 1, "--batch 16"}};
    for (const auto& b : bad) {
        std::set<std::string> given;
        Config c = program::parse(b.words, &given);
        apply_preset(c, given);
        World world;
        world.size = b.ranks;
        CHECK_FAILS(2, b.named, resolve_batch(c, given, world, false));
    }
    // Whatever is chosen fits together, and the 125m preset on a CPU takes steps that end within a day.
    for (const char* model : {"tiny", "125m"})
        for (int ranks = 1; ranks <= 9; ranks++) {
            std::set<std::string> given;
            Config c = program::parse({"--model", model}, &given);
            apply_preset(c, given);
            World world;
            world.size = ranks;
            resolve_batch(c, given, world, false);
            CHECK(c.batch >= 1 && c.total_batch > 0 && c.total_batch % (c.batch * c.seq_len * ranks) == 0);
        }
}
