// profile_tests.h: what a run says of its starts in run.json, and --profile-steps.
#pragma once
#include "../program/program.h"

// One record for each start, which later ones leave as they are.
TEST(run_records_each_start) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run"), path = out + "/run.json";
    const auto starts = [&] { return parse_json(read_file(path), path).array("starts", path); };
    Start first;
    first.environment = {"OMP_PROC_BIND=false", "SECRET=1"};
    REQUIRE_GOOD(run(small_words({{"out", out}}), first));
    const std::string before = read_file(path);
    REQUIRE(starts().size() == 1);
    const Json start = starts()[0];
    CHECK_EQUAL(start.integer("step", path), int64_t(0));
    CHECK(std::regex_match(start.string("time", path), std::regex("20\\d\\d-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\dZ")));
    const Words told = lines_of(run({"--version"}).out);
    CHECK_EQUAL("train_nsa " + start.string("version", path), told[0]);
    CHECK_EQUAL("compiler: " + start.string("compiler", path), told[1]);
    CHECK(start.string("flags", path).find(" -std=c++17 ") != std::string::npos);
    CHECK(start.find("dirty") && start.get("dirty", path).is_true == (told[0].find("-dirty") != std::string::npos));
    CHECK_EQUAL(start.integer("ranks", path), int64_t(1));
    CHECK_EQUAL(start.get("hosts", path).integer(host_name(), path), int64_t(1));
    CHECK(start.string("engine", path).find("CPU") == 0 && !start.string("processor", path).empty());
    Words command;
    for (const Json& word : start.array("command", path)) command.push_back(word.text);
    CHECK(command == joined({program::path()}, small_words({{"out", out}})));
    CHECK_EQUAL(start.get("variables", path).string("OMP_PROC_BIND", path), "false");
    CHECK(before.find("SECRET") == std::string::npos);

    REQUIRE_GOOD(train({{"out", out}, {"steps", "3"}, {"resume", "on"}}));
    REQUIRE_GOOD(train({{"out", out}, {"steps", "4"}, {"resume", "on"}}));
    REQUIRE(starts().size() == 3);
    CHECK(starts()[1].integer("step", path) == 2 && starts()[2].integer("step", path) == 3);
    const size_t at = before.find("\"starts\"");
    CHECK(read_file(path).find(before.substr(at, before.rfind("\n ]}") - at) + ",\n") != std::string::npos);
    // As options they do not count.
    REQUIRE_GOOD(run({"--config", path, "--out", folder.file("again")}));
    CHECK_EQUAL(parse_json(read_file(folder.file("again/run.json")), "").array("starts", "").size(), size_t(1));
    // Another program may have written the file anew, or damaged it.
    std::string spread = read_file(path);
    for (size_t i = spread.find("\"starts\""); (i = spread.find(", \"", i)) != std::string::npos;)
        spread.insert(++i, "\n ");
    write_file(path, spread);
    REQUIRE_GOOD(train({{"out", out}, {"steps", "5"}, {"resume", "on"}}));
    CHECK_EQUAL(starts().size(), size_t(4));
    replace_in_file(path, "\"starts\": [", "\"starts\": 7, \"x\": [");
    const Result warned = train({{"out", out}, {"steps", "6"}, {"resume", "on"}});
    CHECK(warned.status == 0 && warned.err.find("run.json") != std::string::npos &&
          warned.err.find("earlier starts are lost") != std::string::npos);
    CHECK_EQUAL(starts().size(), size_t(1));
}

// A GPU's steps are those of cuda_profile_ranges_name_the_parts_of_a_step.
TEST(run_profiles_steps_of_a_gpu_alone) {
    using namespace program;
    TempFolder folder;
    const auto with = [&](const std::string& steps) {
        return train({{"out", folder.file("x")}, {"steps", "2"}, {"device", "cpu"}, {"profile-steps", steps}});
    };
    for (const char* wrong : {"0", "3-2", "a", "1-", "-2", "1-2-3", "1 2", "1e3"})
        CHECK_REFUSED(with(wrong), 2, "--profile-steps", "20-29");
    CHECK_REFUSED(with("2"), 2, "--profile-steps 2", "on the CPU");
    CHECK(!file_exists(folder.file("x")));
}
