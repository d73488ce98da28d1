// gemm.h: matrix products on the CPU: a micro-kernel in vector registers, a blocked GEMM, and an exponential
// that vectorises. Used by nsa_cpu.h and lib/cpu/attention.h; nothing in here knows the model.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#define _AMXTILEINTRIN_H_INCLUDED  // amx.h says why it does without GCC's header of this name
#include <immintrin.h>
#endif
#include "amx.h"
#include "../model/bf16.h"
#include "../base/memory.h"
#include "../base/processor.h"

// ---------------------------------------------------------------------------------------------------------------------
// The micro-kernel, C[R rows][NV vectors] (+)= A[R][depth] B[depth][NV vectors], with C in registers. GCC's vector
// extension, so the same lines are AVX-512, AVX2, NEON or SSE. A is read at a + row*a_row + k*a_depth: transposed
// operands cost nothing. Element is real, or Bf16Pair: then depth counts pairs.

// 6 x 4 accumulators + 4 + 1 of AVX-512's 32 registers, 6 x 2 + 2 + 1 of the 16 that others have.
constexpr int MICRO_VECTORS = VECTOR_BYTES == 64 ? 4 : 2;
constexpr int MICRO_ROWS = 6;

template <class real>
struct VectorOf {
    static constexpr int lanes = VECTOR_BYTES / sizeof(real);
    typedef real type __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));
};
using FloatVector = VectorOf<float>::type;

// sum + x * y, of vectors or of single numbers. By value: GCC would keep a sum passed by reference in memory too, and
// store it in every iteration.
template <class T, class Element>
inline T multiply_add(T sum, Element x, T y) {
    return sum + x * y;
}
#if defined(__FMA__) || defined(__aarch64__)
// Rounded once, as in vectors. Left to it, the compiler does so for some numbers of rows and not for others.
inline float multiply_add(float sum, float x, float y) { return std::fma(x, y, sum); }
inline double multiply_add(double sum, double x, double y) { return std::fma(x, y, sum); }
#endif
inline float multiply_add(float sum, Bf16Pair x, Bf16Pair y) {
    return sum + from_bf16(x.first) * from_bf16(y.first) + from_bf16(x.second) * from_bf16(y.second);
}
#ifdef __AVX512BF16__
inline FloatVector multiply_add(FloatVector sum, Bf16Pair x, FloatVector y) {
    int32_t both;
    std::memcpy(&both, &x, 4);
    return (FloatVector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)y);
}
#endif

template <int R, int NV, class Element, class real>
inline void micro_kernel(int depth, const Element* __restrict a, size_t a_row, size_t a_depth,
                         const Element* __restrict b, size_t ldb, real* __restrict c, size_t ldc, bool accumulate) {
    static_assert(sizeof(Element) == sizeof(real), "a vector of elements goes with a vector of sums");
    using vector = typename VectorOf<real>::type;
    constexpr int lanes = VectorOf<real>::lanes;
    vector sum[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) sum[r][v] = accumulate ? *(const vector*)(c + r * ldc + v * lanes) : vector{};
    for (int k = 0; k < depth; k++) {
        vector row[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) row[v] = *(const vector*)(b + k * ldb + v * lanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Element x = a[r * a_row + k * a_depth];
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sum[r][v] = multiply_add(sum[r][v], x, row[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) *(vector*)(c + r * ldc + v * lanes) = sum[r][v];
}

// R rows, any width: full register blocks, then the remaining whole vectors, then single columns.
template <int R, class Element, class real>
inline void tile_rows(int width, int depth, const Element* a, size_t a_row, size_t a_depth, const Element* b,
                      size_t ldb, real* c, size_t ldc, bool accumulate) {
    constexpr int lanes = VectorOf<real>::lanes;
    int x = 0;
    for (; x + MICRO_VECTORS * lanes <= width; x += MICRO_VECTORS * lanes)
        micro_kernel<R, MICRO_VECTORS>(depth, a, a_row, a_depth, b + x, ldb, c + x, ldc, accumulate);
    const int vectors = (width - x) / lanes;  // below MICRO_VECTORS, which is at most 4
    if (vectors == 3) micro_kernel<R, 3>(depth, a, a_row, a_depth, b + x, ldb, c + x, ldc, accumulate);
    if (vectors == 2) micro_kernel<R, 2>(depth, a, a_row, a_depth, b + x, ldb, c + x, ldc, accumulate);
    if (vectors == 1) micro_kernel<R, 1>(depth, a, a_row, a_depth, b + x, ldb, c + x, ldc, accumulate);
    for (x += vectors * lanes; x < width; x++)
        for (int r = 0; r < R; r++) {
            real sum = accumulate ? c[r * ldc + x] : real(0);
            for (int k = 0; k < depth; k++) sum = multiply_add(sum, a[r * a_row + k * a_depth], b[k * ldb + x]);
            c[r * ldc + x] = sum;
        }
}

// A square of vectors in registers. Each step interleaves its two halves, which rotates the bits of the index (row,
// column) by one; after log2(lanes) steps rows and columns have changed places.
template <class Element>
struct Square {
    static constexpr int lanes = VECTOR_BYTES / sizeof(Element);
    using integer = std::conditional_t<sizeof(Element) == 8, int64_t, int32_t>;
    typedef integer vector __attribute__((vector_size(VECTOR_BYTES)));
    vector row[lanes];

    // The lanes FIRST, FIRST + 1 .. of x and y in turn.
    template <int FIRST, size_t... I>
    static vector in_turn(vector x, vector y, std::index_sequence<I...>) {
#ifdef __clang__
        return __builtin_shufflevector(x, y, (FIRST + I / 2 + I % 2 * lanes)...);
#else
        return __builtin_shuffle(x, y, vector{(FIRST + I / 2 + I % 2 * lanes)...});
#endif
    }
    void transpose() {
        using all = std::make_index_sequence<lanes>;
#pragma GCC unroll 4
        for (int n = 1; n < lanes; n *= 2) {
            vector next[lanes];
#pragma GCC unroll 16
            for (int i = 0; i < lanes / 2; i++) {
                next[2 * i] = in_turn<0>(row[i], row[i + lanes / 2], all());
                next[2 * i + 1] = in_turn<lanes / 2>(row[i], row[i + lanes / 2], all());
            }
#pragma GCC unroll 16
            for (int i = 0; i < lanes; i++) row[i] = next[i];
        }
    }
};

// out[i][j] = in[j][i], a square of vectors, of which `count` rows are written
template <class Element>
inline void transpose_square(Element* out, size_t ldo, const Element* in, size_t ldi,
                             int count = Square<Element>::lanes) {
    Square<Element> square;
    for (int i = 0; i < Square<Element>::lanes; i++) std::memcpy(&square.row[i], in + i * ldi, VECTOR_BYTES);
    square.transpose();
    for (int i = 0; i < count; i++) std::memcpy(out + i * ldo, &square.row[i], VECTOR_BYTES);
}

// The left factor of a product: element (row, k) is data[row * next_row + k * next_k].
template <class Element>
struct LeftFactor {
    const Element* data;
    size_t next_row, next_k;
};
// The products that amx_matmul takes. It reads whole tiles of a transposed A.
inline bool amx_takes(int rows, int width, const LeftFactor<Bf16Pair>& left) {
    return AmxTiles::here() && width % TILE == 0 &&
           (left.next_k == 1 || (left.next_row == 1 && left.next_k >= size_t(rows + TILE - 1) / TILE * TILE));
}
// Up to two tiles of rows of A in AMX's order, [2 TILE][line]: `depth` of its elements, and 0 up to a whole tile.
inline void amx_rows(Bf16Pair* out, size_t line, int rows, int depth, const LeftFactor<Bf16Pair>& left) {
    for (int y = 0; y < rows; y += TILE)
        for (int k = 0; k < depth; k += TILE) {
            alignas(64) Bf16Pair square[TILE][TILE] = {};
            const Bf16Pair* const from = left.data + y * left.next_row + k * left.next_k;
            const bool along_k = left.next_k == 1;
            const int lines = std::min(TILE, along_k ? rows - y : depth - k), length = along_k ? depth - k : TILE;
            for (int i = 0; i < lines; i++)
                std::copy_n(from + i * (along_k ? left.next_row : left.next_k), std::min(TILE, length), square[i]);
            Bf16Pair* const to = out + y * line + k;
            if (!along_k) transpose_square(to, line, square[0], TILE);
            else
                for (int i = 0; i < TILE; i++) std::memcpy(to + i * line, square[i], sizeof square[i]);
        }
}
// tile_matmul in AMX's registers. What is no whole tile of A, or transposed, is copied, and the last lines of B.
inline void amx_matmul(int rows, int width, int depth, const LeftFactor<Bf16Pair>& left, const Bf16Pair* b, size_t ldb,
                       float* c, size_t ldc, bool accumulate) {
    constexpr int MOST = 4 * TILE, LINE = MOST + TILE;  // lines of LINE pairs do not share cache sets
    alignas(64) Bf16Pair room[2 * TILE * LINE], last_lines[TILE * 2 * TILE];
    for (int y = 0; y < rows; y += 2 * TILE)
        for (int k = 0, count; k < depth; k += count) {
            const int M = std::min(2 * TILE, rows - y);
            const bool copied = M % TILE || left.next_k != 1 || depth - k < TILE;
            const LeftFactor<Bf16Pair> a{left.data + y * left.next_row + k * left.next_k, left.next_row, left.next_k};
            count = depth - k < TILE ? depth - k : std::min(depth - k, copied ? MOST : depth) / TILE * TILE;
            if (copied) amx_rows(room, LINE, M, count, a);
            for (int x = 0; x < width; x += 2 * TILE) {
                const int N = std::min(2 * TILE, width - x);
                const Bf16Pair* right = b + k * ldb + x;
                for (int i = 0; count < TILE && i < TILE; i++)
                    if (i < count) std::copy_n(right + i * ldb, N, last_lines + i * 2 * TILE);
                    else std::fill_n(last_lines + i * 2 * TILE, N, Bf16Pair{});
                if (count < TILE) right = last_lines;
                amx_edge({M, N, count}, copied ? room : a.data, copied ? size_t(LINE) : a.next_row, right,
                         count < TILE ? size_t(2 * TILE) : ldb, c + y * ldc + x, ldc, accumulate || k > 0);
            }
        }
}
// C[rows][width] (+)= A[rows][depth] B[depth][width] for operands that fit in the cache; one thread. In AMX's
// registers, if the thread has set them up.
template <class Element, class real>
inline void tile_matmul(int rows, int width, int depth, const LeftFactor<Element>& left, const Element* b, size_t ldb,
                        real* c, size_t ldc, bool accumulate) {
    if constexpr (HAVE_AMX && std::is_same<Element, Bf16Pair>::value)
        if (amx_takes(rows, width, left)) return amx_matmul(rows, width, depth, left, b, ldb, c, ldc, accumulate);
    const Element* a = left.data;
    const size_t a_row = left.next_row, a_depth = left.next_k;
    int r = 0;
    for (; r + MICRO_ROWS <= rows; r += MICRO_ROWS)
        tile_rows<MICRO_ROWS>(width, depth, a + r * a_row, a_row, a_depth, b, ldb, c + r * ldc, ldc, accumulate);
    a += r * a_row;
    c += r * ldc;
    switch (rows - r) {
        case 5: tile_rows<5>(width, depth, a, a_row, a_depth, b, ldb, c, ldc, accumulate); break;
        case 4: tile_rows<4>(width, depth, a, a_row, a_depth, b, ldb, c, ldc, accumulate); break;
        case 3: tile_rows<3>(width, depth, a, a_row, a_depth, b, ldb, c, ldc, accumulate); break;
        case 2: tile_rows<2>(width, depth, a, a_row, a_depth, b, ldb, c, ldc, accumulate); break;
        case 1: tile_rows<1>(width, depth, a, a_row, a_depth, b, ldb, c, ldc, accumulate); break;
        default: break;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing of operands for the micro-kernel. Element is real or Bf16Pair, which holds PER = 2 values that are adjacent
// along the summed dimension. So the layout depends on that dimension: a product that sums over columns reads
// [rows][columns / PER], one that sums over rows reads [rows / PER][columns].
template <class Element>
constexpr int PER = std::is_same<Element, Bf16Pair>::value ? 2 : 1;

#ifdef __AVX512BF16__
// The order of 16-bit lanes that takes elements in turn: of both halves of a vector; of the lower halves of two
// vectors.
struct InTurn {
    uint16_t halves[32], vectors[32];
    constexpr InTurn() : halves(), vectors() {
        for (int i = 0; i < 16; i++) {
            halves[2 * i] = vectors[2 * i] = uint16_t(i);
            halves[2 * i + 1] = uint16_t(16 + i);
            vectors[2 * i + 1] = uint16_t(32 + i);
        }
    }
};
alignas(64) constexpr InTurn IN_TURN;
#endif
// pairs[i] = (x[i], y[i])
inline void round_two_rows(Bf16Pair* pairs, const float* x, const float* y, int count) {
    int i = 0;
#ifdef __AVX512BF16__
    const __m512i order = _mm512_load_si512(IN_TURN.halves);
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_si512(pairs + i,
                            _mm512_permutexvar_epi16(
                                order, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(y + i), _mm512_loadu_ps(x + i))));
#endif
    for (; i < count; i++) pairs[i] = {to_bf16(x[i]), to_bf16(y[i])};
}
// pairs[i] = (x[2 i], x[2 i + 1])
inline void round_row(Bf16Pair* pairs, const float* x, int count) {
    int i = 0;
#ifdef __AVX512BF16__
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_si512(pairs + i,
                            (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 2 * i + 16), _mm512_loadu_ps(x + 2 * i)));
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_si256((__m256i*)(pairs + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + 2 * i)));
#endif
    for (; i < count; i++) pairs[i] = {to_bf16(x[2 * i]), to_bf16(x[2 * i + 1])};
}
// Pairs of rows from two rows of pairs: out[2 i] = (x[i].first, y[i].first), out[2 i + 1] = (x[i].second, y[i].second)
inline void pair_rows(Bf16Pair* out, const Bf16Pair* x, const Bf16Pair* y, int count) {
    int i = 0;
#ifdef __AVX512BF16__
    const __m512i low = _mm512_load_si512(IN_TURN.vectors), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (; i + 16 <= count; i += 16) {
        const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(y + i);
        _mm512_storeu_si512(out + 2 * i, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(out + 2 * i + 16, _mm512_permutex2var_epi16(a, high, b));
    }
#endif
    for (; i < count; i++) {
        out[2 * i] = {x[i].first, y[i].first};
        out[2 * i + 1] = {x[i].second, y[i].second};
    }
}
// line = `count` numbers that lie one behind the other along the summed dimension; an odd one is paired with 0.
template <class Element, class real>
inline void read_along(Element* line, const real* x, int count) {
    if constexpr (PER<Element> == 1) std::copy_n(x, count, line);
    else {
        round_row(line, x, count / 2);
        if (count % 2) line[count / 2] = {to_bf16(x[count - 1]), 0};
    }
}
// line = `count` numbers that lie across it: as pairs, each with the one of the next row, or with 0 where there is
// none.
template <class Element, class real>
inline void read_across(Element* line, const real* x, const real* next_row, int count) {
    if constexpr (PER<Element> == 1) std::copy_n(x, count, line);
    else if (next_row) round_two_rows(line, x, next_row, count);
    else
        for (int i = 0; i < count; i++) line[i] = {to_bf16(x[i]), 0};
}
// x [rows][D] for a product that sums over D and has the rows side by side: out [D / PER][next]. The rows are read
// whole and transposed in the cache, in `room`, 16 elements more than D for each.
template <class Element, class real>
inline void pack_columns(Element* out, size_t next, const real* x, int rows, int D, Element* room) {
    const int length = D / PER<Element>;
    const size_t line = size_t(length) + 16;
    for (int i = 0; i < rows; i++) read_along(room + i * line, x + size_t(i) * D, D);
    for (int j0 = 0; j0 < length; j0 += 16)
        for (int i = 0; i < rows; i++)
            for (int j = j0; j < std::min(length, j0 + 16); j++) out[i + j * next] = room[i * line + j];
}
// x [rows][columns], rows ld apart, for a product that sums over the columns. Reals stay where they are; pairs are made
// in `out`, rows ld / 2 apart. ld is even; the last of an odd number of columns is paired with 0.
template <class Element, class real>
inline const Element* sum_over_columns(Element* out, const real* x, size_t ld, int rows, int columns) {
    if constexpr (PER<Element> == 1) return x;
    else {
        for (int r = 0; r < rows; r++) read_along(out + r * (ld / 2), x + r * ld, columns);
        return out;
    }
}
// The same for a product that sums over the rows: rows of pairs are ld apart. x may be what sum_over_columns has made,
// rows of pairs that are ld / 2 apart.
template <class Element, class Number>
inline const Element* sum_over_rows(Element* out, const Number* x, size_t ld, int rows, int columns) {
    if constexpr (PER<Element> == 1) return x;
    else {
        if constexpr (PER<Number> == 1)
            for (int r = 0; r < rows; r += 2)
                read_across(out + r / 2 * ld, x + r * ld, r + 1 < rows ? x + (r + 1) * ld : nullptr, columns);
        else {
            const std::vector<Element> none(rows % 2 ? columns / 2 : 0);
            for (int r = 0; r < rows; r += 2)
                pair_rows(out + r / 2 * ld, x + r * (ld / 2), r + 1 < rows ? x + (r + 1) * (ld / 2) : none.data(),
                          columns / 2);
        }
        return out;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// GEMM: C[M,N] = op(A)[M,K] op(B)[K,N], or += with `accumulate`; op transposes or does nothing.

template <class real>
class Gemm {
  public:
    bool bf16 = false;  // round A and B to bf16

    // C = A B^T, A B, A^T B, or += with `accumulate`.
    void nt(GemmSize s, const real* A, size_t lda, const real* B, size_t ldb, bool accumulate, real* C, size_t ldc) {
        (*this)(false, true, s.M, s.N, s.K, A, lda, B, ldb, accumulate, C, ldc);
    }
    void nn(GemmSize s, const real* A, size_t lda, const real* B, size_t ldb, bool accumulate, real* C, size_t ldc) {
        (*this)(false, false, s.M, s.N, s.K, A, lda, B, ldb, accumulate, C, ldc);
    }
    void tn(GemmSize s, const real* A, size_t lda, const real* B, size_t ldb, bool accumulate, real* C, size_t ldc) {
        (*this)(true, false, s.M, s.N, s.K, A, lda, B, ldb, accumulate, C, ldc);
    }
    void operator()(bool transpose_a, bool transpose_b, int M, int N, int K, const real* A, size_t lda, const real* B,
                    size_t ldb, bool accumulate, real* C, size_t ldc) {
        if constexpr (sizeof(real) == sizeof(Bf16Pair))
            if (bf16)
                return HAVE_AMX && amx_granted()
                           ? blocked<Bf16Pair, HAVE_AMX>(transpose_a, transpose_b, M, N, K, A, lda, B, ldb, accumulate,
                                                         C, ldc)
                           : blocked<Bf16Pair>(transpose_a, transpose_b, M, N, K, A, lda, B, ldb, accumulate, C, ldc);
        blocked<real>(transpose_a, transpose_b, M, N, K, A, lda, B, ldb, accumulate, C, ldc);
    }

    // The idea (Goto & van de Geijn, "Anatomy of high-performance matrix multiplication", 2008): A and B are copied, so
    // that the micro-kernel reads memory in order. B is packed in panels of PANEL columns, each KC deep, which all
    // threads share; then each thread takes blocks of C, packs the rows of A that a block needs and goes over the
    // panels. Every element of C is one sum over k in order, whatever the blocks: the same bits on any number of
    // threads. Element is real, or Bf16Pair: then the copies round, and depth, KC and k count pairs. TILES: in AMX's
    // registers, which add 32 products at a time.
    template <class Element, bool TILES = false>
    void blocked(bool transpose_a, bool transpose_b, int M, int N, int K, const real* A, size_t lda, const real* B,
                 size_t ldb, bool accumulate, real* C, size_t ldc) {
        if (K == 0 && !accumulate)
            for (int m = 0; m < M; m++) std::fill_n(C + m * ldc, N, real(0));
        if (M == 0 || N == 0 || K == 0) return;
        using Size = std::conditional_t<TILES, Tiles, Vectors>;
        constexpr int KC = Size::KC;
        const Factor<real> a{A, lda, transpose_a, M}, b{B, ldb, !transpose_b, N};
        const int depth = (K + PER<Element> - 1) / PER<Element>, steps = (depth + KC - 1) / KC,
                  panels = (N + PANEL - 1) / PANEL, threads = size_t(M) * N * K > 100000 ? omp_get_max_threads() : 1;
        if (M <= FEW_ROWS && !transpose_a && transpose_b)
            return few_rows<Element, Size>(a, b, K, accumulate, C, ldc, threads);
        const Parts across{panels, (panels + Size::PANELS - 1) / Size::PANELS};
        // What is packed of B at a time, as deep as its memory allows: each time all threads wait for one another.
        const int max_steps = 4 * Size::PANELS / across.most();
        const Parts slabs{steps, (steps + max_steps - 1) / max_steps};
        Element* const b_packed =
            reinterpret_cast<Element*>(b_memory.get(size_t(slabs.most()) * across.most() * KC * PANEL));
        Element* const a_packed =
            reinterpret_cast<Element*>(a_memory.get(size_t(threads) * Size::STEPS * Size::A_BLOCK));
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const AmxTiles registers(TILES);
            for (int slice = 0; slice < across.count; slice++)
                for (int slab = 0; slab < slabs.count; slab++) {
                    const int panel0 = across.begin(slice), width = across.begin(slice + 1) - panel0,
                              step0 = slabs.begin(slab), step1 = slabs.begin(slab + 1);
#pragma omp for collapse(2) schedule(static)
                    for (int step = step0; step < step1; step++)
                        for (int j = 0; j < width; j++)
                            pack_panel<Size>(b_packed + (size_t(step - step0) * width + j) * KC * PANEL, b,
                                             (panel0 + j) * PANEL, step * KC, depth, K);
                    const Blocks blocks(M, width, threads, Size::ROWS, Size::MC);
#pragma omp for schedule(dynamic, 1)
                    for (int block = 0; block < blocks.count(); block++) {
                        Element* const a_block = a_packed + size_t(omp_get_thread_num()) * Size::STEPS * Size::A_BLOCK;
                        const int row0 = blocks.rows.begin(block / blocks.columns.count) * Size::ROWS,
                                  row1 = std::min(M, blocks.rows.begin(block / blocks.columns.count + 1) * Size::ROWS),
                                  j0 = blocks.columns.begin(block % blocks.columns.count),
                                  j1 = blocks.columns.begin(block % blocks.columns.count + 1);
                        for (int first = step0, end; first < step1; first = end) {
                            end = std::min(step1, first + Size::STEPS);
                            for (int step = first; step < end; step++)
                                pack_rows<Size>(a_block + (step - first) * Size::A_BLOCK, a, row0, row1 - row0,
                                                step * KC, depth, K);
                            for (int j = j0; j < j1; j++)
                                for (int step = first; step < end; step++)
                                    multiply_panel<Size>(a_block + (step - first) * Size::A_BLOCK, transpose_a,
                                                         b_packed + (size_t(step - step0) * width + j) * KC * PANEL,
                                                         std::min(KC, depth - step * KC), row1 - row0,
                                                         std::min(PANEL, N - (panel0 + j) * PANEL),
                                                         C + row0 * ldc + (panel0 + j) * PANEL, ldc,
                                                         accumulate || step > 0);
                        }
                    }
                }
        }
    }

  private:
    static constexpr int LANES = VectorOf<real>::lanes;
    static constexpr int PANEL = MICRO_VECTORS * LANES;  // columns of a panel of B
    static constexpr int FEW_ROWS = 4;                   // see few_rows()
    // Panels of B are KC deep: in fp32 one takes 64 KiB, or 16 with AVX2. ROWS are multiplied at once. A block of A has
    // at most MC rows and the depth of STEPS panels, a part of the L2 cache. So many PANELS are packed of B at a time,
    // times 4 where they are few: 4 MiB of fp32. If A_ROW, from row to row of a block, were a power of two, rows would
    // share cache sets.
    struct Vectors {
        static constexpr bool tiles = false;
        static constexpr int KC = 256, ROWS = MICRO_ROWS, MC = 96, STEPS = 1, PANELS = 1024 / PANEL;
        static constexpr int A_ROW = KC + 16, A_LINE = MC + 16, A_BLOCK = A_LINE * KC;
    };
    // AMX multiplies so fast that memory sets the pace: the half of a panel that tiles of A meet one after another
    // stays in the L1 cache, blocks of A and of C fill the L2 cache.
    struct Tiles {
        static constexpr bool tiles = true;
        static constexpr int KC = 128, ROWS = 2 * TILE, MC = 256, STEPS = 4, PANELS = 2048 / PANEL;
        static constexpr int A_ROW = KC + 16, A_LINE = MC + 16, A_BLOCK = MC * A_ROW;
    };
    static constexpr int whole(int n, int step) { return (n + step - 1) / step * step; }
    Workspace<real> a_memory, b_memory;

    // 0..size-1 in `count` parts of about equal size.
    struct Parts {
        int size, count;
        int begin(int part) const { return int(int64_t(size) * part / count); }
        int most() const { return (size + count - 1) / count; }
    };
    // The blocks of C that one thread computes at a time: of at most MC rows, and so many that all threads end at about
    // the same time.
    struct Blocks {
        Parts rows{0, 0}, columns{0, 0};  // of rows of tiles, and of panels
        int count() const { return rows.count * columns.count; }
        Blocks(int M, int panels, int threads, int at_once, int most) {
            const int tiles = (M + at_once - 1) / at_once, fewest = (tiles * at_once + most - 1) / most;
            double best = std::numeric_limits<double>::infinity();
            for (int c = 1; c <= panels && c <= 2 * threads; c *= 2)
                for (int r = fewest; r <= std::min(tiles, fewest + threads); r++) {
                    const Parts y{tiles, r}, x{panels, c};
                    // Each block packs its rows anew, which takes about half as long as to multiply them by a panel.
                    const double time = double((r * c + threads - 1) / threads) * y.most() * (x.most() + 0.5);
                    if (time >= best) continue;
                    best = time;
                    rows = y;
                    columns = x;
                }
        }
    };
    // A factor as packing sees it: element (k, x) is at data[k * ld + x] where along_x, else at data[x * ld + k]; x
    // counts rows of A or columns of B.
    template <class T>
    struct Factor {
        const T* data;
        size_t ld;
        bool along_x;
        int width;
    };

    // line[i] = element (k, x + i), i < count: one number, or the pair (2 k, 2 k + 1), whose second is 0 behind the
    // end.
    template <class Element>
    static void read_line_across(Element* line, const Factor<real>& in, int k, int x, int count, int K) {
        const real* const from = in.data + size_t(PER<Element>) * k * in.ld + x;
        for (int i = 0; i < count; i += 64 / int(sizeof(real)))
            for (int p = 0; p < PER<Element>; p++) __builtin_prefetch(from + (8 + p) * in.ld + i);
        read_across(line, from, PER<Element> * k + 1 < K ? from + in.ld : nullptr, count);
    }
    // line[i] = element (k + i, x)
    template <class Element>
    static void read_line_along(Element* line, const Factor<real>& in, int k, int x, int count, int K) {
        const int first = PER<Element> * k;
        read_along(line, in.data + in.ld * x + first, std::min(PER<Element> * count, K - first));
    }
    // panel [kc][PANEL] = columns x .. of B, from k on; columns behind the last are 0 up to a whole vector. For tiles,
    // so are lines behind the last.
    template <class Size, class Element>
    static void pack_panel(Element* panel, const Factor<real>& b, int x, int k, int depth, int K) {
        const int kc = std::min(Size::KC, depth - k), width = std::min(PANEL, b.width - x),
                  padded = whole(width, LANES);
        if (Size::tiles) std::fill(panel + kc * PANEL, panel + whole(kc, TILE) * PANEL, Element{});
        if (b.along_x)
            for (int i = 0; i < kc; i++, panel += PANEL) {
                read_line_across(panel, b, k + i, x, width, K);
                std::fill(panel + width, panel + padded, Element{});
            }
        else
            for (int j = 0; j < padded; j += LANES)
                transpose_lines<Size>(panel + j, b, x + j, std::min(LANES, width - j), k, kc, K);
    }
    // out [kc][PANEL] = LANES columns x .. of B, of which `count` are there; they lie along k in memory. They are read
    // as a whole first: short reads of many lines defeat the processor's prefetching. What follows is fetched
    // meanwhile: the next columns, or after a panel's last the same panel's next piece along k.
    template <class Size, class Element>
    static void transpose_lines(Element* out, const Factor<real>& b, int x, int count, int k, int kc, int K) {
        alignas(64) Element lines[LANES][Size::A_ROW];
        for (int y = 0; y < count; y++) read_line_along(lines[y], b, k, x + y, kc, K);
        for (int y = count; y < LANES; y++) std::fill_n(lines[y], kc, Element{});
        const bool last = x % PANEL == PANEL - LANES;
        const int next_x = last ? x + LANES - PANEL : x + LANES, next_k = PER<Element> * (last ? k + Size::KC : k);
        for (int i = 0; i < kc; i += LANES) {
            if (i < LANES * LANES)
                for (int line = 0; line < PER<Element> * Size::KC; line += 64 / int(sizeof(real)))
                    __builtin_prefetch(b.data + (next_x + size_t(i / LANES)) * b.ld + next_k + line);
            transpose_square(out + i * PANEL, PANEL, lines[0] + i, Size::A_ROW, std::min(LANES, kc - i));
        }
    }
    // `count` rows of A from x on; rows up to a whole tile are 0. Whatever way A lies in memory, its lines are copied
    // as they are: to rows A_ROW apart, or to lines along the rows, A_LINE apart. AMX reads rows only.
    template <class Size, class Element>
    static void pack_rows(Element* block, const Factor<real>& a, int x, int count, int k, int depth, int K) {
        const int kc = std::min(Size::KC, depth - k), padded = whole(count, Size::tiles ? TILE : MICRO_ROWS);
        if constexpr (Size::tiles)
            if (a.along_x) {
                for (int i = 0; i < kc; i += TILE)
                    transpose_rows(block + i, a, x, count, k + i, std::min(TILE, kc - i), K);
                return;
            }
        if (a.along_x) {
            for (int i = 0; i < kc; i++, block += Vectors::A_LINE) {
                read_line_across(block, a, k + i, x, count, K);
                std::fill(block + count, block + padded, Element{});
            }
        } else {
            for (int y = 0; y < count; y++) read_line_along(block + y * Size::A_ROW, a, k, x + y, kc, K);
            for (int y = count; y < padded; y++) std::fill_n(block + y * Size::A_ROW, kc, Element{});
            for (int y = 0; Size::tiles && y < padded; y++)
                std::fill(block + y * Size::A_ROW + kc, block + y * Size::A_ROW + whole(kc, TILE), Element{});
        }
    }
    // out [count][A_ROW] = a tile's width of A's rows, of which kc elements are there, from lines along the rows
    template <class Element>
    static void transpose_rows(Element* out, const Factor<real>& a, int x, int count, int k, int kc, int K) {
        alignas(64) Element lines[TILE][Tiles::A_LINE];
        for (int i = 0; i < kc; i++) {
            read_line_across(lines[i], a, k + i, x, count, K);
            std::fill(lines[i] + count, lines[i] + whole(count, TILE), Element{});
        }
        for (int i = kc; i < TILE; i++) std::fill_n(lines[i], whole(count, TILE), Element{});
        for (int y = 0; y < count; y += TILE)
            transpose_square(out + y * Tiles::A_ROW, Tiles::A_ROW, lines[0] + y, Tiles::A_LINE);
    }
    // C [M][N] (+)= packed rows of A times a panel of B, in AMX's registers
    static void multiply_tiles(const Bf16Pair* a, size_t a_row, const Bf16Pair* b, GemmSize s, float* c, size_t ldc,
                               bool accumulate) {
        for (int x = 0; x < s.N; x += 2 * TILE)
            for (int y = 0; y < s.M; y += 2 * TILE)
                amx_edge({std::min(2 * TILE, s.M - y), std::min(2 * TILE, s.N - x), s.K}, a + y * a_row, a_row, b + x,
                         PANEL, c + y * ldc + x, ldc, accumulate);
    }
    // C [rows][width] (+)= packed rows of A times a panel of B. Edges of C go through a buffer.
    template <class Size, class Element>
    static void multiply_panel(const Element* a, bool in_tiles, const Element* b, int depth, int rows, int width,
                               real* c, size_t ldc, bool accumulate) {
        if constexpr (Size::tiles) multiply_tiles(a, Size::A_ROW, b, GemmSize{rows, width, depth}, c, ldc, accumulate);
        else
            for (int y = 0; y < rows; y += MICRO_ROWS) {
                const int left = std::min(MICRO_ROWS, rows - y);
                const bool whole = left == MICRO_ROWS && width % LANES == 0;
                alignas(64) real edge[MICRO_ROWS * PANEL];
                real* const here = c + y * ldc;
                if (!whole) std::fill_n(edge, MICRO_ROWS * PANEL, real(0));
                if (!whole && accumulate)
                    for (int i = 0; i < left; i++) std::copy_n(here + i * ldc, width, edge + i * PANEL);
                if (whole)
                    for (int i = 0; i < MICRO_ROWS; i++)
                        for (int v = 0; v < width; v += 64 / int(sizeof(real)))
                            __builtin_prefetch(here + i * ldc + v, 1);
                real* const to = whole ? here : edge;
                const size_t ldto = whole ? ldc : PANEL;
                if (in_tiles)
                    multiply_tile<MICRO_ROWS, 1, Vectors::A_LINE>(depth, a + y, b, width, to, ldto, accumulate);
                else
                    multiply_tile<MICRO_ROWS, Size::A_ROW, 1>(depth, a + y * Size::A_ROW, b, width, to, ldto,
                                                              accumulate);
                if (!whole)
                    for (int i = 0; i < left; i++) std::copy_n(edge + i * PANEL, width, here + i * ldc);
            }
    }
    template <int ROWS, int NEXT_ROW, int NEXT_K, class Element>
    static void multiply_tile(int depth, const Element* a, const Element* b, int width, real* c, size_t ldc,
                              bool accumulate) {
        const int vectors = (width + LANES - 1) / LANES;
        if constexpr (HAVE_BF16 || std::is_same<Element, real>::value) {
            if (vectors == MICRO_VECTORS)
                micro_kernel<ROWS, MICRO_VECTORS>(depth, a, NEXT_ROW, NEXT_K, b, PANEL, c, ldc, accumulate);
            else if (vectors == 3) micro_kernel<ROWS, 3>(depth, a, NEXT_ROW, NEXT_K, b, PANEL, c, ldc, accumulate);
            else if (vectors == 2) micro_kernel<ROWS, 2>(depth, a, NEXT_ROW, NEXT_K, b, PANEL, c, ldc, accumulate);
            else micro_kernel<ROWS, 1>(depth, a, NEXT_ROW, NEXT_K, b, PANEL, c, ldc, accumulate);
        }
    }
    // C (+)= a few rows A, as in decoding, times B^T: a panel is multiplied as soon as it is packed, while it lies in
    // the cache, so that B is read once and nothing of it is written. Each element is the sum that it is in blocked().
    template <class Element, class Size>
    void few_rows(const Factor<real>& a, const Factor<real>& b, int K, bool accumulate, real* C, size_t ldc,
                  int threads) {
        const int depth = (K + PER<Element> - 1) / PER<Element>, panels = (b.width + PANEL - 1) / PANEL,
                  row = whole(depth, TILE);
        Element* const rows = reinterpret_cast<Element*>(a_memory.get(size_t(a.width) * row));
        Element* const packed = reinterpret_cast<Element*>(b_memory.get(size_t(threads) * Size::KC * PANEL));
        for (int m = 0; m < a.width; m++) {
            read_line_along(rows + size_t(m) * row, a, 0, m, depth, K);
            std::fill(rows + size_t(m) * row + depth, rows + size_t(m + 1) * row, Element{});
        }
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const AmxTiles registers(Size::tiles, a.width);
#pragma omp for schedule(static)
            for (int j = 0; j < panels; j++) {
                Element* const panel = packed + size_t(omp_get_thread_num()) * Size::KC * PANEL;
                const int width = std::min(PANEL, b.width - j * PANEL);
                alignas(64) real sums[FEW_ROWS][PANEL];
                for (int m = 0; m < a.width; m++)
                    if (accumulate) std::copy_n(C + m * ldc + j * PANEL, width, sums[m]);
                for (int k = 0; k < depth; k += Size::KC) {
                    const int kc = std::min(Size::KC, depth - k);
                    pack_panel<Size>(panel, b, j * PANEL, k, depth, K);
                    if constexpr (Size::tiles)
                        multiply_tiles(rows + k, row, panel, GemmSize{TILE, whole(width, TILE), kc}, sums[0], PANEL,
                                       accumulate || k > 0);
                    else
                        for (int m = 0; m < a.width; m++)
                            multiply_tile<1, 0, 1>(kc, rows + size_t(m) * row + k, panel, width, sums[m], PANEL,
                                                   accumulate || k > 0);
                }
                for (int m = 0; m < a.width; m++) std::copy_n(sums[m], width, C + m * ldc + j * PANEL);
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The exponential, written so that compilers vectorise it without -ffast-math. e^x = 2^n e^r with |r| <= ln(2)/2, and
// e^r by its Taylor polynomial of degree 7 (truncation 7e-9), n*ln(2) in two parts (Cody & Waite). Relative error below
// 2 ulp on [-87, 88]: the test op_exponential compares every 1000th float there with libm. Below -87 the result is 0.
inline float exponential(float x) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the lowest bits; here that integer is n + 127.
    const float magic = 12582912.0f + 127;
    const float clamped = x > 88.0f ? 88.0f : x, shifted = clamped * 1.44269504f + magic, n = shifted - magic;
    const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;  // 2^n
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;  // if x is NaN, p is too
}
inline double exponential(double x) { return std::exp(x); }

template <class real>
inline real sigmoid(real x) {
    return 1 / (1 + exponential(-x));
}
