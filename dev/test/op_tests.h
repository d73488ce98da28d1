// op_tests.h: every operation of struct Cpu, in fp32 and fp64, against the oracles of oracle.h, by finite differences,
// and for the properties that the specification promises: causality, ties, forced blocks, decoding, independence of the
// number of threads.
//
// Error limits come with the oracles' Numbers, which derive them from the number format and the lengths of the sums;
// finite differences state theirs in check_gradient. No limit is written by hand here unless its derivation stands
// beside it.
#pragma once
#include <string>
#include <vector>

#include "../../nsa_cpu.h"
#include "harness.h"
#include "oracle.h"

// ---------------------------------------------------------------------------------------------------------------------
// The tools themselves.

TEST(op_guard_zones_see_a_write) {
    for (size_t count : {size_t(0), size_t(1), size_t(37)}) {
        Buffer<float> x(count, "x");
        CHECK(x.intact());
        for (ptrdiff_t at : {ptrdiff_t(-1), ptrdiff_t(-64), ptrdiff_t(count), ptrdiff_t(count + 63)}) {
            const float before = x.data()[at];
            CHECK(std::isnan(before));
            x.data()[at] = 0;
            CHECK(!x.intact());
            std::memcpy(x.data() + at, &before, sizeof before);
            CHECK(x.intact());
        }
        for (size_t i = 0; i < count; i++) CHECK(std::isnan(x[i]));
    }
    CHECK(std::isnan(Buffer<double>(1).data()[0]) && std::isnan(Buffer<double>(1).data()[1]));
}

TEST(op_oracle_knows_closed_forms) {  // the oracles themselves, where the answer is known without them
    // One query, two keys, D = 2: scores 0 and ln 3 give the weights 1/4 and 3/4, lse = ln 4.
    const double log3 = std::log(3.0) * std::sqrt(2.0);
    const oracle::Numbers<double> q{1.0, 0.0}, k{0.0, 5.0, log3, -7.0}, v{4.0, 8.0, 0.0, 4.0};
    NsaShape s;
    s.T = 2, s.first = 1, s.queries = 1, s.H = s.G = 1, s.D = 2, s.full = true;
    const oracle::Attended<double> row = oracle::attention(WIN, q, k, v, nullptr, s);
    CHECK_NEAR(row.out[0].value, 1, 1e-14);  // a dozen roundings of 1e-16
    CHECK_NEAR(row.out[1].value, 5, 1e-14);
    CHECK_NEAR(row.lse[0].value, std::log(4.0), 1e-14);
    // RoPE turns a quarter at position pi/2 only; at position 1, element 0 of D = 2 by one radian.
    const double x[] = {1, 0};
    CHECK_NEAR(oracle::rope(x, 1, 2, +1)[0].value, 0.54030230586813972, 1e-15);
    CHECK_NEAR(oracle::rope(x, 1, 2, +1)[1].value, 0.84147098480789651, 1e-15);
    // The rule of selection, by hand: 7 candidates, 5 may be taken, 0, 5 and 6 are forced; 2 and 4 tie below 3, the
    // lower one wins.
    CHECK(oracle::select({9, 1, 2, 3, 2, 0, 0}, 5) == (std::vector<int>{0, 2, 3, 5, 6}));
    CHECK(oracle::select({9, 1, 2}, 5) == (std::vector<int>{0, 1, 2}));
}

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
    s.full = true;
    CHECK(Cpu<double>::visible_keys(WIN, 4, nullptr, s) == (Keys{0, 1, 2, 3, 4}));
}

TEST(op_shapes) {
    for (const NsaShape base : {NsaShape{1, 0, 0, 0, 12, 2, 64, 32, 16, 64}, NsaShape{1, 0, 0, 0, 3, 1, 2, 1, 1, 1},
                                NsaShape{2, 0, 0, 0, 6, 3, 16, 8, 4, 48}})
        for (int T : {1, 7, 8, 31, 32, 33, 47, 48, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049}) {
            NsaShape s = base;
            s.T = T;
            CHECK_EQUAL(s.cmp_blocks(T), oracle::blocks(T, s));
            CHECK_EQUAL(s.selection_words(), oracle::selection_words(s));
            // gate logits 3*head + branch, in rows of whole 8
            CHECK(s.gate_columns() % 8 == 0 && s.gate_columns() >= 3 * s.H && s.gate_columns() < 3 * s.H + 8);
            CHECK_EQUAL(s.projected(), (s.H + 6 * s.G) * s.D + s.gate_columns());
            s.full = true;
            CHECK_EQUAL(s.projected(), (s.H + 2 * s.G) * s.D);
            CHECK_EQUAL(s.cmp_capacity(), 0);
        }
}

template <class real>
void check_memory() {
    Cpu<real> cpu;
    cpu.poison = true;
    real* x = cpu.template allocate<real>(1001);
    CHECK(size_t(x) % 64 == 0);
    for (int i = 0; i < 1001; i++) CHECK(std::isnan(x[i]));
    cpu.zero(x, size_t(1000));
    for (int i = 0; i < 1000; i++) CHECK_EQUAL(x[i], real(0));
    CHECK(std::isnan(x[1000]));
    Random random(1);
    Buffer<float> host(1001), back(1001);
    Buffer<real> other(1001);
    host.fill(random);
    cpu.from_host(x, host, 1001);
    cpu.copy(other.data(), (const real*)x, 1001);
    cpu.to_host(back, other, 1001);
    CHECK_SAME_BITS(back.data(), host.data(), 1001);
    cpu.release(x);
}
TEST(op_memory) { check_memory<float>(), check_memory<double>(); }

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
    // Every boundary of the blocking in each dimension: register blocks (6 rows, or 32 with AMX; vectors
    // of columns), panels, MC 96, KC 256 (512 in pairs of bf16), NC 1024, oneDNN's blocks of 64 to 512.
    const auto check = [&](int M, int N, int K) { check_gemm<real>(gemm_function, M, N, K, bf16); };
    const std::vector<int> all = {1,  2,  5,  6,  7,  15,  16,  17,  31,  32,  33, 63,
                                  64, 65, 95, 96, 97, 255, 256, 257, 511, 512, 513};
    const std::vector<int> some = {1,  2,  6,  16,  17,
                                   32, 33, 97, 512, 513};  // the blocking is the same; what differs are pairs and tiles
    for (int x : bf16 ? some : all) check(x, 7, 9), check(7, x, 9), check(7, 9, x);
    for (int x : {1023, 1024, 1025}) check(x, 5, 3), check(5, x, 3), check(5, 3, x), check(7, x, 257);
    for (int K : {0, 1, 257}) check(13, 67, K);
    check(97, 129, 65);
    check(200, 65, 300);
    check(1, 1, 1);
}
TEST(op_gemm_blocked) {
    Gemm<float> gemm;
    Gemm<double> gemm_fp64;
    check_gemm_shapes<float>([&](auto... x) { gemm.blocked<float>(x...); }),
        check_gemm_shapes<double>([&](auto... x) { gemm_fp64.blocked<double>(x...); });
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
    check_gemm_shapes<float>([&](auto... x) { gemm(x...); }, true);  // oneDNN, where the build has it
    check_gemm_shapes<float>([&](auto... x) { gemm.blocked<Bf16Pair>(x...); }, true);
    if (!amx_granted()) skip("op_gemm_bf16 with AMX: not in this build or not granted");
    gemm.allow_tiles = false;
    check_gemm_shapes<float>([&](auto... x) { gemm.blocked<Bf16Pair>(x...); }, true);
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
TEST(op_operands_in_pairs) {  // of a product that sums over the columns of a matrix, or over its rows
    Random random(6);
    for (int rows : {1, 2, 5, 6})
        for (int columns : {2, 14, 16, 32, 34, 64, 66, 130})
            for (int gap : {0, 6}) {
                const size_t ld = size_t(columns + gap);
                Buffer<float> x(rows * ld, "matrix");
                for (int r = 0; r < rows; r++) fill_normal(x + r * ld, size_t(columns), random);
                CHECK(sum_over_columns<float>(nullptr, x.data(), ld, rows, columns) == x.data());
                CHECK(sum_over_rows<float>(nullptr, x.data(), ld, rows, columns) == x.data());
                Buffer<Bf16Pair> by_columns(size_t(rows) * ld / 2, "pairs of columns"),
                    by_rows(size_t(rows + 1) / 2 * ld, "pairs of rows");
                CHECK(sum_over_columns(by_columns.data(), x.data(), ld, rows, columns) == by_columns.data());
                CHECK(sum_over_rows(by_rows.data(), x.data(), ld, rows, columns) == by_rows.data());
                for (int r = 0; r < rows + rows % 2; r++)
                    for (int c = 0; c < columns; c++) {
                        const double expected = r < rows ? oracle::rounded_to_bf16(double(x[r * ld + c])) : 0;
                        const Bf16Pair in_rows = by_rows[r / 2 * ld + c];
                        CHECK_EQUAL(double(from_bf16(r % 2 ? in_rows.second : in_rows.first)), expected);
                        if (r == rows) continue;
                        const Bf16Pair in_columns = by_columns[r * (ld / 2) + c / 2];
                        CHECK_EQUAL(double(from_bf16(c % 2 ? in_columns.second : in_columns.first)), expected);
                    }
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// Row operations against their oracles.

template <class real>
void check_embedding(int N, int C, int V) {
    Random random(10);
    Cpu<real> cpu;
    Buffer<int32_t> tokens(size_t(N), "tokens");
    for (int n = 0; n < N; n++) tokens[n] = n == 0 ? V - 1 : random.below(V);  // N > V: tokens repeat
    Buffer<real> embed(size_t(V) * C, "embed"), x(size_t(N) * C, "x"), dx(size_t(N) * C, "dx"),
        dembed(size_t(V) * C, "dembed");
    embed.fill(random), dx.fill(random), dembed.fill(random);
    cpu.embedding_forward(x, tokens, embed, N, C);
    std::vector<oracle::Sum<real>> sums(dembed.size());
    for (size_t i = 0; i < sums.size(); i++) sums[i].add(oracle::Number<real>(dembed[i]));
    for (int n = 0; n < N; n++) {
        CHECK_SAME_BITS(x + size_t(n) * C, embed + size_t(tokens[n]) * C, size_t(C));
        for (int c = 0; c < C; c++) sums[size_t(tokens[n]) * C + c].add(oracle::Number<real>(dx[size_t(n) * C + c]));
    }
    cpu.embedding_backward(dembed, dx, tokens, N, C);
    CHECK_ARRAY(dembed, oracle::numbers(sums), V, C);
}
TEST(op_embedding) {
    for (int C : {1, 63, 64, 65, 130}) check_embedding<float>(200, C, 30), check_embedding<double>(200, C, 30);
}

template <class real>
void check_rmsnorm(int N, int C) {
    using Num = oracle::Number<real>;
    Random random(20);
    Cpu<real> cpu;
    Buffer<real> x(size_t(N) * C, "x"), weight(size_t(C), "weight"), out(x.size(), "out"), rstd(size_t(N), "rstd");
    Buffer<real> dx(x.size(), "dx"), dweight(weight.size(), "dweight"), dout(x.size(), "dout");
    x.fill(random), weight.fill(random), dout.fill(random), dx.fill(random), dweight.fill(random);
    // Rows of every scale around sqrt(epsilon) = 1e-3, and a row of zeros: there epsilon decides.
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++)
            x[size_t(n) * C + c] *= real(n % 4 == 0 ? 1 : n % 4 == 1 ? 1e-3 : n % 4 == 2 ? 1e3 : 0);
    cpu.rmsnorm_forward(out, rstd, x, weight, N, C);
    oracle::Numbers<real> expected, expected_rstd, expected_dx;
    std::vector<oracle::Sum<real>> sums(static_cast<size_t>(C));
    for (int c = 0; c < C; c++) sums[size_t(c)].add(Num(dweight[c]));
    for (int n = 0; n < N; n++) {
        const real *row = x + size_t(n) * C, *drow = dout + size_t(n) * C;
        const oracle::Normed<real> normed = oracle::rmsnorm<real>(row, weight, C);
        expected.insert(expected.end(), normed.out.begin(), normed.out.end());
        expected_rstd.push_back(normed.rstd);
        const oracle::Numbers<real> gradient = oracle::rmsnorm_dx<real>(drow, row, normed.rstd, weight, C);
        for (int c = 0; c < C; c++) expected_dx.push_back(Num(dx[size_t(n) * C + c]) + gradient[size_t(c)]);
        for (int c = 0; c < C; c++) sums[size_t(c)].add(Num(drow[c]) * Num(row[c]) * normed.rstd);
    }
    CHECK_ARRAY(out, expected, N, C);
    CHECK_ARRAY(rstd, expected_rstd);
    cpu.rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C);
    CHECK_ARRAY(dx, expected_dx, N, C);
    CHECK_ARRAY(dweight, oracle::numbers(sums));
}
TEST(op_rmsnorm) {
    for (int C : {1, 2, 63, 64, 65, 768}) check_rmsnorm<float>(18, C), check_rmsnorm<double>(18, C);
    check_rmsnorm<float>(64, 33), check_rmsnorm<float>(200, 33),
        check_rmsnorm<double>(129, 20);  // dweight is summed in parts of 64 rows
}

template <class real>
void check_matmul(int N, int C, int OC) {
    using Num = oracle::Number<real>;
    Random random(30);
    Cpu<real> cpu;
    Buffer<real> inp(size_t(N) * C, "inp"), weight(size_t(OC) * C, "weight"), residual(size_t(N) * OC, "residual"),
        out(residual.size(), "out");
    Buffer<real> dinp(inp.size(), "dinp"), dweight(weight.size(), "dweight"), dout(out.size(), "dout");
    inp.fill(random), weight.fill(random), residual.fill(random), dout.fill(random), dweight.fill(random);
    for (bool with_residual : {false, true}) {
        std::vector<oracle::Sum<real>> sums(out.size());
        for (int n = 0; n < N; n++)
            for (int o = 0; o < OC; o++) {
                for (int c = 0; c < C; c++)
                    sums[size_t(n) * OC + o].add(Num(inp[size_t(n) * C + c]) * Num(weight[size_t(o) * C + c]));
                if (with_residual) sums[size_t(n) * OC + o].add(Num(residual[size_t(n) * OC + o]));
            }
        out.poison();
        cpu.matmul_forward(out, inp, weight, with_residual ? residual.data() : nullptr, N, C, OC);
        CHECK_ARRAY(out, oracle::numbers(sums), N, OC);
    }
    std::vector<oracle::Sum<real>> dinp_sums(dinp.size()), dweight_sums(dweight.size());
    for (size_t i = 0; i < dweight.size(); i++) dweight_sums[i].add(Num(dweight[i]));
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++)
            for (int c = 0; c < C; c++) {
                const Num d(dout[size_t(n) * OC + o]);
                dinp_sums[size_t(n) * C + c].add(d * Num(weight[size_t(o) * C + c]));
                dweight_sums[size_t(o) * C + c].add(d * Num(inp[size_t(n) * C + c]));
            }
    cpu.matmul_backward_input(dinp, dout, weight, N, C, OC);
    cpu.matmul_backward_weight(dweight, dout, inp, N, C, OC);
    CHECK_ARRAY(dinp, oracle::numbers(dinp_sums), N, C);
    CHECK_ARRAY(dweight, oracle::numbers(dweight_sums), OC, C);
}
TEST(op_matmul) {
    check_matmul<float>(1, 1, 1), check_matmul<float>(33, 70, 130), check_matmul<float>(130, 33, 65),
        check_matmul<float>(1, 257, 66);
    check_matmul<double>(33, 70, 130), check_matmul<double>(5, 257, 66);
}

template <class real>
void check_silu() {
    using Num = oracle::Number<real>;
    Random random(40);
    Cpu<real> cpu;
    Buffer<real> x(2051, "x"), out(x.size(), "out"), dout(x.size(), "dout"), dx(x.size(), "dx");
    x.fill(random, 3), dout.fill(random);
    for (int i = 0; i < 400; i++) x[i] = real(-100 + 0.5 * i);
    x[400] = 0, x[401] = 1000, x[402] = -1000, x[403] = real(-0.0);
    oracle::Numbers<real> expected, expected_dx;
    for (size_t i = 0; i < x.size(); i++) {
        Num silu = oracle::silu(Num(x[i])), slope = oracle::silu_slope(Num(x[i]));
        // Where e^-x leaves the format, the engine's sigmoid ends at e^-88 instead of 0 (fp32), the oracle's at 0: x
        // e^-88.
        const double end = (std::exp(-88.0) + Num::tiny) * std::fabs(double(x[i]));
        if (x[i] < -80) silu = Num(silu.value, silu.error + end), slope = Num(slope.value, slope.error + end);
        if (x[i] < -700) silu = Num(0, end), slope = Num(0, end);
        expected.push_back(silu), expected_dx.push_back(Num(dout[i]) * slope);
    }
    cpu.silu_forward(out, x, x.size());
    cpu.silu_backward(dx, dout, x, x.size());
    CHECK_ARRAY(out, expected);
    CHECK_ARRAY(dx, expected_dx);
    cpu.silu_backward(dout, dout, x, x.size());  // in place
    CHECK_SAME_BITS(dout.data(), dx.data(), dx.size());
}
TEST(op_silu) { check_silu<float>(), check_silu<double>(); }

template <class real>
void check_classifier(int N, int V, int Vp, double scale) {
    using Num = oracle::Number<real>;
    Random random(50);
    Cpu<real> cpu;
    const double dloss = 1.0 / 48;
    Buffer<real> logits(size_t(N) * Vp, "logits"), before(logits.size());
    Buffer<typename Cpu<real>::Stat> losses(size_t(N), "losses"), again(size_t(N), "losses");
    Buffer<int32_t> targets(size_t(N), "targets");
    logits.fill(random, scale);
    for (int n = 0; n < N; n++) {
        targets[n] = n == 0 ? 0 : n == 1 ? V - 1 : random.below(V);
        // Padded columns may hold anything: the largest logit of all, or NaN.
        for (int v = V; v < Vp; v++)
            logits[size_t(n) * Vp + v] = v % 2 ? real(1e30) : std::numeric_limits<real>::quiet_NaN();
    }
    std::memcpy(before.data(), logits.data(), logits.size() * sizeof(real));
    cpu.classifier(losses, logits, targets, dloss, false, N, V, Vp);
    CHECK_SAME_BITS(logits.data(), before.data(), logits.size());
    cpu.classifier(again, logits, targets, dloss, true, N, V, Vp);
    CHECK_SAME_BITS(again.data(), losses.data(), size_t(N));
    oracle::Numbers<real> expected, expected_losses;
    for (int n = 0; n < N; n++) {
        const oracle::Classified<real> row = oracle::cross_entropy<real>(before + size_t(n) * Vp, targets[n], dloss, V);
        expected_losses.push_back(row.loss);
        for (int v = 0; v < Vp; v++) expected.push_back(v < V ? row.dlogits[size_t(v)] : Num(0));
    }
    CHECK_ARRAY(losses, expected_losses);
    CHECK_ARRAY(logits, expected, N, Vp);
}
TEST(op_classifier) {
    for (double scale : {1.0, 1e3}) {  // logits of +-1e3 stay finite
        check_classifier<float>(9, 256, 256, scale), check_classifier<float>(7, 1000, 1024, scale),
            check_classifier<float>(3, 5, 128, scale);
        check_classifier<double>(9, 256, 256, scale), check_classifier<double>(7, 1000, 1024, scale);
    }
    check_classifier<float>(2, 50257, 50304, 2);
}

// The sum of squares as an update makes it: chunk by chunk, then the chunks in order.
template <class real>
double sum_of_squares(Cpu<real>& cpu, const real* x, size_t count) {
    std::vector<double> squares((count + CHUNK - 1) / CHUNK, std::numeric_limits<double>::quiet_NaN());
    const real guard = 1;
    double sum;
    cpu.chunk_squares(squares.data(), x, count, 0, squares.size() * CHUNK);
    cpu.total_squares(&sum, squares.data(), squares.size(), &guard);
    return sum;
}

template <class real>
void check_optimiser() {
    Random random(60);
    Cpu<real> cpu;
    for (size_t count : {size_t(0), size_t(1), size_t(16383), size_t(16384), size_t(16385), size_t(50001), CHUNK - 1,
                         CHUNK, CHUNK + 1}) {
        Buffer<real> x(count, "x");
        x.fill(random);
        oracle::Sum<double> sum;
        for (size_t i = 0; i < count; i++)
            sum.add(oracle::Number<double>(x[i]) * oracle::Number<double>(x[i]));  // fp64 in both engines
        CHECK_NEAR(sum_of_squares(cpu, x.data(), count), sum.value, oracle::Number<double>(sum).error);
    }
    const size_t count = 1003;
    for (int step : {1, 2, 10, 1000}) {
        const double decay = step == 2 ? 0 : 0.1, clip = step == 1 ? 1 : 0.37,
                     squares = 16;  // a norm of 4, clipped to 4 or 1.48
        Buffer<real> param(count, "param"), m(count, "m"), v(count, "v"), grad(count, "grad");
        param.fill(random), m.fill(random, step == 1 ? 0 : 0.1), v.fill(random, step == 1 ? 0 : 0.1), grad.fill(random);
        for (size_t i = 0; i < count; i++) v[i] *= v[i];  // a second moment is not negative
        grad[3] = 0, grad[4] = real(1e-6), grad[5] = real(1e4);
        oracle::Numbers<real> expected_param, expected_m, expected_v;
        for (size_t i = 0; i < count; i++) {
            const oracle::Adam<real> after =
                oracle::adamw(param[i], m[i], v[i], grad[i], 1e-2, 0.9, 0.95, 1e-8, decay, step, clip);
            expected_param.push_back(after.param), expected_m.push_back(after.m), expected_v.push_back(after.v);
        }
        cpu.adamw(param, nullptr, m, v, grad, count,
                  HyperAdamW{1e-2, 0.9, 0.95, 1e-8, decay, step, 0, 0, &squares, 4 * clip});
        CHECK_ARRAY(param, expected_param);
        CHECK_ARRAY(m, expected_m);
        CHECK_ARRAY(v, expected_v);
    }
}
TEST(op_optimiser) { check_optimiser<float>(), check_optimiser<double>(); }

// ---------------------------------------------------------------------------------------------------------------------
// Shapes of the attention tests: B, T, G, heads per group, D, l, d, l', n, w.

inline NsaShape nsa_shape(int B, int T, int G, int h, int D, int l, int d, int slc_block, int slc_count, int window) {
    NsaShape s;
    s.B = B, s.T = T, s.first = 0, s.queries = T, s.H = G * h, s.G = G, s.D = D, s.l = l, s.d = d;
    s.slc_block = slc_block, s.slc_count = slc_count, s.window = window, s.F = 8;
    return s;
}
inline const std::vector<NsaShape>& nsa_shapes() {
    static const std::vector<NsaShape> shapes = {
        nsa_shape(2, 1, 2, 3, 2, 1, 1, 1, 3, 1),  // one token
        nsa_shape(2, 1, 1, 1, 64, 32, 16, 64, 16, 512),
        nsa_shape(1, 31, 1, 1, 16, 32, 16, 64, 16, 512),  // no compressed block at all
        nsa_shape(2, 32, 1, 6, 16, 32, 16, 64, 16, 2),    // exactly one, for the last query
        nsa_shape(1, 33, 2, 12, 2, 32, 16, 16, 3, 1),
        nsa_shape(2, 33, 1, 3, 64, 8, 4, 16, 3, 63),
        nsa_shape(1, 63, 1, 1, 16, 8, 4, 16, 3, 63),
        nsa_shape(2, 64, 2, 3, 2, 1, 1, 1, 16, 64),  // l = d = l' = 1: blocks are tokens
        nsa_shape(1, 64, 1, 6, 64, 8, 4, 16, 4, 65),
        nsa_shape(1, 65, 1, 12, 16, 8, 4, 8, 4, 64),
        nsa_shape(2, 65, 2, 1, 16, 32, 16, 48, 3, 65),   // l' = 48
        nsa_shape(1, 130, 1, 3, 64, 32, 16, 16, 4, 64),  // l > l'
        nsa_shape(2, 130, 2, 6, 16, 8, 4, 16, 5, 63),
        nsa_shape(1, 130, 1, 12, 2, 1, 1, 48, 3, 65),
        nsa_shape(1, 130, 1, 1, 2, 4, 4, 12, 3, 300),  // l = d, w > T
        nsa_shape(1, 130, 2, 2, 16, 16, 4, 20, 3, 7),  // l = 4 d
        nsa_shape(1, 1023, 1, 3, 2, 32, 16, 64, 4, 512),
        nsa_shape(1, 1025, 2, 1, 2, 32, 16, 64, 16, 65),  // the 17th block: the first query that must choose
        nsa_shape(1, 1025, 1, 6, 2, 8, 4, 16, 16, 64),    // 65 selection blocks: three words
    };
    return shapes;
}
template <class real>
const char* engine_name() {
    return sizeof(real) == 4 ? "cpu fp32" : "cpu fp64";
}
// A failing check prints only what differs; this adds where.
struct ShapeReport {
    const NsaShape& s;
    const char* engine;
    int failed = tests().failed_checks;
    ~ShapeReport() {
        if (tests().failed_checks > failed && tests().failed_checks <= 10)
            std::printf("    with %s, B %d T %d first %d queries %d H %d G %d D %d l %d d %d l' %d n %d w %d full %d\n",
                        engine, s.B, s.T, s.first, s.queries, s.H, s.G, s.D, s.l, s.d, s.slc_block, s.slc_count,
                        s.window, int(s.full));
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Heads and RoPE.

template <class real>
struct HeadBuffers {
    Buffer<real> q, gate;
    std::vector<Buffer<real>> kv;
    explicit HeadBuffers(const NsaShape& s)
        : q(size_t(s.B) * s.H * s.queries * s.D, "q"), gate(s.full ? 0 : size_t(3) * s.B * s.H * s.queries, "gate") {
        for (int slot = 0; slot < 6; slot++)
            kv.emplace_back(s.full && slot < K_WIN ? 0 : size_t(s.B) * s.G * s.T * s.D, "kv");
    }
    typename Cpu<real>::Heads heads() { return {q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, gate}; }
    typename Cpu<real>::HeadGradients gradients() { return {q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, gate}; }
};

// first, queries: part of the positions; whatever lies outside must stay as it was.
template <class real>
void check_split_heads(NsaShape s, Cpu<real>& cpu) {
    using Num = oracle::Number<real>;
    const ShapeReport report{s, engine_name<real>()};
    Random random(70);
    const int P = s.projected(), D = s.D;
    Buffer<real> projected(size_t(s.B) * s.queries * P, "projected");
    projected.fill(random);
    HeadBuffers<real> out(s);
    oracle::Numbers<real> q(out.q.size()), gate(out.gate.size());
    std::vector<oracle::Numbers<real>> kv(6);
    for (int slot = 0; slot < 6; slot++) kv[size_t(slot)].resize(out.kv[size_t(slot)].size());
    for (int b = 0; b < s.B; b++)
        for (int j = 0; j < s.queries; j++) {
            real* row = projected + (size_t(b) * s.queries + j) * P;
            for (int head = 0; head < s.H; head++) {
                const oracle::Numbers<real> turned = oracle::rope(row + head * D, s.first + j, D, +1);
                std::copy(turned.begin(), turned.end(), &q[((size_t(b) * s.H + head) * s.queries + j) * D]);
            }
            int column = s.H * D;
            for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++, column += D) {
                    const oracle::Numbers<real> plain = oracle::numbers(row + column, size_t(D)),
                                                turned = oracle::rope(row + column, s.first + j, D, +1);
                    const bool rotated = slot == K_SLC || slot == K_WIN;
                    std::copy_n(rotated ? turned.begin() : plain.begin(), D,
                                &kv[size_t(slot)][((size_t(b) * s.G + g) * s.T + s.first + j) * D]);
                }
            if (s.full) continue;
            for (int head = 0; head < s.H; head++)
                for (int branch = 0; branch < 3; branch++) {
                    if (head + branch == 0 && j == 0) row[column] = 1000;
                    gate[((size_t(branch) * s.B + b) * s.H + head) * s.queries + j] =
                        oracle::sigmoid(Num(row[column + 3 * head + branch]));
                }
            for (int i = column + 3 * s.H; i < P; i++)
                row[i] = std::numeric_limits<real>::quiet_NaN();  // padding is not read
        }
    cpu.split_heads_forward(out.heads(), projected, s);
    CHECK_ARRAY(out.q, q, s.B, s.H, s.queries, D);
    CHECK_ARRAY(out.gate, gate, 3, s.B, s.H, s.queries);
    for (int slot = 0; slot < 6; slot++) {
        Buffer<real>& found = out.kv[size_t(slot)];
        for (size_t i = 0; i < found.size(); i++)
            if (const int t = int(i / D % s.T); t < s.first || t >= s.first + s.queries) {
                CHECK(std::isnan(found[i]));
                found[i] = 0;  // as in the oracle's array
            }
        CHECK_ARRAY(found, kv[size_t(slot)], s.B, s.G, s.T, D);
    }
    if (s.first != 0 || s.queries != s.T) return;

    // Backward: each gradient goes to the columns its head came from, turned back.
    HeadBuffers<real> d(s);
    d.q.fill(random), d.gate.fill(random);
    for (Buffer<real>& x : d.kv) x.fill(random);
    oracle::Numbers<real> expected;
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++) {
            for (int head = 0; head < s.H; head++) {
                const oracle::Numbers<real> turned =
                    oracle::rope(d.q + ((size_t(b) * s.H + head) * s.T + t) * D, t, D, -1);
                expected.insert(expected.end(), turned.begin(), turned.end());
            }
            for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                for (int g = 0; g < s.G; g++) {
                    const real* in = d.kv[size_t(slot)] + ((size_t(b) * s.G + g) * s.T + t) * D;
                    const oracle::Numbers<real> row =
                        slot == K_SLC || slot == K_WIN ? oracle::rope(in, t, D, -1) : oracle::numbers(in, size_t(D));
                    expected.insert(expected.end(), row.begin(), row.end());
                }
            if (s.full) continue;
            for (int i = 0; i < s.gate_columns(); i++)  // column 3*head + branch; the padding 0
                expected.push_back(i < 3 * s.H ? Num(d.gate[((size_t(i % 3) * s.B + b) * s.H + i / 3) * s.T + t])
                                               : Num(0));
        }
    Buffer<real> dprojected(projected.size(), "dprojected");
    cpu.split_heads_backward(dprojected, d.gradients(), s);
    CHECK_ARRAY(dprojected, expected, s.B * s.T, P);
}
template <class real>
void check_split_heads_shapes() {
    Cpu<real> cpu;  // one engine for all: its RoPE table has to follow D and T
    for (NsaShape s : {nsa_shape(2, 33, 2, 3, 16, 8, 4, 16, 3, 9), nsa_shape(2, 70, 1, 1, 64, 8, 4, 16, 3, 9),
                       nsa_shape(1, 40, 1, 1, 16, 8, 4, 16, 3, 9), nsa_shape(1, 1025, 1, 2, 2, 8, 4, 16, 3, 9),
                       nsa_shape(1, 5, 2, 4, 16, 8, 4, 16, 3, 9)})
        for (bool full : {false, true}) {
            s.full = full;
            check_split_heads(s, cpu);
            NsaShape part = s;
            part.first = s.T / 2, part.queries = 1;
            check_split_heads(part, cpu);
            part.queries = s.T - part.first;
            check_split_heads(part, cpu);
        }
}
TEST(op_split_heads) { check_split_heads_shapes<float>(), check_split_heads_shapes<double>(); }

// q(t) . k(u) of the same projected rows, once at positions 0.. and once at first..: equal but for rounding. Each
// element of q and k carries the rotation's error e; a dot product of D terms then differs by at most twice the sum of
// |q| e(k) + |k| e(q).
TEST(op_rope_scores_depend_on_distance_alone) {
    NsaShape here = nsa_shape(1, 40, 1, 1, 64, 8, 4, 16, 3, 9), there = here;
    there.first = 777, there.T = there.first + there.queries;
    Random random(75);
    Cpu<float> cpu;
    Buffer<float> projected(size_t(here.queries) * here.projected(), "projected");
    projected.fill(random);
    HeadBuffers<float> a(here), b(there);
    cpu.split_heads_forward(a.heads(), projected, here);
    cpu.split_heads_forward(b.heads(), projected, there);
    double most = 0;
    for (int slot : {K_SLC, K_WIN})
        for (int t = 0; t < here.queries; t++)
            for (int u = 0; u < here.queries; u++) {
                double one = 0, other = 0, limit = 0;
                const float *q1 = a.q + t * 64, *q2 = b.q + t * 64, *k1 = a.kv[size_t(slot)] + u * 64,
                            *k2 = b.kv[size_t(slot)] + (u + there.first) * 64;
                for (int x = 0; x < 64; x++) {
                    one += double(q1[x]) * k1[x], other += double(q2[x]) * k2[x];
                    // An element is a c - b s: tables and products rounded to u each, and the difference: 3u (|a| +
                    // |b|) at most.
                    const int pair = (x + 32) % 64;
                    // |a| + |b| <= sqrt(2) * the length of the pair, which the rotation keeps.
                    const double reach_q = std::hypot(q1[x], q1[pair]), reach_k = std::hypot(k1[x], k1[pair]);
                    limit += 2 * 2 * 3 * std::sqrt(2.0) * oracle::Number<float>::u * reach_q * reach_k;
                }
                CHECK_NEAR(one, other, limit);
                most = std::fmax(most, std::fabs(float(q1[0]) - q2[0]));
            }
    CHECK(most > 0.1);  // the positions did matter to the vectors themselves
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression.

template <class real>
struct PhiBuffers {
    Buffer<real> fc1, bias, fc2;
    explicit PhiBuffers(const NsaShape& s)
        : fc1(size_t(s.F) * s.l * s.D, "fc1"), bias(size_t(s.F), "bias"), fc2(size_t(s.D) * s.F, "fc2") {}
    void fill(Random& random) { fc1.fill(random, 0.3), bias.fill(random), fc2.fill(random); }
    void zero() { fc1.zero(), bias.zero(), fc2.zero(); }
    typename Cpu<real>::Phi phi() { return {fc1, bias, fc2}; }
    oracle::PhiWeights<real> weights() const { return {fc1.data(), bias.data(), fc2.data()}; }
};

template <class real>
void check_compress(const NsaShape& s, bool rotated) {
    const ShapeReport report{s, engine_name<real>()};
    Random random(80);
    Cpu<real> cpu;
    const int NC = oracle::blocks(s.T, s);
    const size_t rows = size_t(s.B) * s.G * NC;
    Buffer<real> k(size_t(s.B) * s.G * s.T * s.D, "k"), out(rows * s.D, "out"), hidden(rows * s.F, "hidden"),
        dout(out.size(), "dout"), dk(k.size(), "dk");
    PhiBuffers<real> phi(s), dphi(s);
    k.fill(random), phi.fill(random), dout.fill(random), dphi.fill(random);
    cpu.compress_forward(out, hidden, k, phi.phi(), rotated, s);
    const oracle::Compressed<real> expected = oracle::compress(k.data(), phi.weights(), rotated, s);
    CHECK_ARRAY(out, expected.out, s.B * s.G, NC, s.D);
    CHECK_ARRAY(hidden, expected.hidden, s.B * s.G, NC, s.F);

    oracle::CompressGradients<real> d;
    d.dfc1 = oracle::numbers(dphi.fc1), d.dbias = oracle::numbers(dphi.bias), d.dfc2 = oracle::numbers(dphi.fc2);
    oracle::compress_backward(d, dout.data(), hidden.data(), k.data(), phi.weights(), rotated, s);
    cpu.compress_backward(dk, dphi.phi(), dout, hidden, k, phi.phi(), rotated, s);
    CHECK_ARRAY(dk, d.dk, s.B * s.G, s.T, s.D);
    CHECK_ARRAY(dphi.fc1, d.dfc1, s.F, s.l, s.D);
    CHECK_ARRAY(dphi.bias, d.dbias);
    CHECK_ARRAY(dphi.fc2, d.dfc2, s.D, s.F);
}
TEST(op_compress) {
    for (const NsaShape& s : nsa_shapes())
        if (s.T * s.D * s.l / s.d < 20000)
            for (bool rotated : {false, true}) check_compress<float>(s, rotated), check_compress<double>(s, rotated);
    NsaShape wide = nsa_shape(1, 100, 1, 1, 64, 32, 16, 64, 16, 512);  // the preset's l, d, D, F
    wide.F = 128;
    check_compress<float>(wide, true);
}
TEST(op_compress_is_average_pooling_while_fc2_is_zero) {
    const NsaShape s = nsa_shape(1, 100, 1, 1, 16, 32, 16, 64, 16, 512);
    Random random(81);
    Cpu<float> cpu;
    const int NC = 5;  // (100 - 32) / 16 + 1
    PhiBuffers<float> phi(s);
    phi.fill(random), phi.fc2.zero();
    Buffer<float> k(100 * 16, "k"), out(NC * 16, "out"), hidden(size_t(NC) * s.F, "hidden");
    k.fill(random);
    cpu.compress_forward(out, hidden, k, phi.phi(), false, s);
    for (int block = 0; block < NC; block++)
        for (int x = 0; x < 16; x++) {
            oracle::Sum<float> sum;
            for (int t = 16 * block; t < 16 * block + 32; t++) sum.add(oracle::Number<float>(k[t * 16 + x]));
            const oracle::Number<float> mean = oracle::Number<float>(sum) / oracle::Number<float>(32);
            CHECK_NEAR(out[block * 16 + x], mean.value, mean.error);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The attention branches, against an independent softmax.

template <class real>
struct AttentionInputs {
    Buffer<real> q, gate, dout;
    std::vector<Buffer<real>> k, v;  // by branch
    AttentionInputs(const NsaShape& s, Random& random, double score_scale = 1)
        : q(size_t(s.B) * s.H * s.queries * s.D, "q"),
          gate(size_t(3) * s.B * s.H * s.queries, "gate"),
          dout(size_t(s.B) * s.queries * s.H * s.D, "dout") {
        q.fill(random, score_scale), dout.fill(random);
        for (size_t i = 0; i < gate.size(); i++) gate[i] = real(1 / (1 + std::exp(-2 * random.normal())));
        for (Branch branch : {CMP, SLC, WIN}) {
            const size_t count = s.full && branch != WIN ? 0 : size_t(s.B) * s.G * oracle::key_rows(branch, s) * s.D;
            k.emplace_back(count, "k"), v.emplace_back(count, "v");
            k.back().fill(random), v.back().fill(random);
        }
    }
};

template <class real>
void check_selection(const uint32_t* found, const real* share, const real* q, const real* kc, const real* lse,
                     const NsaShape& s, bool bf16 = false);

// Forward of each branch, selection, combination; in training shapes the backward too, as one chain from the same
// inputs as the oracle's.
template <class real>
void check_attention(const NsaShape& s, double score_scale = 1, bool extreme_gates = false, bool bf16 = false) {
    using Num = oracle::Number<real>;
    const ShapeReport report{s, engine_name<real>()};
    Random random(90);
    Cpu<real> cpu;
    cpu.gemm.bf16 = bf16;
    AttentionInputs<real> in(s, random, score_scale);
    if (extreme_gates)  // sigmoid(-87), and a gate that rounds to 1
        for (size_t i = 0; i < in.gate.size(); i += 3) in.gate[i] = i % 2 ? real(1) : real(std::exp(-87.0));
    const size_t rows = s.query_rows(), values = rows * s.D;
    const std::vector<Branch> branches = s.full ? std::vector<Branch>{WIN} : std::vector<Branch>{CMP, SLC, WIN};
    const size_t count = branches.size();
    Buffer<real> o(count * values, "o"), lse(count * rows, "lse"), out(in.dout.size(), "out");
    Buffer<uint32_t> selection(s.full ? 0 : size_t(s.B) * s.G * s.queries * oracle::selection_words(s), "selection");
    const oracle::Numbers<real> q = oracle::numbers(in.q);
    std::vector<oracle::Numbers<real>> k, v;
    for (int branch = 0; branch < 3; branch++) {
        k.push_back(oracle::numbers(in.k[size_t(branch)]));
        v.push_back(oracle::numbers(in.v[size_t(branch)]));
    }
    std::vector<oracle::Sum<real>> combined(out.size());
    for (Branch branch : branches) {
        Buffer<real> branch_out(values, "branch output"), branch_lse(rows, "branch lse");
        cpu.attention_forward(branch, branch_out, branch_lse, in.q, in.k[branch], in.v[branch], selection, s);
        if (branch == CMP) {
            Buffer<real> share(size_t(s.B) * s.G * s.queries, "chosen_importance");
            cpu.select_blocks(selection, share, in.q, in.k[CMP], branch_lse, s);
            check_selection<real>(selection, share, in.q, in.k[CMP], branch_lse, s, bf16);
        }
        const oracle::Attended<real> expected =
            oracle::attention(branch, q, k[branch], v[branch], selection.data(), s, bf16);
        CHECK_ARRAY(branch_out, expected.out, s.B, s.H, s.queries, s.D);
        CHECK_ARRAY(branch_lse, expected.lse, s.B, s.H, s.queries);
        const size_t at = s.full ? 0 : branch;  // full attention has one branch
        std::copy_n(branch_out.data(), values, o + at * values);
        std::copy_n(branch_lse.data(), rows, lse + at * rows);
        for (int b = 0; b < s.B; b++)
            for (int head = 0; head < s.H; head++)
                for (int j = 0; j < s.queries; j++) {
                    const size_t row = (size_t(b) * s.H + head) * s.queries + j;
                    const Num gate = s.full ? Num(1) : Num(in.gate[branch * rows + row]);
                    for (int x = 0; x < s.D; x++)
                        combined[((size_t(b) * s.queries + j) * s.H + head) * s.D + x].add(gate *
                                                                                           expected.out[row * s.D + x]);
                }
    }
    cpu.combine_forward(out, o, s.full ? nullptr : in.gate.data(), s);
    CHECK_ARRAY(out, oracle::numbers(combined), s.B, s.queries, s.H, s.D);
    if (s.first != 0 || s.queries != s.T) return;

    Buffer<real> row_dot(count * rows, "row_dot"), lse_gated(count * rows, "lse_gated"),
        dz(s.full ? 0 : 3 * rows, "dgate_logit"), dq(values, "dq");
    dq.fill(random);  // accumulates over the branches
    std::vector<oracle::Sum<real>> dq_sums(values);
    for (size_t i = 0; i < values; i++) dq_sums[i].add(Num(dq[i]));
    cpu.attention_backward_rows(row_dot, lse_gated, dz, in.dout, o, s.full ? nullptr : in.gate.data(), lse, s);
    oracle::Numbers<real> expected_dz;
    for (Branch branch : branches) {
        Buffer<real> dk(in.k[branch].size(), "dk"), dv(in.v[branch].size(), "dv");
        Buffer<real> only_dq(values, "dq, written");
        const size_t at = s.full ? 0 : branch * rows;
        cpu.attention_backward(branch, only_dq, false, dk, dv, in.dout, in.q, in.k[branch], in.v[branch], row_dot + at,
                               lse_gated + at, selection, s);
        cpu.attention_backward(branch, dq, true, dk, dv, in.dout, in.q, in.k[branch], in.v[branch], row_dot + at,
                               lse_gated + at, selection, s);
        const oracle::AttentionGradients<real> d =
            oracle::attention_backward(branch, q, k[branch], v[branch], s.full ? nullptr : in.gate + branch * rows,
                                       in.dout.data(), selection.data(), s, bf16);
        CHECK_ARRAY(dk, oracle::numbers(d.dk), s.B, s.G, oracle::key_rows(branch, s), s.D);
        CHECK_ARRAY(dv, oracle::numbers(d.dv), s.B, s.G, oracle::key_rows(branch, s), s.D);
        CHECK_ARRAY(only_dq, oracle::numbers(d.dq), s.B, s.H, s.queries, s.D);
        for (size_t i = 0; i < values; i++) dq_sums[i].add(d.dq[i]);
        expected_dz.insert(expected_dz.end(), d.dz.begin(), d.dz.end());
    }
    CHECK_ARRAY(dq, oracle::numbers(dq_sums), s.B, s.H, s.queries, s.D);
    if (!s.full) CHECK_ARRAY(dz, expected_dz, 3, s.B, s.H, s.queries);
}

// Whether masks are what the rule gives: forced blocks, count, no block of the future, and no block left out that is
// more important than one taken by more than the rounding of both. share: what select_blocks says about the share of
// the importance that fell on the taken.
template <class real>
void check_selection(const uint32_t* found, const real* share, const real* q, const real* kc, const real* lse,
                     const NsaShape& s, bool bf16) {
    const int words = oracle::selection_words(s), h = s.H / s.G, NC = oracle::blocks(s.T, s);
    for (int b = 0; b < s.B; b++)
        for (int g = 0; g < s.G; g++)
            for (int j = 0; j < s.queries; j++) {
                const int t = s.first + j, last = t / s.slc_block;
                const size_t at = (size_t(b) * s.G + g) * s.queries + j,
                             row = (size_t(b) * s.H + g * h) * s.queries + j;
                const std::vector<int> chosen = blocks_of(found + at * words, words);
                CHECK_EQUAL(int(chosen.size()), std::min(s.slc_count, last + 1));
                CHECK(chosen.back() == last && chosen.front() == 0);
                if (last > 0) CHECK(std::count(chosen.begin(), chosen.end(), last - 1) == 1);
                if (last + 1 <= s.slc_count) {
                    if (share) CHECK_EQUAL(share[at], real(1));
                    continue;
                }
                const oracle::Numbers<real> importance = oracle::importance(
                    q + row * s.D, lse + row, size_t(s.queries), kc + (size_t(b) * s.G + g) * NC * s.D, t, s, bf16);
                oracle::Sum<real> taken, all;
                double least = 1e300,
                       most = -1e300;  // the least important block taken (at most), the most important left (at least)
                for (int block = 0; block <= last; block++) {
                    const oracle::Number<real> x = importance[size_t(block)];
                    const bool is_chosen = std::count(chosen.begin(), chosen.end(), block) == 1,
                               forced = block == 0 || block >= last - 1;
                    all.add(x);
                    if (is_chosen) taken.add(x);
                    if (is_chosen && !forced) least = std::min(least, x.value + x.error);
                    if (!is_chosen) most = std::max(most, x.value - x.error);
                }
                CHECK(s.slc_count == 3 || least >= most);
                const oracle::Number<real> expected = oracle::Number<real>(taken) / oracle::Number<real>(all);
                if (share && all.value > 0) CHECK_NEAR(share[at], expected.value, expected.error);
            }
}

TEST(op_attention_fp32) {
    for (const NsaShape& s : nsa_shapes()) check_attention<float>(s);
}
// In fp64 both sides are the specification: what shows here is that it writes all of its outputs and nothing else, and
// reads nothing that was not written.
TEST(op_attention_fp64) {
    for (const NsaShape& s : nsa_shapes())
        if (s.T <= 130) check_attention<double>(s);
}
// Decoding: some positions of a sequence, or one, that starts anywhere.
TEST(op_attention_in_parts) {
    for (NsaShape s : nsa_shapes())
        for (const auto& [first, queries] :
             {std::pair<int, int>{0, s.T / 2}, {s.T / 2, 1}, {s.T - 1, 1}, {s.T / 3, std::min(s.T - s.T / 3, 40)}}) {
            if (queries == 0 || (first == 0 && s.T > 130)) continue;
            s.first = first, s.queries = queries;
            check_attention<float>(s);
            if (HAVE_BF16) check_attention<float>(s, 1, false, true);
        }
}
TEST(op_attention_bf16) {
    if (!HAVE_BF16) return skip("attention in bf16: this build's processor has no AVX512_BF16");
    for (const NsaShape& s : nsa_shapes()) check_attention<float>(s, 1, false, true);
}
TEST(op_attention_full) {
    for (NsaShape s : {nsa_shape(2, 1, 1, 2, 16, 8, 4, 16, 3, 1), nsa_shape(1, 65, 2, 3, 16, 8, 4, 16, 3, 2),
                       nsa_shape(1, 200, 1, 2, 2, 8, 4, 16, 3, 2)}) {
        s.full = true;  // over all tokens, whatever the window
        check_attention<float>(s), check_attention<double>(s);
        if (HAVE_BF16) check_attention<float>(s, 1, false, true);
    }
}
TEST(op_attention_large_logits_stay_finite) {
    // Scores q.k/sqrt(D) of standard deviation 1e3, and gates down to
    // sigmoid(-87): finite and within the limits, which grow with the scores.
    for (const NsaShape& s : nsa_shapes())
        if (s.T <= 130) check_attention<float>(s, 1e3, true);
    for (const NsaShape& s : nsa_shapes())
        if (s.T <= 65) check_attention<double>(s, 1e3, true);
}

// A prompt shorter than the caches: what lies behind position first + queries is NaN here, and not read.
TEST(op_attention_reads_nothing_behind_its_positions) {
    for (int queries : {1, 31, 32, 64, 100}) {
        NsaShape s = nsa_shape(2, 130, 2, 3, 16, 8, 4, 16, 4, 40), prefix = s;
        s.queries = queries;
        prefix.T = prefix.queries = queries;
        Random random(95);
        Cpu<float> cpu;
        AttentionInputs<float> in(s, random);
        for (Branch branch : {CMP, SLC, WIN}) {
            const int stride = oracle::key_rows(branch, s), used = oracle::key_rows(branch, prefix);
            Buffer<float> short_k(size_t(s.B) * s.G * used * s.D), short_v(short_k.size());
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int key = 0; key < stride; key++)
                    for (int x = 0; x < s.D; x++)
                        for (bool is_key : {true, false}) {
                            float& value = (is_key ? in.k : in.v)[branch][(size_t(bg) * stride + key) * s.D + x];
                            if (key < used) (is_key ? short_k : short_v)[(size_t(bg) * used + key) * s.D + x] = value;
                            else value = std::numeric_limits<float>::quiet_NaN();
                        }
            in.k.push_back(std::move(short_k)), in.v.push_back(std::move(short_v));
        }
        Buffer<uint32_t> selection(size_t(s.B) * s.G * queries * s.selection_words(), "selection"),
            short_selection(size_t(s.B) * s.G * queries * prefix.selection_words());
        for (Branch branch : {CMP, SLC, WIN}) {
            Buffer<float> out(in.q.size(), "out"), lse(s.query_rows(), "lse"), short_out(out.size()),
                short_lse(lse.size());
            cpu.attention_forward(branch, out, lse, in.q, in.k[branch], in.v[branch], selection, s);
            cpu.attention_forward(branch, short_out, short_lse, in.q, in.k[size_t(branch) + 3],
                                  in.v[size_t(branch) + 3], short_selection, prefix);
            if (branch == CMP)
                cpu.select_blocks(selection, nullptr, in.q, in.k[CMP], lse, s),
                    cpu.select_blocks(short_selection, nullptr, in.q, in.k[3], short_lse, prefix);
            CHECK_SAME_BITS(out.data(), short_out.data(), out.size());
            CHECK_SAME_BITS(lse.data(), short_lse.data(), lse.size());
        }
        for (int row = 0; row < s.B * s.G * queries; row++)
            CHECK(blocks_of(selection + row * s.selection_words(), s.selection_words()) ==
                  blocks_of(short_selection + row * prefix.selection_words(), prefix.selection_words()));
    }
}

// ----- the branches equal dense causal attention where they should.

// Dense causal attention: every token up to its own, whatever the branch's blocks and window are.
template <class real>
oracle::Attended<real> dense_causal(const oracle::Numbers<real>& q, const oracle::Numbers<real>& k,
                                    const oracle::Numbers<real>& v, int tile, NsaShape s) {
    s.full = true;
    return oracle::attention(WIN, q, k, v, nullptr, s, false, tile);
}
template <class real>
void check_dense_equivalences() {
    Random random(100);
    Cpu<real> cpu;
    // slc: T = n l', the last length at which a query may take all its blocks. win: w = T. cmp: l = d = 1, fc2 = 0.
    NsaShape s = nsa_shape(2, 96, 2, 3, 16, 1, 1, 16, 6, 96);
    AttentionInputs<real> in(s, random);
    const oracle::Numbers<real> q = oracle::numbers(in.q), v = oracle::numbers(in.v[WIN]);
    Buffer<real> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    Buffer<uint32_t> selection(size_t(s.B) * s.G * s.T * s.selection_words(), "selection");

    cpu.attention_forward(CMP, out, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
    cpu.select_blocks(selection, nullptr, in.q, in.k[CMP], lse, s);
    const oracle::Attended<real> dense_slc =
        dense_causal(q, oracle::numbers(in.k[SLC]), oracle::numbers(in.v[SLC]), 16, s);
    cpu.attention_forward(SLC, out, lse, in.q, in.k[SLC], in.v[SLC], selection, s);
    CHECK_ARRAY(out, dense_slc.out, s.B, s.H, s.T, s.D);
    CHECK_ARRAY(lse, dense_slc.lse, s.B, s.H, s.T);

    const oracle::Attended<real> dense_win = dense_causal(q, oracle::numbers(in.k[WIN]), v, 64, s);
    for (int window : {96, 97, 1000}) {
        s.window = window;
        out.poison(), lse.poison();
        cpu.attention_forward(WIN, out, lse, in.q, in.k[WIN], in.v[WIN], nullptr, s);
        CHECK_ARRAY(out, dense_win.out, s.B, s.H, s.T, s.D);
        CHECK_ARRAY(lse, dense_win.lse, s.B, s.H, s.T);
    }

    PhiBuffers<real> phi(s);
    phi.fill(random), phi.fc2.zero();
    Buffer<real> kc(in.k[WIN].size(), "kc"), vc(kc.size(), "vc"), hidden(size_t(s.B) * s.G * s.T * s.F, "hidden");
    cpu.compress_forward(kc, hidden, in.k[WIN], phi.phi(), true, s);
    cpu.compress_forward(vc, hidden, in.v[WIN], phi.phi(), false, s);
    oracle::Numbers<real> turned;
    for (int row = 0; row < s.B * s.G * s.T; row++) {
        const oracle::Numbers<real> key = oracle::rope(in.k[WIN] + row * s.D, row % s.T, s.D, +1);
        turned.insert(turned.end(), key.begin(), key.end());
    }
    const oracle::Attended<real> dense_cmp = dense_causal(q, turned, v, 64, s);
    cpu.attention_forward(CMP, out, lse, in.q, kc, vc, nullptr, s);
    CHECK_ARRAY(out, dense_cmp.out, s.B, s.H, s.T, s.D);
    CHECK_ARRAY(lse, dense_cmp.lse, s.B, s.H, s.T);
}
TEST(op_branches_equal_dense_attention) { check_dense_equivalences<float>(), check_dense_equivalences<double>(); }

// Window attention on rotated heads: the same rows at other positions give the same output, once the window lies
// inside. Both sides are within the oracle's limit of the truth (its q and k carry the rotation's errors), hence within
// the sum of both limits of each other.
TEST(op_window_attention_does_not_see_absolute_positions) {
    NsaShape here = nsa_shape(1, 90, 1, 2, 16, 8, 4, 16, 3, 20), there = here;
    there.first = 333, there.T = there.first + there.queries;
    Random random(105);
    Cpu<float> cpu;
    Buffer<float> projected(size_t(here.queries) * here.projected(), "projected");
    projected.fill(random);
    HeadBuffers<float> a(here), b(there);
    cpu.split_heads_forward(a.heads(), projected, here);
    for (Buffer<float>& x : b.kv) x.zero();
    cpu.split_heads_forward(b.heads(), projected, there);
    Buffer<float> out_a(a.q.size(), "out"), out_b(a.q.size(), "out"), lse_a(here.query_rows(), "lse"),
        lse_b(here.query_rows(), "lse");
    cpu.attention_forward(WIN, out_a, lse_a, a.q, a.kv[K_WIN], a.kv[V_WIN], nullptr, here);
    cpu.attention_forward(WIN, out_b, lse_b, b.q, b.kv[K_WIN], b.kv[V_WIN], nullptr, there);
    // x with twice the error that a rotation leaves in it: 3u (|a| + |b|) <= 3 sqrt(2) u |pair|
    auto turned = [](const Buffer<float>& x, int D) {
        oracle::Numbers<float> n = oracle::numbers(x);
        for (size_t i = 0; i < n.size(); i++) {
            const size_t pair = i / D * D + (i % D + D / 2) % D;
            n[i].error = 2 * 3 * std::sqrt(2.0) * oracle::Number<float>::u * std::hypot(n[i].value, n[pair].value);
        }
        return n;
    };
    const oracle::Attended<float> expected =
        oracle::attention(WIN, turned(a.q, 16), turned(a.kv[K_WIN], 16), oracle::numbers(a.kv[V_WIN]), nullptr, here);
    for (int head = 0; head < here.H; head++)
        for (int t = here.window; t < here.T; t++)  // all of (t-w, t] is inside
            for (int x = 0; x < here.D; x++) {
                const size_t at = (size_t(head) * here.T + t) * here.D + x;
                CHECK_NEAR(out_b[at], out_a[at], 2 * expected.out[at].error);
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// Selection.

TEST(op_importance_weights) {
    // One compressed block alone has weight: what it gives to each selection
    // block. 32/16/64: 1, 2, 2, 2, 1 at blocks 4j-1 .. 4j+3, exactly.
    NsaShape s = nsa_shape(1, 1024, 1, 1, 2, 32, 16, 64, 16, 512);
    const int NC = oracle::blocks(s.T, s);
    for (int i = 0; i < NC; i++) {
        Buffer<float> weight(size_t(NC), "weight"), importance(16, "importance");
        weight.zero();
        weight[i] = 1;
        for (bool tiled : {false, true}) {
            (tiled ? TiledAttention::fold_importance : Cpu<float>::fold_importance)(importance, weight, s.T - 1, s);
            for (int j = 0; j < 16; j++) {
                const int offset = i - 4 * j;
                CHECK_EQUAL(importance[j], offset == -1 || offset == 3  ? 1.0f
                                           : offset >= 0 && offset <= 2 ? 2.0f
                                                                        : 0.0f);
            }
        }
    }
    // Any l, d, l': the tokens that both share, counted one by one, over d; only blocks that t sees count.
    for (const NsaShape& shape : nsa_shapes()) {
        if (shape.T > 130) continue;
        s = shape;
        for (int t = 0; t < s.T; t += 1 + s.T / 20) {
            const int seen = oracle::blocks(t + 1, s), selection_blocks = t / s.slc_block + 1;
            for (int i = 0; i < oracle::blocks(s.T, s); i++) {
                Buffer<double> weight(size_t(oracle::blocks(s.T, s)), "weight"),
                    importance(size_t(selection_blocks), "importance");
                Buffer<float> weight_fp32(weight.size(), "weight"), tiled(importance.size(), "importance");
                weight.zero(), weight_fp32.zero();
                weight[i] = weight_fp32[i] = 1;
                Cpu<double>::fold_importance(importance, weight, t, s);
                TiledAttention::fold_importance(tiled, weight_fp32, t, s);
                for (int j = 0; j < selection_blocks; j++) {
                    int shared = 0;
                    for (int token = i * s.d; token < i * s.d + s.l; token++) shared += token / s.slc_block == j;
                    CHECK_EQUAL(importance[j], i < seen ? double(shared) / s.d : 0.0);
                    CHECK_EQUAL(tiled[j], i < seen ? float(shared) / float(s.d) : 0.0f);
                }
            }
        }
    }
}

// Queries of zero: all softmax weights are the same number, so all inner blocks tie, and the rule alone decides: 0, 1,
// .., n-3, b-1, b.
template <class real>
void check_ties_of_zero_queries() {
    const NsaShape s = nsa_shape(1, 900, 1, 3, 2, 32, 16, 64, 6, 64);
    Random random(110);
    Cpu<real> cpu;
    AttentionInputs<real> in(s, random, 0);
    Buffer<real> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    Buffer<uint32_t> selection(size_t(s.T) * s.selection_words(), "selection");
    cpu.attention_forward(CMP, out, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
    cpu.select_blocks(selection, nullptr, in.q, in.k[CMP], lse, s);
    for (int t = 0; t < s.T; t++) {
        const int b = t / 64;
        std::vector<int> expected;
        for (int block = 0; block <= b; block++)
            if (b + 1 <= 6 || block <= 3 || block >= b - 1) expected.push_back(block);
        CHECK(blocks_of(selection + size_t(t) * s.selection_words(), s.selection_words()) == expected);
    }
}
// Three classes of compressed keys, each class one vector: blocks of a class tie exactly, however they fall into tiles
// and vectors.
template <class real>
void check_ties_of_classes(int heads, int first, int queries) {
    NsaShape s = nsa_shape(1, 400, 1, heads, 2, 4, 4, 4, 8,
                           64);  // l = d = l' = 4: compressed and selected blocks are the same 100
    s.first = first, s.queries = queries;
    Random random(111);
    Cpu<real> cpu;
    AttentionInputs<real> in(s, random);
    const double rank[] = {-1, 2, 1};  // class of block i: i % 3; its key: rank * (1, 0); queries (1, 0) scaled
    for (int i = 0; i < 100; i++) in.k[CMP][2 * i] = real(rank[i % 3]), in.k[CMP][2 * i + 1] = 0;
    for (size_t i = 0; i < in.q.size(); i += 2) in.q[i] = real(0.7), in.q[i + 1] = 0;
    Buffer<real> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    Buffer<uint32_t> selection(size_t(s.queries) * s.selection_words(), "selection");
    cpu.attention_forward(CMP, out, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
    cpu.select_blocks(selection, nullptr, in.q, in.k[CMP], lse, s);
    for (int t = first; t < first + queries; t++) {
        std::vector<double> importance;
        for (int block = 0; block <= t / 4; block++)
            importance.push_back(4 * block + 3 <= t ? rank[block % 3] : -2);  // seen from its end on
        CHECK(blocks_of(selection + size_t(t - first) * s.selection_words(), s.selection_words()) ==
              oracle::select(importance, 8));
    }
}
TEST(op_ties_go_to_the_lower_block) {
    check_ties_of_zero_queries<float>(), check_ties_of_zero_queries<double>();
    for (int heads : {1, 3}) {
        check_ties_of_classes<float>(heads, 0, 400), check_ties_of_classes<double>(heads, 0, 400);
        for (int t : {63, 255, 397}) check_ties_of_classes<float>(heads, t, 1);
    }
}

// Masks of the test's own: any mask is obeyed; blocks that no query selects get
// gradient 0, to the bit; a query whose mask is empty gives out 0 and lse +infinity.
template <class real>
void check_given_selection() {
    const NsaShape s = nsa_shape(1, 100, 2, 3, 16, 8, 4, 16, 3, 9);
    Random random(120);
    Cpu<real> cpu;
    AttentionInputs<real> in(s, random);
    const int words = s.selection_words(), T = s.T, empty = 50;
    Buffer<uint32_t> selection(size_t(s.G) * T * words, "selection");
    selection.zero();
    for (int g = 0; g < s.G; g++)
        for (int t = 0; t < T; t++)
            for (int block = 0; block <= t / 16; block++)  // group 0 never takes block 2, group 1 never block 0 and 3
                if (t != empty && random.below(2) && (g == 0 ? block != 2 : block != 0 && block != 3))
                    selection[(g * T + t) * words] |= 1u << block;
    const oracle::Numbers<real> q = oracle::numbers(in.q), k = oracle::numbers(in.k[SLC]),
                                v = oracle::numbers(in.v[SLC]);
    const size_t rows = s.query_rows();
    // The other branches' outputs are 0 and their lse too: only the selected branch counts here.
    Buffer<real> out(rows * s.D, "out"), lse(rows, "lse"), o(3 * rows * s.D), lses(3 * rows), row_dot(3 * rows),
        lse_gated(3 * rows), dz(3 * rows);
    cpu.attention_forward(SLC, out, lse, in.q, in.k[SLC], in.v[SLC], selection, s);
    const oracle::Attended<real> expected = oracle::attention(SLC, q, k, v, selection.data(), s);
    CHECK_ARRAY(out, expected.out, s.B, s.H, T, s.D);
    CHECK_ARRAY(lse, expected.lse, s.B, s.H, T);
    for (int head = 0; head < s.H; head++) {
        CHECK_EQUAL(lse[head * T + empty], std::numeric_limits<real>::infinity());
        for (int x = 0; x < s.D; x++) CHECK_EQUAL(out[(head * T + empty) * s.D + x], real(0));
    }
    o.zero(), lses.zero();
    std::copy_n(out.data(), out.size(), o + SLC * out.size());
    std::copy_n(lse.data(), rows, lses + SLC * rows);
    cpu.attention_backward_rows(row_dot, lse_gated, dz, in.dout, o, in.gate, lses, s);
    Buffer<real> dq(out.size(), "dq"), dk(in.k[SLC].size(), "dk"), dv(dk.size(), "dv");
    cpu.attention_backward(SLC, dq, false, dk, dv, in.dout, in.q, in.k[SLC], in.v[SLC], row_dot + SLC * rows,
                           lse_gated + SLC * rows, selection, s);
    const oracle::AttentionGradients<real> d =
        oracle::attention_backward(SLC, q, k, v, in.gate + SLC * rows, in.dout.data(), selection.data(), s);
    CHECK_ARRAY(dq, oracle::numbers(d.dq), s.B, s.H, T, s.D);
    CHECK_ARRAY(dk, oracle::numbers(d.dk), s.B, s.G, T, s.D);
    CHECK_ARRAY(dv, oracle::numbers(d.dv), s.B, s.G, T, s.D);
    for (int head = 0; head < s.H; head++) CHECK_EQUAL(dz[SLC * rows + head * T + empty], real(0));
    for (int g = 0; g < s.G; g++)
        for (int block : {0, 2, 3}) {
            if (g == 0 ? block != 2 : block == 2) continue;
            for (int i = 16 * block * s.D; i < 16 * (block + 1) * s.D; i++) {
                CHECK_EQUAL(dk[g * T * s.D + i], real(0));
                CHECK_EQUAL(dv[g * T * s.D + i], real(0));
            }
        }
}
TEST(op_unselected_blocks_get_no_gradient) { check_given_selection<float>(), check_given_selection<double>(); }

TEST(op_rows_without_a_compressed_block) {
    NsaShape s = nsa_shape(2, 70, 2, 3, 16, 32, 16, 64, 16, 9);
    Random random(125);
    Cpu<float> cpu;
    AttentionInputs<float> in(s, random);
    Buffer<float> out(in.q.size(), "out"), lse(s.query_rows(), "lse");
    cpu.attention_forward(CMP, out, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
    for (size_t row = 0; row < s.query_rows(); row++) {
        const bool sees = row % size_t(s.T) >= 31;  // block 0 ends at token l - 1
        CHECK_EQUAL(std::isinf(lse[row]), !sees);
        if (!sees) CHECK(lse[row] > 0);
        for (int x = 0; x < s.D; x++) CHECK_EQUAL(out[row * s.D + x] == 0, !sees);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Finite differences, in fp64. The loss is always sum of weight * output, with random weights, which then are the
// output's gradient.

TEST(op_gradient_embedding) {
    const int N = 12, C = 5, V = 7;
    Random random(200);
    Cpu<double> cpu;
    Buffer<int32_t> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = random.below(V);
    Buffer<double> embed(V * C, "embed"), x(N * C, "x"), dx(N * C, "dx"), dembed(V * C, "dembed");
    embed.fill(random), dx.fill(random), dembed.zero();
    cpu.embedding_backward(dembed, dx, tokens, N, C);
    CHECK_GRADIENT(embed, dembed,
                   [&] { return cpu.embedding_forward(x, tokens, embed, N, C), weigh(x.data(), dx, x.size()); });
}

TEST(op_gradient_rmsnorm) {
    const int N = 4, C = 9;
    Random random(210);
    Cpu<double> cpu;
    Buffer<double> x(N * C, "x"), weight(C, "weight"), out(N * C, "out"), rstd(N, "rstd"), dout(N * C, "dout"),
        dx(N * C, "dx"), dweight(C, "dweight");
    x.fill(random), weight.fill(random), dout.fill(random), dx.zero(), dweight.zero();
    auto loss = [&] { return cpu.rmsnorm_forward(out, rstd, x, weight, N, C), weigh(out.data(), dout, out.size()); };
    loss();
    cpu.rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C);
    CHECK_GRADIENT(x, dx, loss);
    CHECK_GRADIENT(weight, dweight, loss);
}

TEST(op_gradient_matmul) {
    const int N = 6, C = 7, OC = 9;
    Random random(220);
    Cpu<double> cpu;
    Buffer<double> inp(N * C, "inp"), weight(OC * C, "weight"), residual(N * OC, "residual"), out(N * OC, "out"),
        dout(N * OC, "dout"), dinp(N * C, "dinp"), dweight(OC * C, "dweight");
    inp.fill(random), weight.fill(random), residual.fill(random), dout.fill(random), dweight.zero();
    auto loss = [&] {
        return cpu.matmul_forward(out, inp, weight, residual, N, C, OC), weigh(out.data(), dout, out.size());
    };
    cpu.matmul_backward_input(dinp, dout, weight, N, C, OC);
    cpu.matmul_backward_weight(dweight, dout, inp, N, C, OC);
    CHECK_GRADIENT(inp, dinp, loss);
    CHECK_GRADIENT(weight, dweight, loss);
    CHECK_GRADIENT(residual, dout, loss);  // the residual's gradient is the output's
}

TEST(op_gradient_silu) {
    Random random(230);
    Cpu<double> cpu;
    Buffer<double> x(50, "x"), out(50, "out"), dout(50, "dout"), dx(50, "dx");
    x.fill(random, 2), dout.fill(random);
    cpu.silu_backward(dx, dout, x, 50);
    CHECK_GRADIENT(x, dx, [&] { return cpu.silu_forward(out, x, 50), weigh(out.data(), dout, 50); });
}

TEST(op_gradient_classifier) {
    const int N = 5, V = 11, Vp = 16;
    Random random(240);
    Cpu<double> cpu;
    Buffer<double> logits(N * Vp, "logits"), dlogits(N * Vp, "dlogits");
    Buffer<double> losses(N, "losses");
    Buffer<int32_t> targets(N);
    logits.fill(random);
    for (int n = 0; n < N; n++) targets[n] = random.below(V);
    std::copy_n(logits.data(), logits.size(), dlogits.data());
    cpu.classifier(losses, dlogits, targets, 0.25, true, N, V, Vp);
    const std::vector<double> weight(N, 0.25);
    CHECK_GRADIENT(logits, dlogits, [&] {
        return cpu.classifier(losses, logits, targets, 0.25, false, N, V, Vp), weigh(losses.data(), weight.data(), N);
    });
}

TEST(op_gradient_split_heads) {
    for (bool full : {false, true}) {
        NsaShape s = nsa_shape(2, 7, 2, 3, 4, 4, 2, 4, 3, 3);
        s.full = full;
        Random random(250);
        Cpu<double> cpu;
        HeadBuffers<double> out(s), weight(s);
        Buffer<double> projected(size_t(s.B) * s.T * s.projected(), "projected"),
            dprojected(projected.size(), "dprojected");
        projected.fill(random), weight.q.fill(random), weight.gate.fill(random);
        for (Buffer<double>& x : weight.kv) x.fill(random);
        auto loss = [&] {
            cpu.split_heads_forward(out.heads(), projected, s);
            Loss sum = weigh(out.q.data(), weight.q, out.q.size());
            for (size_t slot = 0; slot < 6; slot++)
                for (size_t i = 0; i < out.kv[slot].size(); i++) sum.add(out.kv[slot][i] * weight.kv[slot][i]);
            for (size_t i = 0; i < out.gate.size(); i++) sum.add(out.gate[i] * weight.gate[i]);
            return sum;
        };
        loss();
        HeadBuffers<double> d(s);
        std::copy_n(weight.q.data(), d.q.size(), d.q.data());
        for (size_t slot = 0; slot < 6; slot++)
            std::copy_n(weight.kv[slot].data(), d.kv[slot].size(), d.kv[slot].data());
        for (size_t i = 0; i < d.gate.size(); i++)
            d.gate[i] = weight.gate[i] * out.gate[i] * (1 - out.gate[i]);  // heads carry the logit's gradient
        cpu.split_heads_backward(dprojected, d.gradients(), s);
        CHECK_GRADIENT(projected, dprojected, loss);
    }
}

TEST(op_gradient_compress) {
    for (const NsaShape& s : {nsa_shape(2, 23, 2, 1, 4, 8, 4, 8, 3, 3), nsa_shape(1, 9, 1, 1, 6, 4, 1, 4, 3, 3),
                              nsa_shape(1, 6, 1, 1, 2, 1, 1, 1, 3, 3), nsa_shape(1, 3, 1, 1, 2, 4, 2, 4, 3, 3)})
        for (bool rotated : {false, true}) {
            const size_t rows = size_t(s.B) * s.G * oracle::blocks(s.T, s);
            Random random(260);
            Cpu<double> cpu;
            Buffer<double> k(size_t(s.B) * s.G * s.T * s.D, "k"), out(rows * s.D, "out"), hidden(rows * s.F, "hidden"),
                weight(out.size(), "weight"), dout(out.size(), "dout"), dk(k.size(), "dk");
            PhiBuffers<double> phi(s), dphi(s);
            k.fill(random), phi.fill(random), weight.fill(random), dphi.zero();
            auto loss = [&] {
                return cpu.compress_forward(out, hidden, k, phi.phi(), rotated, s),
                       weigh(out.data(), weight, out.size());
            };
            loss();
            std::copy_n(weight.data(), weight.size(), dout.data());
            cpu.compress_backward(dk, dphi.phi(), dout, hidden, k, phi.phi(), rotated, s);
            CHECK_GRADIENT(k, dk, loss);
            CHECK_GRADIENT(phi.fc1, dphi.fc1, loss);
            CHECK_GRADIENT(phi.bias, dphi.bias, loss);
            CHECK_GRADIENT(phi.fc2, dphi.fc2, loss);
        }
}

// attention_forward of the three branches and combine_forward, with the gates behind a sigmoid; the selection stays
// what it was.
TEST(op_gradient_attention) {
    for (NsaShape s : {nsa_shape(2, 21, 2, 2, 4, 4, 2, 4, 3, 5), nsa_shape(1, 70, 1, 3, 2, 8, 4, 8, 4, 66),
                       nsa_shape(1, 3, 1, 1, 2, 4, 2, 4, 3, 1), nsa_shape(1, 19, 1, 2, 6, 1, 1, 3, 3, 4)})
        for (bool full : {false, true}) {
            s.full = full;
            Random random(270);
            Cpu<double> cpu;
            AttentionInputs<double> in(s, random);
            const size_t rows = s.query_rows(), values = rows * s.D, count = full ? 1 : 3;
            Buffer<double> z(full ? 0 : 3 * rows, "z"), o(count * values, "o"), lse(count * rows, "lse"),
                out(values, "out"), dz(z.size(), "dz"), dq(values, "dq");
            Buffer<double> row_dot(count * rows, "row_dot"), lse_gated(count * rows, "lse_gated");
            Buffer<uint32_t> selection(full ? 0 : size_t(s.B) * s.G * s.T * s.selection_words(), "selection");
            z.fill(random);
            const std::vector<Branch> branches = full ? std::vector<Branch>{WIN} : std::vector<Branch>{CMP, SLC, WIN};
            if (!full) {
                cpu.attention_forward(CMP, o, lse, in.q, in.k[CMP], in.v[CMP], nullptr, s);
                cpu.select_blocks(selection, nullptr, in.q, in.k[CMP], lse, s);
            }
            auto loss = [&] {
                for (size_t i = 0; i < z.size(); i++) in.gate[i] = 1 / (1 + std::exp(-z[i]));
                for (Branch branch : branches) {
                    const size_t at = full ? 0 : branch;
                    cpu.attention_forward(branch, o + at * values, lse + at * rows, in.q, in.k[branch], in.v[branch],
                                          selection, s);
                }
                cpu.combine_forward(out, o, full ? nullptr : in.gate.data(), s);
                return weigh(out.data(), in.dout, out.size());
            };
            loss();
            dq.zero();
            cpu.attention_backward_rows(row_dot, lse_gated, dz, in.dout, o, full ? nullptr : in.gate.data(), lse, s);
            for (Branch branch : branches) {
                Buffer<double> dk(in.k[branch].size(), "dk"), dv(in.v[branch].size(), "dv");
                const size_t at = full ? 0 : branch * rows;
                cpu.attention_backward(branch, dq, true, dk, dv, in.dout, in.q, in.k[branch], in.v[branch],
                                       row_dot + at, lse_gated + at, selection, s);
                if (dk.size() == 0) continue;  // T < l
                CHECK_GRADIENT(in.k[branch], dk, loss);
                CHECK_GRADIENT(in.v[branch], dv, loss);
            }
            CHECK_GRADIENT(in.q, dq, loss);
            if (full) continue;
            CHECK_GRADIENT(z, dz, loss);
            for (int branch = 0; branch < 3; branch++)  // each branch's gate by itself
                check_gradient(__FILE__, __LINE__ + branch, "z of one branch", z + branch * rows, dz + branch * rows,
                               rows, loss);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// A whole attention layer between `projected` and the combined output: the operations in the order in which a model
// calls them.

template <class real>
struct LayerActivations {  // of one call: positions first .. first + queries - 1
    Buffer<real> q, gate, o, lse, out;
    Buffer<uint32_t> selection;
    explicit LayerActivations(const NsaShape& s)
        : q(s.query_rows() * s.D, "q"),
          gate(3 * s.query_rows(), "gate"),
          o(3 * s.query_rows() * s.D, "o"),
          lse(3 * s.query_rows(), "lse"),
          out(s.query_rows() * s.D, "out"),
          selection(size_t(s.B) * s.G * s.queries * s.selection_words(), "selection") {}
};
template <class real>
struct Layer {
    NsaShape s;
    Cpu<real> cpu;
    PhiBuffers<real> phi_k, phi_v;
    std::vector<Buffer<real>> kv;             // caches [B, G, T, D]
    Buffer<real> kc, vc, hidden_k, hidden_v;  // caches [B, G, NC, ..]

    Layer(const NsaShape& s, Random& random)
        : s(s),
          phi_k(s),
          phi_v(s),
          kc(s.cmp_rows() * s.D, "kc"),
          vc(s.cmp_rows() * s.D, "vc"),
          hidden_k(s.cmp_rows() * s.F, "hidden_k"),
          hidden_v(s.cmp_rows() * s.F, "hidden_v") {
        for (int slot = 0; slot < 6; slot++) kv.emplace_back(s.key_rows() * s.D, "kv");
        phi_k.fill(random), phi_v.fill(random);
    }
    NsaShape part(int first, int queries) const {
        NsaShape p = s;
        p.first = first, p.queries = queries;
        return p;
    }
    // projected [B*queries, P]. selection: fixed where given.
    LayerActivations<real> forward(const real* projected, int first, int queries,
                                   const Buffer<uint32_t>* selection = nullptr) {
        const NsaShape p = part(first, queries);
        LayerActivations<real> a(p);
        cpu.split_heads_forward({a.q, {kv[0], kv[1], kv[2], kv[3], kv[4], kv[5]}, a.gate}, projected, p);
        cpu.compress_forward(kc, hidden_k, kv[K_CMP], phi_k.phi(), true, p);
        cpu.compress_forward(vc, hidden_v, kv[V_CMP], phi_v.phi(), false, p);
        const size_t rows = p.query_rows();
        cpu.attention_forward(CMP, a.o, a.lse, a.q, kc, vc, nullptr, p);
        if (selection) std::copy_n(selection->data(), a.selection.size(), a.selection.data());
        else cpu.select_blocks(a.selection, nullptr, a.q, kc, a.lse, p);
        cpu.attention_forward(SLC, a.o + rows * s.D, a.lse + rows, a.q, kv[K_SLC], kv[V_SLC], a.selection, p);
        cpu.attention_forward(WIN, a.o + 2 * rows * s.D, a.lse + 2 * rows, a.q, kv[K_WIN], kv[V_WIN], nullptr, p);
        cpu.combine_forward(a.out, a.o, a.gate, p);
        return a;
    }
    // After a forward of all positions.
    void backward(Buffer<real>& dprojected, PhiBuffers<real>& dphi_k, PhiBuffers<real>& dphi_v, const real* dout,
                  LayerActivations<real>& a) {
        const size_t rows = s.query_rows();
        Buffer<real> row_dot(3 * rows, "row_dot"), lse_gated(3 * rows, "lse_gated"), dkc(kc.size(), "dkc"),
            dvc(vc.size(), "dvc");
        HeadBuffers<real> d(s);
        d.q.zero(), dphi_k.zero(), dphi_v.zero();
        cpu.attention_backward_rows(row_dot, lse_gated, d.gate, dout, a.o, a.gate, a.lse, s);
        cpu.attention_backward(CMP, d.q, true, dkc, dvc, dout, a.q, kc, vc, row_dot, lse_gated, nullptr, s);
        cpu.attention_backward(SLC, d.q, true, d.kv[K_SLC], d.kv[V_SLC], dout, a.q, kv[K_SLC], kv[V_SLC],
                               row_dot + rows, lse_gated + rows, a.selection, s);
        cpu.attention_backward(WIN, d.q, true, d.kv[K_WIN], d.kv[V_WIN], dout, a.q, kv[K_WIN], kv[V_WIN],
                               row_dot + 2 * rows, lse_gated + 2 * rows, nullptr, s);
        cpu.compress_backward(d.kv[K_CMP], dphi_k.phi(), dkc, hidden_k, kv[K_CMP], phi_k.phi(), true, s);
        cpu.compress_backward(d.kv[V_CMP], dphi_v.phi(), dvc, hidden_v, kv[V_CMP], phi_v.phi(), false, s);
        cpu.split_heads_backward(dprojected, d.gradients(), s);
    }
};

TEST(op_gradient_of_a_whole_layer) {
    const NsaShape s = nsa_shape(2, 26, 2, 2, 4, 4, 2, 4, 3, 5);
    Random random(300);
    Layer<double> layer(s, random);
    Buffer<double> projected(size_t(s.B) * s.T * s.projected(), "projected"),
        dprojected(projected.size(), "dprojected"), dout(s.query_rows() * s.D, "dout");
    projected.fill(random), dout.fill(random);
    PhiBuffers<double> dphi_k(s), dphi_v(s);
    LayerActivations<double> a = layer.forward(projected, 0, s.T);
    layer.backward(dprojected, dphi_k, dphi_v, dout, a);
    auto loss = [&] {
        const LayerActivations<double> again = layer.forward(projected, 0, s.T, &a.selection);
        return weigh(again.out.data(), dout, again.out.size());
    };
    CHECK_GRADIENT(projected, dprojected, loss);
    CHECK_GRADIENT(layer.phi_k.fc1, dphi_k.fc1, loss);
    CHECK_GRADIENT(layer.phi_k.bias, dphi_k.bias, loss);
    CHECK_GRADIENT(layer.phi_k.fc2, dphi_k.fc2, loss);
    CHECK_GRADIENT(layer.phi_v.fc1, dphi_v.fc1, loss);
    CHECK_GRADIENT(layer.phi_v.bias, dphi_v.bias, loss);
    CHECK_GRADIENT(layer.phi_v.fc2, dphi_v.fc2, loss);
}

TEST(op_layer_with_large_logits_stays_finite) {
    const NsaShape s = nsa_shape(1, 100, 2, 3, 16, 8, 4, 16, 4, 20);
    Random random(310);
    Layer<float> layer(s, random);
    Buffer<float> projected(size_t(s.T) * s.projected(), "projected"), dprojected(projected.size(), "dprojected"),
        dout(s.query_rows() * s.D, "dout");
    projected.fill(random, 40), dout.fill(random);  // scores of 40 * 40 * sqrt(16) / 4, beyond +-1e3
    for (int t = 0; t < s.T; t++)                   // gate logits of +-1e3
        for (int i = 0; i < 3 * s.H; i++) projected[t * s.projected() + s.projected() - s.gate_columns() + i] *= 25;
    PhiBuffers<float> dphi_k(s), dphi_v(s);
    LayerActivations<float> a = layer.forward(projected, 0, s.T);
    layer.backward(dprojected, dphi_k, dphi_v, dout, a);
    CHECK_FINITE(a.out);
    CHECK_FINITE(a.o);
    CHECK_FINITE(a.gate);
    CHECK_FINITE(dprojected);
    for (PhiBuffers<float>* d : {&dphi_k, &dphi_v}) {
        CHECK_FINITE(d->fc1);
        CHECK_FINITE(d->bias);
        CHECK_FINITE(d->fc2);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Causality, bit for bit: whatever stands at positions >= j, everything before j stays the same.

TEST(op_causality_bit_for_bit) {
    for (const NsaShape& s :
         {nsa_shape(1, 150, 2, 3, 16, 8, 4, 16, 4, 20), nsa_shape(2, 201, 1, 2, 2, 32, 16, 16, 5, 70),
          nsa_shape(1, 131, 1, 1, 64, 1, 1, 1, 16, 1)}) {
        const ShapeReport report{s, "cpu fp32"};
        Random random(400);
        Layer<float> layer(s, random);
        const int P = s.projected();
        Buffer<float> projected(size_t(s.B) * s.T * P, "projected");
        projected.fill(random);
        const LayerActivations<float> before = layer.forward(projected, 0, s.T);
        Buffer<float> kc(layer.kc.size()), vc(layer.vc.size());
        std::copy_n(layer.kc.data(), kc.size(), kc.data());
        std::copy_n(layer.vc.data(), vc.size(), vc.data());
        for (int j : {s.T - 1, 130, 128, 65, 64, 63, 37, 16, 1}) {  // downwards: each changes more
            for (int b = 0; b < s.B; b++)
                for (int t = j; t < s.T; t++) fill_normal(projected + (size_t(b) * s.T + t) * P, size_t(P), random, 10);
            const LayerActivations<float> after = layer.forward(projected, 0, s.T);
            bool changed = false;
            for (int b = 0; b < s.B; b++) {
                CHECK_SAME_BITS(before.out + size_t(b) * s.T * s.H * s.D, after.out + size_t(b) * s.T * s.H * s.D,
                                size_t(j) * s.H * s.D, j, s.H, s.D);
                changed |= std::memcmp(before.out + (size_t(b) * s.T + j) * s.H * s.D,
                                       after.out + (size_t(b) * s.T + j) * s.H * s.D, 4 * size_t(s.D)) != 0;
                for (int branch = 0; branch < 3; branch++)
                    for (int head = 0; head < s.H; head++) {
                        const size_t row = ((size_t(branch) * s.B + b) * s.H + head) * s.T;
                        CHECK_SAME_BITS(before.o + row * s.D, after.o + row * s.D, size_t(j) * s.D, j, s.D);
                        CHECK_SAME_BITS(before.lse + row, after.lse + row, size_t(j));
                    }
                for (int g = 0; g < s.G; g++) {
                    const size_t masks = (size_t(b) * s.G + g) * s.T * s.selection_words(),
                                 rows = (size_t(b) * s.G + g) * s.cmp_capacity() * s.D;
                    CHECK_SAME_BITS(before.selection + masks, after.selection + masks, size_t(j) * s.selection_words());
                    CHECK_SAME_BITS(kc + rows, layer.kc + rows, size_t(oracle::blocks(j, s)) * s.D);
                    CHECK_SAME_BITS(vc + rows, layer.vc + rows, size_t(oracle::blocks(j, s)) * s.D);
                }
            }
            CHECK(changed);  // position j itself does see the change
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding: the operations on a few positions at a time, with caches, equal the prefill of all.
// Each side is within the oracle's limit of the truth, so they are within twice that of each other.
// Caches hold NaN behind the present; each chunk starts from the prefill's values before it.

template <class real>
void check_decoding(const NsaShape& s, const std::vector<int>& chunks) {
    using Num = oracle::Number<real>;
    const ShapeReport report{s, engine_name<real>()};
    const ThreadCount one(1);
    Random random(500);
    Layer<real> whole(s, random), parts(s, random);
    for (auto pair : {std::make_pair(&whole.phi_k, &parts.phi_k), std::make_pair(&whole.phi_v, &parts.phi_v)}) {
        std::copy_n(pair.first->fc1.data(), pair.first->fc1.size(), pair.second->fc1.data());
        std::copy_n(pair.first->bias.data(), pair.first->bias.size(), pair.second->bias.data());
        std::copy_n(pair.first->fc2.data(), pair.first->fc2.size(), pair.second->fc2.data());
    }
    const int P = s.projected(), D = s.D, T = s.T, words = s.selection_words(), NC = s.cmp_capacity();
    Buffer<real> projected(size_t(s.B) * T * P, "projected");
    projected.fill(random);
    const LayerActivations<real> all = whole.forward(projected, 0, T);
    // Twice the oracles' limits, around the prefill's values.
    auto twice = [](const real* x, oracle::Numbers<real> expected) {
        for (size_t i = 0; i < expected.size(); i++) expected[i] = Num(x[i], 2 * expected[i].error);
        return expected;
    };
    const oracle::Numbers<real> kc =
        twice(whole.kc, oracle::compress(whole.kv[K_CMP].data(), whole.phi_k.weights(), true, s).out);
    const oracle::Numbers<real> vc =
        twice(whole.vc, oracle::compress(whole.kv[V_CMP].data(), whole.phi_v.weights(), false, s).out);
    const Buffer<real>* keys[] = {&whole.kc, &whole.kv[K_SLC], &whole.kv[K_WIN]};
    const Buffer<real>* values[] = {&whole.vc, &whole.kv[V_SLC], &whole.kv[V_WIN]};
    std::vector<oracle::Numbers<real>> out, lse;
    for (Branch branch : {CMP, SLC, WIN}) {
        const oracle::Attended<real> expected =
            oracle::attention(branch, oracle::numbers(all.q), oracle::numbers(*keys[branch]),
                              oracle::numbers(*values[branch]), all.selection.data(), s);
        out.push_back(twice(all.o + branch * all.q.size(), expected.out));
        lse.push_back(twice(all.lse + branch * s.query_rows(), expected.lse));
    }
    size_t chunk = 0;
    for (int first = 0; first < T;) {
        const int queries = std::min(chunks[chunk++ % chunks.size()], T - first),
                  seen = oracle::blocks(first + queries, s);
        const NsaShape p = parts.part(first, queries);
        Buffer<real> rows(size_t(s.B) * queries * P, "projected");
        for (int b = 0; b < s.B; b++)
            std::copy_n(projected + (size_t(b) * T + first) * P, size_t(queries) * P, rows + size_t(b) * queries * P);
        LayerActivations<real> a(p);
        parts.cpu.split_heads_forward(
            {a.q, {parts.kv[0], parts.kv[1], parts.kv[2], parts.kv[3], parts.kv[4], parts.kv[5]}, a.gate}, rows, p);
        parts.cpu.compress_forward(parts.kc, parts.hidden_k, parts.kv[K_CMP], parts.phi_k.phi(), true, p);
        parts.cpu.compress_forward(parts.vc, parts.hidden_v, parts.kv[V_CMP], parts.phi_v.phi(), false, p);
        for (int bg = 0; bg < s.B * s.G; bg++) {
            for (size_t slot = 0; slot < 6; slot++)  // the same arithmetic on each element: the same bits
                CHECK_SAME_BITS(parts.kv[slot] + size_t(bg) * T * D, whole.kv[slot] + size_t(bg) * T * D,
                                size_t(first + queries) * D, T, D);
            const size_t at = size_t(bg) * NC * D, count = size_t(seen) * D;
            check_array(__FILE__, __LINE__, "kc", parts.kc + at, count,
                        oracle::Numbers<real>(kc.begin() + ptrdiff_t(at), kc.begin() + ptrdiff_t(at + count)),
                        {seen, D});
            check_array(__FILE__, __LINE__, "vc", parts.vc + at, count,
                        oracle::Numbers<real>(vc.begin() + ptrdiff_t(at), vc.begin() + ptrdiff_t(at + count)),
                        {seen, D});
            for (size_t i = count; i < size_t(NC) * D; i++)
                CHECK(std::isnan(parts.kc[at + i]) && std::isnan(parts.vc[at + i]));
            std::copy_n(whole.kc + at, count, parts.kc + at);  // equal inputs for what follows
            std::copy_n(whole.vc + at, count, parts.vc + at);
        }
        const size_t n = p.query_rows();
        for (Branch branch : {CMP, SLC, WIN}) {
            const bool cmp = branch == CMP, slc = branch == SLC;
            parts.cpu.attention_forward(branch, a.o + branch * n * D, a.lse + branch * n, a.q,
                                        cmp ? parts.kc : parts.kv[slc ? K_SLC : K_WIN],
                                        cmp ? parts.vc : parts.kv[slc ? V_SLC : V_WIN], a.selection, p);
            if (!cmp) continue;
            // kc as the oracle sees it: all of the prefill's, of which only what each query sees counts.
            parts.cpu.select_blocks(a.selection, nullptr, a.q, parts.kc, a.lse, p);
            check_selection<real>(a.selection, nullptr, a.q, whole.kc, a.lse, p);
            for (int bg = 0; bg < s.B * s.G; bg++)
                std::copy_n(all.selection + (size_t(bg) * T + first) * words, size_t(queries) * words,
                            a.selection + size_t(bg) * queries * words);
        }
        parts.cpu.combine_forward(a.out, a.o, a.gate, p);
        for (int branch = 0; branch < 3; branch++)
            for (int row = 0; row < s.B * s.H; row++) {
                const size_t here = size_t(row) * queries, there = size_t(row) * T + first;
                CHECK_SAME_BITS(a.gate + branch * n + here, all.gate + branch * s.query_rows() + there,
                                size_t(queries));
                check_array(__FILE__, __LINE__, "lse", a.lse + branch * n + here, size_t(queries),
                            oracle::Numbers<real>(&lse[size_t(branch)][there], &lse[size_t(branch)][there] + queries),
                            {queries});
                check_array(__FILE__, __LINE__, "out", a.o + (branch * n + here) * D, size_t(queries) * D,
                            oracle::Numbers<real>(&out[size_t(branch)][there * D],
                                                  &out[size_t(branch)][there * D] + queries * D),
                            {queries, D});
            }
        for (int b = 0; b < s.B; b++)
            for (int j = 0; j < queries; j++)
                for (int i = 0; i < s.H * D; i++) {
                    Num sum;  // the gated sum of three branches, each within its limit, and 5 roundings of its own
                    for (int branch = 0; branch < 3; branch++) {
                        const size_t row = (size_t(b) * s.H + i / D) * T + first + j;
                        sum = sum + Num(all.gate[branch * s.query_rows() + row]) * out[size_t(branch)][row * D + i % D];
                    }
                    CHECK_NEAR(a.out[(size_t(b) * queries + j) * s.H * D + i],
                               all.out[(size_t(b) * T + first + j) * s.H * D + i], 2 * sum.error);
                }
        first += queries;
    }
}
TEST(op_decoding_equals_prefill) {
    const NsaShape small = nsa_shape(2, 75, 2, 3, 16, 8, 4, 16, 3, 20),
                   tall = nsa_shape(1, 140, 1, 2, 2, 32, 16, 16, 4, 65);
    for (const std::vector<int>& chunks :
         {std::vector<int>{1}, std::vector<int>{33, 1, 1}, std::vector<int>{2, 5, 17, 64}}) {
        check_decoding<float>(small, chunks), check_decoding<double>(small, chunks);
        check_decoding<float>(tall, chunks);
    }
    check_decoding<float>(nsa_shape(1, 40, 1, 1, 2, 1, 1, 1, 16, 1), {1});
    check_decoding<float>(nsa_shape(1, 20, 1, 1, 2, 32, 16, 64, 16, 512), {1, 3});  // never a compressed block
}

// ---------------------------------------------------------------------------------------------------------------------
// The number of threads changes no bit, in any operation.

template <class real>
std::vector<std::vector<real>> run_every_operation() {
    Random random(600);
    Cpu<real> cpu;
    std::vector<std::vector<real>> results;
    auto keep = [&](const Buffer<real>& x) { results.emplace_back(x.data(), x.data() + x.size()); };
    const int N = 203, C = 131, V = 60, Vp = 64;
    Buffer<int32_t> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = random.below(V);
    Buffer<real> embed(V * C), x(N * C), weight(C), out(N * C), rstd(N), dout(N * C), dx(N * C), dweight(C),
        dembed(V * C), logits(N * Vp);
    embed.fill(random), weight.fill(random), dout.fill(random), dx.fill(random), dweight.fill(random),
        dembed.fill(random), logits.fill(random);
    cpu.embedding_forward(x, tokens, embed, N, C), keep(x);
    cpu.embedding_backward(dembed, dout, tokens, N, C), keep(dembed);
    cpu.rmsnorm_forward(out, rstd, x, weight, N, C), keep(out), keep(rstd);
    cpu.rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C), keep(dx), keep(dweight);
    cpu.silu_forward(out, x, x.size()), keep(out);
    cpu.silu_backward(out, dout, x, x.size()), keep(out);
    Buffer<real> losses(N);
    cpu.classifier(losses, logits, tokens, 0.1, true, N, V, Vp), keep(logits), keep(losses);
    Buffer<real> param(99991), m(99991), v(99991), grad(99991);
    param.fill(random), m.fill(random), v.fill(random), grad.fill(random);
    for (size_t i = 0; i < v.size(); i++) v[i] *= v[i];
    const double squares = sum_of_squares(cpu, grad.data(), grad.size());
    results.push_back({real(squares), real((squares - double(real(squares))) * 0x1p30)});  // all bits of the fp64 sum
    cpu.adamw(param, nullptr, m, v, grad, grad.size(), HyperAdamW{1e-3, 0.9, 0.95, 1e-8, 0.1, 7, 0, 0}), keep(param),
        keep(m), keep(v);
    Buffer<real> zeros(99991);
    cpu.zero(zeros.data(), zeros.size()), keep(zeros);

    Buffer<real> product(N * V), a(N * 300), b(V * 300);
    a.fill(random), b.fill(random);
    Gemm<real> gemm;
    gemm.template blocked<real>(false, true, N, V, 300, a, 300, b, 300, false, product, V), keep(product);
    Buffer<real> dinp(a.size()), dw(b.size());
    for (bool bf16 : {false, true}) {
        if (bf16 && (!HAVE_BF16 || sizeof(real) == 8)) continue;
        cpu.gemm.bf16 = gemm.bf16 = bf16;
        if constexpr (sizeof(real) == 4 && HAVE_BF16)
            gemm.template blocked<Bf16Pair>(false, true, N, V, 300, a, 300, b, 300, false, product, V), keep(product);
        dw.fill(random);
        cpu.matmul_forward(product, a, b, nullptr, N, 300, V), keep(product);
        cpu.matmul_backward_input(dinp, product, b, N, 300, V), keep(dinp);
        cpu.matmul_backward_weight(dw, product, a, N, 300, V), keep(dw);
        Buffer<real> large(size_t(N) * 1100), weight_of_large(size_t(1100) * 300);  // blocks of every size
        weight_of_large.fill(random);
        cpu.matmul_forward(large, a, weight_of_large, nullptr, N, 300, 1100), keep(large);
    }

    for (NsaShape s : {nsa_shape(2, 133, 2, 3, 16, 8, 4, 16, 4, 70), nsa_shape(1, 133, 1, 3, 6, 8, 4, 12, 3, 300)}) {
        Layer<real> layer(s, random);
        Buffer<real> projected(size_t(s.B) * s.T * s.projected()), dprojected(projected.size()),
            layer_dout(s.query_rows() * s.D);
        projected.fill(random), layer_dout.fill(random);
        PhiBuffers<real> dphi_k(s), dphi_v(s);
        LayerActivations<real> act = layer.forward(projected, 0, s.T);
        layer.backward(dprojected, dphi_k, dphi_v, layer_dout, act);
        keep(act.q), keep(act.gate), keep(act.o), keep(act.lse), keep(act.out), keep(layer.kc), keep(layer.vc),
            keep(dprojected);
        for (const Buffer<real>& cache : layer.kv) keep(cache);
        for (PhiBuffers<real>* d : {&dphi_k, &dphi_v}) keep(d->fc1), keep(d->bias), keep(d->fc2);
        results.emplace_back(act.selection.data(), act.selection.data() + act.selection.size());
    }
    return results;
}
template <class real>
void check_threads() {
    const ThreadCount one(1);
    const std::vector<std::vector<real>> alone = run_every_operation<real>();
    for (int count : {2, 3, 4}) {
        const ThreadCount several(count);
        const std::vector<std::vector<real>> together = run_every_operation<real>();
        CHECK_EQUAL(together.size(), alone.size());
        for (size_t i = 0; i < alone.size(); i++) {
            const std::string what =
                format_text("result %zu of run_every_operation, %s, %d threads", i, engine_name<real>(), count);
            check_same_bits(__FILE__, __LINE__, what.c_str(), alone[i].data(), together[i].data(), alone[i].size(), {});
        }
    }
}
TEST(op_threads_change_no_bit) { check_threads<float>(), check_threads<double>(); }
