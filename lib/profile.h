// profile.h: names for the parts of a training step. With CUDA they are NVTX ranges, which Nsight Systems shows above
// the kernels; --profile-steps brackets some steps for a profiler, and on a CPU prints where their time went. Used by
// the training loop, the engines, ddp.cuh, dataloader.h and saver.h.
#pragma once
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "util.h"
#if defined(GPU_COMPILER) || defined(EMULATED_GPUS)
#include "cuda_common.cuh"  // which says whether there is NVTX
#endif

// Where the time of some steps went: a tree of parts, each with those that ran within it.
class StepTimes {
  public:
    StepTimes() : parts(1) { parts[0].begin = seconds_now(); }

    void enter(const char* name) {
        size_t found = 0;
        for (const size_t child : parts[current].children)
            if (std::string(parts[child].name) == name) found = child;
        if (!found) {
            found = parts.size();
            parts.push_back(Part());
            parts.back().name = name, parts.back().parent = current;
            parts[current].children.push_back(found);
        }
        current = found;
        parts[current].begin = seconds_now(), parts[current].calls++;
    }
    void leave() {
        parts[current].seconds += seconds_now() - parts[current].begin;
        current = parts[current].parent;
    }

    // A line for each part: its milliseconds a step, its share, its calls a step.
    std::string table(int64_t steps) {
        parts[0].seconds = seconds_now() - parts[0].begin;
        std::string text = "    ms a step    share   calls\n";
        add_lines(text, 0, 0, double(steps));
        return text;
    }

  private:
    struct Part {
        const char* name = "all of it";
        size_t parent = 0;
        std::vector<size_t> children;
        double begin = 0, seconds = 0;
        int64_t calls = 0;
    };
    std::vector<Part> parts;
    size_t current = 0;

    void add_lines(std::string& text, size_t at, int depth, double steps) const {
        const Part& part = parts[at];
        const auto line = [&](const char* name, double seconds, double calls, int indent) {
            text += format_text("%13.3f  %5.1f %%  %6.4g  %*s%s\n", 1e3 * seconds / steps,
                                100 * seconds / parts[0].seconds, calls / steps, 2 * indent, "", name);
        };
        line(part.name, part.seconds, at ? double(part.calls) : steps, depth);
        double rest = part.seconds;
        for (const size_t child : part.children) {
            rest -= parts[child].seconds;
            add_lines(text, child, depth + 1, steps);
        }
        if (!part.children.empty()) line("the rest", rest, steps, depth + 1);
    }
};

// Of the thread that trains, while its steps are timed; other threads have none.
inline thread_local StepTimes* step_times = nullptr;

// A part of a step, from here to the end of the scope. number: of a layer or a step, where there is one.
class ProfileRange {
  public:
    explicit ProfileRange(const char* name, [[maybe_unused]] int64_t number = -1) : times(step_times) {
#ifdef HAVE_NVTX
        char text[64];
        std::snprintf(text, sizeof text, number < 0 ? "%s" : "%s %lld", name, (long long)number);
        nvtxRangePushA(text);
#endif
        if (times) times->enter(name);
    }
    ~ProfileRange() {
        if (times) times->leave();
#ifdef HAVE_NVTX
        nvtxRangePop();
#endif
    }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;

  private:
    StepTimes* const times;
};

// --profile-steps: first to last; none where first is 0. prints: on rank 0.
class StepProfiler {
  public:
    StepProfiler(std::pair<int64_t, int64_t> steps, bool rank_prints)
        : first(steps.first), last(steps.second), prints(rank_prints) {}
    ~StepProfiler() { step_times = nullptr; }

    // Before each step.
    template <class Dev>
    void before_step(int64_t step, Dev& dev) {
        if (begun && step > last) end(step - 1, dev);
        if (step < first || step > last || begun) return;
        begun = step;
        if constexpr (Dev::on_host) times = StepTimes(), step_times = &times;
        else dev.start_profiler();
    }
    // Behind the last of them, or of the run: `step`.
    template <class Dev>
    void end(int64_t step, Dev& dev) {
        if (first && !begun && prints) complain(format_text("--profile-steps: step %lld never came", (long long)first));
        if (begun) stop(step, dev);
        first = begun = 0, last = -1;
    }

  private:
    int64_t first, last, begun = 0;
    const bool prints;
    StepTimes times;

    template <class Dev>
    void stop(int64_t step, Dev& dev) {
        if constexpr (Dev::on_host) step_times = nullptr;
        else dev.stop_profiler();
        if (!prints) return;
        const std::string steps = format_text("profile: steps %lld to %lld", (long long)begun, (long long)step);
        if constexpr (Dev::on_host)
            std::printf("%s%s\n%s", steps.c_str(), " of rank 0", times.table(step + 1 - begun).c_str());
        else std::printf("%s stand between cudaProfilerStart and cudaProfilerStop\n", steps.c_str());
    }
};
