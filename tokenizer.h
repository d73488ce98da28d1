// tokenizer.h: text to tokens and back. Two kinds of vocabulary: `gpt2`, the byte-level BPE of GPT-2, with its 50257
// tokens or with those that the verb `vocabulary` learnt from another text, and `bytes` (256).
//
// GPT-2 (Radford et al. 2019, section 2.2; BPE after Sennrich et al. 2016) encodes in two steps. The pre-tokeniser cuts
// the text into pieces, roughly words with the blank before them. Each piece starts out as single bytes. Two neighbours
// may merge if the vocabulary has a token for them; the pair whose token was learnt first merges first, and so on until
// no pair can merge. Every byte is a token, so any sequence of bytes can be encoded, and decode(encode(x)) == x always.
#pragma once
#include <memory>
#include <algorithm>
#include <functional>

#include "lib/data/unicode_classes.h"
#include "lib/data/vocabulary.h"

// ---------------------------------------------------------------------------------------------------------------------
// The pre-tokeniser: GPT-2's regular expression, by hand. At each position the first alternative that matches wins:
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// A byte that is not part of a valid UTF-8 character counts as a character that is neither letter, number nor white
// space. So it joins the punctuation around it, as does the U+FFFD that other encoders put in its place, but it keeps
// its value.

enum CharClass : uint8_t { OTHER, LETTER, NUMBER, SPACE };

struct UnicodeRange {
    uint32_t first, last;  // both belong to it
};
// The runs of code points that a text of unicode_classes.h lists.
inline std::vector<UnicodeRange> unicode_ranges(const char* text) {
    std::vector<UnicodeRange> ranges;
    for (const std::string& word : split_words(text)) {
        const auto code_at = [&](size_t at) { return uint32_t(std::stoul(word.substr(at), nullptr, 16)); };
        ranges.push_back({code_at(0), code_at(word.find('-') + 1)});  // 0 again where there is no dash
    }
    return ranges;
}

// The class of every code point up to the last letter or number: 200 KB, built from the ranges on first use.
inline const std::vector<uint8_t>& char_classes() {
    static const std::vector<uint8_t> classes = [] {
        std::vector<uint8_t> table;
        const auto mark = [&](const char* text, CharClass c) {
            for (const auto& [first, last] : unicode_ranges(text)) {
                if (table.size() <= last) table.resize(last + 1, OTHER);
                std::fill(table.begin() + first, table.begin() + last + 1, c);
            }
        };
        mark(unicode_letters, LETTER);
        mark(unicode_numbers, NUMBER);
        mark(unicode_white_space, SPACE);
        return table;
    }();
    return classes;
}

struct PreTokenizer {
    const uint8_t* classes = char_classes().data();
    uint32_t size = uint32_t(char_classes().size());

    // The class of the character at `at` (at < n), and its length in bytes in *length.
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

    // The length of the contraction that s begins with, or 0.
    static size_t contraction(const char* s, size_t n) {
        if (s[0] != '\'' || n < 2) return 0;
        if (s[1] == 's' || s[1] == 't' || s[1] == 'm' || s[1] == 'd') return 2;
        if (n < 3) return 0;
        return (s[1] == 'r' && s[2] == 'e') || (s[1] == 'v' && s[2] == 'e') || (s[1] == 'l' && s[2] == 'l') ? 3 : 0;
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
            if (next != SPACE) {
                run = next;
                length = next_length;
                last = at + 1;
            }
        }
        size_t end = last + size_t(length);
        while (end < n && class_at(text, n, end, &length) == run) {
            last = end;
            end += size_t(length);
        }
        // \s+(?!\S): a run of white space leaves its last character to the word behind it, unless that is all it has.
        return run == SPACE && end < n && last > at ? last : end;
    }

    // Whether a piece ends at `at` (0 < at < n) whatever the text before and after, so that the two sides can be
    // encoded separately. The character at `at` must be complete, so at + 4 <= n unless the text ends at n. A run of
    // letters or numbers ends at the first character that is not one, in every alternative, the contractions included;
    // and white space only ever begins a piece or follows white space. To the left of a cut, only \s+(?!\S) looks
    // beyond it, and it starts from white space, which no cut found here follows. Inside a UTF-8 character both sides
    // look like OTHER, which is no cut.
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
};

// ---------------------------------------------------------------------------------------------------------------------
// Merging.

constexpr uint32_t NO_TOKEN = ~0u;
constexpr size_t LONG_PIECE = 1 << 14;  // bytes, from which on merge_piece() does without a heap

// The merges: an open hash table from (left id, right id) to the id of both together. The id is also the rank: lower
// ids were learnt earlier.
class MergeTable {
    struct Merge {
        uint32_t left, right, merged = NO_TOKEN;
    };
    std::vector<Merge> merges;  // a power of two of slots, at most half of them taken

    size_t slot(uint32_t left, uint32_t right) const {  // where the pair is, or would be
        const size_t mask = merges.size() - 1;
        size_t i = size_t((uint64_t(left) << 16 | right) * 0x9E3779B97F4A7C15ull >> 32) & mask;
        while (merges[i].merged != NO_TOKEN && (merges[i].left != left || merges[i].right != right)) i = (i + 1) & mask;
        return i;
    }

  public:
    void make_room(size_t count) {
        size_t slots = 1024;
        while (slots < 2 * count) slots *= 2;
        merges.assign(slots, Merge());
    }
    void insert(uint32_t left, uint32_t right, uint32_t merged) { merges[slot(left, right)] = {left, right, merged}; }
    uint32_t find(uint32_t left, uint32_t right) const { return merges[slot(left, right)].merged; }
};

// The memory that merging a piece needs; kept, so that it is not allocated again for every piece.
struct MergeScratch {
    struct Part {
        uint32_t id;              // its token
        uint32_t previous, next;  // the neighbouring parts, by the index of their first byte
        uint32_t merged;          // the token that it makes with the next part, or NO_TOKEN
    };
    std::vector<Part> parts;     // (bytes of the piece) a part is at the index of its first byte
    std::vector<uint64_t> heap;  // the pairs that can merge: their token << 32 | index of the left part, smallest first
};

// The vocabulary. It never changes once it is made, so threads may share it; each thread has its own Encoder. Ids are
// below 65536 and are stored as uint16_t, as in the shards.
struct Tokenizer {
    bool is_bytes = false;
    std::string source;                                    // the file or files it was read from
    std::vector<std::string> tokens;                       // the bytes of each id
    uint16_t end_of_text = 0;                              // the id that stands before every document
    std::vector<std::pair<uint16_t, uint16_t>> halves_of;  // gpt2: what id 256 + i was merged from
    PreTokenizer pre_tokenizer;

    // `bytes`: id = byte value. End-of-text is byte 0, which text does not contain; in data that does, a document seems
    // to begin there.
    static Tokenizer bytes() {
        Tokenizer t;
        t.is_bytes = true;
        for (int b = 0; b < 256; b++) t.tokens.push_back(std::string(1, char(b)));
        return t;
    }

    // Appends the tokens of one piece (n >= 1 bytes): merges the pair of the lowest rank, the leftmost among equals,
    // until no pair is left. The parts are a linked list and the pairs a heap. When a merge changes the neighbour of a
    // pair, the pair's old entry stays where it is and is skipped later.
    // In a long piece, such as a million times one letter, a heap misses the cache at every step. There the pairs lie
    // in a list for each rank, and the ranks are gone through once: what a merge makes only merges to a higher rank.
    void merge_piece(const char* piece, size_t n, MergeScratch& scratch, std::vector<uint16_t>& ids) const {
        if (n >= NO_TOKEN)
            fail("a run of %d bytes without a place to cut is too long for the tokenizer (limit %d)", n, NO_TOKEN - 1);
        if (n < LONG_PIECE) merge_piece<false>(piece, n, scratch, ids);
        else merge_piece<true>(piece, n, scratch, ids);
    }
    template <bool is_long>
    void merge_piece(const char* piece, size_t n, MergeScratch& scratch, std::vector<uint16_t>& ids) const {
        std::vector<MergeScratch::Part>& parts = scratch.parts;
        std::vector<uint64_t>& heap = scratch.heap;
        const uint32_t count = uint32_t(n), none = NO_TOKEN;
        const auto later = std::greater<uint64_t>();
        std::vector<std::vector<uint32_t>> places(is_long ? 256 + halves_of.size() : 0);  // of each rank
        parts.resize(n);
        heap.clear();
        for (uint32_t i = 0; i < count; i++) {
            const uint32_t id = id_of_byte[static_cast<unsigned char>(piece[i])];
            parts[i] = {id, i ? i - 1 : none, i + 1 < count ? i + 1 : none, none};
            if (i > 0) parts[i - 1].merged = merges.find(parts[i - 1].id, id);
            if (i == 0 || parts[i - 1].merged == none) continue;
            if (is_long) places[parts[i - 1].merged].push_back(i - 1);
            else heap.push_back(uint64_t(parts[i - 1].merged) << 32 | (i - 1));
        }
        std::make_heap(heap.begin(), heap.end(), later);
        const auto pair_up = [&](uint32_t left) {  // the pair at `left` is new
            MergeScratch::Part& part = parts[left];
            part.merged = part.next == none ? none : merges.find(part.id, parts[part.next].id);
            if (part.merged == none) return;
            if (is_long) return places[part.merged].push_back(left);
            heap.push_back(uint64_t(part.merged) << 32 | left);
            std::push_heap(heap.begin(), heap.end(), later);
        };
        const auto merge = [&](uint32_t left, uint32_t id) {
            MergeScratch::Part& part = parts[left];
            if (part.merged != id) return;  // an old entry
            MergeScratch::Part& right = parts[part.next];
            part.id = id;
            part.next = right.next;
            if (part.next != none) parts[part.next].previous = left;
            right.merged = none;  // so its entry is skipped
            pair_up(left);
            if (part.previous != none) pair_up(part.previous);
        };
        while (!heap.empty()) {
            const uint64_t first = heap.front();
            std::pop_heap(heap.begin(), heap.end(), later);
            heap.pop_back();
            merge(uint32_t(first), uint32_t(first >> 32));
        }
        for (uint32_t rank = 0; rank < places.size(); rank++) {
            std::vector<uint32_t> of_rank = std::move(places[rank]);
            if (!std::is_sorted(of_rank.begin(), of_rank.end())) std::sort(of_rank.begin(), of_rank.end());
            for (const uint32_t left : of_rank) merge(left, rank);
        }
        for (uint32_t i = 0; i != none; i = parts[i].next) ids.push_back(uint16_t(parts[i].id));
        if (is_long) scratch = {};  // seldom needed, and 16 bytes for each of the piece
    }

    // `gpt2`, from a folder with any of the files that lib/data/vocabulary.h reads. Whatever the file, each token must
    // be what its bytes encode to with the tokens before it, so a damaged or foreign vocabulary is refused, with file
    // and place. The last id, end-of-text, is never made from text: "<|endoftext|>" in a text is encoded as ordinary
    // characters.
    static Tokenizer gpt2(const std::string& folder) { return gpt2(folder, int(vocabulary_size(folder))); }
    static Tokenizer gpt2(const std::string& folder, int vocab_size) {
        Tokenizer t;
        const ByteAlphabet alphabet;
        for (int id = 0; id < 256; id++) {
            t.tokens.push_back(std::string(1, char(alphabet.order[id])));
            t.id_of_byte[alphabet.order[id]] = uint16_t(id);
        }
        t.merges.make_room(size_t(vocab_size));
        MergeScratch scratch;
        std::vector<uint16_t> halves;
        const AddToken add_token = [&](const std::string& bytes, const Place& where) {
            halves.clear();
            t.merge_piece(bytes.data(), bytes.size(), scratch, halves);
            if (halves.size() == 1)
                fail("%s: the token %s stands here a second time (it has id %d already)", where(), json_quote(bytes),
                     halves[0]);
            if (halves.size() != 2)
                fail(
                    "%s: the tokens before it make %d tokens of %s, expected two that merge: the tokens are damaged "
                    "or not in GPT-2's order",
                    where(), halves.size(), json_quote(bytes));
            t.merges.insert(halves[0], halves[1], uint32_t(t.tokens.size()));
            t.tokens.push_back(bytes);
            t.halves_of.push_back({halves[0], halves[1]});
            return t.halves_of.back();
        };
        t.source = read_gpt2_vocabulary(folder, size_t(vocab_size), add_token);
        t.end_of_text = uint16_t(t.tokens.size());
        t.tokens.push_back(END_OF_TEXT);
        return t;
    }

    // By the values of the options --tokenizer and --vocab-dir.
    static Tokenizer open(const std::string& name, const std::string& vocab_dir) {
        if (name == "bytes" && !vocab_dir.empty())
            fail_usage(
                "--vocab-dir %s: the tokenizer is bytes, which reads no vocabulary; leave it out (that of a BPE "
                "is --tokenizer gpt2)",
                vocab_dir);
        if (name == "bytes") return bytes();
        if (name != "gpt2") fail_usage("--tokenizer %s: expected gpt2 or bytes", name);
        if (vocab_dir.empty())
            fail_usage(
                "--tokenizer gpt2 needs --vocab-dir DIR, the folder with vocab.bpe and encoder.json (or --tokenizer "
                "bytes)");
        return gpt2(vocab_dir);
    }

    // The same; null where GPT-2's vocabulary is asked for and nobody has said where it is. size, digest: of the
    // model's vocabulary, where there is a model; 0: not known.
    static std::unique_ptr<Tokenizer> find(const std::string& name, const std::string& vocab_dir, int64_t size = 0,
                                           uint32_t digest = 0) {
        if (name == "gpt2" && vocab_dir.empty()) return nullptr;
        auto tokenizer = std::make_unique<Tokenizer>(open(name, vocab_dir));
        if (size && tokenizer->vocab_size() != size)
            fail(
                "--vocab-dir %s holds a vocabulary of %d tokens, and the model's has %d: give the one that the "
                "model was trained with",
                vocab_dir, tokenizer->vocab_size(), size);
        if (digest && tokenizer->digest() != digest)
            fail(
                "--vocab-dir %s holds other tokens (digest %08x) than the model's vocabulary (%08x), though as many: "
                "give the one that the model was trained with",
                vocab_dir, tokenizer->digest(), digest);
        return tokenizer;
    }

    int vocab_size() const { return int(tokens.size()); }

    // Tells vocabularies of one size apart, in shards and in config.json: of the tokens' bytes in the order of the ids,
    // from which the merges follow. 0 for bytes, of which there is one.
    uint32_t digest() const {
        uint32_t crc = 0;
        for (const std::string& token : tokens) crc = crc32c(crc, token.c_str(), token.size() + 1);
        return is_bytes ? 0 : std::max(crc, 1u);
    }

    std::string describe() const {
        return is_bytes ? "bytes: 256 tokens, one per byte"
                        : format_text("gpt2: %d tokens from %s", vocab_size(), source);
    }

    // Appends the bytes of one token; gpt2's end-of-text is shown as <|endoftext|>.
    void decode_append(int64_t id, std::string& out) const {
        if (id < 0 || id >= vocab_size())
            fail("token %d is not in the vocabulary of %d tokens (%s)", id, vocab_size(), describe());
        out += tokens[size_t(id)];
    }

    std::string decode(const std::vector<uint16_t>& ids) const {
        std::string out;
        for (const uint16_t id : ids) decode_append(id, out);
        return out;
    }

    // How many bytes of text a token stands for, 0 for end-of-text; for a loss in bits per byte.
    size_t token_bytes(uint16_t id) const { return id == end_of_text ? 0 : tokens.at(id).size(); }

    std::vector<uint16_t> encode(const std::string& text) const;  // one text; for a corpus, use an Encoder

  private:
    MergeTable merges;
    uint16_t id_of_byte[256] = {};
};

// ---------------------------------------------------------------------------------------------------------------------

// Encodes text; one per thread, because it remembers recent words and their tokens. Words repeat, so most pieces cost a
// single look-up. A new word takes the slot of an older one; the table stays at 2 MB, about a core's second-level
// cache.
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
            end = tokenizer.pre_tokenizer.piece_end(text, n, at);
            append_piece(text + at, end - at, ids);
        }
    }
    void append(const std::string& text, std::vector<uint16_t>& ids) { append(text.data(), text.size(), ids); }

  private:
    static constexpr size_t slots = 1 << 16, longest_word = 15, max_ids = 7;
    struct Word {
        uint64_t key[2] = {0, 0};  // up to 15 bytes, then their number; 0 is a free slot
        uint16_t ids[max_ids], count;
    };
    std::vector<Word> words;
    MergeScratch scratch;

    void append_piece(const char* piece, size_t n, std::vector<uint16_t>& ids) {
        if (n > longest_word) return tokenizer.merge_piece(piece, n, scratch, ids);
        uint64_t key[2] = {0, uint64_t(n) << 56};
        std::memcpy(key, piece, n);
        Word& word = words[((key[0] ^ (key[1] * 0xD6E8FEB86659FD93ull)) * 0x9E3779B97F4A7C15ull >> 32) % slots];
        if (word.key[0] != key[0] || word.key[1] != key[1]) {
            const size_t begin = ids.size();
            tokenizer.merge_piece(piece, n, scratch, ids);
            if (ids.size() - begin > max_ids) return;
            word.key[0] = key[0];
            word.key[1] = key[1];
            word.count = uint16_t(ids.size() - begin);
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
