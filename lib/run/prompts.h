// prompts.h: what the verb `sample` continues: prompts of the command line, of files and of a conversation, and what it
// prints of them. Used by lib/verbs/sample.h.
#pragma once
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "../../tokenizer.h"
#include "../data/tokenize.h"
#include "options.h"

// Warns if a sample goes beyond what the model was trained on. prompt, tokens: how many of each.
void warn_beyond_trained(int64_t prompt, int64_t tokens, int64_t seq_len);

// The vocabulary of a checkpoint whose options are c.
std::unique_ptr<Tokenizer> find_tokenizer(const Config& c);

// The prompts to continue: --prompt, or those of --prompt-file. A file is one, whose last line end is its editor's; of
// a .jsonl each line's "text" is one; - is stdin.
std::vector<std::string> read_prompts(const SampleConfig& c);

// Prints tokens as they come.
struct TokenPrinter {
    const Tokenizer& tokenizer;
    const bool past_end;  // go on after an end-of-text
    // Printed with the first token: while a long prompt is read, its line of progress would cover it.
    std::string before;
    std::string all = before;  // prompt and tokens

    // Returns false at the end of the text.
    bool print(int32_t token);
    // Returns the whole text.
    std::string end();

  private:
    void write(const std::string& text);
};

// --interactive: continues each line of stdin in turn, by at most `count` tokens or up to an end-of-text. All that was
// said before stays the beginning of the text, until the model's length is reached. next(tokens) reads tokens and
// returns the one that follows.
void converse(const Tokenizer& tokenizer, int64_t length, int64_t count,
              const std::function<int32_t(const std::vector<int32_t>&)>& next);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "prompts.cpp"
#endif
