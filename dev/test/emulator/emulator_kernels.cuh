// emulator_kernels.cuh: small kernels that use everything the trainer's kernels use, for the tests of
// dev/emulator/cuda_on_cpu.h. They compile under g++ and nvcc. Those with a template parameter are right with FAULT =
// NONE; planted_faults.cpp asks for the others.
#pragma once
#include "../../../lib/base/random.h"
#include "../../../lib/cuda/wgmma.cuh"

using bf16 = __nv_bfloat16;

// clang-format off
enum Fault {
    NONE,
    // of sums over a block
    NO_BARRIER_BEFORE_READ, NO_BARRIER_BEFORE_REUSE, MASK_LEAVES_LANE_OUT, READS_UNWRITTEN_SHARED, READS_PAST_END,
    LEAVES_OUTPUT_UNWRITTEN,
    // of tiles by cp.async
    NO_ASYNC_WAIT, WAITS_FOR_TOO_FEW, NO_COMMIT, NO_BARRIER_AFTER_WAIT, NO_BARRIER_BEFORE_REFILL, TRANSPOSED_FRAGMENT,
    NO_ZERO_FILL,
    // of warpgroups
    NO_WGMMA_FENCE, FENCE_BEFORE_A, NO_WGMMA_WAIT, NO_WGMMA_COMMIT, WGMMA_WAITS_FOR_TOO_FEW, NO_ASYNC_FENCE,
    ASYNC_FENCE_BEFORE_WAIT, NO_BARRIER_AFTER_ASYNC_FENCE, NO_ASYNC_FENCE_AFTER_STORE, TILE_AT_512,
    BEGINS_INSIDE_A_ROW, NO_LEADING_BYTES, ACCUMULATORS_READ_EARLY, ACCUMULATORS_WRITTEN, A_OVERWRITTEN,
    REFILL_UNDER_WAY, STORE_UNDER_WAY, A_WARP_TAKES_ANOTHER_TILE, A_WARP_STAYS_OUT, RETURNS_UNCOMMITTED,
    RETURNS_UNDER_WAY, NO_SUCH_WARPGROUP, NO_SUCH_GPU
};
// clang-format on

// A device array with a copy on the host.
template <class T>
struct DeviceArray {
    std::vector<T> host;
    T* device = nullptr;
    explicit DeviceArray(size_t n) : host(n) { CUDA_CHECK(cudaMalloc(&device, n * sizeof(T))); }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        host = values;
        CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(device); }
    const std::vector<T>& download() {
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

// ---- warp sums, block sums, rows

template <int FAULT>
__device__ inline float warp_sum(float v) {
    for (int offset = 16; offset > 0; offset /= 2)
        v += __shfl_xor_sync(FAULT == MASK_LEAVES_LANE_OUT && offset == 1 ? 0x7fffffffu : 0xffffffffu, v, offset);
    return v;
}
// The sum over the block, in every thread. Called twice in a row, so that the array is reused while slow threads may
// still read it.
template <int FAULT>
__device__ inline float block_sum(float v) {
    SHARED(float, sums, [32]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    v = warp_sum<FAULT>(v);
    if (FAULT != NO_BARRIER_BEFORE_REUSE) __syncthreads();
    if (lane == 0) sums[warp] = v;
    if (FAULT != NO_BARRIER_BEFORE_READ) __syncthreads();
    return warp_sum<NONE>(lane < (FAULT == READS_UNWRITTEN_SHARED ? warps + 1 : warps) ? sums[lane] : 0.0f);
}
// out (rows, C) = (in - mean) / standard deviation, by row; one block per row
template <int FAULT>
__global__ void normalize_rows(float* out, const float* in, int C) {
    const size_t row = size_t(blockIdx.x) * C;
    const int columns = FAULT == READS_PAST_END ? C + 1 : C;
    float sum = 0, squares = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) sum += in[row + c], squares += in[row + c] * in[row + c];
    const float mean = block_sum<FAULT>(sum) / C;
    const float variance = block_sum<FAULT>(squares) / C - mean * mean;
    for (int c = threadIdx.x; c < (FAULT == LEAVES_OUTPUT_UNWRITTEN ? C - 1 : C); c += blockDim.x)
        out[row + c] = (in[row + c] - mean) / sqrtf(variance);
}

// ---- tensor cores: out (M, N) fp32 = a (M, K) b (N, K)^T, bf16, K a multiple of 8. A block of 4 warps makes 64 x 16
// elements, each warp 16 rows. K goes by in tiles of 32, double-buffered: while one is multiplied, the next is on its
// way.
constexpr int TILE_M = 64, TILE_N = 16, TILE_K = 32, TILE_STRIDE = TILE_K + 8;  // 16 bytes more, against bank conflicts
template <int FAULT>
__device__ inline void copy_tile(bf16 (*tile)[TILE_STRIDE], const bf16* in, int row, int rows, int height, int k,
                                 int K) {
    for (int i = threadIdx.x; i < height * (TILE_K / 8); i += blockDim.x) {
        const int r = i / (TILE_K / 8), c = i % (TILE_K / 8) * 8;
        const bool valid = row + r < rows && k + c < K;
        if (valid || FAULT != NO_ZERO_FILL)
            cp_async_16(&tile[r][c], valid ? in + size_t(row + r) * K + k + c : in, valid);
    }
}
template <int FAULT>
__global__ void __launch_bounds__(128) matmul_tiles(float* out, const bf16* a, const bf16* b, int M, int N, int K) {
    DynamicShared shared;
    auto* tile_a = (bf16(*)[TILE_M][TILE_STRIDE])shared.take<bf16>(2 * TILE_M * TILE_STRIDE);
    auto* tile_b = (bf16(*)[TILE_N][TILE_STRIDE])shared.take<bf16>(2 * TILE_N * TILE_STRIDE);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * TILE_M, column = blockIdx.y * TILE_N;
    copy_tile<FAULT>(tile_a[0], a, row, M, TILE_M, 0, K);
    copy_tile<FAULT>(tile_b[0], b, column, N, TILE_N, 0, K);
    cp_async_commit();
    float sums[2][4] = {};  // columns 0-7 and 8-15
    for (int k = 0, buffer = 0; k < K; k += TILE_K, buffer ^= 1) {
        copy_tile<FAULT>(tile_a[buffer ^ 1], a, row, M, TILE_M, k + TILE_K, K);  // past K: zeros that no one reads
        copy_tile<FAULT>(tile_b[buffer ^ 1], b, column, N, TILE_N, k + TILE_K, K);
        if (FAULT != NO_COMMIT || k > 0) cp_async_commit();
        if (FAULT == WAITS_FOR_TOO_FEW) cp_async_wait<2>();
        else if (FAULT != NO_ASYNC_WAIT) cp_async_wait<1>();
        if (FAULT != NO_BARRIER_AFTER_WAIT) __syncthreads();
        for (int step = 0; step < TILE_K; step += 16) {
            unsigned fa[4], fb[4];
            ldmatrix_x4(fa, &tile_a[buffer][warp * 16 + lane % 16][step + lane / 16 * 8]);
            const bf16* row_of_b = &tile_b[buffer][lane % 8 + lane / 16 * 8][step + lane / 8 % 2 * 8];
            if (FAULT == TRANSPOSED_FRAGMENT) ldmatrix_x4_trans(fb, row_of_b);
            else ldmatrix_x4(fb, row_of_b);
            const unsigned left[2] = {fb[0], fb[1]}, right[2] = {fb[2], fb[3]};
            mma_m16n8k16(sums[0], fa, left, sums[0]);
            mma_m16n8k16(sums[1], fa, right, sums[1]);
        }
        if (FAULT != NO_BARRIER_BEFORE_REFILL) __syncthreads();
    }
    cp_async_wait<0>();
    for (int half = 0; half < 2; half++)
        for (int e = 0; e < 4; e++) {
            const int r = row + warp * 16 + lane / 4 + e / 2 * 8, c = column + half * 8 + lane % 4 * 2 + e % 2;
            if (r < M && c < N) out[size_t(r) * N + c] = sums[half][e];
        }
}
constexpr size_t MATMUL_SHARED_BYTES = 2 * (TILE_M + TILE_N) * TILE_STRIDE * 2;

// ---- wgmma. nvcc compiles these for sm_90a; for others they are empty.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif

// tile = 64 columns of rows that are `stride` elements apart
__device__ inline void copy_64_columns(bf16* tile, const bf16* in, int rows, int stride) {
    for (int i = threadIdx.x; i < rows * 8; i += blockDim.x)
        cp_async_16(tile + chunk_at<64>(i / 8, i % 8), in + i / 8 * stride + i % 8 * 8);
}
// out (64, 8 N) = c
template <int N>
__device__ inline void store_rows(float* out, const float (&c)[N][4]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    for (int n = 0; n < N; n++)
        for (int e = 0; e < 4; e++) out[(row + e / 2 * 8) * N * 8 + n * 8 + threadIdx.x % 4 * 2 + e % 2] = c[n][e];
}

// out (rows, 128) = the sum over tiles of bf16(q k^T) v, as attention goes: q (rows, 64), k (tiles 64, 64), v (tiles
// 64, 128), 64 rows for each warpgroup. While a tile of k and v is multiplied, the next is on its way.
template <int FAULT>
__global__ void __launch_bounds__(128)
    attention_on_warpgroups(float* out, const bf16* q, const bf16* k, const bf16* v, int tiles) {
#ifdef HAS_WGMMA
    constexpr int TILE = 64 * 64;
    DynamicShared shared;
    if (FAULT == TILE_AT_512) shared.take<bf16>(256);
    bf16* const q_tile = shared.take<bf16>(2 * TILE);
    bf16* const k_tiles = shared.take<bf16>(2 * TILE);
    bf16* const v_tiles = shared.take<bf16>(4 * TILE);
    const auto copy = [&](int tile) {
        copy_64_columns(k_tiles + tile % 2 * TILE, k + tile * TILE, 64, 64);
        for (int half = 0; half < 2; half++)
            copy_64_columns(v_tiles + (tile % 2 * 2 + half) * TILE, v + tile * TILE * 2 + half * 64, 64, 128);
        cp_async_commit();
    };
    const auto store_q = [&] {
        for (int i = threadIdx.x; i < int(blockDim.x) * 32; i += blockDim.x)
            q_tile[chunk_at<64>(i / 64, i % 64 / 8) + i % 8] = q[i];
    };
    if (FAULT != NO_ASYNC_FENCE_AFTER_STORE) store_q();
    const int warp = threadIdx.x / 32;
    const WgmmaTile q_at = wgmma_tile(q_tile + threadIdx.x / 128 * TILE) + (FAULT == BEGINS_INSIDE_A_ROW ? 112 : 0);
    float scores[8][4], sums[16][4] = {};
    unsigned a[4][4];
    copy(0);
    for (int tile = 0; tile < tiles; tile++) {
        if (FAULT == ASYNC_FENCE_BEFORE_WAIT) async_fence();
        cp_async_wait<0>();
        if (FAULT == NO_BARRIER_AFTER_ASYNC_FENCE) __syncthreads();
        if (FAULT != NO_ASYNC_FENCE && FAULT != ASYNC_FENCE_BEFORE_WAIT) async_fence();
        if (FAULT == NO_ASYNC_FENCE_AFTER_STORE && tile == 0) store_q();
        if (FAULT != NO_BARRIER_AFTER_ASYNC_FENCE) __syncthreads();
        if (FAULT != REFILL_UNDER_WAY && tile + 1 < tiles) copy(tile + 1);
        const int other = FAULT == A_WARP_TAKES_ANOTHER_TILE && warp == 2 ? 32 : 0;
        const WgmmaTile k_at = wgmma_tile(k_tiles + tile % 2 * TILE) + other;
        const WgmmaTile v_at = wgmma_tile(v_tiles + tile % 2 * 2 * TILE, FAULT == NO_LEADING_BYTES ? 0 : 8192);
        if (FAULT == A_WARP_STAYS_OUT && tile == tiles - 1 && warp == 3) break;
        if (FAULT != NO_WGMMA_FENCE) wgmma_fence();
        wgmma_first(scores, q_at, k_at);
        for (int x = 1; x < 4; x++) wgmma_add(scores, q_at + x * 32, k_at + x * 32);
        if (FAULT != NO_WGMMA_COMMIT && FAULT != RETURNS_UNCOMMITTED) wgmma_commit();
        if (FAULT == RETURNS_UNDER_WAY || FAULT == RETURNS_UNCOMMITTED) {
            cp_async_wait<0>();
            return;
        }
        if (FAULT == STORE_UNDER_WAY && threadIdx.x == 5) k_tiles[tile % 2 * TILE] = bf16(7.0f);
        if (FAULT == ACCUMULATORS_WRITTEN) scores[3][1] = 0;
        float early = 0;
        if (FAULT == ACCUMULATORS_READ_EARLY) early = scores[3][1];
        if (FAULT == WGMMA_WAITS_FOR_TOO_FEW) wgmma_wait<1>();
        else if (FAULT != NO_WGMMA_WAIT) wgmma_wait<0>();
        if (FAULT == ACCUMULATORS_READ_EARLY) scores[3][1] = early;
        if (FAULT == FENCE_BEFORE_A) wgmma_fence();
        for (int x = 0; x < 4; x++)
            for (int r = 0; r < 4; r++)
                a[x][r] = pack_bf16(scores[2 * x + r / 2][r % 2 * 2], scores[2 * x + r / 2][r % 2 * 2 + 1]);
        if (FAULT != FENCE_BEFORE_A) wgmma_fence();
        for (int x = 0; x < 4; x++) wgmma_add_columns(sums, a[x], v_at + x * 2048);
        wgmma_commit();
        if (FAULT == A_OVERWRITTEN) a[2][1] = 0;
        if (FAULT == REFILL_UNDER_WAY && tile + 1 < tiles) copy(tile + 1);
        if (FAULT == REFILL_UNDER_WAY && tile + 2 < tiles) copy(tile + 2);
        wgmma_wait<0>();
    }
    store_rows(out, sums);
#endif
}
constexpr size_t ATTENTION_ON_WARPGROUPS_BYTES = 8 * 64 * 64 * 2 + 1024;  // TILE_AT_512 needs the 1024

// ---- one warp each, for the tests of single functions

__global__ void one_mma(float* d, const unsigned* a, const unsigned* b, const float* c) {  // (32, registers) each
    const int l = threadIdx.x;
    unsigned fa[4], fb[2];
    float fc[4], fd[4];
    for (int i = 0; i < 4; i++) fa[i] = a[l * 4 + i], fc[i] = c[l * 4 + i];
    for (int i = 0; i < 2; i++) fb[i] = b[l * 2 + i];
    mma_m16n8k16(fd, fa, fb, fc);
    for (int i = 0; i < 4; i++) d[l * 4 + i] = fd[i];
}

__global__ void one_ldmatrix(unsigned* out, const unsigned short* in, bool transposed) {  // out (32, 4), in (32, 8)
    SHARED(uint4, rows, [32]);
    const int l = threadIdx.x;
    rows[l] = reinterpret_cast<const uint4*>(in)[l];
    __syncwarp();
    unsigned r[4];
    if (transposed) ldmatrix_x4_trans(r, &rows[l]);
    else ldmatrix_x4(r, &rows[l]);
    for (int i = 0; i < 4; i++) out[l * 4 + i] = r[i];
}

__global__ void set_to(float* x, float value) { x[threadIdx.x] = value; }
__global__ void add_to(float* x, float value) { x[threadIdx.x] += value; }

// ---- the kernels with planted faults, run

// Each program has its own: it says where what was found is not what was expected, within the limit of each element.
template <class T>
void expect(const char* kernel, DeviceArray<T>& found, const std::vector<double>& expected,
            const std::vector<double>& limit);
template <class T>
void expect(const char* kernel, DeviceArray<T>& found, const std::vector<double>& expected, double limit = 1e-5) {
    expect(kernel, found, expected, std::vector<double>(expected.size(), limit));
}
inline float noise(size_t i) { return float(random_uniform(7, random_stream(RANDOM_TEST), i)) * 2 - 1; }
template <class T>
std::vector<T> noises(size_t n, size_t first = 0) {
    std::vector<T> x(n);
    for (size_t i = 0; i < n; i++) x[i] = T(noise(first + i));
    return x;
}

template <int FAULT, int THREADS = 96>
void rows() {
    const size_t R = 5, C = 300;
    DeviceArray<float> in(noises<float>(R * C)), out(R * C);
    launch<normalize_rows<FAULT>>(R, THREADS, 0, nullptr, out.device, in.device, int(C));
    std::vector<double> expected(R * C);
    for (size_t r = 0; r < R; r++) {
        double sum = 0, squares = 0;
        for (size_t c = 0; c < C; c++) sum += in.host[r * C + c], squares += std::pow(in.host[r * C + c], 2);
        for (size_t c = 0; c < C; c++)
            expected[r * C + c] = (in.host[r * C + c] - sum / C) / std::sqrt(squares / C - sum * sum / C / C);
    }
    expect("normalize_rows", out, expected);
}
// As it stands, four tiles of K, the last one ragged; ragged rows and columns.
template <int FAULT, int M = 70, int N = 20, int K = 104>
void matmul() {
    DeviceArray<bf16> a(noises<bf16>(M * K)), b(noises<bf16>(N * K, 5000));
    DeviceArray<float> out(M * N);
    launch<matmul_tiles<FAULT>>(dim3((M + TILE_M - 1) / TILE_M, (N + TILE_N - 1) / TILE_N), 128, MATMUL_SHARED_BYTES,
                                nullptr, out.device, a.device, b.device, M, N, K);
    std::vector<double> expected(M * N);
    for (size_t i = 0; i < M * N; i++)
        for (size_t k = 0; k < K; k++)
            expected[i] += double(float(a.host[i / N * K + k])) * double(float(b.host[i % N * K + k]));
    expect("matmul_tiles", out, expected, K * 0x1p-23);  // |products| <= 1, K roundings of a sum below K
}
// As it stands, three tiles, so that each buffer is filled again.
template <int FAULT, size_t TILES = 3, size_t WARPGROUPS = 1>
void warpgroup() {
    const size_t keys = TILES * 64, rows = WARPGROUPS * 64;
    DeviceArray<bf16> q(noises<bf16>(rows * 64)), k(noises<bf16>(keys * 64, 5000)), v(noises<bf16>(keys * 128, 50000));
    DeviceArray<float> out(rows * 128);
    launch<attention_on_warpgroups<FAULT>>(1, FAULT == NO_SUCH_WARPGROUP ? 96 : unsigned(WARPGROUPS) * 128,
                                           ATTENTION_ON_WARPGROUPS_BYTES, nullptr, out.device, q.device, k.device,
                                           v.device, int(TILES));
    std::vector<double> expected(rows * 128), limit(rows * 128);  // a score is rounded once
    for (size_t i = 0; i < rows; i++)
        for (size_t key = 0; key < keys; key++) {
            double score = 0;
            for (size_t x = 0; x < 64; x++)
                score += double(float(q.host[i * 64 + x])) * double(float(k.host[key * 64 + x]));
            for (size_t x = 0; x < 128; x++) {
                const double term = score * double(float(v.host[key * 128 + x]));
                expected[i * 128 + x] += term, limit[i * 128 + x] += 0x1p-8 * std::fabs(term);
            }
        }
    expect("attention_on_warpgroups", out, expected, limit);
}
