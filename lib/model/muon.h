// muon.h: Muon (Keller Jordan et al., kellerjordan.github.io/posts/muon, 2024), the update of a whole matrix: its
// momentum, made orthogonal. Written over an engine's operations, so it is the same for every engine. Used by
// apply_update() in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

#include "engine.h"
#include "partition.h"
#include "tensors.h"

constexpr double MUON_MOMENTUM = 0.95;
// Five steps of Newton-Schulz, X <- a X + b A X + c A^2 X with A = X X^T, which take every singular value s through
// s <- a s + b s^3 + c s^5. Polar Express (Amsel et al., arXiv 2505.16932) has the coefficients that leave the least
// error after each step, for values from 0.001 to 1; here with the paper's margin for rounding, values up to 1.01. All
// values from 0.0016 on end in [0.87, 1.13].
struct NewtonSchulzStep {
    double a, b, c;
};
constexpr NewtonSchulzStep with_margin(double a, double b, double c) {
    constexpr double m = 1.01;
    return {a / m, b / (m * m * m), c / (m * m * m * m * m)};
}
constexpr NewtonSchulzStep NEWTON_SCHULZ[] = {
    with_margin(8.28721201814563, -23.595886519098837, 17.300387312530933),
    with_margin(4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    with_margin(3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    with_margin(3.3184196573706015, -2.488488024314874, 0.51004894012372),
    with_margin(2.300652019954817, -1.6689039845747493, 0.4188073119525673),
};
constexpr int NEWTON_SCHULZ_STEPS = sizeof NEWTON_SCHULZ / sizeof *NEWTON_SCHULZ;

// What X is multiplied by before a step, so that no product needs a factor, see Muon::orthogonalise(); 1 after the
// last.
inline double newton_schulz_scale(int step) {
    double scale = 1;
    for (int i = NEWTON_SCHULZ_STEPS; i-- > step;) scale = std::pow(NEWTON_SCHULZ[i].c * scale, 0.2);
    return scale;
}

// An orthogonal matrix with a larger side of n has elements of size 1 / sqrt(n), an update of AdamW elements of 0.2 to
// 0.4 times its learning rate. By Moonlight's rule (Liu et al., arXiv 2502.16982) both take the same rate and decay.
inline double muon_scale(int64_t rows, int64_t columns) { return 0.2 * std::sqrt(double(std::max(rows, columns))); }

// The model's matrices that Muon updates, in the order of the flat array.
inline std::vector<Piece> muon_matrices(const TensorList& table) {
    std::vector<Piece> all;
    for (const TensorSpec& t : table.specs)
        if (t.orthogonal) all.push_back({t.offset, t.size, t.offset, 0, t.rows, t.columns});
    return all;
}

// Working memory, and the update.
template <class Dev>
class Muon {
    using real = typename Dev::real;
    using Grad = typename Dev::Grad;
    using Sum = typename Dev::Sum;

    // On a device, matrices of one shape are multiplied together, as many as have so many elements: one of 768 x 768
    // keeps a quarter of a large GPU busy. A CPU has nothing to gain, and keeps one matrix in its caches.
    static constexpr size_t TOGETHER = Dev::on_host ? 1 : size_t(8) << 20;

    // Elements that the largest batch asks for.
    struct Sizes {
        size_t direction = 0, y = 0, square = 0, matrices = 0;
        explicit Sizes(const std::vector<MuonBatch>& batches) {
            for (const MuonBatch& b : batches) {
                const size_t count = b.matrices.size(), n = size_t(std::min(b.rows, b.columns));
                direction = std::max(direction, count * b.padded_size());
                y = std::max(y, count * b.size());
                square = std::max(square, count * n * n);
                matrices = std::max(matrices, count);
            }
        }
    };

    Dev& dev;
    const std::vector<MuonBatch> batches;
    Grad* direction = nullptr;                         // [matrices, padded size]; a matrix is [n, width], n <= width
    real *y = nullptr, *next = nullptr;                // [matrices, n, width]
    real *gram = nullptr, *polynomial = nullptr;       // [matrices, n, n]; polynomial: Q of orthogonalise()
    Sum *squares = nullptr, *norms_squared = nullptr;  // of the direction: of its chunks, [matrices]

    static std::vector<MuonBatch> batches_of(const std::vector<Piece>& owned) {
        std::map<std::pair<int64_t, int64_t>, std::vector<MuonMatrix>> by_shape;
        for (const Piece& p : owned)
            if (p.rows) by_shape[{p.rows, p.columns}].push_back({p.begin, p.m_at});
        std::vector<MuonBatch> all;
        for (const auto& [shape, matrices] : by_shape)
            for (size_t i = 0; i < matrices.size(); i++) {
                const bool full = i == 0 || (all.back().matrices.size() + 1) * all.back().size() > TOGETHER;
                if (full) all.push_back({shape.first, shape.second, {}});
                all.back().matrices.push_back(matrices[i]);
            }
        return all;
    }

  public:
    Muon(Dev& device, const std::vector<Piece>& owned) : dev(device), batches(batches_of(owned)) {
        const Sizes sizes(batches);
        direction = dev.template allocate<Grad>(sizes.direction);
        y = dev.template allocate<real>(sizes.y);
        next = dev.template allocate<real>(sizes.y);
        gram = dev.template allocate<real>(sizes.square);
        polynomial = dev.template allocate<real>(sizes.square);
        squares = dev.template allocate<Sum>(sizes.direction / CHUNK);
        norms_squared = dev.template allocate<Sum>(sizes.matrices);
    }
    ~Muon() {
        for (void* p : std::initializer_list<void*>{direction, y, next, gram, polynomial, squares, norms_squared})
            dev.release(p);
    }
    Muon(const Muon&) = delete;
    Muon& operator=(const Muon&) = delete;

    static double bytes_needed(const std::vector<Piece>& owned) {
        const Sizes s(batches_of(owned));
        return double(s.direction * sizeof(Grad) + 2 * (s.y + s.square) * sizeof(real));
    }

    // One step of all matrices, from the flat arrays. A gradient that is not finite changes nothing.
    void update(real* params, typename Dev::Master* master, typename Dev::Stat* m, const Grad* grads,
                HyperAdamWOf<Sum> h) {
        h.beta1 = MUON_MOMENTUM;
        h.offset = 0;
        for (const MuonBatch& b : batches) {
            const size_t count = b.matrices.size(), chunks = b.padded_size() / CHUNK;
            dev.muon_momentum(direction, m, grads, b, h);
            dev.chunk_squares(squares, direction, count * b.padded_size(), 0, count * b.padded_size());
            for (size_t i = 0; i < count; i++)
                dev.total_squares(norms_squared + i, squares + i * chunks, chunks, direction + i * b.padded_size());
            dev.muon_normalise(y, direction, norms_squared, newton_schulz_scale(0), b);
            orthogonalise(int(count), int(std::min(b.rows, b.columns)), int(std::max(b.rows, b.columns)));
            dev.muon_apply(params, master, y, h.lr * muon_scale(b.rows, b.columns), b, h);
        }
    }

  private:
    // y [n, width] = U V^T of the y that there was, about: of its singular value decomposition. With Y = s X before a
    // step and s' X after it, where s' = s^5 / c, a step is three products, and only what is added has a factor:
    //     G = Y Y^T        Q = G G^T + (b s^2 / c) G        Y <- Q Y + (a s' / s) Y
    void orthogonalise(int count, int n, int width) {
        for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
            const auto [a, b, c] = NEWTON_SCHULZ[step];
            const double before = newton_schulz_scale(step), after = newton_schulz_scale(step + 1);
            dev.muon_product(gram, y, y, true, nullptr, 0, count, n, n, width);
            dev.muon_product(polynomial, gram, gram, true, gram, b * before * before / c, count, n, n, n);
            dev.muon_product(next, polynomial, y, false, y, a * after / before, count, n, width, n);
            std::swap(y, next);
        }
    }
};

// Bytes of the optimiser's state, with what Muon works in, on the rank that has most.
template <class Dev>
double state_bytes(const Partition& p, bool sharded) {
    const size_t of_m = sizeof(typename Dev::Stat) + (Dev::has_master ? sizeof(typename Dev::Master) : 0);
    double largest = 0;
    for (int rank = 0; rank < (sharded ? p.ranks : 1); rank++) {
        const std::vector<Piece> owned = p.owned(rank, sharded);
        const StateElements state(owned);
        largest = std::max(
            largest, double(state.m * of_m + state.v * sizeof(typename Dev::Stat)) + Muon<Dev>::bytes_needed(owned));
    }
    return largest;
}
