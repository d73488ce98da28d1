// shape.h: the shapes of the attention and the constants of the model, by name. Used by the engines (nsa_cpu.h,
// nsa_kernels.cuh), by lib/cpu/attention.h and by the options. Symbols are the paper's (arXiv 2502.11089).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../base/random.h"  // HOST_DEVICE

// The sizes of a matrix product: C [M, N] = A [M, K] B [K, N].
struct GemmSize {
    int M, N, K;
};

// The three branches: compressed, selected, sliding window. This is the order of the gates, and of every array that
// holds something per branch.
enum Branch { CMP = 0, SLC = 1, WIN = 2 };
constexpr int BRANCHES = WIN + 1;
constexpr const char* BRANCH_NAMES[BRANCHES] = {"cmp", "slc", "win"};
constexpr const char* ATTENTION_NAMES[BRANCHES] = {"attention: compressed", "attention: selected", "attention: window"};

// What --attention makes a layer: all three branches, or the window branch alone, over all tokens or the last w.
enum LayerKind { NSA_LAYER, FULL_LAYER, WINDOW_LAYER };
constexpr const char* LAYER_KIND_NAMES[] = {"nsa", "full", "window"};
constexpr int MAX_PATTERN = 16;  // layers of a pattern, which repeats: two bits each in NsaShape::kinds

// The order of the key and value projections. Layers without NSA have the last two only.
enum HeadSlot { K_CMP, V_CMP, K_SLC, V_SLC, K_WIN, V_WIN };
constexpr int HEAD_SLOTS = V_WIN + 1;

constexpr double NORM_EPS = 1e-6;

// Selections: block j is bit j%32 of word j/32.
HOST_DEVICE inline bool is_selected(const uint32_t* mask, int block) { return mask[block / 32] >> (block % 32) & 1; }
HOST_DEVICE inline void select_block(uint32_t* mask, int block) { mask[block / 32] |= 1u << (block % 32); }

// Compressed block i has tokens i*d .. last_token(i, l, d); blocks_within: those that end within the first `tokens`.
HOST_DEVICE inline int last_token(int block, int l, int d) { return block * d + l - 1; }
HOST_DEVICE inline int blocks_within(int tokens, int l, int d) { return tokens < l ? 0 : (tokens - l) / d + 1; }

// Plain numbers of four bytes: kernels take it as it is, in any language.
struct NsaShape {
    int B = 1;  // sequences
    int T = 0;  // tokens that the key and value buffers hold per sequence
    // A call computes positions first .. first+queries-1: (0, T) in training, (t, 1) when decoding.
    int first = 0, queries = 0;
    int H = 0, G = 0, D = 0;  // query heads, key/value groups, dimension of a head
    int l = 0, d = 0;         // compression block and stride
    int slc_block = 0;        // l': tokens of a selection block
    int slc_count = 0;        // n: selected blocks per query and group
    int window = 0;           // w: keys a query sees in the window branch, its own included
    int F = 0;                // hidden width of the compressor phi
    int rope_base = 10000;    // of RoPE's angles
    int qk_norm = 0;          // 1: --qk-norm: heads of q and of the keys are normed before RoPE
    int window_only = 0;      // 1: the window branch alone, its gate fixed to 1; of a model: no layer is NSA's, so that
                              // its buffers are those of the largest layer
    int sees_all = 0;         // 1: with window_only, over all tokens: a layer of full attention
    unsigned kinds = 0;       // --attention: the LayerKind of each layer of the pattern, two bits each from the lowest
    int period = 1;           // layers of the pattern
    unsigned left_out = 0;    // --branches: bit b is set where branch b is left out, which is a gate of 0

    HOST_DEVICE int heads_per_group() const { return H / G; }
    double scale() const { return 1 / std::sqrt(double(D)); }

    // Branches. Outputs, gates and row statistics are arrays [branches(), ...]; a branch's share is at branch_slot().
    bool has(Branch branch) const { return !window_only || branch == WIN; }
    HOST_DEVICE int branches() const { return window_only ? 1 : BRANCHES; }
    int branch_slot(Branch branch) const { return window_only ? 0 : int(branch); }
    LayerKind kind_of_layer(size_t i) const { return LayerKind(kinds >> 2 * (i % size_t(period)) & 3); }
    NsaShape of_layer(size_t i) const {
        NsaShape s = *this;
        s.window_only = kind_of_layer(i) != NSA_LAYER;
        s.sees_all = kind_of_layer(i) == FULL_LAYER;
        return s;
    }

    // Query t sees cmp_blocks(t + 1) compressed blocks.
    HOST_DEVICE int cmp_blocks(int tokens) const { return blocks_within(tokens, l, d); }
    HOST_DEVICE int cmp_capacity() const { return window_only ? 0 : cmp_blocks(T); }
    // A selection is a bitmask of selection_words() words, see is_selected.
    HOST_DEVICE int slc_blocks() const { return (T + slc_block - 1) / slc_block; }
    HOST_DEVICE int selection_words() const { return (slc_blocks() + 31) / 32; }

    // Columns of the fused input projection: q | the keys and values, by HeadSlot | gate logits | padding to 8 columns.
    HOST_DEVICE int first_slot() const { return window_only ? K_WIN : K_CMP; }
    HOST_DEVICE int head_slots() const { return HEAD_SLOTS - first_slot(); }
    HOST_DEVICE static bool holds_values(int slot) { return slot % 2; }
    HOST_DEVICE int head_units() const { return H + head_slots() * G; }  // heads in a row, of D columns each
    static int gate_logit(int head, int branch) { return BRANCHES * head + branch; }
    int gate_logits() const { return window_only ? 0 : BRANCHES * H; }
    int gate_columns() const { return (gate_logits() + 7) / 8 * 8; }
    int projected() const { return head_units() * D + gate_columns(); }

    // Gains of --qk-norm, or their gradients, are [gain_rows(), D]: q's, then those of each branch's keys. gain_of():
    // those of a slot; null where it holds values, and where there are no gains.
    HOST_DEVICE int gain_rows() const { return 1 + branches(); }
    template <class T>
    HOST_DEVICE T* gain_of(T* gains, int slot) const {
        return gains && !holds_values(slot) ? gains + (1 + (slot - first_slot()) / 2) * D : nullptr;
    }

    // Rows of the buffers. Those of q, of a branch's output and of an LSE are [B, H, queries], those of the combined
    // output [B, queries, H]; those of keys and values are [B, G, T], compressed ones [B, G, cmp_capacity()].
    size_t query_rows() const { return size_t(B) * H * queries; }
    size_t key_rows() const { return size_t(B) * G * T; }
    size_t cmp_rows() const { return size_t(B) * G * cmp_capacity(); }
    // head and group count through all sequences: 0 .. B*H-1 and 0 .. B*G-1.
    size_t query_row(size_t head, int t) const { return head * queries + (t - first); }
    size_t output_row(size_t head, int t) const { return (head / H * queries + (t - first)) * H + head % H; }
    // Rows of a branch's keys per sequence and group, and how many of them the last query of this call may see.
    HOST_DEVICE int key_stride(Branch branch) const { return branch == CMP ? cmp_capacity() : T; }
    int key_count(Branch branch) const { return branch == CMP ? cmp_blocks(first + queries) : first + queries; }
    // The bitmask of query t in selection [B, G, queries, words]; null of null.
    HOST_DEVICE const uint32_t* selection_mask(const uint32_t* selection, size_t group, int t) const {
        return selection ? selection + (group * queries + (t - first)) * selection_words() : nullptr;
    }
};

// The compressor phi: its weights, or the gradients of them.
template <class T>
struct PhiOf {
    T *fc1, *bias, *fc2;  // [F, l*D], [F], [D, F]
};
// Those of keys and of values. The values' arrays lie behind the keys', each in one allocation with its like.
template <class T>
struct PhisOf {
    PhiOf<T> k, v;
    size_t to_v_fc1() const { return size_t(v.fc1 - k.fc1); }
    size_t to_v_bias() const { return size_t(v.bias - k.bias); }
    size_t to_v_fc2() const { return size_t(v.fc2 - k.fc2); }
};

// What the smear learns: its weights, or the gradients of them.
template <class T>
struct SmearOf {
    T *gate, *scale;  // [C]
};

// What a branch's attention reads: q [B, H, queries, D], keys and values [B, G, key_stride(), D], and in the selected
// branch selection [B, G, queries, words].
template <class T>
struct InputArrays {
    const T *q, *k, *v;
    const uint32_t* selection;
};
// And its backward pass besides: dq [B, H, queries, D] = or += with `add`, dk, dv =, from dout [B*queries, H*D] and
// what attention_backward_rows made of it, row_dot, lse_gated [B, H, queries].
template <class T, class Stat>
struct BackwardArrays {
    Stat* dq;
    bool add;
    T *dk, *dv;
    const T* dout;
    const Stat *row_dot, *lse_gated;
};

// What a layer's attention writes: the gated sum attn [B*queries, H*D], and of its branches o [branches, B, H, queries,
// D] and lse [branches, B, H, queries].
template <class T, class Stat>
struct LayerOutputs {
    T *attn, *o;
    Stat* lse;
};
// What a layer's attention reads, by branch where it is an array: q, keys and values as above, gate [branches, B, H,
// queries], and in the backward pass o and lse, which the forward pass wrote, and dout [B*T, H*D]. In full attention
// the gate is 1 and `gate` null.
template <class T, class Stat>
struct LayerInputs {
    const T *q, *k[BRANCHES], *v[BRANCHES];
    const uint32_t* selection;
    const T *dout, *o;
    const Stat *gate, *lse;
    InputArrays<T> of(Branch branch) const { return {q, k[branch], v[branch], selection}; }
};
// And what it writes: q's columns of dprojected [B*T, projected()], turned back, or, where given, dq [B, H, T, D] as it
// is; dk and dv; dgate, of the gates' logits; and what attention_backward_rows makes, row_dot and lse_gated.
template <class T, class Stat>
struct LayerGradients {
    T* dprojected;
    Stat* dq;
    T *dk[BRANCHES], *dv[BRANCHES];
    Stat *dgate, *row_dot, *lse_gated;
    BackwardArrays<T, Stat> of(Branch branch, bool add, const T* dout, const NsaShape& s) const {
        const size_t at = size_t(s.branch_slot(branch)) * s.query_rows();
        return {dq, add, dk[branch], dv[branch], dout, row_dot + at, lse_gated + at};
    }
};

// Pairs of a key and a query that a branch's mask allows, over all heads. Each costs 4*D FLOPs in the forward pass
// (two products) and twice that in the backward pass (dV, dP, dQ, dK; computing the scores a second time does not
// count). Counted, not estimated, except that every selected block counts as full; a query that may choose has n of
// them, the last cut by causality.
inline double attention_pairs(Branch branch, const NsaShape& s) {
    double pairs = 0;
    for (int t = s.first; t < s.first + s.queries; t++) {
        if (branch == CMP) pairs += s.cmp_blocks(t + 1);
        else if (branch == WIN) pairs += s.sees_all ? t + 1 : std::min(t + 1, s.window);
        else pairs += std::min(t / s.slc_block, s.slc_count - 1) * s.slc_block + t % s.slc_block + 1;
    }
    return pairs * s.B * s.H;
}
