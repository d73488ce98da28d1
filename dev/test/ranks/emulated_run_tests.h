// emulated_run_tests.h: the whole program on several GPUs, where there is none: BUILD/train_nsa_emulated
// (dev/dev.mk) has the CUDA engine run by dev/emulator/cuda_on_cpu.h and NCCL by
// dev/emulator/nccl.h, one emulated GPU a rank. Its ncclCommDestroy waits for all ranks, as the real
// one does, so a rank that leaves alone hangs.
#pragma once
#include "../program/program.h"

namespace emulated_runs {
using namespace program;

#define TEXT_OF(word) #word
#define TEXT_OF_VALUE(macro) TEXT_OF(macro)
#ifndef BUILD_FOLDER
#define BUILD_FOLDER build
#endif

// {program's path}, or {mpirun, its arguments, the path}; empty with a note where it is not built or there is no MPI.
inline Words program_on(int gpus, const char* what) {
    static const std::string path =
        std::filesystem::absolute(TEXT_OF_VALUE(BUILD_FOLDER) "/train_nsa_emulated").string();
    const std::string mpirun = find_mpirun(what);
    if (mpirun.empty()) return {};
    if (!file_exists(path))
        return skip(format_text("%s: %s is not built; make test builds it", what, path.c_str())), Words();
    return gpus == 1 ? Words{path} : Words{mpirun, "-np", std::to_string(gpus), path};
}
// The smallest model that the tensor-core kernels take; a step of four samples.
inline Options options_of(const Options& more) {
    return merged(small({{"dim", "32"},
                         {"head-dim", "16"},
                         {"slc-block", "16"},
                         {"total-batch", "256"},
                         {"batch", "1"},
                         {"eval-batches", "1"},
                         {"bucket-mb", "0.02"},
                         {"device", "cuda"}}),
                  more);
}
// gpus: those of the machine; 0: as many as the program has, four. late: streams run as late as the program's waits
// allow, so that a missing one shows.
inline Result train_on(const Words& program, const Options& more, int gpus = 0, bool late = false) {
    Start start;
    if (gpus) start.environment.push_back("EMULATED_GPUS=" + std::to_string(gpus));
    if (late) start.environment.push_back("EMULATED_LATE=1");
    return execute(joined(program, words_of(options_of(more))), start);
}

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
TEST_LONG(emulated_gpus_give_the_same_bits) {
    using namespace emulated_runs;
    const Words two = program_on(2, "the whole program on emulated GPUs");
    if (two.empty()) return;
    TempFolder folder;
    const auto with = [&](const char* out, const Options& more) {
        return train_on(
            two,
            merged({{"steps", "4"}, {"save-every", "2"}, {"schedule", "constant"}, {"out", folder.file(out)}}, more));
    };
    const Result first = with("two", {});
    REQUIRE_GOOD(first);
    CHECK(first.out.find("device: GPU 0, cuda_on_cpu") != std::string::npos &&
          first.out.find("gradients travel by NCCL") != std::string::npos);
    REQUIRE_GOOD(with("zero", {{"zero", "1"}}));
    REQUIRE_GOOD(with("resumed", {{"steps", "2"}, {"zero", "1"}}));
    REQUIRE_GOOD(with("resumed", {{"resume", "on"}}));
    REQUIRE_GOOD(with("muon", {{"optimizer", "muon"}}));
    REQUIRE_GOOD(with("muon_zero", {{"optimizer", "muon"}, {"zero", "1"}}));
    REQUIRE_GOOD(with("muon_resumed", {{"optimizer", "muon"}, {"steps", "2"}}));
    REQUIRE_GOOD(with("muon_resumed", {{"resume", "on"}, {"zero", "1"}}));
    CHECK_EQUAL(logged(folder.file("two"), "loss").size(), 4u);
    for (const auto& [one, other] : {std::array<std::string, 2>{"two", "zero"},
                                     {"two", "resumed"},
                                     {"muon", "muon_zero"},
                                     {"muon", "muon_resumed"}}) {
        for (const char* field : {"loss", "grad_norm"})
            CHECK(logged(folder.file(other), field) == logged(folder.file(one), field));
        CHECK(read_file(folder.file(other + "/step_00000004/model.safetensors")) ==
              read_file(folder.file(one + "/step_00000004/model.safetensors")));
    }
}

// A dump says in which precision the engine computes.
TEST(emulated_gpu_dumps_its_precision) {
    using namespace emulated_runs;
    const Words one = program_on(1, "a dump of an emulated GPU");
    if (one.empty()) return;
    TempFolder folder;
    const std::string file = folder.file("state.safetensors");
    const Result r = train_on(one, {{"batch", "4"}, {"init", "random"}, {"dump-state", file}});
    REQUIRE_GOOD(r);
    CHECK_EQUAL(read_raw(file).metadata.at("precision"), std::string("bf16"));
}

// --attention-kernel: every kind computes the same loss. Each may err by the limit that engine_model_tests.h derives
// for bf16. What does not fit is refused by a line that says what does.
struct StoredInBf16 {
    using Value = float;
    static constexpr bool NARROW = true;
};
TEST(emulated_gpu_attention_kernel_is_an_option) {
    using namespace emulated_runs;
    const Words one = program_on(1, "kernels of attention on an emulated GPU");
    if (one.empty()) return;
    TempFolder folder;
    const struct {
        const char *kernel, *says;
    } cases[] = {{"auto", "attention by gathered_rows or warpgroups or tensor_cores, because"},
                 {"plain", "attention by plain, because"},
                 {"tensor_cores", "attention by tensor_cores, because"},
                 {"gathered_rows", "attention by gathered_rows, because"}};
    for (const auto& c : cases) {
        const Result r =
            train_on(one, {{"steps", "1"}, {"attention-kernel", c.kernel}, {"out", folder.file(c.kernel)}});
        REQUIRE_GOOD(r);
        CHECK(r.out.find(c.says) != std::string::npos);
        const double loss = logged(folder.file("auto"), "loss").at(0);
        CHECK_NEAR(logged(folder.file(c.kernel), "loss").at(0), loss, 2 * model_limit<StoredInBf16>(2) * loss);
    }
    const auto norm = [&](const char* kernel) { return logged(folder.file(kernel), "grad_norm").at(0); };
    CHECK_EQUAL(norm("tensor_cores"), norm("auto"));  // which takes them for sequences so short
    CHECK(norm("plain") != norm("auto"));             // other kernels round elsewhere
    const auto refused = [&](const Options& more) { return train_on(one, merged(more, {{"out", folder.file("no")}})); };
    CHECK_REFUSED(refused({{"attention-kernel", "wgmma"}}), 2,
                  "--attention-kernel is 'wgmma'; the CUDA engine of this "
                  "build (bf16) has auto, gathered_rows, warpgroups, tensor_cores, plain");
    CHECK_REFUSED(refused({{"attention-kernel", "tensor_cores"}, {"head-dim", "24"}}), 2,
                  "--attention-kernel tensor_cores is not for heads of dimension 24 on a GPU of 9.0");
    CHECK_REFUSED(refused({{"attention-kernel", "warpgroups"}}), 2,
                  "--attention-kernel warpgroups is not for heads of dimension 16 on a GPU of 9.0");
    CHECK_REFUSED(refused({{"attention-kernel", "plain"}, {"device", "cpu"}}), 2,
                  "--attention-kernel plain: the CPU engine has no choice of kernels; leave it out");
    REQUIRE_GOOD(refused({{"attention-kernel", "plain"}, {"head-dim", "24"}, {"steps", "1"}}));
    const Result check = execute(joined(one, {"check", "--device", "cuda", "--attention-kernel", "plain"}));
    CHECK(check.out.find("--attention-kernel auto, gathered_rows, warpgroups, tensor_cores, plain") !=
              std::string::npos &&
          check.out.find("attention by plain\n") != std::string::npos);
}

// Buckets that travel during the backward pass, between GPUs of one rank each.
TEST(emulated_gpus_sum_gradients) {
    using namespace emulated_runs;
    const char* what = "gradients of emulated GPUs";
    const Words one = program_on(1, what), two = program_on(2, what);
    if (one.empty()) return;
    TempFolder folder;
    REQUIRE_GOOD(train_on(one, {{"steps", "1"}, {"out", folder.file("one")}}));
    for (const char* reduce : {"fp32", "bf16"})
        for (const char* zero : {"0", "1"}) {
            const std::string out = folder.file(std::string(reduce) + zero);
            const Result r = train_on(two, {{"steps", "1"}, {"grad-reduce", reduce}, {"zero", zero}, {"out", out}});
            CHECK_EQUAL(r.status, 0);
            CHECK(r.out.find("gradients travel by NCCL, in ") != std::string::npos);
            check_first_step(out, folder.file("one"), *reduce == 'b' ? BF16_ROUNDINGS : FP32_ROUNDINGS);
        }
}

// More ranks than GPUs: gradients travel through the host, and the losses are those of one rank. Then a resume on one
// rank, with a GPU for itself.
TEST(emulated_ranks_share_a_gpu) {
    using namespace emulated_runs;
    const char* what = "ranks that share an emulated GPU";
    const Words one = program_on(1, what);
    if (one.empty()) return;
    TempFolder folder;
    const auto with = [&](const std::string& out, Options more = {}) {
        more.insert({{"total-batch", "384"}, {"steps", "1"}, {"schedule", "constant"}, {"out", folder.file(out)}});
        return more;
    };
    REQUIRE_GOOD(train_on(one, with("one")));
    const struct {
        int ranks, gpus;
        Options more;
    } cases[] = {{2, 1, {}},
                 {2, 1, {{"zero", "1"}, {"recompute", "2"}}},
                 {3, 2, {{"grad-reduce", "bf16"}, {"zero", "1"}}},
                 {3, 2, {{"grad-reduce", "bf16"}, {"recompute", "1"}}}};
    for (const auto& c : cases) {
        const std::string out = format_text("case%d", int(&c - cases));
        const bool late = c.ranks == 2;
        const Result r = train_on(program_on(c.ranks, what), with(out, c.more), c.gpus, late);
        CHECK_EQUAL(r.status, 0);
        CHECK(r.out.find("gradients travel by MPI through the host, because 2 ranks share GPU 0 (cuda_on_cpu") !=
              std::string::npos);
        CHECK(r.out.find("; one rank a GPU is faster, in ") != std::string::npos);
        const bool bf16 = c.more.count("grad-reduce");
        check_first_step(folder.file(out), folder.file("one"), bf16 ? BF16_ROUNDINGS : FP32_ROUNDINGS);
    }
    CHECK_EQUAL(train_on(one, with("case1", {{"resume", "on"}, {"steps", "2"}}), 1).status, 0);
    CHECK_EQUAL(logged(folder.file("case1"), "loss").size(), 2u);
}

// Each rank has its own --threads; GPUs and CPUs do not mix, which is said as it is.
TEST(emulated_gpus_with_unlike_ranks) {
    using namespace emulated_runs;
    const Words two = program_on(2, "two unlike ranks");
    if (two.empty()) return;
    TempFolder folder;
    const auto unlike = [&](const Options& first, const Options& second) {
        const auto with = [&](const Options& more) { return joined({two[3]}, words_of(options_of(more))); };
        return execute(two_ranks(two[0], with(first), with(second)));
    };
    const std::string out = folder.file("run");
    CHECK_EQUAL(unlike({{"steps", "1"}, {"out", out}}, {{"steps", "1"}, {"out", out}, {"threads", "2"}}).status, 0);
    const Result mixed = unlike({{"out", folder.file("mixed")}}, {{"out", folder.file("mixed")}, {"device", "cpu"}});
    CHECK(mixed.status != 0 && mixed.status != 1000);
    for (const char* words :
         {"device: CPU, because --device cpu", "all ranks compute on GPUs or all on CPUs", "--device cpu"})
        CHECK(mixed.err.find(words) != std::string::npos);
}

// An error of one rank is told, and ends all, at once. Rank 0 alone gives up after
// bad steps while the others wait for it; a bad token is met by rank 1 alone.
TEST(emulated_gpus_error_on_one_rank_ends_all) {
    using namespace emulated_runs;
    const Words two = program_on(2, "an error on one of two emulated GPUs");
    if (two.empty()) return;
    TempFolder folder;
    const Result bad = train_on(
        two, {{"lr", "10"}, {"grad-clip", "0"}, {"weight-decay", "10"}, {"steps", "12"}, {"out", folder.file("bad")}});
    CHECK(bad.status != 0 && bad.status != 1000);
    for (const char* words : {"train_nsa: rank 0 on ", "GPU 0: error: step ", "3 in a row"})
        CHECK(bad.err.find(words) != std::string::npos);
    write_good_and_bad_shard(folder);
    const Result token = train_on(
        two,
        {{"data", folder.file("train_*.bin")}, {"total-batch", "128"}, {"steps", "20"}, {"out", folder.file("token")}});
    CHECK(token.status != 0 && token.status != 1000);
    for (const char* words : {"train_nsa: rank 1 on ", "GPU 1: error: ", "token 300"})
        CHECK(token.err.find(words) != std::string::npos);
}
