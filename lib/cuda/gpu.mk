# gpu.mk: how the program is compiled for GPUs. Included by the Makefile, whose variables it reads; it changes COMPILE,
# LINK, FLAGS and LIBS where there is a compiler for GPUs.
COMPILER := CXX
ifneq ($(HAVE_CUDA),)
  # The GPU's architecture, and the precision that it can compute in.
  CAPABILITY := $(or $(GPU_COMPUTE_CAPABILITY),$(GPU_FOUND))
  BEFORE_BF16 := $(filter 50 52 53 60 61 62 70 72 75,$(CAPABILITY))
  PRECISION ?= $(if $(BEFORE_BF16),FP32,BF16)
  $(if $(filter BF16 FP32,$(PRECISION)),,$(error PRECISION=$(PRECISION): expected BF16 or FP32))
  $(if $(and $(BEFORE_BF16),$(filter BF16,$(PRECISION))),$(error PRECISION=BF16 needs a GPU of compute capability 8.0 \
    or later and this is for sm_$(CAPABILITY): leave PRECISION out))
  # Attention on warpgroups is in code for sm_90a alone; no other kernel asks for more than compute capability 8.0. The
  # program for a GPU holds PTX too. Not by -arch=sm_90a, which has nvcc 13 make PTX for compute_90 as well.
  gencode = '-gencode=arch=compute_$(1),code=[sm_$(1),compute_$(1)]'
  ARCH := $(SPLIT_COMPILE) $(if $(CAPABILITY),$(call gencode,$(CAPABILITY:90=90a)),--threads 2 \
    $(call gencode,80) -gencode=arch=compute_90a$(comma)code=sm_90a)
  ARCH_NAME := $(if $(CAPABILITY),sm_$(CAPABILITY:90=90a)$(comma) $(if $(GPU_COMPUTE_CAPABILITY),as \
    GPU_COMPUTE_CAPABILITY says,the GPU found here),$(if $(GPU_UNKNOWN),this nvcc does not know \
    sm_$(GPU_UNKNOWN),no GPU here): sm_80$(comma) sm_90a$(comma) and PTX for later ones); PRECISION=$(PRECISION)$(if \
    $(BEFORE_BF16),$(comma) since bf16 needs sm_80 or later)
  FLAGS += -DUSE_CUDA $(if $(filter FP32,$(PRECISION)),-DPRECISION_FP32) $(if $(HAVE_NCCL),-DUSE_NCCL) \
    $(if $(NO_CUBLAS),-DNO_CUBLAS)
  # Words for g++ as nvcc passes them on; it knows these and no others itself.
  for_nvcc = $(foreach w,$(1),$(if $(filter -Wl$(comma)%,$(w)),-Xlinker $(w:-Wl$(comma)%=%),$(if \
    $(filter -I% -D% -L% -l%,$(w)),$(w),-Xcompiler $(w))))
  # Where the toolkit lies is written into the program: not every installation tells the system's loader.
  LIBS := $(call for_nvcc,$(LIBS)) $(if $(HAVE_NCCL),-lnccl) $(if $(NO_CUBLAS),,-lcublasLt) \
    $(addprefix -Xlinker -rpath -Xlinker ,$(realpath $(dir $(realpath $(HAVE_CUDA)))../lib64))
  # Diagnostic 1675: GCC's unroll pragma, which nvcc's front end passes on; parentheses: in the C++ that nvcc writes.
  NVCC_COMMAND := $(NVCC) $(ARCH) -ccbin $(CXX) $(LEVEL) $(call for_nvcc,$(filter-out -std=%,$(FLAGS)) \
    -Wno-parentheses $(CPPFLAGS) $(CXXFLAGS))
  COMPILE := $(NVCC_COMMAND) -x cu -std=c++17 -diag-suppress 1675 $(if $(WERROR),-Werror all-warnings) $(NVCCFLAGS)
  LINK := $(NVCC_COMMAND) $(NVCCFLAGS) $(call for_nvcc,$(LDFLAGS))
  HAVE_COMPILER := nvcc $(CUDA_VERSION) over $(CXX)
  COMPILER := NVCC
endif

ifeq ($(GPU),hip)
  ifndef GPU_ARCH
    GPU_ARCH := $(or $(shell rocminfo 2>/dev/null | grep -om1 'gfx[0-9a-f]*'),gfx1030)
  endif
  # Else hipcc looks for nvcc where its clang++ has another name, as on Ubuntu 24.04.
  export HIP_PLATFORM := amd
  PRECISION ?= FP32
  HAVE_HIP := $(shell command -v hipcc)
  $(if $(HAVE_HIP),,$(error GPU=hip needs hipcc, which is not here: apt-get install hipcc, or leave GPU=hip out))
  $(if $(filter FP32,$(PRECISION)),,$(error GPU=hip with PRECISION=$(PRECISION): AMD's GPUs have FP32 only))
  # Fused within an expression only: by default hipcc 7.1's logf is off by up to 1.5 units in the last place.
  LINK := hipcc --offload-arch=$(GPU_ARCH) -pthread $(LDFLAGS)
  COMPILE := hipcc --offload-arch=$(GPU_ARCH) -ffp-contract=on -pthread -x hip -std=c++17 -O2 -Wall \
    -Wno-unknown-pragmas -Wno-unused-result -Wno-unused-value -Wno-deprecated-declarations $(if $(WERROR),-Werror) \
    $(MARCH:%=-march=%) $(filter -D% -I%,$(FLAGS)) -DUSE_CUDA -DPRECISION_FP32 -DNO_CUBLAS $(CPPFLAGS) $(CXXFLAGS)
  HAVE_COMPILER := hipcc $(shell hipcc --version 2>/dev/null | sed -n 's/^HIP version: //p') beside $(CXX)
  COMPILER := HIP
  HAVE_PORT := $(HAVE_HIP)
  PORT_NAME := hipcc$(space)$(space)
  PORT_TEXT := $(GPU_ARCH): never run on a GPU; PRECISION=$(PRECISION)
else ifneq ($(strip $(GPU)),cuda)
  # Another engine, by the host's compiler; train_nsa.cu takes it in. Its port.mk sets PORT_LIBS and what `make info`
  # says of it.
  $(if $(wildcard dev/ports/$(strip $(GPU))/port.mk),,$(error GPU=$(GPU): expected cuda, hip or one of \
    $(patsubst dev/ports/%/port.mk,%,$(wildcard dev/ports/*/port.mk))))
  include dev/ports/$(strip $(GPU))/port.mk
  LIBS += $(PORT_LIBS)
  HOST_LIBS += $(PORT_LIBS)
endif
