// report_tests.h: the verb `report` on logs of all kinds, its page's numbers against the log's, and TensorBoard's
// records read by a few lines of their own.
#pragma once
#include "../../../lib/report/run_page.h"
#include "program.h"

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
               ",\"loss\":%s,\"lr\":1e-3,\"grad_norm\":%s,\"loss_z\":null,\"norm_z\":null,"
               "\"skipped\":%s,\"ms\":1000,\"tokens_per_s\":%.1f,\"tokens\":%d,\"epoch\":0.1,\"peak_memory_mib\":%d,"
               "\"layers\":[{\"gate\":[0.1,0.2,0.3],\"gate_entropy\":1.0,\"importance_selected\":0.9},"
               "{\"gate\":[0.4,0.5,0.6],\"gate_entropy\":0.8,\"importance_selected\":0.7}]}\n",
               loss, loss, skipped ? "true" : "false", speed, step * 100, 50 + step);
}
inline std::string sample(int step, double time, const std::string& text) {
    return line_begin(step, time) + format_text(",\"sample\":%s}\n", json_quote(text).c_str());
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

inline bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Every tag that HTML wants closed is, in the order it was opened; returns what lies wrong.
inline std::string unbalanced_tag(std::string page) {
    page = std::regex_replace(page, std::regex("<(style|script)>[^]*?</(style|script)>"), "");
    std::vector<std::string> open;
    const std::regex tag("<(/?)([a-zA-Z0-9]+)[^<>]*?(/?)>");
    for (std::sregex_iterator at(page.begin(), page.end(), tag), end; at != end; ++at) {
        const std::string name = (*at)[2];
        if ((*at)[3] == "/" || name == "meta") continue;
        if ((*at)[1] == "") open.push_back(name);
        else if (open.empty() || open.back() != name) return "</" + name + "> at " + std::to_string(at->position());
        else open.pop_back();
    }
    return open.empty() ? "" : "<" + open.back() + "> stays open";
}

// The points of the first line of this name, from pixels back to numbers.
inline std::vector<std::pair<double, double>> drawn_points(const std::string& page, const std::string& name) {
    std::vector<std::pair<double, double>> points;
    const size_t at = page.find("data-name=\"" + name + "\""), d = page.find(" d=\"", at) + 4;
    const size_t axes = page.rfind("data-axes=\"", at) + 11;
    if (at == std::string::npos) return points;
    double left, right, top, bottom, x_high, low, high;
    int factors;
    if (std::sscanf(page.c_str() + axes, "%lf %lf %lf %lf %lf %lf %lf %d", &left, &right, &top, &bottom, &x_high, &low,
                    &high, &factors) != 8 ||
        factors)
        return points;
    const std::string path = page.substr(d, page.find('"', d) - d);
    const std::regex point("[ML]([-0-9.]+) ([-0-9.]+)");
    for (std::sregex_iterator it(path.begin(), path.end(), point), end; it != end; ++it)
        points.emplace_back((std::stod((*it)[1]) - left) / (right - left) * x_high,
                            low + (bottom - std::stod((*it)[2])) / (bottom - top) * (high - low));
    return points;
}

// FIPS 180-4, as base64: what a Content-Security-Policy calls sha256-.
inline std::string sha256_base64(std::string text) {
    const auto root_bits = [](int n, double power) {  // of the fraction of the n-th prime's root
        int prime = 2;
        for (int found = 0;; prime++) {
            bool is_prime = true;
            for (int d = 2; d * d <= prime; d++) is_prime = is_prime && prime % d;
            if (is_prime && found++ == n) break;
        }
        const long double root = std::pow((long double)prime, (long double)(power == 2 ? 0.5L : 1 / 3.0L));
        return uint32_t((root - std::floor(root)) * 4294967296.0L);
    };
    const auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
    uint32_t h[8], k[64];
    for (int i = 0; i < 8; i++) h[i] = root_bits(i, 2);
    for (int i = 0; i < 64; i++) k[i] = root_bits(i, 3);
    const uint64_t bits = text.size() * 8;
    text += '\x80';
    while (text.size() % 64 != 56) text += '\0';
    for (int i = 56; i >= 0; i -= 8) text += char(bits >> i);
    for (size_t at = 0; at < text.size(); at += 64) {
        uint32_t w[64], s[8];
        for (size_t i = 0; i < 16; i++)
            for (size_t b = 0; b < 4; b++) w[i] = w[i] << 8 | uint8_t(text[at + 4 * i + b]);
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
                   (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
        std::copy(h, h + 8, s);
        for (int i = 0; i < 64; i++) {
            const uint32_t a = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) +
                               ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i],
                           b = (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22)) +
                               ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            std::copy_backward(s, s + 7, s + 8);
            s[4] += a, s[0] = a + b;
        }
        for (int i = 0; i < 8; i++) h[i] += s[i];
    }
    const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (int i = 0; i < 43; i++) {  // 256 bits in sixes
        uint32_t six = 0;
        for (int bit = 6 * i; bit < 6 * i + 6; bit++)
            six = six << 1 | (bit < 256 ? h[bit / 32] >> (31 - bit % 32) & 1 : 0);
        out += digits[six];
    }
    return out + "=";
}

}  // namespace report_log

TEST(report_reads_a_run_that_was_resumed) {
    using namespace report_log;
    const TempFolder folder;
    const RunHistory run = history(folder, "run", resumed_run());
    CHECK_EQUAL(run.last_step, int64_t(4));
    CHECK(!run.torn && run.unreadable == 0);
    CHECK_EQUAL(run.resumes(), size_t(1));
    CHECK_EQUAL(run.starts.back().at.tokens, 200.0);
    CHECK_EQUAL(run.skipped.size(), size_t(1));
    CHECK_EQUAL(run.skipped[0].step, 3.0);
    CHECK_EQUAL(run.sample, std::string("Once <upon> a & time"));
    CHECK_EQUAL(run.layers(), size_t(2));
    CHECK_EQUAL(last_value(run.of("gate_slc/layer_1")), 0.5);
    CHECK_EQUAL(last_value(run.of("importance_selected/layer_0")), 0.9);
    // 4 seconds before the pause, 7 after it
    CHECK_NEAR(run.hours * 3600, 11, 1e-9);
    CHECK_NEAR(run.of("val_loss")[1].hours * 3600, 4, 1e-9);
    const std::vector<ReportRow> rows = report_rows({run}, 5000);
    CHECK_EQUAL(value_of(rows, "validation loss"), std::string("2.6789"));
    CHECK_EQUAL(value_of(rows, "lowest"), std::string("2.6789, step 4"));
    CHECK_EQUAL(value_of(rows, "training loss"), std::string("2.5000"));
    CHECK_EQUAL(value_of(rows, "tokens/s"), std::string("300"));  // the upper median of 100, 200, 300, 400
    CHECK_EQUAL(value_of(rows, "MFU"), std::string("45.0 %"));    // 300 x 3e6 of 2 x 1e9
    CHECK_EQUAL(value_of(rows, "memory"), std::string("54 MiB"));
    CHECK_EQUAL(value_of(rows, "skipped"), std::string("1"));
    CHECK_EQUAL(value_of(rows, "resumes"), std::string("1"));
    CHECK_EQUAL(value_of(rows, "HellaSwag"), std::string("no such row"));
    const RunHistory choices = history(
        folder, "choices", resumed_run() + line_begin(4, 4612) + ",\"hellaswag\":0.271,\"hellaswag_plain\":0.3}\n");
    CHECK_EQUAL(value_of(report_rows({choices}, 5000), "HellaSwag"), std::string("0.2710"));
    CHECK_EQUAL(choices.of("hellaswag")[0].tokens, 400.0);
    // Recall of the built-in corpus, beside what guessing costs: ln 26.
    const std::vector<RunHistory> recall = {
        history(folder, "recall",
                resumed_run() + line_begin(4, 4612) + ",\"val_loss\":2.5,\"val_tokens\":64,\"recall_loss\":0.625}\n")};
    CHECK_EQUAL(value_of(rows, "recall loss"), std::string("no such row"));
    CHECK_EQUAL(value_of(report_rows(recall, 5000), "recall loss"), std::string("0.6250"));
    CHECK(holds(report_page(recall, 5000), "guessing 3.26"));
    CHECK(!holds(report_page({choices}, 5000), "guessing"));
    CHECK(holds(report_page({choices}, 5000), "GPT-2 124M 0.2945"));
}

// A clock that somebody sets is no time at work: each line has the count of another one.
TEST(report_counts_no_leap_of_the_clock) {
    using namespace report_log;
    const TempFolder folder;
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
TEST(report_page_runs_no_script_of_the_log) {
    using namespace report_log;
    const TempFolder folder;
    CHECK_EQUAL(sha256_base64("abc"), std::string("ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0="));
    const std::string evil = "<img src=x onerror=alert(1)>",
                      quoted = json_quote("'\"><script>alert(2)</script>" + evil);
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
    CHECK_EQUAL(runs[0].unreadable, size_t(4));
    CHECK_EQUAL(runs[0].val_set, std::string("good"));
    CHECK(runs[0].other_sets() == std::vector<std::string>{"good.name-1"});
    runs[0].numbers["val_loss/" + evil] = runs[0].of("val_loss");  // as if it had come through
    for (size_t n : {1, 2}) {
        runs.resize(n, runs[0]);
        runs.back().folder = evil;
        const std::string page = report_page(runs, 5000);
        CHECK_EQUAL(unbalanced_tag(page), std::string());
        CHECK(!holds(page, "<img") && holds(page, "&lt;img src=x"));
        const size_t script = page.find("<script>") + 8, end = page.find("</script>");
        CHECK(page.find("<script", script) == std::string::npos &&
              page.find("</script>", end + 1) == std::string::npos);
        CHECK(holds(page, "default-src 'none'") && !holds(page, "script-src 'unsafe-inline'"));
        CHECK(holds(page, "script-src 'sha256-" + sha256_base64(page.substr(script, end - script)) + "'"));
        CHECK(!holds(report_text(runs, 5000, 80), "\x1b"));
    }
    const std::string inspected(file_inspect_page, file_inspect_page_end);
    const size_t script = inspected.find("<script>") + 8, end = inspected.find("</script>", script);
    CHECK(holds(inspected, "script-src 'sha256-" + sha256_base64(inspected.substr(script, end - script)) + "'"));
}

// Whatever is there counts, and what cannot be read is said.
TEST(report_reads_logs_that_end_anywhere) {
    using namespace report_log;
    const TempFolder folder;
    const std::string whole = start(0, 1000) + validation(0, 1001, "5.5") + training(1, 1002, "5.25", 100);
    const std::string last = training(2, 1003, "5.125", 100);
    for (size_t bytes = 0; bytes + 1 < last.size(); bytes += 7) {
        const RunHistory run = history(folder, "torn", whole + last.substr(0, bytes));
        CHECK(run.torn == (bytes > 0) && run.last_step == 1 && run.unreadable == 0);
        CHECK_EQUAL(last_value(run.of("loss")), 5.25);
    }
    const RunHistory no_newline = history(folder, "torn", whole + last.substr(0, last.size() - 1));
    CHECK(!no_newline.torn && no_newline.last_step == 2);
    const RunHistory damaged = history(folder, "damaged", whole + "{\"step\":1,\"ti\n" + last);
    CHECK(!damaged.torn && damaged.unreadable == 1 && damaged.last_step == 2);
    CHECK(holds(value_of(report_rows({damaged}, 1e9), "state"), "1 line of the log cannot be read"));
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
        history(folder, "wild", training(1, 1002, "1e308", 1e17) + training(2, 1003, "-1e308", 1e17 + 16))};
    CHECK(!report_page(wild, 20).empty() && !report_text(wild, 20, 80).empty());
    // Without starts, validation, statistics, run.json: as much as there is.
    const std::vector<RunHistory> bare = {
        history(folder, "bare", "{\"step\":1,\"time\":10,\"clock\":1,\"loss\":4,\"tokens\":64}\n", "")};
    const std::string page = report_page(bare, 20);
    CHECK_EQUAL(unbalanced_tag(page), std::string());
    CHECK(holds(page, "Training loss over tokens") && !holds(page, "Sparse attention"));
    CHECK_EQUAL(value_of(report_rows(bare, 20), "MFU"), std::string("n/a"));
    CHECK_FAILS(1, "none of its lines", history(folder, "empty", ""));
    CHECK_FAILS(1, "the last is torn", history(folder, "empty", "{\"step\":1,\"t"));
    CHECK_FAILS(1, "none of its lines", history(folder, "empty", "[1]\n3\nnull\n{}\n\n"));
}

TEST(report_tells_finished_running_and_ended_runs_apart) {
    using namespace report_log;
    const TempFolder folder;
    const RunHistory done = history(folder, "done", resumed_run());
    CHECK_EQUAL(state_of(done, 4611), std::string("finished, step 4 of 4"));
    const RunHistory half = history(folder, "half", start(0, 1000) + training(2, 1010, "5", 1));
    CHECK_EQUAL(state_of(half, 1030), std::string("running, step 2 of 4"));
    CHECK_EQUAL(state_of(half, 1100), std::string("ended early, step 2 of 4"));
    for (const double now : {1030, 1100}) CHECK(holds(report_page({half}, now), "http-equiv=\"refresh\""));
    CHECK(holds(report_page({done, half}, 4611), "http-equiv=\"refresh\""));
    CHECK(!holds(report_page({done}, 4611), "http-equiv=\"refresh\""));
    CHECK(holds(report_page({done}, 4611), "class=\"facts tiles\"") && holds(page_style(), "flex-wrap:wrap"));
}

// From pixels of a hundredth back to the numbers that the log has.
TEST(report_page_shows_the_numbers_of_the_log) {
    using namespace report_log;
    const TempFolder folder;
    const std::vector<RunHistory> runs = {history(folder, "run", resumed_run())};
    const std::string page = report_page(runs, 5000);
    CHECK_EQUAL(unbalanced_tag(page), std::string());
    for (const char* word : {"2.6789", "22", "45.0 %", "54 MiB", "1.2-abc", "<span>lr</span> 0.001",
                             "Once &lt;upon&gt; a &amp; time", "resumed at step 2", "step 3 changed no weight"})
        CHECK(holds(page, word));
    const double expected[][2] = {{0, 5.5432}, {200, 3.75}, {400, 2.6789}};
    const auto validation = drawn_points(page, "validation");
    REQUIRE(validation.size() == 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK_NEAR(validation[i].first, expected[i][0], 0.01);   // 400 tokens on 556 pixels
        CHECK_NEAR(validation[i].second, expected[i][1], 1e-4);  // 3.3 on 258 pixels
    }
    CHECK_EQUAL(drawn_points(page, "training").size(), size_t(4));
    CHECK_EQUAL(drawn_points(page, "layer 1").size(), size_t(4));
    CHECK_NEAR(drawn_points(page, "layer 1")[3].second, 0.4, 1e-3);
    // Nothing comes from elsewhere.
    for (const char* word : {"http:", "https:", "src=", "href", "@import", "nan", "inf\""}) CHECK(!holds(page, word));
    CHECK_EQUAL(std::regex_replace(page, std::regex("url\\(#c[0-9]+\\)"), "").find("url("), std::string::npos);
}

TEST(report_shows_losses_that_are_not_finite_as_gaps) {
    using namespace report_log;
    const TempFolder folder;
    const std::string log = start(0, 1000) + validation(0, 1001, "5") + training(1, 1002, "5", 100) +
                            training(2, 1003, "null", 100, true) + training(3, 1004, "4", 100) +
                            validation(4, 1005, "null");
    const std::vector<RunHistory> runs = {history(folder, "run", log)};
    const std::string page = report_page(runs, 5000), text = report_text(runs, 5000, 80);
    CHECK_EQUAL(drawn_points(page, "training").size(), size_t(2));
    const size_t path = page.find("data-name=\"training\"");
    const std::string d = page.substr(path, page.find("/>", path) - path);
    CHECK_EQUAL(std::count(d.begin(), d.end(), 'M'), 2);
    CHECK_EQUAL(value_of(report_rows(runs, 5000), "validation loss"), std::string("n/a"));
    CHECK_EQUAL(value_of(report_rows(runs, 5000), "lowest"), std::string("5.0000, step 0"));
    for (const std::string* found : {&page, &text}) CHECK(!holds(*found, "nan") && !holds(*found, "inf "));
    // None at all.
    const std::vector<RunHistory> bad = {history(folder, "bad", training(1, 1002, "null", 100, true))};
    CHECK(holds(report_page(bad, 5000), "no value yet"));
    CHECK(!report_text(bad, 5000, 80).empty());
}

TEST(report_lays_several_runs_over_each_other) {
    using namespace report_log;
    const TempFolder folder;
    const std::string options = "{\"steps\": 4, \"lr\": 0.5, \"tokenizer\": \"gpt2\"}";
    const std::vector<RunHistory> runs = {history(folder, "a", resumed_run()),
                                          history(folder, "b<i>&", resumed_run(), options)};
    const std::string page = report_page(runs, 5000);
    CHECK_EQUAL(unbalanced_tag(page), std::string());
    CHECK(holds(page, "2 runs") && holds(page, "/b&lt;i&gt;&amp;") && !holds(page, "b<i>"));
    CHECK_EQUAL(drawn_points(page, runs[0].folder).size(), size_t(3));
    const std::string differing = page.substr(page.find("class=\"differs\""));
    CHECK(holds(differing, "<td>0.5</td>") && differing.find("<td>lr") < differing.find("<td>steps"));
    // The published losses, in the one run that has GPT-2's vocabulary.
    CHECK(holds(page, "FineWeb-Edu 3.2924") && holds(page, "FineWeb 3.4250"));
    CHECK(!holds(report_page({runs[0]}, 5000), "3.2924"));
    RunHistory own = runs[1];
    own.starts.push_back({{}, 0, parse_json("{\"vocab_size\": 8192}", "log")});
    CHECK(!holds(report_page({own}, 5000), "3.2924"));
    const std::string text = report_text(runs, 5000, 60);
    CHECK(holds(text, "a " + runs[0].folder) && holds(text, "b " + runs[1].folder));
}

TEST(report_text_fits_the_terminal) {
    using namespace report_log;
    const TempFolder folder;
    const std::vector<RunHistory> runs = {history(folder, "run", resumed_run())};
    for (const size_t width : {40, 80, 133}) {
        size_t widest = 0, lines = 0;
        for (const std::string& line : program::lines_of(report_text(runs, 5000, width))) {
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
    CHECK((factor_ticks(0.3, 7) == std::vector<double>{0.5, 1, 2, 5}));
    CHECK((factor_ticks(0.05, 2000) == std::vector<double>{0.1, 1, 10, 100, 1000}));
    CHECK_EQUAL(scaled_text(800000, 1e6, "%.10g"), std::string("0.8 M"));
    CHECK_EQUAL(scaled_text(0.1 * 3, 0.4, "%.10g"), std::string("0.3"));
}

// A path of many points on few pixels keeps every peak.
TEST(report_lines_keep_their_peaks) {
    Chart c;
    c.lines = {{"black", "line", {}}};
    for (int i = 0; i < 100000; i++) c.lines[0].points.emplace_back(i, i == 70001 ? 9 : i == 70005 ? -9 : i % 2);
    const auto points = report_log::drawn_points(draw_chart(c), "line");
    CHECK(points.size() < 2000);
    double low = 0, high = 0;
    for (const auto& [x, y] : points) low = std::min(low, y), high = std::max(high, y);
    CHECK_NEAR(low, -9, 1e-3);
    CHECK_NEAR(high, 9, 1e-3);
}

// ---------------------------------------------------------------------------------------------------------------------
// The verb.

TEST(report_refuses_what_is_no_run) {
    using namespace program;
    const TempFolder folder;
    const std::string run_folder = folder.file("run"), none = folder.file("none"), plain = folder.file("plain");
    report_log::history(folder, "run", report_log::resumed_run());
    make_folders(plain);
    make_folders(folder.file("checkpoint"));
    write_file(folder.file("checkpoint/model.safetensors"), "x");
    const auto report = [](const Words& more) { return run(joined({"report"}, more)); };
    CHECK_REFUSED(report({}), 2, "--from is missing");
    CHECK_REFUSED(report({"--from", none}), 1, "--from " + none, "no such folder");
    CHECK_REFUSED(report({"--from", plain}), 1, "--from " + plain, "no log.jsonl");
    // Of several, those without a log are left out, with a warning.
    const Result rest = report({"--from", run_folder, "--from", plain});
    CHECK_EQUAL(rest.status, 0);
    CHECK(rest.err.find("--from " + plain + " holds no log.jsonl and is left out") != std::string::npos);
    CHECK_EQUAL(report({"--from", plain, "--from", folder.file("checkpoint")}).status, 1);
    CHECK_REFUSED(report({"--from", run_folder + "/log.jsonl"}), 1, "is a file", "folder of a run");
    CHECK_REFUSED(report({"--from", folder.file("checkpoint")}), 1, "is a checkpoint", "folder of its run");
    CHECK_REFUSED(report({"--from", run_folder, "--html", none + "/x.html"}), 1, "no folder " + none, "make it");
    CHECK_REFUSED(report({"--from", run_folder, "--html", plain}), 1, "--html " + plain + " is a folder");
    CHECK_REFUSED(report({"--from", run_folder, "--html", "a", "--html", "b"}), 2, "--html is given twice");
    const std::string pipe = folder.file("pipe.html"), link = folder.file("link.html"), page = folder.file("page.html");
    CHECK_EQUAL(mkfifo(pipe.c_str(), 0600), 0);
    CHECK_EQUAL(symlink(page.c_str(), link.c_str()), 0);
    for (const std::string& odd : {pipe, link, std::string("/dev/full")})
        CHECK_REFUSED(report({"--from", run_folder, "--html", odd}), 1, odd + " is a link, a pipe or a device");
    write_file(page, "<!DOCTYPE html>\n<html>theirs</html>\n");
    CHECK_REFUSED(report({"--from", run_folder, "--html", page}), 1, page, "this program has not written it");
    std::remove(page.c_str());
    // As many as a shell puts there for a *; the page may be made again.
    for (const Words& runs : {Words(30, run_folder), Words(2, run_folder)})
        REQUIRE_GOOD(report(joined(joined({"--from"}, runs), {"--html", page})));
    const Result on_terminal = report(joined({"--from"}, Words(60, run_folder)));
    REQUIRE_GOOD(on_terminal);
    CHECK(on_terminal.out.find(" 7 " + run_folder) != std::string::npos);  // the 60th
    write_file(run_folder + "/run.json", "{");
    CHECK_REFUSED(report({"--from", run_folder}), 1, "run.json", "not valid JSON");
    REQUIRE_GOOD(report({"--help"}));
    CHECK(!file_exists("a") && !file_exists("b"));
}

// The command that a run ends with makes the page of that run, with its numbers, its sample and what it ran on.
TEST(report_follows_the_run_that_names_it) {
    using namespace program;
    using report_log::holds;
    const TempFolder folder;
    const std::string out = folder.file("run's");
    const Result trained = train({{"out", out}, {"steps", "3"}, {"eval-every", "1"}, {"sample-tokens", "20"}});
    REQUIRE_GOOD(trained);
    const size_t begin = trained.out.find(path() + " report --from");
    REQUIRE(begin != std::string::npos);
    REQUIRE_GOOD(execute({"/bin/sh", "-c", trained.out.substr(begin)}));
    const std::string page = read_file(out + ".html");
    CHECK_EQUAL(report_log::unbalanced_tag(page), std::string());
    CHECK(holds(page, "finished, step 3 of 3"));
    const std::vector<double> losses = logged(out, "val_loss");
    const auto drawn = report_log::drawn_points(page, "validation");
    REQUIRE(losses.size() == 4 && drawn.size() == 4);
    for (size_t i = 0; i < 4; i++) CHECK_NEAR(drawn[i].second, losses[i], 1e-4);  // less than 1 on 258 pixels
    CHECK(holds(page, format_text("%.4f", losses.back())));
    const std::string printed = "--- sample at step 3, 20 tokens ---\n";
    std::string sample = trained.out.substr(trained.out.find(printed) + printed.size());
    sample.erase(sample.find("\n---\n"));
    const RunHistory run_read = read_run_history(out);
    CHECK_EQUAL(run_read.sample, parse_json(json_quote(sample), "sample").text);  // what is no UTF-8 is replaced
    REQUIRE(run_read.starts.size() == 1);
    CHECK_EQUAL(run_read.fact("parameters"), 7712.0);
    CHECK_EQUAL(run_read.fact("ranks"), 1.0);
    const Result on_terminal = run({"report", "--from", out, out});
    REQUIRE_GOOD(on_terminal);
    // A resume is another start.
    REQUIRE_GOOD(run({"--resume", "--out", out, "--steps", "4"}));
    CHECK_EQUAL(read_run_history(out).resumes(), size_t(1));
}

// ---------------------------------------------------------------------------------------------------------------------
// TensorBoard's event files.

namespace tensorboard_file {

// CRC-32C bit by bit, rotated and shifted as TensorFlow does it.
inline uint32_t masked_crc(const std::string& bytes) {
    uint32_t crc = ~0u;
    for (const char c : bytes) {
        crc ^= uint8_t(c);
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    crc = ~crc;
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

TEST(tensorboard_files_hold_what_the_log_holds) {
    using namespace program;
    // The published check value of CRC-32C is E3069283; the head of every event file that TensorBoard itself writes:
    // a length of 24 and its checksum.
    CHECK_EQUAL(tensorboard_file::masked_crc("123456789"), (0xE3069283u >> 15 | 0xE3069283u << 17) + 0xa282ead8u);
    const std::string head("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x09", 13);
    const TempFolder folder;
    const std::string out = folder.file("run"), pattern = out + "/events.out.tfevents.*";
    const Options options = {{"out", out}, {"steps", "3"}, {"eval-every", "1"}, {"layers", "2"}, {"tensorboard", "1"}};
    REQUIRE_GOOD(train(options));
    const std::vector<std::string> first = glob_files(pattern);
    REQUIRE(first.size() == 1);
    CHECK_EQUAL(read_file(first[0]).substr(0, 13), head);
    const auto events = tensorboard_file::read(first[0]);
    REQUIRE(events.size() > 2);
    CHECK_EQUAL(events[0].version, std::string("brain.Event:2"));
    CHECK(events[1].start && events[1].step == 1);
    std::map<std::pair<int64_t, std::string>, float> scalars;
    for (const auto& event : events)
        for (const auto& [name, value] : event.scalars) scalars[{event.step, name}] = value;
    int lines = 0;
    for (const Json& line : log_of(out)) {
        const int64_t step = line.integer("step", "");
        lines++;
        if (line.find("val_loss")) CHECK_EQUAL((scalars[{step, "val/loss"}]), float(line.number("val_loss", "")));
        if (!line.find("loss")) continue;
        for (const char* name : {"loss", "lr", "grad_norm", "tokens_per_s", "tokens", "peak_memory_mib"})
            CHECK_EQUAL((scalars[{step, std::string("train/") + name}]), float(line.number(name, "")));
        for (size_t i = 0; i < 2; i++) {
            const Json& layer = line.array("layers", "")[i];
            const std::string end = format_text("/layer_%zu", i);
            CHECK_EQUAL((scalars[{step, "gate_entropy" + end}]), float(layer.number("gate_entropy", "")));
            CHECK_EQUAL((scalars[{step, "gate_win" + end}]), float(layer.array("gate", "")[2].number("")));
        }
        CHECK(!scalars.count({step, "train/loss_z"}));  // unknown until there are 128 steps
    }
    CHECK_EQUAL(size_t(lines) + 2, events.size());
    // A resume begins a file of its own, which says from which step on it counts.
    REQUIRE_GOOD(run({"--resume", "--out", out, "--steps", "5"}));
    const std::vector<std::string> both = glob_files(pattern);
    REQUIRE(both.size() == 2);
    const auto later = tensorboard_file::read(both[0] == first[0] ? both[1] : both[0]);
    CHECK(later[1].start && later[1].step == 4 && later.back().step == 5);
    // They are the run's: the next run in this folder moves them aside.
    REQUIRE_GOOD(train({{"out", out}}));
    CHECK(glob_files(pattern).empty() && glob_files(out + ".1/events.out.tfevents.*").size() == 2);
}
