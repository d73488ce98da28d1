// test_nsa.cu: one test to learn the program from, in the manner of llm.c's test_gpt2.cu. A model of 0.2 M parameters
// goes through all that training and sampling do; each result is compared with one that was computed another way:
//   1. loss, logits and every gradient against a golden file that dev/reference.py made with PyTorch in fp64
//   2. ten steps of AdamW against the formula of the paper (Loshchilov and Hutter 2019, algorithm 2), written out here
//   3. decoding token by token, with caches, against one forward pass over all tokens
//   4. where there is a GPU: loss and every gradient of its kernels against the CPU's plain loops
// make test_nsa && ./test_nsa prints each error beside its limit. All other tests are in dev/test/.
#define NSA_WITHOUT_MAIN
#include "train_nsa.cu"

static int passed = 0, failed = 0;

// A NaN is not below the limit, so it fails.
static void check(const std::string& what, double error, double limit) {
    const bool ok = error <= limit;
    (ok ? passed : failed)++;
    print("%s  %-46s error %.1e  limit %.1e\n", ok ? "ok  " : "FAIL", what, error, limit);
}

// The golden file holds what PyTorch computed from one batch: the loss, some rows of the logits, and of each gradient
// its norm and 64 of its elements. It holds no parameters: both sides draw them from the same seed.
struct Golden {
    SafeTensors file{"dev/test/golden_nsa.safetensors"};

    Config config() const {  // from the command that it was made with
        const std::string command = file.metadata.at("options");
        return options_of(command.substr(command.find(' ') + 1));
    }
    template <class T>
    const T* get(const std::string& tensor) const {
        const TensorView* view = file.find(tensor);
        if (!view || view->dtype != (sizeof(T) == 8 ? "F64" : "I32")) fail("no tensor %s of its type", tensor);
        return static_cast<const T*>(view->data);
    }
};

// A model with a batch: inputs and targets (B, T).
template <class Dev>
struct Trial {
    Dev dev;
    Model<Dev> model;
    Activations<Dev> activations;
    std::vector<int32_t> inputs, targets;

    Trial(const Config& c, const Golden& golden)
        : model(dev, c, true),
          activations(dev, c, c.batch, c.seq_len, TRAINING),
          inputs(golden.get<int32_t>("inputs"), golden.get<int32_t>("inputs") + c.batch * c.seq_len),
          targets(golden.get<int32_t>("targets"), golden.get<int32_t>("targets") + c.batch * c.seq_len) {
        model.initialise();
    }

    // One forward and one backward pass. Returns the mean loss; logits (B*T, V), where wanted.
    double pass(std::vector<float>* logits = nullptr) {
        const double tokens = double(inputs.size());
        dev.zero(model.grads, model.partition.elements);
        forward(model, activations, inputs.data(), 0, int(model.config.seq_len));
        const double sum = classify(model, activations, targets.data(), 1 / tokens, true, logits);
        backward(model, activations);
        return sum / tokens;
    }

    // A flat array of the engine as fp32 on the host.
    template <class T>
    std::vector<float> on_host(const T* array) {
        std::vector<float> values(model.table.total);
        dev.to_host(values.data(), array, values.size());
        return values;
    }
};

static double norm_of(const float* x, size_t count) {
    double square = 0;
    for (size_t i = 0; i < count; i++) square += double(x[i]) * x[i];
    return std::sqrt(square);
}

// ||found - expected|| / ||expected||
static double relative_error(const float* found, const float* expected, size_t count) {
    std::vector<float> difference(count);
    std::transform(found, found + count, expected, difference.begin(), std::minus<float>());
    return norm_of(difference.data(), count) / norm_of(expected, count);
}

// 1. fp32 rounds to 6e-8 of a number. Sums here have 1e3 to 1e4 terms (the products, and a gradient's sum over tokens),
// through two layers and back: 2e-5 of a tensor's norm.
static void compare_with_pytorch(const Golden& golden) {
    const double limit = 2e-5;
    Trial<Cpu<float>> t(golden.config(), golden);
    std::vector<float> logits;
    const double loss = t.pass(&logits), expected_loss = *golden.get<double>("loss");
    print("loss %.7f, PyTorch %.7f\n", loss, expected_loss);
    check("loss", std::fabs(loss / expected_loss - 1), limit);
    const size_t V = size_t(t.model.config.vocab_size);
    for (size_t r = 0; r < size_t(golden.file.find("logits_rows")->shape[0]); r++) {
        const size_t row = size_t(golden.get<int32_t>("logits_rows")[r]);
        const double* const doubles = golden.get<double>("logits") + r * V;
        const std::vector<float> expected(doubles, doubles + V);
        check(format_text("logits of token %d", row), relative_error(&logits[row * V], expected.data(), V), limit);
    }
    const std::vector<float> grads = t.on_host(t.model.grads);
    for (const TensorSpec& spec : t.model.table.specs) {
        const double norm = *golden.get<double>("grad_norm." + spec.name);
        const double* const expected = golden.get<double>("grad_sample." + spec.name);
        double error = std::fabs(norm_of(&grads[spec.offset], spec.size) - norm);
        const size_t samples = std::min<size_t>(64, spec.size);
        for (size_t k = 0; k < samples; k++)
            error = worse_error(error, std::fabs(grads[spec.offset + k * spec.size / samples] - expected[k]));
        check("d " + spec.name, error / norm, limit);
    }
}

// 2. The formula in fp64, fed with the engine's own gradients. Each step rounds a parameter once and its update some
// ten times: of ten steps 110 roundings of 6e-8, relative to the parameter and the learning rate together.
static void compare_with_adamw(const Golden& golden) {
    const double lr = 1e-3, beta1 = 0.9, beta2 = 0.95;
    Trial<Cpu<float>> t(golden.config(), golden);
    std::vector<double> m(t.model.table.total), v(m.size());
    const std::vector<float> start = t.on_host(t.model.params);
    std::vector<double> expected(start.begin(), start.end());
    double loss = 0;
    for (int step = 1; step <= 10; step++) {
        loss = t.pass();
        print("step %d: loss %.4f\n", step, loss);
        const std::vector<float> grads = t.on_host(t.model.grads);
        const double clip = std::min(1.0, t.model.config.grad_clip / norm_of(grads.data(), grads.size()));
        for (const TensorSpec& spec : t.model.table.specs)
            for (size_t i = spec.offset; i < spec.offset + spec.size; i++) {
                const double g = clip * grads[i], decay = spec.decay ? t.model.config.weight_decay : 0;
                m[i] = beta1 * m[i] + (1 - beta1) * g;
                v[i] = beta2 * v[i] + (1 - beta2) * g * g;
                const double m_hat = m[i] / (1 - std::pow(beta1, step)), v_hat = v[i] / (1 - std::pow(beta2, step));
                expected[i] -= lr * (m_hat / (std::sqrt(v_hat) + 1e-8) + decay * expected[i]);
            }
        update(t.model, step, lr);
    }
    const std::vector<float> params = t.on_host(t.model.params);
    double error = 0;
    for (const TensorSpec& spec : t.model.table.specs)
        for (size_t i = spec.offset; i < spec.offset + spec.size; i++)
            error = worse_error(error, std::fabs(params[i] - expected[i]) / (std::fabs(expected[i]) + lr));
    check("parameters after ten steps of AdamW", error, 110 * 0x1p-24);
    check("the last loss, of PyTorch's first", loss / *golden.get<double>("loss"), 0.9);
}

// 3. Token by token, each position reads the keys and values that earlier ones left. A logit passes some 40 arrays,
// each of sums of up to 300 terms: sqrt(40 * 300) roundings of 6e-8.
static void compare_decoding(const Golden& golden) {
    Trial<Cpu<float>> t(golden.config(), golden);
    const int T = int(t.model.config.seq_len), V = int(t.model.config.vocab_size);
    std::vector<float> at_once, one_by_one;
    t.pass(&at_once);
    Activations<Cpu<float>> caches(t.dev, t.model.config, 1, T, INFERENCE, 1);
    for (int position = 0; position < T; position++) {
        forward(t.model, caches, &t.inputs[size_t(position)], position, 1);
        t.dev.matmul_forward(caches.logits, caches.normed, t.model.w.head, nullptr, 1, int(caches.C), int(caches.Vp));
        one_by_one.insert(one_by_one.end(), caches.logits, caches.logits + V);
    }
    const double error = relative_error(one_by_one.data(), at_once.data(), one_by_one.size());
    check(format_text("logits of %d tokens, one by one", T), error, std::sqrt(40 * 300.0) * 0x1p-24);
}

// 4. A GPU's parameters may be bf16, so the CPU takes the rounded ones over. Every block is selected: two blocks of
// nearly equal importance may otherwise be ordered differently, and then the engines compute different functions.
// Between a token and a gradient lie some 80 arrays, each rounded to 2^-8: sqrt(80) 2^-8 (fp32: as above).
template <class Gpu>
static void compare_gpu_with_cpu(const Golden& golden) {
    const double limit = sizeof(typename Gpu::real) == 2 ? std::sqrt(80.0) * 0x1p-8 : std::sqrt(80 * 300.0) * 0x1p-24;
    Config c = golden.config();
    c.slc_count = (c.seq_len + c.slc_block - 1) / c.slc_block;
    Trial<Gpu> gpu(c, golden);
    Trial<Cpu<float>> cpu(c, golden);
    const std::vector<float> rounded = gpu.on_host(gpu.model.params);
    std::copy(rounded.begin(), rounded.end(), cpu.model.params);
    const double loss = gpu.pass(), expected_loss = cpu.pass();
    check("loss on the GPU", std::fabs(loss / expected_loss - 1), limit);
    const std::vector<float> found = gpu.on_host(gpu.model.grads), expected = cpu.on_host(cpu.model.grads);
    for (const TensorSpec& spec : gpu.model.table.specs)
        check("d " + spec.name + " on the GPU", relative_error(&found[spec.offset], &expected[spec.offset], spec.size),
              limit);
}

int main(int, char** argv) {
    set_omp_wait(argv);
    const int status = catch_errors(nullptr, [] {
        const Golden golden;
        compare_with_pytorch(golden);
        compare_with_adamw(golden);
        compare_decoding(golden);
        const GpuSearch gpus = search_gpus();
        if (gpus.count == 0) print("skipped: the GPU beside the CPU: %s\n", why_no_gpu(gpus));
        else if constexpr (!std::is_same<DeviceEngine, NoEngine>::value) compare_gpu_with_cpu<DeviceEngine>(golden);
        return 0;
    });
    print("%d passed, %d failed\n", passed, failed);
    return status || failed ? 1 : 0;
}
