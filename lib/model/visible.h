// visible.h: who sees what: the keys that a query sees in each branch, once for the plain loops of struct Cpu, for the
// tiled attention of lib/cpu/attention.h and for the plain CUDA kernels.
//     CMP  the compressed blocks that end at or before t
//     SLC  the tokens up to t in the blocks selected for (t, group)
//     WIN  the last w tokens, t included; all up to t in a layer of full attention
#pragma once
#include "../base/random.h"  // HOST_DEVICE
#include "shape.h"

struct KeyRange {
    int begin, end;
};

// The keys that query t may see by its position alone, whichever blocks it chose.
HOST_DEVICE inline KeyRange causal_range(Branch branch, int t, const NsaShape& s) {
    if (branch == CMP) return {0, s.cmp_blocks(t + 1)};
    return {branch == WIN && !s.sees_all && t >= s.window ? t - s.window + 1 : 0, t + 1};
}
// The keys of query t are the union of these ranges, oldest first: one, or in the selected branch one for each block up
// to its own, which is empty where the block was not chosen. mask: the selection of (t, group), in that branch.
HOST_DEVICE inline int range_count(Branch branch, int t, const NsaShape& s) {
    return branch == SLC ? t / s.slc_block + 1 : 1;
}
HOST_DEVICE inline KeyRange key_range(Branch branch, int range, int t, const uint32_t* mask, const NsaShape& s) {
    if (branch != SLC) return causal_range(branch, t, s);
    const int begin = range * s.slc_block, end = begin + s.slc_block;
    if (!is_selected(mask, range)) return {begin, begin};
    return {begin, end < t + 1 ? end : t + 1};
}
// The converse: the queries that may see a key; in the selected branch those of them that chose its block do.
HOST_DEVICE inline KeyRange query_range(Branch branch, int key, const NsaShape& s) {
    const int begin = branch == CMP ? last_token(key, s.l, s.d) : key;
    const bool ends = branch == WIN && !s.sees_all && s.window < s.T - key;
    return {begin, ends ? key + s.window : s.T};
}
