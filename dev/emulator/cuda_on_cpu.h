// cuda_on_cpu.h: runs CUDA kernels on the CPU, for tests on machines without a GPU. A plain g++ (C++17, Linux, x86-64
// or arm64) finds it where nvcc finds cuda_runtime.h and cuda_bf16.h; no CUDA toolkit is needed. Kernels are
// compiled as ordinary functions. This file has the language and the runtime API; cuda_on_cpu_engine.h the machine,
// cuda_on_cpu_check.h the CHECK build's checks, cuda_on_cpu_wgmma.h the tensor cores of sm_90a.
//
// What every build finds
//   - barriers that only some threads reach, wrong masks, shuffles from lanes that do not take part, deadlock: the
//     process ends and prints the kernel, the block, the thread and the source lines where the threads wait
//   - through the results: the order of threads, blocks and streams is drawn from a seed (emu::seed), and some threads
//     run as far ahead of the others as the barriers let them, which exposes most missing barriers; shared and device
//     memory start as NaN, and so does the destination of cp.async from the time the copy is issued until its thread
//     has waited for it; emu::unwritten counts the outputs that no kernel wrote; with emu::machine.run_late, streams
//     run as late as the program's events and waits allow
//   - writes past the end of an array (when the block or kernel ends), host pointers given to kernels, host code that
//     touches device memory
// What the CHECK build adds (compile with -g -O1 -fsanitize=thread, link without it): every race, every access outside
// an array and every read of unwritten memory, at once, with kernel, block, thread and source line.
//
// Stricter than the hardware, on purpose: masks name exactly the lanes that take part; no return before a barrier; one
// barrier or warp function per source line (the line is what identifies it); SHARED instead of __shared__; (float)x for
// a bf16 x; pointers to device memory only (those inside a struct argument are not checked). Not modelled: graphs,
// atomics but for atomicOr, fences of memory, warps in lockstep, memory orders weaker than the host's, speed, registers
// and __launch_bounds__, bank conflicts, one block waiting for another (hangs). Results agree with a GPU's within
// tolerances, not bit for bit. With emu::machine.rough the approximations and the sums in an mma are as bad as a GPU's
// may be; there is no __expf, __logf, __fdividef or rsqrtf, whose errors nobody here has modelled.
#pragma once
#include "cuda_on_cpu_engine.h"
#include "cuda_on_cpu_check.h"

#include <cmath>
#include <map>
#include <mutex>
#include <string>

#define CUDART_VERSION 13000
#define CUDA_ON_CPU  // for tests that set the emulator, or ask it what no GPU tells

// ---------------------------------------------------------------------------------------------------------------------
// The language.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// A static array would be neither new nor poisoned for each block, so it is refused.
#define __shared__ static_assert(false, "write SHARED(type, name, [n]) instead of __shared__ type name[n]");

// clang-format off
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
// clang-format on

// SHARED(float, sums, [32]); is __shared__ float sums[32];
#define SHARED(T, name, dimensions)                   \
    auto& name = *(T(*) dimensions)emu::shared_array( \
        [] {                                          \
            static char key;                          \
            return &key;                              \
        }(),                                          \
        sizeof(T dimensions), #name)

// Hands out the dynamic shared memory of the launch in order, each piece at a multiple of 128 bytes, the first of 1024.
// One per kernel.
struct DynamicShared {
    size_t used = 0;
    template <class T>
    EMU_ENGINE T* take(size_t n) {
        const size_t at = used, bytes = n * sizeof(T);
        used += (bytes + 127) / 128 * 128;
        if (at + bytes > emu::machine.dynamic_bytes)
            emu::stop("DynamicShared hands out %zu bytes, the launch gave %zu", at + bytes, emu::machine.dynamic_bytes);
        return (T*)emu::shared_array((const void*)(at + 1), bytes, "DynamicShared", at, 1024);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and warp functions. The last argument of each is the place of the call; it has a default.

#define EMU_SITE emu::Site site = emu::Site::here()

namespace emu {
EMU_ENGINE inline int lane() { return machine.current % 32; }

// For __syncwarp: only the CHECK build's clock sees it.
EMU_ENGINE inline void sync_lanes(unsigned lanes, void**) {
    const int warp = machine.current / 32;
    const unsigned short number = ++machine.clock.warp_syncs[warp];
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const int thread = warp * 32 + __builtin_ctz(rest);
        machine.clock.last_sync[thread] = number, machine.clock.last_sync_mask[thread] = lanes;
    }
}

struct Shuffle {
    uint64_t in, out;
    int source;
    EMU_ENGINE static void run(unsigned lanes, void** arguments) {
        for (unsigned rest = lanes; rest; rest &= rest - 1) {
            const int l = __builtin_ctz(rest);
            Shuffle& mine = *(Shuffle*)arguments[l];
            if (!(lanes >> mine.source & 1)) {
                const Site site = machine.threads[machine.current / 32 * 32 + l].site;
                stop("lane %d shuffles from lane %d, which takes no part (mask %08x), at %s:%d", l, mine.source, lanes,
                     site.file, site.line);
            }
            mine.out = ((Shuffle*)arguments[mine.source])->in;
        }
    }
};
template <class T>
EMU_ENGINE inline T shuffle(unsigned mask, T value, int source, const char* what, Site site) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    Shuffle s = {0, 0, source};
    memcpy(&s.in, &value, sizeof value);
    warp_function(mask, Shuffle::run, &s, what, site);
    memcpy(&value, &s.out, sizeof value);
    return value;
}

template <class T>
struct Reduce {
    T value;
    T (*operation)(T, T);
    EMU_ENGINE static void run(unsigned lanes, void** arguments) {
        const Reduce& first = *(Reduce*)arguments[__builtin_ctz(lanes)];
        T total = first.value;
        for (unsigned rest = lanes & (lanes - 1); rest; rest &= rest - 1)
            total = first.operation(total, ((Reduce*)arguments[__builtin_ctz(rest)])->value);
        for (unsigned rest = lanes; rest; rest &= rest - 1) ((Reduce*)arguments[__builtin_ctz(rest)])->value = total;
    }
};
template <class T>
EMU_ENGINE inline T reduce(unsigned mask, T value, T (*operation)(T, T), const char* what, Site site) {
    static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>, "redux.sync is for 32-bit integers");
    Reduce<T> r = {value, operation};
    warp_function(mask, Reduce<T>::run, &r, what, site);
    return r.value;
}
EMU_ENGINE inline unsigned vote(unsigned mask, bool predicate, const char* what, Site site) {
    return reduce(
        mask, unsigned(predicate) << lane(), +[](unsigned a, unsigned b) { return a | b; }, what, site);
}
}  // namespace emu

inline void __syncthreads(EMU_SITE) { emu::barrier("__syncthreads", site); }
inline void __syncwarp(unsigned mask = ~0u, EMU_SITE) {
    emu::warp_function(mask, emu::sync_lanes, nullptr, "__syncwarp", site);
}

template <class T>
EMU_ENGINE inline T __shfl_sync(unsigned mask, T value, int source, EMU_SITE) {
    return emu::shuffle(mask, value, source & 31, "__shfl_sync", site);
}
template <class T>
EMU_ENGINE inline T __shfl_xor_sync(unsigned mask, T value, int flip, EMU_SITE) {
    return emu::shuffle(mask, value, emu::lane() ^ flip, "__shfl_xor_sync", site);
}
template <class T>
EMU_ENGINE inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, EMU_SITE) {
    const int lane = emu::lane(), source = lane - int(delta);
    return emu::shuffle(mask, value, source < 0 ? lane : source, "__shfl_up_sync", site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::vote(mask, predicate, "__ballot_sync", site);
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    return emu::vote(mask, predicate, "__any_sync", site) != 0;
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T value, EMU_SITE) {
    return emu::reduce(
        mask, value, +[](T a, T b) { return a < b ? a : b; }, "__reduce_min_sync", site);
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T value, EMU_SITE) {
    return emu::reduce(
        mask, value, +[](T a, T b) { return a > b ? a : b; }, "__reduce_max_sync", site);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, EMU_SITE) {
    return emu::reduce(
        mask, value, +[](unsigned a, unsigned b) { return a | b; }, "__reduce_or_sync", site);
}

// ---------------------------------------------------------------------------------------------------------------------
// bfloat16. The conversion to float is explicit, unlike in CUDA, where a * b of two bf16 is rounded to bf16 and double
// * bf16 is ambiguous: if it were implicit here, kernels would compile that do something else, or nothing, under nvcc.

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float f) {  // to nearest, ties to even; any NaN becomes CUDA's
        unsigned u;
        memcpy(&u, &f, 4);
        bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const unsigned u = unsigned(bits) << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    __nv_bfloat162 pair;
    pair.x = __nv_bfloat16(x), pair.y = __nv_bfloat16(y);
    return pair;
}

// ---------------------------------------------------------------------------------------------------------------------
// Atomics, arithmetic. std::common_type_t<T> is T, but takes no part in deduction.

template <class T>
EMU_ENGINE EMU_NOINLINE inline T atomicOr(T* p, std::common_type_t<T> v) {
    static_assert(sizeof(T) >= 4 && sizeof(T) <= 8);
    EMU_ACCESS(p, sizeof(T), ATOMIC);
    const T before = *p;
    *p = before | v;
    return before;
}

template <class To, class From>
inline To emu_bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float f) { return emu_bits_as<unsigned>(f); }
inline int __float_as_int(float f) { return emu_bits_as<int>(f); }
inline float __uint_as_float(unsigned u) { return emu_bits_as<float>(u); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
inline T min(T a, std::common_type_t<T> b) {
    return a < b ? a : b;
}
template <class T>
inline T max(T a, std::common_type_t<T> b) {
    return a > b ? a : b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor cores and asynchronous copies, under the names that the CUDA headers in lib/ give to their PTX.

namespace emu {
// The PTX manual's fragments of m16n8k16 for 16-bit types: in lane 4 g + t, register r of a holds row g + 8 (r % 2),
// columns 2 t + 8 (r / 2) and the next; of b rows 2 t + 8 r and the next, column g; elements r and r + 1 of c and d (r
// = 0, 2) are row g + 4 r, columns 2 t and 2 t + 1.
struct Mma {
    float* d;
    const unsigned *a, *b;
    const float* c;
    EMU_ENGINE static void unpack(unsigned pair, float& low, float& high) {
        const unsigned bits[2] = {pair << 16, pair & 0xffff0000};
        memcpy(&low, &bits[0], 4), memcpy(&high, &bits[1], 4);
    }
    EMU_ENGINE static void run(unsigned lanes, void** arguments) {
        if (lanes != ~0u) stop("mma.sync needs all 32 lanes, has %08x", lanes);
        float a[16][16];
        alignas(16) float b[16][8];
        for (int l = 0; l < 32; l++) {
            const Mma& m = *(Mma*)arguments[l];
            const int g = l / 4, t = l % 4;
            for (int r = 0; r < 4; r++) {
                float* pair = &a[g + r % 2 * 8][t * 2 + r / 2 * 8];
                unpack(m.a[r], pair[0], pair[1]);
            }
            for (int r = 0; r < 2; r++) unpack(m.b[r], b[t * 2 + r * 8][g], b[t * 2 + r * 8 + 1][g]);
        }
        for (int row = 0; row < 16; row++) {  // eight columns, two in each of four lanes
            const int r = row / 8 * 2, first = row % 8 * 4;
            float c[8];
            for (int t = 0; t < 4; t++) memcpy(c + t * 2, ((Mma*)arguments[first + t])->c + r, 8);
            for (int column = 0; column < 8; column += 4) {
                Vector sum;
                memcpy(&sum, c + column, 16);
                sum = add_products(sum, a[row], b[0] + column, 8);
                memcpy(c + column, &sum, 16);
            }
            for (int t = 0; t < 4; t++) memcpy(((Mma*)arguments[first + t])->d + r, c + t * 2, 8);
        }
    }

    // sum + a row of a times four columns of b, whose rows are `stride` apart
    typedef float Vector __attribute__((vector_size(16)));
    EMU_ENGINE static Vector add_products(Vector sum, const float (&a)[16], const float* b, int stride) {
        Vector terms[16];
        for (int k = 0; k < 16; k++) memcpy(&terms[k], b + k * stride, 16), terms[k] *= a[k];
        if (machine.rough) return cut_sum(cut_sum(sum, terms), terms + 8);
        for (int k = 0; k < 16; k++) sum += terms[k];
        return sum;
    }

    // The sum of c and eight products as tensor cores make it, by experiments on them (Fasi et al. 2021, PeerJ Computer
    // Science 7:e330; Khattak & Mikaitis, arXiv 2512.07004), taking the worst of V100 to H100: all terms lose what is
    // below 2^-23 of the largest one's leading bit, and the sum is cut off to fp32.
    EMU_ENGINE static Vector cut_sum(Vector c, const Vector* products) {
        typedef int Ints __attribute__((vector_size(16)));
        const Ints magnitude = Ints{} + 0x7fffffff;
        Ints most = (Ints)c & magnitude;
        for (int k = 0; k < 8; k++) {
            const Ints bits = (Ints)products[k] & magnitude;
            most = bits > most ? bits : most;
        }
        // Terms are cut off as integers, in units of 2^-23 of the largest. Infinities, NaN and units that are no normal
        // numbers take the slow way.
        const int SMALLEST = 24;
        Ints exponent = most >> 23;
        const Ints rare = (exponent == 255) | ((exponent < SMALLEST) & (most != 0));
        if (rare[0] | rare[1] | rare[2] | rare[3]) {
            for (int i = 0; i < 4; i++) {
                float terms[9] = {c[i]};
                for (int k = 0; k < 8; k++) terms[k + 1] = products[k][i];
                c[i] = cut_sum_of_any(terms);
            }
            return c;
        }
        exponent = exponent > SMALLEST ? exponent : Ints{} + SMALLEST;
        const Vector unit = (Vector)((exponent - 23) << 23), per_unit = (Vector)((277 - exponent) << 23);
        Ints sum = __builtin_convertvector(c * per_unit, Ints);
        for (int k = 0; k < 8; k++) sum += __builtin_convertvector(products[k] * per_unit, Ints);
        Vector rounded = __builtin_convertvector(sum, Vector);  // to nearest: one unit too large, or as it should be
        const Ints back = __builtin_convertvector(rounded, Ints);
        const Ints too_large = (sum < 0 ? -back : back) > (sum < 0 ? -sum : sum);  // -1 where it is
        rounded = (Vector)((Ints)rounded + too_large);
        return rounded * unit;
    }
    EMU_ENGINE static float cut_sum_of_any(const float (&terms)[9]) {
        double most = 0, sum = 0, cut = 0;
        for (const float x : terms) sum += x, most = std::max(most, std::fabs(double(x)));
        if (!std::isfinite(sum) || most == 0) return float(sum);
        const double unit = std::ldexp(1.0, std::ilogb(most) - 23);
        for (const float x : terms) cut += std::trunc(x / unit) * unit;
        const float rounded = float(cut);
        return std::fabs(double(rounded)) > std::fabs(cut) ? std::nextafter(rounded, 0.0f) : rounded;
    }
};

// Lane l gives row l % 8 of 8 x 8 matrix l / 8 and receives, of each matrix, row l / 4, columns 2 (l % 4) and the next;
// transposed: of column l / 4.
template <bool TRANSPOSED>
struct LoadMatrix {
    alignas(16) unsigned short row[8];
    unsigned out[4];
    EMU_ENGINE static unsigned element(void** rows, int i, int j) { return ((LoadMatrix*)rows[i])->row[j]; }
    EMU_ENGINE static void run(unsigned lanes, void** arguments) {
        if (lanes != ~0u) stop("ldmatrix needs all 32 lanes, has %08x", lanes);
        for (int l = 0; l < 32; l++) {
            const int i = l / 4, j = l % 4 * 2;
            for (int m = 0; m < 4; m++) {
                void** rows = arguments + m * 8;
                const unsigned low = TRANSPOSED ? element(rows, j, i) : element(rows, i, j),
                               high = TRANSPOSED ? element(rows, j + 1, i) : element(rows, i, j + 1);
                ((LoadMatrix*)arguments[l])->out[m] = low | high << 16;
            }
        }
    }
};
EMU_ENGINE inline void check_shared(const void* p, const char* what, Site site) {
    if (uintptr_t(p) % 16) stop("%s: the shared address is not a multiple of 16, at %s:%d", what, site.file, site.line);
    if (!is_shared(p, 16)) stop("%s: the address is not in shared memory, at %s:%d", what, site.file, site.line);
}
// Each lane reads the row that it names before the lanes meet: as in the memory model, a row that another lane wrote
// needs a __syncwarp() or __syncthreads() first, and is NaN without one.
template <bool TRANSPOSED>
EMU_ENGINE EMU_NOINLINE inline void load_matrix(unsigned (&r)[4], const void* row, Site site) {
    LoadMatrix<TRANSPOSED> m;
    check_shared(row, "ldmatrix", site);
    EMU_ACCESS(row, 16, READ);
    memcpy(m.row, row, 16);
    warp_function(~0u, LoadMatrix<TRANSPOSED>::run, &m, "ldmatrix", site);
    memcpy(r, m.out, sizeof m.out);
}
}  // namespace emu

// d = a b + c; a 16 x 16 and b 16 x 8 in bf16, c and d 16 x 8 in fp32.
EMU_ENGINE inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4],
                                    EMU_SITE) {
    emu::Mma m = {d, a, b, c};
    emu::warp_function(~0u, emu::Mma::run, &m, "mma_m16n8k16", site);
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* row, EMU_SITE) { emu::load_matrix<false>(r, row, site); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, EMU_SITE) { emu::load_matrix<true>(r, row, site); }

// 16 bytes from device to shared memory; where !valid, 16 zeros, and src is not read.
EMU_ENGINE EMU_NOINLINE inline void cp_async_16(void* dst, const void* src, bool valid = true, EMU_SITE) {
    emu::Thread& t = emu::machine.threads[emu::machine.current];
    emu::check_shared(dst, "cp.async", site);
    if (uintptr_t(src) % 16)
        emu::stop("cp.async: the source address is not a multiple of 16, at %s:%d", site.file, site.line);
    if (t.copies.size() == emu::MAX_COPIES) emu::stop("more than %d cp.async of one thread under way", emu::MAX_COPIES);
    EMU_ACCESS(dst, 16, WRITE);
    if (emu::note_shared_write(dst, 16))
        emu::stop("cp.async writes %s, which a wgmma under way reads, at %s:%d", emu::describe_address(dst).c_str(),
                  site.file, site.line);
    emu::set_known(dst, 16, emu::UNWRITTEN);
    emu::poison(dst, 16, emu::SHARED_POISON);  // from now on the data may arrive at any time
    t.copies.push_back({dst, src, !valid, t.group});
}
EMU_ENGINE inline void cp_async_commit() { emu::machine.threads[emu::machine.current].group++; }
// Waits until at most the latest GROUPS groups of this thread are in flight.
template <int GROUPS>
EMU_ENGINE EMU_NOINLINE inline void cp_async_wait() {
    emu::Thread& t = emu::machine.threads[emu::machine.current];
    size_t arrived = 0;
    for (; arrived < t.copies.size() && t.copies[arrived].group < t.group - GROUPS; arrived++) {
        const emu::Copy& c = t.copies[arrived];
        EMU_ACCESS(c.src, c.zeros ? 0 : 16, READ);
        EMU_ACCESS(c.dst, 16, WRITE);
        emu::note_shared_write(c.dst, 16);
        if (c.zeros) memset(c.dst, 0, 16);
        else memcpy(c.dst, c.src, 16);
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + long(arrived));
}

#include "cuda_on_cpu_wgmma.h"

// Approximations, ex2.approx.ftz and rcp.approx.ftz: what is below the smallest normal number, 2^-126, becomes 0, on
// the way in and on the way out.
namespace emu {
EMU_ENGINE inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
// y, if machine.rough off by this many units of its last place, up or down by the bits of x.
EMU_ENGINE inline float off_by(int units, float y, float x) {
    if (!machine.rough || y == 0 || !std::isfinite(y)) return y;
    const bool up = emu_bits_as<unsigned>(x) * 2654435761u >> 31;
    return emu_bits_as<float>(emu_bits_as<int>(y) + (up ? units : -units));
}
}  // namespace emu
// 2^x within 2 units in the last place; 2^0 is 1.
EMU_ENGINE inline float exp2_approx(float x) {
    x = emu::flushed(x);
    return x == 0 ? 1 : emu::flushed(emu::off_by(2, emu::flushed(exp2f(x)), x));
}
// 1/x within 1 unit in the last place
EMU_ENGINE inline float reciprocal_approx(float x) {
    return emu::flushed(emu::off_by(1, emu::flushed(1 / emu::flushed(x)), x));
}

// ---------------------------------------------------------------------------------------------------------------------
// The runtime API. A call that makes no sense on a GPU ends the process, like a fault in a kernel; errors that a
// program must be able to handle (out of memory, not ready) are returned.

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

using cudaStream_t = emu::Stream*;
struct cudaDeviceProp {
    char name[256] = "cuda_on_cpu";
    size_t totalGlobalMem = emu::machine.device_bytes,
           sharedMemPerBlockOptin = EMULATED_CAPABILITY == 86 || EMULATED_CAPABILITY == 89 || EMULATED_CAPABILITY == 120
                                        ? 99 << 10
                                    : EMULATED_CAPABILITY == 80 ? 163 << 10
                                                                : emu::MAX_SHARED;
    int major = EMULATED_CAPABILITY / 10, minor = EMULATED_CAPABILITY % 10, integrated = 0;
    // EMULATED_PROCESSORS in the environment: a GPU of another model.
    int multiProcessorCount = getenv("EMULATED_PROCESSORS") ? atoi(getenv("EMULATED_PROCESSORS")) : 4;
};

struct cudaFuncAttributes {
    int binaryVersion;
};
template <class Kernel>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
    attributes->binaryVersion = EMULATED_CAPABILITY;
    return cudaSuccess;
}

namespace emu {
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t error(cudaError_t e) { return last_error = e; }
}  // namespace emu
inline const char* cudaGetErrorName(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
inline const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "out of memory" : "an error of cuda_on_cpu";
}
inline cudaError_t cudaGetLastError() {
    const cudaError_t e = emu::last_error;
    emu::last_error = cudaSuccess;
    return e;
}

// ---- devices: emu::machine.device_count of them, which share everything
inline cudaError_t cudaGetDeviceCount(int* n) { return *n = emu::machine.device_count, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = emu::machine.device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= emu::machine.device_count) return emu::error(cudaErrorInvalidDevice);
    return emu::machine.device = device, cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char* bus, int length, int device) {
    return snprintf(bus, size_t(length), "0000:%02x:00.0", device), cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) { return *p = cudaDeviceProp(), cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = emu::machine.device_bytes, *free = *total - emu::machine.live_bytes;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return emu::run_all_streams(), cudaSuccess; }

// ---- memory
template <class T>
inline cudaError_t cudaMalloc(T** p, size_t bytes) {
    *p = (T*)emu::device_alloc(bytes);
    return *p ? cudaSuccess : emu::error(cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFree(void* p) {
    if (!p) return cudaSuccess;
    emu::run_all_streams();
    emu::device_free(p);
    return cudaSuccess;
}
template <class T>
inline cudaError_t cudaMallocHost(T** p, size_t bytes) {
    *p = (T*)malloc(bytes);
    if (!*p) return emu::error(cudaErrorMemoryAllocation);
    emu::poison(*p, bytes, emu::DEVICE_POISON);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* p) {
    if (p && emu::is_device(p)) emu::stop("cudaFreeHost of device memory");
    emu::run_all_streams();
    free(p);
    return cudaSuccess;
}

namespace emu {
EMU_ENGINE inline void copy_now(void* dst, const void* src, size_t bytes) {
    const OpenRange open;
    EMU_ACCESS(src, bytes, READ);
    EMU_ACCESS(dst, bytes, WRITE);
    if (bytes) memcpy(dst, src, bytes);
}
EMU_ENGINE inline void set_now(void* p, int value, size_t bytes) {
    const OpenRange open;
    EMU_ACCESS(p, bytes, WRITE);
    memset(p, value, bytes);
}
}  // namespace emu
inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    const bool to = emu::is_device(dst), from = emu::is_device(src);
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (bytes && kind != cudaMemcpyDefault && (to != to_device || from != from_device))
        emu::stop("cudaMemcpy: the addresses do not match the direction (to %s, from %s)", to ? "device" : "host",
                  from ? "device" : "host");
    if (to) emu::check_device_array("cudaMemcpy, destination", dst, bytes);
    if (from) emu::check_device_array("cudaMemcpy, source", src, bytes);
    emu::enqueue(stream, [=] { emu::copy_now(dst, src, bytes); });
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream = nullptr) {
    emu::check_device_array("cudaMemset", p, bytes);
    emu::enqueue(stream, [=] { emu::set_now(p, value, bytes); });
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes); }

// ---- streams and events
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    emu::machine.streams.push_back(*stream = new emu::Stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    emu::Stream* s = emu::stream_or_default(stream);
    emu::run_until(s, s->sent);
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaStreamSynchronize(stream);
    auto& all = emu::machine.streams;
    for (size_t i = 1; i < all.size(); i++)
        if (all[i] == stream) {
            all.erase(all.begin() + long(i));  // the stream itself stays, because events may still name it
            return cudaSuccess;
        }
    emu::stop("cudaStreamDestroy of a stream that is not there");
}
// Waits for the default stream only, as CUDA does if the others were made with cudaStreamNonBlocking.
inline cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(dst, src, bytes, kind);
    return cudaStreamSynchronize(nullptr);
}

namespace emu {
// What a profiler would see: how often each range was entered, and how many are open in this thread.
struct Profile {
    std::mutex mutex;  // guards the map
    std::map<std::string, long> ranges;
};
inline Profile profile;
inline thread_local int open_ranges = 0;
}  // namespace emu
inline int nvtxRangePushA(const char* name) {
    const std::lock_guard<std::mutex> lock(emu::profile.mutex);
    emu::profile.ranges[name]++;
    return emu::open_ranges++;
}
inline int nvtxRangePop() {
    if (emu::open_ranges == 0) emu::stop("nvtxRangePop without a range");
    return --emu::open_ranges;
}
inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }

namespace emu {
struct Event {
    Stream* stream = nullptr;  // nullptr: not yet recorded
    long upto = 0;             // pieces of its work
    double milliseconds = 0;   // when the record ran
    bool destroyed = false;    // never freed, because queued work may still name it
};
inline Event* live_event(Event* e, const char* what) {
    if (e->destroyed) stop("%s of an event that is destroyed", what);
    return e;
}
}  // namespace emu
using cudaEvent_t = emu::Event*;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return *event = new emu::Event, cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return emu::live_event(event, "cudaEventDestroy")->destroyed = true, cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    emu::live_event(event, "cudaEventRecord")->stream = emu::stream_or_default(stream);
    event->upto = event->stream->sent + 1;
    emu::enqueue(stream, [event] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->milliseconds = double(now.tv_sec) * 1e3 + double(now.tv_nsec) * 1e-6;
    });
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (emu::live_event(event, "cudaEventSynchronize")->stream) emu::run_until(event->stream, event->upto);
    return cudaSuccess;
}
// Every query makes a little progress, so that a program that polls ends.
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (!emu::live_event(event, "cudaEventQuery")->stream || event->stream->done >= event->upto) return cudaSuccess;
    emu::run_until(event->stream, event->stream->done + 1);
    return cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = float(end->milliseconds - start->milliseconds);
    return cudaSuccess;
}
// Waits for the event as recorded now: as in CUDA, a later record does not count, and an event that was never recorded
// is not waited for.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    emu::Stream* from = emu::live_event(event, "cudaStreamWaitEvent")->stream;
    const long upto = event->upto;
    if (from) emu::enqueue(stream, [=] { emu::run_until(from, upto); });
    return cudaSuccess;
}
