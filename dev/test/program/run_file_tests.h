// run_file_tests.h: the files that a run writes, the safetensors reader against damaged ones, and --dump-state.
#pragma once
#include "program.h"

// ---------------------------------------------------------------------------------------------------------------------
// Files.

PROGRAM_TEST(run_writes_the_tensors_of_the_design) {
    struct {
        std::string name, command;
        std::map<std::string, std::vector<int64_t>> tensors;
    } const cases[] = {
        {"nsa", "small", tensors_of_the_design(256, 16, 1, 2, 1, 8, 8, 8, 32, true)},
        {"full", "small --attention=full --layers=2", tensors_of_the_design(256, 16, 2, 2, 1, 8, 8, 8, 32, false)},
        {"tiny", "--total-batch=512 --eval-batches=1 --sample-tokens=0 --warmup=0",
         tensors_of_the_design(256, 128, 2, 4, 2, 32, 8, 32, 512, true)}};
    for (const auto& c : cases) {
        REQUIRE_GOOD(run(c.command + " --steps=1 --out=@/" + c.name));
        const std::string checkpoint = file(c.name) + "/step_00000001/";
        const SafeTensors model(checkpoint + "model.safetensors");
        CHECK_EQUAL(model.tensors.size(), check_tensors(model, c.tensors, ""));
        CHECK_EQUAL(model.metadata.at("format"), "pt");  // transformers' loaders look for it
        uint64_t header;
        std::memcpy(&header, read_file(model.path).data(), 8);
        CHECK_EQUAL(header % 8, 0u);                        // so that others may map the data
        const SafeTensors moments(checkpoint + OPTIMIZER);  // of one rank: every tensor whole, as a row
        std::map<std::string, std::vector<int64_t>> rows;
        for (const auto& [tensor, shape] : c.tensors) {
            const int64_t count = shape.size() == 2 ? shape[0] * shape[1] : shape[0];
            rows[format_text("%s[0:%d]", tensor, count)] = {count};
        }
        CHECK_EQUAL(moments.tensors.size(), check_tensors(moments, rows, "m.") + check_tensors(moments, rows, "v."));
        bool moved = false, right = true;
        for (const TensorView& t : moments.tensors)
            for (const float x : values_of<float>(t))
                moved = moved || x != 0, right = right && (t.name[0] == 'm' ? std::isfinite(x) : x >= 0);
        CHECK(moved && right);

        // The count that the program prints is that of the file.
        size_t parameters = 0;
        for (const TensorView& t : model.tensors) parameters += size_t(t.elements());
        CHECK(holds(printed(c.command + " --steps=0 --out=@/none"), format_text(", %d parameters (", parameters)));
    }
}

PROGRAM_TEST(run_config_and_manifest_hold_every_field) {
    const std::string out = file("quote\" and \\"), prompt = "two\nlines \"quoted\" \xff";
    REQUIRE_GOOD(train({{"out", out},
                        {"prompt", prompt},
                        {"seed", "9000000000000000"},
                        {"lr", "0.00123456789012345"},
                        {"steps", "1"}}));
    const Json config = parse_json(read_file(out + "/step_00000001/config.json"), "config.json");
    const std::map<std::string, double> numbers = {
        {"layers", 1},    {"dim", 16},         {"heads", 2},         {"kv_groups", 1},
        {"head_dim", 8},  {"cmp_block", 8},    {"cmp_stride", 4},    {"slc_block", 8},
        {"slc_count", 4}, {"window", 16},      {"phi_hidden", 8},    {"mlp_hidden", 32},
        {"seq_len", 64},  {"vocab_size", 256}, {"rope_base", 10000}, {"norm_eps", 1e-6}};
    const std::map<std::string, std::string> texts = {
        {"architecture", "nsa"}, {"attention", "nsa"}, {"branches", "all"}, {"tokenizer", "bytes"},
        {"qk_norm", "off"},      {"smear", "off"},     {"head", "tied"}};
    for (const auto& [key, value] : numbers) CHECK_EQUAL(config.number(key, "config.json"), value);
    for (const auto& [key, value] : texts) CHECK_EQUAL(config.string(key, "config.json"), value);
    CHECK_EQUAL(config.keys.size(), numbers.size() + texts.size());

    const Json manifest = parse_own_json(read_file(out + "/run.json"), "run.json");
    const Checkpoint saved = read_manifest(out + "/step_00000001");
    const Json& state = saved.state;
    for (const Json* run : {&manifest, state.find("options")}) {
        REQUIRE(run != nullptr);
        CHECK_EQUAL(run->string("program", ""), "train_nsa");
        for (const Option& o : OPTIONS) {
            if (!(o.verbs & TRAIN) || o.flag) continue;
            const Json* value = run->find(underscored(o.name));
            tests().checks++;
            if (!value || value->kind != (o.integer || o.real ? Json::Number : Json::String))
                check_failed(__FILE__, __LINE__, "%s is missing or of another kind", o.name);
        }
        CHECK(run->string("out", "") == out && run->string("prompt", "") == prompt);
        CHECK_EQUAL(run->integer("seed", ""), int64_t(9000000000000000));
        CHECK_EQUAL(run->number("lr", ""), 0.00123456789012345);
        CHECK_EQUAL(run->integer("total_batch", ""), int64_t(128));
    }
    CHECK(saved.step == 1 && state.integer("last_update", "") == 1);
    const char* const loader[] = {"9000000000000000", "64", "", "2"};  // the third is the corpus's fingerprint
    REQUIRE(state.array("loader", "").size() == 4);
    for (size_t i : {0, 1, 3}) CHECK_EQUAL(state.array("loader", "")[i].text, std::string(loader[i]));
}

PROGRAM_TEST(run_logs_have_the_promised_form) {
    REQUIRE_GOOD(run("small --layers=2 --steps=6 --eval-every=2 --slc-count=5 --schedule=linear --warmup=2"));
    const std::regex validation("s:([0-9]+) tel:([0-9]+\\.[0-9]+)"),
        training("s:([0-9]+) trl:([0-9]+\\.[0-9]+) lr:([0-9.]+e[+-][0-9]+) norm:([0-9]+\\.[0-9]+)");
    std::map<int, double> val_loss, train_loss;
    size_t lines = 0;
    for (const std::string& line : lines_of(losses_of(out))) {
        std::smatch m;
        lines++;
        if (std::regex_match(line, m, validation)) {
            val_loss[std::stoi(m[1])] = std::stod(m[2]);
        } else if (std::regex_match(line, m, training)) {
            const int s = std::stoi(m[1]);
            train_loss[s] = std::stod(m[2]);
            // %.6e of the schedule: linear, warm-up over two steps
            CHECK_NEAR(std::stod(m[3]), s <= 2 ? 0.01 * s / 2 : 0.01 * (0.1 + 0.9 * (1 - (s - 2) / 4.0)), 1e-8);
        } else {
            check_failed(__FILE__, __LINE__, "main.log: '%s'", line);
        }
    }
    CHECK(lines == 4 + 6 && val_loss.size() == 4 && train_loss.size() == 6);

    lines = 0;
    for (const Json& line : log_of(out)) {
        const auto number = [&](const char* field) { return line.number(field, ""); };
        lines++;
        const int step = int(line.integer("step", ""));
        if (const Json* start = line.find("start")) {  // how the program began, before all else
            CHECK(step == 0 && lines == 1 && start->integer("ranks", "") == 1);
            CHECK(!start->string("version", "").empty() && start->number("flops_per_token", "") > 0);
            continue;
        }
        if (line.find("val_loss")) {
            CHECK(step % 2 == 0 && number("val_loss") == val_loss.at(step) && number("val_tokens") == 256);
            // A document's separator is a token but no text.
            CHECK_NEAR(number("bits_per_byte"), number("val_loss") / std::log(2.0) * 256 / 255, 1e-5);
            continue;
        }
        CHECK(number("loss") == train_loss.at(step) && number("tokens") == step * 128);
        CHECK_NEAR(number("epoch"), step * 2 / 262143.0, 1e-6);
        for (const char* positive : {"time", "lr", "grad_norm", "ms", "tokens_per_s", "peak_memory_mib"})
            CHECK(number(positive) > 0);
        CHECK_NEAR(number("tokens_per_s") * number("ms"), 128e3, 0.01 * 128e3);
        CHECK_EQUAL(line.array("layers", "").size(), 2u);
        for (const Json& layer : line.array("layers", "")) {
            const std::vector<Json>&gate = layer.array("gate", ""), &share = layer.array("gate_share", "");
            REQUIRE(gate.size() == 3 && share.size() == 3);
            double gates = 0, shares = 0;
            for (size_t b = 0; b < 3; b++) gates += gate[b].number(""), shares += share[b].number("");
            for (size_t b = 0; b < 3; b++) {
                CHECK(gate[b].number("") > 0 && gate[b].number("") < 1);
                CHECK_NEAR(share[b].number(""), gate[b].number("") / gates, 2e-4);
            }
            CHECK_NEAR(shares, 1, 2e-4);  // four digits each
            CHECK(layer.number("gate_entropy", "") > 0 && layer.number("gate_entropy", "") <= std::log(3.0) + 1e-4);
            CHECK(layer.integer("blocks_max", "") == 5);
            // Of 8 blocks of 8 queries the first 5 see 1..5 blocks, the rest 5.
            CHECK_NEAR(layer.number("blocks_mean", ""), (1 + 2 + 3 + 4 + 5 * 4) / 8.0, 0.005);
            const double importance = layer.number("importance_selected", "");
            CHECK(importance > 0.3 && importance <= 1.0001);
        }
    }
    CHECK_EQUAL(lines, 1u + 6 + 4);
}

// Validation sees the same tokens every time: with a rate too small to change a weight no loss changes, not even in its
// last digit.
PROGRAM_TEST(run_validation_is_always_on_the_same_tokens) {
    write_small_corpus(folder, "train.bin", 1), write_small_corpus(folder, "val.bin", 2);
    const std::string on = "small --data=@/train.bin --val-data=@/val.bin ";
    REQUIRE_GOOD(run(on + "--lr=1e-30 --steps=4 --eval-every=1 --init=random"));
    const std::vector<double> losses = logged(out, "val_loss");
    CHECK(losses == std::vector<double>(5, losses.at(0)));
    // More than there is is all there is: 15 samples, in micro-batches of 2.
    REQUIRE_GOOD(run(on + "--steps=1 --eval-batches=1000 --out=@/all"));
    CHECK_EQUAL(logged(file("all"), "val_tokens")[0], 15 * 64.0);
}

// ---------------------------------------------------------------------------------------------------------------------
// The safetensors reader against damaged files.

PROGRAM_TEST(run_safetensors_reader_refuses_damaged_files) {
    const std::string path = folder.file("x.safetensors"), data(24, '\1');
    const std::string a = "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}",
                      b = "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[16,24]}";
    const std::string whole = safetensors_bytes("{\"__metadata__\":{\"k\":\"v\"}," + a + "," + b + "}", data);
    AddressLimit limit(64 << 20);
    const auto open = [&](const std::string& bytes) {
        write_file(path, bytes);
        return SafeTensors(path);
    };
    const auto header = [&](const std::string& text) { return safetensors_bytes(text, data); };
    CHECK_EQUAL(open(header("{\"__metadata__\":null," + a + "," + b + "}")).tensors.size(), 2u);
    {
        const SafeTensors good = open(whole);
        CHECK_EQUAL(good.tensors.size(), 2u);
        CHECK_EQUAL(good.metadata.at("k"), "v");
        CHECK(good.find("a")->bytes == 16 && good.find("b")->bytes == 8 && !good.find("c"));
        CHECK_FAILS(1, "c is missing", good.get("c", "F32", {1}));
        CHECK_FAILS(1, "U8", good.get("b", "F32", {8}));
        CHECK_FAILS(1, "[2, 2]", good.get("a", "F32", {4}));
        CHECK_EQUAL(static_cast<const char*>(good.get("b", "U8", {8}).data)[7], '\1');
    }
    CHECK_EQUAL(open(header("{" + b + "," + a + "}")).tensors.size(), 2u);  // the order of the header is free
    CHECK_EQUAL(open(safetensors_bytes("{}   ", "")).tensors.size(), 0u);
    CHECK_EQUAL(open(safetensors_bytes(
                         "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[0,0]},\"s\":{\"dtype\":\"F64\","
                         "\"shape\":[],\"data_offsets\":[0,8]}}",
                         std::string(8, '\0')))
                    .tensors.size(),
                2u);

    for (size_t n = 0; n < whole.size(); n++) CHECK_FAILS(1, path.c_str(), open(whole.substr(0, n)));
    CHECK_FAILS(1, path.c_str(), open(whole + '\0'));
    for (const uint64_t length : {uint64_t(0), uint64_t(whole.size()), uint64_t(1) << 31, uint64_t(1) << 62,
                                  uint64_t(1) << 63, ~uint64_t(0), ~uint64_t(0) - 7}) {
        std::string bytes = whole;
        std::memcpy(&bytes[0], &length, 8);
        CHECK_FAILS(1, path.c_str(), open(bytes));
    }
    const auto damaged = [&](const std::string& text) { CHECK_FAILS(1, path.c_str(), open(header(text))); };
    for (const char* text : {"", "[]", "{", "{}", "{\"a\":1}", "{\"a\":{}}"}) damaged(text);
    damaged("{\"__metadata__\":[]," + a + "," + b + "}");
    damaged("{\"__metadata__\":{\"k\":1}," + a + "," + b + "}");
    damaged("{" + a + "," + a + "}");
    damaged("{" + a + "}");
    const auto damaged_entry = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        damaged("{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}");
    };
    for (const char* offsets : {"[0]", "[0,24,24]", "\"0,24\"", "[0.0,24]", "[-24,0]", "[24,0]", "[0,25]", "[0,23]",
                                "[9223372036854775800,9223372036854775807]", "[0,18446744073709551616]"})
        damaged_entry("\"F32\"", "[6]", offsets);
    for (const char* shape : {"6", "[6.0]", "[-6]", "[-2,-3]", "[9223372036854775807]",
                              "[4611686018427387905,4]"})  // 4 * 4 * (2^62 + 1) is 16 modulo 2^64
        damaged_entry("\"F32\"", shape, "[0,24]");
    for (const char* offsets : {"[0,20]", "[4,24]"}) damaged_entry("\"F32\"", "[5]", offsets);
    for (const char* dtype : {"\"F31\"", "4", "\"U8\""}) damaged_entry(dtype, "[6]", "[0,24]");
    for (const char* dtype : {"\"F64\"", "\"U8\""})  // of U8 2^64 bytes, which would count as none
        damaged_entry(dtype, "[4294967296,4294967296]", "[0,0]");
    for (const char* other : {"[16],\"data_offsets\":[8,24]", "[4],\"data_offsets\":[20,24]",
                              "[16],\"data_offsets\":[0,16]"})  // overlap, hole, the same bytes twice
        damaged("{" + a + ",\"b\":{\"dtype\":\"U8\",\"shape\":" + other + "}}");
    CHECK_FAILS(1, path.c_str(), open(std::string(7, '\0')));
    CHECK_FAILS(1, "byte 13: not valid JSON: found 'x'", open(header("{\"a\":x}")));  // counted from the file
    CHECK_FAILS(1, folder.path.c_str(), SafeTensors(folder.path));
    CHECK_FAILS(1, "none", SafeTensors(folder.file("none")));

    // Any byte replaced by any of a few others: an Error, or a file whose tensors lie inside it.
    int refused = 0, read = 0;
    for (size_t i = 0; i < whole.size(); i++)
        for (const char other : {'\0', '\xff', '0', '9', '-', '"', '}'}) {
            std::string bytes = whole;
            if (bytes[i] == other) continue;
            bytes[i] = other;
            try {
                const SafeTensors found = open(bytes);
                uint64_t sum = 0, length = 0;
                for (const TensorView& t : found.tensors) {
                    for (uint64_t k = 0; k < t.bytes; k++)
                        sum += static_cast<const unsigned char*>(t.data)[k];  // faults far outside the file
                    length += t.bytes;
                }
                CHECK(sum > 0 && length == 24);
                read++;
            } catch (const Error& e) {
                CHECK(e.status == 1 && !std::strchr(e.what(), '\n') && std::strstr(e.what(), path.c_str()));
                refused++;
            }
        }
    CHECK(refused > 500 && read > 20);
}

// Layers in turn, one of NSA between two windows: each has the tensors of its kind, and the verbs work with that.
PROGRAM_TEST(run_layers_in_turn) {
    REQUIRE_GOOD(run("small --attention=window,nsa --layers=3 --steps=4"));
    const SafeTensors model(out + "/step_00000004/model.safetensors");
    for (const char* tensor : {"gate_proj.weight", "phi_k.fc1.weight", "k_slc_proj.weight"})
        for (const int layer : {0, 1, 2})
            CHECK_EQUAL(model.find(format_text("layers.%d.attn.%s", layer, tensor)) != nullptr, layer == 1);
    // The statistics of a layer stand in its place.
    CHECK(holds(read_file(out + "/log.jsonl"), "\"layers\":[{},{\"", "},{}]"));
    write("text", std::string(60, 'a'));
    for (const char* command :
         {"report --from @/run --html @/page", "inspect --from @/run --text @/text --json @/inspected",
          "sample --from @/run --prompt ab --tokens 9 --seed 1", "eval --from @/run --text @/text",
          // There and back again.
          "export --from @/run --out @/hf", "import --from @/hf --out @/back"})
        REQUIRE_GOOD(run(command));
    CHECK_EQUAL(run("eval --from @/back --text @/text").status, 0);
    CHECK(holds(read_file(file("page")), "\"gate_cmp/layer_1\""));
    const Json inspected = parse_json(read_file(file("inspected")), "inspected");
    REQUIRE(inspected.array("layers", "").size() == 1);
    CHECK_EQUAL(inspected.array("layers", "")[0].integer("layer", ""), int64_t(1));
    check({{"--resume @/run --attention nsa,window", 1, {"attention", "window,nsa"}}});
}

// ---------------------------------------------------------------------------------------------------------------------
// --dump-state.

// The dump of a golden file's options holds what PyTorch computed for them: the loss, and of every gradient the norm
// and a sum with random signs. The limits are those of cpu_golden_nsa.
PROGRAM_TEST(run_dump_state_is_what_pytorch_computes) {
    for (const std::string name : {"nsa", "full", "pattern"}) {
        const SafeTensors golden("dev/test/golden_" + name + ".safetensors");
        const auto value = [&](const std::string& name) { return values_of<double>(golden.get(name, "F64", {1}))[0]; };
        const std::string options = golden.metadata.at("options");
        REQUIRE_GOOD(run(options.substr(options.find(' ')) + " --threads 1 --dump-state @/" + name));
        const SafeTensors dump(file(name));
        const double limit = 2e-5;
        CHECK_NEAR(values_of<float>(dump.get("loss", "F32", {1}))[0], value("loss"), limit * value("loss"));
        for (const TensorView& t : dump.tensors) {
            if (t.name.compare(0, 5, "grad.")) continue;
            const std::vector<float> gradient = values_of<float>(t);
            double square = 0, dot = 0;
            for (size_t i = 0; i < gradient.size(); i++) {
                square += double(gradient[i]) * gradient[i];
                dot += (uint32_t(i) * 2654435761u >> 16 & 1) ? double(gradient[i]) : -double(gradient[i]);
            }
            const double norm = value("grad_norm." + t.name.substr(5));
            CHECK_NEAR(std::sqrt(square), norm, limit * norm);
            CHECK_NEAR(dot, value("grad_sign_dot." + t.name.substr(5)),
                       limit * norm * std::sqrt(double(gradient.size())));
        }
    }
}

PROGRAM_TEST(run_dump_state_holds_what_it_promises) {
    const int64_t B = 2, T = 64, V = 256, C = 16, L = 2, blocks = 8, count = 4, block = 8, groups = 2;
    const std::string options = "small --init=random --layers=2 --heads=4 --kv-groups=2 ";
    for (const bool nsa : {true, false}) {
        const std::string attention = nsa ? "nsa" : "full";
        REQUIRE_GOOD(run(options + "--attention=" + attention + " --dump-state=@/" + attention));
        CHECK(!file_exists(out));  // no run was begun
        const SafeTensors dump(file(attention));
        const auto expected = tensors_of_the_design(V, C, L, 4, groups, 8, 8, 8, 32, nsa);
        const size_t named = check_tensors(dump, expected, "") + check_tensors(dump, expected, "grad.") +
                             check_tensors(dump, {{"logits", {B, T, V}}, {"loss", {1}}}, "");
        CHECK_EQUAL(dump.tensors.size(), named + 2 + (nsa ? size_t(L) : 0));
        const std::vector<int32_t> inputs = values_of<int32_t>(dump.get("inputs", "I32", {B, T})),
                                   targets = values_of<int32_t>(dump.get("targets", "I32", {B, T}));
        for (int64_t b = 0; b < B; b++)
            for (int64_t t = 0; t + 1 < T; t++) CHECK_EQUAL(targets[size_t(b * T + t)], inputs[size_t(b * T + t + 1)]);
        const Json config = parse_json(dump.metadata.at("config"), "config");
        CHECK(config.integer("layers", "") == L && config.string("attention", "") == attention);
        CHECK(holds(dump.metadata.at("options"), "--init random") && dump.metadata.at("precision") == "fp32");
        for (int64_t layer = 0; layer < L && nsa; layer++) {
            const TensorView& t = dump.get(format_text("layers.%d.selection", layer), "U8", {B, groups, T, blocks});
            for (int64_t row = 0; row < B * groups * T; row++) {
                const char* chosen = static_cast<const char*>(t.data) + row * blocks;
                const int64_t own = row % T / block;
                CHECK_EQUAL(int64_t(std::count(chosen, chosen + own + 1, '\1')), std::min(own + 1, count));
                CHECK_EQUAL(int64_t(std::count(chosen, chosen + blocks, '\0')), blocks - std::min(own + 1, count));
                CHECK(chosen[0] == 1 && chosen[own] == 1 && chosen[std::max<int64_t>(own - 1, 0)] == 1);
            }
        }
    }
    // The limits of a comparison follow from the precision.
    REQUIRE_GOOD(run(options + "--cpu-dtype=bf16 --dump-state=@/bf16"));
    CHECK_EQUAL(SafeTensors(file("bf16")).metadata.at("precision"), std::string(HAVE_BF16 ? "bf16" : "fp32"));
    // The parameters are those that training starts from: with a learning rate of 0 they are the checkpoint's.
    REQUIRE_GOOD(run(options + "--lr=1e-30 --steps=1 --out=@/still"));
    const SafeTensors first(file("nsa")), model(file("still/step_00000001/model.safetensors"));
    const auto same = [](const TensorView& t, const SafeTensors& other) {
        return values_of<char>(other.get(t.name, t.dtype, t.shape)) == values_of<char>(t);
    };
    for (const TensorView& t : model.tensors) CHECK(same(t, first));
    // And so is the loss the first step's, and the gradient's norm.
    double square = 0;
    for (const TensorView& t : first.tensors)
        if (t.name.compare(0, 5, "grad.") == 0)
            for (const float g : values_of<float>(t)) square += double(g) * g;
    CHECK_NEAR(logged(file("still"), "loss")[0], values_of<float>(first.get("loss", "F32", {1}))[0], 1e-6);
    CHECK_NEAR(logged(file("still"), "grad_norm")[0], std::sqrt(square), 1e-5 * std::sqrt(square) + 1e-6);
    // With --resume: of the checkpoint.
    REQUIRE_GOOD(run(options));
    REQUIRE_GOOD(run(options + "--resume=on --dump-state=@/resumed"));
    const SafeTensors second(file("resumed")), moved(out + "/step_00000002/model.safetensors");
    for (const TensorView& t : moved.tensors) CHECK(same(t, second));
    CHECK(!same(second.get("inputs", "I32", {B, T}), first));
}
