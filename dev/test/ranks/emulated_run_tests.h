// emulated_run_tests.h: the whole program on several GPUs, where there is none: train_nsa_emulated
// (dev/dev.mk), beside the tests, has the CUDA engine run by dev/emulator/cuda_on_cpu.h and NCCL by
// dev/emulator/nccl.h, one emulated GPU a rank. Its ncclCommDestroy waits for all ranks, as the real
// one does, so a rank that leaves alone hangs.
#pragma once
#include "../program/program.h"

// One whose program is the emulated one; left out with a note where that is not built or there is no MPI.
#define EMULATED_TEST(name) TEST_IN_FOLDER(TEST, name, emulated_runs::find_program(t, #name))
#define EMULATED_TEST_LONG(name) TEST_IN_FOLDER(TEST_LONG, name, emulated_runs::find_program(t, #name))

namespace emulated_runs {
using namespace program;

inline bool find_program(InFolder& in, const char* what) {
    in.binary = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "train_nsa_emulated";
    if (!in.find_ranks(what)) return false;
    if (file_exists(in.binary)) return true;
    return skip(format_text("%s: %s is not built; make test builds it", what, in.binary)), false;
}
// The smallest model that the tensor-core kernels take; a step of four samples.
const std::string SMALL_ON_GPU =
    "small --dim=32 --head-dim=16 --slc-block=16 --total-batch=256 --batch=1 --eval-batches=1 --bucket-mb=0.02 "
    "--device=cuda ";

// The first step of a run on several ranks is that of one: the loss is the same, whoever computes which samples, and
// the norm but for the roundings of sums: of samples in fp32, each at most 2^-24 of the norms of what is added, or of
// --grad-reduce bf16, 2^-9 for each addend and each sum.
constexpr double FP32_ROUNDINGS = 8 * 0x1p-24, BF16_ROUNDINGS = 4 * 0x1p-9;
inline void check_first_step(const std::string& run, const std::string& one, double roundings) {
    const std::vector<double> loss = logged(one, "loss"), norm = logged(one, "grad_norm"),
                              loss_here = logged(run, "loss"), norm_here = logged(run, "grad_norm");
    REQUIRE(!loss.empty() && !norm.empty() && loss_here.size() == loss.size() && norm_here.size() == norm.size());
    CHECK_NEAR(loss_here[0], loss[0], 1e-6);  // the log's last digit
    CHECK_NEAR(norm_here[0], norm[0], 2 * norm[0] * roundings + 1e-6);
}

}  // namespace emulated_runs

// The same losses and weights, bit for bit, on two GPUs each time, with the optimiser's state shared out or not (a + b
// has one order), in one go or resumed.
EMULATED_TEST_LONG(emulated_gpus_give_the_same_bits) {
    using namespace emulated_runs;
    const std::string common = SMALL_ON_GPU + "--save-every=2 --schedule=constant --steps=";
    const Result first = run_on(2, common + "4 --out=@/two");
    REQUIRE_GOOD(first);
    CHECK(holds(first.out, "device: GPU 0, cuda_on_cpu", "gradients travel by NCCL"));
    for (const char* more :
         {"4 --out=@/zero --zero=1", "2 --out=@/resumed --zero=1", "4 --out=@/resumed --resume=on",
          "4 --out=@/muon --optimizer=muon", "4 --out=@/muon_zero --optimizer=muon --zero=1",
          "2 --out=@/muon_resumed --optimizer=muon", "4 --out=@/muon_resumed --resume=on --optimizer=muon --zero=1"})
        REQUIRE_GOOD(run_on(2, common + more));
    CHECK_EQUAL(logged(file("two"), "loss").size(), 4u);
    const char* const pairs[][2] = {
        {"two", "zero"}, {"two", "resumed"}, {"muon", "muon_zero"}, {"muon", "muon_resumed"}};
    for (const auto& [one, other] : pairs) {
        for (const char* field : {"loss", "grad_norm"}) CHECK(logged(file(other), field) == logged(file(one), field));
        CHECK(weights_of(file(other), 4) == weights_of(file(one), 4));
    }
}

// A dump says in which precision the engine computes.
EMULATED_TEST(emulated_gpu_dumps_its_precision) {
    using namespace emulated_runs;
    REQUIRE_GOOD(run(SMALL_ON_GPU + "--batch=4 --init=random --dump-state=@/state"));
    CHECK_EQUAL(SafeTensors(file("state")).metadata.at("precision"), std::string("bf16"));
}

// --attention-kernel: every kind computes the same loss. Each may err by the limit that engine_model_tests.h derives
// for bf16. What does not fit is refused by a line that says what does.
struct StoredInBf16 {
    using Value = float;
    static constexpr bool NARROW = true;
};
EMULATED_TEST(emulated_gpu_attention_kernel_is_an_option) {
    using namespace emulated_runs;
    const std::string by = SMALL_ON_GPU + "--steps=1 --attention-kernel=";
    const std::pair<std::string, std::string> cases[] = {{"auto", "gathered_rows or warpgroups or tensor_cores"},
                                                         {"plain", "plain"},
                                                         {"tensor_cores", "tensor_cores"},
                                                         {"gathered_rows", "gathered_rows"}};
    for (const auto& [kernel, said] : cases) {
        CHECK(holds(printed(by + kernel + " --out=@/" + kernel), "attention by " + said + ", because"));
        const double loss = logged(file("auto"), "loss").at(0);
        CHECK_NEAR(logged(file(kernel), "loss").at(0), loss, 2 * model_limit<StoredInBf16>(2) * loss);
    }
    const auto norm = [&](const char* kernel) { return logged(file(kernel), "grad_norm").at(0); };
    CHECK_EQUAL(norm("tensor_cores"), norm("auto"));  // which takes them for sequences so short
    CHECK(norm("plain") != norm("auto"));             // other kernels round elsewhere
    check({{by + "wgmma",
            2,
            {"--attention-kernel is 'wgmma'; the CUDA engine of this build (bf16) has auto, gathered_rows, warpgroups, "
             "tensor_cores, plain"}},
           {by + "tensor_cores --head-dim=24",
            2,
            {"--attention-kernel tensor_cores is not for heads of dimension 24 on a GPU of 9.0"}},
           {by + "warpgroups", 2, {"--attention-kernel warpgroups is not for heads of dimension 16 on a GPU of 9.0"}},
           {by + "plain --device=cpu",
            2,
            {"--attention-kernel plain: the CPU engine has no choice of kernels; leave it out"}}});
    REQUIRE_GOOD(run(by + "plain --head-dim=24"));
    CHECK(holds(run("check --device cuda --attention-kernel plain").out, "attention by plain\n",
                "--attention-kernel auto, gathered_rows, warpgroups, tensor_cores, plain"));
}

// Buckets that travel during the backward pass, between GPUs of one rank each.
EMULATED_TEST(emulated_gpus_sum_gradients) {
    using namespace emulated_runs;
    REQUIRE_GOOD(run(SMALL_ON_GPU + "--steps=1"));
    for (const std::string reduce : {"fp32", "bf16"})
        for (const std::string zero : {"0", "1"}) {
            const Result r =
                run_on(2, SMALL_ON_GPU + "--steps=1 --out=@/two --grad-reduce=" + reduce + " --zero=" + zero);
            CHECK_EQUAL(r.status, 0);
            CHECK(holds(r.out, "gradients travel by NCCL, in "));
            check_first_step(file("two"), out, reduce == "bf16" ? BF16_ROUNDINGS : FP32_ROUNDINGS);
        }
}

// More ranks than GPUs: gradients travel through the host, and the losses are those of one rank. Where streams run as
// late as the program's waits allow, a missing wait shows. Then a resume on one rank, with a GPU for itself.
EMULATED_TEST(emulated_ranks_share_a_gpu) {
    using namespace emulated_runs;
    const std::string common = SMALL_ON_GPU + "--total-batch=384 --schedule=constant --steps=1 ";
    REQUIRE_GOOD(run(common));
    const Words late = {"EMULATED_GPUS=1", "EMULATED_LATE=1"}, two_gpus = {"EMULATED_GPUS=2"};
    const struct {
        int ranks;
        Words environment;
        std::string more;
        double roundings;
    } cases[] = {{2, late, "", FP32_ROUNDINGS},
                 {3, two_gpus, "--grad-reduce=bf16 --zero=1", BF16_ROUNDINGS},
                 {3, two_gpus, "--grad-reduce=bf16 --recompute=1", BF16_ROUNDINGS},
                 {2, late, "--zero=1 --recompute=2", FP32_ROUNDINGS}};
    for (const auto& c : cases) {
        const Result r = run_on(c.ranks, common + "--out=@/shared " + c.more, {c.environment});
        CHECK_EQUAL(r.status, 0);
        CHECK(holds(r.out, "gradients travel by MPI through the host, because 2 ranks share GPU 0 (cuda_on_cpu",
                    "; one rank a GPU is faster, in "));
        check_first_step(file("shared"), out, c.roundings);
    }
    CHECK_EQUAL(run(common + "--out=@/shared --resume=on --steps=2", {{"EMULATED_GPUS=1"}}).status, 0);
    CHECK_EQUAL(logged(file("shared"), "loss").size(), 2u);
}

// Each rank has its own --threads; GPUs and CPUs do not mix, two kinds of GPUs where one rank updates a weight.
EMULATED_TEST(emulated_gpus_with_unlike_ranks) {
    using namespace emulated_runs;
    const auto unlike = [&](const std::string& common, const std::string& second) {
        return execute(two_ranks(mpirun, started(common), started(common + second)));
    };
    CHECK_EQUAL(unlike(SMALL_ON_GPU + "--steps=1 ", "--threads=2").status, 0);
    const Result mixed = unlike(SMALL_ON_GPU + "--out=@/mixed ", "--device=cpu");
    CHECK(mixed.status != 0 && mixed.status != 1000);
    CHECK(holds(mixed.err, "has 'device: CPU', rank 0 on ", "all ranks compute on GPUs or all on CPUs"));
    for (const std::string zero : {"0", "1"}) {
        Words other = started(SMALL_ON_GPU + "--steps=1 --zero=" + zero), first = other;
        other.insert(other.begin(), {"env", "EMULATED_PROCESSORS=8"});
        const Result r = execute(two_ranks(mpirun, first, other));
        CHECK(zero == "1" ? r.status == 0 : r.status && holds(r.err, "8 multiprocessors", "--zero 1"));
    }
}

// An error of one rank is told, and ends all, at once. Rank 0 alone gives up after
// bad steps while the others wait for it; a bad token is met by rank 1 alone.
EMULATED_TEST(emulated_gpus_error_on_one_rank_ends_all) {
    using namespace emulated_runs;
    write_good_and_bad_shard(folder);
    const struct {
        const char *more, *rank, *error, *named;
    } cases[] = {
        {"--lr=10 --grad-clip=0 --weight-decay=10 --steps=12", "rank 0 on ", "GPU 0: error: step ", "3 in a row"},
        {"--data=@/train_*.bin --total-batch=128 --steps=20", "rank 0 on ", "GPU 0: error: rank 1: ", "token 300"}};
    for (const auto& c : cases) {
        const Result r = run_on(2, SMALL_ON_GPU + c.more);
        CHECK(r.status != 0 && r.status != 1000);
        CHECK(holds(r.err, std::string("train_nsa: ") + c.rank, c.error, c.named));
    }
}
