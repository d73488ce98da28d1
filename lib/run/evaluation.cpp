// evaluation.cpp: the functions of evaluation.h.
#include "evaluation.h"

#include <cstdio>

#include "../base/json.h"
#include "../data/synthetic.h"

size_t find_range(size_t position) {
    return position < 16 ? 0 : std::min<size_t>(60 - size_t(__builtin_clzll(position)), POSITION_RANGES - 1);
}

std::string describe_choices(const ChoiceResult& r) {
    return format_text("hellaswag %.4f by loss per token, %.4f by loss, of %s", r.accuracy_per_token(), r.accuracy(),
                       counted(int64_t(r.items), "item").c_str());
}

void print_choices(const std::string& checkpoint, const ChoiceTask& task, const ChoiceResult& r) {
    std::printf("%s on %s: %s\n", printable(checkpoint).c_str(), printable(task.file).c_str(),
                describe_choices(r).c_str());
}

void print_evaluation(const std::string& checkpoint, const std::string& set, const EvalResult& r, const Config& c,
                      int64_t samples) {
    std::printf("%s on %s%s%llu tokens (%llu of %lld samples of %lld): loss %.4f, perplexity %.3f",
                printable(checkpoint).c_str(), printable(set).c_str(), set.empty() ? "" : ", ",
                (unsigned long long)r.tokens, (unsigned long long)r.samples, (long long)samples, (long long)c.seq_len,
                r.loss, std::exp(r.loss));
    if (r.answers) std::printf(", recall loss %.4f (chance %.4f)", r.answer_loss, std::log(SYNTHETIC_ALPHABET));
    if (r.bytes) std::printf(", bits per byte %.4f\n", r.bits_per_byte());
    else std::printf("; bits per byte are unknown without --vocab-dir\n");
    std::printf("  tokens in sight        loss      tokens\n");
    for (size_t i = 0; i < POSITION_RANGES && r.range_tokens[i]; i++) {
        const size_t first = range_begin(i) + 1, last = std::min(range_begin(i + 1), size_t(c.seq_len));
        std::printf("  %15s  %10.4f  %10llu%s\n", format_text("%zu..%zu", first, last).c_str(), r.range_loss[i],
                    (unsigned long long)r.range_tokens[i],
                    first > size_t(c.trained_seq_len)  ? "  beyond the trained length"
                    : last > size_t(c.trained_seq_len) ? "  in part beyond the trained length"
                                                       : "");
    }
}

std::string evaluation_json(const std::string& checkpoint, const std::string& set, const EvalResult& r,
                            int64_t seq_len) {
    Json line = {{"checkpoint", Json(checkpoint, true)},
                 {"set", Json(set, true)},
                 {"seq_len", seq_len},
                 {"samples", r.samples},
                 {"tokens", r.tokens},
                 {"loss", {r.loss, "%.9g"}},
                 {"perplexity", {std::exp(r.loss), "%.9g"}}};
    if (r.bytes) line.add("bits_per_byte", {r.bits_per_byte(), "%.9g"});
    if (r.answers) line.add("recall_loss", {r.answer_loss, "%.9g"});
    Json ranges(Json::Array);
    for (size_t i = 0; i < POSITION_RANGES && r.range_tokens[i]; i++)
        ranges.items.push_back({{"first", range_begin(i) + 1},
                                {"last", std::min(range_begin(i + 1), size_t(seq_len))},
                                {"tokens", r.range_tokens[i]},
                                {"loss", {r.range_loss[i], "%.9g"}}});
    return line.add("by_tokens_in_sight", ranges).to_text() + "\n";
}
