// options.cpp: the input's lines as the words of a command line. Accepted options are in the ranges of the table, are
// consistent, and give a manifest that is valid JSON.
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#include "fuzz.h"

std::vector<std::string> seeds() {
    return {"",
            "train\n--model\n125m\n--batch=2",
            "--total-batch\n8192\n--seq-len\n1024\n--batch\n4",
            "tokenize\n--in\na.txt\nb.jsonl\n--out\nx\n--val-fraction=0.5\n--split-documents\n\\n\\n",
            "sample\n--from\nruns/a\n--prompt\nOnce\n--top-p=0.9\n--temperature\n0",
            "eval\n--from\nx\n--val-data\n*.bin",
            "check",
            "-h",
            "--lr\n1e-3\n--lr\n1",
            "--resume\n--steps=0x10\n--warmup=nan\n--seed\n9e15",
            "--heads\n6\n--kv-groups\n4",
            "--out\n///",
            "--resume=off\n--attention=full\n--cmp-block\n7",
            "--layer\n3"};
}

void fuzz_one(const std::string& input) {
    std::vector<std::string> words = {"train_nsa"};
    for (size_t begin = 0; begin < input.size();) {
        const size_t end = std::min(input.find('\n', begin), input.size());
        words.push_back(input.substr(begin, end - begin).c_str());  // a word ends at a zero byte
        begin = end + 1;
    }
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    argv.push_back(nullptr);
    static World world;
    world.size = 1 + int(input.size() % 4);
    std::set<std::string> given;
    Config c;
    const bool accepted = accepts([&] {
        c = parse_options(int(argv.size()) - 1, argv.data(), given);
        if (c.help || c.verb != "train") return;
        apply_preset(c, given);
        validate_model(c, "options");
        resolve_batch(c, given, world.size, input.size() % 8 < 4);
    });
    if (!accepted) return;
    for (const Option& o : OPTIONS) {
        if (!given.count(o.name)) continue;
        if (o.integer) EXPECT(double(c.*o.integer) >= o.low && double(c.*o.integer) <= o.high);
        if (o.real) EXPECT(c.*o.real >= o.low && c.*o.real <= o.high);
        if (o.text && o.choices) EXPECT(is_choice(c.*o.text, o.choices));
    }
    if (c.help || c.verb != "train") return;
    EXPECT(c.batch >= 1 && c.seq_len >= 1 && c.total_batch % (c.batch * c.seq_len * world.size) == 0 &&
           c.total_batch >= c.batch * c.seq_len * world.size);
    const Json manifest = parse_json(manifest_json(c), "manifest");
    for (const Option& o : OPTIONS)
        if (o.integer && (o.verbs & TRAIN)) EXPECT(manifest.integer(underscored(o.name), "manifest") == c.*o.integer);
}
