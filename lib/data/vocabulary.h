// vocabulary.h: reads a vocabulary of GPT-2's kind, strictly, from any of the files that people keep it in, and writes
// such files. tokenizer.h uses it.
//
// The ids 0 to 255 are the bytes, in the order of ByteAlphabet. Every later id merges two earlier ones; the tokenizer,
// which keeps the merges, checks that. The last id, end-of-text, is END_OF_TEXT in all the files.
#pragma once
#include <functional>
#include <unordered_map>

#include "../base/files.h"
#include "../base/json.h"

// Texts of others write the end of a document so. In a text it is no token of ours, see Tokenizer.
constexpr char END_OF_TEXT[] = "<|endoftext|>";

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

// The tokens that merges make, one after the other.
struct MergedTokens {
    const AddToken& add;
    const size_t size;
    const std::string file;
    const char* const what;  // "line" or "merge": what is counted in the file
    const ByteAlphabet alphabet = {};
    std::unordered_map<std::string, uint32_t> id_of = {};     // by their bytes
    std::vector<size_t> place_of = std::vector<size_t>(256);  // where the file makes each id; 0 for bytes
    size_t place = 0;

    MergedTokens(const std::string& path, size_t tokens, const AddToken& add_token, const char* counted)
        : add(add_token), size(tokens), file(path), what(counted) {
        for (uint32_t id = 0; id < 256; id++) id_of[std::string(1, char(alphabet.order[id]))] = id;
    }

    // A merge as the file has it at the place: "left right".
    void merge(const std::string& text) {
        const auto where = [&] { return format_text("%s: %s %d", file, what, place); };
        const size_t blank = text.find(' ');
        std::string left, right;
        if (blank == std::string::npos || !alphabet.to_bytes(text.substr(0, blank), &left) || left.empty() ||
            !alphabet.to_bytes(text.substr(blank + 1), &right) || right.empty())
            fail("%s: found %s, expected two tokens with a blank between them", where(),
                 json_quote(text.substr(0, 80)));
        if (place_of.size() == size - 1) fail("%s: more than the %d merges of this vocabulary", where(), size - 257);
        for (const std::string& half : {left, right})
            if (!id_of.count(half))
                fail("%s: the token %s of this merge is made by no %s before", where(), json_quote(half), what);
        const auto halves = add(left + right, where);
        if (halves.first != id_of[left] || halves.second != id_of[right])
            fail("%s: the merge of %s and %s can never apply: %ss before make other tokens of these bytes", where(),
                 json_quote(left), json_quote(right), what);
        id_of[left + right] = uint32_t(place_of.size());
        place_of.push_back(place);
    }

    // ids: {"token": id}, in which nothing but end-of-text stands beside the bytes and what was merged.
    void check_ids(const std::string& path, const Json& ids) const {
        if (place_of.size() != size - 1)
            fail("%s: %d merges, expected %d: the file is cut short, or other tokens stand before <|endoftext|>", file,
                 place_of.size() - 256, size - 257);
        ids.require(Json::Object, path);
        std::string bytes;
        for (size_t i = 0; i < ids.keys.size(); i++) {
            const std::string name = json_quote(ids.keys[i]);
            const int64_t id = ids.items[i].integer(path);
            const auto at = [&] { return format_text("%s: byte %d", path, ids.items[i].offset); };
            if (ids.keys[i] == END_OF_TEXT) {
                if (id != int64_t(size) - 1) fail("%s: <|endoftext|> has id %d, expected %d", at(), id, size - 1);
                continue;
            }
            if (!alphabet.to_bytes(ids.keys[i], &bytes))
                fail("%s: the token %s has a character that stands for no byte", at(), name);
            const auto known = id_of.find(bytes);
            if (known == id_of.end())
                fail("%s: the token %s is no byte and is made by no merge of %s", at(), name, file);
            if (id != int64_t(known->second) && known->second < 256)
                fail("%s: the byte %s has id %d, expected %d: ./train_nsa vocabulary learns one in GPT-2's order", at(),
                     name, id, known->second);
            if (id != int64_t(known->second))
                fail("%s: the token %s has id %d, but %s %d of %s makes it id %d", at(), name, id, what,
                     place_of[known->second], file, known->second);
        }
        // No key is there twice, and each has the right id; so if their number is right, all of them are there.
        if (ids.keys.size() != size) fail("%s: %d tokens, expected %d", path, ids.keys.size(), size);
    }
};

inline void read_merges_and_ids(const std::string& merges, const std::string& ids, size_t size, const AddToken& add) {
    MergedTokens made(merges, size, add, "line");
    for_each_line(merges, [&](const std::string& line) {
        if (++made.place > 1 || line.compare(0, 8, "#version") != 0) made.merge(line);
    });
    made.check_ids(ids, parse_json(read_file(ids), ids));
}

// ---------------------------------------------------------------------------------------------------------------------
// tokenizer.json of Hugging Face's tokenizers: the same merges and ids, and how text is cut into pieces before.

// The file, if text is cut and written as GPT-2 does it; otherwise its tokens would mean other text.
inline Json parse_tokenizer_json(const std::string& path) {
    Json root = parse_json(read_file(path), path);
    const Json& model = root.get("model", path);
    const Json* const kind = model.find("type");  // older files have none, that of GPT-2 among them
    const bool is_bpe = kind ? kind->text == "BPE" : model.find("merges") != nullptr;
    const Json& cut = root.get("pre_tokenizer", path);
    const Json* const type = cut.find("type");
    const Json* const prefix = cut.find("add_prefix_space");
    const Json* const by_words = cut.find("use_regex");
    const Json* const normalizer = root.find("normalizer");
    if (!is_bpe || !type || type->text != "ByteLevel" || (prefix && prefix->is_true) ||
        (by_words && !by_words->is_true) || (normalizer && normalizer->kind != Json::Null))
        fail(
            "%s is no tokenizer of GPT-2's kind: found %s, pre_tokenizer %s; expected a BPE, ByteLevel with use_regex "
            "and without add_prefix_space, and no normalizer: ./train_nsa vocabulary learns one",
            path, kind ? kind->text : "no type", type ? type->text : "none");
    for (const char* key : {"end_of_word_suffix", "continuing_subword_prefix", "dropout"})
        if (const Json* const value = model.find(key))
            if (value->number_value != 0 || (value->kind == Json::String && !value->text.empty()))
                fail("%s: %s is %s, expected none: ./train_nsa vocabulary learns one", path, key, value->to_text());
    return root;
}

// {"token": id}, with end-of-text, which may stand among the added tokens alone. Other added tokens are none of the
// text's.
inline Json ids_of_tokenizer_json(const Json& root, const std::string& path) {
    Json ids = root.get("model", path).get("vocab", path + ": model");
    const Json* const added = root.find("added_tokens");
    if (added && !ids.find(END_OF_TEXT))
        for (const Json& token : added->items)
            if (token.string("content", path + ": added_tokens") == END_OF_TEXT) {
                ids.keys.push_back(END_OF_TEXT);
                ids.items.push_back(token.get("id", path + ": added_tokens"));
            }
    return ids;
}

inline void read_tokenizer_json(const std::string& path, size_t size, const AddToken& add) {
    const Json root = parse_tokenizer_json(path);
    MergedTokens made(path, size, add, "merge");
    const std::string where = path + ": merges";
    for (const Json& merge :
         root.get("model", path).array("merges", path + ": model")) {  // "left right", or both in a list
        const bool is_list = merge.kind == Json::Array && merge.items.size() == 2;
        made.place++;
        made.merge(is_list ? merge.items[0].string(where) + " " + merge.items[1].string(where) : merge.string(where));
    }
    made.check_ids(path, ids_of_tokenizer_json(root, path));
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
            fail("%s: token %d is %s, expected the byte 0x%02x: not GPT-2's order", where(), count, json_quote(bytes),
                 alphabet.order[count]);
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
        const auto where = [&] { return format_text("%s: line %d", path, list.count + 1); };
        if (list.count == size - 1)
            fail("%s: more than the %d tokens of this vocabulary: not that of GPT-2 (r50k_base)?", where(), size - 1);
        const size_t blank = line.find(' ');
        std::string bytes;
        if (blank == std::string::npos || !from_base64(line.substr(0, blank), &bytes))
            fail("%s: found %s, expected base64, a blank and a number", where(), json_quote(line.substr(0, 80)));
        if (line.substr(blank + 1) != std::to_string(list.count))
            fail("%s: found rank %s, expected %d: ranks count up from 0", where(),
                 json_quote(line.substr(blank + 1, 40)), list.count);
        list.add(bytes, where);
    });
    if (list.count != size - 1) fail("%s: %d tokens, expected %d: the file is cut short", path, list.count, size - 1);
}

// llm.c: 256 uint32 {20240328, version 1 or 2, number of tokens, id of end-of-text (version 2), 0 ...}, then for each
// token a byte with its length, and its bytes.
inline void read_llmc_tokenizer(const std::string& path, size_t size, const AddToken& add) {
    const std::string file = read_file(path);
    uint32_t header[256];
    if (file.size() < sizeof header)
        fail("%s: %d bytes, shorter than its header of %d", path, file.size(), sizeof header);
    std::memcpy(header, file.data(), sizeof header);
    if (header[0] != 20240328)
        fail("%s: byte 0: found %d, expected 20240328: no tokenizer file of llm.c", path, header[0]);
    if (header[1] != 1 && header[1] != 2) fail("%s: byte 4: version %d, expected 1 or 2", path, header[1]);
    if (header[2] != size) fail("%s: byte 8: %d tokens, expected %d", path, header[2], size);
    if (header[1] == 2 && header[3] != size - 1)
        fail("%s: byte 12: end-of-text is token %d, expected %d", path, header[3], size - 1);
    ListedTokens list{add};
    size_t at = sizeof header;
    for (size_t id = 0; id < size; id++) {
        const auto where = [&] { return format_text("%s: byte %d", path, at); };
        const size_t length = at < file.size() ? static_cast<unsigned char>(file[at]) : 0;
        if (at + 1 + length > file.size()) fail("%s: the file is cut short in token %d of %d", where(), id, size);
        if (length == 0) fail("%s: token %d has no bytes", where(), id);
        const std::string bytes = file.substr(at + 1, length);
        if (id < size - 1) list.add(bytes, where);
        else if (bytes != END_OF_TEXT)
            fail("%s: token %d is %s, expected <|endoftext|>", where(), id, json_quote(bytes));
        at += 1 + length;
    }
    if (at != file.size()) fail("%s: byte %d: %d bytes behind the last token", path, at, file.size() - at);
}

// ---------------------------------------------------------------------------------------------------------------------

constexpr size_t GPT2_VOCABULARY = 50257;

// vocab.bpe and encoder.json as OpenAI published them, and the same files under Hugging Face's names.
constexpr const char* VOCABULARY_PAIRS[][2] = {{"vocab.bpe", "encoder.json"}, {"merges.txt", "vocab.json"}};
constexpr const char* TOKENIZER_JSON = "tokenizer.json";

constexpr const char* MEND_END_OF_TEXT =
    "learn it with ./train_nsa vocabulary, or without special tokens, add this one and save all as tokenizer.json";

// How many tokens the folder's vocabulary has: those files may hold any number, the others GPT-2's.
inline size_t vocabulary_size(const std::string& folder) {
    const auto size_of = [](const std::string& path, const Json& ids) {
        if (!ids.find(END_OF_TEXT))
            fail("%s has no <|endoftext|>, expected as the last token: %s", path, MEND_END_OF_TEXT);
        const int64_t last = ids.integer(END_OF_TEXT, path), count = int64_t(ids.keys.size());
        if (last < count - 1)  // trainers that give ids to special tokens first, as Hugging Face's do, give it 0
            fail(
                "%s: <|endoftext|> has id %d of %d tokens, expected the last, %d, behind the 256 bytes and the merges: "
                "%s",
                path, last, count, count - 1, MEND_END_OF_TEXT);
        if (last < 256 || last > 65535)
            fail(
                "%s: <|endoftext|>, the last token, has id %d, expected 256 to 65535: behind the 256 bytes, and "
                "shards hold 16-bit tokens",
                path, last);
        return size_t(last) + 1;
    };
    for (const auto& names : VOCABULARY_PAIRS) {
        const std::string path = folder + "/" + names[1];
        if (file_exists(folder + "/" + names[0]) && file_exists(path))
            return size_of(path, parse_json(read_file(path), path));
    }
    if (file_exists(folder) && !is_folder(folder))
        fail("--vocab-dir %s is a file: give the folder that it lies in, %s", folder, shell_word(folder_of(folder)));
    const std::string path = folder + "/" + TOKENIZER_JSON;
    return file_exists(path) ? size_of(path, ids_of_tokenizer_json(parse_tokenizer_json(path), path)) : GPT2_VOCABULARY;
}

// Does the folder hold a vocabulary that is recognised by its names? Whatever else the files are is found when they are
// read.
inline bool holds_vocabulary(const std::string& folder) {
    if (file_exists(folder + "/" + TOKENIZER_JSON)) return true;
    return std::any_of(std::begin(VOCABULARY_PAIRS), std::end(VOCABULARY_PAIRS), [&](const auto& names) {
        return file_exists(folder + "/" + names[0]) && file_exists(folder + "/" + names[1]);
    });
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

// Both files or neither: they are written to a folder under another name, which is then renamed.
inline void write_vocabulary(const std::string& folder, const std::vector<std::string>& tokens,
                             const std::vector<std::pair<uint16_t, uint16_t>>& merged) {
    const std::string writing = folder + ".writing";
    remove_tree(writing);  // of a writer that died
    try {
        make_folders(writing);
        write_text_file(writing + "/vocab.bpe", merges_text(tokens, merged));
        write_text_file(writing + "/encoder.json", ids_json(tokens));
        sync_folder(writing);
        rename_path(writing, folder);
    } catch (const Error&) {
        remove_tree(writing);
        throw;
    }
    sync_folder(folder_of(folder));
}

// Reads `size` tokens from the first of these that the folder holds:
//     vocab.bpe and encoder.json       as OpenAI published them
//     merges.txt and vocab.json        the same files under Hugging Face's names
//     tokenizer.json                   both in one, as transformers writes it
//     one *.tiktoken                   r50k_base.tiktoken
//     gpt2_tokenizer.bin               llm.c's
// Calls add for the ids from 256 to size - 2. Returns the name of the file or files.
inline std::string read_gpt2_vocabulary(const std::string& folder, size_t size, const AddToken& add) {
    if (!file_exists(folder)) fail("cannot open the vocabulary folder %s: %s", folder, std::strerror(errno));
    const std::vector<std::string> ranks = glob_files(glob_literal(folder) + "/*.tiktoken");
    const std::string llmc = folder + "/gpt2_tokenizer.bin";
    for (const auto& names : VOCABULARY_PAIRS) {
        const std::string merges = folder + "/" + names[0], ids = folder + "/" + names[1];
        if (!file_exists(merges) || !file_exists(ids)) continue;
        read_merges_and_ids(merges, ids, size, add);
        return merges + " and " + names[1];
    }
    if (file_exists(folder + "/" + TOKENIZER_JSON)) {
        read_tokenizer_json(folder + "/" + TOKENIZER_JSON, size, add);
        return folder + "/" + TOKENIZER_JSON;
    }
    if (ranks.size() > 1) fail("%s holds several vocabularies, %s and %s: leave one", folder, ranks[0], ranks[1]);
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
                fail("%s holds %s but not %s: both are needed", folder, names[i], names[1 - i]);
    fail(
        "%s holds no GPT-2 vocabulary: expected vocab.bpe and encoder.json, or merges.txt and vocab.json, or "
        "tokenizer.json, or one *.tiktoken, or gpt2_tokenizer.bin",
        folder);
}
