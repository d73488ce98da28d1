// tokenizer.h: text to tokens and back. Two vocabularies: `gpt2`, the byte-level BPE of GPT-2 (50257 tokens), and
// `bytes` (256).
//
// GPT-2 (Radford et al. 2019, section 2.2; BPE after Sennrich et al. 2016) encodes in two steps. The pre-tokeniser cuts
// the text into pieces, roughly words with the blank before them. A piece begins as single bytes; of its pairs of
// neighbours that make a token, the one that was merged first when the vocabulary was trained is merged, again and
// again until there is none. As every byte is a token, every sequence of bytes can be encoded, and decode(encode(x)) ==
// x always.
#pragma once
#include <algorithm>
#include <functional>
#include <unordered_map>

#include "lib/json.h"
#include "lib/unicode_classes.h"

// ---------------------------------------------------------------------------------------------------------------------
// The pre-tokeniser: GPT-2's regular expression, by hand. At each position the first alternative that matches is taken:
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// A byte that belongs to no valid UTF-8 character counts as one character that is neither letter, number nor white
// space; so it joins the run of punctuation around it, as the U+FFFD would that other encoders put in its place, but it
// keeps its value.

enum CharClass : uint8_t { OTHER, LETTER, NUMBER, SPACE };

// The class of every code point below the last letter or number; 200 KB, built from the ranges on first use.
inline const std::vector<uint8_t>& char_classes() {
    static const std::vector<uint8_t> classes = [] {
        std::vector<uint8_t> table;
        const auto mark = [&](const UnicodeRange& range, CharClass c) {
            if (table.size() <= range.last) table.resize(range.last + 1, OTHER);
            std::fill(table.begin() + range.first, table.begin() + range.last + 1, c);
        };
        for (const UnicodeRange& range : unicode_letters) mark(range, LETTER);
        for (const UnicodeRange& range : unicode_numbers) mark(range, NUMBER);
        for (const UnicodeRange& range : unicode_white_space) mark(range, SPACE);
        return table;
    }();
    return classes;
}

struct PreTokenizer {
    const uint8_t* const classes = char_classes().data();
    const uint32_t size = uint32_t(char_classes().size());

    // The class of the character that begins at `at` (at < n), its length in bytes in *length.
    CharClass class_at(const char* text, size_t n, size_t at, int* length) const {
        uint32_t code = static_cast<unsigned char>(text[at]);
        *length = 1;
        if (code < 0x80) return CharClass(classes[code]);
        *length = utf8_decode(text + at, n - at, &code);
        if (*length == 0) {
            *length = 1;
            return OTHER;
        }
        return code < size ? CharClass(classes[code]) : OTHER;
    }

    // Where the piece that begins at `at` (at < n) ends.
    size_t piece_end(const char* text, size_t n, size_t at) const {
        if (const size_t length = contraction(text + at, n - at)) return at + length;
        int length;
        CharClass run = class_at(text, n, at, &length);
        size_t last = at;  // the last character of the run so far
        if (text[at] == ' ' && at + 1 < n) {
            int next_length;
            const CharClass next = class_at(text, n, at + 1, &next_length);
            if (next != SPACE) run = next, length = next_length, last = at + 1;
        }
        size_t end = last + size_t(length);
        while (end < n && class_at(text, n, end, &length) == run) last = end, end += size_t(length);
        // \s+(?!\S): a run of white space before a word leaves its last character to the word, unless it is the only
        // one.
        return run == SPACE && end < n && last > at ? last : end;
    }

    // Whether the pre-tokeniser cuts at `at` (0 < at < n) whatever stands before and after, so that both sides
    // may be encoded apart. The character at `at` must be whole, so at + 4 <= n unless the text ends at n.
    // A run of letters (or numbers) ends at the first character that is none, in every alternative, the
    // contractions included; and white space only ever begins a piece or follows white space. Nothing that
    // is left of a cut looks beyond it but \s+(?!\S), which does so only from white space, and no cut found
    // here follows white space. In the middle of a UTF-8 character both sides look OTHER, which is no cut.
    bool always_cuts(const char* text, size_t n, size_t at) const {
        int length;
        CharClass before = OTHER;
        for (size_t back = 1; back <= 4 && back <= at; back++) {
            const CharClass c = class_at(text, at, at - back, &length);
            if (size_t(length) == back && (back > 1 || static_cast<unsigned char>(text[at - 1]) < 0x80)) {
                before = c;
                break;
            }
        }
        const CharClass after = class_at(text, n, at, &length);
        if (before == LETTER || before == NUMBER) return after != before;
        return before == OTHER && after == SPACE;
    }

  private:
    static size_t contraction(const char* s, size_t n) {
        if (s[0] != '\'' || n < 2) return 0;
        if (s[1] == 's' || s[1] == 't' || s[1] == 'm' || s[1] == 'd') return 2;
        if (n < 3) return 0;
        return (s[1] == 'r' && s[2] == 'e') || (s[1] == 'v' && s[2] == 'e') || (s[1] == 'l' && s[2] == 'l') ? 3 : 0;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// GPT-2's files write each byte as a printable character: the printable ones of Latin-1 stand for themselves, the k-th
// of the other 68 is U+0100 + k. The ids 0 to 255 are the bytes in that order too: first the printable ones, then the
// others.

struct ByteAlphabet {
    uint8_t order[256];     // byte of id
    int byte_of[256 + 68];  // byte of code point, -1 for none

    ByteAlphabet() {
        std::fill(byte_of, byte_of + 256 + 68, -1);
        int printable = 0, others = 0;
        for (int b = 0; b < 256; b++)
            if (is_printable(b)) order[printable++] = uint8_t(b), byte_of[b] = b;
        for (int b = 0; b < 256; b++)
            if (!is_printable(b)) byte_of[256 + others] = b, order[printable + others++] = uint8_t(b);
    }

    // The bytes that a token of the files stands for, in *bytes; false when a character is none of the 256.
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

  private:
    static bool is_printable(int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD); }
};

// A path with the pattern characters of glob() taken literally.
inline std::string glob_literal(const std::string& path) {
    std::string pattern;
    for (const char c : path) {
        if (std::strchr("*?[]\\", c)) pattern += '\\';
        pattern += c;
    }
    return pattern;
}

// ---------------------------------------------------------------------------------------------------------------------

// What merging a piece needs besides the vocabulary; kept so that it is not allocated for each piece.
struct MergeScratch {
    struct Part {
        uint32_t id;              // its token
        uint32_t previous, next;  // neighbouring parts, by the index of their first byte
        uint32_t merged;          // the token that it makes with the next part, or Tokenizer::no_token
    };
    std::vector<Part> parts;     // one per byte of the piece; a part is kept at its first byte
    std::vector<uint64_t> heap;  // the pairs that can be merged: token << 32 | index of the left part, smallest first
};

// The vocabulary. It does not change after it was made, so threads may share one; text is encoded by an Encoder, one
// per thread. Ids are below 65536 and are kept as uint16_t, as in the shards.
struct Tokenizer {
    static constexpr int gpt2_size = 50257;
    static constexpr uint32_t no_token = ~0u;

    bool is_bytes = false;
    std::string source;               // the file or files it was read from
    std::vector<std::string> tokens;  // the bytes of each id
    uint16_t end_of_text = 0;         // the id that stands before every document

    // `bytes`: id = byte value. The end-of-text token is byte 0, which text
    // does not hold; where data does, a document seems to begin there.
    static Tokenizer bytes() {
        Tokenizer t;
        t.is_bytes = true;
        for (int b = 0; b < 256; b++) t.tokens.push_back(std::string(1, char(b)));
        return t;
    }

    // `gpt2` from the first of these that the folder holds:
    //     vocab.bpe and encoder.json       as OpenAI published them
    //     merges.txt and vocab.json        the same files under Hugging Face's names
    //     one *.tiktoken                   r50k_base.tiktoken, one "base64 rank" a line
    //     gpt2_tokenizer.bin               llm.c's
    // The last two list the tokens only; as ids are in the order of the merges, the merges follow from them. Whatever
    // the source, each token must be what encoding its bytes with the tokens before it leads to, so a damaged or
    // foreign vocabulary is refused, with file and place. The last id, end-of-text, is never made from text:
    // "<|endoftext|>" in a text is encoded as the ordinary characters it is.
    static Tokenizer gpt2(const std::string& folder, int vocab_size = gpt2_size) {
        Tokenizer t;
        t.load_gpt2(folder, size_t(vocab_size));
        return t;
    }

    // By the names of the options --tokenizer and --vocab-dir.
    static Tokenizer open(const std::string& name, const std::string& vocab_dir) {
        if (name == "bytes") return bytes();
        if (name != "gpt2") fail_usage("--tokenizer %s: expected gpt2 or bytes", name.c_str());
        if (vocab_dir.empty())
            fail_usage(
                "--tokenizer gpt2 needs --vocab-dir DIR, the folder with vocab.bpe and encoder.json (or --tokenizer "
                "bytes)");
        return gpt2(vocab_dir);
    }

    int vocab_size() const { return int(tokens.size()); }

    std::string describe() const {
        return is_bytes ? "bytes: 256 tokens, one per byte"
                        : format_text("gpt2: %d tokens from %s", vocab_size(), source.c_str());
    }

    // Appends the bytes of one token; end-of-text of gpt2 is shown as <|endoftext|>.
    void decode_append(int64_t id, std::string& out) const {
        if (id < 0 || id >= vocab_size())
            fail("token %lld is not in the vocabulary of %d tokens (%s)", (long long)id, vocab_size(),
                 describe().c_str());
        out += tokens[size_t(id)];
    }

    std::string decode(const std::vector<uint16_t>& ids) const {
        std::string out;
        for (const uint16_t id : ids) decode_append(id, out);
        return out;
    }

    // How many bytes of text a token stands for, for a loss in bits per byte; none for end-of-text.
    size_t token_bytes(uint16_t id) const { return id == end_of_text ? 0 : tokens.at(id).size(); }

    std::vector<uint16_t> encode(const std::string& text) const;  // for a prompt; see Encoder for a corpus

    // Appends the tokens of one piece (n >= 1 bytes), merging the pair of the lowest rank first,
    // the leftmost among equals. O(n log n): the parts are a linked list, the pairs a heap, in
    // which pairs that were overtaken by a merge of a neighbour are left and passed over later.
    void merge_piece(const char* piece, size_t n, MergeScratch& scratch, std::vector<uint16_t>& ids) const {
        if (n >= no_token)
            fail("a run of %zu bytes without a place to cut is too long for the tokenizer (limit %u)", n, no_token - 1);
        std::vector<MergeScratch::Part>& parts = scratch.parts;
        std::vector<uint64_t>& heap = scratch.heap;
        const uint32_t count = uint32_t(n), none = no_token;
        const auto later = std::greater<uint64_t>();
        parts.resize(n), heap.clear();
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t id = id_of_byte[static_cast<unsigned char>(piece[i])];
            parts[i] = {id, i ? i - 1 : none, i + 1 < count ? i + 1 : none, none};
            if (i > 0) parts[i - 1].merged = find_merge(parts[i - 1].id, id);
            if (i > 0 && parts[i - 1].merged != none) heap.push_back(uint64_t(parts[i - 1].merged) << 32 | (i - 1));
        }
        std::make_heap(heap.begin(), heap.end(), later);
        const auto pair_up = [&](uint32_t left) {  // the pair at `left` is new: look its merge up
            MergeScratch::Part& part = parts[left];
            part.merged = part.next == none ? none : find_merge(part.id, parts[part.next].id);
            if (part.merged == none) return;
            heap.push_back(uint64_t(part.merged) << 32 | left);
            std::push_heap(heap.begin(), heap.end(), later);
        };
        while (!heap.empty()) {
            const uint32_t merged = uint32_t(heap.front() >> 32), left = uint32_t(heap.front());
            std::pop_heap(heap.begin(), heap.end(), later);
            heap.pop_back();
            MergeScratch::Part& part = parts[left];
            if (part.merged != merged) continue;  // overtaken
            MergeScratch::Part& right = parts[part.next];
            part.id = merged, part.next = right.next;
            if (part.next != none) parts[part.next].previous = left;
            right.merged = none;  // gone
            pair_up(left);
            if (part.previous != none) pair_up(part.previous);
        }
        for (uint32_t i = 0; i != none; i = parts[i].next) ids.push_back(uint16_t(parts[i].id));
    }

  private:
    // The merges: an open hash table from (left id, right id) to the id of
    // both together, which is its rank too: a lower id was merged earlier.
    struct Merge {
        uint32_t left, right, merged = no_token;
    };
    std::vector<Merge> merges;
    uint16_t id_of_byte[256] = {};

    size_t slot(uint32_t left, uint32_t right) const {  // of the pair, or the free one where it would stand
        const size_t mask = merges.size() - 1;          // the size is a power of two
        size_t i = size_t((uint64_t(left) << 16 | right) * 0x9E3779B97F4A7C15ull >> 32) & mask;
        while (merges[i].merged != no_token && (merges[i].left != left || merges[i].right != right)) i = (i + 1) & mask;
        return i;
    }
    uint32_t find_merge(uint32_t left, uint32_t right) const { return merges[slot(left, right)].merged; }

    // The next id is `bytes`, which must be one merge of two earlier tokens. `where` gives the file and the place in
    // it.
    void add_token(const std::string& bytes, const std::function<std::string()>& where, MergeScratch& scratch) {
        std::vector<uint16_t> made_of;
        merge_piece(bytes.data(), bytes.size(), scratch, made_of);
        if (made_of.size() == 1)
            fail("%s: the token %s stands here a second time (it has id %d already)", where().c_str(),
                 json_quote(bytes).c_str(), made_of[0]);
        if (made_of.size() != 2)
            fail(
                "%s: the tokens before it make %zu tokens of %s, expected two that merge: the tokens are damaged or "
                "not in GPT-2's order",
                where().c_str(), made_of.size(), json_quote(bytes).c_str());
        merges[slot(made_of[0], made_of[1])] = {made_of[0], made_of[1], uint32_t(tokens.size())};
        tokens.push_back(bytes);
    }

    void load_gpt2(const std::string& folder, size_t size) {
        if (!file_exists(folder))
            fail("cannot open the vocabulary folder %s: %s", folder.c_str(), std::strerror(errno));
        const char* const pairs[][2] = {{"vocab.bpe", "encoder.json"}, {"merges.txt", "vocab.json"}};
        const std::vector<std::string> ranks = glob_files(glob_literal(folder) + "/*.tiktoken");
        const std::string llmc = folder + "/gpt2_tokenizer.bin";
        begin_bytes(size);
        for (const auto& names : pairs)
            if (file_exists(folder + "/" + names[0]) && file_exists(folder + "/" + names[1]))
                return load_merges(folder, names[0], names[1], size);
        if (ranks.size() > 1)
            fail("%s holds several vocabularies, %s and %s: leave one", folder.c_str(), ranks[0].c_str(),
                 ranks[1].c_str());
        if (ranks.size() == 1) return load_tiktoken(ranks[0], size);
        if (file_exists(llmc)) return load_llmc(llmc, size);
        for (const auto& names : pairs)
            for (int i = 0; i < 2; i++)
                if (file_exists(folder + "/" + names[i]))
                    fail("%s holds %s but not %s: both are needed", folder.c_str(), names[i], names[1 - i]);
        fail(
            "%s holds no GPT-2 vocabulary: expected vocab.bpe and encoder.json, or merges.txt and vocab.json, or one "
            "*.tiktoken, or "
            "gpt2_tokenizer.bin",
            folder.c_str());
    }

    // The 256 ids of the bytes, and room for the merges.
    void begin_bytes(size_t size) {
        const ByteAlphabet alphabet;
        for (int id = 0; id < 256; id++) {
            tokens.push_back(std::string(1, char(alphabet.order[id])));
            id_of_byte[alphabet.order[id]] = uint16_t(id);
        }
        size_t slots = 1024;
        while (slots < 2 * size) slots *= 2;
        merges.assign(slots, Merge());
    }

    // The last id. `"<|endoftext|>"` is its name in all the files.
    void end_tokens(const std::string& from) {
        end_of_text = uint16_t(tokens.size());
        tokens.push_back("<|endoftext|>");
        source = from;
    }

    // vocab.bpe: a line "#version: ...", then one merge a line, "left right". encoder.json: {"token": id}. They must
    // agree.
    void load_merges(const std::string& folder, const std::string& merges_name, const std::string& ids_name,
                     size_t size) {
        const std::string path = folder + "/" + merges_name, ids_path = folder + "/" + ids_name;
        const ByteAlphabet alphabet;
        std::unordered_map<std::string, uint32_t> id_of;
        for (uint32_t id = 0; id < 256; id++) id_of[tokens[id]] = id;
        MergeScratch scratch;
        std::vector<size_t> line_of(256, 0);
        size_t line_number = 0;
        read_lines(path, [&](const std::string& line) {
            line_number++;
            if (line_number == 1 && line.compare(0, 8, "#version") == 0) return;
            const auto where = [&] { return format_text("%s: line %zu", path.c_str(), line_number); };
            const size_t blank = line.find(' ');
            std::string left, right;
            if (blank == std::string::npos || !alphabet.to_bytes(line.substr(0, blank), &left) || left.empty() ||
                !alphabet.to_bytes(line.substr(blank + 1), &right) || right.empty())
                fail("%s: found %s, expected two tokens with a blank between them", where().c_str(),
                     json_quote(line.substr(0, 80)).c_str());
            if (tokens.size() == size - 1)
                fail("%s: more than the %zu merges of this vocabulary", where().c_str(), size - 257);
            for (const std::string& half : {left, right})
                if (!id_of.count(half))
                    fail("%s: the token %s of this merge is made by no line before", where().c_str(),
                         json_quote(half).c_str());
            add_token(left + right, where, scratch);
            if (find_merge(id_of[left], id_of[right]) != tokens.size() - 1)
                fail("%s: the merge of %s and %s can never apply: lines before make other tokens of these bytes",
                     where().c_str(), json_quote(left).c_str(), json_quote(right).c_str());
            id_of[left + right] = uint32_t(tokens.size() - 1);
            line_of.push_back(line_number);
        });
        if (tokens.size() != size - 1)
            fail("%s: %zu merges, expected %zu: the file is cut short", path.c_str(), tokens.size() - 256, size - 257);

        const Json ids = parse_json(read_file(ids_path), ids_path);
        ids.require(Json::Object, ids_path);
        std::string bytes;
        for (size_t i = 0; i < ids.keys.size(); i++) {
            const std::string name = json_quote(ids.keys[i]);
            const int64_t id = ids.items[i].integer(ids_path);
            const auto at = [&] {
                return format_text("%s: byte %llu", ids_path.c_str(), (unsigned long long)ids.items[i].offset);
            };
            if (ids.keys[i] == "<|endoftext|>") {
                if (id != int64_t(size) - 1)
                    fail("%s: <|endoftext|> has id %lld, expected %zu", at().c_str(), (long long)id, size - 1);
                continue;
            }
            if (!alphabet.to_bytes(ids.keys[i], &bytes))
                fail("%s: the token %s has a character that stands for no byte", at().c_str(), name.c_str());
            const auto known = id_of.find(bytes);
            if (known == id_of.end())
                fail("%s: the token %s is no byte and is made by no merge of %s", at().c_str(), name.c_str(),
                     path.c_str());
            if (id != int64_t(known->second) && known->second < 256)
                fail("%s: the byte %s has id %lld, expected %u", at().c_str(), name.c_str(), (long long)id,
                     known->second);
            if (id != int64_t(known->second))
                fail("%s: the token %s has id %lld, but line %zu of %s makes it id %u", at().c_str(), name.c_str(),
                     (long long)id, line_of[known->second], path.c_str(), known->second);
        }
        // Keys differ and each has its right id, so a full number of them is all of them.
        if (ids.keys.size() != size) fail("%s: %zu tokens, expected %zu", ids_path.c_str(), ids.keys.size(), size);
        end_tokens(path + " and " + ids_name);
    }

    // Tokens in the order of their ids from a file that lists them without their merges.
    struct ListedTokens {
        Tokenizer& t;
        MergeScratch scratch;
        size_t count = 0;

        void add(const std::string& bytes, const std::function<std::string()>& where) {
            if (count >= 256) t.add_token(bytes, where, scratch);
            else if (bytes != t.tokens[count])
                fail("%s: token %zu is %s, expected the byte 0x%02x: not GPT-2's order", where().c_str(), count,
                     json_quote(bytes).c_str(), static_cast<unsigned char>(t.tokens[count][0]));
            count++;
        }
    };

    // tiktoken: a line per token, base64 of its bytes, a blank, its id; end-of-text is not listed.
    void load_tiktoken(const std::string& path, size_t size) {
        ListedTokens list{*this, {}};
        read_lines(path, [&](const std::string& line) {
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
        end_tokens(path);
    }

    // llm.c: 256 uint32 {20240328, version 1 or 2, number of tokens, end-of-text
    // id (version 2), 0 ...}, then per token a length byte and its bytes.
    void load_llmc(const std::string& path, size_t size) {
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
        ListedTokens list{*this, {}};
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
        if (at != file.size())
            fail("%s: byte %zu: %zu bytes behind the last token", path.c_str(), at, file.size() - at);
        end_tokens(path);
    }

    // Calls use(line) for every line of the file, without its newline; a last line may lack it.
    static void read_lines(const std::string& path, const std::function<void(const std::string&)>& use) {
        const std::string file = read_file(path);
        for (size_t begin = 0; begin < file.size();) {
            const size_t end = std::min(file.find('\n', begin), file.size());
            use(file.substr(begin, end - begin));
            begin = end + 1;
        }
    }

    // RFC 4648 with padding; false for anything else, and for no bytes at all.
    static bool from_base64(const std::string& text, std::string* bytes) {
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
};

// ---------------------------------------------------------------------------------------------------------------------

// Encodes text; one per thread, as it holds what the thread has seen: a table of recent words
// with their tokens. Words repeat, so most pieces of a text are one look-up there. A new word
// takes the slot of an older one; the table stays at 2 MB, about a core's second-level cache.
struct Encoder {
    const Tokenizer& tokenizer;

    explicit Encoder(const Tokenizer& tokenizer) : tokenizer(tokenizer), words(tokenizer.is_bytes ? 0 : slots) {}

    // Appends the tokens of the n bytes at `text`.
    void append(const char* text, size_t n, std::vector<uint16_t>& ids) {
        if (tokenizer.is_bytes) {
            const unsigned char* const bytes = reinterpret_cast<const unsigned char*>(text);
            ids.insert(ids.end(), bytes, bytes + n);
            return;
        }
        for (size_t at = 0, end; at < n; at = end) {
            end = pre_tokenizer.piece_end(text, n, at);
            append_piece(text + at, end - at, ids);
        }
    }
    void append(const std::string& text, std::vector<uint16_t>& ids) { append(text.data(), text.size(), ids); }

  private:
    static constexpr size_t slots = 1 << 16, longest_word = 15, most_ids = 7;
    struct Word {
        uint64_t key[2] = {0, 0};  // up to 15 bytes, then their number; 0 is a free slot
        uint16_t ids[most_ids], count;
    };
    std::vector<Word> words;
    const PreTokenizer pre_tokenizer;
    MergeScratch scratch;

    void append_piece(const char* piece, size_t n, std::vector<uint16_t>& ids) {
        if (n > longest_word) return tokenizer.merge_piece(piece, n, scratch, ids);
        uint64_t key[2] = {0, uint64_t(n) << 56};
        std::memcpy(key, piece, n);
        Word& word = words[((key[0] ^ (key[1] * 0xD6E8FEB86659FD93ull)) * 0x9E3779B97F4A7C15ull >> 32) % slots];
        if (word.key[0] != key[0] || word.key[1] != key[1]) {
            const size_t begin = ids.size();
            tokenizer.merge_piece(piece, n, scratch, ids);
            if (ids.size() - begin > most_ids) return;
            word.key[0] = key[0], word.key[1] = key[1], word.count = uint16_t(ids.size() - begin);
            std::copy(ids.begin() + ptrdiff_t(begin), ids.end(), word.ids);
            return;
        }
        ids.insert(ids.end(), word.ids, word.ids + word.count);
    }
};

inline std::vector<uint16_t> Tokenizer::encode(const std::string& text) const {
    std::vector<uint16_t> ids;
    Encoder(*this).append(text, ids);
    return ids;
}
