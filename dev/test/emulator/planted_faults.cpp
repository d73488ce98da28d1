// planted_faults.cpp: plants one fault after another in kernels and host code, each in a process of its own, and asks
// that the emulator's report names the kernel and the kind of fault. A faulty program that is let pass fails the test,
// and so does a right one that is accused. dev/dev.mk has its two builds.
// ./planted_faults [number of seeds, standard 4] [name of one fault: runs it with seed 0 in this process]
#include "emulator_kernels.cuh"

#include <algorithm>

#include <sys/wait.h>

// ---- kernels whose fault needs no template

__global__ void barrier_for_half(float* x) {
    if (threadIdx.x < 32) __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void two_barriers(float* x) {
    if (threadIdx.x < 32) {
        x[threadIdx.x] = 1;
        __syncthreads();
    } else {
        x[threadIdx.x] = 2;
        __syncthreads();
    }
}
__global__ void barrier_meets_shuffle(float* x) {
    float v = threadIdx.x;
    if (threadIdx.x % 2) __syncthreads();
    else v = __shfl_xor_sync(0xffffffffu, v, 1);
    x[threadIdx.x] = v;
}
__global__ void return_before_barrier(float* x, int n) {
    if (int(threadIdx.x) >= n) return;
    __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void return_before_shuffle(float* x) {
    if (threadIdx.x == 31) return;
    x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, float(threadIdx.x), 1);
}
__global__ void half_warp_shuffles(float* x) {
    float v = threadIdx.x;
    if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 8);
    x[threadIdx.x] = v;
}
__global__ void two_shuffles_meet(float* x) {
    float v = threadIdx.x;
    if (threadIdx.x % 2) v += __shfl_xor_sync(0xffffffffu, v, 1);
    else v -= __shfl_xor_sync(0xffffffffu, v, 1);
    x[threadIdx.x] = v;
}
__global__ void syncwarp_leaves_caller_out(float* x) {
    __syncwarp(0x7fffffffu);
    x[threadIdx.x] = 1;
}
__global__ void shuffle_from_outside_mask(float* x) {
    float v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_sync(0x0000ffffu, v, 20);
    x[threadIdx.x] = v;
}
__global__ void no_syncwarp(float* x) {
    SHARED(float, s, [32]);
    s[threadIdx.x] = 1;
    x[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void ldmatrix_without_sync(float* x) {
    SHARED(uint4, rows, [32]);
    rows[31 - threadIdx.x] = make_uint4(1, 0, 0, 0);
    unsigned r[4];
    ldmatrix_x4(r, &rows[threadIdx.x]);
    x[threadIdx.x] = float(r[0]);
}
__global__ void ldmatrix_of_device_memory(unsigned* out, const uint4* in) {
    unsigned r[4];
    ldmatrix_x4(r, in + threadIdx.x);
    out[threadIdx.x] = r[0];
}
__global__ void async_copy_of_odd_address(float* out, const float* in) {
    SHARED(float4, tile, [32]);
    cp_async_16(&tile[threadIdx.x], in + 1 + threadIdx.x * 4);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = tile[threadIdx.x].x;
}
__global__ void async_copy_never_waited_for(float* out, const float* in) {
    SHARED(float4, tile, [32]);
    cp_async_16(&tile[threadIdx.x], in + threadIdx.x * 4);
    cp_async_commit();
    out[threadIdx.x] = 1;
}
__global__ void shared_overrun_by_one(float* x) {
    SHARED(float, s, [64]);
    float* p = s;  // the compiler does not know the bounds behind a pointer
    p[threadIdx.x + 1] = 1;
    __syncthreads();
    x[threadIdx.x] = threadIdx.x ? p[threadIdx.x] : 1;
}
__global__ void shared_underrun(float* x, int before) {
    SHARED(float, s, [64]);
    float* p = s;
    p[int(threadIdx.x) - before] = 1;
    x[threadIdx.x] = 1;
}
__global__ void shared_overrun_into_next(float* x, int far) {
    SHARED(float, s, [64]);
    SHARED(float, next, [64]);
    float* p = s;
    next[threadIdx.x] = p[threadIdx.x] = 1;
    p[(threadIdx.x + 1) % 64 + far] = 2;
    __syncthreads();
    x[threadIdx.x] = next[threadIdx.x];
}
__global__ void device_overrun(float* x) { x[threadIdx.x + 1] = 1; }
__global__ void too_much_dynamic_shared(float* x) {
    DynamicShared shared;
    float *a = shared.take<float>(64), *b = shared.take<float>(64);
    a[threadIdx.x] = b[threadIdx.x] = 1;
    x[threadIdx.x] = a[threadIdx.x];
}
__global__ void misaligned_load(float4* out, const float* in) {
    out[threadIdx.x] = *reinterpret_cast<const float4*>(in + 1 + threadIdx.x * 4);
}
__global__ void int_overflow(float* x, int T) { x[0] = float(T * T); }
__global__ void stack_overrun(float* x) {
    volatile float large[100000];  // more than a fiber's stack
    for (int i = 0; i < 100000; i++) large[i] = float(i);
    x[threadIdx.x] = large[threadIdx.x];
}
__global__ void shared_of_last_block(float* x) {  // takes for granted what an earlier block left in shared memory
    SHARED(float, s, [32]);
    if (blockIdx.x == 0) s[threadIdx.x] = 1;
    x[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
}

// ---- what a fault's process does

// Ends the process with a report of its own when an output is unwritten or wrong: what a test of the kernel would say.
template <class T>
void expect(const char* kernel, DeviceArray<T>& found, const std::vector<double>& expected,
            const std::vector<double>& limit) {
    CUDA_CHECK(cudaDeviceSynchronize());
    if (const long n = emu::unwritten(found.device, found.host.size())) {
        std::printf("kernel %s, %ld outputs unwritten\n", kernel, n);
        std::exit(1);
    }
    found.download();
    for (size_t i = 0; i < expected.size(); i++)
        if (!(std::fabs(double(float(found.host[i])) - expected[i]) <= limit[i])) {
            std::printf("kernel %s, wrong result: element %zu is %g, expected %g\n", kernel, i,
                        double(float(found.host[i])), expected[i]);
            std::exit(1);
        }
}
// One block of n threads, each of which is to make a 1.
template <auto kernel, class... Args>
static void one_block(const char* name, size_t n, Args... args) {
    DeviceArray<float> x(n);
    launch<kernel>(1, unsigned(n), 0, nullptr, x.device, args...);
    expect(name, x, std::vector<double>(n, 1.0));
}

static void streams(bool with_events) {  // one stream makes the numbers, the other adds to them, then the first again
    emu::machine.run_late = true;
    DeviceArray<float> x(64);
    cudaStream_t first, second;
    cudaEvent_t made, added;
    cudaStreamCreate(&first), cudaStreamCreate(&second), cudaEventCreate(&made), cudaEventCreate(&added);
    launch<set_to>(1, 64, 0, first, x.device, 1.0f);
    cudaEventRecord(made, first);
    if (with_events) cudaStreamWaitEvent(second, made);
    launch<add_to>(1, 64, 0, second, x.device, 2.0f);
    cudaEventRecord(added, second);
    if (with_events) cudaStreamWaitEvent(first, added);
    launch<add_to>(1, 64, 0, first, x.device, 4.0f);
    expect("add_to", x, std::vector<double>(64, 7.0));
}
static void reduction(bool with_event) {  // a gradient is made on one stream and reduced on another
    emu::machine.run_late = true;
    ncclComm_t communicator = nullptr;
    ncclCommInitRank(&communicator, 1, ncclUniqueId(), 0);
    DeviceArray<float> gradient(std::vector<float>(64, 0.0f)), reduced(64);
    cudaStream_t compute, reduce;
    cudaEvent_t made;
    cudaStreamCreate(&compute), cudaStreamCreate(&reduce), cudaEventCreate(&made);
    launch<set_to>(1, 64, 0, compute, gradient.device, 5.0f);
    cudaEventRecord(made, compute);
    if (with_event) cudaStreamWaitEvent(reduce, made);
    ncclAllReduce(gradient.device, reduced.device, 64, ncclFloat, ncclSum, communicator, reduce);
    expect("set_to and ncclAllReduce", reduced, std::vector<double>(64, 5.0));
}
static void host_reads_early(bool wait) {
    emu::machine.run_late = true;
    DeviceArray<float> x(64);
    std::vector<float> host(64, 0.0f);
    launch<set_to>(1, 64, 0, nullptr, x.device, 1.0f);
    cudaMemcpyAsync(host.data(), x.device, 256, cudaMemcpyDeviceToHost, nullptr);
    if (wait) cudaStreamSynchronize(nullptr);
    if (host[5] != 1) {
        std::printf("kernel set_to, wrong result: the host reads %g before the copy\n", host[5]);
        std::exit(1);
    }
}
static void matmul_outside() {  // a matrix one column longer than its array
    DeviceArray<float> a(16 * 16), b(16 * 16), out(16 * 17);
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t la, lb, lc;
    cublasLtCreate(&handle), cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&la, CUDA_R_32F, 16, 16, 16), cublasLtMatrixLayoutCreate(&lb, CUDA_R_32F, 16, 17, 16),
        cublasLtMatrixLayoutCreate(&lc, CUDA_R_32F, 16, 17, 16);
    const float alpha = 1, beta = 0;
    cublasLtMatmul(handle, description, &alpha, a.device, la, b.device, lb, &beta, out.device, lc, out.device, lc,
                   nullptr, nullptr, 0, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
}

// ---- the table

struct Planted {
    const char* name;
    void (*run)();
    const char* kernel;  // that the report must name; "" for host code
    // Words that the report must hold, several kinds apart by |; nullptr: that build cannot see this fault; "": there
    // is none, and nothing may be reported. emulator_tests.h runs the kernels that are right.
    const char* plain;
    const char* check = plain;
};
static const char* const RACE = "race between threads";
static const char* const BLOCKS = "race between blocks";
static const char* const UNWRITTEN = "never written";
static const char* const RACE_OR_UNWRITTEN = "race between threads|never written";
static const char* const OUTSIDE_ARRAY = "outside of any array";
static const char* const WRONG = "wrong result";
static const char* const BARRIER = "not all threads of the block reach the same barrier";
static const char* const LEFT_OUT = "which leaves it out|which takes no part";
static const char* const ROWS = "normalize_rows";
static const char* const MATMUL = "matmul_tiles";
static const char* const ON_WARPGROUP = "attention_on_warpgroups";
static const char* const GONE = "a lane returns while others of its warp wait for it|names lanes that have returned";
#define ONE_BLOCK(kernel, ...) [] { one_block<kernel>(#kernel, __VA_ARGS__); }, #kernel

static const Planted faults[] = {
    {"no barrier between write and read", rows<NO_BARRIER_BEFORE_READ>, ROWS, WRONG, RACE_OR_UNWRITTEN},
    {"no barrier before the next write", rows<NO_BARRIER_BEFORE_REUSE>, ROWS, WRONG, RACE},
    {"a mask leaves a lane out", rows<MASK_LEAVES_LANE_OUT>, ROWS, LEFT_OUT},
    {"reads a shared element that nothing wrote", rows<READS_UNWRITTEN_SHARED>, ROWS, WRONG, UNWRITTEN},
    {"reads past the end of an array", rows<READS_PAST_END>, ROWS, WRONG, OUTSIDE_ARRAY},
    {"leaves outputs unwritten", rows<LEAVES_OUTPUT_UNWRITTEN>, ROWS, "outputs unwritten"},
    {"blocks add to one element",
     [] {
         DeviceArray<float> x(std::vector<float>(64, 0.0f));
         launch<add_to>(3, 64, 0, nullptr, x.device, 1.0f);
     },
     "add_to", nullptr, BLOCKS},
    {"no cp.async wait", matmul<NO_ASYNC_WAIT>, MATMUL, WRONG, UNWRITTEN},
    {"cp.async waits for too few groups", matmul<WAITS_FOR_TOO_FEW>, MATMUL, WRONG, UNWRITTEN},
    {"a cp.async group is not committed", matmul<NO_COMMIT>, MATMUL, WRONG, UNWRITTEN},
    {"no barrier after the cp.async wait", matmul<NO_BARRIER_AFTER_WAIT>, MATMUL, WRONG, RACE_OR_UNWRITTEN},
    {"no barrier before a buffer is filled again", matmul<NO_BARRIER_BEFORE_REFILL>, MATMUL, WRONG, RACE_OR_UNWRITTEN},
    {"a transposed fragment", matmul<TRANSPOSED_FRAGMENT>, MATMUL, WRONG},
    {"no zeros past the end", matmul<NO_ZERO_FILL>, MATMUL, WRONG, UNWRITTEN},
    {"no wgmma_fence", warpgroup<NO_WGMMA_FENCE>, ON_WARPGROUP, "without a wgmma_fence"},
    {"a wgmma_fence before A is written", warpgroup<FENCE_BEFORE_A>, ON_WARPGROUP, "A registers were written after"},
    {"no wgmma_wait", warpgroup<NO_WGMMA_WAIT>, ON_WARPGROUP, WRONG},
    {"no wgmma_commit", warpgroup<NO_WGMMA_COMMIT>, ON_WARPGROUP, WRONG},
    {"wgmma_wait for too few groups", warpgroup<WGMMA_WAITS_FOR_TOO_FEW>, ON_WARPGROUP, WRONG},
    {"no async_fence after cp.async", warpgroup<NO_ASYNC_FENCE>, ON_WARPGROUP, "without an async_fence"},
    {"an async_fence before the cp.async wait", warpgroup<ASYNC_FENCE_BEFORE_WAIT>, ON_WARPGROUP,
     "without an async_fence"},
    {"no barrier behind async_fence", warpgroup<NO_BARRIER_AFTER_ASYNC_FENCE>, ON_WARPGROUP,
     "without an async_fence|without a barrier"},
    {"no async_fence after stores", warpgroup<NO_ASYNC_FENCE_AFTER_STORE>, ON_WARPGROUP, nullptr,
     "without an async_fence"},
    {"a tile at 512 modulo 1024", warpgroup<TILE_AT_512>, ON_WARPGROUP, "is at 512 modulo 1024"},
    {"an operand that begins inside of a row", warpgroup<BEGINS_INSIDE_A_ROW>, ON_WARPGROUP, "begins at byte 112"},
    {"no leading bytes", warpgroup<NO_LEADING_BYTES>, ON_WARPGROUP, WRONG},
    {"accumulators read before the wait", warpgroup<ACCUMULATORS_READ_EARLY>, ON_WARPGROUP, WRONG},
    {"accumulators written before the wait", warpgroup<ACCUMULATORS_WRITTEN>, ON_WARPGROUP, "accumulators of a wgmma"},
    {"A registers written before the wait", warpgroup<A_OVERWRITTEN>, ON_WARPGROUP, "A registers of a wgmma"},
    {"a tile filled again before the wait", warpgroup<REFILL_UNDER_WAY>, ON_WARPGROUP, "a wgmma under way reads",
     "a wgmma under way reads|race between threads"},
    {"a tile stored to before the wait", warpgroup<STORE_UNDER_WAY>, ON_WARPGROUP, "was written before the wgmma_wait",
     "a wgmma under way reads"},
    {"a warp takes another tile", warpgroup<A_WARP_TAKES_ANOTHER_TILE>, ON_WARPGROUP, "issue another one, at"},
    {"a warp stays out", warpgroup<A_WARP_STAYS_OUT>, ON_WARPGROUP, "other warps of its warpgroup|has returned"},
    {"return with a wgmma uncommitted", warpgroup<RETURNS_UNCOMMITTED>, ON_WARPGROUP, "has not committed"},
    {"return with a wgmma under way", warpgroup<RETURNS_UNDER_WAY>, ON_WARPGROUP, "has not waited for"},
    {"three warps are no warpgroup", warpgroup<NO_SUCH_WARPGROUP>, ON_WARPGROUP, "four whole warps"},
    {"wgmma on a GPU without it", [] { emu::machine.capability = 80, warpgroup<NO_SUCH_GPU>(); }, ON_WARPGROUP,
     "this GPU has no wgmma"},
    {"a barrier that half the threads reach", ONE_BLOCK(barrier_for_half, 64), BARRIER},
    {"two different barriers", ONE_BLOCK(two_barriers, 64), BARRIER},
    {"a barrier meets a shuffle", ONE_BLOCK(barrier_meets_shuffle, 64), "deadlock"},
    {"return before a barrier", ONE_BLOCK(return_before_barrier, 64, 50), BARRIER},
    {"return before a shuffle", ONE_BLOCK(return_before_shuffle, 32), GONE},
    {"half a warp shuffles with a full mask", ONE_BLOCK(half_warp_shuffles, 32), GONE},
    {"two shuffles meet", ONE_BLOCK(two_shuffles_meet, 32), "different warp functions"},
    {"__syncwarp by a lane outside its mask", ONE_BLOCK(syncwarp_leaves_caller_out, 32),
     "lane 31 calls __syncwarp with the mask 7fffffff, which leaves it out"},
    {"shuffle from a lane outside the mask", ONE_BLOCK(shuffle_from_outside_mask, 32), "takes no part"},
    {"no __syncwarp", ONE_BLOCK(no_syncwarp, 32), WRONG, RACE_OR_UNWRITTEN},
    {"no __syncwarp before ldmatrix", ONE_BLOCK(ldmatrix_without_sync, 32), WRONG, RACE_OR_UNWRITTEN},
    {"ldmatrix of device memory",
     [] {
         DeviceArray<uint4> in(std::vector<uint4>(32, make_uint4(1, 1, 1, 1)));
         DeviceArray<unsigned> out(32);
         launch<ldmatrix_of_device_memory>(1, 32, 0, nullptr, out.device, in.device);
     },
     "ldmatrix_of_device_memory", "not in shared memory"},
    {"cp.async from an odd address",
     [] {
         DeviceArray<float> in(noises<float>(132));
         one_block<async_copy_of_odd_address>("", 32, in.device);
     },
     "async_copy_of_odd_address", "not a multiple of 16"},
    {"cp.async that nothing waits for",
     [] {
         DeviceArray<float> in(noises<float>(128));
         one_block<async_copy_never_waited_for>("", 32, in.device);
     },
     "async_copy_never_waited_for", "has not waited for"},
    {"shared array overrun by one", ONE_BLOCK(shared_overrun_by_one, 64), "past the end of the shared array s",
     OUTSIDE_ARRAY},
    {"shared array written before its start", ONE_BLOCK(shared_underrun, 64, 2),
     "before the start of the shared array s", OUTSIDE_ARRAY},
    {"shared array overrun into the next", ONE_BLOCK(shared_overrun_into_next, 64, 128), WRONG, RACE},
    {"device array overrun by one", ONE_BLOCK(device_overrun, 64), "a write past the end of the 256 bytes",
     OUTSIDE_ARRAY},
    {"a stack overrun", ONE_BLOCK(stack_overrun, 32), "the stack is full"},
    {"too little dynamic shared memory",
     [] {
         DeviceArray<float> x(64);
         launch<too_much_dynamic_shared>(1, 64, 256, nullptr, x.device);
     },
     "too_much_dynamic_shared", "DynamicShared hands out 512 bytes"},
    {"shared memory taken over from an earlier block",
     [] {
         DeviceArray<float> x(64);
         launch<shared_of_last_block>(2, 32, 0, nullptr, x.device);
         expect("shared_of_last_block", x, std::vector<double>(64, 1.0));
     },
     "shared_of_last_block", WRONG, UNWRITTEN},
    {"misaligned 128-bit load",
     [] {
         DeviceArray<float> in(noises<float>(132));
         DeviceArray<float4> out(32);
         launch<misaligned_load>(1, 32, 0, nullptr, out.device, in.device);
     },
     "misaligned_load", nullptr, "misaligned"},
    {"int overflow", ONE_BLOCK(int_overflow, 1, 65536), nullptr, "runtime error: signed integer overflow"},
    {"a host pointer for a kernel",
     [] {
         float host[64];
         launch<set_to>(1, 64, 0, nullptr, host, 1.0f);
     },
     "set_to", "argument 0 is a pointer, but not to device memory"},
    {"a freed pointer for a kernel",
     [] {
         float* x;
         cudaMalloc(&x, 256), cudaFree(x);
         launch<set_to>(1, 64, 0, nullptr, x, 1.0f);
     },
     "set_to", "not to device memory"},
    {"a grid of 70000 in y",
     [] {
         DeviceArray<float> x(64);
         launch<set_to>(dim3(1, 70000), 64, 0, nullptr, x.device, 1.0f);
     },
     "set_to", "a grid of (1,70000,1)"},
    {"a block of 2048 threads", ONE_BLOCK(set_to, 2048, 1.0f), "a block of (2048,1,1)"},
    {"host code reads device memory",
     [] {
         DeviceArray<float> x(std::vector<float>(64, 1.0f));
         if (x.device[3] == 2) std::printf("cannot be\n");
     },
     "", "host code touches device memory"},
    {"cudaMemcpy in the wrong direction",
     [] {
         DeviceArray<float> x(64);
         cudaMemcpy(x.device, x.host.data(), 256, cudaMemcpyDeviceToHost);
     },
     "", "do not match the direction"},
    {"cudaMemcpy of more than there is",
     [] {
         DeviceArray<float> x(64);
         std::vector<float> host(65);
         cudaMemcpy(host.data(), x.device, 260, cudaMemcpyDeviceToHost);
     },
     "", "not inside one device array"},
    {"two streams without events", [] { streams(false); }, "add_to", WRONG, "wrong result|never written"},
    {"a gradient reduced without an event", [] { reduction(false); }, "set_to and ncclAllReduce", WRONG},
    {"the host reads before the copy is done", [] { host_reads_early(false); }, "set_to", WRONG},
    {"cublasLtMatmul outside of an array", matmul_outside, "", "cublasLtMatmul, matrix b"},
    {"(no fault) two streams with events", [] { streams(true); }, "", ""},
    {"(no fault) a gradient reduced after an event", [] { reduction(true); }, "", ""},
    {"(no fault) the host waits for the copy", [] { host_reads_early(true); }, "", ""},
};

// Whether the text holds one of the alternatives, which are set apart by |.
static bool holds_one_of(const std::string& text, const std::string& alternatives) {
    for (size_t at = 0, end; at <= alternatives.size(); at = end + 1) {
        end = std::min(alternatives.find('|', at), alternatives.size());
        if (text.find(alternatives.substr(at, end - at)) != std::string::npos) return true;
    }
    return false;
}

struct Outcome {
    bool ended_well;
    std::string text;
};
static Outcome run_in_child(const Planted& p, int seed) {
    int ends[2];
    if (pipe(ends)) fail("cannot make a pipe: %s", std::strerror(errno));
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1), dup2(ends[1], 2), close(ends[0]), close(ends[1]);
        emu::seed(uint64_t(seed));
        p.run();
        std::fflush(stdout);
        _exit(0);
    }
    close(ends[1]);
    Outcome o;
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) o.text.append(buffer, size_t(n));
    close(ends[0]);
    int status;
    waitpid(child, &status, 0);
    o.ended_well = status == 0;
    return o;
}

int main(int argc, char** argv) {
    const int seeds = argc > 1 ? std::atoi(argv[1]) : 4;
    if (argc > 2) {
        for (const Planted& p : faults)
            if (!std::strcmp(p.name, argv[2])) p.run();
        return 0;
    }
    int passed = 0, failed = 0, invisible = 0;
    for (const Planted& p : faults) {
        const char* words = emu::CHECK_BUILD ? p.check : p.plain;
        if (!words) {
            invisible++;
            continue;
        }
        // A judged access must be reported whatever the schedule, and come with its source line.
        const bool judged = words == RACE || words == BLOCKS || words == OUTSIDE_ARRAY || words == UNWRITTEN ||
                            words == RACE_OR_UNWRITTEN;
        const int needed = !*words || (emu::CHECK_BUILD && judged) ? seeds : 1;
        int found = 0;
        std::string report = "nothing was reported";
        for (int seed = 0; seed < seeds; seed++) {
            const Outcome o = run_in_child(p, seed);
            const bool named = o.text.find(*p.kernel ? "kernel " + std::string(p.kernel) : "") != std::string::npos &&
                               holds_one_of(o.text, words);
            const bool placed = !judged || o.text.find("emulator_kernels.cuh:") != std::string::npos ||
                                o.text.find("planted_faults.cpp:") != std::string::npos;
            found += *words ? !o.ended_well && named && placed : o.ended_well && o.text.empty();
            if (found <= 1 && !o.text.empty()) report = found ? o.text.substr(0, o.text.find('\n')) : o.text;
        }
        (found >= needed ? passed : failed)++;
        std::printf("%s %-48s %s with %d of %d seeds: %s\n", found >= needed ? "ok  " : "FAIL", p.name,
                    *words ? "found" : "let pass", found, seeds, report.c_str());
    }
    if (invisible) std::printf("%d faults that only the CHECK build can see were not planted\n", invisible);
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
