// emulator_tests.cpp: runs the tests of emulator_tests.h alone; test_nsa.cu runs them with all others.
//   plain: g++ -std=c++17 -O2 -g -Wall -Wextra -fstack-clash-protection dev/test/emulator_tests.cpp -o
//   build/emulator_tests CHECK: g++ -std=c++17 -O1 -g -Wall -Wextra -fstack-clash-protection
//   -fsanitize=thread,undefined -fno-sanitize-recover=undefined
//              -c dev/test/emulator_tests.cpp -o build/emulator_tests_check.o
//          g++ build/emulator_tests_check.o -fsanitize=undefined -o build/emulator_tests_check
//   MPI:   mpicxx -std=c++17 -O2 -g -DEMU_MPI dev/test/emulator_tests.cpp -o build/emulator_tests_mpi
//          mpirun -n 2 build/emulator_tests_mpi --only nccl
//   GPU:   nvcc -std=c++17 -arch=native -x cu dev/test/emulator_tests.cpp -lcublasLt -o build/emulator_tests_gpu
#include "emulator_tests.h"

int main(int argc, char** argv) {
#ifdef EMU_MPI
    MPI_Init(&argc, &argv);
#endif
    const int status = run_tests(argc, argv);
#ifdef EMU_MPI
    MPI_Finalize();
#endif
    return status;
}
