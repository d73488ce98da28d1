// vocab_bpe.cpp: the input, split at its first byte 0xFF, as vocab.bpe and encoder.json of a vocabulary with two
// merges.
#include "vocabulary.h"

static const Merges merges = {{"a", "b"}, {" ", "ab"}};
static const int size = 259;

std::vector<std::string> seeds() {
    const Merges other = {{" ", "\xC3"}, {"\n", "\n"}}, repeated = {{"a", "b"}, {"a", "b"}};
    return {vocab_bpe(merges) + "\xFF" + encoder_json(tokens_of(merges)),
            vocab_bpe(other) + "\xFF" + encoder_json(tokens_of(other)),
            vocab_bpe(repeated) + "\xFF" + encoder_json(tokens_of(repeated)),
            "a b\nab ab\n\xFF{\"a\": 64}",
            vocab_bpe(merges),
            "\xFF[1, 2]"};
}

void fuzz_one(const std::string& input) {
    static MemoryFolder folder;
    const size_t cut = std::min(input.find('\xFF'), input.size());
    folder.fill("vocab.bpe", input.substr(0, cut));
    folder.fill("encoder.json", cut < input.size() ? input.substr(cut + 1) : "");
    Tokenizer t;
    {
        MemoryLimit limit(input.size(), 160 << 10, 400);
        if (!accepts([&] { t = Tokenizer::gpt2(folder.path, size); })) return;
    }
    check_vocabulary(t, size);
}
