// run_folder.cpp: the functions of run_folder.h.
#include "run_folder.h"

void lock_run_folder(const std::string& folder) {
    int& lock = run_folder_lock;
    if (lock >= 0) close(lock);
    lock = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) fail("cannot open folder %s: %s", folder, std::strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)  // any other error: the file system has no locks
        fail("--out %s: another run is at work there; wait until it has ended, or give this one a folder of its own",
             folder);
}

void require_run_folder(const std::string& folder) {
    struct stat locked, named;
    if (fstat(run_folder_lock, &locked) != 0 || stat(folder.c_str(), &named) != 0 || locked.st_dev != named.st_dev ||
        locked.st_ino != named.st_ino)
        fail("--out %s was removed or moved while the run went on: move it back", folder);
}

// Whether these may also be somebody else's, who has given them this name; they are not where there is no run.
static bool has_plain_name(const std::string& name) { return name == "halt" || name == VOCABULARY_OF_RUN; }

// Is this the name of a file or folder that a run writes?
static bool is_run_file(const std::string& name) {
    const auto like = [&](const char* begin, const char* end) {
        const size_t b = std::strlen(begin), e = std::strlen(end);
        return name.size() > b + e && !name.compare(0, b, begin) && !name.compare(name.size() - e, e, end);
    };
    for (const char* file : {"run.json", "main.log", "log.jsonl", "halt", VOCABULARY_OF_RUN})
        if (name == file) return true;
    if (like("events.out.tfevents.", "")) return true;
    return parse_step(name) >= 0 || parse_step(name, ".writing") >= 0 || parse_step(name, ".removing") >= 0 ||
           like("heartbeat_rank", ".jsonl") || like("bad_step_", ".json");
}

static bool is_run_folder(const std::string& folder) {
    if (!checkpoint_steps(folder).empty()) return true;
    try {
        const std::string path = folder + "/run.json";
        return file_exists(path) && parse_own_json(read_file(path), path).string("program", path) == "train_nsa";
    } catch (const Error&) {
        return false;
    }
}

// Moves the files of an earlier run into a new folder beside this one. Returns what to print about it.
static std::string move_run_aside(const std::string& out, const std::vector<std::string>& files) {
    const bool has_checkpoint = !checkpoint_steps(out).empty();
    std::error_code error;
    const std::string real = std::filesystem::canonical(out, error).string();  // where a link or . leads
    if (error) fail("cannot find where %s leads: %s", out, error.message());
    int n = 1;
    while (file_exists(real + "." + std::to_string(n))) n++;
    const std::string aside = real + "." + std::to_string(n);
    make_folders(aside);
    for (const std::string& name : files)
        if (std::rename((real + "/" + name).c_str(), (aside + "/" + name).c_str()) != 0)
            fail("cannot move %s of the earlier run in %s to %s: %s", name, out, aside, std::strerror(errno));
    sync_folder(aside);
    const bool plain = real == std::filesystem::absolute(out).lexically_normal();
    return format_text(" (the earlier run there was moved to %s%s)", (plain ? out + aside.substr(real.size()) : aside),
                       has_checkpoint ? "; --resume would have continued it" : ", it has no checkpoint");
}

void prepare_run_folder(const std::string& out, bool resuming, const std::string& options) {
    make_folders(out);
    lock_run_folder(out);
    std::vector<std::string> earlier;
    if (!resuming)
        for (const std::string& name : folder_entries(out))
            if (is_run_file(name) && (!has_plain_name(name) || is_run_folder(out))) earlier.push_back(name);
    if (!earlier.empty() && !is_run_folder(out))
        fail("--out %s holds %s, which no run of this program has written: choose another folder", out, earlier[0]);
    const std::string note = !earlier.empty() ? move_run_aside(out, earlier) : resuming ? ", resumed" : "";
    print("out:    %s%s\n", printable(out), printable(note));
    clean_leftovers(out);
    if (options.empty()) return;
    // The time, which no copy of the folder on another host has, is for require_shared_folder().
    const std::string start = Json{{"time", {unix_time(), "%.3f"}}}.to_text();
    replace_text_file(out + "/run.json", options.substr(0, options.rfind('}')) + ",\n \"start\": " + start + "}\n");
}

void remove_halt_file(const std::string& out) {
    if (std::remove((out + "/halt").c_str()) != 0 && errno != ENOENT)
        complain("cannot remove %s/halt: %s; the next run will stop at once", out, std::strerror(errno));
}

void RunLog::write(FILE* file, const std::string& line, const Json* record) {
    const char* const before = torn.erase(file) ? "\n" : "";  // ends what was left of a line
    const bool written = std::fprintf(file, "%s%s\n", before, line.c_str()) >= 0 && std::fflush(file) == 0;
    if (!written) torn.insert(file);
    if (written && (!record || !events || add_event(*record))) return;
    if (!warned)
        complain("cannot write the run's log: %s; lines are missing there, stdout has them", std::strerror(errno));
    warned = true;
    std::clearerr(file);
}

void RunLog::sync() {
    for (FILE* file : {text, json})
        if (fsync(fileno(file)) != 0) fail("cannot sync the run's log: %s", std::strerror(errno));
}

bool RunLog::add_event(const Json& record) {
    const bool validation = std::any_of(record.keys.begin(), record.keys.end(),
                                        [](const std::string& key) { return key.compare(0, 8, "val_loss") == 0; });
    std::vector<std::pair<std::string, double>> scalars;
    for_each_number(record, [&](std::string name, double x) {
        if (validation) name = "val/" + (name.compare(0, 8, "val_loss") ? name : name.substr(4));
        else if (name.find('/') == std::string::npos) name = "train/" + name;
        scalars.emplace_back(name, x);
    });
    return scalars.empty() || events->add(record.number("time", ""), record.integer("step", ""), scalars);
}

void RunLog::drop_lines_after(const std::string& path, const char* before_step, int64_t last_step) {
    std::istringstream in(read_file(path));
    std::string kept;
    for (std::string line; std::getline(in, line) && !in.eof();)  // a crash may have torn the last line
        if (line.compare(0, std::strlen(before_step), before_step) == 0 &&
            std::atoll(line.c_str() + std::strlen(before_step)) <= last_step)
            kept += line + "\n";
    replace_text_file(path, kept);
}
