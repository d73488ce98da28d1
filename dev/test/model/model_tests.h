// model_tests.h: the whole model on the CPU engine: gradients against finite differences, and what MODEL.md says must
// hold: no silent weight, random labels, the dense equivalences.
// engine_model_tests.h has what is asked of every engine.
#pragma once
#include "engine_model_tests.h"
#include "../program/program.h"

// A configuration as the command line would make it; of an option given twice, the later counts here.
static Config config_of(const std::string& options) {
    std::istringstream in(options);
    std::map<std::string, std::string> values;
    for (std::string name, value; in >> name >> value;) values[name] = value;
    std::string words;
    for (const auto& [name, value] : values) words += name + " " + value + " ";
    const Config c = options_of(words);
    validate_model(c, "test");
    return c;
}

// Small, but with every mechanism at work: T = 150 is no multiple of any block, T > window, and most queries must
// choose their blocks.
static const char* const SMALL =
    "--layers 2 --dim 48 --heads 6 --kv-groups 2 --head-dim 8 --cmp-block 8 --cmp-stride 4 --slc-block 8 --slc-count 5 "
    "--window 20 --phi-hidden 12 --mlp-hidden 64 --seq-len 150 ";

template <class Dev>
struct OwnEngine {
    Dev dev;
    const Config config;
};
// Initialised, on an engine of its own.
template <class Dev>
struct TestModel : OwnEngine<Dev>, ModelRun<Dev> {
    TestModel(const std::string& options, int B)
        : OwnEngine<Dev>{{}, config_of(options)}, ModelRun<Dev>(this->dev, this->config, B) {
        this->model.initialise();
    }
    size_t tokens() const { return this->inputs.size(); }
    double loss() { return this->step_loss(false); }
    double loss_and_gradients(std::vector<float>* logits = nullptr) { return this->step_loss(true, logits); }
    double squared_gradient(size_t begin, size_t count) const {
        double square = 0;
        for (size_t i = begin; i < begin + count; i++) square += std::pow(double(this->model.grads[i]), 2);
        return square;
    }
};

// Of each token but the first, in a forward pass over these alone.
inline std::vector<double> losses_alone(const std::vector<uint16_t>& tokens) {
    TestModel<Cpu<double>> t(SMALL + ("--init random --seq-len " + std::to_string(tokens.size() - 1)), 1);
    t.inputs.assign(tokens.begin(), tokens.end() - 1);
    t.targets.assign(tokens.begin() + 1, tokens.end());
    t.loss();
    return {t.a.losses, t.a.losses + t.tokens()};
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients.

// Central differences of the whole model's loss in fp64: single coordinates of every tensor. With a loss of order 5 the
// difference of two losses carries 1e-15 of rounding, so a step of 1e-5 leaves 1e-10, and truncation of the order of
// step^2. The backward pass holds the selection fixed, so a coordinate whose step flips a block has no slope to compare
// with and is passed over. A near tie of one token flips under many a coordinate: an eighth of them at most. Samples of
// a batch add up by the scenario "accumulated", so one is enough here.
static void check_model_gradients(const std::string& options) {
    TestModel<Cpu<double>> t(SMALL + ("--init random --seq-len 106 " + options), 1);
    t.loss_and_gradients();
    const std::vector<double> grads(t.model.grads, t.model.grads + t.model.table.total);
    const double step = 1e-5;
    size_t flipped = 0;
    for (const TensorSpec& spec : t.model.table.specs)
        for (int trial = 0; trial < 3; trial++) {
            size_t i = size_t(random_below(spec.size, 7, random_stream(RANDOM_TEST, 3), spec.offset + trial));
            // a row that occurs
            if (spec.name == "embed_tokens.weight")
                i = size_t(t.inputs[size_t(trial) * 31 % t.inputs.size()]) * t.config.dim + i % t.config.dim;
            double* p = t.model.params + spec.offset + i;
            const double saved = *p;
            *p = saved + step;
            const double above = t.loss();
            const std::vector<uint32_t> selected = selections_of(t.a);
            *p = saved - step;
            const double below = t.loss();
            *p = saved;
            const bool same = selections_of(t.a) == selected;
            flipped += !same;
            if (!same) continue;
            tests().checks++;
            const double found = grads[spec.offset + i], expected = (above - below) / (2 * step);
            if (!(std::fabs(found - expected) <= 1e-9 + 1e-6 * std::fabs(expected)))
                check_failed(__FILE__, __LINE__, "%s, %s[%d]: gradient %.10g, finite difference %.10g", options,
                             spec.name, i, found, expected);
        }
    CHECK(flipped * 8 <= 3 * t.model.table.specs.size());
}
TEST(model_gradients_match_finite_differences) {
    for (const char* options :
         {"", "--attention full --qk-norm on", "--attention window,full",
          "--attention nsa,full,window --layers 3 --smear 1 --qk-norm 1 --head untied", "--branches cmp,slc",
          "--branches cmp,win", "--branches slc,win", "--seq-len 5"})  // T < l: no compressed block
        check_model_gradients(options);
}
// What `check` runs. Under --seed 23 the first direction of one tensor flips a block, under 1337 none does.
TEST(check_takes_right_gradients_and_no_others) {
    SelfTest t(0), flipping(0, "--seed 23");
    const SelfTest recomputed(1);
    const GradientErrors none = t.errors(), one = flipping.errors();
    CHECK(none.worst < 1e-6 && none.flipped == 0);
    CHECK(one.worst < 1e-6 && one.flipped == 1);
    CHECK(recomputed.has_same_gradients(t));
    double& gradient = t.model.grads[t.model.table.specs[3].offset];
    for (const double wrong : {gradient + 1e-3, double(NAN)}) {
        gradient = wrong;
        CHECK(!(t.errors().worst < 1e-6));
        CHECK(!recomputed.has_same_gradients(t));
    }
}

// Keys and values of a branch that is left out change no bit of the loss and get no gradient. The compressed keys do
// count where blocks are selected, but choosing carries no gradient.
TEST(a_branch_that_is_left_out_says_nothing) {
    for (const char* branches : {"cmp", "slc", "win", "cmp,slc", "cmp,win", "slc,win"}) {
        TestModel<Cpu<float>> t(std::string(SMALL) + "--init random --branches " + branches, 2);
        const double loss = t.loss_and_gradients();
        for (const TensorSpec& spec : t.model.table.specs)
            for (const std::string name : {"cmp", "slc", "win"}) {
                const bool compressor = name == "cmp" && holds(spec.name, "phi_");
                if (!holds(spec.name, "_" + name + "_proj") && !compressor) continue;
                const bool left_out = !holds(branches, name);
                const double square = t.squared_gradient(spec.offset, spec.size);
                CHECK(left_out ? square == 0 : square > 0);
                if (!left_out || (name == "cmp" && holds(branches, "slc"))) continue;
                for (size_t i = 0; i < spec.size; i++) t.model.params[spec.offset + i] += 1;
                CHECK_EQUAL(t.loss(), loss);
            }
    }
}

TEST(every_weight_gets_a_gradient) {
    TestModel<Cpu<float>> t(std::string(SMALL) + "--init random --qk-norm --smear 1", 2);
    t.loss_and_gradients();
    for (const TensorSpec& spec : t.model.table.specs)
        // every row of every tensor; of the embedding, those of tokens seen (as labels all are)
        for (size_t row = 0; row < size_t(spec.rows); row++) {
            const size_t width = size_t(spec.columns ? spec.columns : 1);
            tests().checks++;
            if (!(t.squared_gradient(spec.offset + row * width, width) > 0))
                check_failed(__FILE__, __LINE__, "%s: row %d has no gradient", spec.name, row);
        }
}

// phi's fc2 is 0, so fc1 and its bias get nothing in the first step; fc2 does.
TEST(standard_initialisation_leaves_only_phi_fc1_silent) {
    TestModel<Cpu<float>> t(std::string(SMALL) + "--init standard", 2);
    t.loss_and_gradients();
    for (const TensorSpec& spec : t.model.table.specs) {
        const double square = t.squared_gradient(spec.offset, spec.size);
        tests().checks++;
        if (holds(spec.name, "phi_", "fc1") ? square != 0 : !(square > 0))
            check_failed(__FILE__, __LINE__, "%s: squared gradient %g", spec.name, square);
    }
}

TEST(padding_stays_zero) {
    TestModel<Cpu<float>> t(std::string(SMALL) + "--tokenizer gpt2", 1);  // 50257 of 50304 rows; gate rows 18 of 24
    for (int step = 1; step <= 2; step++) {
        t.loss_and_gradients();
        update(t.model, step, 1e-2);
    }
    for (const TensorSpec& spec : t.model.table.specs)
        for (size_t i = spec.size; i < spec.padded; i++) {
            CHECK_EQUAL(t.model.grads[spec.offset + i], 0.0f);
            CHECK_EQUAL(t.model.params[spec.offset + i], 0.0f);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory.

// The head in chunks of 7 rows, the last one shorter, is the head at once: sums
// of fp64 in another order. And the chunks of real sizes are few, even and fit.
TEST(logits_in_chunks_are_logits_at_once) {
    const std::string options = std::string(SMALL) + "--init random";
    TestModel<Cpu<double>> whole(options, 2), chunked(options, 2);
    CHECK_EQUAL(whole.a.logit_rows, int64_t(whole.tokens()));
    chunked.a.logit_rows = 7;
    CHECK(whole.tokens() % 7 != 0);
    std::vector<float> logits, other;
    CHECK_NEAR(chunked.loss_and_gradients(&other), whole.loss_and_gradients(&logits), 1e-13);
    CHECK(logits == other);
    double largest = 0, difference = 0;
    for (size_t i = 0; i < whole.model.table.total; i++) {
        largest = std::max(largest, std::abs(whole.model.grads[i]));
        difference = worse_error(difference, std::abs(whole.model.grads[i] - chunked.model.grads[i]));
    }
    CHECK(difference <= 1e-13 * largest);
    Cpu<float> dev;
    const Activations<Cpu<float>> a(dev, config_of("--model tiny"), 1, 64, INFERENCE);
    // 52 M logits are 212992 rows of 256
    for (const int64_t N : {int64_t(1), int64_t(100), int64_t(204800), int64_t(204801), int64_t(1000000)}) {
        const int64_t rows = a.rows_of_chunk(N), chunks = (N + rows - 1) / rows;
        CHECK(rows >= 1 && rows <= N && (rows == N || rows % 128 == 0) && rows <= 212992 + 127);
        CHECK(chunks == (N + 212991) / 212992 && N - rows * (chunks - 1) > rows - 128 * chunks);
    }
}

// A run that does not fit says what would, and that then fits: a level of --recompute, the largest micro-batch that
// divides the step, or both.
struct SmallCpu : Cpu<float> {
    double available = 0;
    double available_bytes(int = 1) const { return available; }
};
TEST(what_does_not_fit_is_refused_with_what_would) {
    SmallCpu dev;
    const World world;
    const auto needed = [&](int batch, int recompute) {
        const Config c = config_of(format_text("--model tiny --recompute %d", recompute));
        return Model<SmallCpu>::flat_bytes(c, 1) +
               Activations<SmallCpu>::bytes_needed(dev, c, batch, c.seq_len, TRAINING);
    };
    const auto refusal = [&](double available, const std::string& options) -> std::string {
        dev.available = available;
        try {
            Config c = config_of("--model tiny --total-batch 4096 " + options);
            require_memory(dev, c, world, true);
        } catch (const Error& e) {
            return e.what();
        }
        return "";
    };
    CHECK_EQUAL(refusal(needed(8, 0), "--batch 8"), "");
    const auto advice = [&](double available, const std::string& options) {
        const std::string text = refusal(available, options);
        const size_t at = text.find("choose ");
        return at == std::string::npos ? text : text.substr(at + 7);
    };
    CHECK_EQUAL(advice(needed(8, 1), "--batch 8"), "--batch 8 --recompute 1");
    CHECK_EQUAL(advice(needed(8, 2), "--batch 8"), "--batch 8 --recompute 2");
    CHECK_EQUAL(advice(needed(8, 2), "--batch 8 --recompute 1"), "--batch 8 --recompute 2");
    CHECK_EQUAL(advice(needed(4, 2), "--batch 8 --recompute 2"), "--batch 4 --recompute 2");
    CHECK_EQUAL(advice(needed(1, 2), "--batch 8"), "--batch 1 --recompute 2");
    CHECK_EQUAL(advice(needed(1, 2) - 1, "--batch 8"), "a smaller --seq-len or model");
    // 14 samples a step: 7, not 6
    CHECK_EQUAL(advice(needed(7, 2), "--batch 14 --total-batch 7168 --recompute 2"), "--batch 7 --recompute 2");
    // A micro-batch that nobody gave becomes the largest that fits, as long as one does.
    const auto taken = [&](double available) {
        dev.available = available;
        Config c = config_of("--model tiny --total-batch 7168 --batch 14");
        require_memory(dev, c, world, false);
        return c.batch;
    };
    CHECK_EQUAL(taken(needed(14, 0)), int64_t(14));
    CHECK_EQUAL(taken(needed(14, 0) - 1), int64_t(7));
    CHECK_EQUAL(taken(needed(1, 0)), int64_t(1));
    CHECK_FAILS(1, "choose --batch 1 --recompute 2", taken(needed(1, 0) - 1));
}

TEST(samples_that_cannot_be_made_are_refused) {
    SmallCpu dev;
    const Config c = config_of("--model tiny");
    Model<SmallCpu> model(dev, c, false);
    model.initialise();
    int emitted = 0;
    const auto sample = [&](int count) {
        generate(model, {256 - 1, 10, 20}, count, c, [&](int32_t) { return emitted++, true; });
    };
    // Three positions at once, and keys and values for all.
    dev.available = Activations<SmallCpu>::bytes_needed(dev, c, 1, 103, INFERENCE, 3);
    sample(100);
    CHECK_EQUAL(emitted, 100);
    CHECK_FAILS(1, "101 tokens after a prompt of 3", sample(101));
    CHECK(dev.available < 0.25 * Activations<SmallCpu>::bytes_needed(dev, c, 1, 103, INFERENCE));
    model.params[model.w.norm - model.params] = std::nanf("");
    CHECK_FAILS(1, "not finite", sample(1));
    CHECK_EQUAL(emitted, 100);
}

TEST(memory_is_linear_in_sequence_length) {
    Cpu<float> dev;
    const Config c = config_of("--model tiny");
    // Selection masks have a word per 32 blocks of every token: 1/32 bit per
    // token and block, the one term above linear; a byte in ten thousand here.
    const Activations<Cpu<float>> once(dev, c, 1, 4096, TRAINING), twice(dev, c, 1, 8192, TRAINING);
    CHECK(double(twice.arena.bytes) < 2.05 * double(once.arena.bytes));
}

// ---------------------------------------------------------------------------------------------------------------------
// Learning.

TEST(random_labels_stay_at_the_entropy) {  // fresh random inputs and labels at every step: nothing to learn but ln V
    TestModel<Cpu<float>> t(std::string(SMALL) + "--init standard --seq-len 100", 4);
    double sum = 0;
    const int steps = 60, last = 20;
    for (int step = 1; step <= steps; step++) {
        for (size_t i = 0; i < t.tokens(); i++) {
            t.inputs[i] = int32_t(random_below(256, 11, random_stream(RANDOM_TEST, uint64_t(step)), 2 * i));
            t.targets[i] = int32_t(random_below(256, 11, random_stream(RANDOM_TEST, uint64_t(step)), 2 * i + 1));
        }
        const double loss = t.loss_and_gradients();
        update(t.model, step, 1e-3);
        if (step > steps - last) sum += loss / last;
    }
    // Never below ln 256 by more than the noise of the mean: a label's
    // log-probability deviates by about 0.2, over 8000 labels 0.002; 5 sigma.
    CHECK(sum > std::log(256.0) - 0.011);
    CHECK(sum < std::log(256.0) + 0.1);
}

TEST(an_update_is_clipped_adamw) {
    TestModel<Cpu<float>> t(std::string(SMALL) + "--grad-clip 0.01 --lr 0.02 --weight-decay 0.3 --init random", 1);
    t.loss_and_gradients();
    const std::vector<float> before(t.model.params, t.model.params + t.model.table.total),
        grads(t.model.grads, t.model.grads + t.model.table.total);
    double square = 0;
    for (float g : grads) square += double(g) * g;
    REQUIRE(std::sqrt(square) > 0.1);  // so that it must be clipped
    update(t.model, 1, 0.02);
    CHECK_NEAR(std::sqrt(t.model.results[1]), std::sqrt(square), 1e-6 * std::sqrt(square));
    // First step of AdamW by hand, in fp64: m = 0.1 g, v = 0.05 g^2, both corrected to g and g^2.
    for (const TensorSpec& spec : t.model.table.specs)
        for (size_t i = spec.offset; i < spec.offset + spec.size; i++) {
            const double g = grads[i] * 0.01 / std::sqrt(square), decay = spec.columns ? 0.3 : 0;
            const double expected = before[i] * (1 - 0.02 * decay) - 0.02 * g / (std::fabs(g) + 1e-8);
            // The step is at most lr; a rounding of each operand, and g's own
            // 6e-8 through g / (|g| + eps), whose slope in log g is at most 1/4.
            CHECK_NEAR(t.model.params[i], expected, 4e-7 * (std::fabs(before[i]) + 0.02));
            CHECK_NEAR(t.model.m[i], 0.1 * g, 1e-6 * std::fabs(g) + 1e-30);
        }
}

// With --zero 1 every element is updated by one rank, a matrix of Muon as a whole; places in a rank's state are taken
// once, v's by AdamW's elements alone; and no rank has more of Muon's work than the mean and one matrix.
TEST(muon_matrices_are_shared_out) {
    for (const int ranks : {1, 2, 3, 5, 8}) {
        const Config c = options_of(std::string(SMALL) + "--optimizer muon --bucket-mb 0.02");
        const TensorTable table(c);
        const Partition p(table.total, ranks, c.bucket_mb, muon_matrices(table));
        std::vector<int> owners(p.elements, 0);
        std::vector<double> work;
        double largest = 0, all_work = 0;
        for (int rank = 0; rank < ranks; rank++) {
            const std::vector<Piece> owned = p.owned(rank, true);
            const StateElements state(owned);
            std::vector<int> local(state.m, 0), second(state.v, 0);
            work.push_back(0);
            for (const Piece& piece : owned) {
                for (size_t i = 0; i < piece.count; i++) {
                    owners[piece.begin + i]++;
                    local.at(piece.m_at + i)++;
                    if (!piece.rows) second.at(piece.v_at + i)++;
                }
                const double n = double(std::min(piece.rows, piece.columns)),
                             cost = n * n * double(2 * std::max(piece.rows, piece.columns)) + n * n * n;
                work.back() += cost;
                all_work += cost;
                largest = std::max(largest, cost);
            }
            CHECK(std::count(local.begin(), local.end(), 1) == long(state.m) &&
                  std::count(second.begin(), second.end(), 1) == long(state.v));
        }
        CHECK_EQUAL(std::count(owners.begin(), owners.end(), 1), long(p.elements));
        CHECK(*std::max_element(work.begin(), work.end()) <= all_work / ranks + largest);
        for (const TensorSpec& t : table.specs) {
            if (!t.orthogonal) continue;
            size_t wholes = 0;
            for (int rank = 0; rank < ranks; rank++)
                for (const Piece& piece : p.owned(rank, true))
                    wholes += piece.begin == t.offset && piece.count == t.size;
            CHECK_EQUAL(wholes, 1u);
        }
    }
}

// What is no matrix of a layer, and the gates, have AdamW's bits.
TEST(muon_leaves_the_rest_to_adamw) {
    TestModel<Cpu<float>> muon(std::string(SMALL) + "--optimizer muon --init random", 1),
        adamw(std::string(SMALL) + "--init random", 1);
    muon.loss_and_gradients();
    adamw.loss_and_gradients();
    update(muon.model, 1, 0.02);
    update(adamw.model, 1, 0.02);
    size_t same = 0;
    for (const TensorSpec& t : adamw.model.table.specs) {
        const bool is_same = !std::memcmp(&muon.model.params[t.offset], &adamw.model.params[t.offset], t.size * 4);
        const bool of_adamw =
            !t.columns || t.name == "embed_tokens.weight" || t.name.find("gate_proj") != std::string::npos;
        CHECK_EQUAL(is_same, of_adamw);
        same += is_same;
    }
    CHECK_EQUAL(same, size_t(2 + 2 * 5));  // embedding, norm; of a layer two norms, two biases, the gates
}

// ---------------------------------------------------------------------------------------------------------------------
// Equivalences of the whole model.

TEST(the_125m_model_has_the_tensors_of_the_specification) {
    const TensorTable table(config_of("--model 125m"));
    const auto expected = program::tensors_of_the_design(50257, 768, 12, 12, 2, 64, 32, 128, 3072, true);
    int64_t count = 0;
    for (const TensorSpec& t : table.specs) {
        REQUIRE(expected.count(t.name) == 1);
        CHECK(expected.at(t.name) == t.shape());
        CHECK_EQUAL(t.decay, !holds(t.name, "norm") && !holds(t.name, "bias"));
        int64_t n = 1;
        for (int64_t e : t.shape()) n *= e;
        count += n;
    }
    CHECK_EQUAL(table.specs.size(), expected.size());
    CHECK_EQUAL(table.parameters, count);
}

// The FLOPs of a token, by hand: the products of one sequence, one by one.
TEST(model_flops_are_those_of_its_products) {
    for (const char* options :
         {"--model tiny --seq-len 150", "--model tiny --seq-len 150 --attention full", "--model 125m --seq-len 2048",
          "--model 125m --seq-len 2048 --attention full", "--model tiny --seq-len 150 --head untied --smear 1",
          "--model tiny --seq-len 150 --attention window,window,full --layers 7 --window 33",
          "--model tiny --seq-len 150 --attention window,nsa,nsa,full --layers 7"}) {
        const Config c = config_of(options);
        std::vector<LayerKind> kinds = layer_kinds(c.attention);
        for (size_t i = 0; int64_t(kinds.size()) < c.layers; i++) kinds.push_back(kinds[i]);
        const double nsa = double(std::count(kinds.begin(), kinds.end(), NSA_LAYER)),  // layers
            full = double(std::count(kinds.begin(), kinds.end(), FULL_LAYER)), window = double(c.layers) - nsa - full;
        const double T = double(c.seq_len), C = double(c.dim), H = double(c.heads), G = double(c.kv_groups),
                     D = double(c.head_dim), F = double(c.phi_hidden), l = double(c.cmp_block);
        // of one token
        double weights = C * ((2 * (H + G) * D + 2 * double(c.mlp_hidden)) * double(c.layers) +
                              (4 * G * D + 3 * H) * nsa + double(c.vocab_size));
        double pairs = 0, blocks = 0;  // of one head in all layers; compressed blocks of one group
        for (int t = 0; t < c.seq_len; t++)
            for (int key = 0; key <= t; key++) {
                // any n blocks with its own: the last n, here
                const int own = t / int(c.slc_block), first = std::max(0, own + 1 - int(c.slc_count));
                pairs += full + (nsa + window) * (key > t - c.window);
                pairs += nsa * (key / int(c.slc_block) >= first);
                pairs += nsa * (key * c.cmp_stride + c.cmp_block - 1 <= t);
                blocks += t == c.seq_len - 1 && key * c.cmp_stride + c.cmp_block - 1 <= t;
            }
        const double phi = G * blocks * (l + 1) * 2 * D * F * nsa;
        const double expected = 6 * weights + (6 * phi + 12 * D * H * pairs) / T;
        CHECK_NEAR(model_flops_per_token(TensorTable(c).specs, shape_of(c, 1, c.seq_len), c.layers), expected,
                   1e-12 * expected);
    }
}

TEST(initial_weights_have_their_scales) {
    const Config c = config_of("--model tiny --layers 4 --init standard --cmp-block 16");
    const TensorTable table(c);
    for (size_t index = 0; index < table.specs.size(); index++) {
        const TensorSpec& t = table.specs[index];
        double expected = 0.02;
        if (t.name.find("o_proj") != std::string::npos || t.name.find("mlp.fc2") != std::string::npos)
            expected = 0.02 / std::sqrt(8.0);
        if (t.name.find("phi_") != std::string::npos)
            expected = t.name.find("fc1.weight") != std::string::npos ? 1 / std::sqrt(16.0 * 32) : 0;
        const bool norm = t.name.find("norm") != std::string::npos;
        double sum = 0, square = 0;
        for (size_t i = 0; i < t.size; i++) {
            const double x = double(initial_value(t, index, i, uint64_t(c.seed), c.layers, c.init)) - (norm ? 1 : 0);
            sum += x, square += x * x;
        }
        if (norm) expected = 0;
        // The standard deviation of n draws is known to 1/sqrt(2n), the mean to 1/sqrt(n); 5 sigma.
        CHECK_NEAR(std::sqrt(square / double(t.size)), expected, 5 * expected / std::sqrt(2.0 * double(t.size)));
        CHECK_NEAR(sum / double(t.size), 0, 5 * expected / std::sqrt(double(t.size)));
    }
}

// The head gives every token the same chance, and nothing but it learns in the first step; in the second what feeds it.
TEST(an_untied_model_begins_at_zero) {
    TestModel<Cpu<double>> t(std::string(SMALL) + "--head untied --smear 1", 2);
    CHECK_EQUAL(t.config.init, "narrow");
    for (int step = 1; step <= 2; step++) {
        const double loss = t.loss_and_gradients();
        if (step == 1) CHECK_NEAR(loss, std::log(256.0), 1e-12);
        for (const TensorSpec& spec : t.model.table.specs) {
            const double *first = t.model.grads + spec.offset, *param = t.model.params + spec.offset;
            const auto is_zero = [](double x) { return x == 0; };
            const bool head = spec.name == "head.weight";
            if (step == 1) CHECK_EQUAL(std::all_of(first, first + spec.size, is_zero), !head);
            if (spec.name == "smear.scale.weight" && step == 1) CHECK(param[0] == 0 && param[1] == 2);
            if (head || spec.name.find("o_proj") != std::string::npos || spec.name.find("fc2") != std::string::npos) {
                if (step == 1) CHECK(std::all_of(param, param + spec.size, is_zero));
                else if (spec.name.find("phi_") == std::string::npos)
                    CHECK(!std::all_of(first, first + spec.size, is_zero));
            }
        }
        update(t.model, step, 1e-2);
    }
}

// With a gate that passes the window branch alone NSA is dense attention if the window has T keys, and otherwise layers
// of windows: the same losses with the same weights. The gates' logits are +-40, so the closed ones are 4e-18 and the
// open one is 1.
static void check_window_alone(const std::string& window, const std::string& attention) {
    const std::string options = std::string(SMALL) + "--init random --window " + window;
    TestModel<Cpu<double>> nsa(options, 2), full(options + " --attention " + attention, 2);
    auto find = [](auto& t, const std::string& name) {
        return std::find_if(t.model.table.specs.begin(), t.model.table.specs.end(),
                            [&](const TensorSpec& s) { return s.name == name; });
    };
    for (const TensorSpec& spec : full.model.table.specs) {
        const auto from = find(nsa, spec.name);
        std::copy_n(nsa.model.params + from->offset, spec.size, full.model.params + spec.offset);
    }
    // The gate sees rmsnorm(x): make its logit constant by giving one residual channel a known value in every token and
    // layer.
    const size_t C = size_t(nsa.config.dim), H = size_t(nsa.config.heads), G = size_t(nsa.config.kv_groups);
    const size_t rows_before_gate = (H + HEAD_SLOTS * G) * size_t(nsa.config.head_dim);
    for (auto* t : {&nsa, &full}) {
        for (size_t v = 0; v < 256; v++) t->model.w.embed[v * C] = 30;  // channel 0 dominates every row ...
        for (auto& layer : t->model.w.layer) {
            std::fill_n(layer.o_proj, size_t(t->config.heads * t->config.head_dim),
                        0.0);  // ... and nothing writes to it
            std::fill_n(layer.mlp_fc2, size_t(t->config.mlp_hidden), 0.0);
            layer.attn_norm[0] = 1;
        }
    }
    for (auto& layer : nsa.model.w.layer)
        for (size_t head = 0; head < H; head++)
            for (size_t branch = 0; branch < 3; branch++) {
                double* row = layer.in_proj + (rows_before_gate + 3 * head + branch) * C;
                std::fill_n(row, C, 0.0);
                row[0] = branch == WIN ? 8 : -8;  // times the normed channel, about 6 to 7
            }
    CHECK_NEAR(nsa.loss(), full.loss(), 1e-9);
}
TEST(window_branch_alone_is_the_dense_model) {
    check_window_alone("150", "full");
    check_window_alone("20", "window");
}
