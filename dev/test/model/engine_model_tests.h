// engine_model_tests.h: the whole model of train_nsa.cu on every engine against the same model on Cpu<double>: loss,
// every gradient, optimiser steps, checkpoints, decoding; and against the golden values of an independent PyTorch
// model.
//
// Both models have the same weights (numbers that the engine's format holds exactly) and the same selected blocks: the
// reference takes over the engine's choice, since near-equal scores may be ordered differently after a rounding, and
// then the two are different functions.
//
// Error limits, of the relative error ||found - expected|| / ||expected|| of a tensor. Between a token and a gradient
// lie at most R = 2 * (11 + 13 L) + 2 stored arrays: of a layer x, attn_normed, projected, heads, compressed
// (activated, output), branch, attn, x_mid, mlp_normed, fc1, act, and as many gradients; and the ends. An array stored
// in bf16 carries independent relative errors of at most u = 2^-8 per element, which add up to sqrt(R) u. Where nothing
// is narrower than the arithmetic the same arrays are rounded by its u, and each is a sum of up to K = 300 terms:
// sqrt(R K) u.
#pragma once
#include "../engines.h"
#ifndef NSA_WITHOUT_MAIN
#define NSA_WITHOUT_MAIN
#include "../../../train_nsa.cu"
#endif
#include "decode_check.h"
#include "muon_check.h"

// Each of them changes the model.
constexpr const char* ALL_OPTIONS = "--qk-norm --smear --head untied";

template <class E>
double model_limit(int64_t layers) {
    const double stored_arrays = 2.0 * (11 + 13 * double(layers)) + 2;
    const double u = std::numeric_limits<typename E::Value>::epsilon() / 2;
    return E::NARROW ? std::sqrt(stored_arrays) * 0x1p-8 : std::sqrt(stored_arrays * 300) * u;
}
inline Config engine_config(const std::string& more = "") {
    // T is no multiple of any block and larger than the window, most queries must choose, h = 3.
    return options_of(
        "--init random --layers 2 --dim 32 --heads 6 --kv-groups 2 --head-dim 16 --cmp-block 8 --cmp-stride 4 "
        "--slc-block 16 --slc-count 4 --window 24 --phi-hidden 16 --mlp-hidden 64 --seq-len 150 " +
        more);
}

// The CPU engine with the selections of another run in place of its own, in the order of the layers.
struct GuidedCpu : Cpu<double> {
    std::vector<std::vector<uint32_t>> selections;
    size_t next = 0;
    void attend_and_select(double* out, double* lse, uint32_t* selection, double*, const double* q, const double* kc,
                           const double* vc, const NsaShape& s) {
        Cpu<double>::attend_and_select(out, lse, nullptr, nullptr, q, kc, vc, s);
        if (!selection) return;
        while (selections[next % selections.size()].empty()) next++;  // layers without NSA
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
    double step_loss(bool gradients, std::vector<float>* logits = nullptr) {  // the mean
        if (gradients) model.dev.zero(model.grads, model.table.total);
        forward(model, a, inputs.data(), 0, a.shape.T);
        const double sum = classify(model, a, targets.data(), 1 / double(inputs.size()), gradients, logits);
        if (gradients) backward(model, a);
        return sum / double(inputs.size());
    }
    // Of the flat arrays, as they are.
    template <class T>
    std::vector<T> raw(const T* flat) {
        std::vector<T> values(model.table.total);
        model.dev.copy(values.data(), flat, values.size());
        return values;
    }
    std::vector<double> host(const typename Dev::Grad* flat) {
        const auto values = raw(flat);
        return {values.begin(), values.end()};
    }
    // A model whose master copy is what its parameters hold, so that an engine without one can have the same weights.
    std::vector<float> initialise_exactly() {
        model.initialise();
        std::vector<float> all(model.table.total);
        for (const TensorSpec& t : model.table.specs) {
            std::vector<float> values(t.size);
            model.dev.to_host(values.data(), model.params + t.offset, t.size);
            model.set_parameter(t, values.data());
            std::copy(values.begin(), values.end(), &all[t.offset]);
        }
        return all;
    }
    // Of each layer, [B, G, T, words]; empty where it is not NSA's.
    std::vector<std::vector<uint32_t>> selections() {
        std::vector<std::vector<uint32_t>> all;
        const NsaShape& s = a.shape;
        for (size_t i = 0; i < a.layer.size(); i++) {
            all.emplace_back();
            if (s.kind_of_layer(i) != NSA_LAYER) continue;
            all.back().resize(size_t(s.B) * s.G * s.T * s.selection_words());
            model.dev.copy(all.back().data(), (const uint32_t*)a.layer[i].selection, all.back().size());
        }
        return all;
    }
};
inline double number(double x) { return x; }
template <class T>
double number(const T& x) {
    return double(float(x));
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class Found, class Expected>
void check_relative_error(const char* what, const Found* found, const Expected* expected, size_t count, double limit) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        difference += std::pow(number(found[i]) - number(expected[i]), 2);
        size += std::pow(number(expected[i]), 2);
    }
    tests().checks++;
    const double error = std::sqrt(difference / size);
    if (!(error <= limit) || !(size > 0))
        check_failed(what, 0, "relative error %.3g, limit %.3g; norm %.3g", error, limit, std::sqrt(size));
    if (std::getenv("TEST_SHOW_ERRORS")) std::printf("    %-40s %.2e of %.2e\n", what, error, limit);
}

// The engine's model and the reference's, with the same weights.
template <class E>
struct ModelPair {
    std::unique_ptr<typename E::Dev> dev = E::open();
    GuidedCpu cpu;
    ModelRun<typename E::Dev> run;
    ModelRun<GuidedCpu> reference;
    double limit;
    ModelPair(const Config& c, int way)
        : run((E::set_way(*dev, way), *dev), c, 2), reference(cpu, c, 2), limit(model_limit<E>(c.layers)) {
        const std::vector<float> weights = run.initialise_exactly();
        std::copy(weights.begin(), weights.end(), reference.model.params);
    }
    // The losses of both, the reference with the engine's selections.
    std::pair<double, double> step_losses() {
        const double loss = run.step_loss(true);
        cpu.selections = run.selections(), cpu.next = 0;
        return {loss, reference.step_loss(true)};
    }
};

template <class E>
void check_model(const Config& c, int way) {
    ModelPair<E> pair(c, way);
    const auto [loss, expected] = pair.step_losses();
    CHECK_NEAR(loss, expected, pair.limit * expected);
    const auto grads = pair.run.raw(pair.run.model.grads);
    const std::vector<double> expected_grads = pair.reference.host(pair.reference.model.grads);
    size_t silent = 0;  // tensors of branches that were left out
    const auto is_zero = [](auto x) { return x == 0; };
    for (const TensorSpec& t : pair.run.model.table.specs) {
        const auto* found = &grads[t.offset];
        const double* wanted = &expected_grads[t.offset];
        if (c.branches != "all" && std::all_of(wanted, wanted + t.size, is_zero)) {
            CHECK(std::all_of(found, found + t.size, is_zero));
            silent++;
        } else {
            check_relative_error(t.name.c_str(), found, wanted, t.size, pair.limit);
        }
    }
    CHECK_EQUAL(silent > 0, c.branches != "all");
    if (E::ORDERS == 1) return;
    E::set_order(1);  // the same again, with other orders of threads, blocks and streams
    CHECK_EQUAL(pair.run.step_loss(true), loss);
    CHECK(same_bits(pair.run.raw(pair.run.model.grads), grads));
    E::set_order(0);
}
TEST_ON(ModelEngines, model_loss_and_gradients, false) {
    for (const char* options :
         {"", "--attention full", "--branches cmp,win", "--branches slc", ALL_OPTIONS, "--qk-norm --attention full",
          "--attention window,full", "--attention window,nsa", "--attention nsa,full --qk-norm"})
        for (int way = 0; way < E::WAYS; way++) {
            Config c = engine_config(options);
            if (*options) c.seq_len = 100;
            check_model<E>(c, way);
        }
}

// --recompute trades memory for time, and nothing else.
TEST_ON(ModelEngines, model_recompute_gives_the_same_bits, false) {
    for (const std::string kind : {"nsa", "full", "window,full", "nsa --qk-norm --smear", "window,nsa --qk-norm"}) {
        std::vector<typename E::Dev::Grad> first;
        double loss = 0;
        size_t bytes = 0;
        for (const char* level : {" --recompute 0", " --recompute 1", " --recompute 2"}) {
            const auto dev = E::open();
            E::set_way(*dev, E::WAYS - 1);
            Config c = engine_config("--attention " + kind + level);
            c.seq_len = 100;
            ModelRun<typename E::Dev> run(*dev, c, 2);
            run.model.initialise();
            const double found = run.step_loss(true);
            const auto grads = run.raw(run.model.grads);
            if (first.empty()) first = grads, loss = found;
            CHECK_EQUAL(found, loss);
            CHECK(same_bits(grads, first));
            CHECK(bytes == 0 || run.a.arena.bytes < bytes);
            bytes = run.a.arena.bytes;
        }
    }
}

// The matrices' updates by Muon. Each of the fifteen products rounds at most 96 terms; what it loses of a small
// singular value grows with that, by up to 8.2 in the first step and 4 in later ones. bf16 rounds the matrix to 2^-9 of
// itself in each of five steps, and its polynomial, 2.3 times the largest singular value, as much: 5 * (1 + 2.3) * 2^-9
// is 3 %; twice that, since small ones share the large ones' error.
ENGINE_TEST(update_of_matrices_is_muon) {
    // In fp32 and fp64 the sums of up to 300 products are rounded too.
    const double lr = 0.02, decay = 0.3,
                 u = E::NARROW ? 0x1p-8 : std::sqrt(300) * std::numeric_limits<typename E::Value>::epsilon() / 2;
    const auto dev = E::open();
    E::set_way(*dev, E::WAYS - 1);
    Config c = engine_config("--optimizer muon --grad-clip 0.01 --weight-decay 0.3");
    c.layers = 1;
    ModelRun<typename E::Dev> run(*dev, c, 1);
    auto& model = run.model;
    model.initialise();
    check_muon_steps(model, lr, u, [&] { run.step_loss(true); });
    // A gradient that is not finite changes nothing.
    const auto params = run.raw(model.params);
    const auto master = run.raw(model.master);
    const auto m = run.raw(model.m);
    const typename E::Dev::Grad infinite = std::numeric_limits<float>::infinity();
    dev->copy(model.grads + model.table.total, &infinite, 1);
    update(model, 4, lr);
    CHECK(same_bits(run.raw(model.params), params) && same_bits(run.raw(model.master), master) &&
          same_bits(run.raw(model.m), m));
    // A gradient of zeros moves nothing but by decay.
    dev->zero(model.grads, model.partition.elements);
    dev->zero(model.m, model.table.total);
    update(model, 5, lr);
    const auto decayed = run.raw(model.master);
    for (const TensorSpec& t : model.table.specs)
        for (size_t i = t.offset; t.orthogonal && i < t.offset + t.size; i++)
            CHECK_NEAR(decayed[i], master[i] * (1 - lr * decay), 0x1p-22 * std::fabs(master[i]));
}

// Twenty steps of training as the loop makes them, the host one step ahead of the device: batches from the loader,
// accumulation over two micro-steps, results sent and received a step later. Both engines choose their own blocks. bf16
// rounds each logit to 2^-8 of itself and every weight's update to a neighbour, so the curves part slowly: what a
// token's loss may differ by at the start, 2^-8 of logits of order 1, may grow with the steps; 2 % of the loss covers
// 20 of them. In the emulator the device's work runs as late as the program's waits allow, so that a missing wait is a
// wrong number.
TEST_ON(ModelEngines, model_twenty_steps_of_training, false) {
    Config c = engine_config("--batch 1 --total-batch 200 --steps 20 --warmup 4 --lr 5e-3");
    c.seq_len = 100, c.total_batch = 200, c.init = "standard", c.layers = 1;
    World world;
    const auto dev = E::open();
    E::set_way(*dev, E::WAYS - 1);
    Cpu<double> cpu;
    ModelRun<typename E::Dev> run(*dev, c, 1);
    ModelRun<Cpu<double>> reference(cpu, c, 1);
    run.model.initialise();
    reference.model.initialise();
    DataLoader batches({synthetic_source(uint64_t(c.seed), 60000, 0)}, loader_options(c, world, "--data", true)),
        same_batches({synthetic_source(uint64_t(c.seed), 60000, 0)}, loader_options(c, world, "--data", true));
    E::run_late(true);
    std::vector<double> losses, norms;
    const auto receive = [&] {
        const std::vector<double> results = dev->receive();
        losses.push_back(results[0] / double(c.total_batch));
        norms.push_back(std::sqrt(results[1]));
    };
    for (int step = 1; step <= 20; step++) {
        accumulate_gradients(run.model, run.a, batches, world, false);
        update(run.model, step, learning_rate(c, step));
        dev->send(run.model.results, 2);
        if (step > 1) receive();
    }
    receive();
    E::run_late(false);
    const double limit = E::NARROW ? 0.02 : 1e-4;
    for (size_t step = 1; step <= 20; step++) {
        accumulate_gradients(reference.model, reference.a, same_batches, world, false);
        update(reference.model, int(step), learning_rate(c, int(step)));
        const double loss = reference.model.results[0] / double(c.total_batch),
                     norm = std::sqrt(reference.model.results[1]);
        CHECK_NEAR(losses[step - 1], loss, limit * loss);
        CHECK_NEAR(norms[step - 1], norm, 10 * limit * norm);
    }
    CHECK(losses.back() < losses.front() - 1);
}

// Four steps, and two, a checkpoint, another model that takes it, and two more: the same bits, at every recompute
// level, with accumulation.
TEST_ON(ModelEngines, model_resumed_equals_uninterrupted, false) {  // checkpoints are fp32
    using Dev = typename E::Dev;
    for (const int level : {0, 1, 2}) {
        TempFolder folder;
        const char* const options = level == 2 ? ALL_OPTIONS : "";
        Config c = engine_config(std::string("--batch 1 --recompute 0 ") + options);
        c.out = folder.path, c.recompute = level, c.layers = 1, c.seq_len = 32, c.total_batch = 64, c.init = "standard";
        c.optimizer = level == 1 ? "muon" : "adamw";
        c.qk_norm = level != 2;
        const World world;
        const auto dev = E::open();
        E::set_way(*dev, E::WAYS - 1);
        const auto steps = [&](Model<Dev>& model, DataLoader& loader, int64_t first, int64_t last) {
            Activations<Dev> a(*dev, c, 1, c.seq_len, TRAINING);
            for (int64_t step = first; step <= last; step++) {
                accumulate_gradients(model, a, loader, world, false);
                update(model, step, 1e-2);
            }
        };
        const auto loader = [&] {
            return std::make_unique<DataLoader>(std::vector<TokenSource>{synthetic_source(uint64_t(c.seed), 60000, 0)},
                                                loader_options(c, world, "--data", true));
        };
        Model<Dev> whole(*dev, c, true), first(*dev, c, true), second(*dev, c, true);
        whole.initialise(), first.initialise();
        const auto whole_data = loader(), first_data = loader(), second_data = loader();
        steps(whole, *whole_data, 1, 4);
        steps(first, *first_data, 1, 2);
        TrainState state;
        state.step = state.last_update = 2, state.loader = first_data->state();
        const std::string writing = begin_checkpoint(c.out, 2);
        const Snapshot snapshot = take_snapshot(first, world);
        const std::string folder_of_2 = commit_checkpoint(c.out, 2, write_snapshot(snapshot, writing, 0, 1),
                                                          state_json(state, manifest_json(c), 1));
        const TrainState loaded = load_checkpoint(second, read_manifest(folder_of_2));
        CHECK_EQUAL(loaded.step, int64_t(2));
        second_data->restore(loaded.loader);
        steps(second, *second_data, 3, 4);
        const auto same = [&](const auto* one, const auto* two, size_t n) {
            std::vector<std::decay_t<decltype(*one)>> a(n), b(n);
            dev->copy(a.data(), one, n), dev->copy(b.data(), two, n);
            return same_bits(a, b);
        };
        const auto as_const = [](const auto* p) { return p; };
        const size_t n = whole.table.total, n_of_v = n - (whole.partition.elements - StateElements(whole.owned).v);
        CHECK(same(as_const(whole.params), as_const(second.params), n));
        if constexpr (Dev::has_master) CHECK(same(as_const(whole.master), as_const(second.master), n));
        CHECK(same(as_const(whole.m), as_const(second.m), n) && same(as_const(whole.v), as_const(second.v), n_of_v));
        CHECK(!same(as_const(whole.m), as_const(first.m), n));
    }
}

// Whatever stands at a position, everything before it keeps its bits: what the last layer gives, the branches' outputs
// and the selections.
template <class E>
void check_causality(const Config& c, int way) {
    const auto dev = E::open();
    E::set_way(*dev, way);
    ModelRun<typename E::Dev> run(*dev, c, 1);
    run.model.initialise();
    const NsaShape& s = run.a.shape;
    const size_t T = size_t(s.T), C = size_t(c.dim), words = size_t(s.selection_words()), D = size_t(s.D);
    struct Seen {
        std::vector<typename E::Real> normed;
        std::vector<std::vector<typename E::Real>> outputs;  // by layer: [branches, B, H, T, D]
        std::vector<std::vector<uint32_t>> selections;
    };
    const auto look = [&](const std::vector<int32_t>& tokens) {
        const auto download = [&](const typename E::Real* from, size_t count) {
            std::vector<typename E::Real> values(count);
            dev->copy(values.data(), from, count);
            return values;
        };
        forward(run.model, run.a, tokens.data(), 0, s.T);
        Seen seen{download(run.a.normed, T * C), {}, run.selections()};
        for (const auto& layer : run.a.layer)
            seen.outputs.push_back(download(layer.o, size_t(s.branches()) * s.query_rows() * D));
        return seen;
    };
    const Seen before = look(run.inputs);
    const auto same_start = [](const auto& a, const auto& b, size_t from, size_t count) {
        return std::memcmp(&a[from], &b[from], count * sizeof(a[0])) == 0;
    };
    for (const size_t changed : {1, 7, 8, 19, 20, 63, 64, 65, 100, 127, 128, 149}) {
        std::vector<int32_t> tokens = run.inputs;
        tokens[changed] = (tokens[changed] + 1) % 256;
        const Seen after = look(tokens);
        CHECK(same_start(after.normed, before.normed, 0, changed * C));
        CHECK(!same_start(after.normed, before.normed, changed * C, C));  // and it does change itself
        for (size_t layer = 0; layer < after.outputs.size(); layer++) {
            for (size_t row = 0; row < size_t(s.branches() * s.H); row++)
                CHECK(same_start(after.outputs[layer], before.outputs[layer], row * T * D, changed * D));
            for (size_t g = 0; !s.window_only && g < size_t(s.G); g++)
                CHECK(same_start(after.selections[layer], before.selections[layer], g * T * words, changed * words));
        }
    }
}
ENGINE_TEST(model_changing_a_token_changes_nothing_before_it) {
    for (int way = 0; way < E::WAYS; way++)
        for (const char* options : {"", ALL_OPTIONS}) check_causality<E>(engine_config(options), way);
    if (!E::FAST) return;
    const std::string model =
        "--init random --layers 2 --dim 32 --heads 6 --kv-groups 2 --head-dim 16 "
        "--phi-hidden 16 --mlp-hidden 64 --seq-len 150 ";
    // Tensor cores have no blocks of one token.
    check_causality<E>(options_of(model + "--cmp-block 1 --cmp-stride 1 --slc-block 1 --slc-count 16 --window 1"), 0);
    for (const char* options : {"--cmp-block 32 --cmp-stride 16 --slc-count 5 --window 70", "--attention full"})
        check_causality<E>(options_of(model + options), E::WAYS - 1);
}

// Where a row of a product does not depend on the others, the plain kernels give the same bits.
template <class E>
void check_decoding_to(int T, const std::string& options, int way, const std::vector<int>& pieces = {1}) {
    const auto dev = E::template open<SelectionRecorder<typename E::Dev>>();
    E::set_way(*dev, way);
    const Config c = options_of(
        "--init random --dim 32 --heads 4 --kv-groups 2 --head-dim 16 --phi-hidden 16 "
        "--mlp-hidden 64 --seq-len " +
        std::to_string(T) + " " + options);
    check_decoding(*dev, c, E::SAME_BITS_BY_ROW && way == 0 ? 0 : model_limit<E>(c.layers), pieces);
}
ENGINE_TEST(model_decoding_is_the_forward_pass_at_every_position) {
    const std::string nsa = "--layers 1 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 24 ";
    for (int way = 0; way < E::WAYS; way++) {
        check_decoding_to<E>(130, nsa, way);
        for (const std::vector<int>& pieces : {std::vector<int>{37, 30, 1}, {7}, {1}}) {
            check_decoding_to<E>(100, nsa + ALL_OPTIONS, way, pieces);
            check_decoding_to<E>(70, std::string("--layers 1 --attention full ") + ALL_OPTIONS, way, pieces);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Golden values of dev/reference.py, an independent implementation in PyTorch, fp64. The parameters are drawn anew from
// the same seed.

template <class E>
void check_golden(const std::string& name) {
    if (E::NARROW) return skip(format_text("%s_golden_%s: an engine in bf16 chooses other blocks", E::name, name));
    // fp64 against fp64: both round at 1e-16 in sums of up to 1e5 terms. fp32: 6e-8 a rounding, sums of up to 1e3 to
    // 1e4 terms in the GEMMs and the gradient's sum over tokens, through a few layers: 2e-5 of a tensor's norm.
    const double limit = sizeof(typename E::Value) == 8 ? 1e-10 : 2e-5;
    const std::string path = "dev/test/golden_" + name + ".safetensors";
    REQUIRE(file_exists(path));
    const SafeTensors golden(path);
    const std::string command = golden.metadata.at("options");
    Config c = options_of(command.substr(command.find(' ') + 1));
    const int B = int(c.batch);
    const auto dev = E::open();
    if (!has_shape<E>(*dev, ("golden_" + name).c_str(), shape_of(c, B, c.seq_len))) return;
    ModelRun<typename E::Dev> t(*dev, c, B);
    t.model.initialise();
    // The batch is the first of the synthetic corpus, as --dump-state took it.
    World world;
    c.total_batch = c.batch * c.seq_len;
    c.val_data = "none";
    DataLoader loader({synthetic_source(uint64_t(c.seed), SYNTHETIC_TOKENS, 0)},
                      loader_options(c, world, "--data", true));
    loader.next_batch(t.inputs.data(), t.targets.data(), B);
    auto value = [&](const std::string& tensor, size_t i = 0) {
        const TensorView* view = golden.find(tensor);
        if (!view || view->dtype != "F64" || (i + 1) * 8 > view->bytes) fail("%s: no %s[%d] in fp64", path, tensor, i);
        double x;
        std::memcpy(&x, static_cast<const char*>(view->data) + i * 8, 8);
        return x;
    };
    const auto params = t.raw(t.model.params);
    for (const TensorSpec& spec : t.model.table.specs) {
        double sum = 0;
        for (size_t i = 0; i < spec.size; i++) sum += double(float(params[spec.offset + i]));
        if (!(std::fabs(sum - value("param_sum." + spec.name)) <= 1e-9 * double(spec.size)))
            fail("%s was made from other parameters (%s differs): make goldens", path, spec.name);
    }
    std::vector<float> logits;
    CHECK_NEAR(t.step_loss(true, &logits), value("loss"), limit * std::fabs(value("loss")));
    // Selection first: it explains everything after it.
    const NsaShape& s = t.a.shape;
    const std::vector<std::vector<uint32_t>> selections = t.selections();
    for (size_t layer = 0; layer < selections.size(); layer++) {
        if (selections[layer].empty()) continue;
        const size_t rows = size_t(s.B) * s.G * s.T, blocks = size_t(s.slc_blocks());
        const TensorView& view =
            golden.get(format_text("layers.%d.selection", layer), "U8", {s.B, s.G, s.T, int64_t(blocks)});
        size_t different = 0;
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < blocks; j++)
                different += (selections[layer][r * s.selection_words() + j / 32] >> (j % 32) & 1) !=
                             static_cast<const uint8_t*>(view.data)[r * blocks + j];
        CHECK_EQUAL(different, size_t(0));
    }
    const TensorView* rows = golden.find("logits_rows");
    REQUIRE(rows && rows->dtype == "I32");
    for (int64_t r = 0; r < rows->elements(); r++) {
        double largest = 0;
        for (int64_t v = 0; v < c.vocab_size; v++)
            largest = std::max(largest, std::fabs(value("logits", size_t(r * c.vocab_size + v))));
        for (int64_t v = 0; v < c.vocab_size; v++)  // the logits were copied out as fp32
            CHECK_NEAR(logits[size_t(static_cast<const int32_t*>(rows->data)[r] * c.vocab_size + v)],
                       value("logits", size_t(r * c.vocab_size + v)), (limit + 6e-8) * largest);
    }
    const auto grads = t.raw(t.model.grads);
    for (const TensorSpec& spec : t.model.table.specs) {
        const auto* grad = &grads[spec.offset];
        const double norm = value("grad_norm." + spec.name);
        double square = 0, dot = 0;
        for (size_t i = 0; i < spec.size; i++) {
            square += double(grad[i]) * grad[i];
            dot += (uint32_t(i) * 2654435761u >> 16 & 1) ? double(grad[i]) : -double(grad[i]);
        }
        CHECK_NEAR(std::sqrt(square), norm, limit * norm);
        CHECK_NEAR(dot, value("grad_sign_dot." + spec.name), limit * norm * std::sqrt(double(spec.size)));
        const size_t samples = std::min<size_t>(64, spec.size);
        for (size_t k = 0; k < samples; k++)
            CHECK_NEAR(grad[k * spec.size / samples], value("grad_sample." + spec.name, k), limit * norm);
    }
}
ENGINE_TEST(golden_nsa) { check_golden<E>("nsa"); }
ENGINE_TEST(golden_nsa_paper) { check_golden<E>("nsa_paper"); }
ENGINE_TEST(golden_nsa_h1) { check_golden<E>("nsa_h1"); }
ENGINE_TEST(golden_options) { check_golden<E>("options"); }
ENGINE_TEST(golden_full) { check_golden<E>("full"); }
ENGINE_TEST(golden_qk_norm) { check_golden<E>("qk_norm"); }
ENGINE_TEST(golden_pattern) { check_golden<E>("pattern"); }
