// errors.h: how an error ends the program, of one rank or of all, and what stdout and stderr need for that.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "memory.h"
#include "signals.h"
#include "stack_trace.h"
#include "system.h"
#include "util.h"

// The error of one of several ranks must not unwind to main(): ncclCommDestroy would wait for the other ranks, and
// cudaFree for a reduction that they never join, while they wait for us. So it is printed, and the program ends, where
// it was caught: one line on stderr, which names the rank. Of an error that all ranks have, rank 0 prints the line, and
// the launcher ends the others meanwhile.
template <class World>
int report_error(const World* world, int status, const char* text, bool shared) {
    output().settle();
    if (world && world->rank > 0) usleep(shared ? 2000000 : 600000 + 100000 * unsigned(std::min(world->rank, 10)));
    if (world && world->size > 1 && !(shared && world->rank > 0))
        std::fprintf(stderr, "train_nsa: %s: error: %s\n", world->name().c_str(), text);
    else if (*text && !(world && world->rank > 0)) std::fprintf(stderr, "train_nsa: error: %s\n", text);
    if (world) world->abort(status);
    return status;
}

// The status of work(), or of its error.
template <class World, class Work>
int report_errors(const World* world, Work work) {
    try {
        return work();
    } catch (const SharedError& e) {
        return report_error(world, e.status, e.what(), true);
    } catch (const Error& e) {
        return report_error(world, e.status, e.what(), false);
    } catch (const std::exception& e) {
        return report_error(world, 1, error_text(e).c_str(), false);
    }
}

// All ranks fail with the first one's error, or none does. Also a barrier.
template <class World>
void fail_together(const World& world, const std::string& error) {
    if (world.size == 1 && !error.empty()) throw SharedError(error);
    if (world.size == 1) return;
    const std::vector<std::string> errors = world.gather(error);
    for (size_t r = 0; r < errors.size(); r++)
        if (!errors[r].empty()) throw SharedError(format_text("rank %zu: %s", r, errors[r].c_str()));
}

// All ranks fail if a text is not the same everywhere. One line names the first of the text's lines that differs: the
// first rank that has another one than most ranks, and both. The hint says what to do.
template <class World>
void require_same(const World& world, const std::string& text, const std::string& hint) {
    if (world.size == 1) return;
    std::vector<std::istringstream> texts;
    for (const std::string& t : world.gather(text)) texts.emplace_back(t);
    for (bool more = true; more;) {
        more = false;
        std::vector<std::string> lines_now(texts.size(), "(nothing)");
        std::map<std::string, int> ranks_with;
        for (size_t r = 0; r < texts.size(); r++) {
            std::string line;
            if (std::getline(texts[r], line)) {
                lines_now[r] = line;
                more = true;
            }
            ranks_with[lines_now[r]]++;
        }
        if (ranks_with.size() == 1) continue;
        std::string expected = lines_now[0];
        for (const std::string& line : lines_now)
            if (ranks_with[line] > ranks_with[expected]) expected = line;
        size_t odd = 0;
        while (lines_now[odd] == expected) odd++;
        throw SharedError(format_text("rank %zu on %s has '%s', expected '%s' as on %d of %d ranks; %s", odd,
                                      world.hosts[odd].c_str(), lines_now[odd].c_str(), expected.c_str(),
                                      ranks_with[expected], world.size, hint.c_str()));
    }
}

// Where stdin, stdout or stderr is closed (2>&- in a script), the next file that is opened would get its number, and
// what is printed would go into that file. So /dev/null is opened there, for the wrong direction: what is printed to a
// closed stdout is lost, and has to count as lost, see output_is_whole().
inline void open_closed_streams() {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) > 2) return;
}

// At the end: has everything that was printed arrived? The disk behind stdout may be full. What nobody read is no
// fault.
inline bool output_is_whole() {
    const bool whole = output().finish();
    if (output().dropped && takes_output(STDERR_FILENO))
        complain(format_text("%zu bytes of output were dropped, because nobody read them; the run's logs are whole",
                             output().dropped));
    return whole;
}

// The end of a verb whose output is not whole: an error, unless the program ends with another status already, which
// matters more. in_files: what it has done is in files.
inline void report_lost_output(int status, bool in_files) {
    const std::string text =
        format_text("not all of the output could be written to stdout, which is closed or full; %s",
                    in_files ? "what belongs into files is whole there" : "make room where it goes, and run again");
    if (status == 0) fail("%s", text.c_str());
    std::fprintf(stderr, "train_nsa: warning: %s\n", text.c_str());
}

// An error that nobody catches, in a thread or in a parallel loop, ends the program in one line too.
[[noreturn]] inline void end_uncaught() {
    output().settle();
    try {
        if (std::current_exception()) std::rethrow_exception(std::current_exception());
        std::fprintf(stderr, "train_nsa: error: the program ended itself\n");
    } catch (const std::exception& e) {
        std::fprintf(stderr, "train_nsa: error: %s\n", error_text(e).c_str());
    } catch (...) {
        std::fprintf(stderr, "train_nsa: error: an exception of unknown type\n");
    }
    _exit(1);
}

// First of all in main(): streams, signals, and errors that come from libraries.
inline void prepare_for_errors() {
    open_closed_streams();
    block_stop_signals();
    std::set_terminate(end_uncaught);
    void* frame;
    backtrace(&frame, 1);  // loads libgcc_s, without which a thread cannot end, while there is memory for it
    if (memory_is_limited()) share_one_heap();
}
