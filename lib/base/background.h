// background.h: a job that a thread does while the run goes on: shards are looked through by it.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <string>
#include <system_error>
#include <thread>

#include "memory.h"
#include "util.h"

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
