// export_tests.h: export and import through the built ./train_nsa: the files, that nothing is lost on the way there and
// back, and what is refused. That transformers loads an export and computes the same is dev/test_export.py's to see.
#pragma once
#include "../program/program.h"

namespace program {
inline Result export_to(const std::string& to, const std::string& from, const Words& more = {}) {
    return run(joined({"export", "--from", from, "--out", to}, more));
}
inline Result import_to(const std::string& to, const std::string& from) {
    return run({"import", "--from", from, "--out", to});
}

// Merges of two bytes each: a vocabulary of GPT-2's size that needs no file. Returns vocab.bpe.
inline std::string write_pair_vocabulary(const std::string& folder) {
    const ByteAlphabet alphabet;
    std::map<int, std::string> written;  // by byte
    for (int code = 0; code < 256 + 68; code++)
        if (alphabet.byte_of[code] >= 0) utf8_append(written[alphabet.byte_of[code]], uint32_t(code));
    const auto name = [&](int id) { return written.at(alphabet.order[id]); };
    std::string merges = "#version: 0.2\n", ids;
    for (int id = 0; id < 256; id++) ids += json_quote(name(id)) + ":" + std::to_string(id) + ",";
    for (int i = 0; i < 50000; i++) {
        const std::string left = name(i / 256), right = name(i % 256);
        merges += left + " " + right + "\n";
        ids += json_quote(left + right) + ":" + std::to_string(256 + i) + ",";
    }
    make_folders(folder);
    write_file(folder + "/vocab.bpe", merges);
    write_file(folder + "/encoder.json", "{" + ids + "\"<|endoftext|>\":50256}");
    return merges;
}

inline std::set<std::string> names_in(const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
    return names;
}
}  // namespace program

PROGRAM_TEST(export_has_the_files_of_transformers_and_the_run_s_bytes) {
    const std::string run_folder = folder.file("run"), to = folder.file("new/hf");
    for (const char* attention : {"nsa", "full"}) {
        REQUIRE_GOOD(train({{"out", run_folder}, {"attention", attention}, {"init", "random"}}));
        REQUIRE_GOOD(export_to(to, run_folder));
        CHECK(names_in(to) == std::set<std::string>({"README.md", "config.json", "configuration_nsa.py",
                                                     "generation_config.json", "model.safetensors", "modeling_nsa.py",
                                                     "tokenizer.json", "tokenizer_config.json"}));
        const std::string checkpoint = run_folder + "/step_00000002";
        CHECK(read_file(to + "/model.safetensors") == read_file(checkpoint + "/model.safetensors"));
        CHECK_EQUAL(read_raw(to + "/model.safetensors").metadata.at("format"), "pt");
        for (const char* name : {"modeling_nsa.py", "configuration_nsa.py"})
            CHECK(read_file(to + "/" + name) == read_file(std::string("lib/report/hf/") + name));
        const Json config = parse_json(read_file(to + "/config.json"), "config.json"),
                   trained = parse_json(read_file(checkpoint + "/config.json"), "config.json of the run");
        CHECK_EQUAL(config.string("model_type", ""), "nsa");
        CHECK_EQUAL(config.get("auto_map", "").string("AutoModelForCausalLM", ""), "modeling_nsa.NsaForCausalLM");
        CHECK_EQUAL(config.get("auto_map", "").string("AutoConfig", ""), "configuration_nsa.NsaConfig");
        CHECK_EQUAL(config.string("attention", ""), attention);
        const std::string python = read_file(to + "/configuration_nsa.py");
        for (size_t i = 0; i < trained.keys.size(); i++) {  // what the run has: there too, and known to the Python
            const Json& value = config.get(trained.keys[i], "config.json");
            CHECK_EQUAL(value.text, trained.items[i].text);
            CHECK_EQUAL(value.number_value, trained.items[i].number_value);
            CHECK(python.find("self." + trained.keys[i] + " = " + trained.keys[i]) != std::string::npos);
        }
        std::filesystem::remove_all(to), std::filesystem::remove_all(run_folder);
    }
}

// Ids by the rule of the byte alphabet, which tokenizer_tests.h checks against the published files.
PROGRAM_TEST(export_tokenizer_of_bytes_gives_each_byte_its_value) {
    REQUIRE_GOOD(train({{"out", folder.file("run")}, {"steps", "1"}}));
    REQUIRE_GOOD(export_to(folder.file("hf"), folder.file("run")));
    const std::string path = folder.file("hf/tokenizer.json");
    const Json root = parse_json(read_file(path), path), &model = root.get("model", path);
    const Json& vocabulary = model.get("vocab", path);
    CHECK_EQUAL(vocabulary.keys.size(), 256u);
    CHECK_EQUAL(model.array("merges", path).size(), 0u);
    CHECK_EQUAL(vocabulary.integer(std::string(1, '\0'), path), 0);
    CHECK_EQUAL(vocabulary.integer("A", path), 'A');
    CHECK_EQUAL(vocabulary.integer("\u0120", path), ' ');
    CHECK_EQUAL(vocabulary.integer("\u010A", path), '\n');
    CHECK_EQUAL(vocabulary.integer("\u00FF", path), 255);
    CHECK_EQUAL(vocabulary.integer("\u0143", path), 0xAD);
    std::set<int64_t> ids;
    for (const Json& id : vocabulary.items) ids.insert(id.integer(path));
    CHECK(ids.size() == 256 && *ids.begin() == 0 && *ids.rbegin() == 255);
    const std::string generation = folder.file("hf/generation_config.json");
    CHECK_EQUAL(parse_json(read_file(generation), generation).integer("eos_token_id", generation), 0);
}

PROGRAM_TEST(export_of_gpt2_carries_the_vocabulary) {
    const std::string run_folder = folder.file("run"), to = folder.file("hf"), vocabulary = folder.file("vocabulary");
    const std::string merges = write_pair_vocabulary(vocabulary);
    write_file(folder.file("a.bin"), shard(random_tokens(1000, 1, 50257)));
    REQUIRE_GOOD(train({{"out", run_folder}, {"tokenizer", "gpt2"}, {"data", folder.file("a.bin")}, {"steps", "1"}}));
    CHECK_REFUSED(export_to(to, run_folder), 2, "export", "--vocab-dir is missing");
    CHECK_REFUSED(export_to(to, run_folder, {"--vocab-dir", folder.file("none")}), 1, folder.file("none"));
    CHECK(!file_exists(to));
    REQUIRE_GOOD(export_to(to, run_folder, {"--vocab-dir", vocabulary}));
    CHECK(names_in(to) ==
          std::set<std::string>({"README.md", "config.json", "configuration_nsa.py", "generation_config.json",
                                 "merges.txt", "model.safetensors", "modeling_nsa.py", "tokenizer.json",
                                 "tokenizer_config.json", "vocab.json"}));
    CHECK(read_file(to + "/merges.txt") == merges);
    const std::string from = vocabulary + "/encoder.json", written = to + "/vocab.json";
    const Json expected = parse_json(read_file(from), from), found = parse_json(read_file(written), written);
    CHECK(found.keys == expected.keys);
    REQUIRE(found.items.size() == 50257);
    for (size_t i = 0; i < found.items.size(); i++) CHECK_EQUAL(found.items[i].integer_value, int64_t(i));
    // an import knows where its vocabulary is
    REQUIRE_GOOD(import_to(folder.file("back"), to));
    const Words greedy = {"--temperature", "0", "--tokens", "8", "--prompt", "two words", "--threads", "1"};
    const Result original = run(joined({"sample", "--from", run_folder, "--vocab-dir", vocabulary}, greedy)),
                 back = run(joined({"sample", "--from", folder.file("back")}, greedy));
    REQUIRE_GOOD(original);
    REQUIRE_GOOD(back);
    CHECK_EQUAL(back.out, original.out);
}

// From wherever a run was trained, through transformers and back: nobody says again where the vocabulary is.
PROGRAM_TEST(vocabulary_goes_where_the_model_goes) {
    const std::string vocabulary = folder.file("vocabulary"), text = folder.file("a.txt"), data = folder.file("a");
    const std::string line = folder.file("line.txt");
    write_file(text, read_file("dev/MODEL.md").substr(0, 20000));
    write_file(line, "two words");
    REQUIRE_GOOD(run({"vocabulary", "--in", text, "--size", "300", "--out", vocabulary}));
    REQUIRE_GOOD(run({"tokenize", "--in", text, "--out", data, "--vocab-dir", vocabulary}));
    REQUIRE_GOOD(train({{"out", folder.file("first")},
                        {"tokenizer", "gpt2"},
                        {"vocab-dir", vocabulary},
                        {"data", data + "_train_*.bin"}}));
    const Tokenizer original = Tokenizer::gpt2(vocabulary);
    remove_tree(vocabulary);
    rename_path(folder.file("first"), folder.file("run's"));
    const std::string run_folder = folder.file("run's"), hf = folder.file("hf");
    const Words greedy = {"--temperature", "0", "--tokens", "8", "--prompt", "two words", "--threads", "1"};
    const auto sample = [&](const std::string& from) {
        const Result r = run(joined({"sample", "--from", from}, greedy));
        REQUIRE_GOOD(r);
        return r.out;
    };
    const std::string expected = sample(run_folder), lone = folder.file("lone");
    std::filesystem::copy(newest_checkpoint(run_folder).folder, lone);  // far from its run's vocabulary
    CHECK_REFUSED(run({"sample", "--from", lone}), 2, "--vocab-dir");
    REQUIRE_GOOD(run({"eval", "--from", run_folder, "--text", line, "--threads", "1"}));
    REQUIRE_GOOD(run({"inspect", "--from", run_folder, "--text", line, "--json", folder.file("i"), "--threads", "1"}));
    REQUIRE_GOOD(export_to(hf, run_folder));
    CHECK_EQUAL(run(joined({"sample", "--from", hf}, greedy)).out, expected);  // warns that it has no manifest
    // transformers 5 saves tokenizer.json alone; its merges are lists in some versions, and end-of-text is added
    const std::string again = folder.file("again"), json = again + "/tokenizer.json",
                      tokens = read_file(hf + "/tokenizer.json");
    make_folders(again);
    for (const char* name : {"config.json", "model.safetensors", "tokenizer.json"})
        std::filesystem::copy_file(hf + "/" + name, again + "/" + name);
    const auto with_lists = [&] {
        const size_t at = tokens.find("\"merges\": [") + 11;
        return tokens.substr(0, at) + std::regex_replace(tokens.substr(at),
                                                         std::regex(R"re("([^", \\]+) ([^", \\]+)")re"),
                                                         "[\"$1\", \"$2\"]");
    };
    const size_t end = tokens.find(", \"<|endoftext|>\": 299}");
    REQUIRE(end != std::string::npos);
    int imports = 0;
    const std::string untyped = std::regex_replace(tokens, std::regex("\"type\": \"BPE\", "), "");  // as GPT-2's own
    REQUIRE(untyped != tokens);
    for (const std::string& form :
         {tokens, with_lists(), std::string(tokens).erase(end, 23).insert(end, "}"), untyped}) {
        write_file(json, form);
        CHECK_EQUAL(Tokenizer::gpt2(again).digest(), original.digest());
        const std::string back = folder.file("back " + std::to_string(imports++));
        const Result r = import_to(back, again);
        REQUIRE_GOOD(r);
        CHECK_EQUAL(sample(back), expected);
        const size_t next = r.out.find("next:   ");  // as it is printed
        REQUIRE(next != std::string::npos);
        REQUIRE_GOOD(execute({"/bin/bash", "-c",
                              r.out.substr(next + 8, r.out.find('\n', next) - next - 8) + " --tokens 1 --threads 1"}));
        REQUIRE_GOOD(run({"--init-from", back, "--data", data + "_train_*.bin", "--out", back + "/on", "--steps", "1",
                          "--batch", "2", "--total-batch", "128", "--threads", "1", "--warmup", "0"}));
        sample(back + "/on");
    }
    REQUIRE_GOOD(run({"--resume", run_folder, "--steps", "3"}));
    // What is not this vocabulary is named.
    const auto refused = [&](const std::string& form, const std::string& words) {
        write_file(json, form);
        CHECK_REFUSED(import_to(folder.file("x"), again), 1, again, words);
    };
    refused(std::regex_replace(tokens, std::regex("true, \"use_regex\": true"), "true, \"use_regex\": false"),
            "GPT-2's kind");
    refused(std::regex_replace(tokens, std::regex("\"BPE\""), "\"WordPiece\""), "GPT-2's kind");
    refused("{}", "model");
    write_file(json, tokens);
    const std::string config = read_file(hf + "/config.json");
    write_file(again + "/config.json", with_json_value(config, "vocab_size", "305"));
    CHECK_REFUSED(import_to(folder.file("x"), again), 1, "resized to 305 tokens", "has 300");
    write_file(again + "/config.json", with_json_value(config, "vocab_digest", "\"00000001\""));
    CHECK_REFUSED(import_to(folder.file("x"), again), 1, "other tokens");
    CHECK(!file_exists(folder.file("x")));
}

PROGRAM_TEST(import_of_an_export_is_the_run) {
    const std::string run_folder = folder.file("run"), back = folder.file("back");
    REQUIRE_GOOD(
        train({{"out", run_folder}, {"init", "random"}, {"steps", "3"}, {"save-every", "1"}, {"rope-base", "500000"}}));
    REQUIRE_GOOD(export_to(folder.file("hf"), run_folder));
    REQUIRE_GOOD(import_to(back, folder.file("hf") + "/"));
    for (const char* name : {"model.safetensors", "config.json"})
        CHECK(read_file(back + "/step_00000000/" + name) == read_file(run_folder + "/step_00000003/" + name));
    // trained on, both give the same losses; a model's shape that is not given is inherited
    for (const char* source : {"run", "back"})
        REQUIRE_GOOD(
            run({"--init-from", folder.file(source), "--out", folder.file(std::string("on_") + source), "--steps", "2",
                 "--batch", "2", "--total-batch", "128", "--sample-tokens", "0", "--threads", "1", "--warmup", "0"}));
    const std::vector<double> losses = logged(folder.file("on_run"), "loss");
    CHECK_EQUAL(losses.size(), 2u);
    CHECK(losses == logged(folder.file("on_back"), "loss"));
    // eval on the synthetic corpus takes its size from the options that import wrote
    REQUIRE_GOOD(run({"eval", "--from", back, "--val-data", "synthetic", "--eval-batches", "1", "--threads", "1"}));
    CHECK_REFUSED(run({"--resume", "--out", back, "--steps", "2", "--warmup", "0", "--threads", "1"}), 1, back,
                  "--init-from");
    // as transformers saves it: other keys, other order of the tensors
    const std::string again = folder.file("again"), config = read_file(folder.file("hf/config.json"));
    make_folders(again);
    write_file(again + "/config.json", "{\"dtype\": \"float32\", " + config.substr(1));
    const SafeTensors file(folder.file("hf/model.safetensors"));
    write_safetensors(again + "/model.safetensors", {{"format", "pt"}}, {file.tensors.rbegin(), file.tensors.rend()});
    REQUIRE_GOOD(import_to(folder.file("back2"), again));
    CHECK(read_file(folder.file("back2/step_00000000/model.safetensors")) ==
          read_file(run_folder + "/step_00000003/model.safetensors"));
}

// The model card: numbers that the run printed, the data's names, and no folder of this machine.
PROGRAM_TEST(export_writes_a_model_card) {
    const std::string run_folder = folder.file("run"), link = folder.file("link");
    for (const char* name : {"train.bin", "more.bin", "val.bin"})
        write_file(folder.file(name), shard(random_tokens(64 * 15 + 1, uint64_t(name[0]), 64)));
    const Options options = {{"out", run_folder},
                             {"data", folder.file("train.bin") + ":3," + folder.file("more.bin")},
                             {"val-data", folder.file("val.bin")},
                             {"eval-every", "3"}};
    REQUIRE_GOOD(train(merged(options, {{"steps", "2"}})));
    REQUIRE_GOOD(train(merged(options, {{"resume", "on"}, {"steps", "3"}, {"total-batch", "256"}})));
    CHECK(symlink("real", link.c_str()) == 0);
    make_folders(folder.file("real"));
    REQUIRE_GOOD(export_to(link + "/./", run_folder));
    const std::string card = read_file(folder.file("real/README.md"));
    const std::vector<double> losses = logged(run_folder, "loss");
    const double mean = (losses[0] + losses[1] + losses[2]) / 3;
    size_t parameters = 0;
    for (const auto& [name, tensor] : read_raw(folder.file("real/model.safetensors")).tensors)
        parameters += tensor.count();
    for (const std::string& text :
         {std::string("\n# real\n"), std::string("from_pretrained(\"real\")"),
          std::string("from_pretrained(\"real\", "), std::string("Native Sparse Attention"),
          std::string("No licence is stated"), format_text("- %zu parameters", parameters),
          std::string("- tokenizer: bytes, 256 tokens; sequences of 64\n"),
          std::string("- data: `train.bin:3`, `more.bin`\n"),
          format_text(
              "- training: 3 steps, 512 tokens; loss of the last 3 steps %.4f nats a token; validation loss %.4f", mean,
              logged(run_folder, "val_loss").back())})
        if (card.find(text) == std::string::npos)
            check_failed(__FILE__, __LINE__, "no '%s' in %s", text.c_str(), card.c_str());
    CHECK(card.find(folder.path) == std::string::npos);
    REQUIRE_GOOD(
        run({"--resume", "--out", run_folder, "--steps=4", "--allow-new-data", "--data", folder.file("more.bin")}));
    REQUIRE_GOOD(export_to(folder.file("new"), run_folder));
    CHECK(holds(read_file(folder.file("new/README.md")), "- data: `more.bin` since token 512, other data before"));
    const std::string later = folder.file("later"), odd = folder.file("a\n\xe9<b>");
    REQUIRE_GOOD(train({{"out", later}, {"init-from", run_folder + "/step_00000003/"}, {"steps", "1"}}));
    REQUIRE_GOOD(export_to(odd, later));
    const std::string begun = read_file(odd + "/README.md");
    CHECK(begun.find("\n# a\\x0a\\xe9<b>\n") != std::string::npos);
    CHECK(begun.find("from_pretrained(\"a\\n\\udce9<b>\")") != std::string::npos);  // the folder, as Python writes it
    CHECK(begun.find("- began with the weights of `run`\n") != std::string::npos);
}

PROGRAM_TEST(export_and_import_refuse_in_one_line) {
    const std::string run_folder = folder.file("run"), hf = folder.file("hf"), to = folder.file("to");
    REQUIRE_GOOD(train({{"out", run_folder}}));
    CHECK_REFUSED(run({"export", "--out", to}), 2, "--from is missing");
    CHECK_REFUSED(run({"import", "--out", to}), 2, "--from is missing");
    CHECK_REFUSED(run({"export", "--from", run_folder}), 2, "export", "--out is missing");
    CHECK_REFUSED(export_to(to, folder.file("none")), 1, folder.file("none"), "no checkpoint");
    REQUIRE_GOOD(export_to(hf, run_folder));
    CHECK_REFUSED(run({"import", "--from", hf}), 2, "import", "--out is missing");
    CHECK_REFUSED(export_to(hf, run_folder), 1, "--out " + hf, "not empty");
    CHECK_REFUSED(import_to(run_folder, hf), 1, "--out " + run_folder, "not empty");
    CHECK_REFUSED(export_to(hf + "/config.json", run_folder), 1, "--out " + hf + "/config.json", "is a file");
    CHECK_REFUSED(import_to(to, folder.path), 1, folder.path, "no config.json", "export");
    CHECK_REFUSED(import_to(to, run_folder + "/step_00000002"), 1, "model_type is missing", "export");

    const std::string config = hf + "/config.json", model = hf + "/model.safetensors", good = read_file(config);
    write_file(config, "{\"model_type\": \"gpt2\"}");
    CHECK_REFUSED(import_to(to, hf), 1, config, "\"gpt2\"", "expected \"nsa\"");
    write_file(config, with_json_value(good, "vocab_size", "260"));
    CHECK_REFUSED(import_to(to, hf), 1, config, "resized to 260 tokens", "has 256");
    write_file(config, with_json_value(good, "heads", "3000"));
    CHECK_REFUSED(import_to(to, hf), 1, config, "--heads", "3000");
    write_file(config, with_json_value(good, "mlp_hidden", "33"));
    CHECK_REFUSED(import_to(to, hf), 1, model, "layers.0.mlp.fc1.weight", "[33, 16]");
    write_file(config, with_json_value(good, "layers", "2"));
    CHECK_REFUSED(import_to(to, hf), 1, model, "layers.1", "missing");
    write_file(config, good);
    const SafeTensors file(run_folder + "/step_00000002/model.safetensors");
    std::vector<TensorView> tensors = file.tensors;
    tensors.push_back(tensors.back());
    tensors.back().name = "lm_head.weight";
    write_safetensors(model, {}, tensors);
    CHECK_REFUSED(import_to(to, hf), 1, model, "lm_head.weight", "none of this model");
    tensors = file.tensors;
    tensors.back().dtype = "BF16", tensors.back().bytes /= 2;
    write_safetensors(model, {}, tensors);
    CHECK_REFUSED(import_to(to, hf), 1, model, tensors.back().name, "BF16", "float()");
    std::vector<float> bad(size_t(file.tensors.back().bytes / 4), 1.0f);
    bad[1] = NAN;
    tensors.back() = file.tensors.back();
    tensors.back().data = bad.data();
    write_safetensors(model, {}, tensors);
    CHECK_REFUSED(import_to(to, hf), 1, model, "number 1 of " + tensors.back().name, "nan");
    rename_path(model, hf + "/model.safetensors.index.json");  // as of a model in pieces
    CHECK_REFUSED(import_to(to, hf), 1, "max_shard_size", "safe_serialization");
    CHECK(!file_exists(to));  // none of them left anything
}

// A tensor that somebody gave the model, or its checkpoint, and that the PyTorch model does not have.
PROGRAM_TEST(export_refuses_what_the_pytorch_model_does_not_know) {
    for (const char* attention : {"nsa", "full"}) {
        TensorTable table(options_of(std::string("--attention ") + attention));
        require_known_to_pytorch(table);
        table.add("layers.1.attn.sinks.weight", vector_of(32).with(INIT_ONE));
        CHECK_FAILS(1, "layers.1.attn.sinks.weight", require_known_to_pytorch(table));
    }
    REQUIRE_GOOD(train({{"out", folder.file("run")}}));
    const std::string checkpoint = folder.file("run/step_00000002"), alone = folder.file("alone");
    std::filesystem::create_directory(alone);
    std::filesystem::copy_file(checkpoint + "/config.json", alone + "/config.json");
    const SafeTensors file(checkpoint + "/model.safetensors");
    std::vector<TensorView> tensors = file.tensors;
    tensors.push_back(tensors.back());
    tensors.back().name = "layers.0.attn.q_norm.weight";
    write_safetensors(alone + "/model.safetensors", {}, tensors);
    const Result more = export_to(folder.file("to"), alone);
    CHECK_EQUAL(more.status, 1);
    CHECK(more.err.find("\"layers.0.attn.q_norm.weight\" is none of this model's") != std::string::npos);
    CHECK(!file_exists(folder.file("to")));
}

PROGRAM_TEST(export_leaves_nothing_half_done_on_a_full_disk) {
    Start full;
    full.largest_file = 5000;
    REQUIRE_GOOD(train({{"out", folder.file("run")}}));
    CHECK_REFUSED(run({"export", "--from", folder.file("run"), "--out", folder.file("hf")}, full), 1, "cannot write",
                  folder.file("hf"));
    CHECK(names_in(folder.file("hf")).empty());
    REQUIRE_GOOD(export_to(folder.file("hf"), folder.file("run")));  // an empty folder is taken
    CHECK_REFUSED(run({"import", "--from", folder.file("hf"), "--out", folder.file("back")}, full), 1, "cannot write",
                  folder.file("back"));
    CHECK(names_in(folder.file("back")).empty());
    REQUIRE_GOOD(import_to(folder.file("back"), folder.file("hf")));
}

// A run with --keep removes what somebody reads; the newest is there at any time.
PROGRAM_TEST(checkpoints_removed_while_they_are_read_are_no_damage) {
    REQUIRE_GOOD(train({{"out", out}, {"dim", "256"}, {"mlp-hidden", "2048"}}));
    std::atomic<bool> read_enough{false};
    std::thread trainer([&] {
        for (int64_t step = 3; !read_enough; step++) {
            const std::string from = checkpoint_folder(out, step - 1), to = checkpoint_folder(out, step);
            copy_folder(from, to + ".writing");
            replace_in_file(to + ".writing/config.json", "{", "{ ");
            const Checkpoint before = read_manifest(from);
            std::vector<FileRecord> files = before.files;
            for (FileRecord& file : files)
                if (file.name == "config.json") {
                    const std::string bytes = read_file(to + ".writing/config.json");
                    file.size = bytes.size(), file.crc32c = crc32c(0, bytes.data(), bytes.size());
                }
            commit_checkpoint(out, step, files, before.state_text);
            rename_path(from, from + ".removing");
            remove_tree(from + ".removing");
        }
    });
    for (int i = 0; i < 300; i++) {
        Config c;
        c.from = out, c.at_step = "last", c.branches = "all";
        std::string error = error_of([&] { open_trained_model(c); });
        CHECK_EQUAL(error, std::string());
    }
    read_enough = true;
    trainer.join();
}

PROGRAM_TEST(verbs_take_the_checkpoint_of_step) {
    const std::string run_folder = folder.file("run");
    REQUIRE_GOOD(train({{"out", run_folder}, {"steps", "3"}, {"save-every", "1"}}));
    write_file(folder.file("val.bin"), shard(random_tokens(300, 1)));
    const std::string second = run_folder + "/step_00000002";
    REQUIRE_GOOD(export_to(folder.file("hf"), run_folder, {"--step", "2"}));
    CHECK(read_file(folder.file("hf/model.safetensors")) == read_file(second + "/model.safetensors"));
    for (const Words& verb : {Words{"sample", "--tokens", "4", "--prompt", "a"},
                              Words{"eval", "--val-data", folder.file("val.bin")}, Words{"export", "--out", "x"}}) {
        const Words threads = verb[0] == "export" ? Words() : Words{"--threads", "1"};
        CHECK_REFUSED(run(joined(joined(verb, threads), {"--from", run_folder, "--step", "4"})), 1, run_folder,
                      "--step 4", "only of: 1 2 3");
        if (verb[0] == "export") continue;
        const Result by_step = run(joined(joined(verb, threads), {"--from", run_folder, "--step", "2"})),
                     by_folder = run(joined(joined(verb, threads), {"--from", second}));
        REQUIRE_GOOD(by_step);
        REQUIRE_GOOD(by_folder);
        CHECK_EQUAL(by_step.out, by_folder.out);
    }
    std::string bytes = read_file(second + "/model.safetensors");
    bytes.back() ^= 1;
    write_file(second + "/model.safetensors", bytes);
    CHECK_REFUSED(export_to(folder.file("hf2"), run_folder, {"--step", "2"}), 1, second, "checksum");
}
