// machine.h: what a start of the program runs on: its build, the ranks, the device and engine of this one. It is found
// out once, by with_engine() in train_nsa.cu; --version, `check`, a run's first lines and log.jsonl say it.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <sys/utsname.h>

#include "device.h"
#include "../base/files.h"
#include "../base/json.h"
#include "../base/system.h"
#include "../base/text.h"
#include "world.h"

struct Build {
    std::string version, compiler;
    std::string mpi;    // the name and version of the MPI library; "": none
    EngineInfo engine;  // the one for devices
};

struct Machine {
    const World& world;
    const Device& device;
    Build build = {};
    std::string engine = "";  // what the one in use says of itself
    double peak_flops = 0;    // of its products; 0: unknown
    Versions libraries = {};  // of the engine for devices
    GradientPath path = {};
};

// --version: one line each.
inline void print_version(const Build& build) {
    const EngineInfo& engine = build.engine;
    print("train_nsa %s\ncompiler: %s\n", build.version, build.compiler);
    std::string engines = "CPU";
    if (!engine.format.empty()) engines += ", " + engine.name + " (" + engine.format + ")";
    print("engines: %s\n", engines);
    if (!engine.attention_kernels.empty())
        print("attention kernels: %s\n", joined_words(engine.attention_kernels, ", "));
    if (!build.mpi.empty()) print("MPI: %s; under Slurm srun --mpi=%s\n", build.mpi, choose_pmi(build.mpi));
}

// The first line of a file of the system that holds `name`, from there on; "" if there is none.
inline std::string system_line(const char* path, const std::string& name) {
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);)
        if (const size_t at = line.find(name); at != std::string::npos) return line.substr(at);
    return "";
}

inline std::string processor_name() {
    const std::string line = system_line("/proc/cpuinfo", "model name");
    const size_t at = line.find(": ");
    return at == std::string::npos ? "unknown" : line.substr(at + 2);
}

// What log.jsonl says of this start of the program.
inline Json start_record(const Machine& machine) {
    const World& world = machine.world;
    const std::string driver = system_line("/proc/driver/nvidia/version", "NVIDIA");
    struct utsname system = {};
    uname(&system);
    std::error_code error;
    Json hosts(Json::Object), versions(Json::Object), command(Json::Array);
    for (const std::string& name : world.hosts)
        if (!hosts.find(name)) hosts.add(name, std::count(world.hosts.begin(), world.hosts.end(), name));
    if (!machine.build.mpi.empty()) versions.add("MPI", machine.build.mpi);
    for (const auto& [name, version] : machine.libraries)
        if (!version.empty()) versions.add(name, version);
    for (const std::string& word : command_words()) command.items.emplace_back(word);
    return {{"version", machine.build.version},
            {"compiler", machine.build.compiler},
            {"libraries", versions},
            {"device", machine.engine},
            {"processor", processor_name()},
            {"driver", driver.empty() ? Json() : Json(driver)},
            {"system", std::string(system.sysname) + " " + system.release + " " + system.machine},
            {"ranks", world.size},
            {"launcher", world.launcher},
            {"hosts", hosts},
            {"folder", std::filesystem::current_path(error).string()},
            {"command", command}};
}
