// evaluation.h: losses added up over samples and ranks. Used by evaluate() in train_nsa.cu, lib/verbs/eval.h and
// run_printer.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../data/multiple_choice.h"
#include "../data/shards.h"

// Places in a sample fall into ranges that double: 0..15, 16..31, 32..63, ...; a million tokens have 17 of them.
constexpr size_t POSITION_RANGES = 17;
inline size_t range_begin(size_t range) { return range ? size_t(8) << range : 0; }
inline size_t find_range(size_t position) {
    return position < 16 ? 0 : std::min<size_t>(60 - size_t(__builtin_clzll(position)), POSITION_RANGES - 1);
}

// Sums over the tokens of one sample.
struct EvalSums {
    double loss = 0, answer_loss = 0, tokens = 0, answers = 0, bytes = 0;
    double range_loss[POSITION_RANGES] = {};

    // Calls use(number) with each of them, in one order, so that ranks can add them too.
    template <class Use>
    void visit(Use use) {
        for (double* number : {&loss, &answer_loss, &tokens, &answers, &bytes}) use(*number);
        for (double& number : range_loss) use(number);
    }
    // Adds the sample's next token. target: 1 for an answer, 0 for any other, NO_TARGET after the end of the data.
    void add(double of_token, uint8_t target, size_t text_bytes) {
        if (target == NO_TARGET) return;
        range_loss[find_range(size_t(tokens))] += of_token;
        loss += of_token;
        tokens++;
        bytes += double(text_bytes);
        if (target) {
            answer_loss += of_token;
            answers++;
        }
    }
};

struct EvalResult {
    double loss = 0;         // mean over the tokens
    double answer_loss = 0;  // mean over the answers of the synthetic corpus
    uint64_t tokens = 0, answers = 0;
    uint64_t bytes = 0;  // of the text that the targets stand for; 0 where unknown
    uint64_t samples = 0;
    double range_loss[POSITION_RANGES] = {};  // mean over the tokens of a range of positions
    uint64_t range_tokens[POSITION_RANGES] = {};

    explicit EvalResult(const std::vector<EvalSums>& sums) : samples(sums.size()) {
        EvalSums total;
        for (const EvalSums& s : sums) {
            total.loss += s.loss;
            total.answer_loss += s.answer_loss;
            total.tokens += s.tokens;
            total.answers += s.answers;
            total.bytes += s.bytes;
            for (size_t r = 0; r < POSITION_RANGES; r++) {
                total.range_loss[r] += s.range_loss[r];
                const size_t begin = range_begin(r), end = range_begin(r + 1), size = size_t(s.tokens);
                range_tokens[r] += std::min(std::max(size, begin), end) - begin;
            }
        }
        tokens = uint64_t(total.tokens);
        answers = uint64_t(total.answers);
        bytes = uint64_t(total.bytes);
        loss = total.loss / total.tokens;
        if (answers) answer_loss = total.answer_loss / total.answers;
        for (size_t r = 0; r < POSITION_RANGES; r++) range_loss[r] = total.range_loss[r] / double(range_tokens[r]);
    }

    double bits_per_byte() const { return loss * double(tokens) / std::log(2.0) / double(bytes); }
};

inline std::string describe_choices(const ChoiceResult& r) {
    return format_text("hellaswag %.4f by loss per token, %.4f by loss, of %s", r.accuracy_per_token(), r.accuracy(),
                       counted(int64_t(r.items), "item"));
}
