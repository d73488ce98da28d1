// memory.h: what the limits of a process and of its container leave it, and memory that begins at a cache line. Used by
// the engines, host.h, program_end.h and lib/run/world.h.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "errors.h"
#include "system.h"

// What the control groups of this process (the limits of a container or a Slurm job; of version 2, or of version 1,
// which has a tree for each kind of limit) leave it: bytes of memory that it can still allocate, counting file pages
// that the kernel would give back, and processors. Infinity where there is no limit.
struct ResourceLimits {
    double bytes = std::numeric_limits<double>::infinity(), processors = std::numeric_limits<double>::infinity();
};
inline ResourceLimits cgroup_limits(const std::string& root = "/sys/fs/cgroup",
                                    const std::string& own_group = "/proc/self/cgroup") {
    ResourceLimits limits;
    const auto limit_memory = [&](const std::string& max_file, const std::string& current_file,
                                  const std::string& statistics_file, const std::string& prefix) {
        double most, current;
        if (!(std::ifstream(max_file) >> most && std::ifstream(current_file) >> current)) return;
        std::ifstream statistics(statistics_file);
        std::string key;
        for (double value; statistics >> key >> value;)
            if (key == prefix + "active_file" || key == prefix + "inactive_file") current -= value;
        limits.bytes = std::min(limits.bytes, std::max(0.0, most - current));
    };
    // without a limit version 2 says max, which is no number, and version 1 says -1
    const auto limit_processors = [&](double quota, double period) {
        if (quota > 0 && period > 0) limits.processors = std::min(limits.processors, quota / period);
    };
    std::ifstream groups(own_group);
    for (std::string line; std::getline(groups, line);) {  // 0::/group, or 4:cpu,cpuacct:/group
        const size_t kinds_at = line.find(':') + 1, group_at = line.find(":/") + 1;
        if (kinds_at == 0 || group_at < kinds_at + 1) continue;
        const std::string kinds = line.substr(kinds_at, group_at - 1 - kinds_at);
        const bool has_memory = ("," + kinds + ",").find(",memory,") != std::string::npos,
                   has_processors = ("," + kinds + ",").find(",cpu,") != std::string::npos;
        // this group, then every group above it; in a container the names may be those outside, and it sees the root
        for (std::string group = line.substr(group_at);; group.erase(group.rfind('/'))) {
            if (group == "/") group.clear();
            const std::string folder = root + (kinds.empty() ? "" : "/" + kinds) + group + "/";
            double quota = 0, period = 0;
            if (kinds.empty())
                limit_memory(folder + "memory.max", folder + "memory.current", folder + "memory.stat", "");
            if (kinds.empty() && std::ifstream(folder + "cpu.max") >> quota >> period) limit_processors(quota, period);
            if (has_memory)
                limit_memory(folder + "memory.limit_in_bytes", folder + "memory.usage_in_bytes", folder + "memory.stat",
                             "total_");
            for (const std::string& tree : {kinds, std::string("cpu")}) {
                const std::string cpu = root + "/" + tree + group + "/cpu.cfs_";
                if (has_processors && std::ifstream(cpu + "quota_us") >> quota &&
                    std::ifstream(cpu + "period_us") >> period)
                    limit_processors(quota, period);
            }
            if (group.empty()) break;
        }
    }
    return limits;
}

// What the machine has left for each of so many processes, and the container and the limit of this process allow;
// infinity where none of them is known.
inline double host_bytes_available(int processes = 1) {
    double pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const double addresses = address_limit() - pages * double(sysconf(_SC_PAGESIZE));
    return std::min(std::min(system_bytes_available(), cgroup_limits().bytes) / processes, std::max(0.0, addresses));
}

// At least so many bytes that begin at a cache line, for std::free; null if there is no memory. Many of them are asked
// of Linux in pages of 2 MiB: a matrix product that walks down its columns meets a new small page in every row.
inline void* aligned_memory(size_t bytes) {
    constexpr size_t huge = size_t(2) << 20;
    const size_t line = bytes < 4 * huge ? 64 : huge, size = (bytes + line - 1) / line * line;
    void* const data = std::aligned_alloc(line, size);
#ifdef MADV_HUGEPAGE
    if (data && line == huge) madvise(data, size, MADV_HUGEPAGE);  // no harm where it is refused
#endif
    return data;
}

// A std::vector that begins at a cache line: loads and stores of whole vector registers in it cross none.
template <class T>
struct CacheLines {
    using value_type = T;
    CacheLines() = default;
    template <class U>
    CacheLines(const CacheLines<U>&) {}
    T* allocate(size_t count) {
        if (void* const data = aligned_memory(count * sizeof(T))) return static_cast<T*>(data);
        throw std::bad_alloc();
    }
    void deallocate(T* data, size_t) { std::free(data); }
    bool operator==(const CacheLines&) const { return true; }
    bool operator!=(const CacheLines&) const { return false; }
};
template <class T>
using AlignedVector = std::vector<T, CacheLines<T>>;

// Memory that only grows. What it holds is valid until the next get().
template <class T>
class Workspace {
  public:
    T* get(size_t count) {
        if (count > capacity) {
            data.reset();
            data.reset(static_cast<T*>(aligned_memory(count * sizeof(T) + 64)));
            if (!data)
                fail("out of memory: %.1f MiB of scratch were asked for%s", double(count * sizeof(T)) / (1 << 20),
                     memory_limit_text());
            capacity = count;
        }
        return data.get();
    }

  private:
    std::unique_ptr<T, void (*)(void*)> data{nullptr, std::free};
    size_t capacity = 0;
};
