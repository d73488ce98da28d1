// safetensors.h: reading and writing the safetensors format (huggingface/safetensors): 8 bytes little-endian length of
// a JSON header, the header {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {string:
// string}}, then the data.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

#include "json.h"
#include "util.h"

struct TensorView {
    std::string name;
    std::string dtype;  // F64, F32, I32, U8 ...
    std::vector<int64_t> shape;
    const void* data = nullptr;
    uint64_t bytes = 0;

    int64_t elements() const {
        int64_t n = 1;
        for (int64_t s : shape) n *= s;
        return n;
    }
};

inline TensorView tensor_view(std::string name, std::vector<int64_t> shape, const float* data) {
    TensorView t{std::move(name), "F32", std::move(shape), data, 0};
    t.bytes = uint64_t(t.elements()) * sizeof(float);
    return t;
}

inline int safetensors_dtype_bytes(const std::string& dtype) {
    static const std::map<std::string, int> bytes = {{"F64", 8}, {"I64", 8}, {"U64", 8},  {"F32", 4}, {"I32", 4},
                                                     {"U32", 4}, {"F16", 2}, {"BF16", 2}, {"I16", 2}, {"U16", 2},
                                                     {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
    const auto found = bytes.find(dtype);
    return found == bytes.end() ? 0 : found->second;
}

// ---------------------------------------------------------------------------------------------------------------------
// Files that are on the disk when they are reported written, and the checksum by which a later reader knows them.

// CRC-32C (Castagnoli: polynomial 0x1EDC6F41, reflected), of `bytes` bytes that follow those whose checksum is `crc`; 0
// to begin with. By the processor's own instruction where the build has it, else by eight tables, one per byte of a
// word.
inline uint32_t crc32c_by_table(uint32_t crc, const void* data, size_t bytes) {
    struct Tables {
        uint32_t of[8][256];  // of[k][b]: byte b with k zero bytes behind it
        Tables() {
            for (uint32_t b = 0; b < 256; b++) {
                uint32_t r = b;
                for (int bit = 0; bit < 8; bit++) r = r >> 1 ^ (r & 1 ? 0x82F63B78u : 0);
                of[0][b] = r;
            }
            for (int k = 1; k < 8; k++)
                for (uint32_t b = 0; b < 256; b++) of[k][b] = of[k - 1][b] >> 8 ^ of[0][of[k - 1][b] & 255];
        }
    };
    static const Tables table;
    const unsigned char* p = static_cast<const unsigned char*>(data);
    crc = ~crc;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table.of[7 - k][word >> 8 * k & 255];
    }
    for (; bytes > 0; p++, bytes--) crc = crc >> 8 ^ table.of[0][(crc ^ *p) & 255];
    return ~crc;
}

inline uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
#ifdef __SSE4_2__
    const unsigned char* p = static_cast<const unsigned char*>(data);
    uint64_t state = static_cast<uint32_t>(~crc);
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        state = _mm_crc32_u64(state, word);
    }
    for (; bytes > 0; p++, bytes--) state = _mm_crc32_u8(uint32_t(state), *p);
    return ~uint32_t(state);
#else
    return crc32c_by_table(crc, data, bytes);
#endif
}

// A file as it was written: what a manifest says of it.
struct FileRecord {
    std::string name;  // without its folder
    uint64_t size = 0;
    uint32_t crc32c = 0;
};

inline std::string folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// Writes `bytes` of data in full or fails with one line.
inline void write_all(int fd, const void* data, uint64_t bytes, const std::string& path) {
    for (const char* p = static_cast<const char*>(data); bytes > 0;) {
        const ssize_t n = ::write(fd, p, size_t(std::min<uint64_t>(bytes, 1u << 30)));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            fail("cannot write %s: %s", path.c_str(), n < 0 ? std::strerror(errno) : "the device took no bytes");
        p += n, bytes -= uint64_t(n);
    }
}

// Makes renames and new files inside a folder durable.
inline void sync_folder(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail("cannot open folder %s to sync it: %s", path.c_str(), std::strerror(errno));
    const int error = fsync(fd) == 0 ? 0 : errno;
    ::close(fd);
    // EINVAL: a file system that cannot sync folders at all; its renames are as durable as it makes them.
    if (error && error != EINVAL) fail("cannot sync folder %s: %s", path.c_str(), std::strerror(error));
}

inline std::atomic<uint64_t> bytes_written_to_files{
    0};  // by all FileWriters: whoever waits for one sees that it gets on

// Writes a file in full, synced to disk when close() returns its record. Not atomic by itself: a checkpoint is written
// into a folder of another name, which is renamed when it is whole; for a single file there is replace_text_file.
class FileWriter {
  public:
    explicit FileWriter(const std::string& file)
        : path(file), fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
        if (fd < 0) fail("cannot create %s: %s", path.c_str(), std::strerror(errno));
        record.name = path.substr(path.rfind('/') + 1);
    }
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
    ~FileWriter() {
        if (fd >= 0) ::close(fd);
    }
    void write(const void* data, uint64_t bytes) {
        const uint64_t piece = 1 << 20;  // stays in the processor's cache between the checksum and the copy
        for (const char* p = static_cast<const char*>(data); bytes > 0;) {
            const uint64_t n = std::min(bytes, piece);
            record.crc32c = crc32c(record.crc32c, p, size_t(n));
            write_all(fd, p, n, path);
            record.size += n, p += n, bytes -= n;
            bytes_written_to_files.fetch_add(n, std::memory_order_relaxed);
        }
    }
    // A failed fsync is final: the kernel may have dropped the pages, so that a second one would report a success that
    // is none.
    FileRecord close() {
        if (fsync(fd) != 0) fail("cannot sync %s: %s", path.c_str(), std::strerror(errno));
        const int closing = fd;
        fd = -1;
        if (::close(closing) != 0) fail("cannot close %s: %s", path.c_str(), std::strerror(errno));
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
    if (std::rename(from.c_str(), to.c_str()) != 0)
        fail("cannot rename %s to %s: %s", from.c_str(), to.c_str(), std::strerror(errno));
}

// After a crash at any moment the file holds either all of the old text or all of the new one.
inline void replace_text_file(const std::string& path, const std::string& text) {
    const std::string writing = path + ".writing";
    write_text_file(writing, text);
    rename_path(writing, path);
    sync_folder(folder_of(path));
}

inline FileRecord write_safetensors(const std::string& path,
                                    const std::vector<std::pair<std::string, std::string>>& metadata,
                                    const std::vector<TensorView>& tensors) {
    std::string header = "{";
    if (!metadata.empty()) {
        header += "\"__metadata__\":{";
        for (size_t i = 0; i < metadata.size(); i++)
            header += (i ? "," : "") + json_quote(metadata[i].first) + ":" + json_quote(metadata[i].second);
        header += "}";
    }
    uint64_t offset = 0;
    for (const TensorView& t : tensors) {
        header += (header.size() > 1 ? "," : "") + json_quote(t.name) + ":{\"dtype\":\"" + t.dtype + "\",\"shape\":[";
        for (size_t i = 0; i < t.shape.size(); i++) header += (i ? "," : "") + std::to_string(t.shape[i]);
        header += "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + t.bytes) + "]}";
        offset += t.bytes;
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');  // the data begins at a multiple of 8 bytes
    FileWriter out(path);
    const uint64_t length = header.size();
    out.write(&length, 8);
    out.write(header.data(), header.size());
    for (const TensorView& t : tensors) out.write(t.data, t.bytes);
    return out.close();
}

// A file mapped into memory; views stay valid as long as the object. Everything in the header is checked against the
// file's size.
class SafeTensors {
  public:
    std::vector<TensorView> tensors;
    std::map<std::string, std::string> metadata;
    std::string path;

    explicit SafeTensors(const std::string& file) : path(file) {
        const uint64_t size = file_size(file);
        if (size < 8) fail("%s: %llu bytes are too few for a safetensors file", file.c_str(), (unsigned long long)size);
        const int fd = ::open(file.c_str(), O_RDONLY);
        if (fd < 0) fail("cannot open %s: %s", file.c_str(), std::strerror(errno));
        void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
        ::close(fd);
        if (mapped == MAP_FAILED) fail("cannot map %s: %s", file.c_str(), std::strerror(errno));
        map = std::shared_ptr<const char>(static_cast<const char*>(mapped),
                                          [size](const char* m) { munmap(const_cast<char*>(m), size); });
        uint64_t length;
        std::memcpy(&length, map.get(), 8);
        if (length > size - 8)
            fail(
                "%s: byte 0: the header is said to be %llu bytes long, the file has %llu after it: truncated, or no "
                "safetensors file",
                file.c_str(), (unsigned long long)length, (unsigned long long)(size - 8));
        read_header(std::string(map.get() + 8, length), map.get() + 8 + length, size - 8 - length);
    }

    const TensorView* find(const std::string& name) const {
        for (const TensorView& t : tensors)
            if (t.name == name) return &t;
        return nullptr;
    }
    // The tensor of this name, type and shape, or one line that says what is wrong.
    const TensorView& get(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) const {
        const TensorView* t = find(name);
        if (!t) fail("%s: tensor %s is missing", path.c_str(), name.c_str());
        if (t->dtype != dtype)
            fail("%s: tensor %s has dtype %s, expected %s", path.c_str(), name.c_str(), t->dtype.c_str(),
                 dtype.c_str());
        if (t->shape != shape)
            fail("%s: tensor %s has shape [%s], expected [%s]", path.c_str(), name.c_str(),
                 shape_text(t->shape).c_str(), shape_text(shape).c_str());
        return *t;
    }

  private:
    std::shared_ptr<const char> map;
    std::deque<std::vector<char>> aligned;  // copies of tensors that lie at odd places of the file

    static std::string shape_text(const std::vector<int64_t>& shape) {
        std::string text;
        for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
        return text;
    }

    void read_header(const std::string& header, const char* data, uint64_t data_bytes) {
        const Json root = parse_json(header, path, 8);
        if (root.kind != Json::Object) fail("%s: byte 8: the header is no JSON object", path.c_str());
        std::vector<std::pair<uint64_t, uint64_t>> spans;
        for (size_t i = 0; i < root.keys.size(); i++) {
            const Json& entry = root.items[i];
            const std::string where = path + ": " + root.keys[i];
            if (root.keys[i] == "__metadata__") {
                if (entry.kind != Json::Object) fail("%s: no JSON object", where.c_str());
                for (size_t j = 0; j < entry.keys.size(); j++)
                    metadata[entry.keys[j]] = entry.items[j].string(where + ": " + entry.keys[j]);
                continue;
            }
            TensorView t;
            t.name = root.keys[i];
            t.dtype = entry.string("dtype", where);
            const int element = safetensors_dtype_bytes(t.dtype);
            if (element == 0) fail("%s: dtype %s is unknown", where.c_str(), t.dtype.c_str());
            uint64_t bytes = uint64_t(element);
            for (const Json& extent : entry.array("shape", where)) {
                const int64_t n = extent.integer(where + ": shape");
                if (n < 0 || (n > 0 && bytes > data_bytes / uint64_t(n)))
                    fail("%s: the shape needs more bytes than the file's %llu", where.c_str(),
                         (unsigned long long)data_bytes);
                t.shape.push_back(n);
                bytes *= uint64_t(n);
            }
            const std::vector<Json>& offsets = entry.array("data_offsets", where);
            if (offsets.size() != 2)
                fail("%s: data_offsets has %zu numbers, expected 2", where.c_str(), offsets.size());
            const int64_t begin = offsets[0].integer(where), end = offsets[1].integer(where);
            if (begin < 0 || end < begin || uint64_t(end) > data_bytes || uint64_t(end - begin) != bytes)
                fail("%s: data_offsets [%lld, %lld] do not fit %llu bytes of the shape in a file with %llu of data",
                     where.c_str(), (long long)begin, (long long)end, (unsigned long long)bytes,
                     (unsigned long long)data_bytes);
            t.data = data + begin;
            t.bytes = bytes;
            spans.emplace_back(begin, end);
            tensors.push_back(std::move(t));
        }
        // The format's rule: tensors fill the data without overlaps or holes.
        std::sort(spans.begin(), spans.end());
        uint64_t at = 0;
        for (const auto& span : spans) {
            if (span.first != at)
                fail("%s: tensors overlap or leave a hole at byte %llu of the data", path.c_str(),
                     (unsigned long long)at);
            at = span.second;
        }
        if (at != data_bytes)
            fail("%s: tensors end at byte %llu of the data, the file has %llu", path.c_str(), (unsigned long long)at,
                 (unsigned long long)data_bytes);
        // Old writers did not align: such a tensor cannot be read in place. Only now,
        // as the copies are known not to overlap and so are no larger than the file.
        for (TensorView& t : tensors)
            if ((8 + header.size() + uint64_t(static_cast<const char*>(t.data) - data)) %
                    uint64_t(safetensors_dtype_bytes(t.dtype)) !=
                0) {
                const char* const begin = static_cast<const char*>(t.data);
                aligned.emplace_back(begin, begin + t.bytes);
                t.data = aligned.back().data();
            }
    }
};
