// emulator_tests.h: dev/emulator/cuda_on_cpu.h and cublasLt.h against formulas and plain loops. Compiled by nvcc, the
// tests of the language ask the same of a GPU: that is how the emulator's fragment layouts are compared with the
// hardware's. NCCL's part is seen by the emulated runs of ../ranks.
#pragma once
#include "emulator_kernels.cuh"
#include "../harness.h"

template <class T>
void expect(const char*, DeviceArray<T>& found, const std::vector<double>& expected, const std::vector<double>& limit) {
    found.download();
    for (size_t i = 0; i < expected.size(); i++) CHECK_NEAR(float(found.host[i]), expected[i], limit[i]);
}

// Under the emulator: once for each of a few orders of threads and blocks, of every kind. On a GPU: once.
template <class Test>
inline void for_seeds(Test test) {
#ifndef CUDA_ON_CPU
    test();
#else
    for (int seed = 0; seed < 5; seed++) {
        emu::seed(uint64_t(seed));
        test();
    }
    emu::seed(0);
#endif
}

// ---- the language

TEST(emulator_barriers_and_block_sums) {
    for_seeds([] { rows<NONE, 32>(), rows<NONE, 96>(), rows<NONE, 256>(), rows<NONE, 1024>(); });
}

inline int bits(double x) {
    const bf16 b = __float2bfloat16(float(x));
    unsigned short u;
    std::memcpy(&u, &b, 2);
    return int(u);
}
TEST(emulator_bf16_rounds_to_nearest_even) {
    auto value = [](int b) {
        const unsigned short u = (unsigned short)b;
        bf16 x;
        std::memcpy((void*)&x, &u, 2);  // a cast, since nvcc's bf16 has constructors
        return float(x);
    };
    for (int b = 0; b < 65536; b++) {  // all of them, and the points between each and the next
        const float x = value(b), next = value(b + 1);
        if ((b & 0x7f80) == 0x7f80) {
            CHECK((b & 0x7f) == 0 ? std::isinf(x) : std::isnan(x));
            CHECK((b & 0x7f) == 0 ? bits(x) == b : std::isnan(value(bits(x))));
            continue;
        }
        CHECK_EQUAL(bits(x), b);
        if ((b + 1) % 0x80 == 0) continue;  // the step changes
        const float middle = float((double(x) + double(next)) / 2);
        CHECK_EQUAL(bits(middle), b % 2 ? b + 1 : b);
        CHECK_EQUAL(bits(std::nextafterf(middle, x)), b);
        CHECK_EQUAL(bits(std::nextafterf(middle, next)), b + 1);
    }
    CHECK_EQUAL(bits(3.4e38f), 0x7f80);  // past the largest: infinity
}

// ---- tensor cores. The oracle is CuTe's description of the fragments (cute/atom/mma_traits_sm80.hpp and
// copy_traits_sm75.hpp), which gives shapes and strides of (thread, value) where the emulator follows the formulas of
// the PTX manual.

TEST(emulator_mma_fragments) {
    std::vector<double> A(16 * 16), B(8 * 16), C(16 * 8);  // column-major: (M, K), (N, K), (M, N)
    for (size_t i = 0; i < A.size(); i++)
        A[i] = double(i * 37 % 101) - 50;  // small integers are exact in bf16, and their sums in fp32
    for (size_t i = 0; i < B.size(); i++) B[i] = double(i * 53 % 97) - 48, C[i] = double(i);
    std::vector<unsigned> a(128, 0), b(64, 0);
    std::vector<float> c(128);
    auto place_c = [](int t, int v) { return size_t(t % 4 * 32 + t / 4 + v % 2 * 16 + v / 2 * 8); };
    for (int t = 0; t < 32; t++) {
        for (int v = 0; v < 8; v++)
            a[size_t(t * 4 + v / 2)] |=
                unsigned(bits(A[size_t(t % 4 * 32 + t / 4 + v % 2 * 16 + v / 2 % 2 * 8 + v / 4 * 128)])) << v % 2 * 16;
        for (int v = 0; v < 4; v++)
            b[size_t(t * 2 + v / 2)] |= unsigned(bits(B[size_t(t % 4 * 16 + t / 4 + v % 2 * 8 + v / 2 * 64)]))
                                        << v % 2 * 16;
        for (int v = 0; v < 4; v++) c[size_t(t * 4 + v)] = float(C[place_c(t, v)]);
    }
    DeviceArray<unsigned> device_a(a), device_b(b);
    DeviceArray<float> device_c(c), d(128);
    launch<one_mma>(1, 32, 0, nullptr, d.device, device_a.device, device_b.device, device_c.device);
    d.download();
    for (int t = 0; t < 32; t++)
        for (int v = 0; v < 4; v++) {
            const size_t place = place_c(t, v), m = place % 16, n = place / 16;
            double sum = C[place];
            for (size_t k = 0; k < 16; k++) sum += A[m + 16 * k] * B[n + 8 * k];
            CHECK_EQUAL(double(d.host[size_t(t * 4 + v)]), sum);
        }
}

#ifdef CUDA_ON_CPU
// The sums of a rough mma: what they lose is known, and both ways to compute them agree.
TEST(emulator_rough_mma_cuts_sums_off) {
    using Vector = emu::Mma::Vector;
    const auto sum_of = [](float c, std::vector<float> products) {
        Vector terms[8] = {};
        for (size_t k = 0; k < products.size(); k++) terms[k] = Vector{} + products[k];
        return emu::Mma::cut_sum(Vector{} + c, terms)[0];
    };
    // Beside 1 each of these is below the unit, although together they are nearly 4 of them.
    CHECK_EQUAL(sum_of(1, std::vector<float>(8, 0x1.fp-25f)), 1.0f);
    CHECK_EQUAL(sum_of(-1, std::vector<float>(8, -0x1.fp-25f)), -1.0f);
    CHECK_EQUAL(sum_of(1, {0x1.8p-23f}), 1 + 0x1p-23f);      // cut off, not rounded
    CHECK_EQUAL(sum_of(0x1.fffffep0f, {0x1.8p-23f}), 2.0f);  // the sum, too
    CHECK_EQUAL(sum_of(0x1.fffffep0f, {0x1.8p-23f, 1}), 3.0f);
    CHECK_EQUAL(sum_of(0, {}), 0.0f);
    CHECK_EQUAL(sum_of(0, {INFINITY, 1}), INFINITY);
    CHECK(std::isnan(sum_of(INFINITY, {-INFINITY})));
    CHECK_EQUAL(sum_of(0x1p-149f, {0x1p-149f, 0x1p-126f}), 0x1p-126f + 0x1p-148f);  // subnormal numbers count
    for (size_t n = 0; n < 1000; n++) {
        float terms[9];
        for (size_t k = 0; k < 9; k++) terms[k] = std::ldexp(noise(n * 9 + k), int(n * 7 + k * k * n % 31) % 60 - 40);
        double sum = 0, magnitude = 0;
        for (const float x : terms) sum += x, magnitude = std::max(magnitude, std::fabs(double(x)));
        const float found = sum_of(terms[0], std::vector<float>(terms + 1, terms + 9));
        CHECK_EQUAL(found, emu::Mma::cut_sum_of_any(terms));
        CHECK_NEAR(found, sum, 9 * 0x1p-23 * magnitude + 0x1p-23 * std::fabs(sum));
    }
}
#endif

TEST(emulator_ldmatrix_fragments) {
    std::vector<unsigned short> in(32 * 8);
    for (size_t i = 0; i < in.size(); i++) in[i] = (unsigned short)(i * 257 % 4096);
    DeviceArray<unsigned short> device_in(in);
    DeviceArray<unsigned> out(128);
    for (const bool transposed : {false, true}) {
        launch<one_ldmatrix>(1, 32, 0, nullptr, out.device, device_in.device, transposed);
        out.download();
        for (int t = 0; t < 32; t++)
            for (int m = 0; m < 4; m++)
                for (int half = 0; half < 2; half++) {
                    const int bit =
                        m * 1024 + (transposed ? t % 4 * 256 + t / 4 * 16 + half * 128 : t * 32 + half * 16);
                    CHECK_EQUAL(int(out.host[size_t(t * 4 + m)] >> half * 16 & 0xffff), int(in[size_t(bit / 16)]));
                }
    }
}

TEST(emulator_matmul_by_double_buffered_tiles) {
    for_seeds([] {
        matmul<NONE, 64, 16, 32>(), matmul<NONE, 70, 20, 104>(), matmul<NONE, 1, 1, 8>(), matmul<NONE, 65, 17, 160>();
    });
}

// Only sm_90a has wgmma.
inline bool device_has_wgmma() {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    return properties.major == 9;
}
TEST(emulator_attention_on_warpgroups) {
    if (!device_has_wgmma()) return;
    for_seeds([] { warpgroup<NONE, 1>(), warpgroup<NONE, 2, 2>(), warpgroup<NONE, 5>(); });
}

// ---- what no GPU has: seeds, and a cublasLt that refuses. What it computes is seen by cuda_matmul, cuda_muon_product
// and cuda_compress; threads, warp functions and the host's calls by every kernel's test.

#ifdef CUDA_ON_CPU
static int next_ticket = 0;  // of the host, on which the threads run one after the other
__global__ void take_tickets(int* tickets) { tickets[blockIdx.x * blockDim.x + threadIdx.x] = next_ticket++; }
TEST(emulator_seed_draws_the_order_of_threads) {
    const auto tickets_of = [](uint64_t seed, unsigned blocks) {
        emu::seed(seed);
        emu::machine.launches = next_ticket = 0;
        DeviceArray<int> tickets(128);
        launch<take_tickets>(blocks, 128 / blocks, 0, nullptr, tickets.device);
        return tickets.download();
    };
    for (uint64_t seed = 0; seed < 6; seed++) {
        const std::vector<int> tickets = tickets_of(seed, 1), by_blocks = tickets_of(seed, 128);
        CHECK(tickets_of(seed, 1) == tickets && tickets_of(seed, 128) == by_blocks);
        CHECK_EQUAL(std::is_sorted(by_blocks.begin(), by_blocks.end()), seed == 0);
        int in_index_order = 0, in_whole_warps = 0;
        std::vector<int> threads(128, -1);
        for (int i = 0; i < 128; i++) threads[size_t(tickets[size_t(i)])] = i;
        for (int i = 0; i < 128; i++)
            in_index_order += threads[size_t(i)] == i,
                in_whole_warps += threads[size_t(i)] / 32 == threads[size_t(i / 32 * 32)] / 32;
        CHECK(seed == 0 ? in_index_order == 128 : in_index_order < 64);
        CHECK(seed % 2 ? in_whole_warps < 100 : in_whole_warps == 128);
    }
    emu::seed(0);
}

TEST(emulator_cublaslt_refuses_what_does_not_fit) {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t description;
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtCreate(&handle));
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    DeviceArray<float> x(32 * 32), y(32 * 32), z(32 * 32);
    const float alpha = 1, beta = 0;
    const emu::MatrixLayout right = {CUDA_R_32F, 16, 16, 16};
    auto status = [&](emu::MatrixLayout a, emu::MatrixLayout b, emu::MatrixLayout d, size_t wanted_workspace = 0,
                      size_t offset = 0) {
        cublasLtMatmulHeuristicResult_t algorithm;
        int found = 0;
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                          &wanted_workspace, sizeof wanted_workspace));
        const cublasStatus_t s =
            cublasLtMatmulAlgoGetHeuristic(handle, description, &a, &b, &d, &d, preference, 1, &algorithm, &found);
        CHECK_EQUAL(found, s == CUBLAS_STATUS_SUCCESS ? 1 : 0);
        if (s != CUBLAS_STATUS_SUCCESS) return s;
        return cublasLtMatmul(handle, description, &alpha, x.device + offset, &a, y.device, &b, &beta, z.device, &d,
                              z.device, &d, &algorithm.algo, nullptr, 0, nullptr);
    };
    const emu::MatrixLayout narrow = {CUDA_R_32F, 16, 15, 16}, half = {CUDA_R_16BF, 16, 16, 16},
                            two = {CUDA_R_32F, 16, 16, 16, 2, 256};
    const cublasStatus_t invalid = CUBLAS_STATUS_INVALID_VALUE, unsupported = CUBLAS_STATUS_NOT_SUPPORTED;
    CHECK(status(right, right, right) == CUBLAS_STATUS_SUCCESS);
    CHECK(status(narrow, right, right) == invalid);                            // k of a and of b
    CHECK(status(right, right, narrow) == invalid);                            // columns of d
    CHECK(status({CUDA_R_32F, 16, 16, 15}, right, right) == invalid);          // leading dimension
    CHECK(status(two, right, right) == invalid);                               // batches of a and of d
    CHECK(status(two, two, {CUDA_R_32F, 16, 16, 16, 2, 128}) == invalid);      // results overlap
    CHECK(status({CUDA_R_32F, 16, 16, 16, 2, 257}, two, two) == unsupported);  // the second a is not aligned
    CHECK(status(half, right, right) == unsupported);                          // types of a and of b
    CHECK(status(right, right, half) == unsupported);                          // fp32 into bf16
    CHECK(status(right, right, right, 1024) == invalid);                       // less workspace than promised
    CHECK(status(right, right, right, 0, 1) == invalid);                       // an unaligned matrix
    CHECK_FAILS(1, "not supported", CUBLAS_CHECK(status(half, right, right)));
    const char* wrong_size = "";
    CHECK(cublasLtMatmulDescSetAttribute(description, CUBLASLT_MATMUL_DESC_TRANSA, wrong_size, 1) ==
          CUBLAS_STATUS_INVALID_VALUE);
    cublasLtMatmulDescDestroy(description), cublasLtMatmulPreferenceDestroy(preference), cublasLtDestroy(handle);
}
#endif
