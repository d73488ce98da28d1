// cpu_speed_tests.h: what the CPU engine promises besides correct operations: the same bits on any number of threads
// over whole training steps, and what --cpu-dtype bf16 may change.
#pragma once
#include "model_tests.h"

// Two training steps on `threads` threads: the loss of each, then all parameters. The heads, blocks and window of
// MEDIUM make attention tiles of several kinds; GPT-2's vocabulary makes several blocks in the head's GEMM.
static std::vector<float> train_two_steps(int threads, bool bf16, const std::string& options) {
    const ThreadCount count(threads);
    TestModel<Cpu<float>> t(options, 2);
    t.dev.gemm.bf16 = bf16;
    std::vector<float> result;
    for (int step = 1; step <= 2; step++) {
        result.push_back(float(t.loss_and_gradients()));
        update(t.model, step, 1e-3);
    }
    result.insert(result.end(), t.model.params, t.model.params + t.model.table.total);
    return result;
}
static void check_step_bits(const std::string& options) {
    for (const bool bf16 : {false, true}) {
        if (bf16 && !HAVE_BF16) continue;
        const std::vector<float> alone = train_two_steps(1, bf16, options), three = train_two_steps(3, bf16, options);
        REQUIRE(three.size() == alone.size());
        CHECK(std::memcmp(alone.data(), three.data(), alone.size() * sizeof(float)) == 0);
    }
    if (!HAVE_BF16) skip("training steps in bf16 on several threads: this build's processor has no AVX512_BF16");
}
static const char* const MEDIUM =
    "--init random --layers 2 --dim 192 --heads 6 --kv-groups 2 --head-dim 32 --cmp-block 16 --cmp-stride 8 "
    "--slc-block 32 --slc-count 5 --window 70 "
    "--phi-hidden 20 --mlp-hidden 600 --seq-len 300 ";
TEST(cpu_steps_have_the_same_bits_on_any_number_of_threads) {
    check_step_bits(MEDIUM);
    check_step_bits(std::string(MEDIUM) + "--attention full --seq-len 130 ");
    check_step_bits(std::string(MEDIUM) + "--tokenizer gpt2 --layers 1 --dim 64 --seq-len 40 ");
}

// Every input of a product is off by at most 2^-9 of itself, by half of that on average, independently of the others.
// So a product is off by about sqrt(2)/2 * 2^-9 * sqrt(2) = 2^-9 of its root mean square, whatever its length. Some
// twenty products in a row lead to a gradient, and their errors add like random numbers: 2^-9 * sqrt(20) = 0.9 %. The
// limit is three times that for each tensor; with unrounded inputs the difference would be below 1e-5.
TEST(cpu_bf16_rounds_products_and_nothing_else) {
    if (!HAVE_BF16) return skip("gradients in bf16: this build's processor has no AVX512_BF16");
    // 64 blocks are all there are: the two runs cannot choose differently.
    const std::string options = std::string(MEDIUM) + "--init standard --slc-count 64 ";
    TestModel<Cpu<float>> exact(options, 2), rounded(options, 2);
    rounded.dev.gemm.bf16 = true;
    const double loss = exact.loss_and_gradients(), loss_rounded = rounded.loss_and_gradients();
    CHECK(loss != loss_rounded);
    CHECK_NEAR(loss_rounded, loss, 1e-3 * loss);
    for (const TensorSpec& spec : exact.model.table.specs) {
        double square = 0, difference = 0;
        for (size_t i = spec.offset; i < spec.offset + spec.size; i++) {
            square += std::pow(double(exact.model.grads[i]), 2);
            difference += std::pow(double(exact.model.grads[i]) - double(rounded.model.grads[i]), 2);
        }
        tests().checks++;
        if (!(difference <= 0.027 * 0.027 * square))
            check_failed(__FILE__, __LINE__, "%s: the gradient in bf16 is off by %.3g of its norm, limit 0.027",
                         spec.name, std::sqrt(difference / square));
    }
    // Parameters and moments are not rounded: an update too small for bf16 must still show.
    const float before = rounded.model.params[0];
    update(rounded.model, 1, 1e-6);
    CHECK(rounded.model.params[0] != before && std::fabs(rounded.model.params[0] - before) < 2e-6f);
}

TEST(cpu_dtype_is_an_option) {
    World world;
    const std::string on_cpu = std::string(SMALL) + "--device cpu ";
    CHECK(!choose_device(config_of(on_cpu), world, search_gpus()).cpu_bf16);
    const Device rounded = choose_device(config_of(on_cpu + "--cpu-dtype bf16"), world, search_gpus());
    CHECK_EQUAL(rounded.cpu_bf16, HAVE_BF16);
    CHECK_EQUAL(holds(rounded.reason, "AVX512_BF16"), !HAVE_BF16);  // if the processor cannot, the reason says so
    CHECK_FAILS(2, "cpu-dtype", config_of(on_cpu + "--cpu-dtype fp16"));
    GpuSearch broken = search_gpus();  // no reason to train on the processor for a night
    broken.broken = true, broken.count = 0;
    CHECK_FAILS(1, "--device cpu", choose_device(config_of(SMALL), world, broken));
    CHECK(!choose_device(config_of(on_cpu), world, broken).gpu);
}
