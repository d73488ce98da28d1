// memory.h: what the limits of a process leave it (ulimit -v, ulimit -d), and errors that say so where there is no
// memory left. Used by the engines and by errors.h.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

struct MemoryLimit {
    int resource;      // of getrlimit
    int field;         // of /proc/self/statm: what counts against it, in pages
    const char* name;  // as the shell calls it
};
constexpr MemoryLimit MEMORY_LIMITS[] = {{RLIMIT_AS, 0, "ulimit -v"}, {RLIMIT_DATA, 5, "ulimit -d"}};

// Bytes of a limit; infinity where there is none.
inline double limit_bytes(const MemoryLimit& limit) {
    struct rlimit r;
    const bool limited = getrlimit(limit.resource, &r) == 0 && r.rlim_cur != RLIM_INFINITY;
    return limited ? double(r.rlim_cur) : std::numeric_limits<double>::infinity();
}

// Bytes of this process, by a field of /proc/self/statm.
inline double own_bytes(int field) {
    double pages[6] = {};
    std::ifstream statm("/proc/self/statm");
    for (double& p : pages) statm >> p;
    return pages[field] * double(sysconf(_SC_PAGESIZE));
}

// Bytes that the limits leave this process; infinity where there are none.
inline double limits_leave() {
    double left = std::numeric_limits<double>::infinity();
    for (const MemoryLimit& limit : MEMORY_LIMITS) left = std::min(left, limit_bytes(limit) - own_bytes(limit.field));
    return std::max(0.0, left);
}

// What the machine has left for each of so many processes, and the container and the limits of this process allow;
// infinity where none of them is known.
inline double host_bytes_available(int processes = 1) {
    return std::min(std::min(system_bytes_available(), cgroup_limits().bytes) / processes, limits_leave());
}

// "; the process is limited to 300 MiB (ulimit -v)", or "". Takes no memory. to: of at least 80 bytes.
inline void describe_limit(char* to, size_t size) {
    to[0] = '\0';
    for (const MemoryLimit& limit : MEMORY_LIMITS)
        if (const double bytes = limit_bytes(limit); !to[0] && bytes < 1e15)
            std::snprintf(to, size, "; the process is limited to %.0f MiB (%s)", bytes / (1 << 20), limit.name);
}
inline std::string memory_limit_text() {
    char text[100];
    describe_limit(text, sizeof text);
    return text;
}

// What operator new throws, see errors.h. Its text is made without memory, because there is none.
class OutOfMemory : public std::bad_alloc {
    char text[200];

  public:
    explicit OutOfMemory(size_t bytes) {
        char limit[100];
        describe_limit(limit, sizeof limit);
        std::snprintf(text, sizeof text, "out of memory: %.3f MiB were asked for%s", double(bytes) / (1 << 20), limit);
    }
    const char* what() const noexcept override { return text; }
};

// Is there a limit that an allocation can meet? (Without one the kernel ends a process instead.)
inline bool memory_is_limited() {
    static const bool limited = [] {
        int overcommit = 0;
        std::ifstream("/proc/sys/vm/overcommit_memory") >> overcommit;
        return overcommit == 2 || limit_bytes(MEMORY_LIMITS[0]) < 1e15 || limit_bytes(MEMORY_LIMITS[1]) < 1e15;
    }();
    return limited;
}

// Fails unless this much memory could be had now. For libraries that end the program by a signal where there is none.
inline void require_memory_left(size_t bytes, const char* what) {
    if (!memory_is_limited()) return;
    void* const room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        fail("out of memory: %s needs up to %zu MiB%s", what, bytes >> 20, memory_limit_text().c_str());
    munmap(room, bytes);
}

// At least so many bytes that begin at a cache line, for std::free; null if there is no memory.
inline void* aligned_memory(size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }

// A std::vector that begins at a cache line: loads and stores of whole vector registers in it cross none.
template <class T>
struct CacheLines {
    using value_type = T;
    CacheLines() = default;
    template <class U>
    CacheLines(const CacheLines<U>&) {}
    T* allocate(size_t count) {
        if (void* const data = aligned_memory(count * sizeof(T))) return static_cast<T*>(data);
        throw OutOfMemory(count * sizeof(T));
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
