# gpu.mk: how the program is compiled for GPUs. Included by the Makefile, whose variables it reads; it changes COMPILE,
# LINK, LEVEL, FLAGS and LIBS where there is a compiler for GPUs.
ifneq ($(HAVE_CUDA),)
  # Of the first GPU here, such as 90; empty without one.
  GPU_FOUND := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -n '1s/^\([0-9]*\)\.\([0-9]*\)$$/\1\2/p')
  SM := $(addprefix sm_,$(or $(GPU_COMPUTE_CAPABILITY),$(GPU_FOUND)))
  # No kernel asks for more than compute capability 8.0, so one PTX serves sm_80 and sm_90, compiled side by side. nvcc
  # 12.1 and later compile the kernels of one PTX on several cores.
  ARCH := $(if $(shell $(NVCC) --help | grep split-compile),--split-compile 0) $(if $(SM),-arch=$(SM),--threads 2 \
    $(addprefix -gencode=arch=compute_80$(comma)code=,sm_80 sm_90 compute_80))
  ARCH_NAME := $(if $(GPU_COMPUTE_CAPABILITY),$(SM)$(comma) as GPU_COMPUTE_CAPABILITY says,$(if \
    $(GPU_FOUND),$(SM)$(comma) the GPU found here,no GPU here: sm_80$(comma) sm_90$(comma) and PTX for later ones))
  $(if $(filter BF16 FP32,$(PRECISION)),,$(error PRECISION=$(PRECISION): expected BF16 or FP32))
  FLAGS += $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32) $(if $(HAVE_NCCL),-DUSE_NCCL) \
    $(if $(NO_CUBLAS),-DNO_CUBLAS)
  # Where the toolkit lies is written into the program: not every installation tells the system's loader.
  LIBS += $(if $(HAVE_NCCL),-lnccl) $(if $(NO_CUBLAS),,-lcublasLt) $(addprefix -Xlinker -rpath -Xlinker ,$(realpath \
    $(dir $(realpath $(HAVE_CUDA)))../lib64))
  # What is for the host compiler alone. Diagnostic 1675: GCC's unroll pragma, which nvcc's front end passes on;
  # parentheses: in the C++ that nvcc writes.
  HOST_FLAGS := $(filter-out -std=% -D% -I%,$(FLAGS) $(filter-out -O%,$(LEVEL))) -Wno-parentheses
  LINK := $(NVCC) $(ARCH) -ccbin $(CXX) -Xcompiler $(subst $(space),$(comma),$(strip $(HOST_FLAGS)))
  COMPILE := $(LINK) -x cu -std=c++17 -diag-suppress 1675 $(if $(WERROR),-Werror all-warnings) \
    $(filter -D% -I%,$(FLAGS))
  LEVEL := $(filter -O%,$(LEVEL))
  HAVE_COMPILER := nvcc $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') over $(CXX)
endif

ifeq ($(GPU),hip)
  GPU_ARCH ?= gfx1030
  $(if $(HAVE_HIP),,$(error GPU=hip needs hipcc, which is not here: apt-get install hipcc, or leave GPU=hip out))
  $(if $(filter FP32,$(PRECISION)),,$(error GPU=hip with PRECISION=$(PRECISION): AMD's GPUs have FP32 only))
  LINK := hipcc --offload-arch=$(GPU_ARCH) -pthread -rdynamic
  COMPILE := $(filter-out -rdynamic,$(LINK)) -x hip -std=c++17 -Wall -Wno-unknown-pragmas -Wno-unused-result \
    -Wno-deprecated-declarations $(if $(WERROR),-Werror) $(MARCH:%=-march=%) \
    $(filter -D% -I%,$(FLAGS)) -DPRECISION_FP32 -DNO_CUBLAS
  LEVEL := -O2
  HAVE_COMPILER := hipcc $(shell hipcc --version 2>/dev/null | sed -n 's/^HIP version: //p') beside $(CXX)
else ifneq ($(strip $(GPU)),cuda)
  $(error GPU=$(GPU): expected cuda or hip)
endif
