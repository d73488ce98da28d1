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
                       counted(int64_t(r.items), "item"));
}

void print_choices(const std::string& checkpoint, const ChoiceTask& task, const ChoiceResult& r) {
    print("%s on %s: %s\n", printable(checkpoint), printable(task.file), describe_choices(r));
}

void print_evaluation(const std::string& checkpoint, const std::string& set, const EvalResult& r, const Config& c,
                      int64_t samples) {
    print("%s on %s%s%d tokens (%d of %d samples of %d): loss %.4f, perplexity %.3f", printable(checkpoint),
          printable(set), set.empty() ? "" : ", ", r.tokens, r.samples, samples, c.seq_len, r.loss, std::exp(r.loss));
    if (r.answers) print(", recall loss %.4f (chance %.4f)", r.answer_loss, std::log(SYNTHETIC_ALPHABET));
    if (r.bytes) print(", bits per byte %.4f\n", r.bits_per_byte());
    else print("; bits per byte are unknown without --vocab-dir\n");
    print("  tokens in sight        loss      tokens\n");
    for (size_t i = 0; i < POSITION_RANGES && r.range_tokens[i]; i++) {
        const size_t first = range_begin(i) + 1, last = std::min(range_begin(i + 1), size_t(c.seq_len));
        print("  %15s  %10.4f  %10d%s\n", format_text("%d..%d", first, last), r.range_loss[i], r.range_tokens[i],
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
