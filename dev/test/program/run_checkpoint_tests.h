// run_checkpoint_tests.h: damaged checkpoints, resuming, the folder of a run, through the built ./train_nsa.
#pragma once
#include "program.h"

// ---------------------------------------------------------------------------------------------------------------------
// Damaged checkpoints.

// Damage that the manifest tells, and damage under a manifest that fits it.
TEST(run_damaged_checkpoints_are_named) {
    using namespace program;
    TempFolder folder;
    const std::string run_folder = folder.file("run"), checkpoint = run_folder + "/step_00000002",
                      name = "/step_00000002/";
    REQUIRE_GOOD(train({{"out", run_folder}}));
    write_file(folder.file("val.bin"), shard(random_tokens(300, 1)));
    const std::string whole_model = read_file(run_folder + name + "model.safetensors"),
                      whole_config = read_file(run_folder + name + "config.json"),
                      whole_manifest = read_file(run_folder + name + "manifest.json"),
                      whole_optimizer = read_file(run_folder + name + OPTIMIZER);
    const auto sample = [&] { return run({"sample", "--from", run_folder, "--tokens", "4", "--threads", "1"}); };
    const auto evaluate = [&] {
        return run({"eval", "--from", run_folder, "--val-data", folder.file("val.bin"), "--threads", "1"});
    };
    const auto resume = [&] { return train({{"out", run_folder}, {"steps", "3"}, {"resume", "on"}}); };
    const auto sealed = [&](const std::function<Result()>& verb) {
        seal(checkpoint);
        const Result result = verb();
        write_file(checkpoint + "/manifest.json", whole_manifest);
        return result;
    };
    REQUIRE_GOOD(sample());
    REQUIRE_GOOD(evaluate());

    const std::string model = run_folder + name + "model.safetensors";
    for (const size_t left : {whole_model.size() - 1, whole_model.size() / 2, size_t(100), size_t(7), size_t(0)}) {
        write_file(model, whole_model.substr(0, left));
        CHECK_REFUSED(sample(), 1, model, std::to_string(left), "manifest");
        CHECK_REFUSED(resume(), 1, model, std::to_string(left), "manifest");
        CHECK_REFUSED(sealed(sample), 1, model);
        CHECK_REFUSED(sealed(resume), 1, model);
    }
    write_file(model, whole_model + '\0');
    CHECK_REFUSED(sample(), 1, model, "bytes");
    CHECK_REFUSED(sealed(sample), 1, model, "byte");
    write_file(model, whole_model);
    replace_in_file(model, "layers.0.attn.q_proj", "layers.0.attn.q_proi");
    CHECK_REFUSED(evaluate(), 1, model, "checksum");
    CHECK_REFUSED(sealed(evaluate), 1, model, "layers.0.attn.q_proj.weight", "missing");
    write_file(model, whole_model);
    replace_in_file(model, "\"norm.weight\":{\"dtype\":\"F32\"", "\"norm.weight\":{\"dtype\":\"I32\"");
    CHECK_REFUSED(sealed(sample), 1, model, "norm.weight", "I32", "F32");
    write_file(model, whole_model);
    replace_in_file(model, "\"shape\":[256,16]", "\"shape\":[16,256]");
    CHECK_REFUSED(sealed(sample), 1, model, "embed_tokens.weight", "[16, 256]", "[256, 16]");
    CHECK_REFUSED(sealed(resume), 1, model, "embed_tokens.weight", "[16, 256]", "[256, 16]");
    std::filesystem::remove(model);
    CHECK_REFUSED(sample(), 1, model, "missing");
    write_file(model, whole_model);

    const std::string config = run_folder + name + "config.json";
    write_file(config, with_json_value(whole_config, "dim", "32"));  // a valid model, but another
    CHECK_REFUSED(sealed(sample), 1, model, "embed_tokens.weight", "[256, 16]", "[256, 32]");
    CHECK_REFUSED(sealed(resume), 1, run_folder + "/step_00000002", "dim", "32", "16");
    write_file(config, whole_config.substr(0, 40));
    CHECK_REFUSED(sealed(sample), 1, config, "byte");
    std::filesystem::remove(config);
    CHECK_REFUSED(evaluate(), 1, config, "missing");
    write_file(config, whole_config);

    const std::string manifest = run_folder + name + "manifest.json",
                      whole_state = read_manifest(checkpoint).state_text;
    write_file(manifest, whole_manifest.substr(0, 60));
    CHECK_REFUSED(resume(), 1, manifest, "byte");
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
                        {"loader", "[1337, 64, 4194304, 4]", "loader"}};
    write_file(manifest, whole_manifest);
    for (const auto& s : states) {
        seal(checkpoint, with_json_value(whole_state, s.key, s.value));
        CHECK_REFUSED(resume(), 1, manifest, s.named);
        write_file(manifest, whole_manifest);
    }
    seal(checkpoint, with_json_value(whole_state, "loader", "[\"1337\", \"32\", \"4194304\", \"4\"]"));
    CHECK_REFUSED(resume(), 1, "--seq-len", "32", "64");
    std::filesystem::remove(manifest);
    CHECK_REFUSED(resume(), 1, manifest, "missing");
    // a folder of weights is enough where it is named itself
    const Result unchecked = run({"sample", "--from", checkpoint, "--tokens", "4", "--threads", "1"});
    CHECK(unchecked.status == 0 &&
          unchecked.err.find("warning: " + checkpoint + " has no manifest.json") != std::string::npos);
    write_file(manifest, whole_manifest);

    const std::string optimizer = run_folder + name + OPTIMIZER;
    write_file(optimizer, whole_optimizer.substr(0, whole_optimizer.size() - 4));
    CHECK_REFUSED(resume(), 1, optimizer);
    CHECK_REFUSED(sealed(resume), 1, optimizer);
    write_file(optimizer, whole_optimizer);
    for (const auto& [from, to] : {std::make_pair("v.norm.weight[0:16]", "w.norm.weight[0:16]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weighs[0:16]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weight[1:17]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weight[16:0]"),
                                   std::make_pair("v.norm.weight[0:16]", "v.norm.weight[0:16x")}) {
        replace_in_file(optimizer, from, to);
        CHECK_REFUSED(sealed(resume), 1, optimizer, to);
        write_file(optimizer, whole_optimizer);
    }
    // One of two ranks' files is missing, and the manifest does not know of it.
    std::filesystem::rename(optimizer, folder.file("away"));
    CHECK_REFUSED(resume(), 1, optimizer, "missing");
    CHECK_REFUSED(sealed(resume), 1, manifest, "0 of ", "moments");
    std::filesystem::rename(folder.file("away"), optimizer);

    // Weights that are no numbers: three steps that change nothing, and the end, with nothing saved.
    std::string poisoned = whole_model;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(&poisoned[poisoned.size() - 4], &nan, 4);
    write_file(model, poisoned);
    seal(checkpoint);
    const Result bad = train({{"out", run_folder}, {"steps", "9"}, {"resume", "on"}});
    CHECK_EQUAL(bad.status, 1);
    for (const char* step : {"step 0003 | ", "step 0004 | ", "step 0005 | "})
        CHECK(bad.out.find(step) != std::string::npos);
    for (const char* words : {"step 3: ", "step 4: ", "step 5: ", "not finite", "3 in a row", "step_00000002"})
        CHECK(bad.err.find(words) != std::string::npos);
    CHECK_EQUAL(lines_of(bad.err).size(), 3u);
    CHECK(!file_exists(run_folder + "/step_00000005") && file_exists(run_folder + "/bad_step_00000005_rank0.json"));
    write_file(model, whole_model);
    write_file(manifest, whole_manifest);
    REQUIRE_GOOD(resume());  // nothing of all that has touched the checkpoint
}

// Every field of config.json: missing, of another kind, out of the option's range.
TEST(run_config_json_is_checked_field_by_field) {
    using namespace program;
    TempFolder folder;
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
                (line.find(key) == std::string::npos && line.find(option) == std::string::npos))
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

// Training data of which twelve steps see more than one epoch, so that the loader's state matters.
inline std::string write_small_corpus(const TempFolder& folder, const std::string& name, uint64_t seed) {
    write_file(folder.file(name), program::shard(program::random_tokens(64 * 15 + 1, seed, 64)));
    return folder.file(name);
}

TEST(run_resumed_equals_uninterrupted) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1), val = write_small_corpus(folder, "val.bin", 2);
    for (const char* batch : {"2", "1"}) {  // accumulation over 1 and 2 micro-steps
        const std::string whole = folder.file(std::string("whole") + batch),
                          parts = folder.file(std::string("parts") + batch);
        const Options options = {{"data", data},           {"val-data", val},     {"batch", batch},
                                 {"schedule", "constant"}, {"eval-every", "2"},   {"seed", "5"},
                                 {"recompute", batch},     {"sample-every", "3"}, {"sample-tokens", "5"}};
        const auto run_to = [&](const char* steps, const std::string& out, const char* resume) {
            Options more = options;
            more["steps"] = steps, more["out"] = out, more["resume"] = resume;
            return train(more);
        };
        REQUIRE_GOOD(run_to("12", whole, "off"));
        REQUIRE_GOOD(run_to("5", parts, "off"));
        const Result resumed = run_to("9", parts, "on");
        REQUIRE_GOOD(resumed);
        CHECK(resumed.out.find("resume: " + parts + "/step_00000005, step 5\n") != std::string::npos);
        REQUIRE_GOOD(run_to("12", parts, "on"));
        for (const char* file : {"model.safetensors", OPTIMIZER, "config.json"})
            CHECK(read_file(whole + "/step_00000012/" + file) == read_file(parts + "/step_00000012/" + file));
        const Json state_whole = read_manifest(whole + "/step_00000012").state,
                   state_parts = read_manifest(parts + "/step_00000012").state;
        for (const Json* state : {&state_whole, &state_parts})
            CHECK_EQUAL(state->array("loader", "state")[3].text, std::string("24"));  // 12 steps of 2 samples
        for (const char* field : {"loss", "lr", "grad_norm", "tokens", "epoch"}) {
            const std::vector<double> a = logged(whole, field), b = logged(parts, field);
            CHECK_EQUAL(a.size(), 12u);
            CHECK(a == b);
        }
        // Validation at even steps of both, and where a part ended.
        std::map<int64_t, double> losses[2];
        for (int i = 0; i < 2; i++)
            for (const Json& line : log_of(i ? parts : whole))
                if (line.find("val_loss")) losses[i][line.integer("step", "")] = line.number("val_loss", "");
        CHECK_EQUAL(losses[0].size(), 7u);
        for (const auto& [step, loss] : losses[0]) CHECK_EQUAL(losses[1][step], loss);
        CHECK_EQUAL(glob_files(parts + "*").size(), 1u);  // nothing was moved aside
    }
    // The two divisions of a batch are the same step up to the order of sums.
    CHECK_NEAR(logged(folder.file("whole1"), "loss")[0], logged(folder.file("whole2"), "loss")[0], 2e-6);
}

TEST(run_resume_without_checkpoint_says_so_and_starts) {
    using namespace program;
    TempFolder folder;
    const Result first = train({{"out", folder.file("run")}, {"resume", "on"}});
    REQUIRE_GOOD(first);
    CHECK(first.out.find("nothing to resume under " + folder.file("run")) != std::string::npos);
    CHECK(first.out.find("step 0001 |") != std::string::npos);
    const Result again = train({{"out", folder.file("run")}, {"resume", "on"}});  // already finished
    REQUIRE_GOOD(again);
    CHECK(again.out.find("nothing to resume") == std::string::npos &&
          again.out.find("step 0001 |") == std::string::npos);
    CHECK(!file_exists(folder.file("run.1")));
}

TEST(run_resume_with_another_model_or_data_is_refused) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1),
                      other = write_small_corpus(folder, "other.bin", 2), longer = folder.file("longer.bin"),
                      out = folder.file("run");
    write_file(longer, shard(random_tokens(64 * 20, 3, 64)));
    REQUIRE_GOOD(train({{"out", out}, {"data", data}}));
    const auto resume = [&](const Options& more) {
        return train(merged({{"out", out}, {"data", data}, {"resume", "on"}, {"steps", "3"}}, more));
    };
    const Options changes = {{"layers", "2"},     {"dim", "32"},       {"heads", "4"},       {"head-dim", "16"},
                             {"cmp-block", "12"}, {"cmp-stride", "8"}, {"slc-block", "16"},  {"slc-count", "5"},
                             {"window", "17"},    {"phi-hidden", "9"}, {"mlp-hidden", "33"}, {"attention", "full"},
                             {"smear", "on"},     {"head", "untied"}};
    for (const auto& [name, value] : changes) {
        std::string field = name;
        std::replace(field.begin(), field.end(), '-', '_');
        CHECK_REFUSED(resume({{name, value}}), 1, "resume", out, field, value);
    }
    const std::string manifest = read_file(out + "/run.json");
    CHECK_REFUSED(resume({{"heads", "4"}, {"kv-groups", "2"}}), 1, "resume");
    CHECK_REFUSED(resume({{"seq-len", "32"}}), 1, "seq_len", "64", "32");
    CHECK_REFUSED(resume({{"data", longer}}), 1, "--data", "another corpus");
    CHECK_REFUSED(resume({{"data", "synthetic"}}), 1, "--data", "another corpus");
    // As many tokens, but others: the run would go on silently with data that it was not made on.
    CHECK_REFUSED(resume({{"data", other}}), 1, "--data");
    CHECK_EQUAL(read_file(out + "/run.json"), manifest);  // what is refused leaves everything as it was
    CHECK(!file_exists(out + "/step_00000003") && !file_exists(out + ".1"));
    REQUIRE_GOOD(resume({}));
}

// The synthetic corpus is made from --seed: another seed is another corpus of the same size.
TEST(run_resume_of_the_synthetic_corpus_keeps_the_seed) {
    using namespace program;
    TempFolder folder;
    const Options options = {{"schedule", "constant"}, {"steps", "4"}};
    const auto with = [&](Options more) {
        more.insert(options.begin(), options.end());
        return train(more);
    };
    REQUIRE_GOOD(with({{"seed", "5"}, {"out", folder.file("whole")}}));
    REQUIRE_GOOD(train({{"schedule", "constant"}, {"steps", "2"}, {"seed", "5"}, {"out", folder.file("parts")}}));
    const Result other = with({{"seed", "6"}, {"out", folder.file("parts")}, {"resume", "on"}});
    if (other.status != 0)
        CHECK_REFUSED(other, 1,
                      "seed");  // refusing is one right answer, going on with the corpus of the checkpoint the other
    else CHECK(logged(folder.file("whole"), "loss") == logged(folder.file("parts"), "loss"));
}

TEST(run_earlier_run_is_moved_aside) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    std::vector<std::string> models;
    for (const char* seed : {"1", "2", "3"}) {
        const Result r = train({{"out", out}, {"seed", seed}});
        REQUIRE_GOOD(r);
        CHECK_EQUAL(r.out.find("moved to") != std::string::npos, seed[0] != '1');
        models.push_back(read_file(out + "/step_00000002/model.safetensors"));
    }
    CHECK(models[0] != models[1] && models[1] != models[2]);
    CHECK(read_file(out + ".1/step_00000002/model.safetensors") == models[0]);
    CHECK(read_file(out + ".2/step_00000002/model.safetensors") == models[1]);
    CHECK(file_exists(out + ".1/main.log") && file_exists(out + ".1/log.jsonl") && file_exists(out + ".1/run.json"));
    CHECK_EQUAL(lines_of(read_file(out + "/main.log")).size(), 4u);  // this run's lines alone
}

// A folder that is no run's, or not only: what is not the run's stays where it is, and nothing of it is written over.
TEST(run_leaves_the_files_of_others_alone) {
    using namespace program;
    TempFolder folder;
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
    const std::string model = read_file(real + "/step_00000002/model.safetensors");
    const Result again = train({{"out", link}, {"seed", "2"}});
    REQUIRE_GOOD(again);
    CHECK(again.out.find("moved to " + real + ".1;") != std::string::npos);
    CHECK(read_file(real + ".1/step_00000002/model.safetensors") == model && file_exists(real + ".1/main.log"));
    CHECK(!file_exists(real + ".1/thesis.txt") && file_exists(real + "/thesis.txt") && file_exists(real + "/src"));
    CHECK(file_exists(real + "/step_00000002") && file_exists(link + "/main.log"));
}

// --resume alone goes on with the run's own options: the same bits as with all of them given again.
TEST(run_resume_inherits_the_options_that_are_not_given) {
    using namespace program;
    TempFolder folder;
    const std::string data = write_small_corpus(folder, "train.bin", 1), whole = folder.file("whole"),
                      parts = folder.file("parts");
    const Options options = {{"data", data},          {"schedule", "linear"}, {"lr", "0.003"},     {"warmup", "3"},
                             {"weight-decay", "0.3"}, {"seed", "9"},          {"save-every", "2"}, {"batch", "1"}};
    const auto with = [&](Options more) {
        more.insert(options.begin(), options.end());
        return train(more);
    };
    REQUIRE_GOOD(with({{"steps", "6"}, {"out", whole}}));
    REQUIRE_GOOD(with({{"steps", "6"}, {"out", parts}}));
    for (const char* step : {"step_00000004", "step_00000006"})
        std::filesystem::remove_all(parts + "/" + step);  // as if it had been killed
    const Result resumed = run({"--resume", "--out", parts, "--threads", "1", "--batch", "1"});
    REQUIRE_GOOD(resumed);
    CHECK(resumed.out.find("resume: --") == std::string::npos);  // nothing has changed
    CHECK(same_weights(whole + "/step_00000006/", parts + "/step_00000006/"));
    CHECK(file_exists(parts + "/step_00000004"));
    // What is given counts, and what it does to the learning rate is said.
    const Result longer = run({"--resume", "--out", parts, "--threads", "1", "--batch", "1", "--steps", "9"});
    REQUIRE_GOOD(longer);
    CHECK(longer.out.find("resume: --steps is 9, was 6") != std::string::npos);
    // linear, warm-up 3: at step 7 of 9 a third of the way from a tenth is left, where step 6 of 6 was the end
    CHECK(longer.out.find("resume: the learning rate of step 7 is 1.20e-03, by the earlier options 3.00e-04") !=
          std::string::npos);
    write_file(parts + "/run.json", "{\"program\": \"train_nsa\", \"lr\": 11}");
    CHECK_REFUSED(run({"--resume", "--out", parts}), 1, parts + "/run.json", "--lr");
}

// Weights of one run are the beginning of another, of other data and length of sequences; the first loss is the one
// they had.
TEST(run_begins_with_the_weights_of_another) {
    using namespace program;
    TempFolder folder;
    const std::string first = folder.file("first"), second = folder.file("second");
    REQUIRE_GOOD(train({{"out", first}, {"steps", "30"}, {"warmup", "2"}, {"lr", "0.003"}}));
    const Result r = train({{"out", second}, {"init-from", first}, {"steps", "0"}, {"eval-every", "1"}});
    REQUIRE_GOOD(r);
    CHECK(r.out.find("weights: those of " + first + "/step_00000030") != std::string::npos);
    CHECK_EQUAL(logged(second, "val_loss").at(0), logged(first, "val_loss").back());
    const std::string shorter = folder.file("shorter");
    REQUIRE_GOOD(train({{"out", shorter},
                        {"init-from", first + "/step_00000030"},
                        {"steps", "1"},
                        {"lr", "1e-30"},
                        {"seq-len", "32"},
                        {"total-batch", "64"},
                        {"weight-decay", "0"}}));
    CHECK(read_file(shorter + "/step_00000001/model.safetensors") ==
          read_file(first + "/step_00000030/model.safetensors"));
    CHECK_REFUSED(train({{"out", folder.file("x")}, {"init-from", first}, {"layers", "3"}}), 1, "cannot begin from",
                  "layers", "3");
    CHECK_REFUSED(train({{"out", folder.file("x")}, {"init-from", folder.file("none")}}), 1, "none");
    CHECK_REFUSED(train({{"out", folder.file("x")}, {"init-from", first + "/run.json"}}), 1, "--init-from",
                  "is a file");
    CHECK(!file_exists(folder.file("x")));
    // The built-in corpus can be evaluated on, as the run itself was.
    const Result evaluated = run({"eval", "--from", first, "--val-data", "synthetic", "--threads", "1"});
    REQUIRE_GOOD(evaluated);
    CHECK(evaluated.out.find(format_text("loss %.4f", logged(first, "val_loss").back())) != std::string::npos);
}

// A name completed by the shell ends in a slash.
TEST(run_folder_name_with_a_slash_behind_it) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out + "/"}}));
    REQUIRE_GOOD(train({{"out", out + "/"}, {"resume", "on"}, {"steps", "3"}}));
    REQUIRE_GOOD(train({{"out", out + "/"}}));
    CHECK(file_exists(out + ".1/step_00000003/model.safetensors") && !file_exists(out + "/step_00000003"));
    REQUIRE_GOOD(run({"sample", "--from", out + "/", "--tokens", "2"}));
}

// What stands for itself in a folder's name is no pattern.
TEST(run_folder_name_with_pattern_characters) {
    using namespace program;
    TempFolder folder;
    for (const char* name : {"lr[1]", "what?", "a*b", "two words", "back\\slash"}) {
        const std::string out = folder.file(name);
        REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
        const Result resumed = train({{"out", out}, {"resume", "on"}, {"steps", "2"}});
        CHECK(resumed.status == 0 && resumed.out.find("step_00000001, step 1\n") != std::string::npos);
        CHECK_EQUAL(run({"sample", "--from", out, "--tokens", "2", "--threads", "1"}).status, 0);
    }
}

TEST(run_newest_checkpoint_is_taken) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"steps", "10"}, {"save-every", "3"}}));
    const std::vector<std::string> found = glob_files(out + "/step_*");
    CHECK((found == std::vector<std::string>{out + "/step_00000003", out + "/step_00000006", out + "/step_00000009",
                                             out + "/step_00000010"}));
    CHECK_EQUAL(newest_checkpoint(out), out + "/step_00000010");
    std::filesystem::create_directory(out + "/step_00000012.writing");
    write_file(out + "/step_00000012.writing/model.safetensors", "");
    CHECK_EQUAL(newest_checkpoint(out), out + "/step_00000010");
    CHECK_EQUAL(newest_checkpoint(folder.path), "");
}

// SIGKILL again and again, most often while a checkpoint is being written: a step's folder is always whole, and the run
// continued from the newest ends with the bytes of a run that was left alone.
TEST(run_killed_and_resumed_equals_uninterrupted) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    Options options = {{"steps", "12"}, {"save-every", "1"}, {"out", folder.file("whole")}};
    REQUIRE_GOOD(train(options));
    options["out"] = out, options["resume"] = "on";
    for (const int step : {2, 4, 6, 7, 9, 11}) {
        Start start;
        start.kill_after = format_text("step %04d | loss", step);
        const Result killed = train(options, start);
        if (killed.status != 0) CHECK_EQUAL(killed.status, 128 + SIGKILL);
        for (const std::string& checkpoint : glob_files(out + "/step_????????"))
            CHECK_EQUAL(verify_checkpoint(checkpoint).files.size(), 3u);
    }
    const Result last = train(options);
    REQUIRE_GOOD(last);
    CHECK(last.out.find("nothing to resume") == std::string::npos);
    CHECK(same_weights(folder.file("whole/step_00000012/"), out + "/step_00000012/"));
}

// A full disk at the last checkpoint: the run ends with an error, there is no half checkpoint, and the one before still
// serves.
TEST(run_full_disk_leaves_no_half_checkpoint) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"steps", "1"}}));
    Start full;  // the weights fit, the moments, twice as large, do not
    full.largest_file = file_size(out + "/step_00000001/model.safetensors") + 4096;
    const Options options = {{"out", out}, {"steps", "2"}, {"resume", "on"}};
    const Result refused = train(options, full);
    CHECK_EQUAL(refused.status, 1);
    for (const char* words : {OPTIMIZER, "File too large", "step_00000001", "the last checkpoint could not be written"})
        CHECK(refused.err.find(words) != std::string::npos);
    CHECK(!file_exists(out + "/step_00000002"));
    const Result resumed = train(options);  // over what the failed attempt left
    REQUIRE_GOOD(resumed);
    CHECK(resumed.out.find("step_00000001, step 1\n") != std::string::npos);
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 2u);
    REQUIRE_GOOD(train({{"out", folder.file("whole")}, {"steps", "1"}}));
    REQUIRE_GOOD(train({{"out", folder.file("whole")}, {"steps", "2"}, {"resume", "on"}}));
    CHECK(same_weights(folder.file("whole/step_00000002/"), out + "/step_00000002/"));
}
