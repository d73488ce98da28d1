// heartbeat.h: one JSON line for every step, appended to a file for whoever watches the run from outside. The watchdog
// writes it.
#pragma once
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include "util.h"

class Heartbeat {
    std::string path;
    int rank, file = -1;
    bool warned = false;

    // A file that cannot be written is reported once and does not stop the run.
    void warn() {
        if (!warned)
            std::fprintf(stderr, "train_nsa: warning: cannot write the heartbeat file %s: %s; training goes on\n",
                         path.c_str(), std::strerror(errno));
        warned = true;
    }
    static double resident_mib() {
        std::FILE* f = std::fopen("/proc/self/statm", "r");
        long long size = 0, resident = 0;
        const bool read = f && std::fscanf(f, "%lld %lld", &size, &resident) == 2;
        if (f) std::fclose(f);
        return read ? double(resident) * double(sysconf(_SC_PAGESIZE)) / (1 << 20) : 0.0;
    }

  public:
    // An empty path: no file.
    Heartbeat(const std::string& file_path, int my_rank) : path(file_path), rank(my_rank) {
        if (path.empty()) return;
        file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
        if (file < 0) warn();
    }
    ~Heartbeat() {
        if (file >= 0) close(file);
    }
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    void step_done(int64_t step, const char* phase, double seconds, double loss) {
        if (file < 0) return;
        const std::string loss_text = std::isfinite(loss) ? format_text("%.6f", loss) : "null";
        const std::string line = format_text(
            "{\"time\":%.3f,\"rank\":%d,\"step\":%lld,\"phase\":\"%s\",\"ms\":%.2f,\"loss\":%s,\"memory_mib\":%.1f}\n",
            unix_time(), rank, (long long)step, phase ? phase : "start", seconds * 1000, loss_text.c_str(),
            resident_mib());
        for (size_t done = 0; done < line.size();) {
            const ssize_t written = write(file, line.data() + done, line.size() - done);
            if (written > 0) done += size_t(written);
            else if (written == 0 || errno != EINTR) return warn();
        }
    }
};
