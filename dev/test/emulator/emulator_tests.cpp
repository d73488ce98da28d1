// emulator_tests.cpp: runs the tests of emulator_tests.h alone.
//   plain: g++ -std=c++17 -O2 -g -Wall -Wextra -fstack-clash-protection dev/test/emulator/emulator_tests.cpp -o
//   build/emulator_tests CHECK: g++ -std=c++17 -O1 -g -Wall -Wextra -fstack-clash-protection
//   -fsanitize=thread,undefined -fno-sanitize-recover=undefined
//              -c dev/test/emulator/emulator_tests.cpp -o build/emulator_tests_check.o
//          g++ build/emulator_tests_check.o -fsanitize=undefined -o build/emulator_tests_check
//   GPU:   nvcc -std=c++17 -arch=native -x cu dev/test/emulator/emulator_tests.cpp -lcublasLt -o build/on_gpu
#include "emulator_tests.h"

int main(int argc, char** argv) { return run_tests(argc, argv); }
