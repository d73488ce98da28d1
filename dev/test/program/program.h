// program.h: for tests of the program as its user meets it: starts the built ./train_nsa in a folder of its own and
// looks at exit status, stderr and the files it leaves.

#pragma once
#include <array>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <regex>
#include <set>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "../harness.h"

#include "../../../dataloader.h"
#include "../../../lib/data/synthetic.h"
#include "../../../lib/model/sampling.h"
#include "../../../lib/run/build_info.h"
#include "../../../lib/run/checkpoint.h"
#include "../../../lib/run/config_files.h"
#include "../../../lib/run/device.h"
#include "../../../lib/run/help.h"
#include "../../../lib/run/train_state.h"

extern char** environ;

// mpirun of the machine, "" with a note where the build or the machine has none.
inline std::string find_mpirun(const char* what) {
    if (mpi_name().empty()) return skip(format_text("%s: this build has no MPI", what)), "";
    std::istringstream folders(std::getenv("PATH") ? std::getenv("PATH") : "");
    for (std::string folder; std::getline(folders, folder, ':');)
        if (access((folder + "/mpirun").c_str(), X_OK) == 0) return folder + "/mpirun";
    return skip(format_text("%s: no mpirun on this machine", what)), "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Starting the program, on the CPU engine: GPUs are hidden from it, whose bf16 sums no limit here is made for.

namespace program {

using Words = std::vector<std::string>;
using Options = std::map<std::string, std::string>;  // name without dashes -> value

struct Result {
    int status = 0;  // of exit; 128 + number of the signal that ended it; 1000: it ran past the limit and was killed
    bool struck = false;  // by Start::strike
    double seconds = 0;
    std::string out = "", err = "";
};

struct Start {
    Words environment;  // NAME=VALUE, over the test's own without what MPI launchers set
    bool only_this_environment = false;
    uint64_t largest_file = 0;   // bytes; 0: no limit. Writing beyond it fails like a full disk
    uint64_t address_space = 0;  // bytes; 0: no limit
    std::string input = "";      // stdin: a file; "": empty
    int terminal_columns = 0;    // not 0: stdout and stderr are one terminal of this width, all in Result::out
    double seconds = 60;         // limit
    double strike_after = -1;    // seconds; < 0: never. Then, if it still runs, strike() is called once
    std::function<void(pid_t)> strike = {};
};

// The program under test: of --program, or ./train_nsa of the folder the tests were started in.
inline const std::string& path() {
    static const std::string absolute = std::filesystem::absolute(tests().program).string();
    return absolute;
}

inline Words joined(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
}

// The tests' own, without what their launcher said. How threads wait is set in it (set_omp_wait), so that the program
// need not start itself again, which takes as long as all else before its first line; run_without_environment lets it.
inline std::vector<std::string> child_environment(const Start& start) {
    // Open MPI refuses root and more ranks than cores unless told; MPICH does not look at these.
    static const Words open_mpi = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                                   "OMPI_MCA_rmaps_base_oversubscribe=1",
                                   "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"};
    std::vector<std::string> all = joined(start.environment, open_mpi);
    all.push_back("CUDA_VISIBLE_DEVICES=");
    for (char** e = environ; *e && !start.only_this_environment; e++) {
        const std::string variable = *e, name = variable.substr(0, variable.find('=') + 1);
        bool launcher = name == "RANK=" || name == "WORLD_SIZE=";
        for (const char* beginning : {"PMI_", "PMIX_", "OMPI_", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_"})
            launcher = launcher || name.compare(0, std::strlen(beginning), beginning) == 0;
        const bool replaced = std::any_of(start.environment.begin(), start.environment.end(),
                                          [&](const std::string& s) { return s.compare(0, name.size(), name) == 0; });
        if (!launcher && !replaced) all.push_back(variable);
    }
    return all;
}

// Both ends of a new terminal, like those of a pipe.
inline void open_terminal(int ends[2], int columns) {
    const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0)
        fail("cannot make a terminal: %s", std::strerror(errno));
    struct winsize size = {};
    size.ws_row = 24, size.ws_col = static_cast<unsigned short>(columns);
    ends[0] = master, ends[1] = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (ends[1] < 0 || ioctl(master, TIOCSWINSZ, &size) != 0) fail("no terminal: %s", std::strerror(errno));
}

// words[0] with the others as arguments, without a shell, in a process group of its own; prepare() runs in it before.
inline pid_t spawn(const Words& words, const Start& start, const std::array<int, 3>& streams,
                   const std::function<void()>& prepare = {}) {
    const std::vector<std::string> environment = child_environment(start);
    std::vector<char*> argv, envp;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    for (const std::string& variable : environment) envp.push_back(const_cast<char*>(variable.c_str()));
    argv.push_back(nullptr), envp.push_back(nullptr);
    const pid_t child = fork();
    if (child < 0) fail("cannot fork: %s", std::strerror(errno));
    if (child == 0) {
        setpgid(0, 0);
        if (prepare) prepare();
        for (int i = 0; i < 3; i++)
            if (dup2(streams[size_t(i)], i) < 0) _exit(127);
        execve(argv[0], argv.data(), envp.data());
        _exit(127);
    }
    setpgid(child, child);
    return child;
}
inline int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// The same, and waits for its end.
inline Result execute(const Words& words, const Start& start = {}) {
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) fail("cannot make a pipe: %s", std::strerror(errno));
    if (start.terminal_columns) {
        close(out[0]), close(out[1]), close(err[1]);
        open_terminal(out, start.terminal_columns);
        err[1] = dup(out[1]);
    }
    const int null = open(start.input.empty() ? "/dev/null" : start.input.c_str(), O_RDONLY | O_CLOEXEC);
    const double begin = seconds_now();
    const pid_t child = spawn(words, start, {null, out[1], err[1]}, [&] {
        if (start.largest_file) {
            const struct rlimit limit = {start.largest_file, start.largest_file};
            setrlimit(RLIMIT_FSIZE, &limit);
            signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG
        }
        if (start.address_space) {
            const struct rlimit limit = {start.address_space, start.address_space};
            setrlimit(RLIMIT_AS, &limit);
        }
    });
    close(out[1]), close(err[1]), close(null);
    Result result;
    bool late = false;
    struct pollfd streams[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
        const double left = !result.struck && start.strike_after >= 0 ? begin + start.strike_after - seconds_now() : 1;
        poll(streams, 2, int(100 * std::clamp(10 * left, 0.0, 1.0)));
        for (int i = 0; i < 2; i++) {
            if (streams[i].fd < 0 || !streams[i].revents) continue;
            char bytes[4096];
            const ssize_t n = read(streams[i].fd, bytes, sizeof bytes);
            if (n > 0) (i ? result.err : result.out).append(bytes, size_t(n));
            else if (n == 0 || errno != EINTR) close(streams[i].fd), streams[i].fd = -1;
        }
        if (!result.struck && start.strike_after >= 0 && seconds_now() - begin > start.strike_after) {
            start.strike(child);
            result.struck = true;
        }
        if (!late && seconds_now() - begin > start.seconds) {
            kill(-child, SIGKILL);  // the group: its own children too
            late = true;
        }
    }
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    result.seconds = seconds_now() - begin;
    result.status = late ? 1000 : exit_status(status);
    return result;
}

inline Result run(const Words& arguments, const Start& start = {}) {
    return execute(joined({path()}, arguments), start);
}

// What blanks part.
inline Words words_of(const Options& options) {
    Words words;
    for (const auto& [name, value] : options) words.push_back("--" + name + "=" + value);
    return words;
}

// --steps=3 --lr=0.1 as options.
inline Options parse_pairs(const Words& words) {
    Options options;
    for (const std::string& word : words) {
        const size_t equals = word.find('=');
        options[word.substr(2, equals - 2)] = word.substr(equals + 1);
    }
    return options;
}

// `base`, with what `more` says in place of its own.
inline Options merged(Options base, const Options& more) {
    for (const auto& [name, value] : more) base[name] = value;
    return base;
}

// The smallest model in which every branch has something to do: 7712 parameters, a step takes a millisecond.
inline Options small(const Options& more = {}) {
    Options options = {{"layers", "1"},    {"dim", "16"},      {"heads", "2"},        {"kv-groups", "1"},
                       {"head-dim", "8"},  {"cmp-block", "8"}, {"cmp-stride", "4"},   {"slc-block", "8"},
                       {"slc-count", "4"}, {"window", "16"},   {"phi-hidden", "8"},   {"mlp-hidden", "32"},
                       {"seq-len", "64"},  {"threads", "1"},   {"batch", "2"},        {"total-batch", "128"},
                       {"warmup", "0"},    {"lr", "0.01"},     {"eval-batches", "2"}, {"sample-tokens", "0"},
                       {"steps", "2"},     {"log-every", "1"}};
    for (const auto& [name, value] : more) {
        if (value == "-") options.erase(name);  // not given
        else options[name] = value;
    }
    const std::string attention = options.count("attention") ? options["attention"] : "nsa";
    for (const char* of_nsa : {"cmp-block", "cmp-stride", "slc-block", "slc-count", "window", "phi-hidden"})
        if (!holds(attention, "nsa") && !holds(attention, of_nsa) && !more.count(of_nsa)) options.erase(of_nsa);
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
        if (!holds(r.err, word)) fault += "'" + word + "' is missing; ";
    return fault.empty() ? "" : fault + "stderr: '" + r.err + "'";
}

// The words are those that make the case; __VA_ARGS__: what the line must name.
#define CHECK_REFUSED(result, status, ...)                                                \
    do {                                                                                  \
        tests().checks++;                                                                 \
        const std::string fault_ = program::refusal_fault(result, status, {__VA_ARGS__}); \
        if (!fault_.empty()) check_failed(__FILE__, __LINE__, "%s: %s", #result, fault_); \
    } while (0)

// It ended well and had nothing to complain about.
#define REQUIRE_GOOD(result)                                                                         \
    do {                                                                                             \
        tests().checks++;                                                                            \
        const program::Result& result_ = (result);                                                   \
        if (result_.status != 0 || !result_.err.empty()) {                                           \
            check_failed(__FILE__, __LINE__, "status %d, stderr '%s'", result_.status, result_.err); \
            throw TestAbort();                                                                       \
        }                                                                                            \
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
inline Config parse(const Words& words) {
    std::vector<const char*> argv = {"train_nsa"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    return parse_options(int(argv.size()), argv.data());
}
inline Config parse_and_preset(const Words& words) {
    Config c = parse(words);
    apply_preset(c);
    return c;
}

// ----- tests

// A command of the program: a line as one types it, or words where one holds blanks. `small` in place of a verb trains
// the smallest model, with each --name=value behind it in place of its own.
struct Command {
    Words words;
    Command(const char* line) : words(split_words(line)) {}
    Command(const std::string& line) : words(split_words(line)) {}
    Command(const Words& list) : words(list) {}
    Command(std::initializer_list<std::string> list) : words(list) {}
};

// What the one line on stderr must name, so that its reader knows what to do.
struct Refusal {
    Command command;
    int status;
    Words named;
};

// A test with a folder of its own, which is @/ in commands and in what a line must name. A run goes to @/run.
struct InFolder {
    TempFolder folder;
    const std::string out = folder.file("run");
    std::string binary = path(), mpirun;

    bool find_ranks(const char* what) { return !(mpirun = find_mpirun(what)).empty(); }
    std::string file(const std::string& name) const { return folder.file(name); }
    void write(const std::string& name, const std::string& bytes) const { write_file(file(name), bytes); }
    Words place(Words words) const {
        for (std::string& word : words)
            for (size_t at = 0; (at = word.find("@/", at)) != std::string::npos;) word.replace(at, 1, folder.path);
        return words;
    }
    Words arguments(const Command& command, const char* run = "run") const {
        const Words words = place(command.words);
        if (words.empty() || words[0] != "small") return words;
        return small_words(merged({{"out", file(run)}}, parse_pairs({words.begin() + 1, words.end()})));
    }
    // All words that start it, on so many ranks.
    Words started(const Command& command, int ranks = 1) const {
        const Words alone = joined({binary}, arguments(command));
        return ranks == 1 ? alone : joined({mpirun, "-np", std::to_string(ranks)}, alone);
    }
    Result run(const Command& command, const Start& start = {}) const { return execute(started(command), start); }
    Result run_on(int ranks, const Command& command, const Start& start = {}) const {
        return execute(started(command, ranks), start);
    }
    Result train(const Options& more, const Start& start = {}) const {
        return program::train(merged({{"out", out}}, more), start);
    }
    // What it prints where it ends well and has nothing to complain about.
    std::string printed(const Command& command, const Start& start = {}) const {
        const Result r = run(command, start);
        REQUIRE_GOOD(r);
        return r.out;
    }
    // In bash, for which the command is "$@".
    Result in_shell(const std::string& script, const Command& command) const {
        return execute(joined({"/bin/bash", "-c", "set -o pipefail; " + script, "bash"}, started(command)));
    }
    // None of them leaves anything of a run.
    void check(const std::vector<Refusal>& cases, const Start& start = {}) const {
        for (const Refusal& c : cases) {
            const Result r = execute(joined({binary}, arguments(c.command, "refused")), start);
            std::string command, fault = refusal_fault(r, c.status, place(c.named));
            if (file_exists(file("refused"))) fault += "; a run was begun";
            for (const std::string& word : c.command.words) command += word + " ";
            tests().checks++;
            if (!fault.empty()) check_failed(__FILE__, __LINE__, "%s: %s", command, fault);
        }
    }
};
#define PROGRAM_TEST(name) TEST_IN_FOLDER(TEST, name, true)
#define PROGRAM_TEST_LONG(name) TEST_IN_FOLDER(TEST_LONG, name, true)
// One that needs mpirun, and is left out with a note where there is none.
#define RANKS_TEST(name) TEST_IN_FOLDER(TEST, name, t.find_ranks(#name))
#define RANKS_TEST_LONG(name) TEST_IN_FOLDER(TEST_LONG, name, t.find_ranks(#name))
#define TEST_IN_FOLDER(KIND, name, ready) \
    namespace program {                   \
    struct InFolder_##name : InFolder {   \
        void test();                      \
    };                                    \
    }                                     \
    KIND(name) {                          \
        program::InFolder_##name t;       \
        if (ready) t.test();              \
    }                                     \
    void program::InFolder_##name::test()

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

// train_0.bin and train_1.bin, 40 samples each. The token outside the vocabulary is in the first sample of the second
// shard that `small` deals to rank 1 of two.
inline void write_good_and_bad_shard(const TempFolder& folder) {
    std::vector<uint16_t> tokens = random_tokens(64 * 40 + 1, 1);
    write_file(folder.file("train_0.bin"), shard(tokens));
    uint64_t dealt = 1, sample = 0;
    while ((sample = shuffled_position(dealt, 80, uint64_t(parse_and_preset({"--steps=1"}).seed), 0)) < 40) dealt += 2;
    tokens[64 * (sample - 40) + 10] = 300;
    write_file(folder.file("train_1.bin"), shard(tokens));
}

inline void copy_folder(const std::string& from, const std::string& to) {
    std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
}

// What is in a folder, in order, with blanks between them.
inline std::string names_in(const std::string& folder) {
    std::string text;
    const std::vector<std::string> entries = folder_entries(folder);
    for (const std::string& name : std::set<std::string>(entries.begin(), entries.end()))
        text += (text.empty() ? "" : " ") + name;
    return text;
}

inline std::string weights_of(const std::string& run, int64_t step) {
    return read_file(checkpoint_folder(run, step) + "/model.safetensors");
}

constexpr const char* OPTIMIZER = "optimizer_00000-of-00001.safetensors";
inline void replace_in_file(const std::string& file, const std::string& old, const std::string& now) {
    std::string text = read_file(file);
    const size_t at = text.find(old);
    if (at == std::string::npos) fail("%s does not hold %s", file, old);
    write_file(file, text.replace(at, old.size(), now));
}

// The value of a key in one of the program's JSON files, replaced as text: "dim": 16 -> "dim": `value`.
inline std::string with_json_value(std::string text, const std::string& key, const std::string& value) {
    const std::string quoted = "\"" + key + "\": ";
    const size_t at = text.find(quoted);
    if (at == std::string::npos) fail("no key %s in %s", key, text);
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

// The line's rest behind the words.
inline std::string behind(const std::string& text, const std::string& words) {
    const size_t at = text.find(words);
    if (at == std::string::npos) fail("no '%s' in '%s'", words, text);
    return text.substr(at + words.size(), text.find('\n', at) - at - words.size());
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

// The losses of every validated step.
inline std::map<int64_t, double> validations_of(const std::string& run) {
    std::map<int64_t, double> losses;
    for (const Json& line : log_of(run))
        if (line.find("val_loss")) losses[line.integer("step", run)] = line.number("val_loss", run);
    return losses;
}

template <class T>
std::vector<T> values_of(const TensorView& t) {
    std::vector<T> values(t.bytes / sizeof(T));
    std::memcpy(values.data(), t.data, t.bytes);
    return values;
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
inline size_t check_tensors(const SafeTensors& file, const std::map<std::string, std::vector<int64_t>>& expected,
                            const std::string& prefix) {
    for (const auto& tensor : expected) {
        tests().checks++;
        const std::string fault = error_of([&] { file.get(prefix + tensor.first, "F32", tensor.second); });
        if (!fault.empty()) check_failed(__FILE__, __LINE__, "%s", fault);
    }
    return expected.size();
}

// Writes a checkpoint's manifest anew for the files as they are now: damage that checksums cannot see. state: the
// manifest's, if it is to be another.
inline void seal(const std::string& checkpoint, const std::string& state = "") {
    const Checkpoint manifest = read_manifest(checkpoint);
    std::vector<FileRecord> records;
    for (const FileRecord& file : manifest.files) {
        if (!file_exists(checkpoint + "/" + file.name)) continue;
        const std::string bytes = read_file(checkpoint + "/" + file.name);
        records.push_back({file.name, bytes.size(), crc32c(0, bytes.data(), bytes.size())});
    }
    const std::string old_state = manifest.state_text;
    write_file(checkpoint + "/manifest.json", manifest_text(manifest.step, records, state.empty() ? old_state : state));
}

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

// ---------------------------------------------------------------------------------------------------------------------
// Runs on several ranks, and a run that a test disturbs while it goes on.

// 15 samples of 64 tokens.
inline std::string write_small_corpus(const TempFolder& folder, const std::string& name, uint64_t seed) {
    write_file(folder.file(name), shard(random_tokens(64 * 15 + 1, seed, 64)));
    return folder.file(name);
}

// Two ranks, each with a command of its own, before which options of mpirun for this rank may stand.
inline Words two_ranks(const std::string& mpirun, const Words& first, const Words& second) {
    return joined(joined(joined({mpirun, "-np", "1"}, first), {":", "-np", "1"}), second);
}

// Four layers, so that several small buckets exist and are ready one after the other.
inline Options ranks_options(const Options& more) {
    return merged(parse_pairs({"--layers=4", "--total-batch=512", "--batch=1", "--slc-count=8", "--lr=0.001",
                               "--steps=8", "--eval-every=4", "--bucket-mb=0.04"}),
                  more);
}

// How far losses of ranks_options() may be apart, however a batch is divided over ranks or micro-steps: the same run
// but for the order of fp32 sums. An error e of the gradient moves an AdamW step by at most lr |e_i| / |g_i|, or 2 lr
// where the sign of a tiny g_i is lost, and the loss by lr |e_i| per step: at most steps * lr * |e|_1 <= steps * lr *
// sqrt(P) |e|_2. Sums of N terms that cancel to their root leave |e|_2 <= 2^-24 * N * |g|_2 (N roundings, each at most
// 2^-24 of the sum of magnitudes ~ sqrt(N) |g|, adding as a random walk). 8 steps of 1e-3, N = 512, P = 4 x 3.6 k + 4
// k, and |g| <= 1.5. The logits' own rounding, 2^-24 * |logit| a few, and the six digits of the log add 2e-6. All 8
// blocks are selected (--slc-count 8): otherwise a rounding could swap two blocks of nearly equal score.
static const double RANKS_PARAMETERS = 19000;
static const double RANKS_LIMIT = 8 * 1e-3 * std::sqrt(RANKS_PARAMETERS) * std::ldexp(512.0, -24) * 1.5 + 2e-6;

inline std::string losses_of(const std::string& run_folder) { return read_file(run_folder + "/main.log"); }

// A program that this test can disturb while it runs.
struct Running {
    pid_t launcher = 0;
    std::string out_file, err_file;
    double begun = seconds_now();

    Running(const Words& words, const TempFolder& folder)
        : out_file(folder.file("running.out")), err_file(folder.file("running.err")) {
        std::filesystem::remove(out_file), std::filesystem::remove(err_file);
        const int null = open("/dev/null", O_RDONLY | O_CLOEXEC),
                  out = open(out_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600),
                  err = open(err_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        launcher = spawn(words, {}, {null, out, err});
        close(null), close(out), close(err);
    }
    ~Running() { kill(-launcher, SIGKILL); }

    // Until stdout holds the words.
    bool reaches(const std::string& words, double seconds = 30) {
        for (const double end = seconds_now() + seconds; seconds_now() < end; usleep(10000))
            if (file_exists(out_file) && holds(read_file(out_file), words)) return true;
        return false;
    }
    // The process of this rank, by the file it keeps open or mapped.
    pid_t process_of(const std::string& file) const {
        for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
            const std::string name = entry.path().filename();
            if (name.find_first_not_of("0123456789") != std::string::npos) continue;
            std::error_code error;
            for (const auto& fd : std::filesystem::directory_iterator(entry.path() / "fd", error))
                if (std::filesystem::read_symlink(fd.path(), error) == file) return pid_t(std::stol(name));
            std::ifstream mapped(entry.path() / "maps");
            for (std::string line; std::getline(mapped, line);)
                if (holds(line, file)) return pid_t(std::stol(name));
        }
        fail("no process keeps %s open", file);
    }
    Result end(double seconds) {
        Result result;
        int status = 0;
        const double limit = seconds_now() + seconds;
        pid_t ended = 0;
        while ((ended = waitpid(launcher, &status, WNOHANG)) == 0 && seconds_now() < limit) usleep(10000);
        if (ended == 0) kill(-launcher, SIGKILL), waitpid(launcher, &status, 0);
        result.status = ended == 0 ? 1000 : exit_status(status);
        result.out = read_file(out_file), result.err = read_file(err_file), result.seconds = seconds_now() - begun;
        return result;
    }
};

}  // namespace program
