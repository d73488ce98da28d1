// tokenize.h: the verb `tokenize`: text files to token shards.
//
// The caller's thread reads the files in blocks of about 1 MB. Worker threads parse and encode them, and the caller
// takes them back in the order in which it read them, so the tokens do not depend on the number of threads. Where
// validation begins depends on the number of tokens, which is known only at the end; so the tokens first go to a file
// beside the shards (2 bytes each; it has no name, so nothing of it stays behind whatever happens) and are copied from
// there. Memory holds a few blocks per thread and 8 bytes per document; a block grows beyond 1 MB only for a longer
// line of JSON or a longer run of characters without a place to cut.
//
// The tokenizer is a template parameter, so that lib/ includes nothing from above: it is the Tokenizer of tokenizer.h.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "json.h"
#include "shards.h"

struct TokenizeOptions {
    std::vector<std::string> in;     // --in: .txt and .jsonl files, in this order
    std::string out;                 // --out: PREFIX of the shards
    std::string tokenizer = "gpt2";  // --tokenizer: gpt2 or bytes
    std::string vocab_dir;           // --vocab-dir: see Tokenizer::gpt2
    // --split-documents: what separates the documents of a .txt, with escapes \n \t \0 \\; empty: the file is one
    // document
    std::string split_documents;
    double val_fraction = 0.01;  // --val-fraction: the validation shards' share of the tokens, 0 or more and below 1
    uint64_t shard_tokens = 100000000;  // --shard-tokens
    int threads = 0;                    // --threads; 0: one per core
    size_t block_bytes = 1 << 20;       // read and encoded at a time; only tests change this and the next
    bool report = true;                 // show the progress bar and the summary
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
        else if (c == 't') out += '\t';
        else if (c == '0') out += '\0';
        else if (c == '\\') out += '\\';
        else
            fail_usage("--split-documents %s: the backslash at byte %zu begins none of \\n \\t \\0 \\\\",
                       json_quote(written).c_str(), i - 1);
    }
    uint32_t code;
    for (size_t i = 0; i < out.size();) {
        const int length = utf8_decode(out.data() + i, out.size() - i, &code);
        if (length == 0) fail_usage("--split-documents %s: not valid UTF-8", json_quote(written).c_str());
        i += size_t(length);
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks: what a worker is given, and what it makes of it.

struct TokenBlock {
    // Of a .txt: parts of `bytes`, each a document or a fragment of one.
    struct Part {
        size_t begin, end;
        bool begins_document;
    };
    std::string bytes;
    std::vector<Part> parts;
    // Of a .jsonl: whole lines.
    bool is_jsonl = false;
    std::string path;
    uint64_t first_line = 0, first_byte = 0;  // line number (from 1) and offset in the file of bytes[0]

    // From the worker.
    std::vector<uint16_t> tokens;
    std::vector<size_t> documents;  // where documents begin in `tokens`, each with end-of-text
    uint64_t text_bytes = 0;        // in the documents
    std::exception_ptr error;
    bool done = false;  // guarded by TokenizePool::mutex
};

template <class Encoder>
void encode_block(TokenBlock& block, Encoder& encoder) {
    const auto encode = [&](const char* text, size_t n, bool begins_document) {
        if (begins_document) {
            block.documents.push_back(block.tokens.size());
            block.tokens.push_back(encoder.tokenizer.end_of_text);
        }
        encoder.append(text, n, block.tokens);
        block.text_bytes += n;
    };
    for (const TokenBlock::Part& part : block.parts)
        encode(block.bytes.data() + part.begin, part.end - part.begin, part.begins_document);
    if (!block.is_jsonl) return;
    uint64_t line_number = block.first_line;
    for (size_t begin = 0; begin < block.bytes.size(); line_number++) {
        const size_t end = std::min(block.bytes.find('\n', begin), block.bytes.size());
        const std::string line = block.bytes.substr(begin, end - begin);
        if (line.find_first_not_of(" \t\r") != std::string::npos) {  // an empty line holds no document
            const std::string where = format_text("%s: line %llu", block.path.c_str(), (unsigned long long)line_number);
            const Json document = parse_json(line, where, block.first_byte + begin);
            const std::string& text = document.string("text", where);
            if (!text.empty()) encode(text.data(), text.size(), true);
        }
        begin = end + 1;
    }
}

// The workers, and the blocks in progress in the order in which they were handed in.
template <class Tokenizer>
class TokenizePool {
  public:
    TokenizePool(const Tokenizer& tokenizer, int threads) : limit(4 * size_t(threads)) {
        for (int i = 0; i < threads; i++) workers.emplace_back([this, &tokenizer] { work(tokenizer); });
    }
    ~TokenizePool() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
        }
        to_do.notify_all();
        for (std::thread& worker : workers) worker.join();
    }

    bool full() const { return in_progress.size() >= limit; }
    bool empty() const { return in_progress.empty(); }

    void hand_in(std::unique_ptr<TokenBlock> block) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            waiting.push_back(block.get());
        }
        in_progress.push_back(std::move(block));
        to_do.notify_one();
    }

    // Waits for the oldest block. If its worker threw, this throws, so the first error in the files is the one
    // reported.
    std::unique_ptr<TokenBlock> take_oldest() {
        {
            std::unique_lock<std::mutex> lock(mutex);
            finished.wait(lock, [&] { return in_progress.front()->done; });
        }
        std::unique_ptr<TokenBlock> block = std::move(in_progress.front());
        in_progress.pop_front();
        if (block->error) std::rethrow_exception(block->error);
        return block;
    }

  private:
    const size_t limit;
    std::vector<std::thread> workers;
    std::deque<std::unique_ptr<TokenBlock>> in_progress;  // used by the caller's thread only
    std::mutex mutex;                                     // guards what follows and TokenBlock::done
    std::condition_variable to_do, finished;
    std::deque<TokenBlock*> waiting;
    bool stopping = false;

    void work(const Tokenizer& tokenizer) {
        typename Tokenizer::Encoder encoder(tokenizer);
        while (true) {
            TokenBlock* block;
            {
                std::unique_lock<std::mutex> lock(mutex);
                to_do.wait(lock, [&] { return stopping || !waiting.empty(); });
                if (stopping) return;
                block = waiting.front();
                waiting.pop_front();
            }
            try {
                encode_block(*block, encoder);
            } catch (...) {
                block->error = std::current_exception();
            }
            {
                std::lock_guard<std::mutex> lock(mutex);
                block->done = true;
            }
            finished.notify_one();
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Reading files into blocks.

using UseBlock = std::function<void(std::unique_ptr<TokenBlock>)>;

// A file that is read from front to back; `rest` holds what has been read but not used.
struct TextFile {
    const std::string path;
    std::ifstream in;
    std::string rest;
    bool at_end = false;
    size_t mark_bytes = 0;  // of a byte order mark, which is skipped

    explicit TextFile(const std::string& path) : path(path), in(path, std::ios::binary) {
        if (!in) fail("cannot open %s: %s", path.c_str(), std::strerror(errno));
        char mark[3] = {};
        in.read(mark, 3);
        const std::string begin(mark, size_t(std::max<std::streamsize>(in.gcount(), 0)));
        if (begin.compare(0, 2, "\xFF\xFE") == 0 || begin.compare(0, 2, "\xFE\xFF") == 0)
            fail(
                "%s: it begins with a byte order mark of UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8 "
                "FILE > NEW",
                path.c_str());
        mark_bytes = begin == "\xEF\xBB\xBF" ? 3 : 0;
        rest = begin.substr(mark_bytes);
        in.clear();  // in a file of two bytes, the end; read_more() will find it again
    }

    // Reads at least as much as is left over, so that the time to find the end of a long line is linear in its length.
    void read_more(size_t block_bytes) {
        const size_t old = rest.size(), want = std::max(block_bytes, old);
        rest.resize(old + want);
        in.read(&rest[old], std::streamsize(want));
        if (in.bad()) fail("cannot read %s: %s", path.c_str(), std::strerror(errno));
        rest.resize(old + size_t(in.gcount()));
        at_end = in.eof();
    }
};

// A document longer than a block is handed on in fragments, cut only where the pre-tokeniser always cuts, so that it
// has the tokens of the whole.
template <class PreTokenizer>
void read_text(const std::string& path, const std::string& separator, size_t block_bytes,
               const PreTokenizer& pre_tokenizer, const UseBlock& use) {
    TextFile file(path);
    bool begins_document = true;  // the next byte is a document's first
    while (!file.at_end || !file.rest.empty()) {
        file.read_more(block_bytes);
        auto block = std::make_unique<TokenBlock>();
        size_t begin = 0;
        const auto add_part = [&](size_t end) {  // an empty document adds nothing
            if (end > begin) block->parts.push_back({begin, end, begins_document}), begins_document = false;
            begin = end;
        };
        if (!separator.empty())
            for (size_t found; (found = file.rest.find(separator, begin)) != std::string::npos;) {
                add_part(found);
                begin = found + separator.size();
                begins_document = true;
            }
        if (file.at_end) {
            add_part(file.rest.size());
        } else {
            // Behind the cut there must be a whole character, and the beginning of a separator whose end may not have
            // been read yet.
            const size_t keep = std::max<size_t>(4, separator.size());
            size_t cut = file.rest.size() > keep ? file.rest.size() - keep : 0;
            while (cut > begin && !pre_tokenizer.always_cuts(file.rest.data(), file.rest.size(), cut)) cut--;
            if (cut > begin) add_part(cut);
        }
        block->bytes = file.rest.substr(0, begin);
        file.rest.erase(0, begin);
        if (!block->parts.empty()) use(std::move(block));
    }
}

inline void read_jsonl(const std::string& path, size_t block_bytes, const UseBlock& use) {
    TextFile file(path);
    uint64_t line = 1, byte = file.mark_bytes;
    while (!file.at_end || !file.rest.empty()) {
        file.read_more(block_bytes);
        const size_t newline = file.rest.rfind('\n');
        size_t end = newline == std::string::npos ? 0 : newline + 1;
        if (file.at_end) end = file.rest.size();
        if (end == 0) continue;
        auto block = std::make_unique<TokenBlock>();
        block->is_jsonl = true, block->path = path, block->first_line = line, block->first_byte = byte;
        block->bytes = file.rest.substr(0, end);
        file.rest.erase(0, end);
        line += uint64_t(std::count(block->bytes.begin(), block->bytes.end(), '\n')), byte += end;
        use(std::move(block));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// All the tokens, before they are split into training and validation.

class TokenSpool {
  public:
    std::vector<uint64_t> documents;  // where each document begins, with its end-of-text
    uint64_t tokens = 0;

    explicit TokenSpool(const std::string& prefix)
        : path(prefix + "_tokens.tmp"), file(std::fopen(path.c_str(), "w+b")) {
        if (!file) fail("cannot create %s: %s", path.c_str(), std::strerror(errno));
        std::remove(path.c_str());  // the file stays open, without a name
    }
    TokenSpool(const TokenSpool&) = delete;
    TokenSpool& operator=(const TokenSpool&) = delete;
    ~TokenSpool() { std::fclose(file); }

    void write(const TokenBlock& block) {
        for (const size_t at : block.documents) documents.push_back(tokens + at);
        if (!block.tokens.empty() &&
            std::fwrite(block.tokens.data(), sizeof(uint16_t), block.tokens.size(), file) != block.tokens.size())
            fail("cannot write %s: %s (all tokens go there before the shards, 2 bytes each)", path.c_str(),
                 std::strerror(errno));
        tokens += block.tokens.size();
    }

    // Copies the tokens [begin, end) to a shard.
    void copy(uint64_t begin, uint64_t end, ShardWriter& shards) {
        std::vector<uint16_t> part(size_t(std::min<uint64_t>(1 << 20, end - begin)));
        if (fseeko(file, off_t(begin * sizeof(uint16_t)), SEEK_SET) != 0)
            fail("cannot seek in %s: %s", path.c_str(), std::strerror(errno));
        for (uint64_t at = begin; at < end; at += part.size()) {
            part.resize(size_t(std::min<uint64_t>(part.size(), end - at)));
            if (std::fread(part.data(), sizeof(uint16_t), part.size(), file) != part.size())
                fail("cannot read %s back: %s", path.c_str(), std::strerror(errno));
            shards.write(part.data(), part.size());
        }
    }

  private:
    const std::string path;
    std::FILE* const file;
};

// Where the validation tokens begin: at the document that begins nearest to the last `fraction` of the tokens. If that
// gives more than twice as many tokens as asked for (few long documents), or there is only one document, they begin at
// exactly that place, in the middle of a document.
inline uint64_t validation_begin(uint64_t tokens, const std::vector<uint64_t>& documents, double fraction) {
    if (fraction == 0) return tokens;
    const uint64_t target = tokens - uint64_t(double(tokens) * fraction);
    if (documents.size() < 2) return target;
    // the first document that does not begin before the target, or else the last one
    const auto above = std::lower_bound(documents.begin() + 1, documents.end() - 1, target);
    uint64_t nearest = *above;
    if (above != documents.begin() + 1 && nearest > target && target - *(above - 1) < nearest - target)
        nearest = *(above - 1);
    return target < tokens && tokens - nearest > 2 * (tokens - target) ? target : nearest;
}

// ---------------------------------------------------------------------------------------------------------------------

// The progress bar on stderr: five times a second on a terminal, a line every ten seconds elsewhere.
class TokenizeProgress {
  public:
    TokenizeProgress(uint64_t total_bytes, bool visible)
        : total(total_bytes), visible(visible), on_terminal(isatty(2)), begin(seconds_now()), shown(begin) {}
    ~TokenizeProgress() {
        if (visible && on_terminal) std::fputc('\n', stderr);
    }

    double seconds() const { return seconds_now() - begin; }

    void show(uint64_t bytes, bool always = false) {
        if (!visible) return;
        if (!always && seconds_now() - shown < (on_terminal ? 0.2 : 10)) return;
        shown = seconds_now();
        const double share = total ? std::min(1.0, double(bytes) / double(total)) : 1;
        const int width = 30, full = int(share * width);
        const std::string bar = std::string(size_t(full), '#') + std::string(size_t(width - full), '.');
        std::fprintf(stderr, "%stokenize [%s] %3.0f %% | %.1f of %.1f MB | %.1f MB/s%s", on_terminal ? "\r" : "",
                     bar.c_str(), 100 * share, double(bytes) / 1e6, double(total) / 1e6,
                     double(bytes) / 1e6 / std::max(seconds(), 1e-9), on_terminal ? " " : "\n");
    }

  private:
    const uint64_t total;
    const bool visible, on_terminal;
    const double begin;
    double shown;
};

inline bool has_ending(const std::string& path, const std::string& ending) {
    return path.size() >= ending.size() && path.compare(path.size() - ending.size(), ending.size(), ending) == 0;
}

// Refuses everything that can be refused before any work is done; returns the bytes of all the files.
inline uint64_t check_tokenize_options(const TokenizeOptions& options) {
    if (options.in.empty()) fail_usage("tokenize: no input; give --in FILE...");
    if (options.out.empty()) fail_usage("tokenize: no output; give --out PREFIX");
    if (!(options.val_fraction >= 0 && options.val_fraction < 1))
        fail_usage("--val-fraction %g: expected 0 or more and below 1", options.val_fraction);
    if (options.threads < 0 || options.threads > 1024)
        fail_usage("--threads %d: expected 1 to 1024, or 0 for one per core", options.threads);
    uint64_t bytes = 0;
    for (const std::string& path : options.in) {
        if (!has_ending(path, ".txt") && !has_ending(path, ".jsonl"))
            fail_usage("--in %s: expected a file that ends in .txt or .jsonl", path.c_str());
        bytes += file_size(path);
    }
    for (const char* split : {"train", "val"}) {
        const std::vector<std::string> old = glob_files(glob_literal(options.out) + "_" + split + "_[0-9]*.bin");
        if (!old.empty())
            fail(
                "--out %s: %s exists already; shards are not overwritten: remove the %zu %s shards or choose another "
                "PREFIX",
                options.out.c_str(), old[0].c_str(), old.size(), split);
    }
    return bytes;
}

// Reads and encodes all the files into the spool. Returns the bytes of text, and the seconds it took in *seconds.
template <class Tokenizer>
uint64_t encode_files(const TokenizeOptions& options, const std::string& separator, const Tokenizer& tokenizer,
                      int threads, uint64_t total_bytes, TokenSpool& spool, double* seconds) {
    uint64_t file_bytes = 0, text_bytes = 0;
    TokenizeProgress progress(total_bytes, options.report);
    TokenizePool<Tokenizer> pool(tokenizer, threads);
    const auto take = [&] {
        const auto block = pool.take_oldest();
        spool.write(*block);
        file_bytes += block->bytes.size(), text_bytes += block->text_bytes;
        progress.show(file_bytes);
    };
    const UseBlock use = [&](std::unique_ptr<TokenBlock> block) {
        while (pool.full()) take();
        pool.hand_in(std::move(block));
    };
    for (const std::string& path : options.in) {
        if (has_ending(path, ".jsonl")) read_jsonl(path, options.block_bytes, use);
        else read_text(path, separator, options.block_bytes, tokenizer.pre_tokenizer, use);
    }
    while (!pool.empty()) take();
    if (!spool.documents.empty()) progress.show(total_bytes, true);
    *seconds = progress.seconds();
    return text_bytes;
}

template <class Tokenizer>
void tokenize_files(const TokenizeOptions& options) {
    const uint64_t total_bytes = check_tokenize_options(options);
    const std::string separator = read_separator(options.split_documents);
    const Tokenizer tokenizer = Tokenizer::open(options.tokenizer, options.vocab_dir);
    const int threads = options.threads ? options.threads : int(std::max(1u, std::thread::hardware_concurrency()));
    ShardWriter train(options.out, "train", 1, options.shard_tokens, tokenizer.vocab_size());
    ShardWriter val(options.out, "val", 0, options.shard_tokens, tokenizer.vocab_size());

    TokenSpool spool(options.out);
    double seconds;
    const uint64_t text_bytes = encode_files(options, separator, tokenizer, threads, total_bytes, spool, &seconds);
    const size_t documents = spool.documents.size();
    if (documents == 0)
        fail("--in %s: no text in %s", options.in[0].c_str(), options.in.size() > 1 ? "any of the files" : "the file");

    const uint64_t begin = validation_begin(spool.tokens, spool.documents, options.val_fraction);
    spool.copy(0, begin, train);
    train.close();
    const bool at_document = std::binary_search(spool.documents.begin(), spool.documents.end(), begin);
    if (!at_document && begin < spool.tokens) val.write(&tokenizer.end_of_text, 1);  // so that val begins with one too
    spool.copy(begin, spool.tokens, val);
    val.close();

    if (!options.report) return;
    std::printf(
        "tokenize: %zu document%s, %llu bytes of text, %llu tokens (%.2f bytes per token), %d thread%s, %.2f s, %.1f "
        "MB/s; %s\n",
        documents, documents == 1 ? "" : "s", (unsigned long long)text_bytes, (unsigned long long)spool.tokens,
        double(text_bytes) / double(spool.tokens), threads, threads == 1 ? "" : "s", seconds,
        double(total_bytes) / 1e6 / std::max(seconds, 1e-9), tokenizer.describe().c_str());
    for (const ShardWriter* shards : {&train, &val}) {
        const uint64_t tokens = shards->tokens(), files = (tokens + options.shard_tokens - 1) / options.shard_tokens;
        const char* const name = shards == &train ? "train" : "val";
        if (tokens == 0) std::printf("tokenize: %s: no tokens, no shard\n", name);
        else
            std::printf("tokenize: %s: %llu tokens in %llu shard%s %s_%s_%06d.bin%s\n", name,
                        (unsigned long long)tokens, (unsigned long long)files, files == 1 ? "" : "s",
                        options.out.c_str(), name, shards == &train ? 1 : 0, files == 1 ? "" : " ...");
    }
}
