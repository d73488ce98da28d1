#!/usr/bin/env bash
# Is what dev/PORTING.md tells its readers to type still true? Takes every command and every path from the document
# itself, in its order: runs the command or, where that needs hardware or takes long, what can be known without; else it
# says why nothing was tried. A command that this script does not know is a failure, so none can be added without a
# check.
#     dev/porting_check.sh        BUILD=build PYTHON=python3
# Needs ./train_nsa and, in BUILD, tests, cuda_tests and train_nsa_emulated. Ends with "N passed, N failed".
set -uo pipefail
. "$(dirname "$0")/checks.sh"
build=${BUILD:-build} root=$PWD skipped=0
export MAKEFLAGS='' OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# Two places to type in, which look like the repository and take what a command writes: in `here` build/ is the real
# one, in `empty` there is none yet.
for place in here empty; do
    mkdir "$work/$place"
    ln -s "$root"/* "$work/$place"
    rm -f "$work/$place"/{README.md,build,runs,test_nsa}
    cp README.md "$work/$place"
done
ln -s "$(realpath "$build")" "$work/here/build"

in_place() { (cd "$work/$1" && timeout 600 bash -c "$2") </dev/null; }
# try COMMAND COMMAND_LINE [PLACE]: COMMAND is in the document, COMMAND_LINE what is run for it, in `here` or PLACE.
try() { good "$1$([ "$1" = "$2" ] || echo "   by: $2")" in_place "${3:-here}" "$2"; }
skip() {
    echo "skipped: $1: $2"
    skipped=$((skipped + 1))
}
rehearse() { try "$1" "${1/make/make -n}" empty; }
# by_test_long COMMAND: it takes long, and make test_long runs it beside this script.
by_test_long() { try "$1" "grep -A 9 '^test_long:' dev/dev.mk | grep -F '$1'"; }
# on_gpu COMMAND OPTION: it needs a GPU; the program has to know the option.
on_gpu() {
    try "$1" "make -n build/test_device && grep -rhq -e '\"$2\"' dev/test dev/bench" empty
    skip "$1" "needs a GPU to run"
}
need() { command -v "$1" >/dev/null; }
has_torch() { "${PYTHON:-python3}" -c 'import torch' 2>/dev/null; }

check() {
    local command=$1
    case $command in
    'make test' | 'make goldens' | 'make hip_check' | 'make build/cuda_tests' | 'make ladder') rehearse "$command" ;;
    'make GPU=NAME' | make*GPU=opencl*)
        if [ -e /usr/include/CL/cl.h ]; then try "$command" "make -n ${command/#make/} GPU=opencl" empty
        else skip "$command" "no OpenCL's headers"; fi ;;
    make*GPU=hip*) if need hipcc; then rehearse "$command"; else skip "$command" 'no hipcc'; fi ;;
    'make GPU_COMPUTE_CAPABILITY='*)
        if ! need nvcc; then skip "$command" 'no nvcc'
        else try "$command" "make -n ${command#make } | grep -e 'code=.sm_${command#*=},'" empty; fi ;;
    'make NVCC=FOLDER'*)
        if ! need nvcc; then skip "$command" 'no nvcc'
        else try "$command" "make -n NVCC=$(command -v nvcc) ${command#*/nvcc } | grep -e -cudart" empty; fi ;;
    'make test_nsa && ./test_nsa') try "$command" "$command" ;;
    'make build/test_device && build/test_device')
        if need nvcc; then on_gpu "$command" --list; else skip "$command" 'no nvcc'; fi ;;
    'make build/train_nsa_emulated' | 'make BUILD=build/debug '*) try "$command" "$command" ;;
    'mpirun -np 2 build/train_nsa_emulated '*)
        if need mpirun; then try "$command" "$command"; else skip "$command" 'no mpirun'; fi ;;
    'gdb --args '*)
        if ! need gdb; then skip "$command" 'no gdb'
        else try "$command" "gdb -batch $(session) ${command#gdb } | tee /dev/stderr | session_is_good"; fi ;;
    'build/tests --perf --model 125m') try "$command" 'build/tests --perf --model tiny --batch 1' ;;
    'build/cuda_tests --write-results FILE') try "$command" 'build/cuda_tests --write-results FILE' ;;
    'build/test_device --compare-results FILE') try "$command" 'build/cuda_tests --compare-results FILE' ;;
    'build/cuda_tests --predict-attention') try "$command" "$command" ;;
    'build/test_device --'*)
        if need nvcc; then on_gpu "$command" "--${command##* --}"; else skip "$command" 'no nvcc'; fi ;;
    build/*' '*) unknown "$command" ;;
    build/*) try "$command" "make -n $command" empty ;;
    'ARCHS='*' dev/kernel_report.sh')
        if need nvcc; then try "$command" "$command"; else skip "$command" 'no nvcc'; fi ;;
    dev/kernel_report.sh | dev/loop_report.sh | dev/opencl_check.sh | dev/porting_check.sh | dev/test/mutants.sh)
        by_test_long "$command" ;;
    dev/gpu_check.sh*) try "$command" "DRY_RUN=1 $command" ;;
    'dev/results_table.sh REPORT dev/BENCHMARKS.md') try "$command" "bash -n ${command%% *}" ;;
    './train_nsa --dump-state') try "$command" './train_nsa help | grep -e --dump-state' ;;
    './train_nsa inspect --json FILE') try "$command" './train_nsa inspect --help | grep -e --json' ;;
    './train_nsa '*' --dump-state state.safetensors') try "$command" "$command" ;;
    'dev/reference.py compare') ;;  # the command below it names its file
    'python3 dev/reference.py compare '*)
        if has_torch; then try "$command" "${command/python3/${PYTHON:-python3}}"
        else skip "$command" 'no PyTorch'; fi ;;
    'dpkg -x') skip "$command" 'it unpacks what has to be downloaded' ;;
    *) unknown "$command" ;;
    esac
}
unknown() {
    echo "FAIL $1: dev/porting_check.sh does not know how to check it"
    failed=$((failed + 1))
}

# The lines of the document that are typed into gdb, as its options; and what the last of them has to show.
session() { sed -n "s/^(gdb) \(.*\)/-ex '\1'/p" dev/PORTING.md | tr '\n' ' '; }
session_is_good() {
    awk '/^Breakpoint 1[.,]/{ hit = 1 } / = /{ values++ } /optimized out|No locals/{ bad = 1 }
        END { exit !hit || values < 3 || bad }'
}
export -f session_is_good

# Code between backticks, which may go on in the next line, and the lines of the blocks, whose \ are taken out.
code() {
    awk '
        /^```/ { block = !block; next }
        block { line = line $0; if (sub(/\\$/, "", line)) next; sub(/ +# .*/, "", line); gsub(/ +/, " ", line)
                text = text " `" line "` "; line = ""; next }
        { text = text $0 " " }
        END { n = split(text, part, "`"); for (i = 2; i <= n; i += 2) print part[i] }' dev/PORTING.md
}
declare -A seen=()
while IFS= read -r line; do
    [ -z "${seen[$line]:-}" ] || continue
    seen[$line]=1
    case $line in
    ARCHS=* | make\ * | gdb\ * | mpirun\ * | python3\ * | dpkg\ * | ./* | build/*) check "$line" ;;
    dev/*.sh | dev/*.sh\ * | dev/*.py\ *) check "$line" ;;
    dev/*NAME* | dev/results/) ;;  # whatever it is called, and what a run makes
    dev/* | lib/*) try "$line" "[ -e $line ]" ;;
    esac
done < <(code)
[ $((passed + failed)) -gt 30 ] || { echo "few commands were found in dev/PORTING.md"; failed=$((failed + 1)); }
echo "$skipped skipped"
finish
