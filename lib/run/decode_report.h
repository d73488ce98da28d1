// decode_report.h: how fast `sample` decodes and what it reads of the caches, counted by the engine, beside NSA's
// formula and full attention. Used by Decoder and print_sample() in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "../model/shape.h"
#include "../base/util.h"

// Keys that the token at position t reads by the paper's count, per layer and group, the mean of the layers, T = t + 1:
// of NSA T/d + n l' + w, where no branch has more than T, of a window w, of full attention T.
inline double keys_by_formula(const NsaShape& s, int t, int64_t layers) {
    const double T = t + 1, window = std::min(T, double(s.window));
    double keys = 0;
    for (int64_t i = 0; i < layers; i++) {
        const LayerKind kind = s.kind_of_layer(size_t(i));
        keys += kind == FULL_LAYER     ? T
                : kind == WINDOW_LAYER ? window
                                       : T / s.d + std::min(T, double(s.slc_count) * s.slc_block) + window;
    }
    return keys / double(layers);
}

// The means over the tokens that were decoded; keys are those of a layer and group.
struct DecodeMeans {
    double keys[BRANCHES], scored, all, formula, full;
    double KiB, formula_KiB, full_KiB;  // of a layer, over its groups
};

template <class Dev>
struct DecodeMeter {
    Dev& dev;
    const NsaShape shape;
    const int64_t layers;
    int64_t prompted = 0, tokens = 0;
    double prompt_seconds = 0, seconds = 0, formula = 0, full = 0;  // the latter two summed over tokens
    KeyReads reads;

    DecodeMeter(Dev& device, const NsaShape& s, int64_t layers) : dev(device), shape(s), layers(layers) {}
    DecodeMeter(const DecodeMeter&) = delete;
    ~DecodeMeter() { stop(); }

    // Times a call that reads `count` tokens from `position` on. The first call reads the prompt, in one pass.
    struct Call {
        DecodeMeter& meter;
        const int position;
        const size_t count;
        const double begin = seconds_now();
        Call(DecodeMeter& m, int position, size_t count) : meter(m), position(position), count(count) {
            if (position > 0 && !meter.counting && meter.counts)
                meter.counting = meter.counts = meter.dev.count_reads(&meter.reads);
        }
        ~Call() {
            (position > 0 ? meter.seconds : meter.prompt_seconds) += seconds_now() - begin;
            (position > 0 ? meter.tokens : meter.prompted) += int64_t(count);
            for (size_t i = 0; position > 0 && i < count; i++) {
                meter.formula += keys_by_formula(meter.shape, position + int(i), meter.layers);
                meter.full += double(position) + double(i) + 1;
            }
        }
    };

    DecodeMeans means() {
        stop();
        DecodeMeans m = {};
        if (tokens == 0) return m;
        const double places = double(tokens * layers * shape.B * shape.G),
                     number = double(shape.G) * sizeof(typename Dev::real) / 1024,  // KiB, in every group of a layer
            pair = 2 * number * shape.D;                                            // of a key and its value
        for (int i = 0; i < BRANCHES; i++) m.all += m.keys[i] = reads.keys[i] / places;
        m.scored = reads.scored / places;
        m.formula = formula / double(tokens);
        m.full = full / double(tokens);
        m.KiB = m.all * pair + m.scored * number * shape.D;
        m.formula_KiB = m.formula * pair;
        m.full_KiB = m.full * pair;
        return m;
    }

    // On stderr: stdout is the text's.
    void print() {
        const DecodeMeans m = means();
        if (tokens == 0) return;
        std::fflush(stdout);
        std::fprintf(stderr,
                     "decoding: %s in %.3g s, %.4g tokens/s, behind a prompt of %lld in %.3g s\n"
                     "          read per token and layer       keys a group          KiB\n",
                     counted(tokens, "token").c_str(), seconds, double(tokens) / seconds, (long long)prompted,
                     prompt_seconds);
        if (counts) std::fprintf(stderr, "          counted %34.1f %12.1f", m.all, m.KiB);
        else std::fprintf(stderr, "          not counted: this engine does not");
        if (!shape.full && counts)
            std::fprintf(stderr, "   compressed %.1f, selected %.1f, window %.1f; %.1f scored again to choose blocks\n",
                         m.keys[CMP], m.keys[SLC], m.keys[WIN], m.scored);
        else std::fprintf(stderr, "\n");
        if (!shape.full)
            std::fprintf(stderr, "          formula, T/d + n l' + w %18.1f %12.1f\n", m.formula, m.formula_KiB);
        std::fprintf(stderr, "          full attention %27.1f %12.1f\n", m.full, m.full_KiB);
    }

  private:
    bool counting = false, counts = true;  // now, and whether the engine can
    void stop() {
        if (counting) dev.count_reads(nullptr);
        counting = false;
    }
};
