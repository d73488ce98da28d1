// rope.h: cosines and sines of RoPE's angles, for the rotations of nsa_cpu.h.
#pragma once
#include <cmath>
#include <vector>

#include "shape.h"

template <class real>
struct RopeTable {
    std::vector<real> cosine, sine;  // [positions, D/2], of position * base^(-2i/D)
    int positions = 0, D = 0, base = 0;

    // Makes the tables for the positions of this shape, unless they are there.
    void prepare(const NsaShape& s) {
        if (s.T <= positions && s.D == D && s.rope_base == base) return;
        positions = s.T;
        D = s.D;
        base = s.rope_base;
        for (std::vector<real>* table : {&cosine, &sine}) table->resize(size_t(positions) * (D / 2));
#pragma omp parallel for schedule(static)
        for (int t = 0; t < positions; t++)
            for (int i = 0; i < D / 2; i++) {
                const double angle = t * std::pow(double(base), -2.0 * i / D);
                cosine[size_t(t) * (D / 2) + i] = real(std::cos(angle));
                sine[size_t(t) * (D / 2) + i] = real(std::sin(angle));
            }
    }
};
