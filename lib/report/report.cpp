// report.cpp: the functions of report.h.
#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <set>

#include "../base/embed.h"
#include "../base/files.h"
#include "../base/progress.h"
#include "../base/errors.h"
#include "../base/clock.h"
#include "../data/vocabulary.h"
#include "../run/help.h"

EMBED_FILE(report_page, "lib/report/html/report.html")

// ---------------------------------------------------------------------------------------------------------------------
// The numbers of the runs.

// A format with one %; "n/a" for what is not finite.
static std::string number_text(const char* format, double x) {
    return std::isfinite(x) ? format_text(format, x) : "n/a";
}

std::string scaled_text(double x, double largest, const char* format) {
    if (x == 0) return "0";
    const std::pair<double, const char*> scales[] = {{1e12, " T"}, {1e9, " B"}, {1e6, " M"}, {1e3, " k"}};
    for (const auto& [scale, suffix] : scales)
        if (largest >= std::max(scale, 1e4)) return number_text(format, x / scale) + suffix;
    return number_text(format, x);
}

// Validation sets of any of the runs beside those that decide.
static std::set<std::string> find_other_sets(const std::vector<RunHistory>& runs) {
    std::set<std::string> names;
    for (const RunHistory& run : runs)
        for (const auto& [name, series] : run.numbers)
            if (name.compare(0, 9, "val_loss/") == 0) names.insert(name.substr(9));
    return names;
}

static std::string lowest_text(const LogSeries& series) {
    LogPoint best = {0, 0, 0, INFINITY};
    for (const LogPoint& p : series)
        if (p.value < best.value) best = p;
    return std::isfinite(best.value) ? format_text("%.4f, step %.0f", best.value, best.step) : "n/a";
}

std::vector<ReportRow> list_numbers(const std::vector<RunHistory>& runs, double now) {
    std::vector<ReportRow> rows;
    const auto add = [&](const std::string& name, const std::function<std::string(const RunHistory&)>& value) {
        rows.push_back({name, {}});
        for (const RunHistory& run : runs) rows.back().second.push_back(value(run));
    };
    const auto has = [&](const char* number) {
        return std::any_of(runs.begin(), runs.end(), [&](const auto& run) { return !run.series(number).empty(); });
    };
    const auto add_last = [&](const std::string& name, const std::string& number) {
        add(name, [&](const RunHistory& run) { return number_text("%.4f", last_value(run.series(number))); });
    };
    add("state", [&](const RunHistory& run) {
        std::string text = describe_state(run, now);
        if (run.torn) text += "; the last line is torn";
        if (run.unreadable) text += "; " + counted(int64_t(run.unreadable), "line") + " of the log cannot be read";
        return text;
    });
    if (has("val_loss")) {
        const std::string& set = runs[0].val_set;
        const bool same = std::all_of(runs.begin(), runs.end(), [&](const auto& run) { return run.val_set == set; });
        add_last("validation loss" + (same && !set.empty() ? ", " + set : ""), "val_loss");
        add("lowest", [](const RunHistory& run) { return lowest_text(run.series("val_loss")); });
    }
    for (const std::string& set : find_other_sets(runs)) add_last("validation loss, " + set, "val_loss/" + set);
    if (has("recall_loss")) add_last("recall loss", "recall_loss");
    if (has("hellaswag")) add_last("HellaSwag", "hellaswag");
    add_last("training loss", "loss");
    add("tokens", [](const RunHistory& run) {
        const double tokens = last_value(run.series("tokens"));
        return std::isfinite(tokens) ? scaled_text(tokens, tokens, "%.4g") : "0";
    });
    add("time", [](const RunHistory& run) { return duration_text(run.hours * 3600); });
    add("tokens/s",
        [](const RunHistory& run) { return number_text("%.0f", median_value(run.series("tokens_per_s"))); });
    add("MFU", [](const RunHistory& run) { return number_text("%.1f %%", 100 * flops_utilisation(run)); });
    add("memory", [](const RunHistory& run) { return number_text("%.0f MiB", peak_memory(run)); });
    add("skipped", [](const RunHistory& run) { return std::to_string(run.skipped.size()); });
    add("resumes", [](const RunHistory& run) { return std::to_string(run.resumes()); });
    return rows;
}

// ---------------------------------------------------------------------------------------------------------------------
// The page: what stands here as JSON, its script draws.

LogSeries thin_out(const LogSeries& series) {
    const size_t neighbours = (series.size() + 599) / 600;
    if (neighbours <= 1) return series;
    LogSeries kept;
    const auto is_lower = [](const LogPoint& a, const LogPoint& b) { return a.value < b.value; };
    for (size_t i = 0; i < series.size(); i += neighbours) {
        const auto first = series.begin() + std::ptrdiff_t(i),
                   last = series.begin() + std::ptrdiff_t(std::min(i + neighbours, series.size()));
        const auto gap = std::find_if(first, last, [](const LogPoint& p) { return !std::isfinite(p.value); });
        if (gap != last) {
            kept.push_back(*gap);
            continue;
        }
        const auto [low, high] = std::minmax_element(first, last, is_lower);
        kept.push_back(*std::min(low, high));
        kept.push_back(*std::max(low, high));
    }
    return kept;
}

static Json series_json(const LogSeries& series) {
    Json points(Json::Array);
    for (const LogPoint& p : thin_out(series))
        points.items.push_back(
            Json::list(std::vector<Json>{{p.step, "%.0f"}, {p.tokens, "%.0f"}, {p.hours, "%.6g"}, {p.value, "%.7g"}}));
    return points;
}

static Json step_json(const LogPoint& p) { return Json::numbers({p.step, p.tokens}, "%.0f"); }

static std::string run_json(const RunHistory& run, const std::vector<std::string>& values, bool alone) {
    Json options(Json::Object), starts(Json::Array), skipped(Json::Array), numbers(Json::Object);
    for (const auto& [name, value] : run.options) options.add(name, value);
    for (const LogStart& start : run.starts) starts.items.push_back(step_json(start.at));
    for (const LogPoint& p : run.skipped) skipped.items.push_back(step_json(p));
    for (const auto& [name, series] : run.numbers)  // of several runs the layers are not drawn
        if (alone || name.find("/layer_") == std::string::npos) numbers.add(name, series_json(series));
    Json all = {{"folder", run.folder},
                {"values", Json::list(values)},
                {"options", options},
                {"starts", starts},
                {"skipped", skipped},
                {"hours", {run.hours, "%.6g"}},
                {"layers", run.layers()},
                {"gpt2", run.option("tokenizer") == "gpt2" && run.fact("vocab_size") == GPT2_VOCABULARY},
                {"sample_step", run.sample_step},
                {"sample", run.sample}};
    return all.add("numbers", std::move(numbers)).to_text(Json::COMPACT);
}

std::string make_report_page(const std::vector<RunHistory>& runs, double now) {
    const std::vector<ReportRow> rows = list_numbers(runs, now);
    const std::set<std::string> sets = find_other_sets(runs);
    std::vector<std::string> names, of_runs;
    for (const ReportRow& row : rows) names.push_back(row.first);
    for (size_t r = 0; r < runs.size(); r++) {
        std::vector<std::string> values;
        for (const ReportRow& row : rows) values.push_back(row.second[r]);
        of_runs.push_back(run_json(runs[r], values, runs.size() == 1));
    }
    std::string about = "Report of " + utc_text("%Y-%m-%d %H:%M UTC", now) + ".";
    if (const RunHistory& run = runs[0]; runs.size() == 1 && !run.options.empty())
        about = format_text("%s preset, %s attention, %s vocabulary, sequences of %s, %s tokens a step. %s",
                            run.option("model"), run.option("attention"), run.option("tokenizer"),
                            run.option("seq_len"), run.option("total_batch"), about);
    const Json head = {{"about", about}, {"names", Json::list(names)}, {"sets", Json::list(sets)}};
    // Each run is written as it is read: as values the numbers of many runs would take much memory.
    std::string json = head.to_text(Json::COMPACT);
    json.replace(json.size() - 1, 1, ",\"runs\":[" + joined_words(of_runs, ",\n") + "]}\n");
    return fill_page({file_report_page, file_report_page_end}, json);
}

// ---------------------------------------------------------------------------------------------------------------------
// The same on the terminal.

std::vector<double> round_ticks(double low, double high, int max_steps) {
    const double least = (high - low) / max_steps, power = std::pow(10, std::floor(std::log10(least)));
    double step = 10 * power;
    for (const double digit : {5, 2, 1})
        if (digit * power >= least * (1 - 1e-9)) step = digit * power;
    std::vector<double> ticks;
    for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && ticks.size() < 50; i++)
        ticks.push_back(i * step);
    return ticks;
}

struct TextLine {
    char letter;
    LogSeries points;
};

// One run: its validation loss as o, its training loss as a dot; several: a letter each; beyond 62 all share one.
static std::vector<TextLine> loss_lines(const std::vector<RunHistory>& runs) {
    static const std::string letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789*";
    if (runs.size() == 1) return {{'.', runs[0].series("loss")}, {'o', runs[0].series("val_loss")}};
    std::vector<TextLine> lines;
    for (const RunHistory& run : runs) {
        const char* const number = run.series("val_loss").empty() ? "loss" : "val_loss";
        lines.push_back({letters[std::min(lines.size(), letters.size() - 1)], run.series(number)});
    }
    return lines;
}

struct Range {
    double low, high;

    double share(double x) const { return (x - low) / (high - low); }
};

// A long line does not have to show its beginning, where a loss falls from far above, in full.
static Range value_range(const std::vector<TextLine>& lines, double most_tokens) {
    Range range = {INFINITY, -INFINITY};
    for (const TextLine& line : lines)
        for (const LogPoint& p : line.points)
            if (std::isfinite(p.value) && (line.points.size() <= 12 || p.tokens >= 0.03 * most_tokens)) {
                range.low = std::min(range.low, p.value);
                range.high = std::max(range.high, p.value);
            }
    if (range.low > range.high) return {0, 1};
    const double pad = range.low < range.high ? 0.05 * (range.high - range.low) : 0.1 * std::fabs(range.low) + 1e-9;
    return {range.low - pad, range.high + pad};
}

// The mean of what falls into each column, and straight lines over columns that nothing falls into.
static std::vector<double> column_values(const LogSeries& points, double most_tokens, size_t columns) {
    std::vector<double> sum(columns), count(columns), value(columns, NAN);
    for (const LogPoint& p : points) {
        const size_t column = std::min(columns - 1, size_t(p.tokens / most_tokens * double(columns)));
        if (std::isfinite(p.value)) {
            sum[column] += p.value;
            count[column]++;
        }
    }
    for (size_t i = 0, before = columns; i < columns; i++) {
        if (count[i] == 0) continue;
        value[i] = sum[i] / count[i];
        for (size_t k = before + 1; before < columns && k < i; k++)
            value[k] = value[before] + (value[i] - value[before]) * double(k - before) / double(i - before);
        before = i;
    }
    return value;
}

static std::string without_end_spaces(const std::string& line) {
    return line.substr(0, line.find_last_not_of(' ') + 1);
}

static std::string text_chart(const std::vector<TextLine>& lines, size_t width) {
    const size_t margin = 9, columns = std::max<size_t>(width, 40) - margin - 1, rows = 16;
    double most_tokens = 0;
    for (const TextLine& line : lines)
        for (const LogPoint& p : line.points) most_tokens = std::max(most_tokens, p.tokens);
    if (most_tokens == 0) most_tokens = 1;
    const Range range = value_range(lines, most_tokens);
    std::vector<std::string> cells(rows, std::string(columns, ' ')), labels(rows);
    for (const TextLine& line : lines) {
        const std::vector<double> values = column_values(line.points, most_tokens, columns);
        for (size_t column = 0; column < columns; column++) {
            const double row = std::floor((1 - range.share(values[column])) * double(rows));
            if (row >= 0 && row < double(rows)) cells[size_t(row)][column] = line.letter;
        }
    }
    for (const double y : round_ticks(range.low, range.high, 5))
        labels[size_t(std::min(double(rows - 1), (1 - range.share(y)) * double(rows)))] =
            scaled_text(y, range.high, "%.10g");
    std::string text;
    for (size_t row = 0; row < rows; row++)
        text +=
            without_end_spaces(format_text("%7s %s", labels[row], labels[row].empty() ? "|" : "+") + cells[row]) + "\n";
    std::string under(columns + margin, ' ');
    for (const double x : round_ticks(0, most_tokens, 5)) {
        const std::string label = scaled_text(x, most_tokens, "%.10g");
        const size_t at = margin + size_t(x / most_tokens * double(columns - 1));
        under.replace(std::min(at, under.size() - label.size()), label.size(), label);
    }
    return text + std::string(margin - 1, ' ') + "+" + std::string(columns, '-') + "\n" + without_end_spaces(under) +
           "\n";
}

std::string make_report_text(const std::vector<RunHistory>& runs, double now, size_t width) {
    const std::vector<TextLine> lines = loss_lines(runs);
    std::string text = "loss:";
    if (runs.size() == 1) text += " o validation, . training";
    else
        for (size_t r = 0; r < runs.size(); r++)
            text += format_text(" %s %s", lines[r].letter, printable(runs[r].folder));
    text += "\n" + text_chart(lines, width) + "\n";
    std::vector<ReportRow> rows = list_numbers(runs, now);
    rows.insert(rows.begin(), {"run", {}});
    for (const RunHistory& run : runs) rows[0].second.push_back(run.folder);
    std::vector<size_t> widths(runs.size());
    for (auto& [name, values] : rows)
        for (size_t r = 0; r < runs.size(); r++) {
            values[r] = printable(values[r]);
            widths[r] = std::max(widths[r], values[r].size());
        }
    for (const auto& [name, values] : rows) {
        std::string line = format_text("%-16s", printable(name));
        for (size_t r = 0; r < runs.size(); r++)
            line += "  " + values[r] + std::string(widths[r] - values[r].size(), ' ');
        text += without_end_spaces(line) + "\n";
    }
    return text;
}

void report_runs(const std::vector<std::string>& folders, const std::string& html) {
    if (folders.empty()) fail_usage("report: --from is missing: the folder of a run, such as runs/tiny");
    require_output_file("html", html, PAGE_BEGINNING);
    std::vector<RunHistory> runs;
    for (const std::string& folder : folders) {
        // Among runs/* there are imports, and the checkpoint of a run that has lost its folder: they have no log.
        const bool has_no_log = is_folder(folder) && !file_exists(folder + "/log.jsonl");
        if (folders.size() > 1 && has_no_log) complain("--from " + folder + " holds no log.jsonl and is left out");
        else runs.push_back(read_run_history(folder));
    }
    if (runs.empty()) fail("report: none of the folders of --from holds a log.jsonl: give the folder of a run");
    if (html.empty()) return void(std::fputs(make_report_text(runs, unix_time(), terminal_width()).c_str(), stdout));
    write_output_file("html", html, make_report_page(runs, unix_time()), PAGE_BEGINNING);
    print("report: %s\n", printable(html));
}
