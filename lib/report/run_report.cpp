// run_report.cpp: the verb `report` as an object of its own, a tenth of what there is to compile; see
// lib/cpu/kernels.cpp.
#include "run_page.h"

void report_runs(const std::vector<std::string>& folders, const std::string& html) {
    if (folders.empty()) fail_usage("report: --from is missing: the folder of a run, such as runs/tiny");
    require_output_file("html", html, PAGE_BEGINNING);
    std::vector<RunHistory> runs;
    for (const std::string& folder : folders) {
        // Among runs/* there are imports, and the checkpoint of a run that has lost its folder: they have no log.
        const bool has_no_log = file_exists(folder + "/.") && !file_exists(folder + "/log.jsonl");
        if (folders.size() > 1 && has_no_log) complain("--from " + folder + " holds no log.jsonl and is left out");
        else runs.push_back(read_run_history(folder));
    }
    if (runs.empty()) fail("report: none of the folders of --from holds a log.jsonl: give the folder of a run");
    if (html.empty()) return void(std::fputs(report_text(runs, unix_time(), terminal_width()).c_str(), stdout));
    write_output_file("html", html, report_page(runs, unix_time()), PAGE_BEGINNING);
    std::printf("report: %s\n", printable(html).c_str());
}
