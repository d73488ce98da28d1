// run_report.h: the verb `report`.
#pragma once
#include <string>
#include <vector>

// Shows runs (run_page.h) in a file, or on the terminal if html is "".
void report_runs(const std::vector<std::string>& folders, const std::string& html);
#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "run_report.cpp"
#endif
