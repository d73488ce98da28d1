// hip_common.h: the seam to AMD's GPUs. lib/cuda/common.cuh includes it under hipcc (make GPU=hip), where nvcc finds
// CUDA's headers and g++ the emulator: it gives HIP's functions the names that the program knows, for waves of 32
// lanes (RDNA, such as gfx1030) and of 64 (CDNA, such as gfx90a). NEVER RUN ON A GPU: dev/PORTING.md says what an
// emulator has executed.
//
// What is here serves PRECISION=FP32: row kernels, plain attention, the plain matrix product. Tensor-core attention
// needs stand-ins for mma_m16n8k16, ldmatrix_x4, cp_async_16 (WMMA has other fragments), and tile shapes; NCCL's part
// would be RCCL's.
#pragma once
#ifndef PRECISION_FP32
#error "AMD's GPUs have the plain kernels only: build with PRECISION=FP32"
#endif
#include <hip/hip_runtime.h>

// ---------------------------------------------------------------------------------------------------------------------
// Types and values.

using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
using cudaEvent_t = hipEvent_t;
using cudaMemcpyKind = hipMemcpyKind;

constexpr auto cudaSuccess = hipSuccess, cudaErrorNotReady = hipErrorNotReady,
               cudaErrorMemoryAllocation = hipErrorOutOfMemory,
               cudaErrorInsufficientDriver = hipErrorInsufficientDriver, cudaErrorNoDevice = hipErrorNoDevice,
               cudaErrorLaunchOutOfResources = hipErrorLaunchOutOfResources,
               cudaErrorIllegalAddress = hipErrorIllegalAddress, cudaErrorLaunchFailure = hipErrorLaunchFailure,
               cudaErrorMisalignedAddress = hipErrorUnknown;  // which HIP does not tell apart
constexpr auto cudaMemcpyDefault = hipMemcpyDefault, cudaMemcpyHostToDevice = hipMemcpyHostToDevice,
               cudaMemcpyDeviceToHost = hipMemcpyDeviceToHost, cudaMemcpyDeviceToDevice = hipMemcpyDeviceToDevice;
constexpr unsigned cudaEventDisableTiming = hipEventDisableTiming, cudaStreamNonBlocking = hipStreamNonBlocking;
constexpr auto cudaFuncAttributeMaxDynamicSharedMemorySize = hipFuncAttributeMaxDynamicSharedMemorySize;

// A block has no more shared memory than that which every block may have.
struct cudaDeviceProp : hipDeviceProp_t {
    size_t sharedMemPerBlockOptin = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// The runtime, as far as the program calls it.

constexpr auto cudaGetErrorName = hipGetErrorName;
constexpr auto cudaGetErrorString = hipGetErrorString;
constexpr auto cudaGetLastError = hipGetLastError;
constexpr auto cudaGetDeviceCount = hipGetDeviceCount;
constexpr auto cudaGetDevice = hipGetDevice;
constexpr auto cudaSetDevice = hipSetDevice;
constexpr auto cudaDeviceGetPCIBusId = hipDeviceGetPCIBusId;
constexpr auto cudaFree = hipFree;
constexpr auto cudaFreeHost = hipHostFree;
constexpr auto cudaMemGetInfo = hipMemGetInfo;
constexpr auto cudaMemcpyAsync = hipMemcpyAsync;
constexpr auto cudaMemsetAsync = hipMemsetAsync;
constexpr auto cudaStreamCreateWithFlags = hipStreamCreateWithFlags;
constexpr auto cudaStreamDestroy = hipStreamDestroy;
constexpr auto cudaStreamSynchronize = hipStreamSynchronize;
constexpr auto cudaStreamWaitEvent = hipStreamWaitEvent;
constexpr auto cudaEventCreate = hipEventCreate;
constexpr auto cudaEventCreateWithFlags = hipEventCreateWithFlags;
constexpr auto cudaEventDestroy = hipEventDestroy;
constexpr auto cudaEventRecord = hipEventRecord;
constexpr auto cudaEventQuery = hipEventQuery;
constexpr auto cudaEventSynchronize = hipEventSynchronize;
constexpr auto cudaEventElapsedTime = hipEventElapsedTime;

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    const cudaError_t error = hipGetDeviceProperties(properties, device);
    properties->sharedMemPerBlockOptin = properties->sharedMemPerBlock;
    return error;
}
template <class T>
inline cudaError_t cudaMalloc(T** p, size_t bytes) {
    return hipMalloc(reinterpret_cast<void**>(p), bytes);
}
template <class T>
inline cudaError_t cudaMallocHost(T** p, size_t bytes) {
    return hipHostMalloc(reinterpret_cast<void**>(p), bytes, hipHostMallocDefault);
}
template <class... Args>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Args...), hipFuncAttribute attribute, int value) {
    return hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

#define GPU_MONITOR "rocm-smi"
#define ONE_LAUNCH_AT_A_TIME "AMD_SERIALIZE_KERNEL=3"
#define MEMORY_CHECKER "with AMD_SERIALIZE_KERNEL=3"
inline std::string setting_for(const cudaDeviceProp& properties) {
    return std::string("GPU=hip GPU_ARCH=") + properties.gcnArchName;
}
template <class Kernel>
cudaError_t name_of_code(std::string& name, const cudaDeviceProp& properties, Kernel*, bool) {
    name = properties.gcnArchName;
    return hipSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Warps. A wave of RDNA's has 32 lanes and is a warp; one of CDNA's has 64 and is two warps, of which either may have
// left or be elsewhere. HIP's functions take no mask: all lanes that are there take part, in lockstep.

// The names are ours, since ROCm has functions of CUDA's names from 6.2 on, whose masks have 64 bits.
template <class T>
__device__ inline T wave_shfl(unsigned, T value, int source) {
    return __shfl(value, source, 32);
}
template <class T>
__device__ inline T wave_shfl_xor(unsigned, T value, int flip) {
    return __shfl_xor(value, flip, 32);
}
template <class T>
__device__ inline T wave_shfl_up(unsigned, T value, unsigned delta) {
    return __shfl_up(value, delta, 32);
}
// The own warp's half of the wave's ballot.
__device__ inline unsigned wave_ballot(unsigned, int predicate) {
    return unsigned(__ballot(predicate) >> (__lane_id() & 32));
}
__device__ inline int wave_any(unsigned mask, int predicate) { return wave_ballot(mask, predicate) != 0; }
// Lanes run in lockstep, so it is the compiler and the order of memory that have to be held.
__device__ inline void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
#define __shfl_sync wave_shfl
#define __shfl_xor_sync wave_shfl_xor
#define __shfl_up_sync wave_shfl_up
#define __ballot_sync wave_ballot
#define __any_sync wave_any
#define __syncwarp wave_sync

// ---------------------------------------------------------------------------------------------------------------------
// Instructions.

// 1/x to within 1 unit in the last place; 1/infinity is 0.
__device__ inline float reciprocal_approx(float x) { return __builtin_amdgcn_rcpf(x); }
__device__ inline float exp2_approx(float x) { return exp2f(x); }
