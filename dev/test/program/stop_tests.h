// stop_tests.h: a run that is asked to stop at any time saves, and what it saved goes on as if nobody had asked.
#pragma once
#include <atomic>
#include <mutex>
#include <thread>

#include "fault_tests.h"

namespace program {

// `stops` stops of one way to start a run, each at another moment, several at a time: every one must end with the
// status that the signal means, and what it left must be the run that nobody stopped, bit for bit: the losses up to
// there, and the weights at the next checkpoint after a resume.
class StopTrial {
    static constexpr int64_t SAVE_EVERY = 50, REFERENCE_STEPS = 500;
    const TempFolder folder;
    const Words launcher;
    const Options options;
    std::vector<std::string> reference;  // lines of main.log
    std::mutex mutex;
    std::vector<std::string> faults;
    std::atomic<int> next{0}, launcher_lost_status{0};

    Words command(const Options& more) const {
        Options all = options;
        for (const auto& [name, value] : more) all[name] = value;
        return joined(joined(launcher, {path()}), words_of(all));
    }
    std::string reference_checkpoint(int64_t step) const {
        return folder.file(format_text("whole/step_%08lld/model.safetensors", (long long)step));
    }

    // Those of training alone.
    static std::vector<std::string> training_losses(const std::string& run) {
        std::vector<std::string> lines;
        for (const std::string& line : lines_of(losses_of(run)))
            if (line.find(" trl:") != std::string::npos) lines.push_back(line);
        return lines;
    }

    // What is wrong with the run in `out`, which got the signal; "" if nothing is.
    std::string fault_of(const Result& r, int signal, const std::string& out) {
        const int expected = signal == SIGINT ? 130 : 75;
        // Of a signal to itself MPICH's mpirun sometimes returns 0 whatever the ranks return: dev/LOG.md.
        if (!launcher.empty() && r.status == 0) launcher_lost_status++;
        else if (r.status != expected) return format_text("status %d, expected %d", r.status, expected);
        if (!r.err.empty()) return "stderr is not empty";
        const std::string checkpoint = newest_checkpoint(out).folder;
        if (checkpoint.empty()) return "no checkpoint";
        const int64_t step = read_manifest(checkpoint).step, until = (step / SAVE_EVERY + 1) * SAVE_EVERY;
        if (until > REFERENCE_STEPS) return format_text("step %lld: the machine is too fast", (long long)step);
        const Result resumed = execute(command({{"out", out}, {"resume", "on"}, {"steps", std::to_string(until)}}));
        if (resumed.status != 0) return format_text("the resume ends with %d: ", resumed.status) + resumed.err;
        const std::vector<std::string> lines = training_losses(out);
        if (lines.size() != size_t(until))
            return format_text("%zu losses, expected %lld", lines.size(), (long long)until);
        for (size_t i = 0; i < lines.size(); i++)
            if (lines[i] != reference[i]) return "'" + lines[i] + "' is '" + reference[i] + "' undisturbed";
        const std::string weights = format_text("/step_%08lld/model.safetensors", (long long)until);
        return read_file(out + weights) == read_file(reference_checkpoint(until)) ? "" : "other weights";
    }

    void stop_one(int i) {
        const int signal = std::array{SIGTERM, SIGUSR1, SIGINT}[size_t(i) % 3];
        const double pause = 0.1 + 1.1 * random_uniform(1, random_stream(RANDOM_TEST), uint64_t(i));
        const TempFolder own;
        const std::string out = own.file("run");
        std::string fault = "no first step";
        {
            Running run(command({{"out", out}, {"steps", "100000"}}), own);
            if (run.reaches("step 0001", 60)) {
                usleep(useconds_t(pause * 1e6));
                kill(run.launcher, signal);
                const Result r = run.end(60);
                fault = fault_of(r, signal, out);
                if (!fault.empty()) fault += "; stderr: " + r.err;
            }
        }
        if (fault.empty()) return;
        const std::lock_guard lock(mutex);
        faults.push_back(format_text("stop %d, signal %d after %.3f s: ", i, signal, pause) + fault);
    }

  public:
    StopTrial(const Words& launched_by, int threads, int ranks)
        : launcher(launched_by),
          options({{"total-batch", "256"},
                   {"seq-len", "128"},
                   {"batch", std::to_string(2 / ranks)},
                   {"threads", std::to_string(threads)},
                   {"warmup", "10"},
                   {"schedule", "constant"},
                   {"eval-every", "0"},
                   {"eval-batches", "1"},
                   {"sample-tokens", "0"},
                   {"save-every", std::to_string(SAVE_EVERY)}}) {}

    void run(int stops, int at_a_time) {
        Start start;
        start.seconds = 600;
        REQUIRE_GOOD(
            execute(command({{"out", folder.file("whole")}, {"steps", std::to_string(REFERENCE_STEPS)}}), start));
        reference = training_losses(folder.file("whole"));
        std::vector<std::thread> workers;
        for (int w = 0; w < at_a_time; w++)
            workers.emplace_back([&] {
                for (int i = next++; i < stops; i = next++) stop_one(i);
            });
        for (std::thread& w : workers) w.join();
        for (const std::string& fault : faults) check_failed(__FILE__, __LINE__, "%s", fault.c_str());
        tests().checks += stops;
        std::printf("    %d of %d stops saved and went on to the same bits", stops - int(faults.size()), stops);
        if (launcher_lost_status) std::printf("; mpirun itself ended %d times with 0", launcher_lost_status.load());
        std::printf("\n");
    }
};

}  // namespace program

TEST_LONG(stop_signals_at_any_time_one_thread) { program::StopTrial({}, 1, 1).run(12, 4); }
TEST_LONG(stop_signals_at_any_time_two_threads) { program::StopTrial({}, 2, 1).run(12, 3); }
TEST_LONG(stop_signals_at_any_time_two_ranks) {
    const std::string mpirun = find_mpirun("stop signals to mpirun");
    if (!mpirun.empty()) program::StopTrial({mpirun, "-np", "2"}, 1, 2).run(12, 3);
}

// A signal during validation is not kept waiting: what was learnt is saved, and the resume does the rest.
PROGRAM_TEST(stop_signal_leaves_validation) {
    const std::string mpirun = find_mpirun("a stop during the validation of 2 ranks");
    for (const int ranks : {1, 2}) {
        if (ranks == 2 && mpirun.empty()) continue;
        const std::string out = folder.file("run" + std::to_string(ranks));
        const auto command = [&](const Options& more) {
            Options options = merged(small({{"batch", "1"}, {"out", out}, {"schedule", "constant"}}), more);
            const Words launcher = ranks == 2 ? Words{mpirun, "-np", "2", path()} : Words{path()};
            return joined(launcher, words_of(options));
        };
        const auto stopped_in_validation = [&](const Options& more, const std::string& when) {
            Running run(command(more), folder);
            REQUIRE(run.reaches(when));
            usleep(500000);
            kill(run.process_of(out + "/heartbeat_rank0.jsonl"), SIGTERM);
            const Result r = run.end(10);
            CHECK_EQUAL(r.status, 75);
            CHECK_EQUAL(r.out.find("--resume goes on") != std::string::npos, !newest_checkpoint(out).folder.empty());
        };
        stopped_in_validation({{"steps", "3"}, {"eval-batches", "1000000"}}, "out: ");
        CHECK(newest_checkpoint(out).folder.empty());  // it was the validation before the first step
        std::filesystem::remove_all(out);

        CHECK_EQUAL(execute(command({{"steps", "3"}})).status, 0);
        const std::string whole = lines_of(losses_of(out)).back();
        CHECK_EQUAL(whole.substr(0, 8), std::string("s:3 tel:"));
        std::filesystem::remove_all(out);

        CHECK_EQUAL(execute(command({{"steps", "2"}})).status, 0);
        stopped_in_validation({{"steps", "3"}, {"resume", "on"}, {"eval-batches", "1000000"}}, "step 0003 | loss");
        CHECK_EQUAL(newest_checkpoint(out).step, int64_t(3));
        CHECK_EQUAL(execute(command({{"steps", "3"}, {"resume", "on"}})).status, 0);
        CHECK_EQUAL(lines_of(losses_of(out)).back(), whole);
    }
}

// A validation in the middle of a run that a signal ends, in any of its sets, is made up for: every line is there,
// once, and the checkpoint knows its loss.
PROGRAM_TEST(stop_signal_in_a_validation_is_made_up_for) {
    for (const char* when : {"step 0002 | loss", "val loss"}) {
        const std::string out = folder.file("run");
        std::filesystem::remove_all(out);
        const Options options = small({{"out", out},
                                       {"schedule", "constant"},
                                       {"steps", "4"},
                                       {"eval-every", "2"},
                                       {"save-every", "2"},
                                       {"val-data", "a=synthetic,b=synthetic"}});
        const auto with = [&](const Options& more) { return joined({path()}, words_of(merged(options, more))); };
        CHECK_EQUAL(execute(with({{"steps", "1"}})).status, 0);
        {
            Running run(with({{"resume", "on"}, {"eval-batches", "1000000"}}), folder);
            REQUIRE(run.reaches("step 0002 | loss"));
            usleep(when[0] == 's' ? 100000 : 1500000);
            kill(run.launcher, SIGTERM);
            CHECK_EQUAL(run.end(10).status, 75);
        }
        const std::string checkpoint = newest_checkpoint(out).folder;
        REQUIRE(read_manifest(checkpoint).step == 2 && losses_of(out).find("s:2 tel") == std::string::npos);
        CHECK_EQUAL(execute(with({{"resume", "on"}, {"eval-batches", "2"}, {"keep", "0"}})).status, 0);
        int first = 0, second = 0;
        for (const std::string& line : lines_of(losses_of(out)))
            first += line.find("s:2 tel:") == 0, second += line.find("s:2 tel/b:") == 0;
        CHECK_EQUAL(first, 1);
        CHECK_EQUAL(second, 1);
        CHECK(read_manifest(checkpoint).state.find("validation") &&
              !read_manifest(checkpoint).state.find("left_validation"));
    }
}
