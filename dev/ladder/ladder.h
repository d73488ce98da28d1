// ladder.h: test_nsa --ladder [options of train]: attention from the plainest
// kernels to the ones the trainer calls, on the same inputs, timed side by side.
//
//   level 0   dev/ladder/attention_level0.cuh: one warp per query (or key), scalar fp32. The lesson: what is computed,
//   in the fewest lines. level 2   nsa_kernels.cuh: tiles of 64 keys shared by all heads of a group, products on tensor
//   cores (mma.sync), tiles copied while the one before is used
//             (cp.async), probabilities that never leave registers; backward with keys stationary. These are the very
//             functions of struct Cuda.
//   level 3   the selected branch for long sequences: a block of keys is visited only by the rows that chose it,
//   gathered by ldmatrix's addresses per lane.
//
// What a rung buys is printed as measured; on a machine without a GPU there is nothing
// to measure, and the rungs are only compared (test_nsa does that in emulation).
#pragma once
#include "../../nsa_kernels.cuh"

struct Rung {
    const char* name;
    bool level0;
    SelectedKernel selected;
};
constexpr Rung RUNGS[] = {{"level 0, scalar", true, SelectedKernel::TILES},
                          {"level 2, tensor cores", false, SelectedKernel::TILES},
                          {"level 3, gathered rows", false, SelectedKernel::GATHER}};

// The forward and backward of one branch on a rung, on inputs drawn from a seed. `use` gets what was computed: out, dq,
// dk, dv on the host.
struct LadderRun {
    Cuda& dev;
    NsaShape s;
    Branch branch;
    Cuda::real *q, *k, *v, *dout, *out, *dk, *dv;
    float *lse, *row_dot, *dq;
    uint32_t* selection;
    size_t keys;

    LadderRun(Cuda& device, const NsaShape& shape, Branch b) : dev(device), s(shape), branch(b) {
        const size_t rows = s.query_rows(), D = size_t(s.D), words = size_t(s.selection_words());
        keys = b == CMP ? s.cmp_rows() : s.key_rows();
        auto random = [&](size_t count, uint64_t index) {
            std::vector<float> values(count);
            for (size_t i = 0; i < count; i++)
                values[i] = float(random_normal(1, random_stream(RANDOM_TEST, index), i));
            Cuda::real* p = dev.allocate<Cuda::real>(count);
            dev.from_host(p, values.data(), count);
            return p;
        };
        q = random(rows * D, 1), k = random(keys * D, 2), v = random(keys * D, 3), dout = random(rows * D, 4);
        out = dev.allocate<Cuda::real>(rows * D), dk = dev.allocate<Cuda::real>(keys * D),
        dv = dev.allocate<Cuda::real>(keys * D);
        lse = dev.allocate<float>(rows), row_dot = dev.allocate<float>(rows), dq = dev.allocate<float>(rows * D);
        // Blocks at random among those that a query may take, as many as it takes, the forced ones included.
        std::vector<uint32_t> masks(size_t(s.B) * s.G * s.T * words);
        for (size_t row = 0; row < size_t(s.B) * s.G * s.T; row++) {
            const int last = int(row % size_t(s.T)) / s.slc_block;
            int chosen = 0;
            auto take = [&](int block) {
                uint32_t& word = masks[row * words + size_t(block) / 32];
                if (!(word >> (block % 32) & 1)) word |= 1u << (block % 32), chosen++;
            };
            for (int block : {0, std::max(last - 1, 0), last}) take(block);
            for (uint64_t i = 0; chosen < std::min(last + 1, s.slc_count); i++)
                take(int(random_below(uint64_t(last) + 1, 1, random_stream(RANDOM_TEST, 5 + row), i)));
        }
        selection = dev.allocate<uint32_t>(masks.size());
        dev.copy(selection, (const uint32_t*)masks.data(), masks.size());
        dev.zero(row_dot, rows);
    }
    ~LadderRun() {
        dev.release(q), dev.release(k), dev.release(v), dev.release(dout), dev.release(out), dev.release(dk),
            dev.release(dv);
        dev.release(lse), dev.release(row_dot), dev.release(dq), dev.release(selection);
    }
    void forward(const Rung& rung) {
        dev.plain_attention = rung.level0, dev.selected_kernel = rung.selected;
        dev.attention_forward(branch, out, lse, q, k, v, selection, s);
    }
    void backward(const Rung& rung) {
        dev.plain_attention = rung.level0, dev.selected_kernel = rung.selected;
        dev.attention_backward(branch, dq, false, dk, dv, dout, q, k, v, row_dot, lse, selection, s);
    }
    std::vector<float> results() {  // out, dq, dk, dv one after another
        const size_t rows = s.query_rows() * s.D, columns = keys * s.D;
        std::vector<float> all(2 * rows + 2 * columns);
        dev.to_host(&all[0], out, rows), dev.to_host(&all[rows], dq, rows), dev.to_host(&all[2 * rows], dk, columns),
            dev.to_host(&all[2 * rows + columns], dv, columns);
        return all;
    }
};

inline int run_ladder(Cuda& dev, const NsaShape& s) {
    std::printf(
        "attention of one layer, %d sequences of %d tokens, %d heads in %d groups of dimension %d, on %s\n\n%-12s "
        "%-24s %14s %14s\n",
        s.B, s.T, s.H, s.G, s.D, dev.describe().c_str(), "branch", "rung", "forward us", "backward us");
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    auto median_us = [&](auto operation) {
        std::vector<float> ms;
        for (int i = 0; i < 9; i++) {
            CUDA_CHECK(cudaEventRecord(begin, dev.stream));
            operation();
            CUDA_CHECK(cudaEventRecord(end, dev.stream));
            CUDA_CHECK(cudaEventSynchronize(end));
            ms.push_back(0);
            CUDA_CHECK(cudaEventElapsedTime(&ms.back(), begin, end));
        }
        std::sort(ms.begin() + 2, ms.end());  // two to warm up
        return 1e3 * double(ms[2 + (ms.size() - 2) / 2]);
    };
    for (const Branch branch : {CMP, SLC, WIN}) {
        LadderRun run(dev, s, branch);
        for (const Rung& rung : RUNGS) {
            if (rung.selected == SelectedKernel::GATHER && branch != SLC) continue;  // the same as level 2
            const double forward = median_us([&] { run.forward(rung); }),
                         backward = median_us([&] { run.backward(rung); });
            std::printf("%-12s %-24s %14.1f %14.1f\n",
                        branch == CMP   ? "compressed"
                        : branch == SLC ? "selected"
                                        : "window",
                        rung.name, forward, backward);
        }
    }
    cudaEventDestroy(begin), cudaEventDestroy(end);
    return 0;
}
