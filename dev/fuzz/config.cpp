// config.cpp: the input as a checkpoint's config.json. Accepted values are in the ranges of the options, and read the
// same once they are written again.
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#include "fuzz.h"

static const MemoryFile file, again;

static Config preset(const std::vector<const char*>& words) {
    std::vector<const char*> argv = {"train_nsa"};
    argv.insert(argv.end(), words.begin(), words.end());
    std::set<std::string> given;
    Config c = parse_options(int(argv.size()), argv.data(), given);
    apply_preset(c, given);
    return c;
}

std::vector<std::string> seeds() {
    const std::string tiny = config_json(preset({})),
                      large = config_json(preset({"--model", "125m", "--attention", "full"}));
    std::string other = tiny;
    other.replace(other.find("128"), 3, "1e2");
    return {tiny, large, other, "{\"architecture\": \"nsa\"}", "{}"};
}

void fuzz_one(const std::string& input) {
    Config c;
    {
        const std::string& path = file.fill(input);
        MemoryLimit limit(input.size(), 64 << 10, 400);
        if (!accepts([&] { read_config_json(c, path); })) return;
    }
    for (const Option& o : OPTIONS) {
        if (!(o.traits & OF_MODEL) || !o.integer) continue;
        EXPECT(double(c.*o.integer) >= o.low && double(c.*o.integer) <= o.high);
    }
    EXPECT(!layer_kinds(c.attention).empty());
    Config second;
    EXPECT(accepts([&] { read_config_json(second, again.fill(config_json(c))); }));
    EXPECT(config_json(second) == config_json(c));
    if (c.layers > 20) return;  // the table's time and memory grow with the layers
    const TensorTable table(c);
    EXPECT(table.parameters > 0 && table.total >= size_t(table.parameters));
}
