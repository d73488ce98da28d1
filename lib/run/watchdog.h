// watchdog.h: a run ends loudly instead of hanging. One thread per process watches the main thread. Where that makes no
// progress for --stall-timeout seconds in work of its own, the thread prints one line that says which rank, where and
// in what, and ends the process; the launcher ends the others. A rank that waits for others gives up ten seconds later,
// so that the guilty one speaks first, and names those that have not come as far by their heartbeats. A slow step that
// makes progress, a slow network that still delivers and a rank that waits for a slow one are no stalls. While a
// checkpoint is written, all ranks have ten times the limit: fsync may take minutes.
#pragma once
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <unistd.h>

#include "../base/files.h"
#include "heartbeat.h"
#include "../base/util.h"

class Watchdog {
    static constexpr double LOOK_EVERY = 0.2, BEAT_WHEN_WAITING = 1;  // seconds

    int ranks = 1;
    std::string name = "this process";  // in messages
    double limit = 0;                   // seconds; 0: for ever
    std::thread thread;
    std::mutex mutex;
    std::condition_variable woken;
    bool ends = false;
    std::unique_ptr<Heartbeat> heartbeat;  // changed under the mutex

    // The main thread writes these, the watchdog's reads them.
    std::atomic<uint64_t> ticks{0};
    std::atomic<int64_t> step{-1};            // -1: before the first
    std::atomic<const char*> phase{nullptr};  // nullptr: nothing counts as a stall yet
    std::atomic<bool> in_collective{false};

    bool waits_for_others() const {
        const char* const p = phase;
        return ranks > 1 && (in_collective || (p && !std::strncmp(p, "waiting for the other", 21)));
    }

    // The end must not hang either: on a stderr that takes nothing, on a lock that the main thread holds, on a disk.
    [[noreturn]] void report_and_end(const std::string& error, bool is_stall) {
        std::signal(SIGALRM, [](int) { _exit(1); });
        alarm(10);
        const std::string line = "train_nsa: error: " + error + "\n";
        if (ftrylockfile(stdout) == 0) {
            output().settle();
            funlockfile(stdout);
        }
        // Not through stdio, whose lock the main thread may hold. Without a stderr the status must do.
        if (takes_output(STDERR_FILENO)) (void)!write(STDERR_FILENO, line.data(), line.size());
        if (heartbeat && is_stall) heartbeat->stalls(step, line);
        if (ranks > 1) usleep(200000);  // a launcher forwards what was printed, but not after a rank's bad end
        std::_Exit(1);
    }

    // idle: seconds without progress.
    void judge(double idle) {
        const bool waiting = waits_for_others();
        const char* const p = phase;
        const double own_limit = p && !std::strcmp(p, "checkpoint") ? 10 * limit : limit;
        if ((!p && !waiting) || idle <= own_limit + (waiting ? patience_with_others : 0)) return;
        const long long at = step;
        std::string where = at < 0 ? "before the first step" : format_text("at step %lld in '%s'", at, p);
        where += format_text(" (--stall-timeout %g)", limit);
        if (!waiting)
            report_and_end(format_text("%s has made no progress for %.1f s %s", name.c_str(), idle, where.c_str()),
                           true);
        const std::string behind = heartbeat ? heartbeat->ranks_behind(ranks, step) : "";
        const std::string why = behind.empty() ? "they do not do the same, are stopped, or the network lost something"
                                               : behind + " not come as far, by the heartbeats; look there";
        report_and_end(format_text("%s has waited %.1f s for the other ranks %s: %s", name.c_str(), idle, where.c_str(),
                                   why.c_str()),
                       false);
    }

    void watch() {
        uint64_t seen = ticks;
        double last_progress = seconds_now(), last_look = last_progress, last_beat = 0;
        for (std::unique_lock lock(mutex); !ends;) {
            woken.wait_for(lock, std::chrono::duration<double>(LOOK_EVERY));
            const double now = seconds_now();
            // This thread stood still too: Ctrl-Z, or a machine that was suspended. Nobody is to blame.
            if (now - last_look > 1) last_progress = now;
            last_look = now;
            if (const uint64_t t = ticks + bytes_written_to_files; t != seen) {
                seen = t;
                last_progress = now;
            }
            const double idle = now - last_progress;
            if (heartbeat && phase.load() && waits_for_others() && idle > BEAT_WHEN_WAITING &&
                last_beat < last_progress) {
                heartbeat->waits(step);  // so that the others see that this rank has come as far
                last_beat = now;
            }
            if (limit > 0) judge(idle);
        }
    }

  public:
    double patience_with_others = 10;  // seconds beyond the limit

    ~Watchdog() { stop(); }

    // Called once, by the main thread. seconds: without progress, after which the process ends; 0: never.
    void start(double seconds, int number_of_ranks) {
        limit = seconds;
        ranks = number_of_ranks;
        if (limit <= 0 && ranks == 1) return;
        thread = start_or_fail("for the watchdog", [this] { return std::thread([this] { watch(); }); });
    }
    void stop() {
        if (!thread.joinable()) return;
        std::unique_lock lock(mutex);
        ends = true;
        lock.unlock();
        woken.notify_one();
        thread.join();
    }
    // This rank in messages, such as "rank 1 on node2, GPU 1".
    void call_it(const std::string& who) {
        const std::lock_guard lock(mutex);
        name = who;
    }
    // From here on step_done() appends a line to this file, beside which the other ranks have theirs.
    void write_heartbeats(const std::string& file, int rank) {
        const std::lock_guard lock(mutex);
        heartbeat = std::make_unique<Heartbeat>(file, rank);
    }

    // The main thread has got this far; costs a few nanoseconds. at_phase: a string that lives as long as the program;
    // "waiting for the other ..." says that this rank waits for others.
    void progress(int64_t at_step, const char* at_phase) {
        step = at_step;
        phase = at_phase;
        tick();
    }
    void tick() { ticks++; }
    void step_done(int64_t at_step, double seconds, double loss) {
        tick();
        if (heartbeat) heartbeat->step_done(at_step, phase, seconds, loss);
    }
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
