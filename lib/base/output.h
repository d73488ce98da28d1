// output.h: whoever reads what a run prints may stop reading for hours (Ctrl-S, | less, a serial console), and the run
// goes on. Used by the training loop; what other verbs print waits for its reader.
#pragma once
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

// The program prints into a pipe. One thread takes everything out of it, another gives it to whoever reads, which may
// take long. What nobody reads is held, up to a limit; then the oldest lines are dropped.
class Output {
    static constexpr size_t MOST_HELD = 1 << 20, PIECE = 4096;

    int theirs = STDOUT_FILENO, ours = -1;  // the reader's end, and ours of the pipe
    std::mutex mutex;
    std::condition_variable changed;
    std::string held;
    bool closed = false, giving = false, failed = false;

    void take() {
        char bytes[PIECE];
        for (pollfd end = {ours, POLLIN, 0}; !closed; poll(&end, 1, -1)) {
            const std::lock_guard lock(mutex);  // settle() must find a byte in the pipe or in `held`
            if (!end.revents) continue;
            const ssize_t n = read(ours, bytes, sizeof bytes);
            closed = n == 0;
            if (n > 0) held.append(bytes, size_t(n));
            if (held.size() > MOST_HELD) {
                const size_t cut = held.find('\n', held.size() / 2) + 1;
                dropped += cut;
                held.erase(0, cut);
            }
            changed.notify_all();
        }
    }
    void give() {
        for (std::unique_lock lock(mutex);;) {
            changed.wait(lock, [this] { return closed || !held.empty(); });
            if (held.empty()) return;
            const std::string piece = held.substr(0, PIECE);
            held.erase(0, piece.size());
            giving = true;
            lock.unlock();
            ssize_t n = 0;
            for (size_t at = 0; at < piece.size() && n >= 0; at += size_t(std::max<ssize_t>(n, 0)))
                while ((n = write(theirs, piece.data() + at, piece.size() - at)) < 0 && errno == EAGAIN) {
                    pollfd end = {theirs, POLLOUT, 0};
                    poll(&end, 1, -1);
                }
            lock.lock();
            giving = false;
            failed = failed || n < 0;
            changed.notify_all();
        }
    }
    // Until everything is given, or nobody has taken anything for so long.
    bool wait(double seconds, bool to_the_end) {
        std::unique_lock lock(mutex);
        const auto limit = std::chrono::duration<double>(seconds);
        for (;;) {
            int in_pipe = 0;
            const bool empty = to_the_end ? closed : ioctl(ours, FIONREAD, &in_pipe) != 0 || in_pipe == 0;
            if (empty && held.empty() && !giving) return true;
            if (changed.wait_for(lock, in_pipe ? std::chrono::duration<double>(0.001) : limit) ==
                    std::cv_status::timeout &&
                !in_pipe)
                return false;
        }
    }

  public:
    size_t dropped = 0;    // bytes that nobody read
    bool may_wait = true;  // whoever prints

    // The file descriptor of whoever reads what is printed.
    int reader() const { return theirs; }
    bool is_carried() const { return ours >= 0; }

    // From here on no printf() waits. A file on a disk, or /dev/null, makes nobody wait and stays as it is.
    void carry() {
        may_wait = false;
        struct stat s;
        int ends[2];
        if (fstat(STDOUT_FILENO, &s) != 0 || !(S_ISFIFO(s.st_mode) || S_ISSOCK(s.st_mode) || isatty(STDOUT_FILENO)))
            return;
        const int copy = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
        if (copy < 0 || pipe(ends) != 0) return;
        std::fflush(stdout);
        theirs = copy, ours = ends[0];
        fcntl(ours, F_SETFD, FD_CLOEXEC);
        try {
            std::thread([this] { take(); }).detach();
            std::thread([this] { give(); }).detach();
        } catch (const std::system_error&) {  // no threads to be had: printing waits, as everywhere
            close(ends[1]);
            theirs = STDOUT_FILENO, ours = -1;
            return;
        }
        if (isatty(theirs)) std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
        dup2(ends[1], STDOUT_FILENO);
        close(ends[1]);
    }

    // What was printed so far stands where it is read, before something goes there another way.
    void settle() {
        std::fflush(stdout);
        if (is_carried()) wait(0.2, false);
    }

    // At the end: returns whether all that was printed has arrived, or would have if somebody had read it.
    bool finish() {
        const bool flushed = std::fflush(stdout) == 0 && !std::ferror(stdout);
        if (!is_carried()) return flushed;
        dup2(theirs, STDOUT_FILENO);
        const bool given = wait(5, true);
        const std::lock_guard lock(mutex);
        if (!given) dropped += held.size();
        ours = -1;
        return flushed && !failed;
    }
};

// Threads use it as long as there is a process.
inline Output& output() {
    static Output* const one = new Output;
    return *one;
}

// Would it take a line now?
inline bool takes_output(int file) {
    pollfd end = {file, POLLOUT, 0};
    return poll(&end, 1, 0) != 0;
}
