// perf.h: test_nsa --perf [options of train]: where a training step's time goes, operation by operation. One real step of the chosen model runs on
// the chosen engine with a clock around every operation; arithmetic and memory traffic are counted from the shapes, so rates can be put beside the machine's.
// The clock waits for the device before and after each operation: the sum is a little more than a step of `train`, whose figure is tokens/s.
#pragma once
#include <map>
#include <string>

#ifndef NSA_WITHOUT_MAIN
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#endif

struct OperationTime {
    double seconds = 0, flops = 0, bytes = 0;
    int64_t calls = 0;
};

// Key/query pairs that a branch's mask allows, over all heads: 4*D FLOPs each in the forward pass. Counted, not estimated; selected blocks
// are taken as full (a query that may choose has n of them, the last one cut by causality).
inline double attention_pairs(Branch branch, const NsaShape& s) {
    double pairs = 0;
    for (int t = s.first; t < s.first + s.queries; t++) {
        if (branch == CMP) pairs += s.cmp_blocks(t + 1);
        else if (branch == WIN) pairs += s.full ? t + 1 : std::min(t + 1, s.window);
        else pairs += std::min(t / s.slc_block, s.slc_count - 1) * s.slc_block + t % s.slc_block + 1;
    }
    return pairs * s.B * s.H;
}

// The engine Dev with a clock around every operation.
template <class Dev>
struct Timed : Dev {
    using real = typename Dev::real;
    using Stat = typename Dev::Stat;
    using Grad = typename Dev::Grad;
    using Dev::Dev;
    std::map<std::string, OperationTime> times;

    void wait() {
        if constexpr (!Dev::on_host) CUDA_CHECK(cudaStreamSynchronize(Dev::stream));
    }
    template <class F>
    auto clock(const std::string& name, double flops, double bytes, F operation) {
        wait();
        const double begin = seconds_now();
        struct Stop {
            Timed& t;
            const std::string& name;
            double begin, flops, bytes;
            ~Stop() noexcept(false) {
                t.wait();
                OperationTime& o = t.times[name];
                o.seconds += seconds_now() - begin, o.flops += flops, o.bytes += bytes, o.calls++;
            }
        } stop{*this, name, begin, flops, bytes};
        return operation();
    }
    static double R(double n) { return n * sizeof(real); }
    static double S(double n) { return n * sizeof(Stat); }

    void embedding_forward(real* x, const int32_t* tokens, const real* embed, int N, int C) {
        clock("embedding_forward", 0, R(2.0 * N * C), [&] { Dev::embedding_forward(x, tokens, embed, N, C); });
    }
    void embedding_backward(Grad* dembed, const real* dx, const int32_t* tokens, int N, int C) {
        clock("embedding_backward", 1.0 * N * C, R(1.0 * N * C) + 2.0 * N * C * sizeof(Grad), [&] { Dev::embedding_backward(dembed, dx, tokens, N, C); });
    }
    void rmsnorm_forward(real* out, Stat* rstd, const real* x, const real* weight, int N, int C) {
        clock("rmsnorm_forward", 4.0 * N * C, R(2.0 * N * C), [&] { Dev::rmsnorm_forward(out, rstd, x, weight, N, C); });
    }
    void rmsnorm_backward(real* dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd, const real* weight, int N, int C) {
        clock("rmsnorm_backward", 11.0 * N * C, R(4.0 * N * C), [&] { Dev::rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C); });
    }
    void matmul_forward(real* out, const real* inp, const real* weight, const real* residual, int N, int C, int OC) {
        clock("matmul_forward", 2.0 * N * C * OC, R(1.0 * N * C + 1.0 * OC * C + (residual ? 2.0 : 1.0) * N * OC), [&] { Dev::matmul_forward(out, inp, weight, residual, N, C, OC); });
    }
    void matmul_backward_input(real* dinp, const real* dout, const real* weight, int N, int C, int OC) {
        clock("matmul_backward_input", 2.0 * N * C * OC, R(1.0 * N * C + 1.0 * OC * C + 1.0 * N * OC), [&] { Dev::matmul_backward_input(dinp, dout, weight, N, C, OC); });
    }
    void matmul_backward_weight(Grad* dweight, const real* dout, const real* inp, int N, int C, int OC) {
        clock("matmul_backward_weight", 2.0 * N * C * OC, R(1.0 * N * C + 1.0 * N * OC) + 2.0 * OC * C * sizeof(Grad), [&] { Dev::matmul_backward_weight(dweight, dout, inp, N, C, OC); });
    }
    void silu_forward(real* out, const real* x, size_t count) {
        clock("silu_forward", 4.0 * double(count), R(2.0 * double(count)), [&] { Dev::silu_forward(out, x, count); });
    }
    void silu_backward(real* dx, const real* dout, const real* x, size_t count) {
        clock("silu_backward", 8.0 * double(count), R(3.0 * double(count)), [&] { Dev::silu_backward(dx, dout, x, count); });
    }
    void classifier(Stat* losses, real* logits, const int32_t* targets, double dloss, bool want_gradient, int N, int V, int Vp) {
        clock("classifier", 8.0 * N * V, R((want_gradient ? 3.0 : 1.0) * N * Vp), [&] { Dev::classifier(losses, logits, targets, dloss, want_gradient, N, V, Vp); });
    }
    void sum_of_squares(double* total, const Grad* x, size_t count) {
        clock("sum_of_squares", 2.0 * double(count), double(count * sizeof(Grad)), [&] { Dev::sum_of_squares(total, x, count); });
    }
    void adamw(real* param, typename Dev::Master* master, Stat* m, Stat* v, const Grad* grad, size_t count, const HyperAdamW& h) {
        const double bytes = double(count) * ((Dev::has_master ? 2.0 * sizeof(typename Dev::Master) + sizeof(real) : 2.0 * sizeof(real)) + 4 * sizeof(Stat) + sizeof(Grad));
        clock("adamw", 15.0 * double(count), bytes, [&] { Dev::adamw(param, master, m, v, grad, count, h); });
    }
    void split_heads_forward(typename Dev::Heads out, const real* projected, const NsaShape& s) {
        clock("split_heads_forward", 0, R(2.0 * s.B * s.queries * s.projected()), [&] { Dev::split_heads_forward(out, projected, s); });
    }
    void split_heads_backward(real* dprojected, typename Dev::HeadGradients d, const NsaShape& s) {
        clock("split_heads_backward", 0, R(2.0 * s.B * s.queries * s.projected()), [&] { Dev::split_heads_backward(dprojected, d, s); });
    }
    void compress_forward(real* out, real* hidden, const real* k, const typename Dev::Phi& phi, bool rotated, const NsaShape& s) {
        clock("compress_forward", 2.0 * double(s.cmp_rows()) * s.F * (1.0 * s.l * s.D + s.D), R(double(s.key_rows()) * s.D + double(s.cmp_rows()) * (s.D + s.F)),
              [&] { Dev::compress_forward(out, hidden, k, phi, rotated, s); });
    }
    void compress_backward(real* dk, const typename Dev::PhiGradients& dphi, real* dout, const real* hidden, const real* k, const typename Dev::Phi& phi, bool rotated, const NsaShape& s) {
        clock("compress_backward", 4.0 * double(s.cmp_rows()) * s.F * (1.0 * s.l * s.D + s.D), R(2.0 * double(s.key_rows()) * s.D + 2.0 * double(s.cmp_rows()) * (s.D + s.F)),
              [&] { Dev::compress_backward(dk, dphi, dout, hidden, k, phi, rotated, s); });
    }
    static const char* branch_name(Branch b) { return b == CMP ? "compressed" : b == SLC ? "selected" : "window"; }
    static double key_elements(Branch b, const NsaShape& s) { return double(b == CMP ? s.cmp_rows() : s.key_rows()) * s.D; }
    void attention_forward(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v, const uint32_t* selection, const NsaShape& s) {
        clock(std::string("attention_forward, ") + branch_name(branch), 4.0 * attention_pairs(branch, s) * s.D, R(2.0 * double(s.query_rows()) * s.D + 2 * key_elements(branch, s)),
              [&] { Dev::attention_forward(branch, out, lse, q, k, v, selection, s); });
    }
    void attention_backward(Branch branch, Stat* dq, real* dk, real* dv, const real* dout, const real* q, const real* k, const real* v, const Stat* row_dot, const Stat* lse_gated,
                            const uint32_t* selection, const NsaShape& s) {
        clock(std::string("attention_backward, ") + branch_name(branch), 10.0 * attention_pairs(branch, s) * s.D, R(2.0 * double(s.query_rows()) * s.D + 4 * key_elements(branch, s)) + S(2.0 * double(s.query_rows()) * s.D),
              [&] { Dev::attention_backward(branch, dq, dk, dv, dout, q, k, v, row_dot, lse_gated, selection, s); });
    }
    void select_blocks(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse, const NsaShape& s) {
        clock("select_blocks", 2.0 * attention_pairs(CMP, s) * s.D, R(double(s.query_rows()) * s.D + double(s.cmp_rows()) * s.D), [&] { Dev::select_blocks(selection, chosen_importance, q, kc, lse, s); });
    }
    void combine_forward(real* out, const real* o, const Stat* gate, const NsaShape& s) {
        clock("combine_forward", 6.0 * double(s.query_rows()) * s.D, R(4.0 * double(s.query_rows()) * s.D), [&] { Dev::combine_forward(out, o, gate, s); });
    }
    void attention_backward_rows(Stat* row_dot, Stat* lse_gated, Stat* dgate_logit, const real* dout, const real* o, const Stat* gate, const Stat* lse, const NsaShape& s) {
        clock("attention_backward_rows", 6.0 * double(s.query_rows()) * s.D, R(4.0 * double(s.query_rows()) * s.D), [&] { Dev::attention_backward_rows(row_dot, lse_gated, dgate_logit, dout, o, gate, lse, s); });
    }
};

// The machine's ceilings, measured in the same run: a large product, and a copy of memory (read and written bytes).
template <class Dev>
void measure_ceilings(Timed<Dev>& dev, double& flops_per_second, double& bytes_per_second) {
    using real = typename Dev::real;
    const int n = Dev::on_host ? 1536 : 8192;
    const size_t count = size_t(n) * n;
    real *a = dev.template allocate<real>(count), *b = dev.template allocate<real>(count), *c = dev.template allocate<real>(count);
    dev.zero(a, count), dev.zero(b, count), dev.zero(c, count);
    auto best = [&](auto operation) {
        double least = 1e9;
        for (int i = 0; i < 7; i++) {
            dev.wait();
            const double begin = seconds_now();
            operation();
            dev.wait();
            least = std::min(least, seconds_now() - begin);
        }
        return least;
    };
    flops_per_second = 2.0 * n * double(n) * n / best([&] { dev.Dev::matmul_forward(c, a, b, nullptr, n, n, n); });
    bytes_per_second = 2.0 * double(count) * sizeof(real) / best([&] { dev.Dev::copy(c, a, count); });
    dev.release(a), dev.release(b), dev.release(c);
}

template <class Dev>
int perf_on(Timed<Dev>& dev, const Config& c) {
    double flops_ceiling, bytes_ceiling;
    measure_ceilings(dev, flops_ceiling, bytes_ceiling);
    Model<Timed<Dev>> model(dev, c, true);
    Activations<Timed<Dev>> a(dev, c, c.batch, c.seq_len, TRAINING);
    model.initialise();
    std::vector<int32_t> tokens(size_t(c.batch * c.seq_len));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int32_t(random_below(uint64_t(c.vocab_size), 1, random_stream(RANDOM_TEST), i));
    double seconds = 0;
    for (int step = 1; step <= 3; step++) {  // two to warm up
        dev.times.clear();
        dev.zero(model.grads, model.table.total);
        dev.wait();
        const double begin = seconds_now();
        forward(model, a, tokens.data(), 0, int(c.seq_len));
        classify(model, a, tokens.data(), 1 / double(tokens.size()), true);
        backward(model, a);
        update(model, step, 1e-4);
        dev.wait();
        seconds = seconds_now() - begin;
    }
    std::printf("one training step of %s, %lld sequences of %lld tokens, recompute %lld, on %s\n", c.model.c_str(), (long long)c.batch, (long long)c.seq_len, (long long)c.recompute, dev.describe().c_str());
    std::printf("ceilings measured in this run: product of matrices %.3f TFLOP/s, copy %.1f GB/s\n\n", flops_ceiling * 1e-12, bytes_ceiling * 1e-9);
    std::printf("%-34s %6s %12s %7s %10s %8s %9s %8s\n", "operation", "calls", "us", "step", "TFLOP/s", "of peak", "GB/s", "of peak");
    std::vector<std::pair<std::string, OperationTime>> rows(dev.times.begin(), dev.times.end());
    std::sort(rows.begin(), rows.end(), [](const auto& x, const auto& y) { return x.second.seconds > y.second.seconds; });
    OperationTime all;
    auto print = [&](const std::string& name, const OperationTime& o) {
        std::printf("%-34s %6lld %12.0f %6.1f%% %10.3f %7.1f%% %9.1f %7.1f%%\n", name.c_str(), (long long)o.calls, o.seconds * 1e6, 100 * o.seconds / seconds, o.flops / o.seconds * 1e-12,
                    100 * o.flops / o.seconds / flops_ceiling, o.bytes / o.seconds * 1e-9, 100 * o.bytes / o.seconds / bytes_ceiling);
    };
    for (const auto& [name, o] : rows) {
        print(name, o);
        all.seconds += o.seconds, all.flops += o.flops, all.bytes += o.bytes, all.calls += o.calls;
    }
    print("all operations", all);
    std::printf("the step %.0f us: %.1f tokens/s with a clock around every operation\n", seconds * 1e6, double(tokens.size()) / seconds);
    return 0;
}

inline int run_perf(int argc, const char* const* argv) {
    std::set<std::string> given;
    Config c = parse_options(argc, argv, given);
    apply_preset(c, given);
    validate_model(c, "options");
    World world;
    const Device device = choose_device(c, world);
    if (!given.count("batch")) c.batch = device.gpu ? preset_of(c).batch : 1;
#ifdef HAVE_CUDA
    if (device.gpu) {
        Timed<Cuda> dev(0);
        return perf_on<Cuda>(dev, c);
    }
#endif
    Timed<Cpu<float>> dev;
    return perf_on<Cpu<float>>(dev, c);
}
