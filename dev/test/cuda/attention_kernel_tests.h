// attention_kernel_tests.h: the attention of nsa_kernels.cuh on tensor cores against struct Cpu in fp64, which gets the
// same bf16 numbers. Runs on a GPU, or under g++ in dev/emulator/cuda_on_cpu.h, where it tries several orders of
// threads and blocks.
//
// Error limits are derived. With u = 2^-8, the largest relative error of rounding to bf16, and e = 2^-23, that of one
// step in fp32 (tensor cores may truncate): a score in the exponent is off by at most
//     delta = e ((D + 8) S + 2 |lse| + 16 + tiles),   S = the largest sum over D of |q k| / sqrt(D)
// (D sums, the scaling, the shift, 2 ulp of the exponential, one rescaling a tile), and every weight by the factor
// e^delta. Sums of n terms add n e times the sum of their magnitudes. Where a weight or dS enters a tensor core it is
// rounded to bf16, and so is each bf16 output.
//
// Below 2^-126 numbers are subnormal. ex2.approx.ftz gives 0 there, so a weight that may be so small may be missing:
// the whole weight P' of the backward pass, and with it all of its dS. In the forward pass weights are relative to a
// shift that may lie 2^8 below the row's largest, and a factor that rescales sums is flushed too: up to 2^8 2^-126 of
// each key's share in a total of at least 1 may be missing. Elsewhere fp32 keeps subnormal numbers, as multiples of
// 2^-149, and bf16 as multiples of 2^-133.
#pragma once
#include <memory>

#include "../../../lib/model/gradient_check.h"
#include "../../../nsa_cpu.h"
#include "../../../nsa_kernels.cuh"
#include "../harness.h"

#ifndef PRECISION_FP32  // which has the plain kernels only

namespace attention_tests {

constexpr double U16 = 0x1p-8, E32 = 0x1p-23;
constexpr double FLUSHED = 0x1p-126;                    // what is smaller may be 0
constexpr double TINY16 = 0x1p-134, TINY32 = 0x1p-149;  // rounding a subnormal bf16; cutting off a subnormal fp32

#ifdef EMU_CHECK
constexpr int RUNS = 1, LONGEST = 200;  // every access is checked, so one order of threads is enough
#else
constexpr int RUNS = 2, LONGEST = 1 << 30;
#endif

// Run 0 takes the threads in the order of their index, the others in an order that depends on the shape, so that the
// tests try many.
inline void draw_order(int run, const NsaShape& s) {
#ifndef CUDA_ON_CPU
    (void)run, (void)s;
#else
    emu::seed(run ? uint64_t(1 + (s.T + s.H + s.window + run) % 6) : 0);
#endif
}
inline float bf16_value(double x) { return float(__float2bfloat16(float(x))); }

// A device array with an allocation of its own, exactly as long, so that compute-sanitizer sees an access beyond its
// end. The emulator poisons fresh memory; on a GPU it is filled with NaN here.
template <class T>
struct DeviceArray {
    T* data = nullptr;
    size_t count;
    explicit DeviceArray(size_t count) : count(count) {
        CUDA_CHECK(cudaMalloc(&data, std::max(count, size_t(1)) * sizeof(T)));
#ifndef CUDA_ON_CPU
        CUDA_CHECK(cudaMemset(data, 0xFF, std::max(count, size_t(1)) * sizeof(T)));
#endif
    }
    template <class From>
    explicit DeviceArray(const std::vector<From>& values) : DeviceArray(values.size()) {
        std::vector<T> converted(values.size());
        for (size_t i = 0; i < values.size(); i++)
            if constexpr (std::is_integral_v<T>) converted[i] = values[i];
            else converted[i] = T(float(values[i]));
        CUDA_CHECK(cudaMemcpy(data, converted.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data); }
    std::vector<T> raw() const {
        std::vector<T> values(count);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    std::vector<double> download() const {
        std::vector<double> values;
        for (const T& x : raw()) values.push_back(double(float(x)));
        return values;
    }
};

template <class T>
void check_written([[maybe_unused]] const DeviceArray<T>& array) {
#ifdef CUDA_ON_CPU
    CHECK_EQUAL(emu::unwritten(array.data, array.count), 0L);
#endif
}
template <class T>
void check_same_bits(const char* what, const std::vector<T>& a, const std::vector<T>& b) {
    tests().checks++;
    if (!a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)))
        check_failed(__FILE__, __LINE__, "%s: two runs with the same input differ", what);
}
// Checks |found - expected| <= limit everywhere.
template <class T>
void check_within(const char* what, const NsaShape& s, const std::vector<T>& found, const std::vector<double>& expected,
                  const std::vector<double>& limit) {
    tests().checks++;
    size_t at = found.size();
    double most = 0;
    for (size_t i = 0; i < found.size(); i++) {
        const double x = float(found[i]), share = std::fabs(x - expected[i]) / limit[i];
        if (x == expected[i]) continue;  // infinities too
        if (!(share <= most)) most = share, at = i;
        if (std::isnan(share)) break;
    }
    if (!(most <= 1))
        check_failed(__FILE__, __LINE__,
                     "%s[%d] is %.9g, expected %.9g, limit %.3g (T %d, first %d, queries %d, H %d, G %d, D %d, l %d, "
                     "d %d, l' %d, w %d)",
                     what, at, double(float(found[at])), expected[at], limit[at], s.T, s.first, s.queries, s.H, s.G,
                     s.D, s.l, s.d, s.slc_block, s.window);
}

inline NsaShape shape(int T, int heads, int G = 1, int D = 64, int B = 1) {
    NsaShape s;
    s.B = B, s.T = T, s.first = 0, s.queries = T, s.H = heads * G, s.G = G, s.D = D;
    s.l = 32, s.d = 16, s.slc_block = 64, s.slc_count = 4, s.window = 100, s.F = 8;
    return s;
}

// Inputs of one branch, already rounded to bf16. Keys beyond the last query are NaN, since nobody may read them.
struct Inputs {
    NsaShape s;
    Branch branch;
    std::vector<double> q, k, v, dout;
    std::vector<uint32_t> selection;
    uint64_t counter = 0;
    uint64_t seed;

    double normal() { return random_normal(seed, random_stream(RANDOM_TEST, 77), counter++); }
    std::vector<double> normals(size_t n, double scale) {
        std::vector<double> x(n);
        for (double& e : x) e = bf16_value(scale * normal());
        return x;
    }
    int keys() const { return s.key_count(branch); }
    int stride() const { return s.key_stride(branch); }
    size_t rows() const { return s.query_rows(); }

    // density: the share of blocks that a typical token selects
    Inputs(const NsaShape& s, Branch branch, double scale, uint64_t seed, double density = 0.4)
        : s(s), branch(branch), seed(seed) {
        const size_t D = size_t(s.D), key_rows = size_t(s.B) * s.G * size_t(stride());
        q = normals(rows() * D, scale), k = normals(key_rows * D, scale), v = normals(key_rows * D, 1);
        dout = normals(rows() * D, 1);
        for (size_t i = 0; i < key_rows * D; i++)
            if (int(i / D) % stride() >= keys()) k[i] = v[i] = std::nan("");
        if (branch != SLC) return;
        // Random sets, with and without the query's own block; at the usual density some rows choose all and some none.
        selection.assign(size_t(s.B) * s.G * s.queries * s.selection_words(), 0);
        for (size_t row = 0; row < size_t(s.B) * s.G * s.queries; row++) {
            const int t = s.first + int(row % size_t(s.queries));
            const double chance = density != 0.4 ? density : row % 7 == 0 ? 1.1 : row % 11 == 0 ? -1 : density;
            for (int block = 0; block <= t / s.slc_block; block++)
                if (random_uniform(seed, random_stream(RANDOM_TEST, 78), counter++) < chance)
                    selection[row * s.selection_words() + block / 32] |= 1u << block % 32;
        }
    }
    bool visible(size_t bg, int t, int key) const {
        return oracle::sees(branch, t, key, s.selection_mask(branch == SLC ? selection.data() : nullptr, bg, t), s);
    }
    int tiles() const { return keys() / 64 + 1; }
};

// Calls visit(bg, head, t, row of [B, H, queries]) for every query row.
template <class Visit>
void for_rows(const NsaShape& s, Visit visit) {
    for (int b = 0; b < s.B; b++)
        for (int head = 0; head < s.H; head++)
            for (int j = 0; j < s.queries; j++)
                visit(size_t(b) * s.G + head / s.heads_per_group(), head, s.first + j,
                      (size_t(b) * s.H + head) * s.queries + j);
}
inline double dot(const double* a, const double* b, int n, bool magnitudes = false) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += magnitudes ? std::fabs(a[i] * b[i]) : a[i] * b[i];
    return sum;
}
// delta of each query row
inline std::vector<double> exponent_errors(const Inputs& in, const std::vector<double>& lse) {
    std::vector<double> delta(in.rows());
    for_rows(in.s, [&](size_t bg, int, int t, size_t row) {
        double most = 0;
        for (int key = 0; key < in.keys(); key++)
            if (in.visible(bg, t, key))
                most = std::max(most, dot(&in.q[row * in.s.D], &in.k[(bg * in.stride() + key) * in.s.D], in.s.D, true));
        delta[row] = E32 * ((in.s.D + 8) * most * in.s.scale() + 2 * (std::isinf(lse[row]) ? 0 : std::fabs(lse[row])) +
                            16 + in.tiles());
    });
    return delta;
}

// Whether this GPU's code multiplies heads of dimension D by warpgroups.
inline bool device_has_warpgroups(int D) {
    static const GpuCode gpu = Cuda(0, size_t(1) << 20).gpu_code();
    return has_attention_kernel(ATTENTION_KERNELS[WARPGROUPS_KERNEL], false, gpu, D);
}

// Scratch memory for the kernels, and AUTO's choice.
struct AttentionScratch {
    DeviceArray<char> data;
    DeviceArray<SelectedChoice> choice;
    AttentionScratch(Branch branch, const NsaShape& s, AttentionPath path, bool backward)
        : data(backward ? attention_backward_bytes(s, path) : attention_forward_bytes(branch, s, path)), choice(1) {}
    operator AttentionWorkspace() const { return {data.data, choice.data}; }
};
// The arrays [branches, ...] of a layer's backward pass of which one branch is run.
struct BranchBackward {
    Branch branch;
    const NsaShape& s;
    size_t rows, at;  // of a branch; where its rows begin
    DeviceArray<bf16> o, dk, dv;
    DeviceArray<float> gate, lse, dq, dgate, row_dot, lse_gated;
    // of [B, H, queries, D] and [B, H, queries]
    BranchBackward(Branch branch, const NsaShape& s, const std::vector<double>& out, const std::vector<double>& gates,
                   const std::vector<double>& lses)
        : branch(branch),
          s(s),
          rows(s.query_rows()),
          at(size_t(s.branch_slot(branch)) * rows),
          o(in_place(out, size_t(s.D))),
          dk(size_t(s.B) * s.G * size_t(s.key_stride(branch)) * size_t(s.D)),
          dv(dk.count),
          gate(in_place(gates, 1)),
          lse(in_place(lses, 1)),
          dq(rows * s.D),
          dgate(lse.count),
          row_dot(lse.count),
          lse_gated(lse.count) {}
    void run(const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const uint32_t* selection,
             AttentionPath path, AttentionWorkspace workspace) {
        LayerGradients<bf16, float> d = {nullptr, dq.data, {}, {}, dgate.data, row_dot.data, lse_gated.data};
        LayerInputs<bf16, float> in = {q, {}, {}, selection, dout, o.data, gate.data, lse.data};
        d.dk[branch] = dk.data, d.dv[branch] = dv.data, in.k[branch] = k, in.v[branch] = v;
        backward_on_tensor_cores(d, in, {}, s, 1u << branch, path, workspace, nullptr);
    }
    // The branch's part of what is found for all of them.
    template <class T>
    std::vector<T> part(const std::vector<T>& all) const {
        return {all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + rows)};
    }

  private:
    std::vector<double> in_place(const std::vector<double>& of_branch, size_t width) const {
        std::vector<double> all(s.branches() * rows * width, std::nan(""));
        std::copy(of_branch.begin(), of_branch.end(), all.begin() + ptrdiff_t(at * width));
        return all;
    }
};

// What Cpu computes in fp64, and how far the kernels may be off.
struct Expected {
    std::vector<double> out, lse, dq, dk, dv;
    std::vector<double> out_limit, lse_limit, dq_limit, dk_limit, dv_limit;
    std::vector<double> delta;               // of each query row
    std::vector<double> o, lse_given, gate;  // what the backward pass is given: out in bf16, lse and gate in fp32
    std::vector<double> row_dot, lse_gated, dgate;  // what it makes of these
    std::vector<double> row_dot_limit, lse_gated_limit, dgate_limit;
};
inline Expected expected_forward(const Inputs& in) {
    const NsaShape& s = in.s;
    const size_t D = size_t(s.D), rows = in.rows();
    Expected e;
    e.out.resize(rows * D), e.lse.resize(rows), e.out_limit.resize(rows * D, TINY16), e.lse_limit.resize(rows);
    Cpu<double> cpu;
    const auto forward = [&](std::vector<double>& out, const std::vector<double>& v) {
        cpu.attention_forward(in.branch, out.data(), e.lse.data(), in.q.data(), in.k.data(), v.data(),
                              in.selection.data(), s);
    };
    std::vector<double> magnitude(rows * D), absolute_v(in.v);  // of the weighted values
    for (double& x : absolute_v) x = std::fabs(x);
    forward(magnitude, absolute_v), forward(e.out, in.v);
    e.delta = exponent_errors(in, e.lse);
    for_rows(s, [&](size_t bg, int, int t, size_t row) {
        const double weight_error = std::expm1(e.delta[row]);
        e.lse_limit[row] = weight_error + E32 * in.keys();
        double* limit = &e.out_limit[row * D];
        for (size_t x = 0; x < D; x++)
            limit[x] += (1 + U16) * (U16 + 2 * weight_error + 2 * E32 * in.keys()) * magnitude[row * D + x] +
                        U16 * std::fabs(e.out[row * D + x]);
        for (int key = 0; key < in.keys(); key++) {
            if (!in.visible(bg, t, key)) continue;
            const double* v = &absolute_v[(bg * in.stride() + key) * D];
            for (size_t x = 0; x < D; x++) limit[x] += std::exp2(MOST_GROWTH) * FLUSHED * v[x];
        }
    });
    return e;
}
// gated: otherwise gates are 1.
inline void expect_backward(Expected& e, const Inputs& in, bool gated = true) {
    const NsaShape& s = in.s;
    const size_t D = size_t(s.D), rows = in.rows(), key_rows = size_t(s.B) * s.G * size_t(in.stride());
    const auto dout_of = [&](size_t bg, int head, int t) {
        return &in.dout[((bg / s.G * s.queries + t - s.first) * s.H + head) * D];
    };
    for (double x : e.out) e.o.push_back(bf16_value(x));
    for (double x : e.lse) e.lse_given.push_back(double(float(x)));
    for (std::vector<double>* x :
         {&e.gate, &e.row_dot, &e.lse_gated, &e.dgate, &e.row_dot_limit, &e.lse_gated_limit, &e.dgate_limit})
        x->resize(rows);
    for_rows(s, [&](size_t bg, int head, int t, size_t row) {
        const double gate = gated ? float(0.05 + 0.9 * random_uniform(3, random_stream(RANDOM_TEST, 79), row)) : 1;
        const double *dout = dout_of(bg, head, t), *o = &e.o[row * D], r = dot(dout, o, s.D);
        e.gate[row] = gate, e.row_dot[row] = r, e.lse_gated[row] = e.lse_given[row] - std::log(gate);
        e.dgate[row] = r * gate * (1 - gate);
        e.row_dot_limit[row] = E32 * s.D * dot(dout, o, s.D, true) + TINY32;
        // a logarithm within 2 units in the last place, and a subtraction
        e.lse_gated_limit[row] =
            std::isinf(e.lse[row]) ? TINY32 : E32 * (4 * std::fabs(std::log(gate)) + std::fabs(e.lse_gated[row]));
        e.dgate_limit[row] = e.row_dot_limit[row] + 4 * E32 * std::fabs(e.dgate[row]) + TINY32;
    });
    const std::vector<double>&row_dots = e.row_dot, &lses = e.lse_gated;
    e.dq.resize(rows * D), e.dk.resize(key_rows * D), e.dv.resize(key_rows * D);
    Cpu<double>().attention_backward(
        in.branch, {e.dq.data(), false, e.dk.data(), e.dv.data(), in.dout.data(), row_dots.data(), lses.data()},
        {in.q.data(), in.k.data(), in.v.data(), in.selection.data()}, s);
    e.dq_limit.resize(rows * D), e.dk_limit.resize(key_rows * D, TINY16), e.dv_limit.resize(key_rows * D, TINY16);
    const double sums = E32 * std::max(in.keys(), s.queries * s.heads_per_group());
    for_rows(s, [&](size_t bg, int head, int t, size_t row) {
        const double *q = &in.q[row * D], *dout = dout_of(bg, head, t),
                     weight_error = std::expm1(e.delta[row] + e.lse_gated_limit[row]);
        for (int key = 0; key < in.keys(); key++) {
            if (!in.visible(bg, t, key)) continue;
            const size_t at = (bg * in.stride() + key) * D;
            const double p = std::exp(dot(q, &in.k[at], s.D) * s.scale() - lses[row]),
                         missing = p < FLUSHED * (1 + weight_error) ? p : 0;
            const double dout_v = dot(dout, &in.v[at], s.D), ds = p * (dout_v - row_dots[row]);
            // dS: weight, product with v (D sums), subtraction, product, then bf16
            const double product_error =
                E32 * ((s.D + 1) * dot(dout, &in.v[at], s.D, true) + std::fabs(row_dots[row])) + e.row_dot_limit[row];
            const double ds_error = (1 + U16) * (std::fabs(ds) * (U16 + weight_error + sums + 2 * E32) +
                                                 p * (1 + weight_error) * product_error) +
                                    missing * (std::fabs(dout_v) + std::fabs(row_dots[row])) + TINY16;
            const double p_error = (1 + U16) * p * (U16 + weight_error + sums) + missing;
            for (size_t x = 0; x < D; x++) {
                e.dq_limit[row * D + x] += ds_error * std::fabs(in.k[at + x]) * s.scale() + TINY32;
                e.dk_limit[at + x] += ds_error * std::fabs(q[x]) * s.scale() + TINY32;
                e.dv_limit[at + x] += p_error * std::fabs(dout[x]) + TINY32;
            }
        }
    });
    for (size_t i = 0; i < rows * D; i++) e.dq_limit[i] += 2 * E32 * std::fabs(e.dq[i]);
    for (size_t i = 0; i < key_rows * D; i++)
        e.dk_limit[i] += (U16 + 2 * E32) * std::fabs(e.dk[i]), e.dv_limit[i] += (U16 + 2 * E32) * std::fabs(e.dv[i]);
}

// What the kernels of a branch give. The backward pass is given the forward pass's own outputs and gates of 0.5, or
// what was expected of them.
struct Results {
    std::vector<bf16> out, dk, dv;
    std::vector<float> lse, dq, row_dot, lse_gated, dgate;
    SelectedChoice choice;  // AUTO's, backward
};
inline Results run_branch(const Inputs& in, AttentionPath path, AttentionPath path_backward, const Expected* given,
                          bool backward = true) {
    const NsaShape& s = in.s;
    const size_t rows = in.rows();
    const DeviceArray<bf16> q(in.q), k(in.k), v(in.v), dout(in.dout), out(rows * s.D);
    const DeviceArray<uint32_t> selection(in.selection);
    const DeviceArray<float> lse(rows);
    forward_on_tensor_cores(in.branch, out.data, lse.data, q.data, k.data, v.data, selection.data, s, path,
                            AttentionScratch(in.branch, s, path, false), nullptr);
    Results r;
    r.out = out.raw(), r.lse = lse.raw();
    check_written(out), check_written(lse);
    if (!backward) return r;
    BranchBackward made(in.branch, s, given ? given->o : out.download(),
                        given ? given->gate : std::vector<double>(rows, 0.5),
                        given ? given->lse_given : lse.download());
    const AttentionScratch scratch(in.branch, s, path_backward, true);
    made.run(q.data, k.data, v.data, dout.data, selection.data, path_backward, scratch);
    check_written(made.dk), check_written(made.dv);
    r.dq = made.dq.raw(), r.dk = made.dk.raw(), r.dv = made.dv.raw(), r.row_dot = made.part(made.row_dot.raw());
    r.lse_gated = made.part(made.lse_gated.raw()), r.dgate = made.part(made.dgate.raw());
    if (path_backward.selected == SelectedKernel::AUTO) r.choice = scratch.choice.raw()[0];
    return r;
}
inline void check_same(const Results& a, const Results& b) {
    check_same_bits("out", a.out, b.out), check_same_bits("lse", a.lse, b.lse), check_same_bits("dq", a.dq, b.dq);
    check_same_bits("dk", a.dk, b.dk), check_same_bits("dv", a.dv, b.dv);
}
// By all kernels that multiply heads of this dimension.
inline void check_attention(const Inputs& in, bool backward = true, SelectedKernel kernel = SelectedKernel::TILES) {
    const NsaShape& s = in.s;
    Expected e = expected_forward(in);
    if (backward) expect_backward(e, in);
    for (const bool warpgroups : {false, true}) {
        if (warpgroups && !device_has_warpgroups(s.D)) continue;
        const AttentionPath path = {kernel, warpgroups};
        const Results r = run_branch(in, path, path, &e, backward);
        check_within("out", s, r.out, e.out, e.out_limit);
        check_within("lse", s, r.lse, e.lse, e.lse_limit);
        if (backward) {
            check_within("row_dot", s, r.row_dot, e.row_dot, e.row_dot_limit);
            check_within("lse_gated", s, r.lse_gated, e.lse_gated, e.lse_gated_limit);
            check_within("dgate", s, r.dgate, e.dgate, e.dgate_limit);
            check_within("dq", s, r.dq, e.dq, e.dq_limit);
            check_within("dk", s, r.dk, e.dk, e.dk_limit);
            check_within("dv", s, r.dv, e.dv, e.dv_limit);
        }
        for (int run = 1; run < RUNS; run++) {
            draw_order(run, s);
            check_same(run_branch(in, path, path, &e, backward), r);
        }
        draw_order(0, s);
    }
}
// A query may choose every block here, so slc_count says so: it bounds the workspace.
inline Inputs gather_inputs(NsaShape s, double density = 0.4, double scale = 1) {
    s.slc_count = s.slc_blocks();
    return Inputs(s, SLC, scale, uint64_t(s.T) * 1000 + s.H, density);
}

// A row of the tables below: a shape, and how it is computed: by masked tiles in some branches, by gathered rows.
constexpr unsigned BY_CMP = 1u << CMP, BY_SLC = 1u << SLC, BY_WIN = 1u << WIN, BY_TILES = BY_CMP | BY_SLC | BY_WIN,
                   GATHERED = 8, BY_ALL = BY_TILES | GATHERED;
struct Setup {
    unsigned ways;
    NsaShape s;
    double density = 0.4;  // of the selection
    bool backward = true;
    double scale = 1;  // of q and k
};
inline void check_setups(const std::vector<Setup>& table) {
    for (const Setup& x : table) {
        if (x.s.T > LONGEST && x.backward) continue;
        for (const Branch branch : {CMP, SLC, WIN})
            if (x.ways >> branch & 1)
                check_attention(Inputs(x.s, branch, x.scale, uint64_t(x.s.T) * 1000 + x.s.H, x.density), x.backward);
        if (x.ways & GATHERED)
            check_attention(gather_inputs(x.s, x.density, x.scale), x.backward, SelectedKernel::GATHER);
    }
}
// Shapes with another compression, other selection blocks, another window, some of the queries.
inline NsaShape compressed(NsaShape s, int l, int d) {
    s.l = l, s.d = d;
    return s;
}
inline NsaShape blocks_of_tokens(NsaShape s, int slc_block) {
    s.slc_block = slc_block;
    return s;
}
inline NsaShape windowed(NsaShape s, int window, bool full = false) {
    s.window = window, s.window_only = s.sees_all = full;
    return s;
}
inline NsaShape from(NsaShape s, int first, int queries) {
    s.first = first, s.queries = queries;
    return s;
}

// What a layer's attention reads, on the device, and by branch, WIN, SLC and CMP, which share q and dout, its inputs
// and what is expected of it; of some of the queries there is no backward pass.
struct LayerArrays {
    std::vector<Inputs> inputs;
    std::vector<Expected> expected;
    std::vector<std::unique_ptr<DeviceArray<bf16>>> arrays;
    DeviceArray<uint32_t> selection;
    LayerInputs<bf16, float> in = {};
    static std::vector<Inputs> make_inputs(const NsaShape& s) {
        std::vector<Inputs> inputs;
        for (const Branch branch : {WIN, SLC, CMP}) {
            if (!s.has(branch)) continue;
            inputs.emplace_back(s, branch, 1.0, 77);
            inputs.back().q = inputs[0].q, inputs.back().dout = inputs[0].dout;
        }
        return inputs;
    }
    explicit LayerArrays(const NsaShape& s)
        : inputs(make_inputs(s)), selection(s.window_only ? std::vector<uint32_t>(1) : inputs[1].selection) {
        in.q = add(inputs[0].q), in.dout = add(inputs[0].dout), in.selection = selection.data;
        for (const Inputs& x : inputs) {
            in.k[x.branch] = add(x.k), in.v[x.branch] = add(x.v);
            expected.push_back(expected_forward(x));
            if (s.queries == s.T) expect_backward(expected.back(), x, !s.window_only);
        }
    }
    bf16* add(const std::vector<double>& x) {
        arrays.push_back(std::make_unique<DeviceArray<bf16>>(x));
        return arrays.back()->data;
    }
};
// The forward pass of a layer behind its compressed branch: o and lse of the other branches, and the gated sum of all
// outputs as they were stored.
inline void check_attend_and_combine(Cuda& dev, const NsaShape& s, const LayerArrays& layer) {
    const std::vector<Expected>& expected = layer.expected;
    const size_t D = size_t(s.D), rows = s.query_rows(), all_rows = s.branches() * rows;
    std::vector<double> o(all_rows * D, std::nan("")), o_limit(o.size(), 0), lse(all_rows, 0), lse_limit(lse),
        gate(all_rows);
    for (size_t i = 0; i < all_rows; i++)
        gate[i] = s.window_only ? 1 : float(random_uniform(3, random_stream(RANDOM_TEST, 80), i));
    const auto place = [&](std::vector<double>& to, const std::vector<double>& part, Branch branch) {
        std::copy(part.begin(), part.end(),
                  to.begin() + ptrdiff_t(size_t(s.branch_slot(branch)) * rows * (part.size() / rows)));
    };
    if (!s.window_only) {
        std::vector<double> compressed;
        for (double x : expected[2].out) compressed.push_back(bf16_value(x));
        place(o, compressed, CMP);
    }
    const DeviceArray<bf16> found_o(o), attn(rows * D);
    const DeviceArray<float> found_lse(lse), gates(gate);
    for (size_t i = 0; i < expected.size(); i++) {
        const Branch branch = layer.inputs[i].branch;
        if (branch == CMP) continue;
        place(o, expected[i].out, branch);
        place(o_limit, expected[i].out_limit, branch), place(lse, expected[i].lse, branch);
        place(lse_limit, expected[i].lse_limit, branch);
    }
    LayerInputs<bf16, float> in = layer.in;
    in.gate = s.window_only ? nullptr : gates.data;
    CUDA_CHECK(cudaDeviceSynchronize());  // the arrays were copied on another stream
    dev.attend_and_combine({attn.data, found_o.data, found_lse.data}, in, s);
    const std::vector<double> stored = found_o.download();
    check_within("o", s, stored, o, o_limit);
    check_within("lse", s, found_lse.download(), lse, lse_limit);
    std::vector<double> sum(rows * D, 0), sum_limit(rows * D, TINY16);
    for_rows(s, [&](size_t bg, int head, int t, size_t row) {
        const size_t to = ((bg / s.G * s.queries + t - s.first) * s.H + head) * D;
        for (size_t x = 0; x < D; x++) {
            double magnitude = 0;
            for (size_t i = row; i < all_rows; i += rows) {
                sum[to + x] += gate[i] * stored[i * D + x];
                magnitude += std::fabs(gate[i] * stored[i * D + x]);
            }
            sum_limit[to + x] += 2 * s.branches() * E32 * magnitude + U16 * std::fabs(sum[to + x]);
        }
    });
    check_within("attn", s, attn.download(), sum, sum_limit);
}

// The backward pass of all branches of a layer together, as the model has it: dq, and where it is not asked for q's
// columns of dprojected, which are the sum of what the branches give, turned back.
inline void check_branches_backward(Cuda& dev, const NsaShape& s, const LayerArrays& layer) {
    const size_t D = size_t(s.D), rows = s.query_rows(), all_rows = s.branches() * rows, P = size_t(s.projected());
    std::vector<double> o(all_rows * D), lse(all_rows), gate(all_rows), dq(rows * D), dq_limit(rows * D);
    const std::vector<Expected>& expected = layer.expected;
    for (size_t branch = 0; branch < expected.size(); branch++) {
        const Inputs& in = layer.inputs[branch];
        const Expected& e = expected[branch];
        const size_t at = size_t(s.branch_slot(in.branch)) * rows;
        std::copy(e.o.begin(), e.o.end(), o.begin() + ptrdiff_t(at * D));
        std::copy(e.lse_given.begin(), e.lse_given.end(), lse.begin() + ptrdiff_t(at));
        std::copy(e.gate.begin(), e.gate.end(), gate.begin() + ptrdiff_t(at));
        for (size_t i = 0; i < rows * D; i++) {  // each of a branch's additions may round what others gave
            dq_limit[i] += e.dq_limit[i] + E32 * in.keys() * std::fabs(dq[i]);
            dq[i] += e.dq[i];
        }
    }
    const DeviceArray<bf16> outputs(o);
    const DeviceArray<float> lses(lse), gates(gate), found_dq(rows * D), dgate(all_rows), row_dot(all_rows),
        lse_gated(all_rows);
    const std::vector<double> before(size_t(s.B) * s.T * P, 3);
    const DeviceArray<bf16> dprojected(before);
    LayerInputs<bf16, float> in = layer.in;
    in.o = outputs.data, in.gate = s.window_only ? nullptr : gates.data, in.lse = lses.data;
    LayerGradients<bf16, float> d = {nullptr, found_dq.data, {}, {}, dgate.data, row_dot.data, lse_gated.data};
    std::vector<std::unique_ptr<DeviceArray<bf16>>> dk, dv;
    for (const Inputs& x : layer.inputs) {
        dk.push_back(std::make_unique<DeviceArray<bf16>>(x.k)), dv.push_back(std::make_unique<DeviceArray<bf16>>(x.v));
        d.dk[x.branch] = dk.back()->data, d.dv[x.branch] = dv.back()->data;
    }
    CUDA_CHECK(cudaDeviceSynchronize());  // the arrays were copied on another stream
    dev.branches_backward(d, in, s);
    check_within("dq", s, found_dq.download(), dq, dq_limit);
    for (size_t i = 0; i < expected.size(); i++) {
        check_within("dk", s, dk[i]->download(), expected[i].dk, expected[i].dk_limit);
        check_within("dv", s, dv[i]->download(), expected[i].dv, expected[i].dv_limit);
    }
    d.dprojected = dprojected.data, d.dq = nullptr;
    dev.branches_backward(d, in, s);
    std::vector<double> turned(before), limit(before.size(), TINY16);
    for_rows(s, [&](size_t bg, int head, int t, size_t row) {
        oracle::Numbers<float> x;
        for (size_t i = 0; i < D; i++) x.push_back({dq[row * D + i], dq_limit[row * D + i]});
        x = oracle::rope(x.data(), t, s.D, -1, s.rope_base);
        const size_t to = ((bg / s.G) * s.T + t) * P + head * D;
        for (size_t i = 0; i < D; i++)
            turned[to + i] = x[i].value, limit[to + i] += x[i].error + U16 * (std::fabs(x[i].value) + x[i].error);
    });
    check_within("dprojected", s, dprojected.download(), turned, limit);
}
inline void check_all_branches(const std::vector<NsaShape>& shapes) {
    Cuda dev(0, size_t(1) << 20);
    for (NsaShape s : shapes) {
        s.slc_count = s.slc_blocks();  // a query may choose them all
        const LayerArrays layer(s);
        for (const SelectedKernel selected : {SelectedKernel::AUTO, SelectedKernel::TILES, SelectedKernel::GATHER})
            for (const bool warpgroups : {false, true}) {
                if (warpgroups && !device_has_warpgroups(s.D)) continue;
                if (s.window_only && selected != SelectedKernel::TILES) continue;  // nothing is selected
                dev.selected_kernel = selected, dev.warpgroups = warpgroups;
                check_attend_and_combine(dev, s, layer);
                if (selected != SelectedKernel::AUTO && s.queries == s.T) check_branches_backward(dev, s, layer);
            }
    }
}

}  // namespace attention_tests

TEST(attention_kernels_heads) {
    using namespace attention_tests;
    std::vector<Setup> table;
    const int rows[][4] = {{130, 1, 2, 2}, {200, 3, 1, 1}, {130, 5, 1, 1},  // T, heads, G, B
                           {130, 6, 1, 1}, {70, 12, 1, 1}, {70, 16, 1, 1}};
    for (const auto& [T, heads, G, B] : rows) table.push_back({BY_ALL, compressed(shape(T, heads, G, 64, B), 4, 1)});
    // One token fills a tile of queries, and one of the gathered backward pass.
    table.push_back({BY_TILES, from(compressed(shape(66, 128), 4, 1), 58, 8)});
    table.push_back({GATHERED, from(shape(70, 96, 1, 16), 60, 10)});
    check_setups(table);
}
TEST(attention_kernels_all_branches) {
    using namespace attention_tests;
    check_all_branches({compressed(shape(100, 6, 2, 64, 2), 8, 4), shape(20, 2), windowed(shape(130, 6), 50),
                        windowed(shape(130, 6), 50, true), from(shape(200, 6, 2, 64, 2), 130, 1),
                        from(shape(200, 6, 2, 64, 2), 100, 70)});
}
TEST(attention_kernels_branches_of_other_dimensions) {
    using namespace attention_tests;
    check_all_branches({shape(90, 3, 1, 16), shape(150, 5, 1, 32), shape(70, 16, 1, 128)});
}
TEST(attention_kernels_lengths) {
    using namespace attention_tests;
    std::vector<Setup> table = {{GATHERED, shape(15, 6)}};
    for (const int T : {1, 31, 32, 33, 63, 64, 65, 130, 257}) {
        table.push_back({BY_TILES, shape(T, 3)});
        table.push_back({GATHERED, shape(T, 6, T == 65 ? 2 : 1, 64, T == 65 ? 2 : 1)});
    }
    check_setups(table);
}
TEST(attention_kernels_compression) {
    using namespace attention_tests;
    // up to five tiles of compressed keys; with l = 12 and d = 1 a warp's first key becomes visible near the end of a
    // tile of tokens
    check_setups({{BY_CMP, compressed(shape(257, 3), 1, 1)},
                  {BY_CMP, compressed(shape(200, 3), 12, 1)},
                  {BY_CMP, compressed(shape(300, 3), 4, 2)},
                  {BY_CMP, compressed(shape(129, 3), 8, 4)},
                  {BY_CMP, compressed(shape(66, 3), 12, 4)},
                  {BY_CMP, compressed(shape(200, 3), 32, 32)}});
}
TEST(attention_kernels_windows) {
    using namespace attention_tests;
    std::vector<Setup> table = {{BY_WIN, windowed(shape(150, 2), 1, true)}};
    // 79, 95: its edge falls on the edge of a warp's keys, 16 of them or 32. 125: of a tile of queries the last alone
    // does not see the first key of a tile.
    for (const int window : {1, 37, 64, 79, 95, 125, 500}) table.push_back({BY_WIN, windowed(shape(150, 3), window)});
    check_setups(table);
}
TEST(attention_kernels_selection_blocks) {
    using namespace attention_tests;
    std::vector<Setup> table;
    for (const int block : {16, 32, 64, 128, 192}) {
        const unsigned ways = BY_SLC | GATHERED;
        table.push_back({ways, blocks_of_tokens(shape(std::min(LONGEST, block > 64 ? 220 : 150), 3), block)});
        table.push_back({ways, blocks_of_tokens(shape(150, 3), block), 0.03});  // most tiles are skipped
        if (block < 64)  // all rows choose something of a tile, but not all of it
            table.push_back({ways, blocks_of_tokens(shape(150, 3), block), 0.9});
    }
    for (const double density : {0.4, 0.03})  // more than 32 blocks and tiles: bitmasks of several words
        table.push_back({BY_SLC, from(shape(2200, 1), 2150, 10), density, false});
    table.push_back({BY_SLC, from(shape(1500, 6), 1480, 20), 0.03, false});  // two warpgroups have heads of token 10
    check_setups(table);
}
__global__ void used_key_tiles_kernel(uint32_t* used, const uint32_t* selected, int tokens, int tiles,
                                      AttentionShape s) {
    wait_for_earlier_kernels();
    find_used_key_tiles(used, selected, tokens, tiles, s);
}
// A block that one token alone chose, whichever it is; the row after the last token has all bits, and nobody reads it.
TEST(attention_kernels_used_tiles) {
    using namespace attention_tests;
    const int T = 4480, tiles = T / KEY_TILE;
    for (const int block : {16, 64, 128})
        for (const int tokens : {1, 32, 33, MOST_TILE_TOKENS}) {
            NsaShape s = shape(T, 1);
            s.slc_block = block;
            const AttentionShape a = attention_shape(SLC, s, tokens);
            for (int token = 0; token < tokens; token++) {
                const int chosen = (37 * token + 11) % s.slc_blocks();
                std::vector<uint32_t> bits(size_t(tokens + 1) * a.words);
                std::fill(bits.end() - a.words, bits.end(), ~0u);
                bits[size_t(token) * a.words + chosen / 32] = 1u << chosen % 32;
                DeviceArray<uint32_t> selected(bits), used(tile_words(T));
                launch<used_key_tiles_kernel>(1, 128, 0, nullptr, used.data, (const uint32_t*)selected.data, tokens,
                                              tiles, a);
                std::vector<uint32_t> expected(tile_words(T));
                for (int tile = 0; tile < tiles; tile++)
                    if (tile * KEY_TILE < (chosen + 1) * block && (tile + 1) * KEY_TILE > chosen * block)
                        expected[tile / 32] |= 1u << tile % 32;
                CHECK(used.raw() == expected);
            }
        }
}
TEST(attention_kernels_head_dimensions) {
    using namespace attention_tests;
    std::vector<Setup> table = {{GATHERED, shape(80, 12, 1, 128)}};
    for (const int D : {16, 32, 128}) table.push_back({BY_ALL, compressed(shape(100, 3, 1, D), 4, 1)});
    check_setups(table);
}
TEST(attention_kernels_decoding) {
    using namespace attention_tests;
    std::vector<Setup> table = {{GATHERED, from(shape(200, 6, 2, 64, 2), 130, 70), 0.4, false}};
    const int steps[][2] = {{0, 1},   {30, 1},  {31, 1},  {63, 1},   {64, 1},
                            {150, 1}, {199, 1}, {60, 10}, {100, 70}, {0, 40}};
    for (const auto& [first, queries] : steps)
        table.push_back({queries > 1 || first == 199 ? BY_ALL : BY_TILES, from(shape(200, 6, 2, 64, 2), first, queries),
                         0.4, false});
    check_setups(table);
}
TEST(attention_kernels_large_logits) {
    using namespace attention_tests;
    // scores of standard deviation 18^2, the largest about +-1500
    check_setups({{BY_ALL, compressed(shape(150, 3), 4, 1), 0.4, true, 18}});
}
// Heads of 128, whose tiles warpgroups keep in two halves: three of them share a tile of 64 tokens' queries, and two a
// block of 128 keys, of which the second may lack all, some or none.
TEST(attention_kernels_of_wide_heads) {
    using namespace attention_tests;
    std::vector<Setup> table = {{BY_ALL, compressed(shape(150, 3, 1, 128), 4, 1), 0.4, true, 18},  // large logits
                                {BY_ALL, from(shape(150, 6, 2, 128), 100, 50)}};
    for (const int T : {1, 64, 65, 193}) table.push_back({BY_TILES, shape(T, 3, 1, 128)});
    for (const int window : {1, 64, 79, 125}) table.push_back({BY_WIN, windowed(shape(150, 3, 1, 128), window)});
    check_setups(table);
}
TEST(attention_kernels_wide_selection_blocks) {
    using namespace attention_tests;
    std::vector<Setup> table;
    for (const int block : {16, 32, 64, 128, 192}) {
        const NsaShape s = blocks_of_tokens(shape(std::min(LONGEST, block > 64 ? 220 : 140), 3, 1, 128), block);
        table.push_back({BY_SLC | GATHERED, s});
        table.push_back({BY_SLC, s, 0.03});
    }
    for (const int queries : {20, 30})  // rows of two warpgroups, of three
        table.push_back({BY_SLC, from(shape(1500, 6, 1, 128), 1500 - queries, queries), 0.03, false});
    check_setups(table);
}
// Compressed keys in blocks of 128, and where there are more than 256 queries their sums in parts.
TEST(attention_kernels_compression_of_wide_heads) {
    using namespace attention_tests;
    for (const int T : {200, 330}) {
        const NsaShape s = compressed(shape(T, 1, 1, 128), 1, 1);
        CHECK_EQUAL(attention_shape(CMP, s, 0).parts, T > 256 ? 2 : 1);
        check_setups({{BY_CMP, s}});
    }
}

// ---- selection

namespace attention_tests {

struct SelectionRun {
    std::vector<uint32_t> selection;
    std::vector<float> share;
};
inline SelectionRun run_selection(const Inputs& in, const std::vector<float>& lse) {
    const NsaShape& s = in.s;
    DeviceArray<bf16> q(in.q), kc(in.k);
    DeviceArray<float> device_lse(lse), share(size_t(s.B) * s.G * s.queries);
    DeviceArray<uint32_t> selection(size_t(s.B) * s.G * s.queries * s.selection_words()), alone(selection.count);
    // Once in as few launches as there are for training, once three tiles of tokens at a time.
    const size_t room = select_blocks_room(s), little = 3 * SCORE_TOKENS * size_t(s.slc_blocks());
    DeviceArray<float> importances(std::max(room, little));
    select_blocks(selection.data, share.data, q.data, kc.data, device_lse.data, s, importances.data, room, nullptr);
    select_blocks(alone.data, nullptr, q.data, kc.data, device_lse.data, s, importances.data, little, nullptr);
    check_written(selection), check_written(share);
    check_same_bits("selection with and without shares", selection.raw(), alone.raw());
    return {selection.raw(), share.raw()};
}

// The kernel chooses Cpu's set, except among blocks whose importances differ by less than the rounding: an importance
// is a sum of positive weights, so its relative error is at most e^delta - 1 + e (heads + compressed blocks in it).
// Weights below 2^-126 may be missing: in each head one of every compressed block, and l / d of these share each of the
// block's l' tokens, which count 1 / d each.
inline void check_selection(const NsaShape& s, double scale, long* tokens, long* other_choices) {
    const Inputs in(s, CMP, scale, 5);
    Cpu<double> cpu;
    const size_t rows = in.rows(), words = size_t(s.selection_words());
    std::vector<double> out(rows * s.D), lse(rows), share(size_t(s.B) * s.G * s.queries);
    std::vector<uint32_t> expected(share.size() * words);
    cpu.attention_forward(CMP, out.data(), lse.data(), in.q.data(), in.k.data(), in.v.data(), nullptr, s);
    const std::vector<float> rounded(lse.begin(), lse.end());
    const std::vector<double> shift(rounded.begin(), rounded.end()), delta = exponent_errors(in, lse);
    cpu.select_blocks(expected.data(), share.data(), in.q.data(), in.k.data(), shift.data(), s);
    const SelectionRun found = run_selection(in, rounded);
    for (int run = 1; run < RUNS; run++) {
        draw_order(run, s);
        const SelectionRun again = run_selection(in, rounded);
        check_same_bits("selection", again.selection, found.selection),
            check_same_bits("share", again.share, found.share);
    }
    draw_order(0, s);

    const int h = s.heads_per_group();
    const double missing = FLUSHED * h * s.slc_block * s.l / (double(s.d) * s.d);
    std::vector<double> weight(size_t(in.keys()) + 1), importance(s.slc_blocks());
    for (int bg = 0; bg < s.B * s.G; bg++)
        for (int j = 0; j < s.queries; j++) {
            const int t = s.first + j, last = t / s.slc_block, candidates = last + 1;
            const size_t row = size_t(bg) * s.queries + j;
            (*tokens)++;
            double relative = 0;
            std::fill(weight.begin(), weight.end(), 0.0);
            for (int head = 0; head < h; head++) {
                const size_t at = (size_t(bg) * h + head) * s.queries + j;
                relative = worse_error(relative, std::expm1(delta[at]) + E32 * (h + (s.slc_block + s.l) / s.d + 2));
                for (int i = 0; i < s.cmp_blocks(t + 1); i++)
                    weight[i] += std::exp(
                        dot(&in.q[at * s.D], &in.k[(size_t(bg) * in.stride() + i) * s.D], s.D) * s.scale() - shift[at]);
            }
            Cpu<double>::fold_importance(importance.data(), weight.data(), t, s);
            bool same = true;
            int count = 0;
            auto bit = [&](const std::vector<uint32_t>& mask, int block) {
                return mask[row * words + block / 32] >> block % 32 & 1;
            };
            for (int block = 0; block < int(words) * 32; block++) {
                count += bit(found.selection, block);
                if (bit(found.selection, block) == bit(expected, block)) continue;
                same = false;
                CHECK(block <= last);
                for (int other = 0; other <= last; other++)
                    if (bit(found.selection, other) != bit(expected, other) &&
                        bit(found.selection, other) != bit(found.selection, block)) {
                        tests().checks++;
                        const double gap = std::fabs(importance[block] - importance[other]);
                        const double limit = relative * (importance[block] + importance[other]) + 2 * missing;
                        if (!(gap <= limit))
                            check_failed(__FILE__, __LINE__,
                                         "token %d: blocks %d and %d differ by %.3g in importance, limit %.3g, but the "
                                         "wrong one is selected",
                                         t, block, other, gap, limit);
                    }
            }
            CHECK_EQUAL(count, std::min(std::max(s.slc_count, 3), candidates));
            if (candidates > s.slc_count + 1)
                CHECK(bit(found.selection, 0) && bit(found.selection, last) && bit(found.selection, last - 1));
            // chosen / all: both sums of the same importances
            if (same) CHECK_NEAR(found.share[row], share[row], 2 * relative + E32 * (candidates + 2));
            else (*other_choices)++;
        }
}

}  // namespace attention_tests

TEST(attention_kernels_select_blocks) {
    using namespace attention_tests;
    long tokens = 0, other = 0;
    const int cases[][9] = {
        // l, d, l', n, T, first, heads, G, D
        // one or two tiles of compressed keys
        {32, 16, 64, 4, 500, 0, 6, 1, 64},        {8, 4, 16, 5, 300, 0, 3, 2, 64},
        {4, 2, 16, 6, 300, 0, 1, 2, 64},          {1, 1, 16, 4, 200, 0, 6, 1, 64},
        {16, 8, 32, 4, 200, 0, 12, 1, 64},        {64, 16, 32, 3, 200, 0, 2, 2, 64},
        {12, 4, 20, 5, 190, 0, 2, 1, 64},         {8, 4, 16, 1, 100, 0, 1, 1, 64},
        {8, 4, 16, 2, 100, 0, 1, 1, 64},          {32, 16, 64, 64, 31, 0, 1, 1, 64},
        {32, 16, 64, 16, 4096, 4070, 6, 1, 64},    // decoding: 64 blocks
        {32, 16, 64, 16, 2048, 1023, 6, 2, 64},    // from tokens that take all to tokens that choose
        {8, 4, 16, 64, 1200, 1190, 3, 1, 64},      // n = 64, 75 blocks, three words
        {32, 16, 16, 20, 16384, 16380, 6, 1, 64},  // 1024 blocks, 8 tiles of compressed keys
        {8, 4, 1024, 4, 5000, 4990, 3, 1, 64},     // blocks of two tiles
        {32, 16, 64, 4, 300, 299, 6, 2, 64},
    };
    for (const auto& c : cases) {
        NsaShape s = shape(c[4], c[6], c[7], c[8], c[8] == 16 ? 2 : 1);
        s.l = c[0], s.d = c[1], s.slc_block = c[2], s.slc_count = c[3], s.first = c[5],
        s.queries = c[4] == 2048 ? 20 : c[4] - c[5];
        if (s.queries > LONGEST) s.T = s.queries = LONGEST;
        check_selection(s, 1, &tokens, &other);
    }
    std::printf("    select_blocks: %ld of %ld rows chose another block of equal importance within rounding\n", other,
                tokens);
    NsaShape s = shape(200, 3);
    s.l = 8, s.d = 4, s.slc_block = 16, tokens = other = 0;
    check_selection(s, 18, &tokens, &other);  // scores about +-1500: most importances are 0 in fp32
    std::printf("    select_blocks, large logits: %ld of %ld\n", other, tokens);
}
TEST(attention_kernels_choice_of_other_heads) {
    using namespace attention_tests;
    long tokens = 0, other = 0;
    const int cases[][3] = {{3, 16, 2}, {16, 32, 1}, {3, 128, 1}, {16, 128, 1}};  // heads, D, sequences
    for (const auto& [heads, D, B] : cases) {
        NsaShape s = shape(std::min(610, LONGEST), heads, 1, D, B);
        s.l = 8, s.d = 4, s.slc_block = 16, s.slc_count = 5, s.first = s.T > 200 ? s.T - 40 : 0,
        s.queries = s.T - s.first;
        check_selection(s, 1, &tokens, &other);
    }
    std::printf("    select_blocks, other heads: %ld of %ld\n", other, tokens);
}
// Which kernels a GPU has, by its compute capability and the code that was compiled for it.
TEST(attention_kernels_by_capability) {
    using namespace attention_tests;
    using Names = std::vector<std::string>;
    const auto names = [](GpuCode gpu, int D = 0) { return attention_kernel_names(false, gpu, D); };
    CHECK(attention_kernel_names(true) == Names({"plain"}) && names({75}) == Names({"plain"}) &&
          names({90}, 48) == Names({"plain"}));
    const Names portable = {"gathered_rows", "tensor_cores", "plain"};
    CHECK(names({90, true}, 64) == Names({"gathered_rows", "warpgroups", "tensor_cores", "plain"}));
    // Warpgroups: heads of 64 and 128, and code for sm_90a that runs on a GPU of 9.0.
    CHECK(names({90, true}, 128) == names({90, true}, 64));
    CHECK(names({90}, 64) == portable && names({90, true}, 32) == portable && names({100, true}, 64) == portable);
    CHECK(automatic_attention_kernels(false, {90, true}) == "gathered_rows or warpgroups or tensor_cores" &&
          automatic_attention_kernels(false, {90}) == "gathered_rows or tensor_cores" &&
          automatic_attention_kernels(true, {90, true}) == "plain");
}
TEST(attention_kernels_refuse) {
    using namespace attention_tests;
    const bf16* none = nullptr;
    auto forward = [&](Branch branch, const NsaShape& s) {
        forward_on_tensor_cores(branch, (bf16*)nullptr, nullptr, none, none, none, nullptr, s, SelectedKernel::AUTO, {},
                                nullptr);
    };
    NsaShape s = shape(64, 3);
    s.D = 48;
    CHECK_FAILS(2, "head dimension of 48", forward(WIN, s));
    const auto choose = [&] { select_blocks(nullptr, nullptr, none, none, nullptr, s, nullptr, 1, nullptr); };
    CHECK_FAILS(2, "head dimension of 48", choose());
    s = shape(64, 3), s.slc_block = 24;
    CHECK_FAILS(2, "selection blocks of 24 tokens", forward(SLC, s));
    s.slc_block = 96;
    CHECK_FAILS(2, "selection blocks of 96 tokens", forward(SLC, s));
    s = shape(64, 3), s.H = 7, s.G = 2;
    CHECK_FAILS(2, "7 query heads in 2 groups", forward(CMP, s));
    s = shape(64, 129);
    CHECK_FAILS(2, "129 query heads in 1 groups", forward(CMP, s));
    check_shared_bytes(131072, 128, 131072);
    CHECK_FAILS(
        2, "a head dimension of 128: attention takes 131072 bytes of shared memory for a block, this GPU has 101376",
        check_shared_bytes(131072, 128, 101376));
    s = shape(64, 128);  // 16 tokens of so many heads
    CHECK_FAILS(2, "shared memory", choose());
    s = shape(0, 3), s.queries = 0;
    forward(WIN, s);  // nothing to do
    Cuda dev(0, TEST_WORKSPACE);
    dev.choose_attention("warpgroups");
    CHECK_FAILS(2, "--attention-kernel warpgroups is not for heads of dimension 32",
                dev.check_shape(shape(64, 3, 1, 32)));
    for (const int D : {64, 128})
        if (device_has_warpgroups(D)) dev.check_shape(shape(64, 3, 1, D));
        else CHECK_FAILS(2, "warpgroups is not for heads of dimension", dev.check_shape(shape(64, 3, 1, D)));
    dev.choose_attention("gathered_rows");
    CHECK_FAILS(2, "choose --attention-kernel tensor_cores", dev.check_shape(shape(64, 97)));
    std::string code;
    CHECK(name_of_code(code, dev.properties, probe_kernel, true) == cudaSuccess && code.back() == 'a');
    CHECK(name_of_code(code, dev.properties, probe_kernel, dev.exact) == cudaSuccess && code == dev.code);
    // Before a run begins. Full attention has no selection blocks.
    s = shape(64, 3), s.slc_block = 24;
    CHECK_FAILS(2, "selection blocks of 24 tokens", check_shape(s));
    s.window_only = s.sees_all = true;
    check_shape(s);
    s = shape(64, 128);
    CHECK_FAILS(2, "shared memory", check_shape(s));
    s = shape(1 << 20, 1), s.slc_block = 16;  // however many blocks there are to choose from
    check_shape(s);
    dev.choose_attention("plain");  // which keeps all their importances at once
    CHECK_FAILS(2, "shared memory", dev.check_shape(s));
    s.slc_block = 64;
    dev.check_shape(s);
}
#endif
