// emulator_tests.cpp: runs the tests of emulator_tests.h alone, in emulation (make build/emulator_tests, and
// build/emulator_tests_check for the CHECK build) or, compiled by nvcc, on a GPU.
#include "emulator_tests.h"

int main(int argc, char** argv) { return run_tests(argc, argv); }
