// program_end.h: how an error ends the program that nobody catches, and what stdout and stderr need for that. How the
// error of a rank ends the others is in lib/run/world.h.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#if __has_include(<execinfo.h>)  // not musl
#include <execinfo.h>
#endif
#include <fcntl.h>
#include <unistd.h>

#include "errors.h"
#include "memory.h"
#include "signals.h"
#include "system.h"

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
        complain("%d bytes of output were dropped, because nobody read them; the run's logs are whole",
                 output().dropped);
    return whole;
}

// The end of a verb whose output is not whole: an error, unless the program ends with another status already, which
// matters more. in_files: what it has done is in files.
inline void complain_of_lost_output(int status, bool in_files) {
    const std::string text =
        format_text("not all of the output could be written to stdout, which is closed or full; %s",
                    in_files ? "what belongs into files is whole there" : "make room where it goes, and run again");
    if (status == 0) fail("%s", text);
    std::fprintf(stderr, "train_nsa: warning: %s\n", text.c_str());
}

// An error that nobody catches, in a thread or in a parallel loop, ends the program in one line too.
[[noreturn]] inline void end_uncaught() {
    output().settle();
    const std::exception_ptr thrown = std::current_exception();
    const std::string text = thrown ? error_of([&] { std::rethrow_exception(thrown); }) : "the program ended itself";
    std::fprintf(stderr, "train_nsa: error: %s\n", text.c_str());
    _exit(1);
}

// First of all in main(): streams, signals, and errors that come from libraries.
inline void prepare_for_errors() {
    open_closed_streams();
    block_stop_signals();
    std::set_terminate(end_uncaught);
#if __has_include(<execinfo.h>)
    void* frame;
    backtrace(&frame, 1);  // loads libgcc_s, without which a thread cannot end, while there is memory for it
#endif
    if (memory_is_limited()) share_one_heap();
}
