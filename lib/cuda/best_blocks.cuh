// best_blocks.cuh: which blocks of its importances a query takes, by one warp (dev/MODEL.md has the rule,
// nsa_kernels.cuh the importances). Exact, and the same for equal importances wherever it runs.
#pragma once
#include <climits>

#include "common.cuh"
#include "vectors.cuh"

#ifndef PRECISION_FP32

constexpr float TAKEN = -1;  // stored in place of a chosen block's importance, which is never negative

// A block and its importance as an integer, which orders floats that are not negative in the same way; -1: none.
struct Best {
    int bits, block;
    // Blocks are compared in ascending order; of equal ones the lower stays.
    __device__ void compare(const float* importance, int other) {
        const int other_bits = importance[other] < 0 ? -1 : __float_as_int(importance[other]);
        if (other_bits > bits) {
            bits = other_bits;
            block = other;
        }
    }
};
// The best of all lanes; of equal ones the lowest block.
__device__ inline Best best_of_warp(const Best& mine) {
    Best best;
    best.bits = __reduce_max_sync(~0u, mine.bits);
    best.block = __reduce_min_sync(~0u, mine.bits == best.bits ? mine.block : INT_MAX);
    return best;
}
// choose_best for at most 32 blocks, of which each lane holds one and counts those that go before it.
__device__ inline float choose_best_of_32(float* importance, int last, int slc_count) {
    const int lane = threadIdx.x % 32;
    const bool is_block = lane <= last, always = is_block && (lane == 0 || lane >= last - 1);
    const float mine = is_block ? importance[lane] : 0;
    const int bits = is_block && !always ? __float_as_int(mine) : -1;
    int before = 0;
    for (int other = 1; other < last - 1; other++) {
        const int other_bits = __shfl_sync(~0u, bits, other);
        before += other_bits > bits || (other_bits == bits && other < lane);
    }
    const bool taken = always || (bits >= 0 && before < slc_count - 3);
    if (taken) importance[lane] = TAKEN;
    const float all = lane_sum(mine), chosen = lane_sum(taken ? mine : 0);
    return all > 0 ? chosen / all : 1;
}
// Marks blocks 0, last-1, last and the slc_count-3 best others of importance[0 .. last] as TAKEN, by one warp; of equal
// ones the lowest index. Returns their share of all importance. Lane i keeps the best of elements i, i + 32, ...; when
// that one is taken, all lanes together look for its next best.
__device__ inline float choose_best(float* importance, int last, int slc_count) {
    if (last < 32) return choose_best_of_32(importance, last, slc_count);
    const int lane = threadIdx.x % 32;
    float all = 0, chosen = 0;
    for (int block = lane; block <= last; block += 32) all += importance[block];
    auto take = [&](int block) {
        if (block % 32 != lane || importance[block] < 0) return;
        chosen += importance[block];
        importance[block] = TAKEN;
    };
    take(0);
    take(last - 1);
    take(last);
    Best mine = {-1, INT_MAX};
    for (int block = lane; block <= last; block += 32) mine.compare(importance, block);
    for (int round = 3; round < slc_count; round++) {
        const Best best = best_of_warp(mine);
        if (best.bits < 0) break;
        take(best.block);
        __syncwarp();
        Best next = {-1, INT_MAX};
        for (int block = best.block % 32 + lane * 32; block <= last; block += 32 * 32) next.compare(importance, block);
        next = best_of_warp(next);
        if (best.block % 32 == lane) mine = next;
        __syncwarp();  // all have read before the next is taken
    }
    all = lane_sum(all);
    chosen = lane_sum(chosen);
    return all > 0 ? chosen / all : 1;
}

#endif  // PRECISION_FP32
