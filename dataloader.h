// dataloader.h: token shards, and the order in which the ranks read them.
//
// A shard is 256 int32 {20240520, 1, number of tokens, vocabulary size, its digest, 0 ...}, then that many uint16
// tokens, all little endian: the format of llm.c and modded-nanogpt, whose published FineWeb shards (size and digest 0
// = not recorded) work unchanged; lib/data/shards.h writes it. A sample is T+1 consecutive tokens of one shard. All
// ranks walk one global sequence of samples, so the data of a step does not depend on how many ranks share it, and the
// loader's whole state is four integers.
//
// --data may mix sets of shards: 'a_*.bin:3,b_*.bin:1'. The mixture is exact: with W the sum of the weights, here 4, of
// the samples 0..W-1 of the global sequence, of W..2W-1 and so on, 3 are of a and 1 is of b, spread evenly and always
// in the same order. Each set has a shuffle and epochs of its own: none of its samples comes again before all of them
// have come. Where a set is at follows from the number of the global sample, so a mixture needs no more state.
//
// What an epoch holds. Sample i of a shard is its tokens i*T .. i*T+T, so that every token but the first is a target
// once; only the (tokens - 1) % T at a shard's end never are.
#pragma once
#include <future>

#include "lib/data/data_sets.h"
#include "lib/data/token_source.h"

// ---------------------------------------------------------------------------------------------------------------------
// The order.

// Entry `position` of a pseudo-random permutation of 0..n-1; there is one for each (seed, epoch).
// A Feistel network permutes the numbers of 2h bits, whatever its round function is. The smallest such range that holds
// n is less than 4n, and a result outside 0..n-1 goes through the network again until it falls inside ("cycle walking":
// Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), which leaves a permutation of 0..n-1.
// Unlike a shuffled table it needs no memory (a table for 100 B tokens would take 400 MB on every rank), and it finds
// any place in any epoch at once, so a resumed run needs only the number of its next sample.
inline uint64_t shuffled_position(uint64_t position, uint64_t n, uint64_t seed, uint64_t epoch) {
    int half = 0;
    while (half < 32 && (1ull << 2 * half) < n) half++;
    const uint64_t mask = (1ull << half) - 1;
    uint64_t x = position;
    do {
        uint64_t left = x >> half, right = x & mask;
        // In theory 4 rounds are enough for large halves (Luby and Rackoff, 1988); small ones mix worse.
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t next =
                left ^ (random_bits(seed, random_stream(RANDOM_SHUFFLE, epoch), round << 32 | right) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= n);
    return x;
}

// Deals samples to ranks: of T+1 tokens the first T are the inputs, the last T the targets. Global sample s = 0, 1, 2
// ... of a single set is at position s % n of epoch s / n, where n is the number of samples; an epoch holds every
// sample once, shuffled or in the order of the files. Mixture says where it is in several sets. The ranks take samples
// in turn. While the caller computes on one batch, a thread reads the next, so that a slow disk costs the step nothing.
class DataLoader {
    struct Sample {
        std::vector<uint16_t> tokens;    // (T + 1); 0 where the shard has ended
        std::vector<uint8_t> is_answer;  // (size) or empty
        size_t size = 0;                 // T + 1 or, of a tail, less
    };

    std::vector<TokenSource> sources;    // those of a set follow each other
    std::vector<uint64_t> first_sample;  // of each source, counted over all sources
    LoaderOptions options;
    uint64_t seed, total_tokens = 0, next_sample = 0, corpus = 0;
    std::vector<uint64_t> samples;  // of each set
    size_t too_short = 0;           // shards that hold no sample
    std::unique_ptr<Mixture> mixture;
    int pending_size = 0;
    std::future<std::vector<Sample>> pending;  // the batch at next_sample; last, so that its thread ends first

    uint64_t T() const { return uint64_t(options.seq_len); }
    uint64_t all_samples() const { return std::accumulate(samples.begin(), samples.end(), uint64_t(0)); }

    // Recognises a corpus without reading all of it: a hash of the number of tokens in every shard and of 64 evenly
    // spaced tokens in each; of several sets also of the weights, and of where each set begins.
    uint64_t fingerprint() const {
        uint64_t hash = 0;
        const auto mix = [&](uint64_t x) { hash = random_bits(hash, x, 0); };
        for (const TokenSource& source : sources) {
            if (options.sets.size() > 1) {
                mix(source.set);
                mix(options.sets[source.set].weight);
            }
            mix(source.count);
            const std::unique_ptr<FileReader> file(source.is_shard() ? new FileReader(source.name) : nullptr);
            for (uint64_t i = 0; i < 64 && source.count > 0; i++) {
                const uint64_t at = (source.count - 1) / 63 * i + (source.count - 1) % 63 * i / 63;
                uint16_t token;
                if (file) file->read(&token, sizeof token, TokenSource::byte_of(at));
                else token = (*source.tokens)[at];
                mix(token);
            }
        }
        return hash;
    }

    Sample read_sample(uint64_t number) const {
        const Mixture::Place place = mixture->at(number);
        const uint64_t set_seed = place.set ? random_bits(seed, random_stream(RANDOM_SHUFFLE), place.set) : seed;
        const uint64_t index =
            place.first + (options.shuffle ? shuffled_position(place.position, place.samples, set_seed, place.epoch)
                                           : place.position);
        const size_t shard =
            size_t(std::upper_bound(first_sample.begin(), first_sample.end(), index) - first_sample.begin()) - 1;
        const TokenSource& source = sources[shard];
        const uint64_t start = (index - first_sample[shard]) * T();
        Sample sample;
        sample.tokens.resize(T() + 1);
        sample.size = size_t(std::min(T() + 1, source.count - start));
        source.read(sample.tokens.data(), start, sample.size);
        source.require_vocabulary(sample.tokens.data(), start, sample.size, options.vocab_size);
        if (source.is_answer && !source.is_answer->empty()) {
            const auto first = source.is_answer->begin() + std::ptrdiff_t(start);
            sample.is_answer.assign(first, first + std::ptrdiff_t(sample.size));
        }
        return sample;
    }

    std::vector<Sample> read_batch(uint64_t from, int B) const {
        std::vector<Sample> batch;
        for (int i = 0; i < B; i++)
            batch.push_back(read_sample(from + options.rank + uint64_t(i) * options.world_size));
        return batch;
    }

    // Counts the samples of a set.
    void add_set(size_t set) {
        uint64_t n = 0, tokens = 0, largest = 0;
        size_t shards = 0;
        for (const TokenSource& source : sources) {
            if (source.set != set) continue;
            if (source.vocab_size != 0 && source.vocab_size != options.vocab_size)
                fail(
                    "%s holds tokens of a vocabulary of %d, the model's has %d: choose the tokenizer the shards were "
                    "made with, and its --vocab-dir",
                    source.name, source.vocab_size, options.vocab_size);
            if (source.vocab_digest && options.vocab_digest && source.vocab_digest != options.vocab_digest)
                fail(
                    "%s was made with another vocabulary of %d tokens (digest %08x) than the model's (%08x): give the "
                    "--vocab-dir that the shards were made with",
                    source.name, options.vocab_size, source.vocab_digest, options.vocab_digest);
            first_sample.push_back(all_samples() + n);
            n += source.count > 0 ? (source.count - 1 + (options.tail ? T() - 1 : 0)) / T() : 0;
            tokens += source.count;
            too_short += source.count < (options.tail ? 2 : T() + 1);
            shards++;
            largest = std::max(largest, source.count);
        }
        if (n == 0)
            fail(
                "%s: %d tokens in %s%s, the largest of %d, are too few for one sample, which needs %d in "
                "one shard: give more text, or train with a shorter --seq-len (%d)",
                options.name, tokens, counted(int64_t(shards), "shard"),
                options.sets.size() > 1 ? " of '" + options.sets[set].pattern + "'" : "", largest,
                options.tail ? 2 : T() + 1, options.seq_len);
        samples.push_back(n);
        total_tokens += tokens;
    }

  public:
    DataLoader(std::vector<TokenSource> token_sources, const LoaderOptions& loader_options)
        : sources(std::move(token_sources)), options(loader_options), seed(loader_options.seed) {
        std::vector<uint64_t> weights;
        for (size_t set = 0; set < options.sets.size(); set++) {
            add_set(set);
            weights.push_back(options.sets[set].weight);
        }
        mixture = std::make_unique<Mixture>(samples, weights);
        corpus = fingerprint();
    }
    DataLoader(const DataLoader&) = delete;  // the reading thread points to this
    DataLoader& operator=(const DataLoader&) = delete;

    // Refuses a corpus that is smaller than one optimiser step, which would see a sample twice.
    void require_global_batch(uint64_t batch_samples) const {
        if (samples_per_epoch() < batch_samples)
            fail(
                "%s: %d tokens make %d samples of --seq-len %d%s, fewer than the %d of one global batch, which "
                "needs about %d tokens: give more text, or lower --total-batch or --seq-len",
                options.name, total_tokens, samples_per_epoch(), options.seq_len,
                samples.size() > 1 ? " until one comes again" : "", batch_samples, batch_samples * T() + 1);
    }

    // This rank's next B samples: inputs and targets (B, T); answer (B, T), unless null, is 1 where the target has to
    // be recalled, NO_TARGET behind a shard's end. A token outside the vocabulary is an error with its file and byte;
    // the loader then stays where it was.
    void next_batch(int32_t* inputs, int32_t* targets, int B, uint8_t* answer = nullptr) {
        const std::vector<Sample> batch =
            pending.valid() && pending_size == B ? pending.get() : read_batch(next_sample, B);
        for (size_t b = 0; b < batch.size(); b++) {
            const Sample& sample = batch[b];
            for (size_t t = 0; t < T(); t++) {
                inputs[b * T() + t] = sample.tokens[t];
                targets[b * T() + t] = sample.tokens[t + 1];
                if (!answer) continue;
                const bool ended = t + 1 >= sample.size;
                answer[b * T() + t] = ended ? NO_TARGET : sample.is_answer.empty() ? 0 : sample.is_answer[t + 1];
            }
        }
        next_sample += uint64_t(B) * options.world_size;
        pending_size = B;
        pending = start_or_fail("that reads the next batch", [&] {
            return std::async(std::launch::async, [this, from = next_sample, B] { return read_batch(from, B); });
        });
    }

    LoaderState state() const { return {seed, T(), corpus, next_sample}; }

    // Continues where state() was taken, on any number of ranks and in the saved order: its seed replaces this
    // loader's.
    void restore(const LoaderState& saved) {
        if (saved.seq_len != T())
            fail("cannot continue on %s: the checkpoint cut samples with --seq-len %d, this run with %d: use the same",
                 options.name, saved.seq_len, options.seq_len);
        if (saved.corpus != corpus)
            fail(
                "cannot continue on %s: the checkpoint was made on another corpus (fingerprint %016x, of these "
                "tokens %016x): use the same shards, or for the synthetic corpus the same --seed; --allow-new-data "
                "goes on with these",
                options.name, saved.corpus, corpus);
        pending = {};  // waits for its thread
        seed = saved.seed;
        next_sample = saved.next_sample;
    }

    bool has_same_corpus(const LoaderState& saved) const { return saved.corpus == corpus; }

    // Goes on behind a state of another corpus: from the beginning of a new order of this one.
    void restore_other_corpus(const LoaderState& saved) {
        restore({random_bits(saved.seed, saved.corpus, saved.next_sample), saved.seq_len, corpus, 0});
    }

    // To the first sample.
    void rewind() { restore({seed, T(), corpus, 0}); }

    // Of a mixture: how many come before one of its sets begins again.
    uint64_t samples_per_epoch() const { return mixture->first_epoch(); }
    uint64_t tokens() const { return total_tokens; }

    // Paths of the shards; a corpus in memory has none.
    std::vector<std::string> files() const {
        std::vector<std::string> paths;
        for (const TokenSource& s : sources)
            if (s.is_shard()) paths.push_back(absolute_path(s.name));
        return paths;
    }

    std::string describe() const {
        std::string text = format_text("%s, %d tokens, %s of %d tokens, %s", counted(int64_t(sources.size()), "shard"),
                                       total_tokens, counted(int64_t(all_samples()), "sample"), options.seq_len,
                                       options.shuffle ? "shuffled" : "in order");
        if (too_short) text += format_text(", %d of the shards too short for one", too_short);
        for (size_t set = 0; samples.size() > 1 && set < samples.size(); set++)
            text += format_text("%s %d of %d from %s (%d samples, all seen after %d)", set ? "," : ";",
                                options.sets[set].weight, mixture->turns(), options.sets[set].pattern, samples[set],
                                mixture->first_epoch(set));
        return text;
    }
};
