// amx.h: Intel's AMX: eight registers of 16 rows by 64 bytes for every thread, and an instruction that multiplies two
// of them, C[16][16] += A[16][32] B[32][16] in bf16 with sums in fp32. cpu_gemm.h uses them for products of bf16.
// dev/emulator/amx_on_cpu.cpp executes these instructions on processors that have none.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "bf16.h"

// Products take pairs of bf16: two neighbours along the summed dimension.
struct Bf16Pair {
    Bf16 first, second;
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
constexpr bool HAVE_AMX = true;

// Linux lets a process use the tiles after it has asked for them.
inline bool amx_granted() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}
// g++ 12 does not know which memory the instructions of tiles read.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Sets up all eight registers at full size for this thread while the object lives, if they are wanted and granted.
class AmxTiles {
  public:
    explicit AmxTiles(bool wanted) {
        if (!wanted || !amx_granted()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("" ::"r"(&config) : "memory");  // all of it is read
        _tile_loadconfig(&config);
        ready = true;
    }
    ~AmxTiles() {
        if (ready) _tile_release();
        ready = false;
    }
    AmxTiles(const AmxTiles&) = delete;
    static bool here() { return ready; }  // whether this thread's registers are set up

  private:
    static inline thread_local bool ready = false;
};

// C[16 R][16 N] (+)= A[16 R][depth] B[depth][16 N], depth in pairs, a multiple of 16; 2 x 2, 1 x 2 or 1 x 4 tiles of C
// stay in registers 0 to 3. Numbers of registers are part of an instruction, so there is no loop over them.
template <int R, int N>
inline void amx_block(int depth, const Bf16Pair* a, size_t a_row, const Bf16Pair* b, size_t ldb, float* c, size_t ldc,
                      bool accumulate) {
    static_assert(R * N <= 4 && (N == 2 || N == 4), "four registers for C, two for A, two for B");
    const size_t a_bytes = a_row * sizeof *a, b_bytes = ldb * sizeof *b, c_bytes = ldc * sizeof *c;
    float *const c1 = c + 16, *const c2 = R == 2 ? c + 16 * ldc : c + 32, *const c3 = c2 + 16;
    finish_stores();
    if (accumulate) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c1, c_bytes);
        if constexpr (R * N == 4) {
            _tile_loadd(2, c2, c_bytes);
            _tile_loadd(3, c3, c_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < depth; k += 16, a += 16, b += 16 * ldb) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + 16, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (R == 2) {
            _tile_loadd(5, a + 16 * a_row, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else if constexpr (N == 4) {
            _tile_loadd(6, b + 32, b_bytes);
            _tile_loadd(7, b + 48, b_bytes);
            _tile_dpbf16ps(2, 4, 6);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c1, c_bytes);
    if constexpr (R * N == 4) {
        _tile_stored(2, c2, c_bytes);
        _tile_stored(3, c3, c_bytes);
    }
}

// out[x][y] = in[y][x], 16 x 16 pairs. Each of four rounds exchanges the upper right and the lower left quarter of all
// blocks of 2, 4, 8, 16 lines and columns.
struct QuarterExchange {
    int32_t upper[4][16], lower[4][16];  // lanes of a line of the upper half; from 16 on, of its partner in the lower
    constexpr QuarterExchange() : upper(), lower() {
        for (int round = 0; round < 4; round++)
            for (int x = 0; x < 16; x++) {
                const int half = 1 << round;
                upper[round][x] = x & half ? 16 + x - half : x;
                lower[round][x] = x & half ? 16 + x : x + half;
            }
    }
};
inline void transpose_16(Bf16Pair* out, size_t ldo, const Bf16Pair* in, size_t ldi) {
    alignas(64) static constexpr QuarterExchange exchange;
    __m512i x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(in + i * ldi);
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        const __m512i upper = _mm512_load_si512(exchange.upper[round]),
                      lower = _mm512_load_si512(exchange.lower[round]);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const int partner = i + (1 << round);
            if (i & (1 << round)) continue;
            const __m512i line = x[i];
            x[i] = _mm512_permutex2var_epi32(line, upper, x[partner]);
            x[partner] = _mm512_permutex2var_epi32(line, lower, x[partner]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * ldo, x[i]);
}

// The shapes that amx_matmul takes: whole tiles of B, and of a transposed A lines that hold whole tiles.
inline bool amx_takes(int rows, int width, int depth, size_t a_row, size_t a_depth) {
    return width % 32 == 0 && depth % 16 == 0 &&
           (a_depth == 1 || (a_row == 1 && a_depth >= size_t(rows + 15) / 16 * 16));
}
// C[rows][width] (+)= A[rows][depth] B[depth][width], where the caller holds AmxTiles; element (row, k) of A is read at
// a[row * a_row + k * a_depth]. An A that is transposed, and rows that do not fill tiles, are copied piece by piece.
inline void amx_matmul(int rows, int width, int depth, const Bf16Pair* a, size_t a_row, size_t a_depth,
                       const Bf16Pair* b, size_t ldb, float* c, size_t ldc, bool accumulate) {
    constexpr int DEPTH = 64, LINE = DEPTH + 16;  // of a piece; lines of LINE pairs do not share cache sets
    alignas(64) Bf16Pair piece[32 * LINE];
    alignas(64) float edge[32 * 64];
    for (int r = 0; r < rows; r += 32) {
        const int some = std::min(32, rows - r), tiles = (some + 15) / 16;
        const bool whole = some == 16 * tiles, copied = !whole || a_depth != 1;
        for (int k = 0, slice; k < depth; k += slice) {
            slice = copied ? std::min(DEPTH, depth - k) : depth;
            const Bf16Pair* from = a + size_t(r) * a_row + size_t(k) * a_depth;
            if (a_depth != 1)
                for (int i = 0; i < 16 * tiles; i += 16)
                    for (int j = 0; j < slice; j += 16)
                        transpose_16(piece + i * LINE + j, LINE, from + i + size_t(j) * a_depth, a_depth);
            else if (!whole) {
                for (int i = 0; i < some; i++) std::copy_n(from + i * a_row, slice, piece + i * LINE);
                for (int i = some; i < 16 * tiles; i++) std::fill_n(piece + i * LINE, slice, Bf16Pair{});
            }
            if (copied) from = piece;
            const size_t line = copied ? size_t(LINE) : a_row;
            for (int x = 0, columns; x < width; x += columns) {
                columns = tiles == 1 && width - x >= 64 ? 64 : 32;
                float* const sums = c + size_t(r) * ldc + x;
                float* const to = whole ? sums : edge;
                const size_t ldto = whole ? ldc : 64;
                const bool add = accumulate || k > 0;
                for (int i = 0; add && !whole && i < some; i++) std::copy_n(sums + i * ldc, columns, edge + i * 64);
                const Bf16Pair* const right = b + size_t(k) * ldb + x;
                if (tiles == 2) amx_block<2, 2>(slice, from, line, right, ldb, to, ldto, add);
                else if (columns == 64) amx_block<1, 4>(slice, from, line, right, ldb, to, ldto, add);
                else amx_block<1, 2>(slice, from, line, right, ldb, to, ldto, add);
                for (int i = 0; !whole && i < some; i++) std::copy_n(edge + i * 64, columns, sums + i * ldc);
            }
        }
    }
}
#else
constexpr bool HAVE_AMX = false;
inline bool amx_granted() { return false; }
struct AmxTiles {
    explicit AmxTiles(bool) {}
    static bool here() { return false; }
};
template <int R, int N>
inline void amx_block(int, const Bf16Pair*, size_t, const Bf16Pair*, size_t, float*, size_t, bool) {}
inline bool amx_takes(int, int, int, size_t, size_t) { return false; }
inline void amx_matmul(int, int, int, const Bf16Pair*, size_t, size_t, const Bf16Pair*, size_t, float*, size_t, bool) {}
#endif
