// build_info.h: what this program was built from and with. Used by lib/verbs/check.h and --version.
#pragma once
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../base/background.h"
#include "../base/embed.h"
#include "../base/files.h"
#include "../base/gpu_search.h"
#include "../base/processor.h"
#include "../base/util.h"
#ifdef USE_MPI
#include <mpi.h>
#endif

// The Makefile gives PROGRAM_VERSION to the program alone, so that tests need not be built again at each commit.
#ifdef PROGRAM_VERSION
EMBED_FILE(command, QUOTED_VALUE(BUILD_FOLDER) "/command")  // in which the Makefile keeps how it compiles
#endif
inline std::string compiler_flags() {
#ifdef PROGRAM_VERSION
    std::string line(file_command, file_command_end);
    return line.substr(0, line.find('\n'));
#else
    return "unknown";
#endif
}
#ifndef PROGRAM_VERSION
#define PROGRAM_VERSION unknown
#endif
inline const char* version_text() { return QUOTED_VALUE(PROGRAM_VERSION); }

inline std::string compiler_name() {
#if defined(__NVCC__)
    return format_text("nvcc %d.%d over g++ %s", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, __VERSION__);
#elif defined(__HIP__)
    return std::string("hipcc, ") + __VERSION__;
#elif defined(__clang__)
    return __VERSION__;
#else
    return std::string("g++ ") + __VERSION__;
#endif
}

// The name and version of the MPI library; "" without one.
inline std::string mpi_name() {
#ifdef USE_MPI
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);  // allowed before MPI_Init
    std::string name(text, size_t(length));
    name.erase(std::min(name.find('\n'), name.size()));
    std::replace(name.begin(), name.end(), '\t', ' ');
    return name;
#else
    return "";
#endif
}

inline const char* tick(bool there) { return there ? "\u2713" : "\u2717"; }

// --version: one line each. mpi: the MPI library's name, "" without one; pmi: what Slurm's srun has to offer it.
inline void print_version(const EngineInfo& engine, const std::string& mpi, const std::string& pmi) {
    std::printf("train_nsa %s\ncompiler: %s\n", version_text(), compiler_name().c_str());
    std::string engines = "CPU";
    if (!engine.format.empty()) engines += ", " + engine.name + " (" + engine.format + ")";
    std::printf("engines: %s\n", engines.c_str());
    if (!engine.attention_kernels.empty())
        std::printf("attention kernels: %s\n", joined_words(engine.attention_kernels, ", ").c_str());
    if (!mpi.empty()) std::printf("MPI: %s; under Slurm srun --mpi=%s\n", mpi.c_str(), pmi.c_str());
}

// Prints one more line of the verb `check`.
__attribute__((format(printf, 2, 3))) inline void print_check(bool good, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::printf("%s %s\n", tick(good), printable(format_list(format, args)).c_str());
    va_end(args);
}
