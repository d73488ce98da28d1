// launch.h: what a launcher says of the processes of a run, in environment variables: rank and number of ranks, as
// mpirun, torchrun or Slurm put them there. World in world.h uses it.
#pragma once
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "../base/host.h"

struct Launch {
    std::string launcher = "one process";  // as a run's first line names it
    bool by_mpi = false;                   // MPI brings the ranks together, and knows rank and size
    std::string mpi;                       // the name of this build's MPI library
    int rank = 0, size = 1;
    int local_rank = -1;  // -1: not said
    // Without MPI: where rank 0 gives out the id of NCCL's communicator, and what names this run there.
    std::string address, run;
    int port = 0;
};

// The variable in which an MPI launcher says how many processes there are; nullptr if none has started us. MPICH's
// mpirun, Open MPI's and `srun --mpi=pmi2` set one; `srun --mpi=pmix` gives a rank alone.
const char* started_by_mpi();

// The rank as far as the environment tells, for refusals before the launch is understood: rank 0 prints one at once,
// the others a moment later, unless their launcher has ended them by then.
int rank_in_environment();
[[noreturn]] void refuse_launch(const std::string& text);

// The interface through which this MPI finds its ranks under Slurm: srun --mpi=...
inline std::string choose_pmi(const std::string& mpi) { return mpi.compare(0, 8, "Open MPI") == 0 ? "pmix" : "pmi2"; }

[[noreturn]] void refuse_other_mpi(const Launch& launch, int size);

// What the environment says. mpi: the name of this build's MPI library, "" without one; argv: the options, which all
// ranks have in common.
Launch read_launch(const std::string& mpi, int argc = 0, char** argv = nullptr);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "launch.cpp"
#endif
