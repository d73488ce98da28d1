// watchdog.h: a run ends loudly instead of hanging. One thread per process watches the main thread and, where there are
// several ranks, talks to rank 0 over a connection of its own (a star), whatever carries the gradients. It prints what
// it finds in one line, and all ranks end:
//   - a rank died: its connection closed without a goodbye. Noticed at once;
//   - a rank made no progress for --stall-timeout while it waited for nobody: it reports itself, with a stack trace;
//   - a rank is silent, its watchdog included (stopped, swapped out, cut off): rank 0 reports it (rank 1 reports rank
//   0);
//   - all ranks wait for each other: rank 0 reports it;
//   - a rank failed and has printed its error: the others end with the same status and print nothing.
// A slow step that makes progress, a slow network that still delivers buckets, and a rank that waits for a slow one are
// not stalls.
#pragma once
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "heartbeat.h"
#include "stack_trace.h"
#include "util.h"

// The thread and the star. World owns one, which runs from World's construction where there are several ranks, so that
// errors before the first step end all ranks too. A process alone has the thread only while a Watchdog exists.
class ControlChannel {
    enum Request : int { NONE, LEAVE, FAIL, STOP };
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
        int rank, socket;  // socket: -1 once closed
        std::string received, unsent;
        Message last{};
        double last_heard = seconds_now();
        Link(int r, int s) : rank(r), socket(s) { fcntl(s, F_SETFL, fcntl(s, F_GETFL) | O_NONBLOCK), last.step = -1; }
        void shut() {
            if (socket >= 0) close(socket);
            socket = -1;
        }
    };
    static constexpr double INTERVAL = 0.2;  // seconds between messages; deaths and failures wake the thread at once

    int rank = 0, wake = -1;  // wake: an eventfd
    std::vector<std::string> hosts;
    bool under_mpi = false;
    std::vector<Link> links;  // only the thread touches them while it runs
    std::thread thread;
    MainThreadStack stack;

    // The main thread writes these (others_error: the channel's thread), the other one reads them.
    std::atomic<uint64_t> ticks{0};
    std::atomic<int64_t> step{-1};
    std::atomic<const char*> phase{nullptr}, device{""};
    std::atomic<bool> in_collective{false};
    std::atomic<double> stall_timeout{0};
    std::atomic<int> request{NONE}, failure_status{1};
    std::atomic<bool> others_error{false};

    uint64_t seen_ticks = 0;  // what the channel's thread has seen of the main thread
    double last_progress = seconds_now();

    std::string name_of(int r) const {
        std::string on = r == rank ? device.load() : "";
        for (const Link& link : links)
            if (link.rank == r) on = link.last.device;
        return format_text("rank %d on %s%s%s", r, hosts[size_t(r)].c_str(), on.empty() ? "" : ", ", on.c_str());
    }
    static std::string where(const Message& m) {
        return m.step < 0 ? "before the first step" : format_text("at step %lld in '%s'", (long long)m.step, m.phase);
    }
    Message own_state(double now) const {
        Message m{};
        m.kind = ALIVE, m.step = step;
        const char* p = phase;
        std::snprintf(m.phase, sizeof m.phase, "%s", p ? p : "start");
        std::snprintf(m.device, sizeof m.device, "%s", device.load());
        m.waiting = in_collective || !std::strncmp(m.phase, "waiting", 7);
        m.idle_ms = int32_t(std::min(2e9, (now - last_progress) * 1000));
        return m;
    }

    // ----- the end of this process

    // Never blocks: what the socket does not take now stays for the next look. A rank that reads nothing for long gets
    // no further ALIVE.
    static void send_to(Link& link, const Message& m) {
        if (link.socket < 0) return;
        if (m.kind != ALIVE || link.unsent.empty()) link.unsent.append(reinterpret_cast<const char*>(&m), sizeof m);
        const ssize_t sent = send(link.socket, link.unsent.data(), link.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) link.unsent.erase(0, size_t(sent));
    }

    // Says to all but one that this rank goes, and waits until they have read it: a socket that is closed with bytes
    // unread is reset, and the reset can overtake the message. At most a second, since one of them may be stopped.
    void tell_all(Kind kind, int status, int except = -1) {
        Message m{};
        m.kind = kind, m.status = status;
        for (Link& link : links) {
            if (link.rank == except || link.socket < 0) continue;
            send_to(link, m);
            shutdown(link.socket, SHUT_WR);
        }
        const double limit = seconds_now() + 1;
        for (Link& link : links) {
            while (link.rank != except && link.socket >= 0 && seconds_now() < limit) {
                pollfd polled = {link.socket, POLLIN, 0};
                char bytes[4096];
                if (poll(&polled, 1, 50) <= 0) continue;
                const ssize_t n = recv(link.socket, bytes, sizeof bytes, MSG_DONTWAIT);
                if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) link.shut();
            }
        }
    }

    // The end itself must not hang, on a stdout or stderr that takes nothing or a lock that the stalled main thread
    // holds: the alarm ends the process.
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
    [[noreturn]] void report_and_end(const std::string& line, bool with_stack = false) {
        last_resort();
        std::string text = "train_nsa: error: " + line + "\n";
        if (with_stack) text += stack.text();
        // One write, so that lines of several ranks do not mix; not through stdio, whose lock the main thread may hold.
        (void)!write(STDERR_FILENO, text.data(), text.size());  // without a stderr the status must do
        tell_all(FAILED, 1);
        if (under_mpi) usleep(200000);  // mpirun forwards what was printed, but not after a rank's bad end
        end(1);
    }
    // Another rank has failed and printed why. Rank 0 passes it on.
    [[noreturn]] void end_quietly(int status, int from) {
        others_error = true;
        last_resort();
        if (rank == 0) tell_all(FAILED, status, from);
        for (Link& link : links) link.shut();
        if (under_mpi) usleep(2'000'000);  // the failed rank's MPI_Abort ends everybody with its status
        end(status);
    }
    // All other ranks see at once that rank 0 is lost and cannot agree who reports it: rank 1 does, and the first rank
    // of every other host, because rank 1 may be lost with rank 0.
    [[noreturn]] void report_loss_of_rank_0(const std::string& what) {
        const bool first_here = std::find(hosts.begin() + 1, hosts.end(), hosts[size_t(rank)]) - hosts.begin() == rank;
        if (!first_here) end(1);
        report_and_end(name_of(0) + what);
    }

    // ----- what the thread looks at

    // The connection closed without a goodbye. Rank 0 knows where the other was; the others know where they were
    // themselves.
    void lost(const Link& link) {
        if (rank == 0)
            report_and_end(
                name_of(link.rank) + " is gone (its connection closed) " + where(link.last) +
                "; it was killed or crashed: see its output, and the kernel's log for an out-of-memory kill");
        report_loss_of_rank_0(" is gone (its connection closed); this rank was " + where(own_state(seconds_now())));
    }

    void receive_from(Link& link) {
        char bytes[4096];
        ssize_t n;
        while ((n = recv(link.socket, bytes, sizeof bytes, MSG_DONTWAIT)) > 0) link.received.append(bytes, size_t(n));
        const bool closed = n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
        for (Message m; link.received.size() >= sizeof m; link.received.erase(0, sizeof m)) {
            std::memcpy(&m, link.received.data(), sizeof m);
            link.last_heard = seconds_now();
            if (m.kind == FAILED) end_quietly(m.status, link.rank);
            if (m.kind == LEAVING) return link.shut();
            link.last = m, link.last.phase[sizeof m.phase - 1] = link.last.device[sizeof m.device - 1] = '\0';
        }
        if (closed) link.shut(), lost(link);
    }

    // Waits for news, at most an interval, and reads it.
    void receive() {
        std::vector<pollfd> polled = {{wake, POLLIN, 0}};
        for (const Link& link : links) polled.push_back({link.socket, POLLIN, 0});  // poll passes over -1
        poll(polled.data(), nfds_t(polled.size()), int(INTERVAL * 1000));
        eventfd_t woken;
        if (polled[0].revents) eventfd_read(wake, &woken);
        for (size_t i = 0; i < links.size(); i++)
            if (polled[i + 1].revents) receive_from(links[i]);
    }

    std::string all_wait_text(const Message& own, double seconds) const {
        const double limit = stall_timeout;
        std::string text =
            format_text("all %d ranks have waited for each other for %.1f s (--stall-timeout %g): rank 0 ", ranks(),
                        seconds, limit) +
            where(own);
        const size_t shown = 7;
        for (size_t i = 0; i < links.size() && i < shown; i++)
            text += format_text(", rank %d ", links[i].rank) + where(links[i].last);
        if (links.size() > shown) text += ", ...";
        return text + "; they do not do the same, or the network lost something; the stack of rank 0's main thread:";
    }

    // Does anything take too long? Asked only when a limit is set.
    void judge(double now) {
        const double limit = stall_timeout, idle = now - last_progress;
        const Message own = own_state(now);
        // A rank that stands still because another is stopped must not take the blame: it says nothing of itself while
        // it hears nothing of another, and rank 0, which hears of all, goes first.
        const bool silence = std::any_of(links.begin(), links.end(),
                                         [&](const Link& l) { return l.socket >= 0 && now - l.last_heard > 1; });
        if (phase.load() && (!own.waiting || ranks() == 1) && !silence && idle > limit + (rank > 0 ? 0.5 : 0))
            report_and_end(name_of(rank) + format_text(" has made no progress for %.1f s ", idle) + where(own) +
                               format_text(" (--stall-timeout %g); the stack of its main thread:", limit),
                           true);
        bool all_wait = own.waiting && idle > limit && ranks() > 1;
        for (const Link& link : links) {
            const double silent = now - link.last_heard;
            const bool there = link.socket >= 0;  // a rank that has left saw all others arrive at the end
            all_wait = all_wait && there && link.last.waiting && link.last.idle_ms / 1000.0 + silent > limit;
            if (!there || silent <= limit) continue;
            const std::string late =
                format_text(" is late: nothing was heard from it for %.1f s (--stall-timeout %g); it was last ", silent,
                            limit) +
                where(link.last) + "; it is stopped, starved or cut off";
            if (rank == 0) report_and_end(name_of(link.rank) + late);
            report_loss_of_rank_0(late);
        }
        if (rank == 0 && all_wait) report_and_end(all_wait_text(own, idle), true);
    }

    void run() {
        double last_look = seconds_now(), next_message = 0;
        while (true) {
            receive();
            const int wanted = request;
            if (wanted == LEAVE) return tell_all(LEAVING, 0);
            if (wanted == FAIL) return tell_all(FAILED, failure_status);
            if (wanted == STOP) return;
            const double now = seconds_now();
            if (now - last_look > 1) {  // it was stopped as a whole (Ctrl-Z, a suspended machine): nobody is to blame
                last_progress = now;
                for (Link& link : links) link.last_heard = now;
            }
            last_look = now;
            if (const uint64_t t = ticks; t != seen_ticks) seen_ticks = t, last_progress = now;
            if (now >= next_message) {
                next_message = now + INTERVAL;
                for (Link& link : links) send_to(link, own_state(now));
            }
            if (stall_timeout > 0) judge(now);
        }
    }
    void start_thread() {
        wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake < 0) fail("cannot make an eventfd for the watchdog: %s", std::strerror(errno));
        request = NONE, last_progress = seconds_now();
        sigset_t all, before;  // signals are for the main thread
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);
        std::exception_ptr error;
        try {
            thread = start_or_fail("for the watchdog", [this] { return std::thread([this] { run(); }); });
        } catch (...) {
            error = std::current_exception();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error) std::rethrow_exception(error);
    }
    void ask(Request what) {
        if (!running()) return;
        request = what;
        eventfd_write(wake, 1);
        thread.join();  // it does what it is asked and ends
        close(wake), wake = -1;
    }

  public:
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
    ~ControlChannel() { stop(); }
    bool running() const { return thread.joinable(); }
    int ranks() const { return int(hosts.size()); }
    // Another rank has failed and printed why; this process is about to end.
    bool ended_by_another() const { return others_error; }

    // The main thread has got this far; costs a few nanoseconds. phase: a string that lives as long as the program;
    // "waiting..." says that this rank waits for others. Before the first call nothing counts as a stall.
    void progress(int64_t at_step, const char* at_phase) {
        step = at_step, phase = at_phase;
        tick();
    }
    void tick() { ticks++; }
    const char* current_phase() const { return phase; }  // nullptr before the first
    // What this rank computes on, such as "GPU 1", for messages: a string that lives as long as the program.
    void computes_on(const char* what) { device = what; }
    // Around a blocking collective of the main thread: whatever the phase is called, this rank waits for others.
    struct Waiting {
        ControlChannel& channel;
        explicit Waiting(ControlChannel& c) : channel(c) { c.in_collective = true; }
        ~Waiting() { channel.tick(), channel.in_collective = false; }
        Waiting(const Waiting&) = delete;
    };

    // From here on the main thread must make progress at least every `seconds`; 0: it may do what it likes.
    void watch(double seconds) {
        stack.prepare();
        tick();
        stall_timeout = seconds;
    }
    // The run is over. Several ranks stay watched until they leave: they take down together what they share (NCCL,
    // MPI), and one that stands still holds up all.
    void end_watch() {
        if (ranks() == 1) return void(stall_timeout = 0);
        phase = "waiting for all ranks to end";
        tick();
    }

    // All ranks have done all their work: from here on a connection that closes is no death.
    void leave() { ask(LEAVE); }
    // This rank ends with an error that is already printed: the others know when this returns, after a second at most.
    void tell_failure(int status) {
        failure_status = status;
        ask(FAIL);
    }
    // A collective found its partner gone. The channel learns of a death or a failure in the same moment, names it and
    // ends the process; if it has not within this time, the caller reports what it saw.
    void wait_for_verdict() const {
        if (running()) usleep(3'000'000);
    }
    // Without a goodbye: the others take it for this rank's death.
    void stop() {
        ask(STOP);
        for (Link& link : links) link.shut();
        links.clear();
    }
};

struct WatchdogOptions {
    double stall_timeout = 180;  // seconds without progress after which the run ends; 0: never
    std::string heartbeat_file;  // one JSON line a step is appended; "": none
};

struct World;

// The watchdog as the training loop sees it.
class Watchdog {
    ControlChannel& channel;
    Heartbeat heartbeat;
    bool started_alone = false;

  public:
    Watchdog(World& world, const WatchdogOptions& options);  // in ddp.cuh, after World
    Watchdog(ControlChannel& c, int my_rank, const std::string& host, const WatchdogOptions& options)
        : channel(c), heartbeat(options.heartbeat_file, my_rank) {
        if (!(options.stall_timeout >= 0))
            fail_usage("--stall-timeout %g: expected a number of seconds, or 0 for none", options.stall_timeout);
        started_alone = !channel.running() && options.stall_timeout > 0;
        if (options.stall_timeout > 0) channel.watch(options.stall_timeout);
        if (started_alone) channel.start_alone(host);
    }
    ~Watchdog() {
        channel.end_watch();
        if (started_alone) channel.stop();
    }
    Watchdog(const Watchdog&) = delete;

    // phase: a string literal, such as "forward"; "waiting ..." while this rank waits for others.
    void progress(int64_t step, const char* phase) { channel.progress(step, phase); }
    void step_done(int64_t step, double seconds, double loss) {
        channel.tick();
        heartbeat.step_done(step, channel.current_phase(), seconds, loss);
    }
};
