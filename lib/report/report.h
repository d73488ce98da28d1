// report.h: the verb `report`: runs beside each other as one HTML page, which is html/report.html with their numbers in
// it, or as text on the terminal.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "run_history.h"

// What is said about runs in one word or number each: a name, and its value for every run. now: since 1970.
using ReportRow = std::pair<std::string, std::vector<std::string>>;
std::vector<ReportRow> list_numbers(const std::vector<RunHistory>& runs, double now);

// At most 600 points, or 600 pairs of the lowest and the highest of as many neighbours, which draw the same picture.
LogSeries thin_out(const LogSeries& series);

// A page of html/ with its numbers. Any '<' in the JSON could end the script that holds it, or hide its end; as \u003c
// it is the same JSON.
inline std::string fill_page(std::string page, std::string json) {
    for (size_t at = 0; (at = json.find('<', at)) != std::string::npos;) json.replace(at, 1, "\\u003c");
    const std::string place = "@JSON@";
    return page.replace(page.find(place), place.size(), json);
}
std::string make_report_page(const std::vector<RunHistory>& runs, double now);

// Multiples of 1, 2 or 5 times a power of ten, at most max_steps + 1 of them.
std::vector<double> round_ticks(double low, double high, int max_steps);

// In thousands, millions ... where `largest` has five digits or more.
std::string scaled_text(double x, double largest, const char* format);

std::string make_report_text(const std::vector<RunHistory>& runs, double now, size_t width);

// Shows the runs in these folders in a file, or on the terminal if html is "".
void report_runs(const std::vector<std::string>& folders, const std::string& html);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "report.cpp"
#endif
