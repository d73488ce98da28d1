// signals.h: how a run is asked to stop, and which signals end nothing. Used by main() and the training loop in
// train_nsa.cu.
//
// A signal, or a file named halt in the run's folder: the run finishes its step, writes a checkpoint, and reports by
// its exit status what a scheduler needs to know: 75 (try again) after SIGTERM, SIGUSR1, SIGHUP and SIGPIPE, 130 after
// SIGINT, 0 after a halt file. A second signal ends the program at once.
#pragma once
#include <csignal>
#include <initializer_list>

#include <unistd.h>

enum Stop { GO_ON, HALTED, TERMINATED, INTERRUPTED };

inline volatile std::sig_atomic_t stop_signal = 0;

inline bool asked_to_interrupt() { return stop_signal == SIGINT; }
inline bool asked_to_terminate() { return stop_signal && !asked_to_interrupt(); }

inline Stop stop_of(bool interrupt, bool terminate, bool halt) {
    return interrupt ? INTERRUPTED : terminate ? TERMINATED : halt ? HALTED : GO_ON;
}

inline int exit_status_of(Stop stop) { return stop == INTERRUPTED ? 130 : stop == TERMINATED ? 75 : 0; }

extern "C" inline void on_stop_signal(int signal) {
    // every further line of output raises SIGPIPE again, and a terminal that goes sends SIGHUP by the shell and itself
    if (stop_signal && (signal == SIGPIPE || signal == SIGHUP)) return;
    if (stop_signal) _exit(128 + signal);
    stop_signal = signal;
}

// UCX, which MPICH may use, catches SIGHUP as soon as it is loaded, before main() (it raises its log level): the signal
// would end nothing, and nohup would be lost. So what the signal did at the start is found out earlier still.
inline bool hangup_was_ignored = false;
inline void look_at_hangup(int, char**, char**) {
    struct sigaction now;
    hangup_was_ignored = sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}
#ifndef __HIP_DEVICE_COMPILE__  // hipcc would have the GPU call it too
__attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(int, char**,
                                                                                       char**) = look_at_hangup;
#endif

// First of all in main(). A write beyond `ulimit -f` raises SIGXFSZ; ignored, it fails as on a full disk.
inline void settle_signals() {
    signal(SIGHUP, hangup_was_ignored ? SIG_IGN : SIG_DFL);
    signal(SIGXFSZ, SIG_IGN);
}

// owns_output: this process alone writes to the pipe behind stdout, so SIGPIPE means that the reader (| head, | less)
// has gone. Under a launcher the pipe is the launcher's. After MPI_Init, which must not put its handlers over these.
inline void listen_for_stop_signals(bool owns_output) {
    struct sigaction action = {};
    action.sa_handler = on_stop_signal;
    action.sa_flags = SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
    if (!hangup_was_ignored) sigaction(SIGHUP, &action, nullptr);
    if (owns_output) sigaction(SIGPIPE, &action, nullptr);
}
