// lines.cpp: the input as a .txt or .jsonl for the verb tokenize, read in blocks of a few bytes and in one block:
// tokens, documents and errors must be the same, and the documents those of the input. The first byte chooses the kind
// of file, the separator and the size of the blocks.
#include "../../lib/data/tokenize.h"
#include "../../tokenizer.h"
#include "fuzz.h"

static const MemoryFile file;

std::vector<std::string> seeds() {
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
    const Encoding encoding(tokenizer);
    const EncodeText append = encoding.make_encoder();
    Outcome o;
    MemoryLimit limit(input + block_bytes, 32 << 10, 400);
    const UseBlock use = [&](std::unique_ptr<TokenBlock> block) {
        encode_block(*block, encoding.end_of_text, append);
        if (!block->bad_lines.empty()) text_of_line(*block, block->bad_lines[0]);  // throws
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

void fuzz_one(const std::string& input) {
    if (input.empty()) return;
    const bool jsonl = input[0] & 1;
    const char* const separators[] = {"\\n\\n", "\\0", "", "xyx"};
    const std::string separator = read_separator(separators[input[0] >> 1 & 3]), text = input.substr(1);
    refusal([&] { read_separator(text.substr(0, 20)); });
    const std::string& path = file.fill(text);
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
