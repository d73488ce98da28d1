// engine.h: the contract between the program and an engine. An engine is the model's operations on one kind of
// processor, and the memory that they work on; train_nsa.cu, ddp.cuh and lib/ know nothing else of it. What stands here
// is all that a new engine needs to have: static_assert(is_engine<Dev>) names each member that is missing or has other
// arguments. What an operation computes is said once, by the member of the same name of Cpu, in nsa_cpu.h and
// lib/cpu/optimiser.h; here are shapes and rules. Cuda in nsa_kernels.cuh and OpenCl in dev/ports/opencl have the same
// members.
//
// What holds for every member:
//   Addresses    allocate() returns an address of the engine's memory. The program adds to it, subtracts two of one
//                allocation, compares it with null and hands it back, from any place within the allocation and for any
//                type; it never reads or writes through it unless on_host. An engine that has no addresses makes some
//                up (OpenCl does). An operation may get addresses that are aligned to one element only.
//   Arrays       row-major and without gaps. Outputs come first; gradients start with d. "=" overwrites whatever was
//                there, "+=" adds to it. Arrays may be null where a comment says so and nowhere else; no two arrays of
//                a call overlap unless a comment allows it. Padding is written as 0 where a comment says so.
//   Order        operations run in the order of the calls, as if each ended before the next began; an engine may return
//                before it has computed. Who waits: copy(), to_host(), from_host() and receive() return when the data
//                are there. Nothing else needs to wait, and upload() has copied its argument when it returns.
//   Sums         in an order that the shapes fix, without atomics, so that the same input gives the same bits. They are
//                of Sum where a comment says Sum, else of fp32 at least. Sum is double where the processor has it;
//                an engine without (OpenCl, Metal) takes float, and adds in a tree or in chunks.
//   Arithmetic   IEEE 754's infinities and NaN go through every operation: no fast math. A lse of +infinity has to make
//                a weight of 0, and a NaN in a gradient has to reach total_squares().
//   Shapes       NsaShape is plain numbers, which any kernel can take as they are. "Training shapes" are first = 0 and
//                queries = T; all other calls may have any `first` and `queries`, B = 1 and one query included.
//   Errors       are thrown by fail(): one line that says what happened and what to do.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/gpu_search.h"
#include "shape.h"

// The gradient's norm is summed in chunks of this many elements. The parts of the flat array that ranks own are whole
// chunks, and chunks are added in their order, so the norm has the same bits whichever rank computed which chunk.
constexpr size_t CHUNK = 4096;

// One step of the optimiser. Muon takes beta1 as its momentum, and neither beta2 nor eps.
template <class Sum>
struct HyperAdamWOf {
    double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0;
    int64_t step = 0;   // 1-based, for the bias corrections
    uint64_t seed = 0;  // of stochastic rounding, where param is narrower than its master
    // Of the first element in the flat array of all parameters, which says what random bits it takes.
    size_t offset = 0;
    // The sum of the squares of the whole gradient, in the engine's memory. If given, the gradient is clipped to the L2
    // norm grad_clip (0: it is not), and nothing is updated when the norm is not finite.
    const Sum* squares = nullptr;
    double grad_clip = 0;
};
using HyperAdamW = HyperAdamWOf<double>;

// Elements [begin, end) of the arrays that AdamW is given. Those between two spans are left as they are.
struct AdamWSpan {
    size_t begin, end;
    size_t decays;  // 1: by HyperAdamW::decay; 0: not at all
};
// Appends a span, or extends the last one.
inline void add_span(std::vector<AdamWSpan>& spans, size_t begin, size_t end, bool decays) {
    if (!spans.empty() && spans.back().end == begin && spans.back().decays == size_t(decays)) spans.back().end = end;
    else spans.push_back({begin, end, decays});
}

// Matrices of one shape that Muon updates together.
struct MuonMatrix {
    size_t begin;  // in params and grads
    size_t m_at;   // in m and master
};
struct MuonBatch {
    int64_t rows, columns;
    std::vector<MuonMatrix> matrices;
    size_t size() const { return size_t(rows * columns); }
    size_t padded_size() const { return (size() + CHUNK - 1) / CHUNK * CHUNK; }  // whole chunks, for chunk_squares()
};

namespace contract {
template <class Dev, class Signature, template <class, class...> class Call, class = void>
struct Answers : std::false_type {};
template <class Dev, class R, class... A, template <class, class...> class Call>
struct Answers<Dev, R(A...), Call, std::void_t<Call<Dev, A...>>>
    : std::bool_constant<std::is_void<R>::value || std::is_convertible<Call<Dev, A...>, R>::value> {};

// NEEDS(result, name, (arguments)): a member function, or with NEEDS_AS one that is called in another way.
#define NEEDS_AS(result, name, call, arguments)                                  \
    template <class D, class... A>                                               \
    using call_##name = decltype(std::declval<D&>().call(std::declval<A>()...)); \
    static_assert(Answers<Dev, result arguments, call_##name>::value,            \
                  "this engine lacks  " #result " " #name #arguments "  of lib/model/engine.h")
#define NEEDS(result, name, arguments) NEEDS_AS(result, name, name, arguments)
#define NEEDS_MEMBER(what, name, type)                           \
    template <class D, class = void>                             \
    struct has_##name : std::false_type {};                      \
    template <class D>                                           \
    struct has_##name<D, std::void_t<type>> : std::true_type {}; \
    static_assert(has_##name<Dev>::value, "this engine lacks the " what "  " #name "  of lib/model/engine.h")
#define NEEDS_TYPE(name) NEEDS_MEMBER("type", name, typename D::name)
#define NEEDS_NUMBER(name) NEEDS_MEMBER("number", name, decltype(std::declval<D&>().name))

// ----- ten types and four numbers
template <class Dev>
struct Formats {
    NEEDS_TYPE(real);           // of parameters and activations: float, double or a 16-bit type
    NEEDS_TYPE(Stat);           // of rstd, LSE, gates, losses, the gradient of q, m and v: float, or double if real is
    NEEDS_TYPE(Grad);           // of the parameters' gradients: float; ranks exchange nothing else
    NEEDS_TYPE(Master);         // of what the optimiser updates
    NEEDS_TYPE(Sum);            // of sums over the batch or over all parameters: double or float
    NEEDS_TYPE(Heads);          // {real* q; real* kv[HEAD_SLOTS]; Stat* gate}, see split_heads_forward
    NEEDS_TYPE(HeadGradients);  // {Stat* q; real* kv[HEAD_SLOTS]; Stat* gate}
    NEEDS_TYPE(Phis);           // PhisOf<real>: of keys and values, {real *fc1, *bias, *fc2}: [F, l*D], [F], [D, F]
    NEEDS_TYPE(PhiGradients);   // PhisOf<Grad>
    NEEDS_TYPE(HostCopies);     // see CopiesMembers

    NEEDS_NUMBER(has_master);   // constexpr bool: master is an array of its own, from which param is rounded
    NEEDS_NUMBER(on_host);      // constexpr bool: the engine's memory is the host's and the program may read it
    NEEDS_NUMBER(steps_ahead);  // constexpr unsigned: 1: the host may launch a step before it has the results of the
                                // one before; 0 where send() waits, whose times would be wrong otherwise
    NEEDS_NUMBER(peak_bytes);   // size_t: the engine's own memory at most, so far; 0: it is the host's
};

template <class Dev>
struct Members : Formats<Dev> {
    using real = typename Dev::real;
    using Stat = typename Dev::Stat;
    using Grad = typename Dev::Grad;
    using Master = typename Dev::Master;
    using Sum = typename Dev::Sum;
    using Heads = typename Dev::Heads;
    using HeadGradients = typename Dev::HeadGradients;
    using Phis = typename Dev::Phis;
    using PhiGradients = typename Dev::PhiGradients;
    using Hyper = HyperAdamWOf<Sum>;

    // ----- memory. allocate<T> and the other templates serve all types above, char, int32_t and uint32_t.
    // [count], aligned for every type; a count of 0 gives an address too. fail() if there is no memory.
    NEEDS_AS(real*, allocate, template allocate<real>, (size_t count));
    NEEDS(void, release, (real * p));  // null does nothing
    // What can be allocated still, by each of so many processes that share the device.
    NEEDS(double, available_bytes, (int processes));
    NEEDS(void, zero, (real * p, size_t count));  // p [count] = 0
    // Bytes as they are; either side may be the host's or the engine's. Waits.
    NEEDS(void, copy, (real * out, const real* in, size_t count));
    // The same between the engine's numbers and the host's fp32. Waits.
    NEEDS(void, to_host, (float* out, const real* in, size_t count));
    NEEDS(void, from_host, (real * out, const float* in, size_t count));
    // out [count], the engine's, = in, the host's: tokens. Does not wait for the engine.
    NEEDS(void, upload, (int32_t * out, const int32_t* in, size_t count));
    // The numbers at this address as they are when the operations so far have run; receive() waits for the oldest that
    // were sent. At most two are on their way.
    NEEDS(void, send, (const Sum* numbers, size_t count));
    NEEDS(std::vector<double>, receive, ());

    // ----- layers. tokens, targets [N]; x, dx, inp, dinp [N, C]; out, dout [N, OC] of a product; weight [OC, C]
    // embed, dembed [V, C]; dembed += the rows of one token in order of n
    NEEDS(void, embedding_forward, (real * x, const int32_t* tokens, const real* embed, int N, int C));
    NEEDS(void, embedding_backward, (Grad * dembed, const real* dx, const int32_t* tokens, int N, int C));
    // x +=. tokens [B, queries]; where s.first > 0, B is 1 and tokens[-1] is the token before.
    NEEDS(void, smear_forward,
          (real * x, const int32_t* tokens, const real* embed, const SmearOf<real>& w, const NsaShape& s, int C));
    // de =, dw +=. Training shapes.
    NEEDS(void, smear_backward,
          (real * de, const SmearOf<Grad>& dw, const real* dx, const int32_t* tokens, const real* embed,
           const SmearOf<real>& w, const NsaShape& s, int C));
    // out =, rstd [N] =. weight [C]
    NEEDS(void, rmsnorm_forward, (real * out, Stat* rstd, const real* x, const real* weight, int N, int C));
    // dx +=, dweight +=
    NEEDS(void, rmsnorm_backward,
          (real * dx, Grad* dweight, const real* dout, const real* x, const Stat* rstd, const real* weight, int N,
           int C));
    // out =. residual [N, OC] may be null; N may be 1.
    NEEDS(void, matmul_forward,
          (real * out, const real* inp, const real* weight, const real* residual, int N, int C, int OC));
    NEEDS(void, matmul_backward_input, (real * dinp, const real* dout, const real* weight, int N, int C, int OC));  // =
    NEEDS(void, matmul_backward_weight,
          (Grad * dweight, const real* dout, const real* inp, int N, int C, int OC));  // +=
    // out =, dx =. dx may be dout.
    NEEDS(void, silu_forward, (real * out, const real* x, size_t count));
    NEEDS(void, silu_backward, (real * dx, const real* dout, const real* x, size_t count));
    // losses [N] =, of logits [N, Vp], whose columns V..Vp-1 are padding and do not count. With want_gradient the
    // logits become their gradient, 0 in the padding.
    NEEDS(void, classifier,
          (Stat * losses, real* logits, const int32_t* targets, double dloss, bool want_gradient, int N, int V,
           int Vp));

    // ----- heads. projected [B*queries, s.projected()]: a row is  q | keys and values by HeadSlot | gate logits |
    // padding. q [B, H, queries, D]; kv[slot] [B, G, T, D], null below s.first_slot(); gate [branches, B, H, queries].
    // gains [s.gain_rows(), D], null without s.qk_norm. gate is 0 for a branch in s.left_out, and not written in full
    // attention, which has no gates. Writes keys at positions first.. only.
    NEEDS(void, split_heads_forward, (Heads out, const real* projected, const real* gains, const NsaShape& s));
    // dprojected =, 0 in the padding; dgains +=. d.gate is already the gradient of the logit. With s.qk_norm,
    // dprojected holds what was projected until it is written over. d.q may be null: then q's columns stay. Training
    // shapes.
    NEEDS(void, split_heads_backward,
          (real * dprojected, Grad* dgains, HeadGradients d, const real* gains, const NsaShape& s));

    // ----- compression. out = the compressed keys [B, G, NC, D], then the values [B, G, NC, D], of k, v [B, G, T, D];
    // hidden [2, B, G, NC, F] =. NC = s.cmp_capacity(). v is behind k in one allocation. Only the blocks that end
    // within positions first .. first+queries-1: there may be none.
    NEEDS(void, compress_forward,
          (real * out, real* hidden, const real* k, const real* v, const Phis& phi, const NsaShape& s));
    // dk and dv =, dphi +=, from dout, which may be written over. NC may be 0: then dk and dv are 0. Training shapes.
    NEEDS(void, compress_backward,
          (real * dk, real* dv, const PhiGradients& dphi, real* dout, const real* hidden, const real* k, const real* v,
           const Phis& phi, const NsaShape& s));

    // ----- attention. The compressed branch: out [B, H, queries, D] =, lse [B, H, queries] =; without a key out is 0
    // and lse +infinity. kc, vc [B, G, s.key_stride(CMP), D]. Equal importances go to the lower block. selection [B, G,
    // queries, words] may be null, and so may chosen_importance [B, G, queries].
    NEEDS(void, attend_and_select,
          (real * out, Stat* lse, uint32_t* selection, Stat* chosen_importance, const real* q, const real* kc,
           const real* vc, const NsaShape& s));
    // The other branches of the shape, and then the gated sum of all.
    using Inputs = LayerInputs<real, Stat>;
    using Outputs = LayerOutputs<real, Stat>;
    NEEDS(void, attend_and_combine, (const Outputs& out, const Inputs& in, const NsaShape& s));
    // out [B*queries, H*D] =. o [branches, B, H, queries, D]. In full attention `gate` may be anything.
    NEEDS(void, combine_forward, (real * out, const real* o, const Stat* gate, const NsaShape& s));
    // The backward pass of all branches of a layer: all of d =, dk and dv 0 for keys that nobody sees, lse_gated
    // +infinity where a gate is 0; dgate stays in full attention. Without d.dq the gradient of q is turned back and
    // stored in d.dprojected. Training shapes.
    using ToBackward = LayerGradients<real, Stat>;
    NEEDS(void, branches_backward, (const ToBackward& d, const Inputs& in, const NsaShape& s));
    NEEDS(bool, wants_dq, (const NsaShape& s));  // whether it has to be given d.dq

    // ----- update
    NEEDS(void, add_sum, (Sum * total, const Stat* x, size_t count));  // *total += sum of x, in Sum
    // squares[i] = sum of the squares of chunk i of x [total], in Sum, for the chunks that begin in [begin, begin +
    // count). begin is a multiple of CHUNK; the last chunk ends at `total`, which may lie before its beginning: then 0.
    NEEDS(void, chunk_squares, (Sum * squares, const Grad* x, size_t total, size_t begin, size_t count));
    // *sum = squares[0] + squares[1] + ..., but NaN if *guard is not finite
    NEEDS(void, total_squares, (Sum * sum, const Sum* squares, size_t chunks, const Grad* guard));
    NEEDS(void, set_guard, (Grad * guard, const Sum* loss));  // *guard = *loss; for a guard of Sum too
    // m, v, master and param take a step of AdamW in the spans, which are in order; with has_master, param is rounded
    // from master. Reads h.squares in the engine's memory: the host does not know the norm yet.
    using Spans = std::vector<AdamWSpan>;
    NEEDS(void, adamw,
          (real * param, Master* master, Stat* m, Stat* v, const Grad* grad, const Spans& spans, const Hyper& h));
    // Muon, see lib/model/muon.h, of some matrices of one shape. Clipped and left alone as in adamw; direction
    // [matrices, b.padded_size()] has zeros behind a matrix. Where rows > columns, direction and y are transposed.
    NEEDS(void, muon_momentum, (Grad * direction, Stat* m, const Grad* grad, const MuonBatch& b, const Hyper& h));
    // y [matrices, b.size()] =, 0 where squares [matrices] are
    NEEDS(void, muon_normalise,
          (real * y, const Grad* direction, const Sum* squares, double factor, const MuonBatch& b));
    // param and the exceptions as in adamw
    NEEDS(void, muon_apply,
          (real * param, Master* master, const real* y, double step_size, const MuonBatch& b, const Hyper& h));
    // out [count, M, N] =. x [count, M, K]; addend as out, or null; y [count, K, N] or, if transposed, [count, N, K]
    NEEDS(void, muon_product,
          (real * out, const real* x, const real* y, bool transposed, const real* addend, double beta, int count, int M,
           int N, int K));

    // ----- what it says of itself
    NEEDS(void, check_shape, (const NsaShape& s));  // fail_usage() if the engine cannot compute this shape
    NEEDS(std::string, describe, ());               // "GPU 0, NVIDIA H100, ..., bf16": for the run's first line
    NEEDS(std::string, describe_selected,
          (const NsaShape& s));      // how the selected branch is computed; "": one way only
    NEEDS(std::string, format, ());  // what products take: "fp32" or "bf16"
    NEEDS(double, peak_flops, ());   // of the products, FLOP/s at best; 0: unknown
};

// HostCopies(dev, pieces): gradients on their way to the host's memory, where ranks sum them, and back, beside the
// computation. `piece` counts the parts of the one array.
template <class Dev, class Engine>
struct CopiesMembers {
    using Grad = typename Engine::Grad;
    static_assert(std::is_constructible<Dev, Engine&, size_t>::value, "this engine lacks  HostCopies(dev, pieces)");
    // Memory of the host for the `count` numbers at p, as long as the HostCopies lives; p itself if on_host.
    NEEDS(Grad*, host_side, (Grad * p, size_t count));
    // host [count] = device, once all operations so far have run. Does not wait: has(piece) is true when it is there.
    NEEDS(void, fetch, (Grad * host, const Grad* device, size_t count, size_t piece));
    NEEDS(bool, has, (size_t piece));
    // Operations from here on find host [count] at `device`. Does not wait: host stays as it is until the next fetch.
    NEEDS(void, put, (Grad * device, const Grad* host, size_t count));
};

// An engine with its own copy of the parameters in another format, for a resumed run.
template <class Dev>
struct MasterMembers {
    using real = typename Dev::real;
    using Master = typename Dev::Master;
    // param = what adamw or muon_apply made of master in this step, from master alone; arguments as in HyperAdamW
    NEEDS(void, round_master,
          (real * param, const Master* master, size_t count, uint64_t seed, int64_t step, size_t offset));
};

// An engine for devices, of which a rank takes one: Dev(number), as --device NAME or auto asks. What it says of itself
// is in lib/base/gpu_search.h: names, remedies and what it cannot do.
template <class Dev>
struct DeviceMembers {
    static_assert(std::is_constructible<Dev, int>::value, "this engine lacks its constructor from a device's number");
    // These three are static, and the second may run before a process has decided to use a device.
    NEEDS(EngineInfo, info, ());
    NEEDS(GpuSearch, search, ());
    NEEDS(Versions, versions, ());                // of its libraries and driver
    NEEDS(std::string, name, ());                 // of the device: "NVIDIA H100"
    NEEDS(std::string, bus, ());                  // tells it from the machine's other devices
    NEEDS(void, divide_memory, (int processes));  // called by all processes that share the device, before they allocate
    // For all calls from here on: "auto", or one of info().attention_kernels.
    NEEDS(void, choose_attention, (const std::string& kernel));
};
#undef NEEDS
#undef NEEDS_AS
#undef NEEDS_MEMBER
#undef NEEDS_TYPE
#undef NEEDS_NUMBER

struct Nothing {};
template <class Dev>
constexpr bool fulfils() {
    return sizeof(Members<Dev>) && sizeof(CopiesMembers<typename Dev::HostCopies, Dev>) &&
           sizeof(std::conditional_t<Dev::has_master, MasterMembers<Dev>, Nothing>) &&
           sizeof(std::conditional_t<Dev::on_host, Nothing, DeviceMembers<Dev>>);
}
}  // namespace contract

// True, or an error that names what is missing.
template <class Dev>
constexpr bool is_engine = contract::fulfils<Dev>();

// attend_and_combine of an engine that has attention_forward, which see nsa_cpu.h.
template <class Dev, class real, class Stat>
void combine_by_branches(Dev& dev, const LayerOutputs<real, Stat>& out, const LayerInputs<real, Stat>& in,
                         const NsaShape& s) {
    for (const Branch branch : {SLC, WIN}) {
        const size_t row = size_t(s.branch_slot(branch)) * s.query_rows();
        if (s.has(branch))
            dev.attention_forward(branch, out.o + row * size_t(s.D), out.lse + row, in.q, in.k[branch], in.v[branch],
                                  branch == SLC ? in.selection : nullptr, s);
    }
    dev.combine_forward(out.attn, out.o, in.gate, s);
}
// branches_backward of an engine that has attention_backward_rows and attention_backward, which see nsa_cpu.h, and is
// given dq.
template <class Dev, class real, class Stat>
void backward_by_branches(Dev& dev, const LayerGradients<real, Stat>& d, const LayerInputs<real, Stat>& in,
                          const NsaShape& s) {
    dev.attention_backward_rows(d.row_dot, d.lse_gated, d.dgate, in.dout, in.o, in.gate, in.lse, s);
    // The window goes first: every query has keys there, so it writes the dq that the other branches add to.
    for (const Branch branch : {WIN, SLC, CMP})
        if (s.has(branch)) dev.attention_backward(branch, d.of(branch, branch != WIN, in.dout, s), in.of(branch), s);
}

// Stands for an engine for devices in a build that has none: it finds no device and says nothing of itself.
struct NoEngine {
    static EngineInfo info() { return {}; }
    static GpuSearch search() {
        GpuSearch none;
        none.nvidia_module = has_nvidia_module();
        return none;
    }
    static Versions versions() { return {}; }
};
