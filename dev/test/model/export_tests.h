// export_tests.h: export and import through the built ./train_nsa: the files, that nothing is lost on the way there and
// back, and what is refused. That transformers loads an export and computes the same is dev/test_export.py's to see.
#pragma once
#include "../program/program.h"

PROGRAM_TEST(export_has_the_files_of_transformers_and_the_run_s_bytes) {
    for (const std::string attention : {"nsa", "full"}) {
        const std::string to = file("new/" + attention), checkpoint = out + "/step_00000002";
        REQUIRE_GOOD(run("small --init=random --attention=" + attention));
        REQUIRE_GOOD(run("export --from @/run --out " + to));
        CHECK_EQUAL(names_in(to),
                    "README.md config.json configuration_nsa.py generation_config.json model.safetensors "
                    "modeling_nsa.py tokenizer.json tokenizer_config.json");
        CHECK(read_file(to + "/model.safetensors") == read_file(checkpoint + "/model.safetensors"));
        for (const std::string name : {"/modeling_nsa.py", "/configuration_nsa.py"})
            CHECK(read_file(to + name) == read_file("lib/report/hf" + name));
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
            CHECK(holds(python, "self." + trained.keys[i] + " = " + trained.keys[i]));
        }
    }
}

// Ids by the rule of the byte alphabet, which tokenizer_tests.h checks against the published files.
PROGRAM_TEST(export_tokenizer_of_bytes_gives_each_byte_its_value) {
    REQUIRE_GOOD(run("small --steps=1"));
    REQUIRE_GOOD(run("export --from @/run --out @/hf"));
    const std::string path = file("hf/tokenizer.json");
    const Json root = parse_json(read_file(path), path), &model = root.get("model", path);
    const Json& vocabulary = model.get("vocab", path);
    CHECK_EQUAL(model.array("merges", path).size(), 0u);
    const std::pair<std::string, int64_t> known[] = {{std::string(1, '\0'), 0}, {"A", 'A'},      {"\u0120", ' '},
                                                     {"\u010A", '\n'},          {"\u00FF", 255}, {"\u0143", 0xAD}};
    for (const auto& [text, id] : known) CHECK_EQUAL(vocabulary.integer(text, path), id);
    std::set<int64_t> ids;
    for (const Json& id : vocabulary.items) ids.insert(id.integer(path));
    CHECK(vocabulary.keys.size() == 256 && ids.size() == 256 && *ids.begin() == 0 && *ids.rbegin() == 255);
    const std::string generation = file("hf/generation_config.json");
    CHECK_EQUAL(parse_json(read_file(generation), generation).integer("eos_token_id", generation), 0);
}

// From wherever a run was trained, through transformers and back: nobody says again where the vocabulary is.
PROGRAM_TEST(vocabulary_goes_where_the_model_goes) {
    write("a.txt", read_file("dev/MODEL.md").substr(0, 20000)), write("line.txt", "two words");
    REQUIRE_GOOD(run("vocabulary --in @/a.txt --size 300 --out @/vocabulary"));
    REQUIRE_GOOD(run("tokenize --in @/a.txt --out @/a --vocab-dir @/vocabulary"));
    REQUIRE_GOOD(run("small --out=@/first --tokenizer=gpt2 --vocab-dir=@/vocabulary --data=@/a_train_*.bin"));
    const Tokenizer original = Tokenizer::gpt2(file("vocabulary"));
    const std::string learnt_merges = read_file(file("vocabulary/vocab.bpe"));
    const Json learnt = parse_json(read_file(file("vocabulary/encoder.json")), "encoder.json");
    remove_tree(file("vocabulary"));
    rename_path(file("first"), file("run's"));
    const Words greedy = {"--temperature=0", "--tokens=8", "--prompt=two words", "--threads=1"};
    const auto sample = [&](const std::string& from) {
        const Result r = run(joined({"sample", "--from", from}, greedy));
        CHECK_EQUAL(r.status, 0);
        return r.out;
    };
    const std::string expected = sample("@/run's");
    copy_folder(newest_checkpoint(file("run's")).folder, file("lone"));  // far from its run's vocabulary
    check({{"sample --from @/lone", 2, {"--vocab-dir"}}});
    for (const char* command :
         {"eval --from @/run's --text @/line.txt --threads 1",
          "inspect --from @/run's --text @/line.txt --json @/i --threads 1", "export --from @/run's --out @/hf"})
        REQUIRE_GOOD(run(command));
    CHECK_EQUAL(names_in(file("hf")),
                "README.md config.json configuration_nsa.py generation_config.json merges.txt model.safetensors "
                "modeling_nsa.py tokenizer.json tokenizer_config.json vocab.json");
    CHECK(read_file(file("hf/merges.txt")) == learnt_merges);
    CHECK_EQUAL(parse_json(read_file(file("hf/vocab.json")), "vocab.json").to_text(), learnt.to_text());
    CHECK_EQUAL(sample("@/hf"), expected);  // warns that it has no manifest
    // transformers 5 saves tokenizer.json alone; its merges are lists in some versions, and end-of-text is added
    const std::string again = file("again"), json = again + "/tokenizer.json",
                      tokens = read_file(file("hf/tokenizer.json")), config = read_file(file("hf/config.json"));
    make_folders(again);
    for (const std::string name : {"/config.json", "/model.safetensors", "/tokenizer.json"})
        std::filesystem::copy_file(file("hf") + name, again + name);
    const size_t merges = tokens.find("\"merges\": [") + 11, end = tokens.find(", \"<|endoftext|>\": 299}");
    const std::string with_lists =
        tokens.substr(0, merges) +
        std::regex_replace(tokens.substr(merges), std::regex(R"re("([^", \\]+) ([^", \\]+)")re"), "[\"$1\", \"$2\"]");
    REQUIRE(end != std::string::npos);
    int imports = 0;
    const std::string untyped = std::regex_replace(tokens, std::regex("\"type\": \"BPE\", "), "");  // as GPT-2's own
    REQUIRE(untyped != tokens);
    for (const std::string& form : {tokens, with_lists, std::string(tokens).erase(end, 23).insert(end, "}"), untyped}) {
        write_file(json, form);
        CHECK_EQUAL(Tokenizer::gpt2(again).digest(), original.digest());
        const std::string back = file("back " + std::to_string(imports++)), data = file("a_train_*.bin");
        const std::string next = behind(printed({"import", "--from", again, "--out", back}), "next:   ");
        CHECK_EQUAL(sample(back), expected);
        REQUIRE_GOOD(execute({"/bin/bash", "-c", next + " --tokens 1 --threads 1"}));  // as it is printed
        REQUIRE_GOOD(run({"--init-from", back, "--data", data, "--out", back + "/on", "--steps=1", "--batch=2",
                          "--total-batch=128", "--threads=1", "--warmup=0"}));
        sample(back + "/on");
    }
    REQUIRE_GOOD(run("--resume @/run's --steps 3"));
    // What is not this vocabulary is named.
    const std::string other = std::regex_replace(tokens, std::regex("true, \"use_regex\": true"),
                                                 "true, \"use_regex\": false"),
                      pieces = std::regex_replace(tokens, std::regex("\"BPE\""), "\"WordPiece\"");
    const struct {
        std::string tokens, config;
        Words named;
    } cases[] = {{other, config, {"GPT-2's kind"}},
                 {pieces, config, {"GPT-2's kind"}},
                 {"{}", config, {"model"}},
                 {tokens, with_json_value(config, "vocab_size", "305"), {"(300, digest ", "(305, "}},
                 {tokens, with_json_value(config, "vocab_digest", "\"00000001\""), {"other tokens"}}};
    for (const auto& c : cases) {
        write_file(json, c.tokens), write_file(again + "/config.json", c.config);
        check({{"import --from @/again --out @/x", 1, joined({"@/again"}, c.named)}});
    }
    CHECK(!file_exists(file("x")));
}

PROGRAM_TEST(import_of_an_export_is_the_run) {
    REQUIRE_GOOD(run("small --init=random --steps=3 --save-every=1 --rope-base=500000"));
    REQUIRE_GOOD(run("export --from @/run --out @/hf"));
    REQUIRE_GOOD(run("import --from @/hf/ --out @/back"));
    for (const std::string name : {"/model.safetensors", "/config.json"})
        CHECK(read_file(file("back/step_00000000") + name) == read_file(out + "/step_00000003" + name));
    // trained on, both give the same losses; a model's shape that is not given is inherited
    for (const std::string source : {"run", "back"})
        REQUIRE_GOOD(
            run("--steps 2 --batch 2 --total-batch 128 --sample-tokens 0 --threads 1 --warmup 0 --init-from @/" +
                source + " --out @/on_" + source));
    const std::vector<double> losses = logged(file("on_run"), "loss");
    CHECK(losses.size() == 2 && losses == logged(file("on_back"), "loss"));
    // eval on the synthetic corpus takes its size from the options that import wrote
    REQUIRE_GOOD(run("eval --from @/back --val-data synthetic --eval-batches 1 --threads 1"));
    check({{"--resume @/back --steps 2 --warmup 0 --threads 1", 1, {"@/back", "--init-from"}}});
    // as transformers saves it: other keys, other order of the tensors
    const std::string config = read_file(file("hf/config.json"));
    make_folders(file("again"));
    write("again/config.json", "{\"dtype\": \"float32\", " + config.substr(1));
    const SafeTensors tensors(file("hf/model.safetensors"));
    write_safetensors(file("again/model.safetensors"), {{"format", "pt"}},
                      {tensors.tensors.rbegin(), tensors.tensors.rend()});
    REQUIRE_GOOD(run("import --from @/again --out @/back2"));
    CHECK(weights_of(file("back2"), 0) == weights_of(out, 3));
}

// The model card: numbers that the run printed, and no folder of this machine.
PROGRAM_TEST(export_writes_a_model_card) {
    REQUIRE_GOOD(run("small --eval-every=3"));
    REQUIRE_GOOD(run("small --eval-every=3 --resume=on --steps=3 --total-batch=256"));
    CHECK(symlink("real", file("link").c_str()) == 0);
    make_folders(file("real"));
    REQUIRE_GOOD(run("export --from @/run --out @/link/./"));
    const std::string card = read_file(file("real/README.md"));
    size_t parameters = 0;
    for (const TensorView& t : SafeTensors(file("real/model.safetensors")).tensors) parameters += size_t(t.elements());
    for (const std::string& text :
         Words{"\n# real\n", "from_pretrained(\"real\")", "from_pretrained(\"real\", ", "Native Sparse Attention",
               "No licence is stated", format_text("- %d parameters", parameters),
               "- tokenizer: bytes, 256 tokens; sequences of 64\n",
               format_text("- training: 3 steps, 512 tokens; validation loss %.4f nats a token\n",
                           logged(out, "val_loss").back())})
        if (!holds(card, text)) check_failed(__FILE__, __LINE__, "no '%s' in %s", text, card);
    CHECK(!holds(card, folder.path));
    const std::string odd = file("a\n\xe9<b>");
    REQUIRE_GOOD(run({"export", "--from=@/run", "--out", odd}));
    // The folder also as Python writes it.
    CHECK(holds(read_file(odd + "/README.md"), "\n# a\\x0a\\xe9<b>\n", "from_pretrained(\"a\\n\\udce9<b>\")"));
}

PROGRAM_TEST(export_and_import_refuse_in_one_line) {
    REQUIRE_GOOD(run("small"));
    REQUIRE_GOOD(run("export --from @/run --out @/hf"));
    const std::string import = "import --from @/hf --out @/to", config = "@/hf/config.json",
                      model = file("hf/model.safetensors"), good = read_file(file("hf/config.json"));
    check({
        {"export --out @/to", 2, {"--from is missing"}},
        {"import --out @/to", 2, {"--from is missing"}},
        {"export --from @/run", 2, {"export", "--out is missing"}},
        {"import --from @/hf", 2, {"import", "--out is missing"}},
        {"export --from @/none --out @/to", 1, {"@/none", "no checkpoint"}},
        {"export --from @/run --out @/hf", 1, {"--out @/hf", "not empty"}},
        {"import --from @/hf --out @/run", 1, {"--out @/run", "not empty"}},
        {"export --from @/run --out @/hf/config.json", 1, {"--out @/hf/config.json", "is a file"}},
        {"import --out @/to --from " + folder.path, 1, {folder.path, "no config.json", "export"}},
        {"import --out @/to --from @/run/step_00000002", 1, {"model_type is missing", "export"}},
    });
    const std::pair<std::string, Words> configs[] = {
        {"{\"model_type\": \"gpt2\"}", {config, "\"gpt2\"", "expected \"nsa\""}},
        {with_json_value(good, "vocab_size", "260"), {config, "vocab_size is 260", "has 256"}},
        {with_json_value(good, "heads", "3000"), {config, "--heads", "3000"}},
        {with_json_value(good, "mlp_hidden", "33"), {model, "layers.0.mlp.fc1.weight", "[33, 16]"}},
        {with_json_value(good, "layers", "2"), {model, "layers.1", "missing"}}};
    for (const auto& [text, named] : configs) {
        write("hf/config.json", text);
        check({{import, 1, named}});
    }
    write("hf/config.json", good);
    const SafeTensors sound(out + "/step_00000002/model.safetensors");
    const TensorView last = sound.tensors.back();
    const auto refused = [&](const std::vector<TensorView>& ends, const Words& named) {
        std::vector<TensorView> tensors(sound.tensors.begin(), sound.tensors.end() - 1);
        tensors.insert(tensors.end(), ends.begin(), ends.end());
        write_safetensors(model, {}, tensors);
        check({{import, 1, joined({model}, named)}});
    };
    TensorView more = last, narrow = last, infinite = last;
    more.name = "lm_head.weight";
    refused({last, more}, {"lm_head.weight", "none of this model"});
    narrow.dtype = "BF16", narrow.bytes /= 2;
    refused({narrow}, {last.name, "BF16", "float()"});
    std::vector<float> bad(size_t(last.bytes / 4), 1.0f);
    bad[1] = NAN, infinite.data = bad.data();
    refused({infinite}, {"number 1 of " + last.name, "nan"});
    rename_path(model, file("hf/model.safetensors.index.json"));  // as of a model in pieces
    check({{import, 1, {"max_shard_size", "safe_serialization"}}});
    CHECK(!file_exists(file("to")));  // none of them left anything
}

// A tensor that somebody gave the checkpoint, and that the model does not have.
PROGRAM_TEST(export_refuses_tensors_of_another_model) {
    REQUIRE_GOOD(run("small"));
    make_folders(file("alone"));
    std::filesystem::copy_file(out + "/step_00000002/config.json", file("alone/config.json"));
    const SafeTensors sound(out + "/step_00000002/model.safetensors");
    std::vector<TensorView> tensors = sound.tensors;
    tensors.push_back(tensors.back());
    tensors.back().name = "layers.0.attn.q_norm.weight";
    write_safetensors(file("alone/model.safetensors"), {}, tensors);
    const Result more = run("export --from @/alone --out @/to");
    CHECK(more.status == 1 && holds(more.err, "\"layers.0.attn.q_norm.weight\" is none of this model's"));
    CHECK(!file_exists(file("to")));
}

// What was begun on a full disk nobody takes for a whole export or import.
PROGRAM_TEST(export_half_done_is_no_export) {
    Start full;
    full.largest_file = 5000;
    REQUIRE_GOOD(run("small"));
    check({{"export --from @/run --out @/half", 1, {"cannot write", "@/half"}}}, full);
    check({{"import --from @/half --out @/x", 1, {"@/half", "no config.json"}}});
    REQUIRE_GOOD(run("export --from @/run --out @/hf"));
    check({{"import --from @/hf --out @/back", 1, {"cannot write", "@/back"}}}, full);
    check({{"sample --from @/back --prompt a", 1, {"@/back", "no checkpoint"}},
           {"import --from @/hf --out @/back", 1, {"@/back", "is not empty"}}});
    for (const std::string& name : folder_entries(file("hf"))) {  // cut short behind any of its files
        copy_folder(file("hf"), file("cut"));
        std::filesystem::remove(file("cut/config.json")), std::filesystem::remove(file("cut/" + name));
        check({{"import --from @/cut --out @/x", 1, {"@/cut", "no config.json"}}});
        const Result r = run("sample --from @/cut --prompt a");
        CHECK(r.status == 1 && holds(r.err, "error: ", file("cut")));
        remove_tree(file("cut"));
    }
}

// A run with --keep removes what somebody reads; the newest is there at any time.
PROGRAM_TEST(checkpoints_removed_while_they_are_read_are_no_damage) {
    REQUIRE_GOOD(run("small --dim=256 --mlp-hidden=2048"));
    std::atomic<bool> read_enough{false};
    std::thread trainer([&] {
        for (int64_t step = 3; !read_enough; step++) {
            const std::string from = checkpoint_folder(out, step - 1), to = checkpoint_folder(out, step);
            copy_folder(from, to + ".writing");
            replace_in_file(to + ".writing/config.json", "{", "{ ");
            const Checkpoint before = read_manifest(from);
            std::vector<FileRecord> files = before.files;
            for (FileRecord& record : files)
                if (record.name == "config.json") {
                    const std::string bytes = read_file(to + ".writing/config.json");
                    record.size = bytes.size(), record.crc32c = crc32c(0, bytes.data(), bytes.size());
                }
            commit_checkpoint(out, step, files, before.state_text);
            rename_path(from, from + ".removing");
            remove_tree(from + ".removing");
        }
    });
    for (int i = 0; i < 150; i++) {
        Config c;
        c.from = out, c.at_step = "last", c.branches = "all";
        CHECK_EQUAL(error_of([&] { open_trained_model(c); }), std::string());
    }
    read_enough = true;
    trainer.join();
}

PROGRAM_TEST(verbs_take_the_checkpoint_of_step) {
    const std::string second = out + "/step_00000002";
    REQUIRE_GOOD(run("small --steps=3 --save-every=1"));
    write("val.bin", shard(random_tokens(300, 1)));
    REQUIRE_GOOD(run("export --from @/run --step 2 --out @/hf"));
    CHECK(read_file(file("hf/model.safetensors")) == weights_of(out, 2));
    for (const std::string verb :
         {"sample --tokens 4 --prompt a --threads 1 ", "eval --val-data @/val.bin --threads 1 ", "export --out @/x "}) {
        check({{verb + "--from @/run --step 4", 1, {"@/run", "--step 4", "only of: 1 2 3"}}});
        if (verb[1] != 'x') CHECK_EQUAL(printed(verb + "--from @/run --step 2"), printed(verb + "--from " + second));
    }
    std::string bytes = weights_of(out, 2);
    bytes.back() ^= 1;
    write_file(second + "/model.safetensors", bytes);
    check({{"export --from @/run --step 2 --out @/hf2", 1, {second, "checksum"}}});
}
