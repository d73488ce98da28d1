// text_input.h: the text that `tokenize --in` names: which files those are, and their bytes from front to back. Used by
// tokenize.h.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "../base/files.h"

struct TextInput {
    std::string path;
    bool is_stdin = false;
    bool is_jsonl = false;  // of stdin its first character decides
    uint64_t bytes = 0;     // as it lies on the disk

    std::string name() const { return is_stdin ? "stdin" : path; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Which files.

inline bool has_ending(const std::string& name, const std::string& ending) {
    return name.size() >= ending.size() && name.compare(name.size() - ending.size(), ending.size(), ending) == 0;
}

// A pipe may never begin and a device never end, so they are read only where the user says so by a -.
inline uint64_t text_file_size(const std::string& path) {
    const uint64_t bytes = file_size(path);
    if (std::filesystem::is_regular_file(path)) return bytes;
    fail("%s is a pipe or a device: give a file, or - and the text on stdin", path.c_str());
}

constexpr const char* TEXT_ENDINGS = ".txt or .jsonl";

// Programs that unpack do it better than we would.
[[noreturn]] inline void fail_packed(const TextInput& input, bool gzip) {
    fail("%s is compressed by %s: unpack it on the way, as in: %s %s | ./train_nsa tokenize --in - ...",
         input.name().c_str(), gzip ? "gzip" : "zstd", gzip ? "zcat" : "zstdcat",
         input.is_stdin ? "FILE" : input.path.c_str());
}

// Is this the name of a text file, whatever the case of its letters? What the name says goes into *input. A text that
// is compressed is no file to be passed over in silence.
inline bool is_text_name(const std::string& path, TextInput* input) {
    std::string name = path;
    for (char& c : name) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    for (const char* packed : {".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst"})
        if (has_ending(name, packed)) {
            input->path = path;
            fail_packed(*input, has_ending(name, ".gz"));
        }
    input->path = path;
    input->is_jsonl = has_ending(name, ".jsonl");
    return input->is_jsonl || has_ending(name, ".txt");
}

// The files that the words of --in stand for: files in their order, those of a folder or a pattern by name.
class TextInputs {
  public:
    std::vector<TextInput> files;
    std::vector<std::string> passed_over;  // files of a folder or pattern that are no text by their name

    explicit TextInputs(const std::vector<std::string>& words) {
        for (const std::string& word : words) {
            if (word == "-") add_stdin();
            else if (is_folder(word)) add_folder(word);
            else if (file_exists(word) || word.find_first_of("*?[") == std::string::npos) add_file(word, true);
            else add_pattern(word);
        }
    }
    // 0 where it is not known.
    uint64_t bytes() const {
        uint64_t sum = 0;
        for (const TextInput& file : files) {
            if (file.is_stdin) return 0;
            sum += file.bytes;
        }
        return sum;
    }

  private:
    static bool is_folder(const std::string& path) {
        struct stat s;
        return stat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
    }

    std::map<FileIdentity, std::string> seen;

    void add_stdin() {
        for (const TextInput& file : files)
            if (file.is_stdin) fail_usage("--in names stdin twice, which can be read once");
        files.emplace_back();
        files.back().is_stdin = true;
    }
    void add_file(const std::string& path, bool must_be_text) {
        TextInput input;
        const bool is_text = is_text_name(path, &input);
        if (!is_text && !must_be_text) return passed_over.push_back(path);
        input.bytes = text_file_size(path);
        if (!is_text) fail_usage("--in %s: expected a file that ends in %s", path.c_str(), TEXT_ENDINGS);
        const auto [same, is_new] = seen.emplace(file_identity(path), path);
        if (!is_new)
            fail_usage("--in names the file %s twice%s: its text would count twice", path.c_str(),
                       same->second == path ? "" : (", here and as " + same->second).c_str());
        files.push_back(input);
    }
    // All files in it and below, but not what is hidden by a dot, and no folder that is a link.
    void add_folder(const std::string& folder) {
        std::set<std::string> paths;
        std::error_code error;
        for (auto at = std::filesystem::recursive_directory_iterator(folder, error);
             !error && at != std::filesystem::end(at); at.increment(error)) {
            const std::string path = at->path().string();
            if (at->path().filename().string()[0] == '.') at.disable_recursion_pending();
            else if (!is_folder(path)) paths.insert(path);
            else if (std::filesystem::is_symlink(path)) passed_over.push_back(path);
        }
        if (error) fail("--in %s: cannot list the folder: %s", folder.c_str(), error.message().c_str());
        const size_t before = files.size();
        for (const std::string& path : paths) add_file(path, false);
        if (files.size() == before)
            fail_usage("--in %s: no file in this folder or below ends in %s", folder.c_str(), TEXT_ENDINGS);
    }
    void add_pattern(const std::string& pattern) {
        const std::vector<std::string> paths = glob_files(pattern);
        const size_t before = files.size();
        for (const std::string& path : paths) {
            if (is_folder(path)) add_folder(path);
            else add_file(path, false);
        }
        if (files.size() == before)
            fail("--in %s: no file %s", pattern.c_str(),
                 paths.empty() ? "matches this pattern" : (std::string("among them ends in ") + TEXT_ENDINGS).c_str());
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Their bytes.

// The bytes of one input.
class ByteSource {
  public:
    explicit ByteSource(const TextInput& text)
        : name(text.name()), fd(text.is_stdin ? dup(STDIN_FILENO) : open(text.path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd < 0) fail("cannot open %s: %s", name.c_str(), std::strerror(errno));
        try {
            first.resize(4);
            first.resize(read_file(&first[0], 4));
            const bool gzip = first.compare(0, 2, "\x1f\x8b") == 0;
            if (gzip || first == "\x28\xb5\x2f\xfd") fail_packed(text, gzip);
        } catch (...) {
            close(fd);
            throw;
        }
    }
    ByteSource(const ByteSource&) = delete;
    ByteSource& operator=(const ByteSource&) = delete;
    ~ByteSource() { close(fd); }

    // Fewer than n bytes only at the end.
    size_t read(char* out, size_t n) {
        const size_t kept = std::min(n, first.size());
        std::memcpy(out, first.data(), kept);
        first.erase(0, kept);
        return kept + read_file(out + kept, n - kept);
    }

  private:
    const std::string name;
    const int fd;
    std::string first;  // bytes that have been looked at and not yet read

    size_t read_file(char* out, size_t n) {
        size_t got = 0;
        while (got < n) {
            const ssize_t some = ::read(fd, out + got, std::min<size_t>(n - got, 1 << 30));
            if (some < 0 && errno == EINTR) continue;
            if (some < 0) fail("cannot read %s: %s", name.c_str(), std::strerror(errno));
            if (some == 0) break;
            got += size_t(some);
        }
        return got;
    }
};
