// Tests of what documents and patches name: it has to be there.
#pragma once
#include <regex>

#include "program.h"

// The link that a heading has on GitHub: lower case, words joined by -, without other signs.
inline std::string anchor_of(const std::string& heading) {
    std::string anchor;
    for (const unsigned char c : heading)
        if (std::isalnum(c) || c == '-' || c == '_' || c >= 0x80) anchor += char(std::tolower(c));
        else if (c == ' ') anchor += '-';
    return anchor;
}

// Every link to a file of the repository finds it, and every link into a document a heading there.
TEST(documents_have_no_dead_links) {
    using namespace program;
    std::vector<std::string> documents;
    for (const char* pattern : {"*.md", ".github/*.md", "dev/*.md", "dev/tour/*.md", "dev/bench/gpu/*.md"})
        for (const std::string& file : glob_files(pattern)) documents.push_back(file);
    CHECK(documents.size() >= 10);
    const std::regex link("\\]\\(([^)#:]*)(#[^)]*)?\\)"), heading("(^|\n)#+ ([^\n]*)");
    int links = 0;
    for (const std::string& document : documents) {
        const std::string text = read_file(document);
        for (std::sregex_iterator at(text.begin(), text.end(), link), end; at != end; ++at, links++) {
            const std::string target = at->str(1).empty() ? document : folder_of(document) + "/" + at->str(1);
            bool found = std::filesystem::exists(target);
            if (found && at->length(2) > 0) {
                const std::string page = read_file(target);
                std::sregex_iterator title(page.begin(), page.end(), heading);
                while (title != end && "#" + anchor_of(title->str(2)) != at->str(2)) ++title;
                found = title != end;
            }
            if (!found) check_failed(__FILE__, __LINE__, "%s: dead link %s", document.c_str(), at->str().c_str());
        }
    }
    CHECK(links >= 100);
}
// The exercise of page 11, and models that were measured without a part, change lines that others change too.
TEST(patches_apply) {
    if (std::system("git --version >/dev/null 2>&1") != 0) return skip("there is no git");
    for (const char* patch : {"tour/11_head_scale", "bench/evidence/no_gate", "bench/evidence/no_mean"})
        CHECK_EQUAL(std::system(format_text("git apply --check dev/%s.diff", patch).c_str()), 0);
}
