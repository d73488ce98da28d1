// attention_kernels.h: which kernels compute attention, and what differs from one generation of GPUs to the next, in
// two tables. The choice, --attention-kernel, what `check`, --version and refusals say, and what dev/kernel_report.sh
// counts all come from here. It is read without CUDA.
#pragma once
#include <string>
#include <vector>

#include "../base/text.h"
#include "../model/shape.h"

// What computes the selected branch. AUTO takes whichever costs less for the selection at hand, see
// measure_selections_kernel in attention_gathered.cuh.
enum class SelectedKernel { AUTO, TILES, GATHER };

// A kernel for a new generation is a row here, and its launch in nsa_kernels.cuh. Of the rows that a build and a GPU
// have, auto takes those of a branch up to the first that has all branches.
struct AttentionKernel {
    const char* name;          // what --attention-kernel calls it
    int capability;            // of the GPU at least, 10 major + minor
    bool exact;                // only code compiled for this GPU alone has it, which CUDA marks with an a: sm_90a
    bool fp32;                 // PRECISION=FP32 has it too
    unsigned head_dimensions;  // the sum of those that it is compiled for, powers of two; 0: it takes any
    unsigned branches;         // bits; a row that lacks some takes the next row's kernels for them
    SelectedKernel selected;
    const char* words;    // how it computes the selected branch
    const char* forward;  // its function of the forward pass, with the argument that tells it from another row's
};
constexpr unsigned EVERY_BRANCH = (1u << BRANCHES) - 1, TILED = 16 + 32 + 64 + 128;
// clang-format off
constexpr AttentionKernel ATTENTION_KERNELS[] = {
    {"gathered_rows", 80, false, false, TILED, 1u << SLC, SelectedKernel::GATHER, "gathered rows",
     "gather_forward_kernel"},
    {"warpgroups", 90, true, false, 64 + 128, EVERY_BRANCH, SelectedKernel::TILES, "masked tiles on warpgroups",
     "attention_forward_kernel<WARPGROUP>"},
    {"tensor_cores", 80, false, false, TILED, EVERY_BRANCH, SelectedKernel::TILES, "masked tiles",
     "attention_forward_kernel"},
    {"plain", 0, false, true, 0, EVERY_BRANCH, SelectedKernel::TILES, "plain kernels", "plain::forward_kernel"}};
// clang-format on
enum AttentionKernelRow { GATHERED_ROWS_KERNEL, WARPGROUPS_KERNEL, TENSOR_CORES_KERNEL, PLAIN_KERNEL };

// The compute capability of a GPU, 0: of any, and whether the code that it runs was compiled for it alone.
struct GpuCode {
    int capability = 0;
    bool exact = false;
};
// Whether a build, a GPU and heads of dimension D have the row's kernels. 0: any.
constexpr bool has_attention_kernel(const AttentionKernel& row, bool fp32, GpuCode gpu = {}, int D = 0) {
    const bool fits = row.exact ? gpu.exact && row.capability == gpu.capability : row.capability <= gpu.capability;
    return (row.fp32 || !fp32) && (!gpu.capability || fits) &&
           (!D || !row.head_dimensions || (row.head_dimensions & unsigned(D) && !(D & (D - 1))));
}
constexpr bool has_warpgroups(int D) {
    return has_attention_kernel(ATTENTION_KERNELS[WARPGROUPS_KERNEL], false, {}, D);
}
inline std::vector<std::string> attention_kernel_names(bool fp32, GpuCode gpu = {}, int D = 0) {
    std::vector<std::string> names;
    for (const AttentionKernel& row : ATTENTION_KERNELS)
        if (has_attention_kernel(row, fp32, gpu, D)) names.push_back(row.name);
    return names;
}
// Which kernels a call of attention takes: those of the selected branch, and whether warpgroups multiply where the head
// dimension has kernels for that.
struct AttentionPath {
    SelectedKernel selected;
    bool warpgroups;
    AttentionPath(SelectedKernel selected, bool warpgroups = false) : selected(selected), warpgroups(warpgroups) {}
};
// Null for "auto", and for a name that no row has.
inline const AttentionKernel* attention_kernel_named(const std::string& name) {
    return row_named(ATTENTION_KERNELS, name);
}
// What auto takes, as "gathered_rows or tensor_cores"; a row of some head dimensions leaves the others to the next.
inline std::string automatic_attention_kernels(bool fp32, GpuCode gpu) {
    std::string names;
    for (const AttentionKernel& row : ATTENTION_KERNELS) {
        if (!has_attention_kernel(row, fp32, gpu)) continue;
        names += (names.empty() ? "" : " or ") + std::string(row.name);
        if (row.branches == EVERY_BRANCH && (!row.head_dimensions || row.head_dimensions == TILED)) break;
    }
    return names;
}

// What differs from one generation of GPUs to the next, in the attention on tensor cores. A GPU takes the last row that
// does not exceed its compute capability.
//
// query_rows: of a tile of queries. Shared memory, 227 KB of it (163 on 8.0, 99 on 8.6, 8.9 and 12.0), holds K and V
// twice and q, in dQ dout too. Forward, heads of 128 have a warp for 32 rows, and eight warps fill a multiprocessor: on
// 9.0 and 10.0 in two blocks, on 8.0, whose memory holds one, in one block of twice the rows.
//
// forward_keys_128: of a tile, forward, that a warp scores at once. Sums of 32 rows take 128 registers, scores of 64
// keys 64 more; with them ptxas needs 2 to 6 registers too many before 10.0, and with those of 32 keys 1 to 4 from
// there on.
//
// dout_in_registers: where registers do not suffice for dout's rows too (ptxas takes more of them for the same code
// from 10.0 on), dQ reads them from shared memory again, for each tile of keys.
//
// mma_cycles: of one multiprocessor for an mma_m16n8k16, 2048 multiply-adds. By NVIDIA's figures sm_80 does 1024 a
// cycle; sm_90 2048, some 62 % of which this way (sm_100 is assumed to be like it); 8.6, 8.9 and 12.0 do 512 (GeForce
// 256, for which the costs in attention_gathered.cuh have the same ratio).
struct Generation {
    int capability;  // 10 major + minor
    int query_rows;  // heads of up to 64
    int forward_rows_128, dq_rows_128;
    int forward_keys_128;    // like dout_in_registers
    bool dout_in_registers;  // only for code compiled for this generation
    float mma_cycles;
};
// clang-format off
constexpr Generation GENERATIONS[] = {{ 80, 128, 256, 128, 32, true,  2.0f},
                                      { 86, 128, 128,  64, 32, true,  4.0f},
                                      { 90, 128, 128, 128, 32, true,  1.6f},
                                      {100, 128, 128, 128, 64, false, 1.6f},
                                      {120, 128, 128,  64, 64, false, 4.0f}};
// clang-format on
constexpr Generation generation_of(int capability) {
    Generation generation = GENERATIONS[0];
    for (const Generation& row : GENERATIONS)
        if (row.capability <= capability) generation = row;
    return generation;
}
