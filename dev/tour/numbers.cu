// numbers.cu: the numbers of the tour (dev/tour), printed by the program's own functions. dev/tour/figures.py draws
// them. No GPU is needed.
//   make build/tour && build/tour parameters --model tiny
//   mpirun -np 2 build/tour timeline --model 125m --layers 4 ...
// A topic may be followed by options of train.
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"

// ---------------------------------------------------------------------------------------------------------------------
// Page 1. One token: text, id, loss, a row of a gradient, AdamW.

static void print_row(const char* name, const float* row) {
    std::printf("%-34s", name);
    for (int i = 0; i < 5; i++) std::printf(" % .6f", double(row[i]));
    std::printf(" ...\n");
}

// The first sample of training, and its text.
struct Sample {
    std::vector<int32_t> inputs, targets;
    std::string text;

    explicit Sample(Config& c) {
        c.batch = 1;
        c.total_batch = c.seq_len;
        inputs.resize(size_t(c.seq_len));
        targets.resize(size_t(c.seq_len));
        const auto tokenizer = Tokenizer::find(c.tokenizer, c.vocab_dir);
        auto data = open_training_data(c, World(), tokenizer.get());
        data.train->next_batch(inputs.data(), targets.data(), 1);
        text = tokenizer->decode({inputs.begin(), inputs.end()});
    }
};

static void print_journey(Config c) {
    const Sample sample(c);
    const auto& [inputs, targets, text] = sample;
    const int T = int(c.seq_len), at = 100;
    std::printf("text of tokens %d to %d: \"%s\"\n", at - 30, at + 6, text.substr(at - 30, 37).c_str());
    std::printf("inputs  %d to %d:", at, at + 6);
    for (int i = at; i < at + 7; i++) std::printf(" %3d", inputs[size_t(i)]);
    std::printf("\ntargets %d to %d:", at, at + 6);
    for (int i = at; i < at + 7; i++) std::printf(" %3d", targets[size_t(i)]);

    Cpu<float> dev;
    Model<Cpu<float>> model(dev, c, true);
    Activations<Cpu<float>> a(dev, c, 1, T, TRAINING);
    model.initialise();
    forward(model, a, inputs.data(), 0, T);
    const double sum = classify(model, a, targets.data(), 1.0 / T, true);
    const float loss = a.losses[at];
    std::printf("\nloss of input %d: %.4f, so its target has probability %.6f; mean loss of %d: %.4f\n", at,
                double(loss), std::exp(-double(loss)), T, sum / T);
    backward(model, a);
    const size_t row = size_t(inputs[size_t(at)]) * size_t(c.dim);
    std::printf("row %d of embed_tokens.weight:\n", inputs[size_t(at)]);
    print_row("  weights", model.params + row);
    print_row("  gradient", model.grads + row);
    const double lr = learning_rate(c, 1);
    update(model, 1, lr);
    std::printf("norm of all gradients %.4f, clipped to %.1f; lr of step 1: %.1e\n", std::sqrt(model.results[1]),
                c.grad_clip, lr);
    print_row("  m, a tenth of the clipped gradient", model.m + row);
    print_row("  weights after the update", model.params + row);
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 2. Parameters by what they are for, and of one layer by tensor.

static const char* kind_of(const std::string& name) {
    const std::pair<const char*, const char*> kinds[] = {{"embed_tokens", "embedding"},
                                                         {".mlp.", "MLP"},
                                                         {"q_proj", "q"},
                                                         {"o_proj", "o"},
                                                         {"gate_proj", "gates"},
                                                         {".attn.phi_", "phi"},
                                                         {"k_cmp", "k, v"},
                                                         {"v_cmp", "k, v"},
                                                         {"k_slc", "k, v"},
                                                         {"v_slc", "k, v"},
                                                         {"k_win", "k, v"},
                                                         {"v_win", "k, v"}};
    for (const auto& [part, kind] : kinds)
        if (name.find(part) != std::string::npos) return kind;
    return "others";
}

static void print_parameters(const Config& c) {
    const TensorTable table(c);
    std::vector<std::pair<std::string, size_t>> kinds;
    for (const TensorSpec& t : table.specs) {
        const std::string kind = kind_of(t.name);
        auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.first == kind; });
        if (found == kinds.end()) found = kinds.insert(kinds.end(), {kind, 0});
        found->second += t.size;
    }
    std::sort(kinds.begin(), kinds.end(), [](const auto& x, const auto& y) { return x.second > y.second; });
    for (const auto& [kind, count] : kinds)
        std::printf("%-10s %11zu %5.1f %%\n", kind.c_str(), count, 100 * double(count) / double(table.parameters));
    std::printf("%-10s %11lld\n", "all", (long long)table.parameters);
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 3. Keys that a query reads, by branch; and what full attention reads.

static void print_keys(const Config& c) {
    NsaShape s = shape_of(c, 1, c.seq_len);
    s.queries = 1;
    std::printf("query   cmp   slc   win   full\n");
    for (s.first = 0; s.first < s.T; s.first++) {
        double pairs[BRANCHES];
        for (const Branch branch : {CMP, SLC, WIN}) pairs[branch] = attention_pairs(branch, s) / s.H;
        std::printf("%5d %5.0f %5.0f %5.0f %6d\n", s.first, pairs[CMP], pairs[SLC], pairs[WIN], s.first + 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 4. Buffers of activations in training, by name, under --recompute 0, 1 and 2.

static void print_memory_by_buffer(Config c) {
    Cpu<float> dev;
    std::vector<std::vector<MemoryEntry>> of_level;
    for (c.recompute = 0; c.recompute <= 2; c.recompute++)
        of_level.push_back(Activations<Cpu<float>>(dev, c, c.batch, c.seq_len, TRAINING, 0, true).arena.memory);
    std::printf("%-40s %9s %9s %9s MiB, --batch %lld\n", "buffer, and how often with --recompute 0", "0", "1", "2",
                (long long)c.batch);
    double sums[3] = {};
    for (const MemoryEntry& kept : of_level[0]) {
        std::printf("%2zu x %-35s", kept.count, kept.name.c_str());
        for (size_t level = 0; level < 3; level++) {
            // What is shared comes behind what each layer keeps, so levels have other orders.
            const auto entry = std::find_if(of_level[level].begin(), of_level[level].end(),
                                            [&](const MemoryEntry& e) { return e.name == kept.name; });
            const double mib = double(entry->bytes) * 0x1p-20;
            std::printf(" %9.3f", mib);
            sums[level] += mib;
        }
        std::printf("\n");
    }
    std::printf("%-40s %9.1f %9.1f %9.1f\n", "all", sums[0], sums[1], sums[2]);
    const NsaShape s = shape_of(c, c.batch, c.seq_len);
    double pairs = 0;
    for (const Branch branch : {CMP, SLC, WIN}) pairs += attention_pairs(branch, s);
    std::printf("weights of all branches in one layer, which are not kept: %.1f MB; their LSE: %.2f MB\n", 4e-6 * pairs,
                4e-6 * double(BRANCHES * s.query_rows()));
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 5. The backward pass of one query's softmax, in the window branch, by Cpu<double>.

struct SmallAttention {
    // The last of three queries sees three keys; D = 2.
    static constexpr int T = 3, D = 2;
    NsaShape s;
    Cpu<double> dev;
    double q[T * D] = {0, 0, 0, 0, 1, 2}, k[T * D] = {1, 0, 0, 1, 1, 1}, v[T * D] = {4, 0, 0, 4, 2, 2};
    double gate = 0.8, out[T * D], lse[T];

    SmallAttention() {
        s.T = s.queries = s.window = T;
        s.D = D;
        s.H = s.G = s.window_only = s.sees_all = 1;
        forward();
    }
    void forward() { dev.attention_forward(WIN, out, lse, q, k, v, nullptr, s); }
    // dout . (gate * out) of the last query
    double objective(const double* dout) {
        forward();
        return gate * (dout[0] * out[4] + dout[1] * out[5]);
    }
};

static void print_softmax_backward() {
    SmallAttention x;
    const double dout[6] = {0, 0, 0, 0, 1, -1}, lse_gated[3] = {x.lse[0], x.lse[1], x.lse[2] - std::log(x.gate)};
    const double r = dout[4] * x.out[4] + dout[5] * x.out[5], row_dot[3] = {0, 0, r};
    std::printf("key   S        P        P'       dP       dS\n");
    for (int key = 0; key < 3; key++) {
        const double S = x.dev.score(x.q + 4, x.k + 2 * key, x.s), P = std::exp(S - x.lse[2]);
        const double gated = std::exp(S - lse_gated[2]), dP = dout[4] * x.v[2 * key] + dout[5] * x.v[2 * key + 1];
        std::printf("%d  % .5f % .5f % .5f % .5f % .5f\n", key, S, P, gated, dP, gated * (dP - r));
    }
    std::printf("LSE %.5f   LSE' %.5f   O (%.5f, %.5f)   r %.5f\n", x.lse[2], lse_gated[2], x.out[4], x.out[5], r);
    double dq[6], dk[6], dv[6];
    x.dev.attention_backward(WIN, {dq, false, dk, dv, dout, row_dot, lse_gated}, {x.q, x.k, x.v, nullptr}, x.s);
    std::printf("dq by Cpu::attention_backward: %.6f %.6f\n", dq[4], dq[5]);
    std::printf("dq by finite differences:     ");
    for (int i = 4; i < 6; i++) {
        const double at = x.q[i], step = 1e-5;
        x.q[i] = at + step;
        const double above = x.objective(dout + 4);
        x.q[i] = at - step;
        std::printf(" %.6f", (above - x.objective(dout + 4)) / (2 * step));
        x.q[i] = at;
    }
    std::printf("\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 7. Online softmax over three tiles of four scores; the values are 0, 1, 2 ...: as plain::forward_kernel does it
// with tiles of 32, beside a softmax of all at once.

static void print_online_softmax() {
    const float scores[3][4] = {{1, 0, 2, 1}, {0, 4, 1, 2}, {3, 1, 0, 2}};
    float largest = -INFINITY, total = 0, sum = 0;
    std::printf("tile  scores       m  rescale  weights                            total      sum\n");
    for (int tile = 0; tile < 3; tile++) {
        const float* const score = scores[tile];
        const float m = std::max(largest, *std::max_element(score, score + 4)), rescale = std::exp(largest - m);
        largest = m;
        total *= rescale;
        sum *= rescale;
        std::printf("%d     %.0f %.0f %.0f %.0f  %4.0f %8.5f ", tile, double(score[0]), double(score[1]),
                    double(score[2]), double(score[3]), double(m), double(rescale));
        for (int i = 0; i < 4; i++) {
            const float weight = std::exp(score[i] - m);
            total += weight;
            sum += weight * float(4 * tile + i);
            std::printf(" %.5f", double(weight));
        }
        std::printf("  %9.5f %9.5f\n", double(total), double(sum));
    }
    std::printf("online:     out %.6f  LSE %.6f\n", double(sum / total), double(largest + std::log(total)));
    double all = 0, weighted = 0;
    for (int i = 0; i < 12; i++) {
        const double weight = std::exp(double(scores[i / 4][i % 4]));
        all += weight;
        weighted += weight * i;
    }
    std::printf("all at once: out %.6f  LSE %.6f\n", weighted / all, std::log(all));
}

// ---------------------------------------------------------------------------------------------------------------------
// Page 10. A step of two ranks: when each layer's backward pass ends, and when each bucket of gradients leaves and has
// arrived. MPI calls the functions of these names first, which note the time; MPI's own are named PMPI_.

#ifdef USE_MPI
struct Moment {
    double seconds;
    std::string what;
};
static std::vector<Moment> moments;
static std::vector<MPI_Request> under_way;
static void note(const std::string& what) { moments.push_back({seconds_now(), what}); }

extern "C" int MPI_Iallreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                              MPI_Request* request) {
    note(format_text("leaves %d", count));
    return PMPI_Iallreduce(send, receive, count, type, op, comm, request);
}
extern "C" int MPI_Testany(int count, MPI_Request* requests, int* which, int* done, MPI_Status* status) {
    const int result = PMPI_Testany(count, requests, which, done, status);
    if (*done && *which != MPI_UNDEFINED) note(format_text("arrives %d", *which));
    return result;
}

static void print_timeline(Config c, World& world) {
    Cpu<float> dev;
    Model<Cpu<float>> model(dev, c, true, world.rank, world.size);
    Activations<Cpu<float>> a(dev, c, c.batch, c.seq_len, TRAINING);
    model.initialise();
    const auto reducer = make_reducer(dev, world, model.partition, model.grads, {}, false);
    const size_t tokens = size_t(c.batch * c.seq_len);
    std::vector<int32_t> ids(tokens + 1);
    for (size_t i = 0; i <= tokens; i++)
        ids[i] = int32_t(random_below(uint64_t(c.vocab_size), uint64_t(world.rank), random_stream(RANDOM_TEST), i));
    for (int step = 1; step <= 2; step++) {  // the first one warms up
        dev.zero(model.results, model.RESULTS);
        dev.zero(model.grads, model.partition.elements);
        world.barrier();
        moments.clear();
        note("begin");
        forward(model, a, ids.data(), 0, int(c.seq_len));
        note("forward");
        classify(model, a, ids.data() + 1, 1 / double(c.total_batch), true);
        dev.add_sum(model.results, a.losses, tokens);
        dev.set_guard(model.grads + model.table.total, model.results);
        note("classifier");
        backward(model, a, [&](size_t offset) {
            note(format_text("backward from element %d on", offset));
            reducer->ready(offset);
        });
        note("embedding");
        reducer->finish();
        note("wait");
        gradient_norm(model, step, reducer.get());
        note("norm");
        apply_update(model, step, 1e-4, reducer.get());
        note("update");
    }
    // One rank after the other, on the clock that all processes of a machine share.
    const double start = world.lowest(moments[0].seconds);
    for (int rank = 0; rank < world.size; rank++) {
        world.barrier();
        if (rank != world.rank) continue;
        for (const Moment& m : moments)
            std::printf("rank %d %8.3f %s\n", world.rank, m.seconds - start, m.what.c_str());
        std::fflush(stdout);
    }
    world.barrier();
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Page 12. A weight that begins as 1 and that every step moves by the same small amount: in fp32, in bf16 alone, and in
// bf16 as a copy of the fp32 master.

// As kernels::round_to rounds this element.
static float round_stochastically(float x, uint64_t step, int element) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const Philox random = philox4x32(uint64_t(element / 8), random_stream(RANDOM_ROUNDING, step), 1337);
    bits = (bits + bits16(random, element % 8)) & 0xffff0000u;
    std::memcpy(&x, &bits, 4);
    return x;
}

static void print_rounding() {
    const float move = 6e-4f;
    float master = 1, nearest = 1, stochastic = 1;
    std::printf("      fp32      bf16 alone, rounded      bf16 copy of fp32, rounded\n");
    std::printf("step  master    nearest   stochastic     nearest   stochastic\n");
    for (uint64_t step = 1; step <= 60; step++) {
        master += move;
        nearest = round_to_bf16(nearest + move);
        stochastic = round_stochastically(stochastic + move, step, 0);
        std::printf("%4llu  %.6f  %.6f  %.6f       %.6f  %.6f\n", (unsigned long long)step, double(master),
                    double(nearest), double(stochastic), double(round_to_bf16(master)),
                    double(round_stochastically(master, step, 1)));
    }
    const int weights = 768;
    double sum = 0;
    for (int i = 0; i < weights; i++) sum += double(round_stochastically(1 + 5 * move, 5, i));
    std::printf("%d weights whose masters are %.6f: mean of the copies %.6f nearest, %.6f stochastic\n", weights,
                double(1 + 5 * move), double(round_to_bf16(1 + 5 * move)), sum / weights);
}

// ---------------------------------------------------------------------------------------------------------------------

static int print_topic(const std::string& topic, Config c, [[maybe_unused]] World& world) {
    if (topic == "journey") print_journey(c);
    else if (topic == "text") std::printf("%s", Sample(c).text.substr(1).c_str());
    else if (topic == "parameters") print_parameters(c);
    else if (topic == "keys") print_keys(c);
    else if (topic == "memory") print_memory_by_buffer(c);
    else if (topic == "softmax") print_softmax_backward();
    else if (topic == "online") print_online_softmax();
    else if (topic == "rounding") print_rounding();
#ifdef USE_MPI
    else if (topic == "timeline") print_timeline(c, world);
#endif
    else
        fail_usage("tour: journey, text, parameters, keys, memory, softmax, online, timeline or rounding, not '%s'",
                   topic);
    return 0;
}

int main(int argc, char** argv) {
    set_omp_wait(argv);
    World world(read_launch(mpi_name(), argc, argv));
    return catch_errors(&world, [&] {
        std::string options;
        for (int i = 2; i < argc; i++) options += std::string(i > 2 ? " " : "") + argv[i];
        const int status = print_topic(argc > 1 ? argv[1] : "", options_of(options), world);
        world.finish();
        return status;
    });
}
