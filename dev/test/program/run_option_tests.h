// run_option_tests.h: options, what tokenize reads, and what is printed, through the built ./train_nsa.
// refusal_tests.h has what is refused.
#pragma once
#include "program.h"

// ---------------------------------------------------------------------------------------------------------------------
// Options.

PROGRAM_TEST(run_options_are_parsed_strictly) {
    for (const Option& o : OPTIONS) {
        const std::string name = "--" + std::string(o.name), verb = first_verb(o);
        if (o.integer || o.real) {
            for (const char* wrong : {"", "nan", "-nan", "inf", "-inf", "1e999", "x", "1x", "1 ", " 1", "\t1", "1,5",
                                      "--1", "1 2", "0x1", "0x1p0", "1e", "."})
                CHECK_FAILS(2, name.c_str(), parse({verb, name + "=" + wrong}));
            for (const std::string& wrong : {format_text("%.17g", o.low + 0.5), format_text("%.0f.0", o.low),
                                             format_text("%.0fe0", o.low), format_text("+%.0f", o.low)})
                if (o.integer) CHECK_FAILS(2, name.c_str(), parse({verb, name + "=" + wrong}));
            for (const double end : {o.low, o.high}) {  // both ends belong to the range
                const Config c = parse({verb, name, format_text("%.17g", end)});
                CHECK_EQUAL(o.integer ? double(c.*o.integer) : c.*o.real, end);
                const double beyond = end == o.low ? end - (o.integer ? 1 : 1e-3) : o.integer ? end + 1 : end * 1.001;
                const std::string wrong = format_text("%.17g", beyond);
                for (const std::string& words : {name + " is '" + wrong + "'", std::string("..")})
                    CHECK_FAILS(2, words.c_str(), parse({verb, name + "=" + wrong}));
            }
        } else if (o.choices) {
            const std::string choices = o.choices;
            for (const std::string& wrong :
                 {std::string(), choices, choices + "|", choices.substr(0, choices.find('|') + 1), choices.substr(1)}) {
                CHECK_FAILS(2, name.c_str(), parse({verb, name + "=" + wrong}));
                CHECK_FAILS(2, o.choices, parse({verb, name + "=" + wrong}));  // what there is to choose from
            }
            std::istringstream words(choices);
            for (std::string word; std::getline(words, word, '|');)
                CHECK_EQUAL(parse({verb, name, word}).*o.text, word);
        } else if (o.text) {
            CHECK_EQUAL(parse({verb, name, "a b=c"}).*o.text, "a b=c");
            CHECK_EQUAL(parse({verb, name + "=--a=b"}).*o.text, "--a=b");
        } else if (o.list) {
            CHECK((parse({verb, name, "a.txt", "b.txt", "--threads", "1"}).*o.list ==
                   std::vector<std::string>{"a.txt", "b.txt"}));
        } else {
            CHECK(parse({verb, name}).*o.flag && parse({verb, name, "1"}).*o.flag &&
                  parse({verb, name + "=on"}).*o.flag && !(parse({verb, name + "=off"}).*o.flag) &&
                  !(parse({verb, name, "0"}).*o.flag) && !(parse({verb}).*o.flag));
            CHECK_FAILS(2, "it is a flag", parse({verb, name + "=yes"}));
        }
        // A verb takes the options that the table gives it, and no other.
        for (const VerbName& v : VERBS) {
            const Words words = {v.name, name + "=" + good_value(o)};
            if (o.verbs & v.verb) CHECK((parse(words), true));
            else CHECK_FAILS(2, (name + " is no option of '" + v.name + "'").c_str(), parse(words));
        }
        CHECK_FAILS(2, (name + " is given twice").c_str(),
                    parse({verb, name + "=" + good_value(o), name + "=" + good_value(o)}));
        // The default that help names can be typed.
        if (o.integer && o.default_text == std::string("auto")) CHECK_EQUAL(parse({verb, name, "auto"}).*o.integer, 0);
        if (!o.flag) CHECK_FAILS(2, (name + " needs a value").c_str(), parse({verb, name}));
        if (!o.flag) CHECK_FAILS(2, (name + " needs a value").c_str(), parse({verb, name, "--threads=1"}));
    }
}

// No shell would have changed these.
PROGRAM_TEST(run_takes_odd_names) {
    write("a{1..2}~b.txt", "text");
    REQUIRE_GOOD(run("tokenize --tokenizer bytes --in @/a{1..2}~b.txt --out @/~{a,b}"));
    REQUIRE_GOOD(train({{"prompt", "~/x {a,b}"}}));
    CHECK_EQUAL(shell_word("it's"), "'it'\\''s'");
    CHECK_EQUAL(command_line(parse({"--out", "a b", "--steps", "2"}), ""), "./train_nsa --steps 2 --out 'a b'");
}

static const program::Start UNWRAPPED = {{"COLUMNS=100000"}};

// Wrapped at what COLUMNS says, else at the terminal's width, else at 80: the same words, and no line that is longer.
PROGRAM_TEST(run_help_is_wrapped_at_the_terminals_width) {
    struct {
        const char* columns;
        int terminal;
        size_t width;
    } const cases[] = {{"", 0, 80}, {"nonsense", 0, 80}, {"64", 0, 64}, {"72", 120, 72}, {"", 120, 120}, {"", 67, 67}};
    for (const VerbName& v : VERBS) {
        const Words words = split_words(run({v.name, "--help"}, UNWRAPPED).out);
        for (const auto& c : cases) {
            Start start{{format_text("COLUMNS=%s", c.columns)}};
            start.terminal_columns = c.terminal;
            const Result help = run({v.name, "--help"}, start);
            CHECK(help.status == 0 && split_words(help.out) == words);
            size_t longest = 0;
            for (std::string line : lines_of(help.out)) {
                if (!line.empty() && line.back() == '\r') line.pop_back();  // a terminal's
                longest = std::max(longest, line.size());
            }
            CHECK(longest <= c.width && longest + 12 > c.width);
        }
    }
}

// "" where no line begins so.
inline std::string find_line(const std::string& text, const std::string& beginning) {
    for (const std::string& line : program::lines_of(text))
        if (line.compare(0, beginning.size(), beginning) == 0) return line;
    return "";
}

PROGRAM_TEST(run_help_lists_every_option_with_default_and_range) {
    for (const VerbName& v : VERBS) {
        const Result help = run({v.name, "--help"}, UNWRAPPED);
        REQUIRE_GOOD(help);
        const size_t presets = help.out.find("\npresets:");
        CHECK_EQUAL(presets != std::string::npos, bool(option_named("model").verbs & v.verb));
        for (const VerbName& other : VERBS) CHECK(holds(help.out, "\n  " + std::string(other.name) + " "));
        for (const Option& o : OPTIONS) {
            const std::string line = find_line(help.out.substr(0, presets), "  --" + std::string(o.name) + " ");
            tests().checks++;
            if (line.empty() == bool(o.verbs & v.verb))
                check_failed(__FILE__, __LINE__, "help of %s: --%s is %s", v.name, o.name,
                             line.empty() ? "missing" : "listed");
            if (line.empty()) continue;
            CHECK(holds(line, o.help) && std::strlen(o.help) > 3);
            const size_t facts = line.rfind('(');
            REQUIRE(facts != std::string::npos);
            CHECK(has_ending(line, std::string(", default ") + (*o.default_text ? o.default_text : "none") + ")"));
            char kind[16] = "", range[32] = "";
            if (o.integer || o.real) {
                REQUIRE(std::sscanf(line.c_str() + facts, "(%15s %31[^,]", kind, range) == 2);
                CHECK_EQUAL(std::string(kind), std::string(o.integer ? "integer" : "number"));
                const char* const dots = std::strstr(range, "..");
                CHECK(dots && std::stod(range) == o.low && std::stod(dots + 2) == o.high);
            } else if (o.choices) {
                CHECK_EQUAL(line.substr(facts + 1, std::strlen(o.choices) + 1), std::string(o.choices) + ",");
            }
        }
    }
    for (const VerbName& v : VERBS) CHECK_EQUAL(run({"help", v.name}).out, run({v.name, "--help"}).out);
    for (const Words& same : {Words{"help"}, {"-h"}, {"--help"}, {"--help", "--steps", "3"}})
        CHECK_EQUAL(run(same).out, run({"train", "--help"}).out);
}

// The line of a preset in --help, given as options, is the preset.
PROGRAM_TEST(run_help_tells_the_presets_as_they_are) {
    const std::string help = run({"--help"}, UNWRAPPED).out;
    for (const Config& p : PRESETS) {
        const std::string line = find_line(help, "  --model " + std::string(p.model) + " ");
        REQUIRE(!line.empty());
        const Config told = parse(split_words(line.substr(line.find("= ") + 2))),
                     preset = parse_and_preset({"--model", p.model});
        for (const Option& o : OPTIONS) {
            if (std::string(o.default_text) != "preset") continue;
            CHECK(told.is_given(o.name));
            if (std::string(o.name) != "total-batch") CHECK_EQUAL(value_text(told, o), value_text(preset, o));
        }
        CHECK_EQUAL(told.total_batch, p.total_batch);
    }
}

// --config: options of a file count as if they had been given, and the command line goes before them.
PROGRAM_TEST(run_options_come_from_a_file) {
    const std::string file = folder.file("options.json");
    const auto read = [&](const std::string& json, const Words& words = {}) {
        write_file(file, json);
        Config c = parse(joined({"--config", file}, words));
        read_options_file(c, false);
        apply_preset(c);
        return c;
    };
    const Config c = read(
        "{\"lr\": 0.003, \"seq_len\": 64, \"head-dim\": 16, \"attention\": \"full\", \"steps\": 7, "
        "\"resume\": true, \"model\": \"125m\"}",
        {"--lr", "0.5"});
    CHECK(c.is_given("steps") && c.lr == 0.5 && c.seq_len == 64 && c.head_dim == 16 && c.attention == "full");
    CHECK(c.steps == 7 && c.resume && c.layers == 12 && c.warmup == "700");  // the rest as in the file's preset
    const Config automatic = read("{\"batch\": \"auto\", \"log_every\": \"auto\"}");
    CHECK(!automatic.is_given("batch") && automatic.log_every == 0);
    for (const auto& [json, words] : std::vector<std::pair<std::string, std::string>>{
             {"{\"stepz\": 1}", "--stepz is no option (--help lists them)"},
             {"{\"tokens\": 1}", "--tokens is no option"},
             {"{\"steps\": -1}", "--steps is '-1'"},
             {"{\"steps\": 1.5}", "--steps is '1.5'"},
             {"{\"steps\": [1]}", "--steps is neither a number nor a text"},
             {"{\"steps\": 1, \"seq-len\": 2, \"seq_len\": 3}", "--seq-len stands there twice"},
             {"{\"config\": \"x\"}", "--config is for the command line"}})
        CHECK_FAILS(2, (file + ": " + words).c_str(), read(json));
    CHECK_FAILS(2, "run.json", read("{\"architecture\": \"nsa\", \"layers\": 2}"));  // a checkpoint's config.json
    CHECK_FAILS(1, "not valid JSON", read("steps = 1"));
    // A run's own run.json begins the same run in another folder.
    REQUIRE_GOOD(run("small --steps=3 --seed=5"));
    REQUIRE_GOOD(run("--config @/run/run.json --out @/run2"));
    CHECK(weights_of(out, 3) == weights_of(out + "2", 3));
    const std::string other = printed("--config @/run/run.json --out @/run3 --seed 6 --steps=2");
    CHECK(holds(other, "/run.json; the command line: --", " --steps 2 (there 3)", " --seed 6 (there 5)"));
    CHECK(file_exists(out + "3/step_00000002") && file_exists(out + "/step_00000003"));
}

PROGRAM_TEST(run_without_environment) {
    REQUIRE_GOOD(run("small --out=@/bare", {{"PATH=/usr/bin:/bin"}, true}));
    REQUIRE_GOOD(run("small"));
    CHECK(weights_of(file("bare"), 2) == weights_of(out, 2));
}

// ---------------------------------------------------------------------------------------------------------------------
// Text, output, folders.

// The numbers that tokenize prints, against the files: read, in documents, in tokens, in shards.
PROGRAM_TEST(run_tokenize_prints_numbers_that_add_up) {
    const std::string text = "\xEF\xBB\xBFone\n--\ntwo\n--\n\n--\nlast", json = "{\"t\": \"four\"}\n{\"t\": \"\"}\n";
    write("a.txt", text), write("b.jsonl", json);
    struct {
        const char* val_fraction;
        int ends, train, val;
    } const cases[] = {{"0", 4, 18, 0}, {"0.2", 4, 14, 4}, {"0.06", 5, 17, 2}};
    for (const auto& c : cases) {
        const std::string fraction = c.val_fraction, shards = file("x" + fraction);
        const std::string printed_now = printed(
            "tokenize --tokenizer bytes --in @/a.txt @/b.jsonl --text-key t --split-documents \\n--\\n "
            "--val-fraction " +
            fraction + " --out " + shards);
        CHECK(holds(printed_now, format_text("read 2 files, %d bytes", text.size() + json.size())));
        // One, two, last and four.
        CHECK(holds(printed_now, format_text("4 documents, 14 bytes of text: 14 tokens + %d end-of-text", c.ends),
                    format_text("= %d tokens\n", 14 + c.ends),
                    format_text("train %d + val %d = %d tokens\n", c.train, c.val, c.train + c.val)));
        CHECK_EQUAL(file_size(shards + "_train_000001.bin"), 1024u + 2 * unsigned(c.train));
        if (c.val) CHECK_EQUAL(file_size(shards + "_val_000000.bin"), 1024u + 2 * unsigned(c.val));
    }
}

PROGRAM_TEST(run_tokenize_reads_stdin) {
    const Start start{{}, false, 0, 0, file("input")};
    const auto tokens = [&](const std::string& text) {
        write("input", text);
        const Result r = run("tokenize --in - --out @/x --tokenizer bytes --val-fraction 0", start);
        if (r.status) return r.err;
        const std::string shard = read_file(file("x_train_000001.bin")).substr(1024);
        std::filesystem::remove(file("x_train_000001.bin"));
        std::string found;
        for (size_t i = 0; i < shard.size(); i += 2) found += shard[i] ? shard[i] : '|';
        return found;
    };
    CHECK_EQUAL(tokens("some text"), "|some text");
    CHECK_EQUAL(tokens("\xEF\xBB\xBF\n {\"text\": \"a\"}\n{\"text\": \"b\"}"), "|a|b");
    CHECK(holds(tokens("{this is no JSON}"), "stdin, taken as JSON lines since it begins with {: line 1: byte 1: "));
    CHECK(holds(tokens(""), "no text in"));
    CHECK(holds(tokens(GZIP_TEXT), "stdin is compressed by gzip"));
}

// On a terminal, and only there, what takes more than a second shows how far it is.
PROGRAM_TEST(run_progress_is_shown_on_a_terminal) {
    CHECK_EQUAL(mkfifo(file("slow.txt").c_str(), 0600), 0);
    for (const int columns : {0, 80}) {
        std::thread writer([&] {
            const int fd = open(file("slow.txt").c_str(), O_WRONLY | O_CLOEXEC);
            usleep(1800000);
            CHECK(::write(fd, "words", 5) == 5);
            close(fd);
        });
        Start start;
        start.terminal_columns = columns, start.input = file("slow.txt");
        const Result r = run(format_text("tokenize --in - --tokenizer bytes --out @/x%d", columns), start);
        writer.join();
        CHECK(r.status == 0 && r.err.empty());
        CHECK_EQUAL(holds(r.out, "\rtokenize: 0:01\x1b[K\r"), columns > 0);
        CHECK(!holds(r.out, "\x1b") || columns);
    }
}

// Every step is in the logs, whatever is printed: one in --log-every, or a line a second.
PROGRAM_TEST(run_log_every_thins_out_what_is_printed) {
    const auto steps_of = [&](const std::string& command) {
        std::string steps;
        for (const std::string& line : lines_of(printed(command))) {
            int step;
            if (std::sscanf(line.c_str(), "step %d | loss", &step) == 1 && holds(line, "grad_norm"))
                steps += std::to_string(step) + " ";
        }
        return steps;
    };
    CHECK_EQUAL(steps_of("small --steps=8 --log-every=3"), "1 3 6 8 ");
    CHECK_EQUAL(steps_of("small --steps=14 --resume=on --log-every=-"), "9 12 14 ");
    CHECK_EQUAL(steps_of("small --steps=16 --resume=on --log-every=1"), "15 16 ");
    CHECK_EQUAL(logged(out, "loss").size(), size_t(16));
    // Two hundred steps of a millisecond or two take a second or two: the first, the last, and a line for each second.
    const double begun = seconds_now();
    const std::string by_second = steps_of("small --steps=200 --log-every=- --out=@/by_second");
    CHECK(by_second.compare(0, 2, "1 ") == 0 && by_second.compare(by_second.size() - 5, 5, " 200 ") == 0);
    CHECK(double(std::count(by_second.begin(), by_second.end(), ' ')) <= 3 + (seconds_now() - begun));
}

// A folder alone is the run that a verb reads, or the one to resume.
PROGRAM_TEST(run_folders_need_no_option) {
    for (const char* command : {"small", "sample @/run --tokens 2", "report @/run @/run --html @/page.html",
                                "eval @/run --val-data synthetic --eval-batches 1"})
        REQUIRE_GOOD(run(command));
    CHECK(holds(printed("--resume @/run --steps 3"), "weights of " + out + "/step_00000002", "done:   1 step in "));
}

PROGRAM_TEST(run_omp_num_threads_is_bounded_by_the_processors) {
    const auto with_threads = [&](const std::string& count) {
        return execute(joined({"/usr/bin/env", "OMP_NUM_THREADS=" + count}, started("small --threads=- --steps=1")));
    };
    const int processors = usable_processors();
    const Result many = with_threads("100000");
    CHECK_EQUAL(many.status, 0);
    CHECK(holds(many.out, counted(processors, "CPU thread") + " each"));
    const Result none = with_threads("abc");  // OpenMP complains of it
    CHECK_EQUAL(none.status, 0);
    CHECK(holds(none.err, "OMP_NUM_THREADS") && holds(none.out, counted(processors, "CPU thread") + " each"));
    for (const char* one : {"1,2", "1 ", "1 , 2"}) CHECK(holds(with_threads(one).out, "1 CPU thread each"));
}
