// inspect_tests.h: the verb `inspect`: its JSON against the specification in fp64, its page against its JSON, the
// worked example against numbers by hand and against dev/MODEL.md. What a browser makes of the page,
// dev/browser_check.py sees; it runs here where there is a Chromium.
#pragma once
#include "model_tests.h"

namespace inspect_test {

using namespace program;

// Words, lines, characters of two to four bytes, bytes that are none, and what HTML and JSON would take for their own.
inline std::string strange_text() {
    std::string text = "For all the love, \"romance\" and <b>scandal</b>\\ in books:\n\ttoo\r\n";
    text += "</script><script>alert(1)</script> <!-- & \xC3\xA9\xE2\x82\xAC\xF0\x9F\x8E\xBC \xFF\xC3 end \x01.\n";
    for (int i = 0; i < 6; i++) text += format_text("line %d of some more words to read; ", i);
    return text;
}

// A run of the program with two layers and two groups; returns its checkpoint.
inline std::string trained(const InFolder& in) {
    REQUIRE_GOOD(
        in.run("small --layers=2 --heads=4 --kv-groups=2 --init=random --seq-len=512 --batch=1 "
               "--total-batch=512"));
    return in.out + "/step_00000002";
}
inline Json array_at(const Json& x, size_t i) { return x.array("inspect").at(i); }

// What the specification finds in a layer: importances of all blocks of a query, and its gates.
struct Found {
    std::vector<std::vector<std::vector<double>>> importance;  // [G][T][blocks]
    std::vector<double> gate;                                  // [3][H][T]
};
inline std::vector<Found> by_the_specification(const Config& c, const std::string& checkpoint,
                                               const std::vector<int32_t>& tokens) {
    Cpu<double> dev;
    Model<Cpu<double>> model(dev, c, false);
    read_parameters(model, SafeTensors(checkpoint + "/model.safetensors"));
    const int T = int(tokens.size());
    Activations<Cpu<double>> a(dev, c, 1, T, INFERENCE);
    std::vector<Found> layers;
    forward(model, a, tokens.data(), 0, T, [&](size_t i) {
        const NsaShape& s = a.shape;
        const auto& y = a.layer[i];
        Found found;
        found.importance.resize(size_t(s.G));
        found.gate.assign(y.gate, y.gate + 3 * s.H * T);
        for (int g = 0; g < s.G; g++)
            for (int t = 0; t < T; t++) {
                std::vector<double> importance(size_t(t / s.slc_block + 1));
                const size_t row = size_t(g * s.heads_per_group()) * size_t(T) + size_t(t);
                dev.block_importance(importance.data(), y.q + row * size_t(s.D), y.lse + row,
                                     y.compressed + size_t(g * s.cmp_capacity() * s.D), t, s);
                found.importance[size_t(g)].push_back(importance);
            }
        layers.push_back(found);
    });
    return layers;
}

// Eq. 11: as many blocks as must be, the forced ones among them, and no other that is less important than one left out.
// Importances are printed with four digits, and fp32 is off by 1e-5 at most: so are those that it orders.
inline void check_query(const Json& blocks, const Json& importances, double all, const std::vector<double>& expected,
                        int t, const NsaShape& s) {
    const int last = t / s.slc_block;
    std::set<int> chosen;
    double sum = 0, largest = 0;
    for (const double x : expected) sum += x, largest = std::max(largest, x);
    CHECK_NEAR(all, sum, 6e-4 * sum);
    REQUIRE(blocks.items.size() == importances.items.size());
    for (size_t i = 0; i < blocks.items.size(); i++) {
        const int block = int(array_at(blocks, i).integer("blocks"));
        REQUIRE(block >= 0 && block <= last);
        CHECK(chosen.insert(block).second);
        CHECK_NEAR(array_at(importances, i).number(""), expected[size_t(block)], 6e-4 * expected[size_t(block)] + 1e-6);
    }
    CHECK_EQUAL(chosen.size(), size_t(std::min(last + 1, s.slc_count)));
    for (const int block : {0, std::max(0, last - 1), last}) CHECK(chosen.count(block) == 1);
    for (const int a : chosen)
        for (int b = 0; b <= last; b++)
            if (!chosen.count(b) && a != 0 && a < last - 1)
                CHECK(expected[size_t(a)] >= expected[size_t(b)] - 1e-5 * largest);
}

}  // namespace inspect_test

PROGRAM_TEST(inspect_json_is_what_the_specification_selects) {
    using namespace inspect_test;
    const std::string checkpoint = trained(*this), text = strange_text();
    write("text.txt", text);
    REQUIRE_GOOD(run("inspect --from @/run --text @/text.txt --json @/x.json --threads 2"));
    const Json x = parse_json(read_file(file("x.json")), "x.json");
    Config c;
    read_config_json(c, checkpoint + "/config.json");
    std::vector<int32_t> tokens = {0};  // the bytes, behind an end-of-text
    for (const char byte : text) tokens.push_back(uint8_t(byte));
    const int T = int(tokens.size());
    const NsaShape s = shape_of(c, 1, T);
    REQUIRE(x.array("ids", "").size() == size_t(T) && x.array("layers", "").size() == 2);
    std::string joined_texts;
    for (int t = 0; t < T; t++) {
        CHECK_EQUAL(array_at(x.get("ids", ""), size_t(t)).integer(""), int64_t(tokens[size_t(t)]));
        joined_texts += array_at(x.get("tokens", ""), size_t(t)).string("");
    }
    // the two bytes that are no characters
    CHECK_EQUAL(joined_texts, std::regex_replace(text, std::regex("\xFF\xC3"), "\xEF\xBF\xBD\xEF\xBF\xBD"));
    const std::vector<Found> expected = by_the_specification(c, checkpoint, tokens);
    for (size_t i = 0; i < 2; i++)
        for (size_t g = 0; g < 2; g++) {
            const Json group = array_at(array_at(x.get("layers", ""), i).get("groups", ""), g);
            for (int t = 0; t < T; t++) {
                const auto at = [&](const char* name) { return array_at(group.get(name, ""), size_t(t)); };
                check_query(at("blocks"), at("importances"), at("all_importance").number(""),
                            expected[i].importance[g][size_t(t)], t, s);
                for (size_t head = 0; head < 2; head++)
                    for (size_t branch = 0; branch < 3; branch++)  // three decimals
                        CHECK_NEAR(array_at(array_at(at("gates"), head), branch).number(""),
                                   expected[i].gate[(branch * 4 + 2 * g + head) * size_t(T) + size_t(t)], 5.1e-4);
            }
        }
}

// All that the page shows is in it, and it asks for nothing else.
PROGRAM_TEST(inspect_page_holds_its_json_and_refers_to_nothing_outside) {
    inspect_test::trained(*this);
    write("text.txt", inspect_test::strange_text());
    REQUIRE_GOOD(run("inspect --from @/run --text @/text.txt --json @/x.json --html @/x.html"));
    const std::string page = read_file(file("x.html")), json = read_file(file("x.json"));
    const std::string open = "<script type=\"application/json\" id=\"data\">";
    const size_t at = page.find(open) + open.size(), end = page.find("</script>", at);
    CHECK(page.substr(at, end - at) == std::regex_replace(json, std::regex("<"), "\\u003c"));
    const std::string frame = page.substr(0, at) + page.substr(end);
    CHECK(frame == std::regex_replace(read_file("lib/report/html/inspect.html"), std::regex("@JSON@"), ""));
    // from stdin, the same
    Start from_stdin;
    from_stdin.input = file("text.txt");
    REQUIRE_GOOD(run("inspect --from @/run --text - --json @/y.json", from_stdin));
    const auto layers = [](const std::string& text) { return text.substr(text.find("\"ids\"")); };
    CHECK(layers(read_file(file("y.json"))) == layers(json));
}

PROGRAM_TEST(inspect_says_what_is_wrong) {
    write("text.txt", "Some words.");
    const std::string good = "inspect --from @/run --text @/text.txt ", pipe = file("pipe.txt");
    CHECK_EQUAL(mkfifo(pipe.c_str(), 0600), 0);
    REQUIRE_GOOD(run("small"));
    REQUIRE_GOOD(run("small --attention=full --out=@/dense"));
    for (int twice = 0; twice < 2; twice++) REQUIRE_GOOD(run(good + "--json @/x.json --html @/x.html"));
    check({
        {"inspect", 2, {"--from"}},
        {"inspect --from @/run --html @/x", 2, {"--text is missing"}},
        {good, 2, {"--html FILE, --json FILE"}},
        {good + "--html @/no/x.html", 1, {"there is no folder"}},
        {good + "--json " + folder.path, 1, {"is a folder"}},
        {good + "--json @/x.html", 1, {"this program has not written it"}},
        {good + "--html @/text.txt", 1, {"this program has not written it"}},
        {"inspect --from @/run --text @/none --json @/x", 1, {"none"}},
        {"inspect --from @/dense --text @/text.txt --json @/x", 1, {"--attention full"}},
    });
    for (const std::string& endless : {pipe, std::string("/dev/zero")})
        for (const std::string command :
             {"inspect --json @/x --from @/run --text ", "sample --from @/run --prompt-file "})
            check({{command + endless, 1, {endless + " is a pipe or a device", "or -"}}});
    CHECK_EQUAL(read_file(file("text.txt")), std::string("Some words."));
}

// Of a text that is longer than a page shows, the first tokens that fit.
PROGRAM_TEST(inspect_shows_a_part_of_a_long_text) {
    REQUIRE_GOOD(run("small --cmp-block=64 --cmp-stride=64 --slc-block=64"));
    std::string text;
    for (int i = 0; i < 20000; i++) text += char('a' + i % 7);
    write("text.txt", text);
    const Result r = run("inspect --from @/run --text @/text.txt --json @/x.json");
    CHECK(r.status == 0 && holds(r.out, "the first 16383 of the 20000 tokens"));
    const std::string json = read_file(file("x.json")), begin = "\"tokens\": ";
    const size_t at = json.find(begin) + begin.size();
    std::string shown;
    for (const Json& token : parse_json(json.substr(at, json.find("]", at) + 1 - at), "x.json").items)
        shown += token.string("x.json");
    CHECK(shown == text.substr(0, 16383));
}

TEST(inspect_tokens_show_the_characters_that_begin_in_them) {
    using List = std::vector<std::string>;
    CHECK(show_tokens({"", "a", "\xC3", "\xA9", "b"}) == List({"", "a", "\xC3\xA9", "", "b"}));
    CHECK(show_tokens({"x\xE2", "\x82", "\xACy"}) == List({"x\xE2\x82\xAC", "", "y"}));
    CHECK(show_tokens({"\xFF", "a\xC3"}) == List({"\xEF\xBF\xBD", "a\xEF\xBF\xBD"}));
    CHECK(show_tokens({}).empty());
}

// The paper's eq. 8 to 12 with numbers, for a dozen tokens: what dev/MODEL.md prints is what the operations that train
// make of the keys that it prints. Scores are whole multiples of ln 2, so weights are powers of two over their sum, 16.
TEST(worked_example_is_right_and_is_what_the_model_card_quotes) {
    const std::string model_card = read_file("dev/MODEL.md"),
                      page = model_card.substr(model_card.find("\n12 tokens, one group of 2 heads"));
    const auto row = [&](const std::string& label) {  // the numbers behind it
        std::istringstream in(program::behind(page, "\n" + label));
        return std::vector<double>(std::istream_iterator<double>(in), {});
    };
    const auto check_row = [&](const std::string& label, const std::vector<double>& found) {
        const std::vector<double> printed = row(label);
        REQUIRE(printed.size() == found.size());
        for (size_t i = 0; i < found.size(); i++) CHECK_NEAR(found[i], printed[i], 1e-12);
    };
    NsaShape s;
    s.B = 1, s.T = s.queries = 12, s.H = 2, s.G = 1, s.D = 4, s.l = 2, s.d = 1;
    s.slc_block = 2, s.slc_count = 4, s.window = 2, s.F = 1;
    const size_t D = size_t(s.D), T = size_t(s.T), last = T - 1, blocks = size_t(s.cmp_blocks(s.T));
    std::vector<double> k(T * D), q(2 * T * D), kc(s.cmp_rows() * D), lse(2 * T), out(2 * T * D), hidden(s.cmp_rows()),
        fc1(size_t(s.l) * D), bias(1), fc2(D), sum(size_t(s.slc_blocks()));
    for (size_t t = 0; t < T; t++)
        for (size_t x = 0; x < 2; x++) {
            k[t * D + x] = row(format_text("key, component %d", x)).at(t);
            q[(x * T + t) * D + x] = 2 * std::log(2);
        }
    std::vector<uint32_t> selection(T);
    Cpu<double> cpu;
    cpu.compress_heads(kc.data(), hidden.data(), k.data(), {fc1.data(), bias.data(), fc2.data()}, false, s);
    cpu.attention_forward(CMP, out.data(), lse.data(), q.data(), kc.data(), kc.data(), nullptr, s);
    cpu.select_blocks(selection.data(), nullptr, q.data(), kc.data(), lse.data(), s);
    for (size_t head = 0; head < 2; head++) {
        std::vector<double> component, p, importance(sum.size()), by_overlap;
        for (size_t i = 0; i < blocks; i++) {
            component.push_back(kc[i * D + head]);
            p.push_back(std::exp(cpu.score(&q[(head * T + last) * D], &kc[i * D], s) - lse[head * T + last]));
        }
        Cpu<double>::fold_importance(importance.data(), p.data(), int(last), s);
        for (size_t j = 0; j < importance.size(); j++) {
            const std::string overlap = program::behind(page, format_text("  block %d, tokens ", j));
            by_overlap.push_back(0);
            const std::regex term("(\\d+) p\\[(\\d+)\\]");
            for (std::sregex_iterator at(overlap.begin(), overlap.end(), term), end; at != end; ++at)
                by_overlap.back() += std::stod(at->str(1)) * p.at(std::stoul(at->str(2)));
        }
        check_row(format_text("component %d", head), component);
        check_row(format_text("p, head %d", head), p);
        check_row(format_text("p_slc, head %d", head), importance);
        check_row(format_text("p_slc, head %d", head), by_overlap);
    }
    cpu.block_importance(sum.data(), &q[last * D], &lse[last], kc.data(), int(last), s);
    check_row("p_slc ", sum);
    std::vector<double> chosen, tokens;
    for (size_t t = 0; t < T; t++, tokens.clear()) {
        chosen.clear();
        for (int key = 0; key <= int(t); key++) {
            if (!is_selected(&selection[t], key / s.slc_block)) continue;
            tokens.push_back(key);
            if (key % s.slc_block == 0) chosen.push_back(key / s.slc_block);
        }
        check_row(format_text("  token %2d:", t), chosen);
        if (t == last) check_row("Eq. 12: the query reads the tokens of these blocks:", tokens);
    }
    check_row("I = {", chosen);
}

PROGRAM_TEST_LONG(inspect_page_in_a_browser) {
    if (std::system("command -v chromium >/dev/null && command -v python3 >/dev/null") != 0)
        return skip("the page of inspect in a browser: there is no chromium (or no python3)");
    inspect_test::trained(*this);
    write("text.txt", inspect_test::strange_text());
    REQUIRE_GOOD(run("inspect --from @/run --text @/text.txt --json @/x.json --html @/x.html"));
    const Result r = execute({"/usr/bin/env", "python3", "dev/browser_check.py", file("x.html"), file("x.json")});
    CHECK_EQUAL(r.err, "");
    CHECK(std::regex_search(r.out, std::regex("^[0-9]{3,} checks, all good\n$")));
}
