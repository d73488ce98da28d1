// vocab_llmc.cpp: the input as llm.c's gpt2_tokenizer.bin of a vocabulary with two merges.
#include "vocabulary.h"

static const int size = 259;

std::vector<std::string> seeds() {
    const std::string good = llmc_tokenizer(tokens_of({{"a", "b"}, {" ", "ab"}}));
    std::string version1 = good;
    version1[4] = 1, version1[12] = version1[13] = 0;
    return {good,
            version1,
            llmc_tokenizer(tokens_of({{"a", "b"}, {"a", "b"}})),
            good.substr(0, good.size() - 1),
            good + "x",
            good.substr(0, 1024)};
}

void fuzz_one(const std::string& input) {
    static MemoryFolder folder;
    folder.fill("gpt2_tokenizer.bin", input);
    Tokenizer t;
    {
        MemoryLimit limit(input.size(), 160 << 10, 50);
        if (!accepts([&] { t = Tokenizer::gpt2(folder.path, size); })) return;
    }
    check_vocabulary(t, size);
}
