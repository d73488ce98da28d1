// row_tests.h: memory, and the operations that work row by row, of every engine against the oracles of oracle.h.
#pragma once
#include "../engines.h"

ENGINE_TEST(memory) {
    using Value = typename E::Value;
    const auto dev = E::open();
    dev->poison = true;
    Value* fresh = dev->template allocate<Value>(1001);
    CHECK(size_t(fresh) % E::ALIGNMENT == 0);
    typename E::Values found(1001);
    const auto download = [&](const Value* from) { dev->copy(found.data(), from, found.size()); };
    download(fresh);
    for (const Value& x : found) CHECK(std::isnan(x));
    dev->zero(fresh, size_t(1000));
    download(fresh);
    for (size_t i = 0; i < 1000; i++) CHECK_EQUAL(found[i], Value(0));
    CHECK(std::isnan(found[1000]));
    dev->zero(fresh + 1, size_t(0));

    Random random(1);
    const std::vector<Value> values = E::random_values(random, 1001);
    Stats<E> a(*dev, values), b(*dev, values.size());
    dev->copy(b.data, static_cast<const Value*>(a.data), values.size());  // from device to device
    CHECK_SAME_BITS(b.host().data(), values.data(), values.size());
    std::vector<Value> reused = values;
    dev->copy(a.data, static_cast<const Value*>(reused.data()), reused.size());
    std::fill(reused.begin(), reused.end(), Value(0));  // the copy is done
    CHECK_SAME_BITS(a.host().data(), values.data(), values.size());

    const std::vector<float> numbers(values.begin(), values.end());  // converted to the nearest
    std::vector<float> back(numbers.size());
    Reals<E> reals(*dev, numbers.size());
    dev->from_host(reals.data, numbers.data(), numbers.size());
    dev->to_host(back.data(), reals.data, back.size());
    for (size_t i = 0; i < back.size(); i++) CHECK_EQUAL(back[i], float(E::as_real(numbers[i])));
    dev->release(fresh);
}

template <class E>
void check_embedding(int N, int C, int V) {
    const auto dev = E::open();
    Random random(10);
    std::vector<int32_t> tokens(static_cast<size_t>(N));
    for (int n = 0; n < N; n++)  // one token is frequent, some are missing
        tokens[size_t(n)] = n == 0 ? V - 1 : n < N / 3 ? 2 : random.below(V);
    const auto embed = E::random_reals(random, size_t(V) * C), dx = E::random_reals(random, size_t(N) * C),
               dembed = E::random_values(random, embed.size());
    const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
        Reals<E> e(*dev, embed), x(*dev, size_t(N) * C), d(*dev, dx);
        Stats<E> de(*dev, dembed);
        const Array<E, int32_t> t(*dev, tokens);
        dev->embedding_forward(x, t, e, N, C);
        dev->embedding_backward(de, d, t, N, C);
        return {x.host(), de.host()};
    });
    std::vector<typename E::Sum> sums(dembed.size());
    for (size_t i = 0; i < sums.size(); i++) sums[i].add(dembed[i]);
    for (size_t n = 0; n < size_t(N); n++) {
        CHECK_SAME_BITS(&outputs[0][n * C], &embed[size_t(tokens[n]) * C], size_t(C));
        for (size_t c = 0; c < size_t(C); c++) sums[size_t(tokens[n]) * C + c].add(dx[n * C + c]);
    }
    CHECK_ARRAY(outputs[1], oracle::numbers(sums), V, C);
}
ENGINE_TEST(embedding) {
    for (const auto& [N, C, V] : {std::array<int, 3>{1, 8, 5}, {300, 24, 30}, {513, 7, 100}, {255, 1032, 9}})
        check_embedding<E>(N, C, V);
    for (const int C : {1, 63, 64, 65, 130}) check_embedding<E>(200, C, 30);
}

template <class E>
void check_rmsnorm(int N, int C) {
    using Num = typename E::Num;
    using Value = typename E::Value;
    const auto dev = E::open();
    Random random(20);
    auto x = E::random_reals(random, size_t(N) * C);
    const auto dx = E::random_reals(random, x.size()), dout = E::random_reals(random, x.size()),
               weight = E::random_reals(random, size_t(C)), dweight = E::random_values(random, size_t(C));
    // Rows of every scale around sqrt(epsilon) = 1e-3, and a row of zeros: there epsilon decides.
    const double scales[] = {1, 1e-3, 1e3, 0};
    for (size_t i = 0; i < x.size(); i++) x[i] = E::as_real(x[i] * scales[i / C % 4]);
    const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
        Reals<E> in(*dev, x), w(*dev, weight), out(*dev, x.size()), d(*dev, dout), din(*dev, dx);
        Stats<E> rstd(*dev, size_t(N)), dw(*dev, dweight);
        dev->rmsnorm_forward(out, rstd, in, w, N, C);
        dev->rmsnorm_backward(din, dw, d, in, rstd, w, N, C);
        return {out.host(), rstd.host(), din.host(), dw.host()};
    });
    typename E::Nums expected, expected_rstd, expected_dx;
    std::vector<typename E::Sum> sums(static_cast<size_t>(C));
    for (int c = 0; c < C; c++) sums[size_t(c)].add(dweight[size_t(c)]);
    for (int n = 0; n < N; n++) {
        const Value *row = &x[size_t(n) * C], *drow = &dout[size_t(n) * C];
        const oracle::Normed<Value> normed = oracle::rmsnorm<Value>(row, weight.data(), C);
        const auto gradient = oracle::rmsnorm_dx<Value>(drow, row, normed.rstd, weight.data(), C);
        expected_rstd.push_back(normed.rstd);
        for (int c = 0; c < C; c++) {
            expected.push_back(E::stored(normed.out[size_t(c)]));
            expected_dx.push_back(E::stored(Num(dx[size_t(n) * C + c]) + gradient[size_t(c)]));
            sums[size_t(c)].add(Num(drow[c]) * Num(row[c]) * normed.rstd);
        }
    }
    CHECK_ARRAY(outputs[0], expected, N, C);
    CHECK_ARRAY(outputs[1], expected_rstd);
    CHECK_ARRAY(outputs[2], expected_dx, N, C);
    CHECK_ARRAY(outputs[3], oracle::numbers(sums));
}
ENGINE_TEST(rmsnorm) {
    for (const int C : {1, 2, 63, 64, 65, 264, 768}) check_rmsnorm<E>(18, C);
    for (const auto& [N, C] : {std::array<int, 2>{1, 1}, {9, 8}, {37, 63}, {150, 24}, {3, 1032}, {5, 333}})
        check_rmsnorm<E>(N, C);
    // dweight is summed in parts: of 64 rows on the CPU, of more than 8 on a GPU that has very many rows, whose warps
    // take one after the other; wide rows have fewer warps, and the widest more shared memory than is there unasked
    const int shapes[][2] = {{64, 33},          {200, 33},  {129, 20}, {512 * 8 + 5, 8},
                             {512 * 24 + 7, 8}, {23, 2056}, {3, 12296}};
    for (const auto& [N, C] : shapes) check_rmsnorm<E>(N, C);
}

// The smear of B sequences, or of one whose first `first` tokens are not asked for.
template <class E>
void check_smear(int B, int T, int first, int C, int V) {
    using Num = typename E::Num;
    const auto dev = E::open();
    Random random(25);
    NsaShape s;
    s.B = B, s.T = T, s.first = first, s.queries = T - first;
    const size_t N = size_t(B) * s.queries, width = size_t(C);
    std::vector<int32_t> tokens(size_t(B) * T);
    for (int32_t& t : tokens) t = random.below(V);
    const auto embed = E::random_reals(random, V * width), gate = E::random_reals(random, width, 0.3),
               scale = E::random_reals(random, width), x = E::random_reals(random, N * width),
               dgate = E::random_values(random, width), dscale = E::random_values(random, width);
    const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
        Reals<E> e(*dev, embed), u(*dev, gate), by(*dev, scale), smeared(*dev, x), dx(*dev, x), de(*dev, x.size());
        Stats<E> du(*dev, dgate), dby(*dev, dscale);
        const Array<E, int32_t> t(*dev, tokens);
        const SmearOf<typename E::Real> weights{u, by};
        dev->smear_forward(smeared, t + first, e, weights, s, C);
        if (first > 0) return {smeared.host()};
        dev->smear_backward(de, {du, dby}, dx, t, e, weights, s, C);
        return {smeared.host(), de.host(), du.host(), dby.host()};
    });
    typename E::Nums expected(x.begin(), x.end()), de = expected;
    std::vector<typename E::Sum> du(width), dby(width);
    for (size_t c = 0; c < width; c++) du[c].add(dgate[c]), dby[c].add(dscale[c]);
    for (size_t n = 0; n < N; n++) {
        const size_t at = size_t(first) + n;
        if (at % T == 0) continue;  // nothing stands before it
        const auto *e = &embed[tokens[at] * width], *before = &embed[tokens[at - 1] * width], *dx = &x[n * width];
        typename E::Sum logit, along;
        for (size_t c = 0; c < width; c++) {
            logit.add(Num(gate[c]) * Num(e[c]));
            along.add(Num(dx[c]) * Num(scale[c]) * Num(before[c]));
        }
        const Num g = oracle::sigmoid(Num(logit)), dz = Num(along) * g * (Num(1) - g);
        for (size_t c = 0; c < width; c++) {
            expected[n * width + c] = expected[n * width + c] + g * Num(scale[c]) * Num(before[c]);
            de[n * width + c] = de[n * width + c] + dz * Num(gate[c]);
            if (n > 0) de[(n - 1) * width + c] = de[(n - 1) * width + c] + g * Num(scale[c]) * Num(dx[c]);
            du[c].add(dz * Num(e[c]));
            dby[c].add(g * Num(dx[c]) * Num(before[c]));
        }
    }
    CHECK_ARRAY(outputs[0], E::stored(expected), int(N), C);
    if (first > 0) return;
    CHECK_ARRAY(outputs[1], E::stored(de), int(N), C);
    CHECK_ARRAY(outputs[2], oracle::numbers(du));
    CHECK_ARRAY(outputs[3], oracle::numbers(dby));
}
ENGINE_TEST(smear) {
    for (const auto& [B, T, C] : {std::array<int, 3>{1, 1, 8}, {2, 3, 1}, {3, 25, 24}, {1, 70, 65}, {2, 9, 1032}}) {
        check_smear<E>(B, T, 0, C, 11);
        if (B == 1 && T > 1)
            for (const int first : {1, T / 2, T - 1}) check_smear<E>(B, T, first, C, 11);
    }
}

template <class E>
void check_matmul(typename E::Dev& dev, int N, int C, int OC) {
    using Num = typename E::Num;
    if (C % E::COLUMNS || OC % E::COLUMNS) return;
    Random random(30);
    const auto inp = E::random_reals(random, size_t(N) * C), weight = E::random_reals(random, size_t(OC) * C),
               residual = E::random_reals(random, size_t(N) * OC), dout = E::random_reals(random, residual.size()),
               dweight = E::random_values(random, weight.size());
    const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
        Reals<E> in(dev, inp), w(dev, weight), r(dev, residual), out(dev, residual.size()), sum(dev, residual.size()),
            d(dev, dout), din(dev, inp.size());
        Stats<E> dw(dev, dweight);
        dev.matmul_forward(out, in, w, nullptr, N, C, OC);
        dev.matmul_forward(sum, in, w, r, N, C, OC);
        dev.matmul_backward_input(din, d, w, N, C, OC);
        dev.matmul_backward_weight(dw, d, in, N, C, OC);
        CHECK_SAME_BITS(r.host().data(), residual.data(), residual.size());
        return {out.host(), sum.host(), din.host(), dw.host()};
    });
    std::vector<typename E::Sum> out(residual.size()), din(inp.size()), dw(weight.size());
    for (size_t i = 0; i < dw.size(); i++) dw[i].add(dweight[i]);
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++)
            for (int c = 0; c < C; c++) {
                const Num x(inp[size_t(n) * C + c]), w(weight[size_t(o) * C + c]), d(dout[size_t(n) * OC + o]);
                out[size_t(n) * OC + o].add(x * w);
                din[size_t(n) * C + c].add(d * w);
                dw[size_t(o) * C + c].add(d * x);
            }
    CHECK_ARRAY(outputs[0], E::stored(oracle::numbers(out)), N, OC);
    for (size_t i = 0; i < out.size(); i++) out[i].add(residual[i]);
    CHECK_ARRAY(outputs[1], E::stored(oracle::numbers(out)), N, OC);
    CHECK_ARRAY(outputs[2], E::stored(oracle::numbers(din)), N, C);
    CHECK_ARRAY(outputs[3], oracle::numbers(dw), OC, C);
}
ENGINE_TEST(matmul) {
    const auto dev = E::open();
    const int shapes[][3] = {{1, 1, 1}, {33, 70, 130}, {130, 33, 65}, {1, 257, 66},
                             {1, 8, 8}, {33, 72, 136}, {130, 40, 24}, {1, 264, 64}};
    for (const auto& [N, C, OC] : shapes) check_matmul<E>(*dev, N, C, OC);
}

// Muon's products: of several matrices, with what is added multiplied by a factor.
template <class E>
void check_muon_product(typename E::Dev& dev) {
    const int count = 3, M = 24, N = 72, K = 40;
    const float beta = -1.75f;
    Random random(34);
    const auto x = E::random_reals(random, size_t(count) * M * K), y = E::random_reals(random, size_t(count) * N * K),
               addend = E::random_reals(random, size_t(count) * M * N);
    for (const bool transposed : {false, true}) {
        const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
            Reals<E> a(dev, x), b(dev, y), c(dev, addend), out(dev, addend.size()), sum(dev, addend.size());
            dev.muon_product(out, a, b, transposed, nullptr, 0, count, M, N, K);
            dev.muon_product(sum, a, b, transposed, c, double(beta), count, M, N, K);
            return {out.host(), sum.host()};
        });
        std::vector<typename E::Sum> out(addend.size()), sum(addend.size());
        for (size_t i = 0; i < out.size(); i++) {
            const size_t k = i / size_t(M * N), m = i / N % M, n = i % N;
            for (size_t j = 0; j < size_t(K); j++) {
                const typename E::Num left(x[(k * M + m) * K + j]),
                    right(y[k * N * K + (transposed ? n * K + j : j * N + n)]);
                out[i].add(left * right);
                sum[i].add(left * right);
            }
            sum[i].add(typename E::Num(beta) * typename E::Num(addend[i]));
        }
        CHECK_ARRAY(outputs[0], E::stored(oracle::numbers(out)), count * M, N);
        CHECK_ARRAY(outputs[1], E::stored(oracle::numbers(sum)), count * M, N);
    }
}
ENGINE_TEST(muon_product) { check_muon_product<E>(*E::open()); }

ENGINE_TEST(silu) {
    using Num = typename E::Num;
    const auto dev = E::open();
    for (const size_t count : {size_t(1024), size_t(1023), size_t(2051)}) {  // whole 16 bytes, or not
        Random random(40);
        auto x = E::random_reals(random, count, 3);
        const auto dout = E::random_reals(random, count);
        for (size_t i = 0; i < 400; i++) x[i] = E::as_real(-100 + 0.5 * double(i));
        x[400] = 0, x[401] = 1000, x[402] = -1000, x[403] = E::as_real(-0.0);
        const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
            Reals<E> in(*dev, x), out(*dev, count), d(*dev, dout), din(*dev, count);
            dev->silu_forward(out, in, count);
            dev->silu_backward(din, d, in, count);
            dev->silu_backward(d, d, in, count);  // in place of dout
            CHECK_SAME_BITS(d.host().data(), din.host().data(), count);
            return {out.host(), din.host()};
        });
        typename E::Nums expected, expected_dx;
        for (size_t i = 0; i < count; i++) {
            Num silu = oracle::silu(Num(x[i])), slope = oracle::silu_slope(Num(x[i]));
            // Where e^-x leaves the format the sigmoid is 0, or as small as the engine's becomes.
            const double end =
                E::SIGMOID_AT_LEAST > 0 ? (E::SIGMOID_AT_LEAST + Num::tiny) * std::fabs(double(x[i])) : 0;
            if (x[i] < -80) silu.error += end, slope.error += end;
            const bool vanishes = x[i] < -700;
            expected.push_back(vanishes ? Num(0, end) : E::stored(silu));
            expected_dx.push_back(vanishes ? Num(0, end * std::fabs(double(dout[i])))
                                           : E::stored(Num(dout[i]) * slope));
        }
        CHECK_ARRAY(outputs[0], expected);
        CHECK_ARRAY(outputs[1], expected_dx);
        // What is not a number is not hidden.
        const Reals<E> in(*dev, typename E::Values(count, std::numeric_limits<typename E::Value>::quiet_NaN())),
            out(*dev, typename E::Values(count, 0));
        dev->silu_forward(out, in, count);
        for (const auto& y : out.host()) CHECK(y != y);
    }
}

template <class E>
void check_classifier(int N, int V, int Vp, double scale) {
    using Num = typename E::Num;
    using Value = typename E::Value;
    const auto dev = E::open();
    Random random(50);
    const double dloss = 1.0 / 48;
    auto logits = E::random_reals(random, size_t(N) * Vp, scale);
    std::vector<int32_t> targets(static_cast<size_t>(N));
    for (int n = 0; n < N; n++) {
        targets[size_t(n)] = n == 0 ? 0 : n == 1 ? V - 1 : random.below(V);
        for (int v = V; v < Vp; v++)  // the padding may hold anything: the largest logit of all, or NaN
            logits[size_t(n) * Vp + v] = v % 2 ? E::as_real(1e30) : std::numeric_limits<Value>::quiet_NaN();
    }
    const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
        Reals<E> l(*dev, logits);
        Stats<E> losses(*dev, size_t(N)), again(*dev, size_t(N));
        const Array<E, int32_t> t(*dev, targets);
        const auto before = l.raw();
        dev->classifier(losses, l, t, dloss, false, N, V, Vp);
        CHECK(std::memcmp(l.raw().data(), before.data(), before.size() * sizeof(before[0])) == 0);
        dev->classifier(again, l, t, dloss, true, N, V, Vp);
        CHECK_SAME_BITS(again.host().data(), losses.host().data(), size_t(N));
        return {losses.host(), l.host()};
    });
    const double rescaling = E::rescaling_of_classifier(V);
    typename E::Nums expected, expected_losses;
    for (int n = 0; n < N; n++) {
        const int target = targets[size_t(n)];
        const oracle::Classified<Value> row = oracle::cross_entropy<Value>(&logits[size_t(n) * Vp], target, dloss, V);
        expected_losses.emplace_back(row.loss.value, row.loss.error + rescaling);
        for (int v = 0; v < Vp; v++) {
            Num d = v < V ? row.dlogits[size_t(v)] : Num(0);
            d.error += rescaling * (std::fabs(d.value) + (v == target ? dloss : 0));
            expected.push_back(v < V ? E::stored(d) : d);
        }
    }
    CHECK_ARRAY(outputs[0], expected_losses);
    CHECK_ARRAY(outputs[1], expected, N, Vp);
}
ENGINE_TEST(classifier) {
    for (const double scale : {1.0, 1e3})  // logits of +-1e3 stay finite
        for (const auto& [N, V, Vp] :
             {std::array<int, 3>{9, 256, 256}, {7, 1000, 1024}, {3, 5, 128}, {3, 37, 39}, {2, 2301, 2303}})
            check_classifier<E>(N, V, Vp, scale);
    check_classifier<E>(2, 50257, 50304, 2);
    check_classifier<E>(2, 24500, 24576, 2);  // 48 KiB of bf16
    check_classifier<E>(1, 60001, 60032, 2);  // two such rows do not fit into the shared memory of any GPU
}

// The sum of squares as an update makes it: chunk by chunk, then the chunks in order; and the plain sum.
ENGINE_TEST(sums) {
    using DevSum = typename E::DevSum;
    using SumNum = oracle::Number<DevSum>;
    const auto dev = E::open();
    Random random(60);
    for (const size_t count : {size_t(0), size_t(1), size_t(1023), CHUNK - 1, CHUNK, CHUNK + 1, size_t(16383),
                               size_t(16385), size_t(50001)}) {
        const auto x = E::random_values(random, count);
        oracle::Sum<DevSum> squares, sum;
        for (const double e : x) squares.add(SumNum(e) * SumNum(e)), sum.add(e);
        sum.add(3);
        std::vector<DevSum> first;
        in_every_order<E>([&]() -> std::vector<typename E::Values> {
            const size_t chunks = (count + CHUNK - 1) / CHUNK;
            const Stats<E> on_device(*dev, x);
            const Array<E, DevSum> of_chunks(*dev, chunks), totals(*dev, std::vector<double>{0, 3, 0});
            const Array<E, typename E::Dev::Grad> guards(*dev, std::vector<double>{1, INFINITY});
            dev->chunk_squares(of_chunks, on_device, count, 0, chunks * CHUNK);
            dev->total_squares(totals, of_chunks, chunks, guards);
            dev->add_sum(totals + 1, on_device, count);
            dev->total_squares(totals + 2, of_chunks, chunks, guards + 1);  // of which nothing is known
            std::vector<DevSum> found = totals.raw();
            CHECK_NEAR(found[0], squares.value, SumNum(squares).error);
            CHECK_NEAR(found[1], sum.value, SumNum(sum).error);
            CHECK(std::isnan(found[2]));
            found.pop_back();
            if (first.empty()) first = found;
            CHECK(found == first);
            return {};
        });
    }
}

// What an update works on, on the host; where the engine has no master copy, the parameters are the master.
template <class E>
struct Updated {
    typename E::Values master, m, v, param;
};
// The result of dev.adamw in calls for so many elements, and in spans of so many elements of a call.
template <class E>
Updated<E> after_adamw(typename E::Dev& dev, const Updated<E>& before, const typename E::Values& grad,
                       typename E::Hyper h, double squares, size_t piece, size_t span = size_t(-1) / 2) {
    using Master = typename E::Dev::Master;
    constexpr bool has_master = E::Dev::has_master;
    const size_t count = grad.size(), offset = h.offset;
    const Array<E, typename E::DevSum> norm(dev, std::vector<double>{squares});
    Stats<E> m(dev, before.m), v(dev, before.v), g(dev, grad);
    Array<E, Master> master(dev, has_master ? before.master : typename E::Values());
    Reals<E> param(dev, before.master);
    if (h.squares) h.squares = norm;
    for (size_t at = 0; at < count; at += piece) {
        std::vector<AdamWSpan> spans;
        for (size_t i = 0; i < std::min(piece, count - at); i += span)
            spans.push_back({i, std::min({i + span, piece, count - at}), 1});
        h.offset = offset + at;
        dev.adamw(param + at, has_master ? master + at : nullptr, m + at, v + at, g + at, spans, h);
    }
    if constexpr (has_master) {
        Reals<E> restored(dev, count);
        dev.round_master(restored, master, count, h.seed, h.step, offset);
        if (std::isfinite(squares)) CHECK_SAME_BITS(restored.host().data(), param.host().data(), count);
    }
    return {has_master ? master.host() : param.host(), m.host(), v.host(), param.host()};
}
template <class Sum>
const Sum GIVEN_NORM = 0;  // HyperAdamW::squares points at it: take the norm on the engine

ENGINE_TEST(adamw) {
    const auto dev = E::open();
    Random random(61);
    const size_t count = 1003;
    for (const int step : {1, 2, 10, 1000}) {
        const double decay = step == 2 ? 0 : 0.1, clip = step == 1 ? 1 : 0.37;  // a norm of 4, clipped to 4 or 1.48
        const double moments = step == 1 ? 0 : 0.1;
        Updated<E> before{E::random_values(random, count),
                          E::random_values(random, count, moments),
                          E::random_values(random, count, moments),
                          {}};
        auto grad = E::random_values(random, count);
        for (auto& e : before.v) e *= e;  // a second moment is not negative
        grad[3] = 0, grad[4] = typename E::Value(1e-6), grad[5] = typename E::Value(1e4);
        const typename E::Hyper h{
            1e-2,    0.9, 0.95, 1e-8, decay, step, 1337, (size_t(1) << 33) + 77, &GIVEN_NORM<typename E::DevSum>,
            4 * clip};
        const auto outputs = in_every_order<E>([&]() -> std::vector<typename E::Values> {
            const Updated<E> whole = after_adamw<E>(*dev, before, grad, h, 16, count),
                             pieces = after_adamw<E>(*dev, before, grad, h, 16, 400, 3);
            CHECK(whole.param == pieces.param && whole.m == pieces.m);  // rounding depends on the place alone
            return {whole.master, whole.m, whole.v, whole.param};
        });
        typename E::Nums expected, expected_m, expected_v;
        for (size_t i = 0; i < count; i++) {
            const auto after = oracle::adamw(before.master[i], before.m[i], before.v[i], grad[i], 1e-2, 0.9, 0.95, 1e-8,
                                             decay, step, clip);
            expected.push_back(after.param), expected_m.push_back(after.m), expected_v.push_back(after.v);
        }
        CHECK_ARRAY(outputs[0], expected);
        CHECK_ARRAY(outputs[1], expected_m);
        CHECK_ARRAY(outputs[2], expected_v);
        for (size_t i = 0; i < count; i++) {  // the parameter is the master, rounded as its place and the step say
            auto rounded = outputs[0][i];
            if constexpr (E::NARROW) {
                const size_t place = h.offset + i;
                const auto drawn = philox4x32(place / 8, random_stream(RANDOM_ROUNDING, uint64_t(step)), 1337);
                uint32_t bits;
                std::memcpy(&bits, &rounded, 4);
                bits = (bits + (drawn.word[place / 2 % 4] >> place % 2 * 16 & 0xffff)) & 0xffff0000;
                std::memcpy(&rounded, &bits, 4);
            }
            CHECK_EQUAL(outputs[3][i], rounded);
        }
    }
}
// Spans of a call decay or not, and what lies between them stays as it is; two adjacent tensors are one span. From a
// place and with spans that are multiples of eight elements on, and from others.
ENGINE_TEST(adamw_in_spans) {
    const auto dev = E::open();
    Random random(63);
    std::vector<AdamWSpan> joined;
    add_span(joined, 0, 8, true);
    add_span(joined, 8, 16, true);
    add_span(joined, 16, 24, false);
    add_span(joined, 32, 40, false);
    CHECK_EQUAL(joined.size(), 3);
    CHECK_EQUAL(joined[0].end, 16);
    for (const size_t unit : {8, 5}) {
        const size_t count = 1200 * unit;
        const typename E::Values zeros(count, 0), grad = E::random_values(random, count);
        const typename E::Values start = E::random_reals(random, count);
        // whole blocks of a kernel in a span, a thread's elements, and whole blocks in a gap
        const std::vector<AdamWSpan> spans = {{0, 600 * unit, 0},
                                              {600 * unit, 601 * unit, 1},
                                              {602 * unit, 603 * unit, 0},
                                              {1100 * unit, 1199 * unit, 1}};
        const typename E::Hyper h{1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 7, 64 + unit};
        typename E::Values expected = start;
        for (const AdamWSpan& span : spans) {
            typename E::Hyper of_span = h;
            of_span.decay = span.decays ? 0.1 : 0;
            const Updated<E> whole = after_adamw<E>(*dev, {start, zeros, zeros, {}}, grad, of_span, 0, count);
            std::copy(whole.master.begin() + int64_t(span.begin), whole.master.begin() + int64_t(span.end),
                      expected.begin() + int64_t(span.begin));
        }
        Stats<E> m(*dev, zeros), v(*dev, zeros), g(*dev, grad);
        Reals<E> param(*dev, start);
        Array<E, typename E::Dev::Master> master(*dev, E::Dev::has_master ? start : typename E::Values());
        dev->adamw(param, E::Dev::has_master ? static_cast<typename E::Dev::Master*>(master) : nullptr, m, v, g, spans,
                   h);
        CHECK((E::Dev::has_master ? master.host() : param.host()) == expected);
    }
}

// The squared norm in the engine's memory says how to clip: the result is that of a gradient that was scaled
// beforehand, and below the limit nothing changes; a norm that is not finite leaves everything as it was. The factor is
// rounded once on either side, so the bits are equal where it is a power of two.
ENGINE_TEST(adamw_clips_by_the_norm) {
    const auto dev = E::open();
    Random random(62);
    const size_t count = 1000;
    const Updated<E> before{
        E::random_reals(random, count), typename E::Values(count, 0), typename E::Values(count, 0), {}};
    const auto grad = E::random_values(random, count);
    const auto after = [&](double squares, double grad_clip, double scale, bool by_norm) {
        auto scaled = grad;
        for (auto& x : scaled) x *= typename E::Value(scale);
        typename E::Hyper h{1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 7, 0};
        if (by_norm) h.squares = &GIVEN_NORM<typename E::DevSum>, h.grad_clip = grad_clip;
        return after_adamw<E>(*dev, before, scaled, h, squares, count);
    };
    const auto same = [](const Updated<E>& a, const Updated<E>& b) {
        return a.master == b.master && a.m == b.m && a.v == b.v;
    };
    CHECK(same(after(16, 1, 1, true), after(0, 0, 0.25, false)));  // norm 4, clipped to 1
    CHECK(same(after(16, 8, 1, true), after(0, 0, 1, false)));     // below the limit
    CHECK(same(after(16, 0, 1, true), after(0, 0, 1, false)));     // 0: no clipping
    CHECK(!same(after(16, 1, 1, true), after(16, 8, 1, true)));
    for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")})
        CHECK(same(after(bad, 1, 1, true), before));
}

ENGINE_TEST(stochastic_rounding_keeps_the_mean) {
    if constexpr (!E::NARROW) {
        skip(format_text("%s_stochastic_rounding_keeps_the_mean: parameters are not narrower than what is updated",
                         E::name));
    } else {
        const auto dev = E::open();
        const size_t count = 20000;
        const typename E::Values zeros(count, 0);
        const Updated<E> before{typename E::Values(count, 1.0f + 0.3f * 0x1p-7f), zeros, zeros, {}};
        double up = 0;
        for (float x :
             after_adamw<E>(*dev, before, zeros, typename E::Hyper{0, 0.9, 0.95, 1e-8, 0, 1, 7, 0}, 0, count).param) {
            CHECK(x == 1.0f || x == 1.0f + 0x1p-7f);  // one of the two neighbours
            up += x > 1;
        }
        CHECK_NEAR(up / count, 0.3, 5 * std::sqrt(0.3 * 0.7 / count));  // five deviations of a binomial share
    }
}
