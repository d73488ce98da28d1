// signals.h: how a run is asked to stop. Used by the training loop in train_nsa.cu.
//
// A signal, or a file named halt in the run's folder: the run finishes its step, writes a checkpoint, and reports by
// its exit status what a scheduler needs to know: 75 (try again) after SIGTERM, SIGUSR1 and SIGPIPE, 130 after SIGINT,
// 0 after a halt file. A second signal ends the program at once.
#pragma once
#include <csignal>
#include <initializer_list>

#include <unistd.h>

enum Stop { GO_ON, HALTED, TERMINATED, INTERRUPTED };

inline volatile std::sig_atomic_t stop_signal = 0;

inline bool asked_to_terminate() { return stop_signal == SIGTERM || stop_signal == SIGUSR1 || stop_signal == SIGPIPE; }

inline bool asked_to_interrupt() { return stop_signal == SIGINT; }

inline Stop stop_of(bool interrupt, bool terminate, bool halt) {
    return interrupt ? INTERRUPTED : terminate ? TERMINATED : halt ? HALTED : GO_ON;
}

inline int exit_status_of(Stop stop) { return stop == INTERRUPTED ? 130 : stop == TERMINATED ? 75 : 0; }

extern "C" inline void on_stop_signal(int signal) {
    if (stop_signal && signal == SIGPIPE) return;  // every further line of output raises it again
    if (stop_signal) _exit(128 + signal);
    stop_signal = signal;
}

// owns_output: this process alone writes to the pipe behind stdout, so SIGPIPE means that the reader (| head, | less)
// has gone. Under a launcher the pipe is the launcher's.
inline void listen_for_stop_signals(bool owns_output) {
    struct sigaction action = {};
    action.sa_handler = on_stop_signal;
    action.sa_flags = SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
    if (owns_output) sigaction(SIGPIPE, &action, nullptr);
}
