// cuda_op_tests.h: every operation of struct Cuda except attention against the oracles of oracle.h: by g++ in the
// emulator, by nvcc on a GPU; in bf16, or in fp32 with -DPRECISION_FP32.
//
// Error limits. Inputs are numbers that the engine's format holds exactly. The oracle, in Numbers<float>, says what
// fp32 arithmetic may do to each element; an element that is then stored as bf16 is rounded once more, by u = 2^-8 of
// its value (8 bits of significand, to nearest), see stored(). Where an operation stores an intermediate result, the
// test's oracle rounds it in the same place. Outputs start as poison, and what an operation must leave alone still
// holds it afterwards. Every operation runs with threads and blocks in several orders, and must give the same bits each
// time.
#pragma once
#include <functional>
#include <memory>

#include "../../../nsa_kernels.cuh"
#include "../harness.h"
#include "../ops/oracle.h"

using CudaNumber = oracle::Number<float>;
using CudaNumbers = oracle::Numbers<float>;
using CudaSum = oracle::Sum<float>;
using HostArray = std::vector<float>;

constexpr bool CUDA_FP32 = std::is_same<Cuda::real, float>::value;
constexpr double STORED_U = CUDA_FP32 ? 0 : 0x1p-8;

// A value in fp32 arithmetic that is then stored as Cuda::real. Below the smallest normal number the spacing of bf16 is
// 2^-133.
inline CudaNumber stored(CudaNumber x) {
    return {x.value, x.error + STORED_U * (std::fabs(x.value) + x.error) + (CUDA_FP32 ? 0 : 0x1p-134)};
}
inline CudaNumbers stored(CudaNumbers all) {
    for (CudaNumber& x : all) x = stored(x);
    return all;
}

inline float as_real(double x) { return float(Cuda::real(float(x))); }
inline HostArray random_reals(Random& random, size_t count, double scale = 1) {  // exact in Cuda::real
    HostArray x(count);
    for (float& e : x) e = as_real(scale * random.normal());
    return x;
}
inline HostArray random_floats(Random& random, size_t count, double scale = 1) {
    HostArray x(count);
    for (float& e : x) e = float(scale * random.normal());
    return x;
}

constexpr size_t TEST_WORKSPACE = size_t(1) << 20;  // the emulator touches all of it at each launch

// An array on the engine, filled from host values or fresh; an operation must write all of a fresh one.
template <class T>
class OnDevice {
  public:
    Cuda& dev;
    T* const data;
    const size_t count;
    OnDevice(Cuda& engine, size_t n) : dev(engine), data(engine.allocate<T>(n)), count(n) {}
    OnDevice(Cuda& engine, const HostArray& values) : OnDevice(engine, values.size()) {
        dev.from_host(data, values.data(), count);
    }
    OnDevice(const OnDevice&) = delete;
    ~OnDevice() { dev.release(data); }
    operator T*() const { return data; }
    HostArray host() const {
        HostArray values(count);
        dev.to_host(values.data(), data, count);
        return values;
    }
    // How many elements no kernel wrote; on a GPU this is not known, and `expected` is returned.
    long unwritten(long expected = 0) const {
#ifdef __CUDACC__
        return expected;
#else
        (void)expected;
        CUDA_CHECK(cudaDeviceSynchronize());
        return emu::unwritten(data, count);
#endif
    }
};
using DeviceReal = OnDevice<Cuda::real>;
using DeviceFloat = OnDevice<float>;

inline std::unique_ptr<OnDevice<int32_t>> device_tokens(Cuda& dev, const std::vector<int32_t>& tokens) {
    auto on_device = std::make_unique<OnDevice<int32_t>>(dev, tokens.size());
    dev.copy(on_device->data, tokens.data(), tokens.size());
    return on_device;
}

// run() uploads, computes and returns the outputs. It runs under several orders of threads and blocks; all must give
// the same bits.
inline std::vector<HostArray> in_every_order(const std::function<std::vector<HostArray>()>& run) {
    std::vector<HostArray> first = run();
#if defined(EMU_CHECK)
    const int seeds = 1;  // every access is checked, so one order is enough
#else
    const int seeds = 3;
#endif
    for (int seed = 1; seed <= seeds; seed++) {
#ifndef __CUDACC__
        emu::seed(uint64_t(seed));
#endif
        const std::vector<HostArray> again = run();
        REQUIRE(again.size() == first.size());
        for (size_t i = 0; i < first.size(); i++) CHECK_SAME_BITS(again[i].data(), first[i].data(), first[i].size());
    }
#ifndef __CUDACC__
    emu::seed(0);
#endif
    return first;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory and the engine itself.

TEST(cuda_memory) {
    Cuda dev(0, TEST_WORKSPACE);
    dev.poison = true;
    DeviceFloat x(dev, 1001);
    CHECK(size_t(x.data) % 256 == 0);
    for (float e : x.host()) CHECK(std::isnan(e));
    dev.zero(x.data, size_t(1000));
    const HostArray zeroed = x.host();
    for (int i = 0; i < 1000; i++) CHECK_EQUAL(zeroed[size_t(i)], 0.0f);
    CHECK(std::isnan(zeroed[1000]));

    Random random(1);
    const HostArray values = random_floats(random, 1001);
    DeviceFloat a(dev, values), b(dev, values.size());
    dev.copy(b.data, (const float*)a.data, values.size());  // device to device
    CHECK_SAME_BITS(b.host().data(), values.data(), values.size());
    DeviceReal narrow(dev, values);
    const HostArray back = narrow.host();
    for (size_t i = 0; i < values.size(); i++) CHECK_EQUAL(back[i], as_real(values[i]));  // to nearest
    HostArray reused = values;
    dev.copy(a.data, (const float*)reused.data(), reused.size());
    std::fill(reused.begin(), reused.end(), 0.0f);  // the copy is done
    CHECK_SAME_BITS(a.host().data(), values.data(), values.size());
    dev.zero(a.data, size_t(0));
    CHECK_FAILS(1, "out of GPU memory: 1073741824.0 MiB were asked for", dev.allocate<char>(size_t(1) << 50));
    OnDevice<int32_t> small(dev, 1);  // the engine still works
    dev.zero(small.data, size_t(1));
}

// ex2.approx.ftz and rcp.approx.ftz are within 2 and 1 units of the last place, and give and take 0 for what is below
// 2^-126. The emulator claims so, and the limits of the attention kernels rest on it.
__global__ void approximate_kernel(float* powers, float* reciprocals, const float* x) {
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

TEST(cuda_refuses_narrow_matrices) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(2);
    DeviceReal a(dev, random_reals(random, 2 * 18)), weight(dev, random_reals(random, 18 * 18)), out(dev, 2 * 18);
    CHECK_FAILS(2, CUDA_FP32 ? "multiples of 4" : "multiples of 8",
                dev.matmul_forward(out, a, weight, nullptr, 2, 18, 18));
}

// ---------------------------------------------------------------------------------------------------------------------
// Row operations.

inline void check_cuda_embedding(int N, int C, int V) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(10);
    std::vector<int32_t> tokens(static_cast<size_t>(N));
    for (int n = 0; n < N; n++)
        tokens[size_t(n)] = n == 0      ? V - 1
                            : n < N / 3 ? 2
                                        : random.below(V);  // one token is frequent, some are missing
    const HostArray embed = random_reals(random, size_t(V) * C), dx = random_reals(random, size_t(N) * C),
                    dembed = random_floats(random, embed.size());
    const auto outputs = in_every_order([&] {
        DeviceReal e(dev, embed), x(dev, size_t(N) * C), d(dev, dx);
        DeviceFloat de(dev, dembed);
        const auto t = device_tokens(dev, tokens);
        dev.embedding_forward(x, *t, e, N, C);
        CHECK_EQUAL(x.unwritten(), 0L);
        dev.embedding_backward(de, d, *t, N, C);
        return std::vector<HostArray>{x.host(), de.host()};
    });
    std::vector<CudaSum> sums(dembed.size());
    for (size_t i = 0; i < sums.size(); i++) sums[i].add(CudaNumber(dembed[i]));
    for (size_t n = 0; n < size_t(N); n++) {
        CHECK_SAME_BITS(&outputs[0][n * C], &embed[size_t(tokens[n]) * C], size_t(C));
        for (size_t c = 0; c < size_t(C); c++) sums[size_t(tokens[n]) * C + c].add(CudaNumber(dx[n * C + c]));
    }
    CHECK_ARRAY(outputs[1], oracle::numbers(sums), V, C);
}
TEST(cuda_embedding) {
    check_cuda_embedding(1, 8, 5), check_cuda_embedding(300, 24, 30), check_cuda_embedding(513, 7, 100),
        check_cuda_embedding(255, 1032, 9);
}

inline void check_cuda_rmsnorm(int N, int C) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(20);
    HostArray x = random_reals(random, size_t(N) * C), dx = random_reals(random, x.size()),
              dout = random_reals(random, x.size());
    const HostArray weight = random_reals(random, size_t(C)), dweight = random_floats(random, size_t(C));
    // Rows of every scale around sqrt(epsilon) = 1e-3, and a row of zeros: there epsilon decides.
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            x[size_t(n) * C + c] = as_real(x[size_t(n) * C + c] * (n % 4 == 0   ? 1
                                                                   : n % 4 == 1 ? 1e-3
                                                                   : n % 4 == 2 ? 1e3
                                                                                : 0));
    const auto outputs = in_every_order([&] {
        DeviceReal in(dev, x), w(dev, weight), out(dev, x.size()), d(dev, dout), din(dev, dx);
        DeviceFloat rstd(dev, size_t(N)), dw(dev, dweight);
        dev.rmsnorm_forward(out, rstd, in, w, N, C);
        CHECK_EQUAL(out.unwritten() + rstd.unwritten(), 0L);
        dev.rmsnorm_backward(din, dw, d, in, rstd, w, N, C);
        return std::vector<HostArray>{out.host(), rstd.host(), din.host(), dw.host()};
    });
    CudaNumbers expected, expected_rstd, expected_dx;
    std::vector<CudaSum> sums(static_cast<size_t>(C));
    for (int c = 0; c < C; c++) sums[size_t(c)].add(CudaNumber(dweight[size_t(c)]));
    for (int n = 0; n < N; n++) {
        const float *row = &x[size_t(n) * C], *drow = &dout[size_t(n) * C];
        const oracle::Normed<float> normed = oracle::rmsnorm<float>(row, weight.data(), C);
        const CudaNumbers gradient = oracle::rmsnorm_dx<float>(drow, row, normed.rstd, weight.data(), C);
        expected_rstd.push_back(normed.rstd);
        for (int c = 0; c < C; c++) {
            expected.push_back(stored(normed.out[size_t(c)]));
            expected_dx.push_back(stored(CudaNumber(dx[size_t(n) * C + c]) + gradient[size_t(c)]));
            sums[size_t(c)].add(CudaNumber(drow[c]) * CudaNumber(row[c]) * normed.rstd);
        }
    }
    CHECK_ARRAY(outputs[0], expected, N, C);
    CHECK_ARRAY(outputs[1], expected_rstd);
    CHECK_ARRAY(outputs[2], expected_dx, N, C);
    CHECK_ARRAY(outputs[3], oracle::numbers(sums));
}
TEST(cuda_rmsnorm) {
    check_cuda_rmsnorm(1, 1), check_cuda_rmsnorm(9, 8), check_cuda_rmsnorm(37, 63), check_cuda_rmsnorm(18, 264),
        check_cuda_rmsnorm(150, 24), check_cuda_rmsnorm(3, 1032), check_cuda_rmsnorm(5, 333);
}
TEST(cuda_column_sums_of_many_rows) {  // more than 16 rows per part
    check_cuda_rmsnorm(512 * 16 + 5, 8);
}

inline void check_cuda_matmul(int N, int C, int OC, bool plain = false) {
    Cuda dev(0, TEST_WORKSPACE);
#ifndef NO_CUBLAS
    dev.plain_matmul = plain;
#endif
    Random random(30);
    const HostArray inp = random_reals(random, size_t(N) * C), weight = random_reals(random, size_t(OC) * C),
                    residual = random_reals(random, size_t(N) * OC);
    const HostArray dout = random_reals(random, residual.size()), dweight = random_floats(random, weight.size());
    const auto outputs = in_every_order([&] {
        DeviceReal in(dev, inp), w(dev, weight), r(dev, residual), out(dev, residual.size()), sum(dev, residual.size()),
            d(dev, dout), din(dev, inp.size());
        DeviceFloat dw(dev, dweight);
        dev.matmul_forward(out, in, w, nullptr, N, C, OC);
        dev.matmul_forward(sum, in, w, r, N, C, OC);
        dev.matmul_backward_input(din, d, w, N, C, OC);
        dev.matmul_backward_weight(dw, d, in, N, C, OC);
        CHECK_EQUAL(out.unwritten() + sum.unwritten() + din.unwritten(), 0L);
        CHECK_SAME_BITS(r.host().data(), residual.data(), residual.size());
        return std::vector<HostArray>{out.host(), sum.host(), din.host(), dw.host()};
    });
    std::vector<CudaSum> out(residual.size()), din(inp.size()), dw(weight.size());
    for (size_t i = 0; i < dw.size(); i++) dw[i].add(CudaNumber(dweight[i]));
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++)
            for (int c = 0; c < C; c++) {
                const CudaNumber x(inp[size_t(n) * C + c]), w(weight[size_t(o) * C + c]), d(dout[size_t(n) * OC + o]);
                out[size_t(n) * OC + o].add(x * w), din[size_t(n) * C + c].add(d * w), dw[size_t(o) * C + c].add(d * x);
            }
    CHECK_ARRAY(outputs[0], stored(oracle::numbers(out)), N, OC);
    for (size_t i = 0; i < out.size(); i++) out[i].add(CudaNumber(residual[i]));
    CHECK_ARRAY(outputs[1], stored(oracle::numbers(out)), N, OC);
    CHECK_ARRAY(outputs[2], stored(oracle::numbers(din)), N, C);
    CHECK_ARRAY(outputs[3], oracle::numbers(dw), OC, C);
}
TEST(cuda_matmul) {
    check_cuda_matmul(1, 8, 8), check_cuda_matmul(33, 72, 136), check_cuda_matmul(130, 40, 24),
        check_cuda_matmul(1, 264, 64);
}
// The plain kernel: the same products by the engine, and shapes that fill no tile, transposed, in batches with gaps
// between their matrices, in either precision.
template <class In, class Out>
void check_plain_gemm(int M, int N, int K, bool transpose_a, bool transpose_b, int count, bool add) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(31);
    const size_t lda = size_t(transpose_a ? M : K) + 3, ldb = size_t(transpose_b ? K : N) + 1, ldc = size_t(N) + 2,
                 next_a = lda * size_t(transpose_a ? K : M) + 5, next_b = ldb * size_t(transpose_b ? N : K),
                 next_c = ldc * size_t(M) + 7;
    const auto rounded = [](auto type, HostArray x) {
        for (float& value : x) value = float(decltype(type)(value));
        return x;
    };
    const HostArray a = rounded(In(), random_floats(random, next_a * size_t(count))),
                    b = rounded(In(), random_floats(random, next_b * size_t(count))),
                    before = rounded(Out(), random_floats(random, next_c * size_t(count)));
    const auto outputs = in_every_order([&] {
        In *A = dev.allocate<In>(a.size()), *B = dev.allocate<In>(b.size());
        Out* C = dev.allocate<Out>(before.size());
        dev.from_host(A, a.data(), a.size()), dev.from_host(B, b.data(), b.size());
        dev.from_host(C, before.data(), before.size());
        plain_gemm<In, Out>(transpose_a, transpose_b, M, N, K, A, lda, B, ldb, add ? C : nullptr, C, ldc, count, next_a,
                            next_b, next_c, dev.stream);
        HostArray out(before.size());
        dev.to_host(out.data(), C, out.size());
        dev.release(A), dev.release(B), dev.release(C);
        return std::vector<HostArray>{out};
    });
    CudaNumbers expected;
    for (const float x : before) expected.push_back(CudaNumber(x));  // what lies between the matrices stays
    for (int z = 0; z < count; z++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) {
                CudaSum sum;
                const size_t at = size_t(z) * next_c + size_t(m) * ldc + size_t(n);
                if (add) sum.add(CudaNumber(before[at]));
                for (int k = 0; k < K; k++)
                    sum.add(
                        CudaNumber(
                            a[size_t(z) * next_a + size_t(transpose_a ? k : m) * lda + size_t(transpose_a ? m : k)]) *
                        CudaNumber(
                            b[size_t(z) * next_b + size_t(transpose_b ? n : k) * ldb + size_t(transpose_b ? k : n)]));
                const CudaNumber number = oracle::numbers(std::vector<CudaSum>{sum})[0];
                const double u = std::is_same<Out, float>::value ? 0 : 0x1p-8;
                expected[at] = {number.value, number.error + u * (std::fabs(number.value) + number.error)};
            }
    CHECK_ARRAY(outputs[0], expected);
}
TEST(cuda_plain_matmul) {
    check_cuda_matmul(33, 72, 136, true), check_cuda_matmul(130, 40, 24, true);
    for (const bool transpose_a : {false, true})
        for (const bool transpose_b : {false, true}) {
            check_plain_gemm<float, float>(65, 67, 33, transpose_a, transpose_b, 1, transpose_a);
            check_plain_gemm<__nv_bfloat16, float>(1, 130, 17, transpose_a, transpose_b, 3, transpose_b);
        }
    check_plain_gemm<__nv_bfloat16, __nv_bfloat16>(70, 3, 40, false, true, 2, true);
}
#ifndef __CUDACC__
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
#endif

TEST(cuda_silu) {
    for (const size_t count : {size_t(1024), size_t(1023)}) {  // whole 16 bytes, or not
        Cuda dev(0, TEST_WORKSPACE);
        Random random(40);
        HostArray x = random_reals(random, count, 3), dout = random_reals(random, count);
        for (size_t i = 0; i < 400; i++) x[i] = as_real(-100 + 0.5 * double(i));
        x[400] = 0, x[401] = 1000, x[402] = -1000;
        const auto outputs = in_every_order([&] {
            DeviceReal in(dev, x), out(dev, count), d(dev, dout), din(dev, count);
            dev.silu_forward(out, in, count);
            dev.silu_backward(din, d, in, count);
            CHECK_EQUAL(out.unwritten() + din.unwritten(), 0L);
            dev.silu_backward(d, d, in, count);  // in place
            CHECK_SAME_BITS(d.host().data(), din.host().data(), count);
            return std::vector<HostArray>{out.host(), din.host()};
        });
        CudaNumbers expected, expected_dx;
        for (size_t i = 0; i < count; i++) {
            const bool vanishes = x[i] == -1000;  // e^1000 is infinite in fp32: the sigmoid is 0, and so is the product
            expected.push_back(vanishes ? CudaNumber(0) : stored(oracle::silu(CudaNumber(x[i]))));
            expected_dx.push_back(vanishes ? CudaNumber(0)
                                           : stored(CudaNumber(dout[i]) * oracle::silu_slope(CudaNumber(x[i]))));
        }
        CHECK_ARRAY(outputs[0], expected);
        CHECK_ARRAY(outputs[1], expected_dx);
        const DeviceReal in(dev, HostArray(count, std::numeric_limits<float>::quiet_NaN())),
            out(dev, count);  // is not hidden
        dev.silu_forward(out, in, count);
        for (const float y : out.host()) CHECK(y != y);
    }
}

inline void check_cuda_classifier(int N, int V, int Vp, double scale) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(50);
    const double dloss = 1.0 / 48;
    HostArray logits = random_reals(random, size_t(N) * Vp, scale);
    std::vector<int32_t> targets(static_cast<size_t>(N));
    for (int n = 0; n < N; n++) {
        targets[size_t(n)] = n == 0 ? 0 : n == 1 ? V - 1 : random.below(V);
        // may hold anything
        for (int v = V; v < Vp; v++)
            logits[size_t(n) * Vp + v] = v % 2 ? as_real(1e30) : std::numeric_limits<float>::quiet_NaN();
    }
    const auto outputs = in_every_order([&] {
        DeviceReal l(dev, logits);
        DeviceFloat losses(dev, size_t(N)), again(dev, size_t(N));
        const auto t = device_tokens(dev, targets);
        dev.classifier(losses, l, *t, dloss, false, N, V, Vp);
        const HostArray kept = l.host();
        for (size_t i = 0; i < kept.size(); i++)
            CHECK(kept[i] == logits[i] || (std::isnan(kept[i]) && std::isnan(logits[i])));
        dev.classifier(again, l, *t, dloss, true, N, V, Vp);
        CHECK_SAME_BITS(again.host().data(), losses.host().data(), size_t(N));
        return std::vector<HostArray>{losses.host(), l.host()};
    });
    // The running sum is rescaled when the maximum grows: at most once per 16 bytes that a thread reads, in 5 steps of
    // a warp and once for each of 16 warps. Each is a product with an exponential, 5u, and an addition.
    const double rescaling = 6 * CudaNumber::u * (V / 512.0 + 1 + 5 + 16);
    CudaNumbers expected, expected_losses;
    for (int n = 0; n < N; n++) {
        const oracle::Classified<float> row =
            oracle::cross_entropy<float>(&logits[size_t(n) * Vp], targets[size_t(n)], dloss, V);
        expected_losses.emplace_back(row.loss.value, row.loss.error + rescaling);
        for (int v = 0; v < Vp; v++) {
            CudaNumber d = v < V ? row.dlogits[size_t(v)] : CudaNumber(0);
            d.error += rescaling * (std::fabs(d.value) + (v == targets[size_t(n)] ? dloss : 0));
            expected.push_back(v < V ? stored(d) : d);
        }
    }
    CHECK_ARRAY(outputs[0], expected_losses);
    CHECK_ARRAY(outputs[1], expected, N, Vp);
}
TEST(cuda_classifier) {
    for (double scale : {1.0, 1e3})
        check_cuda_classifier(5, 256, 256, scale), check_cuda_classifier(4, 1000, 1024, scale),
            check_cuda_classifier(3, 5, 128, scale), check_cuda_classifier(3, 37, 39, scale),
            check_cuda_classifier(2, 2301, 2303, scale);
    check_cuda_classifier(2, 50257, 50304, 2);
}

TEST(cuda_sum_of_squares) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(60);
    for (const size_t count : {size_t(1), size_t(1023), size_t(50000)}) {
        const HostArray x = random_floats(random, count);
        oracle::Sum<double> sum;
        for (float e : x) sum.add(oracle::Number<double>(e) * oracle::Number<double>(e));  // fp64 in both
        double first = 0;
        in_every_order([&] {
            DeviceFloat on_device(dev, x);
            const size_t chunks = (count + CHUNK - 1) / CHUNK;
            OnDevice<double> squares(dev, chunks), total(dev, 1);
            const DeviceFloat guard(dev, HostArray{1});
            dev.chunk_squares(squares, on_device, count, 0, chunks * CHUNK);
            dev.total_squares(total, squares, chunks, guard);
            double found;
            dev.copy(&found, (const double*)total, 1);
            CHECK_NEAR(found, sum.value, oracle::Number<double>(sum).error);
            if (first == 0) first = found;
            CHECK_EQUAL(found, first);
            return std::vector<HostArray>{};
        });
    }
}

TEST(cuda_adamw) {
    Cuda dev(0, TEST_WORKSPACE);
    Random random(61);
    const size_t count = 1003, offset = (size_t(1) << 33) + 77;
    for (int step : {1, 2, 1000}) {
        const double decay = step == 2 ? 0 : 0.1, clip = step == 1 ? 1 : 0.37,
                     squares = 16;  // a norm of 4, clipped to 4 or 1.48
        OnDevice<double> norm(dev, 1);
        dev.copy(norm.data, &squares, 1);
        HostArray master = random_floats(random, count), m = random_floats(random, count, step == 1 ? 0 : 0.1),
                  v = random_floats(random, count, step == 1 ? 0 : 0.1), grad = random_floats(random, count);
        for (float& e : v) e *= e;
        grad[3] = 0, grad[4] = 1e-6f, grad[5] = 1e4f;
        const HyperAdamW h{1e-2, 0.9, 0.95, 1e-8, decay, step, 1337, offset, norm.data, 4 * clip};
        const auto outputs = in_every_order([&] {
            DeviceReal param(dev, count), halves(dev, count);
            DeviceFloat a(dev, master), am(dev, m), av(dev, v), g(dev, grad), b(dev, master), bm(dev, m), bv(dev, v);
            dev.adamw(param, a, am, av, g, count, h);
            CHECK_EQUAL(param.unwritten(), 0L);
            HyperAdamW rest = h;  // in two pieces: rounding depends on the place alone
            const size_t cut = 400;
            rest.offset += cut;
            dev.adamw(halves, b, bm, bv, g, cut, h);
            dev.adamw(halves + cut, b + cut, bm + cut, bv + cut, g + cut, count - cut, rest);
            CHECK_SAME_BITS(halves.host().data(), param.host().data(), count);
            DeviceReal restored(dev, count);
            dev.round_master(restored, a, count, h.seed, h.step, h.offset);
            CHECK_SAME_BITS(restored.host().data(), param.host().data(), count);
            return std::vector<HostArray>{param.host(), a.host(), am.host(), av.host()};
        });
        CudaNumbers expected, expected_m, expected_v;
        for (size_t i = 0; i < count; i++) {
            const oracle::Adam<float> after =
                oracle::adamw(master[i], m[i], v[i], grad[i], 1e-2, 0.9, 0.95, 1e-8, decay, step, clip);
            expected.push_back(after.param), expected_m.push_back(after.m), expected_v.push_back(after.v);
        }
        CHECK_ARRAY(outputs[1], expected);
        CHECK_ARRAY(outputs[2], expected_m);
        CHECK_ARRAY(outputs[3], expected_v);
        for (size_t i = 0; i < count; i++) {  // the rounding, bit for bit
            uint32_t bits;
            std::memcpy(&bits, &outputs[1][i], 4);
            if (!CUDA_FP32)
                bits = (bits + (philox4x32(offset + i, random_stream(RANDOM_ROUNDING, uint64_t(step)), 1337).word[0] &
                                0xffff)) &
                       0xffff0000;
            float rounded;
            std::memcpy(&rounded, &bits, 4);
            CHECK_EQUAL(outputs[0][i], rounded);
        }
    }
}
// The squared norm in device memory says how to clip: the result is that of a gradient that was scaled beforehand, and
// below the limit nothing changes; a norm that is not finite leaves everything as it was. The factor is rounded to fp32
// once on either side, so the bits are equal where it is a power of two.
TEST(cuda_adamw_clips_by_the_norm_on_the_device) {
    Cuda dev(0, size_t(1) << 20);
    const size_t count = 1000;
    HostArray value(count), grad(count);
    for (size_t i = 0; i < count; i++)
        value[i] = float(random_normal(5, random_stream(RANDOM_TEST, 1), i)),
        grad[i] = float(random_normal(5, random_stream(RANDOM_TEST, 2), i));
    auto after = [&](double squares, double grad_clip, float scale, bool by_norm) {
        Cuda::real* param = dev.allocate<Cuda::real>(count);
        float *master = dev.allocate<float>(count), *m = dev.allocate<float>(count), *v = dev.allocate<float>(count),
              *g = dev.allocate<float>(count);
        double* norm = dev.allocate<double>(1);
        HostArray scaled = grad;
        for (float& x : scaled) x *= scale;
        dev.from_host(master, value.data(), count), dev.from_host(g, scaled.data(), count), dev.zero(m, count),
            dev.zero(v, count), dev.zero(param, count);
        dev.copy(norm, (const double*)&squares, 1);
        HyperAdamW h{1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 7, 0};
        if (by_norm) h.squares = norm, h.grad_clip = grad_clip;
        dev.adamw(param, master, m, v, g, count, h);
        HostArray all(3 * count);
        dev.to_host(&all[0], master, count), dev.to_host(&all[count], m, count), dev.to_host(&all[2 * count], v, count);
        dev.release(param), dev.release(master), dev.release(m), dev.release(v), dev.release(g), dev.release(norm);
        return all;
    };
    CHECK(after(16, 1, 1, true) == after(0, 0, 0.25, false));  // norm 4, clipped to 1
    CHECK(after(16, 8, 1, true) == after(0, 0, 1, false));     // below the limit
    CHECK(after(16, 0, 1, true) == after(0, 0, 1, false));     // 0: no clipping
    CHECK(after(16, 1, 1, true) != after(16, 8, 1, true));
    for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
        const HostArray same = after(bad, 1, 1, true);
        for (size_t i = 0; i < count; i++) {
            CHECK_EQUAL(same[i], value[i]);
            CHECK_EQUAL(same[count + i], 0.0f);
        }
    }
}

TEST(cuda_stochastic_rounding_keeps_the_mean) {
    if (CUDA_FP32) return skip("cuda_stochastic_rounding_keeps_the_mean: nothing is rounded in fp32");
    Cuda dev(0, TEST_WORKSPACE);
    const size_t count = 20000;
    DeviceReal param(dev, count);
    DeviceFloat master(dev, HostArray(count, 1.0f + 0.3f * 0x1p-7f)), m(dev, HostArray(count, 0.0f)),
        v(dev, HostArray(count, 0.0f)), grad(dev, HostArray(count, 0.0f));
    dev.adamw(param, master, m, v, grad, count, HyperAdamW{0, 0.9, 0.95, 1e-8, 0, 1, 7, 0});
    double up = 0;
    for (float x : param.host()) {
        CHECK(x == 1.0f || x == 1.0f + 0x1p-7f);  // one of the two neighbours
        up += x > 1;
    }
    CHECK_NEAR(up / count, 0.3, 5 * std::sqrt(0.3 * 0.7 / count));  // five standard deviations of a binomial share
}

// ---------------------------------------------------------------------------------------------------------------------
// Shapes.

inline NsaShape cuda_shape(int B, int T, int G, int h, int D, int l, int d, int slc_block, int slc_count, int window) {
    NsaShape s;
    s.B = B, s.T = T, s.first = 0, s.queries = T, s.H = G * h, s.G = G, s.D = D, s.l = l, s.d = d;
    s.slc_block = slc_block, s.slc_count = slc_count, s.window = window, s.F = 8;
    return s;
}
inline NsaShape part_of(NsaShape s, int first, int queries) {
    s.first = first, s.queries = queries;
    return s;
}
// and as in decoding: a prompt, one position, the rest
inline std::vector<NsaShape> with_parts(const std::vector<NsaShape>& shapes) {
    std::vector<NsaShape> all = shapes;
    for (const NsaShape& s : shapes)
        if (s.T > 2)
            all.push_back(part_of(s, 0, s.T / 2)), all.push_back(part_of(s, s.T / 2, 1)),
                all.push_back(part_of(s, s.T / 3, s.T - s.T / 3));
    return all;
}
struct CudaShapeReport {
    const NsaShape& s;
    int failed = tests().failed_checks;
    explicit CudaShapeReport(const NsaShape& shape) : s(shape) {}
    ~CudaShapeReport() {
        if (tests().failed_checks > failed && tests().failed_checks <= 10)
            std::printf(
                "    with B %d T %d first %d queries %d H %d G %d D %d l %d d %d l' %d n %d w %d F %d full %d\n", s.B,
                s.T, s.first, s.queries, s.H, s.G, s.D, s.l, s.d, s.slc_block, s.slc_count, s.window, s.F, int(s.full));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE.

struct DeviceHeads {
    DeviceReal q;
    std::vector<std::unique_ptr<DeviceReal>> kv;
    DeviceFloat gate;
    DeviceHeads(Cuda& dev, const NsaShape& s)
        : q(dev, s.query_rows() * s.D), gate(dev, s.full ? 0 : 3 * s.query_rows()) {
        for (int slot = 0; slot < 6; slot++)
            kv.push_back(std::make_unique<DeviceReal>(dev, s.full && slot < K_WIN ? 0 : s.key_rows() * s.D));
    }
    Cuda::Heads pointers() { return {q, {*kv[0], *kv[1], *kv[2], *kv[3], *kv[4], *kv[5]}, gate}; }
};

inline void check_cuda_split_heads(Cuda& dev, const NsaShape& s) {
    const CudaShapeReport report(s);
    Random random(70);
    const int P = s.projected(), D = s.D;
    const HostArray projected = random_reals(random, size_t(s.B) * s.queries * P);
    const auto outputs = in_every_order([&] {
        DeviceReal in(dev, projected);
        DeviceHeads out(dev, s);
        dev.split_heads_forward(out.pointers(), in, s);
        const long outside = long(s.B) * s.G * (s.T - s.queries) * D;  // positions of other calls
        CHECK_EQUAL(out.q.unwritten() + out.gate.unwritten(), 0L);
        std::vector<HostArray> all = {out.q.host(), s.full ? HostArray() : out.gate.host()};
        for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++) {
            CHECK_EQUAL(out.kv[size_t(slot)]->unwritten(outside), outside);
            const HostArray whole = out.kv[size_t(slot)]->host();
            HostArray rows;  // of this call
            for (int bg = 0; bg < s.B * s.G; bg++)
                rows.insert(rows.end(), &whole[(size_t(bg) * s.T + s.first) * D],
                            &whole[(size_t(bg) * s.T + s.first) * D] + size_t(s.queries) * D);
            all.push_back(rows);
        }
        return all;
    });
    CudaNumbers q(s.query_rows() * D), gate(s.full ? 0 : 3 * s.query_rows());
    std::vector<CudaNumbers> kv(s.full ? 2 : 6, CudaNumbers(size_t(s.B) * s.G * s.queries * D));
    for (int b = 0; b < s.B; b++)
        for (int j = 0; j < s.queries; j++) {
            const float* row = &projected[(size_t(b) * s.queries + j) * P];
            for (int head = 0; head < s.H; head++, row += D) {
                const CudaNumbers turned = stored(oracle::rope(row, s.first + j, D, +1));
                std::copy(turned.begin(), turned.end(), &q[((size_t(b) * s.H + head) * s.queries + j) * D]);
            }
            for (size_t i = 0; i < kv.size(); i++)
                for (int g = 0; g < s.G; g++, row += D) {
                    const int slot = int(i) + (s.full ? K_WIN : K_CMP);
                    const CudaNumbers values = slot == K_SLC || slot == K_WIN
                                                   ? stored(oracle::rope(row, s.first + j, D, +1))
                                                   : oracle::numbers(row, size_t(D));
                    std::copy(values.begin(), values.end(), &kv[i][((size_t(b) * s.G + g) * s.queries + j) * D]);
                }
            for (int head = 0; head < s.H && !s.full; head++)
                for (int branch = 0; branch < 3; branch++)
                    gate[branch * s.query_rows() + (size_t(b) * s.H + head) * s.queries + j] =
                        oracle::sigmoid(CudaNumber(row[3 * head + branch]));
        }
    CHECK_ARRAY(outputs[0], q, s.B, s.H, s.queries, D);
    CHECK_ARRAY(outputs[1], gate, 3, s.B, s.H, s.queries);
    for (size_t i = 0; i < kv.size(); i++) CHECK_ARRAY(outputs[2 + i], kv[i], s.B, s.G, s.queries, D);
    if (s.queries != s.T) return;

    const HostArray dq = random_floats(random, s.query_rows() * D), dgate = random_floats(random, 3 * s.query_rows());
    std::vector<HostArray> dkv;
    for (int slot = 0; slot < 6; slot++) dkv.push_back(random_reals(random, s.key_rows() * D));
    const auto gradients = in_every_order([&] {
        DeviceFloat q_on_device(dev, dq), gate_on_device(dev, dgate);
        DeviceReal out(dev, projected.size());
        std::vector<std::unique_ptr<DeviceReal>> kv_on_device;
        for (const HostArray& d : dkv) kv_on_device.push_back(std::make_unique<DeviceReal>(dev, d));
        Cuda::HeadGradients d{q_on_device, {}, s.full ? nullptr : gate_on_device.data};
        for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++) d.kv[slot] = *kv_on_device[size_t(slot)];
        dev.split_heads_backward(out, d, s);
        CHECK_EQUAL(out.unwritten(), 0L);
        return std::vector<HostArray>{out.host()};
    });
    CudaNumbers expected;
    auto append = [&](const CudaNumbers& values) { expected.insert(expected.end(), values.begin(), values.end()); };
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++) {
            for (int head = 0; head < s.H; head++)
                append(stored(oracle::rope(&dq[((size_t(b) * s.H + head) * s.T + t) * D], t, D, -1)));
            for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++) {
                    const float* row = &dkv[size_t(slot)][((size_t(b) * s.G + g) * s.T + t) * D];
                    append(slot == K_SLC || slot == K_WIN ? stored(oracle::rope(row, t, D, -1))
                                                          : oracle::numbers(row, size_t(D)));
                }
            for (int i = 0; i < s.gate_columns(); i++)
                expected.push_back(i < 3 * s.H
                                       ? stored(CudaNumber(dgate[((size_t(i % 3) * s.B + b) * s.H + i / 3) * s.T + t]))
                                       : CudaNumber(0));
        }
    CHECK_ARRAY(gradients[0], expected, s.B * s.T, P);
}
TEST(cuda_split_heads) {
    Cuda dev(0, TEST_WORKSPACE);  // one engine for all: its RoPE table has to follow D and T
    for (NsaShape s :
         with_parts({cuda_shape(2, 33, 2, 3, 16, 8, 4, 16, 3, 9), cuda_shape(1, 70, 1, 1, 64, 8, 4, 16, 3, 9),
                     cuda_shape(1, 513, 1, 2, 2, 8, 4, 16, 3, 9), cuda_shape(1, 5, 2, 4, 32, 8, 4, 16, 3, 9),
                     cuda_shape(1, 7, 3, 5, 6, 8, 4, 16, 3, 9), cuda_shape(2, 5, 1, 3, 58, 8, 4, 16, 3, 9)}))
        for (bool full : {false, true}) {
            s.full = full;
            check_cuda_split_heads(dev, s);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression. oracle::compress with the roundings of what this engine stores on the way: the hidden values, the
// activated ones, dout rotated back, and the gradient of the hidden values.

struct HostPhi {
    HostArray fc1, bias, fc2;
    HostPhi(Random& random, const NsaShape& s)
        : fc1(random_reals(random, size_t(s.F) * s.l * s.D, 0.3)),
          bias(random_reals(random, size_t(s.F))),
          fc2(random_reals(random, size_t(s.D) * s.F)) {}
};

inline void check_cuda_compress(Cuda& dev, const NsaShape& s, bool rotated) {
    using N = CudaNumber;
    const CudaShapeReport report(s);
    Random random(80);
    const int NC = oracle::blocks(s.T, s), begin = oracle::blocks(s.first, s),
              end = oracle::blocks(s.first + s.queries, s), D = s.D, F = s.F, width = s.l * D;
    const size_t groups = size_t(s.B) * s.G;
    const HostArray k = random_reals(random, groups * s.T * D);
    const HostPhi phi(random, s);
    auto rows_of = [&](const HostArray& whole, int columns) {  // the blocks of this call
        HostArray rows;
        for (size_t bg = 0; bg < groups; bg++)
            for (size_t i = (bg * NC + begin) * columns; i < (bg * NC + end) * columns; i++) rows.push_back(whole[i]);
        return rows;
    };
    const auto outputs = in_every_order([&] {
        DeviceReal in(dev, k), fc1(dev, phi.fc1), bias(dev, phi.bias), fc2(dev, phi.fc2), out(dev, groups * NC * D),
            hidden(dev, groups * NC * F);
        dev.compress_forward(out, hidden, in, {fc1, bias, fc2}, rotated, s);
        const long left = long(groups) * (NC - (end - begin));
        CHECK_EQUAL(out.unwritten(left * D), left * D);
        CHECK_EQUAL(hidden.unwritten(left * F), left * F);
        return std::vector<HostArray>{rows_of(out.host(), D), rows_of(hidden.host(), F)};
    });
    CudaNumbers expected, expected_hidden;
    for (size_t bg = 0; bg < groups; bg++)
        for (int block = begin; block < end; block++) {
            const float* X = &k[(bg * s.T + size_t(block) * s.d) * D];
            CudaNumbers active, row;
            for (int f = 0; f < F; f++) {
                CudaSum sum;
                for (int i = 0; i < width; i++) sum.add(N(phi.fc1[size_t(f) * width + i]) * N(X[i]));
                sum.add(N(phi.bias[size_t(f)]));
                expected_hidden.push_back(stored(N(sum)));
                active.push_back(stored(oracle::silu(expected_hidden.back())));
                // |silu'| <= 1.0999 amplifies; Number takes x and sigmoid(x) as independent, which covers it
                active.back().error += expected_hidden.back().error * 0.1;
            }
            for (int x = 0; x < D; x++) {
                CudaSum mean, sum;
                for (int token = 0; token < s.l; token++) mean.add(N(X[token * D + x]));
                sum.add(N(mean) / N(s.l));
                for (int f = 0; f < F; f++) sum.add(N(phi.fc2[size_t(x) * F + f]) * active[size_t(f)]);
                row.push_back(sum);
            }
            if (rotated) row = oracle::rope(row.data(), block * s.d, D, +1);
            for (const N& x : row) expected.push_back(stored(x));
        }
    CHECK_ARRAY(outputs[0], expected, int(groups), end - begin, D);
    CHECK_ARRAY(outputs[1], expected_hidden, int(groups), end - begin, F);
    if (s.queries != s.T) return;

    const HostArray dout = random_reals(random, groups * NC * D), hidden = random_reals(random, groups * NC * F);
    const HostArray dfc1 = random_floats(random, phi.fc1.size()), dbias = random_floats(random, phi.bias.size()),
                    dfc2 = random_floats(random, phi.fc2.size());
    const auto gradients = in_every_order([&] {
        DeviceReal in(dev, k), fc1(dev, phi.fc1), bias(dev, phi.bias), fc2(dev, phi.fc2), d(dev, dout), h(dev, hidden),
            dk(dev, k.size());
        DeviceFloat d1(dev, dfc1), db(dev, dbias), d2(dev, dfc2);
        dev.compress_backward(dk, {d1, db, d2}, d, h, in, {fc1, bias, fc2}, rotated, s);
        CHECK_EQUAL(dk.unwritten(), 0L);
        return std::vector<HostArray>{dk.host(), d1.host(), db.host(), d2.host()};
    });
    std::vector<CudaSum> sum_dk(k.size()), sum_d1(dfc1.size()), sum_db(dbias.size()), sum_d2(dfc2.size());
    for (size_t i = 0; i < dfc1.size(); i++) sum_d1[i].add(N(dfc1[i]));
    for (size_t i = 0; i < dbias.size(); i++) sum_db[i].add(N(dbias[i]));
    for (size_t i = 0; i < dfc2.size(); i++) sum_d2[i].add(N(dfc2[i]));
    for (size_t bg = 0; bg < groups; bg++)
        for (int block = 0; block < NC; block++) {
            const size_t at = (bg * s.T + size_t(block) * s.d) * D;
            CudaNumbers o = oracle::numbers(&dout[(bg * NC + block) * D], size_t(D));
            if (rotated) o = stored(oracle::rope(o.data(), block * s.d, D, -1));
            for (int token = 0; token < s.l; token++)
                for (int x = 0; x < D; x++) sum_dk[at + size_t(token) * D + x].add(o[size_t(x)] / N(s.l));
            for (int f = 0; f < F; f++) {
                const N h(hidden[(bg * NC + block) * F + f]), active = stored(oracle::silu(h));
                CudaSum dactive;
                for (int x = 0; x < D; x++) {
                    sum_d2[size_t(x) * F + f].add(o[size_t(x)] * active);
                    dactive.add(o[size_t(x)] * N(phi.fc2[size_t(x) * F + f]));
                }
                const N dh = stored(N(dactive) * oracle::silu_slope(h));
                sum_db[size_t(f)].add(dh);
                for (int i = 0; i < width; i++)
                    sum_d1[size_t(f) * width + i].add(dh * N(k[at + i])),
                        sum_dk[at + i].add(dh * N(phi.fc1[size_t(f) * width + i]));
            }
        }
    CHECK_ARRAY(gradients[0], stored(oracle::numbers(sum_dk)), int(groups), s.T, D);
    CHECK_ARRAY(gradients[1], oracle::numbers(sum_d1), F, s.l, D);
    CHECK_ARRAY(gradients[2], oracle::numbers(sum_db));
    CHECK_ARRAY(gradients[3], oracle::numbers(sum_d2), D, F);
}
TEST(cuda_compress) {
    Cuda dev(0, TEST_WORKSPACE);
    for (NsaShape s :
         with_parts({cuda_shape(2, 33, 2, 1, 8, 8, 4, 16, 3, 9), cuda_shape(1, 31, 1, 1, 8, 32, 16, 64, 3, 9),
                     cuda_shape(2, 32, 1, 1, 16, 32, 16, 64, 3, 9), cuda_shape(1, 70, 2, 1, 16, 16, 4, 16, 3, 9),
                     cuda_shape(1, 9, 1, 1, 8, 1, 1, 4, 3, 9), cuda_shape(1, 41, 1, 1, 8, 12, 4, 16, 3, 9),
                     cuda_shape(2, 50, 1, 1, 8, 4, 4, 16, 3, 9)}))
        for (bool rotated : {false, true}) check_cuda_compress(dev, s, rotated);
    NsaShape wide = cuda_shape(1, 100, 1, 1, 64, 32, 16, 64, 16, 512);  // the preset's l, d, D
    wide.F = 24;
    check_cuda_compress(dev, wide, true);
}
