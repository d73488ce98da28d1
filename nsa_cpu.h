// nsa_cpu.h: struct Cpu, every operation of the model as plain C++: the executable specification. Attention, block
// selection and compression are the loops of the paper's equations (Native Sparse Attention, arXiv 2502.11089) and bear
// their numbers; dev/MODEL.md says the same in one page. lib/model/shape.h names the branches and the shapes.
//
// Cpu<double> runs this file as it stands, and so does the tests' Cpu<Number>, whose numbers carry an error limit.
// Finite differences and the golden values of an independent PyTorch model (dev/reference.py) judge it, and every
// faster version is compared with it: Cpu<float>, which trains, computes compression, attention and selection in
// lib/cpu/attention.h where the processor has vectors, and with this file's loops elsewhere; nsa_kernels.cuh holds the
// GPU's version.
//
// Conventions. Row-major. Outputs come first, gradients start with d. "=" or "+=" in a comment says whether an output
// is overwritten or accumulated. Every sum runs in an order fixed by the shapes, so the threads change no result.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "lib/cpu/attention.h"
#include "lib/cpu/gemm.h"
#include "lib/cpu/optimiser.h"
#include "lib/cpu/runtime.h"
#include "lib/base/profile.h"
#include "lib/model/engine.h"
#include "lib/model/rope.h"
#include "lib/model/shape.h"
#include "lib/base/text.h"
#include "lib/model/visible.h"

// The executable specification of an engine. lib/model/engine.h lists the members that the program calls, with shapes
// and rules; what stands here beside those is how Cpu does it.
template <class real_>
struct Cpu : HostRuntime, HostOptimiser<real_> {
    using real = real_;  // parameters and activations
    using Stat = real_;  // rstd, LSE, gates, losses, the gradient of q, m, v: fp32 on an engine whose real is narrower
    using Grad = real_;  // gradients of parameters
    using Master = real_;  // what the optimiser updates: the parameters themselves here, an fp32 copy elsewhere
    using Sum = double;    // sums over the batch and over all parameters
    static constexpr bool has_master = false;
    void to_host(float* out, const real* in, size_t count) { std::copy_n(in, count, out); }
    void from_host(real* out, const float* in, size_t count) { std::copy_n(in, count, out); }
    Gemm<real> gemm;  // every matrix product but attention's; gemm.bf16 is --cpu-dtype

  private:
    // Cpu<float> trains by lib/cpu/attention.h, wherever in_tiles stands; the loops behind it specify the same.
    static constexpr bool in_tiles = HAVE_VECTORS && std::is_same<real, float>::value;
    TiledAttention tiles;
    RopeTable<real> rope;
    Workspace<real> partial_sums;

    static real dot(const real* a, const real* b, int count) {
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < count; i++) sum += a[i] * b[i];
        return sum;
    }
    // What a matrix product takes of x: x itself or, with --cpu-dtype bf16, the nearest number of that format.
    real operand(real x) const { return gemm.bf16 ? round_to_bf16(x) : x; }

  public:
    void check_shape(const NsaShape&) const {}  // every shape works here
    std::string format() const { return gemm.bf16 ? "bf16" : sizeof(real) == 8 ? "fp64" : "fp32"; }
    double peak_flops() const { return 0; }  // unknown
    std::string describe() const {
        return format_text("CPU, fp%d%s", int(8 * sizeof(real)),
                           !gemm.bf16      ? ""
                           : amx_granted() ? " with the inputs of GEMMs rounded to bf16, by AMX"
                                           : " with the inputs of GEMMs rounded to bf16");
    }
    std::string describe_selected(const NsaShape&) const { return ""; }  // there is one way only

    // ----- embedding.  x = embed[token].  tokens [N], embed [V, C], x [N, C]
    void embedding_forward(real* x, const int32_t* tokens, const real* embed, int N, int C) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) std::memcpy(x + size_t(n) * C, embed + size_t(tokens[n]) * C, sizeof(real) * C);
    }
    // dembed [V, C] += rows of dx [N, C]. Each thread takes some columns, so that every sum runs in token order.
    void embedding_backward(Grad* dembed, const real* dx, const int32_t* tokens, int N, int C) {
#pragma omp parallel for schedule(static)
        for (int c0 = 0; c0 < C; c0 += 64)
            for (int n = 0; n < N; n++)
#pragma omp simd
                for (int c = c0; c < std::min(C, c0 + 64); c++)
                    dembed[size_t(tokens[n]) * C + c] += dx[size_t(n) * C + c];
    }

    // ----- smear.  x[t] += g[t] * (w.scale o e[t-1]) with e = embed[token], g[t] = sigmoid(w.gate . e[t]); position 0
    // stays. tokens [B, queries]; where s.first > 0, B is 1 and tokens[-1] is the token before.
    void smear_forward(real* x, const int32_t* tokens, const real* embed, const SmearOf<real>& w, const NsaShape& s,
                       int C) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < s.B * s.queries; n++) {
            if (s.first + n % s.queries == 0) continue;
            const real *e = embed + size_t(tokens[n]) * C, *before = embed + size_t(tokens[n - 1]) * C;
            const real g = sigmoid(dot(w.gate, e, C));
            for (int c = 0; c < C; c++) x[size_t(n) * C + c] += g * w.scale[c] * before[c];
        }
    }
    // With dz[t] = g[t] (1 - g[t]) * sum of dx[t] o scale o e[t-1], g and dz 0 at position 0, and sums over t:
    //     de[t] = dx[t] + dz[t] gate + g[t+1] scale o dx[t+1];  dgate += dz[t] e[t];  dscale += g[t] dx[t] o e[t-1]
    void smear_backward(real* de, const SmearOf<Grad>& dw, const real* dx, const int32_t* tokens, const real* embed,
                        const SmearOf<real>& w, const NsaShape& s, int C) {
        const int N = s.B * s.T;
        real *const g = partial_sums.get(2 * size_t(N)), *const dz = g + N;
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) {
            g[n] = dz[n] = 0;
            if (n % s.T == 0) continue;
            g[n] = sigmoid(dot(w.gate, embed + size_t(tokens[n]) * C, C));
            const real *before = embed + size_t(tokens[n - 1]) * C, *drow = dx + size_t(n) * C;
            for (int c = 0; c < C; c++) dz[n] += drow[c] * w.scale[c] * before[c];
            dz[n] *= g[n] * (1 - g[n]);
        }
#pragma omp parallel for schedule(static)
        for (int c0 = 0; c0 < C; c0 += 64)
            for (int n = 0; n < N; n++) {
                const real *e = embed + size_t(tokens[n]) * C, *before = embed + size_t(tokens[n > 0 ? n - 1 : 0]) * C,
                           *drow = dx + size_t(n) * C, *next = dx + size_t(n + 1 < N ? n + 1 : n) * C;
                const real g_next = n + 1 < N ? g[n + 1] : 0;
                for (int c = c0; c < std::min(C, c0 + 64); c++) {
                    de[size_t(n) * C + c] = drow[c] + dz[n] * w.gate[c] + g_next * w.scale[c] * next[c];
                    dw.gate[c] += dz[n] * e[c];
                    dw.scale[c] += g[n] * drow[c] * before[c];
                }
            }
    }

    // ----- RMSNorm.  out = x * rstd * weight,  rstd = 1/sqrt(mean(x^2) + eps).  x, out [N, C], rstd [N], weight [C]
    void rmsnorm_forward(real* out, Stat* rstd, const real* x, const real* weight, int N, int C) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) {
            const real* row = x + size_t(n) * C;
            const real s = rstd[n] = rstd_of(row, C);
            for (int c = 0; c < C; c++) out[size_t(n) * C + c] = row[c] * s * weight[c];
        }
    }
    static real rstd_of(const real* row, int C) {
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += row[c] * row[c];
        return 1 / std::sqrt(sum / C + real(NORM_EPS));
    }
    // dx += rstd * (g - x * rstd^2 * mean(g * x)) with g = dout * weight;  dweight += sum over rows of dout * x * rstd
    void rmsnorm_backward(real* dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd,
                          const real* weight, int N, int C) {
        constexpr int ROWS = 64;  // dweight is summed over parts of so many rows first, so that each row is read once
        const int parts = (N + ROWS - 1) / ROWS;
        real* const partial = partial_sums.get(size_t(parts) * C);
#pragma omp parallel for schedule(static)
        for (int part = 0; part < parts; part++) {
            real* const sums = partial + size_t(part) * C;
            std::fill_n(sums, C, real(0));
            for (int n = part * ROWS; n < std::min(N, (part + 1) * ROWS); n++) {
                const real *row = x + size_t(n) * C, *drow = dout + size_t(n) * C;
                real* to = dx + size_t(n) * C;
                const real s = rstd[n], correction = correction_of(drow, row, s, weight, C);
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
    static real correction_of(const real* dout, const real* x, real rstd, const real* weight, int C) {
        real dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int c = 0; c < C; c++) dot += dout[c] * weight[c] * x[c];
        return dot * rstd * rstd / C;
    }

    // ----- linear layers.  out [N, OC] = inp [N, C] weight^T  (+ residual [N, OC], if given).  weight [OC, C]
    void matmul_forward(real* out, const real* inp, const real* weight, const real* residual, int N, int C, int OC) {
        if (residual) copy(out, residual, size_t(N) * OC);
        gemm.nt({N, OC, C}, inp, C, weight, C, residual != nullptr, out, OC);
    }
    // dinp [N, C] = dout [N, OC] weight
    void matmul_backward_input(real* dinp, const real* dout, const real* weight, int N, int C, int OC) {
        gemm.nn({N, C, OC}, dout, OC, weight, C, false, dinp, C);
    }
    // dweight [OC, C] += dout^T inp
    void matmul_backward_weight(Grad* dweight, const real* dout, const real* inp, int N, int C, int OC) {
        gemm.tn({OC, C, N}, dout, OC, inp, C, true, dweight, C);
    }

    // ----- SiLU, elementwise: x * sigmoid(x). NaN stays NaN.
    void silu_forward(real* out, const real* x, size_t count) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) out[i] = x[i] * sigmoid(x[i]);
    }
    // dx = dout * s * (1 + x * (1 - s)), s = sigmoid(x); dx may be dout
    void silu_backward(real* dx, const real* dout, const real* x, size_t count) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < count; i++) {
            const real s = sigmoid(x[i]);
            dx[i] = dout[i] * (s * (1 + x[i] * (1 - s)));
        }
    }

    // ----- classifier.  losses [N] = cross-entropy of logits [N, Vp] against targets [N]; columns V..Vp-1 are padding.
    // With want_gradient, logits become dlogits = (softmax - onehot) * dloss in place, 0 in the padding.
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

    // ----- optimiser. Sums, AdamW and Muon are in lib/cpu/optimiser.h; these are Muon's products.
    // out [M, N] = x [M, K] y (+ beta * addend), for `count` matrices; y [K, N] or, if transposed, [N, K]^T
    void muon_product(real* out, const real* x, const real* y, bool transposed, const real* addend, double beta,
                      int count, int M, int N, int K) {
        const size_t size = size_t(M) * N;
        for (size_t k = 0; k < size_t(count); k++, out += size) {
#pragma omp parallel for simd schedule(static) if (size > FEW)
            for (size_t i = 0; i < (addend ? size : 0); i++) out[i] = real(beta) * addend[k * size + i];
            const real* const a = x + k * M * K;
            const real* const b = y + k * N * K;
            if (transposed) gemm.nt({M, N, K}, a, K, b, K, addend != nullptr, out, N);
            else gemm.nn({M, N, K}, a, K, b, N, addend != nullptr, out, N);
        }
    }

    // ----- heads.  A row of `projected` [B*queries, P] is  q | keys and values, by HeadSlot | gate logits | padding
    struct Heads {
        real* q;               // [B, H, queries, D], rotated
        real* kv[HEAD_SLOTS];  // [B, G, T, D] each, rotated where is_rotated(slot)
        Stat* gate;            // [branches, B, H, queries], after the sigmoid
    };
    using HeadGradients = Heads;                                                 // gate is the gradient of its logit
    static bool is_rotated(int slot) { return slot == K_SLC || slot == K_WIN; }  // not k_cmp: its compressed blocks are

    // RoPE of one head (Su et al. 2021), halves convention: element i is paired with i + D/2, and the angle is position
    // * base^(-2i/D). direction -1 turns back, which is the rotation's transpose and so its gradient. out may be in.
    void rotate(real* out, const real* in, int position, int D, int direction) const {
        const real *c = &rope.cosine[size_t(position) * (D / 2)], *s = &rope.sine[size_t(position) * (D / 2)];
        for (int i = 0; i < D / 2; i++) {
            const real a = in[i], b = in[i + D / 2], sine = direction > 0 ? s[i] : -s[i];
            out[i] = a * c[i] - b * sine;
            out[i + D / 2] = a * sine + b * c[i];
        }
    }

    // out [D] = a head x [D]: normed if there is a gain, and rotated if it has a position
    void place_head(real* out, const real* x, const real* gain, bool rotated, int position, int D) const {
        if (gain) {
            const real rstd = rstd_of(x, D);
            for (int i = 0; i < D; i++) out[i] = x[i] * rstd * gain[i];
            x = out;
        }
        if (rotated) rotate(out, x, position, D, +1);
        else if (!gain) std::copy_n(x, D, out);
    }
    // x = its gradient, dgain +=, from dout [D], which may not be written; turned [D] is scratch memory
    void place_head_backward(real* x, real* dgain, const real* dout, const real* gain, bool rotated, int position,
                             int D, real* turned) const {
        real* const to = gain ? turned : x;
        if (rotated) rotate(to, dout, position, D, -1);
        else std::copy_n(dout, D, to);
        if (!gain) return;
        const real rstd = rstd_of(x, D), correction = correction_of(turned, x, rstd, gain, D);
        for (int i = 0; i < D; i++) {
            dgain[i] += turned[i] * x[i] * rstd;
            x[i] = rstd * (turned[i] * gain[i] - x[i] * correction);
        }
    }
    // heads = projected, split up; queries and keys normed if there are gains, and rotated, gates through the sigmoid
    void split_heads_forward(Heads out, const real* projected, const real* gains, const NsaShape& s) {
        rope.prepare(s);
        const int P = s.projected(), D = s.D;
#pragma omp parallel for collapse(2) schedule(static)
        for (int b = 0; b < s.B; b++)
            for (int t = s.first; t < s.first + s.queries; t++) {
                const real* in = projected + (size_t(b) * s.queries + t - s.first) * P;
                for (int head = b * s.H; head < (b + 1) * s.H; head++, in += D)
                    place_head(out.q + s.query_row(head, t) * D, in, gains, true, t, D);
                for (int slot = s.first_slot(); slot < HEAD_SLOTS; slot++)
                    for (int g = 0; g < s.G; g++, in += D) {
                        real* row = out.kv[slot] + ((size_t(b) * s.G + g) * s.T + t) * D;
                        place_head(row, in, s.gain_of(gains, slot), is_rotated(slot), t, D);
                    }
                for (int head = 0; !s.window_only && head < s.H; head++)
                    for (int branch = 0; branch < BRANCHES; branch++)
                        out.gate[branch * s.query_rows() + s.query_row(b * s.H + head, t)] =
                            s.left_out >> branch & 1 ? 0 : sigmoid(in[s.gate_logit(head, branch)]);
            }
    }
    // dprojected = the heads' gradients, turned back and merged; 0 in the padding. With gains it holds what was
    // projected until then, and dgains +=. Training shapes: (0, T).
    void split_heads_backward(real* dprojected, Grad* dgains, HeadGradients d, const real* gains, const NsaShape& s) {
        rope.prepare(s);
        constexpr int ROWS = 64;  // dgains is summed over parts of so many tokens first
        const int P = s.projected(), D = s.D, N = s.B * s.T, parts = (N + ROWS - 1) / ROWS;
        const size_t width = gains ? size_t(s.gain_rows()) * D : 0;
        real* const partial = partial_sums.get(parts * width);
#pragma omp parallel for schedule(static)
        for (int part = 0; part < parts; part++) {
            real* const sums = gains ? partial + part * width : nullptr;
            std::fill_n(sums, width, real(0));
            std::vector<real> turned(static_cast<size_t>(D));
            for (int n = part * ROWS; n < std::min(N, (part + 1) * ROWS); n++) {
                const int b = n / s.T, t = n % s.T;
                real* out = dprojected + size_t(n) * P;
                for (int head = b * s.H; head < (b + 1) * s.H; head++, out += D)
                    place_head_backward(out, sums, d.q + s.query_row(head, t) * D, gains, true, t, D, turned.data());
                for (int slot = s.first_slot(); slot < HEAD_SLOTS; slot++)
                    for (int g = 0; g < s.G; g++, out += D) {
                        const real* dout = d.kv[slot] + ((size_t(b) * s.G + g) * s.T + t) * D;
                        place_head_backward(out, s.gain_of(sums, slot), dout, s.gain_of(gains, slot), is_rotated(slot),
                                            t, D, turned.data());
                    }
                for (int head = 0; !s.window_only && head < s.H; head++)
                    for (int branch = 0; branch < BRANCHES; branch++)
                        out[s.gate_logit(head, branch)] =
                            d.gate[branch * s.query_rows() + s.query_row(b * s.H + head, t)];
                for (int i = s.gate_logits(); i < s.gate_columns(); i++) out[i] = 0;
            }
        }
        for (int part = 0; part < parts; part++)
            for (size_t i = 0; i < width; i++) dgains[i] += partial[part * width + i];
    }

    // ----- compression, paper eq. 7: a learnable phi makes one key or value of l neighbouring ones.
    //     phi(X_i) = mean over the l rows + fc2 silu(fc1 X_i + bias),  X_i = tokens i*d .. i*d + l - 1, flattened
    using Phi = PhiOf<real>;
    using Phis = PhisOf<real>;
    using PhiGradients = PhisOf<Grad>;
    // out = the compressed keys [B, G, NC, D] and values, the same, of k and v [B, G, T, D]; hidden [2, B, G, NC, F],
    // the values before the SiLU, is for the backward pass.
    void compress_forward(real* out, real* hidden, const real* k, const real* v, const Phis& phi, const NsaShape& s) {
        const ProfileRange range("compression");
        const size_t rows = s.cmp_rows();
        compress_heads(out, hidden, k, phi.k, true, s);
        compress_heads(out + rows * s.D, hidden + rows * s.F, v, phi.v, false, s);
    }
    // One of the two; keys are rotated to position i*d. Computes the blocks that end inside this call's positions.
    void compress_heads(real* out, real* hidden, const real* k, const Phi& phi, bool rotated, const NsaShape& s) {
        if (rotated) rope.prepare(s);
        if constexpr (in_tiles) tiles.compress_forward(gemm, out, hidden, k, phi, s);
        if (in_tiles && !rotated) return;
#pragma omp parallel for schedule(static)
        for (size_t group = 0; group < size_t(s.B) * s.G; group++)
            for (int i = s.cmp_blocks(s.first); i < s.cmp_blocks(s.first + s.queries); i++) {
                const size_t row = group * s.cmp_capacity() + i;
                if constexpr (!in_tiles)
                    compress_block(out + row * s.D, hidden + row * s.F, k + (group * s.T + i * s.d) * s.D, phi, s);
                if (rotated) rotate(out + row * s.D, out + row * s.D, i * s.d, s.D, +1);
            }
    }
    // out [D] = phi(X), hidden [F]. X [l, D]
    void compress_block(real* out, real* hidden, const real* X, const Phi& phi, const NsaShape& s) const {
        for (int x = 0; x < s.D; x++) {
            real sum = 0;
            for (int row = 0; row < s.l; row++) sum += X[row * s.D + x];
            out[x] = sum / s.l;
        }
        for (int f = 0; f < s.F; f++) {
            real sum = phi.bias[f];
            for (int m = 0; m < s.l * s.D; m++) sum += operand(phi.fc1[size_t(f) * s.l * s.D + m]) * operand(X[m]);
            hidden[f] = sum;
            const real active = sum * sigmoid(sum);
            for (int x = 0; x < s.D; x++) out[x] += operand(phi.fc2[size_t(x) * s.F + f]) * operand(active);
        }
    }
    // dk and dv =, dphi +=, from dout, whose keys are turned back in place. Training shapes.
    void compress_backward(real* dk, real* dv, const PhiGradients& dphi, real* dout, const real* hidden, const real* k,
                           const real* v, const Phis& phi, const NsaShape& s) {
        const ProfileRange range("compression");
        const size_t rows = s.cmp_rows();
        compress_heads_backward(dk, dphi.k, dout, hidden, k, phi.k, true, s);
        compress_heads_backward(dv, dphi.v, dout + rows * s.D, hidden + rows * s.F, v, phi.v, false, s);
    }
    void compress_heads_backward(real* dk, const PhiOf<Grad>& dphi, real* dout, const real* hidden, const real* k,
                                 const Phi& phi, bool rotated, const NsaShape& s) {
        if (rotated) rope.prepare(s);
        const int NC = s.cmp_capacity();
        for (size_t row = 0; rotated && row < s.cmp_rows(); row++)
            rotate(dout + row * s.D, dout + row * s.D, int(row % NC) * s.d, s.D, -1);
        if constexpr (in_tiles) return tiles.compress_backward(gemm, dk, dphi, dout, hidden, k, phi, s);
        zero(dk, s.key_rows() * s.D);
        for (size_t row = 0; row < s.cmp_rows(); row++) {  // in order: blocks share phi, and neighbours share tokens
            const size_t at = (row / NC * s.T + row % NC * s.d) * s.D;
            compress_block_backward(dk + at, dphi, dout + row * s.D, hidden + row * s.F, k + at, phi, s);
        }
    }
    // dX [l, D] +=, dphi +=, from dout [D] and hidden [F]
    void compress_block_backward(real* dX, const PhiOf<Grad>& dphi, const real* dout, const real* hidden, const real* X,
                                 const Phi& phi, const NsaShape& s) const {
        const int width = s.l * s.D;
        for (int m = 0; m < width; m++) dX[m] += dout[m % s.D] / s.l;  // the mean
        for (int f = 0; f < s.F; f++) {
            const real sig = sigmoid(hidden[f]), active = hidden[f] * sig;
            real dactive = 0;
            for (int x = 0; x < s.D; x++) {
                dphi.fc2[size_t(x) * s.F + f] += operand(dout[x]) * operand(active);
                dactive += operand(dout[x]) * operand(phi.fc2[size_t(x) * s.F + f]);
            }
            const real dhidden = dactive * (sig * (1 + hidden[f] * (1 - sig)));  // through the SiLU
            dphi.bias[f] += dhidden;
            for (int m = 0; m < width; m++) {
                dphi.fc1[size_t(f) * width + m] += operand(dhidden) * operand(X[m]);
                dX[m] += operand(dhidden) * operand(phi.fc1[size_t(f) * width + m]);
            }
        }
    }

    // ----- attention. One source for the three branches: they differ only in the keys that a query sees, see
    // lib/model/visible.h. Keys and values are [B, G, T, D], in the compressed branch [B, G, NC, D].
    // The keys that query t sees, oldest first. selected: the bitmask of (t, group), in the selected branch.
    static std::vector<int> visible_keys(Branch branch, int t, const uint32_t* selected, const NsaShape& s) {
        std::vector<int> keys;
        for (int i = 0; i < range_count(branch, t, s); i++) {
            const KeyRange range = key_range(branch, i, t, selected, s);
            for (int key = range.begin; key < range.end; key++) keys.push_back(key);
        }
        return keys;
    }

    // out [B, H, queries, D] = softmax(q k^T / sqrt(D)) v over the branch's keys, the Attn(q, K, V) of paper eq. 5.
    // lse [B, H, queries] = ln of the softmax's denominator. A query without a key: out 0, lse +infinity.
    void attention_forward(Branch branch, real* out, Stat* lse, const real* q, const real* k, const real* v,
                           const uint32_t* selection, const NsaShape& s) {
        const ProfileRange range(ATTENTION_NAMES[branch]);
        if constexpr (in_tiles) return tiles.attention_forward(gemm.bf16, branch, out, lse, q, k, v, selection, s);
        const size_t h = size_t(s.heads_per_group());
#pragma omp parallel for schedule(static)
        for (size_t group = 0; group < size_t(s.B) * s.G; group++) {
            const size_t keys_at = group * s.key_stride(branch);
            for (int t = s.first; t < s.first + s.queries; t++) {
                const std::vector<int> keys = visible_keys(branch, t, s.selection_mask(selection, group, t), s);
                for (size_t head = group * h; head < (group + 1) * h; head++) {
                    const size_t row = s.query_row(head, t);
                    attend(out + row * s.D, lse[row], q + row * s.D, k + keys_at * s.D, v + keys_at * s.D, keys, s);
                }
            }
        }
    }
    // One query and head: out [D], q [D]; k, v: the rows of the group.
    void attend(real* out, Stat& lse, const real* q, const real* k, const real* v, const std::vector<int>& keys,
                const NsaShape& s) const {
        const int D = s.D;
        std::fill_n(out, D, real(0));
        lse = std::numeric_limits<double>::infinity();
        if (keys.empty()) return;
        std::vector<real> p;
        for (int key : keys) p.push_back(score(q, k + size_t(key) * s.D, s));
        double largest = double(p[0]);  // subtracting it changes no softmax, and keeps e^x finite
        for (const real& x : p) largest = std::max(largest, double(x));
        real total = 0;
        for (real& x : p) total += x = exponential(x - real(largest));
        for (size_t i = 0; i < keys.size(); i++)
            for (int x = 0; x < D; x++) out[x] += operand(p[i]) * operand(v[size_t(keys[i]) * D + x]);
        for (int x = 0; x < D; x++) out[x] = out[x] / total;
        using std::log;
        lse = log(total) + real(largest);
    }
    // q . k / sqrt(D)
    real score(const real* q, const real* k, const NsaShape& s) const {
        const real scale = real(s.scale());
        real sum = 0;
        for (int x = 0; x < s.D; x++) sum += operand(q[x] * scale) * operand(k[x]);
        return sum;
    }

    // out [B*queries, H*D] = sum over branches of gate * branch output; paper eq. 5. Full attention has one branch,
    // and its gate is 1. o [branches, B, H, queries, D], gate [branches, B, H, queries]
    void combine_forward(real* out, const real* o, const Stat* gate, const NsaShape& s) {
        const size_t rows = s.query_rows(), D = size_t(s.D);
#pragma omp parallel for collapse(2) schedule(static)
        for (int head = 0; head < s.B * s.H; head++)
            for (int t = s.first; t < s.first + s.queries; t++) {
                const size_t row = s.query_row(head, t);
                real* const sum = out + s.output_row(head, t) * D;
                std::fill_n(sum, D, real(0));
                for (int i = 0; i < s.branches(); i++) {
                    const real g = s.window_only ? real(1) : gate[i * rows + row];
#pragma omp simd
                    for (size_t x = 0; x < D; x++) sum[x] += g * o[(i * rows + row) * D + x];
                }
            }
    }
    // What the backward pass of every branch starts from, per branch and query row, with g = gate and r = dout . o:
    //     row_dot = r,   lse_gated = lse - ln(g), so that e^(score - lse_gated) = g P,   dgate_logit = r g (1 - g)
    // So the gate needs no buffers of its own, and the row term of softmax's backward is the gate's gradient.
    void attention_backward_rows(Stat* row_dot, Stat* lse_gated, Stat* dgate_logit, const real* dout, const real* o,
                                 const Stat* gate, const Stat* lse, const NsaShape& s) {
#pragma omp parallel for collapse(2) schedule(static)
        for (int head = 0; head < s.B * s.H; head++)
            for (int t = s.first; t < s.first + s.queries; t++)
                for (int i = 0; i < s.branches(); i++) {
                    const size_t row = i * s.query_rows() + s.query_row(head, t);
                    const size_t D = size_t(s.D);
                    const real *d = dout + s.output_row(head, t) * D, *from = o + row * D,
                               g = s.window_only ? real(1) : gate[row];
                    real r = 0;
#pragma omp simd reduction(+ : r)
                    for (size_t x = 0; x < D; x++) r += d[x] * from[x];
                    row_dot[row] = r;
                    lse_gated[row] = lse[row] - std::log(g);
                    if (!s.window_only) dgate_logit[row] = r * g * (1 - g);
                }
    }

    // Gradients of one branch, from those rows.  P' = e^(S - lse_gated) = g P,  dS = P' o (dout v^T - row_dot):
    //     dq = dS k / sqrt(D), or += with `add`;  dk = dS^T q / sqrt(D);  dv = P'^T dout
    // Training shapes.
    void attention_backward(Branch branch, const BackwardArrays<real, Stat>& d, const InputArrays<real>& in,
                            const NsaShape& s) {
        const ProfileRange range(ATTENTION_NAMES[branch]);
        if constexpr (in_tiles) return tiles.attention_backward(gemm.bf16, branch, d, in, s);
        const size_t D = size_t(s.D), h = size_t(s.heads_per_group());
        const real scale = real(s.scale());
#pragma omp parallel for schedule(static)
        for (size_t group = 0; group < size_t(s.B) * s.G; group++) {
            const size_t keys_at = group * s.key_stride(branch);
            std::fill_n(d.dk + keys_at * D, s.key_count(branch) * D, real(0));
            std::fill_n(d.dv + keys_at * D, s.key_count(branch) * D, real(0));
            for (int t = s.first; t < s.first + s.queries; t++) {
                const std::vector<int> keys = visible_keys(branch, t, s.selection_mask(in.selection, group, t), s);
                for (size_t head = group * h; head < (group + 1) * h; head++) {
                    const size_t row = s.query_row(head, t);
                    const real *qr = in.q + row * D, *dO = d.dout + s.output_row(head, t) * D;
                    if (!d.add) std::fill_n(d.dq + row * D, D, real(0));
                    for (int key : keys) {
                        const size_t at = (keys_at + key) * D;
                        const real P = exponential(score(qr, in.k + at, s) - d.lse_gated[row]);  // P', which is g P
                        real dP = 0;
                        for (size_t x = 0; x < D; x++) dP += operand(dO[x]) * operand(in.v[at + x]);
                        const real dS = P * (dP - d.row_dot[row]);
                        for (size_t x = 0; x < D; x++) {
                            d.dq[row * D + x] += operand(dS) * operand(in.k[at + x]) * scale;
                            d.dk[at + x] += operand(dS) * operand(qr[x] * scale);
                            d.dv[at + x] += operand(P) * operand(dO[x]);
                        }
                    }
                }
            }
        }
    }

    // The gradients of all branches of a layer.
    bool wants_dq(const NsaShape&) const { return true; }
    void branches_backward(const LayerGradients<real, Stat>& d, const LayerInputs<real, Stat>& in, const NsaShape& s) {
        backward_by_branches(*this, d, in, s);
    }

    // ----- block selection, paper eq. 8 to 12; no gradient flows through it.
    // selection [B, G, queries, words]: query t, in block b = t / l', may choose among blocks 0..b. If b + 1 <= n it
    // takes them all; otherwise blocks 0, b-1 and b, and the n-3 most important others. All heads of a group share one
    // set. lse [B, H, queries] is the compressed branch's. chosen_importance [B, G, queries], if given, is the share of
    // the importance that fell on the chosen blocks, 1 where all were taken.
    void select_blocks(uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc, const Stat* lse,
                       const NsaShape& s) {
        const ProfileRange range("selection");
#pragma omp parallel for schedule(static)
        for (size_t group = 0; group < size_t(s.B) * s.G; group++) {
            std::vector<real> importance(s.slc_blocks());
            for (int t = s.first; t < s.first + s.queries; t++) {
                const size_t row = group * s.queries + t - s.first, at = s.query_row(group * s.heads_per_group(), t);
                block_importance(importance.data(), q + at * s.D, lse + at, kc + group * s.cmp_capacity() * s.D, t, s);
                const real share = choose_blocks(selection + row * s.selection_words(), importance.data(), t, s);
                if (chosen_importance) chosen_importance[row] = share;
            }
        }
    }
    // attention_forward of the compressed branch and, unless selection is null, select_blocks
    void attend_and_select(real* out, Stat* lse, uint32_t* selection, Stat* chosen_importance, const real* q,
                           const real* kc, const real* vc, const NsaShape& s) {
        const ProfileRange range(ATTENTION_NAMES[CMP]);
        if constexpr (in_tiles)
            return tiles.attend_and_select(gemm.bf16, out, lse, selection, chosen_importance, q, kc, vc, s);
        attention_forward(CMP, out, lse, q, kc, vc, nullptr, s);
        if (selection) select_blocks(selection, chosen_importance, q, kc, lse, s);
    }
    // attention_forward of the other branches, and combine_forward
    void attend_and_combine(const LayerOutputs<real, Stat>& out, const LayerInputs<real, Stat>& in, const NsaShape& s) {
        combine_by_branches(*this, out, in, s);
    }
    // importance [t/l' + 1] of the selection blocks for query t and a group. q, lse: the row of the group's first head;
    // the other heads' follow, `queries` rows apart. kc: the group's compressed keys.
    void block_importance(real* importance, const real* q, const Stat* lse, const real* kc, int t,
                          const NsaShape& s) const {
        std::vector<real> p(s.cmp_blocks(t + 1), real(0));
        for (size_t i = 0; i < p.size(); i++)
            for (size_t row = 0; row < size_t(s.heads_per_group()) * s.queries; row += s.queries)
                p[i] += exponential(score(q + row * s.D, kc + i * s.D, s) - lse[row]);  // eq. 8, summed as eq. 10 says
        fold_importance(importance, p.data(), t, s);
    }
    // Paper eq. 9 for any l, d and l': a compressed block counts for a selection block by the tokens they share, in
    // units of d. As printed, with indices from 0, eq. 9 adds p[j*l'/d - m - n], l'/d - 1 compressed blocks too early;
    // those that overlap selection block j are meant. For l, d, l' = 32, 16, 64 it is
    //     importance[j] = p[4j-1] + 2 p[4j] + 2 p[4j+1] + 2 p[4j+2] + p[4j+3]
    static void fold_importance(real* importance, const real* p, int t, const NsaShape& s) {
        std::fill_n(importance, t / s.slc_block + 1, real(0));
        for (int i = 0; i < s.cmp_blocks(t + 1); i++) {
            const int begin = i * s.d, end = begin + s.l;
            for (int j = begin / s.slc_block; j <= (end - 1) / s.slc_block; j++) {
                const int shared = std::min(end, (j + 1) * s.slc_block) - std::max(begin, j * s.slc_block);
                importance[j] += p[i] * shared / s.d;
            }
        }
    }
    // Paper eq. 11 and 12: mask = the chosen blocks of query t; of equally important ones the lower index wins. Returns
    // the chosen blocks' share of the importance.
    static real choose_blocks(uint32_t* mask, const real* importance, int t, const NsaShape& s) {
        const int last = t / s.slc_block;
        std::fill_n(mask, s.selection_words(), 0u);
        for (const int forced : {0, std::max(last - 1, 0), last}) select_block(mask, forced);
        for (int taken = 3; taken < std::min(s.slc_count, last + 1); taken++) {
            int best = -1;
            for (int block = 0; block <= last; block++)
                if (!is_selected(mask, block) && (best < 0 || importance[block] > importance[best])) best = block;
            select_block(mask, best);
        }
        real chosen = 0, all = 0;
        for (int block = 0; block <= last; block++) {
            all += importance[block];
            chosen += is_selected(mask, block) ? importance[block] : real(0);
        }
        return all > real(0) ? chosen / all : real(1);
    }
};
static_assert(is_engine<Cpu<float>> && is_engine<Cpu<double>>);
