// devices.cuh: what CUDA says of itself before a GPU is used: which GPUs are here, and which versions of its libraries.
// struct Cuda has it from here; HIP's names are hip_common.h's.
#pragma once
#include <string>

#include "../base/gpu_search.h"
#include "attention_kernels.h"
#include "common.cuh"

// fp32: whether this build computes in it.
inline EngineInfo cuda_info(bool fp32) {
    EngineInfo info;
#ifdef __HIP__
    info.name = "HIP";
#endif
    info.format = fp32 ? "fp32" : "bf16";
#ifdef USE_NCCL
    info.collective = "NCCL";
#else
    info.no_collective = "this build has no NCCL";
#endif
    info.attention_kernels = attention_kernel_names(fp32);
    return info;
}

inline GpuSearch search_for_cuda(bool fp32) {
    GpuSearch search;
    search.engine = cuda_info(fp32);
    search.nvidia_module = has_nvidia_module();
    const cudaError_t error = cudaGetDeviceCount(&search.count);
    if (error != cudaSuccess) search.count = 0;
    for (int i = 0; i < search.count; i++) search.places.push_back(bus_of(i));
    if (search.count) CUDA_CHECK(cudaGetDevice(&search.current));
    search.driver_too_old = error == cudaErrorInsufficientDriver;
    search.broken =
        search.nvidia_module && error != cudaSuccess && error != cudaErrorNoDevice && !search.driver_too_old;
    search.error = cudaGetErrorString(error);
#ifdef __HIP__
    if (search.count == 0)
        search.error +=
            "; rocminfo must list one: a user needs the groups video and render, a container --device "
            "/dev/kfd --device /dev/dri";
#endif
#ifdef __CUDACC__
    if (error == cudaErrorSystemNotReady) search.error += "; systemctl start nvidia-fabricmanager";
    cudaRuntimeGetVersion(&search.toolkit);
    cudaDriverGetVersion(&search.driver);
#endif
    return search;
}

// CUDA's runtime, what the driver can do, cuBLASLt and NCCL, where the build has them.
inline Versions cuda_versions() {
    Versions all;
#ifdef USE_NCCL
    int nccl = 0;
    NCCL_CHECK(ncclGetVersion(&nccl));
    all.emplace_back("NCCL", format_text("%d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100));
#endif
#ifdef __CUDACC__
    const GpuSearch found = search_for_cuda(false);
    all.emplace_back("CUDA runtime", cuda_version_text(found.toolkit));
    all.emplace_back("CUDA of the driver", cuda_version_text(found.driver));
#ifdef NO_CUBLAS
    all.emplace_back("cuBLASLt", "left out");
#else
    all.emplace_back("cuBLASLt", std::to_string(cublasLtGetVersion()));
#endif
#endif
    return all;
}
