// launch_tests.h: the built programs as launchers start them: mpirun, Slurm's variables, torchrun's variables. Ranks on
// CPUs meet under mpirun alone; ranks on GPUs, which BUILD/train_nsa_emulated plays, in all three ways. And every way
// in which a rank that no launcher watches over can be lost.
#pragma once
#include <thread>

#include "ddp_tests.h"
#include "emulated_run_tests.h"
#include "fault_tests.h"

namespace launches {
using namespace emulated_runs;

// What torchrun or, with `slurm`, srun puts into the environment of every rank, with a port of this test alone.
inline std::vector<Words> variables_of_ranks(int ranks, bool slurm = false) {
    const std::string size = std::to_string(ranks), at = "MASTER_PORT=" + std::to_string(ranks::free_port());
    std::vector<Words> all;
    for (int r = 0; r < ranks; r++) {
        const std::string rank = std::to_string(r);
        if (slurm)
            all.push_back({"SLURM_STEP_ID=0", "SLURM_JOB_ID=77", "SLURM_NTASKS=" + size, "SLURM_PROCID=" + rank,
                           "SLURM_LOCALID=" + rank, "SLURM_STEP_NODELIST=localhost", at});
        else
            all.push_back({"RANK=" + rank, "WORLD_SIZE=" + size, "LOCAL_RANK=" + rank, "LOCAL_WORLD_SIZE=" + size,
                           "MASTER_ADDR=127.0.0.1", at});
    }
    return all;
}

// Every rank's result; rank r runs programs[r], or the last one.
inline std::vector<Result> run_ranks(const std::vector<Words>& variables, const std::vector<Words>& programs) {
    std::vector<Result> results(variables.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < variables.size(); r++)
        threads.emplace_back([&, r] {
            Start start;
            start.environment = variables[r];
            results[r] = execute(programs[std::min(r, programs.size() - 1)], start);
        });
    for (std::thread& t : threads) t.join();
    return results;
}

inline Words with_options(const Words& program, const Options& more) {
    return joined(program, words_of(options_of(more)));
}

// All ranks ended with the status, and together printed one line to stderr, which holds the words.
inline void check_one_line(const std::vector<Result>& results, int status, const Words& expected) {
    std::string err;
    for (const Result& r : results) {
        CHECK_EQUAL(r.status, status);
        CHECK(r.seconds < 40);
        err += r.err;
    }
    CHECK_EQUAL(lines_of(err).size(), 1u);
    for (const std::string& word : expected) {
        tests().checks++;
        if (err.find(word) == std::string::npos)
            check_failed(__FILE__, __LINE__, "'%s' is missing in '%s'", word.c_str(), err.c_str());
    }
}

}  // namespace launches

// World's collectives over MPI: this test runs itself as four ranks.
TEST(launch_collectives_over_mpi) {
    using namespace program;
    if (std::getenv("NSA_TEST_RANK")) {
        World world(20);
        CHECK(world.transport == Transport::MPI && world.size == 4 && world.local_rank == world.rank);
        CHECK_EQUAL(ranks::collectives(world), 0);
        return world.finish();
    }
    const std::string mpirun = find_mpirun("collectives over MPI");
    if (mpirun.empty()) return;
    Start start = ranks_start();
    start.environment.push_back("NSA_TEST_RANK=1");
    const Result r = execute({mpirun, "-np", "4", std::filesystem::read_symlink("/proc/self/exe").string(), "--only",
                              "launch_collectives_over_mpi"},
                             start);
    CHECK_EQUAL(r.status, 0);
    CHECK_EQUAL(ranks::count_of(r.out, "1 passed, 0 failed"), size_t(4));
}

// Ranks on CPUs sum gradients by MPI alone. What is refused leaves nothing behind and waits for nobody.
TEST(launch_of_cpu_ranks_needs_mpirun) {
    using namespace launches;
    TempFolder folder;
    for (const bool slurm : {false, true}) {
        Start start;
        start.environment = variables_of_ranks(2, slurm)[1];
        const Result r = train({{"out", folder.file("run")}}, start);
        CHECK_REFUSED(r, 2, slurm ? "SLURM_PROCID=1 and SLURM_NTASKS=2" : "RANK=1 and WORLD_SIZE=2",
                      "mpirun -np 2 ./train_nsa");
        CHECK(r.seconds < 10);
    }
    CHECK_EQUAL(glob_files(folder.file("*")).size(), 0u);
}

// A rank that runs another program is found before anything is written.
TEST(launch_of_different_programs) {
    using namespace program;
    const std::string mpirun = find_mpirun("different programs under mpirun");
    if (mpirun.empty()) return;
    TempFolder folder;
    const std::string other = folder.file("train_nsa"), out = folder.file("run");
    write_file(other, read_file(path()) + "x");
    std::filesystem::permissions(other, std::filesystem::perms::owner_all);
    const Words options = small_words({{"batch", "1"}, {"out", out}});
    const Result r =
        execute(joined(joined(joined({mpirun, "-np", "1", path()}, options), {":", "-np", "1", other}), options),
                ranks_start());
    CHECK(r.status != 0 && r.status != 1000);
    CHECK(r.err.find("has 'program: ") != std::string::npos && r.err.find("same program") != std::string::npos);
    CHECK(!file_exists(out));
}

// torchrun's and Slurm's variables: the same bits as one GPU.
TEST(emulated_gpus_started_by_variables) {
    using namespace launches;
    const Words program = program_on(1, "emulated GPUs started by variables");
    if (program.empty()) return;
    TempFolder folder;
    const auto options = [&](const char* out) {
        return Options{{"deterministic", "on"}, {"steps", "2"}, {"out", folder.file(out)}};
    };
    REQUIRE_GOOD(train_on(program, options("one")));
    for (const bool slurm : {false, true}) {
        const std::string out = slurm ? "slurm" : "torchrun";
        Options more = options(out.c_str());
        more["zero"] = slurm ? "1" : "0";
        const std::vector<Result> results = run_ranks(variables_of_ranks(2, slurm), {with_options(program, more)});
        for (const Result& r : results) REQUIRE_GOOD(r);
        CHECK(results[0].out.find(slurm ? "2 ranks (Slurm)" : "2 ranks (RANK/WORLD_SIZE)") != std::string::npos);
        CHECK(results[0].out.find("gradients travel by NCCL") != std::string::npos);
        for (const char* field : {"loss", "grad_norm"})
            CHECK(logged(folder.file(out), field) == logged(folder.file("one"), field));
        CHECK(read_file(folder.file(out + "/step_00000002/model.safetensors")) ==
              read_file(folder.file("one/step_00000002/model.safetensors")));
    }
}

// Without a launcher that would end the others: each fault is one line from one rank, and all end.
TEST(emulated_gpus_started_by_variables_with_faults) {
    using namespace launches;
    const Words program = program_on(1, "faults of emulated GPUs started by variables");
    if (program.empty()) return;
    TempFolder folder;
    const std::string out = folder.file("run"), name = "rank 1 on " + host_name();
    check_one_line(run_ranks(variables_of_ranks(2), {with_options(program, {{"out", out}}),
                                                     with_options(program, {{"out", out}, {"lr", "0.002"}})}),
                   1, {name + " has '", "\"lr\": 0.002"});
    write_file(folder.file("a.bin"), shard(random_tokens(64 * 40 + 1, 1)));
    write_file(folder.file("b.bin"), shard(random_tokens(64 * 40 + 1, 2)));
    check_one_line(
        run_ranks(variables_of_ranks(2), {with_options(program, {{"out", out}, {"data", folder.file("a.bin")}}),
                                          with_options(program, {{"out", out}, {"data", folder.file("b.bin")}})}),
        1, {name + " has '", "data"});
    // NCCL is there, but this run would not use it.
    check_one_line(run_ranks(variables_of_ranks(2), {with_options(program, {{"out", out}, {"device", "cpu"}})}), 2,
                   {"WORLD_SIZE=2", "mpirun -np 2 ./train_nsa"});
    CHECK(!file_exists(out));
    write_good_and_bad_shard(folder);
    check_one_line(
        run_ranks(
            variables_of_ranks(2),
            {with_options(program, {{"data", folder.file("train_*.bin")}, {"total-batch", "128"}, {"out", out}})}),
        1, {name, "token 300"});
}

// kill -9 and SIGSTOP in the middle of training.
TEST_LONG(emulated_gpus_started_by_variables_that_die_or_stall) {
    using namespace launches;
    const Words program = program_on(1, "emulated GPUs that die or stall");
    if (program.empty()) return;
    for (const int signal : {SIGKILL, SIGSTOP}) {
        TempFolder folders[2];
        const std::vector<Words> variables = variables_of_ranks(2);
        const Words words = with_options(
            program,
            {{"out", folders[0].file("run")}, {"steps", "1000000"}, {"eval-every", "0"}, {"stall-timeout", "5"}});
        Running first(joined(joined({"/usr/bin/env"}, variables[0]), words), folders[0]),
            second(joined(joined({"/usr/bin/env"}, variables[1]), words), folders[1]);
        REQUIRE(first.reaches("step 0002 | loss", 50));
        usleep(500000);  // the ranks tell rank 0 where they are several times a second
        kill(second.launcher, signal);
        const Result r = first.end(20);
        kill(second.launcher, SIGKILL);
        second.end(5);
        CHECK_EQUAL(r.status, 1);
        CHECK_EQUAL(lines_of(r.err).size(), 1u);
        CHECK(r.err.find("train_nsa: error: rank 1 on " + host_name() + ", GPU 1") == 0 &&
              r.err.find(signal == SIGKILL ? "is gone (its connection closed) at step" : "is late") !=
                  std::string::npos);
    }
}
