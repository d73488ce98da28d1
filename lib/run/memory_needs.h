// memory_needs.h: what a run takes of the memory that there is. Used by train_nsa.cu and lib/verbs.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../model/arena.h"
#include "../base/errors.h"

// For what only runs forward: fails where its bytes on a rank are not there.
inline void require_memory_for(double needed, double available, const std::string& what, const char* advice) {
    if (needed > available)
        fail("%s needs %.0f MiB per rank; %.0f MiB are available: %s", what, needed / (1 << 20), available / (1 << 20),
             advice);
}

// in_full: a line for every buffer, and one for all that take less than 4 % of the activations.
inline void print_memory(double fixed_mib, const MemoryPlan& plan, bool in_full) {
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
