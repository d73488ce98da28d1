// profile_tests.h: what a run says of its starts in log.jsonl.
#pragma once
#include "../program/program.h"

// One record for each start, which later ones leave as they are.
PROGRAM_TEST(run_records_each_start) {
    const auto starts = [&] {
        std::vector<Json> found;
        for (const Json& line : log_of(out))
            if (line.find("start")) found.push_back(line);
        return found;
    };
    const std::string command = "small --prompt=\xff";
    REQUIRE_GOOD(run(command));
    const std::vector<Json> before = starts();
    REQUIRE(before.size() == 1);
    CHECK_EQUAL(before[0].integer("step", "log"), int64_t(0));
    const Json& start = before[0].get("start", "log");
    const Words told = lines_of(printed("--version"));
    CHECK_EQUAL("train_nsa " + start.string("version", "log"), told[0]);
    CHECK_EQUAL("compiler: " + start.string("compiler", "log"), told[1]);
    CHECK_EQUAL(start.integer("ranks", "log"), int64_t(1));
    CHECK_EQUAL(start.get("hosts", "log").integer(host_name(), "log"), int64_t(1));
    CHECK(start.string("device", "log").find("CPU") == 0 && !start.string("processor", "log").empty());
    Words expected = started(command), words;
    const std::string replaced = "--prompt=\xEF\xBF\xBD";  // what is no UTF-8
    std::replace(expected.begin(), expected.end(), std::string("--prompt=\xff"), replaced);
    for (const Json& word : start.array("command", "log")) words.push_back(word.text);
    CHECK(words == expected);

    for (const char* steps : {"3", "4"}) REQUIRE_GOOD(run(std::string("--resume @/run --steps ") + steps));
    const std::vector<Json> all = starts();
    REQUIRE(all.size() == 3);
    CHECK(all[1].integer("step", "log") == 2 && all[2].integer("step", "log") == 3);
    CHECK_EQUAL(all[0].to_text(), before[0].to_text());
}
