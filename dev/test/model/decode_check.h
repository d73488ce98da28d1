// decode_check.h: decoding token by token with caches against one forward pass over all tokens, at every position:
// logits and selections. For every engine; used by decode_tests.h (Cpu) and cuda_model_tests.h (Cuda).
#pragma once
#ifndef NSA_WITHOUT_MAIN
#define NSA_WITHOUT_MAIN
#include "../../../train_nsa.cu"
#endif
#include "../harness.h"

// An engine that keeps the selections of a forward pass over all tokens, then compares those of decoding with them and
// goes on with the former: so that one near tie, which a rounding decides, is not every later position's.
template <class Engine>
struct SelectionRecorder : Engine {
    using Engine::Engine;
    using real = typename Engine::real;
    using Stat = typename Engine::Stat;
    bool decoding = false;
    size_t call = 0, different = 0;
    double limit = 0;                             // of the relative error of q and of compressed keys; 0: same bits
    std::vector<std::vector<uint32_t>> recorded;  // by layer: [G, T, words]

    void attend_and_select(real* out, Stat* lse, uint32_t* selection, Stat* chosen_importance, const real* q,
                           const real* kc, const real* vc, const NsaShape& s) {
        Engine::attend_and_select(out, lse, selection, chosen_importance, q, kc, vc, s);
        const size_t words = size_t(s.selection_words());
        std::vector<uint32_t> found(size_t(s.G) * s.queries * words);
        this->copy(found.data(), (const uint32_t*)selection, found.size());
        if (!decoding) return recorded.push_back(found);
        const std::vector<uint32_t>& all = recorded[call++ % recorded.size()];
        for (size_t g = 0; g < size_t(s.G); g++) {
            uint32_t* const mine = &found[g * words];
            const uint32_t* const expected = &all[(g * s.T + s.first) * words];
            tests().checks++;
            if (std::equal(mine, mine + words, expected)) continue;
            different++;
            check_near_tie(mine, expected, g, q, kc, lse, s);
            std::copy_n(expected, words, mine);
        }
        this->copy(selection, (const uint32_t*)found.data(), found.size());
    }

    // Blocks that only one of the two chose must be about equally important. A score q.k / sqrt(D) is off by at most
    // 2 limit |q| |k| / sqrt(D) in either, an importance by that factor, and both of two blocks may be.
    void check_near_tie(const uint32_t* found, const uint32_t* expected, size_t g, const real* q, const real* kc,
                        const Stat* lse, const NsaShape& s) {
        const size_t D = size_t(s.D), h = size_t(s.heads_per_group()), blocks = size_t(s.cmp_blocks(s.first + 1));
        std::vector<float> rows(h * D), keys(blocks * D), importance(size_t(s.slc_blocks()));
        std::vector<Stat> shift(h);
        std::vector<float> shifts(h);
        this->to_host(rows.data(), q + g * h * D, rows.size());
        this->to_host(keys.data(), kc + g * size_t(s.cmp_capacity()) * D, keys.size());
        this->copy(shift.data(), lse + g * h, h);
        std::copy(shift.begin(), shift.end(), shifts.begin());
        Cpu<float>().block_importance(importance.data(), rows.data(), shifts.data(), keys.data(), s.first, s);
        const auto longest = [&](const std::vector<float>& x) {
            double most = 0;
            for (size_t at = 0; at < x.size(); at += D) {
                double square = 0;
                for (size_t i = 0; i < D; i++) square += double(x[at + i]) * x[at + i];
                most = std::max(most, std::sqrt(square));
            }
            return most;
        };
        const double off = 4 * limit * longest(rows) * longest(keys) * s.scale();
        for (int a = 0; a < s.slc_blocks(); a++)
            for (int b = 0; b < s.slc_blocks(); b++) {
                const auto only = [&](const uint32_t* x, const uint32_t* y, int block) {
                    return is_selected(x, block) && !is_selected(y, block);
                };
                if (!only(found, expected, a) || !only(expected, found, b)) continue;
                const double larger = std::max(importance[size_t(a)], importance[size_t(b)]);
                CHECK_NEAR(importance[size_t(a)], importance[size_t(b)], 2 * std::expm1(off) * larger);
            }
    }
};

// limit: of the relative error of an array of the model in this engine's format; 0: every bit must be the same, which
// is so where a row of a product does not depend on the others.
template <class Engine>
void check_decoding(SelectionRecorder<Engine>& dev, const Config& c, double limit) {
    using Dev = SelectionRecorder<Engine>;
    const int T = int(c.seq_len), V = int(c.vocab_size);
    Model<Dev> model(dev, c, false);
    model.initialise();
    std::vector<int32_t> tokens, no_targets(size_t(T), 0);
    for (int t = 0; t < T; t++)
        tokens.push_back(int32_t(random_below(256, 5, random_stream(RANDOM_TEST, 3), uint64_t(t))));
    std::vector<float> expected, found(static_cast<size_t>(V));
    {
        Activations<Dev> whole(dev, c, 1, T, INFERENCE);
        forward(model, whole, tokens.data(), 0, T);
        classify(model, whole, no_targets.data(), 0, false, &expected);
    }
    dev.decoding = true, dev.limit = limit;
    Activations<Dev> steps(dev, c, 1, T, INFERENCE, 1);
    double worst = 0;
    for (int t = 0; t < T; t++) {
        forward(model, steps, &tokens[size_t(t)], t, 1);
        dev.matmul_forward(steps.logits, steps.normed, model.w.head, nullptr, 1, int(c.dim), int(steps.Vp));
        dev.to_host(found.data(), steps.logits, found.size());
        const float* const row = &expected[size_t(t) * size_t(V)];
        if (limit == 0) CHECK(std::memcmp(found.data(), row, found.size() * sizeof(float)) == 0);
        double difference = 0, size = 0;
        for (size_t v = 0; v < size_t(V); v++)
            difference += std::pow(double(found[v]) - row[v], 2), size += std::pow(double(row[v]), 2);
        worst = worse_error(worst, std::sqrt(difference / size));
    }
    // An array's relative error is a mean over its rows; the worst of thousands of rows is off by a few times that.
    CHECK_NEAR(worst, 0, 4 * limit);
    if (limit == 0) CHECK_EQUAL(dev.different, size_t(0));
    if (std::getenv("TEST_SHOW_ERRORS"))
        std::printf("    %d positions: logits off by %.2e of %.2e, %zu of %zu sets differ by near ties\n", T, worst,
                    4 * limit, dev.different, dev.recorded.size() * size_t(c.kv_groups) * size_t(T));
}
