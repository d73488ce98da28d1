// nccl.h: stands in for the part of NCCL that the trainer uses. Ranks are processes of one machine, however they were
// started; like NCCL's, they find each other by the unique id, which here names a piece of shared memory. Sums are
// made in fp32, in the order of ranks, and rounded once, where NCCL rounds bf16 at every hop. Like kernels, collectives
// run when their stream does, so that with machine.run_late a reduction that was not ordered after the gradients
// reduces what was there before.
#pragma once
#include "cuda_on_cpu.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

enum ncclResult_t {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclInProgress = 7
};
enum ncclDataType_t { ncclUint8 = 1, ncclFloat = 7, ncclDouble = 8, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum = 0 };
struct ncclUniqueId {
    char internal[128];
};
namespace emu {
// Other ranks without other processes, for tests of the order of streams: a test sets what they give to each
// collective, which it has computed beforehand. A collective takes it when it runs: late, when something waits
// for it (machine.run_late), or eagerly, when it is queued, as soon as what it waits for itself has run.
struct Peers {
    int ranks = 2, rank = 0;
    bool eager = false;
    // adds their elements to the sums, of which in holds this rank's as they travel
    std::function<void(const void* in, float* sums, size_t total)> add;
    std::function<void(double* sums, size_t total)> add_doubles;
    std::function<void(char* out, size_t bytes)> gather;  // fills their blocks of an all-gather, `bytes` each
};
inline Peers* peers = nullptr;

// What the processes of a communicator share: a page for their meetings, then a slot for each rank. A collective goes
// through the slots a piece at a time: every rank fills its own, all meet, everybody reads, all meet again.
struct SharedMemory {
    static constexpr size_t PAGE = 4096, SLOT = size_t(1) << 18;  // bytes
    struct Meeting {
        int arrived, number;
        int devices[512];  // of every rank
    };
    int ranks = 1;
    char* memory = nullptr;  // nullptr: one process alone

    size_t bytes() const { return PAGE + SLOT * size_t(ranks); }
    char* slot(int rank) const { return memory + PAGE + SLOT * size_t(rank); }

    // Returns when all ranks have called it.
    EMU_ENGINE void meet() const {
        if (!memory) return;
        Meeting* m = reinterpret_cast<Meeting*>(memory);
        const int number = __atomic_load_n(&m->number, __ATOMIC_SEQ_CST);
        if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_SEQ_CST) == ranks) {
            __atomic_store_n(&m->arrived, 0, __ATOMIC_SEQ_CST);
            __atomic_add_fetch(&m->number, 1, __ATOMIC_SEQ_CST);
            return;
        }
        for (int wait = 0; __atomic_load_n(&m->number, __ATOMIC_SEQ_CST) == number; wait++)
            if (wait < 1000) sched_yield();
            else usleep(50);
    }
    // The memory is a file until all ranks have mapped it; then the name goes.
    bool join(const char* path, int size, int rank) {
        ranks = size;
        if (size == 1) return unlink(path), true;
        const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, off_t(bytes())) != 0) return close(fd), false;
        void* mapped = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (mapped == MAP_FAILED) return false;
        memory = static_cast<char*>(mapped);
        reinterpret_cast<Meeting*>(memory)->devices[rank] = machine.device;
        meet();
        if (rank == 0) unlink(path);
        return true;
    }
    // NCCL refuses two ranks on one GPU.
    bool shares_a_device() const {
        const Meeting* m = reinterpret_cast<const Meeting*>(memory);
        for (int r = 0; m && r < ranks; r++)
            for (int other = 0; other < r; other++)
                if (m->devices[r] == m->devices[other]) return true;
        return false;
    }
    void leave() {
        if (memory) munmap(memory, bytes());
        memory = nullptr;
    }
};

struct Communicator {
    int ranks, rank;
    SharedMemory shared;
};
}  // namespace emu
using ncclComm_t = emu::Communicator*;

inline const char* ncclGetErrorString(ncclResult_t r) {
    return r == ncclInvalidArgument ? "invalid argument" : "an error of nccl_on_cpu";
}
inline const char* ncclGetLastError(ncclComm_t) { return "nccl_on_cpu"; }
inline ncclResult_t ncclGetVersion(int* version) { return *version = 22809, ncclSuccess; }
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    *id = {};
    snprintf(id->internal, sizeof id->internal, "/dev/shm/nccl_on_cpu_XXXXXX");
    const int fd = mkstemp(id->internal);
    if (fd < 0) return ncclSystemError;
    return close(fd), ncclSuccess;
}
inline ncclResult_t ncclCommInitRank(ncclComm_t* c, int ranks, ncclUniqueId id, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    emu::SharedMemory shared;
    if (emu::peers) {
        if (ranks != emu::peers->ranks || rank != emu::peers->rank) return ncclInvalidArgument;
    } else if (!shared.join(id.internal, ranks, rank)) {
        return ncclSystemError;
    }
    if (shared.shares_a_device()) return ncclInvalidUsage;
    return *c = new emu::Communicator{ranks, rank, shared}, ncclSuccess;
}
// Collective, as NCCL's is within a machine: it waits for all ranks.
inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    c->shared.meet();
    c->shared.leave();
    return delete c, ncclSuccess;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t ncclGroupEnd() { return ncclSuccess; }

namespace emu {
constexpr size_t nccl_bytes(ncclDataType_t type) {
    return type == ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : type == ncclDouble ? 8 : 4;
}

// values [n]: the sum of every rank's values, everywhere. Sums of bf16 are rounded at every hop, as NCCL's.
template <class Element, class T>
EMU_ENGINE inline void combine(T* values, size_t n, const Communicator& c) {
    const size_t most = SharedMemory::SLOT / sizeof(T);
    for (size_t at = 0; c.shared.memory && at < n; at += most) {
        const size_t count = n - at < most ? n - at : most;
        memcpy(c.shared.slot(c.rank), values + at, count * sizeof(T));
        c.shared.meet();
        for (int r = 0; r < c.ranks; r++) {
            const T* theirs = reinterpret_cast<const T*>(c.shared.slot(r));
            for (size_t i = 0; i < count; i++) {
                T& x = values[at + i];
                x = T(Element(r == 0 ? theirs[i] : x + theirs[i]));
            }
        }
        c.shared.meet();
    }
}

// out[i] = in[first + i] summed over the ranks, for i < n, of `total` elements; every rank may keep another part.
template <class T>
EMU_ENGINE inline void sum_over_ranks(const T* in, T* out, size_t total, size_t first, size_t n,
                                      const Communicator& c) {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    std::vector<Wide> sums(total);
    for (size_t i = 0; i < total; i++) sums[i] = Wide(in[i]);
    combine<T>(sums.data(), total, c);
    if constexpr (std::is_same_v<Wide, float>) {
        if (peers) peers->add(in, sums.data(), total);
    } else {
        if (peers) peers->add_doubles(sums.data(), total);
    }
    for (size_t i = 0; i < n; i++) out[i] = T(sums[first + i]);
}

EMU_ENGINE inline void sum_now(const void* in, void* out, size_t total, size_t first, size_t n, ncclDataType_t type,
                               const Communicator& c) {
    const OpenRange open;
    EMU_ACCESS(in, total * nccl_bytes(type), READ);
    EMU_ACCESS(out, n * nccl_bytes(type), WRITE);
    if (type == ncclFloat) sum_over_ranks((const float*)in, (float*)out, total, first, n, c);
    else if (type == ncclDouble) sum_over_ranks((const double*)in, (double*)out, total, first, n, c);
    else sum_over_ranks((const __nv_bfloat16*)in, (__nv_bfloat16*)out, total, first, n, c);
}
// What rank `root` has at p, everywhere at p.
EMU_ENGINE inline void spread(char* p, size_t bytes, int root, const Communicator& c) {
    for (size_t at = 0; c.shared.memory && at < bytes; at += SharedMemory::SLOT) {
        const size_t count = bytes - at < SharedMemory::SLOT ? bytes - at : SharedMemory::SLOT;
        if (c.rank == root) memcpy(c.shared.slot(root), p + at, count);
        c.shared.meet();
        if (c.rank != root) memcpy(p + at, c.shared.slot(root), count);
        c.shared.meet();
    }
}
EMU_ENGINE inline void gather_now(const void* in, void* out, size_t bytes, const Communicator& c) {
    const OpenRange open;
    EMU_ACCESS(in, bytes, READ);
    EMU_ACCESS(out, bytes * size_t(c.ranks), WRITE);
    memmove((char*)out + size_t(c.rank) * bytes, in, bytes);
    for (int r = 0; r < c.ranks; r++) spread((char*)out + size_t(r) * bytes, bytes, r, c);
    if (peers) peers->gather((char*)out, bytes);
}
EMU_ENGINE inline void broadcast_now(const void* in, void* out, size_t bytes, int root, const Communicator& c) {
    const OpenRange open;
    if (c.rank == root) {
        EMU_ACCESS(in, bytes, READ);
        memmove(out, in, bytes);
    }
    EMU_ACCESS(out, bytes, WRITE);
    spread((char*)out, bytes, root, c);
}

// Every collective goes onto its stream this way.
inline void enqueue_collective(cudaStream_t stream, std::function<void()> work) {
    enqueue(stream, std::move(work));
    if (peers && peers->eager) run_until(stream_or_default(stream), stream_or_default(stream)->sent);
}

// Both buffers must be in device memory. They may overlap in place only: where same_in is same_out.
inline void check_buffers(const char* what, const void* in, size_t in_bytes, const void* out, size_t out_bytes,
                          const void* same_in, const void* same_out) {
    check_device_array(what, in, in_bytes);
    check_device_array(what, out, out_bytes);
    const bool overlap = (char*)in < (char*)out + out_bytes && (char*)out < (char*)in + in_bytes;
    if (overlap && same_in != same_out) stop("%s: the buffers overlap, but not in place", what);
}
}  // namespace emu

inline ncclResult_t ncclAllReduce(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t c,
                                  cudaStream_t stream) {
    if (!c || type == ncclUint8) return ncclInvalidArgument;
    emu::check_buffers("ncclAllReduce", in, n * emu::nccl_bytes(type), out, n * emu::nccl_bytes(type), in, out);
    emu::enqueue_collective(stream, [=] { emu::sum_now(in, out, n, 0, n, type, *c); });
    return ncclSuccess;
}
// Rank r receives elements [r n, (r + 1) n) of the sum.
inline ncclResult_t ncclReduceScatter(const void* in, void* out, size_t n, ncclDataType_t type, ncclRedOp_t,
                                      ncclComm_t c, cudaStream_t stream) {
    if (!c || type == ncclUint8) return ncclInvalidArgument;
    const size_t bytes = n * emu::nccl_bytes(type), ranks = size_t(c->ranks), rank = size_t(c->rank);
    emu::check_buffers("ncclReduceScatter", in, bytes * ranks, out, bytes, (const char*)in + rank * bytes, out);
    emu::enqueue_collective(stream, [=] { emu::sum_now(in, out, n * ranks, rank * n, n, type, *c); });
    return ncclSuccess;
}
// Rank r's n elements become elements [r n, (r + 1) n) everywhere.
inline ncclResult_t ncclAllGather(const void* in, void* out, size_t n, ncclDataType_t type, ncclComm_t c,
                                  cudaStream_t stream) {
    if (!c) return ncclInvalidArgument;
    const size_t bytes = n * emu::nccl_bytes(type);
    emu::check_buffers("ncclAllGather", in, bytes, out, bytes * size_t(c->ranks), in,
                       (const char*)out + size_t(c->rank) * bytes);
    emu::enqueue_collective(stream, [=] { emu::gather_now(in, out, bytes, *c); });
    return ncclSuccess;
}
inline ncclResult_t ncclBroadcast(const void* in, void* out, size_t n, ncclDataType_t type, int root, ncclComm_t c,
                                  cudaStream_t stream) {
    if (!c || root < 0 || root >= c->ranks) return ncclInvalidArgument;
    const size_t bytes = n * emu::nccl_bytes(type);
    if (c->rank == root) emu::check_buffers("ncclBroadcast", in, bytes, out, bytes, in, out);
    else emu::check_device_array("ncclBroadcast", out, bytes);
    emu::enqueue_collective(stream, [=] { emu::broadcast_now(in, out, bytes, root, *c); });
    return ncclSuccess;
}
