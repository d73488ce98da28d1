// ladder_tests.h: the rungs of dev/ladder compute the same. By g++ in the emulator, by nvcc on a GPU.
#pragma once
#include "../../ladder/ladder.h"
#include "../harness.h"

// Every rung's output is compared with the plain kernel's. All rungs store bf16 (2^-8 of a value), and tensor cores
// round probabilities to bf16 on their way in: independent errors of 2^-8 per term, so an element is off by a few 2^-8
// of the root mean square of the terms it sums up. Relative to the whole tensor's norm that is 2^-8 for each store,
// twice, and 2^-8 for the rounding inside. The scalar rungs differ in the order of fp32 sums alone: their error is that
// of the stores, and in PRECISION=FP32 some 2^-23 for each of a few steps.
inline void check_ladder(Cuda& dev, const NsaShape& s, Branch branch) {
    LadderRun run(dev, s, branch);
    std::vector<float> plain;
    for (int i = 0; i < RUNG_COUNT; i++) {
        const RungNumber rung = RungNumber(i);
        if (!run.has(rung)) continue;
        run.forward(rung);
        const std::vector<float> results = run.results();
        if (rung == PLAIN) plain = results;
        const double limit = rung >= BARE_TENSOR_CORES ? 3 * 0x1p-8 : Cuda::FP32 ? 16 * 0x1p-23 : 0x1p-8;
        double difference = 0, square = 0;
        for (size_t i = 0; i < plain.size(); i++) {
            difference += std::pow(double(results[i]) - plain[i], 2);
            square += std::pow(double(plain[i]), 2);
        }
        CHECK_NEAR(std::sqrt(difference / square), 0, limit);
    }
}
TEST(ladder_rungs_agree) {
    Cuda dev(0, size_t(1) << 20);
    NsaShape s;
    s.B = 1, s.T = s.queries = 210, s.H = 6, s.G = 2, s.D = 64, s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 5,
    s.window = 70, s.F = 8;
    for (const Branch branch : {CMP, SLC, WIN}) check_ladder(dev, s, branch);
    CHECK_EQUAL(LadderRun(dev, s, WIN).has(ON_WARPGROUPS), bool(dev.exact && dev.capability() == 90 && !Cuda::FP32));
    s.B = 2, s.T = s.queries = 97, s.H = 2, s.G = 1, s.D = 16, s.l = 32, s.d = 16, s.slc_block = 64, s.window = 200;
    for (const Branch branch : {CMP, SLC, WIN}) check_ladder(dev, s, branch);
}
