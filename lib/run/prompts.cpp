// prompts.cpp: the functions of prompts.h.
#include "prompts.h"

void warn_beyond_trained(int64_t prompt, int64_t tokens, int64_t seq_len) {
    if (prompt + tokens - 1 > seq_len)
        complain(
            "a prompt of %s and --tokens %d make %d, and the model was trained on %d at a time: "
            "what it writes beyond that length it has not learnt",
            counted(prompt, "token"), tokens, prompt + tokens - 1, seq_len);
}

// A model of bytes that has hardly learnt writes escape sequences too, which a terminal must not see.
static std::string for_this_terminal(std::string text) {
    static const bool on_terminal = isatty(output().reader());
    for (char& x : text)
        if (on_terminal && ((uint8_t(x) < ' ' && x != '\n' && x != '\t') || x == 127)) x = '?';
    return text;
}

std::unique_ptr<Tokenizer> find_tokenizer(const Config& c) {
    std::unique_ptr<Tokenizer> tokenizer = Tokenizer::find(c.tokenizer, c.vocab_dir, c.vocab_size, c.vocab_digest);
    if (!tokenizer) fail_usage("%s: --vocab-dir is missing: this model writes gpt2 tokens", c.verb);
    return tokenizer;
}

std::vector<std::string> read_prompts(const SampleConfig& c) {
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

bool TokenPrinter::print(int32_t token) {
    const bool ends = token == tokenizer.end_of_text;
    if (ends && !past_end) return false;
    const std::string text = ends ? "\n" : tokenizer.decode({uint16_t(token)});
    all += text;
    write(for_this_terminal(text));
    return true;
}

std::string TokenPrinter::end() {
    write("\n");
    return all;
}

void TokenPrinter::write(const std::string& text) {
    const std::string now = for_this_terminal(before) + text;
    before.clear();
    std::fwrite(now.data(), 1, now.size(), stdout);
    std::fflush(stdout);
}

void converse(const Tokenizer& tokenizer, int64_t length, int64_t count,
              const std::function<int32_t(const std::vector<int32_t>&)>& next) {
    TokenPrinter printer = {tokenizer, false, ""};
    std::vector<int32_t> unread = {tokenizer.end_of_text};  // said and not yet read by the model
    int64_t read = 0;
    const auto ask = [] {
        if (isatty(STDIN_FILENO)) std::fputs("> ", stdout);
        std::fflush(stdout);
    };
    ask();
    for (std::string line; std::getline(std::cin, line); ask()) {
        warn_of_end_of_text({line}, "--interactive");
        const bool goes_on = unread.back() != tokenizer.end_of_text;
        for (const uint16_t id : tokenizer.encode((goes_on ? "\n" : "") + line)) unread.push_back(id);
        for (int64_t i = 0; i < count; i++) {
            if (read + int64_t(unread.size()) > length) {
                if (i > 0) printer.end();
                return complain(
                    "the conversation has reached the %d tokens that the model was trained "
                    "on at a time: begin another one",
                    length);
            }
            const int32_t token = next(unread);
            read += int64_t(unread.size());
            unread = {token};
            if (!printer.print(token)) break;
        }
        printer.end();
    }
}
