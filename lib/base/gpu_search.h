// gpu_search.h: what an engine for devices says of itself before one is opened, what a search for devices met, and in
// words why it found none. Each such engine has info() and search(); train_nsa.cu knows which one this build holds.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "files.h"
#include "text.h"

// What --device may be. A build for another engine than CUDA has -DENGINE=NAME.
#ifdef ENGINE
#define DEVICE_CHOICES "auto|cpu|cuda|" QUOTED_VALUE(ENGINE)
#else
#define DEVICE_CHOICES "auto|cpu|cuda"
#endif

// Names of libraries and their versions; "" is left out.
using Versions = std::vector<std::pair<const char*, std::string>>;

// By default that of a build without such an engine, whose users may expect CUDA.
struct EngineInfo {
    std::string option = "cuda", name = "CUDA";  // what --device calls it, and sentences
    std::string device = "GPU";                  // one of its devices
    std::string format;                          // of products; "": there is no such engine in this build
    std::string collective;                      // what sums gradients between its devices, such as "NCCL"; "": MPI
    std::string no_collective;                   // why nothing does: "this build has no NCCL"
    std::vector<std::string> attention_kernels = {};  // what --attention-kernel may name; none: no choice

    bool has_attention_kernel(const std::string& name) const {
        return std::count(attention_kernels.begin(), attention_kernels.end(), name) > 0;
    }
};

// What a search for devices met. CUDA's versions are its own numbers, such as 12040 for 12.4; 0: there is none.
struct GpuSearch {
    EngineInfo engine;
    int count = 0;                    // of the devices that this process sees
    int current = 0;                  // which is in use already: by NCCL, where it brought the ranks together
    std::vector<std::string> places;  // which tell them apart, such as PCI addresses; none where they are unknown
    bool by_auto = true;              // --device auto takes them: they are faster than the processor
    std::string why;                  // in the engine's own words: why there are none, or why auto takes none
    bool nvidia_module = false;       // NVIDIA's driver is in the kernel, so there is a GPU
    int toolkit = 0, driver = 0;      // the CUDA that this build was made with, and the latest that the driver knows
    bool driver_too_old = false;      // as CUDA says
    bool broken = false;              // there are GPUs, and none can be used as they are now
    std::string error;                // CUDA's own text
};

// A container may hide /proc/driver. That there is a device file says nothing: CUDA makes one where no driver is.
inline bool has_nvidia_module() {
    const int device = open("/dev/nvidiactl", O_RDONLY | O_CLOEXEC);
    if (device >= 0) close(device);
    return device >= 0 || file_exists("/proc/driver/nvidia/version");
}

// "12.4"; "none" for 0.
inline std::string cuda_version_text(int v) { return v ? format_text("%d.%d", v / 1000, v % 1000 / 10) : "none"; }

// Why no GPU was found, and what helps: a driver that is missing and one that is too old are one error to CUDA.
inline std::string why_no_gpu(const GpuSearch& s) {
    if (!s.why.empty()) return s.why;
    const bool has_engine = !s.engine.format.empty();
    if (!has_engine && s.nvidia_module)
        return "there is an NVIDIA GPU but this program was built without nvcc: put the CUDA toolkit's nvcc on PATH "
               "and run make again";
    if (!has_engine) return "this build holds no CUDA engine";
    if (s.toolkit && !s.driver && s.nvidia_module)
        return "NVIDIA's driver is in the kernel but its libcuda.so.1 is not here: start the container with --gpus all";
    if (s.toolkit && !s.driver) return "there is no NVIDIA driver here; with a GPU, install one until nvidia-smi works";
    if (s.driver_too_old)
        return format_text(
            "the NVIDIA driver knows CUDA %s at most and this program was built with CUDA %s: update the driver, or "
            "build again with a toolkit of CUDA %d (make NVCC=.../nvcc)",
            cuda_version_text(s.driver), cuda_version_text(s.toolkit), s.driver / 1000);
    return s.engine.name + " finds no GPU: " + s.error;
}
