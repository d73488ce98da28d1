// build_info.h: what this program was built from and with. The objects of lib/run do not include it: the Makefile does
// not tell them the version.
#pragma once
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../base/text.h"
#include "machine.h"
#ifdef USE_MPI
#include <mpi.h>
#endif

// The Makefile gives PROGRAM_VERSION to the program alone, so that tests need not be built again at each commit.
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

// engine: the one for devices.
inline Build this_build(const EngineInfo& engine) { return {version_text(), compiler_name(), mpi_name(), engine}; }
