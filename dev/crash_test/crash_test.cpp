// crash_test.cpp: trains a small run, breaks it again and again, resumes it, and compares the result with a run that
// nobody broke: every file of the last checkpoint byte for byte, the state in its manifest (the loader's included, so
// the order of the data too), and main.log line for line.
//     crash_test [--kills N] [--seed N] [--program ./train_nsa] [--shim build/faults.so] [-- OPTION...]
// The short form, without options, is part of make test. --kills 300 is the long form: that many with one rank, a third
// as many with two, and more of the rest. OPTIONs go to the program, such as --recompute 2. The last line is
// "N passed, N failed"; a failed round leaves its folder behind.
//
//     kill     SIGKILL at a random moment, to all ranks or to one; then --resume
//     fault    faults.c between the program and the disk: writes that fail, and power cuts
//     rot      a kill, and damage to the newest checkpoint before --resume
//
// A round is one run from beginning to end, with several of these on the way. It must fulfil:
// - a checkpoint that was reported saved is resumed from, or a newer one, unless the disk lied (torn, lost_rename) or
//   the checkpoint was damaged;
// - a damaged checkpoint is named and never resumed from; unless the disk lied or we did the damage, there is none,
//   whatever the moment of the crash;
// - if a write fails and the program lives, it says so and trains on to the last step.
#include "../test/program/program.h"

using program::Result;
using program::Words;

struct Settings {
    int64_t kills = 8, seed = 1;
    std::string program = "./train_nsa", shim = "build/faults.so";
    Words more;
};

// Of those that begin so.
static Words lines_of(const std::string& text, const std::string& beginning = "") {
    Words lines = program::lines_of(text);
    const auto others = [&](const std::string& line) { return line.compare(0, beginning.size(), beginning) != 0; };
    lines.erase(std::remove_if(lines.begin(), lines.end(), others), lines.end());
    return lines;
}

// ---------------------------------------------------------------------------------------------------------------------
// Starting and killing.

// The processes of this run, mpirun and all ranks, with this command if one is given. mpirun puts ranks into process
// groups of their own, so they are recognised by a variable in their environment.
static std::vector<pid_t> processes_with(const std::string& variable, const std::string& command) {
    std::vector<pid_t> found;
    for (const std::string& name : folder_entries("/proc")) {
        const pid_t pid = pid_t(std::atoi(name.c_str()));
        if (pid <= 0) continue;
        std::ifstream environment("/proc/" + name + "/environ"), command_file("/proc/" + name + "/comm");
        std::string comm;
        std::getline(command_file, comm);
        bool is_ours = false;
        for (std::string one; std::getline(environment, one, '\0');) is_ours = is_ours || one == variable;
        if (is_ours && (command.empty() || comm == command)) found.push_back(pid);
    }
    return found;
}

// What faults.c does, and where among the reference's operations.
enum Operations { WRITES, FSYNCS, FILE_FSYNCS, RENAMES, BYTES, ALL };
struct Fault {
    const char* kind;
    Operations among;
    int64_t most;  // of FAULT's last number
    int error;     // that the program has to report; 0: none
    bool crashes, lies;
};
// The first four also strike rank 1 alone, which sends its records to rank 0.
const Fault FAULTS[] = {{"short", WRITES, 1, 0, false, false},         {"enospc", BYTES, 30, ENOSPC, false, false},
                        {"eio_write", WRITES, 3, EIO, false, false},   {"eio_fsync", FSYNCS, 3, EIO, false, false},
                        {"eio_rename", RENAMES, 3, EIO, false, false}, {"power_cut", ALL, 1, 0, true, false},
                        {"torn", FILE_FSYNCS, 200, 0, true, true},     {"lost_rename", RENAMES, 200, 0, true, true}};

class CrashTest {
  public:
    CrashTest(const Settings& s, const std::string& scratch_folder) : settings(s), scratch(scratch_folder) {}

    int passed = 0, failed = 0;
    std::map<std::string, int64_t> events;

    uint64_t draw(uint64_t below) {
        return random_below(below, uint64_t(settings.seed), random_stream(RANDOM_TEST), drawn++);
    }
    int64_t between(int64_t low, int64_t high) { return low + int64_t(draw(uint64_t(high - low + 1))); }

    // Runs the program in `folder` with --out run. kill_after: seconds; < 0: never. With several ranks, half of the
    // kills strike only one. `fault` is put before the command, see fault_environment.
    Result run(const std::string& folder, int ranks, bool resume, double kill_after, Words fault = {}) {
        if (!fault.empty()) fault.push_back("FAULT_FOLDER=" + folder + "/run");
        const std::string mark = format_text("CRASH_TEST_RUN=%d.%d", int(getpid()), ++runs);
        program::Start start;
        start.environment = {mark};
        start.seconds = 120 + std::max(kill_after, 0.0);
        start.strike_after = kill_after;
        start.strike = [&](pid_t child) { kill_run(child, mark, ranks, draw(2)); };
        const Result ended = program::execute(
            program::joined({"/usr/bin/env", "-C", folder}, command_words(ranks, resume, fault)), start);
        // A run need not survive two writers at once, so the last rank must be gone before the next start.
        while (ranks > 1 && !processes_with(mark, "").empty()) {
            if (ended.status == TOO_LATE) kill_run(0, mark, ranks, true);
            usleep(1000);
        }
        return ended;
    }

    // The run that nobody breaks, and how often it writes, syncs and renames.
    void make_reference(int ranks) {
        Reference& r = references[ranks];
        r.folder = new_folder(format_text("reference_%d", ranks));
        Result e = run(r.folder, ranks, false, -1);
        if (e.status != 0) fail("the run that nobody breaks ended with status %d: %s%s", e.status, e.out, e.err);
        r.seconds = e.seconds;
        r.manifest = open_checkpoint(checkpoint_folder(r.folder + "/run", last_step));
        r.log = lines_of(read_file(r.folder + "/run/main.log"), "s:");
        print("reference with %d rank%s: %d lines of main.log, %d files in the last checkpoint, %.2f s\n", ranks,
              ranks > 1 ? "s" : "", r.log.size(), r.manifest.files.size(), r.seconds);
        const Result counted =
            run(new_folder(format_text("count_%d", ranks)), ranks, false, -1, fault_environment("count", 0, 0));
        std::smatch m;
        const std::string text = file_exists(fault_log) ? read_file(fault_log) : "";
        if (counted.status != 0 ||
            !std::regex_search(
                text, m, std::regex("writes (\\d+) fsyncs (\\d+) file_fsyncs (\\d+) renames (\\d+) bytes (\\d+)")))
            fail("%s counted nothing in a run of status %d: '%s' %s", settings.shim, counted.status, text, counted.err);
        for (size_t i = 0; i < ALL; i++) r.count[i] = std::stoll(m[i + 1]);
        r.count[ALL] = r.count[WRITES] + r.count[FSYNCS] + r.count[RENAMES];
        print("        %d writes of %d bytes, %d fsyncs, %d renames\n", r.count[WRITES], r.count[BYTES],
              r.count[FSYNCS], r.count[RENAMES]);
        if (r.count[FSYNCS] == 0) fail("the program made no checkpoint");
        std::fflush(stdout);
    }

    // Rounds until that many kills have hit a running program.
    void kill_rounds(int ranks, int64_t kills) {
        const std::string name = format_text("kill, %d rank%s", ranks, ranks > 1 ? "s" : "");
        for (int64_t done = 0; done < kills;)
            round(name, [&](const std::string& folder) {
                for (bool over = false; !over;) {
                    const bool strike = done < kills;
                    const Result e =
                        go_on(folder, ranks, strike ? draw(1000) * 1e-3 * 0.7 * references[ranks].seconds : -1);
                    over = e.status == 0;
                    if (!e.struck) {
                        demand_of(e, over, "without a kill it ended");
                        return finish(folder, ranks);
                    }
                    if (!over) done++, events[name]++;
                }
                finish(folder, ranks);
                const auto best_of = [](const std::string& of) { return best_step(of + "/run"); };
                const int64_t best = best_of(folder), expected = best_of(references[ranks].folder);
                demand(best == expected, "the best checkpoint is that of step %d, expected %d", best, expected);
            });
    }

    void fault_round(int ranks, const Fault& fault) {
        const std::string kind = fault.kind, where = ranks > 1 ? format_text(", rank %d of %d", ranks - 1, ranks) : "";
        round(kind + where, [&](const std::string& folder) {
            const int faults = fault.crashes ? int(between(1, 3)) : 1;
            for (int i = 0; i < faults; i++) {
                const int64_t operations = references[ranks].count[fault.among],
                              at = between(1, fault.lies ? operations / 2 : operations), count = between(1, fault.most);
                disk_lies = disk_lies || fault.lies;
                history += format_text(" %s:%d:%d", fault.kind, at, count);
                const Result e = go_on(folder, ranks, -1, fault_environment(kind, at, count));
                const std::string events_text = file_exists(fault_log) ? read_file(fault_log) : "";
                for (const std::string& line : lines_of(events_text)) events[line.substr(0, line.find(' '))]++;
                if (holds(events_text, "power_cut ")) {
                    demand_of(e, e.status == 128 + SIGKILL, "after the power cut it ended");
                    continue;
                }
                if (fault.crashes) {  // it ended before the power cut
                    demand_of(e, e.status == 0, "it ended");
                    break;
                }
                const Words log = lines_of(read_file(folder + "/run/main.log"), format_text("s:%d trl:", last_step));
                demand_of(e, !log.empty(), "a failing disk ended it before the last step");
                const bool quiet = lines_of(e.err, "").size() == holds(e.err, "nothing to resume");
                if (!fault.error) demand_of(e, e.status == 0 && quiet, "after short writes it ended");
                else if (!lines_of(events_text, kind).empty())
                    demand(holds(e.out + e.err, std::strerror(fault.error)), "it never said '%s': %s",
                           std::strerror(fault.error), e.err);
            }
            const Result e = go_on(folder, ranks, -1);  // the run is complete: this only cleans up
            demand_of(e, e.status == 0, "resumed without faults it ended");
            finish(folder, ranks);
        });
    }

    void rot_round(int ranks) {
        round("rot", [&](const std::string& folder) {
            for (int i = 0; i < 3; i++) {
                Result e = go_on(folder, ranks, (0.3 + draw(1000) * 1e-3 * 0.6) * references[ranks].seconds);
                if (e.status == 0 || checkpoint_steps(folder + "/run").empty()) continue;
                const std::string newest = newest_intact_checkpoint(folder + "/run", [](const std::string&) {}).folder;
                if (newest.empty()) continue;  // it was killed before it had saved another
                const std::string how = damage(newest);
                events["rot: " + how.substr(0, how.find(' '))]++;
                history += " " + newest.substr(newest.rfind('/') + 1) + ": " + how;
                saved = 0, rotten = true;
                damaged = newest.substr(newest.rfind('/') + 1);
            }
            const Result e = go_on(folder, ranks, -1);
            demand_of(e, e.status == 0, "it ended");
            finish(folder, ranks);
        });
    }

    const Words options =
        program::joined({"--model", "tiny", "--device", "cpu"},
                        program::small_words(program::parse_pairs(split_words(
                            "--steps=60 --seq-len=32 --batch=1 --warmup=5 --eval-every=10 --sample-every=20 "
                            "--sample-tokens=4 --save-every=3"))));
    const int64_t last_step = 60;

  private:
    struct Reference {
        std::string folder;
        double seconds = 0;
        Checkpoint manifest;
        Words log;
        int64_t count[ALL + 1] = {};
    };
    static constexpr int TOO_LATE = 1000;  // the status of a Result

    const Settings& settings;
    const std::string scratch, fault_log = scratch + "/events";
    std::map<int, Reference> references;
    uint64_t drawn = 0;
    int64_t runs = 0, folders = 0;
    // of the current round
    int64_t saved = 0;  // the last step that was reported saved
    bool disk_lies = false, rotten = false;
    std::string damaged;  // name of the checkpoint that was damaged since the last start, or ""
    std::string history;

    template <class... Values>
    void demand(bool good, const char* format, const Values&... values) {
        if (!good) throw std::runtime_error(format_text(format, values...));
    }

    void demand_of(const Result& e, bool good, const char* what) {
        demand(good, "%s with status %d: %s", what, e.status, e.err);
    }

    std::string new_folder(const std::string& name) {
        const std::string folder = scratch + "/" + name;
        make_folders(folder);
        return folder;
    }

    // The words that, in front of the command, put the shim between it and the disk.
    Words fault_environment(const std::string& kind, int64_t at, int64_t count) {
        remove_tree(fault_log);
        Words words = {"FAULT_LOG=" + fault_log, format_text("FAULT=%s:%d:%d", kind, at, count),
                       format_text("FAULT_SEED=%d", draw(1u << 30)), "LD_PRELOAD=" + settings.shim};
        const char* asan = std::getenv("ASAN_OPTIONS");
        words.push_back(std::string("ASAN_OPTIONS=") + (asan ? asan : "") + ":verify_asan_link_order=0");
        return words;
    }

    // The shim is preloaded into the program alone, not into mpirun; of two ranks, into the second.
    Words command_words(int ranks, bool resume, const Words& fault) const {
        using program::joined;
        Words command = joined(joined({settings.program, "--out", "run"}, options), settings.more);
        if (resume) command.push_back("--resume");
        if (ranks == 1) return joined(fault, command);
        if (fault.empty()) return joined({"mpirun", "-np", "2"}, command);
        const Words first = joined({"mpirun", "-np", "1"}, command);
        return joined(joined(first, {":", "-np", "1", "env"}), joined(fault, command));
    }

    void kill_run(pid_t child, const std::string& mark, int ranks, bool everything) {
        if (ranks == 1) {
            kill(child, SIGKILL);
            return;
        }
        const std::string name = settings.program.substr(settings.program.rfind('/') + 1);
        const std::vector<pid_t> all = processes_with(mark, ""), of_ranks = processes_with(mark, name.substr(0, 15));
        if (everything || of_ranks.empty())
            for (pid_t pid : all) kill(pid, SIGKILL);
        else kill(of_ranks[size_t(draw(of_ranks.size()))], SIGKILL);
    }

    // Starts the round's run once more, and checks what every resume must fulfil.
    Result go_on(const std::string& folder, int ranks, double kill_after, const Words& fault = {}) {
        const Result e = run(folder, ranks, true, kill_after, fault);
        history += format_text(" [%.2f s, status %d]", e.seconds, e.status);
        demand(e.status != TOO_LATE, "it did not end; stdout: %s stderr: %s", e.out, e.err);
        std::smatch m;
        int64_t resumed = holds(e.err, "nothing to resume") ? 0 : -1;
        for (const std::string& line : lines_of(e.out, "resume:"))
            if (std::regex_search(line, m, std::regex("step_([0-9]{8,})"))) resumed = std::stoll(m[1]);
        if (resumed >= 0) {  // it lived long enough to print it
            events[resumed ? "resumes" : "starts with nothing to resume"]++;
            history += format_text(" from %d", resumed);
            if (!disk_lies)
                demand(resumed >= saved, "step %d was reported saved and it resumed from %d", saved, resumed);
            if (!damaged.empty()) {
                demand(resumed != parse_step(damaged), "it resumed from the damaged %s", damaged);
                demand(std::regex_search(e.out + e.err, std::regex(damaged + " is damaged")),
                       "it did not say that %s is damaged: %s", damaged, e.err);
                damaged.clear();
            }
            saved = resumed;
        }
        if (holds(e.out + e.err, " is damaged")) {
            events["fallbacks to an older checkpoint"]++;
            demand(disk_lies || rotten, "a damaged checkpoint had the name of a whole one: %s", e.err);
        }
        for (const std::string& line : lines_of(e.out.substr(0, e.out.rfind('\n') + 1), "saved "))
            if (std::regex_search(line, m, std::regex("step_([0-9]{8,})")))
                saved = std::max<int64_t>(saved, std::stoll(m[1]));
        if (e.struck && e.status != 0) return e;
        const std::string run_folder = folder + "/run";
        if (e.status == 1 && !checkpoint_steps(run_folder).empty() &&
            newest_intact_checkpoint(run_folder, [](const std::string&) {}).folder.empty()) {
            // Nothing intact is left: it may refuse, if it says why. Then do what a user would.
            demand(disk_lies || rotten, "no checkpoint is intact: %s", e.err);
            demand(holds(e.err, " is damaged"), "it refused without saying that a checkpoint is damaged: %s", e.err);
            events["refusals, all checkpoints damaged"]++;
            for (int64_t step : checkpoint_steps(run_folder)) remove_tree(checkpoint_folder(run_folder, step));
            saved = 0, damaged.clear();
            return go_on(folder, ranks, kill_after);
        }
        demand_of(e, e.status == 0 || e.status == 1 || e.status == 128 + SIGKILL, "it ended");
        return e;
    }

    void finish(const std::string& folder, int ranks) {
        const Reference& r = references[ranks];
        const std::string run_folder = folder + "/run", last = checkpoint_folder(run_folder, last_step),
                          wanted = checkpoint_folder(r.folder + "/run", last_step);
        const Checkpoint m = open_checkpoint(last);
        demand(m.files.size() == r.manifest.files.size(), "the last checkpoint has %d files, expected %d",
               m.files.size(), r.manifest.files.size());
        for (const FileRecord& file : r.manifest.files)
            demand(read_file(last + "/" + file.name) == read_file(wanted + "/" + file.name), "%s differs", file.name);
        demand(m.state_text == r.manifest.state_text, "the state in the manifest differs: %s, expected %s",
               m.state_text, r.manifest.state_text);
        const Words log = lines_of(read_file(run_folder + "/main.log"), "s:");
        for (size_t i = 0; i < std::max(log.size(), r.log.size()); i++) {
            const std::string found = i < log.size() ? log[i] : "its end",
                              expected = i < r.log.size() ? r.log[i] : "its end";
            demand(found == expected, "main.log, line %d: found %s, expected %s", i + 1, found, expected);
        }
        for (const std::string& name : folder_entries(run_folder))
            demand(parse_step(name, ".writing") < 0 && parse_step(name, ".removing") < 0, "%s was left behind", name);
    }

    void round(const std::string& name, const std::function<void(const std::string&)>& body) {
        const std::string folder = new_folder(format_text("round_%04d", ++folders));
        saved = 0, disk_lies = rotten = false, damaged.clear(), history.clear();
        try {
            body(folder);
            passed++;
            remove_tree(folder);
        } catch (const std::exception& e) {
            failed++;
            print("FAIL %s, in %s:%s: %s\n", name, folder, history, e.what());
        }
        std::fflush(stdout);
    }

    // Damages one file of the checkpoint; returns a description that begins with the kind of damage.
    std::string damage(const std::string& folder) {
        Words names;
        for (const FileRecord& file : read_manifest(folder).files)
            if (file.size > 0) names.push_back(file.name);
        names.push_back("manifest.json");
        const std::string name = names[size_t(draw(names.size()))], path = folder + "/" + name;
        std::string bytes = read_file(path);
        switch (draw(5)) {
            case 0: {
                const size_t at = size_t(draw(bytes.size()));
                bytes[at] = char(bytes[at] ^ 1 << draw(8));
                write_text_file(path, bytes);
                return format_text("bit of %s flipped at byte %d", name, at);
            }
            case 1:
                write_text_file(path, bytes.substr(0, size_t(draw(bytes.size()))));
                return "end of " + name + " lost";
            case 2: write_text_file(path, bytes + "x"); return "byte after " + name + " added";
            case 3: remove_tree(path); return "file " + name + " removed";
            default:
                for (size_t i = size_t(draw(bytes.size())); i < bytes.size(); i++) bytes[i] = 0;
                if (bytes == read_file(path)) bytes += "x";
                write_text_file(path, bytes);
                return "zeros in the end of " + name;
        }
    }
};

static Settings settings_of(int argc, char** argv) {
    Settings s;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--") {
            s.more.assign(argv + i + 1, argv + argc);
            break;
        }
        const std::map<std::string, int64_t*> numbers = {{"--kills", &s.kills}, {"--seed", &s.seed}};
        const std::map<std::string, std::string*> texts = {{"--program", &s.program}, {"--shim", &s.shim}};
        if (i + 1 == argc || (!numbers.count(word) && !texts.count(word)))
            fail_usage("%s: unknown option or missing value; the head of crash_test.cpp lists them", argv[i]);
        if (numbers.count(word)) *numbers.at(word) = std::atoll(argv[++i]);
        else *texts.at(word) = argv[++i];
    }
    for (std::string* file : {&s.program, &s.shim}) {
        if (!file_exists(*file)) fail_usage("cannot find %s: make %s", *file, *file);
        *file = std::filesystem::canonical(*file);
    }
    return s;
}

int main(int argc, char** argv) {
    try {
        const Settings settings = settings_of(argc, argv);
        const bool long_form = settings.kills >= 100;
        const char* base = std::getenv("TMPDIR");
        std::string scratch = std::string(base ? base : "/tmp") + "/crash_test_XXXXXX";
        if (!mkdtemp(&scratch[0])) fail("cannot make a temporary folder %s: %s", scratch, std::strerror(errno));
        scratch = std::filesystem::canonical(scratch);  // the shim sees paths with their links resolved
        CrashTest test(settings, scratch);
        const double begin = seconds_now();
        const int faults = long_form ? 10 : 1, rot = long_form ? 15 : 3;  // rounds; of faults, of each kind
        test.make_reference(1);
        test.kill_rounds(1, settings.kills);
        for (const Fault& fault : FAULTS)
            for (int i = 0; i < faults; i++) test.fault_round(1, fault);
        for (int i = 0; i < rot; i++) test.rot_round(1);
        if (long_form) {
            test.make_reference(2);
            test.kill_rounds(2, settings.kills / 3);
            for (int f = 0; f < 4; f++)
                for (int i = 0; i < faults / 2; i++) test.fault_round(2, FAULTS[f]);
        }
        for (const auto& event : test.events) print("%8d  %s\n", event.second, event.first);
        print("%.0f s\n", seconds_now() - begin);
        if (test.failed == 0) remove_tree(scratch);
        print("%d passed, %d failed\n", test.passed, test.failed);
        return test.failed ? 1 : 0;
    } catch (const Error& e) {
        std::fprintf(stderr, "crash_test: error: %s\n", e.what());
        return e.status;
    }
}
