// world.cpp: the functions of world.h.
#include "world.h"

#ifdef USE_MPI
#include <mpi.h>

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

std::unique_ptr<Transport> World::connect(const Launch& launch, double start_timeout, ConnectByNccl by_nccl) {
#ifdef USE_MPI
    if (launch.by_mpi) return std::make_unique<MpiTransport>(launch);
#endif
    if (by_nccl) return by_nccl(launch, start_timeout);
    refuse_launch(format_text(
        "%s makes this process one of %d ranks, but this build has no NCCL, the only way to sum the gradients of "
        "ranks that were started this way: start them with mpirun -np %d ./train_nsa ...",
        launch.launcher, launch.size, launch.size));
}

void World::compute_on(const std::string& what) {
    device = what;
    watchdog.call_it(name());
}

std::string World::name() const {
    if (size == 1) return "this process";
    return format_text("rank %d on %s%s%s", rank, host, device.empty() ? "" : ", ", device);
}

double World::sum(double x) const {
    sum(&x, 1);
    return x;
}

double World::lowest(double x) const {
    std::vector<double> all(size_t(size), 0.0);
    all[size_t(rank)] = x;
    sum(all.data(), all.size());
    return *std::min_element(all.begin(), all.end());
}

std::vector<std::string> World::gather(const std::string& mine) const {
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

void World::finish() {
    barrier();
    watchdog.stop();
    transport.reset();
}

void World::abort(int status) const {
    std::fflush(nullptr);
    // mpirun forwards what was printed, but not after an abort: without the pause 2 of 30 messages were lost
    if (size > 1) usleep(200000);
    if (transport) transport->abort(status);
    std::_Exit(status);
}

// The error of one of several ranks must not unwind to main(): ncclCommDestroy would wait for the other ranks, and
// cudaFree for a reduction that they never join, while they wait for us. So it is printed, and the program ends, where
// it was caught: one line on stderr, which names the rank. Of an error that all ranks have, rank 0 prints the line, and
// the launcher ends the others meanwhile.
static int print_error(const World* world, int status, const char* text, bool shared) {
    output().settle();
    if (world && world->rank > 0) usleep(shared ? 2000000 : 600000 + 100000 * unsigned(std::min(world->rank, 10)));
    if (world && world->size > 1 && !(shared && world->rank > 0))
        std::fprintf(stderr, "train_nsa: %s: error: %s\n", world->name().c_str(), text);
    else if (*text && !(world && world->rank > 0)) std::fprintf(stderr, "train_nsa: error: %s\n", text);
    if (world) world->abort(status);
    return status;
}

int catch_errors(const World* world, const std::function<int()>& work) {
    try {
        return work();
    } catch (const SharedError& e) {
        return print_error(world, e.status, e.what(), true);
    } catch (const Error& e) {
        return print_error(world, e.status, e.what(), false);
    } catch (const std::exception& e) {
        return print_error(world, 1, error_text(e).c_str(), false);
    }
}

void fail_together(const World& world, const std::string& error) {
    if (world.size == 1 && !error.empty()) throw SharedError(error);
    if (world.size == 1) return;
    const std::vector<std::string> errors = world.gather(error);
    for (size_t r = 0; r < errors.size(); r++)
        if (!errors[r].empty()) throw SharedError(format_text("rank %d: %s", r, errors[r]));
}

void require_same(const World& world, const std::string& text, const std::string& hint) {
    const std::vector<std::string> texts = world.gather(text);
    for (size_t r = 1; r < texts.size(); r++) {
        if (texts[r] == texts[0]) continue;
        std::istringstream first(texts[0]), other(texts[r]);
        std::string expected, found;
        do {
            if (!std::getline(first, expected)) expected = "(nothing)";
            if (!std::getline(other, found)) found = "(nothing)";
        } while (expected == found && first);
        throw SharedError(format_text("rank %d on %s has '%s', rank 0 on %s has '%s'; %s", r, world.hosts[r], found,
                                      world.hosts[0], expected, hint));
    }
}
