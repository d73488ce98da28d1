// vocabulary.h: a vocabulary like GPT-2's with a few merges, in each of the file formats, and the checks that every
// accepted vocabulary must pass.
#pragma once
#include "../../tokenizer.h"
#include "fuzz.h"

using Merges = std::vector<std::pair<std::string, std::string>>;  // number k makes token 256 + k

inline std::vector<std::string> tokens_of(const Merges& merges) {
    std::vector<std::string> tokens = Tokenizer::bytes().tokens;
    const ByteAlphabet alphabet;
    for (int id = 0; id < 256; id++) tokens[size_t(id)] = std::string(1, char(alphabet.order[id]));
    for (const auto& merge : merges) tokens.push_back(merge.first + merge.second);
    return tokens;
}

// A token as vocab.bpe and encoder.json write it.
inline std::string in_alphabet(const std::string& bytes) {
    const ByteAlphabet alphabet;
    std::string out;
    for (const char b : bytes)
        for (uint32_t code = 0; code < 256 + 68; code++)
            if (alphabet.byte_of[code] == static_cast<unsigned char>(b)) utf8_append(out, code);
    return out;
}

inline std::string vocab_bpe(const Merges& merges) {
    std::string out = "#version: 0.2\n";
    for (const auto& merge : merges) out += in_alphabet(merge.first) + " " + in_alphabet(merge.second) + "\n";
    return out;
}

inline std::string encoder_json(const std::vector<std::string>& tokens) {
    std::string out = "{";
    for (size_t id = 0; id < tokens.size(); id++)
        out += json_quote(in_alphabet(tokens[id])) + ": " + std::to_string(id) + ", ";
    return out + "\"<|endoftext|>\": " + std::to_string(tokens.size()) + "}";
}

inline std::string base64(const std::string& bytes) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 3; k++)
            bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
        for (size_t k = 0; k < 4; k++) out += i + k <= bytes.size() ? digits[bits >> (18 - 6 * k) & 63] : '=';
    }
    return out;
}

inline std::string tiktoken(const std::vector<std::string>& tokens) {
    std::string out;
    for (size_t id = 0; id < tokens.size(); id++) out += base64(tokens[id]) + " " + std::to_string(id) + "\n";
    return out;
}

inline std::string llmc_tokenizer(const std::vector<std::string>& tokens) {
    uint32_t header[256] = {20240328, 2, uint32_t(tokens.size() + 1), uint32_t(tokens.size())};
    std::string out(reinterpret_cast<const char*>(header), sizeof header);
    for (const std::string& token : tokens) out += char(token.size()), out += token;
    return out + char(13) + "<|endoftext|>";
}

// Every token encodes to itself, decoding gives any text back, and the vocabulary reads the same from another file.
inline void check_vocabulary(const Tokenizer& t, int size) {
    EXPECT(t.vocab_size() == size && t.end_of_text == size - 1);
    MergeScratch scratch;
    std::string all;
    std::vector<uint16_t> ids;
    for (int id = 0; id < size - 1; id++) {
        const std::string& token = t.tokens[size_t(id)];
        if (id >= 256) {
            ids.clear();
            t.merge_piece(token.data(), token.size(), scratch, ids);
            EXPECT(ids.size() == 1 && ids[0] == id);
        }
        all += token;
    }
    EXPECT(t.decode(t.encode(all)) == all);
    static MemoryFolder folder;
    folder.fill("other.tiktoken", tiktoken({t.tokens.begin(), t.tokens.end() - 1}));
    const Tokenizer other = Tokenizer::gpt2(folder.path, size);
    EXPECT(other.tokens == t.tokens && other.encode(all) == t.encode(all));
}
