// muon_check.h: steps of --optimizer muon against fp64: the singular value decomposition of what the update is made of,
// whose singular values go through the five polynomials one by one. For engine_model_tests.h.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "../harness.h"

// a [rows, columns] = u [rows, n] diag(s [n]) v [columns, n]^T, n the smaller side, by one-sided Jacobi rotations.
struct Svd {
    size_t rows, columns, n;
    std::vector<double> u, s, v;

    Svd(const std::vector<double>& a, size_t r, size_t c) : rows(r), columns(c), n(std::min(r, c)) {
        std::vector<double> tall(a), rotations(n * n, 0.0);
        const size_t height = std::max(r, c);
        if (rows < columns)
            for (size_t i = 0; i < rows; i++)
                for (size_t j = 0; j < columns; j++) tall[j * n + i] = a[i * columns + j];
        for (size_t i = 0; i < n; i++) rotations[i * n + i] = 1;
        for (double largest = 1; largest > 1e-15;) {
            largest = 0;
            for (size_t p = 0; p < n; p++)
                for (size_t q = p + 1; q < n; q++) largest = std::max(largest, rotate(tall, rotations, height, p, q));
        }
        for (size_t j = 0; j < n; j++) {
            double square = 0;
            for (size_t i = 0; i < height; i++) square += tall[i * n + j] * tall[i * n + j];
            s.push_back(std::sqrt(square));
            for (size_t i = 0; i < height; i++) tall[i * n + j] /= square > 0 ? s[j] : 1;
        }
        u = rows < columns ? rotations : tall;
        v = rows < columns ? tall : rotations;
    }
    // u diag(f(s)) v^T
    template <class F>
    std::vector<double> with_values(F f) const {
        std::vector<double> x(rows * columns, 0.0);
        for (size_t i = 0; i < rows; i++)
            for (size_t k = 0; k < n; k++)
                for (size_t j = 0; j < columns; j++) x[i * columns + j] += u[i * n + k] * f(s[k]) * v[j * n + k];
        return x;
    }
    // u_k^T x v_k
    double value_of(const std::vector<double>& x, size_t k) const {
        double sum = 0;
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < columns; j++) sum += u[i * n + k] * x[i * columns + j] * v[j * n + k];
        return sum;
    }

  private:
    // Turns columns p and q of x [height, n] until they are orthogonal. Returns the cosine that they had.
    double rotate(std::vector<double>& x, std::vector<double>& rotations, size_t height, size_t p, size_t q) const {
        double pp = 0, qq = 0, pq = 0;
        for (size_t i = 0; i < height; i++) {
            pp += x[i * n + p] * x[i * n + p];
            qq += x[i * n + q] * x[i * n + q];
            pq += x[i * n + p] * x[i * n + q];
        }
        if (pq * pq <= 1e-60 * pp * qq || pp < 1e-60 || qq < 1e-60) return 0;
        const double zeta = (qq - pp) / (2 * pq), t = (zeta < 0 ? -1 : 1) / (std::fabs(zeta) + std::hypot(1, zeta)),
                     c = 1 / std::hypot(1, t);
        const auto turn = [&](std::vector<double>& m, size_t i) {
            const double a = m[i * n + p], b = m[i * n + q];
            m[i * n + p] = c * (a - t * b);
            m[i * n + q] = c * (b + t * a);
        };
        for (size_t i = 0; i < height; i++) turn(x, i);
        for (size_t i = 0; i < n; i++) turn(rotations, i);
        return std::fabs(pq) / std::sqrt(pp * qq);
    }
};

// What the five polynomials of Polar Express make of a singular value, each stretched by 1.01.
inline double after_newton_schulz(double s) {
    for (const auto& [a, b, c] : {std::array<double, 3>{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                  {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                  {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                  {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                  {2.300652019954817, -1.6689039845747493, 0.4188073119525673}}) {
        const double x = s / 1.01;
        s = a * x + b * std::pow(x, 3) + c * std::pow(x, 5);
    }
    return s;
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
    // with, which is spread over all singular directions, each direction s grows it by after_newton_schulz(s) / s; the
    // others come when X is nearly orthogonal. They are random, so they add up as the root of their number, and on
    // average each is less than u by sqrt(3): 8 u in place of sqrt(16) * 4.4 / sqrt(3).
    void check(double u) const {
        std::vector<double> direction(t.size), found(t.size), difference(t.size);
        const double scale = lr * 0.2 * std::sqrt(double(std::max(t.rows, t.columns)));
        for (size_t i = 0; i < t.size; i++) {
            const double momentum = 0.95 * m[i] + 0.05 * grad[i];
            CHECK_NEAR(m_after[i], momentum, 1e-6 * (std::fabs(m[i]) + std::fabs(grad[i])));
            direction[i] = 0.95 * momentum + 0.05 * grad[i];
            found[i] = (before[i] * (1 - lr * decay) - after[i]) / scale;
        }
        const Svd svd(direction, size_t(t.rows), size_t(t.columns));
        const double norm = norm_of(direction);
        const std::vector<double> expected = svd.with_values([&](double s) { return after_newton_schulz(s / norm); });
        for (size_t i = 0; i < t.size; i++) difference[i] = found[i] - expected[i];
        const double error = norm_of(difference) / norm_of(expected);
        double growth = 0;
        for (const double s : svd.s) growth += std::pow(after_newton_schulz(s / norm) * norm / s, 2) / double(svd.n);
        // Beyond a quarter there would be nothing to see: that is for matrices with singular values near 0.
        const double limit = std::min(0.25, 8 * u * std::sqrt(1 + growth / std::pow(norm_of(expected), 2)));
        tests().checks++;
        if (!(error <= limit))
            check_failed(__FILE__, __LINE__, "%s: relative error %.3g, limit %.3g", t.name, error, limit);
        if (std::getenv("TEST_SHOW_ERRORS")) std::printf("    %-40s %.2e of %.2e\n", t.name.c_str(), error, limit);
        // U V^T: in its singular directions the update is near 1, whatever the gradient was there.
        for (size_t k = 0; k < svd.n; k++) {
            const double value = svd.value_of(found, k);
            if (svd.s[k] < 0.0016 * norm) continue;
            tests().checks++;
            if (!(value > 0.87 - 2 * limit && value < 1.13 + 2 * limit))
                check_failed(__FILE__, __LINE__, "%s: singular value %zu, %.2g of the norm, became %.3f", t.name, k,
                             svd.s[k] / norm, value);
        }
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
