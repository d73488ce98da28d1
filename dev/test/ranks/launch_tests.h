// launch_tests.h: the built programs as launchers start them: mpirun, Slurm's variables, torchrun's variables. Ranks on
// CPUs meet under mpirun alone; ranks on GPUs, which BUILD/train_nsa_emulated plays, in all three ways. And every way
// in which a rank that no launcher watches over can be lost.
#pragma once
#include <thread>

#include "ddp_tests.h"
#include "emulated_run_tests.h"
#include "../program/program.h"

namespace launches {
using namespace emulated_runs;

// What torchrun puts into the environment of every rank, with a port of this test alone.
inline std::vector<Words> variables_of_ranks(int ranks) {
    const std::string size = std::to_string(ranks), at = "MASTER_PORT=" + std::to_string(ranks::free_port());
    std::vector<Words> all;
    for (int r = 0; r < ranks; r++) {
        const std::string rank = std::to_string(r);
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
        World world(read_launch(mpi_name()));
        CHECK(world.has_mpi && world.size == 4 && world.local_rank == world.rank && world.local_size == 4);
        CHECK(world.launcher == "mpirun" && world.hosts == std::vector<std::string>(4, host_name()));
        CHECK_EQUAL(ranks::collectives(world), 0);
        return world.finish();
    }
    const std::string mpirun = find_mpirun("collectives over MPI");
    if (mpirun.empty()) return;
    Start start;
    start.environment.push_back("NSA_TEST_RANK=1");
    const Result r = execute({mpirun, "-np", "4", std::filesystem::read_symlink("/proc/self/exe").string(), "--only",
                              "launch_collectives_over_mpi"},
                             start);
    CHECK_EQUAL(r.status, 0);
    CHECK_EQUAL(ranks::count_of(r.out, "1 passed, 0 failed"), size_t(4));
}

// One that ends before MPI_Init, or is stopped there, keeps the others waiting, but not for ever: they end, with a
// line.
TEST(launch_of_ranks_that_never_come) {
    using namespace program;
    if (std::getenv("NSA_TEST_RANK")) {
        World world(read_launch(mpi_name()), nullptr, 2);
        CHECK(false);  // it has come together with nobody
        return;
    }
    const std::string mpirun = find_mpirun("ranks that never come");
    if (mpirun.empty()) return;
    for (const Words& other : {Words{"/bin/false"}, Words{"/bin/sh", "-c", "kill -STOP $$"}, Words{"/bin/sleep", "60"}})
        for (const bool first : {true, false}) {
            Start start;
            start.environment.push_back("NSA_TEST_RANK=1");
            start.seconds = 30;
            const Words self = {std::filesystem::read_symlink("/proc/self/exe"), "--only",
                                "launch_of_ranks_that_never_come"};
            const Result r = execute(first ? two_ranks(mpirun, self, other) : two_ranks(mpirun, other, self), start);
            CHECK(r.status != 0 && r.status != 1000);
            const std::string name = format_text("train_nsa: error: rank %d on %s", first ? 0 : 1, host_name().c_str());
            CHECK(r.err.find(name) != std::string::npos);
        }
}

// Two ranks whose --out is one name and two folders, as on two hosts without a network file system.
TEST(launch_without_a_shared_folder) {
    using namespace program;
    const std::string mpirun = find_mpirun("ranks that share no folder");
    if (mpirun.empty()) return;
    TempFolder folder;
    for (const char* host : {"host1", "host2"}) make_folders(folder.file(host));
    const Words run = joined({path()}, small_words({{"batch", "1"}, {"out", "run"}}));
    const auto on = [&](const char* host) {
        return joined({"/bin/sh", "-c", "cd \"$0\" && exec \"$@\"", folder.file(host)}, run);
    };
    const Result r = execute(two_ranks(mpirun, on("host1"), on("host2")));
    CHECK(r.status != 0 && r.status != 1000);
    CHECK(r.err.find("error: rank 1: --out run on " + host_name()) != std::string::npos);
    CHECK(newest_checkpoint(folder.file("host1/run")).folder.empty() && !file_exists(folder.file("host2/run")));
    CHECK_EQUAL(execute(two_ranks(mpirun, on("host1"), on("host1"))).status, 0);
}

// In a Slurm job too, mpirun is mpirun, and srun is srun.
TEST(launch_says_who_started_it) {
    struct {
        std::vector<const char*> variables;
        const char* launcher;
    } const cases[] = {{{"PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"}, "mpirun"},
                       {{"PMI_SIZE", "PMI_RANK"}, "srun"},
                       {{"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"}, "mpirun"},
                       {{"PMIX_RANK", "SLURM_NTASKS"}, "srun"}};
    for (const auto& c : cases) {
        setenv("SLURM_STEP_ID", "0", 1);
        for (const char* variable : c.variables) setenv(variable, "2", 1);
        const Launch launch = read_launch("MPICH Version: 4.0.2");
        for (const char* variable : c.variables) unsetenv(variable);
        unsetenv("SLURM_STEP_ID");
        CHECK_EQUAL(launch.launcher, std::string(c.launcher));
        CHECK_EQUAL(launch.size, 2);
    }
}

// Bound to one processor, as Open MPI does it by default, a run says what is left idle; one in a script too.
TEST(launch_bound_to_a_processor_says_so) {
    using namespace program;
    const std::string mpirun = find_mpirun("a rank bound to a processor");
    if (mpirun.empty() || usable_processors() < 2) return;
    TempFolder folder;
    const Words bound = {"/usr/bin/taskset", "-c", "0"}, script = {"/bin/bash", "-c", "\"$0\" \"$@\" || exit"};
    for (const Words& by : {Words{}, bound, joined(bound, script)}) {
        const Words program = joined({path()}, small_words({{"out", folder.file("run")}}));
        const Result r = execute(joined({mpirun, "-np", "1"}, joined(by, program)));
        CHECK_EQUAL(r.status, 0);
        CHECK_EQUAL(r.out.find("--bind-to none") != std::string::npos, !by.empty());
    }
}

// Ranks on CPUs sum gradients by MPI alone. What is refused leaves nothing behind and waits for nobody, and rank 0
// says it at once; a rank that nobody ends says it later.
TEST(launch_of_cpu_ranks_needs_mpirun) {
    using namespace launches;
    TempFolder folder;
    for (const int rank : {0, 1}) {
        Start start;
        start.environment = variables_of_ranks(2)[size_t(rank)];
        const Result r = train({{"out", folder.file("run")}}, start);
        CHECK_EQUAL(r.status, 2);
        CHECK(r.seconds < 10);
        if (rank == 0) CHECK_REFUSED(r, 2, "mpirun");
        else CHECK_REFUSED(r, 2, "rank 1 on " + host_name(), "mpirun");
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
    const Result r = execute(two_ranks(mpirun, joined({path()}, options), joined({other}, options)));
    CHECK(r.status != 0 && r.status != 1000);
    CHECK(r.err.find("has 'program: ") != std::string::npos && r.err.find("same program") != std::string::npos);
    CHECK(!file_exists(out));
}

// torchrun's variables: NCCL carries everything, and the losses are those of one GPU but for the roundings of sums in
// another order.
TEST(emulated_gpus_started_by_variables) {
    using namespace launches;
    const Words program = program_on(1, "emulated GPUs started by variables");
    if (program.empty()) return;
    TempFolder folder;
    const auto options = [&](const std::string& out) {
        return Options{{"steps", "2"}, {"save-every", "2"}, {"out", folder.file(out)}};
    };
    REQUIRE_GOOD(train_on(program, options("one")));
    for (const char* zero : {"0", "1"}) {
        const std::string out = std::string("torchrun") + zero;
        Options more = options(out);
        more["zero"] = zero;
        const std::vector<Result> results = run_ranks(variables_of_ranks(2), {with_options(program, more)});
        for (const Result& r : results) REQUIRE_GOOD(r);
        CHECK(results[0].out.find("2 ranks (RANK/WORLD_SIZE)") != std::string::npos);
        CHECK(results[0].out.find("gradients travel by NCCL") != std::string::npos);
        check_first_step(folder.file(out), folder.file("one"), FP32_ROUNDINGS);
    }
}

// Each fault is one line from one rank. The launcher, which this test plays, ends the others.
TEST(emulated_gpus_started_by_variables_with_faults) {
    using namespace launches;
    const Words program = program_on(1, "faults of emulated GPUs started by variables");
    if (program.empty()) return;
    TempFolder folder;
    const std::string out = folder.file("run");
    // What rank 1 says while rank 0 waits for it.
    const auto second = [&](const Options& first_options, const Options& second_options) {
        const std::vector<Words> variables = variables_of_ranks(2);
        TempFolder own;
        const Running first(joined(joined({"/usr/bin/env"}, variables[0]), with_options(program, first_options)), own);
        return run_ranks({variables[1]}, {with_options(program, second_options)});
    };
    check_one_line(second({{"out", out}}, {{"out", out}, {"lr", "0.002"}}), 1, {"started with other options"});
    // NCCL is there, but this run would not use it.
    check_one_line(run_ranks(variables_of_ranks(2), {with_options(program, {{"out", out}, {"device", "cpu"}})}), 2,
                   {"this run computes on CPUs", "mpirun -np 2 ./train_nsa"});
    {  // two ranks and one GPU
        std::vector<Words> variables = variables_of_ranks(2);
        for (Words& words : variables) words.push_back("EMULATED_GPUS=1");
        for (const Result& r : run_ranks(variables, {with_options(program, {{"out", out}})})) {
            CHECK_EQUAL(r.status, 1);
            CHECK(r.err.find("ncclCommInitRank") != std::string::npos);
        }
    }
    CHECK(!file_exists(out));
    write_good_and_bad_shard(folder);
    const Options bad = {{"data", folder.file("train_*.bin")}, {"total-batch", "128"}, {"out", out}};
    check_one_line(second(bad, bad), 1, {"rank 1", "token 300"});
}

// kill -9 in the middle of training, and nobody ends the other: it gives up, and says who has not come as far.
TEST_LONG(emulated_gpus_started_by_variables_that_die) {
    using namespace launches;
    const Words program = program_on(1, "emulated GPUs that die");
    if (program.empty()) return;
    TempFolder folders[2];
    const std::vector<Words> variables = variables_of_ranks(2);
    const Words words = with_options(
        program, {{"out", folders[0].file("run")}, {"steps", "1000000"}, {"eval-every", "0"}, {"stall-timeout", "5"}});
    // A GPU's host does not wait inside of a collective that it launches, and so must the emulated one's.
    const Words env = {"/usr/bin/env", "EMULATED_LATE=1"};
    Running first(joined(joined(env, variables[0]), words), folders[0]),
        second(joined(joined(env, variables[1]), words), folders[1]);
    REQUIRE(first.reaches("step 0002 | loss", 50));
    kill(second.launcher, SIGKILL);
    second.end(5);
    const Result r = first.end(40);
    CHECK_REFUSED(r, 1, "rank 0 on " + host_name() + ", GPU 0 has waited 15.", "rank 1 has not come as far");
}
