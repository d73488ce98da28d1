// selections.h: which blocks the queries of a benchmark choose, as a trained model chose them in a text, and how much
// neighbours have in common. attention.h times them beside those that are drawn.
//
//   ./train_nsa inspect --from RUN --text FILE --json chosen.json
//   build/test_device --perf-attention --selections chosen.json
//
// The model's text is short and its blocks are small, so its choices are stretched, by this rule:
// - A query takes the choice of one of the model's queries in the second half of the text, which have much to choose
//   from; neighbours take those of neighbours, and when the half is over, another layer or group goes on.
// - What every query gets (the first block, its own and the one before) it gets where it is. Each other block of the
//   model stands for the stretch of the benchmark's sequence that lies as far from its beginning in proportion: of that
//   stretch one block is drawn, or several, if the benchmark chooses more blocks than the model, the same for all
//   queries of that half that chose the model's block.
// A short text has few blocks, so neighbours cannot differ in more: a model of long sequences shows more of the truth.
//
// And uniform_selection, what the published times of the selected branch were measured with, so that ours are compared
// for the same work: it reads 8 of 16 blocks on average, and neighbours have nothing but the first in common.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../../lib/base/files.h"
#include "../../lib/base/json.h"
#include "../../lib/model/engine.h"
#include "../../lib/model/shape.h"

struct TrainedSelections {
    static constexpr int SPAN = 64;  // queries that have the same blocks to choose from: a selection block's tokens

    int slc_block = 0, slc_count = 0;
    int first = 0, period = 0;                          // the model's queries that are taken
    std::vector<std::vector<std::vector<int>>> chosen;  // [layers * groups][tokens]: what not every query gets

    // `path`: what `inspect --json` wrote.
    explicit TrainedSelections(const std::string& path) {
        const Json json = parse_json(read_file(path), path);
        const Json& shape = json.get("shape", path);
        slc_block = int(shape.integer("slc_block", path));
        slc_count = int(shape.integer("slc_count", path));
        size_t tokens = size_t(shape.integer("seq_len", path));  // beyond it the model has not learnt to choose
        for (const Json& layer : json.array("layers", path))
            for (const Json& group : layer.array("groups", path)) {
                const std::vector<Json>& queries = group.array("blocks", path);
                tokens = std::min(tokens, queries.size());
                chosen.emplace_back();
                for (size_t t = 0; t < tokens; t++) {
                    chosen.back().emplace_back();
                    for (const Json& item : queries[t].array(path)) {
                        const int block = int(item.integer(path));
                        if (block > 0 && block < int(t) / slc_block - 1) chosen.back().back().push_back(block);
                    }
                }
            }
        first = int(tokens) / 2 / SPAN * SPAN;
        period = (int(tokens) - first) / SPAN * SPAN;
        if (chosen.empty() || first < 4 * slc_block || period < SPAN)
            fail("--selections %s: %zu tokens in blocks of %d are too few to be stretched; expected at least %d", path,
                 tokens, slc_block, std::max(8 * slc_block, 2 * SPAN));
    }

    // The blocks that query t of a sequence's group chooses besides those that every query gets: `count` of 1 ..
    // last-2.
    std::vector<int> stretched(int bg, int t, int last, int count, uint64_t seed) const {
        const uint64_t turn = uint64_t(t / period),
                       stream = random_stream(RANDOM_TEST, 95 + uint64_t(bg) * 1000003 + turn);
        const std::vector<std::vector<int>>& queries = chosen[random_below(chosen.size(), seed, stream, 0)];
        const int own = first + t % period, places = (own | (SPAN - 1)) / slc_block - 2;  // the model's: 1 .. places
        std::vector<int> found;
        auto take = [&](int block) {
            if (int(found.size()) < count && std::find(found.begin(), found.end(), block) == found.end())
                found.push_back(block);
        };
        constexpr int DRAWS = 64;
        for (int draw = 0; draw < DRAWS && int(found.size()) < count; draw++)
            for (const int block : queries[size_t(own)]) {
                const uint64_t within =
                    random_below(1 << 16, seed, stream, 1 + uint64_t(block) * DRAWS + uint64_t(draw));
                take(1 + int((uint64_t(block - 1) * 65536 + within) * uint64_t(last - 2) / (uint64_t(places) * 65536)));
            }
        for (int block = last - 2; block > 0 && int(found.size()) < count; block--) take(block);  // it chose too few
        return found;
    }
    // [B*G, T, words]
    std::vector<uint32_t> masks(const NsaShape& s, uint64_t seed) const {
        const size_t words = size_t(s.selection_words());
        std::vector<uint32_t> all(size_t(s.B) * s.G * s.T * words);
#pragma omp parallel for schedule(static)
        for (size_t row = 0; row < all.size() / words; row++) {
            uint32_t* const mask = &all[row * words];
            const int t = int(row % size_t(s.T)), last = t / s.slc_block, count = std::min(last + 1, s.slc_count);
            for (const int block : {0, std::max(last - 1, 0), last}) select_block(mask, block);
            if (count > 3)
                for (const int block : stretched(int(row / size_t(s.T)), t, last, count - 3, seed))
                    select_block(mask, block);
        }
        return all;
    }
};

// As the benchmark of github.com/XunhaoLai/native-sparse-attention-triton draws (generate_topk_idx_example, 2d6ffee):
// each query by itself takes n different blocks of the whole sequence, all equally likely, the lowest becomes the
// first, and those that begin behind the query are skipped; nothing else is forced, its own block neither. [B*G, T,
// words]
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

// How many blocks a query chooses, and how many different ones so many neighbours do, on average over all of them.
inline double distinct_blocks(const std::vector<uint32_t>& masks, const NsaShape& s, int neighbours) {
    const size_t words = size_t(s.selection_words()), rows = masks.size() / words;
    double blocks = 0, spans = 0;
    std::vector<uint32_t> any(words);
    for (size_t row = 0; row < rows; row++) {
        for (size_t word = 0; word < words; word++) any[word] |= masks[row * words + word];
        const int t = int(row % size_t(s.T));
        if (t % neighbours != neighbours - 1 && t != s.T - 1) continue;
        for (uint32_t& word : any) {
            blocks += __builtin_popcount(word);
            word = 0;
        }
        spans++;
    }
    return blocks / spans;
}
// "shared: a query chooses 15.1 blocks, 64 neighbours 27.9 different ones; a tile of 8 queries, whose heads fill 128
// rows, visits 18.0"
inline std::string describe_selection(const std::string& kind, const std::vector<uint32_t>& masks, const NsaShape& s) {
    const int tile = std::max(1, 128 / s.heads_per_group());
    return format_text(
        "%s: a query chooses %.1f blocks, 64 neighbours %.1f different ones; the %d queries whose heads fill 128 rows, "
        "%.1f",
        kind, distinct_blocks(masks, s, 1), distinct_blocks(masks, s, 64), tile, distinct_blocks(masks, s, tile));
}
