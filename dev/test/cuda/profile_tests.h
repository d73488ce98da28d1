// profile_tests.h: what a run says of its starts in run.json, and --profile-steps.
#pragma once
#include "../program/program.h"

// One record for each start, which later ones leave as they are.
PROGRAM_TEST(run_records_each_start) {
    const std::string path = out + "/run.json";
    const auto starts = [&] { return parse_json(read_file(path), path).array("starts", path); };
    Start first;
    first.environment = {"OMP_PROC_BIND=false", "SECRET=1"};
    REQUIRE_GOOD(run("small", first));
    const std::string before = read_file(path);
    REQUIRE(starts().size() == 1);
    const Json start = starts()[0];
    CHECK_EQUAL(start.integer("step", path), int64_t(0));
    CHECK(std::regex_match(start.string("time", path), std::regex("20\\d\\d-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\dZ")));
    const Words told = lines_of(printed("--version"));
    CHECK_EQUAL("train_nsa " + start.string("version", path), told[0]);
    CHECK_EQUAL("compiler: " + start.string("compiler", path), told[1]);
    CHECK(holds(start.string("flags", path), " -std=c++17 "));
    CHECK(start.find("dirty") && start.get("dirty", path).is_true == holds(told[0], "-dirty"));
    CHECK_EQUAL(start.integer("ranks", path), int64_t(1));
    CHECK_EQUAL(start.get("hosts", path).integer(host_name(), path), int64_t(1));
    CHECK(start.string("engine", path).find("CPU") == 0 && !start.string("processor", path).empty());
    Words command;
    for (const Json& word : start.array("command", path)) command.push_back(word.text);
    CHECK(command == started("small"));
    CHECK_EQUAL(start.get("variables", path).string("OMP_PROC_BIND", path), "false");
    CHECK(!holds(before, "SECRET"));

    for (const char* steps : {"3", "4"}) REQUIRE_GOOD(run(std::string("--resume @/run --steps ") + steps));
    REQUIRE(starts().size() == 3);
    CHECK(starts()[1].integer("step", path) == 2 && starts()[2].integer("step", path) == 3);
    const size_t at = before.find("\"starts\"");
    CHECK(holds(read_file(path), before.substr(at, before.rfind("\n ]}") - at) + ",\n"));
    // As options they do not count.
    REQUIRE_GOOD(run("--config @/run/run.json --out @/again"));
    CHECK_EQUAL(parse_json(read_file(file("again/run.json")), "").array("starts", "").size(), size_t(1));
    // Another program may have written the file anew, or damaged it.
    std::string spread = read_file(path);
    for (size_t i = spread.find("\"starts\""); (i = spread.find(", \"", i)) != std::string::npos;)
        spread.insert(++i, "\n ");
    write_file(path, spread);
    REQUIRE_GOOD(run("--resume @/run --steps 5"));
    CHECK_EQUAL(starts().size(), size_t(4));
    replace_in_file(path, "\"starts\": [", "\"starts\": 7, \"x\": [");
    const Result warned = run("small --steps=6 --resume=on");
    CHECK(warned.status == 0 && holds(warned.err, "run.json", "earlier starts are lost"));
    CHECK_EQUAL(starts().size(), size_t(1));
}

// A GPU's steps are those of cuda_profile_ranges_name_the_parts_of_a_step.
PROGRAM_TEST(run_profiles_steps_of_a_gpu_alone) {
    const Words cpu = {"small", "--device=cpu"};
    for (const char* wrong : {"0", "3-2", "a", "1-", "-2", "1-2-3", "1 2", "1e3"})
        check({{joined(cpu, {std::string("--profile-steps=") + wrong}), 2, {"--profile-steps", "20-29"}}});
    check({{joined(cpu, {"--profile-steps=2"}), 2, {"--profile-steps 2", "on the CPU"}}});
}
