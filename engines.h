// engines.h: the engines of this build: Cpu, and at most one for devices. This is the one place that asks which. What
// an engine has to have is in lib/model/engine.h; its info() and search() give names, refusals and remedies to the rest
// of the program (lib/base/gpu_search.h). A port lies in dev/ports/NAME, and make GPU=NAME builds with -DENGINE=NAME.
#pragma once
#include <type_traits>

#include "lib/base/gpu_search.h"
#include "nsa_cpu.h"

#if defined(USE_CUDA)  // HIP too
#include "nsa_kernels.cuh"
using DeviceEngine = Cuda;
#elif defined(ENGINE)
#include <port.h>  // of dev/ports/NAME; defines DeviceEngine
#else
using DeviceEngine = void;
#endif

template <class Dev = DeviceEngine>
EngineInfo device_engine() {
    if constexpr (std::is_void<Dev>::value) return {};
    else return Dev::info();
}
template <class Dev = DeviceEngine>
GpuSearch search_gpus() {
    GpuSearch none;
    none.nvidia_module = has_nvidia_module();
    if constexpr (std::is_void<Dev>::value) return none;
    else return Dev::search();
}
template <class Dev = DeviceEngine>
Versions device_versions() {
    if constexpr (std::is_void<Dev>::value) return {};
    else return Dev::versions();
}
