// mixture_tests.h: several sets of shards in one option, and a resume on other shards.
#pragma once
#include "data_tests.h"
#include "../program/program.h"

TEST(weighted_sets_are_parsed) {
    const auto text = [](const char* words) {
        std::string all;
        for (const DataSet& set : weighted_sets(words, "--data"))
            all += set.pattern + " " + std::to_string(set.weight) + "|";
        return all;
    };
    CHECK_EQUAL(text("a_*.bin"), "a_*.bin 1|");
    CHECK_EQUAL(text("a_*.bin:3,b_*.bin:1"), "a_*.bin 3|b_*.bin 1|");
    CHECK_EQUAL(text("a:6,b:4,c:2"), "a 3|b 2|c 1|");  // in lowest terms, or it would be another corpus
    CHECK_EQUAL(text("a,b:2"), "a 1|b 2|");
    CHECK_EQUAL(text("x\\:1\\,y:7,b\\\\:7"), "x\\:1\\,y 1|b\\\\ 1|");
    CHECK_EQUAL(text("lang=en/a:2:9,b:1"), "lang=en/a:2 9|b 1|");
    CHECK_EQUAL(text("synthetic"), "synthetic 1|");
    for (const char* bad : {"a:", "a:0", "a:-1", "a:0.7,b:0.3", "a:10001", "a:1e3", "a:99999999999999999999", "a:b"})
        CHECK_FAILS(2, "is no weight, expected an integer in 1..10000", weighted_sets(bad, "--data"));
    for (const char* bad : {"a,,b", ",a", "a,", ":3", ""})
        CHECK_FAILS(2, "a pattern is empty", weighted_sets(bad, "--data"));
    CHECK_FAILS(2, "cannot be mixed", weighted_sets("a:1,synthetic:1", "--data"));
}

// Files with names that need a backslash are found, from another folder too.
TEST(patterns_from_the_root_match_the_same_files) {
    TempFolder folder;
    const std::string odd = folder.file("a,b:c=d[e]");
    make_folders(odd);
    write_file(odd + "/x:1,.bin", "x"), write_file(odd + "/y.bin", "y");
    const std::string before = std::filesystem::current_path().string();
    std::filesystem::current_path(odd);
    const std::string absolute = with_absolute_patterns("x\\:1*.bin:3,./y.bin:1", false);
    std::filesystem::current_path(before);
    const auto files = files_of(weighted_sets(absolute, "--data"), "--data");
    REQUIRE(files.size() == 2 && files[0].size() == 1 && files[1].size() == 1);
    CHECK(std::filesystem::equivalent(files[0][0], odd + "/x:1,.bin") &&
          std::filesystem::equivalent(files[1][0], odd + "/y.bin"));
    CHECK_EQUAL(with_absolute_patterns("/a/../b*.bin", false), "/a/../b*.bin");  // a may be a link
    // Behind the current folder ".." goes; behind another name, which may be a link, it stays.
    for (const auto& [path, expected] : std::map<std::string, std::string>{{"../x", "/x"},
                                                                           {"../../../x", "/x"},
                                                                           {"./y//z/.", "/h/y/z"},
                                                                           {"y/../x", "/h/y/../x"},
                                                                           {"../y/../x", "/y/../x"},
                                                                           {"/../a/./b/../", "/a/b/.."},
                                                                           {"/", "/"},
                                                                           {"..", "/"}})
        CHECK_EQUAL(absolute_path(path, "/h"), expected);
    CHECK_FAILS(2, "matches both", files_of(weighted_sets(absolute + "," + absolute, "--data"), "--data"));
    std::filesystem::create_symlink(odd + "/y.bin", folder.file("link.bin"));
    const std::string linked = "/y.bin," + folder.file("link.bin");
    CHECK_FAILS(2, "is the same file as", files_of(weighted_sets(folder.file("*") + linked, "--data"), "--data"));
}

TEST(turns_of_a_mixture_are_exact_and_even) {
    const std::vector<std::vector<uint64_t>> mixtures = {{1}, {3, 1}, {1, 1}, {5, 3, 2}, {1, 7}, {100, 1, 10}};
    for (const std::vector<uint64_t>& weights : mixtures) {
        const Mixture mixture(std::vector<uint64_t>(weights.size(), 13), weights);
        uint64_t W = 0;
        for (const uint64_t w : weights) W += w;
        std::vector<uint64_t> dealt(weights.size()), again(weights.size());  // again: where the second epoch began
        for (uint64_t s = 0; s < 40 * W; s++) {
            const Mixture::Place place = mixture.at(s);
            uint64_t& n = dealt[place.set];
            CHECK_EQUAL(place.epoch, n / 13);
            CHECK_EQUAL(place.position, n % 13);
            CHECK_EQUAL(place.first, 13 * place.set);
            if (n++ == 13) again[place.set] = s;
            for (size_t set = 0; set < weights.size(); set++) {
                const double due = double(s + 1) * double(weights[set]) / double(W);
                CHECK((s + 1) % W != 0 || double(dealt[set]) == due);
                CHECK_NEAR(double(dealt[set]), due, double(weights.size()));  // a turn early or late for each other set
            }
        }
        for (size_t set = 0; set < weights.size(); set++) CHECK_EQUAL(mixture.first_epoch(set), again[set]);
        CHECK_EQUAL(mixture.first_epoch(), *std::min_element(again.begin(), again.end()));
    }
}

struct MixtureFolder : ShardFolder {  // c as there, 37 samples; b: 30000 and on, 10 samples
    MixtureFolder() { write_file(file("b.bin"), shard_bytes(counting_tokens(41, 3))); }
    LoaderOptions options(uint64_t seed = 7, int rank = 0, int ranks = 1, const char* c = "3", const char* b = "1") {
        LoaderOptions o = data_options(4, true, seed, rank, ranks);
        o.sets = weighted_sets(file("c_train_*.bin:") + c + "," + file("b.bin:") + b, "--data");
        return o;
    }
    std::vector<TokenSource> both() const {
        std::vector<TokenSource> all = sources();
        all.push_back(open_shard(file("b.bin"), 1));
        return all;
    }
};

TEST(mixture_deals_each_set_by_its_own_epochs) {
    MixtureFolder folder;
    DataLoader mixed(folder.both(), folder.options()), alone(folder.sources(), data_options(4, true));
    std::vector<int> of_b;
    for (int round = 0; round < 60; round++) {
        std::vector<int> of_c;
        for (const int sample : first_tokens(mixed, 4, 4)) (sample >= 30000 ? of_b : of_c).push_back(sample);
        CHECK_EQUAL(of_c.size(), 3u);
        CHECK(of_c == first_tokens(alone, 3, 4));  // one set's order does not depend on the others
    }
    REQUIRE(of_b.size() == 60);
    std::vector<std::vector<int>> epochs;
    for (auto at = of_b.begin(); at != of_b.end(); at += 10) {
        epochs.emplace_back(at, at + 10);
        CHECK_EQUAL(std::set<int>(at, at + 10).size(), 10u);
    }
    CHECK(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
    const std::string text = mixed.describe(), c = folder.file("c_train_*.bin"), b = folder.file("b.bin");
    CHECK(holds(text, "; 3 of 4 from " + c + " (37 samples, all seen after "));
    CHECK(holds(text, ", 1 of 4 from " + b + " (10 samples, all seen after "));
}

// The state says where every set is: the rest comes out on any number of ranks.
TEST(mixture_resumes_exactly_on_other_ranks) {
    MixtureFolder folder;
    DataLoader whole(folder.both(), folder.options());
    for (int i = 0; i < 5; i++) first_tokens(whole, 6, 4);  // in the middle of a round
    const LoaderState saved = whole.state();
    CHECK_EQUAL(saved.next_sample, 30u);
    std::vector<int> rest;
    for (int i = 0; i < 20; i++)
        for (const int sample : first_tokens(whole, 6, 4)) rest.push_back(sample);
    for (const int ranks : {1, 2, 3}) {
        std::vector<std::vector<int>> of_rank;
        for (int r = 0; r < ranks; r++) {
            DataLoader loader(folder.both(), folder.options(99, r, ranks));
            loader.restore(saved);
            of_rank.emplace_back();
            for (int i = 0; i < 20; i++)
                for (const int sample : first_tokens(loader, 6 / ranks, 4)) of_rank.back().push_back(sample);
        }
        for (size_t i = 0; i < rest.size(); i++) CHECK_EQUAL(of_rank[i % size_t(ranks)][i / size_t(ranks)], rest[i]);
    }
    DataLoader other_weights(folder.both(), folder.options(7, 0, 1, "1", "1"));
    CHECK_FAILS(1, "another corpus", other_weights.restore(saved));
    DataLoader same_weights(folder.both(), folder.options(7, 0, 1, "9", "3"));
    same_weights.restore(saved);
    std::vector<TokenSource> one_set = folder.both();
    one_set.back().set = 0;
    CHECK_FAILS(1, "another corpus", DataLoader(one_set, data_options(4, true)).restore(saved));
}

TEST(mixture_refuses) {
    MixtureFolder folder;
    const DataLoader loader(folder.both(), folder.options());
    const int most = int(loader.samples_per_epoch());
    loader.require_global_batch(uint64_t(most));
    const std::string words = format_text("198 tokens make %d samples of --seq-len 4 until one comes again", most);
    CHECK_FAILS(1, words.c_str(), loader.require_global_batch(uint64_t(most) + 1));
    write_file(folder.file("b.bin"), shard_bytes(counting_tokens(4)));
    CHECK_FAILS(1, ("4 tokens in 1 shard of '" + folder.file("b.bin") + "', the largest of 4, are too few").c_str(),
                DataLoader(folder.both(), folder.options()));
}

TEST(changes_of_shards_are_named) {
    using Names = std::vector<std::string>;
    CHECK_EQUAL(changed_shards({"a", "b"}, {"b", "a"}), std::string());
    CHECK_EQUAL(changed_shards(Names{"a"}, {"a", "b"}), "1 shard added (b)");
    CHECK_EQUAL(changed_shards({"a", "x"}, {"a", "b", "c"}), "2 shards added (b, c), 1 shard gone (x)");
    CHECK_EQUAL(changed_shards({}, {"a", "b", "c"}), "3 shards added (a to c)");
}

// A resume takes other shards if it says so, names what has changed, and then is a run like any other.
PROGRAM_TEST(run_resume_with_new_data) {
    write_small_corpus(folder, "a_1.bin", 1), write_small_corpus(folder, "b.bin", 2);
    const auto resumed = [&](const std::string& more) { return printed("--resume @/run " + more); };
    REQUIRE_GOOD(run("small --data=@/a_*.bin --schedule=constant"));
    write_small_corpus(folder, "a_2.bin", 3);
    const std::string before = read_file(out + "/run.json");
    check({{"--resume @/run --steps=3", 1, {"another corpus", "--allow-new-data goes on with these"}}});
    CHECK_EQUAL(read_file(out + "/run.json"), before);
    CHECK(holds(resumed("--steps=4 --allow-new-data=1"),
                "resume: new data: 1 shard added (" + file("a_2.bin") +
                    "); all of it in a new order from now on, after 4 samples of the old one\n"));
    CHECK(!holds(resumed("--steps=5"), "new data"));  // the shards that are there now are the run's
    CHECK(holds(resumed("--steps=6 --allow-new-data=1 --data @/a_*.bin:3,@/b.bin:1"),
                "new data: 1 shard added (" + file("b.bin") + ")"));
    CHECK(holds(resumed("--steps=7 --allow-new-data=1 --data @/a_*.bin:1,@/b.bin:1"),
                "new data: the same files with other contents or weights"));
    resumed("--steps=8");
    CHECK_EQUAL(logged(out, "loss").size(), 8u);
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation on several sets.

TEST(named_sets_are_parsed) {
    const auto text = [](const char* words) {
        std::string all;
        for (const DataSet& set : named_sets(words, "--val-data")) all += set.name + " " + set.pattern + "|";
        return all;
    };
    CHECK_EQUAL(text("a_*.bin"), " a_*.bin|");
    CHECK_EQUAL(text("web=a_*.bin,co-de.2=b:1"), "web a_*.bin|co-de.2 b:1|");
    CHECK_EQUAL(text("lang\\=en/a\\,b"), " lang\\=en/a\\,b|");
    CHECK_EQUAL(text("x=lang=en,y=synthetic"), "x lang=en|y synthetic|");
    for (const char* bad : {"/data/lang=en/a.bin", "=a", "a b=c", "x=a,/y=b"})
        CHECK_FAILS(2, "is no name, expected at most 32 letters", named_sets(bad, "--val-data"));
    for (const char* bad : {"", "x=", "x=a,", "x=a,,y=b"})
        CHECK_FAILS(2, "a pattern is empty", named_sets(bad, "--val-data"));
    CHECK_FAILS(2, "'b' has no name; of several sets each needs one", named_sets("x=a,b", "--val-data"));
    CHECK_FAILS(2, "the name 'x' is there twice", named_sets("x=a,x=b", "--val-data"));
    CHECK_EQUAL(with_absolute_patterns("x=/a/../b,y=synthetic", true), "x=/a/../b,y=synthetic");
}

// Every set's loss is what `eval` finds on that set alone; the first has the names of a single one.
PROGRAM_TEST(run_validates_on_several_sets) {
    const std::string a = write_small_corpus(folder, "a.bin", 1), b = write_small_corpus(folder, "b.bin", 2);
    const std::string sets = "web=" + a + ",code=" + b + ",syn=synthetic";
    const auto evaluated = [&](const std::string& set) {
        return printed("eval --from @/run --eval-batches=2 --val-data " + set);
    };
    const std::string trained = printed("small --eval-batches=1 --tensorboard=1 --val-data=" + sets),
                      all = evaluated(sets);
    CHECK(holds(trained, "valid.: web: 1 shard, 961 tokens"));
    const std::string main_log = read_file(out + "/main.log"), json_log = read_file(out + "/log.jsonl");
    const std::string events = read_file(glob_files(out + "/events.out.tfevents.*").at(0));
    std::smatch found;
    const struct {
        std::string name, pattern, suffix;
    } cases[] = {{"web", a, ""}, {"code", b, "/code"}, {"syn", "synthetic", "/syn"}};
    for (const auto& c : cases) {
        const std::string text = evaluated(c.pattern);
        REQUIRE(std::regex_search(text, found, std::regex("loss ([0-9.]+),")));
        const std::string loss = found[1];  // four decimals
        CHECK(holds(all, " on " + c.name + ", 128 tokens (2 of "));
        CHECK(std::regex_search(all, std::regex(" on " + c.name + ", [^\n]*loss " + loss + ",")));
        CHECK(holds(trained, "step 0002 | val loss " + loss + " (" + c.name + ")"));
        CHECK(std::regex_search(main_log, std::regex("s:2 tel" + c.suffix + ":[0-9.]+\n")));
        const std::vector<double> logs = logged(out, "val_loss" + c.suffix);
        CHECK(logs.size() == 2 && std::fabs(logs[1] - std::stod(loss)) <= 0.5e-4 + 0.5e-6);  // what was rounded off
        CHECK(holds(events, "val/loss" + c.suffix));
        CHECK(holds(events, "val/bits_per_byte" + c.suffix));
    }
    CHECK(holds(json_log, "\"val_set\":\"web\""));
    REQUIRE_GOOD(run("report --from @/run --html @/page.html"));
    CHECK(holds(read_file(file("page.html")), "\"sets\":[\"code\",\"syn\"]"));
    const std::string terminal = printed("report --from @/run");
    for (const char* row : {"validation loss, web ", "validation loss, code ", "validation loss, syn "})
        CHECK(holds(terminal, row));
    const std::string on_b = "small --data=" + b;
    check({{on_b + " --val-data=" + sets, 2, {"validation loss would be"}},
           {on_b + " --tokenizer=gpt2 --val-data=x=@/a.bin,y=synthetic", 2, {"--val-data synthetic is bytes"}}});
}
