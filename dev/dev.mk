# dev.mk: tests, goldens and benchmarks. Included by the Makefile, which knows the compilers and libraries.
#   make test        the tests, ten minutes on two cores with the building: programs are built and run side by side
#   make test_long   the others: the CHECK build of the emulator at full length, faults that take their time, registers
include dev/emulator/emulator.mk
include dev/crash_test/crash_test.mk

HOST_LIBS := $(filter-out -lcublasLt -lnccl,$(LIBS))
# The tests of the host, by the host compiler: a third of the time that nvcc takes. Where there is a GPU, test_device
# runs too: the tests that run on the device, and its benchmarks, for dev/gpu_check.sh.
test_nsa: $(BUILD)/test_nsa.o $(APART)
	$(HOST) $(filter %.o,$^) -o $@ $(HOST_LIBS)
$(BUILD)/test_nsa.o: test_nsa.cu $(BUILD)/command
	$(HOST) -x c++ $(LEVEL) -DCOMPILED_APART $(DEPENDS) -c $< -o $@
$(BUILD)/test_device: $(BUILD)/test_device.o $(APART)
	$(LINK) $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/test_device.o: test_nsa.cu $(BUILD)/command
	$(COMPILE) $(LEVEL) -DCOMPILED_APART -DDEVICE_TESTS_ONLY $(DEPENDS) -c $< -o $@

$(EMULATOR_PROGRAMS) $(CRASH_PROGRAMS): $(BUILD)/command
EMULATED = $(if $(HAVE_MPI),$(BUILD)/train_nsa_emulated)
DEVICE = $(if $(GPU_FOUND),$(BUILD)/test_device)

.PHONY: test test_long goldens bench hip_check
# What takes longest to compile stands first, so that no core waits at the end.
test: test_nsa $(BUILD)/cuda_tests train_nsa $(EMULATED) $(SHORT_EMULATOR_PROGRAMS) $(CRASH_PROGRAMS) $(DEVICE)
	@dev/run_tests.sh '$(BUILD)/cuda_tests --short' './test_nsa --short --shard 1/2' './test_nsa --short --shard 2/2' \
	    $(CRASH_TESTS) $(SHORT_EMULATOR_TESTS) $(DEVICE)
test_long: train_nsa test_nsa $(EMULATOR_PROGRAMS) $(EMULATED)
	@dev/run_tests.sh '$(BUILD)/cuda_tests_check' '$(BUILD)/cuda_tests --long' './test_nsa --long' $(LONG_EMULATOR_TESTS) \
	    $(if $(HAVE_CUDA),dev/kernel_report.sh dev/loop_report.sh) \
	    dev/launcher_check.sh dev/other_machines_check.sh $(if $(shell command -v hipcc),dev/hip_check.sh)
# The program for AMD's GPUs, compiled and linked, never run
hip_check:
	dev/hip_check.sh
goldens: train_nsa
	bash dev/test/make_goldens.sh

# BENCH: arguments of dev/bench/cpu.sh, such as --python VENV/bin/python3
bench: $(BUILD)/bench_cpu train_nsa
	dev/bench/cpu.sh $(BUILD)/bench_cpu --ranks ./train_nsa $(BENCH)
$(BUILD)/bench_cpu: dev/bench/bench_cpu.cpp $(BUILD)/command
	$(HOST) $(KERNEL_LEVEL) $(DEPENDS) $< -o $@ $(HOST_LIBS)
