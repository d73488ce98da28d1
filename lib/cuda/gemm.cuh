// gemm.cuh: a matrix product in plain CUDA, which lib/cuda/runtime.cuh takes in place of cuBLASLt in a build with
// NO_CUBLAS=1, and on GPUs that have no cuBLASLt. It knows no tensor cores and is to be read, not to be fast: a block
// owns a tile of 64 x 64 of C, a thread 16 of its elements in registers; slices of A and B that are 16 deep pass
// through shared memory, so that each number is read from device memory once for 64 uses. Sums are fp32, in the order
// of k, so the same input gives the same bits.
#pragma once
#include <cstdint>

#include "../model/shape.h"
#include "common.cuh"

// C = A B, A B^T or A^T B.
enum Factors { NN, NT, TN };
// Products of matrices of one shape.
struct Batch {
    int count;
    size_t a, b, c;  // elements from one matrix to the next
    float beta = 1;  // what the addend is multiplied by
};

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
// As CudaRuntime::gemm(), of any alignment.
template <class In, class Out>
inline void plain_gemm(Factors factors, GemmSize s, const In* A, size_t lda, const In* B, size_t ldb, const Out* addend,
                       Out* C, size_t ldc, const Batch& batch, cudaStream_t stream) {
    const auto tiles = [](int n) { return unsigned(n + GEMM_TILE - 1) / GEMM_TILE; };
    if (s.M == 0 || s.N == 0 || batch.count == 0) return;
    if (tiles(s.M) > 65535 || batch.count > 65535)
        fail(
            "a matrix product of %d x %d x %d, %d at a time, is too large for the plain kernel of a NO_CUBLAS=1 build: "
            "choose a smaller --batch, or build with cuBLASLt",
            s.M, s.N, s.K, batch.count);
    const GemmFactor<In> a = {A, factors == TN ? 1 : lda, factors == TN ? lda : 1, batch.a},
                         b = {B, factors == NT ? ldb : 1, factors == NT ? 1 : ldb, batch.b};
    launch<plain_gemm_kernel<In, Out>>(dim3(tiles(s.N), tiles(s.M), unsigned(batch.count)), GEMM_THREADS, 0, stream,
                                       s.M, s.N, s.K, a, b, addend, batch.beta, C, ldc, batch.c);
}
