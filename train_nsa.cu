// train_nsa.cu: trains a language model with Native Sparse Attention (arXiv 2502.11089), from options to a sample it
// wrote.
//
// Read it from top to bottom: model (tensors, forward, backward, update) -> sampling -> checkpoints -> evaluation
// -> the training loop -> the other verbs -> main. The model is specified in dev/MODEL.md. The mathematics of each
// operation lies in an engine, Cpu in nsa_cpu.h or Cuda in nsa_kernels.cuh; below, `dev` is one of them. Options are
// in lib/options.h, ranks in ddp.cuh, token shards in dataloader.h, text in tokenizer.h.
#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include "lib/checkpoint.h"
#include "lib/json.h"
#include "lib/options.h"
#include "lib/safetensors.h"
#include "lib/synthetic.h"
#include "lib/tokenize.h"
#include "lib/util.h"
#include "lib/watchdog.h"
#include "dataloader.h"
#include "nsa_cpu.h"
#if defined(__CUDACC__) || defined(EMULATED_GPUS)  // the latter: kernels run on the CPU, see dev/emulator/emulator.mk
#include "nsa_kernels.cuh"
#define HAVE_CUDA
#endif
#include "ddp.cuh"  // after the engines, whose gradients it sums
#include "tokenizer.h"

// What the attention needs to know, for B sequences of T tokens.
static NsaShape shape_of(const Config& c, int64_t B, int64_t T) {
    NsaShape s;
    s.B = int(B), s.T = int(T), s.first = 0, s.queries = int(T);
    s.H = int(c.heads), s.G = int(c.kv_groups), s.D = int(c.head_dim);
    s.l = int(c.cmp_block), s.d = int(c.cmp_stride), s.slc_block = int(c.slc_block), s.slc_count = int(c.slc_count),
    s.window = int(c.window), s.F = int(c.phi_hidden);
    s.full = c.attention == "full";
    return s;
}

// ---------------------------------------------------------------------------------------------------------------------
// The model's tensors. One list: struct fields, names on disk, shapes, initialisation, weight decay, checkpoints all
// come from it.
//   TENSOR(field, name on disk, rows, columns (0: a vector), rows in memory, initialisation, decay, when, joined)
// "joined" tensors follow the one before without a gap: q, the keys and values and the gate are one matrix for the
// input GEMM.

enum Init { INIT_ONE, INIT_ZERO, INIT_WEIGHT, INIT_RESIDUAL, INIT_PHI };
enum { ALWAYS, NSA_ONLY };

// clang-format off
#define LAYER_TENSORS(TENSOR)                                                                             \
    TENSOR(attn_norm,  "attn_norm.weight",       C,     0,     C,     INIT_ONE,      false, ALWAYS,   false) \
    TENSOR(q_proj,     "attn.q_proj.weight",     H * D, C,     H * D, INIT_WEIGHT,   true,  ALWAYS,   false) \
    TENSOR(k_cmp_proj, "attn.k_cmp_proj.weight", G * D, C,     G * D, INIT_WEIGHT,   true,  NSA_ONLY, true)  \
    TENSOR(v_cmp_proj, "attn.v_cmp_proj.weight", G * D, C,     G * D, INIT_WEIGHT,   true,  NSA_ONLY, true)  \
    TENSOR(k_slc_proj, "attn.k_slc_proj.weight", G * D, C,     G * D, INIT_WEIGHT,   true,  NSA_ONLY, true)  \
    TENSOR(v_slc_proj, "attn.v_slc_proj.weight", G * D, C,     G * D, INIT_WEIGHT,   true,  NSA_ONLY, true)  \
    TENSOR(k_win_proj, "attn.k_win_proj.weight", G * D, C,     G * D, INIT_WEIGHT,   true,  ALWAYS,   true)  \
    TENSOR(v_win_proj, "attn.v_win_proj.weight", G * D, C,     G * D, INIT_WEIGHT,   true,  ALWAYS,   true)  \
    TENSOR(gate_proj,  "attn.gate_proj.weight",  3 * H, C,     gates, INIT_WEIGHT,   true,  NSA_ONLY, true)  \
    TENSOR(phi_k_fc1,  "attn.phi_k.fc1.weight",  F,     l * D, F,     INIT_PHI,      true,  NSA_ONLY, false) \
    TENSOR(phi_k_bias, "attn.phi_k.fc1.bias",    F,     0,     F,     INIT_ZERO,     false, NSA_ONLY, false) \
    TENSOR(phi_k_fc2,  "attn.phi_k.fc2.weight",  D,     F,     D,     INIT_ZERO,     true,  NSA_ONLY, false) \
    TENSOR(phi_v_fc1,  "attn.phi_v.fc1.weight",  F,     l * D, F,     INIT_PHI,      true,  NSA_ONLY, false) \
    TENSOR(phi_v_bias, "attn.phi_v.fc1.bias",    F,     0,     F,     INIT_ZERO,     false, NSA_ONLY, false) \
    TENSOR(phi_v_fc2,  "attn.phi_v.fc2.weight",  D,     F,     D,     INIT_ZERO,     true,  NSA_ONLY, false) \
    TENSOR(o_proj,     "attn.o_proj.weight",     C,     H * D, C,     INIT_RESIDUAL, true,  ALWAYS,   false) \
    TENSOR(mlp_norm,   "mlp_norm.weight",        C,     0,     C,     INIT_ONE,      false, ALWAYS,   false) \
    TENSOR(mlp_fc1,    "mlp.fc1.weight",         M,     C,     M,     INIT_WEIGHT,   true,  ALWAYS,   false) \
    TENSOR(mlp_fc2,    "mlp.fc2.weight",         C,     M,     C,     INIT_RESIDUAL, true,  ALWAYS,   false)
// clang-format on

struct TensorSpec {
    std::string name;
    int64_t rows, columns;  // columns 0: a vector
    Init init;
    bool decay;
    size_t offset;        // in elements, into each flat array (parameters, gradients, moments)
    size_t size, padded;  // elements on disk; in memory, where rows of zeros follow

    std::vector<int64_t> shape() const {
        return columns ? std::vector<int64_t>{rows, columns} : std::vector<int64_t>{rows};
    }
};

template <class T>
struct LayerWeights {
#define FIELD(field, ...) T* field = nullptr;
    LAYER_TENSORS(FIELD)
#undef FIELD
};
template <class T>
struct Weights {
    T* embed = nullptr;                  // (Vp, C), tied to the head
    std::vector<LayerWeights<T>> layer;  // (L)
    T* norm = nullptr;                   // (C)
};

struct TensorTable {
    std::vector<TensorSpec> specs;
    size_t total = 0;        // elements of a flat array, padding included
    int64_t parameters = 0;  // without padding
    int64_t padded_vocab = 0;

    explicit TensorTable(const Config& c) {
        const int64_t C = c.dim, H = c.heads, G = c.kv_groups, D = c.head_dim, l = c.cmp_block, F = c.phi_hidden,
                      M = c.mlp_hidden, gates = (3 * H + 7) / 8 * 8;
        const bool nsa = c.attention == "nsa";
        padded_vocab = (c.vocab_size + 127) / 128 * 128;
        add("embed_tokens.weight", c.vocab_size, C, padded_vocab, INIT_WEIGHT, true, false);
        for (int64_t i = 0; i < c.layers; i++) {
            const std::string prefix = "layers." + std::to_string(i) + ".";
#define ADD(field, name, rows, columns, memory_rows, init, decay, when, joined) \
    if (nsa || when == ALWAYS) add(prefix + name, rows, columns, memory_rows, init, decay, joined);
            LAYER_TENSORS(ADD)
#undef ADD
        }
        add("norm.weight", C, 0, C, INIT_ONE, false, false);
    }

    // Pointers to every tensor inside a flat array, in the order of the list.
    template <class T>
    Weights<T> point_into(T* flat, const Config& c) const {
        Weights<T> w;
        size_t i = 0;
        const bool nsa = c.attention == "nsa";
        w.embed = flat + specs[i++].offset;
        for (int64_t layer = 0; layer < c.layers; layer++) {
            LayerWeights<T> y;
#define POINT(field, name, rows, columns, memory_rows, init, decay, when, joined) \
    if (nsa || when == ALWAYS) y.field = flat + specs[i++].offset;
            LAYER_TENSORS(POINT)
#undef POINT
            w.layer.push_back(y);
        }
        w.norm = flat + specs[i].offset;
        return w;
    }

  private:
    void add(const std::string& name, int64_t rows, int64_t columns, int64_t memory_rows, Init init, bool decay,
             bool joined) {
        const size_t width = size_t(columns ? columns : 1), offset = joined ? total : (total + 63) / 64 * 64;
        specs.push_back({name, rows, columns, init, decay, offset, size_t(rows) * width, size_t(memory_rows) * width});
        total = offset + specs.back().padded;
        parameters += rows * int64_t(width);
    }
};

// Key/query pairs that a branch's mask allows, over all heads: 4*D FLOPs each in the forward pass (two products), 8*D
// in the backward pass (dV, dP, dQ, dK; computing the scores a second time is not counted). Counted, not estimated;
// selected blocks are taken as full (a query that may choose has n of them, the last one cut by causality).
inline double attention_pairs(Branch branch, const NsaShape& s) {
    double pairs = 0;
    for (int t = s.first; t < s.first + s.queries; t++) {
        if (branch == CMP) pairs += s.cmp_blocks(t + 1);
        else if (branch == WIN) pairs += s.full ? t + 1 : std::min(t + 1, s.window);
        else pairs += std::min(t / s.slc_block, s.slc_count - 1) * s.slc_block + t % s.slc_block + 1;
    }
    return pairs * s.B * s.H;
}
// FLOPs that the model needs for one token in training, as its share of the peak (MFU; PaLM, arXiv
// 2204.02311, appendix B) counts them: 6 for each weight of a matrix and row that it multiplies, 12
// D for each pair of query and key. Not what is computed twice, nor scores, norms or the update.
inline double model_flops_per_token(const Config& c) {
    const NsaShape s = shape_of(c, 1, c.seq_len);
    double flops = 0;
    // phi multiplies compressed blocks, everything else tokens; of the embedding that is the head
    for (const TensorSpec& t : TensorTable(c).specs) {
        const double rows = t.name.find(".phi_") == std::string::npos ? double(s.T) : double(s.cmp_rows());
        if (t.columns) flops += 6 * rows * double(t.size);
    }
    for (const Branch branch : {CMP, SLC, WIN})
        if (s.has(branch)) flops += 12.0 * s.D * attention_pairs(branch, s) * double(c.layers);
    return flops / s.T;
}

// Element i of the tensor with this index in the list. --init random draws every tensor, so that no path is silent in a
// comparison.
static float initial_value(const TensorSpec& t, size_t index, size_t i, const Config& c) {
    const double normal = t.init == INIT_ONE && c.init != "random"
                              ? 0
                              : random_normal(uint64_t(c.seed), random_stream(RANDOM_INIT, index), i);
    const bool random = c.init == "random";
    switch (t.init) {
        case INIT_ONE: return float(1 + (random ? 0.1 * normal : 0));
        case INIT_ZERO: return float(random ? normal * (t.columns ? 1 / std::sqrt(double(t.columns)) : 0.1) : 0);
        case INIT_WEIGHT: return float(normal * (random && t.columns ? 1 / std::sqrt(double(t.columns)) : 0.02));
        case INIT_RESIDUAL:
            return float(normal *
                         (random ? 1 / std::sqrt(double(t.columns)) : 0.02 / std::sqrt(2.0 * double(c.layers))));
        case INIT_PHI: return float(normal / std::sqrt(double(t.columns)));
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The model on an engine: parameters, gradients, moments; activations; forward, backward, update. Written once for
// every engine.

template <class Dev>
struct Model {
    using real = typename Dev::real;
    using Grad = typename Dev::Grad;
    Dev& dev;
    Config config;
    TensorTable table;
    Partition partition;  // of the flat arrays into buckets and, over the ranks, parts
    int rank;
    bool sharded;              // --zero 1 on several ranks
    std::vector<Piece> owned;  // what this rank updates: everything, or its parts
    // Flat arrays of partition.elements elements: the table's tensors, one more (guard), and padding. In inference only
    // params.
    real* params = nullptr;
    Grad* grads = nullptr;
    // Flat arrays of state_elements(), by Piece::local. On an engine without a master copy master is params, by
    // Piece::begin.
    typename Dev::Master* master = nullptr;
    typename Dev::Stat *m = nullptr, *v = nullptr;
    // of the running step: sum of its losses, sum of squares of its gradient; --deterministic: then every sample's loss
    double* results = nullptr;
    size_t result_count = 2;
    // the gradient's sums of squares, by chunk, and a guard behind them; of the running step at step % 2, of the one
    // before at the other
    double* squares[2] = {};
    std::vector<Grad*> partial;  // --deterministic: gradients of subtrees, see sum_in_tree
    Weights<real> w;
    Weights<Grad> dw;
    typename Dev::Sequence update_sequence;
    Watchdog* watchdog = nullptr;
    int64_t step = 0;  // the running one, for the watchdog

    Model(Dev& device, const Config& c, bool training, int rank_ = 0, int ranks = 1)
        : dev(device),
          config(c),
          table(c),
          partition(table.total, ranks, c.bucket_mb),
          rank(rank_),
          sharded(c.zero == 1 && ranks > 1) {
        auto allocate_zeros = [&](auto*& p, size_t count) {
            p = dev.template allocate<std::remove_reference_t<decltype(*p)>>(count);
            dev.zero(p, count);
        };
        allocate_zeros(params, partition.elements);
        w = table.point_into(params, c);
        if (!training) return;
        owned = sharded ? partition.parts(rank) : std::vector<Piece>{{0, partition.elements, 0}};
        if constexpr (Dev::has_master) allocate_zeros(master, state_elements());
        else master = params;
        allocate_zeros(grads, partition.elements), allocate_zeros(m, state_elements()),
            allocate_zeros(v, state_elements());
        if (c.deterministic) result_count += size_t(samples_per_rank());
        allocate_zeros(results, result_count);
        for (double*& s : squares) allocate_zeros(s, chunks() + 1);
        partial.resize(size_t(tree_levels(c, ranks)));
        for (Grad*& p : partial) allocate_zeros(p, partition.elements);
        dw = table.point_into(grads, c);
    }
    ~Model() {
        if constexpr (Dev::has_master) dev.release(master);
        for (Grad* p : partial) dev.release(p);
        dev.release(params), dev.release(grads), dev.release(m), dev.release(v), dev.release(results),
            dev.release(squares[0]), dev.release(squares[1]);
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    size_t state_elements() const { return sharded ? partition.shard() : partition.elements; }
    size_t chunks() const { return partition.elements / CHUNK; }
    int64_t samples_per_rank() const {
        return std::max<int64_t>(1, config.total_batch / std::max<int64_t>(1, config.seq_len) / partition.ranks);
    }
    typename Dev::Master* master_at(const Piece& p, size_t i) const {
        return Dev::has_master ? master + p.local + (i - p.begin) : master + i;
    }
    void progress(const char* phase) const {
        if (watchdog) watchdog->progress(step, phase);
    }

    // Gradient buffers that --deterministic needs beside the first.
    static int64_t tree_levels(const Config& c, int ranks) {
        int64_t levels = 0;
        if (c.deterministic)
            while ((int64_t(1) << levels) < c.total_batch / c.seq_len / ranks) levels++;
        return levels;
    }
    // Bytes of the flat arrays in training.
    static double flat_bytes(const Config& c, int ranks) {
        const Partition p(TensorTable(c).total, ranks, c.bucket_mb);
        const double state =
            double(Dev::has_master ? sizeof(typename Dev::Master) : 0) + 2 * sizeof(typename Dev::Stat);
        return double(p.elements) * (double(sizeof(real)) + sizeof(Grad) * double(1 + tree_levels(c, ranks)) +
                                     state / (c.zero == 1 ? ranks : 1));
    }

    // What a tensor and a piece have in common, [first, last) in the flat arrays.
    static std::pair<size_t, size_t> overlap(const TensorSpec& t, size_t size, const Piece& p) {
        return {std::max(t.offset, p.begin), std::min(t.offset + size, p.begin + p.count)};
    }

    void set_parameter(const TensorSpec& t, const float* values) {
        dev.from_host(params + t.offset, values, t.size);
        if constexpr (Dev::has_master)
            for (const Piece& p : owned) {
                const auto [first, last] = overlap(t, t.size, p);
                if (first < last) dev.from_host(master_at(p, first), values + (first - t.offset), last - first);
            }
    }
    void initialise() {
        for (size_t index = 0; index < table.specs.size(); index++) {
            const TensorSpec& t = table.specs[index];
            std::vector<float> values(t.size);
#pragma omp parallel for schedule(static)
            for (size_t i = 0; i < t.size; i++) values[i] = initial_value(t, index, i, config);
            set_parameter(t, values.data());
        }
    }
};

// What the forward pass leaves for the backward pass, and the backward's own temporaries: one
// allocation. In inference the layers share everything but their keys and values, which are then the caches of
// step-by-step decoding; they are for T tokens, all else for the `queries` positions that are computed at once. In
// training, where that is all T, --recompute says what is kept per layer:
//   0  everything
//   1  not what is cheap to compute again: norms' outputs, SiLU, gated sum
//   2  the layer's input only (and small statistics)
// What is not kept has one buffer for all layers, and the backward pass computes it again, to the same bits.
enum Mode { INFERENCE, TRAINING };

template <class Dev>
struct Activations {
    using real = typename Dev::real;
    using Stat = typename Dev::Stat;
    struct Layer {                // shapes in training, where queries = T; N = B*queries
        real* x;                  // (N, C) the residual stream that enters the layer
        real* attn_normed;        // (N, C)
        Stat* attn_rstd;          // (N)
        real* q;                  // (B, H, T, D)
        real* kv;                 // (6, B, G, T, D) by HeadSlot; full attention: only k_win, v_win
        Stat* gate;               // (3, B, H, T); full attention: none
        real* compressed;         // (2, B, G, NC, D) compressed keys, values
        real* phi_hidden;         // (2, B, G, NC, F)
        real* o;                  // (3, B, H, T, D) by Branch; full attention: 1 instead of 3
        Stat* lse;                // (3, B, H, T)
        uint32_t* selection;      // (B, G, T, words)
        Stat* chosen_importance;  // (B, G, T) where statistics are collected
        real* attn;               // (N, H*D) gated sum of the branches
        real* x_mid;              // (N, C) the residual stream between attention and MLP
        real* mlp_normed;         // (N, C)
        Stat* mlp_rstd;           // (N)
        real *fc1, *act;          // (N, M) (N, M)
    };
    Dev& dev;
    NsaShape shape;
    int64_t C, M, V, Vp;
    int recompute;  // 0, 1, 2; 0 in inference
    std::vector<Layer> layer;
    int32_t *tokens, *targets;  // (N)
    real *x_out, *normed;       // (N, C) (N, C) the last residual stream, its norm
    Stat* rstd;                 // (N)
    real* projected;            // (N, P) the input projection of the running layer, or its gradient
    real* logits;               // (rows, Vp) of a chunk of rows: no N x V array anywhere
    int64_t logit_rows;
    Stat* losses;  // (N)
    // backward
    real *dx, *dnormed, *dattn, *dmlp;  // (N, C) (N, C) (N, H*D) (N, M)
    Stat *dq, *dgate;                   // as above, one layer's
    real *dkv, *dcompressed;
    Stat *row_dot, *lse_gated;  // as lse
    bool collect_statistics = false;
    // The kinds of micro-steps (see micro_step()) that were made with these
    // activations. Each is a sequence of launches that does not change.
    struct MicroStep {
        const void* grads;
        bool last, with_backward, statistics;
        bool operator<(const MicroStep& o) const {
            return std::tie(grads, last, with_backward, statistics) <
                   std::tie(o.grads, o.last, o.with_backward, o.statistics);
        }
    };
    std::map<MicroStep, typename Dev::Sequence> micro_steps;

    struct Entry {
        std::string name;
        size_t count, bytes;  // buffers of this name, their bytes together
    };
    std::vector<Entry> memory;  // the table of the allocation
    size_t bytes = 0;
    double wanted = 0;  // the same before anything is allocated; options can ask for more than size_t holds

    // queries: positions computed at once, at most; 0: all T
    Activations(Dev& device, const Config& c, int64_t B, int64_t T, Mode mode, int64_t queries = 0)
        : Activations(Planned(), device, c, B, T, mode, queries) {
        base = dev.template allocate<char>(bytes);
        memory.clear(), bytes = 0, wanted = 0;
        place(mode);
    }
    ~Activations() { dev.release(base); }
    Activations(const Activations&) = delete;
    Activations& operator=(const Activations&) = delete;

    // The bytes of such an object, without allocating it.
    static double bytes_needed(Dev& dev, const Config& c, int64_t B, int64_t T, Mode mode, int64_t queries = 0) {
        return Activations(Planned(), dev, c, B, T, mode, queries).wanted;
    }

    real* slot(real* kv, int head_slot) const {
        return kv + (head_slot - (shape.full ? K_WIN : K_CMP)) * shape.key_rows() * shape.D;
    }
    typename Dev::Heads heads(const Layer& y) const {
        typename Dev::Heads h{y.q, {}, y.gate};
        for (int i = shape.full ? K_WIN : K_CMP; i <= V_WIN; i++) h.kv[i] = slot(y.kv, i);
        return h;
    }
    typename Dev::HeadGradients head_gradients() const {
        typename Dev::HeadGradients h{dq, {}, dgate};
        for (int i = shape.full ? K_WIN : K_CMP; i <= V_WIN; i++) h.kv[i] = slot(dkv, i);
        return h;
    }

    // Chunks of equal size of about 52 M logits at most (208 MiB of fp32), on a GPU 416 M (832 MiB of
    // bf16), rounded up to whole tiles of its GEMM. Each chunk reads the head twice and reads and writes its
    // gradient: 0.5 GB for GPT-2's vocabulary, while a micro-batch of 16 x 2048 has 3.3 GB of logits.
    int64_t rows_of_chunk(int64_t N) const {
        const int64_t most = std::max<int64_t>(1, (int64_t(Dev::on_host ? 52 : 416) << 20) / Vp),
                      chunks = (N + most - 1) / most;
        return std::min(N, ((N + chunks - 1) / chunks + 127) / 128 * 128);
    }

  private:
    char* base = nullptr;  // null while only sizes are wanted

    struct Planned {};
    Activations(Planned, Dev& device, const Config& c, int64_t B, int64_t T, Mode mode, int64_t queries)
        : dev(device),
          shape(shape_of(c, B, T)),
          C(c.dim),
          M(c.mlp_hidden),
          V(c.vocab_size),
          Vp(TensorTable(c).padded_vocab),
          recompute(mode == TRAINING ? int(c.recompute) : 0) {
        if (queries) shape.queries = int(queries);
        logit_rows = rows_of_chunk(B * shape.queries);
        layer.resize(size_t(c.layers));
        place(mode);
    }

    void place(Mode mode) {
        const NsaShape& s = shape;
        const size_t N = size_t(s.B) * s.queries, D = size_t(s.D), kv_slots = s.full ? 2 : 6,
                     branch_rows = size_t(s.branches()) * N * s.H, gates = s.full ? 0 : branch_rows,
                     selections = s.full ? 0 : N * s.G;
        const bool training = mode == TRAINING;
        take(tokens, "tokens (N)", N), take(targets, "targets (N)", N), take(losses, "losses (N)", N);
        for (size_t i = 0; i < layer.size(); i++) {
            Layer &y = layer[i], &first = layer[0];
            // One buffer per layer where `kept`, else the first layer's serves all.
            auto per_layer = [&](bool kept, auto*& p, auto*& shared, const char* name, size_t count) {
                if (kept || i == 0) take(p, name, count);
                else p = shared;
            };
            const bool costly = training && recompute < 2, cheap = training && recompute < 1;
            if (training || i < 2) take(y.x, "x (N, C)", N * C);
            else y.x = layer[i - 2].x;  // in inference a layer reads one and writes the other
            per_layer(costly || !training, y.kv, first.kv, "keys and values (6, B, G, T, D)",
                      kv_slots * s.key_rows() * D);
            per_layer(costly || !training, y.compressed, first.compressed,
                      "compressed keys and values (2, B, G, NC, D)", 2 * s.cmp_rows() * D);
            per_layer(training, y.gate, first.gate, "gate (3, B, H, T)", gates);
            per_layer(training, y.selection, first.selection, "selection (B, G, T, words)",
                      selections * s.selection_words());
            per_layer(training, y.chosen_importance, first.chosen_importance, "chosen importance (B, G, T)",
                      selections);
            per_layer(costly, y.attn_rstd, first.attn_rstd, "attn_rstd (N)", N);
            per_layer(costly, y.q, first.q, "q (B, H, T, D)", N * s.H * D);
            per_layer(costly, y.phi_hidden, first.phi_hidden, "phi_hidden (2, B, G, NC, F)", 2 * s.cmp_rows() * s.F);
            per_layer(costly, y.o, first.o, "branch outputs (3, B, H, T, D)", branch_rows * D);
            per_layer(costly, y.lse, first.lse, "lse (3, B, H, T)", branch_rows);
            per_layer(costly, y.x_mid, first.x_mid, "x_mid (N, C)", N * C);
            per_layer(costly, y.mlp_rstd, first.mlp_rstd, "mlp_rstd (N)", N);
            per_layer(costly, y.fc1, first.fc1, "fc1 (N, M)", N * M);
            per_layer(cheap, y.attn_normed, first.attn_normed, "attn_normed (N, C)", N * C);
            per_layer(cheap, y.attn, first.attn, "attn (N, H*D)", N * s.H * D);
            per_layer(cheap, y.mlp_normed, first.mlp_normed, "mlp_normed (N, C)", N * C);
            per_layer(cheap, y.act, first.act, "act (N, M)", N * M);
        }
        take(x_out, "x_out (N, C)", N * C), take(normed, "normed (N, C)", N * C), take(rstd, "rstd (N)", N);
        take(projected, "projected (N, P)", N * s.projected()),
            take(logits, "logits (rows, Vp)", size_t(logit_rows) * Vp);
        if (!training) return;
        take(dx, "dx (N, C)", N * C), take(dnormed, "dnormed (N, C)", N * C),
            take(dattn, "dattn (N, H*D)", N * s.H * D), take(dmlp, "dmlp (N, M)", N * M);
        take(dq, "dq (B, H, T, D)", N * s.H * D), take(dkv, "dkv (6, B, G, T, D)", kv_slots * s.key_rows() * D),
            take(dgate, "dgate (3, B, H, T)", gates);
        take(dcompressed, "dcompressed (2, B, G, NC, D)", 2 * s.cmp_rows() * D),
            take(row_dot, "row_dot (3, B, H, T)", branch_rows), take(lse_gated, "lse_gated (3, B, H, T)", branch_rows);
    }

    template <class T>
    void take(T*& p, const char* name, size_t count) {
        p = base ? reinterpret_cast<T*>(base + bytes) : nullptr;
        const size_t size = (count * sizeof(T) + 255) / 256 * 256;
        bytes += size, wanted += double(count) * sizeof(T);
        for (Entry& e : memory)
            if (e.name == name) return void((e.count++, e.bytes += size));
        memory.push_back({name, 1, size});
    }
};

// One layer for positions s.first .. s.first + s.queries - 1: from y.x to x_next. again: --recompute 2, for the
// backward pass, which needs neither x_next nor, as it was kept, the selection a second time.
template <class Dev>
void forward_layer(const Model<Dev>& model, Activations<Dev>& a, size_t i, const NsaShape& s, bool again = false) {
    Dev& dev = model.dev;
    auto& y = a.layer[i];
    const auto& w = model.w.layer[i];
    const int N = s.B * s.queries, C = int(a.C), M = int(a.M), HD = s.H * s.D;
    const size_t rows = s.query_rows(), kv = s.cmp_rows() * s.D, hidden = s.cmp_rows() * s.F;
    typename Dev::real* x_next = i + 1 < a.layer.size() ? a.layer[i + 1].x : a.x_out;
    const auto h = a.heads(y);

    model.progress("forward");
    dev.rmsnorm_forward(y.attn_normed, y.attn_rstd, y.x, w.attn_norm, N, C);
    dev.matmul_forward(a.projected, y.attn_normed, w.q_proj, nullptr, N, C, s.projected());
    dev.split_heads_forward(h, a.projected, s);
    if (!s.full) {
        dev.compress_forward(y.compressed, y.phi_hidden, h.kv[K_CMP], {w.phi_k_fc1, w.phi_k_bias, w.phi_k_fc2}, true,
                             s);
        dev.compress_forward(y.compressed + kv, y.phi_hidden + hidden, h.kv[V_CMP],
                             {w.phi_v_fc1, w.phi_v_bias, w.phi_v_fc2}, false, s);
        dev.attention_forward(CMP, y.o, y.lse, y.q, y.compressed, y.compressed + kv, nullptr, s);
        if (!again)
            dev.select_blocks(y.selection, a.collect_statistics ? y.chosen_importance : nullptr, y.q, y.compressed,
                              y.lse, s);
        dev.attention_forward(SLC, y.o + SLC * rows * s.D, y.lse + SLC * rows, y.q, h.kv[K_SLC], h.kv[V_SLC],
                              y.selection, s);
    }
    const size_t win = size_t(s.branch_slot(WIN)) * rows;
    dev.attention_forward(WIN, y.o + win * s.D, y.lse + win, y.q, h.kv[K_WIN], h.kv[V_WIN], nullptr, s);
    dev.combine_forward(y.attn, y.o, y.gate, s);
    dev.matmul_forward(y.x_mid, y.attn, w.o_proj, y.x, N, HD, C);  // x += o_proj(attention)

    dev.rmsnorm_forward(y.mlp_normed, y.mlp_rstd, y.x_mid, w.mlp_norm, N, C);
    dev.matmul_forward(y.fc1, y.mlp_normed, w.mlp_fc1, nullptr, N, C, M);
    dev.silu_forward(y.act, y.fc1, size_t(N) * M);
    if (!again) dev.matmul_forward(x_next, y.act, w.mlp_fc2, y.x_mid, N, M, C);  // x += fc2(silu(fc1))
}

// Forward through all layers for positions first .. first+queries-1 of B sequences, whose tokens [B, queries] are in
// a.tokens. Training and evaluation take all T at once; decoding takes a prompt, then one position at a time, and finds
// the earlier keys and values in place. Leaves the normed residual stream of those positions in a.normed.
template <class Dev>
void forward(const Model<Dev>& model, Activations<Dev>& a, int first, int queries) {
    Dev& dev = model.dev;
    NsaShape s = a.shape;
    s.first = first, s.queries = queries;
    const int N = s.B * queries, C = int(a.C);
    dev.embedding_forward(a.layer[0].x, a.tokens, model.w.embed, N, C);
    for (size_t i = 0; i < a.layer.size(); i++) forward_layer(model, a, i, s);
    dev.rmsnorm_forward(a.normed, a.rstd, a.x_out, model.w.norm, N, C);
}
// The same for tokens on the host.
template <class Dev>
void forward(const Model<Dev>& model, Activations<Dev>& a, const int32_t* tokens, int first, int queries) {
    model.dev.upload(a.tokens, tokens, size_t(a.shape.B) * size_t(queries));
    forward(model, a, first, queries);
}

// Cross-entropy of the tied head after a forward pass over all T, whose targets are in a.targets, in
// chunks of rows, so that the logits never exist as a whole: a.losses [N]. With want_gradient, every
// loss counts dloss in the gradient: a.dnormed = and dembed +=. logits_out, where given: [N, V].
template <class Dev>
void classify_rows(Model<Dev>& model, Activations<Dev>& a, double dloss, bool want_gradient,
                   std::vector<float>* logits_out = nullptr) {
    Dev& dev = model.dev;
    const int64_t N = int64_t(a.shape.B) * a.shape.T, C = a.C;
    if (logits_out) logits_out->resize(size_t(N * a.V));
    for (int64_t row = 0; row < N; row += a.logit_rows) {
        const int rows = int(std::min(a.logit_rows, N - row));
        model.progress("classifier");
        dev.matmul_forward(a.logits, a.normed + row * C, model.w.embed, nullptr, rows, int(C), int(a.Vp));
        if (logits_out)
            for (int r = 0; r < rows; r++)
                dev.to_host(logits_out->data() + (row + r) * a.V, a.logits + r * a.Vp, size_t(a.V));
        dev.classifier(a.losses + row, a.logits, a.targets + row, dloss, want_gradient, rows, int(a.V), int(a.Vp));
        if (!want_gradient) continue;
        dev.matmul_backward_input(a.dnormed + row * C, a.logits, model.w.embed, rows, int(C), int(a.Vp));
        dev.matmul_backward_weight(model.dw.embed, a.logits, a.normed + row * C, rows, int(C), int(a.Vp));
    }
}
// The same for targets on the host, and waits for the sum of the N losses.
template <class Dev>
double classify(Model<Dev>& model, Activations<Dev>& a, const int32_t* targets, double dloss, bool want_gradient,
                std::vector<float>* logits_out = nullptr) {
    model.dev.upload(a.targets, targets, size_t(a.shape.B) * size_t(a.shape.T));
    classify_rows(model, a, dloss, want_gradient, logits_out);
    std::vector<typename Dev::Stat> losses(size_t(a.shape.B) * a.shape.T);
    model.dev.copy(losses.data(), a.losses, losses.size());
    double sum = 0;
    for (double loss : losses) sum += loss;
    return sum;
}

// Adds the gradient of everything below the head to the model's gradients, from a.dnormed. Each step names the forward
// line it differentiates. ready(offset), if given, is called when all gradients from that place of the flat array on
// are final.
template <class Dev>
void backward(Model<Dev>& model, Activations<Dev>& a, const std::function<void(size_t)>& ready = nullptr) {
    using real = typename Dev::real;
    Dev& dev = model.dev;
    const NsaShape& s = a.shape;
    const int N = s.B * s.T, C = int(a.C), M = int(a.M), HD = s.H * s.D, P = s.projected();
    const size_t rows = s.query_rows(), kv = s.cmp_rows() * s.D, hidden = s.cmp_rows() * s.F;
    const auto d = a.head_gradients();
    dev.zero(a.dx, size_t(N) * C);
    // normed = rmsnorm(x_out)
    dev.rmsnorm_backward(a.dx, model.dw.norm, a.dnormed, a.x_out, a.rstd, model.w.norm, N, C);
    for (size_t i = a.layer.size(); i-- > 0;) {
        model.progress("backward");
        auto& y = a.layer[i];
        const auto& w = model.w.layer[i];
        const auto& dw = model.dw.layer[i];
        const auto h = a.heads(y);

        // What was not kept; at level 2 with the forward pass's own lines.
        if (a.recompute == 2) forward_layer(model, a, i, s, true);
        if (a.recompute == 1) {
            dev.rmsnorm_forward(y.attn_normed, y.attn_rstd, y.x, w.attn_norm, N, C);
            dev.combine_forward(y.attn, y.o, y.gate, s);
            dev.rmsnorm_forward(y.mlp_normed, y.mlp_rstd, y.x_mid, w.mlp_norm, N, C);
            dev.silu_forward(y.act, y.fc1, size_t(N) * M);
        }

        // x_next = x_mid + fc2(act); a.dx is the gradient of x_next and, along the residual, of x_mid
        dev.matmul_backward_weight(dw.mlp_fc2, a.dx, y.act, N, M, C);
        dev.matmul_backward_input(a.dmlp, a.dx, w.mlp_fc2, N, M, C);
        // act = silu(fc1)
        dev.silu_backward(a.dmlp, a.dmlp, y.fc1, size_t(N) * M);
        // fc1 = mlp_normed mlp_fc1^T
        dev.matmul_backward_weight(dw.mlp_fc1, a.dmlp, y.mlp_normed, N, C, M);
        dev.matmul_backward_input(a.dnormed, a.dmlp, w.mlp_fc1, N, C, M);
        // mlp_normed = rmsnorm(x_mid)
        dev.rmsnorm_backward(a.dx, dw.mlp_norm, a.dnormed, y.x_mid, y.mlp_rstd, w.mlp_norm, N, C);

        // x_mid = x + o_proj(attn)
        dev.matmul_backward_weight(dw.o_proj, a.dx, y.attn, N, HD, C);
        dev.matmul_backward_input(a.dattn, a.dx, w.o_proj, N, HD, C);
        // attn = sum of gate * branch; the branches
        dev.attention_backward_rows(a.row_dot, a.lse_gated, a.dgate, a.dattn, y.o, y.gate, y.lse, s);
        auto branch_backward = [&](Branch branch, real* dk, real* dv, const real* k, const real* v) {
            const size_t at = size_t(s.branch_slot(branch)) * rows;
            dev.attention_backward(branch, a.dq, branch != WIN, dk, dv, a.dattn, y.q, k, v, a.row_dot + at,
                                   a.lse_gated + at, y.selection, s);
        };
        // The window's comes first: every query has keys there, and what it writes to dq the others add to.
        branch_backward(WIN, d.kv[K_WIN], d.kv[V_WIN], h.kv[K_WIN], h.kv[V_WIN]);
        if (!s.full) {
            branch_backward(SLC, d.kv[K_SLC], d.kv[V_SLC], h.kv[K_SLC], h.kv[V_SLC]);
            branch_backward(CMP, a.dcompressed, a.dcompressed + kv, y.compressed, y.compressed + kv);
            // compressed = phi(blocks of k_cmp), phi(blocks of v_cmp)
            dev.compress_backward(d.kv[K_CMP], {dw.phi_k_fc1, dw.phi_k_bias, dw.phi_k_fc2}, a.dcompressed, y.phi_hidden,
                                  h.kv[K_CMP], {w.phi_k_fc1, w.phi_k_bias, w.phi_k_fc2}, true, s);
            dev.compress_backward(d.kv[V_CMP], {dw.phi_v_fc1, dw.phi_v_bias, dw.phi_v_fc2}, a.dcompressed + kv,
                                  y.phi_hidden + hidden, h.kv[V_CMP], {w.phi_v_fc1, w.phi_v_bias, w.phi_v_fc2}, false,
                                  s);
        }
        // heads = split(attn_normed [q; k; v; gate]^T)
        dev.split_heads_backward(a.projected, d, s);
        dev.matmul_backward_weight(dw.q_proj, a.projected, y.attn_normed, N, C, P);
        dev.matmul_backward_input(a.dnormed, a.projected, w.q_proj, N, C, P);
        // attn_normed = rmsnorm(x)
        dev.rmsnorm_backward(a.dx, dw.attn_norm, a.dnormed, y.x, y.attn_rstd, w.attn_norm, N, C);
        if (ready)
            ready(size_t(dw.attn_norm - model.dw.embed));  // the layer's first tensor; behind it lie only later layers
    }
    // x = embed[token]
    dev.embedding_backward(model.dw.embed, a.dx, a.tokens, N, C);
}

// Learning rate of a step, 1-based: linear warm-up, then the schedule down to lr * lr_final at the last step.
static double learning_rate(const Config& c, int64_t step) {
    if (step <= c.warmup) return c.lr * double(step) / double(c.warmup);
    const double progress =
        c.steps > c.warmup ? std::min(1.0, double(step - c.warmup) / double(c.steps - c.warmup)) : 1.0;
    double fraction = 1;  // of the way from lr_final up to 1
    if (c.schedule == "cosine") fraction = 0.5 * (1 + std::cos(M_PI * progress));
    if (c.schedule == "linear") fraction = 1 - progress;
    if (c.schedule == "wsd") fraction = std::min(1.0, (1 - progress) / 0.2);
    return c.lr * (c.lr_final + (1 - c.lr_final) * fraction);
}

// The squared global L2 norm of the summed gradients to model.results[1], NaN where a rank's loss is not finite; it is
// not waited for. Its bits depend on the gradients alone, not on who owns which part of them.
template <class Dev>
void gradient_norm(Model<Dev>& model, int64_t step, Reducer<Dev>* reducer = nullptr) {
    using Grad = typename Dev::Grad;
    double* squares = model.squares[step % 2];
    Grad* guard = model.grads + model.table.total;
    if (model.sharded) model.dev.zero(squares, model.chunks());
    for (const Piece& p : model.owned)
        model.dev.chunk_squares(squares, model.grads, model.table.total, p.begin, p.count);
    // of the summed gradients a rank has its parts alone, and one of all has the guard: each rank's loss travels with
    // the squares
    if (model.sharded && reducer) {
        model.dev.set_guard(squares + model.chunks(), model.results);
        reducer->complete(squares, model.chunks() + 1);
        model.dev.set_guard(guard, squares + model.chunks());
    }
    model.dev.total_squares(model.results + 1, squares, model.chunks(), guard);
}

// One AdamW step on the summed gradients, clipped to the global L2 norm of
// gradient_norm(). If that is not finite, the weights stay as they are.
template <class Dev>
void apply_update(Model<Dev>& model, int64_t step, double lr, Reducer<Dev>* reducer = nullptr) {
    const Config& c = model.config;
    HyperAdamW h{lr, c.beta1, c.beta2, c.adam_eps, 0.0, step, uint64_t(c.seed), 0};
    h.squares = model.results + 1, h.grad_clip = c.grad_clip;
    model.dev.set_step(h);
    model.dev.run(model.update_sequence, [&] {
        for (const Piece& p : model.owned)
            for (const TensorSpec& t : model.table.specs) {
                const auto [first, last] = model.overlap(t, t.padded, p);
                if (first >= last) continue;
                h.decay = t.decay ? c.weight_decay : 0.0, h.offset = first;
                const size_t local = p.local + (first - p.begin);
                model.dev.adamw(model.params + first, model.master_at(p, first), model.m + local, model.v + local,
                                model.grads + first, last - first, h);
            }
    });
    if (model.sharded && reducer) reducer->gather(model.params);
}

template <class Dev>
void update(Model<Dev>& model, int64_t step, double lr, Reducer<Dev>* reducer = nullptr) {
    gradient_norm(model, step, reducer);
    apply_update(model, step, lr, reducer);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sampling.

// The next token from its logits [V]: temperature, then the top_k likeliest, then the likeliest of total probability
// top_p.
static int32_t choose_token(const std::vector<float>& logits, double temperature, int64_t top_k, double top_p,
                            double uniform) {
    std::vector<int32_t> order(logits.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = int32_t(i);
    const size_t keep = top_k > 0 ? std::min<size_t>(size_t(top_k), order.size()) : order.size();
    const auto likelier = [&](int32_t a, int32_t b) {
        return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
    };
    if (temperature == 0) return *std::min_element(order.begin(), order.end(), likelier);
    if (keep < order.size() || top_p < 1) std::sort(order.begin(), order.end(), likelier);
    order.resize(keep);
    std::vector<double> weight(keep);
    double total = 0, largest = logits[size_t(*std::min_element(order.begin(), order.end(), likelier))];
    for (size_t i = 0; i < keep; i++) total += weight[i] = std::exp((logits[size_t(order[i])] - largest) / temperature);
    if (top_p < 1) {  // the shortest prefix that holds top_p of the mass, at least one token
        double sum = 0;
        size_t n = 0;
        while (n < keep && (n == 0 || sum < top_p * total)) sum += weight[n++];
        order.resize(n), total = sum;
    }
    double left = uniform * total;
    size_t chosen = 0;  // the last token of non-zero weight, if rounding leaves anything over
    for (size_t i = 0; i < order.size() && left >= 0; i++)
        if (weight[i] > 0) chosen = i, left -= weight[i];
    return order[chosen];
}

// While it lives a CPU decodes on as many threads as pay for one token: one for each
// 32 M weights. A loop over a single position is over before more have woken up.
struct DecodingThreads {
    const int before = omp_get_max_threads();
    explicit DecodingThreads(size_t weights) {
        omp_set_num_threads(int(std::max<size_t>(1, std::min(size_t(before), weights >> 25))));
    }
    ~DecodingThreads() { omp_set_num_threads(before); }
};

// Continues a prompt of at least one token by `count` tokens; each new token is handed to `emit`. The prompt is one
// forward pass, each further token one pass over a single position with the caches. The random numbers depend on seed
// and position alone.
template <class Dev>
void generate(Model<Dev>& model, const std::vector<int32_t>& prompt, int64_t count, const Config& c,
              const std::function<void(int32_t)>& emit) {
    Dev& dev = model.dev;
    const int64_t prompted = int64_t(prompt.size());
    const double needed = Activations<Dev>::bytes_needed(dev, model.config, 1, prompted + count, INFERENCE, prompted),
                 available = dev.available_bytes();
    if (needed > available)
        fail(
            "a sample of %lld tokens after a prompt of %lld needs %.0f MiB, most of them for keys and values; %.0f MiB "
            "are available: ask "
            "for fewer",
            (long long)count, (long long)prompted, needed / (1 << 20), available / (1 << 20));
    Activations<Dev> a(dev, model.config, 1, prompted + count, INFERENCE, prompted);
    std::vector<int32_t> next = prompt;
    std::vector<float> logits(static_cast<size_t>(a.V));
    int position = 0;
    std::unique_ptr<DecodingThreads> threads;
    for (int64_t i = 0; i < count; i++) {
        if (i == 1) threads = std::make_unique<DecodingThreads>(model.table.total);  // behind the prompt
        forward(model, a, next.data(), position, int(next.size()));
        position += int(next.size());
        dev.matmul_forward(a.logits, a.normed + (next.size() - 1) * size_t(a.C), model.w.embed, nullptr, 1, int(a.C),
                           int(a.Vp));
        dev.to_host(logits.data(), a.logits, logits.size());
        for (const float x : logits)
            if (!std::isfinite(x))
                fail("sample: the model's logits at position %d are not finite: its weights are no use", position);
        next = {choose_token(logits, c.temperature, c.top_k, c.top_p,
                             random_uniform(uint64_t(c.seed), random_stream(RANDOM_SAMPLE), uint64_t(position)))};
        emit(next[0]);
    }
}

// The vocabulary of a model, where its files are known: bytes need none, GPT-2's come from --vocab-dir.
static std::unique_ptr<Tokenizer> load_tokenizer(const Config& c) {
    if (c.tokenizer == "bytes") return std::make_unique<Tokenizer>(Tokenizer::bytes());
    if (c.vocab_dir.empty()) return nullptr;
    return std::make_unique<Tokenizer>(Tokenizer::gpt2(c.vocab_dir));
}

// A sample as text on stdout, as it is written: the prompt (a new document if there is none), then the model's words.
template <class Dev>
void print_sample(Model<Dev>& model, const Tokenizer& tokenizer, const Config& c, int64_t count) {
    std::vector<uint16_t> ids = {tokenizer.end_of_text};
    Encoder(tokenizer).append(c.prompt.data(), c.prompt.size(), ids);
    std::fputs(c.prompt.c_str(), stdout);
    const bool on_terminal = isatty(1);
    generate(model, std::vector<int32_t>(ids.begin(), ids.end()), count, c, [&](int32_t token) {
        std::string text = token == tokenizer.end_of_text ? "\n" : tokenizer.decode({uint16_t(token)});
        for (char& x : text)  // a model of bytes that has hardly learnt writes escape sequences too
            if (on_terminal && ((uint8_t(x) < ' ' && x != '\n' && x != '\t') || x == 127)) x = '?';
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
    });
    std::printf("\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints: RUN/step_00001000/ with model.safetensors, config.json, one optimizer_<rank>-of-<ranks>.safetensors
// per rank, and manifest.json, which holds the checksums and what a resume needs beside the tensors. How such a
// folder comes to be whole is in lib/checkpoint.h. Any number of ranks can resume it.

// One line about something that went wrong and is survived.
static void complain(const std::string& text) {
    std::fflush(stdout);
    std::fprintf(stderr, "train_nsa: warning: %s\n", printable(text).c_str());
}

// All ranks fail with the first one's error, or none does. Also a barrier.
static void fail_together(const World& world, const std::string& error) {
    if (world.size == 1 && !error.empty()) fail("%s", error.c_str());
    if (world.size == 1) return;
    const std::vector<std::string> errors = world.gather(error);
    for (size_t r = 0; r < errors.size(); r++)
        if (!errors[r].empty()) fail("rank %zu: %s", r, errors[r].c_str());
}

// The records of all ranks' files. If one of them could not write its own, `error` there, all fail with its text.
static std::vector<FileRecord> gather_records(const World& world, const std::vector<FileRecord>& mine,
                                              const std::string& error) {
    fail_together(world, error);
    std::string text;
    for (const FileRecord& r : mine)
        text += format_text("%s %llu %u\n", r.name.c_str(), (unsigned long long)r.size, r.crc32c);
    std::string all;
    for (const std::string& t : world.gather(text)) all += t;
    std::vector<FileRecord> records;
    std::istringstream in(all);
    for (FileRecord r; in >> r.name >> r.size >> r.crc32c;) records.push_back(r);
    return records;
}

// The last 128 values of something that should move slowly, for z-scores as
// llm.c has them: how many standard deviations a value lies above their mean.
struct OutlierWindow {
    static constexpr size_t SIZE = 128;
    std::vector<double> values;  // the oldest first

    // NaN until the window is full. The value itself is the window's last.
    double z_score(double value) {
        values.push_back(value);
        if (values.size() <= SIZE) return std::numeric_limits<double>::quiet_NaN();
        values.erase(values.begin());
        double mean = 0, variance = 0;
        for (double v : values) mean += v / double(SIZE);
        for (double v : values) variance += (v - mean) * (v - mean) / double(SIZE);
        return variance > 0 ? (value - mean) / std::sqrt(variance) : 0;
    }
};

struct TrainState {
    int64_t step = 0;         // finished optimiser steps
    int64_t last_update = 0;  // the last of them that changed the weights
    int64_t bad_steps = 0;    // not finite, in a row, up to now
    LoaderState loader{};
    double best_val_loss = std::numeric_limits<double>::infinity();
    OutlierWindow losses, norms;
};

// `count` numbers of the engine as fp32 in the host's memory: in place where
// they are that already and no copy is asked for; else `buffers` keeps them.
template <class Dev, class T>
const float* host_floats(Dev& dev, const T* p, size_t count, bool copy, std::vector<std::vector<float>>& buffers) {
    if constexpr (Dev::on_host && std::is_same<T, float>::value)
        if (!copy) return p;
    buffers.emplace_back(count);
    dev.to_host(buffers.back().data(), p, count);
    return buffers.back().data();
}

// A whole flat array as views in the form on disk (padding left out).
template <class Dev, class T>
std::vector<TensorView> views_of(const Model<Dev>& model, const T* flat, const std::string& prefix,
                                 std::vector<std::vector<float>>& buffers, bool copy = false) {
    std::vector<TensorView> views;
    for (const TensorSpec& t : model.table.specs)
        views.push_back(
            tensor_view(prefix + t.name, t.shape(), host_floats(model.dev, flat + t.offset, t.size, copy, buffers)));
    return views;
}

// The fp32 weights, on rank 0; none elsewhere. Sharded master copies are put together over the ranks: all of them call
// this.
template <class Dev>
std::vector<TensorView> views_of_weights(const Model<Dev>& model, const World& world,
                                         std::vector<std::vector<float>>& buffers, bool copy) {
    if (!model.sharded || !Dev::has_master)
        return world.rank == 0 ? views_of(model, model.master, "", buffers, copy) : std::vector<TensorView>();
    std::vector<TensorView> views;
    for (const TensorSpec& t : model.table.specs) {
        std::vector<float> whole(t.size);
        for (const Piece& p : model.owned) {
            const auto [first, last] = model.overlap(t, t.size, p);
            if (first < last)
                model.dev.to_host(whole.data() + (first - t.offset), model.master_at(p, first), last - first);
        }
        world.sum(whole.data(), whole.size());  // the others have zeros here
        if (world.rank != 0) continue;
        buffers.push_back(std::move(whole));
        views.push_back(tensor_view(t.name, t.shape(), buffers.back().data()));
    }
    return views;
}

// This rank's share of m or v, sharded or not: "m.<tensor>[<first>:<last>]" are those elements of the tensor.
template <class Dev>
void add_moments(std::vector<TensorView>& views, const Model<Dev>& model, const typename Dev::Stat* flat,
                 const char* name, std::vector<std::vector<float>>& buffers, bool copy) {
    for (const Piece& p : model.partition.parts(model.rank))
        for (const TensorSpec& t : model.table.specs) {
            const auto [first, last] = model.overlap(t, t.size, p);
            if (first >= last) continue;
            const size_t at = model.sharded ? p.local + (first - p.begin) : first;
            views.push_back(
                tensor_view(format_text("%s.%s[%zu:%zu]", name, t.name.c_str(), first - t.offset, last - t.offset),
                            {int64_t(last - first)}, host_floats(model.dev, flat + at, last - first, copy, buffers)));
        }
}

// What one rank writes of a checkpoint: with `copy` as it is now, whatever becomes
// of the model; without, the model must stay as it is while it is written.
struct Snapshot {
    std::vector<std::vector<float>> buffers;
    std::vector<TensorView> weights;  // on rank 0
    std::vector<TensorView> moments;  // this rank's share
};

template <class Dev>
Snapshot take_snapshot(const Model<Dev>& model, const World& world, bool copy) {
    Snapshot s;
    s.weights = views_of_weights(model, world, s.buffers, copy);
    add_moments(s.moments, model, model.m, "m", s.buffers, copy);
    add_moments(s.moments, model, model.v, "v", s.buffers, copy);
    return s;
}

static std::vector<FileRecord> write_snapshot(const Snapshot& s, const Config& c, const std::string& folder, int rank,
                                              int ranks) {
    std::vector<FileRecord> records;
    records.push_back(
        write_safetensors(folder + format_text("/optimizer_%05d-of-%05d.safetensors", rank, ranks), {}, s.moments));
    if (rank != 0) return records;
    records.push_back(write_safetensors(folder + "/model.safetensors", {{"format", "pt"}}, s.weights));
    records.push_back(write_text_file(folder + "/config.json", config_json(c)));
    return records;
}

static std::string manifest_json(const Config& c) {
    std::string text = "{\"program\": \"train_nsa\"";
    for (const Option& o : option_table())
        if ((o.verbs & TRAIN) && std::strcmp(o.name, "help") && std::strcmp(o.name, "resume"))
            text += ",\n \"" + underscored(o.name) +
                    "\": " + (o.integer || o.real ? value_text(c, o) : json_quote(value_text(c, o)));
    return text + "}\n";
}

static std::string numbers_json(const std::vector<double>& values) {
    std::string text = "[";
    for (double v : values) text += format_text("%s%.17g", text.size() > 1 ? ", " : "", v);
    return text + "]";
}

// The manifest's state. Seeds can exceed what a JSON number holds exactly in some readers, so the loader's integers are
// strings.
static std::string state_json(const TrainState& s, const Config& c, int ranks) {
    std::string text = format_text("{\"last_update\": %lld, \"bad_steps\": %lld, \"ranks\": %d",
                                   (long long)s.last_update, (long long)s.bad_steps, ranks);
    text += format_text(",\n \"loader\": [\"%llu\", \"%llu\", \"%llu\", \"%llu\"]", (unsigned long long)s.loader.seed,
                        (unsigned long long)s.loader.seq_len, (unsigned long long)s.loader.corpus,
                        (unsigned long long)s.loader.next_sample);
    if (std::isfinite(s.best_val_loss)) text += format_text(",\n \"best_val_loss\": %.17g", s.best_val_loss);
    text += ",\n \"losses\": " + numbers_json(s.losses.values) + ",\n \"norms\": " + numbers_json(s.norms.values);
    return text + ",\n \"options\": " + manifest_json(c) + "}";
}

static TrainState read_state(const Manifest& manifest) {
    const std::string& path = manifest.path;
    TrainState state;
    state.step = manifest.step;
    state.last_update = manifest.state.integer("last_update", path),
    state.bad_steps = manifest.state.integer("bad_steps", path);
    const std::vector<Json>& loader = manifest.state.array("loader", path);
    uint64_t* fields[] = {&state.loader.seed, &state.loader.seq_len, &state.loader.corpus, &state.loader.next_sample};
    if (loader.size() != 4) fail("%s: loader has %zu integers, expected 4", path.c_str(), loader.size());
    for (size_t i = 0; i < 4; i++) {
        const std::string& text = loader[i].string(path + ": loader");
        char* end = nullptr;
        errno = 0;
        *fields[i] = std::strtoull(text.c_str(), &end, 10);
        if (text.empty() || text[0] < '0' || text[0] > '9' || *end || errno)
            fail("%s: loader[%zu] is %s, expected an integer", path.c_str(), i, json_quote(text).c_str());
    }
    if (manifest.state.find("best_val_loss")) state.best_val_loss = manifest.state.number("best_val_loss", path);
    for (auto [window, name] : {std::make_pair(&state.losses, "losses"), std::make_pair(&state.norms, "norms")}) {
        for (const Json& value : manifest.state.array(name, path))
            window->values.push_back(value.number(path + ": " + name));
        if (window->values.size() > OutlierWindow::SIZE)
            fail("%s: %s has %zu values, expected at most %zu", path.c_str(), name, window->values.size(),
                 OutlierWindow::SIZE);
    }
    return state;
}

// Every tensor of the model is there with its shape: to be known before memory is allocated for what a config.json
// says.
static void require_tensors(const TensorTable& table, const SafeTensors& file) {
    for (const TensorSpec& t : table.specs) file.get(t.name, "F32", t.shape());
}

template <class Dev>
void read_parameters(Model<Dev>& model, const SafeTensors& file) {
    for (const TensorSpec& t : model.table.specs)
        model.set_parameter(t, static_cast<const float*>(file.get(t.name, "F32", t.shape()).data));
}

// Takes what this rank owns of m and v out of every rank's file, whatever their number was.
template <class Dev>
void read_moments(Model<Dev>& model, const Manifest& manifest, const std::string& folder) {
    std::map<std::string, const TensorSpec*> specs;
    size_t expected = 0, found = 0;
    for (const TensorSpec& t : model.table.specs) specs[t.name] = &t, expected += 2 * t.size;
    for (const FileRecord& record : manifest.files) {
        if (record.name.compare(0, 10, "optimizer_") != 0) continue;
        const SafeTensors file(folder + "/" + record.name);
        for (const TensorView& view : file.tensors) {
            size_t first = 0, last = 0;
            const size_t bracket = view.name.find('[');
            int length = 0;
            if (bracket == std::string::npos ||
                std::sscanf(view.name.c_str() + bracket, "[%zu:%zu]%n", &first, &last, &length) != 2 ||
                view.name.size() != bracket + size_t(length) || view.dtype != "F32")
                fail("%s: tensor %s: expected F32 and a name like m.norm.weight[0:128]", file.path.c_str(),
                     json_quote(view.name).c_str());
            const auto spec = specs.find(view.name.substr(2, bracket - 2));
            const bool is_m = view.name.compare(0, 2, "m.") == 0;
            if ((!is_m && view.name.compare(0, 2, "v.") != 0) || spec == specs.end())
                fail("%s: tensor %s belongs to no tensor of this model", file.path.c_str(),
                     json_quote(view.name).c_str());
            const TensorSpec& t = *spec->second;
            if (first >= last || last > t.size || view.elements() != int64_t(last - first))
                fail("%s: tensor %s has %lld elements, the whole one %zu", file.path.c_str(), view.name.c_str(),
                     (long long)view.elements(), t.size);
            found += last - first;
            for (const Piece& p : model.owned) {
                const size_t from = std::max(t.offset + first, p.begin),
                             to = std::min(t.offset + last, p.begin + p.count);
                if (from < to)
                    model.dev.from_host((is_m ? model.m : model.v) + p.local + (from - p.begin),
                                        static_cast<const float*>(view.data) + (from - t.offset - first), to - from);
            }
        }
    }
    if (found != expected)
        fail("%s: the optimiser's files hold %zu of %zu moments: one of them is missing or of another model",
             manifest.path.c_str(), found, expected);
}

// The newest intact checkpoint in a run's folder; warns about newer ones that are damaged. Returns ""
// if there are no checkpoints, and fails if all of them are damaged.
static std::string newest_checkpoint(const std::string& run) {
    std::vector<std::string> damages;
    const std::string newest = newest_intact_checkpoint(run, [&](const std::string& text) { damages.push_back(text); });
    if (newest.empty() && !damages.empty())  // of the first complaint without "; taking the one before"
        fail(
            "no checkpoint under %s is intact; %s; without --resume the run starts anew and this folder is moved aside",
            run.c_str(), damages[0].substr(0, damages[0].rfind("; ")).c_str());
    for (const std::string& text : damages) complain(text);
    return newest;
}

template <class Dev>
TrainState load_checkpoint(Model<Dev>& model, const std::string& folder) {
    const Manifest manifest = read_manifest(folder);
    const TrainState state = read_state(manifest);
    const SafeTensors weights(folder + "/model.safetensors");
    read_parameters(model, weights);
    if constexpr (Dev::has_master) {  // the file holds the master copy; the parameters are rounded from it as the last
                                      // update did
        size_t largest = 0;
        for (const TensorSpec& t : model.table.specs) largest = std::max(largest, t.padded);
        typename Dev::Master* whole = model.dev.template allocate<typename Dev::Master>(largest);
        for (const TensorSpec& t : model.table.specs) {
            if (state.last_update == 0) break;
            model.dev.zero(whole, t.padded);
            model.dev.from_host(whole, static_cast<const float*>(weights.get(t.name, "F32", t.shape()).data), t.size);
            model.dev.round_master(model.params + t.offset, whole, t.padded, uint64_t(model.config.seed),
                                   state.last_update, t.offset);
        }
        model.dev.release(whole);
    }
    read_moments(model, manifest, folder);
    return state;
}

// The checkpoint that an option names: the folder itself, or the newest one of a run's folder.
static std::string checkpoint_of(const std::string& from, const char* option) {
    if (file_exists(from) && !file_exists(from + "/."))
        fail("%s %s is a file: give the folder of a run or of one checkpoint", option, from.c_str());
    const bool is_checkpoint = file_exists(from + "/model.safetensors");
    if (is_checkpoint && file_exists(from + "/manifest.json")) verify_checkpoint(from);
    else if (is_checkpoint) complain(from + " has no manifest.json, so nothing tells whether its files are whole");
    const std::string folder = is_checkpoint ? from : newest_checkpoint(from);
    if (folder.empty()) fail("%s %s holds no checkpoint: no step_*/manifest.json in it", option, from.c_str());
    return folder;
}

// The options of a trained model, from a checkpoint, over the ones given (which say where the vocabulary lies, what to
// sample ...).
static std::string read_trained_config(Config& c) {
    if (c.from.empty()) fail_usage("--from is missing: the folder of a run, such as runs/tiny");
    const std::string folder = checkpoint_of(c.from, "--from");
    read_config_json(c, folder + "/config.json");
    if (c.vocab_dir.empty() && file_exists(folder + "/manifest.json")) {  // where training found it
        const Manifest manifest = read_manifest(folder);
        c.vocab_dir = manifest.state.get("options", manifest.path).string("vocab_dir", manifest.path);
    }
    return folder;
}

// ---------------------------------------------------------------------------------------------------------------------
// --dump-state: everything another program needs to compare itself with this one.

template <class Dev>
void dump_state(Model<Dev>& model, const Activations<Dev>& a, const std::vector<int32_t>& inputs,
                const std::vector<int32_t>& targets, const std::vector<float>& logits, double loss,
                const std::string& command) {
    const NsaShape& s = a.shape;
    std::vector<std::vector<float>> buffers;
    std::vector<TensorView> tensors = views_of(model, model.master, "", buffers);
    for (const TensorView& t : views_of(model, model.grads, "grad.", buffers)) tensors.push_back(t);
    const std::vector<int64_t> batch = {s.B, s.T};
    tensors.push_back({"inputs", "I32", batch, inputs.data(), inputs.size() * 4});
    tensors.push_back({"targets", "I32", batch, targets.data(), targets.size() * 4});
    tensors.push_back(tensor_view("logits", {s.B, s.T, a.V}, logits.data()));
    const float loss_value = float(loss);
    tensors.push_back(tensor_view("loss", {1}, &loss_value));
    std::vector<std::vector<uint8_t>> selections;
    selections.reserve(a.layer.size());
    for (size_t i = 0; !s.full && i < a.layer.size(); i++) {  // a byte per block
        const size_t rows = size_t(s.B) * s.G * s.T, words = size_t(s.selection_words()),
                     blocks = size_t(s.slc_blocks());
        std::vector<uint32_t> masks(rows * words);
        model.dev.copy(masks.data(), a.layer[i].selection, masks.size());
        selections.emplace_back(rows * blocks);
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < blocks; j++)
                selections.back()[r * blocks + j] = masks[r * words + j / 32] >> (j % 32) & 1;
        tensors.push_back({format_text("layers.%zu.selection", i),
                           "U8",
                           {s.B, s.G, s.T, int64_t(blocks)},
                           selections.back().data(),
                           rows * blocks});
    }
    write_safetensors(model.config.dump_state, {{"config", config_json(model.config)}, {"options", command}}, tensors);
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation.

struct EvalResult {
    double loss = 0;         // mean over the tokens
    double answer_loss = 0;  // mean over the answers of the synthetic corpus
    uint64_t tokens = 0, answers = 0;
    uint64_t bytes = 0;  // of the text that the targets stand for; 0 where unknown
    double bits_per_byte() const { return loss * double(tokens) / std::log(2.0) / double(bytes); }
};

// Mean loss over the first `samples` samples, dealt to the ranks: always the same ones, added in their order,
// whatever the ranks and the micro-batch. The last micro-batch may reach beyond them; those rows are not counted.
template <class Dev>
EvalResult evaluate(Model<Dev>& model, Activations<Dev>& a, DataLoader& loader, int64_t samples, const World& world,
                    const Tokenizer* tokenizer) {
    const int B = a.shape.B, T = a.shape.T;
    std::vector<int32_t> inputs(size_t(B) * T), targets(size_t(B) * T);
    std::vector<uint8_t> answer(size_t(B) * T);
    std::vector<typename Dev::Stat> losses(size_t(B) * T);
    LoaderState start = loader.state();
    start.next_sample = 0;
    loader.restore(start);
    enum { LOSS, ANSWER_LOSS, TOKENS, ANSWERS, BYTES, COUNT };
    std::vector<double> of_sample(size_t(samples) * COUNT);
    for (int64_t first = 0; first < samples; first += int64_t(B) * world.size) {
        loader.next_batch(inputs.data(), targets.data(), B, answer.data());
        forward(model, a, inputs.data(), 0, T);
        model.dev.upload(a.targets, targets.data(), targets.size());
        classify_rows(model, a, 0, false);
        model.dev.copy(losses.data(), a.losses, losses.size());
        for (int64_t b = 0; b < B && first + world.rank + b * world.size < samples; b++) {
            double* sums = &of_sample[size_t(first + world.rank + b * world.size) * COUNT];
            for (size_t j = size_t(b) * T; j < size_t(b + 1) * T; j++) {
                sums[LOSS] += losses[j], sums[TOKENS]++;
                if (answer[j]) sums[ANSWER_LOSS] += losses[j], sums[ANSWERS]++;
                if (tokenizer) sums[BYTES] += double(tokenizer->token_bytes(uint16_t(targets[j])));
            }
        }
    }
    model.progress("waiting for the other ranks");
    world.sum(of_sample.data(), of_sample.size());
    double total[COUNT] = {};
    for (size_t i = 0; i < of_sample.size(); i++) total[i % COUNT] += of_sample[i];
    EvalResult r;
    r.tokens = uint64_t(total[TOKENS]), r.answers = uint64_t(total[ANSWERS]), r.bytes = uint64_t(total[BYTES]);
    r.loss = total[LOSS] / total[TOKENS];
    if (r.answers) r.answer_loss = total[ANSWER_LOSS] / total[ANSWERS];
    return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a run computes on, and in which portions.

// Which engine, with which threads, and why; printed at the start of a run.
struct Device {
    bool gpu = false;
    bool cpu_bf16 = false;  // the CPU engine rounds the inputs of its matrix products to bf16
    int threads = 1;
    std::string reason;
};
// A rank's share of its machine's processors. Where the launcher has bound ranks to processors of their own, all of
// those.
static int threads_of_rank(const World& world) {
    if (world.size == 1) return usable_processors();
    const std::vector<std::string> places = world.gather(world.host + " " + processor_list());
    int sharers = 0, neighbours = 0;
    for (const std::string& place : places) {
        sharers += place == places[size_t(world.rank)];
        neighbours += place.substr(0, place.find(' ')) == world.host;
    }
    return std::max(1, usable_processors() / (sharers == neighbours ? world.local_size : sharers));
}

// Ranks on GPUs and on CPUs cannot sum gradients together, and do different things from here on.
static void require_same_kind_of_device(const Device& d, const World& world) {
    if (world.size == 1) return;
    const std::string mine = (d.gpu ? "GPU, because " : "CPU, because ") + d.reason;
    const std::vector<std::string> all = world.gather(mine);
    if (std::any_of(all.begin(), all.end(),
                    [&](const std::string& device) { return device.compare(0, 3, all[0], 0, 3) != 0; }))
        world.require_same(
            "device: " + mine,
            "all ranks compute on GPUs or all on CPUs: make every rank see a GPU, or start all with --device cpu");
}

static Device choose_device(const Config& c, const World& world) {
    Device d;
    const int share = threads_of_rank(world);  // all ranks ask, whoever has --threads
    d.threads = c.threads ? int(c.threads) : std::getenv("OMP_NUM_THREADS") ? omp_get_max_threads() : share;
    omp_set_num_threads(d.threads);
    int gpus = 0;
    std::string none = "this build holds no CUDA engine";
#ifdef HAVE_CUDA
    const cudaError_t error = cudaGetDeviceCount(&gpus);
    if (error != cudaSuccess) gpus = 0, none = std::string("CUDA finds no GPU: ") + cudaGetErrorString(error);
#endif
    if (c.device == "cuda" && gpus == 0) fail_usage("--device cuda: %s; use --device cpu or auto", none.c_str());
    d.gpu = c.device != "cpu" && gpus > 0;
    d.reason = c.device != "auto" ? "--device " + c.device : d.gpu ? "there is a GPU" : none;
    if (c.cpu_dtype == "bf16" && d.gpu)
        fail_usage("--cpu-dtype bf16 is for the CPU engine and this run is on a GPU; leave it out or add --device cpu");
    if (c.selected_kernels != "auto" && !d.gpu)
        fail_usage("--selected-kernels %s is for GPUs and this run is on the CPU (%s); leave it out",
                   c.selected_kernels.c_str(), none.c_str());
    if (c.cuda_graph && !d.gpu)
        fail_usage("--cuda-graph %lld is for GPUs and this run is on the CPU (%s); leave it out",
                   (long long)c.cuda_graph, none.c_str());
    d.cpu_bf16 = c.cpu_dtype == "bf16" && HAVE_BF16;
    if (c.cpu_dtype == "bf16" && !HAVE_BF16)
        d.reason +=
            "; fp32, because --cpu-dtype bf16 needs AVX512_BF16, which the processor of this build does not have";
    require_same_kind_of_device(d, world);
    return d;
}

// Batch sizes: what was not given follows from the preset, the device and the number of ranks; what was given must fit
// together.
static void resolve_batch(Config& c, const std::set<std::string>& given, const World& world, bool gpu) {
    const Preset& p = preset_of(c);
    // half a million tokens a step are hours on a CPU: there one sequence per rank, unless told otherwise
    const bool as_preset = gpu || c.model == "tiny";
    int64_t sequences = as_preset ? p.total_batch / c.seq_len : 1;
    if (given.count("total-batch")) {
        sequences = c.total_batch / c.seq_len;
        if (c.total_batch % c.seq_len)
            fail_usage("--total-batch %lld is not a multiple of --seq-len %lld", (long long)c.total_batch,
                       (long long)c.seq_len);
    } else {
        const int64_t unit = world.size * (given.count("batch") ? c.batch : 1);
        sequences = std::max<int64_t>(sequences / unit, 1) * unit;
    }
    c.total_batch = sequences * c.seq_len;
    const int64_t per_rank = sequences / world.size;
    if (c.deterministic) c.batch = 1;  // one sample at a time
    if (sequences % world.size)
        fail_usage("--total-batch %lld is %lld sequences of --seq-len %lld, not divisible by %d ranks",
                   (long long)c.total_batch, (long long)sequences, (long long)c.seq_len, world.size);
    if (!given.count("batch") && !c.deterministic)
        for (c.batch = std::min(as_preset ? p.batch : 1, per_rank); per_rank % c.batch; c.batch--) {
        }
    if (per_rank % c.batch)
        fail_usage("--total-batch %lld is %lld sequences for each of %d ranks, not divisible by --batch %lld",
                   (long long)c.total_batch, (long long)per_rank, world.size, (long long)c.batch);
}

// ---------------------------------------------------------------------------------------------------------------------
// The training run.

static double peak_memory_mib() {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return double(usage.ru_maxrss) / 1024;
}
// The same of the engine's own memory; 0 where that is the host's.
template <class Dev>
double peak_device_mib([[maybe_unused]] const Dev& dev) {
    if constexpr (Dev::on_host) return 0;
    else return double(dev.peak_bytes) / (1 << 20);
}

// JSON has no NaN.
static std::string json_number(const char* format, double x) {
    return std::isfinite(x) ? format_text(format, x) : "null";
}

// main.log in the form that plotting notebooks read ("s:<step> tel:<val loss>",
// "s:<step> trl:<train loss> lr:<lr> norm:<norm>"), and the same as JSON lines.
struct RunLog {
    FILE *text = nullptr, *json = nullptr;
    // A resumed run goes on behind its checkpoint's step: what an interrupted run logged after it is dropped, as those
    // steps come again.
    RunLog(const std::string& folder, bool append, int64_t last_step) {
        for (auto [file, name, step] :
             {std::make_tuple(&text, "/main.log", "s:"), std::make_tuple(&json, "/log.jsonl", "{\"step\":")}) {
            if (append && file_exists(folder + name)) {
                std::istringstream in(read_file(folder + name));
                std::string kept;
                for (std::string line;
                     std::getline(in, line) && !in.eof();)  // a last line without its end was torn by a crash
                    if (line.compare(0, std::strlen(step), step) == 0 &&
                        std::atoll(line.c_str() + std::strlen(step)) <= last_step)
                        kept += line + "\n";
                replace_text_file(folder + name, kept);
            }
            *file = std::fopen((folder + name).c_str(), append ? "a" : "w");
            if (!*file) fail("cannot open %s%s: %s", folder.c_str(), name, std::strerror(errno));
        }
    }
    RunLog(const RunLog&) = delete;
    RunLog& operator=(const RunLog&) = delete;
    ~RunLog() { std::fclose(text), std::fclose(json); }
    // A full disk costs lines, not the run.
    void line(FILE* file, const std::string& s) {
        if (std::fprintf(file, "%s\n", s.c_str()) >= 0 && std::fflush(file) == 0) return;
        if (!warned)
            complain(format_text("cannot write the run's log: %s; lines are missing there from now on, stdout has them",
                                 std::strerror(errno)));
        warned = true;
        std::clearerr(file);
    }
    // Before a checkpoint is committed: nobody will write the lines up to its step again.
    void sync() {
        for (FILE* file : {text, json})
            if (fsync(fileno(file)) != 0) fail("cannot sync the run's log: %s", std::strerror(errno));
    }

  private:
    bool warned = false;
};

// Per layer: mean gate and share of each branch, the gates' entropy, selected blocks and how much of the importance
// fell on them; JSON.
template <class Dev>
std::string layer_statistics(const Activations<Dev>& a) {
    const NsaShape& s = a.shape;
    if (s.full) return "";
    std::string text = ",\"layers\":[";
    const size_t rows = s.query_rows();
    std::vector<float> gate(3 * rows), chosen(size_t(s.B) * s.G * s.T);
    std::vector<uint32_t> masks(size_t(s.B) * s.G * s.T * s.selection_words());
    for (size_t i = 0; i < a.layer.size(); i++) {
        a.dev.to_host(gate.data(), a.layer[i].gate, gate.size());
        a.dev.copy(masks.data(), a.layer[i].selection, masks.size());
        double mean[3] = {}, entropy = 0, importance = 0;
        for (size_t r = 0; r < rows; r++) {
            const double sum = gate[r] + gate[rows + r] + gate[2 * rows + r];
            for (int b = 0; b < 3; b++) {
                const double share = gate[b * rows + r] / sum;
                mean[b] += gate[b * rows + r] / double(rows);
                if (share > 0) entropy -= share * std::log(share) / double(rows);
            }
        }
        const size_t words = size_t(s.selection_words()), queries = masks.size() / words;
        uint64_t selected = 0, most = 0;
        for (size_t q = 0; q < queries; q++) {
            uint64_t count = 0;
            for (size_t j = 0; j < words; j++) count += uint64_t(__builtin_popcount(masks[q * words + j]));
            selected += count, most = std::max(most, count);
        }
        a.dev.to_host(chosen.data(), a.layer[i].chosen_importance, chosen.size());
        for (float share : chosen) importance += share / double(chosen.size());
        const double all = mean[0] + mean[1] + mean[2];
        const auto number = [](double x) { return json_number("%.4f", x); };
        const auto three = [&](double by) {
            return number(mean[0] / by) + "," + number(mean[1] / by) + "," + number(mean[2] / by);
        };
        text += (i ? ",{" : "{") + ("\"gate\":[" + three(1)) + "],\"gate_share\":[" + three(all) +
                "],\"gate_entropy\":" + number(entropy) +
                format_text(",\"blocks_mean\":%.2f,\"blocks_max\":%llu", double(selected) / double(queries),
                            (unsigned long long)most) +
                ",\"importance_selected\":" + number(importance) + "}";
    }
    return text + "]";
}

struct TrainData {
    std::unique_ptr<DataLoader> train, val;
};

static LoaderOptions loader_options(const Config& c, const World& world, const char* name, bool shuffle) {
    LoaderOptions o;
    o.name = name, o.seq_len = int(c.seq_len), o.vocab_size = int(c.vocab_size), o.seed = uint64_t(c.seed),
    o.shuffle = shuffle, o.rank = world.rank, o.world_size = world.size;
    return o;
}

static TokenSource synthetic_source(const Config& c, uint64_t tokens, uint64_t first_document) {
    SyntheticCorpus corpus = synthetic_corpus(uint64_t(c.seed), tokens, first_document);
    return memory_source("the synthetic corpus", std::move(corpus.tokens), std::move(corpus.is_answer), 0);
}

// 4096 steps of the tiny preset before a document comes again, so that recalling names pays more than remembering
// documents; made in 0.1 s. The same whatever --steps is, so that a run can be prolonged.
constexpr uint64_t SYNTHETIC_TOKENS = 1 << 24;

// The validation set of a run with these options; its documents are none of the training's.
static TokenSource synthetic_validation(const Config& c) {
    const uint64_t tokens =
        std::min(SYNTHETIC_TOKENS, uint64_t(c.eval_batches) * uint64_t(c.total_batch)) + uint64_t(c.seq_len) + 1;
    return synthetic_source(c, tokens, SYNTHETIC_FIRST_VALIDATION_DOCUMENT);
}

static TrainData open_data(const Config& c, const World& world) {
    TrainData data;
    const bool val_synthetic = c.val_data == "synthetic" || (c.val_data.empty() && c.data == "synthetic");
    if (c.data == "synthetic") {
        data.train = std::make_unique<DataLoader>(std::vector<TokenSource>{synthetic_source(c, SYNTHETIC_TOKENS, 0)},
                                                  loader_options(c, world, "--data", true));
    } else {
        const std::vector<std::string> files = shard_files(c.data, "--data");
        if (!c.val_data.empty() && !val_synthetic) check_disjoint(files, shard_files(c.val_data, "--val-data"));
        data.train = std::make_unique<DataLoader>(open_shards(files), loader_options(c, world, "--data", true));
    }
    if (val_synthetic)
        data.val = std::make_unique<DataLoader>(std::vector<TokenSource>{synthetic_validation(c)},
                                                loader_options(c, world, "--val-data", false));
    else if (!c.val_data.empty())
        data.val = std::make_unique<DataLoader>(open_shards(shard_files(c.val_data, "--val-data")),
                                                loader_options(c, world, "--val-data", false));
    data.train->require_global_batch(uint64_t(c.total_batch / c.seq_len));
    return data;
}

// Of two runs in one folder the second would move the first's log away, and each would write over the other's
// checkpoints. The kernel's lock on the folder itself leaves no file behind and ends with the process, however that
// ends.
static void lock_run_folder(const std::string& folder) {
    static int lock = -1;
    if (lock >= 0) close(lock);  // a process works on one run
    lock = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) fail("cannot open folder %s: %s", folder.c_str(), std::strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)  // other errors: a file system without locks
        fail("--out %s: another run is at work there; wait until it has ended, or give this one a folder of its own",
             folder.c_str());
}

// What a run writes in its folder.
static bool is_run_file(const std::string& name) {
    const auto like = [&](const char* begin, const char* end) {
        const size_t b = std::strlen(begin), e = std::strlen(end);
        return name.size() > b + e && !name.compare(0, b, begin) && !name.compare(name.size() - e, e, end);
    };
    for (const char* file : {"run.json", "main.log", "log.jsonl", "halt"})
        if (name == file) return true;
    return step_of_name(name) >= 0 || step_of_name(name, ".writing") >= 0 || step_of_name(name, ".removing") >= 0 ||
           like("heartbeat_rank", ".jsonl") || like("bad_step_", ".json");
}
static bool is_run_folder(const std::string& folder) {
    if (!checkpoint_steps(folder).empty()) return true;
    try {
        const std::string path = folder + "/run.json";
        return file_exists(path) && parse_json(read_file(path), path).string("program", path) == "train_nsa";
    } catch (const Error&) {
        return false;
    }
}

// A folder for the run. An earlier run's files are never written over: without --resume they are moved into a folder
// beside it. Files that no run of this program has written are left where they are, and refused where they are in the
// way.
static void prepare_run_folder(const Config& c, bool resuming) {
    make_folders(c.out);
    lock_run_folder(c.out);
    std::vector<std::string> earlier;
    if (!resuming)
        for (const std::string& name : folder_entries(c.out))
            if (is_run_file(name) && (name != "halt" || is_run_folder(c.out))) earlier.push_back(name);
    std::string note = resuming ? ", resumed" : "";
    if (!earlier.empty()) {
        if (!is_run_folder(c.out))
            fail("--out %s holds %s, which no run of this program has written: choose another folder", c.out.c_str(),
                 earlier[0].c_str());
        const bool has_checkpoint = !checkpoint_steps(c.out).empty();
        std::error_code error;
        const std::string real = std::filesystem::canonical(c.out, error).string();  // where a link or . leads
        if (error) fail("cannot find where %s leads: %s", c.out.c_str(), error.message().c_str());
        const bool plain = real == std::filesystem::absolute(c.out).lexically_normal();
        int n = 1;
        while (file_exists(real + "." + std::to_string(n))) n++;
        const std::string aside = real + "." + std::to_string(n);
        make_folders(aside);
        for (const std::string& name : earlier)
            if (std::rename((real + "/" + name).c_str(), (aside + "/" + name).c_str()) != 0)
                fail("cannot move %s of the earlier run in %s to %s: %s", name.c_str(), c.out.c_str(), aside.c_str(),
                     std::strerror(errno));
        sync_folder(aside);
        note = format_text(" (the earlier run there was moved to %s%s)",
                           (plain ? c.out + "." + std::to_string(n) : aside).c_str(),
                           has_checkpoint ? "; --resume would have continued it" : ", it has no checkpoint");
    }
    std::printf("out:    %s%s\n", c.out.c_str(), note.c_str());
    clean_leftovers(c.out, complain);
    replace_text_file(c.out + "/run.json", manifest_json(c));
}

// verb: what cannot be done otherwise.
static void require_same_model(const Config& c, const std::string& checkpoint, const char* verb) {
    const std::string path = checkpoint + "/config.json";
    const Json saved = parse_json(read_file(path), path), asked = parse_json(config_json(c), "this run's options");
    for (size_t i = 0; i < asked.keys.size(); i++) {
        if (asked.keys[i] == "seq_len" && !std::strcmp(verb, "begin")) continue;  // no weight depends on it
        const Json& now = asked.items[i];
        const Json& then = saved.get(asked.keys[i], path);
        const bool same =
            now.kind == Json::String ? then.string(path) == now.text : then.number(path) == now.number_value;
        if (!same)
            fail("cannot %s from %s: %s is %s there and %s in this run; give the same model options", verb,
                 path.c_str(), asked.keys[i].c_str(),
                 then.kind == Json::String ? then.text.c_str() : format_text("%g", then.number_value).c_str(),
                 now.kind == Json::String ? now.text.c_str() : format_text("%g", now.number_value).c_str());
    }
}

// One micro-step: adds its losses to model.results and its gradients to model.dw. Only tokens and targets [B, T]
// differ from one to the next; they go to the engine beforehand, so that the rest can be replayed. Without
// with_backward the caller runs backward(). last: the optimiser step's last micro-step, after which its sum of losses
// is complete.
template <class Dev>
void micro_step(Model<Dev>& model, Activations<Dev>& a, const int32_t* inputs, const int32_t* targets, bool last,
                bool with_backward) {
    Dev& dev = model.dev;
    const size_t tokens = size_t(a.shape.B) * size_t(a.shape.T);
    dev.upload(a.tokens, inputs, tokens), dev.upload(a.targets, targets, tokens);
    model.progress("forward");
    dev.run(a.micro_steps[{model.dw.embed, last, with_backward, a.collect_statistics}], [&] {
        forward(model, a, 0, a.shape.T);
        classify_rows(model, a, 1 / double(model.config.total_batch),
                      true);  // so that the sum over everything is the mean
        dev.add_sum(model.results, a.losses, tokens);
        if (last) dev.set_guard(model.grads + model.table.total, model.results);
        if (with_backward) backward(model, a);
    });
}

// One sample after the other, forward and backward, and their gradients added in a tree that depends on nothing
// but the number of samples: the sum over samples first, first + stride, ... (`count` of them) is the sum over
// the even ones plus the sum over the odd ones, and so on down. With a power of two of ranks the samples of a rank are
// such a set, and Reducer adds the ranks' sums as the tree goes on: the same bits for any of these numbers of ranks.
// The result is in the buffer of this level: 0 is model.grads.
template <class Dev>
void sum_in_tree(Model<Dev>& model, Activations<Dev>& a, const std::vector<int32_t>& inputs,
                 const std::vector<int32_t>& targets, size_t first, size_t stride, size_t count, size_t level = 0) {
    auto* sum = level ? model.partial[level - 1] : model.grads;
    if (count == 1) {
        const size_t at = first * size_t(a.shape.T), tokens = size_t(a.shape.T);
        model.dw = model.table.point_into(sum, model.config);
        model.dev.zero(sum, model.partition.elements);
        micro_step(model, a, inputs.data() + at, targets.data() + at, false, true);
        model.dev.add_sum(model.results + 2 + first, a.losses, tokens);
        model.dw = model.table.point_into(model.grads, model.config);
        return;
    }
    sum_in_tree(model, a, inputs, targets, first, 2 * stride, (count + 1) / 2, level);
    sum_in_tree(model, a, inputs, targets, first + stride, 2 * stride, count / 2, level + 1);
    model.dev.add(sum, model.partial[level], model.partition.elements);
}

// One optimiser step's gradients: accumulation over micro-steps, the sum over ranks, which begins while the last
// micro-step's backward pass still runs. This rank's losses are summed up in model.results. `tokens`, where given,
// keeps the step's inputs [samples, T].
template <class Dev>
void accumulate_gradients(Model<Dev>& model, Activations<Dev>& a, DataLoader& loader, const World& world,
                          bool collect_statistics, Reducer<Dev>* reducer = nullptr,
                          std::vector<int32_t>* tokens = nullptr) {
    const Config& c = model.config;
    const int B = a.shape.B, T = a.shape.T;
    const int64_t micro_steps = c.total_batch / (c.seq_len * B * world.size);
    const size_t micro_tokens = size_t(B) * T;
    std::vector<int32_t> inputs(size_t(micro_steps) * micro_tokens), targets(inputs.size());
    model.dev.zero(model.results, model.result_count);
    auto read = [&](int64_t i) {
        loader.next_batch(inputs.data() + size_t(i) * micro_tokens, targets.data() + size_t(i) * micro_tokens, B);
    };
    if (c.deterministic) {
        for (int64_t i = 0; i < micro_steps; i++) read(i);
        a.collect_statistics = collect_statistics;
        sum_in_tree(model, a, inputs, targets, 0, 1, size_t(micro_steps));
        model.dev.set_guard(model.grads + model.table.total, model.results);
    } else {
        model.dev.zero(model.grads, model.partition.elements);
        for (int64_t i = 0; i < micro_steps; i++) {
            const bool last = i + 1 == micro_steps;
            const size_t at = size_t(i) * micro_tokens;
            read(i);
            a.collect_statistics = collect_statistics && last;
            micro_step(model, a, inputs.data() + at, targets.data() + at, last, !(last && reducer));
            if (last && reducer) backward(model, a, [&](size_t offset) { reducer->ready(offset); });
        }
    }
    a.collect_statistics = false;
    if (tokens) *tokens = std::move(inputs);
    if (!reducer) return;
    model.progress("waiting for the other ranks");
    reducer->finish();
    model.progress("update");
}

template <class Dev>
void dump_first_batch(Model<Dev>& model, Activations<Dev>& a, DataLoader& loader, const std::set<std::string>& given) {
    const Config& c = model.config;
    std::string command = "./train_nsa";  // the same parameters and batch again, from the options alone
    for (const Option& o : option_table())
        if (given.count(o.name) && std::strcmp(o.name, "dump-state"))
            command += " --" + std::string(o.name) + " " + value_text(c, o);
    std::vector<int32_t> inputs(size_t(c.total_batch)), targets(size_t(c.total_batch));
    std::vector<float> logits;
    loader.next_batch(inputs.data(), targets.data(), a.shape.B);
    forward(model, a, inputs.data(), 0, a.shape.T);
    const double loss =
        classify(model, a, targets.data(), 1 / double(c.total_batch), true, &logits) / double(c.total_batch);
    backward(model, a);
    dump_state(model, a, inputs, targets, logits, loss, command);
    std::printf("state:  loss %.6f, written to %s; compare it with: python3 dev/reference.py compare %s\n", loss,
                c.dump_state.c_str(), c.dump_state.c_str());
}

// A path as it can be pasted into a shell.
static std::string shell_word(const std::string& path) {
    if (path.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=.,:/@%") ==
        std::string::npos)
        return path;
    std::string word = "'";
    for (char c : path) word += c == '\'' ? "'\\''" : std::string(1, c);
    return word + "'";
}

static std::string duration_text(double seconds) {
    const long s = long(seconds + 0.5);
    return s < 3600 ? format_text("%ld:%02ld", s / 60, s % 60)
                    : format_text("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
}

// What a reader wants to know before the first step, one line each: device, model, data, batch, memory.
template <class Dev>
void print_run(const Dev& dev, const Config& c, const TensorTable& table, const TrainData& data, const World& world,
               const Device& device, const std::set<std::string>& given) {
    std::printf("device: %s, because %s; %d rank%s (%s), %d on %s, %d CPU thread%s each\n", dev.describe().c_str(),
                device.reason.c_str(), world.size, world.size == 1 ? "" : "s", world.launcher.c_str(), world.local_size,
                world.host.c_str(), device.threads, device.threads == 1 ? "" : "s");
    if (world.size > 1) {
        const Partition p(table.total, world.size, c.bucket_mb);
        std::printf("ranks:  gradients travel by %s in %s, %s%s\n", Reducer<Dev>::describe(world).c_str(),
                    c.grad_reduce.c_str(),
                    c.deterministic ? "in a fixed tree after the backward pass"
                                    : format_text("%zu bucket%s of %.1f MB during the backward pass", p.buckets(),
                                                  p.buckets() == 1 ? "" : "s", double(p.bucket) * 4e-6)
                                          .c_str(),
                    c.zero ? "; optimiser state is shared out over the ranks" : "");
    }
    std::printf("model:  %s, %lld parameters (%lld layers, width %lld, %s attention), %s\n", c.model.c_str(),
                (long long)table.parameters, (long long)c.layers, (long long)c.dim, c.attention.c_str(),
                c.init == "random" ? "every tensor random" : "standard initialisation");
    std::printf("data:   %s%s: %s; vocabulary %s, %lld tokens\n",
                c.data == "synthetic" ? "the built-in synthetic corpus" : c.data.c_str(),
                given.count("data") ? "" : ", because no --data was given", data.train->describe().c_str(),
                c.tokenizer.c_str(), (long long)c.vocab_size);
    if (c.data == "synthetic" && c.tokenizer == "gpt2")
        std::printf(
            "        its bytes are taken as the token ids 0..255: good for timing, not for learning GPT-2's tokens\n");
    if (!data.val) std::printf("        no validation: --val-data was not given\n");
    else std::printf("valid.: %s\n", data.val->describe().c_str());
    std::printf(
        "batch:  %lld tokens a step = %lld sequences of %lld x %d ranks x %lld micro-steps%s; %lld steps, %s "
        "schedule\n",
        (long long)c.total_batch, (long long)c.batch, (long long)c.seq_len, world.size,
        (long long)(c.total_batch / (c.batch * c.seq_len * world.size)),
        c.deterministic ? " (--deterministic: one sequence at a time, whatever --batch is)" : "", (long long)c.steps,
        c.schedule.c_str());
    if (!given.count("total-batch") && c.total_batch != preset_of(c).total_batch)
        std::printf("        not the preset's %lld tokens a step, %s; --total-batch sets them\n",
                    (long long)preset_of(c).total_batch,
                    Dev::on_host && c.model != "tiny" ? "which would take long on a CPU"
                                                      : "which ranks and --batch do not divide");
    if (c.cuda_graph)
        std::printf(
            "graphs: what a step launches is recorded as CUDA graphs when it comes for the second time, and replayed "
            "from then on%s\n",
            world.size > 1 && !c.deterministic
                ? "; but not the last micro-step's backward pass, during which gradients travel"
                : "");
}

// Before anything is allocated: does it fit? If not, what would.
template <class Dev>
void require_memory(Dev& dev, const Config& c, const World& world) {
    const int sharers = Dev::on_host ? world.local_size : 1;  // ranks that share this memory
    const double available = dev.available_bytes() / sharers / (1 << 20),
                 fixed = Model<Dev>::flat_bytes(c, world.size) / (1 << 20);
    auto needed = [&](int64_t batch, int64_t recompute) {
        Config other = c;
        other.recompute = recompute;
        return fixed + Activations<Dev>::bytes_needed(dev, other, batch, c.seq_len, TRAINING) / (1 << 20);
    };
    if (needed(c.batch, c.recompute) <= available) return;
    std::string advice;
    const auto propose = [&](const std::string& text) { advice += (advice.empty() ? "" : ", or ") + text; };
    const int64_t samples = c.total_batch / c.seq_len / world.size;  // of a rank and step, which micro-batches divide
    const auto largest_batch = [&](int64_t recompute) {
        int64_t batch = c.batch - 1;
        while (batch > 0 && (samples % batch || needed(batch, recompute) > available)) batch--;
        return batch;
    };
    for (int64_t level = c.recompute + 1; level <= 2 && advice.empty(); level++)
        if (needed(c.batch, level) <= available) propose(format_text("--recompute %lld", (long long)level));
    if (const int64_t batch = largest_batch(c.recompute)) propose(format_text("--batch %lld", (long long)batch));
    if (advice.empty() && c.recompute < 2)
        if (const int64_t batch = largest_batch(2))
            propose(format_text("--batch %lld with --recompute 2", (long long)batch));
    fail(
        "--batch %lld and --seq-len %lld need %.0f MiB per rank, of which %.0f MiB are parameters, gradients and "
        "moments; %.0f MiB are "
        "available: choose %s",
        (long long)c.batch, (long long)c.seq_len, needed(c.batch, c.recompute), fixed, available,
        advice.empty() ? "a smaller --seq-len or model" : advice.c_str());
}

// The activations' table: name, shape, buffers, MiB; what is below 4 % of the whole is summed up in one line.
template <class Dev>
void print_memory(const Model<Dev>& model, const Activations<Dev>& a) {
    std::printf("memory: %.1f MiB of parameters, gradients and moments, %.1f MiB of activations per rank\n",
                Model<Dev>::flat_bytes(model.config, model.partition.ranks) / (1 << 20), double(a.bytes) / (1 << 20));
    auto entries = a.memory;
    std::sort(entries.begin(), entries.end(), [](const auto& x, const auto& y) { return x.bytes > y.bytes; });
    size_t rest = 0;
    for (const auto& e : entries) {
        if (e.bytes * 25 < a.bytes) rest += e.bytes;
        else std::printf("        %8.1f MiB  %3zu x %s\n", double(e.bytes) / (1 << 20), e.count, e.name.c_str());
    }
    std::printf("        %8.1f MiB  the rest\n", double(rest) / (1 << 20));
}

// ---------------------------------------------------------------------------------------------------------------------
// How a run is asked to stop: by a signal or by a file named halt in its folder. It finishes the step, writes
// a checkpoint, and says with its exit status what a scheduler needs to know: 75 (try again) after SIGTERM,
// SIGUSR1 and SIGPIPE, 130 after SIGINT, 0 after a halt file. A second signal ends the program at once.

static volatile std::sig_atomic_t stop_signal = 0;

extern "C" inline void on_stop_signal(int signal) {
    if (stop_signal && signal == SIGPIPE) return;  // it comes with every line that is printed
    if (stop_signal) _exit(128 + signal);
    stop_signal = signal;
}
static void listen_for_stop_signals(const World& world) {
    struct sigaction action = {};
    action.sa_handler = on_stop_signal;
    action.sa_flags = SA_RESTART;
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
    // who read the output is gone (| head, | less); of several ranks the launcher has the pipe
    if (world.size == 1) sigaction(SIGPIPE, &action, nullptr);
}

template <class Dev>
struct Run {
    Dev& dev;
    Config config;
    World& world;
    TrainData data;
    std::unique_ptr<Tokenizer> tokenizer;
    Model<Dev> model;
    std::unique_ptr<Reducer<Dev>> reducer;  // of several ranks
    std::unique_ptr<Activations<Dev>> activations;
    std::unique_ptr<Watchdog> watchdog;
    std::unique_ptr<RunLog> log;  // rank 0
    TrainState state;

    Run(Dev& device, const Config& c, World& w)
        : dev(device),
          config(c),
          world(w),
          data(open_data(c, w)),
          tokenizer(load_tokenizer(c)),
          model(dev, c, true, w.rank, w.size) {}

    void validate() {
        if (!data.val) return;
        model.progress("evaluation");
        const int64_t samples = std::min<int64_t>(config.eval_batches * (config.total_batch / config.seq_len),
                                                  int64_t(data.val->samples_per_epoch()));
        const EvalResult r = evaluate(model, *activations, *data.val, samples, world, tokenizer.get());
        state.best_val_loss = std::min(state.best_val_loss, r.loss);
        last_val_loss = r.loss;
        if (world.rank != 0) return;
        std::string line = format_text("step %04lld | val loss %.4f", (long long)state.step, r.loss),
                    fields =
                        format_text("{\"step\":%lld,\"time\":%.3f,\"tokens\":%lld,\"val_loss\":%s,\"val_tokens\":%llu",
                                    (long long)state.step, unix_time(), (long long)(state.step * config.total_batch),
                                    json_number("%.6f", r.loss).c_str(), (unsigned long long)r.tokens);
        if (r.bytes)
            line += format_text(" | bits/byte %.4f", r.bits_per_byte()),
                fields += ",\"bits_per_byte\":" + json_number("%.6f", r.bits_per_byte());
        if (r.answers)
            line += format_text(" | recall loss %.4f (chance %.4f)", r.answer_loss, std::log(SYNTHETIC_ALPHABET)),
                fields += ",\"recall_loss\":" + json_number("%.6f", r.answer_loss);
        std::printf("%s\n", line.c_str());
        log->line(log->text, format_text("s:%lld tel:%.6f", (long long)state.step, r.loss));
        log->line(log->json, fields + "}");
    }

    void sample() {
        if (world.rank != 0 || config.sample_tokens == 0) return;
        if (!tokenizer) {
            std::printf("no sample: --vocab-dir is needed to turn gpt2 tokens into text\n");
            return;
        }
        std::printf("--- sample at step %lld, %lld tokens ---\n", (long long)state.step,
                    (long long)config.sample_tokens);
        print_sample(model, *tokenizer, config, config.sample_tokens);
        std::printf("---\n");
    }

    // ----- checkpoints. In the middle of a run they are written in the background from a copy, and training goes on:
    // WRITING, every rank its files; when all have said so (StepMessage::WRITTEN), rank 0 makes the folder a
    // checkpoint: COMMITTING. Whatever fails is told, and the run goes on from the last good one.
    enum SavePhase { IDLE, WRITING, COMMITTING };
    SavePhase save_phase = IDLE;
    TrainState saving;                // the state that is being written
    std::vector<FileRecord> written;  // this rank's files
    std::string last_saved;           // folder of the last good checkpoint; rank 0
    std::vector<std::string> save_complaints;
    bool saves_in_background = true;
    BackgroundTask writer;  // its jobs use what stands above

    void report_save(const std::string& error) {
        if (world.rank == 0) {
            for (const std::string& text : save_complaints) complain(text);
            save_complaints.clear();
            if (error.empty()) {
                last_saved = checkpoint_folder(config.out, saving.step);
                std::printf("saved %s\n", last_saved.c_str());
            } else {
                complain(format_text("checkpoint of step %lld failed: %s; training goes on, the last good one is %s",
                                     (long long)saving.step, error.c_str(),
                                     last_saved.empty() ? "none" : last_saved.c_str()));
            }
        }
        save_phase = IDLE;
    }

    // copy: training goes on while the files are written. Without, finish_save() has to come next.
    void start_save(bool copy) {
        finish_save();
        model.progress("checkpoint");
        std::string error;
        try {
            if (world.rank == 0) begin_checkpoint(config.out, state.step);
        } catch (const Error& e) {
            error = e.what();
        }
        saving = state;
        try {
            fail_together(world, error);  // also makes the others wait until the folder is there
        } catch (const Error& e) {
            return report_save(e.what());
        }
        auto snapshot = std::make_shared<Snapshot>(take_snapshot(model, world, copy));
        save_phase = WRITING;
        writer.start([this, snapshot] {
            written =
                write_snapshot(*snapshot, config, checkpoint_writing(config.out, saving.step), world.rank, world.size);
        });
    }

    // A slow disk is no stall as long as bytes arrive.
    void await_writer() {
        for (uint64_t seen = 0; writer.running(); usleep(1000)) {
            const uint64_t bytes = bytes_written_to_files.load(std::memory_order_relaxed);
            if (bytes != seen) model.progress("checkpoint");
            seen = bytes;
        }
        writer.wait();
    }

    // Every rank's files are written, or could not be.
    void commit_save() {
        await_writer();
        std::vector<FileRecord> records;
        try {
            records = gather_records(world, written, writer.error());
        } catch (const Error& e) {
            if (world.rank == 0) abandon_checkpoint(config.out, saving.step, complain);
            return report_save(e.what());
        }
        save_phase = COMMITTING;
        if (world.rank != 0) return report_save("");
        writer.start([this, records] {
            try {
                log->sync();
            } catch (const Error& e) {
                save_complaints.push_back(e.what());
            }
            commit_checkpoint(config.out, saving.step, records, state_json(saving, config, world.size));
            remove_old_checkpoints(config.out, config.keep, config.keep_every,
                                   [this](const std::string& text) { save_complaints.push_back(text); });
        });
    }

    // Called once a step with what the ranks have told each other.
    void continue_save(bool written_everywhere) {
        if (save_phase == WRITING && written_everywhere) commit_save();
        else if (save_phase == COMMITTING && !writer.running()) end_commit();
    }
    void end_commit() {
        await_writer();
        if (!writer.error().empty()) abandon_checkpoint(config.out, saving.step, complain);
        report_save(writer.error());
    }
    void finish_save() {
        if (save_phase == WRITING) commit_save();
        if (save_phase == COMMITTING) end_commit();
    }

    // At the end, or where there is no memory for a copy. Returns false if it failed; rank 0 knows.
    bool save_now() {
        if (saving.step != state.step || save_phase == IDLE) start_save(false);
        finish_save();
        return world.rank != 0 || last_saved == checkpoint_folder(config.out, state.step);
    }

    // ----- steps. On a GPU the host runs one step ahead: it reports a step while the next one computes, and nothing
    // waits for the GPU in between, except where the statistics are read or --skip-outliers has to decide.
    struct Step {
        int64_t step = 0;
        double lr = 0;
        std::string statistics;
        LoaderState loader{};
        std::vector<int32_t> tokens;  // [samples of this rank, T]
        // known after exchange()
        bool exchanged = false, skipped = false;
        double own_loss = 0, loss = 0, norm = 0, loss_z = 0, norm_z = 0;
        bool is_bad() const { return !std::isfinite(loss) || !std::isfinite(norm); }
    };
    std::vector<Step> pending;  // given to the engine and not yet reported
    std::vector<double> speed;  // tokens/s of every reported step
    double started = 0, last_report = 0, last_val_loss = 0;
    int64_t first_step = 0;

    // What the ranks tell each other once a step: sums over them.
    struct StepMessage {
        enum { LOSS, TERMINATE, INTERRUPT, HALT, WRITTEN, COUNT };
    };
    enum Stop { GO_ON, HALTED, TERMINATED, INTERRUPTED };
    Stop stop = GO_ON;

    // The step's results, when the engine has them, and the sum over ranks.
    void exchange(Step& s) {
        model.progress(Dev::on_host ? "update" : "waiting for the GPU");
        await_reduction();
        const std::vector<double> results = dev.receive();
        const size_t own = model.result_count - 2;
        std::vector<double> told(StepMessage::COUNT + own * size_t(world.size));
        told[StepMessage::LOSS] = s.own_loss = results[0];
        told[StepMessage::TERMINATE] = stop_signal == SIGTERM || stop_signal == SIGUSR1 || stop_signal == SIGPIPE;
        told[StepMessage::INTERRUPT] = stop_signal == SIGINT;
        told[StepMessage::HALT] = world.rank == 0 && file_exists(config.out + "/halt");
        told[StepMessage::WRITTEN] = save_phase == WRITING && !writer.running();
        for (size_t i = 0; i < own; i++)
            told[StepMessage::COUNT + i * size_t(world.size) + size_t(world.rank)] = results[2 + i];
        model.progress("waiting for the other ranks");
        world.sum(told.data(), told.size());
        model.progress("report");
        s.exchanged = true;
        s.loss = told[StepMessage::LOSS] / double(config.total_batch);
        // --deterministic: in the order of the samples
        if (own)
            s.loss = std::accumulate(told.begin() + StepMessage::COUNT, told.end(), 0.0) / double(config.total_batch);
        s.norm = std::sqrt(results[1]);
        if (!s.is_bad()) s.loss_z = state.losses.z_score(s.loss), s.norm_z = state.norms.z_score(s.norm);
        if (stop == GO_ON)
            stop = told[StepMessage::INTERRUPT] > 0   ? INTERRUPTED
                   : told[StepMessage::TERMINATE] > 0 ? TERMINATED
                   : told[StepMessage::HALT] > 0      ? HALTED
                                                      : GO_ON;
        continue_save(told[StepMessage::WRITTEN] == world.size);
    }

    // On a GPU, reductions that fail do not end by themselves: until the results are there, NCCL is asked for errors.
    void await_reduction() {
        if constexpr (!Dev::on_host)
            while (reducer && !reducer->arrived()) {
                const std::string error = reducer->error();
                if (!error.empty())
                    fail("step %lld: gradients could not be summed over the ranks: %s", (long long)model.step,
                         error.c_str());
                usleep(50);
            }
    }

    void launch_step() {
        Step s;
        s.step = model.step = state.step + 1;
        s.lr = learning_rate(config, s.step);
        const bool statistics = world.rank == 0 && config.stats_every && s.step % config.stats_every == 0;
        accumulate_gradients(model, *activations, *data.train, world, statistics, reducer.get(), &s.tokens);
        gradient_norm(model, s.step, reducer.get());
        dev.send(model.results, model.result_count);
        if constexpr (!Dev::on_host)
            if (reducer) reducer->mark();
        if (config.skip_outliers > 0) {
            exchange(s);
            s.skipped =
                s.loss_z > config.skip_outliers || s.norm_z > config.skip_outliers;  // NaN while the window fills: no
        }
        if (!s.skipped) apply_update(model, s.step, s.lr, reducer.get());
        if (statistics) s.statistics = layer_statistics(*activations);
        s.loader = data.train->state();
        state.step = s.step, state.loader = s.loader;
        pending.push_back(std::move(s));
    }

    void report_step() {
        Step s = std::move(pending.front());
        pending.erase(pending.begin());
        if (!s.exchanged) exchange(s);
        const double now = seconds_now(), seconds = now - last_report;
        last_report = now;
        speed.push_back(double(config.total_batch) / seconds);
        watchdog->step_done(s.step, seconds, s.loss);
        if (world.rank == 0) print_step(s, seconds);
        if (s.is_bad()) return count_bad_step(s);
        state.bad_steps = 0;
        if (!s.skipped) state.last_update = s.step;
    }

    void print_step(const Step& s, double seconds) {
        const double left = (last_report - started) / double(s.step - first_step) * double(config.steps - s.step);
        std::printf("step %04lld | loss %.4f | lr %.2e | toks/s %.0f | grad_norm %.2f | %.0f ms | eta %s%s\n",
                    (long long)s.step, s.loss, s.lr, speed.back(), s.norm, seconds * 1e3, duration_text(left).c_str(),
                    s.skipped
                        ? format_text(" | no update: loss %.1f, norm %.1f standard deviations above the last %zu steps",
                                      s.loss_z, s.norm_z, OutlierWindow::SIZE)
                              .c_str()
                        : "");
        std::fflush(stdout);
        log->line(log->text, format_text("s:%lld trl:%.6f lr:%.6e norm:%.4f", (long long)s.step, s.loss, s.lr, s.norm));
        log->line(
            log->json,
            format_text("{\"step\":%lld,\"time\":%.3f,\"loss\":%s,\"lr\":%.6e,\"grad_norm\":%s,\"loss_z\":%s,\"norm_"
                        "z\":%s,\"skipped\":%s,"
                        "\"ms\":%.2f,\"tokens_per_s\":%.1f,\"tokens\":%lld,\"epoch\":%.6f,\"peak_memory_mib\":%.1f",
                        (long long)s.step, unix_time(), json_number("%.6f", s.loss).c_str(), s.lr,
                        json_number("%.6f", s.norm).c_str(), json_number("%.3f", s.loss_z).c_str(),
                        json_number("%.3f", s.norm_z).c_str(), s.skipped || s.is_bad() ? "true" : "false",
                        seconds * 1e3, speed.back(), (long long)(s.step * config.total_batch),
                        double(s.loader.next_sample) / double(data.train->samples_per_epoch()), peak_memory_mib()) +
                (Dev::on_host ? "" : format_text(",\"peak_gpu_memory_mib\":%.1f", peak_device_mib(dev))) +
                s.statistics + "}");
    }

    // Loss or gradient is not finite: the update changed nothing. What led
    // there goes to a file of each rank; too many in a row end the run.
    void count_bad_step(const Step& s) {
        state.bad_steps++;
        const std::string file = format_text("%s/bad_step_%08lld_rank%d.json", config.out.c_str(), (long long)s.step,
                                             world.rank),
                          tensor = first_bad_tensor(s.step);
        std::string text = format_text(
            "{\"step\": %lld, \"rank\": %d, \"loss\": \"%g\", \"loss_of_this_rank\": \"%g\", \"grad_norm\": \"%g\", "
            "\"first_nonfinite_gradient\": %s, \"tokens\": [",
            (long long)s.step, world.rank, s.loss, s.own_loss, s.norm, json_quote(tensor).c_str());
        for (size_t i = 0; i < s.tokens.size(); i++)
            text += (i % size_t(config.seq_len) ? "," : i ? "],\n [" : "\n [") + std::to_string(s.tokens[i]);
        std::string error;
        try {
            write_text_file(file, text + "]]}\n");
        } catch (const Error& e) {
            complain(e.what());
        }
        std::string culprits;
        if (world.size > 1) {
            const std::vector<std::string> finite = world.gather(std::isfinite(s.own_loss) ? "yes" : "");
            for (size_t r = 0; r < finite.size(); r++)
                if (finite[r].empty()) culprits += (culprits.empty() ? ", from rank " : ", ") + std::to_string(r);
        }
        const std::string what = format_text(
            "step %lld: loss %g, gradient norm %g%s: not finite; first tensor: %s; the step changed no weight, its "
            "batch is in %s",
            (long long)s.step, s.loss, s.norm, culprits.c_str(), tensor.c_str(), file.c_str());
        if (state.bad_steps < config.max_bad_steps) {
            if (world.rank == 0) complain(what);
            return;
        }
        finish_save();
        if (world.rank != 0) world.barrier();  // rank 0 ends all
        fail(
            "%s; that was bad step %lld in a row (--max-bad-steps); the last good checkpoint is %s; lower --lr or look "
            "at the data",
            what.c_str(), (long long)state.bad_steps, last_saved.empty() ? "none" : last_saved.c_str());
    }

    // The first tensor of the model, in the order of its table, whose gradient
    // is not finite, as far as chunks of 4096 elements tell tensors apart.
    std::string first_bad_tensor(int64_t step) {
        std::vector<double> squares(model.chunks());
        dev.copy(squares.data(), static_cast<const double*>(model.squares[step % 2]), squares.size());
        for (size_t i = 0; i < squares.size(); i++) {
            if (std::isfinite(squares[i])) continue;
            std::string names;
            for (const TensorSpec& t : model.table.specs)
                if (t.offset < (i + 1) * CHUNK && t.offset + t.size > i * CHUNK)
                    names += (names.empty() ? "gradient of " : " or ") + t.name;
            return names;
        }
        return "none, only the loss";
    }

    // ----- the run

    // Rank 0 chooses, so that all take the same one. Also checks what must agree between ranks before anything is
    // written.
    std::string choose_checkpoint() {
        std::string chosen, error;
        if (world.size > 1) {
            std::string lines = "program: " + binary_digest() + "\n";
            std::istringstream options(manifest_json(config));
            for (std::string line; std::getline(options, line);)
                if (line.find("\"threads\"") == std::string::npos) lines += "option " + line + "\n";
            lines += format_text("training data: %016llx\n", (unsigned long long)data.train->state().corpus);
            if (data.val)
                lines += format_text("validation data: %016llx\n", (unsigned long long)data.val->state().corpus);
            world.require_same(lines, "start all ranks with the same program, options and data");
        }
        try {
            if (world.rank == 0 && config.dump_state.empty() && file_exists(config.out)) lock_run_folder(config.out);
            if (world.rank == 0 && config.resume) chosen = newest_checkpoint(config.out);
        } catch (const Error& e) {
            error = e.what();
        }
        fail_together(world, error);
        return world.size > 1 ? world.gather(chosen)[0] : chosen;
    }

    // What differs from the run that wrote the checkpoint, as far as it may, and what that does to the learning rate.
    void print_changed_options(const std::string& checkpoint) {
        const Manifest manifest = read_manifest(checkpoint);
        const Json& then = manifest.state.get("options", manifest.path);
        Config before = config;
        for (const Option& o : option_table()) {
            const Json* old = then.find(underscored(o.name));
            if (!old || !(o.verbs & TRAIN) || !std::strcmp(o.name, "out") || !std::strcmp(o.name, "threads")) continue;
            const bool same = old->kind == Json::String ? old->text == value_text(config, o)
                              : o.integer               ? old->integer_value == config.*o.integer
                              : o.real                  ? old->number_value == config.*o.real
                                                        : true;
            if (same) continue;
            std::printf(
                "resume: --%s is %s, was %s\n", o.name, value_text(config, o).c_str(),
                old->kind == Json::String ? old->text.c_str() : format_text("%.15g", old->number_value).c_str());
            if (o.integer) before.*o.integer = old->integer_value;
            else if (o.real) before.*o.real = old->number_value;
            else if (o.text) before.*o.text = old->text;
        }
        const int64_t next = state.step + 1;
        const double is = learning_rate(config, next), was = learning_rate(before, next);
        if (std::fabs(is - was) > 0.01 * std::max(is, was))
            std::printf("resume: the learning rate of step %lld is %.2e, by the earlier options %.2e\n",
                        (long long)next, is, was);
    }

    // Returns the program's exit status.
    int train(const std::set<std::string>& given, const Device& device) {
        const Config& c = config;
        WatchdogOptions watch;
        watch.stall_timeout = c.stall_timeout;
        const std::string checkpoint = choose_checkpoint();
        if (world.rank == 0) print_run(dev, c, model.table, data, world, device, given);
        if (!checkpoint.empty()) {  // whatever a resume can be refused for, before anything is written
            require_same_model(c, checkpoint, "resume");
            data.train->restore(read_state(read_manifest(checkpoint)).loader);
        }
        std::unique_ptr<SafeTensors> initial;  // --init-from
        if (checkpoint.empty() && !c.init_from.empty()) {
            const std::string folder = checkpoint_of(c.init_from, "--init-from");
            require_same_model(c, folder, "begin");
            initial = std::make_unique<SafeTensors>(folder + "/model.safetensors");
            require_tensors(model.table, *initial);
            if (world.rank == 0)
                std::printf("weights: those of %s; moments, data and schedule begin anew\n", folder.c_str());
        }
        if (world.rank == 0 && c.dump_state.empty()) prepare_run_folder(c, !checkpoint.empty());
        world.barrier();
        if (c.dump_state.empty())
            watch.heartbeat_file = format_text("%s/heartbeat_rank%d.jsonl", c.out.c_str(), world.rank);
        watchdog = std::make_unique<Watchdog>(world, watch);
        model.watchdog = watchdog.get();
        model.progress("start");
        if (world.size > 1)
            reducer =
                std::make_unique<Reducer<Dev>>(dev, world, model.partition, model.grads,
                                               ReduceOptions{int(c.zero), c.grad_reduce == "bf16", c.deterministic});
        activations = std::make_unique<Activations<Dev>>(dev, c, c.batch, c.seq_len, TRAINING);
        if (world.rank == 0) print_memory(model, *activations);
        print_selected_kernels();
        decide_how_to_save();
        if (checkpoint.empty()) {
            if (initial) read_parameters(model, *initial);
            else model.initialise();
            initial.reset();
        } else {
            state = load_checkpoint(model, checkpoint);
            last_saved = checkpoint;
        }
        if (!c.dump_state.empty()) return dump_first_batch(model, *activations, *data.train, given), 0;
        if (world.rank == 0) {
            log = std::make_unique<RunLog>(c.out, !checkpoint.empty(), state.step);
            if (!checkpoint.empty())
                std::printf("resume: %s, step %lld\n", checkpoint.c_str(), (long long)state.step),
                    print_changed_options(checkpoint);
            else if (c.resume)
                std::printf("resume: nothing to resume under %s, this run starts at step 0\n", c.out.c_str());
            std::fflush(stdout);
        }
        first_step = state.step;
        const double begun = seconds_now();
        if (first_step == 0) validate();
        started = last_report = seconds_now();
        bool saved = true;
        while (state.step < c.steps && stop == GO_ON) {
            launch_step();
            const bool last = state.step == c.steps;
            auto due = [&](int64_t every) { return last || (every && state.step % every == 0); };
            const bool stop_here = due(c.eval_every) || due(c.save_every) || due(c.sample_every);
            while (pending.size() > (Dev::on_host || stop_here || stop != GO_ON ? 0u : 1u)) report_step();
            if (due(c.eval_every)) validate();
            if (last || stop != GO_ON) continue;
            if (due(c.save_every)) {
                if (state.bad_steps) {  // with --keep it would push out a good one
                    if (world.rank == 0)
                        complain(format_text("no checkpoint at step %lld, whose loss or gradient is not finite",
                                             (long long)state.step));
                } else {
                    saves_in_background ? start_save(true) : void(save_now());
                }
            }
            if (due(c.sample_every)) sample();
            if (stop_here) last_report = seconds_now();  // what was done between the steps is not theirs
        }
        while (!pending.empty()) report_step();
        if (state.step > first_step) saved = save_now();
        if (stop == GO_ON && state.step > first_step) sample();
        return finish(begun, saved);
    }

    // What the speed is in terms of the model's own arithmetic, and which share of what the processors of all ranks
    // could do at best.
    void print_flops(double tokens_per_second) {
        const double per_token = model_flops_per_token(config), rate = per_token * tokens_per_second / world.size,
                     peak = dev.peak_flops();
        std::printf(
            "        %.1f MFLOP a token by the model's own count: %.*f TFLOP/s%s%s\n", per_token * 1e-6,
            rate < 1e13 ? 3 : 1, rate * 1e-12, world.size > 1 ? " on each rank" : "",
            peak > 0 ? format_text(", MFU %.1f %% of %.1f TFLOP/s", 100 * rate / peak, peak * 1e-12).c_str() : "");
    }

    // Which kernels a GPU takes for the selected branch; at the end, what the selection of the last forward or backward
    // pass made of it.
    void print_selected_kernels() {
        if constexpr (!Dev::on_host)
            if (world.rank == 0) std::printf("        %s\n", dev.describe_selected(activations->shape).c_str());
    }

    // Is there memory on the host for a copy of this rank's share of a checkpoint? On a CPU the activations are
    // allocated by now, but their pages are the system's until they are written. From a GPU a checkpoint always passes
    // through such a copy.
    void decide_how_to_save() {
        const double copy = double(model.table.total) * (8.0 / world.size + (world.rank == 0 ? 4 : 0)),
                     available = Cpu<float>().available_bytes() / world.local_size -
                                 (Dev::on_host ? double(activations->bytes) : 0);
        std::vector<double> short_of = {copy > 0.8 * available ? 1.0 : 0.0};
        world.sum(short_of.data(), 1);
        saves_in_background = short_of[0] == 0;
        if (world.rank == 0 && config.save_every && !saves_in_background)
            std::printf(
                "        checkpoints %s: the host has no memory for a copy of %.0f MiB to write in the background\n",
                Dev::on_host ? "hold up the training" : "may fail", copy / (1 << 20));
    }

    int finish(double begun, bool saved) {
        watchdog->progress(state.step, "end");
        if (world.rank == 0) {
            if (stop == HALTED && std::remove((config.out + "/halt").c_str()) != 0)
                complain(format_text("cannot remove %s/halt: %s; the next run will stop at once", config.out.c_str(),
                                     std::strerror(errno)));
            std::sort(speed.begin(), speed.end());
            std::printf(
                "done:   %lld step%s in %s, median %.0f tokens/s, peak memory %s%.0f MiB%s\n",
                (long long)(state.step - first_step), state.step - first_step == 1 ? "" : "s",
                duration_text(seconds_now() - begun).c_str(), speed.empty() ? 0.0 : speed[speed.size() / 2],
                Dev::on_host ? "" : format_text("%.0f MiB on the GPU, of the host ", peak_device_mib(dev)).c_str(),
                peak_memory_mib(), world.size > 1 ? " on rank 0" : "");
            if (!speed.empty()) print_flops(speed[speed.size() / 2]);
            if (reducer) reducer->read_clocks();
            if (reducer && reducer->times.steps)
                std::printf(
                    "ranks:  reductions %.1f ms a step, of which %.1f ms exposed: not hidden behind the backward "
                    "pass\n",
                    reducer->times.total * 1e3 / double(reducer->times.steps),
                    std::min(reducer->times.exposed, reducer->times.total) * 1e3 / double(reducer->times.steps));
            print_selected_kernels();
            if (!saved)
                fail(
                    "the last checkpoint could not be written: what was learnt since %s is lost; make room and run "
                    "again%s",
                    last_saved.empty() ? "the start" : last_saved.c_str(), last_saved.empty() ? "" : " with --resume");
            if (stop == GO_ON &&
                state.bad_steps)  // a run that was asked to stop is to be resumed, and its status says so
                fail(
                    "the last %s not finite, so the weights are those of step %lld; lower --lr or look at the data: "
                    "the batch is in "
                    "%s/bad_step_*.json",
                    state.bad_steps == 1 ? "step is"
                                         : format_text("%lld steps are", (long long)state.bad_steps).c_str(),
                    (long long)state.last_update, config.out.c_str());
            if (stop == GO_ON && !std::isfinite(last_val_loss))
                fail(
                    "the last validation loss is not finite: the weights are no use any more; lower --lr, and --resume "
                    "from an earlier "
                    "checkpoint in %s",
                    config.out.c_str());
            if (stop == GO_ON && state.step == first_step)
                std::printf(
                    "no step was to be done: --steps is %lld%s\n", (long long)config.steps,
                    first_step ? format_text(", and step %lld is reached already", (long long)first_step).c_str() : "");
            if (stop == GO_ON && !last_saved.empty())
                std::printf("next:   ./train_nsa sample --from %s%s --prompt \"...\"\n", shell_word(config.out).c_str(),
                            tokenizer ? "" : " --vocab-dir DIR");
            if (stop != GO_ON)
                std::printf("stopped by %s after step %lld of %lld; the same command with --resume goes on\n",
                            stop == HALTED        ? "the halt file"
                            : stop == INTERRUPTED ? "SIGINT"
                                                  : "SIGTERM or SIGUSR1",
                            (long long)state.step, (long long)config.steps);
        }
        return stop == INTERRUPTED ? 130 : stop == TERMINATED ? 75 : 0;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The verbs.

#ifdef HAVE_CUDA
// The GPU of a rank among those it sees: its own if the launcher has given it one, else the one of its number on this
// machine.
static int gpu_of_rank(const World& world) {
    int gpus = 0;
    CUDA_CHECK(cudaGetDeviceCount(&gpus));
    if (gpus == 1) return 0;
    if (world.local_rank >= gpus)
        fail_usage("rank %d is number %d on %s, which shows it %d GPUs: start one rank per GPU", world.rank,
                   world.local_rank, world.host.c_str(), gpus);
    return world.local_rank;
}
// NCCL wants a GPU of its own for every rank, and hangs or fails late where two share one.
static void require_own_gpu(const World& world, int device) {
    if (world.size == 1) return;
    char bus[32] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    const std::vector<std::string> all = world.gather(world.host + " " + bus);
    for (int r = 0; r < world.rank; r++)
        if (all[size_t(r)] == all[size_t(world.rank)])
            fail_usage("ranks %d and %d use the same GPU, %s: start one rank per GPU", r, world.rank,
                       all[size_t(r)].c_str());
}
#endif

// An error is one line on stderr; under mpirun it names the rank and ends the other ranks too.
static int print_error(const World* world, int status, const char* text) {
    std::fflush(stdout);
    if (world &&
        world->rank > 0) {  // an error that all ranks have is told by the first, which ends the others meanwhile
        usleep(unsigned(std::min(world->rank, 10)) * 100000);
        while (world->channel().ended_by_another()) pause();
    }
    if (world && world->size > 1)
        std::fprintf(stderr, "train_nsa: rank %d on %s%s%s: error: %s\n", world->rank, world->host.c_str(),
                     world->device.empty() ? "" : ", ", world->device.c_str(), text);
    else std::fprintf(stderr, "train_nsa: error: %s\n", text);
    if (world) world->abort(status);
    return status;
}
// The status of work(), or of its error, which ends the program here. With several ranks it must not unwind to main():
// ncclCommDestroy would wait for the other ranks, cudaFree for a reduction that they do not join, and they wait for us.
template <class Work>
int telling_errors(const World* world, Work work) {
    try {
        return work();
    } catch (const Error& e) {
        return print_error(world, e.status, e.what());
    } catch (const std::exception& e) {
        return print_error(world, 1, e.what());
    }
}

// The engine for the options and this machine.
template <class Use>
void with_engine(const Device& device, World& world, Use use) {
#ifdef HAVE_CUDA
    if (device.gpu) {
        world.device = format_text("GPU %d", gpu_of_rank(world));
        world.channel().computes_on(world.device.c_str());
        Cuda dev(gpu_of_rank(world));
        require_own_gpu(world, dev.device);
        return use(dev);
    }
#endif
    (void)device;
    world.device = "CPU";
    world.channel().computes_on(world.device.c_str());
    Cpu<float> dev;
    dev.gemm.bf16 = device.cpu_bf16;
    use(dev);
}

// --resume: what was not given is as in the run that is resumed. Not what belongs to the machine rather than to the
// run.
static void inherit_options(Config& c, std::set<std::string>& given) {
    const std::string folder = given.count("out") ? c.out : "runs/" + c.model, path = folder + "/run.json";
    if (!file_exists(path)) return;
    const Json then = parse_json(read_file(path), path);
    for (const Option& o : option_table()) {
        const Json* old = then.find(underscored(o.name));
        const std::string name = o.name;
        if (!old || !(o.verbs & TRAIN) || given.count(name)) continue;
        bool of_machine = false;
        for (const char* other : {"out", "batch", "threads", "device", "cpu-dtype", "cuda-graph", "selected-kernels",
                                  "stats-every", "dump-state"})
            of_machine |= name == other;
        if (of_machine) continue;
        try {
            set_option(c, o,
                       old->kind == Json::String ? old->text
                       : o.integer               ? std::to_string(old->integer_value)
                                                 : format_text("%.17g", old->number_value));
        } catch (const Error& e) {
            fail("%s: %s", path.c_str(), e.what());
        }
        given.insert(name);
    }
}

static int run_train(Config& c, const std::set<std::string>& on_command_line, World& world) {
    std::set<std::string> given = on_command_line;
    if (c.resume) inherit_options(c, given);
    apply_preset(c, given);
    validate_model(c, "options");
    // A rank that falls silent is noticed from here on; standing still is judged once progress() has been called.
    if (world.size > 1) world.channel().watch(c.stall_timeout);
    const Device device = choose_device(c, world);
    world.require_reducer(device.gpu);
    resolve_batch(c, given, world, device.gpu);
    if (!given.count("stats-every")) c.stats_every = device.gpu ? 50 : 1;
    if (!c.dump_state.empty() && (world.size > 1 || c.batch * c.seq_len != c.total_batch))
        fail_usage(
            "--dump-state needs one rank and no accumulation: --total-batch %lld must be --batch %lld x --seq-len %lld",
            (long long)c.total_batch, (long long)c.batch, (long long)c.seq_len);
    if (c.stall_timeout > 0 && c.stall_timeout < 1)
        fail_usage("--stall-timeout %g: ranks are listened to five times a second; give at least 1, or 0 for none",
                   c.stall_timeout);
    if (c.deterministic && (world.size & (world.size - 1)))
        fail_usage("--deterministic on %d ranks: its tree needs a power of two of them", world.size);
    listen_for_stop_signals(world);
    listen_for_lost_pages();
    int status = 0;
    with_engine(device, world, [&](auto& dev) {
#ifdef HAVE_CUDA
        if constexpr (std::is_same<std::decay_t<decltype(dev)>, Cuda>::value) {
            dev.selected_kernel = c.selected_kernels == "tiles"    ? SelectedKernel::TILES
                                  : c.selected_kernels == "gather" ? SelectedKernel::GATHER
                                                                   : SelectedKernel::AUTO;
            dev.use_graphs = c.cuda_graph;
        }
#endif
        dev.check_shape(shape_of(c, c.batch, c.seq_len));
        require_memory(dev, c, world);
        Run<std::decay_t<decltype(dev)>> run(dev, c, world);
        const auto train = [&] { return run.train(given, device); };
        status = world.size > 1 ? telling_errors(&world, train) : train();
    });
    return status;
}

static void run_tokenize(const Config& c) {
    if (c.in.empty()) fail_usage("tokenize: --in is missing: one or more .txt or .jsonl files");
    if (c.out.empty()) fail_usage("tokenize: --out is missing: the prefix of the shards, such as data/my");
    TokenizeOptions o;
    o.in = c.in, o.out = c.out, o.tokenizer = c.tokenizer.empty() ? "gpt2" : c.tokenizer, o.vocab_dir = c.vocab_dir,
    o.val_fraction = c.val_fraction, o.shard_tokens = uint64_t(c.shard_tokens);
    o.split_documents = c.split_documents, o.threads = c.threads ? int(c.threads) : usable_processors();
    tokenize_files(o);
}

static void run_sample(Config c, World& world) {
    const std::string folder = read_trained_config(c);
    const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(c);
    if (!tokenizer) fail_usage("sample: --vocab-dir is missing: this model writes gpt2 tokens");
    const SafeTensors weights(folder + "/model.safetensors");
    require_tensors(TensorTable(c), weights);
    with_engine(choose_device(c, world), world, [&](auto& dev) {
        Model model(dev, c, false);
        read_parameters(model, weights);
        print_sample(model, *tokenizer, c, c.tokens);
    });
}

static void run_eval(Config c, const std::set<std::string>& given, World& world) {
    const std::string folder = read_trained_config(c);
    if (c.val_data.empty())
        fail_usage("eval: --val-data is missing: a glob of validation shards, in quotes, or synthetic");
    if (!given.count("batch")) c.batch = 1;
    const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(c);
    std::vector<TokenSource> sources;
    int64_t of_run = std::numeric_limits<int64_t>::max();
    if (c.val_data == "synthetic") {  // what the run itself was validated on
        const Manifest manifest = read_manifest(folder);
        const Json& then = manifest.state.get("options", manifest.path);
        Config trained = c;
        trained.seed = then.integer("seed", manifest.path),
        trained.eval_batches = then.integer("eval_batches", manifest.path),
        trained.total_batch = then.integer("total_batch", manifest.path);
        sources.push_back(synthetic_validation(trained));
        of_run = trained.eval_batches * (trained.total_batch / c.seq_len);
    } else {
        sources = open_shards(shard_files(c.val_data, "--val-data"));
    }
    DataLoader loader(std::move(sources), loader_options(c, world, "--val-data", false));
    listen_for_lost_pages();
    const int64_t all = std::min(int64_t(loader.samples_per_epoch()), of_run),
                  samples = given.count("eval-batches") ? std::min(all, c.eval_batches * c.batch) : all;
    c.batch = std::min(c.batch, (samples + world.size - 1) / world.size);
    const SafeTensors weights(folder + "/model.safetensors");
    require_tensors(TensorTable(c), weights);
    EvalResult r;
    with_engine(choose_device(c, world), world, [&](auto& dev) {
        Model model(dev, c, false);
        read_parameters(model, weights);
        using Engine = std::decay_t<decltype(dev)>;
        const double needed = Activations<Engine>::bytes_needed(dev, c, c.batch, c.seq_len, INFERENCE),
                     available = dev.available_bytes() / (Engine::on_host ? world.local_size : 1);
        if (needed > available)
            fail(
                "eval: --batch %lld with sequences of %lld needs %.0f MiB per rank; %.0f MiB are available: choose a "
                "smaller --batch",
                (long long)c.batch, (long long)c.seq_len, needed / (1 << 20), available / (1 << 20));
        Activations<Engine> a(dev, c, c.batch, c.seq_len, INFERENCE);
        r = evaluate(model, a, loader, samples, world, tokenizer.get());
    });
    if (world.rank != 0) return;
    std::printf("%s on %llu tokens (%llu of %llu samples of %lld): loss %.4f, perplexity %.3f", folder.c_str(),
                (unsigned long long)r.tokens, (unsigned long long)(r.tokens / uint64_t(c.seq_len)),
                (unsigned long long)loader.samples_per_epoch(), (long long)c.seq_len, r.loss, std::exp(r.loss));
    if (r.answers) std::printf(", recall loss %.4f (chance %.4f)", r.answer_loss, std::log(SYNTHETIC_ALPHABET));
    if (r.bytes) std::printf(", bits per byte %.4f\n", r.bits_per_byte());
    else std::printf("; bits per byte are unknown without --vocab-dir\n");
}

// A small model in fp64: per tensor a random direction, central differences of the loss against the backward pass.
// Returns the worst difference relative to the gradient's L2 norm. A step of 1e-5 leaves rounding of about 1e-8 and
// less truncation.
static double gradient_self_test() {
    const char* arguments[] = {"train_nsa", "--init",       "random", "--layers",     "2",  "--dim",
                               "24",        "--heads",      "4",      "--head-dim",   "6",  "--seq-len",
                               "70",        "--phi-hidden", "5",      "--mlp-hidden", "40", "--slc-count",
                               "4",         "--slc-block",  "8",      "--cmp-block",  "8",  "--cmp-stride",
                               "4",         "--window",     "9"};
    std::set<std::string> given;
    Config c = parse_options(int(std::size(arguments)), arguments, given);
    apply_preset(c, given);
    Cpu<double> dev;
    Model<Cpu<double>> model(dev, c, true);
    Activations<Cpu<double>> a(dev, c, 2, c.seq_len, TRAINING);
    model.initialise();
    std::vector<int32_t> inputs(size_t(2 * c.seq_len)), targets(inputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
        inputs[i] = int32_t(random_below(256, 1, random_stream(RANDOM_TEST), i));
        targets[i] = int32_t(random_below(256, 2, random_stream(RANDOM_TEST), i));
    }
    auto loss = [&](bool gradient) {
        forward(model, a, inputs.data(), 0, int(c.seq_len));
        return classify(model, a, targets.data(), 1.0, gradient);
    };
    loss(true);
    backward(model, a);
    const double step = 1e-5;
    double worst = 0;
    for (size_t index = 0; index < model.table.specs.size(); index++) {
        const TensorSpec& t = model.table.specs[index];
        const std::vector<double> saved(model.params + t.offset, model.params + t.offset + t.size);
        std::vector<double> direction(t.size);
        double slope = 0, square = 0, value[2];
        for (size_t i = 0; i < t.size; i++) {
            const double g = model.grads[t.offset + i];
            direction[i] = random_normal(3, random_stream(RANDOM_TEST, index), i);
            slope += direction[i] * g, square += g * g;
        }
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < t.size; i++)
                model.params[t.offset + i] = saved[i] + (side ? -step : step) * direction[i];
            value[side] = loss(false);
        }
        std::copy(saved.begin(), saved.end(), model.params + t.offset);
        worst = std::max(worst, std::fabs((value[0] - value[1]) / (2 * step) - slope) / std::sqrt(square));
    }
    return worst;
}

static int run_check(const Config& c, World& world) {
    const Device device = choose_device(c, world);
    const auto yes = [](bool there) { return there ? "\u2713" : "\u2717"; };
#if defined(__NVCC__)
    const std::string compiler =
        format_text("nvcc %d.%d over g++ %s", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, __VERSION__);
#elif defined(__clang__)
    const std::string compiler = __VERSION__;
#else
    const std::string compiler = std::string("g++ ") + __VERSION__;
#endif
    std::printf("%s compiler     %s, vectors of %d bytes\n", yes(true), compiler.c_str(), VECTOR_BYTES);
    std::printf("%s CPU engine   %d of %d usable processors, %s\n", yes(true), device.threads, usable_processors(),
                gemm_name());
#ifdef HAVE_CUDA
    if (device.gpu) std::printf("%s CUDA engine  %s\n", yes(true), Cuda(gpu_of_rank(world)).describe().c_str());
    else std::printf("%s CUDA engine  in this build, not used: %s\n", yes(false), device.reason.c_str());
#else
    std::printf("%s CUDA engine  not in this build\n", yes(false));
#endif
    std::printf("%s MPI          %s\n", yes(mpi_name()),
                mpi_name() ? mpi_name() : "not in this build: one process only; make deps && make train_nsa");
#if defined(USE_NCCL) && defined(HAVE_CUDA)
    int nccl = 0;
    NCCL_CHECK(ncclGetVersion(&nccl));
    std::printf("%s NCCL         %d.%d.%d\n", yes(true), nccl / 10000, nccl / 100 % 100, nccl % 100);
#else
    std::printf("%s NCCL         not in this build%s\n", yes(false),
                device.gpu ? ": one GPU only; install NCCL and make train_nsa" : "");
#endif
#ifdef USE_DNNL
    const dnnl_version_t* v = dnnl_version();
    std::printf("%s oneDNN       %d.%d.%d\n", yes(true), v->major, v->minor, v->patch);
#else
    std::printf("%s oneDNN       not in this build: the GEMMs are our own\n", yes(false));
#endif
    std::printf("  memory       %.0f MiB available\n", Cpu<float>().available_bytes() / (1 << 20));
    bool good = true;
    const std::vector<std::string> shards = glob_files("data/*_train_*.bin");
    std::printf(
        "%s data         %s\n", yes(!shards.empty()),
        shards.empty()
            ? "no data/*_train_*.bin: the built-in synthetic corpus is used"
            : format_text("%zu training shards in data/, the first %s", shards.size(), shards[0].c_str()).c_str());
    try {
        if (!shards.empty()) open_shards(shards);
        if (c.vocab_dir.empty())
            std::printf("%s vocabulary   bytes; GPT-2's is looked for in --vocab-dir, which was not given\n",
                        yes(true));
        else std::printf("%s vocabulary   %s\n", yes(true), Tokenizer::gpt2(c.vocab_dir).describe().c_str());
    } catch (const Error& e) {
        good = false;
        std::printf("%s %s\n", yes(false), e.what());
    }
    const double limit = 1e-6, worst = gradient_self_test();
    good = good && worst < limit;
    std::printf("%s gradients    worst error of the fp64 self-test %.1e, limit %.0e\n", yes(worst < limit), worst,
                limit);
    return good ? 0 : 1;
}

// Where stdout goes a disk may be full.
static bool output_is_whole() { return std::fflush(stdout) == 0 && !std::ferror(stdout); }

[[maybe_unused]] static int run_verb(int argc, char** argv, World& world) {
    std::set<std::string> given;
    Config c = parse_options(argc, argv, given);
    const Verb verb = verb_named(c.verb)->verb;
    if (world.size > 1 && verb != TRAIN && verb != EVAL && !c.help)
        fail_usage("'%s' runs in one process: start it without mpirun", c.verb.c_str());
    int status = 0;
    if (verb == TRAIN && !c.help) {
        status = run_train(c, given, world);
        if (!output_is_whole()) complain("not all of the output could be written to stdout; the run's log is whole");
        return status;
    }
    if (c.help) print_help(verb);
    else if (verb == TOKENIZE) run_tokenize(c);
    else if (verb == SAMPLE) run_sample(c, world);
    else if (verb == EVAL) run_eval(c, given, world);
    else status = run_check(c, world);
    // what these print is all there is of it
    if (!output_is_whole())
        fail("not all of the output could be written to stdout: make room where it goes, and run again");
    return status;
}

#ifndef NSA_WITHOUT_MAIN  // test_nsa.cu includes this file
// Where stdin, stdout or stderr is closed (2>&- in a script), the next file that
// is opened would get its number, and what is printed would go into that file.
static void open_closed_streams() {
    for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
        if (fd > 2) return void(close(fd));
}

int main(int argc, char** argv) {
    open_closed_streams();
    set_passive_omp_wait(argv);
    std::unique_ptr<World> world;
    const int status = telling_errors(nullptr, [&] { return world = std::make_unique<World>(), 0; });
    if (status) return status;
    return telling_errors(world.get(), [&] {
        const int status = run_verb(argc, argv, *world);
        world->finish();
        return status;
    });
}
#endif
