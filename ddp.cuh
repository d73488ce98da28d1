// ddp.cuh: data parallelism. Ranks (from mpirun; one process alone is rank 0 of 1 and touches no MPI), and the sums over them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <sched.h>
#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

#include "data/util.h"

// The processors this process may run on: what the launcher or the container left of the machine.
inline int usable_processors() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// GCC's OpenMP lets a thread that waits at the end of a loop spin for milliseconds. Where another process wants the core (a second rank, a
// compiler, a neighbour), each of a step's hundreds of loops then waits for a time slice: 3.4 times slower was measured, see dev/NOTES.md.
// The runtime reads its setting before main, so the program sets it and starts itself again. Whoever has set a policy keeps it.
inline void let_waiting_threads_sleep(char** argv) {
#ifdef _OPENMP
    if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) == 0) execv("/proc/self/exe", argv);
#else
    (void)argv;
#endif
}

struct World {
    int rank = 0, size = 1;              // among all processes
    int local_rank = 0, local_size = 1;  // among the processes of this machine
    std::string host = "localhost";

    World() {
        char name[256] = "";
        if (gethostname(name, sizeof name - 1) == 0) host = name;
        const char* launcher = started_by_mpirun();
        if (!launcher) return;
#ifdef USE_MPI
        int provided;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);  // only the main thread calls MPI
        initialised = true;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        MPI_Comm local;
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
        MPI_Comm_rank(local, &local_rank);
        MPI_Comm_size(local, &local_size);
        MPI_Comm_free(&local);
        const char* told = std::getenv(launcher);
        if (told && std::atoi(told) != size)
            fail("the launcher started %s processes (%s), but this program's MPI sees %d: mpirun belongs to another MPI than the one it was built with; "
                 "use the mpirun beside the mpicxx of the build", told, launcher, size);
#else
        fail_usage("this binary was built without MPI and would run as %s independent copies under mpirun; hint: make deps && make train_nsa, or start it without mpirun",
                   std::getenv(launcher));
#endif
    }
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    // The variable that says how many processes a launcher started, where there is one: MPICH's and Slurm's PMI, Open MPI.
    static const char* started_by_mpirun() {
        for (const char* variable : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"})
            if (std::getenv(variable)) return variable;
        return nullptr;
    }

    // x [count] = sum of every rank's x. In pieces of 25 MB: MPI counts are 32-bit, and pieces of this size stay in cache on the way.
    void sum(float* x, size_t count) const {
#ifdef USE_MPI
        if (size == 1) return;
        const size_t piece = 25'000'000 / sizeof(float);
        for (size_t i = 0; i < count; i += piece)
            MPI_Allreduce(MPI_IN_PLACE, x + i, int(std::min(piece, count - i)), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#else
        (void)x, (void)count;
#endif
    }
    double sum(double x) const {
#ifdef USE_MPI
        if (size > 1) MPI_Allreduce(MPI_IN_PLACE, &x, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
#endif
        return x;
    }
    void barrier() const {
#ifdef USE_MPI
        if (size > 1) MPI_Barrier(MPI_COMM_WORLD);
#endif
    }

    // Every rank has finished its work.
    void finish() {
#ifdef USE_MPI
        if (initialised) MPI_Finalize();
        initialised = false;
#endif
    }
    // After an error on this rank: ends all ranks with the status, since the others would wait for this one for ever.
    [[noreturn]] void abort(int status) const {
        std::fflush(nullptr);
#ifdef USE_MPI
        if (initialised && size > 1) {
            usleep(200000);  // mpirun forwards what was printed, but not after an abort: without the pause 2 of 30 messages were lost
            MPI_Abort(MPI_COMM_WORLD, status);
        }
#endif
        std::_Exit(status);
    }

  private:
    bool initialised = false;
};

inline const char* mpi_name() {
#ifdef USE_MPI
    static char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);  // allowed before MPI_Init
    for (char* c = text; *c; c++)
        if (*c == '\n' || *c == '\t') *c = *c == '\n' ? '\0' : ' ';
    return text;
#else
    return nullptr;
#endif
}
