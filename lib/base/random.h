// random.h: counter-based random numbers: number i of stream s under a seed is a pure function of (seed, s, i), so
// weights, data order, samples and rounding do not depend on how many ranks or threads there are, and there is no state
// to save.
// Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; cuRAND has it too.
#pragma once
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIP__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

struct Philox {
    uint32_t word[4];
};

HOST_DEVICE inline Philox philox4x32(uint64_t counter, uint64_t stream, uint64_t seed) {
    uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = uint32_t(stream), c3 = uint32_t(stream >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Number i of its eight times 16 bits.
HOST_DEVICE inline uint32_t bits16(const Philox& p, int i) {
    const uint64_t low = p.word[0] | uint64_t(p.word[1]) << 32, high = p.word[2] | uint64_t(p.word[3]) << 32;
    return uint32_t((i < 4 ? low : high) >> i % 4 * 16) & 0xffffu;
}

// Every use has its own streams, so no two uses ever share a random number. Stream = use + 2^32 * index (of the tensor,
// the epoch ...).
enum RandomUse : uint64_t {
    RANDOM_INIT = 1,
    RANDOM_SHUFFLE = 2,
    RANDOM_SAMPLE = 3,
    RANDOM_SYNTHETIC = 4,
    RANDOM_ROUNDING = 5,
    RANDOM_TEST = 6,
    RANDOM_DOCUMENT = 7
};
HOST_DEVICE inline uint64_t random_stream(RandomUse use, uint64_t index = 0) { return use + (index << 32); }

// 64 random bits.
HOST_DEVICE inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
    const Philox p = philox4x32(counter, stream, seed);
    return p.word[0] | uint64_t(p.word[1]) << 32;
}

// Uniform in [0, 1), 53 bits.
HOST_DEVICE inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
    return double(random_bits(seed, stream, counter) >> 11) * 0x1p-53;
}

// A uniform integer in [0, n): the high half of a 64 x 64 bit product. The bias is below n / 2^64.
inline uint64_t random_below(uint64_t n, uint64_t seed, uint64_t stream, uint64_t counter) {
    return uint64_t((unsigned __int128)random_bits(seed, stream, counter) * n >> 64);
}

// Standard normal, by Box-Muller. The same seed must give the same weights on every machine, but libm's logarithm and
// cosine differ from one to the next; so both are written out in fused multiply-adds, which IEEE 754 defines to the
// last bit.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
    const Philox p = philox4x32(counter, stream, seed);
    const double u = double(((uint64_t(p.word[1]) << 32 | p.word[0]) >> 11) + 1) * 0x1p-53;  // (0, 1]
    int exponent;
    double m = std::frexp(u, &exponent);  // u = m * 2^exponent, m in [0.5, 1)
    if (m < 0.70710678118654752) {
        m *= 2;
        exponent--;
    }
    const double s = (m - 1) / (m + 1), s2 = s * s;  // ln m = 2 artanh(s), |s| < 0.172
    double series = 0;
    for (int k = 21; k >= 1; k -= 2) series = std::fma(series, s2, 1.0 / k);
    const double log_u = std::fma(double(exponent), 0.69314718055994531, 2 * s * series);
    // The angle is a quarter turn times (quadrant + f), f in [-0.5, 0.5): only f goes through the Taylor series.
    const uint64_t turn = (uint64_t(p.word[3]) << 32 | p.word[2]) >> 11;
    const int quadrant = int(turn >> 51);
    const double f = std::fma(double(turn & ((1ull << 51) - 1)), 0x1p-51, -0.5) * 1.5707963267948966, f2 = f * f;
    double cosine = 1, sine = 1;
    for (int k = 18; k >= 2; k -= 2) {
        cosine = std::fma(cosine, -f2 / (k * (k - 1)), 1.0);
        sine = std::fma(sine, -f2 / (k * (k + 1)), 1.0);
    }
    sine *= f;
    const double projection = quadrant == 0 ? cosine : quadrant == 1 ? -sine : quadrant == 2 ? -cosine : sine;
    return std::sqrt(-2 * log_u) * projection;
}
