// background.h: a job that a thread does while the run goes on: shards are looked through by it. And a limit on the
// time that the main thread may take.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "errors.h"

// One thread that runs one job at a time. What a job throws is kept as text and never ends the program.
class BackgroundTask {
  public:
    BackgroundTask() = default;
    BackgroundTask(const BackgroundTask&) = delete;
    BackgroundTask& operator=(const BackgroundTask&) = delete;
    ~BackgroundTask() { wait(); }

    // The one before must have ended: see running().
    void start(std::function<void()> job) {
        if (running()) fail("a background task was started while the one before is running");
        wait();
        failure.clear();
        is_running.store(true, std::memory_order_relaxed);
        try {
            thread = std::thread([this, job] {
                failure = error_of(job);
                is_running.store(false, std::memory_order_release);
            });
        } catch (const std::system_error&) {  // no thread to be had: the caller waits instead
            failure = error_of(job);
            is_running.store(false, std::memory_order_relaxed);
        }
    }

    bool running() const { return is_running.load(std::memory_order_acquire); }

    void wait() {
        if (thread.joinable()) thread.join();
    }

    // Of the last job, after its end; "" = it ended well.
    std::string error() const { return running() ? "" : failure; }

  private:
    std::atomic<bool> is_running{false};
    std::string failure;  // the thread's while is_running
    std::thread thread;
};

// Ends the program, with one line, where its maker takes longer: inside of a library that may wait for ever.
class TimeLimit {
  public:
    TimeLimit(double seconds, const std::string& error) {
        thread = start_or_fail("for a time limit", [&] {
            return std::thread([this, seconds, line = "train_nsa: error: " + error + "\n"] {
                std::unique_lock lock(mutex);
                if (kept.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return is_kept; })) return;
                (void)!write(STDERR_FILENO, line.data(), line.size());
                usleep(200000);  // a launcher forwards what was printed, but not after a rank's bad end
                _exit(1);
            });
        });
    }
    ~TimeLimit() {
        {
            const std::lock_guard lock(mutex);
            is_kept = true;
        }
        kept.notify_one();
        thread.join();
    }

  private:
    std::mutex mutex;
    std::condition_variable kept;
    bool is_kept = false;
    std::thread thread;
};
