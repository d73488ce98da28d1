// text.cpp: encodes the input with a small vocabulary like GPT-2's. The tokens must be those of a naive encoder that
// merges pair by pair, decoding must give the input back, and where the pre-tokeniser says that it always cuts, the two
// sides must encode separately.
#include <map>

#include "vocabulary.h"

static const Merges merges = {{" ", "t"},       {"h", "e"},           {" t", "he"}, {"i", "n"},       {"r", "e"},
                              {"e", "r"},       {"'", "s"},           {"'", "re"},  {"\n", "\n"},     {" ", " "},
                              {"  ", "  "},     {"1", "1"},           {"1", "2"},   {"\xC3", "\xA9"}, {" ", "\xC3\xA9"},
                              {"\xE4", "\xB8"}, {"\xE4\xB8", "\xAD"}, {"a", "a"},   {"aa", "aa"},     {"aa", "a"},
                              {"a", "b"},       {".", "."},           {"..", "."},  {"\xF0", "\x9F"}};

static const Tokenizer& vocabulary() {
    static const Tokenizer t = [] {
        MemoryFolder folder;
        folder.fill("small.tiktoken", tiktoken(tokens_of(merges)));
        return Tokenizer::gpt2(folder.path, int(257 + merges.size()));
    }();
    return t;
}

std::vector<std::string> seeds() {
    return {"the inner there's they're we'll I'd 'tis",
            "aaaaaaaaab aaa  aaaa\n\n\n  a",
            "11 12 2112 x1",
            "caf\xC3\xA9 \xC3\xA9t\xC3\xA9 \xE4\xB8\xAD\xE6\x96\x87 \xF0\x9F\x98\x80",
            "...!?.. ..",
            std::string("\0\xFF\xC3 \x80\xE4\xB8 \xF0\x9F", 10),
            "\xE3\x80\x80\xC2\xA0 \xE2\x80\xA8x\xC2\x85",
            "\xD9\xA1\xD9\xA2\xE2\x85\xA7\xC2\xBD a\xCC\x81",
            "<|endoftext|>"};
}

static std::vector<uint16_t> merge_naively(const std::string& piece) {
    static const std::map<std::pair<uint16_t, uint16_t>, uint16_t> rank = [] {
        std::map<std::pair<uint16_t, uint16_t>, uint16_t> r;
        const auto& tokens = vocabulary().tokens;
        const auto id = [&](const std::string& token) {
            return uint16_t(std::find(tokens.begin(), tokens.end(), token) - tokens.begin());
        };
        for (size_t k = 0; k < merges.size(); k++) r[{id(merges[k].first), id(merges[k].second)}] = uint16_t(256 + k);
        return r;
    }();
    static const std::vector<uint16_t> id_of_byte = [] {
        std::vector<uint16_t> ids(256);
        for (uint16_t id = 0; id < 256; id++) ids[static_cast<unsigned char>(vocabulary().tokens[id][0])] = id;
        return ids;
    }();
    std::vector<uint16_t> ids;
    for (const char c : piece) ids.push_back(id_of_byte[static_cast<unsigned char>(c)]);
    while (true) {
        size_t best = ids.size();
        uint16_t lowest = 0xFFFF;
        for (size_t i = 0; i + 1 < ids.size(); i++) {
            const auto found = rank.find({ids[i], ids[i + 1]});
            if (found != rank.end() && found->second < lowest) lowest = found->second, best = i;
        }
        if (best == ids.size()) return ids;
        ids[best] = lowest;
        ids.erase(ids.begin() + ptrdiff_t(best) + 1);
    }
}

void fuzz_one(const std::string& input) {
    static Encoder encoder(vocabulary());  // remembers the words of earlier executions
    std::vector<uint16_t> ids, expected;
    {
        MemoryLimit limit(input.size(), 8 << 10, 64);
        encoder.append(input, ids);
    }
    EXPECT(vocabulary().decode(ids) == input);
    const PreTokenizer pre_tokenizer;
    for (size_t at = 0, end; at < input.size(); at = end) {
        end = pre_tokenizer.piece_end(input.data(), input.size(), at);
        EXPECT(end > at && end <= input.size());
        for (const uint16_t id : merge_naively(input.substr(at, end - at))) expected.push_back(id);
    }
    EXPECT(ids == expected);
    int tried = 0;
    for (size_t cut = 1; cut + 4 <= input.size() && tried < 4; cut++) {
        if (!pre_tokenizer.always_cuts(input.data(), input.size(), cut)) continue;
        tried++;
        std::vector<uint16_t> parts;
        encoder.append(input.data(), cut, parts);
        encoder.append(input.data() + cut, input.size() - cut, parts);
        EXPECT(parts == ids);
    }
    std::vector<uint16_t> bytes;
    static const Tokenizer byte_tokenizer = Tokenizer::bytes();
    Encoder(byte_tokenizer).append(input, bytes);
    EXPECT(byte_tokenizer.decode(bytes) == input);
}
