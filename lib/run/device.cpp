// device.cpp: the functions of device.h.
#include "device.h"

int count_threads(const World& world) {
    const std::vector<std::string> places = world.gather(world.machine + " " + processor_list());
    const auto sharers = std::count(places.begin(), places.end(), places[size_t(world.rank)]);
    return std::max(1, usable_processors() / int(sharers));
}

// --device names an engine for devices, and whether this machine and build have what it, or auto, asks for.
static bool asks_for_device(const MachineConfig& c) { return c.device != "cpu" && c.device != "auto"; }

static bool has_device(const MachineConfig& c, const GpuSearch& gpus) {
    return gpus.count > 0 && (c.device == "auto" ? gpus.by_auto : c.device == gpus.engine.option);
}

static std::string why_no_device(const MachineConfig& c, const GpuSearch& gpus) {
    if (!asks_for_device(c) || c.device == gpus.engine.option) return why_no_gpu(gpus);
    return "this build has the engines cpu and " + gpus.engine.option;
}

void drop_unsupported_options(Config& c, int share, const GpuSearch& gpus) {
    const auto give_up = [&](const std::string& name, const char* instead, const std::string& reason) {
        const Option& o = option_named(name);
        if (value_text(c, o) != instead) overlay(c, o, instead, Source::MACHINE, reason);
    };
    if (asks_for_device(c) && !has_device(c, gpus)) give_up("device", "auto", why_no_device(c, gpus));
    if (!has_device(c, gpus) || !gpus.engine.has_attention_kernel(c.attention_kernel))
        give_up("attention-kernel", "auto", "what computes now does not have it");
    if (has_device(c, gpus)) give_up("cpu-dtype", "fp32", "the run is on a GPU now");
    if (c.threads > share) give_up("threads", "auto", format_text("this rank has %d processors", share));
}

// Refuses a name that the engine in use does not know.
static void check_attention_kernel(const MachineConfig& c, const Device& d) {
    const std::string& name = c.attention_kernel;
    if (name == "auto" || (d.gpu && d.engine.has_attention_kernel(name))) return;
    if (!d.gpu || d.engine.attention_kernels.empty())
        fail_usage("--attention-kernel %s: the %s engine has no choice of kernels; leave it out", name,
                   d.gpu ? d.engine.name : "CPU");
    fail_usage("--attention-kernel is '%s'; the %s engine of this build (%s) has auto, %s", name, d.engine.name,
               d.engine.format, joined_words(d.engine.attention_kernels, ", "));
}

// The device of the options --device, --attention-kernel, --cpu-dtype and --threads on this machine. share: this rank's
// processors.
static Device find_device(const MachineConfig& c, int share, const GpuSearch& gpus, bool speaks) {
    Device d;
    d.threads = c.threads ? int(c.threads) : std::min(share, omp_get_max_threads());
    omp_set_num_threads(d.threads);
    const std::string none = why_no_device(c, gpus);
    d.engine = gpus.engine;
    d.gpu = has_device(c, gpus);
    if (c.device == "auto" && gpus.broken) fail("%s; until that is mended use --device cpu", none);
    if (asks_for_device(c) && !d.gpu) fail_usage("--device %s: %s; use --device cpu or auto", c.device, none);
    d.reason = c.device != "auto" ? "--device " + c.device : d.gpu ? "there is a GPU" : none;
    if (c.cpu_dtype == "bf16" && d.gpu)
        fail_usage(
            "--cpu-dtype bf16 is for the CPU engine and this run computes by %s; leave it out or add --device cpu",
            d.engine.name);
    check_attention_kernel(c, d);
    d.attention_kernel = c.attention_kernel;
    d.cpu_bf16 = c.cpu_dtype == "bf16" && HAVE_BF16;
    if (c.cpu_dtype == "bf16" && !HAVE_BF16)
        d.reason +=
            "; fp32, because --cpu-dtype bf16 needs AVX512_BF16, which the processor of this build does not have";
    if (d.threads > share && speaks)
        complain("--threads %d, and this rank has %s: more threads than that wait for each other", d.threads,
                 counted(share, "processor"));
    return d;
}

// mpirun, or its helper on this machine, makes each rank's first process lead a group: the program, or a script around
// it.
static pid_t find_launcher() {
    std::string stat;
    std::getline(std::ifstream(format_text("/proc/%d/stat", int(getpgrp()))), stat);
    int parent = 0;
    const bool known = std::sscanf(stat.c_str() + stat.rfind(')') + 1, " %*c %d", &parent) == 1;
    return known ? parent : getppid();
}

// Open MPI's mpirun binds each of a few ranks to one core, and leaves the others of the machine idle. "" if it does
// not.
static std::string idle_processors(const World& world) {
    std::set<int> taken;
    for (const std::string& place : world.gather(world.machine + " " + processor_list())) {
        std::istringstream words(place);
        std::string machine;
        words >> machine;
        for (int i; machine == world.machine && words >> i;) taken.insert(i);
    }
    const std::vector<int> launchers = processors_allowed(find_launcher());
    const double usable = std::min(double(launchers.size()), std::ceil(cgroup_limits().processors));
    if (world.launcher != "mpirun" || double(taken.size()) >= usable) return "";
    return format_text(
        "mpirun binds ranks to processors and leaves %.0f of this machine's %.0f idle: mpirun --bind-to none",
        usable - double(taken.size()), usable);
}

Device choose_device(const MachineConfig& c, const World& world, const GpuSearch& gpus) {
    Device d = find_device(c, count_threads(world), gpus, world.rank == 0);
    // Ranks that see the same GPUs take them in turn.
    std::string seen = world.machine;
    for (const std::string& place : gpus.places) seen += " " + place;
    const std::vector<std::string> all = world.gather(seen);
    if (d.gpu) d.gpu_number = int(std::count(all.begin(), all.begin() + world.rank, seen)) % gpus.count;
    if (d.gpu && world.communicator) d.gpu_number = gpus.current;
    d.idle = idle_processors(world);
    // Ranks on GPUs and ranks on CPUs cannot sum gradients together.
    require_same(world, d.gpu ? "device: GPU" : "device: CPU",
                 "all ranks compute on GPUs or all on CPUs: make every rank see a GPU (./train_nsa check says "
                 "what its host has), or start all with --device cpu");
    return d;
}

GradientPath choose_path(World& world, const EngineInfo& engine, const std::string& gpu, const std::string& bus) {
    world.device_sharers = gpu.empty() ? world.local_size : 1;
    if (world.size == 1) return {};
    if (gpu.empty() && !world.has_mpi)
        throw SharedError(format_text("%d ranks were started by %s, without MPI, and only NCCL between GPUs serves "
                                      "such ranks: this run computes on CPUs, so start it with mpirun -np %d "
                                      "./train_nsa ...",
                                      world.size, world.launcher, world.size),
                          2);
    if (gpu.empty()) return {false, "by MPI"};
    const std::vector<std::string> all = world.gather(world.machine + " " + bus);
    std::map<std::string, int> ranks_on;
    for (const std::string& place : all) ranks_on[place]++;
    world.device_sharers = ranks_on[all[size_t(world.rank)]];
    const std::string shares =
        format_text("%d ranks share %s", world.device_sharers, world.device_sharers > 1 ? gpu : "a GPU");
    const bool shared = ranks_on.size() < all.size();
    if (shared && !world.has_mpi)
        throw SharedError(shares + ", and NCCL needs a GPU for each: start them with mpirun, or fewer");
    if (engine.collective.empty()) return {false, "by MPI through the host, because " + engine.no_collective};
    if (shared) return {false, "by MPI through the host, because " + shares + "; one rank a GPU is faster"};
    return {true, "by " + engine.collective};
}
