// processor.h: what the processor that this is built for has, and OpenMP's functions where there is no OpenMP.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#else
inline void omp_set_num_threads(int) {}
inline int omp_get_max_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
#endif

// Does it multiply vectors of pairs of bf16 (AVX512_BF16)?
#ifdef __AVX512BF16__
constexpr bool HAVE_BF16 = true;
#else
constexpr bool HAVE_BF16 = false;
#endif

// Does it have vectors at all? -DNO_VECTORS says it has none.
#if !defined(NO_VECTORS) && \
    (defined(__SSE2__) || defined(__ARM_NEON) || defined(__ALTIVEC__) || defined(__riscv_vector))
constexpr bool HAVE_VECTORS = true;
#else
constexpr bool HAVE_VECTORS = false;
#endif

#ifdef __AVX512F__
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
