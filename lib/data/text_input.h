// text_input.h: the text that `--in` names: which files those are, their bytes from front to back, and what files of
// other kinds are. Used by tokenize.h, shards.h and multiple_choice.h.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include <strings.h>

#include "../base/files.h"

struct TextInput {
    std::string path;
    bool is_stdin = false;
    bool is_jsonl = false;  // of stdin its first character decides
    uint64_t bytes = 0;     // as it lies on the disk

    std::string name() const { return is_stdin ? "stdin" : path; }
};

// ---------------------------------------------------------------------------------------------------------------------
// What is text.

// Whatever the case of the letters.
inline bool has_ending(const std::string& name, const std::string& ending) {
    return name.size() >= ending.size() && !strcasecmp(name.c_str() + name.size() - ending.size(), ending.c_str());
}

// A pipe may never begin and a device never end, so they are read only where the user says so by a -.
inline uint64_t text_file_size(const std::string& path) {
    const uint64_t bytes = file_size(path);
    if (std::filesystem::is_regular_file(path)) return bytes;
    fail("%s is a pipe or a device: give a file, or - and the text on stdin", path);
}

constexpr const char* TEXT_ENDINGS = ".txt or .jsonl";

// Files that are no text yet, by the endings of their names and by their first bytes, and the program that makes text
// of them, which does it better than we would; output: where it writes, if not to stdout.
struct ForeignKind {
    const char *ending, *beginning, *name, *program, *output;
};
constexpr ForeignKind FOREIGN_KINDS[] = {
    {".gz", "\x1f\x8b", "compressed by gzip", "zcat", ""},
    {".zst", "\x28\xb5\x2f\xfd", "compressed by zstd", "zstdcat", ""},
    {".xz", "\xfd\x37zXZ", "compressed by xz", "xzcat", ""},
    {".bz2", "BZh91AY&SY", "compressed by bzip2", "bzcat", ""},
    {".zip", "PK\x03\x04", "an archive of zip", "unzip -p", ""},
    {".parquet", "PAR1\x15", "a table of Parquet", "data/parquet_to_jsonl.py", " NEW.jsonl"},
    {".pdf", "%PDF-", "a PDF", "pdftotext", " NEW.txt"},
    {".json", "", "JSON (with an object in each line rename it to .jsonl)", "jq -c '.[]'", " > NEW.jsonl"},
    {".bin", "\x88\xd8\x34\x01", "no text; token shards need no tokenize, --data takes them", "", ""},
    {".bin", "\xa1\xd9\x34\x01", "a token shard of llm.c with 32-bit tokens", "", ""}};

// Null for text, or what may be text.
inline const ForeignKind* foreign_by_name(const std::string& path) {
    for (const ForeignKind& kind : FOREIGN_KINDS)
        if (has_ending(path, kind.ending)) return &kind;
    return nullptr;
}
inline const ForeignKind* foreign_by_bytes(const std::string& first) {
    for (const ForeignKind& kind : FOREIGN_KINDS)
        if (*kind.beginning && first.compare(0, std::strlen(kind.beginning), kind.beginning) == 0) return &kind;
    return nullptr;
}

// reader: the verb and the option that would read its text from stdin, as "tokenize --in"; "": none would.
[[noreturn]] inline void fail_foreign(const std::string& path, const ForeignKind& kind, const std::string& reader) {
    const std::string file = path.empty() ? "FILE" : shell_word(path), what = path.empty() ? "stdin" : path;
    if (!*kind.program) fail("%s is %s", what, kind.name);
    if (*kind.output) fail("%s is %s: make text of it: %s %s%s", what, kind.name, kind.program, file, kind.output);
    if (reader.empty()) fail("%s is %s: unpack it first, as in: %s %s > NEW", what, kind.name, kind.program, file);
    fail("%s is %s: unpack it on the way, as in: %s %s | ./train_nsa %s - ...", what, kind.name, kind.program, file,
         reader);
}

// The name that iconv has for UTF-16 and UTF-32, known by the NULs that text has in some places and in no others, or
// by the mark of UTF-16; "" for everything else.
inline std::string wide_encoding(const std::string& first) {
    const size_t quarter = first.size() / 4;
    size_t nul[4] = {0, 0, 0, 0};
    for (size_t i = 0; i < first.size(); i++) nul[i % 4] += first[i] == 0;
    if (quarter > 1 && nul[3] == quarter && nul[0] < quarter && 2 * nul[2] > quarter) return "UTF-32LE";
    if (quarter > 1 && nul[0] == quarter && nul[3] < quarter && 2 * nul[1] > quarter) return "UTF-32BE";
    if (first.compare(0, 2, "\xFF\xFE") == 0 || first.compare(0, 2, "\xFE\xFF") == 0) return "UTF-16";
    const size_t even = nul[0] + nul[2], odd = nul[1] + nul[3];
    if (std::min(even, odd) || std::max(even, odd) <= quarter || quarter < 2) return "";
    return even ? "UTF-16BE" : "UTF-16LE";
}

// first: the bytes that a file begins with; path "": of stdin.
inline void refuse_no_text(const std::string& path, const std::string& first, const std::string& reader) {
    if (const ForeignKind* const kind = foreign_by_bytes(first)) fail_foreign(path, *kind, reader);
    const std::string wide = wide_encoding(first), file = path.empty() ? "FILE" : shell_word(path);
    if (!wide.empty())
        fail("%s is %s, expected UTF-8; convert it: iconv -f %s -t UTF-8 %s > NEW", path.empty() ? "stdin" : path, wide,
             wide, file);
}

// ---------------------------------------------------------------------------------------------------------------------
// Their bytes.

// The bytes of one input.
class ByteSource {
  public:
    ByteSource(const TextInput& text, const std::string& reader)
        : name(text.name()),
          file(text.is_stdin ? fdopen(dup(STDIN_FILENO), "rb") : std::fopen(text.path.c_str(), "rbe"), std::fclose) {
        if (!file) fail("cannot open %s: %s", name, text.is_stdin ? "it is closed" : std::strerror(errno));
        first.resize(256);
        first.resize(read_file(&first[0], first.size()));
        refuse_no_text(text.path, first, reader);
    }

    // Fewer than n bytes only at the end.
    size_t read(char* out, size_t n) {
        const size_t kept = std::min(n, first.size());
        std::memcpy(out, first.data(), kept);
        first.erase(0, kept);
        return kept + read_file(out + kept, n - kept);
    }

  private:
    const std::string name;
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file;
    std::string first;  // bytes that have been looked at and not yet read

    size_t read_file(char* out, size_t n) {
        const size_t got = std::fread(out, 1, n, file.get());
        if (std::ferror(file.get())) fail("cannot read %s: %s", name, std::strerror(errno));
        return got;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Which files.

// Whose text counts as one document each where they are named, alone or by a pattern; those of a folder are passed
// over.
constexpr const char* NAMED_ENDINGS[] = {".md", ".csv"};

// The files that the words of --in stand for: files in their order, those of a folder or a pattern by name.
class TextInputs {
  public:
    std::vector<TextInput> files;
    std::vector<std::string> passed_over;  // files of a folder or pattern that are no text by their name
    std::vector<std::string> bad;          // what lies wrong with each file that --skip-bad passed over

    TextInputs(const std::vector<std::string>& words, const std::string& verb, bool skip_bad = false)
        : reader(verb + " --in"), skips_bad(skip_bad) {
        for (const std::string& word : words)
            if (word == "-") add_stdin();
            else if (is_folder(word)) add_folder(word);
            else if (file_exists(word) || word.find_first_of("*?[") == std::string::npos) add_file(word, true);
            else add_pattern(word);
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

    // "2 .md, 1 .parquet (data/parquet_to_jsonl.py makes text of it)"
    std::string kinds_passed_over() const {
        std::map<std::string, size_t> counts;
        for (const std::string& path : passed_over) counts[std::filesystem::path(path).extension().string()]++;
        std::string text;
        for (const auto& [ending, count] : counts) {
            const ForeignKind* const kind = foreign_by_name(ending);
            text +=
                format_text("%s%d %s", text.empty() ? "" : ", ", count, ending.empty() ? "without an ending" : ending);
            if (kind && *kind->program) text += format_text(" (%s makes text of it)", kind->program);
            else if (is_named_ending(ending)) text += format_text(" (as text: --in '*%s')", ending);
        }
        return text;
    }

  private:
    const std::string reader;
    const bool skips_bad;
    std::map<FileIdentity, std::string> seen;

    static bool is_named_ending(const std::string& path) {
        return std::any_of(std::begin(NAMED_ENDINGS), std::end(NAMED_ENDINGS),
                           [&](const char* ending) { return has_ending(path, ending); });
    }
    size_t found() const { return files.size() + bad.size(); }

    // Something in a folder or a pattern cannot be read, or something that was named.
    void take_bad(const std::string& text, int status, bool was_named) {
        if (!skips_bad) throw Error(status, text + (was_named ? "" : "; --skip-bad passes over such files"));
        bad.push_back(text);
    }
    void add_stdin() {
        for (const TextInput& file : files)
            if (file.is_stdin) fail_usage("--in names stdin twice, which can be read once");
        files.push_back({"", true});
    }
    // A text that is compressed is no file to be passed over in silence.
    void add_file(const std::string& path, bool was_named) {
        TextInput input;
        input.path = path;
        input.is_jsonl = has_ending(path, ".jsonl");
        const ForeignKind* const kind = foreign_by_name(path);
        const auto is_text = [](const std::string& name) {
            return has_ending(name, ".jsonl") || has_ending(name, ".txt");
        };
        const bool is_packed = kind && *kind->program && !*kind->output &&
                               is_text(path.substr(0, path.size() - std::strlen(kind->ending)));
        if (!was_named && !is_text(path) && !is_packed) return passed_over.push_back(path);
        try {
            input.bytes = text_file_size(path);
            if (kind) fail_foreign(path, *kind, reader);
            if (!is_text(path) && !is_named_ending(path))
                fail_usage("--in %s: expected a file that ends in %s; any other as text: cat %s | ./train_nsa %s - ...",
                           path, TEXT_ENDINGS, shell_word(path), reader);
            const ByteSource probe(input, reader);  // better now than after hours
        } catch (const Error& e) {
            return take_bad(e.what(), e.status, was_named);
        }
        const auto [same, is_new] = seen.emplace(file_identity(path), path);
        if (!is_new)
            return take_bad("--in " + path + " is the file " + same->second + ": its text would count twice",
                            was_named ? 2 : 1, was_named);
        files.push_back(input);
    }
    // All files in it and below, but not what is hidden by a dot, and no folder that is a link.
    void add_folder(const std::string& folder) {
        std::set<std::string> paths;
        std::error_code error;
        const auto unreadable = [&](const std::string& path, const char* reason, bool was_named) {
            take_bad(format_text("--in %s: cannot list the folder: %s", path, reason), 1, was_named);
        };
        const size_t before = found();
        for (auto at = std::filesystem::recursive_directory_iterator(folder, error);
             !error && at != std::filesystem::end(at); at.increment(error)) {
            const std::string path = at->path().string();
            if (at->path().filename().string()[0] == '.') at.disable_recursion_pending();
            else if (!is_folder(path)) paths.insert(path);
            else if (std::filesystem::is_symlink(path)) passed_over.push_back(path);
            else if (access(path.c_str(), R_OK | X_OK) != 0) {
                unreadable(path, std::strerror(errno), false);
                at.disable_recursion_pending();
            }
        }
        if (error) unreadable(folder, error.message().c_str(), true);
        for (const std::string& path : paths) add_file(path, false);
        if (found() == before) fail_usage("--in %s: no file in this folder or below ends in %s", folder, TEXT_ENDINGS);
    }
    void add_pattern(const std::string& pattern) {
        const std::vector<std::string> paths = glob_files(pattern);
        const size_t before = found();
        for (const std::string& path : paths) {
            if (is_folder(path)) add_folder(path);
            else add_file(path, is_named_ending(pattern) && file_exists(path));
        }
        if (found() == before)
            fail("--in %s: no file %s", pattern,
                 paths.empty() ? "matches this pattern" : (std::string("among them ends in ") + TEXT_ENDINGS));
    }
};
