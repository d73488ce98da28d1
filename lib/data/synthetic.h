// synthetic.h: the built-in corpus (--data synthetic): bytes that cannot be predicted without long-range recall.
//
// Each document is about one to three people whose names exist nowhere else ("QVXK finds a lamp. the cook sells the
// drum."). The letters of a name are drawn anew for every document, so a model that cannot see an earlier mention loses
// ln 26 = 3.258 per letter. Who was mentioned stays away for at least SYNTHETIC_NEAREST bytes, which is further than
// two layers with the window of the `tiny` preset reach; so the loss on names that come back shows whether the
// compressed and selected branches are used. Everything else is a small grammar about strangers without a name.
//
// Documents about one person are the easy ones: whoever finds the capitals knows which letters may come. Those about
// three ask for the letter after the same letters. Together they teach in 2 M tokens what names among many names do not
// teach in 15 M, see dev/LOG.md.
//
// Document k is a pure function of (seed, k), in integers only, so it is the same on every machine. All documents have
// the same length; if the sequence length is a multiple of it, every sample begins with a document and holds every
// mention it needs.
#pragma once
#include "../base/random.h"

constexpr int SYNTHETIC_DOCUMENT = 256;  // bytes, including the separator, byte 0, in front
constexpr int SYNTHETIC_NAMES = 3;       // a document has 1 to this many people with a name, each number as often
constexpr int SYNTHETIC_LETTERS = 4;     // of a name
constexpr int SYNTHETIC_ALPHABET = 26;   // a name's letters are drawn from these: guessing one costs ln 26
// A person comes back with the first sentence that begins so many bytes or more behind the last mention: drawn
// uniformly from this range for every mention.
constexpr int SYNTHETIC_NEAREST = 64, SYNTHETIC_FARTHEST = 112;

struct SyntheticCorpus {
    std::vector<uint16_t> tokens;
    // 1 where the token is a letter of a name that was mentioned before, from its third letter on: two letters tell
    // which name it is, the others have to be recalled.
    std::vector<uint8_t> is_answer;
};

// Validation documents are numbered from here, so that no training document of the same seed is one of them.
constexpr uint64_t SYNTHETIC_FIRST_VALIDATION_DOCUMENT = 1ull << 31;

// The random numbers of one document, four from each call of the generator.
class SyntheticRandom {
  public:
    SyntheticRandom(uint64_t seed, uint64_t document) : seed(seed), stream(random_stream(RANDOM_SYNTHETIC, document)) {}

    int below(int n) {
        if (used == 4) {
            numbers = philox4x32(calls++, stream, seed);
            used = 0;
        }
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

// Appends a sentence about somebody, and a blank.
inline void append_synthetic_sentence(std::string& text, SyntheticRandom& random, const std::string& who) {
    static const char* const actions[] = {"sees", "has", "sells", "wants", "finds", "likes", "loses", "mends"};
    static const char* const things[] = {"lamp", "boat", "drum", "clock", "kite", "coat", "wheel", "door"};
    ((text += who) += " ") += random.pick(actions);
    ((text += random.below(2) ? " a " : " the ") += random.pick(things)) += ". ";
}

// Appends document number `document` to the corpus; the last sentence is cut off.
inline void append_synthetic_document(SyntheticCorpus& corpus, uint64_t seed, uint64_t document) {
    static const char* const strangers[] = {"king", "cook", "baker", "child", "doctor", "farmer", "man", "woman"};
    const auto stranger = [&](SyntheticRandom& random) { return std::string("the ") + random.pick(strangers); };
    SyntheticRandom random(seed, document);
    struct Person {
        std::string name;
        size_t due;  // where the person may be mentioned next
        bool known;  // has been mentioned
    };
    std::vector<Person> people(size_t(1 + random.below(SYNTHETIC_NAMES)), Person{"", 0, false});
    for (Person& person : people)
        for (int i = 0; i < SYNTHETIC_LETTERS; i++) person.name += char('A' + random.below(SYNTHETIC_ALPHABET));

    const size_t length = SYNTHETIC_DOCUMENT;
    std::string text(1, '\0');
    std::vector<uint8_t> is_answer(length, 0);
    // A stranger opens the document, so that nobody is found in its first block, which is always selected.
    append_synthetic_sentence(text, random, stranger(random));
    while (text.size() < length) {
        // Who has been due for longest.
        Person& next = *std::min_element(people.begin(), people.end(),
                                         [](const Person& a, const Person& b) { return a.due < b.due; });
        const size_t at = text.size();
        if (next.due > at) {
            append_synthetic_sentence(text, random, stranger(random));
            continue;
        }
        append_synthetic_sentence(text, random, next.name);
        for (size_t i = at + 2; next.known && i < std::min(at + next.name.size(), length); i++) is_answer[i] = 1;
        next.known = true;
        next.due = at + size_t(SYNTHETIC_NEAREST + random.below(SYNTHETIC_FARTHEST - SYNTHETIC_NEAREST + 1));
    }
    text.resize(length);
    for (const char c : text) corpus.tokens.push_back(uint8_t(c));
    corpus.is_answer.insert(corpus.is_answer.end(), is_answer.begin(), is_answer.end());
}

// The first `tokens` tokens of the documents first_document, first_document + 1 ...; the last one may be cut short.
inline SyntheticCorpus synthetic_corpus(uint64_t seed, size_t tokens, uint64_t first_document = 0) {
    SyntheticCorpus corpus;
    corpus.tokens.reserve(tokens + SYNTHETIC_DOCUMENT);
    corpus.is_answer.reserve(tokens + SYNTHETIC_DOCUMENT);
    for (uint64_t document = first_document; corpus.tokens.size() < tokens; document++)
        append_synthetic_document(corpus, seed, document);
    corpus.tokens.resize(tokens);
    corpus.is_answer.resize(tokens);
    return corpus;
}
