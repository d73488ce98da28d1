// multiple_choice.h: tasks that ask which of several endings continues a context, such as HellaSwag. A model answers
// with the ending to which it gives the highest probability, plain or per token. Used by `eval` and by validation in
// train_nsa.cu.
//
// Two forms of file. JSON lines, as HellaSwag is published: {"ctx": text, "endings": [text, ...], "label": number},
// other keys are ignored; an ending is tokenised with a blank before it, as llm.c does. And llm.c's .bin: a header of
// 256 int32 {20240522, 1, items, longest item in bytes}, then for each item the uint16 {65535, its bytes, its number,
// label, endings, tokens of the context, context ..., tokens of ending 0, ending 0 ..., ...}.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../base/json.h"
#include "../base/files.h"
#include "text_input.h"
#include "vocabulary.h"
#include "../../tokenizer.h"

// One ending behind its context.
struct ChoiceRow {
    std::vector<uint16_t> tokens;
    size_t first = 0;  // token at which the ending begins, at least 1

    size_t answers() const { return tokens.size() - first; }
};
struct ChoiceItem {
    std::vector<ChoiceRow> endings;
    size_t label = 0;
};

struct ChoiceResult {
    size_t items = 0, right = 0, right_per_token = 0;

    double accuracy() const { return double(right) / double(items); }
    double accuracy_per_token() const { return double(right_per_token) / double(items); }  // what is usually reported
};

struct ChoiceTask {
    std::string file;
    std::vector<ChoiceItem> items;
    std::vector<const ChoiceRow*> rows;  // of all items
    size_t cut = 0, cut_endings = 0;     // rows that lost their beginning; those that lost some of the ending too

    ChoiceTask() = default;
    ChoiceTask(ChoiceTask&&) = default;
    ChoiceTask& operator=(ChoiceTask&&) = default;  // no copies: `rows` points into `items`

    // A row has at most seq_len tokens: a longer one keeps its end. Of an ending without a context the first token is
    // not scored, since nothing stands before it.
    void finish(size_t seq_len) {
        for (ChoiceItem& item : items)
            for (ChoiceRow& row : item.endings) {
                const size_t excess = row.tokens.size() > seq_len ? row.tokens.size() - seq_len : 0;
                row.tokens.erase(row.tokens.begin(), row.tokens.begin() + std::ptrdiff_t(excess));
                cut += excess > 0;
                cut_endings += excess >= row.first;
                row.first = excess >= row.first ? 1 : row.first - excess;
                rows.push_back(&row);
            }
    }

    // Tokens of the longest row.
    size_t longest() const {
        size_t n = 0;
        for (const ChoiceRow* row : rows) n = std::max(n, row->tokens.size());
        return n;
    }

    // sums: of every row, with answer_loss, the loss of its ending. Of equally likely endings the first counts.
    template <class Sums>
    ChoiceResult result(const std::vector<Sums>& sums) const {
        ChoiceResult r;
        r.items = items.size();
        size_t row = 0;
        for (const ChoiceItem& item : items) {
            std::vector<double> losses;
            for (size_t i = 0; i < item.endings.size(); i++) losses.push_back(sums[row++].answer_loss);
            size_t best = 0, best_per_token = 0;
            const auto per_token = [&](size_t i) { return losses[i] / double(item.endings[i].answers()); };
            for (size_t i = 1; i < losses.size(); i++) {
                if (losses[i] < losses[best]) best = i;
                if (per_token(i) < per_token(best_per_token)) best_per_token = i;
            }
            r.right += best == item.label;
            r.right_per_token += best_per_token == item.label;
        }
        return r;
    }
};

inline void require_choices(const ChoiceItem& item, int64_t label, const std::string& where) {
    if (item.endings.size() < 2) fail("%s: %d endings, expected at least 2", where, item.endings.size());
    if (label < 0 || size_t(label) >= item.endings.size())
        fail("%s: label %d, expected 0..%d, the number of the right ending", where, label, item.endings.size() - 1);
    for (const ChoiceRow& row : item.endings)
        if (row.first < 1 || row.first >= row.tokens.size()) fail("%s: a context or an ending without a token", where);
}

inline ChoiceTask read_choices_of_lines(const std::string& file, const std::string& text, const Tokenizer& tokenizer) {
    ChoiceTask task;
    size_t line = 0;
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        line++;
        if (text.find_first_not_of(" \t\r", begin) >= end) continue;
        const std::string where = format_text("%s: line %d", file, line);
        const Json root = parse_json(text.substr(begin, end - begin), where);
        const std::vector<uint16_t> context = tokenizer.encode(root.string("ctx", where));
        ChoiceItem item;
        for (const Json& ending : root.array("endings", where)) {
            ChoiceRow row;
            row.tokens = context;
            row.first = context.size();
            const std::vector<uint16_t> tokens = tokenizer.encode(" " + ending.string(where + ": endings"));
            row.tokens.insert(row.tokens.end(), tokens.begin(), tokens.end());
            item.endings.push_back(std::move(row));
        }
        const Json& label = root.get("label", where);  // some copies write it as a string
        const int64_t number =
            label.kind == Json::String && label.text.size() == 1 ? label.text[0] - '0' : root.integer("label", where);
        require_choices(item, number, where);
        item.label = size_t(number);
        task.items.push_back(std::move(item));
    }
    return task;
}

inline ChoiceTask read_choices_of_llmc(const std::string& file, const std::string& bytes, int vocab_size) {
    int32_t header[256];
    if (bytes.size() < sizeof header) fail("%s is cut off: %d bytes, its header has 1024", file, bytes.size());
    std::memcpy(header, bytes.data(), sizeof header);
    if (header[1] != 1) fail("%s: version %d, expected 1", file, header[1]);
    if (vocab_size != 256 && vocab_size != int(GPT2_VOCABULARY))
        fail("%s holds tokens of GPT-2, and the model has a vocabulary of %d of its own: give the .jsonl", file,
             vocab_size);
    ChoiceTask task;
    size_t at = sizeof header;
    const auto next = [&] {
        uint16_t x;
        if (at + sizeof x > bytes.size())
            fail("%s is cut off at byte %d, within item %d of %d", file, at, task.items.size(), header[2]);
        std::memcpy(&x, bytes.data() + at, sizeof x);
        at += sizeof x;
        return x;
    };
    const auto next_tokens = [&](std::vector<uint16_t>& to) {
        for (int n = next(); n > 0; n--) {
            to.push_back(next());
            if (to.back() >= vocab_size)
                fail("%s: token %d at byte %d is outside the vocabulary of %d: it was made with another tokenizer",
                     file, to.back(), at - 2, vocab_size);
        }
    };
    for (int32_t i = 0; i < header[2]; i++) {
        const std::string where = format_text("%s: byte %d: item %d", file, at, i);
        if (next() != 65535) fail("%s: found no 65535 at its beginning: the file is damaged", where);
        next();  // bytes, number
        next();
        const int label = next(), endings = next();
        std::vector<uint16_t> context;
        next_tokens(context);
        ChoiceItem item;
        for (int e = 0; e < endings; e++) {
            item.endings.emplace_back();
            item.endings.back().tokens = context;
            item.endings.back().first = context.size();
            next_tokens(item.endings.back().tokens);
        }
        require_choices(item, label, where);
        item.label = size_t(label);
        task.items.push_back(std::move(item));
    }
    return task;
}

// seq_len: tokens that the model takes. tokenizer: null where GPT-2's vocabulary is not known; a .bin needs none.
inline ChoiceTask read_choices(const std::string& file, const Tokenizer* tokenizer, int vocab_size, size_t seq_len) {
    const std::string bytes = read_file(file);
    refuse_no_text(file, bytes.substr(0, 256), "");
    constexpr int32_t magic = 20240522;
    ChoiceTask task;
    if (bytes.size() >= 4 && !std::memcmp(bytes.data(), &magic, 4)) {
        task = read_choices_of_llmc(file, bytes, vocab_size);
    } else {
        if (!tokenizer) fail_usage("--hellaswag %s is text: --vocab-dir is missing, which has GPT-2's tokens", file);
        task = read_choices_of_lines(file, bytes, *tokenizer);
    }
    if (task.items.empty()) fail("%s holds no item: expected lines of {\"ctx\", \"endings\", \"label\"}", file);
    task.file = file;
    task.finish(seq_len);
    return task;
}
