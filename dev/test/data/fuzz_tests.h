// fuzz_tests.h: what the fuzz targets of dev/fuzz/ found, and the promises they hold the readers to, as tests that need
// no fuzzer: messages that are one printable line, memory in proportion to the file, paths that stay in their folder.
#pragma once
#include "../../../lib/data/tokenize.h"
#include "../../../dataloader.h"
#include "../../../tokenizer.h"
#include "../program/program.h"

#include <sys/mman.h>

TEST(messages_are_one_printable_line) {
    const auto shown = [](const std::string& text) { return error_of([&] { fail("%s", text); }); };
    CHECK_EQUAL(shown("a\nb\r\tc\x1b[31m\x7F"), "a\\x0ab\\x0d\\x09c\\x1b[31m\\x7f");
    CHECK_EQUAL(shown("caf\xC3\xA9 \xE4\xB8\xAD \xF0\x9F\x98\x80"), "caf\xC3\xA9 \xE4\xB8\xAD \xF0\x9F\x98\x80");
    CHECK_EQUAL(shown("\xC2\x85|\xC2\xA0|\xE2\x80\xA8|\xE2\x80\xAE|\xE2\x81\xA6|\xEF\xBB\xBF"),
                "\\xc2\\x85|\xC2\xA0|\\xe2\\x80\\xa8|\\xe2\\x80\\xae|\\xe2\\x81\\xa6|\\xef\\xbb\\xbf");
    CHECK_EQUAL(shown("\xFF\xC3 \xE4\xB8|\xED\xA0\x80"), "\\xff\\xc3 \\xe4\\xb8|\\xed\\xa0\\x80");
    // A long one loses its middle and no half character is left at the gap.
    CHECK_EQUAL(shown(std::string(2000, 'x')), std::string(2000, 'x'));
    const std::string long_text = shown("begin" + std::string(1000000, 'x') + "end");
    CHECK_EQUAL(long_text.size(), size_t(2005));
    CHECK(long_text.compare(0, 6, "beginx") == 0 && long_text.compare(long_text.size() - 4, 4, "xend") == 0);
    for (size_t before = 0; before < 4; before++) {
        std::string text(before, 'x');
        while (text.size() < 5000) text += "\xF0\x9F\x98\x80";
        CHECK(!holds(shown(text), "\\x"));
        CHECK(!holds(shown(text + std::string(before, 'y')), "\\x"));
    }
    CHECK(shown(std::string(5000, '\x80')).size() <= 4 * 2010);

    // Wherever the text comes from: a path, a key, a value.
    TempFolder folder;
    CHECK_FAILS(1, "no\\x0awhere", read_file(folder.file("no\nwhere")));
    CHECK_FAILS(1, "file: k\\x1b]0;title\\x07: byte 26: found null",
                parse_json("{\"k\\u001b]0;title\\u0007\": null}", "file").integer("k\x1b]0;title\x07", "file"));
    write_file(
        folder.file("t.safetensors"),
        program::safetensors_bytes("{\"a\\nb\":{\"dtype\":\"F\\n\",\"shape\":[],\"data_offsets\":[0,4]}}", "abcd"));
    CHECK_FAILS(1, "a\\x0ab: dtype F\\x0a is unknown", SafeTensors(folder.file("t.safetensors")));
}

TEST(json_of_too_many_values_is_refused) {
    std::string text = "[";
    for (size_t i = 1; i < JsonParser::max_values; i++) text += "0,";
    text.back() = ']';
    CHECK_EQUAL(parse_json(text, "file").items.size(), JsonParser::max_values - 1);
    text.back() = ',';
    CHECK_FAILS(1, "file: byte 2097151: JSON of more than 1048576 values", parse_json(text + "0]", "file"));
}

TEST(safetensors_at_odd_places_are_read_once) {
    TempFolder folder;
    const std::string path = folder.file("t.safetensors");
    float x = 1.5f;
    const std::string number(reinterpret_cast<const char*>(&x), 4);
    write_file(path, program::safetensors_bytes("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                                                "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]}}",
                                                "a" + number));
    const SafeTensors file(path);
    const TensorView& b = file.get("b", "F32", {1});
    REQUIRE(reinterpret_cast<uintptr_t>(b.data) % 4 == 0);
    CHECK_EQUAL(*static_cast<const float*>(b.data), 1.5f);

    // Tensors that claim the same bytes are refused before any of them is copied: 2000 copies of 1 MB would be 2 GB.
    std::string header = "{";
    for (int i = 0; i < 2000; i++)
        header += format_text("%s\"%d\":{\"dtype\":\"F32\",\"shape\":[262144],\"data_offsets\":[1,1048577]}",
                              i ? "," : "", i);
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    write_file(path, program::safetensors_bytes(header, std::string((1 << 20) + 1, 'x')));
    program::AddressLimit limit(64 << 20);
    CHECK_FAILS(1, "t.safetensors: tensors overlap or leave a hole at byte 0", SafeTensors{path});
}

// safetensors: run_safetensors_reader_refuses_damaged_files.
TEST(hostile_lengths_allocate_nothing) {
    TempFolder folder;
    const std::string shard = folder.file("shard");
    int32_t head[257] = {SHARD_MAGIC, 1, INT32_MAX};
    write_file(shard, std::string(reinterpret_cast<const char*>(head), sizeof head));
    uint32_t llmc[256] = {20240328, 2, ~0u, ~0u - 1};
    write_file(folder.file("gpt2_tokenizer.bin"), std::string(reinterpret_cast<const char*>(llmc), sizeof llmc));
    write_file(folder.file("manifest.json"), manifest_text(7, {{"model.safetensors", uint64_t(INT64_MAX), 0}}, "{}"));
    const program::AddressLimit limit(64 << 20);
    CHECK(mmap(nullptr, 1 << 30, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);  // the limit works
    CHECK_FAILS(1, "shard", open_shard(shard));
    CHECK_FAILS(1, "gpt2_tokenizer.bin", Tokenizer::gpt2(folder.path));
    CHECK_FAILS(1, "model.safetensors", open_checkpoint(folder.path));
}
