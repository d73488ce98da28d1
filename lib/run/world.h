// world.h: the ranks of a run, collectives on small host data, and how an error of one rank ends all of them.
//   Transport    what brings the ranks together: MPI here, or NCCL in ddp.cuh for GPUs that no MPI brought together
//   World        all ranks of the run
// launch.h says what a launcher says. The launcher ends the others where a rank dies.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "../base/time_limit.h"
#include "../base/memory.h"
#include "launch.h"
#include "watchdog.h"

// ---------------------------------------------------------------------------------------------------------------------
// What brings the ranks together. One operation is enough for every collective of World.

class Transport {
  public:
    int rank = 0, size = 1;
    void* communicator = nullptr;  // NCCL's, of all ranks, if it has one: an ncclComm_t
    virtual ~Transport() = default;
    // Bytes of a rank at a time; a multiple of 8.
    size_t most_bytes() const { return std::max(4096, (4 << 20) / size / 8 * 8); }
    // all [size, bytes] = every rank's mine [bytes]. bytes: at most most_bytes().
    virtual void all_gather(const char* mine, char* all, size_t bytes) = 0;
    // After an error of this rank, whose process ends.
    virtual void abort(int) {}
};

// How ranks that no MPI brings together find each other, within start_timeout seconds; nullptr in a build without NCCL.
using ConnectByNccl = std::unique_ptr<Transport> (*)(const Launch& launch, double start_timeout);

// ---------------------------------------------------------------------------------------------------------------------
// All ranks of the run. Every rank calls the same collectives in the same order, from its main thread.

struct World {
    int rank = 0, size = 1;  // among all processes
    int local_size = 1;      // processes on this machine
    int device_sharers = 1;  // ranks on this machine's CPU, or on this rank's GPU, that share its memory
    std::string host = host_name(), machine = machine_word();
    std::string launcher;            // "one process", "mpirun", "srun", "RANK/WORLD_SIZE"
    std::vector<std::string> hosts;  // of every rank
    std::string device;              // what this rank computes on, for messages; "" until it is known
    bool has_mpi = false;            // gradients can travel through the host's memory
    mutable Watchdog watchdog;
    void* communicator = nullptr;  // NCCL's, of all ranks, where NCCL alone brings them together: an ncclComm_t

  private:
    std::unique_ptr<Transport> transport;  // none for one process alone

    static std::unique_ptr<Transport> connect(const Launch& launch, double start_timeout, ConnectByNccl by_nccl);

    // Calls take(offset, every rank's bytes from there on, one rank after the other, how many of each) piece by piece.
    template <class Take>
    void all_gather(const void* mine, size_t bytes, Take take) const {
        const Watchdog::Waiting waiting(watchdog);
        std::vector<char> all(std::min(bytes, transport->most_bytes()) * size_t(size));
        for (size_t at = 0; at < bytes; at += transport->most_bytes()) {
            const size_t count = std::min(transport->most_bytes(), bytes - at);
            transport->all_gather(static_cast<const char*>(mine) + at, all.data(), count);
            take(at, all.data(), count);
            watchdog.tick();
        }
    }

  public:
    // Returns when all ranks are there. by_nccl: connect_by_nccl of ddp.cuh. start_timeout: seconds that they may take.
    explicit World(const Launch& launch = {}, ConnectByNccl by_nccl = nullptr, double start_timeout = 300)
        : launcher(launch.launcher), has_mpi(launch.by_mpi) {
        std::unique_ptr<TimeLimit> limit;
        if (launch.by_mpi || launch.size > 1) {
            // later than NCCL's rendezvous gives up, whose message says more; ranks 0.3 s apart
            const double seconds = start_timeout + (has_mpi ? 0 : 15) + 0.3 * std::min(10, rank_in_environment());
            limit = std::make_unique<TimeLimit>(
                seconds, format_text("rank %d on %s has waited %.0f s for the other ranks to start: has one ended or "
                                     "stopped, or does its host lack the program or a library?",
                                     rank_in_environment(), host, seconds));
            transport = connect(launch, start_timeout, by_nccl);
            rank = transport->rank;
            size = transport->size;
            communicator = transport->communicator;
        }
        hosts = gather(host);
        const std::vector<std::string> machines = gather(machine);
        local_size = int(std::count(machines.begin(), machines.end(), machine));
        watchdog.call_it(name());
    }

    // For messages, of this rank and of its watchdog.
    void compute_on(const std::string& what);
    std::string name() const;

    // x [count] = sum of every rank's x in the order of ranks, the same bits on every rank.
    template <class T>
    void sum(T* x, size_t count) const {
        if (!transport) return;
        all_gather(x, count * sizeof(T), [&](size_t at, const char* all, size_t bytes) {
            T* const sums = x + at / sizeof(T);
            const T* const values = reinterpret_cast<const T*>(all);
            const size_t n = bytes / sizeof(T);
            std::copy_n(values, n, sums);
            for (int r = 1; r < size; r++)
                for (size_t i = 0; i < n; i++) sums[i] += values[size_t(r) * n + i];
        });
    }
    double sum(double x) const;
    void barrier() const { sum(0.0); }
    // The lowest of every rank's x.
    double lowest(double x) const;
    // Every rank's text, on every rank. Meant for names and digests.
    std::vector<std::string> gather(const std::string& mine) const;

    // Every rank has finished its work: returns when all have.
    void finish();
    // After an error on this rank, which it has printed: the launcher ends the others, which would wait for ever.
    [[noreturn]] void abort(int status) const;
};

// What the reductions of a run's gradients took.
struct ReduceTimes {
    double total = 0;    // seconds with a reduction under way
    double exposed = 0;  // of these, seconds in which the step waited for nothing else
    int64_t steps = 0;
    void add(double under_way, double waited) {
        total += under_way;
        exposed += waited;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Errors of a rank, and of all.

// The status of work(), or of its error.
int catch_errors(const World* world, const std::function<int()>& work);

// All ranks fail with the first one's error, or none does. Also a barrier.
void fail_together(const World& world, const std::string& error);

// All ranks fail if a text is not the same everywhere. One line names the first rank that has another one than rank 0,
// and their first lines that differ. The hint says what to do.
void require_same(const World& world, const std::string& text, const std::string& hint);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "world.cpp"
#endif
