// fuzz.cpp: readers of files on any bytes, one target each; FUZZ_TARGET in the environment names it, `make fuzz
// TARGET=json` runs it; fuzz.h says what a finding is.
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#include "../test/data/tokenizer_tests.h"
#include "../test/program/program.h"
#include "fuzz.h"

// ---------------------------------------------------------------------------------------------------------------------
// parse_json on any text. Accepted text is written again, and must read the same.
namespace json_target {

static std::vector<std::string> seeds() {
    return {"{\"a\": [1, -0.5e3, true, false, null], \"b\": {\"c\": \"\\u00e9\\ud83d\\ude00\\n\\\"\\\\\\/\"}}",
            "[]",
            "{}",
            "-12345678901234567890",
            "9223372036854775807",
            "[[[[[[0]]]]]]",
            "\"\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80\"",
            " \t\r\n1.25E-7 ",
            "{\"\": 0, \" \": \"\"}",
            "1e400",
            "-9223372036854775808"};
}

static bool same(const Json& a, const Json& b) {
    return a.kind == b.kind && a.is_true == b.is_true && a.text == b.text && a.keys == b.keys &&
           a.number_value == b.number_value && a.integer_value == b.integer_value &&
           std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), same);
}

// What callers ask of a value; each question must end in an answer or an Error.
static void ask(const Json& v, const std::string& where) {
    for (const std::string& key : v.keys) EXPECT(v.find(key));
    refusal([&] { v.integer(where); });
    refusal([&] { v.string("text", where); });
    refusal([&] { v.array(where); });
    for (const std::string& key : v.keys) refusal([&] { v.number(key, where); });
}

static void fuzz_one(const std::string& input) {
    const std::string where = "file.json";
    Json value;
    {
        // a digit and its comma take two bytes of text and 112 of memory, and twice that while an array grows
        MemoryLimit limit(input.size(), 8 << 10, 400);
        if (!accepts([&] { value = parse_json(input, where); })) return;
    }
    ask(value, where);
    EXPECT(same(parse_json(value.to_text(), where), value));
    EXPECT(parse_json(json_quote(input), where).text.empty() == input.empty());  // quoting makes any bytes valid
}

}  // namespace json_target

// ---------------------------------------------------------------------------------------------------------------------
// Opens the input as a safetensors file, reads every element of every tensor, and writes it again.
namespace safetensors_target {
using program::safetensors_bytes;

static std::vector<std::string> seeds() {
    const std::vector<float> x = {1, 2, 3, 4, 5, 6};
    const std::string path = memory_folder().file("seed");
    write_safetensors(path, {{"config", "{\"a\": 1}"}},
                      {tensor_view("w", {2, 3}, x.data()), tensor_view("b", {1}, x.data())});
    const std::string written = read_file(path);
    return {
        written,
        safetensors_bytes("{}", ""),
        safetensors_bytes("{\"t\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", "x"),
        safetensors_bytes("{\"t\":{\"dtype\":\"F64\",\"shape\":[0,7],\"data_offsets\":[0,0]},\"u\":{\"dtype\":\"I16\","
                          "\"shape\":[1,1,2],\"data_offsets\":[0,4]}}",
                          "abcd"),
        safetensors_bytes(
            "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"F32\",\"shape\":"
            "[1],\"data_offsets\":[1,5]}}",
            "abcde"),
        safetensors_bytes("{\"t\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", ""),
        std::string(8, '\xFF') + "{}"};
}

static volatile unsigned sink;

static void fuzz_one(const std::string& input) {
    const std::string path = write_memory_file("input", input);
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
        const auto* const first = static_cast<const unsigned char*>(t.data);
        EXPECT(t.bytes == 0 || uintptr_t(first) % uintptr_t(safetensors_dtype_bytes(t.dtype)) == 0);
        sink = std::accumulate(first, first + t.bytes, 0u);  // reads every byte
    }
    EXPECT(bytes <= input.size());
    refusal([&] { read->get("w", "F32", {2, 3}); });

    std::vector<std::pair<std::string, std::string>> metadata(read->metadata.begin(), read->metadata.end());
    std::vector<TensorView> in_order = read->tensors;  // of their data: the writer keeps the order it is given
    std::stable_sort(in_order.begin(), in_order.end(), [](const TensorView& a, const TensorView& b) {
        return a.data < b.data || (a.data == b.data && a.bytes < b.bytes);
    });
    const std::string again = memory_folder().file("again");
    write_safetensors(again, metadata, in_order);
    std::unique_ptr<SafeTensors> second;
    const std::string refused = refusal([&] { second = std::make_unique<SafeTensors>(again); });
    if (!refused.empty()) finding("accepted, written again, and then refused: %s", refused);
    EXPECT(second->metadata == read->metadata && second->tensors.size() == in_order.size());
    for (size_t i = 0; i < in_order.size(); i++) {
        const TensorView &a = in_order[i], &b = second->tensors[i];
        EXPECT(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes &&
               (a.bytes == 0 || !std::memcmp(a.data, b.data, a.bytes)));
    }
}

}  // namespace safetensors_target

// ---------------------------------------------------------------------------------------------------------------------
// The input as a checkpoint's manifest.json. Unless its first byte is 0, its checksum is made right first, so that
// the rest is read. None of the files that it names is there as it says.
namespace manifest_target {

static std::vector<std::string> seeds() {
    const std::string whole = manifest_text(1000,
                                            {{"model.safetensors", 30848, 0xe3069283},
                                             {"config.json", 300, 7},
                                             {"optimizer_00000-of-00002.safetensors", 1, 0}},
                                            "{\"seed\": \"1\", \"x\": [1, 2.5]}");
    const auto before = [](const std::string& text) {
        return text.substr(0, text.size() - manifest_ending("").size());
    };
    return {std::string(1, '\0') + whole, " " + before(whole), " " + before(manifest_text(0, {}, "{}"))};
}

static void fuzz_one(const std::string& input) {
    if (input.empty()) return;
    std::string text = input.substr(1);
    if (input[0] != '\0') text += manifest_ending(text);
    write_memory_file("manifest.json", text);
    const std::string& folder = memory_folder().path;
    Checkpoint manifest;
    {
        MemoryLimit limit(text.size(), 32 << 10, 400);
        if (!accepts([&] { manifest = read_manifest(folder); })) return;
    }
    for (const FileRecord& file : manifest.files) EXPECT(!accepts([&] { verify_file(folder, file); }));
    EXPECT(accepts([&] { open_checkpoint(folder); }) == manifest.files.empty());
}

}  // namespace manifest_target

// ---------------------------------------------------------------------------------------------------------------------
// The input as a checkpoint's config.json. Accepted values are in the ranges of the options, and read the same once
// they are written again.
namespace config_target {

static std::vector<std::string> seeds() {
    const std::string tiny = config_json(options_of("")),
                      large = config_json(options_of("--model 125m --attention full"));
    std::string other = tiny;
    other.replace(other.find("128"), 3, "1e2");
    return {tiny, large, other, "{\"architecture\": \"nsa\"}", "{}"};
}

static void fuzz_one(const std::string& input) {
    Config c;
    {
        const std::string path = write_memory_file("input", input);
        MemoryLimit limit(input.size(), 64 << 10, 400);
        if (!accepts([&] { read_config_json(c, path); })) return;
    }
    for (const Option& o : OPTIONS) {
        if (!(o.traits & OF_MODEL) || !o.integer) continue;
        EXPECT(double(c.*o.integer) >= o.low && double(c.*o.integer) <= o.high);
    }
    EXPECT(!layer_kinds(c.attention).empty());
    Config second;
    EXPECT(accepts([&] { read_config_json(second, write_memory_file("again", config_json(c))); }));
    EXPECT(config_json(second) == config_json(c));
    if (c.layers > 20) return;  // the table's time and memory grow with the layers
    const TensorTable table(c);
    EXPECT(table.parameters > 0 && table.total >= size_t(table.parameters));
}

}  // namespace config_target

// ---------------------------------------------------------------------------------------------------------------------
// Opens the input as a token shard and reads every sample of an epoch. The first byte of the input chooses the
// sequence length, the vocabulary and the shuffling; the rest is the file.
namespace shards_target {

static std::string shard(const std::vector<int32_t>& head, const std::vector<uint16_t>& tokens) {
    std::string bytes(SHARD_HEADER_BYTES, '\0');
    std::memcpy(&bytes[0], head.data(), 4 * head.size());
    return bytes + std::string(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
}

static std::vector<std::string> seeds() {
    const std::vector<uint16_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
    return {"\x02" + shard({SHARD_MAGIC, 1, 13}, tokens),
            "\x03" + shard({SHARD_MAGIC, 1, 13, 256}, tokens),
            "\x83" + shard({SHARD_MAGIC, 1, 13, 50257}, tokens),
            "\x81" + shard({SHARD_MAGIC, 1, 2}, {50256, 65535}),
            "\x02" + shard({SHARD_MAGIC, 1, INT32_MAX}, tokens),
            "\x02" + shard({20240801, 7, 13}, tokens),
            "\x02PAR1abcPAR1",
            "\x02some text\n",
            "\x02\x1f\x8b",
            "\x02"};
}

static void fuzz_one(const std::string& input) {
    if (input.empty()) return;
    LoaderOptions options;
    options.seq_len = 1 + (input[0] & 15);
    options.vocab_size = input[0] & 0x80 ? 50257 : 256;
    options.shuffle = input[0] & 0x40;
    const std::string bytes = input.substr(1);
    const std::string path = write_memory_file("input", bytes);
    std::unique_ptr<DataLoader> loader;
    {
        MemoryLimit limit(bytes.size(), 16 << 10, 2);
        if (!accepts([&] { loader = std::make_unique<DataLoader>(open_shards({path}), options); })) return;
    }
    EXPECT(loader->tokens() == (bytes.size() - SHARD_HEADER_BYTES) / 2);
    const int T = options.seq_len, n = int(loader->samples_per_epoch());
    EXPECT(n == int((loader->tokens() - 1) / uint64_t(T)));
    const auto token = [&](size_t i) {
        uint16_t t;
        std::memcpy(&t, bytes.data() + SHARD_HEADER_BYTES + 2 * i, 2);
        return t;
    };
    bool valid = true;  // all tokens that are in samples
    for (int i = 0; i <= n * T; i++) valid = valid && token(size_t(i)) < options.vocab_size;
    std::vector<int32_t> inputs(size_t(n) * size_t(T)), targets(inputs.size());
    EXPECT(accepts([&] { loader->next_batch(inputs.data(), targets.data(), n); }) == valid);
    if (!valid) return;
    std::vector<bool> seen(size_t(n), false);
    const LoaderState state = loader->state();
    EXPECT(state.next_sample == uint64_t(n));
    for (int b = 0; b < n; b++) {
        int found = -1;  // samples with the same tokens are interchangeable
        for (int s = 0; s < n && found < 0; s++) {
            bool equal = !seen[size_t(s)];
            for (int t = 0; t < T && equal; t++)
                equal = inputs[size_t(b * T + t)] == token(size_t(s * T + t)) &&
                        targets[size_t(b * T + t)] == token(size_t(s * T + t + 1));
            if (equal) found = s;
        }
        EXPECT(found >= 0 && (options.shuffle || found <= b));
        seen[size_t(found)] = true;
    }
    DataLoader second(open_shards({path}), options);
    second.restore(state);
    EXPECT(second.state().corpus == state.corpus && second.state().next_sample == state.next_sample);
}

}  // namespace shards_target

// ---------------------------------------------------------------------------------------------------------------------
// The input as a .txt or .jsonl for the verb tokenize, read in blocks of a few bytes and in one block: tokens,
// documents and errors must be the same, and the documents those of the input. The first byte chooses the kind of
// file, the separator and the size of the blocks.
namespace lines_target {

static std::vector<std::string> seeds() {
    return {
        "\x01{\"text\": \"one\"}\n\n{\"id\": [1, {}], \"text\": \"two\\n\\u00e9\"}\r\n{\"text\": \"\"}\n{\"text\": "
        "\"last\"}",
        "\x03{\"text\": 5}\n",
        "\x05{\"text\": \"a\"} x\n{\"nothing\": 0}",
        "\x01\xEF\xBB\xBF{\"text\": \"\xC3\"}",
        "\x02"
        "a document\n\nanother one\n\n\n\nthird \xC3\xA9\xE4\xB8\xAD 12",
        std::string("\x04"
                    "abc\0def\0\0ghi",
                    13),
        "\x08words and  words\nfar apart",
        "\x0Axyxyxyx"};
}

struct Outcome {
    std::vector<uint16_t> tokens;
    std::vector<uint64_t> documents;
    uint64_t text_bytes = 0, file_bytes = 0;
    std::string error;
};

static Outcome outcome(const std::string& path, bool jsonl, const std::string& separator, size_t block_bytes,
                       size_t input) {
    static const Tokenizer tokenizer = Tokenizer::bytes();
    const EncodeText append = encoders_of(tokenizer, 1)[0];
    Outcome o;
    MemoryLimit limit(input + block_bytes, 32 << 10, 400);
    const UseBlock use = [&](std::unique_ptr<TokenBlock> block) {
        encode_block(*block, tokenizer.end_of_text, append);
        if (block->bad_lines.count) fail("%s", block->bad_lines.first);
        for (const size_t at : block->documents) o.documents.push_back(o.tokens.size() + at);
        o.tokens.insert(o.tokens.end(), block->tokens.begin(), block->tokens.end());
        o.text_bytes += block->text_bytes, o.file_bytes += block->bytes.size();
    };
    o.error = refusal([&] {
        TextInput input;
        input.path = path;
        TextFile text(input, "tokenize --in");
        if (jsonl) read_jsonl(text, "text", block_bytes, use);
        else read_text(text, separator, block_bytes, tokenizer.pre_tokenizer, use);
    });
    return o;
}

static std::vector<std::string> split(const std::string& text, const std::string& separator) {
    std::vector<std::string> parts;
    for (size_t begin = 0;;) {
        const size_t end = separator.empty() ? std::string::npos : text.find(separator, begin);
        parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
        if (end == std::string::npos) return parts;
        begin = end + separator.size();
    }
}

static void fuzz_one(const std::string& input) {
    if (input.empty()) return;
    const bool jsonl = input[0] & 1;
    const char* const separators[] = {"\\n\\n", "\\0", "", "xyx"};
    const std::string separator = read_separator(separators[input[0] >> 1 & 3]), text = input.substr(1);
    refusal([&] { read_separator(text.substr(0, 20)); });
    const std::string path = write_memory_file("input", text);
    const Outcome whole = outcome(path, jsonl, separator, 1 << 10, text.size()),
                  blocks = outcome(path, jsonl, separator, 1 + (input[0] >> 3 & 31), text.size());
    EXPECT(whole.error == blocks.error);
    if (!whole.error.empty()) return;
    EXPECT(whole.tokens == blocks.tokens && whole.documents == blocks.documents &&
           whole.text_bytes == blocks.text_bytes);
    const size_t mark = text.compare(0, 3, "\xEF\xBB\xBF") == 0 ? 3 : 0;  // a byte order mark, which is skipped
    std::vector<uint16_t> expected;
    for (const std::string& part : split(text.substr(mark), jsonl ? "\n" : separator)) {
        std::string document = part;
        if (jsonl)
            document = part.find_first_not_of(" \t\r") == std::string::npos
                           ? ""
                           : parse_json(part, "line").string("text", "line");
        if (document.empty()) continue;
        expected.push_back(0);
        for (const char c : document) expected.push_back(static_cast<unsigned char>(c));
    }
    EXPECT(whole.tokens == expected);
}

}  // namespace lines_target

// ---------------------------------------------------------------------------------------------------------------------
// A vocabulary like GPT-2's with a few merges, in each of the file formats, and the checks that every accepted
// vocabulary must pass. The first byte chooses the format; vocab.bpe and encoder.json are split at the first byte 0xFF.
namespace vocabulary_target {

static const int size = 259;  // of two merges
using Merges = decltype(NaiveBpe::merges);

// Every token encodes to itself, decoding gives any text back, and the vocabulary reads the same from another file.
static void check_vocabulary(const Tokenizer& t) {
    EXPECT(t.vocab_size() == size && t.end_of_text == size - 1);
    MergeScratch scratch;
    std::string all;
    std::vector<uint16_t> ids;
    for (int id = 0; id < size - 1; id++) {
        const std::string& token = t.tokens[size_t(id)];
        if (id >= 256) {
            ids.clear();
            t.merge_piece(token.data(), token.size(), scratch, ids);
            EXPECT(ids.size() == 1 && ids[0] == id);
        }
        all += token;
    }
    EXPECT(t.decode(t.encode(all)) == all);
    NaiveBpe same;
    same.bytes.assign(t.tokens.begin(), t.tokens.begin() + 256);
    for (int id = 256; id < size - 1; id++) same.merges.push_back({t.tokens[size_t(id)], ""});
    write_memory_file("other.tiktoken", lines_text(same.tiktoken_lines()));
    const Tokenizer other = Tokenizer::gpt2(memory_folder().path, size);
    EXPECT(other.tokens == t.tokens && other.encode(all) == t.encode(all));
}

static std::vector<std::string> seeds() {
    std::vector<std::string> all = {"\x02IQ== 0\r\n", "\x02I=Q= 0\n",
                                    '\0' + std::string("a b\nab ab\n\xFF{\"a\": 64}")};
    for (const Merges& merges :
         {Merges{{"a", "b"}, {" ", "ab"}}, Merges{{"\xC3", "\xA9"}, {"\n", "\n"}}, Merges{{"a", "b"}, {"a", "b"}}}) {
        NaiveBpe bpe;
        bpe.merges = merges;
        all.push_back('\0' + lines_text(bpe.merge_lines()) + "\xFF{" + lines_text(bpe.id_entries(), ", ", "}"));
        all.push_back('\1' + bpe.llmc());
        all.push_back('\2' + lines_text(bpe.tiktoken_lines()));
    }
    for (size_t i = 3; i < 6; i++) all.push_back(all[i].substr(0, all[i].size() - 1));
    NaiveBpe old;
    old.merges = {{"a", "b"}, {" ", "ab"}};
    all.push_back('\1' + old.llmc(1));
    return all;
}

static void fuzz_one(const std::string& input) {
    static const TempFolder bpe, llmc, ranks;
    if (input.empty()) return;
    const std::string text = input.substr(1);
    const TempFolder& folder = input[0] == 0 ? bpe : input[0] == 1 ? llmc : ranks;
    if (input[0] == 0) {
        const size_t cut = std::min(text.find('\xFF'), text.size());
        write_file(bpe.file("vocab.bpe"), text.substr(0, cut));
        write_file(bpe.file("encoder.json"), cut < text.size() ? text.substr(cut + 1) : "");
    } else if (input[0] == 1) {
        write_file(llmc.file("gpt2_tokenizer.bin"), text);
    } else {
        write_file(ranks.file("r50k_base.tiktoken"), text);
    }
    Tokenizer t;
    {
        MemoryLimit limit(text.size(), 160 << 10, input[0] == 0 ? 400 : 50);
        if (!accepts([&] { t = Tokenizer::gpt2(folder.path, size); })) return;
    }
    check_vocabulary(t);
}

}  // namespace vocabulary_target

const std::vector<Target> TARGETS = {{"json", json_target::seeds, json_target::fuzz_one},
                                     {"safetensors", safetensors_target::seeds, safetensors_target::fuzz_one},
                                     {"manifest", manifest_target::seeds, manifest_target::fuzz_one},
                                     {"config", config_target::seeds, config_target::fuzz_one},
                                     {"shards", shards_target::seeds, shards_target::fuzz_one},
                                     {"lines", lines_target::seeds, lines_target::fuzz_one},
                                     {"vocabulary", vocabulary_target::seeds, vocabulary_target::fuzz_one}};
