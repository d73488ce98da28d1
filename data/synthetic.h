// synthetic.h: a corpus made by the program, of bytes, that cannot be predicted without long-range recall.
//
// Each document states facts ("The code of Alice is 4821."), goes on with sentences of a small grammar, and asks for the facts hundreds of
// bytes later ("What is the code of Alice? 4821."). The digits are uniform, so whoever cannot see the fact loses ln 10 = 2.303 per digit,
// and whoever can recall it loses almost nothing: the loss on the answers alone tells a model with compressed and selected attention from
// one that has only its window. The sentences in between are easy, so that a tiny model writes readable ones after a minute.
//
// Document number k is a pure function of (seed, k), in integers only: the same on every machine. All documents have the same length, so
// that with a sequence length that is a multiple of it every sample begins with a document and holds each fact whose question it holds.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "util.h"

struct SyntheticOptions {
    int document_bytes = 512;  // the separator, byte 0, in front included
    int facts = 5;             // stated at the beginning; the first two are of one person, the rest of others
    int questions = 4;         // how many of them are asked, each once; the others only distract
    int min_distance = 200;    // from the digits of a fact to the digits of its answer, in bytes: drawn uniformly from this range, then
    // rounded up to the end of the running sentence; a question that would overshoot range or document is left out
    int max_distance = 450;
};

struct SyntheticCorpus {
    std::vector<uint16_t> tokens;
    std::vector<uint8_t> is_answer;  // 1 where the token is a digit of an answer: predicting it takes the recall
};

// Validation documents are numbered from here on, so that under one seed they are never training documents.
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
    template <class T>
    void shuffle(std::vector<T>& list) {
        for (int i = int(list.size()) - 1; i > 0; i--) std::swap(list[size_t(i)], list[size_t(below(i + 1))]);
    }

  private:
    uint64_t seed, stream, calls = 0;
    Philox numbers = {};
    int used = 4;
};

// One sentence of the grammar, a blank behind it.
inline void append_synthetic_sentence(std::string& text, SyntheticRandom& random) {
    static const char* const times[] = {"Today",     "Every morning",  "At noon",     "Last night",
                                        "In spring", "After the rain", "Once a year", "Before dinner"};
    static const char* const qualities[] = {"old",   "young", "quiet", "happy", "tall", "clever",
                                            "tired", "kind",  "small", "brave", "busy", "proud"};
    static const char* const persons[] = {"farmer",  "teacher", "sailor", "baker",  "doctor", "child",
                                          "painter", "miller",  "guard",  "singer", "hunter", "tailor"};
    static const char* const actions[] = {"carries", "finds", "paints", "sells", "cleans", "hides",
                                          "brings",  "loses", "mends",  "wants", "holds",  "sees"};
    static const char* const colors[] = {"red", "blue", "green", "white", "black", "golden", "brown", "grey"};
    static const char* const things[] = {"lamp",   "boat",   "chair", "basket", "drum",  "clock",
                                         "ladder", "bottle", "kite",  "mirror", "wheel", "coat"};
    static const char* const places[] = {"near the river",  "in the garden", "behind the mill", "on the hill",
                                         "by the old gate", "at the market", "under a tree",    "in the kitchen"};
    static const char* const weathers[] = {"warm", "cold", "windy", "bright", "dark", "calm"};
    const auto say = [&](const char* before, const char* word) { (text += before) += word; };
    switch (random.below(4)) {
        case 0:
            say("The ", random.pick(qualities)), say(" ", random.pick(persons)), say(" ", random.pick(actions));
            say(" a ", random.pick(colors)), say(" ", random.pick(things));
            break;
        case 1:
            say("", random.pick(times)), say(" the ", random.pick(persons)), say(" ", random.pick(actions));
            say(" the ", random.pick(colors)), say(" ", random.pick(things));
            break;
        case 2:
            say("There is a ", random.pick(colors)), say(" ", random.pick(things)), say(" ", random.pick(places));
            break;
        default:
            say("It is ", random.pick(weathers)), say(" ", random.pick(places));
    }
    text += ". ";
}

struct SyntheticFact {
    std::string subject;  // "code of Alice"
    std::string digits;   // "4821"
    int at = 0;           // where in the document the digits of the fact are
    int due = 0;          // from where on the digits of its answer may be
};

// Facts of different people, but for the second, which has the person of the first and another kind: name and kind both matter.
inline std::vector<SyntheticFact> draw_synthetic_facts(SyntheticRandom& random, int count) {
    std::vector<const char*> names = {"Alice", "Boris", "Clara", "David", "Emma",  "Frank", "Grace", "Henry",
                                      "Irene", "Jacob", "Karen", "Louis", "Maria", "Nora",  "Oscar", "Peter"};
    static const char* const kinds[] = {"code", "room", "ticket", "badge"};
    random.shuffle(names);
    const int first_kind = random.below(4);
    std::vector<SyntheticFact> facts;
    for (int i = 0; i < count; i++) {
        const int kind = i == 0 ? first_kind : i == 1 ? (first_kind + 1 + random.below(3)) % 4 : random.below(4);
        SyntheticFact fact;
        fact.subject = std::string(kinds[kind]) + " of " + names[i < 2 ? 0 : size_t(i - 1)];
        for (int digit = 0; digit < 4; digit++) fact.digits += char('0' + random.below(10));
        facts.push_back(fact);
    }
    random.shuffle(facts);
    return facts;
}

// Appends document number `document` to the corpus: exactly options.document_bytes tokens.
inline void append_synthetic_document(SyntheticCorpus& corpus, uint64_t seed, uint64_t document, const SyntheticOptions& options) {
    SyntheticRandom random(seed, document);
    std::string text(1, '\0');
    std::vector<SyntheticFact> facts = draw_synthetic_facts(random, options.facts);
    for (SyntheticFact& fact : facts) {
        text += "The " + fact.subject + " is ";
        fact.at = int(text.size());
        fact.due = fact.at + options.min_distance + random.below(options.max_distance - options.min_distance + 1);
        text += fact.digits + ". ";
    }
    random.shuffle(facts);
    facts.resize(size_t(options.questions));
    std::sort(facts.begin(), facts.end(),
              [](const SyntheticFact& a, const SyntheticFact& b) { return a.due != b.due ? a.due < b.due : a.at < b.at; });

    const size_t length = size_t(options.document_bytes), start = corpus.tokens.size();
    corpus.is_answer.resize(start + length, 0);
    size_t next = 0;
    for (int rejected = 0; rejected < 8;) {  // towards the end a sentence may be too long, and another still fit
        if (next < facts.size()) {
            const SyntheticFact& fact = facts[next];
            const std::string question = "What is the " + fact.subject + "? ";
            const int at = int(text.size() + question.size());
            if (at >= fact.due) {
                next++;
                if (at - fact.at > options.max_distance || size_t(at) + 6 > length) continue;
                text += question + fact.digits + ". ";
                std::fill_n(corpus.is_answer.begin() + ptrdiff_t(start) + at, 4, uint8_t(1));
                continue;
            }
        }
        const size_t before = text.size();
        append_synthetic_sentence(text, random);
        if (text.size() > length) text.resize(before), rejected++;
    }
    text.resize(length, '\n');
    for (const char c : text) corpus.tokens.push_back(uint8_t(c));
}

// The first `tokens` tokens of the documents first_document, first_document + 1 ...; the last document may be cut.
inline SyntheticCorpus synthetic_corpus(uint64_t seed, size_t tokens, uint64_t first_document = 0, const SyntheticOptions& options = {}) {
    // A fact takes at most 30 bytes. There are 16 names, one of which two facts share.
    if (options.facts < 2 || options.facts > 17 || options.questions < 1 || options.questions > options.facts || options.min_distance < 1 ||
        options.max_distance < options.min_distance || options.document_bytes < 30 * options.facts + options.min_distance)
        fail_usage("synthetic corpus: %d facts, %d questions, distances %d..%d and documents of %d bytes do not fit together",
                   options.facts, options.questions, options.min_distance, options.max_distance, options.document_bytes);
    SyntheticCorpus corpus;
    corpus.tokens.reserve(tokens + size_t(options.document_bytes));
    corpus.is_answer.reserve(tokens + size_t(options.document_bytes));
    for (uint64_t document = first_document; corpus.tokens.size() < tokens; document++)
        append_synthetic_document(corpus, seed, document, options);
    corpus.tokens.resize(tokens);
    corpus.is_answer.resize(tokens);
    return corpus;
}
