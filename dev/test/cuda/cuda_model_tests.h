// cuda_model_tests.h: of the whole model on struct Cuda what engine_model_tests.h does not ask of every engine: the
// shapes of the presets, long decoding, kernels that start early, and what a profiler sees.
#pragma once
#include "../model/engine_model_tests.h"

// Every preset runs on a GPU, with NSA and with full attention.
TEST(cuda_has_the_shapes_of_all_presets) {
    Cuda dev;
    for (const Config& p : PRESETS)
        for (const char* attention : {"nsa", "full"}) {
            const Config c = options_of(std::string("--model ") + p.model + " --attention " + attention);
            dev.check_shape(shape_of(c, c.batch, c.seq_len));  // throws where it refuses
            tests().checks++;
        }
}
// 4 of 38 blocks, whose bits are two words, three tiles of compressed keys, and a window that is soon left behind.
TEST_LONG(cuda_model_decoding_is_the_forward_pass_up_to_600_tokens) {
    for (int way = 0; way < CudaEngine::WAYS; way++)
        check_decoding_to<CudaEngine>(
            600, "--layers 2 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 128 ", way);
}
// A model on struct Cuda, with the corpus and the memory for steps of two micro-steps.
struct SmallTraining {
    Config c;
    Cuda dev;
    Model<Cuda> model;
    Activations<Cuda> a;
    const World world;
    DataLoader data;

    SmallTraining(int64_t batch, int64_t seq_len)
        : c(config_of(batch, seq_len)),
          dev(0, size_t(1) << 20),
          model(dev, c, true),
          a(dev, c, batch, seq_len, TRAINING),
          data({synthetic_source(1, 60000, 0)}, loader_options(c, world, "--data", true)) {
        model.initialise();
    }
    static Config config_of(int64_t batch, int64_t seq_len) {
        Config c = engine_config("--batch " + std::to_string(batch));
        c.seq_len = seq_len, c.total_batch = 2 * batch * seq_len;
        return c;
    }
};

// Where a kernel, ours or a library's, began on what another had not finished, the gradients' bits would differ.
TEST(cuda_kernels_that_start_early_change_no_bits) {
    SmallTraining run(2, CudaEngine::FAST ? 300 : 64);
    const auto gradients = [&](bool early) {
        kernels_start_early = early;
        run.data.rewind();
        accumulate_gradients(run.model, run.a, run.data, run.world, false);
        std::vector<float> all(run.model.table.total);
        run.dev.to_host(all.data(), run.model.grads, all.size());
        kernels_start_early = true;
        return all;
    };
    const std::vector<float> in_turn = gradients(false);
    for (int i = 0; i < (CudaEngine::FAST ? 5 : 1); i++) CHECK(gradients(true) == in_turn);
}

#ifdef CUDA_ON_CPU
// What a profiler sees of a step of two micro-steps and two layers.
TEST(cuda_profile_ranges_name_the_parts_of_a_step) {
    SmallTraining run(1, 64);
    for (int64_t step = 1; step <= 2; step++) {
        emu::profile.ranges.clear();
        accumulate_gradients(run.model, run.a, run.data, run.world, false);
        update(run.model, step, 1e-3);
        std::map<std::string, long> expected = {
            {"data", 1},       {"forward 0", 2}, {"forward 1", 2},   {"backward 0", 2},    {"backward 1", 2},
            {"classifier", 2}, {"selection", 4}, {"compression", 8}, {"gradient norm", 1}, {"update", 1}};
        // The plain kernels take one branch after the other, those on tensor cores some at once, backward all.
        if (run.dev.plain_attention)
            for (const char* branch : ATTENTION_NAMES) expected[branch] = 8;
        else
            for (const char* name : {"attention: compressed", "attention: selected and window", "attention backward"})
                expected[name] = 4;
        CHECK(emu::profile.ranges == expected && emu::open_ranges == 0);
    }
}
#endif
