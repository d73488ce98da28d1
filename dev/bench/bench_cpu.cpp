// bench_cpu.cpp: how fast the CPU engine is. `make bench` builds it, dev/bench/cpu.sh runs it.
//   bench_cpu conditions                          processor, compiler, load
//   bench_cpu decode [options of train]           one decoded token behind 1k .. 64k others, NSA beside full attention
//   bench_cpu full [options of train]             a layer's training step, NSA beside full attention
//   bench_cpu step [options of train]             a training step, operation by operation, as tests --perf has it
//   bench_cpu rate NAME STEPS [options of train]  whole training steps, one line "rate NAME tokens/s" each
// Numbers are medians of repeated measurements, and contenders take turns. The last line of a mode says how much of the
// machine others used meanwhile.
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#include "perf.h"

// Processor time of this process.
static double own_seconds() { return double(std::clock()) / CLOCKS_PER_SEC; }

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
    std::string text() const {
        const double share = std::max(0.0, busy_seconds() - busy - (own_seconds() - own)) / (seconds_now() - begun) /
                             double(sysconf(_SC_NPROCESSORS_ONLN));
        return format_text("# load of others meanwhile: %.0f %%", 100 * share);
    }
};

// By this clock: seconds_now, or own_seconds, which what others do lengthens less.
template <class F>
static double seconds_of(F operation, double (*clock)() = seconds_now) {
    const double begin = clock();
    operation();
    return clock() - begin;
}
static std::vector<float> random_floats(size_t count) {
    std::vector<float> x(count);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < count; i++) x[i] = float(random_normal(1, random_stream(RANDOM_TEST), i));
    return x;
}

static void print_conditions() {
    double load[3] = {};
    if (getloadavg(load, 3) != 3) load[0] = -1;
    print("# processor: %s, %d usable, vectors of %d bytes, bf16 dot products: %s, AMX: %s\n", processor_name(),
          usable_processors(), VECTOR_BYTES, HAVE_BF16 ? "yes" : "no", amx_granted() ? "yes" : "no");
    if (!HAVE_BF16) print("# no bf16 dot products here: what is measured in bf16 elsewhere is left out\n");
    print("# built by g++ %s, %d threads\n", __VERSION__, omp_get_max_threads());
    print("# load averages now: %.2f %.2f %.2f\n", load[0], load[1], load[2]);
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
static void bench_decode(Config c, bool bf16) {
    omp_set_num_threads(1);
    print(
        "%s, %d layers, %s, one thread, processor time: a token behind T - 1 others; keys are those that it sees in a "
        "layer and group, counted from the selection, and T/d + n l' + w\n",
        c.model, c.layers, bf16 ? "bf16" : "fp32");
    print("%-6s | %8s %8s %12s | %8s %12s | %s\n", "T", "NSA keys", "formula", "ms a token", "full", "ms a token",
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
            for (const int full : {0, 1})
                seconds[full].push_back(seconds_of([&] { kinds[full]->token(); }, own_seconds));
        const double nsa = median_of(seconds[0]), full = median_of(seconds[1]);
        const int64_t formula =
            T / c.cmp_stride + std::min<int64_t>(T, c.slc_count * c.slc_block) + std::min<int64_t>(T, c.window);
        print("%-6d | %8.0f %8d %12.2f | %8d %12.2f | %10.2f\n", T, kinds[0]->keys_seen(), formula, nsa * 1e3, T,
              full * 1e3, full / nsa);
        std::fflush(stdout);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Training steps on random tokens; the engine clocks each operation.
struct StepBench {
    Timed<Cpu<float>> dev;
    Model<Timed<Cpu<float>>> model;
    Activations<Timed<Cpu<float>>> a;
    PerfStep<Cpu<float>> perf;
    double forward_seconds = 0;  // of the last step: what prefill takes, without logits

    StepBench(const Config& c, bool bf16)
        : model(dev, c, true), a(dev, c, c.batch, c.seq_len, TRAINING), perf(model, a) {
        dev.gemm.bf16 = bf16;
        model.initialise();
    }
    double tokens() const { return double(perf.tokens.size()); }
    void step() {
        dev.zero(model.grads, model.table.total);
        forward_seconds = seconds_of([&] { forward(model, a, perf.tokens.data(), 0, a.shape.T); });
        classify(model, a, perf.tokens.data(), 1 / tokens(), true);
        backward(model, a);
        update(model, ++perf.steps, 1e-4);
    }
};

static void bench_step(const Config& c, bool bf16, int steps) {
    Timed<Cpu<float>> dev;
    dev.gemm.bf16 = bf16;
    perf_on(dev, c, steps);
    print("peak memory %.0f MiB\n", peak_resident_bytes() / (1 << 20));
}

static void bench_rate(const Config& c, bool bf16, const std::string& name, int steps) {
    StepBench bench(c, bf16);
    constexpr int warm_up = 2;
    for (int i = 0; i < warm_up + steps; i++) {
        const double s = seconds_of([&] { bench.step(); });
        print(i < warm_up ? "# %s: %.1f tokens/s to warm up\n" : "rate %s %.1f\n", name, bench.tokens() / s);
        std::fflush(stdout);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One layer's training step with NSA and with full attention, in turn, microseconds a token. Choosing blocks is in the
// compressed branch's forward pass. "by keys": the ratio if NSA's attention took as long for a key as full attention
// does, and if it had no other cost.
struct FullBench {
    enum Row { STEP, FORWARD, ATTENTION_FORWARD, ATTENTION_BACKWARD, ATTENTION, ROWS };
    static constexpr const char* names[ROWS] = {"step", "forward", "attention-forward", "attention-backward",
                                                "attention"};
    StepBench bench;
    std::vector<double> seconds[ROWS];
    double keys = 0;  // that a query sees, on average

    FullBench(const Config& c, bool bf16) : bench(c, bf16) {
        const NsaShape& s = bench.a.shape;
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
        x[ATTENTION] = x[ATTENTION_FORWARD] + x[ATTENTION_BACKWARD];
        for (int row = 0; row < ROWS; row++) seconds[row].push_back(x[row]);
    }
    double us_a_token(int row) const { return 1e6 * median_of(seconds[row]) / bench.tokens(); }
};

static void bench_full(Config c, bool bf16) {
    FullBench nsa((c.attention = "nsa", c), bf16), full((c.attention = "full", c), bf16);
    nsa.bench.step(), full.bench.step();  // touch all memory once
    const int repetitions = c.seq_len > 16384 ? 1 : c.seq_len > 8192 ? 3 : 5;
    for (int i = 0; i < repetitions; i++) nsa.step(), full.step();
    print("%s, %d of its layers, %s, B %d, T %d; keys a query: NSA %.0f, full %.0f; activations: %.0f and %.0f MiB\n",
          c.model, c.layers, bf16 ? "bf16" : "fp32", c.batch, c.seq_len, nsa.keys, full.keys,
          double(nsa.bench.a.arena.bytes) / (1 << 20), double(full.bench.a.arena.bytes) / (1 << 20));
    print("    %-22s %10s %10s %10s %8s   us a token, medians of %d\n", "", "NSA", "full", "full/NSA", "by keys",
          repetitions);
    for (int row = 0; row < FullBench::ROWS; row++) {
        const double ours = nsa.us_a_token(row), theirs = full.us_a_token(row);
        const int attention = row == FullBench::STEP      ? FullBench::ATTENTION
                              : row == FullBench::FORWARD ? FullBench::ATTENTION_FORWARD
                                                          : row;
        const double saved = full.us_a_token(attention) * (1 - nsa.keys / full.keys);
        print("    %-22s %10.1f %10.1f %10.2f %8.2f\n", FullBench::names[row], ours, theirs, theirs / ours,
              theirs / (theirs - saved));
    }
    std::fflush(stdout);
}

static int run(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const int own = mode == "rate" ? 4 : 2;
    if (!is_choice(mode, "conditions|decode|full|step|rate"))
        fail_usage("bench_cpu: mode '%s'; expected conditions, decode, full, step or rate", mode);
    const LoadOfOthers load;
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
    if (mode == "decode") bench_decode(c, device.cpu_bf16);
    if (mode == "full") bench_full(c, device.cpu_bf16);
    if (mode == "step") bench_step(c, device.cpu_bf16, 3);
    if (mode == "rate") bench_rate(c, device.cpu_bf16, argv[2], std::atoi(argv[3]));
    if (mode != "conditions") print("%s\n", load.text());
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
