// script_tests.h: the scripts: each parses and has a help; what `make demo`, config.sh and --version promise; and that
// those of dev/bench/evidence run; and the documents' links.
#pragma once
#include "program.h"

// A file that can be run.
inline void write_script(const std::string& path, const std::string& text) {
    write_file(path, "#!/bin/bash\n" + text);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

// Every script parses, says what it is for, in any folder, and does nothing else. Those in Python where there is one.
PROGRAM_TEST(run_scripts_have_help) {
    const bool python = execute({"/usr/bin/env", "python3", "-c", ""}).status == 0;
    std::vector<std::string> scripts;
    std::set<std::string> helps;  // each its own, not that of a file that it reads
    for (const char* pattern : {"data/*.sh", "dev/*.sh", "dev/*/*.sh", "dev/bench/evidence/*.sh", "lib/*/*.sh",
                                "data/*.py", "dev/*.py", "dev/*/*.py", "dev/bench/evidence/*.py"})
        for (const std::string& script : glob_files(pattern)) scripts.push_back(script);
    CHECK(scripts.size() >= 20);
    Start start;
    start.environment = {"PYTHONDONTWRITEBYTECODE=1"}, start.seconds = 20;
    for (const std::string& script : scripts) {
        const bool is_python = has_ending(script, ".py");
        if (is_python && !python) continue;
        const std::string shell = is_python ? "python3 \"$0\" --help" : "bash -n \"$0\" && bash \"$0\" --help";
        const Result r = execute(
            {"/bin/bash", "-c", "cd '" + folder.path + "' && " + shell, std::filesystem::absolute(script).string()},
            start);
        tests().checks++;
        if (r.status != 0 || r.out.size() < 60 || !r.err.empty() || !helps.insert(r.out).second)
            check_failed(__FILE__, __LINE__, "%s --help: status %d, '%s', stderr '%s'", script, r.status, r.out, r.err);
    }
    CHECK(std::filesystem::is_empty(folder.path));
}

// `make demo` with a small text and its own sources: one command, and everything is there.
PROGRAM_TEST_LONG(script_demo_goes_from_a_text_to_a_sample) {
    std::string text;
    for (int i = 0; i < 3000; i++) text += format_text("line %d of a small text, which repeats itself. ", i % 7);
    write("book.txt", text);
    for (const std::string& given : {file("book.txt"), std::string()}) {
        Start start;
        start.seconds = 120;
        start.environment = {"TEXT=" + given, "STEPS=2", "OUT=" + out, "PROGRAM=" + path()};
        const Result r = execute({"/bin/bash", std::filesystem::absolute("dev/demo.sh")}, start);
        CHECK_EQUAL(r.status, 0);
        CHECK(file_exists(out + "/report.html") && file_exists(out + "/vocabulary/vocab.bpe"));
        CHECK_EQUAL(glob_files(out + "/run/step_00000002/model.safetensors").size(), 1u);
        for (const char* verb : {"vocabulary", "tokenize", "train", "report", "sample"})
            CHECK(holds(r.out, "train_nsa " + std::string(verb) + " "));
        remove_tree(out);
    }
}

// Built in a folder inside another repository, as of a tarball, the program does not name that one's commit.
PROGRAM_TEST(script_version_is_not_of_a_repository_around) {
    if (execute({"/usr/bin/env", "git", "--version"}).status != 0)
        return skip("script_version_is_not_of_a_repository_around: no git on this machine");
    for (const std::string source : {"Makefile", "CHANGELOG.md", "lib/run/config.sh", "lib/cuda/gpu.mk"}) {
        make_folders(folder_of(file("inner/" + source)));
        std::filesystem::copy_file(source, file("inner/" + source));
    }
    const std::string commit = "git init -q . && git -c user.name=x -c user.email=x commit -q --allow-empty -m x && ";
    const auto version = [&](const std::string& before) {
        const Result r = execute({"/bin/bash", "-c",
                                  "cd " + folder.path + " && " + before +
                                      "cd inner && make -s info BUILD=b NO_CUDA=1 >/dev/null && cat b/version"});
        CHECK_EQUAL(r.status, 0);
        return r.out;
    };
    const std::string around = version(commit), own = version("cd inner && " + commit + "cd .. && ");
    CHECK(!holds(around, '-') && around.size() > 4);
    CHECK_EQUAL(own.find(around.substr(0, around.size() - 1) + "-"), 0u);
}

// A folder that somebody else filled stays as it is, and its own is made anew; apostrophes are quoted.
PROGRAM_TEST(script_demo_empties_no_folder_of_others) {
    const std::string text = file("Alice's $book.txt");
    make_folders(file("precious"));
    write("precious/thesis.txt", "years");
    write_file(text, "text");
    const auto demo = [&](const std::string& to) {
        return execute({"/bin/bash", std::filesystem::absolute("dev/demo.sh")},
                       {{"TEXT=" + text, "OUT=" + to, "PROGRAM=/bin/true"}});
    };
    const Result refused = demo(file("precious"));
    CHECK(refused.status == 1 && holds(refused.err, file("precious")));
    CHECK_EQUAL(read_file(file("precious/thesis.txt")), "years");
    for (int again = 0; again < 2; again++) {
        const Result r = demo(file("own"));
        CHECK(r.status == 0 && holds(r.out, " --in " + shell_word(text)));
        CHECK(file_exists(file("own/thesis.txt")) == (again > 0));
        write("own/thesis.txt", "years");
    }
}

// A compiler wrapper that puts its paths in quotes, as Intel's does, is an MPI like any other; so is one that calls the
// compiler by ccache, and what it says is for a shell, and goes through make.
PROGRAM_TEST(script_config_reads_what_wrappers_of_mpi_show) {
    const auto config = [&](const std::string& wrapper) {
        const Start start{{"CXX=g++", "CPPFLAGS=", "CXXFLAGS=", "LDFLAGS=", "GPU=cuda", "NO_CUDA=1", "NO_OMP=1",
                           "MARCH=native", "MPICXX=" + wrapper}};
        return execute({"/bin/bash", "lib/run/config.sh"}, start).out;
    };
    const std::string plain = config("mpicxx");
    if (!holds(plain, "HAVE_MPI")) return skip("quoted paths of an MPI: no mpicxx");
    const auto shown_by = [&](const std::string& edit) {
        write_script(folder.file("mpicxx"), "mpicxx -show | sed '" + edit + "'\n");
        return config(folder.file("mpicxx"));
    };
    CHECK_EQUAL(shown_by("s/ -\\([IL]\\)\\([^ ]*\\)/ -\\1\"\\2\"/g"), plain);
    CHECK_EQUAL(shown_by("s/^/ccache /"), plain);
    CHECK_EQUAL(shown_by("s/ -L/ -flto=auto -ffat-lto-objects -L/"), plain);
    CHECK(holds(shown_by("s/ -I/ -isystem /g"), "MPI_FLAGS := -isystem /"));
    CHECK(holds(shown_by("s|$| -Wl,-rpath,\\\\$ORIGIN/x|"), "\\$$ORIGIN/x\n"));
}

// An nvcc that comes into a folder of PATH is found by the next make.
PROGRAM_TEST(run_make_finds_what_came_later) {
    make_folders(file("bin"));
    const auto finds_nvcc = [&] {
        const std::string make = "MAKEFLAGS= PATH=$0/bin:$PATH make BUILD=$0/build NVCC=later_nvcc NO_CUDA= NO_MPI=1";
        REQUIRE_GOOD(execute({"/bin/bash", "-c", make + " $0/build/config.mk", folder.path}));
        return holds(read_file(file("build/config.mk")), "HAVE_CUDA := " + file("bin/later_nvcc"));
    };
    CHECK(!finds_nvcc());
    write_script(file("bin/later_nvcc"), "");
    CHECK(finds_nvcc());
}

// The scripts of the evidence, each once, on a text and a model that take a tenth of a second.
PROGRAM_TEST(run_scripts_of_the_evidence) {
    if (execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("scripts of the evidence: no python3");
    std::string lines;
    for (int i = 0; i < 3000; i++) lines += format_text("%d %d\n", i * i % 97, i % 7);
    write("text.txt", lines);
    REQUIRE_GOOD(run("tokenize --in @/text.txt --out @/shards/t --tokenizer bytes --val-fraction 0.1"));
    write("tiny.json", R"({"model": {"layers": 2, "dim": 16, "heads": 2, "kv-groups": 1, "head-dim": 8,
        "mlp-hidden": 32, "cmp-block": 4, "cmp-stride": 2, "slc-block": 4, "slc-count": 3, "window": 4,
        "phi-hidden": 4, "init": "random", "tokenizer": "bytes", "seq-len": 128},
        "training": {"batch": 1, "total-batch": 128, "warmup": 1}, "machine": {"threads": 1, "device": "cpu"},
        "tokens": 1024, "train": "*_train_*.bin", "held_out": "*_val_*.bin",
        "held_out_documents": {"sweep": 1, "whole": 1},
        "plan": ["sweep nsa 1e-3 2e-3", "run nsa 0.01 1 1024", "run full 0.01 5,6 256"]})");
    const auto script = [&](const std::string& name) {
        const std::string scripts = std::filesystem::absolute("dev/bench/evidence/");
        REQUIRE_GOOD(execute(joined({"/usr/bin/env", "PYTHONDONTWRITEBYTECODE=1"}, arguments(scripts + name))));
    };
    const std::string setting = " --setting @/tiny.json --results @/results --cache @/shards",
                      program = " --program " + path(), comparison = "run.py --work @/work" + program + setting;
    script(comparison);
    script("ngram.py" + setting);
    // What is there is not run again.
    const std::string found = read_file(file("results/runs.jsonl"));
    script(comparison);
    CHECK_EQUAL(read_file(file("results/runs.jsonl")), found);
}

// The comparison at 125M, every part of it with a tiny model.
PROGRAM_TEST_LONG(run_rehearsal_of_125m) {
    if (execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("125m: no python3");
    Start start;
    start.environment = {"PYTHONDONTWRITEBYTECODE=1"}, start.seconds = 1000;
    const Words words = {"/usr/bin/env", std::filesystem::absolute("dev/bench/evidence/at_125m.py"), "--dry-run"};
    const Result r = execute(joined(words, {"--out", out, "--program", path(), "--seconds", "900"}), start);
    REQUIRE_GOOD(r);
    for (const char* name : {"main", "eval", "sample", "report", "export", "resume", "floor", "parity", "arms"})
        CHECK(holds(r.out, std::string(name) + ": done after"));
}

// The link that a heading has on GitHub: lower case, words joined by -, without other signs.
inline std::string anchor_of(const std::string& heading) {
    std::string anchor;
    for (const unsigned char c : heading)
        if (std::isalnum(c) || c == '-' || c == '_' || c >= 0x80) anchor += char(std::tolower(c));
        else if (c == ' ') anchor += '-';
    return anchor;
}

// Every link to a file of the repository finds it, and every link into a document a heading there.
TEST(documents_have_no_dead_links) {
    using namespace program;
    std::vector<std::string> documents;
    for (const char* pattern : {"*.md", ".github/*.md", "dev/*.md", "dev/tour/*.md", "dev/bench/*.md"})
        for (const std::string& file : glob_files(pattern)) documents.push_back(file);
    CHECK(documents.size() >= 10);
    const std::regex link("\\]\\(([^)#:]*)(#[^)]*)?\\)"), heading("(^|\n)#+ ([^\n]*)");
    int links = 0;
    for (const std::string& document : documents) {
        const std::string text = read_file(document);
        for (std::sregex_iterator at(text.begin(), text.end(), link), end; at != end; ++at, links++) {
            const std::string target = at->str(1).empty() ? document : folder_of(document) + "/" + at->str(1);
            bool found = std::filesystem::exists(target);
            if (found && at->length(2) > 0) {
                const std::string page = read_file(target);
                std::sregex_iterator title(page.begin(), page.end(), heading);
                while (title != end && "#" + anchor_of(title->str(2)) != at->str(2)) ++title;
                found = title != end;
            }
            if (!found) check_failed(__FILE__, __LINE__, "%s: dead link %s", document, at->str());
        }
    }
    CHECK(links >= 100);
}
// The exercise of page 11 changes lines that others change too.
TEST(patches_apply) {
    if (std::system("git --version >/dev/null 2>&1") != 0) return skip("there is no git");
    CHECK_EQUAL(std::system("git apply --check dev/tour/11_head_scale.diff"), 0);
}
