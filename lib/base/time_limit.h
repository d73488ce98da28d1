// time_limit.h: a limit on the time that the main thread may take, for lib/run/world.h.
#pragma once
#include <chrono>
#include <future>
#include <string>
#include <thread>

#include <unistd.h>

#include "errors.h"

// Ends the program, with one line, where its maker takes longer: inside of a library that may wait for ever.
class TimeLimit {
  public:
    TimeLimit(double seconds, const std::string& error) {
        thread = start_or_fail("for a time limit", [&] {
            return std::thread([seconds, in_time = kept.get_future(), line = "train_nsa: error: " + error + "\n"] {
                if (in_time.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) return;
                (void)!write(STDERR_FILENO, line.data(), line.size());
                usleep(200000);  // a launcher forwards what was printed, but not after a rank's bad end
                _exit(1);
            });
        });
    }
    ~TimeLimit() {
        kept.set_value();
        thread.join();
    }

  private:
    std::promise<void> kept;
    std::thread thread;
};
