// run_folder.h: the folder of a run: which files in it are ours, whose turn it is to write there, and its logs. Used by
// the training loop and the verbs in train_nsa.cu.
#pragma once
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "checkpoint.h"
#include "../base/clock.h"
#include "../base/json.h"
#include "../model/shape.h"
#include "tensorboard.h"
#include "../base/errors.h"

// ---------------------------------------------------------------------------------------------------------------------
// Whose folder it is.

// Two runs in one folder would overwrite each other's logs and checkpoints. The kernel's lock on the folder itself
// leaves no file behind, and it ends with the process, however that ends. A process works on one run at a time.
inline int run_folder_lock = -1;
void lock_run_folder(const std::string& folder);

// Fails where it is no longer the one that was locked: a new one of that name would be half a run.
void require_run_folder(const std::string& folder);

constexpr const char* VOCABULARY_OF_RUN = "vocabulary";  // a folder with its copy of the vocabulary

// A folder for the run, with its run.json. An earlier run's files are never overwritten: without --resume they move
// into a folder beside it. A file that this program did not write stays, and is refused if it is in the way. options
// "": a resume that has no step to do, whose options must not become the run's.
void prepare_run_folder(const std::string& out, bool resuming, const std::string& options);

void remove_halt_file(const std::string& out);

// ---------------------------------------------------------------------------------------------------------------------
// Its logs.

// Calls use(name, number) for every number of a line of log.jsonl but its step, time and clock; null stands for what is
// not finite. The numbers of layer 3 are named like gate_cmp/layer_3.
template <class Use>
void for_each_number(const Json& line, Use use) {
    const auto number = [&](const std::string& name, const Json& x) {
        if (x.kind == Json::Number) use(name, x.number_value);
        if (x.kind == Json::Null) use(name, std::numeric_limits<double>::quiet_NaN());
    };
    for (size_t i = 0; i < line.keys.size(); i++) {
        const std::string& key = line.keys[i];
        if (key != "layers" && key != "step" && key != "time" && key != "clock") number(key, line.items[i]);
        for (size_t layer = 0; key == "layers" && layer < line.items[i].items.size(); layer++) {
            const Json& of_layer = line.items[i].items[layer];
            const std::string end = "/layer_" + std::to_string(layer);
            for (size_t j = 0; j < of_layer.keys.size(); j++) {
                const std::vector<Json>& branches = of_layer.items[j].items;  // of a list alone
                number(of_layer.keys[j] + end, of_layer.items[j]);
                for (size_t b = 0; b < std::min(branches.size(), size_t(BRANCHES)); b++)
                    number(of_layer.keys[j] + "_" + BRANCH_NAMES[b] + end, branches[b]);
            }
        }
    }
}

// main.log in the form that existing plotting notebooks read ("s:<step> tel:<validation loss>", "s:<step> trl:<training
// loss> lr:<lr> norm:<norm>"), and log.jsonl with more. With --tensorboard the numbers of log.jsonl are TensorBoard's
// too.
struct RunLog {
    FILE *text = nullptr, *json = nullptr;
    std::unique_ptr<EventFile> events;

    // append: a resumed run continues after its checkpoint's step. Lines that an interrupted run logged after that
    // step are dropped, since the steps are done again.
    RunLog(const std::string& folder, bool append, int64_t last_step, bool tensorboard) {
        for (auto [file, name, step] :
             {std::make_tuple(&text, "/main.log", "s:"), std::make_tuple(&json, "/log.jsonl", "{\"step\":")}) {
            if (append && file_exists(folder + name)) drop_lines_after(folder + name, step, last_step);
            *file = std::fopen((folder + name).c_str(), append ? "a" : "w");
            if (!*file) fail("cannot open %s%s: %s", folder, name, std::strerror(errno));
        }
        if (tensorboard) events = std::make_unique<EventFile>(folder, last_step + 1);
    }
    RunLog(const RunLog&) = delete;
    RunLog& operator=(const RunLog&) = delete;
    ~RunLog() {
        for (FILE* file : {text, json}) std::fclose(file);
    }

    // Of main.log, and of log.jsonl and TensorBoard. A full disk costs lines, not the run.
    void add_line(const std::string& line) { write(text, line); }
    void add_record(const Json& record) { write(json, record.to_text(Json::COMPACT), &record); }

    // Before a checkpoint is committed: nobody will write the lines up to its step again.
    void sync();

  private:
    bool warned = false;
    std::set<FILE*> torn;  // they end within a line

    bool add_event(const Json& record);

    void write(FILE* file, const std::string& line, const Json* record = nullptr);

    static void drop_lines_after(const std::string& path, const char* before_step, int64_t last_step);
};

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "run_folder.cpp"
#endif
