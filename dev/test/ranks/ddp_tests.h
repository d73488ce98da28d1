// ddp_tests.h: what makes processes the ranks of one run: launchers' variables, the rendezvous of ranks without MPI,
// the watchdog, heartbeats. Each test forks processes and looks at exit statuses and at what each printed. What needs
// the built program or mpirun is in launch_tests.h and fault_tests.h.
#pragma once
#include <limits>

#include "../../../ddp.cuh"
#include "../../../lib/run/rendezvous.h"
#include "../program/program.h"

namespace ranks {

// Of all variables that launchers set those of the list, NAME=VALUE;NAME=VALUE; the later counts, a NAME alone is none.
inline void set_launch_variables(const std::string& variables) {
    std::vector<std::string> names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"};
    for (char** e = environ; *e; e++) {
        const std::string name = std::string(*e).substr(0, std::string(*e).find('='));
        for (const char* prefix : {"PMI_", "PMIX_", "OMPI_", "SLURM_", "TORCHELASTIC_"})
            if (name.compare(0, std::strlen(prefix), prefix) == 0) names.push_back(name);
    }
    for (const std::string& name : names) unsetenv(name.c_str());
    std::istringstream list(variables);
    for (std::string name; std::getline(list, name, ';');) {
        const size_t equals = name.find('=');
        if (equals == std::string::npos) unsetenv(name.c_str());
        else setenv(name.substr(0, equals).c_str(), name.c_str() + equals + 1, 1);
    }
}

// Another one each time, below those that systems hand out; test programs that run side by side have 200 each.
inline int free_port() {
    static int next = 10000 + int(getpid() % 100) * 200;
    for (;; next++) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in at = {};
        at.sin_family = AF_INET;
        at.sin_port = htons(uint16_t(next));
        const bool free = bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0;
        close(fd);
        if (free) return next++;
    }
}

// The processes of one test. A body returns its exit status; an Error is printed, as in train_nsa's main.
struct Processes {
    TempFolder folder;
    std::vector<pid_t> pids;
    std::vector<program::Result> ended;  // status -1: it runs

    ~Processes() {
        for (size_t i = 0; i < pids.size(); i++)
            if (i >= ended.size() || ended[i].status < 0) {
                kill(pids[i], SIGKILL);
                waitpid(pids[i], nullptr, 0);
            }
    }

    void start(const std::string& variables, const std::function<int()>& body) {
        const std::string err = folder.file("err" + std::to_string(pids.size()));
        std::fflush(nullptr);
        const pid_t pid = fork();
        if (pid < 0) fail("fork: %s", std::strerror(errno));
        if (pid == 0) {
            const int fd = open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666), null = open("/dev/null", O_RDWR);
            dup2(fd, 2);
            dup2(null, 1);
            dup2(null, 0);
            set_launch_variables(variables);
            int status;
            try {
                status = body();
            } catch (const Error& e) {
                std::fprintf(stderr, "error: %s\n", e.what());
                status = e.status;
            }
            std::_Exit(status);
        }
        pids.push_back(pid);
    }

    std::string err(size_t i) const { return read_file(folder.file("err" + std::to_string(i))); }

    // Until the process has printed this to stderr, or 10 s.
    bool wait_for(size_t i, const std::string& text) const {
        for (int wait = 0; wait < 1000; wait++, usleep(10000))
            if (file_exists(folder.file("err" + std::to_string(i))) && err(i).find(text) != std::string::npos)
                return true;
        return false;
    }

    // Waits for all processes. Returns the seconds it took.
    double wait(double limit = 20) {
        const double start = seconds_now();
        ended.resize(pids.size(), program::Result{-1});
        for (bool some_run = true; some_run; usleep(2000)) {
            some_run = false;
            const bool late = seconds_now() - start > limit;
            for (size_t i = 0; i < pids.size(); i++) {
                int status = 0;
                if (ended[i].status >= 0) continue;
                if (late) kill(pids[i], SIGKILL);
                if (waitpid(pids[i], &status, late ? 0 : WNOHANG) == 0) {
                    some_run = true;
                    continue;
                }
                ended[i].seconds = seconds_now() - start;
                ended[i].status = late ? 1000 : program::exit_status(status);
                ended[i].err = err(i);
            }
        }
        return seconds_now() - start;
    }
};

inline size_t count_of(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) n++;
    return n;
}

// It ended with this status and printed one line, which holds all the words.
inline void check_line(const program::Result& e, int status, const std::vector<std::string>& words) {
    tests().checks++;
    bool ok = e.status == status && count_of(e.err, "\n") == 1;
    for (const std::string& w : words) ok = ok && holds(e.err, w);
    if (!ok)
        check_failed(__FILE__, __LINE__, "status %d, '%s'; expected status %d and one line with '%s' ...", e.status,
                     e.err, status, words[0]);
}

// In a rank: a check that fails is printed, and the rank ends.
#define RANK_CHECK(condition)                                                         \
    do {                                                                              \
        if (!(condition)) fail("%s:%d: expected %s", __FILE__, __LINE__, #condition); \
    } while (0)

template <class T>
T value_of(int rank, size_t i) {
    return T(int(random_bits(7, random_stream(RANDOM_TEST, uint64_t(rank)), i) % 2001) - 1000);
}

// Whole numbers below 1000 a rank: sums of up to 16 ranks are exact in fp32. Then fractions, against a sum in fp64.
template <class T>
void check_sum(const World& world, size_t count) {
    std::vector<T> x(count + 1, T(77)), fractions(count);  // one element behind the end must stay
    for (size_t i = 0; i < count; i++)
        x[i] = value_of<T>(world.rank, i), fractions[i] = value_of<T>(world.rank, i) / T(997);
    world.sum(x.data(), count), world.sum(fractions.data(), count);
    for (size_t i = 0; i < count; i++) {
        T expected = 0;
        double expected_fraction = 0, magnitude = 0;
        for (int r = 0; r < world.size; r++) {
            expected += value_of<T>(r, i);
            expected_fraction += double(value_of<T>(r, i) / T(997)),
                magnitude += std::fabs(double(value_of<T>(r, i) / T(997)));
        }
        RANK_CHECK(x[i] == expected);
        // each of size - 1 additions rounds to half a unit of at most the sum of magnitudes
        RANK_CHECK(std::fabs(double(fractions[i]) - expected_fraction) <=
                   world.size * magnitude * double(std::numeric_limits<T>::epsilon()));
    }
    RANK_CHECK(x[count] == T(77));
    const std::string bytes(reinterpret_cast<const char*>(fractions.data()), count * sizeof(T));
    if (count < 20000) RANK_CHECK(world.gather(bytes)[0] == bytes);
    require_same(world, "the sum's bits: " + std::to_string(std::hash<std::string>()(bytes)), "");
}

inline int collectives(World& world) {
    const int N = world.size, me = world.rank;
    for (const size_t count : {size_t(0), size_t(1), size_t(7), size_t(8192), size_t(8193), size_t(100003)})
        check_sum<float>(world, count), check_sum<double>(world, count);
    check_sum<float>(world, 1000000 + 3);
    RANK_CHECK(world.sum(double(me + 1)) == N * (N + 1) / 2);

    const std::vector<std::string> texts = world.gather(std::string(size_t(me) * 1000, char('0' + me)));
    RANK_CHECK(int(texts.size()) == N);
    for (int r = 0; r < N; r++) RANK_CHECK(texts[size_t(r)] == std::string(size_t(r) * 1000, char('0' + r)));

    world.barrier();
    return 0;
}

}  // namespace ranks

// ---------------------------------------------------------------------------------------------------------------------
// What launchers say.

// Every kind of launch, read in a process of its own so that the variables of the tests stay as they are; by a build
// whose MPI has this name.
TEST(ddp_launch_variables) {
    ranks::Processes processes;
    const auto read_by = [&](const std::string& variables, const char* mpi) -> const program::Result& {
        processes.start(variables, [&] {
            const Launch l = read_launch(mpi);
            std::fprintf(stderr, "%s%s rank %d of %d local %d at %s:%d run '%s'\n", l.launcher.c_str(),
                         l.by_mpi ? " MPI" : "", l.rank, l.size, l.local_rank, l.address.c_str(), l.port,
                         l.run.c_str());
            return 0;
        });
        processes.wait();
        return processes.ended.back();
    };
    const auto reads = [&](const std::string& variables, const std::string& expected, const char* mpi = "") {
        ranks::check_line(read_by(variables, mpi), 0, {expected + "\n"});
    };
    const auto refused = [&](const std::string& variables, const std::string& words, const char* mpi = "") {
        ranks::check_line(read_by(variables, mpi), 2, {words});
    };
    const std::string alone = "one process rank 0 of 1 local -1 at :0 run ''", two = "RANK=0;WORLD_SIZE=2;";
    reads("", alone);
    reads("MASTER_ADDR=x;MASTER_PORT=1", alone);
    reads("RANK=2;WORLD_SIZE=4", "RANK/WORLD_SIZE rank 2 of 4 local -1 at 127.0.0.1:29500 run ''");
    reads("RANK=5;WORLD_SIZE=8;LOCAL_RANK=1;MASTER_ADDR=n1;MASTER_PORT=777",
          "RANK/WORLD_SIZE rank 5 of 8 local 1 at n1:777 run ''");
    reads(two + "RANK=1;MASTER_ADDR=n1;MASTER_PORT=777;TORCHELASTIC_USE_AGENT_STORE=True;TORCHELASTIC_RUN_ID=r7",
          "RANK/WORLD_SIZE rank 1 of 2 local -1 at n1:778 run 'r7'");
    reads(two + "PMI_SIZE=1;PMIX_RANK=0;SLURM_STEP_ID=0;MASTER_ADDR=n1;TORCHELASTIC_RUN_ID=r7",  // in an srun
          "RANK/WORLD_SIZE rank 0 of 2 local -1 at n1:29500 run 'r7'", "MPICH");

    // mpirun: what MPI sees counts; without MPI it is refused, by rank 0 at once.
    for (const char* by : {"PMI_SIZE=4;PMI_RANK=0", "OMPI_COMM_WORLD_SIZE=4;PMIX_RANK=0"}) {
        reads(by, "mpirun MPI rank 0 of 4 local -1 at :0 run ''", "MPICH Version: 4.0");
        refused(by, "built without MPI and would run as 4 independent copies");
    }
    reads("PMI_SIZE=1;PMI_RANK=0", "mpirun rank 0 of 1 local -1 at :0 run ''");
    refused("PMI_SIZE=4;PMI_RANK=3", "error: rank 3 on " + host_name());
    CHECK(processes.ended.back().seconds > 1);

    // srun with a PMI and without one.
    const std::string slurm =
                          "SLURM_STEP_ID=2;SLURM_JOB_ID=100;SLURM_NTASKS=4;SLURM_PROCID=0;SLURM_LOCALID=0;"
                          "SLURM_STEP_NUM_NODES=1;",
                      as_slurm = "srun rank 0 of 4 local 0 at 127.0.0.1:10702 run '100.2'";
    reads(slurm, as_slurm);
    reads(slurm + "PMI_SIZE=4", as_slurm);  // a build without MPI takes Slurm's own
    reads(slurm + "PMI_SIZE=4", "srun MPI rank 0 of 4 local -1 at :0 run ''", "MPICH Version: 4.0");
    reads(slurm + "PMIX_RANK=0", "srun MPI rank 0 of 4 local -1 at :0 run ''", "Open MPI v4.1.4");
    reads("PMIX_RANK=1", "mpirun MPI rank 0 of 0 local -1 at :0 run ''", "Open MPI v5.0");
    refused(slurm, "srun --mpi=pmi2 ./train_nsa", "MPICH Version: 4.0");
    refused(slurm, "srun --mpi=pmix ./train_nsa", "Open MPI v4.1.4");
    reads(slurm + "SLURM_STEP_NUM_NODES=2;MASTER_ADDR=10.0.0.1;MASTER_PORT=5000",
          "srun rank 0 of 4 local 0 at 10.0.0.1:5000 run '100.2'");
    // In a Slurm job too, mpirun is mpirun.
    for (const char* by : {"PMI_SIZE=4;PMI_RANK=0;MPI_LOCALNRANKS=2", "OMPI_COMM_WORLD_SIZE=4;PMIX_RANK=0"})
        reads(std::string("SLURM_STEP_ID=0;") + by, "mpirun MPI rank 0 of 4 local -1 at :0 run ''", "MPICH 4.0");
    // The interactive step of salloc, the tasks of a whole job, and steps that are none.
    for (const char* mpi : {"", "MPICH"}) {
        for (const char* no_step : {"SLURM_STEP_ID", "SLURM_STEP_ID=4294967290", "SLURM_NTASKS=1", "SLURM_STEP_ID=abc",
                                    "SLURM_STEP_ID=", "SLURM_STEP_ID=-1", "SLURM_STEP_ID=4294967295"})
            reads(slurm + no_step, alone, mpi);
        for (const char* tasks : {"SLURM_NTASKS=8192", "SLURM_NTASKS=", "SLURM_NTASKS=x"}) reads(tasks, alone, mpi);
    }

    for (const char* bad : {"", "x", "-1", "1x", " 1", "1.5", "99999999999999999999"})
        refused(two + "RANK=" + bad, "RANK='" + std::string(bad) + "'");
    const std::pair<std::string, const char*> bad[] = {{"RANK=0", "WORLD_SIZE is not"},
                                                       {"WORLD_SIZE=2", "RANK is not"},
                                                       {two + "RANK=2", "RANK=2 and WORLD_SIZE=2"},
                                                       {two + "WORLD_SIZE=0", "WORLD_SIZE='0'"},
                                                       {two + "MASTER_PORT=65536", "MASTER_PORT='65536'"},
                                                       {two + "LOCAL_RANK=1", "LOCAL_RANK=1 and RANK=0"},
                                                       {two + "RANK=1;LOCAL_RANK=0", "MASTER_ADDR is not"},
                                                       {slurm + "SLURM_PROCID", "SLURM_PROCID is not"},
                                                       {slurm + "SLURM_PROCID=4", "SLURM_PROCID=4"},
                                                       {slurm + "SLURM_LOCALID=9", "SLURM_LOCALID=9"},
                                                       {slurm + "SLURM_NTASKS=many", "SLURM_NTASKS='many'"},
                                                       {slurm + "SLURM_STEP_NUM_NODES=2", "scontrol show hostnames"}};
    for (const auto& [variables, words] : bad) refused(variables, words);
}

// Ranks that only NCCL could serve, where it cannot: refused before they wait for each other.
TEST(ddp_ranks_without_mpi_or_nccl_are_refused) {
    ranks::Processes processes;
    for (const char* variables :
         {"RANK=0;WORLD_SIZE=4", "SLURM_STEP_ID=2;SLURM_JOB_ID=1;SLURM_NTASKS=3;SLURM_PROCID=0;SLURM_STEP_NUM_NODES=1",
          "RANK=0;WORLD_SIZE=1"})  // alone it needs neither
        processes.start(variables, [] {
            const World world(read_launch(""));
            return 0;
        });
    CHECK(processes.wait() < 5);
    ranks::check_line(processes.ended[0], 2, {"RANK/WORLD_SIZE makes", "mpirun -np 4 ./train_nsa", "NCCL"});
    ranks::check_line(processes.ended[1], 2, {"srun makes", "mpirun -np 3 ./train_nsa", "NCCL"});
    CHECK_EQUAL(processes.ended[2].status, 0);
}

TEST(ddp_one_process_opens_nothing) {
    ranks::Processes processes;
    processes.start("", [] {
        const auto descriptors = [] { return glob_files("/proc/self/fd/*").size(); };
        const size_t before = descriptors();
        World world;
        RANK_CHECK(!world.has_mpi && world.size == 1 && world.local_size == 1 && world.launcher == "one process" &&
                   descriptors() == before);
        float x[2] = {1, 2};
        world.sum(x, 2);
        world.barrier();
        require_same(world, "a", "b");
        RANK_CHECK(x[0] == 1 && x[1] == 2 && world.sum(3.0) == 3 &&
                   world.gather("text") == std::vector<std::string>{"text"});
        RANK_CHECK(descriptors() == before);
        world.finish();
        return 0;
    });
    processes.wait();
    CHECK_EQUAL(processes.ended[0].status, 0);
    CHECK_EQUAL(processes.ended[0].err, std::string());
}

// ---------------------------------------------------------------------------------------------------------------------
// The rendezvous of ranks without MPI.

namespace ranks {

// A rank that asks for the id, or gives it out, and prints it.
inline int meet(int rank, int size, const std::string& address, int port, const std::string& run, double seconds) {
    Launch launch;
    launch.rank = rank;
    launch.size = size;
    launch.address = address;
    launch.port = port;
    launch.run = run;
    char id[128] = "";
    if (rank == 0) std::snprintf(id, sizeof id, "id of %s", run.c_str());
    rendezvous::share_id(id, launch, seconds);
    std::fprintf(stderr, "%s\n", id);
    return 0;
}
}  // namespace ranks

TEST(ddp_rendezvous_by_every_kind_of_address) {
    std::vector<std::string> addresses = {"127.0.0.1", "localhost"};
    if (file_exists("/proc/net/if_inet6") && !read_file("/proc/net/if_inet6").empty())
        addresses.insert(addresses.end(), {"::1", "[::1]"});
    else skip("a rendezvous by IPv6: this machine has none");
    for (const std::string& address : addresses) {
        ranks::Processes processes;
        const int port = ranks::free_port();
        for (const int rank : {2, 0, 1})
            processes.start("", [=] { return ranks::meet(rank, 3, address, port, "run", 10); });
        processes.wait();
        for (const program::Result& e : processes.ended) CHECK_EQUAL(e.err, std::string("id of run\n"));
    }
}

// Strangers do not disturb: a browser, one that says nothing and goes, ranks of another run on the same port.
TEST(ddp_rendezvous_with_strangers) {
    ranks::Processes processes;
    const int port = ranks::free_port();
    const auto rank = [&](int r, const std::string& run, double seconds) {
        processes.start("", [=] { return ranks::meet(r, 3, "127.0.0.1", port, run, seconds); });
    };
    rank(0, "mine", 15);
    for (const char* said : {"GET / HTTP/1.1\r\nHost: a\r\nAccept: everything\r\n\r\n", ""}) {
        sockaddr_in at = {};
        at.sin_family = AF_INET;
        at.sin_port = htons(uint16_t(port));
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const rendezvous::Socket s(socket(AF_INET, SOCK_STREAM, 0));
        int connected = -1;
        for (int wait = 0; wait < 500 && connected != 0; wait++, usleep(10000))
            connected = connect(s.fd, reinterpret_cast<sockaddr*>(&at), sizeof at);
        REQUIRE(connected == 0);
        CHECK(rendezvous::send_all(s.fd, said, std::strlen(said)));
    }
    rank(1, "another", 2);
    rank(0, "another", 2);
    for (const size_t stranger : {1, 2}) processes.wait_for(stranger, "\n");
    rank(1, "mine", 15);
    processes.wait_for(3, "\n");
    rank(1, "mine", 15);  // a second time
    processes.wait_for(4, "\n");
    rank(2, "mine", 15);
    processes.wait(30);
    for (const size_t i : {0, 3, 5}) CHECK_EQUAL(processes.ended[i].err, std::string("id of mine\n"));
    ranks::check_line(processes.ended[1], 1, {"belongs to another run", "MASTER_PORT"});
    ranks::check_line(processes.ended[2], 1, {format_text("cannot listen on port %d", port), "MASTER_PORT"});
    ranks::check_line(processes.ended[4], 1, {"has a rank 1 already"});
}

TEST(ddp_rendezvous_that_fails) {
    ranks::Processes processes;
    const int port = ranks::free_port(), nobody = ranks::free_port();
    processes.start("", [=] { return ranks::meet(0, 4, "127.0.0.1", port, "run", 2); });
    processes.start("", [=] { return ranks::meet(2, 4, "127.0.0.1", port, "run", 2); });
    processes.start("", [=] { return ranks::meet(1, 2, "127.0.0.1", nobody, "run", 1); });
    CHECK(processes.wait() < 10);
    ranks::check_line(processes.ended[0], 1, {"waited 2 s at 127.0.0.1", "2 of 4 ranks never came"});
    CHECK_EQUAL(processes.ended[1].err, std::string("id of run\n"));
    ranks::check_line(processes.ended[2], 1,
                      {format_text("rank 0 at 127.0.0.1:%d", nobody), "Connection refused", "waited 1 s"});
}

// ---------------------------------------------------------------------------------------------------------------------
// The watchdog.

namespace ranks {

// A rank's watchdog without a World; it waits two seconds longer for others than for itself.
struct Watched {
    Watchdog watchdog;
    Watched(int rank, int size, double limit, const std::string& run = "") {
        watchdog.patience_with_others = 2;
        watchdog.call_it(format_text("rank %d on here", rank));
        watchdog.start(limit, size);
        if (!run.empty()) watchdog.write_heartbeats(run, rank);
    }
};
}  // namespace ranks

inline void stand_still(int seconds) {
    for (int i = 0; i < seconds * 100; i++) usleep(10000);
}

// The rank that stands still speaks first, in its heartbeat file too; those that wait for it give up later, if nobody
// has ended them, and name it by the heartbeats.
TEST(ddp_a_stalled_rank_speaks_first) {
    TempFolder folder;
    ranks::Processes processes;
    for (const int rank : {0, 1, 2})
        processes.start("", [rank, run = folder.path] {
            ranks::Watched w(rank, 3, 2, run);
            w.watchdog.note_phase(4, "forward");
            w.watchdog.step_done(4, 0.1, 5);
            w.watchdog.note_phase(5, rank == 1 ? "backward" : "waiting for the other ranks");
            stand_still(20);
            return 0;
        });
    CHECK(processes.wait(15) < 9);
    const std::string& err = processes.ended[1].err;
    ranks::check_line(processes.ended[1], 1,
                      {"rank 1 on here has made no progress for 2.", "at step 5 in 'backward' (--stall-timeout 2)"});
    const std::string lines = read_file(folder.file("heartbeat_rank1.jsonl")),
                      last = lines.substr(lines.rfind("{\"time\""));
    CHECK_EQUAL(parse_json(last, "a heartbeat").string("text", "a heartbeat"), err);
    for (const size_t waiting : {0, 2}) {
        CHECK(processes.ended[waiting].seconds > processes.ended[1].seconds + 1);
        ranks::check_line(processes.ended[waiting], 1,
                          {format_text("rank %d on here has waited 4.", waiting), "for the other ranks at step 5",
                           "rank 1 has not come as far, by the heartbeats"});
    }
    for (const program::Result& e : processes.ended) CHECK_EQUAL(e.status, 1);
}

// A collective that never ends, whatever the phase is called, and before the first step; nobody is behind.
TEST(ddp_ranks_that_wait_for_each_other) {
    ranks::Processes processes;
    for (const bool begun : {true, false})
        processes.start("", [=] {
            ranks::Watched w(0, 2, 1);
            if (begun) w.watchdog.note_phase(9, "evaluation");
            const Watchdog::Waiting waiting(w.watchdog);
            sleep(20);
            return 0;
        });
    CHECK(processes.wait(15) < 8);
    ranks::check_line(processes.ended[0], 1, {"has waited 3.", "at step 9 in 'evaluation'", "they do not do the same"});
    ranks::check_line(processes.ended[1], 1, {"has waited 3.", "at the start"});
}

// Traffic that is slow but arrives, layers that take long but make progress, and a rank that waits for those; a
// checkpoint that takes longer than the limit, on the rank that writes it and on one that waits.
TEST(ddp_slow_is_no_alarm) {
    ranks::Processes processes;
    processes.start("", [] {
        ranks::Watched w(0, 2, 1);
        w.watchdog.note_phase(3, "waiting for the other ranks");
        for (int i = 0; i < 14; i++) {
            const Watchdog::Waiting waiting(w.watchdog);
            usleep(300000);
        }
        w.watchdog.note_phase(4, "waiting for the other ranks");
        usleep(2000000);  // longer than the limit, shorter than with the patience
        return 0;
    });
    processes.start("", [] {
        ranks::Watched w(0, 1, 1);
        usleep(1500000);  // not judged before the first progress
        for (int layer = 0; layer < 12; layer++) {
            w.watchdog.note_phase(1, "forward");
            usleep(300000);
        }
        return 0;
    });
    for (const bool waits : {true, false})
        processes.start("", [=] {
            ranks::Watched w(0, 2, 1);
            w.watchdog.note_phase(5, "checkpoint");
            std::unique_ptr<Watchdog::Waiting> waiting;
            if (waits) waiting = std::make_unique<Watchdog::Waiting>(w.watchdog);
            usleep(4500000);
            return 0;
        });
    processes.wait(15);
    for (const program::Result& e : processes.ended) CHECK(e.status == 0 && e.err.empty());
}

// Ctrl-Z and fg: the process stands still for longer than the limit, and is not to blame.
TEST(ddp_a_pause_is_no_alarm) {
    ranks::Processes processes;
    processes.start("", [] {
        ranks::Watched w(0, 1, 1);
        std::fprintf(stderr, "started\n");
        for (int step = 1; step <= 10; step++) {
            w.watchdog.note_phase(step, "forward");
            usleep(100000);
        }
        return 0;
    });
    CHECK(processes.wait_for(0, "started"));
    kill(processes.pids[0], SIGSTOP);
    usleep(2000000);
    kill(processes.pids[0], SIGCONT);
    processes.wait(15);
    CHECK_EQUAL(processes.ended[0].status, 0);
    CHECK_EQUAL(processes.ended[0].err, std::string("started\n"));
}

TEST(ddp_one_process_has_a_watchdog) {
    ranks::Processes processes;
    processes.start("", [] {
        ranks::Watched w(0, 1, 1);
        w.watchdog.note_phase(1, "waiting for the other ranks");  // there are none
        stand_still(20);
        return 0;
    });
    processes.start("", [] {  // and none that is not asked for
        ranks::Watched w(0, 1, 0);
        w.watchdog.note_phase(1, "forward");
        usleep(1500000);
        return 0;
    });
    CHECK(processes.wait(15) < 8);
    ranks::check_line(processes.ended[0], 1, {"at step 1 in 'waiting for the other ranks' (--stall-timeout 1)"});
    CHECK(processes.ended[1].status == 0 && processes.ended[1].err.empty());
}

TEST(ddp_heartbeat_file) {
    TempFolder folder;
    ranks::Processes processes;
    const std::string name = "/heartbeat_rank0.jsonl", path = folder.path + name, full = folder.file("full");
    write_file(path, "{}\n");  // of an earlier run, which stays
    make_folders(full);
    CHECK_EQUAL(symlink("/dev/full", (full + name).c_str()), 0);
    for (const std::string& run : {folder.path, full, folder.file("no/such")})
        processes.start("", [=] {
            ranks::Watched w(0, 1, 5, run);
            w.watchdog.note_phase(1, "forward");
            w.watchdog.step_done(1, 0.25, 5.5);
            w.watchdog.note_phase(2, "update");
            w.watchdog.step_done(2, 1.5, std::nan(""));
            return 0;
        });
    processes.wait();
    std::istringstream lines(read_file(path));
    std::string line, first, second;
    std::getline(lines, line), std::getline(lines, first), std::getline(lines, second);
    CHECK(line == "{}" && lines.peek() == EOF);
    const Json one = parse_json(first, "heartbeat"), two = parse_json(second, "heartbeat");
    const auto number = [&](const char* field) { return one.number(field, "heartbeat"); };
    CHECK(number("step") == 1 && number("rank") == 0 && number("ms") == 250 && number("loss") == 5.5);
    CHECK_EQUAL(one.string("phase", "heartbeat"), std::string("forward"));
    CHECK(number("memory_mib") > 0.1 && number("memory_mib") < 1e6);
    CHECK_NEAR(number("time"), double(std::time(nullptr)), 60);
    CHECK(holds(second, "\"loss\":null") && two.number("step", "heartbeat") == 2);
    write_file(path, first + "\n" + second.substr(0, 12));  // while it is written
    CHECK_EQUAL(last_line(path), first);
    for (const program::Result& e : processes.ended) CHECK_EQUAL(e.status, 0);
    CHECK_EQUAL(processes.ended[0].err, std::string());
    CHECK_EQUAL(processes.ended[1].err, "train_nsa: warning: cannot write the heartbeat file " + full + name +
                                            ": No space left on device; training goes on\n");
    ranks::check_line(processes.ended[2], 0, {"No such file"});
}

TEST(ddp_binary_digest) {
    const std::string program = read_file("/proc/self/exe");
    CHECK_EQUAL(binary_digest(),
                format_text("%08x of %d bytes", crc32c(0, program.data(), program.size()), program.size()));
}
