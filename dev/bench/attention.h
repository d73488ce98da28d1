// attention.h: test_device --perf-attention [options of train]: attention alone, from 2048 tokens to --seq-len (default
// 65536) at a constant number of tokens (--batch times --seq-len): everything between the input projection and the
// output projection, for NSA and for full attention, operation by operation, forward and backward. Runs on a GPU, or in
// emulation at a toy size, where only the arithmetic means something.
//
// A time is the median of CUDA-event timings after warm-up. Three sets of inputs take turns, each larger than any GPU's
// L2 cache (1.5 GB for 12 heads of 64 and 64k tokens), so nothing is found in the cache that training would not find
// there. Arithmetic and bytes are counted from the shapes (perf.h); ceilings are measured in the same run. The selected
// branch's cost depends on what neighbouring tokens have in common, so it is timed on three selections that are drawn:
// "uniform", as the published benchmark draws it (selections.h); "scattered", where neighbours share only what every
// query gets; and "shared", where 64 neighbours share three quarters of what they may choose, which is what trained
// models are like (dev/LOG.md); each by masked tiles and by gathered rows. The whole of NSA is reported for each.
//
// --shape published: one sequence of 1024 to 65536 tokens in the shape for which others have published times, which
// stand in dev/BENCHMARKS.md beside ours.
#pragma once
#include "../../nsa_kernels.cuh"
#include "perf.h"
#include "selections.h"

// The sums that a row is part of.
enum AttentionWhole { NSA_SHARED = 1, NSA_SCATTERED = 2, FULL = 4, NSA_UNIFORM = 8 };
constexpr const char *WHOLE_SHARED = "NSA, all of the above, shared",
                     *WHOLE_SCATTERED = "NSA, all of the above, scattered",
                     *WHOLE_UNIFORM = "NSA, all of the above, uniform", *WHOLE_FULL = "full attention, all of it";
struct AttentionRow {
    int T, B;
    std::string name;
    Work work[2];              // forward, backward
    int whole[2] = {0, 0};     // of each pass: sum of AttentionWhole
    double us[2] = {0, 0};     // 0: there is no such pass
    double floor[2] = {0, 0};  // microseconds at the measured ceilings; of a whole: the sum of its rows'
};

// Every array that attention reads and writes, as in Activations.
struct AttentionSet {
    using real = Cuda::real;
    Timed<Cuda>& dev;
    const NsaShape s;
    real *projected, *dprojected, *q, *kv, *compressed, *hidden, *o, *combined, *dout, *dkv, *dcompressed, *phi;
    float *lse, *lse_gated, *row_dot, *gate, *dgate, *dq, *dphi;
    uint32_t *shared, *scattered, *uniform, *chosen;

    AttentionSet(Timed<Cuda>& device, const NsaShape& shape, uint64_t seed) : dev(device), s(shape) {
        const size_t rows = s.query_rows(), D = size_t(s.D), keys = s.key_rows(),
                     words = size_t(s.B) * s.G * s.T * size_t(s.selection_words()), blocks = s.cmp_rows(),
                     F = size_t(s.F);
        std::vector<float> pool(size_t(1) << 16), values;
        for (size_t i = 0; i < pool.size(); i++)
            pool[i] = float(random_normal(seed, random_stream(RANDOM_TEST, 90), i));
        auto filled = [&](size_t count, size_t stride,
                          double scale) {  // numbers from the pool, in a different order for each array
            values.resize(count);
#pragma omp parallel for schedule(static)
            for (size_t i = 0; i < count; i++)
                values[i] = float(scale) * pool[(i * stride + (i >> 16) * 40503) & 0xFFFF];
            real* p = dev.allocate<real>(count);
            dev.from_host(p, values.data(), count);
            return p;
        };
        const size_t projections = size_t(s.B) * s.T * size_t(s.projected());
        projected = filled(projections, 1, 1), dout = filled(rows * D, 3, 1);
        phi = filled(2 * phi_size(), 5, 1 / std::sqrt(double(s.l) * s.D));
        for (auto [p, count] :
             {std::pair(&dprojected, projections), std::pair(&q, rows * D), std::pair(&kv, 6 * keys * D),
              std::pair(&compressed, 2 * blocks * D), std::pair(&hidden, 2 * blocks * F), std::pair(&o, 3 * rows * D),
              std::pair(&combined, rows * D), std::pair(&dkv, 6 * keys * D), std::pair(&dcompressed, 2 * blocks * D)})
            *p = dev.allocate<real>(count);
        for (float** p : {&lse, &lse_gated, &row_dot, &gate, &dgate}) *p = dev.allocate<float>(3 * rows);
        dq = dev.allocate<float>(rows * D), dphi = dev.allocate<float>(2 * phi_size());
        dev.zero(dq, rows * D), dev.zero(row_dot, 3 * rows), dev.zero(dphi, 2 * phi_size());
        for (uint32_t** p : {&shared, &scattered, &uniform, &chosen}) *p = dev.allocate<uint32_t>(words);
        dev.copy(shared, forced_selection(s, seed, 3, 4).data(), words);
        dev.copy(scattered, forced_selection(s, seed, 0, 1).data(), words);
        dev.copy(uniform, uniform_selection(s, seed).data(), words);
    }
    ~AttentionSet() {
        for (real* p : {projected, dprojected, q, kv, compressed, hidden, o, combined, dout, dkv, dcompressed, phi})
            dev.release(p);
        for (float* p : {lse, lse_gated, row_dot, gate, dgate, dq, dphi}) dev.release(p);
        for (uint32_t* p : {shared, scattered, uniform, chosen}) dev.release(p);
    }
    AttentionSet(const AttentionSet&) = delete;
    AttentionSet& operator=(const AttentionSet&) = delete;

    real* key(int slot) const { return kv + size_t(slot) * s.key_rows() * s.D; }
    real* dkey(int slot) const { return dkv + size_t(slot) * s.key_rows() * s.D; }
    Cuda::Heads heads() const { return {q, {key(0), key(1), key(2), key(3), key(4), key(5)}, gate}; }
    Cuda::HeadGradients head_gradients() const {
        return {dev.wants_dq(s) ? dq : nullptr, {dkey(0), dkey(1), dkey(2), dkey(3), dkey(4), dkey(5)}, dgate};
    }
    LayerInputs<real, float> inputs(const uint32_t* selection, const NsaShape& shape) const {
        const size_t v = s.cmp_rows() * size_t(s.D);
        return {q,
                {compressed, key(K_SLC), key(K_WIN)},
                {compressed + v, key(V_SLC), key(V_WIN)},
                selection,
                dout,
                o,
                shape.window_only ? nullptr : gate,
                lse};
    }
    // The backward pass of one branch of this shape, with its row terms where the kernels compute them themselves. dq:
    // whether to store that instead of q's columns of dprojected.
    void branch_backward(Branch b, const uint32_t* selection, const NsaShape& shape, bool stores_dq = false) {
        const size_t v = s.cmp_rows() * size_t(s.D), at = size_t(shape.branch_slot(b)) * shape.query_rows();
        const LayerGradients<real, float> d = {dprojected,
                                               stores_dq ? dq : nullptr,
                                               {dcompressed, dkey(K_SLC), dkey(K_WIN)},
                                               {dcompressed + v, dkey(V_SLC), dkey(V_WIN)},
                                               dgate,
                                               row_dot,
                                               lse_gated};
        const LayerInputs<real, float> in = inputs(selection, shape);
#ifndef PRECISION_FP32
        if (!dev.plain_attention) return dev.backward_on_tensor_cores(1u << b, d, in, shape);
#endif
        dev.Cuda::attention_backward(b, {dq, b != WIN, d.dk[b], d.dv[b], dout, row_dot + at, lse + at},
                                     {q, in.k[b], in.v[b], selection}, shape);
    }
    // The compressors: fc1, bias, fc2 of keys, then of values, each in whole 256 bytes, as in the model.
    size_t phi_part(size_t count) const { return (count + 127) / 128 * 128; }
    size_t phi_size() const {
        return phi_part(size_t(s.F) * s.l * s.D) + phi_part(size_t(s.F)) + phi_part(size_t(s.D) * s.F);
    }
    template <class T>
    PhisOf<T> phis_at(T* p) const {
        T *const bias = p + phi_part(size_t(s.F) * s.l * s.D), *const fc2 = bias + phi_part(size_t(s.F));
        return {{p, bias, fc2}, {p + phi_size(), bias + phi_size(), fc2 + phi_size()}};
    }
};

// One length: every operation of NSA of shape s, then of full attention of the same shape.
inline std::vector<AttentionRow> time_attention(Timed<Cuda>& dev, const NsaShape& s, const Ceilings& ceilings,
                                                int set_count, int repetitions, std::FILE* out) {
    std::vector<std::unique_ptr<AttentionSet>> sets;
    for (int i = 0; i < set_count; i++) sets.push_back(std::make_unique<AttentionSet>(dev, s, uint64_t(i + 1)));
    std::vector<AttentionRow> rows;
    const size_t n = s.query_rows(), D = size_t(s.D), kc = s.cmp_rows() * D;
    const double real = sizeof(Cuda::real);
    constexpr int NSA = NSA_SHARED | NSA_SCATTERED | NSA_UNIFORM;
    // The engine's own functions, without the clocks of Timed. The sets take turns; each is used once to warm up.
    auto time = [&](auto operation) {
        for (auto& set : sets) operation(*set);
        return 1e6 * dev.median_seconds(repetitions, [&](size_t i) { operation(*sets[i % sets.size()]); });
    };
    auto add = [&](const std::string& name, const Work& forward, const Work& backward, int whole) -> AttentionRow& {
        rows.push_back({s.T, s.B, name, {forward, backward}, {whole, whole}});
        for (int pass = 0; pass < 2; pass++)
            rows.back().floor[pass] = 1e6 * ceilings.floor(rows.back().work[pass].flops, rows.back().work[pass].bytes);
        return rows.back();
    };
    auto add_whole = [&](const std::string& name, AttentionWhole whole) {
        AttentionRow total{s.T, s.B, name, {}};
        for (const AttentionRow& row : rows)
            for (int pass = 0; pass < 2; pass++) {
                if (!(row.whole[pass] & whole)) continue;
                total.us[pass] += row.us[pass], total.floor[pass] += row.floor[pass];
                total.work[pass].flops += row.work[pass].flops, total.work[pass].bytes += row.work[pass].bytes;
            }
        rows.push_back(total);
    };
    auto split_heads_forward = [&](const NsaShape& shape) {
        return time([&](AttentionSet& x) { dev.Cuda::split_heads_forward(x.heads(), x.projected, nullptr, shape); });
    };
    auto split_heads_backward = [&](const NsaShape& shape) {
        return time([&](AttentionSet& x) {
            dev.Cuda::split_heads_backward(x.dprojected, nullptr, x.head_gradients(), nullptr, shape);
        });
    };
    // k, v: keys and values of this branch; dk, dv: their gradients
    auto branch = [&](const std::string& name, Branch b, const NsaShape& shape, uint32_t* AttentionSet::*selection,
                      int whole) {
        AttentionRow& row = add(name, attention_forward_work(b, shape, real),
                                dev.plain_attention ? attention_backward_work(b, shape, real)
                                                    : branches_backward_work(shape, real, 1u << b),
                                whole);
        auto selected = [&](AttentionSet& x) { return selection ? x.*selection : nullptr; };
        auto k = [&](AttentionSet& x) { return b == CMP ? x.compressed : x.key(b == SLC ? K_SLC : K_WIN); };
        const size_t v = b == CMP ? kc : s.key_rows() * D;
        const size_t at = size_t(shape.branch_slot(b)) * n;
        row.us[0] = time([&](AttentionSet& x) {
            dev.Cuda::attention_forward(b, x.o + at * D, x.lse + at, x.q, k(x), k(x) + v, selected(x), shape);
        });
        row.us[1] = time([&](AttentionSet& x) { x.branch_backward(b, selected(x), shape); });
        if (b != CMP && !dev.plain_attention) row.whole[0] = 0;  // the next row has what a step launches
    };
    // What a step launches in place of the selected branch, the window and the gated sum by themselves.
    auto together = [&](const std::string& name, const NsaShape& shape, uint32_t* AttentionSet::*selection, int whole) {
        if (dev.plain_attention) return;
        AttentionRow& row = add(name, attend_and_combine_work(shape, real), {}, whole);
        row.us[0] = time([&](AttentionSet& x) {
            dev.Cuda::attend_and_combine({x.combined, x.o, x.lse}, x.inputs(selection ? x.*selection : nullptr, shape),
                                         shape);
        });
    };
    auto sum = [&](const std::string& name, const NsaShape& shape, int whole) {
        AttentionRow& row = add(name, combine_forward_work(shape, real),
                                dev.plain_attention ? attention_backward_rows_work(shape, real) : Work{}, whole);
        row.us[0] = time([&](AttentionSet& x) { dev.Cuda::combine_forward(x.combined, x.o, x.gate, shape); });
        if (!dev.plain_attention) {  // the kernels of the branches make the row terms
            row.whole[0] = 0;
            return;
        }
        row.us[1] = time([&](AttentionSet& x) {
            dev.Cuda::attention_backward_rows(x.row_dot, x.lse_gated, x.dgate, x.dout, x.o, x.gate, x.lse, shape);
        });
    };

    // Gradients of heads and of compressed blocks exist only after the backward passes of the branches.
    const double split = split_heads_forward(s);
    const double compressed = time([&](AttentionSet& x) {
        dev.Cuda::compress_forward(x.compressed, x.hidden, x.key(K_CMP), x.key(V_CMP), x.phis_at(x.phi), s);
    });
    branch("compressed", CMP, s, nullptr, NSA);
    add("scores and choice", select_blocks_work(s, real), {}, NSA).us[0] =
        time([&](AttentionSet& x) { dev.Cuda::select_blocks(x.chosen, nullptr, x.q, x.compressed, x.lse, s); });
    const SelectedKernel asked = dev.selected_kernel;
    struct Kind {
        std::string name;
        uint32_t* AttentionSet::*selection;
        AttentionWhole whole;
    };
    const Kind kinds[] = {{"uniform", &AttentionSet::uniform, NSA_UNIFORM},
                          {"scattered", &AttentionSet::scattered, NSA_SCATTERED},
                          {"shared", &AttentionSet::shared, NSA_SHARED}};
    for (const auto& [kind, selection, whole] : kinds) {
        for (const SelectedKernel kernel : {SelectedKernel::TILES, SelectedKernel::GATHER}) {
            dev.selected_kernel = kernel;
            branch("selected, " + kind + (kernel == SelectedKernel::TILES ? ", tiles" : ", gathered"), SLC, s,
                   selection, 0);
        }
        dev.selected_kernel = SelectedKernel::AUTO;
        branch("selected, " + kind + ", auto", SLC, s, selection, whole);
        together("selected, " + kind + ", window, sum", s, selection, whole);
        print_to(out, "T %d, %s: %s\n", s.T, kind, dev.describe_selected(s));
    }
    dev.selected_kernel = asked;
    branch("window", WIN, s, nullptr, NSA);
    sum("gated sum", s, NSA);
    AttentionRow& phi =
        add("phi of keys and values", compress_forward_work(s, real), compress_backward_work(s, real), NSA);
    phi.us[0] = compressed;
    phi.us[1] = time([&](AttentionSet& x) {
        dev.Cuda::compress_backward(x.dkey(K_CMP), x.dkey(V_CMP), x.phis_at(x.dphi), x.dcompressed, x.hidden,
                                    x.key(K_CMP), x.key(V_CMP), x.phis_at(x.phi), s);
    });
    AttentionRow& heads = add("split and rotated heads", split_heads_forward_work(s, real),
                              split_heads_backward_work(s, real, dev.wants_dq(s)), NSA);
    heads.us[0] = split, heads.us[1] = split_heads_backward(s);
    add_whole(WHOLE_UNIFORM, NSA_UNIFORM), add_whole(WHOLE_SCATTERED, NSA_SCATTERED);
    add_whole(WHOLE_SHARED, NSA_SHARED);

    NsaShape full = s;
    full.window_only = full.sees_all = true;
    const double full_split = split_heads_forward(full);
    branch("full: attention", WIN, full, nullptr, FULL);
    sum("full: merged heads", full, FULL);
    together("full: attention, merged heads", full, nullptr, FULL);
    AttentionRow& full_heads = add("full: split and rotated heads", split_heads_forward_work(full, real),
                                   split_heads_backward_work(full, real, dev.wants_dq(full)), FULL);
    full_heads.us[0] = full_split, full_heads.us[1] = split_heads_backward(full);
    add_whole(WHOLE_FULL, FULL);
    return rows;
}

// Prints the rows of one length and their result lines.
inline void print_attention_rows(const std::vector<AttentionRow>& rows, const NsaShape& s, const Ceilings& ceilings,
                                 std::FILE* out) {
    print_to(out, "\n%7s %4s %-32s %-9s %11s %11s %11s %11s %9s %7s %9s %7s\n", "T", "B", "operation", "pass", "us",
             "floor us", "GFLOP", "MB", "TFLOP/s", "of peak", "GB/s", "of peak");
    for (const AttentionRow& row : rows)
        for (int pass = 0; pass < 2; pass++) {
            if (row.us[pass] <= 0) continue;
            const double seconds = row.us[pass] * 1e-6, flops = row.work[pass].flops / seconds,
                         bytes = row.work[pass].bytes / seconds;
            print_to(out, "%7d %4d %-32s %-9s %11.1f %11.1f %11.6g %11.6g %9.2f %6.1f%% %9.1f %6.1f%%\n", row.T, row.B,
                     row.name, pass ? "backward" : "forward", row.us[pass], row.floor[pass],
                     row.work[pass].flops * 1e-9, row.work[pass].bytes * 1e-6, flops * 1e-12,
                     100 * flops / ceilings.flops_per_second, bytes * 1e-9, 100 * bytes / ceilings.bytes_per_second);
        }
    auto named = [&](const char* name) {
        return &*std::find_if(rows.begin(), rows.end(), [&](const AttentionRow& r) { return r.name == name; });
    };
    const AttentionRow &full = *named(WHOLE_FULL), &shared = *named(WHOLE_SHARED);
    const std::pair<const AttentionRow*, const char*> others[] = {{named(WHOLE_UNIFORM), "uniform"},
                                                                  {named(WHOLE_SCATTERED), "scattered"}};
    for (const auto& [row, name] : {others[0], others[1], std::pair(&shared, "shared")})
        print_to(out, "        NSA / full attention, %s: %.2f forward, %.2f backward\n", name, row->us[0] / full.us[0],
                 row->us[1] / full.us[1]);
    const std::string shape = format_text("%d x %d, %d heads in %d groups of dimension %d", s.B, s.T, s.H, s.G, s.D);
    for (const bool dense : {false, true})
        for (const int pass : {0, 1}) {
            const AttentionRow& row = dense ? full : shared;
            std::string ratio;
            if (!dense) ratio = format_text(", %.2f of full attention", row.us[pass] / full.us[pass]);
            for (const auto& [other, name] : others)
                if (!dense)
                    ratio += format_text("; selection %s: %.1f us, %.2f", name, other->us[pass],
                                         other->us[pass] / full.us[pass]);
            print_to(out,
                     "result: attention, %s, %d x %d: %s | %.1f | us | %s%s; floor %.1f us at the measured ceilings\n",
                     dense ? "full" : "NSA", s.B, s.T, pass ? "backward" : "forward", row.us[pass], shape, ratio,
                     row.floor[pass]);
        }
    std::fflush(out);
}

// Lengths first_length, twice that, ... c.seq_len, of c.batch * c.seq_len tokens each, or of one sequence each; the
// report goes to `out`.
inline std::vector<AttentionRow> run_attention(Timed<Cuda>& dev, const Config& c, int first_length, int set_count,
                                               int repetitions, int ceiling_size, std::FILE* out,
                                               bool one_sequence = false) {
    const Ceilings ceilings = measure_ceilings(dev, ceiling_size);
    print_to(out, "attention of one layer, %s%d tokens%s, %d heads in %d groups of dimension %d, on %s\n",
             one_sequence ? "one sequence of at most " : "", c.batch * c.seq_len, one_sequence ? "" : " in all",
             c.heads, c.kv_groups, c.head_dim, dev.describe());
    ceilings.print(out);
    print_to(out,
             "floor: the longer of FLOPs at the first ceiling and bytes at the second; of a whole: the sum of its "
             "rows' floors\n");
    std::vector<AttentionRow> all;
    for (int64_t T = first_length; T <= c.seq_len; T *= 2) {
        const NsaShape s = shape_of(c, one_sequence ? 1 : c.batch * c.seq_len / T, T);
        const std::vector<AttentionRow> rows = time_attention(dev, s, ceilings, set_count, repetitions, out);
        print_attention_rows(rows, s, ceilings, out);
        all.insert(all.end(), rows.begin(), rows.end());
    }
    print_last_ceilings(dev, format_text("attention, %d tokens", c.batch * c.seq_len), ceilings, ceiling_size, out);
    return all;
}
// Whether the words say --shape published, which it takes out of them.
inline bool take_published_shape(std::vector<const char*>& words) {
    const auto at = std::find_if(words.begin(), words.end(), [](const char* w) { return !std::strcmp(w, "--shape"); });
    if (at == words.end()) return false;
    if (at + 1 == words.end() || std::strcmp(at[1], "published")) fail_usage("--shape: expected published");
    words.erase(at, at + 2);
    return true;
}
// The shape for which others have published times: of one sequence.
inline void apply_published_shape(Config& c) {
    for (const char* option :
         {"batch", "heads", "kv-groups", "head-dim", "cmp-block", "cmp-stride", "slc-block", "slc-count", "window"})
        if (c.is_given(option)) fail_usage("--shape published decides --%s; leave one of them out", option);
    c.heads = 64, c.kv_groups = 4, c.head_dim = 128;
    c.cmp_block = 32, c.cmp_stride = 16, c.slc_block = 64, c.slc_count = 16, c.window = 512;
}
inline int run_attention_bench(int argc, const char* const* argv) {
    std::vector<const char*> words(argv, argv + argc);
    const bool published = take_published_shape(words);
    Config c = parse_options(int(words.size()), words.data());
    if (!c.is_given("model")) c.model = "125m";
    apply_preset(c);
    if (!c.is_given("seq-len")) c.seq_len = 65536;
    if (!c.is_given("batch")) c.batch = 1;
    if (published) apply_published_shape(c);
    validate_model(c, "options");
    World world;
    if (!choose_device(c, world, search_gpus()).gpu)
        fail("--perf-attention: there is no GPU to time attention on (or the build holds no CUDA engine)");
    Timed<Cuda> dev(0);
    run_attention(dev, c, published ? 1024 : 2048, 3, 15, 0, stdout, published);
    return 0;
}
