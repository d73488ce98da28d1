// tokenizer_tests.h: the JSON reader, the pre-tokeniser, byte-level BPE and its vocabulary files. The oracles:
// hand-written cases, a slow pre-tokeniser that follows the regular expression literally, a naive BPE trainer and
// encoder on strings, and, where the folder ../shared/data is at hand, the published GPT-2 vocabulary on real text.

#pragma once
#include <map>
#include <set>
#include <sstream>

#include "../../../lib/data/tokenize.h"
#include "../../../tokenizer.h"
#include "../harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// Helpers.

// The path of a file in shared/data beside the checkout; empty where there is none.
inline std::string shared_data(const std::string& name) {
    const std::string path = "../shared/data/" + name;
    return file_exists(path) ? path : "";
}

// Random strings: `alphabet` is what they are put together from.
struct RandomText {
    uint64_t counter = 0, seed;
    explicit RandomText(uint64_t seed) : seed(seed) {}
    uint64_t below(uint64_t n) { return random_below(n, seed, random_stream(RANDOM_TEST), counter++); }
    std::string of(const std::vector<std::string>& alphabet, size_t count) {
        std::string text;
        for (size_t i = 0; i < count; i++) text += alphabet[below(alphabet.size())];
        return text;
    }
    std::string bytes(size_t count) {
        std::string text;
        for (size_t i = 0; i < count; i++) text += char(below(256));
        return text;
    }
};

// A character and everything that the pre-tokeniser may trip over: each class in each length of UTF-8, halves of
// characters, contractions.
inline const std::vector<std::string>& tricky_text() {
    // clang-format off
    static const char TEXT[] =
        " | | |\n|\t|\r|\v|'|'s|'t|'re|'ve|'m|'ll|'d|'S|a|l|v|e|Z|0|9|.|!|-|\xC3\xA9|\xC2\xB2|\xC2\xA0|"
        "\xC2\x85|\xE4\xB8\xAD|\xE2\x85\xB7|\xE3\x80\x80|\xE2\x80\xA8|\xE2\x80\x99|\xCC\x81|\xF0\x9F\x98\x80|"
        "\xF0\x9D\x94\xB8|\xF0\x9D\x9F\x99|\xE2\x80\x8B|\0|\x1C|\x7F|\xFF|\x80|\xE2|\xE2\x80|\xF0\x9F|\xC3|"
        "\xED\xA0\x80|\xC0\x80|\xF4\x90\x80\x80";
    // clang-format on
    static const std::vector<std::string> pieces = [] {
        std::istringstream in(std::string(TEXT, sizeof TEXT - 1));
        std::vector<std::string> all;
        for (std::string piece; std::getline(in, piece, '|');) all.push_back(piece);
        return all;
    }();
    return pieces;
}

inline std::string joined(const std::vector<std::string>& pieces) {
    std::string text;
    for (const std::string& piece : pieces) text += "[" + piece + "]";
    return text;
}

inline std::vector<std::string> pieces_of(const std::string& text) {
    const PreTokenizer pre_tokenizer;
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
        const size_t end = pre_tokenizer.piece_end(text.data(), text.size(), at);
        if (end <= at || end > text.size()) fail("piece_end(%d) is %d of %d", at, end, text.size());
        pieces.push_back(text.substr(at, end - at));
        at = end;
    }
    return pieces;
}

// The slow pre-tokeniser: characters with their class, then the alternatives one after the other, each with its own
// backtracking.
inline std::vector<std::string> slow_pieces(const std::string& text) {
    struct Character {
        std::string bytes;
        char c;
    };  // L, N, S or O
    std::vector<Character> s;
    for (size_t i = 0; i < text.size();) {
        const unsigned char lead = static_cast<unsigned char>(text[i]);
        const int wanted = lead < 0x80 ? 1 : lead < 0xC0 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF8 ? 4 : 0;
        uint32_t code = wanted == 1 ? lead : wanted ? lead & ((1u << (7 - wanted)) - 1) : 0;
        int length = 1;
        while (length < wanted && i + length < text.size() && (text[i + length] & 0xC0) == 0x80)
            code = code << 6 | (text[i + length++] & 0x3F);
        const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
        const bool valid = wanted && length == wanted && code >= least[wanted] && code <= 0x10FFFF &&
                           !(code >= 0xD800 && code < 0xE000);
        char c = 'O';
        if (valid) {
            static const auto letters = unicode_ranges(unicode_letters), numbers = unicode_ranges(unicode_numbers),
                              blanks = unicode_ranges(unicode_white_space);
            for (const UnicodeRange& r : letters)
                if (code >= r.first && code <= r.last) c = 'L';
            for (const UnicodeRange& r : numbers)
                if (code >= r.first && code <= r.last) c = 'N';
            for (const UnicodeRange& r : blanks)
                if (code >= r.first && code <= r.last) c = 'S';
        }
        s.push_back({text.substr(i, valid ? wanted : 1), c});
        i += valid ? wanted : 1;
    }
    std::vector<std::string> pieces;
    for (size_t at = 0; at < s.size();) {
        size_t matched = 0;  // characters
        for (const std::string word : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
            std::string here;
            for (size_t i = at; i < s.size() && i < at + word.size(); i++) here += s[i].bytes;
            if (!matched && here == word) matched = word.size();
        }
        for (const char c : {'L', 'N', 'O'})
            for (const size_t blank : {1, 0}) {  // ' ?' tries with the blank first
                if (matched || (blank && s[at].bytes != " ")) continue;
                size_t end = at + blank;
                while (end < s.size() && s[end].c == c) end++;
                if (end > at + blank) matched = end - at;
            }
        size_t spaces = 0;
        while (at + spaces < s.size() && s[at + spaces].c == 'S') spaces++;
        for (size_t n = spaces; n >= 1 && !matched; n--)  // \s+(?!\S) gives back one after the other
            if (at + n == s.size() || s[at + n].c == 'S') matched = n;
        if (!matched) matched = spaces;
        if (!matched) fail("no alternative matches");
        std::string piece;
        for (size_t i = at; i < at + matched; i++) piece += s[i].bytes;
        pieces.push_back(piece);
        at += matched;
    }
    return pieces;
}

// A small vocabulary, trained in the naive way: the most frequent pair
// of neighbours (the first in order among equals) is merged, and again.
struct NaiveBpe {
    // the 256 bytes in GPT-2's order: 33-126, 161-172, 174-255, then the others
    std::vector<std::string> bytes;
    std::vector<std::pair<std::string, std::string>> merges;

    NaiveBpe() {
        std::string first, others;
        for (int b = 0; b < 256; b++)
            ((b > 32 && b < 127) || (b > 160 && b < 173) || b > 173 ? first : others) += char(b);
        for (const char b : first + others) bytes.push_back(std::string(1, b));
    }

    // Counts all pairs anew for each merge; of those that occur most often, the one with the lowest ids. least: how
    // often the last one occurs.
    void train(const std::vector<std::string>& words, size_t count, int least = 1) {
        std::vector<std::vector<std::string>> parts;
        for (const std::string& word : words) {
            parts.emplace_back();
            for (const char b : word) parts.back().push_back(std::string(1, b));
        }
        while (merges.size() < count) {
            std::map<std::pair<size_t, size_t>, int> pairs;
            for (const auto& p : parts)
                for (size_t i = 1; i < p.size(); i++)
                    if (p[i - 1].size() + p[i].size() <= 128) pairs[{id(p[i - 1]), id(p[i])}]++;
            auto best = pairs.begin();
            for (auto it = pairs.begin(); it != pairs.end(); ++it)
                if (it->second > best->second) best = it;
            if (pairs.empty() || best->second < least) return;
            merges.push_back({token(best->first.first), token(best->first.second)});
            for (auto& p : parts) p = merge_all(p, merges.back());
        }
    }

    static std::vector<std::string> merge_all(const std::vector<std::string>& parts,
                                              const std::pair<std::string, std::string>& pair) {
        std::vector<std::string> out;
        for (size_t i = 0; i < parts.size(); i++) {
            if (i + 1 < parts.size() && parts[i] == pair.first && parts[i + 1] == pair.second)
                out.push_back(parts[i] + parts[i + 1]), i++;
            else out.push_back(parts[i]);
        }
        return out;
    }

    // Token id of a part, and the encoding of one piece: every merge in the order of its rank.
    size_t id(const std::string& part) const {
        for (size_t i = 0; i < bytes.size(); i++)
            if (bytes[i] == part) return i;
        for (size_t i = 0; i < merges.size(); i++)
            if (merges[i].first + merges[i].second == part) return 256 + i;
        fail("no token");
    }
    std::vector<uint16_t> encode(const std::string& piece) const {
        std::vector<std::string> parts;
        for (const char b : piece) parts.push_back(std::string(1, b));
        for (const auto& pair : merges) parts = merge_all(parts, pair);
        std::vector<uint16_t> ids;
        for (const std::string& part : parts) ids.push_back(uint16_t(id(part)));
        return ids;
    }

    size_t size() const { return 257 + merges.size(); }
    std::string token(size_t i) const { return i < 256 ? bytes[i] : merges[i - 256].first + merges[i - 256].second; }

    // A token as the files of OpenAI write it.
    std::string written(const std::string& token) const {
        std::string out;
        for (const char b : token)
            for (uint32_t i = 0; i < 256; i++)
                if (bytes[i][0] == b)
                    utf8_append(out, i < 188 ? uint32_t(static_cast<unsigned char>(b)) : 0x100 + i - 188);
        return out;
    }
    std::vector<std::string> merge_lines() const {
        std::vector<std::string> lines = {"#version: 0.2"};
        for (const auto& pair : merges) lines.push_back(written(pair.first) + " " + written(pair.second));
        return lines;
    }
    std::vector<std::string> id_entries() const {
        std::vector<std::string> entries;
        for (size_t i = 0; i + 1 < size(); i++)
            entries.push_back(json_quote(written(token(i))) + ": " + std::to_string(i));
        entries.push_back("\"<|endoftext|>\": " + std::to_string(size() - 1));
        return entries;
    }
    std::string llmc(uint32_t version = 2) const {
        uint32_t header[256] = {20240328, version, uint32_t(size()), uint32_t(version == 2 ? size() - 1 : 0)};
        std::string out(reinterpret_cast<const char*>(header), sizeof header);
        for (size_t i = 0; i < size(); i++) {
            const std::string t = i + 1 < size() ? token(i) : "<|endoftext|>";
            out += char(t.size());
            out += t;
        }
        return out;
    }
    std::vector<std::string> tiktoken_lines() const {
        const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        std::vector<std::string> lines;
        for (size_t i = 0; i + 1 < size(); i++) {
            std::string t = token(i), line;
            const size_t n = t.size();
            t += std::string(2, '\0');
            for (size_t j = 0; j < n; j += 3) {
                const uint32_t bits =
                    uint32_t(uint8_t(t[j])) << 16 | uint32_t(uint8_t(t[j + 1])) << 8 | uint8_t(t[j + 2]);
                for (size_t k = 0; k < 4; k++) line += j + k <= n ? digits[bits >> (18 - 6 * k) & 63] : '=';
            }
            lines.push_back(line + " " + std::to_string(i));
        }
        return lines;
    }
};

inline std::string lines_text(const std::vector<std::string>& lines, const std::string& between = "\n",
                              const std::string& end = "\n") {
    std::string text;
    for (size_t i = 0; i < lines.size(); i++) text += lines[i] + (i + 1 < lines.size() ? between : end);
    return text;
}

// A vocabulary of 256 + 70 + 1 tokens, trained on pieces of random words over a few letters, so that merges overlap a
// lot.
inline const NaiveBpe& small_bpe() {
    static const NaiveBpe bpe = [] {
        NaiveBpe b;
        RandomText random(11);
        std::vector<std::string> words;
        for (int i = 0; i < 150; i++)
            words.push_back(random.of({"", " "}, 1) +
                            random.of({"a", "b", "aa", "ab", "c", "\xC3\xA9"}, 1 + random.below(8)));
        b.train(words, 70);
        return b;
    }();
    return bpe;
}

inline void write_openai(const std::string& folder, const std::vector<std::string>& merge_lines,
                         const std::vector<std::string>& id_entries) {
    write_file(folder + "/vocab.bpe", lines_text(merge_lines));
    write_file(folder + "/encoder.json", "{" + lines_text(id_entries, ", ", "}"));
}

inline Tokenizer small_tokenizer() {
    TempFolder folder;
    write_openai(folder.path, small_bpe().merge_lines(), small_bpe().id_entries());
    return Tokenizer::gpt2(folder.path, int(small_bpe().size()));
}

inline std::string show_ids(const std::vector<uint16_t>& ids) {
    std::string text;
    for (size_t i = 0; i < ids.size() && i < 40; i++) text += std::to_string(ids[i]) + " ";
    return text + "(" + std::to_string(ids.size()) + ")";
}

// ---------------------------------------------------------------------------------------------------------------------
// JSON.

TEST(json_values_and_order) {
    const Json j =
        parse_json(" {\"z\": [1, -2.5e1, true, false, null, \"x\"], \"a\": {\"\": {}}, \"empty\": [] }\r\n", "here");
    CHECK_EQUAL(j.kind, Json::Object);
    REQUIRE(j.keys.size() == 3);
    CHECK_EQUAL(j.keys[0] + j.keys[1] + j.keys[2], "zaempty");
    const std::vector<Json>& z = j.array("z", "here");
    REQUIRE(z.size() == 6);
    CHECK_EQUAL(z[0].integer("here"), int64_t(1));
    CHECK_EQUAL(z[1].number("here"), -25.0);
    CHECK(!z[1].is_integer);
    CHECK_EQUAL(z[2].kind, Json::Bool);
    CHECK_EQUAL(z[3].kind, Json::Bool);
    CHECK(z[2].is_true && !z[3].is_true && z[4].kind == Json::Null);
    CHECK_EQUAL(z[5].string("here"), "x");
    CHECK_EQUAL(z[1].offset, uint64_t(11));
    CHECK(j.find("a")->find("") && !j.find("b") && j.array("empty", "here").empty());
    CHECK_EQUAL(parse_json("9223372036854775807", "x").integer("x"), INT64_MAX);
    CHECK_EQUAL(parse_json("-9223372036854775808", "x").integer("x"), INT64_MIN);
    CHECK_EQUAL(parse_json("0.1", "x").number("x"), 0.1);
    CHECK_EQUAL(parse_json("1E-2", "x").number("x"), 0.01);
    CHECK_EQUAL(parse_json("-0", "x").integer("x"), int64_t(0));
    CHECK_EQUAL(parse_json("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\\ud83d\\ude00\\u0000\"", "x").text,
                std::string("\"\\/\b\f\n\r\tA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\0", 19));
}

TEST(json_errors_name_file_and_byte) {
    struct {
        const char *text, *words;
    } const cases[] = {{"", "cfg: byte 0: not valid JSON: found the end of the text, expected a value"},
                       {"[1,]", "cfg: byte 3: not valid JSON: found ']', expected a value"},
                       {"[1 2]", "byte 3: not valid JSON: found '2', expected ',' or ']'"},
                       {"{\"a\" 1}", "byte 5: not valid JSON: found '1', expected ':'"},
                       {"{a: 1}", "byte 1: not valid JSON: found 'a', expected a key"},
                       {"{\"a\": 1,}", "byte 8: not valid JSON: found '}', expected a key"},
                       {"{} x", "byte 3: not valid JSON: found 'x', expected the end"},
                       {"\"abc", "byte 4: not valid JSON: found the end of the text, expected '\"'"},
                       {"\"a\nb\"", "byte 2: not valid JSON: found byte 0x0a"},
                       {"\"\\x\"", "byte 2: not valid JSON: found 'x'"},
                       {"\"\\u12g4\"", "byte 5: not valid JSON: found 'g', expected four hex"},
                       {"\"ab\\ud800\"", "byte 3: not valid JSON: an escape that is only half"},
                       {"\"\\ud800\\u0041\"", "byte 1: not valid JSON: an escape that is only half"},
                       {"\"\\udc00\"", "half of a surrogate"},
                       {"\"\\udc80\"", "half of a surrogate"},
                       {"\"\xC3(\"", "byte 1: not valid JSON: found byte 0xc3, expected valid UTF-8"},
                       {"01", "byte 1: not valid JSON: found '1', expected no digit"},
                       {"-", "byte 1"},
                       {"1.", "byte 2"},
                       {".5", "byte 0"},
                       {"1e", "byte 2"},
                       {"+1", "byte 0"},
                       {"NaN", "byte 0"},
                       {"nul", "byte 0"},
                       {"tru", "byte 0"},
                       {"1e999", "beyond a double's range"},
                       {"{\"k\": 1, \"j\": 2, \"k\": 3}", "byte 0: the object has the key \"k\" twice"}};
    for (const auto& c : cases) CHECK_FAILS(1, c.words, parse_json(c.text, "cfg"));
    CHECK_FAILS(1, "cfg: byte 1003: not", parse_json("[1,]", "cfg", 1000));
    const std::string deep(100, '['), deeper(101, '[');
    parse_json(deep + std::string(100, ']'), "cfg");
    CHECK_FAILS(1, "byte 100: JSON nested deeper than 100", parse_json(deeper + std::string(101, ']'), "cfg"));
    CHECK_FAILS(1, "nested", parse_json(std::string(1000000, '['), "cfg"));
    const Json j = parse_json("{\"n\": 1.5, \"s\": \"x\"}", "cfg");
    CHECK_FAILS(1, "cfg: byte 0: the object has no key \"width\"", j.integer("width", "cfg"));
    CHECK_FAILS(1, "cfg: n: byte 6: found 1.5, expected a whole number", j.integer("n", "cfg"));
    CHECK_FAILS(1, "cfg: s: byte 16: found a string, expected a number", j.number("s", "cfg"));
    CHECK_FAILS(1, "found a number, expected a string", j.string("n", "cfg"));
    CHECK_FAILS(1, "found an object, expected an array", j.array("cfg"));
    CHECK_FAILS(1, "a whole number of 64 bits", parse_json("9223372036854775808", "cfg").integer("cfg"));
    CHECK_FAILS(1, "a whole number of 64 bits", parse_json("2.0", "cfg").integer("cfg"));
    // Programs that keep numbers as doubles write 2.0; beyond 2^53 a double is not the number that was meant.
    CHECK_EQUAL(parse_json("2.0", "cfg").whole_number("cfg"), int64_t(2));
    CHECK_EQUAL(parse_json("9007199254740992.0", "cfg").whole_number("cfg"), int64_t(1) << 53);
    CHECK_FAILS(1, "a whole number of 64 bits", parse_json("9007199254740994.0", "cfg").whole_number("cfg"));
    CHECK_FAILS(1, "a whole number of 64 bits", parse_json("1e300", "cfg").whole_number("cfg"));
}

TEST(json_is_written_as_it_is_read) {
    Json all = {{"whole", -7}, {"large", uint64_t(1) << 63}, {"yes", true}, {"none", Json()}, {"text", "a\"b"}};
    all.add("third", {1 / 3.0, "%.3f"}).add("nan", {NAN, "%g"}).add("empty", Json(Json::Object));
    all.add({{"list", Json::list(std::vector<int>{1, 2})}, {"inner", {{"a", 1}, {"b", {0.5, "%g"}}}}});
    const std::string spaced =
        "{\"whole\": -7, \"large\": 9223372036854775808, \"yes\": true, \"none\": null, \"text\": \"a\\\"b\", "
        "\"third\": 0.333, \"nan\": null, \"empty\": {}, \"list\": [1, 2], \"inner\": {\"a\": 1, \"b\": 0.5}}";
    CHECK_EQUAL(all.to_text(), spaced);
    CHECK_EQUAL(parse_json(spaced, "spaced").to_text(), spaced);
    CHECK_EQUAL(all.number("third", "all"), 0.333);  // the number that a reader finds
    const Json inner = all.get("inner", "all");
    CHECK_EQUAL(inner.to_text(Json::COMPACT), "{\"a\":1,\"b\":0.5}");
    CHECK_EQUAL(inner.to_text(Json::LINES), "{\"a\": 1,\n \"b\": 0.5}");
    CHECK_EQUAL(Json("x\xFF", true).to_text(), "\"x\\udcff\"");
}

TEST(json_quote_is_always_valid) {
    CHECK_EQUAL(json_quote("a\"b\\c\n\x01\xC3\xA9"), "\"a\\\"b\\\\c\\n\\u0001\xC3\xA9\"");
    CHECK_EQUAL(json_quote("x\xFFy\xE2\x80"), "\"x\xEF\xBF\xBDy\xEF\xBF\xBD\xEF\xBF\xBD\"");
    RandomText random(1);
    for (int i = 0; i < 2000; i++) {
        const std::string text = i % 2 ? random.bytes(random.below(12)) : random.of(tricky_text(), random.below(12));
        const std::string back = parse_json(json_quote(text), "quoted").text;
        if (back != text) CHECK(holds(back, "\xEF\xBF\xBD"));  // only what is no UTF-8 is replaced
        CHECK_EQUAL(parse_json(json_quote(back), "quoted").text, back);
    }
}

TEST(utf8_accepts_exactly_the_characters) {
    // Every character comes back from its bytes, and no more sequences are accepted than there are characters: so no
    // others are.
    std::string text;
    uint32_t code;
    int wrong = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) continue;
        text.clear();
        utf8_append(text, c);
        const int length = utf8_decode(text.data(), text.size(), &code);
        wrong += length != int(text.size()) || code != c ||
                 (length > 1 && utf8_decode(text.data(), text.size() - 1, &code) != 0);
    }
    CHECK_EQUAL(wrong, 0);
    int accepted[5] = {};
    for (uint32_t lead = 0; lead < 256; lead++)
        for (uint32_t rest = 0; rest < 65536; rest++) {
            const char bytes[] = {char(lead), char(rest >> 8), char(rest), char(0x80)};  // a fourth byte stands for 64
            accepted[utf8_decode(bytes, 4, &code)]++;
        }
    CHECK_EQUAL(accepted[1], 128 << 16);
    CHECK_EQUAL(accepted[2], (0x800 - 0x80) << 8);
    CHECK_EQUAL(accepted[3], 0x10000 - 0x800 - 0x800);
    CHECK_EQUAL(accepted[4], 0x100000 / 64);
}

// ---------------------------------------------------------------------------------------------------------------------
// The pre-tokeniser.

TEST(unicode_classes_known_characters) {
    struct {
        uint32_t code;
        CharClass expected;
    } const cases[] = {
        {'a', LETTER},    {'Z', LETTER},     {'_', OTHER},      {'0', NUMBER},     {' ', SPACE},      {'\n', SPACE},
        {0x0B, SPACE},    {0x1C, OTHER},     {0x1F, OTHER},     {0x7F, OTHER},     {0x85, SPACE},     {0xA0, SPACE},
        {0xAA, LETTER},   {0xB2, NUMBER},    {0xBD, NUMBER},    {0xD7, OTHER},     {0xE9, LETTER},    {0x2B0, LETTER},
        {0x301, OTHER},   {0x416, LETTER},   {0x5D0, LETTER},   {0x660, NUMBER},   {0x903, OTHER},    {0x1680, SPACE},
        {0x180E, OTHER},  {0x2000, SPACE},   {0x200A, SPACE},   {0x200B, OTHER},   {0x2028, SPACE},   {0x2029, SPACE},
        {0x202F, SPACE},  {0x205F, SPACE},   {0x2060, OTHER},   {0x2167, NUMBER},  {0x20AC, OTHER},   {0x3000, SPACE},
        {0x3007, NUMBER}, {0x3042, LETTER},  {0x4E00, LETTER},  {0x9FFF, LETTER},  {0xAC00, LETTER},  {0xD7A3, LETTER},
        {0xE000, OTHER},  {0xFEFF, OTHER},   {0xFFFD, OTHER},   {0x10400, LETTER}, {0x1D538, LETTER}, {0x1D7D9, NUMBER},
        {0x1F600, OTHER}, {0x20000, LETTER}, {0x323AF, LETTER}, {0x323B0, OTHER},  {0x10FFFF, OTHER}};
    const PreTokenizer pre_tokenizer;
    for (const auto& c : cases) {
        std::string text;
        utf8_append(text, c.code);
        int length;
        const CharClass found = pre_tokenizer.class_at(text.data(), text.size(), 0, &length);
        if (found != c.expected || length != int(text.size()))
            check_failed(__FILE__, __LINE__, "U+%04X: class %d, length %d", c.code, found, length);
        tests().checks++;
    }
    const auto count = [](const auto& ranges) {
        uint32_t n = 0, last = 0;
        for (const UnicodeRange& r : ranges) {
            CHECK(r.first <= r.last && (n == 0 || r.first > last + 1));
            n += r.last - r.first + 1, last = r.last;
        }
        return n;
    };
    CHECK_EQUAL(count(unicode_ranges(unicode_white_space)),
                25u);  // the property White_Space, unchanged since Unicode 6.3
    CHECK_EQUAL(count(unicode_ranges(unicode_letters)),
                141028u);  // Unicode 16.0, DerivedGeneralCategory: Lu 1858, Ll 2258, Lt 31, Lm 404, Lo 136477
    CHECK_EQUAL(count(unicode_ranges(unicode_numbers)), 1911u);  // Nd 760, Nl 236, No 915
}

TEST(pre_tokenizer_by_hand) {
    struct {
        std::string text, pieces;
    } const cases[] = {
        {"Hello world", "[Hello][ world]"},
        {"I'm you're he's don't we've they'll I'd",
         "[I]['m][ you]['re][ he]['s][ don]['t][ we]['ve][ they]['ll][ I]['d]"},
        {"I'M 'tis 's", "[I]['][M][ '][tis][ '][s]"},
        {"'l'", "['][l][']"},
        {"'llx'rexy", "['ll][x]['re][xy]"},
        {"!'s", "[!'][s]"},
        {"abc123def 456", "[abc][123][def][ 456]"},
        {"x  y", "[x][ ][ y]"},
        {"x   y", "[x][  ][ y]"},
        {"x \n y", "[x][ \n][ y]"},
        {"x\ny", "[x][\n][y]"},
        {"x\n\ny", "[x][\n][\n][y]"},
        {"x \ty", "[x][ ][\t][y]"},
        {"x  ", "[x][  ]"},
        {" ", "[ ]"},
        {"  a", "[ ][ a]"},
        {"a ...!? b", "[a][ ...!?][ b]"},
        {"a\u00A0b", "[a][\u00A0][b]"},  // no-break space is white space, but not the blank of ' ?'
        {"a \u00A0b", "[a][ ][\u00A0][b]"},
        {"a\u3000\u3000b", "[a][\u3000][\u3000][b]"},                    // ideographic space
        {"a \xE2\x80\xA8\xC2\x85 b", "[a][ \xE2\x80\xA8\xC2\x85][ b]"},  // line separator, next line
        {"caf\u00E9 \u0416\u0443\u043A", "[caf\u00E9][ \u0416\u0443\u043A]"},
        {"e\u0301x", "[e][\u0301][x]"},                          // a combining mark is no letter
        {"x\u00B2 \u2177\u00BD", "[x][\u00B2][ \u2177\u00BD]"},  // superscript two, roman numeral, one half
        {"\u4E2D\u6587\u3002\u5B57", "[\u4E2D\u6587][\u3002][\u5B57]"},
        {"hi \U0001F600\U0001F44D!x", "[hi][ \U0001F600\U0001F44D!][x]"},
        {"it\u2019s", "[it][\u2019][s]"},  // the typographic apostrophe makes no contraction
        {"<|endoftext|>", "[<|][endoftext][|>]"},
        {"a\xFF\xFEz \xE2\x80 c", "[a][\xFF\xFE][z][ \xE2\x80][ c]"},  // invalid bytes count as punctuation
        {"\xE4\xB8", "[\xE4\xB8]"},
        {"a\x1Cz", "[a][\x1C][z]"}};
    for (const auto& c : cases) {
        CHECK_EQUAL(joined(pieces_of(c.text)), c.pieces);
        CHECK_EQUAL(joined(slow_pieces(c.text)), c.pieces);
    }
}

TEST(pre_tokenizer_matches_slow_one) {
    RandomText random(2);
    for (int i = 0; i < 4000; i++) {
        const std::string text =
            i % 4 ? random.of(tricky_text(), 1 + random.below(24)) : random.bytes(1 + random.below(16));
        CHECK_EQUAL(joined(pieces_of(text)), joined(slow_pieces(text)));
    }
}

TEST(pre_tokenizer_cuts_wherever_it_says) {
    RandomText random(3);
    const PreTokenizer pre_tokenizer;
    size_t cuts = 0, places = 0;
    for (int i = 0; i < 1500; i++) {
        const std::string text = random.of(tricky_text(), 2 + random.below(16));
        const std::vector<std::string> whole = slow_pieces(text);
        for (size_t at = 1; at < text.size(); at++, places++) {
            if (!pre_tokenizer.always_cuts(text.data(), text.size(), at)) continue;
            cuts++;
            std::vector<std::string> both = slow_pieces(text.substr(0, at));
            for (const std::string& piece : slow_pieces(text.substr(at))) both.push_back(piece);
            CHECK_EQUAL(joined(both), joined(whole));
        }
    }
    CHECK(cuts > places / 8);  // a test of something
}

// ---------------------------------------------------------------------------------------------------------------------
// Encoding.

TEST(bpe_matches_naive_one) {
    const NaiveBpe& naive = small_bpe();
    REQUIRE(naive.merges.size() == 70);
    const Tokenizer tokenizer = small_tokenizer();
    CHECK_EQUAL(tokenizer.vocab_size(), 327);
    CHECK_EQUAL(tokenizer.end_of_text, uint16_t(326));
    Encoder encoder(tokenizer);
    MergeScratch scratch;
    RandomText random(4);
    const std::vector<std::string> letters = {"a", "b", "c", "ab", "aa", "\xC3\xA9", " "};
    std::set<uint16_t> seen;
    for (int i = 0; i < 1500; i++) {
        // One piece, long ones too, whatever characters it holds.
        const std::string piece = random.of(letters, 1 + random.below(i % 10 ? 12 : 120));
        std::vector<uint16_t> ids;
        tokenizer.merge_piece(piece.data(), piece.size(), scratch, ids);
        CHECK_EQUAL(show_ids(ids), show_ids(naive.encode(piece)));
        seen.insert(ids.begin(), ids.end());
        // A text, through the pre-tokeniser and the table of words, which fills up over the rounds.
        const std::string text = random.of(letters, random.below(60)) + random.of(tricky_text(), random.below(10));
        std::vector<uint16_t> expected, found;
        for (const std::string& p : slow_pieces(text))
            for (const uint16_t id : naive.encode(p)) expected.push_back(id);
        encoder.append(text, found);
        CHECK_EQUAL(show_ids(found), show_ids(expected));
        CHECK(tokenizer.encode(text) == expected);
    }
    CHECK(seen.size() > 60);  // of the 70 merges and a few bytes
    // Both sides of the length from which on there is no heap.
    for (const size_t n : {LONG_PIECE - 1, LONG_PIECE, LONG_PIECE + 1, 3 * LONG_PIECE}) {
        const std::string one = random.of({"a"}, int(n)), many = random.of(letters, int(n)).substr(0, n);
        for (const std::string& piece : {one, many}) {
            std::vector<uint16_t> ids;
            tokenizer.merge_piece(piece.data(), piece.size(), scratch, ids);
            CHECK(ids == naive.encode(piece));
        }
    }
}

TEST(encode_round_trips_every_byte_sequence) {
    const Tokenizer bytes = Tokenizer::bytes(), small = small_tokenizer();
    for (const Tokenizer* tokenizer : {&bytes, &small}) {
        Encoder encoder(*tokenizer);
        std::vector<uint16_t> ids;
        const auto check = [&](const std::string& text) {
            ids.clear();
            encoder.append(text, ids);
            size_t count = 0;
            bool text_only = true;
            for (const uint16_t id : ids)
                count += tokenizer->token_bytes(id), text_only = text_only && id != tokenizer->end_of_text;
            CHECK(tokenizer->decode(ids) == text);
            if (text_only) CHECK_EQUAL(count, text.size());
            if (!tokenizer->is_bytes) CHECK(text_only);
        };
        check("");
        for (int a = 0; a < 256; a++) {
            check(std::string(1, char(a)));
            for (int b = 0; b < 256; b++) check(std::string{char(a), char(b)});
        }
        RandomText random(5);
        for (int i = 0; i < 20000; i++)
            check(i % 2 ? random.bytes(3 + random.below(6)) : random.of(tricky_text(), 3 + random.below(6)));
    }
    CHECK_EQUAL(show_ids(bytes.encode(std::string("a\0\xFF", 3))), "97 0 255 (3)");
    CHECK_EQUAL(bytes.vocab_size(), 256);
    CHECK_EQUAL(bytes.token_bytes(0), size_t(0));
    CHECK_EQUAL(bytes.token_bytes(65), size_t(1));
    CHECK_EQUAL(small.token_bytes(326), size_t(0));
    CHECK_EQUAL(small.decode({326}), "<|endoftext|>");
    CHECK_FAILS(1, "token 327 is not in the vocabulary of 327 tokens", small.decode({327}));
    std::string out;
    CHECK_FAILS(1, "token -1 is not in", bytes.decode_append(-1, out));
}

TEST(bpe_of_long_runs_is_not_quadratic) {
    NaiveBpe doubling;  // a a, aa aa, ... : the long run is merged on every level, as with GPT-2
    for (std::string run = "a"; run.size() < 64; run += run) doubling.merges.push_back({run, run});
    TempFolder folder;
    write_openai(folder.path, doubling.merge_lines(), doubling.id_entries());
    const Tokenizer tokenizer = Tokenizer::gpt2(folder.path, int(doubling.size()));
    const auto start = std::chrono::steady_clock::now();
    CHECK_EQUAL(tokenizer.encode(std::string(1 << 20, 'a')).size(), size_t(1 << 14));
    CHECK_EQUAL(tokenizer.encode(std::string((1 << 20) + 63, 'a')).size(), size_t((1 << 14) + 6));
    CHECK_EQUAL(tokenizer.encode(std::string(1 << 20, ' ')).size(), size_t(1 << 20));
    CHECK_EQUAL(tokenizer.encode(std::string(1 << 20, '\xFF')).size(), size_t(1 << 20));
    // about 0.5 s, twenty times that under sanitizers; a quadratic one takes hours
    CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 120);
}

TEST(vocabulary_formats_agree) {
    const NaiveBpe& naive = small_bpe();
    const int size = int(naive.size());
    TempFolder openai, windows, hugging_face, tiktoken, llmc1, llmc2;
    write_openai(openai.path, naive.merge_lines(), naive.id_entries());
    std::vector<std::string> lines = naive.merge_lines(), entries = naive.id_entries();
    lines.erase(lines.begin());
    std::reverse(entries.begin(), entries.end());
    write_file(hugging_face.file("merges.txt"),
               lines_text(lines, "\n", ""));  // neither the version nor the last newline is needed
    write_file(hugging_face.file("vocab.json"), "{" + lines_text(entries, ",", "}\n"));
    write_file(tiktoken.file("r50k_base.tiktoken"), lines_text(naive.tiktoken_lines()));
    write_file(llmc1.file("gpt2_tokenizer.bin"), naive.llmc(1));
    write_file(llmc2.file("gpt2_tokenizer.bin"), naive.llmc(2));
    const Tokenizer first = Tokenizer::gpt2(openai.path, size);
    CHECK_EQUAL(first.describe(), "gpt2: 327 tokens from " + openai.path + "/vocab.bpe and encoder.json");
    RandomText random(6);
    const std::string text = random.of({"a", "b", "c", "ab", "aa", "\xC3\xA9", " "}, 5000);
    const std::string mark = "\xEF\xBB\xBF";
    write_file(windows.file("vocab.bpe"), mark + lines_text(naive.merge_lines(), "\r\n"));
    write_file(windows.file("encoder.json"), mark + read_file(openai.file("encoder.json")));
    for (const TempFolder* folder : {&windows, &hugging_face, &tiktoken, &llmc1, &llmc2}) {
        const Tokenizer t = Tokenizer::gpt2(folder->path, size);
        CHECK(t.tokens == first.tokens);
        CHECK_EQUAL(t.end_of_text, first.end_of_text);
        CHECK(t.encode(text) == first.encode(text));
        CHECK(holds(t.describe(), folder->path));
    }
    CHECK_FAILS(2, "--tokenizer words: expected gpt2 or bytes", Tokenizer::open("words", ""));
    CHECK_FAILS(2, "needs --vocab-dir", Tokenizer::open("gpt2", ""));
    CHECK(Tokenizer::open("bytes", "").is_bytes);
}

TEST(damaged_vocabularies_are_refused_with_their_place) {
    const NaiveBpe& naive = small_bpe();
    const int size = int(naive.size());
    const std::vector<std::string> lines = naive.merge_lines(), entries = naive.id_entries();
    const auto load = [&](const std::string& folder) { Tokenizer::gpt2(folder, size); };
    CHECK_FAILS(1, "cannot open the vocabulary folder /no_such_folder", load("/no_such_folder"));
    {
        TempFolder f;
        CHECK_FAILS(1, "holds no GPT-2 vocabulary", load(f.path));
        write_file(f.file("vocab.bpe"), lines_text(lines));
        CHECK_FAILS(1, "holds vocab.bpe but not encoder.json", load(f.path));
        write_file(f.file("a.tiktoken"), "");
        write_file(f.file("b.tiktoken"), "");
        CHECK_FAILS(1, "several vocabularies", load(f.path));
    }
    // With the files of `write`: the error names this file and says these words.
    const auto refused = [&](const std::string& file, const char* words, const auto& write) {
        TempFolder f;
        write(f);
        CHECK_FAILS(1, ("/" + file + ": ").c_str(), load(f.path));
        CHECK_FAILS(1, words, load(f.path));
    };
    using Lines = std::vector<std::string>;
    const auto damaged = [](auto whole, const auto& damage) { return damage(whole), whole; };
    const auto merges_with = [&](const char* words, const auto& damage) {
        refused("vocab.bpe", words, [&](auto& f) { write_openai(f.path, damaged(lines, damage), entries); });
    };
    merges_with("vocab.bpe: 40 merges, expected 70: the file is cut short", [](Lines& l) { l.resize(41); });
    merges_with("vocab.bpe: line 72: more than the 70 merges", [](Lines& l) { l.push_back("x y"); });
    merges_with("stands here a second time", [](Lines& l) { l[20] = l[10]; });
    merges_with("line 31: found \"abc\", expected two tokens", [](Lines& l) { l[30] = "abc"; });
    merges_with("line 31: found \"a \\u0007\"", [](Lines& l) { l[30] = "a \x07"; });
    merges_with("line 31: found \"a\\rb\"", [](Lines& l) { l[30] = "a\rb"; });
    merges_with("line 31: found \"\"", [](Lines& l) { l[30] = ""; });
    merges_with("line 2: the token \"xyz\" of this merge is made by no line before", [](Lines& l) { l[1] = "xyz a"; });
    {
        // (a b), (b c), then abc from a + bc: but the first merge is made first, so a never meets bc.
        NaiveBpe never;
        never.merges = {{"a", "b"}, {"b", "c"}, {"a", "bc"}};
        TempFolder f;
        write_openai(f.path, never.merge_lines(), never.id_entries());
        CHECK_FAILS(1, "vocab.bpe: line 4: the merge of \"a\" and \"bc\" can never apply",
                    Tokenizer::gpt2(f.path, int(never.size())));
    }
    const auto ids_with = [&](const char* words, const auto& damage) {
        refused("encoder.json", words, [&](auto& f) { write_openai(f.path, lines, damaged(entries, damage)); });
    };
    ids_with("expected the end of the text", [](Lines& l) { l.back() += "} {"; });
    ids_with("expected ',' or '}'", [](Lines& l) { l[100] += " 7"; });
    ids_with("326 tokens, expected 327", [](Lines& l) { l.erase(l.begin() + 200); });
    ids_with("has id 257, but line 2 of", [](Lines& l) { l[256] = l[256].substr(0, l[256].size() - 1) + "7"; });
    ids_with("the byte \"!\" has id 1, expected 0", [](Lines& l) { l[0] = "\"!\": 1"; });
    ids_with("vocabulary learns", [](Lines& l) { l[0] = "\"!\": 1"; });
    ids_with("is no byte and is made by no merge of", [](Lines& l) { l[300] = "\"xyz\": 300"; });
    ids_with("has a character that stands for no byte", [](Lines& l) { l[300] = "\"\\u3042\": 300"; });
    ids_with("<|endoftext|> has id 5, expected 326", [](Lines& l) { l.back() = "\"<|endoftext|>\": 5"; });
    {  // as trainers write it that count special tokens first
        TempFolder f;
        std::vector<std::string> first = {"\"<|endoftext|>\": 0"};
        for (size_t i = 0; i + 1 < entries.size(); i++)
            first.push_back(entries[i].substr(0, entries[i].rfind(' ')) + " " + std::to_string(i + 1));
        write_openai(f.path, lines, first);
        CHECK_FAILS(1, "<|endoftext|> has id 0 of 327 tokens, expected the last, 326", Tokenizer::gpt2(f.path));
        write_openai(f.path, lines, {first.begin() + 1, first.end()});
        CHECK_FAILS(1, "encoder.json has no <|endoftext|>", Tokenizer::gpt2(f.path));
    }
    ids_with("found a string, expected a number", [](Lines& l) { l[7] = "\"(\": \"7\""; });
    ids_with("found 7.5, expected a whole number", [](Lines& l) { l[7] = "\"(\": 7.5"; });
    // tokenizer.json of other kinds.
    const struct {
        const char *model, *cut;
        std::vector<const char*> words;
    } foreign[] = {{R"("type": "Unigram")", "null", {"Unigram", "vocabulary"}},
                   {R"("type": "WordPiece")", R"({"type": "BertPreTokenizer"})", {"WordPiece", "BertPreTokenizer"}},
                   {R"("type": "BPE")", R"({"type": "Sequence"})", {"BPE", "Sequence"}},
                   {R"("type": "BPE", "end_of_word_suffix": "</w>")", "", {"end_of_word_suffix", "</w>"}},
                   {R"("merges": [], "continuing_subword_prefix": "##")", "", {"continuing_subword_prefix", "##"}},
                   {R"("type": "BPE", "dropout": 0.1)", "", {"dropout", "0.1"}},
                   {R"("type": "BPE", "dropout": null, "end_of_word_suffix": "")", "", {"has no key \"vocab\""}}};
    for (const auto& [model, cut, words] : foreign) {
        TempFolder f;
        write_file(f.file("tokenizer.json"), format_text("{\"model\": {%s}, \"pre_tokenizer\": %s}", model,
                                                         *cut ? cut : "{\"type\": \"ByteLevel\"}"));
        for (const char* word : words) CHECK_FAILS(1, word, Tokenizer::gpt2(f.path));
    }
    const auto tiktoken_with = [&](const char* words, const auto& damage) {
        const std::string text = lines_text(damaged(naive.tiktoken_lines(), damage));
        refused("x.tiktoken", words, [&](auto& f) { write_file(f.file("x.tiktoken"), text); });
    };
    tiktoken_with("325 tokens, expected 326: the file is cut short", [](Lines& l) { l.pop_back(); });
    tiktoken_with("line 327: more than the 326 tokens", [](Lines& l) { l.push_back("YQ== 326"); });
    tiktoken_with("line 5: found \"YQ=\", expected base64", [](Lines& l) { l[4] = "YQ="; });
    tiktoken_with("line 5: found \"Y*== 4\"", [](Lines& l) { l[4] = "Y*== 4"; });
    tiktoken_with("line 12: found rank \"12\", expected 11", [](Lines& l) { l.erase(l.begin() + 11); });
    tiktoken_with("line 1: token 0 is \"\\\"\", expected the byte 0x21", [](Lines& l) { l[0] = "Ig== 0"; });
    tiktoken_with("line 260: the token \"a\" stands here a second time", [](Lines& l) { l[259] = "YQ== 259"; });
    tiktoken_with("line 257: the tokens before it make 3 tokens of \"xyz\", expected two",
                  [](Lines& l) { l[256] = "eHl6 256"; });
    const auto llmc_with = [&](const char* words, const auto& damage) {
        const std::string bytes = damaged(naive.llmc(), damage);
        refused("gpt2_tokenizer.bin", words, [&](auto& f) { write_file(f.file("gpt2_tokenizer.bin"), bytes); });
    };
    llmc_with("100 bytes, shorter than its header of 1024", [](std::string& s) { s.resize(100); });
    llmc_with("byte 0: found 20240329, expected 20240328", [](std::string& s) { s[0]++; });
    llmc_with("byte 4: version 3, expected 1 or 2", [](std::string& s) { s[4] = 3; });
    llmc_with("byte 8: 328 tokens, expected 327", [](std::string& s) { s[8]++; });
    llmc_with("byte 12: end-of-text is token 327, expected 326", [](std::string& s) { s[12]++; });
    llmc_with("byte 1026: the file is cut short in token 1 of 327", [](std::string& s) { s.resize(1027); });
    llmc_with("byte 1026: the file is cut short in token 1 of 327", [](std::string& s) { s.resize(1026); });
    llmc_with("the file is cut short in token 326 of 327", [](std::string& s) { s.pop_back(); });
    llmc_with("1 bytes behind the last token", [](std::string& s) { s += 'x'; });
    llmc_with("byte 1024: token 0 has no bytes", [](std::string& s) { s[1024] = 0; });
    llmc_with("byte 1026: token 1 is \"#\", expected the byte 0x22", [](std::string& s) { s[1027] = '#'; });
    llmc_with("token 326 is \"<|endoftext|?\", expected <|endoftext|>", [](std::string& s) { s.back() = '?'; });
}
