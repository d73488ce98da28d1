// report_tests.h: the verb `report` on logs of all kinds, its page's numbers against the log's, and TensorBoard's
// records read by a few lines of their own.
#pragma once
#include "../../../lib/report/report.h"
#include "refusal_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// Logs made by hand.

namespace report_log {

// How a line begins; the clock that nobody sets is the time of day here.
inline std::string line_begin(int step, double time) {
    return format_text("{\"step\":%d,\"time\":%.3f,\"clock\":%.3f", step, time, time);
}
inline std::string start(int step, double time, const char* more = "") {
    return line_begin(step, time) +
           format_text(
               ",\"tokens\":%d,\"start\":{\"version\":\"1.2-abc\",\"device\":\"CPU\",\"ranks\":2,"
               "\"parameters\":10,\"vocab_size\":50257,\"flops_per_token\":3000000,\"peak_flops\":1e9%s}}\n",
               step * 100, more);
}
inline std::string validation(int step, double time, const char* loss) {
    return line_begin(step, time) +
           format_text(",\"tokens\":%d,\"val_loss\":%s,\"val_tokens\":256}\n", step * 100, loss);
}
inline std::string training(int step, double time, const char* loss, double speed, bool skipped = false) {
    return line_begin(step, time) +
           format_text(
               ",\"loss\":%s,\"lr\":1e-3,\"grad_norm\":%s,"
               "\"skipped\":%s,\"ms\":1000,\"tokens_per_s\":%.1f,\"tokens\":%d,\"epoch\":0.1,\"peak_memory_mib\":%d,"
               "\"layers\":[{\"gate\":[0.1,0.2,0.3],\"gate_entropy\":1.0,\"importance_selected\":0.9},"
               "{\"gate\":[0.4,0.5,0.6],\"gate_entropy\":0.8,\"importance_selected\":0.7}]}\n",
               loss, loss, skipped ? "true" : "false", speed, step * 100, 50 + step);
}
inline std::string sample(int step, double time, const std::string& text) {
    return line_begin(step, time) + format_text(",\"sample\":%s}\n", json_quote(text));
}

// Four steps, of which a resume did the last two after an hour's pause, and a sample.
inline std::string resumed_run() {
    return start(0, 1000) + validation(0, 1001, "5.5432") + training(1, 1002, "5.25", 100) +
           training(2, 1003, "4.125", 400) + validation(2, 1004, "3.75") + start(2, 4604) +
           training(3, 4605, "3.0625", 300, true) + training(4, 4606, "2.5", 200) + validation(4, 4610, "2.6789") +
           sample(4, 4611, "Once <upon> a & time");
}

// A folder of this name with this log and, unless they are "", these options.
inline RunHistory history(const TempFolder& folder, const std::string& name, const std::string& log,
                          const std::string& options = "{\"program\": \"train_nsa\", \"steps\": 4, \"lr\": 0.001}") {
    make_folders(folder.file(name));
    write_file(folder.file(name + "/log.jsonl"), log);
    if (!options.empty()) write_file(folder.file(name + "/run.json"), options);
    return read_run_history(folder.file(name));
}

inline std::string value_of(const std::vector<ReportRow>& rows, const std::string& name, size_t run = 0) {
    for (const auto& [key, values] : rows)
        if (key == name) return values[run];
    return "no such row";
}

const std::string DATA_BEGIN = "<script type=\"application/json\" id=\"data\">";

// What a page has of the runs, and the page around it.
inline std::string data_of_page(const std::string& page) {
    const size_t at = page.find(DATA_BEGIN) + DATA_BEGIN.size();
    return page.substr(at, page.find("</script>", at) - at);
}
inline Json parse_page(const std::string& page) { return parse_json(data_of_page(page), "page"); }
inline std::string frame_of_page(const std::string& page) {
    const size_t at = page.find(DATA_BEGIN) + DATA_BEGIN.size();
    return page.substr(0, at) + page.substr(page.find("</script>", at));
}

// A number of a run as {tokens, value}, NaN for null.
inline std::vector<std::pair<double, double>> points_in(const Json& page, size_t run, const std::string& name) {
    std::vector<std::pair<double, double>> points;
    const Json* const series = page.array("runs", "page").at(run).get("numbers", "page").find(name);
    for (const Json& p : series ? series->items : std::vector<Json>()) {
        REQUIRE(p.items.size() == 4);  // step, tokens, hours, value
        const Json& value = p.items[3];
        points.emplace_back(p.items[1].number("page"), value.kind == Json::Null ? NAN : value.number("page"));
    }
    return points;
}

}  // namespace report_log
namespace program {
using namespace report_log;
}

PROGRAM_TEST(report_reads_a_run_that_was_resumed) {
    const RunHistory run = history(folder, "run", resumed_run());
    CHECK_EQUAL(run.last_step, int64_t(4));
    CHECK(!run.torn && run.unreadable == 0);
    CHECK_EQUAL(run.resumes(), size_t(1));
    CHECK_EQUAL(run.starts.back().at.tokens, 200.0);
    CHECK_EQUAL(run.skipped.size(), size_t(1));
    CHECK_EQUAL(run.skipped[0].step, 3.0);
    CHECK_EQUAL(run.sample, "Once <upon> a & time");
    CHECK_EQUAL(run.layers(), size_t(2));
    CHECK_EQUAL(last_value(run.series("gate_slc/layer_1")), 0.5);
    CHECK_EQUAL(last_value(run.series("importance_selected/layer_0")), 0.9);
    // 4 seconds before the pause, 7 after it
    CHECK_NEAR(run.hours * 3600, 11, 1e-9);
    CHECK_NEAR(run.series("val_loss")[1].hours * 3600, 4, 1e-9);
    const std::vector<ReportRow> rows = list_numbers({run}, 5000);
    CHECK_EQUAL(value_of(rows, "validation loss"), "2.6789");
    CHECK_EQUAL(value_of(rows, "lowest"), "2.6789, step 4");
    CHECK_EQUAL(value_of(rows, "training loss"), "2.5000");
    CHECK_EQUAL(value_of(rows, "tokens/s"), "300");  // the upper median of 100, 200, 300, 400
    CHECK_EQUAL(value_of(rows, "MFU"), "45.0 %");    // 300 x 3e6 of 2 x 1e9
    CHECK_EQUAL(value_of(rows, "memory"), "54 MiB");
    CHECK_EQUAL(value_of(rows, "skipped"), "1");
    CHECK_EQUAL(value_of(rows, "resumes"), "1");
    CHECK_EQUAL(value_of(rows, "HellaSwag"), "no such row");
    // Recall of the built-in corpus stands beside what guessing costs: ln 26.
    const std::vector<RunHistory> more = {
        history(folder, "more",
                resumed_run() + line_begin(4, 4612) + ",\"hellaswag\":0.271,\"hellaswag_plain\":0.3}\n" +
                    line_begin(4, 4613) + ",\"val_loss\":2.5,\"val_tokens\":64,\"recall_loss\":0.625}\n")};
    CHECK_EQUAL(value_of(list_numbers(more, 5000), "HellaSwag"), "0.2710");
    CHECK_EQUAL(more[0].series("hellaswag")[0].tokens, 400.0);
    CHECK_EQUAL(value_of(rows, "recall loss"), "no such row");
    CHECK_EQUAL(value_of(list_numbers(more, 5000), "recall loss"), "0.6250");
}

// A clock that somebody sets is no time at work: each line has the count of another one.
PROGRAM_TEST(report_counts_no_leap_of_the_clock) {
    const auto with_clock = [](const std::string& line, double clock) {
        return std::regex_replace(line, std::regex("\"clock\":[^,]*"), format_text("\"clock\":%.3f", clock));
    };
    const double leap = 9600 * 3600;
    const std::string leaps = with_clock(start(0, 1000), 50) + with_clock(validation(0, 1001, "5"), 51) +
                              with_clock(validation(1, 1002 + leap, "4"), 52.5) +
                              with_clock(validation(2, 900, "4"), 54) + with_clock(start(2, 5000), 7) +
                              with_clock(validation(3, 5001 + 3000, "3"), 8);
    const RunHistory run = history(folder, "leaps", leaps);
    CHECK_NEAR(run.hours * 3600, 5, 1e-9);
    CHECK(run.numbers.count("clock") == 0);
}

// A page runs its own script alone, whatever stands in the log and the options of a run folder that somebody sent.
PROGRAM_TEST(report_page_runs_no_script_of_the_log) {
    const std::string evil = "<img src=x onerror=alert(1)>",
                      quoted = json_quote("'\"><script>alert(2)</script>\x1b[31m" + evil);
    const std::string name = quoted.substr(1, quoted.size() - 2);
    const auto line = [&](const std::string& fields) {
        return line_begin(4, 4612) + ",\"tokens\":400" + fields + "}\n";
    };
    const std::string log =
        resumed_run() + line(",\"val_loss/" + name + "\":2.5") + line(",\"val_set\":" + quoted) +
        line(",\"recall_loss/" + name + "\":2.5") + line(",\"val_loss/good.name-1\":2.25") +
        line(",\"val_set\":\"good\"") + line(",\"" + name + "\":1") + sample(4, 4613, evil) +
        start(4, 4614, (",\"" + name + "\":" + quoted).c_str()) +
        line(",\"start\":{\"version\":" + quoted + ",\"device\":" + quoted + ",\"ranks\":" + quoted + "}");
    std::vector<RunHistory> runs = {history(
        folder, "run", log, "{\"program\": \"train_nsa\", \"model\": " + quoted + ", " + quoted + ": " + quoted + "}")};
    CHECK_EQUAL(runs[0].unreadable, size_t(0));
    CHECK_EQUAL(runs[0].val_set, "good");
    const std::string source = read_file("lib/report/html/report.html");
    for (size_t n : {1, 2}) {
        runs.resize(n, runs[0]);
        runs.back().folder = evil;
        const std::string page = make_report_page(runs, 5000);
        // Around its JSON the page is the file; within it nothing can begin a tag, and the script makes texts alone.
        CHECK(frame_of_page(page) == std::regex_replace(source, std::regex("@JSON@"), ""));
        CHECK(!holds(data_of_page(page), "<"));
        CHECK_EQUAL(parse_page(page).array("sets", "page").size(), size_t(2));
        CHECK_EQUAL(parse_page(page).array("runs", "page").back().string("folder", "page"), evil);
        CHECK(!holds(make_report_text(runs, 5000, 80), "\x1b"));
    }
    for (const std::string& html : {source, read_file("lib/report/html/inspect.html")}) {
        for (const char* word :
             {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("})
            CHECK(!holds(html, word));
        // Nothing comes from elsewhere. The name of SVG's elements is no address.
        const std::string without_svg = std::regex_replace(html, std::regex("http://www.w3.org/2000/svg"), "");
        for (const char* word : {"http:", "https:", "//cdn", " src=", "href", "url(", "@import", "fetch(", "XMLHttp",
                                 "import(", "WebSocket", "sendBeacon"})
            CHECK(!holds(without_svg, word));
    }
}

// Whatever is there counts, and what cannot be read is said.
PROGRAM_TEST(report_reads_logs_that_end_anywhere) {
    const std::string whole = start(0, 1000) + validation(0, 1001, "5.5") + training(1, 1002, "5.25", 100);
    const std::string last = training(2, 1003, "5.125", 100);
    for (size_t bytes = 0; bytes + 1 < last.size(); bytes += 7) {
        const RunHistory run = history(folder, "torn", whole + last.substr(0, bytes));
        CHECK(run.torn == (bytes > 0) && run.last_step == 1 && run.unreadable == 0);
        CHECK_EQUAL(last_value(run.series("loss")), 5.25);
    }
    const RunHistory no_newline = history(folder, "torn", whole + last.substr(0, last.size() - 1));
    CHECK(!no_newline.torn && no_newline.last_step == 2);
    const RunHistory damaged = history(folder, "damaged", whole + "{\"step\":1,\"ti\n" + last);
    CHECK(!damaged.torn && damaged.unreadable == 1 && damaged.last_step == 2);
    CHECK(holds(value_of(list_numbers({damaged}, 1e9), "state"), "1 line of the log cannot be read"));
    // Lines that are JSON, and nonsense.
    const std::string nonsense =
        "{\"step\":-1,\"time\":10,\"clock\":1}\n"
        "{\"step\":1,\"time\":1e300,\"clock\":1}\n"
        "{\"step\":1,\"time\":10,\"clock\":-1}\n"
        "{\"step\":1,\"time\":10,\"clock\":1,\"tokens\":-5}\n"
        "{\"step\":1,\"time\":10,\"clock\":1,\"tokens\":\"many\"}\n"
        "{\"step\":1e3,\"time\":10,\"clock\":1}\n"
        "{\"time\":10,\"clock\":1}\n"
        "{\"step\":1,\"time\":10}\n";
    CHECK_EQUAL(history(folder, "nonsense", nonsense + whole).unreadable, size_t(8));
    const std::vector<RunHistory> wild = {
        history(folder, "wild",
                training(1, 1002, "1e308", 1e17) + training(2, 1003, "-1e308", 1e17 + 16) +
                    "{\"step\":3,\"time\":1004,\"clock\":4,\"gate_entropy/layer_2147483647\":1}\n")};
    CHECK(!make_report_page(wild, 20).empty() && !make_report_text(wild, 20, 80).empty());
    // Without starts, validation, statistics, run.json: as much as there is.
    const std::vector<RunHistory> bare = {
        history(folder, "bare", "{\"step\":1,\"time\":10,\"clock\":1,\"loss\":4,\"tokens\":64}\n", "")};
    const Json page = parse_page(make_report_page(bare, 20));
    CHECK_EQUAL(points_in(page, 0, "loss").size(), size_t(1));
    CHECK_EQUAL(page.array("runs", "page")[0].integer("layers", "page"), int64_t(0));
    CHECK_EQUAL(value_of(list_numbers(bare, 20), "MFU"), "n/a");
    CHECK_FAILS(1, "none of its lines", history(folder, "empty", ""));
    CHECK_FAILS(1, "the last is torn", history(folder, "empty", "{\"step\":1,\"t"));
    CHECK_FAILS(1, "none of its lines", history(folder, "empty", "[1]\n3\nnull\n{}\n\n"));
}

PROGRAM_TEST(report_tells_finished_running_and_ended_runs_apart) {
    const RunHistory done = history(folder, "done", resumed_run());
    CHECK(holds(describe_state(done, 4611), "checkpoint is not here", "step 4 of 4"));
    make_folders(done.folder + "/step_00000004");
    CHECK_EQUAL(describe_state(done, 4611), "finished, step 4 of 4");
    const RunHistory half = history(folder, "half", start(0, 1000) + training(2, 1010, "5", 1));
    CHECK_EQUAL(describe_state(half, 1030), "running, step 2 of 4");
    CHECK_EQUAL(describe_state(half, 1100), "ended early, step 2 of 4");
    CHECK_EQUAL(describe_state(half, 900), "ended early, step 2 of 4");  // its clock was ahead
}

PROGRAM_TEST(report_page_holds_the_numbers_of_the_log) {
    using Points = std::vector<std::pair<double, double>>;
    const std::vector<RunHistory> runs = {history(folder, "run", resumed_run())};
    const Json page = parse_page(make_report_page(runs, 5000)), &run = page.array("runs", "page")[0];
    CHECK(points_in(page, 0, "val_loss") == (Points{{0, 5.5432}, {200, 3.75}, {400, 2.6789}}));
    CHECK(points_in(page, 0, "loss") == (Points{{100, 5.25}, {200, 4.125}, {300, 3.0625}, {400, 2.5}}));
    CHECK(points_in(page, 0, "gate_cmp/layer_1") == (Points{{100, 0.4}, {200, 0.4}, {300, 0.4}, {400, 0.4}}));
    CHECK_EQUAL(run.array("values", "page").size(), page.array("names", "page").size());
    CHECK_EQUAL(run.string("sample", "page"), runs[0].sample);
    CHECK_EQUAL(run.get("options", "page").string("lr", "page"), "0.001");
    for (const auto& [marks, at, step] : {std::tuple("starts", 1, 2), std::tuple("skipped", 0, 3)}) {
        const Json& mark = run.array(marks, "page").at(size_t(at));
        CHECK(mark.items.at(0).integer("page") == step && mark.items.at(1).integer("page") == 100 * step);
    }
}

PROGRAM_TEST(report_shows_losses_that_are_not_finite_as_gaps) {
    const std::string log = start(0, 1000) + validation(0, 1001, "5") + training(1, 1002, "5", 100) +
                            training(2, 1003, "null", 100, true) + training(3, 1004, "4", 100) +
                            validation(4, 1005, "null");
    const std::vector<RunHistory> runs = {history(folder, "run", log)};
    const std::string page = make_report_page(runs, 5000), text = make_report_text(runs, 5000, 80);
    const auto losses = points_in(parse_page(page), 0, "loss");
    REQUIRE(losses.size() == 3);
    CHECK(losses[0].second == 5 && std::isnan(losses[1].second) && losses[2].second == 4);
    CHECK_EQUAL(value_of(list_numbers(runs, 5000), "validation loss"), "n/a");
    CHECK_EQUAL(value_of(list_numbers(runs, 5000), "lowest"), "5.0000, step 0");
    for (const std::string& found : {data_of_page(page), text}) CHECK(!holds(found, "nan") && !holds(found, "inf"));
    // None at all.
    const std::vector<RunHistory> bad = {history(folder, "bad", training(1, 1002, "null", 100, true))};
    CHECK(std::isnan(points_in(parse_page(make_report_page(bad, 5000)), 0, "loss").at(0).second));
    CHECK(!make_report_text(bad, 5000, 80).empty());
}

PROGRAM_TEST(report_lays_several_runs_over_each_other) {
    const std::string options = "{\"steps\": 4, \"lr\": 0.5, \"tokenizer\": \"gpt2\"}";
    const std::vector<RunHistory> runs = {history(folder, "a", resumed_run()),
                                          history(folder, "b<i>&", resumed_run(), options)};
    const Json page = parse_page(make_report_page(runs, 5000));
    REQUIRE(page.array("runs", "page").size() == 2);
    CHECK_EQUAL(page.array("runs", "page")[1].string("folder", "page"), file("b<i>&"));
    CHECK_EQUAL(points_in(page, 0, "val_loss").size(), size_t(3));
    CHECK_EQUAL(page.array("runs", "page")[1].get("options", "page").string("lr", "page"), "0.5");
    CHECK(points_in(page, 0, "gate_cmp/layer_1").empty());  // layers are drawn of a run alone
    // The published losses stand beside the runs that have GPT-2's vocabulary.
    const auto reads_gpt2 = [](const RunHistory& run) {
        return parse_page(make_report_page({run}, 5000)).array("runs", "page")[0].get("gpt2", "page").is_true;
    };
    CHECK(!reads_gpt2(runs[0]) && reads_gpt2(runs[1]));
    RunHistory own = runs[1];
    own.starts.push_back({{}, parse_json("{\"vocab_size\": 8192}", "log")});
    CHECK(!reads_gpt2(own));
    const std::string text = make_report_text(runs, 5000, 60);
    CHECK(holds(text, "a " + runs[0].folder, "b " + runs[1].folder));
}

PROGRAM_TEST(report_text_fits_the_terminal) {
    const std::vector<RunHistory> runs = {history(folder, "run", resumed_run())};
    for (const size_t width : {40, 80, 133}) {
        size_t widest = 0, lines = 0;
        for (const std::string& line : program::lines_of(make_report_text(runs, 5000, width))) {
            if (line.empty()) break;  // below stand the numbers
            widest = std::max(widest, line.size()), lines++;
        }
        CHECK(widest <= width && widest + 2 >= width && lines == 19);
    }
}

TEST(report_ticks_are_round) {
    CHECK((round_ticks(0, 10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10}));
    CHECK((round_ticks(0, 819200, 5) == std::vector<double>{0, 200000, 400000, 600000, 800000}));
    CHECK((round_ticks(-1.5, 2.5, 4) == std::vector<double>{-1, 0, 1, 2}));
    CHECK_EQUAL(scaled_text(800000, 1e6, "%.10g"), "0.8 M");
    CHECK_EQUAL(scaled_text(0.1 * 3, 0.4, "%.10g"), "0.3");
}

// Of many points few are drawn, with every peak, in their order; a gap stays one.
TEST(report_lines_keep_their_peaks) {
    LogSeries series;
    for (int i = 0; i < 100000; i++)
        series.push_back({double(i), double(i), 0, i == 50000 ? NAN : i == 70001 ? 9 : i == 70005 ? -9 : i % 2});
    const LogSeries few = thin_out(series);
    CHECK(few.size() <= 1200);
    double low = 0, high = 0;
    for (const LogPoint& p : few) low = std::fmin(low, p.value), high = std::fmax(high, p.value);
    CHECK_EQUAL(low, -9.0);
    CHECK_EQUAL(high, 9.0);
    CHECK(std::is_sorted(few.begin(), few.end(), [](const auto& a, const auto& b) { return a.step < b.step; }));
    CHECK_EQUAL(std::count_if(few.begin(), few.end(), [](const auto& p) { return std::isnan(p.value); }), 1);
    series.resize(600);
    CHECK_EQUAL(thin_out(series).size(), size_t(600));
}

// ---------------------------------------------------------------------------------------------------------------------
// The verb.

PROGRAM_TEST(report_refuses_what_is_no_run) {
    report_log::history(folder, "run", report_log::resumed_run());
    for (const char* name : {"plain", "checkpoint"}) make_folders(file(name));
    write("checkpoint/model.safetensors", "x");
    write("theirs.html", "<!DOCTYPE html>\n<html>theirs</html>\n");
    CHECK_EQUAL(mkfifo(file("pipe.html").c_str(), 0600), 0);
    CHECK_EQUAL(symlink("page.html", file("link.html").c_str()), 0);
    check({
        {"report", 2, {"--from is missing"}},
        {"report --from @/none", 1, {"--from @/none", "no such folder"}},
        {"report --from @/plain", 1, {"--from @/plain", "no log.jsonl"}},
        {"report --from @/run/log.jsonl", 1, {"is a file", "folder of a run"}},
        {"report --from @/checkpoint", 1, {"is a checkpoint", "folder of its run"}},
        {"report --from @/run --html @/none/x.html", 1, {"no folder @/none", "make it"}},
        {"report --from @/run --html @/plain", 1, {"--html @/plain is a folder"}},
        {"report --from @/run --html @/a --html @/b", 2, {"--html is given twice"}},
        {"report --from @/run --html @/pipe.html", 1, {"@/pipe.html is a link, a pipe or a device"}},
        {"report --from @/run --html @/link.html", 1, {"@/link.html is a link, a pipe or a device"}},
        {"report --from @/run --html /dev/full", 1, {"/dev/full is a link, a pipe or a device"}},
        {"report --from @/run --html @/theirs.html", 1, {"@/theirs.html", "this program has not written it"}},
    });
    // Of several, those without a log are left out, with a warning.
    const Result rest = run("report --from @/run --from @/plain");
    CHECK(rest.status == 0 && holds(rest.err, "--from " + file("plain") + " holds no log.jsonl and is left out"));
    CHECK_EQUAL(run("report --from @/plain --from @/checkpoint").status, 1);
    // As many as a shell puts there for a *; the page may be made again.
    for (const size_t runs : {30, 2})
        REQUIRE_GOOD(run(joined(joined({"report", "--from"}, Words(runs, "@/run")), {"--html", "@/page.html"})));
    CHECK(holds(printed(joined({"report", "--from"}, Words(60, "@/run"))), " 7 " + out));  // the 60th
    write("run/run.json", "{");
    check({{"report --from @/run", 1, {"run.json", "not valid JSON"}}});
}

// The command that a run ends with makes the page of that run, with its numbers and its sample.
PROGRAM_TEST(report_follows_the_run_that_names_it) {
    const std::string out = file("run's");
    const std::string trained = printed("small --steps=3 --eval-every=1 --sample-tokens=20 --out=" + out);
    REQUIRE_GOOD(execute({"/bin/sh", "-c", path() + " report --from" + behind(trained, path() + " report --from")}));
    const std::string page = read_file(out + ".html");
    const std::vector<double> losses = logged(out, "val_loss");
    const auto points = report_log::points_in(report_log::parse_page(page), 0, "val_loss");
    REQUIRE(losses.size() == 4 && points.size() == 4);
    for (size_t i = 0; i < 4; i++) CHECK_NEAR(points[i].second, losses[i], 5e-7 * losses[i]);  // seven digits
    const std::string begin = "--- sample at step 3, 20 tokens ---\n";
    std::string sample = trained.substr(trained.find(begin) + begin.size());
    sample.erase(sample.find("\n---\n"));
    const RunHistory read = read_run_history(out);
    CHECK_EQUAL(read.sample, parse_json(json_quote(sample), "sample").text);  // what is no UTF-8 is replaced
    CHECK(read.starts.size() == 1 && read.fact("parameters") == 7712 && read.fact("ranks") == 1);
    // A resume is another start.
    REQUIRE_GOOD(run("--resume " + out + " --steps 4"));
    CHECK_EQUAL(read_run_history(out).resumes(), size_t(1));
}

PROGRAM_TEST_LONG(report_page_in_a_browser) {
    if (std::system("command -v chromium >/dev/null && command -v python3 >/dev/null") != 0)
        return skip("the page of report in a browser: there is no chromium (or no python3)");
    history(folder, "one", resumed_run(), "{\"steps\": 4, \"tokenizer\": \"gpt2\"}");
    history(folder, "two", resumed_run());
    for (const char* command : {"report --html @/x.html --from @/one", "report --html @/x.html --from @/one @/two"}) {
        REQUIRE_GOOD(run(command));
        const Result r = execute({"/usr/bin/env", "python3", "dev/browser_check.py", file("x.html")});
        CHECK_EQUAL(r.err, "");
        CHECK_EQUAL(r.status, 0);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// TensorBoard's event files.

namespace tensorboard_file {

// CRC-32C, rotated and shifted as TensorFlow does it.
inline uint32_t masked_crc(const std::string& bytes) {
    const uint32_t crc = crc32c(0, bytes.data(), bytes.size());
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

// A protobuf's fields, numbers as their bytes.
inline std::vector<std::pair<int, std::string>> fields(const std::string& bytes) {
    std::vector<std::pair<int, std::string>> all;
    size_t at = 0;
    const auto varint = [&] {
        uint64_t x = 0;
        for (int shift = 0; at < bytes.size(); shift += 7) {
            x |= uint64_t(bytes[at] & 127) << shift;
            if (!(bytes[at++] & 128)) break;
        }
        return x;
    };
    while (at < bytes.size()) {
        const uint64_t key = varint();
        if (key % 8 == 0) {
            const uint64_t x = varint();
            all.emplace_back(int(key / 8), std::string(reinterpret_cast<const char*>(&x), 8));
            continue;
        }
        const size_t size = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : size_t(varint());
        REQUIRE((key % 8 == 1 || key % 8 == 2 || key % 8 == 5) && size <= bytes.size() - at);
        all.emplace_back(int(key / 8), bytes.substr(at, size));
        at += size;
    }
    return all;
}

template <class T>
T as(const std::string& bytes) {
    T x = 0;
    REQUIRE(bytes.size() == sizeof x);
    std::memcpy(&x, bytes.data(), sizeof x);
    return x;
}

struct Event {
    double time = 0;
    int64_t step = 0;
    std::string version;
    bool start = false;
    std::map<std::string, float> scalars;
};

inline std::vector<Event> read(const std::string& path) {
    const std::string file = read_file(path);
    std::vector<Event> events;
    for (size_t at = 0; at < file.size();) {
        REQUIRE(at + 12 <= file.size());
        const std::string length = file.substr(at, 8);
        const size_t size = as<uint64_t>(length);
        CHECK_EQUAL(as<uint32_t>(file.substr(at + 8, 4)), masked_crc(length));
        REQUIRE(size <= file.size() - at - 16);
        const std::string data = file.substr(at + 12, size);
        CHECK_EQUAL(as<uint32_t>(file.substr(at + 12 + size, 4)), masked_crc(data));
        Event event;
        for (const auto& [field, bytes] : fields(data)) {
            if (field == 1) event.time = as<double>(bytes);
            else if (field == 2) event.step = as<int64_t>(bytes);
            else if (field == 3) event.version = bytes;
            else if (field == 7) event.start = as<int64_t>(fields(bytes).at(0).second) == 1;
            else if (field == 5)
                for (const auto& [value_field, value] : fields(bytes)) {
                    const auto parts = fields(value);
                    REQUIRE(value_field == 1 && parts.size() == 2 && parts[0].first == 1 && parts[1].first == 2);
                    CHECK(event.scalars.emplace(parts[0].second, as<float>(parts[1].second)).second);
                }
            else check_failed(__FILE__, __LINE__, "event with field %d", field);
        }
        events.push_back(event);
        at += 16 + size;
    }
    return events;
}

}  // namespace tensorboard_file

PROGRAM_TEST(tensorboard_files_hold_what_the_log_holds) {
    // The head of every event file that TensorBoard itself writes: a length of 24 and its checksum.
    const std::string head("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x09", 13), pattern = out + "/events.out.tfevents.*";
    REQUIRE_GOOD(run("small --steps=3 --eval-every=1 --layers=2 --tensorboard=1"));
    const std::vector<std::string> first = glob_files(pattern);
    REQUIRE(first.size() == 1);
    CHECK_EQUAL(read_file(first[0]).substr(0, 13), head);
    const auto events = tensorboard_file::read(first[0]);
    REQUIRE(events.size() > 2);
    CHECK(events[0].version == "brain.Event:2" && events[1].start && events[1].step == 1);
    std::map<std::pair<int64_t, std::string>, float> scalars;
    for (const auto& event : events)
        for (const auto& [name, value] : event.scalars) scalars[{event.step, name}] = value;
    const std::vector<Json> lines = log_of(out);
    CHECK_EQUAL(lines.size() + 2, events.size());
    for (const Json& line : lines) {
        const int64_t step = line.integer("step", "");
        const auto same = [&](const std::string& name, double value) {
            CHECK_EQUAL((scalars[{step, name}]), float(value));
        };
        if (line.find("val_loss")) same("val/loss", line.number("val_loss", ""));
        if (!line.find("loss")) continue;
        for (const std::string name : {"loss", "lr", "grad_norm", "tokens_per_s", "tokens", "peak_memory_mib"})
            same("train/" + name, line.number(name, ""));
        for (size_t i = 0; i < 2; i++) {
            const Json& layer = line.array("layers", "")[i];
            same(format_text("gate_entropy/layer_%d", i), layer.number("gate_entropy", ""));
            same(format_text("gate_win/layer_%d", i), layer.array("gate", "")[2].number(""));
        }
    }
    // A resume begins a file of its own, which says from which step on it counts.
    REQUIRE_GOOD(run("--resume @/run --steps 5"));
    const std::vector<std::string> both = glob_files(pattern);
    REQUIRE(both.size() == 2);
    const auto later = tensorboard_file::read(both[0] == first[0] ? both[1] : both[0]);
    CHECK(later[1].start && later[1].step == 4 && later.back().step == 5);
    // They are the run's: the next run in this folder moves them aside.
    REQUIRE_GOOD(run("small"));
    CHECK(glob_files(pattern).empty() && glob_files(out + ".1/events.out.tfevents.*").size() == 2);
}
