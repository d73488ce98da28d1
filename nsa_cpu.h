// nsa_cpu.h: struct Cpu, every operation of the model as plain C++. This is the executable specification: the kernels
// of nsa_kernels.cuh are compared with it. Cpu<float> trains; Cpu<double> is the same source for finite differences.
//
// The file reads in this order:  shapes  ->  row operations (embedding, norm, SiLU, classifier, AdamW)  ->  heads and
// RoPE  -> compression  ->  the three attention branches  ->  block selection. GEMM and vector code are in
// lib/cpu_gemm.h.
//
// Conventions. Row-major. Outputs come first, gradients start with d. "=" or "+=" in a comment says whether an output
// is overwritten or accumulated. Results do not depend on the number of threads: every sum runs in an order fixed by
// the shapes alone.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "lib/util.h"
#include "lib/cpu_gemm.h"

// ---------------------------------------------------------------------------------------------------------------------
// Shapes. Symbols are those of the paper (arXiv 2502.11089).

enum Branch { CMP = 0, SLC = 1, WIN = 2 };  // compressed, selected, sliding window: the order of gate_proj's rows
enum HeadSlot { K_CMP, V_CMP, K_SLC, V_SLC, K_WIN, V_WIN };  // the order of the six key/value projections

constexpr double ROPE_BASE = 10000;
constexpr double NORM_EPS = 1e-6;

struct NsaShape {
    int B = 1;  // sequences
    int T = 0;  // tokens that the key and value buffers hold per sequence
    int first = 0,
        queries = 0;  // this call computes positions first .. first+queries-1: (0, T) in training, (t, 1) in decoding
    int H = 0, G = 0, D = 0;  // query heads, key/value groups, head dimension
    int l = 0, d = 0;         // compression block and stride
    int slc_block = 0;        // l': tokens of a selection block
    int slc_count = 0;        // n: selected blocks per query and group
    int window = 0;           // w: keys a query sees in the window branch, its own included
    int F = 0;                // hidden width of the compressor phi
    bool full = false;        // --attention full: the window branch alone, over all tokens, gate fixed to 1

    int heads_per_group() const { return H / G; }
    // Compressed blocks that lie wholly in the first `tokens` tokens; so blocks(t + 1) are visible to query t.
    int cmp_blocks(int tokens) const { return tokens < l ? 0 : (tokens - l) / d + 1; }
    int cmp_capacity() const { return full ? 0 : cmp_blocks(T); }
    int slc_blocks() const { return (T + slc_block - 1) / slc_block; }
    int selection_words() const {
        return (slc_blocks() + 31) / 32;
    }  // a selection is a bitmask: block j is bit j%32 of word j/32
    // Columns of the fused input projection: q, the six keys and values (two in full attention), gate logits; gate rows
    // padded to 8.
    int gate_columns() const { return full ? 0 : (3 * H + 7) / 8 * 8; }
    int projected() const { return H * D + (full ? 2 : 6) * G * D + gate_columns(); }
    bool has(Branch branch) const { return !full || branch == WIN; }
    // Outputs, gates and row statistics of the branches lie in arrays [branches(), ...], a branch's at branch_slot().
    int branches() const { return full ? 1 : 3; }
    int branch_slot(Branch branch) const { return full ? 0 : int(branch); }
    double scale() const { return 1 / std::sqrt(double(D)); }

    size_t query_rows() const {
        return size_t(B) * H * queries;
    }                                                      // rows of q, of the branch outputs; elements of an LSE
    size_t key_rows() const { return size_t(B) * G * T; }  // rows of a key or value buffer
    size_t cmp_rows() const { return size_t(B) * G * cmp_capacity(); }  // rows of compressed keys or values
};

// ---------------------------------------------------------------------------------------------------------------------
// Constants, and what an optimiser step is told.

// What one step of the attention works on: the keys of a tile, and about this many rows (query, head of
// the group). With D = 64 the operands of a step of the backward pass take 200 KiB, within the L2 cache.
constexpr int TILE_KEYS = 64, TILE_ROWS = 96;

// Elements that the gradient's norm sums up at a time. The parts of the flat array that ranks own are whole
// chunks, and the chunks are added in their order, so the norm has the same bits whoever computed which chunk.
constexpr size_t CHUNK = 4096;

struct HyperAdamW {
    double lr, beta1, beta2, eps, decay;  // decay already 0 for tensors without it
    int64_t step;                         // 1-based, for the bias corrections
    // of stochastic rounding, where param is narrower than its master: stream (RANDOM_ROUNDING, step), counter
    // offset + i, the place in the flat array of all parameters
    uint64_t seed;
    size_t offset;
    // sum of the squares of the whole gradient, in the engine's memory. Where given: the gradient is clipped
    // to the L2 norm grad_clip (0: not), and nothing is updated if the norm is not finite
    const double* squares = nullptr;
    double grad_clip = 0;
};

// An engine: the model's operations on one kind of processor, and the memory they work on. Cpu says what each must
// compute; Cuda in nsa_kernels.cuh has the same members. train_nsa.cu and ddp.cuh use these alone (shapes stand at the
// members; training names them all):
//   formats      real, Stat, Grad, Master; has_master, on_host
//   memory       allocate, release, available_bytes, zero, copy; to_host and from_host convert to and from fp32; upload
//   sends token ids results      send and receive: numbers on their way to the host while the next step runs repetition
//   Sequence, run: launches that are the same every time layers       embedding_forward, _backward; rmsnorm_forward,
//   _backward; matmul_forward, _backward_input, _backward_weight;
//                silu_forward, _backward; classifier
//   attention    split_heads_forward, _backward (Heads, HeadGradients); compress_forward, _backward (Phi,
//   PhiGradients);
//                attention_forward, _backward, select_blocks; combine_forward, attention_backward_rows; check_shape
//   update       add_sum, add; chunk_squares, set_guard, total_squares: the loss, the gradient's norm; set_step, adamw;
//   round_master
//                (where has_master)
//   log          describe, peak_flops; on a GPU describe_selected, peak_bytes
template <class real_>
struct Cpu {
    using real = real_;  // parameters and activations
    using Stat =
        real_;  // statistics (rstd, LSE, gates, losses) and the gradient of q: fp32 on an engine whose real is narrower
    using Grad = real_;    // gradients of parameters
    using Master = real_;  // what the optimiser updates: here the parameters themselves, elsewhere an fp32 copy of them
    static constexpr bool has_master = false;
    static constexpr bool on_host = true;  // its memory is the host's
    Gemm<real> gemm;                       // every matrix product but attention's; gemm.bf16 is --cpu-dtype
    bool poison = false;                   // tests: fresh memory holds NaN, so that a read before the first write shows

    // ----- memory. `count` elements, 64-byte aligned; fatal when there is none.
    template <class T>
    T* allocate(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;
        void* p = std::aligned_alloc(64, bytes);
        if (!p)
            fail("out of memory: %.1f MiB were asked for; choose a smaller --batch or --seq-len",
                 double(bytes) / (1 << 20));
        if (poison) std::memset(p, 0xFF, bytes);
        return static_cast<T*>(p);
    }
    template <class T>
    void release(T* p) {
        std::free(p);
    }
    // What the machine could still give, from /proc/meminfo, and the container lets it; where neither is known, there
    // is no limit.
    double available_bytes() const {
        std::ifstream in("/proc/meminfo");
        std::string key, rest;
        double available = std::numeric_limits<double>::infinity();
        for (double kib; in >> key >> kib && std::getline(in, rest);)
            if (key == "MemAvailable:") available = kib * 1024;
        return std::min(available, cgroup_limits().bytes);
    }
    void check_shape(const NsaShape&) const {}  // there is none that it does not have
    double peak_flops() const { return 0; }     // not known
    std::string describe() const {
        const bool fp32 = sizeof(real) == 4;
        return format_text("CPU, %s%s, GEMM: %s", fp32 ? "fp32" : "fp64",
                           gemm.bf16 ? " with the inputs of GEMMs rounded to bf16" : "",
                           fp32 ? gemm_name() : "own blocked GEMM");
    }
    template <class T>
    void zero(T* p, size_t count) {
#pragma omp parallel for schedule(static)
        for (size_t i = 0; i < count; i++) p[i] = T(0);
    }
    // Tokens to the engine, and numbers back to be received later, in order: where the engine is another device,
    // neither waits for it.
    void upload(int32_t* out, const int32_t* in, size_t count) { std::memcpy(out, in, count * sizeof(int32_t)); }
    void send(const double* numbers, size_t count) { sent.push_back({numbers, numbers + count}); }
    std::vector<double> receive() {
        const std::vector<double> oldest = sent.front();
        sent.erase(sent.begin());
        return oldest;
    }
    // Between the engine's numbers and fp32 on the host; copy: bytes as they are.
    void to_host(float* out, const real* in, size_t count) { std::copy_n(in, count, out); }
    void from_host(real* out, const float* in, size_t count) { std::copy_n(in, count, out); }
    template <class T>
    void copy(T* out, const T* in, size_t count) {
        std::memcpy(out, in, count * sizeof(T));
    }

    // Work that repeats, which a GPU can record and replay (see Cuda::run); here it runs.
    struct Sequence {};
    template <class Work>
    void run(Sequence&, Work work) {
        work();
    }

    // ----- embedding.  x = embed[token].  tokens [N], embed [V, C], x [N, C]
    void embedding_forward(real* x, const int32_t* tokens, const real* embed, int N, int C) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) std::memcpy(x + size_t(n) * C, embed + size_t(tokens[n]) * C, sizeof(real) * C);
    }
    // dembed [V, C] += rows of dx [N, C]. Threads share out columns, so that each sum runs in token order.
    void embedding_backward(Grad* dembed, const real* dx, const int32_t* tokens, int N, int C) {
#pragma omp parallel for schedule(static)
        for (int c0 = 0; c0 < C; c0 += 64)
            for (int n = 0; n < N; n++)
                for (int c = c0; c < std::min(C, c0 + 64); c++)
                    dembed[size_t(tokens[n]) * C + c] += dx[size_t(n) * C + c];
    }

    // ----- RMSNorm.  out = x * rstd * weight,  rstd = 1/sqrt(mean(x^2) + eps).  x, out [N, C], rstd [N], weight [C]
    void rmsnorm_forward(real* out, Stat* rstd, const real* x, const real* weight, int N, int C) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) {
            const real* row = x + size_t(n) * C;
            real sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < C; c++) sum += row[c] * row[c];
            const real s = 1 / std::sqrt(sum / C + real(NORM_EPS));
            for (int c = 0; c < C; c++) out[size_t(n) * C + c] = row[c] * s * weight[c];
            rstd[n] = s;
        }
    }
    // dx += rstd * (g - x * rstd^2 * mean(g * x)) with g = dout * weight;  dweight += sum over rows of dout * x * rstd
    void rmsnorm_backward(real* dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd,
                          const real* weight, int N, int C) {
        constexpr int ROWS = 64;  // their part of dweight is summed first, so that every row is read once
        const int parts = (N + ROWS - 1) / ROWS;
        real* const partial = scratch[0].get(size_t(parts) * C);
#pragma omp parallel for schedule(static)
        for (int part = 0; part < parts; part++) {
            real* const sums = partial + size_t(part) * C;
            std::fill_n(sums, C, real(0));
            for (int n = part * ROWS; n < std::min(N, (part + 1) * ROWS); n++) {
                const real *row = x + size_t(n) * C, *drow = dout + size_t(n) * C;
                real *to = dx + size_t(n) * C, dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int c = 0; c < C; c++) dot += drow[c] * weight[c] * row[c];
                const real s = rstd[n], correction = dot * s * s / C;
#pragma omp simd
                for (int c = 0; c < C; c++) {
                    to[c] += s * (drow[c] * weight[c] - row[c] * correction);
                    sums[c] += drow[c] * row[c] * s;
                }
            }
        }
        for (int part = 0; part < parts; part++)
            for (int c = 0; c < C; c++) dweight[c] += partial[size_t(part) * C + c];
    }

    // ----- linear layers, weight [OC, C].
    // out [N, OC] = inp [N, C] weight^T  (+ residual [N, OC], where given)
    void matmul_forward(real* out, const real* inp, const real* weight, const real* residual, int N, int C, int OC) {
        if (residual) copy(out, residual, size_t(N) * OC);
        gemm(false, true, N, OC, C, inp, C, weight, C, residual != nullptr, out, OC);
    }
    // dinp [N, C] = dout [N, OC] weight
    void matmul_backward_input(real* dinp, const real* dout, const real* weight, int N, int C, int OC) {
        gemm(false, false, N, C, OC, dout, OC, weight, C, false, dinp, C);
    }
    // dweight [OC, C] += dout^T inp
    void matmul_backward_weight(Grad* dweight, const real* dout, const real* inp, int N, int C, int OC) {
        gemm(true, false, OC, C, N, dout, OC, inp, C, true, dweight, C);
    }

    // ----- SiLU.  out = x * sigmoid(x), elementwise
    void silu_forward(real* out, const real* x, size_t count) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) out[i] = x[i] * sigmoid(x[i]);
    }
    // dx = dout * s * (1 + x * (1 - s)), s = sigmoid(x); dx may be dout
    void silu_backward(real* dx, const real* dout, const real* x, size_t count) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) {
            const real s = sigmoid(x[i]);
            dx[i] = dout[i] * s * (1 + x[i] * (1 - s));
        }
    }

    // ----- classifier.  losses [N] = cross-entropy of logits [N, Vp] against targets [N], columns V..Vp-1 left out.
    // With want_gradient, logits become dlogits = (softmax - onehot) * dloss in place, 0 in the padded columns.
    void classifier(Stat* losses, real* logits, const int32_t* targets, double dloss, bool want_gradient, int N, int V,
                    int Vp) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) {
            real* row = logits + size_t(n) * Vp;
            real largest = row[0], sum = 0;
#pragma omp simd reduction(max : largest)
            for (int v = 0; v < V; v++) largest = row[v] > largest ? row[v] : largest;
#pragma omp simd reduction(+ : sum)
            for (int v = 0; v < V; v++) sum += exponential(row[v] - largest);
            losses[n] = std::log(sum) + largest - row[targets[n]];
            if (!want_gradient) continue;
            const real factor = real(dloss) / sum;
#pragma omp simd
            for (int v = 0; v < V; v++) row[v] = exponential(row[v] - largest) * factor;
            row[targets[n]] -= real(dloss);
            for (int v = V; v < Vp; v++) row[v] = 0;
        }
    }

    // ----- optimiser.
    // total += sum of x [count], in order
    void add_sum(double* total, const Stat* x, size_t count) {
        double sum = 0;
        for (size_t i = 0; i < count; i++) sum += x[i];
        *total += sum;
    }
    // squares[i] = sum of the squares of chunk i of x [total], in fp64, for the chunks that begin in [begin, begin +
    // count).
    void chunk_squares(double* squares, const Grad* x, size_t total, size_t begin, size_t count) {
#pragma omp parallel for schedule(static)
        for (size_t chunk = begin / CHUNK; chunk < (begin + count) / CHUNK; chunk++) {
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t i = chunk * CHUNK; i < std::min(total, (chunk + 1) * CHUNK); i++)
                sum += double(x[i]) * double(x[i]);
            squares[chunk] = sum;
        }
    }
    // *sum = squares[0] + squares[1] + ... in this order, but NaN if *guard is not finite.
    void total_squares(double* sum, const double* squares, size_t chunks, const Grad* guard) {
        *sum = 0;
        for (size_t i = 0; i < chunks; i++) *sum += squares[i];
        if (!std::isfinite(*guard)) *sum = std::numeric_limits<double>::quiet_NaN();
    }
    // *guard = *loss
    template <class T>
    void set_guard(T* guard, const double* loss) {
        *guard = T(*loss);
    }
    // x += y
    void add(Grad* x, const Grad* y, size_t count) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) x[i] += y[i];
    }
    // AdamW (Loshchilov & Hutter 2019), decoupled decay, bias-corrected moments m, v. All arrays
    // [count]. An engine with a master copy updates that, and rounds it to param; here master is unused.
    void set_step(const HyperAdamW&) {}  // of an update that may be replayed
    void adamw(real* param, Master* master, Stat* m, Stat* v, const Grad* grad, size_t count, const HyperAdamW& h) {
        (void)master;
        double clip = 1;
        if (h.squares) {
            const double norm = std::sqrt(*h.squares);
            if (!std::isfinite(norm)) return;
            if (h.grad_clip > 0 && norm > h.grad_clip) clip = h.grad_clip / norm;
        }
        const real beta1 = real(h.beta1), beta2 = real(h.beta2), eps = real(h.eps), scale = real(clip);
        const real step_size = real(h.lr / (1 - std::pow(h.beta1, double(h.step)))), keep = real(1 - h.lr * h.decay);
        const real v_correction = real(1 / std::sqrt(1 - std::pow(h.beta2, double(h.step))));
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) {
            const real g = grad[i] * scale;
            m[i] = beta1 * m[i] + (1 - beta1) * g;
            v[i] = beta2 * v[i] + (1 - beta2) * g * g;
            param[i] = param[i] * keep - step_size * m[i] / (std::sqrt(v[i]) * v_correction + eps);
        }
    }

    // ----- heads.
    // One row of `projected` [B*queries, P] is  q | k_cmp v_cmp k_slc v_slc k_win v_win | gate logits (3*head + branch)
    // | padding.
    struct Heads {
        real* q;      // [B, H, queries, D], rotated
        real* kv[6];  // [B, G, T, D] each, by HeadSlot; k_slc and k_win rotated, k_cmp not (its compressed blocks are)
        Stat* gate;   // [3, B, H, queries], after the sigmoid
    };
    struct HeadGradients {
        Stat* q;      // [B, H, T, D]
        real* kv[6];  // [B, G, T, D]
        Stat* gate;   // [3, B, H, T], of the logit
    };

    // Rotation of one head by RoPE (Su et al. 2021), halves convention: element i is paired with i + D/2, the angle is
    // position * base^(-2i/D). direction -1 turns back: the rotation's transpose, its gradient. out may be in.
    void rotate(real* out, const real* in, int position, int D, int direction) const {
        const real *c = &rope_cos[size_t(position) * (D / 2)], *s = &rope_sin[size_t(position) * (D / 2)];
        for (int i = 0; i < D / 2; i++) {
            const real a = in[i], b = in[i + D / 2], sine = direction * s[i];
            out[i] = a * c[i] - b * sine;
            out[i + D / 2] = a * sine + b * c[i];
        }
    }

    // heads = projected, split, rotated and gated
    void split_heads_forward(Heads out, const real* projected, const NsaShape& s) {
        prepare_rope(s.T, s.D);
        const int P = s.projected(), D = s.D;
#pragma omp parallel for collapse(2) schedule(static)
        for (int b = 0; b < s.B; b++)
            for (int j = 0; j < s.queries; j++) {
                const int t = s.first + j;
                const real* in = projected + (size_t(b) * s.queries + j) * P;
                for (int head = 0; head < s.H; head++, in += D)
                    rotate(out.q + ((size_t(b) * s.H + head) * s.queries + j) * D, in, t, D, +1);
                for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                    for (int g = 0; g < s.G; g++, in += D) {
                        real* row = out.kv[slot] + ((size_t(b) * s.G + g) * s.T + t) * D;
                        if (slot == K_SLC || slot == K_WIN) rotate(row, in, t, D, +1);
                        else std::memcpy(row, in, sizeof(real) * D);
                    }
                if (s.full) continue;
                for (int head = 0; head < s.H; head++)
                    for (int branch = 0; branch < 3; branch++)
                        out.gate[branch * s.query_rows() + (size_t(b) * s.H + head) * s.queries + j] =
                            sigmoid(in[3 * head + branch]);
            }
    }
    // dprojected = gradients of the heads, turned back and merged; the padding gets 0. Training shapes (first = 0,
    // queries = T).
    void split_heads_backward(real* dprojected, HeadGradients d, const NsaShape& s) {
        prepare_rope(s.T, s.D);
        const int P = s.projected(), D = s.D;
#pragma omp parallel for collapse(2) schedule(static)
        for (int b = 0; b < s.B; b++)
            for (int t = 0; t < s.T; t++) {
                real *row = dprojected + (size_t(b) * s.T + t) * P, *out = row;
                for (int head = 0; head < s.H; head++, out += D)
                    rotate(out, d.q + ((size_t(b) * s.H + head) * s.T + t) * D, t, D, -1);
                for (int slot = s.full ? K_WIN : K_CMP; slot <= V_WIN; slot++)
                    for (int g = 0; g < s.G; g++, out += D) {
                        const real* in = d.kv[slot] + ((size_t(b) * s.G + g) * s.T + t) * D;
                        if (slot == K_SLC || slot == K_WIN) rotate(out, in, t, D, -1);
                        else std::memcpy(out, in, sizeof(real) * D);
                    }
                if (s.full) continue;
                for (int head = 0; head < s.H; head++)
                    for (int branch = 0; branch < 3; branch++)
                        out[3 * head + branch] = d.gate[branch * s.query_rows() + (size_t(b) * s.H + head) * s.T + t];
                for (int i = 3 * s.H; i < s.gate_columns(); i++) out[i] = 0;
            }
    }

    // ----- compression, paper eq. 7, with phi(X_i) = mean over the l rows + fc2 silu(fc1 X_i + bias).
    template <class T>
    struct PhiOf {
        T *fc1, *bias, *fc2;  // [F, l*D], [F], [D, F]
    };
    using Phi = PhiOf<real>;
    using PhiGradients = PhiOf<Grad>;
    // out [B, G, NC, D] = phi(blocks of k [B, G, T, D]), rotated at position i*d where asked; hidden [B, G, NC, F]
    // before the SiLU. Computes the blocks that end inside this call's positions. fc1's product over a block is the sum
    // of its products over the block's l/d chunks of d tokens, so overlapping blocks are plain matrices with a row
    // stride of d*D: nothing is copied.
    void compress_forward(real* out, real* hidden, const real* k, const Phi& phi, bool rotated, const NsaShape& s) {
        prepare_rope(s.T, s.D);
        const int D = s.D, F = s.F, begin = s.cmp_blocks(s.first), count = s.cmp_blocks(s.first + s.queries) - begin,
                  NC = s.cmp_capacity();
        if (count <= 0) return;
        real* activated = scratch[0].get(size_t(count) * F);
        for (int bg = 0; bg < s.B * s.G; bg++) {
            const real* tokens = k + (size_t(bg) * s.T + size_t(begin) * s.d) * D;
            real *h = hidden + (size_t(bg) * NC + begin) * F, *o = out + (size_t(bg) * NC + begin) * D;
            for (int chunk = 0; chunk < s.l / s.d; chunk++)
                gemm(false, true, count, F, s.d * D, tokens + size_t(chunk) * s.d * D, size_t(s.d) * D,
                     phi.fc1 + size_t(chunk) * s.d * D, size_t(s.l) * D, chunk > 0, h, F);
#pragma omp parallel for schedule(static)
            for (int i = 0; i < count; i++) {
                for (int f = 0; f < F; f++) {
                    h[size_t(i) * F + f] += phi.bias[f];
                    activated[size_t(i) * F + f] = h[size_t(i) * F + f] * sigmoid(h[size_t(i) * F + f]);
                }
                for (int x = 0; x < D; x++) {
                    real sum = 0;
                    for (int row = 0; row < s.l; row++) sum += tokens[(size_t(i) * s.d + row) * D + x];
                    o[size_t(i) * D + x] = sum / s.l;
                }
            }
            gemm(false, true, count, D, F, activated, F, phi.fc2, F, true, o, D);
            if (rotated)
                for (int i = 0; i < count; i++) rotate(o + size_t(i) * D, o + size_t(i) * D, (begin + i) * s.d, D, +1);
        }
    }
    // dk [B, G, T, D] =, dphi +=, from dout [B, G, NC, D] (turned back in place). Training shapes.
    void compress_backward(real* dk, const PhiGradients& dphi, real* dout, const real* hidden, const real* k,
                           const Phi& phi, bool rotated, const NsaShape& s) {
        const int D = s.D, F = s.F, NC = s.cmp_capacity();
        zero(dk, s.key_rows() * D);
        if (NC == 0) return;
        real *activated = scratch[0].get(size_t(NC) * F), *dhidden = scratch[1].get(size_t(NC) * F);
        for (int bg = 0; bg < s.B * s.G; bg++) {
            const real *tokens = k + size_t(bg) * s.T * D, *h = hidden + size_t(bg) * NC * F;
            real *dtokens = dk + size_t(bg) * s.T * D, *o = dout + size_t(bg) * NC * D;
            if (rotated)
                for (int i = 0; i < NC; i++) rotate(o + size_t(i) * D, o + size_t(i) * D, i * s.d, D, -1);
            silu_forward(activated, h, size_t(NC) * F);
            gemm(true, false, D, F, NC, o, D, activated, F, true, dphi.fc2, F);  // dfc2 += dout^T act
            gemm(false, false, NC, F, D, o, D, phi.fc2, F, false, dhidden, F);   // dact = dout fc2
            silu_backward(dhidden, dhidden, h, size_t(NC) * F);
            for (int i = 0; i < NC; i++) {
                for (int f = 0; f < F; f++) dphi.bias[f] += dhidden[size_t(i) * F + f];
                for (int row = 0; row < s.l; row++)
                    for (int x = 0; x < D; x++) dtokens[(size_t(i) * s.d + row) * D + x] += o[size_t(i) * D + x] / s.l;
            }
            for (int chunk = 0; chunk < s.l / s.d; chunk++) {
                const size_t at = size_t(chunk) * s.d * D;
                gemm(true, false, F, s.d * D, NC, dhidden, F, tokens + at, size_t(s.d) * D, true, dphi.fc1 + at,
                     size_t(s.l) * D);
                gemm(false, false, NC, s.d * D, F, dhidden, F, phi.fc1 + at, size_t(s.l) * D, true, dtokens + at,
                     size_t(s.d) * D);
            }
        }
    }

    // ----- attention. One source for the three branches: they differ only in the keys that a query sees. It works tile
    // by tile to be fast; the same in plain loops, with which it is compared, is attention() and attention_backward()
    // in dev/test/oracle.h.
    //   CMP  compressed blocks that end at or before t              keys are blocks, [B, G, NC, D]
    //   SLC  tokens s <= t in the blocks selected for (t, group)    keys [B, G, T, D]
    //   WIN  tokens s in (t-w, t]                                   keys [B, G, T, D]
    // Work is cut into tiles of keys; all query heads of a group share them, so the rows of a tile are (head, token)
    // pairs.

    static int tile_keys(Branch branch, const NsaShape& s) { return branch == SLC ? s.slc_block : TILE_KEYS; }
    static int key_count(Branch branch, const NsaShape& s) {
        return branch == CMP ? s.cmp_blocks(s.first + s.queries) : s.first + s.queries;
    }
    static int key_stride(Branch branch, const NsaShape& s) { return branch == CMP ? s.cmp_capacity() : s.T; }
    static int tile_queries(const NsaShape& s) { return std::max(1, TILE_ROWS / s.heads_per_group()); }

    struct KeyRange {
        int begin, end;
    };
    // The keys of one tile that query t sees (the selection itself is checked by the caller), relative to the tile's
    // first.
    static KeyRange visible_keys(Branch branch, int t, int tile, const NsaShape& s) {
        const int width = tile_keys(branch, s), start = tile * width;
        const int oldest = branch == WIN && !s.full ? t - s.window + 1 : 0,
                  newest = branch == CMP ? s.cmp_blocks(t + 1) - 1 : t;
        const int begin = std::clamp(oldest - start, 0, width);
        return {begin, std::clamp(newest + 1 - start, begin, width)};
    }
    // Does query t see keys of the tile? selected: its bitmask, in the selected branch.
    static bool sees(Branch branch, int t, int tile, const uint32_t* selected, const NsaShape& s) {
        if (branch == SLC && !(selected[tile / 32] >> (tile % 32) & 1)) return false;
        const KeyRange range = visible_keys(branch, t, tile, s);
        return range.begin < range.end;
    }
    // The tiles of keys that any of the queries t0 .. t1-1 may see: first and one past the last.
    static KeyRange tile_range(Branch branch, int t0, int t1, const NsaShape& s) {
        const int width = tile_keys(branch, s), end = branch == CMP ? s.cmp_blocks(t1) : t1;
        return {(branch == WIN && !s.full ? std::max(0, t0 - s.window + 1) : 0) / width, (end + width - 1) / width};
    }
    // The columns of a tile that any of the given queries sees, widened to whole vectors.
    static KeyRange columns_of(Branch branch, const int* tokens, int count, int tile, const NsaShape& s) {
        constexpr int lanes = VectorOf<real>::lanes;
        return {visible_keys(branch, tokens[0], tile, s).begin / lanes * lanes,
                (visible_keys(branch, tokens[count - 1], tile, s).end + lanes - 1) / lanes * lanes};
    }
    // The queries that see a tile of keys, in order. selection: the bitmasks of one (sequence, group), [queries,
    // words].
    static std::vector<int> query_list(Branch branch, int tile, const uint32_t* selection, const NsaShape& s) {
        const int start = tile * tile_keys(branch, s);
        int begin = start, end = s.first + s.queries;
        if (branch == CMP) begin = start * s.d + s.l - 1;
        if (branch == WIN && !s.full) end = std::min(end, start + TILE_KEYS - 1 + s.window);
        std::vector<int> list;
        for (int t = std::max(begin, s.first); t < end; t++)
            if (branch != SLC || (selection[size_t(t - s.first) * s.selection_words() + tile / 32] >> (tile % 32) & 1))
                list.push_back(t);
        return list;
    }

    // The tiles of keys or of values as operands. A tile has `padded` keys,
    // a multiple of the vector's lanes; those that do not exist are 0.
    template <class Element>
    struct Tiles {
        const Element* data;
        size_t group_stride, tile_stride;
        int count, padded;
        const Element* operator()(size_t bg, int tile) const { return data + bg * group_stride + tile * tile_stride; }
    };
    // Those of x [B, G, stride, D]. For products that sum over D: [D / PER][padded], so that the scores of a row with
    // all keys of a tile are vector operations; for products that sum over keys: [padded / PER][D], where reals are
    // read as they are.
    enum SumOver { OVER_D, OVER_KEYS };
    // needed(bg, tile): whether anybody will read that one.
    struct EveryTile {
        bool operator()(int, int) const { return true; }
    };
    template <class Element, class Needed = EveryTile>
    Tiles<Element> operand_tiles(int slot, Branch branch, const real* x, const NsaShape& s, SumOver sum_over,
                                 Needed needed = {}) {
        static_assert(sizeof(Element) == sizeof(real), "they share scratch memory");
        constexpr int per = PER<Element>;
        const int D = s.D, width = tile_keys(branch, s), padded = padded_keys(branch, s), keys = key_count(branch, s),
                  count = (keys + width - 1) / width;
        const size_t group_stride = size_t(key_stride(branch, s)) * D, size = size_t(padded / per) * D;
        if constexpr (per == 1)
            if (sum_over == OVER_KEYS) return {x, group_stride, size_t(width) * D, count, padded};
        Element* const data = reinterpret_cast<Element*>(scratch[slot].get(size * count * s.B * s.G));
#pragma omp parallel
        {
            std::vector<Element> room(size_t(padded) * (D + 16));
#pragma omp for collapse(2) schedule(static)
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int tile = 0; tile < count; tile++) {
                    if (!needed(bg, tile)) continue;
                    const int existing = std::min(width, keys - tile * width);
                    const real* const in = x + bg * group_stride + size_t(tile) * width * D;
                    Element* const out = data + (size_t(bg) * count + tile) * size;
                    if (existing < padded) std::fill_n(out, size, Element{});
                    if (sum_over == OVER_D) pack(out, padded, 1, in, 1, D, D / per, existing, D, room.data());
                    else pack(out, D, 1, in, D, 1, (existing + per - 1) / per, D, existing);
                }
        }
        return {data, size * count, size, count, padded};
    }
    static int padded_keys(Branch branch, const NsaShape& s) {
        constexpr int lanes = VectorOf<real>::lanes;
        return (tile_keys(branch, s) + lanes - 1) / lanes * lanes;
    }
    // f(Element()), with what products take: reals, or pairs of bf16.
    template <class F>
    void with_element(F f) {
        if constexpr (HAVE_BF16 && sizeof(real) == sizeof(float))
            if (gemm.bf16) return f(Bf16Pair());
        f(real());
    }

    // The rows of some tokens: row j*h + i is token j, head i of the group. Copies them from q [B, H, queries, D],
    // scaled.
    static void load_queries(real* rows, const real* q, int b, int g, const int* tokens, int count, const NsaShape& s) {
        const real scale = real(s.scale());
        for (int j = 0; j < count; j++)
            for (int i = 0; i < s.heads_per_group(); i++, rows += s.D) {
                const real* in = q + query_row(b, g, i, tokens[j], s) * s.D;
                for (int x = 0; x < s.D; x++) rows[x] = in[x] * scale;
            }
    }
    // The same rows of a gradient laid out as [B*queries, H*D].
    static void load_dout(real* rows, const real* dout, int b, int g, const int* tokens, int count, const NsaShape& s) {
        const size_t width = size_t(s.heads_per_group()) * s.D;
        for (int j = 0; j < count; j++)
            std::memcpy(rows + j * width, dout + (size_t(b) * s.queries + tokens[j] - s.first) * s.H * s.D + g * width,
                        sizeof(real) * width);
    }
    static void prefetch(const real* x, size_t count) {
        for (size_t i = 0; i < count; i += 64 / sizeof(real)) __builtin_prefetch(x + i);
    }
    static size_t query_row(int b, int g, int head_of_group, int t, const NsaShape& s) {
        return (size_t(b) * s.H + g * s.heads_per_group() + head_of_group) * s.queries + (t - s.first);
    }
    static const uint32_t* selection_of(const uint32_t* selection, int bg, int t, const NsaShape& s) {
        return selection ? selection + (size_t(bg) * s.queries + (t - s.first)) * s.selection_words() : nullptr;
    }

    // out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys; lse [B, H, queries] the natural
    // logarithm of the softmax's denominator. A query without a key: out 0, lse +infinity. Softmax is accumulated tile
    // by tile (Milakov & Gimelshein 2018). Work is shared out by tiles of queries; of those, each run of neighbours
    // that see a tile of keys is one pair of products.
    void attention_forward(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v,
                           const uint32_t* selection, const NsaShape& s) {
        with_element(
            [&](auto element) { attention_forward_in<decltype(element)>(branch, out, lse, q, k, v, selection, s); });
    }
    template <class Element>
    void attention_forward_in(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v,
                              const uint32_t* selection, const NsaShape& s) {
        const int D = s.D, h = s.heads_per_group(), width = tile_keys(branch, s), keys = key_count(branch, s);
        const int step =
            (branch == SLC ? 4 : 1) * tile_queries(s);  // a tile that few of them chose is fetched less often
        constexpr int per = PER<Element>;
        const real infinity = std::numeric_limits<real>::infinity();
        // Decoding has one query, which sees a few of the tiles; the many queries of a sequence see them all.
        const auto needed = [&](int bg, int tile) {
            return s.queries > 1 || sees(branch, s.first, tile, selection_of(selection, bg, s.first, s), s);
        };
        const Tiles<Element> kt = operand_tiles<Element>(0, branch, k, s, OVER_D, needed),
                             vs = operand_tiles<Element>(1, branch, v, s, OVER_KEYS, needed);
#pragma omp parallel
        {
            std::vector<real> rows(size_t(h) * step * D), scores(size_t(h) * step * kt.padded),
                sums(size_t(h) * step * D), largest(h * step), total(h * step);
            std::vector<Element> q_room(rows.size()), p_room(scores.size());
            std::vector<int> tokens(step);
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int t0 = s.first; t0 < s.first + s.queries; t0 += step) {
                    const int b = bg / s.G, g = bg % s.G, count = std::min(step, s.first + s.queries - t0);
                    for (int j = 0; j < count; j++) tokens[j] = t0 + j;
                    load_queries(rows.data(), q, b, g, tokens.data(), count, s);
                    const Element* const q_rows = sum_over_columns(q_room.data(), rows.data(), D, h * count, D);
                    std::fill(sums.begin(), sums.end(), real(0));
                    std::fill(largest.begin(), largest.end(), -infinity);
                    std::fill(total.begin(), total.end(), real(0));
                    auto visible = [&](int j, int tile) {
                        return j < count && sees(branch, t0 + j, tile, selection_of(selection, bg, t0 + j, s), s);
                    };
                    const KeyRange tiles = tile_range(branch, t0, t0 + count, s);
                    for (int tile = tiles.begin; tile < tiles.end; tile++)
                        for (int j = 0, end; j < count; j = end) {
                            for (end = j; visible(end, tile);) end++;
                            if (end == j && ++end) continue;
                            const KeyRange columns = columns_of(branch, &tokens[j], end - j, tile, s);
                            const int n_rows = h * (end - j), n = columns.end - columns.begin,
                                      n_existing = std::min(columns.end, keys - tile * width) - columns.begin;
                            tile_matmul(n_rows, n, D / per, q_rows + size_t(j) * h * D / per, D / per, 1,
                                        kt(bg, tile) + columns.begin, kt.padded, scores.data(), kt.padded, false);
                            for (int r = j * h; r < end * h; r++)
                                softmax_step(&scores[size_t(r - j * h) * kt.padded], columns,
                                             visible_keys(branch, t0 + r / h, tile, s), largest[r], total[r],
                                             &sums[size_t(r) * D], D);
                            const Element* const p =
                                sum_over_columns(p_room.data(), scores.data(), kt.padded, n_rows, n);
                            tile_matmul(n_rows, D, (n_existing + per - 1) / per, p, kt.padded / per, 1,
                                        vs(bg, tile) + size_t(columns.begin) / per * D, D, &sums[size_t(j) * h * D], D,
                                        true);
                        }
                    for (int r = 0; r < h * count; r++) {
                        const size_t row = query_row(b, g, r % h, t0 + r / h, s);
                        const real inverse = total[r] > 0 ? 1 / total[r] : real(0);
                        for (int x = 0; x < D; x++) out[row * D + x] = sums[size_t(r) * D + x] * inverse;
                        lse[row] = total[r] > 0 ? largest[r] + std::log(total[r]) : infinity;
                    }
                }
        }
    }
    // One tile's part of the softmax of a row: p, the scores of `columns`, becomes e^(p - largest) in the visible range
    // and 0 outside, with the largest score so far; total gets their sum, and what was summed under the old maximum is
    // rescaled.
    static void softmax_step(real* p, KeyRange columns, KeyRange visible, real& largest, real& total, real* sums,
                             int D) {
        const int n = columns.end - columns.begin;
        hide(p, n, visible.begin - columns.begin, visible.end - columns.begin);
        real m = largest, sum = 0;
#pragma omp simd reduction(max : m)
        for (int i = 0; i < n; i++) m = p[i] > m ? p[i] : m;
        if (m > largest) {  // at first there is nothing, and e^-inf = 0
            const real rescale = exponential(largest - m);
            total *= rescale;
            for (int x = 0; x < D; x++) sums[x] *= rescale;
            largest = m;
        }
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < n; i++) {
            p[i] = exponential(p[i] - m);
            sum += p[i];
        }
        total += sum;
    }
    // Scores outside [begin, end) become -infinity, whose exponential is 0.
    static void hide(real* p, int n, int begin, int end) {
        for (int i = 0; i < begin; i++) p[i] = -std::numeric_limits<real>::infinity();
        for (int i = end; i < n; i++) p[i] = -std::numeric_limits<real>::infinity();
    }

    // out [B*queries, H*D] = sum over branches of gate * branch output; paper eq. 5. Full attention has one branch, its
    // gate is 1. o [branches, B, H, queries, D], gate [branches, B, H, queries]
    void combine_forward(real* out, const real* o, const Stat* gate, const NsaShape& s) {
        const size_t rows = s.query_rows();
#pragma omp parallel for collapse(2) schedule(static)
        for (int b = 0; b < s.B; b++)
            for (int j = 0; j < s.queries; j++)
                for (int head = 0; head < s.H; head++) {
                    const size_t row = (size_t(b) * s.H + head) * s.queries + j;
                    real* to = out + ((size_t(b) * s.queries + j) * s.H + head) * s.D;
                    for (int x = 0; x < s.D; x++) {
                        real sum = 0;
                        for (int i = 0; i < s.branches(); i++)
                            sum += (s.full ? real(1) : gate[i * rows + row]) * o[(i * rows + row) * s.D + x];
                        to[x] = sum;
                    }
                }
    }
    // What the backward of every branch starts from, per branch and query row, with g = gate and r = dout . o:
    //   row_dot = r     lse_gated = lse - ln(g), so that e^(score - lse_gated) = g * P     dgate_logit = r * g * (1 -
    //   g)
    // So the gate needs no buffers of its own, and the row term of softmax's backward is the gate's gradient.
    void attention_backward_rows(Stat* row_dot, Stat* lse_gated, Stat* dgate_logit, const real* dout, const real* o,
                                 const Stat* gate, const Stat* lse, const NsaShape& s) {
        const size_t rows = s.query_rows();
#pragma omp parallel for collapse(2) schedule(static)
        for (int b = 0; b < s.B; b++)
            for (int head = 0; head < s.H; head++)
                for (int j = 0; j < s.queries; j++)
                    for (int i = 0; i < s.branches(); i++) {
                        const size_t row = i * rows + (size_t(b) * s.H + head) * s.queries + j;
                        const real *d = dout + ((size_t(b) * s.queries + j) * s.H + head) * s.D, *from = o + row * s.D,
                                   g = s.full ? real(1) : gate[row];
                        real r = 0;
#pragma omp simd reduction(+ : r)
                        for (int x = 0; x < s.D; x++) r += d[x] * from[x];
                        row_dot[row] = r;
                        lse_gated[row] = lse[row] - std::log(g);
                        if (!s.full) dgate_logit[row] = r * g * (1 - g);
                    }
    }

    // Gradients of one branch.  P' = e^(S - lse_gated),  dS = P' o (dout v^T - row_dot):
    //   dq [B, H, queries, D] = dS k / sqrt(D), or += with `add`       dk [keys] = dS^T q / sqrt(D)       dv [keys] =
    //   P'^T dout
    // dout [B*queries, H*D]; row_dot, lse_gated [B, H, queries] of this branch. Training shapes.
    // Work is shared out by tiles of keys, each of which has one owner for its dk and dv. Several of them add to a row
    // of dq: in the order of the tiles, so that the sum has one order. A tile follows its predecessor from query to
    // query; progress[tile] says how far it is.
    void attention_backward(Branch branch, Stat* dq, bool add, real* dk, real* dv, const real* dout, const real* q,
                            const real* k, const real* v, const Stat* row_dot, const Stat* lse_gated,
                            const uint32_t* selection, const NsaShape& s) {
        with_element([&](auto element) {
            attention_backward_in<decltype(element)>(branch, dq, add, dk, dv, dout, q, k, v, row_dot, lse_gated,
                                                     selection, s);
        });
    }
    template <class Element>
    void attention_backward_in(Branch branch, Stat* dq, bool add, real* dk, real* dv, const real* dout, const real* q,
                               const real* k, const real* v, const Stat* row_dot, const Stat* lse_gated,
                               const uint32_t* selection, const NsaShape& s) {
        const int D = s.D, h = s.heads_per_group(), width = tile_keys(branch, s), keys = key_count(branch, s),
                  most = tile_queries(s);
        constexpr int per = PER<Element>;
        const Tiles<Element> kt = operand_tiles<Element>(0, branch, k, s, OVER_D),
                             vt = operand_tiles<Element>(1, branch, v, s, OVER_D),
                             ks = operand_tiles<Element>(2, branch, k, s, OVER_KEYS);
        std::vector<std::atomic<int>> progress(size_t(s.B) * s.G * kt.count);  // queries below it are done
        real* const sums = scratch[3].get(s.query_rows() * D);                 // [B, G, T, h, D], dq before the scaling
        zero(sums, s.query_rows() * D);
#pragma omp parallel
        {
            const size_t row_count = size_t(h) * most;
            std::vector<real> rows(row_count * D), drows(row_count * D), p(row_count * kt.padded),
                ds(row_count * kt.padded);
            std::vector<Element> room((row_count + 1) * std::max(D, kt.padded)), second_room(room.size());
#pragma omp for collapse(2) schedule(monotonic : dynamic, 1)
            for (int tile = 0; tile < kt.count; tile++)
                for (int bg = 0; bg < s.B * s.G; bg++) {
                    const int b = bg / s.G, g = bg % s.G, n_keys = std::min(width, keys - tile * width);
                    const size_t at = (size_t(bg) * key_stride(branch, s) + size_t(tile) * width) * D;
                    std::fill_n(dk + at, size_t(n_keys) * D, real(0));
                    std::fill_n(dv + at, size_t(n_keys) * D, real(0));
                    std::atomic<int>& done = progress[size_t(bg) * kt.count + tile];
                    auto follow = [&](int t) {  // waits until the tile before this one is past query t
                        while (tile > 0 &&
                               progress[size_t(bg) * kt.count + tile - 1].load(std::memory_order_acquire) <= t)
                            std::this_thread::yield();
                    };
                    const std::vector<int> list = query_list(branch, tile, selection_of(selection, bg, s.first, s), s);
                    for (size_t i = 0; i < list.size(); i += most) {
                        const int* const tokens = &list[i];
                        const int count = int(std::min<size_t>(most, list.size() - i)), n_rows = h * count;
                        const KeyRange columns = columns_of(branch, tokens, count, tile, s);
                        const int n = columns.end - columns.begin,
                                  n_existing = std::min(columns.end, n_keys) - columns.begin;
                        const size_t first = size_t(columns.begin) * D;
                        load_queries(rows.data(), q, b, g, tokens, count, s);
                        load_dout(drows.data(), dout, b, g, tokens, count, s);
                        const size_t ahead = std::min<size_t>(list.size() - i - count, most);
                        for (size_t j = 0; j < ahead; j++) {  // what the next step reads, into the cache
                            const int t = tokens[count + j];
                            for (int head = 0; head < h; head++) prefetch(q + query_row(b, g, head, t, s) * D, D);
                            prefetch(dout + (size_t(b) * s.queries + t - s.first) * s.H * D + size_t(g) * h * D, h * D);
                            prefetch(sums + (size_t(bg) * s.T + t) * h * D, h * D);
                        }
                        tile_matmul(n_rows, n, D / per, sum_over_columns(room.data(), rows.data(), D, n_rows, D),
                                    D / per, 1, kt(bg, tile) + columns.begin, kt.padded, p.data(), kt.padded,
                                    false);  // S
                        tile_matmul(n_rows, n, D / per, sum_over_columns(room.data(), drows.data(), D, n_rows, D),
                                    D / per, 1, vt(bg, tile) + columns.begin, kt.padded, ds.data(), kt.padded,
                                    false);  // dout v^T
                        for (int r = 0; r < n_rows; r++) {
                            const size_t row = query_row(b, g, r % h, tokens[r / h], s);
                            const KeyRange visible = visible_keys(branch, tokens[r / h], tile, s);
                            real *pr = &p[size_t(r) * kt.padded], *dsr = &ds[size_t(r) * kt.padded];
                            const real shift = lse_gated[row], dot = row_dot[row];
                            hide(pr, n, visible.begin - columns.begin, visible.end - columns.begin);
#pragma omp simd
                            for (int x = 0; x < n; x++) {
                                pr[x] = exponential(pr[x] - shift);
                                dsr[x] = pr[x] * (dsr[x] - dot);
                            }
                        }
                        // dv += P'^T dout, dk += dS^T q / sqrt(D)
                        tile_matmul(n_existing, D, (n_rows + per - 1) / per,
                                    sum_over_rows(room.data(), p.data(), kt.padded, n_rows, n), 1, kt.padded,
                                    sum_over_rows(second_room.data(), drows.data(), D, n_rows, D), D, dv + at + first,
                                    D, true);
                        tile_matmul(n_existing, D, (n_rows + per - 1) / per,
                                    sum_over_rows(room.data(), ds.data(), kt.padded, n_rows, n), 1, kt.padded,
                                    sum_over_rows(second_room.data(), rows.data(), D, n_rows, D), D, dk + at + first, D,
                                    true);
                        const Element* const ds_rows = sum_over_columns(room.data(), ds.data(), kt.padded, n_rows, n);
                        follow(tokens[count - 1]);
                        for (int j = 0, end; j < count;
                             j = end) {  // sums += dS k, runs of neighbouring queries together
                            for (end = j + 1; end < count && tokens[end] == tokens[end - 1] + 1;) end++;
                            tile_matmul((end - j) * h, D, (n_existing + per - 1) / per,
                                        ds_rows + size_t(j) * h * kt.padded / per, kt.padded / per, 1,
                                        ks(bg, tile) + first / per, D, sums + (size_t(bg) * s.T + tokens[j]) * h * D, D,
                                        true);
                        }
                        done.store(tokens[count - 1] + 1, std::memory_order_release);
                    }
                    follow(s.T - 1);
                    done.store(s.T, std::memory_order_release);
                }
#pragma omp for collapse(2) schedule(static)
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int t = 0; t < s.T; t++)
                    for (int head = 0; head < h; head++) {
                        const real* from = sums + ((size_t(bg) * s.T + t) * h + head) * D;
                        real* to = dq + query_row(bg / s.G, bg % s.G, head, t, s) * D;
                        for (int x = 0; x < D; x++) to[x] = (add ? to[x] : real(0)) + from[x] * real(s.scale());
                    }
        }
    }

    // ----- block selection, paper eq. 8 to 12; no gradient.
    // selection [B, G, queries, words]: query t, in block b = t / l', may choose among blocks 0..b. If b + 1 <= n it
    // takes all; otherwise blocks 0, b-1 and b and the n-3 others of the highest importance, equal ones going to the
    // lower index. Importance of block j: over the group's heads and compressed blocks i, softmax weight p * (tokens
    // shared by i and j) / d, where p = e^(score - lse) are the weights of the compressed branch, whose lse [B, H,
    // queries] is known by now. chosen_importance, where given: [B, G, queries] share of the importance that fell on
    // selected blocks, 1 where all were taken.
    void select_blocks(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse,
                       const NsaShape& s) {
        with_element(
            [&](auto element) { select_blocks_in<decltype(element)>(selection, chosen_importance, q, kc, lse, s); });
    }
    template <class Element>
    void select_blocks_in(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse,
                          const NsaShape& s) {
        const int D = s.D, h = s.heads_per_group(), words = s.selection_words(), step = tile_queries(s);
        constexpr int per = PER<Element>;
        const Tiles<Element> kt = operand_tiles<Element>(0, CMP, kc, s, OVER_D);
        const size_t stride = size_t(kt.count) * TILE_KEYS;  // compressed blocks, in whole tiles
#pragma omp parallel
        {
            std::vector<real> rows(size_t(h) * step * D), scores(size_t(h) * step * kt.padded), weight(step * stride),
                importance(s.slc_blocks());
            std::vector<Element> room(rows.size());
            std::vector<int> tokens(step);
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int bg = 0; bg < s.B * s.G; bg++)
                for (int t0 = s.first; t0 < s.first + s.queries; t0 += step) {
                    const int b = bg / s.G, g = bg % s.G, count = std::min(step, s.first + s.queries - t0);
                    for (int j = 0; j < count; j++) tokens[j] = t0 + j;
                    const bool must_choose = (t0 + count - 1) / s.slc_block + 1 > s.slc_count;
                    if (must_choose) {  // weight[j][i] = sum over the group's heads of p[head, t0 + j, i]
                        load_queries(rows.data(), q, b, g, tokens.data(), count, s);
                        const Element* const q_rows = sum_over_columns(room.data(), rows.data(), D, h * count, D);
                        std::fill(weight.begin(), weight.end(), real(0));
                        const KeyRange tiles = tile_range(CMP, t0, t0 + count, s);
                        for (int tile = tiles.begin; tile < tiles.end; tile++) {
                            const KeyRange columns = columns_of(CMP, tokens.data(), count, tile, s);
                            tile_matmul(h * count, columns.end, D / per, q_rows, D / per, 1, kt(bg, tile), kt.padded,
                                        scores.data(), kt.padded, false);
                            for (int r = 0; r < h * count; r++) {
                                real *p = &scores[size_t(r) * kt.padded],
                                     *sum = &weight[r / h * stride + size_t(tile) * TILE_KEYS];
                                const real shift = lse[query_row(b, g, r % h, t0 + r / h, s)];
                                hide(p, columns.end, 0, visible_keys(CMP, t0 + r / h, tile, s).end);
#pragma omp simd
                                for (int key = 0; key < columns.end; key++) sum[key] += exponential(p[key] - shift);
                            }
                        }
                    }
                    for (int j = 0; j < count; j++) {
                        const int t = t0 + j, last = t / s.slc_block;
                        const size_t row = size_t(bg) * s.queries + (t - s.first);
                        uint32_t* mask = selection + row * words;
                        std::fill_n(mask, words, 0u);
                        if (chosen_importance) chosen_importance[row] = 1;
                        if (last + 1 <= s.slc_count) {
                            for (int block = 0; block <= last; block++) mask[block / 32] |= 1u << (block % 32);
                            continue;
                        }
                        fold_importance(importance.data(), &weight[j * stride], t, s);
                        const real share = choose_best(mask, importance.data(), last, s.slc_count);
                        if (chosen_importance) chosen_importance[row] = share;
                    }
                }
        }
    }
    // importance[j], j = 0..t/l', from the weights of the compressed blocks visible to t; paper eq. 9 for any l, d, l'.
    // As printed, eq. 9 adds p[j*l'/d - m - n], which with indices from 0 are compressed blocks before selection block
    // j; meant are those that overlap it. For l, d, l' = 32, 16, 64: importance[j] = p[4j-1] + 2 p[4j] + 2 p[4j+1] + 2
    // p[4j+2] + p[4j+3].
    static void fold_importance(real* importance, const real* weight, int t, const NsaShape& s) {
        const int visible = s.cmp_blocks(t + 1);
        for (int j = 0; j <= t / s.slc_block; j++) {
            const int begin = j * s.slc_block, end = begin + s.slc_block;
            real sum = 0;
            for (int i = std::max(0, (begin - s.l) / s.d); i < visible && i * s.d < end; i++) {
                const int shared = std::min(end, i * s.d + s.l) - std::max(begin, i * s.d);
                if (shared > 0) sum += weight[i] * shared / s.d;
            }
            importance[j] = sum;
        }
    }
    // Sets the bits of blocks 0, last-1, last and of the count-3 best others. Returns the chosen blocks' share of all
    // importance.
    static real choose_best(uint32_t* mask, const real* importance, int last, int count) {
        auto take = [&](int block) { mask[block / 32] |= 1u << (block % 32); };
        auto taken = [&](int block) { return mask[block / 32] >> (block % 32) & 1; };
        take(0), take(last - 1), take(last);
        for (int round = 3; round < count; round++) {
            int best = -1;
            for (int block = 0; block <= last; block++)
                if (!taken(block) && (best < 0 || importance[block] > importance[best])) best = block;
            take(best);
        }
        real chosen = 0, all = 0;
        for (int block = 0; block <= last; block++)
            all += importance[block], chosen += taken(block) ? importance[block] : real(0);
        return all > 0 ? chosen / all : real(1);
    }

  private:
    Workspace<real> scratch[4];
    std::vector<std::vector<double>> sent;

    std::vector<real> rope_cos, rope_sin;  // [positions, D/2]
    int rope_positions = 0, rope_dim = 0;
    void prepare_rope(int positions, int D) {
        if (positions <= rope_positions && D == rope_dim) return;
        rope_positions = positions, rope_dim = D;
        rope_cos.resize(size_t(positions) * (D / 2));
        rope_sin.resize(size_t(positions) * (D / 2));
#pragma omp parallel for schedule(static)
        for (int t = 0; t < positions; t++)
            for (int i = 0; i < D / 2; i++) {
                const double angle = t * std::pow(ROPE_BASE, -2.0 * i / D);
                rope_cos[size_t(t) * (D / 2) + i] = real(std::cos(angle));
                rope_sin[size_t(t) * (D / 2) + i] = real(std::sin(angle));
            }
    }
};
