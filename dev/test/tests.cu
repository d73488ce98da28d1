// tests.cu: the tests of the model on the host, and those of the device where nvcc or hipcc compiles this. Every test
// is a TEST(name) in a folder beside this file, or an ENGINE_TEST(name), which every engine of the build gets under a
// name of its own (engines.h); read them in the order of the includes. ../../test_nsa.cu is a first test to learn from.
// The tests of the program and its data are an object of their own, program_tests.cpp, linked into the same
// build/tests.
//   build/tests [--list] [--only SUBSTRING]     the last line is "N passed, N failed", the exit status 1 if any failed
//   build/tests --perf [options of train]       times every operation of a training step against the machine's ceilings
// and, compiled by nvcc as build/test_device,
//   --perf-attention [options]                  times attention alone, every branch, at several sequence lengths
//   --ladder [options of train]                 times the attention kernels from the plainest to the trainer's
//   --write-results FILE, --compare-results FILE   the kernels' results here beside another device's
// -DDEVICE_TESTS_ONLY leaves out the tests of the host: that is build/test_device, which is built in less than half the
// time. Built by nvcc, the tests of the CUDA engine are here too and run on the GPU, if there is one; without nvcc see
// dev/test/emulator/cuda_tests.cpp. With GPU=NAME they are those of the engine in dev/ports/NAME.
#include "harness.h"

#ifdef DEVICE_TESTS_ONLY
#define NSA_WITHOUT_MAIN
#include "../../train_nsa.cu"  // which says whether there is a CUDA engine
#else
#include "ops/op_tests.h"
#include "ops/op_attention_tests.h"
#include "model/model_tests.h"
#include "model/engine_model_tests.h"
#include "model/decode_tests.h"
#include "model/choice_tests.h"
#include "model/eval_tests.h"
#include "model/export_tests.h"
#include "model/inspect_tests.h"
#include "model/cpu_speed_tests.h"
#include "cuda/profile_tests.h"
#include "ranks/ddp_tests.h"
#include "ranks/emulated_run_tests.h"
#include "ranks/launch_tests.h"
#endif
#if defined(ENGINE) && defined(DEVICE_TESTS_ONLY)  // of dev/ports/NAME
#include "ops/row_tests.h"
#include "ops/attention_tests.h"
#include "model/engine_model_tests.h"
#endif
#ifdef USE_CUDA
#include "cuda/cuda_op_tests.h"
#include "cuda/attention_kernel_tests.h"
#include "cuda/long_context_tests.h"
#include "cuda/cuda_model_tests.h"
#include "cuda/bench_tests.h"
#include "cuda/ladder_tests.h"
#include "cuda/device_results.h"
#endif
#include "../bench/perf.h"
#ifdef USE_CUDA
#include "../bench/attention.h"
#endif

static int ladder(int argc, char** argv) {
    Config c = parse_options(argc, argv);
    if (!c.is_given("model")) c.model = "125m";
    apply_preset(c);
    validate_model(c, "options");
    if (!c.is_given("batch")) c.batch = preset_of(c).batch;
    World world;
    if (!choose_device(c, world, search_gpus()).gpu)
        fail("--ladder: there is no GPU to time the kernels on (or the build holds no CUDA engine)");
#ifdef USE_CUDA
    Timed<Cuda> dev(0);
    return run_ladder(dev, shape_of(c, c.batch, c.seq_len));
#else
    return 1;
#endif
}

// Without a GPU the tests of the CUDA engine have nothing to run on.
static void leave_out_device_tests() {
#if defined(ENGINE) && defined(DEVICE_TESTS_ONLY)
    const GpuSearch found = DeviceEngine::search();
    if (found.count > 0) return;
    tests().cases.clear();
    skip("the tests of the " + found.engine.name + " engine: " + found.why);
#elif defined(USE_CUDA)
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0) return;
    std::vector<TestCase>& cases = tests().cases;
    const auto on_device = [](const TestCase& t) {
        return !std::strncmp(t.name, "cuda_", 5) || !std::strncmp(t.name, "attention_kernels_", 18) ||
               !std::strncmp(t.name, "ladder_", 7);
    };
    cases.erase(std::remove_if(cases.begin(), cases.end(), on_device), cases.end());
    skip("the tests of the CUDA engine on the device: there is no GPU here (make test runs them in emulation)");
#endif
}

int main(int argc, char** argv) {
    set_omp_wait(argv);
    leave_out_device_tests();
    try {
#ifdef USE_CUDA
        if (const int status = device_results::main_of(argc, argv); status >= 0) return status;
        if (argc > 1 && !std::strcmp(argv[1], "--perf-attention")) return run_attention_bench(argc - 1, argv + 1);
#endif
        if (argc > 1 && !std::strcmp(argv[1], "--perf")) return run_perf(argc - 1, argv + 1);
        if (argc > 1 && !std::strcmp(argv[1], "--ladder")) return ladder(argc - 1, argv + 1);
    } catch (const Error& e) {
        std::fprintf(stderr, "tests: error: %s\n", e.what());
        return e.status;
    }
    return run_tests(argc, argv);
}
