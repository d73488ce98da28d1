// fault_tests.h: what interrupted runs and bad numbers must come to, through the built ./train_nsa: an end within
// seconds with one line that says why when a rank dies, stalls, differs or meets bad data, and a run that can go on.
#pragma once
#include <thread>

#include "../../../lib/base/signals.h"
#include "../../../lib/run/training_data.h"
#include "program.h"

// ---------------------------------------------------------------------------------------------------------------------
// Failures of ranks.

RANKS_TEST(ranks_that_differ_are_found_at_the_start) {
    write_small_corpus(folder, "a.bin", 1), write_small_corpus(folder, "b.bin", 2);
    const auto found = [&](const std::string& first, const std::string& second, const char* what) {
        const std::string run_of_ranks = "small --batch=1 ";
        const Result r = execute(two_ranks(mpirun, started(run_of_ranks + first), started(run_of_ranks + second)));
        CHECK(r.status != 0 && r.status != 1000 && r.seconds < 20);
        CHECK(holds(r.err, "rank 1 on " + host_name() + " has '", what));
        size_t own_lines = 0;  // MPI adds its own
        for (const std::string& line : lines_of(r.err)) own_lines += line.compare(0, 9, "train_nsa") == 0;
        CHECK_EQUAL(own_lines, 1u);
        CHECK(!file_exists(out + "/main.log"));
    };
    found("", "--lr=0.002", "\"lr\": 0.002");
    found("", "--seed=5", "\"seed\": 5");
    found("--data=@/a.bin", "--data=@/b.bin", "data");
}

// Two hosts may have other weights, or another text, under one path.
RANKS_TEST(ranks_with_other_files_are_found_at_the_start) {
    for (const std::string host : {"one", "two"}) {
        make_folders(file(host));
        write(host + "/a.txt", "what stands on host " + host + " and nowhere else");
        REQUIRE_GOOD(run("small --steps=1 --out=@/" + host + "/begin --seed=" + (host == "one" ? "1" : "2")));
    }
    const auto found = [&](const std::string& command, const std::string& what) {
        const auto on = [&](const char* host) { return joined({"-wdir", file(host)}, started(command)); };
        const Result r = execute(two_ranks(mpirun, on("one"), on("two")));
        CHECK(r.status != 0 && r.status != 1000 && r.seconds < 20);
        CHECK(holds(r.err, "rank 1 on " + host_name() + " has '" + what));
    };
    found("small --batch=1 --init-from=begin", "weights: ");
    found("eval --from begin --val-data synthetic", "weights: ");
    found("eval --from @/one/begin --text a.txt", "validation data: ");
    for (const char* host : {"one", "two"}) std::filesystem::remove(file(host) + "/begin/step_00000001/manifest.json");
    found("eval --from begin/step_00000001 --text @/one/a.txt", "weights: ");
}

// kill -9 in the middle of training; SIGSTOP, which no process can report itself: named, and all end.
RANKS_TEST_LONG(ranks_that_die_or_stall_end_the_run) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
        const std::string out = file(format_text("run%d", signal));
        Running program(started("small --batch=1 --steps=1000000 --eval-every=0 --stall-timeout=3 --out=" + out, 2),
                        folder);
        REQUIRE(program.reaches("step 0060 | loss"));
        const pid_t victim = program.process_of(out + "/heartbeat_rank1.jsonl");
        std::string name;  // that pkill and top know
        std::getline(std::ifstream(format_text("/proc/%d/comm", int(victim))), name);
        CHECK_EQUAL(name, std::string("train_nsa"));
        kill(victim, signal);
        const Result r = program.end(20);
        kill(victim, SIGKILL);
        CHECK(r.status != 0 && r.status != 1000);
        if (signal == SIGSTOP) CHECK(holds(r.err, "for the other ranks at step ", "rank 1 has not come as far"));
        // Of a killed rank mpirun itself may be the first to know, and it ends the
        // others before their line is out: launch_tests.h and ddp_tests.h check that line.
    }
}

// The same of eval, whose ranks keep no heartbeats: each has a copy of the run, by which its process is found.
RANKS_TEST(a_rank_of_eval_that_stops_ends_all) {
    write("a.bin", shard(random_tokens(2000000, 1, 64)));
    REQUIRE_GOOD(run("small"));
    copy_folder(out, file("copy"));
    const std::string eval = "eval --val-data @/a.bin --stall-timeout 2 --from @/";
    Running program(two_ranks(mpirun, started(eval + "run"), started(eval + "copy")), folder);
    pid_t victim = 0;
    for (const double limit = seconds_now() + 30; !victim && seconds_now() < limit; usleep(10000))
        error_of([&] { victim = program.process_of(newest_checkpoint(file("copy")).folder + "/model.safetensors"); });
    REQUIRE(victim > 0);
    usleep(500000);  // the ranks have compared what they measure, and are at it
    kill(victim, SIGSTOP);
    const Result r = program.end(30);
    kill(victim, SIGKILL);
    CHECK(r.status != 0 && r.status != 1000);
    const std::string rank = "rank 0 on " + host_name();
    CHECK(holds(r.err, rank + ", CPU has waited") || holds(r.err, rank + " has waited"));  // before it has a device
}

// A disk that takes longer over an fsync than --stall-timeout ends no run: not by rank 0, which writes, nor by rank 1,
// which waits for it.
RANKS_TEST(a_slow_fsync_is_no_stall) {
    const std::string shim = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "faults.so";
    if (!file_exists(shim)) return skip(shim + ", which make test builds");
    // The second fsync of a checkpoint is one of rank 0 alone.
    const Start start{
        {"LD_PRELOAD=" + shim, "FAULT=slow_fsync:2:3", "FAULT_FOLDER=" + out, "FAULT_LOG=" + file("events")}};
    const Result r = execute(started("small --batch=1 --steps=4 --save-every=2 --stall-timeout=1", 2), start);
    REQUIRE_GOOD(r);
    CHECK(r.seconds > 3 && read_file(file("events")).find("slow_fsync") == 0);
    CHECK(holds(r.out, "step 0004 | loss") && file_exists(out + "/step_00000004/manifest.json"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Being asked to stop.

PROGRAM_TEST(stop_by_signal_and_by_halt_file) {
    const std::string endless = "small --steps=100000 --eval-every=0 --schedule=constant --out=";
    struct {
        int signal;
        int status;
    } const cases[] = {{SIGTERM, 75}, {SIGUSR1, 75}, {SIGXCPU, 75}, {SIGINT, 130}, {0, 0}};
    for (const auto& c : cases) {
        const std::string out = file("run" + std::to_string(c.signal));
        Running program(started(endless + out), folder);
        REQUIRE(program.reaches("step 0003 | loss"));
        if (c.signal) kill(program.launcher, c.signal);
        else write_file(out + "/halt", "");
        const Result r = program.end(20);
        CHECK_EQUAL(r.status, c.status);
        CHECK(r.err.empty() && holds(r.out, "--resume goes on") && !file_exists(out + "/halt"));
        const std::string checkpoint = newest_checkpoint(out).folder;
        REQUIRE(!checkpoint.empty());
        const int64_t step = read_manifest(checkpoint).step;
        CHECK(step >= 3 && logged(out, "loss").size() == size_t(step));
        if (c.signal != SIGTERM) continue;
        // Resumed, it is the run that nobody stopped.
        const std::string later = " --steps=" + std::to_string(step + 2);
        write_file(out + "/halt", "");  // too late for a run that is done, and not meant for the next start
        REQUIRE_GOOD(run("--resume " + out + " --steps=" + std::to_string(step)));
        REQUIRE_GOOD(run("--resume " + out + later));
        REQUIRE_GOOD(run(endless + "@/whole" + later));
        CHECK_EQUAL(lines_of(losses_of(file("whole"))).back(), lines_of(losses_of(out)).back());
        CHECK(weights_of(file("whole"), step + 2) == weights_of(out, step + 2));
    }
}

// A run whose steps take seconds, each of a thousand micro-steps; there is nothing to validate with.
inline std::string slow_run(const TempFolder& folder) {
    write_file(folder.file("train.bin"), program::shard(program::random_tokens((2 << 20) + 1, 1)));
    return "small --steps=100 --batch=1 --data=@/train.bin --seq-len=2048 --total-batch=";
}

// The same wish several times: timeout signals its child and then the group, mpirun and shells forward what all have.
PROGRAM_TEST(stop_repeated_within_seconds_is_one_wish) {
    const Words slow = started(slow_run(folder) + "32768");
    struct {
        std::vector<int> signals;
        useconds_t pause;
        int status;
    } const cases[] = {{{SIGTERM, SIGTERM}, 0, 75},
                       {{SIGTERM, SIGTERM, SIGTERM, SIGTERM}, 200000, 75},
                       {{SIGINT, SIGTERM, SIGUSR1}, 1000, 130},  // of waiting signals the lowest comes first
                       {{SIGUSR1, SIGTERM, SIGUSR1, SIGINT}, 300000, 75}};
    for (const auto& c : cases) {
        Running program(slow, folder);
        REQUIRE(program.reaches("out: "));
        usleep(300000);
        for (const int signal : c.signals) kill(program.launcher, signal), usleep(c.pause);
        const Result r = program.end(30);
        CHECK_EQUAL(r.status, c.status);
        CHECK_EQUAL(r.err, std::string());
        CHECK(!newest_checkpoint(out).folder.empty());
        remove_tree(out);
    }
    if (!file_exists("/usr/bin/timeout")) return;
    Running program(joined({"/usr/bin/timeout", "1.5"}, slow), folder);
    CHECK_EQUAL(program.end(30).status, 124);
    CHECK(!newest_checkpoint(out).folder.empty());
}

// SIGHUP at the very start, while libraries are loaded that would catch it (UCX does), is not lost.
PROGRAM_TEST(stop_by_hangup_at_the_start) {
    if (is_ignored(SIGHUP)) return;  // by nohup, and then the program ignores it too
    signal(SIGHUP, SIG_DFL);  // UCX, where MPI has loaded it into the tests, would catch it between fork and exec
    for (const useconds_t pause : {0, 2000, 5000, 10000, 15000, 20000, 30000, 50000, 100000}) {
        Running program(started(format_text("small --steps=1000000 --out=@/run%u", pause)), folder);
        usleep(pause);
        kill(program.launcher, SIGHUP);
        const int status = program.end(20).status;
        CHECK(status == 75 || status == 128 + SIGHUP);
    }
}

// The first signal waits for a step that takes minutes; one after a pause does not.
PROGRAM_TEST(stop_second_signal_after_a_pause_leaves_at_once) {
    Running program(started(slow_run(folder) + "2097152"), folder);
    REQUIRE(program.reaches("out: "));
    usleep(500000);
    kill(program.launcher, SIGTERM);
    usleep(useconds_t((SAME_WISH + 0.3) * 1e6));
    kill(program.launcher, SIGTERM);
    const Result r = program.end(5);
    CHECK_EQUAL(r.status, 128 + SIGTERM);
    CHECK(holds(r.out, "SIGTERM") && holds(r.err, "SIGTERM"));
    CHECK(newest_checkpoint(out).folder.empty());
}

// Process 1 of a container, whom the kernel spares what others die of.
PROGRAM_TEST(stop_of_process_1_of_a_container) {
    const Words container = {"/usr/bin/unshare", "--pid", "--fork"};
    if (!file_exists(container[0]) || execute(joined(container, {"/bin/true"})).status != 0)
        return skip("stop_of_process_1_of_a_container: no unshare --pid here");
    int input[2];
    if (pipe2(input, O_CLOEXEC) != 0) fail("no pipe");
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int signal : {SIGTERM, SIGINT}) {
        const pid_t outside = spawn(joined(container, started("tokenize --in=- --out=@/a --tokenizer=bytes")), {},
                                    {input[0], null, null});
        usleep(1500000);  // it waits for text
        pid_t first = 0;
        std::ifstream(format_text("/proc/%d/task/%d/children", outside, outside)) >> first;
        if (first > 0) kill(first, signal);
        int status = 0;
        for (int i = 0; i < 200 && waitpid(outside, &status, WNOHANG) == 0; i++) usleep(20000);
        kill(-outside, SIGKILL);
        CHECK(first > 0);
        CHECK_EQUAL(exit_status(status), 128 + signal);
    }
    for (const int file : {input[0], input[1], null}) close(file);
}

// A terminal that takes no output (Ctrl-S), or a pipe that nobody reads (| less), is no stall: the run goes on and
// saves.
PROGRAM_TEST(stop_while_nobody_reads_what_is_printed) {
    for (const bool terminal : {true, false}) {
        const std::string out = file(terminal ? "terminal" : "pipe"), heartbeat = out + "/heartbeat_rank0.jsonl";
        int ends[2];
        if (terminal) open_terminal(ends, 80);
        else if (pipe2(ends, O_CLOEXEC) != 0) fail("no pipe");
        const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
        const Words words =
            started("small --steps=1000000 --eval-every=0 --schedule=constant --stall-timeout=2 --out=" + out);
        const pid_t child = spawn(words, {}, {null, ends[1], ends[1]});
        close(ends[1]), close(null);
        const auto step = [&] {
            const std::string line = file_exists(heartbeat) ? last_line(heartbeat) : "";
            return line.empty() ? 0 : parse_json(line, heartbeat).integer("step", heartbeat);
        };
        int status = 0;
        const double limit = seconds_now() + 60;
        while (step() < 900 && seconds_now() < limit && waitpid(child, &status, WNOHANG) == 0) usleep(50000);
        CHECK(step() >= 900);  // 90 kB of lines
        kill(child, SIGTERM);
        while (waitpid(child, &status, WNOHANG) == 0 && seconds_now() < limit) usleep(20000);
        kill(child, SIGKILL);
        CHECK_EQUAL(exit_status(status), 75);
        CHECK(!newest_checkpoint(out).folder.empty());
        close(ends[0]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints of a run that goes on.

PROGRAM_TEST(checkpoints_fall_back_to_the_newest_intact) {
    const std::string steps = "small --steps=9 --save-every=3 --schedule=constant", again = steps + " --resume=on";
    REQUIRE_GOOD(run(steps));
    const std::string log = losses_of(out), model = weights_of(out, 9);
    std::string damaged = model;
    damaged[damaged.size() / 2] ^= 1;
    write("run/step_00000009/model.safetensors", damaged);
    std::filesystem::remove(out + "/step_00000006/manifest.json");
    const Result r = run(again);
    CHECK_EQUAL(r.status, 0);
    CHECK(holds(r.err, "step_00000009 is damaged: ", "checksum", "step_00000006 is damaged: "));
    CHECK(holds(r.out, "step_00000003, step 3\n"));
    CHECK(losses_of(out) == log && weights_of(out, 9) == model);
    // None is intact: that is no reason to begin again over it.
    for (const char* step : {"3", "6", "9"}) std::filesystem::remove(out + "/step_0000000" + step + "/config.json");
    const Result none = run(again);
    CHECK_REFUSED(none, 1, "no checkpoint under " + out + " is intact", "step_00000009", "config.json",
                  "without --resume");
    CHECK(!holds(none.err, "taking the one before"));
    CHECK(weights_of(out, 9) == model);
}

PROGRAM_TEST(checkpoints_kept_and_removed) {
    REQUIRE_GOOD(run("small --steps=11 --save-every=1 --keep=2 --keep-every=4"));
    CHECK(checkpoint_steps(out) == (std::vector<int64_t>{11, 10, 8, 4}));
}

// A folder that is gone, or is another by now, is not written to, and the end claims no success.
PROGRAM_TEST(run_whose_folder_is_removed_ends_with_an_error) {
    for (const std::string fate : {"moved", "replaced"}) {
        const std::string out = file(fate);
        std::thread other([&] {
            while (!file_exists(out + "/main.log") || !holds(losses_of(out), "s:20 ")) usleep(1000);
            rename_path(out, out + ".1");
            if (fate == "replaced") make_folders(out);
        });
        const Result r = run("small --steps=1510 --eval-every=0 --out=" + out);
        other.join();
        CHECK_REFUSED(r, 1, "--out " + out + " was removed or moved");
        CHECK_EQUAL(file_exists(out), fate == "replaced");
        CHECK(glob_files(out + "/*").empty());
    }
}

// A disk that is full for a while: the checkpoints of that time fail, training goes on, and the log says so.
PROGRAM_TEST(checkpoints_that_fail_do_not_stop_the_run) {
    REQUIRE_GOOD(run("small --steps=1 --schedule=constant"));
    Start full;  // the weights fit, the moments, twice as large, do not
    full.largest_file = file_size(out + "/step_00000001/model.safetensors") + 4096;
    const Result r = run("small --steps=4 --save-every=1 --schedule=constant --resume=on", full);
    CHECK_EQUAL(r.status, 1);  // because the last one failed too
    CHECK(holds(r.err, "checkpoint of step 2 failed", "checkpoint of step 3 failed", "training goes on",
                "the last checkpoint could not be written", "File too large", "step_00000001"));
    CHECK_EQUAL(logged(out, "loss").size(), 4u);
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 1u);
}

// ---------------------------------------------------------------------------------------------------------------------
// Bad numbers.

// One weight is infinite: every step from there on is bad, whoever computes it.
PROGRAM_TEST(bad_numbers_end_the_run_with_the_batch_on_disk) {
    REQUIRE_GOOD(run("small --save-every=1 --init=random"));
    std::string bytes = weights_of(out, 2);
    const float infinity = std::numeric_limits<float>::infinity();
    std::memcpy(&bytes[bytes.size() - 4], &infinity, 4);
    write("run/step_00000002/model.safetensors", bytes);
    seal(out + "/step_00000002");
    const Result bad = run("small --steps=9 --resume=on --init=random --batch=1");
    CHECK_EQUAL(bad.status, 1);
    CHECK_EQUAL(lines_of(bad.err).size(), 5u);
    CHECK(holds(bad.err, "step 3: ", "no checkpoint at step 3", "step 4: ", "first tensor: gradient of ", "3 in a row",
                "step_00000002"));
    CHECK(!file_exists(out + "/step_00000003"));  // --save-every 1 is inherited
    const std::string dumped = out + "/bad_step_00000003_rank0.json";
    const Json dump = parse_json(read_file(dumped), dumped);
    CHECK_EQUAL(dump.integer("step", dumped), int64_t(3));
    // The batch is that of the step: two samples of 64 tokens, numbers 4 and 5 of the shuffled corpus.
    const std::vector<Json>& rows = dump.array("tokens", dumped);
    REQUIRE(rows.size() == 2);
    Config c = parse_and_preset({"--seq-len", "64"});
    World world;
    DataLoader loader({synthetic_source(uint64_t(c.seed), SYNTHETIC_TOKENS, 0)},
                      loader_options(c, world, "--data", true));
    std::vector<int32_t> inputs(6 * 64), targets(6 * 64);
    loader.next_batch(inputs.data(), targets.data(), 6);
    for (size_t i = 0; i < 2; i++) {
        REQUIRE(rows[i].items.size() == 64);
        for (size_t t = 0; t < 64; t++) CHECK_EQUAL(rows[i].items[t].integer_value, int64_t(inputs[(4 + i) * 64 + t]));
    }
}
