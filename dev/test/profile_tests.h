// profile_tests.h: what a run says of its starts in run.json, and --profile-steps on a CPU.
#pragma once
#include "program.h"

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

TEST(run_profiles_steps) {
    using namespace program;
    TempFolder folder;
    const Result r = train({{"out", folder.file("run")},
                            {"steps", "9"},
                            {"layers", "3"},
                            {"total-batch", "256"},
                            {"profile-steps", "3-6"},
                            {"eval-every", "5"},
                            {"save-every", "4"}});
    REQUIRE_GOOD(r);
    const size_t at = r.out.find("profile: steps 3 to 6 of rank 0\n");
    REQUIRE(at != std::string::npos);
    // ms a step, share, calls a step, by name; the first of a name is the outermost.
    std::map<std::string, std::array<double, 3>> parts;
    double sum = 0;
    const std::regex row(" *([0-9.]+) +([0-9.]+) % +([0-9.e+]+)  ( *)(.*)");
    for (const std::string& line : lines_of(r.out.substr(at))) {
        std::smatch m;
        if (!std::regex_match(line, m, row)) continue;
        parts.insert({m[5], {std::stod(m[1]), std::stod(m[2]), std::stod(m[3])}});
        if (m[4].length() == 2) sum += std::stod(m[1]);
    }
    CHECK_NEAR(sum, parts["all of it"][0], 0.01);  // rows of three digits
    const std::map<std::string, double> calls = {{"forward", 6},
                                                 {"backward", 6},
                                                 {"classifier", 2},
                                                 {"data", 1},
                                                 {"update", 1},
                                                 {"gradient norm", 1},
                                                 {"evaluation", 0.25},
                                                 {"attention: window", 6},
                                                 {"attention: selected", 6},
                                                 {"attention: compressed", 6},
                                                 {"compression", 12}};
    for (const auto& [name, count] : calls) {
        if (!parts.count(name)) check_failed(__FILE__, __LINE__, "no part %s in %s", name.c_str(), r.out.c_str() + at);
        CHECK_EQUAL(parts[name][2], count);
    }
    CHECK(parts.count("checkpoint") && parts["forward"][0] >= parts["attention: window"][0]);  // which is within
    const auto with = [&](const std::string& steps) {
        return train({{"out", folder.file("x")}, {"steps", "2"}, {"profile-steps", steps}});
    };
    for (const char* wrong : {"0", "3-2", "a", "1-", "-2", "1-2-3", "1 2", "1e3"})
        CHECK_REFUSED(with(wrong), 2, "--profile-steps", "20-29");
    CHECK(!file_exists(folder.file("x")));
    const Result late = with("7");
    CHECK(late.status == 0 && late.err.find("warning: --profile-steps: step 7 never came") != std::string::npos);
    const Result one = with("2");
    CHECK(one.status == 0 && one.out.find("profile: steps 2 to 2 of rank 0\n") != std::string::npos);
}
