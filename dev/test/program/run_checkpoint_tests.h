// run_checkpoint_tests.h: damaged checkpoints, resuming, the folder of a run, through the built ./train_nsa.
#pragma once
#include "refusal_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// Damaged checkpoints.

// Damage that the manifest tells, and damage under a manifest that fits it ("sealed").
TEST(run_damaged_checkpoints_are_named) {
    using namespace refusals;
    const Scene scene;
    const std::string checkpoint = scene.file("run/step_00000002"), manifest = checkpoint + "/manifest.json",
                      model = "model.safetensors", config = "config.json", optimizer = OPTIMIZER;
    const std::string sample = "sample --from @/run --tokens 4 --threads 1",
                      resume = "small --out=@/run --steps=3 --resume=on",
                      eval = "eval --from @/run --val-data synthetic --threads 1";
    REQUIRE_GOOD(scene.run("small --out=@/run"));
    for (const std::string& verb : {sample, eval}) REQUIRE_GOOD(scene.run(verb));
    const std::string whole_manifest = read_file(manifest), moment = "v.norm.weight[0:16]";
    struct {
        std::string file, from, to;  // from "": cut off behind as many bytes as `to` says; to "": the file is gone
        std::string verb;
        bool sealed;
        Words named;
    } const cases[] = {
        {model, "", "20000", sample, false, {model, "20000"}},
        {model, "", "20000", resume, false, {model, "20000"}},
        {model, "", "20000", sample, true, {model}},
        {model, "", "20000", resume, true, {model}},
        {model, "", "100", sample, true, {model}},
        {model, "", "7", sample, true, {model}},
        {model, "", "0", resume, true, {model}},
        {model, "", "+1", sample, false, {model, "bytes"}},
        {model, "", "+1", sample, true, {model, "byte"}},
        {model, "layers.0.attn.q_proj", "layers.0.attn.q_proi", eval, false, {model, "checksum"}},
        {model, "layers.0.attn.q_proj", "layers.0.attn.q_proi", eval, true, {model, "layers.0.attn.q_proj.weight"}},
        {model,
         "\"norm.weight\":{\"dtype\":\"F32\"",
         "\"norm.weight\":{\"dtype\":\"I32\"",
         sample,
         true,
         {model, "norm.weight", "I32", "F32"}},
        {model, "[256,16]", "[16,256]", sample, true, {model, "embed_tokens.weight", "[16, 256]", "[256, 16]"}},
        {model, "[256,16]", "[16,256]", resume, true, {model, "embed_tokens.weight", "[16, 256]", "[256, 16]"}},
        {model, "all", "", sample, false, {model, "missing"}},
        {config, "\"dim\": 16", "\"dim\": 32", sample, true, {model, "embed_tokens.weight", "[256, 16]", "[256, 32]"}},
        {config, "\"dim\": 16", "\"dim\": 32", resume, true, {"step_00000002", "dim", "32", "16"}},
        {config, "", "40", sample, true, {config, "byte"}},
        {config, "all", "", eval, false, {config, "missing"}},
        {"manifest.json", "", "60", resume, false, {"manifest.json", "byte"}},
        {"manifest.json", "all", "", resume, false, {"manifest.json", "missing"}},
        {optimizer, "", "4000", resume, false, {optimizer}},
        {optimizer, "", "4000", resume, true, {optimizer}},
        {optimizer, moment, "w.norm.weight[0:16]", resume, true, {optimizer, "w.norm.weight[0:16]"}},
        {optimizer, moment, "v.norm.weighs[0:16]", resume, true, {optimizer, "v.norm.weighs[0:16]"}},
        {optimizer, moment, "v.norm.weight[1:17]", resume, true, {optimizer, "v.norm.weight[1:17]"}},
        {optimizer, moment, "v.norm.weight[16:0]", resume, true, {optimizer, "v.norm.weight[16:0]"}},
        {optimizer, moment, "v.norm.weight[0:16x", resume, true, {optimizer, "v.norm.weight[0:16x"}},
        {optimizer, "all", "", resume, false, {optimizer, "missing"}},
        {optimizer, "all", "", resume, true, {"manifest.json", "moments"}},
    };
    for (const auto& c : cases) {
        const std::string path = checkpoint + "/" + c.file, whole = read_file(path);
        if (c.to.empty()) std::filesystem::remove(path);
        else if (!c.from.empty()) replace_in_file(path, c.from, c.to);
        else write_file(path, c.to == "+1" ? whole + '\0' : whole.substr(0, std::stoul(c.to)));
        if (c.sealed) seal(checkpoint);
        scene.check({{c.verb, 1, c.named}});
        write_file(path, whole), write_file(manifest, whole_manifest);
    }
    struct {
        const char *key, *value, *named;
    } const states[] = {{"last_update", "\"2\"", "last_update"},
                        {"bad_steps", "1.5", "bad_steps"},
                        {"loader", "[\"1337\", \"64\", \"4194304\"]", "loader"},
                        {"loader", "7", "loader"},
                        {"losses", "7", "losses"},
                        {"norms", "[\"x\"]", "norms"},
                        {"loader", "[\"x\", \"64\", \"4194304\", \"4\"]", "loader[0]"},
                        {"loader", "[\"1337\", \"-64\", \"4194304\", \"4\"]", "loader[1]"},
                        {"loader", "[\"1337\", \"64\", \"4194304\", \"99999999999999999999\"]", "loader[3]"},
                        {"loader", "[1337, 64, 4194304, 4]", "loader"},
                        {"loader", "[\"1337\", \"32\", \"4194304\", \"4\"]", "--seq-len"}};
    const std::string whole_state = read_manifest(checkpoint).state_text;
    for (const auto& s : states) {
        seal(checkpoint, with_json_value(whole_state, s.key, s.value));
        scene.check({{resume, 1, {s.named}}});
        write_file(manifest, whole_manifest);
    }
    REQUIRE_GOOD(scene.run(resume));  // nothing of all that has touched the checkpoint
}

// Every field of config.json: missing, of another kind, out of the option's range.
PROGRAM_TEST(run_config_json_is_checked_field_by_field) {
    const std::string path = folder.file("config.json");
    Config c = parse_and_preset({});
    const std::string whole = config_json(c);
    const Json root = parse_json(whole, path);
    write_file(path, whole);
    Config read;
    read_config_json(read, path);
    CHECK_EQUAL(config_json(read), whole);
    CHECK_EQUAL(root.keys.size(), 23u);
    const auto refused = [&](const std::string& text, const std::string& key) {
        write_file(path, text);
        Config config;
        tests().checks++;
        try {
            read_config_json(config, path);
            check_failed(__FILE__, __LINE__, "accepted: %s", text.c_str());
        } catch (const Error& e) {
            // Options are named as on the command line.
            std::string option = key;
            std::replace(option.begin(), option.end(), '_', '-');
            const std::string line = e.what();
            if (e.status != 1 || line.find(path) != 0 || line.find(path, 1) != std::string::npos ||
                (!holds(line, key) && !holds(line, option)))
                check_failed(__FILE__, __LINE__, "status %d, '%s': expected 1 and a line with %s", e.status, e.what(),
                             key.c_str());
        }
    };
    for (const std::string& key : root.keys) {
        std::string renamed = whole;
        renamed.replace(renamed.find("\"" + key + "\""), key.size() + 2, "\"other\"");
        refused(renamed, key);
        refused(with_json_value(whole, key, "null"), key);
        refused(with_json_value(whole, key, "[]"), key);
        const bool word = root.get(key, path).kind == Json::String;
        for (const char* wrong : {"\"llama\"", "\"\""})
            if (word) refused(with_json_value(whole, key, wrong), key);
        for (const char* wrong : {"0", "-1", "1.5", "\"16\"", "1e300", "99999999999", "999999999999999999999"})
            if (!word) refused(with_json_value(whole, key, wrong), key);
    }
    refused(with_json_value(whole, "heads", "3"), "heads");
    refused(with_json_value(whole, "head_dim", "31"), "head_dim");
    refused(with_json_value(whole, "cmp_block", "18"), "cmp_block");
    refused(with_json_value(whole, "slc_block", "18"), "slc_block");
    refused(with_json_value(whole, "slc_count", "2"), "slc_count");
    refused(with_json_value(whole, "tokenizer", "\"gpt2\""), "vocab_size");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints and resuming.

PROGRAM_TEST(run_resume_without_checkpoint_says_so_and_starts) {
    const Result first = train({{"out", out}, {"resume", "on"}});
    REQUIRE_GOOD(first);
    CHECK(holds(first.out, "nothing to resume under " + out));
    CHECK(holds(first.out, "step 0001 |"));
    const Result again = train({{"out", out}, {"resume", "on"}});  // already finished
    REQUIRE_GOOD(again);
    CHECK(!holds(again.out, "nothing to resume") && !holds(again.out, "step 0001 |"));
    CHECK(!file_exists(out + ".1"));
}

PROGRAM_TEST(run_earlier_run_is_moved_aside) {
    std::vector<std::string> models;
    for (const char* seed : {"1", "2", "3"}) {
        const Result r = train({{"out", out}, {"seed", seed}});
        REQUIRE_GOOD(r);
        CHECK_EQUAL(holds(r.out, "moved to"), seed[0] != '1');
        models.push_back(weights_of(out, 2));
    }
    CHECK(models[0] != models[1] && models[1] != models[2]);
    CHECK(weights_of(out + ".1", 2) == models[0]);
    CHECK(weights_of(out + ".2", 2) == models[1]);
    CHECK(file_exists(out + ".1/main.log") && file_exists(out + ".1/log.jsonl") && file_exists(out + ".1/run.json"));
    CHECK_EQUAL(lines_of(read_file(out + "/main.log")).size(), 4u);  // this run's lines alone
}

// A folder that is no run's, or not only: what is not the run's stays where it is, and nothing of it is written over.
PROGRAM_TEST(run_leaves_the_files_of_others_alone) {
    for (const char* name : {"run.json", "main.log", "log.jsonl", "heartbeat_rank0.jsonl"}) {
        const std::string project = folder.file(std::string("project_") + name);
        make_folders(project);
        write_file(project + "/" + name, "not yours");
        CHECK_REFUSED(train({{"out", project}}), 1, "--out " + project, name, "another folder");
        CHECK_EQUAL(read_file(project + "/" + name), "not yours");
        CHECK_EQUAL(glob_files(project + "/*").size(), 1u);
    }
    // Beside a run, which is moved aside alone; and through a link, which stays one.
    const std::string real = folder.file("disk"), link = folder.file("link");
    make_folders(real + "/src");
    write_file(real + "/thesis.txt", "mine");
    CHECK_EQUAL(symlink(real.c_str(), link.c_str()), 0);
    REQUIRE_GOOD(train({{"out", link}}));
    const std::string model = weights_of(real, 2);
    const Result again = train({{"out", link}, {"seed", "2"}});
    REQUIRE_GOOD(again);
    CHECK(holds(again.out, "moved to " + real + ".1;"));
    CHECK(weights_of(real + ".1", 2) == model && file_exists(real + ".1/main.log"));
    CHECK(!file_exists(real + ".1/thesis.txt") && file_exists(real + "/thesis.txt") && file_exists(real + "/src"));
    CHECK(file_exists(real + "/step_00000002") && file_exists(link + "/main.log"));
}

// What stands for itself in a folder's name is no pattern, and a name completed by the shell ends in a slash.
PROGRAM_TEST(run_folder_names_of_all_kinds) {
    for (const char* name : {"lr[1]", "what?", "a*b", "two words", "back\\slash", "slash/"}) {
        const std::string out = folder.file(name), aside = out.substr(0, out.find_last_not_of('/') + 1) + ".1";
        REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
        const Result resumed = train({{"out", out}, {"resume", "on"}, {"steps", "2"}});
        CHECK(resumed.status == 0 && holds(resumed.out, "step_00000001, step 1\n"));
        CHECK_EQUAL(run({"sample", "--from", out, "--tokens", "2", "--threads", "1"}).status, 0);
        REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
        CHECK(file_exists(aside + "/step_00000002") && !file_exists(out + "/step_00000002"));
    }
}
