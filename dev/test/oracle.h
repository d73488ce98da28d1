// oracle.h: what the operations' tests lean on. Naive oracles written from the specification alone, as plain loops over
// tokens in double precision; buffers with guard zones; comparisons that name the worst element; random inputs; finite
// differences.
//
// No oracle calls an operation of an engine. What they take from nsa_cpu.h are the names of the shapes (fields of
// NsaShape, never its functions) and of the branches.
//
// The error limits are not chosen, they are derived, term by term, by the type Number: a value in fp64 together with
// the error that an engine which computes in `real` may have made in it. Every oracle is written in Numbers, so each
// expected element brings its own limit.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../../nsa_cpu.h"
#include "harness.h"

// ---------------------------------------------------------------------------------------------------------------------
// Random inputs.

struct Random {
    uint64_t stream, counter = 0;
    explicit Random(uint64_t index) : stream(random_stream(RANDOM_TEST, index)) {}
    double normal() { return random_normal(20250216, stream, counter++); }
    int below(int n) { return int(random_below(uint64_t(n), 20250216, stream, counter++)); }
};
template <class T>
void fill_normal(T* x, size_t count, Random& random, double scale = 1) {
    for (size_t i = 0; i < count; i++) x[i] = T(scale * random.normal());
}

// ---------------------------------------------------------------------------------------------------------------------
// Buffers. `count` elements between two guard zones. All of it is NaN at first (elements: all bits set; guards: their
// own pattern, which is NaN as fp32 and as fp64), so that reading what was never written, or reading outside, shows in
// the result. The data are not aligned beyond their element, as slices of a parameter buffer need not be. The guards
// are checked at destruction or by check().

template <class T>
class Buffer {
  public:
    explicit Buffer(size_t count = 0, const char* name = "buffer") : name(name), elements(count) {
        bytes.resize(2 * GUARD + 64 + sizeof(T) + count * sizeof(T));
        const size_t address = reinterpret_cast<size_t>(bytes.data()) + GUARD;
        start = (address + 63) / 64 * 64 - address + GUARD + sizeof(T);
        for (size_t i = 0; i < GUARD; i += 4)
            std::memcpy(front() + i, &PATTERN, 4), std::memcpy(back() + i, &PATTERN, 4);
        poison();
    }
    Buffer(Buffer&&) = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { check(); }

    operator T*() { return data(); }
    operator const T*() const { return data(); }
    T* data() { return reinterpret_cast<T*>(bytes.data() + start); }
    const T* data() const { return reinterpret_cast<const T*>(bytes.data() + start); }
    size_t size() const { return elements; }
    void poison() { std::memset(static_cast<void*>(data()), 0xFF, elements * sizeof(T)); }
    void zero() { std::fill_n(data(), elements, T(0)); }
    void fill(Random& random, double scale = 1) { fill_normal(data(), elements, random, scale); }

    bool intact() const {
        if (bytes.empty()) return true;  // moved from
        for (size_t i = 0; i < GUARD; i += 4)
            if (std::memcmp(front() + i, &PATTERN, 4) || std::memcmp(back() + i, &PATTERN, 4)) return false;
        return true;
    }
    void check() const {
        tests().checks++;
        if (!intact()) check_failed(__FILE__, __LINE__, "the guard zone of %s [%zu] was overwritten", name, elements);
    }

  private:
    static constexpr size_t GUARD = 256;
    static constexpr uint32_t PATTERN = 0x7FF5A5A5;
    const char* name;
    size_t elements, start = 0;
    std::vector<unsigned char> bytes;
    unsigned char* front() { return bytes.data() + start - GUARD; }
    unsigned char* back() { return bytes.data() + start + elements * sizeof(T); }
    const unsigned char* front() const { return bytes.data() + start - GUARD; }
    const unsigned char* back() const { return bytes.data() + start + elements * sizeof(T); }
};

// The index of element `at` in an array of these dimensions, as "[1, 0, 17]"; without dimensions the plain index.
inline std::string index_text(size_t at, const std::vector<int>& dimensions) {
    std::string text;
    for (size_t i = dimensions.size(); i-- > 1;)
        text = ", " + std::to_string(at % size_t(dimensions[i])) + text, at /= size_t(dimensions[i]);
    return "[" + std::to_string(at) + text + "]";
}

namespace oracle {

// The nearest number of 8 significant bits, ties to even; below 2^-126 the spacing stays 2^-133.
inline double rounded_to_bf16(double x) {
    if (x == 0 || x != x) return x;
    const double spacing = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
    return std::nearbyint(x / spacing) * spacing;
}

// ---------------------------------------------------------------------------------------------------------------------
// Number: value and error limit. Rules for one rounded operation with unit roundoff u
// (2^-24 in fp32, 2^-53 in fp64; plus 2^-53, because the oracle itself is rounded in fp64):
//   a + b      ea + eb + u|a+b|                     a * b      |a|eb + |b|ea + ea eb + u|ab|
//   a / b      (ea + |a/b| eb) / (|b| - eb) + u|a/b|    sqrt(a)    ea / sqrt(a) + u sqrt(a)
//   e^a        e^a (e^ea - 1 + 4u): nsa_cpu.h claims 2 ulp, and an ulp is at most 2u of the value (tested in
//   `exponential`) ln(a)      ea / (a - ea) + 2u|ln a|: libm's logarithm is within one ulp
// Products and exponentials may also underflow: e^x is 0 below x = -87 by definition, and e^-87 = 1.4 of the smallest
// normal fp32. Wilkinson's running error analysis; see Higham, "Accuracy and stability of numerical algorithms",
// section 3.3.

template <class real>
struct Number {
    double value = 0, error = 0;
    static constexpr double u = std::numeric_limits<real>::epsilon() / 2 + 0x1p-53;
    static constexpr double tiny = 2.0 * std::numeric_limits<real>::min();

    Number() = default;
    Number(double value) : value(value) {}
    Number(double value, double error) : value(value), error(error) {}

    friend Number operator+(Number a, Number b) {
        return {a.value + b.value, a.error + b.error + u * std::fabs(a.value + b.value)};
    }
    friend Number operator-(Number a, Number b) { return a + Number(-b.value, b.error); }
    friend Number operator*(Number a, Number b) {
        const double v = a.value * b.value;
        return {v, std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error + u * std::fabs(v) +
                       tiny};
    }
    friend Number operator/(Number a, Number b) {
        const double v = a.value / b.value;
        return {v, (a.error + std::fabs(v) * b.error) / (std::fabs(b.value) - b.error) + u * std::fabs(v) + tiny};
    }
    friend Number sqrt(Number a) {
        const double v = std::sqrt(a.value);
        return {v, (a.value > a.error ? a.error / v : std::sqrt(a.error)) + u * v};
    }
    friend Number exp(Number a) {
        const double v = std::exp(a.value);
        return {v, v * (std::expm1(a.error) + 4 * u) + tiny};
    }
    friend Number log(Number a) {
        const double v = std::log(a.value);
        return {v, a.error / (a.value - a.error) + 2 * u * std::fabs(v)};
    }
};
template <class real>
using Numbers = std::vector<Number<real>>;

// A sum of n terms in whatever order: error of the terms + gamma(n) * sum of |terms|. The worst case of gamma is n u.
// For long sums we use lambda sqrt(n) u with lambda = 6: it holds with probability 1 - 2 n exp(-lambda^2 / 2) (3e-8 n),
// however the terms are ordered or blocked: Higham & Mary, "A new approach to probabilistic rounding error analysis",
// SIAM J. Sci. Comput. 41 (2019).
template <class real>
double gamma(double n) {
    return Number<real>::u * std::min(n, 6 * std::sqrt(n));
}
template <class real>
struct Sum {
    double value = 0, error = 0, magnitude = 0;
    long terms = 0;
    void add(Number<real> x) { value += x.value, error += x.error, magnitude += std::fabs(x.value), terms++; }
    operator Number<real>() const { return {value, error + gamma<real>(double(terms)) * magnitude}; }
};

template <class real>
Numbers<real> numbers(const real* x, size_t count) {
    return Numbers<real>(x, x + count);
}
template <class real>
Numbers<real> numbers(const Buffer<real>& x) {
    return numbers(x.data(), x.size());
}
template <class real>
Numbers<real> numbers(const std::vector<Sum<real>>& sums) {
    return Numbers<real>(sums.begin(), sums.end());
}

// ---------------------------------------------------------------------------------------------------------------------
// Row operations.

template <class real>
Number<real> sigmoid(Number<real> x) {
    return Number<real>(1) / (Number<real>(1) + exp(Number<real>(-x.value, x.error)));
}
template <class real>
Number<real> silu(Number<real> x) {
    return x * sigmoid(x);
}
// d silu(x) / dx
template <class real>
Number<real> silu_slope(Number<real> x) {
    const Number<real> s = sigmoid(x);
    return s * (Number<real>(1) + x * (Number<real>(1) - s));
}

// One row: x * rsqrt(mean(x^2) + 1e-6) * weight
template <class real>
struct Normed {
    Numbers<real> out;
    Number<real> rstd;
};
template <class real>
Normed<real> rmsnorm(const real* x, const real* weight, int C) {
    Sum<real> squares;
    for (int c = 0; c < C; c++) squares.add(Number<real>(x[c]) * Number<real>(x[c]));
    Normed<real> row;
    const Number<real> epsilon(1e-6, 1e-6 * Number<real>::u);
    row.rstd = Number<real>(1) / sqrt(Number<real>(squares) / Number<real>(C) + epsilon);
    for (int c = 0; c < C; c++) row.out.push_back(Number<real>(x[c]) * row.rstd * Number<real>(weight[c]));
    return row;
}
// Its gradient, by the Jacobian d out[k] / d x[c] = weight[k] (delta(k, c) rstd - x[k] x[c] rstd^3 / C).
template <class real>
Numbers<real> rmsnorm_dx(const real* dout, const real* x, Number<real> rstd, const real* weight, int C) {
    Sum<real> dot;
    for (int k = 0; k < C; k++) dot.add(Number<real>(dout[k]) * Number<real>(weight[k]) * Number<real>(x[k]));
    Numbers<real> dx;
    for (int c = 0; c < C; c++)
        dx.push_back(rstd * Number<real>(dout[c]) * Number<real>(weight[c]) -
                     Number<real>(x[c]) * rstd * rstd * rstd * Number<real>(dot) / Number<real>(C));
    return dx;
}

// Cross-entropy of one row of V logits, and its gradient softmax - onehot.
template <class real>
struct Classified {
    Number<real> loss;
    Numbers<real> dlogits;
};
template <class real>
Classified<real> cross_entropy(const real* logits, int target, double dloss, int V) {
    const double largest = *std::max_element(logits, logits + V);
    Sum<real> sum;
    for (int v = 0; v < V; v++) sum.add(exp(Number<real>(logits[v]) - Number<real>(largest)));
    Classified<real> row;
    row.loss = log(Number<real>(sum)) + Number<real>(largest) - Number<real>(logits[target]);
    const Number<real> factor(dloss, std::fabs(dloss) * Number<real>::u);
    for (int v = 0; v < V; v++) {
        const Number<real> p = exp(Number<real>(logits[v]) - Number<real>(largest)) / Number<real>(sum) * factor;
        row.dlogits.push_back(v == target ? p - factor : p);
    }
    return row;
}

// One AdamW step of one parameter: the gradient times clip, decoupled decay, moments divided by 1 - beta^step.
// Constants are rounded to the engine's format.
template <class real>
struct Adam {
    Number<real> param, m, v;
};
template <class real>
Adam<real> adamw(real param, real m, real v, real grad, double lr, double beta1, double beta2, double eps, double decay,
                 int step, double clip) {
    auto rounded = [](double x) { return Number<real>(x, std::fabs(x) * Number<real>::u); };
    const Number<real> one(1), g = Number<real>(grad) * rounded(clip);
    Adam<real> after;
    after.m = rounded(beta1) * Number<real>(m) + (one - rounded(beta1)) * g;
    after.v = rounded(beta2) * Number<real>(v) + (one - rounded(beta2)) * g * g;
    const Number<real> m_hat = after.m / rounded(1 - std::pow(beta1, step)),
                       v_hat = after.v / rounded(1 - std::pow(beta2, step));
    after.param = Number<real>(param) * rounded(1 - lr * decay) - rounded(lr) * (m_hat / (sqrt(v_hat) + rounded(eps)));
    return after;
}

// ---------------------------------------------------------------------------------------------------------------------
// RoPE: element i is paired with i + D/2, angle position * 10000^(-2i/D); direction -1 turns back. The tables are
// rounded to the format (u), from an angle that itself carries fp64's rounding.

template <class real>
Numbers<real> rope(const Number<real>* x, int position, int D, int direction) {
    Numbers<real> out;
    out.resize(size_t(D));
    for (int i = 0; i < D / 2; i++) {
        const double angle = position * std::pow(10000.0, -2.0 * i / D), slack = 4 * angle * 0x1p-53;
        const Number<real> c(std::cos(angle), std::fabs(std::cos(angle)) * Number<real>::u + slack);
        const Number<real> s(direction * std::sin(angle), std::fabs(std::sin(angle)) * Number<real>::u + slack);
        out[size_t(i)] = x[i] * c - x[i + D / 2] * s;
        out[size_t(i + D / 2)] = x[i] * s + x[i + D / 2] * c;
    }
    return out;
}
template <class real>
Numbers<real> rope(const real* x, int position, int D, int direction) {
    return rope(numbers(x, size_t(D)).data(), position, D, direction);
}

// ---------------------------------------------------------------------------------------------------------------------
// Compression. phi(X_i) = mean over the l rows + fc2 silu(fc1 X_i + bias), X_i the l rows of block i flattened.

// Blocks that lie wholly in the first `tokens` tokens, counted.
inline int blocks(int tokens, const NsaShape& s) {
    int count = 0;
    while (count * s.d + s.l <= tokens) count++;
    return count;
}

template <class real>
struct PhiWeights {
    const real *fc1, *bias, *fc2;  // [F, l*D], [F], [D, F]
};
template <class real>
struct Compressed {
    Numbers<real> out, hidden;  // [B, G, NC, D], [B, G, NC, F]
};
template <class real>
Compressed<real> compress(const real* k, PhiWeights<real> phi, bool rotated, const NsaShape& s) {
    using N = Number<real>;
    Compressed<real> c;
    for (int bg = 0; bg < s.B * s.G; bg++)
        for (int block = 0; block < blocks(s.T, s); block++) {
            const real* X = k + (size_t(bg) * s.T + size_t(block) * s.d) * s.D;
            Numbers<real> active, row;
            for (int f = 0; f < s.F; f++) {
                Sum<real> sum;
                for (int m = 0; m < s.l * s.D; m++) sum.add(N(phi.fc1[size_t(f) * s.l * s.D + m]) * N(X[m]));
                sum.add(N(phi.bias[f]));
                c.hidden.push_back(sum);
                active.push_back(silu(N(sum)));
            }
            for (int x = 0; x < s.D; x++) {
                Sum<real> mean, sum;
                for (int token = 0; token < s.l; token++) mean.add(N(X[token * s.D + x]));
                sum.add(N(mean) / N(s.l));
                for (int f = 0; f < s.F; f++) sum.add(N(phi.fc2[size_t(x) * s.F + f]) * active[size_t(f)]);
                row.push_back(sum);
            }
            if (rotated) row = rope(row.data(), block * s.d, s.D, +1);
            c.out.insert(c.out.end(), row.begin(), row.end());
        }
    return c;
}
// Gradients of the same, from the hidden values before the SiLU. dfc1, dbias, dfc2 continue from what they hold.
template <class real>
struct CompressGradients {
    std::vector<Sum<real>> dk, dfc1, dbias, dfc2;
};
template <class real>
void compress_backward(CompressGradients<real>& d, const real* dout, const real* hidden, const real* k,
                       PhiWeights<real> phi, bool rotated, const NsaShape& s) {
    using N = Number<real>;
    const int NC = blocks(s.T, s), width = s.l * s.D;
    d.dk.resize(size_t(s.B) * s.G * s.T * s.D);
    for (int bg = 0; bg < s.B * s.G; bg++)
        for (int block = 0; block < NC; block++) {
            const size_t at = (size_t(bg) * s.T + size_t(block) * s.d) * s.D;
            Numbers<real> o = numbers(dout + (size_t(bg) * NC + block) * s.D, size_t(s.D));
            if (rotated) o = rope(o.data(), block * s.d, s.D, -1);
            for (int token = 0; token < s.l; token++)
                for (int x = 0; x < s.D; x++) d.dk[at + size_t(token) * s.D + x].add(o[size_t(x)] / N(s.l));
            for (int f = 0; f < s.F; f++) {
                const N h(hidden[(size_t(bg) * NC + block) * s.F + f]);
                Sum<real> dactive;
                for (int x = 0; x < s.D; x++) {
                    d.dfc2[size_t(x) * s.F + f].add(o[size_t(x)] * silu(h));
                    dactive.add(o[size_t(x)] * N(phi.fc2[size_t(x) * s.F + f]));
                }
                const N dh = N(dactive) * silu_slope(h);
                d.dbias[size_t(f)].add(dh);
                for (int m = 0; m < width; m++) {
                    d.dfc1[size_t(f) * width + m].add(dh * N(k[at + m]));
                    d.dk[at + m].add(dh * N(phi.fc1[size_t(f) * width + m]));
                }
            }
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention, one query row at a time.

// The keys that query t sees, in order. mask: the selection's words for (t, group).
inline std::vector<int> visible(Branch branch, int t, const uint32_t* mask, const NsaShape& s) {
    std::vector<int> keys;
    if (branch == CMP)
        for (int i = 0; i * s.d + s.l - 1 <= t; i++) keys.push_back(i);
    if (branch == SLC)
        for (int token = 0; token <= t; token++)
            if (mask[token / s.slc_block / 32] >> (token / s.slc_block % 32) & 1) keys.push_back(token);
    if (branch == WIN)
        for (int token = 0; token <= t; token++)
            if (s.full || token > t - s.window) keys.push_back(token);
    return keys;
}

// What a product takes in an engine that rounds the inputs of products to bf16 (8 significant bits: by at most 2^-8 of
// the value): exactly known numbers are rounded here as there, others may be rounded either way. In other engines the
// number itself.
template <class real>
Number<real> product_input(Number<real> x, bool bf16) {
    if (!bf16) return x;
    if (x.error == 0) return rounded_to_bf16(x.value);
    return {x.value, x.error + 0x1p-8 * (std::fabs(x.value) + x.error)};
}

// softmax(q . k / sqrt(D)) v over the given rows of k and v. No key: out 0, lse +infinity.
// The engine's softmax runs over tiles of keys and may rescale what it has summed at each: one product with one
// exponential, 5u.
template <class real>
struct AttendedRow {
    Numbers<real> score, out;
    Number<real> lse = std::numeric_limits<double>::infinity();
};
template <class real>
AttendedRow<real> attend(const Number<real>* q, const Number<real>* k, const Number<real>* v,
                         const std::vector<int>& keys, int tile, int D, bool bf16 = false) {
    using N = Number<real>;
    AttendedRow<real> row;
    row.out.resize(size_t(D));
    if (keys.empty()) return row;
    const N scale(1 / std::sqrt(double(D)), Number<real>::u / std::sqrt(double(D)));
    double largest = -std::numeric_limits<double>::infinity();
    Numbers<real> scaled;
    for (int x = 0; x < D; x++) scaled.push_back(product_input(q[x] * scale, bf16));
    for (int key : keys) {
        Sum<real> dot;
        for (int x = 0; x < D; x++) dot.add(scaled[size_t(x)] * product_input(k[size_t(key) * D + x], bf16));
        row.score.push_back(dot);
        largest = std::max(largest, dot.value);
    }
    const double rescaling = gamma<real>(5.0 * double(keys.size() / size_t(tile) + 1));
    Sum<real> total;
    std::vector<Sum<real>> sums(static_cast<size_t>(D));
    for (size_t i = 0; i < keys.size(); i++) {
        N p = exp(row.score[i] - N(largest));
        p.error += p.value * rescaling;
        total.add(p);
        for (int x = 0; x < D; x++)
            sums[size_t(x)].add(product_input(p, bf16) * product_input(v[size_t(keys[i]) * D + x], bf16));
    }
    for (int x = 0; x < D; x++) row.out[size_t(x)] = N(sums[size_t(x)]) / N(total);
    row.lse = log(N(total)) + N(largest);
    return row;
}

// Rows of a key buffer per (sequence, group), and the smallest tile an engine may cut them into.
inline int key_rows(Branch branch, const NsaShape& s) { return branch == CMP ? blocks(s.T, s) : s.T; }
inline int smallest_tile(Branch branch, const NsaShape& s) { return branch == SLC ? std::min(s.slc_block, 64) : 64; }
inline int selection_words(const NsaShape& s) { return ((s.T + s.slc_block - 1) / s.slc_block + 31) / 32; }

// One branch for the positions first .. first+queries-1. q [B, H, queries, D], k, v [B, G, key rows, D], selection [B,
// G, queries, words].
template <class real>
struct Attended {
    Numbers<real> out, lse;  // [B, H, queries, D], [B, H, queries]
};
template <class real>
Attended<real> attention(Branch branch, const Numbers<real>& q, const Numbers<real>& k, const Numbers<real>& v,
                         const uint32_t* selection, const NsaShape& s, bool bf16 = false) {
    Attended<real> all;
    for (int b = 0; b < s.B; b++)
        for (int head = 0; head < s.H; head++)
            for (int j = 0; j < s.queries; j++) {
                const int g = head / (s.H / s.G);
                const size_t keys_at = (size_t(b) * s.G + g) * key_rows(branch, s) * s.D;
                const uint32_t* mask =
                    selection ? selection + ((size_t(b) * s.G + g) * s.queries + j) * selection_words(s) : nullptr;
                const AttendedRow<real> row =
                    attend(&q[((size_t(b) * s.H + head) * s.queries + j) * s.D], k.data() + keys_at, v.data() + keys_at,
                           visible(branch, s.first + j, mask, s), smallest_tile(branch, s), s.D, bf16);
                all.out.insert(all.out.end(), row.out.begin(), row.out.end());
                all.lse.push_back(row.lse);
            }
    return all;
}

// Gradients of sum(dout * gate * branch output): dq [B, H, queries, D] (this branch's share), dk, dv [B, G, key rows,
// D], and that of the gate's logit, dz [B, H, queries]. gate [B, H, queries] after the sigmoid; nullptr: fixed to 1.
// dout [B*queries, H*D].
template <class real>
struct AttentionGradients {
    std::vector<Sum<real>> dq, dk, dv;
    Numbers<real> dz;
};
template <class real>
AttentionGradients<real> attention_backward(Branch branch, const Numbers<real>& q, const Numbers<real>& k,
                                            const Numbers<real>& v, const real* gate, const real* dout,
                                            const uint32_t* selection, const NsaShape& s, bool bf16 = false) {
    using N = Number<real>;
    AttentionGradients<real> d;
    d.dq.resize(q.size()), d.dk.resize(k.size()), d.dv.resize(v.size());
    const N scale(1 / std::sqrt(double(s.D)), N::u / std::sqrt(double(s.D)));
    for (int b = 0; b < s.B; b++)
        for (int head = 0; head < s.H; head++)
            for (int j = 0; j < s.queries; j++) {
                const int g = head / (s.H / s.G);
                const size_t keys_at = (size_t(b) * s.G + g) * key_rows(branch, s) * s.D,
                             row_at = (size_t(b) * s.H + head) * s.queries + j;
                const uint32_t* mask =
                    selection ? selection + ((size_t(b) * s.G + g) * s.queries + j) * selection_words(s) : nullptr;
                const std::vector<int> keys = visible(branch, s.first + j, mask, s);
                const AttendedRow<real> row = attend(&q[row_at * s.D], k.data() + keys_at, v.data() + keys_at, keys,
                                                     smallest_tile(branch, s), s.D, bf16);
                const real* dO = dout + ((size_t(b) * s.queries + j) * s.H + head) * s.D;
                Sum<real> r;
                for (int x = 0; x < s.D; x++) r.add(N(dO[x]) * row.out[size_t(x)]);
                const N open = gate ? N(gate[row_at]) : N(1);
                d.dz.push_back(N(r) * open * (N(1) - open));
                if (open.value == 0) continue;  // a closed gate: no gradient
                const N lse_gated = row.lse - log(open);
                for (size_t i = 0; i < keys.size(); i++) {
                    const size_t key_at = keys_at + size_t(keys[i]) * s.D;
                    const N p = exp(row.score[i] - lse_gated);
                    Sum<real> dp;
                    for (int x = 0; x < s.D; x++)
                        dp.add(product_input(N(dO[x]), bf16) * product_input(v[key_at + x], bf16));
                    const N ds = p * (N(dp) - N(r));
                    for (int x = 0; x < s.D; x++) {
                        d.dq[row_at * s.D + x].add(product_input(ds, bf16) * product_input(k[key_at + x], bf16) *
                                                   scale);
                        d.dk[key_at + x].add(product_input(ds, bf16) *
                                             product_input(q[row_at * s.D + x] * scale, bf16));
                        d.dv[key_at + x].add(product_input(p, bf16) * product_input(N(dO[x]), bf16));
                    }
                }
            }
    return d;
}

// ---------------------------------------------------------------------------------------------------------------------
// Importance and selection.

// p_slc[t, block] = sum over the group's heads a, over compressed blocks i, of p[a, t, i] * (tokens that block i and
// the block share) / d, for blocks 0 .. t/l'. q, lse: the rows of the group's heads at t, one after the other by
// `stride` tokens; kc: this (sequence, group)'s.
template <class real>
Numbers<real> importance(const real* q, const real* lse, size_t stride, const real* kc, int t, const NsaShape& s,
                         bool bf16 = false) {
    using N = Number<real>;
    const N scale(1 / std::sqrt(double(s.D)), N::u / std::sqrt(double(s.D)));
    std::vector<Sum<real>> sums(size_t(t / s.slc_block + 1));
    for (int head = 0; head < s.H / s.G; head++)
        for (int i = 0; i * s.d + s.l - 1 <= t; i++) {
            Sum<real> dot;
            for (int x = 0; x < s.D; x++)
                dot.add(product_input(N(q[head * stride * s.D + x]) * scale, bf16) *
                        product_input(N(kc[size_t(i) * s.D + x]), bf16));
            const N p = exp(N(dot) - N(lse[head * stride]));
            std::vector<int> shared(sums.size());
            for (int token = i * s.d; token < i * s.d + s.l; token++) shared[size_t(token / s.slc_block)]++;
            for (size_t block = 0; block < sums.size(); block++)
                if (shared[block]) sums[block].add(p * N(shared[block]) / N(s.d));
        }
    return numbers(sums);
}

// The rule of selection on exactly known importances: 0, b-1, b and the n-3 best others, equal ones going to the lower
// index.
inline std::vector<int> select(const std::vector<double>& importance, int n) {
    const int candidates = int(importance.size());
    std::vector<int> others, chosen;
    for (int block = 0; block < candidates; block++) {
        const bool forced = block == 0 || block == candidates - 2 || block == candidates - 1;
        (forced || candidates <= n ? chosen : others).push_back(block);
    }
    if (candidates > n) {
        std::stable_sort(others.begin(), others.end(),
                         [&](int a, int b) { return importance[size_t(a)] > importance[size_t(b)]; });
        chosen.insert(chosen.end(), others.begin(), others.begin() + (n - 3));
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

}  // namespace oracle

// The blocks of a selection's mask.
inline std::vector<int> blocks_of(const uint32_t* mask, int words) {
    std::vector<int> blocks;
    for (int block = 0; block < 32 * words; block++)
        if (mask[block / 32] >> (block % 32) & 1) blocks.push_back(block);
    return blocks;
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparisons. One check each; a failure prints the element that exceeds its limit most.

template <class real>
void check_array(const char* file, int line, const char* what, const real* found, size_t count,
                 const oracle::Numbers<real>& expected, const std::vector<int>& dimensions) {
    tests().checks++;
    if (count != expected.size())
        return check_failed(file, line, "%s has %zu elements, the oracle %zu", what, count, expected.size());
    size_t worst = 0;
    double worst_ratio = 0;
    for (size_t i = 0; i < count; i++) {
        if (double(found[i]) == expected[i].value) continue;  // infinities too
        const double ratio = std::fabs(double(found[i]) - expected[i].value) / expected[i].error;
        if (!(ratio <= worst_ratio)) worst = i, worst_ratio = ratio;
        if (ratio != ratio) break;  // NaN: nothing is worse
    }
    if (!(worst_ratio <= 1))
        check_failed(file, line, "%s%s is %.9g, expected %.9g, off by %.3g, limit %.3g", what,
                     index_text(worst, dimensions).c_str(), double(found[worst]), expected[worst].value,
                     std::fabs(double(found[worst]) - expected[worst].value), expected[worst].error);
}
// found: a Buffer; expected: Numbers, whose errors are the limits; then, optionally, the dimensions, for a readable
// index.
#define CHECK_ARRAY(found, expected, ...) \
    check_array(__FILE__, __LINE__, #found, (found).data(), (found).size(), expected, std::vector<int>{__VA_ARGS__})

template <class T>
void check_same_bits(const char* file, int line, const char* what, const T* a, const T* b, size_t count,
                     const std::vector<int>& dimensions) {
    tests().checks++;
    for (size_t i = 0; i < count; i++)
        if (std::memcmp(a + i, b + i, sizeof(T)))
            return check_failed(file, line, "%s%s differs: %.9g and %.9g, the same bits were expected", what,
                                index_text(i, dimensions).c_str(), double(a[i]), double(b[i]));
}
#define CHECK_SAME_BITS(a, b, count, ...) \
    check_same_bits(__FILE__, __LINE__, #a, a, b, count, std::vector<int>{__VA_ARGS__})

template <class T>
void check_finite(const char* file, int line, const char* what, const T* x, size_t count) {
    tests().checks++;
    for (size_t i = 0; i < count; i++)
        if (!std::isfinite(x[i]))
            return check_failed(file, line, "%s[%zu] is %g, a finite number was expected", what, i, double(x[i]));
}
#define CHECK_FINITE(x) check_finite(__FILE__, __LINE__, #x, (x).data(), (x).size())

// ---------------------------------------------------------------------------------------------------------------------
// Finite differences in fp64. The gradient of loss() at x [count] is compared along 3 random
// directions of length 1 and along 4 single coordinates. With central differences D(h) = (L(x+h)
// - L(x-h)) / 2h = L' + h^2/6 L''' + ..., Richardson's (4 D(h) - D(2h)) / 3 has the error
//   truncation   h^4/30 L'''''. D(2h) - D(h) = h^2/2 L''' is known, and h^4/30 L''''' is below h times it while L'''''
//   < 15/h L''', rounding     each L is off by at most delta, so D(h) by delta/h: together 4/3 delta/h + 1/3 delta/2h
//   = 1.5 delta/h. delta = 64 * precision
//                * (sum of the loss's |terms|): the longest chain of roundings behind one term at these shapes is
//                shorter than 64.
// At h = 1e-3 both stand near 1e-11 of the loss's terms.

struct Loss {
    double value = 0, magnitude = 0;  // the sum of the terms, and of their absolute values
    void add(double term) { value += term, magnitude += std::fabs(term); }
};
template <class T>
Loss weigh(const T* out, const double* weight, size_t count) {
    Loss loss;
    for (size_t i = 0; i < count; i++) loss.add(double(out[i]) * weight[i]);
    return loss;
}

// Sets the number of threads while it lives. One: for shapes so small that a thread costs more than it brings.
struct ThreadCount {
    const int before = omp_get_max_threads();
    explicit ThreadCount(int count) { omp_set_num_threads(count); }
    ~ThreadCount() { omp_set_num_threads(before); }
};

template <class LossOf>
void check_gradient(const char* file, int line, const char* what, double* x, const double* gradient, size_t count,
                    const LossOf& loss, double h = 1e-3, double precision = 0x1p-53) {
    const ThreadCount one(1);
    Random random(uint64_t(1000 + line));
    const std::vector<double> at(x, x + count);
    const double magnitude = loss().magnitude;
    for (int probe = 0; probe < 7; probe++) {
        std::vector<double> direction(count);
        const int coordinate = random.below(int(count));
        if (probe < 3) {
            double squares = 0;
            for (double& e : direction) e = random.normal(), squares += e * e;
            for (double& e : direction) e /= std::sqrt(squares);
        } else {
            direction[size_t(coordinate)] = 1;
        }
        auto difference = [&](double step) {
            double difference = 0;
            for (int sign : {1, -1}) {
                for (size_t i = 0; i < count; i++) x[i] = at[i] + sign * step * direction[i];
                difference += sign * loss().value;
            }
            std::copy(at.begin(), at.end(), x);
            return difference / (2 * step);
        };
        const double d1 = difference(h), d2 = difference(2 * h), expected = (4 * d1 - d2) / 3;
        const double limit = h * std::fabs(d2 - d1) + 1.5 * 64 * precision * magnitude / h;
        double found = 0;
        for (size_t i = 0; i < count; i++) found += gradient[i] * direction[i];
        tests().checks++;
        if (!(std::fabs(found - expected) <= limit))
            check_failed(file, line, "gradient of %s %s: %.12g, finite differences %.12g, off by %.3g, limit %.3g",
                         what,
                         probe < 3 ? "along a random direction" : ("at " + index_text(size_t(coordinate), {})).c_str(),
                         found, expected, std::fabs(found - expected), limit);
    }
}
// x, gradient: Buffers of the same size
#define CHECK_GRADIENT(x, gradient, ...) \
    check_gradient(__FILE__, __LINE__, #x, (x).data(), (gradient).data(), (x).size(), __VA_ARGS__)
