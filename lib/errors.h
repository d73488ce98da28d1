// errors.h: how an error ends the program, of one rank or of all, and what stdout and stderr need for that.
#pragma once
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "util.h"

// The error of one of several ranks must not unwind to main(): ncclCommDestroy would wait for the other ranks, and
// cudaFree for a reduction that they never join, while they wait for us. So it is printed, and the program ends, where
// it was caught: one line on stderr, which names the rank.
template <class World>
int report_error(const World* world, int status, const char* text) {
    std::fflush(stdout);
    if (world && world->rank > 0) {  // rank 0 reports an error that all ranks have, and meanwhile ends the others
        usleep(unsigned(std::min(world->rank, 10)) * 100000);
        while (world->channel().ended_by_another()) pause();
    }
    if (world && world->size > 1)
        std::fprintf(stderr, "train_nsa: rank %d on %s%s%s: error: %s\n", world->rank, world->host.c_str(),
                     world->device.empty() ? "" : ", ", world->device.c_str(), text);
    else std::fprintf(stderr, "train_nsa: error: %s\n", text);
    if (world) world->abort(status);
    return status;
}

// The status of work(), or of its error.
template <class World, class Work>
int report_errors(const World* world, Work work) {
    try {
        return work();
    } catch (const Error& e) {
        return report_error(world, e.status, e.what());
    } catch (const std::exception& e) {
        return report_error(world, 1, e.what());
    }
}

// An error that every rank throws at the same place, so that together they can still save what they have.
struct SharedError : Error {
    explicit SharedError(const std::string& text) : Error(1, text) {}
};

// All ranks fail with the first one's error, or none does. Also a barrier.
template <class World>
void fail_together(const World& world, const std::string& error) {
    if (world.size == 1 && !error.empty()) throw SharedError(error);
    if (world.size == 1) return;
    const std::vector<std::string> errors = world.gather(error);
    for (size_t r = 0; r < errors.size(); r++)
        if (!errors[r].empty()) throw SharedError(format_text("rank %zu: %s", r, errors[r].c_str()));
}

// Where stdin, stdout or stderr is closed (2>&- in a script), the next file that is opened would get its number, and
// what is printed would go into that file.
inline void open_closed_streams() {
    for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
        if (fd > 2) return void(close(fd));
}
