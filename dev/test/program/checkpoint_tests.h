// checkpoint_tests.h: lib/run/checkpoint.h and the writers of lib/base/safetensors.h: checksums
// against their definition, manifests and files damaged in every way, retention against a plain
// oracle, disks that refuse. What a crash at any moment leaves is dev/crash_test's business.
#pragma once

#include "program.h"

namespace checkpoint_test {

using Lines = std::vector<std::string>;

inline Complain into(Lines& lines) {
    return [&lines](const std::string& line) { lines.push_back(line); };
}
inline Complain no_complaint() {
    return [](const std::string& line) { check_failed(__FILE__, __LINE__, "complaint: %s", line); };
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

inline bool is_intact(const std::string& folder) {
    return error_of([&] { open_checkpoint(folder); }).empty();
}

// A tree that is deeper than a path can be long, so that nobody can remove it by its path, not even root; rm -rf can.
inline void make_unremovable(const std::string& folder) {
    const int here = ::open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const std::string name(250, 'd');
    if (here < 0 || chdir(folder.c_str()) != 0) fail("cannot enter %s", folder);
    for (int i = 0; i < 20; i++)
        if (mkdir(name.c_str(), 0777) != 0 || chdir(name.c_str()) != 0) fail("cannot make folder %d", i);
    if (fchdir(here) != 0) fail("cannot go back");
    ::close(here);
}

}  // namespace checkpoint_test
namespace program {
using namespace checkpoint_test;
}

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

PROGRAM_TEST(file_writer_records_what_it_wrote) {
    const std::string bytes = checkpoint_test::bytes_of(2500000, 6),
                      path = file("x.bin");  // more than two of the writer's pieces
    const auto check = [](const FileRecord& found, const char* name, const std::string& written) {
        CHECK_EQUAL(found.name, name);
        CHECK_EQUAL(found.size, written.size());
        CHECK_EQUAL(found.crc32c, crc32c(0, written.data(), written.size()));
    };
    FileWriter out(path);
    out.write(bytes.data(), 3), out.write(bytes.data() + 3, 0), out.write(bytes.data() + 3, bytes.size() - 3);
    check(out.close(), "x.bin", bytes);
    CHECK(read_file(path) == bytes);
    const std::vector<float> values = {1, 2, 3};
    const FileRecord tensors =
        write_safetensors(file("t.safetensors"), {{"format", "pt"}}, {tensor_view("a", {3}, values.data())});
    check(tensors, "t.safetensors", read_file(file("t.safetensors")));
    replace_text_file(path, "new");
    replace_text_file(file("fresh"), "text");
    CHECK_EQUAL(read_file(path), "new");
    CHECK_EQUAL(names_in(folder.path), "fresh t.safetensors x.bin");
}

PROGRAM_TEST(checkpoint_round_trip) {
    const std::string run = file("runs/a"), path = make_checkpoint(run, 1000);
    CHECK_EQUAL(path, run + "/step_00001000");
    CHECK_EQUAL(names_in(run), "step_00001000");
    CHECK_EQUAL(names_in(path), "config.json empty manifest.json model.safetensors");
    const Checkpoint m = open_checkpoint(path);
    CHECK_EQUAL(m.step, 1000);
    CHECK_EQUAL(m.state_text, STATE);
    CHECK_EQUAL(m.state.string("text", "state"), "\xC3\xA9 \"x\"");
    CHECK_EQUAL(m.state.array("loader", "state").size(), size_t(2));
    REQUIRE(m.files.size() == 3);
    CHECK(m.files[0].name == "empty" && m.files[0].size == 0 && m.files[1].size == 1000);
    CHECK_EQUAL(m.files[2].crc32c, crc32c(0, "{ }", 3));
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, path);
    CHECK_EQUAL(newest_intact_checkpoint(file("nowhere"), no_complaint()).folder, "");
    const std::string long_run = make_checkpoint(run, 123456789012);  // more digits than the name's eight
    CHECK_EQUAL(long_run, run + "/step_123456789012");
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, long_run);
}

// Whatever a resumed run goes on with.
TEST(train_state_comes_back_from_its_manifest) {
    TrainState state;
    state.step = 7, state.last_update = 6, state.bad_steps = 1, state.loader = {1, 1ull << 63, 3, 4};
    const std::string text = manifest_text(state.step, {}, state_json(state, "{}", 2, {"a.bin"}));
    const TrainState found = read_state(parse_manifest(text, "m"));
    CHECK(found.step == 7 && found.last_update == 6 && found.bad_steps == 1);
    CHECK(!std::memcmp(&found.loader, &state.loader, sizeof state.loader));
    CHECK(found.shards == std::vector<std::string>{"a.bin"} && !found.was_validated);
}

TEST(manifest_notices_every_damaged_byte) {
    const std::string good = manifest_text(
        7, {{"model.safetensors", 123456789012ull, 0xE3069283u}, {"config.json", 5, 0}}, checkpoint_test::STATE);
    const Checkpoint m = parse_manifest(good, "m");
    CHECK(m.step == 7 && m.files[0].size == 123456789012ull && m.files[0].crc32c == 0xE3069283u);
    const auto noticed = [](const std::string& bad) { CHECK_FAILS(1, "m: byte ", parse_manifest(bad, "m")); };
    for (size_t at = 0; at < good.size(); at++) {
        for (int change = 1; change < 256; change++) {
            std::string bad = good;
            bad[at] = char(bad[at] ^ change);
            noticed(bad);
        }
        noticed(good.substr(0, at));
        noticed(good.substr(0, at) + good.substr(at + 1));
        noticed(good.substr(0, at) + "7" + good.substr(at));
    }
    noticed(good + "\n");
    noticed(good + good);
}

TEST(manifest_refuses_other_contents) {  // with a right checksum
    const auto manifest = [](const std::string& file, const std::string& rest = ", \"state\": {}") {
        return "{\"format\": 1, \"step\": 7, \"files\": [" + file + "]" + rest;
    };
    const std::pair<const char*, std::string> others[] = {
        {"format: found 2, expected 1", "{\"format\": 2, \"step\": 7, \"files\": [], \"state\": {}"},
        {"no key \"step\"", "{\"format\": 1, \"files\": [], \"state\": {}"},
        {"files: byte", "{\"format\": 1, \"step\": 7, \"files\": {}, \"state\": {}"},
        {"files: byte", manifest("7")},
        {"files: byte", manifest("{\"size\": 1, \"crc32c\": \"00000000\"}")},
        {"files: size: byte", manifest("{\"name\": \"a\", \"size\": 1.5, \"crc32c\": \"00000000\"}")},
        {"files: size: byte", manifest("{\"name\": \"a\", \"size\": 9223372036854775808, \"crc32c\": \"0\"}")},
        {"files: crc32c: byte", manifest("{\"name\": \"a\", \"size\": 1, \"crc32c\": 7}")},
        {"state: byte", manifest("", ", \"state\": []")},
        {"no key \"state\"", manifest("", "")},
        {"not valid JSON", manifest("", ", \"state\": {")}};
    for (const auto& [words, before] : others)
        CHECK_FAILS(1, words, parse_manifest(before + manifest_ending(before), "m"));
    CHECK_FAILS(1, "m: byte 0", parse_manifest("", "m"));
}

PROGRAM_TEST(checkpoint_files_damaged_in_every_way) {
    namespace fs = std::filesystem;
    const std::string path = make_checkpoint(folder.path, 5), model = path + "/model.safetensors",
                      config = path + "/config.json", aside = path + "/aside", bytes = read_file(model),
                      turned = bytes.substr(1) + bytes[0], other_sum = "model.safetensors has checksum ",
                      other_size = "bytes, the manifest says 1000";
    const auto damaged = [&](const std::string& words) { CHECK_FAILS(1, words.c_str(), open_checkpoint(path)); };
    const auto holding = [&](const std::string& file, const std::string& found, const std::string& words) {
        write_file(file, found);
        damaged(words);
    };
    for (size_t at = 0; at < bytes.size(); at++) {
        std::string bad = bytes;
        bad[at] = char(bad[at] ^ 1 << at % 8);
        holding(model, bad, other_sum);
    }
    holding(model, turned, other_sum);
    for (size_t n : {size_t(0), size_t(1), bytes.size() / 2, bytes.size() - 1})
        holding(model, bytes.substr(0, n), other_size);
    holding(model, bytes + '\0', "model.safetensors has 1001 " + other_size);
    write_file(model, bytes);
    CHECK(is_intact(path));
    holding(path + "/empty", "x", "/empty has 1 bytes, the manifest says 0");
    write_file(path + "/empty", "");
    fs::rename(model, aside);
    damaged("cannot open " + model + ": No such file");
    fs::create_symlink(aside, model);
    CHECK(is_intact(path));  // moved to a store and linked
    holding(aside, turned, other_sum);
    holding(aside, bytes + '\0', "model.safetensors has 1001 bytes");
    write_file(aside, bytes);
    for (const char* nowhere : {"nowhere", "model.safetensors", "."}) {
        fs::remove(model), fs::create_symlink(nowhere, model);
        damaged("model.safetensors");
    }
    fs::remove(model);
    CHECK(mkfifo(model.c_str(), 0666) == 0);  // must not wait for a writer
    damaged("model.safetensors is a pipe");
    fs::remove(model), fs::create_directory(model);
    damaged("model.safetensors is a folder");
    fs::remove(model), fs::rename(aside, model);
    CHECK(is_intact(path));
    // Swapped: two files with each other, a file with that of another checkpoint, a folder under another step's name.
    write_file(model, read_file(config)), write_file(config, bytes);
    CHECK(!is_intact(path));
    const std::string other = make_checkpoint(folder.path, 6);
    write_file(config, "{ }");
    holding(model, read_file(other + "/model.safetensors"), other_sum);
    remove_tree(path);
    fs::rename(other, path);
    damaged("step: found 6, the folder's name says 5");
    fs::remove(path + "/manifest.json");
    damaged("manifest.json is missing");
}

PROGRAM_TEST(checkpoint_newest_intact_is_taken) {
    const std::string& run = folder.path;
    for (int64_t step : {0, 3, 20, 100, 1000}) make_checkpoint(run, step);
    for (const char* name : {"step_00009999.writing", "step_00009998.removing", "step_9997", "step_000009996",
                             "step_0000999x", "xstep_00009995", "step_-0009994", "step_99999999999999999999"})
        make_folders(file(name));
    CHECK_EQUAL(newest_intact_checkpoint(run, no_complaint()).folder, run + "/step_00001000");
    write_file(run + "/step_00001000/model.safetensors", std::string(1000, 'x'));
    std::filesystem::remove(run + "/step_00000100/manifest.json");
    make_folders(run + "/step_00000050");
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

PROGRAM_TEST(checkpoint_begin_and_commit) {
    const std::string &run = folder.path, done = run + "/step_00000009", writing = begin_checkpoint(run, 9);
    CHECK_EQUAL(writing, done + ".writing");
    write_file(writing + "/of_a_dead_writer", "x");
    make_folders(writing + "/sub");
    CHECK_EQUAL(begin_checkpoint(run, 9), writing);
    CHECK_EQUAL(names_in(writing), "");
    const FileRecord a = write_text_file(writing + "/a", "abc"), wrong = {"a", 4, a.crc32c};
    CHECK_FAILS(1, "/a has 3 bytes, 4 were written", commit_checkpoint(run, 9, {wrong}, "{}"));
    CHECK_FAILS(1, "/b was written and is not there", commit_checkpoint(run, 9, {a, {"b", 0, 0}}, "{}"));
    for (const char* state : {"", "[]", "7", "{", "{}}", "{\"a\":1,}"})
        CHECK_FAILS(1, "manifest.json", commit_checkpoint(run, 9, {a}, state));
    CHECK_EQUAL(names_in(run), "step_00000009.writing");  // nothing half done got a name
    CHECK_EQUAL(commit_checkpoint(run, 9, {a}, "{}"), done);
    CHECK(is_intact(done));
    // The same step again, over a damaged one that a link stands in.
    write_file(file("outside"), "precious");
    std::filesystem::remove(done + "/a"), std::filesystem::create_symlink(file("outside"), done + "/a");
    CHECK(!is_intact(done));
    make_folders(done + ".removing");
    write_file(done + ".removing/old", "x");
    make_checkpoint(run, 9);
    CHECK_EQUAL(open_checkpoint(done).files.size(), size_t(3));
    CHECK_EQUAL(names_in(run), "outside step_00000009");
    CHECK_EQUAL(read_file(file("outside")), "precious");
    begin_checkpoint(run, 10);
    for (const int64_t step : {10, 11}) abandon_checkpoint(run, step, no_complaint());
    CHECK_EQUAL(names_in(run), "outside step_00000009");
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
                expected.insert(format_text("step_%08d", i->first));
        }
        Lines lines;
        remove_old_checkpoints(folder.path, keep, keep_every, into(lines));
        const std::vector<std::string> left = folder_entries(folder.path);
        CHECK(std::set<std::string>(left.begin(), left.end()) == expected);
        for (const std::string& line : lines) CHECK(holds(line, " is damaged: "));
    }
}

PROGRAM_TEST(checkpoint_failing_deletes_are_complaints) {
    const std::string& run = folder.path;
    for (int64_t step : {1, 2, 3, 4, 5}) make_checkpoint(run, step);
    make_folders(file("step_00000003.removing"));
    for (const char* name : {"step_00000002", "step_00000003.removing"}) make_unremovable(file(name));
    Lines lines;
    remove_old_checkpoints(run, 1, 0, into(lines));
    REQUIRE(lines.size() == 2);
    for (const std::string& line : lines)
        CHECK(line.find("cannot ") == 0 && holds(line, std::strerror(ENAMETOOLONG)) && !holds(line, '\n'));
    // 2 has lost its name before its files, 3 could not and is whole, 1 and 4 are gone.
    CHECK_EQUAL(names_in(run), "step_00000002.removing step_00000003 step_00000003.removing step_00000005");
    CHECK(is_intact(run + "/step_00000003"));
    clean_leftovers(run, into(lines));
    CHECK_EQUAL(lines.size(), size_t(4));
    remove_old_checkpoints(file("nowhere"), 1, 0, no_complaint());
    clean_leftovers(file("nowhere"), no_complaint());
    write_file(file("file"), "");
    remove_old_checkpoints(file("file"), 1, 0, into(lines));
    clean_leftovers(file("file"), into(lines));
    CHECK_EQUAL(lines.size(), size_t(6));
}

PROGRAM_TEST(checkpoint_leftovers_are_cleaned) {
    const std::string& run = folder.path;
    make_checkpoint(run, 4);
    for (const int64_t step : {5, 123456789}) write_file(begin_checkpoint(run, step) + "/a", "half");
    rename_path(run + "/step_00000005.writing", run + "/step_00000005.removing");
    write_file(file("notes.writing"), "a user's");
    make_folders(file("precious"));
    write_file(file("precious/file"), "x");
    // the link goes, not what it leads to
    std::filesystem::create_symlink(file("precious"), file("step_00000006.removing"));
    clean_leftovers(run, no_complaint());
    CHECK_EQUAL(names_in(run), "notes.writing precious step_00000004");
    CHECK_EQUAL(read_file(file("precious/file")), "x");
    CHECK(is_intact(run + "/step_00000004"));
}

PROGRAM_TEST(writers_report_a_full_or_unwilling_disk) {
    const std::vector<float> values(1000, 1.5f);
    const auto write_model = [&](const std::string& path) {
        write_safetensors(path, {}, {tensor_view("a", {1000}, values.data())});
    };
    const std::string full = file("full"), null = file("null"), no_space = full + ": " + std::strerror(ENOSPC);
    std::filesystem::create_symlink("/dev/full", full);
    std::filesystem::create_symlink("/dev/null", null);  // takes all bytes and cannot be synced
    CHECK_FAILS(1, no_space.c_str(), write_text_file(full, "x"));
    CHECK_FAILS(1, no_space.c_str(), write_model(full));
    CHECK_FAILS(1, ("cannot sync " + null).c_str(), write_text_file(null, "x"));
    for (const std::string& path : {folder.path, file("no/where")})
        CHECK_FAILS(1, ("cannot create " + path + ": ").c_str(), write_text_file(path, "x"));
    CHECK_FAILS(1, "cannot open folder ", sync_folder(file("nowhere")));
    CHECK_FAILS(1, "cannot rename ", rename_path(file("nowhere"), file("x")));
    write_file(file("file"), "x");
    CHECK_FAILS(1, std::strerror(ENOTDIR), begin_checkpoint(file("file"), 1));
    // A quota in the middle of a checkpoint: what was there stays whole, and the space comes back.
    const std::string run = file("run");
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
    CHECK_EQUAL(names_in(run), "step_00000001");
    CHECK(is_intact(run + "/step_00000001"));
}

PROGRAM_TEST(checkpoint_that_may_not_be_written_or_read) {
    const std::string first = make_checkpoint(folder.path, 1),
                      model = make_checkpoint(folder.path, 2) + "/model.safetensors",
                      writing = begin_checkpoint(folder.path, 3), denied = std::strerror(EACCES);
    const FileRecord a = write_text_file(writing + "/a", "x");
    for (const std::string& path : {folder.path, writing, first}) CHECK(chmod(path.c_str(), 0555) == 0);
    const uid_t user = geteuid();
    if (user == 0 && seteuid(65534) != 0)
        return skip("a read-only folder: root may write everywhere and cannot be another user here");
    CHECK_FAILS(1, denied.c_str(), begin_checkpoint(folder.path, 4));
    CHECK_FAILS(1, denied.c_str(), commit_checkpoint(folder.path, 3, {a}, "{}"));
    CHECK_FAILS(1, denied.c_str(), write_text_file(file("x"), "x"));
    Lines lines;
    remove_old_checkpoints(folder.path, 1, 0, into(lines));
    clean_leftovers(folder.path, into(lines));
    abandon_checkpoint(folder.path, 3, into(lines));
    CHECK_EQUAL(lines.size(), size_t(3));
    for (const std::string& line : lines) CHECK(holds(line, denied));
    CHECK_EQUAL(newest_intact_checkpoint(folder.path, no_complaint()).step, int64_t(2));
    CHECK(is_intact(first));
    CHECK(seteuid(user) == 0 && chmod(model.c_str(), 0) == 0 && (user != 0 || seteuid(65534) == 0));
    CHECK_FAILS(1, denied.c_str(), newest_intact_checkpoint(folder.path, no_complaint()));
    CHECK(seteuid(user) == 0);
    for (const std::string& path : {folder.path, writing, first}) CHECK(chmod(path.c_str(), 0777) == 0);
}
