// vocab_tiktoken.cpp: the input as a .tiktoken file of a vocabulary with two merges.
#include "vocabulary.h"

static const int size = 259;

std::vector<std::string> seeds() {
    const std::string good = tiktoken(tokens_of({{"a", "b"}, {" ", "ab"}}));
    return {good,
            tiktoken(tokens_of({{"\xC3", "\xA9"}, {"\xC3\xA9", "\xC3\xA9"}})),
            tiktoken(tokens_of({{"a", "b"}, {"a", "b"}})),
            good.substr(0, good.size() / 2),
            "IQ== 0\r\n",
            "IQ==\n",
            "I=Q= 0\n",
            "=== 0\n"};
}

void fuzz_one(const std::string& input) {
    static MemoryFolder folder;
    folder.fill("r50k_base.tiktoken", input);
    Tokenizer t;
    {
        MemoryLimit limit(input.size(), 160 << 10, 50);
        if (!accepts([&] { t = Tokenizer::gpt2(folder.path, size); })) return;
    }
    check_vocabulary(t, size);
}
