// stack_trace.h: where the main thread is, found out from another thread; the watchdog prints it for a rank that
// stalls. A signal makes the main thread write its return addresses into an array, and the caller turns them into
// names. Functions have names where the program is linked with -rdynamic, otherwise addresses for addr2line.
#pragma once
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>

#include <cxxabi.h>
#if __has_include(<execinfo.h>)
#include <execinfo.h>
#else  // musl: no stack
inline int backtrace(void**, int) { return 0; }
inline char** backtrace_symbols(void* const*, int) { return nullptr; }
#endif
#include <pthread.h>
#include <unistd.h>

class MainThreadStack {
    static constexpr int SIGNAL = SIGUSR2, MAX_DEPTH = 64;
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

  public:
    // The main thread calls this once. The first backtrace() loads the unwinder, which a signal handler must not do.
    void prepare() {
        thread = pthread_self();
        void* first[1];
        backtrace(first, 1);
        // A stack of its own for the handler: a library may have the main thread's stack pointer in its workspace.
        static char room[64 << 10];
        stack_t alternative = {};
        alternative.ss_sp = room;
        alternative.ss_size = sizeof room;
        sigaltstack(&alternative, nullptr);
        struct sigaction action = {};
        action.sa_handler = [](int) {
            const int error = errno;
            depth.store(std::max(1, backtrace(frames, MAX_DEPTH)), std::memory_order_release);
            errno = error;
        };
        action.sa_flags = SA_RESTART | SA_ONSTACK;
        sigaction(SIGNAL, &action, nullptr);
    }

    // One frame a line, innermost first. Any other thread may call this.
    std::string text() {
        depth.store(0, std::memory_order_relaxed);
        pthread_kill(thread, SIGNAL);
        int found = 0;
        for (int wait = 0; wait < 100 && !found; wait++) {
            usleep(10000);
            found = depth.load(std::memory_order_acquire);
        }
        if (!found)
            return "    the main thread does not answer a signal: it is inside a system call that cannot be "
                   "interrupted (a disk, a network file system, a driver)\n";
        const int own_frames = 2;  // the handler and the kernel's return from it
        std::string lines;
        char** symbols = backtrace_symbols(frames, found);
        for (int i = std::min(own_frames, found - 1); symbols && i < found; i++)
            lines += "    " + readable(symbols[i]) + "\n";
        std::free(symbols);
        return lines;
    }
};
