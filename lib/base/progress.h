// progress.h: a line on the terminal for what takes more than a second. Used by every verb. Where stderr is no
// terminal nothing is printed, so that logs hold no progress.
#pragma once
#include <atomic>
#include <chrono>
#include <future>
#include <system_error>
#include <thread>

#include <unistd.h>

#include "errors.h"
#include "clock.h"

inline std::string duration_text(double seconds) {
    const long s = long(seconds + 0.5);
    return s < 3600 ? format_text("%d:%02d", s / 60, s % 60)
                    : format_text("%d:%02d:%02d", s / 3600, s / 60 % 60, s % 60);
}

// Shows what is done as long as it exists. A thread writes the line, so that the work need not be cut into pieces, and
// leaves the cursor at its beginning, so that whatever else is printed takes its place.
class Progress {
  public:
    std::atomic<double> done{0};  // units of `total`

    // total: 0 where it is not known. visible: of several ranks only one shows its progress.
    explicit Progress(const std::string& what, double total = 0, bool visible = true)
        : text(printable(what)), total(total), begin(seconds_now()) {
        if (!visible || !isatty(STDERR_FILENO)) return;
        try {
            thread = std::thread([this, end = ended.get_future()] { show(end); });
        } catch (const std::system_error&) {  // no thread, no progress
        }
    }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;
    ~Progress() {
        if (!thread.joinable()) return;
        ended.set_value();
        thread.join();
    }

    double seconds() const { return seconds_now() - begin; }

  private:
    const std::string text;
    const double total, begin;
    std::promise<void> ended;
    std::thread thread;

    void show(const std::future<void>& end) const {
        if (end.wait_for(std::chrono::seconds(1)) == std::future_status::ready) return;
        do {
            const double share = total > 0 ? std::min(1.0, done / total) : 0;
            std::string line = text + ": ";
            if (share > 0) line += format_text("%.0f %%, ", 100 * share);
            line += duration_text(seconds());
            if (share > 0) line += ", " + duration_text(seconds() * (1 / share - 1)) + " left";
            // a terminal that takes nothing (Ctrl-S) must not keep the work waiting for this thread
            if (takes_output(STDERR_FILENO)) std::fprintf(stderr, "\r%s\033[K\r", line.c_str());
        } while (end.wait_for(std::chrono::milliseconds(200)) != std::future_status::ready);
        if (takes_output(STDERR_FILENO)) std::fputs("\033[K", stderr);
    }
};
