// dataloader.h: token shards on disk, and the order in which the ranks read them.
//
// A shard is 256 int32 {20240520, 1, number of tokens, vocabulary size or 0, 0 ...}, then that many uint16 tokens, all
// little endian: the format of llm.c and modded-nanogpt, whose published FineWeb shards (vocabulary size 0 = not
// recorded) work unchanged. A sample is T+1 consecutive tokens of one shard. All ranks walk one global sequence of
// samples, so the data of a step does not depend on how many ranks share it, and the loader's whole state is four
// integers.
#pragma once
#include <algorithm>
#include <atomic>
#include <csignal>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "lib/util.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little endian and are used in place");

constexpr int32_t SHARD_MAGIC = 20240520, SHARD_VERSION = 1;
constexpr size_t SHARD_HEADER_BYTES = 256 * sizeof(int32_t);

// ---------------------------------------------------------------------------------------------------------------------
// Writing.

// Writes <prefix>_<split>_000000.bin and so on from first_index, a new file after every shard_tokens tokens
// (documents may straddle two files). A shard has its name only once it is whole: it grows as <name>.tmp,
// which is renamed after its header has been patched and the disk has confirmed it; a writer that ends
// without close() removes its unfinished file. A shard that exists already is refused, never replaced.
class ShardWriter {
  public:
    ShardWriter(std::string prefix, std::string split, int first_index, uint64_t shard_tokens, int vocab_size)
        : prefix(std::move(prefix)),
          split(std::move(split)),
          index(first_index),
          shard_tokens(shard_tokens),
          vocab_size(vocab_size) {
        if (this->split != "train" && this->split != "val")
            fail_usage("shards of split '%s': expected train or val", this->split.c_str());
        if (first_index < 0 || first_index > 999999)
            fail_usage("first shard number %d: expected 0..999999", first_index);
        if (shard_tokens < 1 || shard_tokens > uint64_t(INT32_MAX))
            fail_usage("%llu tokens per shard: expected 1..%d, the header counts them in 32 bits",
                       (unsigned long long)shard_tokens, INT32_MAX);
        if (vocab_size < 1 || vocab_size > 65536)
            fail_usage("vocabulary of %d tokens: shards hold 16-bit tokens, so 1..65536", vocab_size);
        const size_t slash = this->prefix.rfind('/');
        if (slash != std::string::npos && slash > 0) make_folders(this->prefix.substr(0, slash));
    }
    ShardWriter(const ShardWriter&) = delete;
    ShardWriter& operator=(const ShardWriter&) = delete;
    ~ShardWriter() { discard(); }

    void write(const uint16_t* tokens, size_t n) {
        for (size_t i = 0; i < n; i++)
            if (tokens[i] >= vocab_size)
                fail(
                    "token %d of %s_%s shards is outside the vocabulary of %d: the tokenizer and the vocabulary size "
                    "differ",
                    tokens[i], prefix.c_str(), split.c_str(), vocab_size);
        while (n > 0) {
            if (!file) open_shard();
            const size_t part = size_t(std::min<uint64_t>(n, shard_tokens - in_shard));
            if (std::fwrite(tokens, sizeof(uint16_t), part, file) != part) fail_write();
            tokens += part, n -= part, in_shard += part, total += part;
            if (in_shard == shard_tokens) finish_shard();
        }
    }

    // Completes the last shard. Without tokens there is no file.
    void close() {
        if (file) finish_shard();
    }

    uint64_t tokens() const { return total; }  // written so far, all shards together

  private:
    std::string prefix, split;
    int index;
    uint64_t shard_tokens;
    int vocab_size;
    std::string path;           // of the open shard, without .tmp
    std::FILE* file = nullptr;  // null between shards
    uint64_t in_shard = 0, total = 0;

    void open_shard() {
        if (index > 999999)
            fail("more than 1000000 shards of %s_%s: raise the number of tokens per shard", prefix.c_str(),
                 split.c_str());
        path = format_text("%s_%s_%06d.bin", prefix.c_str(), split.c_str(), index);
        if (file_exists(path))
            fail("%s exists already: remove the old shards or choose another output name", path.c_str());
        file = std::fopen((path + ".tmp").c_str(), "wb");
        if (!file) fail("cannot create %s.tmp: %s", path.c_str(), std::strerror(errno));
        in_shard = 0;
        write_header(0);  // not a valid shard until finish_shard() has written the count
    }

    void write_header(int32_t tokens) {
        const int32_t header[256] = {SHARD_MAGIC, SHARD_VERSION, tokens, vocab_size};
        if (std::fwrite(header, 1, SHARD_HEADER_BYTES, file) != SHARD_HEADER_BYTES) fail_write();
    }

    void finish_shard() {
        if (std::fseek(file, 0, SEEK_SET) != 0) fail_write();
        write_header(int32_t(in_shard));
        if (std::fflush(file) != 0 || fsync(fileno(file)) != 0) fail_write();
        std::FILE* whole = file;
        file = nullptr;
        if (std::fclose(whole) != 0 || std::rename((path + ".tmp").c_str(), path.c_str()) != 0) {
            const int error = errno;
            std::remove((path + ".tmp").c_str());
            fail("cannot complete %s: %s", path.c_str(), std::strerror(error));
        }
        index++;
    }

    [[noreturn]] void fail_write() {
        const int error = errno;
        discard();
        fail("cannot write %s.tmp: %s; shards before this one are complete, this one was removed", path.c_str(),
             std::strerror(error));
    }

    void discard() {
        if (!file) return;
        std::fclose(file);
        file = nullptr;
        std::remove((path + ".tmp").c_str());
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Reading.

// Tokens to train on: a shard mapped into memory, or a corpus made by the program. Copies share the tokens.
struct TokenSource {
    std::string name;                    // the path, for messages
    const uint16_t* tokens = nullptr;    // (count)
    const uint8_t* is_answer = nullptr;  // (count) 1 where a token is an answer to be recalled, or null
    uint64_t count = 0;
    int vocab_size = 0;                 // 0 = not recorded
    uint64_t first_byte = 0;            // offset of tokens[0] in the file
    std::shared_ptr<const void> owner;  // unmaps or frees with the last copy
};

// The source for a corpus in memory; is_answer is empty or as long as tokens.
inline TokenSource memory_source(std::string name, std::vector<uint16_t> tokens, std::vector<uint8_t> is_answer,
                                 int vocab_size) {
    if (!is_answer.empty() && is_answer.size() != tokens.size())
        fail("%s: %zu answer flags for %zu tokens", name.c_str(), is_answer.size(), tokens.size());
    auto owner = std::make_shared<const std::pair<std::vector<uint16_t>, std::vector<uint8_t>>>(std::move(tokens),
                                                                                                std::move(is_answer));
    TokenSource source;
    source.name = std::move(name);
    source.tokens = owner->first.data();
    source.is_answer = owner->second.empty() ? nullptr : owner->second.data();
    source.count = owner->first.size();
    source.vocab_size = vocab_size;
    source.owner = owner;
    return source;
}

// What a file without the shard magic is, with what to do about it, told from its first bytes (up to SHARD_HEADER_BYTES
// of them).
inline std::string name_foreign_format(const std::string& head) {
    const std::string tokenize = "make shards from the text with ./train_nsa tokenize";
    const struct {
        int32_t magic;
        const char* what;
    } llmc[] = {
        {20240326, "a model of llm.c, not tokens: give it where a checkpoint is asked for, and token shards here"},
        {20240327, "a debug state of llm.c, not tokens: give token shards here"},
        {20240328, "a tokenizer file of llm.c, not tokens: give it as the vocabulary, and token shards here"},
        {20240522, "an evaluation file of llm.c, not tokens to train on: give token shards here"},
        {20240527, "a loader and optimiser state of llm.c, not tokens: give token shards here"},
        {20240801, "a llama3 shard of llm.c with 32-bit tokens; shards here hold 16-bit GPT-2 or byte tokens: "}};
    int32_t magic = 0;
    std::memcpy(&magic, head.data(), std::min(head.size(), sizeof magic));
    for (const auto& format : llmc)
        if (magic == format.magic) return format.what + (magic == 20240801 ? tokenize : "");
    const struct {
        std::string start;
        const char* what;
    } signatures[] = {
        {"\x1f\x8b", "a gzip archive: unpack it first"},
        {"PK\x03\x04", "a zip archive: unpack it first"},
        {"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"},
        {"PAR1", "a parquet file: turn it into .jsonl with data/parquet_to_jsonl.py, then run ./train_nsa tokenize"},
        {"\x93NUMPY", "a numpy array: save its tokens as uint16 behind a shard header"},
        {"version https://git-lfs", "a Git LFS pointer instead of the file itself: fetch the file with git lfs pull"}};
    for (const auto& format : signatures)
        if (head.compare(0, format.start.size(), format.start) == 0) return format.what;
    const auto is_text = [](unsigned char c) { return c >= ' ' || (c >= '\t' && c <= '\r'); };
    if (std::all_of(head.begin(), head.end(), is_text)) return "text, not tokens: " + tokenize;
    return "no token shard: its first number is " + std::to_string(magic) + ", expected " +
           std::to_string(SHARD_MAGIC) +
           "; if it is a header-less .bin of nanoGPT, put 256 int32 {20240520, 1, number of tokens, 0, 0 ...} before "
           "its tokens, or " +
           tokenize;
}

// Shards in memory, for the message about one that is cut off, or whose disk
// fails, while it is read: the kernel then sends SIGBUS instead of an error.
struct MappedShard {
    const char* begin;
    uint64_t bytes;
    std::string message;
};
inline std::vector<MappedShard>& mapped_shards() {
    static auto* const shards = new std::vector<MappedShard>;  // never freed: the handler may come at any time
    return *shards;
}
inline void on_lost_page(int, siginfo_t* info, void*) {
    const char* const at = static_cast<const char*>(info->si_addr);
    for (const MappedShard& shard : mapped_shards())
        if (at >= shard.begin && at < shard.begin + shard.bytes) {
            static std::atomic_flag told = ATOMIC_FLAG_INIT;
            while (told.test_and_set()) pause();  // another thread tells it, and ends the program
            if (write(2, shard.message.data(), shard.message.size()) < 0) _exit(1);
            _exit(1);
        }
    signal(SIGBUS, SIG_DFL);  // something else: it comes again, and ends the program
}
inline void listen_for_lost_pages() {
    struct sigaction action = {};
    action.sa_sigaction = on_lost_page;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}

// Opens one shard. Header and size must agree to the byte; nothing is read or mapped before they do.
inline TokenSource open_shard(const std::string& path) {
    const uint64_t bytes = file_size(path);
    const char* p = path.c_str();
    if (bytes == 0) fail("%s is empty, a token shard was expected", p);
    const int fd = open(p, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("cannot open %s: %s", p, std::strerror(errno));
    const auto close_fd = [](const int* fd) { close(*fd); };
    const std::unique_ptr<const int, decltype(close_fd)> closer(&fd, close_fd);

    std::string head(size_t(std::min<uint64_t>(bytes, SHARD_HEADER_BYTES)), '\0');
    if (pread(fd, &head[0], head.size(), 0) != ssize_t(head.size()))
        fail("cannot read the first %zu bytes of %s: %s", head.size(), p, std::strerror(errno));
    int32_t header[256] = {};
    std::memcpy(header, head.data(), head.size());
    if (header[0] != SHARD_MAGIC) fail("%s is %s", p, name_foreign_format(head).c_str());
    if (bytes < SHARD_HEADER_BYTES)
        fail("%s is cut off: %llu bytes, the header alone has %zu: fetch or write it again", p,
             (unsigned long long)bytes, SHARD_HEADER_BYTES);
    if (header[1] != SHARD_VERSION) fail("%s: version %d at byte 4, expected %d", p, header[1], SHARD_VERSION);
    if (header[2] < 1)
        fail("%s: number of tokens %d at byte 8, expected 1..%d: the header is damaged or the shard was never finished",
             p, header[2], INT32_MAX);
    if (header[3] < 0 || header[3] > 65536)
        fail("%s: vocabulary size %d at byte 12, expected 1..65536, or 0 for not recorded", p, header[3]);
    for (int i = 4; i < 256; i++)
        if (header[i] != 0)
            fail(
                "%s: number %d at byte %d of the header, expected 0: the header is damaged or of a format unknown here",
                p, header[i], 4 * i);
    const uint64_t expected = SHARD_HEADER_BYTES + sizeof(uint16_t) * uint64_t(header[2]);
    if (bytes != expected)
        fail(
            "%s is %s: its header counts %d tokens (byte 8), which makes %llu bytes, but the file has %llu: fetch or "
            "write it again",
            p, bytes < expected ? "cut off" : "too long", header[2], (unsigned long long)expected,
            (unsigned long long)bytes);

    // Mapped and closed: a corpus of a thousand shards would run into the limit on open files.
    const void* map = mmap(nullptr, size_t(bytes), PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        fail("cannot map %s (%llu bytes) into memory: %s", p, (unsigned long long)bytes, std::strerror(errno));
    TokenSource source;
    mapped_shards().push_back(
        {static_cast<const char*>(map), bytes,
         "train_nsa: error: " + printable(path) +
             " was cut off, or its disk failed, while it was read: put it back and run again with --resume\n"});
    source.owner = std::shared_ptr<const void>(map, [bytes](const void* m) {
        auto& shards = mapped_shards();
        shards.erase(
            std::find_if(shards.begin(), shards.end(), [m](const MappedShard& shard) { return shard.begin == m; }));
        munmap(const_cast<void*>(m), size_t(bytes));
    });
    source.name = path;
    source.tokens = reinterpret_cast<const uint16_t*>(static_cast<const char*>(map) + SHARD_HEADER_BYTES);
    source.count = uint64_t(header[2]);
    source.vocab_size = header[3];
    source.first_byte = SHARD_HEADER_BYTES;
    return source;
}

// The files that match a shell pattern, in the order of their names; option is what the user gave the pattern with.
inline std::vector<std::string> shard_files(const std::string& pattern, const std::string& option) {
    const std::vector<std::string> files = glob_files(pattern);
    if (files.empty())
        fail(
            "%s: no file matches '%s': make shards with ./train_nsa tokenize or data/fetch_shards.sh, and quote the "
            "pattern",
            option.c_str(), pattern.c_str());
    return files;
}

inline std::vector<TokenSource> open_shards(const std::vector<std::string>& files) {
    std::vector<TokenSource> sources;
    for (const std::string& file : files) sources.push_back(open_shard(file));
    return sources;
}

// No file may serve for both training and validation. Links count as the file they lead to; copies are not noticed.
inline void check_disjoint(const std::vector<std::string>& train_files, const std::vector<std::string>& val_files) {
    const auto identity = [](const std::string& path) {
        struct stat s;
        if (stat(path.c_str(), &s) != 0) fail("cannot open %s: %s", path.c_str(), std::strerror(errno));
        return std::make_pair(s.st_dev, s.st_ino);
    };
    std::vector<std::pair<std::pair<dev_t, ino_t>, std::string>> train;
    for (const std::string& file : train_files) train.push_back({identity(file), file});
    std::sort(train.begin(), train.end());
    for (const std::string& file : val_files) {
        const auto id = identity(file);
        const auto same = std::lower_bound(train.begin(), train.end(), std::make_pair(id, std::string()));
        if (same != train.end() && same->first == id)
            fail_usage(
                "validation file %s is the training file %s: the validation loss would be a training loss; give "
                "separate shards",
                file.c_str(), same->second.c_str());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The order.

// Entry `position` of a pseudo-random permutation of 0..n-1, one per (seed, epoch).
// A Feistel network permutes the numbers of 2h bits whatever its round function is; the smallest such range that holds
// n is less than 4n, and a result outside 0..n-1 is sent through again until it falls inside ("cycle walking": Black
// and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), which leaves a permutation of 0..n-1. Unlike a
// shuffled table it needs no memory (a table for 100 B tokens would take 400 MB on every rank), and any place of any
// epoch is found at once, so resuming is a matter of one number.
inline uint64_t shuffled_position(uint64_t position, uint64_t n, uint64_t seed, uint64_t epoch) {
    int half = 0;
    while (half < 32 && (1ull << 2 * half) < n) half++;
    const uint64_t mask = (1ull << half) - 1;
    uint64_t x = position;
    do {
        uint64_t left = x >> half, right = x & mask;
        // 4 suffice in theory (Luby and Rackoff, 1988) for large halves; small ones mix worse
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t next =
                left ^ (random_bits(seed, random_stream(RANDOM_SHUFFLE, epoch), round << 32 | right) & mask);
            left = right, right = next;
        }
        x = left << half | right;
    } while (x >= n);
    return x;
}

struct LoaderState {
    uint64_t seed;         // of the shuffle
    uint64_t seq_len;      // T: samples are cut by it
    uint64_t corpus;       // fingerprint of the corpus, see DataLoader::fingerprint
    uint64_t next_sample;  // global number of the next sample: the same on every rank, and independent of the number of
                           // ranks
};

struct LoaderOptions {
    std::string name = "--data";  // what the tokens were given with, for messages
    int seq_len = 0;              // T
    int vocab_size = 0;           // of the model's tokenizer
    uint64_t seed = 0;
    bool shuffle = true;
    int rank = 0, world_size = 1;
};

// Deals samples to ranks. Sample i of a shard is its tokens i*T .. i*T+T: the first T are the inputs, the last T the
// targets. Global sample s = 0, 1, 2 ... lies in epoch s / n at position s % n, n = samples_per_epoch(); within an
// epoch every sample comes once, in shuffled order or in the order of the files. Samples are dealt to the ranks in
// turn. While the caller computes on one batch, a thread reads the next: page faults of a cold file cost the step
// nothing.
class DataLoader {
  public:
    DataLoader(std::vector<TokenSource> token_sources, const LoaderOptions& loader_options)
        : sources(std::move(token_sources)), options(loader_options), seed(loader_options.seed) {
        if (options.seq_len < 1) fail_usage("sequence length %d: expected at least 1", options.seq_len);
        if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
            fail("rank %d of %d ranks does not exist", options.rank, options.world_size);
        uint64_t largest = 0;
        for (const TokenSource& source : sources) {
            if (source.vocab_size != 0 && source.vocab_size != options.vocab_size)
                fail(
                    "%s holds tokens of a vocabulary of %d, the model's has %d: choose the tokenizer the shards were "
                    "made with",
                    source.name.c_str(), source.vocab_size, options.vocab_size);
            first_sample.push_back(samples);
            samples += source.count > 0 ? (source.count - 1) / T() : 0;
            total_tokens += source.count;
            largest = std::max(largest, source.count);
        }
        if (samples == 0)
            fail(
                "%s: %llu tokens in %zu shards, the largest of %llu, are too few for one sample, which needs %llu in "
                "one shard: "
                "give more text, or train with a shorter --seq-len (%d)",
                options.name.c_str(), (unsigned long long)total_tokens, sources.size(), (unsigned long long)largest,
                (unsigned long long)(T() + 1), options.seq_len);
        corpus = fingerprint();
    }
    DataLoader(const DataLoader&) = delete;  // the reading thread holds a pointer to this
    DataLoader& operator=(const DataLoader&) = delete;

    // Refuses a corpus smaller than one optimiser step, which would see a sample twice.
    void require_global_batch(uint64_t batch_samples) const {
        if (samples < batch_samples)
            fail(
                "%s: %llu tokens make %llu samples of --seq-len %d, fewer than the %llu of one global batch, which "
                "needs about %llu "
                "tokens: "
                "give more text, or lower --total-batch or --seq-len",
                options.name.c_str(), (unsigned long long)total_tokens, (unsigned long long)samples, options.seq_len,
                (unsigned long long)batch_samples, (unsigned long long)(batch_samples * T() + 1));
    }

    // This rank's next B samples: inputs and targets (B, T); answer (B, T) is 1 where the target is an answer to be
    // recalled, if not null. Fails at a token outside the vocabulary, naming file and byte; the loader then stays where
    // it was.
    void next_batch(int32_t* inputs, int32_t* targets, int B, uint8_t* answer = nullptr) {
        if (B < 1) fail_usage("batch of %d samples: expected at least 1", B);
        const std::vector<Sample> batch =
            pending.valid() && pending_size == B ? pending.get() : read_batch(next_sample, B);
        for (size_t b = 0; b < batch.size(); b++) {
            const Sample& sample = batch[b];
            for (size_t t = 0; t < T(); t++) {
                inputs[b * T() + t] = sample.tokens[t];
                targets[b * T() + t] = sample.tokens[t + 1];
                if (answer) answer[b * T() + t] = sample.is_answer.empty() ? 0 : sample.is_answer[t + 1];
            }
        }
        next_sample += uint64_t(B) * options.world_size;
        pending_size = B;
        pending = std::async(std::launch::async, [this, from = next_sample, B] { return read_batch(from, B); });
    }

    LoaderState state() const { return {seed, T(), corpus, next_sample}; }

    // Continues where state() was taken, on any number of ranks. The order is the saved one: its seed replaces this
    // loader's.
    void restore(const LoaderState& saved) {
        if (saved.seq_len != T())
            fail(
                "cannot continue on %s: the checkpoint cut samples with --seq-len %llu, this run with %d: use the same",
                options.name.c_str(), (unsigned long long)saved.seq_len, options.seq_len);
        if (saved.corpus != corpus)
            fail(
                "cannot continue on %s: the checkpoint was made on another corpus (fingerprint %016llx, of these "
                "tokens %016llx): use the "
                "same shards, or for the synthetic corpus the same --seed",
                options.name.c_str(), (unsigned long long)saved.corpus, (unsigned long long)corpus);
        pending = {};  // waits for the thread
        seed = saved.seed;
        next_sample = saved.next_sample;
    }

    uint64_t samples_per_epoch() const { return samples; }
    uint64_t tokens() const { return total_tokens; }
    bool has_answers() const {
        return std::any_of(sources.begin(), sources.end(), [](const TokenSource& s) { return s.is_answer; });
    }

    std::string describe() const {
        return format_text("%zu shard%s, %llu tokens, %llu samples of %d tokens, %s", sources.size(),
                           sources.size() == 1 ? "" : "s", (unsigned long long)total_tokens,
                           (unsigned long long)samples, options.seq_len, options.shuffle ? "shuffled" : "in order");
    }

  private:
    struct Sample {
        std::vector<uint16_t> tokens;    // (T + 1)
        std::vector<uint8_t> is_answer;  // (T + 1) or empty
    };

    std::vector<TokenSource> sources;
    std::vector<uint64_t> first_sample;  // of each source, counted over all
    LoaderOptions options;
    uint64_t seed, samples = 0, total_tokens = 0, next_sample = 0, corpus = 0;  // corpus: fingerprint()
    int pending_size = 0;
    std::future<std::vector<Sample>>
        pending;  // the batch at next_sample; last member, so that its thread is joined before the rest goes

    uint64_t T() const { return uint64_t(options.seq_len); }

    // Tells another corpus from the same one without reading it all: a hash over
    // the number of tokens in every shard and 64 tokens spaced evenly in each.
    uint64_t fingerprint() const {
        uint64_t hash = 0;
        const auto mix = [&](uint64_t x) { hash = random_bits(hash, x, 0); };
        for (const TokenSource& source : sources) {
            mix(source.count);
            for (uint64_t i = 0; i < 64 && source.count > 0; i++)
                mix(source.tokens[(source.count - 1) / 63 * i + (source.count - 1) % 63 * i / 63]);
        }
        return hash;
    }

    std::vector<Sample> read_batch(uint64_t from, int B) const {
        std::vector<Sample> batch;
        for (int i = 0; i < B; i++)
            batch.push_back(read_sample(from + options.rank + uint64_t(i) * options.world_size));
        return batch;
    }

    Sample read_sample(uint64_t number) const {
        const uint64_t epoch = number / samples, position = number % samples;
        const uint64_t index = options.shuffle ? shuffled_position(position, samples, seed, epoch) : position;
        const size_t shard =
            size_t(std::upper_bound(first_sample.begin(), first_sample.end(), index) - first_sample.begin()) - 1;
        const TokenSource& source = sources[shard];
        const uint64_t start = (index - first_sample[shard]) * T();
        Sample sample;
        sample.tokens.assign(source.tokens + start, source.tokens + start + T() + 1);
        if (source.is_answer) sample.is_answer.assign(source.is_answer + start, source.is_answer + start + T() + 1);
        for (size_t t = 0; t <= T(); t++)
            if (sample.tokens[t] >= options.vocab_size)
                fail(
                    "%s: token %d at byte %llu is outside the vocabulary of %d: the shard is damaged or was made with "
                    "another tokenizer",
                    source.name.c_str(), sample.tokens[t],
                    (unsigned long long)(source.first_byte + sizeof(uint16_t) * (start + t)), options.vocab_size);
        return sample;
    }
};
