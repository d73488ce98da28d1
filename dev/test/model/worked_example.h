// worked_example.h: the paper's eq. 8 to 12 with numbers, for a dozen tokens, by the operations of an engine.
// dev/MODEL.md quotes it, and a test in inspect_tests.h compares the two.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "../../../lib/model/shape.h"
#include "../../../lib/base/text.h"

// Scores are whole multiples of ln 2, so the weights of a softmax are powers of two over their sum, which is 16.
struct WorkedExample {
    NsaShape s;
    std::vector<double> k, q, kc, lse;  // [T][D], [heads][T][D], [NC][D], [heads][T]
    std::vector<uint32_t> selection;    // [T]
    static constexpr int QUERY = 11;

    WorkedExample() {
        s.B = 1, s.T = s.queries = 12, s.H = 2, s.G = 1, s.D = 4, s.l = 2, s.d = 1;
        s.slc_block = 2, s.slc_count = 4, s.window = 2, s.F = 1;
        k.resize(size_t(s.T * s.D)), q.resize(size_t(s.H * s.T * s.D));
        for (const int t : {4, 5}) k[size_t(t * s.D)] = 2;
        for (const int t : {7, 8}) k[size_t(t * s.D + 1)] = 2;
        for (int head = 0; head < s.H; head++)
            for (int t = 0; t < s.T; t++) q[size_t((head * s.T + t) * s.D + head)] = 2 * std::log(2);
    }
    // By the operations that train.
    template <class Engine>
    void compute(Engine& engine) {
        const size_t width = size_t(s.l * s.D), rows = s.query_rows();
        std::vector<double> fc1(width), bias(1), fc2(size_t(s.D)), hidden(s.cmp_rows()), out(rows * size_t(s.D));
        kc.resize(s.cmp_rows() * size_t(s.D)), lse.resize(rows), selection.resize(size_t(s.T * s.selection_words()));
        engine.compress_heads(kc.data(), hidden.data(), k.data(), {fc1.data(), bias.data(), fc2.data()}, false, s);
        engine.attention_forward(CMP, out.data(), lse.data(), q.data(), kc.data(), kc.data(), nullptr, s);
        engine.select_blocks(selection.data(), nullptr, q.data(), kc.data(), lse.data(), s);
    }
    // Eq. 8 for the query.
    template <class Engine>
    std::vector<double> weights(const Engine& engine, int head) const {
        const size_t row = size_t(head * s.T + QUERY);
        std::vector<double> p;
        for (int i = 0; i < s.cmp_blocks(QUERY + 1); i++)
            p.push_back(std::exp(engine.score(&q[row * size_t(s.D)], &kc[size_t(i * s.D)], s) - lse[row]));
        return p;
    }
    std::vector<int> chosen(int t) const {
        std::vector<int> blocks;
        for (int j = 0; j < s.slc_blocks(); j++)
            if (selection[size_t(t)] >> j & 1) blocks.push_back(j);
        return blocks;
    }
};

inline std::string worked_row(const std::string& label, const std::vector<double>& values, const char* format) {
    std::string line = format_text("%-18s", label);
    for (const double x : values) line += format_text(format, x);
    return line + "\n";
}
inline std::vector<double> worked_numbers(int count) {
    std::vector<double> numbers;
    for (int i = 0; i < count; i++) numbers.push_back(i);
    return numbers;
}
inline std::vector<double> worked_column(const std::vector<double>& rows, int D, int component) {
    std::vector<double> values;
    for (size_t i = size_t(component); i < rows.size(); i += size_t(D)) values.push_back(rows[i]);
    return values;
}
inline std::string worked_list(const std::vector<int>& numbers) {
    std::string text;
    for (const int x : numbers) text += (text.empty() ? "" : " ") + std::to_string(x);
    return text;
}

// Which compressed blocks count for a selection block, and for how much: what one weight of 1 becomes.
template <class Engine>
std::string worked_overlaps(const WorkedExample& e) {
    std::string text;
    for (int j = 0; j <= e.QUERY / e.s.slc_block; j++) {
        std::string terms;
        for (int i = 0; i < e.s.cmp_blocks(e.QUERY + 1); i++) {
            std::vector<double> one(size_t(e.s.cmp_blocks(e.QUERY + 1))), importance(size_t(e.s.slc_blocks()));
            one[size_t(i)] = 1;
            Engine::fold_importance(importance.data(), one.data(), e.QUERY, e.s);
            if (importance[size_t(j)] > 0)
                terms += format_text("%s%g p[%d]", terms.empty() ? "" : " + ", importance[size_t(j)], i);
        }
        text +=
            format_text("  block %d, tokens %2d %2d: %s\n", j, j * e.s.slc_block, (j + 1) * e.s.slc_block - 1, terms);
    }
    return text;
}

template <class Engine>
std::string worked_example() {
    Engine engine;
    WorkedExample e;
    e.compute(engine);
    const NsaShape& s = e.s;
    const int t = e.QUERY, last = t / s.slc_block;
    std::vector<double> sum(size_t(s.slc_blocks()));
    engine.block_importance(sum.data(), &e.q[size_t(t * s.D)], &e.lse[size_t(t)], e.kc.data(), t, s);
    std::string text = format_text(
        "%d tokens, one group of %d heads, D = %d, l = %d, d = %d, l' = %d, n = %d; keys without positions.\n"
        "Head 0 has q = (2 ln 2, 0, 0, 0) and head 1 q = (0, 2 ln 2, 0, 0), so that a score, q.k / sqrt(D), is\n"
        "ln 2 times component 0 or 1 of a key, and its exponential a power of two.\n\n",
        s.T, s.H, s.D, s.l, s.d, s.slc_block, s.slc_count);
    text += worked_row("token", worked_numbers(s.T), "%7.0f");
    for (const int x : {0, 1})
        text += worked_row(format_text("key, component %d", x), worked_column(e.k, s.D, x), "%7g");
    text += "\nEq. 7: compressed key i is the mean of tokens i and i + 1, while phi's second matrix is 0.\n";
    text += worked_row("block i", worked_numbers(s.cmp_capacity()), "%7.0f");
    for (const int x : {0, 1}) text += worked_row(format_text("component %d", x), worked_column(e.kc, s.D, x), "%7g");
    text +=
        format_text("\nEq. 8 for the query at token %d: p = softmax over the blocks that end at or before it.\n", t);
    for (int head = 0; head < s.H; head++)
        text += worked_row(format_text("p, head %d", head), e.weights(engine, head), "%7.4f");
    text += "\nEq. 9: a compressed block counts for a selection block by the tokens that they share, in units of d.\n" +
            worked_overlaps<Engine>(e);
    text += worked_row("selection block", worked_numbers(last + 1), "%7.0f");
    for (int head = 0; head < s.H; head++) {
        std::vector<double> importance(size_t(s.slc_blocks()));
        Engine::fold_importance(importance.data(), e.weights(engine, head).data(), t, s);
        text += worked_row(format_text("p_slc, head %d", head), importance, "%7.4f");
    }
    text += "\nEq. 10: summed over the heads of the group.\n" + worked_row("p_slc", sum, "%7.4f");
    text += format_text(
        "\nEq. 11: %d blocks: the first, the last two, and the best of the others.\n"
        "I = { %s }\nEq. 12: the query reads the tokens of these blocks:",
        s.slc_count, worked_list(e.chosen(t)));
    for (const int block : e.chosen(t))
        for (int key = block * s.slc_block; key < (block + 1) * s.slc_block && key <= t; key++)
            text += " " + std::to_string(key);
    text += "\n\nThe blocks of every query: up to n of them are all taken.\n";
    for (int query = 0; query < s.T; query++)
        text += format_text("  token %2d: %s\n", query, worked_list(e.chosen(query)));
    return text;
}
