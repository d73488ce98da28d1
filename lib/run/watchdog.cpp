// watchdog.cpp: the functions of watchdog.h.
#include "watchdog.h"

bool Watchdog::waits_for_others() const {
    const char* const p = phase;
    return ranks > 1 && (in_collective || (p && !std::strncmp(p, "waiting for the other", 21)));
}

void Watchdog::print_and_end(const std::string& error, bool is_stall) {
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

void Watchdog::judge(double idle) {
    const bool waiting = waits_for_others();
    const char* const p = phase;
    const double own_limit = p && !std::strcmp(p, "checkpoint") ? 10 * limit : limit;
    if ((!p && !waiting) || idle <= own_limit + (waiting ? patience_with_others : 0)) return;
    const long long at = step;
    std::string where = !p ? "at the start" : (at < 0 ? "" : format_text("at step %d ", at)) + "in '" + p + "'";
    where += format_text(" (--stall-timeout %g)", limit);
    if (!waiting) print_and_end(format_text("%s has made no progress for %.1f s %s", name, idle, where), true);
    const std::string behind = heartbeat ? heartbeat->ranks_behind(ranks, step) : "";
    const bool on_gpus = p && std::strstr(p, "GPUs");
    const std::string why = behind.empty() ? std::string("they do not do the same, are stopped, or ") +
                                                 (on_gpus ? "the GPUs do not reach each other: try NCCL_P2P_DISABLE=1"
                                                          : "the network lost something")
                                           : behind + " not come as far, by the heartbeats; look there";
    print_and_end(format_text("%s has waited %.1f s for the other ranks %s: %s", name, idle, where, why), false);
}

void Watchdog::watch(const std::future<void>& end) {
    uint64_t seen = ticks;
    double last_progress = seconds_now(), last_look = last_progress, last_beat = 0;
    while (end.wait_for(std::chrono::duration<double>(LOOK_EVERY)) != std::future_status::ready) {
        const std::lock_guard lock(mutex);
        const double now = seconds_now();
        // This thread stood still too: Ctrl-Z, or a machine that was suspended. Nobody is to blame.
        if (now - last_look > 1) last_progress = now;
        last_look = now;
        if (const uint64_t t = ticks + bytes_written_to_files; t != seen) {
            seen = t;
            last_progress = now;
        }
        const double idle = now - last_progress;
        if (heartbeat && phase.load() && waits_for_others() && idle > BEAT_WHEN_WAITING && last_beat < last_progress) {
            heartbeat->waits(step);  // so that the others see that this rank has come as far
            last_beat = now;
        }
        if (limit > 0) judge(idle);
    }
}

void Watchdog::start(double seconds, int number_of_ranks) {
    if (seconds > 0 && seconds < 1)
        fail_usage("--stall-timeout %g: ranks are listened to five times a second; give at least 1, or 0 for none",
                   seconds);
    limit = seconds;
    ranks = number_of_ranks;
    if (limit <= 0 && ranks == 1) return;
    thread = start_or_fail("for the watchdog",
                           [this] { return std::thread([this, end = ended.get_future()] { watch(end); }); });
}

void Watchdog::stop() {
    if (!thread.joinable()) return;
    ended.set_value();
    thread.join();
}

void Watchdog::call_it(const std::string& who) {
    const std::lock_guard lock(mutex);
    name = who;
}

void Watchdog::write_heartbeats(const std::string& run, int rank) {
    const std::lock_guard lock(mutex);
    heartbeat = std::make_unique<Heartbeat>(run, rank);
}

void Watchdog::note_phase(int64_t at_step, const char* at_phase) {
    step = at_step;
    phase = at_phase;
    tick();
}

void Watchdog::step_done(int64_t at_step, double seconds, double loss) {
    tick();
    if (heartbeat) heartbeat->step_done(at_step, phase, seconds, loss);
}
