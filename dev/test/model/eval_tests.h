// eval_tests.h: the verb `eval`: every token counts once, also those of the last sample of a shard, at any length, for
// any micro-batch and any ranks; the loss by position; and which checkpoint --step takes.
#pragma once
#include "model_tests.h"

namespace evaluation {

// The samples that T tokens at a time make of two shards, each with its shard's last one.
inline std::vector<std::vector<uint16_t>> samples_of(const std::vector<std::vector<uint16_t>>& shards, size_t T) {
    std::vector<std::vector<uint16_t>> samples;
    for (const auto& shard : shards)
        for (size_t at = 0; at + 1 < shard.size(); at += T)
            samples.emplace_back(shard.begin() + std::ptrdiff_t(at),
                                 shard.begin() + std::ptrdiff_t(std::min(at + T + 1, shard.size())));
    return samples;
}

// The rows "first..last  loss  tokens" of eval's table.
struct Row {
    size_t first, last;
    double loss, tokens;
};
inline std::vector<Row> table_of(const std::string& out) {
    std::vector<Row> rows;
    const std::regex row(" *(\\d+)\\.\\.(\\d+) +([0-9.]+) +(\\d+)");
    for (const std::string& line : program::lines_of(out)) {
        std::smatch m;
        if (std::regex_search(line, m, row, std::regex_constants::match_continuous))
            rows.push_back({std::stoul(m[1]), std::stoul(m[2]), std::stod(m[3]), std::stod(m[4])});
    }
    return rows;
}

}  // namespace evaluation

// Losses of every sample and range of positions against a forward pass over that sample alone, with no padding.
TEST(evaluation_covers_every_token_once) {
    const std::vector<std::vector<uint16_t>> shards = {program::random_tokens(101, 1), program::random_tokens(60, 2),
                                                       program::random_tokens(2, 3), program::random_tokens(1, 4)};
    const size_t T = 40;
    double total[3] = {}, count[3] = {};  // of positions 0..15, 16..31, 32..39
    std::vector<double> loss;
    for (const std::vector<uint16_t>& sample : evaluation::samples_of(shards, T)) {
        loss.push_back(0);
        size_t i = 0;
        for (const double x : losses_alone(sample)) loss.back() += x, total[i / 16] += x, count[i++ / 16]++;
    }
    CHECK_EQUAL(loss.size(), 6u);  // 100 = 40 + 40 + 20, 59 = 40 + 19, 1
    for (const int batch : {1, 4, 9}) {
        TestModel<Cpu<double>> t(SMALL + ("--init random --seq-len " + std::to_string(T)), batch);
        std::vector<TokenSource> sources;
        for (const auto& tokens : shards) sources.push_back(memory_source("memory", tokens, {}, 0));
        World world;
        LoaderOptions options = loader_options(t.config, world, "--val-data", false);
        CHECK_EQUAL(DataLoader(sources, options).samples_per_epoch(), 3u);  // training takes whole ones
        options.tail = true;
        DataLoader loader(sources, options);
        REQUIRE(loader.samples_per_epoch() == loss.size());
        const std::vector<EvalSums> sums = evaluate(t.model, t.a, loader, int64_t(loss.size()), world, nullptr);
        for (size_t i = 0; i < loss.size(); i++)
            CHECK_NEAR(sums[i].loss, loss[i], 1e-11 * (1 + loss[i]));  // fp64, other shapes of GEMM
        const EvalResult r(sums);
        CHECK(r.tokens == 160 && r.samples == 6);
        for (size_t range = 0; range < 3; range++) {
            CHECK_EQUAL(double(r.range_tokens[range]), count[range]);
            CHECK_NEAR(r.range_loss[range], total[range] / count[range], 1e-11 * (1 + r.range_loss[range]));
        }
        CHECK_EQUAL(r.range_tokens[3], 0u);
    }
    for (size_t position = 0; position < (1 << 20); position++) {
        const size_t range = find_range(position);
        if (position < range_begin(range) || position >= range_begin(range + 1) || range >= POSITION_RANGES)
            check_failed(__FILE__, __LINE__, "position %d is in range %d", position, range);
    }
}

PROGRAM_TEST(run_evaluates_at_any_length) {
    REQUIRE_GOOD(run("small"));
    write("val_0.bin", shard(random_tokens(1000, 1))), write("val_1.bin", shard(random_tokens(333, 2)));
    const double tokens = (1000 - 1) + (333 - 1);  // each but its shard's first is predicted once
    const bool has_ranks = find_ranks("eval on two ranks");
    for (const int T : {1, 64, 100, 2000}) {
        const std::string eval = format_text("eval --from @/run --val-data @/val_*.bin --threads=1 --seq-len %d ", T),
                          first = printed(eval + "--batch 1");
        for (const char* batch : {"--batch 3", "--batch 50"}) CHECK_EQUAL(printed(eval + batch), first);
        if (has_ranks && T == 100)
            for (const char* batch : {"--batch 1", "--batch 3", "--batch 50"})
                CHECK_EQUAL(run_on(2, eval + batch).out, first);
        CHECK_EQUAL(std::stod(behind(first, "step_00000002 on ")), tokens);
        const int samples = (999 + T - 1) / T + (332 + T - 1) / T;
        CHECK(holds(first, format_text("(%d of %d samples of %d)", samples, samples, T)));
        double counted = 0, loss = 0;
        size_t next = 1;
        for (const evaluation::Row& row : evaluation::table_of(first)) {
            CHECK(row.first == next && row.last <= size_t(T));
            next = row.last + 1, counted += row.tokens, loss += row.loss * row.tokens;
        }
        CHECK_EQUAL(counted, tokens);
        CHECK_NEAR(loss / counted, std::stod(behind(first, "loss ")), 1e-4);  // two times four digits
        CHECK_EQUAL(holds(first, "beyond the trained length"), T > 64);
    }
    // Text, without shards: every document behind an end-of-text, none of which is predicted here but the second.
    write("a.txt", "Some words of a book."), write("empty.txt", ""), write("one.bin", shard({7}));
    write("b.jsonl", "{\"text\": \"one\"}\n\n{\"text\": \"two\"}\n");
    write("a.bin", shard({0, 'o', 'n', 'e', 0, 't', 'w', 'o'}));
    const std::string of_text = printed("eval --from @/run --text @/a.txt @/b.jsonl"),
                      of_shard = printed("eval --from @/run --val-data @/a.bin");
    CHECK(holds(of_text, file("a.txt") + ", 21 tokens (1 of 1 samples") && holds(of_shard, "bits per byte"));
    const size_t second = of_text.find("b.jsonl, ");
    REQUIRE(second != std::string::npos);
    CHECK_EQUAL(of_text.substr(second + 9), of_shard.substr(of_shard.find("7 tokens")));
    check({{"eval --from @/run --val-data @/one.bin", 1, {"too few", "needs 2"}},
           {"eval --from @/run --text @/empty.txt", 1, {"empty.txt holds no text"}},
           {"eval --from @/run", 2, {"--val-data is missing", "--text"}}});
}

// Text of one letter teaches nothing about noise, so the first validated checkpoint stays the best.
PROGRAM_TEST(run_keeps_and_finds_the_best_checkpoint) {
    write("train.bin", shard(std::vector<uint16_t>(5000, 'a'))), write("val.bin", shard(random_tokens(64 * 5, 1)));
    const std::string small =
        "small --data=@/train.bin --val-data=@/val.bin --eval-every=4 --save-every=2 --keep=1 "
        "--schedule=constant --lr=0.05 ";
    REQUIRE_GOOD(run(small + "--steps=11"));
    std::map<int64_t, double> losses = validations_of(out);
    REQUIRE(losses.size() == 4 && losses[4] < losses[8] && losses[8] < losses[11]);
    CHECK(checkpoint_steps(out) == (std::vector<int64_t>{11, 4}));
    // A resume knows it, whatever has become of the first checkpoint's moments.
    std::filesystem::remove(out + "/step_00000004/" + OPTIMIZER);
    REQUIRE_GOOD(run(small + "--steps=16 --resume=on"));
    losses = validations_of(out);
    CHECK(checkpoint_steps(out) == (std::vector<int64_t>{16, 4}));
    const std::string evaluate = "eval --from @/run --val-data @/val.bin --eval-batches 4 --threads 1 --step=";
    for (const auto& [step, of] :
         {std::pair("best", 4), std::pair("last", 16), std::pair("4", 4), std::pair("16", 16)}) {
        const std::string found = printed(evaluate + step);
        CHECK_EQUAL(found.find(checkpoint_folder(out, of) + " on 256 tokens"), 0u);
        CHECK_NEAR(std::stod(behind(found, "loss ")), losses[of], 6e-5);  // four digits
    }
    CHECK_EQUAL(run("sample --from @/run --step best --tokens 3 --threads 1").status, 0);
    const Result exported = run("export --from @/run --step best --out @/hf");
    CHECK(exported.status == 0 && holds(exported.out, "step_00000004"));
    CHECK(read_file(file("hf/model.safetensors")) == weights_of(out, 4));
    // Other validation data: only losses on them compare.
    write("val.bin", shard(std::vector<uint16_t>(64 * 5, 'a')));
    REQUIRE_GOOD(run(small + "--steps=20 --resume=on"));
    CHECK(checkpoint_steps(out) == (std::vector<int64_t>{20}));
    for (const char* step : {"newest", "-1", "1e3", ""}) check({{evaluate + step, 2, {"--step", "best, or last"}}});
    check({{"eval --from @/run/step_00000020 --val-data @/val.bin --step best",
            1,
            {"--step best", "is one checkpoint"}}});
    write("run/step_00000020/manifest.json", "{}");
    const Result damaged = run(evaluate + "best");
    CHECK(damaged.status == 1 && holds(damaged.err, "none of the checkpoints"));
}
