// memory_needs.h: whether a run fits into the memory that there is, and what would. Used by train_nsa.cu and lib/verbs.
#pragma once
#include <functional>
#include <string>

#include "../model/arena.h"
#include "options.h"
#include "world.h"

// Before anything is allocated: a micro-batch that nobody gave becomes the largest that fits on every rank; if that
// does not help, fails and says what would. Returns whether more than three quarters of the memory will be taken.
// needed(batch, recompute): MiB of a rank; fixed: those of its parameters, gradients and moments.
bool fit_batch(ModelConfig& c, const World& world, bool batch_is_given, double fixed, double available,
               const std::function<double(int64_t, int64_t)>& needed);

// For what only runs forward: fails where its bytes on a rank are not there.
void require_memory_for(double needed, double available, const std::string& what, const char* advice);

// in_full: a line for every buffer, and one for all that take less than 4 % of the activations.
void print_memory(double fixed_mib, const MemoryPlan& plan, bool in_full);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "memory_needs.cpp"
#endif
