// run_tests.h: the built ./train_nsa among others: closed streams, neighbours in its folder, ranks; from a text to a
// sample; and the functions around the model (sampling, schedule, batch sizes), compared with oracles written here.
#pragma once
#include "refusal_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// Streams, and neighbours in the folder.

// What is printed does not go into the first file that is opened, where stdout, stderr or stdin is closed.
PROGRAM_TEST(run_with_closed_streams) {
    CHECK_EQUAL(in_shell("\"$@\" >&-", "small --steps=3").status, 1);
    const std::vector<std::string> beats = lines_of(read_file(out + "/heartbeat_rank0.jsonl"));
    CHECK_EQUAL(beats.size(), 3u);
    for (const std::string& line : beats) CHECK(!parse_json(line, "heartbeat").string("phase", "heartbeat").empty());
    write("a.txt", std::string(100000, 'a'));
    for (const char* script : {"\"$@\" --out open", "\"$@\" --out closed 2>&-"})
        CHECK_EQUAL(in_shell("cd " + folder.path + "; " + script, "tokenize --tokenizer bytes --in @/a.txt").status, 0);
    for (const char* shard : {"_train_000001.bin", "_val_000000.bin"})
        CHECK(read_file(file(std::string("closed") + shard)) == read_file(file(std::string("open") + shard)));
}
// The reader is gone after a line: a checkpoint is written, as after SIGTERM.
PROGRAM_TEST(run_reader_that_goes_stops_it) {
    const Result piped = in_shell("\"$@\" | head -n 1", "small --steps=1000000 --eval-every=0");
    CHECK_EQUAL(piped.status, 75);
    CHECK_EQUAL(lines_of(piped.out).size(), 1u);
    CHECK_EQUAL(glob_files(out + "/step_*").size(), 1u);
}
PROGRAM_TEST(run_has_its_folder_to_itself) {
    REQUIRE_GOOD(run("small"));
    const int other = open(out.c_str(), O_RDONLY | O_DIRECTORY);  // as another run does
    CHECK_EQUAL(flock(other, LOCK_EX | LOCK_NB), 0);
    for (const char* command : {"small --out=@/run --steps=3", "small --out=@/run --steps=3 --resume=on"})
        check({{command, 1, {"--out", "@/run", "another run"}}});
    CHECK(!file_exists(out + ".1"));
    close(other);
    REQUIRE_GOOD(run("small --resume=on --steps=3"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Ranks.

RANKS_TEST(run_error_on_one_rank_ends_all) {
    write_good_and_bad_shard(folder);
    const struct {
        Command command;
        Words named;
    } cases[] = {{"small --batch=1 --data=@/train_*.bin --steps=20", {"error: rank 1: ", "token 300", "@/train_1.bin"}},
                 {"small --batch=1 --steps=100 --lr=10 --weight-decay=10 --schedule=constant --out=@/bad",
                  {"rank 0 on ", "in a row"}},
                 // Errors of all ranks, and usage.
                 {"small --batch=1 --data=@/none* --out=@/run2", {"@/none*", "rank "}},
                 {"small --batch=1 --dump-state=@/state --out=@/run2", {"--dump-state"}},
                 {"sample --from x", {"without mpirun"}}};
    for (const auto& c : cases) {
        const Result r = run_on(2, c.command);
        CHECK(r.status != 0 && r.status != 1000 && r.seconds < 20);
        for (const std::string& word : place(c.named)) CHECK(holds(r.err, word));
    }
    CHECK(!file_exists(out + "/step_00000020") && !file_exists(out + "2"));
}

// Where a launcher's variables say that there are two processes and MPI sees one, two runs would write over each other.
PROGRAM_TEST(run_refuses_to_be_independent_copies) {
    for (const char* variable : {"PMI_SIZE=2", "OMPI_COMM_WORLD_SIZE=2"}) {
        const Result r = run("small", {{variable}});
        CHECK(r.status == 1 || r.status == 2);
        CHECK_REFUSED(r, r.status, "2 ", "mpirun");
    }
    CHECK_EQUAL(glob_files(file("*")).size(), 0u);
}

// What a cluster's shell has in its environment is nothing to what is one process.
PROGRAM_TEST(run_verbs_of_one_process_ignore_launchers) {
    write("a.txt", "words");
    for (const char* variable : {"SLURM_NTASKS=8192", "SLURM_NTASKS=", "SLURM_STEP_ID=abc", "WORLD_SIZE=8", "RANK=1",
                                 "RANK=", "LOCAL_RANK=x"}) {
        const Start start{{variable, *variable == 'S' ? "RANK=0" : "SLURM_NTASKS=many"}};
        const std::string tokenize = "tokenize --tokenizer bytes --in @/a.txt --out @/";
        for (const std::string& command : Words{"--version", "help eval", tokenize + variable})
            REQUIRE_GOOD(run(command, start));
    }
    REQUIRE_GOOD(run("small --steps=1", {{"SLURM_NTASKS=8192"}}));
}

// ---------------------------------------------------------------------------------------------------------------------
// From a text to a sample.

namespace program {

inline std::string documents() { return read_file("README.md") + read_file("dev/GUIDE.md") + read_file("dev/LOG.md"); }

struct EvalLine {
    unsigned long long tokens = 0, samples = 0, all_samples = 0;
    double loss = 0, perplexity = 0, bits_per_byte = 0;
};
inline EvalLine parse_eval(const std::string& out) {
    EvalLine e;
    const char* const form =
        " on %llu tokens (%llu of %llu samples of 64): loss %lf, perplexity %lf, bits per byte %lf\n";
    REQUIRE(std::sscanf(out.c_str() + std::min(out.find(" on "), out.size()), form, &e.tokens, &e.samples,
                        &e.all_samples, &e.loss, &e.perplexity, &e.bits_per_byte) == 6);
    CHECK_NEAR(e.perplexity, std::exp(e.loss),
               5e-5 * std::exp(e.loss) + 5e-4);  // loss and perplexity were rounded to 4 and 3 digits
    return e;
}

// What every trained model must do with a prompt.
inline void check_samples(const InFolder& in) {
    const auto sample = [&](const std::string& more) {
        const std::string text = in.printed(joined(
            {"sample", "--from=@/run", "--prompt=The history of", "--tokens=24", "--threads=1"}, split_words(more)));
        CHECK_EQUAL(text.substr(0, 14), "The history of");
        CHECK(text.size() > 15 && text.back() == '\n');
        return text;
    };
    const std::string first = sample("--seed 1"), likeliest = sample("--seed 1 --temperature 0");
    CHECK_EQUAL(sample("--seed 1"), first);
    CHECK(sample("--seed 2") != first);
    for (const char* greedy : {"--seed 2 --temperature 0", "--seed 3 --top-k 1", "--seed 4 --top-p 0"})
        CHECK_EQUAL(sample(greedy), likeliest);
    CHECK_EQUAL(in.printed("sample --from @/run --prompt=--x --tokens 0"), "--x\n");
    CHECK(in.printed("sample --from @/run --tokens 5").size() >= 2);  // a new document
}

}  // namespace program

PROGRAM_TEST(run_from_text_to_sample_with_bytes) {
    write("a.txt", documents());
    CHECK_EQUAL(run("tokenize --tokenizer bytes --in @/a.txt --out @/s/a --val-fraction 0.05 --threads 2").status, 0);
    CHECK_EQUAL(file_size(file("s/a_train_000001.bin")) + file_size(file("s/a_val_000000.bin")),
                2 * 1024 + 2 * (file_size(file("a.txt")) + 2));
    const std::string trained = printed(
        "small --steps=30 --batch=8 --total-batch=1024 --dim=32 --eval-batches=1000 --sample-tokens=40 --prompt=The "
        "--init=standard --seed=3 --data=@/s/a_train_*.bin --val-data=@/s/a_val_*.bin");
    const std::vector<double> losses = logged(out, "val_loss");
    REQUIRE(losses.size() == 2);
    CHECK_NEAR(losses[0], std::log(256.0), 0.2);  // an untrained model knows nothing
    CHECK(losses[1] < losses[0] - 1.5);
    CHECK_NEAR(logged(out, "bits_per_byte")[1], losses[1] / std::log(2.0), 1e-5);  // a token is a byte

    const auto eval = [&](const std::string& more) {
        const EvalLine e = parse_eval(printed("eval --from @/run --val-data @/s/a_val_*.bin --threads 1 " + more));
        CHECK_NEAR(e.bits_per_byte, e.loss / std::log(2.0), 1.3e-4);  // both rounded to four digits
        return e;
    };
    // Every token but the first is asked for once, those behind the last whole sample too.
    const EvalLine all = eval("");
    const uint64_t targets = (file_size(file("s/a_val_000000.bin")) - 1024) / 2 - 1;
    CHECK_EQUAL(all.tokens, targets);
    CHECK(all.all_samples == (targets + 63) / 64 && all.samples == all.all_samples);
    for (const char* batch : {"--batch 8", "--batch 60000"})  // the second more than there are samples
        CHECK_NEAR(eval(batch).loss, all.loss, 1e-4);         // printed with four digits
    CHECK_EQUAL(eval("--batch 8 --eval-batches 2").tokens, 2 * 8 * 64ull);
    // What training said at its end, on the same samples: the whole ones.
    CHECK_NEAR(eval("--batch 1 --eval-batches " + std::to_string(targets / 64)).loss, losses[1], 1e-4);

    // The sample that training wrote at its end is the one that the verb writes.
    const std::string begin = "--- sample at step 30, 40 tokens ---\n";
    const size_t text = trained.find(begin) + begin.size(), end = trained.rfind("---\ndone:");
    REQUIRE(holds(trained, begin) && end != std::string::npos && end > text);
    CHECK_EQUAL(printed("sample --from @/run --prompt The --tokens 40 --seed 3 --threads 1"),
                trained.substr(text, end - text));
    check_samples(*this);
}

// Prompts from files, one after the other: each has what it has alone.
PROGRAM_TEST(run_sample_takes_prompts_from_files) {
    REQUIRE_GOOD(run("small --steps=20"));
    const auto sample = [&](const Words& words, const std::string& input = "") {
        Start start;
        start.input = input;
        return run(joined({"sample", "--from=@/run", "--tokens=12", "--threads=1", "--past-end"}, words), start).out;
    };
    const std::string one = sample({"--prompt", "First\nprompt"}), two = sample({"--prompt", "Second"}),
                      three = sample({"--prompt", "\"3\""}), none = sample({});
    const auto of_three = [](const std::string& a, const std::string& b, const std::string& c) {
        return "--- prompt 1 of 3 ---\n" + a + "\n--- prompt 2 of 3 ---\n" + b + "\n--- prompt 3 of 3 ---\n" + c;
    };
    write("one", "First\nprompt\r\n"), write("two", "Second");
    write("more.jsonl", "{\"text\": \"Second\"}\n\n{\"text\": \"\\\"3\\\"\"}\n");
    write("empty.jsonl", "{\"text\": \"Second\"}\n{\"text\": \"\"}\n{\"text\": \"\\\"3\\\"\"}\n");
    CHECK_EQUAL(sample({"--prompt-file", "@/one"}), one);
    CHECK_EQUAL(sample({"--prompt-file", "@/one", "@/more.jsonl"}), of_three(one, two, three));
    CHECK_EQUAL(sample({"--prompt-file", "@/empty.jsonl"}), of_three(two, none, three));
    CHECK_EQUAL(sample({"--prompt-file", "-"}, file("two")), two);
    CHECK_EQUAL(sample({"--prompt-file", "-"}, file("empty.jsonl")), of_three(two, none, three));
    // What looks like a mistake in a text is said by each verb: of many documents in one line.
    write("marked", "One.<|endoftext|>Two."), write("latin.txt", "caf\xe9");
    write("marked.jsonl", "{\"text\": \"1<|endoftext|>\"}\n{\"text\": \"2<|endoftext|>\"}\n");
    for (const std::string verb : {"sample --prompt-file", "eval --text", "inspect --json @/inspected --text"}) {
        const auto said = [&](const char* name) {
            const Result r = run(verb + " @/" + name + " --from @/run --threads 1");
            CHECK_EQUAL(r.status, 0);
            return r.err;
        };
        CHECK(holds(said("marked"), "<|endoftext|>"));
        if (verb[0] == 'i') continue;
        const std::string marked = said("marked.jsonl");
        CHECK(holds(marked, "2 times") && marked.find("<|endoftext|>") == marked.rfind("<|endoftext|>"));
        CHECK(holds(said("latin.txt"), "UTF-8"));
    }
    // Each verb is told what it would read: its own option from stdin, or a file where it reads no stdin.
    const std::string packed = file("a b.jsonl.gz"), command = "zcat '" + packed + "' ";
    write("a b.jsonl.gz", GZIP_TEXT), write("bad.jsonl", "{\"text\": \"a\"}\n{}\n");
    check(
        {{{"sample", "--from=@/run", "--prompt-file", packed}, 1, {command + "| ./train_nsa sample --prompt-file -"}},
         {{"eval", "--from=@/run", "--text", packed}, 1, {command + "| ./train_nsa eval --text -"}},
         {{"inspect", "--from=@/run", "--html=@/h", "--text", packed}, 1, {command + "| ./train_nsa inspect --text -"}},
         {{"eval", "--from=@/run", "--hellaswag", packed}, 1, {command + "> NEW"}},
         {{"vocabulary", "--in", packed, "--out=@/v"}, 1, {command + "| ./train_nsa vocabulary --in -"}},
         {"sample --from @/run --prompt-file @/bad.jsonl", 1, {"line 2", "text"}}});
}

// A model that has seen nothing but end-of-text says nothing else: the sample ends there, or goes on if it is told to.
PROGRAM_TEST(run_sample_ends_at_end_of_text) {
    write("ends.bin", shard(std::vector<uint16_t>(4000, 0)));
    REQUIRE_GOOD(run("small --data=@/ends.bin --steps=30"));
    const std::string sample = "sample --from @/run --tokens 5 --temperature 0";
    CHECK_EQUAL(run(sample).out, "\n");
    CHECK_EQUAL(run(sample + " --past-end").out, std::string(5 + 1, '\n'));
}

// Each line of stdin is continued as a prompt of its own.
PROGRAM_TEST(run_sample_continues_lines) {
    REQUIRE_GOOD(run("small --steps=60"));
    const Words sample = {"sample", "--from=@/run", "--tokens=10", "--threads=1", "--temperature=0"};
    const auto continued = [&](const std::string& prompt) { return printed(joined(sample, {"--prompt", prompt})); };
    write("lines", "The old\nA lamp\n");
    Start start;
    start.input = file("lines");
    const Result r = run(joined(sample, {"--interactive"}), start);
    REQUIRE_GOOD(r);
    CHECK_EQUAL(r.out, continued("The old") + continued("A lamp"));
}

// A vocabulary of one's own, all the way: learnt, written into shards, trained on, sampled, measured.
// export_tests.h goes on with one.
PROGRAM_TEST(run_from_text_to_sample_with_an_own_vocabulary) {
    write("a.txt", documents());
    write("b.txt", read_file("CHANGELOG.md") + read_file("train_nsa.cu"));
    const std::string learn = "vocabulary --in @/a.txt --size ";
    Start full_disk;
    full_disk.largest_file = 2000;
    check({{learn + "700 --out @/vocab", 1, {"cannot write", "vocab.bpe"}}}, full_disk);
    CHECK(glob_files(file("vocab*")).empty());
    REQUIRE_GOOD(run(learn + "700 --out @/vocab"));
    REQUIRE_GOOD(run(learn + "701 --out @/other"));
    REQUIRE_GOOD(run("vocabulary --in @/b.txt --size 700 --out @/twin"));  // of the same size
    const Result small = run(learn + "60000 --out @/small");
    CHECK(small.status == 0 && holds(small.err, "not the 60000 of --size"));

    REQUIRE_GOOD(run("tokenize --vocab-dir @/vocab --in @/a.txt --out @/a --val-fraction 0.1 --threads 2"));
    std::string shard = read_file(file("a_train_000001.bin"));
    CHECK(shard.substr(16, 4) != std::string(4, '\0'));
    shard.replace(16, 4, 4, '\0');  // does not say of which vocabulary it is
    write("old_train.bin", shard), write("old_val.bin", shard);
    const std::string model = " --tokenizer=gpt2 --init=standard --lr=0.03",
                      data = model + " --data=@/a_train_*.bin --val-data=@/a_val_*.bin",
                      old_data = model + " --data=@/old_train.bin --val-data=@/old_val.bin";
    REQUIRE_GOOD(run("small --out=@/twin_run --vocab-dir=@/twin" + old_data));
    REQUIRE_GOOD(run("small --vocab-dir=@/vocab --steps=20" + data));
    CHECK_NEAR(logged(out, "val_loss")[0], std::log(700.0), 0.1);
    CHECK_EQUAL(log_of(out)[0].find("start")->integer("vocab_size", "log"), 700);
    REQUIRE_GOOD(run("--resume @/run --steps 21"));
    check({
        {learn + "700 --out @/vocab", 1, {"--out", "is not empty"}},
        {"small" + data, 1, {"a vocabulary of 700", "50257", "--vocab-dir"}},
        {"small --vocab-dir=@/other" + data, 1, {"a vocabulary of 700", "701", "--vocab-dir"}},
        {"small --vocab-dir=@/twin" + data, 1, {"another vocabulary of 700 tokens", "--vocab-dir"}},
        {"sample --from @/run --vocab-dir @/twin", 1, {"holds other tokens", "--vocab-dir"}},
        {"sample --from @/run --vocab-dir @/other", 1, {"@/other", "701", "700", "--vocab-dir"}},
        {"--init-from @/run --data @/old_train.bin --vocab-dir @/twin --out @/refused --total-batch 128",
         1,
         {"the digest of --vocab-dir"}},
        {"eval --from @/twin_run --val-data @/a_val_*.bin", 1, {"another vocabulary of 700 tokens"}},
        {"--resume @/run --steps 22 --vocab-dir @/other", 1, {"700", "701"}},
    });
    check_samples(*this);

    // A token of this vocabulary is more than one byte of English.
    const EvalLine e = parse_eval(printed("eval --from @/run --val-data @/a_val_*.bin"));
    CHECK(e.bits_per_byte > 0 && e.bits_per_byte < e.loss / std::log(2.0) / 1.2);
    REQUIRE_GOOD(run("eval --from @/run --text @/a.txt --eval-batches 1"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Functions around the model.

// Frequencies over evenly spread uniforms: of K of them a token of probability p gets K p, give or take one at each end
// of its interval.
TEST(run_choose_token_has_the_right_frequencies) {
    const int K = 20000;
    struct Case {
        std::vector<float> logits;
        double temperature, top_k, top_p;
    };
    std::vector<Case> cases = {{{5, 5, 5, 5}, 1, 0, 0.5},     {{5, 5, 5, 5}, 1, 3, 1},
                               {{5, 5, 5, 5}, 1, 2, 0.5},     {{0, 1000, -1000, 999}, 1, 0, 1},
                               {{-1e4f, 1e4f}, 100, 0, 1},    {{0.5f}, 1, 0, 1},
                               {{2, 2, 1, 1, 3, 3}, 1, 3, 1}, {{2, 2, 1, 1, 3, 3}, 1, 0, 0.8}};
    const double settings[][3] = {{1, 0, 1},  {0.5, 0, 1}, {3, 0, 1},    {1, 1, 1}, {1, 3, 1},   {1, 6, 1},
                                  {1, 99, 1}, {1, 0, 0.5}, {1, 0, 0.99}, {1, 0, 0}, {1, 4, 0.7}, {0.7, 4, 0.9}};
    for (const auto& [temperature, top_k, top_p] : settings)
        cases.push_back({{1, 3, 2, 0, -1, 2.5f}, temperature, top_k, top_p});
    for (const auto& c : cases) {
        // The oracle: by decreasing probability, the first k, of those the shortest prefix that holds top_p of the
        // mass.
        std::vector<size_t> order(c.logits.size());
        for (size_t i = 0; i < order.size(); i++) order[i] = i;
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return c.logits[a] > c.logits[b]; });
        if (c.top_k > 0 && size_t(c.top_k) < order.size()) order.resize(size_t(c.top_k));
        std::vector<double> p(c.logits.size(), 0);
        double total = 0, kept = 0;
        for (size_t i : order) total += p[i] = std::exp((double(c.logits[i]) - c.logits[order[0]]) / c.temperature);
        for (size_t i : order) {
            if (c.top_p < 1 && kept > 0 && kept >= c.top_p * total) p[i] = 0;
            kept += p[i];
        }
        std::vector<int> count(c.logits.size(), 0);
        for (int k = 0; k < K; k++)
            count[size_t(choose_token(c.logits, c.temperature, int64_t(c.top_k), c.top_p, (k + 0.5) / K))]++;
        for (size_t i = 0; i < p.size(); i++) CHECK_NEAR(count[i], K * p[i] / kept, p[i] > 0 ? 1 + 1e-6 : 0);
    }
    for (const double uniform : {0.0, 0.3, 1 - 0x1p-53}) {  // temperature 0: the likeliest, of equals the first
        CHECK_EQUAL(choose_token({1, 3, 2}, 0, 0, 1, uniform), 1);
        CHECK_EQUAL(choose_token({3, 1, 3}, 0, 0, 0.5, uniform), 0);
        CHECK_EQUAL(choose_token({-5, -7, -5}, 0, 2, 1, uniform), 0);
    }
}

// A token that cannot come does not come, whatever the uniform: here the last of the list has a probability of
// exp(-1000) = 0.
TEST(run_choose_token_never_takes_an_impossible_one) {
    for (uint64_t i = 0; i < 2000; i++) {
        std::vector<float> logits;
        const size_t n = 2 + i % 40;
        for (size_t k = 0; k < n; k++) logits.push_back(float(random_normal(11, random_stream(RANDOM_TEST, i), k)));
        logits.push_back(-1e3f);
        for (const double top_p : {1.0, 0.9999999999})
            CHECK(choose_token(logits, 1, 0, top_p, 1 - 0x1p-53) != int32_t(n));
        CHECK(choose_token(logits, 1, 0, 1, 0) != int32_t(n));
    }
}

TEST(run_learning_rate_at_the_key_steps) {
    Config c;
    c.lr = 8e-4, c.lr_final = 0.25, c.warmup = "100", c.steps = 1100, c.total_batch = 1500;
    const double low = 2e-4, high = 8e-4, middle = 5e-4, limit = 1e-15;
    const char* const schedules[] = {"cosine", "linear", "constant", "wsd"};
    const struct {
        int64_t step;
        double rates[4];
    } rows[] = {{1, {8e-6, 8e-6, 8e-6, 8e-6}},
                {50, {4e-4, 4e-4, 4e-4, 4e-4}},
                {100, {high, high, high, high}},
                {350, {low + 6e-4 * (0.5 + std::sqrt(0.125)), low + 6e-4 * 0.75, high, high}},
                {600, {middle, middle, high, high}},
                {900, {low + 6e-4 * (1 + std::cos(0.8 * M_PI)) / 2, low + 6e-4 * 0.2, high, high}},
                {1000, {low + 6e-4 * (1 + std::cos(0.9 * M_PI)) / 2, low + 6e-4 * 0.1, high, middle}},
                {1100, {low, low, high, low}},
                {5000, {low, low, high, low}}};
    for (size_t i = 0; i < 4; i++) {
        const std::string s = c.schedule = schedules[i];
        for (const auto& row : rows) CHECK_NEAR(learning_rate(c, row.step), row.rates[i], limit);
        c.lr_final = 0;  // a decay to zero
        CHECK_NEAR(learning_rate(c, 1000), s == "wsd" ? 4e-4 : learning_rate(c, 1000), limit);
        CHECK_EQUAL(learning_rate(c, 1100), s == "constant" ? 8e-4 : 0.0);
        c.lr_final = 0.25;
        for (int64_t step = 2; step <= 1100; step++)
            CHECK(step <= 100 ? learning_rate(c, step) > learning_rate(c, step - 1)
                              : learning_rate(c, step) <= learning_rate(c, step - 1));
        Config d = c;
        d.warmup = "0", d.steps = 1;
        CHECK_NEAR(learning_rate(d, 1), s == "constant" ? 8e-4 : low, limit);
        d.warmup = "10", d.steps = 10;
        CHECK_NEAR(learning_rate(d, 10), 8e-4, limit);
        d.steps = 5;  // a run that ends in its warm-up
        CHECK_NEAR(learning_rate(d, 5), 4e-4, limit);
    }
    const struct {
        const char* text;
        int64_t steps;
    } warmups[] = {{"0", 0},  {"7", 7},     {"15K", 10}, {"16K", 11},
                   {"1K", 1}, {"3M", 2000}, {"0B", 0},   {"999999B", 666666000000}};
    for (const auto& w : warmups) {  // of 1500 tokens a step, the last one begun counts
        c.warmup = w.text;
        CHECK_EQUAL(warmup_steps(c), w.steps);
    }
    for (const char* bad : {"", "M", "-1", "1.5M", "2m", "2MB", "1e3", " 5", "1000000B", "1234567890123"}) {
        c.warmup = bad;
        CHECK_FAILS(2, "expected steps, or tokens with K, M or B behind", warmup_steps(c));
    }
}

TEST(run_batch_sizes_follow_from_what_was_given) {
    struct {
        const char* words;
        int ranks;
        int64_t batch, total;
    } const good[] = {// tiny: 8 sequences of 256 a step, however they are dealt
                      {"", 1, 8, 2048},
                      {"", 2, 4, 2048},
                      {"", 8, 1, 2048},
                      {"", 3, 2, 1536},
                      {"", 16, 1, 4096},
                      {"--seq-len=32", 1, 8, 2048},
                      {"--seq-len=512", 2, 2, 2048},
                      {"--seq-len=4096", 1, 1, 4096},
                      {"--batch=4", 1, 4, 2048},
                      {"--batch=1", 2, 1, 2048},
                      {"--batch=3", 1, 3, 1536},
                      {"--batch=16", 1, 16, 4096},
                      {"--batch=16", 2, 16, 8192},
                      {"--total-batch=1024", 1, 4, 1024},
                      {"--total-batch=2560", 1, 5, 2560},
                      {"--total-batch=3328", 1, 1, 3328},
                      {"--total-batch=8192", 4, 8, 8192},
                      {"--total-batch=2048 --batch=2", 2, 2, 2048}};
    for (const auto& g : good) {
        Config c = program::parse_and_preset(split_words(g.words));
        resolve_batch(c, g.ranks, false);
        CHECK_EQUAL(c.batch, g.batch);
        CHECK_EQUAL(c.total_batch, g.total);
    }
    struct {
        const char* words;
        int ranks;
        const char* named;
    } const bad[] = {{"--total-batch=1000", 1, "--total-batch 1000"},
                     {"--total-batch=255", 1, "--seq-len 256"},
                     {"--total-batch=768", 2, "2 ranks"},
                     {"--total-batch=2048 --batch=3", 1, "--batch 3"},
                     {"--total-batch=2048 --batch=8", 2, "--batch 8"},
                     {"--total-batch=2048 --batch=16", 1, "--batch 16"}};
    for (const auto& b : bad) {
        Config c = program::parse_and_preset(split_words(b.words));
        CHECK_FAILS(2, b.named, resolve_batch(c, b.ranks, false));
    }
    // Whatever is chosen fits together, and the 125m preset on a CPU takes steps that end within a day.
    for (const char* model : {"tiny", "2m", "50m", "125m", "350m"})
        for (int ranks = 1; ranks <= 9; ranks++) {
            Config c = program::parse_and_preset({"--model", model});
            resolve_batch(c, ranks, false);
            CHECK(c.batch >= 1 && c.total_batch > 0 && c.total_batch % (c.batch * c.seq_len * ranks) == 0);
        }
}
