// port.h: struct OpenCl, an engine for GPUs of any vendor that have a driver of OpenCL 1.2, in fp32. It was written
// from lib/model/engine.h, as an example of a port: plain kernels (kernels.cl) that use local memory and nothing else
// of a GPU. It has run on CPUs, by PoCL's, Intel's and Mesa's OpenCL for them, and never on a GPU.
//
// OpenCL has buffers where the program wants addresses. So every buffer gets as many addresses that nobody can read,
// and a pointer among them means its buffer and an offset: a host that reads through one stops at once.
#pragma once
#include <array>
#include <map>
#include <string>
#include <vector>

#include <sys/mman.h>

#define CL_TARGET_OPENCL_VERSION 120
#ifdef __APPLE__
#include <OpenCL/opencl.h>
#else
#include <CL/cl.h>
#endif

#include "../../../lib/base/embed.h"
#include "../../../lib/base/gpu_search.h"
#include "../../../lib/base/errors.h"
#include "../../../lib/model/engine.h"
#include "../../../lib/model/rope.h"
#include "../../../lib/model/visible.h"

EMBED_FILE(opencl_kernels, "dev/ports/opencl/kernels.cl")

inline void cl_check(cl_int error, const char* call) {
    if (error == CL_MEM_OBJECT_ALLOCATION_FAILURE || error == CL_OUT_OF_RESOURCES || error == CL_OUT_OF_HOST_MEMORY ||
        error == CL_INVALID_BUFFER_SIZE)
        fail("OpenCL: no memory in one piece for %s (error %d); choose a smaller --batch or --seq-len", call, error);
    if (error != CL_SUCCESS)
        fail("OpenCL: %s failed with error %d of cl.h; clinfo shows the driver, --device cpu needs none", call, error);
}
#define CL(call) cl_check((call), #call)

class OpenCl {
  public:
    using real = float;
    using Stat = float;
    using Grad = float;
    using Master = float;
    using Sum = float;
    using In = const float*;
    using Hyper = HyperAdamWOf<float>;
    using Phis = PhisOf<float>;
    using PhiGradients = PhisOf<float>;
    struct Heads {
        float *q, *kv[HEAD_SLOTS], *gate;
    };
    using HeadGradients = Heads;
    static constexpr bool has_master = false, on_host = false;
    static constexpr unsigned steps_ahead = 1;
    size_t peak_bytes = 0;
    bool poison = false;  // tests: fresh memory holds NaN

    // ----- what it is, before one is opened
    static EngineInfo info() {
        return {"opencl", "OpenCL", "OpenCL device", "fp32", "", "OpenCL has no library for that"};
    }
    static GpuSearch search() {
        GpuSearch s;
        const std::vector<cl_device_id> found = devices();
        s.engine = info();
        s.count = int(found.size());
        s.by_auto = s.count && number_of(found[0], CL_DEVICE_TYPE) & CL_DEVICE_TYPE_GPU;
        if (found.empty()) s.why = "OpenCL finds no device: install the GPU's driver for OpenCL, until clinfo lists it";
        else if (!s.by_auto)
            s.why = "OpenCL has no GPU here, only " + text_of(found[0], CL_DEVICE_NAME) + ", for --device opencl";
        return s;
    }
    static Versions versions() {
        const std::vector<cl_device_id> found = devices();
        if (found.empty()) return {};
        return {{"OpenCL", text_of(found[0], CL_DEVICE_VERSION)},
                {"OpenCL driver", text_of(found[0], CL_DRIVER_VERSION)}};
    }

    explicit OpenCl(int number = 0) : index(number) {
        const std::vector<cl_device_id> all = devices();
        if (index >= int(all.size())) fail("OpenCL has no device %d; clinfo lists what there is", index);
        device = all[size_t(index)];
        cl_int error;
        context = clCreateContext(nullptr, 1, &device, nullptr, nullptr, &error);
        cl_check(error, "clCreateContext");
        queue = clCreateCommandQueue(context, device, 0, &error);
        cl_check(error, "clCreateCommandQueue");
        build();
    }
    ~OpenCl() {
        clFinish(queue);
        for (float* s : scratches) release(s);
        for (auto& u : uploads) wait_for(u.event);
        for (auto& [name, kernel] : kernels) clReleaseKernel(kernel);
        clReleaseProgram(program);
        clReleaseCommandQueue(queue);
        clReleaseContext(context);
    }
    OpenCl(const OpenCl&) = delete;
    OpenCl& operator=(const OpenCl&) = delete;

    std::string name() const { return text_of(device, CL_DEVICE_NAME); }
    std::string bus() const { return format_text("OpenCL device %d", index); }
    std::string describe() const {
        return format_text("OpenCL device %d, %s, %d compute units, %.1f GiB, fp32, GEMM: own", index, name(),
                           cl_uint(number_of(device, CL_DEVICE_MAX_COMPUTE_UNITS)), total_memory() / (1 << 30));
    }
    std::string describe_selected(const NsaShape&) const { return ""; }
    std::string format() const { return "fp32"; }
    double peak_flops() const { return 0; }
    void choose_attention(const std::string&) {}
    void check_shape(const NsaShape& s) const {
        if (s.D % 2 || size_t(s.D) > MAX_D)
            fail_usage("--head-dim %d: OpenCL's kernels take even ones up to %d", s.D, MAX_D);
    }

    // ----- memory
    template <class T>
    T* allocate(size_t count) {
        const size_t bytes = (std::max<size_t>(count * sizeof(T), 1) + 255) / 256 * 256;
        void* const at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) fail("no %d addresses for a buffer of OpenCL; see ulimit -v", bytes);
        const std::string what = format_text("a buffer of %.1f MiB", double(bytes) / (1 << 20));
        const cl_uint fresh = poison ? ~0u : 0;  // written now, so that an error comes here
        cl_int error;
        const cl_mem buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, bytes, nullptr, &error);
        cl_check(error, what.c_str());
        cl_check(clEnqueueFillBuffer(queue, buffer, &fresh, 4, 0, bytes, 0, nullptr, nullptr), what.c_str());
        buffers[static_cast<char*>(at)] = {buffer, bytes};
        peak_bytes = std::max(peak_bytes, live_bytes += bytes);
        return static_cast<T*>(at);
    }
    void release(void* p) {
        const auto found = buffers.find(static_cast<char*>(p));
        if (found == buffers.end()) return;
        clReleaseMemObject(found->second.buffer);
        live_bytes -= found->second.bytes;
        munmap(p, found->second.bytes);
        buffers.erase(found);
    }
    // OpenCL does not tell what others have taken.
    double available_bytes(int processes = 1) const { return total_memory() / processes - double(live_bytes); }
    void divide_memory(int) {}
    template <class T>
    void zero(T* p, size_t count) {
        static_assert(sizeof(T) == 4, "whole words");
        const cl_uint nothing = 0;
        const Place to = place_of(p);
        if (count) CL(clEnqueueFillBuffer(queue, to.buffer, &nothing, 4, to.at, count * 4, 0, nullptr, nullptr));
    }
    template <class T>
    void copy(T* out, const T* in, size_t count) {
        if (count) transfer(out, in, count * sizeof(T), nullptr);
        else CL(clFinish(queue));
    }
    void to_host(float* out, In in, size_t count) { copy(out, in, count); }
    void from_host(float* out, In in, size_t count) { copy(out, in, count); }
    // The tokens and targets of two micro-steps can be on their way.
    void upload(int32_t* out, const int32_t* in, size_t count) {
        auto& u = uploads[uploaded++ % uploads.size()];
        wait_for(u.event);
        u.host.assign(in, in + count);
        transfer(out, u.host.data(), count * sizeof(int32_t), &u.event);
    }
    void send(In numbers, size_t count) {
        auto& d = downloads[sent++ % downloads.size()];
        d.host.resize(count);
        transfer(d.host.data(), numbers, count * sizeof(float), &d.event);
    }
    std::vector<double> receive() {
        auto& d = downloads[received++ % downloads.size()];
        wait_for(d.event);
        return {d.host.begin(), d.host.end()};
    }

    // In the one queue, so a copy holds up what is launched behind it; the host waits for none.
    class HostCopies {
        OpenCl& dev;
        std::vector<cl_event> fetched;
        std::vector<float> host;

      public:
        HostCopies(OpenCl& d, size_t pieces) : dev(d), fetched(pieces) {}
        ~HostCopies() {
            clFinish(dev.queue);
            for (cl_event& e : fetched) wait_for(e);
        }

        float* host_side(float*, size_t count) {
            host.resize(count);
            return host.data();
        }
        void fetch(float* to, In from, size_t count, size_t piece) {
            wait_for(fetched[piece]);
            dev.transfer(to, from, count * sizeof(float), &fetched[piece]);
        }
        bool has(size_t piece) const {
            cl_int state;
            CL(clGetEventInfo(fetched[piece], CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, nullptr));
            if (state < 0) cl_check(state, "the copy of gradients to the host");
            return state == CL_COMPLETE;
        }
        void put(float* to, In from, size_t count) {
            cl_event event;
            dev.transfer(to, from, count * sizeof(float), &event);
            clReleaseEvent(event);
        }
    };

    // ----- layers
    void embedding_forward(float* x, const int32_t* tokens, In embed, int N, int C) {
        over(size_t(N) * C, "embedding_forward", x, tokens, embed, C);
    }
    void embedding_backward(float* dembed, In dx, const int32_t* tokens, int N, int C) {
        over(size_t(N) * C, "embedding_backward", dembed, dx, tokens, N, C);
    }
    void smear_forward(float* x, const int32_t* tokens, In embed, const SmearOf<float>& w, const NsaShape& s, int C) {
        const int N = s.B * s.queries;
        launch({size_t(N)}, ITEMS, "smear_forward", x, embeddings(tokens, embed, N, s.first > 0, C), w.gate, w.scale,
               s.first, s.queries, C);
    }
    void smear_backward(float* de, const SmearOf<float>& dw, In dx, const int32_t* tokens, In embed,
                        const SmearOf<float>& w, const NsaShape& s, int C) {
        const int N = s.B * s.T;
        const In before = embeddings(tokens, embed, N, false, C);
        float *const g = scratch(0, size_t(N)), *const dz = scratch(2, size_t(N));
        launch({size_t(N)}, ITEMS, "smear_rows", g, dz, dx, before, w.gate, w.scale, s.T, C);
        over(size_t(N) * C, "smear_backward", de, dx, g, dz, w.gate, w.scale, N, C);
        gemm({1, C, N}, dw.gate, dz, before + C, dw.gate, {size_t(N), 1, 0}, {1, size_t(C), 0}, {size_t(C), 1, 0});
        add_column_sums(dw.scale, dx, before, g, N, C);
    }
    void rmsnorm_forward(float* out, float* rstd, In x, In weight, int N, int C) {
        launch({size_t(N)}, ITEMS, "rmsnorm_forward", out, rstd, x, weight, C, float(NORM_EPS));
    }
    void rmsnorm_backward(float* dx, float* dweight, In dout, In x, In rstd, In weight, int N, int C) {
        launch({size_t(N)}, ITEMS, "rmsnorm_backward", dx, dout, x, rstd, weight, C);
        add_column_sums(dweight, dout, x, rstd, N, C);
    }
    void matmul_forward(float* out, In inp, In weight, In residual, int N, int C, int OC) {
        gemm({N, OC, C}, out, inp, weight, residual, {size_t(C), 1, 0}, {size_t(C), 1, 0}, {size_t(OC), 1, 0});
    }
    void matmul_backward_input(float* dinp, In dout, In weight, int N, int C, int OC) {
        gemm({N, C, OC}, dinp, dout, weight, null, {size_t(OC), 1, 0}, {1, size_t(C), 0}, {size_t(C), 1, 0});
    }
    void matmul_backward_weight(float* dweight, In dout, In inp, int N, int C, int OC) {
        gemm({OC, C, N}, dweight, dout, inp, dweight, {1, size_t(OC), 0}, {1, size_t(C), 0}, {size_t(C), 1, 0});
    }
    void silu_forward(float* out, In x, size_t count) { over(count, "silu_forward", out, x); }
    void silu_backward(float* dx, In dout, In x, size_t count) { over(count, "silu_backward", dx, dout, x); }
    void classifier(float* losses, float* logits, const int32_t* targets, double dloss, bool want_gradient, int N,
                    int V, int Vp) {
        launch({size_t(N)}, ITEMS, "classifier", losses, logits, targets, float(dloss), int(want_gradient), V, Vp);
    }

    // ----- heads
    void split_heads_forward(Heads out, In projected, In gains, const NsaShape& s) {
        split_heads(out, const_cast<float*>(projected), gains, nullptr, s);
    }
    void split_heads_backward(float* dprojected, float* dgains, HeadGradients d, In gains, const NsaShape& s) {
        split_heads(d, dprojected, gains, dgains, s, true);
    }

    // ----- compression
    void compress_forward(float* out, float* hidden, In k, In v, const Phis& phi, const NsaShape& s) {
        compress_heads(out, hidden, k, phi.k, true, s);
        compress_heads(out + s.cmp_rows() * s.D, hidden + s.cmp_rows() * s.F, v, phi.v, false, s);
    }
    void compress_heads(float* out, float* hidden, In k, const PhiOf<float>& phi, bool rotated, const NsaShape& s) {
        const int begin = s.cmp_blocks(s.first), count = s.cmp_blocks(s.first + s.queries) - begin;
        if (count <= 0) return;
        const int rows = s.B * s.G * count, NC = s.cmp_capacity();
        const size_t D = size_t(s.D), F = size_t(s.F), width = s.l * D;
        float* const activated = scratch(0, rows * F);
        gemm({count, s.F, int(width)}, hidden + begin * F, k + begin * s.d * D, phi.fc1, null, {s.d * D, 1, s.T * D},
             {width, 1, 0}, {F, 1, NC * F}, size_t(s.B) * s.G);
        over(rows * F, "compress_activate", hidden, activated, phi.bias, begin, count, NC, s);
        over(rows * D, "compress_mean", out, k, begin, count, NC, s);
        float* const first = out + begin * D;
        gemm({count, s.D, s.F}, first, activated, phi.fc2, first, {F, 1, count * F}, {F, 1, 0}, {D, 1, NC * D},
             size_t(s.B) * s.G);
        if (rotated) over(rows * D / 2, "turn_blocks", out, rope_of(s), 1.0f, begin, count, NC, s);
    }
    void compress_backward(float* dk, float* dv, const PhiGradients& dphi, float* dout, In hidden, In k, In v,
                           const Phis& phi, const NsaShape& s) {
        compress_heads_backward(dk, dphi.k, dout, hidden, k, phi.k, true, s);
        compress_heads_backward(dv, dphi.v, dout + s.cmp_rows() * s.D, hidden + s.cmp_rows() * s.F, v, phi.v, false, s);
    }
    void compress_heads_backward(float* dk, const PhiOf<float>& dphi, float* dout, In hidden, In k,
                                 const PhiOf<float>& phi, bool rotated, const NsaShape& s) {
        const int NC = s.cmp_capacity(), rows = s.B * s.G * NC;
        const size_t D = size_t(s.D), F = size_t(s.F), width = s.l * D;
        if (rows == 0) return zero(dk, s.key_rows() * D);
        float *activated = scratch(0, rows * F), *dhidden = scratch(1, rows * F), *dblocks = scratch(2, rows * width);
        if (rotated) over(rows * D / 2, "turn_blocks", dout, rope_of(s), -1.0f, 0, NC, NC, s);
        silu_forward(activated, hidden, rows * F);
        gemm({s.D, s.F, rows}, dphi.fc2, dout, activated, dphi.fc2, {1, D, 0}, {1, F, 0}, {F, 1, 0});
        gemm({rows, s.F, s.D}, dhidden, dout, phi.fc2, null, {D, 1, 0}, {1, F, 0}, {F, 1, 0});
        silu_backward(dhidden, dhidden, hidden, rows * F);
        add_column_sums(dphi.bias, dhidden, null, null, rows, s.F);
        for (size_t group = 0; group < size_t(s.B) * s.G; group++)  // one after the other, as they share fc1's gradient
            gemm({s.F, int(width), NC}, dphi.fc1, dhidden + group * NC * F, k + group * s.T * D, dphi.fc1, {1, F, 0},
                 {1, s.d * D, 0}, {width, 1, 0});
        gemm({rows, int(width), s.F}, dblocks, dhidden, phi.fc1, null, {F, 1, 0}, {1, width, 0}, {width, 1, 0});
        over(s.key_rows() * D, "compress_dk", dk, dblocks, dout, NC, s);
    }

    // ----- attention
    void attention_forward(Branch branch, float* out, float* lse, In q, In k, In v, const uint32_t* selection,
                           const NsaShape& s) {
        over(s.query_rows(), "attention_forward", out, lse, q, k, v, selection, int(branch), float(s.scale()), s);
    }
    void attend_and_select(float* out, float* lse, uint32_t* selection, float* chosen_importance, In q, In kc, In vc,
                           const NsaShape& s) {
        attention_forward(CMP, out, lse, q, kc, vc, nullptr, s);
        if (!selection) return;
        const size_t queries = size_t(s.B) * s.G * s.queries, count = queries * s.slc_blocks();
        float* const importance = scratch(0, count);
        over(count, "block_importance", importance, q, kc, lse, float(s.scale()), s.slc_blocks(), s);
        over(queries, "select_blocks", selection, chosen_importance, importance, s.slc_blocks(), s);
    }
    void attend_and_combine(const LayerOutputs<float, float>& out, const LayerInputs<float, float>& in,
                            const NsaShape& s) {
        combine_by_branches(*this, out, in, s);
    }
    void combine_forward(float* out, In o, In gate, const NsaShape& s) {
        over(s.query_rows() * s.D, "combine_forward", out, o, gate, s);
    }
    void attention_backward_rows(float* row_dot, float* lse_gated, float* dgate_logit, In dout, In o, In gate, In lse,
                                 const NsaShape& s) {
        over(s.branches() * s.query_rows(), "attention_backward_rows", row_dot, lse_gated, dgate_logit, dout, o, gate,
             lse, s);
    }
    void attention_backward(Branch branch, const BackwardArrays<float, float>& d, const InputArrays<float>& in,
                            const NsaShape& s) {
        const size_t rows = s.query_rows(), keys = size_t(s.B) * s.G * s.key_stride(branch);
        over(rows, "attention_dq", d.dq, d.dout, d.row_dot, d.lse_gated, in.q, in.k, in.v, in.selection, int(d.add),
             int(branch), float(s.scale()), s);
        over(keys, "attention_dkdv", d.dk, d.dv, d.dout, d.row_dot, d.lse_gated, in.q, in.k, in.v, in.selection,
             int(branch), float(s.scale()), s);
    }
    bool wants_dq(const NsaShape&) const { return true; }
    void branches_backward(const LayerGradients<float, float>& d, const LayerInputs<float, float>& in,
                           const NsaShape& s) {
        backward_by_branches(*this, d, in, s);
    }

    // ----- update
    void add_sum(float* total, In x, size_t count) {
        launch({1}, ITEMS, "sums", total, x, null, 1, 0, count, size_t(0), count);
    }
    void chunk_squares(float* squares, In x, size_t total, size_t begin, size_t count) {
        if (count) launch({count / CHUNK}, ITEMS, "sums", squares, x, null, 0, 1, CHUNK, begin / CHUNK, total);
    }
    void total_squares(float* sum, In squares, size_t chunks, In guard) {
        launch({1}, ITEMS, "sums", sum, squares, guard, 0, 0, chunks, size_t(0), chunks);
    }
    void set_guard(float* guard, In loss) { total_squares(guard, loss, 1, nullptr); }
    void adamw(float* param, float*, float* m, float* v, In grad, const std::vector<AdamWSpan>& spans, const Hyper& h) {
        for (const auto& [begin, end, decays] : spans)
            over(end - begin, "adamw", param + begin, m + begin, v + begin, grad + begin, h.squares, float(h.beta1),
                 float(h.beta2), float(h.eps), float(h.lr / (1 - std::pow(h.beta1, double(h.step)))),
                 float(decays ? 1 - h.lr * h.decay : 1), float(1 / std::sqrt(1 - std::pow(h.beta2, double(h.step)))),
                 float(h.grad_clip));
    }
    void muon_momentum(float* direction, float* m, In grad, const MuonBatch& b, const Hyper& h) {
        for (const auto& [begin, local] : b.matrices) {
            over(b.size(), "muon_momentum", direction, m + local, grad + begin, h.squares, size_t(b.columns),
                 float(h.beta1), float(h.grad_clip));
            zero(direction + b.size(), b.padded_size() - b.size());
            direction += b.padded_size();
        }
    }
    void muon_normalise(float* y, In direction, In squares, double factor, const MuonBatch& b) {
        for (size_t k = 0; k < b.matrices.size(); k++)
            over(b.size(), "muon_normalise", y + k * b.size(), direction + k * b.padded_size(), squares + k,
                 float(factor));
    }
    void muon_apply(float* param, float*, In y, double step_size, const MuonBatch& b, const Hyper& h) {
        for (const MuonMatrix& matrix : b.matrices) {
            over(b.size(), "muon_apply", param + matrix.begin, y, h.squares, size_t(b.columns), float(step_size),
                 float(1 - h.lr * h.decay));
            y += b.size();
        }
    }
    void muon_product(float* out, In x, In y, bool transposed, In addend, double beta, int count, int M, int N, int K) {
        const cl_ulong m = cl_ulong(M), n = cl_ulong(N), k = cl_ulong(K);
        gemm({M, N, K}, out, x, y, addend, {k, 1, m * k}, {transposed ? k : 1, transposed ? 1 : n, n * k},
             {n, 1, m * n}, size_t(count), float(beta));
    }

  private:
    static constexpr size_t ITEMS = 64, MAX_D = 256, TILE = 64, DEPTH = 16;
    static constexpr int PART_ROWS = 64;
    static constexpr In null = nullptr;

    struct Buffer {
        cl_mem buffer;
        size_t bytes;
    };
    struct Place {
        cl_mem buffer = nullptr;  // null: this is an address of the host
        size_t at = 0;            // bytes
    };
    template <class T>
    struct OnItsWay {
        std::vector<T> host;
        cl_event event = nullptr;
    };
    struct Strides {
        cl_ulong row, k, matrix;
    };

    const int index;
    cl_device_id device;
    cl_context context;
    cl_command_queue queue;
    cl_program program;
    std::map<std::string, cl_kernel> kernels;
    std::map<char*, Buffer> buffers;  // by their first address
    size_t live_bytes = 0, uploaded = 0, sent = 0, received = 0;
    std::array<OnItsWay<int32_t>, 4> uploads;
    std::array<OnItsWay<float>, 2> downloads;
    std::array<float*, 5> scratches{};  // the last is add_column_sums', the one before RoPE's table
    RopeTable<float> rope;

    // ----- devices: the GPUs or, where there are none, the CPUs; an accelerator may be an FPGA, or emulate one
    static std::vector<cl_device_id> devices() {
        std::vector<cl_device_id> all;
        cl_platform_id platforms[16];
        cl_uint count = 0, number = 0;
        if (clGetPlatformIDs(16, platforms, &count) != CL_SUCCESS) return {};
        for (const cl_device_type type : {CL_DEVICE_TYPE_GPU, CL_DEVICE_TYPE_CPU, CL_DEVICE_TYPE_ACCELERATOR}) {
            if (!all.empty()) break;
            for (cl_uint i = 0; i < std::min(count, 16u); i++) {
                cl_device_id found[16];
                if (clGetDeviceIDs(platforms[i], type, 16, found, &number) == CL_SUCCESS)
                    all.insert(all.end(), found, found + std::min(number, 16u));
            }
        }
        return all;
    }
    static std::string text_of(cl_device_id d, cl_device_info what) {
        char text[256] = "";
        clGetDeviceInfo(d, what, sizeof text, text, nullptr);
        return text;
    }
    static cl_ulong number_of(cl_device_id d, cl_device_info what) {
        cl_ulong number = 0;
        clGetDeviceInfo(d, what, sizeof number, &number, nullptr);
        return number;
    }
    double total_memory() const { return double(number_of(device, CL_DEVICE_GLOBAL_MEM_SIZE)); }
    void build() {
        const char* text = file_opencl_kernels;
        const size_t length = size_t(file_opencl_kernels_end - file_opencl_kernels);
        cl_int error;
        program = clCreateProgramWithSource(context, 1, &text, &length, &error);
        cl_check(error, "clCreateProgramWithSource");
        const std::string options =
            format_text("-cl-std=CL1.2 -DITEMS=%d -DMAX_D=%d -DTILE=%d -DDEPTH=%d", ITEMS, MAX_D, TILE, DEPTH);
        error = clBuildProgram(program, 1, &device, options.c_str(), nullptr, nullptr);
        if (error == CL_SUCCESS) return;
        std::vector<char> log(1 << 20);
        clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, log.size() - 1, log.data(), nullptr);
        fail("OpenCL: the driver of %s cannot compile the kernels (error %d): %s", name(), error, log.data());
    }

    // ----- launches
    Place place_of(const void* p) const {
        char* const address = static_cast<char*>(const_cast<void*>(p));
        auto after = buffers.upper_bound(address);
        if (!p || after == buffers.begin()) return {};
        const auto& [first, buffer] = *--after;
        const size_t at = size_t(address - first);
        return at < buffer.bytes ? Place{buffer.buffer, at} : Place{};
    }
    // Bytes out = in, each the host's or the device's. With an event, nobody waits and the host's side has to stay.
    void transfer(void* out, const void* in, size_t bytes, cl_event* event) {
        const Place to = place_of(out), from = place_of(in);
        const cl_bool waits = event ? CL_FALSE : CL_TRUE;
        if (to.buffer && from.buffer)
            CL(clEnqueueCopyBuffer(queue, from.buffer, to.buffer, from.at, to.at, bytes, 0, nullptr, event));
        else if (from.buffer)
            CL(clEnqueueReadBuffer(queue, from.buffer, waits, from.at, bytes, out, 0, nullptr, event));
        else CL(clEnqueueWriteBuffer(queue, to.buffer, waits, to.at, bytes, in, 0, nullptr, event));
        CL(event ? clFlush(queue) : clFinish(queue));
    }
    template <class T>
    void argument(cl_kernel kernel, cl_uint& i, T* p) {
        const Place place = place_of(p);
        if (p && !place.buffer) fail("OpenCL: argument %d of a kernel is an address of the host", i);
        const cl_ulong elements = place.at / sizeof(T);
        CL(clSetKernelArg(kernel, i++, sizeof(cl_mem), p ? &place.buffer : nullptr));
        CL(clSetKernelArg(kernel, i++, sizeof elements, &elements));
    }
    template <class T>
    void argument(cl_kernel kernel, cl_uint& i, const T& value) {
        CL(clSetKernelArg(kernel, i++, sizeof value, &value));
    }
    // A work-group of `items` for each place of the grid.
    template <class... A>
    void launch(std::array<size_t, 3> grid, size_t items, const char* name, const A&... arguments) {
        for (size_t& n : grid) n = std::max<size_t>(n, 1);
        cl_kernel& kernel = kernels[name];
        cl_int error = CL_SUCCESS;
        if (!kernel) kernel = clCreateKernel(program, name, &error);
        cl_check(error, name);
        cl_uint i = 0;
        (argument(kernel, i, arguments), ...);
        const size_t local[] = {items, 1, 1}, global[] = {grid[0] * items, grid[1], grid[2]};
        cl_check(clEnqueueNDRangeKernel(queue, kernel, 3, nullptr, global, local, 0, nullptr, nullptr), name);
    }
    // A work-item for each of `work`, which is the kernel's first argument, and some that have nothing to do.
    template <class... A>
    void over(size_t work, const char* name, const A&... arguments) {
        if (work) launch({(work + ITEMS - 1) / ITEMS}, ITEMS, name, cl_ulong(work), arguments...);
    }
    static void wait_for(cl_event& event) {
        if (!event) return;
        CL(clWaitForEvents(1, &event));
        clReleaseEvent(event);
        event = nullptr;
    }
    // Temporary memory that only grows. The queue is in order, so what was launched with the old one has its own hold.
    float* scratch(size_t number, size_t count) {
        float*& s = scratches[number];
        if (s && buffers[reinterpret_cast<char*>(s)].bytes >= count * sizeof(float)) return s;
        release(s);
        return s = allocate<float>(count);
    }

    // C [M, N] = A B^T (+ beta addend), element (row, k) of a factor by its strides, for `count` matrices
    void gemm(GemmSize s, float* C, In A, In B, In addend, Strides a, Strides b, Strides c, size_t count = 1,
              float beta = 1) {
        const auto tiles = [](int n) { return (size_t(n) + TILE - 1) / TILE; };
        launch({tiles(s.N), tiles(s.M), count}, 256, "gemm", C, A, B, addend, s.M, s.N, s.K, a, b, c, beta);
    }
    // [N + 1, C]: the embedding of the token before the first, or zeros, and those of the tokens
    In embeddings(const int32_t* tokens, In embed, int N, bool has_one_before, int C) {
        float* const rows = scratch(1, size_t(N + 1) * C);
        if (has_one_before) embedding_forward(rows, tokens - 1, embed, 1, C);
        else zero(rows, size_t(C));
        embedding_forward(rows + C, tokens, embed, N, C);
        return rows;
    }
    // out [C] += the sums over N rows of a, or of a x rstd: parts of PART_ROWS rows, then their sum
    void add_column_sums(float* out, In a, In x, In rstd, int N, int C) {
        const int parts = (N + PART_ROWS - 1) / PART_ROWS;
        const size_t across = (size_t(C) + ITEMS - 1) / ITEMS;
        float* const sums = scratch(4, size_t(parts) * C);
        launch({across, size_t(parts)}, ITEMS, "column_sums", sums, a, x, rstd, PART_ROWS, 0, N, C);
        launch({across}, ITEMS, "column_sums", out, sums, null, null, parts, 1, parts, C);
    }
    // Cosines [T, D/2], then sines.
    In rope_of(const NsaShape& s) {
        if (s.T == rope.positions && s.D == rope.D && s.rope_base == rope.base) return scratches[3];
        rope = {};
        rope.prepare(s);
        float* const table = scratch(3, 2 * rope.cosine.size());
        copy(table, std::as_const(rope.cosine).data(), rope.cosine.size());
        copy(table + rope.cosine.size(), std::as_const(rope.sine).data(), rope.sine.size());
        return table;
    }

    // `count` heads of each token, q's or a slot's; with a gain they are rows of RMSNorm between projection and RoPE.
    struct SomeHeads {
        float* heads;
        int column, count, length;
        bool is_turned;
    };
    void split_some(const SomeHeads& h, float* projected, In gain, float* dgain, const NsaShape& s, bool back) {
        const int P = s.projected(), D = s.D, rows = s.B * s.queries * h.count, width = h.count * D;
        const size_t size = size_t(rows) * D;
        const auto split = [&](float* from, int column, int row_width) {
            over(size, "split_heads", h.heads, from, rope_of(s), column, h.count, h.length, int(h.is_turned), int(back),
                 row_width, s);
        };
        if (!gain) return split(projected, h.column, P);
        float *const x = scratch(0, size), *const normed = scratch(1, size), *const rstd = scratch(2, rows + size);
        over(size, "pick_heads", x, projected, h.column, width, 0, P);
        rmsnorm_forward(normed, rstd, x, gain, rows, D);
        split(normed, 0, width);
        if (!back) return;
        float* const dx = rstd + rows;
        zero(dx, size);
        rmsnorm_backward(dx, dgain, normed, x, rstd, gain, rows, D);
        over(size, "pick_heads", dx, projected, h.column, width, 1, P);
    }
    void split_heads(const Heads& h, float* projected, In gains, float* dgains, const NsaShape& s, bool back = false) {
        const int P = s.projected();
        int column = s.H * s.D;
        split_some({h.q, 0, s.H, s.queries, true}, projected, gains, dgains, s, back);
        for (int slot = s.first_slot(); slot < HEAD_SLOTS; slot++, column += s.G * s.D)
            split_some({h.kv[slot], column, s.G, s.T, slot == K_SLC || slot == K_WIN}, projected,
                       s.gain_of(gains, slot), s.gain_of(dgains, slot), s, back);
        over(size_t(s.B) * s.queries * (P - column), "split_gates", h.gate, projected, column, int(back), P, s);
    }
};
static_assert(is_engine<OpenCl>);
using DeviceEngine = OpenCl;
