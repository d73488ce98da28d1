// heartbeat.h: one JSON line for every step, appended to a file for whoever watches the run from outside, and for the
// other ranks where one of them stands still. The watchdog writes it.
#pragma once
#include <cerrno>
#include <cmath>
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
    std::string path;
    int rank, file = -1;
    bool warned = false;

    // A file that cannot be written is reported once and does not stop the run.
    void warn();
    // Writes the line in one piece where the disk takes it so: then lines of two threads do not mix.
    void append(const std::initializer_list<Json::Member>& members);

  public:
    Heartbeat(const std::string& file_path, int my_rank) : path(file_path), rank(my_rank) {
        file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
        if (file < 0) warn();
    }
    ~Heartbeat() {
        if (file >= 0) close(file);
    }
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    void step_done(int64_t step, const char* phase, double seconds, double loss);
    // This rank has done its part of the step and waits for the others.
    void waits(int64_t step);
    void stalls(int64_t step, const std::string& text);

    // Names the ranks whose files end before this step's wait, as "ranks 1, 3 have"; "" where that cannot be told.
    std::string ranks_behind(int ranks, int64_t step) const;
};

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "heartbeat.cpp"
#endif
