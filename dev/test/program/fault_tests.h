// fault_tests.h: what several ranks, interrupted runs and bad numbers must come to, through the built ./train_nsa: the
// same curve however a batch is divided, the same bits where they are promised, checkpoints that any number of ranks
// resumes, and an end within seconds, with one line that says why, when a rank dies, stalls, differs or meets bad data.
#pragma once
#include <thread>

#include "program.h"

namespace program {

// Four layers, so that several small buckets exist and are ready one after the other.
inline Options ranks_options(const Options& more) {
    return merged({{"layers", "4"},
                   {"total-batch", "512"},
                   {"batch", "1"},
                   {"slc-count", "8"},
                   {"lr", "0.001"},
                   {"steps", "8"},
                   {"eval-every", "4"},
                   {"eval-batches", "2"},
                   {"bucket-mb", "0.04"},
                   {"threads", "1"}},
                  more);
}

// The same for some steps at a constant learning rate, so that another run can go on from them.
inline Options part_of_run(const std::string& out, const char* steps, const Options& more) {
    return merged(ranks_options({{"schedule", "constant"}, {"out", out}, {"steps", steps}}), more);
}

// How far losses of ranks_options() may be apart on other numbers of ranks: the limit that
// run_ranks_and_accumulation_give_one_loss_curve derives, for this model. 8 steps of 1e-3, N = 512 terms, P = 4 x 3.6 k
// + 4 k parameters, and |g| <= 1.5.
static const double RANKS_PARAMETERS = 19000;
static const double RANKS_LIMIT = 8 * 1e-3 * std::sqrt(RANKS_PARAMETERS) * std::ldexp(512.0, -24) * 1.5 + 2e-6;

inline std::string losses_of(const std::string& run_folder) { return read_file(run_folder + "/main.log"); }

// A program under mpirun that this test can disturb while it runs.
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
            if (file_exists(out_file) && read_file(out_file).find(words) != std::string::npos) return true;
        return false;
    }
    // The process of this rank, by the file it keeps open.
    pid_t process_of(const std::string& heartbeat) const {
        for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
            const std::string name = entry.path().filename();
            if (name.find_first_not_of("0123456789") != std::string::npos) continue;
            std::error_code error;
            for (const auto& fd : std::filesystem::directory_iterator(entry.path() / "fd", error))
                if (std::filesystem::read_symlink(fd.path(), error) == heartbeat) return pid_t(std::stol(name));
        }
        fail("no process keeps %s open", heartbeat.c_str());
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

// ---------------------------------------------------------------------------------------------------------------------
// Exactness.

// No sum depends on which thread or rank was first: the same number of ranks gives the same weights and the same log,
// to the last bit, with any number of threads.
TEST(ranks_give_the_same_bits_every_time) {
    using namespace program;
    TempFolder folder;
    const std::string mpirun = find_mpirun("the same run twice on 2 ranks");
    const auto with = [&](const char* out, const char* threads) {
        return ranks_options({{"out", folder.file(out)}, {"threads", threads}});
    };
    REQUIRE_GOOD(train(with("one", "1")));
    REQUIRE_GOOD(train(with("one_again", "2")));
    std::vector<std::string> names = {"one"};
    if (!mpirun.empty()) {
        CHECK_EQUAL(train_on_ranks(mpirun, 2, with("two", "1")).status, 0);
        CHECK_EQUAL(train_on_ranks(mpirun, 2, with("two_again", "2")).status, 0);
        names.push_back("two");
    }
    for (const std::string& name : names) {
        CHECK(read_file(folder.file(name + "/step_00000008/model.safetensors")) ==
              read_file(folder.file(name + "_again/step_00000008/model.safetensors")));
        CHECK_EQUAL(losses_of(folder.file(name)), losses_of(folder.file(name + "_again")));
    }
}

// On other numbers of ranks the curve is the same to rounding: buckets, bf16 on the way, sharded state. With bf16 each
// of the gradients is rounded to 2^-9 of itself on each of log2(4) + 1 additions: steps * lr * |e|_1 <= 8 * 1e-3 * 3 *
// 2^-9 * sqrt(P) |g|.
TEST(ranks_buckets_zero_and_bf16_give_one_curve) {
    using namespace program;
    TempFolder folder;
    const std::string mpirun = find_mpirun("2 and 4 ranks");
    const double limit = RANKS_LIMIT,
                 bf16_limit = 8 * 1e-3 * 3 * std::ldexp(1.0, -9) * std::sqrt(RANKS_PARAMETERS) * 1.5;
    REQUIRE_GOOD(train(ranks_options({{"out", folder.file("one")}, {"batch", "8"}})));
    const std::vector<double> expected = logged(folder.file("one"), "loss"),
                              expected_val = logged(folder.file("one"), "val_loss"),
                              norm = logged(folder.file("one"), "grad_norm");
    REQUIRE(expected.size() == 8 && expected_val.size() == 3);
    struct {
        const char* name;
        int ranks;
        Options more;
        double limit;
    } const cases[] = {{"two", 2, {}, limit},
                       {"two_accumulated", 2, {{"batch", "2"}}, limit},
                       {"four", 4, {{"batch", "2"}}, limit},
                       {"four_one_bucket", 4, {{"bucket-mb", "25"}}, limit},
                       {"zero", 4, {{"zero", "1"}}, limit},
                       {"bf16", 4, {{"grad-reduce", "bf16"}}, bf16_limit},
                       {"bf16_zero", 2, {{"grad-reduce", "bf16"}, {"zero", "1"}}, bf16_limit},
                       // three ranks cannot share the batch of the others: the run itself is the test
                       {"three_zero", 3, {{"zero", "1"}, {"total-batch", "576"}}, 1e9}};
    for (const auto& c : cases) {
        Options options = merged(ranks_options({{"out", folder.file(c.name)}}), c.more);
        if (mpirun.empty()) continue;
        const Result r = train_on_ranks(mpirun, c.ranks, options);
        CHECK_EQUAL(r.status, 0);
        CHECK(r.out.find("gradients travel by MPI") != std::string::npos &&
              r.out.find("ms exposed") != std::string::npos);
        const std::vector<double> loss = logged(folder.file(c.name), "loss"),
                                  val = logged(folder.file(c.name), "val_loss");
        REQUIRE(loss.size() == 8 && val.size() == 3);
        if (c.limit > 1) continue;
        for (size_t i = 0; i < 8; i++) CHECK_NEAR(loss[i], expected[i], c.limit);
        for (size_t i = 0; i < 3; i++) CHECK_NEAR(val[i], expected_val[i], c.limit);
        CHECK(logged(folder.file(c.name), "epoch") == logged(folder.file("one"), "epoch"));
    }
    if (mpirun.empty()) return;
    // Sharded state is the same numbers as state everywhere: with the same ranks and buckets, the same bits (2 ranks: a
    // + b has one order).
    REQUIRE(train_on_ranks(mpirun, 2, ranks_options({{"out", folder.file("two_zero")}, {"zero", "1"}})).status == 0);
    CHECK_EQUAL(losses_of(folder.file("two_zero")), losses_of(folder.file("two")));
    CHECK(read_file(folder.file("two_zero/step_00000008/model.safetensors")) ==
          read_file(folder.file("two/step_00000008/model.safetensors")));
    // An untied head is reduced first, before the layers' backward pass.
    const Options changed = {{"smear", "on"}, {"head", "untied"}};
    REQUIRE_GOOD(train(merged(ranks_options({{"out", folder.file("one_changed")}}), changed)));
    const Options shared = merged(changed, {{"zero", "1"}, {"out", folder.file("two_changed")}});
    CHECK_EQUAL(train_on_ranks(mpirun, 2, merged(ranks_options({}), shared)).status, 0);
    const std::vector<double> of_one = logged(folder.file("one_changed"), "loss"),
                              of_two = logged(folder.file("two_changed"), "loss");
    REQUIRE(of_one.size() == 8 && of_two.size() == 8);
    for (size_t i = 0; i < 8; i++) CHECK_NEAR(of_two[i], of_one[i], limit);
    // What travels as bf16 is not what travels as fp32.
    CHECK(losses_of(folder.file("bf16")) != losses_of(folder.file("four")));
}

// With Muon, every rank updates every matrix or, with --zero 1, its share of them: the same bits on the same number of
// ranks, resumed or not, and to rounding on others. RANKS_LIMIT holds here too: only a gradient's direction counts, as
// for AdamW.
TEST(ranks_agree_with_muon) {
    using namespace program;
    TempFolder folder;
    const std::string mpirun = find_mpirun("--optimizer muon on 1, 2 and 3 ranks");
    if (mpirun.empty()) return;
    const auto on = [&](int ranks, const char* out, const char* steps, const Options& more) {
        return train_on_ranks(mpirun, ranks,
                              part_of_run(folder.file(out), steps, merged({{"optimizer", "muon"}}, more)));
    };
    const auto weights = [&](const char* out) {
        return read_file(folder.file(out) + "/step_00000008/model.safetensors");
    };
    const Options zero = {{"zero", "1"}}, resume = {{"resume", "on"}, {"zero", "0"}},
                  resume_zero = {{"resume", "on"}, {"zero", "1"}}, thirds = {{"total-batch", "576"}};
    REQUIRE_GOOD(on(1, "one", "8", {}));
    REQUIRE_GOOD(on(2, "two", "8", {}));
    REQUIRE_GOOD(on(2, "two_zero", "8", zero));
    REQUIRE_GOOD(on(3, "three", "8", thirds));
    REQUIRE_GOOD(on(3, "three_zero", "8", merged(thirds, zero)));
    REQUIRE_GOOD(on(2, "parts", "3", {}));
    REQUIRE_GOOD(on(2, "parts", "5", resume_zero));
    REQUIRE_GOOD(on(2, "parts", "8", resume));
    REQUIRE_GOOD(on(2, "others", "3", zero));
    REQUIRE_GOOD(on(1, "others", "5", resume));
    REQUIRE_GOOD(on(2, "others", "8", resume_zero));
    for (const char* same : {"two_zero", "parts"}) CHECK(weights(same) == weights("two"));
    CHECK(weights("three_zero") == weights("three"));
    const std::vector<double> loss = logged(folder.file("one"), "loss");
    REQUIRE(loss.size() == 8);
    for (const char* run : {"two", "others"})
        for (size_t i = 0; i < 8; i++) CHECK_NEAR(logged(folder.file(run), "loss")[i], loss[i], RANKS_LIMIT);
    REQUIRE_GOOD(train(part_of_run(folder.file("adamw"), "8", {})));
    CHECK(std::fabs(logged(folder.file("adamw"), "loss")[7] - loss[7]) > 10 * RANKS_LIMIT);
}

// A checkpoint of N ranks at any --zero is continued by M ranks at any other: with as many ranks as before it is the
// run that was never interrupted, bit for bit (a + b has one order), and to rounding with others.
TEST(ranks_resume_on_another_number_of_ranks) {
    using namespace program;
    TempFolder folder;
    const std::string mpirun = find_mpirun("resuming on another number of ranks");
    if (mpirun.empty()) return;
    const auto on = [&](int ranks, const std::string& out, const char* steps, const Options& more) {
        return train_on_ranks(mpirun, ranks, part_of_run(folder.file(out), steps, more));
    };
    REQUIRE_GOOD(on(2, "whole", "8", {}));
    const std::string parts = "parts", others = "others";
    REQUIRE_GOOD(on(2, parts, "2", {{"zero", "1"}}));
    CHECK(file_exists(folder.file("parts/step_00000002/optimizer_00001-of-00002.safetensors")));
    REQUIRE_GOOD(on(2, parts, "6", {{"zero", "0"}, {"resume", "on"}, {"bucket-mb", "0.1"}, {"recompute", "2"}}));
    const Result last = on(2, parts, "8", {{"zero", "1"}, {"resume", "on"}, {"bucket-mb", "25"}, {"recompute", "0"}});
    REQUIRE_GOOD(last);
    CHECK(last.out.find("resume: --zero is 1, was 0") != std::string::npos &&
          last.out.find("resume: --recompute is 0, was 2") != std::string::npos);
    CHECK(read_file(folder.file("parts/step_00000008/model.safetensors")) ==
          read_file(folder.file("whole/step_00000008/model.safetensors")));
    REQUIRE_GOOD(on(4, others, "2", {{"zero", "1"}}));
    REQUIRE_GOOD(on(1, others, "5", {{"resume", "on"}}));
    REQUIRE_GOOD(on(2, others, "8", {{"zero", "1"}, {"resume", "on"}}));
    const std::vector<double> loss = logged(folder.file("whole"), "loss"),
                              loss_of_others = logged(folder.file(others), "loss");
    CHECK(logged(folder.file("parts"), "loss") == loss);
    REQUIRE(loss.size() == 8 && loss_of_others.size() == 8);
    for (size_t i = 0; i < 8; i++) CHECK_NEAR(loss_of_others[i], loss[i], RANKS_LIMIT);
    for (const std::string& run : {parts, others})
        CHECK(logged(folder.file(run), "epoch") == logged(folder.file("whole"), "epoch"));
    // The moments of the shards, put together, are those of ranks that had all of them.
    const auto together = [&](const std::string& checkpoint) {
        std::map<std::string, std::vector<float>> moments;
        for (const FileRecord& file : read_manifest(checkpoint).files) {
            if (file.name.find("optimizer") != 0) continue;
            const SafeTensors pieces(checkpoint + "/" + file.name);
            for (const TensorView& t : pieces.tensors) {
                size_t first = 0, end = 0;
                const size_t bracket = t.name.find('[');
                REQUIRE(std::sscanf(t.name.c_str() + bracket, "[%zu:%zu]", &first, &end) == 2 &&
                        t.bytes == (end - first) * 4);
                std::vector<float>& whole = moments[t.name.substr(0, bracket)];
                if (whole.size() < end) whole.resize(end, std::numeric_limits<float>::quiet_NaN());
                std::memcpy(&whole[first], t.data, t.bytes);
            }
        }
        return moments;
    };
    const auto whole = together(folder.file("whole/step_00000008")),
               shards = together(folder.file("parts/step_00000008"));
    const SafeTensors weights(folder.file("whole/step_00000008/model.safetensors"));
    CHECK_EQUAL(whole.size(), 2 * weights.tensors.size());
    CHECK(whole == shards);  // and no NaN, which is equal to nothing
}

// ---------------------------------------------------------------------------------------------------------------------
// Failures of ranks.

TEST(ranks_that_differ_are_found_at_the_start) {
    using namespace program;
    const std::string mpirun = find_mpirun("ranks with different options under mpirun");
    if (mpirun.empty()) return;
    TempFolder folder;
    const std::string out = folder.file("run");
    const auto found = [&](const Options& first, const Options& second, const char* what) {
        Words words = {mpirun};
        for (const Options* more : {&first, &second}) {
            Options options = merged(ranks_options({{"out", out}}), *more);
            if (more == &second) words.push_back(":");
            words = joined(joined(words, {"-np", "1", path()}), small_words(options));
        }
        const Result r = execute(words);
        CHECK(r.status != 0 && r.status != 1000 && r.seconds < 20);
        CHECK(r.err.find("rank 1 on " + host_name() + " has '") != std::string::npos &&
              r.err.find(what) != std::string::npos);
        size_t own_lines = 0;  // MPI adds its own
        for (const std::string& line : lines_of(r.err)) own_lines += line.compare(0, 9, "train_nsa") == 0;
        CHECK_EQUAL(own_lines, 1u);
        CHECK(!file_exists(out + "/main.log"));
    };
    found({}, {{"lr", "0.002"}}, "\"lr\": 0.002");
    found({}, {{"seed", "5"}}, "\"seed\": 5");
    write_file(folder.file("a.bin"), shard(random_tokens(64 * 40 + 1, 1)));
    write_file(folder.file("b.bin"), shard(random_tokens(64 * 40 + 1, 2)));
    found({{"data", folder.file("a.bin")}}, {{"data", folder.file("b.bin")}}, "data");
}

// kill -9 in the middle of training; SIGSTOP, which no process can report itself: named, and all end.
TEST_LONG(ranks_that_die_or_stall_end_the_run) {
    using namespace program;
    const std::string mpirun = find_mpirun("ranks that die or stall");
    if (mpirun.empty()) return;
    for (const int signal : {SIGKILL, SIGSTOP}) {
        TempFolder folder;
        const std::string out = folder.file("run");
        Running program(joined({mpirun, "-np", "2", path()},
                               small_words(ranks_options(
                                   {{"out", out}, {"steps", "1000000"}, {"eval-every", "0"}, {"stall-timeout", "3"}}))),
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
        if (signal == SIGSTOP)
            CHECK(r.err.find("for the other ranks at step ") != std::string::npos &&
                  r.err.find("rank 1 has not come as far") != std::string::npos);
        // Of a killed rank mpirun itself may be the first to know, and it ends the
        // others before their line is out: launch_tests.h and ddp_tests.h check that line.
    }
}

// A disk that takes longer over an fsync than --stall-timeout ends no run: not by rank 0, which writes, nor by rank 1,
// which waits for it.
TEST(a_slow_fsync_is_no_stall) {
    using namespace program;
    const std::string mpirun = find_mpirun("a slow disk under mpirun");
    const std::string shim = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "faults.so";
    if (!file_exists(shim)) skip(shim + ", which make test builds");
    if (mpirun.empty() || !file_exists(shim)) return;
    TempFolder folder;
    const std::string out = folder.file("run"), log = folder.file("events");
    Start start;
    // The second fsync of a checkpoint is one of rank 0 alone.
    start.environment = {"LD_PRELOAD=" + shim, "FAULT=slow_fsync:2:3", "FAULT_FOLDER=" + out, "FAULT_LOG=" + log};
    const Options options = {{"out", out}, {"steps", "4"}, {"save-every", "2"}, {"stall-timeout", "1"}};
    const Result r = execute(joined({mpirun, "-np", "2", path()}, small_words(ranks_options(options))), start);
    REQUIRE_GOOD(r);
    CHECK(r.seconds > 3 && file_exists(log) && read_file(log).find("slow_fsync") == 0);
    CHECK(r.out.find("step 0004 | loss") != std::string::npos && file_exists(out + "/step_00000004/manifest.json"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Being asked to stop.

TEST(stop_by_signal_and_by_halt_file) {
    using namespace program;
    TempFolder folder;
    const Options endless = {{"steps", "100000"}, {"eval-every", "0"}, {"schedule", "constant"}, {"threads", "1"}};
    struct {
        int signal;
        int status;
    } const cases[] = {{SIGTERM, 75}, {SIGUSR1, 75}, {SIGINT, 130}, {0, 0}};
    for (const auto& c : cases) {
        const std::string out = folder.file("run" + std::to_string(c.signal));
        Options options = endless;
        options["out"] = out;
        Running program(joined({path()}, small_words(options)), folder);
        REQUIRE(program.reaches("step 0003 | loss"));
        if (c.signal) kill(program.launcher, c.signal);
        else write_file(out + "/halt", "");
        const Result r = program.end(20);
        CHECK_EQUAL(r.status, c.status);
        CHECK(r.err.empty() && r.out.find("--resume goes on") != std::string::npos && !file_exists(out + "/halt"));
        const std::string checkpoint = newest_checkpoint(out);
        REQUIRE(!checkpoint.empty());
        const int64_t step = read_manifest(checkpoint).step;
        CHECK(step >= 3 && logged(out, "loss").size() == size_t(step));
        if (c.signal != SIGTERM) continue;
        // Resumed, it is the run that nobody stopped.
        options["steps"] = std::to_string(step + 2), options["resume"] = "on";
        REQUIRE_GOOD(train(options));
        options["resume"] = "off", options["out"] = folder.file("whole");
        REQUIRE_GOOD(train(options));
        CHECK_EQUAL(lines_of(losses_of(folder.file("whole"))).back(), lines_of(losses_of(out)).back());
        const std::string last = format_text("/step_%08lld/model.safetensors", (long long)step + 2);
        CHECK(read_file(folder.file("whole") + last) == read_file(out + last));
    }
}

TEST(stop_of_one_rank_stops_all) {
    using namespace program;
    const std::string mpirun = find_mpirun("a signal to one of 2 ranks");
    if (mpirun.empty()) return;
    TempFolder folder;
    const std::string out = folder.file("run");
    Running program(joined({mpirun, "-np", "2", path()},
                           small_words(ranks_options({{"out", out}, {"steps", "100000"}, {"eval-every", "0"}}))),
                    folder);
    REQUIRE(program.reaches("step 0003 | loss"));
    kill(program.process_of(out + "/heartbeat_rank1.jsonl"), SIGTERM);
    const Result r = program.end(20);
    CHECK_EQUAL(r.status, 75);
    CHECK(!newest_checkpoint(out).empty());
}

// A run whose steps take seconds, each of a thousand micro-steps.
inline program::Words slow_run(const TempFolder& folder, const char* total_batch) {
    using namespace program;
    write_file(folder.file("train.bin"), shard(random_tokens((2 << 20) + 1, 1)));
    return joined({path()}, words_of(small({{"steps", "100"},
                                            {"total-batch", total_batch},
                                            {"batch", "1"},
                                            {"threads", "1"},
                                            {"data", folder.file("train.bin")},  // and nothing to validate with
                                            {"out", folder.file("run")},
                                            {"seq-len", "2048"}})));
}

// The same wish several times: timeout signals its child and then the group, mpirun and shells forward what all have.
TEST(stop_repeated_within_seconds_is_one_wish) {
    using namespace program;
    struct {
        std::vector<int> signals;
        useconds_t pause;
        int status;
    } const cases[] = {{{SIGTERM, SIGTERM}, 0, 75},
                       {{SIGTERM, SIGTERM, SIGTERM, SIGTERM}, 200000, 75},
                       {{SIGINT, SIGTERM, SIGUSR1}, 1000, 130},  // of waiting signals the lowest comes first
                       {{SIGUSR1, SIGTERM, SIGUSR1, SIGINT}, 300000, 75}};
    for (const auto& c : cases) {
        TempFolder folder;
        Running program(slow_run(folder, "32768"), folder);
        REQUIRE(program.reaches("out: "));
        usleep(300000);
        for (const int signal : c.signals) kill(program.launcher, signal), usleep(c.pause);
        const Result r = program.end(30);
        CHECK_EQUAL(r.status, c.status);
        CHECK_EQUAL(r.err, std::string());
        CHECK(!newest_checkpoint(folder.file("run")).empty());
    }
    if (!file_exists("/usr/bin/timeout")) return;
    TempFolder folder;
    Running program(joined({"/usr/bin/timeout", "1.5"}, slow_run(folder, "32768")), folder);
    CHECK_EQUAL(program.end(30).status, 124);
    CHECK(!newest_checkpoint(folder.file("run")).empty());
}

// SIGHUP at the very start, while libraries are loaded that would catch it (UCX does), is not lost.
TEST(stop_by_hangup_at_the_start) {
    using namespace program;
    if (is_ignored(SIGHUP)) return;  // by nohup, and then the program ignores it too
    signal(SIGHUP, SIG_DFL);  // UCX, where MPI has loaded it into the tests, would catch it between fork and exec
    for (const useconds_t pause : {0, 2000, 5000, 10000, 15000, 20000, 30000, 50000, 100000}) {
        TempFolder folder;
        Running program(joined({path()}, small_words({{"out", folder.file("run")}, {"steps", "1000000"}})), folder);
        usleep(pause);
        kill(program.launcher, SIGHUP);
        const int status = program.end(20).status;
        CHECK(status == 75 || status == 128 + SIGHUP);
    }
}

// The first signal waits for a step that takes minutes; one after a pause does not.
TEST(stop_second_signal_after_a_pause_leaves_at_once) {
    using namespace program;
    TempFolder folder;
    Running program(slow_run(folder, "2097152"), folder);
    REQUIRE(program.reaches("out: "));
    usleep(500000);
    kill(program.launcher, SIGTERM);
    usleep(useconds_t((SAME_WISH + 0.3) * 1e6));
    kill(program.launcher, SIGTERM);
    const Result r = program.end(5);
    CHECK_EQUAL(r.status, 128 + SIGTERM);
    CHECK(r.out.find("SIGTERM") != std::string::npos && r.err.find("SIGTERM") != std::string::npos);
    CHECK(newest_checkpoint(folder.file("run")).empty());
}

// Process 1 of a container, whom the kernel spares what others die of.
TEST(stop_of_process_1_of_a_container) {
    using namespace program;
    const Words container = {"/usr/bin/unshare", "--pid", "--fork"};
    if (!file_exists(container[0]) || execute(joined(container, {"/bin/true"})).status != 0)
        return void(std::printf("    not tried: no unshare --pid here\n"));
    TempFolder folder;
    int input[2];
    if (pipe2(input, O_CLOEXEC) != 0) fail("no pipe");
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int signal : {SIGTERM, SIGINT}) {
        const pid_t outside =
            spawn(joined(container, {path(), "tokenize", "--in=-", "--out=" + folder.file("a"), "--tokenizer=bytes"}),
                  {}, {input[0], null, null});
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
TEST(stop_while_nobody_reads_what_is_printed) {
    using namespace program;
    for (const bool terminal : {true, false}) {
        TempFolder folder;
        const std::string out = folder.file("run"), heartbeat = out + "/heartbeat_rank0.jsonl";
        int ends[2];
        if (terminal) open_terminal(ends, 80);
        else if (pipe2(ends, O_CLOEXEC) != 0) fail("no pipe");
        const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
        const pid_t child = spawn(joined({path()}, small_words({{"out", out},
                                                                {"steps", "1000000"},
                                                                {"eval-every", "0"},
                                                                {"schedule", "constant"},
                                                                {"stall-timeout", "2"}})),
                                  {}, {null, ends[1], ends[1]});
        close(ends[1]), close(null);
        const auto step = [&] {
            const std::string line = file_exists(heartbeat) ? last_line(heartbeat) : "";
            return line.empty() ? 0 : parse_json(line, heartbeat).integer("step", heartbeat);
        };
        int status = 0;
        const double limit = seconds_now() + 60;
        while (step() < 1500 && seconds_now() < limit && waitpid(child, &status, WNOHANG) == 0) usleep(50000);
        CHECK(step() >= 1500);  // 150 kB of lines
        kill(child, SIGTERM);
        while (waitpid(child, &status, WNOHANG) == 0 && seconds_now() < limit) usleep(20000);
        kill(child, SIGKILL);
        CHECK_EQUAL(exit_status(status), 75);
        CHECK(!newest_checkpoint(out).empty());
        close(ends[0]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints of a run that goes on.

TEST(checkpoints_fall_back_to_the_newest_intact) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    const Options options = {{"out", out}, {"steps", "9"}, {"save-every", "3"}, {"schedule", "constant"}};
    REQUIRE_GOOD(train(options));
    const std::string log = losses_of(out), model = read_file(out + "/step_00000009/model.safetensors");
    std::string damaged = model;
    damaged[damaged.size() / 2] ^= 1;
    write_file(out + "/step_00000009/model.safetensors", damaged);
    std::filesystem::remove(out + "/step_00000006/manifest.json");
    Options again = options;
    again["resume"] = "on";
    const Result r = train(again);
    CHECK_EQUAL(r.status, 0);
    CHECK(r.err.find("step_00000009 is damaged: ") != std::string::npos &&
          r.err.find("checksum") != std::string::npos && r.err.find("step_00000006 is damaged: ") != std::string::npos);
    CHECK(r.out.find("step_00000003, step 3\n") != std::string::npos);
    CHECK_EQUAL(losses_of(out), log);
    CHECK(read_file(out + "/step_00000009/model.safetensors") == model);
    // None is intact: that is no reason to begin again over it.
    for (const char* step : {"3", "6", "9"}) std::filesystem::remove(out + "/step_0000000" + step + "/config.json");
    const Result none = train(again);
    CHECK_REFUSED(none, 1, "no checkpoint under " + out + " is intact", "step_00000009", "config.json",
                  "without --resume");
    CHECK(none.err.find("taking the one before") == std::string::npos);
    CHECK(read_file(out + "/step_00000009/model.safetensors") == model);
}

TEST(checkpoints_kept_and_removed) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"steps", "11"}, {"save-every", "1"}, {"keep", "2"}, {"keep-every", "4"}}));
    std::vector<std::string> names;
    for (const std::string& path : glob_files(out + "/step_*")) names.push_back(path.substr(out.size() + 6));
    CHECK((names == std::vector<std::string>{"00000004", "00000008", "00000010", "00000011"}));
}

// A run with --keep removes what somebody reads; the newest is there at any time.
TEST(checkpoints_removed_while_they_are_read_are_no_damage) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"dim", "256"}, {"mlp-hidden", "2048"}}));
    std::atomic<bool> read_enough{false};
    std::thread trainer([&] {
        for (int64_t step = 3; !read_enough; step++) {
            const std::string from = checkpoint_folder(out, step - 1), to = checkpoint_folder(out, step);
            copy_folder(from, to + ".writing");
            replace_in_file(to + ".writing/config.json", "{", "{ ");
            const Manifest before = read_manifest(from);
            std::vector<FileRecord> files = before.files;
            for (FileRecord& file : files)
                if (file.name == "config.json") {
                    const std::string bytes = read_file(to + ".writing/config.json");
                    file.size = bytes.size(), file.crc32c = crc32c(0, bytes.data(), bytes.size());
                }
            commit_checkpoint(out, step, files, before.state_text);
            rename_path(from, from + ".removing");
            remove_tree(from + ".removing");
        }
    });
    for (int i = 0; i < 300; i++) {
        Config c;
        c.from = out, c.at_step = "last", c.branches = "all";
        std::string error = error_of([&] { open_trained_model(c); });
        CHECK_EQUAL(error, std::string());
    }
    read_enough = true;
    trainer.join();
}

// A folder that is gone, or is another by now, is not written to, and the end claims no success.
TEST(run_whose_folder_is_removed_ends_with_an_error) {
    using namespace program;
    TempFolder folder;
    for (const std::string fate : {"removed", "moved", "replaced"}) {
        const std::string out = folder.file(fate);
        std::thread other([&] {
            while (!file_exists(out + "/main.log") || read_file(out + "/main.log").find("s:20 ") == std::string::npos)
                usleep(1000);
            rename_path(out, out + ".1");
            if (fate == "removed") remove_tree(out + ".1");
            if (fate == "replaced") make_folders(out);
        });
        const Result r = train({{"out", out}, {"steps", "5010"}, {"eval-every", "0"}});
        other.join();
        CHECK_REFUSED(r, 1, "--out " + out + " was removed or moved");
        CHECK_EQUAL(file_exists(out), fate == "replaced");
        CHECK(glob_files(out + "/*").empty());
    }
}

// A disk that is full for a while: the checkpoints of that time fail, training goes on, and the
// log says so. Here a file stands where the checkpoint's folder is to be, which stops root too.
TEST(checkpoints_that_fail_do_not_stop_the_run) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}, {"schedule", "constant"}}));
    Start full;  // the weights fit, the moments, twice as large, do not
    full.largest_file = file_size(out + "/step_00000001/model.safetensors") + 4096;
    const Result r =
        train({{"out", out}, {"steps", "4"}, {"save-every", "1"}, {"resume", "on"}, {"schedule", "constant"}}, full);
    CHECK_EQUAL(r.status, 1);  // because the last one failed too
    for (const char* words :
         {"checkpoint of step 2 failed", "checkpoint of step 3 failed", "the last checkpoint could not be written",
          "File too large", "training goes on", "step_00000001"})
        CHECK(r.err.find(words) != std::string::npos);
    CHECK_EQUAL(logged(out, "loss").size(), 4u);
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 1u);
}

// ---------------------------------------------------------------------------------------------------------------------
// Bad numbers.

// A learning rate that makes the weights infinite in a few steps.
TEST(bad_numbers_end_the_run_with_the_batch_on_disk) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    const Result r = train({{"out", out}, {"steps", "2"}, {"save-every", "1"}, {"init", "random"}});
    REQUIRE_GOOD(r);
    // One weight is infinite: every step from there on is bad, whoever computes it.
    const std::string model = out + "/step_00000002/model.safetensors";
    std::string bytes = read_file(model);
    const float infinity = std::numeric_limits<float>::infinity();
    std::memcpy(&bytes[bytes.size() - 4], &infinity, 4);
    write_file(model, bytes);
    seal(out + "/step_00000002");
    const Result bad = train({{"out", out}, {"steps", "9"}, {"resume", "on"}, {"init", "random"}, {"batch", "1"}});
    CHECK_EQUAL(bad.status, 1);
    CHECK_EQUAL(lines_of(bad.err).size(), 5u);
    for (const char* words : {"step 3: ", "no checkpoint at step 3", "step 4: ", "first tensor: gradient of ",
                              "3 in a row", "step_00000002"})
        CHECK(bad.err.find(words) != std::string::npos);
    CHECK(!file_exists(out + "/step_00000003"));  // --save-every 1 is inherited
    const std::string file = out + "/bad_step_00000003_rank0.json";
    REQUIRE(file_exists(file));
    const Json dump = parse_json(read_file(file), file);
    CHECK_EQUAL(dump.integer("step", file), int64_t(3));
    // The batch is that of the step: two samples of 64 tokens, numbers 4 and 5 of the shuffled corpus.
    const std::vector<Json>& rows = dump.array("tokens", file);
    REQUIRE(rows.size() == 2);
    Config c = parse_and_preset({"--seq-len", "64"});
    World world;
    DataLoader loader({synthetic_source(uint64_t(c.seed), SYNTHETIC_TOKENS, 0)},
                      loader_options(c, world, "--data", true));
    std::vector<int32_t> inputs(6 * 64), targets(6 * 64);
    loader.next_batch(inputs.data(), targets.data(), 6);
    for (size_t i = 0; i < 2; i++) {
        CHECK_EQUAL(rows[i].items.size(), 64u);
        for (size_t t = 0; t < 64 && t < rows[i].items.size(); t++)
            CHECK_EQUAL(rows[i].items[t].integer_value, int64_t(inputs[(4 + i) * 64 + t]));
    }
}

// z-scores against their definition: the window is the last 128 values, the judged one included; NaN before it is full.
TEST(bad_numbers_outlier_window) {
    OutlierWindow window;
    std::vector<double> values;
    for (int i = 0; i < 300; i++) {
        const double value = i == 250 ? 9.0 : random_uniform(1, random_stream(RANDOM_TEST, 9), uint64_t(i));
        values.push_back(value);
        const double z = window.z_score(value);
        if (i < 128) {
            CHECK(std::isnan(z));
            continue;
        }
        double sum = 0, squares = 0;
        for (size_t j = values.size() - 128; j < values.size(); j++) sum += values[j], squares += values[j] * values[j];
        const double mean = sum / 128, deviation = std::sqrt(squares / 128 - mean * mean);
        CHECK_NEAR(z, (value - mean) / deviation, 1e-9);
        CHECK_EQUAL(z > 5, i == 250);
    }
}
