// safetensors.h: reads and writes safetensors files (huggingface/safetensors), for checkpoints, dumps and golden
// values. A file is the length of the header, 8 bytes little endian; the header, which is JSON: {"name": {"dtype",
// "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {string: string}}; and the data.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <memory>

#include <sys/mman.h>

#include "files.h"
#include "json.h"

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
// Writing.

inline FileRecord write_safetensors(const std::string& path,
                                    const std::vector<std::pair<std::string, std::string>>& metadata,
                                    const std::vector<TensorView>& tensors) {
    Json root(Json::Object), notes(Json::Object);
    for (const auto& [name, text] : metadata) notes.add(name, text);
    if (!metadata.empty()) root.add("__metadata__", notes);
    uint64_t offset = 0;
    for (const TensorView& t : tensors) {
        const Json offsets = Json::list(std::vector<uint64_t>{offset, offset + t.bytes});
        root.add(t.name, {{"dtype", t.dtype}, {"shape", Json::list(t.shape)}, {"data_offsets", offsets}});
        offset += t.bytes;
    }
    std::string header = root.to_text(Json::COMPACT);
    header.append((8 - header.size() % 8) % 8, ' ');  // the data begins at a multiple of 8 bytes
    FileWriter out(path);
    const uint64_t length = header.size();
    out.write(&length, 8);
    out.write(header.data(), header.size());
    for (const TensorView& t : tensors) out.write(t.data, t.bytes);
    return out.close();
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading.

// A file mapped into memory; the views are valid as long as the object is. Everything in the header is checked against
// the file's size.
class SafeTensors {
  public:
    std::vector<TensorView> tensors;
    std::map<std::string, std::string> metadata;
    std::string path;

    explicit SafeTensors(const std::string& file) : path(file) {
        const uint64_t size = file_size(file, true);
        if (size < 8) fail("%s: %d bytes are too few for a safetensors file", file, size);
        const int fd = ::open(file.c_str(), O_RDONLY);
        if (fd < 0) fail("cannot open %s: %s", file, std::strerror(errno));
        void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
        ::close(fd);
        if (mapped == MAP_FAILED) fail("cannot map %s: %s", file, std::strerror(errno));
        map = std::shared_ptr<const char>(static_cast<const char*>(mapped),
                                          [size](const char* m) { munmap(const_cast<char*>(m), size); });
        uint64_t length;
        std::memcpy(&length, map.get(), 8);
        if (length > size - 8)
            fail(
                "%s: byte 0: the header is said to be %d bytes long, the file has %d after it: truncated, or no "
                "safetensors file",
                file, length, size - 8);
        const char* const data = map.get() + 8 + length;
        data_bytes = size - 8 - length;
        read_header(parse_json(std::string(map.get() + 8, length), path, 8), data);
        check_layout(data);
        align(data, 8 + length);
    }

    const TensorView* find(const std::string& name) const {
        for (const TensorView& t : tensors)
            if (t.name == name) return &t;
        return nullptr;
    }
    // The tensor of this name, type and shape, or one line that says what is wrong.
    const TensorView& get(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) const {
        const TensorView* t = find(name);
        if (!t) fail("%s: tensor %s is missing", path, name);
        if (t->dtype != dtype) fail("%s: tensor %s has dtype %s, expected %s", path, name, t->dtype, dtype);
        if (t->shape != shape)
            fail("%s: tensor %s has shape [%s], expected [%s]", path, name, shape_text(t->shape), shape_text(shape));
        return *t;
    }

  private:
    std::shared_ptr<const char> map;
    uint64_t data_bytes = 0;
    std::deque<std::vector<char>> aligned;  // copies of tensors that the file does not align

    static std::string shape_text(const std::vector<int64_t>& shape) {
        std::string text;
        for (size_t i = 0; i < shape.size(); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
        return text;
    }

    void read_header(const Json& root, const char* data) {
        if (root.kind != Json::Object) fail("%s: byte 8: the header is no JSON object", path);
        for (size_t i = 0; i < root.keys.size(); i++) {
            const Json& entry = root.items[i];
            const std::string where = path + ": " + root.keys[i];
            if (root.keys[i] != "__metadata__") {
                tensors.push_back(read_entry(entry, where, data));
                tensors.back().name = root.keys[i];
                continue;
            }
            if (entry.kind != Json::Object && entry.kind != Json::Null) fail("%s: no JSON object", where);
            for (size_t j = 0; j < entry.keys.size(); j++)
                metadata[entry.keys[j]] = entry.items[j].string(where + ": " + entry.keys[j]);
        }
    }

    TensorView read_entry(const Json& entry, const std::string& where, const char* data) const {
        TensorView t;
        t.dtype = entry.string("dtype", where);
        t.bytes = uint64_t(safetensors_dtype_bytes(t.dtype));
        if (t.bytes == 0) fail("%s: dtype %s is unknown", where, t.dtype);
        for (const Json& extent : entry.array("shape", where)) {
            const int64_t n = extent.integer(where + ": shape");
            if (n < 0 || (n > 0 && t.bytes > data_bytes / uint64_t(n)))
                fail("%s: the shape needs more bytes than the file's %d", where, data_bytes);
            t.shape.push_back(n);
            t.bytes *= uint64_t(n);
        }
        const std::vector<Json>& offsets = entry.array("data_offsets", where);
        if (offsets.size() != 2) fail("%s: data_offsets has %d numbers, expected 2", where, offsets.size());
        const int64_t begin = offsets[0].integer(where), end = offsets[1].integer(where);
        if (begin < 0 || end < begin || uint64_t(end) > data_bytes || uint64_t(end - begin) != t.bytes)
            fail("%s: data_offsets [%d, %d] do not fit %d bytes of the shape in a file with %d of data", where, begin,
                 end, t.bytes, data_bytes);
        t.data = data + begin;
        return t;
    }

    // The format's rule: tensors fill the data without overlaps or holes.
    void check_layout(const char* data) const {
        std::vector<std::pair<uint64_t, uint64_t>> spans;
        for (const TensorView& t : tensors) {
            const uint64_t begin = uint64_t(static_cast<const char*>(t.data) - data);
            spans.emplace_back(begin, begin + t.bytes);
        }
        std::sort(spans.begin(), spans.end());
        uint64_t at = 0;
        for (const auto& span : spans) {
            if (span.first != at) fail("%s: tensors overlap or leave a hole at byte %d of the data", path, at);
            at = span.second;
        }
        if (at != data_bytes) fail("%s: tensors end at byte %d of the data, the file has %d", path, at, data_bytes);
    }

    // Old writers did not align tensors, so some cannot be read in place and are copied. After check_layout: the copies
    // do not overlap, so together they are no larger than the file.
    void align(const char* data, uint64_t first_byte) {
        for (TensorView& t : tensors) {
            const char* const begin = static_cast<const char*>(t.data);
            const uint64_t offset = first_byte + uint64_t(begin - data);
            if (offset % uint64_t(safetensors_dtype_bytes(t.dtype)) == 0) continue;
            aligned.emplace_back(begin, begin + t.bytes);
            t.data = aligned.back().data();
        }
    }
};
