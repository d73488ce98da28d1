// vocabulary.h: reads a vocabulary of GPT-2's kind, strictly, from any of the files that people keep it in, and writes
// such files. tokenizer.h uses it.
//
// The ids 0 to 255 are the bytes, in the order of ByteAlphabet. Every later id merges two earlier ones; the tokenizer,
// which keeps the merges, checks that. The last id, end-of-text, is "<|endoftext|>" in all the files.
#pragma once
#include <functional>
#include <unordered_map>

#include "../base/files.h"
#include "../base/json.h"

// ---------------------------------------------------------------------------------------------------------------------
// vocab.bpe and encoder.json write each byte as a printable character: the printable bytes of Latin-1 stand for
// themselves, and the k-th of the other 68 is U+0100 + k. The ids of the bytes follow the same order: first the
// printable ones, then the others.

struct ByteAlphabet {
    uint8_t order[256];     // the byte of each id
    int byte_of[256 + 68];  // the byte of each code point, or -1

    ByteAlphabet() {
        std::fill(byte_of, byte_of + 256 + 68, -1);
        int id = 0, others = 0;
        for (const bool shown : {true, false})
            for (int b = 0; b < 256; b++) {
                if (is_printable(b) != shown) continue;
                byte_of[shown ? b : 256 + others++] = b;
                order[id++] = uint8_t(b);
            }
    }

    // The bytes of a token as the files write it, in *bytes; false if a character stands for no byte.
    bool to_bytes(const std::string& written, std::string* bytes) const {
        bytes->clear();
        for (size_t i = 0; i < written.size();) {
            uint32_t code;
            const int length = utf8_decode(written.data() + i, written.size() - i, &code);
            if (length == 0 || code >= 256 + 68 || byte_of[code] < 0) return false;
            *bytes += char(byte_of[code]);
            i += size_t(length);
        }
        return true;
    }

    // The other way: bytes as the files write them.
    std::string written(const std::string& bytes) const {
        std::string text;
        for (const char b : bytes) {
            const int* const code = std::find(byte_of, byte_of + 256 + 68, int(uint8_t(b)));
            utf8_append(text, uint32_t(code - byte_of));
        }
        return text;
    }

  private:
    static bool is_printable(int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD); }
};

// ---------------------------------------------------------------------------------------------------------------------
// What the readers share.

using Place = std::function<std::string()>;  // file and position, for a message: worded only if it is needed

// Gives the next id, from 256 on, to these bytes, or fails, naming the place; returns the two ids that it merges.
using AddToken = std::function<std::pair<uint16_t, uint16_t>(const std::string& bytes, const Place& where)>;

// Calls use(line) for every line of the file, without its line end, which is Windows' in some copies, as is a byte
// order mark; the last line need not have an end.
inline void for_each_line(const std::string& path, const std::function<void(const std::string&)>& use) {
    const std::string file = read_file(path);
    for (size_t begin = file.compare(0, 3, "\xEF\xBB\xBF") == 0 ? 3 : 0; begin < file.size();) {
        const size_t end = std::min(file.find('\n', begin), file.size());
        const bool carriage_return = end > begin && file[end - 1] == '\r';
        use(file.substr(begin, end - carriage_return - begin));
        begin = end + 1;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// vocab.bpe: a line "#version: ...", then one merge a line, "left right". encoder.json: {"token": id}. They must agree.

struct MergedTokens {
    std::unordered_map<std::string, uint32_t> id_of;  // by their bytes
    std::vector<size_t> line_of;                      // where vocab.bpe makes each id; 0 for bytes
};

inline MergedTokens read_vocab_bpe(const std::string& path, size_t size, const AddToken& add) {
    const ByteAlphabet alphabet;
    MergedTokens made;
    for (uint32_t id = 0; id < 256; id++) made.id_of[std::string(1, char(alphabet.order[id]))] = id;
    made.line_of.resize(256, 0);
    size_t line_number = 0;
    for_each_line(path, [&](const std::string& line) {
        line_number++;
        if (line_number == 1 && line.compare(0, 8, "#version") == 0) return;
        const auto where = [&] { return format_text("%s: line %zu", path.c_str(), line_number); };
        const size_t blank = line.find(' ');
        std::string left, right;
        if (blank == std::string::npos || !alphabet.to_bytes(line.substr(0, blank), &left) || left.empty() ||
            !alphabet.to_bytes(line.substr(blank + 1), &right) || right.empty())
            fail("%s: found %s, expected two tokens with a blank between them", where().c_str(),
                 json_quote(line.substr(0, 80)).c_str());
        if (made.line_of.size() == size - 1)
            fail("%s: more than the %zu merges of this vocabulary", where().c_str(), size - 257);
        for (const std::string& half : {left, right})
            if (!made.id_of.count(half))
                fail("%s: the token %s of this merge is made by no line before", where().c_str(),
                     json_quote(half).c_str());
        const auto halves = add(left + right, where);
        if (halves.first != made.id_of[left] || halves.second != made.id_of[right])
            fail("%s: the merge of %s and %s can never apply: lines before make other tokens of these bytes",
                 where().c_str(), json_quote(left).c_str(), json_quote(right).c_str());
        made.id_of[left + right] = uint32_t(made.line_of.size());
        made.line_of.push_back(line_number);
    });
    if (made.line_of.size() != size - 1)
        fail("%s: %zu merges, expected %zu: the file is cut short", path.c_str(), made.line_of.size() - 256,
             size - 257);
    return made;
}

inline void check_encoder_json(const std::string& path, size_t size, const std::string& bpe_path,
                               const MergedTokens& made) {
    const Json ids = parse_json(read_file(path), path);
    ids.require(Json::Object, path);
    const ByteAlphabet alphabet;
    std::string bytes;
    for (size_t i = 0; i < ids.keys.size(); i++) {
        const std::string name = json_quote(ids.keys[i]);
        const int64_t id = ids.items[i].integer(path);
        const auto at = [&] {
            return format_text("%s: byte %llu", path.c_str(), (unsigned long long)ids.items[i].offset);
        };
        if (ids.keys[i] == "<|endoftext|>") {
            if (id != int64_t(size) - 1)
                fail("%s: <|endoftext|> has id %lld, expected %zu", at().c_str(), (long long)id, size - 1);
            continue;
        }
        if (!alphabet.to_bytes(ids.keys[i], &bytes))
            fail("%s: the token %s has a character that stands for no byte", at().c_str(), name.c_str());
        const auto known = made.id_of.find(bytes);
        if (known == made.id_of.end())
            fail("%s: the token %s is no byte and is made by no merge of %s", at().c_str(), name.c_str(),
                 bpe_path.c_str());
        if (id != int64_t(known->second) && known->second < 256)
            fail("%s: the byte %s has id %lld, expected %u", at().c_str(), name.c_str(), (long long)id, known->second);
        if (id != int64_t(known->second))
            fail("%s: the token %s has id %lld, but line %zu of %s makes it id %u", at().c_str(), name.c_str(),
                 (long long)id, made.line_of[known->second], bpe_path.c_str(), known->second);
    }
    // No key is there twice, and each has the right id; so if their number is right, all of them are there.
    if (ids.keys.size() != size) fail("%s: %zu tokens, expected %zu", path.c_str(), ids.keys.size(), size);
}

// ---------------------------------------------------------------------------------------------------------------------
// Files that list the tokens in the order of their ids, without the merges. The ids follow the order of the merges, so
// the merges can be worked out.

struct ListedTokens {
    const AddToken& add_token;
    const ByteAlphabet alphabet = {};
    size_t count = 0;

    void add(const std::string& bytes, const Place& where) {
        if (count >= 256) add_token(bytes, where);
        else if (bytes != std::string(1, char(alphabet.order[count])))
            fail("%s: token %zu is %s, expected the byte 0x%02x: not GPT-2's order", where().c_str(), count,
                 json_quote(bytes).c_str(), alphabet.order[count]);
        count++;
    }
};

// RFC 4648 with padding; false for anything else, and for no bytes at all.
inline bool from_base64(const std::string& text, std::string* bytes) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes->clear();
    size_t n = text.size();
    if (n == 0 || n % 4 != 0) return false;
    while (n > text.size() - 2 && text[n - 1] == '=') n--;
    uint32_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        const char* digit = text[i] ? std::strchr(digits, text[i]) : nullptr;
        if (!digit) return false;
        bits = bits << 6 | uint32_t(digit - digits);
        if (i % 4 > 0) *bytes += char(bits >> (6 - 2 * (i % 4)) & 0xFF);
    }
    return true;
}

// tiktoken: one token a line, as the base64 of its bytes, a blank and its id; end-of-text is not listed.
inline void read_tiktoken(const std::string& path, size_t size, const AddToken& add) {
    ListedTokens list{add};
    for_each_line(path, [&](const std::string& line) {
        const auto where = [&] { return format_text("%s: line %zu", path.c_str(), list.count + 1); };
        if (list.count == size - 1)
            fail("%s: more than the %zu tokens of this vocabulary: not that of GPT-2 (r50k_base)?", where().c_str(),
                 size - 1);
        const size_t blank = line.find(' ');
        std::string bytes;
        if (blank == std::string::npos || !from_base64(line.substr(0, blank), &bytes))
            fail("%s: found %s, expected base64, a blank and a number", where().c_str(),
                 json_quote(line.substr(0, 80)).c_str());
        if (line.substr(blank + 1) != std::to_string(list.count))
            fail("%s: found rank %s, expected %zu: ranks count up from 0", where().c_str(),
                 json_quote(line.substr(blank + 1, 40)).c_str(), list.count);
        list.add(bytes, where);
    });
    if (list.count != size - 1)
        fail("%s: %zu tokens, expected %zu: the file is cut short", path.c_str(), list.count, size - 1);
}

// llm.c: 256 uint32 {20240328, version 1 or 2, number of tokens, id of end-of-text (version 2), 0 ...}, then for each
// token a byte with its length, and its bytes.
inline void read_llmc_tokenizer(const std::string& path, size_t size, const AddToken& add) {
    const std::string file = read_file(path);
    uint32_t header[256];
    if (file.size() < sizeof header)
        fail("%s: %zu bytes, shorter than its header of %zu", path.c_str(), file.size(), sizeof header);
    std::memcpy(header, file.data(), sizeof header);
    if (header[0] != 20240328)
        fail("%s: byte 0: found %u, expected 20240328: no tokenizer file of llm.c", path.c_str(), header[0]);
    if (header[1] != 1 && header[1] != 2) fail("%s: byte 4: version %u, expected 1 or 2", path.c_str(), header[1]);
    if (header[2] != size) fail("%s: byte 8: %u tokens, expected %zu", path.c_str(), header[2], size);
    if (header[1] == 2 && header[3] != size - 1)
        fail("%s: byte 12: end-of-text is token %u, expected %zu", path.c_str(), header[3], size - 1);
    ListedTokens list{add};
    size_t at = sizeof header;
    for (size_t id = 0; id < size; id++) {
        const auto where = [&] { return format_text("%s: byte %zu", path.c_str(), at); };
        const size_t length = at < file.size() ? static_cast<unsigned char>(file[at]) : 0;
        if (at + 1 + length > file.size())
            fail("%s: the file is cut short in token %zu of %zu", where().c_str(), id, size);
        if (length == 0) fail("%s: token %zu has no bytes", where().c_str(), id);
        const std::string bytes = file.substr(at + 1, length);
        if (id < size - 1) list.add(bytes, where);
        else if (bytes != "<|endoftext|>")
            fail("%s: token %zu is %s, expected <|endoftext|>", where().c_str(), id, json_quote(bytes).c_str());
        at += 1 + length;
    }
    if (at != file.size()) fail("%s: byte %zu: %zu bytes behind the last token", path.c_str(), at, file.size() - at);
}

// ---------------------------------------------------------------------------------------------------------------------

constexpr size_t GPT2_VOCABULARY = 50257;

// vocab.bpe and encoder.json as OpenAI published them, and the same files under Hugging Face's names.
constexpr const char* VOCABULARY_PAIRS[][2] = {{"vocab.bpe", "encoder.json"}, {"merges.txt", "vocab.json"}};

// How many tokens the folder's vocabulary has: those two files may hold any number, the others GPT-2's.
inline size_t vocabulary_size(const std::string& folder) {
    for (const auto& names : VOCABULARY_PAIRS) {
        const std::string path = folder + "/" + names[1];
        if (!file_exists(folder + "/" + names[0]) || !file_exists(path)) continue;
        const int64_t last = parse_json(read_file(path), path).integer("<|endoftext|>", path);
        if (last < 256 || last > 65535)
            fail("%s: <|endoftext|>, the last token, has id %lld, expected 256 to 65535: shards hold 16-bit tokens",
                 path.c_str(), (long long)last);
        return size_t(last) + 1;
    }
    return GPT2_VOCABULARY;
}

// vocab.bpe, and encoder.json. tokens: the bytes of each id, the last of which is end-of-text; merged: what id 256 + i
// was merged from.
inline std::string merges_text(const std::vector<std::string>& tokens,
                               const std::vector<std::pair<uint16_t, uint16_t>>& merged) {
    const ByteAlphabet alphabet;
    std::string text = "#version: 0.2\n";
    for (const auto& [left, right] : merged)
        text += alphabet.written(tokens[left]) + " " + alphabet.written(tokens[right]) + "\n";
    return text;
}
inline std::string ids_json(const std::vector<std::string>& tokens) {
    const ByteAlphabet alphabet;
    std::string text;
    for (size_t id = 0; id + 1 < tokens.size(); id++)
        text += (id ? ", " : "{") + json_quote(alphabet.written(tokens[id])) + ": " + std::to_string(id);
    return text + ", " + json_quote(tokens.back()) + ": " + std::to_string(tokens.size() - 1) + "}\n";
}

// Reads `size` tokens from the first of these that the folder holds:
//     vocab.bpe and encoder.json       as OpenAI published them
//     merges.txt and vocab.json        the same files under Hugging Face's names
//     one *.tiktoken                   r50k_base.tiktoken
//     gpt2_tokenizer.bin               llm.c's
// Calls add for the ids from 256 to size - 2. Returns the name of the file or files.
inline std::string read_gpt2_vocabulary(const std::string& folder, size_t size, const AddToken& add) {
    if (!file_exists(folder)) fail("cannot open the vocabulary folder %s: %s", folder.c_str(), std::strerror(errno));
    const std::vector<std::string> ranks = glob_files(glob_literal(folder) + "/*.tiktoken");
    const std::string llmc = folder + "/gpt2_tokenizer.bin";
    for (const auto& names : VOCABULARY_PAIRS) {
        const std::string merges = folder + "/" + names[0], ids = folder + "/" + names[1];
        if (!file_exists(merges) || !file_exists(ids)) continue;
        check_encoder_json(ids, size, merges, read_vocab_bpe(merges, size, add));
        return merges + " and " + names[1];
    }
    if (ranks.size() > 1)
        fail("%s holds several vocabularies, %s and %s: leave one", folder.c_str(), ranks[0].c_str(), ranks[1].c_str());
    if (ranks.size() == 1) {
        read_tiktoken(ranks[0], size, add);
        return ranks[0];
    }
    if (file_exists(llmc)) {
        read_llmc_tokenizer(llmc, size, add);
        return llmc;
    }
    for (const auto& names : VOCABULARY_PAIRS)
        for (int i = 0; i < 2; i++)
            if (file_exists(folder + "/" + names[i]))
                fail("%s holds %s but not %s: both are needed", folder.c_str(), names[i], names[1 - i]);
    fail(
        "%s holds no GPT-2 vocabulary: expected vocab.bpe and encoder.json, or merges.txt and vocab.json, or one "
        "*.tiktoken, or gpt2_tokenizer.bin",
        folder.c_str());
}
