// cuda_ddp_tests.h: gradients of several GPUs on one CPU. NcclReducer of ddp.cuh runs on the streams of
// dev/emulator/cuda_on_cpu.h, with a stand-in for NCCL whose other rank exists on paper only: what it gives to each
// collective was computed beforehand. Collectives run as late as the program's waits allow, or as early: a missing wait
// on either side shows as a wrong number.
#pragma once
#include "../model/engine_model_tests.h"

#ifdef CUDA_ON_CPU
struct TwoRanks {
    static constexpr int STEPS = 3;
    Config c;
    World world;  // plays rank 0 of 2
    Cuda dev{0, size_t(1) << 20};

    // For every step, what the other rank contributes and what the result must be.
    struct Expected {
        std::vector<float> peer_grads;   // flat, the guard element included
        std::vector<double> squares;     // of the summed gradients, by chunk
        std::vector<Cuda::real> params;  // after the update
        double norm_squared = 0, loss = 0, peer_loss = 0;
    };
    std::vector<Expected> expected;
    std::vector<float> m, v, master;  // at the end

    explicit TwoRanks(const char* options) : c(engine_config(options)) {
        c.layers = 1, c.seq_len = 32, c.total_batch = 128, c.init = "standard", c.batch = 1;  // two micro-steps a rank
        world.size = 2;
    }
    LoaderOptions of_rank(int rank) const {
        LoaderOptions o = loader_options(c, world, "--data", true);
        o.rank = rank;
        return o;
    }
    static float rounded(float x) { return from_bf16(to_bf16(x)); }

    // By a model that is given both ranks' batches, and sums on the host.
    void compute_expected(int steps = STEPS) {
        Config plain = c;
        plain.zero = 0;
        Model<Cuda> model(dev, plain, true, 0, 2);
        Activations<Cuda> a(dev, plain, 1, plain.seq_len, TRAINING);
        model.initialise();
        DataLoader first({synthetic_source(uint64_t(c.seed), 60000, 0)}, of_rank(0)),
            second({synthetic_source(uint64_t(c.seed), 60000, 0)}, of_rank(1));
        const size_t n = model.partition.elements;
        std::vector<float> own(n), sum(n);
        for (int step = 1; step <= steps; step++) {
            Expected e;
            e.peer_grads.resize(n), e.squares.resize(model.chunks()), e.params.resize(n);
            accumulate_gradients(model, a, second, world, false);
            dev.copy(e.peer_grads.data(), static_cast<const float*>(model.grads), n);
            dev.copy(&e.peer_loss, static_cast<const double*>(model.results), 1);
            accumulate_gradients(model, a, first, world, false);
            dev.copy(own.data(), static_cast<const float*>(model.grads), n);
            for (size_t i = 0; i < n; i++)
                sum[i] = c.grad_reduce == "bf16" ? rounded(rounded(own[i]) + rounded(e.peer_grads[i]))
                                                 : own[i] + e.peer_grads[i];
            dev.copy(model.grads, static_cast<const float*>(sum.data()), n);
            update(model, step, 1e-2);
            dev.copy(e.squares.data(), static_cast<const double*>(model.squares[step % 2]), e.squares.size());
            dev.copy(e.params.data(), static_cast<const Cuda::real*>(model.params), n);
            double results[2];
            dev.copy(results, static_cast<const double*>(model.results), 2);
            e.loss = results[0], e.norm_squared = results[1];
            expected.push_back(e);
        }
        m.resize(n), v.resize(n), master.resize(n);
        dev.copy(m.data(), static_cast<const float*>(model.m), n),
            dev.copy(v.data(), static_cast<const float*>(model.v), n),
            dev.copy(master.data(), static_cast<const float*>(model.master), n);
    }

    // The training loop's order of calls, results received a step later; true if
    // every number is the expected one. norm_squared: as the last step found it.
    bool run(bool eager, int steps = STEPS, double* norm_squared = nullptr) {
        Model<Cuda> model(dev, c, true, 0, 2);
        Activations<Cuda> a(dev, c, 1, c.seq_len, TRAINING);
        model.initialise();
        DataLoader loader({synthetic_source(uint64_t(c.seed), 60000, 0)}, of_rank(0));
        const Partition& p = model.partition;
        size_t gradient_calls = 0, gathers = 0, squares_calls = 0;
        emu::Peers peers;
        peers.eager = eager;
        peers.add = [&](const void* in, float* sums, size_t total) {
            const size_t call = gradient_calls++, b = p.buckets() - 1 - call % p.buckets();  // the last bucket first
            const Expected& e = expected[call / p.buckets()];
            const bool narrow = c.grad_reduce == "bf16";
            if (!narrow && in != model.grads + p.begin(b))
                std::printf("    bucket %zu is not where it was expected\n", b);
            for (size_t i = 0; i < total; i++)
                sums[i] += narrow ? rounded(e.peer_grads[p.begin(b) + i]) : e.peer_grads[p.begin(b) + i];
        };
        peers.add_doubles = [&](double* sums, size_t total) {
            const Expected& e = expected[squares_calls++];
            if (total > model.chunks()) sums[model.chunks()] += e.peer_loss;
            for (const Piece& piece : p.parts(1))
                for (size_t chunk = piece.begin / CHUNK; chunk < (piece.begin + piece.count) / CHUNK; chunk++)
                    sums[chunk] += e.squares[chunk];
        };
        peers.gather = [&](char* out, size_t bytes) {
            const size_t call = gathers++, b = call % p.buckets();
            std::memcpy(out + bytes, expected[call / p.buckets()].params.data() + p.part(b, 1).begin, bytes);
        };
        emu::peers = &peers;
        emu::machine.run_late = true;
        bool same = true;
        ncclComm_t communicator = nullptr;
        NCCL_CHECK(ncclCommInitRank(&communicator, 2, {}, 0));
        world.communicator = communicator;
        {  // the reducer's end waits for what it has launched, for which the communicator must still be there
            NcclReducer reducer(dev, world, p, model.grads, {c.zero == 1, c.grad_reduce == "bf16"});
            const auto receive = [&](int step) {
                while (!dev.has_results()) {
                }
                const std::vector<double> results = dev.receive();
                const Expected& e = expected[size_t(step - 1)];
                same = same && results[0] == e.loss && results[1] == e.norm_squared;
                if (norm_squared) *norm_squared = results[1];
            };
            for (int step = 1; step <= steps; step++) {
                accumulate_gradients(model, a, loader, world, false, &reducer);
                gradient_norm(model, step, &reducer);
                dev.send(model.results, model.RESULTS);
                apply_update(model, step, 1e-2, &reducer);
                if (step > 1) receive(step - 1);
            }
            receive(steps);
            same = same && nccl_error(communicator).empty();
            if (eager) {
                CUDA_CHECK(cudaDeviceSynchronize());
                reducer.read_clocks();
                same = same && reducer.times.steps == steps && reducer.times.total >= reducer.times.exposed &&
                       reducer.times.total > 0;
            }
        }
        NCCL_CHECK(ncclCommDestroy(communicator));
        world.communicator = nullptr;
        std::vector<Cuda::real> params(p.elements);
        dev.copy(params.data(), static_cast<const Cuda::real*>(model.params), p.elements);
        emu::machine.run_late = false;
        emu::peers = nullptr;
        // After the tensors there are the guard element and padding, which nobody reads.
        same = same &&
               std::memcmp(params.data(), expected.back().params.data(), model.table.total * sizeof(Cuda::real)) == 0;
        for (auto [field, whole] :
             {std::make_pair(model.m, &m), std::make_pair(model.v, &v), std::make_pair(model.master, &master)}) {
            std::vector<float> found(model.state_elements());
            dev.copy(found.data(), static_cast<const float*>(field), found.size());
            for (const Piece& piece : model.owned)
                for (size_t i = piece.begin; i < std::min(piece.begin + piece.count, model.table.total); i++)
                    same = same && found[piece.m_at + (i - piece.begin)] == (*whole)[i];
        }
        return same;
    }
};

// What `check` and a run's plan say that parameters, gradients and state take is what the rank that has most allocates,
// but for sums, one for each of 4096 elements.
TEST(cuda_ddp_memory_is_what_the_plan_says) {
    for (const char* options : {"", "--zero 1", "--optimizer muon", "--optimizer muon --zero 1"}) {
        const Config c = engine_config(std::string("--bucket-mb 0.04 ") + options);
        Cuda dev(0);
        double largest = 0;
        for (int rank = 0; rank < 3; rank++) {
            const size_t before = dev.live_bytes;
            const Model<Cuda> model(dev, c, true, rank, 3);
            largest = std::max(largest, double(dev.live_bytes - before));
        }
        const double planned = Model<Cuda>::flat_bytes(c, 3);
        CHECK(planned <= largest && largest < 1.003 * planned);
    }
}
TEST_LONG(cuda_ddp_streams_wait_for_each_other) {
    for (const char* options : {"--bucket-mb 0.04", "--bucket-mb 0.04 --zero 1", "--bucket-mb 0.04 --grad-reduce bf16",
                                "--bucket-mb 0.04 --grad-reduce bf16 --zero 1"}) {
        TwoRanks ranks(options);
        CHECK(Partition(TensorTable(ranks.c).total, 2, ranks.c.bucket_mb).buckets() >= 3);
        ranks.compute_expected();
        for (const bool eager : {false, true}) {
            tests().checks++;
            if (!ranks.run(eager))
                check_failed(__FILE__, __LINE__,
                             "%s, collectives as %s as they may run: other numbers than the sum of both ranks", options,
                             eager ? "early" : "late");
        }
    }
}
// A loss that is not finite keeps every rank from its update, whichever rank has it and although all gradients are
// finite: with the optimiser's state shared out too, where this rank never sees the other's guard among the gradients.
TEST(cuda_ddp_bad_loss_of_another_rank) {
    for (const char* options : {"--bucket-mb 0.04", "--bucket-mb 0.04 --zero 1"}) {
        TwoRanks ranks(options);
        ranks.compute_expected(1);
        for (const double loss : {5.5, double(INFINITY)}) {
            ranks.expected[0].peer_loss = loss, ranks.expected[0].peer_grads[TensorTable(ranks.c).total] = float(loss);
            double norm_squared = 0;
            ranks.run(false, 1, &norm_squared);
            CHECK_EQUAL(std::isnan(norm_squared), std::isinf(loss));
        }
    }
}
#endif
