// environment.h: what a start of the program ran on: build, libraries, machine, ranks and command. run.json keeps one
// record for each start and resume. Used by train_nsa.cu.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <sys/utsname.h>
#include <unistd.h>

#include "build_info.h"
#include "checkpoint.h"
#include "../base/files.h"
#include "../base/json.h"
#include "../base/system.h"
#include "../base/util.h"
#include "world.h"

extern char** environ;

using Facts = std::vector<std::pair<std::string, std::string>>;  // names, and values as JSON

inline std::string facts_json(const Facts& facts) {
    std::string text;
    for (const auto& [name, value] : facts) text += (text.empty() ? "{" : ", ") + json_quote(name) + ": " + value;
    return text.empty() ? "{}" : text + "}";
}

inline std::string words_json(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "[" : ", ") + json_quote(word);
    return text.empty() ? "[]" : text + "]";
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

// The environment variables that change how a run goes.
inline Facts variables() {
    Facts found;
    for (char** e = environ; *e; e++) {
        const std::string variable = *e;
        const size_t equals = std::min(variable.find('='), variable.size());
        for (const char* beginning :
             {"OMP_", "GOMP_", "KMP_", "NCCL_", "CUDA_", "MPICH_", "UCX_", "FI_", "SLURM_JOB_ID", "SLURM_NNODES"})
            if (variable.compare(0, std::string(beginning).size(), beginning) == 0)
                found.emplace_back(variable.substr(0, equals),
                                   json_quote(variable.substr(std::min(equals + 1, variable.size()))));
    }
    std::sort(found.begin(), found.end());
    return found;
}

// The versions of the libraries in this build. of_engine: those of the device engine's.
inline Versions library_versions(const Versions& of_engine) {
    Versions all = {{"MPI", mpi_name()}};
    all.insert(all.end(), of_engine.begin(), of_engine.end());
    return all;
}
inline Facts list_versions(const Versions& versions) {
    Facts found;
    for (const auto& [name, version] : versions)
        if (!version.empty()) found.emplace_back(name, json_quote(version));
    return found;
}

// Takes a version like 0.2.0-1234567-dirty apart: what git describe said, and whether the tree had changes.
inline Facts split_version(const std::string& version) {
    const std::string dirty = "-dirty";
    const bool is_dirty = version.size() > dirty.size() && version.substr(version.size() - dirty.size()) == dirty;
    const std::string clean = version.substr(0, version.size() - (is_dirty ? dirty.size() : 0));
    const size_t dash = clean.find('-');
    return {{"git", dash == std::string::npos ? "null" : json_quote(clean.substr(dash + 1))},
            {"dirty", is_dirty ? "true" : "false"}};
}

// engine: what the one in use says of itself; checkpoint: the one that the run goes on from, or "".
inline std::string environment_json(const World& world, const std::string& engine, const Versions& libraries,
                                    const std::string& checkpoint) {
    const std::string driver = system_line("/proc/driver/nvidia/version", "NVIDIA");
    struct utsname system = {};
    uname(&system);
    std::error_code error;
    Facts hosts;  // ranks of each
    for (const std::string& name : world.hosts) {
        const auto known = std::find_if(hosts.begin(), hosts.end(), [&](const auto& h) { return h.first == name; });
        if (known == hosts.end()) hosts.emplace_back(name, "1");
        else known->second = std::to_string(std::atoi(known->second.c_str()) + 1);
    }
    const Facts commit = split_version(version_text());
    const Facts facts = {
        {"time", json_quote(utc_text("%Y-%m-%dT%H:%M:%SZ", unix_time()))},
        {"step", std::to_string(std::max<int64_t>(0, parse_step(name_of(checkpoint))))},
        {"version", json_quote(version_text())},
        commit[0],
        commit[1],
        {"compiler", json_quote(compiler_name())},
        {"flags", json_quote(compiler_flags())},
        {"libraries", facts_json(list_versions(libraries))},
        {"engine", json_quote(engine)},
        {"processor", json_quote(processor_name())},
        {"driver", driver.empty() ? "null" : json_quote(driver)},
        {"system", json_quote(std::string(system.sysname) + " " + system.release + " " + system.machine)},
        {"ranks", std::to_string(world.size)},
        {"launcher", json_quote(world.launcher)},
        {"hosts", facts_json(hosts)},
        {"variables", facts_json(variables())},
        {"folder", json_quote(std::filesystem::current_path(error).string())},
        {"command", words_json(command_words())}};
    return facts_json(facts);
}
