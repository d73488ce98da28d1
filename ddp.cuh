// ddp.cuh: data parallelism, from the buckets of the gradient to its sum and the shares of the optimiser's state.
//   NcclTransport    ranks on GPUs that no MPI brought together; the others, and World itself, are in lib/run/world.h
//   Reducer          sums the buckets over the ranks while the backward pass goes on: by MPI through the host's memory,
//                    for every engine, or by NCCL between GPUs
// Read Reducer first. lib/model/partition.h says what each rank reduces and updates.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

#include "lib/base/profile.h"
#include "lib/model/partition.h"
#include "lib/run/world.h"
#include "nsa_cpu.h"
#ifdef USE_NCCL
#include "lib/run/rendezvous.h"
#include "nsa_kernels.cuh"
#endif

// ---------------------------------------------------------------------------------------------------------------------
// NCCL between ranks that no MPI brought together.

#ifdef USE_NCCL
// What has gone wrong with a collective under way, on this or another rank; "" while nothing has.
inline std::string nccl_error(ncclComm_t communicator) {
    ncclResult_t result = ncclSuccess;
    NCCL_CHECK(ncclCommGetAsyncError(communicator, &result));
    if (result == ncclSuccess || result == ncclInProgress) return "";
    return format_text("NCCL: %s (%s)", ncclGetErrorString(result), ncclGetLastError(communicator));
}

// Returns when arrived() says so. A collective that fails does not end its stream's work, so errors are asked for
// meanwhile. what: the beginning of their message.
template <class Arrived>
void await(ncclComm_t communicator, const std::string& what, Arrived arrived) {
    for (; !arrived(); usleep(20)) {
        const std::string failure = nccl_error(communicator);
        if (!failure.empty()) fail("%s: %s", what, failure);
    }
}

// Before the communicator is made. Switches of NVLink sum (NVLS) in another order each time; rings and trees keep to
// one, so that a run has the same bits again. NCCL_ALGO or NCCL_NVLS_ENABLE=1 in the environment says otherwise.
inline void sum_in_one_order() {
    if (!std::getenv("NCCL_ALGO")) setenv("NCCL_NVLS_ENABLE", "0", 0);
}

// Small host data travel through a little device memory.
class NcclTransport : public Transport {
    ncclComm_t nccl = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t passed = nullptr;
    char *sent = nullptr, *received = nullptr;  // [piece], [size, piece]

  public:
    // start_timeout: seconds that all ranks may take to come.
    NcclTransport(const Launch& launch, double start_timeout) {
        rank = launch.rank;
        size = launch.size;
        int gpus = 0;
        if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
            refuse_launch("this process sees no GPU, and only ranks on GPUs can be started by " + launch.launcher +
                          " alone: on CPUs start them with mpirun");
        if (gpus > 1 && launch.local_rank >= gpus)
            refuse_launch(
                format_text("%d processes or more on this machine, which shows %d GPUs, and NCCL needs one "
                            "for each: start fewer; with MPI in the build mpirun lets them share",
                            launch.local_rank + 1, gpus));
        sum_in_one_order();
        ncclUniqueId id = {};
        if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        rendezvous::share_id(id.internal, launch, start_timeout);
        CUDA_CHECK(cudaSetDevice((launch.local_rank < 0 ? rank : launch.local_rank) % gpus));
        NCCL_CHECK(ncclCommInitRank(&nccl, size, id, rank));
        communicator = nccl;
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
        CUDA_CHECK(cudaMalloc(&sent, most_bytes()));
        CUDA_CHECK(cudaMalloc(&received, most_bytes() * size_t(size)));
    }
    ~NcclTransport() override {  // an error here would help nobody
        ncclCommDestroy(nccl);
        cudaFree(sent);
        cudaFree(received);
        cudaEventDestroy(passed);
        cudaStreamDestroy(stream);
    }
    void all_gather(const char* mine, char* all, size_t bytes) override {
        CUDA_CHECK(cudaMemcpyAsync(sent, mine, bytes, cudaMemcpyHostToDevice, stream));
        NCCL_CHECK(ncclAllGather(sent, received, bytes, ncclUint8, nccl, stream));
        CUDA_CHECK(cudaEventRecord(passed, stream));
        await(nccl, "the ranks have lost each other", [this] { return has_passed(passed); });
        CUDA_CHECK(cudaMemcpy(all, received, bytes * size_t(size), cudaMemcpyDeviceToHost));
    }
};

inline std::unique_ptr<Transport> connect_by_nccl(const Launch& launch, double start_timeout) {
    return std::make_unique<NcclTransport>(launch, start_timeout);
}
#else
constexpr ConnectByNccl connect_by_nccl = nullptr;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Reducer. While the backward pass runs from the last layer to the first, ready(offset) says that everything from
// `offset` on is final: full buckets from there on are handed over, the last one first, and travel while earlier layers
// compute.

struct ReduceOptions {
    bool partial_sums = false;  // a rank needs the sums of its own parts only; with Muon all, since parts cut matrices
    bool bf16 = false;          // gradients are rounded to bf16 to travel
};

template <class Dev>
struct Reducer {
    ReduceTimes times;

    virtual ~Reducer() = default;
    // Gradients at `offset` and behind are final. The step's first call has the largest offset.
    virtual void ready(size_t offset) = 0;
    // Every gradient is final: what is launched on the engine from now on finds the sums, everywhere or, with --zero 1,
    // in this rank's parts.
    virtual void finish() = 0;
    // x [count], in the engine's memory: sums arrays of which every rank filled other elements and left zeros
    // elsewhere.
    virtual void complete(typename Dev::Sum* x, size_t count) = 0;
    // --zero 1, after the update: every rank gets what the others have updated of the parameters.
    virtual void gather(typename Dev::real* params) = 0;

    // The host asks for errors until a step's results are there, until the engine takes the next micro-batch, and until
    // it has done all its work, instead of waiting for that: NCCL's failures do not end a stream's work.
    virtual void await_results(int64_t) {}
    virtual void await_upload(int64_t) {}
    virtual void await_all(int64_t) {}
    // At the end, when the engine has done all its work: adds the times of the last steps.
    virtual void read_clocks() {}
};

#ifdef USE_MPI
// By MPI in the host's memory, for every engine: there lie the gradients of a CPU, and those of a GPU get there and
// back beside its computation (Dev::HostCopies). MPI progresses whenever it is asked how far it is.
template <class Dev>
class HostReducer : public Reducer<Dev> {
    using real = typename Dev::real;
    static_assert(std::is_same<typename Dev::Grad, float>::value, "ranks exchange fp32");

    Dev& dev;
    const World& world;
    const Partition partition;
    const ReduceOptions options;
    typename Dev::HostCopies copies;
    float* const grads;
    float* const host;  // the gradients where MPI can read them
    // Buckets go this way one after the other, the last one first. From `fetched` on they are on their way to the host,
    // from `sent` on MPI has them.
    size_t fetched, sent;
    double first_sent = 0, last_sent = 0, last_end = 0;  // of this step; seconds_now()
    std::vector<uint16_t> narrow;                        // --grad-reduce bf16: what travels
    std::vector<float> part_sums;                        // --zero 1: the sums of this rank's parts, as they travel
    std::vector<MPI_Request> requests;
    MPI_Op sum_bf16 = MPI_OP_NULL;

    static void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
        const uint16_t* x = static_cast<const uint16_t*>(in);
        uint16_t* y = static_cast<uint16_t*>(inout);
        for (int i = 0; i < *count; i++) y[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
    }

    void send(size_t b) {
        if (b + 1 == partition.buckets()) first_sent = seconds_now();
        if (b == 0) last_sent = seconds_now();
        const Piece part = partition.part(b, world.rank);
        const size_t begin = partition.begin(b), count = partition.size(b);
        if (options.bf16)
            for (size_t i = begin; i < begin + count; i++) narrow[i] = to_bf16(host[i]);
        void* const sums = options.bf16 ? static_cast<void*>(narrow.data() + begin) : host + begin;
        const MPI_Datatype type = options.bf16 ? MPI_UINT16_T : MPI_FLOAT;
        const MPI_Op add = options.bf16 ? sum_bf16 : MPI_SUM;
        if (options.partial_sums)
            MPI_Ireduce_scatter_block(sums, &part_sums[part.m_at], int(part.count), type, add, MPI_COMM_WORLD,
                                      &requests[b]);
        else MPI_Iallreduce(MPI_IN_PLACE, sums, int(count), type, add, MPI_COMM_WORLD, &requests[b]);
    }

    // The sums of a bucket have arrived: back to where the gradients are.
    void take(size_t b) {
        last_end = seconds_now();
        const Piece part = options.partial_sums ? partition.part(b, world.rank)
                                                : Piece{partition.begin(b), partition.size(b), partition.begin(b)};
        float* const to = host + part.begin;
        if (options.bf16) {
            const uint16_t* const from =
                options.partial_sums ? reinterpret_cast<uint16_t*>(&part_sums[part.m_at]) : &narrow[part.begin];
            for (size_t i = 0; i < part.count; i++) to[i] = from_bf16(from[i]);
        } else if (options.partial_sums) {
            std::copy_n(part_sums.data() + part.m_at, part.count, to);
        }
        copies.put(grads + part.begin, to, part.count);
    }

    // Hands over what has come to the host, and takes what has been summed. Returns whether anything is under way.
    bool advance() {
        while (sent > fetched && copies.has(sent - 1)) send(--sent);
        for (;;) {
            int done = 0, which = MPI_UNDEFINED;
            MPI_Testany(int(requests.size()), requests.data(), &which, &done, MPI_STATUS_IGNORE);
            if (!done) return true;
            if (which == MPI_UNDEFINED) return sent > 0;
            take(size_t(which));
            world.watchdog.tick();  // a slow network is no stall
        }
    }

    void gather_parts(real* params) {
        std::vector<real> elsewhere(Dev::on_host ? 0 : partition.bucket);
        for (size_t b = 0; b < partition.buckets(); b++) {
            const Piece own = partition.part(b, world.rank);
            real* const x = Dev::on_host ? params + partition.begin(b) : elsewhere.data();
            if (!Dev::on_host) dev.copy(x + (own.begin - partition.begin(b)), params + own.begin, own.count);
            MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x, int(own.count * sizeof(real)), MPI_BYTE,
                          MPI_COMM_WORLD);
            if (!Dev::on_host) dev.copy(params + partition.begin(b), x, partition.size(b));
        }
    }
    // Where ranks own matrices, their pieces have many sizes.
    void gather_pieces(real* params) {
        constexpr size_t most = (size_t(1) << 30) / sizeof(real);  // at a time, since MPI counts bytes by int
        std::vector<real> elsewhere;
        for (int r = 0; r < world.size; r++)
            for (const Piece& p : partition.owned(r, true)) {
                if (!Dev::on_host) elsewhere.resize(p.count);
                real* const x = Dev::on_host ? params + p.begin : elsewhere.data();
                if (!Dev::on_host && r == world.rank) dev.copy(x, params + p.begin, p.count);
                for (size_t at = 0; at < p.count; at += most)
                    MPI_Bcast(x + at, int(std::min(p.count - at, most) * sizeof(real)), MPI_BYTE, r, MPI_COMM_WORLD);
                if (!Dev::on_host && r != world.rank) dev.copy(params + p.begin, x, p.count);
            }
    }

  public:
    HostReducer(Dev& d, const World& w, const Partition& p, float* g, const ReduceOptions& o)
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
        if (options.partial_sums) part_sums.resize(partition.shard());
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
        advance();
    }
    void finish() override {
        const ProfileRange range("reduction");
        ready(0);
        while (advance()) std::this_thread::yield();
        fetched = sent = partition.buckets();
        this->times.add(last_end - first_sent, last_end - last_sent);
        this->times.steps++;
    }
    void complete(typename Dev::Sum* x, size_t count) override {
        std::vector<typename Dev::Sum> sums(count);
        dev.copy(sums.data(), std::as_const(x), count);
        world.sum(sums.data(), count);
        dev.copy(x, std::as_const(sums).data(), count);
    }
    void gather(real* params) override {
        const ProfileRange range("gathering");
        const double start = seconds_now();
        if (partition.matrices.empty()) gather_parts(params);
        else gather_pieces(params);
        this->times.add(seconds_now() - start, seconds_now() - start);
    }
};
#endif

#ifdef USE_NCCL
// By NCCL between GPUs, one rank a GPU, on a stream of its own. Events order the two streams; the host waits for
// neither.
class NcclReducer : public Reducer<Cuda> {
    Cuda& dev;
    const World& world;
    const Partition partition;
    float* grads;
    const ReduceOptions options;
    size_t next;  // buckets below this one are not handed over yet
    const ncclComm_t communicator;
    Cuda::SideStream side;
    __nv_bfloat16* narrow = nullptr;
    // Read two steps later, when they have surely passed.
    StreamClock reductions[2], gathers[2];
    int64_t step = 0;  // calls of finish()

    void read_clocks_of(int64_t which) {
        double under_way, exposed;
        if (reductions[which].read(under_way, exposed)) {
            times.add(under_way, exposed);
            times.steps++;
        }
        if (gathers[which].read(under_way, exposed)) times.add(under_way, exposed);
    }
    void launch_bucket(size_t b) {
        const Piece whole = {partition.begin(b), partition.size(b), 0}, own = partition.part(b, world.rank);
        const Piece& sums = options.partial_sums ? own : whole;
        float* const x = grads + whole.begin;
        void *all = x, *part = grads + own.begin;
        if (options.bf16) {
            launch<kernels::convert_kernel<__nv_bfloat16, float>>(grid_of(whole.count), 256, 0, side.stream, narrow, x,
                                                                  whole.count);
            all = narrow;
            part = narrow + (own.begin - whole.begin);
        }
        const ncclDataType_t type = options.bf16 ? ncclBfloat16 : ncclFloat;
        if (options.partial_sums)
            NCCL_CHECK(ncclReduceScatter(all, part, own.count, type, ncclSum, communicator, side.stream));
        else NCCL_CHECK(ncclAllReduce(all, all, whole.count, type, ncclSum, communicator, side.stream));
        if (options.bf16)
            launch<kernels::convert_kernel<float, __nv_bfloat16>>(grid_of(sums.count), 256, 0, side.stream,
                                                                  grads + sums.begin,
                                                                  narrow + (sums.begin - whole.begin), sums.count);
    }

    void gather_parts(Cuda::real* params) {
        for (size_t b = 0; b < partition.buckets(); b++) {
            const Piece own = partition.part(b, world.rank);
            NCCL_CHECK(ncclAllGather(params + own.begin, params + partition.begin(b), own.count * sizeof(Cuda::real),
                                     ncclUint8, communicator, side.stream));
        }
    }
    void gather_pieces(Cuda::real* params) {
        NCCL_CHECK(ncclGroupStart());
        for (int r = 0; r < world.size; r++)
            for (const Piece& p : partition.owned(r, true))
                NCCL_CHECK(ncclBroadcast(params + p.begin, params + p.begin, p.count * sizeof(Cuda::real), ncclUint8, r,
                                         communicator, side.stream));
        NCCL_CHECK(ncclGroupEnd());
    }

    template <class Arrived>
    void await_engine(int64_t at_step, Arrived arrived) {
        world.watchdog.note_phase(at_step, "waiting for the other ranks' GPUs");
        await(communicator, format_text("step %d: gradients could not be summed over the ranks", at_step), arrived);
    }

    static ncclComm_t make_communicator(const World& world) {
        sum_in_one_order();
        ncclUniqueId id = {};
        if (world.rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        const std::string of_rank_0 = world.gather(std::string(id.internal, sizeof id.internal))[0];
        std::copy(of_rank_0.begin(), of_rank_0.end(), id.internal);
        ncclComm_t made = nullptr;
        const Watchdog::Waiting waiting(world.watchdog);
        NCCL_CHECK(ncclCommInitRank(&made, world.size, id, world.rank));
        return made;
    }

  public:
    NcclReducer(Cuda& d, const World& w, const Partition& p, float* g, const ReduceOptions& o)
        : dev(d),
          world(w),
          partition(p),
          grads(g),
          options(o),
          next(p.buckets()),
          communicator(w.communicator ? static_cast<ncclComm_t>(w.communicator) : make_communicator(w)),
          side(d) {
        if (options.bf16) narrow = dev.allocate<__nv_bfloat16>(partition.bucket);
    }
    ~NcclReducer() override {  // an error here would help nobody
        cudaStreamSynchronize(side.stream);
        dev.release(narrow);
        if (!world.communicator) ncclCommDestroy(communicator);
    }

    void ready(size_t offset) override {
        if (next == 0 || partition.begin(next - 1) < offset) return;
        const ProfileRange range("reduction");
        const Watchdog::Waiting waiting(world.watchdog);  // NCCL's calls wait for others until all are connected
        side.follow();
        if (next == partition.buckets()) {  // the step's first
            read_clocks_of(step % 2);
            reductions[step % 2].begins(side.stream);
        }
        while (next > 0 && partition.begin(next - 1) >= offset) launch_bucket(--next);
    }
    void finish() override {
        const ProfileRange range("reduction");
        StreamClock& clock = reductions[step % 2];
        clock.waits(dev.stream);
        ready(0);
        clock.ends(side.stream);
        side.lead();
        step++;
        next = partition.buckets();
    }
    void read_clocks() override {
        for (const int64_t which : {0, 1}) read_clocks_of(which);
    }
    void complete(double* x, size_t count) override {
        const Watchdog::Waiting waiting(world.watchdog);
        side.follow();
        NCCL_CHECK(ncclAllReduce(x, x, count, ncclDouble, ncclSum, communicator, side.stream));
        side.lead();
    }
    void gather(Cuda::real* params) override {
        const ProfileRange range("gathering");
        const Watchdog::Waiting waiting(world.watchdog);
        StreamClock& clock = gathers[(step + 1) % 2];  // of the step that finish() closed last
        side.follow();
        clock.begins(side.stream);
        clock.waits(side.stream);
        if (partition.matrices.empty()) gather_parts(params);
        else gather_pieces(params);
        clock.ends(side.stream);
        side.lead();
    }
    void await_results(int64_t at_step) override {
        await_engine(at_step, [this] { return dev.has_results(); });
    }
    void await_upload(int64_t at_step) override {
        await_engine(at_step, [this] { return dev.has_uploaded(); });
    }
    void await_all(int64_t at_step) override {
        side.follow();
        await_engine(at_step, [this] { return side.has_followed(); });
    }
};
#endif

// nullptr for one rank alone.
template <class Dev>
std::unique_ptr<Reducer<Dev>> make_reducer([[maybe_unused]] Dev& dev, const World& world,
                                           [[maybe_unused]] const Partition& partition,
                                           [[maybe_unused]] typename Dev::Grad* grads,
                                           [[maybe_unused]] const ReduceOptions& options,
                                           [[maybe_unused]] bool by_nccl) {
    if (world.size == 1) return nullptr;
#ifdef USE_NCCL
    if constexpr (std::is_same<Dev, Cuda>::value)
        if (by_nccl) return std::make_unique<NcclReducer>(dev, world, partition, grads, options);
#endif
#ifdef USE_MPI
    if (world.has_mpi) return std::make_unique<HostReducer<Dev>>(dev, world, partition, grads, options);
#endif
    fail("%d ranks and nothing that sums their gradients: start them with mpirun", world.size);
}
