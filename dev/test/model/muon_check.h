// muon_check.h: steps of --optimizer muon against fp64: the update's matrix, taken through the five polynomials by
// plain loops. For engine_model_tests.h.
#pragma once
#include <array>

#include "../harness.h"

// x [rows, columns] after the five polynomials of Polar Express, X <- a X + b A X + c A^2 X with A = X X^T of the
// smaller side, each stretched by 1.01: of a singular value s they make a s + b s^3 + c s^5.
inline std::vector<double> after_newton_schulz(std::vector<double> x, size_t rows, size_t columns) {
    const size_t n = std::min(rows, columns), width = std::max(rows, columns);
    const auto at = [&](size_t i, size_t j) { return rows > columns ? j * columns + i : i * columns + j; };
    for (const auto& [a, b, c] : {std::array<double, 3>{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                  {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                  {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                  {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                  {2.300652019954817, -1.6689039845747493, 0.4188073119525673}}) {
        std::vector<double> square(n * n), sum(n * n), next(x.size());
        for (double& e : x) e /= 1.01;
        for (size_t i = 0; i < n * n; i++)
            for (size_t j = 0; j < width; j++) square[i] += x[at(i / n, j)] * x[at(i % n, j)];
        for (size_t i = 0; i < n * n; i++) {
            sum[i] = (i / n == i % n ? a : 0) + b * square[i];
            for (size_t k = 0; k < n; k++) sum[i] += c * square[i / n * n + k] * square[k * n + i % n];
        }
        for (size_t i = 0; i < n; i++)
            for (size_t k = 0; k < n; k++)
                for (size_t j = 0; j < width; j++) next[at(i, j)] += sum[i * n + k] * x[at(k, j)];
        x = next;
    }
    return x;
}

inline double norm_of(const std::vector<double>& x) {
    double square = 0;
    for (const double e : x) square += e * e;
    return std::sqrt(square);
}

// A matrix before and after an update. grad: clipped already.
struct MuonCase {
    const TensorSpec& t;
    double lr, decay;
    std::vector<double> before, m, grad, after, m_after;

    // u: the relative error of a rounded product. The update may differ from the oracle's, relative to its norm, by
    // that of sixteen roundings, each a factor of 4.4 larger where aX, bAX and cA^2X cancel: of the one that X begins
    // with, which grows as a small change of X does in the oracle; the others come when X is nearly orthogonal. They
    // are random, so they add up as the root of their number, and on average each is less than u by sqrt(3): 8 u in
    // place of sqrt(16) * 4.4 / sqrt(3).
    void check(double u) const {
        std::vector<double> direction(t.size), found(t.size), changed(t.size);
        const double scale = lr * 0.2 * std::sqrt(double(std::max(t.rows, t.columns))), change = 1e-7;
        for (size_t i = 0; i < t.size; i++) {
            const double momentum = 0.95 * m[i] + 0.05 * grad[i];
            CHECK_NEAR(m_after[i], momentum, 1e-6 * (std::fabs(m[i]) + std::fabs(grad[i])));
            direction[i] = 0.95 * momentum + 0.05 * grad[i];
            found[i] = (before[i] * (1 - lr * decay) - after[i]) / scale;
        }
        const double norm = norm_of(direction);
        for (size_t i = 0; i < t.size; i++) {
            direction[i] /= norm;
            changed[i] = direction[i] * (1 + change * random_normal(1, random_stream(RANDOM_TEST, 90), i));
        }
        const auto made = [&](const std::vector<double>& x) {
            return after_newton_schulz(x, size_t(t.rows), size_t(t.columns));
        };
        const std::vector<double> expected = made(direction);
        const auto error_of = [&](std::vector<double> x) {
            for (size_t i = 0; i < t.size; i++) x[i] -= expected[i];
            return norm_of(x) / norm_of(expected);
        };
        // Beyond a quarter there would be nothing to see: that is for matrices with singular values near 0.
        const double error = error_of(found), growth = error_of(made(changed)) / change,
                     limit = std::min(0.25, 8 * u * std::hypot(1, growth));
        tests().checks++;
        if (!(error <= limit))
            check_failed(__FILE__, __LINE__, "%s: relative error %.3g, limit %.3g", t.name, error, limit);
        if (std::getenv("TEST_SHOW_ERRORS")) std::printf("    %-40s %.2e of %.2e\n", t.name.c_str(), error, limit);
    }
};

// Three updates of a whole model, with gradients from compute().
template <class Dev, class Compute>
void check_muon_steps(Model<Dev>& model, double lr, double u, Compute compute) {
    const ModelConfig& c = model.config;
    const auto host = [&](const auto* flat) {
        std::vector<std::decay_t<decltype(*flat)>> values(model.table.total);
        model.dev.copy(values.data(), flat, values.size());
        return std::vector<double>(values.begin(), values.end());
    };
    // Whatever a gradient was in a singular direction, unless it was next to nothing: the update is about 1 there.
    for (double value = 0.0016; value <= 1; value *= 1.01) CHECK_NEAR(after_newton_schulz({value}, 1, 1)[0], 1, 0.13);
    using Master = const typename Dev::Master*;
    using Stat = const typename Dev::Stat*;
    for (int step = 1; step <= 3; step++) {
        compute();
        std::vector<double> before = host(Master(model.master)), m = host(Stat(model.m)),
                            grad = host((const typename Dev::Grad*)model.grads);
        update(model, step, lr);
        const std::vector<double> after = host(Master(model.master)), m_after = host(Stat(model.m));
        const double norm = norm_of(grad);
        REQUIRE(norm > 1.5 * c.grad_clip);
        for (double& g : grad) g *= c.grad_clip / norm;
        size_t matrices = 0, elements = model.partition.elements - StateElements(model.owned).v;  // those without v
        for (const TensorSpec& t : model.table.specs) {
            const auto part = [&](const std::vector<double>& flat) {
                return std::vector<double>(flat.begin() + long(t.offset), flat.begin() + long(t.offset + t.size));
            };
            if (!t.orthogonal) continue;
            matrices++;
            elements -= t.size;
            MuonCase{t, lr, c.weight_decay, part(before), part(m), part(grad), part(after), part(m_after)}.check(u);
        }
        CHECK(matrices == size_t(14 * c.layers) && elements == 0);  // all but the gates'
    }
}
