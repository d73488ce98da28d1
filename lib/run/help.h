// help.h: --help: the verbs, the options of one of them and the presets, wrapped at the terminal's width. Used by
// run_verb in train_nsa.cu.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <sys/ioctl.h>
#include <unistd.h>

#include "options.h"

// Columns of what stdout leads to: COLUMNS, else what the terminal says, else 80.
size_t terminal_width();

void print_help(Verb verb);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "help.cpp"
#endif
