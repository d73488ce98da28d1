// op_tests.h: visible keys, shapes, and the exponential and GEMM of struct Cpu, in fp32 and fp64. No limit is written
// by hand here unless its derivation stands beside it: they come with the oracles' Numbers.
#pragma once
#include "attention_tests.h"
#include "row_tests.h"

TEST(op_visible_keys_by_hand) {
    NsaShape s;
    s.T = s.queries = 12, s.l = 4, s.d = 2, s.slc_block = 4, s.window = 3;
    const uint32_t second = 0b010, both = 0b011, third = 0b100;
    using Keys = std::vector<int>;
    CHECK(Cpu<double>::visible_keys(CMP, 2, nullptr, s) == Keys{});
    CHECK(Cpu<double>::visible_keys(CMP, 6, nullptr, s) == (Keys{0, 1}));  // which end at tokens 3 and 5
    CHECK(Cpu<double>::visible_keys(CMP, 7, nullptr, s) == (Keys{0, 1, 2}));
    CHECK(Cpu<double>::visible_keys(SLC, 6, &second, s) == (Keys{4, 5, 6}));
    CHECK(Cpu<double>::visible_keys(SLC, 4, &both, s) == (Keys{0, 1, 2, 3, 4}));
    CHECK(Cpu<double>::visible_keys(SLC, 7, &third, s) == Keys{});
    CHECK(Cpu<double>::visible_keys(WIN, 1, nullptr, s) == (Keys{0, 1}));
    CHECK(Cpu<double>::visible_keys(WIN, 7, nullptr, s) == (Keys{5, 6, 7}));
    s.window_only = s.sees_all = true;
    CHECK(Cpu<double>::visible_keys(WIN, 4, nullptr, s) == (Keys{0, 1, 2, 3, 4}));
}

TEST(op_shapes) {
    for (const NsaShape& base : {NsaShape{1, 0, 0, 0, 12, 2, 64, 32, 16, 64}, NsaShape{1, 0, 0, 0, 3, 1, 2, 1, 1, 1},
                                 NsaShape{2, 0, 0, 0, 6, 3, 16, 8, 4, 48}})
        for (int T : {1, 7, 8, 31, 32, 33, 47, 48, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049}) {
            NsaShape s = base;
            s.T = T;
            CHECK_EQUAL(s.cmp_blocks(T), oracle::blocks(T, s));
            CHECK_EQUAL(s.selection_words(), oracle::selection_words(s));
            // gate logits 3*head + branch, in rows of whole 8
            CHECK(s.gate_columns() % 8 == 0 && s.gate_columns() >= 3 * s.H && s.gate_columns() < 3 * s.H + 8);
            CHECK_EQUAL(s.projected(), (s.H + 6 * s.G) * s.D + s.gate_columns());
            s.window_only = true;
            CHECK_EQUAL(s.projected(), (s.H + 2 * s.G) * s.D);
            CHECK_EQUAL(s.cmp_capacity(), 0);
            CHECK_EQUAL(s.head_units(), s.H + 2 * s.G);
            s.window_only = false;
            CHECK_EQUAL(s.head_units(), s.H + 6 * s.G);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The exponential.

TEST(op_exponential) {
    // Every 1000th float of [-87, 88], with both ends: relative error in ulps of the result against libm in fp64.
    // nsa_cpu.h claims 2.
    double worst = 0;
    float worst_at = 0;
    auto measure = [&](float x) {
        const double expected = std::exp(double(x));
        const float rounded = float(expected);
        const double ulp = std::ldexp(1.0, std::ilogb(rounded) - 23),
                     error = std::fabs(exponential(x) - expected) / ulp;
        if (!(error <= worst)) worst = error, worst_at = x;
    };
    for (float bound : {-87.0f, 88.0f}) {
        uint32_t last;
        std::memcpy(&last, &bound, 4);
        for (uint32_t bits = last & 0x80000000u; bits <= last; bits += 1000) {
            float x;
            std::memcpy(&x, &bits, 4);
            measure(x);
        }
        measure(bound);
    }
    std::printf("    exponential: worst error %.3f ulp at %.9g\n", worst, worst_at);
    CHECK(worst < 2);
    CHECK_EQUAL(exponential(0.0f), 1.0f);
    CHECK_EQUAL(exponential(-0.0f), 1.0f);
    for (float x : {std::nextafter(-87.0f, -100.0f), -87.5f, -88.0f, -104.0f, -1e4f, -3e38f,
                    -std::numeric_limits<float>::infinity()})
        CHECK_EQUAL(exponential(x), 0.0f);
    for (float x : {88.5f, 1e4f, 3e38f, std::numeric_limits<float>::infinity()})
        CHECK_EQUAL(exponential(x), exponential(88.0f));
    CHECK(std::isnan(exponential(std::numeric_limits<float>::quiet_NaN())));
    CHECK_EQUAL(sigmoid(0.0f), 0.5f);
    CHECK_EQUAL(sigmoid(100.0f), 1.0f);
    CHECK(sigmoid(-1e4f) >= 0 && sigmoid(-1e4f) < 1e-38f);
}

// ---------------------------------------------------------------------------------------------------------------------
// GEMM.

// One product, in all transpositions, with and without accumulation. Leading dimensions exceed the widths;
// what lies between the rows is NaN in A and B, so that reading it shows, and must keep its bits in C.
// bf16: the function rounds its inputs. The expected sum is that of the rounded ones; their
// products are exact in fp32 (8 bits times 8 bits), so the same limit holds for the sum.
template <class real, class GemmFunction>
void check_gemm(GemmFunction gemm_function, int M, int N, int K, bool bf16 = false) {
    using Num = oracle::Number<real>;
    const auto inputs = [bf16](const Buffer<real>& x) {
        std::vector<double> values(x.data(), x.data() + x.size());
        if (bf16)
            for (double& value : values) value = oracle::rounded_to_bf16(value);
        return values;
    };
    static const std::vector<double> pool = [] {  // random numbers cost more than the products
        std::vector<double> pool(65521);
        Random random(5);
        fill_normal(pool.data(), pool.size(), random);
        return pool;
    }();
    size_t next = 0;
    auto fill = [&](real* row, int count) {
        for (int i = 0; i < count; i++) row[i] = real(pool[next++ % pool.size()]);
    };
    for (int mode = 0; mode < 8; mode++) {
        const bool ta = mode & 1, tb = mode & 2, accumulate = mode & 4;
        const int a_rows = ta ? K : M, a_width = ta ? M : K, b_rows = tb ? N : K, b_width = tb ? K : N;
        const int lda = a_width + 3, ldb = b_width + 5, ldc = N + 7;
        Buffer<real> A(size_t(a_rows) * lda, "A"), B(size_t(b_rows) * ldb, "B"), C(size_t(M) * ldc, "C"),
            before(C.size());
        for (int i = 0; i < a_rows; i++) fill(A + size_t(i) * lda, a_width);
        for (int i = 0; i < b_rows; i++) fill(B + size_t(i) * ldb, b_width);
        if (accumulate)
            for (int i = 0; i < M; i++) fill(C + size_t(i) * ldc, N);
        std::memcpy(before.data(), C.data(), C.size() * sizeof(real));
        gemm_function(ta, tb, M, N, K, A.data(), size_t(lda), B.data(), size_t(ldb), accumulate, C.data(), size_t(ldc));
        const std::vector<double> a = inputs(A), b = inputs(B);
        oracle::Numbers<real> expected;
        Buffer<real> found(size_t(M) * N, "product");
        for (int m = 0; m < M; m++) {
            for (int n = 0; n < N; n++) {
                double value = 0,
                       magnitude =
                           0;  // Sum's rule written out: K products and one addition, gamma(K + 1) * sum of |terms|
                for (int k = 0; k < K; k++) {
                    const double term = a[ta ? size_t(k) * lda + m : size_t(m) * lda + k] *
                                        b[tb ? size_t(n) * ldb + k : size_t(k) * ldb + n];
                    value += term, magnitude += std::fabs(term);
                }
                if (accumulate)
                    value += double(before[size_t(m) * ldc + n]),
                        magnitude += std::fabs(double(before[size_t(m) * ldc + n]));
                expected.push_back(Num(value, oracle::gamma<real>(K + 1) * magnitude));
                found[size_t(m) * N + n] = C[size_t(m) * ldc + n];
            }
            CHECK_SAME_BITS(C + size_t(m) * ldc + N, before + size_t(m) * ldc + N, 7);
        }
        const int failed = tests().failed_checks;
        CHECK_ARRAY(found, expected, M, N);
        if (tests().failed_checks > failed)
            std::printf("    in the product M %d N %d K %d, transposed A %d B %d, accumulate %d\n", M, N, K, ta, tb,
                        accumulate);
    }
}
template <class real, class GemmFunction>
void check_gemm_shapes(GemmFunction gemm_function, bool bf16 = false) {
    // Every boundary of the blocking in each dimension: register blocks (6 rows, vectors of columns; AMX's tiles of 16
    // rows and columns, 32 deep, and two of them), panels, MC 96 and 256, KC 256 (512 in pairs of bf16, 256 with AMX),
    // 1024 and 2048 columns.
    const auto check = [&](int M, int N, int K) { check_gemm<real>(gemm_function, M, N, K, bf16); };
    const std::vector<int> all = {1,  2,  5,  6,  7,  15,  16,  17,  31,  32,  33, 63,
                                  64, 65, 95, 96, 97, 255, 256, 257, 511, 512, 513};
    const std::vector<int> some = {1, 2, 6, 15, 16, 17, 31, 32, 33, 48, 65, 97, 255, 256, 257, 512, 513};
    for (int x : bf16 ? some : all) check(x, 7, 9), check(7, x, 9), check(7, 9, x);
    for (int x : {1023, 1024, 1025}) check(x, 5, 3), check(5, x, 3), check(5, 3, x), check(7, x, 257);
    for (int K : {0, 1, 257}) check(13, 67, K);
    check(97, 129, 65);
    check(200, 65, 300);
    if (bf16) check(300, 49, 70), check(33, 2100, 40);
    check(13, 1000, bf16 ? 2100 : 1100);                          // deeper than what is packed of B at a time
    for (int M : {1, 2, 3, 4}) check(M, 131, bf16 ? 1101 : 601);  // few rows: several panels, several pieces of KC
    check(1, 1, 1);
}
TEST(op_gemm) {
    Gemm<float> gemm;
    Gemm<double> gemm_fp64;
    check_gemm_shapes<float>([&](auto... x) { gemm(x...); }),
        check_gemm_shapes<double>([&](auto... x) { gemm_fp64(x...); });
}
TEST(op_gemm_bf16) {
    if (!HAVE_BF16) return skip("op_gemm_bf16: this build's processor has no AVX512_BF16");
    Gemm<float> gemm;
    gemm.bf16 = true;
    check_gemm_shapes<float>([&](auto... x) { gemm(x...); }, true);
    if (!amx_granted()) return skip("op_gemm_bf16 in AMX's tiles: this build, processor or system has none");
    check_gemm_shapes<float>([&](auto... x) { gemm.blocked<Bf16Pair>(x...); }, true);  // in vectors
}
TEST(op_gemm_of_few_rows_has_the_bits_of_many) {
    const int N = 131, K = 1101, many = 40;
    Random random(8);
    Buffer<float> A(size_t(many) * K, "A"), B(size_t(N) * K, "B"), all(size_t(many) * N, "C");
    A.fill(random), B.fill(random);
    Gemm<float> gemm;
    for (const bool bf16 : {false, true}) {
        gemm.bf16 = bf16 && HAVE_BF16;
        gemm.nt({many, N, K}, A, K, B, K, false, all, N);
        for (int few : {1, 2, 3, 4}) {
            Buffer<float> C(size_t(few) * N, "few rows of C");
            gemm.nt({few, N, K}, A, K, B, K, false, C, N);
            CHECK_SAME_BITS(C.data(), all.data(), C.size());
        }
    }
}
// tile_matmul of pairs, in vectors or in AMX's tiles, with every kind of edge. What it must not read is NaN.
template <class Element>
void check_products_of_pairs(int rows, int width, int depth, bool transposed, bool accumulate) {
    using Num = oracle::Number<float>;
    const int lda = transposed ? (rows + TILE - 1) / TILE * TILE : depth + 2, ldb = width + 4, ldc = width + 3;
    Random random(9);
    Buffer<float> a(size_t(2) * rows * depth, "A"), b(size_t(2) * depth * width, "B"), C(size_t(rows) * ldc, "C");
    a.fill(random), b.fill(random), C.fill(random);
    for (Buffer<float>* x : {&a, &b})
        for (size_t i = 0; i < x->size(); i++) (*x)[i] = float(oracle::rounded_to_bf16(double((*x)[i])));
    const std::vector<float> before(C.data(), C.data() + C.size());
    const Element nan = {0x7FC0, 0x7FC0};
    std::vector<Element> A(size_t(transposed ? depth : rows) * lda, nan), B(size_t(depth) * ldb, nan);
    for (int k = 0; k < depth; k++) {
        for (int m = 0; m < rows; m++)
            round_row(&A[transposed ? size_t(k) * lda + m : size_t(m) * lda + k], &a[size_t(2) * (m * depth + k)], 1);
        for (int n = 0; n < width; n++) round_row(&B[size_t(k) * ldb + n], &b[size_t(2) * (k * width + n)], 1);
    }
    if constexpr (HAVE_BF16 && PER<Element> == 2)
        tile_matmul(rows, width, depth,
                    LeftFactor<Element>{A.data(), size_t(transposed ? 1 : lda), size_t(transposed ? lda : 1)}, B.data(),
                    size_t(ldb), C.data(), size_t(ldc), accumulate);
    oracle::Numbers<float> expected;
    Buffer<float> found(size_t(rows) * width, "product");
    for (int m = 0; m < rows; m++) {
        for (int n = 0; n < width; n++) {
            double value = accumulate ? double(before[size_t(m) * ldc + n]) : 0, magnitude = std::fabs(value);
            for (int i = 0; i < 2 * depth; i++) {
                const double x = a[size_t(2) * m * depth + i], y = b[size_t(2) * (i / 2 * width + n) + i % 2];
                value += x * y, magnitude += std::fabs(x * y);
            }
            expected.push_back(Num(value, oracle::gamma<float>(2 * depth + 1) * magnitude));
            found[size_t(m) * width + n] = C[size_t(m) * ldc + n];
        }
        CHECK_SAME_BITS(C + size_t(m) * ldc + width, before.data() + size_t(m) * ldc + width, 3);
    }
    CHECK_ARRAY(found, expected, rows, width);
}
TEST(op_products_of_pairs_in_the_cache) {
    if (!HAVE_BF16) return skip("op_products_of_pairs_in_the_cache: this build's processor has no AVX512_BF16");
    for (const bool tiles : {false, true}) {
        const AmxTiles registers(tiles);
        CHECK_EQUAL(AmxTiles::here(), tiles && amx_granted());
        for (const int mode : {0, 1, 2, 3}) {
            const auto check = [&](int rows, int width, int depth) {
                check_products_of_pairs<Bf16Pair>(rows, width, depth, mode & 1, mode & 2);
            };
            for (int x : {1, 6, 15, 16, 17, 31, 32, 33, 64, 96, 97})
                check(x, 48, 20), check(33, 32, x), check(17, x, 32);
            check(100, 64, 70), check(6, 128, 150);
        }
    }
    CHECK(!AmxTiles::here());
}
TEST(op_to_bf16) {  // round to nearest, ties to even, over every float of a few binades, and the special ones
    for (uint32_t high : {0x0000u, 0x0001u, 0x3F80u, 0x3F81u, 0x7F7Fu, 0x8000u, 0xBF80u, 0xBFFFu})
        for (uint32_t low = 0; low <= 0xFFFF; low += high == 0x3F81 ? 1 : 257) {
            const uint32_t bits = high << 16 | low;
            float x;
            std::memcpy(&x, &bits, 4);
            const uint32_t expected = high + (low > 0x8000 || (low == 0x8000 && (high & 1)));
            CHECK_EQUAL(uint32_t(to_bf16(x)), expected);
            const uint32_t widened = expected << 16;
            float rounded;
            std::memcpy(&rounded, &widened, 4);
            if (expected != 0x7F80)
                CHECK_EQUAL(oracle::rounded_to_bf16(double(x)), double(rounded));  // 0x7F80: it has become infinite
        }
    CHECK_EQUAL(uint32_t(to_bf16(std::numeric_limits<float>::infinity())), 0x7F80u);
    CHECK_EQUAL(uint32_t(to_bf16(-std::numeric_limits<float>::infinity())), 0xFF80u);
    for (uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7FC00000u}) {
        float nan;
        std::memcpy(&nan, &bits, 4);
        CHECK((to_bf16(nan) & 0x7F80) == 0x7F80 && (to_bf16(nan) & 0x7F) != 0);
    }
}
