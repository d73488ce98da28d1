// launch_tests.h: the built programs as launchers start them: mpirun, Slurm's variables, torchrun's variables. Ranks on
// CPUs meet under mpirun alone; ranks on GPUs, which BUILD/train_nsa_emulated plays, in all three ways. And every way
// in which a rank that no launcher watches over can be lost.
#pragma once
#include <thread>

#include "ddp_tests.h"
#include "emulated_run_tests.h"

namespace launches {
using namespace emulated_runs;

// What torchrun puts into the environment of every rank, with a port of this test alone.
inline std::vector<Words> variables_of_ranks(int ranks) {
    const std::string size = std::to_string(ranks), at = "MASTER_PORT=" + std::to_string(ranks::free_port());
    std::vector<Words> all;
    for (int r = 0; r < ranks; r++) {
        const std::string rank = std::to_string(r);
        all.push_back({"RANK=" + rank, "WORLD_SIZE=" + size, "LOCAL_RANK=" + rank, "MASTER_ADDR=127.0.0.1", at});
    }
    return all;
}

// Every rank's result.
inline std::vector<Result> run_ranks(const std::vector<Words>& variables, const Words& words) {
    std::vector<Result> results(variables.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < variables.size(); r++)
        threads.emplace_back([&, r] { results[r] = execute(words, {variables[r]}); });
    for (std::thread& t : threads) t.join();
    return results;
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
    for (const std::string& word : expected)
        if (!holds(err, word)) check_failed(__FILE__, __LINE__, "'%s' is missing in '%s'", word, err);
}

}  // namespace launches

// World's collectives over MPI: this test runs itself as four ranks.
RANKS_TEST(launch_collectives_over_mpi) {
    if (std::getenv("NSA_TEST_RANK")) {
        World world(read_launch(mpi_name()));
        CHECK(world.has_mpi && world.size == 4 && world.local_size == 4);
        CHECK(world.launcher == "mpirun" && world.hosts == std::vector<std::string>(4, host_name()));
        CHECK_EQUAL(ranks::collectives(world), 0);
        return world.finish();
    }
    const Result r = execute({mpirun, "-np", "4", std::filesystem::read_symlink("/proc/self/exe").string(), "--only",
                              "launch_collectives_over_mpi"},
                             {{"NSA_TEST_RANK=1"}});
    CHECK_EQUAL(r.status, 0);
    CHECK_EQUAL(ranks::count_of(r.out, "1 passed, 0 failed"), size_t(4));
}

// One that ends before MPI_Init, or is stopped there, keeps the others waiting, but not for ever: they end, with a
// line.
RANKS_TEST(launch_of_ranks_that_never_come) {
    if (std::getenv("NSA_TEST_RANK")) {
        World world(read_launch(mpi_name()), nullptr, 1);
        CHECK(false);  // it has come together with nobody
        return;
    }
    const Words self = {std::filesystem::read_symlink("/proc/self/exe"), "--only", "launch_of_ranks_that_never_come"};
    for (const Words& other : {Words{"/bin/false"}, Words{"/bin/sh", "-c", "kill -STOP $$"}, Words{"/bin/sleep", "60"}})
        for (const bool first : {true, false}) {
            if (!first && other[0] == "/bin/sh") continue;  // as one that sleeps
            const Words words = first ? two_ranks(mpirun, self, other) : two_ranks(mpirun, other, self);
            const Result r = execute(words, {{"NSA_TEST_RANK=1"}});
            CHECK(r.status != 0 && r.status != 1000);
            // Open MPI's mpirun ends all when one fails, and may do so before the rank has waited for it.
            if (other[0] == "/bin/false" && !holds(mpi_name(), "MPICH")) continue;
            CHECK(holds(r.err, format_text("train_nsa: error: rank %d on ", first ? 0 : 1) + host_name()));
        }
}

// Two ranks whose --out is one name and two folders, as on two hosts without a network file system. One may be a copy.
RANKS_TEST(launch_without_a_shared_folder) {
    for (const char* host : {"host1", "host2"}) make_folders(file(host));
    const auto on = [&](const char* host) {
        const std::string command = "small --batch=1 --out=run --resume=on --save-every=1";
        return joined({"/bin/sh", "-c", "cd \"$0\" && exec \"$@\"", file(host)}, started(command));
    };
    const auto is_refused = [&] {
        const Result r = execute(two_ranks(mpirun, on("host1"), on("host2")));
        CHECK(r.status != 0 && r.status != 1000);
        CHECK(holds(r.err, "error: rank 1: --out run on " + host_name()));
    };
    is_refused();
    CHECK(newest_checkpoint(file("host1/run")).folder.empty() && !file_exists(file("host2/run")));
    CHECK_EQUAL(execute(two_ranks(mpirun, on("host1"), on("host1"))).status, 0);
    std::filesystem::remove_all(file("host1/run/step_00000002"));
    copy_folder(file("host1/run"), file("host2/run"));
    is_refused();
}

// Bound to one processor, as by Open MPI's mpirun alone, a run says what is left idle; one in a script too.
RANKS_TEST(launch_bound_to_a_processor_says_so) {
    if (usable_processors() < 2) return skip("launch_bound_to_a_processor_says_so: there is one processor");
    const Words bound = {"/usr/bin/taskset", "-c", "0"}, script = {"/bin/bash", "-c", "\"$0\" \"$@\" || exit"};
    const std::string left = execute({mpirun, "-np", "1", "/usr/bin/env", "-u", "OMP_NUM_THREADS", "nproc"}).out;
    const bool mpirun_binds = std::atoi(left.c_str()) < usable_processors();
    for (const Words& by : {Words{}, bound, joined(bound, script)}) {
        const Result r = execute(joined({mpirun, "-np", "1"}, joined(by, started("small"))));
        CHECK_EQUAL(r.status, 0);
        CHECK_EQUAL(holds(r.out, "--bind-to none"), mpirun_binds || !by.empty());
    }
}

// Ranks on CPUs sum gradients by MPI alone. What is refused leaves nothing behind and waits for nobody, and rank 0
// says it at once; a rank that nobody ends says it later.
PROGRAM_TEST(launch_of_cpu_ranks_needs_mpirun) {
    for (const size_t rank : {0, 1}) {
        const Result r = run("small", {launches::variables_of_ranks(2)[rank]});
        CHECK(r.seconds < 10);
        CHECK_REFUSED(r, 2, "mpirun", rank ? "rank 1 on " + host_name() : "");
    }
    CHECK_EQUAL(glob_files(file("*")).size(), 0u);
}

// A rank that runs another program is found before anything is written.
RANKS_TEST(launch_of_different_programs) {
    write("train_nsa", read_file(path()) + "x");
    std::filesystem::permissions(file("train_nsa"), std::filesystem::perms::owner_all);
    const Words options = arguments("small --batch=1");
    const Result r = execute(two_ranks(mpirun, joined({path()}, options), joined({file("train_nsa")}, options)));
    CHECK(r.status != 0 && r.status != 1000);
    CHECK(holds(r.err, "has 'program: ", "same program"));
    CHECK(!file_exists(out));
}

// torchrun's variables: NCCL carries everything, and the losses are those of one GPU but for the roundings of sums in
// another order.
EMULATED_TEST(emulated_gpus_started_by_variables) {
    using namespace launches;
    const std::string common = SMALL_ON_GPU + "--steps=2 --save-every=2 ";
    REQUIRE_GOOD(run(common));
    for (const std::string zero : {"0", "1"}) {
        const std::vector<Result> results =
            run_ranks(variables_of_ranks(2), started(common + "--out=@/torchrun --zero=" + zero));
        for (const Result& r : results) REQUIRE_GOOD(r);
        CHECK(holds(results[0].out, "2 ranks (RANK/WORLD_SIZE)", "gradients travel by NCCL"));
        check_first_step(file("torchrun"), out, FP32_ROUNDINGS);
    }
}

// Each fault is one line from one rank. The launcher, which this test plays, ends the others.
EMULATED_TEST(emulated_gpus_started_by_variables_with_faults) {
    using namespace launches;
    // What rank 1 says while rank 0 waits for it.
    const auto second = [&](const std::string& common, const std::string& more) {
        const std::vector<Words> variables = variables_of_ranks(2);
        const TempFolder own;
        const Running first(joined(joined({"/usr/bin/env"}, variables[0]), started(common)), own);
        return run_ranks({variables[1]}, started(common + more));
    };
    check_one_line(second(SMALL_ON_GPU, "--lr=0.002"), 1, {"started with other options"});
    // NCCL is there, but this run would not use it.
    check_one_line(run_ranks(variables_of_ranks(2), started(SMALL_ON_GPU + "--device=cpu")), 2,
                   {"this run computes on CPUs", "mpirun -np 2 ./train_nsa"});
    {  // two ranks and one GPU
        std::vector<Words> variables = variables_of_ranks(2);
        for (Words& words : variables) words.push_back("EMULATED_GPUS=1");
        for (const Result& r : run_ranks(variables, started(SMALL_ON_GPU))) {
            CHECK_EQUAL(r.status, 1);
            CHECK(holds(r.err, "ncclCommInitRank"));
        }
    }
    CHECK(!file_exists(out));
}

// kill -9 in the middle of training, and nobody ends the other: it gives up, and says who has not come as far. So does
// the host of a GPU whose NCCL waits for a rank that stands still, also before the third of four micro-steps.
EMULATED_TEST_LONG(emulated_gpus_that_die_or_stand_still) {
    using namespace launches;
    const std::vector<Words> variables = variables_of_ranks(2);
    const std::string command = SMALL_ON_GPU + "--total-batch=512 --steps=1000000 --eval-every=0 --stall-timeout=5";
    // A GPU's host does not wait inside of a collective that it launches, and so must the emulated one's.
    const Words env = {"/usr/bin/env", "EMULATED_LATE=1"};
    const TempFolder other;
    Running first(joined(joined(env, variables[0]), started(command)), folder),
        second(joined(joined(env, variables[1]), started(command)), other);
    REQUIRE(first.reaches("step 0002 | loss", 50));
    kill(second.launcher, SIGKILL);
    second.end(5);
    const Result r = first.end(40);
    CHECK_REFUSED(r, 1, "rank 0 on " + host_name() + ", GPU 0 has waited 15.", "rank 1 has not come as far");
    std::filesystem::remove_all(out);
    Running both(joined(env, started(command, 2)), folder);
    REQUIRE(both.reaches("step 0002 | loss", 50));
    const pid_t victim = both.process_of(out + "/heartbeat_rank1.jsonl");
    kill(victim, SIGSTOP);
    CHECK(holds(both.end(40).err, "GPU 0 has waited 15.", "rank 1 has not come as far"));
    kill(victim, SIGKILL);
}
