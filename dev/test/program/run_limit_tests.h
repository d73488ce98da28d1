// run_limit_tests.h: the built ./train_nsa where the machine does not give what it asks for: memory, threads, open
// files, room on the disk, a terminal, an output; and what is left of a run whose files are not all there.
#pragma once
#include "fault_tests.h"

namespace program {

// Under a limit of the shell, such as "ulimit -n 8".
inline Result under(const std::string& limit, const Words& words) {
    return execute(joined({"/bin/bash", "-c", limit + "; exec \"$0\" \"$@\"", path()}, words));
}
// It ended well, or refused in one line that holds one of the words; "" if so.
inline std::string limit_fault(const Result& r, const Words& one_of) {
    if (r.status == 0) return "";
    if (r.status == 127 && holds(r.err, "error while loading shared libraries")) return "";
    const bool named =
        std::any_of(one_of.begin(), one_of.end(), [&](const std::string& word) { return holds(r.err, word); });
    return refusal_fault(r, 1, {}) + (named ? "" : "the line names nothing: '" + r.err + "'");
}
#define CHECK_LIMITED(result, ...)                                                                \
    do {                                                                                          \
        tests().checks++;                                                                         \
        const std::string fault_ = program::limit_fault(result, {__VA_ARGS__});                   \
        if (!fault_.empty()) check_failed(__FILE__, __LINE__, "%s: %s", #result, fault_.c_str()); \
    } while (0)

}  // namespace program

// ---------------------------------------------------------------------------------------------------------------------
// Memory, threads, files.

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which reserve terabytes of addresses
PROGRAM_TEST(run_out_of_memory_is_a_line) {
    REQUIRE_GOOD(train({{"out", out}}));
    write_file(folder.file("a.txt"), std::string(300000, 'a'));
    int refused = 0;
    for (const int kib : {112000, 120000, 136000, 160000, 176000, 200000, 300000, 400000}) {
        const std::string limit = format_text("ulimit -v %d", kib);
        const Result trained = under(limit, small_words({{"out", folder.file("other")}, {"batch", "-"}}));
        refused += trained.status != 0;
        CHECK_LIMITED(trained, "MiB", "thread");
        CHECK_LIMITED(under(limit, {"eval", "--from", out, "--val-data", "synthetic"}), "MiB", "thread");
        CHECK_LIMITED(under(limit, {"sample", "--from", out, "--tokens", "3"}), "MiB", "thread");
        CHECK_LIMITED(under(limit, {"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out",
                                    folder.file(format_text("t%d", kib))}),
                      "MiB", "thread");
    }
    CHECK(refused > 0);
    // What a limit leaves is known before anything is allocated.
    CHECK_REFUSED(under("ulimit -v 3000000", {"--seq-len", "65536", "--total-batch", "1048576", "--batch", "16",
                                              "--warmup", "0", "--out", folder.file("large")}),
                  1, "--batch 16", "are available", "choose");
}

PROGRAM_TEST(run_out_of_threads_is_a_line) {
    REQUIRE_GOOD(train({{"out", out}}));
    write_file(folder.file("a.txt"), "words");
    const std::string limit = "ulimit -s 8192; ulimit -v 3000000";  // 8 MiB of stack for each thread
    CHECK_REFUSED(under(limit, small_words({{"out", folder.file("other")}, {"threads", "1000"}})), 1,
                  "1000 CPU threads were asked for", "--threads");
    CHECK_REFUSED(under(limit, {"sample", "--from", out, "--threads", "1000"}), 1, "1000 CPU threads");
    CHECK_REFUSED(under(limit, {"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out",
                                folder.file("t"), "--threads", "1000"}),
                  1, "thread", "ulimit");
    CHECK(!file_exists(folder.file("other")));
}
#endif

PROGRAM_TEST(run_out_of_open_files_is_a_line) {
    write_file(folder.file("a.txt"), "words");
    for (int files = 4; files <= 12; files++) {
        const std::string limit = format_text("ulimit -n %d", files);
        CHECK_LIMITED(under(limit, small_words({{"out", out + std::to_string(files)}})), "Too many open files");
        CHECK_LIMITED(under(limit, {"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out",
                                    folder.file(std::to_string(files))}),
                      "Too many open files");
    }
}

// SIGXFSZ is a full disk.
PROGRAM_TEST(run_file_size_limit_is_a_full_disk) {
    CHECK_REFUSED(under("ulimit -f 40", small_words({{"out", out}})), 1, "the last checkpoint could not be written",
                  "step_00000002", "File too large");
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 0u);
    CHECK_REFUSED(under("ulimit -f 1", small_words({{"out", folder.file("none")}})), 1, "run.json", "File too large");
    CHECK_EQUAL(glob_files(folder.file("none/*")).size(), 0u);
    CHECK_REFUSED(under("ulimit -f 4", small_words({{"dump-state", folder.file("state")}})), 1, "state",
                  "File too large");
    CHECK(!file_exists(folder.file("state")));
    write_file(folder.file("a.txt"), std::string(100000, 'a'));
    CHECK_REFUSED(
        under("ulimit -f 40", {"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out", out}), 1,
        "File too large");
}

// ---------------------------------------------------------------------------------------------------------------------
// The terminal and the output.

// A dropped connection: as SIGTERM, however often it comes, unless the program was started to outlive it.
PROGRAM_TEST(run_hangup_saves_and_ends) {
    const auto forever = [&](const char* out) {
        return joined(
            {path()},
            small_words({{"steps", "1000000"}, {"eval-every", "0"}, {"batch", "1"}, {"out", folder.file(out)}}));
    };
    {
        Running run(forever("hung"), folder);
        REQUIRE(run.reaches("step 0002"));
        for (int i = 0; i < 2; i++) kill(run.launcher, SIGHUP);
        const Result r = run.end(30);
        CHECK_EQUAL(r.status, 75);
        CHECK(holds(r.out, "stopped by SIGTERM, SIGUSR1, "));
        CHECK_EQUAL(glob_files(folder.file("hung/step_*")).size(), 1u);
    }
    {
        Running run(joined({"/bin/bash", "-c", "trap '' HUP; exec \"$0\" \"$@\""}, forever("nohup")), folder);
        REQUIRE(run.reaches("step 0002"));
        kill(run.launcher, SIGHUP);
        const size_t lines = lines_of(read_file(run.out_file)).size();
        REQUIRE(run.reaches(format_text("step %04zu", lines + 20)));
        kill(run.launcher, SIGTERM);
        CHECK_EQUAL(run.end(30).status, 75);
    }
    {
        Running run({path(), "sample", "--from", folder.file("hung"), "--tokens", "1000000", "--past-end"}, folder);
        REQUIRE(run.reaches(" "));
        kill(run.launcher, SIGHUP);
        CHECK_EQUAL(run.end(30).status, 128 + SIGHUP);
    }
    const std::string mpirun = find_mpirun("SIGHUP at one of two ranks");
    if (mpirun.empty()) return;
    Running run(joined({mpirun, "-np", "2"}, forever("ranks")), folder);
    REQUIRE(run.reaches("step 0002"));
    kill(run.process_of(folder.file("ranks/heartbeat_rank1.jsonl")), SIGHUP);
    CHECK_EQUAL(run.end(30).status, 75);
    CHECK_EQUAL(glob_files(folder.file("ranks/step_*")).size(), 1u);
}

PROGRAM_TEST(run_output_that_is_lost_is_an_error_of_every_verb) {
    REQUIRE_GOOD(train({{"out", out}}));
    write_file(folder.file("a.txt"), std::string(300, 'a'));
    int n = 0;
    for (const char* closed : {">&-", ">/dev/full"}) {
        for (const Words& words :
             {small_words({{"out", folder.file("other")}}), small_words({{"dump-state", folder.file("state")}}),
              Words{"sample", "--from", out, "--tokens", "3"}, Words{"eval", "--from", out, "--val-data", "synthetic"},
              Words{"check"}, Words{"--help"}, Words{"sample", "--help"}, Words{"--version"}}) {
            CHECK_REFUSED(in_shell(words, closed), 1, "not all of the output could be written to stdout");
            std::filesystem::remove(folder.file("state"));
        }
        const Result r = in_shell({"tokenize", "--tokenizer", "bytes", "--in", folder.file("a.txt"), "--out",
                                   folder.file("t" + std::to_string(n++))},
                                  closed);
        CHECK_EQUAL(r.status, 1);
        CHECK(holds(r.err, "error: not all of the output could be written to stdout"));
    }
    CHECK_EQUAL(logged(folder.file("other"), "loss").size(), 2u);
    CHECK_EQUAL(glob_files(folder.file("other/step_*")).size(), 1u);
}

// ---------------------------------------------------------------------------------------------------------------------
// A model without the rest of its run.

PROGRAM_TEST(run_weights_alone_serve_for_sample_eval_and_init_from) {
    const std::string checkpoint = out + "/step_00000002";
    REQUIRE_GOOD(train({{"out", out}}));
    const auto verbs = [&](const std::string& from) {
        return std::vector<Words>{{"sample", "--from", from, "--tokens", "3"},
                                  {"eval", "--from", from, "--val-data", "synthetic"},
                                  small_words({{"init-from", from}, {"out", folder.file("other")}})};
    };
    std::filesystem::remove(checkpoint + "/optimizer_00000-of-00001.safetensors");
    for (const std::string& from : {out, checkpoint})
        for (const Words& words : verbs(from)) REQUIRE_GOOD(run(words));
    CHECK_REFUSED(train({{"out", out}, {"resume", "on"}, {"steps", "3"}}), 1, "optimizer_00000", "missing");
    // Damaged weights are refused, with advice for who wants weights.
    const std::string weights = read_file(checkpoint + "/model.safetensors");
    std::string damaged = weights;
    damaged[damaged.size() / 2] ^= 1;
    write_file(checkpoint + "/model.safetensors", damaged);
    for (const Words& words : verbs(out)) {
        const Result r = run(words);
        CHECK_REFUSED(r, 1, "no checkpoint under " + out + " is intact", "checksum", "give another run");
        CHECK(!holds(r.err, "--resume"));
    }
    write_file(checkpoint + "/model.safetensors", weights);
    // Without the manifest nothing tells whether the weights are whole, which is said, and they are taken.
    std::filesystem::remove(checkpoint + "/manifest.json");
    for (const std::string& from : {out, checkpoint}) {
        const std::vector<Words> words = verbs(from);
        for (const size_t i : {size_t(0), size_t(2)}) {
            const Result r = run(words[i]);
            CHECK_EQUAL(r.status, 0);
            CHECK_EQUAL(r.err, "train_nsa: warning: " + checkpoint +
                                   " has no manifest.json, so nothing tells whether its files are whole\n");
        }
        CHECK(holds(run(words[1]).err, "manifest.json is missing, which says what the run was validated on"));
    }
}

// eval sees the samples that the run was validated on, no more and no fewer.
PROGRAM_TEST(run_eval_counts_the_samples_of_the_run) {
    REQUIRE_GOOD(train({{"out", out}, {"eval-batches", "3"}}));  // of 128 tokens, in sequences of 64
    const Result r = run({"eval", "--from", out, "--val-data", "synthetic"});
    REQUIRE_GOOD(r);
    CHECK(holds(r.out, "384 tokens (6 of 6 samples of 64)"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Options that contradict each other, or that hardly anybody means.

PROGRAM_TEST(run_doubtful_options_are_said) {
    // Layers of a window have that, and nothing else of NSA. A run.json has every option, whether or not it was used.
    const std::string alternating = folder.file("alternating");
    REQUIRE_GOOD(train({{"attention", "window,full"}, {"layers", "2"}, {"window", "9"}, {"out", alternating}}));
    CHECK(holds(read_file(alternating + "/run.json"), "\"window\": 9"));
    REQUIRE_GOOD(run({"--config", alternating + "/run.json", "--out", alternating + "2"}));
    CHECK(holds(read_file(alternating + "2/run.json"), "\"window\": 9"));
    std::string longest = "nsa";
    for (int i = 1; i < MAX_PATTERN; i++) longest += ",full";
    CHECK_EQUAL(layer_kinds(longest).size(), size_t(MAX_PATTERN));
    CHECK(layer_kinds(longest + ",nsa").empty());

    const std::string warning = "train_nsa: warning: ";
    const auto said = [&](const Result& r, const std::string& text) {
        CHECK_EQUAL(r.status, 0);
        CHECK_EQUAL(lines_of(r.err).size(), 1u);
        CHECK_EQUAL(r.err.substr(0, warning.size() + text.size()), warning + text);
    };
    said(train({{"out", out}, {"warmup", "3"}}), "--steps 2 ends within the 3 steps of --warmup");
    said(train({{"out", out}, {"lr", "0"}}), "--lr 0: nothing is learnt");
    said(train({{"out", out}, {"seq-len", "4"}, {"total-batch", "8"}}), "--seq-len 4 is shorter than --cmp-block 8");
    said(train({{"out", out}, {"sample-tokens", "65"}}), "--sample-tokens 65 is more than --seq-len 64");
    REQUIRE_GOOD(train({{"out", out}, {"warmup", "2"}, {"seq-len", "8"}, {"total-batch", "16"}}));
    REQUIRE_GOOD(train({{"out", out}}));
    // The end-of-text token, two of the prompt and 61 of 62 new ones are 64 positions.
    REQUIRE_GOOD(run({"sample", "--from", out, "--prompt", "ab", "--tokens", "62"}));
    said(run({"sample", "--from", out, "--prompt", "ab", "--tokens", "63"}), "a prompt of 3 tokens and --tokens 63");
    said(run({"sample", "--from", out, "--prompt", std::string(64, 'a'), "--tokens", "1"}), "a prompt of 65 tokens");
}
