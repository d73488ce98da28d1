// run_checkpoint_tests.h: damaged checkpoints, resuming, the folder of a run, through the built ./train_nsa.
#pragma once
#include "refusal_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// Damaged checkpoints.

// Damage that the manifest tells, and damage under a manifest that fits it ("sealed").
PROGRAM_TEST(run_damaged_checkpoints_are_named) {
    const std::string checkpoint = file("run/step_00000002"), manifest = checkpoint + "/manifest.json",
                      model = "model.safetensors", config = "config.json", optimizer = OPTIMIZER;
    const std::string sample = "sample --from @/run --tokens 4 --threads 1",
                      resume = "small --out=@/run --steps=3 --resume=on",
                      eval = "eval --from @/run --val-data synthetic --threads 1";
    for (const std::string& command : {std::string("small"), sample, eval}) REQUIRE_GOOD(run(command));
    const std::string whole_manifest = read_file(manifest), moment = "v.norm.weight[0:16]";
    struct {
        std::string file, from, to;  // from "": cut off behind as many bytes as `to` says; to "": the file is gone
        std::string verb;
        bool sealed;
        Words named;
    } const cases[] = {
        {model, "", "20000", resume, true, {model}},
        {model, "layers.0.attn.q_proj", "layers.0.attn.q_proi", eval, true, {model, "layers.0.attn.q_proj.weight"}},
        {model, "[256,16]", "[16,256]", sample, true, {model, "embed_tokens.weight", "[16, 256]", "[256, 16]"}},
        {config, "\"dim\": 16", "\"dim\": 32", sample, true, {model, "embed_tokens.weight", "[256, 16]", "[256, 32]"}},
        {config, "\"dim\": 16", "\"dim\": 32", resume, true, {"step_00000002", "dim", "32", "16"}},
        {config, "", "40", sample, true, {config, "byte"}},
        {"manifest.json", "", "60", resume, false, {"manifest.json", "byte"}},
        {optimizer, "", "4000", resume, true, {optimizer}},
        {optimizer, moment, "w.norm.weight[0:16]", resume, true, {optimizer, "w.norm.weight[0:16]"}},
        {optimizer, moment, "v.norm.weighs[0:16]", resume, true, {optimizer, "v.norm.weighs[0:16]"}},
        {optimizer, moment, "v.norm.weight[1:17]", resume, true, {optimizer, "v.norm.weight[1:17]"}},
        {optimizer, moment, "v.norm.weight[16:0]", resume, true, {optimizer, "v.norm.weight[16:0]"}},
        {optimizer, moment, "v.norm.weight[0:16x", resume, true, {optimizer, "v.norm.weight[0:16x"}},
        {optimizer, "all", "", resume, true, {"manifest.json", "moments"}},
    };
    for (const auto& c : cases) {
        const std::string path = checkpoint + "/" + c.file, whole = read_file(path);
        if (c.to.empty()) std::filesystem::remove(path);
        else if (!c.from.empty()) replace_in_file(path, c.from, c.to);
        else write_file(path, whole.substr(0, std::stoul(c.to)));
        if (c.sealed) seal(checkpoint);
        check({{c.verb, 1, c.named}});
        write_file(path, whole), write_file(manifest, whole_manifest);
    }
    struct {
        const char *key, *value, *named;
    } const states[] = {{"last_update", "\"2\"", "last_update"},
                        {"bad_steps", "1.5", "bad_steps"},
                        {"loader", "[1337, 64, 4194304]", "loader has 3"},
                        {"loader", "7", "loader"},
                        {"loader", "[\"1337\", 64, 4194304, 4]", "loader: byte"},
                        {"loader", "[1337, 64, 4194304, 9223372036854775808]", "loader: byte"},
                        {"loader", "[1337, 32, 4194304, 4]", "--seq-len"}};
    const std::string whole_state = read_manifest(checkpoint).state_text;
    for (const auto& s : states) {
        seal(checkpoint, with_json_value(whole_state, s.key, s.value));
        check({{resume, 1, {s.named}}});
        write_file(manifest, whole_manifest);
    }
    REQUIRE_GOOD(run(resume));  // nothing of all that has touched the checkpoint
}

// Every field of config.json: missing, of another kind, out of the option's range.
PROGRAM_TEST(run_config_json_is_checked_field_by_field) {
    const std::string path = file("config.json"), whole = config_json(parse_and_preset({}));
    const Json root = parse_json(whole, path);
    Config c;
    write_file(path, whole);
    read_config_json(c, path);
    CHECK_EQUAL(config_json(c), whole);
    CHECK_EQUAL(root.keys.size(), 23u);
    const auto refused = [&](const std::string& key, const std::string& text) {
        write_file(path, text);
        std::string option = key;  // named as on the command line
        std::replace(option.begin(), option.end(), '_', '-');
        CHECK_FAILS(1, path.c_str(), read_config_json(c, path));
        const std::string line = error_of([&] { read_config_json(c, path); });
        CHECK(line.find(path) == 0 && line.rfind(path) == 0 && (holds(line, key) || holds(line, option)));
    };
    for (const std::string& key : root.keys) {
        refused(key, std::regex_replace(whole, std::regex("\"" + key + "\""), "\"other\""));
        for (const char* wrong : {"null", "[]"}) refused(key, with_json_value(whole, key, wrong));
        const bool word = root.get(key, path).kind == Json::String;
        for (const char* wrong : {"\"llama\"", "\"\""})
            if (word) refused(key, with_json_value(whole, key, wrong));
        for (const char* wrong : {"0", "-1", "1.5", "\"16\"", "1e300", "99999999999", "999999999999999999999"})
            if (!word) refused(key, with_json_value(whole, key, wrong));
    }
    for (const auto& [key, wrong] :
         {std::pair("heads", "3"), {"head_dim", "31"}, {"cmp_block", "18"}, {"slc_block", "18"}, {"slc_count", "2"}})
        refused(key, with_json_value(whole, key, wrong));
    refused("vocab_size", with_json_value(whole, "tokenizer", "\"gpt2\""));
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints and resuming.

PROGRAM_TEST(run_resume_without_checkpoint_says_so_and_starts) {
    const Result r = run("small --resume=on");
    CHECK(r.status == 0 && holds(r.err, "nothing to resume under " + out) && holds(r.out, "step 0001 |"));
    const std::string again = printed("small --resume=on");  // already finished
    CHECK(!holds(again, "nothing to resume") && !holds(again, "step 0001 |"));
    CHECK(!file_exists(out + ".1"));
}

PROGRAM_TEST(run_earlier_run_is_moved_aside) {
    std::vector<std::string> models;
    for (const std::string seed : {"1", "2", "3"}) {
        CHECK_EQUAL(holds(printed("small --seed=" + seed), "moved to"), seed != "1");
        models.push_back(weights_of(out, 2));
    }
    CHECK(models[0] != models[1] && models[1] != models[2]);
    CHECK(weights_of(out + ".1", 2) == models[0] && weights_of(out + ".2", 2) == models[1]);
    CHECK(file_exists(out + ".1/main.log") && file_exists(out + ".1/log.jsonl") && file_exists(out + ".1/run.json"));
    CHECK_EQUAL(lines_of(losses_of(out)).size(), 4u);  // this run's lines alone
}

// A folder that is no run's, or not only: what is not the run's stays where it is, and nothing of it is written over.
PROGRAM_TEST(run_leaves_the_files_of_others_alone) {
    for (const std::string name : {"run.json", "main.log", "log.jsonl", "heartbeat_rank0.jsonl"}) {
        const std::string project = file("project_" + name);
        make_folders(project);
        write_file(project + "/" + name, "not yours");
        CHECK_REFUSED(run("small --out=" + project), 1, "--out " + project, name, "another folder");
        CHECK_EQUAL(read_file(project + "/" + name), "not yours");
        CHECK_EQUAL(glob_files(project + "/*").size(), 1u);
    }
    // Beside a run, which is moved aside alone; and through a link, which stays one.
    const std::string real = file("disk");
    make_folders(real + "/src");
    write_file(real + "/thesis.txt", "mine");
    CHECK_EQUAL(symlink(real.c_str(), file("link").c_str()), 0);
    REQUIRE_GOOD(run("small --out=@/link"));
    const std::string model = weights_of(real, 2);
    CHECK(holds(printed("small --out=@/link --seed=2"), "moved to " + real + ".1;"));
    CHECK(weights_of(real + ".1", 2) == model && file_exists(real + ".1/main.log"));
    CHECK(!file_exists(real + ".1/thesis.txt") && file_exists(real + "/thesis.txt") && file_exists(real + "/src"));
    CHECK(file_exists(real + "/step_00000002") && file_exists(file("link/main.log")));
}

// What stands for itself in a folder's name is no pattern, and a name completed by the shell ends in a slash.
PROGRAM_TEST(run_folder_names_of_all_kinds) {
    for (const char* name : {"lr[1] a*b what? back\\slash", "slash/"}) {
        const std::string out = file(name), aside = out.substr(0, out.find_last_not_of('/') + 1) + ".1";
        REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
        CHECK(holds(printed({"--resume", out, "--steps=2"}), "step_00000001, step 1\n"));
        CHECK_EQUAL(run({"sample", "--from", out, "--tokens", "2", "--threads", "1"}).status, 0);
        REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
        CHECK(file_exists(aside + "/step_00000002") && !file_exists(out + "/step_00000002"));
    }
}
