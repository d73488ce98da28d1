// partition.h: who reduces and who updates what. The flat array of all gradients is cut into buckets of equal size, and
// every bucket into as many equal parts as there are ranks. With --zero 1 a rank keeps optimiser state only for what it
// updates, without gaps: its parts or, where --optimizer muon updates matrices as wholes, its share of the matrices and
// of its parts what lies between matrices. Used by Model in train_nsa.cu and by ddp.cuh.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "engine.h"
#include "tensors.h"

// FLOPs of a step of Newton-Schulz on a matrix: two products of n^2 width multiply-adds, and one of n^3.
inline double newton_schulz_step_flops(int64_t rows, int64_t columns) {
    const double n = double(std::min(rows, columns)), width = double(std::max(rows, columns));
    return 2 * n * n * (2 * width + n);
}

struct Piece {
    size_t begin, count;            // in the flat array
    size_t m_at;                    // where its master copy and its m begin in this rank's arrays
    size_t v_at = 0;                // where its v begins; a matrix of Muon has none
    int64_t rows = 0, columns = 0;  // of a matrix of Muon; else 0: AdamW updates every element by itself

    size_t end() const { return begin + count; }
};

// What two lists of pieces have in common, with the places of `owned`.
inline std::vector<Piece> common(const std::vector<Piece>& owned, const std::vector<Piece>& others) {
    std::vector<Piece> all;
    for (Piece p : owned)
        for (const Piece& other : others) {
            const size_t first = std::max(p.begin, other.begin), last = std::min(p.end(), other.end());
            if (first < last)
                all.push_back(
                    {first, last - first, p.m_at + (first - p.begin), p.v_at + (first - p.begin), p.rows, p.columns});
        }
    return all;
}

struct Partition {
    size_t elements = 0;  // of the flat arrays: at least one more than the model has, for the guard of gradient_norm()
    size_t bucket = 0;    // elements of a bucket; the last one may be shorter
    int ranks = 1;
    std::vector<Piece> matrices;  // of Muon, in the order of the flat array
    std::vector<int> owners;      // the rank that has each of them with --zero 1

    // bucket_mb: megabytes of a bucket at most. There are at least four where there are that many units, so that
    // something travels while the backward pass goes on; of one rank nothing travels, and all is one bucket.
    Partition(size_t total, int number_of_ranks, double bucket_mb, std::vector<Piece> wholes = {})
        : ranks(number_of_ranks), matrices(std::move(wholes)) {
        const size_t unit = CHUNK * size_t(ranks), wanted = size_t(bucket_mb * 1e6 / sizeof(float));
        elements = (total + 1 + unit - 1) / unit * unit;
        bucket = ranks == 1 ? elements : std::max(unit, std::min(wanted, elements / 4) / unit * unit);
        share_matrices();
    }
    size_t buckets() const { return (elements + bucket - 1) / bucket; }
    size_t begin(size_t b) const { return b * bucket; }
    size_t size(size_t b) const { return std::min(bucket, elements - b * bucket); }
    size_t shard() const { return elements / size_t(ranks); }
    Piece part(size_t b, int rank) const {
        return {begin(b) + size_t(rank) * (size(b) / size_t(ranks)), size(b) / size_t(ranks), begin(b) / size_t(ranks)};
    }
    std::vector<Piece> parts(int rank) const {
        std::vector<Piece> all;
        for (size_t b = 0; b < buckets(); b++) all.push_back(part(b, rank));
        return all;
    }

    // What a rank updates: everything, at the same places in m as in the flat array, or with `sharded` its own.
    std::vector<Piece> owned(int rank, bool sharded) const {
        std::vector<Piece> all;
        size_t state = 0;
        const auto add = [&](size_t begin, size_t end) {
            if (begin >= end) return;
            all.push_back({begin, end - begin, sharded ? state : begin, state});
            state += end - begin;
        };
        for (const Piece& cut : sharded ? parts(rank) : std::vector<Piece>{{0, elements, 0}}) {
            size_t at = cut.begin;
            for (const Piece& matrix : matrices) {
                if (matrix.end() <= at) continue;
                add(at, std::min(matrix.begin, cut.end()));
                at = std::max(at, matrix.end());
            }
            add(at, cut.end());
        }
        for (size_t i = 0; i < matrices.size(); i++) {
            if (sharded && owners[i] != rank) continue;
            all.push_back(matrices[i]);
            all.back().m_at = sharded ? state : matrices[i].begin;
            state += matrices[i].count;
        }
        return all;
    }

  private:
    // The costliest matrix first, each to the rank that has least to do.
    void share_matrices() {
        std::vector<double> costs, of_rank(size_t(ranks), 0.0);
        for (const Piece& m : matrices) costs.push_back(newton_schulz_step_flops(m.rows, m.columns));
        std::vector<size_t> order(matrices.size());
        std::iota(order.begin(), order.end(), size_t(0));
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
        owners.resize(matrices.size());
        for (const size_t i : order) {
            const auto idlest = std::min_element(of_rank.begin(), of_rank.end());
            *idlest += costs[i];
            owners[i] = int(idlest - of_rank.begin());
        }
    }
};

// Elements of the state of these pieces: those with an m, and those with a v too.
struct StateElements {
    size_t m = 0, v = 0;
    explicit StateElements(const std::vector<Piece>& owned) {
        for (const Piece& p : owned) {
            m += p.count;
            v += p.rows ? 0 : p.count;
        }
    }
};

// What a tensor's first `size` elements and a piece have in common: [first, last) in the flat arrays.
inline std::pair<size_t, size_t> overlap(const TensorSpec& t, size_t size, const Piece& p) {
    return {std::max(t.offset, p.begin), std::min(t.offset + size, p.begin + p.count)};
}

// Of a piece that AdamW updates: what is in it of each tensor, and whether it decays. None of a matrix of Muon.
inline std::vector<AdamWSpan> spans_of(const std::vector<TensorSpec>& specs, const Piece& p) {
    std::vector<AdamWSpan> all;
    for (const TensorSpec& t : specs) {
        const auto [first, last] = overlap(t, t.padded, p);
        if (first < last && !p.rows) add_span(all, first - p.begin, last - p.begin, t.decay);
    }
    return all;
}
