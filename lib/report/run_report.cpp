// run_report.cpp: the verb `report` as an object of its own, a tenth of what there is to compile; see
// lib/cpu/kernels.cpp.
#include "run_page.h"

void report_runs(const std::vector<std::string>& folders, const std::string& html) {
    if (folders.empty()) fail_usage("report: --from is missing: the folder of a run, such as runs/tiny");
    require_output_file("html", html, PAGE_BEGINNING);
    std::vector<RunHistory> runs;
    for (const std::string& folder : folders) runs.push_back(read_run_history(folder));
    if (html.empty()) return void(std::fputs(report_text(runs, unix_time(), terminal_width()).c_str(), stdout));
    write_output_file("html", html, report_page(runs, unix_time()), PAGE_BEGINNING);
    std::printf("report: %s\n", html.c_str());
}
