// ddp.cuh: data parallelism, from the ranks of a run to the summed gradient and the shares of the optimiser's state.
//   World        the ranks, and collectives on small host data between them: over MPI, or over the star of TCP
//                connections of lib/launch.h. One process alone touches neither MPI nor sockets.
//   Partition    the flat gradient cut into buckets and, with --zero 1, into the parts that each rank owns
//   *Reducer     sums the buckets over the ranks while the backward pass goes on: MPI for CPUs, NCCL for GPUs
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

#include "lib/launch.h"
#include "lib/profile.h"
#include "lib/util.h"
#include "lib/watchdog.h"
#include "nsa_cpu.h"

#if defined(CUDA_CHECK) && (defined(USE_NCCL) || !defined(GPU_COMPILER))  // under g++ the emulator plays NCCL's part
#define HAVE_NCCL
#endif

// ---------------------------------------------------------------------------------------------------------------------
// What carries the gradients: NCCL between GPUs, MPI between CPUs.

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

// Why NCCL cannot sum this process's gradients; "" if it can.
inline std::string why_no_nccl() {
#ifdef HAVE_NCCL
    int gpus = 0;
    const cudaError_t error = cudaGetDeviceCount(&gpus);
    if (error == cudaSuccess && gpus > 0) return "";
    return std::string("this process sees no GPU") + (error ? std::string(": ") + cudaGetErrorString(error) : "");
#else
    return "this build has no NCCL";
#endif
}

// Ranks that found each other without MPI, and have no NCCL to sum gradients with.
[[noreturn]] inline void refuse_without_mpi(const std::string& launcher, int rank, int size, const std::string& why) {
    fail_usage(
        "%s=%d and %s=%d in the environment make this process one of %d ranks, but only NCCL can sum the gradients of "
        "ranks started this way, and %s: start them with mpirun -np %d ./train_nsa ...%s",
        launcher == "Slurm" ? "SLURM_PROCID" : "RANK", rank, launcher == "Slurm" ? "SLURM_NTASKS" : "WORLD_SIZE", size,
        size, why.c_str(), size, mpi_name() ? "" : " (after make deps && make train_nsa: this build has no MPI)");
}

// What the environment says, if this program can train so.
inline Launch usable_launch() {
    const Launch launch = read_launch();
    if (launch.size == 1 || launch.by_mpi) return launch;
    const std::string why = why_no_nccl();
    if (!why.empty()) refuse_without_mpi(launch.launcher, launch.rank, launch.size, why);
    return launch;
}

// ---------------------------------------------------------------------------------------------------------------------
// All ranks of the run. Every rank calls the same collectives in the same order, from its main thread.

enum class Transport { NONE, MPI, STAR };

struct World {
    int rank = 0, size = 1;              // among all processes
    int local_rank = 0, local_size = 1;  // among the processes of this machine
    std::string host = host_name();
    std::string launcher;  // "one process", "mpirun", "RANK/WORLD_SIZE", "Slurm"
    Transport transport = Transport::NONE;
    std::vector<std::string> hosts;  // of every rank
    std::string device;              // what this rank computes on, for messages; "" until it is known

  private:
    std::unique_ptr<ControlChannel> control = std::make_unique<ControlChannel>();

    // ----- the star: messages between rank 0 and the others

    struct Line {
        rendezvous::Socket socket;
        uint64_t sent = 0, received = 0;  // messages so far
    };
    mutable std::vector<Line> lines;  // on rank 0 [r] leads to rank r, on the others [0] to rank 0

    // Goes ahead of every message, so that ranks that do not do the same are found at once and not by wrong numbers.
    struct Header {
        uint64_t number, bytes;
    };

    void require_whole(int partner, const std::string& why) const {
        if (why.empty()) return;
        control->wait_for_verdict();
        fail("the connection to rank %d on %s broke: %s", partner, hosts[size_t(partner)].c_str(), why.c_str());
    }
    void send(int to, const void* x, size_t bytes) const {
        Line& line = lines[size_t(to)];
        const Header header{line.sent++, bytes};
        require_whole(to, rendezvous::send_all(line.socket.fd, &header, sizeof header, rendezvous::NEVER));
        require_whole(to, rendezvous::send_all(line.socket.fd, x, bytes, rendezvous::NEVER));
    }
    void receive(int from, void* x, size_t bytes) const {
        Line& line = lines[size_t(from)];
        const uint64_t expected = line.received++;
        Header header;
        require_whole(from, rendezvous::receive_all(line.socket.fd, &header, sizeof header, rendezvous::NEVER));
        if (header.number != expected || header.bytes != bytes)
            fail(
                "rank %d on %s sent message %llu of %llu bytes, expected message %llu of %zu bytes: the ranks do not "
                "do the same",
                from, hosts[size_t(from)].c_str(), (unsigned long long)header.number, (unsigned long long)header.bytes,
                (unsigned long long)expected, bytes);
        require_whole(from, rendezvous::receive_all(line.socket.fd, x, bytes, rendezvous::NEVER));
    }

    // Rank 0 adds in the order of ranks.
    template <class T>
    void sum_over_star(T* x, size_t count) const {
        const size_t bytes = count * sizeof(T);
        if (rank != 0) {
            send(0, x, bytes);
            receive(0, x, bytes);
            return;
        }
        std::vector<T> theirs(count);
        for (int r = 1; r < size; r++) {
            receive(r, theirs.data(), bytes);
            for (size_t i = 0; i < count; i++) x[i] += theirs[i];
        }
        for (int r = 1; r < size; r++) send(r, x, bytes);
    }
    void broadcast_over_star(void* x, size_t bytes, int root) const {
        if (root != 0 && rank == 0) receive(root, x, bytes);
        if (rank == root && rank != 0) send(0, x, bytes);
        for (int r = 1; rank == 0 && r < size; r++)
            if (r != root) send(r, x, bytes);
        if (rank != 0 && rank != root) receive(0, x, bytes);
    }

    void start_star(const Launch& launch, double start_timeout) {
        transport = Transport::STAR, rank = launch.rank, size = launch.size;
        rendezvous::Star star = rendezvous::make_star(launch, host, start_timeout);
        lines.resize(size_t(size));
        local_rank = local_size = 0;
        const rendezvous::Place& own = star.places[size_t(rank)];
        for (int r = 0; r < size; r++) {
            const rendezvous::Place& place = star.places[size_t(r)];
            hosts.push_back(place.host);
            const bool here = !std::strcmp(place.host, own.host) && !std::strcmp(place.boot, own.boot);
            local_size += here, local_rank += here && r < rank;
            lines[size_t(r)].socket = std::move(star.messages[size_t(r)]);
        }
        if (launch.local_rank >= 0) local_rank = launch.local_rank;
        if (launch.local_size > 0) local_size = launch.local_size;
        local_size = std::max(local_size, local_rank + 1);
        control->start(rank, hosts, star.control, false);  // from here on a lost rank is noticed
    }

    // ----- MPI

#ifdef USE_MPI
    static constexpr size_t MPI_PIECE = size_t(1) << 30;  // MPI counts are 32-bit

    // MPI has brought the ranks together; the watchdog's star is built beside it, so that it lives when MPI hangs. Rank
    // 0 listens on any free port and says where; the others try its addresses until one answers and knows the run.
    void start_control_under_mpi(double start_timeout) {
        using namespace rendezvous;
        struct {
            int32_t port, addresses;
            char run[64], boot[64], address[16][64];
        } place{};
        Socket listener;
        if (rank == 0) {
            int port = 0;
            listener = listen_on(0, local_size == size, port);
            place.port = port;
            copy_text(place.run, random_name()), copy_text(place.boot, boot_id());
            for (const std::string& address : own_addresses())
                if (place.addresses < 16) copy_text(place.address[place.addresses++], address);
        }
        MPI_Bcast(&place, int(sizeof place), MPI_BYTE, 0, MPI_COMM_WORLD);
        std::vector<int> sockets(size_t(size), -1);
        if (rank == 0) {
            Gate gate(format_text("%s:%d (for the watchdog)", host.c_str(), place.port), size, place.run, {CONTROL});
            gate.open(listener, start_timeout);
            for (int r = 1; r < size; r++) sockets[size_t(r)] = gate.take(CONTROL, r).release();
        } else {
            std::vector<std::string> addresses = {hosts[0]};
            if (boot_id() == place.boot && hosts[0] == host) addresses.insert(addresses.begin(), "127.0.0.1");
            for (int i = 0; i < place.addresses; i++) addresses.push_back(place.address[i]);
            const Hello hello = make_hello(CONTROL, rank, size, host, place.run);
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
                        "(%s): %s; a firewall between the hosts must let it through",
                        rank, host.c_str(), hosts[0].c_str(), place.port, addresses.back().c_str(), why.c_str());
            }
        }
        control->start(rank, hosts, sockets, true);
    }

    void start_mpi(double start_timeout) {
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
        const char* started = std::getenv(started_by_mpirun());
        if (std::atoi(started) != size)
            fail(
                "the launcher started %s processes (%s), but this program's MPI sees %d: mpirun belongs to another MPI "
                "than the one it was built with; use the mpirun beside the mpicxx of the build",
                started, started_by_mpirun(), size);
        hosts = gather(host);
        start_control_under_mpi(start_timeout);
    }
#else
    void start_mpi(double) {}
#endif

    // ----- either

    template <class T>
    void sum_of(T* x, size_t count) const {
        if (size == 1) return;
        ControlChannel::Waiting waiting(*control);
        const size_t piece = 25'000'000 / sizeof(T);  // stays in cache on the way
        for (size_t i = 0; i < count; i += piece, control->tick()) {
            const size_t n = std::min(piece, count - i);
            if (transport == Transport::STAR) sum_over_star(x + i, n);
#ifdef USE_MPI
            else
                MPI_Allreduce(MPI_IN_PLACE, x + i, int(n), sizeof(T) == sizeof(float) ? MPI_FLOAT : MPI_DOUBLE, MPI_SUM,
                              MPI_COMM_WORLD);
#endif
        }
    }

  public:
    // Returns when all ranks are there. start_timeout: seconds that they may take.
    explicit World(double start_timeout = 300) : World(usable_launch(), start_timeout) {}
    World(const Launch& launch, double start_timeout) : launcher(launch.launcher) {
        if (launch.by_mpi) start_mpi(start_timeout);
        else if (launch.size > 1) start_star(launch, start_timeout);
        else hosts = {host};
    }
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    // The watchdog's connection: deaths, failures and stalls; see lib/watchdog.h.
    ControlChannel& channel() const { return *control; }
    // For messages, of this rank and of the others.
    void computes_on(const std::string& name) {
        device = name;
        channel().computes_on(device.c_str());
    }

    // x [count] = sum of every rank's x, the same bits on every rank.
    void sum(float* x, size_t count) const { sum_of(x, count); }
    void sum(double* x, size_t count) const { sum_of(x, count); }
    double sum(double x) const { return sum_of(&x, 1), x; }

    void barrier() const { sum(0.0); }

    // bytes of the root on every rank.
    void broadcast(void* x, size_t bytes, int root) const {
        if (size == 1) return;
        ControlChannel::Waiting waiting(*control);
        if (transport == Transport::STAR) return broadcast_over_star(x, bytes, root);
#ifdef USE_MPI
        for (size_t i = 0; i < bytes; i += MPI_PIECE)
            MPI_Bcast(static_cast<char*>(x) + i, int(std::min(MPI_PIECE, bytes - i)), MPI_BYTE, root, MPI_COMM_WORLD);
#endif
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

    // Fails on all ranks if a text is not the same everywhere. One line names the first of the text's lines that
    // differs: the first rank that has another one than most ranks, and both. The hint says what to do.
    void require_same(const std::string& text, const std::string& hint) const {
        if (size == 1) return;
        std::vector<std::istringstream> texts;
        for (const std::string& t : gather(text)) texts.emplace_back(t);
        for (bool more = true; more;) {
            more = false;
            std::vector<std::string> lines_now(size_t(size), "(nothing)");
            std::map<std::string, int> ranks_with;
            for (size_t r = 0; r < lines_now.size(); r++) {
                std::string line;
                if (std::getline(texts[r], line)) lines_now[r] = line, more = true;
                ranks_with[lines_now[r]]++;
            }
            if (ranks_with.size() == 1) continue;
            std::string expected = lines_now[0];
            for (const std::string& line : lines_now)
                if (ranks_with[line] > ranks_with[expected]) expected = line;
            size_t odd = 0;
            while (lines_now[odd] == expected) odd++;
            if (rank != 0) control->wait_for_verdict();  // rank 0 says it for all
            fail("rank %zu on %s has '%s', expected '%s' as on %d of %d ranks; %s", odd, hosts[odd].c_str(),
                 lines_now[odd].c_str(), expected.c_str(), ranks_with[expected], size, hint.c_str());
        }
    }

    // Several ranks are about to train, on GPUs or on CPUs: can their gradients be summed?
    void require_reducer(bool gpu) const {
        if (size == 1) return;
        if (!gpu && transport == Transport::STAR) refuse_without_mpi(launcher, rank, size, "this run computes on CPUs");
#ifndef HAVE_NCCL
        if (gpu)
            fail_usage(
                "%d ranks on GPUs need NCCL to sum their gradients, and this build has none: install NCCL and run make "
                "train_nsa again, or give --device cpu",
                size);
#endif
    }

    // Every rank has finished its work: returns when all have.
    void finish() {
        barrier();
        control->leave();
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
            // mpirun forwards what was printed, but not after an abort: without the pause 2 of 30 messages were lost
            usleep(200000);
            MPI_Abort(MPI_COMM_WORLD, status);
        }
#endif
        std::_Exit(status);
    }
};

inline Watchdog::Watchdog(World& world, const WatchdogOptions& options)
    : Watchdog(world.channel(), world.rank, world.host, options) {}

// ---------------------------------------------------------------------------------------------------------------------
// Who reduces and who updates what. The flat array of all gradients is cut into buckets of equal size, and every bucket
// into as many equal parts as there are ranks. With --zero 1 a rank keeps optimiser state only for the parts it owns,
// one after the other without gaps: its shard.

struct Piece {
    size_t begin, count;  // in the flat array
    size_t local;         // where its optimiser state begins in this rank's arrays
};

struct Partition {
    size_t elements = 0;  // of the flat arrays: at least one more than the model has, for the guard of gradient_norm()
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
    bool bf16 = false;           // gradients are rounded to bf16 to travel
    bool deterministic = false;  // fp32 in a fixed tree over the ranks, after the backward pass
};

struct ReduceTimes {
    double total = 0;    // seconds with a reduction under way
    double exposed = 0;  // of these, seconds in which the step waited for nothing else
    int64_t steps = 0;
    void add(double under_way, double waited) { total += under_way, exposed += waited; }
};

#ifdef USE_MPI
// Sums gradients in the host's memory over the ranks. While the backward pass runs from the last layer to the first,
// ready(offset) says that everything from `offset` on is final: full buckets from there on are handed over, the last
// one first, and travel while earlier layers compute; MPI progresses whenever ready() tests it. finish() waits for
// them.
template <class Dev>
class MpiReducer {
    using Grad = typename Dev::Grad;

    const World& world;
    const Partition partition;
    Grad* grads;
    const ReduceOptions options;
    size_t next;  // buckets below this one are not handed over yet
    double first_launch = 0, last_end = 0;
    std::vector<uint16_t> narrow, narrow_received;  // --grad-reduce bf16: what travels
    std::vector<float> received;                    // --zero 1: the sums of this rank's parts
    std::vector<MPI_Request> requests;
    MPI_Op sum_bf16 = MPI_OP_NULL;

    static void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
        const uint16_t* x = static_cast<const uint16_t*>(in);
        uint16_t* y = static_cast<uint16_t*>(inout);
        for (int i = 0; i < *count; i++) y[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
    }

    void launch(size_t b) {
        if (next + 1 == partition.buckets()) first_launch = seconds_now();
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
    }

    void progress() {
        if (next == partition.buckets()) return;
        int all;
        MPI_Testall(int(requests.size()), requests.data(), &all, MPI_STATUSES_IGNORE);
        if (all) last_end = seconds_now();
    }

    void wait() {
        for (int one = 0; one != MPI_UNDEFINED; world.channel().tick())  // a slow network is no stall
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
    }

    // --deterministic. Rank r holds the sum of the samples r, r + size, r + 2 size ...; ranks r and r + size / 2 add
    // theirs, then ranks at distances of size / 4 ... 1: the upper levels of the tree of sum_in_tree(). a + b = b + a,
    // so both partners have the same bits.
    void add_in_tree() {
        std::vector<float> theirs(std::min<size_t>(partition.elements, 6'250'000));
        for (int distance = world.size / 2; distance > 0; distance /= 2)
            for (size_t at = 0; at < partition.elements; at += theirs.size()) {
                const size_t count = std::min(theirs.size(), partition.elements - at);
                const int partner = world.rank ^ distance;
                MPI_Sendrecv(grads + at, int(count), MPI_FLOAT, partner, 0, theirs.data(), int(count), MPI_FLOAT,
                             partner, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                world.channel().tick();
#pragma omp parallel for simd schedule(static)
                for (size_t i = 0; i < count; i++) grads[at + i] += theirs[i];
            }
    }

  public:
    ReduceTimes times;

    MpiReducer(Dev&, const World& w, const Partition& p, Grad* g, const ReduceOptions& o)
        : world(w), partition(p), grads(g), options(o), next(p.buckets()), requests(p.buckets(), MPI_REQUEST_NULL) {
        static_assert(std::is_same<Grad, float>::value, "ranks exchange fp32");
        world.require_reducer(false);
        if (options.bf16) MPI_Op_create(add_bf16, 1, &sum_bf16);
        if (options.bf16) narrow.resize(partition.elements);
        if (options.zero) received.resize(partition.shard());
        if (options.zero && options.bf16) narrow_received.resize(partition.shard());
    }
    ~MpiReducer() {
        if (options.bf16) MPI_Op_free(&sum_bf16);
    }
    MpiReducer(const MpiReducer&) = delete;
    MpiReducer& operator=(const MpiReducer&) = delete;

    void mark() {}  // the host waits for its own sums
    void await_results(int64_t) {}
    static std::string describe(const World&) { return "MPI"; }

    // Gradients at `offset` and behind are final. The step's first call has the largest offset.
    void ready(size_t offset) {
        if (options.deterministic) return;
        const ProfileRange range("reduction");
        while (next > 0 && partition.begin(next - 1) >= offset) launch(--next);
        progress();
    }

    // Every gradient is final: waits until the sums are there, everywhere or, with --zero 1, in this rank's parts.
    void finish() {
        const ProfileRange range("reduction");
        const double start = seconds_now();
        if (options.deterministic) {
            add_in_tree();
        } else {
            ready(0);
            wait();
        }
        next = partition.buckets();
        const double waited = seconds_now() - start;
        times.add(options.deterministic ? waited : std::max(0.0, last_end - first_launch), waited), times.steps++;
    }
    void read_clocks() {}  // the times are always up to date

    // Sums arrays of which every rank filled other elements and left zeros elsewhere.
    void complete(double* x, size_t count) { world.sum(x, count); }

    // --zero 1, after the update: every rank gets the others' parts of the parameters.
    template <class T>
    void gather(T* params) {
        const ProfileRange range("gathering");
        const double start = seconds_now();
        for (size_t b = 0; b < partition.buckets(); b++)
            MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, params + partition.begin(b),
                          int(partition.size(b) / size_t(partition.ranks) * sizeof(T)), MPI_BYTE, MPI_COMM_WORLD);
        times.add(seconds_now() - start, seconds_now() - start);
    }
};
#endif

#ifdef HAVE_NCCL
namespace kernels {

__global__ void narrow_kernel(__nv_bfloat16* y, const float* x, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = __nv_bfloat16(x[i]);
}
__global__ void widen_kernel(float* y, const __nv_bfloat16* x, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = float(x[i]);
}
}  // namespace kernels

// Sums gradients over GPUs with NCCL, one rank a GPU, on a stream of its own: as in MpiReducer, buckets travel while
// the backward pass of earlier layers runs. Events order the two streams; the host waits for neither.
class NcclReducer {
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

    // The reductions' stream waits for what has been computed so far, and the other way round.
    void follow_compute() {
        CUDA_CHECK(cudaEventRecord(computed, dev.stream));
        CUDA_CHECK(cudaStreamWaitEvent(stream, computed, 0));
    }
    void lead_compute() {
        CUDA_CHECK(cudaEventRecord(reduced, stream));
        CUDA_CHECK(cudaStreamWaitEvent(dev.stream, reduced, 0));
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
    void start_clock(Clock& c) {
        read_clock(c);
        CUDA_CHECK(cudaEventRecord(c.first, stream));
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
        launch<kernels::narrow_kernel>(grid_of(count), 256, 0, stream, narrow, x, count);
        __nv_bfloat16* sums = options.zero ? narrow + share * size_t(world.rank) : narrow;
        if (options.zero)
            NCCL_CHECK(ncclReduceScatter(narrow, sums, share, ncclBfloat16, ncclSum, communicator, stream));
        else NCCL_CHECK(ncclAllReduce(narrow, sums, count, ncclBfloat16, ncclSum, communicator, stream));
        if (options.zero)
            launch<kernels::widen_kernel>(grid_of(share), 256, 0, stream, grads + part.begin, sums, share);
        else launch<kernels::widen_kernel>(grid_of(count), 256, 0, stream, x, sums, count);
    }

    // --deterministic: every rank gathers all ranks' gradients, a piece at a time, and adds them in
    // MpiReducer::add_in_tree's order.
    size_t piece() const { return std::min<size_t>(partition.elements, 6'250'000); }
    void add_in_tree() {
        for (size_t at = 0; at < partition.elements; at += piece()) {
            const size_t count = std::min(piece(), partition.elements - at);
            NCCL_CHECK(ncclAllGather(grads + at, gathered, count * sizeof(float), ncclUint8, communicator, stream));
            for (int distance = world.size / 2; distance > 0; distance /= 2)
                launch<kernels::add_arrays_kernel>(grid_of(count * size_t(distance)), 256, 0, stream, gathered,
                                                   gathered + count * size_t(distance), count * size_t(distance));
            CUDA_CHECK(cudaMemcpyAsync(grads + at, gathered, count * sizeof(float), cudaMemcpyDeviceToDevice, stream));
        }
    }

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
    ~NcclReducer() {  // an error here would help nobody
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
        const ProfileRange range("reduction");
        follow_compute();
        if (next == partition.buckets()) start_clock(clocks[step % 2]);
        while (next > 0 && partition.begin(next - 1) >= offset) launch_bucket(--next);
    }
    void finish() {
        const ProfileRange range("reduction");
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
    // At the end, when the GPU has done all its work: adds the times of the last steps.
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
        const ProfileRange range("gathering");
        Clock& clock = clocks[(step + 1) % 2];  // of the step that finish() closed last
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
    // end a stream's work. mark(): the results were sent off; arrived(): true once the oldest mark that has not arrived
    // yet has passed.
    void mark() { CUDA_CHECK(cudaEventRecord(marks[marked++ % 2], dev.stream)); }
    bool arrived() {
        const cudaError_t state = cudaEventQuery(marks[seen % 2]);
        if (state == cudaErrorNotReady) return cudaGetLastError(), false;  // so that the next launch does not find it
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
    void await_results(int64_t step) {
        while (!arrived()) {
            const std::string failure = error();
            if (!failure.empty())
                fail("step %lld: gradients could not be summed over the ranks: %s", (long long)step, failure.c_str());
            usleep(50);
        }
    }
    static std::string describe(const World&) { return "NCCL"; }
};
#endif

// Stands in where a build has no MPI for ranks on CPUs, or no NCCL for ranks on GPUs; require_reducer() refuses to
// train several of them.
template <class Dev>
class NoReducer {
  public:
    ReduceTimes times;
    NoReducer(Dev&, const World& world, const Partition&, typename Dev::Grad*, const ReduceOptions&) {
        world.require_reducer(!Dev::on_host);
    }
    static std::string describe(const World&) { return "nothing"; }
    void ready(size_t) {}
    void finish() {}
    void read_clocks() {}
    void complete(double*, size_t) {}
    template <class T>
    void gather(T*) {}
    void mark() {}
    void await_results(int64_t) {}
};

template <class Dev>
struct ReducerOf {
#ifdef USE_MPI
    using type = MpiReducer<Dev>;
#else
    using type = NoReducer<Dev>;
#endif
};
#ifdef CUDA_CHECK
template <>
struct ReducerOf<Cuda> {
#ifdef HAVE_NCCL
    using type = NcclReducer;
#else
    using type = NoReducer<Cuda>;
#endif
};
#endif
template <class Dev>
using Reducer = typename ReducerOf<Dev>::type;
