// saver.h: writes a run's checkpoints. Every rank writes its files; when all have, rank 0 turns the folder into a
// checkpoint, see checkpoint.h. Used by the training loop in train_nsa.cu.
#pragma once
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "run_folder.h"
#include "../base/safetensors.h"
#include "world.h"

// What one rank writes of a checkpoint. The views point into `buffers`, or straight into the model's arrays.
struct Snapshot {
    std::vector<std::vector<float>> buffers;
    std::vector<TensorView> weights;  // on rank 0
    std::vector<TensorView> moments;  // this rank's share
    std::string config;               // config.json
};

std::vector<FileRecord> write_snapshot(const Snapshot& s, const std::string& folder, int rank, int ranks);

class CheckpointSaver {
  public:
    struct Options {
        std::string run;                              // the run's folder
        int64_t keep, keep_every;                     // see remove_old_checkpoints
        std::function<void(const char*)> note_phase;  // takes a phase's name, for the watchdog
        std::function<void()> before_commit;          // on rank 0: what must be on the disk before the checkpoint is
        std::function<std::string()> state;           // the manifest's JSON
        std::function<Snapshot()> take;               // this rank's files
    };
    bool remove_old = true;  // what --keep does not ask for
    std::string last_saved;  // folder of the last good checkpoint; rank 0
    std::string last_error;  // of save_last(), "" if all is well; rank 0

    CheckpointSaver(const World& w, Options o) : world(w), options(std::move(o)) {}

    // All ranks call it after the same step. A checkpoint that fails is reported, and the run goes on with the last
    // good one.
    void save(int64_t step);

    // Called at the end of a run that has no other error. What cannot be removed, the next run in this folder removes.
    void save_last(int64_t step);

    // The step of last_saved, or 0 if there is none.
    int64_t last_saved_step() const { return std::max<int64_t>(0, parse_step(name_of(last_saved))); }

    // A sentence about last_saved for the end of a run that failed.
    std::string describe_last() const;

  private:
    const World& world;
    const Options options;

    // Returns what went wrong, "" if nothing did. abandoned: takes what cannot be removed after that.
    std::string write(int64_t step, const Complain& abandoned);

    // Rank 0 calls it before any rank writes.
    void begin(int64_t step) const;
    // Rank 0 calls it when the files of all ranks are there.
    void commit(int64_t step, const std::vector<FileRecord>& records);
};

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "saver.cpp"
#endif
