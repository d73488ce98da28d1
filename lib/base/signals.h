// signals.h: how a run is asked to stop. Used by main() and the training loop in train_nsa.cu.
//
// A signal, or a file named halt in the run's folder: the run finishes its step, writes a checkpoint, and reports by
// its exit status what a scheduler needs to know: 75 (try again) after SIGTERM, SIGUSR1, SIGHUP and SIGXCPU, 130 after
// SIGINT, 0 after a halt file.
//
// One wish may come several times: timeout signals its child and then the whole group, MPICH's mpirun forwards the
// SIGINT that the terminal has sent to all, and a shell, a service manager or a scheduler does the like. So what comes
// within seconds is a repetition. A SIGTERM or SIGINT after a longer pause ends the program at once, and says so.
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

#include "output.h"
#include "errors.h"
#include "clock.h"

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

// The compiler may use whatever the processor of its own machine has, before main() too. UCX catches this signal as
// well, so it is caught before and after UCX is loaded.
inline void say_of_processor(int) {
    static const char text[] =
        "train_nsa: error: this processor lacks instructions that the program was built for: run make on this machine, "
        "or with MARCH= for any\n";
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(1);
}
__attribute__((constructor(101))) inline void catch_unknown_instructions() { signal(SIGILL, say_of_processor); }

// UCX, which MPICH may use, catches SIGHUP as soon as it is loaded, before main() (it raises its log level): the signal
// would end nothing, and nohup would be lost. So what the signal did at the start is found out earlier still.
inline bool hangup_was_ignored = false;
// And it is kept until somebody waits for it, or UCX would swallow one that comes meanwhile.
inline void look_at_hangup(int, char**, char**) {
    catch_unknown_instructions();
    hangup_was_ignored = is_ignored(SIGHUP);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGHUP);
    sigprocmask(SIG_BLOCK, &set, nullptr);
}
// Stands once in a program, beside its main().
#if defined(__ELF__) && !defined(__HIP_DEVICE_COMPILE__)  // hipcc would have the GPU call it too
#define BEFORE_LIBRARIES(look) \
    __attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(int, char**, char**) = look
#elif defined(__APPLE__)
#define BEFORE_LIBRARIES(look) \
    __attribute__((constructor)) static void before_libraries() { look(0, nullptr, nullptr); }
#else
#define BEFORE_LIBRARIES(look) static_assert(true, "nothing to do")
#endif

inline sigset_t stop_signals() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1, SIGXCPU}) sigaddset(&set, signal);
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

// As the signal does where nobody waits for it. Process 1 of a container survives it, and then ends by its status.
[[noreturn]] inline void end_by_signal(int number) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
    raise(number);
    _exit(128 + number);
}

constexpr double SAME_WISH = 5;          // seconds within which a signal repeats the one before it
inline std::atomic<bool> speaks{false};  // of several ranks one says what a signal does

// The thread of the signals waits neither for a stream nor for the lock of one.
inline void say_of_signal(int file, const std::string& text) {
    if (takes_output(file)) (void)!write(file, text.data(), text.size());
}

inline void wait_for_stop_signals() {
    const sigset_t set = stop_signals();
    double last = 0;  // when a signal came that a second one of may end the program
    for (int number = 0;;) {
        if (sigwait(&set, &number) != 0) continue;
        // a shell has SIGINT ignored by what it starts in the background
        if (!finishes_when_asked && is_ignored(number)) continue;
        if (!finishes_when_asked) end_by_signal(number);
        const bool first = stop_signal == 0, insists = number == SIGTERM || number == SIGINT;
        const char* const name = number == SIGINT ? "SIGINT" : "SIGTERM";
        const double now = seconds_now(), pause = now - last;
        if (first) stop_signal = number;
        if (insists && last > 0 && pause > SAME_WISH) {
            if (!speaks) usleep(300000);
            say_of_signal(STDERR_FILENO,
                          format_text("train_nsa: %s after a pause of %.0f s: ends at once, unsaved\n", name, pause));
            end_by_signal(number);
        }
        if (insists && speaks && (first || pause > 0.5))
            say_of_signal(STDOUT_FILENO, format_text("%s: finishes its step and saves; another one, after a pause of "
                                                     "%.0f s, ends the run at once, unsaved\n",
                                                     name, SAME_WISH));
        if (insists) last = now;
    }
}

// In main(), after block_stop_signals().
inline void take_stop_signals() {
    start_or_fail("for signals", [] { return std::thread(wait_for_stop_signals); }).detach();
}

// From here on the first signal asks, see stop_signal, and printing makes nobody wait. A process alone owns the pipe
// behind stdout, under a launcher it is the launcher's.
inline void finish_when_asked(int rank, int ranks) {
    output().carry();
    finishes_when_asked = true;
    speaks = rank == 0;
    if (ranks == 1) signal(SIGPIPE, SIG_IGN);
}

// Whoever read the pipe behind stdout (| head, | less) has gone. Counts as SIGTERM.
inline void stop_without_reader() {
    pollfd out = {output().reader(), 0, 0};
    if (poll(&out, 1, 0) == 1 && (out.revents & POLLERR) && stop_signal == 0) stop_signal = SIGPIPE;
}
