// document_reset_tests.h: --reset-at-document 1 on the CPU engine: what a query sees, documents that do not feel each
// other, gradients, decoding. The models' random tokens have an end-of-text at every 41st place, see TestModel.
#pragma once
#include "model_tests.h"
#include "program.h"

static std::string with_documents(const std::string& more = "") {
    return std::string(SMALL) + "--init random --reset-at-document 1 " + more;
}

TEST(document_reset_by_hand) {
    NsaShape s;
    s.T = s.queries = 12, s.l = 4, s.d = 2, s.slc_block = 4, s.slc_count = 3, s.window = 3;
    using Keys = std::vector<int>;
    const uint32_t all = 0b111;
    const auto keys = [&](Branch branch, int t, int start) {
        return Cpu<double>::visible_keys(branch, t, &all, s, start);
    };
    CHECK(keys(CMP, 9, 4) == (Keys{2, 3}));  // tokens 4..7 and 6..9
    CHECK(keys(CMP, 9, 5) == Keys{3});       // block 2, tokens 4..7, has one of the document before
    CHECK(keys(CMP, 9, 7) == Keys{});
    CHECK(keys(SLC, 9, 5) == (Keys{5, 6, 7, 8, 9}));
    CHECK(keys(SLC, 9, 9) == Keys{9});
    CHECK(keys(WIN, 9, 5) == (Keys{7, 8, 9}));
    CHECK(keys(WIN, 9, 8) == (Keys{8, 9}));
    s.full = true;
    CHECK(keys(WIN, 9, 5) == (Keys{5, 6, 7, 8, 9}));
    // Query 27 of 4-token blocks is in block 6; its document begins in block 2.
    s.T = s.queries = 28;
    const double importance[] = {9, 9, 0, 1, 3, 2, 0};
    uint32_t mask = 0;
    s.slc_count = 4;
    CHECK_EQUAL(Cpu<double>::choose_blocks(&mask, importance, 27, s, 9), 5 / 6.0);
    CHECK_EQUAL(mask, 0b1110100u);  // 2, 5 and 6, and of 3 and 4 the better
    s.slc_count = 5;
    CHECK_EQUAL(Cpu<double>::choose_blocks(&mask, importance, 27, s, 9), 1.0);
    CHECK_EQUAL(mask, 0b1111100u);
    Cpu<double> dev;
    NsaShape two;
    two.B = 2, two.T = 5;
    std::vector<int32_t> start(10, -1);
    const auto find = [&](int first, const std::vector<int32_t>& tokens) {
        two.first = first, two.queries = int(tokens.size()) / 2;
        dev.find_documents(start.data(), tokens.data(), 0, two);
    };
    find(0, {7, 7, 0, 0, 7, 7});  // tokens 7 7 0 | 0 7 7
    find(3, {7, 7});
    find(4, {0, 0});
    CHECK(start == (std::vector<int32_t>{0, 0, 2, 2, 4, 0, 0, 0, 0, 4}));
}

// A document that begins at `start` in the middle of others. Its results do not change by a bit when they do.
template <class Dev>
static std::vector<typename Dev::real> document_in_the_middle(TestModel<Dev>& t, int start, int end, int others) {
    const int T = t.a.shape.T;
    for (int i = 0; i < T; i++)
        if (i < start || i >= end) t.inputs[size_t(i)] = 1 + (t.inputs[size_t(i)] + others) % 255;
    t.inputs[size_t(start)] = t.inputs[size_t(end)] = 0;
    forward(t.model, t.a, t.inputs.data(), 0, T);
    const auto* rows = t.a.normed + size_t(start) * size_t(t.a.C);
    return {rows, rows + size_t(end - start) * size_t(t.a.C)};
}
template <class Dev>
static void check_documents_apart(const std::string& more) {
    for (const int start : {40, 64, 83}) {
        TestModel<Dev> t(with_documents(more), 1);
        const auto first = document_in_the_middle(t, start, 130, 0);
        for (const int others : {1, 100}) CHECK(document_in_the_middle(t, start, 130, others) == first);
    }
}
TEST(documents_do_not_feel_each_other) {
    for (const char* kind : {"nsa", "full"}) {
        check_documents_apart<Cpu<double>>(std::string("--attention ") + kind);
        check_documents_apart<Cpu<float>>(std::string("--attention ") + kind);
    }
}

// A document that begins at a multiple of l' and d is what it is alone. Positions go on, so the rotations of RoPE
// differ by their rounding: angles up to 150 with a relative error of 2^-53 each, 1.7e-14, through two layers.
TEST(document_equals_the_document_alone) {
    for (const char* kind : {"nsa", "full"}) {
        const std::string attention = std::string("--attention ") + kind;
        TestModel<Cpu<double>> packed(with_documents(attention), 1),
            alone(with_documents(attention + " --seq-len 66"), 1);
        const std::vector<double> found = document_in_the_middle(packed, 64, 130, 3);
        std::copy_n(packed.inputs.begin() + 64, 66, alone.inputs.begin());
        forward(alone.model, alone.a, alone.inputs.data(), 0, 66);
        double worst = 0;
        for (size_t i = 0; i < found.size(); i++) worst = std::max(worst, std::fabs(found[i] - alone.a.normed[i]));
        CHECK_NEAR(worst, 0, 1e-11);
    }
}

// Without an end-of-text the option changes nothing.
TEST(one_document_is_computed_as_ever) {
    for (const char* more : {"--attention nsa", "--attention full", "--recompute 2"}) {
        TestModel<Cpu<float>> with(with_documents(more), 2), without(std::string(SMALL) + "--init random " + more, 2);
        for (int32_t& token : with.inputs) token = std::max(token, 1);
        without.inputs = with.inputs;
        CHECK_EQUAL(with.loss_and_gradients(), without.loss_and_gradients());
        CHECK(std::memcmp(with.model.grads, without.model.grads, with.model.table.total * sizeof(float)) == 0);
    }
}

TEST(document_gradients_match_finite_differences) { check_model_gradients(with_documents()); }
TEST(document_gradients_match_finite_differences_full_attention) {
    check_model_gradients(with_documents("--attention full"));
}

// The tiled attention against the plain loops, by the limit of the golden values in fp32; and --recompute.
TEST(document_gradients_in_fp32) {
    for (const char* more : {"--attention nsa", "--attention full"}) {
        TestModel<Cpu<float>> t(with_documents(more), 2, 1, true),
            again(with_documents(std::string(more) + " --recompute 2"), 2);
        TestModel<Cpu<double>> exact(with_documents(more), 2);
        CHECK_NEAR(t.loss_and_gradients(), exact.loss_and_gradients(), 2e-5);
        for (const TensorSpec& spec : t.model.table.specs) {
            double difference = 0, size = 0;
            for (size_t i = spec.offset; i < spec.offset + spec.size; i++)
                difference += std::pow(double(t.model.grads[i]) - exact.model.grads[i], 2),
                    size += std::pow(exact.model.grads[i], 2);
            CHECK(std::sqrt(difference) <= 2e-5 * std::sqrt(size));
        }
        again.loss_and_gradients();
        CHECK(std::memcmp(t.model.grads, again.model.grads, t.model.table.total * sizeof(float)) == 0);
    }
}

template <class Dev>
static void check_document_decoding(const std::string& more, double limit) {
    TestModel<Dev> t(with_documents(more), 1);
    const int T = t.a.shape.T;
    forward(t.model, t.a, t.inputs.data(), 0, T);
    const size_t C = size_t(t.a.C);
    for (int piece : {1, 7, 64}) {
        Activations<Dev> caches(t.dev, t.config, 1, T, INFERENCE);
        double worst = 0;
        for (int at = 0; at < T; at += piece) {
            const int count = std::min(piece, T - at);
            forward(t.model, caches, &t.inputs[size_t(at)], at, count);
            for (size_t i = 0; i < count * C; i++)
                worst = std::max(worst, double(std::fabs(caches.normed[i] - t.a.normed[size_t(at) * C + i])));
        }
        CHECK_NEAR(worst, 0, limit);
    }
}
TEST(document_decoding_equals_prefill) {
    for (const char* kind : {"--attention nsa", "--attention full"}) {
        check_document_decoding<Cpu<double>>(kind, 1e-11);
        // Sums of fewer rows run in another order: 39 stored arrays, each of sums of up to 300 terms, times the largest
        // element, below 8, see decode_tests.h.
        check_document_decoding<Cpu<float>>(kind, 8 * std::sqrt(39 * 300) * 0x1p-24);
    }
}

// The program: a run, its resume and its evaluation; it is the model's, so a checkpoint says it.
TEST(run_resets_at_documents) {
    using namespace program;
    TempFolder folder;
    const std::string out = folder.file("run");
    REQUIRE_GOOD(train({{"out", out}, {"reset-at-document", "1"}, {"seq-len", "700"}, {"total-batch", "1400"}}));
    CHECK(read_file(out + "/step_00000002/config.json").find("\"reset_at_document\": 1") != std::string::npos);
    const Result r = run({"eval", "--from", out, "--val-data", "synthetic"});
    REQUIRE_GOOD(r);
    CHECK(r.out.find(format_text("loss %.4f,", logged(out, "val_loss").back())) != std::string::npos);
    REQUIRE_GOOD(run({"--resume", "--out", out, "--steps=3"}));
    CHECK_REFUSED(run({"--resume", "--out", out, "--steps=4", "--reset-at-document=0"}), 1, "reset_at_document is 1");
    const std::string hf = folder.file("hf"), back = folder.file("back");
    REQUIRE_GOOD(run({"export", "--from", out, "--to", hf}));
    REQUIRE_GOOD(run({"import", "--from", hf, "--to", back}));
    for (const std::string& at : {hf, back + "/step_00000000"})
        CHECK(read_file(at + "/config.json").find("\"reset_at_document\": 1") != std::string::npos);
}
