// cuda_tests.cpp: the CUDA engine's kernels executed on the CPU by dev/emulator/cuda_on_cpu.h and compared with struct
// Cpu. Compiled by g++, plain and as the CHECK build, which reports races, reads of memory that nothing wrote and
// accesses outside any array; see dev/dev.mk.
#include "../harness.h"

#include "../cuda/cuda_op_tests.h"
#include "../cuda/attention_kernel_tests.h"
#include "../cuda/long_context_tests.h"
#include "../cuda/ladder_tests.h"
#ifndef EMU_CHECK  // whole models launch no kernel that the tests above do not
#include "../model/engine_model_tests.h"
#include "../cuda/cuda_ddp_tests.h"
#include "../cuda/cuda_model_tests.h"
#include "../cuda/bench_tests.h"
#endif
#include "../cuda/device_results.h"

int main(int argc, char** argv) {
    emu::machine.rough = true;  // a GPU's errors, so that the tests' limits hold on one
    const int status = device_results::main_of(argc, argv);
    return status >= 0 ? status : run_tests(argc, argv);
}
