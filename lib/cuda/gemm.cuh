// gemm.cuh: a matrix product in plain CUDA, which lib/cuda/runtime.cuh takes in place of cuBLASLt in a build with
// NO_CUBLAS=1, and on GPUs that have no cuBLASLt. It knows no tensor cores and is to be read, not to be fast: a block
// owns a tile of 64 x 64 of C, a thread 16 of its elements in registers; slices of A and B that are 16 deep pass
// through shared memory, so that each number is read from device memory once for 64 uses. Sums are fp32, in the order
// of k, so the same input gives the same bits.
#pragma once
#include <cstdint>

#include "common.cuh"

constexpr int GEMM_TILE = 64, GEMM_DEPTH = 16, GEMM_THREADS = 256, GEMM_SIDE = 16, GEMM_EACH = GEMM_TILE / GEMM_SIDE;

// A factor as rows of C's tile by k: elements from one row, one k and one matrix of the batch to the next.
template <class T>
struct GemmFactor {
    const T* data;
    size_t row, k, matrix;
};
// slice [GEMM_DEPTH, GEMM_TILE] = columns first_k.. of rows first_row.., 0 where there are none. Neighbouring threads
// take neighbouring addresses. (One column of padding: threads that write along k are in different banks.)
using GemmSlice = float[GEMM_DEPTH][GEMM_TILE + 1];
template <class T>
__device__ inline void load_gemm_slice(GemmSlice& slice, const GemmFactor<T>& factor, const T* matrix, int first_row,
                                       int rows, int first_k, int K) {
    for (int i = threadIdx.x; i < GEMM_TILE * GEMM_DEPTH; i += GEMM_THREADS) {
        const int row = factor.k == 1 ? i / GEMM_DEPTH : i % GEMM_TILE;
        const int k = factor.k == 1 ? i % GEMM_DEPTH : i / GEMM_TILE;
        const bool there = first_row + row < rows && first_k + k < K;
        slice[k][row] = there ? float(matrix[(first_row + row) * factor.row + (first_k + k) * factor.k]) : 0.0f;
    }
}
// C [M, N] = A [M, K] B [N, K]^T (+ beta addend [M, N], where given, which may be C). A block for each tile of C,
// blockIdx.z for the matrix of the batch; rows of C and of the addend are ldc elements apart, matrices next_c.
template <class In, class Out>
__global__ void __launch_bounds__(GEMM_THREADS)
    plain_gemm_kernel(int M, int N, int K, GemmFactor<In> A, GemmFactor<In> B, const Out* addend, float beta, Out* C,
                      size_t ldc, size_t next_c) {
    wait_for_earlier_kernels();
    SHARED(float, a_slice, [GEMM_DEPTH][GEMM_TILE + 1]);
    SHARED(float, b_slice, [GEMM_DEPTH][GEMM_TILE + 1]);
    const int first_row = int(blockIdx.y) * GEMM_TILE;
    const int first_column = int(blockIdx.x) * GEMM_TILE;
    const int row = int(threadIdx.x) / GEMM_SIDE;
    const int column = int(threadIdx.x) % GEMM_SIDE;  // and every 16th behind them
    const In *a = A.data + blockIdx.z * A.matrix, *b = B.data + blockIdx.z * B.matrix;
    float sums[GEMM_EACH][GEMM_EACH] = {};
    for (int first_k = 0; first_k < K; first_k += GEMM_DEPTH) {
        __syncthreads();  // the last slices have been read
        load_gemm_slice(a_slice, A, a, first_row, M, first_k, K);
        load_gemm_slice(b_slice, B, b, first_column, N, first_k, K);
        __syncthreads();
        for (int k = 0; k < GEMM_DEPTH; k++) {
            float of_a[GEMM_EACH], of_b[GEMM_EACH];
            for (int i = 0; i < GEMM_EACH; i++) {
                of_a[i] = a_slice[k][row + i * GEMM_SIDE];
                of_b[i] = b_slice[k][column + i * GEMM_SIDE];
            }
            for (int i = 0; i < GEMM_EACH; i++)
                for (int j = 0; j < GEMM_EACH; j++) sums[i][j] += of_a[i] * of_b[j];
        }
    }
    for (int i = 0; i < GEMM_EACH; i++)
        for (int j = 0; j < GEMM_EACH; j++) {
            const int m = first_row + row + i * GEMM_SIDE, n = first_column + column + j * GEMM_SIDE;
            const size_t at = blockIdx.z * next_c + m * ldc + n;
            if (m < M && n < N) C[at] = Out(sums[i][j] + (addend ? beta * float(addend[at]) : 0.0f));
        }
}
// C[M,N] = op(A)[M,K] op(B)[K,N] (+ beta addend), row-major, for `count` matrices that are next_a, next_b and next_c
// elements apart, as CudaRuntime::gemm() has it.
template <class In, class Out>
inline void plain_gemm(bool transpose_a, bool transpose_b, int M, int N, int K, const In* A, size_t lda, const In* B,
                       size_t ldb, const Out* addend, float beta, Out* C, size_t ldc, int count, size_t next_a,
                       size_t next_b, size_t next_c, cudaStream_t stream) {
    const auto tiles = [](int n) { return unsigned(n + GEMM_TILE - 1) / GEMM_TILE; };
    if (M == 0 || N == 0 || count == 0) return;
    if (tiles(M) > 65535 || count > 65535)
        fail(
            "a matrix product of %d x %d x %d, %d at a time, is too large for the plain kernel of a NO_CUBLAS=1 build: "
            "choose a smaller --batch, or build with cuBLASLt",
            M, N, K, count);
    const GemmFactor<In> a = {A, transpose_a ? 1 : lda, transpose_a ? lda : 1, next_a},
                         b = {B, transpose_b ? ldb : 1, transpose_b ? 1 : ldb, next_b};
    launch<plain_gemm_kernel<In, Out>>(dim3(tiles(N), tiles(M), unsigned(count)), GEMM_THREADS, 0, stream, M, N, K, a,
                                       b, addend, beta, C, ldc, next_c);
}
