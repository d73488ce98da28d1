// bench_cpu.cpp: how fast the CPU engine is, beside what this machine's GEMM reaches in the same run. `make bench`
// builds it, dev/bench/cpu.sh runs it.
//   bench_cpu conditions                          processor, compiler, load
//   bench_cpu gemm [options of train]             the products of a step, in fp32 and bf16
//   bench_cpu attention                           the three branches, forward and backward, T = 2k .. 32k
//   bench_cpu decode [options of train]           one decoded token behind 1k .. 64k others, NSA beside full attention
//   bench_cpu full [options of train]             a layer's training step, NSA beside full attention
//   bench_cpu step [options of train]             a training step, operation by operation, as tests --perf has it
//   bench_cpu rate NAME STEPS [options of train]  whole training steps, one line "rate NAME tokens/s" each
//   bench_cpu tokenize FILE VOCAB_DIR             the encoder on one thread, "rate tokenize-ours MB/s"
// Numbers are medians of repeated measurements, and contenders take turns. The last line of a mode says how much of the
// machine others used meanwhile.
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#include "perf.h"

// The processor time that other processes have used since the object was made, as a share of all cores.
struct LoadOfOthers {
    double begun = seconds_now(), busy = busy_seconds(), own = own_seconds();

    static double busy_seconds() {
        std::ifstream in("/proc/stat");
        std::string cpu;
        double value, sum = 0;
        in >> cpu;
        for (int i = 0; i < 8 && in >> value; i++)
            if (i != 3 && i != 4) sum += value;  // idle, waiting for disks
        return sum / double(sysconf(_SC_CLK_TCK));
    }
    static double own_seconds() {
        rusage r;
        getrusage(RUSAGE_SELF, &r);
        return double(r.ru_utime.tv_sec + r.ru_stime.tv_sec) + 1e-6 * double(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
    }
    std::string text() const {
        const double share = std::max(0.0, busy_seconds() - busy - (own_seconds() - own)) / (seconds_now() - begun) /
                             double(sysconf(_SC_NPROCESSORS_ONLN));
        return format_text("# load of others meanwhile: %.0f %%", 100 * share);
    }
};

static double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x.empty() ? 0 : x[x.size() / 2];
}
template <class F>
static double seconds_of(F operation) {
    const double begin = seconds_now();
    operation();
    return seconds_now() - begin;
}
// The medians of several operations, which take turns.
static std::vector<double> alternate(int repetitions, const std::vector<std::function<void()>>& operations) {
    std::vector<std::vector<double>> seconds(operations.size());
    for (int i = -1; i < repetitions; i++)  // the first round warms up
        for (size_t k = 0; k < operations.size(); k++) {
            const double s = seconds_of(operations[k]);
            if (i >= 0) seconds[k].push_back(s);
        }
    std::vector<double> medians;
    for (const auto& s : seconds) medians.push_back(median(s));
    return medians;
}

static std::vector<float> random_floats(size_t count) {
    std::vector<float> x(count);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < count; i++) x[i] = float(random_normal(1, random_stream(RANDOM_TEST), i));
    return x;
}

static void print_conditions() {
    std::ifstream in("/proc/cpuinfo");
    std::string line, processor = "unknown processor";
    while (std::getline(in, line))
        if (line.compare(0, 10, "model name") == 0) processor = line.substr(line.find(':') + 2);
    double load[3] = {};
    if (getloadavg(load, 3) != 3) load[0] = -1;
    std::printf("# processor: %s, %d usable, vectors of %d bytes, bf16 dot products: %s, AMX: %s\n", processor.c_str(),
                usable_processors(), VECTOR_BYTES, HAVE_BF16 ? "yes" : "no", amx_granted() ? "yes" : "no");
    if (!HAVE_BF16) std::printf("# no bf16 dot products here: what is measured in bf16 elsewhere is left out\n");
    std::printf("# built by g++ %s, %d threads\n", __VERSION__, omp_get_max_threads());
    std::printf("# load averages now: %.2f %.2f %.2f\n", load[0], load[1], load[2]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The products of a step's linear layers; the head is computed in chunks of rows.
static void bench_gemm(const Config& c) {
    const NsaShape shape = shape_of(c, c.batch, c.seq_len);
    const int N = shape.B * shape.T, HD = shape.H * shape.D, rows = std::min(N, 1024),
              Vp = int(TensorTable(c).padded_vocab);
    const struct {
        const char* name;
        int rows, in, out, calls;
    } layers[] = {{"projection", N, int(c.dim), shape.projected(), int(c.layers)},
                  {"o_proj", N, HD, int(c.dim), int(c.layers)},
                  {"fc1", N, int(c.dim), int(c.mlp_hidden), int(c.layers)},
                  {"fc2", N, int(c.mlp_hidden), int(c.dim), int(c.layers)},
                  {"head", rows, int(c.dim), Vp, N / rows}};
    size_t most = 0;
    for (const auto& l : layers)
        for (const size_t size : {size_t(l.rows) * l.in, size_t(l.rows) * l.out, size_t(l.in) * l.out})
            most = std::max(most, size);
    const std::vector<float> A = random_floats(most), B = random_floats(most);
    std::vector<float> C(most);
    Gemm<float> fp32, bf16;
    bf16.bf16 = true;
    std::printf("GFLOP/s                   fp32   bf16   (with the rounding of the inputs)\n");
    double flops = 0, seconds[2] = {};
    for (const auto& l : layers)
        for (const char* const pass : {"forward", "inputs", "weights"}) {
            const auto multiply = [&](Gemm<float>& gemm) {
                if (*pass == 'f')
                    gemm.nt({l.rows, l.out, l.in}, A.data(), l.in, B.data(), l.in, false, C.data(), l.out);
                if (*pass == 'i')
                    gemm.nn({l.rows, l.in, l.out}, A.data(), l.out, B.data(), l.in, false, C.data(), l.in);
                if (*pass == 'w') gemm.tn({l.out, l.in, l.rows}, A.data(), l.out, B.data(), l.in, true, C.data(), l.in);
            };
            const double work = 2.0 * l.rows * l.in * l.out;
            std::vector<std::function<void()>> contenders = {[&] { multiply(fp32); }};
            if (HAVE_BF16) contenders.push_back([&] { multiply(bf16); });
            const std::vector<double> s = alternate(work > 1e10 ? 5 : 15, contenders);
            flops += work * l.calls;
            std::printf("%-10s %-8s ", l.name, pass);
            for (size_t i = 0; i < s.size(); i++) {
                seconds[i] += s[i] * l.calls;
                std::printf(" %6.0f", 1e-9 * work / s[i]);
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    std::printf("all of a step       ");
    for (int i = 0; i < 1 + HAVE_BF16; i++) std::printf(" %6.0f", 1e-9 * flops / seconds[i]);
    std::printf("\n");
}

// One product of a step, as the yardstick.
struct GemmRate {
    static constexpr int M = 2048, N = 3072, K = 768;
    std::vector<float> a = random_floats(size_t(M) * K), b = random_floats(size_t(N) * K),
                       c = std::vector<float>(size_t(M) * N);
    Gemm<float> gemm;
    void run() { gemm.nt({M, N, K}, a.data(), K, b.data(), K, false, c.data(), N); }
    static double rate(double seconds) { return 2.0 * M * N * K / seconds; }
};

// ---------------------------------------------------------------------------------------------------------------------
static void bench_attention(const Config& c, bool bf16) {
    std::printf(
        "useful FLOPs: 4 D a key and query head forward, 8 D backward; ns per key: time of a query over all heads, "
        "divided by its keys\n");
    std::printf("%-6s %-11s %10s | %14s %12s %11s | %14s %12s %11s\n", "T", "branch", "keys/query", "fwd GFLOP/s",
                "of GEMM", "ns per key", "bwd GFLOP/s", "of GEMM", "ns per key");
    GemmRate reference;
    Cpu<float> cpu;
    cpu.gemm.bf16 = reference.gemm.bf16 = bf16;
    for (const int T : {2048, 4096, 8192, 16384, 32768}) {
        const NsaShape s = shape_of(c, 1, T);
        const size_t rows = s.query_rows(), keys = s.key_rows() * s.D;
        const std::vector<float> q = random_floats(rows * s.D), k = random_floats(keys), v = random_floats(keys),
                                 dout = random_floats(rows * s.D);
        std::vector<float> out(rows * s.D), lse(rows), dot(rows, 0.1f), dq(rows * s.D), dk(keys), dv(keys);
        std::vector<uint32_t> selection(size_t(s.B) * s.G * s.T * s.selection_words());
        cpu.attend_and_select(out.data(), lse.data(), selection.data(), nullptr, q.data(), k.data(), v.data(), s);
        auto print = [&](const char* name, double pairs, double gemm, const double seconds[2]) {
            std::printf("%-6d %-11s %10.1f |", T, name, pairs / double(rows));
            for (const int backward : {0, 1}) {
                const double rate = (backward ? 8 : 4) * pairs * s.D / seconds[backward];
                std::printf(" %14.1f %11.0f%% %11.2f %s", rate * 1e-9, 100 * rate / gemm,
                            seconds[backward] * 1e9 / pairs * s.H, backward ? "\n" : "|");
            }
            std::fflush(stdout);
        };
        double all_pairs = 0, all_gemm = 0, all_seconds[2] = {0, 0};
        for (const Branch branch : {CMP, SLC, WIN}) {
            auto forward_pass = [&] {
                cpu.attention_forward(branch, out.data(), lse.data(), q.data(), k.data(), v.data(), selection.data(),
                                      s);
            };
            auto backward_pass = [&] {
                cpu.attention_backward(
                    branch, {dq.data(), branch != WIN, dk.data(), dv.data(), dout.data(), dot.data(), lse.data()},
                    {q.data(), k.data(), v.data(), selection.data()}, s);
            };
            const std::vector<double> seconds =
                alternate(T <= 8192 ? 5 : 3, {[&] { reference.run(); }, forward_pass, backward_pass});
            const double pairs = attention_pairs(branch, s), gemm = GemmRate::rate(seconds[0]);
            print(Timed<Cpu<float>>::branch_name(branch), pairs, gemm, &seconds[1]);
            all_pairs += pairs, all_gemm += gemm / 3, all_seconds[0] += seconds[1], all_seconds[1] += seconds[2];
        }
        print("all three", all_pairs, all_gemm, all_seconds);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A model whose caches hold T tokens and which decodes the last of them. What weights and caches hold does not matter
// to the time, so they are random numbers and no prompt is read.
struct DecodeBench {
    Cpu<float> dev;
    Model<Cpu<float>> model;
    Activations<Cpu<float>> a;
    const int T;

    DecodeBench(const Config& c, bool bf16, int tokens)
        : model(dev, c, false), a(dev, c, 1, tokens, INFERENCE, 1), T(tokens) {
        dev.gemm.bf16 = bf16;
        static const std::vector<float> numbers = random_floats(size_t(1) << 20);
        const auto fill = [&](float* x, size_t count, float scale) {
            for (size_t i = 0; i < count; i++) x[i] = scale * numbers[i % numbers.size()];
        };
        const NsaShape& s = a.shape;
        fill(model.params, model.table.total, 0.02f);
        for (auto& y : a.layer) {
            fill(y.kv, s.head_slots() * s.key_rows() * size_t(s.D), 1);
            fill(y.compressed, 2 * s.cmp_rows() * size_t(s.D), 1);
        }
    }
    // What the last token saw of the last layer, the mean of the groups.
    double keys_seen() const {
        const NsaShape& s = a.shape;
        double keys = 0;
        for (int group = 0; group < s.G; group++)
            for (const Branch branch : {CMP, SLC, WIN})
                for (int i = 0; i < range_count(branch, T - 1, s); i++) {
                    const uint32_t* const mask = a.layer.back().selection + group * s.selection_words();
                    const KeyRange range = key_range(branch, i, T - 1, mask, s);
                    keys += range.end - range.begin;
                }
        return keys / s.G;
    }
    void token() {
        const int32_t token = 7;
        forward(model, a, &token, T - 1, 1);
        dev.matmul_forward(a.logits, a.normed, model.w.head, nullptr, 1, int(a.C), int(a.Vp));
    }
};
// Processor time of one thread: what others do lengthens it less than the time on the clock.
static double processor_seconds_of(const std::function<void()>& operation) {
    const auto now = [] {
        timespec t;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    };
    const double begin = now();
    operation();
    return now() - begin;
}

static void bench_decode(Config c, bool bf16) {
    omp_set_num_threads(1);
    std::printf(
        "%s, %lld layers, %s, one thread, processor time: a token behind T - 1 others; keys are those that it "
        "sees in a layer and group, counted from the selection, and T/d + n l' + w\n",
        c.model.c_str(), (long long)c.layers, bf16 ? "bf16" : "fp32");
    std::printf("%-6s | %8s %8s %12s | %8s %12s | %s\n", "T", "NSA keys", "formula", "ms a token", "full", "ms a token",
                "full / NSA");
    for (int T = 1024; T <= 65536; T *= 2) {
        std::vector<double> seconds[2];
        std::unique_ptr<DecodeBench> kinds[2];
        for (const int full : {0, 1}) {
            c.attention = full ? "full" : "nsa", c.seq_len = T;
            kinds[full] = std::make_unique<DecodeBench>(c, bf16, T);
        }
        for (const int full : {0, 1}) kinds[full]->token();
        for (int i = 0; i < 9; i++)
            for (const int full : {0, 1}) seconds[full].push_back(processor_seconds_of([&] { kinds[full]->token(); }));
        const double nsa = median(seconds[0]), full = median(seconds[1]);
        const int64_t formula =
            T / c.cmp_stride + std::min<int64_t>(T, c.slc_count * c.slc_block) + std::min<int64_t>(T, c.window);
        std::printf("%-6d | %8.0f %8lld %12.2f | %8d %12.2f | %10.2f\n", T, kinds[0]->keys_seen(), (long long)formula,
                    nsa * 1e3, T, full * 1e3, full / nsa);
        std::fflush(stdout);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Training steps on random tokens; the engine clocks each operation.
struct StepBench {
    Timed<Cpu<float>> dev;
    Config config;
    std::unique_ptr<Model<Timed<Cpu<float>>>> model;
    std::unique_ptr<Activations<Timed<Cpu<float>>>> activations;
    std::vector<int32_t> tokens;
    int64_t steps = 0;

    StepBench(const Config& c, bool bf16) : config(c), tokens(size_t(c.batch * c.seq_len)) {
        dev.gemm.bf16 = bf16;
        model = std::make_unique<Model<Timed<Cpu<float>>>>(dev, c, true);
        activations = std::make_unique<Activations<Timed<Cpu<float>>>>(dev, c, c.batch, c.seq_len, TRAINING);
        model->initialise();
        for (size_t i = 0; i < tokens.size(); i++)
            tokens[i] = int32_t(random_below(uint64_t(c.vocab_size), 1, random_stream(RANDOM_TEST), i));
    }
    double forward_seconds = 0;  // of the last step: what prefill takes, without logits

    void step() {
        dev.zero(model->grads, model->table.total);
        forward_seconds = seconds_of([&] { forward(*model, *activations, tokens.data(), 0, int(config.seq_len)); });
        classify(*model, *activations, tokens.data(), 1 / double(tokens.size()), true);
        backward(*model, *activations);
        update(*model, ++steps, 1e-4);
    }
};

static void bench_step(const Config& c, bool bf16, int steps) {
    Timed<Cpu<float>> dev;
    dev.gemm.bf16 = bf16;
    perf_on(dev, c, steps);
    std::printf("peak memory %.0f MiB\n", peak_memory_mib());
}

static void bench_rate(const Config& c, bool bf16, const std::string& name, int steps) {
    StepBench bench(c, bf16);
    constexpr int warm_up = 2;
    for (int i = 0; i < warm_up + steps; i++) {
        const double s = seconds_of([&] { bench.step(); });
        std::printf(i < warm_up ? "# %s: %.1f tokens/s to warm up\n" : "rate %s %.1f\n", name.c_str(),
                    double(bench.tokens.size()) / s);
        std::fflush(stdout);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One layer's training step with NSA and with full attention, in turn, microseconds a token. Choosing blocks is in the
// compressed branch's forward pass. "by keys": the ratio if NSA's attention took as long for a key as full attention
// does, and if it had no other cost.
struct FullBench {
    enum Row { STEP, FORWARD, ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION, WITH_COMPRESSION, COMPRESSION, ROWS };
    static constexpr const char* names[ROWS] = {
        "step",       "forward", "attention-forward", "attention-backward", "attention", "attention+compression",
        "compression"};
    StepBench bench;
    std::vector<double> seconds[ROWS];
    double keys = 0;  // that a query sees, on average

    FullBench(const Config& c, bool bf16) : bench(c, bf16) {
        const NsaShape& s = bench.activations->shape;
        for (const Branch branch : {CMP, SLC, WIN})
            if (s.has(branch)) keys += attention_pairs(branch, s) / double(s.query_rows());
    }
    double seconds_in(const char* operation) const {
        double sum = 0;
        for (const auto& [name, t] : bench.dev.times)
            if (name.compare(0, std::strlen(operation), operation) == 0) sum += t.seconds;
        return sum;
    }
    void step() {
        bench.dev.times.clear();
        double x[ROWS];
        x[STEP] = seconds_of([&] { bench.step(); });
        x[FORWARD] = bench.forward_seconds;
        x[ATTENTION_FORWARD] = seconds_in("attention_forward,"),
        x[ATTENTION_BACKWARD] = seconds_in("attention_backward,");
        x[COMPRESSION] = seconds_in("compress_");
        x[ATTENTION] = x[ATTENTION_FORWARD] + x[ATTENTION_BACKWARD];
        x[WITH_COMPRESSION] = x[ATTENTION] + x[COMPRESSION];
        for (int row = 0; row < ROWS; row++) seconds[row].push_back(x[row]);
    }
    double us_a_token(int row) const { return 1e6 * median(seconds[row]) / double(bench.tokens.size()); }
};

static void bench_full(Config c, bool bf16) {
    FullBench nsa((c.attention = "nsa", c), bf16), full((c.attention = "full", c), bf16);
    nsa.bench.step(), full.bench.step();  // touch all memory once
    const int repetitions = c.seq_len > 16384 ? 1 : c.seq_len > 8192 ? 3 : 5;
    for (int i = 0; i < repetitions; i++) nsa.step(), full.step();
    std::printf(
        "%s, %lld of its layers, %s, B %lld, T %lld; keys a query: NSA %.0f, full %.0f; activations: %.0f and "
        "%.0f MiB\n",
        c.model.c_str(), (long long)c.layers, bf16 ? "bf16" : "fp32", (long long)c.batch, (long long)c.seq_len,
        nsa.keys, full.keys, double(nsa.bench.activations->arena.bytes) / (1 << 20),
        double(full.bench.activations->arena.bytes) / (1 << 20));
    std::printf("    %-22s %10s %10s %10s %8s   us a token, medians of %d\n", "", "NSA", "full", "full/NSA", "by keys",
                repetitions);
    for (int row = 0; row < FullBench::COMPRESSION; row++) {
        const double ours = nsa.us_a_token(row), theirs = full.us_a_token(row);
        const int attention = row == FullBench::STEP      ? FullBench::ATTENTION
                              : row == FullBench::FORWARD ? FullBench::ATTENTION_FORWARD
                                                          : row;
        const double saved = full.us_a_token(attention) * (1 - nsa.keys / full.keys);
        std::printf("    %-22s %10.1f %10.1f %10.2f %8.2f\n", FullBench::names[row], ours, theirs, theirs / ours,
                    theirs / (theirs - saved));
    }
    std::printf("    %-22s %10.1f\n", FullBench::names[FullBench::COMPRESSION], nsa.us_a_token(FullBench::COMPRESSION));
    std::fflush(stdout);
}

static void bench_tokenize(const std::string& file, const std::string& vocab_dir) {
    const Tokenizer tokenizer = Tokenizer::gpt2(vocab_dir);
    std::ifstream in(file, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    if (text.empty()) fail("%s is empty or cannot be read", file.c_str());
    size_t tokens = 0;
    std::vector<double> seconds;
    for (int i = 0; i < 6; i++) {
        const double s = seconds_of([&] { tokens = tokenizer.encode(text).size(); });
        if (i > 0) seconds.push_back(s), std::printf("rate tokenize-ours %.1f\n", double(text.size()) * 1e-6 / s);
    }
    std::printf("# %.1f MB, %zu tokens, one thread\n", double(text.size()) * 1e-6, tokens);
}

static int run(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const int own = mode == "rate" ? 4 : 2;
    if (!is_choice(mode, "conditions|gemm|attention|decode|full|step|rate|tokenize"))
        fail_usage("bench_cpu: mode '%s'; expected conditions, gemm, attention, decode, full, step, rate or tokenize",
                   mode.c_str());
    const LoadOfOthers load;
    if (mode == "tokenize") {
        if (argc != 4) fail_usage("bench_cpu tokenize FILE VOCAB_DIR");
        bench_tokenize(argv[2], argv[3]);
    } else {
        if (mode == "rate" && argc < 4) fail_usage("bench_cpu rate NAME STEPS [options of train]");
        std::vector<const char*> options = {"train_nsa"};
        for (int i = own; i < argc; i++) options.push_back(argv[i]);
        Config c = parse_options(int(options.size()), options.data());
        if (!c.is_given("model")) c.model = "125m";
        if (mode == "full") {
            overlay(c, option_named("layers"), "1", Source::CONFIG_FILE);
            overlay(c, option_named("tokenizer"), "bytes", Source::CONFIG_FILE);
        }
        apply_preset(c);
        validate_model(c, "options");
        c.device = "cpu";
        if (!c.is_given("batch")) c.batch = 1;
        World world;
        const Device device = choose_device(c, world, search_gpus());
        if (mode == "conditions") print_conditions();
        if (mode == "gemm") bench_gemm(c);
        if (mode == "attention") bench_attention(c, device.cpu_bf16);
        if (mode == "decode") bench_decode(c, device.cpu_bf16);
        if (mode == "full") bench_full(c, device.cpu_bf16);
        if (mode == "step") bench_step(c, device.cpu_bf16, 3);
        if (mode == "rate") bench_rate(c, device.cpu_bf16, argv[2], std::atoi(argv[3]));
    }
    if (mode != "conditions") std::printf("%s\n", load.text().c_str());
    return 0;
}

int main(int argc, char** argv) {
    set_omp_wait(argv);
    try {
        return run(argc, argv);
    } catch (const Error& e) {
        std::fprintf(stderr, "bench_cpu: error: %s\n", e.what());
        return e.status;
    }
}
