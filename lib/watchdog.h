// watchdog.h: a run ends loudly instead of hanging. One thread per process looks whether the main thread
// makes progress and, where there are several ranks, speaks with rank 0 over a connection of its own (a
// star), whatever carries the gradients. What it finds, it prints in one line, and all ranks end:
//   - a rank died: its connection closed without a goodbye. Noticed at once;
//   - a rank stands still outside of a waiting phase for --stall-timeout: it says so itself, with the stack of its main
//   thread;
//   - a rank is silent, its watchdog too (stopped, swapped out, cut off): rank 0 says so; rank 1 if the silent one is
//   rank 0;
//   - all ranks wait for each other: rank 0 says so;
//   - a rank failed and has printed its error: the others end with the same status, without a word.
// A slow step that makes progress, a slow network over which buckets still arrive, and a rank that waits for a slow one
// are no stall.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <cxxabi.h>
#include <execinfo.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util.h"

// ---------------------------------------------------------------------------------------------------------------------
// The stack of the main thread, taken from another thread: a signal makes the main thread write its return addresses
// into an array, the watchdog thread turns them into names. Functions have names where the program is linked with
// -rdynamic, else addresses for addr2line.

class MainThreadStack {
  public:
    static constexpr int SIGNAL = SIGUSR2;

    // Called by the main thread. The first backtrace() loads the unwinder, which a signal handler must not do.
    void prepare() {
        thread = pthread_self();
        void* first[1];
        backtrace(first, 1);
        struct sigaction action = {};
        action.sa_handler = [](int) {
            const int error = errno;
            depth.store(backtrace(frames, MAX_DEPTH), std::memory_order_release);
            errno = error;
        };
        action.sa_flags = SA_RESTART;
        sigaction(SIGNAL, &action, nullptr);
    }

    // One frame a line, innermost first; called by the watchdog thread.
    std::string text() {
        depth.store(0, std::memory_order_relaxed);
        pthread_kill(thread, SIGNAL);
        int found = 0;
        for (int wait = 0; wait < 100 && !found; wait++) usleep(10000), found = depth.load(std::memory_order_acquire);
        if (!found)
            return "    the main thread does not answer a signal: it is inside a system call that cannot be "
                   "interrupted (a disk, "
                   "a network file system, a driver)\n";
        const int own_frames = 2;  // the handler and the kernel's return from it
        std::string lines;
        char** symbols = backtrace_symbols(frames, found);
        for (int i = std::min(own_frames, found - 1); symbols && i < found; i++)
            lines += "    " + readable(symbols[i]) + "\n";
        std::free(symbols);
        return lines;
    }

  private:
    static constexpr int MAX_DEPTH = 64;
    inline static void* frames[MAX_DEPTH];
    inline static std::atomic<int> depth{0};
    pthread_t thread = {};

    // "./train_nsa(_Z7forwardv+0x1c) [0x55..]" with the C++ name in place of the linker's.
    static std::string readable(const std::string& symbol) {
        const size_t open = symbol.find('('), plus = symbol.find('+', open);
        if (open == std::string::npos || plus == std::string::npos || plus == open + 1) return symbol;
        int status = 0;
        char* name = abi::__cxa_demangle(symbol.substr(open + 1, plus - open - 1).c_str(), nullptr, nullptr, &status);
        const std::string text = status == 0 ? symbol.substr(0, open + 1) + name + symbol.substr(plus) : symbol;
        std::free(name);
        return text;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The control channel: the thread and the star. It belongs to World and runs from World's construction where there are
// several ranks, so that errors before the first step end all ranks too; alone, a process has the thread only while a
// Watchdog watches.

class ControlChannel {
  public:
    ~ControlChannel() { stop(); }

    // hosts [ranks]: host names. sockets [ranks]: connected TCP sockets, on rank 0 to every other rank ([0] unused), on
    // the others [0] to rank 0; they belong to the channel from now on. launcher_ends_all: an MPI launcher ends the
    // other processes when one exits.
    void start(int my_rank, const std::vector<std::string>& rank_hosts, const std::vector<int>& sockets,
               bool launcher_ends_all) {
        rank = my_rank, hosts = rank_hosts, under_mpi = launcher_ends_all;
        for (int r = 0; r < int(sockets.size()); r++)
            if (sockets[size_t(r)] >= 0) links.emplace_back(r, sockets[size_t(r)]);
        start_thread();
    }
    void start_alone(const std::string& host) {
        hosts = {host};
        start_thread();
    }
    bool running() const { return thread.joinable(); }
    // Another rank has failed and printed why; this process is about to end.
    bool ended_by_another() const { return others_error.load(); }
    int ranks() const { return int(hosts.size()); }

    // The main thread, a few nanoseconds each. phase: a string that lives as long as the program; "waiting..." says
    // that this rank waits for others. Until the first call nothing is taken for a stall.
    void progress(int64_t at_step, const char* at_phase) {
        step.store(at_step, std::memory_order_relaxed);
        phase.store(at_phase, std::memory_order_relaxed);
        tick();
    }
    void tick() { ticks.store(ticks.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
    // Any thread: bytes have moved between ranks. Progress for a rank that waits, but not for one that should compute
    // meanwhile.
    void bytes_moved() { moves.fetch_add(1, std::memory_order_relaxed); }
    // What this rank computes on, such as "GPU 1", for messages: a string that lives as long as the program.
    void computes_on(const char* what) { device.store(what); }
    const char* current_phase() const { return phase.load(std::memory_order_relaxed); }
    // Around a blocking collective: whatever the phase is called, this rank
    // waits for others. In another thread than the main one it says nothing.
    struct Waiting {
        ControlChannel& channel;
        const bool on_main_thread;
        explicit Waiting(ControlChannel& c) : channel(c), on_main_thread(pthread_equal(c.main_thread, pthread_self())) {
            if (on_main_thread) channel.in_collective.store(true, std::memory_order_relaxed);
        }
        ~Waiting() {
            if (on_main_thread) channel.tick(), channel.in_collective.store(false, std::memory_order_relaxed);
        }
        Waiting(const Waiting&) = delete;
        Waiting& operator=(const Waiting&) = delete;
    };

    // From here on the main thread must make progress at least every `seconds`; 0: whatever it does is right.
    void watch(double seconds) {
        stack.prepare();
        tick();
        stall_timeout.store(seconds);
    }
    void unwatch() { stall_timeout.store(0); }
    // The run is over. Several ranks stay watched until all have said goodbye: what they
    // share (NCCL, MPI) is taken down together, and one that stands still holds up all.
    void unwatch_alone() {
        if (ranks() == 1) return unwatch();
        phase.store("waiting for all ranks to end", std::memory_order_relaxed);
        tick();
    }

    // All ranks have called finish: returns when they have, or this process is ended because one failed meanwhile.
    void finish() {
        if (!running()) return;
        if (ranks() > 1) {
            Waiting waiting(*this);
            ask(GOODBYE);
            while (!done.load()) usleep(1000);
        }
        stop();
    }

    // This rank ends with an error that is already printed: tells the others and returns when they know, after a second
    // at most.
    void tell_failure(int status) {
        if (!running() || ranks() == 1) return;
        failure_status.store(status);
        ask(FAIL);
        for (int wait = 0; wait < 1500 && !done.load(); wait++) usleep(1000);
    }

    // A collective found its partner gone. The channel learns of a death or a failure in the same moment, names it and
    // ends the process; if it has not within this time, the caller reports what it saw.
    void wait_for_verdict() const {
        if (running()) usleep(3'000'000);
    }

    // Without a goodbye: the others take it for this rank's death.
    void stop() {
        if (running()) {
            ask(STOP);
            thread.join();
            close(wake), wake = -1;
        }
        for (Link& link : links) link.shut();
        links.clear();
    }

  private:
    enum Request : int { NONE, GOODBYE, FAIL, STOP };
    enum Kind : uint32_t { ALIVE = 1, LEAVING = 2, FAILED = 3 };
    struct Message {
        uint32_t kind;
        int32_t status;   // FAILED: exit status of all
        int64_t step;     // ALIVE: of the sender's main thread; -1 before the first
        int32_t idle_ms;  // ALIVE: how long it has made no progress
        int32_t waiting;  // ALIVE: it waits for others
        char phase[40];
        char device[16];  // ALIVE: what it computes on, "" until that is known
    };
    struct Link {
        int rank, socket;
        std::string received, unsent;
        Message last{};
        double last_heard = seconds_now();
        bool left = false;
        Link(int r, int s) : rank(r), socket(s) { fcntl(s, F_SETFL, fcntl(s, F_GETFL) | O_NONBLOCK), last.step = -1; }
        void shut() {
            if (socket >= 0) close(socket);
            socket = -1;
        }
    };

    const pthread_t main_thread = pthread_self();
    int rank = 0;
    std::vector<std::string> hosts;
    bool under_mpi = false;
    std::vector<Link> links;  // the thread's alone while it runs
    std::thread thread;
    int wake = -1;
    MainThreadStack stack;

    // Written by the main thread (moves: by whichever speaks with other ranks), read by the channel's.
    std::atomic<uint64_t> ticks{0}, moves{0};
    std::atomic<int64_t> step{-1};
    std::atomic<const char*> phase{nullptr}, device{""};
    std::atomic<bool> in_collective{false};
    std::atomic<double> stall_timeout{0};
    std::atomic<int> request{NONE}, failure_status{1};
    std::atomic<bool> done{false};  // the other way: the request is fulfilled
    std::atomic<bool> others_error{false};

    // The thread's view of the main thread.
    uint64_t seen_ticks = 0, seen_moves = 0;
    double last_progress = seconds_now();

    void start_thread() {
        wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake < 0) fail("cannot make an eventfd for the watchdog: %s", std::strerror(errno));
        request.store(NONE), done.store(false), last_progress = seconds_now();
        sigset_t all, before;  // signals are for the main thread
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);
        thread = std::thread([this] { run(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    void ask(Request what) {
        request.store(what);
        eventfd_write(wake, 1);
    }

    std::string name_of(int r) const {
        std::string on = r == rank ? device.load() : "";
        for (const Link& link : links)
            if (link.rank == r) on = link.last.device;
        return format_text("rank %d on %s%s%s", r, hosts[size_t(r)].c_str(), on.empty() ? "" : ", ", on.c_str());
    }
    static std::string where(int64_t at_step, const char* at_phase) {
        return at_step < 0 ? "before the first step"
                           : format_text("at step %lld in '%s'", (long long)at_step, at_phase);
    }

    static constexpr double INTERVAL =
        0.2;  // seconds between two looks and two messages; deaths and failures wake the thread at once

    Message own_state(double now) const {
        Message m{};
        m.kind = ALIVE, m.step = step.load(std::memory_order_relaxed);
        const char* p = phase.load(std::memory_order_relaxed);
        std::snprintf(m.phase, sizeof m.phase, "%s", p ? p : "start");
        std::snprintf(m.device, sizeof m.device, "%s", device.load());
        m.waiting = in_collective.load(std::memory_order_relaxed) || !std::strncmp(m.phase, "waiting", 7);
        m.idle_ms = int32_t(std::min(2e9, (now - last_progress) * 1000));
        return m;
    }

    void run() {
        double last_look = seconds_now(), next_message = 0;
        bool said_goodbye = false;
        while (true) {
            receive(said_goodbye);
            const int wanted = request.load();
            if (wanted == STOP) return;
            if (wanted == FAIL) {
                tell_all(failure_status.load());
                done.store(true);
                return;
            }
            const double now = seconds_now();
            forgive_own_absence(now, last_look);
            last_look = now;
            look_at_main_thread(now);
            if (wanted == GOODBYE && finished(said_goodbye)) {
                done.store(true);
                return;
            }
            if (now >= next_message) {
                next_message = now + INTERVAL;
                if (!(said_goodbye && rank != 0))
                    for (Link& link : links) send_to(link, own_state(now));
            }
            if (stall_timeout.load() > 0) judge(now);
        }
    }

    void look_at_main_thread(double now) {
        const uint64_t t = ticks.load(std::memory_order_relaxed), m = moves.load(std::memory_order_relaxed);
        if (t != seen_ticks || (m != seen_moves && own_state(now).waiting)) last_progress = now;
        seen_ticks = t, seen_moves = m;
    }

    // A process that was stopped as a whole (Ctrl-Z, a debugger, a suspended machine) has heard nothing meanwhile and
    // judges nobody by it.
    void forgive_own_absence(double now, double last_look) {
        if (now - last_look < 1) return;
        last_progress = now;
        for (Link& link : links) link.last_heard = now;
    }

    // True when all ranks are done. A rank says goodbye to rank 0; rank 0, when all have and it is done itself, to
    // everybody.
    bool finished(bool& said_goodbye) {
        if (rank != 0) {
            if (!said_goodbye) send_to(links[0], message(LEAVING, 0));
            said_goodbye = true;
            return links[0].left;
        }
        for (const Link& link : links)
            if (!link.left) return false;
        for (Link& link : links) send_to(link, message(LEAVING, 0));
        return true;
    }

    static Message message(Kind kind, int status) {
        Message m{};
        m.kind = kind, m.status = status;
        return m;
    }

    // Never blocks: what the socket does not take now is kept for the next look. To a rank that reads nothing for long,
    // only news is kept.
    static void send_to(Link& link, const Message& m) {
        if (link.socket < 0) return;
        if (m.kind != ALIVE || link.unsent.empty()) link.unsent.append(reinterpret_cast<const char*>(&m), sizeof m);
        const ssize_t sent = send(link.socket, link.unsent.data(), link.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) link.unsent.erase(0, size_t(sent));
    }

    // Waits for news, at most an interval, and reads it.
    void receive(bool said_goodbye) {
        std::vector<pollfd> polled = {{wake, POLLIN, 0}};
        for (const Link& link : links)
            polled.push_back({link.socket, POLLIN, 0});  // a closed socket is -1, which poll passes over
        poll(polled.data(), nfds_t(polled.size()), int(INTERVAL * 1000));
        eventfd_t woken;
        if (polled[0].revents) eventfd_read(wake, &woken);
        for (size_t i = 0; i < links.size(); i++)
            if (polled[i + 1].revents) receive_from(links[i], said_goodbye);
    }

    void receive_from(Link& link, bool said_goodbye) {
        char bytes[4096];
        ssize_t n;
        while ((n = recv(link.socket, bytes, sizeof bytes, MSG_DONTWAIT)) > 0) link.received.append(bytes, size_t(n));
        const bool closed = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
        for (Message m; link.received.size() >= sizeof m; link.received.erase(0, sizeof m)) {
            std::memcpy(&m, link.received.data(), sizeof m);
            link.last_heard = seconds_now();
            if (m.kind == FAILED) end_quietly(m.status, link.rank);
            if (m.kind == LEAVING) link.left = true;
            if (m.kind == ALIVE)
                link.last = m, link.last.phase[sizeof m.phase - 1] = link.last.device[sizeof m.device - 1] = '\0';
        }
        if (!closed) return;
        link.shut();
        if (!link.left) lost(link, said_goodbye);
    }

    // The connection closed without a goodbye. Rank 0 knows where the other was; the others know where they were
    // themselves.
    void lost(const Link& link, bool said_goodbye) {
        if (rank == 0)
            report_and_end(
                name_of(link.rank) + " is gone (its connection closed) " + where(link.last.step, link.last.phase) +
                "; it was killed or crashed: see its output, and the kernel's log for an out-of-memory kill");
        if (said_goodbye) {
            report_loss_of_rank_0(
                " is gone (its connection closed) after the last step, before all ranks had said that they were done");
        } else {
            const Message own = own_state(seconds_now());
            report_loss_of_rank_0(" is gone (its connection closed); this rank was " + where(own.step, own.phase));
        }
    }

    // All other ranks see at once that rank 0 is lost and cannot agree who says it: rank 1 does, and the first rank of
    // every other host, because rank 1 may be lost with rank 0.
    [[noreturn]] void report_loss_of_rank_0(const std::string& what) {
        const bool first_here = std::find(hosts.begin() + 1, hosts.end(), hosts[size_t(rank)]) - hosts.begin() == rank;
        if (!first_here) end(1);
        report_and_end(name_of(0) + what);
    }

    // What takes too long? Only when a limit is set.
    void judge(double now) {
        const double limit = stall_timeout.load();
        const Message own = own_state(now);
        const bool started = phase.load(std::memory_order_relaxed) != nullptr;
        // A rank that stands still since another is stopped shall not take the blame:
        // not while it hears nothing of one, and rank 0, who hears of all, comes first.
        const bool silence = std::any_of(links.begin(), links.end(),
                                         [&](const Link& link) { return !link.left && now - link.last_heard > 1; });
        if (started && (!own.waiting || ranks() == 1) && !silence && now - last_progress > limit + (rank > 0 ? 0.5 : 0))
            report_and_end(name_of(rank) + format_text(" has made no progress for %.1f s ", now - last_progress) +
                               where(own.step, own.phase) +
                               format_text(" (--stall-timeout %g); the stack of its main thread:", limit),
                           true);
        bool all_wait = own.waiting && now - last_progress > limit && ranks() > 1;
        for (const Link& link : links) {
            const double silent = now - link.last_heard;
            all_wait = all_wait && (link.left || (link.last.waiting && link.last.idle_ms / 1000.0 + silent > limit));
            if (link.left || silent <= limit) continue;
            const std::string late =
                format_text(" is late: nothing was heard from it for %.1f s (--stall-timeout %g); it was last ", silent,
                            limit) +
                where(link.last.step, link.last.phase) + "; it is stopped, starved or cut off";
            if (rank == 0) report_and_end(name_of(link.rank) + late);
            report_loss_of_rank_0(late);
        }
        if (rank == 0 && all_wait) report_and_end(all_wait_text(own, now - last_progress), true);
    }

    std::string all_wait_text(const Message& own, double seconds) const {
        std::string text =
            format_text("all %d ranks have waited for each other for %.1f s (--stall-timeout %g): rank 0 ", ranks(),
                        seconds, stall_timeout.load()) +
            where(own.step, own.phase);
        const size_t shown = 7;
        for (size_t i = 0; i < links.size() && i < shown; i++)
            text += format_text(", rank %d ", links[i].rank) +
                    (links[i].left ? "at its end" : where(links[i].last.step, links[i].last.phase));
        if (links.size() > shown) text += ", ...";
        return text + "; they do not do the same, or the network lost something; the stack of rank 0's main thread:";
    }

    [[noreturn]] void report_and_end(const std::string& line, bool with_stack = false) {
        last_resort();
        std::string text = "train_nsa: error: " + line + "\n";
        if (with_stack) text += stack.text();
        // One write, so that lines of several ranks do not mix; not through stdio, whose lock the main thread may hold.
        const ssize_t printed = write(STDERR_FILENO, text.data(), text.size());
        (void)printed;  // without a stderr the status must do
        tell_all(1);
        if (under_mpi) usleep(200000);  // mpirun forwards what was printed, but not after a rank's bad end
        end(1);
    }

    // Another rank has failed and printed why. Rank 0 passes it on.
    [[noreturn]] void end_quietly(int status, int from) {
        others_error.store(true);
        last_resort();
        if (rank == 0) tell_all(status, from);
        for (Link& link : links) link.shut();
        if (under_mpi) usleep(2'000'000);  // the failed rank's MPI_Abort ends everybody with its status
        end(status);
    }

    // Says to all but one that the run ends, and waits until they have read it: a socket that is closed with bytes
    // unread would be reset, and the reset can overtake the message. At most a second, since one of them may be
    // stopped.
    void tell_all(int status, int except = -1) {
        for (Link& link : links) {
            if (link.rank == except || link.socket < 0) continue;
            send_to(link, message(FAILED, status));
            shutdown(link.socket, SHUT_WR);
        }
        const double limit = seconds_now() + 1;
        for (Link& link : links) {
            if (link.rank == except) continue;
            while (link.socket >= 0 && seconds_now() < limit) {
                pollfd polled = {link.socket, POLLIN, 0};
                char bytes[4096];
                if (poll(&polled, 1, 50) <= 0) continue;
                const ssize_t n = recv(link.socket, bytes, sizeof bytes, MSG_DONTWAIT);
                if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) link.shut();
            }
        }
    }

    // The end itself must not hang, on a stdout or stderr that takes nothing,
    // or a lock of the stalled main thread: the alarm ends the process.
    static void last_resort() {
        std::signal(SIGALRM, SIG_DFL);
        alarm(10);
    }

    // What is printed and not flushed is worth saving if stdout is free.
    [[noreturn]] static void end(int status) {
        last_resort();
        if (ftrylockfile(stdout) == 0) std::fflush(stdout), funlockfile(stdout);
        std::_Exit(status);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The watchdog as the training loop sees it.

struct WatchdogOptions {
    double stall_timeout = 180;  // seconds without progress after which the run ends; 0: never
    std::string heartbeat_file;  // one JSON line a step is appended; "": none
};

struct World;

class Watchdog {
  public:
    Watchdog(World& world, const WatchdogOptions& options);  // in ddp.cuh, behind World
    Watchdog(ControlChannel& c, int my_rank, const std::string& host, const WatchdogOptions& options)
        : channel(c), rank(my_rank), heartbeat_path(options.heartbeat_file) {
        if (!(options.stall_timeout >= 0))
            fail_usage("--stall-timeout %g: expected a number of seconds, or 0 for none", options.stall_timeout);
        if (!heartbeat_path.empty()) {
            heartbeat = open(heartbeat_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
            if (heartbeat < 0) warn();
        }
        started_alone = !channel.running() && options.stall_timeout > 0;
        if (options.stall_timeout > 0) channel.watch(options.stall_timeout);
        if (started_alone) channel.start_alone(host);
    }
    ~Watchdog() {
        channel.unwatch_alone();
        if (started_alone) channel.stop();
        if (heartbeat >= 0) close(heartbeat);
    }
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // The main thread has got this far. phase: a string literal, such as "forward"; "waiting ..." while this rank waits
    // for others.
    void progress(int64_t step, const char* phase) { channel.progress(step, phase); }

    // A step is done: one line to the heartbeat file. A file that cannot be written is reported once and does not stop
    // the run.
    void step_done(int64_t step, double seconds, double loss) {
        channel.tick();
        if (heartbeat < 0) return;
        const char* phase = channel.current_phase();
        const std::string loss_text = std::isfinite(loss) ? format_text("%.6f", loss) : "null";
        const std::string line = format_text(
            "{\"time\":%.3f,\"rank\":%d,\"step\":%lld,\"phase\":\"%s\",\"ms\":%.2f,\"loss\":%s,\"memory_mib\":%.1f}\n",
            unix_time(), rank, (long long)step, phase ? phase : "start", seconds * 1000, loss_text.c_str(),
            memory_mib());
        for (size_t done = 0; done < line.size();) {
            const ssize_t written = write(heartbeat, line.data() + done, line.size() - done);
            if (written > 0) done += size_t(written);
            else if (written == 0 || errno != EINTR) return warn();
        }
    }

  private:
    ControlChannel& channel;
    int rank;
    std::string heartbeat_path;
    int heartbeat = -1;
    bool warned = false, started_alone = false;

    void warn() {
        if (!warned)
            std::fprintf(stderr, "train_nsa: warning: cannot write the heartbeat file %s: %s; training goes on\n",
                         heartbeat_path.c_str(), std::strerror(errno));
        warned = true;
    }

    // Memory that is resident now.
    static double memory_mib() {
        std::FILE* f = std::fopen("/proc/self/statm", "r");
        long long size = 0, resident = 0;
        const bool read = f && std::fscanf(f, "%lld %lld", &size, &resident) == 2;
        if (f) std::fclose(f);
        return read ? double(resident) * double(sysconf(_SC_PAGESIZE)) / (1 << 20) : 0.0;
    }
};
