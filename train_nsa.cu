// train_nsa.cu: trains a language model with Native Sparse Attention (arXiv 2502.11089).
//
// Read it from top to bottom:
//   tensors   one list of the model's parameters: names, shapes, initialisation, weight decay
//   model     parameters, gradients and moments; activations and their memory
//   forward, backward, update, evaluate, sample
//   engines   the one in use; then lib/verbs: the other verbs, and a run's own samples, statistics and checkpoints
//   steps     a micro-step, and the gradients of an optimiser step
//   the run   what it does in a step and between steps, the training loop, its beginning and its end
//   verbs, main
// dev/MODEL.md specifies the model. An engine does the arithmetic of each operation: Cpu in nsa_cpu.h or Cuda in
// nsa_kernels.cuh; `dev` is one of the two. `c` holds options: what a model sees is a ModelConfig, what the loop sees a
// TrainConfig, and Config is all that a command line gives, see lib/run/options.h; shape_of() in lib/run/config_files.h
// turns them into the shapes of the attention. Ranks are in lib/run/world.h, the sum of their gradients in ddp.cuh,
// token shards in dataloader.h, text in tokenizer.h, and all that is not about the model in lib/: the start of a run in
// lib/run/start.h, checkpoints in lib/run/checkpoint.h. Only lib/verbs calls what stands here.
#include <string>
#include <vector>

// The engines of this build, registered here and nowhere else: Cpu, and at most one for devices.
#include "nsa_cpu.h"
#if defined(USE_CUDA)  // HIP too
#include "nsa_kernels.cuh"
using DeviceEngine = Cuda;
#elif defined(ENGINE)  // make GPU=NAME: dev/ports/NAME defines DeviceEngine
#include <port.h>
#else
using DeviceEngine = NoEngine;
#endif
// defines: DataLoader, LoaderState
#include "dataloader.h"
// defines: Reducer, make_reducer, connect_by_nccl; after the engines, whose gradients it sums
#include "ddp.cuh"
// defines: prepare_for_errors, output_is_whole
#include "lib/base/program_end.h"
// defines: Arena, one allocation for many buffers
#include "lib/model/arena.h"
// defines: Muon
#include "lib/model/muon.h"
// defines: choose_token
#include "lib/model/sampling.h"
// defines: TensorList, TensorSpec, matrix_of, vector_of, initial_value
#include "lib/model/tensors.h"
// defines: report_runs
#include "lib/report/report.h"
// defines: this_build, mpi_name
#include "lib/run/build_info.h"
// defines: shape_of, complete_options, read_options_file
#include "lib/run/config_files.h"
// defines: Device, choose_device, choose_path
#include "lib/run/device.h"
// defines: EvalSums, EvalResult
#include "lib/run/evaluation.h"
// defines: print_help
#include "lib/run/help.h"
// defines: Machine, print_version
#include "lib/run/machine.h"
// defines: print_memory, require_memory_for
#include "lib/run/memory_needs.h"
// defines: StepResult, RunPrinter
#include "lib/run/run_printer.h"
// defines: CheckpointSaver
#include "lib/run/saver.h"
// defines: open_run, begin_log
#include "lib/run/start.h"
// defines: TrainingData, open_training_data
#include "lib/run/training_data.h"
// defines: Tokenizer
#include "tokenizer.h"

// ---------------------------------------------------------------------------------------------------------------------
// Tensors. One list gives the struct its fields, and every tensor its name on disk, shape, initialisation and decay.
//   TENSOR(field, name on disk, what it is)
//   JOINED(name on disk, what it is)      follows the tensor before it without a gap; both are one field
// A tensor is matrix_of(rows, columns) or vector_of(elements). lib/model/tensors.h says what may follow: with(the
// values it begins with), padded_to(rows in memory), of_nsa(), when(an option is on), elementwise(). in_proj holds the
// projections to q, to keys and values, and to the gate, so that a layer has a single input GEMM; head_gains holds the
// gains of --qk-norm.

// clang-format off
#define LAYER_TENSORS(TENSOR, JOINED)                                                                                 \
    TENSOR(attn_norm,  "attn_norm.weight",       vector_of(C).with(INIT_ONE))                                         \
    TENSOR(in_proj,    "attn.q_proj.weight",     matrix_of(H * D, C))                                                 \
    JOINED(            "attn.k_cmp_proj.weight", matrix_of(G * D, C).of_nsa())                                        \
    JOINED(            "attn.v_cmp_proj.weight", matrix_of(G * D, C).of_nsa())                                        \
    JOINED(            "attn.k_slc_proj.weight", matrix_of(G * D, C).of_nsa())                                        \
    JOINED(            "attn.v_slc_proj.weight", matrix_of(G * D, C).of_nsa())                                        \
    JOINED(            "attn.k_win_proj.weight", matrix_of(G * D, C))                                                 \
    JOINED(            "attn.v_win_proj.weight", matrix_of(G * D, C))                                                 \
    JOINED(            "attn.gate_proj.weight",                                                                       \
           matrix_of(BRANCHES * H, C).padded_to(gate_columns).of_nsa().elementwise())                                 \
    TENSOR(head_gains, "attn.q_norm.weight",     vector_of(D).with(INIT_ONE).when(c.qk_norm))                         \
    JOINED(            "attn.k_cmp_norm.weight", vector_of(D).with(INIT_ONE).of_nsa().when(c.qk_norm))                \
    JOINED(            "attn.k_slc_norm.weight", vector_of(D).with(INIT_ONE).of_nsa().when(c.qk_norm))                \
    JOINED(            "attn.k_win_norm.weight", vector_of(D).with(INIT_ONE).when(c.qk_norm))                         \
    TENSOR(phi_k_fc1,  "attn.phi_k.fc1.weight",  matrix_of(F, l * D).with(INIT_PHI).of_nsa())                         \
    TENSOR(phi_k_bias, "attn.phi_k.fc1.bias",    vector_of(F).with(INIT_ZERO).of_nsa())                               \
    TENSOR(phi_k_fc2,  "attn.phi_k.fc2.weight",  matrix_of(D, F).with(INIT_ZERO).of_nsa())                            \
    TENSOR(phi_v_fc1,  "attn.phi_v.fc1.weight",  matrix_of(F, l * D).with(INIT_PHI).of_nsa())                         \
    TENSOR(phi_v_bias, "attn.phi_v.fc1.bias",    vector_of(F).with(INIT_ZERO).of_nsa())                               \
    TENSOR(phi_v_fc2,  "attn.phi_v.fc2.weight",  matrix_of(D, F).with(INIT_ZERO).of_nsa())                            \
    TENSOR(o_proj,     "attn.o_proj.weight",     matrix_of(C, H * D).with(residual))                                  \
    TENSOR(mlp_norm,   "mlp_norm.weight",        vector_of(C).with(INIT_ONE))                                         \
    TENSOR(mlp_fc1,    "mlp.fc1.weight",         matrix_of(M, C))                                                     \
    TENSOR(mlp_fc2,    "mlp.fc2.weight",         matrix_of(C, M).with(residual))
// clang-format on

template <class T>
struct LayerWeights {
#define FIELD(field, ...) T* field = nullptr;
#define NO_FIELD(...)
    LAYER_TENSORS(FIELD, NO_FIELD)
#undef FIELD
#undef NO_FIELD
    PhisOf<T> phis() const { return {{phi_k_fc1, phi_k_bias, phi_k_fc2}, {phi_v_fc1, phi_v_bias, phi_v_fc2}}; }
};

template <class T>
struct Weights {
    T* embed = nullptr;                  // (Vp, C)
    SmearOf<T> smear = {};               // (C) each, --smear
    std::vector<LayerWeights<T>> layer;  // (L)
    T* norm = nullptr;                   // (C)
    T* head = nullptr;                   // (Vp, C), embed itself but with --head untied
};

struct TensorTable : TensorList {
    int64_t padded_vocab = 0;

    explicit TensorTable(const ModelConfig& c) {
        const NsaShape s = shape_of(c, 1, 1);
        const int64_t C = c.dim, H = s.H, G = s.G, D = s.D, l = s.l, F = s.F, M = c.mlp_hidden,
                      gate_columns = s.gate_columns();
        const bool untied = c.head == "untied";
        const Init residual = untied ? INIT_ZERO : INIT_RESIDUAL;  // an untied model begins as if it had no layers
        padded_vocab = (c.vocab_size + 127) / 128 * 128;
        add("embed_tokens.weight", matrix_of(c.vocab_size, C).padded_to(padded_vocab).elementwise());
        if (c.smear) add("smear.gate.weight", vector_of(C).with(INIT_ZERO));
        if (c.smear) add("smear.scale.weight", vector_of(C).with(INIT_ZERO_TWO));
        for (int64_t i = 0; i < c.layers; i++) {
#define ADD(field, on_disk, form)                                                         \
    if ((form).is_there && (!(form).only_nsa || s.kind_of_layer(size_t(i)) == NSA_LAYER)) \
        add(name_in_layer(i, on_disk), form);
#define ADD_JOINED(on_disk, form) ADD(, on_disk, (form).joined())
            LAYER_TENSORS(ADD, ADD_JOINED)
#undef ADD
#undef ADD_JOINED
        }
        add("norm.weight", vector_of(C).with(INIT_ONE));
        if (untied)
            add("head.weight", matrix_of(c.vocab_size, C).with(INIT_ZERO).padded_to(padded_vocab).elementwise());
        if (c.optimizer != "muon")
            for (TensorSpec& t : specs) t.orthogonal = false;
    }

    // Pointers to every tensor inside a flat array, in the order of the list; null where the model has no such tensor.
    template <class T>
    Weights<T> point_into(T* flat, const ModelConfig& c) const {
        Weights<T> w;
        w.layer.resize(size_t(c.layers));
        size_t i = 0;
        w.embed = flat + specs[i++].offset;
        if (c.smear) w.smear.gate = flat + specs[i++].offset;
        if (c.smear) w.smear.scale = flat + specs[i++].offset;
        for (int64_t layer = 0; layer < c.layers; layer++) {
#define POINT(field, on_disk, form) \
    if (specs[i].name == name_in_layer(layer, on_disk)) w.layer[size_t(layer)].field = flat + specs[i++].offset;
#define PASS_OVER(on_disk, form) \
    if (specs[i].name == name_in_layer(layer, on_disk)) i++;
            LAYER_TENSORS(POINT, PASS_OVER)
#undef POINT
#undef PASS_OVER
        }
        w.norm = flat + specs[i++].offset;
        w.head = i < specs.size() ? flat + specs[i].offset : w.embed;
        return w;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Model: parameters, gradients and moments, which lie in an engine's memory. This code is the same for every engine.

template <class Dev>
struct Model {
    using real = typename Dev::real;
    using Grad = typename Dev::Grad;
    Dev& dev;
    ModelConfig config;
    TensorTable table;
    Partition partition;  // cuts the flat arrays into buckets, and each bucket into the ranks' parts
    int rank;
    bool sharded;                               // --zero 1 on several ranks
    std::vector<Piece> summed;                  // where this rank has the gradients' sums: everywhere, or in its parts
    std::vector<Piece> owned;                   // what it updates
    std::vector<std::vector<AdamWSpan>> spans;  // of each piece that it owns, for AdamW; none in matrices of Muon
    // Flat arrays of partition.elements: the tensors of the table, one more element, and padding. In grads that element
    // is the guard, a copy of the loss: summed over the ranks it is NaN for all where one has NaN. Inference has params
    // alone.
    real* params = nullptr;
    Grad* grads = nullptr;
    // m and master are indexed by Piece::m_at, v by Piece::v_at. Without a master copy, master points to params.
    typename Dev::Master* master = nullptr;
    typename Dev::Stat *m = nullptr, *v = nullptr;
    std::unique_ptr<Muon<Dev>> muon;       // --optimizer muon: what it updates has its momentum in m, and nothing in v
    enum { LOSSES, SQUARES, RESULTS };     // the running step's sum of losses, and its sum of squared gradients
    typename Dev::Sum* results = nullptr;  // [RESULTS]
    // The sum of squared gradients of each chunk, then a guard. [step % 2] belongs to the running step, the other one
    // to the step before.
    typename Dev::Sum* squares[2] = {};
    Weights<real> w;
    Weights<Grad> dw;
    Watchdog* watchdog = nullptr;
    int64_t step = 0;  // the running step, which the watchdog is told

    Model(Dev& device, const ModelConfig& c, bool training, int my_rank = 0, int ranks = 1)
        : dev(device),
          config(c),
          table(c),
          partition(table.total, ranks, c.bucket_mb, muon_matrices(table)),
          rank(my_rank),
          sharded(c.zero == 1 && ranks > 1) {
        allocate_zeros(params, partition.elements);
        w = table.point_into(params, c);
        if (!training) return;
        owned = partition.owned(rank, sharded);
        for (const Piece& p : owned) spans.push_back(spans_of(table.specs, p));
        summed = has_partial_sums() ? owned : std::vector<Piece>{{0, partition.elements, 0}};
        if constexpr (Dev::has_master) allocate_zeros(master, state_elements());
        else master = params;
        allocate_zeros(grads, partition.elements);
        allocate_zeros(m, state_elements());
        allocate_zeros(v, StateElements(owned).v);
        allocate_zeros(results, size_t(RESULTS));
        for (auto*& s : squares) allocate_zeros(s, chunks() + 1);
        dw = table.point_into(grads, c);
        if (c.optimizer == "muon") muon = std::make_unique<Muon<Dev>>(dev, owned);
    }
    ~Model() {
        if constexpr (Dev::has_master) dev.release(master);
        for (void* p : std::initializer_list<void*>{params, grads, m, v, results, squares[0], squares[1]})
            dev.release(p);
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    size_t state_elements() const { return sharded ? StateElements(owned).m : partition.elements; }
    // A part that cuts a matrix is of no use to Muon, so its ranks sum the gradients everywhere.
    bool has_partial_sums() const { return sharded && partition.matrices.empty(); }
    size_t chunks() const { return partition.elements / CHUNK; }
    typename Dev::Master* master_at(const Piece& p, size_t i) const {
        return Dev::has_master ? master + p.m_at + (i - p.begin) : master + i;
    }
    void note_phase(const char* phase) const {
        if (watchdog) watchdog->note_phase(step, phase);
    }
    ProfileRange enter(const char* phase, int64_t i = -1) const {
        note_phase(phase);
        return ProfileRange(phase, i);
    }

    // What the flat arrays take in training, in bytes, on the rank that has most.
    static double flat_bytes(const ModelConfig& c, int ranks) {
        const TensorTable t(c);
        const Partition p(t.total, ranks, c.bucket_mb, muon_matrices(t));
        return double(p.elements) * (sizeof(real) + sizeof(Grad)) + state_bytes<Dev>(p, c.zero == 1);
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
        const Progress progress("initialisation", 0, rank == 0);
        for (size_t index = 0; index < table.specs.size(); index++) {
            const TensorSpec& t = table.specs[index];
            std::vector<float> values(t.size);
#pragma omp parallel for schedule(static)
            for (size_t i = 0; i < t.size; i++)
                values[i] = initial_value(t, index, i, uint64_t(config.seed), config.layers, config.init);
            set_parameter(t, values.data());
        }
    }

  private:
    template <class T>
    void allocate_zeros(T*& p, size_t count) {
        p = dev.template allocate<T>(count);
        dev.zero(p, count);
    }
};

// Activations: what the forward pass leaves for the backward pass, and the backward pass's own temporaries, in one
// allocation.
//
// In inference the layers share all buffers but their keys and values, which are the caches of step-by-step decoding.
// The caches hold T tokens, the shared buffers only the `queries` positions that are computed at once. In training
// these are all T positions, and --recompute decides what each layer keeps:
//   0  everything, even what is `cheap` to compute again (the outputs of the norms, SiLU, the gated sum)
//   1  what is `costly` to compute again
//   2  only the layer's input, its gates and what it selected, which `training` always keeps
// All layers share one buffer for what they do not keep. The backward pass computes it again, to the same bits.
// The sizes use the variables of place_buffers(). `cached`: what is costly, or a cache of decoding; `heads`: the same,
// except that with --qk-norm a layer keeps its projection in their place.
//   BUFFER(type, field, elements, does each layer keep its own, or do all use the first one's?, name)
// The name gives the shape in training, where queries = T and N = B*queries. A layer of NSA has BRANCHES branches,
// indexed by Branch, and HEAD_SLOTS keys and values, indexed by HeadSlot; others have only those of the window. So each
// layer's own buffers are as large as its attention needs, and those that all share as large as any of them needs.
// projected is the input projection, and in the backward pass its gradient.
// clang-format off
#define LAYER_BUFFERS(BUFFER)                                                                                      \
    BUFFER(real,     kv,                kv_rows * 2 * D,    heads,            "keys and values (6, B, G, T, D)")   \
    BUFFER(real,     compressed,        cmp_rows * 2 * D,   cached,           "compressed (2, B, G, NC, D)")       \
    BUFFER(Stat,     gate,              gates,              training,         "gate (3, B, H, T)")                 \
    BUFFER(uint32_t, selection,         selections * words, training,         "selection (B, G, T, words)")        \
    BUFFER(Stat,     chosen_importance, selections,         training,         "chosen importance (B, G, T)")       \
    BUFFER(Stat,     attn_rstd,         N,                  costly,           "attn_rstd (N)")                     \
    BUFFER(real,     q,                 N * s.H * D,        costly && heads,  "q (B, H, T, D)")                    \
    BUFFER(real,     projected,         N * s.projected(),  !heads && costly, "projected (N, P)")                  \
    BUFFER(real,     phi_hidden,        2 * cmp_rows * s.F, costly,           "phi_hidden (2, B, G, NC, F)")       \
    BUFFER(real,     o,                 branch_rows * D,    costly,           "branch outputs (3, B, H, T, D)")    \
    BUFFER(Stat,     lse,               branch_rows,        costly,           "lse (3, B, H, T)")                  \
    BUFFER(real,     x_mid,             N * C,              costly,           "x_mid (N, C)")                      \
    BUFFER(Stat,     mlp_rstd,          N,                  costly,           "mlp_rstd (N)")                      \
    BUFFER(real,     fc1,               N * M,              costly,           "fc1 (N, M)")                        \
    BUFFER(real,     attn_normed,       N * C,              cheap,            "attn_normed (N, C)")                \
    BUFFER(real,     attn,              N * s.H * D,        cheap,            "attn (N, H*D)")                     \
    BUFFER(real,     mlp_normed,        N * C,              cheap,            "mlp_normed (N, C)")                 \
    BUFFER(real,     act,               N * M,              cheap,            "act (N, M)")

// The buffers that all layers share.
//   BUFFER(type, field, elements, does this mode need it?, name)
// x_out is the last residual stream, and normed its norm. The logits cover one chunk of rows, so that no N x V array
// ever exists.
#define SHARED_BUFFERS(BUFFER)                                                                                        \
    BUFFER(int32_t, tokens,      size_t(s.B) * s.T,       true,                        "tokens (B, T)")               \
    BUFFER(int32_t, targets,     N,                       true,                        "targets (N)")                 \
    BUFFER(Stat,    losses,      N,                       true,                        "losses (N)")                  \
    BUFFER(real,    x_out,       N * C,                   true,                        "x_out (N, C)")                \
    BUFFER(real,    normed,      N * C,                   true,                        "normed (N, C)")               \
    BUFFER(Stat,    rstd,        N,                       true,                        "rstd (N)")                    \
    BUFFER(real,    logits,      size_t(logit_rows * Vp), true,                        "logits (rows, Vp)")           \
    BUFFER(real,    dx,          N * C,                   training,                    "dx (N, C)")                   \
    BUFFER(real,    dnormed,     N * C,                   training,                    "dnormed (N, C)")              \
    BUFFER(real,    dattn,       N * s.H * D,             training,                    "dattn (N, H*D)")              \
    BUFFER(real,    dmlp,        N * M,                   training,                    "dmlp (N, M)")                 \
    BUFFER(Stat,    dq,          N * s.H * D,             training && dev.wants_dq(s), "dq (B, H, T, D)")             \
    BUFFER(real,    dkv,         kv_rows * 2 * D,         training,                    "dkv (6, B, G, T, D)")         \
    BUFFER(Stat,    dgate,       gates,                   training,                    "dgate (3, B, H, T)")          \
    BUFFER(real,    dcompressed, cmp_rows * 2 * D,        training,                    "dcompressed (2, B, G, NC, D)") \
    BUFFER(Stat,    row_dot,     branch_rows,             training,                    "row_dot (3, B, H, T)")        \
    BUFFER(Stat,    lse_gated,   branch_rows,             training,                    "lse_gated (3, B, H, T)")
// clang-format on

template <class Dev>
struct Activations {
    using real = typename Dev::real;
    using Stat = typename Dev::Stat;
#define FIELD(type, field, ...) type* field = nullptr;
    struct Layer {
        real* x = nullptr;  // (N, C) the residual stream that enters the layer
        LAYER_BUFFERS(FIELD)
    };
    SHARED_BUFFERS(FIELD)
#undef FIELD
    Dev& dev;
    NsaShape shape;
    int64_t C, M, V, Vp;
    int recompute;       // --recompute, but 0 in inference
    int64_t logit_rows;  // rows of a chunk of logits
    std::vector<Layer> layer;
    bool collect_statistics = false;
    Arena<Dev> arena;

    // At most `queries` positions are computed at once; 0 means all T. plan_only adds up sizes and allocates nothing.
    Activations(Dev& device, const ModelConfig& c, int64_t B, int64_t T, Mode mode, int64_t queries = 0,
                bool plan_only = false)
        : dev(device),
          shape(shape_of(c, B, T)),
          C(c.dim),
          M(c.mlp_hidden),
          V(c.vocab_size),
          Vp(TensorTable(c).padded_vocab),
          recompute(mode == TRAINING ? int(c.recompute) : 0),
          layer(size_t(c.layers)),
          arena(device) {
        if (queries) shape.queries = int(queries);
        logit_rows = rows_of_chunk(B * shape.queries);
        place(mode == TRAINING);
        if (plan_only) return;
        arena.allocate();
        place(mode == TRAINING);
    }

    static double bytes_needed(Dev& dev, const ModelConfig& c, int64_t B, int64_t T, Mode mode, int64_t queries = 0) {
        return Activations(dev, c, B, T, mode, queries, true).arena.wanted;
    }

    typename Dev::Heads heads(const Layer& acts, const NsaShape& s) const {
        return with_slots(typename Dev::Heads{acts.q, {}, acts.gate}, acts.kv, s);
    }
    LayerInputs<real, Stat> attention_inputs(const Layer& acts, const NsaShape& s) const {
        const auto h = heads(acts, s);
        real* const vc = acts.compressed + s.cmp_rows() * size_t(s.D);
        return {acts.q,
                {acts.compressed, h.kv[K_SLC], h.kv[K_WIN]},
                {vc, h.kv[V_SLC], h.kv[V_WIN]},
                acts.selection,
                dattn,   // dout
                acts.o,  // and what follows: the forward pass's
                s.window_only ? nullptr : acts.gate,
                acts.lse};
    }
    typename Dev::HeadGradients head_gradients(const NsaShape& s) const {
        return with_slots(typename Dev::HeadGradients{dq, {}, dgate}, dkv, s);
    }

    // Cuts the rows into equal chunks of at most 52 M logits (208 MiB of fp32), or 416 M (832 MiB of bf16) on a GPU,
    // and rounds these up to whole tiles of the GEMM. Each chunk reads the head twice and reads and writes its
    // gradient: 0.5 GB for GPT-2's vocabulary, while a micro-batch of 16 x 2048 has 3.3 GB of logits.
    int64_t rows_of_chunk(int64_t N) const {
        const int64_t most = std::max<int64_t>(1, (int64_t(Dev::on_host ? 52 : 416) << 20) / Vp);
        const int64_t chunks = (N + most - 1) / most;
        return std::min(N, ((N + chunks - 1) / chunks + 127) / 128 * 128);
    }

  private:
    template <class H>
    static H with_slots(H h, real* kv, const NsaShape& s) {
        for (int i = s.first_slot(); i < HEAD_SLOTS; i++) {
            h.kv[i] = kv;
            kv += s.key_rows() * size_t(s.D);
        }
        return h;
    }

    void place(bool training) {
        for (size_t i = 0; i < layer.size(); i++) {
            if (training || i < 2) arena.take(layer[i].x, "x (N, C)", size_t(shape.B) * shape.queries * C);
            else layer[i].x = layer[i - 2].x;  // in inference a layer reads one of two and writes the other
            place_buffers(shape.of_layer(i), training, &layer[i], true);
            if (i == 0) place_buffers(shape, training, &layer[0], false);
        }
        place_buffers(shape, training, nullptr, false);
    }

    // Those of a layer that are its own or, of the first one, that all use; without a layer, those of SHARED_BUFFERS.
    void place_buffers(const NsaShape& s, bool training, Layer* acts, bool own) {
        const size_t N = size_t(s.B) * s.queries, D = size_t(s.D), words = s.selection_words();
        const size_t kv_rows = s.branches() * s.key_rows(), cmp_rows = s.cmp_rows();
        const size_t branch_rows = s.branches() * N * s.H, gates = s.window_only ? 0 : branch_rows,
                     selections = s.window_only ? 0 : N * s.G;
        const bool costly = training && recompute < 2, cheap = training && recompute < 1, cached = costly || !training;
        // With --qk-norm the layers keep the projection, which the backward pass needs, and split it again.
        const bool heads = cached && !(training && s.qk_norm);
#define PLACE(type, field, elements, is_there, name) \
    if (!acts && (is_there)) arena.take(field, name, elements);
#define PLACE_IN_LAYER(type, field, elements, is_kept, name)               \
    if (acts && (is_kept) == own) arena.take(acts->field, name, elements); \
    else if (acts && own) acts->field = layer[0].field;
        LAYER_BUFFERS(PLACE_IN_LAYER)
        SHARED_BUFFERS(PLACE)
#undef PLACE
#undef PLACE_IN_LAYER
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward.

// Takes one layer from acts.x to x_next, for positions s.first .. s.first + s.queries - 1. With `again` it serves the
// backward pass under --recompute 2, which needs no x_next and has kept the selection.
template <class Dev>
void forward_layer(const Model<Dev>& model, Activations<Dev>& a, size_t i, const NsaShape& s, bool again = false) {
    Dev& dev = model.dev;
    auto& acts = a.layer[i];
    const auto& w = model.w.layer[i];
    const int N = s.B * s.queries, C = int(a.C), M = int(a.M);
    typename Dev::real* x_next = i + 1 < a.layer.size() ? a.layer[i + 1].x : a.x_out;
    const auto h = a.heads(acts, s);
    const auto in = a.attention_inputs(acts, s);
    const ProfileRange range = model.enter("forward", int64_t(i));
    dev.rmsnorm_forward(acts.attn_normed, acts.attn_rstd, acts.x, w.attn_norm, N, C);
    dev.matmul_forward(acts.projected, acts.attn_normed, w.in_proj, nullptr, N, C, s.projected());
    dev.split_heads_forward(h, acts.projected, w.head_gains, s);
    if (!s.window_only) {
        dev.compress_forward(acts.compressed, acts.phi_hidden, h.kv[K_CMP], h.kv[V_CMP], w.phis(), s);
        dev.attend_and_select(acts.o, acts.lse, again ? nullptr : acts.selection,
                              a.collect_statistics ? acts.chosen_importance : nullptr, in.q, in.k[CMP], in.v[CMP], s);
    }
    dev.attend_and_combine({acts.attn, acts.o, acts.lse}, in, s);
    dev.matmul_forward(acts.x_mid, acts.attn, w.o_proj, acts.x, N, s.H * s.D, C);  // x += o_proj(attention)

    dev.rmsnorm_forward(acts.mlp_normed, acts.mlp_rstd, acts.x_mid, w.mlp_norm, N, C);
    dev.matmul_forward(acts.fc1, acts.mlp_normed, w.mlp_fc1, nullptr, N, C, M);
    dev.silu_forward(acts.act, acts.fc1, size_t(N) * M);
    if (!again) dev.matmul_forward(x_next, acts.act, w.mlp_fc2, acts.x_mid, N, M, C);  // x += fc2(silu(fc1))
}

// Runs all layers for positions first .. first+queries-1 of B sequences, whose tokens [B, queries] are at a.tokens +
// first, and leaves the normed residual stream of these positions in a.normed. Training and evaluation take all T at
// once. Decoding, of one sequence, takes a prompt, then one position at a time, and finds the earlier tokens, keys and
// values in place. Calls done(i) after layer i, because later layers may write over its buffers.
template <class Dev>
void forward(
    const Model<Dev>& model, Activations<Dev>& a, int first, int queries,
    const std::function<void(size_t)>& done = [](size_t) {}) {
    Dev& dev = model.dev;
    NsaShape s = a.shape;
    s.first = first;
    s.queries = queries;
    const int N = s.B * queries, C = int(a.C);
    dev.embedding_forward(a.layer[0].x, a.tokens + first, model.w.embed, N, C);
    if (model.config.smear) dev.smear_forward(a.layer[0].x, a.tokens + first, model.w.embed, model.w.smear, s, C);
    for (size_t i = 0; i < a.layer.size(); i++) {
        forward_layer(model, a, i, s.of_layer(i));
        done(i);
    }
    dev.rmsnorm_forward(a.normed, a.rstd, a.x_out, model.w.norm, N, C);
}

// The same for tokens on the host.
template <class Dev>
void forward(
    const Model<Dev>& model, Activations<Dev>& a, const int32_t* tokens, int first, int queries,
    const std::function<void(size_t)>& done = [](size_t) {}) {
    model.dev.upload(a.tokens + first, tokens, size_t(a.shape.B) * size_t(queries));
    forward(model, a, first, queries, done);
}

// After a forward pass over all T, computes the cross-entropy of the head against a.targets, and leaves it in a.losses
// [N]. It takes a chunk of rows at a time, so that the logits never exist as a whole. With want_gradient it sets
// a.dnormed and adds to the head's gradient, where each loss weighs dloss. logits_out gets [N, V].
template <class Dev>
void classify_rows(Model<Dev>& model, Activations<Dev>& a, double dloss, bool want_gradient,
                   std::vector<float>* logits_out = nullptr) {
    Dev& dev = model.dev;
    const int64_t N = int64_t(a.shape.B) * a.shape.T, C = a.C;
    if (logits_out) logits_out->resize(size_t(N * a.V));
    for (int64_t row = 0; row < N; row += a.logit_rows) {
        const int rows = int(std::min(a.logit_rows, N - row));
        const ProfileRange range = model.enter("classifier");
        dev.matmul_forward(a.logits, a.normed + row * C, model.w.head, nullptr, rows, int(C), int(a.Vp));
        if (logits_out)
            for (int r = 0; r < rows; r++)
                dev.to_host(logits_out->data() + (row + r) * a.V, a.logits + r * a.Vp, size_t(a.V));
        dev.classifier(a.losses + row, a.logits, a.targets + row, dloss, want_gradient, rows, int(a.V), int(a.Vp));
        if (!want_gradient) continue;
        dev.matmul_backward_input(a.dnormed + row * C, a.logits, model.w.head, rows, int(C), int(a.Vp));
        dev.matmul_backward_weight(model.dw.head, a.logits, a.normed + row * C, rows, int(C), int(a.Vp));
    }
}

// The same for targets on the host. Waits for the losses and returns their sum.
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

// The blocks that the layers selected in the last forward pass, as bits.
template <class Dev>
std::vector<uint32_t> selections_of(const Activations<Dev>& a) {
    const NsaShape& s = a.shape;
    const size_t words = size_t(s.B) * s.G * s.T * s.selection_words();
    std::vector<uint32_t> all;
    for (size_t i = 0; i < a.layer.size(); i++)
        if (s.kind_of_layer(i) == NSA_LAYER)
            all.resize(all.size() + words), a.dev.copy(&all[all.size() - words], a.layer[i].selection, words);
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward. Every step repeats, in a comment, the forward line that it differentiates.

// Computes again what the layer did not keep, by the forward pass's own operations.
template <class Dev>
void recompute_layer(Model<Dev>& model, Activations<Dev>& a, size_t i) {
    Dev& dev = model.dev;
    auto& acts = a.layer[i];
    const auto& w = model.w.layer[i];
    const NsaShape s = a.shape.of_layer(i);
    const int N = s.B * s.T, C = int(a.C);
    if (a.recompute == 2) return forward_layer(model, a, i, s, true);
    if (s.qk_norm) dev.split_heads_forward(a.heads(acts, s), acts.projected, w.head_gains, s);
    if (a.recompute == 0) return;
    dev.rmsnorm_forward(acts.attn_normed, acts.attn_rstd, acts.x, w.attn_norm, N, C);
    dev.combine_forward(acts.attn, acts.o, acts.gate, s);
    dev.rmsnorm_forward(acts.mlp_normed, acts.mlp_rstd, acts.x_mid, w.mlp_norm, N, C);
    dev.silu_forward(acts.act, acts.fc1, size_t(N) * a.M);
}

// From a.dattn to the gradients of q, the keys, the values and the gate.
template <class Dev>
void backward_branches(Model<Dev>& model, Activations<Dev>& a, size_t i) {
    Dev& dev = model.dev;
    const NsaShape s = a.shape.of_layer(i);
    auto& acts = a.layer[i];
    const auto& w = model.w.layer[i];
    const auto& dw = model.dw.layer[i];
    const auto h = a.heads(acts, s);
    const auto d = a.head_gradients(s);
    const size_t keys = s.cmp_rows() * s.D;

    // attn = sum of gate * branch, branch = softmax(q k^T / sqrt(D)) v
    dev.branches_backward({acts.projected,  // dprojected
                           d.q,
                           {a.dcompressed, d.kv[K_SLC], d.kv[K_WIN]},         // dk
                           {a.dcompressed + keys, d.kv[V_SLC], d.kv[V_WIN]},  // dv
                           a.dgate,
                           a.row_dot,
                           a.lse_gated},
                          a.attention_inputs(acts, s), s);
    if (s.window_only) return;
    // compressed = phi(blocks of k_cmp), phi(blocks of v_cmp)
    dev.compress_backward(d.kv[K_CMP], d.kv[V_CMP], dw.phis(), a.dcompressed, acts.phi_hidden, h.kv[K_CMP], h.kv[V_CMP],
                          w.phis(), s);
}

// Turns a.dx from the gradient of x_next into that of acts.x.
template <class Dev>
void backward_layer(Model<Dev>& model, Activations<Dev>& a, size_t i) {
    Dev& dev = model.dev;
    const NsaShape s = a.shape.of_layer(i);
    auto& acts = a.layer[i];
    const auto& w = model.w.layer[i];
    const auto& dw = model.dw.layer[i];
    const int N = s.B * s.T, C = int(a.C), M = int(a.M), HD = s.H * s.D, P = s.projected();

    recompute_layer(model, a, i);
    // x_next = x_mid + fc2(act); along the residual stream, a.dx is the gradient of x_mid as well
    dev.matmul_backward_weight(dw.mlp_fc2, a.dx, acts.act, N, M, C);
    dev.matmul_backward_input(a.dmlp, a.dx, w.mlp_fc2, N, M, C);
    // act = silu(fc1)
    dev.silu_backward(a.dmlp, a.dmlp, acts.fc1, size_t(N) * M);
    // fc1 = mlp_normed mlp_fc1^T
    dev.matmul_backward_weight(dw.mlp_fc1, a.dmlp, acts.mlp_normed, N, C, M);
    dev.matmul_backward_input(a.dnormed, a.dmlp, w.mlp_fc1, N, C, M);
    // mlp_normed = rmsnorm(x_mid)
    dev.rmsnorm_backward(a.dx, dw.mlp_norm, a.dnormed, acts.x_mid, acts.mlp_rstd, w.mlp_norm, N, C);

    // x_mid = x + o_proj(attn)
    dev.matmul_backward_weight(dw.o_proj, a.dx, acts.attn, N, HD, C);
    dev.matmul_backward_input(a.dattn, a.dx, w.o_proj, N, HD, C);
    backward_branches(model, a, i);
    // heads = split(attn_normed [q; k; v; gate]^T); projected becomes its own gradient
    dev.split_heads_backward(acts.projected, dw.head_gains, a.head_gradients(s), w.head_gains, s);
    dev.matmul_backward_weight(dw.in_proj, acts.projected, acts.attn_normed, N, C, P);
    dev.matmul_backward_input(a.dnormed, acts.projected, w.in_proj, N, C, P);
    // attn_normed = rmsnorm(x)
    dev.rmsnorm_backward(a.dx, dw.attn_norm, a.dnormed, acts.x, acts.attn_rstd, w.attn_norm, N, C);
}

// Starts from a.dnormed and adds to the model's gradients all but what the head adds. Calls ready(offset), if there is
// one, when all gradients from that offset of the flat array to its end are final.
template <class Dev>
void backward(Model<Dev>& model, Activations<Dev>& a, const std::function<void(size_t)>& ready = nullptr) {
    Dev& dev = model.dev;
    const int N = a.shape.B * a.shape.T, C = int(a.C);
    dev.zero(a.dx, size_t(N) * C);
    // an untied head is the last tensor, and all that is added to it has been
    if (ready && model.dw.head != model.dw.embed) ready(size_t(model.dw.head - model.dw.embed));
    // normed = rmsnorm(x_out)
    dev.rmsnorm_backward(a.dx, model.dw.norm, a.dnormed, a.x_out, a.rstd, model.w.norm, N, C);
    for (size_t i = a.layer.size(); i-- > 0;) {
        const ProfileRange range = model.enter("backward", int64_t(i));
        backward_layer(model, a, i);
        // attn_norm is the layer's first tensor, so all that follows it in the array is final
        if (ready) ready(size_t(model.dw.layer[i].attn_norm - model.dw.embed));
    }
    // x = e + gate * scale o (e of the token before)
    if (model.config.smear)
        dev.smear_backward(a.dnormed, model.dw.smear, a.dx, a.tokens, model.w.embed, model.w.smear, a.shape, C);
    // e = embed[token]
    dev.embedding_backward(model.dw.embed, model.config.smear ? a.dnormed : a.dx, a.tokens, N, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// Update.

// Leaves the squared global L2 norm of the summed gradients in model.results[SQUARES], without waiting for it. It is
// NaN if the loss of any rank is not finite. Its bits depend only on the gradients, not on which rank owns which part.
template <class Dev>
void gradient_norm(Model<Dev>& model, int64_t step, Reducer<Dev>* reducer = nullptr) {
    const ProfileRange range("gradient norm");
    auto* squares = model.squares[step % 2];
    auto* guard = model.grads + model.table.total;
    if (model.has_partial_sums()) model.dev.zero(squares, model.chunks());
    for (const Piece& p : model.summed)
        model.dev.chunk_squares(squares, model.grads, model.table.total, p.begin, p.count);
    // A rank has only its parts of the sums, and only one rank the guard: so each rank's loss travels with the squares.
    if (model.has_partial_sums() && reducer) {
        model.dev.set_guard(squares + model.chunks(), model.results);
        reducer->complete(squares, model.chunks() + 1);
        model.dev.set_guard(guard, squares + model.chunks());
    }
    model.dev.total_squares(model.results + model.SQUARES, squares, model.chunks(), guard);
}

// One step of AdamW, and of Muon for the matrices that it updates, on the summed gradients, clipped to the norm that
// gradient_norm() found. If that is not finite, the weights stay as they are.
template <class Dev>
void apply_update(Model<Dev>& model, int64_t step, double lr, Reducer<Dev>* reducer = nullptr) {
    const ProfileRange range("update");
    const ModelConfig& c = model.config;
    HyperAdamWOf<typename Dev::Sum> h;
    h.lr = lr;
    h.decay = c.weight_decay;
    h.step = step;
    h.seed = uint64_t(c.seed);
    h.squares = model.results + model.SQUARES;
    h.grad_clip = c.grad_clip;
    for (size_t i = 0; i < model.owned.size(); i++) {
        const Piece& p = model.owned[i];
        h.offset = p.begin;
        model.dev.adamw(model.params + p.begin, model.master_at(p, p.begin), model.m + p.m_at, model.v + p.v_at,
                        model.grads + p.begin, model.spans[i], h);
    }
    if (model.muon) model.muon->update(model.params, model.master, model.m, model.grads, h);
    if (model.sharded && reducer) reducer->gather(model.params);
}

template <class Dev>
void update(Model<Dev>& model, int64_t step, double lr, Reducer<Dev>* reducer = nullptr) {
    gradient_norm(model, step, reducer);
    apply_update(model, step, lr, reducer);
}

// ---------------------------------------------------------------------------------------------------------------------
// Evaluate.

// Returns the losses of the first `samples` samples, which the ranks share. These are the same samples for any number
// of ranks and any micro-batch; rows of the last micro-batch that lie beyond them do not count. All ranks call
// asked_to_stop() together after every micro-batch; if it says yes before the end, the result is empty.
template <class Dev>
std::vector<EvalSums> evaluate(
    Model<Dev>& model, Activations<Dev>& a, DataLoader& loader, int64_t samples, const World& world,
    const Tokenizer* tokenizer, const std::function<bool()>& asked_to_stop = [] { return false; }) {
    const int B = a.shape.B, T = a.shape.T;
    std::vector<int32_t> inputs(size_t(B) * T), targets(size_t(B) * T);
    std::vector<uint8_t> answer(size_t(B) * T);
    std::vector<typename Dev::Stat> losses(size_t(B) * T);
    loader.rewind();
    std::vector<EvalSums> of_sample(static_cast<size_t>(samples));
    Progress progress("evaluation", double(samples), world.rank == 0);
    for (int64_t first = 0; first < samples; first += int64_t(B) * world.size) {
        progress.done = double(first);
        model.note_phase("data");
        read_samples(loader, world, inputs, targets, B, answer.data());
        forward(model, a, inputs.data(), 0, T);
        model.dev.upload(a.targets, targets.data(), targets.size());
        classify_rows(model, a, 0, false);
        model.dev.copy(losses.data(), a.losses, losses.size());
        for (int64_t b = 0; b < B && first + world.rank + b * world.size < samples; b++) {
            EvalSums& sums = of_sample[size_t(first + world.rank + b * world.size)];
            for (size_t j = size_t(b) * T; j < size_t(b + 1) * T; j++)
                sums.add(losses[j], answer[j], tokenizer ? tokenizer->token_bytes(uint16_t(targets[j])) : 0);
        }
        if (asked_to_stop()) return {};
    }
    model.note_phase("waiting for the other ranks");
    std::vector<double> numbers;
    for (EvalSums& sums : of_sample) sums.visit([&](double number) { numbers.push_back(number); });
    world.sum(numbers.data(), numbers.size());
    auto total = numbers.begin();
    for (EvalSums& sums : of_sample) sums.visit([&](double& number) { number = *total++; });
    return of_sample;
}

// The same for multiple choice, where each context with one of its endings is a sample.
template <class Dev>
std::vector<EvalSums> evaluate_choices(
    Model<Dev>& model, const ChoiceTask& task, const World& world,
    const std::function<bool()>& asked_to_stop = [] { return false; }) {
    ModelConfig c = model.config;
    c.seq_len = int64_t(task.longest());
    c.batch = std::max<int64_t>(1, c.batch * model.config.seq_len / c.seq_len);
    const double available = world.lowest(model.dev.available_bytes(world.device_sharers));  // beside a run's own
    while (c.batch > 1 && Activations<Dev>::bytes_needed(model.dev, c, c.batch, c.seq_len, INFERENCE) > available)
        c.batch /= 2;
    DataLoader loader({choice_source(task, c.seq_len)}, loader_options(c, world, "--hellaswag", false));
    Activations<Dev> a(model.dev, c, c.batch, c.seq_len, INFERENCE);
    return evaluate(model, a, loader, int64_t(task.rows.size()), world, nullptr, asked_to_stop);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sample.

// Writes a text, token by token. The keys and values of what it has read stay in the caches.
template <class Dev>
struct Decoder {
    Model<Dev>& model;
    Activations<Dev> a;
    int position = 0;  // where the next token that it reads will stand

    // The first call of next() reads up to `prompted` tokens, all calls together up to `length`; an error without
    // memory.
    Decoder(Model<Dev>& m, int64_t prompted, int64_t length)
        : model(m), a(with_memory_for(m, prompted, length), m.config, 1, length, INFERENCE, prompted) {}

    // Reads the tokens and returns the one that follows. A prompt takes one forward pass, and each later token a pass
    // over a single position. The random numbers depend only on the seed and the position.
    int32_t next(const std::vector<int32_t>& tokens, const SampleConfig& c) {
        const size_t pass = position == 0 ? tokens.size() : 1;
        const bool is_prompt = tokens.size() > 1;
        Progress progress(format_text("prompt of %d tokens", tokens.size()), double(a.layer.size()), is_prompt);
        std::unique_ptr<DecodingThreads> threads;
        if (position > 0) threads = std::make_unique<DecodingThreads>(model.table.total);  // a prompt uses all threads
        for (size_t at = 0; at < tokens.size(); at += pass) {
            forward(model, a, tokens.data() + at, position, int(pass),
                    [&](size_t i) { progress.done = double(i + 1); });
            position += int(pass);
        }
        const auto* last = a.normed + (pass - 1) * size_t(a.C);
        model.dev.matmul_forward(a.logits, last, model.w.head, nullptr, 1, int(a.C), int(a.Vp));
        std::vector<float> logits(static_cast<size_t>(a.V));
        model.dev.to_host(logits.data(), a.logits, logits.size());
        require_finite(logits, position);
        const double uniform =
            random_uniform(uint64_t(model.config.seed), random_stream(RANDOM_SAMPLE), uint64_t(position));
        return choose_token(logits, c.temperature, c.top_k, c.top_p, uniform);
    }

  private:
    static Dev& with_memory_for(Model<Dev>& m, int64_t prompted, int64_t length) {
        const double needed = Activations<Dev>::bytes_needed(m.dev, m.config, 1, length, INFERENCE, prompted);
        const bool is_text = length == prompted;
        require_memory_for(
            needed, m.dev.available_bytes(),
            is_text ? "a text of " + counted(length, "token")
                    : format_text("a sample of %s after a prompt of %d", counted(length - prompted, "token"), prompted),
            is_text ? "give a shorter one" : "ask for fewer tokens");
        return m.dev;
    }
};

// Continues a prompt of at least one token by `count` tokens, or until emit(token) returns false, and calls end().
template <class Dev>
void generate(
    Model<Dev>& model, const std::vector<int32_t>& prompt, int64_t count, const SampleConfig& c,
    const std::function<bool(int32_t)>& emit, const std::function<void()>& end = [] {}) {
    Decoder<Dev> decoder(model, int64_t(prompt.size()), int64_t(prompt.size()) + count);
    std::vector<int32_t> next = prompt;
    for (int64_t i = 0; i < count; i++) {
        next.assign(1, decoder.next(next, c));
        if (!emit(next[0])) break;
    }
    end();
}

// ---------------------------------------------------------------------------------------------------------------------
// The engine in use, and the verbs that need the model beside the training.

static GpuSearch search_gpus() { return DeviceEngine::search(); }

// Calls use(engine, machine) with the engine for this device.
template <class Accelerator = DeviceEngine, class Use>
void with_engine(const Device& device, World& world, Use use) {
    const auto use_on = [&](auto& dev, const GradientPath& path) {
        Machine machine = {world, device};
        machine.build = this_build(device.engine);
        machine.engine = dev.describe();
        machine.peak_flops = dev.peak_flops();
        machine.libraries = DeviceEngine::versions();
        machine.path = path;
        use(dev, machine);
    };
    if constexpr (!std::is_same<Accelerator, NoEngine>::value)
        if (device.gpu) {
            world.compute_on(format_text("%s %d", device.engine.device, device.gpu_number));
            Accelerator dev(device.gpu_number);
            dev.choose_attention(device.attention_kernel);
            const auto path = choose_path(world, device.engine, world.device + " (" + dev.name() + ")", dev.bus());
            if (world.device_sharers > 1) dev.divide_memory(world.device_sharers);
            world.barrier();  // now the others may allocate
            return use_on(dev, path);
        }
    world.compute_on("CPU");
    Cpu<float> dev;
    dev.gemm.bf16 = device.cpu_bf16;
    use_on(dev, choose_path(world, device.engine, "", ""));
}

#include "lib/verbs/check.h"
#include "lib/verbs/eval.h"
#include "lib/verbs/export.h"
#include "lib/verbs/inspect.h"
#include "lib/verbs/sample.h"
#include "lib/verbs/texts.h"
#include "lib/verbs/train.h"

// ---------------------------------------------------------------------------------------------------------------------
// Steps.

// Adds the losses of one micro-batch to model.results and its gradients to model.dw. inputs and targets are [B, T].
// After the last micro-step of an optimiser step, the sum of its losses is complete. ready: see backward().
template <class Dev>
void micro_step(Model<Dev>& model, Activations<Dev>& a, const int32_t* inputs, const int32_t* targets, bool last,
                const std::function<void(size_t)>& ready = nullptr) {
    Dev& dev = model.dev;
    const size_t tokens = size_t(a.shape.B) * size_t(a.shape.T);
    forward(model, a, inputs, 0, a.shape.T);
    dev.upload(a.targets, targets, tokens);
    classify_rows(model, a, 1 / double(model.config.total_batch), true);  // the mean over all micro-batches
    dev.add_sum(model.results, a.losses, tokens);
    if (last) dev.set_guard(model.grads + model.table.total, model.results);
    backward(model, a, ready);
}

// Accumulates the gradients of an optimiser step over its micro-steps and sums them over the ranks. The sum begins
// while the last micro-step's backward pass still runs. model.results gets this rank's sum of losses, and `tokens` the
// step's inputs [samples, T]. If data cannot be read, it fails before anything has changed.
template <class Dev>
void accumulate_gradients(Model<Dev>& model, Activations<Dev>& a, DataLoader& loader, const World& world,
                          bool collect_statistics, Reducer<Dev>* reducer = nullptr,
                          std::vector<int32_t>* tokens = nullptr) {
    const ModelConfig& c = model.config;
    const int B = a.shape.B;
    const int64_t micro_steps = c.total_batch / (c.seq_len * B * world.size);
    const size_t micro_tokens = size_t(B) * a.shape.T;
    std::vector<int32_t> inputs(size_t(micro_steps) * micro_tokens), targets(inputs.size());
    model.note_phase("data");
    read_samples(loader, world, inputs, targets, int(micro_steps) * B);
    Progress progress(format_text("step %d", model.step), double(micro_steps), world.rank == 0);
    model.dev.zero(model.results, model.RESULTS);
    model.dev.zero(model.grads, model.partition.elements);
    const std::function<void(size_t)> ready = [&](size_t offset) { reducer->ready(offset); };
    for (int64_t i = 0; i < micro_steps; i++) {
        const bool last = i + 1 == micro_steps;
        const size_t at = size_t(i) * micro_tokens;
        a.collect_statistics = collect_statistics && last;
        progress.done = double(i);
        if (reducer) reducer->await_upload(model.step);
        micro_step(model, a, inputs.data() + at, targets.data() + at, last, last && reducer ? ready : nullptr);
    }
    a.collect_statistics = false;
    if (tokens) *tokens = std::move(inputs);
    if (!reducer) return;
    model.note_phase("waiting for the other ranks");
    reducer->finish();
    model.note_phase("update");
}

// ---------------------------------------------------------------------------------------------------------------------
// The run. On a GPU the host stays one step ahead (Dev::steps_ahead), and waits for the GPU only to read statistics:
//   launch_step()   gives the GPU step n+1; what is known of it goes to the back of `pending`, and its results are sent
//   finish_step()   takes step n from the front of `pending`, waits for its results and prints it
// Both steps need their squares of gradients, so the model has two arrays of these, for odd and for even steps.

template <class Dev>
struct Run {
    Dev& dev;
    World& world;
    const TrainConfig config;
    std::unique_ptr<Tokenizer> tokenizer;  // null if GPT-2's vocabulary has not been found
    TrainingData data;
    Model<Dev> model;
    std::unique_ptr<Reducer<Dev>> reducer;  // null on one rank
    std::unique_ptr<Activations<Dev>> activations;
    TrainState state;
    RunPrinter printer;
    CheckpointSaver saver;
    std::vector<StepResult> pending;  // the engine has them, and they are not yet printed
    Stop stop = GO_ON;
    // Reading them makes the host wait for the GPU.
    static constexpr int64_t steps_between_statistics = Dev::on_host ? 1 : 50;
    static constexpr int64_t max_bad_steps = 3;  // in a row

    Run(Dev& device, const TrainConfig& c, World& w, std::unique_ptr<Tokenizer> vocabulary, const std::string& manifest)
        : dev(device),
          world(w),
          config(c),
          tokenizer(std::move(vocabulary)),
          data(open_training_data(c, w, tokenizer.get())),
          model(dev, c, true, w.rank, w.size),
          printer(c.steps, c.total_batch, c.log_every, data.train->samples_per_epoch()),
          saver(w, {c.out, c.keep, c.keep_every, [this] { printer.log->sync(); },
                    [this, manifest] { return state_json(state, manifest, world.size, data.train->files()); },
                    [this] { return take_snapshot(model, world); }}) {}

    bool is_first() const { return world.rank == 0; }

    // ----- what a run does between steps

    // Says whether any rank has been asked to stop. All ranks call it together.
    bool asked_to_stop() {
        if (world.size == 1 && stop_signal == 0) return stop != GO_ON;
        double asked[2] = {double(asked_to_interrupt()), double(asked_to_terminate())};
        world.sum(asked, 2);
        if (stop == GO_ON) stop = stop_of(asked[0] > 0, asked[1] > 0, false);
        return stop != GO_ON;
    }

    // Measures the loss, prints it and notes it. A signal ends it without a result; the resume begins it again.
    void validate() {
        const ProfileRange range = model.enter("evaluation");
        const auto asked = [this] { return asked_to_stop(); };
        state.validation_interrupted = true;
        std::vector<EvalSums> choices;
        if (!config.hellaswag.empty()) {
            choices = evaluate_choices(model, data.choices, world, asked);
            if (choices.empty()) return;
        }
        const int64_t wanted = config.eval_batches * (config.total_batch / config.seq_len);
        std::vector<EvalResult> results;
        for (const auto& set : data.val) {
            const int64_t samples = std::min(wanted, set.samples());
            const auto losses = evaluate(model, *activations, *set.loader, samples, world, tokenizer.get(), asked);
            if (losses.empty()) return;
            results.emplace_back(losses);
        }
        state.validation_interrupted = false;
        if (!choices.empty()) printer.print_choices(state.step, data.choices.result(choices));
        for (size_t i = 0; i < results.size(); i++) {
            const EvalResult& r = results[i];
            if (i == 0) {
                const unsigned long long corpus = data.val[0].loader->state().corpus, tokens = r.tokens;
                state.validation = {state.step, r.loss, format_text("%016x, %d tokens", corpus, tokens)};
            }
            printer.print_validation(state.step, data.val[i].name, i == 0, r);
        }
    }

    void sample() {
        const TrainConfig& c = config;
        if (!is_first() || c.sample_tokens == 0) return;
        if (!tokenizer) return print("no sample: --vocab-dir is needed to turn gpt2 tokens into text\n");
        print("--- sample at step %d, %s ---\n", state.step, counted(c.sample_tokens, "token"));
        const auto write = [&] { return print_sample(model, *tokenizer, c, c.sample_tokens, true, c.prompt); };
        const std::string error = error_of([&] { printer.log_sample(state.step, write()); });
        if (!error.empty()) complain("no sample: " + error);
        print("---\n");
    }

    void save() {
        const ProfileRange range("checkpoint", state.step);
        if (!state.bad_steps) return saver.save(state.step);
        if (is_first())  // because of --keep it could push out a good one
            complain("no checkpoint at step %d: loss or gradient is not finite", state.step);
    }

    void save_last() {
        const ProfileRange range("checkpoint", state.step);
        saver.save_last(state.step);
    }

    // ----- one step

    // Gives the engine a step to do: the gradients, their norm, and the update.
    void launch_step() {
        StepResult s;
        s.step = model.step = state.step + 1;
        s.lr = learning_rate(config, s.step);
        const bool statistics = is_first() && s.step % steps_between_statistics == 0;
        accumulate_gradients(model, *activations, *data.train, world, statistics, reducer.get(), &s.tokens);
        gradient_norm(model, s.step, reducer.get());
        dev.send(model.results, model.RESULTS);
        apply_update(model, s.step, s.lr, reducer.get());
        if (statistics && reducer) reducer->await_all(s.step);
        if (statistics) s.layers = summarise_layers(*activations);
        state.step = s.step;
        s.all_tokens = state.tokens += uint64_t(config.total_batch);
        state.loader = data.train->state();
        s.samples = data.train->state().next_sample;
        pending.push_back(std::move(s));
    }

    // Waits for a step's results and sums them over the ranks, and with them the ranks' wishes to stop.
    void exchange(StepResult& s) {
        enum { LOSS, TERMINATE, INTERRUPT, HALT, COUNT };
        model.note_phase(Dev::on_host ? "update" : "waiting for the GPU");
        if (reducer) reducer->await_results(model.step);
        const std::vector<double> results = dev.receive();
        s.own_loss = results[model.LOSSES];
        const bool halt = is_first() && access((config.out + "/halt").c_str(), F_OK) == 0;
        double sums[COUNT] = {s.own_loss, double(asked_to_terminate()), double(asked_to_interrupt()), double(halt)};
        model.note_phase("waiting for the other ranks");
        world.sum(sums, COUNT);
        model.note_phase("report");
        s.loss = sums[LOSS] / double(config.total_batch);
        s.norm = std::sqrt(results[model.SQUARES]);
        if (world.size == 1) stop_without_reader();
        if (stop == GO_ON) stop = stop_of(sums[INTERRUPT] > 0, sums[TERMINATE] > 0, sums[HALT] > 0);
    }

    void finish_step() {
        StepResult s = std::move(pending.front());
        pending.erase(pending.begin());
        exchange(s);
        const double seconds = printer.lap();
        world.watchdog.step_done(s.step, seconds, s.loss);
        if (is_first()) printer.print_step(s, seconds, double(dev.peak_bytes) / (1 << 20), stop != GO_ON);
        if (s.is_bad()) return count_bad_step(s);
        state.bad_steps = 0;
        state.last_update = s.step;
    }

    // The step was not finite and changed no weight. Each rank writes its batch to a file; too many in a row are fatal.
    void count_bad_step(const StepResult& s) {
        state.bad_steps++;
        std::vector<typename Dev::Sum> squares(model.chunks());
        dev.copy(squares.data(), model.squares[s.step % 2], squares.size());
        const std::string tensor = first_bad_tensor(model.table.specs, squares, CHUNK);
        const std::string file = write_bad_step(config.out, s, world.rank, tensor, size_t(config.seq_len));
        const std::string text = bad_step_text(s, world.gather(std::isfinite(s.own_loss) ? "yes" : ""), tensor, file);
        if (state.bad_steps < max_bad_steps) return is_first() ? complain(text) : void();
        saver.remove_old = false;  // the weights may have been bad before the loss was
        throw SharedError(
            format_text("%s; that was bad step %d in a row; lower --lr or look at the data", text, state.bad_steps));
    }

    // If all ranks fail between two steps, what they have learnt must not be lost. Returns what the error says of it.
    std::string save_despite_error() {
        while (!pending.empty()) error_of([&] { finish_step(); });  // to learn which of them changed the weights
        if (state.last_update > saver.last_saved_step()) save_last();
        if (!is_first()) world.barrier();  // rank 0 ends the program on all ranks
        return saver.describe_last();
    }

    // ----- the training loop

    void train() {
        const TrainConfig& c = config;
        while (state.step < c.steps && stop == GO_ON) {
            launch_step();
            const bool last = state.step == c.steps;
            auto due = [&](int64_t every) { return last || (every && state.step % every == 0); };
            const bool pause = due(c.eval_every) || due(c.save_every) || due(c.sample_every);
            while (pending.size() > (pause || stop != GO_ON ? 0u : Dev::steps_ahead)) finish_step();
            if (due(c.eval_every)) validate();
            if (last || stop != GO_ON) continue;
            if (due(c.save_every)) save();
            if (due(c.sample_every)) sample();
            if (pause && asked_to_stop()) continue;
            if (pause) printer.last_lap = seconds_now();  // the next step is not charged for the pause
        }
        while (!pending.empty()) finish_step();
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// How a run begins and ends.

// Does all that comes before the first step.
template <class Dev>
void begin_run(Run<Dev>& run, const Config& c, const Machine& machine, bool memory_is_tight) {
    const World& world = run.world;
    Model<Dev>& model = run.model;
    const RunStart start = open_run(c, machine, model.table, model.partition, run.data);
    model.watchdog = &world.watchdog;
    model.note_phase("start");
    run.reducer = make_reducer(run.dev, world, model.partition, model.grads,
                               {model.has_partial_sums(), c.grad_reduce == "bf16"}, machine.path.by_nccl);
    run.activations = std::make_unique<Activations<Dev>>(run.dev, c, c.batch, c.seq_len, TRAINING);
    if (run.is_first()) {
        print_memory(Model<Dev>::flat_bytes(c, world.size) / (1 << 20), run.activations->arena, memory_is_tight);
        print_selected(run.dev.describe_selected(run.activations->shape));
    }
    run.saver.last_saved = start.checkpoint.folder;
    if (!start.checkpoint.folder.empty()) {
        run.state = load_checkpoint(model, start.checkpoint);
    } else if (start.weights) read_parameters(model, *start.weights);
    else model.initialise();
    if (!run.is_first() || !c.dump_state.empty()) return;
    keep_vocabulary(run.tokenizer.get(), c.out);
    begin_log(run.printer, c, machine, model.table, start.checkpoint, run.state);
}

// Prints, on rank 0, what there is to say at the end of a run. Some ends are errors.
template <class Dev>
void print_end(Run<Dev>& run) {
    run.printer.print_done(run.state.step, double(run.dev.peak_bytes) * 0x1p-20, DeviceEngine::info().device);
    if (run.reducer) {
        run.reducer->read_clocks();
        run.printer.print_reductions(run.reducer->times);
    }
    print_selected(run.dev.describe_selected(run.activations->shape));
    run.printer.print_end(run.stop, run.state, run.config, run.saver, run.tokenizer != nullptr);
}

// Returns the program's exit status.
template <class Dev>
int train_run(Run<Dev>& run, const Config& c, const Machine& machine, bool memory_is_tight) {
    begin_run(run, c, machine, memory_is_tight);
    if (!c.dump_state.empty()) {
        dump_first_batch(c, run.model, *run.activations, *run.data.train);
        return 0;
    }
    const int64_t first_step = run.state.step;
    run.printer.start(first_step);
    const bool owes_validation =
        run.state.validation_interrupted || (first_step == c.steps && !run.state.was_validated);
    if (first_step == 0 || owes_validation) run.validate();
    if (first_step > 0 && run.state.validation.step == first_step) run.save();  // its checkpoint says so from now on
    run.printer.start_clock();
    try {
        run.train();
    } catch (const SharedError& e) {
        fail("%s; %s", e.what(), run.save_despite_error());
    }
    const bool trained = run.state.step > first_step;
    if (trained) run.save_last();
    if (trained && run.stop == GO_ON) run.sample();
    run.model.note_phase("end");
    if (run.is_first()) print_end(run);
    return exit_status_of(run.stop);
}

// ---------------------------------------------------------------------------------------------------------------------
// Verbs.

static int run_train(Config& c, World& world) {
    complete_options(c);
    std::unique_ptr<Tokenizer> tokenizer = Tokenizer::find(c.tokenizer, c.vocab_dir);
    if (tokenizer) c.vocab_digest = tokenizer->digest();
    world.watchdog.start(c.stall_timeout, world.size);
    const GpuSearch gpus = search_gpus();
    drop_unsupported_options(c, count_threads(world), gpus);
    const Device device = choose_device(c, world, gpus);
    resolve_batch(c, world.size, device.gpu);
    validate_run(c, world.size);
    finish_when_asked(world.rank, world.size);
    int status = 0;
    with_engine(device, world, [&](auto& dev, const Machine& machine) {
        dev.check_shape(shape_of(c, c.batch, c.seq_len));
        const bool tight = require_memory(dev, c, world, c.is_given("batch"));
        if (world.rank == 0) warn_of_short_run(c);
        Run run(dev, c, world, std::move(tokenizer), manifest_json(c));
        const auto train = [&] { return train_run(run, c, machine, tight); };
        status = world.size > 1 ? catch_errors(&world, train) : train();
    });
    return status;
}

[[maybe_unused]] static int run_verb(int argc, char** argv, World& world) {
    Config c = parse_options(argc, argv);
    const Verb verb = verb_named(c.verb)->verb;
    const bool only_prints = c.help || c.version;
    if (world.size > 1 && verb != TRAIN && verb != EVAL && !only_prints)
        fail_usage("'%s' runs in one process: start it without mpirun", c.verb);
    if (!only_prints) require_same(world, "verb " + c.verb, "start all ranks with the same command");
    if (verb == CHECK_VERB && !c.is_given("model")) c.model = "125m";
    if (!c.config.empty() && !only_prints) read_options_file(c, world.rank == 0);
    int status = 0;
    if (c.help) print_help(c.verb);
    else if (c.version) print_version(this_build(DeviceEngine::info()));
    else if (verb == TRAIN) status = run_train(c, world);
    else if (verb == TOKENIZE || verb == VOCABULARY) run_on_texts(c, verb);
    else if (verb == SAMPLE) run_sample(c, world);
    else if (verb == EVAL) run_eval(c, world);
    else if (verb == EXPORT) export_checkpoint(c);
    else if (verb == IMPORT) import_checkpoint(c);
    else if (verb == REPORT) report_runs(c.runs, c.html);
    else if (verb == INSPECT) run_inspect(c, world);
    else status = run_check(c, world);
    world.finish();
    const bool writes = (verb & (TRAIN | TOKENIZE | VOCABULARY | EXPORT | IMPORT)) || !(c.html + c.json).empty();
    if (!output_is_whole()) complain_of_lost_output(status, writes && !only_prints);
    // All ranks at once: srun kills those that CUDA still keeps busy when the first has ended with a status.
    if (status && world.size > 1) world.abort(status);
    return status;
}

#ifndef NSA_WITHOUT_MAIN  // tests include this file
BEFORE_LIBRARIES(look_at_hangup);
int main(int argc, char** argv) {
    if (argc > 0) program_name = argv[0];
    prepare_for_errors();
    set_omp_wait(argv);
    std::unique_ptr<World> world;
    const int status = catch_errors(nullptr, [&] {
        take_stop_signals();
        const bool alone = is_for_one_process(argc, argv, started_by_mpi());
        world = std::make_unique<World>(alone ? Launch() : read_launch(mpi_name(), argc, argv), connect_by_nccl);
        return 0;
    });
    if (status) return status;
    return catch_errors(world.get(), [&] { return run_verb(argc, argv, *world); });
}
#endif
