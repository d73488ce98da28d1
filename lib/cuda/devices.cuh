// devices.cuh: which GPUs are here, and which versions of CUDA's libraries; nothing of either in a build without CUDA.
// Used by the verbs in train_nsa.cu.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "../base/files.h"
#include "../base/gpu_search.h"
#ifdef USE_CUDA
#include "common.cuh"
#endif

inline GpuSearch search_gpus() {
    GpuSearch search;
    search.nvidia_module = file_exists("/proc/driver/nvidia/version") || file_exists("/dev/nvidiactl");
#ifdef USE_CUDA
    search.cuda_engine = true;
    const cudaError_t error = cudaGetDeviceCount(&search.count);
    if (error != cudaSuccess) search.count = 0;
    search.driver_too_old = error == cudaErrorInsufficientDriver;
    search.error = cudaGetErrorString(error);
#endif
#ifdef __CUDACC__
    cudaRuntimeGetVersion(&search.toolkit);
    cudaDriverGetVersion(&search.driver);
#endif
    return search;
}

// "2.21.5"; "" where the build has no NCCL.
inline std::string nccl_version() {
#if defined(USE_NCCL) && defined(USE_CUDA)
    int nccl = 0;
    NCCL_CHECK(ncclGetVersion(&nccl));
    return format_text("%d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
#else
    return "";
#endif
}

// CUDA's runtime, what the driver can do, and cuBLASLt, where the build has them.
inline std::vector<std::pair<const char*, std::string>> cuda_versions() {
#ifdef __CUDACC__
    const GpuSearch found = search_gpus();
    return {{"CUDA runtime", cuda_version_text(found.toolkit)},
            {"CUDA of the driver", cuda_version_text(found.driver)},
#ifdef NO_CUBLAS
            {"cuBLASLt", "left out"}};
#else
            {"cuBLASLt", std::to_string(cublasLtGetVersion())}};
#endif
#else
    return {};
#endif
}
