// gpu_search.h: what a search for GPUs met, and in words why it found none. lib/cuda/devices.cuh searches.
#pragma once
#include <string>

#include "util.h"

// What a search for GPUs met. CUDA's versions are its own numbers, such as 12040 for 12.4; 0: there is none.
struct GpuSearch {
    int count = 0;                // of the GPUs that this process sees
    bool cuda_engine = false;     // in this build
    bool nvidia_module = false;   // NVIDIA's driver is in the kernel, so there is a GPU
    int toolkit = 0, driver = 0;  // the CUDA that this build was made with, and the latest that the driver knows
    bool driver_too_old = false;  // as CUDA says
    std::string error;            // CUDA's own text
};

// "12.4"; "none" for 0.
inline std::string cuda_version_text(int v) { return v ? format_text("%d.%d", v / 1000, v % 1000 / 10) : "none"; }

// Why no GPU was found, and what helps: a driver that is missing and one that is too old are one error to CUDA.
inline std::string why_no_gpu(const GpuSearch& s) {
    if (!s.cuda_engine && s.nvidia_module)
        return "there is an NVIDIA GPU but this program was built without nvcc: put the CUDA toolkit's nvcc on PATH "
               "and run make again";
    if (!s.cuda_engine) return "this build holds no CUDA engine";
    if (s.toolkit && !s.driver && s.nvidia_module)
        return "NVIDIA's driver is in the kernel but its libcuda.so.1 is not here: start the container with --gpus all";
    if (s.toolkit && !s.driver) return "there is no NVIDIA driver here; with a GPU, install one until nvidia-smi works";
    if (s.driver_too_old)
        return format_text(
            "the NVIDIA driver knows CUDA %s at most and this program was built with CUDA %s: update the driver, or "
            "build again with a toolkit of CUDA %d (make NVCC=.../nvcc)",
            cuda_version_text(s.driver).c_str(), cuda_version_text(s.toolkit).c_str(), s.driver / 1000);
    return "CUDA finds no GPU: " + s.error;
}
