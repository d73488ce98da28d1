// rendezvous.h: ranks that no MPI brings together (torchrun, srun without a PMI, a loop in a shell) get the id of
// NCCL's communicator from rank 0. Each sends a Request over a TCP connection of its own and receives an Answer;
// nothing else ever travels this way. A request of another run is refused, so that two runs on one port never mix.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "launch.h"
#include "../base/errors.h"
#include "../base/clock.h"

namespace rendezvous {

constexpr uint64_t MAGIC = 0x334b4e415241534eu;  // "NSARANK3"

struct Request {
    uint64_t magic = MAGIC;
    uint64_t run = 0;  // a digest of the run's name, the number of ranks and the options
    int64_t rank = 0;
};
struct Answer {
    uint64_t magic = 0;
    int64_t welcome = 0;
    char id[128] = {};
};

struct Socket {
    int fd;
    explicit Socket(int descriptor) : fd(descriptor) {}
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;
    ~Socket() { reset(-1); }
    void reset(int descriptor) {
        if (fd >= 0) close(fd);
        fd = descriptor;
    }
};

// No call on this socket waits for longer than that.
inline void limit_waiting(int fd, int seconds) {
    const timeval limit = {seconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}
inline bool send_all(int fd, const void* bytes, size_t count) {
    return send(fd, bytes, count, MSG_NOSIGNAL) == ssize_t(count);
}
inline bool receive_all(int fd, void* bytes, size_t count) {
    return recv(fd, bytes, count, MSG_WAITALL) == ssize_t(count);
}

// All ranks of a run get the same number here, since they run the same program.
inline uint64_t hash_launch(const Launch& launch) {
    return std::hash<std::string>()(launch.run + '\n' + std::to_string(launch.size));
}
inline std::string describe_address(const Launch& launch) {
    return format_text(launch.address.find(':') == std::string::npos ? "%s:%d" : "[%s]:%d", launch.address,
                       launch.port);
}

// Calls visit(address) for each address of the host (nullptr: to listen on, IPv6 first, which takes IPv4 along) until
// it returns true. "" then; otherwise the last error.
template <class Visit>
std::string visit_addresses(const char* host, int port, Visit visit) {
    std::string why;
    for (const int family : {AF_INET6, AF_INET}) {
        addrinfo hints = {}, *found = nullptr;
        hints.ai_family = family;
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = host ? 0 : AI_PASSIVE;
        if (const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found)) {
            if (why.empty()) why = gai_strerror(error);
            continue;
        }
        bool done = false;
        for (const addrinfo* a = found; a && !done; a = a->ai_next) {
            errno = 0;
            done = visit(*a);
            if (!done) why = errno ? std::strerror(errno) : "it does not answer";
        }
        freeaddrinfo(found);
        if (done) return "";
    }
    return why;
}

// Rank 0: gives the id to every other rank of its run, once.
inline void give_out(const char (&id)[128], const Launch& launch, double seconds) {
    Socket listener(-1);
    const std::string error = visit_addresses(nullptr, launch.port, [&](const addrinfo& a) {
        const int yes = 1, no = 0;
        listener.reset(socket(a.ai_family, SOCK_STREAM, 0));
        setsockopt(listener.fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        if (a.ai_family == AF_INET6) setsockopt(listener.fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
        return bind(listener.fd, a.ai_addr, a.ai_addrlen) == 0 && listen(listener.fd, 128) == 0;
    });
    if (!error.empty())
        fail("rank 0 cannot listen on port %d: %s; set MASTER_PORT to a free port on all ranks", launch.port, error);
    limit_waiting(listener.fd, 1);
    std::vector<bool> served(size_t(launch.size), false);
    const double begun = seconds_now();
    int strangers = 0;
    for (int missing = launch.size - 1; missing > 0;) {
        if (seconds_now() - begun > seconds)
            fail(
                "rank 0 has waited %.0f s at %s, and %d of %d ranks never came (%d calls of other runs were refused); "
                "are they started, with the same MASTER_ADDR and MASTER_PORT, and does a firewall let them through?",
                seconds, describe_address(launch), missing, launch.size, strangers);
        const Socket caller(accept(listener.fd, nullptr, nullptr));
        Request r;
        if (caller.fd < 0) continue;
        limit_waiting(caller.fd, 5);
        if (!receive_all(caller.fd, &r, sizeof r) || r.magic != MAGIC) continue;
        const bool welcome =
            r.run == hash_launch(launch) && r.rank > 0 && r.rank < launch.size && !served[size_t(r.rank)];
        Answer answer = {MAGIC, welcome, {}};
        if (welcome) std::memcpy(answer.id, id, sizeof answer.id);
        if (!send_all(caller.fd, &answer, sizeof answer)) continue;
        strangers += !welcome;
        missing -= welcome;
        if (welcome) served[size_t(r.rank)] = true;
    }
}

// The other ranks: one call of rank 0. "" if it has given the id; otherwise why it does not answer (yet).
inline std::string ask_once(char (&id)[128], const Launch& launch) {
    std::string host = launch.address;
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    const Request request = {MAGIC, hash_launch(launch), launch.rank};
    Answer answer;
    const std::string why = visit_addresses(host.c_str(), launch.port, [&](const addrinfo& a) {
        const Socket s(socket(a.ai_family, SOCK_STREAM, 0));
        limit_waiting(s.fd, 10);
        return connect(s.fd, a.ai_addr, a.ai_addrlen) == 0 && send_all(s.fd, &request, sizeof request) &&
               receive_all(s.fd, &answer, sizeof answer);
    });
    if (!why.empty()) return why;
    if (answer.magic != MAGIC)
        fail("what answers rank %d at %s is no rank of this program; set another MASTER_PORT on all ranks", launch.rank,
             describe_address(launch));
    if (!answer.welcome)
        fail(
            "rank 0 at %s belongs to another run, or was started with other options, or has a rank %d already: give "
            "all ranks the same command, and every run a MASTER_PORT of its own",
            describe_address(launch), launch.rank);
    std::memcpy(id, answer.id, sizeof answer.id);
    return "";
}

// Every rank gets rank 0's id.
inline void share_id(char (&id)[128], const Launch& launch, double seconds) {
    if (launch.rank == 0) return give_out(id, launch, seconds);
    const double begun = seconds_now();
    for (std::string why; !(why = ask_once(id, launch)).empty(); usleep(200000))
        if (seconds_now() - begun > seconds)
            fail(
                "rank %d has waited %.0f s for rank 0 at %s: %s; is rank 0 started, is the address (MASTER_ADDR, "
                "MASTER_PORT) its own, and does a firewall let it through?",
                launch.rank, seconds, describe_address(launch), why);
}

}  // namespace rendezvous
