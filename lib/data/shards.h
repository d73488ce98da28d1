// shards.h: the files that hold token shards: constants of their header, the writer (`train_nsa tokenize`), finding and
// checking files, and names for other formats. dataloader.h, which describes the format, reads them.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sys/file.h>

#include "../base/files.h"
#include "text_input.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little endian and are used in place");

constexpr int32_t SHARD_MAGIC = 20240520, SHARD_VERSION = 1;
constexpr size_t SHARD_HEADER_BYTES = 256 * sizeof(int32_t);
constexpr uint8_t NO_TARGET = 2;  // among the flags of targets, beside 1 for an answer: the shard has ended before

// ---------------------------------------------------------------------------------------------------------------------
// Writing.

// Shards that are there are never replaced.
inline void require_no_shards(const std::string& prefix) {
    for (const char* split : {"train", "val"}) {
        const std::vector<std::string> old = glob_files(glob_literal(prefix) + "_" + split + "_[0-9]*.bin");
        if (!old.empty())
            fail("--out %s: %s exists already; shards are not overwritten: remove the %s or choose another PREFIX",
                 prefix, old[0], counted(int64_t(old.size()), format_text("%s shard", split)));
    }
}

// One writer at a time for a prefix: two would mix their shards. The kernel ends the lock with the process, however
// that ends; of one that was killed an empty file stays, which the next one takes over.
class PrefixLock {
  public:
    explicit PrefixLock(const std::string& prefix) : path(prefix + ".lock") {
        make_folders(folder_of(path));
        while (!lock_file()) {
        }
    }
    PrefixLock(const PrefixLock&) = delete;
    PrefixLock& operator=(const PrefixLock&) = delete;
    ~PrefixLock() {
        unlink(path.c_str());
        ::close(fd);
    }

  private:
    const std::string path;
    int fd = -1;

    // False where the file that was locked is no longer the one of this name: its owner has just removed it.
    bool lock_file() {
        fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
        if (fd < 0) fail("cannot create %s: %s", path, std::strerror(errno));
        struct stat locked, named;
        if (fstat(fd, &locked) != 0 || !S_ISREG(locked.st_mode) || locked.st_size != 0) {
            ::close(fd);
            fail("%s is no lock of this program, which is an empty file: choose another PREFIX", path);
        }
        if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {  // some file systems have no locks
            ::close(fd);
            fail(
                "another tokenize writes shards of the same name (%s is locked): wait for its end, or choose another "
                "PREFIX",
                path);
        }
        if (lstat(path.c_str(), &named) == 0 && named.st_ino == locked.st_ino && named.st_dev == locked.st_dev)
            return true;
        ::close(fd);
        return false;
    }
};

// Writes <prefix>_<split>_000000.bin and so on, counting from first_index, with shard_tokens tokens in each file but
// the last; a document may straddle two files. Shards get their names in close(), when all are complete and synced;
// until then each is <name>.tmp. A writer that ends without close() leaves no file, one that is killed leaves those,
// which the next one removes. A shard that exists already is never replaced: the writer fails. Its caller holds the
// PrefixLock.
class ShardWriter {
  public:
    ShardWriter(std::string prefix, std::string split, int first_index, uint64_t shard_tokens, int vocab_size,
                uint32_t vocab_digest = 0)
        : prefix(std::move(prefix)),
          split(std::move(split)),
          index(first_index),
          shard_tokens(shard_tokens),
          vocab_size(vocab_size),
          vocab_digest(vocab_digest) {
        make_folders(folder_of(this->prefix));
        const std::string left = glob_literal(this->prefix) + "_" + this->split + "_[0-9]?????.bin.tmp";
        for (const std::string& file : glob_files(left)) std::remove(file.c_str());  // of a writer that was killed
    }
    ~ShardWriter() {
        for (const std::string& name : finished) std::remove((name + ".tmp").c_str());
    }

    void write(const uint16_t* tokens, size_t n) {
        while (n > 0) {
            if (!file) open_shard();
            const size_t part = size_t(std::min<uint64_t>(n, shard_tokens - in_shard));
            file->write(tokens, part * sizeof *tokens);
            tokens += part;
            n -= part;
            in_shard += part;
            total += part;
            if (in_shard == shard_tokens) finish();
        }
    }

    // Completes the open shard.
    void finish() {
        if (!file) return;
        file->write_again(make_header(int32_t(in_shard)).data(), SHARD_HEADER_BYTES);
        file->close();
        file.reset();
        finished.push_back(path);
    }

    // Completes the last shard and names all of them. If there were no tokens, there is no file.
    void close() {
        finish();
        for (const std::string& name : std::exchange(finished, {})) rename_path(name + ".tmp", name);
    }

    uint64_t tokens() const { return total; }  // written so far, in all shards together

  private:
    std::string prefix, split;
    int index;
    uint64_t shard_tokens;
    int vocab_size;
    uint32_t vocab_digest;              // see Tokenizer::digest
    std::string path;                   // of the open shard, without .tmp
    std::unique_ptr<FileWriter> file;   // null between shards
    std::vector<std::string> finished;  // paths of the shards that are complete, without .tmp
    uint64_t in_shard = 0, total = 0;

    void open_shard() {
        if (index > 999999)
            fail("more than 1000000 shards of %s_%s: raise the number of tokens per shard", prefix, split);
        path = format_text("%s_%s_%06d.bin", prefix, split, index++);
        if (file_exists(path)) fail("%s exists already: remove the old shards or choose another output name", path);
        file = std::make_unique<FileWriter>(path + ".tmp");
        in_shard = 0;
        file->write(make_header(0).data(), SHARD_HEADER_BYTES);  // no valid shard until finish() writes the count
    }

    std::array<int32_t, 256> make_header(int32_t tokens) const {
        return {SHARD_MAGIC, SHARD_VERSION, tokens, vocab_size, int32_t(vocab_digest)};
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Finding shards, and telling them from other files.

// What has a meaning in the text of --data and --val-data, and none behind a backslash.
constexpr const char* SPECIAL_IN_SETS = "*?[]\\,:=";

// The files that match a shell pattern, sorted by name; option is the one that gave the pattern, for the message.
inline std::vector<std::string> shard_files(const std::string& pattern, const std::string& option) {
    const std::vector<std::string> files = glob_files(pattern);
    if (files.empty())
        fail(
            "%s: no file matches '%s': make shards with ./train_nsa tokenize or data/fetch_shards.sh; a , : = [ or \\ "
            "that belongs to a path needs a \\ before it",
            option, pattern);
    for (const std::string& file : files)
        if (is_folder(file))
            fail("%s: %s is a folder: give its shards by a pattern, as in %s %s", option, file, option,
                 shell_word(glob_literal(file, SPECIAL_IN_SETS) +
                            (option == "--data" ? "/*_train_*.bin" : "/*_val_*.bin")));
    std::vector<std::string> left;
    error_of([&] { left = glob_files(pattern + ".tmp"); });  // a folder that cannot be read holds none
    if (!left.empty())
        fail("%s: %s: a tokenize still runs, or was stopped: then remove its shards and repeat it", option, left[0]);
    return files;
}

// No file may be used for both training and validation. A link counts as the file it leads to; copies go unnoticed.
inline void check_disjoint(const std::vector<std::string>& train_files, const std::vector<std::string>& val_files) {
    std::map<FileIdentity, std::string> train;
    for (const std::string& file : train_files) train.emplace(file_identity(file), file);
    for (const std::string& file : val_files) {
        const auto same = train.find(file_identity(file));
        if (same != train.end())
            fail_usage(
                "validation file %s is the training file %s: the validation loss would be a training loss; give "
                "separate shards",
                file, same->second);
    }
}

// What a file without the shard magic is, and what to do about it. `head` is its first SHARD_HEADER_BYTES bytes, or all
// of it.
inline std::string name_foreign_format(const std::string& head) {
    const std::string tokenize = "make shards from the text with ./train_nsa tokenize";
    int32_t magic = 0;
    std::memcpy(&magic, head.data(), std::min(head.size(), sizeof magic));
    if (magic / 10000 == SHARD_MAGIC / 10000)  // llm.c numbers its formats by their dates
        return format_text("a file of llm.c of another kind, number %d; token shards have %d and 16-bit tokens: ",
                           magic, SHARD_MAGIC) +
               tokenize;
    if (const ForeignKind* const kind = foreign_by_bytes(head))
        return format_text("%s: %s", kind->name, *kind->output ? tokenize : "unpack it first");
    const auto is_text = [](unsigned char c) { return c >= ' ' || (c >= '\t' && c <= '\r'); };
    if (std::all_of(head.begin(), head.end(), is_text)) return "text, not tokens: " + tokenize;
    const bool is_other = head.compare(0, 6, "\x93NUMPY") == 0 || head.find("{\"") == 8 ||  // .npy, .safetensors
                          int32_t(__builtin_bswap32(uint32_t(magic))) == SHARD_MAGIC;
    const char* const or_tokens =
        "; if a .bin of nanoGPT with GPT-2 tokens, put 256 int32 {20240520, 1, their number, 0 ...} before them, or ";
    return format_text("no token shard: its first number is %d, expected %d%s%s", magic, SHARD_MAGIC,
                       is_other ? ": " : or_tokens, tokenize);
}
