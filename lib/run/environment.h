// environment.h: what a start of the program ran on: build, libraries, machine, ranks and command. run.json keeps one
// record for each start and resume. Used by train_nsa.cu.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <sys/utsname.h>
#include <unistd.h>

#include "build_info.h"
#include "../base/files.h"
#include "../base/json.h"
#include "../base/system.h"
#include "../base/util.h"
#include "world.h"

extern char** environ;

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

// The environment variables that change how a run goes.
inline Json variables() {
    std::map<std::string, std::string> found;
    for (char** e = environ; *e; e++) {
        const std::string variable = *e;
        const size_t equals = std::min(variable.find('='), variable.size());
        for (const char* beginning :
             {"OMP_", "GOMP_", "KMP_", "NCCL_", "CUDA_", "MPICH_", "UCX_", "FI_", "SLURM_JOB_ID", "SLURM_NNODES"})
            if (variable.compare(0, std::strlen(beginning), beginning) == 0)
                found.emplace(variable.substr(0, equals), variable.substr(std::min(equals + 1, variable.size())));
    }
    Json all(Json::Object);
    for (const auto& [name, value] : found) all.add(name, value);
    return all;
}

// The versions of the libraries in this build. of_engine: those of the device engine's.
inline Versions library_versions(const Versions& of_engine) {
    Versions all = {{"MPI", mpi_name()}};
    all.insert(all.end(), of_engine.begin(), of_engine.end());
    return all;
}

// engine: what the one in use says of itself; step: from which the run goes on.
inline std::string environment_json(const World& world, const std::string& engine, const Versions& libraries,
                                    int64_t step) {
    const std::string driver = system_line("/proc/driver/nvidia/version", "NVIDIA");
    struct utsname system = {};
    uname(&system);
    std::error_code error;
    Json hosts(Json::Object), versions(Json::Object), command(Json::Array);
    for (const std::string& name : world.hosts)
        if (!hosts.find(name)) hosts.add(name, std::count(world.hosts.begin(), world.hosts.end(), name));
    for (const auto& [name, version] : libraries)
        if (!version.empty()) versions.add(name, version);
    for (const std::string& word : command_words()) command.items.emplace_back(word, true);  // paths may have any bytes
    // git describe and whether the tree had changes, of a version like 0.2.0-1234567-dirty.
    const std::string version = version_text(), clean = version.substr(0, version.rfind("-dirty"));
    const size_t dash = clean.find('-');
    return Json{{"time", utc_text("%Y-%m-%dT%H:%M:%SZ", unix_time())},
                {"step", step},
                {"version", version},
                {"git", dash == std::string::npos ? Json() : Json(clean.substr(dash + 1))},
                {"dirty", clean != version},
                {"compiler", compiler_name()},
                {"flags", compiler_flags()},
                {"libraries", versions},
                {"engine", engine},
                {"processor", processor_name()},
                {"driver", driver.empty() ? Json() : Json(driver)},
                {"system", std::string(system.sysname) + " " + system.release + " " + system.machine},
                {"ranks", world.size},
                {"launcher", world.launcher},
                {"hosts", hosts},
                {"variables", variables()},
                {"folder", Json(std::filesystem::current_path(error).string(), true)},
                {"command", command}}
        .to_text();
}
