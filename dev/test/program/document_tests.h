// Tests of documents that name things in the code: what is renamed there must be renamed here.
#pragma once
#include <regex>

#include "program.h"

// The words in backquotes of one column of a table row.
inline std::vector<std::string> quoted_words(const std::string& row, size_t column) {
    std::vector<std::string> cells, words;
    std::istringstream in(row);
    for (std::string cell; std::getline(in, cell, '|');) cells.push_back(cell);
    const std::string& cell = cells.at(column);
    for (size_t at = cell.find('`'); at != std::string::npos; at = cell.find('`', at)) {
        const size_t end = cell.find('`', at + 1);
        words.push_back(cell.substr(at + 1, end - at - 1));
        at = end + 1;
    }
    return words;
}

// dev/MODEL.md: every operation of its table is a function of the specification or the trainer, every test is a test.
TEST(model_card_names_functions_and_tests) {
    using namespace program;
    std::string tests_text;
    for (const std::string& file : glob_files("dev/test/*/*_tests.h")) tests_text += read_file(file);
    const std::string code = read_file("nsa_cpu.h") + read_file("lib/cpu/optimiser.h") + read_file("train_nsa.cu"),
                      card = read_file("dev/MODEL.md");
    const size_t begin = card.find("## Where each line is"), end = card.find("\n## ", begin);
    REQUIRE(begin != std::string::npos && end != std::string::npos);
    int rows = 0;
    for (const std::string& line : lines_of(card.substr(begin, end - begin))) {
        if (line.compare(0, 2, "| ") != 0 || line.compare(0, 7, "| step ") == 0) continue;
        rows++;
        for (const std::string& name : quoted_words(line, 3)) {
            const bool defined = std::regex_search(code, std::regex("\n *(static )?(void|real) " + name + "\\("));
            if (!defined) check_failed(__FILE__, __LINE__, "no function %s", name.c_str());
        }
        for (const std::string& name : quoted_words(line, 4)) {
            bool found = tests_text.find("TEST(" + name + ")") != std::string::npos;
            for (const std::string engine : {"cpu_", "cpu_fp64_", "cuda_"})
                found =
                    found || (name.compare(0, engine.size(), engine) == 0 &&
                              tests_text.find("ENGINE_TEST(" + name.substr(engine.size()) + ")") != std::string::npos);
            if (!found) check_failed(__FILE__, __LINE__, "no test %s", name.c_str());
        }
    }
    CHECK(rows >= 17);
}

// ---------------------------------------------------------------------------------------------------------------------
// dev/tour: its links and commands.

namespace tour {

inline bool has_word(const std::string& text, const std::string& word) {
    const auto in_word = [&](size_t at) { return at < text.size() && (std::isalnum(text[at]) || text[at] == '_'); };
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
        if ((at == 0 || !in_word(at - 1)) && !in_word(at + word.size())) return true;
    return false;
}
inline std::string all_of(const std::string& glob) {
    std::string text;
    for (const std::string& file : glob_files(glob)) text += read_file(file);
    return text;
}
// Whether some test has this in its name.
inline bool names_test(const std::string& part) {
    const std::string text = all_of("dev/test/*/*_tests.h");
    const std::regex test("\n\\w*TEST\\w*\\((?:\\w+Engines, )?(\\w+)");
    for (std::sregex_iterator at(text.begin(), text.end(), test), end; at != end; ++at)
        for (const std::string engine : {"", "cpu_", "cuda_"})
            if ((engine + at->str(1)).find(part) != std::string::npos) return true;
    return false;
}
inline bool is_option(const std::string& name) {
    return std::any_of(std::begin(OPTIONS), std::end(OPTIONS), [&](const Option& o) { return name == o.name; });
}
// What is wrong with a command; "" if every goal, program, verb, option and test in it exists.
inline std::string fault_of(const std::string& command) {
    std::istringstream in(command.substr(0, command.find(" #")));
    std::vector<std::string> words;
    for (std::string word; in >> word;)
        if (!std::regex_match(word, std::regex("[A-Z_]+=.*|mpirun|-np|2|gdb|--args"))) words.push_back(word);
    if (words.empty()) return "";
    const std::string program = words[0], name = program.substr(program.rfind('/') + 1);
    const std::string rules = read_file("Makefile") + read_file("dev/dev.mk");
    const bool is_trainer = program == "./train_nsa", is_built = program.compare(0, 6, "build/") == 0;
    if (is_built && !has_word(rules, name)) return "no program " + program;
    if (program.compare(0, 4, "dev/") == 0 && !file_exists(program)) return "no file " + program;
    for (size_t i = 1; i < words.size(); i++) {
        const std::string& word = words[i];
        if (program == "make" && !has_word(rules, word.substr(word.rfind('/') + 1))) return "no goal " + word;
        if (is_trainer && i == 1 && word[0] != '-' && !verb_named(word)) return "no verb " + word;
        if (name == "tour" && i == 1 && read_file("dev/tour/numbers.cu").find("topic == \"" + word + "\"") == word.npos)
            return "no topic " + word;
        if (word.compare(0, 2, "--") != 0) continue;
        if (word == "--only" && is_built && !names_test(words.at(i + 1))) return "no test " + words.at(i + 1);
        const std::string code = all_of("dev/test/*.h") + all_of("dev/test/*.cu") + all_of("dev/bench/*.h");
        const bool known = is_trainer || name == "tour" ? is_option(word.substr(2)) : has_word(code, word);
        if (!known) return "no option " + word;
    }
    return "";
}
// The commands of a page: lines of its blocks and words in backquotes that begin like one.
inline std::vector<std::string> commands_of(const std::string& page) {
    const std::regex command(
        "(?:\n|`)((?:[A-Z_]+=\\S+ "
        ")?(?:(?:make|mpirun|gdb|\\./train_nsa|dev/\\S+\\.(?:py|sh))(?![\\w.])|build/\\w)[^`\n]*)");
    std::vector<std::string> found;
    for (std::sregex_iterator at(page.begin(), page.end(), command), end; at != end; ++at) {
        std::string line = std::regex_replace(at->str(1), std::regex("\\|.*"), "");
        for (size_t part; (part = line.find("&&")) != std::string::npos; line = line.substr(part + 2))
            found.push_back(line.substr(0, part));
        found.push_back(line);
    }
    return found;
}

}  // namespace tour

TEST(tour_names_what_is_there) {
    const std::vector<std::string> pages = glob_files("dev/tour/*.md");
    CHECK_EQUAL(pages.size(), size_t(13));
    int links = 0, commands = 0;
    for (const std::string& path : pages) {
        const std::string page = read_file(path);
        CHECK(std::count(page.begin(), page.end(), '\n') <= 120);
        const std::regex link("\\[([^\\]]*)\\]\\(([^)#]+)\\)");
        for (std::sregex_iterator at(page.begin(), page.end(), link), end; at != end; ++at, links++) {
            const std::string symbol = at->str(1), file = "dev/tour/" + at->str(2);
            if (!file_exists(file)) check_failed(__FILE__, __LINE__, "%s: no file %s", path.c_str(), file.c_str());
            else if (symbol[0] == '`' && file.find(symbol.substr(1, symbol.size() - 2)) == symbol.npos &&
                     !tour::has_word(read_file(file), symbol.substr(1, symbol.size() - 2)))
                check_failed(__FILE__, __LINE__, "%s: no %s in %s", path.c_str(), symbol.c_str(), file.c_str());
        }
        for (const std::string& command : tour::commands_of(page)) {
            commands++;
            const std::string fault = tour::fault_of(command);
            if (!fault.empty())
                check_failed(__FILE__, __LINE__, "%s: %s: %s", path.c_str(), command.c_str(), fault.c_str());
        }
    }
    CHECK(links >= 80);
    CHECK(commands >= 40);
}
// The exercise of page 11, and models that were measured without a part, change lines that others change too.
TEST(patches_apply) {
    if (std::system("git --version >/dev/null 2>&1") != 0) return skip("there is no git");
    for (const char* patch : {"tour/11_head_scale", "bench/evidence/no_gate", "bench/evidence/no_mean"})
        CHECK_EQUAL(std::system(format_text("git apply --check dev/%s.diff", patch).c_str()), 0);
}
