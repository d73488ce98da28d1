// document_kernel_tests.h: --reset-at-document 1 in the attention kernels on tensor cores, against struct Cpu in fp64
// within the limits of attention_kernel_tests.h, in every branch, by masked tiles and by gathered rows, forward,
// backward, decoding and selection.
#pragma once
#include "long_context_tests.h"

#ifndef PRECISION_FP32  // which has the plain kernels only

namespace document_kernel_tests {

using namespace attention_tests;

// Where documents begin in the first sequence: in the middle of a tile of 64, of a compressed and of a selection block,
// at their edges, several in one tile, some of a single token. Sequence b has them b * 5 further on.
const std::vector<int> BEGINNINGS = {37, 38, 64, 83, 90, 91, 92, 128, 150, 191, 300, 301, 556};

struct Documents {
    std::vector<int32_t> start;
    NsaShape s;
    Documents(const NsaShape& shape, const std::vector<int>& beginnings = BEGINNINGS)
        : start(size_t(shape.B) * size_t(shape.T)), s(shape) {
        for (size_t row = 1; row < start.size(); row++) {
            const int b = int(row) / s.T, t = int(row) % s.T;
            const bool begins = t == 0 || std::count(beginnings.begin(), beginnings.end(), t - 5 * b);
            start[row] = begins ? t : start[row - 1];
        }
        s.documents = true, s.document_start = start.data();
    }
};
inline void check_branches(const NsaShape& shape, Worst* worst, double scale = 1) {
    const Documents documents(shape);
    for (const Branch branch : {CMP, SLC, WIN}) check_attention(documents.s, branch, worst, scale);
    long_context_tests::check_gather(documents.s, worst, 0.4, true, scale);
}

}  // namespace document_kernel_tests

TEST(document_kernels_branches) {
    using namespace document_kernel_tests;
    Worst worst;
    const int cases[][7] = {
        // l, d, l', heads, G, D, B
        {32, 16, 64, 3, 1, 64, 1}, {4, 1, 16, 3, 2, 64, 2},  {8, 4, 32, 1, 1, 64, 1},
        {4, 1, 128, 2, 1, 128, 1}, {12, 4, 16, 6, 1, 32, 1}, {4, 2, 64, 16, 1, 16, 1},
    };
    for (const auto& c : cases) {
        NsaShape s = shape(200, c[3], c[4], c[5], c[6]);
        s.l = c[0], s.d = c[1], s.slc_block = c[2];
        check_branches(s, &worst);
    }
    worst.print("documents");
}
// A window of every kind, and full attention.
TEST(document_kernels_windows) {
    using namespace document_kernel_tests;
    Worst worst;
    for (const int window : {1, 37, 79, 500}) {
        NsaShape s = shape(200, 3);
        s.window = window;
        check_attention(Documents(s).s, WIN, &worst);
    }
    NsaShape s = shape(330, 2);
    s.full = true, s.window = 1;
    if (s.T <= LONGEST) check_attention(Documents(s).s, WIN, &worst);
    worst.print("windows of documents");
}
// Documents of several tiles; the compressed branch's parts, of which some see nothing of a tile of keys.
TEST(document_kernels_long) {
    using namespace document_kernel_tests;
    Worst worst;
    NsaShape s = shape(std::min(600, LONGEST), 1);
    s.l = 8, s.d = 4, s.slc_block = 16;
    check_branches(s, &worst);
    worst.print("long documents");
}
// Each row ignores what stands before its document, whatever its size.
TEST(document_kernels_large_logits) {
    using namespace document_kernel_tests;
    Worst worst;
    NsaShape s = shape(150, 3);
    s.l = 4, s.d = 1, s.slc_block = 16;
    check_branches(s, &worst, 18);
    worst.print("large logits of documents");
}
TEST(document_kernels_decoding) {
    using namespace document_kernel_tests;
    Worst worst;
    const int steps[][2] = {{37, 1}, {63, 1}, {64, 1}, {92, 1}, {150, 1}, {199, 1}, {60, 10}, {100, 70}};
    for (const auto& step : steps)
        for (const Branch branch : {CMP, SLC, WIN}) {
            NsaShape s = shape(200, 6, 2, 64, 2);
            s.first = step[0], s.queries = step[1];
            check_attention(Documents(s).s, branch, &worst, 1, false);
        }
    worst.print("decoding of documents");
}
TEST(document_kernels_select_blocks) {
    using namespace document_kernel_tests;
    long tokens = 0, other = 0;
    const int cases[][9] = {
        // l, d, l', n, T, first, heads, G, D
        {8, 4, 16, 5, 500, 0, 3, 2, 64},  {4, 2, 16, 3, 300, 0, 1, 1, 64},   {32, 16, 32, 4, 500, 0, 6, 1, 64},
        {1, 1, 16, 4, 200, 0, 2, 1, 128}, {8, 4, 16, 5, 700, 640, 3, 1, 64}, {12, 4, 20, 3, 300, 299, 2, 1, 64},
    };
    for (const auto& c : cases) {
        NsaShape s = shape(c[4], c[6], c[7], c[8], c[7]);
        s.l = c[0], s.d = c[1], s.slc_block = c[2], s.slc_count = c[3], s.first = c[5], s.queries = c[4] - c[5];
        if (s.queries > LONGEST) s.T = s.queries = LONGEST;
        check_selection(Documents(s).s, 1, &tokens, &other);
    }
    std::printf("    select_blocks, documents: %ld of %ld rows chose another block of equal importance\n", other,
                tokens);
}
// One document that fills the sequence gives the bits of a run without the option.
TEST(document_kernels_of_one_document) {
    using namespace document_kernel_tests;
    NsaShape s = shape(200, 3);
    s.slc_count = s.slc_blocks();
    const Documents one(s, {});
    const Inputs with(one.s, SLC, 1, 4), without(s, SLC, 1, 4);
    for (const SelectedKernel kernel : {SelectedKernel::TILES, SelectedKernel::GATHER})
        long_context_tests::check_same(long_context_tests::run_selected(with, kernel),
                                       long_context_tests::run_selected(without, kernel));
}
#endif
