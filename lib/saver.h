// saver.h: writes a run's checkpoints in the background while training goes on. Used by the training loop in
// train_nsa.cu.
//
// Two phases. WRITING: every rank writes its files from a copy of its tensors. When all have finished (they tell each
// other once a step), COMMITTING: rank 0 turns the folder into a checkpoint, see checkpoint.h. A checkpoint that fails
// is reported, and the run continues with the last good one.
#pragma once
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "background.h"
#include "checkpoint.h"
#include "errors.h"
#include "profile.h"
#include "run_folder.h"
#include "safetensors.h"
#include "util.h"

// The records of all ranks' files. If one rank could not write its own, with `error` there, all fail with its text.
template <class World>
std::vector<FileRecord> gather_records(const World& world, const std::vector<FileRecord>& mine,
                                       const std::string& error) {
    fail_together(world, error);
    std::string text;
    for (const FileRecord& r : mine)
        text += format_text("%s %llu %u\n", r.name.c_str(), (unsigned long long)r.size, r.crc32c);
    std::string all;
    for (const std::string& t : world.gather(text)) all += t;
    std::vector<FileRecord> records;
    std::istringstream in(all);
    for (FileRecord r; in >> r.name >> r.size >> r.crc32c;) records.push_back(r);
    return records;
}

// What one rank writes of a checkpoint. The views point into `buffers`, or straight into the model's arrays, which must
// then stay as they are until the files are written.
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

template <class World>
class CheckpointSaver {
  public:
    struct Options {
        std::string run;                            // the run's folder
        int64_t keep, keep_every;                   // see remove_old_checkpoints
        std::function<void(const char*)> progress;  // takes a phase's name, for the watchdog
        std::function<void()> before_commit;        // on rank 0: what must be on the disk before the checkpoint is
        std::function<std::string()> state;         // the manifest's JSON
        std::function<Snapshot(bool copy)> take;    // this rank's files, copied or in place
    };
    bool in_background = true;  // false: there is no memory for a copy, so training waits for every checkpoint
    bool remove_old = true;     // what --keep does not ask for
    std::string last_saved;     // folder of the last good checkpoint; rank 0
    std::string last_error;     // of save_now(), "" if all is well; rank 0

    CheckpointSaver(const World& w, Options o) : world(w), options(std::move(o)) {}

    // Does every rank's host have memory for a copy of `bytes` bytes? device: a copy on the host is always needed,
    // since the tensors are on a GPU. Says so where it has not, if the run saves at all.
    void choose_background(double bytes, double available, bool device, bool saves) {
        in_background = world.sum(bytes > 0.8 * available ? 1.0 : 0.0) == 0;
        if (world.rank == 0 && saves && !in_background)
            std::printf(
                "        checkpoints %s: the host has no memory for a copy of %.0f MiB to write in the background\n",
                device ? "may fail" : "hold up the training", bytes / (1 << 20));
    }

    // All ranks, after the same step.
    void save(int64_t step) {
        start(step, in_background);
        if (!in_background) finish();
    }

    // At the end of a run. What goes wrong is left in last_error.
    void save_now(int64_t step) {
        if (saving_step != step) finish();
        at_end = true;
        if (saving_step != step || phase == IDLE) start(step, false);
        finish();
    }

    // Of last_saved; 0 where there is none.
    int64_t last_saved_step() const { return std::max<int64_t>(0, step_of_name(name_of(last_saved))); }

    // Has this rank written its files, so that it can tell the others?
    bool has_written() const { return phase == WRITING && !writer.running(); }

    // Once a step, when the ranks know whether all of them have written.
    void advance(bool written_everywhere) {
        if (phase == WRITING && written_everywhere) commit();
        else if (phase == COMMITTING && !writer.running()) end_commit();
    }

    void finish() {
        if (phase == IDLE) return;
        const Progress progress("saving a checkpoint", 0, world.rank == 0);
        const ProfileRange range("checkpoint", saving_step);
        if (phase == WRITING) commit();
        if (phase == COMMITTING) end_commit();
    }

  private:
    enum Phase { IDLE, WRITING, COMMITTING };
    const World& world;
    const Options options;
    Phase phase = IDLE;
    int64_t saving_step = 0;
    bool at_end = false;  // nothing comes after this checkpoint: the run ends with the error if there is one
    std::string saving_state;
    std::vector<FileRecord> written;  // this rank's files
    std::vector<std::string> complaints;
    BackgroundTask writer;  // last, because its jobs use what stands above

    void report(const std::string& error) {
        phase = IDLE;
        if (world.rank != 0) return;
        for (const std::string& text : complaints) complain(text);
        complaints.clear();
        if (at_end) last_error = error;
        if (error.empty()) {
            last_saved = checkpoint_folder(options.run, saving_step);
            std::printf("saved %s\n", last_saved.c_str());
        } else if (!at_end) {
            complain(format_text("checkpoint of step %lld failed: %s; training goes on, the last good one is %s",
                                 (long long)saving_step, error.c_str(),
                                 last_saved.empty() ? "none" : last_saved.c_str()));
        }
    }

    void start(int64_t step, bool copy) {
        finish();
        const ProfileRange range("checkpoint", step);
        options.progress("checkpoint");
        std::string error;
        try {
            if (world.rank == 0) begin_checkpoint(options.run, step);
        } catch (const Error& e) {
            error = e.what();
        }
        saving_step = step, saving_state = options.state();
        try {
            fail_together(world, error);  // the other ranks also wait here until the folder exists
        } catch (const Error& e) {
            return report(e.what());
        }
        auto snapshot = std::make_shared<Snapshot>(options.take(copy));
        phase = WRITING;
        writer.start([this, snapshot] {
            const ProfileRange of_thread("checkpoint", saving_step);
            written = write_snapshot(*snapshot, checkpoint_writing(options.run, saving_step), world.rank, world.size);
        });
    }

    // What cannot be removed at the end of a run, the next one in this folder removes.
    void abandon() {
        abandon_checkpoint(options.run, saving_step, [this](const std::string& text) {
            if (!at_end) complain(text);
        });
    }

    // A slow disk is no stall as long as bytes arrive there.
    void await_writer() {
        for (uint64_t seen = 0; writer.running(); usleep(1000)) {
            const uint64_t bytes = bytes_written_to_files.load(std::memory_order_relaxed);
            if (bytes != seen) options.progress("checkpoint");
            seen = bytes;
        }
        writer.wait();
    }

    // Every rank has written its files, or could not.
    void commit() {
        await_writer();
        std::vector<FileRecord> records;
        try {
            records = gather_records(world, written, writer.error());
        } catch (const Error& e) {
            if (world.rank == 0) abandon();
            return report(e.what());
        }
        phase = COMMITTING;
        if (world.rank != 0) return report("");
        writer.start([this, records] {
            const ProfileRange of_thread("checkpoint", saving_step);
            try {
                options.before_commit();
            } catch (const Error& e) {
                complaints.push_back(e.what());
            }
            commit_checkpoint(options.run, saving_step, records, saving_state);
            if (!remove_old) return;
            remove_old_checkpoints(options.run, options.keep, options.keep_every,
                                   [this](const std::string& text) { complaints.push_back(text); });
        });
    }

    void end_commit() {
        await_writer();
        if (!writer.error().empty()) abandon();
        report(writer.error());
    }
};

// The checkpoint under --out to resume; "" to begin anew. Rank 0 chooses, so that all ranks take the same one. dry: the
// run writes nothing.
template <class World>
std::string choose_checkpoint(const std::string& out, bool resume, bool dry, const World& world) {
    std::string chosen, error;
    try {
        if (world.rank == 0 && !dry && file_exists(out)) lock_run_folder(out);
        if (world.rank == 0 && resume) chosen = newest_checkpoint(out);
    } catch (const Error& e) {
        error = e.what();
    }
    fail_together(world, error);
    return world.size > 1 ? world.gather(chosen)[0] : chosen;
}
