// profile.h: names for the parts of a training step. With CUDA they are NVTX ranges, which Nsight Systems shows above
// the kernels. Used by the training loop, the engines and ddp.cuh.
#pragma once
#include <cstdint>
#include <cstdio>

#if defined(USE_CUDA) && !defined(__HIP__) && __has_include(<nvtx3/nvToolsExt.h>)  // a package of its own
#include <nvtx3/nvToolsExt.h>
#define HAVE_NVTX
#endif

// A part of a step, from here to the end of the scope. number: of a layer or a step, where there is one.
class ProfileRange {
  public:
    explicit ProfileRange([[maybe_unused]] const char* name, [[maybe_unused]] int64_t number = -1) {
#ifdef HAVE_NVTX
        char text[64];
        std::snprintf(text, sizeof text, number < 0 ? "%s" : "%s %lld", name, (long long)number);
        nvtxRangePushA(text);
#endif
    }
    ~ProfileRange() {
#ifdef HAVE_NVTX
        nvtxRangePop();
#endif
    }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;
};
