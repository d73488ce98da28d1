// selections.h: which blocks the queries of a benchmark choose.
#pragma once
#include <algorithm>
#include <vector>

#include "../../lib/model/engine.h"
#include "../../lib/model/shape.h"

// Each query gets its forced blocks, then as many others as it may take, of which 64 neighbours share common / of.
// [B*G, T, words]
inline std::vector<uint32_t> forced_selection(const NsaShape& s, uint64_t seed, int common, int of) {
    const size_t words = size_t(s.selection_words());
    std::vector<uint32_t> masks(size_t(s.B) * s.G * s.T * words);
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < masks.size() / words; row++) {
        const int last = int(row % size_t(s.T)) / s.slc_block, count = std::min(last + 1, s.slc_count);
        int chosen = 0;
        const auto take = [&](int block) {  // how many that adds
            uint32_t* const mask = &masks[row * words];
            const bool is_new = !is_selected(mask, block);
            select_block(mask, block);
            return int(is_new);
        };
        for (int block : {0, std::max(last - 1, 0), last}) chosen += take(block);
        const int together = chosen + (count - chosen) * common / of;
        const uint64_t blocks = uint64_t(last) + 1;
        for (uint64_t i = 0; chosen < together; i++)
            chosen += take(int(random_below(blocks, seed, random_stream(RANDOM_TEST, 91 + row / 64), i)));
        for (uint64_t i = 0; chosen < count; i++)
            chosen += take(int(random_below(blocks, seed, random_stream(RANDOM_TEST, 1000000007 + row), i)));
    }
    return masks;
}

// What the published times of the selected branch were measured with, so that ours are compared for the same work: it
// reads 8 of 16 blocks on average, and neighbours have nothing but the first in common. As the benchmark of
// github.com/XunhaoLai/native-sparse-attention-triton draws (generate_topk_idx_example, 2d6ffee): each query by itself
// takes n different blocks of the whole sequence, all equally likely, the lowest becomes the first, and those that
// begin behind the query are skipped; nothing else is forced, its own block neither. [B*G, T, words]
inline std::vector<uint32_t> uniform_selection(const NsaShape& s, uint64_t seed) {
    const size_t words = size_t(s.selection_words());
    const int blocks = (s.T + s.slc_block - 1) / s.slc_block;
    std::vector<uint32_t> masks(size_t(s.B) * s.G * s.T * words);
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < masks.size() / words; row++) {
        std::vector<int> drawn;
        for (uint64_t i = 0; int(drawn.size()) < std::min(s.slc_count, blocks); i++) {
            const int block =
                int(random_below(uint64_t(blocks), seed, random_stream(RANDOM_TEST, 2000000011 + row), i));
            if (std::find(drawn.begin(), drawn.end(), block) == drawn.end()) drawn.push_back(block);
        }
        *std::min_element(drawn.begin(), drawn.end()) = 0;
        for (const int block : drawn)
            if (block <= int(row % size_t(s.T)) / s.slc_block) select_block(&masks[row * words], block);
    }
    return masks;
}
