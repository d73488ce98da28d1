// check.h: the verb `check`: the build, a gradient self-test, and the memory and FLOPs that a preset takes.
// Included by train_nsa.cu behind the model.
#pragma once
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "../model/flops.h"
#include "../model/gradient_check.h"
#include "../run/config_files.h"
#include "../run/machine.h"
#include "../run/memory_needs.h"
#include "../run/options.h"

template <class... Values>
void print_check(bool good, const char* format, const Values&... values) {
    print("%s %s\n", good ? "\u2713" : "\u2717", printable(format_text(format, values...)));
}

// A small model in fp64 and its gradient under --recompute; the tests take it too.
struct SelfTest {
    Cpu<double> dev;
    Config config;
    Model<Cpu<double>> model;
    Activations<Cpu<double>> a;
    std::vector<int32_t> inputs, targets;

    explicit SelfTest(int64_t recompute, const std::string& options = "")
        : config(options_of("--init random --seq-len 70 --dim 24 --heads 4 --head-dim 6 --mlp-hidden 40 "
                            "--phi-hidden 5 --cmp-block 8 --cmp-stride 4 --slc-block 8 --slc-count 4 --window 9 "
                            "--recompute " +
                            std::to_string(recompute) + " " + options)),
          model(dev, config, true),
          a(dev, config, 2, config.seq_len, TRAINING),
          inputs(bytes_to_check(size_t(2 * config.seq_len), 1)),
          targets(bytes_to_check(inputs.size(), 2)) {
        model.initialise();
        loss(true);
        backward(model, a);
    }
    double loss(bool gradient) {
        forward(model, a, inputs.data(), 0, int(config.seq_len));
        return classify(model, a, targets.data(), 1.0, gradient);
    }
    // The backward pass against finite differences.
    GradientErrors errors() {
        return gradient_errors(
            model.table.specs, model.params, model.grads, [&] { return loss(false); },
            [&] { return selections_of(a); });
    }
    bool has_same_gradients(const SelfTest& other) const {
        return !std::memcmp(model.grads, other.model.grads, model.table.total * sizeof(double));
    }
};

// Of the model as it is by default, and with the options that change it.
inline bool check_gradients() {
    const double limit = 1e-6;
    bool good = true;
    for (const char* options : {"", "--qk-norm --smear --head untied"}) {
        SelfTest keeps_all(0, options);
        const double worst = keeps_all.errors().worst;
        const bool right = worst < limit;  // false for NaN
        const bool recomputed =
            SelfTest(1, options).has_same_gradients(keeps_all) && SelfTest(2, options).has_same_gradients(keeps_all);
        const std::string with = *options ? std::string(" with ") + options : "";
        print_check(right, "gradients    worst error of the fp64 self-test%s %.1e, limit %.0e", with, worst, limit);
        print_check(recomputed, "recompute    --recompute 1 and 2 %s the gradients' bits%s",
                    recomputed ? "keep" : "change", with);
        good = good && right && recomputed;
    }
    return good;
}

// What a rank of a preset would take, and the whole run.
template <class Dev>
void print_needs(const std::string& preset, Dev& dev) {
    Config c = options_of("--model " + preset);
    c.batch = Dev::on_host && is_too_large_for_cpu(c) ? 1 : preset_of(c).batch;
    print("  --model %s --batch %d takes\n", preset, c.batch);
    print_memory(Model<Dev>::flat_bytes(c, 1) / (1 << 20),
                 Activations<Dev>(dev, c, c.batch, c.seq_len, TRAINING, 0, true).arena, true);
    const TensorTable table(c);
    const double flops = model_flops_per_token(table.specs, shape_of(c, 1, c.seq_len), c.layers),
                 tokens = double(c.steps) * double(c.total_batch);
    print("FLOPs:  %.4g a token, %d parameters; %.3g for the preset's %.3g tokens\n", flops, table.parameters,
          flops * tokens, tokens);
}

// A line for each part of the program and its machine, with a tick or a cross.
inline void print_machine(const Machine& machine) {
    const Device& d = machine.device;
    const EngineInfo& engine = machine.build.engine;
    const std::string& mpi = machine.build.mpi;
    print_check(true, "version      %s", machine.build.version);
    print_check(true, "compiler     %s, vectors of %d bytes", machine.build.compiler, VECTOR_BYTES);
    print_check(true, "CPU engine   %d of %d usable processors", d.threads, usable_processors());
    print_check(d.gpu, "%-12s %s%s", engine.name + " engine",
                d.gpu ? "" : "not used: ", d.gpu ? machine.engine : d.reason);
    print_check(!mpi.empty(), "MPI          %s",
                mpi.empty() ? "not in this build: one process only; make deps && make train_nsa" : mpi);
    if (engine.collective.empty() && !engine.format.empty())
        print("  gradients    of several devices travel through the host, because %s\n", engine.no_collective);
    if (!engine.attention_kernels.empty())
        print("  attention    --attention-kernel auto, %s\n", joined_words(engine.attention_kernels, ", "));
    for (const auto& [name, version] : machine.libraries) print("  %-12s %s\n", name, version);
    print("  memory       %.0f MiB available\n", host_bytes_available() / (1 << 20));
}

inline int run_check(const Config& c, World& world) {
    const Device device = choose_device(c, world, search_gpus());
    with_engine(device, world, [&](auto& dev, const Machine& machine) {
        print_machine(machine);
        print_needs(c.model, dev);
    });
    return check_gradients() ? 0 : 1;
}
