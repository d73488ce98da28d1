// environment.cpp: the input's lines, NAME=VALUE, as the launcher's variables in the environment. What is accepted
// names one process or a rank of a world.
#include "../../lib/run/launch.h"
#include "fuzz.h"

// clang-format off
static const char* const variables[] = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
    "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"};
// clang-format on

std::vector<std::string> seeds() {
    return {"",
            "RANK=1\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=gpu1\nMASTER_PORT=1234\nTORCHELASTIC_"
            "USE_AGENT_STORE=True\nTORCHELASTIC_RUN_ID=a",
            "RANK=0\nWORLD_SIZE=2",
            "RANK=-1\nWORLD_SIZE=99999999999999999999",
            "SLURM_STEP_ID=0\nSLURM_NTASKS=8\nSLURM_PROCID=3\nSLURM_LOCALID=1\nSLURM_JOB_ID=77\nSLURM_STEP_NODELIST="
            "gpu[01-03,7],login,rack[1-2]n[1-2]",
            "PMI_SIZE=4\nSLURM_NTASKS=4\nSLURM_STEP_ID=0\nSLURM_PROCID=0\nSLURM_JOB_ID=1\nSLURM_JOB_NODELIST=a[0-9]",
            "OMPI_COMM_WORLD_SIZE=1",
            "SLURM_STEP_ID=4294967294\nSLURM_NTASKS=8",
            "SLURM_STEP_ID=0\nSLURM_NTASKS=8\nSLURM_PROCID=3\nSLURM_JOB_ID=77\nSLURM_STEP_NODELIST=gpu[0-65535]x[0-9]"};
}

void fuzz_one(const std::string& input) {
    for (const char* name : variables) unsetenv(name);
    for (size_t begin = 0; begin < input.size();) {
        const size_t end = std::min(input.find('\n', begin), input.size());
        const std::string line = input.substr(begin, end - begin);
        for (const char* name : variables)
            if (line.compare(0, std::strlen(name), name) == 0 && line[std::strlen(name)] == '=')
                setenv(name, line.c_str() + std::strlen(name) + 1, 1);
        begin = end + 1;
    }
    Launch launch;
    {
        MemoryLimit limit(input.size(), 16 << 20, 64);  // a list of up to 65536 hosts
        if (!accepts([&] { launch = read_launch(); })) return;
    }
    EXPECT(launch.size >= 1 && launch.rank >= 0 && launch.rank < launch.size && launch.local_rank <= launch.rank);
    if (launch.size > 1) EXPECT(launch.port >= 1 && launch.port <= 65535 && !launch.address.empty());
}
