// data_tests.h: token shards, the order of samples, and the synthetic corpus.
#pragma once
#include <map>
#include <set>

#include <csignal>

#include "../../../lib/data/synthetic.h"
#include "../../../dataloader.h"
#include "../harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// Shards laid out byte by byte, as another tool would.

inline std::string little_endian(uint64_t value, int bytes) {
    std::string out;
    for (int i = 0; i < bytes; i++) out += char(value >> 8 * i & 255);
    return out;
}

inline std::string shard_header(int32_t magic, int32_t version, int32_t tokens, int32_t vocab_size = 0,
                                uint32_t digest = 0) {
    std::string out;
    for (const int32_t number : {magic, version, tokens, vocab_size, int32_t(digest)})
        out += little_endian(uint32_t(number), 4);
    return out + std::string(1024 - 20, '\0');
}

inline std::string shard_bytes(const std::vector<int>& tokens, int vocab_size = 0, uint32_t digest = 0) {
    std::string out = shard_header(20240520, 1, int32_t(tokens.size()), vocab_size, digest);
    for (const int token : tokens) out += little_endian(uint64_t(token), 2);
    return out;
}

// n tokens whose value tells their place: token i of shard k is 10000 k + i (mod 50000).
inline std::vector<int> counting_tokens(int n, int shard = 0) {
    std::vector<int> tokens;
    for (int i = 0; i < n; i++) tokens.push_back((10000 * shard + i) % 50000);
    return tokens;
}

inline LoaderOptions data_options(int T, bool shuffle, uint64_t seed = 7, int rank = 0, int world_size = 1) {
    LoaderOptions options;
    options.seq_len = T, options.vocab_size = 50257, options.seed = seed, options.shuffle = shuffle,
    options.rank = rank, options.world_size = world_size;
    return options;
}

// Samples are told by their first token, which counting_tokens() makes unique.
inline std::vector<int> first_tokens(DataLoader& loader, int B, int T) {
    std::vector<int32_t> inputs(size_t(B) * T), targets(inputs.size());
    loader.next_batch(inputs.data(), targets.data(), B);
    std::vector<int> first;
    for (int b = 0; b < B; b++) first.push_back(inputs[size_t(b) * T]);
    return first;
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(shard_writer_lays_out_the_format) {
    TempFolder folder;
    const std::string prefix = folder.file("new/corpus");
    const uint16_t tokens[] = {50256, 1, 2, 3, 50256, 258, 6};
    ShardWriter writer(prefix, "val", 3, 3, 50257);
    writer.write(tokens, 2);
    writer.write(tokens + 2, 5);
    CHECK_EQUAL(glob_files(folder.file("new/*.bin.tmp")).size(), 3u);  // what a kill would leave: none looks whole
    CHECK(glob_files(folder.file("new/*.bin")).empty());
    writer.close();
    CHECK_EQUAL(writer.tokens(), 7u);
    CHECK(read_file(prefix + "_val_000003.bin") == shard_bytes({50256, 1, 2}, 50257));
    CHECK(read_file(prefix + "_val_000004.bin") == shard_bytes({3, 50256, 258}, 50257));
    CHECK(read_file(prefix + "_val_000005.bin") == shard_bytes({6}, 50257));
    CHECK_EQUAL(glob_files(folder.file("new/*")).size(), 3u);
    writer.close();  // nothing left: no empty fourth shard
    CHECK_EQUAL(glob_files(folder.file("new/*")).size(), 3u);
}

TEST(shard_writer_leaves_nothing_unfinished) {
    TempFolder folder;
    const uint16_t tokens[] = {1, 2, 3};
    ShardWriter(folder.file("corpus"), "val", 0, 2, 256).write(tokens, 3);  // not closed
    CHECK_EQUAL(glob_files(folder.file("*")).size(), 0u);
    make_folders(folder.file("blocked/x_val_000000.bin.tmp/in the way"));
    ShardWriter blocked(folder.file("blocked/x"), "val", 0, 10, 256);
    CHECK_FAILS(1, "blocked/x_val_000000.bin.tmp", blocked.write(tokens, 1));
}

// A limit on the size of a file fails like a full disk.
TEST(shard_writer_reports_a_full_disk) {
    TempFolder folder;
    const std::string path = folder.file("c_train_000000.bin");
    const std::vector<uint16_t> tokens(100000, 1);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    for (const bool at_the_end : {true, false}) {  // seen when the buffer is flushed by close(), and while writing
        const struct rlimit small = {1030, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &small);
        const std::string error = error_of([&] {
            ShardWriter writer(folder.file("c"), "train", 0, 1 << 20, 256);
            writer.write(tokens.data(), at_the_end ? 10 : tokens.size());
            writer.close();
        });
        setrlimit(RLIMIT_FSIZE, &before);
        CHECK(holds(error, "c_train_000000.bin.tmp: File too large"));
        CHECK(!file_exists(path) && !file_exists(path + ".tmp"));
    }
}

TEST(shard_header_damage_is_named) {
    TempFolder folder;
    const std::string path = folder.file("x.bin"), good = shard_bytes({1, 2, 3, 4});
    write_file(path, good);
    CHECK_EQUAL(open_shard(path).count, 4u);
    const struct {
        size_t byte;
        int32_t number;
        const char* words;
    } cases[] = {{0, 20240521, "number 20240521; token shards have 20240520"},
                 {4, 2, "version 2 at byte 4, expected 1"},
                 {8, 0, "number of tokens 0 at byte 8"},
                 {8, -4, "number of tokens -4 at byte 8"},
                 {8, 3, "too long: its header counts 3 tokens (byte 8), which makes 1030 bytes, but the file has 1032"},
                 {8, 5, "cut off: its header counts 5 tokens"},
                 {8, 0x7fffffff, "makes 4294968318 bytes"},
                 {12, 65537, "vocabulary size 65537 at byte 12"},
                 {12, -1, "vocabulary size -1 at byte 12"},
                 {20, 9, "number 9 at byte 20"},
                 {512, 9, "number 9 at byte 512"},
                 {1020, 9, "number 9 at byte 1020"}};
    for (const auto& c : cases) {
        std::string bytes = good;
        bytes.replace(c.byte, 4, little_endian(uint32_t(c.number), 4));
        write_file(path, bytes);
        CHECK_FAILS(1, c.words, open_shard(path));
    }
    for (const size_t length : {size_t(4), size_t(12), size_t(1023), size_t(1024), good.size() - 1}) {
        write_file(path, good.substr(0, length));
        CHECK_FAILS(1, "x.bin is cut off", open_shard(path));
    }
    write_file(path, good + '\0');
    CHECK_FAILS(1, "too long", open_shard(path));
    write_file(path, "");
    CHECK_FAILS(1, "empty", open_shard(path));
    make_folders(folder.file("it's"));  // what is printed can be pasted
    CHECK_FAILS(1, shell_word(folder.file("it's/*_train_*.bin")).c_str(), shard_files(folder.file("it's"), "--data"));
}

TEST(foreign_formats_are_named) {
    TempFolder folder;
    std::string nanogpt;  // uint16 tokens from the first byte on
    for (const int token : {464, 1772, 318, 257, 1332, 13, 50256, 11}) nanogpt += little_endian(uint64_t(token), 2);
    const std::string zeros(1000, '\0');
    const struct {
        std::string bytes, words;
    } cases[] = {
        {nanogpt, "nanoGPT with GPT-2 tokens"},
        {"\x93NUMPY\1" + zeros, "no token shard"},
        {little_endian(96, 8) + "{\"x\":{}}" + zeros, "no token shard"},  // safetensors
        {std::string("\1\x34\xd8\x88\0\0\0\1", 8) + zeros, "no token shard"},
        {little_endian(20240326, 4) + little_endian(3, 4) + zeros, "a file of llm.c of another kind, number 20240326"},
        {little_endian(20240801, 4) + little_endian(7, 4) + zeros, "number 20240801; token shards have 20240520"},
        {"PAR1\x15" + zeros, "Parquet"},
        {"{\"text\": \"Caf\xc3\xa9\"}\n", "is text, not tokens"},
        {"a", "is text, not tokens"}};
    for (const auto& c : cases) {
        write_file(folder.file("x.bin"), c.bytes);
        CHECK_FAILS(1, c.words.c_str(), open_shard(folder.file("x.bin")));
        const std::string error = error_of([&] { open_shard(folder.file("x.bin")); });
        CHECK_EQUAL(holds(error, "nanoGPT"), c.bytes == nanogpt);
    }
}

TEST(shard_beyond_two_gigabytes) {  // the largest the header can count: 4 GiB; sparse, so it takes no room
    TempFolder folder;
    const std::string path = folder.file("big.bin");
    const uint64_t count = 0x7fffffff;
    const int T = 1000;
    write_file(path, shard_header(20240520, 1, int32_t(count)));
    if (truncate(path.c_str(), off_t(1024 + 2 * count)) != 0)
        return skip("shard_beyond_two_gigabytes: no 4 GiB sparse file here");
    const uint64_t samples = (count - 1) / T, start = (samples - 1) * T;
    std::FILE* file = std::fopen(path.c_str(), "r+b");
    REQUIRE(file && fseeko(file, off_t(1024 + 2 * start), SEEK_SET) == 0);
    std::string last;
    for (int i = 0; i <= T; i++) last += little_endian(uint64_t(i + 5), 2);
    REQUIRE(std::fwrite(last.data(), 1, last.size(), file) == last.size() && std::fclose(file) == 0);

    DataLoader loader({open_shard(path)}, data_options(T, false));
    CHECK_EQUAL(loader.samples_per_epoch(), samples);
    loader.restore({7, uint64_t(T), loader.state().corpus, samples - 1});
    std::vector<int32_t> inputs(T), targets(T);
    loader.next_batch(inputs.data(), targets.data(), 1);
    for (int t = 0; t < T; t++) {
        CHECK_EQUAL(inputs[size_t(t)], t + 5);
        CHECK_EQUAL(targets[size_t(t)], t + 6);
    }
    const uint64_t bad = 1024 + 2 * (start + 3);  // a token outside the vocabulary, near byte 2^32
    file = std::fopen(path.c_str(), "r+b");
    REQUIRE(file && fseeko(file, off_t(bad), SEEK_SET) == 0 && std::fwrite("\xff\xff", 1, 2, file) == 2 &&
            std::fclose(file) == 0);
    DataLoader again({open_shard(path)}, data_options(T, false));
    again.restore({7, uint64_t(T), again.state().corpus, samples - 1});
    CHECK_FAILS(1, format_text("big.bin: token 65535 at byte %d ", bad).c_str(),
                again.next_batch(inputs.data(), targets.data(), 1));
    write_file(path, shard_header(20240520, 1, INT32_MIN));  // one more than it can count
    REQUIRE(truncate(path.c_str(), off_t(1024 + 2 * (count + 1))) == 0);
    CHECK_FAILS(1, "2147483647", open_shard(path));
    CHECK_FAILS(1, "split", open_shard(path));
}

// ---------------------------------------------------------------------------------------------------------------------
// The order.

TEST(shuffle_is_a_permutation) {
    for (const uint64_t n : {1, 2, 3, 7, 64, 1000, 4097}) {
        std::set<uint64_t> seen;
        uint64_t moved_by_epoch = 0, moved_by_seed = 0, fixed = 0;
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t x = shuffled_position(i, n, 42, 0);
            CHECK(x < n);
            seen.insert(x);
            moved_by_epoch += x != shuffled_position(i, n, 42, 1);
            moved_by_seed += x != shuffled_position(i, n, 43, 0);
            fixed += x == i;
        }
        CHECK_EQUAL(seen.size(), n);
        // Two random permutations agree in one place on average; in 12 or more with a probability below 1e-9.
        if (n >= 64) CHECK(moved_by_epoch > n - 12 && moved_by_seed > n - 12 && fixed < 12);
    }
    CHECK(shuffled_position(5, ~0ull, 1, 0) < ~0ull);  // the largest range terminates too
    // Every sample comes first equally often: 2000 epochs of 5 samples, 400 each +- 5 sigma of sqrt(2000 * 0.2 * 0.8)
    // = 17.9.
    int first[5] = {};
    for (uint64_t epoch = 0; epoch < 2000; epoch++) first[shuffled_position(0, 5, 1, epoch)]++;
    for (const int times : first) CHECK_NEAR(times, 400, 90);
}

struct ShardFolder : TempFolder {  // three shards of counting tokens, for T = 4: 25 + 0 + 12 = 37 samples
    ShardFolder() {
        write_file(file("c_train_000000.bin"), shard_bytes(counting_tokens(101, 0)));
        write_file(file("c_train_000001.bin"), shard_bytes(counting_tokens(4, 1)));
        write_file(file("c_train_000002.bin"), shard_bytes(counting_tokens(52, 2)));
    }
    std::vector<TokenSource> sources() const { return open_shards(shard_files(file("c_train_*.bin"), "--data")); }
};

TEST(samples_equal_the_raw_file) {
    ShardFolder folder;
    DataLoader loader(folder.sources(), data_options(4, false));
    CHECK_EQUAL(loader.samples_per_epoch(), 37u);
    CHECK_EQUAL(loader.tokens(), 157u);
    CHECK_EQUAL(loader.describe().find("3 shards, 157 tokens, 37 samples of 4 tokens, in order"), 0u);
    std::vector<int32_t> inputs(5 * 4), targets(5 * 4);
    int s = 0;
    for (int batch = 0; batch < 8; batch++) {  // 40 samples: three into the next epoch
        loader.next_batch(inputs.data(), targets.data(), 5);
        for (int b = 0; b < 5; b++, s++) {
            const int shard = s % 37 < 25 ? 0 : 2, sample = s % 37 < 25 ? s % 37 : s % 37 - 25;
            const std::vector<int> raw = counting_tokens(101, shard);
            for (int t = 0; t < 4; t++) {
                CHECK_EQUAL(inputs[b * 4 + t], raw[sample * 4 + t]);
                CHECK_EQUAL(targets[b * 4 + t], raw[sample * 4 + t + 1]);
            }
        }
    }
}

TEST(data_order_does_not_depend_on_ranks_or_micro_batch) {
    ShardFolder folder;
    const int T = 4, steps = 10;  // 10 global batches of 8 samples: past the second epoch of 37
    std::vector<std::multiset<int>> expected;
    const struct {
        int ranks, B, micro_steps;
    } layouts[] = {{1, 8, 1}, {2, 4, 1}, {4, 2, 1}, {1, 2, 4}, {2, 2, 2}, {8, 1, 1}};
    for (const auto& layout : layouts) {
        std::vector<std::unique_ptr<DataLoader>> ranks;
        for (int r = 0; r < layout.ranks; r++)
            ranks.emplace_back(new DataLoader(folder.sources(), data_options(T, true, 7, r, layout.ranks)));
        for (int step = 0; step < steps; step++) {
            std::multiset<int> samples;
            for (int micro = 0; micro < layout.micro_steps; micro++)
                for (auto& rank : ranks)
                    for (const int sample : first_tokens(*rank, layout.B, T)) samples.insert(sample);
            if (int(expected.size()) == step) expected.push_back(samples);
            CHECK(samples == expected[size_t(step)]);
            if (step < 4)
                CHECK_EQUAL(std::set<int>(samples.begin(), samples.end()).size(),
                            8u);  // inside an epoch nobody shares a sample
        }
        for (const auto& rank : ranks) CHECK_EQUAL(rank->state().next_sample, 80u);
    }
}

TEST(samples_are_dealt_to_the_ranks_in_turn) {
    ShardFolder folder;
    for (int rank = 0; rank < 3; rank++) {
        DataLoader loader(folder.sources(), data_options(4, false, 7, rank, 3));
        const std::vector<int> first = first_tokens(loader, 2, 4), second = first_tokens(loader, 2, 4);
        CHECK(first == std::vector<int>({4 * rank, 4 * (rank + 3)}) &&
              second == std::vector<int>({4 * (rank + 6), 4 * (rank + 9)}));
    }
}

TEST(loader_resumes_exactly) {
    ShardFolder folder;
    const int T = 4;
    DataLoader whole(folder.sources(), data_options(T, true));
    const std::vector<int> begin = first_tokens(whole, 3, T);
    for (int i = 0; i < 4; i++) first_tokens(whole, 3, T);
    const LoaderState saved = whole.state();
    CHECK_EQUAL(saved.seed, 7u);
    CHECK_EQUAL(saved.seq_len, 4u);
    CHECK_EQUAL(saved.corpus, whole.state().corpus);
    CHECK_EQUAL(saved.next_sample, 15u);
    std::vector<std::vector<int>> rest;
    for (int i = 0; i < 20; i++) rest.push_back(first_tokens(whole, 3, T));

    DataLoader resumed(folder.sources(), data_options(T, true, 99));  // the seed comes from the state
    CHECK(first_tokens(resumed, 3, T) != begin);  // a batch read ahead under the other seed must not come out
    resumed.restore(saved);
    for (int i = 0; i < 20; i++) CHECK(first_tokens(resumed, 3, T) == rest[size_t(i)]);
    resumed.restore(saved);
    CHECK_EQUAL(first_tokens(resumed, 3, T)[0], rest[0][0]);
    CHECK(first_tokens(resumed, 2, T) ==
          std::vector<int>(rest[1].begin(), rest[1].begin() + 2));  // another B than the one read ahead
    CHECK_EQUAL(resumed.state().next_sample, 20u);

    DataLoader other_length(folder.sources(), data_options(5, true));
    CHECK_FAILS(1, "--seq-len 4, this run with 5", other_length.restore(saved));
    write_file(folder.file("c_train_000003.bin"), shard_bytes({1, 2}));
    DataLoader other_corpus(folder.sources(), data_options(T, true));
    CHECK_FAILS(1, "another corpus", other_corpus.restore(saved));
    TempFolder twins;  // as many tokens, others
    const auto corpus_of = [&](const std::vector<int>& tokens) {
        write_file(twins.file("a.bin"), shard_bytes(tokens));
        return DataLoader(open_shards({twins.file("a.bin")}), data_options(T, true)).state().corpus;
    };
    CHECK(corpus_of({1, 2, 3, 4, 5, 6}) != corpus_of({1, 2, 3, 4, 5, 7}));
}

TEST(token_outside_the_vocabulary_is_located) {
    TempFolder folder;
    std::vector<int> tokens = counting_tokens(41);
    tokens[21] = 50257;  // the second of sample 5 of T = 4
    write_file(folder.file("bad.bin"), shard_bytes(tokens));
    std::vector<int32_t> inputs(8), targets(8);
    for (int rounds = 0; rounds < 2;
         rounds++) {  // B = 2: found by the thread that reads ahead; B = 1 after it: found at once
        DataLoader loader({open_shard(folder.file("bad.bin"))}, data_options(4, false));
        for (int i = 0; i < 2; i++) loader.next_batch(inputs.data(), targets.data(), 2);
        if (rounds == 1) loader.next_batch(inputs.data(), targets.data(), 1);
        for (int again = 0; again < 2; again++)  // and it does not go on after it
            CHECK_FAILS(1, "bad.bin: token 50257 at byte 1066 is outside the vocabulary of 50257",
                        loader.next_batch(inputs.data(), targets.data(), 2 - rounds));
        CHECK_EQUAL(loader.state().next_sample, rounds == 0 ? 4u : 5u);
    }
    tokens[21] = 50256;
    write_file(folder.file("good.bin"), shard_bytes(tokens));
    DataLoader good({open_shard(folder.file("good.bin"))}, data_options(4, false));
    for (int i = 0; i < 5; i++) good.next_batch(inputs.data(), targets.data(), 2);
    CHECK_EQUAL(good.state().next_sample, 10u);
}

TEST(loader_refuses) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(counting_tokens(8), 50257));
    const auto sources = [&] { return open_shards({folder.file("a.bin")}); };
    CHECK_EQUAL(DataLoader(sources(), data_options(7, true)).samples_per_epoch(), 1u);
    write_file(folder.file("b.bin"), shard_bytes(counting_tokens(7), 50257));
    CHECK(holds(DataLoader(open_shards({folder.file("a.bin"), folder.file("b.bin")}), data_options(7, true)).describe(),
                ", 1 of the shards too short"));
    CHECK_FAILS(1,
                "8 tokens in 1 shard, the largest of 8, are too few for one sample, which needs 9 in one shard: give "
                "more text, or train with a shorter --seq-len (8)",
                DataLoader(sources(), data_options(8, true)));
    const DataLoader loader(sources(), data_options(2, true));
    loader.require_global_batch(3);
    CHECK_FAILS(
        1, "8 tokens make 3 samples of --seq-len 2, fewer than the 4 of one global batch, which needs about 9 tokens",
        loader.require_global_batch(4));
}

TEST(shards_of_another_vocabulary_of_the_same_size_are_refused) {
    TempFolder folder;
    LoaderOptions options = data_options(4, true);
    const auto open = [&](uint32_t in_shard, uint32_t of_model) {
        write_file(folder.file("a.bin"), shard_bytes(counting_tokens(8), 50257, in_shard));
        options.vocab_digest = of_model;
        DataLoader(open_shards({folder.file("a.bin")}), options);
    };
    open(0, 0x89abcdef), open(0x89abcdef, 0), open(0x89abcdef, 0x89abcdef);
    CHECK_FAILS(1,
                "a.bin was made with another vocabulary of 50257 tokens (digest 89abcdef) than the model's (89abcdee)",
                open(0x89abcdef, 0x89abcdee));
}

TEST(training_and_validation_files_are_disjoint) {
    TempFolder folder;
    for (const char* name : {"a", "b", "c"}) write_file(folder.file(name), "same bytes");
    REQUIRE(link(folder.file("a").c_str(), folder.file("hard").c_str()) == 0 &&
            symlink("a", folder.file("soft").c_str()) == 0);
    const std::vector<std::string> train = {folder.file("b"), folder.file("a")};
    check_disjoint(train, {folder.file("c")});
    check_disjoint(train, {});
    check_disjoint({}, train);
    for (const char* name : {"a", "b", "hard", "soft"})
        CHECK_FAILS(2, "validation loss would be a training loss",
                    check_disjoint(train, {folder.file("c"), folder.file(name)}));
    CHECK_FAILS(1, "no_such", check_disjoint(train, {folder.file("no_such")}));
}

// ---------------------------------------------------------------------------------------------------------------------
// The synthetic corpus, read back as text by rules of its own.

TEST(synthetic_names_come_back_from_afar) {
    const int documents = 600, length = SYNTHETIC_DOCUMENT, letters = SYNTHETIC_LETTERS;
    const SyntheticCorpus corpus = synthetic_corpus(5, size_t(documents) * length);
    std::map<char, int> drawn;
    std::map<size_t, int> crowds;  // documents by how many names they hold
    size_t shortest = 1 << 30, longest = 0, all = 0;
    for (int d = 0; d < documents; d++) {
        std::string text;
        std::set<size_t> marked, expected;
        for (int i = 0; i < length; i++) {
            text += char(corpus.tokens[size_t(d) * length + i]);
            if (corpus.is_answer[size_t(d) * length + i]) marked.insert(size_t(i));
        }
        CHECK(text[0] == '\0' && text.find('\0', 1) == std::string::npos);
        CHECK_EQUAL(text.substr(1, 4), "the ");  // nobody with a name is in the first block
        std::map<std::string, size_t> last;      // where a name was mentioned last
        for (size_t at = 1; at < text.size(); at = std::min(text.find(". ", at), text.size()) + 2) {
            // "the cook sells ..." or "NAME sells ...". The last sentence may be cut off anywhere.
            size_t capitals = 0;
            while (at + capitals < text.size() && std::isupper(text[at + capitals])) capitals++;
            if (!capitals) continue;
            const std::string name = text.substr(at, capitals);
            if (at + size_t(letters) > text.size()) {
                for (const auto& [known, place] : last)
                    if (at + 2 < text.size() && known.compare(0, capitals, name) == 0)
                        for (size_t i = at + 2; i < text.size(); i++) expected.insert(i);
                continue;
            }
            CHECK_EQUAL(int(capitals), letters);
            if (last.count(name)) {
                shortest = std::min(shortest, at - last[name]), longest = std::max(longest, at - last[name]);
                for (size_t i = at + 2; i < at + size_t(letters); i++) expected.insert(i);
            } else {
                for (const char c : name) drawn[c]++;
                all++;
            }
            last[name] = at;
        }
        CHECK(expected == marked && !marked.empty());
        crowds[last.size()]++;
    }
    // A name comes back with the next sentence, or the one after two others that are due as well.
    CHECK(shortest >= SYNTHETIC_NEAREST && longest < SYNTHETIC_FARTHEST + 3 * 30);
    // Uniform, 5 sigma.
    CHECK_EQUAL(int(crowds.size()), SYNTHETIC_NAMES);
    for (const auto& crowd : crowds) CHECK_NEAR(crowd.second, documents / 3.0, 5 * std::sqrt(documents * 2.0 / 9));
    CHECK_EQUAL(int(drawn.size()), SYNTHETIC_ALPHABET);
    const double n = letters * double(all);
    for (const auto& letter : drawn) CHECK_NEAR(letter.second, n / 26, 5 * std::sqrt(n * 25) / 26);
}
TEST(synthetic_corpus_is_a_function_of_the_seed) {
    const SyntheticCorpus a = synthetic_corpus(5, 100000), b = synthetic_corpus(5, 30001),
                          other = synthetic_corpus(6, 100000);
    CHECK_EQUAL(a.tokens.size(), 100000u);
    CHECK_EQUAL(b.is_answer.size(), 30001u);
    CHECK(std::equal(b.tokens.begin(), b.tokens.end(), a.tokens.begin()) &&
          std::equal(b.is_answer.begin(), b.is_answer.end(), a.is_answer.begin()));
    CHECK(a.tokens != other.tokens);
    // Document 3 alone is document 3 of the corpus.
    const SyntheticCorpus third = synthetic_corpus(5, 256, 3);
    CHECK(std::equal(third.tokens.begin(), third.tokens.end(), a.tokens.begin() + 3 * 256));
    // Training and validation share no document, under one seed or two.
    const SyntheticCorpus val = synthetic_corpus(5, 100000, SYNTHETIC_FIRST_VALIDATION_DOCUMENT);
    std::set<std::vector<uint16_t>> train;
    for (int d = 0; d < 390; d++)
        train.insert(std::vector<uint16_t>(a.tokens.begin() + d * 256, a.tokens.begin() + (d + 1) * 256));
    CHECK_EQUAL(train.size(), 390u);
    for (const SyntheticCorpus* corpus : {&val, &other})
        for (int d = 0; d < 390; d++)
            CHECK(!train.count(
                std::vector<uint16_t>(corpus->tokens.begin() + d * 256, corpus->tokens.begin() + (d + 1) * 256)));
}

TEST(loader_gives_the_answers_of_the_synthetic_corpus) {
    const int T = 512, B = 3;
    const SyntheticCorpus corpus = synthetic_corpus(5, 10 * 512);
    LoaderOptions options = data_options(T, false);
    options.vocab_size = 256;
    DataLoader loader({memory_source("synthetic corpus", corpus.tokens, corpus.is_answer, 256)}, options);
    CHECK_EQUAL(loader.samples_per_epoch(), 9u);
    std::vector<int32_t> inputs(size_t(B) * T), targets(inputs.size());
    std::vector<uint8_t> answer(inputs.size(), 77);
    for (int batch = 0; batch < 3; batch++) {
        loader.next_batch(inputs.data(), targets.data(), B, answer.data());
        for (int i = 0; i < B * T; i++) {
            CHECK_EQUAL(targets[size_t(i)], int32_t(corpus.tokens[size_t(batch) * B * T + i + 1]));
            CHECK_EQUAL(int(answer[size_t(i)]), int(corpus.is_answer[size_t(batch) * B * T + i + 1]));
        }
        for (int b = 0; b < B; b++) CHECK_EQUAL(inputs[size_t(b) * T], 0);  // a sample is a document
    }
    DataLoader plain({memory_source("plain", corpus.tokens, {}, 256)}, options);
    plain.next_batch(inputs.data(), targets.data(), B, answer.data());
    CHECK(std::count(answer.begin(), answer.end(), 0) == B * T);
}
