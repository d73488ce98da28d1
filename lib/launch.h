// launch.h: how the processes of a run find out what they are. World in ddp.cuh uses it.
//   the machine   processors this process may use, the host's name, a digest of the running program
//   Launch        rank and number of ranks, as mpirun, torchrun or Slurm put them into the environment
#pragma once
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include "util.h"

// The processors this process may use: what the launcher or the container left of the machine.
inline int usable_processors() {
    static const double quota = cgroup_limits().processors;
    cpu_set_t set;
    const int allowed = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return std::max(1, int(std::min(double(allowed), std::ceil(quota))));
}

// Which processors the launcher left, as text such as "0 1 5".
inline std::string processor_list() {
    cpu_set_t set;
    std::string text;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int i = 0; i < CPU_SETSIZE; i++)
            if (CPU_ISSET(i, &set)) text += (text.empty() ? "" : " ") + std::to_string(i);
    return text;
}

// GCC's OpenMP lets a thread that waits at the end of a loop spin for milliseconds. Where another process wants the
// core (a second rank, a compiler, a neighbour), each of a step's hundreds of loops then waits for a time slice: 3.4
// times slower was measured, see dev/NOTES.md. The runtime reads its setting before main, so the program sets it and
// starts itself again. A policy that the user has set stays.
inline void set_passive_omp_wait(char** argv) {
#ifdef _OPENMP
    if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
    std::error_code error;
    // by its own name, the one that top and pkill show
    execv(std::filesystem::read_symlink("/proc/self/exe", error).c_str(), argv);
    execv("/proc/self/exe", argv);  // the file has been moved away meanwhile
#else
    (void)argv;
#endif
}

inline std::string host_name() {
    char name[256] = "";
    return gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "localhost";
}

// FNV-1a, 64 bits, of the running program's file, as text: ranks must run the same program.
inline std::string binary_digest() {
    std::ifstream in("/proc/self/exe", std::ios::binary);
    if (!in) fail("cannot open /proc/self/exe: %s", std::strerror(errno));
    uint64_t hash = 0xcbf29ce484222325u;
    std::vector<char> piece(1 << 20);
    while (in.read(piece.data(), std::streamsize(piece.size())), in.gcount() > 0)
        for (std::streamsize i = 0; i < in.gcount(); i++) hash = (hash ^ uint8_t(piece[size_t(i)])) * 0x100000001b3u;
    if (in.bad()) fail("cannot read /proc/self/exe: %s", std::strerror(errno));
    return format_text("%016llx", (unsigned long long)hash);
}

// ---------------------------------------------------------------------------------------------------------------------
// What the launcher says, in environment variables.

struct Launch {
    std::string launcher = "one process";  // as a run's first line names it
    bool by_mpi = false;                   // MPI brings the ranks together, and knows rank and size
    int rank = 0, size = 1;
    int local_rank = -1, local_size = -1;  // -1: not said
    // Without MPI: where rank 0 gives out the id of NCCL's communicator, and what names this run there.
    std::string address, run;
    int port = 0;
};

// The number in a variable. False if it is not set; anything but an integer in the range is the user's error.
inline bool read_variable(const char* name, long long lowest, long long highest, long long& value) {
    const char* text = std::getenv(name);
    if (!text) return false;
    char* end;
    errno = 0;
    const long long number = std::strtoll(text, &end, 10);
    if (!std::isdigit(static_cast<unsigned char>(text[0])) || *end || errno || number < lowest || number > highest)
        fail_usage("%s='%s' in the environment: expected an integer from %lld to %lld", name, text, lowest, highest);
    value = number;
    return true;
}
inline int read_count(const char* name, int lowest, int highest, int otherwise) {
    long long value;
    return read_variable(name, lowest, highest, value) ? int(value) : otherwise;
}

// Where MPI's launchers say how many processes there are: MPICH's mpirun and `srun --mpi=pmi2`, Open MPI's mpirun.
// `srun --mpi=pmix` gives a rank alone. nullptr without any of them.
inline const char* started_by_mpi() {
    for (const char* variable : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK"})
        if (std::getenv(variable)) return variable;
    return nullptr;
}

// A task of srun. A shell of sbatch or salloc has the job's variables too, but is one process: it has no step, or one
// of the numbers at the top of the range that Slurm keeps for batch, interactive and external steps.
inline bool is_slurm_task() {
    long long step;
    return read_variable("SLURM_STEP_ID", 0, 0xffffffffll, step) && step < 0xfffffff0ll;
}

// The rank by whatever variable there is, before anybody knows more: of a refusal that all ranks share, rank 0 prints
// the line and the others end without a word.
inline int rank_in_environment() {
    for (const char* variable : {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID"})
        if (const char* text = std::getenv(variable)) return std::atoi(text);
    return 0;
}
[[noreturn]] inline void refuse_launch(const std::string& text) {
    throw Error(2, rank_in_environment() == 0 ? text : "");
}

// RANK and WORLD_SIZE, as torchrun and hand-written loops set them. False if they are not set.
inline bool read_rank_variables(Launch& launch) {
    const bool rank = std::getenv("RANK"), size = std::getenv("WORLD_SIZE");
    if (!rank && !size) return false;
    if (rank != size)
        fail_usage("%s is set in the environment and %s is not; set both, or neither for one process",
                   rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK");
    launch.launcher = "RANK/WORLD_SIZE";
    launch.size = read_count("WORLD_SIZE", 1, 4096, 1);
    launch.rank = read_count("RANK", 0, 1 << 30, 0);
    launch.local_size = read_count("LOCAL_WORLD_SIZE", 1, 4096, -1);
    launch.local_rank = read_count("LOCAL_RANK", 0, 4095, -1);
    launch.port = 29500;
    // torchrun listens on MASTER_PORT itself and says so.
    const char* store = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (store && !std::strcmp(store, "True")) launch.port = read_count("MASTER_PORT", 1, 65534, launch.port) + 1;
    else launch.port = read_count("MASTER_PORT", 1, 65535, launch.port);
    if (const char* run = std::getenv("TORCHELASTIC_RUN_ID")) launch.run = run;
    return true;
}

// srun's own variables. False if this is no task of srun, or the only one.
inline bool read_slurm_variables(Launch& launch) {
    const int size = read_count("SLURM_NTASKS", 1, 4096, 1);
    if (!is_slurm_task() || size == 1) return false;
    launch.launcher = "srun";
    launch.size = size;
    launch.rank = read_count("SLURM_PROCID", 0, 1 << 30, -1);
    launch.local_rank = read_count("SLURM_LOCALID", 0, 4095, -1);
    if (launch.rank < 0)
        fail_usage(
            "SLURM_STEP_ID and SLURM_NTASKS=%d are set in the environment and SLURM_PROCID is not; start the "
            "program with srun",
            size);
    long long job = 0, step = 0;
    read_variable("SLURM_JOB_ID", 0, 0xffffffffll, job);
    read_variable("SLURM_STEP_ID", 0, 0xffffffffll, step);
    // below the ports that systems hand out, and another one for every step of a job
    launch.port = read_count("MASTER_PORT", 1, 65535, int(10000 + (job * 7 + step) % 20000));
    launch.run = format_text("%lld.%lld", job, step);
    return true;
}

// Numbers of different variables that cannot all be true.
inline void refuse_contradictions(const Launch& launch) {
    const bool slurm = launch.launcher == "srun";
    const char *const rank = slurm ? "SLURM_PROCID" : "RANK", *const size = slurm ? "SLURM_NTASKS" : "WORLD_SIZE",
                      *const local_rank = slurm ? "SLURM_LOCALID" : "LOCAL_RANK";
    if (launch.rank >= launch.size)
        fail_usage("%s=%d and %s=%d in the environment contradict each other: ranks are 0 to %d", rank, launch.rank,
                   size, launch.size, launch.size - 1);
    if (launch.local_size > launch.size)
        fail_usage("LOCAL_WORLD_SIZE=%d and WORLD_SIZE=%d in the environment contradict each other", launch.local_size,
                   launch.size);
    const int limit = launch.local_size > 0 ? launch.local_size : launch.size;
    if (launch.local_rank >= limit)
        fail_usage("%s=%d in the environment: with %s=%d it is at most %d", local_rank, launch.local_rank,
                   launch.local_size > 0 ? "LOCAL_WORLD_SIZE" : size, limit, limit - 1);
    if (launch.local_rank > launch.rank)
        fail_usage("%s=%d and %s=%d in the environment contradict each other: a local rank is at most the rank",
                   local_rank, launch.local_rank, rank, launch.rank);
}

// Without MPI: the host of rank 0. This one where all ranks are here; otherwise somebody has to say it.
inline std::string address_of_rank_0(const Launch& launch) {
    if (const char* address = std::getenv("MASTER_ADDR")) return address;
    bool one_host = launch.local_size < 0 ? launch.local_rank < 0 || launch.local_rank == launch.rank
                                          : launch.local_size == launch.size;
    if (launch.launcher == "srun") one_host = read_count("SLURM_STEP_NUM_NODES", 1, INT_MAX, 2) == 1;
    if (!one_host)
        fail_usage(
            "%d ranks on more than one host, and MASTER_ADDR is not set: set it to the name or address of rank "
            "0's host%s",
            launch.size,
            launch.launcher == "srun" ? ", by export MASTER_ADDR=$(scontrol show hostnames | head -n 1)" : "");
    return "127.0.0.1";
}

// What srun has to offer this MPI: srun --mpi=...
inline std::string pmi_of(const std::string& mpi) { return mpi.compare(0, 8, "Open MPI") == 0 ? "pmix" : "pmi2"; }

// What the environment says. mpi: the name of this build's MPI library, "" without one; argv: the options, which all
// ranks have in common.
inline Launch read_launch(const std::string& mpi, int argc = 0, char** argv = nullptr) {
    Launch launch;
    if (const char* variable = started_by_mpi()) {
        launch.launcher = is_slurm_task() ? "srun" : "mpirun";
        const bool says_size = std::strcmp(variable, "PMIX_RANK") != 0;
        launch.size = read_count(says_size ? variable : "SLURM_NTASKS", 1, 1 << 20, 0);  // 0: not said
        launch.by_mpi = launch.size != 1 && !mpi.empty();
        if (launch.size == 1 || launch.by_mpi) return launch;
        // Without MPI srun's own variables say the same and are enough.
        if (!read_slurm_variables(launch))
            refuse_launch(
                format_text("this binary was built without MPI and would run as %d independent copies under mpirun; "
                            "hint: make deps && make train_nsa, or start it without mpirun",
                            launch.size));
    } else if (!read_rank_variables(launch) && read_slurm_variables(launch) && !mpi.empty()) {
        refuse_launch(
            format_text("srun has started %d tasks without a PMI, by which MPI would bring them together: "
                        "srun --mpi=%s ./train_nsa ... (srun --mpi=list says what this Slurm has)",
                        launch.size, pmi_of(mpi).c_str()));
    }
    refuse_contradictions(launch);
    if (launch.size > 1) launch.address = address_of_rank_0(launch);
    for (int i = 1; i < argc; i++) launch.run += std::string("\n") + argv[i];
    return launch;
}
