// runtime.cuh: struct CudaRuntime, what struct Cuda (nsa_kernels.cuh) needs of a GPU before the first kernel of
// the model: device, memory, copies, pinned buffers, and matrix products by cuBLASLt, or by the plain kernel of
// lib/cuda/gemm.cuh in a build with -DNO_CUBLAS. It knows nothing of the model.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/system.h"
#include "common.cuh"
#include "gemm.cuh"

// Does this binary hold code for this GPU? And is it for this architecture alone, such as sm_90a?
__global__ void probe_kernel(int* specific) {
    wait_for_earlier_kernels();
#if defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *specific = 1;
#else
    *specific = 0;
#endif
}

// Of the current device.
inline const cudaDeviceProp& properties_of_device() {
    static const cudaDeviceProp properties = [] {
        int device;
        cudaDeviceProp found;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaGetDeviceProperties(&found, device));
        return found;
    }();
    return properties;
}
// Bytes of shared memory that a block can have on this GPU: 227 KB on sm_90, 163 on sm_80, 99 on most others.
inline size_t max_shared_of_device() { return properties_of_device().sharedMemPerBlockOptin; }
// Bytes that DynamicShared hands out for these pieces.
inline size_t shared_bytes(std::initializer_list<size_t> pieces) {
    size_t sum = 0;
    for (const size_t bytes : pieces) sum += (bytes + 127) / 128 * 128;
    return sum;
}
// Blocks of per_block threads or elements, for `count` of them.
inline unsigned blocks_for(size_t count, size_t per_block) { return unsigned((count + per_block - 1) / per_block); }
// The grid for a loop over `count` elements with blocks of 256 threads, each of which goes on by the grid.
inline unsigned grid_of(size_t count) { return std::min(1024u, blocks_for(count, 256)); }

// Has the GPU come as far as this event? Does not wait.
inline bool has_passed(cudaEvent_t event) {
    const cudaError_t state = cudaEventQuery(event);
    if (state != cudaErrorNotReady) CUDA_CHECK(state);
    else cudaGetLastError();  // so that the next launch does not find it
    return state == cudaSuccess;
}

// A pinned host buffer for copies to or from the GPU; `passed` is reached when the copy is done.
struct PinnedBuffer {
    void* data = nullptr;
    size_t bytes = 0, count = 0;
    cudaEvent_t passed = nullptr;

    void* prepare(size_t needed) {  // waits until the buffer's last copy is done
        if (passed) CUDA_CHECK(cudaEventSynchronize(passed));
        else CUDA_CHECK(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming));
        if (needed > bytes) {
            if (data) CUDA_CHECK(cudaFreeHost(data));
            CUDA_CHECK(cudaMallocHost(&data, needed));
            bytes = needed;
        }
        return data;
    }
    void destroy() {
        if (passed) cudaEventDestroy(passed);
        if (data) cudaFreeHost(data);
    }
};

// How long something was under way on a stream, and how much of that another stream waited for it.
class StreamClock {
    cudaEvent_t begin, alone, end;
    bool used = false;

  public:
    StreamClock() {
        for (cudaEvent_t* e : {&begin, &alone, &end}) CUDA_CHECK(cudaEventCreate(e));
    }
    ~StreamClock() {  // an error here would help nobody
        for (cudaEvent_t e : {begin, alone, end}) cudaEventDestroy(e);
    }
    StreamClock(const StreamClock&) = delete;
    StreamClock& operator=(const StreamClock&) = delete;

    void begins(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(begin, stream)); }
    void waits(cudaStream_t waiting) { CUDA_CHECK(cudaEventRecord(alone, waiting)); }
    void ends(cudaStream_t stream) {
        CUDA_CHECK(cudaEventRecord(end, stream));
        used = true;
    }
    // Seconds, once. False where it has not ended, or was not used.
    bool read(double& under_way, double& exposed) {
        float all = 0, rest = 0;  // milliseconds
        const bool was_used = used;
        used = false;
        if (!was_used) return false;
        if (cudaEventQuery(end) != cudaSuccess || cudaEventElapsedTime(&all, begin, end) != cudaSuccess ||
            cudaEventElapsedTime(&rest, alone, end) != cudaSuccess) {
            cudaGetLastError();
            return false;
        }
        under_way = all * 1e-3;
        exposed = std::max(0.0f, rest) * 1e-3;
        return true;
    }
};

struct CudaRuntime {
    static constexpr size_t WORKSPACE = size_t(32) << 20;  // what NVIDIA recommends for cuBLASLt on sm_90

    int device;
    cudaDeviceProp properties;
    cudaStream_t stream = nullptr;
    std::string code;     // the architecture whose machine code this GPU runs, such as sm_90 or sm_90a
    bool exact = false;   // whether that code was compiled for this GPU alone
    bool poison = false;  // tests: fresh memory holds NaN, so that a read before the first write shows
#ifdef NO_CUBLAS
    static constexpr bool plain_matmul = true;
#else
    bool plain_matmul = false;  // tests: by the plain kernel
#endif
    // GPU memory that is allocated here, now and at most; what the driver and cuBLASLt allocate is not counted
    size_t live_bytes = 0, peak_bytes = 0;

    // bf16: whether the caller's kernels need bf16 arithmetic
    CudaRuntime(int device_index, size_t workspace, bool bf16) : device(device_index), workspace_bytes(workspace) {
        open_device(bf16);
#ifndef NO_CUBLAS
        CUBLAS_CHECK(cublasLtCreate(&cublas));
        set_matmul_preferences();
        cublas_workspace = allocate<char>(workspace_bytes);
#endif
    }
    CudaRuntime(const CudaRuntime&) = delete;
    CudaRuntime& operator=(const CudaRuntime&) = delete;
    ~CudaRuntime() {  // nobody can use an error here
        cudaStreamSynchronize(stream);
        for (Scratch& s : scratches) release(s.data);
        for (const auto& [bytes, list] : lists) release(list);
        for (PinnedBuffer& buffer : uploads) buffer.destroy();
        for (PinnedBuffer& buffer : downloads) buffer.destroy();
#ifndef NO_CUBLAS
        for (auto& [shape, matmul] : matmuls) matmul.destroy();
        release(cublas_workspace);
        cublasLtMatmulPreferenceDestroy(preference);
        cublasLtDestroy(cublas);
#endif
        cudaStreamDestroy(stream);
    }

    // ----- memory. `count` elements, aligned to 256 bytes (cudaMalloc guarantees it); throws when there is none left.
    template <class T>
    T* allocate(size_t count) {
        const size_t bytes = std::max<size_t>(count, 1) * sizeof(T);
        T* p = nullptr;
        const cudaError_t error = cudaMalloc(&p, bytes);
        if (error == cudaErrorMemoryAllocation) fail_out_of_memory(bytes);
        CUDA_CHECK(error);
        allocated[p] = bytes;
        live_bytes += bytes;
        peak_bytes = std::max(peak_bytes, live_bytes);
        if (poison) CUDA_CHECK(cudaMemsetAsync(p, 0xFF, bytes, stream));
        return p;
    }
    template <class T>
    void release(T* p) {
        const auto found = allocated.find(p);
        if (found != allocated.end()) {
            live_bytes -= found->second;
            allocated.erase(found);
        }
        if (cudaFree(p) != cudaSuccess) cudaGetLastError();  // cleared, else the next launch would report it
    }
    // What this process may still allocate. sharers: processes that compute on this GPU, which have called
    // divide_memory() together.
    double available_bytes(int sharers = 1) const {
        return sharers == 1 ? free_bytes() : std::min(free_bytes(), share_of_memory - double(live_bytes));
    }
    // When every process has its context and none has allocated anything for the model.
    void divide_memory(int sharers) { share_of_memory = free_bytes() / sharers + double(live_bytes); }
    template <class T>
    void zero(T* p, size_t count) {
        if (count) CUDA_CHECK(cudaMemsetAsync(p, 0, count * sizeof(T), stream));
    }

    // ----- copies.
    // Copies raw elements between host and device in any direction and waits, since the host may read or reuse its
    // side.
    template <class T>
    void copy(T* out, const T* in, size_t count) {
        if (count) CUDA_CHECK(cudaMemcpyAsync(out, in, count * sizeof(T), cudaMemcpyDefault, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
    // Copies to fp32 on the host, and from it, converting where the device's elements are narrower.
    template <class T>
    void to_host(float* out, const T* in, size_t count) {
        if constexpr (std::is_same_v<T, float>) return copy(out, in, count);
        std::vector<T> values(count);
        copy(values.data(), in, count);
        for (size_t i = 0; i < count; i++) out[i] = float(values[i]);
    }
    template <class T>
    void from_host(T* out, const float* in, size_t count) {
        if constexpr (std::is_same_v<T, float>) return copy(out, in, count);
        std::vector<T> values(count);
        for (size_t i = 0; i < count; i++) values[i] = T(in[i]);
        copy(out, values.data(), count);
    }
    // The GPU's copy of a list, which the first call makes and later calls with an equal list find. T has no padding.
    template <class T>
    const T* on_device(const std::vector<T>& list) {
        const std::string bytes(reinterpret_cast<const char*>(list.data()), list.size() * sizeof(T));
        const auto [entry, is_new] = lists.try_emplace(bytes, nullptr);
        if (is_new) {
            entry->second = allocate<char>(bytes.size());
            copy(entry->second, bytes.data(), bytes.size());
        }
        return reinterpret_cast<const T*>(entry->second);
    }
    // Sends token ids to the GPU without waiting for it; the caller may reuse its memory at once. With four buffers,
    // the tokens and targets of two micro-steps, the host can be at most two micro-steps ahead.
    void upload(int32_t* out, const int32_t* in, size_t count) {
        const size_t bytes = count * sizeof(int32_t);
        PinnedBuffer& buffer = uploads[uploaded++ % 4];
        std::memcpy(buffer.prepare(bytes), in, bytes);
        CUDA_CHECK(cudaMemcpyAsync(out, buffer.data, bytes, cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaEventRecord(buffer.passed, stream));
    }
    // Sends numbers to the host, which receives them later and in the same order; two results may be on their way.
    void send(const double* numbers, size_t count) {
        if (sent - received == 2) fail("Cuda::send: two results are waiting to be received already");
        PinnedBuffer& buffer = downloads[sent++ % 2];
        buffer.prepare(count * sizeof(double));
        buffer.count = count;
        CUDA_CHECK(cudaMemcpyAsync(buffer.data, numbers, count * sizeof(double), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaEventRecord(buffer.passed, stream));
    }
    bool has_results() const { return has_passed(downloads[received % 2].passed); }
    // The buffers for the tokens and targets of the next micro-step are free.
    bool has_uploaded() const {
        const cudaEvent_t targets = uploads[(uploaded + 1) % 4].passed;
        return !targets || has_passed(targets);
    }
    std::vector<double> receive() {
        PinnedBuffer& buffer = downloads[received++ % 2];
        CUDA_CHECK(cudaEventSynchronize(buffer.passed));
        const double* numbers = static_cast<const double*>(buffer.data);
        return {numbers, numbers + buffer.count};
    }

    std::string name() const { return properties.name; }
    int capability() const { return properties.major * 10 + properties.minor; }
    std::string bus() const { return bus_of(device); }
    // FLOP/s of the tensor cores at best, dense bf16 with fp32 sums; 0: unknown GPU. From NVIDIA's data sheets, but for
    // Blackwell, whose figures are derived as its lines say. The first entry that a GPU's name contains is its.
    static double bf16_peak_flops(const char* gpu) {
        // clang-format off
        static constexpr std::pair<const char*, double> TERAFLOPS[] = {
            {"Laptop", 0},  // its clock depends on the laptop
            {"H100 PCIe", 756}, {"H100 NVL", 835.5}, {"H200 NVL", 835.5},
            {"H100", 989.4}, {"H200", 989.4}, {"H800", 989.4},
            {"A100", 312}, {"A800", 312}, {"L40S", 362}, {"RTX 4090", 165.2}, {"RTX 3090", 71},
            // published with sparsity, which doubles it: 360 PFLOPS for 72 GPUs (NVL72), 36 for 8 (HGX)
            {"GB200", 2500}, {"GB300", 2500}, {"B200", 2250}, {"B300", 2250},
            // GeForce: published are "AI TOPS", fp4 with sparsity, 16 times bf16 with fp32 sums: 3352, 1801, 988, 759
            {"RTX 5090 D", 0}, {"RTX 5090", 209.5}, {"RTX 5080", 112.6}, {"RTX 5070 Ti", 0}, {"RTX 5070", 61.7},
            {"RTX 5060 Ti", 47.4},
            // RTX PRO does not halve bf16 for fp32 sums: four times its fp32, 125.95
            {"RTX PRO 6000 Blackwell Workstation", 503.8},
        };
        // clang-format on
        for (const auto& [name, teraflops] : TERAFLOPS)
            if (std::strstr(gpu, name)) return teraflops * 1e12;
        return 0;
    }

    // ----- a stream beside the computation's. Events order the two; the host waits for neither.
    class SideStream {
        CudaRuntime& dev;
        cudaEvent_t computed = nullptr, led = nullptr;

      public:
        cudaStream_t stream = nullptr;

        explicit SideStream(CudaRuntime& d) : dev(d) {
            CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            for (cudaEvent_t* e : {&computed, &led}) CUDA_CHECK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
        }
        ~SideStream() {  // an error here would help nobody
            cudaStreamSynchronize(stream);
            for (cudaEvent_t e : {computed, led}) cudaEventDestroy(e);
            cudaStreamDestroy(stream);
        }
        SideStream(const SideStream&) = delete;
        SideStream& operator=(const SideStream&) = delete;

        // What it is given from now on waits for what has been computed so far.
        void follow() {
            CUDA_CHECK(cudaEventRecord(computed, dev.stream));
            CUDA_CHECK(cudaStreamWaitEvent(stream, computed, 0));
        }
        bool has_followed() const { return has_passed(computed); }
        // What is computed from now on waits for what it has been given so far.
        void lead() {
            CUDA_CHECK(cudaEventRecord(led, stream));
            CUDA_CHECK(cudaStreamWaitEvent(dev.stream, led, 0));
        }
    };

    // ----- copies beside the computation: gradients that MPI sums in the host's memory.
    class HostCopies {
        SideStream side;
        std::vector<cudaEvent_t> fetched;
        void* pinned = nullptr;

      public:
        HostCopies(CudaRuntime& d, size_t pieces) : side(d), fetched(pieces) {
            for (cudaEvent_t& e : fetched) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
        }
        ~HostCopies() {  // an error here would help nobody
            cudaStreamSynchronize(side.stream);
            for (cudaEvent_t e : fetched) cudaEventDestroy(e);
            cudaFreeHost(pinned);
        }
        HostCopies(const HostCopies&) = delete;
        HostCopies& operator=(const HostCopies&) = delete;

        // Host memory for the `count` elements that the device has at p.
        template <class T>
        T* host_side(T*, size_t count) {
            CUDA_CHECK(cudaMallocHost(&pinned, count * sizeof(T)));
            return static_cast<T*>(pinned);
        }
        // host gets [count] from the device once all that was launched so far has run; then has(piece) is true.
        template <class T>
        void fetch(T* host, const T* device, size_t count, size_t piece) {
            side.follow();
            CUDA_CHECK(cudaMemcpyAsync(host, device, count * sizeof(T), cudaMemcpyDeviceToHost, side.stream));
            CUDA_CHECK(cudaEventRecord(fetched[piece], side.stream));
        }
        bool has(size_t piece) const { return has_passed(fetched[piece]); }
        // What is launched from now on finds host [count] at `device`.
        template <class T>
        void put(T* device, const T* host, size_t count) {
            CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(T), cudaMemcpyHostToDevice, side.stream));
            side.lead();
        }
    };

  protected:
    // Temporary memory that only grows; what is in a piece is valid until the piece is used again. The last one is for
    // parts of sums over rows, the others for whichever operation is running.
    static constexpr int SCRATCH_PIECES = 4;
    template <class T>
    T* scratch(int piece, size_t count) {
        Scratch& s = scratches[piece];
        if (count * sizeof(T) > s.bytes) {
            release(s.data);
            s = Scratch();
            s.data = allocate<char>(count * sizeof(T));
            s.bytes = count * sizeof(T);
        }
        return reinterpret_cast<T*>(s.data);
    }

    // ----- matrix products.
    // Tensor cores read rows in pieces of 16 bytes.
    static void check_aligned(size_t bytes, size_t element) {
        if (bytes % 16)
            fail_usage(
                "a row of a matrix begins %d bytes after a multiple of 16, which tensor cores cannot read: on a GPU "
                "--dim, --head-dim, --mlp-hidden and --phi-hidden have to be multiples of %d; or use --device cpu",
                bytes % 16, int(16 / element));
    }
    // C[M,N] = op(A)[M,K] op(B)[K,N] (+ beta addend[M,N], which may be C, or nullptr), row-major as everywhere.
    template <class In, class Out>
    void gemm(Factors factors, GemmSize s, const In* A, size_t lda, const In* B, size_t ldb,
              const std::common_type_t<Out>* addend, Out* C, size_t ldc, Batch batch = {1, 0, 0, 0}) {
        const size_t row_bytes[] = {lda * sizeof(In),     ldb * sizeof(In),     ldc * sizeof(Out),
                                    batch.a * sizeof(In), batch.b * sizeof(In), batch.c * sizeof(Out)};
        const void* const pointers[] = {A, B, C, addend};
        for (const size_t bytes : row_bytes) check_aligned(bytes, sizeof(In));
        for (const void* p : pointers) check_aligned(reinterpret_cast<size_t>(p), sizeof(In));
        if (plain_matmul) return plain_gemm<In, Out>(factors, s, A, lda, B, ldb, addend, C, ldc, batch, stream);
#ifndef NO_CUBLAS
        // cuBLASLt is column-major, and reads the same memory as the transposed matrix: so it is asked for C^T =
        // op(B)^T op(A)^T.
        const Out* const c = addend ? addend : C;
        const MatmulShape shape = {{factors == TN, factors == NT, s.M, s.N, s.K, int64_t(lda), int64_t(ldb),
                                    int64_t(ldc), batch.count, int64_t(batch.a), int64_t(batch.b), int64_t(batch.c),
                                    alignment_of(A), alignment_of(B), alignment_of(c), alignment_of(C), type_of<In>(),
                                    type_of<Out>()}};
        const auto found = matmuls.find(shape);
        Matmul& m = found != matmuls.end() ? found->second : matmuls.emplace(shape, make_matmul(shape)).first->second;
        const float alpha = 1, beta = addend ? batch.beta : 0;
        while (true) {
            const cublasStatus_t status =
                cublasLtMatmul(cublas, m.description, &alpha, B, m.a, A, m.b, &beta, c, m.c, C, m.c,
                               &m.algorithms[m.chosen].algo, cublas_workspace, workspace_bytes, stream);
            if (status == CUBLAS_STATUS_SUCCESS) return;
            take_next_algorithm(shape, m, status);
        }
#endif
    }

  public:
    // How the products so far were computed.
    std::vector<std::string> products() const {
        std::vector<std::string> lines;
#ifndef NO_CUBLAS
        for (const auto& [shape, matmul] : matmuls) lines.push_back(name_of(shape) + ": " + describe(matmul));
#endif
        return lines;
    }

  private:
    std::map<const void*, size_t> allocated;  // bytes by address
    std::map<std::string, char*> lists;       // on_device()'s, by their bytes
    double share_of_memory = 0;               // where processes share the GPU: what live_bytes may grow to
    PinnedBuffer uploads[4], downloads[2];
    size_t uploaded = 0, sent = 0, received = 0;
    struct Scratch {
        char* data = nullptr;
        size_t bytes = 0;
    };
    Scratch scratches[SCRATCH_PIECES];
    [[maybe_unused]] uint64_t workspace_bytes;  // of cuBLASLt

    // A GPU that has no memory of its own takes the host's, and CUDA does not count what files were read into as free.
    double free_bytes() const {
        size_t free = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        const double of_host = properties.integrated ? std::min(system_bytes_available(), double(total)) : 0;
        return std::max(double(free), of_host);
    }
    void open_device(bool bf16) {
        CUDA_CHECK(cudaSetDevice(device));
        CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
        if (bf16 && properties.major < 8)
            fail(
                "GPU %d, %s, has compute capability %d.%d; bf16 needs 8.0 or later: build again with PRECISION=FP32 "
                "%s, or use --device cpu",
                device, properties.name, properties.major, properties.minor, setting_for(properties));
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        int* const probed = allocate<int>(1);
        int specific = 0;
        try {
            launch<probe_kernel>(1, 1, 0, stream, probed);
        } catch (const Error& e) {
            fail(
                "this program was not built for GPU %d, %s, of compute capability %d.%d: build it again with make %s "
                "(%s)",
                device, properties.name, properties.major, properties.minor, setting_for(properties), e.what());
        }
        copy(&specific, probed, 1);
        release(probed);
        exact = specific != 0;
        CUDA_CHECK(name_of_code(code, properties, probe_kernel, exact));
    }
    [[noreturn]] void fail_out_of_memory(size_t bytes) const {
        cudaGetLastError();  // cleared, else the next launch would report it
        size_t free = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        fail(
            "out of GPU memory: %.1f MiB were asked for, %.1f of %.1f MiB are free on GPU %d; choose a smaller "
            "--batch or --seq-len; " GPU_MONITOR " shows who else uses the GPU",
            double(bytes) / (1 << 20), double(free) / (1 << 20), double(total) / (1 << 20), device);
    }

#ifndef NO_CUBLAS
    cublasLtHandle_t cublas = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
    char* cublas_workspace = nullptr;
    void set_matmul_preferences() {
        CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                          &workspace_bytes, sizeof workspace_bytes));
        // Where it splits a long sum, the parts stay fp32.
        const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                          &reduction, sizeof reduction));
    }
    // By how many bytes a pointer is aligned, 256 at most, which is what cuBLASLt assumes when nothing is said.
    static int64_t alignment_of(const void* p) {
        const size_t address = reinterpret_cast<size_t>(p) | 256;
        return int64_t(address & -address);
    }
    // transpose_a, transpose_b, M, N, K, lda, ldb, ldc; of the batch: count, a, b, c; alignments of A, B, addend, C;
    // the cudaDataType_t of A and of C
    using MatmulShape = std::array<int64_t, 18>;
    // A matrix product as cuBLASLt describes it, and the algorithms that it proposes; made once per shape.
    struct Matmul {
        cublasLtMatmulDesc_t description;
        cublasLtMatrixLayout_t a, b, c;
        std::vector<cublasLtMatmulHeuristicResult_t> algorithms;  // the likely best one first
        size_t chosen = 0;                                        // those before it failed
        void destroy() {
            cublasLtMatmulDescDestroy(description);
            for (cublasLtMatrixLayout_t layout : {a, b, c}) cublasLtMatrixLayoutDestroy(layout);
        }
    };
    std::map<MatmulShape, Matmul> matmuls;

    template <class T>
    static constexpr cudaDataType_t type_of() {
        return std::is_same<T, float>::value ? CUDA_R_32F : CUDA_R_16BF;
    }
    static cublasLtMatrixLayout_t layout(int64_t type, bool transposed, int64_t rows, int64_t columns, int64_t leading,
                                         int64_t batches, int64_t stride) {
        cublasLtMatrixLayout_t layout;
        CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, cudaDataType_t(type), uint64_t(transposed ? columns : rows),
                                                uint64_t(transposed ? rows : columns), leading));
        const int32_t count = int32_t(batches);
        CUBLAS_CHECK(
            cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                      sizeof stride));
        return layout;
    }
    Matmul make_matmul(const MatmulShape& shape) {
        const auto [transpose_a, transpose_b, M, N, K, lda, ldb, ldc, count, next_a, next_b, next_c, align_a, align_b,
                    align_addend, align_c, in, out] = shape;
        Matmul m;
        CUBLAS_CHECK(cublasLtMatmulDescCreate(&m.description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        const cublasOperation_t first = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                second = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(m.description, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
        CUBLAS_CHECK(
            cublasLtMatmulDescSetAttribute(m.description, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
        m.a = layout(in, transpose_b, N, K, ldb, count, next_b);
        m.b = layout(in, transpose_a, K, M, lda, count, next_a);
        m.c = layout(out, false, N, M, ldc, count, next_c);
        set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align_b);
        set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align_a);
        set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align_addend);
        set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align_c);
        int found = 0;
        m.algorithms.resize(8);
        const cublasStatus_t answer = cublasLtMatmulAlgoGetHeuristic(cublas, m.description, m.a, m.b, m.c, m.c,
                                                                     preference, 8, m.algorithms.data(), &found);
        if (answer == CUBLAS_STATUS_NOT_SUPPORTED) found = 0;  // means the same
        else cublas_check(answer, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
        m.algorithms.resize(size_t(found));
        const auto is_unusable = [](const auto& algorithm) { return algorithm.state != CUBLAS_STATUS_SUCCESS; };
        m.algorithms.erase(std::remove_if(m.algorithms.begin(), m.algorithms.end(), is_unusable), m.algorithms.end());
        if (m.algorithms.empty())
            fail(
                "cuBLASLt knows no way to multiply %d x %d x %d (%d at a time) on %s; please report the GPU "
                "and this line, and build with NO_CUBLAS=1 meanwhile, which multiplies by a plain kernel of our own, "
                "slowly",
                M, N, K, count, properties.name);
        return m;
    }
    void set_alignment(cublasLtMatmulPreferenceAttributes_t which, int64_t bytes) {
        const uint32_t value = uint32_t(bytes);
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, which, &value, sizeof value));
    }
    // "32768 x 768 x 3072 nt": M, N, K, and which factors are transposed
    static std::string name_of(const MatmulShape& n) {
        std::string name = format_text("%d x %d x %d %s%s", n[2], n[3], n[4], n[0] ? 't' : 'n', n[1] ? 't' : 'n');
        if (n[8] > 1) name += format_text(", %d at a time", n[8]);
        return name;
    }
    // "algorithm 66, tile 20, stages 35, splits 1, 0.97 waves, number 1 of 8": the numbers are cuBLASLt's own.
    static std::string describe(const Matmul& m) {
        const cublasLtMatmulHeuristicResult_t& chosen = m.algorithms[m.chosen];
        const auto number = [&](cublasLtMatmulAlgoConfigAttributes_t which) {
            int32_t value = -1;
            size_t written = 0;
            CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute(&chosen.algo, which, &value, sizeof value, &written));
            return value;
        };
        return format_text("algorithm %d, tile %d, stages %d, splits %d, %.2f waves, number %d of %d",
                           number(CUBLASLT_ALGO_CONFIG_ID), number(CUBLASLT_ALGO_CONFIG_TILE_ID),
                           number(CUBLASLT_ALGO_CONFIG_STAGES_ID), number(CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                           double(chosen.wavesCount), m.chosen + 1, m.algorithms.size());
    }
    // After a failure, which is said.
    void take_next_algorithm(const MatmulShape& shape, Matmul& m, cublasStatus_t status) {
        if (m.chosen + 1 == m.algorithms.size()) cublas_check(status, "cublasLtMatmul", __FILE__, __LINE__);
        cudaGetLastError();  // cleared, else the next launch would report it
        const std::string failed = describe(m);
        m.chosen++;
        complain("cuBLASLt failed to multiply %s by its %s: %s; taking %s", name_of(shape), failed,
                 cublasLtGetStatusString(status), describe(m));
    }
#endif
};
