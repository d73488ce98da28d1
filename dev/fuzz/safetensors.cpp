// safetensors.cpp: opens the input as a safetensors file, reads every element of every tensor, and writes it again.
#include "../../lib/base/safetensors.h"
#include "fuzz.h"

static const MemoryFile file, again;

static std::string file_of(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

std::vector<std::string> seeds() {
    const std::vector<float> x = {1, 2, 3, 4, 5, 6};
    write_safetensors(again.path, {{"config", "{\"a\": 1}"}},
                      {tensor_view("w", {2, 3}, x.data()), tensor_view("b", {1}, x.data())});
    const std::string written = read_file(again.path);
    return {written,
            file_of("{}", ""),
            file_of("{\"t\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", "x"),
            file_of("{\"t\":{\"dtype\":\"F64\",\"shape\":[0,7],\"data_offsets\":[0,0]},\"u\":{\"dtype\":\"I16\","
                    "\"shape\":[1,1,2],\"data_offsets\":[0,4]}}",
                    "abcd"),
            file_of("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"F32\",\"shape\":"
                    "[1],\"data_offsets\":[1,5]}}",
                    "abcde"),
            file_of("{\"t\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", ""),
            std::string(8, '\xFF') + "{}"};
}

template <class T>
static double sum(const TensorView& t) {
    double total = 0;
    const T* x = static_cast<const T*>(t.data);
    for (int64_t i = 0; i < t.elements(); i++) total += double(x[i]);
    return total;
}

static volatile double sink;

void fuzz_one(const std::string& input) {
    const std::string& path = file.fill(input);
    std::unique_ptr<SafeTensors> read;
    {
        MemoryLimit limit(input.size(), 16 << 10, 400);  // as for JSON
        if (!accepts([&] { read = std::make_unique<SafeTensors>(path); })) return;
    }
    uint64_t bytes = 0;
    for (const TensorView& t : read->tensors) {
        EXPECT(t.bytes == uint64_t(t.elements()) * uint64_t(safetensors_dtype_bytes(t.dtype)));
        EXPECT(&read->get(t.name, t.dtype, t.shape) == &t);
        refusal([&] { read->get(t.name, "F32", {2, 3}); });
        bytes += t.bytes;
        if (t.dtype == "F64") sink = sum<double>(t);
        else if (t.dtype == "F32") sink = sum<float>(t);
        else if (t.bytes / uint64_t(safetensors_dtype_bytes(t.dtype)) == t.bytes) sink = sum<uint8_t>(t);
        else if (safetensors_dtype_bytes(t.dtype) == 2) sink = sum<uint16_t>(t);
        else if (safetensors_dtype_bytes(t.dtype) == 4) sink = sum<int32_t>(t);
        else sink = sum<int64_t>(t);
    }
    EXPECT(bytes <= input.size());
    refusal([&] { read->get("w", "F32", {2, 3}); });

    std::vector<std::pair<std::string, std::string>> metadata(read->metadata.begin(), read->metadata.end());
    std::vector<TensorView> in_order = read->tensors;  // of their data: the writer keeps the order it is given
    std::stable_sort(in_order.begin(), in_order.end(), [](const TensorView& a, const TensorView& b) {
        return a.data < b.data || (a.data == b.data && a.bytes < b.bytes);
    });
    write_safetensors(again.path, metadata, in_order);
    std::unique_ptr<SafeTensors> second;
    const std::string refused = refusal([&] { second = std::make_unique<SafeTensors>(again.path); });
    if (!refused.empty()) finding("accepted, written again, and then refused: %s", refused.c_str());
    EXPECT(second->metadata == read->metadata && second->tensors.size() == in_order.size());
    for (size_t i = 0; i < in_order.size(); i++) {
        const TensorView &a = in_order[i], &b = second->tensors[i];
        EXPECT(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes &&
               (a.bytes == 0 || !std::memcmp(a.data, b.data, a.bytes)));
    }
}
