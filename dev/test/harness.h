// harness.h: TEST, the checks, and the runner. A check that fails prints file, line, what was found and what was
// expected, marks the test failed and goes on; REQUIRE ends the test. A test that throws has failed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>
#include <unistd.h>

#include "../../lib/base/errors.h"

struct TestCase {
    const char* name;
    void (*run)();
    bool is_long;
};
struct TestRun {
    std::vector<TestCase> cases;
    int failed_checks = 0;             // in the running test
    long checks = 0;                   // in the running test
    std::vector<std::string> skipped;  // what was skipped, and why
    std::string program = "train_nsa";
};
inline TestRun& tests() {
    static TestRun run;
    return run;
}
struct RegisterTest {
    RegisterTest(const char* name, void (*run)(), bool is_long) { tests().cases.push_back({name, run, is_long}); }
};
// TEST_LONG: takes many seconds, so that it is one of `make test_long` instead of `make test`.
#define TEST(name) REGISTERED_TEST(name, false)
#define TEST_LONG(name) REGISTERED_TEST(name, true)
#define REGISTERED_TEST(name, is_long)                                \
    static void test_##name();                                        \
    static RegisterTest register_##name(#name, test_##name, is_long); \
    static void test_##name()

struct TestAbort {};

template <class... Values>
void check_failed(const char* file, int line, const char* format, const Values&... values) {
    if (tests().failed_checks++ < 10) print("    %s:%d: %s\n", file, line, format_text(format, values...));
    std::fflush(stdout);
}

#define CHECK(condition)                                                               \
    do {                                                                               \
        tests().checks++;                                                              \
        if (!(condition)) check_failed(__FILE__, __LINE__, "expected %s", #condition); \
    } while (0)

#define REQUIRE(condition)                                                                              \
    do {                                                                                                \
        tests().checks++;                                                                               \
        if (!(condition)) {                                                                             \
            check_failed(__FILE__, __LINE__, "expected %s; the rest of the test needs it", #condition); \
            throw TestAbort();                                                                          \
        }                                                                                               \
    } while (0)

#define CHECK_EQUAL(found, expected)                                                                          \
    do {                                                                                                      \
        tests().checks++;                                                                                     \
        const auto found_ = (found);                                                                          \
        const decltype(found_) expected_ = (expected);                                                        \
        if (!(found_ == expected_))                                                                           \
            check_failed(__FILE__, __LINE__, "%s is %s, expected %s", #found, show(found_), show(expected_)); \
    } while (0)

// |found - expected| <= limit; a NaN on either side fails. Say at the call where the limit comes from.
#define CHECK_NEAR(found, expected, limit)                                                                         \
    do {                                                                                                           \
        tests().checks++;                                                                                          \
        const double found_ = double(found), expected_ = double(expected), limit_ = double(limit);                 \
        if (!(std::fabs(found_ - expected_) <= limit_))                                                            \
            check_failed(__FILE__, __LINE__, "%s is %.9g, expected %.9g, off by %.3g, limit %.3g", #found, found_, \
                         expected_, std::fabs(found_ - expected_), limit_);                                        \
    } while (0)

// The statement throws an Error of this status whose text is one line and holds the given words.
#define CHECK_FAILS(status_expected, words, ...)                                                                \
    do {                                                                                                        \
        tests().checks++;                                                                                       \
        try {                                                                                                   \
            __VA_ARGS__;                                                                                        \
            check_failed(__FILE__, __LINE__, "%s: no error, expected one with '%s'", #__VA_ARGS__, words);      \
        } catch (const Error& e) {                                                                              \
            if (e.status != (status_expected) || !std::strstr(e.what(), words) || std::strchr(e.what(), '\n'))  \
                check_failed(__FILE__, __LINE__, "%s: status %d, '%s'; expected status %d, one line with '%s'", \
                             #__VA_ARGS__, e.status, e.what(), status_expected, words);                         \
        }                                                                                                       \
    } while (0)

inline std::string show(const std::string& s) { return "'" + s + "'"; }
inline std::string show(const char* s) { return s; }
template <class T>
std::string show(T x) {
    return std::is_floating_point<T>::value ? format_text("%.17g", double(x)) : std::to_string(x);
}

// Whether the text has every part in it, in any order.
template <class... Parts>
bool holds(const std::string& text, const Parts&... parts) {
    return ((text.find(parts) != std::string::npos) && ...);
}

inline void skip(const std::string& what) { tests().skipped.push_back(what); }

// A fresh folder that is removed when the test ends.
struct TempFolder {
    std::string path;
    TempFolder() {
        const char* base = std::getenv("TMPDIR");
        std::string pattern = std::string(base ? base : "/tmp") + "/test_nsa_XXXXXX";
        if (!mkdtemp(&pattern[0])) fail("cannot make a temporary folder %s: %s", pattern, std::strerror(errno));
        path = pattern;
    }
    ~TempFolder() {
        if (std::system(("rm -rf '" + path + "'").c_str()) != 0) std::printf("    could not remove %s\n", path.c_str());
    }
    std::string file(const std::string& name) const { return path + "/" + name; }
};

inline void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream out(path, std::ios::binary);
    out.write(bytes.data(), std::streamsize(bytes.size()));
    if (!out.flush()) fail("cannot write %s", path);
}

// Removes the tests that the options leave out. False, with a line on stderr, if they make no sense.
inline bool choose_tests(int argc, char** argv) {
    std::vector<TestCase>& cases = tests().cases;
    const auto leave_out = [&](auto condition) {
        cases.erase(std::remove_if(cases.begin(), cases.end(), condition), cases.end());
    };
    for (int i = 1; i < argc; i++) {
        const std::string option = argv[i];
        const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
        size_t shard = 0, shards = 0, n = 0;
        if (option == "--only" && value) {
            leave_out([&](const TestCase& t) { return !std::strstr(t.name, value); });
            if (cases.empty()) {
                std::fprintf(stderr, "tests: --only %s: no test has that in its name; --list prints all names\n",
                             value);
                return false;
            }
            i++;
        } else if (option == "--program" && value) {
            tests().program = argv[++i];
        } else if (option == "--shard" && value && std::sscanf(value, "%zu/%zu", &shard, &shards) == 2 &&
                   shard <= shards) {
            leave_out([&](const TestCase&) { return n++ % shards != shard - 1; });
            i++;
        } else if (option == "--short" || option == "--long") {
            leave_out([&](const TestCase& t) { return t.is_long != (option == "--long"); });
        } else if (option != "--list") {
            std::fprintf(stderr,
                         "tests: unknown option %s; usage: tests [--list] [--only SUBSTRING] [--short | --long] "
                         "[--shard I/N] [--program FILE]\n",
                         argv[i]);
            return false;
        }
    }
    return true;
}

inline int run_tests(int argc, char** argv) {
    if (!choose_tests(argc, argv)) return 2;
    if (std::any_of(argv, argv + argc, [](const char* word) { return !std::strcmp(word, "--list"); })) {
        for (const TestCase& t : tests().cases) std::printf("%s\n", t.name);
        return 0;
    }
    int passed = 0, failed = 0;
    for (const TestCase& t : tests().cases) {
        tests().failed_checks = 0, tests().checks = 0;
        const size_t skipped_before = tests().skipped.size();
        const auto start = std::chrono::steady_clock::now();
        try {
            t.run();
        } catch (const TestAbort&) {
        } catch (const std::exception& e) {
            check_failed(t.name, 0, "unexpected error: %s", e.what());
        }
        if (tests().checks == 0 && tests().skipped.size() == skipped_before)
            check_failed(t.name, 0, "the test checked nothing");
        const bool ok = tests().failed_checks == 0;
        (ok ? passed : failed)++;
        std::printf("%s %-60s %7ld checks %7.2f s\n", ok ? "ok  " : "FAIL", t.name, tests().checks,
                    std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        std::fflush(stdout);
    }
    for (const std::string& s : tests().skipped) std::printf("skipped: %s\n", s.c_str());
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
