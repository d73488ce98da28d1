// amx.h: Intel's AMX, which servers have since 2023: eight registers of 16 rows by 64 bytes for every thread, and an
// instruction that multiplies two of them, C[16][16] += A[16][32] B[32][16] in bf16 with sums in fp32. It takes 16
// cycles, where AVX512_BF16 takes 256. gemm.h uses it for products of bf16.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../model/bf16.h"
#include "../model/shape.h"

// Rows and columns of a tile of fp32, and the pairs of bf16 in a row of a tile.
constexpr int TILE = 16;

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
constexpr bool HAVE_AMX = true;

// Linux lets a process use the tiles after it has asked for them; old ones and some virtual machines do not.
inline bool amx_granted() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// The instructions, in assembler: CUDA up to 12.4 cannot read the header that newer versions of GCC have for them. r is
// the number of a register, base and stride, in bytes, tell where its rows are in memory.
#define TILE_LOAD(r, base, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #r ::"r"(base), "r"(stride))
#define TILE_STORE(r, base, stride) \
    asm volatile("tilestored %%tmm" #r ", (%0,%1,1)" ::"r"(base), "r"(stride) : "memory")
#define TILE_ZERO(r) asm volatile("tilezero %%tmm" #r ::)
#define TILE_MULTIPLY_ADD(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Sets up this thread's registers while the object lives, if they are wanted and granted: at full size, or for products
// whose A and C have fewer rows than a tile.
class AmxTiles {
  public:
    explicit AmxTiles(bool wanted, int rows = TILE) {
        if (!wanted || !amx_granted()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
        } config;
        for (int i = 0; i < 6; i++) config.rows[i] = uint8_t(rows);  // C and A; 6 and 7 hold B
        asm volatile("ldtilecfg %0" ::"m"(config));
        ready = true;
    }
    ~AmxTiles() {
        if (ready) asm volatile("tilerelease" ::);
        ready = false;
    }
    AmxTiles(const AmxTiles&) = delete;
    static bool here() { return ready; }  // whether this thread's registers are set up

  private:
    static inline thread_local bool ready = false;
};

// R x N tiles of C stay in registers 0 to 3 and are (+)= A[16 R][depth] B[depth][16 N]; depth in pairs, a multiple of
// 16. Numbers of registers are part of an instruction, so there is no loop over them.
template <int R, int N>
inline void amx_block(int depth, const Bf16Pair* a, size_t a_row, const Bf16Pair* b, size_t ldb, float* c, size_t ldc,
                      bool accumulate) {
    static_assert(R <= 2 && N <= 2, "four registers for C, two for A, two for B");
    const size_t a_bytes = a_row * sizeof *a, b_bytes = ldb * sizeof *b, c_bytes = ldc * sizeof *c;
    asm volatile("" ::: "memory");  // the loads read what was stored before
    if (accumulate) {
        TILE_LOAD(0, c, c_bytes);
        if (N == 2) TILE_LOAD(1, c + TILE, c_bytes);
        if (R == 2) TILE_LOAD(2, c + TILE * ldc, c_bytes);
        if (R == 2 && N == 2) TILE_LOAD(3, c + TILE * ldc + TILE, c_bytes);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    const float* next = c + R * TILE * ldc;  // what is written next, a row at a time
    for (int k = 0; k < depth; k += TILE, a += TILE, b += TILE * ldb, next += ldc) {
        __builtin_prefetch(next, 1);
        if (N == 2) __builtin_prefetch(next + TILE, 1);
        TILE_LOAD(4, a, a_bytes);
        TILE_LOAD(6, b, b_bytes);
        TILE_MULTIPLY_ADD(0, 4, 6);
        if (N == 2) {
            TILE_LOAD(7, b + TILE, b_bytes);
            TILE_MULTIPLY_ADD(1, 4, 7);
        }
        if (R == 2) {
            TILE_LOAD(5, a + TILE * a_row, a_bytes);
            TILE_MULTIPLY_ADD(2, 5, 6);
        }
        if (R == 2 && N == 2) TILE_MULTIPLY_ADD(3, 5, 7);
    }
    TILE_STORE(0, c, c_bytes);
    if (N == 2) TILE_STORE(1, c + TILE, c_bytes);
    if (R == 2) TILE_STORE(2, c + TILE * ldc, c_bytes);
    if (R == 2 && N == 2) TILE_STORE(3, c + TILE * ldc + TILE, c_bytes);
}
#else
constexpr bool HAVE_AMX = false;
inline bool amx_granted() { return false; }
struct AmxTiles {
    explicit AmxTiles(bool, int = TILE) {}
    static bool here() { return false; }
};
template <int R, int N>
inline void amx_block(int, const Bf16Pair*, size_t, const Bf16Pair*, size_t, float*, size_t, bool) {}
#endif

// C [M][N] (+)= A [M][K] B [K][N], M and N at most two tiles, K in pairs; A and B are there as whole tiles. Edges of C
// go through a buffer.
inline void amx_edge(GemmSize s, const Bf16Pair* a, size_t a_row, const Bf16Pair* b, size_t ldb, float* c, size_t ldc,
                     bool accumulate) {
    const bool whole = s.M % TILE == 0 && s.N % TILE == 0;
    alignas(64) float edge[2 * TILE * 2 * TILE];
    float* const to = whole ? c : edge;
    const size_t ldto = whole ? ldc : 2 * TILE;
    for (int y = 0; !whole && accumulate && y < s.M; y++) std::copy_n(c + y * ldc, s.N, edge + y * 2 * TILE);
    if (s.M > TILE && s.N > TILE) amx_block<2, 2>(s.K, a, a_row, b, ldb, to, ldto, accumulate);
    else if (s.M > TILE) amx_block<2, 1>(s.K, a, a_row, b, ldb, to, ldto, accumulate);
    else if (s.N > TILE) amx_block<1, 2>(s.K, a, a_row, b, ldb, to, ldto, accumulate);
    else amx_block<1, 1>(s.K, a, a_row, b, ldb, to, ldto, accumulate);
    for (int y = 0; !whole && y < s.M; y++) std::copy_n(edge + y * 2 * TILE, s.N, c + y * ldc);
}
