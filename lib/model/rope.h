// rope.h: cosines and sines of RoPE's angles, for the rotations of nsa_cpu.h.
#pragma once
#include <cmath>
#include <vector>

#include "shape.h"

template <class real>
struct RopeTable {
    std::vector<real> cosine, sine;  // [positions, D/2], of position * base^(-2i/D)
    int positions = 0, D = 0;

    // Makes the tables for so many positions, unless they are there.
    void prepare(int for_positions, int for_D) {
        if (for_positions <= positions && for_D == D) return;
        positions = for_positions;
        D = for_D;
        for (std::vector<real>* table : {&cosine, &sine}) table->resize(size_t(positions) * (D / 2));
#pragma omp parallel for schedule(static)
        for (int t = 0; t < positions; t++)
            for (int i = 0; i < D / 2; i++) {
                const double angle = t * std::pow(ROPE_BASE, -2.0 * i / D);
                cosine[size_t(t) * (D / 2) + i] = real(std::cos(angle));
                sine[size_t(t) * (D / 2) + i] = real(std::sin(angle));
            }
    }
};
