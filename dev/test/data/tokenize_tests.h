// tokenize_tests.h: the verb `tokenize`: shards read back by hand.
#pragma once
#include "../../../lib/data/bpe_trainer.h"
#include "tokenizer_tests.h"

// ---------------------------------------------------------------------------------------------------------------------
// tokenize.

struct TokenizeFixture {
    TempFolder folder;
    TokenizeOptions options;

    TokenizeFixture() {
        write_openai(folder.path, small_bpe().merge_lines(), small_bpe().id_entries());
        options.tokenizer = "bytes";  // gpt2 at its real size needs the published vocabulary
        options.out = folder.file("shards/x");
        options.threads = 2;
        options.val_fraction = 0;
        options.prints_summary = false;
    }
    std::string input(const std::string& name, const std::string& text) {
        write_file(folder.file(name), text);
        options.in = {folder.file(name)};
        return folder.file(name);
    }
    // What reading the inputs as bytes counts.
    TokenizeCounts counts(const std::string& separator = "") {
        const Tokenizer bytes = Tokenizer::bytes();
        return encode_files("tokenize", options, TextInputs(options.in, "tokenize"), separator, bytes.end_of_text,
                            encoders_of(bytes, options.threads), [](const TokenBlock&) {});
    }
    // All shards of a split one after the other, checked field by field.
    std::vector<uint16_t> shards(const std::string& split, int first_index, size_t expected_files) {
        std::vector<uint16_t> tokens;
        size_t files = 0;
        for (int i = first_index;; i++, files++) {
            const std::string path = options.out + format_text("_%s_%06d.bin", split, i);
            if (!file_exists(path)) break;
            const std::string bytes = read_file(path);
            int32_t header[256];
            if (bytes.size() < sizeof header) fail("%s is shorter than a header", path);
            std::memcpy(header, bytes.data(), sizeof header);
            CHECK_EQUAL(header[0], 20240520);
            CHECK_EQUAL(header[1], 1);
            CHECK_EQUAL(header[3], options.tokenizer == "bytes" ? 256 : 50257);
            // CRC-32C of GPT-2's tokens in the order of encoder.json, each ended by a zero byte; from Python.
            CHECK_EQUAL(uint32_t(header[4]), options.tokenizer == "bytes" ? 0u : 0x85b6f825u);
            for (int j = 5; j < 256; j++) CHECK(header[j] == 0);
            CHECK_EQUAL(bytes.size(), 1024 + 2 * size_t(header[2]));
            CHECK(header[2] > 0 && header[2] <= options.shard_tokens);
            for (size_t j = 1024; j + 1 < bytes.size(); j += 2)
                tokens.push_back(uint16_t(uint8_t(bytes[j]) | uint8_t(bytes[j + 1]) << 8));
        }
        CHECK_EQUAL(files, expected_files);
        return tokens;
    }
    // The tokens of the byte tokenizer as text, end-of-text as '|'.
    static std::string text_of(const std::vector<uint16_t>& tokens) {
        std::string text;
        for (const uint16_t token : tokens) text += token ? char(token) : '|';
        return text;
    }
    std::string train(size_t files = 1) { return text_of(shards("train", 1, files)); }
    std::string val(size_t files = 1) { return text_of(shards("val", 0, files)); }
};

TEST(tokenize_one_document_is_cut_at_a_token) {
    TokenizeFixture f;
    f.input("a.txt", "0123456789abcdefghi");  // 20 tokens with end-of-text
    f.options.val_fraction = 0.25;
    tokenize_files(f.options);
    CHECK_EQUAL(f.train(), "|0123456789abcd");
    CHECK_EQUAL(f.val(), "|efghi");
    const std::string first = f.options.out;
    CHECK_FAILS(1, "x_train_000001.bin exists already", tokenize_files(f.options));
    std::remove((first + "_train_000001.bin").c_str());
    CHECK_FAILS(1, "x_val_000000.bin exists already", tokenize_files(f.options));
    CHECK_EQUAL(glob_files(first + "*").size(), size_t(1));  // and nothing else is left
    f.options.out = f.folder.file("shards/y[1]*");           // a prefix is no pattern
    f.options.val_fraction = 0, f.options.shard_tokens = 8;
    tokenize_files(f.options);
    CHECK_EQUAL(f.train(3), "|0123456789abcdefghi");
    CHECK_EQUAL(f.val(0), std::string());
    CHECK_FAILS(1, "train_000001.bin exists already", tokenize_files(f.options));
}

// Two writers of one prefix would mix their shards; of one that was killed nothing is in the way.
TEST(tokenize_has_its_prefix_for_itself) {
    TokenizeFixture f;
    f.input("a.txt", "text");
    make_folders(f.folder.file("shards"));
    const std::string lock = f.options.out + ".lock";
    {
        const PrefixLock other(f.folder.file("shards/../shards/x"));
        CHECK_FAILS(1, "another tokenize writes shards of the same name", tokenize_files(f.options));
        CHECK(file_exists(lock));
    }
    write_file(lock, "");
    for (const char* left : {"_train_000001.bin.tmp", "_val_000007.bin.tmp"}) write_file(f.options.out + left, "half");
    tokenize_files(f.options);
    CHECK_EQUAL(f.train(), "|text");
    CHECK_EQUAL(glob_files(f.options.out + "*").size(), size_t(1));
    // Files of others stay as they are.
    f.options.out = f.folder.file("shards/y");
    write_file(f.options.out + ".lock", "theirs"), write_file(f.options.out + "_tokens.tmp", "theirs");
    const std::string other = f.options.out + "_val_2_train_000001.bin.tmp";
    write_file(other, "theirs");
    CHECK_FAILS(1, "y.lock is no lock of this program", tokenize_files(f.options));
    std::remove((f.options.out + ".lock").c_str());
    tokenize_files(f.options);
    CHECK_EQUAL(read_file(f.options.out + "_tokens.tmp"), "theirs");
    CHECK_EQUAL(read_file(other), "theirs");
}

TEST(tokenize_splits_documents_at_the_separator) {
    TokenizeFixture f;
    f.input("a.txt", "one\\n\n\t--\ntwo\n\t--\n\n\t--\nthree\n\t--\n");  // the third is empty, and so is what follows
                                                                         // the last separator
    f.options.split_documents = "\\n\\t--\\n";
    tokenize_files(f.options);
    CHECK_EQUAL(f.train(), "|one\\n|two|three");
    CHECK_EQUAL(read_separator("a\\\\n\\0\\r"), std::string("a\\n\0\r", 5));
    CHECK_FAILS(2, "the backslash at byte 1 begins none", read_separator("a\\x"));
    CHECK_FAILS(2, "the backslash at byte 0 begins none", read_separator("\\"));
    CHECK_FAILS(2, "not valid UTF-8", read_separator("a\x80"));
}

TEST(tokenize_reads_json_lines) {
    TokenizeFixture f;
    const std::string jsonl =
        "{\"id\": 1, \"text\": \"a\\\"b\\nc\\u00e9\"}\n\r\n{\"text\":\"\"}\n"
        "{\"text\": \"\\ud83d\\ude00\", \"more\": [1, {}]}\r\n{\"text\": \"end\"}";
    f.input("a.jsonl", jsonl);
    write_file(f.folder.file("b.txt"), "text file");
    f.options.in.push_back(f.folder.file("b.txt"));
    for (const size_t block_bytes : {1, 7, 1 << 20}) {
        f.options.block_bytes = block_bytes;
        f.options.out = f.folder.file("x" + std::to_string(block_bytes));
        tokenize_files(f.options);
        CHECK_EQUAL(f.train(), "|a\"b\nc\xC3\xA9|\xF0\x9F\x98\x80|end|text file");
    }
}

// The byte order mark of UTF-8, which Windows' editors write, is no text; counted it is, where a line is said to be
// wrong.
TEST(tokenize_passes_over_a_byte_order_mark) {
    TokenizeFixture f;
    f.input("a.txt", "\xEF\xBB\xBFone");
    f.options.in.push_back(f.folder.file("b.jsonl"));
    write_file(f.options.in[1], "\xEF\xBB\xBF{\"text\": \"two\"}");
    tokenize_files(f.options);
    CHECK_EQUAL(f.train(), "|one|two");
    f.options.out = f.folder.file("y");
    write_file(f.options.in[1], "\xEF\xBB");
    CHECK_FAILS(1, "byte 0: not valid JSON: found byte 0xef", tokenize_files(f.options));
    write_file(f.options.in[1], "\xEF\xBB\xBF{\"text\": \"two\"}\n[]\n");
    CHECK_FAILS(1, "line 2: byte 19: found an array", tokenize_files(f.options));
}

// However the blocks fall, file, line and byte of the first bad line are told.
TEST(tokenize_bad_json_line_is_named) {
    TokenizeFixture f;
    std::string good;
    for (int i = 0; i < 100; i++) good += "{\"text\": \"document " + std::to_string(i) + "\"}\n";
    struct {
        std::string line;
        const char* field;
        size_t byte;
        const char* words;
    } const cases[] = {// the byte within the line
                       {"{\"text\": \"x\"", "", 12, "not valid JSON: found the end of the text, expected ',' or '}'"},
                       {"{\"txt\": \"x\"}", "", 0, "the object has no key \"text\""},
                       {" {\"text\": 5}", "text: ", 10, "found a number, expected a string"},
                       {"[]", "", 0, "found an array, expected an object"},
                       {"\xFF", "", 0, "not valid JSON: found byte 0xff, expected a value"}};
    for (const auto& c : cases)
        for (const size_t block_bytes : {1, 100, 1 << 20}) {
            const std::string path = f.input("bad.jsonl", good + c.line + "\n" + good + "{\"second error\n");
            f.options.in = {f.input("good.jsonl", good), path};
            f.options.block_bytes = block_bytes, f.options.threads = 4;
            const std::string expected =
                path + ": line 101: " + c.field + format_text("byte %d: ", good.size() + c.byte) + c.words;
            CHECK_FAILS(1, expected.c_str(), tokenize_files(f.options));
        }
    CHECK(glob_files(f.options.out + "*").empty());  // neither shards nor temporary files
}

TEST(tokenize_takes_folders_and_patterns) {
    TokenizeFixture f;
    const auto place = [&](const std::string& name, const std::string& text) { return f.input("in/" + name, text); };
    for (const char* sub : {"in", "in/deep", "in/deep/er", "in/.git", "none"})
        std::filesystem::create_directory(f.folder.file(sub));
    place("B.TXT", "two"), place("a.txt", "four"), place("deep/c.JsonL", "{\"text\": \"five\"}");
    place("deep/er/d.Txt", "six"), place("README.md", "no"), place("Atxt", "no"), place(".hidden.txt", "no");
    place(".git/e.txt", "no"), place("C.jsonL", "{\"text\": \"three\"}");
    std::filesystem::create_directory_symlink("..", f.folder.file("in/deep/up"));
    int runs = 0;
    const auto tokens = [&](const std::vector<std::string>& in) {
        f.options.in = in, f.options.out = f.folder.file("out" + std::to_string(runs++));
        tokenize_files(f.options);
        return f.train();
    };
    const std::string in = f.folder.file("in");
    CHECK_EQUAL(tokens({in}), "|two|three|four|five|six");
    CHECK_EQUAL(tokens({in + "/"}), "|two|three|four|five|six");
    CHECK_EQUAL(tokens({in + "/a.txt", in + "/d*"}), "|four|five|six");
    CHECK_EQUAL(tokens({in + "/*.[tT]*"}), "|two|four");
    CHECK_EQUAL(tokens({in + "/*"}), "|two|three|four|five|six");
    CHECK_EQUAL(TextInputs({in}, "tokenize").passed_over.size(), 3u);  // README.md, Atxt, deep/up
    f.options.in = {f.folder.file("none")}, f.options.out = f.folder.file("refused");
    CHECK_FAILS(2, "no file in this folder or below ends in .txt or .jsonl", tokenize_files(f.options));
    f.options.in = {in + "/*.txt", in + "/deep/../a.txt"};
    CHECK_FAILS(2, "twice", tokenize_files(f.options));
    f.options.in = {in + "/*.csv"};
    CHECK_FAILS(1, "no file matches this pattern", tokenize_files(f.options));
    CHECK_EQUAL(tokens({in + "/*.md"}), "|no");  // named, it is text
    CHECK_EQUAL(tokens({in + "/README.md"}), "|no");
    f.options.out = f.folder.file("refused"), f.options.in = {in + "/A*"};
    CHECK_FAILS(1, "no file among them ends in .txt", tokenize_files(f.options));
    f.options.in = {"-", "-"};
    CHECK_FAILS(2, "stdin twice", tokenize_files(f.options));
}

// The files that gzip -n and zstd make of "text one\n".
inline const std::string GZIP_TEXT(
    "\x1f\x8b\x08\0\0\0\0\0\0\x03\x2b\x49\xad\x28\x51\xc8\xcf\x4b\xe5\x02\0\xb4\xa1\xeb"
    "\x84\x09\0\0\0",
    29),
    ZSTD_TEXT("\x28\xb5\x2f\xfd\x04\x58\x49\0\0text one\n\xd9\xb1\x3c\xdc", 22);

// One rule for whatever cannot be read: an error that names it and --skip-bad, or, with that, a file or a line less.
// Nobody waits for a pipe that nobody writes to.
TEST(tokenize_passes_over_what_is_bad) {
    TokenizeFixture f;
    make_folders(f.folder.file("in"));
    f.input("in/a.txt", "one");
    const std::string in = f.folder.file("in"), gone = in + "/gone.txt", pipe = in + "/pipe.txt";
    const std::pair<const char*, std::function<void()>> bad[] = {
        {"gone.txt: No such file", [&] { CHECK_EQUAL(symlink("nowhere", gone.c_str()), 0); }},
        {"b.txt is the file ", [&] { CHECK_EQUAL(symlink("a.txt", (in + "/b.txt").c_str()), 0); }},
        {"gone.txt is a pipe or a device", [&] { CHECK_EQUAL(symlink("/dev/zero", gone.c_str()), 0); }},
        {"pipe.txt is a pipe", [&] { CHECK_EQUAL(mkfifo(pipe.c_str(), 0600), 0); }},
        {"zcat", [&] { write_file(in + "/b.txt", GZIP_TEXT); }},
        {"zstdcat", [&] { write_file(in + "/b.jsonl", ZSTD_TEXT); }},
        {"zstdcat", [&] { write_file(in + "/b.jsonl.ZST", "by its name"); }},
        {"xzcat", [&] { write_file(in + "/b.txt.xz", ""); }},
        {"UTF-16", [&] { write_file(in + "/c.txt", std::string("\xFF\xFEw\0", 4)); }}};
    f.options.in = {in};
    size_t found = 0;
    for (const auto& [words, make] : bad) {
        f.options.skip_bad = false, f.options.out = f.folder.file("x" + std::to_string(found++));
        for (const std::string& made : glob_files(in + "/*"))
            if (made != in + "/a.txt") remove_tree(made);
        make();
        CHECK_FAILS(1, words, tokenize_files(f.options));
        CHECK_FAILS(1, "; --skip-bad passes over such files", tokenize_files(f.options));
        f.options.in = {in + "/*"};
        CHECK_FAILS(1, words, tokenize_files(f.options));
        f.options.in = {in}, f.options.skip_bad = true;
        tokenize_files(f.options);
        CHECK_EQUAL(f.train(), "|one");
        CHECK_EQUAL(TextInputs({in, f.folder.file("none.txt")}, "tokenize", true).bad.size(), 2u);
    }
    f.input("l.jsonl", "{\"text\": \"two\"}\n{\"text\": 2}\n\xFF\n{}\n{\"text\": \"three\"}\n[");
    CHECK_EQUAL(f.counts().bad_lines.count, 4u);
    f.options.out = f.folder.file("lines");
    tokenize_files(f.options);
    CHECK_EQUAL(f.train(), "|two|three");
    f.options.skip_bad = false, f.options.out = f.folder.file("refused");
    CHECK_FAILS(1, "line 2", tokenize_files(f.options));
    CHECK_FAILS(1, "; --skip-bad passes over such lines", tokenize_files(f.options));
    // What is passed over by its name has a remedy too.
    for (const char* name : {"in/t.parquet", "in/n.md", "in/o.md", "in/e"}) write_file(f.folder.file(name), "");
    CHECK_EQUAL(
        TextInputs({in}, "tokenize", true).kinds_passed_over(),
        "1 without an ending, 2 .md (as text: --in '*.md'), 1 .parquet (data/parquet_to_jsonl.py makes text of it)");
    f.options.in = {in + "/t.parquet"};
    CHECK_FAILS(1, ("data/parquet_to_jsonl.py " + in + "/t.parquet").c_str(), tokenize_files(f.options));
}

// What is no error and may not be meant is counted.
TEST(tokenize_finds_odd_bytes) {
    TokenizeFixture f;
    f.input("a.txt", "fine");
    std::string text = "\xEF\xBB\xBF";
    for (int i = 0; i < 20; i++) text += "caf\xC3\xA9 caf\xE9 ";
    write_file(f.folder.file("b.txt"), text + std::string("\0\0", 2));
    f.options.in.push_back(f.folder.file("b.txt"));
    for (const size_t block_bytes : {9, 1 << 20}) {
        f.options.block_bytes = block_bytes;
        const TokenizeCounts counts = f.counts("\n");
        CHECK_EQUAL(counts.invalid_utf8.words(), "20 times, the first in " + f.folder.file("b.txt") + " at byte 12");
        CHECK_EQUAL(counts.nul.words(),
                    "2 times, the first in " + f.folder.file("b.txt") + format_text(" at byte %d", text.size()));
        CHECK_EQUAL(counts.bytes, 4 + text.size() + 2);
        CHECK_EQUAL(counts.text_bytes, counts.bytes - 3);
        CHECK_EQUAL(counts.separators, 0u);
    }
}

// How many merges there must be is told by the last id.
TEST(tokenize_refuses_vocabularies_of_other_sizes) {
    TokenizeFixture f;
    f.input("a.txt", "abc");
    f.options.tokenizer = "gpt2", f.options.vocab_dir = f.folder.path;
    const std::string ids = f.folder.file("encoder.json"), all = read_file(ids);
    write_file(ids, all.substr(0, all.rfind(' ')) + " 50256}");
    CHECK_FAILS(1, "vocab.bpe: 70 merges, expected 50000", tokenize_files(f.options));
    write_file(ids, all.substr(0, all.rfind(' ')) + " 65536}");
    CHECK_FAILS(1, "<|endoftext|>, the last token, has id 65536, expected 256 to 65535", tokenize_files(f.options));
    CHECK(glob_files(f.options.out + "*").empty());
}

// As many documents as come nearest to the share, from the last one on; the end of one where they are long.
TEST(validation_takes_the_nearest_number_of_documents) {
    const auto taken = [](const std::vector<uint64_t>& documents, double fraction) {
        std::vector<size_t> order(documents.size());
        std::iota(order.rbegin(), order.rend(), size_t(0));
        std::string text;
        for (const ValidationRange& r : validation_ranges(100, documents, order, fraction))
            text += format_text("%s%d-%d", r.is_cut ? " cut " : " ", int(r.begin), int(r.end));
        return text;
    };
    const std::vector<uint64_t> documents = {0, 10, 50, 60, 90};  // of 100 tokens
    CHECK_EQUAL(taken(documents, 0), std::string());
    CHECK_EQUAL(taken(documents, 1), " 0-10 10-50 50-60 60-90 90-100");
    CHECK_EQUAL(taken(documents, 0.01), " cut 99-100");  // ten times what was asked for is too much
    CHECK_EQUAL(taken(documents, 0.1), " 90-100");
    CHECK_EQUAL(taken(documents, 0.24), " cut 76-90 90-100");
    CHECK_EQUAL(taken(documents, 0.26), " 60-90 90-100");
    CHECK_EQUAL(taken(documents, 0.5), " 50-60 60-90 90-100");
    CHECK_EQUAL(taken(documents, 0.6), " 50-60 60-90 90-100");
    CHECK_EQUAL(taken(documents, 0.99), " 10-50 50-60 60-90 90-100");  // something is left for training
    CHECK_EQUAL(taken(documents, 0.001), " 90-100");
    CHECK_EQUAL(taken({0}, 0.001), std::string());
    CHECK_EQUAL(taken({0, 50}, 0.24), " cut 76-100");
    CHECK_EQUAL(taken({0, 50}, 0.3), " 50-100");
    for (const double fraction : {0.01, 0.5, 0.99})
        CHECK_EQUAL(taken({0}, fraction), format_text(" cut %d-100", int(std::lround(100 - 100 * fraction))));
}

// Ten kinds of text, of which the last by name is another: validation has documents of it and of the others, the same
// ones whether they come in eleven files, in one, or in the other order; with another seed others.
TEST(validation_is_drawn_whatever_the_files) {
    TokenizeFixture f;
    std::vector<std::string> files(11);
    for (int i = 0; i < 220; i++) {
        const std::string text = format_text("%s%03d", i % 11 < 10 ? "a" : "z", i);
        files[size_t(i) % 11] += "{\"text\": \"" + text + std::string(size_t(i % 7), '.') + "\"}\n";
    }
    const auto name = [&](size_t i) { return f.folder.file(format_text("%s%02d.jsonl", i < 10 ? "a" : "z", i)); };
    std::string all, backwards;
    for (size_t i = 0; i < files.size(); i++) {
        write_file(name(i), files[i]);
        all += files[i], backwards = files[i] + backwards;
    }
    write_file(f.folder.file("all.jsonl"), all), write_file(f.folder.file("backwards.jsonl"), backwards);
    f.options.val_fraction = 0.2;
    const auto drawn = [&](const std::vector<std::string>& in) {
        f.options.in = in;
        tokenize_files(f.options);
        std::vector<std::set<std::string>> split;
        for (const std::string& tokens : {f.train(), f.val()}) {
            split.emplace_back();
            for (size_t at = 0, end; at < tokens.size(); at = end) {
                end = std::min(tokens.find('|', at + 1), tokens.size());
                CHECK(split.back().insert(tokens.substr(at, end - at)).second);
            }
        }
        for (const std::string& file : glob_files(f.options.out + "*")) std::remove(file.c_str());
        CHECK_EQUAL(split[0].size() + split[1].size(), size_t(220));
        return split[1];
    };
    std::vector<std::string> each;
    for (size_t i = 0; i < files.size(); i++) each.push_back(name(i));
    const std::set<std::string> val = drawn(each);
    const auto of_z = std::count_if(val.begin(), val.end(), [](const std::string& text) { return text[1] == 'z'; });
    CHECK(val.size() > 35 && val.size() < 53 && of_z >= 1 && of_z <= 12);  // 44, and 4 of them
    CHECK(drawn({f.folder.file("all.jsonl")}) == val);
    CHECK(drawn({f.folder.file("backwards.jsonl")}) == val);
    f.options.seed++;
    CHECK(drawn(each) != val);
}

// The marker of others for the end of a document is counted wherever blocks end, but not where it is the separator.
TEST(tokenize_counts_end_of_text_in_the_text) {
    TokenizeFixture f;
    std::string text = "<|endoftext|>";
    for (int i = 0; i < 20; i++) text += "Once.\n<|endoftext|>\nTwice <|endoftext| >";
    f.input("a.txt", text);
    write_file(f.folder.file("b.jsonl"), "{\"text\": \"\\u003c|endoftext|> and <|endoftext|>\"}\n{\"text\": \"\"}\n");
    f.options.in.push_back(f.folder.file("b.jsonl"));
    for (const std::string separator : {"", "<|endoftext|>", "\n<|endoftext|>\n", "Twice"})
        for (const size_t block_bytes : {1, 9, 100, 1 << 20}) {
            f.options.block_bytes = block_bytes;
            const TokenizeCounts counts = f.counts(separator);
            const uint64_t in_txt = separator == "<|endoftext|>" ? 0 : separator[0] == '\n' ? 1 : 21;
            CHECK_EQUAL(counts.end_of_text.count, in_txt + 2);
            CHECK_EQUAL(counts.end_of_text.first, f.options.in[in_txt ? 0 : 1] + " at byte 0");
        }
}

// The same tokens whatever the threads and wherever the blocks end, and those are the documents' encoded whole.
TEST(tokenize_does_not_depend_on_threads_or_blocks) {
    const Tokenizer tokenizer = small_tokenizer();
    RandomText random(8);
    std::vector<std::string> alphabet = tricky_text();
    for (int i = 0; i < 40; i++) alphabet.push_back(i % 3 ? "ab" : "a");
    const std::string separator = "<|x|>";
    std::string text;
    std::vector<uint16_t> expected;
    for (int i = 0; i < 60; i++) {
        const std::string document = random.of(alphabet, 1 + random.below(i == 30 ? 3000 : 60));
        text += (i ? separator : "") + document;
        expected.push_back(tokenizer.end_of_text);
        Encoder(tokenizer).append(document, expected);
    }
    TokenizeFixture f;
    f.input("a.txt", text);
    for (const size_t block_bytes : {3, 16, 100, 1000, 1 << 20})
        for (const int threads : {1, 4}) {
            f.options.block_bytes = block_bytes, f.options.threads = threads;
            std::vector<uint16_t> found;
            const auto take = [&](const TokenBlock& block) {
                found.insert(found.end(), block.tokens.begin(), block.tokens.end());
            };
            encode_files("tokenize", f.options, TextInputs(f.options.in, "tokenize"), separator, tokenizer.end_of_text,
                         encoders_of(tokenizer, threads), take);
            CHECK_EQUAL(show_ids(found), show_ids(expected));
            CHECK(found == expected);
        }
}

TEST(tokenize_with_gpt2_end_to_end) {
    const std::string text_path = shared_data("fineweb_edu_sample.txt"),
                      ids_path = shared_data("fineweb_edu_sample.gpt2.u16");
    if (text_path.empty() || ids_path.empty() || shared_data("gpt2").empty())
        return skip("tokenize_with_gpt2_end_to_end: no ../shared/data with the published vocabulary");
    const std::string bytes = read_file(ids_path);
    std::vector<uint16_t> expected(1 + bytes.size() / 2, 50256);
    std::memcpy(expected.data() + 1, bytes.data(), bytes.size());
    TokenizeFixture f;
    f.options.tokenizer = "gpt2", f.options.vocab_dir = shared_data("gpt2"), f.options.in = {text_path};
    f.options.shard_tokens = 50000, f.options.val_fraction = 0.1;
    for (const int threads : {1, 4}) {
        f.options.threads = threads, f.options.block_bytes = threads == 1 ? 1 << 20 : 5000;
        f.options.out = f.folder.file("t" + std::to_string(threads));
        tokenize_files(f.options);
        std::vector<uint16_t> found = f.shards("train", 1, 3);
        const std::vector<uint16_t> val = f.shards("val", 0, 1);
        CHECK_EQUAL(val.size(), size_t(15065 + 1));
        CHECK_EQUAL(val[0], uint16_t(50256));
        found.insert(found.end(), val.begin() + 1, val.end());
        CHECK(found == expected);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// vocabulary.

// The words of these documents by the slow pre-tokeniser, merged by the naive trainer.
inline NaiveBpe naive_vocabulary(const std::vector<std::string>& documents, size_t size) {
    std::vector<std::string> words;
    for (const std::string& document : documents)
        for (const std::string& word : slow_pieces(document)) words.push_back(word);
    NaiveBpe bpe;
    bpe.train(words, size - 257, 2);
    return bpe;
}

// Every text as a .jsonl of documents, by several threads, in small blocks.
TEST(vocabulary_is_that_of_a_naive_trainer) {
    RandomText random(21);
    const std::vector<std::vector<std::string>> texts = {
        {"a"},
        {"ab cd ab cd"},                                         // three pairs of the same count
        {"\xC3\xBF\xC3\xBF zz  zz", "!!  !! \xC3\xBF\xC3\xBF"},  // ties between printable bytes and others
        {"the th", "e the", " the the"},                         // no word goes from one document into the next
        {std::string(1000, 'a')},                                // tokens have 128 bytes at most
        {std::string(100, 'a') + "b" + std::string(99, 'a'), "aaab aab aaaab"},
        {"it's we'll don't   x\r\n\r\n\tx 12 1234 \xE4\xB8\xAD\xE6\x96\x87\xE4\xB8\xAD\xE6\x96\x87 "
         "\xF0\x9F\x98\x80\xF0\x9F\x98\x80"},
        {random.of({"a", "b", "ab", "ba", " ", "\xC3\xA9"}, 1500)},
        {random.of({"a", "b", "c", "aa", " "}, 400), random.of({"a", "b", "c", "aa", " "}, 400)},
        {random.of({"x", "y", "xy", " \n", "1", "-", "\xE2\x82\xAC"}, 800)},
    };
    for (const auto& documents : texts) {
        TokenizeFixture f;
        std::string jsonl;
        for (const std::string& document : documents) jsonl += "{\"text\": " + json_quote(document) + "}\n";
        f.input("a.jsonl", jsonl);
        for (const int64_t size : {257, 258, 300, 400}) {
            const NaiveBpe naive = naive_vocabulary(documents, size_t(size));
            f.options.size = size;
            f.options.threads = int(size % 3) + 1;
            f.options.block_bytes = size_t(size) - 200;
            f.options.out = f.folder.file("v" + std::to_string(size));
            train_vocabulary(f.options);
            const std::string merges = f.options.out + "/vocab.bpe", ids = f.options.out + "/encoder.json";
            CHECK_EQUAL(read_file(merges), lines_text(naive.merge_lines()));
            CHECK_EQUAL(read_file(ids), "{" + lines_text(naive.id_entries(), ", ", "}\n"));
            const Tokenizer t = Tokenizer::gpt2(f.options.out);
            CHECK_EQUAL(size_t(t.vocab_size()), naive.size());
            CHECK_EQUAL(size_t(t.end_of_text), naive.size() - 1);
            for (const std::string& text : {documents[0], random.bytes(300)}) CHECK(t.decode(t.encode(text)) == text);
        }
    }
}

// A .txt holds any bytes, and --split-documents cuts it; what is cut into blocks counts as the whole.
TEST(vocabulary_of_any_bytes) {
    RandomText random(22);
    for (const auto& alphabet : {tricky_text(), {"\0", "\xFF", "a", "\r\n", " ", "\xC3"}}) {
        TokenizeFixture f;
        const std::vector<std::string> documents = {random.of(alphabet, 300), random.of(alphabet, 300)};
        f.input("a.txt", documents[0] + "<cut>" + documents[1]);
        f.options.split_documents = "<cut>";
        f.options.size = 320;
        f.options.block_bytes = 13;
        f.options.out = f.folder.file("v/w/");
        train_vocabulary(f.options);
        const std::string merges = f.folder.file("v/w/vocab.bpe");
        CHECK_EQUAL(read_file(merges), lines_text(naive_vocabulary(documents, 320).merge_lines()));
        const Tokenizer t = Tokenizer::gpt2(f.folder.file("v/w"));
        CHECK(t.decode(t.encode(documents[1])) == documents[1]);
    }
}

// The largest vocabulary has the largest id that a shard can hold.
TEST(vocabulary_of_all_sixteen_bits) {
    TokenizeFixture f;
    RandomText random(23);
    std::string text;
    for (int i = 0; i < 60000; i++) {
        std::string word = " ";
        for (int j = 0; j < 5; j++) word += char('a' + random.below(26));
        text += word + word;
    }
    f.input("a.txt", text);
    f.options.size = 65536;
    f.options.out = f.folder.file("v");
    train_vocabulary(f.options);
    const Tokenizer t = Tokenizer::gpt2(f.options.out);
    CHECK_EQUAL(t.vocab_size(), 65536);
    CHECK_EQUAL(t.end_of_text, uint16_t(65535));
    CHECK(t.decode(t.encode(text)) == text);
}

TEST(vocabulary_refuses_and_leaves_nothing) {
    TokenizeFixture f;
    f.options.out = f.folder.file("own");
    f.input("a.jsonl", "{\"text\": \"one\"}\n{\"text\": 2}\n");
    CHECK_FAILS(1, "a.jsonl: line 2", train_vocabulary(f.options));
    CHECK(glob_files(f.folder.file("own*")).empty());
    f.input("a.txt", "a text");
    TokenizeOptions o = f.options;
    o.out = f.folder.file("a.txt");
    CHECK_FAILS(1, "a.txt is a file", train_vocabulary(o));
    o.out = f.folder.path;
    CHECK_FAILS(1, "is not empty, it holds ", train_vocabulary(o));
    // An empty folder is taken, and what a writer that was killed left beside it is no obstacle.
    make_folders(f.options.out);
    make_folders(f.options.out + ".writing");
    write_file(f.options.out + ".writing/vocab.bpe", "half a vocabulary");
    train_vocabulary(f.options);
    CHECK_EQUAL(folder_entries(f.options.out).size(), size_t(2));
    CHECK_EQUAL(glob_files(f.options.out + "*").size(), size_t(1));
    CHECK_FAILS(1, "own is not empty", train_vocabulary(f.options));
}
