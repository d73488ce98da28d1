// run_limit_tests.h: the built ./train_nsa where the machine does not give what it asks for: memory, threads, open
// files, room on the disk, a terminal, an output; and what is left of a run whose files are not all there.
#pragma once
#include "fault_tests.h"

namespace program {

// OpenMP ends the program by itself where the system gives it no thread, and says so.
inline bool is_ended_by_openmp(const Result& r) {
    return r.status != 0 &&
           (holds(r.err, "libgomp: Thread creation failed") || holds(r.err, "resources for OMP thread"));
}

// It ended well, or refused in one line that holds one of the words.
inline void check_limited(const Result& r, const Words& one_of) {
    tests().checks++;
    if (r.status == 0 || (r.status == 127 && holds(r.err, "error while loading shared libraries"))) return;
    if (is_ended_by_openmp(r)) return;
    const std::string fault = refusal_fault(r, 1, {});
    const bool named =
        std::any_of(one_of.begin(), one_of.end(), [&](const std::string& word) { return holds(r.err, word); });
    if (!named || !fault.empty())
        check_failed(__FILE__, __LINE__, "neither '%s' nor others in '%s'; %s", one_of[0], r.err, fault);
}

}  // namespace program

// ---------------------------------------------------------------------------------------------------------------------
// Memory, threads, files.

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which reserve terabytes of addresses
PROGRAM_TEST(run_out_of_memory_is_a_line) {
    REQUIRE_GOOD(run("small"));
    write("a.txt", std::string(300000, 'a'));
    int refused = 0;
    for (const int kib : {112000, 120000, 136000, 160000, 176000, 200000, 300000, 400000}) {
        const std::string limit = format_text("ulimit -v %d; exec \"$@\"", kib);
        const Result trained = in_shell(limit, "small --out=@/other --batch=-");
        refused += trained.status != 0;
        check_limited(trained, {"MiB", "thread"});
        for (const std::string& command :
             Words{"eval --from @/run --val-data synthetic", "sample --from @/run --tokens 3",
                   format_text("tokenize --tokenizer bytes --in @/a.txt --out @/t%d", kib)})
            check_limited(in_shell(limit, command), {"MiB", "thread"});
    }
    CHECK(refused > 0);
    // What a limit leaves is known before anything is allocated.
    CHECK_REFUSED(in_shell("ulimit -v 3000000; exec \"$@\"",
                           "--seq-len 65536 --total-batch 1048576 --batch 16 --warmup 0 --out @/large"),
                  1, "--batch 16", "are available", "choose");
}

PROGRAM_TEST(run_out_of_threads_is_a_line) {
    REQUIRE_GOOD(run("small"));
    write("a.txt", "words");
    const std::string limit = "ulimit -s 8192; ulimit -v 3000000; exec \"$@\"";  // 8 MiB of stack for each thread
    CHECK(is_ended_by_openmp(in_shell(limit, "small --out=@/other --threads=1000")));
    CHECK(is_ended_by_openmp(in_shell(limit, "sample --from @/run --threads 1000")));
    const std::string for_one = "ulimit -s 1600000; ulimit -v 3000000; exec \"$@\"";  // that of the signals
    CHECK_REFUSED(in_shell(for_one, "tokenize --tokenizer bytes --in @/a.txt --out @/t"), 1, "thread that encodes",
                  "ulimit");
    CHECK(!file_exists(file("other")));
}
#endif

PROGRAM_TEST(run_out_of_open_files_is_a_line) {
    write("a.txt", "words");
    for (int files = 4; files <= 12; files++)
        for (const char* command : {"small --out=@/run%d", "tokenize --tokenizer bytes --in @/a.txt --out @/%d"})
            check_limited(in_shell(format_text("ulimit -n %d; exec \"$@\"", files),
                                   std::regex_replace(command, std::regex("%d"), std::to_string(files))),
                          {"Too many open files"});
}

// SIGXFSZ is a full disk.
PROGRAM_TEST(run_file_size_limit_is_a_full_disk) {
    const auto refused = [&](int blocks, const Command& command, const std::string& named) {
        CHECK_REFUSED(in_shell(format_text("ulimit -f %d; exec \"$@\"", blocks), command), 1, named, "File too large");
    };
    refused(40, "small", "step_00000002");
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 0u);
    refused(1, "small --out=@/none", "run.json");
    CHECK_EQUAL(glob_files(file("none/*")).size(), 0u);
    refused(4, "small --dump-state=@/state", "state");
    CHECK(!file_exists(file("state")));
    write("a.txt", std::string(100000, 'a'));
    refused(40, "tokenize --tokenizer bytes --in @/a.txt --out @/t", file("t"));
}

// ---------------------------------------------------------------------------------------------------------------------
// The terminal and the output.

// A dropped connection: as SIGTERM, however often it comes, unless the program was started to outlive it.
PROGRAM_TEST(run_hangup_saves_and_ends) {
    const std::string forever = "small --steps=1000000 --eval-every=0 --batch=1 --out=@/";
    {
        Running run(started(forever + "hung"), folder);
        REQUIRE(run.reaches("step 0002"));
        for (int i = 0; i < 2; i++) kill(run.launcher, SIGHUP);
        const Result r = run.end(30);
        CHECK_EQUAL(r.status, 75);
        CHECK(holds(r.out, "stopped by SIGTERM, SIGUSR1, "));
        CHECK_EQUAL(glob_files(file("hung/step_*")).size(), 1u);
    }
    {
        const Words nohup = {"/bin/bash", "-c", "trap '' HUP; exec \"$0\" \"$@\""};
        Running run(joined(nohup, started(forever + "nohup")), folder);
        REQUIRE(run.reaches("step 0002"));
        kill(run.launcher, SIGHUP);
        const size_t lines = lines_of(read_file(run.out_file)).size();
        REQUIRE(run.reaches(format_text("step %04d", lines + 20)));
        kill(run.launcher, SIGTERM);
        CHECK_EQUAL(run.end(30).status, 75);
    }
    {
        Running run(started("sample --from @/hung --tokens 1000000 --past-end"), folder);
        REQUIRE(run.reaches(" "));
        kill(run.launcher, SIGHUP);
        CHECK_EQUAL(run.end(30).status, 128 + SIGHUP);
    }
    if (!find_ranks("SIGHUP at one of two ranks")) return;
    Running run(started(forever + "ranks", 2), folder);
    REQUIRE(run.reaches("step 0002"));
    kill(run.process_of(file("ranks/heartbeat_rank1.jsonl")), SIGHUP);
    CHECK_EQUAL(run.end(30).status, 75);
    CHECK_EQUAL(glob_files(file("ranks/step_*")).size(), 1u);
}

PROGRAM_TEST(run_output_that_is_lost_is_an_error_of_every_verb) {
    REQUIRE_GOOD(run("small"));
    write("a.txt", std::string(300, 'a'));
    for (const char* closed : {">&-", ">/dev/full"})
        for (const char* command :
             {"small --out=@/other", "small --dump-state=@/state", "sample --from @/run --tokens 3",
              "eval --from @/run --val-data synthetic", "check", "--help", "sample --help", "--version",
              "tokenize --tokenizer bytes --in @/a.txt --out @/t"}) {
            CHECK_REFUSED(in_shell(std::string("\"$@\" ") + closed, command), 1,
                          "not all of the output could be written to stdout");
            for (const std::string& left : glob_files(file("t_*"))) std::filesystem::remove(left);
            std::filesystem::remove(file("state"));
        }
    CHECK_EQUAL(logged(file("other"), "loss").size(), 2u);
    CHECK_EQUAL(glob_files(file("other/step_*")).size(), 1u);
}

// ---------------------------------------------------------------------------------------------------------------------
// A model without the rest of its run.

PROGRAM_TEST(run_weights_alone_serve_for_sample_eval_and_init_from) {
    const std::string checkpoint = out + "/step_00000002", model = checkpoint + "/model.safetensors";
    REQUIRE_GOOD(run("small"));
    const auto verbs = [&](const std::string& from) {
        return Words{"sample --tokens 3 --from " + from, "eval --val-data synthetic --from " + from,
                     "small --out=@/other --init-from=" + from};
    };
    std::filesystem::remove(checkpoint + "/" + OPTIMIZER);
    for (const std::string& from : {out, checkpoint})
        for (const std::string& verb : verbs(from)) REQUIRE_GOOD(run(verb));
    check({{"small --out=@/run --resume=on --steps=3", 1, {"optimizer_00000", "No such file"}}});
    // Damaged weights are refused, with advice for who wants weights.
    const std::string weights = read_file(model);
    std::string damaged = weights;
    damaged[damaged.size() / 2] ^= 1;
    write_file(model, damaged);
    for (const std::string& verb : verbs(out)) {
        const Result r = run(verb);
        CHECK_REFUSED(r, 1, "no checkpoint under " + out + " is intact", "checksum", "give another run");
        CHECK(!holds(r.err, "--resume"));
    }
    write_file(model, weights);
    // Without the manifest nothing tells whether the weights are whole, which is said, and they are taken.
    std::filesystem::remove(checkpoint + "/manifest.json");
    for (const std::string& from : {out, checkpoint}) {
        const Words commands = verbs(from);
        for (const size_t i : {size_t(0), size_t(2)}) {
            const Result r = run(commands[i]);
            CHECK_EQUAL(r.status, 0);
            CHECK_EQUAL(r.err, "train_nsa: warning: " + checkpoint +
                                   " has no manifest.json, so nothing tells whether its files are whole\n");
        }
        CHECK(holds(run(commands[1]).err, "manifest.json is missing, which says what the run was validated on"));
    }
}

// eval sees the samples that the run was validated on, no more and no fewer: of 128 tokens, in sequences of 64.
PROGRAM_TEST(run_eval_counts_the_samples_of_the_run) {
    REQUIRE_GOOD(run("small --eval-batches=3"));
    CHECK(holds(printed("eval --from @/run --val-data synthetic"), "384 tokens (6 of 6 samples of 64)"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Options that contradict each other, or that hardly anybody means.

PROGRAM_TEST(run_doubtful_options_are_said) {
    // Layers of a window have that, and nothing else of NSA. A run.json has every option, whether or not it was used.
    REQUIRE_GOOD(run("small --attention=window,full --layers=2 --window=9 --out=@/turns"));
    REQUIRE_GOOD(run("--config @/turns/run.json --out @/again"));
    CHECK(holds(read_file(file("again/run.json")), "\"window\": 9"));
    std::string longest = "nsa";
    for (int i = 1; i < MAX_PATTERN; i++) longest += ",full";
    CHECK_EQUAL(layer_kinds(longest).size(), size_t(MAX_PATTERN));
    CHECK(layer_kinds(longest + ",nsa").empty());

    const auto said = [&](const Command& command, const std::string& text) {
        const Result r = run(command);
        CHECK_EQUAL(r.status, 0);
        CHECK_EQUAL(lines_of(r.err).size(), 1u);
        CHECK_EQUAL(r.err.find("train_nsa: warning: " + text), 0u);
    };
    said("small --warmup=3", "--steps 2 ends within the 3 steps of --warmup");
    REQUIRE_GOOD(run("small --warmup=2 --seq-len=8 --total-batch=16"));
    REQUIRE_GOOD(run("small"));
    // The end-of-text token, two of the prompt and 61 of 62 new ones are 64 positions.
    REQUIRE_GOOD(run("sample --from @/run --prompt ab --tokens 62"));
    said("sample --from @/run --prompt ab --tokens 63", "a prompt of 3 tokens and --tokens 63");
    said("sample --from @/run --tokens 1 --prompt " + std::string(64, 'a'), "a prompt of 65 tokens");
}
