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
    const std::string code = read_file("nsa_cpu.h") + read_file("train_nsa.cu"), card = read_file("dev/MODEL.md");
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
