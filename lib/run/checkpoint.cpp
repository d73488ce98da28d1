// checkpoint.cpp: the functions of checkpoint.h.
#include "checkpoint.h"

std::string checkpoint_folder(const std::string& run, int64_t step) { return format_text("%s/step_%08d", run, step); }

std::string checkpoint_writing(const std::string& run, int64_t step) {
    return checkpoint_folder(run, step) + ".writing";
}

int64_t parse_step(const std::string& name, const std::string& suffix) {
    if (name.size() > 5 + 18 + suffix.size() || name.compare(0, 5, "step_") != 0) return -1;
    int64_t step = 0;
    for (size_t i = 5; i < name.size() && name[i] >= '0' && name[i] <= '9'; i++) step = step * 10 + (name[i] - '0');
    return name == format_text("step_%08d", step) + suffix ? step : -1;
}

std::vector<int64_t> checkpoint_steps(const std::string& run) {
    std::vector<int64_t> steps;
    if (!file_exists(run)) return steps;
    for (const std::string& name : folder_entries(run))
        if (parse_step(name) >= 0) steps.push_back(parse_step(name));
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

std::string manifest_ending(const std::string& before) {
    return format_text(",\n \"crc32c\": \"%08x\"}\n", crc32c(0, before.data(), before.size()));
}

std::string manifest_text(int64_t step, const std::vector<FileRecord>& files, const std::string& state_json) {
    std::string text = format_text("{\"format\": %d,\n \"step\": %d,\n \"files\": [", MANIFEST_FORMAT, step);
    for (size_t i = 0; i < files.size(); i++)
        text += format_text("%s\n  {\"name\": %s, \"size\": %d, \"crc32c\": \"%08x\"}", i ? "," : "",
                            json_quote(files[i].name), files[i].size, files[i].crc32c);
    text += "],\n \"state\": " + state_json;
    return text + manifest_ending(text);
}

Checkpoint parse_manifest(const std::string& text, const std::string& path) {
    const std::string before = text.substr(0, text.size() - std::min(text.size(), manifest_ending("").size())),
                      ending = manifest_ending(before);
    if (text != before + ending)
        fail("%s: byte %d: found no %s at the end, which is the checksum of the bytes before: the file is damaged",
             path, before.size(), ending.substr(3, ending.size() - 5));
    const Json root = parse_own_json(text, path);
    const int64_t format = root.integer("format", path);
    if (format != MANIFEST_FORMAT)
        fail("%s: format: found %d, expected %d: it was written by another version of the program", path, format,
             MANIFEST_FORMAT);
    Checkpoint manifest;
    manifest.path = path;
    manifest.folder = folder_of(path);
    manifest.step = root.integer("step", path);
    const std::string where = path + ": files";
    for (const Json& file : root.array("files", path))
        manifest.files.push_back({file.string("name", where), uint64_t(file.integer("size", where)),
                                  uint32_t(std::strtoul(file.string("crc32c", where).c_str(), nullptr, 16))});
    const Json& state = root.get("state", path);
    manifest.state = state.require(Json::Object, path + ": state");
    manifest.state_text = before.substr(size_t(state.offset));
    return manifest;
}

Checkpoint read_manifest(const std::string& folder) {
    const std::string path = folder + "/manifest.json";
    if (is_gone(path)) fail("%s is missing", path);
    return parse_manifest(read_file(path), path);
}

std::string begin_checkpoint(const std::string& run, int64_t step) {
    const std::string writing = checkpoint_writing(run, step);
    make_folders(run);
    remove_tree(writing);
    if (mkdir(writing.c_str(), 0777) != 0) fail("cannot make folder %s: %s", writing, std::strerror(errno));
    return writing;
}

std::string commit_checkpoint(const std::string& run, int64_t step, const std::vector<FileRecord>& files,
                              const std::string& state_json) {
    const std::string folder = checkpoint_folder(run, step), writing = checkpoint_writing(run, step),
                      removing = folder + ".removing";
    const std::string manifest = writing + "/manifest.json", text = manifest_text(step, files, state_json);
    parse_manifest(text, manifest);  // what no reader would take is not written
    for (const FileRecord& file : files) {
        const std::string path = writing + "/" + file.name;
        if (!file_exists(path)) fail("%s was written and is not there: all ranks have to see the same folder", path);
        if (file_size(path) != file.size) fail("%s has %d bytes, %d were written", path, file_size(path), file.size);
    }
    write_text_file(manifest, text);
    sync_folder(writing);
    const bool replaces = file_exists(folder);
    if (replaces) {
        remove_tree(removing);
        rename_path(folder, removing);
    }
    rename_path(writing, folder);
    sync_folder(run);
    if (replaces) remove_tree(removing);
    return folder;
}

// Removes folders that are no longer, or not yet, checkpoints: a folder gets the name first, which must be durable
// before its files go.
static void remove_renamed(const std::string& run, const std::vector<std::string>& names, const Complain& complain) {
    for (const std::string& name : names) try_or_complain([&] { remove_tree(run + "/" + name); }, complain);
}

void abandon_checkpoint(const std::string& run, int64_t step, const Complain& complain) {
    remove_renamed(run, {name_of(checkpoint_writing(run, step))}, complain);
}

void verify_file(const std::string& folder, const FileRecord& expected) {
    const std::string path = folder + "/" + expected.name;
    const uint64_t size = file_size(path, true);
    if (size != expected.size) fail("%s has %d bytes, the manifest says %d", path, size, expected.size);
    const uint32_t crc = read_record(path).crc32c;
    if (crc != expected.crc32c) fail("%s has checksum %08x, the manifest says %08x", path, crc, expected.crc32c);
}

static bool is_model_file(const std::string& name) { return name == "model.safetensors" || name == "config.json"; }

Checkpoint open_checkpoint(const std::string& folder, Wanted wanted) {
    if (wanted == Wanted::MODEL && is_gone(folder + "/manifest.json") && file_exists(folder + "/model.safetensors")) {
        complain(folder + " has no manifest.json, so nothing tells whether its files are whole");
        Checkpoint model;
        model.folder = folder;
        return model;
    }
    Checkpoint manifest = read_manifest(folder);
    const int64_t named = parse_step(name_of(folder));
    if (named >= 0 && named != manifest.step)
        fail("%s: step: found %d, the folder's name says %d", manifest.path, manifest.step, named);
    const Progress progress("checking " + folder);
    for (const FileRecord& file : manifest.files)
        if (wanted == Wanted::ALL || is_model_file(file.name)) verify_file(folder, file);
    return manifest;
}

std::string weights_digest(const Checkpoint& checkpoint) {
    for (const FileRecord& file : checkpoint.files)
        if (file.name == "model.safetensors") return digest_text(file);
    return digest_text(read_record(checkpoint.folder + "/model.safetensors"));
}

Checkpoint newest_intact_checkpoint(const std::string& run, const Complain& complain, Wanted wanted) {
    const std::vector<int64_t> steps = checkpoint_steps(run);
    for (size_t i = 0; i < steps.size(); i++) {
        const std::string folder = checkpoint_folder(run, steps[i]);
        try {
            return open_checkpoint(folder, wanted);
        } catch (const Error& e) {
            // A run that goes on has removed it meanwhile (--keep), so there is a newer one.
            if (is_gone(folder)) return newest_intact_checkpoint(run, complain, wanted);
            if (is_forbidden(folder)) fail("%s; this user needs the right to read %s", e.what(), folder);
            complain(format_text("%s is damaged: %s; %s", folder, e.what(),
                                 i + 1 < steps.size() ? "taking the one before" : "there is none before it"));
        }
    }
    return {};
}

Checkpoint newest_checkpoint(const std::string& run, Wanted wanted) {
    std::vector<std::string> damages;
    const Checkpoint newest = newest_intact_checkpoint(
        run, [&](const std::string& text) { damages.push_back(text); }, wanted);
    if (newest.folder.empty() && !damages.empty())  // the first complaint, without its "; taking the one before"
        fail("no checkpoint under %s is intact; %s; %s", run, damages[0].substr(0, damages[0].rfind("; ")),
             wanted == Wanted::MODEL
                 ? "give another run, or a folder with the model.safetensors and config.json of this one from a copy"
                 : "without --resume the run starts anew and this folder is moved aside");
    for (const std::string& text : damages) complain(text);
    return newest;
}

bool is_checkpoint(const std::string& folder) {
    return file_exists(folder + "/model.safetensors") || file_exists(folder + "/manifest.json");
}

Checkpoint find_checkpoint(const std::string& from, const char* option) {
    if (file_exists(from) && !is_folder(from))
        fail("%s %s is a file: give the folder of a run or of one checkpoint", option, from);
    if (is_checkpoint(from)) return open_checkpoint(from, Wanted::MODEL);
    const Checkpoint newest = newest_checkpoint(from, Wanted::MODEL);
    if (newest.folder.empty()) fail("%s %s holds no checkpoint: no step_*/model.safetensors in it", option, from);
    return newest;
}

int64_t best_step(const std::string& run, const Complain& complain) {
    int64_t best = -1;
    double least = std::numeric_limits<double>::infinity();
    std::string data;
    for (const int64_t step : checkpoint_steps(run)) {
        try {
            const Checkpoint manifest = read_manifest(checkpoint_folder(run, step));
            const Json* const validation = manifest.state.find("validation");
            if (!validation) continue;
            const std::string where = manifest.path + ": validation";
            const double loss = validation->number("loss", where);
            const std::string& on = validation->string("data", where);
            if (data.empty()) data = on;
            if (on == data && loss < least) {
                best = step;
                least = loss;
            }
        } catch (const Error& e) {
            complain(format_text("%s; its checkpoint is not looked at", e.what()));
        }
    }
    return best;
}

void remove_old_checkpoints(const std::string& run, int64_t keep, int64_t keep_every, const Complain& complain) {
    if (keep <= 0) return;
    try {
        const std::vector<int64_t> steps = checkpoint_steps(run);
        std::vector<int64_t> old;
        for (size_t i = size_t(keep); i < steps.size(); i++)
            if (keep_every <= 0 || steps[i] % keep_every != 0) old.push_back(steps[i]);
        if (old.empty()) return;
        const int64_t best = best_step(run, [](const std::string&) {});  // a reader is told what is damaged
        const std::string intact = newest_intact_checkpoint(run, complain).folder;
        std::vector<std::string> removing;
        for (int64_t step : old) {
            const std::string folder = checkpoint_folder(run, step), name = name_of(folder) + ".removing";
            if (folder == intact || step == best) continue;
            const auto rename = [&] {
                remove_tree(run + "/" + name);  // left by a removal that failed
                rename_path(folder, run + "/" + name);
                removing.push_back(name);
            };
            try_or_complain(rename, complain);
        }
        if (removing.empty()) return;
        sync_folder(run);  // a power cut must not bring back the name of a folder that has lost files
        remove_renamed(run, removing, complain);
    } catch (const Error& e) {
        complain(format_text("old checkpoints stay: %s", e.what()));
    }
}

void clean_leftovers(const std::string& run, const Complain& complain) {
    if (!file_exists(run)) return;
    const auto remove = [&] {
        std::vector<std::string> leftovers;
        for (const std::string& name : folder_entries(run))
            if (parse_step(name, ".writing") >= 0 || parse_step(name, ".removing") >= 0) leftovers.push_back(name);
        remove_renamed(run, leftovers, complain);
    };
    try_or_complain(remove, complain);
}
