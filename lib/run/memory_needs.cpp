// memory_needs.cpp: the functions of memory_needs.h.
#include "memory_needs.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../base/errors.h"

// The largest number of sequences, at most `batch`, that divides the samples of a rank and step and fits; 0 if none
// fits. needed(batch): MiB.
static int64_t largest_batch(int64_t batch, int64_t samples, double available,
                             const std::function<double(int64_t)>& needed) {
    while (batch > 0 && (samples % batch || !(needed(batch) <= available))) batch--;
    return batch;
}

bool fit_batch(ModelConfig& c, const World& world, bool batch_is_given, double fixed, double available,
               const std::function<double(int64_t, int64_t)>& needed) {
    const int64_t samples = c.total_batch / c.seq_len / world.size;
    const int64_t fits =
        largest_batch(c.batch, samples, available, [&](int64_t batch) { return needed(batch, c.recompute); });
    if (!batch_is_given && fits > 0 && fits < c.batch) {
        if (world.rank == 0)
            print("batch:  %s at a time and not %d, which do not fit into %.0f MiB\n", counted(fits, "sequence"),
                  c.batch, available);
        c.batch = fits;
    }
    const double needs = needed(c.batch, c.recompute);
    if (needs <= available) return needs > 0.75 * available;
    // the lowest level at which this micro-batch fits, else a smaller one at the highest
    std::string advice = "a smaller --seq-len or model";
    for (int64_t level = 2; level >= c.recompute; level--) {
        const int64_t batch = largest_batch(c.batch, samples, available, [&](int64_t b) { return needed(b, level); });
        if (batch == c.batch || (batch > 0 && level == 2))
            advice = format_text("--batch %d --recompute %d", batch, level);
    }
    fail(
        "--batch %d and --seq-len %d need %.0f MiB per rank, of which %.0f MiB are parameters, gradients and "
        "moments; %.0f MiB are available: choose %s",
        c.batch, c.seq_len, needs, fixed, available, advice);
}

void print_memory(double fixed_mib, const MemoryPlan& plan, bool in_full) {
    print("memory: %.1f MiB of parameters, gradients and moments, %.1f MiB of activations per rank\n", fixed_mib,
          double(plan.bytes) / (1 << 20));
    if (!in_full) return;
    std::vector<MemoryEntry> entries = plan.memory;
    std::sort(entries.begin(), entries.end(), [](const auto& x, const auto& y) { return x.bytes > y.bytes; });
    size_t rest = 0;
    for (const MemoryEntry& e : entries) {
        if (e.bytes * 25 < plan.bytes) rest += e.bytes;
        else print("        %8.1f MiB  %3d x %s\n", double(e.bytes) / (1 << 20), e.count, e.name);
    }
    print("        %8.1f MiB  the rest\n", double(rest) / (1 << 20));
}

void require_memory_for(double needed, double available, const std::string& what, const char* advice) {
    if (needed > available)
        fail("%s needs %.0f MiB per rank; %.0f MiB are available: %s", what, needed / (1 << 20), available / (1 << 20),
             advice);
}
