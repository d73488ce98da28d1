// ladder_tests.h: the rungs of dev/ladder compute the same. By g++ in the emulator, by nvcc on a GPU.
#pragma once
#include "../ladder/ladder.h"
#include "harness.h"

// Every rung against level 0, of the tensors out, dq, dk, dv one after another. Both store bf16 (2^-8 of a
// value), and the tensor cores round probabilities and dS to bf16 on the way in: independent errors of 2^-8
// per term, so an element is off by a few 2^-8 of the root mean square of its terms' sum; relative to a
// whole tensor's norm that is 2^-8 for the stores, twice, and 2^-8 for each of up to two roundings inside.
TEST(ladder_rungs_agree) {
    if (std::is_same<Cuda::real, float>::value)
        return skip("the ladder of attention kernels: PRECISION=FP32 has its first rung only");
    NsaShape s;
    s.B = 1, s.T = s.queries = 210, s.H = 6, s.G = 2, s.D = 64, s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 5,
    s.window = 70, s.F = 8;
    Cuda dev(0, size_t(1) << 20);
    for (const Branch branch : {CMP, SLC, WIN}) {
        LadderRun run(dev, s, branch);
        std::vector<std::vector<float>> results;
        for (const Rung& rung : RUNGS) {
            run.forward(rung);
            run.backward(rung);
            results.push_back(run.results());
        }
        const size_t rows = s.query_rows() * s.D, columns = run.keys * s.D;
        const size_t begin[] = {0, rows, 2 * rows, 2 * rows + columns, 2 * rows + 2 * columns};
        for (size_t rung = 1; rung < results.size(); rung++)
            for (int tensor = 0; tensor < 4; tensor++) {
                double difference = 0, square = 0;
                for (size_t i = begin[tensor]; i < begin[tensor + 1]; i++) {
                    difference += std::pow(double(results[rung][i]) - results[0][i], 2);
                    square += std::pow(double(results[0][i]), 2);
                }
                CHECK_NEAR(std::sqrt(difference / square), 0, 4 * 0x1p-8);
            }
    }
}
