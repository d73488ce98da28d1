// util_tests.h: the random numbers against published vectors and moments, the errors' form.
#pragma once
#include "harness.h"

TEST(philox_known_answers) {  // Random123's kat_vectors, philox4x32 10: counter words, key words, result
    struct { uint64_t counter, stream, seed; uint32_t expected[4]; } const cases[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x85a308d3243f6a88ull, 0x0370734413198a2eull, 0x299f31d0a4093822ull, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (const auto& c : cases) {
        const Philox p = philox4x32(c.counter, c.stream, c.seed);
        for (int i = 0; i < 4; i++) CHECK_EQUAL(p.word[i], c.expected[i]);
    }
}

TEST(random_normal_is_normal) {
    // Moments of n standard normals: mean 0 +- 1/sqrt(n), variance 1 +- sqrt(2/n), fourth moment 3 +- sqrt(96/n); limits are 5 sigma.
    const int n = 1 << 20;
    double sum = 0, squares = 0, fourths = 0, largest = 0;
    int below_one = 0;
    for (int i = 0; i < n; i++) {
        const double x = random_normal(1234, random_stream(RANDOM_TEST), i);
        sum += x, squares += x * x, fourths += x * x * x * x, largest = std::fmax(largest, std::fabs(x)), below_one += x < 1;
    }
    CHECK_NEAR(sum / n, 0, 5 / std::sqrt(n));
    CHECK_NEAR(squares / n, 1, 5 * std::sqrt(2.0 / n));
    CHECK_NEAR(fourths / n, 3, 5 * std::sqrt(96.0 / n));
    CHECK_NEAR(double(below_one) / n, 0.841344746, 5 * 0.3653 / std::sqrt(n));
    CHECK(largest > 4 && largest < 7);
    // Against libm's Box-Muller on the same bits: equal to a few units in the last place of a double.
    for (int i = 0; i < 1000; i++) {
        const Philox p = philox4x32(i, 7, 99);
        const double u = double(((uint64_t(p.word[1]) << 32 | p.word[0]) >> 11) + 1) * 0x1p-53;
        const double angle = double((uint64_t(p.word[3]) << 32 | p.word[2]) >> 11) * 0x1p-53 * 2 * M_PI - M_PI / 4;
        CHECK_NEAR(random_normal(99, 7, i), std::sqrt(-2 * std::log(u)) * std::cos(angle), 1e-14);
    }
}

TEST(errors_are_one_line_with_a_status) {
    CHECK_FAILS(2, "--lr", fail_usage("--lr %d is out of range", -1));
    CHECK_FAILS(1, "no_such_file", read_file("/no_such_file"));
    CHECK_FAILS(1, "folder", read_file("/tmp"));
}
