// checkpoint.h: folders of files that survive crashes: how one is written,
// recognised as whole, chosen and removed. What lies in the files is not known here.
//
// A checkpoint is RUN/step_00001000/. It grows as RUN/step_00001000.writing/: every file is written and synced, then
// manifest.json with each file's size and checksum, then the folder is synced, renamed, and RUN synced. So a folder
// that has the final name was whole when it got it; whether it still is, after a torn disk or a stray hand,
// open_checkpoint() tells from the manifest. Several ranks write into the same .writing folder of a shared file
// system and hand rank 0 the records of their files:
//     rank 0:      begin_checkpoint(run, step)                          then a barrier
//     every rank:  records.push_back(write_safetensors(checkpoint_writing(run, step) + "/...", ...))
//     rank 0:      commit_checkpoint(run, step, all ranks' records, state), or abandon_checkpoint() when one of them
//     failed
// Removal takes the opposite way: RUN/step_00001000.removing/, RUN synced, and only then the files.
#pragma once
#include <functional>

#include "../base/json.h"
#include "../base/progress.h"
#include "../base/safetensors.h"
#include "../base/errors.h"

// Takes one line about something that went wrong and is survived; a warning, unless somebody wants to know.
using Complain = std::function<void(const std::string&)>;
inline const Complain WARN = [](const std::string& line) { complain(line); };
// What goes wrong in a job is such a line.
inline void try_or_complain(const std::function<void()>& job, const Complain& complain = WARN) {
    const std::string error = error_of(job);
    if (!error.empty()) complain(error);
}

// ---------------------------------------------------------------------------------------------------------------------
// Names.

std::string checkpoint_folder(const std::string& run, int64_t step);
std::string checkpoint_writing(const std::string& run, int64_t step);

// The step in a folder's name (without its path) that ends in `suffix`; -1 for any other name.
int64_t parse_step(const std::string& name, const std::string& suffix = "");

// The steps of a run's checkpoints, the newest first, whole or not; none if there is no such folder.
std::vector<int64_t> checkpoint_steps(const std::string& run);

// ---------------------------------------------------------------------------------------------------------------------
// The manifest. JSON, whose last line is the checksum of every byte before it and the comma:
//     {"format": 1,
//      "step": 1000,
//      "files": [
//       {"name": "model.safetensors", "size": 30848, "crc32c": "e3069283"}],
//      "state": {what the caller needs to resume},
//      "crc32c": "8a9136aa"}

constexpr int64_t MANIFEST_FORMAT = 1;

// A checkpoint that was opened: what its manifest says.
struct Checkpoint {
    int64_t step = 0;
    std::vector<FileRecord> files;
    Json state;              // an object
    std::string state_text;  // the same as it was given
    std::string folder;      // "": there is no checkpoint
    std::string path;        // of the manifest, for messages; "": a model without one
};

std::string manifest_ending(const std::string& before);

std::string manifest_text(int64_t step, const std::vector<FileRecord>& files, const std::string& state_json);

Checkpoint parse_manifest(const std::string& text, const std::string& path);

Checkpoint read_manifest(const std::string& folder);

// ---------------------------------------------------------------------------------------------------------------------
// Writing.

// An empty folder for the files of this step; what a dead writer left of
// the same step goes. Returns its path, checkpoint_writing(run, step).
std::string begin_checkpoint(const std::string& run, int64_t step);

// Makes the files that were written into checkpoint_writing(run, step) a checkpoint: from the return on it is durable
// under the returned name, checkpoint_folder(run, step). A folder that has this name already gives way: a step is
// written again when its checkpoint was found damaged and the run resumed from the one before. state_json: a JSON
// object.
std::string commit_checkpoint(const std::string& run, int64_t step, const std::vector<FileRecord>& files,
                              const std::string& state_json);

// Gives up a checkpoint that could not be written, so that a full disk has its space back.
void abandon_checkpoint(const std::string& run, int64_t step, const Complain& complain = WARN);

// ---------------------------------------------------------------------------------------------------------------------
// Reading.

// Throws unless the file is there, or where a link leads, with the size and the checksum of the record.
void verify_file(const std::string& folder, const FileRecord& expected);

// What of a checkpoint is wanted: all of it, to resume, or the model, which needs no optimiser's files.
enum class Wanted { ALL, MODEL };

// Reads the files of a checkpoint; returns when all are as the manifest says, else throws one line about the first that
// is not. A model without a manifest is taken as it is, with a complaint.
Checkpoint open_checkpoint(const std::string& folder, Wanted wanted = Wanted::ALL);

// Of an opened checkpoint's weights; what its manifest says was verified then, and is not read again.
std::string weights_digest(const Checkpoint& checkpoint);

// The newest checkpoint that is as its manifest says; one complaint for each newer one, whose name and fault it tells.
Checkpoint newest_intact_checkpoint(const std::string& run, const Complain& complain = WARN,
                                    Wanted wanted = Wanted::ALL);

// The same with warnings; an error if there are checkpoints and all of them are damaged.
Checkpoint newest_checkpoint(const std::string& run, Wanted wanted = Wanted::ALL);

bool is_checkpoint(const std::string& folder);

// The checkpoint that an option names, for its model: the folder itself, or the newest one of a run's folder.
Checkpoint find_checkpoint(const std::string& from, const char* option);

// The step of the checkpoint whose weights had the lowest validation loss, the newest of equal ones; -1 where none was
// validated. The manifest's state says it of its own checkpoint, so nothing has to be kept in step with the folder:
//     "validation": {"loss": 3.2924, "data": "which"}
// Only losses on the same data compare: on those of the newest that was validated.
int64_t best_step(const std::string& run, const Complain& complain = WARN);

// ---------------------------------------------------------------------------------------------------------------------
// Removing.

// Keeps the `keep` newest checkpoints (0: all), those whose step is a multiple of keep_every (0: no others), and the
// best; and, should all of these be damaged, the newest that is intact. What cannot be removed is a complaint.
void remove_old_checkpoints(const std::string& run, int64_t keep, int64_t keep_every, const Complain& complain = WARN);

// Removes what writers and removers that died have left. Only at the start of a run, while nobody writes.
void clean_leftovers(const std::string& run, const Complain& complain = WARN);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "checkpoint.cpp"
#endif
