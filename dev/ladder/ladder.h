// ladder.h: attention's forward pass from the plainest kernel to those that training runs by default, on the same
// inputs, timed side by side. Each rung says what it buys, in counts. The kernels of rungs 0, 3, 4 and 5 are the
// trainer's own, called through struct Cuda.
//
//   make ladder                                  on a GPU the times, without one whether they agree, in emulation
//   test_device --ladder [options of train]
#pragma once
#include "../../nsa_kernels.cuh"
#include "../bench/attention.h"
#include "attention_bare.cuh"

struct Rung {
    const char *name, *buys;
};
// clang-format off
enum RungNumber { PLAIN, SHARED_TILES, BARE_TENSOR_CORES, TENSOR_CORES, GATHERED_ROWS, ON_WARPGROUPS, RUNG_COUNT };
constexpr Rung RUNGS[] = {
    {"0, plain",             "what is computed, in the fewest ideas: a warp reads 4 D bytes for each key of its row"},
    {"1, shared tiles",      "memory: 32 rows share a tile of keys, D / 8 bytes of device memory for a row and a key"},
    {"2, bare tensor cores", "arithmetic: an mma is 2048 multiply-adds, before 64 instructions"},
    {"3, tensor cores",      "waiting: 4 warps share a tile that was copied ahead, an ldmatrix feeds 4 mma (D = 64)"},
    {"4, gathered rows",     "work: in long sequences only the rows that chose a selected block visit it"},
    {"5, wgmma",             "instructions: rung 3, where a wgmma is 32 mma and reads keys from shared memory itself"},
};
// clang-format on

// The forward pass of one branch on a rung, on random inputs.
struct LadderRun {
    Cuda& dev;
    NsaShape s;
    Branch branch;
    Cuda::real *q, *k, *v, *out;
    float* lse;
    uint32_t* selection;

    LadderRun(Cuda& device, const NsaShape& shape, Branch b) : dev(device), s(shape), branch(b) {
        const size_t rows = s.query_rows(), D = size_t(s.D), keys = b == CMP ? s.cmp_rows() : s.key_rows();
        q = random(rows * D, 1), k = random(keys * D, 2), v = random(keys * D, 3);
        out = dev.allocate<Cuda::real>(rows * D), lse = dev.allocate<float>(rows);
        const std::vector<uint32_t> masks = forced_selection(s, 1, 0, 1);
        selection = dev.allocate<uint32_t>(masks.size());
        dev.copy(selection, masks.data(), masks.size());
    }
    LadderRun(const LadderRun&) = delete;
    ~LadderRun() {
        for (Cuda::real* p : {q, k, v, out}) dev.release(p);
        dev.release(lse), dev.release(selection);
    }
    // Whether a rung has kernels of its own for this branch, this build and this device's code.
    bool has(RungNumber rung) const {
        if (rung == GATHERED_ROWS && branch != SLC) return false;  // the same as the rung before
        if (rung == ON_WARPGROUPS)
            return has_attention_kernel(ATTENTION_KERNELS[WARPGROUPS_KERNEL], Cuda::FP32, dev.gpu_code(), s.D);
        return rung < BARE_TENSOR_CORES || !Cuda::FP32;
    }
    void forward(RungNumber rung) {
        if (rung == SHARED_TILES) return level1::attention_forward(branch, out, lse, q, k, v, selection, s, dev.stream);
#ifndef PRECISION_FP32
        if (rung == BARE_TENSOR_CORES)
            return bare::attention_forward(branch, out, lse, q, k, v, selection, s, dev.stream);
#endif
        dev.plain_attention = rung == PLAIN;
        dev.warpgroups = rung == ON_WARPGROUPS;
        dev.selected_kernel = rung == GATHERED_ROWS ? SelectedKernel::GATHER : SelectedKernel::TILES;
        dev.attention_forward(branch, out, lse, q, k, v, selection, s);
    }
    std::vector<float> results() {
        std::vector<float> all(s.query_rows() * s.D);
        dev.to_host(all.data(), out, all.size());
        return all;
    }

  private:
    Cuda::real* random(size_t count, uint64_t index) {
        std::vector<float> values(count);
        for (size_t i = 0; i < count; i++) values[i] = float(random_normal(1, random_stream(RANDOM_TEST, index), i));
        Cuda::real* p = dev.allocate<Cuda::real>(count);
        dev.from_host(p, values.data(), count);
        return p;
    }
};

inline int run_ladder(Timed<Cuda>& dev, const NsaShape& s) {
    print(
        "attention of one layer, %d sequences of %d tokens, %d heads in %d groups of dimension %d, on %s\n\n%-12s "
        "%-24s %14s\n",
        s.B, s.T, s.H, s.G, s.D, dev.describe(), "branch", "rung", "forward us");
    const char* const names[] = {"compressed", "selected", "window"};
    for (const Branch branch : {CMP, SLC, WIN}) {
        LadderRun run(dev, s, branch);
        for (int i = 0; i < RUNG_COUNT; i++) {
            const RungNumber rung = RungNumber(i);
            if (!run.has(rung)) continue;
            for (int warm = 0; warm < 2; warm++) run.forward(rung);
            const double us = 1e6 * dev.median_seconds(7, [&](size_t) { run.forward(rung); });
            print("%-12s %-24s %14.1f\n", names[branch], RUNGS[rung].name, us);
        }
    }
    print("\nWhat each rung buys:\n");
    for (const Rung& rung : RUNGS) print("  %-18s %s\n", rung.name, rung.buys);
    return 0;
}
