// watchdog.h: a run ends loudly instead of hanging. One thread per process watches the main thread. Where that makes no
// progress for --stall-timeout seconds in work of its own, the thread prints one line that says which rank, where and
// in what, and ends the process; the launcher ends the others. A rank that waits for others gives up ten seconds later,
// so that the guilty one speaks first, and names those that have not come as far by their heartbeats. A slow step that
// makes progress, a slow network that still delivers and a rank that waits for a slow one are no stalls. While a
// checkpoint is written, all ranks have ten times the limit: fsync may take minutes.
#pragma once
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <unistd.h>

#include "../base/clock.h"
#include "../base/files.h"
#include "heartbeat.h"

class Watchdog {
    static constexpr double LOOK_EVERY = 0.2, BEAT_WHEN_WAITING = 1;  // seconds

    int ranks = 1;
    std::string name = "this process";  // in messages
    double limit = 0;                   // seconds; 0: for ever
    std::thread thread;
    std::promise<void> ended;
    std::mutex mutex;
    std::unique_ptr<Heartbeat> heartbeat;  // changed under the mutex

    // The main thread writes these, the watchdog's reads them.
    std::atomic<uint64_t> ticks{0};
    std::atomic<int64_t> step{-1};            // -1: before the first
    std::atomic<const char*> phase{nullptr};  // nullptr: nothing counts as a stall yet
    std::atomic<bool> in_collective{false};

    bool waits_for_others() const;

    // The end must not hang either: on a stderr that takes nothing, on a lock that the main thread holds, on a disk.
    [[noreturn]] void print_and_end(const std::string& error, bool is_stall);

    // idle: seconds without progress.
    void judge(double idle);

    void watch(const std::future<void>& end);

  public:
    double patience_with_others = 10;  // seconds beyond the limit

    ~Watchdog() { stop(); }

    // Called once, by the main thread. seconds: without progress, after which the process ends; 0: never.
    void start(double seconds, int number_of_ranks);
    void stop();
    // This rank in messages, such as "rank 1 on node2, GPU 1".
    void call_it(const std::string& who);
    // From here on step_done() appends a line to this rank's file in the run's folder, where the others have theirs.
    void write_heartbeats(const std::string& run, int rank);

    // The main thread has got this far; costs a few nanoseconds. at_phase: a string that lives as long as the program;
    // "waiting for the other ..." says that this rank waits for others. nullptr: from here on nothing is a stall.
    void note_phase(int64_t at_step, const char* at_phase);
    void tick() { ticks++; }
    void step_done(int64_t at_step, double seconds, double loss);
    // Around a blocking collective of the main thread: whatever the phase is called, this rank waits for others.
    struct Waiting {
        Watchdog& watchdog;
        explicit Waiting(Watchdog& w) : watchdog(w) { watchdog.in_collective = true; }
        ~Waiting() {
            watchdog.tick();
            watchdog.in_collective = false;
        }
    };
};

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "watchdog.cpp"
#endif
