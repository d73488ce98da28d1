// ddp.cuh: data parallelism, from the ranks of a run to the summed gradient and the shares of the optimiser's state.
//   World        the ranks, and collectives on small host data between them
//   Partition    the flat gradient cut into buckets and, with --zero 1, into the parts that each rank owns
//   Reducer      sums the buckets over the ranks while the backward pass goes on: by MPI through the host's memory, for
//                every engine, or by NCCL between GPUs
// How a rank learns what it is stands in lib/launch.h. MPI brings the ranks together and carries whatever is small; the
// launcher ends the others where one dies. GPUs that no MPI brought together (torchrun) have NCCL for both.
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
#ifdef USE_NCCL
#include "lib/rendezvous.h"
#include "nsa_kernels.cuh"
#endif

// The name and version of the MPI library; "" without one.
inline std::string mpi_name() {
#ifdef USE_MPI
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);  // allowed before MPI_Init
    std::string name(text, size_t(length));
    name.erase(std::min(name.find('\n'), name.size()));
    std::replace(name.begin(), name.end(), '\t', ' ');
    return name;
#else
    return "";
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// NCCL alone, for GPUs that no MPI brought together: small host data travel through a little device memory.

#ifdef USE_NCCL
// What has gone wrong with a collective under way, on this or another rank; "" while nothing has.
inline std::string nccl_error(ncclComm_t communicator) {
    ncclResult_t result = ncclSuccess;
    NCCL_CHECK(ncclCommGetAsyncError(communicator, &result));
    if (result == ncclSuccess || result == ncclInProgress) return "";
    return format_text("NCCL: %s (%s)", ncclGetErrorString(result), ncclGetLastError(communicator));
}

class NcclLink {
    const int ranks;
    const size_t piece;  // bytes of a rank at a time
    cudaStream_t stream = nullptr;
    cudaEvent_t passed = nullptr;
    char *mine = nullptr, *all = nullptr;  // [piece], [ranks, piece]

  public:
    ncclComm_t communicator = nullptr;

    NcclLink(int rank, int size, int gpu, const ncclUniqueId& id)
        : ranks(size), piece(std::max(4096, (4 << 20) / size / 8 * 8)) {
        CUDA_CHECK(cudaSetDevice(gpu));
        NCCL_CHECK(ncclCommInitRank(&communicator, size, id, rank));
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
        CUDA_CHECK(cudaMalloc(&mine, piece));
        CUDA_CHECK(cudaMalloc(&all, piece * size_t(size)));
    }
    ~NcclLink() {  // an error here would help nobody
        ncclCommDestroy(communicator);
        cudaFree(mine);
        cudaFree(all);
        cudaEventDestroy(passed);
        cudaStreamDestroy(stream);
    }
    NcclLink(const NcclLink&) = delete;
    NcclLink& operator=(const NcclLink&) = delete;

    // Calls take(offset, every rank's bytes from there on, one rank after the other, how many of each) piece by piece.
    template <class Take>
    void gather(const char* bytes, size_t count, Take take) {
        std::vector<char> gathered(piece * size_t(ranks));
        for (size_t at = 0; at < count; at += piece) {
            const size_t n = std::min(piece, count - at);
            CUDA_CHECK(cudaMemcpyAsync(mine, bytes + at, n, cudaMemcpyHostToDevice, stream));
            NCCL_CHECK(ncclAllGather(mine, all, n, ncclUint8, communicator, stream));
            CUDA_CHECK(cudaEventRecord(passed, stream));
            // A collective that fails does not end the stream's work, so errors are asked for meanwhile.
            for (cudaError_t state; (state = cudaEventQuery(passed)) != cudaSuccess; usleep(20)) {
                if (state != cudaErrorNotReady) CUDA_CHECK(state);
                cudaGetLastError();  // so that the next launch does not find it
                const std::string failure = nccl_error(communicator);
                if (!failure.empty()) fail("the ranks have lost each other: %s", failure.c_str());
            }
            CUDA_CHECK(cudaMemcpy(gathered.data(), all, n * size_t(ranks), cudaMemcpyDeviceToHost));
            take(at, gathered.data(), n);
        }
    }
};
#endif

// ---------------------------------------------------------------------------------------------------------------------
// All ranks of the run. Every rank calls the same collectives in the same order, from its main thread.

struct World {
    int rank = 0, size = 1;              // among all processes
    int local_rank = 0, local_size = 1;  // among the processes of this machine
    int device_sharers = 1;              // ranks on this machine's CPU, or on this rank's GPU, that share its memory
    std::string host = host_name();
    std::string launcher;            // "one process", "mpirun", "srun", "RANK/WORLD_SIZE"
    std::vector<std::string> hosts;  // of every rank
    std::string device;              // what this rank computes on, for messages; "" until it is known
    mutable Watchdog watchdog;
#ifdef USE_NCCL
    std::unique_ptr<NcclLink> link;  // instead of MPI
#endif

  private:
    bool by_mpi = false;

#ifdef USE_MPI
    static constexpr size_t MPI_PIECE = size_t(1) << 30;  // MPI counts are 32-bit

    void start_mpi(const Launch& launch) {
        int provided;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);  // only the main thread calls MPI
        if (provided < MPI_THREAD_FUNNELED)
            fail("this MPI cannot serve a program that has threads (MPI_THREAD_FUNNELED): install another");
        by_mpi = true;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        MPI_Comm local;
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
        MPI_Comm_rank(local, &local_rank);
        MPI_Comm_size(local, &local_size);
        MPI_Comm_free(&local);
        if (launch.size > 0 && launch.size != size)
            refuse_launch(format_text("%s has started %d processes, but this program's MPI (%.60s) sees %d: %s",
                                      launch.launcher.c_str(), launch.size, mpi_name().c_str(), size,
                                      launch.launcher == "srun"
                                          ? ("give srun --mpi=" + pmi_of(mpi_name())).c_str()
                                          : "mpirun belongs to another MPI than the one it was built with; use the "
                                            "mpirun beside the mpicxx of the build"));
    }
#endif

#ifdef USE_NCCL
    void start_link(const Launch& launch, double start_timeout) {
        rank = launch.rank;
        size = launch.size;
        int gpus = 0;
        if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
            refuse_launch("this process sees no GPU, and only ranks on GPUs can be started by " + launch.launcher +
                          " alone: on CPUs start them with mpirun");
        ncclUniqueId id = {};
        if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        rendezvous::share_id(id.internal, launch, start_timeout);
        link = std::make_unique<NcclLink>(rank, size, (launch.local_rank < 0 ? rank : launch.local_rank) % gpus, id);
    }
#endif

    template <class T>
    void sum_of([[maybe_unused]] T* x, [[maybe_unused]] size_t count) const {
        if (size == 1) return;
        const Watchdog::Waiting waiting(watchdog);
#ifdef USE_NCCL
        if (link)
            return link->gather(reinterpret_cast<const char*>(x), count * sizeof(T),
                                [&](size_t at, const char* all, size_t bytes) {
                                    T* const sums = x + at / sizeof(T);
                                    const T* const theirs = reinterpret_cast<const T*>(all);
                                    const size_t n = bytes / sizeof(T);
                                    std::fill_n(sums, n, T(0));
                                    for (size_t i = 0; i < n * size_t(size); i++) sums[i % n] += theirs[i];
                                    watchdog.tick();
                                });
#endif
#ifdef USE_MPI
        const size_t piece = 25'000'000 / sizeof(T);  // stays in cache on the way
        for (size_t i = 0; i < count; i += piece, watchdog.tick())
            MPI_Allreduce(MPI_IN_PLACE, x + i, int(std::min(piece, count - i)),
                          sizeof(T) == sizeof(float) ? MPI_FLOAT : MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
#endif
    }

  public:
    // Returns when all ranks are there. start_timeout: seconds that they may take.
    explicit World(const Launch& launch = {}, [[maybe_unused]] double start_timeout = 300) : launcher(launch.launcher) {
#ifdef USE_MPI
        if (launch.by_mpi) start_mpi(launch);
#endif
        if (launch.size > 1 && !launch.by_mpi) {
#ifdef USE_NCCL
            start_link(launch, start_timeout);
#else
            refuse_launch(format_text(
                "%s makes this process one of %d ranks, but this build has no NCCL, the only way to sum the gradients "
                "of ranks that were started this way: start them with mpirun -np %d ./train_nsa ...",
                launcher.c_str(), launch.size, launch.size));
#endif
        }
        hosts = gather(host);
        if (by_mpi || size == 1) return;
        for (int r = 0; r < size; r++) {
            local_size += r != rank && hosts[size_t(r)] == host;
            local_rank += r < rank && hosts[size_t(r)] == host;
        }
    }
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    // Can gradients travel through the host's memory?
    bool has_mpi() const { return by_mpi; }
    // For messages, of this rank and of its watchdog.
    void compute_on(const std::string& what) {
        device = what;
        watchdog.call_it(name());
    }
    std::string name() const {
        return size == 1
                   ? "this process"
                   : format_text("rank %d on %s%s%s", rank, host.c_str(), device.empty() ? "" : ", ", device.c_str());
    }

    // x [count] = sum of every rank's x, the same bits on every rank.
    void sum(float* x, size_t count) const { sum_of(x, count); }
    void sum(double* x, size_t count) const { sum_of(x, count); }
    double sum(double x) const {
        sum_of(&x, 1);
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

    // bytes of the root on every rank.
    void broadcast(void* x, [[maybe_unused]] size_t bytes, [[maybe_unused]] int root) const {
        if (size == 1) return;
        const Watchdog::Waiting waiting(watchdog);
        [[maybe_unused]] char* const to = static_cast<char*>(x);
#ifdef USE_NCCL
        if (link)
            return link->gather(to, bytes, [&](size_t at, const char* all, size_t n) {
                std::copy_n(all + size_t(root) * n, n, to + at);
            });
#endif
#ifdef USE_MPI
        for (size_t i = 0; i < bytes; i += MPI_PIECE)
            MPI_Bcast(to + i, int(std::min(MPI_PIECE, bytes - i)), MPI_BYTE, root, MPI_COMM_WORLD);
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
                                          hosts[odd].c_str(), lines_now[odd].c_str(), expected.c_str(),
                                          ranks_with[expected], size, hint.c_str()));
        }
    }

    // Every rank has finished its work: returns when all have.
    void finish() {
        barrier();
        watchdog.stop();
#ifdef USE_NCCL
        link.reset();
#endif
#ifdef USE_MPI
        if (by_mpi) MPI_Finalize();
#endif
        by_mpi = false;
    }

    // After an error on this rank, which it has printed: the launcher ends the others, which would wait for ever.
    [[noreturn]] void abort(int status) const {
        std::fflush(nullptr);
        // mpirun forwards what was printed, but not after an abort: without the pause 2 of 30 messages were lost
        if (size > 1) usleep(200000);
#ifdef USE_MPI
        if (by_mpi) MPI_Abort(MPI_COMM_WORLD, status);
#endif
        std::_Exit(status);
    }
};

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
    // bucket_mb: megabytes of a bucket at most. There are at least four where there are that many units, so that
    // something travels while the backward pass goes on; of one rank nothing travels, and all is one bucket.
    Partition(size_t total, int number_of_ranks, double bucket_mb) : ranks(number_of_ranks) {
        const size_t unit = CHUNK * size_t(ranks), wanted = size_t(bucket_mb * 1e6 / sizeof(float));
        elements = (total + 1 + unit - 1) / unit * unit;
        bucket = ranks == 1 ? elements : std::max(unit, std::min(wanted, elements / 4) / unit * unit);
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
// Reducer. While the backward pass runs from the last layer to the first, ready(offset) says that everything from
// `offset` on is final: full buckets from there on are handed over, the last one first, and travel while earlier layers
// compute.

struct ReduceOptions {
    int zero = 0;       // 1: a rank needs the sums of its own parts only
    bool bf16 = false;  // gradients are rounded to bf16 to travel
};

struct ReduceTimes {
    double total = 0;    // seconds with a reduction under way
    double exposed = 0;  // of these, seconds in which the step waited for nothing else
    int64_t steps = 0;
    void add(double under_way, double waited) {
        total += under_way;
        exposed += waited;
    }
};

template <class Dev>
struct Reducer {
    ReduceTimes times;

    Reducer() = default;
    Reducer(const Reducer&) = delete;
    Reducer& operator=(const Reducer&) = delete;
    virtual ~Reducer() = default;

    // Gradients at `offset` and behind are final. The step's first call has the largest offset.
    virtual void ready(size_t offset) = 0;
    // Every gradient is final: what is launched on the engine from now on finds the sums, everywhere or, with --zero 1,
    // in this rank's parts.
    virtual void finish() = 0;
    // x [count], in the engine's memory: sums arrays of which every rank filled other elements and left zeros
    // elsewhere.
    virtual void complete(double* x, size_t count) = 0;
    // --zero 1, after the update: every rank gets the others' parts of the parameters.
    virtual void gather(typename Dev::real* params) = 0;

    // The host asks for errors until a step's results are there, instead of waiting for them: NCCL's failures do not
    // end a stream's work. mark(): the results were sent off.
    virtual void mark() {}
    virtual void await_results(int64_t) {}
    // At the end, when the engine has done all its work: adds the times of the last steps.
    virtual void read_clocks() {}
};

#ifdef USE_MPI
// By MPI in the host's memory, for every engine: there lie the gradients of a CPU, and those of a GPU get there and
// back beside its computation (Dev::HostCopies). MPI progresses whenever it is asked how far it is.
template <class Dev>
class HostReducer : public Reducer<Dev> {
    using Grad = typename Dev::Grad;
    using real = typename Dev::real;
    static_assert(std::is_same<Grad, float>::value, "ranks exchange fp32");

    Dev& dev;
    const World& world;
    const Partition partition;
    const ReduceOptions options;
    typename Dev::HostCopies copies;
    Grad* const grads;
    float* const host;  // the gradients where MPI can read them
    // Buckets go this way one after the other, the last one first. From `fetched` on they are on their way to the host,
    // from `sent` on MPI has them.
    size_t fetched, sent;
    double first_sent = 0, all_here = 0, last_end = 0;  // of this step; seconds_now()
    std::vector<uint16_t> narrow, narrow_received;      // --grad-reduce bf16: what travels
    std::vector<float> received;                        // --zero 1: the sums of this rank's parts
    std::vector<MPI_Request> requests;
    MPI_Op sum_bf16 = MPI_OP_NULL;

    static void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
        const uint16_t* x = static_cast<const uint16_t*>(in);
        uint16_t* y = static_cast<uint16_t*>(inout);
        for (int i = 0; i < *count; i++) y[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
    }

    void send(size_t b) {
        if (b + 1 == partition.buckets()) first_sent = seconds_now();
        if (b == 0) all_here = seconds_now();
        float* x = host + partition.begin(b);
        uint16_t* y = narrow.data() + partition.begin(b) * options.bf16;
        const size_t count = partition.size(b), place = partition.part(b, world.rank).local;
        const int share = int(count / size_t(partition.ranks));
        MPI_Request* const request = &requests[b];
        if (options.bf16)
            for (size_t i = 0; i < count; i++) y[i] = to_bf16(x[i]);
        if (options.bf16 && options.zero)
            MPI_Ireduce_scatter_block(y, narrow_received.data() + place, share, MPI_UINT16_T, sum_bf16, MPI_COMM_WORLD,
                                      request);
        else if (options.bf16)
            MPI_Iallreduce(MPI_IN_PLACE, y, int(count), MPI_UINT16_T, sum_bf16, MPI_COMM_WORLD, request);
        else if (options.zero)
            MPI_Ireduce_scatter_block(x, received.data() + place, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, request);
        else MPI_Iallreduce(MPI_IN_PLACE, x, int(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, request);
    }

    // The sums of a bucket have arrived: back to where the gradients are.
    void take(size_t b) {
        last_end = seconds_now();
        const Piece part = options.zero ? partition.part(b, world.rank)
                                        : Piece{partition.begin(b), partition.size(b), partition.begin(b)};
        float* const to = host + part.begin;
        if (options.bf16) {
            const uint16_t* from = (options.zero ? narrow_received : narrow).data() + part.local;
            for (size_t i = 0; i < part.count; i++) to[i] = from_bf16(from[i]);
        } else if (options.zero) {
            std::copy_n(received.data() + part.local, part.count, to);
        }
        copies.put(grads + part.begin, to, part.count);
    }

    void progress() {
        while (sent > fetched && copies.has(sent - 1)) send(--sent);
        int done = 0, which = 0;
        do {
            MPI_Testany(int(requests.size()), requests.data(), &which, &done, MPI_STATUS_IGNORE);
            if (done && which != MPI_UNDEFINED) {
                take(size_t(which));
                world.watchdog.tick();  // a slow network is no stall
            }
        } while (done && which != MPI_UNDEFINED);
    }
    bool under_way() const {
        return sent > 0 || std::any_of(requests.begin(), requests.end(),
                                       [](const MPI_Request& r) { return r != MPI_REQUEST_NULL; });
    }

  public:
    HostReducer(Dev& d, const World& w, const Partition& p, Grad* g, const ReduceOptions& o)
        : dev(d),
          world(w),
          partition(p),
          options(o),
          copies(d, p.buckets()),
          grads(g),
          host(copies.host_side(g, p.elements)),
          fetched(p.buckets()),
          sent(p.buckets()),
          requests(p.buckets(), MPI_REQUEST_NULL) {
        if (options.bf16) MPI_Op_create(add_bf16, 1, &sum_bf16);
        if (options.bf16) narrow.resize(partition.elements);
        if (options.zero) received.resize(partition.shard());
        if (options.zero && options.bf16) narrow_received.resize(partition.shard());
    }
    ~HostReducer() override {
        if (options.bf16) MPI_Op_free(&sum_bf16);
    }

    void ready(size_t offset) override {
        const ProfileRange range("reduction");
        for (; fetched > 0 && partition.begin(fetched - 1) >= offset; fetched--) {
            const size_t b = fetched - 1;
            copies.fetch(host + partition.begin(b), grads + partition.begin(b), partition.size(b), b);
        }
        progress();
    }
    void finish() override {
        const ProfileRange range("reduction");
        ready(0);
        for (; under_way(); std::this_thread::yield()) progress();
        fetched = sent = partition.buckets();
        this->times.add(last_end - first_sent, last_end - all_here);
        this->times.steps++;
    }
    void complete(double* x, size_t count) override {
        if (Dev::on_host) return world.sum(x, count);
        std::vector<double> sums(count);
        dev.copy(sums.data(), static_cast<const double*>(x), count);
        world.sum(sums.data(), count);
        dev.copy(x, static_cast<const double*>(sums.data()), count);
    }
    void gather(real* params) override {
        const ProfileRange range("gathering");
        const double start = seconds_now();
        std::vector<real> elsewhere(Dev::on_host ? 0 : partition.bucket);
        for (size_t b = 0; b < partition.buckets(); b++) {
            const Piece own = partition.part(b, world.rank);
            real* const x = Dev::on_host ? params + partition.begin(b) : elsewhere.data();
            if (!Dev::on_host) dev.copy(x + (own.begin - partition.begin(b)), params + own.begin, own.count);
            MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x, int(own.count * sizeof(real)), MPI_BYTE,
                          MPI_COMM_WORLD);
            if (!Dev::on_host) dev.copy(params + partition.begin(b), x, partition.size(b));
        }
        this->times.add(seconds_now() - start, seconds_now() - start);
    }
};
#endif

#ifdef USE_NCCL
namespace kernels {

__global__ void narrow_kernel(__nv_bfloat16* y, const float* x, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = __nv_bfloat16(x[i]);
}
__global__ void widen_kernel(float* y, const __nv_bfloat16* x, size_t count) {
    for (size_t i = thread_index(); i < count; i += size_t(gridDim.x) * blockDim.x) y[i] = float(x[i]);
}
}  // namespace kernels

// By NCCL between GPUs, one rank a GPU, on a stream of its own. Events order the two streams; the host waits for
// neither.
class NcclReducer : public Reducer<Cuda> {
    Cuda& dev;
    const World& world;
    const Partition partition;
    float* grads;
    const ReduceOptions options;
    size_t next;  // buckets below this one are not handed over yet
    const bool own_communicator;
    ncclComm_t communicator = nullptr;
    cudaStream_t stream = nullptr;  // the reductions'
    cudaEvent_t computed = nullptr, reduced = nullptr, marks[2] = {};
    int64_t marked = 0, seen = 0;
    __nv_bfloat16* narrow = nullptr;
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
        times.add((under_way + gather) * 1e-3, (std::max(0.0f, exposed) + gather) * 1e-3);
        times.steps++;
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

    static ncclComm_t make_communicator(const World& world) {
        ncclUniqueId id = {};
        if (world.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        world.broadcast(&id, sizeof id, 0);
        ncclComm_t made = nullptr;
        NCCL_CHECK(ncclCommInitRank(&made, world.size, id, world.rank));
        return made;
    }

  public:
    // given: a communicator of all ranks; nullptr: this object makes one.
    NcclReducer(Cuda& d, const World& w, const Partition& p, float* g, const ReduceOptions& o, ncclComm_t given)
        : dev(d),
          world(w),
          partition(p),
          grads(g),
          options(o),
          next(p.buckets()),
          own_communicator(!given),
          communicator(given ? given : make_communicator(w)) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&reduced, cudaEventDisableTiming));
        for (cudaEvent_t& e : marks) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
        for (Clock& c : clocks)
            for (cudaEvent_t* e : {&c.first, &c.last, &c.backward, &c.gather, &c.gathered})
                CUDA_CHECK(cudaEventCreate(e));
        if (options.bf16) narrow = dev.allocate<__nv_bfloat16>(partition.bucket);
    }
    ~NcclReducer() override {  // an error here would help nobody
        cudaStreamSynchronize(stream);
        dev.release(narrow);
        for (Clock& c : clocks)
            for (cudaEvent_t e : {c.first, c.last, c.backward, c.gather, c.gathered}) cudaEventDestroy(e);
        for (cudaEvent_t e : {computed, reduced, marks[0], marks[1]}) cudaEventDestroy(e);
        if (own_communicator) ncclCommDestroy(communicator);
        cudaStreamDestroy(stream);
    }

    void ready(size_t offset) override {
        if (next == 0 || partition.begin(next - 1) < offset) return;
        const ProfileRange range("reduction");
        follow_compute();
        if (next == partition.buckets()) start_clock(clocks[step % 2]);
        while (next > 0 && partition.begin(next - 1) >= offset) launch_bucket(--next);
    }
    void finish() override {
        const ProfileRange range("reduction");
        Clock& clock = clocks[step % 2];
        CUDA_CHECK(cudaEventRecord(clock.backward, dev.stream));
        ready(0);
        CUDA_CHECK(cudaEventRecord(clock.last, stream));
        lead_compute();
        clock.used = true;
        step++;
        next = partition.buckets();
    }
    void read_clocks() override {
        for (Clock& c : clocks) read_clock(c);
    }
    void complete(double* x, size_t count) override {
        follow_compute();
        NCCL_CHECK(ncclAllReduce(x, x, count, ncclDouble, ncclSum, communicator, stream));
        lead_compute();
    }
    void gather(Cuda::real* params) override {
        const ProfileRange range("gathering");
        Clock& clock = clocks[(step + 1) % 2];  // of the step that finish() closed last
        follow_compute();
        CUDA_CHECK(cudaEventRecord(clock.gather, stream));
        for (size_t b = 0; b < partition.buckets(); b++)
            NCCL_CHECK(ncclAllGather(params + partition.part(b, world.rank).begin, params + partition.begin(b),
                                     partition.size(b) / size_t(world.size) * sizeof(Cuda::real), ncclUint8,
                                     communicator, stream));
        CUDA_CHECK(cudaEventRecord(clock.gathered, stream));
        clock.has_gather = true;
        lead_compute();
    }
    void mark() override { CUDA_CHECK(cudaEventRecord(marks[marked++ % 2], dev.stream)); }
    // True once the oldest mark that has not arrived yet has passed.
    bool arrived() {
        const cudaError_t state = cudaEventQuery(marks[seen % 2]);
        if (state == cudaErrorNotReady) {
            cudaGetLastError();  // so that the next launch does not find it
            return false;
        }
        CUDA_CHECK(state);
        seen++;
        return true;
    }
    void await_results(int64_t at_step) override {
        world.watchdog.progress(at_step, "waiting for the other ranks' GPUs");
        while (!arrived()) {
            const std::string failure = nccl_error(communicator);
            if (!failure.empty())
                fail("step %lld: gradients could not be summed over the ranks: %s", (long long)at_step,
                     failure.c_str());
            usleep(50);
        }
    }
};
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Which of them a run takes.

struct GradientPath {
    bool by_nccl = false;
    std::string text;  // for the run's first lines
};

// All ranks ask. gpu: its name and bus, such as "GPU 0 (NVIDIA H200)" and "0000:4b:00.0"; "" on a CPU.
inline GradientPath choose_path(World& world, const std::string& gpu, const std::string& bus) {
    world.device_sharers = gpu.empty() ? world.local_size : 1;
    if (world.size == 1) return {};
    if (gpu.empty() && !world.has_mpi())
        throw SharedError(format_text("%d ranks were started by %s, without MPI, and only NCCL between GPUs serves "
                                      "such ranks: this run computes on CPUs, so start it with mpirun -np %d "
                                      "./train_nsa ...",
                                      world.size, world.launcher.c_str(), world.size),
                          2);
    if (gpu.empty()) return {false, "by MPI"};
    const std::vector<std::string> all = world.gather(world.host + " " + bus);
    std::map<std::string, int> ranks_on;
    for (const std::string& place : all) ranks_on[place]++;
    world.device_sharers = ranks_on[all[size_t(world.rank)]];
    const bool shared = ranks_on.size() < all.size();
    const std::string shares =
        format_text("%d ranks share %s", world.device_sharers, world.device_sharers > 1 ? gpu.c_str() : "a GPU");
    if (shared && !world.has_mpi())
        throw SharedError(shares + ", and NCCL needs a GPU for each: start them with mpirun, or fewer");
    if (shared) return {false, "by MPI through the host, because " + shares + "; one rank a GPU is faster"};
#ifdef USE_NCCL
    return {true, "by NCCL"};
#else
    return {false, "by MPI through the host, because this build has no NCCL"};
#endif
}

// nullptr for one rank alone.
template <class Dev>
std::unique_ptr<Reducer<Dev>> make_reducer([[maybe_unused]] Dev& dev, const World& world,
                                           [[maybe_unused]] const Partition& partition,
                                           [[maybe_unused]] typename Dev::Grad* grads,
                                           [[maybe_unused]] const ReduceOptions& options,
                                           [[maybe_unused]] const GradientPath& path) {
    if (world.size == 1) return nullptr;
#ifdef USE_NCCL
    if constexpr (std::is_same<Dev, Cuda>::value)
        if (path.by_nccl)
            return std::make_unique<NcclReducer>(dev, world, partition, grads, options,
                                                 world.link ? world.link->communicator : nullptr);
#endif
#ifdef USE_MPI
    if (world.has_mpi()) return std::make_unique<HostReducer<Dev>>(dev, world, partition, grads, options);
#endif
    fail("%d ranks and nothing that sums their gradients: start them with mpirun", world.size);
}
