// bench_tests.h: what the benchmarks count, against independent counts; and that they run. The times mean nothing in
// emulation.
#pragma once
#include "cuda_model_tests.h"
#include "../../bench/attention.h"

namespace bench_tests {

inline NsaShape bench_shape(int T, bool full = false) {
    NsaShape s;
    s.B = 2, s.T = s.queries = T, s.H = 6, s.G = 2, s.D = 16, s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 4,
    s.window = 24, s.F = 8, s.full = full;
    return s;
}
// Pairs of queries and keys, one by one, by the definition of the branch.
inline double counted_pairs(Branch branch, const NsaShape& s, bool only_choosing) {
    double pairs = 0;
    for (int t = 0; t < s.T; t++) {
        const int own = t / s.slc_block;
        if (only_choosing && own + 1 <= s.slc_count) continue;
        for (int key = 0; key < s.T; key++) {
            if (branch == CMP) pairs += key * s.d + s.l - 1 <= t;
            else if (branch == WIN) pairs += key <= t && (s.full || key > t - s.window);
            else pairs += key <= t && (own + 1 <= s.slc_count || key / s.slc_block > own - s.slc_count);
            // any n blocks with its own: the last n, here
        }
    }
    return pairs * s.B * s.H;
}

// What a benchmark has printed.
struct Report {
    std::FILE* file = std::tmpfile();
    ~Report() { std::fclose(file); }
    std::string text() const {
        std::string all;
        std::rewind(file);
        for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) all += char(c);
        return all;
    }
};

inline std::vector<std::string> lines_of(const std::string& text) {
    std::istringstream in(text);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
}
// The result lines by their first field; each has four, a number as the second, and a name of its own.
struct Result {
    double figure;
    std::string unit, conditions;
};
inline std::map<std::string, Result> results_of(const std::string& text) {
    std::map<std::string, Result> results;
    for (const std::string& line : lines_of(text)) {
        if (line.compare(0, 8, "result: ")) continue;
        std::vector<std::string> fields;
        for (size_t at = 8; at <= line.size();) {
            const size_t end = std::min(line.find(" | ", at), line.size());
            fields.push_back(line.substr(at, end - at));
            at = end + 3;
        }
        CHECK_EQUAL(fields.size(), size_t(4));
        if (fields.size() != 4) continue;
        char* end = nullptr;
        const double figure = std::strtod(fields[1].c_str(), &end);
        CHECK(end != fields[1].c_str() && *end == 0 && figure > 0 && !fields[0].empty() && !fields[2].empty() &&
              !fields[3].empty());
        CHECK(results.count(fields[0]) == 0);
        results[fields[0]] = {figure, fields[2], fields[3]};
    }
    return results;
}
// The two ceilings of a report's first line of them, in FLOP/s and bytes/s.
inline std::array<double, 2> printed_ceilings(const std::string& text) {
    std::array<double, 2> found = {0, 0};
    for (const std::string& line : lines_of(text))
        if (std::sscanf(line.c_str(),
                        "ceilings measured in this run, at its beginning: product of matrices %lf TFLOP/s (64 x 64 x "
                        "64), copy %lf GB/s",
                        &found[0], &found[1]) == 2)
            break;
    return {found[0] * 1e12, found[1] * 1e9};
}
// The rows of a table whose lines end in `columns` numbers: what stands before them,
// and the numbers (a % is dropped). The first row follows the line that begins a table.
struct PrintedRow {
    std::string name;
    std::vector<double> numbers;
};
inline std::vector<PrintedRow> printed_rows(const std::string& text, const char* last_title, size_t columns) {
    std::vector<PrintedRow> rows;
    bool inside = false;
    for (const std::string& line : lines_of(text)) {
        const std::string title = last_title;
        if (line.size() > title.size() && line.compare(line.size() - title.size(), title.size(), title) == 0) {
            inside = true;
            continue;
        }
        std::istringstream in(line);
        std::vector<std::string> words;
        for (std::string word; in >> word;) words.push_back(word);
        PrintedRow row;
        for (size_t i = 0; i < words.size(); i++) {
            char* end = nullptr;
            const double number = std::strtod(words[i].c_str(), &end);
            if (i + columns < words.size()) row.name += (i ? " " : "") + words[i];
            else if (*end == 0 || (*end == '%' && end[1] == 0)) row.numbers.push_back(number);
        }
        inside = inside && words.size() > columns && row.numbers.size() == columns;
        if (inside) rows.push_back(row);
    }
    return rows;
}
// A row's floor is the longer of its two quotients, as far as the printed digits tell: six of each number, and 0.1 us.
inline void check_floor(double floor_us, double gflop, double megabytes, const std::array<double, 2>& ceilings) {
    const double expected = 1e6 * std::max(gflop * 1e9 / ceilings[0], megabytes * 1e6 / ceilings[1]);
    CHECK_NEAR(floor_us, expected, 0.051 + 2e-5 * expected);
}
// The table and the results of --perf; times: of any of its steps, which all count the same.
inline void check_perf_report(const std::string& text, const std::string& name, bool on_gpu,
                              const std::map<std::string, OperationTime>& times) {
    const std::array<double, 2> ceilings = printed_ceilings(text);
    REQUIRE(ceilings[0] > 0 && ceilings[1] > 0);
    const std::vector<PrintedRow> rows = printed_rows(text, "of peak", 10);
    REQUIRE(rows.size() == times.size() + 1);
    double floors = 0, us = 0, gflop = 0, megabytes = 0;
    for (const PrintedRow& row : rows) {  // calls, us, floor, share of the step, GFLOP, MB, rates
        if (row.name == "all operations") {
            CHECK(&row == &rows.back());
            CHECK_NEAR(row.numbers[1], us, 0.05 * double(rows.size()));
            CHECK_NEAR(row.numbers[2], floors, 0.05 * double(rows.size()));
            CHECK_NEAR(row.numbers[4], gflop, 1e-5 * gflop);
            CHECK_NEAR(row.numbers[5], megabytes, 1e-5 * megabytes);
            continue;
        }
        REQUIRE(times.count(row.name) == 1);
        const OperationTime& o = times.at(row.name);
        CHECK_EQUAL(row.numbers[0], double(o.calls));
        CHECK_EQUAL(o.each.size(), size_t(o.calls));
        CHECK_NEAR(row.numbers[4], o.flops * 1e-9, 1e-5 * row.numbers[4]);
        CHECK_NEAR(row.numbers[5], o.bytes * 1e-6, 1e-5 * row.numbers[5]);
        check_floor(row.numbers[2], row.numbers[4], row.numbers[5], ceilings);
        us += row.numbers[1], floors += row.numbers[2], gflop += row.numbers[4], megabytes += row.numbers[5];
    }
    const std::map<std::string, Result> results = results_of(text);
    size_t of_the_step = 0;  // beside those of products
    for (const auto& [what, result] : results) of_the_step += what.compare(0, 8, "product ") != 0;
    CHECK_EQUAL(of_the_step, size_t(on_gpu ? 5 : 4));
    CHECK_EQUAL(results.count(name + ": step, no kernel starting early"), size_t(on_gpu));
    for (const auto& [what, unit] :
         {std::pair("all operations", "us"), std::pair("step", "tokens/s"),
          std::pair("ceiling of matrix products", "TFLOP/s"), std::pair("ceiling of copies", "GB/s")})
        CHECK_EQUAL(results.at(name + ": " + what).unit, std::string(unit));
    CHECK_NEAR(results.at(name + ": all operations").figure, rows.back().numbers[1], 0);
}

}  // namespace bench_tests

TEST(cuda_bench_counts) {
    using namespace bench_tests;
    for (const bool full : {false, true})
        for (const int T : {8, 30, 64, 65, 150}) {
            const NsaShape s = bench_shape(T, full);
            for (const Branch branch : {CMP, SLC, WIN}) {
                if (!s.has(branch)) continue;
                // Two products of D multiply-adds for each pair forward, four backward.
                const double pairs = counted_pairs(branch, s, false);
                CHECK_EQUAL(attention_forward_work(branch, s, 2).flops, 2.0 * 2 * s.D * pairs);
                CHECK_EQUAL(attention_backward_work(branch, s, 2).flops, 4.0 * 2 * s.D * pairs);
                // The arrays, one by one.
                const size_t keys = branch == CMP ? size_t(s.B) * s.G * s.cmp_blocks(T) : size_t(s.B) * s.G * T,
                             rows = size_t(s.B) * s.H * T;
                const std::vector<uint16_t> q(rows * s.D), k(keys * s.D);
                const std::vector<float> lse(rows), dq(rows * s.D);
                const std::vector<uint32_t> selection(
                    branch == SLC ? size_t(s.B) * s.G * T * ((s.slc_blocks() + 31) / 32) : 0);
                const double wide = double(q.size() * sizeof(uint16_t)), key = double(k.size() * sizeof(uint16_t)),
                             statistic = double(lse.size() * sizeof(float)),
                             masks = double(selection.size() * sizeof(uint32_t));
                CHECK_EQUAL(attention_forward_work(branch, s, 2).bytes, wide + wide + key + key + statistic + masks);
                CHECK_EQUAL(attention_backward_work(branch, s, 2).bytes,
                            wide + wide + 4 * key + (branch == WIN ? 1 : 2) * double(dq.size() * sizeof(float)) +
                                2 * statistic + masks);
                // dout . o of each row besides; q, dout, o and dq as q's columns; what rows are made of and what of
                // them
                const Work alone = branches_backward_work(s, 2, 1u << branch);
                CHECK_EQUAL(alone.flops, 4.0 * 2 * s.D * pairs + 2.0 * s.D * double(rows));
                CHECK_EQUAL(alone.bytes, 4 * wide + 4 * key + (full ? 5 : 7) * statistic + masks);
            }
            if (!full) CHECK_EQUAL(select_blocks_work(s, 2).flops, 2.0 * s.D * counted_pairs(CMP, s, true));
        }
}
// The operations beside attention: array by array, and their arithmetic in loops.
TEST(cuda_bench_counts_beside_attention) {
    using namespace bench_tests;
    for (const bool full : {false, true})
        for (const int T : {6, 8, 65, 150}) {
            const NsaShape s = bench_shape(T, full);
            const double real = 2, N = s.B * T, wide = N * s.H * s.D * real, narrow = N * s.G * s.D * real,
                         statistic = N * s.H * 4.0;
            // Heads. In: a row of the projection. Out: q, keys and values of one branch or of
            // three, three gates a head. Rotated: q and every key but the compressed branch's.
            const int branches = full ? 1 : 3;
            double rotations = 0;
            for (int token = 0; token < s.B * T; token++)
                for (int head = 0; head < s.H + (full ? 1 : 2) * s.G; head++)
                    for (int pair = 0; pair < s.D / 2; pair++) rotations++;
            const double heads = wide + 2 * branches * narrow + (full ? 0 : 3 * statistic),
                         row = N * s.projected() * real;
            CHECK_EQUAL(split_heads_forward_work(s, real).flops, 6 * rotations);
            CHECK_EQUAL(split_heads_forward_work(s, real).bytes, row + heads);
            CHECK_EQUAL(split_heads_backward_work(s, real, true).flops, 6 * rotations);
            CHECK_EQUAL(split_heads_backward_work(s, real, true).bytes, row + heads + wide);  // dq has twice the bytes
            CHECK_EQUAL(split_heads_backward_work(s, real, false).flops, 6 * (rotations - N * s.H * s.D / 2));
            CHECK_EQUAL(split_heads_backward_work(s, real, false).bytes, row - wide + heads - wide);
            // Gated sum: a product and an addition a branch and element. Backwards the dot products.
            CHECK_EQUAL(combine_forward_work(s, real).flops, 2.0 * branches * N * s.H * s.D);
            CHECK_EQUAL(combine_forward_work(s, real).bytes, branches * wide + wide + (full ? 0 : 3 * statistic));
            CHECK_EQUAL(attention_backward_rows_work(s, real).flops, 2.0 * branches * N * s.H * s.D);
            CHECK_EQUAL(attention_backward_rows_work(s, real).bytes,
                        branches * wide + wide + (full ? 3 : 15) * statistic);
            if (full) continue;
            // phi, of keys and of values: for each block that fits, F sums of l D products, and D sums of F.
            double products = 0, blocks = 0;
            for (int sequence = 0; sequence < s.B * s.G; sequence++)
                for (int begin = 0; begin + s.l <= T; begin += s.d) blocks++, products += s.F * (s.l * s.D) + s.D * s.F;
            const double weights = s.F * s.l * s.D + s.F + s.D * s.F,
                         arrays = narrow + real * (blocks * s.D + blocks * s.F + weights);
            CHECK_EQUAL(compress_forward_work(s, real).flops, 2 * (2 * products));
            CHECK_EQUAL(compress_forward_work(s, real).bytes, 2 * arrays);
            CHECK_EQUAL(compress_backward_work(s, real).flops, 2 * (2 * 2 * products));
            CHECK_EQUAL(compress_backward_work(s, real).bytes, 2 * (arrays + narrow + 2 * 4 * weights));
        }
}
namespace bench_tests {
// As many blocks as a query may have, all of which it sees, and with them those that every query gets.
inline void check_selection(const std::vector<uint32_t>& masks, const NsaShape& s) {
    REQUIRE(masks.size() == size_t(s.B) * s.G * s.T * s.selection_words());
    for (int row = 0; row < s.B * s.G * s.T; row++) {
        const int last = row % s.T / s.slc_block;
        int count = 0;
        for (int block = 0; block < s.selection_words() * 32; block++) {
            const bool bit = masks[size_t(row) * s.selection_words() + block / 32] >> block % 32 & 1;
            count += bit;
            if (bit) CHECK(block <= last);
            else CHECK(block != 0 && block != last && block != last - 1);
        }
        CHECK_EQUAL(count, std::min(last + 1, s.slc_count));
    }
}
// What `inspect --json` writes of a model with blocks of 16, two layers and a group: besides the blocks that every
// query gets, all choose block 5 in the first layer, and in the second the one that their token's number says.
inline std::string chosen_json(const TempFolder& folder, int tokens, int seq_len) {
    std::string json = format_text(
        "{\"inspect\": 1, \"shape\": {\"slc_block\": 16, \"slc_count\": 4, \"seq_len\": %d}, "
        "\"layers\": [",
        seq_len);
    for (const int layer : {0, 1}) {
        json += layer ? "]}]}, {\"groups\": [{\"blocks\": [" : "{\"groups\": [{\"blocks\": [";
        for (int t = 0; t < tokens; t++) {
            const int last = t / 16, free = layer == 0 ? 5 : 1 + t % std::max(1, last - 2);
            json += (t ? ", " : "") +
                    (free < last - 1 ? format_text("[0, %d, %d, %d]", free, last - 1, last) : std::string("[0]"));
        }
    }
    write_file(folder.file("chosen.json"), json + "]}]}]}");
    return folder.file("chosen.json");
}
}  // namespace bench_tests
TEST(cuda_bench_selections) {
    const NsaShape s = bench_tests::bench_shape(300);
    for (const int common : {0, 1}) bench_tests::check_selection(AttentionSet::selection(s, 7, common, 1), s);
}
// Uniform over the whole sequence: half of what is drawn lies in the future and is skipped, the first block is always
// there, and of 8 neighbours few choose the same.
TEST(cuda_bench_uniform_selection) {
    NsaShape s = bench_tests::bench_shape(4096);
    s.slc_block = 64, s.slc_count = 16;
    const std::vector<uint32_t> masks = uniform_selection(s, 5);
    const size_t words = size_t(s.selection_words());
    int own = 0;
    for (int row = 0; row < s.B * s.G * s.T; row++) {
        const uint32_t* const mask = &masks[size_t(row) * words];
        const int last = row % s.T / s.slc_block;
        CHECK(is_selected(mask, 0));
        own += last && is_selected(mask, last);
        for (int block = last + 1; block < int(words) * 32; block++) CHECK(!is_selected(mask, block));
    }
    CHECK_NEAR(distinct_blocks(masks, s, 1), 8.17, 0.1);           // 16 * 65 / 128, and the lowest of them in any case
    CHECK_NEAR(double(own) / (s.B * s.G * s.T), 15.0 / 64, 0.02);  // not forced
    CHECK(distinct_blocks(masks, s, 8) > 2.5 * distinct_blocks(masks, s, 1));
    s.T = 300;  // fewer blocks than a query may choose: all that it sees
    CHECK_EQUAL(uniform_selection(s, 5)[299 * size_t(s.selection_words())], 31u);
}
// A block of the model is one of the benchmark that lies in the same place in proportion, and neighbours that chose the
// same still do.
TEST(cuda_bench_trained_selections) {
    using namespace bench_tests;
    const TempFolder folder;
    const TrainedSelections model(chosen_json(folder, 600, 512));
    CHECK(model.first == 256 && model.period == 256 && model.chosen.size() == 2);
    NsaShape s = bench_shape(4096);
    s.slc_block = 64;
    size_t of_first = 0;
    for (const int count : {3, 4, 9}) {
        s.slc_count = count;
        const std::vector<uint32_t> masks = model.masks(s, 3);
        check_selection(masks, s);
        bool is_first = false;                                 // layer
        for (int row = 0; row < s.B * s.G * s.T; row += 64) {  // 64 tokens of one block
            const int t = row % s.T, last = t / 64, places = (256 + (t + 63) % 256) / 16 - 2;
            const uint32_t* const mask = &masks[size_t(row) * s.selection_words()];
            bool same = true;
            for (int j = 1; j < 64; j++)
                same = same && std::equal(mask, mask + s.selection_words(), mask + size_t(j) * s.selection_words());
            if (last < 16 || count < 4) continue;  // all may be chosen, or none
            if (t % 256 == 0) is_first = same;     // of a turn of the model's 256 queries
            CHECK_EQUAL(same, is_first);
            if (!same) continue;  // of the second layer
            of_first++;
            for (int block = 1; block < last - 1; block++)
                if (count == 4 && is_selected(mask, block))  // of block 5, whose stretch is from 4 to 5
                    CHECK(block >= 1 + 4 * (last - 2) / places && block <= 1 + 5 * (last - 2) / places);
        }
        CHECK_EQUAL(distinct_blocks(masks, s, 64) > distinct_blocks(masks, s, 1) + 0.1, count > 3);
    }
    CHECK(of_first > 40 && of_first < size_t(2 * s.B * s.G * s.T / 64));
    // At the model's own length nearly its own choice, in the half that is taken.
    s = bench_shape(512);
    s.slc_block = 16;
    s.slc_count = 4;
    const std::vector<uint32_t> masks = model.masks(s, 3);
    check_selection(masks, s);
    for (int t = 256; t < 512; t++) {
        int block = 1;
        while (!is_selected(&masks[size_t(t) * s.selection_words()], block)) block++;
        const int of_layers[] = {5, 1 + t % (t / 16 - 2)};
        CHECK(std::any_of(of_layers, of_layers + 2, [&](int own) { return block <= own && block >= own - 3; }));
    }
    // 128 tokens have two blocks of 64 to choose from
    CHECK_FAILS(1, "64 tokens in blocks of 16 are too few to be stretched; expected at least 128",
                TrainedSelections(chosen_json(folder, 600, 64)));
    CHECK_FAILS(1, "the object has no key \"shape\"", [&] {
        write_file(folder.file("chosen.json"), "{}");
        TrainedSelections(folder.file("chosen.json"));
    }());
}
// Blocks that queries of two groups choose, by hand.
TEST(cuda_bench_distinct_blocks) {
    NsaShape s = bench_tests::bench_shape(4);
    s.B = 1, s.G = 2;
    const std::vector<uint32_t> masks = {1, 3, 6, 1, 1, 1, 1, 1};
    CHECK_EQUAL(distinct_blocks(masks, s, 1), 10.0 / 8);
    CHECK_EQUAL(distinct_blocks(masks, s, 2), 7.0 / 4);  // 2, 3, 1, 1
    CHECK_EQUAL(distinct_blocks(masks, s, 64), 4.0 / 2);
}
TEST(cuda_bench_attention_runs) {
    if (Cuda::FP32) return skip("the attention benchmark: PRECISION=FP32 has the plain kernels only");
    Config c = engine_config();
#ifdef EMU_CHECK
    const int lengths = 1, sets = 1;  // every access is judged, which takes its time
#else
    const int lengths = 2, sets = 2;
#endif
    c.seq_len = 64 * lengths, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    const std::vector<AttentionRow> rows = run_attention(dev, c, 64, sets, sets, 64, report.file);
    constexpr size_t ROWS = 22;
    REQUIRE(rows.size() == size_t(lengths) * ROWS);
    const std::string text = report.text();
    const std::array<double, 2> ceilings = bench_tests::printed_ceilings(text);
    REQUIRE(ceilings[0] > 0 && ceilings[1] > 0);
    const std::vector<bench_tests::PrintedRow> printed = bench_tests::printed_rows(text, "of peak", 8);
    REQUIRE(printed.size() == size_t(lengths) * (2 * ROWS - 3));  // of the choice and the sums there is one pass
    const std::map<std::string, bench_tests::Result> results = bench_tests::results_of(text);
    CHECK_EQUAL(results.size(), size_t(2 + 4 * lengths));
    for (const char* which : {"matrix products", "copies"})
        CHECK(results.count(format_text("attention, %d tokens: ceiling of %s", 64 * lengths, which)) == 1);
    const std::set<std::string> of_nsa = {"compressed", "scores and choice",      "window",
                                          "gated sum",  "phi of keys and values", "split and rotated heads"},
                                of_full = {"full: attention", "full: merged heads", "full: split and rotated heads"};
    size_t line = 0;
    for (size_t length = 0; length < size_t(lengths); length++) {
        const int T = length ? 128 : 64, B = length ? 1 : lengths;
        const NsaShape s = shape_of(c, B, T);
        NsaShape full = s;
        full.full = true;
        std::map<std::string, AttentionRow> totals, found;
        std::map<std::string, double> floors[2];
        for (size_t i = length * ROWS; i < (length + 1) * ROWS; i++) {
            CHECK_EQUAL(rows[i].T, T);
            CHECK_EQUAL(rows[i].B, B);
            CHECK(rows[i].us[0] > 0 && (rows[i].us[1] > 0 || rows[i].name == "scores and choice" ||
                                        rows[i].name == "gated sum" || rows[i].name == "full: merged heads"));
            const std::string& name = rows[i].name;
            CHECK(found.count(name) == 0);
            found[name] = rows[i];
            std::vector<const char*> wholes;
            if (of_nsa.count(name)) wholes = {WHOLE_SHARED, WHOLE_SCATTERED, WHOLE_UNIFORM};
            if (name == "selected, shared, auto") wholes = {WHOLE_SHARED};
            if (name == "selected, scattered, auto") wholes = {WHOLE_SCATTERED};
            if (name == "selected, uniform, auto") wholes = {WHOLE_UNIFORM};
            if (of_full.count(name)) wholes = {WHOLE_FULL};
            for (int pass = 0; pass < 2; pass++) {
                for (const char* whole : wholes) {
                    AttentionRow& total = totals[whole];
                    total.work[pass].flops += rows[i].work[pass].flops,
                        total.work[pass].bytes += rows[i].work[pass].bytes, total.us[pass] += rows[i].us[pass];
                }
                if (rows[i].us[pass] <= 0) continue;
                // T, B and the operation with its pass; us, floor, GFLOP, MB, rates
                const bench_tests::PrintedRow& p = printed[line++];
                CHECK_EQUAL(p.name, format_text("%d %d %s %s", T, B, name.c_str(), pass ? "backward" : "forward"));
                CHECK_NEAR(p.numbers[0], rows[i].us[pass], 0.051);
                CHECK_NEAR(p.numbers[2], rows[i].work[pass].flops * 1e-9, 1e-5 * p.numbers[2]);
                CHECK_NEAR(p.numbers[3], rows[i].work[pass].bytes * 1e-6, 1e-5 * p.numbers[3]);
                for (const char* whole : wholes) floors[pass][whole] += p.numbers[1];
                if (name == WHOLE_SHARED || name == WHOLE_SCATTERED || name == WHOLE_UNIFORM || name == WHOLE_FULL)
                    CHECK_NEAR(p.numbers[1], floors[pass][name],
                               0.05 * 9);  // of at most eight rows' and its own rounding
                else bench_tests::check_floor(p.numbers[1], p.numbers[2], p.numbers[3], ceilings);
            }
        }
        for (const auto& [name, total] : totals)
            for (int pass = 0; pass < 2; pass++) {
                REQUIRE(found.count(name) == 1);
                CHECK_EQUAL(found[name].work[pass].flops, total.work[pass].flops);
                CHECK_EQUAL(found[name].work[pass].bytes, total.work[pass].bytes);
                CHECK_NEAR(found[name].us[pass], total.us[pass], 1e-9 * total.us[pass]);
                const bool dense = name == WHOLE_FULL;
                if (name == WHOLE_SCATTERED || name == WHOLE_UNIFORM) continue;  // in the conditions of the other
                const auto result = results.find(format_text("attention, %s, %d x %d: %s", dense ? "full" : "NSA", B, T,
                                                             pass ? "backward" : "forward"));
                REQUIRE(result != results.end());
                CHECK_NEAR(result->second.figure, total.us[pass], 0.051);
                CHECK_EQUAL(result->second.unit, std::string("us"));
                const std::string& conditions = result->second.conditions;
                CHECK(conditions.find(format_text("%d x %d, 6 heads in 2 groups of dimension 16", B, T)) == 0 &&
                      conditions.find(" us at the measured ceilings") != std::string::npos);
                if (!dense)
                    CHECK(conditions.find(format_text(", %.2f of full attention; selection uniform: ",
                                                      total.us[pass] / found[WHOLE_FULL].us[pass])) !=
                          std::string::npos);
            }
        CHECK_EQUAL(found["phi of keys and values"].work[1].flops, compress_backward_work(s, sizeof(Cuda::real)).flops);
        CHECK_EQUAL(found["full: split and rotated heads"].work[0].bytes,
                    split_heads_forward_work(full, sizeof(Cuda::real)).bytes);
        CHECK_EQUAL(found["full: attention"].work[0].flops, 4.0 * s.D * B * s.H * T * (T + 1) / 2);
    }
    CHECK_EQUAL(line, printed.size());
    for (const char* part :
         {"ceilings measured in this run, at its end", "T 64, scattered: selected branch by",
          "selected, shared, gathered", "NSA / full attention, shared", "NSA / full attention, scattered",
          "NSA / full attention, uniform", "T 64, uniform: a query chooses ", "selected, uniform, auto",
          "relative to the ceilings at the beginning"})
        CHECK(text.find(part) != std::string::npos);
    CHECK(text.find("nan") == std::string::npos && text.find("inf ") == std::string::npos);
}
// With a model's selections there is a third kind, in the whole too.
TEST(cuda_bench_attention_with_selections) {
    if (Cuda::FP32) return skip("the attention benchmark: PRECISION=FP32 has the plain kernels only");
    const TempFolder folder;
    const TrainedSelections model(bench_tests::chosen_json(folder, 600, 512));
    Config c = engine_config();
    c.seq_len = 64, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    double parts = 0, whole = 0, others = 0;
    for (const AttentionRow& row : run_attention(dev, c, 64, 1, 1, 64, report.file, false, &model)) {
        if (row.name == WHOLE_TRAINED) whole = row.us[0];
        if (row.whole & NSA_TRAINED) parts += row.us[0];
        others += row.whole == NSA_TRAINED;
    }
    CHECK_EQUAL(others, 1);  // selected, trained, auto
    CHECK_NEAR(whole, parts, 1e-9 * parts);
    const std::string text = report.text();
    for (const char* part : {"trained: the choices of 2 layers and groups of a model, of 256 tokens in blocks of 16",
                             "T 64, trained: a query chooses ", "T 64, scattered: a query chooses ",
                             "selected, trained, gathered", "NSA / full attention, trained: ", "; selection trained: "})
        if (text.find(part) == std::string::npos) check_failed(__FILE__, __LINE__, "no %s in %s", part, text.c_str());
    std::string path;
    std::vector<const char*> words = {"--perf-attention", "--selections", "a.json", "--batch", "2"};
    CHECK(take_option(words, "--selections", path) && path == "a.json" && words.size() == 3);
    CHECK(!take_option(words, "--selections", path) && words.size() == 3);
}
// Others' times beside ours: from rows whose sums are known, at two of the three lengths that others have.
TEST(cuda_bench_published_times) {
    std::vector<AttentionRow> rows;
    for (const int T : {4096, 8192, 32768})
        for (const auto& [name, us] :
             {std::pair("compressed", 1000.0), std::pair("scores and choice", 610.0),
              std::pair("selected, shared, auto", 1700.0), std::pair("selected, scattered, auto", 6800.0),
              std::pair("selected, uniform, auto", 3400.0), std::pair(WHOLE_SHARED, 5000.0),
              std::pair(WHOLE_SCATTERED, 20000.0),
              std::pair(WHOLE_FULL, T == 4096   ? 4000.0
                                    : T == 8192 ? 10000.0
                                                : 30000.0)}) {
            AttentionRow row{T, 1, name, {}};
            row.us[0] = us, row.us[1] = std::string(name) == "scores and choice" ? 0 : 2 * us;
            rows.push_back(row);
        }
    const bench_tests::Report report;
    print_published(rows, report.file);
    print_crossings(rows, report.file);
    const std::string text = report.text();
    const std::map<std::string, bench_tests::Result> results = bench_tests::results_of(text);
    CHECK_EQUAL(results.size(), size_t(5 * 2 * 2));  // five kinds, two lengths, two passes
    const struct {
        const char *name, *conditions;
        double ms;
    } cases[] = {{"selected alone, H100, 8192: forward",
                  "theirs 3.40 on an H100, selection uniform, ratio 1.00; selection scattered: 6.800 ms, 2.00; "
                  "selection shared: 1.700 ms, 0.50",
                  3.4},
                 {"selected alone, H100, 8192: backward",
                  "theirs 3.95 on an H100, selection uniform, ratio 1.72; selection scattered: 13.600 ms, 3.44; "
                  "selection shared: 3.400 ms, 0.86",
                  6.8},
                 {"compressed, with scores, H100, 8192: forward", "theirs 1.61 on an H100, ratio 1.00", 1.61},
                 {"compressed, with scores, H100, 8192: backward", "theirs 1.25 on an H100, ratio 1.60", 2},
                 {"NSA, all of it, H800, 32768: backward",
                  "theirs 29.00 on an H800, selection scattered, ratio 1.38; selection shared: 10.000 ms, 0.34", 40},
                 {"dense, FlashAttention-3, H800, 32768: forward", "theirs 26.70 on an H800, ratio 1.12", 30}};
    for (const auto& c : cases) {
        const auto result = results.find(format_text("published shape, %s", c.name));
        REQUIRE(result != results.end());
        CHECK_NEAR(result->second.figure, c.ms, 1e-9);
        CHECK_EQUAL(result->second.conditions, std::string(c.conditions));
    }
    for (const char* line :
         {"from 8192 tokens on (forward, selection shared)", "from 8192 tokens on (backward, selection shared)",
          "from 32768 tokens on (forward, selection scattered)"})
        CHECK(text.find(std::string("NSA is faster than our dense attention ") + line) != std::string::npos);
    std::vector<const char*> words = {"--perf-attention", "--shape=published", "--batch", "2"};
    CHECK(take_named_shape(words) == &NAMED_SHAPES[0] && words.size() == 3 && !std::strcmp(words[1], "--batch"));
    CHECK(take_named_shape(words) == nullptr && words.size() == 3);
    words = {"--perf-attention", "--shape", "square"};
    CHECK_FAILS(2, "--shape square: expected one of published", take_named_shape(words));
#ifndef PRECISION_FP32
    // The longest sequence is within an H100's shared memory.
    Config c;
    c.model = "125m";
    apply_preset(c, {});
    apply_named_shape(c, NAMED_SHAPES[0], {});
    const NsaShape s = shape_of(c, 1, NAMED_SHAPES[0].last_length);
    CHECK_EQUAL(s.heads_per_group(), 16);
    check_shape(s);
#endif
    const char* const both[] = {"--perf-attention", "--shape", "published", "--heads", "4"};
    CHECK_FAILS(2, "--shape published decides --heads", run_attention_bench(5, both));
}
// The median of single calls, of sizes that are known; and what the caller had timed is left alone.
TEST(cuda_bench_ceilings) {
    Timed<Cuda> dev(0, size_t(1) << 20);
    dev.add("earlier", 1, 2, 3);
    const Ceilings found = measure_ceilings(dev, 64);
    CHECK(found.flops_per_second > 0 && found.bytes_per_second > 0 && found.size == 64 && found.repetitions >= 30);
    CHECK_EQUAL(found.copied_bytes, size_t(64) * 64 * sizeof(Cuda::real));
    CHECK(dev.times.size() == 1 && dev.times.count("earlier") == 1 && dev.times["earlier"].calls == 1);
    // Powers of two, so that the quotients are exact.
    CHECK_EQUAL(found.floor(2 * found.flops_per_second, found.bytes_per_second), 2.0);
    CHECK_EQUAL(found.floor(found.flops_per_second, 4 * found.bytes_per_second), 4.0);
    CHECK_EQUAL(median_of({5, 1, 9}), 5.0);
}
// The clock around a whole training step: every operation is timed, and the sum of the products' arithmetic is that of
// the layers.
TEST(cuda_bench_step_runs) {
    Config c = engine_config();
    c.seq_len = 64, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    CHECK_EQUAL(perf_on<Cuda>(dev, c, 2, 64, report.file), 0);
    CHECK(dev.clocks);
    const std::string text = report.text();
    for (const char* part : {"one training step of tiny, nsa attention", "the median of 2",
                             "a step without clocks: the host had launched the step after ",
                             "ceilings measured in this run, at its end", "relative to the ceilings at the beginning"})
        CHECK(text.find(part) != std::string::npos);
    bench_tests::check_perf_report(text, "perf, NSA, 1 x 64", true, dev.times);
    const auto& times = dev.times;
    for (const char* name : {"embedding_forward", "rmsnorm_backward", "attention_forward, compressed",
                             "attention_forward, selected", "attention_forward, window",
                             dev.plain_attention ? "attention_backward, selected" : "attention_backward, all branches",
                             "select_blocks", "compress_backward", "classifier", "adamw"}) {
        REQUIRE(times.count(name) == 1);
        CHECK(times.at(name).seconds > 0 && times.at(name).calls > 0);
    }
    const double N = 64, C = double(c.dim), P = shape_of(c, 1, 64).projected(), HD = double(c.heads * c.head_dim),
                 M = double(c.mlp_hidden), Vp = double(TensorTable(c).padded_vocab);
    // Three products for every matrix, of the same size, and a result for each of their shapes.
    double flops = 0;
    const auto results = bench_tests::results_of(text);
    for (const auto& [name, time] : times) {
        if (name.compare(0, 8, "product ")) continue;
        flops += time.flops;
        REQUIRE(results.count(name) == 1);
        const std::string share = dev.peak_flops() > 0 ? " TFLOP/s; " : "share of peak n/a; ";
        CHECK(results.at(name).conditions.find(share) != std::string::npos);
        CHECK(results.at(name).conditions.find("algorithm ") != std::string::npos);
    }
    CHECK_EQUAL(flops, 6 * N * (double(c.layers) * (C * P + HD * C + 2 * C * M) + C * Vp));
    CHECK(times.count(format_text("product 64 x %d x %d tn", int(M), int(C))) == 0 &&
          times.count(format_text("product %d x %d x 64 tn", int(M), int(C))) == 1);
    CHECK_EQUAL(times.at("attention_forward, window").calls, c.layers);
    CHECK_EQUAL(times.at("split_heads_forward").bytes,
                c.layers * split_heads_forward_work(shape_of(c, 1, 64), sizeof(Cuda::real)).bytes);
    CHECK_EQUAL(times.at("compress_backward").flops,
                c.layers * compress_backward_work(shape_of(c, 1, 64), sizeof(Cuda::real)).flops);
    CHECK_EQUAL(times.at("classifier").bytes, 2 * N * Vp * sizeof(Cuda::real));  // logits read, gradients written
}
#if defined(CUDA_ON_CPU) && !defined(PRECISION_FP32)
// `check` names the algorithm of each product that a step of a preset computes: Y = X W^T, dX = dY W, dW = dY^T X for
// rows [N, in], W [out, in].
TEST(cuda_bench_check_names_every_product) {
    const Config c = options_of("--model 125m");
    Cuda dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    print_linear_layers("125m", dev, report.file);
    const std::string text = report.text();
    const Activations<Cuda> a(dev, c, preset_of(c).batch, c.seq_len, TRAINING, 0, true);
    const int N = int(preset_of(c).batch * c.seq_len), C = int(c.dim), M = int(c.mlp_hidden);
    const int P = shape_of(c, 1, int(c.seq_len)).projected(), HD = int(c.heads * c.head_dim);
    const int layers[][3] = {
        {N, C, P}, {N, HD, C}, {N, C, M}, {N, M, C}, {int(a.logit_rows), C, int(TensorTable(c).padded_vocab)}};
    for (const auto& [rows, in, out] : layers)
        for (const std::string& product :
             {format_text("%d x %d x %d nt", rows, out, in), format_text("%d x %d x %d nn", rows, in, out),
              format_text("%d x %d x %d tn", out, in, rows)}) {
            tests().checks++;
            if (text.find(" " + product + ": algorithm ") == std::string::npos)
                check_failed(__FILE__, __LINE__, "no %s in\n%s", product.c_str(), text.c_str());
        }
}
#endif
// Full attention has names of its own, and so has a step that computes again what was not kept.
TEST(cuda_bench_full_step_runs) {
    Config c = engine_config("--attention full --recompute 1");
    c.seq_len = 64, c.batch = 1;
    Timed<Cuda> dev(0, size_t(1) << 20);
    const bench_tests::Report report;
    CHECK_EQUAL(perf_on<Cuda>(dev, c, 1, 64, report.file), 0);
    for (const char* name : {"attention_forward, full attention", "attention_backward, full attention"})
        CHECK(dev.times.count(name) == 1);
    for (const auto& [name, time] : dev.times) CHECK(name.find("window") == std::string::npos);
    bench_tests::check_perf_report(report.text(), "perf, full attention, 1 x 64, recompute 1", true, dev.times);
}
// The CPU's steps have a clock around every operation, and no others.
TEST(cuda_bench_cpu_step_runs) {
    Config c = engine_config();
    c.seq_len = 64, c.batch = 1;
    Timed<Cpu<float>> dev;
    const bench_tests::Report report;
    CHECK_EQUAL(perf_on<Cpu<float>>(dev, c, 1, 64, report.file), 0);
    CHECK(report.text().find("without clocks") == std::string::npos);
    bench_tests::check_perf_report(report.text(), "perf, NSA, 1 x 64", false, dev.times);
}
#ifndef PRECISION_FP32
// GiB that training takes: activations, parameters, gradients and moments, cuBLASLt's workspace, and the scratch memory
// of the kernels.
static double training_gib(Cuda& dev, const Config& c, const std::string& name) {
    const NsaShape s = shape_of(c, c.batch, c.seq_len);
    size_t scratch = attention_backward_bytes(s, SelectedKernel::GATHER);
    for (const Branch branch : {CMP, SLC, WIN})
        scratch = std::max(scratch, attention_forward_bytes(branch, s, SelectedKernel::GATHER));
    // of compress_backward: the tokens' gradient, activated and the chunks' columns, of keys and values
    const size_t columns = s.key_rows() / size_t(s.d) * size_t(s.F * (s.l / s.d));
    scratch += 2 * (s.key_rows() * s.D * sizeof(float) + (s.cmp_rows() * s.F + columns) * sizeof(uint16_t));
    const double GiB = double(size_t(1) << 30),
                 per_parameter = 2 + 4 + 4 + 2 * 4;  // bf16, its master, gradient, two moments
    const double fixed = (double(TensorTable(c).total) * per_parameter + double(Cuda::WORKSPACE)) / GiB;
    const double activations = double(Activations<Cuda>::bytes_needed(dev, c, c.batch, c.seq_len, TRAINING)) / GiB,
                 all = fixed + activations + double(scratch) / GiB;
    std::printf(
        "    %s: %.2f GiB = activations %.2f, parameters, gradients and moments %.2f, scratch %.2f; %lld parameters\n",
        name.c_str(), all, activations, fixed, double(scratch) / GiB, (long long)TensorTable(c).parameters);
    CHECK(double(scratch) / GiB < 0.5);
    return all;
}

// The presets for GPUs fit the cards that they are for, less what driver, context and a desktop take, and have kernels.
TEST(cuda_bench_presets_fit_their_gpus) {
    Cuda dev(0, size_t(1) << 20);
    const std::map<std::string, double> cards = {{"50m", 7}, {"125m", 23}, {"350m", 79}};
    for (const Config& preset : PRESETS) {
        Config c = options_of("--model " + preset.model);
        c.batch = preset.batch;
        dev.check_shape(shape_of(c, c.batch, c.seq_len));
        if (cards.count(c.model)) CHECK(training_gib(dev, c, c.model) < cards.at(c.model));
    }
}

// 64k tokens on one GPU of 80 GB (80 GiB less what driver and context take: 79 GiB are counted on): the preset 125m at
// B = 1 with --recompute 1 or 2.
TEST(cuda_bench_64k_tokens_fit_80_gb) {
    Cuda dev(0, size_t(1) << 20);
    double before = 1e30;
    for (const char* recompute : {"0", "1", "2"}) {
        const char* words[] = {"train_nsa", "--model", "125m", "--seq-len",   "65536",  "--total-batch",
                               "65536",     "--batch", "1",    "--recompute", recompute};
        std::set<std::string> given;
        Config c = parse_options(int(std::size(words)), words, given);
        apply_preset(c, given);
        validate_model(c, "test");
        const double all = training_gib(dev, c, std::string("125m, 1 x 65536, --recompute ") + recompute);
        if (c.recompute > 0) CHECK(all < 79);
        CHECK(all < before);
        before = all;
    }
}
#endif
