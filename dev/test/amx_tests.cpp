// amx_tests.cpp: products of bf16 in AMX's registers, alone and in attention. The program is compiled for AMX whatever
// processor it is built on; dev/emulator/amx_on_cpu.h executes AMX's instructions where the processor has none. Besides
// its own tests it runs those of ./test_nsa that multiply in bf16.
#include "../emulator/amx_on_cpu.h"
#include "harness.h"

#include "cpu_speed_tests.h"
#include "op_attention_tests.h"
#include "op_layer_tests.h"
#include "op_tests.h"

// tile_matmul with the arguments of a GEMM, from operands in the layouts that attention gives it: A in pairs of columns
// or, transposed, in pairs of rows; B in pairs of rows.
static void multiply_in_tiles(bool ta, bool tb, int M, int N, int K, const float* A, size_t lda, const float* B,
                              size_t ldb, bool accumulate, float* C, size_t ldc) {
    const int depth = K / 2, wide = (M + 15) / 16 * 16;
    std::vector<Bf16Pair> a(size_t(depth) * wide), b(size_t(depth) * N);
    for (int k = 0; k < depth; k++) {
        const auto pair = [&](const float* x, size_t step) { return Bf16Pair{to_bf16(x[0]), to_bf16(x[step])}; };
        for (int m = 0; m < M; m++)
            if (ta) a[size_t(k) * wide + m] = pair(A + size_t(2 * k) * lda + m, lda);
            else a[size_t(m) * depth + k] = pair(A + size_t(m) * lda + 2 * k, 1);
        for (int n = 0; n < N; n++)
            b[size_t(k) * N + n] = tb ? pair(B + size_t(n) * ldb + 2 * k, 1) : pair(B + size_t(2 * k) * ldb + n, ldb);
    }
    const size_t a_row = ta ? 1 : size_t(depth), a_depth = ta ? size_t(wide) : 1;
    const AmxTiles registers(true);
    CHECK(AmxTiles::here() && amx_takes(M, N, depth, a_row, a_depth));
    tile_matmul(M, N, depth, a.data(), a_row, a_depth, b.data(), size_t(N), C, ldc, accumulate);
}
TEST(amx_products) {
    if (!amx_granted()) return skip("products in AMX's registers: this build's processor has no AVX512_BF16");
    // Every boundary of rows (tiles of 16, pairs of them), columns (32, 64) and depth (pieces of 128 numbers).
    for (const int M : {1, 6, 15, 16, 17, 31, 32, 33, 48, 49, 96})
        check_gemm<float>(multiply_in_tiles, M, 64, 64, true);
    for (const int N : {32, 64, 96, 128})
        for (const int M : {6, 16, 40}) check_gemm<float>(multiply_in_tiles, M, N, 32, true);
    for (const int K : {32, 64, 96, 128, 160, 256, 288})
        for (const int M : {6, 16, 40}) check_gemm<float>(multiply_in_tiles, M, 96, K, true);
    CHECK(!AmxTiles::here());
}
TEST(amx_takes_no_other_shapes) {
    if (!HAVE_AMX) return skip("shapes for AMX: this build's processor has no AVX512_BF16");
    CHECK(amx_takes(5, 32, 16, 16, 1) && amx_takes(5, 32, 16, 1, 16));
    CHECK(!amx_takes(5, 48, 16, 16, 1) && !amx_takes(5, 32, 24, 24, 1));
    CHECK(!amx_takes(17, 32, 16, 1, 31));  // the second tile of a transposed A would begin the next line
    CHECK(!amx_takes(5, 32, 16, 2, 32));   // neither order
}

// All products of attention at the shapes of 125m run in the registers: the emulator has counted at least as many
// multiplications as keys and queries see each other, 2 products forward and 5 backward. Without one of them there
// would be fewer, since the window's tiles are 8 % larger than what is seen.
TEST(amx_multiplies_all_of_attention) {
    if (!amx_granted()) return skip("attention in AMX's registers: this build's processor has no AVX512_BF16");
    NsaShape s = nsa_shape(1, 640, 1, 6, 64, 32, 16, 64, 4, 512);
    Random random(21);
    Buffer<float> q(s.query_rows() * 64), k(640 * 64), v(640 * 64), dout(q.size()), out(q.size()), dq(q.size()),
        dk(k.size()), dv(v.size()), lse(s.query_rows()), dot(s.query_rows());
    q.fill(random), k.fill(random), v.fill(random), dout.fill(random), dot.fill(random);
    Cpu<float> cpu;
    cpu.gemm.bf16 = true;
    const double pairs = attention_pairs(WIN, s) * s.D, of_a_tile = 16 * 16 * 32;
    const auto tiles_of = [&](auto work) {
        const long before = amx_products_emulated;
        work();
        return double(amx_products_emulated - before);
    };
    const double forward = tiles_of([&] { cpu.attention_forward(WIN, out, lse, q, k, v, nullptr, s); }),
                 backward = tiles_of(
                     [&] { cpu.attention_backward(WIN, dq, false, dk, dv, dout, q, k, v, dot, lse, nullptr, s); });
    if (forward == 0) return skip("counting AMX's products: this processor has AMX, so none is emulated");
    CHECK(forward * of_a_tile >= 2 * pairs && forward * of_a_tile < 2.5 * pairs);
    CHECK(backward * of_a_tile >= 5 * pairs && backward * of_a_tile < 6.25 * pairs);
}
// A head of 48 fills no tiles: vectors multiply, and the result is right all the same.
TEST(amx_leaves_odd_heads_to_vectors_bf16) {
    if (!amx_granted()) return skip("heads that fill no tiles: this build's processor has no AVX512_BF16");
    check_attention<float>(nsa_shape(1, 100, 1, 3, 48, 8, 4, 16, 4, 63), 1, false, true);
    check_attention<float>(nsa_shape(2, 200, 2, 4, 32, 8, 4, 16, 5, 63), 1, false, true);
    check_attention<float>(nsa_shape(1, 150, 1, 5, 128, 16, 8, 32, 3, 70), 1, false, true);
}

int main(int argc, char** argv) {
    std::vector<TestCase>& cases = tests().cases;
    cases.erase(std::remove_if(cases.begin(), cases.end(),
                               [](const TestCase& t) {
                                   return std::strncmp(t.name, "amx_", 4) && !std::strstr(t.name, "bf16") &&
                                          std::strcmp(t.name, "op_attention_in_parts");
                               }),
                cases.end());
    return run_tests(argc, argv);
}
