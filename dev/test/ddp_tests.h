// ddp_tests.h: ranks as real processes. Each test forks them, with RANK and WORLD_SIZE in their environment, lets them
// meet over the star of TCP connections, and looks at exit statuses and at what each printed: collectives against plain
// loops, strangers at the rendezvous, and every way in which a rank can be lost. What needs the built program or mpirun
// is in launch_tests.h and fault_tests.h.
#pragma once
#include <array>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>

#include "harness.h"
#include "../../ddp.cuh"
#include "../../lib/json.h"

namespace ranks {

using Variables = std::vector<std::pair<std::string, std::string>>;

// Exactly these of all variables that launchers set.
inline void set_launch_variables(const Variables& variables) {
    std::vector<std::string> names = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                      "MASTER_ADDR", "MASTER_PORT"};
    for (char** e = environ; *e; e++) {
        const std::string name = std::string(*e).substr(0, std::string(*e).find('='));
        for (const char* prefix : {"PMI_", "PMIX_", "OMPI_", "SLURM_", "TORCHELASTIC_"})
            if (name.compare(0, std::strlen(prefix), prefix) == 0) names.push_back(name);
    }
    for (const std::string& name : names) unsetenv(name.c_str());
    for (const auto& v : variables) setenv(v.first.c_str(), v.second.c_str(), 1);
}

// Another one each time, below those that systems hand out; test programs that run side by side have 200 each.
inline int free_port() {
    for (static int next = 10000 + int(getpid() % 100) * 200;;) {
        int port = next++;
        const auto listens = [&] { rendezvous::listen_on(port, true, port); };
        if (error_of(listens).empty()) return port;
    }
}

struct Ended {
    int status = -1;  // of exit; 128 + number of the signal that ended it; 1000: it ran past the limit and was killed
    std::string err;
};

// The processes of one test. A body returns its exit status; an Error is printed and ends all ranks, as in train_nsa's
// main.
struct Processes {
    TempFolder folder;
    std::vector<pid_t> pids;
    std::vector<Ended> ended;

    ~Processes() {
        for (size_t i = 0; i < pids.size(); i++)
            if (i >= ended.size() || ended[i].status < 0) kill(pids[i], SIGKILL), waitpid(pids[i], nullptr, 0);
    }

    void start(const Variables& variables, const std::function<int()>& body) {
        const std::string err = folder.file("err" + std::to_string(pids.size()));
        std::fflush(nullptr);
        const pid_t pid = fork();
        if (pid < 0) fail("fork: %s", std::strerror(errno));
        if (pid == 0) {
            const int fd = open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666), null = open("/dev/null", O_RDWR);
            dup2(fd, 2), dup2(null, 1), dup2(null, 0);
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

    // A world of `size` ranks on this machine, all with the same body.
    void start_world(int size, const std::function<int(World&)>& body, double start_timeout = 20,
                     const Variables& more = {}) {
        const int port = free_port();
        for (int r = 0; r < size; r++) start_rank(r, size, port, body, start_timeout, more);
    }
    void start_rank(int rank, int size, int port, const std::function<int(World&)>& body, double start_timeout = 20,
                    const Variables& more = {}) {
        Variables variables = {{"RANK", std::to_string(rank)},
                               {"WORLD_SIZE", std::to_string(size)},
                               {"MASTER_PORT", std::to_string(port)}};
        variables.insert(variables.end(), more.begin(), more.end());
        start(variables, [=] {
            World world(read_launch(), start_timeout);
            try {
                const int status = body(world);
                if (status == 0) world.finish();
                else world.abort(status);
                return status;
            } catch (const Error& e) {
                std::fprintf(stderr, "error: %s\n", e.what());
                world.abort(e.status);
            }
        });
    }

    std::string err(size_t i) const { return read_file(folder.file("err" + std::to_string(i))); }

    // Until the process has printed this to stderr, or 10 s.
    bool wait_for(size_t i, const std::string& text) const {
        for (int wait = 0; wait < 1000; wait++, usleep(10000))
            if (file_exists(folder.file("err" + std::to_string(i))) && err(i).find(text) != std::string::npos)
                return true;
        return false;
    }

    // Waits for all processes but those in `except`, which are killed then. Returns the seconds it took.
    double wait(double limit = 20, const std::set<size_t>& except = {}) {
        const double start = seconds_now();
        ended.resize(pids.size());
        for (size_t i = 0; i < pids.size(); i++) {
            int status = 0;
            if (ended[i].status >= 0 || except.count(i)) continue;
            while (waitpid(pids[i], &status, WNOHANG) == 0 && seconds_now() - start < limit) usleep(2000);
            if (seconds_now() - start >= limit)
                kill(pids[i], SIGKILL), waitpid(pids[i], &status, 0), ended[i].status = 1000;
            else ended[i].status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        const double seconds = seconds_now() - start;
        for (const size_t i : except) {
            int status = 0;
            kill(pids[i], SIGKILL), waitpid(pids[i], &status, 0);
            ended[i].status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        for (size_t i = 0; i < pids.size(); i++) ended[i].err = err(i);
        return seconds;
    }

    // What all processes printed, without the lines that hold `without`.
    std::string all_err(const std::string& without = "\n\n") const {
        std::string all;
        for (const Ended& e : ended) {
            std::istringstream lines(e.err);
            for (std::string line; std::getline(lines, line);)
                if (line.find(without) == std::string::npos) all += line + "\n";
        }
        return all;
    }
};

inline size_t count_of(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) n++;
    return n;
}

// It ended with this status and printed one line, which holds all the words.
inline void check_line(const Ended& e, int status, const std::vector<std::string>& words) {
    tests().checks++;
    bool ok = e.status == status && count_of(e.err, "\n") == 1;
    for (const std::string& w : words) ok = ok && e.err.find(w) != std::string::npos;
    if (!ok)
        check_failed(__FILE__, __LINE__, "status %d, '%s'; expected status %d and one line with '%s' ...", e.status,
                     e.err.c_str(), status, words[0].c_str());
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
    world.require_same("the sum's bits: " + std::to_string(std::hash<std::string>()(bytes)), "");
}

inline int collectives(World& world) {
    const int N = world.size, me = world.rank;
    for (const size_t count : {size_t(0), size_t(1), size_t(7), size_t(8192), size_t(8193), size_t(100003)})
        check_sum<float>(world, count), check_sum<double>(world, count);
    check_sum<float>(world, 1000000 + 3);
    RANK_CHECK(world.sum(double(me + 1)) == N * (N + 1) / 2);

    for (int root = 0; root < N; root++)
        for (const size_t bytes : {size_t(0), size_t(1), size_t(1000001)}) {
            std::string x(bytes, char('a' + me));
            world.broadcast(&x[0], bytes, root);
            RANK_CHECK(x == std::string(bytes, char('a' + root)));
        }

    const std::vector<std::string> texts = world.gather(std::string(size_t(me) * 1000, char('0' + me)));
    RANK_CHECK(int(texts.size()) == N);
    for (int r = 0; r < N; r++) RANK_CHECK(texts[size_t(r)] == std::string(size_t(r) * 1000, char('0' + r)));

    world.barrier();
    return 0;
}

// Forward, then a sum, forever: a training loop. Prints "started" after the first step.
inline int train_forever(World& world, double stall_timeout,
                         const std::function<void(World&, Watchdog&, int64_t)>& in_forward) {
    Watchdog watchdog(world, {stall_timeout, ""});
    for (int64_t step = 1;; step++) {
        watchdog.progress(step, "forward");
        in_forward(world, watchdog, step);
        usleep(20000);
        watchdog.progress(step, "waiting for the other ranks");
        world.sum(1.0);
        if (step == 1) std::fprintf(stderr, "started\n");
    }
}

}  // namespace ranks

TEST(ddp_host_lists) {
    using Names = std::vector<std::string>;
    const auto expand = [](const char* list, const Names& expected) {
        const Names found = expand_host_list(list);
        tests().checks++;
        if (found == expected) return;
        std::string all;
        for (const std::string& f : found) all += f + " ";
        check_failed(__FILE__, __LINE__, "%s became %s", list, all.c_str());
    };
    expand("node1", {"node1"});
    expand("a,b-2.example.org,c", {"a", "b-2.example.org", "c"});
    expand("gpu[01-03,7],login", {"gpu01", "gpu02", "gpu03", "gpu7", "login"});
    expand("n[098-101]", {"n098", "n099", "n100", "n101"});
    expand("n[9-11]", {"n9", "n10", "n11"});
    expand("rack[1-2]n[08-09]x", {"rack1n08x", "rack1n09x", "rack2n08x", "rack2n09x"});
    for (const char* bad : {"", ",", "a,", "a[", "a[]", "a[1", "a[1-", "a[1-]", "a[3-1]", "a[x]", "a]", "a[1,]",
                            "a[1-999999999]", "a[0-65535]b[0-65535]", "a[1111111111]"})
        CHECK_FAILS(2, "MASTER_ADDR", expand_host_list(bad));
}

// Every kind of launch, read in a process of its own so that the variables of the tests stay as they are.
TEST(ddp_launch_variables) {
    ranks::Processes processes;
    const auto reads = [&](const ranks::Variables& variables, const std::string& expected) {
        const size_t i = processes.pids.size();
        processes.start(variables, [] {
            const Launch l = read_launch();
            std::fprintf(stderr, "%s rank %d of %d local %d of %d at %s:%d run '%s'\n", l.launcher.c_str(), l.rank,
                         l.size, l.local_rank, l.local_size, l.address.c_str(), l.port, l.run.c_str());
            return 0;
        });
        processes.wait();
        tests().checks++;
        if (processes.ended[i].err != expected + "\n" || processes.ended[i].status != 0)
            check_failed(__FILE__, __LINE__, "found '%s', expected '%s'", processes.ended[i].err.c_str(),
                         expected.c_str());
    };
    const auto refused = [&](const ranks::Variables& variables, const std::string& words) {
        const size_t i = processes.pids.size();
        processes.start(variables, [] { return read_launch(), 0; });
        processes.wait();
        ranks::check_line(processes.ended[i], 2, {words});
    };
    reads({}, "one process rank 0 of 1 local -1 of -1 at :0 run ''");
    reads({{"MASTER_ADDR", "x"}, {"MASTER_PORT", "1"}}, "one process rank 0 of 1 local -1 of -1 at :0 run ''");
    reads({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "RANK/WORLD_SIZE rank 0 of 1 local -1 of -1 at :0 run ''");
    reads({{"RANK", "2"}, {"WORLD_SIZE", "4"}}, "RANK/WORLD_SIZE rank 2 of 4 local -1 of -1 at 127.0.0.1:29500 run ''");
    reads({{"RANK", "5"},
           {"WORLD_SIZE", "8"},
           {"LOCAL_RANK", "1"},
           {"LOCAL_WORLD_SIZE", "4"},
           {"MASTER_ADDR", "n1"},
           {"MASTER_PORT", "777"}},
          "RANK/WORLD_SIZE rank 5 of 8 local 1 of 4 at n1:777 run ''");
    reads({{"RANK", "1"},
           {"WORLD_SIZE", "2"},
           {"MASTER_ADDR", "n1"},
           {"MASTER_PORT", "777"},
           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
           {"TORCHELASTIC_RUN_ID", "r7"}},
          "RANK/WORLD_SIZE rank 1 of 2 local -1 of -1 at n1:778 run 'r7'");
    const ranks::Variables slurm = {{"SLURM_STEP_ID", "2"},
                                    {"SLURM_JOB_ID", "100"},
                                    {"SLURM_NTASKS", "4"},
                                    {"SLURM_PROCID", "3"},
                                    {"SLURM_LOCALID", "1"},
                                    {"SLURM_JOB_NODELIST", "x[1-9]"},
                                    {"SLURM_STEP_NODELIST", "n[07-08]"}};
    const auto with = [&](const std::string& name, const char* value) {
        ranks::Variables v;
        for (const auto& s : slurm)
            if (s.first != name) v.push_back(s);
        if (value) v.push_back({name, value});
        return v;
    };
    reads(slurm, "Slurm rank 3 of 4 local 1 of -1 at n07:10702 run '100.2'");
    reads(with("SLURM_STEP_NODELIST", nullptr), "Slurm rank 3 of 4 local 1 of -1 at x1:10702 run '100.2'");
    reads(with("MASTER_ADDR", "10.0.0.1"), "Slurm rank 3 of 4 local 1 of -1 at 10.0.0.1:10702 run '100.2'");
    reads(with("MASTER_PORT", "5000"), "Slurm rank 3 of 4 local 1 of -1 at n07:5000 run '100.2'");
    const std::string alone = "one process rank 0 of 1 local -1 of -1 at :0 run ''";
    reads(with("SLURM_STEP_ID", nullptr), alone);
    reads(with("SLURM_STEP_ID", "4294967290"), alone);  // the interactive step of salloc
    reads(with("SLURM_NTASKS", "1"), alone);
    reads({{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}}, "mpirun rank 0 of 1 local -1 of -1 at :0 run ''");

    refused({{"RANK", "0"}}, "WORLD_SIZE is not");
    refused({{"WORLD_SIZE", "2"}}, "RANK is not");
    refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK=2 and WORLD_SIZE=2");
    for (const char* bad : {"", "x", "-1", "1x", " 1", "1.5", "99999999999999999999"})
        refused({{"RANK", bad}, {"WORLD_SIZE", "2"}}, "RANK='" + std::string(bad) + "'");
    refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE='0'");
    refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65536"}}, "MASTER_PORT='65536'");
    refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}}, "LOCAL_WORLD_SIZE=3");
    refused({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "1"}}, "LOCAL_RANK=1");
    refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}}, "LOCAL_RANK=1 and RANK=0");
    refused({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}, "MASTER_ADDR is not");
    refused({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}}, "MASTER_ADDR is not");
    refused(with("SLURM_PROCID", nullptr), "SLURM_PROCID is not");
    refused(with("SLURM_PROCID", "4"), "SLURM_PROCID=4");
    refused(with("SLURM_LOCALID", "9"), "SLURM_LOCALID=9");
    refused(with("SLURM_NTASKS", "many"), "SLURM_NTASKS='many'");
    refused(with("SLURM_JOB_ID", nullptr), "MASTER_PORT");
    refused(with("SLURM_STEP_NODELIST", "n[07"), "node list 'n[07'");
}

// Ranks that only NCCL could serve, where it cannot: refused before they wait for each other.
TEST(ddp_ranks_without_mpi_or_nccl_are_refused) {
    ranks::Processes processes;
    const ranks::Variables no_gpu = {{"CUDA_VISIBLE_DEVICES", ""}};
    const auto refused = [&](ranks::Variables variables, const std::vector<std::string>& words) {
        variables.insert(variables.end(), no_gpu.begin(), no_gpu.end());
        const size_t i = processes.pids.size();
        processes.start(variables, [] { return World(), 0; });
        CHECK(processes.wait() < 5);
        ranks::check_line(processes.ended[i], 2, words);
    };
    refused({{"RANK", "1"}, {"WORLD_SIZE", "4"}}, {"RANK=1 and WORLD_SIZE=4", "mpirun -np 4 ./train_nsa", "NCCL"});
    refused({{"SLURM_STEP_ID", "2"},
             {"SLURM_JOB_ID", "100"},
             {"SLURM_NTASKS", "3"},
             {"SLURM_PROCID", "0"},
             {"SLURM_STEP_NODELIST", "n[07-09]"}},
            {"SLURM_PROCID=0 and SLURM_NTASKS=3", "mpirun -np 3 ./train_nsa", "NCCL"});
    processes.start({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, [] { return World(), 0; });  // alone it needs neither
    processes.wait();
    CHECK_EQUAL(processes.ended[2].status, 0);
}

TEST(ddp_one_process_opens_nothing) {
    ranks::Processes processes;
    processes.start({}, [] {
        const auto descriptors = [] { return glob_files("/proc/self/fd/*").size(); };
        const size_t before = descriptors();
        World world;
        RANK_CHECK(world.transport == Transport::NONE && world.size == 1 && world.local_size == 1 &&
                   world.launcher == "one process" && descriptors() == before);
        float x[2] = {1, 2};
        world.sum(x, 2), world.barrier(), world.broadcast(x, sizeof x, 0), world.require_same("a", "b");
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

TEST(ddp_collectives_over_the_star) {
    for (const int size : {2, 4}) {
        ranks::Processes processes;
        processes.start_world(size, ranks::collectives);
        processes.wait(30);
        for (int r = 0; r < size; r++) CHECK_EQUAL(processes.ended[size_t(r)].status, 0);
        CHECK_EQUAL(processes.all_err(), std::string());
    }
}

TEST(ddp_local_ranks) {
    ranks::Processes processes;
    processes.start_world(3, [](World& world) {
        RANK_CHECK(world.transport == Transport::STAR && world.local_rank == world.rank && world.local_size == 3 &&
                   world.hosts == std::vector<std::string>(3, host_name()));
        return 0;
    });
    processes.wait();
    CHECK_EQUAL(processes.all_err(), std::string());
    // What the launcher says counts more than what is found.
    ranks::Processes given;
    const int port = ranks::free_port();
    for (int r = 0; r < 2; r++)
        given.start_rank(r, 2, port,
                         [](World& world) {
                             RANK_CHECK(world.local_rank == 0 && world.local_size == 1);
                             return 0;
                         },
                         20, {{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}});
    given.wait();
    CHECK_EQUAL(given.all_err(), std::string());
}

TEST(ddp_strangers_are_refused) {
    ranks::Processes processes;
    const int port = ranks::free_port();
    processes.start_rank(0, 2, port, ranks::collectives);
    using namespace rendezvous;
    const auto connect_raw = [&] {
        std::string why;
        for (int wait = 0; wait < 500; wait++, usleep(10000)) {
            Socket s = try_connect("127.0.0.1", port, 5, why);
            if (s.fd >= 0) return s;
        }
        fail("rank 0 does not listen: %s", why.c_str());
    };
    const auto refusal_of = [&](const Hello& hello) {
        Socket s = connect_raw();
        Answer a{};
        CHECK_EQUAL(send_all(s.fd, &hello, sizeof hello, seconds_now() + 5), std::string());
        CHECK_EQUAL(receive_all(s.fd, &a, sizeof a, seconds_now() + 5), std::string());
        CHECK(!std::memcmp(a.magic, MAGIC, sizeof MAGIC) && !a.welcome);
        return std::string(a.text);
    };
    const auto has = [](const std::string& text, const char* words) {
        tests().checks++;
        if (text.find(words) == std::string::npos)
            check_failed(__FILE__, __LINE__, "'%s', expected '%s' in it", text.c_str(), words);
    };
    {  // a browser, one that says nothing, one that stops in the middle, one that says nothing and stays
        Socket browser = connect_raw();
        CHECK_EQUAL(send_all(browser.fd, "GET / HTTP/1.1\r\n\r\n", 18, seconds_now() + 5), std::string());
        connect_raw();
        Socket half = connect_raw();
        CHECK_EQUAL(send_all(half.fd, MAGIC, sizeof MAGIC, seconds_now() + 5), std::string());
    }
    const Socket silent = connect_raw();
    const Hello good = make_hello(MESSAGES, 1, 2, "elsewhere", "");
    Hello hello = good;
    hello.version = 99;
    has(refusal_of(hello), "protocol 99, expected 2");
    hello = good, hello.size = 3;
    has(refusal_of(hello), "rank 1 on elsewhere");
    has(refusal_of(hello), "belongs to 3 ranks, expected 2");
    hello = good, hello.rank = 7;
    has(refusal_of(hello), "not expected here");
    hello = good, hello.kind = 9;
    has(refusal_of(hello), "not expected here");
    hello = make_hello(MESSAGES, 1, 2, "else\nwhere", "another run");
    has(refusal_of(hello), "rank 1 on else?where");
    has(refusal_of(hello), "run 'another run'");
    processes.start_rank(1, 2, port, ranks::collectives);
    processes.wait();
    CHECK_EQUAL(processes.ended[0].status, 0);
    CHECK_EQUAL(processes.ended[1].status, 0);
    CHECK_EQUAL(processes.ended[1].err, std::string());
    has(processes.ended[0].err, "it is no rank of this program");
    has(processes.ended[0].err, "closed the connection before it said who it is");
    CHECK_EQUAL(ranks::count_of(processes.ended[0].err, "refused a connection from 127.0.0.1"), size_t(10));
    CHECK_EQUAL(ranks::count_of(processes.ended[0].err, "\n"), size_t(10));
}

TEST(ddp_rendezvous_errors) {
    const auto nothing = [](World&) { return 0; };
    const auto line = [](const ranks::Ended& e, const std::vector<std::string>& words) {
        ranks::check_line(e, 1, words);
    };
    {  // two of four never arrive; the one that did learns why
        ranks::Processes processes;
        const int port = ranks::free_port();
        processes.start_rank(0, 4, port, nothing, 1);
        processes.start_rank(2, 4, port, nothing, 1);
        processes.wait();
        line(processes.ended[0], {"ranks 1, 3 of 4 never came", format_text("127.0.0.1:%d", port), "waited 1 s"});
        line(processes.ended[1], {"rank 0 at", "gave up", "ranks 1, 3 of 4 never came"});
    }
    {  // the same rank twice; no rank 0; a process that answers something else; a port in use
        ranks::Processes processes;
        const int port = ranks::free_port(), nobody = ranks::free_port();
        int other_port = 0;
        const rendezvous::Socket other = rendezvous::listen_on(0, true, other_port);
        processes.start_rank(0, 3, port, nothing, 2);
        processes.start_rank(1, 3, port, nothing, 2);
        processes.start_rank(1, 2, nobody, nothing, 1);
        processes.start_rank(1, 2, other_port, nothing, 2);
        processes.start_rank(0, 2, other_port, nothing, 2);
        usleep(500000);
        processes.start_rank(1, 3, port, nothing, 2);
        REQUIRE(rendezvous::wait_until(other.fd, POLLIN, seconds_now() + 5));
        const rendezvous::Socket caller(accept4(other.fd, nullptr, nullptr, SOCK_NONBLOCK));
        CHECK_EQUAL(rendezvous::send_all(caller.fd, "SSH-2.0-Server\r\n", 16, seconds_now() + 5), std::string());
        shutdown(caller.fd, SHUT_WR);
        processes.wait();
        line(processes.ended[2], {format_text("rank 0 at 127.0.0.1:%d", nobody), "Connection refused", "waited 1 s"});
        line(processes.ended[3], {"is not rank 0 of this program", "MASTER_PORT"});
        line(processes.ended[4], {format_text("cannot listen on TCP port %d", other_port), "MASTER_PORT"});
        line(processes.ended[5], {"refused this process", "is already here"});
        CHECK(processes.ended[0].err.find("rank 2 of 3 never came; refused: ") != std::string::npos);
    }
    {  // a rank that dies while the others wait for the last
        ranks::Processes processes;
        const int port = ranks::free_port();
        processes.start_rank(0, 3, port, nothing, 10);
        processes.start_rank(1, 3, port, nothing, 10);
        usleep(500000);
        kill(processes.pids[1], SIGKILL);
        CHECK(processes.wait() < 5);
        line(processes.ended[0], {"rank 1 on " + host_name() + " is gone before the run began"});
    }
}

// Names and addresses as on two machines: rank 0 and 1 on one, 2 and 3 on the other, with a cable between them.
TEST(ddp_two_hosts) {
    const std::string mine = format_text("nsa%d", int(getpid()));
    const auto shell = [](const std::string& command) {
        return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
    };
    struct Hosts {
        std::string name;
        ~Hosts() {
            const int status =
                std::system(("ip netns del " + name + "a 2>/dev/null; ip netns del " + name + "b 2>/dev/null").c_str());
            (void)status;  // where they could not be made, there is nothing to remove
        }
    } hosts{mine};
    bool ready = shell("ip netns add " + mine + "a") && shell("ip netns add " + mine + "b");
    ready = ready && shell("ip link add v" + mine + "a netns " + mine + "a type veth peer name v" + mine + "b netns " +
                           mine + "b");
    for (const char* side : {"a", "b"}) {
        const std::string in = "ip -n " + mine + side;
        ready = ready && shell(in + " addr add 10.77.0." + (*side == 'a' ? "1" : "2") + "/24 dev v" + mine + side) &&
                shell(in + " link set v" + mine + side + " up") && shell(in + " link set lo up");
    }
    if (!ready) return skip("ranks on two hosts: network namespaces cannot be made here (they need root and ip)");
    ranks::Processes processes;
    const auto on_host = [&](int rank) {
        const std::string side = rank < 2 ? "a" : "b";
        processes.start(
            {{"RANK", std::to_string(rank)},
             {"WORLD_SIZE", "4"},
             {"MASTER_ADDR", "10.77.0.1"},
             {"MASTER_PORT", "29577"}},
            [=] {
                const int fd = open(("/var/run/netns/" + mine + side).c_str(), O_RDONLY | O_CLOEXEC);
                const std::string name = "host-" + side;
                RANK_CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0 && unshare(CLONE_NEWUTS) == 0 &&
                           sethostname(name.data(), name.size()) == 0);
                World world(read_launch(), 15);
                RANK_CHECK(world.host == name && world.local_size == 2 && world.local_rank == rank % 2);
                RANK_CHECK((world.hosts == std::vector<std::string>{"host-a", "host-a", "host-b", "host-b"}));
                RANK_CHECK(ranks::collectives(world) == 0);
                Watchdog watchdog(world, {10, ""});
                watchdog.progress(4, "forward");
                std::fprintf(stderr, "started\n");
                if (rank == 3) sleep(10);
                world.barrier();
                return 0;
            });
    };
    for (const int rank : {3, 1, 2, 0}) on_host(rank);
    CHECK(processes.wait_for(0, "started"));
    usleep(500000);  // the ranks tell rank 0 where they are several times a second
    kill(processes.pids[0], SIGKILL);
    processes.wait();
    CHECK(processes.all_err().find("rank 3 on host-b is gone (its connection closed) at step 4 in 'forward'") !=
          std::string::npos);
    for (const size_t i : {1, 2, 3}) CHECK_EQUAL(processes.ended[i].status, 1);
}

TEST(ddp_ranks_that_differ) {
    ranks::Processes processes;
    processes.start_world(4, [](World& world) {
        world.require_same("digest: 1234\n", "nothing to do");
        world.require_same(world.rank == 2 ? "digest: 1234\nsteps: 300\nseed: 7" : "digest: 1234\nsteps: 200\n",
                           "start all ranks with the same options");
        return 0;
    });
    processes.wait();
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 1);
    CHECK_EQUAL(
        processes.all_err(),
        "error: rank 2 on " + host_name() +
            " has 'steps: 300', expected 'steps: 200' as on 3 of 4 ranks; start all ranks with the same options\n");

    ranks::Processes collective;
    collective.start_world(2, [](World& world) {
        std::vector<float> x(10, 1.0f);
        world.sum(x.data(), world.rank == 0 ? 10 : 9);
        return 0;
    });
    collective.wait();
    CHECK(collective.ended[0].status == 1 && collective.ended[1].status == 1);
    CHECK(collective.all_err().find("the ranks do not do the same") != std::string::npos);
}

// A failing rank prints its error; the others end with its status and say nothing, wherever they are.
TEST(ddp_a_failure_ends_all_ranks) {
    for (const int failing : {0, 2}) {
        ranks::Processes processes;
        processes.start_world(4, [=](World& world) {
            return ranks::train_forever(world, 30, [=](World& w, Watchdog&, int64_t step) {
                if (w.rank == failing && step == 3) throw Error(7, "the disk is full");
                if (w.rank == 3 && step == 3) sleep(20);  // not in a collective
            });
        });
        CHECK(processes.wait(15) < 8);
        for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 7);
        CHECK_EQUAL(processes.all_err("started"), std::string("error: the disk is full\n"));
    }
}

TEST(ddp_a_killed_rank_ends_all) {
    for (const size_t victim : {size_t(0), size_t(2)}) {
        ranks::Processes processes;
        processes.start_world(
            4, [](World& world) { return ranks::train_forever(world, 30, [](World&, Watchdog&, int64_t) {}); });
        for (size_t i = 0; i < 4; i++) CHECK(processes.wait_for(i, "started"));
        usleep(500000);  // the ranks tell rank 0 where they are several times a second
        kill(processes.pids[victim], SIGKILL);
        CHECK(processes.wait() < 3);
        for (size_t i = 0; i < 4; i++) CHECK_EQUAL(processes.ended[i].status, i == victim ? 128 + SIGKILL : 1);
        const std::string err = processes.all_err("started");
        CHECK_EQUAL(ranks::count_of(err, "\n"), size_t(1));
        CHECK(err.find(format_text("train_nsa: error: rank %zu on %s is gone (its connection closed)", victim,
                                   host_name().c_str())) == 0);
        CHECK(err.find("in '") != std::string::npos);
    }
}

// A rank that is gone while another has finished already.
TEST(ddp_a_rank_that_is_lost_at_the_end) {
    ranks::Processes processes;
    processes.start_world(3, [](World& world) {
        if (world.rank == 1) raise(SIGKILL);
        return 0;
    });
    CHECK(processes.wait() < 5);
    CHECK(processes.ended[0].status == 1 && processes.ended[1].status == 128 + SIGKILL &&
          processes.ended[2].status == 1);
    CHECK_EQUAL(ranks::count_of(processes.all_err(), "\n"), size_t(1));
    CHECK(processes.all_err().find("rank 1 on") != std::string::npos);
}

// The watchdog of a stopped process is stopped with it.
TEST(ddp_a_stopped_rank_ends_all) {
    for (const size_t victim : {size_t(0), size_t(1)}) {
        ranks::Processes processes;
        processes.start_world(
            3, [](World& world) { return ranks::train_forever(world, 2, [](World&, Watchdog&, int64_t) {}); });
        for (size_t i = 0; i < 3; i++) CHECK(processes.wait_for(i, "started"));
        usleep(300000);
        kill(processes.pids[victim], SIGSTOP);
        const double seconds = processes.wait(15, {victim});
        CHECK(seconds > 1 && seconds < 6);
        for (size_t i = 0; i < 3; i++) CHECK_EQUAL(processes.ended[i].status, i == victim ? 128 + SIGKILL : 1);
        const std::string err = processes.all_err("started");
        CHECK_EQUAL(ranks::count_of(err, "\n"), size_t(1));
        CHECK(err.find(format_text("rank %zu on %s is late: nothing was heard from it for 2.", victim,
                                   host_name().c_str())) != std::string::npos);
        CHECK(err.find("it was last at step") != std::string::npos);
    }
}

// Linked by name, for the stack.
__attribute__((noinline, noclone)) inline void stand_still_in_the_test(int seconds) {
    for (int i = 0; i < seconds * 100; i++) usleep(10000);
}

// The lines of a stack, and the function where the program has names.
inline void check_stack(const std::string& err) {
    CHECK(ranks::count_of(err, "\n    ") >= 3);
    char* const* symbol =
        backtrace_symbols(std::array<void*, 1>{reinterpret_cast<void*>(&stand_still_in_the_test)}.data(), 1);
    if (symbol && std::strstr(*symbol, "stand_still"))
        CHECK(err.find("stand_still_in_the_test(int)") != std::string::npos);
    else skip("names in the stack of a stalled rank: this build was not linked with -rdynamic");
    std::free(const_cast<char**>(symbol));
}

TEST(ddp_a_stalled_rank_shows_its_stack) {
    ranks::Processes processes;
    processes.start_world(3, [](World& world) {
        return ranks::train_forever(world, 1, [](World& w, Watchdog& watchdog, int64_t step) {
            if (w.rank == 1 && step == 5) watchdog.progress(5, "backward"), stand_still_in_the_test(20);
        });
    });
    CHECK(processes.wait(15) < 6);
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 1);
    const std::string err = processes.all_err("started");
    CHECK_EQUAL(ranks::count_of(err, "error:"), size_t(1));
    CHECK(processes.ended[1].err.find("rank 1 on " + host_name() + " has made no progress for 1.") !=
          std::string::npos);
    CHECK(err.find("at step 5 in 'backward' (--stall-timeout 1); the stack of its main thread:\n") !=
          std::string::npos);
    check_stack(processes.ended[1].err);
}

// Watched before anything is known of a rank's phases: that is when files are opened and GPUs found.
TEST(ddp_a_rank_that_is_stopped_before_the_first_step) {
    ranks::Processes processes;
    processes.start_world(3, [](World& world) {
        world.channel().watch(1);
        if (world.rank == 1) raise(SIGSTOP);
        world.barrier();
        return 0;
    });
    CHECK(processes.wait(15, {1}) < 6);
    for (const size_t i : {size_t(0), size_t(2)}) CHECK_EQUAL(processes.ended[i].status, 1);
    const std::string err = processes.all_err();
    CHECK_EQUAL(ranks::count_of(err, "\n"), size_t(1));
    CHECK(err.find("rank 1 on " + host_name() + " is late: nothing was heard from it for 1.") != std::string::npos);
    CHECK(err.find("before the first step") != std::string::npos);
}

// What ranks share is taken down together: one that stands still there holds up all.
TEST(ddp_a_rank_that_stands_still_behind_the_last_step) {
    ranks::Processes processes;
    processes.start_world(2, [](World& world) {
        {
            Watchdog watchdog(world, {1, ""});
            watchdog.progress(7, "report");
            world.barrier();
        }
        if (world.rank == 1) stand_still_in_the_test(20);
        return 0;
    });
    CHECK(processes.wait(15) < 6);
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 1);
    const std::string err = processes.all_err();
    CHECK_EQUAL(ranks::count_of(err, "error:"), size_t(1));
    CHECK(err.find("rank 1 at step 7 in 'waiting for all ranks to end'") != std::string::npos);
}

TEST(ddp_slow_traffic_is_no_alarm) {
    ranks::Processes processes;
    processes.start_world(2, [](World& world) {
        Watchdog watchdog(world, {1, ""});
        watchdog.progress(3, "waiting for the other ranks");
        for (int i = 0; i < 12; i++) world.sum(1.0), usleep(200000);
        return 0;
    });
    processes.wait(15);
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 0);
    CHECK_EQUAL(processes.all_err(), std::string());
}

TEST(ddp_one_process_has_a_watchdog) {
    ranks::Processes processes;
    processes.start({}, [] {
        World world;
        Watchdog watchdog(world, {1, ""});
        usleep(1500000);  // not judged before the first progress
        watchdog.progress(1, "waiting for nobody");
        stand_still_in_the_test(20);
        return 0;
    });
    processes.start({}, [] {  // and none that is not asked for
        World world;
        Watchdog watchdog(world, {0, ""});
        watchdog.progress(1, "forward");
        usleep(1500000);
        world.finish();
        return 0;
    });
    CHECK(processes.wait(15) < 8);
    CHECK_EQUAL(processes.ended[0].status, 1);
    CHECK(processes.ended[0].err.find("at step 1 in 'waiting for nobody'") != std::string::npos);
    check_stack(processes.ended[0].err);
    CHECK_EQUAL(processes.ended[1].status, 0);
    CHECK_EQUAL(processes.ended[1].err, std::string());
}

// Steps of more than twice the limit, in layers that make progress; the
// others wait, in a collective or in a phase called waiting, or are done.
TEST(ddp_a_slow_rank_is_no_alarm) {
    ranks::Processes processes;
    processes.start_world(3, [](World& world) {
        Watchdog watchdog(world, {1.5, ""});
        if (world.rank == 0) watchdog.progress(1, "waiting for the other ranks"), usleep(4000000);
        if (world.rank == 1)
            for (int layer = 0; layer < 12; layer++) watchdog.progress(1, "forward"), usleep(300000);
        if (world.rank == 2) watchdog.progress(1, "backward");
        world.sum(1.0);
        if (world.rank == 1)
            for (int layer = 0; layer < 8; layer++) watchdog.progress(2, "checkpoint"), usleep(300000);
        return 0;
    });
    processes.wait(15);
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 0);
    CHECK_EQUAL(processes.all_err(), std::string());
}

// Ctrl-Z and fg: all processes stand still for longer than the limit, and nobody is blamed for it.
TEST(ddp_a_pause_of_all_is_no_alarm) {
    ranks::Processes processes;
    processes.start_world(2, [](World& world) {
        Watchdog watchdog(world, {2, ""});
        for (int64_t step = 1; step <= 100; step++) {
            watchdog.progress(step, "forward");
            usleep(20000);
            world.sum(1.0);
            if (step == 1) std::fprintf(stderr, "started\n");
        }
        return 0;
    });
    for (const size_t i : {0, 1}) CHECK(processes.wait_for(i, "started"));
    for (const pid_t pid : processes.pids) kill(pid, SIGSTOP);
    usleep(3500000);
    for (const pid_t pid : processes.pids) kill(pid, SIGCONT);
    processes.wait(15);
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 0);
    CHECK_EQUAL(processes.all_err("started"), std::string());
}

TEST(ddp_ranks_that_wait_for_each_other) {
    ranks::Processes processes;
    processes.start_world(3, [](World& world) {
        Watchdog watchdog(world, {1, ""});
        watchdog.progress(9, world.rank == 0 ? "evaluation" : "forward");
        char byte;
        if (world.rank != 2) world.broadcast(&byte, 1, 1 - world.rank);  // both receive, nobody sends
        return 0;
    });
    CHECK(processes.wait(15) < 6);
    for (const ranks::Ended& e : processes.ended) CHECK_EQUAL(e.status, 1);
    const std::string err = processes.all_err();
    CHECK_EQUAL(ranks::count_of(err, "error:"), size_t(1));
    CHECK(err.find("all 3 ranks have waited for each other for 1.") != std::string::npos);
    CHECK(err.find("rank 0 at step 9 in 'evaluation', rank 1 at step 9 in 'forward', rank 2 at step 9 in "
                   "'waiting for all ranks to end'") != std::string::npos);
}

TEST(ddp_heartbeat_file) {
    TempFolder folder;
    ranks::Processes processes;
    const std::string path = folder.file("heartbeat.jsonl");
    write_file(path, "{}\n");  // of an earlier run, which stays
    for (const std::string& file : {path, std::string("/dev/full"), folder.file("no/such/folder.jsonl")})
        processes.start({}, [=] {
            World world;
            Watchdog watchdog(world, {5, file});
            watchdog.progress(1, "forward"), watchdog.step_done(1, 0.25, 5.5);
            watchdog.progress(2, "update"), watchdog.step_done(2, 1.5, std::nan(""));
            world.finish();
            return 0;
        });
    processes.wait();
    std::istringstream lines(read_file(path));
    std::string line, first, second;
    std::getline(lines, line), std::getline(lines, first), std::getline(lines, second);
    CHECK(line == "{}" && lines.peek() == EOF);
    const Json one = parse_json(first, "heartbeat"), two = parse_json(second, "heartbeat");
    CHECK_EQUAL(one.number("step", "heartbeat"), 1.0);
    CHECK_EQUAL(one.number("rank", "heartbeat"), 0.0);
    CHECK_EQUAL(one.string("phase", "heartbeat"), std::string("forward"));
    CHECK_EQUAL(one.number("ms", "heartbeat"), 250.0);
    CHECK_EQUAL(one.number("loss", "heartbeat"), 5.5);
    CHECK(one.number("memory_mib", "heartbeat") > 0.1 && one.number("memory_mib", "heartbeat") < 1e6);
    CHECK_NEAR(one.number("time", "heartbeat"), double(std::time(nullptr)), 60);
    CHECK(second.find("\"loss\":null") != std::string::npos && two.number("step", "heartbeat") == 2);
    for (const size_t i : {0, 1, 2}) CHECK_EQUAL(processes.ended[i].status, 0);
    CHECK_EQUAL(processes.ended[0].err, std::string());
    CHECK_EQUAL(processes.ended[1].err,
                std::string("train_nsa: warning: cannot write the heartbeat file /dev/full: No space left on "
                            "device; training goes on\n"));
    CHECK(processes.ended[2].err.find("No such file") != std::string::npos &&
          ranks::count_of(processes.ended[2].err, "\n") == 1);
}

TEST(ddp_binary_digest) {
    const std::string digest = binary_digest();
    CHECK(digest.size() == 16 && digest == binary_digest());
    // FNV-1a's defining recurrence over the whole file, in one loop
    uint64_t hash = 14695981039346656037u;
    for (const char c : read_file("/proc/self/exe")) hash ^= uint8_t(c), hash *= 1099511628211u;
    CHECK_EQUAL(digest, format_text("%016llx", (unsigned long long)hash));
}
