// host.h: the machine as this process finds it: processors it may use, the host's name, a digest of the running
// program, and how its threads wait.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "files.h"
#include "system.h"
#include "errors.h"
#include "memory.h"

// The processors this process may use: what the launcher or the container left of the machine.
inline int usable_processors() {
    static const double quota = cgroup_limits().processors;
    return std::max(1, int(std::min(double(processors_allowed().size()), std::ceil(quota))));
}

// Which processors the launcher left, as text such as "0 1 5".
inline std::string processor_list() {
    std::string text;
    for (const int i : processors_allowed()) text += (text.empty() ? "" : " ") + std::to_string(i);
    return text;
}

// A thread that waits at the end of a loop may spin, by default for milliseconds. Where another process wants the core
// (a second rank, a compiler, a neighbour), each of a step's hundreds of loops then waits for a time slice. If it
// sleeps at once, it is woken late in each. GCC's runtime spins a few microseconds here, which has most of both
// (figures: dev/LOG.md); LLVM's knows milliseconds only, so there it sleeps. Runtimes read their setting before
// main() and before anything of the program that could change the environment, so the program sets it and starts itself
// again. What the user has set stays.
inline void set_omp_wait(char** argv) {
#ifdef _OPENMP
    for (const char* theirs : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"})
        if (std::getenv(theirs)) return;
    if (setenv("GOMP_SPINCOUNT", "1000", 1) || setenv("OMP_WAIT_POLICY", "passive", 1)) return;
    execv(program_path().c_str(), argv);  // by its own name, the one that top and pkill show
    execv("/proc/self/exe", argv);        // the file has been moved away meanwhile
    execv(argv[0], argv);                 // there is no /proc; never execvp, which hands a shell what it cannot run
    complain(
        "the program cannot start itself again, so its threads wait as their runtime does by default, which is slow on "
        "a busy machine: set GOMP_SPINCOUNT=1000 and OMP_WAIT_POLICY=passive in the environment");
#else
    (void)argv;
#endif
}

inline std::string host_name() {
    char name[256] = "";
    return gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "localhost";
}

// One word that no other machine has: two may have one name.
inline std::string machine_word() { return host_name() + "/" + boot_id(); }

// Of the running program; macOS has no /proc.
inline std::string binary_digest() {
    return digest_text(read_record(access("/proc/self/exe", R_OK) == 0 ? "/proc/self/exe" : program_path()));
}
