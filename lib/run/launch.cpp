// launch.cpp: the functions of launch.h.
#include "launch.h"

// The number in a variable; `otherwise` where it is not set. Anything but an integer in the range is the user's error.
static long long read_number(const char* name, long long lowest, long long highest, long long otherwise) {
    const char* text = std::getenv(name);
    if (!text) return otherwise;
    char* end;
    errno = 0;
    const long long number = std::strtoll(text, &end, 10);
    if (!std::isdigit(static_cast<unsigned char>(text[0])) || *end || errno || number < lowest || number > highest)
        fail_usage("%s='%s' in the environment: expected an integer from %d to %d", name, text, lowest, highest);
    return number;
}

const char* started_by_mpi() {
    if (std::getenv("TORCHELASTIC_RUN_ID")) return nullptr;  // torchrun, which an mpirun or srun may have started
    for (const char* variable : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK"})
        if (std::getenv(variable)) return variable;
    return nullptr;
}

// A task of srun. A shell of sbatch or salloc has the job's variables too, but is one process: it has no step, or one
// of the numbers at the top of the range that Slurm keeps for batch, interactive and external steps.
static bool is_slurm_task() {
    const char* const step = std::getenv("SLURM_STEP_ID");
    const size_t digits = step ? std::strspn(step, "0123456789") : 0;
    return digits && !step[digits] && std::strtoull(step, nullptr, 10) < 0xfffffff0ull;
}

int rank_in_environment() {
    const char* const first = started_by_mpi() ? "PMI_RANK" : "RANK";
    for (const char* variable : {first, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID"})
        if (const char* text = std::getenv(variable)) return std::atoi(text);
    return 0;
}

void refuse_launch(const std::string& text) {
    const int rank = rank_in_environment();
    if (rank > 0) usleep(2000000);
    throw Error(2, rank > 0 ? format_text("rank %d on %s: %s", rank, host_name(), text) : text);
}

// RANK and WORLD_SIZE, as torchrun and hand-written loops set them. False if they are not set.
static bool read_rank_variables(Launch& launch) {
    const bool rank = std::getenv("RANK"), size = std::getenv("WORLD_SIZE");
    if (!rank && !size) return false;
    if (rank != size)
        fail_usage("%s is set in the environment and %s is not; set both, or neither for one process",
                   rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK");
    launch.launcher = "RANK/WORLD_SIZE";
    launch.size = read_number("WORLD_SIZE", 1, 4096, 1);
    launch.rank = read_number("RANK", 0, 1 << 30, 0);
    launch.local_rank = read_number("LOCAL_RANK", 0, 4095, -1);
    const char* store = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
    const int taken = store && !std::strcmp(store, "True");  // torchrun itself listens on MASTER_PORT then
    launch.port = read_number("MASTER_PORT", 1, 65535 - taken, 29500) + taken;
    if (const char* run = std::getenv("TORCHELASTIC_RUN_ID")) launch.run = run;
    return true;
}

// srun's own variables. False if this is no task of srun, or the only one.
static bool read_slurm_variables(Launch& launch) {
    if (!is_slurm_task()) return false;
    const int size = read_number("SLURM_NTASKS", 1, 4096, 1);
    if (size == 1) return false;
    launch.launcher = "srun";
    launch.size = size;
    launch.rank = read_number("SLURM_PROCID", 0, 1 << 30, -1);
    launch.local_rank = read_number("SLURM_LOCALID", 0, 4095, -1);
    if (launch.rank < 0)
        fail_usage("SLURM_NTASKS=%d is set in the environment and SLURM_PROCID is not; start the program with srun",
                   size);
    const long long job = read_number("SLURM_JOB_ID", 0, 0xffffffffll, 0),
                    step = read_number("SLURM_STEP_ID", 0, 0xffffffffll, 0);
    // below the ports that systems hand out, and another one for every step of a job
    launch.port = read_number("MASTER_PORT", 1, 65535, int(10000 + (job * 7 + step) % 20000));
    launch.run = format_text("%d.%d", job, step);
    return true;
}

// Numbers of different variables that cannot all be true.
static void refuse_contradictions(const Launch& launch) {
    const bool slurm = launch.launcher == "srun";
    const char* const rank = slurm ? "SLURM_PROCID" : "RANK";
    const auto refuse = [](const char* one, int value, const char* other, int limit) {
        fail_usage(
            "%s=%d and %s=%d in the environment contradict each other: ranks are numbered from 0, local ones too", one,
            value, other, limit);
    };
    if (launch.rank >= launch.size) refuse(rank, launch.rank, slurm ? "SLURM_NTASKS" : "WORLD_SIZE", launch.size);
    if (launch.local_rank > launch.rank)
        refuse(slurm ? "SLURM_LOCALID" : "LOCAL_RANK", launch.local_rank, rank, launch.rank);
}

// Without MPI: the host of rank 0. This one where all ranks are here; otherwise somebody has to say it.
static std::string address_of_rank_0(const Launch& launch) {
    if (const char* address = std::getenv("MASTER_ADDR")) return address;
    bool one_host = launch.local_rank < 0 || launch.local_rank == launch.rank;
    if (launch.launcher == "srun") one_host = read_number("SLURM_STEP_NUM_NODES", 1, 1 << 30, 2) == 1;
    if (!one_host)
        fail_usage(
            "%d ranks on more than one host, and MASTER_ADDR is not set: set it to the name or address of rank 0's "
            "host; for Slurm: export MASTER_ADDR=$(scontrol show hostnames | head -n 1)",
            launch.size);
    return "127.0.0.1";
}

void refuse_other_mpi(const Launch& launch, int size) {
    refuse_launch(format_text("%s has started %d processes, but this program's MPI (%.60s) sees %d: %s",
                              launch.launcher, launch.size, launch.mpi, size,
                              launch.launcher == "srun"
                                  ? "give srun --mpi=" + choose_pmi(launch.mpi)
                                  : "mpirun belongs to another MPI than the one it was built with; use the mpirun "
                                    "beside the mpicxx of the build"));
}

Launch read_launch(const std::string& mpi, int argc, char** argv) {
    Launch launch;
    launch.mpi = mpi;
    if (const char* variable = started_by_mpi()) {
        // inside of a job mpirun's ranks (MPICH's and Intel's, Open MPI's) have Slurm's variables too
        const bool mpirun = std::getenv("MPI_LOCALNRANKS") || std::getenv("OMPI_COMM_WORLD_SIZE");
        launch.launcher = !mpirun && is_slurm_task() ? "srun" : "mpirun";
        const bool says_size = std::strcmp(variable, "PMIX_RANK") != 0;
        launch.size = read_number(says_size ? variable : "SLURM_NTASKS", 1, 1 << 20, 0);  // 0: not said
        launch.by_mpi = launch.size != 1 && !mpi.empty();
        if (launch.size == 1 || launch.by_mpi) return launch;
        // Without MPI srun's own variables say the same and are enough.
        if (mpirun || !read_slurm_variables(launch))
            refuse_launch(
                format_text("this binary was built without MPI and would run as %d independent copies under mpirun; "
                            "hint: make deps && make train_nsa, or start it without mpirun",
                            launch.size));
    } else if (!read_rank_variables(launch) && read_slurm_variables(launch) && !mpi.empty()) {
        refuse_launch(
            format_text("srun has started %d tasks without a PMI, by which MPI would bring them together: "
                        "srun --mpi=%s ./train_nsa ... (srun --mpi=list says what this Slurm has)",
                        launch.size, choose_pmi(mpi)));
    }
    refuse_contradictions(launch);
    if (launch.size > 1) launch.address = address_of_rank_0(launch);
    for (int i = 1; i < argc; i++) launch.run += std::string("\n") + argv[i];
    return launch;
}
