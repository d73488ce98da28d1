// errors.h: everything a user can cause is thrown as an Error, whose text is one line: what went wrong, where (file,
// offset, option), what was expected, what to do. main() prints it and exits with its status: 2 for wrong usage, 1 for
// everything else.
#pragma once
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include <sys/resource.h>
#include <unistd.h>

#include "output.h"
#include "text.h"

struct Error : std::runtime_error {
    int status;
    Error(int status, const std::string& text) : std::runtime_error(printable(text)), status(status) {}
};

// An error that every rank throws at the same place: rank 0 alone prints it.
struct SharedError : Error {
    explicit SharedError(const std::string& text, int status = 1) : Error(status, text) {}
};

[[noreturn]] inline void throw_error(int status, const char* format, std::initializer_list<Value> values) {
    throw Error(status, format_values(format, values));
}

// Bad data, a failed system call, a missing file: exit status 1.
template <class... Values>
[[noreturn]] void fail(const char* format, const Values&... values) {
    throw_error(1, format, {values...});
}

// A wrong option or a contradiction between options: exit status 2.
template <class... Values>
[[noreturn]] void fail_usage(const char* format, const Values&... values) {
    throw_error(2, format, {values...});
}

// One line about something that went wrong and that the program survives. Where stderr would make it wait, it stands
// among what is printed.
inline void complain(const std::string& text) {
    output().settle();
    std::FILE* const file = output().may_wait || takes_output(STDERR_FILENO) ? stderr : stdout;
    std::fprintf(file, "train_nsa: warning: %s\n", printable(text).c_str());
}

template <class First, class... Values>
void complain(const char* format, const First& first, const Values&... values) {
    complain(format_values(format, {first, values...}));
}

// Bytes of addresses that this process may have (ulimit -v); infinity where there is no limit.
inline double address_limit() {
    struct rlimit r;
    const bool limited = getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY;
    return limited ? double(r.rlim_cur) : std::numeric_limits<double>::infinity();
}

inline bool memory_is_limited() { return address_limit() < std::numeric_limits<double>::infinity(); }

// "; the process is limited to 300 MiB (ulimit -v)", or "".
inline std::string memory_limit_text() {
    if (!memory_is_limited()) return "";
    return format_text("; the process is limited to %.0f MiB (ulimit -v)", address_limit() / (1 << 20));
}

// What went wrong, in words that the standard library does not have.
inline std::string error_text(const std::exception& e) {
    if (dynamic_cast<const std::bad_alloc*>(&e)) return "out of memory" + memory_limit_text();
    return *e.what() ? e.what() : "an exception without text";
}

// What job() throws, as text; "" where it throws nothing.
template <class Job>
std::string error_of(const Job& job) {
    try {
        job();
        return "";
    } catch (const std::exception& e) {
        return error_text(e);
    } catch (...) {
        return "an exception of unknown type";
    }
}

// What start() returns, which starts a thread. purpose: what for, where the system has none to give.
template <class Start>
auto start_or_fail(const char* purpose, Start start) {
    try {
        return start();
    } catch (const std::system_error& e) {
        fail("cannot start a thread %s: %s; raise the limit on threads (ulimit -u) or on memory (ulimit -v)", purpose,
             e.what());
    }
}
