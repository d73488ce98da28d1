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
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

#include "../base/background.h"
#include "../base/errors.h"
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
    size_t piece() const { return std::max(4096, (4 << 20) / size / 8 * 8); }
    // all [size, bytes] = every rank's mine [bytes]. bytes: at most piece().
    virtual void all_gather(const char* mine, char* all, size_t bytes) = 0;
    // After an error of this rank, whose process ends.
    virtual void abort(int) {}
};

#ifdef USE_MPI
class MpiTransport : public Transport {
  public:
    explicit MpiTransport(const Launch& launch) {
        int provided;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);  // only the main thread calls MPI
        if (provided < MPI_THREAD_FUNNELED)
            fail("this MPI cannot serve a program that has threads (MPI_THREAD_FUNNELED): install another");
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        if (launch.size > 0 && launch.size != size) refuse_other_mpi(launch, size);
    }
    ~MpiTransport() override { MPI_Finalize(); }
    void all_gather(const char* mine, char* all, size_t bytes) override {
        MPI_Allgather(mine, int(bytes), MPI_BYTE, all, int(bytes), MPI_BYTE, MPI_COMM_WORLD);
    }
    void abort(int status) override { MPI_Abort(MPI_COMM_WORLD, status); }
};
#endif

// How ranks that no MPI brings together find each other, within start_timeout seconds; nullptr in a build without NCCL.
using ConnectByNccl = std::unique_ptr<Transport> (*)(const Launch& launch, double start_timeout);

// ---------------------------------------------------------------------------------------------------------------------
// All ranks of the run. Every rank calls the same collectives in the same order, from its main thread.

struct World {
    int rank = 0, size = 1;              // among all processes
    int local_rank = 0, local_size = 1;  // among the processes of this machine
    int device_sharers = 1;              // ranks on this machine's CPU, or on this rank's GPU, that share its memory
    std::string host = host_name(), machine = machine_word();
    std::string launcher;            // "one process", "mpirun", "srun", "RANK/WORLD_SIZE"
    std::vector<std::string> hosts;  // of every rank
    std::string device;              // what this rank computes on, for messages; "" until it is known
    bool has_mpi = false;            // gradients can travel through the host's memory
    mutable Watchdog watchdog;
    void* communicator = nullptr;  // NCCL's, of all ranks, where NCCL alone brings them together: an ncclComm_t

  private:
    std::unique_ptr<Transport> transport;  // none for one process alone

    static std::unique_ptr<Transport> connect(const Launch& launch, double start_timeout, ConnectByNccl by_nccl) {
#ifdef USE_MPI
        if (launch.by_mpi) return std::make_unique<MpiTransport>(launch);
#endif
        if (by_nccl) return by_nccl(launch, start_timeout);
        refuse_launch(format_text(
            "%s makes this process one of %d ranks, but this build has no NCCL, the only way to sum the gradients of "
            "ranks that were started this way: start them with mpirun -np %d ./train_nsa ...",
            launch.launcher.c_str(), launch.size, launch.size));
    }

    // Calls take(offset, every rank's bytes from there on, one rank after the other, how many of each) piece by piece.
    template <class Take>
    void all_gather(const void* mine, size_t bytes, Take take) const {
        const Watchdog::Waiting waiting(watchdog);
        std::vector<char> all(std::min(bytes, transport->piece()) * size_t(size));
        for (size_t at = 0; at < bytes; at += transport->piece()) {
            const size_t count = std::min(transport->piece(), bytes - at);
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
            // later than NCCL's rendezvous, which says more, and not all at once
            const double seconds = start_timeout + (has_mpi ? 0 : 15) + 0.3 * std::min(10, rank_in_environment());
            limit = std::make_unique<TimeLimit>(
                seconds, format_text("rank %d on %s has waited %.0f s for the other ranks to start: has one ended or "
                                     "stopped, or does its host lack the program or a library?",
                                     rank_in_environment(), host.c_str(), seconds));
            transport = connect(launch, start_timeout, by_nccl);
            rank = transport->rank;
            size = transport->size;
            communicator = transport->communicator;
        }
        hosts = gather(host);
        const std::vector<std::string> machines = gather(machine);
        local_size = int(std::count(machines.begin(), machines.end(), machine));
        local_rank = int(std::count(machines.begin(), machines.begin() + rank, machine));
        watchdog.call_it(name());
    }

    // For messages, of this rank and of its watchdog.
    void compute_on(const std::string& what) {
        device = what;
        watchdog.call_it(name());
    }
    std::string name() const {
        if (size == 1) return "this process";
        return format_text("rank %d on %s%s%s", rank, host.c_str(), device.empty() ? "" : ", ", device.c_str());
    }

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
    double sum(double x) const {
        sum(&x, 1);
        return x;
    }
    void barrier() const { sum(0.0); }
    // The lowest of every rank's x.
    double lowest(double x) const {
        std::vector<double> all(size_t(size), 0.0);
        all[size_t(rank)] = x;
        sum(all.data(), all.size());
        return *std::min_element(all.begin(), all.end());
    }
    // Every rank's text, on every rank. Meant for names and digests.
    std::vector<std::string> gather(const std::string& mine) const {
        if (!transport) return {mine};
        std::vector<double> lengths(size_t(size), 0.0);
        lengths[size_t(rank)] = double(mine.size());
        sum(lengths.data(), lengths.size());
        std::string padded = mine;
        padded.resize(size_t(*std::max_element(lengths.begin(), lengths.end())));
        std::vector<std::string> texts(static_cast<size_t>(size));
        all_gather(padded.data(), padded.size(), [&](size_t, const char* all, size_t bytes) {
            for (size_t r = 0; r < texts.size(); r++) texts[r].append(all + r * bytes, bytes);
        });
        for (size_t r = 0; r < texts.size(); r++) texts[r].resize(size_t(lengths[r]));
        return texts;
    }

    // Every rank has finished its work: returns when all have.
    void finish() {
        barrier();
        watchdog.stop();
        transport.reset();
    }
    // After an error on this rank, which it has printed: the launcher ends the others, which would wait for ever.
    [[noreturn]] void abort(int status) const {
        std::fflush(nullptr);
        // mpirun forwards what was printed, but not after an abort: without the pause 2 of 30 messages were lost
        if (size > 1) usleep(200000);
        if (transport) transport->abort(status);
        std::_Exit(status);
    }
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

// The error of one of several ranks must not unwind to main(): ncclCommDestroy would wait for the other ranks, and
// cudaFree for a reduction that they never join, while they wait for us. So it is printed, and the program ends, where
// it was caught: one line on stderr, which names the rank. Of an error that all ranks have, rank 0 prints the line, and
// the launcher ends the others meanwhile.
inline int report_error(const World* world, int status, const char* text, bool shared) {
    output().settle();
    if (world && world->rank > 0) usleep(shared ? 2000000 : 600000 + 100000 * unsigned(std::min(world->rank, 10)));
    if (world && world->size > 1 && !(shared && world->rank > 0))
        std::fprintf(stderr, "train_nsa: %s: error: %s\n", world->name().c_str(), text);
    else if (*text && !(world && world->rank > 0)) std::fprintf(stderr, "train_nsa: error: %s\n", text);
    if (world) world->abort(status);
    return status;
}

// The status of work(), or of its error.
inline int report_errors(const World* world, const std::function<int()>& work) {
    try {
        return work();
    } catch (const SharedError& e) {
        return report_error(world, e.status, e.what(), true);
    } catch (const Error& e) {
        return report_error(world, e.status, e.what(), false);
    } catch (const std::exception& e) {
        return report_error(world, 1, error_text(e).c_str(), false);
    }
}

// All ranks fail with the first one's error, or none does. Also a barrier.
inline void fail_together(const World& world, const std::string& error) {
    if (world.size == 1 && !error.empty()) throw SharedError(error);
    if (world.size == 1) return;
    const std::vector<std::string> errors = world.gather(error);
    for (size_t r = 0; r < errors.size(); r++)
        if (!errors[r].empty()) throw SharedError(format_text("rank %zu: %s", r, errors[r].c_str()));
}

// All ranks fail if a text is not the same everywhere. One line names the first of the text's lines that differs: the
// first rank that has another one than most ranks, and both. The hint says what to do.
inline void require_same(const World& world, const std::string& text, const std::string& hint) {
    if (world.size == 1) return;
    std::vector<std::istringstream> texts;
    for (const std::string& t : world.gather(text)) texts.emplace_back(t);
    for (bool more = true; more;) {
        more = false;
        std::vector<std::string> lines_now(texts.size(), "(nothing)");
        std::map<std::string, int> ranks_with;
        for (size_t r = 0; r < texts.size(); r++) {
            std::string line;
            if (std::getline(texts[r], line)) {
                lines_now[r] = line;
                more = true;
            }
            ranks_with[lines_now[r]]++;
        }
        if (ranks_with.size() == 1) continue;
        std::string expected = lines_now[0];
        for (const std::string& line : lines_now)
            if (ranks_with[line] > ranks_with[expected]) expected = line;
        size_t odd = 0;
        while (lines_now[odd] == expected) odd++;
        throw SharedError(format_text("rank %zu on %s has '%s', expected '%s' as on %d of %d ranks; %s", odd,
                                      world.hosts[odd].c_str(), lines_now[odd].c_str(), expected.c_str(),
                                      ranks_with[expected], world.size, hint.c_str()));
    }
}
