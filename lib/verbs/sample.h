// sample.h: the verb `sample`, and the samples of a run. Included by train_nsa.cu behind the model.
#pragma once
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "../../tokenizer.h"
#include "../data/tokenize.h"
#include "trained_model.h"

// The prompts to continue: --prompt, or those of --prompt-file. A file is one, whose last line end is its editor's; of
// a .jsonl each line's "text" is one; - is stdin.
inline std::vector<std::string> read_prompts(const SampleConfig& c) {
    if (c.interactive && (!c.prompt.empty() || !c.prompt_file.empty()))
        fail_usage("--interactive reads its prompts from stdin: leave out --prompt and --prompt-file");
    if (c.prompt_file.empty()) {
        warn_of_end_of_text({c.prompt}, "--prompt");
        return {c.prompt};
    }
    if (!c.prompt.empty()) fail_usage("--prompt and --prompt-file: give one of them");
    std::vector<std::string> prompts;
    for (const std::string& path : c.prompt_file) {
        Documents of_file = read_documents(path, "sample --prompt-file");
        warn_of_documents(of_file, "--prompt-file " + path);
        for (std::string& text : of_file.texts) {
            for (const char end : {'\n', '\r'})
                if (!of_file.is_jsonl && !text.empty() && text.back() == end) text.pop_back();
            prompts.push_back(text);
        }
    }
    if (prompts.empty()) fail("--prompt-file: there is no prompt in %s", c.prompt_file[0]);
    return prompts;
}

// A model of bytes that has hardly learnt writes escape sequences too, which a terminal must not see.
inline std::string for_this_terminal(std::string text) {
    static const bool on_terminal = isatty(output().reader());
    for (char& x : text)
        if (on_terminal && ((uint8_t(x) < ' ' && x != '\n' && x != '\t') || x == 127)) x = '?';
    return text;
}

// Prints tokens as they come.
struct TokenPrinter {
    const Tokenizer& tokenizer;
    const bool past_end;  // go on after an end-of-text
    // Printed with the first token: while a long prompt is read, its line of progress would cover it.
    std::string before;
    std::string all = before;  // prompt and tokens

    // Returns false at the end of the text.
    bool print(int32_t token) {
        const bool ends = token == tokenizer.end_of_text;
        if (ends && !past_end) return false;
        const std::string text = ends ? "\n" : tokenizer.decode({uint16_t(token)});
        all += text;
        write(for_this_terminal(text));
        return true;
    }
    void end() { write("\n"); }

  private:
    void write(const std::string& text) {
        const std::string now = for_this_terminal(before) + text;
        before.clear();
        std::fwrite(now.data(), 1, now.size(), stdout);
        std::fflush(stdout);
    }
};

// Prints and returns a sample: the prompt, or the beginning of a new document, and what the model makes of it.
template <class Dev>
std::string print_sample(Model<Dev>& model, const Tokenizer& tokenizer, const SampleConfig& c, int64_t count,
                         bool in_training, const std::string& prompt) {
    std::vector<int32_t> ids = {tokenizer.end_of_text};
    for (const uint16_t id : tokenizer.encode(prompt)) ids.push_back(id);
    const int64_t length = int64_t(ids.size()) + count - 1, learnt = model.config.seq_len;
    if (!in_training && length > learnt)
        complain(
            "a prompt of %s and --tokens %d make %d, and the model was trained on %d at a time: "
            "what it writes beyond that length it has not learnt",
            counted(int64_t(ids.size()), "token"), count, length, learnt);
    TokenPrinter printer = {tokenizer, in_training || c.past_end, prompt};
    generate(
        model, ids, count, c, [&](int32_t token) { return printer.print(token) && stop_signal == 0; },
        [&] { printer.end(); });
    return printer.all;
}

// --interactive: each line of stdin is a prompt.
template <class Dev>
void continue_lines(Model<Dev>& model, const Tokenizer& tokenizer, const SampleConfig& c) {
    const auto ask = [] {
        if (isatty(STDIN_FILENO)) std::fputs("> ", stdout);
        std::fflush(stdout);
    };
    ask();
    for (std::string line; std::getline(std::cin, line); ask()) {
        warn_of_end_of_text({line}, "--interactive");
        print_sample(model, tokenizer, c, c.tokens, false, line);
    }
}

inline void run_sample(Config c, World& world) {
    const TrainedModel trained = open_trained_model(c);
    const auto tokenizer = find_tokenizer(c);
    const std::vector<std::string> prompts = read_prompts(c);
    with_trained_model(c, *trained.weights, world, [&](auto& model) {
        if (c.interactive) return continue_lines(model, *tokenizer, c);
        for (size_t i = 0; i < prompts.size(); i++) {
            if (prompts.size() > 1) print("%s--- prompt %d of %d ---\n", i ? "\n" : "", i + 1, prompts.size());
            print_sample(model, *tokenizer, c, c.tokens, false, prompts[i]);
        }
    });
}
