// bf16.h: bf16 on the host: the upper half of a float, rounded to nearest, ties to even. With --cpu-dtype bf16 the
// inputs of matrix products are rounded to it; sums and everything else stay fp32.
#pragma once
#include <cstdint>
#include <cstring>

using Bf16 = uint16_t;
inline Bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return Bf16(x == x ? rounded : bits >> 16 | 0x40);  // a NaN stays one
}

inline float from_bf16(Bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float round_to_bf16(float x) { return from_bf16(to_bf16(x)); }
inline double round_to_bf16(double x) { return round_to_bf16(float(x)); }

// Products of bf16 take pairs: two neighbours along the summed dimension.
struct Bf16Pair {
    Bf16 first, second;
};
