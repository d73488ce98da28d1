// bpe_trainer.h: the verb `vocabulary`: text files to a byte-level BPE of one's own, which --vocab-dir takes.
//
// Training begins with the words of the text, the pieces into which GPT-2's regular expression cuts it, each as its
// bytes. Again and again, the pair of neighbouring tokens that occurs most often in all words becomes a new token,
// everywhere and from left to right. Of pairs that occur equally often the one with the lower left id comes first, then
// the one with the lower right id, where the bytes have GPT-2's ids. It ends with --size tokens, or where no pair
// occurs twice. Hugging Face's BpeTrainer has the same rule, so the merges are the same.
//
// A word is merged once, however often it occurs: memory grows with the distinct words, not with the text. The number
// of threads changes nothing, since all that they do is count.
#pragma once
#include <algorithm>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tokenize.h"
#include "vocabulary.h"

// ---------------------------------------------------------------------------------------------------------------------
// Counting words.

using WordCounts = std::unordered_map<std::string, uint64_t>;

// What a thread of encode_files() does for this verb: it counts words and makes no tokens.
inline EncodeText count_words(WordCounts& counts) {
    return [&counts, pre_tokenizer = PreTokenizer(), word = std::string()](const char* text, size_t n,
                                                                           std::vector<uint16_t>&) mutable {
        for (size_t at = 0, end; at < n; at = end) {
            end = pre_tokenizer.piece_end(text, n, at);
            word.assign(text + at, end - at);
            counts[word]++;
        }
    };
}

// ---------------------------------------------------------------------------------------------------------------------
// Merging.

class BpeTrainer {
  public:
    // As long as GPT-2's longest. Without a limit, a text of one repeated character makes tokens of a third of it.
    static constexpr uint32_t longest_token = 128;

    std::vector<std::string> tokens;                    // the bytes of each id
    std::vector<std::pair<uint16_t, uint16_t>> merged;  // what id 256 + i was merged from
    int64_t last_count = 0;                             // how often the last pair occurred
    uint64_t text_tokens = 0;                           // of the text, as far as it is merged

    explicit BpeTrainer(const WordCounts& words) {
        for (const uint8_t byte : ByteAlphabet().order) tokens.push_back(std::string(1, char(byte)));
        lay_out(words);
        for (uint32_t at = 1; at + 1 < ids.size(); at++)
            if (ids[at] != NONE && ids[at + 1] != NONE) add(ids[at], ids[at + 1], at, count_at(at));
        for (const auto& [key, pair] : pairs) candidates.push({pair.count, key});
    }

    // Makes tokens until there are `size`, or no pair occurs twice.
    void train(size_t size) {
        while (tokens.size() < size && !candidates.empty()) {
            const Candidate best = candidates.top();
            candidates.pop();
            const auto pair = pairs.find(best.key);
            if (pair->second.count == best.count && best.count > 1) {
                last_count = best.count;
                merge(uint16_t(best.key >> 16), uint16_t(best.key), std::move(pair->second.places));
            } else if (pair->second.count > 1) {
                candidates.push({pair->second.count, best.key});  // it has lost some since
                continue;
            }
            pairs.erase(best.key);
        }
    }

  private:
    static constexpr uint16_t NONE = 0xFFFF;

    struct Pair {
        int64_t count = 0;
        std::vector<uint32_t> places;  // of its left token, ascending; some have been merged otherwise since
    };
    // A pair with the count that it had when it came here, which may be lower now.
    struct Candidate {
        int64_t count;
        uint32_t key;
        bool operator<(const Candidate& other) const {
            return count != other.count ? count < other.count : key > other.key;
        }
    };

    // All distinct words, NONE before and behind each. A token has its id at its first and its last byte, so that both
    // neighbours are found, and NONE in between.
    std::vector<uint16_t> ids;
    // Words that occur equally often stand together: where those of each count end, and the count.
    std::vector<std::pair<uint32_t, int64_t>> counts;
    std::unordered_map<uint32_t, Pair> pairs;  // by left << 16 | right
    std::priority_queue<Candidate> candidates;

    void lay_out(const WordCounts& words) {
        std::vector<const WordCounts::value_type*> by_count;
        size_t bytes = 1;
        for (const auto& word : words) {
            by_count.push_back(&word);
            bytes += word.first.size() + 1;
        }
        if (bytes >= UINT32_MAX)
            fail("the distinct words of the text have %d bytes, more than 4 GB: give a part of it", bytes);
        std::sort(by_count.begin(), by_count.end(), [](auto* a, auto* b) { return a->second > b->second; });
        uint16_t id_of_byte[256];
        for (uint16_t id = 0; id < 256; id++) id_of_byte[uint8_t(tokens[id][0])] = id;
        ids.reserve(bytes);
        ids.push_back(NONE);
        for (const auto* word : by_count) {
            for (const char byte : word->first) ids.push_back(id_of_byte[uint8_t(byte)]);
            ids.push_back(NONE);
            if (counts.empty() || counts.back().second != int64_t(word->second)) counts.emplace_back(0, word->second);
            counts.back().first = uint32_t(ids.size());
            text_tokens += word->second * word->first.size();
        }
    }

    int64_t count_at(uint32_t at) const {
        const auto behind = [](uint32_t place, const auto& of_count) { return place < of_count.first; };
        return std::upper_bound(counts.begin(), counts.end(), at, behind)->second;
    }

    // One more place of a pair. True if it is the first one.
    bool add(uint16_t left, uint16_t right, uint32_t at, int64_t count) {
        Pair& pair = pairs[uint32_t(left) << 16 | right];
        pair.count += count;
        pair.places.push_back(at);
        return pair.places.size() == 1;
    }

    void remove(uint16_t left, uint16_t right, int64_t count) {
        const auto pair = pairs.find(uint32_t(left) << 16 | right);
        if (pair != pairs.end()) pair->second.count -= count;
    }

    void merge(uint16_t left, uint16_t right, const std::vector<uint32_t>& places) {
        const uint16_t made = uint16_t(tokens.size());
        tokens.push_back(tokens[left] + tokens[right]);
        merged.emplace_back(left, right);
        std::vector<uint32_t> new_pairs;
        const auto add_new = [&](uint16_t first, uint16_t second, uint32_t at, int64_t count) {
            if (tokens[first].size() + tokens[second].size() > longest_token) return;
            if (add(first, second, at, count)) new_pairs.push_back(uint32_t(first) << 16 | second);
        };
        for (const uint32_t at : places) {
            const uint32_t middle = at + uint32_t(tokens[left].size()), end = middle + uint32_t(tokens[right].size());
            if (ids[at] != left || ids[middle] != right) continue;
            const int64_t count = count_at(at);
            const uint16_t previous = ids[at - 1], next = ids[end];
            if (previous != NONE) {
                remove(previous, left, count);
                add_new(previous, made, at - uint32_t(tokens[previous].size()), count);
            }
            if (next != NONE) {
                remove(right, next, count);
                add_new(made, next, at, count);
            }
            ids[middle - 1] = NONE;
            ids[middle] = NONE;
            ids[at] = made;
            ids[end - 1] = made;
            text_tokens -= uint64_t(count);
        }
        for (const uint32_t key : new_pairs) candidates.push({pairs[key].count, key});
    }
};

// ---------------------------------------------------------------------------------------------------------------------

inline void train_vocabulary(TokenizeOptions options) {
    if (options.in.empty())
        fail_usage("vocabulary: --in is missing: .txt or .jsonl files, folders, patterns, or - for stdin");
    while (options.out.size() > 1 && options.out.back() == '/') options.out.pop_back();
    require_empty_folder(options.out, "vocabulary");
    const std::string separator = read_separator(options.split_documents);
    const TextInputs inputs(options.in, "vocabulary", options.skip_bad);
    std::vector<WordCounts> of_threads(static_cast<size_t>(options.threads));
    std::vector<EncodeText> counters;
    for (WordCounts& counts : of_threads) counters.push_back(count_words(counts));
    size_t documents = 0;
    const TokenizeCounts read = encode_files("vocabulary", options, inputs, separator, 0xFFFF, std::move(counters),
                                             [&](const TokenBlock& block) { documents += block.documents.size(); });
    if (options.prints_summary) warn_of_oddities(options, inputs, read);
    require_text(options, inputs, documents);

    const Progress progress("merging words");
    uint64_t words = 0;
    WordCounts counts = std::move(of_threads[0]);
    for (size_t i = 1; i < of_threads.size(); i++)
        for (const auto& [word, count] : std::exchange(of_threads[i], {})) counts[word] += count;
    for (const auto& word : counts) words += word.second;
    const size_t distinct = counts.size();
    BpeTrainer bpe(counts);
    counts = {};
    bpe.train(size_t(options.size) - 1);
    std::vector<std::string> tokens = bpe.tokens;
    tokens.push_back(END_OF_TEXT);
    write_vocabulary(options.out, tokens, bpe.merged);
    if (!options.prints_summary) return;
    const size_t size = bpe.tokens.size() + 1;
    if (size < size_t(options.size))
        complain(
            "the vocabulary has %d tokens, not the %d of --size: no other pair occurs twice in this "
            "text and makes at most %d bytes",
            size, options.size, BpeTrainer::longest_token);
    print("vocabulary: read %s, %d bytes in %.2f s\n", counted(int64_t(inputs.files.size()), "file"), read.bytes,
          read.seconds);
    print("vocabulary: %s, %d bytes of text, %d words, %d of them distinct\n", counted(int64_t(documents), "document"),
          read.text_bytes, words, distinct);
    const std::string merges = counted(int64_t(bpe.merged.size()), "merge");
    print("vocabulary: %s in %.2f s; the last pair occurs %s; %.3f bytes of this text per token\n", merges,
          progress.seconds(), counted(bpe.last_count, "time"), double(read.text_bytes) / double(bpe.text_tokens));
    print("vocabulary: 256 bytes + %s + end-of-text = %d tokens in %s/vocab.bpe and encoder.json\n", merges, size,
          printable(options.out));
    print("next: give --tokenizer gpt2 --vocab-dir %s to tokenize and to the training\n", shell_word(options.out));
}
