# Builds train_nsa with what the machine has:  make deps train_nsa && mpirun -np 2 ./train_nsa
#
# Settings, each with a default; a changed setting rebuilds:
#   NO_CUDA=1 NO_NCCL=1 NO_MPI=1 NO_OMP=1             leave something out although it is there
#   NO_CUBLAS=1                             matrix products on the GPU by a plain kernel of our own, slowly
#   CXX CPPFLAGS CXXFLAGS LDFLAGS NVCCFLAGS yours, from the environment too; they stand last, so that they win
#   MPICXX=mpicxx.openmpi                   another MPI than the system's first, by its compiler wrapper
#   NVCC=/opt/cuda-12/bin/nvcc              another CUDA toolkit than the one on PATH
#   MARCH=native                            the processor to build for; MARCH= for a portable binary
#   GPU_COMPUTE_CAPABILITY=90               GPU architecture; default: the GPU found here, else sm_80, sm_90a, PTX
#   PRECISION=BF16|FP32                     of the CUDA engine; FP32 for diagnosis, and by itself for GPUs before sm_80
#   GPU=hip GPU_ARCH=gfx1030                AMD's GPUs by hipcc, fp32, plain kernels: ran in emulation, never on a GPU
#   GPU=opencl                              GPUs with a driver of OpenCL, fp32: ran on CPUs, never on a GPU
#   WERROR=1                                warnings are errors          SAN=address,undefined   sanitizers
#   V=1                                     prints whole commands        BUILD=build             where objects go
#
# Everything about tests and benchmarks is in dev/dev.mk; without dev/ the program builds all the same.

define HELP
make deps        installs what is missing (compiler, MPI) through the system's package manager
make train_nsa   the program; what it is built with is printed first
make info        what it would be built with
make test        the tests, six minutes; make test_long: those that take longer
make bench       times the CPU engine beside PyTorch and others that are installed, see dev/bench/cpu.sh
make demo        a model of one's own from one text: make demo TEXT=book.txt
make ladder      attention from the plainest kernels to the trainer's; make figures: those of dev/tour (needs Python)
make crash_test  kills and failing disks; make hip_check: AMD's GPUs; make goldens: golden values anew (needs PyTorch)
make clean       everything that was built, and what was found out about the machine
Settings (NO_CUDA=1, CXXFLAGS=..., V=1 and others) are listed at the head of the Makefile.
endef
export HELP

NVCC ?= nvcc
MPICXX ?= mpicxx
MARCH ?= native
BUILD ?= build
ifneq ($(origin GPU),command line)
  # In the environment it may mean anything.
  GPU := cuda
endif
DEV_GOALS := test_nsa $(addprefix $(BUILD)/,tests test_device bench_cpu) test test_long goldens crash_test bench \
  hip_check demo figures ladder
.DEFAULT_GOAL := train_nsa
.PHONY: all info deps clean help
comma := ,
space := $() $()

# In `make deps train_nsa` the probes run after deps; then make reads what they found and starts again.
deps:
	@$(if $(MAKE_RESTARTS),:,bash lib/run/deps.sh)
clean: ; rm -rf $(BUILD) train_nsa test_nsa
help: ; @echo "$$HELP"

ifneq ($(filter-out deps clean help,$(or $(MAKECMDGOALS),train_nsa)),)
# On all cores unless the command says -j.
ifeq ($(filter -j% --jobserver%,$(MAKEFLAGS)),)
  MAKEFLAGS += -j$(or $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null),1)
endif
# A line that is kept in a file: when it changes, what depends on the file is built again.
quoted = '$(subst ','\'',$(1))'
kept = $(shell mkdir -p $(BUILD); echo $(call quoted,$(2)) | cmp -s - $(1) || (echo $(call quoted,$(2)) >$(1); $(3)))

# What is there is found out once for each machine, compiler and setting; then make starts again.
PROBED := CXX CPPFLAGS CXXFLAGS LDFLAGS NVCC MPICXX MARCH GPU NO_CUDA NO_NCCL NO_MPI NO_OMP
export $(PROBED)
$(if $(MAKE_RESTARTS),,$(if $(filter deps,$(MAKECMDGOALS)),$(shell rm -f $(BUILD)/config.mk)))
$(call kept,$(BUILD)/settings,$(foreach v,$(PROBED),$(v)=$($(v))) $(shell uname -nm; \
  for program in $(firstword $(CXX)) $(NVCC) $(MPICXX); do command -v $$program; done),rm -f $(BUILD)/config.mk)
$(BUILD)/config.mk: $(BUILD)/settings lib/run/config.sh $(if $(MAKE_RESTARTS),,$(filter deps,$(MAKECMDGOALS)))
	@bash lib/run/config.sh > $@.new && mv $@.new $@
include $(BUILD)/config.mk

# -fno-math-errno and -fno-trapping-math: loops with sqrt and comparisons become vectors, and results do not change.
# Never -ffast-math.
LEVEL := $(if $(SAN),-O1,-O3)
# What is compiled beside a program, once for all of them. APART= on the command line: in one piece, which is less work
# for one program that nobody builds again.
APART := $(patsubst lib/%.cpp,$(BUILD)/%.o,$(wildcard lib/*/*.cpp))
# GCC 9 takes parameters for unused that only one branch of an `if constexpr` reads.
FLAGS := -std=c++17 -fno-math-errno -fno-trapping-math -pthread -Wall -Wextra \
  -Wno-unused-but-set-parameter $(if $(WERROR),-Werror) $(if $(APART),-DCOMPILED_APART) $(MARCH:%=-march=%) $(ACCEPTED) \
  $(or $(OMP_FLAGS),-Wno-unknown-pragmas) \
  $(if $(filter-out cuda hip,$(GPU)),-DENGINE=$(GPU) -Idev/ports/$(GPU)) \
  $(if $(HAVE_MPI),-DUSE_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(MPI_FLAGS))
LIBS := $(MPI_LIBS) $(OMP_LIBS)
ifdef SAN
  # GCC takes what they add for uninitialized.
  SAN_FLAGS := $(addprefix -fsanitize=,$(subst $(comma),$(space),$(SAN))) -fno-sanitize-recover=all
  FLAGS += -g -fno-omit-frame-pointer -Wno-maybe-uninitialized $(SAN_FLAGS)
endif
# One program from a .cu file is $(COMPILE) and $(LINK) ... $(LIBS); HOST compiles C++ without CUDA, COLD what waits
# for disks, ranks and the engine, and is not worth what -O3 takes to compile.
HOST := $(CXX) $(FLAGS) $(LEVEL) $(CPPFLAGS) $(CXXFLAGS)
COLD := $(CXX) $(FLAGS) -O1 $(CPPFLAGS) $(CXXFLAGS)
COMPILE := $(HOST) -x c++
LINK := $(HOST) $(LDFLAGS)
HOST_LINK := $(LINK)
HOST_LIBS := $(LIBS)
include lib/cuda/gpu.mk
$(call kept,$(BUILD)/command,$(COMPILE) $(LIBS) $(LDFLAGS))
# For --version: of CHANGELOG.md and, in a clone, of git; not of another repository that this folder lies in.
VERSION := $(shell sed -n 's/^[[:punct:]]\{2\} \([0-9][0-9.]*\).*/\1/p' CHANGELOG.md 2>/dev/null | head -1)$(shell \
  git --git-dir=.git --work-tree=. describe --always --dirty 2>/dev/null | sed 's/^/-/')
$(call kept,$(BUILD)/version,$(VERSION))

line = $(if $(wildcard $(BUILD)/config.mk),$(info $(if $(HAVE_$(1)),✓ $(2)  $(3),✗ $(2)  $(if \
  $(NO_$(1)),left out by NO_$(1),$(4)))))
$(call line,COMPILER,compiler,$(HAVE_COMPILER),not found: make deps)
$(call line,OMP,OpenMP  ,all cores,not found: one core)
$(call line,MPI,MPI     ,$(filter -l%,$(MPI_LIBS)),$(MPICXX) not found or does not link: one process only; make deps)
$(call line,NCCL,NCCL    ,gradients of several GPUs,$(if $(HAVE_CUDA),not found beside nvcc or in the system: several \
  GPUs need MPI and are slower; install libnccl-dev for the driver's CUDA then make clean,only with nvcc))
$(if $(GPU:cuda=),$(call line,PORT,$(PORT_NAME),$(PORT_TEXT),not found),$(call line,CUDA,nvcc    ,$(ARCH_NAME)$(if \
  $(NO_CUBLAS),; no cuBLASLt),not found))

all: train_nsa
info: ; @:
# Short lines; V=1 prints commands.
quiet = $(if $(V),,@$(if $(findstring s,$(firstword -$(MAKEFLAGS))),,echo '  $(1)  $@';))
DEPENDS = -MMD -MP -MF $@.d -MT $@
train_nsa $(BUILD)/train_nsa: $(BUILD)/train_nsa.o $(APART)
	$(call quiet,LINK)$(LINK) $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/train_nsa.o: train_nsa.cu lib/report/hf/*.py lib/report/html/inspect.html $(BUILD)/command $(BUILD)/version
	$(call quiet,$(COMPILER))$(COMPILE) -DPROGRAM_VERSION=$(VERSION) $(DEPENDS) -c $< -o $@
$(APART): $(BUILD)/%.o: lib/%.cpp $(BUILD)/command
	$(call quiet,CXX )mkdir -p $(@D) && $(HOST) $(DEPENDS) -c $< -o $@
$(filter-out $(BUILD)/cpu/%,$(APART)): HOST := $(COLD)
$(BUILD)/report/report.o: lib/report/html/report.html
-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d)

ifneq ($(wildcard dev/dev.mk),)
  include dev/dev.mk
else
$(DEV_GOALS):
	@echo "make: $@ needs the folder dev/, which is not here" >&2; exit 1
endif
endif
