// heartbeat.h: one JSON line for every step, appended to a file for whoever watches the run from outside, and for the
// other ranks where one of them stands still. The watchdog writes it.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/files.h"
#include "../base/json.h"
#include "../base/system.h"

class Heartbeat {
    const std::string folder;
    const int rank;
    int file = -1;
    bool warned = false;

    std::string path_of(int r) const { return format_text("%s/heartbeat_rank%d.jsonl", folder, r); }
    // A file that cannot be written is reported once and does not stop the run.
    void warn() {
        if (!warned && takes_output(STDERR_FILENO))  // not by complain(), which would wait for whoever holds stdout
            std::fprintf(stderr, "train_nsa: warning: cannot write the heartbeat file %s: %s; training goes on\n",
                         printable(path_of(rank)).c_str(), std::strerror(errno));
        warned = true;
    }
    // Writes the line in one piece where the disk takes it so: then lines of two threads do not mix.
    void append(const std::initializer_list<Json::Member>& members) {
        const std::string line =
            Json{{"time", {unix_time(), "%.3f"}}, {"rank", rank}}.add(members).to_text(Json::COMPACT) + "\n";
        if (file >= 0 && !error_of([&] { write_all(file, line.data(), line.size(), path_of(rank)); }).empty()) warn();
    }

  public:
    Heartbeat(const std::string& run, int my_rank) : folder(run), rank(my_rank) {
        file = open(path_of(rank).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
        if (file < 0) warn();
    }
    ~Heartbeat() {
        if (file >= 0) close(file);
    }
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    void step_done(int64_t step, const char* phase, double seconds, double loss) {
        append({{"step", step},
                {"phase", phase ? phase : "start"},
                {"ms", {seconds * 1000, "%.2f"}},
                {"loss", {loss, "%.6f"}},
                {"memory_mib", {resident_bytes() / (1 << 20), "%.1f"}}});
    }
    // This rank has done its part of the step and waits for the others.
    void waits(int64_t step) { append({{"waiting_in_step", step}}); }
    void stalls(int64_t step, const std::string& text) { append({{"stalled_in_step", step}, {"text", text}}); }

    // Names the ranks whose files end before this step's wait, as "ranks 1, 3 have"; "" where that cannot be told.
    std::string ranks_behind(int ranks, int64_t step) const {
        std::string list;
        int count = 0;
        for (int r = 0; r < ranks; r++) {
            const std::string line = last_line(path_of(r));
            long long at = -1;
            const size_t waits = line.find("\"waiting_in_step\":"), done = line.find("\"step\":");
            if (waits != std::string::npos) std::sscanf(line.c_str() + waits, "\"waiting_in_step\":%lld", &at);
            else if (done != std::string::npos && std::sscanf(line.c_str() + done, "\"step\":%lld", &at) == 1) at--;
            if (r == rank || line.empty() || at >= step) continue;
            list += (count++ ? ", " : "") + std::to_string(r);
        }
        return count == 0 ? "" : (count == 1 ? "rank " : "ranks ") + list + (count == 1 ? " has" : " have");
    }
};
