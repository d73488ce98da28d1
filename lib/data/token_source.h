// token_source.h: tokens to train on: a shard, which is checked when it is opened, or a corpus in memory. dataloader.h,
// which describes the format, reads them.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "multiple_choice.h"
#include "shards.h"
#include "synthetic.h"

// Tokens to train on: a shard, or a corpus that the program made.
struct TokenSource {
    std::string name;  // a shard's path
    uint64_t count = 0;
    int vocab_size = 0;         // 0 = not recorded
    uint32_t vocab_digest = 0;  // the same
    size_t set = 0;             // of those that --data mixes
    // Of a corpus in memory; copies share it. is_answer: 1 where the token has to be recalled, empty where none has.
    std::shared_ptr<const std::vector<uint16_t>> tokens;
    std::shared_ptr<const std::vector<uint8_t>> is_answer;

    bool is_shard() const { return !tokens; }
    static uint64_t byte_of(uint64_t token) { return SHARD_HEADER_BYTES + sizeof(uint16_t) * token; }

    // Tokens first .. first + n - 1. A shard is opened for each sample, 10 us, because a corpus of a thousand shards
    // would hit the limit on open files; and it is not mapped, because a shard that is cut off would then be a signal
    // instead of an error.
    void read(uint16_t* to, uint64_t first, size_t n) const {
        if (is_shard()) FileReader(name).read(to, n * sizeof *to, byte_of(first));
        else std::copy_n(tokens->begin() + std::ptrdiff_t(first), n, to);
    }

    // Fails at the first of these tokens, which stand at `first`, that is outside the vocabulary.
    void require_vocabulary(const uint16_t* t, uint64_t first, size_t n, int vocabulary) const {
        uint16_t largest = 0;
        for (size_t i = 0; i < n; i++) largest = std::max(largest, t[i]);
        if (largest < vocabulary) return;
        const uint16_t* bad = std::find_if(t, t + n, [&](uint16_t token) { return token >= vocabulary; });
        fail(
            "%s: token %d at byte %d is outside the vocabulary of %d: the shard is damaged or was made with another "
            "tokenizer",
            name, *bad, byte_of(first + uint64_t(bad - t)), vocabulary);
    }
};

// A corpus in memory as a source; is_answer is empty or as long as tokens.
inline TokenSource memory_source(std::string name, std::vector<uint16_t> tokens, std::vector<uint8_t> is_answer,
                                 int vocab_size) {
    TokenSource source;
    source.name = std::move(name);
    source.count = tokens.size();
    source.vocab_size = vocab_size;
    source.tokens = std::make_shared<const std::vector<uint16_t>>(std::move(tokens));
    source.is_answer = std::make_shared<const std::vector<uint8_t>>(std::move(is_answer));
    return source;
}

struct ShardHeader {
    int32_t magic, version, tokens, vocab_size, vocab_digest, zeros[251];
};

// Checks the shard's header, with which the file's size must agree to the byte.
inline TokenSource open_shard(const std::string& path, size_t set = 0) {
    const uint64_t bytes = file_size(path, true);
    if (bytes == 0) fail("%s is empty, a token shard was expected", path);
    std::string head(size_t(std::min<uint64_t>(bytes, SHARD_HEADER_BYTES)), '\0');
    FileReader(path).read(&head[0], head.size(), 0);
    ShardHeader header = {};
    std::memcpy(&header, head.data(), head.size());
    if (header.magic != SHARD_MAGIC) fail("%s is %s", path, name_foreign_format(head));
    if (bytes < SHARD_HEADER_BYTES)
        fail("%s is cut off: %d bytes, the header alone has %d: fetch or write it again", path, bytes,
             SHARD_HEADER_BYTES);
    if (header.version != SHARD_VERSION)
        fail("%s: version %d at byte 4, expected %d", path, header.version, SHARD_VERSION);
    if (header.tokens < 1)
        fail("%s: number of tokens %d at byte 8, expected 1..%d: %s", path, header.tokens, INT32_MAX,
             bytes > 2ull * INT32_MAX + SHARD_HEADER_BYTES ? "a file holds at most so many, split it"
                                                           : "the header is damaged or the shard was never finished");
    if (header.vocab_size < 0 || header.vocab_size > 65536)
        fail("%s: vocabulary size %d at byte 12, expected 1..65536, or 0 for not recorded", path, header.vocab_size);
    for (int i = 0; i < 251; i++)
        if (header.zeros[i] != 0)
            fail(
                "%s: number %d at byte %d of the header, expected 0: the header is damaged or of a format unknown here",
                path, header.zeros[i], 20 + 4 * i);
    const uint64_t expected = SHARD_HEADER_BYTES + sizeof(uint16_t) * uint64_t(header.tokens);
    if (bytes != expected)
        fail(
            "%s is %s: its header counts %d tokens (byte 8), which makes %d bytes, but the file has %d: fetch or "
            "write it again",
            path, bytes < expected ? "cut off" : "too long", header.tokens, expected, bytes);
    TokenSource source;
    source.name = path;
    source.count = uint64_t(header.tokens);
    source.vocab_size = header.vocab_size;
    source.vocab_digest = uint32_t(header.vocab_digest);
    source.set = set;
    return source;
}

inline std::vector<TokenSource> open_shards(const std::vector<std::string>& files) {
    std::vector<TokenSource> sources;
    for (const std::string& file : files) sources.push_back(open_shard(file));
    return sources;
}

inline TokenSource synthetic_source(uint64_t seed, uint64_t tokens, uint64_t first_document) {
    SyntheticCorpus corpus = synthetic_corpus(seed, tokens, first_document);
    return memory_source("the synthetic corpus", std::move(corpus.tokens), std::move(corpus.is_answer), 0);
}

// 8192 steps of the tiny preset pass before a document is seen again, so that recalling names pays more than memorising
// documents. Made in 0.1 s. The same however long the run is, so that it can be extended.
constexpr uint64_t SYNTHETIC_TOKENS = 1 << 24;

// A validation set for `wanted` tokens, but at least one sample; it shares no document with the training data.
inline TokenSource synthetic_validation(uint64_t seed, uint64_t wanted, int64_t seq_len) {
    const uint64_t tokens = std::max(std::min(SYNTHETIC_TOKENS, wanted), uint64_t(seq_len)) + 1;
    return synthetic_source(seed, tokens, SYNTHETIC_FIRST_VALIDATION_DOCUMENT);
}

// The rows of a task one behind the other, T tokens each, as a corpus of samples in order; is_answer marks the endings.
// What stands behind a row's end changes nothing before it.
inline TokenSource choice_source(const ChoiceTask& task, int64_t T) {
    std::vector<uint16_t> tokens(task.rows.size() * size_t(T) + 1);
    std::vector<uint8_t> is_answer(tokens.size());
    for (size_t i = 0; i < task.rows.size(); i++) {
        const ChoiceRow& row = *task.rows[i];
        const auto at = std::ptrdiff_t(i) * T;
        std::copy(row.tokens.begin(), row.tokens.end(), tokens.begin() + at);
        std::fill_n(is_answer.begin() + at + std::ptrdiff_t(row.first), row.answers(), uint8_t(1));
    }
    return memory_source(task.file, std::move(tokens), std::move(is_answer), 0);
}
