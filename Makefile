# Builds train_nsa and its tests with what the machine has:  make deps train_nsa && mpirun -np 2 ./train_nsa
#
#   make deps        installs what is missing (C++ compiler, MPI, oneDNN) through the system's package manager
#   make train_nsa   the program           make test     all tests           make goldens   golden values anew (needs PyTorch)
#   make bench       times the CPU engine beside PyTorch and others that are installed, see dev/bench/cpu.sh
#   make clean       make crash_test       the tester that kills runs, see dev/crash_test/crash_test.cpp
#
# Settings, each with a default; a changed setting rebuilds:
#   NO_CUDA=1 NO_NCCL=1 NO_MPI=1 NO_DNNL=1 NO_OMP=1   leave something out although it is there
#   MARCH=native                            the processor to build for; MARCH= for a portable binary
#   GPU_COMPUTE_CAPABILITY=90               GPU architecture; default: the GPU that is found, else sm_80, sm_90 and PTX
#   PRECISION=BF16|FP32                     of the CUDA engine; FP32 for diagnosis and for GPUs below sm_80
#   WERROR=1                                warnings are errors          SAN=address,undefined   sanitizers

CXX ?= g++
NVCC ?= nvcc
MARCH ?= native
BUILD ?= build
PRECISION ?= BF16
GOALS := all train_nsa test_nsa $(BUILD)/test_device test goldens info crash_test bench

# What is there is found out by compiling and linking a probe, in a second make: so in `make deps train_nsa` the probes run after deps.
ifndef CONFIGURED

.DEFAULT_GOAL := train_nsa
.PHONY: $(GOALS) deps clean
$(GOALS): $(if $(filter deps,$(MAKECMDGOALS)),deps)
	@$(MAKE) --no-print-directory CONFIGURED=1 $@
deps:
	@bash lib/deps.sh
clean:
	rm -rf $(BUILD) train_nsa test_nsa

else

comma := ,
empty :=
space := $(empty) $(empty)
links = $(shell echo '$(1)' > /dev/null; mkdir -p $(BUILD); printf '$(1)\nint main() { return 0; }\n' | $(CXX) -x c++ - $(2) -o $(BUILD)/probe 2>/dev/null && echo yes)
mark = $(if $(1),✓,✗)

FLAGS := -std=c++17 -DBUILD_FOLDER=$(BUILD) $(if $(SAN),-O1,-O3) -fno-math-errno -fno-trapping-math -pthread -rdynamic -Wall -Wextra
# -rdynamic: the watchdog's stack has names.
# -fno-math-errno and -fno-trapping-math let loops with sqrt and comparisons be vectorised; results do not change. Never -ffast-math.
LIBS :=
ifneq ($(MARCH),)
  FLAGS += -march=$(MARCH)
endif
# Where the compiler knows them. GCC takes 256-bit vectors on processors with AVX-512 unless told; and the micro-kernel, which it compiles a second time for
# operands without gaps between the elements of a column, then keeps its sums in memory: half the speed in bf16.
accepted = $(shell $(CXX) $(if $(MARCH),-march=$(MARCH)) -Werror $(1) -x c++ -fsyntax-only /dev/null 2>/dev/null && echo $(1))
FLAGS += $(call accepted,-mprefer-vector-width=512) $(call accepted,-fno-version-loops-for-strides)
# clang says of some `omp simd` loops that it cannot make vectors of them; they are right all the same.
FLAGS += $(if $(call accepted,-Wpass-failed),-Wno-pass-failed)
ifdef WERROR
  FLAGS += -Werror
endif
ifdef SAN
  # One flag for each: nvcc takes the commas of a list as its own. The first report ends the program, so that no test passes over it.
  SAN_FLAGS := $(addprefix -fsanitize=,$(subst $(comma),$(space),$(SAN))) -fno-sanitize-recover=all
  # GCC's maybe-uninitialized counts what the sanitizers add to <regex>.
  FLAGS += -g -fno-omit-frame-pointer -Wno-maybe-uninitialized $(SAN_FLAGS)
  LIBS += $(SAN_FLAGS)
endif

ifndef NO_OMP
  HAVE_OMP := $(call links,#include <omp.h>,-fopenmp)
endif
ifeq ($(HAVE_OMP),yes)
  FLAGS += -fopenmp
else
  FLAGS += -Wno-unknown-pragmas
endif

ifndef NO_MPI
  # The compiler wrappers of MPICH and Open MPI both print what they would run.
  MPI_WORDS := $(shell mpicxx -show 2>/dev/null)
  MPI_FLAGS := $(filter -I%,$(MPI_WORDS))
  MPI_LIBS := $(filter -L% -l%,$(MPI_WORDS))
  ifneq ($(MPI_WORDS),)
    HAVE_MPI := $(call links,#include <mpi.h>,$(MPI_FLAGS) $(MPI_LIBS))
  endif
endif
ifeq ($(HAVE_MPI),yes)
  FLAGS += -DUSE_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(MPI_FLAGS)
  LIBS += $(MPI_LIBS)
endif

# Without OpenMP one thread computes; oneDNN would bring threads of its own.
ifneq ($(HAVE_OMP),yes)
  NO_DNNL := 1
endif
ifndef NO_DNNL
  HAVE_DNNL := $(call links,#include <oneapi/dnnl/dnnl.h>,-ldnnl)
endif
ifeq ($(HAVE_DNNL),yes)
  FLAGS += -DUSE_DNNL
  LIBS += -ldnnl
endif

ifndef NO_CUDA
  HAVE_NVCC := $(shell command -v $(NVCC) >/dev/null 2>&1 && echo yes)
endif
ifeq ($(HAVE_NVCC),yes)
  ifdef GPU_COMPUTE_CAPABILITY
    ARCH := -arch=sm_$(GPU_COMPUTE_CAPABILITY)
    ARCH_NAME := sm_$(GPU_COMPUTE_CAPABILITY), as GPU_COMPUTE_CAPABILITY says
  else ifneq ($(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep GPU),)
    ARCH := -arch=native
    ARCH_NAME := for the GPU found here
  else
    ARCH := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]
    ARCH_NAME := no GPU here: sm_80, sm_90, and PTX for later ones
  endif
  ifeq ($(PRECISION),FP32)
    FLAGS += -DPRECISION_FP32
  else ifneq ($(PRECISION),BF16)
    $(error PRECISION=$(PRECISION): expected BF16 or FP32)
  endif
  # Where the toolkit lies is written into the program: not every installation tells the system's loader.
  CUDA_LIBRARIES := $(realpath $(dir $(realpath $(shell command -v $(NVCC))))../lib64)
  LIBS += -lcublasLt $(if $(CUDA_LIBRARIES),-Xlinker -rpath -Xlinker $(CUDA_LIBRARIES))
  ifndef NO_NCCL
    NCCL_PLACE := -I$(dir $(shell command -v $(NVCC)))../include -L$(dir $(shell command -v $(NVCC)))../lib64
    HAVE_NCCL := $(call links,#include <nccl.h>,$(NCCL_PLACE) -lnccl)
  endif
  ifeq ($(HAVE_NCCL),yes)
    FLAGS += -DUSE_NCCL
    LIBS += -lnccl
  endif
  # The rest of the flags goes to the host compiler as it is. Diagnostic 1675: GCC's unroll pragma, which nvcc's front end passes on;
  # parentheses: in the C++ that nvcc writes for the host compiler.
  HOST_FLAGS := $(filter-out -std=% -O% -D% -I%,$(FLAGS)) -Wno-parentheses
  COMPILE = $(NVCC) -x cu $(filter -std=% -O%,$(FLAGS)) $(ARCH) -ccbin $(CXX) -diag-suppress 1675 $(if $(WERROR),-Werror all-warnings) $(filter -D% -I%,$(FLAGS)) -Xcompiler $(subst $(space),$(comma),$(strip $(HOST_FLAGS)))
  LINK_LIBS = $(filter-out $(SAN_FLAGS),$(LIBS)) $(addprefix -Xcompiler ,$(SAN_FLAGS))
  COMPILER := nvcc $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') over $(CXX)
else
  COMPILE = $(CXX) -x c++ $(FLAGS)
  LINK_LIBS = -x none $(LIBS)
  COMPILER := $(shell $(CXX) --version 2>/dev/null | head -1)
endif

# The line is kept in a file: when it changes, everything is built again.
$(shell mkdir -p $(BUILD); echo '$(COMPILE) $(LINK_LIBS)' | cmp -s - $(BUILD)/command || echo '$(COMPILE) $(LINK_LIBS)' > $(BUILD)/command)

.PHONY: all info test goldens
all: train_nsa
train_nsa test_nsa: %: %.cu $(BUILD)/command | info
	$(COMPILE) -MMD -MP -MF $(BUILD)/$@.d -MT $@ $< -o $@ $(LINK_LIBS)
# The tests of test_nsa that run on the device, and its benchmarks, for dev/gpu_check.sh: nvcc compiles one file on one core, so the tests of the host are left
# out, and host code, which only checks here, has -O2: as long as train_nsa takes beside it. The kernels are the same.
$(BUILD)/test_device: test_nsa.cu $(BUILD)/command | info
	$(patsubst -O3,-O2,$(COMPILE)) -DDEVICE_TESTS_ONLY -MMD -MP -MF $@.d -MT $@ $< -o $@ $(LINK_LIBS)
-include $(BUILD)/train_nsa.d $(BUILD)/test_nsa.d $(BUILD)/test_device.d

info:
	@echo "$(call mark,$(COMPILER)) compiler  $(or $(COMPILER),not found: make deps)"
	@echo "$(call mark,$(filter yes,$(HAVE_OMP))) OpenMP    $(if $(HAVE_OMP),all cores,$(if $(NO_OMP),left out by NO_OMP,not found: one core))"
	@echo "$(call mark,$(filter yes,$(HAVE_MPI))) MPI       $(if $(HAVE_MPI),$(filter -l%,$(MPI_LIBS)),$(if $(NO_MPI),left out by NO_MPI,mpicxx not found or does not link: one process only; make deps))"
	@echo "$(call mark,$(filter yes,$(HAVE_DNNL))) oneDNN    $(if $(HAVE_DNNL),GEMMs$(comma) fp32 and bf16,$(if $(HAVE_OMP),$(if $(NO_DNNL),left out by NO_DNNL,not found: our own GEMM; make deps),left out without OpenMP))"
	@echo "$(call mark,$(filter yes,$(HAVE_NCCL))) NCCL      $(if $(HAVE_NCCL),gradients of several GPUs,$(if $(NO_NCCL),left out by NO_NCCL,$(if $(HAVE_NVCC),not found beside nvcc or in the system: gradients of several GPUs go through the host's memory,only with nvcc)))"
	@echo "$(call mark,$(filter yes,$(HAVE_NVCC))) nvcc      $(if $(HAVE_NVCC),$(ARCH_NAME); PRECISION=$(PRECISION),$(if $(NO_CUDA),left out by NO_CUDA,not found))"

# Kernels run without a GPU in dev/emulator/cuda_on_cpu.h, which is compiled by the host compiler whether or not nvcc is there.
-include dev/emulator/emulator.mk
-include dev/crash_test/crash_test.mk
$(EMULATOR_PROGRAMS) $(CRASH_PROGRAMS): $(BUILD)/command
test: test_nsa train_nsa $(EMULATOR_PROGRAMS) $(CRASH_PROGRAMS) $(if $(filter yes,$(HAVE_MPI)),$(BUILD)/train_nsa_emulated)
	@dev/run_tests.sh ./test_nsa $(CRASH_TESTS) $(EMULATOR_TESTS) $(if $(HAVE_NVCC),dev/kernel_report.sh dev/loop_report.sh)
goldens: train_nsa
	bash dev/test/make_goldens.sh

# BENCH: what dev/bench/cpu.sh is told, such as --python VENV/bin/python3
.PHONY: bench
bench: $(BUILD)/bench_cpu train_nsa
	dev/bench/cpu.sh $(BUILD)/bench_cpu --ranks ./train_nsa $(BENCH)
$(BUILD)/bench_cpu: dev/bench/bench_cpu.cpp $(BUILD)/command
	$(CXX) -x c++ $(FLAGS) -MMD -MP -MF $@.d -MT $@ $< -o $@ -x none $(filter-out -lcublasLt -lnccl,$(LIBS))
-include $(BUILD)/bench_cpu.d

endif
