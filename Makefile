# Builds train_nsa with what the machine has:  make deps train_nsa && mpirun -np 2 ./train_nsa
#
#   make deps        installs what is missing (C++ compiler, MPI, oneDNN, zlib, zstd) through the system's package manager
#   make train_nsa   the program                make clean
#   make test        the tests, ten minutes     make test_long   those that take longer
#   make bench       times the CPU engine beside PyTorch and others that are installed, see dev/bench/cpu.sh
#   make goldens     golden values anew (needs PyTorch)
#
# Settings, each with a default; a changed setting rebuilds:
#   NO_CUDA=1 NO_NCCL=1 NO_MPI=1 NO_DNNL=1 NO_OMP=1 NO_ZLIB=1 NO_ZSTD=1   leave something out although it is there
#   MARCH=native                            the processor to build for; MARCH= for a portable binary
#   GPU_COMPUTE_CAPABILITY=90               GPU architecture; default: the GPU found here, else sm_80, sm_90 and PTX
#   PRECISION=BF16|FP32                     of the CUDA engine; FP32 for diagnosis and for GPUs below sm_80
#   WERROR=1                                warnings are errors          SAN=address,undefined   sanitizers
#
# Everything about tests and benchmarks is in dev/dev.mk; without dev/ the program builds all the same.

CXX ?= g++
NVCC ?= nvcc
MARCH ?= native
BUILD ?= build
PRECISION ?= BF16
DEV_GOALS := test_nsa $(BUILD)/test_device test test_long goldens crash_test bench
GOALS := all train_nsa info $(DEV_GOALS)

# A second make finds out what is there, by compiling and linking probes: so in `make deps train_nsa` they run after
# deps. It builds on all cores unless the command says -j.
ifndef CONFIGURED

.DEFAULT_GOAL := train_nsa
.PHONY: $(GOALS) deps clean
$(GOALS): $(if $(filter deps,$(MAKECMDGOALS)),deps)
	@+$(MAKE) --no-print-directory CONFIGURED=1 $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc)) $@
deps:
	@bash lib/deps.sh
clean:
	rm -rf $(BUILD) train_nsa test_nsa

else

comma := ,
empty :=
space := $(empty) $(empty)
links = $(shell mkdir -p $(BUILD); printf '$(1)\nint main() { return 0; }\n' | \
  $(CXX) -x c++ - $(2) -o $(BUILD)/probe 2>/dev/null && echo yes)

# -rdynamic: the watchdog's stack has names. -fno-math-errno and -fno-trapping-math: loops with sqrt and comparisons
# become vectors, and results do not change. Never -ffast-math.
FLAGS := -std=c++17 -DBUILD_FOLDER=$(BUILD) $(if $(SAN),-O1,-O3) -fno-math-errno -fno-trapping-math -pthread -rdynamic \
  -Wall -Wextra
LIBS :=
ifneq ($(MARCH),)
  FLAGS += -march=$(MARCH)
endif
# Where the compiler knows them. On processors with AVX-512, GCC takes 256-bit vectors by default; and it compiles the
# micro-kernel a second time for operands without gaps, with its sums in memory: half the speed in bf16.
accepted = $(shell $(CXX) $(if $(MARCH),-march=$(MARCH)) -Werror $(1) -x c++ -fsyntax-only /dev/null 2>/dev/null && \
  echo $(1))
FLAGS += $(call accepted,-mprefer-vector-width=512) $(call accepted,-fno-version-loops-for-strides)
# clang reports `omp simd` loops that it cannot vectorise; they are right all the same.
FLAGS += $(if $(call accepted,-Wpass-failed),-Wno-pass-failed)
ifdef WERROR
  FLAGS += -Werror
endif
ifdef SAN
  # One flag for each, since nvcc takes the commas of a list as its own. The first report ends the program.
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

# What `tokenize` reads compressed text with.
ifndef NO_ZLIB
  HAVE_ZLIB := $(call links,#include <zlib.h>,-lz)
endif
ifndef NO_ZSTD
  HAVE_ZSTD := $(call links,#include <zstd.h>,-lzstd)
endif
FLAGS += $(if $(HAVE_ZLIB),-DUSE_ZLIB) $(if $(HAVE_ZSTD),-DUSE_ZSTD)
LIBS += $(if $(HAVE_ZLIB),-lz) $(if $(HAVE_ZSTD),-lzstd)

ifndef NO_CUDA
  HAVE_NVCC := $(shell command -v $(NVCC) >/dev/null 2>&1 && echo yes)
endif
ifeq ($(HAVE_NVCC),yes)
  # Of the first GPU here, such as 90; empty without one.
  GPU_FOUND := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -n '1s/^\([0-9]*\)\.\([0-9]*\)$$/\1\2/p')
  ifneq ($(or $(GPU_COMPUTE_CAPABILITY),$(GPU_FOUND)),)
    ARCH := -arch=sm_$(or $(GPU_COMPUTE_CAPABILITY),$(GPU_FOUND))
    ARCH_NAME := sm_$(or $(GPU_COMPUTE_CAPABILITY),$(GPU_FOUND)), $(if \
      $(GPU_COMPUTE_CAPABILITY),as GPU_COMPUTE_CAPABILITY says,the GPU found here)
  else  # no kernel asks for more than compute capability 8.0, so one PTX serves both, which ptxas compiles side by side
    ARCH := --threads 2 -gencode arch=compute_80,code=[sm_80,sm_90,compute_80]
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
  # The rest of the flags goes to the host compiler. Diagnostic 1675: GCC's unroll pragma, which nvcc's front end passes
  # on; parentheses: in the C++ that nvcc writes.
  HOST_FLAGS := $(filter-out -std=% -O% -D% -I%,$(FLAGS)) -Wno-parentheses
  COMPILE = $(NVCC) -x cu $(filter -std=% -O%,$(FLAGS)) $(ARCH) -ccbin $(CXX) -diag-suppress 1675 \
    $(if $(WERROR),-Werror all-warnings) $(filter -D% -I%,$(FLAGS)) \
    -Xcompiler $(subst $(space),$(comma),$(strip $(HOST_FLAGS)))
  LINK_LIBS = $(filter-out $(SAN_FLAGS),$(LIBS)) $(addprefix -Xcompiler ,$(SAN_FLAGS))
  COMPILER := nvcc $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') over $(CXX)
else
  COMPILE = $(CXX) -x c++ $(FLAGS)
  LINK_LIBS = -x none $(LIBS)
  COMPILER := $(shell $(CXX) --version 2>/dev/null | head -1)
endif

# The line is kept in a file: when it changes, everything is built again.
kept = $(shell mkdir -p $(BUILD); echo '$(2)' | cmp -s - $(1) || echo '$(2)' > $(1))
$(call kept,$(BUILD)/command,$(COMPILE) $(LINK_LIBS))
# For --version: of CHANGELOG.md and, in a clone, of git.
VERSION := $(shell sed -n 's/^\#\# \([0-9][0-9.]*\).*/\1/p' CHANGELOG.md 2>/dev/null | head -1)$(shell \
  git describe --always --dirty 2>/dev/null | sed 's/^/-/')
$(call kept,$(BUILD)/version,$(VERSION))

.PHONY: all info
all: train_nsa
train_nsa: train_nsa.cu $(BUILD)/command $(BUILD)/version | info
	$(COMPILE) -DPROGRAM_VERSION=$(VERSION) -MMD -MP -MF $(BUILD)/$@.d -MT $@ $< -o $@ $(LINK_LIBS)
-include $(BUILD)/train_nsa.d

line = @echo "$(if $(1),✓,✗) $(2)$(if $(1),$(3),$(4))"
info:
	$(call line,$(COMPILER),compiler  ,$(COMPILER),not found: make deps)
	$(call line,$(HAVE_OMP),OpenMP    ,all cores,$(if $(NO_OMP),left out by NO_OMP,not found: one core))
	$(call line,$(HAVE_MPI),MPI       ,$(filter -l%,$(MPI_LIBS)),$(if \
	  $(NO_MPI),left out by NO_MPI,mpicxx not found or does not link: one process only; make deps))
	$(call line,$(HAVE_DNNL),oneDNN    ,GEMMs$(comma) fp32 and bf16,$(if $(HAVE_OMP),$(if \
	  $(NO_DNNL),left out by NO_DNNL,not found: our own GEMM; make deps),left out without OpenMP))
	$(call line,$(HAVE_ZLIB),zlib      ,text in .gz,$(if $(NO_ZLIB),left out by NO_ZLIB,not found: no .gz; make deps))
	$(call line,$(HAVE_ZSTD),zstd      ,text in .zst,$(if $(NO_ZSTD),left out by NO_ZSTD,not found: no .zst; make deps))
	$(call line,$(HAVE_NCCL),NCCL      ,gradients of several GPUs,$(if $(NO_NCCL),left out by NO_NCCL,$(if \
	  $(HAVE_NVCC),not found beside nvcc or in the system: one GPU only,only with nvcc)))
	$(call line,$(HAVE_NVCC),nvcc      ,$(ARCH_NAME); PRECISION=$(PRECISION),$(if \
	  $(NO_CUDA),left out by NO_CUDA,not found))

ifneq ($(wildcard dev/dev.mk),)
  include dev/dev.mk
else
$(DEV_GOALS):
	@echo "make: $@ needs the folder dev/, which is not here" >&2; exit 1
endif

endif
