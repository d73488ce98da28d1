// profile.h: names for the parts of a training step. With CUDA they are NVTX ranges, which Nsight Systems shows above
// the kernels; --profile-steps brackets some steps for a profiler. Used by the training loop, the engines and
// ddp.cuh.
#pragma once
#include <cstdio>
#include <utility>

#include "errors.h"
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

// --profile-steps: first to last; none where first is 0. prints: on rank 0.
class StepProfiler {
  public:
    StepProfiler(std::pair<int64_t, int64_t> steps, bool rank_prints)
        : first(steps.first), last(steps.second), prints(rank_prints) {}

    // Before each step.
    template <class Dev>
    void before_step(int64_t step, Dev& dev) {
        if (begun && step > last) end(step - 1, dev);
        if (step < first || step > last || begun) return;
        begun = step;
        if constexpr (!Dev::on_host) dev.start_profiler();
    }
    // After the last of them, or of the run: `step`.
    template <class Dev>
    void end(int64_t step, Dev& dev) {
        if (first && !begun && prints) complain("--profile-steps: step %d never came", first);
        if constexpr (!Dev::on_host)
            if (begun) dev.stop_profiler();
        if (begun && prints)
            print("profile: steps %d to %d stand between cudaProfilerStart and cudaProfilerStop\n", begun, step);
        first = begun = 0;
        last = -1;
    }

  private:
    int64_t first, last, begun = 0;
    const bool prints;
};
