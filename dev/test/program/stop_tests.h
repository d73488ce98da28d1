// stop_tests.h: a run that is asked to stop at any time saves, and what it saved goes on as if nobody had asked.
#pragma once
#include "fault_tests.h"

namespace program {

// Twelve stops of one way to start a run, each at another moment: every one must end with the status that the signal
// means, and what it left must be the run that nobody stopped, bit for bit: the losses up to there, and the weights at
// the next checkpoint after a resume.
inline void stop_at_any_time(const InFolder& in, int threads, int ranks) {
    const int stops = 12;
    const int64_t save_every = 50, reference_steps = 500;
    const std::string trained = format_text(
        "--total-batch=256 --seq-len=128 --batch=%d --threads=%d --warmup=10 --schedule=constant --eval-every=0 "
        "--eval-batches=1 --sample-tokens=0 --save-every=50 ",
        2 / ranks, threads);
    const auto command = [&](const std::string& out, int64_t steps) {
        return in.started(trained + format_text("--steps=%d --out=", steps) + out, ranks);
    };
    // Those of training alone.
    const auto losses = [](const std::string& run) {
        std::vector<std::string> lines;
        for (const std::string& line : lines_of(losses_of(run)))
            if (holds(line, " trl:")) lines.push_back(line);
        return lines;
    };
    Start start;
    start.seconds = 600;
    REQUIRE_GOOD(execute(command(in.file("whole"), reference_steps), start));
    const std::vector<std::string> reference = losses(in.file("whole"));
    int launcher_lost_status = 0;
    // What is wrong with the run in `out`, which got the signal; "" if nothing is.
    const auto fault_of = [&](const Result& r, int signal, const std::string& out) -> std::string {
        const int expected = signal == SIGINT ? 130 : 75;
        // Of a signal to itself MPICH's mpirun sometimes returns 0 whatever the ranks return: dev/LOG.md.
        if (ranks > 1 && r.status == 0) launcher_lost_status++;
        else if (r.status != expected) return format_text("status %d, expected %d", r.status, expected);
        if (!r.err.empty()) return "stderr: " + r.err;
        if (newest_checkpoint(out).folder.empty()) return "no checkpoint";
        const int64_t step = newest_checkpoint(out).step, until = (step / save_every + 1) * save_every;
        if (until > reference_steps) return format_text("step %d: the machine is too fast", step);
        const Result resumed = execute(joined(command(out, until), {"--resume=on"}));
        if (resumed.status != 0) return format_text("the resume ends with %d: ", resumed.status) + resumed.err;
        const std::vector<std::string> lines = losses(out);
        if (lines != std::vector<std::string>(reference.begin(), reference.begin() + until)) return "other losses";
        return weights_of(out, until) == weights_of(in.file("whole"), until) ? "" : "other weights";
    };
    for (int i = 0; i < stops; i++) {
        const int signal = std::array{SIGTERM, SIGUSR1, SIGINT}[size_t(i) % 3];
        const double pause = 0.1 + 1.1 * random_uniform(1, random_stream(RANDOM_TEST), uint64_t(i));
        const TempFolder own;
        Running run(command(own.file("run"), 100000), own);
        std::string fault = "no first step";
        if (run.reaches("step 0001", 60)) {
            usleep(useconds_t(pause * 1e6));
            kill(run.launcher, signal);
            fault = fault_of(run.end(60), signal, own.file("run"));
        }
        tests().checks++;
        if (!fault.empty())
            check_failed(__FILE__, __LINE__, "stop %d, signal %d after %.3f s: %s", i, signal, pause, fault);
    }
    if (launcher_lost_status) std::printf("    mpirun itself ended %d times with 0\n", launcher_lost_status);
}

}  // namespace program

PROGRAM_TEST_LONG(stop_signals_at_any_time_one_thread) { stop_at_any_time(*this, 1, 1); }
PROGRAM_TEST_LONG(stop_signals_at_any_time_two_threads) { stop_at_any_time(*this, 2, 1); }
RANKS_TEST_LONG(stop_signals_at_any_time_two_ranks) { stop_at_any_time(*this, 1, 2); }

PROGRAM_TEST(stop_by_an_unknown_instruction_is_one_line) {
    const std::string kills = "\"$@\" & until [ -s " + out + "/main.log ]; do :; done; kill -ILL $!; wait $!";
    CHECK_REFUSED(in_shell(kills, "small --steps=100000"), 1, "processor", "MARCH=");
}

// A signal during validation is not kept waiting: what was learnt is saved, and the resume does the rest. The next test
// has one rank.
RANKS_TEST(stop_signal_leaves_validation) {
    const std::string small = "small --batch=1 --schedule=constant ";
    const auto stopped_in_validation = [&](const std::string& more, const std::string& when) {
        Running run(started(small + "--steps=3 --eval-batches=1000000 " + more, 2), folder);
        REQUIRE(run.reaches(when));
        usleep(500000);
        kill(run.process_of(out + "/heartbeat_rank0.jsonl"), SIGTERM);
        const Result r = run.end(10);
        CHECK_EQUAL(r.status, 75);
        CHECK_EQUAL(holds(r.out, "--resume goes on"), !newest_checkpoint(out).folder.empty());
    };
    stopped_in_validation("", "out: ");
    CHECK(newest_checkpoint(out).folder.empty());  // it was the validation before the first step
    std::filesystem::remove_all(out);

    CHECK_EQUAL(run_on(2, small + "--steps=3 --out=@/whole").status, 0);
    const std::string whole = lines_of(losses_of(file("whole"))).back();
    CHECK_EQUAL(whole.substr(0, 8), std::string("s:3 tel:"));

    CHECK_EQUAL(run_on(2, small + "--steps=2").status, 0);
    stopped_in_validation("--resume=on", "step 0003 | loss");
    CHECK_EQUAL(newest_checkpoint(out).step, int64_t(3));
    CHECK_EQUAL(run_on(2, small + "--steps=3 --resume=on").status, 0);
    CHECK_EQUAL(lines_of(losses_of(out)).back(), whole);
}

// A validation in the middle of a run that a signal ends, in any of its sets, is made up for: every line is there,
// once, and the checkpoint knows its loss.
PROGRAM_TEST(stop_signal_in_a_validation_is_made_up_for) {
    const std::string small =
        "small --schedule=constant --eval-every=2 --save-every=2 --val-data=a=synthetic,b=synthetic ";
    for (const useconds_t pause : {100000, 1500000}) {
        CHECK_EQUAL(run(small + "--steps=1").status, 0);
        {
            Running run(started(small + "--steps=4 --resume=on --eval-batches=1000000"), folder);
            REQUIRE(run.reaches("step 0002 | loss"));
            usleep(pause);
            kill(run.launcher, SIGTERM);
            CHECK_EQUAL(run.end(10).status, 75);
        }
        const std::string checkpoint = newest_checkpoint(out).folder;
        REQUIRE(read_manifest(checkpoint).step == 2 && !holds(losses_of(out), "s:2 tel"));
        CHECK_EQUAL(run(small + "--steps=4 --resume=on --keep=0").status, 0);
        for (const std::string line : {"\ns:2 tel:", "\ns:2 tel/b:"})
            CHECK(holds(losses_of(out), line) && losses_of(out).find(line) == losses_of(out).rfind(line));
        CHECK(read_manifest(checkpoint).state.find("validation") &&
              !read_manifest(checkpoint).state.find("left_validation"));
    }
}
