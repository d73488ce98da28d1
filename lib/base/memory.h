// memory.h: what the limits of a process leave it (ulimit -v), and errors that say so where there is no
// memory left. Used by the engines and by errors.h.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "system.h"
#include "util.h"

// Bytes of addresses that this process may have (ulimit -v); infinity where there is no limit.
inline double address_limit() {
    struct rlimit r;
    const bool limited = getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY;
    return limited ? double(r.rlim_cur) : std::numeric_limits<double>::infinity();
}

inline bool memory_is_limited() { return address_limit() < std::numeric_limits<double>::infinity(); }

// "; the process is limited to 300 MiB (ulimit -v)", or "".
inline std::string memory_limit_text() {
    if (!memory_is_limited()) return "";
    return format_text("; the process is limited to %.0f MiB (ulimit -v)", address_limit() / (1 << 20));
}

// What went wrong, in words that the standard library does not have.
inline std::string error_text(const std::exception& e) {
    if (dynamic_cast<const std::bad_alloc*>(&e)) return "out of memory" + memory_limit_text();
    return *e.what() ? e.what() : "an exception without text";
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
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { std::free(data); }
    T* get(size_t count) {
        if (count > capacity) {
            std::free(data);
            data = static_cast<T*>(aligned_memory(count * sizeof(T) + 64));
            if (!data)
                fail("out of memory: %.1f MiB of scratch were asked for%s", double(count * sizeof(T)) / (1 << 20),
                     memory_limit_text().c_str());
            capacity = count;
        }
        return data;
    }

  private:
    T* data = nullptr;
    size_t capacity = 0;
};
