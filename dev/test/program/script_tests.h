// script_tests.h: dev/gpu_check.sh and dev/results_table.sh on a machine without a GPU. What they
// call are stand-ins, small scripts that answer as the real programs do; what is tested is everything
// between: that each part runs to its end, what it finds, the report, and the table made of it.
#pragma once
#include <future>

#include "program.h"

namespace script_tests {

// A folder with the two scripts, the page of benchmarks, and the stand-ins.
struct Machine {
    TempFolder folder;

    void script(const std::string& name, const std::string& text) {
        write_file(folder.file(name), "#!/bin/bash\n" + text);
        std::filesystem::permissions(folder.file(name), std::filesystem::perms::owner_all);
    }
    Machine() {
        for (const char* sub : {"dev", "bin", "build"}) std::filesystem::create_directory(folder.file(sub));
        for (const char* name : {"dev/gpu_check.sh", "dev/results_table.sh", "dev/BENCHMARKS.md"})
            std::filesystem::copy_file(name, folder.file(name));
        script("bin/nvidia-smi", R"sh(case "$*" in
            -L) echo "GPU 0: NVIDIA X/1 80GB (UUID: GPU-0)" ;;
            *clocks.sm,*) while :; do echo "1980, 45, 300.12, 41000"; sleep 2; done ;;
            *=name*) echo "NVIDIA X/1 80GB" ;;
            *=driver_version*) echo 580.1 ;;
            *=clocks.max.sm*) echo "1980 MHz" ;;
            *=power.limit*) echo "700.00 W" ;;
            *=memory.total*) echo "81559 MiB" ;;
            *) exit 9 ;; esac
        )sh");
        script("bin/nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.1'\n");
        script("bin/make", "echo built: \"$@\"\n");
        script("bin/compute-sanitizer", "until [[ $1 == ./* ]]; do shift; done; exec \"$@\"\n");
        script("bin/ncu", R"sh(while [ "$1" != ./build/test_device ]; do [ "$1" = --log-file ] && csv=$2; shift; done
            printf '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n' >"$csv"
            printf '"0","void f<a, 2>(float *, int)","gpu__time_duration.sum","ns","1,500"\n' >>"$csv"
            printf '"1","g()","gpu__time_duration.sum","ns","8400"\n' >>"$csv"; exec "$@"
        )sh");
        script("bin/python", "case $1 in -c) ;; *) echo \"result: $1 | 2.5 | ms | $*\" ;; esac\n");
        script("build/test_device", R"sh([ $1 != --list ] || exec printf '%s\n' cuda_a attention_kernels_a ladder_a
            [ $1 != --only ] || echo "ok   $2a                        7 checks    0.01 s"
            echo "result: test_device $* | 12 | us | counted"
            echo 'predicted: g | 7.0 | us'
            echo 'a step without clocks: the host had launched the step after 3.0 us,' \
                'the GPU was done after 10.0 us, medians of 7: 5 tokens/s'
            echo '3 passed, 0 failed'
        )sh");
        script("build/cuda_tests", "[ $1 = --write-results ] && echo results >$2\n");
        script("bin/mpirun", "[ \"$1 $2\" = '-np 2' ] && shift 2 && exec \"$@\"\n");
        trainer("5.5");
    }
    // Steps with tokens/s 1001, 1002, ...; the loss may be an expression of the shell.
    void trainer(const std::string& loss) {
        script("train_nsa", R"sh(case $1 in
                --version) echo 'MPI: MPICH Version: 4.0.2'; echo 'attention kernels: tensor_cores, plain'; exit ;;
                check) echo '  mlp.fc1      32768 x 3072 x 768 nt: algorithm 66, number 1 of 8'; exit ;;
                sample) echo 'the man finds the boat.'; exit ;;
                inspect) [ -s "$7" ] && echo chosen >"$9"; exit ;;
            esac
            steps=40
            while [ $# -gt 0 ]; do
                case $1 in --out) out=$2 ;; --steps) steps=$2 ;; *) shift; continue ;; esac
                shift 2
            done
            mkdir -p "$out/step_00000020" && echo weights >"$out/step_00000020/model.safetensors"
            for ((i = 1; i <= steps; i++)); do
                printf 'step %04d | loss 5.5 | lr 1.00e-04 | toks/s %d | grad_norm 4.87 | 238 ms | eta 4:32\n' \
                    $i $((1000 + i))
                echo "s:$i trl:)sh" +
                                loss + R"sh( lr:1e-4 norm:4.87" >>"$out/main.log"
            done
            sleep 0.2
            echo "step 2100 | val loss 0.4279 | bits/byte 0.6198 | recall loss 0.66 (chance 3.2581)"
            echo 'recall: 0.66 for a letter of a name that was last seen beyond the window'
            echo "done:   $steps steps in 0:01, median 1028 tokens/s, peak memory 14321 MiB on the GPU," \
                "of the host 900 MiB"
            echo "        852.1 MFLOP a token by the model's own count: 323.8 TFLOP/s, MFU 32.7 % of 989.4 TFLOP/s"
        )sh");
    }
    void bash(const std::string& text) {
        CHECK_EQUAL(program::execute({"/bin/bash", "-ec", "cd '" + folder.path + "'\n" + text}).status, 0);
    }
    // programs.tar.gz as another machine makes it, and no programs here.
    void prepare() {
        const std::string make = read_file(folder.file("bin/make")).substr(12);
        const std::string device = read_file(folder.file("build/test_device"));
        script("build/test_device",
               "[ \"$1 $2\" != '--compare-results build/emulator.safetensors' ] || exec echo "
               "\"compared with $(cat $2)\"\n" +
                   device);
        script("bin/make", "mkdir -p build/carried && mv train_nsa build/test_device build/cuda_tests build/carried\n");
        CHECK_EQUAL(run({"dev/gpu_check.sh", "prepare"}).status, 0);
        script("bin/make", make);
    }
    // In programs.tar.gz this program is another.
    void carry(const std::string& name, const std::string& text) {
        script("other", text);
        bash("mkdir pack; tar -xzf programs.tar.gz -C pack; mv other pack/" + name +
             "; tar -C pack -czf programs.tar.gz train_nsa build");
    }
    // The report holds all of this.
    void says(const std::vector<std::string>& sentences) {
        const std::string text = read_file(report());
        for (const std::string& sentence : sentences) {
            tests().checks++;
            if (text.find(sentence) == std::string::npos)
                check_failed(__FILE__, __LINE__, "no \"%s\" in %s", sentence.c_str(), text.c_str());
        }
    }
    program::Result run(program::Words words, const std::string& variable = "NONE=") {
        program::Start start;
        start.environment = {variable, "PATH=" + folder.file("bin") + ":" + std::getenv("PATH"),
                             "PYTHON=" + folder.file("bin/python"), "COMMIT=abc1234", "OUT=" + folder.file("results")};
        words[0] = folder.file(words[0]), words.insert(words.begin(), "/bin/bash");
        return program::execute(words, start);
    }
    std::string report() {
        std::string all;
        for (const auto& entry : std::filesystem::directory_iterator(folder.file("results")))
            if (entry.path().extension() == ".md") all += entry.path().string();
        return all;
    }
};

inline size_t count(const std::string& text, const std::string& what) {
    size_t times = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) times++;
    return times;
}

}  // namespace script_tests

// Every script says what it is for, in any folder, and does nothing else. Those in Python are asked where there is one.
TEST(run_scripts_have_help) {
    TempFolder folder;
    const bool python = program::execute({"/usr/bin/env", "python3", "-c", ""}).status == 0;
    std::vector<std::string> scripts;
    std::set<std::string> helps;  // each its own, not that of a file that it reads
    for (const char* pattern : {"data/*.sh", "dev/*.sh", "dev/*/*.sh", "dev/bench/evidence/*.sh", "lib/*/*.sh",
                                "data/*.py", "dev/*.py", "dev/*/*.py", "dev/bench/evidence/*.py"})
        for (const std::string& file : glob_files(pattern)) scripts.push_back(file);
    CHECK(scripts.size() >= 20);
    for (const std::string& script : scripts) {
        const bool is_python = has_ending(script, ".py");
        if (is_python && !python) continue;
        program::Start start;
        start.environment = {"PYTHONDONTWRITEBYTECODE=1"}, start.seconds = 20;
        const program::Result r = program::execute(
            {"/bin/bash", "-c", "cd '" + folder.path + (is_python ? "' && python3" : "' && bash") + " \"$0\" --help",
             std::filesystem::absolute(script).string()},
            start);
        tests().checks++;
        if (r.status != 0 || r.out.size() < 60 || !r.err.empty() || !helps.insert(r.out).second)
            check_failed(__FILE__, __LINE__, "%s --help: status %d, '%s', stderr '%s'", script.c_str(), r.status,
                         r.out.c_str(), r.err.c_str());
    }
    CHECK(std::filesystem::is_empty(folder.path));
}

TEST(run_gpu_check_with_stand_ins) {
    using namespace script_tests;
    Machine machine;
    const program::Result all = machine.run({"dev/gpu_check.sh"});
    CHECK_EQUAL(all.status, 0);
    const std::string file = machine.report(), text = read_file(file);
    CHECK(file.find("NVIDIA_X_1_80GB-") != std::string::npos);
    CHECK(text.find("driver 580.1, CUDA 13.0, SM clock at most 1980 MHz, power limit 700.00 W, 81559 MiB") !=
          std::string::npos);
    for (const char* part : {"build", "tests", "emulator", "loss", "ranks", "products", "shapes", "gaps", "published",
                             "sanitizer", "perf", "attention", "train", "batches", "long", "torch"}) {
        CHECK_EQUAL(count(text, std::string("\n## ") + part + "\n"), size_t(1));
        CHECK_EQUAL(count(text, std::string("\n| ") + part + " | passed after "), size_t(1));
    }
    CHECK_EQUAL(count(text, ": exit status 0 after "), size_t(16));
    CHECK_EQUAL(count(text, "; median SM clock 1980 MHz, at most 45 C, 300 W and 41000 MiB"), size_t(16));
    CHECK_EQUAL(count(text, "; commit abc1234, sources "), 16 + count(text, "\nresult: "));
    CHECK(text.find("the same 5 steps twice: the same losses and norms, digit for digit") != std::string::npos);
    CHECK(text.find("command not found") == std::string::npos);
    // What the model of part loss chooses in its own words.
    CHECK(text.find("result: test_device --perf-attention --shape published --selections=/") != std::string::npos &&
          text.find("result: test_device --perf-attention --batch 1 --seq-len 65536 --selections=/") !=
              std::string::npos);
    CHECK(text.find("result: kernels of a step, 16 x 2048 | 10 | us | 2 launches, by ncu; the step without it 10 us, "
                    "so 1.0 % of it lie between kernels, memset and memcpy (which ncu does not list) included") !=
          std::string::npos);
    // Each kernel, the longest first, beside what was predicted for the operation whose name it bears.
    const size_t g = text.find(
        "result: kernel g | 8.4 | us | 1 launches of a step, 84.8 % of its kernels; 7.0 us "
        "predicted for g\n");
    CHECK(g != std::string::npos);
    CHECK(text.find("result: kernel f<a, 2> | 1.5 | us | 1 launches of a step, 15.2 % of its kernels\n", g) !=
          std::string::npos);
    CHECK(read_file(file.substr(0, file.size() - 3) + "-kernels.csv").find("\"8400\"") != std::string::npos);
    // The report holds the parts' whole output or its beginning, results and end; the log beside it all of it.
    CHECK(text.find("-- NSA, T=2048: --batch 16") != std::string::npos &&
          text.find("\nstep 0001 | ") != std::string::npos);
    const std::string whole = read_file(file.substr(0, file.size() - 3) + ".log");
    CHECK_EQUAL(count(whole, "\nstep 0050 | "), size_t(3));
    // The page's own table of all figures is what that of the benchmarks is made of.
    CHECK(text.find("\n| NSA, T=2048 | 1028 | tokens/s | median") != std::string::npos);
    CHECK(text.find("result: test_device --only attention_kernels_ | 12 | us |") != std::string::npos);
    // Of 50 steps the median of 6 .. 50 is the 28th; of 15 that of 6 .. 15 the 10th.
    CHECK(text.find("result: NSA, T=2048 | 1028 | tokens/s | median of the steps after the 5th, MFU 32.7 % of 989.4 "
                    "TFLOP/s, 14321 MiB of GPU memory, first step after ") != std::string::npos);
    CHECK(whole.find("dev/bench/torch_step.py --batch 16 --seq-len 2048 --peak-tflops 989.4") != std::string::npos);
    CHECK(text.find("dev/bench/torch_step.py --batch 1 --seq-len 32768 --peak-tflops 989.4") != std::string::npos);
    CHECK(text.find("result: NSA, T=2048, micro-batch 32 | 1010 | tokens/s |") != std::string::npos);

    machine.script(
        "build/test_device",
        "for ((i = 1; i <= 500; i++)); do echo line $i; [ $i != 100 ] || echo 'result: a | 1 | us | b'; done\n");
    machine.run({"dev/gpu_check.sh", "attention"});
    const std::string longer = read_file(file);
    CHECK(longer.find("\nline 10\n...\nresult: a | 1 | us | b\nline 441\n") != std::string::npos &&
          longer.find("\nline 500\n") != std::string::npos);
    write_file(file, text);

    const program::Result table = machine.run({"dev/results_table.sh", file, machine.folder.file("dev/BENCHMARKS.md")});
    CHECK_EQUAL(table.status, 0);
    const std::string page = read_file(machine.folder.file("dev/BENCHMARKS.md"));
    CHECK(page.find("| NSA, T=2048 | 1028 | tokens/s | median of the steps after the 5th, MFU 32.7 % of 989.4 "
                    "TFLOP/s, 14321 MiB of GPU memory, first step after ") != std::string::npos);
    CHECK(page.find(" s; random token ids, --batch 16 --total-batch 65536 --steps 50; commit abc1234, sources ") !=
          std::string::npos);
    CHECK_EQUAL(count(page, "; commit abc1234, sources "), count(text, "\nresult: "));
    CHECK(page.find("| first |") == std::string::npos);  // runs that are only compared
    CHECK(page.find("Parts that failed") == std::string::npos && page.find("failed elsewhere") == std::string::npos);
}
// With PRECISION=FP32 there are no kernels on tensor cores, so neither are their tests. Where all tests are missing the
// program sees no GPU, and where others are it was built from other sources.
TEST(run_gpu_check_knows_which_tests_there_are) {
    using namespace script_tests;
    const struct {
        const char *names, *engine, *line;
        int status;
    } cases[] = {
        {"cuda_a ladder_a", "fp32",
         "skipped: tests attention_kernels_*, as the attention kernels of this build are: plain", 0},
        {"cuda_a ladder_a", "bf16", "build/test_device has no tests attention_kernels_*: was it built from other", 1},
        {"util_a", "fp32", "there are no tests ladder_*: build/test_device sees no GPU (nvidia-smi does)", 1},
        {"util_a", "bf16", "there are no tests attention_kernels_*: build/test_device sees no GPU", 1},
    };
    for (const auto& c : cases) {
        Machine machine;
        machine.script("build/test_device", format_text("[ $1 != --list ] || exec printf '%%s\\n' %s\n"
                                                        "echo \"ok   $2a             7 checks    0.01 s\"\n",
                                                        c.names));
        const bool plain = !std::strcmp(c.engine, "fp32");
        machine.script("train_nsa", format_text("echo 'engines: CPU, CUDA (%s)'; echo 'attention kernels: %s'\n",
                                                c.engine, plain ? "plain" : "gathered_rows, tensor_cores, plain"));
        CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "tests"}).status, c.status);
        tests().checks++;
        const std::string text = read_file(machine.report());
        if (text.find(c.line) == std::string::npos)
            check_failed(__FILE__, __LINE__, "%s: no line \"%s\" in %s", c.names, c.line, text.c_str());
        if (!plain) continue;
        CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "attention", "published", "emulator", "sanitizer"}).status, 0);
        CHECK(read_file(machine.report()).find("--only attention_kernels") == std::string::npos);
    }
}
// A part alone, which finds that two runs differ, or whose program fails, is a
// failure, takes the place of the part's earlier section, and its figures are marked.
TEST(run_gpu_check_tells_what_failed) {
    using namespace script_tests;
    Machine machine;
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "train", "perf"}).status, 0);
    machine.trainer("$RANDOM$RANDOM");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "train"}).status, 1);
    std::string text = read_file(machine.report());
    CHECK(text.find("the same 5 steps twice: DIFFERENT") != std::string::npos);
    CHECK_EQUAL(count(text, "\n## train\n"), size_t(1));
    program::Result table = machine.run({"dev/results_table.sh", machine.report()});
    CHECK(table.out.find("| test_device --perf --model 125m --device cuda --attention full | 12 | us |") !=
          std::string::npos);
    CHECK(table.out.find("; **its part failed elsewhere** |") != std::string::npos &&
          table.out.find("Parts that failed: train.") != std::string::npos);
    machine.script("train_nsa", "echo 'no memory' >&2; exit 1\n");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "batches"}).status, 1);
    text = read_file(machine.report());
    CHECK(text.find("no memory\ntraining ended with status 1") != std::string::npos);
    // The rest of a part is run although something in it fails, here all of ours beside PyTorch.
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "torch"}).status, 1);
    CHECK(read_file(machine.report()).find("dev/bench/torch_attention.py --tokens 65536") != std::string::npos);
    const program::Result unknown = machine.run({"dev/gpu_check.sh", "trian"});
    CHECK_EQUAL(unknown.status, 2);
    CHECK(unknown.err.find("unknown part 'trian'") != std::string::npos);
}
// The list `first`, with programs, emulator's results and CPU's losses that another machine has prepared: nothing is
// built, the parts come in their order, and a second call runs only what has not passed.
TEST(run_gpu_check_first) {
    using namespace script_tests;
    Machine machine;
    machine.prepare();
    const program::Result none = machine.run({"dev/gpu_check.sh", "first"}, "TOTAL=1");
    CHECK_EQUAL(none.status, 1);
    const std::string file = machine.report();
    CHECK_EQUAL(count(read_file(file), " | not run | no time is left for it: call dev/gpu_check.sh first again |"),
                size_t(8));
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "first"}).status, 0);
    const std::string text = read_file(file);
    size_t at = 0;
    for (const char* answer :
         {"tests | passed after # | 3 tests passed on the device, 0 did not |",
          "emulator | passed after # | compared with results |",
          "loss | passed after # | recall 0.66, to be below 1; beside the CPU's: 20 steps, losses at most 0 % apart",
          "ranks | passed after # | two ranks on one GPU: 20 steps, losses at most 0 % apart (limit 1 %); one GPU, so "
          "NCCL was not tried |",
          "products | passed after # |", "shapes | passed after # | tokens/s of 16 x 1024: 1015, MFU 32.7 %;",
          "gaps | passed after # | 2 kernels take 10 of a step's 10 us |", "published | passed after # |"}) {
        const std::string row = answer;
        const size_t hash = row.find('#'), found = text.find("\n| " + row.substr(0, hash), at);
        tests().checks++;
        if (found == std::string::npos || text.find(row.substr(hash + 1), found) == std::string::npos)
            check_failed(__FILE__, __LINE__, "no row '%s', in this order, in %s", answer, text.c_str());
        else at = found;
    }
    CHECK(text.find("\n## build\n") == std::string::npos);
    CHECK(text.find("the CPU's log (carried along): 20 steps") != std::string::npos);
    CHECK(text.find("test_device --predict-attention --selections=build/selections.json | ") != std::string::npos);
    // Nothing is run again, whatever the programs would do now, but a part that failed.
    machine.trainer("9.9");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "first"}).out.find("has passed, see") == std::string::npos, false);
    CHECK_EQUAL(read_file(file), text);
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "loss"}).status, 1);
    CHECK(read_file(file).find("| loss | FAILED after ") != std::string::npos);
    machine.trainer("5.5");
    const program::Result again = machine.run({"dev/gpu_check.sh", "first"});
    CHECK_EQUAL(again.status, 0);
    CHECK_EQUAL(count(again.out, "has passed, see"), size_t(7));
}
// What stands in a part's way is a sentence in the report, and the other parts have their turn.
TEST(run_gpu_check_says_what_is_missing) {
    using namespace script_tests;
    const program::Words two_parts = {"dev/gpu_check.sh", "emulator", "shapes"};
    {
        Machine no_driver;
        no_driver.script("bin/nvidia-smi", "exit 9\n");
        CHECK_EQUAL(no_driver.run(two_parts).status, 1);
        no_driver.says({"\ndriver: nvidia-smi shows no GPU",
                        "| emulator | not run | nvidia-smi shows no GPU on this "
                        "machine: there is none, or its driver does not run |",
                        "| shapes | not run | nvidia-smi"});
    }
    {
        Machine other_toolkit;
        other_toolkit.prepare();
        other_toolkit.carry("build/test_device",
                            "echo 'libcublasLt.so.13: cannot open shared object file' >&2; exit 9\n");
        other_toolkit.script("bin/make", "echo 'nvcc fatal: Unsupported gpu architecture' >&2; exit 1\n");
        CHECK_EQUAL(other_toolkit.run(two_parts).status, 1);
        other_toolkit.says({"the programs that were carried along do not run here: libcublasLt.so.13: cannot open",
                            "nvcc fatal: Unsupported gpu architecture", "| build | FAILED after ",
                            "| emulator | not run | there are no programs to run, since the build failed |",
                            "| shapes | not run | there are no programs"});
    }
    {
        Machine of_8_gb;
        const std::string trainer = read_file(of_8_gb.folder.file("train_nsa"));
        of_8_gb.script("train_nsa", R"sh(for word; do case $word in 8 | 16 | 32)
                echo 'train_nsa: error: --batch 16 and --seq-len 2048 need 14113 MiB per rank, of which 2118 MiB are' \
                    'parameters, gradients and moments; 7000 MiB are available: choose --batch 4' >&2; exit 1 ;; esac
            done
        )sh" + trainer);
        CHECK_EQUAL(of_8_gb.run(two_parts).status, 0);
        of_8_gb.says({"\n--batch 16 is too much for this GPU's memory, so half of it:\n",
                      "\nresult: NSA, 4 x 8192 | 1015 ", "--seq-len 2048 --total-batch 32768 --steps 25 --batch 4",
                      "| shapes | passed after "});
    }
    {
        Machine of_24_gb;
        const std::string device = read_file(of_24_gb.folder.file("build/test_device"));
        of_24_gb.script("build/test_device", R"sh(case $* in *published* | *'batch 16'*)
                echo 'result: at 8192 | 1 | ms | here'
                echo 'tests: error: out of GPU memory: 4096.0 MiB were asked for' >&2; exit 1 ;;
            *'batch 8'*) echo 'result: perf, NSA, 8 x 2048: step | 9 | tokens/s | 7.0 us without clocks' ;; esac
        )sh" + device);
        CHECK_EQUAL(of_24_gb.run({"dev/gpu_check.sh", "published", "products"}).status, 1);
        of_24_gb.says({"| published | FAILED after ",
                       " s | tests: error: out of GPU memory: 4096.0 MiB were asked for |",
                       "\n| at 8192 | 1 | ms | here; commit", "**its part failed elsewhere** |",
                       "| NSA, 8 x 2048: 9 tokens/s, 7.0 us a step |"});
    }
    {
        Machine of_sm_75;
        const std::string trainer = read_file(of_sm_75.folder.file("train_nsa"));
        of_sm_75.prepare();
        of_sm_75.carry("train_nsa",
                       "[ $1 != check ] || { echo 'train_nsa: error: GPU 0, Tesla T4, has compute capability "
                       "7.5; bf16 needs 8.0 or later: build again with PRECISION=FP32' >&2; exit 1; }\n" +
                           trainer);
        of_sm_75.script("bin/make",
                        "cp build/carried/test_device build; cp build/carried/train_nsa .\n"
                        "sed -i 's/attention kernels: .*plain/attention kernels: plain/' train_nsa\n");
        CHECK_EQUAL(of_sm_75.run(two_parts).status, 0);
        of_sm_75.says(
            {"do not run here: train_nsa: error: GPU 0, Tesla T4, has compute capability 7.5; bf16 needs 8.0 or",
             "| build | passed after ", "| shapes | passed after ",
             "| emulator | not run | the attention kernels of this build are: plain |"});
    }
    {
        Machine without_mpi;
        without_mpi.script("bin/mpirun", "exit 9\n");
        without_mpi.script("train_nsa", "echo engines: CPU, CUDA\n");
        CHECK_EQUAL(without_mpi.run({"dev/gpu_check.sh", "ranks"}).status, 0);
        without_mpi.says(
            {"| ranks | not run | two ranks share a GPU by MPI alone, and there is no mpirun, or this build "
             "has no MPI |"});
    }
    // Two GPUs, the second of which takes its time to be named: NCCL too.
    Machine of_two;
    of_two.script("bin/nvidia-smi", "[ $1 = -L ] && echo 'GPU 0: X' && sleep 0.2 && echo 'GPU 1: X'\n");
    CHECK_EQUAL(of_two.run({"dev/gpu_check.sh", "ranks"}).status, 0);
    of_two.says({"; two GPUs: 20 steps, losses at most 0 % apart (limit 1 %); --zero 0 and 1: the same bits |"});
}
// What takes too long is killed with all that it started, which cannot refuse;
// what it had printed is in the report; what has no time left is said.
// A part's time is over here when its program has begun, however busy the machine is.
TEST_LONG(run_gpu_check_stops_what_takes_too_long) {
    using namespace script_tests;
    Machine machine;
    machine.script("build/test_device",
                   "[ $1 != --list ] || exit 0\ntrap '' TERM INT\necho begun; sleep 600 & echo $! >'" +
                       machine.folder.file("pid") + "'; wait; wait; sleep 600\n");
    machine.script("bin/timeout", R"sh(case $* in
        "-s KILL 580 bash -c part_attention") /usr/bin/timeout "$@" &
            exec 2>/dev/null  # where bash would say that it was killed
            until [ -s pid ]; do sleep 0.1; done
            kill -ALRM $!
            wait $! ;;
        *) exec /usr/bin/timeout "$@" ;; esac
    )sh");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "perf"}, "TOTAL=1").status, 1);
    CHECK(read_file(machine.report()).find("no time is left for it: call dev/gpu_check.sh perf again") !=
          std::string::npos);
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "attention"}).status, 1);
    const std::string text = read_file(machine.report());
    CHECK(text.find("exit status 137 after ") != std::string::npos &&
          text.find("\nstopped after 580 s: begun\n") != std::string::npos);
    const int child = std::stoi(read_file(machine.folder.file("pid")));
    bool gone = false;
    for (int i = 0; i < 100 && !gone; i++, usleep(20000)) gone = kill(child, 0) != 0;  // whoever inherits it buries it
    CHECK(gone);
    // A program that is not there is built first.
    std::filesystem::remove(machine.folder.file("build/test_device"));
    machine.run({"dev/gpu_check.sh", "perf"});
    CHECK(read_file(machine.report()).find("built: -j2 train_nsa build/test_device") != std::string::npos);
    // A toolkit without cuBLASLt takes PyTorch's.
    machine.script(
        "bin/nvcc",
        "case $* in *-lcublasLt*) exit 1 ;; *) echo 'Cuda compilation tools, release 13.0, V13.0.1' ;; esac\n");
    for (const char* sub : {"cu13", "cu13/include", "cu13/lib"})
        std::filesystem::create_directory(machine.folder.file(sub));
    for (const char* name : {"cu13/include/cublasLt.h", "cu13/include/cuda_runtime.h", "cu13/lib/libcublasLt.so.13"})
        write_file(machine.folder.file(name), name);
    const program::Result without = machine.run({"dev/gpu_check.sh", "build"});
    CHECK(without.out.find("cuBLASLt is not there to build with, neither in the toolkit nor beside PyTorch") !=
          std::string::npos);
    machine.script("bin/python", "echo '" + machine.folder.file("cu13") + "'\n");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "build"}).status, 0);
    CHECK_EQUAL(read_file(machine.folder.file("build/cublas/lib/libcublasLt.so")), "cu13/lib/libcublasLt.so.13");
    CHECK_EQUAL(read_file(machine.folder.file("build/cublas/include/cublasLt.h")), "cu13/include/cublasLt.h");
    CHECK(!std::filesystem::exists(machine.folder.file("build/cublas/include/cuda_runtime.h")));
    CHECK(read_file(machine.report()).find("\nNVCC_APPEND_FLAGS=-I" + machine.folder.file("build/cublas/include -L")) !=
          std::string::npos);
    // What was built comes back beside the report, and is unpacked where it is missing; another GPU's is not taken.
    machine.script(
        "bin/make",
        "printf '#!/bin/sh\\necho built' | tee train_nsa >build/test_device; chmod +x train_nsa build/test_device\n");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "perf"}).status, 0);
    std::filesystem::rename(machine.folder.file("results/programs.tar.gz"), machine.folder.file("programs.tar.gz"));
    const auto perf_without_programs = [&](const std::string& make) {
        for (const char* name : {"train_nsa", "build/test_device", "build/built_for"})
            std::filesystem::remove(machine.folder.file(name));
        machine.script("bin/make", make);
        return machine.run({"dev/gpu_check.sh", "perf"}).status;
    };
    CHECK_EQUAL(perf_without_programs("exit 1\n"), 0);
    machine.script("bin/nvcc", "echo 'Cuda compilation tools, release 13.1, V13.1.1'\n");
    CHECK_EQUAL(perf_without_programs("exit 1\n"), 1);
    // Nothing runs without a build.
    machine.says({"| perf | not run | there are no programs to run, since the build failed |",
                  "`bash -c part_build`: exit status 1 "});
    machine.script("bin/make",
                   "case $* in *MARCH=*) echo \"built: $*\" ;; *) echo 'unknown intrinsic'; exit 1 ;; esac\n");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "build"}).status, 0);
    CHECK(read_file(machine.report())
              .find("unknown intrinsic\n-- again, for a plainer processor\nbuilt: -j2 MARCH=x86-64-v3 "
                    "train_nsa build/test_device\n") != std::string::npos);
}
// A child that is killed before it has become another program runs its shell's trap, which must not take the folder of
// all parts away: on a busy machine that is the watcher of a part that ends at once. One of 50 would have.
TEST(run_gpu_check_keeps_its_folder) {
    script_tests::Machine machine;
    machine.bash(R"sh(mkdir work; work=$PWD/work
        eval "$(grep '^trap ' dev/gpu_check.sh)"
        for ((i = 0; i < 50; i++)); do sleep 5 & kill $!; wait $! || :; [ -d work ]; done 2>/dev/null
    )sh");
    CHECK(!std::filesystem::exists(machine.folder.file("work")));
}
// A test that hangs or crashes costs its group its seconds, the tests that did not pass are run again alone, and the
// next part has its turn. Seconds given to `timeout` count as a fortieth here.
TEST_LONG(run_gpu_check_goes_on_after_a_hang) {
    using namespace script_tests;
    Machine machine;
    machine.script("bin/timeout", R"sh(options=()
        while [[ $1 == -* ]]; do options+=("$1"); case $1 in -k | -s) options+=("$2"); shift ;; esac; shift; done
        seconds=$1; shift
        exec /usr/bin/timeout "${options[@]}" "$(awk "BEGIN { print $seconds / 40 }")" "$@"
    )sh");
    machine.script("build/test_device", R"sh(case $* in
        --list) printf '%s\n' cuda_one cuda_hangs cuda_three attention_kernels_crashes \
            attention_kernels_fails ladder_one ;;
        "--only cuda_") echo 'ok   cuda_one  1 checks'; exec sleep 600 ;;
        "--only cuda_hangs") exec sleep 600 ;;
        "--only attention_kernels_") echo 'FAIL attention_kernels_fails 1 checks'; kill -SEGV $$ ;;
        "--only attention_kernels_fails") echo 'FAIL attention_kernels_fails 1 checks'; exit 1 ;;
        "--only ladder_") echo "ok   ladder_one  1 checks" ;;
        *) echo "ok   $2  1 checks" ;; esac
    )sh");
    const program::Result r = machine.run({"dev/gpu_check.sh", "tests", "perf"});
    CHECK_EQUAL(r.status, 1);
    CHECK(r.seconds < 30);
    const std::string text = read_file(machine.report());
    CHECK(text.find("\nstopped after 90 s: ./build/test_device --only cuda_\n") != std::string::npos);
    for (const char* alone : {"cuda_hangs alone\nstopped after 15 s: ./build/test_device --only cuda_hangs\n",
                              "cuda_three alone\nok   cuda_three ", "attention_kernels_crashes alone\nok   ",
                              "attention_kernels_fails alone\nFAIL attention_kernels_fails "})
        CHECK_EQUAL(count(text, std::string("\n-- ") + alone), size_t(1));
    CHECK_EQUAL(count(text, " alone\n"), size_t(4));
    CHECK(text.find("ok   --model  1 checks") != std::string::npos &&
          text.find("exit status 0 after ") != std::string::npos);
    // A GPU that the program does not see is no passed test.
    machine.script("build/test_device", "echo '0 passed, 0 failed'\n");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "tests"}).status, 1);
    CHECK(read_file(machine.report()).find("there are no tests ladder_*: build/test_device sees no GPU") !=
          std::string::npos);
    // A tool and what it starts are gone before their part ends.
    machine.script("bin/compute-sanitizer", "echo \"waits: $OMP_WAIT_POLICY\"; trap '' TERM; sleep 300 & echo $! >'" +
                                                machine.folder.file("pid") + "'; wait\n");
    std::filesystem::remove(machine.folder.file("bin/timeout"));
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "sanitizer"}, "TOTAL=19").status, 1);
    const std::string sanitized = read_file(machine.report());
    for (const char* line : {"\nwaits: passive\n", "\nstopped after ", "\nFAILED after ",
                             ": of 5 runs under compute-sanitizer 5 failed or were stopped\n"})
        CHECK(sanitized.find(line) != std::string::npos);
    CHECK_EQUAL(count(sanitized, "`bash -c part_sanitizer`: exit status 1 after "), size_t(1));
    const int child = std::stoi(read_file(machine.folder.file("pid")));
    bool gone = false;
    for (int i = 0; i < 100 && !gone; i++, usleep(20000)) gone = kill(child, 0) != 0;
    CHECK(gone);
}

// The stand-in for the program takes any options; the program itself refused those of one run on the first GPU.
TEST(run_gpu_check_sanitizes_runs_that_the_program_accepts) {
    using namespace script_tests;
    Machine machine;
    machine.script("train_nsa", "echo \"$*\" >>'" + machine.folder.file("asked") + "'\n");
    CHECK_EQUAL(machine.run({"dev/gpu_check.sh", "sanitizer"}).status, 0);
    std::istringstream asked(read_file(machine.folder.file("asked")));
    int runs = 0;
    for (std::string line; std::getline(asked, line);) {
        std::istringstream in(line);
        program::Words words;
        for (std::string word; in >> word;) words.push_back(word == "cuda" ? "cpu" : word);
        if (words[0] == "--version") continue;
        runs++;
        words.back() = machine.folder.file("run" + std::to_string(runs));  // --out
        CHECK_EQUAL(program::run(words).status, 0);
    }
    CHECK_EQUAL(runs, 3);
}

// `make demo` with a small text and its own sources: one command, and everything is there.
TEST_LONG(script_demo_goes_from_a_text_to_a_sample) {
    TempFolder folder;
    std::string text;
    for (int i = 0; i < 3000; i++) text += format_text("line %d of a small text, which repeats itself. ", i % 7);
    write_file(folder.file("book.txt"), text);
    for (const std::string& given : {folder.file("book.txt"), std::string()}) {
        program::Start start;
        start.seconds = 120;
        const std::string out = folder.file(given.empty() ? "sources" : "book");
        start.environment = {"TEXT=" + given, "STEPS=2", "OUT=" + out, "PROGRAM=" + program::path()};
        const program::Result r = program::execute({"/bin/bash", std::filesystem::absolute("dev/demo.sh")}, start);
        CHECK_EQUAL(r.status, 0);
        CHECK(file_exists(out + "/report.html") && file_exists(out + "/vocabulary/vocab.bpe"));
        CHECK_EQUAL(glob_files(out + "/run/step_00000002/model.safetensors").size(), 1u);
        for (const char* verb : {"vocabulary", "tokenize", "train", "report", "sample"})
            CHECK(r.out.find("train_nsa " + std::string(verb) + " ") != std::string::npos);
    }
}

// Built in a folder inside another repository, as of a tarball, the program does not name that one's commit.
TEST(script_version_is_not_of_a_repository_around) {
    TempFolder folder;
    for (const char* file : {"Makefile", "CHANGELOG.md", "lib/run/config.sh", "lib/cuda/gpu.mk"}) {
        const std::string to = folder.file(std::string("inner/") + file);
        make_folders(folder_of(to));
        std::filesystem::copy_file(file, to);
    }
    const std::string commit = "git init -q . && git -c user.name=x -c user.email=x commit -q --allow-empty -m x && ";
    const auto version = [&](const std::string& before) {
        const auto r =
            program::execute({"/bin/bash", "-c",
                              "cd " + folder.path + " && " + before +
                                  "cd inner && make -s info NO_CUDA=1 NO_MPI=1 >/dev/null && cat build/version"});
        CHECK_EQUAL(r.status, 0);
        return r.out;
    };
    if (program::execute({"/usr/bin/env", "git", "--version"}).status != 0)
        return skip("script_version_is_not_of_a_repository_around: no git on this machine");
    const std::string around = version(commit), own = version("cd inner && " + commit + "cd .. && ");
    CHECK(around.find('-') == std::string::npos && around.size() > 4);
    CHECK_EQUAL(own.find(around.substr(0, around.size() - 1) + "-"), 0u);
}

// A folder that somebody else filled stays as it is, and its own is made anew; apostrophes are quoted.
TEST(script_demo_empties_no_folder_of_others) {
    TempFolder folder;
    const std::string out = folder.file("precious"), text = folder.file("Alice's $book.txt");
    make_folders(out);
    write_file(out + "/thesis.txt", "years");
    write_file(text, "text");
    const auto demo = [&](const std::string& to) {
        program::Start start;
        start.environment = {"TEXT=" + text, "OUT=" + to, "PROGRAM=/bin/true"};
        return program::execute({"/bin/bash", std::filesystem::absolute("dev/demo.sh")}, start);
    };
    const auto refused = demo(out);
    CHECK_EQUAL(refused.status, 1);
    CHECK(refused.err.find(out) != std::string::npos);
    CHECK_EQUAL(read_file(out + "/thesis.txt"), std::string("years"));
    for (int again = 0; again < 2; again++) {
        const auto r = demo(folder.file("own"));
        CHECK_EQUAL(r.status, 0);
        CHECK(r.out.find(" --in " + shell_word(text)) != std::string::npos);
    }
    const auto made = program::execute({"/usr/bin/make", "-sn", "-f", "-", "demo", "TEXT=" + text, "BUILD=build"}, [&] {
        program::Start start;
        write_file(folder.file("makefile"),
                   "quoted = '$(subst ','\\'',$(1))'\n.PHONY: train_nsa\ntrain_nsa:;\n"
                   "include dev/dev.mk\n");
        start.input = folder.file("makefile");
        return start;
    }());
    CHECK(made.out.find("TEXT=" + shell_word(text) + " ") != std::string::npos);
}

// `make deps` on Ubuntu 24.04, whose MPICH is no use, with and without it.
TEST(script_deps_tells_of_the_mpich_that_starts_every_rank_alone) {
    script_tests::Machine machine;
    std::string deps = read_file("lib/run/deps.sh");
    const std::string release = machine.folder.file("os-release"), there = "/etc/os-release";
    deps.replace(deps.find(there), there.size(), release);
    write_file(machine.folder.file("deps.sh"), deps);
    for (const char* name : {"bin/g++", "bin/mpirun", "bin/sudo"}) machine.script(name, "exec \"${@:-true}\"\n");
    machine.script("bin/apt-get", "echo \"$@\" >>" + machine.folder.file("installed") + "\n");
    const std::string line = "deps: the MPICH of Ubuntu 24.04, which is installed, starts every rank alone";
    const struct {
        const char *codename, *shown;
        bool is_broken;
    } cases[] = {{"noble", "g++ -I/usr/include/x86_64-linux-gnu/mpich -lmpich", true},
                 {"noble", "g++ -I/usr/lib/x86_64-linux-gnu/openmpi/include -lmpi", false},
                 {"noble", "g++ -I/usr/local/include/mpich -lmpich", false},
                 {"bookworm", "g++ -I/usr/include/x86_64-linux-gnu/mpich -lmpich", false}};
    for (const auto& c : cases) {
        write_file(release, std::string("UBUNTU_CODENAME=") + c.codename + "\n");
        machine.script("bin/mpicxx", std::string("echo '") + c.shown + "'\n");
        write_file(machine.folder.file("installed"), "");
        const auto r = machine.run({"deps.sh"});
        CHECK_EQUAL(r.status, 0);
        CHECK_EQUAL(r.out.find(line) == 0, c.is_broken);
        CHECK_EQUAL(r.out.find("deps: nothing is missing") == 0, !c.is_broken);
        const std::string installed = read_file(machine.folder.file("installed"));
        CHECK_EQUAL(installed.find("openmpi-bin libopenmpi-dev") != std::string::npos, c.is_broken);
    }
}

namespace script_tests {

// Shards of a small text, and a setting in which a run takes a tenth of a second.
struct Comparison {
    TempFolder folder;
    const std::string scripts = std::filesystem::absolute("dev/bench/evidence").string();

    Comparison() {
        std::string text;
        for (int i = 0; i < 3000; i++) text += format_text("%d %d\n", i * i % 97, i % 7);
        write_file(folder.file("text.txt"), text);
        CHECK_EQUAL(program::run({"tokenize", "--in", folder.file("text.txt"), "--out", folder.file("shards/t"),
                                  "--tokenizer", "bytes", "--val-fraction", "0.1"})
                        .status,
                    0);
        write_file(folder.file("tiny.json"), R"js({"model": {"layers": 2, "dim": 16, "heads": 2, "kv-groups": 1,
            "head-dim": 8, "mlp-hidden": 32, "cmp-block": 4, "cmp-stride": 2, "slc-block": 4, "slc-count": 3,
            "window": 4, "phi-hidden": 4, "init": "random", "tokenizer": "bytes", "seq-len": 128},
            "training": {"batch": 1, "total-batch": 128, "warmup": 1}, "machine": {"threads": 1, "device": "cpu"},
            "tokens": 1024, "train": "*_train_*.bin", "held_out": "*_val_*.bin",
            "held_out_samples": {"sweep": 2, "whole": 4}})js");
    }
    program::Result run(const std::string& script, const program::Words& more) {
        program::Start start;
        start.environment = {"PYTHONDONTWRITEBYTECODE=1"};
        return program::execute(program::joined({"/usr/bin/env", scripts + "/" + script}, more), start);
    }
    program::Result gpu_day(const std::string& plan) {
        return run("gpu_day.sh", {folder.file("shards"), folder.file("work"), "--setting", folder.file("tiny.json"),
                                  "--plan", plan, "--program", program::path()});
    }
    Json result(const std::string& name) {
        const std::string file = folder.file("work/results/" + name + ".json");
        return parse_json(read_file(file), file);
    }
};

inline std::string shard_text(const std::string& file) {
    const std::string bytes = read_file(file);
    std::string text;
    for (size_t i = SHARD_HEADER_BYTES; i < bytes.size(); i += 2) text += bytes[i];
    return text;
}

}  // namespace script_tests

// The protocol of a day on a GPU, with a small model: rates beyond the range, seeds, equal parameters, the same FLOPs
// as the program's own, and nothing is run twice.
TEST(run_comparison_of_arms) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("comparisons: no python3");
    Comparison c;
    const std::string plan = c.folder.file("plan.txt");
    write_file(plan,
               "sweep nsa 1e-3 2e-3\nsweep full 0.02 0.04 # a remark\nrun window+optimizer=muon 0.01 5 256\n"
               "run alternating+attention=window,full 0.01 5 256\nrun interleaved 0.01 5 256\nlonger "
               "nsa+smear+init=narrow 512 0.01 0.02\n");
    const program::Result day = c.gpu_day(plan);
    CHECK_EQUAL(day.err, "");
    CHECK_EQUAL(day.status, 0);
    CHECK(day.out.find("predicted at 300 TFLOP/s, not measured: ") != std::string::npos);
    // Two rates and two more seeds of 512 tokens, and one run of 256.
    CHECK(std::regex_search(day.out, std::regex("longer nsa\\+smear\\+init=narrow: .* 2.05e-06 G tokens")));
    CHECK(std::regex_search(day.out, std::regex("run interleaved: .* 2.56e-07 G tokens")));
    const size_t runs = glob_files(c.folder.file("work/results/*.json")).size();
    // Losses of such a run fall with the rate: two rates and four doublings. With all tokens the best one, its half and
    // its double at least, and both other seeds at the best of these.
    CHECK(file_exists(c.folder.file("work/results/nsa_lr0.032_seed0_tokens256.json")));
    for (const char* arm : {"nsa", "full"})
        for (const auto& [seeds, least] : {std::pair{"1", 3u}, std::pair{"[23]", 2u}})
            CHECK(glob_files(c.folder.file(format_text("work/results/%s_lr*_seed%s_tokens1024.json", arm, seeds)))
                      .size() >= least);
    CHECK(file_exists(c.folder.file("work/results/nsa_lr0.064_seed1_tokens1024.json")));  // beyond the sweep's best
    // `longer`: at least one rate beyond the two of its range; at the best one three seeds, all with its own tokens.
    const std::string longer = c.folder.file("work/results/nsa+smear+init=narrow_lr%s_seed%s_tokens%s.json");
    CHECK(glob_files(format_text(longer.c_str(), "*", "1", "512")).size() >= 3);
    for (const char* seed : {"2", "3"})
        CHECK_EQUAL(glob_files(format_text(longer.c_str(), "*", seed, "512")).size(), 1u);
    CHECK_EQUAL(glob_files(format_text(longer.c_str(), "*", "*", "*")).size(),
                glob_files(format_text(longer.c_str(), "*", "[123]", "512")).size());

    const Json nsa = c.result("nsa_lr0.001_seed0_tokens256"), full = c.result("full_lr0.02_seed0_tokens256");
    const Json window = c.result("window+optimizer=muon_lr0.01_seed5_tokens256");
    const char *const of_two = "alternating+attention=window,full_lr0.01_seed5_tokens256",
                      *const in_turn = "interleaved_lr0.01_seed5_tokens256";
    const Json alternating = c.result(of_two), interleaved = c.result(in_turn);
    const double size = nsa.number("parameters", "nsa");
    for (const Json* arm : {&full, &window, &alternating, &interleaved})
        CHECK(std::fabs(arm->number("parameters", "an arm") / size - 1) <= 0.02);
    for (const char* name : {"nsa_lr0.001_seed0_tokens256", "full_lr0.02_seed0_tokens256", of_two, in_turn}) {
        const std::string log = read_file(c.folder.file("work/" + std::string(name) + "/log.jsonl"));
        const Json start = parse_json(log.substr(0, log.find('\n')), name).get("start", name), found = c.result(name);
        CHECK_NEAR(found.number("flops", name) / 256, start.number("flops_per_token", name), 1);
        CHECK_EQUAL(found.number("parameters", name), start.number("parameters", name));
    }
    for (const Json* arm : {&window, &alternating})
        CHECK_NEAR(arm->number("keys_per_query", "an arm"), nsa.number("keys_per_query", "nsa"), 8);

    const auto before =
        std::filesystem::last_write_time(c.folder.file("work/results/nsa_lr0.001_seed0_tokens256.json"));
    std::filesystem::remove(c.folder.file("work/results/full_lr0.02_seed0_tokens256.json"));
    CHECK_EQUAL(c.gpu_day(plan).status, 0);
    CHECK(std::filesystem::last_write_time(c.folder.file("work/results/nsa_lr0.001_seed0_tokens256.json")) == before);
    CHECK_EQUAL(glob_files(c.folder.file("work/results/*.json")).size(), runs);
    write_file(plan, "sweep nothing 1e-3 2e-3\n");
    const program::Result wrong = c.gpu_day(plan);
    CHECK_EQUAL(wrong.status, 1);
    CHECK(wrong.err.find("'nothing' is no arm: expected one of nsa, full, window") != std::string::npos);
}

// A text of one's own as a corpus: two documents, which together are the text, and no byte of one in the other.
TEST(run_corpus_of_a_text) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("corpus: no python3");
    Comparison c;
    std::string text;
    for (int i = 0; i < 500; i++) text += format_text("line %d of a caf\u00e9\n", i);
    const std::string file = c.folder.file("text.txt"), cache = c.folder.file("cache");
    write_file(file, text);
    const program::Result made = c.run("corpus.py", {cache, "--text", file, "--program", program::path()});
    CHECK_EQUAL(made.err, "");
    CHECK_EQUAL(made.status, 0);
    const std::string train = shard_text(cache + "/train/text_train_000001.bin");
    const std::string held_out = shard_text(cache + "/heldout/text_val_000000.bin");
    CHECK_EQUAL(train.substr(1) + held_out.substr(1), text);  // behind an end-of-text each
    CHECK_NEAR(double(held_out.size()) / double(text.size()), 0.1, 0.01);
}

// A trained model goes on with longer sequences: each way has its own best rate, and is measured at the longer length.
TEST(run_extension) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("extension: no python3");
    Comparison c;
    const std::string plan = c.folder.file("plan.txt"), out = c.folder.file("out.json");
    write_file(plan, "run nsa 0.01 1 1024\nrun nsa 0.01 2 1024\n");
    CHECK_EQUAL(c.gpu_day(plan).status, 0);
    // Two at once share the work.
    const auto extend = [&](const std::string& to) {
        return c.run("extend.py", {"--cache", c.folder.file("shards"), "--work", c.folder.file("work"), "--setting",
                                   c.folder.file("tiny.json"), "--program", program::path(), "--length", "256",
                                   "--tokens", "4096", "--out", to, "nsa_lr0.01"});
    };
    auto second = std::async(std::launch::async, extend, c.folder.file("second.json"));
    const program::Result extended = extend(out), other = second.get();
    for (const program::Result& r : {extended, other}) {
        CHECK_EQUAL(r.err, "");
        CHECK_EQUAL(r.status, 0);
    }
    const Json all = parse_json(read_file(out), out);
    const std::string held_out = c.folder.file("shards/t_val_*.bin");
    for (const auto& [way, length, base] :
         {std::tuple{"T = 128, base 10000", 128, 10000}, std::tuple{"T = 256, base 40000", 256, 40000}}) {
        const Json result = all.get(way, out);
        const std::string rate = format_text("%g", result.number("rate", out));
        for (const char* seed : {"1", "2"}) {
            const std::string run =
                c.folder.file(format_text("work/extended/nsa_lr0.01_seed%s_tokens1024_T%d_base%d_lr%s_tokens4096", seed,
                                          length, base, rate.c_str()));
            const Json options = parse_json(read_file(run + "/run.json"), run);
            CHECK_EQUAL(options.integer("seq_len", run), int64_t(length));
            CHECK_EQUAL(options.integer("rope_base", run), int64_t(base));
            const program::Result evaluated = program::run(
                {"eval", "--from", run, "--val-data", held_out, "--batch", "1", "--seq-len", "256", "--device", "cpu"});
            const double loss = result.array("runs", out)[size_t(seed[0] - '1')].number("held_out_loss", out);
            CHECK(evaluated.out.find(format_text("loss %.4f", loss)) != std::string::npos);
        }
    }
}

// Needles and hops: questions whose answers stand in the text, asked of a model that learnt nothing of them.
TEST(run_needles) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("needles: no python3");
    Comparison c;
    CHECK_EQUAL(c.run("needle.py", {"make", c.folder.file("needle"), "--program", program::path(), "--samples", "20",
                                    "--trials", "3", "--lengths", "256"})
                    .status,
                0);
    for (const char* seed : {"1", "2"})
        CHECK_EQUAL(program::run({"--out", c.folder.file("nsa_seed" + std::string(seed)), "--steps", "1", "--seed",
                                  seed, "--sample-tokens", "0"})
                        .status,
                    0);
    const std::string answers = c.folder.file("answers"), svg = c.folder.file("needle.svg");
    const program::Result tested =
        c.run("needle.py", {"test", "--program", program::path(), "--cache", c.folder.file("needle"), "--work",
                            c.folder.path, "--answers", answers, "nsa"});
    CHECK_EQUAL(tested.err, "");
    CHECK(std::regex_match(tested.out, std::regex("(nsa_seed[12], 256 bytes: [0-9]+ % answered\n){2}")));
    const program::Result shown = c.run("needle.py", {"show", "--answers", answers, "--svg", svg, "nsa"});
    CHECK_EQUAL(shown.err, "");
    const std::string hops = " \\| [0-9]+ \\([0-9]+ to [0-9]+\\)";
    CHECK(std::regex_search(shown.out, std::regex("\n\\| 256( \\| [0-9]+){8}(" + hops + "){3} \\|\n$")));
    const std::string picture = read_file(svg);
    size_t rectangles = 0;
    for (size_t at = 0; (at = picture.find("<rect", at)) != std::string::npos; at++) rectangles++;
    CHECK_EQUAL(rectangles, size_t(8));
    CHECK(picture.find(">NSA, AdamW</text>") != std::string::npos);
    // Beside another arm a title says only what the two do not share.
    CHECK_EQUAL(c.run("needle.py", {"show", "--answers", answers, "--svg", svg, "nsa", "nsa"}).status, 0);
    CHECK(read_file(svg).find(">NSA</text>") != std::string::npos);
    size_t items = 0;
    for (const std::string& line : program::lines_of(read_file(c.folder.file("needle/items_256.jsonl")))) {
        const Json item = parse_json(line, "an item");
        const std::string text = item.string("text", "an item");
        const size_t body = text.find('?') - 1;  // the question stands at the end
        char name = text.back();
        CHECK_EQUAL(int64_t(text.size() - body - 2), item.integer("hops", "an item"));
        for (int64_t hop = 0; hop < item.integer("hops", "an item"); hop++) {
            size_t fact = text.find(name);
            while (text[fact + 2] != '.') fact = text.find(name, fact + 1);  // where it stands first
            CHECK_EQUAL(int64_t(fact * 8 / body), item.integer("eighth", "an item"));
            name = text[fact + 1];
        }
        const std::vector<Json>& endings = item.array("endings", "an item");
        CHECK_EQUAL(endings[size_t(item.integer("label", "an item"))].text, std::string(1, name));
        items++;
    }
    CHECK_EQUAL(items, size_t(8 * (3 + 1 + 1)));
}

// The shares of a hand-made attention, and that of a model, whose loss stays if the branch is given the model's own
// blocks, and does not where it is given others.
TEST_LONG(run_shares_of_selection) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", "import torch, numpy"}).status != 0)
        return skip("shares of selection: no PyTorch that python3 finds");
    Comparison c;
    REQUIRE_GOOD(c.run("selection.py", {"--selftest"}));
    REQUIRE_GOOD(program::train({{"out", c.folder.file("nsa_seed1")}, {"init", "random"}}));
    std::string text;
    for (int i = 0; i < 63; i++) text += char('a' + i * i % 23);
    write_file(c.folder.file("heldout_64.jsonl"), "{\"text\": \"" + text + "\"}\n{\"text\": \" \"}\n");
    const program::Result r = c.run(
        "selection.py", {"--cache", c.folder.path, "--work", c.folder.path, "--seq-len", "64", "--losses", "nsa"});
    CHECK_EQUAL(r.err, "");
    const std::string changed = " \\| [-+]0\\.[0-9]*[1-9][0-9]* [^|]*",
                      row = "\\| loss, less the model's own \\| \\+0.0000 ";
    CHECK(std::regex_search(r.out, std::regex(row + "[^|]*(" + changed + "){4}\\|")));
}

// The n-gram's loss for one byte and for two, computed once more from the formula.
TEST(run_ngram_floor) {
    using namespace script_tests;
    if (program::execute({"/usr/bin/env", "python3", "-c", ""}).status != 0) return skip("n-grams: no python3");
    Comparison c;
    const std::string out = c.folder.file("ngram.json");
    CHECK_EQUAL(c.run("ngram.py", {c.folder.path, "--train", "shards/t_train_*.bin", "--held-out",
                                   "shards/t_val_000000.bin", "--seq-len", "128", "--out", out})
                    .status,
                0);
    const std::string train = shard_text(c.folder.file("shards/t_train_000001.bin"));
    const std::string held_out = shard_text(c.folder.file("shards/t_val_000000.bin"));
    std::map<char, double> bytes, followers, behind;  // behind: distinct bytes that follow one
    std::map<std::string, double> pairs;
    for (const char byte : train) bytes[byte]++;
    for (size_t i = 0; i + 1 < train.size(); i++) {
        if (pairs[train.substr(i, 2)]++ == 0) behind[train[i]]++;
        followers[train[i]]++;
    }
    const size_t samples = (held_out.size() - 1) / 128;
    double loss[2] = {};
    for (size_t i = 1; i <= samples * 128; i++) {
        const double distinct = double(bytes.size()), all = double(train.size());
        const double one = (bytes[held_out[i]] + distinct / 256) / (all + distinct);
        const char context = held_out[i - 1];
        const double two = (pairs[held_out.substr(i - 1, 2)] + behind[context] * one) /
                           std::max(followers[context] + behind[context], 1.0);
        loss[0] -= std::log(one) / double(samples * 128);
        loss[1] -= std::log(followers[context] > 0 ? two : one) / double(samples * 128);
    }
    const Json found = parse_json(read_file(out), out).get("loss_by_order", out);
    // Short n-grams at the very beginning of the text are not counted there: 2e-3.
    CHECK_NEAR(found.number("1", out), loss[0], 2e-3);
    CHECK_NEAR(found.number("2", out), loss[1], 2e-3);
}

// A compiler wrapper that puts its paths in quotes, as Intel's does, is an MPI like any other.
TEST(script_config_reads_quoted_paths_of_an_mpi) {
    using namespace program;
    TempFolder folder;
    write_file(folder.file("mpicxx"), "#!/bin/sh\nmpicxx -show | sed 's/ -\\([IL]\\)\\([^ ]*\\)/ -\\1\"\\2\"/g'\n");
    std::filesystem::permissions(folder.file("mpicxx"), std::filesystem::perms::owner_all);
    const auto config = [&](const std::string& wrapper) {
        Start start;
        start.environment = {"CXX=g++",   "CPPFLAGS=", "CXXFLAGS=",    "LDFLAGS=",         "GPU=cuda",
                             "NO_CUDA=1", "NO_OMP=1",  "MARCH=native", "MPICXX=" + wrapper};
        return execute({"/bin/bash", "lib/run/config.sh"}, start).out;
    };
    const std::string plain = config("mpicxx");
    if (plain.find("HAVE_MPI") == std::string::npos) return void(std::printf("    not tried: no mpicxx\n"));
    CHECK_EQUAL(config(folder.file("mpicxx")), plain);
}
