# port.mk: what make GPU=opencl needs beside the host's compiler. Included by lib/cuda/gpu.mk.
PRECISION ?= FP32
$(if $(filter FP32,$(PRECISION)),,$(error GPU=opencl with PRECISION=$(PRECISION): OpenCL's kernels have FP32 only))
PORT_LIBS := $(if $(filter Darwin,$(shell uname)),-framework OpenCL,-lOpenCL)
HAVE_PORT := $(shell echo 'int main() {}' | $(CXX) $(CPPFLAGS) $(CXXFLAGS) -x c++ - $(if $(filter Darwin,$(shell \
  uname)),,-include CL/cl.h) -DCL_TARGET_OPENCL_VERSION=120 -x none $(LDFLAGS) $(PORT_LIBS) \
  -o /dev/null 2>/dev/null && echo yes)
$(if $(HAVE_PORT),,$(error GPU=opencl needs OpenCL's headers and loader: apt-get install opencl-headers \
  ocl-icd-opencl-dev, and a driver such as pocl-opencl-icd))
PORT_NAME := OpenCL$(space)$(space)
PORT_TEXT := fp32$(comma) own GEMM; never run on a GPU
# They are within the program.
$(BUILD)/train_nsa.o $(BUILD)/tests.o $(BUILD)/test_device.o $(BUILD)/test_nsa.o: dev/ports/opencl/kernels.cl
