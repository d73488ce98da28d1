// run_printer.h: everything that a run prints on stdout or writes into its logs, from plain numbers. Used by the
// training loop in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../model/partition.h"
#include "../data/multiple_choice.h"
#include "evaluation.h"
#include "machine.h"
#include "options.h"
#include "../base/progress.h"
#include "run_folder.h"
#include "saver.h"
#include "../model/shape.h"
#include "../data/shards.h"
#include "../base/signals.h"
#include "../data/synthetic.h"
#include "../base/system.h"
#include "train_state.h"
#include "training_data.h"
#include "../base/clock.h"
#include "world.h"

// ---------------------------------------------------------------------------------------------------------------------
// Before the first step.

// Prints what a reader wants to know before the first step, one line each: device, ranks, model, data, batch. weights:
// where they come from.
void print_run(const TrainConfig& c, const Machine& machine, const TensorList& table, const Partition& partition,
               const TrainingData& data, const std::string& weights);

// Prints which kernels a GPU takes for the selected branch; at the end of a run, what became of that choice.
void print_selected(const std::string& kernels);

// ---------------------------------------------------------------------------------------------------------------------
// Steps and validations.

// A step that the engine has been given; what stands below `tokens` is known once the ranks have exchanged their
// results.
struct StepResult {
    int64_t step = 0;
    double lr = 0;
    Json layers;                  // what summarise_layer() says of each, in a step of statistics
    uint64_t samples = 0;         // that the loader has dealt out by the end of this step, of these data
    uint64_t all_tokens = 0;      // that the run has been given by then
    std::vector<int32_t> tokens;  // [samples of this rank, T]
    double own_loss = 0;          // this rank's sum of losses
    double loss = 0, norm = 0;

    bool is_bad() const { return !std::isfinite(loss) || !std::isfinite(norm); }
};

// A line about a step that was not finite. finite: for each rank "" if its loss was not; tensor: the first whose
// gradient was not; file: where the batch is.
std::string bad_step_text(const StepResult& s, const std::vector<std::string>& finite, const std::string& tensor,
                          const std::string& file);

// Writes the batch of a step that was not finite into a file of this rank, for later. Returns its path.
std::string write_bad_step(const std::string& out, const StepResult& s, int rank, const std::string& tensor,
                           size_t seq_len);

// Prints and logs on rank 0 while the run goes on. The other ranks have one too, for its clocks.
struct RunPrinter {
    const int64_t steps, total_batch, log_every;  // --steps, --total-batch, --log-every
    const uint64_t epoch_samples;                 // samples in an epoch of the training data
    std::unique_ptr<RunLog> log;                  // on rank 0, once the folder is there
    std::vector<double> speed;                    // tokens/s of every reported step
    double begun = 0;                             // seconds_now() when the run was ready
    double started = 0, last_lap = 0;             // when its first step began, when the last one was reported
    double last_printed = 0;                      // when the last line of a step was printed
    double unprinted_seconds = 0;                 // of the steps since then
    int64_t unprinted_steps = 0;
    double last_recall = -1;
    int64_t first_step = 0;  // a resumed run begins here
    uint64_t tokens = 0;     // that the run was given up to the last reported step
    int ranks = 1;
    double flops_per_token = 0, peak_flops = 0;  // of the model, for training; of one rank's processor, 0: unknown

    RunPrinter(int64_t run_steps, int64_t step_tokens, int64_t every, uint64_t samples_per_epoch)
        : steps(run_steps), total_batch(step_tokens), log_every(every), epoch_samples(samples_per_epoch) {}

    // Logs that the program was started on this run: at its first step, or at a resume.
    void log_start(const TrainState& state, const Machine& machine, int64_t parameters, int64_t vocab_size,
                   double flops);

    void log_sample(int64_t step, const std::string& text);

    void start(int64_t step) {
        first_step = step;
        begun = seconds_now();
    }
    void start_clock() { started = last_lap = seconds_now(); }

    // The seconds since the step before.
    double lap();

    // Both logs have every step. stdout has one in log_every, or one a second, and what is out of the ordinary: the
    // first, the last, and those that changed no weight.
    void print_step(const StepResult& s, double seconds, double peak_gpu_mib, bool last);

    // set: of --val-data. decides: it is the first one, whose numbers are logged without its name.
    void print_validation(int64_t step, const std::string& set, bool decides, const EvalResult& r);

    void print_choices(int64_t step, const ChoiceResult& r);

    // With what the recall loss of the built-in corpus means: its names lie farther back than the window reaches.
    // device: what the engine calls its devices.
    void print_done(int64_t step, double peak_device_mib, const std::string& device);

    // times: total and exposed seconds of all steps together.
    static void print_reductions(const ReduceTimes& times);

    // Prints the run's last lines, or fails with the error that a run ends with although it reached its last step.
    void print_end(Stop stop, const TrainState& state, const TrainConfig& c, const CheckpointSaver& saver,
                   bool has_vocabulary) const;
};

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "run_printer.cpp"
#endif
