// system.h: what Linux and macOS know of a process and its machine under different names. Used by memory.h, host.h,
// program_end.h, lib/cuda/runtime.cuh, and in lib/run heartbeat.h, machine.h and run_printer.h. macOS: compiled and
// linked, never run.
#pragma once
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#ifdef __APPLE__
#include <crt_externs.h>
#include <mach-o/dyld.h>
#include <mach/mach.h>
#include <sys/sysctl.h>
#else
#include <malloc.h>
#include <sched.h>
#endif

// The numbers of the processors that a process may use, 0: this one; macOS binds no process to some.
inline std::vector<int> processors_allowed([[maybe_unused]] int process = 0) {
    std::vector<int> allowed;
#ifdef __APPLE__
    for (int i = 0; i < int(sysconf(_SC_NPROCESSORS_ONLN)); i++) allowed.push_back(i);
#else
    for (size_t sets = 1; sets <= 64 && allowed.empty(); sets *= 2) {  // of 1024 processors each
        std::vector<cpu_set_t> set(sets);
        const size_t bytes = sets * sizeof(cpu_set_t);
        if (sched_getaffinity(process, bytes, set.data()) != 0) continue;
        for (size_t i = 0; i < sets * CPU_SETSIZE; i++)
            if (CPU_ISSET_S(i, bytes, set.data())) allowed.push_back(int(i));
    }
#endif
    return allowed;
}

// What the running kernel calls itself; "" where it does not.
inline std::string boot_id() {
    std::string id;
#ifdef __APPLE__
    char text[64] = "";
    size_t size = sizeof text;
    if (sysctlbyname("kern.bootsessionuuid", text, &size, nullptr, 0) == 0) id = text;
#else
    std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
#endif
    return id;
}

// The file of the running program; "" where the system does not say.
inline std::string program_path() {
#ifdef __APPLE__
    char path[4096];
    uint32_t size = sizeof path;
    return _NSGetExecutablePath(path, &size) == 0 ? path : "";
#else
    std::error_code error;
    return std::filesystem::read_symlink("/proc/self/exe", error).string();
#endif
}

// The words of the command, as they were given.
inline std::vector<std::string> command_words() {
    std::vector<std::string> words;
#ifdef __APPLE__
    words.assign(*_NSGetArgv(), *_NSGetArgv() + *_NSGetArgc());
#else
    std::ifstream in("/proc/self/cmdline", std::ios::binary);
    for (std::string word; std::getline(in, word, '\0');) words.push_back(word);
#endif
    return words;
}

// Bytes that the system could give out now; of macOS, all that the machine has. Infinity where it does not say.
inline double system_bytes_available() {
    double available = std::numeric_limits<double>::infinity();
#ifdef __APPLE__
    uint64_t bytes = 0;
    size_t size = sizeof bytes;
    if (sysctlbyname("hw.memsize", &bytes, &size, nullptr, 0) == 0) available = double(bytes);
#else
    std::ifstream in("/proc/meminfo");
    std::string key, rest;
    for (double kib; in >> key >> kib && std::getline(in, rest);)
        if (key == "MemAvailable:") available = kib * 1024;
#endif
    return available;
}

// Bytes of memory that the process has now; 0 where the system does not say.
inline double resident_bytes() {
#ifdef __APPLE__
    mach_task_basic_info info;
    mach_msg_type_number_t size = MACH_TASK_BASIC_INFO_COUNT;
    const auto to = reinterpret_cast<task_info_t>(&info);
    return task_info(mach_task_self(), MACH_TASK_BASIC_INFO, to, &size) == KERN_SUCCESS ? double(info.resident_size)
                                                                                        : 0;
#else
    std::FILE* f = std::fopen("/proc/self/statm", "r");
    long long size = 0, resident = 0;
    const bool read = f && std::fscanf(f, "%lld %lld", &size, &resident) == 2;
    if (f) std::fclose(f);
    return read ? double(resident) * double(sysconf(_SC_PAGESIZE)) : 0;
#endif
}

// The most that it ever had.
inline double peak_resident_bytes() {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
    return double(usage.ru_maxrss);
#else
    return double(usage.ru_maxrss) * 1024;
#endif
}

// glibc's heap for each thread reserves 64 MiB, which count as taken where memory is limited.
inline void share_one_heap() {
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, 1);
#endif
}
