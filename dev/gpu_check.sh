#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: builds, tests on the device, runs compute-sanitizer, times every
# operation, trains, compares with PyTorch if it is installed, and writes one report, dev/results/<gpu>-<date>.md.
# Every part runs alone, is stopped after ten minutes, and replaces its section in today's report. All output, up to the
# moment when a part ended or was stopped, is in <gpu>-<date>.log beside the report. A part first builds what it needs.
#     dev/gpu_check.sh [PART]...        without arguments all of them, in this order:
#       build       train_nsa and build/test_device for this GPU
#       tests       the tests that run on the device: operations, kernels, training steps (make test has the others)
#       emulator    the attention kernels on this GPU against dev/emulator/ with the same inputs: selections bit by bit,
#                   numbers within their limits
#       sanitizer   compute-sanitizer: memcheck on small training steps, memcheck and racecheck on the attention kernels
#                   (skipped without it)
#       perf        every operation of a training step against the ceilings of this GPU, at 16 x 2048, with full
#                   attention, and at 1 x 32768
#       gaps        the kernels of one step in Nsight Compute; their sum against the step's time shows the gaps between
#                   them (skipped without ncu)
#       attention   attention alone, every branch and both sets of selected kernels, T from 2048 to 65536, 65536 tokens
#       published   attention in the shape for which others have published times, theirs and the predicted beside ours
#       train       125m for 50 steps; the time to its first step; the same 5 steps twice, bit for bit; one sequence per
#                   step
#       batches     tokens/s as the micro-batch grows
#       long        125m at T from 4096 to 65536, 65536 tokens a micro-step
#       ranks       two GPUs over NCCL with --zero 0 and 1, bit for bit, and what the reductions cost
#                   (skipped if there is one GPU)
#       torch       PyTorch's attention and a compiled dense model of the same size, side by side with ours (skipped
#                   without a PyTorch that sees the GPU)
# OUT=FOLDER puts the report elsewhere, PYTHON=python3 names the Python with PyTorch, COMMIT=... names the commit if the
# sources are not a git checkout, and TOTAL=590 stops everything after so many seconds. If time is short, run
# `build tests perf attention`, `train batches long` and `torch gaps sanitizer`. The exit status is 1 if any part failed
# or was stopped; the report says which.
# PRECISION=FP32 builds that engine, for GPUs below sm_80 and for diagnosis; what it does not have is skipped.
# With OUT the built programs are saved too, as OUT/programs.tar.gz. If that file is in the repository's root, and is of
# these sources, this toolkit, processor and GPU, it is unpacked instead of building. Programs that are already where
# make puts them are used as they are.
# Figures worth quoting are in the report as lines "result: what | figure | unit | conditions"; dev/results_table.sh
# makes the README's table from them.
# DRY_RUN=1 prints the commands of the parts and runs none.
# shellcheck disable=SC2317  # the parts are called by a bash of their own
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

readonly PARTS="build tests emulator sanitizer perf gaps attention published train batches long ranks torch"
readonly LIMIT=580  # seconds of one part
die() { echo "gpu_check.sh: $1" >&2; exit 2; }
case "${1:-}" in -h | --help) sed -n '/^# One command/,/^# DRY_RUN/s/^# //p' "$0"; exit 0 ;; esac
for part in "$@"; do
    case " $PARTS " in *" $part "*) ;; *) die "unknown part '$part'; there are: $PARTS" ;; esac
done
# shellcheck disable=SC2086  # a list of words
[ $# -gt 0 ] || set -- $PARTS
dry=${DRY_RUN:-}
# A toolkit's installer may leave these off PATH; of several Nsight Computes take the newest.
PATH=$PATH:/usr/local/cuda/bin:$(printf '%s\n' /opt/nvidia/nsight-compute/* | sort -V | tail -n 1)
if [ -z "$dry" ]; then
    command -v nvcc >/dev/null || die "nvcc is not on PATH: install the CUDA Toolkit, or add its bin folder to PATH"
    nvidia-smi -L 2>/dev/null | grep -q GPU || die "nvidia-smi shows no GPU on this machine"
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
else
    gpu="no GPU"
fi
# Checkpoints are large: keep them in memory if there is room.
place=${TMPDIR:-/tmp}
if [ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)" -gt 16000000 ] 2>/dev/null; then place=/dev/shm; fi
work=$(mktemp -d -p "$place")
trap 'rm -rf "$work"' EXIT
folder=${OUT:-dev/results}
[ -n "$dry" ] && folder=$work
mkdir -p "$folder"
report=$folder/$(echo "$gpu" | tr ' /' '__')-$(date +%Y-%m-%d).md
whole=${report%.md}.log
failed=0
if [ -n "${COMMIT:-}" ]; then commit="commit $COMMIT"
elif commit=$(git rev-parse --short HEAD 2>/dev/null); then
    commit="commit $commit$(git diff --quiet HEAD || echo ' with changes')"
else commit="unknown commit"; fi

# What the programs of `part_build` were built from and for, as one word.
fingerprint() {
    {
        cat Makefile ./*.cu ./*.cuh ./*.h lib/*/*.h lib/*/*.cuh lib/*/*.cpp dev/*/*.h dev/*/*.cuh
        nvcc --version
        grep -m 1 'model name' /proc/cpuinfo
        echo "$gpu"
    } 2>/dev/null | sha256sum | cut -c 1-16
}
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
# Are both programs there, of these sources as far as we know, and do they start?
ready() {
    [ -x train_nsa ] && [ -x build/test_device ] &&
        { [ ! -f build/built_for ] || [ "$(cat build/built_for)" = "$FINGERPRINT" ]; } &&
        timeout -s KILL 20 build/test_device --list >/dev/null 2>&1
}

query() { nvidia-smi --query-gpu="$1" --format=csv,noheader -i 0; }
head_of_report() {
    echo "# $gpu, $(date +%Y-%m-%d)"
    echo
    echo "driver $(query driver_version), $(nvcc --version | sed -n 's/.*release \([^,]*\),.*/CUDA \1/p')," \
        "SM clock at most $(query clocks.max.sm), power limit $(query power.limit), $(query memory.total)," \
        "$(uname -m), $(nproc) CPU cores"
    echo
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

# section NAME COMMAND...: makes the report's section NAME from the command's output (all of it, or its first 20 lines,
# all results and the last 300 lines), status, seconds and clocks. Kills a command that takes too long, with everything
# that it started. Returns its status.
section() {
    local name=$1 begin=$SECONDS status watcher seconds=$LIMIT earlier stopped=""
    shift
    if [ -n "$dry" ]; then
        echo "$name: $*"
        return
    fi
    [ -z "${TOTAL:-}" ] || [ $((TOTAL - SECONDS - 5)) -ge "$seconds" ] || seconds=$((TOTAL - SECONDS - 5))
    echo "== $name: $*" | tee -a "$whole"
    : >"$work/clocks"
    if [ "$seconds" -lt 5 ]; then
        echo "no time is left for it" | tee "$work/log" >>"$whole"
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
    {
        echo "## $name"
        echo
        [ "$status" -ne 137 ] || stopped=" (stopped after $seconds s)"
        echo "\`$*\`: exit status $status$stopped after $((SECONDS - begin)) s; $commit; $(conditions "$work/clocks")"
        echo
        echo '```'
        if [ "$(wc -l <"$work/log")" -le 400 ]; then cat "$work/log"
        else
            head -n 20 "$work/log"
            echo "..."
            head -n -300 "$work/log" | tail -n +21 | grep '^result: '
            tail -n 300 "$work/log"
        fi
        echo '```'
        echo
    } >"$work/text"
    if [ -f "$report" ]; then  # without an earlier section of this name
        awk -v head="## $name" '/^## /{skip = ($0 == head)} !skip' "$report" >"$work/kept" && mv "$work/kept" "$report"
    else
        head_of_report >"$report"
    fi
    cat "$work/text" >>"$report"
    tail -n 3 "$work/log"
    return "$status"
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
            --eval-batches 1 --sample-tokens 0 --save-every 0 --stall-timeout 45 --out "$WORK/$name" "$@" 2>&1
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
        "first step after $(cat "$WORK/$name.first") s; random token ids, $*"
}
# One make for both programs, so that it probes the machine once. If nvcc cannot cope with what the host compiler knows
# about this processor, build for a plainer one.
part_build() {
    [ -z "${NVCC_APPEND_FLAGS:-}" ] || echo "NVCC_APPEND_FLAGS=$NVCC_APPEND_FLAGS"
    make -j2 train_nsa build/test_device || {
        echo "-- again, for a plainer processor"
        make -j2 MARCH=x86-64-v3 train_nsa build/test_device
    } || return 1
    mkdir -p build && echo "$FINGERPRINT" >build/built_for
}
# The attention kernels of this build, by the table in lib/cuda/attention_kernels.h; with PRECISION=FP32: plain alone.
attention_kernels() { ./train_nsa --version 2>/dev/null | sed -n 's/^attention kernels: //p'; }
plain_only() { [ "$(attention_kernels)" = plain ]; }
# Each group runs in a process of its own, for at most 90 seconds. A fault spoils the GPU for the rest of its process,
# and a test that hangs keeps the others from running, so tests that did not pass run again alone, for 15 seconds each.
# All of it has 240 seconds, so that a broken kernel leaves time for the parts after this one.
part_tests() {
    local PART_END=$((EPOCHSECONDS + 240)) group name again="" status=0
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
    done
    for name in $again; do
        status=1
        [ $((PART_END - EPOCHSECONDS)) -gt 3 ] || { echo "no time is left for $name and those after it"; break; }
        echo "-- $name alone"
        within 15 ./build/test_device --only "$name"
    done
    return "$status"
}
# sanitize 'TOOL [OPTION]...' COMMAND...: at most 110 seconds of it
sanitize() {
    local tool=$1
    shift
    echo "-- $tool: $*"
    # shellcheck disable=SC2086  # a tool with its own options
    limited 110 compute-sanitizer --tool $tool --print-limit 5 --error-exitcode 1 "$@"
}
part_sanitizer() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "skipped: there is no compute-sanitizer on PATH"
        return 0
    fi
    local status=0 more tests="attention_kernels_heads"
    local small="--device cuda --layers 1 --dim 384 --head-dim 64 --heads 6 --kv-groups 1
        --cmp-block 32 --cmp-stride 16 --slc-block 64 --slc-count 3 --window 100
        --seq-len 520 --batch 1 --total-batch 520 --steps 1 --eval-batches 1 --sample-tokens 2 --stall-timeout 0"
    for more in "" "--recompute 2" "--attention full"; do
        rm -rf "$WORK/sanitized"
        # shellcheck disable=SC2086  # lists of words
        sanitize "memcheck --report-api-errors no" ./train_nsa $small $more --out "$WORK/sanitized" || status=1
    done
    # racecheck misjudges cuBLASLt's kernels, so it runs on the attention kernels only. In these tests every array is an
    # allocation of its own, so memcheck sees the end of each.
    plain_only && tests="cuda_attention_full ladder_rungs_agree"
    for more in $tests; do
        sanitize memcheck ./build/test_device --only "$more" || status=1
        sanitize racecheck ./build/test_device --only "$more" || status=1
    done
    return "$status"
}
# perf OPTIONS...: every operation of a step, two minutes at most
perf() { within 120 ./build/test_device --perf --model 125m --device cuda "$@"; }
part_perf() {
    local status=0
    perf || status=1
    perf --attention full || status=1
    perf --batch 1 --seq-len 32768 --recompute 1 || status=1
    return "$status"
}
# --perf marks one step for the profiler. We want the kernels' own times, with clocks and caches left alone.
part_gaps() {
    local step
    if ! command -v ncu >/dev/null; then
        echo "skipped: there is no ncu on PATH"
        return 0
    fi
    perf >"$WORK/perf" 2>&1 || { cat "$WORK/perf"; return 1; }
    limited 240 ncu --profile-from-start off --clock-control none --cache-control none \
        --metrics gpu__time_duration.sum --print-units base --csv --log-file "$WORK/kernels.csv" \
        ./build/test_device --perf --model 125m --device cuda >"$WORK/profiled" 2>&1 ||
        { tail -n 20 "$WORK/profiled" "$WORK/kernels.csv"; return 1; }
    step=$(sed -n 's/^a step without clocks: .* GPU was done after \([0-9.]*\) us.*/\1/p' "$WORK/perf")
    # The last column is the value, "1,234" or 1234, in nanoseconds, whether ncu calls them ns or nsecond.
    awk -F'","' -v step="$step" '
        /gpu__time_duration.sum/ { x = $NF; gsub(/[",]/, "", x); sum += x; n++ }
        END {
            if (!n || !step) { print "no kernels in the profile, or no step time"; exit 1 }
            printf "result: kernels of a step, 16 x 2048 | %.0f | us | %d launches, by ncu; ", sum / 1e3, n
            printf "the step without it %.0f us, so ", step
            printf "%.1f %% of it lie between kernels, memset and memcpy (which ncu does not list) included\n",
                100 * (1 - sum / 1e3 / step)
        }' "$WORK/kernels.csv"
}
no_tensor_cores() { plain_only && echo "skipped: the attention kernels of this build are: $(attention_kernels)"; }
part_emulator() {
    local file=$WORK/emulator.safetensors
    no_tensor_cores && return
    make build/cuda_tests && within 120 ./build/cuda_tests --write-results "$file" &&
        within 120 ./build/test_device --compare-results "$file"
}
part_attention() { no_tensor_cores || ./build/test_device --perf-attention --batch 1 --seq-len 65536; }
part_published() {
    no_tensor_cores && return
    ./build/test_device --predict-attention
    ./build/test_device --perf-attention --shape published
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
    for T in 4096 8192 16384; do
        train "NSA, T=$T" --batch $((65536 / T)) --seq-len "$T" --total-batch 65536 --steps 12 || status=1
        train "full attention, T=$T" --batch $((65536 / T)) --seq-len "$T" --total-batch 65536 --steps 12 \
            --attention full || status=1
    done
    for level in 1 2; do
        train "NSA, T=65536, --recompute $level" --batch 1 --seq-len 65536 --total-batch 65536 --recompute "$level" \
            --steps 10 || status=1
    done
    return "$status"
}
part_ranks() {
    if [ "$(nvidia-smi -L | grep -c GPU)" -lt 2 ] || ! command -v mpirun >/dev/null; then
        echo "skipped: it needs two GPUs and mpirun"
        return 0
    fi
    local job="--device cuda --steps 20 --eval-batches 1 --sample-tokens 0 --bucket-mb 0.5" zero status=0
    for zero in 0 1; do
        # shellcheck disable=SC2086  # a list of words
        mpirun -np 2 ./train_nsa $job --zero $zero --out "$WORK/two$zero" || status=1
    done
    if cmp "$WORK/two0/step_00000020/model.safetensors" "$WORK/two1/step_00000020/model.safetensors"
    then echo "2 GPUs, --zero 0 and 1: the same bits"
    else echo "2 GPUs, --zero 0 and 1: DIFFERENT"; status=1; fi
    for zero in 0 1; do
        mpirun -np 2 ./train_nsa --model 125m --device cuda --eval-every 0 --eval-batches 1 --sample-tokens 0 \
            --save-every 0 --batch 16 --total-batch 131072 --steps 25 --zero "$zero" --out "$WORK/pair$zero" || status=1
    done
    return "$status"
}
part_torch() {
    if ! "${PYTHON:-python3}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        echo "skipped: ${PYTHON:-python3} has no PyTorch that sees a GPU"
        return 0
    fi
    # All in one part, one after the other, so that clocks and temperature are the same. PyTorch's MFU uses our peak.
    local ours="NSA, T=2048, beside PyTorch" peak status=0
    train "$ours" --batch 16 --total-batch 32768 --steps 25 || status=1
    train "full attention, T=2048, beside PyTorch" --batch 16 --total-batch 32768 --steps 25 --attention full ||
        status=1
    peak=$(sed -n 's/.*MFU [0-9.]* % of \([0-9.]*\) TFLOP.*/\1/p' "$WORK/$ours.out")
    "${PYTHON:-python3}" -u dev/bench/torch_step.py --batch 16 --seq-len 2048 --peak-tflops "${peak:-0}" || status=1
    plain_only || within 150 ./build/test_device --perf-attention --batch 1 --seq-len 65536 || status=1
    "${PYTHON:-python3}" -u dev/bench/torch_attention.py --tokens 65536 || status=1
    return "$status"
}
export WORK=$work
export -f within limited run train same_digits sanitize perf attention_kernels plain_only no_tensor_cores
for part in $PARTS; do export -f "part_$part"; done

build() {
    section build bash -c part_build || return 1
    [ -z "$dry" ] && [ -n "${OUT:-}" ] || return 0
    mkdir -p "$work/pack/build" && cp build/built_for "$work/pack/build"
    for program in train_nsa build/test_device; do
        strip -o "$work/pack/$program" "$program" 2>/dev/null || cp "$program" "$work/pack/$program"
    done
    tar -C "$work/pack" -czf "$folder/programs.tar.gz" train_nsa build ||
        echo "the programs could not be written to $folder/programs.tar.gz"
}
built=""
if [ -z "$dry" ]; then
    find_cublas
    shard "$work/train.bin" 4194304
    shard "$work/val.bin" 1048576
    FINGERPRINT=$(fingerprint)
    export FINGERPRINT
    if [ -f programs.tar.gz ] && ! ready; then tar -xzf programs.tar.gz; fi
fi
for part in "$@"; do
    # Without a build run nothing more: any programs that are there were built from other sources.
    if [ "$part" = build ] || { [ -z "$dry$built" ] && ! ready; }; then
        build || break
        built=1
    fi
    [ "$part" != build ] || continue
    case $part in
        tests) section "tests on the device" bash -c part_tests ;;
        *) section "$part" bash -c "part_$part" ;;
    esac
done
[ -n "$dry" ] || echo "report: $report, all output: $whole"
exit $failed
