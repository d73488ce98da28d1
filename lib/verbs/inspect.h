// inspect.h: the verb `inspect`: what a trained model selects in a text. For every layer, group and query the chosen
// blocks with their importances and the gates of the branches, as one JSON file and as one HTML page, lib/report/html/
// inspect.html with that JSON in it, which reads nothing from elsewhere. Included by train_nsa.cu behind the model.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cmath>
#include <string>
#include <vector>

#include "../../tokenizer.h"
#include "../run/config_files.h"
#include "../base/embed.h"
#include "../base/files.h"
#include "../base/json.h"
#include "../run/options.h"
#include "../model/shape.h"
#include "../data/tokenize.h"
#include "../report/report.h"
#include "trained_model.h"

EMBED_FILE(inspect_page, "lib/report/html/inspect.html")

// What each token shows: the characters that begin in it, so that all of them together are the text. A byte that
// belongs to no character is shown as U+FFFD.
inline std::vector<std::string> show_tokens(const std::vector<std::string>& bytes_of_tokens) {
    std::string text;
    std::vector<size_t> token_of_byte;
    for (size_t i = 0; i < bytes_of_tokens.size(); i++) {
        text += bytes_of_tokens[i];
        token_of_byte.resize(text.size(), i);
    }
    std::vector<std::string> shown(bytes_of_tokens.size());
    for (size_t at = 0, length; at < text.size(); at += length) {
        uint32_t code;
        const int bytes = utf8_decode(text.data() + at, text.size() - at, &code);
        length = bytes ? size_t(bytes) : 1;
        shown[token_of_byte[at]] += bytes ? text.substr(at, length) : "\xEF\xBF\xBD";
    }
    return shown;
}

class Inspection {
  public:
    static constexpr size_t MAX_TOKENS = 16384;  // the page would be of no use

    std::vector<int32_t> tokens;  // an end-of-text, as before every document, and the text

    Inspection(const Config& c, const std::string& folder, const Tokenizer& tokenizer) {
        if (!has_layers(c, NSA_LAYER))
            fail("inspect: %s has --attention %s, which selects nothing", folder, c.attention);
        if (c.html.empty() && c.json.empty()) fail_usage("inspect: give --html FILE, --json FILE, or both");
        require_output_file("html", c.html, PAGE_BEGINNING);
        require_output_file("json", c.json, INSPECTED_BEGINNING);
        if (c.text.size() != 1) fail_usage("inspect: --text is missing: one file of text, or - for stdin");
        const std::string& file = c.text[0];
        const std::vector<std::string> texts = read_documents(file, "inspect --text").texts;
        if (texts.size() != 1) fail("--text %s: inspect shows one document, not %d", file, texts.size());
        const std::string& text = texts[0];
        if (text.empty()) fail("--text %s holds no text", file);
        warn_of_end_of_text(texts, "--text " + file);
        const std::vector<uint16_t> ids = tokenizer.encode(text);
        const size_t shown = std::min(ids.size(), MAX_TOKENS - 1);
        if (shown < ids.size())
            print("inspect: the first %d of the %d tokens in %s; a page shows no more: cut the text\n", shown,
                  ids.size(), printable(file));
        tokens = {tokenizer.end_of_text};
        std::vector<std::string> bytes = {""};
        for (size_t i = 0; i < shown; i++) {
            tokens.push_back(ids[i]);
            bytes.push_back(tokenizer.decode({ids[i]}));
        }
        if (int64_t(tokens.size()) > c.seq_len)
            complain(
                "a text of %d tokens, and the model was trained on %d at a time: what it selects "
                "beyond that length it has not learnt",
                tokens.size() - 1, c.seq_len);
        const NsaShape s = shape_of(c, 1, 1);
        int nsa_layers = 0;
        for (int64_t i = 0; i < c.layers; i++) nsa_layers += s.kind_of_layer(size_t(i)) == NSA_LAYER;
        json = INSPECTED_BEGINNING;
        json += "\"checkpoint\": " + json_quote(folder, true) + ", \"text\": " + json_quote(file, true) +
                ",\n\"shape\": " +
                Json{{"layers", nsa_layers},     {"heads", c.heads},           {"kv_groups", c.kv_groups},
                     {"cmp_block", c.cmp_block}, {"cmp_stride", c.cmp_stride}, {"slc_block", c.slc_block},
                     {"slc_count", c.slc_count}, {"window", c.window},         {"seq_len", c.seq_len}}
                    .to_text() +
                ",\n\"ids\": [";
        add_list(tokens, [](int32_t id) { return std::to_string(id); });
        json += "],\n\"tokens\": [";
        add_list(show_tokens(bytes), [](const std::string& text) { return json_quote(text); });
        json += "],\n\"layers\": [";
    }

    // Takes over what a forward pass over all tokens has left of layer i, if it is one of NSA.
    template <class Dev>
    void add_layer(const Activations<Dev>& a, size_t i) {
        const NsaShape& s = a.shape;
        const auto& y = a.layer[i];
        Dev& dev = a.dev;
        if (s.kind_of_layer(i) != NSA_LAYER) return;
        const size_t rows = s.query_rows(), D = size_t(s.D), words = size_t(s.selection_words());
        std::vector<float> q(rows * D), keys(s.cmp_rows() * D);
        std::vector<typename Dev::Stat> lse(rows), gate(BRANCHES * rows);
        std::vector<uint32_t> selection(size_t(s.G) * s.T * words);
        dev.to_host(q.data(), y.q, q.size());
        dev.to_host(keys.data(), y.compressed, keys.size());
        dev.copy(lse.data(), (const typename Dev::Stat*)y.lse, rows);
        dev.copy(gate.data(), (const typename Dev::Stat*)y.gate, gate.size());
        dev.copy(selection.data(), (const uint32_t*)y.selection, selection.size());
        json += format_text("%s\n{\"layer\": %d, \"groups\": [", layers++ ? "," : "", i);
        for (int g = 0; g < s.G; g++) {
            std::vector<std::string> blocks(size_t(s.T)), importances(blocks), totals(blocks), gates(blocks);
#pragma omp parallel for schedule(dynamic, 16)
            for (int t = 0; t < s.T; t++) {
                const std::vector<float> importance = compute_importance(q, keys, lse, g, t, s);
                float total = 0;
                std::string chosen, values, of_heads;
                for (int block = 0; block <= t / s.slc_block; block++) {
                    total += importance[size_t(block)];
                    if (!is_selected(&selection[(size_t(g) * s.T + t) * words], block)) continue;
                    chosen += (chosen.empty() ? "" : ",") + std::to_string(block);
                    values += (values.empty() ? "" : ",") + format_text("%.4g", double(importance[size_t(block)]));
                }
                for (int head = g * s.heads_per_group(); head < (g + 1) * s.heads_per_group(); head++) {
                    const auto of = [&](Branch branch) {
                        return double(gate[branch * rows + s.query_row(size_t(head), t)]);
                    };
                    of_heads +=
                        (of_heads.empty() ? "" : ",") + format_text("[%.3f,%.3f,%.3f]", of(CMP), of(SLC), of(WIN));
                }
                blocks[size_t(t)] = "[" + chosen + "]";
                importances[size_t(t)] = "[" + values + "]";
                totals[size_t(t)] = format_text("%.4g", double(total));
                gates[size_t(t)] = "[" + of_heads + "]";
            }
            json += std::string(g ? "," : "") + "\n {\"blocks\": [" + joined_words(blocks, ",") +
                    "],\n  \"importances\": [" + joined_words(importances, ",") + "],\n  \"all_importance\": [" +
                    joined_words(totals, ",") + "],\n  \"gates\": [" + joined_words(gates, ",") + "]}";
        }
        json += "]}";
    }

    void write(const std::string& html_path, const std::string& json_path) {
        json += "]}\n";
        if (!json_path.empty()) {
            write_output_file("json", json_path, json, INSPECTED_BEGINNING);
            print("inspect: %s\n", printable(json_path));
        }
        if (html_path.empty()) return;
        const std::string page(file_inspect_page, file_inspect_page_end);
        write_output_file("html", html_path, fill_page(page, json), PAGE_BEGINNING);
        print("inspect: %s\n", printable(html_path));
    }

  private:
    std::string json;
    int layers = 0;

    template <class List, class Text>
    void add_list(const List& list, Text text) {
        for (size_t i = 0; i < list.size(); i++) json += (i ? "," : "") + text(list[i]);
    }
    // Paper eq. 8 to 10: the importance of every block that query t may choose, from what the layer chose by.
    template <class Stat>
    static std::vector<float> compute_importance(const std::vector<float>& q, const std::vector<float>& keys,
                                                 const std::vector<Stat>& lse, int g, int t, const NsaShape& s) {
        std::vector<float> weight(size_t(s.cmp_blocks(t + 1))), importance(size_t(t / s.slc_block + 1));
        for (size_t i = 0; i < weight.size(); i++)
            for (int head = g * s.heads_per_group(); head < (g + 1) * s.heads_per_group(); head++) {
                const size_t row = s.query_row(size_t(head), t);
                const float* const key = &keys[(size_t(g) * s.cmp_capacity() + i) * s.D];
                float score = 0;
                for (int x = 0; x < s.D; x++) score += q[row * s.D + x] * key[x];
                weight[i] += std::exp(score * float(s.scale()) - float(lse[row]));
            }
        TiledAttention::fold_importance(importance.data(), weight.data(), t, s);
        return importance;
    }
};

inline void run_inspect(Config c, World& world) {
    const TrainedModel trained = open_trained_model(c);
    Inspection inspection(c, trained.checkpoint.folder, *find_tokenizer(c));
    const int64_t T = int64_t(inspection.tokens.size());
    with_trained_model(c, *trained.weights, world, [&](auto& model) {  // one pass, as of a prompt
        Decoder decoder(model, T, T);
        forward(model, decoder.a, inspection.tokens.data(), 0, int(T),
                [&](size_t i) { inspection.add_layer(decoder.a, i); });
    });
    inspection.write(c.html, c.json);
}
