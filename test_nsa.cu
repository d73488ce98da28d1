// test_nsa.cu: the one test harness. Every test is a TEST(name) in dev/test/; this file finds, runs and counts them.
//   ./test_nsa [--list] [--only SUBSTRING]      the last line is "N passed, N failed", the exit status 1 if any failed
//   ./test_nsa --perf [options of train]        times every operation of a training step against the machine's ceilings
#include "dev/test/harness.h"

#include "dev/test/util_tests.h"
#include "dev/test/tokenizer_tests.h"
#include "dev/test/data_tests.h"
#include "dev/test/op_tests.h"
#include "dev/test/model_tests.h"
#include "dev/test/run_tests.h"
#include "dev/bench/perf.h"

int main(int argc, char** argv) {
    let_waiting_threads_sleep(argv);
    try {
        if (argc > 1 && !std::strcmp(argv[1], "--perf")) return run_perf(argc - 1, argv + 1);
    } catch (const Error& e) {
        std::fprintf(stderr, "test_nsa: error: %s\n", e.what());
        return e.status;
    }
    return run_tests(argc, argv);
}
