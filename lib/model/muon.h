// muon.h: Muon (Keller Jordan et al., kellerjordan.github.io/posts/muon, 2024), the update of a whole matrix: its
// momentum, made orthogonal. Written over an engine's operations, so it is the same for every engine. Used by
// apply_update() in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

#include "engine.h"
#include "tensors.h"

constexpr double MUON_MOMENTUM = 0.95;
// Five steps of Newton-Schulz, X <- a X + b A X + c A^2 X with A = X X^T, by Keller Jordan's coefficients: they take
// every singular value s through s <- a s + b s^3 + c s^5, those from 0.0016 to 1 into [0.68, 1.21].
constexpr int NEWTON_SCHULZ_STEPS = 5;
constexpr double NEWTON_SCHULZ_A = 3.4445, NEWTON_SCHULZ_B = -4.7750, NEWTON_SCHULZ_C = 2.0315;

// An orthogonal matrix with a larger side of n has elements of size 1 / sqrt(n), an update of AdamW elements of 0.2 to
// 0.4 times its learning rate. By Moonlight's rule (Liu et al., arXiv 2502.16982) both take the same rate and decay.
inline double muon_scale(int64_t rows, int64_t columns) { return 0.2 * std::sqrt(double(std::max(rows, columns))); }

// Working memory for one matrix at a time, and the update.
template <class Dev>
class Muon {
    using real = typename Dev::real;
    using Grad = typename Dev::Grad;

    // With Y = c^(1/4) X and the square completed, a step is three products of the linear layers, no elementwise pass:
    //     G = Y Y^T + b / (2 sqrt(c)) I        Q = G G^T + (a - b^2 / (4 c)) I        Y <- Q Y
    // These are what is added on the diagonals, [n, n] for each n that is the smaller side of a matrix.
    struct Diagonals {
        real *of_gram = nullptr, *of_square = nullptr;
    };

    // Elements that the largest matrix and the largest square ask for.
    struct Sizes {
        size_t matrix = 0, square = 0, diagonals = 0;
        std::map<int64_t, Diagonals> sides;

        explicit Sizes(const TensorList& table) {
            for (const TensorSpec& t : table.specs) {
                if (!t.orthogonal) continue;
                const int64_t n = std::min(t.rows, t.columns);
                matrix = std::max(matrix, t.size);
                square = std::max(square, size_t(n * n));
                if (sides.emplace(n, Diagonals()).second) diagonals += 2 * size_t(n * n);
            }
        }
    };

    Dev& dev;
    std::map<int64_t, Diagonals> diagonals;
    Grad* direction = nullptr;                                      // [n, width], n <= width, as y is
    real *y = nullptr, *next = nullptr;                             // c^(1/4) X
    real *gram = nullptr, *square = nullptr;                        // [n, n]
    typename Dev::Sum *squares = nullptr, *norm_squared = nullptr;  // of the direction

    real* make_diagonal(int64_t n, double value) {
        std::vector<float> values(size_t(n * n), 0.0f);
        for (int64_t i = 0; i < n; i++) values[size_t(i * n + i)] = float(value);
        real* const matrix = dev.template allocate<real>(values.size());
        dev.from_host(matrix, values.data(), values.size());
        return matrix;
    }

  public:
    Muon(Dev& device, const TensorList& table) : dev(device) {
        constexpr double a = NEWTON_SCHULZ_A, b = NEWTON_SCHULZ_B, c = NEWTON_SCHULZ_C;
        const Sizes sizes(table);
        for (const auto& [n, none] : sizes.sides)
            diagonals[n] = {make_diagonal(n, b / (2 * std::sqrt(c))), make_diagonal(n, a - b * b / (4 * c))};
        direction = dev.template allocate<Grad>(sizes.matrix);
        y = dev.template allocate<real>(sizes.matrix);
        next = dev.template allocate<real>(sizes.matrix);
        gram = dev.template allocate<real>(sizes.square);
        square = dev.template allocate<real>(sizes.square);
        squares = dev.template allocate<typename Dev::Sum>(sizes.matrix / CHUNK + 1);
        norm_squared = dev.template allocate<typename Dev::Sum>(1);
    }
    ~Muon() {
        for (const auto& [n, diagonal] : diagonals) {
            dev.release(diagonal.of_gram);
            dev.release(diagonal.of_square);
        }
        for (void* p : std::initializer_list<void*>{direction, y, next, gram, square, squares, norm_squared})
            dev.release(p);
    }
    Muon(const Muon&) = delete;
    Muon& operator=(const Muon&) = delete;

    static double bytes_needed(const TensorList& table) {
        const Sizes s(table);
        return double(s.matrix * (sizeof(Grad) + 2 * sizeof(real)) + (2 * s.square + s.diagonals) * sizeof(real));
    }

    // One step of param (or its master) and m [rows, columns]. A gradient that is not finite changes nothing.
    void update(real* param, typename Dev::Master* master, typename Dev::Stat* m, const Grad* grad, const TensorSpec& t,
                HyperAdamWOf<typename Dev::Sum> h) {
        const size_t chunks = (t.size + CHUNK - 1) / CHUNK;
        const double to_y = std::pow(NEWTON_SCHULZ_C, 0.25);
        h.beta1 = MUON_MOMENTUM;
        dev.muon_momentum(direction, m, grad, t.rows, t.columns, h);
        dev.chunk_squares(squares, direction, t.size, 0, chunks * CHUNK);
        dev.total_squares(norm_squared, squares, chunks, direction);
        dev.muon_normalise(y, direction, norm_squared, to_y, t.size);
        orthogonalise(std::min(t.rows, t.columns), std::max(t.rows, t.columns));
        dev.muon_apply(param, master, y, h.lr * muon_scale(t.rows, t.columns) / to_y, t.rows, t.columns, h);
    }

  private:
    // y [n, width] = U V^T of the y that there was, about: of its singular value decomposition.
    void orthogonalise(int64_t n, int64_t width) {
        const Diagonals& diagonal = diagonals.at(n);
        for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
            dev.matmul_forward(gram, y, y, diagonal.of_gram, int(n), int(width), int(n));
            dev.matmul_forward(square, gram, gram, diagonal.of_square, int(n), int(n), int(n));
            dev.matmul_backward_input(next, square, y, int(n), int(width), int(n));
            std::swap(y, next);
        }
    }
};
