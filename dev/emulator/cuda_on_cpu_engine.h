// cuda_on_cpu_engine.h: the machine behind cuda_on_cpu.h. Top to bottom: state, reports, memory, the threads of a
// block, launches, streams.
//
// Execution model. One operating system thread runs the blocks of a grid one after another. Each CUDA thread of a block
// is a fiber: a stack of its own and a hand-written switch of 5 to 10 ns, where swapcontext makes two system calls and
// real threads take microseconds. Fibers switch only inside barriers and warp functions, so a run is a pure function of
// the seed, and threadIdx and blockIdx can be ordinary globals: `break kernels.cuh:25 if threadIdx.x == 64 &&
// blockIdx.x == 3` works in gdb.
#pragma once
#ifdef __CUDACC__
#error "cuda_on_cpu is for plain C++ compilers; nvcc has the real headers"
#endif
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// The CHECK build: objects are compiled with -fsanitize=thread, so that the compiler announces every access to memory
// by a call of a __tsan function, and linked without it, so that cuda_on_cpu_check.h can be the one that answers.
// EMU_ENGINE marks the emulator's own functions, whose accesses are not the kernel's. EMU_ACCESS announces the accesses
// that those functions make on a kernel's behalf.
#ifdef __SANITIZE_THREAD__
#define EMU_CHECK 1
#define EMU_ENGINE __attribute__((no_sanitize("thread,undefined")))
#define EMU_ACCESS(address, bytes, kind) emu::on_access(address, bytes, emu::Access::kind, __builtin_return_address(0))
#else
#define EMU_ENGINE
#define EMU_ACCESS(address, bytes, kind) (void)0
#endif
#define EMU_NOINLINE __attribute__((noinline))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// Saves the callee-saved registers on the running stack and its pointer in *save, then goes on with the stack that an
// earlier call saved as `load`. A program is one file, so its name need not be known elsewhere.
extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.pushsection .text
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.popsection
)");
#elif defined(__aarch64__)
asm(R"(
.pushsection .text
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.popsection
)");
#else
#error "emu_switch is written for x86-64 and arm64"
#endif

// 10 major + minor of the GPU that is emulated. 8.6, 8.9 and 12.0 have 99 KB of shared memory for a block, 8.0 has 163,
// the others what the emulator has.
#ifndef EMULATED_CAPABILITY
#define EMULATED_CAPABILITY 90
#endif
#if EMULATED_CAPABILITY == 90
#define __CUDA_ARCH_FEAT_SM90_ALL  // kernels are compiled as for sm_90a
#endif

namespace emu {

// ---------------------------------------------------------------------------------------------------------------------
// State.

constexpr int MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / 32;  // of a block
constexpr int HOST = MAX_THREADS;                                // the index of the thread that runs host code
constexpr int MAX_SHARED_ARRAYS = 64;                            // of a block
constexpr int MAX_COPIES = 256;                                  // cp.async that one thread has under way
constexpr size_t MAX_SHARED = 227 * 1024;                        // bytes a block can have on sm_90
#ifdef EMU_CHECK
constexpr size_t STACK_BYTES = 256 * 1024;  // instrumented frames are larger
#else
constexpr size_t STACK_BYTES = 64 * 1024;
#endif
// What fresh memory holds: NaN as bf16 and, twice, as fp32, and no small integer. Arithmetic hands a NaN's bits on, so
// shared memory has others than device memory: an output made from unwritten shared memory is not taken for one that
// was never written.
constexpr unsigned short DEVICE_POISON = 0xFFFE, SHARED_POISON = 0xFFFD;

// A place in the kernel's source. As a default argument, here() is the place of the call.
struct Site {
    const char* file;
    int line;
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    bool operator==(const Site& o) const { return line == o.line && (file == o.file || !strcmp(file, o.file)); }
};

// What a warp function does for all its lanes, once the last of them has arrived; arguments[lane] is what that lane
// brought.
using WarpFunction = void (*)(unsigned lanes, void** arguments);

enum class State : char { READY, AT_BARRIER, AT_WARP_FUNCTION, RETURNED };
enum class Access { READ, WRITE, ATOMIC };
// Of two bytes of device or shared memory; 0 is what a fresh page says.
enum Known : unsigned char { OUTSIDE, UNWRITTEN, WRITTEN };

struct Copy {  // of cp.async: 16 bytes from src, or 16 zeros
    void* dst;
    const void* src;
    bool zeros;
    int group;
};

struct alignas(128) Thread {        // whole cache lines: barriers are 8 % faster
    void* stack_pointer = nullptr;  // of a fiber that does not run
    uint3 index;
    State state;
    Site site;                           // where it waits,
    const char* what;                    // in which function,
    unsigned mask;                       // with which lanes,
    WarpFunction function;               // and what the last of them is to do
    void* argument;                      // with this
    std::vector<Copy> copies;            // in the order of issue
    int group;                           // of cp.async: the one being filled
    std::vector<unsigned> async_fences;  // the interval of each of this block
};

// Of two bytes of shared memory, for wgmma: who wrote them last, as far as the build sees it.
struct SharedCell {
    unsigned interval, fences;       // when, and how many async_fence() that thread had called
    unsigned short thread, readers;  // wgmma under way that read them
};

struct SharedArray {
    const void* key;  // tells the arrays of a block apart
    char* data;
    size_t bytes;
    const char* name;
};

struct Allocation {
    size_t bytes;
    bool live;
};

// Work is queued here and runs at once or, with run_late, no sooner than the program's own synchronisation asks for it.
struct Stream {
    std::deque<std::function<void()>> queue;
    long sent = 0, done = 0;  // pieces of work
};

// Where the running kernel is in time, for the CHECK build. Intervals are numbered; each launch, block and barrier
// begins a new one, so that two accesses of one block can race only within one number.
struct Clock {
    unsigned interval = 2, launch_start = 2, block_start = 2;
    unsigned short warp_syncs[MAX_WARPS];   // how many __syncwarp() each warp has been through
    unsigned short last_sync[MAX_THREADS];  // each thread's last __syncwarp(): its number in the warp
    unsigned last_sync_mask[MAX_THREADS];   // and its lanes
};

struct Machine {
    // The order of threads, blocks and streams is drawn from the seed.
    uint64_t seed = 0, random = 1;
    long launches = 0;
    Clock clock;

    // The running launch.
    const char* kernel = nullptr;
    void (*body)(void*) = nullptr;
    void* body_argument = nullptr;
    size_t dynamic_bytes = 0;

    // The running block.
    Thread* threads = nullptr;  // MAX_THREADS and, last, the host
    int thread_count = 0, current = HOST, at_barrier = 0, returned = 0;
    uint64_t ready[MAX_THREADS / 64];  // bit r: the thread of rank r can run; the lowest rank goes first
    short rank[MAX_THREADS], at_rank[MAX_THREADS];
    unsigned warp_live[MAX_WARPS],
        warp_waiting[MAX_WARPS];  // lanes that have not returned; that are in a warp function
    SharedArray shared[MAX_SHARED_ARRAYS];
    int shared_count = 0;
    size_t shared_used = 0, shared_bytes = 0;  // with and without the gaps between arrays

    // Device memory.
    char *range = nullptr, *range_end = nullptr;
    char* first_live = nullptr;  // no device memory below is in use any more
    int range_opened = 0;
    std::map<const char*, Allocation> allocations;  // by address; freed ones stay, so that a report can name them
    size_t device_bytes = size_t(4) << 30, live_bytes = 0;

    // Approximations are off by as much as a GPU's may be, and an mma's sums are cut off as tensor cores cut them off.
    bool rough = false;

    int capability = EMULATED_CAPABILITY;  // of the GPU, 10 major + minor

    // Streams.
    bool run_late = getenv("EMULATED_LATE") != nullptr;
    Stream default_stream;
    std::vector<Stream*> streams = {&default_stream};

#ifndef EMULATED_GPUS
#define EMULATED_GPUS 1
#endif
    // That the runtime API shows; they share everything. EMULATED_GPUS in the environment: fewer of them.
    int device_count = getenv("EMULATED_GPUS") ? atoi(getenv("EMULATED_GPUS")) : EMULATED_GPUS;
    int device = 0;  // that cudaSetDevice has chosen
};
inline Machine machine;

// Seed 0 runs threads, blocks and streams in the order of their index; other seeds draw the orders.
inline void seed(uint64_t s) { machine.seed = s; }

EMU_ENGINE inline unsigned random_below(unsigned n) {  // xorshift
    uint64_t& r = machine.random;
    r ^= r << 13, r ^= r >> 7, r ^= r << 17;
    return unsigned((r >> 32) * n >> 32);
}

// Of cuda_on_cpu_check.h. In plain builds nothing is known of an access.
#ifdef EMU_CHECK
void on_access(const void* address, size_t bytes, Access kind, const void* return_address);
void set_known(const void* address, size_t bytes, Known known);
void reserve_cells();
void release_cells(const char* address, size_t bytes);
constexpr bool CHECK_BUILD = true;
#else
inline void set_known(const void*, size_t, Known) {}
inline void reserve_cells() {}
inline void release_cells(const char*, size_t) {}
constexpr bool CHECK_BUILD = false;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Reports. A fault ends the process: the fibers cannot be unwound, and no result after it means anything.

EMU_ENGINE inline void print_where() {
    fflush(stdout);
    fprintf(stderr, "cuda_on_cpu: ");
    if (!machine.kernel) return;
    fprintf(stderr, "kernel %s, ", machine.kernel);
    if (machine.current != HOST)
        fprintf(stderr, "block (%u,%u,%u), thread (%u,%u,%u), seed %llu: ", blockIdx.x, blockIdx.y, blockIdx.z,
                threadIdx.x, threadIdx.y, threadIdx.z, (unsigned long long)machine.seed);
}

[[noreturn]] __attribute__((format(printf, 1, 2))) EMU_ENGINE inline void stop(const char* format, ...) {
    print_where();
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

// For faults of synchronisation: says where every thread of the block is, one line for each place.
[[noreturn]] EMU_ENGINE inline void stop_waiting(const char* why) {
    print_where();
    fprintf(stderr, "%s\n", why);
    std::vector<bool> listed(machine.thread_count);
    for (int i = 0; i < machine.thread_count; i++) {
        const Thread& a = machine.threads[i];
        if (listed[i]) continue;
        const bool waits = a.state == State::AT_BARRIER || a.state == State::AT_WARP_FUNCTION;
        int count = 0;
        for (int j = i; j < machine.thread_count; j++) {
            const Thread& b = machine.threads[j];
            if (b.state != a.state || (waits && (!(b.site == a.site) || b.mask != a.mask || b.what != a.what)))
                continue;
            listed[j] = true, count++;
        }
        fprintf(stderr, "    %4d threads (first: %u,%u,%u) ", count, a.index.x, a.index.y, a.index.z);
        if (a.state == State::RETURNED) fprintf(stderr, "have returned\n");
        else if (a.state == State::READY) fprintf(stderr, "can run\n");
        else if (a.state == State::AT_BARRIER)
            fprintf(stderr, "wait in %s at %s:%d\n", a.what, a.site.file, a.site.line);
        else fprintf(stderr, "wait in %s, mask %08x, at %s:%d\n", a.what, a.mask, a.site.file, a.site.line);
    }
    abort();
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory. Shared and device memory lie in one range of addresses, so that two comparisons tell them from local
// variables and host memory. The first part of the range is the shared memory of the running block. Addresses of freed
// device memory are not given out again.

constexpr size_t RANGE_BYTES = size_t(1) << 34, SHARED_PART = size_t(1) << 20;  // addresses, not memory
constexpr size_t DEVICE_GAP = 256, SHARED_GAP = 128;  // bytes between arrays, filled with GUARD
constexpr unsigned char GUARD = 0xCB;

inline std::string describe_address(const void* address) {
    const char* p = (const char*)address;
    char text[200];
    for (int i = 0; i < machine.shared_count; i++) {
        const SharedArray& a = machine.shared[i];
        if (p < a.data - SHARED_GAP / 2 || p >= a.data + a.bytes + SHARED_GAP / 2) continue;
        snprintf(text, sizeof text, "byte %ld of the shared array %s of %zu bytes", long(p - a.data), a.name, a.bytes);
        return text;
    }
    auto next = machine.allocations.upper_bound(p);
    if (next == machine.allocations.begin()) {
        snprintf(text, sizeof text, "address %p", address);
        return text;
    }
    const auto& [data, allocation] = *--next;
    snprintf(text, sizeof text, "byte %ld of the %zu bytes that cudaMalloc gave at %p%s", long(p - data),
             allocation.bytes, (const void*)data, allocation.live ? "" : ", since freed");
    return text;
}

EMU_ENGINE inline void poison(void* p, size_t bytes, unsigned short pattern) {
    for (size_t i = 0; i + 2 <= bytes; i += 2) memcpy((char*)p + i, &pattern, 2);
    if (bytes % 2) memcpy((char*)p + bytes - 1, &pattern, 1);
}
EMU_ENGINE inline bool guards_intact(const char* p, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)p[i] != GUARD) return false;
    return true;
}

// The range can be touched while one of these exists: kernels and the runtime's own functions make one. In plain builds
// host code that touches it otherwise faults; the CHECK build sees the access itself.
struct OpenRange {
    EMU_ENGINE OpenRange() {
        if (machine.range_opened++ == 0) protect(PROT_READ | PROT_WRITE);
    }
    EMU_ENGINE ~OpenRange() {
        if (--machine.range_opened == 0) protect(PROT_NONE);
    }
    EMU_ENGINE static void protect(int protection) {
        if (CHECK_BUILD || !machine.range) return;
        protect(machine.range, machine.range + SHARED_PART, protection);
        protect(machine.first_live, machine.range_end, protection);
    }
    static void protect(char* first, char* end, int protection) {
        const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
        first -= uintptr_t(first) % page;
        if (first < end && mprotect(first, (end - first + page - 1) / page * page, protection)) stop("mprotect failed");
    }
};

inline void* reserve_addresses(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        stop("cannot reserve %zu bytes of addresses; a limit on virtual memory (ulimit -v) is in the way", bytes);
    return p;
}
// Gives the memory behind whole pages back; the addresses stay and hold zeros.
inline void release_pages(char* p, size_t bytes) {
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (uintptr_t(p) + page - 1) / page * page, last = (uintptr_t(p) + bytes) / page * page;
    if (first < last && madvise((void*)first, last - first, MADV_DONTNEED)) stop("madvise failed");
}
inline void catch_crashes();
inline void reserve_range() {
    if (machine.range) return;
    catch_crashes();
    machine.range = (char*)reserve_addresses(RANGE_BYTES, CHECK_BUILD ? PROT_READ | PROT_WRITE : PROT_NONE);
    machine.range_end = machine.first_live = machine.range + SHARED_PART;
    reserve_cells();
}

// The live allocation that holds all of [p, p + bytes), or nullptr.
inline const Allocation* find_allocation(const void* p, size_t bytes) {
    auto next = machine.allocations.upper_bound((const char*)p);
    if (next == machine.allocations.begin()) return nullptr;
    const auto& [data, allocation] = *--next;
    return allocation.live && (const char*)p + bytes <= data + allocation.bytes ? &allocation : nullptr;
}
inline bool is_device(const void* p) { return find_allocation(p, 1); }

inline void check_device_array(const char* what, const void* p, size_t bytes) {
    if (bytes && !find_allocation(p, bytes))
        stop("%s: %zu bytes at %s are not inside one device array", what, bytes, describe_address(p).c_str());
}

// What an allocation takes of the range: whole pages, with the gap behind it.
inline size_t with_gap(size_t bytes) { return (bytes + DEVICE_GAP + 4095) / 4096 * 4096; }
EMU_ENGINE inline void* device_alloc(size_t bytes) {  // nullptr: out of memory
    if (bytes > machine.device_bytes - machine.live_bytes) return nullptr;
    reserve_range();
    char* data = machine.range_end;
    const size_t whole = with_gap(bytes);
    if (whole > size_t(machine.range + RANGE_BYTES - data))
        stop("the %zu bytes of device addresses are used up; they are not given out again", RANGE_BYTES);
    machine.range_end += whole;
    const OpenRange open;
    poison(data, bytes, DEVICE_POISON);
    memset(data + bytes, GUARD, DEVICE_GAP);
    set_known(data, bytes, UNWRITTEN);
    machine.allocations[data] = {bytes, true};
    machine.live_bytes += bytes;
    return data;
}
inline void check_guards() {
    for (auto a = machine.allocations.lower_bound(machine.first_live); a != machine.allocations.end(); ++a)
        if (a->second.live && !guards_intact(a->first + a->second.bytes, DEVICE_GAP))
            stop("a write past the end of the %zu bytes that cudaMalloc gave at %p", a->second.bytes,
                 (const void*)a->first);
}
inline void device_free(void* p) {
    auto found = machine.allocations.find((char*)p);
    if (found == machine.allocations.end() || !found->second.live)
        stop("cudaFree of %s, which cudaMalloc did not give", describe_address(p).c_str());
    {
        const OpenRange open;
        check_guards();
    }
    found->second.live = false;
    machine.live_bytes -= found->second.bytes;
    set_known(p, found->second.bytes, OUTSIDE);
    release_cells((char*)p, found->second.bytes);
    release_pages((char*)p, with_gap(found->second.bytes));
    // Every launch opens and closes the range, which takes longer the longer it is: leave out what was freed at its
    // start.
    if (machine.range_opened) return;
    auto next = machine.allocations.lower_bound(machine.first_live);
    while (next != machine.allocations.end() && !next->second.live) ++next;
    machine.first_live = next == machine.allocations.end() ? machine.range_end : (char*)next->first;
}

// For tests. How many of n elements still hold what fresh device memory holds: outputs that no kernel wrote.
template <class T>
EMU_ENGINE inline long unwritten(const T* p, size_t n) {
    static_assert(sizeof(T) % 2 == 0);
    const OpenRange open;
    long count = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned short words[sizeof(T) / 2];
        memcpy(words, p + i, sizeof words);
        bool fresh = true;
        for (const unsigned short w : words) fresh = fresh && w == DEVICE_POISON;
        count += fresh;
    }
    return count;
}

// ---- shared memory: an array is made when the first thread of the block comes by its declaration, at `place` modulo
// `modulus`
EMU_ENGINE inline void* shared_array(const void* key, size_t bytes, const char* name, size_t place = 0,
                                     size_t modulus = 128) {
    for (int i = 0; i < machine.shared_count; i++) {
        const SharedArray& a = machine.shared[i];
        if (a.key != key) continue;
        if (a.bytes != bytes) stop("the shared array %s is taken with %zu bytes and with %zu", name, a.bytes, bytes);
        return a.data;
    }
    if (machine.shared_count == MAX_SHARED_ARRAYS) stop("more than %d shared arrays", MAX_SHARED_ARRAYS);
    machine.shared_bytes += bytes;
    if (machine.shared_bytes > MAX_SHARED)
        stop("%zu bytes of shared memory, the limit is %zu", machine.shared_bytes, MAX_SHARED);
    size_t at = machine.shared_used + SHARED_GAP;
    at += (place - at) % modulus;
    char* data = machine.range + at;
    machine.shared_used = (at + bytes + SHARED_GAP / 2 + 127) / 128 * 128;
    memset(data - SHARED_GAP / 2, GUARD, SHARED_GAP / 2);
    memset(data + bytes, GUARD, SHARED_GAP / 2);
    poison(data, bytes, SHARED_POISON);
    set_known(data, bytes, UNWRITTEN);
    machine.shared[machine.shared_count++] = {key, data, bytes, name};
    return data;
}
EMU_ENGINE inline void free_shared() {
    for (int i = 0; i < machine.shared_count; i++) {
        const SharedArray& a = machine.shared[i];
        const char* near = !guards_intact(a.data - SHARED_GAP / 2, SHARED_GAP / 2) ? "before the start"
                           : !guards_intact(a.data + a.bytes, SHARED_GAP / 2)      ? "past the end"
                                                                                   : nullptr;
        if (near)
            stop("block (%u,%u,%u): a write %s of the shared array %s of %zu bytes", blockIdx.x, blockIdx.y, blockIdx.z,
                 near, a.name, a.bytes);
        set_known(a.data, a.bytes, OUTSIDE);
    }
    machine.shared_count = 0;
    machine.shared_used = machine.shared_bytes = 0;
}
// Notes a write by the running thread; whether a wgmma under way reads one of the bytes.
inline SharedCell shared_cells[SHARED_PART / 2];
EMU_ENGINE inline bool note_shared_write(const void* address, size_t bytes) {
    const size_t first = size_t((const char*)address - machine.range);
    const unsigned fences = unsigned(machine.threads[machine.current].async_fences.size());
    bool read = false;
    for (size_t i = first / 2; i <= (first + bytes - 1) / 2; i++) {
        SharedCell& cell = shared_cells[i];
        cell.interval = machine.clock.interval, cell.fences = fences, cell.thread = (unsigned short)machine.current;
        read = read || cell.readers;
    }
    return read;
}
EMU_ENGINE inline bool is_shared(const void* address, size_t bytes) {
    const char* p = (const char*)address;
    for (int i = 0; i < machine.shared_count; i++)
        if (p >= machine.shared[i].data && p + bytes <= machine.shared[i].data + machine.shared[i].bytes) return true;
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// The threads of a block. Whoever waits marks itself, and switches to the ready thread of the lowest rank. Such a
// strict order makes some threads run as far ahead of the others as the barriers let them, which shows most missing
// barriers; a fair order would hide them.

EMU_ENGINE inline void mark_ready(int thread) {
    const int r = machine.rank[thread];
    machine.threads[thread].state = State::READY;
    machine.ready[r / 64] |= uint64_t(1) << r % 64;
}
EMU_ENGINE inline void mark_waiting(int thread, State state) {
    const int r = machine.rank[thread];
    machine.threads[thread].state = state;
    machine.ready[r / 64] &= ~(uint64_t(1) << r % 64);
}
EMU_ENGINE inline int next_ready() {  // HOST: none
    for (int w = 0; w * 64 < machine.thread_count; w++)
        if (machine.ready[w]) return machine.at_rank[w * 64 + __builtin_ctzll(machine.ready[w])];
    return HOST;
}

EMU_ENGINE inline void shuffle_order(short* order, int n) {
    for (int i = n - 1; i > 0; i--) {
        const int j = int(random_below(unsigned(i + 1)));
        const short t = order[i];
        order[i] = order[j], order[j] = t;
    }
}
// Seed 0: the order of the index. Other even seeds: a random order of the warps, and of the lanes within each. Odd
// seeds: any order.
EMU_ENGINE inline void draw_ranks() {
    const int n = machine.thread_count;
    short* order = machine.at_rank;
    for (int i = 0; i < n; i++) order[i] = short(i);
    if (machine.seed % 2) shuffle_order(order, n);
    else if (machine.seed) {
        short warps[MAX_WARPS];
        const int warp_count = (n + 31) / 32;
        for (int w = 0; w < warp_count; w++) warps[w] = short(w);
        shuffle_order(warps, warp_count);
        int at = 0;
        for (int w = 0; w < warp_count; w++) {
            const int first = at;
            for (int i = warps[w] * 32; i < warps[w] * 32 + 32 && i < n; i++) order[at++] = short(i);
            shuffle_order(order + first, at - first);
        }
    }
    for (int i = 0; i < n; i++) machine.rank[order[i]] = short(i);
}

EMU_ENGINE inline void switch_to(int thread) {
    if (thread == machine.current) return;
    Thread &from = machine.threads[machine.current], &to = machine.threads[thread];
    machine.current = thread;
    threadIdx = to.index;
    emu_switch(&from.stack_pointer, to.stack_pointer);
}
EMU_ENGINE inline void run_another() {
    const int next = next_ready();
    if (next == HOST && machine.returned < machine.thread_count) stop_waiting("deadlock: no thread can go on");
    switch_to(next);  // back to the host when all have returned
}

// The last thread to arrive opens the barrier for all. A thread that has returned counts as arrived: then the
// rest cannot have reached the same barrier, and that is an error here, although the hardware lets it pass.
EMU_ENGINE inline void try_open_barrier() {
    const int n = machine.thread_count;
    if (machine.at_barrier == 0 || machine.at_barrier + machine.returned < n) return;
    const Thread& first = machine.threads[0];
    for (int i = 0; i < n; i++) {
        const Thread& t = machine.threads[i];
        if (t.state != State::AT_BARRIER || !(t.site == first.site))
            stop_waiting("not all threads of the block reach the same barrier");
    }
    if (machine.seed && random_below(2)) draw_ranks();
    for (int i = 0; i < n; i++) machine.threads[i].state = State::READY;
    for (int w = 0; w < n; w += 64) machine.ready[w / 64] = n - w >= 64 ? ~uint64_t(0) : (uint64_t(1) << (n - w)) - 1;
    machine.at_barrier = 0;
    machine.clock.interval++;
}
EMU_ENGINE EMU_NOINLINE inline void barrier(const char* what, Site site) {
    if (machine.current == HOST) stop("%s outside of a kernel", what);
    Thread& t = machine.threads[machine.current];
    t.site = site, t.what = what, t.mask = 0;
    mark_waiting(machine.current, State::AT_BARRIER);
    machine.at_barrier++;
    try_open_barrier();
    run_another();
}

// Every warp function is this one: each lane leaves a pointer to its argument (on its own stack, which stays as it is
// while the lane waits), and the last lane of the mask to arrive does the work for all of them.
EMU_ENGINE inline void try_warp_function(int warp, unsigned mask) {
    if ((machine.warp_waiting[warp] & mask) != mask) return;
    Thread* lanes = machine.threads + warp * 32;
    const Thread& first = lanes[__builtin_ctz(mask)];
    void* arguments[32];
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        const Thread& t = lanes[l];
        if (t.mask != mask || t.function != first.function || !(t.site == first.site))
            stop_waiting("lanes that name each other in their masks wait in different warp functions");
        arguments[l] = t.argument;
    }
    first.function(mask, arguments);
    for (unsigned rest = mask; rest; rest &= rest - 1) mark_ready(warp * 32 + __builtin_ctz(rest));
    machine.warp_waiting[warp] &= ~mask;
}
EMU_ENGINE EMU_NOINLINE inline void warp_function(unsigned mask, WarpFunction function, void* argument,
                                                  const char* what, Site site) {
    if (machine.current == HOST) stop("%s outside of a kernel", what);
    Thread& t = machine.threads[machine.current];
    const int warp = machine.current / 32, lane = machine.current % 32;
    if (!(mask >> lane & 1))
        stop("lane %d calls %s with the mask %08x, which leaves it out, at %s:%d", lane, what, mask, site.file,
             site.line);
    if (const unsigned gone = mask & ~machine.warp_live[warp])
        stop("the mask %08x of %s names lanes that have returned or never were (%08x), at %s:%d", mask, what, gone,
             site.file, site.line);
    t.site = site, t.what = what, t.mask = mask, t.function = function, t.argument = argument;
    mark_waiting(machine.current, State::AT_WARP_FUNCTION);
    machine.warp_waiting[warp] |= 1u << lane;
    try_warp_function(warp, mask);
    run_another();
}

// Of cuda_on_cpu_wgmma.h.
void begin_wgmma();
void end_wgmma();

// What a fiber runs, for ever: one round for each block. Nothing may throw through it, there is no frame above.
EMU_ENGINE inline void thread_main() noexcept {
    for (;;) {
        machine.body(machine.body_argument);
        const int warp = machine.current / 32, lane = machine.current % 32;
        if (const size_t n = machine.threads[machine.current].copies.size())
            stop("the thread returns with %zu cp.async that it has not waited for", n);
        end_wgmma();
        mark_waiting(machine.current, State::RETURNED);
        machine.returned++;
        machine.warp_live[warp] &= ~(1u << lane);
        for (unsigned rest = machine.warp_waiting[warp]; rest; rest &= rest - 1)
            if (machine.threads[warp * 32 + __builtin_ctz(rest)].mask >> lane & 1)
                stop_waiting("a lane returns while others of its warp wait for it");
        try_open_barrier();
        run_another();
    }
}

inline void make_fibers() {
    // a page that faults below each stack; compile with -fstack-clash-protection so that no frame steps over it
    const size_t guard = 1 << 16;
    for (int i = 0; i < machine.thread_count; i++) {
        Thread& t = machine.threads[i];
        if (t.stack_pointer) continue;
        char* stack = (char*)reserve_addresses(guard + STACK_BYTES, PROT_READ | PROT_WRITE);
        if (mprotect(stack, guard, PROT_NONE)) stop("no memory for the stacks of %d threads", machine.thread_count);
        t.copies.reserve(MAX_COPIES);
        // Staggered by 64 bytes: stacks at equal offsets would share few cache sets, and every switch would miss.
        uint64_t* top = (uint64_t*)(stack + guard + STACK_BYTES - i % 64 * 64);
#if defined(__x86_64__)
        *--top = 0;  // the alignment that a call would leave
        *--top = (uint64_t)(void*)thread_main;
        for (int registers = 0; registers < 6; registers++) *--top = 0;
#else
        top -= 20;
        memset(top, 0, 160);
        top[11] = (uint64_t)(void*)thread_main;  // x30
#endif
        t.stack_pointer = top;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches.

inline void on_crash(int signal, siginfo_t* info, void*) {  // says which thread it was, then dies as before
    print_where();
    const char* p = (const char*)info->si_addr;
    const bool inside = machine.range && p >= machine.range && p < machine.range + RANGE_BYTES;
    if (inside && !machine.kernel)
        fprintf(stderr, "host code touches device memory, %s\n", describe_address(p).c_str());
    else
        fprintf(stderr, "%s at %s\n", strsignal(signal),
                inside ? describe_address(p).c_str() : "an address that is not device memory (or the stack is full)");
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
    raise(signal);
}
inline void catch_crashes() {
    static char stack[64 * 1024];
    stack_t alternative = {};
    alternative.ss_sp = stack, alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_ONSTACK | SA_SIGINFO;
    for (const int s : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(s, &action, nullptr);
}

EMU_ENGINE inline void run_block() {
    const int n = machine.thread_count;
    machine.at_barrier = machine.returned = 0;
    for (int w = 0; w < MAX_WARPS; w++) {
        const int lanes = n - w * 32;
        machine.warp_live[w] = lanes >= 32 ? ~0u : lanes > 0 ? (1u << lanes) - 1 : 0;
        machine.warp_waiting[w] = 0;
        machine.clock.warp_syncs[w] = 0;
    }
    begin_wgmma();
    draw_ranks();
    for (int i = 0; i < n; i++) {
        Thread& t = machine.threads[i];
        t.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
        t.group = 0;
        t.async_fences.clear();
        machine.clock.last_sync[i] = 0, machine.clock.last_sync_mask[i] = 0;
        mark_ready(i);
    }
    machine.clock.block_start = ++machine.clock.interval;
    switch_to(next_ready());  // comes back when the last thread has returned
    machine.clock.interval++;
    free_shared();
}

inline void run_grid(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, void (*body)(void*),
                     void* body_argument) {
    if (!machine.threads) machine.threads = new Thread[MAX_THREADS + 1];
    machine.kernel = name, machine.body = body, machine.body_argument = body_argument;
    machine.thread_count = int(block.x * block.y * block.z);
    if (machine.thread_count < 1 || machine.thread_count > MAX_THREADS || block.z > 64)
        stop("a block of (%u,%u,%u) threads", block.x, block.y, block.z);
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        stop("a grid of (%u,%u,%u) blocks", grid.x, grid.y, grid.z);
    if (dynamic_bytes > MAX_SHARED) stop("%zu bytes of shared memory, the limit is %zu", dynamic_bytes, MAX_SHARED);
    make_fibers();
    reserve_range();
    const OpenRange open;
    gridDim = grid, blockDim = block, machine.dynamic_bytes = dynamic_bytes;
    machine.launches++;
    machine.clock.launch_start = ++machine.clock.interval;
    machine.random = (machine.seed + uint64_t(machine.launches)) * 0x9E3779B97F4A7C15ull | 1;
    // With a seed, blocks start anywhere and go on in steps that have no factor in common with their number, so that
    // each comes once.
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    uint64_t at = 0, step = 1;
    if (machine.seed) {
        const unsigned below = unsigned(blocks < 0xffffffff ? blocks : 0xffffffff);
        at = random_below(below);
        do step = 1 + random_below(below);
        while (std::gcd(step, blocks) != 1);
    }
    for (uint64_t k = 0; k < blocks; k++, at = (at + step) % blocks) {
        blockIdx = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y), unsigned(at / (uint64_t(grid.x) * grid.y))};
        run_block();
    }
    check_guards();
    machine.kernel = nullptr;
}

// From __PRETTY_FUNCTION__ of launch<>: "... kernel = add<64>; Args = ...", by clang "... kernel = &add<64>, Args ..."
inline std::string kernel_name(const std::string& pretty) {
    const size_t start = pretty.find_first_not_of('&', pretty.find("kernel = ") + 9);
    return pretty.substr(start, pretty.find("Args = ") - 2 - start);
}
template <class T>
inline void check_argument(const char* kernel, int position, const T& argument) {
    if constexpr (std::is_pointer_v<T>)
        if (argument && !is_device(argument))
            stop("kernel %s: argument %d is a pointer, but not to device memory", kernel, position);
    (void)kernel, (void)position, (void)argument;
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams. With machine.run_late, work runs as late as the program's own synchronisation allows, each stream on its own
// (the default stream too, as if all others were made with cudaStreamNonBlocking), so that a missing event, or a host
// that does not wait, shows as a wrong number.

inline void run_until(Stream* s, long upto) {
    while (s->done < upto) {
        const std::function<void()> work = std::move(s->queue.front());
        s->queue.pop_front();
        s->done++;
        work();
    }
}
// One piece of work at a time, from any stream: the youngest first with seed 0, else as drawn.
inline void run_all_streams() {
    static uint64_t draws = 0;
    for (;;) {
        std::vector<Stream*> busy;
        for (Stream* s : machine.streams)
            if (s->done < s->sent) busy.push_back(s);
        if (busy.empty()) return;
        Stream* s = busy.back();
        if (machine.seed) s = busy[((machine.seed + ++draws) * 0x9E3779B97F4A7C15ull >> 40) % busy.size()];
        run_until(s, s->done + 1);
    }
}
inline Stream* stream_or_default(Stream* s) { return s ? s : &machine.default_stream; }
inline void enqueue(Stream* stream, std::function<void()> work) {
    Stream* s = stream_or_default(stream);
    s->queue.push_back(std::move(work));
    s->sent++;
    if (!machine.run_late) run_until(s, s->sent);
}

}  // namespace emu

// launch<kernel>(grid, block, dynamic shared bytes, stream, arguments...)
template <auto kernel, class... Args>
void launch(dim3 grid, dim3 block, size_t shared_bytes, emu::Stream* stream, Args... args) {
    static const std::string name = emu::kernel_name(__PRETTY_FUNCTION__);
    int position = 0;
    (emu::check_argument(name.c_str(), position++, args), ...);
    emu::enqueue(stream, [=] {
        auto body = [&] { kernel(args...); };
        emu::run_grid(
            name.c_str(), grid, block, shared_bytes, [](void* b) { (*(decltype(body)*)b)(); }, &body);
    });
}
