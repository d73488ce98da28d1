// errors.h: how an error ends the program, and what stdout and stderr need for that. Used by main() and the verb
// `train` in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cstdio>
#include <exception>

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

// Where stdin, stdout or stderr is closed (2>&- in a script), the next file that is opened would get its number, and
// what is printed would go into that file.
inline void open_closed_streams() {
    for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
        if (fd > 2) return void(close(fd));
}
