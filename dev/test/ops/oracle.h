// oracle.h: what the operations' tests share. Oracles; error limits; buffers with guard zones; comparisons that name
// the worst element; random inputs; finite differences.
//
// The oracles of the row operations, RoPE and compression are plain loops of their own and call no engine. The oracle
// of attention and selection is the specification, the plain loops of struct Cpu in nsa_cpu.h, which golden
// values of an independent PyTorch model and finite differences judge. It is compared here with the engines that
// compute the same in another way: Cpu<float>, which works in tiles, and Cuda.
//
// Error limits are not chosen but derived, term by term, by the type Number: a value in fp64 together with the error
// that an engine which computes in `real` may have made in it. Every oracle computes with Numbers, the specification
// too, so each expected element brings its own limit.
#pragma once
#include <limits>

#include "../../../nsa_cpu.h"
#include "../harness.h"

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
// Buffers: `count` elements between two guard zones. All of it is NaN at first (elements: all bits set; guards: a
// pattern of their own, NaN as fp32 and as fp64), so that reading what was never written, or outside, shows in the
// result. Data are aligned to their element only, like slices of a parameter buffer. The destructor and check() look at
// the guards.

template <class T>
class Buffer {
  public:
    explicit Buffer(size_t count = 0, const char* name = "buffer") : name(name), elements(count) {
        bytes.resize(2 * GUARD + 64 + sizeof(T) + count * sizeof(T));
        const size_t address = reinterpret_cast<size_t>(bytes.data()) + GUARD;
        start = (address + 63) / 64 * 64 - address + GUARD + sizeof(T);
        for (size_t i = 0; i < GUARD; i += 4)
            std::memcpy(front() + i, &PATTERN, 4), std::memcpy(back() + i, &PATTERN, 4);
        std::memset(static_cast<void*>(data()), 0xFF, elements * sizeof(T));
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { check(); }

    operator T*() { return data(); }
    operator const T*() const { return data(); }
    T* data() { return reinterpret_cast<T*>(bytes.data() + start); }
    const T* data() const { return reinterpret_cast<const T*>(bytes.data() + start); }
    size_t size() const { return elements; }
    void zero() { std::fill_n(data(), elements, T(0)); }
    void fill(Random& random, double scale = 1) { fill_normal(data(), elements, random, scale); }

    bool intact() const {
        for (size_t i = 0; i < GUARD; i += 4)
            if (std::memcmp(front() + i, &PATTERN, 4) || std::memcmp(back() + i, &PATTERN, 4)) return false;
        return true;
    }
    void check() const {
        tests().checks++;
        if (!intact()) check_failed(__FILE__, __LINE__, "the guard zone of %s [%d] was overwritten", name, elements);
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
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    bits &= uint64_t(0x7FF) << 52;
    double power;  // of two, at most |x|
    std::memcpy(&power, &bits, 8);
    const double spacing = std::max(power, 0x1p-126) * 0x1p-7;
    return std::nearbyint(x / spacing) * spacing;
}

// ---------------------------------------------------------------------------------------------------------------------
// Number: a value and the limit of its error. Rules for one rounded operation with unit roundoff u (2^-24 in fp32,
// 2^-53 in fp64; plus 2^-53, because the oracle itself rounds in fp64):
// clang-format off
//   a + b      ea + eb + u|a+b|
//   a * b      |a|eb + |b|ea + ea eb + u|ab|
//   a / b      (ea + |a/b| eb) / (|b| - eb) + u|a/b|
//   sqrt(a)    ea / sqrt(a) + u sqrt(a)
//   e^a        e^a (e^ea - 1 + 4u): lib/cpu/gemm.h claims 2 ulp (op_exponential tests it), an ulp is at most 2u of it
//   ln(a)      ea / (a - ea) + 2u|ln a|: libm's logarithm is within one ulp
// clang-format on
// Products and exponentials may also underflow: e^x is 0 below x = -87 by definition, and e^-87 = 1.4 of the smallest
// normal fp32. This is Wilkinson's running error analysis; see Higham, "Accuracy and stability of numerical
// algorithms", section 3.3.
//
// A sum made with += may have been made in any order: its limit is the errors of the terms + gamma(n) * sum of |terms|.
// The worst case of gamma is n u. For long sums we use 6 sqrt(n) u: that holds with probability 1 - 2 n exp(-6^2 / 2) =
// 1 - 3e-8 n, however the terms are ordered or blocked (Higham & Mary, "A new approach to probabilistic rounding error
// analysis", SIAM J. Sci. Comput. 41, 2019).
template <class real>
double gamma(double n);

// The relative error that an engine's softmax may add to an exponential by rescaling its sums; see attention().
inline thread_local double softmax_rescaling = 0;

template <class real>
struct Number {
    double value = 0, error = 0;
    double magnitude = 0;  // of a sum made with +=: the sum of |terms|
    int terms = 0;         // and their number
    static constexpr double u = std::numeric_limits<real>::epsilon() / 2 + 0x1p-53;
    static constexpr double tiny = 2.0 * std::numeric_limits<real>::min();

    Number() = default;
    // From a constant, which the engine rounds to its format; and back to a number of that format.
    Number(double value) : value(value), error(double(real(value)) == value ? 0 : u * std::fabs(value)) {}
    Number(double value, double error) : value(value), error(error) {}
    explicit operator double() const { return double(real(value)); }

    Number operator-() const { return {-value, error}; }
    Number& operator+=(Number x) {
        if (terms == 0 && value != 0) magnitude = std::fabs(value), terms = 1;  // what it held is a term
        error += x.error - gamma<real>(terms) * magnitude;
        value += x.value, magnitude += std::fabs(x.value), terms++;
        error += gamma<real>(terms) * magnitude;
        return *this;
    }
    friend Number operator+(Number a, Number b) {
        return {a.value + b.value, a.error + b.error + u * std::fabs(a.value + b.value)};
    }
    friend Number operator-(Number a, Number b) { return a + -b; }
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
        if (std::isinf(a.value) && a.value < 0) return {0, tiny};
        const double v = std::exp(a.value);
        return {v, v * (std::expm1(a.error) + 4 * u) + tiny};
    }
    friend Number log(Number a) {
        const double v = std::log(a.value);
        return {v, a.error / (a.value - a.error) + 2 * u * std::fabs(v)};
    }
    // As nsa_cpu.h calls them.
    friend Number exponential(Number a) {
        Number p = exp(a);
        p.error += p.value * softmax_rescaling;
        return p;
    }
    // Exactly known numbers are rounded here as in the engine; others may be rounded either way, by at most 2^-8.
    friend Number round_to_bf16(Number x) {
        if (x.error == 0) return rounded_to_bf16(x.value);
        return {x.value, x.error + 0x1p-8 * (std::fabs(x.value) + x.error)};
    }
};
template <class real>
using Numbers = std::vector<Number<real>>;

template <class real>
double gamma(double n) {
    return Number<real>::u * (n <= 36 ? n : 6 * std::sqrt(n));
}
// A sum that is only added up, which is faster.
template <class real>
struct Sum {
    double value = 0, error = 0, magnitude = 0;
    long terms = 0;
    Sum() = default;
    Sum(Number<real> x) : value(x.value), error(x.error) {}
    void add(Number<real> x) { value += x.value, error += x.error, magnitude += std::fabs(x.value), terms++; }
    operator Number<real>() const { return {value, error + gamma<real>(double(terms)) * magnitude}; }
};

template <class real>
Numbers<real> numbers(const real* x, size_t count) {
    return Numbers<real>(x, x + count);
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
// Its gradient, from the Jacobian d out[k] / d x[c] = weight[k] (delta(k, c) rstd - x[k] x[c] rstd^3 / C).
template <class real, class Out>  // Out: real, or Numbers of it
Numbers<real> rmsnorm_dx(const Out* dout, const real* x, Number<real> rstd, const real* weight, int C) {
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
// RoPE: element i is paired with i + D/2, the angle is position * base^(-2i/D); direction -1 turns back. Sines and
// cosines are rounded to the format (u); their angle was itself rounded in fp64.

template <class real>
Numbers<real> rope(const Number<real>* x, int position, int D, int direction, int base = 10000) {
    Numbers<real> out;
    out.resize(size_t(D));
    for (int i = 0; i < D / 2; i++) {
        const double angle = position * std::pow(double(base), -2.0 * i / D), slack = 4 * angle * 0x1p-53;
        const Number<real> c(std::cos(angle), std::fabs(std::cos(angle)) * Number<real>::u + slack);
        const Number<real> s(direction * std::sin(angle), std::fabs(std::sin(angle)) * Number<real>::u + slack);
        out[size_t(i)] = x[i] * c - x[i + D / 2] * s;
        out[size_t(i + D / 2)] = x[i] * s + x[i + D / 2] * c;
    }
    return out;
}
template <class real>
Numbers<real> rope(const real* x, int position, int D, int direction, int base = 10000) {
    return rope(numbers(x, size_t(D)).data(), position, D, direction, base);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention and selection: the plain loops of the specification, Cpu in nsa_cpu.h, run on Numbers. What is
// here only hands over arrays. The specification itself is judged by golden values of an independent PyTorch model and
// by finite differences, both in fp64: cpu_fp64_golden_* in engine_model_tests.h, model_gradients_* in model_tests.h,
// op_gradient_attention.

template <class real>
using Specification = Cpu<Number<real>>;

// Blocks that lie wholly in the first `tokens` tokens, counted.
inline int blocks(int tokens, const NsaShape& s) {
    int count = 0;
    while (count * s.d + s.l <= tokens) count++;
    return count;
}
// Rows of a key buffer per (sequence, group), and the smallest tile an engine may cut them into.
inline int key_rows(Branch branch, const NsaShape& s) { return branch == CMP ? blocks(s.T, s) : s.T; }
inline int smallest_tile(Branch branch, const NsaShape& s) { return branch == SLC ? std::min(s.slc_block, 64) : 64; }
inline int selection_words(const NsaShape& s) { return ((s.T + s.slc_block - 1) / s.slc_block + 31) / 32; }

// Whether query t sees a key. mask: the selection's words for (t, group). By the paper's sentences, not by visible.h.
inline bool sees(Branch branch, int t, int key, const uint32_t* mask, const NsaShape& s) {
    if (branch == CMP) return key * s.d + s.l - 1 <= t;
    if (key > t) return false;
    if (branch == SLC) return mask[key / s.slc_block / 32] >> (key / s.slc_block % 32) & 1;
    return s.sees_all || key > t - s.window;
}
// The keys that it sees, in order.
inline std::vector<int> visible(Branch branch, int t, const uint32_t* mask, const NsaShape& s) {
    std::vector<int> keys;
    for (int key = 0; key < s.key_count(branch); key++)
        if (sees(branch, t, key, mask, s)) keys.push_back(key);
    return keys;
}

// One branch for the positions first .. first+queries-1. q [B, H, queries, D], k, v [B, G, key rows, D],
// selection [B, G, queries, words].
// The engine's softmax may rescale at each tile what it has summed: one product with one exponential, 5u, so the limit
// of a query depends on how many keys it sees, and queries are computed one by one.
template <class real>
struct Attended {
    Numbers<real> out, lse;  // [B, H, queries, D], [B, H, queries]
};
template <class real>
Attended<real> attention(Branch branch, const Numbers<real>& q, const Numbers<real>& k, const Numbers<real>& v,
                         const uint32_t* selection, const NsaShape& s, bool bf16 = false) {
    const int h = s.H / s.G, most = smallest_tile(branch, s);
    const size_t D = size_t(s.D);
    Attended<real> all{Numbers<real>(s.query_rows() * D), Numbers<real>(s.query_rows())};
    NsaShape one = s;
    one.B = one.G = 1, one.H = h, one.queries = 1;
#pragma omp parallel firstprivate(one)
    {
        Specification<real> specification;
        specification.gemm.bf16 = bf16;
        Numbers<real> rows(size_t(h) * D), out(size_t(h) * D), lse(static_cast<size_t>(h));
#pragma omp for collapse(2) schedule(dynamic, 8)
        for (int group = 0; group < s.B * s.G; group++)
            for (int t = s.first; t < s.first + s.queries; t++) {
                const uint32_t* const mask = s.selection_mask(selection, size_t(group), t);
                const size_t keys_at = size_t(group) * key_rows(branch, s);
                const auto row = [&](int head) { return s.query_row(size_t(group) * h + head, t); };
                for (int head = 0; head < h; head++) std::copy_n(&q[row(head) * D], D, &rows[size_t(head) * D]);
                one.first = t;
                softmax_rescaling = gamma<real>(5.0 * double(visible(branch, t, mask, one).size() / size_t(most) + 1));
                specification.attention_forward(branch, out.data(), lse.data(), rows.data(), k.data() + keys_at * D,
                                                v.data() + keys_at * D, mask, one);
                softmax_rescaling = 0;
                for (int head = 0; head < h; head++) {
                    std::copy_n(&out[size_t(head) * D], D, &all.out[row(head) * D]);
                    all.lse[row(head)] = lse[size_t(head)];
                }
            }
    }
    return all;
}

// Gradients of one branch from row_dot and lse_gated [B, H, queries], as the engine is given them: dq [B, H, queries,
// D] (this branch's share), dk, dv [B, G, key rows, D]. dout [B*queries, H*D].
template <class real>
struct AttentionGradients {
    std::vector<Sum<real>> dq, dk, dv;
};
template <class real>
AttentionGradients<real> branch_gradients(Branch branch, const Numbers<real>& q, const Numbers<real>& k,
                                          const Numbers<real>& v, const Numbers<real>& dout,
                                          const Numbers<real>& row_dot, const Numbers<real>& lse_gated,
                                          const uint32_t* selection, const NsaShape& s, bool bf16 = false) {
    Numbers<real> dq(q.size()), dk(k.size()), dv(v.size());
    Specification<real> specification;
    specification.gemm.bf16 = bf16;
    specification.attention_backward(
        branch, {dq.data(), false, dk.data(), dv.data(), dout.data(), row_dot.data(), lse_gated.data()},
        {q.data(), k.data(), v.data(), selection}, s);
    return {{dq.begin(), dq.end()}, {dk.begin(), dk.end()}, {dv.begin(), dv.end()}};
}
// p_slc[t, block] for blocks 0 .. t/l'. q, lse: the rows of the group's heads at t, `stride` rows apart; kc: this
// (sequence, group)'s.
template <class real>
Numbers<real> importance(const real* q, const real* lse, size_t stride, const real* kc, int t, const NsaShape& s,
                         bool bf16 = false) {
    Specification<real> specification;
    specification.gemm.bf16 = bf16;
    NsaShape rows = s;
    rows.queries = int(stride);
    const size_t last_row = size_t(s.H / s.G - 1) * stride;
    Numbers<real> result(size_t(t / s.slc_block + 1));
    specification.block_importance(result.data(), numbers(q, (last_row + 1) * s.D).data(),
                                   numbers(lse, last_row + 1).data(),
                                   numbers(kc, size_t(blocks(t + 1, s)) * s.D).data(), t, rows);
    return result;
}

// The rule of selection on exactly known importances of blocks 0 .. b: 0, b-1, b and the n-3 best others, equal ones
// going to the lower index. It sorts where the specification searches.
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
        return check_failed(file, line, "%s has %d elements, the oracle %d", what, count, expected.size());
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
                     index_text(worst, dimensions), double(found[worst]), expected[worst].value,
                     std::fabs(double(found[worst]) - expected[worst].value), expected[worst].error);
}
// found: a Buffer; expected: Numbers, whose errors are the limits; then, if you like, the dimensions, which make the
// index readable.
#define CHECK_ARRAY(found, expected, ...) \
    check_array(__FILE__, __LINE__, #found, (found).data(), (found).size(), expected, std::vector<int>{__VA_ARGS__})

template <class T>
void check_same_bits(const char* file, int line, const char* what, const T* a, const T* b, size_t count,
                     const std::vector<int>& dimensions) {
    tests().checks++;
    for (size_t i = 0; i < count; i++)
        if (std::memcmp(a + i, b + i, sizeof(T)))
            return check_failed(file, line, "%s%s differs: %.9g and %.9g, the same bits were expected", what,
                                index_text(i, dimensions), double(a[i]), double(b[i]));
}
#define CHECK_SAME_BITS(a, b, count, ...) \
    check_same_bits(__FILE__, __LINE__, #a, a, b, count, std::vector<int>{__VA_ARGS__})

// ---------------------------------------------------------------------------------------------------------------------
// Finite differences in fp64. The gradient of loss() at x [count] is compared along 3 random directions of length 1 and
// along 4 single coordinates. With central differences D(h) = (L(x+h) - L(x-h)) / 2h = L' + h^2/6 L''' + ..., the error
// of Richardson's (4 D(h) - D(2h)) / 3 is made of
// clang-format off
//   truncation   h^4/30 L'''''. D(2h) - D(h) = h^2/2 L''' is known, and h^4/30 L''''' is below h times it while
//                L''''' < 15/h L''',
//   rounding     each L is off by at most delta, so D(h) by delta/h: together 4/3 delta/h + 1/3 delta/2h = 1.5 delta/h.
//                delta = 64 * 2^-53 * (sum of the loss's |terms|): at these shapes the longest chain of roundings
//                behind one term is shorter than 64.
// clang-format on
// At h = 1e-3 both are near 1e-11 of the loss's terms.

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

// Sets the number of threads while it lives. One, for shapes so small that a second thread costs more than it saves.
struct ThreadCount {
    const int before = omp_get_max_threads();
    explicit ThreadCount(int count) { omp_set_num_threads(count); }
    ~ThreadCount() { omp_set_num_threads(before); }
};

template <class LossOf>
void check_gradient(const char* file, int line, const char* what, double* x, const double* gradient, size_t count,
                    const LossOf& loss) {
    const double h = 1e-3;
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
        const double limit = h * std::fabs(d2 - d1) + 1.5 * 64 * 0x1p-53 * magnitude / h;
        double found = 0;
        for (size_t i = 0; i < count; i++) found += gradient[i] * direction[i];
        tests().checks++;
        if (!(std::fabs(found - expected) <= limit))
            check_failed(file, line, "gradient of %s %s: %.12g, finite differences %.12g, off by %.3g, limit %.3g",
                         what, probe < 3 ? "along a random direction" : ("at " + index_text(size_t(coordinate), {})),
                         found, expected, std::fabs(found - expected), limit);
    }
}
// x, gradient: Buffers of the same size
#define CHECK_GRADIENT(x, gradient, loss) \
    check_gradient(__FILE__, __LINE__, #x, (x).data(), (gradient).data(), (x).size(), loss)
