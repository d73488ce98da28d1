// tokenize.h: the verb `tokenize`: text files to token shards.
//
// The caller's thread reads the files in blocks of about 1 MB. Other threads parse and encode them, and the caller
// takes them back in the order in which it read them, so the tokens do not depend on the number of threads. Which
// documents are for validation depends on all of them; so the tokens first go to a file beside the shards (2 bytes
// each; it has no name, so nothing of it stays behind whatever happens) and are copied from there. Memory holds a block
// per thread and some 30 bytes per document; a block grows beyond 1 MB only for a longer line of JSON or a longer run
// of characters without a place to cut.
//
// Documents are drawn by what they hold, not by where they stand: their order, and how many files they come in, change
// nothing.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <numeric>

#include "../base/random.h"
#include "../base/json.h"
#include "../base/progress.h"
#include "shards.h"
#include "text_input.h"
#include "vocabulary.h"
#include "../../tokenizer.h"

// The options of this verb alone.
struct TokenizeConfig {
    std::vector<std::string> in;  // see TextInputs
    // --split-documents: what separates the documents of a .txt, with escapes \n \r \t \0 \\; empty: the file is one
    // document
    std::string split_documents;
    std::string text_key = "text";     // of a line of .jsonl
    double val_fraction = 0.01;        // the validation shards' share of the tokens, 0 to 1
    int64_t shard_tokens = 100000000;  // of one file
    int64_t size = 8192;               // of vocabulary: all tokens, with the 256 bytes and end-of-text
    bool skip_bad = false;             // what cannot be read is passed over and counted: files, lines of .jsonl
};

struct TokenizeOptions : TokenizeConfig {
    std::string out;                 // --out: PREFIX of the shards
    std::string tokenizer = "gpt2";  // --tokenizer: gpt2 or bytes
    std::string vocab_dir;           // --vocab-dir: see Tokenizer::gpt2
    uint64_t seed = 1337;            // --seed
    int threads = 1;                 // --threads
    size_t block_bytes = 1 << 20;    // read and encoded at a time; only tests change this and the next
    bool prints_summary = true;      // and warnings of oddities
};

// The separator that --split-documents stands for. It must be UTF-8, so that it never cuts a character.
inline std::string read_separator(const std::string& written) {
    std::string out;
    for (size_t i = 0; i < written.size(); i++) {
        if (written[i] != '\\') {
            out += written[i];
            continue;
        }
        const char c = ++i < written.size() ? written[i] : ' ';
        if (c == 'n') out += '\n';
        else if (c == 'r') out += '\r';
        else if (c == 't') out += '\t';
        else if (c == '0') out += '\0';
        else if (c == '\\') out += '\\';
        else
            fail_usage("--split-documents %s: the backslash at byte %d begins none of \\n \\r \\t \\0 \\\\",
                       json_quote(written), i - 1);
    }
    uint32_t code;
    for (size_t i = 0; i < out.size();) {
        const int length = utf8_decode(out.data() + i, out.size() - i, &code);
        if (length == 0) fail_usage("--split-documents %s: not valid UTF-8", json_quote(written));
        i += size_t(length);
    }
    return out;
}

constexpr const char* CONVERT_ENCODING =
    "text in another encoding can be converted: iconv -f LATIN1 -t UTF-8 FILE > NEW";

inline uint64_t count_end_of_text(const std::string& text) {
    uint64_t count = 0;
    for (size_t at = 0; (at = text.find(END_OF_TEXT, at)) != std::string::npos; at++) count++;
    return count;
}

// For a verb that takes each text as one document: one line, however many there are.
inline void warn_of_end_of_text(const std::vector<std::string>& texts, const std::string& where) {
    uint64_t count = 0;
    for (const std::string& text : texts) count += count_end_of_text(text);
    if (count)
        complain("%s: %s stands in it %d %s and is read as ordinary text, not as the end of a document", where,
                 END_OF_TEXT, count, count == 1 ? "time" : "times");
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks: what an encoder is given, and what it makes of it.

// How often something odd was found in the text, or something that could not be read, and the first of it, in words.
struct Oddity {
    uint64_t count = 0;
    std::string first;

    void add(const std::string& text, uint64_t times = 1) {
        if (count == 0) first = text;
        count += times;
    }
    void add(const Oddity& later) { add(later.first, later.count); }
    void add_at(const std::string& file, uint64_t byte, uint64_t times = 1) {
        if (count == 0) first = format_text("%s at byte %d", file, byte);
        count += times;
    }
    std::string words() const {
        return format_text("%d %s, the first in %s", count, count == 1 ? "time" : "times", first);
    }
};

struct TokenBlock {
    // Of a .txt: parts of `bytes`, each a document or a fragment of one.
    struct Part {
        size_t begin, end;
        bool begins_document;
    };
    std::string bytes;  // of a .jsonl whole lines
    std::vector<Part> parts;
    bool is_jsonl = false, skip_bad = false;
    std::string path, text_key;
    uint64_t first_line = 1, first_byte = 0;  // line number (from 1) and offset in the file of bytes[0]
    uint64_t bytes_before = 0;                // of all files, read before the end of this block

    // From the encoder.
    std::vector<uint16_t> tokens;
    std::vector<size_t> documents;  // where documents begin in `tokens`, each with end-of-text
    uint64_t text_bytes = 0;        // in the documents
    Oddity invalid_utf8, nul;       // nul: bytes that have the id of end-of-text
    Oddity end_of_text;             // END_OF_TEXT as ordinary text; of a .txt its reader counts them
    Oddity bad_lines;
};

// Calls use(text, its line's offset in the file) for every line of a .jsonl but blank ones, and bad(error) for a line
// without a text.
template <class Use, class Bad>
void for_each_text(const TokenBlock& block, Use use, Bad bad) {
    uint64_t number = block.first_line;
    for (size_t begin = 0, end; begin < block.bytes.size(); begin = end + 1) {
        end = std::min(block.bytes.find('\n', begin), block.bytes.size());
        const std::string json = block.bytes.substr(begin, end - begin);
        const std::string where = format_text("%s: line %d", block.path, number++);
        if (json.find_first_not_of(" \t\r") == std::string::npos) continue;
        std::string text;
        try {
            text = parse_json(json, where, block.first_byte + begin).string(block.text_key, where);
        } catch (const Error& e) {
            bad(e);
            continue;
        }
        use(text, block.first_byte + begin);
    }
}

// Bytes of text, `at` bytes into a file, that are not what they seem. None is an error: a vocabulary of bytes takes
// any. nul: null where a 0 is no end-of-text.
inline void find_oddities(const char* text, size_t n, const std::string& path, uint64_t at, Oddity& invalid_utf8,
                          Oddity* nul) {
    uint32_t code;
    for (size_t i = 0; i < n;) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        if (c == 0 && nul) nul->add_at(path, at + i);
        const int length = c < 0x80 ? 1 : utf8_decode(text + i, n - i, &code);
        if (length == 0) invalid_utf8.add_at(path, at + i);
        i += size_t(length ? length : 1);
    }
}

// Appends the tokens of the n bytes at `text`; for one thread.
using EncodeText = std::function<void(const char* text, size_t n, std::vector<uint16_t>& tokens)>;

// For so many threads; the tokenizer must live as long.
inline std::vector<EncodeText> encoders_of(const Tokenizer& tokenizer, int threads) {
    std::vector<EncodeText> encoders;
    for (int i = 0; i < threads; i++)
        encoders.push_back(
            [encoder = Encoder(tokenizer)](const char* text, size_t n, std::vector<uint16_t>& tokens) mutable {
                encoder.append(text, n, tokens);
            });
    return encoders;
}

// end_of_text: stands before every document.
inline void encode_block(TokenBlock& block, uint16_t end_of_text, const EncodeText& append) {
    const bool nul_is_end_of_text = end_of_text == 0;
    const auto encode = [&](const char* text, size_t n, bool begins_document) {
        if (begins_document) {
            block.documents.push_back(block.tokens.size());
            block.tokens.push_back(end_of_text);
        }
        append(text, n, block.tokens);
        block.text_bytes += n;
    };
    for (const TokenBlock::Part& part : block.parts) {
        const char* const text = block.bytes.data() + part.begin;
        find_oddities(text, part.end - part.begin, block.path, block.first_byte + part.begin, block.invalid_utf8,
                      nul_is_end_of_text ? &block.nul : nullptr);
        encode(text, part.end - part.begin, part.begins_document);
    }
    if (!block.is_jsonl) return;
    const auto use = [&](const std::string& text, uint64_t byte) {
        if (text.empty()) return;
        if (const uint64_t count = count_end_of_text(text)) block.end_of_text.add_at(block.path, byte, count);
        if (nul_is_end_of_text)
            if (const auto nuls = std::count(text.begin(), text.end(), '\0'))
                block.nul.add_at(block.path, byte, uint64_t(nuls));
        encode(text.data(), text.size(), true);
    };
    for_each_text(block, use, [&](const Error& e) {
        if (!block.skip_bad) fail("%s; --skip-bad passes over such lines", e.what());
        block.bad_lines.add(e.what());
    });
}

// Threads that encode blocks, each one block at a time. They are given blocks in turn, so whose turn it is has the
// oldest.
class BlockEncoders {
  public:
    BlockEncoders(uint16_t mark, std::vector<EncodeText> of_threads) : end_of_text(mark), encoders(of_threads.size()) {
        for (size_t i = 0; i < encoders.size(); i++) encoders[i].append = std::move(of_threads[i]);
    }

    // Waits for the oldest block, gives its encoder this one, or none, and returns the oldest; null where there is
    // none. If its encoder threw, this throws, so the first error in the files is the one reported.
    std::unique_ptr<TokenBlock> exchange(std::unique_ptr<TokenBlock> block) {
        One& one = encoders[turn++ % encoders.size()];
        if (one.block) one.encoded.get();
        one.block.swap(block);
        if (one.block)
            one.encoded = start_or_fail("that encodes", [&] {
                return std::async(std::launch::async,
                                  [this, &one] { encode_block(*one.block, end_of_text, one.append); });
            });
        return block;
    }

  private:
    struct One {
        EncodeText append;
        std::unique_ptr<TokenBlock> block;
        std::future<void> encoded;  // of the block; last, so that its thread ends first
    };
    const uint16_t end_of_text;
    std::vector<One> encoders;
    size_t turn = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// Reading files into blocks.

using UseBlock = std::function<void(std::unique_ptr<TokenBlock>)>;

// A file that is read from front to back; `rest` holds what has been read but not used.
struct TextFile {
    std::string name;
    ByteSource source;
    std::string rest;
    bool at_end = false;
    uint64_t bytes = 0;  // that have been read
    size_t mark_bytes;   // of a byte order mark, which is skipped

    // reader: see fail_foreign.
    TextFile(const TextInput& input, const std::string& reader) : name(input.name()), source(input, reader) {
        rest.resize(3);
        rest.resize(source.read(&rest[0], 3));
        bytes = rest.size();
        mark_bytes = rest == "\xEF\xBB\xBF" ? 3 : 0;
        rest.erase(0, mark_bytes);
    }

    bool begins_with_brace() {
        size_t first;
        while ((first = rest.find_first_not_of(" \t\r\n")) == std::string::npos && !at_end) read_more(1);
        return first != std::string::npos && rest[first] == '{';
    }

    // Reads at least as much as is left over, so that the time to find the end of a long line is linear in its length.
    void read_more(size_t block_bytes) {
        const size_t old = rest.size(), want = std::max(block_bytes, old);
        rest.resize(old + want);
        const size_t got = source.read(&rest[old], want);
        rest.resize(old + got);
        bytes += got;
        at_end = got < want;
    }
};

// The documents of a file of text, or of stdin where the path is "-": of a .jsonl each line's "text", else all of it.
struct Documents {
    std::vector<std::string> texts;
    bool is_jsonl;
};
inline Documents read_documents(const std::string& path, const std::string& reader) {
    TextInput input;
    input.is_stdin = path == "-";
    if (!file_exists(path) && path.find_first_of("*?[") != std::string::npos)
        fail("cannot open %s: no file has this name; patterns are the shell's, without quotes", path);
    if (!input.is_stdin) text_file_size(input.path = path);
    TextFile file(input, reader);
    const bool is_jsonl = input.is_stdin ? file.begins_with_brace() : has_ending(path, ".jsonl");
    while (!file.at_end) file.read_more(1 << 16);
    if (!is_jsonl) return {{std::move(file.rest)}, false};
    Documents documents = {{}, true};
    TokenBlock block;
    block.path = path == "-" ? "stdin, taken as JSON lines since it begins with {" : path;
    block.text_key = "text";
    block.first_byte = file.mark_bytes;
    block.bytes = std::move(file.rest);
    for_each_text(
        block, [&](const std::string& document, uint64_t) { documents.texts.push_back(document); },
        [](const Error& e) { fail("%s; take that line out: only tokenize has --skip-bad", e.what()); });
    return documents;
}

// What is no error in them and may not be meant.
inline void warn_of_documents(const Documents& documents, const std::string& where) {
    warn_of_end_of_text(documents.texts, where);
    Oddity invalid;
    for (const std::string& text : documents.texts) find_oddities(text.data(), text.size(), where, 0, invalid, nullptr);
    if (invalid.count)
        complain("%s: %s that %s not valid UTF-8 %s; %s", where, counted(int64_t(invalid.count), "byte"),
                 invalid.count == 1 ? "is" : "are", invalid.count == 1 ? "is read as it is" : "are read as they are",
                 CONVERT_ENCODING);
}

// A document longer than a block is handed on in fragments, cut only where the pre-tokeniser always cuts, so that it
// has the tokens of the whole.
inline void read_text(TextFile& file, const std::string& separator, size_t block_bytes,
                      const PreTokenizer& pre_tokenizer, const UseBlock& use, uint64_t* separators = nullptr) {
    bool begins_document = true;  // the next byte is a document's first
    uint64_t byte = file.mark_bytes;
    while (!file.at_end || !file.rest.empty()) {
        file.read_more(block_bytes);
        auto block = std::make_unique<TokenBlock>();
        size_t begin = 0;
        const auto add_part = [&](size_t end) {  // an empty document adds nothing
            if (end > begin) {
                block->parts.push_back({begin, end, begins_document});
                begins_document = false;
            }
            begin = end;
        };
        if (!separator.empty())
            for (size_t found; (found = file.rest.find(separator, begin)) != std::string::npos;) {
                add_part(found);
                begin = found + separator.size();
                begins_document = true;
                if (separators) ++*separators;
            }
        if (file.at_end) {
            add_part(file.rest.size());
        } else {
            // Behind the cut there must be a whole character, and the beginning of a separator or an END_OF_TEXT whose
            // end may not have been read yet.
            const size_t keep = std::max(sizeof END_OF_TEXT, separator.size());
            size_t cut = file.rest.size() > keep ? file.rest.size() - keep : 0;
            while (cut > begin && !pre_tokenizer.always_cuts(file.rest.data(), file.rest.size(), cut)) cut--;
            if (cut > begin) add_part(cut);
        }
        block->path = file.name;
        block->first_byte = byte;
        auto part = block->parts.begin();
        for (size_t at = 0; (at = file.rest.find(END_OF_TEXT, at)) < begin; at++) {
            while (part != block->parts.end() && part->end <= at) part++;
            const bool in_document = part != block->parts.end() && part->begin <= at;  // and no separator
            if (in_document) block->end_of_text.add_at(file.name, byte + at);
        }
        block->bytes = file.rest.substr(0, begin);
        file.rest.erase(0, begin);
        byte += begin;
        if (!block->parts.empty()) use(std::move(block));
    }
}

inline void read_jsonl(TextFile& file, const std::string& text_key, size_t block_bytes, const UseBlock& use) {
    uint64_t line = 1, byte = file.mark_bytes;
    while (!file.at_end || !file.rest.empty()) {
        file.read_more(block_bytes);
        const size_t newline = file.rest.rfind('\n');
        size_t end = newline == std::string::npos ? 0 : newline + 1;
        if (file.at_end) end = file.rest.size();
        if (end == 0) continue;
        auto block = std::make_unique<TokenBlock>();
        block->is_jsonl = true;
        block->path = file.name;
        block->text_key = text_key;
        block->first_line = line;
        block->first_byte = byte;
        block->bytes = file.rest.substr(0, end);
        file.rest.erase(0, end);
        line += uint64_t(std::count(block->bytes.begin(), block->bytes.end(), '\n'));
        byte += end;
        use(std::move(block));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// All the tokens, before they are split into training and validation.

struct ValidationRange {
    uint64_t begin, end;
    bool is_cut;  // it begins inside a document
};

class TokenSpool {
  public:
    std::vector<uint64_t> documents;  // where each document begins, with its end-of-text
    std::vector<uint64_t> hashes;     // of each document's tokens
    uint64_t tokens = 0;

    explicit TokenSpool(const std::string& prefix) : path(prefix + "_tokens.tmp"), file(create()) {
        if (!file) fail("cannot create %s: %s", path, std::strerror(errno));
    }
    TokenSpool(const TokenSpool&) = delete;
    TokenSpool& operator=(const TokenSpool&) = delete;
    ~TokenSpool() { std::fclose(file); }

    void write(const TokenBlock& block) {
        size_t document = 0;
        for (size_t i = 0; i < block.tokens.size(); i++) {
            if (document < block.documents.size() && block.documents[document] == i) {
                documents.push_back(tokens + i);
                hashes.push_back(0xcbf29ce484222325u);
                document++;
            }
            hashes.back() = (hashes.back() ^ block.tokens[i]) * 0x100000001b3u;  // FNV-1a
        }
        if (!block.tokens.empty() &&
            std::fwrite(block.tokens.data(), sizeof(uint16_t), block.tokens.size(), file) != block.tokens.size())
            fail("cannot write %s: %s (all tokens go there before the shards, 2 bytes each)", path,
                 std::strerror(errno));
        tokens += block.tokens.size();
    }

    // The documents in the order in which validation takes them, as the seed draws them.
    std::vector<size_t> order(uint64_t seed) const {
        std::vector<size_t> all(documents.size());
        std::iota(all.rbegin(), all.rend(), size_t(0));
        std::vector<uint64_t> drawn;
        for (const uint64_t hash : hashes) drawn.push_back(random_bits(seed, random_stream(RANDOM_DOCUMENT), hash));
        std::stable_sort(all.begin(), all.end(), [&](size_t a, size_t b) { return drawn[a] < drawn[b]; });
        return all;
    }

    // Copies the tokens of these ranges, which rise, to validation, all others to training. A cut one gets an
    // end-of-text, so that it begins as every document does.
    void deal(const std::vector<ValidationRange>& ranges, uint16_t end_of_text, ShardWriter& train, ShardWriter& val) {
        Progress progress("writing shards", double(tokens));
        std::vector<uint16_t> part(size_t(std::min<uint64_t>(1 << 20, tokens)));
        if (fseeko(file, 0, SEEK_SET) != 0) fail("cannot seek in %s: %s", path, std::strerror(errno));
        auto range = ranges.begin();
        for (uint64_t at = 0, i = 0; at < tokens; at += part.size()) {
            part.resize(size_t(std::min<uint64_t>(part.size(), tokens - at)));
            if (std::fread(part.data(), sizeof(uint16_t), part.size(), file) != part.size())
                fail("cannot read %s back: %s", path, std::strerror(errno));
            while (i < at + part.size()) {
                const bool is_val = range != ranges.end() && i >= range->begin;
                if (is_val && i == range->begin && range->is_cut) val.write(&end_of_text, 1);
                const uint64_t change = is_val ? range->end : range != ranges.end() ? range->begin : tokens;
                const uint64_t end = std::min<uint64_t>(change, at + part.size());
                (is_val ? val : train).write(&part[size_t(i - at)], size_t(end - i));
                if (is_val && end == range->end) ++range;
                i = end;
            }
            progress.done = double(at);
        }
        val.finish();  // whatever can fail does before the first has its name
        train.close();
        val.close();
    }

  private:
    const std::string path;
    std::FILE* const file;

    // It stays open without a name. None that is there is touched.
    std::FILE* create() const {
        std::string name = path + "XXXXXX";
        const int fd = mkstemp(&name[0]);
        if (fd < 0) return nullptr;
        unlink(name.c_str());
        return fdopen(fd, "w+b");
    }
};

// What goes to validation: of these documents, in the order in which they are taken, as many as come nearest to this
// share of the tokens; of several at least one. Where that is less than half of it (few long documents), the end of the
// next one is cut off too.
inline std::vector<ValidationRange> validation_ranges(uint64_t tokens, const std::vector<uint64_t>& documents,
                                                      const std::vector<size_t>& order, double fraction) {
    std::vector<ValidationRange> ranges;
    uint64_t missing = uint64_t(double(tokens) * fraction), taken = 0;
    for (const size_t i : order) {
        const uint64_t begin = documents[i], end = i + 1 < documents.size() ? documents[i + 1] : tokens;
        const uint64_t size = end - begin;
        if (fraction > 0 && missing == 0 && order.size() > 1) missing = size;
        const bool leaves_nothing = taken + size == tokens && size > missing;
        if (leaves_nothing || (size > missing && size - missing >= missing)) {
            if (taken < missing) ranges.push_back({end - missing, end, true});
            break;
        }
        ranges.push_back({begin, end, false});
        if (size >= missing) break;
        taken += size;
        missing -= size;
    }
    std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    return ranges;
}

// ---------------------------------------------------------------------------------------------------------------------

// What was found in the files.
struct TokenizeCounts {
    uint64_t bytes = 0, text_bytes = 0;  // of the files, in documents
    uint64_t text_files = 0, separators = 0, files_without_text = 0;
    Oddity invalid_utf8, nul, end_of_text, bad_lines;
    double seconds = 0;
};

// Reads and encodes all the files; calls use_tokens(block) with each block in their order. verb: for the progress;
// end_of_text: stands before every document; of_threads: what each thread does with the documents.
inline TokenizeCounts encode_files(const char* verb, const TokenizeOptions& options, const TextInputs& inputs,
                                   const std::string& separator, uint16_t end_of_text,
                                   std::vector<EncodeText> of_threads,
                                   const std::function<void(const TokenBlock&)>& use_tokens) {
    TokenizeCounts counts;
    Progress progress(verb, double(inputs.bytes()));
    BlockEncoders encoders(end_of_text, std::move(of_threads));
    const PreTokenizer pre_tokenizer{};
    const auto take = [&](const std::unique_ptr<TokenBlock>& block) {
        if (!block) return;
        use_tokens(*block);
        counts.text_bytes += block->text_bytes;
        progress.done = double(block->bytes_before);
        counts.invalid_utf8.add(block->invalid_utf8);
        counts.nul.add(block->nul);
        counts.end_of_text.add(block->end_of_text);
        counts.bad_lines.add(block->bad_lines);
    };
    for (const TextInput& input : inputs.files) {
        TextFile file(input, std::string(verb) + " --in");
        const uint64_t before = counts.bytes;
        const UseBlock use = [&](std::unique_ptr<TokenBlock> block) {
            block->bytes_before = before + file.bytes;
            block->skip_bad = options.skip_bad;
            take(encoders.exchange(std::move(block)));
        };
        const bool is_jsonl = input.is_jsonl || (input.is_stdin && file.begins_with_brace());
        if (is_jsonl && input.is_stdin) file.name += ", taken as JSON lines since it begins with {";
        if (is_jsonl) read_jsonl(file, options.text_key, options.block_bytes, use);
        else read_text(file, separator, options.block_bytes, pre_tokenizer, use, &counts.separators);
        counts.text_files += !is_jsonl;
        counts.files_without_text += file.bytes == file.mark_bytes;
        counts.bytes += file.bytes;
    }
    for (int i = 0; i < options.threads; i++) take(encoders.exchange(nullptr));
    counts.seconds = progress.seconds();
    return counts;
}

// One line each about what is no error and may not be meant.
inline void warn_of_oddities(const TokenizeOptions& options, const TextInputs& inputs, const TokenizeCounts& counts) {
    if (!inputs.passed_over.empty())
        complain(
            "--in: passed over %d that do not end in %s, or are links to folders, by endings: %s; the "
            "first is %s",
            inputs.passed_over.size(), TEXT_ENDINGS, inputs.kinds_passed_over(), inputs.passed_over[0]);
    if (!inputs.bad.empty() || counts.bad_lines.count)
        complain("--skip-bad: passed over %s and %s of .jsonl; the first: %s",
                 counted(int64_t(inputs.bad.size()), "file"), counted(int64_t(counts.bad_lines.count), "line"),
                 (inputs.bad.empty() ? counts.bad_lines.first : inputs.bad[0]));
    if (counts.files_without_text && counts.text_bytes)
        complain("--in: of %d files %d %s empty", inputs.files.size(), counts.files_without_text,
                 counts.files_without_text == 1 ? "is" : "are");
    if (!options.split_documents.empty() && counts.text_files && !counts.separators)
        complain(
            "--split-documents %s stands nowhere in the .txt files, so that each is one document; "
            "lines of files from Windows end in \\r\\n",
            json_quote(options.split_documents));
    if (counts.invalid_utf8.count)
        complain("bytes that are not valid UTF-8 were kept as they are, %s; %s", counts.invalid_utf8.words(),
                 CONVERT_ENCODING);
    if (counts.end_of_text.count)
        complain(
            "%s in the text is read as ordinary text, not as the end of a document, %s; --split-documents "
            "'%s' ends the documents of a .txt there; a .jsonl has one in each line: take it out there",
            END_OF_TEXT, counts.end_of_text.words(), END_OF_TEXT);
    if (counts.nul.count)
        complain("NUL bytes are read as end-of-text by the vocabulary of bytes; the text has them %s",
                 counts.nul.words());
}

inline void require_text(const TokenizeOptions& options, const TextInputs& inputs, size_t documents) {
    if (documents == 0)
        fail("--in %s: no text in %s", options.in[0], inputs.files.size() > 1 ? "any of the files" : "the file");
}

// The summary, in numbers that add up. documents: with an end-of-text each; ranges: those of validation, of which a cut
// one has an end-of-text more.
inline void print_tokenized(const TokenizeOptions& options, const TextInputs& inputs, const TokenizeCounts& counts,
                            size_t documents, const std::vector<ValidationRange>& ranges, const ShardWriter& train,
                            const ShardWriter& val) {
    const bool added = std::any_of(ranges.begin(), ranges.end(), [](const ValidationRange& r) { return r.is_cut; });
    const uint64_t tokens = train.tokens() + val.tokens(), marks = documents + added;
    print("tokenize: read %s, %d bytes in %.2f s, %.1f MB/s\n", counted(int64_t(inputs.files.size()), "file"),
          counts.bytes, counts.seconds, double(counts.bytes) / 1e6 / std::max(counts.seconds, 1e-9));
    print("tokenize: %s, %d bytes of text: %d tokens + %d end-of-text%s = %d tokens\n",
          counted(int64_t(documents), "document"), counts.text_bytes, tokens - marks, marks,
          added ? " (one more, since validation begins inside a document)" : "", tokens);
    if (train.tokens() && val.tokens())
        print("tokenize: validation: %d of %s, drawn by --seed %d%s\n", ranges.size(),
              counted(int64_t(documents), "document"), options.seed,
              added ? ", one of which was cut: only its end" : "");
    for (const ShardWriter* shards : {&train, &val}) {
        const int64_t n = int64_t(shards->tokens()), files = (n + options.shard_tokens - 1) / options.shard_tokens;
        const char* const name = shards == &train ? "train" : "val";
        if (n == 0) print("tokenize: %s: no tokens, no shard\n", name);
        else
            print("tokenize: %s: %d tokens in %s %s_%s_%06d.bin%s\n", name, n, counted(files, "shard"),
                  printable(options.out), name, shards == &train, files == 1 ? "" : " ...");
    }
    print("tokenize: train %d + val %d = %d tokens\n", train.tokens(), val.tokens(), tokens);
}

inline void tokenize_files(const TokenizeOptions& options) {
    if (options.in.empty())
        fail_usage("tokenize: --in is missing: .txt or .jsonl files, folders, patterns, or - for stdin");
    if (options.out.empty()) fail_usage("tokenize: --out is missing: the prefix of the shards, such as data/my");
    require_no_shards(options.out);
    const std::string separator = read_separator(options.split_documents);
    const TextInputs inputs(options.in, "tokenize", options.skip_bad);
    const Tokenizer tokenizer = Tokenizer::open(options.tokenizer, options.vocab_dir);
    const PrefixLock lock(options.out);
    require_no_shards(options.out);  // another process may have written some since
    ShardWriter train(options.out, "train", 1, options.shard_tokens, tokenizer.vocab_size(), tokenizer.digest());
    ShardWriter val(options.out, "val", 0, options.shard_tokens, tokenizer.vocab_size(), tokenizer.digest());

    TokenSpool spool(options.out);
    const TokenizeCounts counts =
        encode_files("tokenize", options, inputs, separator, tokenizer.end_of_text,
                     encoders_of(tokenizer, options.threads), [&](const TokenBlock& block) { spool.write(block); });
    const size_t documents = spool.documents.size();
    if (options.prints_summary) warn_of_oddities(options, inputs, counts);
    require_text(options, inputs, documents);

    const std::vector<ValidationRange> ranges =
        validation_ranges(spool.tokens, spool.documents, spool.order(options.seed), options.val_fraction);
    spool.deal(ranges, tokenizer.end_of_text, train, val);

    if (!options.prints_summary) return;
    print("tokenize: %s; %s\n", counted(options.threads, "thread"), printable(tokenizer.describe()));
    print_tokenized(options, inputs, counts, documents, ranges, train, val);
}
