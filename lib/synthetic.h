// synthetic.h: the built-in corpus (--data synthetic): bytes that cannot be predicted without long-range recall.
//
// Each document is about three people whose names exist nowhere else ("Last night the cylnza hides the red drum."). The
// letters of a name are drawn anew for every document, so a model that cannot see an earlier mention loses ln 26
// = 3.258 per letter. Names are repeated near and far, so that recall can be learnt from easy cases; but one person
// appears at the beginning and then not again for hundreds of bytes. The loss on names whose last mention is that far
// back separates a model with compressed and selected attention from one that has only its window. Everything else is a
// small grammar, so even a tiny model soon writes readable sentences.
//
// Document k is a pure function of (seed, k), in integers only, so it is the same on every machine. All documents have
// the same length; if the sequence length is a multiple of it, every sample begins with a document and holds every
// mention it needs.
#pragma once
#include "util.h"

struct SyntheticOptions {
    int document_bytes = 512;  // including the separator, byte 0, in front
    int names = 3;
    int letters = 6;  // of a name
    // How far the second mention of the person who stays away is behind the first, in bytes: drawn uniformly from this
    // range, then rounded up to the end of a sentence.
    int min_distance = 256;
    int max_distance = 400;
};
constexpr int SYNTHETIC_ALPHABET = 26;  // a name's letters are drawn from these: guessing one costs ln 26

struct SyntheticCorpus {
    std::vector<uint16_t> tokens;
    // 1 where the token is a letter of a name that was last mentioned at least min_distance before, from its third
    // letter on: two letters tell which name it is, the others have to be recalled.
    std::vector<uint8_t> is_answer;
};

// Validation documents are numbered from here, so that no training document of the same seed is one of them.
constexpr uint64_t SYNTHETIC_FIRST_VALIDATION_DOCUMENT = 1ull << 31;

// The random numbers of one document, four from each call of the generator.
class SyntheticRandom {
  public:
    SyntheticRandom(uint64_t seed, uint64_t document) : seed(seed), stream(random_stream(RANDOM_SYNTHETIC, document)) {}

    int below(int n) {
        if (used == 4) numbers = philox4x32(calls++, stream, seed), used = 0;
        return int(uint64_t(numbers.word[used++]) * uint64_t(n) >> 32);
    }
    template <int N>
    const char* pick(const char* const (&words)[N]) {
        return words[below(N)];
    }

  private:
    uint64_t seed, stream, calls = 0;
    Philox numbers = {};
    int used = 4;
};

// Appends a sentence about a person, and a blank. Returns where the name begins.
inline size_t append_synthetic_sentence(std::string& text, SyntheticRandom& random, const std::string& person) {
    static const char* const times[] = {"Today",     "Every morning",  "At noon",     "Last night",
                                        "In spring", "After the rain", "Once a year", "Before dinner"};
    static const char* const qualities[] = {"old",   "young", "quiet", "happy", "tall", "clever",
                                            "tired", "kind",  "small", "brave", "busy", "proud"};
    static const char* const actions[] = {"carries", "finds", "paints", "sells", "cleans", "hides",
                                          "brings",  "loses", "mends",  "wants", "holds",  "sees"};
    static const char* const colors[] = {"red", "blue", "green", "white", "black", "golden", "brown", "grey"};
    static const char* const things[] = {"lamp",   "boat",   "chair", "basket", "drum",  "clock",
                                         "ladder", "bottle", "kite",  "mirror", "wheel", "coat"};
    const auto say = [&](const char* before, const char* word) { (text += before) += word; };
    const bool has_time = random.below(2) == 1;
    if (has_time) say("", random.pick(times)), text += " the ";
    else say("The ", random.pick(qualities)), text += " ";
    const size_t at = text.size();
    text += person;
    say(" ", random.pick(actions)), say(has_time ? " the " : " a ", random.pick(colors)), say(" ", random.pick(things));
    text += ". ";
    return at;
}

// Appends document number `document` to the corpus: exactly options.document_bytes tokens.
inline void append_synthetic_document(SyntheticCorpus& corpus, uint64_t seed, uint64_t document,
                                      const SyntheticOptions& options) {
    SyntheticRandom random(seed, document);
    std::vector<std::string> names(size_t(options.names));
    for (std::string& name : names)
        for (int i = 0; i < options.letters; i++) name += char('a' + random.below(SYNTHETIC_ALPHABET));
    const size_t length = size_t(options.document_bytes), start = corpus.tokens.size(),
                 far = size_t(options.min_distance);
    corpus.is_answer.resize(start + length, 0);

    std::string text(1, '\0');
    std::vector<size_t> last(names.size(), 0);  // where each name was mentioned last; 0: nowhere
    size_t due = 0;                             // where the first person, who opens the document, may come back
    // Near the end a sentence may be too long, and another one still fit.
    for (int rejected = 0; rejected < 8;) {
        size_t who = 0;
        if (text.size() < due) who = 1 + size_t(random.below(options.names - 1));
        else if (last[0] >= due && due) who = size_t(random.below(options.names));
        const size_t before = text.size(), at = append_synthetic_sentence(text, random, names[who]);
        if (text.size() > length) {
            text.resize(before), rejected++;
            continue;
        }
        if (last[who] && at - last[who] >= far)
            std::fill_n(corpus.is_answer.begin() + ptrdiff_t(start + at + 2), names[who].size() - 2, uint8_t(1));
        last[who] = at;
        if (!due) due = at + far + size_t(random.below(options.max_distance - options.min_distance + 1));
    }
    text.resize(length, '\n');
    for (const char c : text) corpus.tokens.push_back(uint8_t(c));
}

// The first `tokens` tokens of the documents first_document, first_document + 1 ...; the last one may be cut short.
inline SyntheticCorpus synthetic_corpus(uint64_t seed, size_t tokens, uint64_t first_document = 0,
                                        const SyntheticOptions& options = {}) {
    const int room = 110;  // for two sentences, each of at most 46 bytes besides the name
    if (options.names < 2 || options.letters < 3 || options.min_distance < 1 ||
        options.max_distance < options.min_distance || options.document_bytes < options.max_distance + room)
        fail_usage(
            "synthetic corpus: %d names of %d letters, distances %d..%d and documents of %d bytes do not fit together",
            options.names, options.letters, options.min_distance, options.max_distance, options.document_bytes);
    SyntheticCorpus corpus;
    corpus.tokens.reserve(tokens + size_t(options.document_bytes));
    corpus.is_answer.reserve(tokens + size_t(options.document_bytes));
    for (uint64_t document = first_document; corpus.tokens.size() < tokens; document++)
        append_synthetic_document(corpus, seed, document, options);
    corpus.tokens.resize(tokens);
    corpus.is_answer.resize(tokens);
    return corpus;
}
