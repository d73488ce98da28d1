// signals.h: how a run is asked to stop. Used by main() and the training loop in train_nsa.cu.
//
// A signal, or a file named halt in the run's folder: the run finishes its step, writes a checkpoint, and reports by
// its exit status what a scheduler needs to know: 75 (try again) after SIGTERM, SIGUSR1 and SIGHUP, 130 after SIGINT, 0
// after a halt file. A second signal ends the program at once.
//
// No handler of ours runs on a thread that computes: these signals are blocked before there is a second thread, every
// thread inherits that, and one thread of our own waits for them.
#pragma once
#include <atomic>
#include <csignal>
#include <thread>

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include "util.h"

enum Stop { GO_ON, HALTED, TERMINATED, INTERRUPTED };

inline std::atomic<int> stop_signal{0};               // the first that came; 0: none yet
inline std::atomic<bool> finishes_when_asked{false};  // otherwise the first signal ends the program at once

inline bool asked_to_interrupt() { return stop_signal == SIGINT; }
inline bool asked_to_terminate() { return stop_signal && !asked_to_interrupt(); }

inline Stop stop_of(bool interrupt, bool terminate, bool halt) {
    return interrupt ? INTERRUPTED : terminate ? TERMINATED : halt ? HALTED : GO_ON;
}

inline int exit_status_of(Stop stop) { return stop == INTERRUPTED ? 130 : stop == TERMINATED ? 75 : 0; }

inline bool is_ignored(int number) {
    struct sigaction now;
    return sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

// UCX, which MPICH may use, catches SIGHUP as soon as it is loaded, before main() (it raises its log level): the signal
// would end nothing, and nohup would be lost. So what the signal did at the start is found out earlier still.
inline bool hangup_was_ignored = false;
inline void look_at_hangup(int, char**, char**) { hangup_was_ignored = is_ignored(SIGHUP); }
#if defined(__ELF__) && !defined(__HIP_DEVICE_COMPILE__)  // hipcc would have the GPU call it too
__attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(int, char**,
                                                                                       char**) = look_at_hangup;
#elif defined(__APPLE__)
__attribute__((constructor)) static void before_main() { look_at_hangup(0, nullptr, nullptr); }
#endif

inline sigset_t stop_signals() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set, signal);
    if (!hangup_was_ignored) sigaddset(&set, SIGHUP);
    return set;
}

// First of all in main(), before anything starts a thread. A program that this one becomes by exec inherits it.
// A write beyond `ulimit -f` raises SIGXFSZ; ignored, it fails as on a full disk.
inline void block_stop_signals() {
    signal(SIGHUP, hangup_was_ignored ? SIG_IGN : SIG_DFL);
    signal(SIGXFSZ, SIG_IGN);
    const sigset_t set = stop_signals();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

// As the signal does where nobody waits for it.
inline void end_by_signal(int number) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
    raise(number);
}

inline void wait_for_stop_signals() {
    const sigset_t set = stop_signals();
    for (int number = 0;;) {
        if (sigwait(&set, &number) != 0) continue;
        const bool first = stop_signal == 0;
        // a shell has SIGINT ignored by what it starts in the background
        if (!finishes_when_asked && is_ignored(number)) continue;
        if (!finishes_when_asked) end_by_signal(number);
        else if (first) stop_signal = number;
        // a terminal that goes sends SIGHUP twice, by the shell and by itself
        else if (number != SIGHUP) end_by_signal(number);
    }
}

// In main(), after block_stop_signals().
inline void take_stop_signals() {
    start_or_fail("for signals", [] { return std::thread(wait_for_stop_signals); }).detach();
}

// From here on the first signal asks, see stop_signal. owns_output: this process alone writes to the pipe behind
// stdout. Under a launcher the pipe is the launcher's.
inline void finish_when_asked(bool owns_output) {
    finishes_when_asked = true;
    if (owns_output) signal(SIGPIPE, SIG_IGN);
}

// Whoever read the pipe behind stdout (| head, | less) has gone. Counts as SIGTERM.
inline void stop_without_reader() {
    pollfd out = {STDOUT_FILENO, 0, 0};
    if (poll(&out, 1, 0) == 1 && (out.revents & POLLERR) && stop_signal == 0) stop_signal = SIGPIPE;
}
