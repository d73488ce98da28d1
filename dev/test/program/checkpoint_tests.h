// checkpoint_tests.h: lib/run/checkpoint.h and the writers of lib/base/safetensors.h: checksums
// against their definition, manifests and files damaged in every way, retention against a plain
// oracle, disks that refuse. What a crash at any moment leaves is dev/crash_test's business.
#pragma once
#include <csignal>
#include <map>
#include <mutex>
#include <set>

#include <sys/resource.h>

#include "../../../lib/run/checkpoint.h"
#include "../../../lib/run/train_state.h"
#include "../harness.h"

namespace checkpoint_test {

using Lines = std::vector<std::string>;

inline Complain into(Lines& lines) {
    return [&lines](const std::string& line) { lines.push_back(line); };
}
inline Complain no_complaint() {
    return [](const std::string& line) { check_failed(__FILE__, __LINE__, "complaint: %s", line.c_str()); };
}

inline std::string bytes_of(size_t n, uint64_t seed) {
    std::string bytes(n, '\0');
    for (size_t i = 0; i < n; i++) bytes[i] = char(random_below(256, seed, random_stream(RANDOM_TEST), i));
    return bytes;
}

constexpr const char* STATE = "{\"loader\": [\"1337\", \"512\"], \"best\": 1.5, \"text\": \"\\u00e9 \\\"x\\\"\"}";

// A checkpoint of three files, of 0, 1000 and 3 bytes.
inline std::string make_checkpoint(const std::string& run, int64_t step) {
    const std::string writing = begin_checkpoint(run, step);
    std::vector<FileRecord> files;
    files.push_back(write_text_file(writing + "/empty", ""));
    files.push_back(write_text_file(writing + "/model.safetensors", bytes_of(1000, uint64_t(step))));
    files.push_back(write_text_file(writing + "/config.json", "{ }"));
    return commit_checkpoint(run, step, files, STATE);
}

// The smallest one, without the waits for the disk.
inline void make_quickly(const std::string& run, int64_t step, const std::string& state = "{}") {
    const std::string folder = checkpoint_folder(run, step), text = "{ }";
    make_folders(folder);
    write_file(folder + "/config.json", text);
    write_file(folder + "/manifest.json", manifest_text(step, {{"config.json", 3, crc32c(0, text.data(), 3)}}, state));
}

inline std::set<std::string> names_in(const std::string& folder) {
    std::set<std::string> names;
    for (const std::string& name : folder_entries(folder)) names.insert(name);
    return names;
}
inline std::string joined(const std::set<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
    return text;
}

// A manifest with a right checksum around whatever stands in it.
inline std::string sealed(const std::string& before) { return before + manifest_ending(before); }

inline bool is_intact(const std::string& folder) {
    return error_of([&] { open_checkpoint(folder); }).empty();
}

// A tree that is deeper than a path can be long, so that nobody can remove it by its path, not even root; rm -rf can.
inline void make_unremovable(const std::string& folder) {
    const int here = ::open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const std::string name(250, 'd');
    if (here < 0 || chdir(folder.c_str()) != 0) fail("cannot enter %s", folder.c_str());
    for (int i = 0; i < 20; i++)
        if (mkdir(name.c_str(), 0777) != 0 || chdir(name.c_str()) != 0) fail("cannot make folder %d", i);
    if (fchdir(here) != 0) fail("cannot go back");
    ::close(here);
}

}  // namespace checkpoint_test

TEST(crc32c_in_pieces_and_unaligned) {
    CHECK_EQUAL(crc32c(0, "123456789", 9), 0xE3069283u);  // the published check value
    const std::string bytes = checkpoint_test::bytes_of(200, 5);
    for (size_t begin = 0; begin < 9; begin++)
        for (size_t n = 0; begin + n <= bytes.size(); n++) {
            uint32_t plain = 0xFFFFFFFFu;  // the definition, bit by bit
            for (size_t i = begin; i < begin + n; i++) {
                plain ^= static_cast<unsigned char>(bytes[i]);
                for (int bit = 0; bit < 8; bit++) plain = plain >> 1 ^ (plain & 1 ? 0x82F63B78u : 0);
            }
            const char* p = bytes.data() + begin;
            CHECK_EQUAL(crc32c(0, p, n), ~plain);
            CHECK_EQUAL(crc32c(crc32c(0, p, n / 3), p + n / 3, n - n / 3), ~plain);
        }
}

TEST(file_writer_records_what_it_wrote) {
    TempFolder folder;
    const std::string bytes = checkpoint_test::bytes_of(2500000, 6),
                      path = folder.file("x.bin");  // more than two of the writer's pieces
    FileWriter out(path);
    out.write(bytes.data(), 3), out.write(bytes.data() + 3, 0), out.write(bytes.data() + 3, bytes.size() - 3);
    const FileRecord record = out.close();
    CHECK(read_file(path) == bytes);
    CHECK_EQUAL(record.name, "x.bin");
    CHECK_EQUAL(record.size, bytes.size());
    CHECK_EQUAL(record.crc32c, crc32c(0, bytes.data(), bytes.size()));
    const std::vector<float> values = {1, 2, 3};
    const FileRecord tensors =
        write_safetensors(folder.file("t.safetensors"), {{"format", "pt"}}, {tensor_view("a", {3}, values.data())});
    const std::string text = read_file(folder.file("t.safetensors"));
    CHECK_EQUAL(tensors.name, "t.safetensors");
    CHECK_EQUAL(tensors.size, text.size());
    CHECK_EQUAL(tensors.crc32c, crc32c(0, text.data(), text.size()));
    replace_text_file(path, "new");
    replace_text_file(folder.file("fresh"), "text");
    CHECK_EQUAL(read_file(path), "new");
    CHECK_EQUAL(checkpoint_test::joined(checkpoint_test::names_in(folder.path)), "fresh t.safetensors x.bin");
}

TEST(checkpoint_round_trip) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::string run = folder.file("runs/a");
    const std::string path = make_checkpoint(run, 1000);
    CHECK_EQUAL(path, run + "/step_00001000");
    CHECK_EQUAL(joined(names_in(run)), "step_00001000");
    CHECK_EQUAL(joined(names_in(path)), "config.json empty manifest.json model.safetensors");
    const Checkpoint m = open_checkpoint(path);
    CHECK_EQUAL(m.step, 1000);
    CHECK_EQUAL(m.state_text, STATE);
    CHECK_EQUAL(m.state.string("text", "state"), "\xC3\xA9 \"x\"");
    CHECK_EQUAL(m.state.array("loader", "state").size(), size_t(2));
    REQUIRE(m.files.size() == 3);
    CHECK_EQUAL(m.files[0].name, "empty");
    CHECK_EQUAL(m.files[0].size, 0ull);
    CHECK_EQUAL(m.files[1].size, 1000ull);
    CHECK_EQUAL(m.files[2].crc32c, crc32c(0, "{ }", 3));
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, path);
    CHECK_EQUAL(newest_intact_checkpoint(folder.file("nowhere"), no_complaint()).folder, "");
    const std::string long_run = make_checkpoint(run, 123456789012);  // more digits than the name's eight
    CHECK_EQUAL(long_run, run + "/step_123456789012");
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, long_run);
}

// Whatever a resumed run goes on with.
TEST(train_state_comes_back_from_its_manifest) {
    TrainState state;
    state.step = 7, state.last_update = 6, state.bad_steps = 1, state.loader = {1, 1ull << 63, 3, 4};
    state.losses.values = {1.5, 2.25}, state.norms.values = {0.1}, state.first_loss = 5.5;
    state.first_validation = {0, 5.25, "b.bin"};
    const std::string text = manifest_text(state.step, {}, state_json(state, "{}", 2, {"a.bin"}));
    const TrainState found = read_state(parse_manifest(text, "m"));
    CHECK(found.step == 7 && found.last_update == 6 && found.bad_steps == 1 && found.loader == state.loader);
    CHECK(found.losses.values == state.losses.values && found.norms.values == state.norms.values);
    CHECK(found.shards == std::vector<std::string>{"a.bin"} && !found.was_validated);
    CHECK(found.first_validation.loss == 5.25 && found.first_validation.data == "b.bin" && found.first_loss == 5.5);
}

TEST(manifest_notices_every_damaged_byte) {
    using namespace checkpoint_test;
    const std::string good =
        manifest_text(7, {{"model.safetensors", 123456789012ull, 0xE3069283u}, {"config.json", 5, 0}}, STATE);
    const Checkpoint m = parse_manifest(good, "m");
    CHECK_EQUAL(m.step, 7);
    CHECK_EQUAL(m.files[0].size, 123456789012ull);
    CHECK_EQUAL(m.files[0].crc32c, 0xE3069283u);
    for (size_t at = 0; at < good.size(); at++) {
        for (int change = 1; change < 256; change++) {
            std::string bad = good;
            bad[at] = char(bad[at] ^ change);
            CHECK_FAILS(1, "m: byte ", parse_manifest(bad, "m"));
        }
        CHECK_FAILS(1, "m: byte ", parse_manifest(good.substr(0, at), "m"));
        CHECK_FAILS(1, "m: byte ", parse_manifest(good.substr(0, at) + good.substr(at + 1), "m"));
        CHECK_FAILS(1, "m: byte ", parse_manifest(good.substr(0, at) + "7" + good.substr(at), "m"));
    }
    CHECK_FAILS(1, "m: byte ", parse_manifest(good + "\n", "m"));
    CHECK_FAILS(1, "m: byte ", parse_manifest(good + good, "m"));
}

TEST(manifest_refuses_hostile_contents) {  // with a right checksum: made by hand, or by another program
    using namespace checkpoint_test;
    const auto with_file = [](const std::string& name, const std::string& size, const std::string& crc) {
        return sealed(
            "{\"format\": 1, \"step\": 7, \"files\": [{\"name\": \"a\", \"size\": 1, \"crc32c\": \"00000000\"}, "
            "{\"name\": " +
            name + ", \"size\": " + size + ", \"crc32c\": " + crc + "}], \"state\": {}");
    };
    const std::string crc = "\"0123abcd\"";
    CHECK_EQUAL(parse_manifest(with_file("\"b\"", "9223372036854775807", crc), "m").files[1].size,
                9223372036854775807ull);
    const std::string too_long = "\"" + std::string(101, 'a') + "\"";
    for (const char* name :
         {"\"\"", "\".\"", "\"..\"", "\"../x\"", "\"/etc/passwd\"", "\"a/b\"", "\".hidden\"", "\"a\\u0000b\"",
          "\"a\\nb\"", "\"a b\"", "\"a\\\\b\"", "\"\\u00e9\"", "\"manifest.json\"", too_long.c_str()})
        CHECK_FAILS(1, "m: files[1]: name: found ", parse_manifest(with_file(name, "1", crc), "m"));
    CHECK_FAILS(1, "m: files[1]: name: a is there twice", parse_manifest(with_file("\"a\"", "1", crc), "m"));
    CHECK_FAILS(1, "m: files[1]: size", parse_manifest(with_file("\"b\"", "-1", crc), "m"));
    for (const char* size : {"1.5", "1e3", "9223372036854775808", "\"1\"", "null"})
        CHECK_FAILS(1, "m: files[1]: size: byte", parse_manifest(with_file("\"b\"", size, crc), "m"));
    for (const char* digits :
         {"\"\"", "\"123\"", "\"0123abcde\"", "\"0123ABCD\"", "\"0x23abcd\"", "\" 123abcd\"", "\"-123abcd\""})
        CHECK_FAILS(1, "m: files[1]: crc32c: found", parse_manifest(with_file("\"b\"", "1", digits), "m"));
    CHECK_FAILS(1, "m: files[1]: crc32c: byte", parse_manifest(with_file("\"b\"", "1", "7"), "m"));
    const std::pair<const char*, const char*> others[] = {
        {"format: found 2, expected 1", "{\"format\": 2, \"step\": 7, \"files\": [], \"state\": {}"},
        {"step: found -7", "{\"format\": 1, \"step\": -7, \"files\": [], \"state\": {}"},
        {"state: byte", "{\"format\": 1, \"step\": 7, \"files\": [], \"state\": []"},
        {"files: byte", "{\"format\": 1, \"step\": 7, \"files\": {}, \"state\": {}"},
        {"keys", "{\"format\": 1, \"step\": 7, \"state\": {}, \"files\": []"},
        {"keys", "{\"format\": 1, \"step\": 7, \"files\": [], \"state\": {}, \"more\": 1"},
        {"no key \"state\"", "{\"format\": 1, \"step\": 7, \"files\": []"},
        {"not valid JSON", "{\"format\": 1, \"step\": 7, \"files\": [], \"state\": {"}};
    for (const auto& [words, text] : others) CHECK_FAILS(1, words, parse_manifest(sealed(text), "m"));
    CHECK_FAILS(1, "m: byte 0", parse_manifest("", "m"));
}

TEST(checkpoint_files_damaged_in_every_way) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::string path = make_checkpoint(folder.path, 5), model = path + "/model.safetensors",
                      config = path + "/config.json";
    const std::string bytes = read_file(model);
    for (size_t at = 0; at < bytes.size(); at++) {
        std::string bad = bytes;
        bad[at] = char(bad[at] ^ 1 << at % 8);
        write_file(model, bad);
        CHECK_FAILS(1, "model.safetensors has checksum ", open_checkpoint(path));
    }
    write_file(model, bytes.substr(1) + bytes[0]);
    CHECK_FAILS(1, "model.safetensors has checksum ", open_checkpoint(path));
    for (size_t n : {size_t(0), size_t(1), bytes.size() / 2, bytes.size() - 1}) {
        write_file(model, bytes.substr(0, n));
        CHECK_FAILS(1, "bytes, the manifest says 1000", open_checkpoint(path));
    }
    write_file(model, bytes + '\0');
    CHECK_FAILS(1, "model.safetensors has 1001 bytes, the manifest says 1000", open_checkpoint(path));
    write_file(model, bytes);
    CHECK(is_intact(path));
    write_file(path + "/empty", "x");
    CHECK_FAILS(1, "/empty has 1 bytes, the manifest says 0", open_checkpoint(path));
    write_file(path + "/empty", "");
    CHECK(std::rename(model.c_str(), (path + "/aside").c_str()) == 0);
    CHECK_FAILS(1, "model.safetensors: the file is missing", open_checkpoint(path));
    CHECK(symlink((path + "/aside").c_str(), model.c_str()) == 0);
    CHECK(is_intact(path));  // moved to a store and linked
    write_file(path + "/aside", bytes.substr(1) + bytes[0]);
    CHECK_FAILS(1, "model.safetensors has checksum ", open_checkpoint(path));
    write_file(path + "/aside", bytes + '\0');
    CHECK_FAILS(1, "model.safetensors has 1001 bytes", open_checkpoint(path));
    write_file(path + "/aside", bytes);
    for (const char* nowhere : {"nowhere", "model.safetensors", "."}) {
        CHECK(unlink(model.c_str()) == 0 && symlink(nowhere, model.c_str()) == 0);
        CHECK_FAILS(1, "model.safetensors", open_checkpoint(path));
    }
    CHECK(unlink(model.c_str()) == 0 && mkfifo(model.c_str(), 0666) == 0);  // must not wait for a writer
    CHECK_FAILS(1, "no regular file", open_checkpoint(path));
    CHECK(unlink(model.c_str()) == 0 && mkdir(model.c_str(), 0777) == 0);
    CHECK_FAILS(1, "no regular file", open_checkpoint(path));
    CHECK(rmdir(model.c_str()) == 0 && std::rename((path + "/aside").c_str(), model.c_str()) == 0);
    CHECK(is_intact(path));
    // Swapped: two files with each other, a file with that of another checkpoint, a folder under another step's name.
    CHECK(std::rename(model.c_str(), (path + "/t").c_str()) == 0 && std::rename(config.c_str(), model.c_str()) == 0 &&
          std::rename((path + "/t").c_str(), config.c_str()) == 0);
    CHECK(!is_intact(path));
    const std::string other = make_checkpoint(folder.path, 6);
    write_file(config, "{ }"), write_file(model, read_file(other + "/model.safetensors"));
    CHECK_FAILS(1, "model.safetensors has checksum ", open_checkpoint(path));
    remove_tree(path);
    CHECK(std::rename(other.c_str(), path.c_str()) == 0);
    CHECK_FAILS(1, "step: found 6, the folder's name says 5", open_checkpoint(path));
    CHECK(unlink((path + "/manifest.json").c_str()) == 0);
    CHECK_FAILS(1, "manifest.json is missing", open_checkpoint(path));
}

TEST(checkpoint_newest_intact_is_taken) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::string& run = folder.path;
    for (int64_t step : {0, 3, 20, 100, 1000}) make_checkpoint(run, step);
    for (const char* name : {"step_00009999.writing", "step_00009998.removing", "step_9997", "step_000009996",
                             "step_0000999x", "xstep_00009995", "step_-0009994", "step_99999999999999999999"})
        CHECK(mkdir(folder.file(name).c_str(), 0777) == 0);
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, run + "/step_00001000");
    const std::string bytes = read_file(run + "/step_00001000/model.safetensors");
    write_file(run + "/step_00001000/model.safetensors", bytes.substr(0, 999) + char(bytes[999] ^ 1));
    CHECK(unlink((run + "/step_00000100/manifest.json").c_str()) == 0);
    CHECK(mkdir((run + "/step_00000050").c_str(), 0777) == 0);
    Lines lines;
    CHECK_EQUAL(newest_intact_checkpoint(run, into(lines)).folder, run + "/step_00000020");
    REQUIRE(lines.size() == 3);
    CHECK(holds(lines[0], "/step_00001000 is damaged: ", "/model.safetensors has checksum "));
    CHECK(holds(lines[1], "/step_00000100 is damaged: ", "/manifest.json is missing; taking the one before"));
    CHECK(holds(lines[2], "/step_00000050 is damaged: "));
    for (int64_t step : {0, 3, 20}) write_file(checkpoint_folder(run, step) + "/config.json", "{}");
    lines.clear();
    CHECK_EQUAL(newest_intact_checkpoint(run, into(lines)).folder, "");
    CHECK_EQUAL(lines.size(), size_t(6));
    CHECK(holds(lines.back(), "step_00000000 is damaged: ", "there is none before it"));
}

TEST(checkpoint_begin_and_commit) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::string& run = folder.path;
    const std::string writing = begin_checkpoint(run, 9);
    CHECK_EQUAL(writing, run + "/step_00000009.writing");
    write_file(writing + "/of_a_dead_writer", "x");
    CHECK(mkdir((writing + "/sub").c_str(), 0777) == 0);
    CHECK_EQUAL(begin_checkpoint(run, 9), writing);
    CHECK(names_in(writing).empty());
    const FileRecord a = write_text_file(writing + "/a", "abc");
    FileRecord wrong = a;
    wrong.size = 4;
    CHECK_FAILS(1, "/a has 3 bytes, 4 were written", commit_checkpoint(run, 9, {wrong}, "{}"));
    CHECK_FAILS(1, "/b was written and is not there", commit_checkpoint(run, 9, {a, {"b", 0, 0}}, "{}"));
    CHECK_FAILS(1, "a is there twice", commit_checkpoint(run, 9, {a, a}, "{}"));
    CHECK_FAILS(1, "name", commit_checkpoint(run, 9, {{"../a", 3, a.crc32c}}, "{}"));
    for (const char* state : {"", "[]", "7", "{", "{}}", "{\"a\":1,}", "{}, \"x\": 1"})
        CHECK_FAILS(1, "manifest.json", commit_checkpoint(run, 9, {a}, state));
    CHECK_EQUAL(joined(names_in(run)), "step_00000009.writing");  // nothing half done got a name
    CHECK_EQUAL(commit_checkpoint(run, 9, {a}, "{}"), run + "/step_00000009");
    CHECK(is_intact(run + "/step_00000009"));
    // The same step again, over a damaged one that a link stands in.
    const std::string outside = folder.file("outside");
    write_file(outside, "precious");
    CHECK(unlink((run + "/step_00000009/a").c_str()) == 0 &&
          symlink(outside.c_str(), (run + "/step_00000009/a").c_str()) == 0);
    CHECK(!is_intact(run + "/step_00000009"));
    CHECK(mkdir((run + "/step_00000009.removing").c_str(), 0777) == 0);
    write_file(run + "/step_00000009.removing/old", "x");
    make_checkpoint(run, 9);
    CHECK_EQUAL(open_checkpoint(run + "/step_00000009").files.size(), size_t(3));
    CHECK_EQUAL(joined(names_in(run)), "outside step_00000009");
    CHECK_EQUAL(read_file(outside), "precious");
    begin_checkpoint(run, 10);
    abandon_checkpoint(run, 10, no_complaint());
    abandon_checkpoint(run, 11, no_complaint());
    CHECK_EQUAL(joined(names_in(run)), "outside step_00000009");
}

TEST(checkpoint_retention_against_an_oracle) {
    using namespace checkpoint_test;
    uint64_t drawn = 0;
    const auto draw = [&](uint64_t below) { return random_below(below, 21, random_stream(RANDOM_TEST), drawn++); };
    for (int round = 0; round < 60; round++) {
        TempFolder folder;
        std::map<int64_t, bool> intact;  // of each step
        for (uint64_t i = draw(9); i > 0; i--) intact[int64_t(draw(40))] = draw(4) != 0;
        std::map<int64_t, std::pair<int, bool>> validated;  // loss, and on which of two sets
        for (const auto& [step, whole] : intact) {
            TrainState state;
            state.step = step;
            if (draw(3)) validated[step] = {int(draw(5)), draw(4) == 0};
            if (validated.count(step))
                state.validation = {draw(5) ? step : step - 1, double(validated[step].first),
                                    validated[step].second ? "a" : "b"};
            if (state.validation.step != step) validated.erase(step);  // an earlier step's loss is not this one's
            make_quickly(folder.path, step, state_json(state, "{}", 1));
            if (!whole) write_file(checkpoint_folder(folder.path, step) + "/config.json", "{x}");
        }
        int64_t best = -1;
        for (const auto& [step, of] : validated)
            if (of.second == validated.rbegin()->second.second && (best < 0 || of.first <= validated[best].first))
                best = step;
        CHECK_EQUAL(best_step(folder.path, no_complaint()), best);
        write_file(folder.file("main.log"), "s:1\n");
        const int64_t keep = int64_t(draw(5)), keep_every = int64_t(draw(3) * 5);
        std::set<std::string> expected = {"main.log"};
        int64_t newer = 0;  // checkpoints with a higher step
        bool intact_seen = false;
        for (auto i = intact.rbegin(); i != intact.rend(); ++i, newer++) {
            const bool newest_intact = i->second && !intact_seen;
            intact_seen = intact_seen || i->second;
            if (keep == 0 || newer < keep || (keep_every && i->first % keep_every == 0) || newest_intact ||
                i->first == best)
                expected.insert(format_text("step_%08lld", (long long)i->first));
        }
        Lines lines;
        remove_old_checkpoints(folder.path, keep, keep_every, into(lines));
        CHECK_EQUAL(joined(names_in(folder.path)), joined(expected));
        for (const std::string& line : lines) CHECK(holds(line, " is damaged: "));
    }
}

TEST(checkpoint_failing_deletes_are_complaints) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::string& run = folder.path;
    for (int64_t step : {1, 2, 3, 4, 5}) make_checkpoint(run, step);
    make_unremovable(run + "/step_00000002");
    CHECK(mkdir(folder.file("step_00000003.removing").c_str(), 0777) == 0);
    make_unremovable(folder.file("step_00000003.removing"));
    Lines lines;
    remove_old_checkpoints(run, 1, 0, into(lines));
    REQUIRE(lines.size() == 2);
    for (const std::string& line : lines)
        CHECK(line.find("cannot ") == 0 && holds(line, std::strerror(ENAMETOOLONG)) && !holds(line, '\n'));
    // 2 has lost its name before its files, 3 could not and is whole, 1 and 4 are gone.
    CHECK_EQUAL(joined(names_in(run)), "step_00000002.removing step_00000003 step_00000003.removing step_00000005");
    CHECK(is_intact(run + "/step_00000003"));
    lines.clear();
    clean_leftovers(run, into(lines));
    CHECK_EQUAL(lines.size(), size_t(2));
    remove_old_checkpoints(folder.file("nowhere"), 1, 0, no_complaint());
    clean_leftovers(folder.file("nowhere"), no_complaint());
    write_file(folder.file("file"), "");
    lines.clear();
    remove_old_checkpoints(folder.file("file"), 1, 0, into(lines));
    clean_leftovers(folder.file("file"), into(lines));
    CHECK_EQUAL(lines.size(), size_t(2));
}

TEST(checkpoint_leftovers_are_cleaned) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::string& run = folder.path;
    make_checkpoint(run, 4);
    write_file(begin_checkpoint(run, 5) + "/a", "half");
    write_file(begin_checkpoint(run, 123456789) + "/a", "half");
    CHECK(std::rename((run + "/step_00000005.writing").c_str(), (run + "/step_00000005.removing").c_str()) == 0);
    write_file(folder.file("notes.writing"), "a user's");
    CHECK(mkdir(folder.file("precious").c_str(), 0777) == 0);
    write_file(folder.file("precious/file"), "x");
    // the link goes, not what it leads to
    CHECK(symlink(folder.file("precious").c_str(), folder.file("step_00000006.removing").c_str()) == 0);
    clean_leftovers(run, no_complaint());
    CHECK_EQUAL(joined(names_in(run)), "notes.writing precious step_00000004");
    CHECK_EQUAL(read_file(folder.file("precious/file")), "x");
    CHECK(is_intact(run + "/step_00000004"));
}

TEST(writers_report_a_full_or_unwilling_disk) {
    using namespace checkpoint_test;
    TempFolder folder;
    const std::vector<float> values(1000, 1.5f);
    const auto write_model = [&](const std::string& path) {
        write_safetensors(path, {}, {tensor_view("a", {1000}, values.data())});
    };
    const std::string full = folder.file("full");
    CHECK(symlink("/dev/full", full.c_str()) == 0);
    CHECK_FAILS(1, (full + ": " + std::strerror(ENOSPC)).c_str(), write_text_file(full, "x"));
    CHECK_FAILS(1, (full + ": " + std::strerror(ENOSPC)).c_str(), write_model(full));
    CHECK(symlink("/dev/null", folder.file("null").c_str()) == 0);  // takes all bytes and cannot be synced
    CHECK_FAILS(1, ("cannot sync " + folder.file("null")).c_str(), write_text_file(folder.file("null"), "x"));
    CHECK_FAILS(1, ("cannot create " + folder.path + ": ").c_str(), write_text_file(folder.path, "x"));
    CHECK_FAILS(1, ("cannot create " + folder.file("no/where") + ": ").c_str(),
                write_text_file(folder.file("no/where"), "x"));
    CHECK_FAILS(1, "cannot open folder ", sync_folder(folder.file("nowhere")));
    CHECK_FAILS(1, "cannot rename ", rename_path(folder.file("nowhere"), folder.file("x")));
    write_file(folder.file("file"), "x");
    CHECK_FAILS(1, std::strerror(ENOTDIR), begin_checkpoint(folder.file("file"), 1));
    // A quota in the middle of a checkpoint: what was there stays whole, and the space comes back.
    const std::string run = folder.file("run");
    make_checkpoint(run, 1);
    struct rlimit before;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const struct rlimit small = {2000, before.rlim_max};
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);  // write then fails with EFBIG
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    const std::string error = error_of([&] { write_model(begin_checkpoint(run, 2) + "/model.safetensors"); });
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    std::signal(SIGXFSZ, handler);
    CHECK_EQUAL(error, "cannot write " + run + "/step_00000002.writing/model.safetensors: " + std::strerror(EFBIG));
    abandon_checkpoint(run, 2, no_complaint());
    CHECK_EQUAL(joined(names_in(run)), "step_00000001");
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, run + "/step_00000001");
}

TEST(checkpoint_in_a_folder_that_may_not_be_written) {
    using namespace checkpoint_test;
    TempFolder folder;
    make_checkpoint(folder.path, 1), make_checkpoint(folder.path, 2);
    const std::string writing = begin_checkpoint(folder.path, 3);
    const FileRecord file = write_text_file(writing + "/a", "x");
    for (const std::string& path : {folder.path, writing, folder.path + "/step_00000001"})
        CHECK(chmod(path.c_str(), 0555) == 0);
    const uid_t user = geteuid();
    if (user == 0 && seteuid(65534) != 0)
        return skip("a read-only folder: root may write everywhere and cannot be another user here");
    const std::string denied = std::strerror(EACCES);
    CHECK_FAILS(1, denied.c_str(), begin_checkpoint(folder.path, 4));
    CHECK_FAILS(1, denied.c_str(), commit_checkpoint(folder.path, 3, {file}, "{}"));
    CHECK_FAILS(1, denied.c_str(), write_text_file(folder.file("x"), "x"));
    Lines lines;
    remove_old_checkpoints(folder.path, 1, 0, into(lines));
    clean_leftovers(folder.path, into(lines));
    abandon_checkpoint(folder.path, 3, into(lines));
    if (user == 0) CHECK(seteuid(0) == 0);
    CHECK_EQUAL(lines.size(), size_t(3));
    for (const std::string& line : lines) CHECK(holds(line, denied));
    for (const std::string& path : {folder.path, writing, folder.path + "/step_00000001"})
        CHECK(chmod(path.c_str(), 0777) == 0);
    CHECK_EQUAL(newest_intact_checkpoint(folder.path, no_complaint()).folder, folder.path + "/step_00000002");
    CHECK(is_intact(folder.path + "/step_00000001"));
}

TEST(checkpoint_that_may_not_be_read) {
    using namespace checkpoint_test;
    TempFolder folder;
    make_checkpoint(folder.path, 1);
    const std::string model = make_checkpoint(folder.path, 2) + "/model.safetensors";
    CHECK(chmod(folder.path.c_str(), 0755) == 0 && chmod(model.c_str(), 0) == 0);
    const uid_t user = geteuid();
    if (user == 0 && seteuid(65534) != 0) return skip("root may read everything and cannot be another user here");
    CHECK_FAILS(1, std::strerror(EACCES), newest_intact_checkpoint(folder.path, no_complaint()));
    CHECK(seteuid(user) == 0);
}

TEST(background_task) {
    using namespace checkpoint_test;
    BackgroundTask task;
    CHECK(!task.running());
    CHECK_EQUAL(task.error(), "");
    task.wait();  // nothing to wait for
    std::mutex gate;
    int result = 0;  // written by the job, read after its end without a lock: the thread sanitizer sees whether
                     // running() orders the two
    gate.lock();
    task.start([&] {
        std::lock_guard<std::mutex> opens(gate);
        result = 7;
    });
    CHECK(task.running());
    CHECK_FAILS(1, "is running", task.start([] {}));
    gate.unlock();
    while (task.running()) usleep(100);
    CHECK_EQUAL(result, 7);
    CHECK_EQUAL(task.error(), "");
    task.start([] { fail("cannot write %s: %s", "x", "no"); });  // without a wait() in between
    while (task.running()) usleep(100);
    CHECK_EQUAL(task.error(), "cannot write x: no");
    CHECK_EQUAL(task.error(), "cannot write x: no");
    task.start([] { throw 7; });
    task.wait();
    CHECK(!task.running());
    CHECK_EQUAL(task.error(), "an exception of unknown type");
    task.start([] { throw std::runtime_error(""); });
    task.wait();
    CHECK(!task.error().empty());
    task.start([] { throw std::bad_alloc(); });
    task.wait();
    CHECK(holds(task.error(), "out of memory"));
    task.start([] {});
    task.wait();
    CHECK_EQUAL(task.error(), "");
    // The destructor waits: the job's folder is whole.
    TempFolder folder;
    {
        BackgroundTask writer;
        writer.start([&] { make_checkpoint(folder.path, 1); });
    }
    CHECK(is_intact(folder.path + "/step_00000001"));
}
