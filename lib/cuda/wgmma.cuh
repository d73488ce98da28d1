// wgmma.cuh: products of a warpgroup, four warps whose first has an index that is a multiple of 4, on the tensor cores
// of Hopper. Under nvcc for sm_90a alone; on a CPU dev/emulator has the same names. A wgmma runs beside the code that
// issued it: between that and the wgmma_wait that covers it nobody may touch its accumulators, its A registers or the
// shared memory that it reads. All 128 threads call the same functions with the same tiles; a c or an a of the wrappers
// is 16 rows of each warp in the fragments of m16n8k16, see tiles.cuh: c[n] are columns 8 n .. 8 n + 7.
//
// A tile is KEY_TILE rows of 64 bf16 in the order of chunk_at<64>, which is wgmma's 128-byte swizzle; rows of 128 are
// two tiles, the first 64 columns and behind them the others. K-major are operands whose rows are rows of A or columns
// of B, MN-major those whose rows run along k.
#pragma once
#include "tiles.cuh"

#ifdef __CUDACC__
// The descriptor of the PTX manual, in units of 16 bytes: low has the address and the leading offset, high the stride
// offset and the swizzle. As two words, since only low changes from one operand to the next.
struct WgmmaTile {
    unsigned low, high;
    __device__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
};
// The operand that begins with this tile, which is at a multiple of 1024 bytes. leading_bytes: of an MN-major operand
// with 128 columns, from the tile of the first 64 to that of the others.
__device__ inline WgmmaTile wgmma_tile(const bf16* tile, unsigned leading_bytes = 0) {
    constexpr unsigned STRIDE = 1024;  // from 8 rows to the next 8
    constexpr unsigned SWIZZLE_OF_128_BYTES = 1u << 30;
    const unsigned address = unsigned(__cvta_generic_to_shared(tile));
    return {(address & 0x3ffff) >> 4 | leading_bytes >> 4 << 16, STRIDE >> 4 | SWIZZLE_OF_128_BYTES};
}
// The operand so many bytes further, a multiple of 16: 32 for the next 16 columns of a K-major one, 2048 for the next
// 16 rows of an MN-major one, 8192 for the next tile of either.
__device__ inline WgmmaTile operator+(WgmmaTile tile, int bytes) {
    return {tile.low + unsigned(bytes >> 4), tile.high};
}

// Orders what this thread did to registers before the wgmma that come: call it before the first one of a batch, after
// the last write to their accumulators and A registers.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
// Makes a group of the wgmma that this warp has issued since its last commit.
// Only groups can be waited for.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until all but this warp's latest GROUPS groups are done: their accumulators can be read then, their A registers
// written and, behind a barrier, their tiles filled again.
template <int GROUPS>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(GROUPS) : "memory");
}
// The same, behind which c is what the wgmma made of it: the compiler takes c for written where they are issued, and
// could read it too early.
template <int GROUPS, int N>
__device__ inline void wgmma_wait(float (&c)[N][4]) {
    wgmma_wait<GROUPS>();
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
// Lets wgmma see what this thread has written to shared memory, by copies too, once it has waited for them. It comes
// before the barrier behind which the wgmma are issued.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// The instruction for N pieces of 8 columns. Operands 0 .. 4 N - 1 of the asm are c; behind_8 and behind_16 name those
// behind them and give scale-d (0: c is only written), the signs and what is transposed.
#define WGMMA_ROW(mark, n) mark(c[n][0]), mark(c[n][1]), mark(c[n][2]), mark(c[n][3])
#define WGMMA_4_ROWS(mark, n) WGMMA_ROW(mark, n), WGMMA_ROW(mark, n + 1), WGMMA_ROW(mark, n + 2), WGMMA_ROW(mark, n + 3)
#define WGMMA_8_ROWS(mark, n) WGMMA_4_ROWS(mark, n), WGMMA_4_ROWS(mark, n + 4)
#define WGMMA_C_8                                                                                                    \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31"
#define WGMMA_C_16                                                                                          \
    WGMMA_C_8                                                                                               \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
    "%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(mark, behind_8, behind_16, ...)                                                                   \
    static_assert(N == 8 || N == 16, "64 or 128 columns");                                                      \
    if constexpr (N == 8)                                                                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_C_8 "}, " behind_8 ";\n"    \
                     : WGMMA_8_ROWS(mark, 0)                                                                    \
                     : __VA_ARGS__);                                                                            \
    else                                                                                                        \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_C_16 "}, " behind_16 ";\n" \
                     : WGMMA_8_ROWS(mark, 0), WGMMA_8_ROWS(mark, 8)                                             \
                     : __VA_ARGS__)
#define WGMMA_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// c (64 x 8 N) = a b^T over 16 columns of each; both K-major.
// What c held before is not read.
template <int N>
__device__ inline void wgmma_first(float (&c)[N][4], WgmmaTile a, WgmmaTile b) {
    WGMMA("=f", "%32, %33, 0, 1, 1, 0, 0", "%64, %65, 0, 1, 1, 0, 0", "l"(a.bits()), "l"(b.bits()));
}
// c (64 x 8 N) += a b^T over 16 columns of each, both K-major.
template <int N>
__device__ inline void wgmma_add(float (&c)[N][4], WgmmaTile a, WgmmaTile b) {
    WGMMA("+f", "%32, %33, 1, 1, 1, 0, 0", "%64, %65, 1, 1, 1, 0, 0", "l"(a.bits()), "l"(b.bits()));
}
// The same two with a (64 x 16) in registers.
// They hold the fragment of mma_m16n8k16.
template <int N>
__device__ inline void wgmma_first(float (&c)[N][4], const unsigned (&a)[4], WgmmaTile b) {
    WGMMA("=f", "{%32,%33,%34,%35}, %36, 0, 1, 1, 0", "{%64,%65,%66,%67}, %68, 0, 1, 1, 0", WGMMA_A, "l"(b.bits()));
}
template <int N>
__device__ inline void wgmma_add(float (&c)[N][4], const unsigned (&a)[4], WgmmaTile b) {
    WGMMA("+f", "{%32,%33,%34,%35}, %36, 1, 1, 1, 0", "{%64,%65,%66,%67}, %68, 1, 1, 1, 0", WGMMA_A, "l"(b.bits()));
}
// c (64 x 8 N) += a b, a (64 x 16) in registers; b is MN-major, 16 rows along k and 8 N columns.
// With N = 16 its tile has the leading_bytes.
template <int N>
__device__ inline void wgmma_add_columns(float (&c)[N][4], const unsigned (&a)[4], WgmmaTile b) {
    WGMMA("+f", "{%32,%33,%34,%35}, %36, 1, 1, 1, 1", "{%64,%65,%66,%67}, %68, 1, 1, 1, 1", WGMMA_A, "l"(b.bits()));
}
#undef WGMMA
#undef WGMMA_A
#undef WGMMA_C_8
#undef WGMMA_C_16
#undef WGMMA_ROW
#undef WGMMA_4_ROWS
#undef WGMMA_8_ROWS
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The same products by a warpgroup: four warps that have 16 rows each, of 64. Its C fragments are those of mma, and
// they become A fragments as above; a tile of 64 columns lies in shared memory as wgmma reads it. These functions only
// start: the sums are there when wgmma_wait says so, and until then neither they nor what is multiplied may be touched.

// From a tile of 64 columns to the next, of the same rows.
constexpr int WGMMA_TILE_BYTES = KEY_TILE * 64 * sizeof(bf16);
// The 64 rows of D columns that begin with this tile.
template <int D>
__device__ inline WgmmaTile wgmma_rows(const bf16* tile) {
    return wgmma_tile(tile, D > 64 ? WGMMA_TILE_BYTES : 0);
}
// c (64 x 64) = A B^T over all D columns; A in shared memory, or this warp's rows of it in registers
template <int D>
__device__ inline void start_product(float (&c)[KEY_TILE / 8][4], WgmmaTile a, WgmmaTile b) {
    wgmma_first(c, a, b);
#pragma unroll
    for (int x = 16; x < D; x += 16) {
        const int to_column = x / 64 * WGMMA_TILE_BYTES + x % 64 * 2;
        wgmma_add(c, a + to_column, b + to_column);
    }
}
template <int D>
__device__ inline void start_product(float (&c)[KEY_TILE / 8][4], const unsigned (&a)[D / 16][4], WgmmaTile b) {
    static_assert(D <= 64, "one tile");
    wgmma_first(c, a[0], b);
#pragma unroll
    for (int x = 16; x < D; x += 16) wgmma_add(c, a[x / 16], b + x * 2);
}
// c (64 x 8 N) += P B; P (64 x 64) rounded to bf16 by round_rows, B from wgmma_rows
template <int N>
__device__ inline void start_sum(float (&c)[N][4], const unsigned (&p)[KEY_TILE / 16][4], WgmmaTile b) {
#pragma unroll
    for (int k = 0; k < KEY_TILE / 16; k++) wgmma_add_columns(c, p[k], b + k * 16 * 128);
}
// a = p as A fragments
template <int N>
__device__ inline void round_rows(unsigned (&a)[N / 2][4], const float (&p)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) round_piece(a[k], p, k);
}
