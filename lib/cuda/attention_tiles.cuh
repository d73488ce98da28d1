// attention_tiles.cuh: what the attention kernels on tensor cores (nsa_kernels.cuh, attention_gathered.cuh) share: the
// shape they work on, which keys of a tile a query sees, and the walks over tiles of keys and of tokens.
//
// A tile of queries has as its rows all query heads of one group for a few consecutive tokens, token by token: row r is
// token r / heads, head r % heads. All of them share the tile's keys, so any number of heads per group fills the tensor
// cores; and those who multiply have few tokens, so that they can pass over keys that none of these chose. A tile of
// keys has 64 rows. Softmax is computed in base 2: 2^(c q.k - lse), c = log2(e) / sqrt(D); the lse in memory is the
// natural logarithm.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "../base/random.h"  // HOST_DEVICE
#include "../model/shape.h"
#include "attention_kernels.h"
#include "runtime.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Shape.

constexpr int MOST_TILE_TOKENS = 64;  // with more tokens the union of a tile's selections would be too large

inline Generation generation_of_device() {
    return generation_of(properties_of_device().major * 10 + properties_of_device().minor);
}
// Who multiplies: each warp its own rows by mma.sync, or the four warps of a warpgroup 64 rows together by wgmma, which
// code for sm_90a has, here for heads of 64 and 128.
enum Multiplier { WARP, WARPGROUP };
constexpr int WARPGROUP_ROWS = 64, WARPGROUP_THREADS = 128;
// Rows of a tile of queries. At D = 64 two warpgroups share a block, and two blocks a multiprocessor. At D = 128 three
// share a block, the only one, so that tiles of keys are copied once for all of them.
HOST_DEVICE constexpr int query_rows_of(const Generation& g, int D, bool backward, Multiplier by = WARP) {
    if (by == WARPGROUP) return (D <= 64 ? 2 : 3) * WARPGROUP_ROWS;
    return D <= 64 ? g.query_rows : backward ? g.dq_rows_128 : g.forward_rows_128;
}
constexpr int max_query_rows(int D, bool backward, Multiplier by) {
    int most = 0;
    for (const Generation& g : GENERATIONS) most = std::max(most, query_rows_of(g, D, backward, by));
    return most;
}
inline int query_rows_of_device(int D, bool backward, Multiplier by = WARP) {
    return query_rows_of(generation_of_device(), D, backward, by);
}
#ifdef __CUDA_ARCH__
constexpr Generation COMPILED_GENERATION = generation_of(__CUDA_ARCH__ / 10);
#elif defined(EMULATED_CAPABILITY)
constexpr Generation COMPILED_GENERATION = generation_of(EMULATED_CAPABILITY);
#else  // the host's pass over kernels
constexpr Generation COMPILED_GENERATION = GENERATIONS[0];
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool COMPILED_FOR_WGMMA = true;
#else
constexpr bool COMPILED_FOR_WGMMA = false;
#endif

// This thread's warpgroup in the block. By a shuffle the compiler knows that it is the same for all lanes.
__device__ inline int warpgroup_index() { return __shfl_sync(~0u, int(threadIdx.x) / WARPGROUP_THREADS, 0); }
// Columns of the pieces in which tiles lie in shared memory, see chunk_at: wgmma reads rows of 64.
template <int D, Multiplier by>
HOST_DEVICE constexpr int tile_columns() {
    return by == WARPGROUP && D > 64 ? 64 : D;
}
// 16-row pieces of a query tile in one warp. Two share each piece of K and V that is loaded, as long as registers
// suffice. Queries (and dout) stay in registers, but for the forward pass at D = 128, where sums and scores take 192.
// Eight warps of 255 registers fill a multiprocessor. A warpgroup reads K and V once for its four warps.
template <int D, bool BACKWARD, Multiplier by = WARP>
HOST_DEVICE constexpr int row_pieces() {
    return by == WARPGROUP || (D > 64 && BACKWARD) ? 1 : 2;
}
// Forward only.
template <int D>
HOST_DEVICE constexpr bool q_in_registers() {
    return D <= 64;
}
template <int D>
HOST_DEVICE constexpr int forward_keys() {
    return D <= 64 ? KEY_TILE : COMPILED_GENERATION.forward_keys_128;
}
template <int D, bool BACKWARD, Multiplier by = WARP>
HOST_DEVICE constexpr int tile_threads(int query_rows) {
    return query_rows / 16 / row_pieces<D, BACKWARD, by>() * 32;
}
// For __launch_bounds__, on any generation: the threads, and how many blocks share a multiprocessor.
template <int D, bool BACKWARD, Multiplier by = WARP>
constexpr int MOST_TILE_THREADS = tile_threads<D, BACKWARD, by>(max_query_rows(D, BACKWARD, by));
template <int D, bool BACKWARD, Multiplier by = WARP>
constexpr int TILE_BLOCKS = (by == WARPGROUP ? 512 : 256) / MOST_TILE_THREADS<D, BACKWARD, by>;

// Divides by a number of the shape without the 20 instructions of an integer division: i / n = i * ceil(2^31 / n) >> 31
// for all i with i * (n - 1) < 2^31.
struct Divisor {
    unsigned reciprocal = 0;
    Divisor() = default;
    explicit Divisor(int n) : reciprocal(((1u << 31) + unsigned(n) - 1) / unsigned(n)) {}
    HOST_DEVICE int of(int i) const { return int(uint64_t(unsigned(i)) * reciprocal >> 31); }
};

// What the kernels on tensor cores need of NsaShape. Index bg = b * G + g counts the groups of all sequences.
struct AttentionShape {
    int batch_groups, G, heads, H;  // B * G; groups; query heads of a group, of all groups
    Divisor by_heads, by_slc_tiles;
    int first, queries;      // positions first .. first + queries - 1
    int keys, key_stride;    // keys that the last query may see; rows of the key arrays per group
    int query_rows;          // that a tile of queries has room for
    int tile_tokens, tiles;  // tokens of a tile of queries, number of these tiles
    int l, d, window;        // compression block and stride; keys of the window
    int slc_block, slc_count, words;
    int slc_shift;           // selection block of a key within a tile: key >> slc_shift, 0 where a block fills the tile
    int slc_tiles;           // tiles of keys of a selection block, at least 1
    float scale;             // 1 / sqrt(D)
    int parts, part_tokens;  // dK and dV: how many parts the queries are cut into, and their tokens; the parts' sums
                             // are added at the end
};
// branch: whose keys; tile_tokens 0: as many tokens as fill a tile of query_rows rows, by default dQ's on this GPU
inline AttentionShape attention_shape(Branch branch, const NsaShape& s, int tile_tokens, int query_rows = 0) {
    AttentionShape a = {};
    a.batch_groups = s.B * s.G;
    a.G = s.G;
    a.heads = s.heads_per_group();
    a.H = s.H;
    a.by_heads = Divisor(a.heads);
    a.first = s.first;
    a.queries = s.queries;
    a.keys = branch == CMP ? s.cmp_blocks(s.first + s.queries) : s.first + s.queries;
    a.key_stride = branch == CMP ? s.cmp_capacity() : s.T;
    a.query_rows = query_rows || tile_tokens ? query_rows : query_rows_of_device(s.D, true);
    a.tile_tokens = tile_tokens ? tile_tokens : std::min({MOST_TILE_TOKENS, a.query_rows / a.heads, s.queries});
    a.tiles = (s.queries + a.tile_tokens - 1) / a.tile_tokens;
    a.l = s.l;
    a.d = s.d;
    a.window = s.sees_all ? s.T : s.window;
    a.slc_block = s.slc_block;
    a.slc_count = s.slc_count;
    a.words = s.window_only ? 0 : s.selection_words();
    a.slc_tiles = std::max(1, s.slc_block / KEY_TILE);
    a.by_slc_tiles = Divisor(a.slc_tiles);
    while (a.slc_shift < 6 && (1 << a.slc_shift) < s.slc_block) a.slc_shift++;
    a.scale = float(s.scale());
    a.parts = 1;
    a.part_tokens = s.queries;
    // There are few tiles of compressed keys, and most queries see each: parts of 256 tokens, up to 64 of them, and
    // beyond that 32 longer ones, because their sums take memory.
    if (branch == CMP) {
        a.part_tokens = s.queries <= 64 * 256 ? 256 : (s.queries / 32 + KEY_TILE - 1) / KEY_TILE * KEY_TILE;
        a.parts = (s.queries + a.part_tokens - 1) / a.part_tokens;
    }
    return a;
}
HOST_DEVICE inline int key_tiles(const AttentionShape& a) { return (a.keys + KEY_TILE - 1) / KEY_TILE; }

// For these branches, bits.
inline void check_attention_shape(unsigned branches, const NsaShape& s) {
    if (const int most = query_rows_of_device(s.D, true);
        s.heads_per_group() * s.G != s.H || s.heads_per_group() > most)
        fail_usage("%d query heads in %d groups: the CUDA attention wants 1 to %d query heads for each group", s.H, s.G,
                   most);
    if (branches >> SLC & 1 && s.slc_block != 16 && s.slc_block != 32 &&
        (s.slc_block < KEY_TILE || s.slc_block % KEY_TILE))
        fail_usage(
            "selection blocks of %d tokens: the CUDA attention has 16, 32 and multiples of 64; choose one of them, or "
            "the CPU",
            s.slc_block);
    if (branches != 1u << WIN && s.slc_block % s.d)
        fail_usage(
            "selection blocks of %d tokens and compression blocks every %d: the CUDA attention wants a multiple; "
            "choose one, or the CPU",
            s.slc_block, s.d);
}
// Calls f(std::integral_constant<int, D>()) for the head dimension, one of those that the table has for tensor cores.
template <int D = 8, class F>
inline void with_head_dimension(int dimension, F f) {
    constexpr unsigned all = ATTENTION_KERNELS[TENSOR_CORES_KERNEL].head_dimensions;
    if constexpr ((all & unsigned(D)) != 0)
        if (dimension == D) return f(std::integral_constant<int, D>());
    if constexpr (unsigned(D) < all) return with_head_dimension<2 * D>(dimension, f);
    std::string have;
    for (int each = 1; unsigned(each) <= all; each *= 2)
        if (all & unsigned(each)) have += (have.empty() ? "" : ", ") + std::to_string(each);
    fail_usage(
        "a head dimension of %d: the attention on tensor cores has %s; choose one of them, --attention-kernel %s, or "
        "the CPU",
        dimension, have, ATTENTION_KERNELS[PLAIN_KERNEL].name);
}
// Calls f(std::integral_constant<Multiplier, by>()) for who multiplies heads of dimension D.
template <int D, class F>
inline void with_multiplier(bool warpgroups, F f) {
    if constexpr (has_warpgroups(D))
        if (warpgroups) return f(std::integral_constant<Multiplier, WARPGROUP>());
    f(std::integral_constant<Multiplier, WARP>());
}
// These bytes, where a block can have them: head dimensions of 128 do not fit on every GPU.
inline size_t check_shared_bytes(size_t bytes, int D, size_t max_shared = max_shared_of_device()) {
    if (bytes > max_shared)
        fail_usage(
            "a head dimension of %d: attention takes %d bytes of shared memory for a block, this GPU has %d; choose "
            "--head-dim 64, or --attention-kernel plain",
            D, bytes, max_shared);
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Which keys a query sees: lib/model/visible.h, taken apart into the bounds that tiles are compared with.

// The query at position t sees no key from this one on.
template <Branch branch>
__device__ inline int end_of_keys(int t, const AttentionShape& s) {
    return branch == CMP ? blocks_within(t + 1, s.l, s.d) : t + 1;
}
// No query before this position sees the key.
template <Branch branch>
__device__ inline int first_query(int key, const AttentionShape& s) {
    return branch == CMP ? last_token(key, s.l, s.d) : key;
}
// Whether the query at position t sees the key, provided that it chose the key's selection block.
template <Branch branch>
__device__ inline bool query_sees(int t, int key, const AttentionShape& s) {
    return first_query<branch>(key, s) <= t && (branch != WIN || t < key + s.window);
}

// A token's choice among the selection blocks of a tile of keys, as bits: bit i stands for the i-th of them. A
// selection block of 64 or more tokens is the only one in each of its tiles.
__device__ inline int blocks_per_tile(const AttentionShape& s) { return KEY_TILE >> s.slc_shift; }
struct TileBlocks {
    int word, bit;  // where the bits of the tile's blocks are in a token's bitmask
    unsigned all;   // a bit for each of them
};
__device__ inline TileBlocks tile_blocks(int tile, const AttentionShape& s) {
    const int block = s.by_slc_tiles.of(tile) * blocks_per_tile(s);  // the divisor or the factor is 1
    return {block / 32, block % 32, (1u << blocks_per_tile(s)) - 1};
}
// selected: the bitmasks of a tile of tokens (at most 64, so 32 bits are enough for the index)
__device__ inline unsigned chosen_blocks(const uint32_t* selected, int token, const TileBlocks& blocks,
                                         const AttentionShape& s) {
    return selected[token * s.words + blocks.word] >> blocks.bit & blocks.all;
}
// The same for KEYS keys from a tile on. Beyond the last tile there may be no bitmask.
template <int KEYS>
__device__ inline unsigned chosen_of_keys(const uint32_t* selected, int token, int tile, const AttentionShape& s) {
    unsigned chosen = chosen_blocks(selected, token, tile_blocks(tile, s), s);
#pragma unroll
    for (int i = 1; i < KEYS / KEY_TILE && (tile + i) * KEY_TILE < s.keys; i++)
        chosen |= chosen_blocks(selected, token, tile_blocks(tile + i, s), s) << i * blocks_per_tile(s);
    return chosen;
}

// Words of a bitmask over the 64-row tiles of this many rows.
HOST_DEVICE inline int tile_words(int rows) { return (rows + KEY_TILE * 32 - 1) / (KEY_TILE * 32); }
// The next tile in [tile, end) to visit; `end` or more if there is none. The selected branch visits the tiles whose bit
// is set in one of the bitmasks `used` [words, MASKS], the others visit all.
template <Branch branch, int MASKS = 1>
__device__ inline int next_tile(const uint32_t* used, int tile, int end) {
    while (branch == SLC && tile < end) {
        uint32_t any = 0;
#pragma unroll
        for (int mask = 0; mask < MASKS; mask++) any |= used[tile / 32 * MASKS + mask];
        const uint32_t rest = any >> tile % 32;
        if (rest) return tile + __ffs(int(rest)) - 1;
        tile = (tile / 32 + 1) * 32;
    }
    return tile;
}
// used [words, MASKS] = bitmasks over tiles of keys: whether one of the tile's `tokens` tokens, whose bitmasks are
// `selected`, chose a block in it; with several masks, one of those that a warpgroup has rows of. The block's threads
// share the work; a barrier must follow.
template <int MASKS = 1>
__device__ inline void find_used_key_tiles(uint32_t* used, const uint32_t* selected, int tokens, int tiles,
                                           const AttentionShape& s) {
    const int lane = threadIdx.x % 32;
    for (int item = threadIdx.x / 32; item / MASKS * 32 < tiles; item += blockDim.x / 32) {
        const int word = item / MASKS, first_row = item % MASKS * WARPGROUP_ROWS;
        const int first = MASKS == 1 ? 0 : s.by_heads.of(first_row);
        const int end = MASKS == 1 ? tokens : min(tokens, s.by_heads.of(first_row + WARPGROUP_ROWS - 1) + 1);
        unsigned bits = 0;
        if (s.slc_block == KEY_TILE) {  // a block is a tile, so a token's word is the tiles': two tokens per lane
            if (first + lane < end) bits = selected[(first + lane) * s.words + word];
            if (first + lane + 32 < end) bits |= selected[(first + lane + 32) * s.words + word];
            bits = __reduce_or_sync(~0u, bits);
        } else {  // a lane per tile
            const int tile = word * 32 + lane;
            const TileBlocks blocks = tile_blocks(tile, s);
            for (int j = first; j < end && tile < tiles; j++) bits |= chosen_blocks(selected, j, blocks, s);
            bits = __ballot_sync(~0u, bits != 0);
        }
        if (lane == 0) used[item] = bits;
    }
}
// used = bitmask over tiles of tokens: whether one of the tile's tokens chose a block in KEYS keys from tile `key_tile`
// on. selected: the bitmasks of all tokens. A barrier must follow.
template <int KEYS>
__device__ inline void find_used_token_tiles(uint32_t* used, const uint32_t* selected, int key_tile,
                                             const AttentionShape& s) {
    const int lane = threadIdx.x % 32, tiles = (s.queries + KEY_TILE - 1) / KEY_TILE, step = int(blockDim.x);
    for (int word = threadIdx.x; word * 32 < tiles; word += step) used[word] = 0;
    __syncthreads();
    // A warp takes 32 tokens at a time and asks for four such at once. Tokens before the keys have not chosen them.
    const int before = max(key_tile * KEY_TILE - s.first, 0) / 32 * 32;
    for (int first = before + int(threadIdx.x) / 32 * 32; first < s.queries; first += 4 * step) {
        unsigned chosen[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = first + i * step + lane;
            chosen[i] = j < s.queries ? chosen_of_keys<KEYS>(selected + size_t(j) * s.words, 0, key_tile, s) : 0;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int tile = (first + i * step) / KEY_TILE;
            if (__any_sync(~0u, chosen[i] != 0) && lane == 0) atomicOr(used + tile / 32, 1u << tile % 32);
        }
    }
}

// Which keys a query sees, counted from some key of a tile: begin .. end-1.
struct Visible {
    int begin, end;
};
// end: the query's end_of_keys, counted from the same key. chosen: whether the query chose the selection block that the
// keys belong to.
template <Branch branch>
__device__ inline Visible visible_keys(int end, bool chosen, const AttentionShape& s) {
    return {branch == WIN ? end - s.window : 0, branch != SLC || chosen ? end : 0};
}
__device__ inline bool sees_all(const Visible& v, int keys) { return v.begin <= 0 && v.end >= keys; }
__device__ inline bool sees_some(const Visible& v, int keys) { return v.begin < keys && v.end > 0 && v.begin < v.end; }
__device__ inline bool sees(const Visible& v, int key) { return v.begin <= key && v.end > key; }

// ---------------------------------------------------------------------------------------------------------------------
// A tile of queries.

// The tile of this block. Later tiles have more keys and start first.
struct QueryTile {
    int bg, j0, tokens;  // group; first token, counted from s.first; how many there are
};
__device__ inline QueryTile query_tile(const AttentionShape& s, int block = int(blockIdx.x)) {
    const int tile = s.tiles - 1 - block / s.batch_groups, j0 = tile * s.tile_tokens;
    return {block % s.batch_groups, j0, min(s.tile_tokens, s.queries - j0)};
}
// Which query a row of the tile is, if any.
struct RowOfTile {
    int head, token;
    bool query;
};
__device__ inline RowOfTile row_of_tile(const QueryTile& tile, int row, const AttentionShape& s) {
    const int token = s.by_heads.of(row);
    return {row - token * s.heads, token, token < tile.tokens};
}
// Row of [B, H, queries] for a query of the tile
__device__ inline long long row_of_query(const QueryTile& tile, int head, int token, const AttentionShape& s) {
    return ((long long)tile.bg * s.heads + head) * s.queries + tile.j0 + token;
}
// How many rows of arrays [branches, B, H, queries] lie before those of a branch, in arrays that begin with `first`.
__device__ inline size_t rows_before_branch(Branch branch, int first, const AttentionShape& s) {
    return size_t(branch - first) * s.batch_groups * s.heads * s.queries;
}
// Where the tile's first row begins in q [B, H, queries, D] and in dout [B, queries, H, D]
template <int D>
__device__ inline size_t q_offset(const QueryTile& tile, const AttentionShape& s) {
    return (size_t(tile.bg) * s.heads * s.queries + tile.j0) * D;
}
template <int D>
__device__ inline size_t dout_offset(const QueryTile& tile, const AttentionShape& s) {
    return ((size_t(tile.bg / s.G) * s.queries + tile.j0) * s.H + size_t(tile.bg % s.G) * s.heads) * D;
}
// to = the rows of a tile of queries, from heads and tokens that are head_stride and token_stride elements apart
template <int D, int COLUMNS = D>
__device__ inline void copy_queries(bf16* to, const bf16* in, size_t head_stride, size_t token_stride, int rows,
                                    const QueryTile& tile, const AttentionShape& s) {
    for (int i = threadIdx.x; i < rows * (D / 8); i += blockDim.x) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        const RowOfTile r = row_of_tile(tile, row, s);
        cp_async_16(to + chunk_at<D, COLUMNS>(row, chunk),
                    r.query ? in + r.head * head_stride + r.token * token_stride + chunk * 8 : in, r.query);
    }
}

// Of every 16-row piece m a lane owns rows lane / 4 (i = 0) and lane / 4 + 8 (i = 1). One register holds a byte for
// each: lane 13 with M = 2 has rows 3, 11, 19 and 27, and if their bytes are 4, 12, 20 and 28, the register is
// 0x1c140c04.
__device__ inline int row_byte(unsigned bytes, int m, int i) { return int(bytes >> (m * 16 + i * 8) & 255); }
// The rows' end_of_keys as differences from that of the tile's first token, which are below 64; NO_QUERY for rows that
// are no query.
constexpr int NO_QUERY = 255;
template <Branch branch, int M>
__device__ inline unsigned ends_of_rows(const QueryTile& tile, int first_row, const AttentionShape& s) {
    unsigned bytes = 0;
    const int lane_row = int(indices_again().thread % 32 / 4);  // kept from branch to branch it would be spilled
    for (int m = 0; m < M; m++)
        for (int i = 0; i < 2; i++) {
            const RowOfTile r = row_of_tile(tile, first_row + m * 16 + i * 8 + lane_row, s);
            const int t0 = s.first + tile.j0;
            const int difference = end_of_keys<branch>(t0 + r.token, s) - end_of_keys<branch>(t0, s);
            bytes |= unsigned(r.query ? difference : NO_QUERY) << (m * 16 + i * 8);
        }
    return bytes;
}
__device__ inline int end_of_row(int first_end, unsigned ends, int m, int i) {
    const int difference = row_byte(ends, m, i);
    return difference == NO_QUERY ? 0 : first_end + difference;
}
// What the rows of a warp see of a tile of keys. In the selected branch most tiles are seen whole by some rows and not
// at all by the others; those others are `hidden` as rows, which costs nothing per key.
struct TileView {
    int first_end;    // of the tile of queries, counted from the tile's first key; used with `ends`, see ends_of_rows
    bool some;        // whether a row of the warp sees a key
    bool masked;      // whether a row of the warp that is not hidden sees only a part
    unsigned blocks;  // chosen_blocks of this lane's rows, a byte each
    template <Branch branch>
    __device__ bool hidden(int m, int i) const {
        return branch == SLC && row_byte(blocks, m, i) == 0;
    }
};
// selected: the bitmasks of the tile of queries.
template <Branch branch, int M>
__device__ inline TileView look_at_tile(int key_tile, int first_end, unsigned ends, const uint32_t* selected,
                                        const AttentionShape& s) {
    TileView view = {first_end - key_tile * KEY_TILE, false, false, 0};
    const TileBlocks blocks = branch == SLC ? tile_blocks(key_tile, s) : TileBlocks{0, 0, 0};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = row_byte(ends, m, i);  // for SLC: there a token's end is its place + 1
            const bool query = token != NO_QUERY;
            const unsigned chosen = branch == SLC && query ? chosen_blocks(selected, token, blocks, s) : 0;
            view.blocks |= chosen << (m * 16 + i * 8);
            const Visible visible = visible_keys<branch>(end_of_row(view.first_end, ends, m, i), chosen, s);
            const bool all = sees_all(visible, KEY_TILE) && (branch != SLC || chosen == blocks.all);
            view.some = view.some || sees_some(visible, KEY_TILE);
            view.masked = view.masked || (query && !all && !view.hidden<branch>(m, i));
        }
    view.some = __any_sync(~0u, view.some);
    view.masked = __any_sync(~0u, view.masked);
    return view;
}
// The scores p of keys first .. first + 8 N - 1 of a tile become -infinity where the row does not see the key; the
// exponential turns that into 0.
template <Branch branch, int M, int N>
__device__ inline void hide_keys(float (&p)[M][N][4], const TileView& view, int first, unsigned ends,
                                 const AttentionShape& s) {
#pragma unroll
    for (int part = 0; part < N; part += 2)  // 16 keys, which belong to one selection block
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = first + part * 8;
                const bool chosen = row_byte(view.blocks, m, i) >> (key >> s.slc_shift) & 1;
                const Visible visible = visible_keys<branch>(end_of_row(view.first_end - key, ends, m, i), chosen, s);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (!sees(visible, n * 8 + threadIdx.x % 4 * 2 + e)) p[m][part + n][2 * i + e] = -INFINITY;
            }
}
// The tiles of keys that some query of the tile may see: begin .. end-1.
template <Branch branch>
__device__ inline int first_key_tile(const QueryTile& tile, const AttentionShape& s) {
    return branch == WIN ? max(0, s.first + tile.j0 + 1 - s.window) / KEY_TILE : 0;
}
template <Branch branch>
__device__ inline int end_of_key_tiles(const QueryTile& tile, const AttentionShape& s) {
    return (end_of_keys<branch>(s.first + tile.j0 + tile.tokens - 1, s) + KEY_TILE - 1) / KEY_TILE;
}

// ---------------------------------------------------------------------------------------------------------------------
// The walk over tiles of keys: forward and dQ, by masked tiles and by gathered rows.

// Buffers for a tile of keys and one of values. With three a warpgroup multiplies by the values of one tile and the
// keys of the next at the same time.
template <bool BACKWARD, Multiplier by = WARP>
HOST_DEVICE constexpr int key_buffers() {
    return by == WARPGROUP && !BACKWARD ? 3 : 2;
}
// Keys and values of one (sequence, group), and the buffers in shared memory for their tiles.
template <int D, bool BACKWARD, Multiplier by = WARP>
struct KeyBuffers {
    bf16 *k_tiles, *v_tiles;
    const bf16 *k, *v;
    int group_row;  // of k and v, where the (sequence, group) begins

    // Starts to copy a tile of keys and one of values, as one group of copies.
    __device__ void copy(int buffer, int key_tile, const AttentionShape& s) const {
        // Most blocks have this size, which gives a whole tile fixed distances.
        constexpr int THREADS = tile_threads<D, BACKWARD, by>(query_rows_of(COMPILED_GENERATION, D, BACKWARD, by));
        constexpr int COLUMNS = tile_columns<D, by>();
        const int valid = s.keys - key_tile * KEY_TILE, chunk = threadIdx.x % (D / 8);
        const size_t from = size_t(group_row + key_tile * KEY_TILE) * D;
        if (blockDim.x == THREADS && valid >= KEY_TILE) {
            copy_tile<D, THREADS, COLUMNS>(k_tiles + buffer * KEY_TILE * D, k + from, D, KEY_TILE);
            copy_tile<D, THREADS, COLUMNS>(v_tiles + buffer * KEY_TILE * D, v + from, D, KEY_TILE);
            return cp_async_commit();
        }
        for (int row = threadIdx.x / (D / 8); row < KEY_TILE; row += blockDim.x / (D / 8)) {
            const int to = buffer * KEY_TILE * D + chunk_at<D, COLUMNS>(row, chunk);
            const size_t at = from + (row < valid ? row * D + chunk * 8 : 0);
            cp_async_16(k_tiles + to, k + at, row < valid);
            cp_async_16(v_tiles + to, v + at, row < valid);
        }
        cp_async_commit();
    }
};
// Calls visit(key_tile, k_tile, v_tile) for key_tile, which is being copied into buffer 0, and for those that next_tile
// finds after it. While one is used, the next one arrives in the other buffer.
template <Branch branch, int D, bool BACKWARD, class Visit>
__device__ inline void for_key_tiles(const KeyBuffers<D, BACKWARD>& keys, const uint32_t* used, int key_tile,
                                     int end_tile, const AttentionShape& s, Visit visit) {
    for (int buffer = 0; key_tile < end_tile; buffer ^= 1) {
        const int this_tile = key_tile;
        key_tile = next_tile<branch>(used, key_tile + 1, end_tile);
        cp_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the last tile
        if (key_tile < end_tile) keys.copy(buffer ^ 1, key_tile, s);
        visit(this_tile, keys.k_tiles + buffer * KEY_TILE * D, keys.v_tiles + buffer * KEY_TILE * D);
    }
}

// The rows of a tile of queries in the block that owns it, of the forward and the dQ kernel by masked tiles; each of
// its warps has some of them. BACKWARD: dQ, which needs the rows of dout too.
template <int D, bool BACKWARD, Multiplier by = WARP>
struct QueryRows {
    static constexpr int M = row_pieces<D, BACKWARD, by>();
    static constexpr int BUFFERS = key_buffers<BACKWARD, by>(), COLUMNS = tile_columns<D, by>();
    static constexpr int MASKS = by == WARPGROUP ? query_rows_of(GENERATIONS[0], D, BACKWARD, by) / WARPGROUP_ROWS : 1;
    QueryTile tile;
    int first_row;  // of the warp
    bf16 *k_tiles, *v_tiles, *q_tile, *dout_tile;
    uint32_t* used;  // tiles of keys of the selected branch, see find_used_key_tiles

    // Where they are. Every branch asks again, so that the walks of others need not keep it in registers.
    __device__ explicit QueryRows(const AttentionShape& s) {
        const Indices again = indices_again();
        tile = query_tile(s, int(again.block));
        first_row = int(again.thread) / 32 * 16 * M;
        DynamicShared shared;
        k_tiles = shared.take<bf16>(BUFFERS * KEY_TILE * D);
        v_tiles = shared.take<bf16>(BUFFERS * KEY_TILE * D);
        const int tile_rows =  // a constant where it is in an address of the walk
            by == WARPGROUP ? query_rows_of(COMPILED_GENERATION, D, BACKWARD, by) : s.query_rows;
        q_tile = shared.take<bf16>(tile_rows * D);
        dout_tile = nullptr;
        if constexpr (BACKWARD) dout_tile = shared.take<bf16>(tile_rows * D);
        used = shared.take<uint32_t>(MASKS * tile_words(s.first + s.queries));
    }
    // Starts to copy them. dout: not read in the forward pass. selects: finds the tiles that the selected branch uses.
    __device__ void copy(const bf16* q, const bf16* dout, bool selects, const uint32_t* all_selections,
                         const AttentionShape& s) const {
        const int rows = blockDim.x / 32 * 16 * M;
        if (selects)  // first, since its loads have nothing to do meanwhile but to wait
            find_used_key_tiles<MASKS>(used, all_selections + (size_t(tile.bg) * s.queries + tile.j0) * s.words,
                                       tile.tokens, end_of_key_tiles<SLC>(tile, s), s);
        copy_queries<D, COLUMNS>(q_tile, q + q_offset<D>(tile, s), size_t(s.queries) * D, D, rows, tile, s);
        if constexpr (BACKWARD)
            copy_queries<D, COLUMNS>(dout_tile, dout + dout_offset<D>(tile, s), D, size_t(s.H) * D, rows, tile, s);
        cp_async_commit();
        if (selects) __syncthreads();
    }
    // This lane's row i of piece m: its place in the tile, and that of its query, if it is one, in the model.
    struct Row {
        int place;
        long long row;     // of [B, H, queries], or -1
        int token;         // its position, counted from s.first; 0 where there is none
        size_t token_row;  // row of [B, queries]
        int head;
    };
    __device__ Row row(int m, int i, const AttentionShape& s) const {
        // Computed again, so that nothing of it stays in registers throughout the walk.
        const Indices again = indices_again();
        const int place = int(again.thread / 32 * M + m) * 16 + i * 8 + int(again.thread % 32 / 4);
        const QueryTile tile = query_tile(s, int(again.block));
        const RowOfTile r = row_of_tile(tile, place, s);
        const int token = r.query ? tile.j0 + r.token : 0;
        return {place, r.query ? row_of_query(tile, r.head, r.token, s) : -1, token,
                size_t(tile.bg / s.G) * s.queries + token, tile.bg % s.G * s.heads + r.head};
    }
    // Of the block: as many warps, or warpgroups, as the tile's rows fill.
    static unsigned threads(const AttentionShape& s) {
        constexpr int rows = by == WARPGROUP ? WARPGROUP_ROWS : 16 * M;
        return unsigned((s.heads * s.tile_tokens + rows - 1) / rows * (rows / (16 * M)) * 32);
    }
    // Of shared memory.
    static size_t bytes(const AttentionShape& s) {
        const size_t query_tile = size_t(s.query_rows) * D * sizeof(bf16);
        const size_t key_tiles = BUFFERS * KEY_TILE * D * sizeof(bf16);
        const size_t bytes = shared_bytes({key_tiles, key_tiles, query_tile, BACKWARD ? query_tile : 0,
                                           MASKS * tile_words(s.first + s.queries) * sizeof(uint32_t)});
        return check_shared_bytes(bytes, D);
    }
};
// The same with the keys of a branch: the block walks the tiles that one of its queries may see.
template <Branch branch, int D, bool BACKWARD, Multiplier by = WARP>
struct QueryBlock : QueryRows<D, BACKWARD, by> {
    using Rows = QueryRows<D, BACKWARD, by>;
    using Rows::M, Rows::MASKS, Rows::tile, Rows::used;
    int end_tile;               // where the tiles of keys end
    int first_end;              // end_of_keys of the tile's first token
    unsigned ends;              // of this lane's rows, see ends_of_rows
    const uint32_t* selection;  // of the tile's tokens
    KeyBuffers<D, BACKWARD, by> keys;

    __device__ QueryBlock(const bf16* k, const bf16* v, const uint32_t* all_selections, const AttentionShape& s)
        : Rows(s) {
        selection = branch == SLC ? all_selections + (size_t(tile.bg) * s.queries + tile.j0) * s.words : nullptr;
        end_tile = end_of_key_tiles<branch>(tile, s);
        keys = {this->k_tiles, this->v_tiles, k, v, tile.bg * s.key_stride};
    }
    // The first tile of keys from this one on that the block visits; end_tile or more: there is none.
    __device__ int next(int key_tile) const { return next_tile<branch, MASKS>(used, key_tile, end_tile); }
    // Whether this warpgroup has a query that chose something of a tile that the block visits.
    __device__ bool uses(int key_tile) const {
        return branch != SLC || used[key_tile / 32 * MASKS + warpgroup_index()] >> key_tile % 32 & 1;
    }
    // Starts to copy the first tile of keys, which it returns, and waits for the queries.
    __device__ int start(const AttentionShape& s) {
        const int key_tile = next(first_key_tile<branch>(tile, s));
        if (key_tile >= end_tile) cp_async_commit();  // an empty group
        else keys.copy(0, key_tile, s);
        cp_async_wait<1>();
        if (by == WARPGROUP) async_fence();
        __syncthreads();  // the queries have arrived
        first_end = end_of_keys<branch>(s.first + tile.j0, s);
        ends = ends_of_rows<branch, M>(tile, this->first_row, s);
        return key_tile;
    }
    // Calls visit(view, k_tile, v_tile) for each tile of keys of which this warp sees something.
    template <class Visit>
    __device__ void walk(int key_tile, const AttentionShape& s, Visit visit) const {
        for_key_tiles<branch>(
            keys, used, key_tile, end_tile, s, [&](int this_tile, const bf16* k_tile, const bf16* v_tile) {
                const TileView view = look_at_tile<branch, M>(this_tile, first_end, ends, selection, s);
                if (view.some) visit(view, k_tile, v_tile);
            });
    }
};

// Makes row_dot, lse_gated and dgate of row `at` of [branches, B, H, queries], if it `exists`, as
// Cpu::attention_backward_rows does; returns -lse_gated in base 2, and row_dot. The row's dout is in a row of the tile.
// Four neighbouring lanes have a row, and one of them stores.
template <int D, int COLUMNS = D>
__device__ inline float2 make_row_terms(const LayerGradients<bf16, float>& d, const LayerInputs<bf16, float>& in,
                                        size_t at, bool exists, const bf16* dout_tile, int row) {
    float dot = 0;
    for (int chunk = threadIdx.x % 4; chunk < D / 8 && exists; chunk += 4) {
        float a[8], b[8];
        kernels::load(a, dout_tile + chunk_at<D, COLUMNS>(row, chunk));
        kernels::load(b, in.o + at * D + chunk * 8);
#pragma unroll
        for (int k = 0; k < 8; k++) dot += a[k] * b[k];
    }
    dot = row_sum(dot);
    if (!exists) return make_float2(-INFINITY, 0);
    const float g = in.gate ? in.gate[at] : 1, shift = in.lse[at] - logf(g);
    if (threadIdx.x % 4 == 0) {
        d.row_dot[at] = dot;
        d.lse_gated[at] = shift;
        if (in.gate) d.dgate[at] = dot * g * (1 - g);
    }
    return make_float2(-shift * LOG2_E, dot);
}

// ---------------------------------------------------------------------------------------------------------------------
// dK and dV: the keys stay in registers, and the tokens go by in tiles of 64, once for each head. S^T = k q^T and v
// dout^T are left in registers just as the next products need them.

// Pieces of 16 keys in a warp: two share each piece of q and dout that is loaded.
template <int D, Multiplier by = WARP>
HOST_DEVICE constexpr int key_pieces() {
    return by == WARPGROUP || D > 64 ? 1 : 2;
}
// Keys of a block. Twice as many read q and dout half as often, which pays where the same tokens see them. A window's
// keys and compressed ones are seen at different times, so that warps would wait for one another; and at D = 128 GPUs
// with 99 KB of shared memory have no room for them. A warpgroup has 64. At D = 64 it has a block of its own, and three
// share a multiprocessor. At D = 128 there is room for two, and they share a block: at the rate of wgmma L2 could not
// give q and dout to each of them.
template <Branch branch, int D, Multiplier by = WARP>
HOST_DEVICE constexpr int dkdv_keys() {
    const bool twice = by == WARPGROUP ? D > 64 : branch == SLC && D <= 64;
    return twice ? 2 * KEY_TILE : KEY_TILE;
}
template <int D, int KEYS, Multiplier by = WARP>
HOST_DEVICE constexpr int dkdv_threads() {
    return KEYS / 16 / key_pieces<D, by>() * 32;
}
// How many blocks share a multiprocessor, for __launch_bounds__: threads have 255 registers, but at D = 64 those of
// warpgroups 168.
template <int D, int KEYS, Multiplier by = WARP>
HOST_DEVICE constexpr int dkdv_blocks() {
    return (by == WARPGROUP && D <= 64 ? 384 : 256) / dkdv_threads<D, KEYS, by>();
}
// Selection blocks of so many keys, at most.
HOST_DEVICE constexpr int sub_blocks(Branch branch, int keys) { return branch == SLC ? keys / 16 : 1; }
// Whether V stays in shared memory, for lack of registers
template <int D>
HOST_DEVICE constexpr bool keeps_v() {
    return D > 32;
}

// lse_gated and row_dot of the rows of a tile of tokens (one head), in shared memory, for each of the two buffers. A
// token that does not exist, or did not choose the selection block, has a shift that makes its weights 0.
template <Branch branch, int D, int KEYS, Multiplier by = WARP>
struct RowStatistics {
    static constexpr int BLOCKS = sub_blocks(branch, KEYS);
    static constexpr int THREADS = dkdv_threads<D, KEYS, by>();
    static constexpr int OWN = THREADS == KEY_TILE ? 2 : 1;  // numbers of a thread
    float* minus_shift;  // [2, BLOCKS, KEY_TILE]: -lse_gated in base 2, or -infinity
    float* dot;          // [2, KEY_TILE]: row_dot
    // Of this thread's row, on the way into shared memory: the first KEY_TILE threads have the row's shift, the next
    // its dot, and where there are no more threads, the first have both. Threads behind those have none.
    float own[OWN] = {};
    // The selection blocks that its token chose, from this bit on; kept while the heads go by. Whatever is loaded is
    // first looked at in store(), after the products.
    unsigned chosen = ~0u;
    int bit = 0;

    __device__ static int own_row() { return threadIdx.x % KEY_TILE; }
    __device__ static bool is_dot(int n) { return OWN == 1 ? threadIdx.x >= KEY_TILE : n == 1; }
    __device__ static bool has_none() { return THREADS > 2 * KEY_TILE && threadIdx.x >= 2 * KEY_TILE; }
    // row: of [B, H, queries], if it is a query
    __device__ void load(bool query, int row, const float* lse_gated, const float* row_dot) {
        if (has_none()) return;
#pragma unroll
        for (int n = 0; n < OWN; n++)
            if (is_dot(n)) own[n] = query ? row_dot[row] : 0;
            else own[n] = query ? lse_gated[row] : INFINITY;
    }
    // selected: the bitmask of the row's token; key_tile: the first of the block's
    __device__ void choose(const uint32_t* selected, int key_tile, const AttentionShape& s) {
        if constexpr (by == WARPGROUP && KEYS == KEY_TILE) {
            const TileBlocks blocks = tile_blocks(key_tile, s);
            chosen = selected[blocks.word];
            bit = blocks.bit;
        } else {
            chosen = chosen_of_keys<KEYS>(selected, 0, key_tile, s);
        }
    }
    __device__ void store(int buffer, const AttentionShape& s) const {
        if (has_none()) return;
        if (is_dot(OWN - 1)) dot[buffer * KEY_TILE + own_row()] = own[OWN - 1];
        if (is_dot(0)) return;
        const float shift = -own[0] * LOG2_E;
#pragma unroll 1
        for (int sub = 0; sub < (branch == SLC ? KEYS / KEY_TILE * blocks_per_tile(s) : 1); sub++)
            minus_shift[(buffer * BLOCKS + sub) * KEY_TILE + own_row()] = chosen >> (bit + sub) & 1 ? shift : -INFINITY;
    }
};

// The shared memory of a block that owns KEYS keys: two buffers for tiles of q and dout and for their statistics. The
// keys pass through these buffers on their way into registers.
template <Branch branch, int D, int KEYS, Multiplier by = WARP>
struct TokenBuffers {
    static constexpr int THREADS = dkdv_threads<D, KEYS, by>(), COLUMNS = tile_columns<D, by>();
    static constexpr bool KEEPS_K = by == WARPGROUP, KEEPS_V = keeps_v<D>();
    bf16 *q_tiles, *dout_tiles, *k_tile, *v_tile;
    RowStatistics<branch, D, KEYS, by> rows;

    // Tiles first, since wgmma's begin at multiples of 1024 bytes.
    __device__ explicit TokenBuffers(DynamicShared& shared) {
        q_tiles = shared.take<bf16>(2 * KEY_TILE * D);
        dout_tiles = shared.take<bf16>(2 * KEY_TILE * D);
        k_tile = KEEPS_K ? shared.take<bf16>(KEYS * D) : q_tiles;
        v_tile = KEEPS_V ? shared.take<bf16>(KEYS * D) : dout_tiles;
        rows.minus_shift = shared.take<float>(2 * rows.BLOCKS * KEY_TILE);
        rows.dot = shared.take<float>(2 * KEY_TILE);
    }
    // Their bytes.
    static size_t bytes() {
        const size_t tiles = 2 * KEY_TILE * D * sizeof(bf16), statistics = 2 * KEY_TILE * sizeof(float);
        const size_t keys = KEYS * D * sizeof(bf16);
        return shared_bytes(
            {tiles, tiles, KEEPS_K ? keys : 0, KEEPS_V ? keys : 0, statistics * sub_blocks(branch, KEYS), statistics});
    }
    __device__ void copy_keys(const bf16* k, const bf16* v, int bg, int first_key, const AttentionShape& s) {
        const size_t group = size_t(bg * s.key_stride + first_key) * D;
#pragma unroll
        for (int i = 0; i < KEYS; i += KEY_TILE) {
            copy_tile<D, THREADS, COLUMNS>(k_tile + i * D, k + group + i * D, D, s.keys - first_key - i);
            copy_tile<D, THREADS, COLUMNS>(v_tile + i * D, v + group + i * D, D, s.keys - first_key - i);
        }
        cp_async_commit();
    }
};

// The keys of a warp as A fragments (or in shared memory), and their sums.
template <Branch branch, int D, int KEYS, Multiplier by = WARP>
struct WarpKeys {
    using Buffers = TokenBuffers<branch, D, KEYS, by>;
    static constexpr int M = key_pieces<D, by>();
    // at a time, as many as there are registers for
    static constexpr int TOKENS = by == WARPGROUP ? KEY_TILE : 16;
    static constexpr Multiplier MULTIPLIER = by;
    // Whether add_tokens() starts the next copies, behind its first products where a warpgroup has some. Of warps those
    // with 128 keys do, since ptxas spills in code for sm_90a otherwise; with 64 it spills on sm_120 if they do.
    static constexpr bool PREFETCHES = by == WARPGROUP || KEYS > KEY_TILE;
    int first_key;  // of the tile
    unsigned k_rows[M][D / 16][4], v_rows[M][D / 16][4];
    const bf16* v_tile;
    float dk[M][D / 8][4], dv[M][D / 8][4];
    // The warp's first key, counted from the tile's; this lane's keys are lane / 4 behind it, and i * 8 and m * 16
    // further.
    __device__ int warp_key() const { return threadIdx.x / 32 * 16 * M; }
    __device__ int lane_key() const { return warp_key() + threadIdx.x % 32 / 4; }
    // The warpgroup's first key, counted from the tile's.
    __device__ static int group_key() { return KEYS > WARPGROUP_ROWS ? warpgroup_index() * WARPGROUP_ROWS : 0; }
    // Those that decide together whether to multiply by a tile of tokens: the warp's, or the warpgroup's.
    static constexpr int TOGETHER = by == WARPGROUP ? WARPGROUP_ROWS : 16 * M;
    __device__ int low_key() const { return first_key + (by == WARPGROUP ? group_key() : warp_key()); }
    // There must be a barrier between the arrival of the tiles and this call; after it their buffers are free.
    __device__ void load(const bf16* k_tile, const bf16* v, int first) {
        first_key = first;
        v_tile = v;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int x = 0; x < D; x += 16) {
                if (!Buffers::KEEPS_K) load_a<D>(k_rows[m][x / 16], k_tile, warp_key() + m * 16, x);
                if (!Buffers::KEEPS_V) load_a<D>(v_rows[m][x / 16], v_tile, warp_key() + m * 16, x);
            }
        clear(dk);
        clear(dv);
        __syncthreads();
    }
    // The scores p of tokens first .. first + TOKENS - 1 of a tile become -infinity where the token does not see the
    // key.
    template <class Token>
    __device__ void hide_tokens(float (&p)[M][TOKENS / 8][4], int first, Token token, const AttentionShape& s) const {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int age = token(first + n * 8 + int(threadIdx.x) % 4 * 2 + odd) -
                                first_query<branch>(first_key + lane_key(), s);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {  // query_sees(), for a key further on
                        const int key = m * 16 + i * 8;
                        if (age < (branch == CMP ? key * s.d : key) || (branch == WIN && age >= key + s.window))
                            p[m][n][2 * i + odd] = -INFINITY;
                    }
            }
    }
    // dv += P'^T dout and dk += dS^T q over the 64 rows of the tile of tokens in a buffer. token(row): the position of
    // the row's token; called only if `masked`; otherwise all tokens see all keys of the warp whose selection block
    // they chose. prefetch(): starts to copy the next tile.
    template <class Token, class Prefetch>
    __device__ void add_tokens(const Buffers& buffers, int buffer, bool masked, Token token, Prefetch prefetch,
                               const AttentionShape& s) {
        if constexpr (by == WARPGROUP) add_tokens_by_warpgroup(buffers, buffer, masked, token, prefetch, s);
        else prefetch(), add_tokens_by_warp(buffers, buffer, masked, token, s);
    }
    // The four warps have 16 keys each. S^T = k q^T and v dout^T come out as the next products take them.
    template <class Token, class Prefetch>
    __device__ void add_tokens_by_warpgroup(const Buffers& buffers, int buffer, bool masked, Token token,
                                            Prefetch prefetch, const AttentionShape& s) {
        const int column = threadIdx.x % 4 * 2;
        const int group = group_key() * D;
        const WgmmaTile q_tile = wgmma_rows<D>(buffers.q_tiles + buffer * KEY_TILE * D);
        const WgmmaTile dout_tile = wgmma_rows<D>(buffers.dout_tiles + buffer * KEY_TILE * D);
        const int sub_block = branch == SLC ? warp_key() >> s.slc_shift : 0;
        const float* dot = buffers.rows.dot + buffer * KEY_TILE + column;
        const float* minus_shift =
            buffers.rows.minus_shift + (buffer * buffers.rows.BLOCKS + sub_block) * KEY_TILE + column;
        float p[1][KEY_TILE / 8][4], ds[1][KEY_TILE / 8][4];
        unsigned rounded[KEY_TILE / 16][4];
        wgmma_fence();
        start_product<D>(p[0], wgmma_rows<D>(buffers.k_tile + group), q_tile);
        wgmma_commit();
        start_product<D>(ds[0], wgmma_rows<D>(buffers.v_tile + group), dout_tile);
        wgmma_commit();
        prefetch();
        wgmma_wait<1>(p[0]);
        if constexpr (TOKENS == KEY_TILE)
            if (masked) hide_tokens(p, 0, token, s);
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++) {
            const float2 minus_lse = *reinterpret_cast<const float2*>(minus_shift + n * 8);
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[0][n][e] = exp2_approx(fmaf(p[0][n][e], s.scale * LOG2_E, e % 2 ? minus_lse.y : minus_lse.x));
        }
        wgmma_wait<0>(ds[0]);
        round_rows(rounded, p[0]);
        wgmma_fence();
        start_sum(dv[0], rounded, dout_tile);
        wgmma_commit();
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n++) {
            const float2 of_dot = *reinterpret_cast<const float2*>(dot + n * 8);
#pragma unroll
            for (int e = 0; e < 4; e++) ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - (e % 2 ? of_dot.y : of_dot.x));
        }
        unsigned rounded_ds[KEY_TILE / 16][4];
        round_rows(rounded_ds, ds[0]);
        wgmma_fence();
        start_sum(dk[0], rounded_ds, q_tile);
        wgmma_commit();
        wgmma_wait<0>(dv[0]);
        wgmma_wait<0>(dk[0]);
    }
    template <class Token>
    __device__ void add_tokens_by_warp(const Buffers& buffers, int buffer, bool masked, Token token,
                                       const AttentionShape& s) {
        const int column = threadIdx.x % 4 * 2;
        const bf16* q_tile = buffers.q_tiles + buffer * KEY_TILE * D;
        const bf16* dout_tile = buffers.dout_tiles + buffer * KEY_TILE * D;
        const float* dot = buffers.rows.dot + buffer * KEY_TILE + column;
        const float* minus_shift = buffers.rows.minus_shift + buffer * buffers.rows.BLOCKS * KEY_TILE + column;
#pragma unroll 1
        for (int first = 0; first < KEY_TILE; first += TOKENS) {
            float p[M][TOKENS / 8][4] = {}, ds[M][TOKENS / 8][4] = {};
            multiply_rows<D, M, TOKENS / 16>(p, k_rows, q_tile, first);
            if constexpr (keeps_v<D>()) multiply_rows<D, M, TOKENS / 16>(ds, v_tile, warp_key(), dout_tile, first);
            else multiply_rows<D, M, TOKENS / 16>(ds, v_rows, dout_tile, first);
            if (masked) hide_tokens(p, first, token, s);
#pragma unroll
            for (int m = 0; m < M; m++) {
                const int sub_block = branch == SLC ? (warp_key() + m * 16) >> s.slc_shift : 0;
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++) {
                    const float2 minus_lse =
                        *reinterpret_cast<const float2*>(minus_shift + sub_block * KEY_TILE + first + n * 8);
                    const float2 of_dot = *reinterpret_cast<const float2*>(dot + first + n * 8);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        p[m][n][e] = exp2_approx(fmaf(p[m][n][e], s.scale * LOG2_E, e % 2 ? minus_lse.y : minus_lse.x));
                        ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? of_dot.y : of_dot.x));
                    }
                }
            }
            multiply_add<D, M, TOKENS / 16>(dv, p, dout_tile, first);
            multiply_add<D, M, TOKENS / 16>(dk, ds, q_tile, first);
        }
    }
    // Stores the sums in rows first_key.. of dk and dv [B, G, key_stride, D], or, where given, unrounded in partial [2,
    // KEY_TILE, D], which is that of the warp's tile.
    __device__ void store(bf16* dk_out, bf16* dv_out, float* partial, int bg, const AttentionShape& s) const {
#pragma unroll
        for (int row = 0; row < 2 * M; row++) {
            const int m = row / 2, i = row % 2;
            const int key = lane_key() + row * 8;
            const bool exists = first_key + key < s.keys;
            if (partial) {
                float* const to = partial + key % KEY_TILE * D + threadIdx.x % 4 * 2;
#pragma unroll
                for (int x = 0; x < D / 8 && exists; x++) {
                    *reinterpret_cast<float2*>(to + x * 8) =
                        make_float2(dk[m][x][2 * i] * s.scale, dk[m][x][2 * i + 1] * s.scale);
                    *reinterpret_cast<float2*>(to + KEY_TILE * D + x * 8) =
                        make_float2(dv[m][x][2 * i], dv[m][x][2 * i + 1]);
                }
            } else {
                const size_t at = size_t(bg * s.key_stride + first_key + key) * D;
                store_row<by == WARPGROUP>(dk_out + at, dk[m], i, s.scale, exists);
                store_row<by == WARPGROUP>(dv_out + at, dv[m], i, 1, exists);
            }
        }
    }
};

// Walks tiles of tokens, each once for every head, from `at` (a tile, or a place in a list of tokens) to `end`;
// next(at) is the one after. fetch(buffer, at, head) starts to copy and to load, store(buffer) puts the statistics it
// loaded in their place, use(buffer, at, prefetch) computes and calls prefetch(), which fetches. While one is used, the
// next one arrives in the other buffer.
template <class Keys, class Next, class Fetch, class Store, class Use>
__device__ inline void for_token_tiles(int at, int end, int heads, Next next, Fetch fetch, Store store, Use use) {
    int head = 0;
    if (at < end) {
        fetch(0, at, head);
        store(0);
    }
    for (int buffer = 0; at < end; buffer ^= 1) {
        const int this_at = at;
        if (++head == heads) {
            head = 0;
            at = next(at);
        }
        cp_async_wait<0>();
        if (Keys::MULTIPLIER == WARPGROUP) async_fence();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other one
        const auto prefetch = [&] {
            if (at < end) fetch(buffer ^ 1, at, head);
        };
        if (!Keys::PREFETCHES) prefetch();
        use(buffer, this_at, [&] {
            if (Keys::PREFETCHES) prefetch();
        });
        if (at < end) store(buffer ^ 1);  // only now, so that nobody waits for the load
    }
}

// out [B, G, key_stride, D] = the sums in first[part * stride ..], of `count` parts in their order, for the keys of a
// tile
template <int D>
__device__ inline void add_partial_sums(bf16* out, const float* first, size_t stride, int count, int bg, int tile,
                                        const AttentionShape& s) {
    const int keys = min(KEY_TILE, s.keys - tile * KEY_TILE);
    for (int i = threadIdx.x * 2; i < keys * D; i += int(blockDim.x) * 2) {
        float2 sum = make_float2(0, 0);
        for (int part = 0; part < count; part++) {
            const float2 term = *reinterpret_cast<const float2*>(first + part * stride + i);
            sum.x += term.x;
            sum.y += term.y;
        }
        *reinterpret_cast<__nv_bfloat162*>(out + (size_t(bg) * s.key_stride + size_t(tile) * KEY_TILE) * D + i) =
            __floats2bfloat162_rn(sum.x, sum.y);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Scratch memory.

// Hands out pieces of a workspace on the GPU; from null it only adds up their sizes.
struct WorkspacePieces {
    char* base;
    size_t used = 0;
    template <class T>
    T* take(size_t count) {
        T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += (count * sizeof(T) + 255) / 256 * 256;
        return piece;
    }
};
