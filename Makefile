# Builds train_nsa with what the machine has:  make deps train_nsa && mpirun -np 2 ./train_nsa
#
#   make deps        installs what is missing (compiler, MPI, oneDNN, zlib, zstd) through the system's package manager
#   make train_nsa   the program                make clean
#   make test        the tests, ten minutes     make test_long   those that take longer
#   make bench       times the CPU engine beside PyTorch and others that are installed, see dev/bench/cpu.sh
#   make goldens     golden values anew (needs PyTorch)
#
# Settings, each with a default; a changed setting rebuilds:
#   NO_CUDA=1 NO_NCCL=1 NO_MPI=1 NO_DNNL=1 NO_OMP=1 NO_ZLIB=1 NO_ZSTD=1   leave something out although it is there
#   NO_CUBLAS=1                             matrix products on the GPU by a plain kernel of our own, slowly
#   MPICXX=mpicxx.openmpi                   another MPI than the system's first, by its compiler wrapper
#   MARCH=native                            the processor to build for; MARCH= for a portable binary
#   GPU_COMPUTE_CAPABILITY=90               GPU architecture; default: the GPU found here, else sm_80, sm_90 and PTX
#   PRECISION=BF16|FP32                     of the CUDA engine; FP32 for diagnosis and for GPUs below sm_80
#   GPU=hip GPU_ARCH=gfx1030                AMD's GPUs by hipcc, fp32 with plain kernels: compiled, never run
#   WERROR=1                                warnings are errors          SAN=address,undefined   sanitizers
#
# Everything about tests and benchmarks is in dev/dev.mk; without dev/ the program builds all the same.

CXX ?= g++
NVCC ?= nvcc
MPICXX ?= mpicxx
MARCH ?= native
BUILD ?= build
ifneq ($(origin GPU),command line)
  # In the environment it may mean anything.
  GPU := cuda
endif
PRECISION ?= $(if $(filter hip,$(GPU)),FP32,BF16)
DEV_GOALS := test_nsa $(BUILD)/test_device $(BUILD)/bench_cpu test test_long goldens crash_test bench hip_check
GOALS := all train_nsa info $(DEV_GOALS)

# A second make finds out what is there, by compiling and linking probes: so in `make deps train_nsa` they run after
# deps. It builds on all cores unless the command says -j.
ifndef CONFIGURED
.DEFAULT_GOAL := train_nsa
.PHONY: $(GOALS) deps clean configured
$(GOALS): configured ;
configured: $(filter deps,$(MAKECMDGOALS))
	@+$(MAKE) --no-print-directory CONFIGURED=1 $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc)) \
	  $(or $(filter $(GOALS),$(MAKECMDGOALS)),train_nsa)
deps:
	@bash lib/deps.sh
clean:
	rm -rf $(BUILD) train_nsa test_nsa
else

comma := ,
space := $() $()
# $(call links,X,HEADER,FLAGS): whether a program with them links, unless NO_X is set. accepted: the flags, if they are.
links = $(if $(NO_$(1)),,$(shell mkdir -p $(BUILD); echo 'int main() { return 0; }' | \
  $(CXX) -x c++ - -include $(2) $(3) -o $(BUILD)/probe 2>/dev/null && echo yes))
accepted = $(shell $(CXX) $(MARCH:%=-march=%) -Werror $(1) -x c++ -fsyntax-only /dev/null 2>/dev/null && echo '$(1)')

# hipcc's clang and g++ have an OpenMP each; that part of the program then has none.
NO_OMP := $(or $(NO_OMP),$(filter hip,$(GPU)))
HAVE_OMP := $(call links,OMP,omp.h,-fopenmp)
# The compiler wrappers of MPICH and Open MPI both print what they would run.
MPI_WORDS := $(shell $(MPICXX) -show 2>/dev/null)
HAVE_MPI := $(if $(MPI_WORDS),$(call links,MPI,mpi.h,$(filter -I% -L% -l%,$(MPI_WORDS))))
# Without OpenMP one thread computes; oneDNN would bring threads of its own.
HAVE_DNNL := $(if $(HAVE_OMP),$(call links,DNNL,oneapi/dnnl/dnnl.h,-ldnnl))
# What `tokenize` reads compressed text with.
HAVE_ZLIB := $(call links,ZLIB,zlib.h,-lz)
HAVE_ZSTD := $(call links,ZSTD,zstd.h,-lzstd)
HAVE_CUDA := $(if $(NO_CUDA)$(filter hip,$(GPU)),,$(shell command -v $(NVCC) 2>/dev/null))
HAVE_HIP := $(if $(filter hip,$(GPU)),$(shell command -v hipcc))
HAVE_NCCL := $(if $(HAVE_CUDA),$(call links,NCCL,nccl.h,-I$(dir $(HAVE_CUDA))../include \
  -L$(dir $(HAVE_CUDA))../lib64 -lnccl))

# lib/cpu_kernels.cpp holds the CPU engine's inner loops. For everything else -O1 and these passes are enough: the same
# bits and speed as with -O3 in two thirds of the compiler's time; 200 MiB more memory for it save another twentieth.
KERNEL_LEVEL := $(if $(SAN),-O1,-O3)
LEVEL := $(if $(SAN),-O1,$(or $(call accepted,-O1 -fexpensive-optimizations -fpeel-loops -fstrict-aliasing \
  -ftree-vectorize -fvect-cost-model=dynamic --param=ggc-min-heapsize=1000000),-O2))
# -rdynamic: the watchdog's stack has names. -fno-math-errno and -fno-trapping-math: loops with sqrt and comparisons
# become vectors, and results do not change. Never -ffast-math. On processors with AVX-512, GCC takes 256-bit vectors by
# default; and it compiles the micro-kernel a second time for operands without gaps, with its sums in memory: half the
# speed in bf16. clang reports `omp simd` loops that it cannot vectorise; they are right all the same.
FLAGS := -std=c++17 -DBUILD_FOLDER=$(BUILD) -fno-math-errno -fno-trapping-math -pthread -rdynamic -Wall -Wextra \
  $(if $(WERROR),-Werror) $(MARCH:%=-march=%) $(call accepted,-mprefer-vector-width=512) \
  $(call accepted,-fno-version-loops-for-strides) $(if $(call accepted,-Wpass-failed),-Wno-pass-failed) \
  $(if $(HAVE_OMP),-fopenmp,-Wno-unknown-pragmas) $(foreach x,DNNL ZLIB ZSTD,$(if $(HAVE_$(x)),-DUSE_$(x))) \
  $(if $(HAVE_MPI),-DUSE_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(filter -I%,$(MPI_WORDS)))
LIBS := $(if $(HAVE_MPI),$(filter -L% -l%,$(MPI_WORDS))) $(if $(HAVE_DNNL),-ldnnl) \
  $(if $(HAVE_ZLIB),-lz) $(if $(HAVE_ZSTD),-lzstd)
ifdef SAN
  # One flag for each, since nvcc takes the commas of a list as its own. GCC takes what they add for uninitialized.
  SAN_FLAGS := $(addprefix -fsanitize=,$(subst $(comma),$(space),$(SAN))) -fno-sanitize-recover=all
  FLAGS += -g -fno-omit-frame-pointer -Wno-maybe-uninitialized $(SAN_FLAGS)
endif
# One program from a .cu file is $(COMPILE) $(LEVEL) and $(LINK); HOST compiles C++ without CUDA.
HOST := $(CXX) $(FLAGS)
COMPILE := $(HOST) -x c++
LINK := $(HOST)
HAVE_COMPILER := $(shell $(CXX) --version 2>/dev/null | head -1)

include lib/gpu.mk
DEPENDS = -MMD -MP -MF $@.d -MT $@
# The line is kept in a file: when it changes, everything is built again.
kept = $(shell mkdir -p $(BUILD); echo '$(2)' | cmp -s - $(1) || echo '$(2)' > $(1))
$(call kept,$(BUILD)/command,$(COMPILE) $(LEVEL) $(KERNEL_LEVEL) $(LIBS))
# For --version: of CHANGELOG.md and, in a clone, of git.
VERSION := $(shell sed -n 's/^\#\# \([0-9][0-9.]*\).*/\1/p' CHANGELOG.md 2>/dev/null | head -1)$(shell \
  git describe --always --dirty 2>/dev/null | sed 's/^/-/')
$(call kept,$(BUILD)/version,$(VERSION))

line = $(info $(if $(HAVE_$(1)),✓ $(2)  $(3),✗ $(2)  $(if $(NO_$(1)),left out by NO_$(1),$(4))))
$(call line,COMPILER,compiler,$(HAVE_COMPILER),not found: make deps)
$(call line,OMP,OpenMP  ,all cores,not found: one core)
$(call line,MPI,MPI     ,$(filter -l%,$(MPI_WORDS)),mpicxx not found or does not link: one process only; make deps)
$(call line,DNNL,oneDNN  ,GEMMs$(comma) fp32 and bf16,$(if $(HAVE_OMP),not found: our own GEMM; make deps,left out \
  without OpenMP))
$(call line,ZLIB,zlib    ,text in .gz,not found: no .gz; make deps)
$(call line,ZSTD,zstd    ,text in .zst,not found: no .zst; make deps)
$(call line,NCCL,NCCL    ,gradients of several GPUs,$(if $(HAVE_CUDA),not found beside nvcc or in the system: one GPU \
  only,only with nvcc))
$(if $(GPU:cuda=),$(call line,HIP,hipcc   ,$(GPU_ARCH): compiled$(comma) never run; PRECISION=$(PRECISION),not \
  found),$(call line,CUDA,nvcc    ,$(ARCH_NAME); PRECISION=$(PRECISION)$(if $(NO_CUBLAS),; no cuBLASLt),not found))

.PHONY: all info
all: train_nsa
info: ; @:
# What is compiled beside a program, which then has -DCOMPILED_APART.
APART := $(BUILD)/cpu_kernels.o $(BUILD)/run_report.o
train_nsa $(BUILD)/train_nsa: $(BUILD)/train_nsa.o $(APART)
	$(LINK) $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/train_nsa.o: train_nsa.cu lib/hf/*.py lib/html/* $(BUILD)/command $(BUILD)/version
	$(COMPILE) $(LEVEL) -DCOMPILED_APART -DPROGRAM_VERSION=$(VERSION) $(DEPENDS) -c $< -o $@
$(BUILD)/cpu_kernels.o: LEVEL := $(KERNEL_LEVEL)
$(APART): $(BUILD)/%.o: lib/%.cpp $(BUILD)/command
	$(HOST) $(LEVEL) $(DEPENDS) -c $< -o $@
-include $(wildcard $(BUILD)/*.d)

ifneq ($(wildcard dev/dev.mk),)
  include dev/dev.mk
else
$(DEV_GOALS):
	@echo "make: $@ needs the folder dev/, which is not here" >&2; exit 1
endif

endif
