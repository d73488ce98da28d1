// ddp.cuh: data parallelism, from the launch to the summed gradient.
//   World        how the ranks came to be (MPI, RANK/WORLD_SIZE, Slurm, or one process alone), and collectives on host
//   memory between
//                them, over MPI or over TCP connections of our own. One process alone touches neither MPI nor sockets.
//   Partition    the flat gradient cut into buckets, and with --zero 1 into the parts that ranks own
//   *Reducer     sums the buckets over the ranks while the backward pass goes on: of hosts (MPI, TCP), of GPUs (NCCL),
//   of GPUs through
//                the hosts' memory where there is no NCCL
#pragma once
#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

#include "lib/util.h"
#include "lib/watchdog.h"
#include "nsa_cpu.h"

// The processors this process may use: what the launcher or the container left of the machine.
inline int usable_processors() {
    static const double quota = cgroup_limits().processors;
    cpu_set_t set;
    const int allowed = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return std::max(1, int(std::min(double(allowed), std::ceil(quota))));
}

// The same as text, such as "0 1 5": which processors.
inline std::string processor_list() {
    cpu_set_t set;
    std::string text;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int i = 0; i < CPU_SETSIZE; i++)
            if (CPU_ISSET(i, &set)) text += (text.empty() ? "" : " ") + std::to_string(i);
    return text;
}

// GCC's OpenMP lets a thread that waits at the end of a loop spin for milliseconds. Where another process wants the
// core (a second rank, a compiler, a neighbour), each of a step's hundreds of loops then waits for a time slice: 3.4
// times slower was measured, see dev/NOTES.md. The runtime reads its setting before main, so the program sets it and
// starts itself again. Whoever has set a policy keeps it.
inline void set_passive_omp_wait(char** argv) {
#ifdef _OPENMP
    if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
    std::error_code error;
    execv(std::filesystem::read_symlink("/proc/self/exe", error).c_str(),
          argv);                    // by its own name, which top and pkill then know it by
    execv("/proc/self/exe", argv);  // the file has been moved away meanwhile
#else
    (void)argv;
#endif
}

inline std::string host_name() {
    char name[256] = "";
    return gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "localhost";
}

// FNV-1a, 64 bits, of the running program's file, as text: ranks must run the same program.
inline std::string binary_digest() {
    std::ifstream in("/proc/self/exe", std::ios::binary);
    if (!in) fail("cannot open /proc/self/exe: %s", std::strerror(errno));
    uint64_t hash = 0xcbf29ce484222325u;
    std::vector<char> piece(1 << 20);
    while (in.read(piece.data(), std::streamsize(piece.size())), in.gcount() > 0)
        for (std::streamsize i = 0; i < in.gcount(); i++) hash = (hash ^ uint8_t(piece[size_t(i)])) * 0x100000001b3u;
    if (in.bad()) fail("cannot read /proc/self/exe: %s", std::strerror(errno));
    return format_text("%016llx", (unsigned long long)hash);
}

// ---------------------------------------------------------------------------------------------------------------------
// What the launcher said, in environment variables.

struct Launch {
    std::string launcher = "one process";
    bool by_mpi = false;  // rank and size are MPI's to say
    int rank = 0, size = 1;
    int local_rank = -1, local_size = -1;  // -1: not said
    std::string address;                   // where rank 0 listens
    int port = 0;
    std::string run;  // names this run, where the launcher does; a process of another one is refused
};

// The number in a variable. False if it is not set; anything but an integer of the range is the user's error.
inline bool read_variable(const char* name, long long lowest, long long highest, long long& value) {
    const char* text = std::getenv(name);
    if (!text) return false;
    char* end;
    errno = 0;
    const long long number = std::strtoll(text, &end, 10);
    if (!std::isdigit(static_cast<unsigned char>(text[0])) || *end || errno || number < lowest || number > highest)
        fail_usage("%s='%s' in the environment: expected an integer from %lld to %lld", name, text, lowest, highest);
    value = number;
    return true;
}
inline int read_count(const char* name, int lowest, int highest, int otherwise) {
    long long value;
    return read_variable(name, lowest, highest, value) ? int(value) : otherwise;
}

// The hosts of a Slurm node list: "gpu[01-03,7],login,rack[1-2]n[1-2]" -> gpu01 gpu02 gpu03 gpu7 login rack1n1 rack1n2
// rack2n1 rack2n2. Numbers keep the width of a range's first one.
inline std::vector<std::string> expand_host_list(const std::string& list) {
    const size_t most = 4096;  // as many ranks as there may be, see read_launch
    std::vector<std::string> hosts,
        prefixes = {""};  // prefixes: the beginnings of the names of the item that is being read
    const auto bad = [&](size_t at, const char* expected) {
        fail_usage(
            "the Slurm node list '%s' cannot be read at character %zu: expected %s; set MASTER_ADDR to the first "
            "node's name",
            list.c_str(), at + 1, expected);
    };
    for (size_t i = 0; i <= list.size(); i++) {
        if (i == list.size() || list[i] == ',') {
            if (prefixes.size() == 1 && prefixes[0].empty()) bad(i, "a host name");
            hosts.insert(hosts.end(), prefixes.begin(), prefixes.end());
            prefixes = {""};
        } else if (list[i] == ']') {
            bad(i, "no ']' without a '['");
        } else if (list[i] != '[') {
            for (std::string& prefix : prefixes) prefix += list[i];
            if (prefixes[0].size() > 255) bad(i, "a host name of at most 255 characters");
        } else {
            std::vector<std::string> numbers;
            do {
                const auto read_number = [&](size_t& at) {
                    const size_t first = at;
                    while (at < list.size() && std::isdigit(static_cast<unsigned char>(list[at]))) at++;
                    if (at == first || at - first > 9) bad(first, "a number of at most 9 digits");
                    return list.substr(first, at - first);
                };
                const std::string low = read_number(++i);
                const std::string high = i < list.size() && list[i] == '-' ? read_number(++i) : low;
                const long first = std::atol(low.c_str()), last = std::atol(high.c_str());
                if (last < first || size_t(last - first) >= most) bad(i, "a range that goes upwards");
                if ((numbers.size() + size_t(last - first) + 1) * prefixes.size() > most) bad(i, "fewer hosts");
                for (long n = first; n <= last; n++) numbers.push_back(format_text("%0*ld", int(low.size()), n));
            } while (i < list.size() && list[i] == ',');
            if (i >= list.size() || list[i] != ']') bad(i, "',', '-' or ']'");
            std::vector<std::string> longer;
            for (const std::string& prefix : prefixes)
                for (const std::string& number : numbers) longer.push_back(prefix + number);
            prefixes = longer;
        }
        if (hosts.size() + prefixes.size() > most) bad(std::min(i, list.size()), "fewer hosts");
    }
    return hosts;
}

// The variable that says how many processes an MPI launcher started, where there is one: MPICH's and Slurm's PMI, Open
// MPI.
inline const char* started_by_mpirun() {
    for (const char* variable : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"})
        if (std::getenv(variable)) return variable;
    return nullptr;
}

inline void read_master(Launch& launch) {
    if (const char* address = std::getenv("MASTER_ADDR")) launch.address = address;
    launch.port = read_count("MASTER_PORT", 1, 65535, launch.port);
}

// RANK and WORLD_SIZE, as torchrun and hand-written loops set them.
inline bool launched_by_rank_variables(Launch& launch) {
    const bool rank = std::getenv("RANK"), size = std::getenv("WORLD_SIZE");
    if (!rank && !size) return false;
    if (rank != size)
        fail_usage("%s is set in the environment and %s is not; set both, or neither for one process",
                   rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK");
    launch.launcher = "RANK/WORLD_SIZE";
    launch.size = read_count("WORLD_SIZE", 1, 4096, 1), launch.rank = read_count("RANK", 0, 1 << 30, 0);
    launch.local_size = read_count("LOCAL_WORLD_SIZE", 1, 4096, -1),
    launch.local_rank = read_count("LOCAL_RANK", 0, 4095, -1);
    if (launch.rank >= launch.size)
        fail_usage("RANK=%d and WORLD_SIZE=%d in the environment contradict each other: ranks are 0 to %d", launch.rank,
                   launch.size, launch.size - 1);
    if (launch.local_size > launch.size)
        fail_usage("LOCAL_WORLD_SIZE=%d and WORLD_SIZE=%d in the environment contradict each other", launch.local_size,
                   launch.size);
    const int local_limit = launch.local_size > 0 ? launch.local_size : launch.size;
    if (launch.local_rank >= local_limit)
        fail_usage("LOCAL_RANK=%d in the environment: with %s=%d it is at most %d", launch.local_rank,
                   launch.local_size > 0 ? "LOCAL_WORLD_SIZE" : "WORLD_SIZE", local_limit, local_limit - 1);
    if (launch.local_rank > launch.rank)
        fail_usage(
            "LOCAL_RANK=%d and RANK=%d in the environment contradict each other: a local rank is "
            "at most the rank",
            launch.local_rank, launch.rank);
    if (launch.size == 1) return true;
    launch.port = 29500;
    read_master(launch);
    if (launch.address.empty()) {
        const bool one_host = launch.local_size < 0 ? launch.local_rank < 0 || launch.local_rank == launch.rank
                                                    : launch.local_size == launch.size;
        if (!one_host)
            fail_usage(
                "RANK=%d and WORLD_SIZE=%d are set, on more than one host, and MASTER_ADDR is not: set it to the name "
                "or address of rank 0's host",
                launch.rank, launch.size);
        launch.address = "127.0.0.1";
    }
    // torchrun listens on MASTER_PORT itself and says so.
    const char* store = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (store && !std::strcmp(store, "True")) launch.port += launch.port < 65535 ? 1 : -1;
    if (const char* run = std::getenv("TORCHELASTIC_RUN_ID")) launch.run = run;
    return true;
}

// A task of srun. A shell of sbatch or salloc has the job's variables too, but is one process: it has no step, or one
// of the numbers at the top of the range that Slurm keeps for batch, interactive and external steps.
inline bool launched_by_slurm(Launch& launch) {
    long long step, job = 0;
    if (!read_variable("SLURM_STEP_ID", 0, 0xffffffffll, step) || step >= 0xfffffff0ll) return false;
    const int size = read_count("SLURM_NTASKS", 1, 4096, 1);
    if (size == 1) return false;
    launch.launcher = "Slurm", launch.size = size;
    launch.rank = read_count("SLURM_PROCID", 0, 1 << 30, -1),
    launch.local_rank = read_count("SLURM_LOCALID", 0, 4095, -1);
    if (launch.rank < 0)
        fail_usage(
            "SLURM_STEP_ID and SLURM_NTASKS=%d are set in the environment and SLURM_PROCID is not; start the "
            "program with srun",
            size);
    if (launch.rank >= size)
        fail_usage("SLURM_PROCID=%d and SLURM_NTASKS=%d in the environment contradict each other: ranks are 0 to %d",
                   launch.rank, size, size - 1);
    if (launch.local_rank > launch.rank)
        fail_usage(
            "SLURM_LOCALID=%d and SLURM_PROCID=%d in the environment contradict each other: a "
            "local rank is at most the rank",
            launch.local_rank, launch.rank);
    const bool has_job = read_variable("SLURM_JOB_ID", 0, 0xffffffffll, job);
    launch.port = int(10000 + (job * 7 + step) %
                                  20000);  // below the ports that systems hand out, another for every step of a job
    launch.run = format_text("%lld.%lld", job, step);
    read_master(launch);
    if (!has_job && !std::getenv("MASTER_PORT"))
        fail_usage(
            "SLURM_NTASKS=%d is set and SLURM_JOB_ID is not: set MASTER_PORT to a free "
            "port of rank 0's host",
            size);
    if (!launch.address.empty()) return true;
    for (const char* variable : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})
        if (const char* list = std::getenv(variable)) return launch.address = expand_host_list(list)[0], true;
    fail_usage(
        "SLURM_NTASKS=%d is set and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is: set MASTER_ADDR to the name "
        "of rank "
        "0's host",
        size);
}

inline Launch read_launch() {
    Launch launch;
    if (const char* variable = started_by_mpirun()) {
        launch.launcher = "mpirun";
        if (!std::strcmp(std::getenv(variable), "1")) return launch;
#ifdef USE_MPI
        launch.by_mpi = true;
        return launch;
#else
        // srun sets PMI's variables too, but its own agree with them and are enough.
        const char* tasks = std::getenv("SLURM_NTASKS");
        if (!(tasks && !std::strcmp(tasks, std::getenv(variable)) && launched_by_slurm(launch)))
            fail_usage(
                "this binary was built without MPI and would run as %s independent copies under mpirun; hint: make "
                "deps && make "
                "train_nsa, or start it without mpirun",
                std::getenv(variable));
        return launch;
#endif
    }
    if (!launched_by_rank_variables(launch)) launched_by_slurm(launch);
    return launch;
}

// ---------------------------------------------------------------------------------------------------------------------
// TCP connections between ranks. Whoever connects says who it is (Hello) and is answered (Answer) before anything else
// is sent, so that a stranger, a leftover process or a rank of another run is found at once.

namespace rendezvous {

enum Kind : uint32_t {
    DATA = 1,
    CONTROL = 2
};  // of a connection: collectives of the main threads; the control channel
constexpr char MAGIC[8] = {'N', 'S', 'A', 'R', 'A', 'N', 'K', '\0'};
constexpr uint32_t VERSION = 1;

struct Hello {
    char magic[8];
    uint32_t version, kind;
    int32_t rank, size;
    uint64_t token;     // 0 where rank 0 has not said it yet
    int32_t data_port;  // where this rank listens for the others
    int32_t process;
    char run[64], host[256], boot[64];
};
struct Answer {
    char magic[8];
    uint32_t version, welcome;
    char text[496];  // why not
};
// Rank 0 tells everybody about all.
struct Entry {
    char host[256], boot[64];  // name and boot id tell machines apart
    char address[64];          // as rank 0 sees it
    int32_t data_port;
};

template <size_t N>
void copy_text(char (&to)[N], const std::string& from) {
    std::snprintf(to, N, "%s", from.c_str());
}

// What came from outside and may be printed.
template <size_t N>
void make_printable(char (&text)[N]) {
    text[N - 1] = '\0';
    for (char* c = text; *c; c++)
        if (!std::isprint(static_cast<unsigned char>(*c))) *c = '?';
}

inline std::string boot_id() {
    std::ifstream in("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(in, id);
    return id;
}

// A socket that closes itself.
struct Socket {
    int fd = -1;
    Socket() = default;
    explicit Socket(int f) : fd(f) {}
    Socket(Socket&& other) noexcept : fd(other.release()) {}
    Socket& operator=(Socket&& other) noexcept {
        if (this != &other) {
            if (fd >= 0) close(fd);
            fd = other.release();
        }
        return *this;
    }
    ~Socket() {
        if (fd >= 0) close(fd);
    }
    int release() {
        const int f = fd;
        fd = -1;
        return f;
    }
};

inline std::string numeric_address(const sockaddr_storage& a, socklen_t length) {
    char text[NI_MAXHOST] = "?";
    getnameinfo(reinterpret_cast<const sockaddr*>(&a), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    return std::strncmp(text, "::ffff:", 7) == 0 ? text + 7 : text;  // an IPv4 address that came to an IPv6 socket
}
inline std::string peer_address(int fd) {
    sockaddr_storage a{};
    socklen_t length = sizeof a;
    return getpeername(fd, reinterpret_cast<sockaddr*>(&a), &length) == 0 ? numeric_address(a, length) : "?";
}
inline bool is_loopback(const std::string& address) {
    return address.compare(0, 4, "127.") == 0 || address == "::1" || address == "localhost";
}

// Listens on a port (0: any free one) of all addresses, or of the loopback alone. IPv6 with IPv4, where the kernel has
// it.
inline Socket listen_on(int port, bool loopback, int& bound_port) {
    int error = 0;
    for (const int family : {AF_INET6, AF_INET}) {
        if (loopback && family == AF_INET6) continue;
        Socket s(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (s.fd < 0) continue;
        const int yes = 1, no = 0;
        setsockopt(s.fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        sockaddr_storage a{};
        socklen_t length;
        if (family == AF_INET6) {
            if (setsockopt(s.fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) != 0) continue;
            auto* in = reinterpret_cast<sockaddr_in6*>(&a);
            in->sin6_family = AF_INET6, in->sin6_addr = in6addr_any, in->sin6_port = htons(uint16_t(port)),
            length = sizeof *in;
        } else {
            auto* in = reinterpret_cast<sockaddr_in*>(&a);
            in->sin_family = AF_INET, in->sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY),
            in->sin_port = htons(uint16_t(port)), length = sizeof *in;
        }
        if (bind(s.fd, reinterpret_cast<sockaddr*>(&a), length) != 0 || listen(s.fd, 1024) != 0) {
            error = errno;
            if (error == EADDRINUSE) break;
            continue;
        }
        length = sizeof a;
        getsockname(s.fd, reinterpret_cast<sockaddr*>(&a), &length);
        bound_port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&a)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(&a)->sin_port);
        return s;
    }
    fail("cannot listen on TCP port %d of %s: %s%s", port, host_name().c_str(), std::strerror(error),
         error == EADDRINUSE
             ? "; another run or a leftover process has it (ss -ltnp shows which): end it or set another MASTER_PORT"
             : "");
}

// Small messages at once. Buffer sizes are left to the kernel, which grows them as needed beyond what a program may ask
// for.
inline void disable_nagle(int fd) {
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

// Waits until the socket can do this, or closes. False: the time is over.
inline bool wait_until(int fd, short events, double deadline) {
    while (true) {
        pollfd polled = {fd, events, 0};
        const int left = int(std::max(0.0, deadline - seconds_now()) * 1000);
        const int n = poll(&polled, 1, left);
        if (n > 0) return true;
        if (n == 0) return false;
        if (errno != EINTR) fail("poll: %s", std::strerror(errno));
    }
}

// Tries all addresses of the name, each for `patience` seconds. -1 in fd: none; why says what the last one answered.
inline Socket try_connect(const std::string& address, int port, double patience, std::string& why) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
        why = gai_strerror(error);
        return {};
    }
    Socket connected;
    for (addrinfo* a = found; a && connected.fd < 0; a = a->ai_next) {
        Socket s(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (s.fd < 0) continue;
        int error = connect(s.fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (error == EINPROGRESS) {
            socklen_t length = sizeof error;
            if (!wait_until(s.fd, POLLOUT, seconds_now() + patience)) error = ETIMEDOUT;
            else getsockopt(s.fd, SOL_SOCKET, SO_ERROR, &error, &length);
        }
        if (error == 0) connected = std::move(s);
        else why = std::strerror(error);
    }
    freeaddrinfo(found);
    return connected;
}

// All the bytes, or an answer why not ("" if all is well).
inline std::string send_all(int fd, const void* bytes, size_t count, double deadline) {
    const char* p = static_cast<const char*>(bytes);
    while (count > 0) {
        const ssize_t n = send(fd, p, count, MSG_NOSIGNAL);
        if (n > 0) p += n, count -= size_t(n);
        else if (errno == EAGAIN) {
            if (!wait_until(fd, POLLOUT, deadline)) return "it reads nothing";
        } else if (errno != EINTR) return std::strerror(errno);
    }
    return "";
}
inline std::string receive_all(int fd, void* bytes, size_t count, double deadline) {
    char* p = static_cast<char*>(bytes);
    while (count > 0) {
        const ssize_t n = recv(fd, p, count, 0);
        if (n > 0) p += n, count -= size_t(n);
        else if (n == 0) return "it closed the connection";
        else if (errno == EAGAIN) {
            if (!wait_until(fd, POLLIN, deadline)) return "it does not answer";
        } else if (errno != EINTR) return std::strerror(errno);
    }
    return "";
}

// refusal "": welcome.
inline Answer make_answer(const std::string& refusal) {
    Answer a{};
    std::memcpy(a.magic, MAGIC, sizeof MAGIC), a.version = VERSION, a.welcome = refusal.empty();
    copy_text(a.text, refusal);
    return a;
}

// Who comes to a listening rank: every (kind, rank) of `wanted` once. Fills sockets and what they said.
struct Gate {
    std::set<std::pair<uint32_t, int>> wanted;
    std::map<std::pair<uint32_t, int>, std::pair<Socket, Hello>> come;

    // expected_size, _token (0: any) and _run are the callers' too; listening_at is for messages.
    Gate(int listening_rank, const std::string& listening_at, int expected_size, uint64_t expected_token,
         const std::string& expected_run)
        : own_rank(listening_rank),
          place(listening_at),
          size(expected_size),
          token(expected_token),
          run(expected_run) {}

    // Returns when all wanted have come.
    void open(const Socket& listener, double seconds) {
        const double start = seconds_now(), deadline = start + seconds;
        for (bool silent = true; !wanted.empty();) {
            if (silent && seconds_now() > start + 5) {
                std::printf("ranks:  rank %d waits at %s for %s\n", own_rank, place.c_str(), missing_ranks().c_str());
                std::fflush(stdout);
                silent = false;
            }
            std::vector<pollfd> polled = {{listener.fd, POLLIN, 0}};
            for (const Caller& c : callers) polled.push_back({c.socket.fd, POLLIN, 0});
            for (const auto& c : come) polled.push_back({c.second.first.fd, POLLRDHUP, 0});
            poll(polled.data(), nfds_t(polled.size()), 100);
            size_t i = 1 + callers.size();
            for (const auto& c : come)
                if (polled[i++].revents)
                    give_up(format_text("rank %d on %s is gone before the run began; see its output", c.first.second,
                                        c.second.second.host));
            for (size_t k = callers.size(); k-- > 0;)
                if (polled[1 + k].revents || seconds_now() > callers[k].deadline) listen_to(k);
            if (polled[0].revents) {
                sockaddr_storage from{};
                socklen_t length = sizeof from;
                Socket s(
                    accept4(listener.fd, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
                if (s.fd >= 0)
                    callers.push_back({std::move(s), numeric_address(from, length), {}, 0, seconds_now() + 10});
            }
            if (seconds_now() > deadline && !wanted.empty()) give_up(missing(seconds));
        }
        callers.clear();
    }

    Socket take(Kind kind, int rank) { return std::move(come.at({kind, rank}).first); }

  private:
    struct Caller {
        Socket socket;
        std::string address;
        Hello hello;
        size_t received;
        double deadline;
    };
    int own_rank;
    std::string place;
    int size;
    uint64_t token;
    std::string run, last_refusal;
    std::vector<Caller> callers;  // who has not said who it is yet

    [[noreturn]] void give_up(const std::string& why) {
        const Answer a = make_answer(why);
        for (const auto& c : come) send_all(c.second.first.fd, &a, sizeof a, seconds_now() + 1);
        fail("%s", why.c_str());
    }
    // Such as "ranks 1, 3 of 4".
    std::string missing_ranks() const {
        std::set<int> ranks;
        for (const auto& w : wanted) ranks.insert(w.second);
        std::string list;
        for (const int r : ranks) list += (list.empty() ? "" : ", ") + std::to_string(r);
        return format_text("rank%s %s of %d", ranks.size() == 1 ? "" : "s", list.c_str(), size);
    }
    std::string missing(double seconds) const {
        return format_text(
            "rank %d waited %.0f s at %s: %s never came%s%s; are they started, with the same MASTER_ADDR and "
            "MASTER_PORT, "
            "and does a firewall let them through?",
            own_rank, seconds, place.c_str(), missing_ranks().c_str(),
            last_refusal.empty() ? "" : "; refused: ", last_refusal.c_str());
    }

    void listen_to(size_t k) {
        Caller& c = callers[k];
        const ssize_t n =
            recv(c.socket.fd, reinterpret_cast<char*>(&c.hello) + c.received, sizeof c.hello - c.received, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR) && seconds_now() <= c.deadline) return;
        if (n > 0) c.received += size_t(n);
        const size_t seen = std::min(c.received, sizeof MAGIC);
        std::string refusal;
        if (std::memcmp(c.hello.magic, MAGIC, seen) != 0) refusal = "it is no rank of this program";
        else if (n > 0 && c.received < sizeof c.hello) return;
        else if (c.received < sizeof c.hello)
            refusal = n == 0 ? "it closed the connection before it said who it is" : "it does not say who it is";
        else refusal = judge(c.hello);
        if (refusal.empty()) {
            const std::pair<uint32_t, int> who = {c.hello.kind, c.hello.rank};
            const Answer a = make_answer("");
            if (!send_all(c.socket.fd, &a, sizeof a, seconds_now() + 10).empty())
                refusal = "it closed the connection before it was answered";
            else wanted.erase(who), come[who] = {std::move(c.socket), c.hello};
        } else {
            const Answer a = make_answer(refusal);
            send_all(c.socket.fd, &a, sizeof a, seconds_now() + 1);
        }
        if (!refusal.empty()) {
            last_refusal = "a process at " + c.address + ", because " + refusal;
            std::fprintf(stderr, "train_nsa: warning: rank %d at %s refused a connection from %s: %s\n", own_rank,
                         place.c_str(), c.address.c_str(), refusal.c_str());
        }
        callers.erase(callers.begin() + long(k));
    }

    // "" if welcome.
    std::string judge(Hello& h) const {
        make_printable(h.host), make_printable(h.boot), make_printable(h.run);
        if (h.version != VERSION)
            return format_text("it is another version of this program (protocol %u, expected %u)", h.version, VERSION);
        const std::string who = format_text("rank %d on %s (process %d)", h.rank, h.host, h.process);
        if (h.size != size)
            return who +
                   format_text(" belongs to %d ranks, expected %d: a leftover process, or another number of ranks",
                               h.size, size);
        if (run != h.run) return who + format_text(" belongs to run '%s', expected '%s'", h.run, run.c_str());
        if (token && h.token != token) return who + " belongs to another run";
        if (wanted.count({h.kind, h.rank})) return "";
        const auto same = come.find({h.kind, h.rank});
        if (same == come.end()) return who + " is not expected here";
        return who + format_text(": rank %d on %s (process %d) is already here", h.rank, same->second.second.host,
                                 same->second.second.process);
    }
};

inline Hello make_hello(Kind kind, int rank, int size, const std::string& host, const std::string& run, uint64_t token,
                        int data_port) {
    Hello h{};
    std::memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.version = VERSION, h.kind = kind, h.rank = rank, h.size = size, h.token = token, h.data_port = data_port,
    h.process = int(getpid());
    copy_text(h.run, run.substr(0, sizeof h.run - 1)), copy_text(h.host, host), copy_text(h.boot, boot_id());
    return h;
}

enum class Reply { WELCOME, REFUSED, STRANGER, NONE };

// Calls once. connected: on WELCOME the connection. why: on REFUSED the callee's reason, on NONE what went wrong.
inline Reply call_once(const std::string& address, int port, const Hello& hello, double patience, Socket& connected,
                       std::string& why) {
    Socket s = try_connect(address, port, patience, why);
    if (s.fd < 0) return Reply::NONE;
    disable_nagle(s.fd);
    Answer a{};
    why = send_all(s.fd, &hello, sizeof hello, seconds_now() + patience);
    if (why.empty()) why = receive_all(s.fd, &a, sizeof a, seconds_now() + patience);
    if (a.magic[0] && std::memcmp(a.magic, MAGIC, sizeof MAGIC) != 0) return Reply::STRANGER;
    if (!why.empty()) return Reply::NONE;
    if (!a.welcome) return why.assign(a.text, strnlen(a.text, sizeof a.text)), Reply::REFUSED;
    connected = std::move(s);
    return Reply::WELCOME;
}

// Calls a rank that listens, or will: until it answers or the time is over. A refusal is final.
inline Socket call(const std::string& address, int port, const Hello& hello, int callee, double seconds) {
    const double deadline = seconds_now() + seconds;
    for (double pause = 0.05;; pause = std::min(1.0, pause * 1.5)) {
        Socket s;
        std::string why;
        const Reply reply = call_once(address, port, hello, std::min(20.0, seconds), s, why);
        if (reply == Reply::WELCOME) return s;
        if (reply == Reply::STRANGER)
            fail(
                "rank %d on %s: what answers at %s:%d is not rank %d of this program; set another MASTER_PORT on all "
                "ranks",
                hello.rank, hello.host, address.c_str(), port, callee);
        if (reply == Reply::REFUSED)
            fail("rank %d at %s:%d refused this process: %s", callee, address.c_str(), port, why.c_str());
        if (seconds_now() > deadline)
            fail(
                "rank %d on %s waited %.0f s for rank %d at %s:%d: %s; is rank %d started, is the address "
                "(MASTER_ADDR, MASTER_PORT) its "
                "own, and does a firewall let it through?",
                hello.rank, hello.host, seconds, callee, address.c_str(), port, why.c_str(), callee);
        usleep(useconds_t(pause * 1e6));
    }
}

inline uint64_t random_token() {
    uint64_t token = 0;
    while (token == 0)
        if (getrandom(&token, sizeof token, 0) != sizeof token)
            fail("cannot read random bytes: %s", std::strerror(errno));
    return token;
}

}  // namespace rendezvous

// ---------------------------------------------------------------------------------------------------------------------
// All ranks of the run. Every rank calls the same collectives in the same order, from one thread at a time; over MPI
// from the main thread.

enum class Transport { NONE, MPI, TCP };

struct World {
    int rank = 0, size = 1;              // among all processes
    int local_rank = 0, local_size = 1;  // among the processes of this machine
    std::string host = host_name();
    std::string launcher;  // "one process", "mpirun", "RANK/WORLD_SIZE", "Slurm"
    Transport transport = Transport::NONE;
    std::vector<std::string> hosts;  // of every rank
    std::string device;              // what this rank computes on, for messages; "" until it is known

    // Returns when all ranks are there. start_timeout: seconds that they may take.
    explicit World(double start_timeout = 300) {
        const Launch launch = read_launch();
        launcher = launch.launcher;
        if (launch.by_mpi) start_mpi(start_timeout);
        else if (launch.size > 1) start_tcp(launch, start_timeout);
        else hosts = {host};
    }
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    // x [count] = sum of every rank's x, the same bits on every rank.
    void sum(float* x, size_t count) const { sum_of(x, count); }
    void sum(double* x, size_t count) const { sum_of(x, count); }
    double sum(double x) const { return sum_of(&x, 1), x; }

    void barrier() const { sum(0.0); }

    // bytes of the root on every rank.
    void broadcast(void* x, size_t bytes, int root) const {
        if (size == 1) return;
        ControlChannel::Waiting waiting(*control);
#ifdef USE_MPI
        if (transport == Transport::MPI) {
            for (size_t i = 0; i < bytes; i += MPI_PIECE)
                MPI_Bcast(static_cast<char*>(x) + i, int(std::min(MPI_PIECE, bytes - i)), MPI_BYTE, root,
                          MPI_COMM_WORLD);
            return;
        }
#endif
        // A binomial tree: after k rounds 2^k ranks have it. Positions count from the root.
        const int position = (rank - root + size) % size;
        int bit = 1;
        while (bit < size && !(position & bit)) bit <<= 1;
        if (position != 0) transfer(rank, nullptr, 0, (position - bit + root) % size, x, bytes);
        for (bit >>= 1; bit > 0; bit >>= 1)
            if (position + bit < size) transfer((position + bit + root) % size, x, bytes, rank, nullptr, 0);
    }

    // Every rank's text, on every rank. Meant for names and digests.
    std::vector<std::string> gather(const std::string& mine) const {
        std::vector<double> lengths(size_t(size), 0.0);
        lengths[size_t(rank)] = double(mine.size());
        sum(lengths.data(), lengths.size());
        std::vector<std::string> all;
        for (int r = 0; r < size; r++) {
            all.push_back(r == rank ? mine : std::string(size_t(lengths[size_t(r)]), '\0'));
            broadcast(&all.back()[0], all.back().size(), r);
        }
        return all;
    }

    // Sends out to one rank while it receives in from another (the same, or this one itself). Who expects something
    // gets exactly that many bytes or an error. A rank with nothing to send or to receive gives 0 bytes and itself.
    void send_receive(int to, const void* out, size_t out_bytes, int from, void* in, size_t in_bytes) const {
        if (size > 1) {
            ControlChannel::Waiting waiting(*control);
            exchange(to, out, out_bytes, from, in, in_bytes);
        } else {
            transfer(to, out, out_bytes, from, in, in_bytes);
        }
    }

    // Fails on all ranks if a text is not the same everywhere. One line tells the first of the text's lines
    // that differs: the first rank that has another one than most ranks, and both. The hint says what to do.
    void require_same(const std::string& text, const std::string& hint) const {
        if (size == 1) return;
        std::vector<std::istringstream> texts;
        for (const std::string& t : gather(text)) texts.emplace_back(t);
        for (bool more = true; more;) {
            more = false;
            std::vector<std::string> lines(size_t(size), "(nothing)");
            std::map<std::string, int> ranks_with;
            for (size_t r = 0; r < lines.size(); r++) {
                std::string line;
                if (std::getline(texts[r], line)) lines[r] = line, more = true;
                ranks_with[lines[r]]++;
            }
            if (ranks_with.size() == 1) continue;
            std::string expected = lines[0];
            for (const std::string& line : lines)
                if (ranks_with[line] > ranks_with[expected]) expected = line;
            const size_t odd = size_t(
                std::find_if(lines.begin(), lines.end(), [&](const std::string& line) { return line != expected; }) -
                lines.begin());
            if (rank != 0) control->wait_for_verdict();  // rank 0 says it for all
            fail("rank %zu on %s has '%s', expected '%s' as on %d of %d ranks; %s", odd, hosts[odd].c_str(),
                 lines[odd].c_str(), expected.c_str(), ranks_with[expected], size, hint.c_str());
        }
    }

    // Every rank has finished its work: returns when all have.
    void finish() {
        control->finish();
#ifdef USE_MPI
        if (transport == Transport::MPI) MPI_Finalize();
#endif
        transport = Transport::NONE;
    }

    // After an error on this rank, which it has printed: ends all ranks with the status, since the others would wait
    // for this one for ever.
    [[noreturn]] void abort(int status) const {
        std::fflush(nullptr);
        control->tell_failure(status);
#ifdef USE_MPI
        if (transport == Transport::MPI) {
            usleep(200000);  // mpirun forwards what was printed, but not after an abort: without the pause 2 of 30
                             // messages were lost
            MPI_Abort(MPI_COMM_WORLD, status);
        }
#endif
        std::_Exit(status);
    }

    // The connection that tells deaths, failures and stalls; see lib/watchdog.h.
    ControlChannel& channel() const { return *control; }

  private:
    std::unique_ptr<ControlChannel> control = std::make_unique<ControlChannel>();
    std::vector<rendezvous::Socket> links;         // TCP: to every other rank
    mutable std::vector<uint64_t> sent, received;  // TCP: messages so far, to and from every rank

    // ---- MPI

    static constexpr size_t MPI_PIECE = size_t(1) << 30;  // MPI counts are 32-bit

    void start_mpi(double start_timeout) {
#ifdef USE_MPI
        int provided;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);  // only the main thread calls MPI
        if (provided < MPI_THREAD_FUNNELED)
            fail("this MPI cannot serve a program that has threads (MPI_THREAD_FUNNELED): install another");
        transport = Transport::MPI;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        MPI_Comm local;
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
        MPI_Comm_rank(local, &local_rank);
        MPI_Comm_size(local, &local_size);
        MPI_Comm_free(&local);
        const char* told = std::getenv(started_by_mpirun());
        if (std::atoi(told) != size)
            fail(
                "the launcher started %s processes (%s), but this program's MPI sees %d: mpirun belongs to another MPI "
                "than the one it "
                "was built with; use the mpirun beside the mpicxx of the build",
                told, started_by_mpirun(), size);
        hosts = gather(host);
        start_control_under_mpi(start_timeout);
#else
        (void)start_timeout;
#endif
    }

#ifdef USE_MPI
    // MPI has brought the ranks together; the control channel's star is built beside it, so that it lives when MPI
    // hangs. Rank 0 listens on any free port and says where; the others try its addresses until one answers with the
    // run's token.
    void start_control_under_mpi(double start_timeout) {
        using namespace rendezvous;
        struct {
            uint64_t token;
            int32_t port, addresses;
            char boot[64], address[16][64];
        } place{};
        Socket listener;
        if (rank == 0) {
            int port = 0;
            listener = listen_on(0, local_size == size, port);
            place.token = random_token(), place.port = port;
            copy_text(place.boot, boot_id());
            for (const std::string& address : own_addresses())
                if (place.addresses < 16) copy_text(place.address[place.addresses++], address);
        }
        MPI_Bcast(&place, int(sizeof place), MPI_BYTE, 0, MPI_COMM_WORLD);
        std::vector<int> sockets(size_t(size), -1);
        if (rank == 0) {
            Gate gate(0, format_text("%s:%d (for the watchdog)", host.c_str(), place.port), size, place.token, "");
            for (int r = 1; r < size; r++) gate.wanted.insert({CONTROL, r});
            gate.open(listener, start_timeout);
            for (int r = 1; r < size; r++)
                sockets[size_t(r)] = gate.take(CONTROL, r).release(), disable_nagle(sockets[size_t(r)]);
        } else {
            std::vector<std::string> addresses = {hosts[0]};
            if (boot_id() == place.boot && hosts[0] == host) addresses.insert(addresses.begin(), "127.0.0.1");
            for (int i = 0; i < place.addresses; i++) addresses.push_back(place.address[i]);
            const Hello hello = make_hello(CONTROL, rank, size, host, "", place.token, 0);
            std::string why;
            for (const double deadline = seconds_now() + start_timeout; sockets[0] < 0; usleep(100000)) {
                for (size_t i = 0; i < addresses.size() && sockets[0] < 0; i++) {
                    Socket s;
                    if (call_once(addresses[i], place.port, hello, 5, s, why) == Reply::WELCOME)
                        sockets[0] = s.release();
                }
                if (sockets[0] < 0 && seconds_now() > deadline)
                    fail(
                        "the watchdog of rank %d on %s cannot reach rank 0 on %s, port %d, at any of its addresses "
                        "(%s): %s; a firewall "
                        "between the hosts must let it through",
                        rank, host.c_str(), hosts[0].c_str(), place.port, addresses.back().c_str(), why.c_str());
            }
        }
        control->start(rank, hosts, sockets, true);
    }

    // Of this host's network interfaces that are up, without the loopback.
    static std::vector<std::string> own_addresses() {
        std::vector<std::string> addresses;
        ifaddrs* interfaces = nullptr;
        if (getifaddrs(&interfaces) != 0) return addresses;
        for (ifaddrs* i = interfaces; i; i = i->ifa_next) {
            if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
            sockaddr_storage a{};
            const int family = i->ifa_addr->sa_family;
            const socklen_t length = family == AF_INET    ? sizeof(sockaddr_in)
                                     : family == AF_INET6 ? sizeof(sockaddr_in6)
                                                          : 0;
            if (!length) continue;
            std::memcpy(&a, i->ifa_addr, length);
            addresses.push_back(rendezvous::numeric_address(a, length));
        }
        freeifaddrs(interfaces);
        return addresses;
    }
#endif

    // ---- TCP

    // Rank 0 listens at the address that all know. Every other rank calls it twice, for data and for control, and says
    // where it listens itself; when all have come, rank 0 sends the list of all, and every rank calls those between 0
    // and itself.
    void start_tcp(const Launch& launch, double start_timeout) {
        using namespace rendezvous;
        transport = Transport::TCP, rank = launch.rank, size = launch.size;
        const bool loopback = is_loopback(launch.address);
        const std::string place = format_text("%s:%d", launch.address.c_str(), launch.port);
        std::vector<Entry> list(static_cast<size_t>(size));
        std::vector<int> control_sockets(size_t(size), -1);
        links.resize(size_t(size)), sent.resize(size_t(size)), received.resize(size_t(size));
        uint64_t token;
        int port = 0;
        const Socket listener = listen_on(rank == 0 ? launch.port : 0, loopback, port);
        const double list_deadline = seconds_now() + start_timeout + 30;
        if (rank == 0) {
            token = random_token();
            Gate gate(0, place, size, 0, launch.run);
            for (int r = 1; r < size; r++) gate.wanted.insert({DATA, r}), gate.wanted.insert({CONTROL, r});
            gate.open(listener, start_timeout);
            copy_text(list[0].host, host), copy_text(list[0].boot, boot_id());
            for (int r = 1; r < size; r++) {
                const Hello& hello = gate.come.at({DATA, r}).second;
                Entry& entry = list[size_t(r)];
                links[size_t(r)] = gate.take(DATA, r), control_sockets[size_t(r)] = gate.take(CONTROL, r).release();
                copy_text(entry.host, hello.host), copy_text(entry.boot, hello.boot),
                    copy_text(entry.address, peer_address(links[size_t(r)].fd));
                entry.data_port = hello.data_port;
                disable_nagle(links[size_t(r)].fd), disable_nagle(control_sockets[size_t(r)]);
            }
            const Answer go = make_answer("");
            for (int r = 1; r < size; r++) {
                std::string why = send_all(links[size_t(r)].fd, &go, sizeof go, list_deadline);
                if (why.empty()) why = send_all(links[size_t(r)].fd, &token, sizeof token, list_deadline);
                if (why.empty())
                    why = send_all(links[size_t(r)].fd, list.data(), list.size() * sizeof(Entry), list_deadline);
                if (!why.empty())
                    fail("rank %d on %s is lost before the run began: %s", r, list[size_t(r)].host, why.c_str());
            }
        } else {
            links[0] = call(launch.address, launch.port, make_hello(DATA, rank, size, host, launch.run, 0, port), 0,
                            start_timeout);
            control_sockets[0] = call(launch.address, launch.port,
                                      make_hello(CONTROL, rank, size, host, launch.run, 0, port), 0, start_timeout)
                                     .release();
            Answer go{};
            std::string why = receive_all(links[0].fd, &go, sizeof go, list_deadline);
            if (why.empty() && !go.welcome)
                fail("rank 0 at %s gave up: %.*s", place.c_str(), int(sizeof go.text) - 1, go.text);
            if (why.empty()) why = receive_all(links[0].fd, &token, sizeof token, list_deadline);
            if (why.empty()) why = receive_all(links[0].fd, list.data(), list.size() * sizeof(Entry), list_deadline);
            if (!why.empty())
                fail("rank %d on %s lost rank 0 at %s before the run began: %s; see rank 0's output", rank,
                     host.c_str(), place.c_str(), why.c_str());
        }
        local_rank = local_size = 0;
        for (int r = 0; r < size; r++) {
            hosts.push_back(list[size_t(r)].host);
            const Entry &entry = list[size_t(r)], &own = list[size_t(rank)];
            const bool here = !std::strcmp(entry.host, own.host) && !std::strcmp(entry.boot, own.boot);
            local_size += here, local_rank += here && r < rank;
        }
        if (launch.local_rank >= 0) local_rank = launch.local_rank;
        if (launch.local_size > 0) local_size = launch.local_size;
        local_size = std::max(local_size, local_rank + 1);
        control->start(rank, hosts, control_sockets, false);  // from here on a lost rank is noticed
        if (rank == 0) return;
        // Who reached rank 0 over its loopback is on rank 0's host.
        const std::string address_of_rank_0 = peer_address(links[0].fd);
        for (int r = 1; r < rank; r++) {
            const Entry& entry = list[size_t(r)];
            links[size_t(r)] = call(is_loopback(entry.address) ? address_of_rank_0 : entry.address, entry.data_port,
                                    make_hello(DATA, rank, size, host, launch.run, token, port), r, start_timeout);
        }
        Gate gate(rank, format_text("%s:%d", host.c_str(), port), size, token, launch.run);
        for (int r = rank + 1; r < size; r++) gate.wanted.insert({DATA, r});
        gate.open(listener, start_timeout);
        for (int r = rank + 1; r < size; r++) links[size_t(r)] = gate.take(DATA, r), disable_nagle(links[size_t(r)].fd);
    }

    // In front of every message, so that ranks that do not do the same are found at once and not by wrong numbers.
    struct Header {
        uint64_t number, bytes;
    };

    [[noreturn]] void broken(int partner, const std::string& why) const {
        control->wait_for_verdict();
        fail("the connection to rank %d on %s broke: %s", partner, hosts[size_t(partner)].c_str(), why.c_str());
    }

    // send_receive of whole messages over the connections, both directions at once, so that any pattern of partners
    // gets through.
    void transfer(int to, const void* out, size_t out_bytes, int from, void* in, size_t in_bytes) const {
        if ((to == rank) != (from == rank) && (to == rank ? out_bytes : in_bytes) != 0)
            fail("send_receive: rank %d sends to %d and receives from %d: with itself both ends must be its own", rank,
                 to, from);
        if (to == rank && from == rank) {
            if (out_bytes != in_bytes)
                fail("send_receive: rank %d sends itself %zu bytes and expects %zu", rank, out_bytes, in_bytes);
            if (out_bytes) std::memmove(in, out, out_bytes);
            return;
        }
        const bool sends = to != rank, receives = from != rank;
        Header out_header{}, in_header{};
        if (sends) out_header = {sent[size_t(to)]++, out_bytes};
        const uint64_t expected = receives ? received[size_t(from)]++ : 0;
        const size_t H = sizeof(Header), out_total = sends ? H + out_bytes : 0, in_total = receives ? H + in_bytes : 0;
        size_t out_done = 0, in_done = 0;
        while (out_done < out_total || in_done < in_total) {
            pollfd polled[2] = {{out_done < out_total ? links[size_t(to)].fd : -1, POLLOUT, 0},
                                {in_done < in_total ? links[size_t(from)].fd : -1, POLLIN, 0}};
            if (poll(polled, 2, -1) < 0 && errno != EINTR) fail("poll: %s", std::strerror(errno));
            if (polled[0].revents) {
                iovec parts[2] = {
                    {reinterpret_cast<char*>(&out_header) + std::min(out_done, H), H - std::min(out_done, H)},
                    {static_cast<char*>(const_cast<void*>(out)) + (std::max(out_done, H) - H),
                     out_total - std::max(out_done, H)}};
                msghdr message{};
                message.msg_iov = parts, message.msg_iovlen = 2;
                const ssize_t n = sendmsg(polled[0].fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
                if (n < 0 && errno != EAGAIN && errno != EINTR) broken(to, std::strerror(errno));
                if (n > 0) out_done += size_t(n);
            }
            if (polled[1].revents) {
                const bool head = in_done < H;
                const ssize_t n =
                    head ? recv(polled[1].fd, reinterpret_cast<char*>(&in_header) + in_done, H - in_done, MSG_DONTWAIT)
                         : recv(polled[1].fd, static_cast<char*>(in) + (in_done - H), in_total - in_done, MSG_DONTWAIT);
                if (n == 0) broken(from, "it closed it");
                if (n < 0 && errno != EAGAIN && errno != EINTR) broken(from, std::strerror(errno));
                if (n > 0) in_done += size_t(n);
                if (head && in_done == H && (in_header.number != expected || in_header.bytes != in_bytes))
                    fail(
                        "rank %d on %s sent message %llu of %llu bytes, expected message %llu of %zu bytes: the ranks "
                        "do not do the same",
                        from, hosts[size_t(from)].c_str(), (unsigned long long)in_header.number,
                        (unsigned long long)in_header.bytes, (unsigned long long)expected, in_bytes);
            }
            control->bytes_moved();
        }
    }

    void exchange(int to, const void* out, size_t out_bytes, int from, void* in, size_t in_bytes) const {
#ifdef USE_MPI
        if (transport == Transport::MPI) {
            const int out_rank = to == rank && out_bytes == 0 ? MPI_PROC_NULL : to,
                      in_rank = from == rank && in_bytes == 0 ? MPI_PROC_NULL : from;
            size_t i = 0;
            do {
                const size_t o = i < out_bytes ? std::min(MPI_PIECE, out_bytes - i) : 0,
                             n = i < in_bytes ? std::min(MPI_PIECE, in_bytes - i) : 0;
                MPI_Sendrecv(static_cast<const char*>(out) + i, int(o), MPI_BYTE,
                             i == 0 || o ? out_rank : MPI_PROC_NULL, 0, static_cast<char*>(in) + i, int(n), MPI_BYTE,
                             i == 0 || n ? in_rank : MPI_PROC_NULL, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                i += MPI_PIECE;
            } while (i < std::max(out_bytes, in_bytes));
            return;
        }
#endif
        transfer(to, out, out_bytes, from, in, in_bytes);
    }

    // ---- sums

    template <class T>
    void sum_of(T* x, size_t count) const {
        if (size == 1) return;
        ControlChannel::Waiting waiting(*control);
#ifdef USE_MPI
        if (transport == Transport::MPI) {
            const size_t piece = 25'000'000 / sizeof(T);  // stays in cache on the way
            for (size_t i = 0; i < count; i += piece, control->bytes_moved())
                MPI_Allreduce(MPI_IN_PLACE, x + i, int(std::min(piece, count - i)),
                              sizeof(T) == sizeof(float) ? MPI_FLOAT : MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
            return;
        }
#endif
        if (count * sizeof(T) <= 32768) sum_at_rank_0(x, count);
        else sum_around_ring(x, count);
    }

    // Few numbers: two messages of latency. Rank 0 adds in the order of ranks.
    template <class T>
    void sum_at_rank_0(T* x, size_t count) const {
        if (rank == 0) {
            std::vector<T> other(count);
            for (int r = 1; r < size; r++) {
                transfer(rank, nullptr, 0, r, other.data(), count * sizeof(T));
                for (size_t i = 0; i < count; i++) x[i] += other[i];
            }
            for (int r = 1; r < size; r++) transfer(r, x, count * sizeof(T), rank, nullptr, 0);
        } else {
            transfer(0, x, count * sizeof(T), rank, nullptr, 0);
            transfer(rank, nullptr, 0, 0, x, count * sizeof(T));
        }
    }

    // Many numbers, in `size` parts: every part goes around the ring once to be added up (each rank adds its own to
    // what comes), and once more to be given to all, so every rank sends and receives 2 (size - 1) / size of the whole.
    // A part is added up in one order, by one rank after the other, and copied: the same bits everywhere.
    template <class T>
    void sum_around_ring(T* x, size_t count) const {
        const int next = (rank + 1) % size, previous = (rank - 1 + size) % size;
        const auto first = [&](int part) { return size_t((unsigned __int128)count * unsigned(part) / unsigned(size)); };
        const size_t piece = (size_t(1) << 20) / sizeof(T);  // stays in cache between arrival and addition
        std::vector<T> come(piece);
        for (int round = 0; round < 2 * (size - 1); round++) {
            const bool adding = round < size - 1;
            // in the last round of the sum a rank completes the part behind its own
            const int out_part = (rank - round + 2 * size) % size, in_part = (out_part - 1 + size) % size;
            const size_t out_first = first(out_part), out_count = first(out_part + 1) - out_first;
            const size_t in_first = first(in_part), in_count = first(in_part + 1) - in_first;
            if (!adding) {
                transfer(next, x + out_first, out_count * sizeof(T), previous, x + in_first, in_count * sizeof(T));
                continue;
            }
            for (size_t i = 0; i < std::max(out_count, in_count); i += piece) {
                const size_t o = i < out_count ? std::min(piece, out_count - i) : 0,
                             n = i < in_count ? std::min(piece, in_count - i) : 0;
                transfer(o ? next : rank, x + out_first + std::min(i, out_count), o * sizeof(T), n ? previous : rank,
                         come.data(), n * sizeof(T));
                for (size_t k = 0; k < n; k++) x[in_first + i + k] += come[k];
            }
        }
    }
};

inline Watchdog::Watchdog(World& world, const WatchdogOptions& options)
    : Watchdog(world.channel(), world.rank, world.host, options) {}

// The name and version of the MPI library; nullptr without one.
inline const char* mpi_name() {
#ifdef USE_MPI
    static char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);  // allowed before MPI_Init
    for (char* c = text; *c; c++)
        if (*c == '\n' || *c == '\t') *c = *c == '\n' ? '\0' : ' ';
    return text;
#else
    return nullptr;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Who reduces and who updates what. The flat array of all gradients is cut into buckets of equal
// size, and every bucket into as many equal parts as there are ranks. With --zero 1 a rank keeps
// optimiser state for its parts alone ("owned"), one after the other without gaps (rank r's shard).

struct Piece {
    size_t begin, count;  // in the flat array
    size_t local;         // where its optimiser state lies in this rank's arrays
};

struct Partition {
    size_t elements = 0;  // of the flat arrays: at least one more than the model has: the guard of gradient_norm()
    size_t bucket = 0;    // elements of a bucket; the last one may be shorter
    int ranks = 1;

    Partition() = default;
    Partition(size_t total, int number_of_ranks, double bucket_mb) : ranks(number_of_ranks) {
        const size_t unit = CHUNK * size_t(ranks), wanted = size_t(bucket_mb * 1e6 / sizeof(float));
        elements = (total + 1 + unit - 1) / unit * unit;
        bucket = std::min(elements, std::max(unit, wanted / unit * unit));
    }
    size_t buckets() const { return (elements + bucket - 1) / bucket; }
    size_t begin(size_t b) const { return b * bucket; }
    size_t size(size_t b) const { return std::min(bucket, elements - b * bucket); }
    size_t shard() const { return elements / size_t(ranks); }
    Piece part(size_t b, int rank) const {
        return {begin(b) + size_t(rank) * (size(b) / size_t(ranks)), size(b) / size_t(ranks), begin(b) / size_t(ranks)};
    }
    std::vector<Piece> parts(int rank) const {
        std::vector<Piece> all;
        for (size_t b = 0; b < buckets(); b++) all.push_back(part(b, rank));
        return all;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Reducers.

struct ReduceOptions {
    int zero = 0;                // 1: a rank needs the sums of its own parts only
    bool bf16 = false;           // what travels is rounded to bf16
    bool deterministic = false;  // fp32 in a fixed tree over the ranks, after the backward pass
};

// Seconds during which reductions were under way, those of them in which the step waited for nothing else, and in how
// many steps.
struct ReduceTimes {
    double total = 0, exposed = 0;
    int64_t steps = 0;
    void add(double under_way, double waited) { total += under_way, exposed += waited; }
};

// x: one block of `bytes` per rank, of which this rank's is filled; afterwards all are.
inline void all_gather(const World& world, void* x, size_t bytes) {
    char* blocks = static_cast<char*>(x);
#ifdef USE_MPI
    if (world.transport == Transport::MPI) {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x, int(bytes), MPI_BYTE, MPI_COMM_WORLD);
        return;
    }
#endif
    for (int step = 0; step + 1 < world.size; step++) {  // a ring: pass on what came last
        const int sent = (world.rank - step + world.size) % world.size, taken = (sent - 1 + world.size) % world.size;
        world.send_receive((world.rank + 1) % world.size, blocks + size_t(sent) * bytes, bytes,
                           (world.rank - 1 + world.size) % world.size, blocks + size_t(taken) * bytes, bytes);
    }
}

// Sums gradients in the host's memory over the ranks. While the backward pass runs from the last layer to the first,
// ready(offset) says that everything from `offset` on is final: full buckets from there on are handed over, the last
// one first, and travel while earlier layers compute. finish() waits for them. Over MPI that is MPI_Iallreduce
// (--zero 1: MPI_Ireduce_scatter_block), which progresses whenever ready() tests it; over TCP a thread of its own.
template <class Dev>
class HostReducer {
    using Grad = typename Dev::Grad;

  public:
    ReduceTimes times;

    HostReducer(Dev&, const World& w, const Partition& p, Grad* g, const ReduceOptions& o)
        : world(w), partition(p), grads(g), options(o), next(p.buckets()) {
        static_assert(std::is_same<Grad, float>::value, "ranks exchange fp32");
        if (world.size > 1 && options.bf16 && world.transport == Transport::TCP)
            fail_usage(
                "--grad-reduce bf16 needs MPI or NCCL, but these ranks talk over TCP: use --grad-reduce fp32, or start "
                "them with mpirun");
#ifdef USE_MPI
        if (options.bf16) MPI_Op_create(add_bf16, 1, &sum_bf16);
        if (world.transport == Transport::MPI) requests.resize(partition.buckets(), MPI_REQUEST_NULL);
        if (options.bf16) narrow.resize(partition.elements);
        if (options.zero) received.resize(partition.shard());
        if (options.zero && options.bf16) narrow_received.resize(partition.shard());
#endif
        if (world.transport == Transport::TCP && !options.deterministic)
            sender = std::thread([this] { send_buckets(); });
    }
    ~HostReducer() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            ended = true;
        }
        changed.notify_all();
        if (sender.joinable()) sender.join();
#ifdef USE_MPI
        if (options.bf16) MPI_Op_free(&sum_bf16);
#endif
    }
    HostReducer(const HostReducer&) = delete;
    HostReducer& operator=(const HostReducer&) = delete;

    // Gradients at `offset` and behind are final. The step's first call comes with the largest offset.
    void ready(size_t offset) {
        if (options.deterministic) return;
        while (next > 0 && partition.begin(next - 1) >= offset) launch(--next);
        progress();
    }

    // Every gradient is final: waits until the sums are there, everywhere or, with --zero 1, in this rank's parts.
    void finish() {
        const double start = seconds_now();
        if (options.deterministic) {
            add_in_tree();
        } else {
            ready(0);
            wait();
        }
        next = partition.buckets();
        const double waited = seconds_now() - start;
        times.add(options.deterministic ? waited : under_way(), waited), times.steps++;
    }
    void read_clocks() {}  // the times are always up to date

    // Arrays of which every rank filled other elements and left zeros elsewhere.
    void complete(double* x, size_t count) { world.sum(x, count); }

    // --zero 1, after the update: every rank gets the others' parts of the parameters.
    template <class T>
    void gather(T* params) {
        const double start = seconds_now();
        for (size_t b = 0; b < partition.buckets(); b++)
            all_gather(world, params + partition.begin(b), partition.size(b) / size_t(partition.ranks) * sizeof(T));
        times.add(seconds_now() - start, seconds_now() - start);
    }

    static std::string describe(const World& world) { return world.transport == Transport::MPI ? "MPI" : "TCP"; }

  private:
    const World& world;
    const Partition partition;
    Grad* grads;
    const ReduceOptions options;
    size_t next;  // buckets below this one are not handed over yet
    double first_launch = 0, last_end = 0;
    std::vector<uint16_t> narrow, narrow_received;
    std::vector<float> received;
    // TCP
    std::thread sender;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<size_t> queue;  // buckets handed over and not summed yet, the running one included
    bool ended = false;
    std::exception_ptr failure;

    double under_way() const { return first_launch > 0 ? std::max(0.0, last_end - first_launch) : 0; }

    void launch(size_t b) {
        if (next + 1 == partition.buckets()) first_launch = seconds_now();
        if (world.transport == Transport::TCP) {
            std::lock_guard<std::mutex> lock(mutex);
            queue.push_back(b);
            changed.notify_all();
        }
#ifdef USE_MPI
        if (world.transport != Transport::MPI) return;
        Grad* x = grads + partition.begin(b);
        const size_t count = partition.size(b), share = count / size_t(partition.ranks),
                     place = partition.part(b, world.rank).local;
        if (options.bf16) {
            uint16_t* y = narrow.data() + partition.begin(b);
            for (size_t i = 0; i < count; i++) y[i] = to_bf16(x[i]);
            if (options.zero)
                MPI_Ireduce_scatter_block(y, narrow_received.data() + place, int(share), MPI_UINT16_T, sum_bf16,
                                          MPI_COMM_WORLD, &requests[b]);
            else MPI_Iallreduce(MPI_IN_PLACE, y, int(count), MPI_UINT16_T, sum_bf16, MPI_COMM_WORLD, &requests[b]);
        } else if (options.zero) {
            MPI_Ireduce_scatter_block(x, received.data() + place, int(share), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                                      &requests[b]);
        } else {
            MPI_Iallreduce(MPI_IN_PLACE, x, int(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &requests[b]);
        }
#endif
    }

    void progress() {
#ifdef USE_MPI
        if (world.transport != Transport::MPI || next == partition.buckets()) return;
        int all;
        MPI_Testall(int(requests.size()), requests.data(), &all, MPI_STATUSES_IGNORE);
        if (all) last_end = seconds_now();
#endif
    }

    void wait() {
        if (world.transport == Transport::TCP) {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [&] { return queue.empty() || failure; });
            if (failure) std::rethrow_exception(failure);
            last_end = seconds_now();
        }
#ifdef USE_MPI
        if (world.transport != Transport::MPI) return;
        for (int one = 0; one != MPI_UNDEFINED; world.channel().bytes_moved())  // a slow network is no stall
            MPI_Waitany(int(requests.size()), requests.data(), &one, MPI_STATUS_IGNORE);
        last_end = seconds_now();
        for (size_t b = 0; b < partition.buckets(); b++) {
            const Piece part = partition.part(b, world.rank);
            if (options.zero && options.bf16)
                for (size_t i = 0; i < part.count; i++)
                    grads[part.begin + i] = from_bf16(narrow_received[part.local + i]);
            else if (options.zero) std::copy_n(received.data() + part.local, part.count, grads + part.begin);
            else if (options.bf16)
                for (size_t i = partition.begin(b); i < partition.begin(b) + partition.size(b); i++)
                    grads[i] = from_bf16(narrow[i]);
        }
#endif
    }

    void send_buckets() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return ended || !queue.empty(); });
            if (ended) return;
            const size_t b = queue.front();
            lock.unlock();
            std::exception_ptr thrown;
            try {
                world.sum(grads + partition.begin(b), partition.size(b));
            } catch (...) {
                thrown = std::current_exception();
            }
            lock.lock();
            queue.pop_front();
            if (thrown) failure = thrown;
            changed.notify_all();
            if (failure) return;
        }
    }

    // --deterministic. Rank r holds the sum of the samples r, r + size, r + 2 size ...; ranks r and r + size / 2 add
    // theirs, then distances of size / 4 ... 1: the upper levels of the tree of sum_in_tree(). a + b = b + a, so both
    // partners have the same bits.
    void add_in_tree() {
        std::vector<float> theirs(std::min<size_t>(partition.elements, 6'250'000));
        for (int distance = world.size / 2; distance > 0; distance /= 2)
            for (size_t at = 0; at < partition.elements; at += theirs.size()) {
                const size_t count = std::min(theirs.size(), partition.elements - at);
                const int partner = world.rank ^ distance;
                world.send_receive(partner, grads + at, count * sizeof(float), partner, theirs.data(),
                                   count * sizeof(float));
#pragma omp parallel for simd schedule(static)
                for (size_t i = 0; i < count; i++) grads[at + i] += theirs[i];
            }
    }

#ifdef USE_MPI
    std::vector<MPI_Request> requests;
    MPI_Op sum_bf16 = MPI_OP_NULL;
    static void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
        const uint16_t* x = static_cast<const uint16_t*>(in);
        uint16_t* y = static_cast<uint16_t*>(inout);
        for (int i = 0; i < *count; i++) y[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
    }
#endif
};

#ifdef CUDA_CHECK
namespace kernels {

__global__ void narrow_kernel(__nv_bfloat16* y, const float* x, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = __nv_bfloat16(x[i]);
}
__global__ void widen_kernel(float* y, const __nv_bfloat16* x, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = float(x[i]);
}
}  // namespace kernels

#if defined(USE_NCCL) || !defined(__CUDACC__)
// Sums gradients over GPUs with NCCL, one rank a GPU, on a stream of its own: as in HostReducer, buckets travel
// while the backward pass of earlier layers runs. Events order the two streams; the host waits for neither.
class NcclReducer {
  public:
    ReduceTimes times;

    static ncclUniqueId agree_on_id(const World& world) {
        ncclUniqueId id = {};
        if (world.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        world.broadcast(&id, sizeof id, 0);
        return id;
    }
    NcclReducer(Cuda& d, const World& w, const Partition& p, float* g, const ReduceOptions& o)
        : NcclReducer(d, w, p, g, o, agree_on_id(w)) {}
    NcclReducer(Cuda& d, const World& w, const Partition& p, float* g, const ReduceOptions& o, ncclUniqueId id)
        : dev(d), world(w), partition(p), grads(g), options(o), next(p.buckets()) {
        NCCL_CHECK(ncclCommInitRank(&communicator, world.size, id, world.rank));
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&reduced, cudaEventDisableTiming));
        for (cudaEvent_t& e : marks) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
        for (Clock& c : clocks)
            for (cudaEvent_t* e : {&c.first, &c.last, &c.backward, &c.gather, &c.gathered})
                CUDA_CHECK(cudaEventCreate(e));
        if (options.bf16) narrow = dev.allocate<__nv_bfloat16>(partition.bucket);
        if (options.deterministic) gathered = dev.allocate<float>(piece() * size_t(world.size));
    }
    ~NcclReducer() {  // errors are of no use here
        cudaStreamSynchronize(stream);
        dev.release(narrow), dev.release(gathered);
        for (Clock& c : clocks)
            for (cudaEvent_t e : {c.first, c.last, c.backward, c.gather, c.gathered}) cudaEventDestroy(e);
        for (cudaEvent_t e : {computed, reduced, marks[0], marks[1]}) cudaEventDestroy(e);
        ncclCommDestroy(communicator);
        cudaStreamDestroy(stream);
    }
    NcclReducer(const NcclReducer&) = delete;
    NcclReducer& operator=(const NcclReducer&) = delete;

    void ready(size_t offset) {
        if (options.deterministic || next == 0 || partition.begin(next - 1) < offset) return;
        follow_compute();
        if (next == partition.buckets()) start_clock(clocks[step % 2]);
        while (next > 0 && partition.begin(next - 1) >= offset) launch_bucket(--next);
    }
    void finish() {
        Clock& clock = clocks[step % 2];
        if (options.deterministic) {
            follow_compute();
            start_clock(clock);
        }
        CUDA_CHECK(cudaEventRecord(clock.backward, dev.stream));
        if (options.deterministic) add_in_tree();
        else ready(0);
        CUDA_CHECK(cudaEventRecord(clock.last, stream));
        lead_compute();
        clock.used = true, step++;
        next = partition.buckets();
    }
    // At the end, when the GPU has done all that it was given: adds the times of the last steps.
    void read_clocks() {
        for (Clock& c : clocks) read_clock(c);
    }
    void complete(double* x, size_t count) {
        follow_compute();
        NCCL_CHECK(ncclAllReduce(x, x, count, ncclDouble, ncclSum, communicator, stream));
        lead_compute();
    }
    template <class T>
    void gather(T* params) {
        Clock& clock = clocks[(step + 1) % 2];  // of the step whose finish() came last
        follow_compute();
        CUDA_CHECK(cudaEventRecord(clock.gather, stream));
        for (size_t b = 0; b < partition.buckets(); b++)
            NCCL_CHECK(ncclAllGather(params + partition.part(b, world.rank).begin, params + partition.begin(b),
                                     partition.size(b) / size_t(world.size) * sizeof(T), ncclUint8, communicator,
                                     stream));
        CUDA_CHECK(cudaEventRecord(clock.gathered, stream));
        clock.has_gather = true;
        lead_compute();
    }
    // The host asks for errors until a step's results are there, instead of waiting for them: NCCL's failures do not
    // end a stream's work. mark(): the results were sent off; arrived(): true once the oldest mark that was not seen to
    // arrive has passed.
    void mark() { CUDA_CHECK(cudaEventRecord(marks[marked++ % 2], dev.stream)); }
    bool arrived() {
        const cudaError_t state = cudaEventQuery(marks[seen % 2]);
        if (state == cudaErrorNotReady) return cudaGetLastError(), false;  // no error that the next launch should find
        CUDA_CHECK(state);
        seen++;
        return true;
    }
    // What has gone wrong with a reduction under way, on this or another rank; "" while nothing has.
    std::string error() {
        ncclResult_t result = ncclSuccess;
        NCCL_CHECK(ncclCommGetAsyncError(communicator, &result));
        return result == ncclSuccess || result == ncclInProgress
                   ? ""
                   : format_text("NCCL: %s (%s)", ncclGetErrorString(result), ncclGetLastError(communicator));
    }
    static std::string describe(const World&) { return "NCCL"; }

  private:
    Cuda& dev;
    const World& world;
    const Partition partition;
    float* grads;
    const ReduceOptions options;
    size_t next;  // buckets below this one are not handed over yet
    ncclComm_t communicator = nullptr;
    cudaStream_t stream = nullptr;  // the reductions'
    cudaEvent_t computed = nullptr, reduced = nullptr, marks[2] = {};
    int64_t marked = 0, seen = 0;
    __nv_bfloat16* narrow = nullptr;
    float* gathered = nullptr;
    struct Clock {  // of one step, read two steps later, when it has surely passed
        cudaEvent_t first, last, backward, gather, gathered;
        bool used = false, has_gather = false;
    } clocks[2];
    int64_t step = 0;  // calls of finish()

    // The reductions' stream waits for what was computed so far, and the other way round.
    void follow_compute() {
        CUDA_CHECK(cudaEventRecord(computed, dev.stream));
        CUDA_CHECK(cudaStreamWaitEvent(stream, computed, 0));
    }
    void lead_compute() {
        CUDA_CHECK(cudaEventRecord(reduced, stream));
        CUDA_CHECK(cudaStreamWaitEvent(dev.stream, reduced, 0));
    }
    void start_clock(Clock& c) {
        read_clock(c);
        CUDA_CHECK(cudaEventRecord(c.first, stream));
    }
    void read_clock(Clock& c) {
        if (!c.used) return;
        const bool with_gather = c.has_gather;
        c.used = c.has_gather = false;
        float under_way = 0, exposed = 0, gather = 0;  // milliseconds
        if (cudaEventQuery(with_gather ? c.gathered : c.last) != cudaSuccess ||
            cudaEventElapsedTime(&under_way, c.first, c.last) != cudaSuccess ||
            cudaEventElapsedTime(&exposed, c.backward, c.last) != cudaSuccess ||
            (with_gather && cudaEventElapsedTime(&gather, c.gather, c.gathered) != cudaSuccess))
            return void(cudaGetLastError());
        times.add((under_way + gather) * 1e-3, (std::max(0.0f, exposed) + gather) * 1e-3), times.steps++;
    }
    void launch_bucket(size_t b) {
        float* x = grads + partition.begin(b);
        const size_t count = partition.size(b), share = count / size_t(world.size);
        const Piece part = partition.part(b, world.rank);
        if (!options.bf16) {
            if (options.zero)
                NCCL_CHECK(ncclReduceScatter(x, grads + part.begin, share, ncclFloat, ncclSum, communicator, stream));
            else NCCL_CHECK(ncclAllReduce(x, x, count, ncclFloat, ncclSum, communicator, stream));
            return;
        }
        launch<kernels::narrow_kernel>(kernels::grid_of(count), 256, 0, stream, narrow, x, count);
        __nv_bfloat16* sums = options.zero ? narrow + share * size_t(world.rank) : narrow;
        if (options.zero)
            NCCL_CHECK(ncclReduceScatter(narrow, sums, share, ncclBfloat16, ncclSum, communicator, stream));
        else NCCL_CHECK(ncclAllReduce(narrow, sums, count, ncclBfloat16, ncclSum, communicator, stream));
        if (options.zero)
            launch<kernels::widen_kernel>(kernels::grid_of(share), 256, 0, stream, grads + part.begin, sums, share);
        else launch<kernels::widen_kernel>(kernels::grid_of(count), 256, 0, stream, x, sums, count);
    }

    // --deterministic: every rank gathers all ranks' gradients, a piece at a time, and adds them in
    // HostReducer::add_in_tree's order.
    size_t piece() const { return std::min<size_t>(partition.elements, 6'250'000); }
    void add_in_tree() {
        for (size_t at = 0; at < partition.elements; at += piece()) {
            const size_t count = std::min(piece(), partition.elements - at);
            NCCL_CHECK(ncclAllGather(grads + at, gathered, count * sizeof(float), ncclUint8, communicator, stream));
            for (int distance = world.size / 2; distance > 0; distance /= 2)
                launch<kernels::add_arrays_kernel>(kernels::grid_of(count * size_t(distance)), 256, 0, stream, gathered,
                                                   gathered + count * size_t(distance), count * size_t(distance));
            CUDA_CHECK(cudaMemcpyAsync(grads + at, gathered, count * sizeof(float), cudaMemcpyDeviceToDevice, stream));
        }
    }
};
#endif

// Several GPUs in a build without NCCL: through the host's memory, after the backward pass.
class StagedReducer {
  public:
    ReduceTimes times;
    StagedReducer(Cuda& d, const World& w, const Partition& p, float* g, const ReduceOptions& o)
        : dev(d), partition(p), grads(g), copy(p.elements), inner(host, w, p, copy.data(), o) {}
    void ready(size_t) {}
    void finish() {
        CUDA_CHECK(cudaStreamSynchronize(dev.stream));
        const double start = seconds_now();
        dev.to_host(copy.data(), grads, copy.size());
        inner.finish();
        dev.from_host(grads, copy.data(), copy.size());
        times.add(seconds_now() - start, seconds_now() - start), times.steps++;
    }
    void read_clocks() {}
    void complete(double* x, size_t count) {
        std::vector<double> values(count);
        dev.copy(values.data(), x, count);
        inner.complete(values.data(), count);
        dev.copy(x, values.data(), count);
    }
    template <class T>
    void gather(T* params) {
        std::vector<T> values(partition.elements);
        CUDA_CHECK(cudaStreamSynchronize(dev.stream));
        const double start = seconds_now();
        dev.copy(values.data(), params, values.size());
        inner.gather(values.data());
        dev.copy(params, values.data(), values.size());
        times.add(seconds_now() - start, seconds_now() - start);
    }
    void mark() {}
    bool arrived() { return true; }
    std::string error() { return ""; }
    static std::string describe(const World& world) {
        return HostReducer<Cpu<float>>::describe(world) + " through the host's memory, since this build has no NCCL";
    }

  private:
    Cuda& dev;
    Cpu<float> host;
    const Partition partition;
    float* grads;
    std::vector<float> copy;
    HostReducer<Cpu<float>> inner;
};
#endif

template <class Dev>
struct ReducerOf {
    using type = HostReducer<Dev>;
};
#ifdef CUDA_CHECK
template <>
struct ReducerOf<Cuda> {
#if defined(USE_NCCL) || !defined(__CUDACC__)
    using type = NcclReducer;
#else
    using type = StagedReducer;
#endif
};
#endif
template <class Dev>
using Reducer = typename ReducerOf<Dev>::type;
