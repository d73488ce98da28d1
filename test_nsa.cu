// test_nsa.cu: the one test harness. Every test is a TEST(name) in dev/test/; this file finds, runs and counts them.
//   ./test_nsa [--list] [--only SUBSTRING]      the last line is "N passed, N failed", the exit status 1 if any failed
#include "dev/test/harness.h"

#include "dev/test/util_tests.h"
#include "dev/test/tokenizer_tests.h"
#include "dev/test/data_tests.h"
#include "dev/test/op_tests.h"
#include "dev/test/model_tests.h"

int main(int argc, char** argv) {
    let_waiting_threads_sleep(argv);
    return run_tests(argc, argv);
}
