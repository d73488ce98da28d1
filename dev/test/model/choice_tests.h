// choice_tests.h: multiple choice: the two forms of file, the score of an ending against a forward pass over its row
// alone, and the same number from training and `eval`, for any micro-batch and any ranks.
#pragma once
#include "model_tests.h"

namespace choices {

// Three items of two to four endings; the second's context is longer than a short sequence.
inline const char* const LINES =
    "{\"ind\": 1, \"ctx\": \"The old man\", \"endings\": [\"sleeps.\", \"is a boat full of green water\"], \"label\": "
    "0}\n"
    "\n"
    "{\"ctx\": \"After the rain the children went out to\", \"endings\": [\"play\", \"rain\", \"b\", \"zz zz\"], "
    "\"label\": \"2\"}\r\n"
    "{\"label\": 1, \"ctx\": \"x\", \"endings\": [\"y\", \"x\", \"xx\"]}";

inline ChoiceTask read(const std::string& file, size_t seq_len) {
    static const Tokenizer bytes = Tokenizer::bytes();
    return read_choices(file, &bytes, 256, seq_len);
}

// The same items as llm.c writes them.
inline std::string as_llmc(const ChoiceTask& task) {
    std::vector<int32_t> header(256, 0);
    header[0] = 20240522, header[1] = 1, header[2] = int32_t(task.items.size());
    std::vector<uint16_t> body;
    for (size_t i = 0; i < task.items.size(); i++) {
        const ChoiceItem& item = task.items[i];
        const size_t context = item.endings[0].first;
        for (size_t x : {size_t(65535), size_t(0), i, item.label, item.endings.size(), context})
            body.push_back(uint16_t(x));
        const auto tokens = item.endings[0].tokens.begin();
        body.insert(body.end(), tokens, tokens + std::ptrdiff_t(context));
        for (const ChoiceRow& row : item.endings) {
            body.push_back(uint16_t(row.answers()));
            body.insert(body.end(), row.tokens.begin() + std::ptrdiff_t(context), row.tokens.end());
        }
    }
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
           std::string(reinterpret_cast<const char*>(body.data()), 2 * body.size());
}

}  // namespace choices

TEST(choices_of_both_forms_are_read) {
    TempFolder folder;
    write_file(folder.file("a.jsonl"), choices::LINES);
    const ChoiceTask task = choices::read(folder.file("a.jsonl"), 100);
    REQUIRE(task.items.size() == 3 && task.rows.size() == 9);
    CHECK_EQUAL(task.items[0].label, 0u);
    CHECK_EQUAL(task.items[1].label, 2u);
    const std::string row = "After the rain the children went out to zz zz";
    CHECK(std::string(task.rows[5]->tokens.begin(), task.rows[5]->tokens.end()) == row);
    CHECK_EQUAL(task.rows[5]->first, row.size() - 6);  // the blank is the ending's
    CHECK_EQUAL(task.longest(), row.size());
    CHECK_EQUAL(task.cut, 0u);
    write_file(folder.file("a.bin"), choices::as_llmc(task));
    const ChoiceTask same = choices::read(folder.file("a.bin"), 100);
    REQUIRE(same.rows.size() == 9);
    for (size_t i = 0; i < 9; i++)
        CHECK(same.rows[i]->tokens == task.rows[i]->tokens && same.rows[i]->first == task.rows[i]->first);
    for (size_t i = 0; i < 3; i++) CHECK_EQUAL(same.items[i].label, task.items[i].label);
    // Too long for the model: the context loses its beginning.
    const ChoiceTask cut = choices::read(folder.file("a.jsonl"), 12);
    CHECK_EQUAL(cut.longest(), 12u);
    CHECK(std::string(cut.rows[5]->tokens.begin(), cut.rows[5]->tokens.end()) == row.substr(row.size() - 12));
    CHECK_EQUAL(cut.rows[5]->first, 6u);
    CHECK_EQUAL(cut.cut, 6u);  // the rows of the second item, and the longer two of the first
    CHECK_EQUAL(cut.cut_endings, 1u);
    // Down into the ending, whose first token then has nothing before it.
    const ChoiceTask deep = choices::read(folder.file("a.jsonl"), 4);
    CHECK_EQUAL(deep.rows[5]->answers(), 3u);  // of the 6
    for (const ChoiceRow* r : deep.rows) CHECK(r->first >= 1 && r->first < r->tokens.size());
}

TEST(choices_that_are_damaged_are_refused) {
    TempFolder folder;
    const std::string file = folder.file("x"), good = "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 1}\n";
    const auto refused = [&](const std::string& bytes, const char* words) {
        write_file(file, bytes);
        CHECK_FAILS(1, words, choices::read(file, 100));
    };
    refused("", "holds no item");
    refused(good + "{\"ctx\": \"a\"}\n", "line 2");
    refused(good + "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": 2}", "line 2: label 2, expected 0..1");
    refused("{\"ctx\": \"a\", \"endings\": [\"b\"], \"label\": 0}", "1 endings");
    refused("{\"ctx\": \"\", \"endings\": [\"b\", \"c\"], \"label\": 0}", "without a token");
    write_file(file, good);
    std::string bytes = choices::as_llmc(choices::read(file, 100));
    refused(bytes.substr(0, 1000), "cut off");
    refused(bytes.substr(0, bytes.size() - 1), "cut off at byte");
    bytes[1024] = 0;
    refused(bytes, "65535");
    write_file(file, good);
    CHECK_FAILS(2, "--vocab-dir is missing", read_choices(file, static_cast<const Tokenizer*>(nullptr), 50257, 100));
}

// Each ending's loss against a forward pass over its row alone, with no padding and no neighbours; the answers counted
// here from these losses.
TEST(choices_are_scored_as_each_row_alone) {
    TempFolder folder;
    write_file(folder.file("a.jsonl"), choices::LINES);
    const ChoiceTask task = choices::read(folder.file("a.jsonl"), 100);
    World world;
    std::vector<double> loss;
    for (const ChoiceRow* row : task.rows) {
        const std::vector<double> losses = losses_alone({row->tokens.begin(), row->tokens.end()});
        loss.push_back(std::accumulate(losses.begin() + std::ptrdiff_t(row->first) - 1, losses.end(), 0.0));
    }
    size_t right = 0, right_per_token = 0, row = 0;
    for (const ChoiceItem& item : task.items) {
        const auto first = loss.begin() + std::ptrdiff_t(row), last = first + std::ptrdiff_t(item.endings.size());
        std::vector<double> mean(first, last);
        for (size_t i = 0; i < mean.size(); i++) mean[i] /= double(item.endings[i].answers());
        right += size_t(std::min_element(first, last) - first) == item.label;
        right_per_token += size_t(std::min_element(mean.begin(), mean.end()) - mean.begin()) == item.label;
        row += item.endings.size();
    }
    for (const char* batch : {"1", "4", "30"}) {
        TestModel<Cpu<double>> t(std::string(SMALL) + "--init random --batch " + batch, 1);
        const size_t T = task.longest();
        DataLoader loader({choice_source(task, int64_t(T))}, [&] {
            Config c = t.config;
            c.seq_len = int64_t(T);
            return loader_options(c, world, "--hellaswag", false);
        }());
        Activations<Cpu<double>> a(t.dev, t.config, std::atoi(batch), int64_t(T), INFERENCE);
        const std::vector<EvalSums> sums = evaluate(t.model, a, loader, int64_t(task.rows.size()), world, nullptr);
        REQUIRE(sums.size() == loss.size());
        for (size_t i = 0; i < loss.size(); i++) {
            CHECK_NEAR(sums[i].answer_loss, loss[i], 1e-11 * (1 + loss[i]));  // fp64, other shapes of GEMM
            CHECK_EQUAL(sums[i].answers, double(task.rows[i]->answers()));
        }
        const ChoiceResult r = task.result(evaluate_choices(t.model, task, world));
        CHECK(r.items == 3 && r.right == right && r.right_per_token == right_per_token);
    }
}

PROGRAM_TEST(run_answers_multiple_choice) {
    write("task.jsonl", choices::LINES);
    REQUIRE_GOOD(run("small --hellaswag=@/task.jsonl --eval-every=1"));
    const std::vector<double> accuracy = logged(out, "hellaswag");
    REQUIRE(accuracy.size() == 3);
    CHECK(holds(losses_of(out), format_text("s:2 eval:%.6f\n", accuracy[2])));
    check({{"small --hellaswag=@/none", 1, {"none"}}});
    const std::string eval = "eval --from @/run --threads=1 ", of_task = eval + "--hellaswag @/task.jsonl ",
                      answer = format_text("hellaswag %.4f", accuracy[2]), said = printed(of_task);
    CHECK(holds(said, answer, "3 items"));
    REQUIRE_GOOD(run(of_task + "--json @/task.json"));
    const Json line = parse_json(read_file(file("task.json")), "line");
    CHECK(line.string("set", "") == file("task.jsonl") && line.integer("items", "") == 3);
    CHECK_NEAR(line.number("accuracy_per_token", ""), accuracy[2], 1e-6);
    CHECK(holds(said, format_text("%.4f by loss, ", line.number("accuracy", ""))));
    check({{of_task + "--json @/task.json", 1, {"--json", "task.json"}}});
    // Rows that do not fit are counted, in training and in eval.
    write("long", "{\"ctx\": \"a\", \"endings\": [\"" + std::string(77, 'b') + "\", \"" + std::string(62, 'c') +
                      "\", \"c\"], \"label\": 1}\n");
    const Result cut = run(eval + "--hellaswag @/long");
    CHECK(cut.status == 0 && holds(cut.err, "1 of 3 rows", "1 of them", "64"));
    const Result cut_training = run("small --out=@/cut_run --hellaswag=@/long");
    CHECK(cut_training.status == 0 && lines_of(cut_training.err).size() == 1);
    // Sets and texts have a line each, before the task. Of the task's lines none has a text.
    write("a.txt", "a text of some length, as it stands in books");
    CHECK_EQUAL(run(of_task + "--val-data synthetic --text @/task.jsonl --json @/sets").status, 1);
    const std::string texts = printed(of_task + "--val-data synthetic --text @/a.txt --json @/sets");
    const std::vector<std::string> written = lines_of(read_file(file("sets")));
    REQUIRE(written.size() == 2 + 1);
    for (size_t i = 0; i < 2; i++) {
        const Json set = parse_json(written[i], "sets");
        CHECK_EQUAL(set.string("set", ""), i ? file("a.txt") : std::string("synthetic"));
        const double loss = set.number("loss", "");
        CHECK(holds(texts, format_text("loss %.4f, perplexity %.3f", loss, std::exp(loss)),
                    format_text("bits per byte %.4f", set.number("bits_per_byte", ""))));
        int64_t tokens = 0;
        for (const Json& range : set.array("by_tokens_in_sight", "")) tokens += range.integer("tokens", "");
        CHECK_EQUAL(tokens, set.integer("tokens", ""));
    }
    CHECK_EQUAL(written[2] + "\n", read_file(file("task.json")));
    if (!find_ranks("multiple choice on two ranks")) return;
    const Result two = run_on(2, of_task);
    CHECK(two.status == 0 && holds(two.out, answer));
}
