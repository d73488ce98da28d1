// run_history.h: what a run's folder says about it, as series of numbers: of a finished run, of one that is under way,
// and of one that was killed. Used by report.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "../base/files.h"
#include "../base/json.h"
#include "../base/progress.h"
#include "../run/run_folder.h"
#include "../base/errors.h"

struct LogPoint {
    double step, tokens, hours, value;
};
using LogSeries = std::vector<LogPoint>;

// The program was started on this run, at its beginning or for a resume.
struct LogStart {
    LogPoint at;
    Json facts;  // start_record(), parameters, vocab_size, flops_per_token, peak_flops
};

struct RunHistory {
    std::string folder;
    std::map<std::string, std::string> options;  // of run.json, names spelt as there
    std::map<std::string, LogSeries> numbers;    // by the names of for_each_number()
    std::vector<LogStart> starts;
    LogSeries skipped;            // steps that changed no weight
    std::string sample, val_set;  // val_set: name of the validation set that decides
    int64_t sample_step = 0, last_step = 0;
    double hours = 0;       // at work: from start to start, without what lies between
    double last_time = 0;   // of the last line, since 1970
    double last_clock = 0;  // the same by a clock that nobody sets
    size_t unreadable = 0;
    bool torn = false;  // the last line is not whole

    const LogSeries& series(const std::string& name) const {
        static const LogSeries none;
        const auto found = numbers.find(name);
        return found == numbers.end() ? none : found->second;
    }
    std::string option(const std::string& name) const {
        const auto found = options.find(name);
        return found == options.end() ? "" : found->second;
    }
    size_t layers() const {
        const std::string name = "gate_entropy/layer_";
        int n = 0;  // layers without gates have no numbers
        for (const auto& [key, series] : numbers)
            if (key.compare(0, name.size(), name) == 0 && key.size() < name.size() + 4)  // no model has 1000 layers
                n = std::max(n, std::atoi(key.c_str() + name.size()) + 1);
        return size_t(n);
    }
    // A number of the last start; 0 where the log does not have it.
    double fact(const std::string& name) const {
        const Json* const x = starts.empty() ? nullptr : starts.back().facts.find(name);
        return x ? x->number_value : 0;
    }
    size_t resumes() const {
        return size_t(std::count_if(starts.begin(), starts.end(), [](const LogStart& s) { return s.at.step > 0; }));
    }
};

// NaN where there is none.
inline double last_value(const LogSeries& series) {
    return series.empty() ? std::numeric_limits<double>::quiet_NaN() : series.back().value;
}

// The upper median of the finite values, as a run itself prints it; NaN where there are none.
inline double median_value(const LogSeries& series) {
    std::vector<double> values;
    for (const LogPoint& p : series)
        if (std::isfinite(p.value)) values.push_back(p.value);
    std::sort(values.begin(), values.end());
    return values.empty() ? std::numeric_limits<double>::quiet_NaN() : values[values.size() / 2];
}

// Share of the peak of the processors; NaN where the peak is unknown.
inline double flops_utilisation(const RunHistory& run) {
    const double peak = run.fact("peak_flops") * run.fact("ranks");
    if (!(peak > 0)) return std::numeric_limits<double>::quiet_NaN();
    return median_value(run.series("tokens_per_s")) * run.fact("flops_per_token") / peak;
}

// The largest that was logged, of a GPU where there is one; NaN where none was.
inline double peak_memory(const RunHistory& run) {
    double peak = std::numeric_limits<double>::quiet_NaN();
    const bool gpu = run.numbers.count("peak_gpu_memory_mib");
    for (const LogPoint& p : run.series(gpu ? "peak_gpu_memory_mib" : "peak_memory_mib"))
        peak = std::fmax(peak, p.value);
    return peak;
}

inline bool is_finished(const RunHistory& run) {
    const std::string steps = run.option("steps");
    return !steps.empty() && run.last_step >= std::atoll(steps.c_str());
}

// now: since 1970. A run whose last line is no older than a minute, or than a few of its steps, is taken to be at work;
// one whose clock went far ahead is not.
inline std::string describe_state(const RunHistory& run, double now) {
    const std::string steps = run.option("steps");
    const std::string at = format_text("step %d", run.last_step) + (steps.empty() ? "" : " of " + steps);
    const bool saved = is_folder(format_text("%s/step_%08d", run.folder, run.last_step));
    if (is_finished(run)) return (saved ? "finished, " : "at its end, whose checkpoint is not here, ") + at;
    const double age = std::fabs(now - run.last_time), step_ms = median_value(run.series("ms"));
    const double patience = std::fmax(60, std::isfinite(step_ms) ? step_ms * 5e-3 : 0);
    return (age < patience ? "running, " : "ended early, ") + at;
}

inline void add_log_line(RunHistory& run, const Json& line, const std::string& path) {
    const double step = double(line.integer("step", path)), time = line.number("time", path),
                 clock = line.number("clock", path);
    const Json *const start = line.find("start"), *const tokens = line.find("tokens");
    const double seen = tokens ? tokens->number(path) : 0;
    if (!(time >= 0 && time < 1e11 && clock >= 0 && clock < 1e11 && seen >= 0 && seen < 1e18 && step >= 0))
        fail("%s: byte %d: no step, time and tokens of a run", path, line.offset);
    if (const Json* const set = line.find("val_set")) run.val_set = set->string(path);
    if (run.last_time > 0 && !start) run.hours += std::fmax(0, clock - run.last_clock) / 3600;
    run.last_clock = clock;
    run.last_time = time;
    run.last_step = std::max(run.last_step, int64_t(step));
    LogPoint point = {step, seen, run.hours, 0};
    if (!tokens && !run.series("tokens").empty()) point.tokens = run.series("tokens").back().value;
    if (start) run.starts.push_back({point, *start});
    if (const Json* sample = line.find("sample")) {
        run.sample = sample->string(path);
        run.sample_step = int64_t(step);
    }
    const Json* const skipped = line.find("skipped");
    if (skipped && skipped->is_true) run.skipped.push_back(point);
    for_each_number(line, [&](const std::string& name, double value) {
        point.value = value;
        run.numbers[name].push_back(point);
    });
}

// A line that is no whole line of a log is counted: the last one of a run that was killed, or that is just being
// written.
inline void read_log(RunHistory& run, const std::string& path) {
    const std::string text = read_file(path);
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        try {
            add_log_line(run, parse_json(text.substr(begin, end - begin), path, begin), path);
        } catch (const Error&) {
            if (end == text.size()) run.torn = true;
            else run.unreadable++;
        }
    }
}

inline RunHistory read_run_history(std::string folder) {
    while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
    const std::string path = folder + "/log.jsonl";
    if (!file_exists(folder)) fail("--from %s: no such folder; give that of a run, such as runs/tiny", folder);
    if (!is_folder(folder)) fail("--from %s is a file: give the folder of a run", folder);
    if (!file_exists(path) && file_exists(folder + "/model.safetensors"))
        fail("--from %s is a checkpoint, which has no log: give the folder of its run", folder);
    if (!file_exists(path)) fail("--from %s holds no log.jsonl: give the folder of a run", folder);
    RunHistory run;
    run.folder = folder;
    read_log(run, path);
    if (run.numbers.empty() && run.starts.empty())
        fail("%s: none of its lines is one of a run's log%s", path, run.torn ? "; the last is torn" : "");
    const std::string options = folder + "/run.json";
    if (!file_exists(options)) return run;
    const Json json = parse_own_json(read_file(options), options);
    for (size_t i = 0; i < json.keys.size(); i++) {
        const Json& x = json.items[i];
        if (x.kind == Json::String) run.options[json.keys[i]] = x.text;
        else if (x.kind == Json::Number) run.options[json.keys[i]] = format_text("%.15g", x.number_value);
    }
    return run;
}
