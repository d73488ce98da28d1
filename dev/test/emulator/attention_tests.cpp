// attention_tests.cpp: those of cuda_tests whose kernels differ from one generation of GPUs to the next, for GPUs of
// other compute capabilities than 9.0; see dev/dev.mk.
#include "../engines.h"
#include "../cuda/attention_kernel_tests.h"

int main(int argc, char** argv) {
    emu::machine.rough = true;  // as in cuda_tests.cpp
    return run_tests(argc, argv);
}
