// launch.h: how the processes of a run find out what they are, and how they meet. World in ddp.cuh uses it.
//   the machine   processors this process may use, the host's name, a digest of the running program
//   Launch        rank and number of ranks, as mpirun, torchrun or Slurm put them into the environment
//   rendezvous    the star: TCP connections from every rank to rank 0, one for messages and one for the watchdog
#pragma once
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util.h"

// The processors this process may use: what the launcher or the container left of the machine.
inline int usable_processors() {
    static const double quota = cgroup_limits().processors;
    cpu_set_t set;
    const int allowed = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return std::max(1, int(std::min(double(allowed), std::ceil(quota))));
}

// Which processors the launcher left, as text such as "0 1 5".
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
// starts itself again. A policy that the user has set stays.
inline void set_passive_omp_wait(char** argv) {
#ifdef _OPENMP
    if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
    std::error_code error;
    // by its own name, the one that top and pkill show
    execv(std::filesystem::read_symlink("/proc/self/exe", error).c_str(), argv);
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
// What the launcher says, in environment variables.

struct Launch {
    std::string launcher = "one process";
    bool by_mpi = false;  // MPI knows rank and size
    int rank = 0, size = 1;
    int local_rank = -1, local_size = -1;  // -1: not said
    std::string address;                   // where rank 0 listens
    int port = 0;
    std::string run;  // names this run, where the launcher does; a process of another one is refused
};

// The number in a variable. False if it is not set; anything but an integer in the range is the user's error.
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
    const size_t most = 4096;                         // as many ranks as there may be, see read_launch
    std::vector<std::string> hosts, prefixes = {""};  // prefixes: how the names of the current item begin
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

// The variable that says how many processes an MPI launcher started: of MPICH's and Slurm's PMI, or of Open MPI.
// nullptr if there is none.
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
    launch.local_size = read_count("LOCAL_WORLD_SIZE", 1, 4096, -1);
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
            "LOCAL_RANK=%d and RANK=%d in the environment contradict each other: a local rank is at most the rank",
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
    launch.rank = read_count("SLURM_PROCID", 0, 1 << 30, -1);
    launch.local_rank = read_count("SLURM_LOCALID", 0, 4095, -1);
    if (launch.rank < 0)
        fail_usage(
            "SLURM_STEP_ID and SLURM_NTASKS=%d are set in the environment and SLURM_PROCID is not; start the program "
            "with srun",
            size);
    if (launch.rank >= size)
        fail_usage("SLURM_PROCID=%d and SLURM_NTASKS=%d in the environment contradict each other: ranks are 0 to %d",
                   launch.rank, size, size - 1);
    if (launch.local_rank > launch.rank)
        fail_usage(
            "SLURM_LOCALID=%d and SLURM_PROCID=%d in the environment contradict each other: a local rank is at most "
            "the rank",
            launch.local_rank, launch.rank);
    const bool has_job = read_variable("SLURM_JOB_ID", 0, 0xffffffffll, job);
    // below the ports that systems hand out, and a different one for every step of a job
    launch.port = int(10000 + (job * 7 + step) % 20000);
    launch.run = format_text("%lld.%lld", job, step);
    read_master(launch);
    if (!has_job && !std::getenv("MASTER_PORT"))
        fail_usage("SLURM_NTASKS=%d is set and SLURM_JOB_ID is not: set MASTER_PORT to a free port of rank 0's host",
                   size);
    if (!launch.address.empty()) return true;
    for (const char* variable : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"})
        if (const char* list = std::getenv(variable)) return launch.address = expand_host_list(list)[0], true;
    fail_usage(
        "SLURM_NTASKS=%d is set and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is: set MASTER_ADDR to the name "
        "of rank 0's host",
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
        // srun sets PMI's variables too, but its own say the same and are enough.
        const char* tasks = std::getenv("SLURM_NTASKS");
        if (!(tasks && !std::strcmp(tasks, std::getenv(variable)) && launched_by_slurm(launch)))
            fail_usage(
                "this binary was built without MPI and would run as %s independent copies under mpirun; hint: make "
                "deps && make train_nsa, or start it without mpirun",
                std::getenv(variable));
        return launch;
#endif
    }
    if (!launched_by_rank_variables(launch)) launched_by_slurm(launch);
    return launch;
}

// ---------------------------------------------------------------------------------------------------------------------
// Whoever connects says who it is (Hello) and gets an answer (Answer) before anything else is sent, so that a stranger,
// a leftover process or a rank of another run is found at once.

namespace rendezvous {

enum Kind : uint32_t { MESSAGES = 1, CONTROL = 2 };  // of a connection: World's; the watchdog's
constexpr char MAGIC[8] = {'N', 'S', 'A', 'R', 'A', 'N', 'K', '\0'};
constexpr uint32_t VERSION = 2;

struct Hello {
    char magic[8];
    uint32_t version, kind;
    int32_t rank, size, process;
    char run[64];              // names the run, see Launch
    char host[256], boot[64];  // the host's name and boot id tell machines apart
};
struct Answer {
    char magic[8];
    uint32_t version, welcome;
    char text[496];  // why not
};
struct Place {
    char host[256], boot[64];
};

template <size_t N>
void copy_text(char (&to)[N], const std::string& from) {
    std::snprintf(to, N, "%s", from.c_str());
}

// What came from outside and will be printed.
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

inline std::string random_name() {
    uint64_t bits = 0;
    if (getrandom(&bits, sizeof bits, 0) != sizeof bits) fail("cannot read random bytes: %s", std::strerror(errno));
    return format_text("%016llx", (unsigned long long)bits);
}

// ----- sockets

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
    return std::strncmp(text, "::ffff:", 7) == 0 ? text + 7 : text;  // an IPv4 address that reached an IPv6 socket
}
inline bool is_loopback(const std::string& address) {
    return address.compare(0, 4, "127.") == 0 || address == "::1" || address == "localhost";
}

// The addresses of this host's network interfaces that are up, without the loopback.
inline std::vector<std::string> own_addresses() {
    std::vector<std::string> addresses;
    ifaddrs* interfaces = nullptr;
    if (getifaddrs(&interfaces) != 0) return addresses;
    for (ifaddrs* i = interfaces; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        const int family = i->ifa_addr->sa_family;
        const socklen_t length = family == AF_INET    ? sizeof(sockaddr_in)
                                 : family == AF_INET6 ? sizeof(sockaddr_in6)
                                                      : 0;
        if (!length) continue;
        sockaddr_storage a{};
        std::memcpy(&a, i->ifa_addr, length);
        addresses.push_back(numeric_address(a, length));
    }
    freeifaddrs(interfaces);
    return addresses;
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
        auto* in6 = reinterpret_cast<sockaddr_in6*>(&a);
        auto* in4 = reinterpret_cast<sockaddr_in*>(&a);
        socklen_t length;
        if (family == AF_INET6) {
            if (setsockopt(s.fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) != 0) continue;
            in6->sin6_family = AF_INET6, in6->sin6_addr = in6addr_any, in6->sin6_port = htons(uint16_t(port));
            length = sizeof *in6;
        } else {
            in4->sin_family = AF_INET, in4->sin_port = htons(uint16_t(port));
            in4->sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
            length = sizeof *in4;
        }
        if (bind(s.fd, reinterpret_cast<sockaddr*>(&a), length) != 0 || listen(s.fd, 1024) != 0) {
            error = errno;
            if (error == EADDRINUSE) break;
            continue;
        }
        length = sizeof a;
        getsockname(s.fd, reinterpret_cast<sockaddr*>(&a), &length);
        bound_port = ntohs(family == AF_INET6 ? in6->sin6_port : in4->sin_port);
        return s;
    }
    fail("cannot listen on TCP port %d of %s: %s%s", port, host_name().c_str(), std::strerror(error),
         error == EADDRINUSE
             ? "; another run or a leftover process has it (ss -ltnp shows which): end it or set another MASTER_PORT"
             : "");
}

// Small messages leave at once.
inline void disable_nagle(int fd) {
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

// Waits until the socket can do this, or closes. False: the time is over.
inline bool wait_until(int fd, short events, double deadline) {
    while (true) {
        pollfd polled = {fd, events, 0};
        const double left = std::max(0.0, deadline - seconds_now());
        const int n = poll(&polled, 1, int(std::min(left, 60.0) * 1000));
        if (n > 0) return true;
        if (n == 0 && seconds_now() >= deadline) return false;
        if (n < 0 && errno != EINTR) fail("poll: %s", std::strerror(errno));
    }
}

// Tries all addresses of the name, each for `patience` seconds. -1 in fd: none; why holds what the last one answered.
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

constexpr double NEVER = std::numeric_limits<double>::infinity();  // a deadline

// All the bytes, or a text that says why not ("" if all is well).
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

// ----- rank 0: who may join

// refusal "": welcome.
inline Answer make_answer(const std::string& refusal) {
    Answer a{};
    std::memcpy(a.magic, MAGIC, sizeof MAGIC), a.version = VERSION, a.welcome = refusal.empty();
    copy_text(a.text, refusal);
    return a;
}

// Lets every other rank join once with each kind of connection, and refuses everybody else.
class Gate {
    struct Caller {
        Socket socket;
        std::string address;
        Hello hello;
        size_t received;
        double deadline;
    };
    using Key = std::pair<Kind, int>;  // kind of connection, rank
    struct Member {
        Socket socket;
        Hello hello;
    };
    std::string place, run, last_refusal;
    int size;
    std::set<Key> wanted;
    std::map<Key, Member> joined;
    std::vector<Caller> callers;  // who has not said who it is yet

    [[noreturn]] void give_up(const std::string& why) {
        const Answer a = make_answer(why);
        for (const auto& j : joined) send_all(j.second.socket.fd, &a, sizeof a, seconds_now() + 1);
        fail("%s", why.c_str());
    }
    // Such as "ranks 1, 3 of 4".
    std::string missing_ranks() const {
        std::set<int> ranks;
        for (const Key& w : wanted) ranks.insert(w.second);
        std::string list;
        for (const int r : ranks) list += (list.empty() ? "" : ", ") + std::to_string(r);
        return format_text("rank%s %s of %d", ranks.size() == 1 ? "" : "s", list.c_str(), size);
    }
    std::string missing(double seconds) const {
        return format_text(
            "rank 0 waited %.0f s at %s: %s never came%s%s; are they started, with the same MASTER_ADDR and "
            "MASTER_PORT, and does a firewall let them through?",
            seconds, place.c_str(), missing_ranks().c_str(),
            last_refusal.empty() ? "" : "; refused: ", last_refusal.c_str());
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
        const Key key = {Kind(h.kind), h.rank};
        if (wanted.count(key)) return "";
        const auto same = joined.find(key);
        if (same == joined.end()) return who + " is not expected here";
        return who + format_text(": rank %d on %s (process %d) is already here", h.rank, same->second.hello.host,
                                 same->second.hello.process);
    }

    // "" if it has joined.
    std::string admit(Caller& c) {
        std::string refusal = judge(c.hello);
        if (!refusal.empty()) return refusal;
        const Answer a = make_answer("");
        if (!send_all(c.socket.fd, &a, sizeof a, seconds_now() + 10).empty())
            return "it closed the connection before it was answered";
        disable_nagle(c.socket.fd);
        const Key key = {Kind(c.hello.kind), c.hello.rank};
        wanted.erase(key), joined[key] = {std::move(c.socket), c.hello};
        return "";
    }

    void listen_to(size_t k) {
        Caller& c = callers[k];
        const ssize_t n =
            recv(c.socket.fd, reinterpret_cast<char*>(&c.hello) + c.received, sizeof c.hello - c.received, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR) && seconds_now() <= c.deadline) return;
        if (n > 0) c.received += size_t(n);
        std::string refusal;
        if (std::memcmp(c.hello.magic, MAGIC, std::min(c.received, sizeof MAGIC)) != 0)
            refusal = "it is no rank of this program";
        else if (n > 0 && c.received < sizeof c.hello) return;
        else if (c.received < sizeof c.hello)
            refusal = n == 0 ? "it closed the connection before it said who it is" : "it does not say who it is";
        else refusal = admit(c);
        if (!refusal.empty()) {
            const Answer a = make_answer(refusal);
            send_all(c.socket.fd, &a, sizeof a, seconds_now() + 1);
            last_refusal = "a process at " + c.address + ", because " + refusal;
            std::fprintf(stderr, "train_nsa: warning: rank 0 at %s refused a connection from %s: %s\n", place.c_str(),
                         c.address.c_str(), refusal.c_str());
        }
        callers.erase(callers.begin() + long(k));
    }

    void accept_from(const Socket& listener) {
        sockaddr_storage from{};
        socklen_t length = sizeof from;
        Socket s(accept4(listener.fd, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (s.fd >= 0) callers.push_back({std::move(s), numeric_address(from, length), {}, 0, seconds_now() + 10});
    }

  public:
    // listening_at is for messages.
    Gate(const std::string& listening_at, int ranks, const std::string& run_name, const std::vector<Kind>& kinds)
        : place(listening_at), size(ranks) {
        char name[sizeof(Hello::run)];  // as callers write it into their Hello
        copy_text(name, run_name), make_printable(name);
        run = name;
        for (const Kind kind : kinds)
            for (int r = 1; r < size; r++) wanted.insert({kind, r});
    }

    // Returns when all have joined.
    void open(const Socket& listener, double seconds) {
        const double start = seconds_now();
        for (bool silent = true; !wanted.empty();) {
            if (silent && seconds_now() > start + 5) {
                std::printf("ranks:  rank 0 waits at %s for %s\n", place.c_str(), missing_ranks().c_str());
                std::fflush(stdout);
                silent = false;
            }
            std::vector<pollfd> polled = {{listener.fd, POLLIN, 0}};
            for (const Caller& c : callers) polled.push_back({c.socket.fd, POLLIN, 0});
            for (const auto& j : joined) polled.push_back({j.second.socket.fd, POLLRDHUP, 0});
            poll(polled.data(), nfds_t(polled.size()), 100);
            size_t i = 1 + callers.size();
            for (const auto& j : joined)
                if (polled[i++].revents)
                    give_up(format_text("rank %d on %s is gone before the run began; see its output", j.first.second,
                                        j.second.hello.host));
            for (size_t k = callers.size(); k-- > 0;)
                if (polled[1 + k].revents || seconds_now() > callers[k].deadline) listen_to(k);
            if (polled[0].revents) accept_from(listener);
            if (seconds_now() > start + seconds && !wanted.empty()) give_up(missing(seconds));
        }
        callers.clear();
    }
    Socket take(Kind kind, int rank) { return std::move(joined.at({kind, rank}).socket); }
    const Hello& hello_of(Kind kind, int rank) const { return joined.at({kind, rank}).hello; }
};

// ----- the other ranks: how they join

inline Hello make_hello(Kind kind, int rank, int size, const std::string& host, const std::string& run) {
    Hello h{};
    std::memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.version = VERSION, h.kind = kind, h.rank = rank, h.size = size, h.process = int(getpid());
    copy_text(h.run, run), copy_text(h.host, host), copy_text(h.boot, boot_id());
    return h;
}

enum class Reply { WELCOME, REFUSED, STRANGER, NONE };

// Calls once. connected: on WELCOME the connection. why: on REFUSED rank 0's reason, on NONE what went wrong.
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

// Calls rank 0, which listens or will, until it answers or the time is over. A refusal is final.
inline Socket call(const std::string& address, int port, const Hello& hello, double seconds) {
    const double deadline = seconds_now() + seconds;
    for (double pause = 0.05;; pause = std::min(1.0, pause * 1.5)) {
        Socket s;
        std::string why;
        const Reply reply = call_once(address, port, hello, std::min(20.0, seconds), s, why);
        if (reply == Reply::WELCOME) return s;
        if (reply == Reply::STRANGER)
            fail(
                "rank %d on %s: what answers at %s:%d is not rank 0 of this program; set another MASTER_PORT on all "
                "ranks",
                hello.rank, hello.host, address.c_str(), port);
        if (reply == Reply::REFUSED)
            fail("rank 0 at %s:%d refused this process: %s", address.c_str(), port, why.c_str());
        if (seconds_now() > deadline)
            fail(
                "rank %d on %s waited %.0f s for rank 0 at %s:%d: %s; is rank 0 started, is the address "
                "(MASTER_ADDR, MASTER_PORT) its own, and does a firewall let it through?",
                hello.rank, hello.host, seconds, address.c_str(), port, why.c_str());
        usleep(useconds_t(pause * 1e6));
    }
}

// ----- the star

// This rank's ends: on rank 0 [r] leads to rank r, on the others [0] to rank 0; -1 where there is none.
struct Star {
    std::vector<Socket> messages;
    std::vector<int> control;   // for ControlChannel, which closes them
    std::vector<Place> places;  // of every rank
    explicit Star(int size) : messages(size_t(size)), control(size_t(size), -1), places(size_t(size)) {}
};

// Rank 0 listens at the launch's address until all are there, then tells everybody where the others are.
inline Star host_star(const Launch& launch, const std::string& host, double seconds) {
    Star star(launch.size);
    const std::string at = format_text("%s:%d", launch.address.c_str(), launch.port);
    int port = 0;
    const Socket listener = listen_on(launch.port, is_loopback(launch.address), port);
    Gate gate(at, launch.size, launch.run, {MESSAGES, CONTROL});
    gate.open(listener, seconds);
    copy_text(star.places[0].host, host), copy_text(star.places[0].boot, boot_id());
    for (int r = 1; r < launch.size; r++) {
        const Hello& hello = gate.hello_of(MESSAGES, r);
        copy_text(star.places[size_t(r)].host, hello.host), copy_text(star.places[size_t(r)].boot, hello.boot);
        star.messages[size_t(r)] = gate.take(MESSAGES, r);
        star.control[size_t(r)] = gate.take(CONTROL, r).release();
    }
    const Answer go = make_answer("");
    for (int r = 1; r < launch.size; r++) {
        const int fd = star.messages[size_t(r)].fd;
        std::string why = send_all(fd, &go, sizeof go, seconds_now() + 30);
        if (why.empty()) why = send_all(fd, star.places.data(), star.places.size() * sizeof(Place), seconds_now() + 30);
        if (!why.empty())
            fail("rank %d on %s is lost before the run began: %s", r, star.places[size_t(r)].host, why.c_str());
    }
    return star;
}

inline Star join_star(const Launch& launch, const std::string& host, double seconds) {
    Star star(launch.size);
    const auto connect_as = [&](Kind kind) {
        return call(launch.address, launch.port, make_hello(kind, launch.rank, launch.size, host, launch.run), seconds);
    };
    star.messages[0] = connect_as(MESSAGES);
    star.control[0] = connect_as(CONTROL).release();
    const int fd = star.messages[0].fd;
    const double deadline = seconds_now() + seconds + 30;
    Answer go{};
    std::string why = receive_all(fd, &go, sizeof go, deadline);
    if (why.empty() && !go.welcome)
        fail("rank 0 at %s:%d gave up: %.*s", launch.address.c_str(), launch.port, int(sizeof go.text) - 1, go.text);
    if (why.empty()) why = receive_all(fd, star.places.data(), star.places.size() * sizeof(Place), deadline);
    if (!why.empty())
        fail("rank %d on %s lost rank 0 at %s:%d before the run began: %s; see rank 0's output", launch.rank,
             host.c_str(), launch.address.c_str(), launch.port, why.c_str());
    return star;
}

inline Star make_star(const Launch& launch, const std::string& host, double seconds) {
    return launch.rank == 0 ? host_star(launch, host, seconds) : join_star(launch, host, seconds);
}

}  // namespace rendezvous
