// files.h: files and folders: reading, globs, and durable writing with checksums.
// Everything that touches the disk uses it.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include "errors.h"

// ---------------------------------------------------------------------------------------------------------------------
// Reading.

// A folder that may not be looked into fails: nobody knows.
inline bool file_exists(const std::string& path) {
    struct stat s;
    if (stat(path.c_str(), &s) == 0) return true;
    if (errno == EACCES) fail("%s: %s", path, std::strerror(errno));
    return false;
}
inline bool is_folder(const std::string& path) {
    struct stat s;
    return stat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
}

// Not even a link that leads nowhere has this name.
inline bool is_gone(const std::string& path) {
    struct stat s;
    return lstat(path.c_str(), &s) != 0 && errno == ENOENT;
}

// regular: a pipe would be waited for, and a device has no end.
inline uint64_t file_size(const std::string& path, bool regular = false) {
    struct stat s;
    if (stat(path.c_str(), &s) != 0) fail("cannot open %s: %s", path, std::strerror(errno));
    if (S_ISDIR(s.st_mode)) fail("%s is a folder, a file was expected", path);
    if (regular && !S_ISREG(s.st_mode)) fail("%s is a pipe or a device, a file was expected", path);
    return uint64_t(s.st_size);
}

// Which file a path leads to, however it is written: device and inode.
using FileIdentity = std::pair<dev_t, ino_t>;
inline FileIdentity file_identity(const std::string& path) {
    struct stat s;
    if (stat(path.c_str(), &s) != 0) fail("cannot open %s: %s", path, std::strerror(errno));
    return {s.st_dev, s.st_ino};
}

// An open file of which pieces are read.
class FileReader {
  public:
    explicit FileReader(const std::string& file) : path(file), fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (fd < 0) fail("cannot open %s: %s", path, std::strerror(errno));
    }
    FileReader(const FileReader&) = delete;
    FileReader& operator=(const FileReader&) = delete;
    ~FileReader() { ::close(fd); }

    // Of the open file. That of its path may be another's: a program in QEMU finds QEMU at /proc/self/exe.
    uint64_t size() const {
        struct stat s;
        if (fstat(fd, &s) != 0) fail("cannot read the size of %s: %s", path, std::strerror(errno));
        return uint64_t(s.st_size);
    }
    // All these bytes, which the file had when its size was looked at, or an error.
    void read(void* to, size_t bytes, uint64_t offset) const {
        for (char* p = static_cast<char*>(to); bytes > 0;) {
            const ssize_t n = ::pread(fd, p, bytes, off_t(offset));
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) fail("cannot read byte %d of %s: %s", offset, path, std::strerror(errno));
            if (n == 0) fail("%s was cut off at byte %d while it was read: put it back", path, offset);
            p += n;
            bytes -= size_t(n);
            offset += uint64_t(n);
        }
    }

  private:
    const std::string path;
    const int fd;
};

// The whole file, for what fits in memory: vocabularies, configs, prompts.
inline std::string read_file(const std::string& path) {
    std::string bytes(file_size(path, true), '\0');
    FileReader(path).read(&bytes[0], bytes.size(), 0);
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Folders and names.

inline std::string folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// Without the folders it is in.
inline std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// The path from the root, without steps through "."; here: the current folder, whose own names are no links. Behind
// another name ".." stays: that may be a link, whose parent is elsewhere.
inline std::string absolute_path(const std::string& path,
                                 const std::string& here = std::filesystem::current_path().string()) {
    std::string all = path[0] == '/' || here == "/" ? "" : here;
    bool in_here = true;
    for (size_t begin = 0, end; begin <= path.size(); begin = end + 1) {
        end = std::min(path.find('/', begin), path.size());
        const std::string name = path.substr(begin, end - begin);
        if (name.empty() || name == ".") continue;
        in_here = in_here && name == "..";
        if (in_here) all.resize(all.empty() ? 0 : all.rfind('/'));
        else all += "/" + name;
    }
    return all.empty() ? "/" : all;
}

// mkdir -p
inline void make_folders(const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error) fail("cannot make folder %s: %s", path, error.message());
}

// The entries of a folder but . and .., in no order.
inline std::vector<std::string> folder_entries(const std::string& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(path, error), end; entry != end; entry.increment(error))
        names.push_back(entry->path().filename().string());
    if (error) fail("cannot read folder %s: %s", path, error.message());
    return names;
}

// May this user not read a folder, or something in it? Then nothing is known of it, least of all that it is damaged.
inline bool is_forbidden(const std::string& folder) {
    const auto forbids = [](const std::string& path) {
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file >= 0) close(file);
        return file < 0 && errno == EACCES;
    };
    if (forbids(folder) || forbids(folder + "/.")) return true;
    const std::vector<std::string> names = folder_entries(folder);
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return forbids(folder + "/" + name); });
}

// Removes a file, or a folder with all that is in it; a link is removed, not what it leads to. What is not there is
// removed already.
inline void remove_tree(const std::string& path) {
    struct stat s;
    if (lstat(path.c_str(), &s) != 0) {
        if (errno == ENOENT) return;
        fail("cannot remove %s: %s", path, std::strerror(errno));
    }
    const bool is_folder = S_ISDIR(s.st_mode);
    if (is_folder)
        for (const std::string& name : folder_entries(path)) remove_tree(path + "/" + name);
    if ((is_folder ? rmdir(path.c_str()) : unlink(path.c_str())) != 0)
        fail("cannot remove %s: %s", path, std::strerror(errno));
}

// The files that match a shell pattern, sorted by name; if there are none, the caller words the error. A folder that
// cannot be read is one here if nothing matches elsewhere.
inline std::vector<std::string> glob_files(const std::string& pattern) {
    static thread_local std::string unreadable;
    unreadable.clear();
    const auto note = [](const char* path, int error) {
        if (error != ENOENT && error != ENOTDIR)
            unreadable = format_text("cannot read folder %s: %s", path, std::strerror(error));
        return 0;
    };
    glob_t found;
    std::vector<std::string> paths;
    if (glob(pattern.c_str(), 0, note, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++) paths.push_back(found.gl_pathv[i]);
    globfree(&found);
    if (paths.empty() && !unreadable.empty()) fail("%s", unreadable);
    return paths;
}

// The path as a pattern for glob_files that matches nothing but itself. special: what has a meaning in a pattern.
inline std::string glob_literal(const std::string& path, const char* special = "*?[]\\") {
    std::string pattern;
    for (const char c : path) {
        if (std::strchr(special, c)) pattern += '\\';
        pattern += c;
    }
    return pattern;
}

// ---------------------------------------------------------------------------------------------------------------------
// Durable writing: a file that is reported written is on the disk, with a checksum by which a later reader knows it.

// CRC-32C (Castagnoli: polynomial 0x1EDC6F41, reflected). Continues from `crc`, the checksum of the bytes before; start
// with 0. A byte at a time by one table would be the slowest part of a checkpoint, so there is a table for each byte of
// a word. They are constexpr since clang makes constants of them by itself, and g++'s objects would write into those.
inline uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
    static constexpr auto of = [] {  // of[k][b]: byte b with k zero bytes behind it
        std::array<std::array<uint32_t, 256>, 8> tables{};
        for (int k = 0; k < 8; k++)
            for (uint32_t b = 0; b < 256; b++) {
                uint32_t r = b;
                for (int bit = 0; bit < 8 * (k + 1); bit++) r = r >> 1 ^ (r & 1 ? 0x82F63B78u : 0);
                tables[size_t(k)][b] = r;
            }
        return tables;
    }();
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (crc = ~crc; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (size_t k = 0; k < 8; k++) crc ^= of[7 - k][word >> 8 * k & 255];
    }
    for (; bytes > 0; p++, bytes--) crc = crc >> 8 ^ of[0][(crc ^ *p) & 255];
    return ~crc;
}

// A file as it was written; manifests list these.
struct FileRecord {
    std::string name;  // without its folder
    uint64_t size = 0;
    uint32_t crc32c = 0;
};

// A file as it is now.
inline FileRecord read_record(const std::string& path) {
    file_size(path, true);  // opening a pipe would wait
    const FileReader file(path);
    FileRecord record{name_of(path), file.size()};
    std::vector<char> piece(1 << 20);
    for (uint64_t at = 0; at < record.size; at += piece.size()) {
        const size_t count = size_t(std::min<uint64_t>(piece.size(), record.size - at));
        file.read(piece.data(), count, at);
        record.crc32c = crc32c(record.crc32c, piece.data(), count);
    }
    return record;
}

// For comparisons between ranks, which must read the same.
inline std::string digest_text(const FileRecord& file) {
    return format_text("%08x of %d bytes", file.crc32c, file.size);
}

// Writes all the bytes, or fails.
inline void write_all(int fd, const void* data, uint64_t bytes, const std::string& path) {
    for (const char* p = static_cast<const char*>(data); bytes > 0;) {
        const ssize_t n = ::write(fd, p, size_t(std::min<uint64_t>(bytes, 1u << 30)));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) fail("cannot write %s: %s", path, n < 0 ? std::strerror(errno) : "the device took no bytes");
        p += n;
        bytes -= uint64_t(n);
    }
}

// Makes a folder's new files and renames durable.
inline void sync_folder(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail("cannot open folder %s to sync it: %s", path, std::strerror(errno));
    const int error = fsync(fd) == 0 ? 0 : errno;
    ::close(fd);
    // EINVAL: this file system cannot sync folders; its renames are as durable as it makes them.
    if (error && error != EINVAL) fail("cannot sync folder %s: %s", path, std::strerror(error));
}

// The last whole line of a growing file, of at most 1000 bytes; "" where there is none.
inline std::string last_line(const std::string& path) {
    std::ifstream in(path);
    std::string line;
    in.seekg(0, std::ios::end);
    in.seekg(std::max<std::streamoff>(0, std::streamoff(in.tellg()) - 1000));
    for (std::string next; std::getline(in, next) && !in.eof();) line = next;
    return line;
}

// By all FileWriters together: a slow disk is no stall to the watchdog as long as bytes arrive there.
inline std::atomic<uint64_t> bytes_written_to_files{0};

// Writes a file, which is synced to disk when close() returns its record. Not atomic by itself: a checkpoint is written
// to a folder under another name, which is renamed once it is complete; for a single file, see replace_text_file.
class FileWriter {
  public:
    explicit FileWriter(const std::string& file)
        : path(file), fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
        if (fd < 0) fail("cannot create %s: %s", path, std::strerror(errno));
        record.name = name_of(path);
    }
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter() {  // without close(): it is not whole, so it does not stay
        if (fd < 0) return;
        struct stat s;
        if (fstat(fd, &s) == 0 && S_ISREG(s.st_mode)) unlink(path.c_str());
        ::close(fd);
    }
    void write(const void* data, uint64_t bytes) {
        const uint64_t piece = 1 << 20;  // still in the cache when write() copies it, after the checksum
        for (const char* p = static_cast<const char*>(data); bytes > 0;) {
            const uint64_t n = std::min(bytes, piece);
            record.crc32c = crc32c(record.crc32c, p, size_t(n));
            write_all(fd, p, n, path);
            record.size += n;
            p += n;
            bytes -= n;
            bytes_written_to_files.fetch_add(n, std::memory_order_relaxed);
        }
    }
    // Other bytes in place of the file's first ones, which the record does not know.
    void write_again(const void* data, uint64_t bytes) {
        if (lseek(fd, 0, SEEK_SET) != 0) fail("cannot seek in %s: %s", path, std::strerror(errno));
        write_all(fd, data, bytes, path);
    }
    // A failed fsync is final: the kernel may have dropped the pages, so a second fsync could report success for data
    // that is lost.
    FileRecord close() {
        if (fsync(fd) != 0) fail("cannot sync %s: %s", path, std::strerror(errno));
        const int closing = fd;
        fd = -1;
        if (::close(closing) != 0) fail("cannot close %s: %s", path, std::strerror(errno));
        return record;
    }

  private:
    std::string path;
    int fd;
    FileRecord record;
};

inline FileRecord write_text_file(const std::string& path, const std::string& text) {
    FileWriter out(path);
    out.write(text.data(), text.size());
    return out.close();
}

inline void rename_path(const std::string& from, const std::string& to) {
    if (std::rename(from.c_str(), to.c_str()) != 0) fail("cannot rename %s to %s: %s", from, to, std::strerror(errno));
}

// How the files begin that may be replaced: pages of this program and their data.
constexpr const char* PAGE_BEGINNING = "<!DOCTYPE html>\n<!-- page of ./train_nsa ";
constexpr const char* INSPECTED_BEGINNING = "{\"nsa_inspect\": 1, ";

// For an option that names a file to write, before the work whose result goes there: "" is nothing to write. A file
// that is there already is replaced only if it begins like one of this program; beginning "": none is.
inline void require_output_file(const char* option, const std::string& path, const std::string& beginning = "") {
    if (path.empty()) return;
    struct stat s;
    if (!is_folder(folder_of(path)))
        fail("--%s %s: there is no folder %s; make it first", option, path, folder_of(path));
    if (lstat(path.c_str(), &s) != 0) {
        if (errno == ENOENT) return;
        fail("--%s %s: %s", option, path, std::strerror(errno));
    }
    if (S_ISDIR(s.st_mode)) fail("--%s %s is a folder: give the name of a file", option, path);
    if (!S_ISREG(s.st_mode)) fail("--%s %s is a link, a pipe or a device: give the name of a file", option, path);
    if (beginning.empty())
        fail("--%s %s is there already and is not overwritten: choose another name, or remove it", option, path);
    std::string found(beginning.size(), '\0');
    std::ifstream(path, std::ios::binary).read(&found[0], std::streamsize(found.size()));
    if (found != beginning)
        fail("--%s %s is there already, and this program has not written it: choose another name, or remove it", option,
             path);
}

// A crash at any moment leaves either the whole old text or the whole new one.
inline void replace_text_file(const std::string& path, const std::string& text) {
    const std::string writing = path + ".writing";
    unlink(writing.c_str());  // of a writer that died
    write_text_file(writing, text);
    rename_path(writing, path);
    sync_folder(folder_of(path));
}

// For a verb whose --out is a folder: it holds nothing yet, so nothing is written over.
inline void require_empty_folder(const std::string& to, const char* verb) {
    if (to.empty()) fail_usage("%s: --out is missing: the folder to write", verb);
    if (!file_exists(to)) return;
    if (!is_folder(to)) fail("--out %s is a file: give a folder that does not exist yet", to);
    const std::vector<std::string> entries = folder_entries(to);
    if (!entries.empty())
        fail("--out %s is not empty, it holds %s: remove what is there, or give another folder", to, entries[0]);
}

// The file that an option names. It may have come there meanwhile.
inline void write_output_file(const char* option, const std::string& path, const std::string& text,
                              const std::string& beginning = "") {
    require_output_file(option, path, beginning);
    replace_text_file(path, text);
}
