// help.h: --help: the verbs, the options of one of them and the presets, wrapped at the terminal's width. Used by
// run_verb in train_nsa.cu.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <sys/ioctl.h>
#include <unistd.h>

#include "options.h"

// Columns of what stdout leads to: COLUMNS, else what the terminal says, else 80.
inline size_t terminal_width() {
    const char* const variable = std::getenv("COLUMNS");
    const long columns = variable ? std::atol(variable) : 0;
    if (columns > 0) return size_t(columns);
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
}

// A label and the words after it. Further lines begin under the first word; a word with a space in it is not broken.
inline void print_wrapped(const std::string& label, const std::vector<std::string>& words, size_t width) {
    constexpr size_t indent = 21;
    std::string line = label + std::string(label.size() < indent - 1 ? indent - 1 - label.size() : 0, ' ');
    for (size_t i = 0; i < words.size(); i++) {
        if (i && line.size() + 1 + words[i].size() > width) {
            print("%s\n", line);
            line = std::string(indent - 1, ' ');
        }
        line += " " + words[i];
    }
    print("%s\n", line);
}

// What a preset stands for, as options.
inline std::vector<std::string> describe_preset(const Config& p) {
    std::vector<std::string> words = {"="};
    for (const Option& o : OPTIONS)
        if (!std::strcmp(o.default_text, "preset") || !std::strcmp(o.name, "batch"))
            words.push_back("--" + std::string(o.name) + " " + value_text(p, o));
    return words;
}

inline void print_help(const std::string& of) {
    const Verb verb = verb_named(of)->verb;
    const size_t width = terminal_width();
    print("usage: ./train_nsa [VERB] [--option VALUE | --option=VALUE]...\n\nverbs:\n");
    for (const VerbName& v : VERBS) print_wrapped("  " + std::string(v.name), split_words(v.help), width);
    print_wrapped("  help", split_words("this text; of another verb: help VERB, or VERB --help"), width);
    print("\noptions of %s:\n", of);
    for (const Option& o : OPTIONS)
        if (o.verbs & verb)
            print_wrapped("  --" + std::string(o.name),
                          split_words(format_text("%s (%s, default %s)", o.help, range_text(o),
                                                  *o.default_text ? o.default_text : "none")),
                          width);
    if (!(verb & option_named("model").verbs)) return;
    print("\npresets:\n");
    for (const Config& p : PRESETS) print_wrapped("  --model " + p.model, describe_preset(p), width);
}
