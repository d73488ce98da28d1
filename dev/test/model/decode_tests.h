// decode_tests.h: decoding on the CPU engine up to 4096 tokens.
#pragma once
#include "decode_check.h"
#include "model_tests.h"

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
    for (const char* layers :
         {"full", "window,full", "window,nsa", "nsa,full,window --layers 4", "nsa --head-dim 20"}) {
        SelectionRecorder<Cpu<float>> dev;
        check_decoding(dev, config_of(std::string(DECODED) + "--seq-len 640 --attention " + layers), 0);
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