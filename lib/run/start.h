// start.h: the start of a run, before its first step. Used by begin_run() in train_nsa.cu.
#pragma once
#include <memory>
#include <string>

#include "../base/clock.h"
#include "../base/host.h"
#include "../model/flops.h"
#include "config_files.h"
#include "machine.h"
#include "run_folder.h"
#include "run_printer.h"
#include "saver.h"
#include "train_state.h"
#include "training_data.h"
#include "world.h"

// What a run begins with. Both are empty where it draws its weights.
struct RunStart {
    Checkpoint checkpoint;                 // the one to resume
    std::unique_ptr<SafeTensors> weights;  // those of --init-from
};

// Every rank writes its part of a checkpoint into one folder, so each must see what rank 0 has just written there. A
// network file system may take seconds to show it.
inline void require_shared_folder(const World& world, const std::string& out) {
    if (world.size == 1) return;
    const auto run_json = [&] {
        std::string text;
        error_of([&] { text = read_file(out + "/run.json"); });
        return std::to_string(std::hash<std::string>()(text));
    };
    const std::string written = world.gather(run_json())[0];
    const double limit = seconds_now() + 10;
    while (run_json() != written && seconds_now() < limit) usleep(100000);
    std::string error;
    if (run_json() != written)
        error = format_text(
            "--out %s on %s is not the folder in which rank 0 on %s has written run.json: give one that all hosts see",
            out, world.host, world.hosts[0]);
    else if (access(out.c_str(), W_OK) != 0)
        error = format_text("--out %s on %s: %s, and every rank writes its part of a checkpoint there", out, world.host,
                            std::strerror(errno));
    fail_together(world, error);
}

// The checkpoint under --out to resume; none to begin anew. Rank 0 chooses, so that all ranks take the same one. dry:
// the run writes no file.
inline Checkpoint choose_checkpoint(const std::string& out, bool resume, bool dry, const World& world) {
    Checkpoint chosen;
    const std::string error = error_of([&] {
        if (is_checkpoint(out)) fail("--out %s is a checkpoint, or an export: give the folder of a run", out);
        if (world.rank == 0 && !dry && file_exists(out)) lock_run_folder(out);
        if (world.rank == 0 && resume) chosen = newest_checkpoint(out);
    });
    fail_together(world, error);
    const std::string folder = world.gather(chosen.folder)[0];
    return world.rank == 0 || folder.empty() ? chosen : read_manifest(folder);
}

// Those of --init-from.
inline std::unique_ptr<SafeTensors> open_initial_weights(const Config& c, const std::vector<TensorSpec>& specs,
                                                         const World& world) {
    const Checkpoint checkpoint = find_checkpoint(c.init_from, "--init-from");
    require_same_model(c, checkpoint.folder, "begin");
    if (world.size > 1) require_same(world, "weights: " + weights_digest(checkpoint), "give all ranks the same ones");
    auto weights = open_weights(checkpoint.folder, specs);
    if (world.rank == 0)
        print("weights: those of %s; moments, data and schedule begin anew\n", printable(checkpoint.folder));
    return weights;
}

// Looks at whatever a run can be refused for, prints its first lines, and only then writes into its folder. All ranks
// call it.
inline RunStart open_run(const Config& c, const Machine& machine, const TensorList& table, const Partition& partition,
                         const TrainingData& data) {
    const World& world = machine.world;
    const bool writes = c.dump_state.empty(), says = world.rank == 0;
    if (world.size > 1)
        require_same(world, same_run_lines(c, binary_digest(), data.train->state().corpus, corpus_of(data.val)),
                     c.resume ? "start all ranks with the same program, options and data, and with an --out that all "
                                "hosts see: a resume takes its options from there"
                              : "start all ranks with the same program, options and data");
    // With --zero 1 each weight has one rank that updates it.
    if (world.size > 1 && !c.zero)
        require_same(
            world, "engine: " + machine.engine.substr(machine.engine.find(',') + 1),
            "each updates all weights, and would round them otherwise: give all ranks one kind of processor or "
            "GPU, or add --zero 1");
    RunStart start;
    const Checkpoint& chosen = start.checkpoint = choose_checkpoint(c.out, c.resume, !writes, world);
    const bool resumes = !chosen.folder.empty();
    const std::string weights = resumes                ? "weights of " + chosen.folder
                                : !c.init_from.empty() ? "weights of " + c.init_from
                                : c.init == "random"   ? "every tensor random"
                                                       : c.init + " initialisation";
    if (says) print_run(c, machine, table, partition, data, weights);
    if (resumes) {
        require_same_model(c, chosen.folder, "resume");
        resume_data(*data.train, c, read_state(chosen), says);
    } else if (!c.init_from.empty()) {
        start.weights = open_initial_weights(c, table.specs, world);
    }
    const bool has_steps = !resumes || chosen.step < c.steps;
    if (says && writes) prepare_run_folder(c.out, resumes, has_steps ? manifest_json(c) : "");
    world.barrier();
    if (writes) require_shared_folder(world, c.out);
    if (writes) world.watchdog.write_heartbeats(c.out, world.rank);
    return start;
}

// A run carries its vocabulary, so that no verb has to ask where it is.
inline void keep_vocabulary(const Tokenizer* tokenizer, const std::string& out) {
    const std::string folder = out + "/" + VOCABULARY_OF_RUN;
    if (tokenizer && !tokenizer->is_bytes && !file_exists(folder))
        write_vocabulary(folder, tokenizer->tokens, tokenizer->halves_of);
}

// On rank 0, when the folder is there and the weights are: opens the logs and writes the run's first lines into them.
inline void begin_log(RunPrinter& printer, const Config& c, const Machine& machine, const TensorList& table,
                      const Checkpoint& checkpoint, const TrainState& state) {
    printer.log = std::make_unique<RunLog>(c.out, !checkpoint.folder.empty(), state.step, c.tensorboard);
    printer.log_start(state, machine, table.parameters, c.vocab_size,
                      model_flops_per_token(table.specs, shape_of(c, 1, c.seq_len), c.layers));
    print_resume(c, checkpoint);
    std::fflush(stdout);
}
