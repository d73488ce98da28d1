// perf.h: tests --perf [options of train]: where a training step's time goes, operation by operation. Real
// steps of the chosen model run on the chosen engine with a clock around every operation, and the step of median
// length is printed; arithmetic and memory traffic are counted from the shapes, so rates can be put beside the
// machine's. On a GPU the clock is two events of the stream around each operation, for which nobody waits; every
// layer has memory of its own, so that an operation finds its inputs no warmer in the caches than in training.
// Then, on a GPU, the same steps without clocks: how far the host runs ahead of the GPU, and what it brings that
// kernels start early. One of them is marked for a profiler, as dev/gpu_check.sh calls it.
#pragma once
#include <map>
#include <string>

#ifndef NSA_WITHOUT_MAIN
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"
#endif
// CUDA_CHECK: struct Cuda is there, for a GPU or in emulation.
#if defined(__HIP__)
constexpr auto cudaProfilerStart = hipProfilerStart;
constexpr auto cudaProfilerStop = hipProfilerStop;
#elif defined(CUDA_CHECK) && __has_include(<cuda_profiler_api.h>)
#include <cuda_profiler_api.h>
#elif defined(CUDA_CHECK)  // that header is a package of its own, but the functions are in the runtime
extern "C" cudaError_t cudaProfilerStart(void);
extern "C" cudaError_t cudaProfilerStop(void);
#endif

struct OperationTime {
    double seconds = 0, flops = 0, bytes = 0;
    int64_t calls = 0;
    std::vector<double> each;  // seconds of every call
};
// As print(), to a file.
template <class... Values>
void print_to(std::FILE* out, const char* format, const Values&... values) {
    std::fputs(format_text(format, values...).c_str(), out);
}
inline double median_of(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// What attention has to do at least, from the shapes: arithmetic, and bytes
// of each array once, with elements of `real` and statistics of 4 bytes.
struct Work {
    double flops = 0, bytes = 0;
};
inline double branch_keys(Branch branch, const NsaShape& s) {
    return double(branch == CMP ? s.cmp_rows() : s.key_rows()) * s.D;
}
inline double selection_bytes(const NsaShape& s) { return 4.0 * s.B * s.G * s.queries * s.selection_words(); }
// q, keys and values, out, lse, the selection
inline Work attention_forward_work(Branch branch, const NsaShape& s, double real) {
    const double q = double(s.query_rows()) * s.D;
    return {4 * attention_pairs(branch, s) * s.D, real * (2 * q + 2 * branch_keys(branch, s)) +
                                                      4 * double(s.query_rows()) +
                                                      (branch == SLC ? selection_bytes(s) : 0)};
}
// q, dout, dq written, and read by the branches that add to the window's,
// keys and values and their gradients, lse and row_dot, the selection
inline Work attention_backward_work(Branch branch, const NsaShape& s, double real) {
    const double q = double(s.query_rows()) * s.D;
    return {8 * attention_pairs(branch, s) * s.D, real * (2 * q + 4 * branch_keys(branch, s)) +
                                                      4 * ((branch == WIN ? 1 : 2) * q + 2 * double(s.query_rows())) +
                                                      (branch == SLC ? selection_bytes(s) : 0)};
}
// Of these branches, bits, by kernels that make the row terms themselves, from the outputs, lse and the gates, and
// store dq once, as q's columns of dprojected.
inline Work branches_backward_work(const NsaShape& s, double real, unsigned branches = ~0u) {
    const double rows = double(s.query_rows()), q = rows * s.D;
    Work work = {0, real * q};
    for (const Branch branch : {CMP, SLC, WIN}) {
        if (!s.has(branch) || !(branches >> branch & 1)) continue;
        const Work one = attention_backward_work(branch, s, real);
        work.flops += one.flops + 2 * q;
        work.bytes += one.bytes - 4 * (branch == WIN ? 1 : 2) * q + real * q + 4 * rows * (s.window_only ? 3 : 5);
    }
    return work;
}
// Scores of the queries that have to choose. q, the compressed keys, lse, the selection
inline Work select_blocks_work(const NsaShape& s, double real) {
    NsaShape choosing = s;
    choosing.first = std::min(std::max(s.first, s.slc_count * s.slc_block), s.first + s.queries),
    choosing.queries = s.first + s.queries - choosing.first;
    return {2 * attention_pairs(CMP, choosing) * s.D, real * (double(s.query_rows()) * s.D + branch_keys(CMP, s)) +
                                                          4 * double(s.query_rows()) + selection_bytes(s)};
}
// projected; q, the heads of keys and values, the gates. Each rotated pair (q, k_slc, k_win) takes six operations.
inline Work split_heads_forward_work(const NsaShape& s, double real) {
    const double tokens = double(s.B) * s.queries, heads = double(s.H + (s.window_only ? 2 : 6) * s.G) * s.D;
    return {3 * tokens * (s.H + (s.window_only ? 1 : 2) * s.G) * s.D,
            tokens * (real * (s.projected() + heads) + (s.window_only ? 0 : 4.0 * 3 * s.H))};
}
// The same backwards, with dq in fp32, or without q.
inline Work split_heads_backward_work(const NsaShape& s, double real, bool with_q) {
    Work work = split_heads_forward_work(s, real);
    const double q = double(s.B) * s.queries * s.H * s.D;
    work.bytes += with_q ? (4 - real) * q : -2 * real * q;
    if (!with_q) work.flops -= 3 * q;
    return work;
}
// phi, for keys and for values: fc1 and fc2 for each compressed block. Keys, compressed blocks, the hidden layer; fc1,
// bias, fc2
inline double phi_weights(const NsaShape& s) { return 2 * (double(s.F) * s.l * s.D + s.F + double(s.D) * s.F); }
inline Work compress_forward_work(const NsaShape& s, double real) {
    const double rows = 2 * double(s.cmp_rows());
    return {2 * rows * s.F * (double(s.l) * s.D + s.D),
            real * (2 * double(s.key_rows()) * s.D + rows * (s.D + s.F) + phi_weights(s))};
}
// Two products for each of the forward's. The forward's arrays, dk, dv, and the weights' fp32 gradients read and
// written
inline Work compress_backward_work(const NsaShape& s, double real) {
    const Work forward = compress_forward_work(s, real);
    return {2 * forward.flops, forward.bytes + 2 * real * double(s.key_rows()) * s.D + 2 * 4 * phi_weights(s)};
}
// The branches' outputs, their sum; the gates
inline Work combine_forward_work(const NsaShape& s, double real) {
    const double rows = double(s.query_rows()), branches = s.window_only ? 1 : 3;
    return {2 * branches * rows * s.D, real * (branches + 1) * rows * s.D + (s.window_only ? 0 : 4 * branches * rows)};
}

// The selected branch and the window, which read q once, and the sum, which still has their outputs at hand and reads
// the compressed branch's.
inline Work attend_and_combine_work(const NsaShape& s, double real) {
    const Work sum = combine_forward_work(s, real), win = attention_forward_work(WIN, s, real);
    const double q = double(s.query_rows()) * s.D;
    if (s.window_only) return {win.flops + sum.flops, win.bytes + sum.bytes - real * q};
    const Work slc = attention_forward_work(SLC, s, real);
    return {slc.flops + win.flops + sum.flops, slc.bytes + win.bytes + sum.bytes - 3 * real * q};
}
// dout, the branches' outputs; lse, row_dot, lse_gated, and with gates those and their gradients
inline Work attention_backward_rows_work(const NsaShape& s, double real) {
    const double rows = double(s.query_rows()), branches = s.window_only ? 1 : 3;
    return {2 * branches * rows * s.D,
            real * (branches + 1) * rows * s.D + 4 * branches * rows * (s.window_only ? 3 : 5)};
}

// The engine Dev with a clock around every operation.
template <class Dev>
struct Timed : Dev {
    using real = typename Dev::real;
    using Stat = typename Dev::Stat;
    using Grad = typename Dev::Grad;
    using Dev::Dev;
    std::map<std::string, OperationTime> times;
    bool clocks = true;  // false: the engine alone

#ifdef CUDA_CHECK
    struct Marks {
        cudaEvent_t begin, end;
    };
    std::vector<Marks> marks;  // the first `pending.size()` are on their way
    ~Timed() {
        for (Marks& m : marks) cudaEventDestroy(m.begin), cudaEventDestroy(m.end);
    }
#endif
    struct Pending {
        std::string name;
        double flops, bytes;
    };
    std::vector<Pending> pending;

    void wait() {
#ifdef CUDA_CHECK
        if constexpr (!Dev::on_host) CUDA_CHECK(cudaStreamSynchronize(Dev::stream));
#endif
    }
    void add(const std::string& name, double flops, double bytes, double seconds) {
        OperationTime& o = times[name];
        o.seconds += seconds, o.flops += flops, o.bytes += bytes, o.calls++, o.each.push_back(seconds);
    }
    // Waits for what is under way and adds its times.
    void collect() {
        wait();
#ifdef CUDA_CHECK
        for (size_t i = 0; i < pending.size(); i++) {
            float ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&ms, marks[i].begin, marks[i].end));
            add(pending[i].name, pending[i].flops, pending[i].bytes, 1e-3 * double(ms));
        }
#endif
        pending.clear();
    }
    template <class F>
    void clock(const std::string& name, double flops, double bytes, F operation) {
        if (!clocks) return operation();
        if constexpr (Dev::on_host) {
            const double begin = seconds_now();
            operation();
            add(name, flops, bytes, seconds_now() - begin);
        } else {
#ifdef CUDA_CHECK
            if (pending.size() == marks.size()) {
                marks.push_back({});
                CUDA_CHECK(cudaEventCreate(&marks.back().begin));
                CUDA_CHECK(cudaEventCreate(&marks.back().end));
            }
            const Marks m = marks[pending.size()];
            pending.push_back({name, flops, bytes});
            CUDA_CHECK(cudaEventRecord(m.begin, Dev::stream));
            operation();
            CUDA_CHECK(cudaEventRecord(m.end, Dev::stream));
#endif
        }
    }
    template <class F>
    void clock(const std::string& name, const Work& work, F operation) {
        clock(name, work.flops, work.bytes, operation);
    }
    // The median of so many timings of operation(0), operation(1), ... , after which `times` is as it was.
    template <class F>
    double median_seconds(int repetitions, F operation) {
        const auto earlier = std::exchange(times, {});
        for (size_t i = 0; i < size_t(repetitions); i++) clock("", {}, [&] { operation(i); });
        collect();
        return median_of(std::exchange(times, earlier)[""].each);
    }
    static double R(double n) { return n * sizeof(real); }
    static double S(double n) { return n * sizeof(Stat); }

    void embedding_forward(real* x, const int32_t* tokens, const real* embed, int N, int C) {
        clock("embedding_forward", 0, R(2.0 * N * C), [&] { Dev::embedding_forward(x, tokens, embed, N, C); });
    }
    void embedding_backward(Grad* dembed, const real* dx, const int32_t* tokens, int N, int C) {
        clock("embedding_backward", 1.0 * N * C, R(1.0 * N * C) + 2.0 * N * C * sizeof(Grad),
              [&] { Dev::embedding_backward(dembed, dx, tokens, N, C); });
    }
    void smear_forward(real* x, const int32_t* tokens, const real* embed, const SmearOf<real>& w, const NsaShape& s,
                       int C) {
        clock("smear_forward", 5.0 * s.B * s.queries * C, R(4.0 * s.B * s.queries * C),
              [&] { Dev::smear_forward(x, tokens, embed, w, s, C); });
    }
    void smear_backward(real* de, const SmearOf<Grad>& dw, const real* dx, const int32_t* tokens, const real* embed,
                        const SmearOf<real>& w, const NsaShape& s, int C) {
        clock("smear_backward", 17.0 * s.B * s.T * C, R(7.0 * s.B * s.T * C),
              [&] { Dev::smear_backward(de, dw, dx, tokens, embed, w, s, C); });
    }
    void rmsnorm_forward(real* out, Stat* rstd, const real* x, const real* weight, int N, int C) {
        clock("rmsnorm_forward", 4.0 * N * C, R(2.0 * N * C),
              [&] { Dev::rmsnorm_forward(out, rstd, x, weight, N, C); });
    }
    void rmsnorm_backward(real* dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd,
                          const real* weight, int N, int C) {
        clock("rmsnorm_backward", 11.0 * N * C, R(4.0 * N * C),
              [&] { Dev::rmsnorm_backward(dx, dweight, dout, x, rstd, weight, N, C); });
    }
    // M, N, K, and which factors are transposed, as cuBLASLt's lines in CudaRuntime::products() begin.
    static std::string product_name(int M, int N, int K, const char* transposed) {
        return format_text("product %d x %d x %d %s", M, N, K, transposed);
    }
    void matmul_forward(real* out, const real* inp, const real* weight, const real* residual, int N, int C, int OC) {
        clock(product_name(N, OC, C, "nt"), 2.0 * N * C * OC,
              R(1.0 * N * C + 1.0 * OC * C + (residual ? 2.0 : 1.0) * N * OC),
              [&] { Dev::matmul_forward(out, inp, weight, residual, N, C, OC); });
    }
    void matmul_backward_input(real* dinp, const real* dout, const real* weight, int N, int C, int OC) {
        clock(product_name(N, C, OC, "nn"), 2.0 * N * C * OC, R(1.0 * N * C + 1.0 * OC * C + 1.0 * N * OC),
              [&] { Dev::matmul_backward_input(dinp, dout, weight, N, C, OC); });
    }
    void matmul_backward_weight(Grad* dweight, const real* dout, const real* inp, int N, int C, int OC) {
        clock(product_name(OC, C, N, "tn"), 2.0 * N * C * OC,
              R(1.0 * N * C + 1.0 * N * OC) + 2.0 * OC * C * sizeof(Grad),
              [&] { Dev::matmul_backward_weight(dweight, dout, inp, N, C, OC); });
    }
    void silu_forward(real* out, const real* x, size_t count) {
        clock("silu_forward", 4.0 * double(count), R(2.0 * double(count)), [&] { Dev::silu_forward(out, x, count); });
    }
    void silu_backward(real* dx, const real* dout, const real* x, size_t count) {
        clock("silu_backward", 8.0 * double(count), R(3.0 * double(count)),
              [&] { Dev::silu_backward(dx, dout, x, count); });
    }
    void classifier(Stat* losses, real* logits, const int32_t* targets, double dloss, bool want_gradient, int N, int V,
                    int Vp) {
        clock("classifier", 8.0 * N * V, R((want_gradient ? 2.0 : 1.0) * N * Vp),
              [&] { Dev::classifier(losses, logits, targets, dloss, want_gradient, N, V, Vp); });
    }
    void chunk_squares(double* squares, const Grad* x, size_t total, size_t begin, size_t count) {
        clock("chunk_squares", 2.0 * double(count), double(count * sizeof(Grad)),
              [&] { Dev::chunk_squares(squares, x, total, begin, count); });
    }
    void adamw(real* param, typename Dev::Master* master, Stat* m, Stat* v, const Grad* grad,
               const std::vector<AdamWSpan>& spans, const HyperAdamW& h) {
        size_t count = 0;
        for (const AdamWSpan& span : spans) count += span.end - span.begin;
        const double bytes = double(count) * ((Dev::has_master ? 2.0 * sizeof(typename Dev::Master) + sizeof(real)
                                                               : 2.0 * sizeof(real)) +
                                              4 * sizeof(Stat) + sizeof(Grad));
        clock("adamw", 15.0 * double(count), bytes, [&] { Dev::adamw(param, master, m, v, grad, spans, h); });
    }
    static double elements(const MuonBatch& b) { return double(b.size() * b.matrices.size()); }
    void muon_momentum(Grad* direction, Stat* m, const Grad* grad, const MuonBatch& b, const HyperAdamW& h) {
        clock("muon_momentum", 7 * elements(b), elements(b) * (2 * sizeof(Grad) + 2 * sizeof(Stat)),
              [&] { Dev::muon_momentum(direction, m, grad, b, h); });
    }
    void muon_normalise(real* y, const Grad* direction, const double* squares, double factor, const MuonBatch& b) {
        clock("muon_normalise", elements(b), elements(b) * (sizeof(real) + sizeof(Grad)),
              [&] { Dev::muon_normalise(y, direction, squares, factor, b); });
    }
    void muon_apply(real* param, typename Dev::Master* master, const real* y, double step_size, const MuonBatch& b,
                    const HyperAdamW& h) {
        clock("muon_apply", 3 * elements(b),
              elements(b) * (2 * sizeof(typename Dev::Master) + (Dev::has_master ? 2 : 1) * sizeof(real)),
              [&] { Dev::muon_apply(param, master, y, step_size, b, h); });
    }
    void muon_product(real* out, const real* x, const real* y, bool transposed, const real* addend, double beta,
                      int count, int M, int N, int K) {
        const double rows = double(count) * M;
        clock("muon_product", 2 * rows * N * K, R(rows * K + 1.0 * count * N * K + (addend ? 2 : 1) * rows * N),
              [&] { Dev::muon_product(out, x, y, transposed, addend, beta, count, M, N, K); });
    }
    void split_heads_forward(typename Dev::Heads out, const real* projected, const real* gains, const NsaShape& s) {
        clock("split_heads_forward", split_heads_forward_work(s, sizeof(real)),
              [&] { Dev::split_heads_forward(out, projected, gains, s); });
    }
    void split_heads_backward(real* dprojected, typename Dev::Grad* dgains, typename Dev::HeadGradients d,
                              const real* gains, const NsaShape& s) {
        clock("split_heads_backward", split_heads_backward_work(s, sizeof(real), d.q),
              [&] { Dev::split_heads_backward(dprojected, dgains, d, gains, s); });
    }
    void compress_forward(real* out, real* hidden, const real* k, const real* v, const typename Dev::Phis& phi,
                          const NsaShape& s) {
        clock("compress_forward", compress_forward_work(s, sizeof(real)),
              [&] { Dev::compress_forward(out, hidden, k, v, phi, s); });
    }
    void compress_backward(real* dk, real* dv, const typename Dev::PhiGradients& dphi, real* dout, const real* hidden,
                           const real* k, const real* v, const typename Dev::Phis& phi, const NsaShape& s) {
        clock("compress_backward", compress_backward_work(s, sizeof(real)),
              [&] { Dev::compress_backward(dk, dv, dphi, dout, hidden, k, v, phi, s); });
    }
    static const char* branch_name(Branch b) { return b == CMP ? "compressed" : b == SLC ? "selected" : "window"; }
    static std::string branch_name(Branch b, const NsaShape& s) {
        return s.window_only ? "full attention" : branch_name(b);
    }
    void attention_forward(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v,
                           const uint32_t* selection, const NsaShape& s) {
        clock("attention_forward, " + branch_name(branch, s), attention_forward_work(branch, s, sizeof(real)),
              [&] { Dev::attention_forward(branch, out, lse, q, k, v, selection, s); });
    }
    void attention_backward(Branch branch, const BackwardArrays<real, Stat>& d, const InputArrays<real>& in,
                            const NsaShape& s) {
        clock("attention_backward, " + branch_name(branch, s), attention_backward_work(branch, s, sizeof(real)),
              [&] { Dev::attention_backward(branch, d, in, s); });
    }
    void branches_backward(const LayerGradients<real, Stat>& d, const LayerInputs<real, Stat>& in, const NsaShape& s) {
        if constexpr (!Dev::on_host)
            if (!this->plain_attention)
                return clock(s.window_only ? "attention_backward, full attention" : "attention_backward, all branches",
                             branches_backward_work(s, sizeof(real)), [&] { Dev::branches_backward(d, in, s); });
        backward_by_branches(*this, d, in, s);
    }
    void select_blocks(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse,
                       const NsaShape& s) {
        clock("select_blocks", select_blocks_work(s, sizeof(real)),
              [&] { Dev::select_blocks(selection, chosen_importance, q, kc, lse, s); });
    }
    void attend_and_select(real* out, Stat* lse, uint32_t* selection, Stat* chosen_importance, const real* q,
                           const real* kc, const real* vc, const NsaShape& s) {
        if constexpr (Dev::on_host) {  // in one pass; the weights of the blocks are the only arithmetic of selection
            clock("attention_forward, compressed, with selection", attention_forward_work(CMP, s, sizeof(real)),
                  [&] { Dev::attend_and_select(out, lse, selection, chosen_importance, q, kc, vc, s); });
        } else {
            attention_forward(CMP, out, lse, q, kc, vc, nullptr, s);
            if (selection) select_blocks(selection, chosen_importance, q, kc, lse, s);
        }
    }
    void attend_and_combine(const LayerOutputs<real, Stat>& out, const LayerInputs<real, Stat>& in, const NsaShape& s) {
        if constexpr (!Dev::on_host)
            if (!this->plain_attention)
                return clock(
                    s.window_only ? "attention_forward, full attention" : "attention_forward, selected, window, sum",
                    attend_and_combine_work(s, sizeof(real)), [&] { Dev::attend_and_combine(out, in, s); });
        combine_by_branches(*this, out, in, s);
    }
    void combine_forward(real* out, const real* o, const Stat* gate, const NsaShape& s) {
        clock("combine_forward", combine_forward_work(s, sizeof(real)), [&] { Dev::combine_forward(out, o, gate, s); });
    }
    void attention_backward_rows(Stat* row_dot, Stat* lse_gated, Stat* dgate_logit, const real* dout, const real* o,
                                 const Stat* gate, const Stat* lse, const NsaShape& s) {
        clock("attention_backward_rows", attention_backward_rows_work(s, sizeof(real)),
              [&] { Dev::attention_backward_rows(row_dot, lse_gated, dgate_logit, dout, o, gate, lse, s); });
    }
};

// The machine's ceilings, measured in the same run: a large product (cuBLASLt,
// or the CPU's GEMM), and a copy of memory (read and written bytes). Medians.
struct Ceilings {
    double flops_per_second, bytes_per_second;
    int size, repetitions;  // rows and columns of the matrices; products, and copies, that were timed
    size_t copied_bytes;    // of a copy, which reads and writes them
    // Seconds that the work takes at least.
    double floor(double flops, double bytes) const {
        return std::max(flops / flops_per_second, bytes / bytes_per_second);
    }
    void print(std::FILE* out) const {
        print_to(out,
                 "ceilings measured in this run, at its beginning: product of matrices %.6g TFLOP/s (%d x %d x %d), "
                 "copy %.6g GB/s (%.0f MiB), medians of %d\n",
                 flops_per_second * 1e-12, size, size, size, bytes_per_second * 1e-9, double(copied_bytes) / (1 << 20),
                 repetitions);
    }
};
// size: rows and columns of the matrices, which are what is copied then; 0:
// large enough for the engine, and on a GPU a tenth of a second to warm up
template <class Dev>
Ceilings measure_ceilings(Timed<Dev>& dev, int size = 0) {
    using real = typename Dev::real;
    const int n = size ? size : Dev::on_host ? 1536 : 8192, repetitions = Dev::on_host ? 7 : 31;
    const size_t count = size_t(n) * n,
                 copied = size ? count : (size_t(Dev::on_host ? 128 : 1024) << 20) / sizeof(real);
    auto copy = [&](real* out, const real* in, size_t elements) {
#ifdef CUDA_CHECK
        if constexpr (!Dev::on_host)
            return CUDA_CHECK(cudaMemcpyAsync(out, in, elements * sizeof(real), cudaMemcpyDeviceToDevice, dev.stream));
#endif
        dev.Dev::copy(out, in, elements);
    };
    real *a = dev.template allocate<real>(count), *b = dev.template allocate<real>(count),
         *c = dev.template allocate<real>(count);
    real *from = dev.template allocate<real>(copied), *to = dev.template allocate<real>(copied);
    std::vector<float> values(
        count);  // not zeros, and no two rows alike: with those a GPU draws less power and runs faster
    for (size_t i = 0; i < count; i++) values[i] = float(int(i * 0x9E3779B97F4A7C15u >> 56)) / 128 - 1;
    dev.from_host(a, values.data(), count), dev.from_host(b, values.data(), count);
    for (size_t at = 0; at < copied; at += count) copy(from + at, a, std::min(count, copied - at));
    const double begin = seconds_now();
    do {
        for (int i = 0; i < 4; i++) dev.Dev::matmul_forward(c, a, b, nullptr, n, n, n), copy(to, from, copied);
        dev.wait();
    } while (!size && !Dev::on_host && seconds_now() - begin < 0.1);
    const double product =
        dev.median_seconds(repetitions, [&](size_t) { dev.Dev::matmul_forward(c, a, b, nullptr, n, n, n); });
    const double copying = dev.median_seconds(repetitions, [&](size_t) { copy(to, from, copied); });
    const Ceilings found = {2.0 * n * double(n) * n / product, 2.0 * double(copied * sizeof(real)) / copying, n,
                            repetitions, copied * sizeof(real)};
    dev.release(a), dev.release(b), dev.release(c), dev.release(from), dev.release(to);
    return found;
}
// The last lines of a report: the ceilings once more, and both for the table of results. name: of the run, since a
// report holds several.
template <class Dev>
void print_last_ceilings(Timed<Dev>& dev, const std::string& name, const Ceilings& first, int ceiling_size,
                         std::FILE* out) {
    const Ceilings last = measure_ceilings(dev, ceiling_size);
    print_to(out,
             "result: %s: ceiling of matrix products | %.4g | TFLOP/s | %d x %d x %d, median of %d; %.4g at the end\n",
             name, first.flops_per_second * 1e-12, first.size, first.size, first.size, first.repetitions,
             last.flops_per_second * 1e-12);
    print_to(out,
             "result: %s: ceiling of copies | %.4g | GB/s | %.0f MiB read and written, median of %d; %.4g at the end\n",
             name, first.bytes_per_second * 1e-9, double(first.copied_bytes) / (1 << 20), first.repetitions,
             last.bytes_per_second * 1e-9);
    std::fflush(out);
}

// Steps as training makes them, on the same tokens each time.
template <class Dev>
struct PerfStep {
    Model<Timed<Dev>>& model;
    Activations<Timed<Dev>>& a;
    std::vector<int32_t> tokens;
    int64_t steps = 0;
    // seconds since its beginning after which the host had launched the last step, and after which the engine was done
    // with it
    double launched = 0, done = 0;

    PerfStep(Model<Timed<Dev>>& m, Activations<Timed<Dev>>& activations)
        : model(m), a(activations), tokens(size_t(a.shape.B) * size_t(a.shape.T)) {
        for (size_t i = 0; i < tokens.size(); i++)
            tokens[i] = int32_t(random_below(uint64_t(model.config.vocab_size), 1, random_stream(RANDOM_TEST), i));
        model.config.total_batch = int64_t(tokens.size());
    }
    void run() {
        Timed<Dev>& dev = model.dev;
        dev.wait();
        const double begin = seconds_now();
        dev.zero(model.results, model.RESULTS);
        dev.zero(model.grads, model.partition.elements);
        micro_step(model, a, tokens.data(), tokens.data(), true);
        update(model, ++steps, 1e-4);
        launched = seconds_now() - begin;
        dev.wait();
        done = seconds_now() - begin;
    }
    // Medians of `count` steps, after two to warm up.
    struct Medians {
        double launched, done;
    };
    Medians medians(int count) {
        std::vector<double> launches, whole;
        for (int i = 0; i < 2 + count; i++) {
            run();
            if (i >= 2) launches.push_back(launched), whole.push_back(done);
        }
        return {median_of(launches), median_of(whole)};
    }
};

// A step without clocks, beside one of clocked_seconds. A GPU takes about a thousand launches ahead
// of what it does; behind those the host waits, so a long step's launches seem to take longer than they would.
template <class Dev>
void perf_plain_steps(Timed<Dev>& dev, PerfStep<Dev>& step, const std::string& name, double clocked_seconds,
                      std::FILE* out) {
    constexpr int COUNT = 7;
    const double tokens = double(step.tokens.size());
    dev.clocks = false;
    const auto plain = step.medians(COUNT);
    print_to(out,
             "a step without clocks: the host had launched the step after %.1f us, the GPU was done after %.1f us, "
             "medians of %d: %.1f tokens/s\n",
             plain.launched * 1e6, plain.done * 1e6, COUNT, tokens / plain.done);
    print_to(out,
             "result: %s: step | %.0f | tokens/s | %.1f us without clocks, median of %d; launched by the host within "
             "%.1f us; %.1f us with a clock around every operation\n",
             name, tokens / plain.done, plain.done * 1e6, COUNT, plain.launched * 1e6, clocked_seconds * 1e6);
#ifdef CUDA_CHECK
    kernels_start_early = false;
    const auto in_turn = step.medians(COUNT);
    kernels_start_early = true;
    const auto again = step.medians(COUNT);
    print_to(out,
             "result: %s: step, no kernel starting early | %.1f | us | %.1f us before and %.1f us after with kernels "
             "that start early where the GPU can (9.0), medians of %d\n",
             name, in_turn.done * 1e6, plain.done * 1e6, again.done * 1e6, COUNT);
#endif
    std::fflush(out);
#ifdef CUDA_CHECK
    if (cudaProfilerStart() != cudaSuccess) cudaGetLastError();  // no profiler waits; the next launch would report it
    step.run();
    if (cudaProfilerStop() != cudaSuccess) cudaGetLastError();
#endif
    dev.clocks = true;
    std::fflush(out);
}

// A result for each product of a step, by shape: its rate, its share of the data sheet's peak, and how cuBLASLt
// computes it.
template <class Dev>
void print_products(Timed<Dev>& dev, const std::map<std::string, OperationTime>& times, std::FILE* out) {
    const double peak = dev.peak_flops();
    for (const std::string& product : dev.products()) {
        const size_t colon = product.find(": ");
        const auto found = times.find("product " + product.substr(0, colon));
        if (found == times.end()) {
            print_to(out, "%s\n", product);
            continue;
        }
        const OperationTime& o = found->second;
        const std::string share =
            peak > 0 ? format_text("%.1f %% of %.1f TFLOP/s", 100 * o.flops / o.seconds / peak, peak * 1e-12)
                     : std::string("share of peak n/a");
        print_to(out, "result: %s | %.4g | TFLOP/s | %s; %d calls a step, %.1f us each; %s\n", found->first,
                 o.flops / o.seconds * 1e-12, share, o.calls, o.seconds / double(o.calls) * 1e6,
                 product.substr(colon + 2));
    }
}

// timed_steps after one or two to warm up; ceiling_size: see measure_ceilings; the report goes to `out`
template <class Dev>
int perf_on(Timed<Dev>& dev, const Config& c, int timed_steps = 5, int ceiling_size = 0, std::FILE* out = stdout) {
    const std::string name =
        format_text("perf, %s, %d x %d%s",
                    c.attention == "full"  ? "full attention"
                    : c.attention == "nsa" ? "NSA"
                                           : c.attention,
                    c.batch, c.seq_len, c.recompute ? format_text(", recompute %d", c.recompute) : "");
    const Ceilings ceilings = measure_ceilings(dev, ceiling_size);
    {
        Model<Timed<Dev>> model(dev, c, true);
        Activations<Timed<Dev>> a(dev, c, c.batch, c.seq_len, TRAINING);
        model.initialise();
        PerfStep<Dev> step(model, a);
        struct Timing {
            double seconds;
            std::map<std::string, OperationTime> times;
        };
        std::vector<Timing> timings;
        const int warm = Dev::on_host ? 1 : 2;
        for (int i = 0; i < warm + timed_steps; i++) {
            dev.times.clear();
            step.run();
            dev.collect();
            if (i >= warm) timings.push_back({step.done, dev.times});
        }
        std::sort(timings.begin(), timings.end(),
                  [](const Timing& x, const Timing& y) { return x.seconds < y.seconds; });
        const double seconds = timings[timings.size() / 2].seconds, tokens = double(step.tokens.size());
        const std::map<std::string, OperationTime>& times = timings[timings.size() / 2].times;
        print_to(out, "one training step of %s, %s attention, %d sequences of %d tokens, recompute %d, on %s\n",
                 c.model, c.attention, c.batch, c.seq_len, c.recompute, dev.describe());
        ceilings.print(out);
#ifdef CUDA_CHECK
        if constexpr (!Dev::on_host) {
            print_to(out, "%s\n", dev.describe_selected(a.shape));
            print_products(dev, times, out);
        }
#endif
        print_to(out,
                 "floor: the longer of FLOPs at the first ceiling and bytes at the second; of all operations: the sum "
                 "of the floors\n");
        print_to(out, "\n%-34s %6s %12s %12s %7s %11s %11s %10s %8s %9s %8s\n", "operation", "calls", "us", "floor us",
                 "step", "GFLOP", "MB", "TFLOP/s", "of peak", "GB/s", "of peak");
        std::vector<std::pair<std::string, OperationTime>> rows(times.begin(), times.end());
        std::sort(rows.begin(), rows.end(),
                  [](const auto& x, const auto& y) { return x.second.seconds > y.second.seconds; });
        OperationTime all;
        double all_floors = 0;
        auto print = [&](const std::string& operation, const OperationTime& o, double floor) {
            print_to(out, "%-34s %6d %12.1f %12.1f %6.1f%% %11.6g %11.6g %10.3f %7.1f%% %9.1f %7.1f%%\n", operation,
                     o.calls, o.seconds * 1e6, floor * 1e6, 100 * o.seconds / seconds, o.flops * 1e-9, o.bytes * 1e-6,
                     o.flops / o.seconds * 1e-12, 100 * o.flops / o.seconds / ceilings.flops_per_second,
                     o.bytes / o.seconds * 1e-9, 100 * o.bytes / o.seconds / ceilings.bytes_per_second);
        };
        for (const auto& [operation, o] : rows) {
            const double floor = ceilings.floor(o.flops, o.bytes);
            print(operation, o, floor);
            all.seconds += o.seconds, all.flops += o.flops, all.bytes += o.bytes, all.calls += o.calls,
                all_floors += floor;
        }
        print("all operations", all, all_floors);
        print_to(out, "the step %.0f us, the median of %d: %.1f tokens/s with a clock around every operation\n",
                 seconds * 1e6, timings.size(), tokens / seconds);
        print_to(out,
                 "result: %s: all operations | %.1f | us | %.1f %% of a step of %.1f us with a clock around every "
                 "operation; floor %.1f us; %s\n",
                 name, all.seconds * 1e6, 100 * all.seconds / seconds, seconds * 1e6, all_floors * 1e6, c.model);
        std::fflush(out);
        if constexpr (!Dev::on_host) perf_plain_steps(dev, step, name, seconds, out);
        else
            print_to(
                out,
                "result: %s: step | %.1f | tokens/s | %.1f us with a clock around every operation, median of %d; %s\n",
                name, tokens / seconds, seconds * 1e6, timings.size(), c.model);
    }
    print_last_ceilings(dev, name, ceilings, ceiling_size, out);
    return 0;
}

inline int run_perf(int argc, const char* const* argv) {
    Config c = parse_options(argc, argv);
    apply_preset(c);
    validate_model(c, "options");
    World world;
    const Device device = choose_device(c, world, search_gpus());
    if (!c.is_given("batch")) c.batch = device.gpu ? preset_of(c).batch : 1;
#ifdef USE_CUDA
    if (device.gpu) {
        Timed<Cuda> dev(0);
        return perf_on<Cuda>(dev, c);
    }
#endif
    Timed<Cpu<float>> dev;
    dev.gemm.bf16 = device.cpu_bf16;
    return perf_on<Cpu<float>>(dev, c, 3);
}
