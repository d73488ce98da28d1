// attention.h: what Cpu<float> (nsa_cpu.h) runs for attention, block selection and compression. The same sums as
// the plain loops there, in another order: attention goes tile by tile through the vector kernels of lib/cpu/gemm.h,
// and compression is matrix products. `make test` compares the two on every shape of the tests.
//
// Attention works on tiles of keys. All query heads of a group share a tile, so its rows are (token, head) pairs: row
// j*h + i of a step is the step's token j, head i of the group. With bf16 the operands of products are pairs of bf16.
// Every sum runs in an order fixed by the shapes alone, so results do not depend on the number of threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "../model/shape.h"
#include "../model/visible.h"

// A step of the attention works on the keys of one tile and on about this many rows. With D = 64 the operands of a step
// of the backward pass take 200 KiB, within the L2 cache.
constexpr int TILE_KEYS = 64, TILE_ROWS = 96;

class TiledAttention {
  public:
    // out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys, lse [B, H, queries] = ln of the
    // softmax's denominator. A query without a key: out 0, lse +infinity.
    void attention_forward(bool bf16, Branch branch, float* out, float* lse, const float* q, const float* k,
                           const float* v, const uint32_t* selection, const NsaShape& s);
    // Training shapes.
    void attention_backward(bool bf16, Branch branch, const BackwardArrays<float, float>& d,
                            const InputArrays<float>& in, const NsaShape& s);
    // The compressed branch's attention_forward, and the blocks that its scores choose: selection [B, G, queries,
    // words] or null, chosen_importance [B, G, queries] or null.
    void attend_and_select(bool bf16, float* out, float* lse, uint32_t* selection, float* chosen_importance,
                           const float* q, const float* kc, const float* vc, const NsaShape& s);
    // out [B, G, NC, D] = phi(blocks of k [B, G, T, D]), hidden [B, G, NC, F] before the SiLU; the blocks that end
    // inside this call's positions. fc1's product over a block is the sum of its products over the block's l/d chunks
    // of d tokens, so overlapping blocks are plain matrices with a row stride of d*D: nothing is copied.
    void compress_forward(Gemm<float>& gemm, float* out, float* hidden, const float* k, const PhiOf<float>& phi,
                          const NsaShape& s) {
        const int D = s.D, F = s.F, begin = s.cmp_blocks(s.first), count = s.cmp_blocks(s.first + s.queries) - begin,
                  NC = s.cmp_capacity(), groups = s.B * s.G;
        if (count <= 0) return;
        const BlockRows rows(s, count);
        float* const sums = scratch[0].get(size_t(groups) * rows.stride * F);
        float* const activated = scratch[1].get(size_t(groups) * count * F);
        for (int part = 0; part < rows.parts; part++)
            for (int chunk = 0; chunk < s.l / s.d; chunk++)
                gemm.nt({rows.count, F, s.d * D}, k + (size_t(part) * s.T + size_t(begin + chunk) * s.d) * D,
                        size_t(s.d) * D, phi.fc1 + size_t(chunk) * s.d * D, size_t(s.l) * D, chunk > 0,
                        sums + size_t(part) * rows.stride * F, F);
#pragma omp parallel for collapse(2) schedule(static)
        for (int bg = 0; bg < groups; bg++)
            for (int i = 0; i < count; i++) {
                const size_t row = size_t(bg) * NC + begin + i;
                const float *sum = sums + (size_t(bg) * rows.stride + i) * F,
                            *tokens = k + (size_t(bg) * s.T + size_t(begin + i) * s.d) * D;
                float *h = hidden + row * F, *active = activated + (size_t(bg) * count + i) * F;
                for (int f = 0; f < F; f++) {
                    h[f] = sum[f] + phi.bias[f];
                    active[f] = h[f] * sigmoid(h[f]);
                }
                mean_of_rows(out + row * D, tokens, s.l, D);
            }
        const int parts = count == NC ? 1 : groups;  // the rows of all groups follow one another, or there are gaps
        for (int part = 0; part < parts; part++)
            gemm.nt({groups / parts * count, D, F}, activated + size_t(part) * count * F, F, phi.fc2, F, true,
                    out + (size_t(part) * NC + begin) * D, D);
    }
    // dk [B, G, T, D] =, dphi +=, from dout [B, G, NC, D]. Training shapes.
    void compress_backward(Gemm<float>& gemm, float* dk, const PhiOf<float>& dphi, const float* dout,
                           const float* hidden, const float* k, const PhiOf<float>& phi, const NsaShape& s) {
        const int D = s.D, F = s.F, NC = s.cmp_capacity(), groups = s.B * s.G, all = groups * NC;
        if (NC == 0) return void(std::fill_n(dk, s.key_rows() * D, 0.0f));
        const BlockRows rows(s, NC);
        float *activated = scratch[0].get(size_t(all) * F), *dactive = scratch[1].get(size_t(all) * F),
              *dhidden = scratch[2].get(size_t(groups) * rows.stride * F);
        gemm.nn({all, F, D}, dout, D, phi.fc2, F, false, dactive, F);  // dactive = dout fc2
#pragma omp parallel for schedule(static)
        for (int bg = 0; bg < groups; bg++) {
            const size_t at = size_t(bg) * NC * F, count = size_t(NC) * F;
            float* const to = dhidden + size_t(bg) * rows.stride * F;
#pragma omp simd
            for (size_t i = 0; i < count; i++) {
                const float x = hidden[at + i], y = sigmoid(x);
                activated[at + i] = x * y;
                to[i] = dactive[at + i] * y * (1 + x * (1 - y));
            }
            std::fill(to + count, to + size_t(rows.stride) * F, 0.0f);
            spread_mean(dk + size_t(bg) * s.T * D, dout + size_t(bg) * NC * D, NC, s);
        }
        for (int row = 0; row < groups * rows.stride; row++)
            for (int f = 0; f < F; f++) dphi.bias[f] += dhidden[size_t(row) * F + f];
        gemm.tn({D, F, all}, dout, D, activated, F, true, dphi.fc2, F);  // dfc2 += dout^T active
        for (int part = 0; part < rows.parts; part++)
            for (int chunk = 0; chunk < s.l / s.d; chunk++) {
                const float* const from = dhidden + size_t(part) * rows.stride * F;
                const size_t at = size_t(chunk) * s.d * D, tokens = size_t(part) * s.T * D + at;
                gemm.tn({F, s.d * D, rows.count}, from, F, k + tokens, size_t(s.d) * D, true, dphi.fc1 + at,
                        size_t(s.l) * D);
                gemm.nn({rows.count, s.d * D, F}, from, F, phi.fc1 + at, size_t(s.l) * D, true, dk + tokens,
                        size_t(s.d) * D);
            }
    }
    // importance[j], j = 0..t/l', from the weights of the compressed blocks that query t sees; paper eq. 9.
    static void fold_importance(float* importance, const float* weight, int t, const NsaShape& s) {
        // In units of d, which divides l and l': compressed block j * width + i shares `shared` units with block j.
        const int visible = s.cmp_blocks(t + 1), blocks = t / s.slc_block + 1, length = s.l / s.d,
                  width = s.slc_block / s.d;
        std::fill_n(importance, blocks, 0.0f);
        for (int i = 1 - length; i < width; i++) {
            const float shared = float(std::min(width, i + length) - std::max(0, i));
            const int begin = (std::max(0, -i) + width - 1) / width,
                      end = std::min(blocks, (visible - i + width - 1) / width);
#pragma omp simd
            for (int j = begin; j < end; j++) importance[j] += weight[j * width + i] * shared;
        }
    }

  private:
    Workspace<float> scratch[6];

    // What every pass reads: one branch's queries, keys and values.
    struct Branches : InputArrays<float> {
        Branch branch;
        const NsaShape& s;
        const uint32_t* mask(size_t bg, int t) const { return s.selection_mask(selection, bg, t); }
    };
    struct ForwardArrays {
        float *out, *lse;
        uint32_t* selection = nullptr;  // where blocks are chosen
        float* chosen_importance = nullptr;
    };
    using Gradients = BackwardArrays<float, float>;
    // f(Element()), where Element is what products take: floats, or pairs of bf16.
    template <class F>
    static void with_element(bool bf16, F f) {
        if constexpr (HAVE_BF16)
            if (bf16) return f(Bf16Pair());
        f(float());
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Compression.

    // Which blocks one product takes: `count` of each group or, where every group begins d tokens after the last of
    // the group before, those of all groups. Then a few rows lie across two groups. They are computed and not used in
    // the forward pass, and 0 in the backward pass. A group's first row is `stride` rows after the group before's.
    struct BlockRows {
        int parts, count, stride;
        BlockRows(const NsaShape& s, int blocks) : parts(s.B * s.G), count(blocks), stride(blocks) {
            if (s.T % s.d || blocks != s.cmp_capacity()) return;
            stride = s.T / s.d;
            count = parts * stride - (stride - blocks);
            parts = 1;
        }
    };
    static void mean_of_rows(float* out, const float* x, int rows, int D) {
        for (int i = 0; i < D; i++) {
            float sum = 0;
            for (int row = 0; row < rows; row++) sum += x[size_t(row) * D + i];
            out[i] = sum / rows;
        }
    }
    // dk [T, D] = the gradient of the blocks' means, whose gradients are dout [NC, D]
    static void spread_mean(float* dk, const float* dout, int NC, const NsaShape& s) {
        std::fill_n(dk, size_t(s.T) * s.D, 0.0f);
        for (int i = 0; i < NC; i++)
            for (int row = 0; row < s.l; row++)
                for (int x = 0; x < s.D; x++) dk[(size_t(i) * s.d + row) * s.D + x] += dout[size_t(i) * s.D + x] / s.l;
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Who sees what.

    static constexpr int LANES = VectorOf<float>::lanes;
    static int whole_vectors(int n) { return (n + LANES - 1) / LANES * LANES; }
    // Over how many elements a product sums so many rows or keys.
    template <class Element>
    static int depth_of(int n) {
        return (n + PER<Element> - 1) / PER<Element>;
    }

    // In the selected branch a tile is a selection block, so a query sees whole tiles, but for its own block.
    static int tile_keys(Branch branch, const NsaShape& s) { return branch == SLC ? s.slc_block : TILE_KEYS; }
    static int tile_queries(const NsaShape& s) { return std::max(1, TILE_ROWS / s.heads_per_group()); }

    // The keys of a tile that query t sees, counted from the tile's first; the caller looks at the selection.
    static KeyRange visible_keys(Branch branch, int t, int tile, const NsaShape& s) {
        const int width = tile_keys(branch, s), start = tile * width;
        const KeyRange keys = causal_range(branch, t, s);
        const int begin = std::clamp(keys.begin - start, 0, width);
        return {begin, std::clamp(keys.end - start, begin, width)};
    }
    // Does query t see any key of the tile? mask: its selection, in the selected branch.
    static bool sees(Branch branch, int t, int tile, const uint32_t* mask, const NsaShape& s) {
        if (branch == SLC && !is_selected(mask, tile)) return false;
        const KeyRange range = visible_keys(branch, t, tile, s);
        return range.begin < range.end;
    }
    // The tiles of keys that any of the queries t0 .. t1-1 may see: the first, and one past the last.
    static KeyRange tile_range(Branch branch, int t0, int t1, const NsaShape& s) {
        const int width = tile_keys(branch, s), end = causal_range(branch, t1 - 1, s).end;
        return {causal_range(branch, t0, s).begin / width, (end + width - 1) / width};
    }
    // The columns of a tile that any of these queries sees, widened to whole vectors; in the compressed branch, whose
    // scores choose blocks too, from the tile's first key on.
    static KeyRange columns_of(Branch branch, const int* tokens, int count, int tile, const NsaShape& s) {
        return {branch == CMP ? 0 : visible_keys(branch, tokens[0], tile, s).begin / LANES * LANES,
                whole_vectors(visible_keys(branch, tokens[count - 1], tile, s).end)};
    }
    // The queries that see a tile of keys, in order, in the branches whose queries do not choose.
    static std::vector<int> query_list(Branch branch, int tile, const NsaShape& s) {
        const int begin = query_range(branch, tile * TILE_KEYS, s).begin,
                  end = query_range(branch, (tile + 1) * TILE_KEYS - 1, s).end;
        std::vector<int> list;
        for (int t = std::max(begin, s.first); t < std::min(end, s.first + s.queries); t++) list.push_back(t);
        return list;
    }
    // The queries that chose each block, in order: [B * G, blocks]. Looking for them block by block would read the
    // whole selection for each.
    static std::vector<std::vector<int>> query_lists(const Branches& in, int blocks) {
        const NsaShape& s = in.s;
        std::vector<std::vector<int>> lists(size_t(s.B) * s.G * blocks);
#pragma omp parallel for schedule(static)
        for (int bg = 0; bg < s.B * s.G; bg++)
            for (int t = s.first; t < s.first + s.queries; t++)
                for (int first = 0; first <= t / s.slc_block; first += 32)
                    for (uint32_t bits = in.mask(bg, t)[first / 32]; bits; bits &= bits - 1) {
                        const int block = first + __builtin_ctz(bits);
                        if (sees(SLC, t, block, in.mask(bg, t), s)) lists[size_t(bg) * blocks + block].push_back(t);
                    }
        return lists;
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Operands.

    // The tiles of keys or of values as operands. A tile has `padded` keys, a multiple of the vector's lanes; those
    // that do not exist are 0.
    template <class Element>
    struct Tiles {
        const Element* data;
        size_t group_stride, tile_stride;
        int count, padded, D;       // D: of what they hold
        Element* packed = nullptr;  // data, if pack_tiles() has to write it
        const Element* operator()(size_t bg, int tile) const { return data + bg * group_stride + tile * tile_stride; }
    };
    // The tiles of x [B, G, stride, D], D that of the keys or of the values. For products that sum over D they are [D /
    // PER][padded], so that the scores of a row with all keys of a tile are vector operations; for products that sum
    // over keys they are [padded / PER][D], where floats are read as they are.
    enum SumOver { OVER_D, OVER_KEYS };
    template <class Element>
    Tiles<Element> operand_tiles(int piece, Branch branch, const float* x, int D, const NsaShape& s, SumOver sum_over) {
        static_assert(sizeof(Element) == sizeof(float), "they share scratch memory");
        constexpr int per = PER<Element>;
        const int width = tile_keys(branch, s), padded = whole_vectors(width), keys = s.key_count(branch),
                  count = (keys + width - 1) / width;
        const size_t group_stride = size_t(s.key_stride(branch)) * D, size = size_t(padded / per) * D;
        if constexpr (per == 1)
            if (sum_over == OVER_KEYS) return {x, group_stride, size_t(width) * D, count, padded, D};
        Element* const data = reinterpret_cast<Element*>(scratch[piece].get(size * count * s.B * s.G));
        return {data, size * count, size, count, padded, D, data};
    }
    // The threads of a parallel region share the work and do not wait for one another at the end.
    template <class Element>
    static void pack_tiles(const Tiles<Element>& tiles, Branch branch, const float* x, const NsaShape& s,
                           SumOver sum_over) {
        if (!tiles.packed) return;
        const int D = tiles.D, width = tile_keys(branch, s), keys = s.key_count(branch), padded = tiles.padded;
        std::vector<Element> room(size_t(padded) * (D + 16));
#pragma omp for collapse(2) schedule(static) nowait
        for (int bg = 0; bg < s.B * s.G; bg++)
            for (int tile = 0; tile < tiles.count; tile++) {
                const int existing = std::min(width, keys - tile * width);
                const float* const in = x + (size_t(bg) * s.key_stride(branch) + size_t(tile) * width) * D;
                Element* const out = tiles.packed + bg * tiles.group_stride + tile * tiles.tile_stride;
                if (existing < padded) std::fill_n(out, tiles.tile_stride, Element{});
                if (sum_over == OVER_D) pack_columns(out, padded, in, existing, D, room.data());
                else sum_over_rows(out, in, D, existing, D);
            }
    }

    static size_t query_row(size_t bg, int head_of_group, int t, const NsaShape& s) {
        return s.query_row(bg * s.heads_per_group() + head_of_group, t);
    }
    // The rows of some tokens from q [B, H, queries, D], scaled.
    static void load_queries(float* rows, const float* q, size_t bg, const int* tokens, int count, const NsaShape& s) {
        const float scale = float(s.scale());
        for (int j = 0; j < count; j++)
            for (int i = 0; i < s.heads_per_group(); i++, rows += s.D) {
                const float* in = q + query_row(bg, i, tokens[j], s) * s.D;
                for (int x = 0; x < s.D; x++) rows[x] = in[x] * scale;
            }
    }
    // The rows of all queries, or of their gradients, scaled, as operands that sum over D: [B, G, T, h, D / PER]. The
    // rows of neighbouring queries lie behind one another. row_of(bg, head of group, t) is where a row is read. The
    // threads share the work as in pack_tiles().
    template <class Element, class RowOf>
    static void pack_query_rows(Element* rows, int D, float scale, RowOf row_of, const NsaShape& s) {
        const int h = s.heads_per_group(), width = D / PER<Element>;
        std::vector<float> row(D);
#pragma omp for collapse(2) schedule(static) nowait
        for (int bg = 0; bg < s.B * s.G; bg++)
            for (int t = 0; t < s.T; t++)
                for (int i = 0; i < h; i++) {
                    const float* const in = row_of(size_t(bg), i, t);
                    Element* const out = rows + ((size_t(bg) * s.T + t) * h + i) * width;
                    for (int x = 0; x < D; x++) row[x] = in[x] * scale;
                    read_along(out, row.data(), D);
                }
    }
    template <class T>
    static void prefetch(const T* x, size_t count) {
        for (size_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
    }
    // Scores outside [begin, end) become -infinity, whose exponential is 0.
    static void hide(float* p, int n, int begin, int end) {
        for (int i = 0; i < begin; i++) p[i] = -std::numeric_limits<float>::infinity();
        for (int i = end; i < n; i++) p[i] = -std::numeric_limits<float>::infinity();
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Forward. Each step takes some neighbouring queries and goes through their tiles; softmax accumulates tile by tile
    // (Milakov & Gimelshein 2018).

    // A thread's memory for one step: of one tile's scores, or of all tiles' where blocks are chosen by them.
    template <class Element>
    struct ForwardRoom {
        const size_t tile_size;  // of scores [tiles][rows][padded]
        AlignedVector<float> rows, scores, p, sums, reference, total;
        AlignedVector<Element> q_room, p_room;
        const Element* q_rows = nullptr;  // the step's queries as operands
        std::vector<int> tokens, best;
        std::vector<float> weight, importance;  // of a query's compressed blocks and its selection blocks
        ForwardRoom(size_t row_count, int queries, int padded, size_t kept_tiles, const NsaShape& s)
            : tile_size(row_count * padded),
              rows(row_count * s.D),
              scores(tile_size * std::max<size_t>(kept_tiles, 1)),
              p(kept_tiles ? tile_size : 0),
              sums(row_count * s.D),
              reference(row_count),
              total(row_count * LANES),
              q_room(rows.size()),
              p_room(tile_size),
              tokens(queries),
              weight(kept_tiles * padded),
              importance(s.slc_blocks()) {}
    };
    template <class Element>
    static void start_softmax(ForwardRoom<Element>& room) {
        std::fill(room.sums.begin(), room.sums.end(), 0.0f);
        std::fill(room.reference.begin(), room.reference.end(), -std::numeric_limits<float>::infinity());
        std::fill(room.total.begin(), room.total.end(), 0.0f);
    }
    // The rows of queries t0 .. t0+count-1.
    template <class Element>
    static void finish_softmax(const ForwardArrays& to, int bg, int t0, int count, const ForwardRoom<Element>& room,
                               const NsaShape& s) {
        const int D = s.D, h = s.heads_per_group();
        for (int r = 0; r < h * count; r++) {
            const size_t row = query_row(bg, r % h, t0 + r / h, s);
            float total = 0;
            for (int x = 0; x < LANES; x++) total += room.total[size_t(r) * LANES + x];
            const float inverse = total > 0 ? 1 / total : 0.0f;
            for (int x = 0; x < D; x++) to.out[row * D + x] = room.sums[size_t(r) * D + x] * inverse;
            to.lse[row] = total > 0 ? room.reference[r] + std::log(total) : std::numeric_limits<float>::infinity();
        }
    }
    // Whether query t may choose among its blocks; otherwise it takes them all.
    static bool may_choose(int t, const NsaShape& s) { return t / s.slc_block >= s.slc_count; }
    static void add_weights(float* sum, const float* scores, int count, float lse) {
#pragma omp simd
        for (int key = 0; key < count; key++) sum[key] += exponential(scores[key] - lse);
    }
    // weight[i] = sum over the group's heads of the weight p[head, t, i] of compressed block i
    template <class Element>
    static void compressed_weights(const float* lse, int bg, int t, int j, int padded, ForwardRoom<Element>& room,
                                   const NsaShape& s) {
        const int h = s.heads_per_group(), visible = s.cmp_blocks(t + 1);
        for (int begin = 0; begin < visible; begin += TILE_KEYS) {
            const int count = whole_vectors(std::min(TILE_KEYS, visible - begin));  // hidden scores weigh 0
            const float* const scores = &room.scores[begin / TILE_KEYS * room.tile_size + size_t(j) * h * padded];
            float* const weight = &room.weight[begin];
            std::fill_n(weight, count, 0.0f);
            for (int head = 0; head < h; head++)
                add_weights(weight, scores + head * padded, count, lse[query_row(bg, head, t, s)]);
        }
    }
    // Sets the bits of blocks 0, last-1, last and of the count-3 best between them; of equal ones the lowest.
    static void choose_best(uint32_t* mask, std::vector<int>& best, const float* importance, int last, int count) {
        for (const int forced : {0, last - 1, last}) select_block(mask, forced);
        best.clear();  // the best so far, in falling order
        const auto insert = [&](int block, size_t at) {
            for (; at > 0 && importance[block] > importance[best[at - 1]]; at--) best[at] = best[at - 1];
            best[at] = block;
        };
        int block = 1;
        for (; int(best.size()) < count - 3; block++) {
            best.push_back(block);
            insert(block, best.size() - 1);
        }
        for (; count > 3 && block < last - 1; block++)
            if (importance[block] > importance[best.back()]) insert(block, best.size() - 1);
        for (const int chosen : best) select_block(mask, chosen);
    }
    static float chosen_share(const uint32_t* mask, const float* importance, int last) {
        float chosen = 0, all = 0;
        for (int block = 0; block <= last; block++) {
            all += importance[block];
            chosen += is_selected(mask, block) ? importance[block] : 0.0f;
        }
        return all > 0 ? chosen / all : 1.0f;
    }
    // The bitmask of query t, which is the step's query j, from the scores that the step has kept, and the share of the
    // importance that fell on the chosen blocks, 1 if all are.
    template <class Element>
    static void select_for_query(const ForwardArrays& to, int bg, int t, int j, int padded, ForwardRoom<Element>& room,
                                 const NsaShape& s) {
        const size_t row = size_t(bg) * s.queries + (t - s.first);
        uint32_t* const mask = to.selection + row * s.selection_words();
        const int last = t / s.slc_block;
        float share = 1;
        std::fill_n(mask, s.selection_words(), 0u);
        if (may_choose(t, s)) {
            compressed_weights(to.lse, bg, t, j, padded, room, s);
            fold_importance(room.importance.data(), room.weight.data(), t, s);
            choose_best(mask, room.best, room.importance.data(), last, s.slc_count);
            if (to.chosen_importance) share = chosen_share(mask, room.importance.data(), last);
        } else
            for (int block = 0; block <= last; block++) select_block(mask, block);
        if (to.chosen_importance) to.chosen_importance[row] = share;
    }

    // How many tiles of scores are kept for choosing.
    static size_t kept_tiles(const ForwardArrays& to, const NsaShape& s) {
        const int last = s.first + s.queries;
        return to.selection && may_choose(last - 1, s) ? size_t(tile_range(CMP, s.first, last, s).end) : 0;
    }
    template <class Element>
    void forward_pass(const ForwardArrays& to, const Branches& in) {
        const NsaShape& s = in.s;
        // A step of the selected branch fetches a tile once for all its queries that chose it: the more blocks there
        // are, the fewer of them do.
        const int step = tile_queries(s) * (in.branch != SLC ? 1 : s.slc_blocks() > 8 * s.slc_count ? 8 : 4);
        const Tiles<Element> kt = operand_tiles<Element>(0, in.branch, in.k, s.D, s, OVER_D),
                             vs = operand_tiles<Element>(1, in.branch, in.v, s.D, s, OVER_KEYS);
#pragma omp parallel
        {
            const AmxTiles registers(PER<Element> == 2);
            pack_tiles(kt, in.branch, in.k, s, OVER_D);
            pack_tiles(vs, in.branch, in.v, s, OVER_KEYS);
            ForwardRoom<Element> room(size_t(s.heads_per_group()) * step, step, kt.padded, kept_tiles(to, s), s);
#pragma omp barrier
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int t0 = s.first; t0 < s.first + s.queries; t0 += step)
                    forward_step(to, bg, t0, std::min(step, s.first + s.queries - t0), room, kt, vs, in);
        }
    }
    // Queries t0 .. t0+count-1. Each run of neighbours that see a tile of keys is one pair of products.
    template <class Element>
    static void forward_step(const ForwardArrays& to, int bg, int t0, int count, ForwardRoom<Element>& room,
                             const Tiles<Element>& kt, const Tiles<Element>& vs, const Branches& in) {
        const NsaShape& s = in.s;
        const int D = s.D, h = s.heads_per_group();
        for (int j = 0; j < count; j++) room.tokens[j] = t0 + j;
        load_queries(room.rows.data(), in.q, bg, room.tokens.data(), count, s);
        room.q_rows = sum_over_columns(room.q_room.data(), room.rows.data(), D, h * count, D);
        start_softmax(room);
        const auto visible = [&](int j, int tile) {
            return j < count && sees(in.branch, t0 + j, tile, in.mask(bg, t0 + j), s);
        };
        const bool keep = to.selection && may_choose(t0 + count - 1, s);
        const KeyRange tiles = tile_range(in.branch, t0, t0 + count, s);
        for (int tile = tiles.begin; tile < tiles.end; tile++)
            for (int j = 0, end; j < count; j = end) {
                for (end = j; visible(end, tile);) end++;
                if (end == j && ++end) continue;
                float* const scores =
                    room.scores.data() + (keep ? tile * room.tile_size : 0) + size_t(j) * h * kt.padded;
                forward_run(room, scores, weights_of(room, keep ? room.p.data() : scores), j, end, tile, kt(bg, tile),
                            kt.padded, vs(bg, tile), in);
            }
        finish_softmax(to, bg, t0, count, room, s);
        for (int t = t0; to.selection && t < t0 + count; t++) select_for_query(to, bg, t, t - t0, kt.padded, room, s);
    }
    // Where the softmax writes the operand of the product with the values: floats to p, pairs to room of their own.
    static float* weights_of(ForwardRoom<float>&, float* p) { return p; }
    static Bf16Pair* weights_of(ForwardRoom<Bf16Pair>& room, float*) { return room.p_room.data(); }
    // Queries j .. end-1 of a step with one tile of keys and values. p may be scores.
    template <class Element>
    static void forward_run(ForwardRoom<Element>& room, float* scores, Element* p, int j, int end, int tile,
                            const Element* keys, int padded, const Element* values, const Branches& in) {
        const NsaShape& s = in.s;
        constexpr int per = PER<Element>;
        const int D = s.D, h = s.heads_per_group(), existing = s.key_count(in.branch) - tile * tile_keys(in.branch, s);
        const KeyRange columns = columns_of(in.branch, &room.tokens[j], end - j, tile, s);
        const int n_rows = h * (end - j), n = columns.end - columns.begin,
                  n_existing = std::min(columns.end, existing) - columns.begin;
        tile_matmul(n_rows, n, D / per, {room.q_rows + size_t(j) * h * D / per, size_t(D) / per, 1},
                    keys + columns.begin, padded, scores, padded, false);
        for (int query = j; query < end; query++) {
            const KeyRange visible = visible_keys(in.branch, room.tokens[query], tile, s);
            for (int r = query * h; r < (query + 1) * h; r++) {
                const size_t at = size_t(r - j * h) * padded;
                softmax_step(p + at / per, scores + at, columns, visible, room.reference[r],
                             &room.total[size_t(r) * LANES], &room.sums[size_t(r) * D], D);
            }
        }
        tile_matmul(n_rows, D, depth_of<Element>(n_existing), {p, size_t(padded) / per, 1},
                    values + size_t(columns.begin) / per * D, D, &room.sums[size_t(j) * h * D], D, true);
    }
    // One tile's part of the softmax of a row, from the scores of `columns`, which are hidden outside the visible
    // range: p = e^(score - reference), and total [LANES] gets their sum, whose lanes are added at the end. The
    // reference is the largest score of some tile so far. Only a score that exceeds it by more than SLACK takes its
    // place, and what was summed before is rescaled; so few tiles rescale, and no weight is above e^SLACK. p may be
    // scores; as pairs it is rounded.
    static constexpr float SLACK = 8;
    template <class Element>
    static void softmax_step(Element* p, float* scores, KeyRange columns, KeyRange visible, float& reference,
                             float* total, float* sums, int D) {
        const int n = columns.end - columns.begin;
        hide(scores, n, visible.begin - columns.begin, visible.end - columns.begin);
        float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < n; i++) largest = scores[i] > largest ? scores[i] : largest;
        if (largest > reference + SLACK) {  // before the first tile there is nothing to rescale, and e^-inf = 0
            const float rescale = exponential(reference - largest);
            for (int x = 0; x < LANES; x++) total[x] *= rescale;
            for (int x = 0; x < D; x++) sums[x] *= rescale;
            reference = largest;
        }
        const float shift = reference;  // a copy that no store below can change
        FloatVector sum = *(const FloatVector*)total;
        for (int i = 0; i < n; i += LANES) {
            float weights[LANES];
#pragma omp simd
            for (int x = 0; x < LANES; x++) weights[x] = exponential(scores[i + x] - shift);
            sum += *(const FloatVector*)weights;
            if constexpr (PER<Element> == 2) round_row(p + i / 2, weights, LANES / 2);
            else std::copy_n(weights, LANES, p + i);
        }
        *(FloatVector*)total = sum;
    }

    void forward(bool bf16, const ForwardArrays& to, const Branches& in) {
        with_element(bf16, [&](auto element) {
            if (in.s.queries == 1) decode_pass<decltype(element)>(to, in);
            else forward_pass<decltype(element)>(to, in);
        });
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Decoding: one query per sequence. No other shares its keys, so packing them would cost more than the products;
    // they are read where they lie, and nothing else of the caches is touched. The same sums in the same order.

    // The queries of a token and a group, as the small operand of products with rows of keys.
    template <class Element>
    struct TokenQueries {
        const int D, h, padded;  // padded: h in whole vectors
        AlignedVector<float> rows, by_key;
        AlignedVector<Element> q, keys;  // q [D / PER][padded]; keys: a tile of them, or of values
        explicit TokenQueries(const NsaShape& s)
            : D(s.D),
              h(s.heads_per_group()),
              padded(whole_vectors(h)),
              rows(size_t(h) * D),
              by_key(size_t(std::max(TILE_KEYS, s.slc_block)) * padded),
              q(size_t(D) / PER<Element> * padded),
              keys(size_t(std::max(TILE_KEYS, s.slc_block) + 1) * D) {}
        void load(const float* from, size_t bg, const NsaShape& s) {
            load_queries(rows.data(), from, bg, &s.first, 1, s);
            std::fill(q.begin(), q.end(), Element{});
            std::vector<Element> room(size_t(h) * (D + 16));
            pack_columns(q.data(), padded, rows.data(), h, D, room.data());
        }
        // scores[head * stride + key] = q . k for `count` rows k [count][D]
        void score(float* scores, size_t stride, const float* k, int count) {
            const int depth = D / PER<Element>;
            tile_matmul(count, padded, depth, {sum_over_columns(keys.data(), k, D, count, D), size_t(depth), 1},
                        q.data(), padded, by_key.data(), padded, false);
            for (int head = 0; head < h; head++)
                for (int key = 0; key < count; key++) scores[head * stride + key] = by_key[size_t(key) * padded + head];
        }
    };
    template <class Element>
    void decode_pass(const ForwardArrays& to, const Branches& in) {
        const NsaShape& s = in.s;
#pragma omp parallel
        {
            TokenQueries<Element> queries(s);
            const int padded = whole_vectors(tile_keys(in.branch, s));
            ForwardRoom<Element> room(size_t(queries.h), 1, padded, kept_tiles(to, s), s);
#pragma omp for schedule(static)
            for (int bg = 0; bg < s.B * s.G; bg++) decode_token(to, bg, padded, room, queries, in);
        }
    }
    template <class Element>
    void decode_token(const ForwardArrays& to, int bg, int padded, ForwardRoom<Element>& room,
                      TokenQueries<Element>& queries, const Branches& in) const {
        const NsaShape& s = in.s;
        const int t = s.first, width = tile_keys(in.branch, s);
        room.tokens[0] = t;
        queries.load(in.q, bg, s);
        start_softmax(room);
        const bool keep = kept_tiles(to, s) > 0;
        const KeyRange tiles = tile_range(in.branch, t, t + 1, s);
        for (int tile = tiles.begin; tile < tiles.end; tile++) {
            if (!sees(in.branch, t, tile, in.mask(bg, t), s)) continue;
            const KeyRange visible = visible_keys(in.branch, t, tile, s);
            const size_t at = size_t(bg) * s.key_stride(in.branch) + size_t(tile) * width + visible.begin;
            float* const scores = room.scores.data() + (keep ? tile * room.tile_size : 0);
            decode_tile(room, scores, keep ? room.p.data() : scores, padded, queries, visible,
                        columns_of(in.branch, &t, 1, tile, s), in.k + at * s.D, in.v + at * s.D, s.D);
        }
        finish_softmax(to, bg, t, 1, room, s);
        if (to.selection) select_for_query(to, bg, t, 0, padded, room, s);
    }
    // k, v: from the first visible key on. p may be scores.
    template <class Element>
    static void decode_tile(ForwardRoom<Element>& room, float* scores, float* p, int padded,
                            TokenQueries<Element>& queries, KeyRange visible, KeyRange columns, const float* k,
                            const float* v, int D) {
        constexpr int per = PER<Element>;
        const int h = queries.h, count = visible.end - visible.begin, before = visible.begin - columns.begin,
                  pairs = (count + per - 1) / per;
        queries.score(scores + before, size_t(padded), k, count);
        for (size_t r = 0; r < size_t(h); r++)
            softmax_step(p + r * padded, scores + r * padded, columns, visible, room.reference[r],
                         &room.total[size_t(r) * LANES], &room.sums[r * D], D);
        const Element* const weights = sum_over_columns(room.p_room.data(), p + before, size_t(padded), h, count);
        tile_matmul(h, D, pairs, {weights, size_t(padded) / per, 1}, sum_over_rows(queries.keys.data(), v, D, count, D),
                    D, room.sums.data(), D, true);
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Backward. Work is shared out by tiles of keys, and each tile's owner sums its dk and dv. Several tiles add to a
    // row of dq: in the order of the tiles, so that the sum has one order. A tile follows the tile before it from query
    // to query; tokens_done[tile] says how far that one is.

    template <class Element>
    struct BackwardOperands {
        Tiles<Element> k, v, k_by_keys;
        Element *q, *dout;  // of pack_query_rows()
        float* sums;        // [B, G, T, h, D]: dq before the scaling
    };
    template <class Element>
    struct BackwardRoom {
        AlignedVector<Element> q, dout;
        AlignedVector<float> p, ds, dq;
        AlignedVector<Element> room, second_room;
        BackwardRoom(size_t row_count, int padded, int D)
            : q(row_count * D / PER<Element>),
              dout(row_count * D / PER<Element>),
              p(row_count * padded),
              ds(row_count * padded),
              dq(row_count * D),
              room((row_count + 1) * std::max(D, padded)),
              second_room(room.size()) {}
    };
    // How far each tile of one (sequence, group) is: it has added to the sums of the queries below tokens_done[tile].
    struct Turns {
        std::atomic<int>* tokens_done;
        int tile;
        void wait_until_past(int t) const {
            while (tile > 0 && tokens_done[tile - 1].load(std::memory_order_acquire) <= t) std::this_thread::yield();
        }
        void done_before(int t) const { tokens_done[tile].store(t, std::memory_order_release); }
    };
    template <class Element>
    void backward_pass(const Gradients& d, const Branches& in) {
        const NsaShape& s = in.s;
        const int D = s.D, h = s.heads_per_group();
        const auto query = [&](size_t bg, int i, int t) { return in.q + query_row(bg, i, t, s) * D; };
        const auto gradient = [&](size_t bg, int i, int t) { return d.dout + s.output_row(bg * h + i, t) * D; };
        const BackwardOperands<Element> x{operand_tiles<Element>(0, in.branch, in.k, D, s, OVER_D),
                                          operand_tiles<Element>(1, in.branch, in.v, D, s, OVER_D),
                                          operand_tiles<Element>(2, in.branch, in.k, D, s, OVER_KEYS),
                                          reinterpret_cast<Element*>(scratch[3].get(s.query_rows() * D)),
                                          reinterpret_cast<Element*>(scratch[4].get(s.query_rows() * D)),
                                          scratch[5].get(s.query_rows() * D)};
        const int count = x.k.count;
        std::vector<std::atomic<int>> tokens_done(size_t(s.B) * s.G * count);
        const std::vector<std::vector<int>> lists =
            in.branch == SLC ? query_lists(in, count) : std::vector<std::vector<int>>();
#pragma omp parallel
        {
            const AmxTiles registers(PER<Element> == 2);
            pack_tiles(x.k, in.branch, in.k, s, OVER_D);
            pack_tiles(x.v, in.branch, in.v, s, OVER_D);
            pack_tiles(x.k_by_keys, in.branch, in.k, s, OVER_KEYS);
            pack_query_rows(x.q, D, float(s.scale()), query, s);
            pack_query_rows(x.dout, D, 1, gradient, s);
            BackwardRoom<Element> room(size_t(h) * tile_queries(s), x.k.padded, D);
#pragma omp for schedule(static)
            for (size_t i = 0; i < s.query_rows() * D; i++) x.sums[i] = 0;
#pragma omp for collapse(2) schedule(monotonic : dynamic, 1)
            // The order of the tiles matters: a tile waits for the one before it, which some thread has begun.
            for (int tile = 0; tile < count; tile++)
                for (int bg = 0; bg < s.B * s.G; bg++)
                    backward_tile(bg, tile,
                                  in.branch == SLC ? lists[size_t(bg) * count + tile] : query_list(in.branch, tile, s),
                                  {tokens_done.data() + size_t(bg) * count, tile}, room, x, d, in);
#pragma omp for collapse(2) schedule(static)
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int t = 0; t < s.T; t++)
                    for (int head = 0; head < h; head++) {
                        const float* from = x.sums + ((size_t(bg) * s.T + t) * h + head) * D;
                        float* to = d.dq + query_row(bg, head, t, s) * D;
                        for (int i = 0; i < D; i++) to[i] = (d.add ? to[i] : 0.0f) + from[i] * float(s.scale());
                    }
        }
    }
    template <class Element>
    static void backward_tile(int bg, int tile, const std::vector<int>& list, const Turns& turns,
                              BackwardRoom<Element>& room, const BackwardOperands<Element>& x, const Gradients& d,
                              const Branches& in) {
        const NsaShape& s = in.s;
        const int width = tile_keys(in.branch, s), n_keys = std::min(width, s.key_count(in.branch) - tile * width);
        const size_t at = size_t(bg) * s.key_stride(in.branch) + size_t(tile) * width;
        std::fill_n(d.dk + at * s.D, size_t(n_keys) * s.D, 0.0f);
        std::fill_n(d.dv + at * s.D, size_t(n_keys) * s.D, 0.0f);
        const size_t most = size_t(tile_queries(s));
        for (size_t i = 0; i < list.size(); i += most) {
            const int* const tokens = &list[i];
            const int count = int(std::min(most, list.size() - i));
            const size_t ahead = std::min(list.size() - i - count, most);
            for (size_t j = 0; j < ahead; j++) prefetch_query(bg, tokens[count + j], x, s);  // of the next step
            backward_step(bg, n_keys, at, tokens, count, turns, room, x, d, in);
        }
        turns.wait_until_past(s.T - 1);
        turns.done_before(s.T);
    }
    template <class Element>
    static void prefetch_query(int bg, int t, const BackwardOperands<Element>& x, const NsaShape& s) {
        const size_t at = size_t(bg) * s.T + t, rows = size_t(s.heads_per_group()) * s.D;
        prefetch(x.q + at * rows / PER<Element>, rows / PER<Element>);
        prefetch(x.dout + at * rows / PER<Element>, rows / PER<Element>);
        prefetch(x.sums + at * rows, rows);
    }
    // The rows of a step's queries from pack_query_rows(): as they lie there, if the queries are neighbours, or copied.
    template <class Element>
    static const Element* rows_of(Element* room, const Element* operands, int D, int bg, const int* tokens, int count,
                                  const NsaShape& s) {
        const size_t rows = size_t(s.heads_per_group()) * D / PER<Element>;
        const Element* const from = operands + size_t(bg) * s.T * rows;
        if (are_neighbours(tokens, count)) return from + tokens[0] * rows;
        for (int j = 0; j < count; j++) std::copy_n(from + tokens[j] * rows, rows, room + j * rows);
        return room;
    }
    static bool are_neighbours(const int* tokens, int count) { return tokens[count - 1] - tokens[0] == count - 1; }
    static void add_rows(float* __restrict to, const float* __restrict x, int count) {
#pragma omp simd
        for (int i = 0; i < count; i++) to[i] += x[i];
    }
    // Some queries with one tile, whose first key is row `at` of dk and dv.  P' = e^(S - lse_gated), dS = P' (dP - r)
    template <class Element>
    static void backward_step(int bg, int n_keys, size_t at, const int* tokens, int count, const Turns& turns,
                              BackwardRoom<Element>& room, const BackwardOperands<Element>& x, const Gradients& d,
                              const Branches& in) {
        const NsaShape& s = in.s;
        constexpr int per = PER<Element>;
        const int tile = turns.tile, D = s.D, h = s.heads_per_group(), n_rows = h * count, padded = x.k.padded;
        const KeyRange columns = columns_of(in.branch, tokens, count, tile, s);
        const int n = columns.end - columns.begin, n_existing = std::min(columns.end, n_keys) - columns.begin;
        const size_t first = at + columns.begin;  // key
        const Element* const q = rows_of(room.q.data(), x.q, D, bg, tokens, count, s);
        const Element* const dout = rows_of(room.dout.data(), x.dout, D, bg, tokens, count, s);
        // S = q k^T, dP = dout v^T
        float *const p = room.p.data(), *const ds = room.ds.data();
        tile_matmul(n_rows, n, D / per, {q, size_t(D) / per, 1}, x.k(bg, tile) + columns.begin, padded, p, padded,
                    false);
        tile_matmul(n_rows, n, D / per, {dout, size_t(D) / per, 1}, x.v(bg, tile) + columns.begin, padded, ds, padded,
                    false);
        for (int j = 0; j < count; j++) {
            const KeyRange visible = visible_keys(in.branch, tokens[j], tile, s);
            for (int i = 0; i < h; i++) {
                const size_t row = (size_t(j) * h + i) * padded;
                backward_row(p + row, ds + row, columns, visible, query_row(bg, i, tokens[j], s), d);
            }
        }
        // dv += P'^T dout, dk += dS^T q / sqrt(D)
        const int depth = depth_of<Element>(n_rows);
        Element *const left = room.room.data(), *const right = room.second_room.data();
        tile_matmul(n_existing, D, depth, {sum_over_rows(left, p, padded, n_rows, n), 1, size_t(padded)},
                    sum_over_rows(right, dout, D, n_rows, D), D, d.dv + first * D, D, true);
        tile_matmul(n_existing, D, depth, {sum_over_rows(left, ds, padded, n_rows, n), 1, size_t(padded)},
                    sum_over_rows(right, q, D, n_rows, D), D, d.dk + first * D, D, true);
        // dq += dS k. Rows of queries that are no neighbours are added one query at a time.
        const Element* const ds_rows = sum_over_columns(left, ds, padded, n_rows, n);
        float* const sums = x.sums + (size_t(bg) * s.T + tokens[0]) * h * D;
        const bool in_place = are_neighbours(tokens, count);
        if (in_place) turns.wait_until_past(tokens[count - 1]);
        tile_matmul(n_rows, D, depth_of<Element>(n_existing), {ds_rows, size_t(padded) / per, 1},
                    x.k_by_keys(bg, tile) + size_t(columns.begin) / per * D, D, in_place ? sums : room.dq.data(), D,
                    in_place);
        if (!in_place) turns.wait_until_past(tokens[count - 1]);
        for (int j = 0; !in_place && j < count; j++)
            add_rows(sums + size_t(tokens[j] - tokens[0]) * h * D, &room.dq[size_t(j) * h * D], h * D);
        turns.done_before(tokens[count - 1] + 1);
    }
    // Scores p become P', and dP in ds becomes dS.
    static void backward_row(float* p, float* ds, KeyRange columns, KeyRange visible, size_t row, const Gradients& d) {
        const int n = columns.end - columns.begin;
        const float shift = d.lse_gated[row], dot = d.row_dot[row];
        hide(p, n, visible.begin - columns.begin, visible.end - columns.begin);
#pragma omp simd
        for (int x = 0; x < n; x++) {
            p[x] = exponential(p[x] - shift);
            ds[x] = p[x] * (ds[x] - dot);
        }
    }
};

// See lib/cpu/kernels.cpp.
#ifndef COMPILED_APART
void TiledAttention::attention_forward(bool bf16, Branch branch, float* out, float* lse, const float* q, const float* k,
                                       const float* v, const uint32_t* selection, const NsaShape& s) {
    forward(bf16, {out, lse}, {{q, k, v, selection}, branch, s});
}
void TiledAttention::attend_and_select(bool bf16, float* out, float* lse, uint32_t* selection, float* chosen_importance,
                                       const float* q, const float* kc, const float* vc, const NsaShape& s) {
    forward(bf16, {out, lse, selection, chosen_importance}, {{q, kc, vc, nullptr}, CMP, s});
}
void TiledAttention::attention_backward(bool bf16, Branch branch, const BackwardArrays<float, float>& d,
                                        const InputArrays<float>& in, const NsaShape& s) {
    with_element(bf16, [&](auto element) { backward_pass<decltype(element)>(d, {in, branch, s}); });
}
#endif
