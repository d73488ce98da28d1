// saver.h: writes a run's checkpoints. Every rank writes its files; when all have, rank 0 turns the folder into a
// checkpoint, see checkpoint.h. Used by the training loop in train_nsa.cu.
#pragma once
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "run_folder.h"
#include "world.h"

// What one rank writes of a checkpoint. The views point into `buffers`, or straight into the model's arrays.
struct Snapshot {
    std::vector<std::vector<float>> buffers;
    std::vector<TensorView> weights;  // on rank 0
    std::vector<TensorView> moments;  // this rank's share
    std::string config;               // config.json
};

inline std::vector<FileRecord> write_snapshot(const Snapshot& s, const std::string& folder, int rank, int ranks) {
    std::vector<FileRecord> records;
    const std::string moments = format_text("/optimizer_%05d-of-%05d.safetensors", rank, ranks);
    records.push_back(write_safetensors(folder + moments, {}, s.moments));
    if (rank != 0) return records;
    records.push_back(write_safetensors(folder + "/model.safetensors", {{"format", "pt"}}, s.weights));
    records.push_back(write_text_file(folder + "/config.json", s.config));
    return records;
}

// The records of all ranks' files. If one rank could not write its own, with `error` there, all fail with its text.
inline std::vector<FileRecord> gather_records(const World& world, const std::vector<FileRecord>& mine,
                                              const std::string& error) {
    fail_together(world, error);
    std::string text;
    for (const FileRecord& r : mine) text += format_text("%s %d %d\n", r.name, r.size, r.crc32c);
    std::string all;
    for (const std::string& t : world.gather(text)) all += t;
    std::vector<FileRecord> records;
    std::istringstream in(all);
    for (FileRecord r; in >> r.name >> r.size >> r.crc32c;) records.push_back(r);
    return records;
}

class CheckpointSaver {
  public:
    struct Options {
        std::string run;                      // the run's folder
        int64_t keep, keep_every;             // see remove_old_checkpoints
        std::function<void()> before_commit;  // on rank 0: what must be on the disk before the checkpoint is
        std::function<std::string()> state;   // the manifest's JSON
        std::function<Snapshot()> take;       // this rank's files
    };
    bool remove_old = true;  // what --keep does not ask for
    std::string last_saved;  // folder of the last good checkpoint; rank 0
    std::string last_error;  // of save_last(), "" if all is well; rank 0

    CheckpointSaver(const World& w, Options o) : world(w), options(std::move(o)) {}

    // All ranks call it after the same step. A checkpoint that fails is reported, and the run goes on with the last
    // good one.
    void save(int64_t step) {
        const std::string error = write(step, WARN);
        if (world.rank == 0 && !error.empty())
            complain("checkpoint of step %d failed: %s; training goes on, the last good one is %s", step, error,
                     last_saved.empty() ? "none" : last_saved);
    }

    // At the end of a run, also of one that failed; what goes wrong is in last_error. What cannot be removed, the next
    // run in this folder removes.
    void save_last(int64_t step) {
        last_error = write(step, [](const std::string&) {});
    }

    // The step of last_saved, or 0 if there is none.
    int64_t last_saved_step() const { return std::max<int64_t>(0, parse_step(name_of(last_saved))); }

    // A sentence about last_saved for the end of a run that failed.
    std::string describe_last() const {
        if (!last_error.empty()) return "saving failed too: " + last_error;
        return "the last good checkpoint is " + (last_saved.empty() ? "none" : last_saved);
    }

  private:
    const World& world;
    const Options options;

    // Returns what went wrong, "" if nothing did. abandoned: takes what cannot be removed after that.
    std::string write(int64_t step, const Complain& abandoned) {
        const Progress progress("saving a checkpoint", 0, world.rank == 0);
        world.watchdog.note_phase(step, "checkpoint");
        std::string failure;
        try {
            fail_together(world, error_of([&] {
                              if (world.rank != 0) return;
                              require_run_folder(options.run);
                              begin_checkpoint(options.run, step);
                          }));
            // the other ranks have waited until the folder exists
            const Snapshot snapshot = options.take();
            const std::string folder = checkpoint_writing(options.run, step);
            std::vector<FileRecord> mine;
            const std::string error =
                error_of([&] { mine = write_snapshot(snapshot, folder, world.rank, world.size); });
            const std::vector<FileRecord> all = gather_records(world, mine, error);
            if (world.rank == 0) commit(step, all);
        } catch (const Error& e) {
            if (world.rank == 0) abandon_checkpoint(options.run, step, abandoned);
            failure = e.what();
        }
        world.barrier();  // the others wait for rank 0's disk here, where the watchdog knows why
        world.watchdog.note_phase(step, "report");
        return failure;
    }

    // Rank 0 calls it when the files of all ranks are there.
    void commit(int64_t step, const std::vector<FileRecord>& records) {
        try_or_complain(options.before_commit);
        last_saved = commit_checkpoint(options.run, step, records, options.state());
        if (remove_old) remove_old_checkpoints(options.run, options.keep, options.keep_every);
        print("saved %s\n", printable(last_saved));
    }
};
