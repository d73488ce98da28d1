// common.cuh: the one seam between nvcc, hipcc and g++, used by everything that touches CUDA. Kernels and the code
// that launches them include this and nothing else of CUDA. Under nvcc (-x cu, sm_80 or later) it brings in the CUDA
// runtime, cuBLASLt and, with -DUSE_NCCL, NCCL; under hipcc hip_common.h, for AMD's GPUs. For the tests, g++ finds
// headers of the same names that run the same kernels on a CPU. All offer the same names: SHARED, DynamicShared,
// launch<>, the PTX wrappers, CUDA_CHECK, CUBLAS_CHECK, NCCL_CHECK. PTX is written here and in wgmma.cuh.
//
// A kernel runs on both if it
//   - begins with wait_for_earlier_kernels();
//   - declares shared memory with SHARED(float, sums, [32]); or DynamicShared shared; bf16* q = shared.take<bf16>(64);
//   - converts bf16 with (float)x;
//   - has at most one barrier or warp function on a source line, whose mask names exactly the lanes that take part;
//   - is launched in blocks of a multiple of 32 threads, none of which returns before a barrier.
#pragma once
#include "../base/errors.h"

#if defined(__HIP__)
#include "hip_common.h"
#else
#ifndef NO_CUBLAS
#include <cublasLt.h>
#endif
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#ifdef USE_NCCL
#include <nccl.h>
#endif
#if CUDART_VERSION < 12000
#error "CUDA 12 or later is needed: put its nvcc on PATH, or build with make NO_CUDA=1"
#endif
// What messages name; HIP's are in hip_common.h.
#define GPU_MONITOR "nvidia-smi"
#define ONE_LAUNCH_AT_A_TIME "CUDA_LAUNCH_BLOCKING=1"
#define MEMORY_CHECKER "under compute-sanitizer"
inline std::string setting_for(const cudaDeviceProp& properties) {
    return "GPU_COMPUTE_CAPABILITY=" + std::to_string(properties.major * 10 + properties.minor);
}
// The architecture whose machine code a GPU runs for this kernel: that of the program, or what the driver made of PTX.
// specific: the code was compiled for no other, which CUDA marks with an a: sm_90a.
template <class Kernel>
cudaError_t name_of_code(std::string& name, const cudaDeviceProp&, Kernel* kernel, bool specific) {
    cudaFuncAttributes found = {};
    const cudaError_t error = cudaFuncGetAttributes(&found, kernel);
    name = "sm_" + std::to_string(found.binaryVersion) + (specific ? "a" : "");
    return error;
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Host checks: CUDA_CHECK(cudaMalloc(&p, bytes)); throws one line that names the call, the place, the error and a
// remedy.

inline const char* cuda_hint(cudaError_t e) {
    switch (e) {
        case cudaErrorMemoryAllocation:
            return "take a smaller micro-batch or a shorter sequence; " GPU_MONITOR
                   " shows who else uses the GPU's memory";
        case cudaErrorLaunchOutOfResources:
            return "the kernel needs more registers or shared memory than this GPU has; please report the GPU's name";
        case cudaErrorIllegalAddress:
        case cudaErrorMisalignedAddress:
        case cudaErrorLaunchFailure:
            return "a kernel launched earlier failed; run the same command " MEMORY_CHECKER
                   " to see which, unless dmesg shows an Xid of the GPU";
#ifdef __CUDACC__
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorDevicesUnavailable:
        case cudaErrorUnknown:
            return "the GPU or its link failed, or is another process's alone: see dmesg for an Xid, and nvidia-smi -q";
#endif
        default: return "run the same command with " ONE_LAUNCH_AT_A_TIME " to see the call that fails first";
    }
}
inline void cuda_check(cudaError_t e, const char* call, const char* file, int line) {
    if (e != cudaSuccess)
        fail("%s:%d: %s failed: %s, %s. HINT: %s", file, line, call, cudaGetErrorName(e), cudaGetErrorString(e),
             cuda_hint(e));
}
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

// Tells a GPU from the others of the machine.
inline std::string bus_of(int gpu) {
    char text[32] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(text, sizeof text, gpu));
    return text;
}

#ifndef NO_CUBLAS
inline void cublas_check(cublasStatus_t s, const char* call, const char* file, int line) {
    if (s != CUBLAS_STATUS_SUCCESS)
        fail(
            "%s:%d: %s failed: %s. HINT: set CUBLASLT_LOG_LEVEL=5 and run again to see the shapes and what is wrong "
            "with them",
            file, line, call, cublasLtGetStatusString(s));
}
#define CUBLAS_CHECK(call) cublas_check((call), #call, __FILE__, __LINE__)
#endif

#ifdef USE_NCCL
inline void nccl_check(ncclResult_t r, const char* call, const char* file, int line) {
    if (r != ncclSuccess)
        fail(
            "%s:%d: %s failed: %s (%s). HINT: set NCCL_DEBUG=INFO and run again; look for the first rank that failed. "
            "dev/GUIDE.md, Several ranks, has what helps in containers and without peer access",
            file, line, call, ncclGetErrorString(r), ncclGetLastError(nullptr));
}
#define NCCL_CHECK(call) nccl_check((call), #call, __FILE__, __LINE__)
#endif

// Whether launch<> lets a kernel start early (below); off for a comparison of the two.
inline bool kernels_start_early = true;

#ifndef SHARED  // the headers of the tests have these three themselves
// ---------------------------------------------------------------------------------------------------------------------
// Shared memory and launches.

#define SHARED(T, name, dimensions) __shared__ T name dimensions

// Hands out the launch's dynamic shared bytes in order, each piece at a multiple of 128 bytes, the first of 1024. One
// per kernel.
struct DynamicShared {
    size_t used = 0;
    template <class T>
    __device__ T* take(size_t n) {
        extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
        T* piece = reinterpret_cast<T*>(dynamic_shared_bytes + used);
        used += (n * sizeof(T) + 127) / 128 * 128;
        return piece;
    }
};

// launch<kernel>(grid, block, dynamic shared bytes, stream, arguments...)
//
// From compute capability 9.0 on a kernel starts early: once every block of the kernel before it in the stream has
// begun, its own blocks take the places that fall free and wait in wait_for_earlier_kernels() until that one is done
// and what it wrote can be seen. So blocks are started and arguments fetched while others compute still. That the
// kernels before that one are done too follows only because it, like every kernel here, waits before it does anything.
// Events and copies come between two of ours in full order. A library's kernel starts when ours is done unless the
// library launches it so too; then it has to wait as ours do. What cuBLASLt does is not documented. NCCL launches its
// symmetric kernels so, which from 2.28 to 2.30.4 did not wait; they are for memory that was registered for them, or
// where NCCL_SYM_NOWIN_ENABLE or NCCL_SYM_KERNEL asks for them. dev/test/cuda has a step's bits with and without.
template <auto kernel, class... Args>
void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Args... args) {
    // Every GPU grants 48 KiB; more has to be requested. Each kernel is launched by one thread and on one GPU. SHARED
    // arrays count too, so a kernel that may get much has none.
    static size_t granted = 48 * 1024;
    if (shared_bytes > granted) {
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
                   __PRETTY_FUNCTION__, __FILE__, __LINE__);
        granted = shared_bytes;
    }
#ifdef __HIP__
    kernel<<<grid, block, shared_bytes, stream>>>(args...);
#else
    // By the PTX that the code was made of: PTX for 8.0 has no such wait, on whichever GPU it runs.
    static const bool waits = [] {
        cudaFuncAttributes found = {};
        cuda_check(cudaFuncGetAttributes(&found, kernel), __PRETTY_FUNCTION__, __FILE__, __LINE__);
        return found.ptxVersion >= 90;
    }();
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = waits && kernels_start_early ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, args...);
#endif
    cuda_check(cudaGetLastError(), __PRETTY_FUNCTION__, __FILE__, __LINE__);
}

#endif
#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------------------
// PTX.

// d = a b + c; a 16 x 16 and b 16 x 8 in bf16, c and d 16 x 8 in fp32.
__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                    const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory; lane l gives the address of row l % 8 of matrix
// l / 8.
__device__ inline void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}
__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}

// Copies 16 bytes from device to shared memory; unless `valid`, writes 16 zeros and does not read src.
__device__ inline void cp_async_16(void* dst, const void* src, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(unsigned(__cvta_generic_to_shared(dst))),
                 "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until all but this thread's latest GROUPS groups of copies have arrived.
template <int GROUPS>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(GROUPS) : "memory");
}

// 2^x to within about 2 units in the last place; 2^-infinity is 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
// 1/x to within 1 unit in the last place; 1/infinity is 0.
__device__ inline float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// From here on for both compilers.

// Every kernel begins with this, before it touches the GPU's memory: it waits until the kernels before it in the stream
// are done and what they wrote can be seen, and lets the next one start early; see launch<>. Arguments may be read
// before it, nothing else: dev/kernel_report.sh looks at what the compiler made of it.
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

constexpr float LOG2_E = 1.4426950408889634f;  // e^x = 2^(LOG2_E x)

// blockIdx.x in a kernel whose loop leaves no register free: from 10.0 on it is read from the hardware again, so that
// nothing computed from it has to outlive the loop. Counted by ptxas 13.0 in the 16 dK/dV kernels, never timed: sm_80
// and sm_90 have the same code either way; on sm_100 and sm_120 they need up to 6 registers more without it, and
// gather_dkdv_kernel<64, WARP>, which has 255 then as now, spills 8 bytes.
__device__ inline unsigned block_index_again() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    unsigned x;
    asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(x));
    return x;
#else
    return blockIdx.x;
#endif
}

// threadIdx.x and blockIdx.x, read from the hardware on every GPU: for what is computed before a loop and once more
// behind it.
struct Indices {
    unsigned thread, block;
};
__device__ inline Indices indices_again() {
#ifdef __CUDA_ARCH__
    Indices x;
    asm volatile("mov.u32 %0, %%tid.x;\nmov.u32 %1, %%ctaid.x;\n" : "=r"(x.thread), "=r"(x.block));
    return x;
#else
    return {threadIdx.x, blockIdx.x};
#endif
}

// Sums and maxima over lanes.

// The sum over groups of `lanes` neighbouring lanes (a power of two), returned to each of them.
template <int lanes = 32, class T>
__device__ inline T lane_sum(T x) {
    for (int flip = lanes / 2; flip > 0; flip /= 2) x += __shfl_xor_sync(~0u, x, flip);
    return x;
}
__device__ inline float lane_max(float x) {
    for (int flip = 16; flip > 0; flip /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, flip));
    return x;
}
