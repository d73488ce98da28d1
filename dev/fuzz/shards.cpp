// shards.cpp: opens the input as a token shard and reads every sample of an epoch. The first byte of the input chooses
// the sequence length, the vocabulary and the shuffling; the rest is the file.
#include "../../dataloader.h"
#include "fuzz.h"

static const MemoryFile file;

static std::string shard(const std::vector<int32_t>& head, const std::vector<uint16_t>& tokens) {
    std::string bytes(SHARD_HEADER_BYTES, '\0');
    std::memcpy(&bytes[0], head.data(), 4 * head.size());
    return bytes + std::string(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
}

std::vector<std::string> seeds() {
    const std::vector<uint16_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
    return {"\x02" + shard({SHARD_MAGIC, 1, 13}, tokens),
            "\x03" + shard({SHARD_MAGIC, 1, 13, 256}, tokens),
            "\x83" + shard({SHARD_MAGIC, 1, 13, 50257}, tokens),
            "\x81" + shard({SHARD_MAGIC, 1, 2}, {50256, 65535}),
            "\x02" + shard({SHARD_MAGIC, 1, INT32_MAX}, tokens),
            "\x02" + shard({20240801, 7, 13}, tokens),
            "\x02PAR1abcPAR1",
            "\x02some text\n",
            "\x02\x1f\x8b",
            "\x02"};
}

void fuzz_one(const std::string& input) {
    if (input.empty()) return;
    LoaderOptions options;
    options.seq_len = 1 + (input[0] & 15);
    options.vocab_size = input[0] & 0x80 ? 50257 : 256;
    options.shuffle = input[0] & 0x40;
    const std::string bytes = input.substr(1);
    const std::string& path = file.fill(bytes);
    std::unique_ptr<DataLoader> loader;
    {
        MemoryLimit limit(bytes.size(), 16 << 10, 2);
        if (!accepts([&] { loader = std::make_unique<DataLoader>(open_shards({path}), options); })) return;
    }
    EXPECT(loader->tokens() == (bytes.size() - SHARD_HEADER_BYTES) / 2);
    const int T = options.seq_len, n = int(loader->samples_per_epoch());
    EXPECT(n == int((loader->tokens() - 1) / uint64_t(T)));
    const auto token = [&](size_t i) {
        uint16_t t;
        std::memcpy(&t, bytes.data() + SHARD_HEADER_BYTES + 2 * i, 2);
        return t;
    };
    bool valid = true;  // all tokens that are in samples
    for (int i = 0; i <= n * T; i++) valid = valid && token(size_t(i)) < options.vocab_size;
    std::vector<int32_t> inputs(size_t(n) * size_t(T)), targets(inputs.size());
    EXPECT(accepts([&] { loader->next_batch(inputs.data(), targets.data(), n); }) == valid);
    if (!valid) return;
    std::vector<bool> seen(size_t(n), false);
    const LoaderState state = loader->state();
    EXPECT(state.next_sample == uint64_t(n));
    for (int b = 0; b < n; b++) {
        int found = -1;  // samples with the same tokens are interchangeable
        for (int s = 0; s < n && found < 0; s++) {
            bool equal = !seen[size_t(s)];
            for (int t = 0; t < T && equal; t++)
                equal = inputs[size_t(b * T + t)] == token(size_t(s * T + t)) &&
                        targets[size_t(b * T + t)] == token(size_t(s * T + t + 1));
            if (equal) found = s;
        }
        EXPECT(found >= 0 && (options.shuffle || found <= b));
        seen[size_t(found)] = true;
    }
    DataLoader second(open_shards({path}), options);
    second.restore(state);
    EXPECT(second.state().corpus == state.corpus && second.state().next_sample == state.next_sample);
}
