# emulator.mk: the tests that execute CUDA kernels on the CPU, in the plain and in the CHECK build of cuda_on_cpu.h: of
# the emulator itself, and of the CUDA engine (cuda_tests: every kernel, every operation, whole training steps). From
# the top:
#   make -f dev/emulator/emulator.mk test_emulator
#   make -f dev/emulator/emulator.mk build/train_nsa_emulated && mpirun -np 2 build/train_nsa_emulated --device cuda ...
#     the whole program, with NCCL's part played over shared memory
# CXX: a g++ for C++17. BUILD: where objects and programs go. RACE_PROGRAMS: random programs that the race detector is
# tried on.
CXX ?= g++
MPICXX ?= mpicxx
BUILD ?= build
RACE_PROGRAMS ?= 1000

EMULATOR_HEADERS = $(wildcard *.cu *.cuh *.h lib/*.h lib/*.cuh lib/hf/*.py lib/html/* dev/emulator/*.h dev/ladder/* \
  dev/bench/*.h dev/test/*.h dev/test/*.cuh)
EMULATOR_FLAGS = -std=c++17 -g -DUSE_NCCL -Wall -Wextra -Wno-unknown-pragmas -fstack-clash-protection $(if $(WERROR),-Werror)
# The CHECK build: compiled for the thread sanitizer but linked without it, since cuda_on_cpu_check.h has the functions
# that the compiler calls.
EMULATOR_CHECK = -O1 -fsanitize=thread,undefined -fno-sanitize-recover=undefined
EMULATOR_PLAIN_PROGRAMS = $(addprefix $(BUILD)/,emulator_tests planted_faults cuda_tests)
EMULATOR_CHECK_PROGRAMS = $(addprefix $(BUILD)/,emulator_tests_check planted_faults_check race_fuzz_check \
  cuda_tests_check)
EMULATOR_PROGRAMS = $(EMULATOR_PLAIN_PROGRAMS) $(EMULATOR_CHECK_PROGRAMS) $(BUILD)/cuda_tests_120
SHORT_EMULATOR_PROGRAMS = $(EMULATOR_PLAIN_PROGRAMS) $(BUILD)/emulator_tests_check
# Programs with their arguments, each one word of dev/run_tests.sh; without cuda_tests, which takes longest.
SHORT_EMULATOR_TESTS = $(BUILD)/emulator_tests $(BUILD)/emulator_tests_check '$(BUILD)/planted_faults 4'
# cuda_tests_120: a GPU of compute capability 12.0, which has other tile shapes.
LONG_EMULATOR_TESTS = '$(BUILD)/cuda_tests_120 --only attention_kernels_head' '$(BUILD)/planted_faults_check 2' \
  '$(BUILD)/race_fuzz_check $(RACE_PROGRAMS)'

.PHONY: test_emulator
test_emulator: $(EMULATOR_PROGRAMS)
	@dev/run_tests.sh $(BUILD)/cuda_tests_check $(BUILD)/cuda_tests $(SHORT_EMULATOR_TESTS) $(LONG_EMULATOR_TESTS)

$(EMULATOR_PLAIN_PROGRAMS): $(BUILD)/%: dev/test/%.cpp $(EMULATOR_HEADERS)
	@mkdir -p $(BUILD)
	$(CXX) $(EMULATOR_FLAGS) -O2 -pthread $(SAN_FLAGS) $< -o $@
$(BUILD)/cuda_tests_120: dev/test/cuda_tests.cpp $(EMULATOR_HEADERS)
	@mkdir -p $(BUILD)
	$(CXX) $(EMULATOR_FLAGS) -DEMULATED_CAPABILITY=120 -O2 -pthread $(SAN_FLAGS) $< -o $@
$(EMULATOR_CHECK_PROGRAMS): $(BUILD)/%_check: dev/test/%.cpp $(EMULATOR_HEADERS)
	@mkdir -p $(BUILD)
	$(CXX) $(EMULATOR_FLAGS) $(EMULATOR_CHECK) -c $< -o $@.o
	$(CXX) $@.o -fsanitize=undefined -pthread -o $@
# The whole program on up to four emulated GPUs, one for each rank; needs MPI's compiler. -x none: the wrapper adds
# libraries behind it.
$(BUILD)/train_nsa_emulated: train_nsa.cu $(EMULATOR_HEADERS)
	@mkdir -p $(BUILD)
	$(MPICXX) $(EMULATOR_FLAGS) -O2 -pthread -rdynamic -DEMULATED_GPUS=4 -DUSE_MPI -DOMPI_SKIP_MPICXX \
	    -DMPICH_SKIP_MPICXX $(SAN_FLAGS) -x c++ $< -x none -o $@
