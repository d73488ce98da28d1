// text_input.h: the text that `tokenize --in` names: which files those are, and their bytes from front to back,
// unpacked where they are compressed. Used by tokenize.h.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "files.h"
#ifdef USE_ZLIB
#include <zlib.h>
#endif
#ifdef USE_ZSTD
#include <zstd.h>
#endif

enum class Packing { NONE, GZIP, ZSTD };

struct TextInput {
    std::string path;
    bool is_stdin = false;
    bool is_jsonl = false;  // of stdin its first character decides
    Packing packing = Packing::NONE;
    uint64_t bytes = 0;    // as it lies on the disk

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

constexpr const char* TEXT_ENDINGS = ".txt or .jsonl, or with .gz or .zst behind it";

// Is this the name of a text file, whatever the case of its letters? What the name says goes into *input.
inline bool is_text_name(const std::string& path, TextInput* input) {
    std::string name = path;
    for (char& c : name) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    for (const auto& [ending, packing] : {std::make_pair(".gz", Packing::GZIP), std::make_pair(".zst", Packing::ZSTD)})
        if (has_ending(name, ending)) {
            name.resize(name.size() - std::strlen(ending));
            input->packing = packing;
            break;
        }
    input->path = path, input->is_jsonl = has_ending(name, ".jsonl");
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
        if (!is_text_name(path, &input)) {
            if (must_be_text) fail_usage("--in %s: expected a file that ends in %s", path.c_str(), TEXT_ENDINGS);
            return passed_over.push_back(path);
        }
        input.bytes = text_file_size(path);
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

// One compressed format: next() unpacks from [from, from_end) to [to, to_end), moves `from` and `to` on, and says
// whether a stream has ended there; another one may follow. What is wrong with the data, it throws as a word.
struct Unpacker {
    virtual ~Unpacker() = default;
    virtual bool next(const char*& from, const char* from_end, char*& to, char* to_end) = 0;
};

#ifdef USE_ZLIB
struct GzipUnpacker : Unpacker {
    z_stream z{};
    bool in_stream = false;
    GzipUnpacker() {
        if (inflateInit2(&z, 15 + 16) != Z_OK) throw std::bad_alloc();  // + 16: gzip's header and checksum
    }
    ~GzipUnpacker() override { inflateEnd(&z); }
    bool next(const char*& from, const char* from_end, char*& to, char* to_end) override {
        if (!in_stream) inflateReset(&z);
        z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(from)), z.avail_in = uInt(from_end - from);
        z.next_out = reinterpret_cast<Bytef*>(to), z.avail_out = uInt(std::min<ptrdiff_t>(to_end - to, 1 << 30));
        const int status = inflate(&z, Z_NO_FLUSH);
        from = reinterpret_cast<const char*>(z.next_in), to = reinterpret_cast<char*>(z.next_out);
        in_stream = status != Z_STREAM_END;
        if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
            throw std::runtime_error(z.msg ? z.msg : "cannot be unpacked");
        return !in_stream;
    }
};
#endif
#ifdef USE_ZSTD
struct ZstdUnpacker : Unpacker {
    ZSTD_DStream* const stream = ZSTD_createDStream();
    ZstdUnpacker() {
        if (!stream) throw std::bad_alloc();
        ZSTD_DCtx_setParameter(stream, ZSTD_d_windowLogMax, 31);  // what `zstd --long=31` writes
    }
    ~ZstdUnpacker() override { ZSTD_freeDStream(stream); }
    bool next(const char*& from, const char* from_end, char*& to, char* to_end) override {
        ZSTD_inBuffer in = {from, size_t(from_end - from), 0};
        ZSTD_outBuffer out = {to, size_t(to_end - to), 0};
        const size_t status = ZSTD_decompressStream(stream, &out, &in);
        if (ZSTD_isError(status)) throw std::runtime_error(ZSTD_getErrorName(status));
        from += in.pos, to += out.pos;
        return status == 0;
    }
};
#endif

// The bytes of one input. What is compressed is known by its first bytes, which must fit the name.
class ByteSource {
  public:
    uint64_t stored = 0;  // bytes read so far, as they lie on the disk

    explicit ByteSource(const TextInput& text)
        : name(text.name()), fd(text.is_stdin ? dup(STDIN_FILENO) : open(text.path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd < 0) fail("cannot open %s: %s", name.c_str(), std::strerror(errno));
        try {
            choose_unpacker(text);
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
        if (unpacker) return read_unpacked(out, n);
        const size_t kept = std::min(n, packed.size());  // the first bytes, which have been looked at
        std::memcpy(out, packed.data(), kept);
        packed.erase(0, kept);
        return kept + read_stored(out + kept, n - kept);
    }

  private:
    const std::string name;
    const int fd;
    std::unique_ptr<Unpacker> unpacker;
    std::string packed;  // read and not yet unpacked
    bool in_stream = false;

    size_t read_stored(char* out, size_t n) {
        size_t got = 0;
        while (got < n) {
            const ssize_t some = ::read(fd, out + got, std::min<size_t>(n - got, 1 << 30));
            if (some < 0 && errno == EINTR) continue;
            if (some < 0) fail("cannot read %s: %s", name.c_str(), std::strerror(errno));
            if (some == 0) break;
            got += size_t(some), stored += uint64_t(some);
        }
        return got;
    }

    void choose_unpacker(const TextInput& text) {
        packed.resize(4);
        packed.resize(read_stored(&packed[0], 4));
        const Packing found = packed.compare(0, 2, "\x1f\x8b") == 0 ? Packing::GZIP
                              : packed == "\x28\xb5\x2f\xfd"        ? Packing::ZSTD
                                                                    : Packing::NONE;
        const auto words = [](Packing p) {
            return p == Packing::GZIP ? "compressed by gzip" : p == Packing::ZSTD ? "compressed by zstd" : "plain";
        };
        if (found != text.packing && !text.is_stdin)
            fail("%s: its bytes are %s, by its name it is %s: give it the right ending", name.c_str(), words(found),
                 words(text.packing));
#ifdef USE_ZLIB
        if (found == Packing::GZIP) unpacker = std::make_unique<GzipUnpacker>();
#endif
#ifdef USE_ZSTD
        if (found == Packing::ZSTD) unpacker = std::make_unique<ZstdUnpacker>();
#endif
        if (found == Packing::NONE || unpacker) return;
        const bool gzip = found == Packing::GZIP;
        fail(
            "%s: it is %s, and this program was built without %s: install %s (make deps) and build it again, or unpack "
            "the file",
            name.c_str(), words(found), gzip ? "zlib" : "libzstd", gzip ? "zlib1g-dev" : "libzstd-dev");
    }

    size_t read_unpacked(char* out, size_t n) {
        char *to = out, *const to_end = out + n;
        while (to < to_end) {
            if (packed.empty()) {
                packed.resize(1 << 16);
                packed.resize(read_stored(&packed[0], packed.size()));
            }
            const bool at_end = packed.empty();
            if (at_end && !in_stream) break;
            const char* from = packed.data();
            const char* const before = to;
            try {
                in_stream = !unpacker->next(from, packed.data() + packed.size(), to, to_end);
            } catch (const std::runtime_error& e) {
                fail("%s: damaged before byte %llu of the compressed file (%s): fetch or make it again", name.c_str(),
                     (unsigned long long)stored, e.what());
            }
            packed.erase(0, size_t(from - packed.data()));
            if (at_end && in_stream && to == before)
                fail("%s: cut off after %llu bytes of the compressed file: fetch or make it again", name.c_str(),
                     (unsigned long long)stored);
        }
        return size_t(to - out);
    }
};
