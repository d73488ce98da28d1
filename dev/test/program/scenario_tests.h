// scenario_tests.h: runs that must come to the same: one that goes through, beside one in parts, on other ranks, with
// other threads, buckets, or shares of the state. A row a scenario, a scenario a list of starts.
#pragma once
#include "program.h"

namespace scenarios {
using namespace program;

// The program is started on so many ranks and goes on to this step.
struct Part {
    int ranks;
    const char* steps;
    Options more;
};
// Two folders, the starts that fill them, and how far their losses may be apart: 0 says not one bit, of weights and
// moments neither.
struct Scenario {
    const char* name;
    Options common;
    std::vector<Part> whole, parts;
    double limit;
    const char* says = "";  // what the last start of the parts prints
};

// What travels as bf16 is rounded to 2^-9 of itself on each of log2(4) + 1 additions: steps * lr * |e|_1 <= 8 * 1e-3 *
// 3 * 2^-9 * sqrt(P) |g|.
static const double BF16_LIMIT = 8 * 1e-3 * 3 * std::ldexp(1.0, -9) * std::sqrt(RANKS_PARAMETERS) * 1.5;

// The moments of all ranks' shards, put together.
inline std::map<std::string, std::vector<float>> moments_of(const std::string& checkpoint) {
    std::map<std::string, std::vector<float>> moments;
    for (const FileRecord& file : read_manifest(checkpoint).files) {
        if (file.name.find("optimizer") != 0) continue;
        const SafeTensors pieces(checkpoint + "/" + file.name);
        for (const TensorView& t : pieces.tensors) {
            size_t first = 0, end = 0;
            const size_t bracket = t.name.find('[');
            REQUIRE(std::sscanf(t.name.c_str() + bracket, "[%zu:%zu]", &first, &end) == 2 &&
                    t.bytes == (end - first) * 4);
            std::vector<float>& whole = moments[t.name.substr(0, bracket)];
            if (whole.size() < end) whole.resize(end, std::numeric_limits<float>::quiet_NaN());  // equal to nothing
            std::memcpy(&whole[first], t.data, t.bytes);
        }
    }
    return moments;
}

// What the last start printed.
inline std::string play(const Scenario& s, const std::vector<Part>& starts, const std::string& out,
                        const std::string& mpirun) {
    std::string printed;
    for (const Part& start : starts) {
        Options options = ranks_options({{"schedule", "constant"}, {"out", out}, {"steps", start.steps}});
        options = merged(merged(options, s.common), start.more);
        options["resume"] = &start == &starts[0] ? "off" : "on";
        const Words alone = joined({path()}, small_words(options)),
                    launcher = {mpirun, "-np", std::to_string(start.ranks)};
        const Result r = execute(start.ranks == 1 ? alone : joined(launcher, alone));
        if (r.status != 0) fail("%s, to step %s: status %d, %s", s.name, start.steps, r.status, r.err);
        printed = r.out;
    }
    return printed;
}

// Several scenarios may have one whole, which is played once.
struct Stage {
    const TempFolder& folder;
    const std::string mpirun;
    std::map<std::string, std::string> wholes = {};  // folders, by the words of what was played

    std::string find_whole(const Scenario& s) {
        std::string words;
        for (const Part& start : s.whole)
            for (const std::string& word : words_of(merged(s.common, start.more)))
                words += format_text("%d ranks to %s %s ", start.ranks, start.steps, word);
        const auto [found, is_new] = wholes.emplace(words, folder.file("whole" + std::to_string(wholes.size())));
        if (is_new) play(s, s.whole, found->second, mpirun);
        return found->second;
    }
};

inline void check(Stage& stage, const Scenario& s) {
    const std::string whole = stage.find_whole(s), parts = stage.folder.file("parts");
    const std::string printed = play(s, s.parts, parts, stage.mpirun);
    const auto fault = [&](const std::string& what) { check_failed(__FILE__, __LINE__, "%s: %s", s.name, what); };
    tests().checks++;
    if (!holds(printed, s.says)) fault(std::string("does not say ") + s.says);
    for (const char* field : {"lr", "epoch", "tokens"})
        if (logged(whole, field) != logged(parts, field)) fault(std::string("other ") + field);
    const std::vector<double> a = logged(whole, "loss"), b = logged(parts, "loss");
    if (a.size() != b.size() || a.size() != std::stoul(s.whole.back().steps)) return fault("other steps");
    for (size_t i = 0; i < a.size(); i++)
        if (!(std::fabs(a[i] - b[i]) <= s.limit))
            fault(format_text("loss %d is %.9g, expected %.9g within %.3g", i + 1, b[i], a[i], s.limit));
    std::map<int64_t, double> validated = validations_of(parts);
    for (const auto& [step, loss] : validations_of(whole))  // a part validates where it ends too
        if (!validated.count(step) || !(std::fabs(validated[step] - loss) <= s.limit)) fault("another validation");
    if (s.limit > 0) {
        if (!(a.front() - a.back() > 20 * std::min(s.limit, RANKS_LIMIT))) fault("too little is learnt to tell");
        if (s.limit == BF16_LIMIT && a == b) fault("nothing travelled as bf16");
        return;
    }
    const std::string last = "/" + name_of(checkpoint_folder(whole, std::stol(s.whole.back().steps)));
    if (logged(whole, "grad_norm") != logged(parts, "grad_norm")) fault("another norm of the gradient");
    if (read_file(whole + last + "/model.safetensors") != read_file(parts + last + "/model.safetensors"))
        fault("other weights");
    if (moments_of(whole + last) != moments_of(parts + last)) fault("other moments");
}

}  // namespace scenarios

PROGRAM_TEST(scenarios_of_one_rank) {
    using namespace scenarios;
    // Of which twelve steps see more than one epoch, so that the loader's state matters.
    const std::string data = write_small_corpus(folder, "train.bin", 1), val = write_small_corpus(folder, "val.bin", 2);
    const Options epochs = {{"data", data},         {"val-data", val}, {"total-batch", "128"},
                            {"eval-every", "2"},    {"lr", "0.01"},    {"sample-every", "3"},
                            {"sample-tokens", "5"}, {"seed", "5"},     {"recompute", "1"}};
    const Options in_turn = {{"attention", "window,nsa"}, {"layers", "3"}};
    const std::vector<Scenario> all = {
        {"in three parts", epochs, {{1, "12", {}}}, {{1, "5", {}}, {1, "9", {}}, {1, "12", {}}}, 0, "step 9\n"},
        {"in parts, batch 2",
         merged(epochs, {{"batch", "2"}, {"recompute", "2"}}),
         {{1, "12", {}}},
         {{1, "5", {}}, {1, "12", {}}},
         0,
         "step_00000005, step 5\n"},
        {"two threads", {}, {{1, "8", {}}}, {{1, "8", {{"threads", "2"}}}}, 0},
        {"accumulated", {}, {{1, "8", {{"batch", "8"}}}}, {{1, "8", {{"batch", "1"}}}}, RANKS_LIMIT},
        {"layers in turn", in_turn, {{1, "4", {}}}, {{1, "2", {}}, {1, "4", {}}}, 0},
    };
    Stage stage{folder, mpirun};
    for (const Scenario& s : all) scenarios::check(stage, s);
}

RANKS_TEST(scenarios_of_ranks) {
    using namespace scenarios;
    const std::string a = write_small_corpus(folder, "a.bin", 1), b = write_small_corpus(folder, "b.bin", 2);
    const Options zero = {{"zero", "1"}}, two = {{"batch", "2"}}, bf16 = {{"grad-reduce", "bf16"}},
                  muon = {{"optimizer", "muon"}}, thirds = {{"total-batch", "576"}},
                  mixture = {{"data", a + ":2," + b + ":1"}, {"total-batch", "256"}};
    const std::vector<Part> one = {{1, "8", {{"batch", "8"}}}}, on_two = {{2, "8", {}}}, on_four = {{4, "8", two}};
    const std::vector<Scenario> all = {
        // On as many ranks there is one order of additions: the same bits.
        {"again, two threads", {}, on_two, {{2, "8", {{"threads", "2"}}}}, 0, "gradients travel by MPI"},
        {"in parts, other shares and buckets",
         {},
         on_two,
         {{2, "2", zero},
          {2, "6", {{"zero", "0"}, {"bucket-mb", "0.1"}, {"recompute", "2"}}},
          {2, "8", {{"zero", "1"}, {"bucket-mb", "25"}, {"recompute", "0"}}}},
         0,
         "resume: --zero is 1, was 0"},
        {"Muon, in parts", muon, on_two, {{2, "3", {}}, {2, "5", zero}, {2, "8", {{"zero", "0"}}}}, 0},
        {"Muon, three ranks", merged(muon, thirds), {{3, "8", {}}}, {{3, "8", zero}}, 0},
        // On another number of ranks, to rounding.
        {"two ranks", {}, one, on_two, RANKS_LIMIT},
        {"four ranks", {}, one, on_four, RANKS_LIMIT},
        {"four ranks, one bucket, state in shares",
         {},
         one,
         {{4, "8", {{"bucket-mb", "25"}, {"zero", "1"}}}},
         RANKS_LIMIT},
        {"three ranks", thirds, {{1, "8", {}}}, {{3, "8", zero}}, RANKS_LIMIT * 576 / 512},
        {"smear and an untied head", {{"smear", "on"}, {"head", "untied"}}, one, {{2, "8", zero}}, RANKS_LIMIT},
        {"four, one, two ranks", {}, one, {{4, "2", zero}, {1, "5", {{"zero", "0"}}}, {2, "8", zero}}, RANKS_LIMIT},
        {"Muon, two, one, two ranks",
         muon,
         one,
         {{2, "3", zero}, {1, "5", {{"zero", "0"}}}, {2, "8", zero}},
         RANKS_LIMIT},
        {"a mixture", mixture, {{1, "8", {}}}, {{1, "4", {}}, {2, "8", {}}}, RANKS_LIMIT},
        {"bf16 on the way", {}, on_four, {{4, "8", merged(two, bf16)}}, BF16_LIMIT},
        {"bf16 on the way, state in shares", {}, one, {{2, "8", merged(zero, bf16)}}, BF16_LIMIT},
    };
    Stage stage{folder, mpirun};
    for (const Scenario& s : all) scenarios::check(stage, s);
}
