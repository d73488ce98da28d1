// device.h: what a rank computes on: which engine, which GPU, how many threads, and why. Used by the verbs in
// train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../base/gpu_search.h"
#include "../base/host.h"
#include "../base/processor.h"
#include "options.h"
#include "world.h"

// What a run computes on, chosen at its start.
struct Device {
    bool gpu = false;
    int gpu_number = 0;     // among those that the rank sees: its own if the launcher has given it one
    bool cpu_bf16 = false;  // the CPU engine rounds the inputs of its matrix products to bf16
    int threads = 1;
    std::string attention_kernel;  // of the engine for devices
    std::string reason;
    std::string idle;   // what to say of processors that the launcher keeps from all ranks of this machine
    EngineInfo engine;  // the one for devices, whether it is in use or not
};

// How many of its machine's processors a rank takes: its share, or all of those that the launcher has bound it to. All
// ranks call it, since they tell each other which they may use.
int count_threads(const World& world);

// --resume on another machine: options of the run that this one cannot honour give way, and the reason is kept
// for the line that says so. What was given with --resume is refused instead. share: this rank's processors.
void drop_unsupported_options(Config& c, int share, const GpuSearch& gpus);

// The device of this rank. All ranks call it.
Device choose_device(const MachineConfig& c, const World& world, const GpuSearch& gpus);

// How gradients get from rank to rank.
struct GradientPath {
    bool by_nccl = false;
    std::string text;  // for the run's first lines
};

// All ranks call it. gpu: its name and bus, such as "GPU 0 (NVIDIA H200)" and "0000:4b:00.0"; "" on a CPU.
GradientPath choose_path(World& world, const EngineInfo& engine, const std::string& gpu, const std::string& bus);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "device.cpp"
#endif
