// decode_tests.h: decoding on the CPU engine up to 4096 tokens, and what `sample` says of it.
#pragma once
#include "decode_check.h"
#include "model_tests.h"
#include "../program/program.h"

// 64 selection blocks of which 6 are read, and a window that is soon left behind.
static const char* const DECODED =
    "--init random --layers 2 --dim 32 --heads 4 --kv-groups 2 --head-dim 16 --cmp-block 32 --cmp-stride 16 "
    "--slc-block 64 --slc-count 6 --window 128 --phi-hidden 12 --mlp-hidden 64 --seq-len 4096 ";

// A row of a product does not depend on how many there are, so nothing may differ.
TEST(decoding_has_the_bits_of_the_forward_pass_up_to_4096_tokens) {
    SelectionRecorder<Cpu<float>> dev;
    check_decoding(dev, config_of(DECODED), 0);
}
TEST(decoding_has_the_bits_of_the_forward_pass_in_other_layers) {
    for (const char* layers : {"full", "window,full", "window,nsa", "nsa,full,window --layers 4"}) {
        SelectionRecorder<Cpu<float>> dev;
        check_decoding(dev, config_of(std::string(DECODED) + "--seq-len 1024 --attention " + layers), 0);
    }
}
// As in cuda_model_tests.h: R arrays between a token and a logit,
// each of sums of up to K = 300 terms (keys, by their weights; columns), are rounded by u: sqrt(R K) u.
static double rounding_limit(double u, double terms) { return std::sqrt((11 + 13 * 2 + 2) * terms) * u; }
// Operands are rounded by 2^-9, and on either side of a tie in another direction.
TEST(decoding_is_the_forward_pass_in_bf16) {
    if (!HAVE_BF16) return skip("decoding in bf16: this processor has no AVX512_BF16");
    SelectionRecorder<Cpu<float>> dev;
    dev.gemm.bf16 = true;
    check_decoding(dev, config_of(std::string(DECODED) + "--seq-len 1024 "), rounding_limit(0x1p-8, 1));
}
// The plain loops count too.
TEST(decoding_is_the_forward_pass_in_the_specification) {
    SelectionRecorder<Cpu<double>> dev;
    check_decoding(dev, config_of(std::string(SMALL) + "--init random "), rounding_limit(0x1p-53, 300));
}
TEST(decoding_in_bytes_and_formula) {
    SelectionRecorder<Cpu<float>> dev;
    const Config c = config_of(std::string(DECODED) + "--seq-len 1000 ");
    Model<SelectionRecorder<Cpu<float>>> model(dev, c, false);
    model.initialise();
    Decoder<SelectionRecorder<Cpu<float>>> decoder(model, 500, 1000);
    std::vector<int32_t> next(500, 7);
    for (int i = 0; i < 300; i++) next = {decoder.next(next, c)};
    const DecodeMeans m = decoder.meter.means();
    // positions 500 .. 798, that is T = 501 .. 799 keys, of 2 groups of 16 numbers of 4 bytes
    KeyReads sum;
    double formula = 0;
    for (int t = 500; t < 799; t++) {
        const KeyReads r = reads_by_definition<Cpu<float>>(decoder.a.shape, t, c);  // of two layers
        for (int i = 0; i < BRANCHES; i++) sum.keys[i] += r.keys[i] / 2 / 299;
        sum.scored += r.scored / 2 / 299;
        formula += (double(t + 1) / 16 + 6 * 64 + 128) / 299;
    }
    const double all = sum.keys[CMP] + sum.keys[SLC] + sum.keys[WIN];
    for (int i = 0; i < BRANCHES; i++) CHECK_NEAR(m.keys[i], sum.keys[i], 1e-9 * sum.keys[i]);
    CHECK_NEAR(m.all, all, 1e-9 * all);
    CHECK_NEAR(m.formula, formula, 1e-9 * formula);
    CHECK_NEAR(m.full, 650, 1e-9);
    CHECK_NEAR(m.KiB, (all * 2 + sum.scored) * 16 * 2 * 4 / 1024, 1e-9 * m.KiB);
    CHECK_NEAR(m.full_KiB, 650 * 2 * 2 * 16 * 4 / 1024.0, 1e-9 * m.full_KiB);
    // The formula counts the last block as full, and a compressed block for the beginning of one.
    CHECK(m.all <= m.formula && m.formula <= m.all + 64 + 2);
}

// `sample` ends with them, on stderr.
TEST(sample_says_what_decoding_read) {
    using namespace program;
    for (const char* kind : {"nsa", "full"}) {
        TempFolder folder;
        const Words model = {"--layers",   "1",  "--dim",        "32", "--heads",   "2",  "--kv-groups",     "1",
                             "--head-dim", "16", "--mlp-hidden", "32", "--seq-len", "64", "--total-batch",   "64",
                             "--batch",    "1",  "--attention",  kind, "--steps",   "1",  "--sample-tokens", "0",
                             "--out"};
        Words train = {path()};
        train.insert(train.end(), model.begin(), model.end());
        train.push_back(folder.file("run"));
        CHECK_EQUAL(execute(train).status, 0);
        const Result r =
            execute({path(), "sample", "--from", folder.file("run"), "--tokens", "64", "--past-end", "--stats"});
        CHECK_EQUAL(r.status, 0);
        CHECK(r.err.find("decoding: 63 tokens in ") != std::string::npos);
        // T = 2 .. 64 on average 33 of full attention; 33 numbers of 16 x 4 bytes, twice
        CHECK(std::regex_search(r.err, std::regex("full attention +33\\.0 +4\\.1\n")));
        // NSA with blocks of 8 at every 4th token, 6 selected ones of 16, a window of 16
        double keys = 0;
        for (int t = 1; t < 64; t++)
            keys += (t < 7 ? 0 : (t - 7) / 4 + 1) + std::min(t / 16, 5) * 16 + t % 16 + 1 + std::min(t + 1, 16);
        const std::string counted = *kind == 'f' ? "33\\.0 +4\\.1" : format_text("%.1f", keys / 63);
        CHECK(std::regex_search(r.err, std::regex("counted +" + counted)));
        CHECK_EQUAL(r.err.find("T/d + n l' + w") != std::string::npos, *kind == 'n');
    }
}
