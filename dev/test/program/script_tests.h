// script_tests.h: the scripts: each parses and has a help; what `make demo`, `make deps`, config.sh and --version
// promise; and those of dev/bench/evidence, beside formulas and beside the program.
#pragma once
#include <future>

#include "program.h"

// A file that can be run.
inline void write_script(const std::string& path, const std::string& text) {
    write_file(path, "#!/bin/bash\n" + text);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

// Every script parses, says what it is for, in any folder, and does nothing else. Those in Python where there is one.
TEST(run_scripts_have_help) {
    TempFolder folder;
    const bool python = program::execute({"/usr/bin/env", "python3", "-c", ""}).status == 0;
    std::vector<std::string> scripts;
    std::set<std::string> helps;  // each its own, not that of a file that it reads
    for (const char* pattern : {"data/*.sh", "dev/*.sh", "dev/*/*.sh", "dev/bench/evidence/*.sh", "lib/*/*.sh",
                                "data/*.py", "dev/*.py", "dev/*/*.py", "dev/bench/evidence/*.py"})
        for (const std::string& file : glob_files(pattern)) scripts.push_back(file);
    CHECK(scripts.size() >= 20);
    for (const std::string& script : scripts) {
        const bool is_python = has_ending(script, ".py");
        if (is_python && !python) continue;
        program::Start start;
        start.environment = {"PYTHONDONTWRITEBYTECODE=1"}, start.seconds = 20;
        const program::Result r = program::execute(
            {"/bin/bash", "-c",
             "cd '" + folder.path + (is_python ? "' && python3" : "' && bash -n \"$0\" && bash") + " \"$0\" --help",
             std::filesystem::absolute(script).string()},
            start);
        tests().checks++;
        if (r.status != 0 || r.out.size() < 60 || !r.err.empty() || !helps.insert(r.out).second)
            check_failed(__FILE__, __LINE__, "%s --help: status %d, '%s', stderr '%s'", script.c_str(), r.status,
                         r.out.c_str(), r.err.c_str());
    }
    CHECK(std::filesystem::is_empty(folder.path));
}

// `make demo` with a small text and its own sources: one command, and everything is there.
TEST_LONG(script_demo_goes_from_a_text_to_a_sample) {
    TempFolder folder;
    std::string text;
    for (int i = 0; i < 3000; i++) text += format_text("line %d of a small text, which repeats itself. ", i % 7);
    write_file(folder.file("book.txt"), text);
    for (const std::string& given : {folder.file("book.txt"), std::string()}) {
        program::Start start;
        start.seconds = 120;
        const std::string out = folder.file(given.empty() ? "sources" : "book");
        start.environment = {"TEXT=" + given, "STEPS=2", "OUT=" + out, "PROGRAM=" + program::path()};
        const program::Result r = program::execute({"/bin/bash", std::filesystem::absolute("dev/demo.sh")}, start);
        CHECK_EQUAL(r.status, 0);
        CHECK(file_exists(out + "/report.html") && file_exists(out + "/vocabulary/vocab.bpe"));
        CHECK_EQUAL(glob_files(out + "/run/step_00000002/model.safetensors").size(), 1u);
        for (const char* verb : {"vocabulary", "tokenize", "train", "report", "sample"})
            CHECK(r.out.find("train_nsa " + std::string(verb) + " ") != std::string::npos);
    }
}

// Built in a folder inside another repository, as of a tarball, the program does not name that one's commit.
TEST(script_version_is_not_of_a_repository_around) {
    TempFolder folder;
    for (const char* file : {"Makefile", "CHANGELOG.md", "lib/run/config.sh", "lib/cuda/gpu.mk"}) {
        const std::string to = folder.file(std::string("inner/") + file);
        make_folders(folder_of(to));
        std::filesystem::copy_file(file, to);
    }
    const std::string commit = "git init -q . && git -c user.name=x -c user.email=x commit -q --allow-empty -m x && ";
    const auto version = [&](const std::string& before) {
        const auto r =
            program::execute({"/bin/bash", "-c",
                              "cd " + folder.path + " && " + before +
                                  "cd inner && make -s info NO_CUDA=1 NO_MPI=1 >/dev/null && cat build/version"});
        CHECK_EQUAL(r.status, 0);
        return r.out;
    };
    if (program::execute({"/usr/bin/env", "git", "--version"}).status != 0)
        return skip("script_version_is_not_of_a_repository_around: no git on this machine");
    const std::string around = version(commit), own = version("cd inner && " + commit + "cd .. && ");
    CHECK(around.find('-') == std::string::npos && around.size() > 4);
    CHECK_EQUAL(own.find(around.substr(0, around.size() - 1) + "-"), 0u);
}

// A folder that somebody else filled stays as it is, and its own is made anew; apostrophes are quoted.
TEST(script_demo_empties_no_folder_of_others) {
    TempFolder folder;
    const std::string out = folder.file("precious"), text = folder.file("Alice's $book.txt");
    make_folders(out);
    write_file(out + "/thesis.txt", "years");
    write_file(text, "text");
    const auto demo = [&](const std::string& to) {
        program::Start start;
        start.environment = {"TEXT=" + text, "OUT=" + to, "PROGRAM=/bin/true"};
        return program::execute({"/bin/bash", std::filesystem::absolute("dev/demo.sh")}, start);
    };
    const auto refused = demo(out);
    CHECK_EQUAL(refused.status, 1);
    CHECK(refused.err.find(out) != std::string::npos);
    CHECK_EQUAL(read_file(out + "/thesis.txt"), std::string("years"));
    for (int again = 0; again < 2; again++) {
        const auto r = demo(folder.file("own"));
        CHECK_EQUAL(r.status, 0);
        CHECK(r.out.find(" --in " + shell_word(text)) != std::string::npos);
    }
    const auto made = program::execute({"/usr/bin/make", "-sn", "-f", "-", "demo", "TEXT=" + text, "BUILD=build"}, [&] {
        program::Start start;
        write_file(folder.file("makefile"),
                   "quoted = '$(subst ','\\'',$(1))'\n.PHONY: train_nsa\ntrain_nsa:;\n"
                   "include dev/dev.mk\n");
        start.input = folder.file("makefile");
        return start;
    }());
    CHECK(made.out.find("TEXT=" + shell_word(text) + " ") != std::string::npos);
}

// `make deps` on Ubuntu 24.04, whose MPICH is no use, with and without it.
TEST(script_deps_tells_of_the_mpich_that_starts_every_rank_alone) {
    TempFolder folder;
    const std::string release = folder.file("os-release"), log = folder.file("installed");
    write_file(folder.file("deps.sh"), read_file("lib/run/deps.sh"));
    program::replace_in_file(folder.file("deps.sh"), "/etc/os-release", release);
    make_folders(folder.file("bin"));
    for (const char* name : {"g++", "mpirun", "sudo"})
        write_script(folder.file("bin/") + name, "exec \"${@:-true}\"\n");
    write_script(folder.file("bin/apt-get"), "echo \"$@\" >>" + log + "\n");
    const struct {
        const char *codename, *shown;
        bool is_broken;
    } cases[] = {{"noble", "g++ -I/usr/include/x86_64-linux-gnu/mpich -lmpich", true},
                 {"noble", "g++ -I/usr/lib/x86_64-linux-gnu/openmpi/include -lmpi", false},
                 {"noble", "g++ -I/usr/local/include/mpich -lmpich", false},
                 {"bookworm", "g++ -I/usr/include/x86_64-linux-gnu/mpich -lmpich", false}};
    program::Start start;
    start.environment = {"PATH=" + folder.file("bin") + ":" + std::getenv("PATH")};
    for (const auto& c : cases) {
        write_file(release, std::string("UBUNTU_CODENAME=") + c.codename + "\n");
        write_script(folder.file("bin/mpicxx"), std::string("echo '") + c.shown + "'\n");
        write_file(log, "");
        const program::Result r = program::execute({"/bin/bash", folder.file("deps.sh")}, start);
        CHECK_EQUAL(r.status, 0);
        CHECK_EQUAL(r.out.find("deps: the MPICH of Ubuntu 24.04") == 0, c.is_broken);
        CHECK_EQUAL(r.out.find("deps: nothing is missing") == 0, !c.is_broken);
        CHECK_EQUAL(read_file(log).find("openmpi-bin libopenmpi-dev") != std::string::npos, c.is_broken);
    }
}

// A compiler wrapper that puts its paths in quotes, as Intel's does, is an MPI like any other.
TEST(script_config_reads_quoted_paths_of_an_mpi) {
    using namespace program;
    TempFolder folder;
    write_script(folder.file("mpicxx"), "mpicxx -show | sed 's/ -\\([IL]\\)\\([^ ]*\\)/ -\\1\"\\2\"/g'\n");
    const auto config = [&](const std::string& wrapper) {
        Start start;
        start.environment = {"CXX=g++",   "CPPFLAGS=", "CXXFLAGS=",    "LDFLAGS=",         "GPU=cuda",
                             "NO_CUDA=1", "NO_OMP=1",  "MARCH=native", "MPICXX=" + wrapper};
        return execute({"/bin/bash", "lib/run/config.sh"}, start).out;
    };
    const std::string plain = config("mpicxx");
    if (plain.find("HAVE_MPI") == std::string::npos) return skip("quoted paths of an MPI: no mpicxx");
    CHECK_EQUAL(config(folder.file("mpicxx")), plain);
}

namespace script_tests {

// Shards of a small text, and a setting in which a run takes a tenth of a second.
struct Comparison {
    TempFolder folder;
    const std::string scripts = std::filesystem::absolute("dev/bench/evidence").string();

    Comparison() {
        std::string text;
        for (int i = 0; i < 3000; i++) text += format_text("%d %d\n", i * i % 97, i % 7);
        write_file(folder.file("text.txt"), text);
        CHECK_EQUAL(program::run({"tokenize", "--in", folder.file("text.txt"), "--out", folder.file("shards/t"),
                                  "--tokenizer", "bytes", "--val-fraction", "0.1"})
                        .status,
                    0);
    }
    program::Result run(const std::string& script, const program::Words& more, int seconds = 60) {
        program::Start start;
        start.environment = {"PYTHONDONTWRITEBYTECODE=1"}, start.seconds = seconds;
        return program::execute(program::joined({"/usr/bin/env", scripts + "/" + script}, more), start);
    }
    // More: of run.py's options, or another script's.
    program::Words common() {
        return {"--setting", folder.file("tiny.json"), "--results", folder.file("results"),
                "--cache",   folder.file("shards")};
    }
    program::Words with_program() {
        return program::joined(common(), {"--work", folder.file("work"), "--program", program::path()});
    }
    void write_plan(const program::Words& plan) {
        std::string lines;
        for (const std::string& line : plan) lines += (lines.empty() ? "\"" : ", \"") + line + "\"";
        write_file(folder.file("tiny.json"), R"js({"model": {"layers": 2, "dim": 16, "heads": 2, "kv-groups": 1,
            "head-dim": 8, "mlp-hidden": 32, "cmp-block": 4, "cmp-stride": 2, "slc-block": 4, "slc-count": 3,
            "window": 4, "phi-hidden": 4, "init": "random", "tokenizer": "bytes", "seq-len": 128},
            "training": {"batch": 1, "total-batch": 128, "warmup": 1}, "machine": {"threads": 1, "device": "cpu"},
            "tokens": 1024, "train": "*_train_*.bin", "held_out": "*_val_*.bin",
            "held_out_documents": {"sweep": 1, "whole": 1}, "plan": [)js" +
                                                 lines + "]}");
    }
    program::Result run_plan(const program::Words& plan) {
        write_plan(plan);
        return run("run.py", with_program());
    }
    // By name, the lines of the results.
    std::map<std::string, Json> results() {
        std::map<std::string, Json> found;
        for (const std::string& line : program::lines_of(read_file(folder.file("results/runs.jsonl")))) {
            const Json one = parse_json(line, "a result");
            CHECK(found.emplace(one.string("name", "a result"), one).second);  // nothing is there twice
        }
        return found;
    }
    size_t count(const std::string& pattern) {
        size_t found = 0;
        for (const auto& [name, line] : results()) found += std::regex_match(name, std::regex(pattern));
        return found;
    }
};

inline std::string shard_text(const std::string& file) {
    const std::string bytes = read_file(file);
    std::string text;
    for (size_t i = SHARD_HEADER_BYTES; i < bytes.size(); i += 2) text += bytes[i];
    return text;
}

}  // namespace script_tests

// The protocol of a comparison: rates beyond the range, seeds, equal parameters, the same FLOPs as the program's own,
// nothing is run twice, and what was broken off is repeated.
TEST(run_comparison_of_arms) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("comparisons: no python3");
    Comparison c;
    const program::Words plan = {"sweep nsa 1e-3 2e-3",
                                 "sweep full 0.02 0.04 # a remark",
                                 "run window+optimizer=muon 0.01 5 256",
                                 "run alternating+attention=window,full full 5 256",
                                 "run interleaved 0.01 5 256",
                                 "longer nsa+smear+init=narrow 512 0.01 0.02"};
    const program::Result first = c.run_plan(plan);
    CHECK_EQUAL(first.err, "");
    CHECK_EQUAL(first.status, 0);
    std::map<std::string, Json> found = c.results();
    // Losses of such a run fall with the rate: two rates and four doublings. With all tokens the best one, its half and
    // its double at least, and both other seeds at the best of these.
    CHECK_EQUAL(c.count("nsa_lr0.032_seed0_tokens256"), 1u);
    for (const char* arm : {"nsa", "full"}) {
        CHECK(c.count(std::string(arm) + "_lr[0-9.]*_seed1_tokens1024") >= 3);
        CHECK(c.count(std::string(arm) + "_lr[0-9.]*_seed[23]_tokens1024") >= 2);
    }
    CHECK_EQUAL(c.count("nsa_lr0.064_seed1_tokens1024"), 1u);  // beyond the sweep's best
    // `longer`: at least one rate beyond the two of its range; at the best one three seeds, all with its own tokens.
    const std::string longer = "nsa\\+smear\\+init=narrow_lr[0-9.]*_seed";
    CHECK(c.count(longer + "1_tokens512") >= 3);
    for (const char* seed : {"2", "3"}) CHECK_EQUAL(c.count(longer + seed + "_tokens512"), 1u);
    CHECK_EQUAL(c.count(longer + ".*"), c.count(longer + "[123]_tokens512"));
    // One arm at the other's rate.
    double best = 0;
    for (const auto& [name, line] : found)
        if (std::regex_match(name, std::regex("full_lr.*_seed2_tokens1024"))) best = line.number("rate", "a result");
    const std::string of_two = format_text("alternating+attention=window,full_lr%g_seed5_tokens256", best);

    const double size = found.at("nsa_lr0.001_seed0_tokens256").number("parameters", "nsa");
    const double keys = found.at("nsa_lr0.001_seed0_tokens256").number("keys_per_query", "nsa");
    for (const std::string& name :
         {std::string("nsa_lr0.001_seed0_tokens256"), std::string("full_lr0.02_seed0_tokens256"), of_two,
          std::string("interleaved_lr0.01_seed5_tokens256"),
          std::string("window+optimizer=muon_lr0.01_seed5_tokens256")}) {
        const Json& line = found.at(name);
        CHECK(std::fabs(line.number("parameters", name) / size - 1) <= 0.02);
        const bool is_window = name.find("window+") == 0;
        if (is_window || name == of_two) CHECK_NEAR(line.number("keys_per_query", name), keys, 8);
        const std::string log = read_file(c.folder.file("work/" + name + "/log.jsonl"));
        const Json start = parse_json(log.substr(0, log.find('\n')), name).get("start", name);
        if (is_window) continue;  // of a branch that is left out the program counts the tensors
        CHECK_NEAR(line.number("flops", name) / 256, start.number("flops_per_token", name), 1);
        CHECK_EQUAL(line.number("parameters", name), start.number("parameters", name));
    }

    // Another start does what is missing, here the last line, of which half was written.
    const std::string file = c.folder.file("results/runs.jsonl"), text = read_file(file);
    write_file(file, text.substr(0, text.size() - 50));
    CHECK_EQUAL(c.run_plan(plan).status, 0);
    CHECK_EQUAL(c.results().size(), found.size());
    CHECK_EQUAL(read_file(file).substr(0, text.rfind('\n', text.size() - 2) + 1),
                text.substr(0, text.rfind('\n', text.size() - 2) + 1));
    const program::Result wrong = c.run_plan({"sweep nothing 1e-3 2e-3"});
    CHECK_EQUAL(wrong.status, 1);
    CHECK(wrong.err.find("'nothing' is no arm: expected one of nsa, full, window") != std::string::npos);
}

// A text of one's own as a corpus: two documents, which together are the text, and no byte of one in the other.
TEST(run_corpus_of_a_text) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("corpus: no python3");
    Comparison c;
    std::string text;
    for (int i = 0; i < 500; i++) text += format_text("line %d of a caf\u00e9\n", i);
    const std::string file = c.folder.file("text.txt"), cache = c.folder.file("cache");
    write_file(file, text);
    const program::Result made = c.run("corpus.py", {cache, "--text", file, "--program", program::path()});
    CHECK_EQUAL(made.err, "");
    CHECK_EQUAL(made.status, 0);
    const std::string train = shard_text(cache + "/train/text_train_000001.bin");
    const std::string held_out = shard_text(cache + "/heldout/text_val_000000.bin");
    CHECK_EQUAL(train.substr(1) + held_out.substr(1), text);  // behind an end-of-text each
    CHECK_NEAR(double(held_out.size()) / double(text.size()), 0.1, 0.01);
}

// A trained model goes on, with another base of RoPE and shorter sequences; two runners share the work.
TEST(run_extension) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("extension: no python3");
    Comparison c;
    CHECK_EQUAL(c.run_plan({"run nsa 0.01 1 1024", "run nsa 0.01 2 1024"}).status, 0);
    const std::string on = "nsa_lr0.01_tokens1024", longer = on + "+seq-len=64+rope-base=40000";
    const program::Words plan = {"run " + on + " 0.01 1 0", "run " + longer + " 0.01 1 256",
                                 "run " + longer + " 0.01 2 256"};
    c.write_plan(plan);
    auto second = std::async(std::launch::async, [&] { return c.run("run.py", c.with_program()); });
    const program::Result extended = c.run("run.py", c.with_program()), other = second.get();
    CHECK_EQUAL(extended.err + other.err, "");
    std::map<std::string, Json> found = c.results();
    CHECK_EQUAL(found.size(), 5u);
    for (const auto& [name, folder] :
         {std::pair<std::string, std::string>{on + "_lr0.01_seed1_tokens0", "nsa_lr0.01_seed1_tokens1024"},
          {longer + "_lr0.01_seed1_tokens256", longer + "_lr0.01_seed1_tokens256"}}) {
        const std::string run = c.folder.file("work/" + folder);
        const program::Result evaluated =
            program::run({"eval", "--from", run, "--val-data", c.folder.file("shards/t_val_*.bin"), "--batch", "1",
                          "--seq-len", "128", "--device", "cpu"});
        CHECK(evaluated.out.find(format_text("loss %.4f", found.at(name).number("held_out_loss", name))) !=
              std::string::npos);
    }
    const std::string run = c.folder.file("work/" + longer + "_lr0.01_seed2_tokens256/run.json");
    const Json options = parse_json(read_file(run), run);
    CHECK_EQUAL(options.integer("seq_len", run), int64_t(64));
    CHECK_EQUAL(options.integer("rope_base", run), int64_t(40000));
}

// Needles and hops: questions whose answers stand in the text, asked of a model that learnt nothing of them.
TEST(run_needles) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("needles: no python3");
    Comparison c;
    CHECK_EQUAL(c.run("needle.py", {"make", c.folder.file("needle"), "--program", program::path(), "--samples", "20",
                                    "--trials", "3", "--lengths", "256"})
                    .status,
                0);
    for (const char* seed : {"1", "2"})
        CHECK_EQUAL(program::run({"--out", c.folder.file("nsa_seed" + std::string(seed)), "--steps", "1", "--seed",
                                  seed, "--sample-tokens", "0"})
                        .status,
                    0);
    const std::string answers = c.folder.file("answers"), svg = c.folder.file("needle.svg");
    const program::Result tested =
        c.run("needle.py", {"test", "--program", program::path(), "--cache", c.folder.file("needle"), "--work",
                            c.folder.path, "--answers", answers, "nsa"});
    CHECK_EQUAL(tested.err, "");
    CHECK(std::regex_match(tested.out, std::regex("(nsa_seed[12], 256 bytes: [0-9]+ % answered\n){2}")));
    const program::Result shown = c.run("needle.py", {"show", "--answers", answers, "--svg", svg, "nsa"});
    CHECK_EQUAL(shown.err, "");
    const std::string hops = " \\| [0-9]+ \\([0-9]+ to [0-9]+\\)";
    CHECK(std::regex_search(shown.out, std::regex("\n\\| 256( \\| [0-9]+){8}(" + hops + "){3} \\|\n$")));
    const std::string picture = read_file(svg);
    size_t rectangles = 0;
    for (size_t at = 0; (at = picture.find("<rect", at)) != std::string::npos; at++) rectangles++;
    CHECK_EQUAL(rectangles, size_t(8));
    CHECK(picture.find(">NSA, AdamW</text>") != std::string::npos);
    // Beside another arm a title says only what the two do not share.
    CHECK_EQUAL(c.run("needle.py", {"show", "--answers", answers, "--svg", svg, "nsa", "nsa"}).status, 0);
    CHECK(read_file(svg).find(">NSA</text>") != std::string::npos);
    size_t items = 0;
    for (const std::string& line : program::lines_of(read_file(c.folder.file("needle/items_256.jsonl")))) {
        const Json item = parse_json(line, "an item");
        const std::string text = item.string("text", "an item");
        const size_t body = text.find('?') - 1;  // the question stands at the end
        char name = text.back();
        CHECK_EQUAL(int64_t(text.size() - body - 2), item.integer("hops", "an item"));
        for (int64_t hop = 0; hop < item.integer("hops", "an item"); hop++) {
            size_t fact = text.find(name);
            while (text[fact + 2] != '.') fact = text.find(name, fact + 1);  // where it stands first
            CHECK_EQUAL(int64_t(fact * 8 / body), item.integer("eighth", "an item"));
            name = text[fact + 1];
        }
        const std::vector<Json>& endings = item.array("endings", "an item");
        CHECK_EQUAL(endings[size_t(item.integer("label", "an item"))].text, std::string(1, name));
        items++;
    }
    CHECK_EQUAL(items, size_t(8 * (3 + 1 + 1)));
}

// The shares of a hand-made attention, and that of a model, whose loss stays if the branch is given the model's own
// blocks, and does not where it is given others.
TEST_LONG(run_shares_of_selection) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", "import torch, numpy"}).status != 0)
        return skip("shares of selection: no PyTorch that python3 finds");
    Comparison c;
    REQUIRE_GOOD(c.run("selection.py", {"--selftest"}));
    REQUIRE_GOOD(program::train({{"out", c.folder.file("nsa_seed1")}, {"init", "random"}}));
    std::string text;
    for (int i = 0; i < 63; i++) text += char('a' + i * i % 23);
    write_file(c.folder.file("documents.jsonl"), "{\"text\": \"" + text + "\"}\n");
    const program::Result r = c.run("selection.py", {"--cache", c.folder.path, "--work", c.folder.path, "--documents",
                                                     c.folder.file("documents.jsonl"), "--losses", "nsa"});
    CHECK_EQUAL(r.err, "");
    const std::string changed = " \\| [-+]0\\.[0-9]*[1-9][0-9]* [^|]*",
                      row = "\\| loss, less the model's own \\| \\+0.0000 ";
    CHECK(std::regex_search(r.out, std::regex(row + "[^|]*(" + changed + "){4}\\|")));
}

// The comparison at 125M, every part of it with a tiny model: all arms have two seeds, and each decision is printed.
TEST_LONG(run_rehearsal_of_125m) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("125m: no python3");
    Comparison c;
    const program::Result r =
        c.run("at_125m.py",
              {"--dry-run", "--out", c.folder.file("out"), "--program", program::path(), "--seconds", "900"}, 1000);
    CHECK_EQUAL(r.err, "");
    CHECK_EQUAL(r.status, 0);
    for (const char* name : {"main", "eval", "sample", "report", "export", "resume", "floor", "parity"})
        CHECK(r.out.find(std::string(name) + ": done after") != std::string::npos);
    for (const char* arm : {"N", "F", "H", "C", "A", "W"})
        CHECK(std::regex_search(r.out,
                                std::regex(format_text("\\| %s: `[^`]*`, [^\n]*\\([0-9.]*, [0-9.]*\\) \\|", arm))));
    for (const char* sentence :
         {"F beats H or W beyond", "N - F is above", "N reaches the training loss", "H is at or below N"})
        CHECK(std::regex_search(r.out, std::regex(std::string("\n(Yes|No): ") + sentence)));
    CHECK_EQUAL(c.run("at_125m.py", {"main", "--out", c.folder.file("out")}).status, 2);
}

// The n-gram's loss for one byte and for two, computed once more from the formula.
TEST(run_ngram_floor) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("n-grams: no python3");
    Comparison c;
    c.write_plan({});
    REQUIRE_GOOD(c.run("ngram.py", c.common()));
    const std::string train = shard_text(c.folder.file("shards/t_train_000001.bin"));
    const std::string held_out = shard_text(c.folder.file("shards/t_val_000000.bin"));
    std::map<char, double> bytes, followers, behind;  // behind: distinct bytes that follow one
    std::map<std::string, double> pairs;
    for (const char byte : train) bytes[byte]++;
    for (size_t i = 0; i + 1 < train.size(); i++) {
        if (pairs[train.substr(i, 2)]++ == 0) behind[train[i]]++;
        followers[train[i]]++;
    }
    const size_t samples = (held_out.size() - 1) / 128;
    double loss[2] = {};
    for (size_t i = 1; i <= samples * 128; i++) {
        const double distinct = double(bytes.size()), all = double(train.size());
        const double one = (bytes[held_out[i]] + distinct / 256) / (all + distinct);
        const char context = held_out[i - 1];
        const double two = (pairs[held_out.substr(i - 1, 2)] + behind[context] * one) /
                           std::max(followers[context] + behind[context], 1.0);
        loss[0] -= std::log(one) / double(samples * 128);
        loss[1] -= std::log(followers[context] > 0 ? two : one) / double(samples * 128);
    }
    const std::string out = "ngram_tokensall";
    const Json found = c.results().at(out).get("loss_by_order", out);
    // Short n-grams at the very beginning of the text are not counted there: 2e-3.
    CHECK_NEAR(found.number("1", out), loss[0], 2e-3);
    CHECK_NEAR(found.number("2", out), loss[1], 2e-3);
}
