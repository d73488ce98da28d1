// saver.cpp: the functions of saver.h.
#include "saver.h"

// The records of all ranks' files. If one rank could not write its own, with `error` there, all fail with its text.
static std::vector<FileRecord> gather_records(const World& world, const std::vector<FileRecord>& mine,
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

std::vector<FileRecord> write_snapshot(const Snapshot& s, const std::string& folder, int rank, int ranks) {
    std::vector<FileRecord> records;
    const std::string moments = format_text("/optimizer_%05d-of-%05d.safetensors", rank, ranks);
    records.push_back(write_safetensors(folder + moments, {}, s.moments));
    if (rank != 0) return records;
    records.push_back(write_safetensors(folder + "/model.safetensors", {{"format", "pt"}}, s.weights));
    records.push_back(write_text_file(folder + "/config.json", s.config));
    return records;
}

void CheckpointSaver::save(int64_t step) {
    const std::string error = write(step, WARN);
    if (world.rank == 0 && !error.empty())
        complain("checkpoint of step %d failed: %s; training goes on, the last good one is %s", step, error,
                 last_saved.empty() ? "none" : last_saved);
}

void CheckpointSaver::save_last(int64_t step) {
    last_error = write(step, [](const std::string&) {});
}

std::string CheckpointSaver::describe_last() const {
    if (!last_error.empty()) return "saving failed too: " + last_error;
    return "the last good checkpoint is " + (last_saved.empty() ? "none" : last_saved);
}

std::string CheckpointSaver::write(int64_t step, const Complain& abandoned) {
    const Progress progress("saving a checkpoint", 0, world.rank == 0);
    options.note_phase("checkpoint");
    std::string failure;
    try {
        fail_together(world, world.rank == 0 ? error_of([&] { begin(step); }) : "");
        // the other ranks have waited until the folder exists
        const Snapshot snapshot = options.take();
        const std::string folder = checkpoint_writing(options.run, step);
        std::vector<FileRecord> mine;
        const std::string error = error_of([&] { mine = write_snapshot(snapshot, folder, world.rank, world.size); });
        const std::vector<FileRecord> all = gather_records(world, mine, error);
        if (world.rank == 0) commit(step, all);
    } catch (const Error& e) {
        if (world.rank == 0) abandon_checkpoint(options.run, step, abandoned);
        failure = e.what();
    }
    world.barrier();  // the others wait for rank 0's disk here, where the watchdog knows why
    options.note_phase("report");
    return failure;
}

void CheckpointSaver::begin(int64_t step) const {
    require_run_folder(options.run);
    begin_checkpoint(options.run, step);
}

void CheckpointSaver::commit(int64_t step, const std::vector<FileRecord>& records) {
    const std::string error = error_of(options.before_commit);
    if (!error.empty()) complain(error);
    commit_checkpoint(options.run, step, records, options.state());
    if (remove_old) remove_old_checkpoints(options.run, options.keep, options.keep_every);
    last_saved = checkpoint_folder(options.run, step);
    print("saved %s\n", printable(last_saved));
}
