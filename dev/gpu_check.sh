#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: builds, tests on the device, trains, times every operation and
# attention, and writes one page to be pasted, dev/results/<gpu>-<date>.md: an answer for each part, a table of all
# figures, and the end of each part's output. All output is in the .log beside it. Each part runs alone, is stopped when
# its time is over, and replaces its section in today's page. What stands in a part's way (no GPU, another toolkit, too
# little memory) is a sentence there, and the other parts go on. The exit status is 1 if a part failed or was stopped.
#     dev/gpu_check.sh first      what to know of a GPU first, in at most 500 seconds: the parts marked with a star.
#                                 Called again, it goes on with those that did not pass
#     dev/gpu_check.sh prepare    on any machine with nvcc: writes programs.tar.gz, which holds the programs for sm_80,
#                                 sm_90 and later, the emulator's results and the CPU's losses. In the repository's root
#                                 on the GPU's machine it spares building there. NO_MPI=1 and NO_NCCL=1 leave out
#                                 libraries that are not there
#     dev/gpu_check.sh [PART]...  without arguments all of them, in this order:
#       build       train_nsa and build/test_device for this GPU; every part does that first, where it is needed
#     * tests       the tests that run on the device: operations, kernels, training steps (make test has the others)
#     * emulator    the attention kernels on this GPU against dev/emulator/ with the same inputs: selections bit by bit,
#                   numbers within their limits
#     * loss        the program without options, on the GPU: is its loss the CPU's?
#     * ranks       two ranks on one GPU against one; where there are two GPUs, also two over NCCL with --zero 0 and 1,
#                   bit for bit, and what the reductions cost
#     * products    125m at 16 x 2048: cuBLASLt's algorithm for each product and its share of peak, and the time of
#                   every operation
#     * shapes      tokens/s and MFU of 125m at 16 x 1024, 16 x 2048, 32 x 1024 and 4 x 8192
#     * gaps        every kernel of one step in Nsight Compute; their sum against the step's time shows the gaps between
#                   them (skipped without ncu). <gpu>-<date>-kernels.csv keeps what ncu wrote
#     * published   attention in the shape for which others have published times, theirs beside ours;
#                   with selections that are drawn and, stretched, with those of a trained model: what `prepare` brought
#                   along, else of the model that part loss has trained just before
#       sanitizer   compute-sanitizer: memcheck on small training steps, memcheck and racecheck on the attention kernels
#                   (skipped without it)
#       perf        every operation of a training step against the ceilings of this GPU, with full attention, and at
#                   1 x 32768
#       attention   attention alone, every branch and both sets of selected kernels, T from 2048 to 65536, 65536 tokens
#       train       125m for 50 steps; the time to its first step; the same 5 steps twice, bit for bit; one sequence per
#                   step
#       batches     tokens/s as the micro-batch grows
#       long        125m at T from 4096 to 65536, 65536 tokens a micro-step
#       torch       PyTorch's attention and a compiled dense model of the same size, side by side with ours (skipped
#                   without a PyTorch that sees the GPU)
# OUT=FOLDER puts the report elsewhere, PYTHON=python3 names the Python with PyTorch, COMMIT=... names the commit if the
# sources are not a git checkout, and TOTAL=590 stops everything after so many seconds.
# PRECISION=FP32 builds that engine, for GPUs below sm_80 and for diagnosis; what it does not have is skipped.
# With OUT the built programs are saved too, as OUT/programs.tar.gz, for the same sources, toolkit, processor and GPU.
# Programs that are already where make puts them are used as they are.
# Figures worth quoting are in the parts' output as lines "result: what | figure | unit | conditions";
# dev/results_table.sh makes the page's table from them, and that of dev/BENCHMARKS.md.
# DRY_RUN=1 prints the commands of the parts and runs none.
# shellcheck disable=SC2317  # the parts are called by a bash of their own
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

readonly FIRST="tests emulator loss ranks products shapes gaps published"
readonly PARTS="build $FIRST sanitizer perf attention train batches long torch"
readonly LIMIT=580  # seconds of one part
# Seconds that each part of the list has at least; together with no more than a start they are its 500.
declare -A SHARE=([tests]=150 [emulator]=20 [loss]=60 [ranks]=45 [products]=40 [shapes]=70 [gaps]=50 [published]=60)
die() { echo "gpu_check.sh: $1" >&2; exit 2; }
case "${1:-}" in -h | --help) sed -n '/^# One command/,/^# DRY_RUN/s/^# //p' "$0"; exit 0 ;; esac
first="" prepare=""
case $* in
    first)
        first=1
        TOTAL=${TOTAL:-500}
        # shellcheck disable=SC2086  # a list of words
        set -- $FIRST
        ;;
    prepare)
        prepare=1
        set -- build
        ;;
esac
for part in "$@"; do
    case " $PARTS " in
        *" $part "*) ;;
        *) die "unknown part '$part'; there are: first, prepare, $PARTS" ;;
    esac
done
# shellcheck disable=SC2086  # a list of words
[ $# -gt 0 ] || set -- $PARTS
dry=${DRY_RUN:-}
# A toolkit's installer may leave these off PATH; of several Nsight Computes take the newest.
PATH=$PATH:/usr/local/cuda/bin:$(printf '%s\n' /opt/nvidia/nsight-compute/* | sort -V | tail -n 1)
no_gpu=""
if [ -n "$dry" ]; then gpu="no GPU"
elif nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then  # not -q: it would leave while a second GPU is named
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
else
    gpu="no GPU"
    no_gpu="nvidia-smi shows no GPU on this machine: there is none, or its driver does not run"
fi
# Checkpoints are large: keep them in memory if there is room.
place=${TMPDIR:-/tmp}
if [ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)" -gt 16000000 ] 2>/dev/null; then place=/dev/shm; fi
work=$(mktemp -d -p "$place")
# Here alone: a child that is killed between fork and exec, as the watcher of a short part may be, runs this trap too.
# There bash takes a test for false, whatever it says, so it has to be the folder's removal that needs a true one.
trap 'if [ "$BASHPID" = $$ ]; then rm -rf "$work"; fi' EXIT
folder=${OUT:-dev/results}
[ -n "$dry" ] && folder=$work
mkdir -p "$folder"
report=$folder/$(echo "$gpu" | tr ' /' '__')-$(date +%Y-%m-%d).md
whole=${report%.md}.log
failed=0
# What the programs are made of, and what `part_build` made them from and for, each as a word.
# In the order of bytes, since in another locale the other machine would find the same files in another order.
SOURCES=$(LC_ALL=C bash -c 'cat Makefile ./*.cu ./*.cuh ./*.h lib/*/* dev/*/*.h dev/*/*.cuh dev/test/*/*' 2>/dev/null |
    sha256sum | cut -c 1-8)
FINGERPRINT=$({
    echo "$SOURCES $gpu"
    nvcc --version
    grep -m 1 'model name' /proc/cpuinfo
} 2>/dev/null | sha256sum | cut -c 1-16)
readonly CARRIED="$SOURCES, carried along"
export SOURCES FINGERPRINT
if [ -n "${COMMIT:-}" ]; then commit="commit $COMMIT"
elif commit=$(git rev-parse --short HEAD 2>/dev/null); then
    commit="commit $commit$(git diff --quiet HEAD || echo ' with changes')"
else commit="unknown commit"; fi
commit="$commit, sources $SOURCES"

# Some toolkits lack cuBLASLt, which PyTorch's wheels have. Puts its headers and library into build/cublas, without the
# CUDA runtime that lies beside them, and tells nvcc where they are.
find_cublas() {
    local place here=$PWD/build/cublas
    nvcc -x cu -o "$work/probe" - -lcublasLt 2>/dev/null <<<'#include <cublasLt.h>
int main() { return cublasLtGetVersion() == 0; }' && return
    place=$("${PYTHON:-python3}" -c '
import nvidia, os
places = [os.path.join(root, name) for root in nvidia.__path__ for name in ("cu13", "cublas")]
print(next(place for place in places if os.path.isfile(place + "/include/cublasLt.h")))' 2>/dev/null)
    if [ -z "$place" ]; then
        echo "cuBLASLt is not there to build with, neither in the toolkit nor beside PyTorch" \
            "(PYTHON=${PYTHON:-python3})"
        return
    fi
    rm -rf "$here"
    mkdir -p "$here/include" "$here/lib"
    ln -s "$place"/include/cublas*.h "$here/include"
    ln -s "$place"/lib/libcublasLt.so.* "$here/lib"
    ln -s "$(printf '%s\n' "$place"/lib/libcublasLt.so.* | head -n 1)" "$here/lib/libcublasLt.so"
    export NVCC_APPEND_FLAGS="-I$here/include -L$here/lib -Xlinker -rpath -Xlinker $here/lib ${NVCC_APPEND_FLAGS:-}"
    echo "the toolkit has no cuBLASLt to build with; PyTorch's is taken, from $place"
}
# Are both programs there, of these sources as far as we know, and do they start? Those that were carried along may lack
# a library here, or code for this GPU: then why_not says what they said.
why_not=""
ready() {
    local for_what=$FINGERPRINT said
    [ -x train_nsa ] && [ -x build/test_device ] || return
    [ ! -f build/built_for ] || for_what=$(cat build/built_for)
    [ "$for_what" = "$FINGERPRINT" ] || [ "$for_what" = "$CARRIED" ] || return
    if ! said=$(timeout -s KILL 20 build/test_device --list 2>&1 >/dev/null); then
        why_not=$(tail -n 1 <<<"$said")
        return 1
    fi
    [ "$for_what" = "$CARRIED" ] && [ -z "$tried" ] && [ -z "$no_gpu" ] || return 0
    tried=1
    why_not=$(timeout -s KILL 60 ./train_nsa check --device cuda 2>&1 | grep -m 1 -e 'not built for' -e 'bf16 needs')
    [ -z "$why_not" ]
}
tried=""

query() { nvidia-smi --query-gpu="$1" --format=csv,noheader -i 0; }
head_of_report() {
    local toolkit="no toolkit"
    command -v nvcc >/dev/null && toolkit=$(nvcc --version | sed -n 's/.*release \([^,]*\),.*/CUDA \1/p')
    echo "# $gpu, $(date +%Y-%m-%d)"
    echo
    if [ -n "$no_gpu" ]; then echo "driver: $no_gpu; $toolkit, $(uname -m), $(nproc) CPU cores"
    else
        echo "driver $(query driver_version), $toolkit, SM clock at most $(query clocks.max.sm)," \
            "power limit $(query power.limit), $(query memory.total), $(uname -m), $(nproc) CPU cores"
    fi
    echo
}
# The page: the head, an answer for each part, all figures, and the parts' sections, of FILE.
page() {
    head_of_report
    printf '| part | how it ended | answer |\n|---|---|---|\n'
    awk '
        /^## / { name = substr($0, 4); open = 1 }
        open && /^(passed|FAILED|stopped|not run)[^:]*: / {
            gsub(/[|]/, "/"); at = index($0, ": ")
            printf "| %s | %s | %s |\n", name, substr($0, 1, at - 1), substr($0, at + 2); open = 0
        }' "$1"
    printf '\n### Figures\n\n'
    { head_of_report; cat "$1"; } >"$work/joined"
    dev/results_table.sh "$work/joined" | sed 1,2d
    echo
    cat "$1"
}
# answer STATUS: what a part's output says in one line: its own line "answer: ", else the last one that tells of a
# failure, else the last.
answer() {
    local line
    line=$(sed -n 's/^answer: //p' "$work/log" | tail -n 1)
    [ -n "$line" ] || line=$(sed -n 's/^skipped: //p' "$work/log" | tail -n 1)
    [ -n "$line" ] || [ "$1" -eq 0 ] ||
        line=$(grep -E 'error|FAIL|DIFFERENT|BEYOND|no time|not ' "$work/log" | tail -n 1)
    [ -n "$line" ] || line=$(grep -v '^result: ' "$work/log" | tail -n 1)
    cut -c 1-240 <<<"${line:-no output}"
}
# What nvidia-smi saw while a part ran.
conditions() {
    sort -n "$1" | awk -F', *' '
        { clock[NR] = $1; if ($2 > t) t = $2; if ($3 > p) p = $3; if ($4 > m) m = $4 }
        END {
            if (NR) printf "median SM clock %d MHz, at most %d C, %d W and %d MiB, seen every 2 s",
                clock[int((NR + 1) / 2)], t, p, m
        }'
}

# section NAME COMMAND...: makes the report's section NAME from the command's output (all of it, or its first 10 lines,
# all results and the last 60 lines), status, seconds and clocks. Kills a command that takes too long, with everything
# that it started. Returns its status.
section() {
    local name=$1 begin=$SECONDS status watcher earlier how seconds=$LIMIT
    shift
    if [ -n "$dry" ]; then
        echo "$name: $*"
        return
    fi
    # What the parts after it have at least is kept for them.
    [ -z "${TOTAL:-}" ] || seconds=$((TOTAL - SECONDS - 5 - later))
    [ -z "${TOTAL:-}" ] || [ "$seconds" -ge "${SHARE[$part]:-$LIMIT}" ] || seconds=${SHARE[$part]:-$LIMIT}
    [ -z "${TOTAL:-}" ] || [ $((TOTAL - SECONDS - 5)) -ge "$seconds" ] || seconds=$((TOTAL - SECONDS - 5))
    [ "$seconds" -le "$LIMIT" ] || seconds=$LIMIT
    echo "== $name: $*" | tee -a "$whole"
    : >"$work/clocks"
    if [ "$seconds" -lt 5 ]; then
        echo "no time is left for it: call dev/gpu_check.sh $again again" | tee "$work/log" >>"$whole"
        status=124
    else
        nvidia-smi --query-gpu=clocks.sm,temperature.gpu,power.draw,memory.used --format=csv,noheader,nounits \
            -i 0 -l 2 >"$work/clocks" 2>/dev/null &
        watcher=$!
        # Output goes straight into the file, so that we wait for the command alone; the shell's own message that it was
        # killed goes nowhere.
        earlier=$(stat -c %s "$whole")
        {
            SECTION_END=$((EPOCHSECONDS + seconds)) timeout -s KILL "$seconds" "$@" </dev/null >>"$whole" 2>&1
        } 2>/dev/null
        status=$?
        tail -c "+$((earlier + 1))" "$whole" >"$work/log"
        kill "$watcher" 2>/dev/null
        wait "$watcher" 2>/dev/null
    fi
    [ "$status" -eq 0 ] || failed=1
    how="FAILED after $((SECONDS - begin)) s"
    case $status in
        0)  # a part that was skipped has no answer; tests have, and lines "skipped: " of single ones
            how="passed after $((SECONDS - begin)) s"
            if grep -q '^skipped: ' "$work/log" && ! grep -q '^answer: ' "$work/log"; then how="not run"; fi
            ;;
        137) how="stopped after $seconds s" ;;
        3 | 124) how="not run" ;;
    esac
    {
        echo "## $name"
        echo
        echo "$how: $(answer "$status")"
        echo
        echo "\`$*\`: exit status $status after $((SECONDS - begin)) s; $commit; $(conditions "$work/clocks")"
        echo
        echo '<details><summary>output</summary>'
        echo
        echo '```'
        if [ "$(wc -l <"$work/log")" -le 100 ]; then cat "$work/log"
        else
            head -n 10 "$work/log"
            echo "..."
            head -n -60 "$work/log" | tail -n +11 | grep '^result: '
            tail -n 60 "$work/log"
        fi
        echo '```'
        echo '</details>'
        echo
    } >"$work/text"
    : >"$work/kept"
    [ ! -f "$report" ] ||  # without an earlier section of this name
        awk -v head="## $name" '/^## /{ inside = 1; skip = ($0 == head) } inside && !skip' "$report" >"$work/kept"
    cat "$work/text" >>"$work/kept"
    if ! { page "$work/kept" >"$work/page" && mv "$work/page" "$report"; }; then
        echo "the section $name could not be written to $report; its output is in $whole"
        failed=1
    fi
    echo "$how: $(answer "$status")"
    return "$status"
}
# Has the part passed in today's page, from these sources?
has_passed() {
    [ -f "$report" ] && awk -v head="## $1" -v sources="sources $SOURCES;" '
        /^## / { mine = ($0 == head) }
        mine && /: exit status 0 after/ && index($0, sources) { found = 1 }
        END { exit !found }' "$report"
}

# shard FILE TOKENS: writes random token ids in llm.c's format, because the built-in corpus has the ids of bytes only.
# The ids are all pairs of bytes below 196: 38416 of GPT-2's 50257.
shard() {
    local number
    {
        for number in 20240520 1 "$2" 50257; do
            # shellcheck disable=SC2059  # the format consists of the four bytes
            printf "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' \
                $((number & 255)) $((number >> 8 & 255)) $((number >> 16 & 255)) $((number >> 24)))"
        done
        head -c 1008 /dev/zero
        LC_ALL=C tr -d '\304-\377' </dev/urandom | head -c $((2 * $2))
    } >"$1"
}

# ---- What the parts run. Each is a function that runs in a bash of its own, so that it can be stopped as a whole:
# `section` kills its process group. Everything that is not bound to end earlier must therefore stay in that group
# (timeout --foreground).

# within SECONDS COMMAND...: runs a single process for at most so many seconds, or until the part (or PART_END) ends.
within() {
    local seconds=$1 left=$((${PART_END:-$SECTION_END} - 2 - EPOCHSECONDS)) status
    [ "$left" -ge "$seconds" ] || seconds=$left
    shift
    [ "$seconds" -ge 1 ] || { echo "no time is left for $*"; return 124; }
    timeout --foreground -s KILL "$seconds" "$@"
    status=$?
    [ "$status" -ne 137 ] || echo "stopped after $seconds s: $*"
    return "$status"
}
# limited SECONDS COMMAND...: the same for a tool that starts our program: both get a process group of their own, which
# is gone before the part ends.
limited() {
    local seconds=$1 left=$((SECTION_END - EPOCHSECONDS - 8)) status
    [ "$left" -ge "$seconds" ] || seconds=$left
    shift
    [ "$seconds" -ge 5 ] || { echo "no time is left for it"; return 124; }
    OMP_WAIT_POLICY=passive timeout -k 5 "$seconds" "$@"
    status=$?
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || echo "stopped after $seconds s"
    return "$status"
}

# run NAME OPTIONS...: trains on random token ids into a fresh folder and keeps its logs.
run() {
    local name=$1 begin=$EPOCHREALTIME job status
    shift
    echo "-- $name: $*"
    {
        ./train_nsa --model 125m --device cuda --data "$WORK/train.bin" --val-data "$WORK/val.bin" --eval-every 0 \
            --eval-batches 1 --sample-tokens 0 --save-every 0 --log-every 1 --stall-timeout 45 --out "$WORK/$name" \
            "$@" 2>&1
        echo $? >"$WORK/$name.status"
    } | tee "$WORK/$name.out" &
    job=$!
    : >"$WORK/$name.first"
    while kill -0 "$job" 2>/dev/null; do
        if grep -q '^step 0001 ' "$WORK/$name.out" 2>/dev/null; then
            awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }' >"$WORK/$name.first"
            break
        fi
        sleep 0.05
    done
    wait "$job"
    status=$(cat "$WORK/$name.status")
    rm -rf "$WORK/$name"/step_*
    [ "$status" -eq 0 ] || { echo "training ended with status $status"; return 1; }
}
# fitting BATCH COMMAND...: the command with --batch BATCH or, where the GPU's memory is too small for that, half of it,
# and so on.
fitting() {
    local batch=$1 status
    shift
    while :; do
        echo "$batch" >"$WORK/fitted"
        "$@" --batch "$batch" 2>&1 | tee "$WORK/fitting"
        status=${PIPESTATUS[0]}
        [ "$status" -ne 0 ] && [ "$batch" -gt 1 ] || return "$status"
        grep -qE 'out of GPU memory|MiB are available' "$WORK/fitting" || return "$status"
        echo "--batch $batch is too much for this GPU's memory, so half of it:"
        batch=$((batch / 2))
    done
}
# train NAME OPTIONS...: the same, and a result: the median of tokens/s without the first 5 steps, MFU, the GPU's
# memory, and the seconds from the start to the end of the first step, including a validation on one batch before it.
train() {
    local name=$1 rate mfu memory
    run "$@" || return 1
    shift
    rate=$(sed -n 's/^step 0*\([0-9]*\) .* toks\/s \([0-9]*\) .*/\1 \2/p' "$WORK/$name.out" |
        awk '$1 > 5 { print $2 }' | sort -n | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)] }')
    [ -n "$rate" ] || { echo "no step after the 5th"; return 1; }
    mfu=$(sed -n 's/.*\(, MFU [0-9.]* % of [0-9.]* TFLOP.s\).*/\1/p' "$WORK/$name.out")
    memory=$(sed -n 's/.*peak memory \([0-9]* MiB\) on the GPU.*/, \1 of GPU memory/p' "$WORK/$name.out")
    echo "result: $name | $rate | tokens/s | median of the steps after the 5th$mfu$memory," \
        "first step after $(cat "$WORK/$name.first") s; random token ids, $*" | tee -a "$WORK/trained"
}
# What `train` has measured since that file was emptied: " NAME: TOKENS/S, MFU N %;" of each.
rates() {
    local said
    said=$(sed -nE 's/^result: ([^|]*) \| ([0-9]*) [^,]*(, MFU [0-9.]* %)?.*/ \1: \2\3;/p' "$WORK/trained" | tr -d '\n')
    echo "${said:- none}"
}
# One make for both programs, so that it probes the machine once. If nvcc cannot cope with what the host compiler knows
# about this processor, build for a plainer one.
part_build() {
    [ -z "${WHY_NOT:-}" ] || echo "the programs that were carried along do not run here: $WHY_NOT"
    if ! command -v nvcc >/dev/null; then
        echo "nvcc is not on PATH: install the CUDA Toolkit, add its bin folder to PATH, or bring programs.tar.gz," \
            "which dev/gpu_check.sh prepare writes on another machine"
        return 1
    fi
    [ -z "${NVCC_APPEND_FLAGS:-}" ] || echo "NVCC_APPEND_FLAGS=$NVCC_APPEND_FLAGS"
    make -j2 train_nsa build/test_device || {
        echo "-- again, for a plainer processor"
        make -j2 MARCH=x86-64-v3 train_nsa build/test_device
    } || return 1
    mkdir -p build && echo "$FINGERPRINT" >build/built_for
}
# pack FILE TRAIN_NSA TEST_DEVICE: the two programs, stripped, and what else is in the folder to be packed.
pack() {
    strip -o "$WORK/pack/train_nsa" "$2" 2>/dev/null || cp "$2" "$WORK/pack"
    strip -o "$WORK/pack/build/test_device" "$3" 2>/dev/null || cp "$3" "$WORK/pack/build"
    tar -C "$WORK/pack" -czf "$1" train_nsa build || echo "the programs could not be written to $1"
}
# chosen_by PROGRAM RUN FILE: which blocks the trained model of RUN chooses in a text of its own kind: what it writes
# itself, several times, since a text may end early.
chosen_by() {
    local seed
    for seed in 1 2 3 4; do "$1" sample --device cpu --from "$2" --tokens 255 --seed "$seed" || return; done \
        >"$WORK/sample.txt"
    "$1" inspect --device cpu --from "$2" --text "$WORK/sample.txt" --json "$3" 2>&1
}
# For other machines: any x86-64 processor since 2013 where this is one, and GPUs from sm_80 on.
part_prepare() {
    local march="" here=build/carried pack=$WORK/pack/build
    [ "$(uname -m)" != x86_64 ] || march=x86-64-v3
    make BUILD=$here MARCH=$march $here/train_nsa $here/test_device $here/cuda_tests || return 1
    mkdir -p "$pack"
    $here/cuda_tests --write-results "$pack/emulator.safetensors" || return 1
    $here/train_nsa --device cpu --out "$WORK/first_cpu" || return 1
    cp "$WORK/first_cpu/main.log" "$pack/first_cpu.log"
    chosen_by "$here/train_nsa" "$WORK/first_cpu" "$pack/selections.json" || return 1
    echo "$CARRIED" | tee "$pack/built_for" >"$pack/carried_for"
    pack programs.tar.gz $here/train_nsa $here/test_device
    echo "programs.tar.gz, $(du -h programs.tar.gz | cut -f 1): to go into the repository's root on the GPU's machine"
}
# The attention kernels of this build, by the table in lib/cuda/attention_kernels.h; with PRECISION=FP32: plain alone.
attention_kernels() { ./train_nsa --version 2>/dev/null | sed -n 's/^attention kernels: //p'; }
plain_only() { [ "$(attention_kernels)" = plain ]; }
# Each group runs in a process of its own, for at most 90 seconds. A fault spoils the GPU for the rest of its process,
# and a test that hangs keeps the others from running, so tests that did not pass run again alone, for 15 seconds each.
# All of it has 240 seconds, so that a broken kernel leaves time for the parts after this one.
part_tests() {
    local PART_END=$((EPOCHSECONDS + 240)) group name again="" status=0 passed=0
    [ "$PART_END" -lt "$SECTION_END" ] || PART_END=$SECTION_END
    within 30 ./build/test_device --list >"$WORK/names" || status=1
    for group in cuda_ attention_kernels_ ladder_; do
        if ! grep -q "^$group" "$WORK/names"; then
            if [ "$group" = attention_kernels_ ] && plain_only; then
                echo "skipped: tests $group*, as the attention kernels of this build are: $(attention_kernels)"
                continue
            fi
            if grep -qE '^(cuda|attention_kernels|ladder)_' "$WORK/names"; then
                echo "build/test_device has no tests $group*: was it built from other sources? make build/test_device"
            else echo "there are no tests $group*: build/test_device sees no GPU (nvidia-smi does)"; fi
            status=1
            continue
        fi
        within 90 ./build/test_device --only "$group" 2>&1 | tee "$WORK/tests"
        [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
        again+=" $(awk -v group="$group" '
            FILENAME == ARGV[1] { if ($1 == "ok") ok[$2] = 1; next }
            index($1, group) == 1 && !ok[$1] { print $1 }' "$WORK/tests" "$WORK/names")"
        passed=$((passed + $(grep -c '^ok ' "$WORK/tests")))
    done
    again=$(xargs <<<"$again")
    echo "answer: $passed tests passed on the device, $(wc -w <<<"$again") did not${again:+: $again}"
    for name in $again; do
        status=1
        [ $((PART_END - EPOCHSECONDS)) -gt 3 ] || { echo "no time is left for $name and those after it"; break; }
        echo "-- $name alone"
        within 15 ./build/test_device --only "$name"
    done
    return "$status"
}
# sanitize 'TOOL [OPTION]...' COMMAND...: starts one that may take 300 seconds, and remembers it in `jobs`
sanitize() {
    local tool=$1
    shift
    {
        echo "-- $tool: $*"
        # shellcheck disable=SC2086  # a tool with its own options
        limited 300 compute-sanitizer --tool $tool --print-limit 5 --error-exitcode 1 "$@"
    } >"$WORK/sanitizer_${#jobs[@]}" 2>&1 &
    jobs+=($!)
}
# All at once: they wait for the processor, not for the GPU.
part_sanitizer() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "skipped: there is no compute-sanitizer on PATH"
        return 0
    fi
    local status=0 more number failed=0 tests="attention_kernels_heads"
    local -a jobs=()
    local small="--device cuda --layers 1 --dim 384 --head-dim 64 --heads 6 --kv-groups 1
        --seq-len 520 --batch 1 --total-batch 520 --steps 1 --eval-batches 1 --sample-tokens 2 --stall-timeout 0"
    local nsa="--cmp-block 32 --cmp-stride 16 --slc-block 64 --slc-count 3 --window 100"
    for more in "$nsa" "$nsa --recompute 2" "--attention full"; do
        # shellcheck disable=SC2086  # lists of words
        sanitize "memcheck --report-api-errors no" ./train_nsa $small $more --out "$WORK/sanitized_${#jobs[@]}"
    done
    # racecheck misjudges cuBLASLt's kernels, so it runs on the attention kernels only. In these tests every array is an
    # allocation of its own, so memcheck sees the end of each.
    plain_only && tests="cuda_attention_full ladder_rungs_agree"
    for more in $tests; do
        sanitize memcheck ./build/test_device --only "$more"
        sanitize racecheck ./build/test_device --only "$more"
    done
    for number in "${!jobs[@]}"; do
        wait "${jobs[$number]}" || { status=1; failed=$((failed + 1)); }
        cat "$WORK/sanitizer_$number"
    done
    echo "answer: of ${#jobs[@]} runs under compute-sanitizer $failed failed or were stopped"
    return "$status"
}
# perf OPTIONS...: every operation of a step, two minutes at most
perf() { within 120 ./build/test_device --perf --model 125m --device cuda "$@"; }
part_products() {
    within 60 ./train_nsa check --device cuda || return 1
    fitting 16 perf | tee "$WORK/perf"
    [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
    cp "$WORK/fitted" "$WORK/perf_batch"
    sed -n 's/^result: perf, \(.*\): step | \([0-9]*\) | \(.*\) | \([0-9.]* us\).*/answer: \1: \2 \3, \4 a step/p' \
        "$WORK/perf"
}
part_perf() {
    local status=0
    perf --attention full || status=1
    perf --batch 1 --seq-len 32768 --recompute 1 || status=1
    return "$status"
}
# --perf marks one step for the profiler. We want the kernels' own times, with clocks and caches left alone.
part_gaps() {
    local step batch
    if ! command -v ncu >/dev/null; then
        echo "skipped: there is no ncu on PATH; part products has the times of operations"
        return 0
    fi
    if [ ! -s "$WORK/perf_batch" ]; then
        fitting 16 perf >"$WORK/perf" 2>&1 || { cat "$WORK/perf"; return 1; }
        cp "$WORK/fitted" "$WORK/perf_batch"
    fi
    batch=$(cat "$WORK/perf_batch")
    limited 240 ncu --profile-from-start off --clock-control none --cache-control none \
        --metrics gpu__time_duration.sum --print-units base --csv --log-file "$WORK/kernels.csv" \
        ./build/test_device --perf --model 125m --device cuda --batch "$batch" >"$WORK/profiled" 2>&1 ||
        { tail -n 20 "$WORK/profiled" "$WORK/kernels.csv"; return 1; }
    cp "$WORK/kernels.csv" "$KERNELS"
    step=$(sed -n 's/^a step without clocks: .* GPU was done after \([0-9.]*\) us.*/\1/p' "$WORK/perf")
    # The last column is the value, "1,234" or 1234, in nanoseconds, whether ncu calls them ns or nsecond.
    awk -F'","' -v step="$step" -v batch="$batch" '
        /"Kernel Name"/ { for (i = 1; i <= NF; i++) if ($i ~ /Kernel Name/) column = i }
        /gpu__time_duration.sum/ {
            x = $NF; gsub(/[",]/, "", x); sum += x; n++
            name = $column; sub(/^void /, "", name); sub(/^kernels::/, "", name)
            if (name ~ />\(/) sub(/>\(.*/, ">", name); else sub(/\(.*/, "", name)
            gsub(/\(Branch\)|\(int\)|\(bool\)/, "", name)
            us[name] += x / 1e3; launches[name]++
        }
        END {
            if (!n || !step) { print "no kernels in the profile, or no step time"; exit 1 }
            largest_first = "sort -t \"|\" -k 2 -rn"
            for (name in us)
                printf "result: kernel %s | %.1f | us | %d launches of a step, %.1f %% of its kernels\n", name,
                    us[name], launches[name], 1e5 * us[name] / sum | largest_first
            close(largest_first)
            printf "result: kernels of a step, %d x 2048 | %.0f | us | %d launches, by ncu; ", batch, sum / 1e3, n
            printf "the step without it %.0f us, so ", step
            printf "%.1f %% of it lie between kernels, memset and memcpy (which ncu does not list) included\n",
                100 * (1 - sum / 1e3 / step)
            printf "answer: %d kernels take %.0f of a step'"'"'s %.0f us\n", n, sum / 1e3, step
        }' "$WORK/kernels.csv"
}
no_tensor_cores() { plain_only && echo "skipped: the attention kernels of this build are: $(attention_kernels)"; }
part_emulator() {
    local file=build/emulator.safetensors
    no_tensor_cores && return
    if [ "$(cat build/carried_for 2>/dev/null)" != "$CARRIED" ]; then
        if [ -n "$FIRST_ONLY" ]; then
            echo "skipped: no results of the emulator were carried along (dev/gpu_check.sh prepare makes them);" \
                "dev/gpu_check.sh emulator compiles the emulator here"
            return 0
        fi
        file=$WORK/emulator.safetensors
        make build/cuda_tests && within 120 ./build/cuda_tests --write-results "$file" || return 1
    fi
    within 120 ./build/test_device --compare-results "$file"
}
# losses FILE: "STEP LOSS" for every training step of a main.log.
losses() { sed -n 's/^s:\([0-9]*\) trl:\([^ ]*\).*/\1 \2/p' "$1"; }
# near A B STEPS PERCENT: whether the losses of two logs, up to this step, differ by at most so much; prints the most.
near() {
    losses "$1" >"$WORK/a" && losses "$2" >"$WORK/b"
    awk -v steps="$3" -v limit="$4" '
        FILENAME == ARGV[1] { loss[$1] = $2; next }
        $1 in loss && $1 <= steps {
            n++; d = 100 * (loss[$1] / $2 - 1); if (d < 0) d = -d
            if (!(d <= worst)) worst = d
        }
        END {
            printf "%d steps, losses at most %.3g %% apart (limit %s %%)\n", n, worst, limit
            exit !(n > 0 && worst <= limit)
        }' "$WORK/a" "$WORK/b"
}
# The program without options. Rounding drives the two runs apart in time, so their first 20 steps have to agree, and
# at the end the GPU has to have found the names: ten seeds on a CPU ended between 0.53 and 0.94, guessing is 3.26.
part_loss() {
    local cpu=build/first_cpu.log whose="carried along" recall final said status=0
    within 200 ./train_nsa --device cuda --out "$WORK/first_gpu" 2>&1 | tee "$WORK/first_gpu.out"
    [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
    if [ "$(cat build/carried_for 2>/dev/null)" != "$CARRIED" ]; then
        echo "-- the same on the CPU, for as long as there is time; all of its output is left out"
        within 60 ./train_nsa --device cpu --out "$WORK/first_cpu" >/dev/null 2>&1
        cpu=$WORK/first_cpu/main.log whose="of this machine"
    fi
    recall=$(sed -n 's/^recall: \([0-9.]*\) .*/\1/p' "$WORK/first_gpu.out")
    final=$(sed -n 's/.*val loss \([0-9.]*\) .*/\1/p' "$WORK/first_gpu.out" | tail -n 1)
    said=$(near "$WORK/first_gpu/main.log" "$cpu" 20 1) || status=1
    echo "result: the first command | ${final:-0} | validation loss | recall ${recall:-none}; the CPU's log" \
        "($whose): $said, $(sed -n 's/.* tel:/validation /p' "$cpu" | tail -n 1) at its end"
    awk -v recall="${recall:-9}" 'BEGIN { exit !(recall < 1) }' || status=1
    echo "answer: recall ${recall:-none}, to be below 1; beside the CPU's: $said"
    return "$status"
}
part_shapes() {
    local shape status=0 said
    : >"$WORK/trained"
    for shape in "16 1024" "16 2048" "32 1024" "4 8192"; do
        # shellcheck disable=SC2086  # two words
        set -- $shape
        fitting "$1" train "NSA, $1 x $2" --seq-len "$2" --total-batch $(($1 * $2)) --steps 25 || status=1
    done
    said=$(rates)
    echo "answer: tokens/s of${said//NSA, /}"
    return "$status"
}
# The option that gives the benchmark of attention a trained model's selections, where there are any.
selections() {
    local file=$WORK/selections.json
    if [ "$(cat build/carried_for 2>/dev/null)" = "$CARRIED" ] && [ -s build/selections.json ]; then
        file=build/selections.json
    elif [ ! -s "$file" ] && [ -d "$WORK/first_gpu" ]; then
        within 30 bash -c 'chosen_by "$@"' chosen_by ./train_nsa "$WORK/first_gpu" "$file" >&2
    fi
    [ ! -s "$file" ] || echo "--selections=$file"
}
part_attention() {
    no_tensor_cores && return
    # shellcheck disable=SC2046  # one word, or none
    ./build/test_device --perf-attention --batch 1 --seq-len 65536 $(selections)
}
part_published() {
    no_tensor_cores && return
    # shellcheck disable=SC2046
    set -- $(selections)
    [ $# -gt 0 ] || echo "drawn selections alone: no trained model is at hand; call parts loss and published together"
    ./build/test_device --perf-attention --shape published "$@"
}
# same_digits WHAT RUN RUN: did both runs log the same losses and norms?
same_digits() {
    if cmp "$WORK/$2/main.log" "$WORK/$3/main.log"; then echo "$1: the same losses and norms, digit for digit"
    else echo "$1: DIFFERENT"; return 1; fi
}
part_train() {
    local one="NSA, T=2048, one sequence a step" full="full attention, T=2048" status=0
    train "NSA, T=2048" --batch 16 --total-batch 65536 --steps 50 || status=1
    train "$full" --batch 16 --total-batch 65536 --steps 50 --attention full || status=1
    run "first" --batch 16 --total-batch 32768 --steps 5 || status=1
    run "second" --batch 16 --total-batch 32768 --steps 5 || status=1
    same_digits "the same 5 steps twice" first second || status=1
    train "$one" --batch 1 --total-batch 2048 --steps 50 || status=1
    return "$status"
}
part_batches() {
    local batch status=0
    for batch in 1 2 4 8 16 32; do
        train "NSA, T=2048, micro-batch $batch" --batch "$batch" --total-batch 65536 --steps 15 || status=1
    done
    return "$status"
}
# Every length has the same number of tokens in a micro-step, so only attention differs.
part_long() {
    local T level status=0
    : >"$WORK/trained"
    for T in 4096 8192 16384; do
        train "NSA, T=$T" --batch $((65536 / T)) --seq-len "$T" --total-batch 65536 --steps 12 || status=1
        train "full attention, T=$T" --batch $((65536 / T)) --seq-len "$T" --total-batch 65536 --steps 12 \
            --attention full || status=1
    done
    for level in 1 2; do
        train "NSA, T=65536, --recompute $level" --batch 1 --seq-len 65536 --total-batch 65536 --recompute "$level" \
            --steps 10 || status=1
    done
    echo "answer: tokens/s of$(rates)"
    return "$status"
}
has_mpi() { command -v mpirun >/dev/null && ./train_nsa --version 2>/dev/null | grep '^MPI: ' >/dev/null; }
# two NAME OPTIONS...: two ranks, by mpirun or, without it, by the variables that launchers set; small steps.
two() {
    local out=$WORK/$1 rank status=0
    shift
    if has_mpi; then
        limited 100 mpirun -np 2 ./train_nsa --device cuda "$@" --out "$out"
        return
    fi
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 \
            within 100 ./train_nsa --device cuda "$@" --out "$out" &
    done
    wait -n || status=1
    wait -n || status=1
    return "$status"
}
# Sums are added in another order than on one rank, so losses agree to rounding.
part_ranks() {
    local job="--steps 20 --eval-batches 1 --sample-tokens 0 --save-every 0 --bucket-mb 0.5" zero gpus status=0 said=""
    gpus=$(nvidia-smi -L | grep -c GPU)
    if ! has_mpi && [ "$gpus" -lt 2 ]; then
        echo "skipped: two ranks share a GPU by MPI alone, and there is no mpirun, or this build has no MPI"
        return 0
    fi
    # shellcheck disable=SC2086  # a list of words
    within 60 ./train_nsa --device cuda $job --out "$WORK/one" || return 1
    # shellcheck disable=SC2086
    if ! has_mpi; then said="two ranks on one GPU: not run without MPI"
    elif CUDA_VISIBLE_DEVICES=0 two shared $job; then
        said="two ranks on one GPU: $(near "$WORK/one/main.log" "$WORK/shared/main.log" 20 1)" || status=1
    else
        said="two ranks on one GPU: error, see above" status=1
    fi
    echo "$said"
    if [ "$gpus" -lt 2 ]; then
        echo "answer: $said; one GPU, so NCCL was not tried"
        return "$status"
    fi
    job+=" --save-every 20"
    for zero in 0 1; do
        # shellcheck disable=SC2086
        two "two$zero" $job --zero $zero || status=1
    done
    said+="; two GPUs: $(near "$WORK/one/main.log" "$WORK/two0/main.log" 20 1)" || status=1
    if cmp "$WORK/two0/step_00000020/model.safetensors" "$WORK/two1/step_00000020/model.safetensors"
    then said+="; --zero 0 and 1: the same bits"
    else said+="; --zero 0 and 1: DIFFERENT"; status=1; fi
    echo "$said"
    for zero in 0 1; do
        two "pair$zero" --model 125m --data "$WORK/train.bin" --val-data "$WORK/val.bin" --eval-every 0 \
            --eval-batches 1 --sample-tokens 0 --save-every 0 --batch 16 --total-batch 131072 --steps 25 \
            --zero "$zero" || status=1
    done
    echo "answer: $said"
    return "$status"
}
part_torch() {
    if ! "${PYTHON:-python3}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        echo "skipped: ${PYTHON:-python3} has no PyTorch that sees a GPU"
        return 0
    fi
    # All in one part, one after the other, so that clocks and temperature are the same. PyTorch's MFU uses our peak.
    local T ours batch peak status=0
    : >"$WORK/trained"
    for T in 2048 8192 16384 32768; do
        ours="NSA, T=$T, beside PyTorch" batch=$((32768 / T))
        train "$ours" --batch "$batch" --seq-len "$T" --total-batch 32768 --steps 25 || status=1
        train "full attention, T=$T, beside PyTorch" --batch "$batch" --seq-len "$T" --total-batch 32768 --steps 25 \
            --attention full || status=1
        peak=$(sed -n 's/.*MFU [0-9.]* % of \([0-9.]*\) TFLOP.*/\1/p' "$WORK/$ours.out")
        "${PYTHON:-python3}" -u dev/bench/torch_step.py --batch "$batch" --seq-len "$T" \
            --peak-tflops "${peak:-0}" --limit 110 | tee "$WORK/dense"
        [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
        grep '^result: ' "$WORK/dense" >>"$WORK/trained"
    done
    echo "answer: tokens/s of$(rates)"
    plain_only || within 150 ./build/test_device --perf-attention --batch 1 --seq-len 65536 || status=1
    "${PYTHON:-python3}" -u dev/bench/torch_attention.py --tokens 65536 || status=1
    return "$status"
}
export WORK=$work CARRIED FIRST_ONLY=$first KERNELS=${report%.md}-kernels.csv
# Open MPI refuses root, which rented machines often are.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export -f within limited run train rates fitting same_digits sanitize perf attention_kernels plain_only no_tensor_cores
export -f losses near has_mpi two pack part_prepare chosen_by selections
for part in $PARTS; do export -f "part_$part"; done

build() {
    export WHY_NOT=$why_not
    section build bash -c part_build || return 1
    [ -z "$dry" ] && [ -n "${OUT:-}" ] || return 0
    mkdir -p "$work/pack/build"
    cp build/built_for "$work/pack/build"
    pack "$folder/programs.tar.gz" train_nsa build/test_device
}
if [ -n "$prepare" ]; then
    [ -z "$dry" ] || { echo "prepare: bash -c part_prepare"; exit 0; }
    command -v nvcc >/dev/null || die "prepare needs nvcc, which is not on PATH"
    find_cublas
    part_prepare
    exit
fi
built=""
if [ -z "$dry" ]; then
    ! command -v nvcc >/dev/null || find_cublas
    shard "$work/train.bin" 4194304
    shard "$work/val.bin" 1048576
    if [ -f programs.tar.gz ] && ! ready; then tar -xzf programs.tar.gz; fi
fi
# left PART...: seconds that these have at least.
left() {
    local sum=0 name
    for name; do sum=$((sum + ${SHARE[$name]:-0})); done
    echo "$sum"
}
while [ $# -gt 0 ]; do
    part=$1
    shift
    later=0
    again=${first:+first}
    again=${again:-$part}
    [ -z "$first" ] || later=$(left "$@")
    if [ -n "$first" ] && [ -z "$dry" ] && has_passed "$part"; then
        echo "== $part: has passed, see $report"
        continue
    fi
    # What stands in the way of every part is said in the section of each.
    obstacle=$no_gpu
    if [ "$part" = build ] || { [ -z "$dry$built$obstacle" ] && ! ready; }; then
        built=good
        build || built=bad
    fi
    [ "$built" != bad ] || obstacle=${obstacle:-"there are no programs to run, since the build failed"}
    [ "$part" != build ] || continue
    if [ -n "$obstacle" ]; then section "$part" bash -c "echo '$obstacle'; exit 3"
    else section "$part" bash -c "part_$part"; fi
done
[ -n "$dry" ] || echo "report: $report, all output: $whole"
exit $failed
