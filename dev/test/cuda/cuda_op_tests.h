// cuda_op_tests.h: what struct Cuda alone has: approximations of the hardware, its own matrix product, its refusals. By
// g++ in the emulator, by nvcc on a GPU; in bf16, or in fp32 with -DPRECISION_FP32. ops/ has what every engine does.
#pragma once
#include "../ops/attention_tests.h"
#include "../ops/row_tests.h"

using HostArray = CudaEngine::Values;
using DeviceReal = Reals<CudaEngine>;
using DeviceFloat = Stats<CudaEngine>;
constexpr bool CUDA_FP32 = !CudaEngine::NARROW;

TEST(cuda_memory_that_is_not_there) {
    Cuda dev(0, TEST_WORKSPACE);
    CHECK_FAILS(1, "out of GPU memory: 1073741824.0 MiB were asked for", dev.allocate<char>(size_t(1) << 50));
    Array<CudaEngine, int32_t> small(dev, 1);  // the engine still works
    dev.zero(small.data, size_t(1));
    CHECK_EQUAL(small.raw()[0], 0);
}

#ifndef PRECISION_FP32  // whose kernels do not use the first of them
// ex2.approx.ftz and rcp.approx.ftz are within 2 and 1 units of the last place, and give and take 0 for what is below
// 2^-126. The emulator claims so, and the limits of the attention kernels rest on it.
__global__ void approximate_kernel(float* powers, float* reciprocals, const float* x) {
    wait_for_earlier_kernels();
    const int i = threadIdx.x;
    powers[i] = exp2_approx(x[i]), reciprocals[i] = reciprocal_approx(x[i]);
}
TEST(cuda_approximations) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(5);
    HostArray x = {0.0f,       -0.0f,     1e-40f,   -1e-40f,   -125.75f, -126.5f,   -127.0f,    -149.0f,
                   -151.0f,    -1e9f,     127.0f,   128.5f,    1e9f,     0x1p-126f, -0x1p-126f, 0x1p126f,
                   0x1.8p126f, -0x1p127f, INFINITY, -INFINITY, 3.0f,     -7.0f,     -101.3f};
    for (int i = 0; i < 20; i++) x.push_back(float(-127 - 1.2 * i));  // subnormal powers
    while (x.size() < 96) x.push_back(float(20 * random.normal()));
    DeviceFloat in(dev, x), powers(dev, x.size()), reciprocals(dev, x.size());
    launch<approximate_kernel>(1, 96, 0, dev.stream, powers.data, reciprocals.data, (const float*)in.data);
    const HostArray power = powers.host(), reciprocal = reciprocals.host();
    const auto flushed = [](double value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0, value) : value; };
    const auto check = [](double found, double exact, double units) {
        if (exact > FLT_MAX) exact = INFINITY;
        if (exact == 0 || std::isinf(exact)) CHECK_EQUAL(found, exact);
        else CHECK_NEAR(found, exact, (units + 0.5) * 0x1p-23 * std::fabs(exact));  // 0.5: of the nearest number
    };
    for (size_t i = 0; i < x.size(); i++) {
        const double value = flushed(x[i]);
        check(power[i], flushed(std::exp2(value)), 2);
        check(reciprocal[i], flushed(1 / value), 1);
        CHECK_EQUAL(std::signbit(reciprocal[i]), std::signbit(x[i]));
    }
    for (size_t i = 0; i < 4; i++) CHECK_EQUAL(power[i], 1.0f);
}
#endif

TEST(cuda_refuses_narrow_matrices) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(2);
    DeviceReal a(dev, CudaEngine::random_reals(random, 2 * 18)), weight(dev, CudaEngine::random_reals(random, 18 * 18)),
        out(dev, 2 * 18);
    CHECK_FAILS(2, CUDA_FP32 ? "multiples of 4" : "multiples of 8",
                dev.matmul_forward(out, a, weight, nullptr, 2, 18, 18));
}

// The plain kernel: the same products by the engine, and shapes that fill no tile, transposed, in batches with gaps
// between their matrices, in either precision.
template <class In, class Out>
void check_plain_gemm(int M, int N, int K, bool transpose_a, bool transpose_b, int count, bool add) {
    Cuda dev(0, TEST_WORKSPACE);
    const float beta = -1.5f;  // of what is added
    Random random(31);
    const size_t lda = size_t(transpose_a ? M : K) + 3, ldb = size_t(transpose_b ? K : N) + 1, ldc = size_t(N) + 2,
                 next_a = lda * size_t(transpose_a ? K : M) + 5, next_b = ldb * size_t(transpose_b ? N : K),
                 next_c = ldc * size_t(M) + 7;
    const auto rounded = [](auto type, HostArray x) {
        for (float& value : x) value = float(decltype(type)(value));
        return x;
    };
    const HostArray a = rounded(In(), CudaEngine::random_values(random, next_a * size_t(count))),
                    b = rounded(In(), CudaEngine::random_values(random, next_b * size_t(count))),
                    before = rounded(Out(), CudaEngine::random_values(random, next_c * size_t(count)));
    const auto outputs = in_every_order<CudaEngine>([&] {
        In *A = dev.allocate<In>(a.size()), *B = dev.allocate<In>(b.size());
        Out* C = dev.allocate<Out>(before.size());
        dev.from_host(A, a.data(), a.size()), dev.from_host(B, b.data(), b.size());
        dev.from_host(C, before.data(), before.size());
        plain_gemm<In, Out>(transpose_a, transpose_b, M, N, K, A, lda, B, ldb, add ? C : nullptr, beta, C, ldc, count,
                            next_a, next_b, next_c, dev.stream);
        HostArray out(before.size());
        dev.to_host(out.data(), C, out.size());
        dev.release(A), dev.release(B), dev.release(C);
        return std::vector<HostArray>{out};
    });
    CudaEngine::Nums expected;
    for (const float x : before) expected.push_back(CudaEngine::Num(x));  // what lies between the matrices stays
    for (int z = 0; z < count; z++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) {
                CudaEngine::Sum sum;
                const size_t at = size_t(z) * next_c + size_t(m) * ldc + size_t(n);
                if (add) sum.add(CudaEngine::Num(beta) * CudaEngine::Num(before[at]));
                for (int k = 0; k < K; k++)
                    sum.add(
                        CudaEngine::Num(
                            a[size_t(z) * next_a + size_t(transpose_a ? k : m) * lda + size_t(transpose_a ? m : k)]) *
                        CudaEngine::Num(
                            b[size_t(z) * next_b + size_t(transpose_b ? n : k) * ldb + size_t(transpose_b ? k : n)]));
                const CudaEngine::Num number = oracle::numbers(std::vector<CudaEngine::Sum>{sum})[0];
                const double u = std::is_same<Out, float>::value ? 0 : 0x1p-8;
                expected[at] = {number.value, number.error + u * (std::fabs(number.value) + number.error)};
            }
    CHECK_ARRAY(outputs[0], expected);
}
TEST(cuda_plain_matmul) {
    Cuda dev(0, TEST_WORKSPACE);
#ifndef NO_CUBLAS
    dev.plain_matmul = true;
#endif
    check_matmul<CudaEngine>(dev, 33, 72, 136), check_matmul<CudaEngine>(dev, 130, 40, 24);
    for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true}) {
            check_plain_gemm<float, float>(65, 67, 33, transpose_a, transpose_b, 1, transpose_a);
            check_plain_gemm<Cuda::real, float>(1, 130, 17, transpose_a, transpose_b, 3, transpose_b);
        }
    check_plain_gemm<Cuda::real, Cuda::real>(70, 3, 40, false, true, 2, true);
}
// Names contain each other.
TEST(cuda_peaks_of_gpus) {
    const auto teraflops = [](const char* name) { return Cuda::bf16_peak_flops(name) / 1e12; };
    CHECK_EQUAL(teraflops("NVIDIA H100 80GB HBM3"), 989.4);
    CHECK_EQUAL(teraflops("NVIDIA GB200"), 2500);
    CHECK_EQUAL(teraflops("NVIDIA B200"), 2250);
    CHECK_EQUAL(teraflops("NVIDIA GeForce RTX 5070"), 61.7);
    CHECK_EQUAL(teraflops("NVIDIA GeForce RTX 5070 Ti"), 0);
    CHECK_EQUAL(teraflops("NVIDIA GeForce RTX 5090 Laptop GPU"), 0);
    CHECK_EQUAL(teraflops("NVIDIA RTX PRO 6000 Blackwell Server Edition"), 0);
}
#ifdef CUDA_ON_CPU
TEST(cuda_matmul_without_an_algorithm) {
    Cuda dev(0, TEST_WORKSPACE);
    DeviceReal x(dev, HostArray(8 * 16)), weight(dev, HostArray(24 * 16)), out(dev, 8 * 24);
    emu::no_matmul_algorithm = true;
    CHECK_FAILS(1,
                "no way to multiply 8 x 24 x 16 (1 at a time) on cuda_on_cpu; please report the GPU and this line, "
                "and build with NO_CUBLAS=1 meanwhile",
                dev.matmul_forward(out, x, weight, nullptr, 8, 16, 24));
    emu::no_matmul_algorithm = false;
    dev.matmul_forward(out, x, weight, nullptr, 8, 16, 24);
    CHECK_EQUAL(out.unwritten(), 0L);
}
// The algorithm that a product takes, for this shape and this alignment: the first one that cuBLASLt proposes, unless
// it fails. When all fail, that is an error.
TEST(cuda_matmul_with_failing_algorithms) {
    Cuda dev(0, TEST_WORKSPACE);
    DeviceReal x(dev, HostArray(16 * 16)), weight(dev, HostArray(24 * 16)), out(dev, 8 * 24);
    const char* const taken = "algorithm %d, tile 1, stages 1, splits 1, 1.00 waves, number %d of 8";
    const auto product = [&](int failing, const Cuda::real* in) {
        emu::failing_algorithms = failing;
        dev.matmul_forward(out, in, weight, nullptr, 8, 16, 24);
    };
    product(0, x);
    CHECK_EQUAL(dev.products().at(0), "8 x 24 x 16 nt: " + format_text(taken, 0, 1));
    product(2, x);
    product(0, x);  // stays with what worked
    CHECK_EQUAL(out.unwritten(), 0L);
    CHECK_EQUAL(dev.products().at(0), "8 x 24 x 16 nt: " + format_text(taken, 2, 3));
    CHECK_FAILS(1, "cublasLtMatmul failed: not supported", product(8, x));
    product(0, x + 16);  // aligned to 32 bytes, or to 64 in fp32: another plan
    CHECK_EQUAL(dev.products().size(), 2);
}
#endif
