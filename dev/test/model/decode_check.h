// decode_check.h: decoding token by token, or in pieces, with caches against one forward pass over all tokens, at every
// position: what the last layer gives, and selections. For every engine; used by decode_tests.h (Cpu) and
// engine_model_tests.h.
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
        for (size_t row = 0; row < size_t(s.G) * s.queries; row++) {
            const size_t g = row / s.queries, t = size_t(s.first) + row % s.queries;
            uint32_t* const mine = &found[row * words];
            const uint32_t* const expected = &all[(g * s.T + t) * words];
            tests().checks++;
            if (std::equal(mine, mine + words, expected)) continue;
            different++;
            check_near_tie(mine, expected, g, int(t), q, kc, lse, s);
            std::copy_n(expected, words, mine);
        }
        this->copy(selection, (const uint32_t*)found.data(), found.size());
    }

    // Blocks that only one of the two chose must be about equally important. A score q.k / sqrt(D) is off by at most
    // 2 limit |q| |k| / sqrt(D) in either, an importance by that factor, and both of two blocks may be.
    void check_near_tie(const uint32_t* found, const uint32_t* expected, size_t g, int t, const real* q, const real* kc,
                        const Stat* lse, const NsaShape& s) {
        const size_t D = size_t(s.D), h = size_t(s.heads_per_group()), blocks = size_t(s.cmp_blocks(t + 1));
        std::vector<float> rows(h * D), keys(blocks * D), importance(size_t(s.slc_blocks())), shifts(h);
        for (size_t head = 0; head < h; head++) {
            const size_t row = (g * h + head) * s.queries + size_t(t - s.first);
            Stat shift;
            this->to_host(&rows[head * D], q + row * D, D);
            this->copy(&shift, lse + row, 1);
            shifts[head] = float(shift);
        }
        this->to_host(keys.data(), kc + g * size_t(s.cmp_capacity()) * D, keys.size());
        NsaShape alone = s;
        alone.first = t, alone.queries = 1;
        Cpu<float>().block_importance(importance.data(), rows.data(), shifts.data(), keys.data(), t, alone);
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
void check_decoding(SelectionRecorder<Engine>& dev, const Config& c, double limit,
                    const std::vector<int>& pieces = {1}) {  // so many tokens at once, the last of them again and again
    using Dev = SelectionRecorder<Engine>;
    const size_t T = size_t(c.seq_len), C = size_t(c.dim);
    Model<Dev> model(dev, c, false);
    model.initialise();
    std::vector<int32_t> tokens;
    for (size_t t = 0; t < T; t++) tokens.push_back(int32_t(random_below(256, 5, random_stream(RANDOM_TEST, 3), t)));
    std::vector<typename Dev::real> expected(T * C), found(T * C);
    {
        Activations<Dev> whole(dev, c, 1, int(T), INFERENCE);
        forward(model, whole, tokens.data(), 0, int(T));
        dev.copy(expected.data(), (const typename Dev::real*)whole.normed, expected.size());
    }
    dev.decoding = true, dev.limit = limit;
    Activations<Dev> steps(dev, c, 1, int(T), INFERENCE, *std::max_element(pieces.begin(), pieces.end()));
    for (size_t first = 0, piece = 0, count; first < T; first += count) {
        count = std::min(size_t(pieces[std::min(piece++, pieces.size() - 1)]), T - first);
        forward(model, steps, &tokens[first], int(first), int(count));
        dev.copy(&found[first * C], (const typename Dev::real*)steps.normed, count * C);
    }
    double worst = 0;
    for (size_t t = 0; t < T; t++) {
        double difference = 0, size = 0;
        for (size_t i = t * C; i < (t + 1) * C; i++) {
            const double x = float(found[i]), y = float(expected[i]);
            difference += std::pow(x - y, 2), size += std::pow(y, 2);
        }
        worst = worse_error(worst, std::sqrt(difference / size));
    }
    // An array's relative error is a mean over its rows; the worst of thousands of rows is off by a few times that.
    CHECK_NEAR(worst, 0, 4 * limit);
    if (limit == 0) {
        CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(found[0])) == 0);
        CHECK_EQUAL(dev.different, size_t(0));
    }
    if (std::getenv("TEST_SHOW_ERRORS"))
        std::printf("    %zu positions: off by %.2e of %.2e, %zu of %zu sets differ by near ties\n", T, worst,
                    4 * limit, dev.different, dev.recorded.size() * size_t(c.kv_groups) * T);
}
