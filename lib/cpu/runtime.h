// runtime.h: struct HostRuntime, what struct Cpu (nsa_cpu.h) has of memory and copies, with the names of
// CudaRuntime (lib/cuda/runtime.cuh). It knows nothing of the model.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../base/memory.h"
#include "../base/processor.h"
#include "../base/errors.h"

struct HostRuntime {
    static constexpr bool on_host = true;
    static constexpr unsigned steps_ahead = 0;
    static constexpr size_t peak_bytes = 0;  // the host's memory is not the engine's own
    bool poison = false;                     // for tests: fresh memory holds NaN, so that reading it unwritten shows

    // `count` elements, 64-byte aligned; fatal if there is no memory.
    template <class T>
    T* allocate(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;
        void* p = aligned_memory(bytes);
        if (!p)
            fail("out of memory: %.1f MiB were asked for%s; choose a smaller --batch or --seq-len",
                 double(bytes) / (1 << 20), memory_limit_text());
        if (poison) std::memset(p, 0xFF, bytes);
        return static_cast<T*>(p);
    }
    void release(void* p) { std::free(p); }
    double available_bytes(int processes = 1) const { return host_bytes_available(processes); }
    template <class T>
    void zero(T* p, size_t count) {
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < count; i++) p[i] = T(0);
    }
    // Tokens to the engine, and numbers back, received later in the same order. Another device works on meanwhile.
    void upload(int32_t* out, const int32_t* in, size_t count) { std::memcpy(out, in, count * sizeof(int32_t)); }
    void send(const double* numbers, size_t count) { sent.push_back({numbers, numbers + count}); }
    std::vector<double> receive() {
        const std::vector<double> oldest = sent.front();
        sent.erase(sent.begin());
        return oldest;
    }
    // Bytes as they are. Cpu, which knows its format, has to_host and from_host, between its numbers and fp32.
    template <class T>
    void copy(T* out, const T* in, size_t count) {
        std::memcpy(out, in, count * sizeof(T));
    }

    // What sums gradients over the ranks in the host's memory finds them there already; a device has copies to make.
    struct HostCopies {
        HostCopies(HostRuntime&, size_t) {}
        template <class T>
        T* host_side(T* p, size_t) {
            return p;
        }
        template <class T>
        void fetch(T*, const T*, size_t, size_t) {}
        bool has(size_t) const { return true; }
        template <class T>
        void put(T*, const T*, size_t) {}
    };

  private:
    std::vector<std::vector<double>> sent;
};

// While it lives, a CPU decodes on one thread for every 32 M weights. With more, a loop over a single position would be
// over before the others have woken up.
struct DecodingThreads {
    const int before = omp_get_max_threads();
    explicit DecodingThreads(size_t weights) {
        omp_set_num_threads(int(std::max<size_t>(1, std::min(size_t(before), weights >> 25))));
    }
    ~DecodingThreads() { omp_set_num_threads(before); }
};
