// chart.h: line charts in SVG, and the text of their numbers. Used by run_page.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../base/util.h"

// ---------------------------------------------------------------------------------------------------------------------
// Numbers as text.

// Any text within an element or an attribute in double quotes, as valid UTF-8.
inline std::string html_text(const std::string& text) {
    std::string out;
    for (size_t i = 0, length = 1; i < text.size(); i += length) {
        const char c = text[i];
        uint32_t code;
        const int valid = utf8_decode(text.data() + i, text.size() - i, &code);
        length = valid ? size_t(valid) : 1;
        if (c == '&') out += "&amp;";
        else if (c == '<') out += "&lt;";
        else if (c == '>') out += "&gt;";
        else if (c == '"') out += "&quot;";
        else if (!valid || (code < ' ' && c != '\n' && c != '\t') || code == 127) out += "\xEF\xBF\xBD";
        else out.append(text, i, length);
    }
    return out;
}

// A format with one %; "n/a" for what is not finite.
inline std::string number_in(const char* format, double x) {
    char text[64] = "n/a";
    if (std::isfinite(x)) std::snprintf(text, sizeof text, format, x);
    return text;
}

// In thousands, millions ... where `largest` has five digits or more.
inline std::string scaled_text(double x, double largest, const char* format) {
    if (x == 0) return "0";
    const std::pair<double, const char*> scales[] = {{1e12, " T"}, {1e9, " B"}, {1e6, " M"}, {1e3, " k"}};
    for (const auto& [scale, suffix] : scales)
        if (largest >= std::max(scale, 1e4)) return number_in(format, x / scale) + suffix;
    return number_in(format, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// A chart, in SVG.

struct ChartLine {
    std::string color, name;
    std::vector<std::pair<double, double>> points;  // x rises; y may be NaN, which leaves a gap
    bool dots = false, faint = false;
};

struct Chart {
    std::string caption;
    std::vector<ChartLine> lines;
    std::vector<std::pair<double, std::string>> levels;   // y, what is there
    std::vector<std::pair<double, std::string>> resumes;  // x, whose
    std::vector<std::pair<double, std::string>> skipped;  // x, which step
    double low = NAN, high = NAN;                         // of the y axis, where it is not to follow from the lines
    bool by_factors = false;                              // a logarithmic y axis
    double width = 420, height = 210;
};

// Multiples of 1, 2 or 5 times a power of ten, at most max_steps + 1 of them.
inline std::vector<double> round_ticks(double low, double high, int max_steps) {
    const double least = (high - low) / max_steps, power = std::pow(10, std::floor(std::log10(least)));
    double step = 10 * power;
    for (const double digit : {5, 2, 1})
        if (digit * power >= least * (1 - 1e-9)) step = digit * power;
    std::vector<double> ticks;
    for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && ticks.size() < 50; i++)
        ticks.push_back(i * step);
    return ticks;
}

// 1, 2 and 5 times powers of ten, or powers of ten alone where those are many.
inline std::vector<double> factor_ticks(double low, double high) {
    std::vector<double> ticks;
    for (double power = std::floor(std::log10(low)); power <= std::log10(high); power++)
        for (const double digit : {1, 2, 5})
            if ((digit == 1 || high < 200 * low) && digit * std::pow(10, power) >= low * (1 - 1e-9) &&
                digit * std::pow(10, power) <= high * (1 + 1e-9))
                ticks.push_back(digit * std::pow(10, power));
    return ticks;
}

struct Axis {
    double low, high;
    bool by_factors = false;

    double share(double x) const {
        return by_factors ? std::log(x / low) / std::log(high / low) : (x - low) / (high - low);
    }
    std::vector<double> ticks(int max_steps) const {
        return by_factors ? factor_ticks(low, high) : round_ticks(low, high, max_steps);
    }
};

inline Axis x_axis_of(const Chart& c) {
    double high = 0;
    for (const ChartLine& line : c.lines)
        for (const auto& [x, y] : line.points) high = std::max(high, x);
    return {0, high > 0 ? high : 1};
}

// A long line does not have to show its beginning, where a loss falls from far above, in full.
inline Axis y_axis_of(const Chart& c, double x_high) {
    double low = INFINITY, high = -INFINITY;
    const auto include = [&](double y) {
        if (std::isfinite(y) && (y > 0 || !c.by_factors)) {
            low = std::min(low, y);
            high = std::max(high, y);
        }
    };
    for (const ChartLine& line : c.lines)
        for (const auto& [x, y] : line.points)
            if (line.points.size() <= 12 || x >= 0.03 * x_high || c.by_factors) include(y);
    for (const auto& level : c.levels) include(level.first);
    if (std::isfinite(c.low)) include(std::max(c.low, 0.0));
    if (c.levels.size() > 1) include(low - 0.08 * (high - low));  // room for the lower label
    if (low > high) {
        low = c.by_factors ? 0.1 : 0;
        high = 1;
    }
    if (low == high) {
        low -= low ? std::fabs(low) * 0.1 : 1;
        high += high ? std::fabs(high) * 0.1 : 1;
    }
    const double pad = 0.05 * (high - low);
    low = c.by_factors ? low / 1.1 : low - (low >= 0 && low < pad ? low : pad);
    high = c.by_factors ? high * 1.1 : high + pad;
    return {std::isfinite(c.low) ? c.low : low, std::isfinite(c.high) ? c.high : high, c.by_factors};
}

// Points in pixels as an SVG path. Of those that share a column of pixels the first, lowest, highest and last are kept,
// which draw the same picture.
inline std::string svg_path(const std::vector<std::pair<double, double>>& at) {
    std::string path;
    bool pen_down = false;
    for (size_t i = 0, end; i < at.size(); i = end) {
        size_t low = i, high = i;
        for (end = i;
             end < at.size() && std::isfinite(at[end].second) && std::floor(at[end].first) == std::floor(at[i].first);
             end++) {
            if (at[end].second < at[low].second) low = end;
            if (at[end].second > at[high].second) high = end;
        }
        if (end == i) {
            pen_down = false;
            end++;
            continue;
        }
        for (const size_t k : std::set<size_t>{i, low, high, end - 1}) {
            path += format_text(pen_down ? "L%.2f %.2f" : "M%.2f %.2fh0", at[k].first, at[k].second);
            pen_down = true;
        }
    }
    return path;
}

inline std::string svg_text(double x, double y, const char* anchor, const std::string& text) {
    return format_text("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>", x, y, anchor,
                       html_text(text).c_str());
}

inline std::string svg_line(const char* style, double x1, double y1, double x2, double y2, const std::string& title) {
    return format_text("<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\">", style, x1, y1, x2, y2) +
           (title.empty() ? "" : "<title>" + html_text(title) + "</title>") + "</line>";
}

inline bool has_points(const Chart& c) {
    for (const ChartLine& line : c.lines)
        for (const auto& [x, y] : line.points)
            if (std::isfinite(y)) return true;
    return false;
}

inline std::string draw_chart(const Chart& c) {
    const Axis X = x_axis_of(c), Y = y_axis_of(c, X.high);
    const double left = 50, right = c.width - 14, top = 8, bottom = c.height - 24;
    const auto x_at = [&](double x) { return left + X.share(x) * (right - left); };
    const auto y_at = [&](double y) { return bottom - Y.share(y) * (bottom - top); };
    static int charts = 0;
    const int id = charts++;
    std::string svg = format_text(
        "<figure><figcaption>%s</figcaption>\n<svg viewBox=\"0 0 %g %g\" data-axes=\"%g %g %g %g %.9g %.9g %.9g %d\">"
        "<clipPath id=\"c%d\"><rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\"/></clipPath>\n",
        html_text(c.caption).c_str(), c.width, c.height, left, right, top, bottom, X.high, Y.low, Y.high, Y.by_factors,
        id, left - 3, top - 3, right - left + 6, bottom - top + 6);
    for (const double y : Y.ticks(c.height > 250 ? 6 : 4)) {
        svg += svg_line("grid", left, y_at(y), right, y_at(y), "");
        svg += svg_text(left - 6, y_at(y) + 4, "end", scaled_text(y, Y.high, "%.10g"));
    }
    for (const double x : X.ticks(c.width > 500 ? 8 : 5)) {
        svg += svg_line("axis", x_at(x), bottom, x_at(x), bottom + 4, "");
        svg += svg_text(x_at(x), bottom + 17, "middle", scaled_text(x, X.high, "%.10g"));
    }
    svg += svg_line("axis", left, bottom, right, bottom, "");
    for (const auto& [x, name] : c.resumes) svg += svg_line("resume", x_at(x), top, x_at(x), bottom, name);
    for (const auto& [x, name] : c.skipped) svg += svg_line("skipped", x_at(x), bottom - 7, x_at(x), bottom, name);
    for (size_t i = 0; i < c.levels.size(); i++) {  // the first label stands above its line, the others below
        const double y = y_at(c.levels[i].first);
        svg += svg_line("level", left, y, right, y, "");
        svg += svg_text(right, i || y < top + 14 ? y + 14 : y - 5, "end", c.levels[i].second);
    }
    if (!has_points(c)) svg += svg_text((left + right) / 2, (top + bottom) / 2, "middle", "no value yet");
    svg += format_text("\n<g clip-path=\"url(#c%d)\">", id);
    for (const ChartLine& line : c.lines) {
        std::vector<std::pair<double, double>> at;
        for (const auto& [x, y] : line.points)
            at.emplace_back(x_at(x), std::isfinite(y) && (y > 0 || !Y.by_factors) ? y_at(y) : NAN);
        svg += format_text("\n<path class=\"line%s\" style=\"stroke:%s\" data-name=\"%s\" d=\"%s\"/>",
                           line.faint ? " faint" : "", line.color.c_str(), html_text(line.name).c_str(),
                           svg_path(at).c_str());
        for (size_t i = 0; line.dots && i < at.size() && at.size() <= 100; i++)
            if (std::isfinite(at[i].second))
                svg += format_text("<circle style=\"fill:%s\" cx=\"%.2f\" cy=\"%.2f\" r=\"2.6\"/>", line.color.c_str(),
                                   at[i].first, at[i].second);
    }
    return svg + "</g></svg></figure>\n";
}
