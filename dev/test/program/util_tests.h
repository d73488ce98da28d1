// util_tests.h: random numbers against published vectors, messages, limits of control groups, why there is no GPU.
#pragma once
#include <filesystem>

#include <sys/wait.h>

#include "../../../lib/run/device.h"
#include "../../../lib/base/files.h"
#include "../harness.h"

TEST(philox_known_answers) {  // Random123's kat_vectors, philox4x32 10: counter words, key words, result
    struct {
        uint64_t counter, stream, seed;
        uint32_t expected[4];
    } const cases[] = {{0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                       {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                       {0x85a308d3243f6a88ull,
                        0x0370734413198a2eull,
                        0x299f31d0a4093822ull,
                        {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (const auto& c : cases) {
        const Philox p = philox4x32(c.counter, c.stream, c.seed);
        for (int i = 0; i < 4; i++) CHECK_EQUAL(p.word[i], c.expected[i]);
    }
}

TEST(random_normal_is_that_of_box_and_muller) {
    // Libm's on the same bits: equal to a few units in the last place of a double.
    for (int i = 0; i < 1 << 16; i++) {
        const Philox p = philox4x32(i, 7, 99);
        const double u = double(((uint64_t(p.word[1]) << 32 | p.word[0]) >> 11) + 1) * 0x1p-53;
        const double angle = double((uint64_t(p.word[3]) << 32 | p.word[2]) >> 11) * 0x1p-53 * 2 * M_PI - M_PI / 4;
        CHECK_NEAR(random_normal(99, 7, i), std::sqrt(-2 * std::log(u)) * std::cos(angle), 1e-14);
    }
}

// The tightest of the limits of the group and of those above it; pages of files do not count as used. Version 1 has a
// tree for each kind of limit, named in many ways.
TEST(cgroup_limits_are_the_tightest_of_all_levels) {
    const double MIB = 1 << 20, none = std::numeric_limits<double>::infinity();
    const char* const v2 = "4:memory:/v1\n0::/job/step\n";
    struct {
        const char* own;
        std::vector<std::pair<const char*, const char*>> files;
        double bytes, processors;
    } const cases[] = {
        {v2, {}, none, none},
        {v2, {{"job/step/memory.max", "max"}, {"job/step/cpu.max", "max 100000"}}, none, none},
        {v2, {{"job/memory.max", "1000000"}, {"job/memory.current", "700000"}}, 300000, none},
        {v2,
         {{"job/memory.max", "1000000"},
          {"job/memory.current", "700000"},
          {"job/memory.stat", "anon 600000\nfile 100000\ninactive_file 70000\nactive_file 20000"},
          {"job/step/cpu.max", "250000 100000"},
          {"cpu.max", "400000 100000"}},
         390000,
         2.5},
        {v2, {{"memory.max", "100"}, {"memory.current", "200"}}, 0, none},
        // in a container its own group is the root
        {"0::/\n", {{"job/step/cpu.max", "250000 100000"}, {"cpu.max", "400000 100000"}}, none, 4},
        // RHEL 8, Ubuntu 20.04: the process's own group, by name
        {"9:memory:/slurm/job\n4:cpu,cpuacct:/slurm/job\n1:name=systemd:/x\n0::/\n",
         {{"memory/slurm/job/memory.limit_in_bytes", "1073741824"},
          {"memory/slurm/job/memory.usage_in_bytes", "536870912"},
          {"memory/slurm/job/memory.stat", "inactive_file 1\ntotal_inactive_file 67108864\ntotal_active_file 67108864"},
          {"cpu,cpuacct/slurm/job/cpu.cfs_quota_us", "50000"},
          {"cpu,cpuacct/slurm/job/cpu.cfs_period_us", "100000"}},
         640 * MIB,
         0.5},
        // docker: the names are those outside, and the container sees its own group as the root
        {"4:cpuacct,cpu:/docker/1234\n2:memory:/docker/1234\n",
         {{"memory/memory.limit_in_bytes", "1048576"},
          {"memory/memory.usage_in_bytes", "0"},
          {"cpu/cpu.cfs_quota_us", "150000"},
          {"cpu/cpu.cfs_period_us", "100000"}},
         MIB,
         1.5},
        // a limit of a group above counts, and -1 is none
        {"3:cpu:/a/b\n2:memory:/a/b\n",
         {{"cpu/a/b/cpu.cfs_quota_us", "-1"},
          {"cpu/a/b/cpu.cfs_period_us", "100000"},
          {"cpu/a/cpu.cfs_quota_us", "300000"},
          {"cpu/a/cpu.cfs_period_us", "100000"},
          {"memory/a/memory.limit_in_bytes", "2097152"},
          {"memory/a/memory.usage_in_bytes", "1048576"}},
         MIB,
         3},
        // other trees say nothing of these; lines that are none are passed over
        {"5:cpuset:/a\nnonsense\n:\n7:pids\n\n", {{"cpuset/a/cpu.cfs_quota_us", "100"}}, none, none},
    };
    for (const auto& c : cases) {
        const TempFolder folder;
        write_file(folder.file("own"), c.own);
        for (const auto& [name, text] : c.files) {
            const std::string path = folder.file("fs/") + name;
            make_folders(path.substr(0, path.rfind('/')));
            write_file(path, std::string(text) + "\n");
        }
        const ResourceLimits limits = cgroup_limits(folder.file("fs"), folder.file("own"));
        CHECK_EQUAL(limits.bytes, c.bytes);
        CHECK_EQUAL(limits.processors, c.processors);
        CHECK(std::isinf(cgroup_limits(folder.file("fs"), folder.file("none")).bytes));
    }
}

TEST(files_in_a_closed_folder_are_not_said_to_be_absent) {
    const TempFolder folder;
    const std::string inside = folder.file("closed/there");
    const uid_t user = geteuid();
    make_folders(inside);
    REQUIRE(chmod(folder.file("closed").c_str(), 0) == 0 && (user || seteuid(65534) == 0));
    const std::string error = error_of([&] { file_exists(inside); });
    REQUIRE((user || seteuid(user) == 0) && chmod(folder.file("closed").c_str(), 0700) == 0);
    CHECK(holds(error, inside));
}

// CUDA has one error for three states of a machine; each has a remedy of its own.
TEST(no_gpu_has_its_own_reason_and_remedy) {
    GpuSearch search;
    CHECK(holds(why_no_gpu(search), "holds no CUDA engine"));
    search.nvidia_module = true;
    CHECK(holds(why_no_gpu(search), "built without nvcc"));

    search = {};
    search.engine.format = "bf16";
    search.driver_too_old = true;
    search.toolkit = 13000;
    search.error = "CUDA driver version is insufficient for CUDA runtime version";
    CHECK(holds(why_no_gpu(search), "there is no NVIDIA driver here"));
    search.nvidia_module = true;
    CHECK(holds(why_no_gpu(search), "--gpus all"));
    search.driver = 12020;
    CHECK(holds(why_no_gpu(search),
                "the NVIDIA driver knows CUDA 12.2 at most and this program was built with CUDA 13.0"));
    search.driver = 13010;
    search.driver_too_old = false;
    search.error = "no CUDA-capable device is detected";
    CHECK(holds(why_no_gpu(search), "CUDA finds no GPU: no CUDA-capable device is detected"));
    search.engine.name = "HIP";
    CHECK(holds(why_no_gpu(search), "HIP finds no GPU"));
}

// What a call of printf's kind has at text[at], behind its bracket: conversions of its format, and values; {-1, -1}
// where the format is no literal.
inline std::pair<int, int> count_conversions(const std::string& text, size_t at) {
    std::string format;
    const auto skip_blanks = [&] { at = text.find_first_not_of(" \n", at); };
    const auto take_literal = [&] {
        const size_t begin = at++;
        for (; text[at] != text[begin]; at++) at += text[at] == '\\';
        return text.substr(begin, ++at - begin);
    };
    for (skip_blanks(); text[at] == '"'; skip_blanks()) format += take_literal();
    if (format.empty() || (text[at] != ',' && text[at] != ')')) return {-1, -1};
    int conversions = 0, values = 0, depth = 0;
    for (size_t i = format.find('%'); i != std::string::npos; i = format.find('%', i + 1))
        if (format[i + 1] == '%') i++;
        else conversions++;
    while (depth > 0 || text[at] != ')') {
        if (text[at] == '"' || (text[at] == '\'' && !std::isalnum(text[at - 1]))) {
            take_literal();
            continue;
        }
        values += depth == 0 && text[at] == ',';
        depth += std::strchr("([{", text[at]) != nullptr;
        depth -= std::strchr(")]}", text[at]) != nullptr;
        at++;
    }
    return {conversions, values};
}
TEST(messages_have_a_value_for_each_conversion) {
    for (const char* pattern : {"*.cu", "*.cuh", "*.h", "lib/*/*.h", "lib/*/*.cuh", "lib/*/*.cpp"})
        for (const std::string& file : glob_files(pattern)) {
            const std::string text = read_file(file);
            for (const std::string call : {"fail(", "fail_usage(", "format_text(", "complain(", "print("})
                for (size_t at = text.find(call); at != std::string::npos; at = text.find(call, at + 1)) {
                    if (std::isalnum(text[at - 1]) || std::strchr("_:.>", text[at - 1])) continue;
                    const auto [conversions, values] = count_conversions(text, at + call.size());
                    const bool is_text = call == "complain(" && values == 0;  // a line as it is
                    if (conversions != values && !is_text)
                        check_failed(file.c_str(), int(std::count(text.begin(), text.begin() + int64_t(at), '\n')) + 1,
                                     "%d conversions and %d values", conversions, values);
                    tests().checks++;
                }
        }
}
