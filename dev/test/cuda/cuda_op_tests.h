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

// By the engine's own kernel: products of shapes that fill no tile, added to what is there, in batches, and of rows
// that overlap.
TEST(cuda_plain_matmul) {
    Cuda dev(0, TEST_WORKSPACE);
#ifndef NO_CUBLAS
    dev.plain_matmul = true;
#endif
    check_matmul<CudaEngine>(dev, 33, 72, 136), check_matmul<CudaEngine>(dev, 130, 40, 24);
    check_muon_product<CudaEngine>(dev);
    check_compress<CudaEngine>(dev, nsa_shape(1, 70, 2, 1, 16, 16, 4, 16, 3, 9));
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
