// run_page.h: what the verb `report` shows: runs as one HTML page with charts in SVG, or as text on the terminal.
// Nothing on the page comes from elsewhere, and without its few lines of script it loses no more than what follows the
// mouse.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chart.h"
#include "../base/files.h"
#include "../run/help.h"
#include "../base/progress.h"
#include "run_history.h"
#include "../data/synthetic.h"
#include "../data/vocabulary.h"
#include "../base/util.h"

// Validation losses that GPT-2 124M reaches, as build-nanogpt (FineWeb-Edu) and llm.c (FineWeb) publish them.
struct PublishedLoss {
    double loss;
    const char* of;
};
constexpr PublishedLoss GPT2_LOSSES[] = {{3.4250, "GPT-2 124M on FineWeb"}, {3.2924, "GPT-2 124M on FineWeb-Edu"}};
constexpr double GPT2_HELLASWAG = 0.2945;

constexpr char TIME_FORMAT[] = "%Y-%m-%d %H:%M UTC";

// ---------------------------------------------------------------------------------------------------------------------
// The numbers of the runs: a row for each, with its value for every run.

using ReportRow = std::pair<std::string, std::vector<std::string>>;

// Validation sets of any of the runs beside those that decide.
inline std::set<std::string> other_sets_of(const std::vector<RunHistory>& runs) {
    std::set<std::string> names;
    for (const RunHistory& run : runs)
        for (const std::string& name : run.other_sets()) names.insert(name);
    return names;
}

inline bool any_has(const std::vector<RunHistory>& runs, const char* number) {
    return std::any_of(runs.begin(), runs.end(), [&](const RunHistory& run) { return !run.of(number).empty(); });
}

// now: since 1970.
inline std::vector<ReportRow> report_rows(const std::vector<RunHistory>& runs, double now) {
    std::vector<ReportRow> rows;
    const auto add = [&](const std::string& name, const std::function<std::string(const RunHistory&)>& value) {
        rows.push_back({name, {}});
        for (const RunHistory& run : runs) rows.back().second.push_back(value(run));
    };
    add("run", [](const RunHistory& run) { return run.folder; });
    add("state", [&](const RunHistory& run) {
        std::string text = state_of(run, now);
        if (run.torn) text += "; the last line is torn";
        if (run.unreadable) text += "; " + counted(int64_t(run.unreadable), "line") + " of the log cannot be read";
        return text;
    });
    if (any_has(runs, "val_loss")) {
        const bool same = std::all_of(runs.begin(), runs.end(),
                                      [&](const RunHistory& run) { return run.val_set == runs[0].val_set; });
        add("validation loss" + (same && !runs[0].val_set.empty() ? ", " + runs[0].val_set : ""),
            [](const RunHistory& run) { return number_in("%.4f", last_value(run.of("val_loss"))); });
        add("lowest", [](const RunHistory& run) {
            const LogPoint best = lowest_point(run.of("val_loss"));
            if (!std::isfinite(best.value)) return number_in("%.4f", NAN);
            return format_text("%.4f, step %lld", best.value, (long long)best.step);
        });
    }
    for (const std::string& set : other_sets_of(runs))
        add("validation loss, " + set,
            [&](const RunHistory& run) { return number_in("%.4f", last_value(run.of("val_loss/" + set))); });
    if (any_has(runs, "recall_loss"))
        add("recall loss", [](const RunHistory& run) { return number_in("%.4f", last_value(run.of("recall_loss"))); });
    if (any_has(runs, "hellaswag"))
        add("HellaSwag", [](const RunHistory& run) { return number_in("%.4f", last_value(run.of("hellaswag"))); });
    add("training loss", [](const RunHistory& run) { return number_in("%.4f", last_value(run.of("loss"))); });
    add("tokens", [](const RunHistory& run) {
        const double tokens = last_value(run.of("tokens"));
        return std::isfinite(tokens) ? scaled_text(tokens, tokens, "%.4g") : "0";
    });
    add("time", [](const RunHistory& run) { return duration_text(run.hours * 3600); });
    add("tokens/s", [](const RunHistory& run) { return number_in("%.0f", median_value(run.of("tokens_per_s"))); });
    add("MFU", [](const RunHistory& run) {
        const double share = flops_utilisation(run);
        return std::isfinite(share) ? format_text("%.1f %%", 100 * share) : "n/a";
    });
    add("memory", [](const RunHistory& run) {
        const double mib = peak_memory_of(run);
        return std::isfinite(mib) ? format_text("%.0f MiB", mib) : "n/a";
    });
    add("skipped", [](const RunHistory& run) { return std::to_string(run.skipped.size()); });
    add("resumes", [](const RunHistory& run) { return std::to_string(run.resumes()); });
    return rows;
}

// ---------------------------------------------------------------------------------------------------------------------
// The charts of the runs.

// Eight chosen ones, then hues that lie as far from those before as can be.
inline std::string run_color(size_t run) {
    if (run < 8) return format_text("var(--c%zu)", run);
    return format_text("hsl(%.0f 48%% 52%%)", std::fmod(137.508 * double(run), 360));
}

// From violet to amber; they are as light as each other.
inline std::string layer_color(size_t layer, size_t layers) {
    return format_text("hsl(%.0f 48%% 52%%)", layers < 2 ? 210 : 285 - 250.0 * double(layer) / double(layers - 1));
}

inline std::string colored_word(const std::string& color, const std::string& word) {
    return "<b style=\"color:" + color + "\">" + html_text(word) + "</b>";
}

inline ChartLine line_of(const LogSeries& series, const std::string& color, const std::string& name,
                         double LogPoint::*x = &LogPoint::tokens, double unit = 1) {
    ChartLine line = {color, name, {}};
    for (const LogPoint& p : series) line.points.emplace_back(p.*x * unit, p.value);
    return line;
}

// Validation loss, or training loss where there is none, over tokens or over time; unit: of the time, in hours.
inline Chart loss_chart(const std::vector<RunHistory>& runs, double LogPoint::*x, double unit,
                        const std::string& caption) {
    Chart c;
    c.width = 620;
    c.height = 290;
    c.caption = caption;
    for (size_t r = 0; r < runs.size(); r++) {
        const LogSeries &val = runs[r].of("val_loss"), &train = runs[r].of("loss");
        if (runs.size() == 1 || val.empty()) {
            c.lines.push_back(line_of(train, run_color(r), "training", x, unit));
            c.lines.back().faint = true;
        }
        if (val.empty()) continue;
        c.lines.push_back(line_of(val, run_color(r), runs.size() == 1 ? "validation" : runs[r].folder, x, unit));
        c.lines.back().dots = true;
    }
    const auto reads_gpt2 = [](const RunHistory& run) {
        return run.option("tokenizer") == "gpt2" && run.fact("vocab_size") == GPT2_VOCABULARY;
    };
    if (std::any_of(runs.begin(), runs.end(), reads_gpt2))
        for (const PublishedLoss& p : GPT2_LOSSES) c.levels.emplace_back(p.loss, format_text("%s %.4f", p.of, p.loss));
    return c;
}

// One number of every run over tokens, with its resumes and skipped steps.
inline Chart number_chart(const std::vector<RunHistory>& runs, const char* name, const std::string& caption) {
    Chart c;
    c.caption = caption;
    for (size_t r = 0; r < runs.size(); r++) {
        c.lines.push_back(line_of(runs[r].of(name), run_color(r), runs[r].folder));
        for (const LogStart& s : runs[r].starts)
            if (s.at.step > 0) c.resumes.emplace_back(s.at.tokens, format_text("resumed at step %.0f", s.at.step));
        for (const LogPoint& p : runs[r].skipped)
            c.skipped.emplace_back(p.tokens, format_text("step %.0f changed no weight", p.step));
    }
    return c;
}

// One number of every layer; of several runs, the mean over the layers.
inline Chart layer_chart(const std::vector<RunHistory>& runs, const std::string& name, const std::string& caption) {
    Chart c;
    c.caption = caption;
    c.low = 0;
    for (size_t r = 0; r < runs.size(); r++) {
        const size_t layers = runs[r].layers();
        LogSeries mean;
        size_t found = 0;  // layers without gates have no series
        for (size_t i = 0; i < layers; i++) {
            const LogSeries& series = runs[r].of(name + "/layer_" + std::to_string(i));
            if (series.empty()) continue;
            if (runs.size() == 1)
                c.lines.push_back(line_of(series, layer_color(i, layers), format_text("layer %zu", i)));
            mean.resize(found++ ? std::min(mean.size(), series.size()) : series.size(), {0, 0, 0, 0});
            for (size_t k = 0; k < mean.size(); k++)
                mean[k] = {series[k].step, series[k].tokens, series[k].hours, mean[k].value + series[k].value};
        }
        for (LogPoint& p : mean) p.value /= double(found);
        if (runs.size() > 1) c.lines.push_back(line_of(mean, run_color(r), runs[r].folder));
    }
    return c;
}

inline std::string draw_loss_charts(const std::vector<RunHistory>& runs) {
    double hours = 0;
    for (const RunHistory& run : runs) hours = std::max(hours, run.hours);
    const std::pair<const char*, double> units[] = {{"hours", 1}, {"minutes", 60}, {"seconds", 3600}};
    const auto& [unit, per_hour] = units[hours >= 2 ? 0 : hours >= 2 / 60.0 ? 1 : 2];
    const bool validated = any_has(runs, "val_loss");
    const std::string loss = validated ? "Validation loss" : "Training loss";
    const std::string note = validated && runs.size() == 1 ? "; pale: training loss" : "";
    return "<div class=\"pair\">" + draw_chart(loss_chart(runs, &LogPoint::tokens, 1, loss + " over tokens" + note)) +
           draw_chart(loss_chart(runs, &LogPoint::hours, per_hour, loss + " over " + unit + note)) + "</div>\n";
}

inline std::string draw_step_charts(const std::vector<RunHistory>& runs) {
    std::string html = "<h2>Steps, over tokens</h2><div class=\"grid\">";
    html += draw_chart(number_chart(runs, "loss", "Training loss"));
    for (const std::string& set : other_sets_of(runs))
        html += draw_chart(number_chart(runs, ("val_loss/" + set).c_str(), "Validation loss, " + set));
    Chart recall = number_chart(runs, "recall_loss", "Recall loss: names from beyond the window");
    const double chance = std::log(SYNTHETIC_ALPHABET);
    recall.levels.emplace_back(chance, format_text("guessing %.2f", chance));
    if (has_points(recall)) html += draw_chart(recall);
    Chart choices = number_chart(runs, "hellaswag", "HellaSwag, by loss per token");
    choices.levels.emplace_back(GPT2_HELLASWAG, format_text("GPT-2 124M %.4f", GPT2_HELLASWAG));
    if (has_points(choices)) html += draw_chart(choices);
    Chart speed = number_chart(runs, "tokens_per_s", "Tokens per second");
    speed.low = 0;
    html += draw_chart(speed);
    html += draw_chart(number_chart(runs, "lr", "Learning rate"));
    Chart norm = number_chart(runs, "grad_norm", "Gradient norm");
    norm.by_factors = true;
    html += draw_chart(norm);
    for (const auto& [name, of] : {std::make_pair("loss_z", "loss"), std::make_pair("norm_z", "gradient norm")}) {
        Chart outliers = number_chart(runs, name, std::string("Outliers of the ") + of + ", in standard deviations");
        outliers.low = -3;
        html += draw_chart(outliers);
    }
    return html + "</div>\n";
}

inline std::string draw_layer_charts(const std::vector<RunHistory>& runs) {
    size_t layers = 0;
    for (const RunHistory& run : runs) layers = std::max(layers, run.layers());
    if (!layers) return "";
    std::string html = "<h2>Sparse attention, over tokens: ";
    if (runs.size() > 1) html += "mean over the layers";
    for (size_t i = 0; runs.size() == 1 && i < layers; i++)
        html += colored_word(layer_color(i, layers), i ? std::to_string(i) : "layer 0") + " ";
    html += "</h2><div class=\"grid\">";
    const std::pair<const char*, const char*> gates[] = {{"gate_cmp", "Gate of the compressed branch"},
                                                         {"gate_slc", "Gate of the selected branch"},
                                                         {"gate_win", "Gate of the window"}};
    for (const auto& [name, caption] : gates) {
        Chart gate = layer_chart(runs, name, caption);
        gate.high = 1;
        html += draw_chart(gate);
    }
    Chart entropy = layer_chart(runs, "gate_entropy", "Entropy of the gates, nats");
    entropy.levels.emplace_back(std::log(3.0), "ln 3: all three alike");
    entropy.high = 1.3;
    Chart importance = layer_chart(runs, "importance_selected", "Share of the importance that was selected");
    importance.high = 1;
    return html + draw_chart(entropy) + draw_chart(importance) + "</div>\n";
}

// ---------------------------------------------------------------------------------------------------------------------
// The page.

inline const char* page_style() {
    return R"css(
:root{color-scheme:light dark;--back:#fff;--ink:#202327;--soft:#666c74;--grid:#e9eaec;--warn:#c2452d;
--c0:#2f6db3;--c1:#d0772c;--c2:#3c8f5a;--c3:#8a5fa8;--c4:#a5811c;--c5:#2b949c;--c6:#b9507a;--c7:#6d7278}
@media(prefers-color-scheme:dark){:root{--back:#16181b;--ink:#dfe2e6;--soft:#979ea7;--grid:#2b2f34;--warn:#e8745c;
--c0:#6ba5e7;--c1:#e59a58;--c2:#6cbf8a;--c3:#b491d2;--c4:#cfae4e;--c5:#5cc0c8;--c6:#e285aa;--c7:#a3a9b0}}
body{margin:0 auto;max-width:1320px;padding:14px 28px 40px;background:var(--back);color:var(--ink);
font:14px/1.45 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:20px;margin:4px 0 0}h2{font-size:15px;margin:26px 0 8px}p{margin:2px 0;color:var(--soft)}
b{font-weight:600}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.facts{margin:12px 0 14px;width:100%;overflow-x:auto}th{font-weight:400;color:var(--soft);font-size:12px;
text-align:left;padding:0 18px 2px 0}
.facts td{padding:2px 18px 2px 0;white-space:nowrap;vertical-align:top}.facts td:nth-child(2){white-space:normal}
.tiles{display:flex;flex-wrap:wrap;gap:8px 28px}.tiles div{font-size:16px}
.tiles small{display:block;color:var(--soft);font-size:12px}
.many td{border-top:1px solid var(--grid)}.key{display:inline-block;width:14px;height:4px;border-radius:2px;
margin-right:8px;vertical-align:middle}
.pair+.pair{margin-top:14px}
.pair,.grid{display:grid;gap:14px 22px;grid-template-columns:repeat(auto-fit,minmax(min(540px,100%),1fr))}
.grid{grid-template-columns:repeat(auto-fit,minmax(min(360px,100%),1fr))}
figure{margin:0}figcaption{font-size:13px;color:var(--ink);margin:0 0 2px}svg{display:block;width:100%;height:auto}
svg text{font-size:12px;fill:var(--soft)}line.grid{stroke:var(--grid)}
line.axis{stroke:var(--soft)}line.level{stroke:var(--soft);stroke-dasharray:5 4}
line.resume{stroke:var(--soft);stroke-dasharray:1 3}line.skipped{stroke:var(--warn);stroke-width:2}
path.line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}path.faint{opacity:.38;stroke-width:1.2}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;
margin:0;max-height:8.8em;overflow:auto;border-left:3px solid var(--grid);padding-left:12px}
.options{columns:3 300px;column-gap:32px;font-size:13px}.options div{break-inside:avoid;overflow-wrap:anywhere}
.options span,.all th{color:var(--soft)}.all{font-size:13px}.all td{padding:1px 18px 1px 0}.differs td{color:var(--ink)}
.all td{color:var(--soft)}
#tip{position:fixed;pointer-events:none;display:none;background:var(--back);color:var(--ink);
border:1px solid var(--soft);border-radius:4px;padding:2px 8px;font-size:12px;white-space:nowrap}
)css";
}

// Names the point of a line that is nearest to the mouse. The page allows no script but this one, by its hash.
inline const char* page_script() {
    return R"js(
const tip=document.getElementById("tip");
const text=x=>Math.abs(x)>=1e4?Math.round(x).toLocaleString("en"):String(+x.toPrecision(5));
document.querySelectorAll("svg").forEach(svg=>{
  const [left,right,top,bottom,xHigh,low,high,factors]=svg.dataset.axes.split(" ").map(Number);
  const lines=[...svg.querySelectorAll("path.line")].map(path=>({name:path.dataset.name,color:path.style.stroke,
    at:[...path.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map(m=>[+m[1],+m[2]])}));
  svg.onmouseleave=()=>tip.style.display="none";
  svg.onmousemove=event=>{
    const box=svg.getBoundingClientRect(),scale=svg.viewBox.baseVal.width/box.width;
    const x=(event.clientX-box.left)*scale,y=(event.clientY-box.top)*scale;
    let best=null,least=900;
    for(const line of lines)for(const [a,b] of line.at){
      const d=(a-x)**2+(b-y)**2/9;
      if(d<least)least=d,best=[line,a,b];
    }
    if(!best)return void(tip.style.display="none");
    const share=(bottom-best[2])/(bottom-top);
    const value=factors?low*(high/low)**share:low+share*(high-low);
    tip.textContent=best[0].name+": "+text(value)+" at "+text((best[1]-left)/(right-left)*xHigh);
    tip.style.cssText="display:block;border-color:"+best[0].color+";left:"+
      Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8)+"px;top:"+(event.clientY+14)+"px";
  };
});
)js";
}

constexpr const char* PAGE_SCRIPT_HASH = "sha256-oHkOpaQTvwpxoqI736oKj3QrB59NEM7eeiy7tBc/Pp8=";

inline std::string page_head(const std::vector<RunHistory>& runs, double now) {
    const RunHistory& first = runs[0];
    const bool is_done = std::all_of(runs.begin(), runs.end(), [&](const RunHistory& run) {
        return state_of(run, now).compare(0, 8, "finished") == 0;
    });
    const std::string title = runs.size() == 1 ? first.folder : format_text("%zu runs", runs.size());
    std::string html =
        std::string(PAGE_BEGINNING) +
        "report -->\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" "
        "content=\"width=device-width\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
        "style-src 'unsafe-inline'; script-src '" +
        PAGE_SCRIPT_HASH + "'\">" + (is_done ? "" : "\n<meta http-equiv=\"refresh\" content=\"30\">") + "\n<title>" +
        html_text(title) + "</title><style>" + page_style() + "</style></head><body>\n<h1>" + html_text(title) +
        "</h1>\n<p>";
    if (runs.size() == 1 && !first.options.empty())
        html += html_text(format_text("%s preset, %s attention, %s vocabulary, sequences of %s, %s tokens a step. ",
                                      first.option("model").c_str(), first.option("attention").c_str(),
                                      first.option("tokenizer").c_str(), first.option("seq_len").c_str(),
                                      first.option("total_batch").c_str()));
    return html + "Report of " + utc_text(TIME_FORMAT, now) + ".</p>\n";
}

inline std::string page_numbers(const std::vector<RunHistory>& runs, const std::vector<ReportRow>& rows) {
    std::string html;
    if (runs.size() == 1) {
        for (size_t i = 1; i < rows.size(); i++)  // the heading names the run
            html += "<div><small>" + html_text(rows[i].first) + "</small>" + html_text(rows[i].second[0]) + "</div>\n";
        return "<div class=\"facts tiles\">" + html + "</div>\n";
    }
    for (const ReportRow& row : rows) html += "<th>" + html_text(row.first) + "</th>";
    for (size_t r = 0; r < runs.size(); r++) {
        html += "</tr>\n<tr>";
        for (size_t i = 0; i < rows.size(); i++)
            html += "<td>" + (i ? "" : "<span class=\"key\" style=\"background:" + run_color(r) + "\"></span>") +
                    html_text(rows[i].second[r]) + "</td>";
    }
    return "<div class=\"facts\"><table class=\"many\"><tr>" + html + "</tr></table></div>\n";
}

inline std::string page_samples(const std::vector<RunHistory>& runs) {
    std::string html;
    for (size_t r = 0; r < runs.size(); r++)
        if (!runs[r].sample.empty())
            html += "<figure><figcaption>Sample at step " + std::to_string(runs[r].sample_step) +
                    (runs.size() > 1 ? ", " + colored_word(run_color(r), runs[r].folder) : "") + "</figcaption><pre>" +
                    html_text(runs[r].sample) + "</pre></figure>\n";
    return html.empty() ? "" : "<div class=\"pair\">" + html + "</div>\n";
}

inline std::string page_starts(const std::vector<RunHistory>& runs) {
    std::string html;
    for (size_t r = 0; r < runs.size(); r++)
        for (const LogStart& s : runs[r].starts) {
            const auto word = [&](const char* name) {
                const Json* const x = s.facts.find(name);
                if (x && x->kind == Json::Number) return format_text("%.10g", x->number_value);
                return x ? html_text(x->text) : std::string("unknown");
            };
            html += format_text("<tr><td>%s%s</td><td>%.0f</td><td>%s</td><td>%s</td><td>%s</td><td>%s</td></tr>\n",
                                runs.size() > 1 ? colored_word(run_color(r), runs[r].folder).c_str() : "",
                                runs.size() > 1 ? ""
                                : s.at.step > 0 ? "resumed"
                                                : "started",
                                s.at.step, utc_text(TIME_FORMAT, s.time).c_str(), word("version").c_str(),
                                word("ranks").c_str(), word("device").c_str());
        }
    if (html.empty()) return "";
    return "<h2>Starts and resumes</h2><table class=\"all\"><tr><th></th><th>at step</th><th>time</th><th>version</th>"
           "<th>ranks</th><th>device</th></tr>\n" +
           html + "</table>\n";
}

// Of several runs, those options come first in which they differ.
inline std::string page_options(const std::vector<RunHistory>& runs) {
    std::set<std::string> names;
    for (const RunHistory& run : runs)
        for (const auto& [name, value] : run.options) names.insert(name);
    std::string differ, alike, single;
    for (const std::string& name : names) {
        bool same = true;
        std::string row = "<td>" + html_text(name) + "</td>";
        for (const RunHistory& run : runs) {
            same = same && run.option(name) == runs[0].option(name);
            row += "<td>" + html_text(run.option(name)) + "</td>";
        }
        (same ? alike : differ) += (same ? "<tr>" : "<tr class=\"differs\">") + row + "</tr>\n";
        single += "<div><span>" + html_text(name) + "</span> " + html_text(runs[0].option(name)) + "</div>\n";
    }
    if (runs.size() == 1) return "<h2>Options</h2><div class=\"options\">" + single + "</div>\n";
    std::string head = "<tr><th></th>";
    for (size_t r = 0; r < runs.size(); r++) head += "<th>" + colored_word(run_color(r), runs[r].folder) + "</th>";
    return "<h2>Options, first those that differ</h2><table class=\"all\">" + head + "</tr>" + differ + alike +
           "</table>\n";
}

inline std::string report_page(const std::vector<RunHistory>& runs, double now) {
    return page_head(runs, now) + page_numbers(runs, report_rows(runs, now)) + draw_loss_charts(runs) +
           page_samples(runs) + draw_step_charts(runs) + draw_layer_charts(runs) + page_starts(runs) +
           page_options(runs) + "<div id=\"tip\"></div><script>" + page_script() + "</script></body></html>\n";
}

// ---------------------------------------------------------------------------------------------------------------------
// The same on the terminal.

// The mean of what falls into each column, and straight lines over columns that nothing falls into.
inline std::vector<double> column_values(const ChartLine& line, double x_high, size_t columns) {
    std::vector<double> sum(columns), count(columns), value(columns, NAN);
    for (const auto& [x, y] : line.points) {
        const size_t column = std::min(columns - 1, size_t(x / x_high * double(columns)));
        if (std::isfinite(y)) {
            sum[column] += y;
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

// In the text; beyond 62 runs all share one.
inline char run_letter(size_t run) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789*";
    return letters[std::min(run, sizeof letters - 2)];
}

// One run: its validation loss as o, its training loss as a dot; several: a letter each.
inline std::string text_chart(const Chart& c, size_t runs, size_t width) {
    const size_t margin = 9, columns = std::max<size_t>(width, 40) - margin - 1, rows = 16;
    const Axis X = x_axis_of(c), Y = y_axis_of(c, X.high);
    std::vector<std::string> cells(rows, std::string(columns, ' '));
    for (size_t i = 0; i < c.lines.size(); i++) {
        const std::vector<double> values = column_values(c.lines[i], X.high, columns);
        for (size_t column = 0; column < columns; column++) {
            const double row = std::floor((1 - Y.share(values[column])) * double(rows));
            if (row >= 0 && row < double(rows))
                cells[size_t(row)][column] = runs > 1 ? run_letter(i) : c.lines[i].faint ? '.' : 'o';
        }
    }
    std::vector<std::string> labels(rows);
    for (const double y : Y.ticks(5))
        labels[size_t(std::min(double(rows - 1), (1 - Y.share(y)) * double(rows)))] = scaled_text(y, Y.high, "%.10g");
    std::string text;
    for (size_t row = 0; row < rows; row++)
        text += format_text("%*s %s", int(margin) - 2, labels[row].c_str(), labels[row].empty() ? "|" : "+") +
                cells[row].substr(0, cells[row].find_last_not_of(' ') + 1) + "\n";
    std::string under(columns + margin, ' ');
    for (const double x : X.ticks(5)) {
        const std::string label = scaled_text(x, X.high, "%.10g");
        const size_t at = margin + size_t(X.share(x) * double(columns - 1));
        const size_t begin = std::min(at, under.size() - label.size());
        under.replace(begin, label.size(), label);
    }
    return text + std::string(margin - 1, ' ') + "+" + std::string(columns, '-') + "\n" +
           under.substr(0, under.find_last_not_of(' ') + 1) + "\n";
}

inline std::string report_text(const std::vector<RunHistory>& runs, double now, size_t width) {
    const Chart c = loss_chart(runs, &LogPoint::tokens, 1, "");
    const bool one = runs.size() == 1;
    std::string text = one ? "loss: o validation, . training\n" : "loss:";
    for (size_t r = 0; !one && r < runs.size(); r++)
        text += format_text(" %c %s", run_letter(r), printable(runs[r].folder).c_str());
    text += (one ? "" : "\n") + text_chart(c, runs.size(), width) + "\n";
    std::vector<ReportRow> rows = report_rows(runs, now);
    for (auto& [name, values] : rows)
        for (std::string& value : values) value = printable(value);
    std::vector<size_t> widths(runs.size());
    for (const auto& [name, values] : rows)
        for (size_t r = 0; r < runs.size(); r++) widths[r] = std::max(widths[r], values[r].size());
    for (const auto& [name, values] : rows) {
        std::string line = format_text("%-16s", name.c_str());
        for (size_t r = 0; r < runs.size(); r++) line += format_text("  %-*s", int(widths[r]), values[r].c_str());
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
}
