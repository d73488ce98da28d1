// cuda_model_tests.h: the whole model of train_nsa.cu on struct Cuda against the same model on Cpu<float>: loss, every
// gradient, optimiser steps, checkpoints, decoding. By g++ in the emulator, by nvcc on a GPU; in bf16, or in fp32 with
// -DPRECISION_FP32.
//
// Both have the same weights (numbers that bf16 holds exactly) and the same selected blocks: the CPU takes over the
// GPU's choice, since near-equal scores may be ordered differently after a rounding, and then the two are different
// functions.
//
// Error limits, of the relative error ||found - expected|| / ||expected|| of a tensor. An array stored in bf16
// carries independent relative errors of at most u = 2^-8 per element. Between a token and a gradient lie at most R =
// 2 * (11 + 13 L) + 2 stored arrays: of a layer x, attn_normed, projected, heads, compressed (activated, output),
// branch, attn, x_mid, mlp_normed, fc1, act, and as many gradients; and the ends. Independent errors add up to
// sqrt(R) u. In fp32 the same arrays are rounded by 2^-24, and each is a sum of up to K = 300 terms: sqrt(R K) 2^-24.
#pragma once
#ifndef NSA_WITHOUT_MAIN
#define NSA_WITHOUT_MAIN
#include "../../../train_nsa.cu"
#endif
#include "../../../nsa_kernels.cuh"
#include "../model/decode_check.h"
#include "../harness.h"

constexpr bool MODEL_FP32 = std::is_same<Cuda::real, float>::value;
inline double model_limit(int64_t layers) {
    const double stored_arrays = 2.0 * (11 + 13 * double(layers)) + 2;
    return MODEL_FP32 ? std::sqrt(stored_arrays * 300) * 0x1p-24 : std::sqrt(stored_arrays) * 0x1p-8;
}

inline Config cuda_config(const std::string& more = "") {
    // T is no multiple of any block and larger than the window, most queries must choose, h = 3.
    return options_of(
        "--init random --layers 2 --dim 32 --heads 6 --kv-groups 2 --head-dim 16 --cmp-block 8 --cmp-stride 4 "
        "--slc-block 16 --slc-count 4 --window 24 --phi-hidden 16 --mlp-hidden 64 --seq-len 150 " +
        more);
}

// Every preset runs on a GPU, with NSA and with full attention.
TEST(cuda_has_the_shapes_of_all_presets) {
    Cuda dev;
    for (const Config& p : PRESETS) {
        for (const char* attention : {"nsa", "full"}) {
            const Config c = options_of(std::string("--model ") + p.model + " --attention " + attention);
            std::string refusal;
            try {
                dev.check_shape(shape_of(c, c.batch, c.seq_len));
            } catch (const Error& e) {
                refusal = e.what();
            }
            CHECK_EQUAL(refusal, std::string());
        }
    }
}

// The CPU engine with the selections of another run in place of its own, in the order of the layers.
struct GuidedCpu : Cpu<float> {
    std::vector<std::vector<uint32_t>> selections;
    size_t next = 0;
    void attend_and_select(float* out, float* lse, uint32_t* selection, float*, const float* q, const float* kc,
                           const float* vc, const NsaShape& s) {
        Cpu<float>::attend_and_select(out, lse, nullptr, nullptr, q, kc, vc, s);
        if (!selection) return;
        const std::vector<uint32_t>& taken = selections[next++ % selections.size()];
        std::copy(taken.begin(), taken.end(), selection);
    }
};

template <class Dev>
struct ModelRun {
    Model<Dev> model;
    Activations<Dev> a;
    std::vector<int32_t> inputs, targets;
    ModelRun(Dev& dev, const Config& c, int B) : model(dev, c, true), a(dev, c, B, c.seq_len, TRAINING) {
        for (uint64_t i = 0; i < uint64_t(B * c.seq_len); i++) {
            inputs.push_back(int32_t(random_below(256, 1, random_stream(RANDOM_TEST, 1), i)));
            targets.push_back(int32_t(random_below(256, 1, random_stream(RANDOM_TEST, 2), i)));
        }
    }
    double step_loss(bool gradients) {  // the mean
        if (gradients) model.dev.zero(model.grads, model.table.total);
        forward(model, a, inputs.data(), 0, a.shape.T);
        const double sum = classify(model, a, targets.data(), 1 / double(inputs.size()), gradients);
        if (gradients) backward(model, a);
        return sum / double(inputs.size());
    }
    template <class T>
    std::vector<float> host(const T* flat) {
        std::vector<float> values(model.table.total);
        model.dev.to_host(values.data(), flat, values.size());
        return values;
    }
};

// A model whose master copy is what its parameters hold, so that an engine without a master can have the same weights.
inline void initialise_exactly(Model<Cuda>& model) {
    model.initialise();
    for (const TensorSpec& t : model.table.specs) {
        std::vector<float> values(t.size);
        model.dev.to_host(values.data(), model.params + t.offset, t.size);
        model.set_parameter(t, values.data());
    }
}
inline void take_weights(Model<GuidedCpu>& to, const std::vector<float>& flat) {
    std::copy(flat.begin(), flat.end(), to.params);
}
inline void take_selections(GuidedCpu& to, ModelRun<Cuda>& from) {
    to.selections.clear(), to.next = 0;
    for (const auto& layer : from.a.layer) {
        const NsaShape& s = from.a.shape;
        to.selections.emplace_back(s.full ? 0 : size_t(s.B) * s.G * s.T * s.selection_words());
        from.model.dev.copy(to.selections.back().data(), (const uint32_t*)layer.selection, to.selections.back().size());
    }
}

inline void check_relative_error(const char* what, const float* found, const float* expected, size_t count,
                                 double limit) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++)
        difference += std::pow(double(found[i]) - expected[i], 2), size += std::pow(double(expected[i]), 2);
    tests().checks++;
    const double error = std::sqrt(difference / size);
    if (!(error <= limit) || !(size > 0))
        check_failed(what, 0, "relative error %.3g, limit %.3g; norm %.3g", error, limit, std::sqrt(size));
    if (std::getenv("TEST_SHOW_ERRORS")) std::printf("    %-40s %.2e of %.2e\n", what, error, limit);
}

inline void check_cuda_model(const Config& c, bool level0) {
    const int B = 2;
    Cuda dev(0, size_t(1) << 20);
    dev.plain_attention = level0 || MODEL_FP32;
    GuidedCpu cpu;
    ModelRun<Cuda> gpu(dev, c, B);
    ModelRun<GuidedCpu> reference(cpu, c, B);
    initialise_exactly(gpu.model);
    take_weights(reference.model, gpu.host(gpu.model.params));
    const double loss = gpu.step_loss(true);
    take_selections(cpu, gpu);
    const double expected = reference.step_loss(true), limit = model_limit(c.layers);
    CHECK_NEAR(loss, expected, limit * expected);
    const std::vector<float> grads = gpu.host(gpu.model.grads), expected_grads = reference.host(reference.model.grads);
    size_t silent = 0;  // tensors of branches that were left out
    const auto is_zero = [](float x) { return x == 0; };
    for (const TensorSpec& t : gpu.model.table.specs) {
        const float *found = &grads[t.offset], *wanted = &expected_grads[t.offset];
        if (c.branches != "all" && std::all_of(wanted, wanted + t.size, is_zero)) {
            CHECK(std::all_of(found, found + t.size, is_zero));
            silent++;
        } else {
            check_relative_error(t.name.c_str(), found, wanted, t.size, limit);
        }
    }
    CHECK_EQUAL(silent > 0, c.branches != "all");

    // The same again, with other orders of threads, blocks and streams.
#ifndef __CUDACC__
    emu::seed(1);
#endif
    CHECK_EQUAL(gpu.step_loss(true), loss);
    const std::vector<float> again = gpu.host(gpu.model.grads);
#ifndef __CUDACC__
    emu::seed(0);
#endif
    tests().checks++;
    if (std::memcmp(again.data(), grads.data(), grads.size() * sizeof(float)))
        check_failed(__FILE__, __LINE__, "two runs gave different gradients");
}
TEST(cuda_model_level0) { check_cuda_model(cuda_config(), true); }
TEST(cuda_model_full_attention) { check_cuda_model(cuda_config("--attention full"), true); }
TEST(cuda_model_with_branches_left_out) {
    for (const char* branches : {"--branches cmp,win", "--branches slc"})
        for (const bool level0 : {true, false}) check_cuda_model(cuda_config(branches), level0);
}
TEST(cuda_model_tensor_cores) {
    if (MODEL_FP32) return skip("cuda_model_tensor_cores: fp32 has the scalar kernels only");
    check_cuda_model(cuda_config(), false);
    check_cuda_model(cuda_config("--attention full"), false);
}

// --recompute trades memory for time, and nothing else.
TEST(cuda_model_recompute_gives_the_same_bits) {
    std::vector<float> first;
    for (const char* level : {"--recompute 0", "--recompute 1", "--recompute 2"}) {
        Cuda dev(0, size_t(1) << 20);
        ModelRun<Cuda> run(dev, cuda_config(level), 1);
        run.model.initialise();
        run.step_loss(true);
        const std::vector<float> grads = run.host(run.model.grads);
        if (first.empty()) first = grads;
        CHECK(std::memcmp(grads.data(), first.data(), first.size() * sizeof(float)) == 0);
    }
}

// Three optimiser steps on one batch. AdamW divides the gradient by its size, so where a gradient is
// smaller than its error the two engines may step in opposite directions; what has to agree is the
// gradient's norm and the loss that the weights reach, whose error is first order in that of the weights.
TEST(cuda_model_three_steps) {
    const Config c = cuda_config();
    Cuda dev(0, size_t(1) << 20);
    GuidedCpu cpu;
    ModelRun<Cuda> gpu(dev, c, 2);
    ModelRun<GuidedCpu> reference(cpu, c, 2);
    initialise_exactly(gpu.model);
    take_weights(reference.model, gpu.host(gpu.model.params));
    const double lr = 1e-2, limit = model_limit(c.layers);
    double first = 0, loss = 0;
    for (int step = 1; step <= 3; step++) {
        loss = gpu.step_loss(true);
        take_selections(cpu, gpu);
        const double expected = reference.step_loss(true);
        CHECK_NEAR(loss, expected, 2 * limit * expected);  // of the forward pass, and of the weights
        update(gpu.model, step, lr), update(reference.model, step, lr);
        double norm = 0, expected_norm = std::sqrt(reference.model.results[1]);
        gpu.model.dev.copy(&norm, gpu.model.results + 1, 1);
        norm = std::sqrt(norm);
        CHECK_NEAR(norm, expected_norm, 2 * limit * expected_norm);
        if (step == 1) first = loss;
    }
    CHECK(loss < 0.9 * first);
    // The parameters are the master's, each rounded to a neighbour: the spacing of bf16 is at most 2^-7 of the value,
    // that of fp32 nothing.
    const std::vector<float> master = gpu.host(gpu.model.master), params = gpu.host(gpu.model.params);
    int narrower = 0;
    for (size_t i = 0; i < master.size(); i++) {
        CHECK_NEAR(params[i], master[i],
                   (MODEL_FP32 ? 0 : 0x1p-7) * std::fabs(master[i]) + (MODEL_FP32 ? 0 : 0x1p-133));
        narrower += params[i] != master[i];
    }
    CHECK(MODEL_FP32 ? narrower == 0 : narrower > int(master.size()) / 2);
}

// Twenty steps of training as the loop makes them, the host one step ahead of the device: batches from the loader,
// accumulation over two micro-steps, results sent and received a step later. Both engines choose their own blocks. bf16
// rounds each logit to 2^-8 of itself and every weight's update to a neighbour, so the curves part slowly: what a
// token's loss may differ by at the start, 2^-8 of logits of order 1, may grow with the steps; 2 % of the loss covers
// 20 of them. In the emulator the device's work runs as late as the program's waits allow, so that a missing wait is a
// wrong number.
TEST(cuda_model_twenty_steps_of_training) {
    Config c = cuda_config("--batch 1 --total-batch 200 --steps 20 --warmup 4 --lr 5e-3");
    c.seq_len = 100, c.total_batch = 200, c.init = "standard", c.layers = 1;
    World world;
    Cuda dev(0, size_t(1) << 20);
    Cpu<float> cpu;
    ModelRun<Cuda> gpu(dev, c, 1);
    ModelRun<Cpu<float>> reference(cpu, c, 1);
    gpu.model.initialise();
    reference.model.initialise();
    DataLoader batches({synthetic_source(uint64_t(c.seed), 60000, 0)}, loader_options(c, world, "--data", true)),
        same_batches({synthetic_source(uint64_t(c.seed), 60000, 0)}, loader_options(c, world, "--data", true));
#ifndef __CUDACC__
    emu::machine.run_late = true;
#endif
    std::vector<double> losses, norms;
    auto receive = [&] {
        const std::vector<double> results = dev.receive();
        losses.push_back(results[0] / double(c.total_batch)), norms.push_back(std::sqrt(results[1]));
    };
    for (int step = 1; step <= 20; step++) {
        accumulate_gradients(gpu.model, gpu.a, batches, world, false);
        update(gpu.model, step, learning_rate(c, step));
        dev.send(gpu.model.results, 2);
        if (step > 1) receive();
    }
    receive();
#ifndef __CUDACC__
    emu::machine.run_late = false;
#endif
    const double limit = MODEL_FP32 ? 1e-4 : 0.02;
    for (int step = 1; step <= 20; step++) {
        accumulate_gradients(reference.model, reference.a, same_batches, world, false);
        update(reference.model, step, learning_rate(c, step));
        const double loss = reference.model.results[0] / double(c.total_batch),
                     norm = std::sqrt(reference.model.results[1]);
        CHECK_NEAR(losses[size_t(step - 1)], loss, limit * loss);
        CHECK_NEAR(norms[size_t(step - 1)], norm, 10 * limit * norm);
    }
    CHECK(losses.back() < losses.front() - 1);
}

// Four steps, and two, a checkpoint, another model that takes it, and two more: the same bits, at every recompute
// level, with accumulation.
TEST(cuda_model_resumed_equals_uninterrupted) {
    for (const int level : {0, 1, 2}) {
        TempFolder folder;
        Config c = cuda_config("--batch 1 --recompute 0");
        c.out = folder.path, c.recompute = level, c.layers = 1, c.seq_len = 32, c.total_batch = 64, c.init = "standard";
        const World world;
        Cuda dev(0, size_t(1) << 20);
        const auto steps = [&](Model<Cuda>& model, DataLoader& loader, int64_t first, int64_t last) {
            Activations<Cuda> a(dev, c, 1, c.seq_len, TRAINING);
            for (int64_t step = first; step <= last; step++) {
                accumulate_gradients(model, a, loader, world, false);
                update(model, step, 1e-2);
            }
        };
        const auto loader = [&] {
            return std::make_unique<DataLoader>(std::vector<TokenSource>{synthetic_source(uint64_t(c.seed), 60000, 0)},
                                                loader_options(c, world, "--data", true));
        };
        Model<Cuda> whole(dev, c, true), first(dev, c, true), second(dev, c, true);
        whole.initialise(), first.initialise();
        const auto whole_data = loader(), first_data = loader(), second_data = loader();
        steps(whole, *whole_data, 1, 4);
        steps(first, *first_data, 1, 2);
        TrainState state;
        state.step = state.last_update = 2, state.loader = loader_numbers(first_data->state());
        const std::string writing = begin_checkpoint(c.out, 2);
        const std::string folder_of_2 =
            commit_checkpoint(c.out, 2, write_snapshot(take_snapshot(first, world), writing, 0, 1),
                              state_json(state, manifest_json(c), 1));
        const TrainState loaded = load_checkpoint(second, folder_of_2);
        CHECK_EQUAL(loaded.step, int64_t(2));
        second_data->restore(loader_state(loaded.loader));
        steps(second, *second_data, 3, 4);
        const size_t n = whole.table.total;
        const auto same = [&](const auto* one, const auto* two) {
            std::vector<std::decay_t<decltype(*one)>> a(n), b(n);
            dev.copy(a.data(), one, n), dev.copy(b.data(), two, n);
            return std::memcmp(a.data(), b.data(), n * sizeof(a[0])) == 0;
        };
        CHECK(same((const Cuda::real*)whole.params, (const Cuda::real*)second.params) &&
              same((const float*)whole.master, (const float*)second.master));
        CHECK(same((const float*)whole.m, (const float*)second.m) &&
              same((const float*)whole.v, (const float*)second.v));
        CHECK(!same((const float*)whole.m, (const float*)first.m));
    }
}

TEST(cuda_model_checkpoint_holds_the_master) {
    TempFolder folder;
    Config c = cuda_config();
    c.out = folder.path;
    Cuda dev(0, size_t(1) << 20);
    ModelRun<Cuda> run(dev, c, 1);
    run.model.initialise();
    std::vector<std::vector<float>> buffers;
    const std::vector<TensorView> views = views_of(dev, run.model.table.specs, run.model.master, "", buffers);
    REQUIRE(views.size() == run.model.table.specs.size());
    for (size_t index = 0; index < views.size(); index++) {  // as it was drawn, not as bf16 has it
        const TensorSpec& t = run.model.table.specs[index];
        for (size_t i = 0; i < t.size; i += 37)
            CHECK_EQUAL(buffers[index][i], initial_value(t, index, i, uint64_t(c.seed), c.layers, c.init == "random"));
    }
    run.step_loss(true);
    update(run.model, 1, 1e-3);
    TrainState state;
    state.step = 1;
    state.last_update = 1;
    const std::string writing = begin_checkpoint(c.out, 1),
                      saved =
                          commit_checkpoint(c.out, 1, write_snapshot(take_snapshot(run.model, World()), writing, 0, 1),
                                            state_json(state, manifest_json(c), 1));
    ModelRun<Cuda> other(dev, c, 1);
    CHECK_EQUAL(load_checkpoint(other.model, saved).step, int64_t(1));
    for (auto field : {&Model<Cuda>::master, &Model<Cuda>::m, &Model<Cuda>::v}) {
        const std::vector<float> one = run.host(run.model.*field), two = other.host(other.model.*field);
        CHECK(std::memcmp(one.data(), two.data(), one.size() * sizeof(float)) == 0);
    }
    // And the parameters follow from it, with the rounding of the step that made them.
    const std::vector<float> one = run.host(run.model.params), two = other.host(other.model.params);
    CHECK(std::memcmp(one.data(), two.data(), one.size() * sizeof(float)) == 0);
}

// Position by position with the caches, against all at once. The scalar kernels sum in the same order either way, and
// so does the emulator's matrix product: then the bits are the same. A GPU's matrix products may differ by shape, hence
// the limit there.
inline void check_cuda_decoding(const Config& c, bool level0) {
    Cuda dev(0, size_t(1) << 20);
    dev.plain_attention = level0 || MODEL_FP32;
    const int T = 100, C = int(c.dim);
    Model<Cuda> model(dev, c, false);
    model.initialise();
    std::vector<int32_t> tokens;
    for (uint64_t i = 0; i < uint64_t(T); i++) {
        tokens.push_back(int32_t(random_below(256, 5, random_stream(RANDOM_TEST, 3), i)));
        if (i % 41 == 23) tokens.back() = c.tokenizer == "gpt2" ? 50256 : 0;
    }
    Activations<Cuda> whole(dev, c, 1, T, INFERENCE), steps(dev, c, 1, T, INFERENCE);
    std::vector<float> expected(size_t(T) * C), found(expected.size());
    forward(model, whole, tokens.data(), 0, T);
    dev.to_host(expected.data(), whole.normed, expected.size());
    for (int first = 0, count; first < T; first += count) {
        count = first == 0 ? 37 : first == 37 ? 30 : 1;  // a prompt, a longer piece, then one at a time
        forward(model, steps, tokens.data() + first, first, count);
        dev.to_host(found.data() + size_t(first) * C, steps.normed, size_t(count) * C);
    }
#ifdef __CUDACC__
    check_relative_error("decoding", found.data(), expected.data(), found.size(), model_limit(c.layers));
#else
    if (dev.plain_attention) CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
    else check_relative_error("decoding", found.data(), expected.data(), found.size(), model_limit(c.layers));
#endif
}
TEST(cuda_model_decoding_is_prefill) {
    check_cuda_decoding(cuda_config(), true);
    check_cuda_decoding(cuda_config("--attention full"), true);
    if (MODEL_FP32) return;
    check_cuda_decoding(cuda_config(), false);
}

// Every position, its selections and what was counted. In emulation a row of a product does not depend on the others:
// by the plain kernels every bit is the same.
inline void check_cuda_decoding_to(int T, const std::string& options, bool level0) {
    SelectionRecorder<Cuda> dev(0, size_t(1) << 20);
    const Config c = options_of(
        "--init random --dim 32 --heads 4 --kv-groups 2 --head-dim 16 --phi-hidden 16 "
        "--mlp-hidden 64 --seq-len " +
        std::to_string(T) + " " + options);
    dev.plain_attention = level0 || MODEL_FP32;
#ifdef __CUDACC__
    check_decoding(dev, c, model_limit(c.layers));
#else
    check_decoding(dev, c, dev.plain_attention ? 0 : model_limit(c.layers));
#endif
}
TEST(cuda_model_decoding_reads_what_the_formula_says) {
    for (const bool level0 : {true, false}) {
        check_cuda_decoding_to(130, "--layers 1 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 24 ",
                               level0);
        check_cuda_decoding_to(70, "--layers 1 --attention full ", level0);
    }
}
// 4 of 64 blocks, and a window that is soon left behind.
static const char* const DECODED_TO_4096 =
    "--layers 2 --cmp-block 32 --cmp-stride 16 --slc-block 64 --slc-count 4 --window 128 ";
// Under the checks, which take 30 times as long, an eighth of them.
#ifdef __CUDACC__
constexpr int DECODED_TOKENS = 4096;
#else
constexpr int DECODED_TOKENS = emu::CHECK_BUILD ? 512 : 4096;
#endif
TEST_LONG(cuda_model_decoding_is_the_forward_pass_up_to_4096_tokens) {
    check_cuda_decoding_to(DECODED_TOKENS, DECODED_TO_4096, false);
}
TEST_LONG(cuda_model_plain_decoding_is_the_forward_pass_up_to_4096_tokens) {
    check_cuda_decoding_to(DECODED_TOKENS, DECODED_TO_4096, true);
}

#ifndef __CUDACC__
// What a profiler sees of a step of two micro-steps and two layers, and that it is asked for the chosen steps alone.
TEST(cuda_profile_ranges_name_the_parts_of_a_step) {
    const Config c = cuda_config("--batch 1 --total-batch 300");
    Cuda dev(0, size_t(1) << 20);
    Model<Cuda> model(dev, c, true);
    Activations<Cuda> a(dev, c, 1, c.seq_len, TRAINING);
    model.initialise();
    const World world;
    DataLoader data({synthetic_source(1, 60000, 0)}, loader_options(c, world, "--data", true));
    StepProfiler profiler({2, 3}, false);
    const auto profile = [&](long starts, long stops) {
        CHECK(emu::profile.starts == starts && emu::profile.stops == stops && emu::open_ranges == 0);
    };
    emu::profile.starts = emu::profile.stops = 0;
    for (int64_t step = 1; step <= 4; step++) {
        profiler.before_step(step, dev);
        profile(step >= 2, step >= 4);
        emu::profile.ranges.clear();
        accumulate_gradients(model, a, data, world, false);
        update(model, step, 1e-3);
        const std::map<std::string, long> expected = {
            {"data", 1},       {"forward 0", 2},    {"forward 1", 2},           {"backward 0", 2},
            {"backward 1", 2}, {"classifier", 2},   {"attention: selected", 8}, {"attention: compressed", 8},
            {"selection", 4},  {"compression", 16}, {"attention: window", 8},   {"gradient norm", 1},
            {"update", 1}};
        CHECK(emu::profile.ranges == expected);
    }
    profiler.end(4, dev);
    profile(1, 1);
    StepProfiler until_the_end({4, 9}, false);  // the run ends first
    until_the_end.before_step(4, dev);
    until_the_end.end(4, dev);
    profile(2, 2);
}
#endif
