#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: builds, tests on the device, measures, and writes one page to be pasted,
# dev/results/<gpu>-<date>.md: an answer for each part, all figures, the end of each part's output; all of it is in the
# .log beside. Each part is stopped when its time is over and replaces its section in today's page; what stands in its
# way is a sentence there, and the others go on. The exit status is 1 if a part failed or was stopped.
#     dev/gpu_check.sh prepare    on any machine with nvcc: writes programs.tar.gz, the programs for sm_80, sm_90 and
#                                 later and the emulator's results. In the repository's root on the GPU's machine it
#                                 spares building there. NO_MPI=1 and NO_NCCL=1 leave out libraries that are not there
#     dev/gpu_check.sh [PART]...  without arguments all of them, in this order:
#       build       train_nsa and build/test_device for this GPU, where they are not there or do not start
#       tests       the tests that run on the device: operations, kernels, training steps (make test has the others)
#       emulator    the attention kernels on this GPU against dev/emulator/ with the same inputs: selections bit by bit,
#                   numbers within their limits
#       shapes      tokens/s, MFU and memory of 125m at 16 x 1024, 16 x 2048, 32 x 1024 and 4 x 8192
#       kernels     the time of every operation of 125m's step, and of every kernel where there is Nsight Compute; their
#                   sum against the step's time shows the gaps. <gpu>-<date>-kernels.csv keeps what it wrote
#       torch       a compiled dense model of the same size in PyTorch beside ours at four lengths, and our attention
# OUT=FOLDER puts the page elsewhere, PYTHON=python3 names the Python with PyTorch, COMMIT=... names the commit if the
# sources are not a git checkout, and TOTAL=590 stops everything after so many seconds.
# Figures worth quoting are in the parts' output as lines "result: what | figure | unit | conditions", and in one table.
# shellcheck disable=SC2317  # the parts are called by a bash of their own
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

readonly PARTS="build tests emulator shapes kernels torch"
readonly LIMIT=580  # seconds of one part
die() { echo "gpu_check.sh: $1" >&2; exit 2; }
case "${1:-}" in -h | --help) sed -n '/^# One command/,/^# Figures worth/s/^# //p' "$0"; exit 0 ;; esac
# shellcheck disable=SC2086  # a list of words
[ $# -gt 0 ] || set -- $PARTS
for part in "$@"; do
    case " prepare $PARTS " in
        *" $part "*) ;;
        *) die "unknown part '$part'; there are: prepare, $PARTS" ;;
    esac
done
# A toolkit's installer may leave these off PATH; of several Nsight Computes take the newest.
PATH=$PATH:/usr/local/cuda/bin:$(printf '%s\n' /opt/nvidia/nsight-compute/* | sort -V | tail -n 1)
gpu="no GPU"
obstacle="nvidia-smi shows no GPU on this machine: there is none, or its driver does not run"
if nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then  # not -q: it would leave while a second GPU is named
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0) obstacle=""
fi
work=$(mktemp -d)
trap 'if [ "$BASHPID" = $$ ]; then rm -rf "$work"; fi' EXIT  # a child that is killed before exec runs it too
mkdir -p "${OUT:=dev/results}"
report=$OUT/$(echo "$gpu" | tr ' /' '__')-$(date +%Y-%m-%d).md
whole=${report%.md}.log failed=0
touch "$report"
commit="commit ${COMMIT:-$(git --git-dir=.git --work-tree=. describe --always --dirty 2>/dev/null || echo unknown)}"

# Some toolkits lack cuBLASLt, which PyTorch's wheels have. Puts its headers and library into build/cublas, without the
# CUDA runtime that lies beside them, and tells nvcc where they are.
find_cublas() {
    local place here=$PWD/build/cublas
    local probe=$'#include <cublasLt.h>\nint main() { return cublasLtGetVersion() == 0; }'
    nvcc -x cu -o "$work/probe" - -lcublasLt 2>/dev/null <<<"$probe" && return
    place=$("${PYTHON:-python3}" -c 'import glob, nvidia
print([file for root in nvidia.__path__ for file in glob.glob(root + "/*/include/cublasLt.h")][0][:-19])') ||
        { echo "cuBLASLt is not there to build with, neither in the toolkit nor beside PyTorch"; return; }
    rm -rf "$here" && mkdir -p "$here/include" "$here/lib"
    ln -s "$place"/include/cublas*.h "$here/include"
    ln -s "$place"/lib/libcublasLt.so.* "$here/lib"
    ln -s "$(printf '%s\n' "$place"/lib/libcublasLt.so.* | head -n 1)" "$here/lib/libcublasLt.so"
    export NVCC_APPEND_FLAGS="-I$here/include -L$here/lib -Xlinker -rpath -Xlinker $here/lib ${NVCC_APPEND_FLAGS:-}"
}

# The page: the head, an answer for each part, all figures, and the parts' sections, of FILE.
page() {
    printf '# %s, %s\n\n' "$gpu" "$(date +%Y-%m-%d)"
    echo "driver $(nvidia-smi --query-gpu=driver_version,clocks.max.sm,power.limit,memory.total --format=csv,noheader \
        -i 0 2>/dev/null), $(nvcc --version 2>/dev/null | sed -n 's/.*release \([^,]*\),.*/CUDA \1/p'), $(nproc) cores"
    echo
    printf '| part | how it ended |\n|---|---|\n'
    awk '/^## / { name = substr($0, 4) }
        /^(passed|FAILED|stopped|not run)[^:]*: / && name {
            gsub(/[|]/, "/"); print "| " name " | " $0 " |"; name = "" }' "$1"
    printf '\n### Figures\n\n'
    awk -F ' *[|] *' '
        /: exit status [0-9]/ { of = substr($0, match($0, /commit [^;]*$/)) }
        /: exit status [1-9]/ { of = of "; **its part failed**" }
        /^result: / && !n++ { print "| what | figure | unit | conditions |\n|---|---|---|---|" }
        /^result: / { print "| " substr($1, 9) " | " $2 " | " $3 " | " $4 "; " of " |" }
        END { if (!n) print "not measured" }' "$1"
    printf '\n%s\n' "$(cat "$1")"
}
# What a part's output says in one line: its own line "answer: " or "skipped: ", else its last one.
answer() {
    { sed -nE 's/^(answer|skipped): //p' "$work/log" && grep -v '^result: ' "$work/log" | tail -n 1; } | head -n 1 |
        cut -c 1-240
}

# section NAME COMMAND...: makes the report's section NAME from the command's output (its results and last 60 lines),
# status and seconds. Kills a command that takes too long, with everything that it started. Returns its status.
section() {
    local name=$1 begin=$SECONDS status=124 earlier how seconds=$LIMIT
    shift
    [ -z "${TOTAL:-}" ] || [ $((TOTAL - SECONDS - 5)) -ge "$seconds" ] || seconds=$((TOTAL - SECONDS - 5))
    echo "== $name" | tee -a "$whole"
    earlier=$(stat -c %s "$whole")
    if [ "$seconds" -lt 5 ]; then echo "no time is left for it: call dev/gpu_check.sh $name again" >>"$whole"
    else
        export SECTION_END=$((EPOCHSECONDS + seconds))
        timeout -s KILL "$seconds" "$@" </dev/null >>"$whole" 2>&1
        status=$?
    fi
    tail -c "+$((earlier + 1))" "$whole" >"$work/log"
    [ "$status" -eq 0 ] || failed=1
    how="FAILED after $((SECONDS - begin)) s"
    case $status in
        0) how="passed after $((SECONDS - begin)) s" ;;
        137) how="stopped after $seconds s" ;;
        3 | 124) how="not run" ;;
    esac
    ! grep -q '^skipped: ' "$work/log" || grep -q '^answer: ' "$work/log" || how="not run"
    {
        printf '## %s\n\n%s: %s\n\n' "$name" "$how" "$(answer)"
        echo "\`$*\`: exit status $status after $((SECONDS - begin)) s; $commit"
        printf '\n<details><summary>output</summary>\n\n```\n'
        head -n -60 "$work/log" | grep '^result: '
        tail -n 60 "$work/log"
        printf '```\n</details>\n\n'
    } >"$work/text"
    awk -v head="## $name" '/^## /{ inside = 1; skip = ($0 == head) } inside && !skip' "$report" >"$work/kept"
    cat "$work/text" >>"$work/kept"
    page "$work/kept" >"$work/page" && mv "$work/page" "$report" || failed=1
    echo "$how: $(answer)"
    return "$status"
}

# shard FILE TOKENS: writes random token ids in llm.c's format, because the built-in corpus has the ids of bytes only.
# The ids are all pairs of bytes below 196: 38416 of GPT-2's 50257.
shard() {
    "${PYTHON:-python3}" -c 'import os, struct, sys
tokens = int(sys.argv[2])
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, tokens, 50257, *[0] * 252))
    file.write(os.urandom(2 * tokens).translate(bytes(i % 196 for i in range(256))))' "$@"
}

# ---- What the parts run. Each is a function in a bash of its own: `section` kills its process group. What is not bound
# to end earlier must stay in that group (timeout --foreground).

# within SECONDS COMMAND...: runs a single process for at most so many seconds, or until the part ends.
within() {
    local seconds=$1 left=$((SECTION_END - 2 - EPOCHSECONDS)) status
    [ "$left" -ge "$seconds" ] || seconds=$left
    shift
    [ "$seconds" -ge 1 ] || { echo "no time is left for $*"; return 124; }
    timeout --foreground -s KILL "$seconds" "$@"
    status=$?
    [ "$status" -ne 137 ] || echo "stopped after $seconds s: $*"
    return "$status"
}
# train NAME OPTIONS...: 25 steps on random token ids, and a result: the median of tokens/s without the first 5, MFU and
# the GPU's memory.
train() {
    local name=$1 out=$WORK/run rate mfu memory
    shift
    echo "-- $name: $*"
    within 100 ./train_nsa --model 125m --device cuda --data "$WORK/train.bin" --val-data "$WORK/val.bin" \
        --eval-every 0 --eval-batches 1 --sample-tokens 0 --save-every 0 --log-every 1 --stall-timeout 45 --steps 25 \
        --out "$out" "$@" 2>&1 | tee "$WORK/out"
    [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
    rm -rf "$out"
    rate=$(sed -n 's/^step 0*\([0-9]*\) .* toks\/s \([0-9]*\) .*/\1 \2/p' "$WORK/out" |
        awk '$1 > 5 { print $2 }' | sort -n | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)] }')
    mfu=$(sed -n 's/.*\(, MFU [0-9.]* % of [0-9.]* TFLOP.s\).*/\1/p' "$WORK/out")
    memory=$(sed -n 's/.*peak memory \([0-9]* MiB\) on the GPU.*/, \1 of GPU memory/p' "$WORK/out")
    echo "result: $name | ${rate:-0} | tokens/s | median of the steps after the 5th$mfu$memory; random token ids, $*" |
        tee -a "$WORK/trained"
}
# What `train` has measured since that file was emptied: " NAME: TOKENS/S, MFU N %;" of each.
rates() {
    sed -nE 's/^result: ([^|]*) \| ([0-9]*) [^,]*(, MFU [0-9.]* %)?.*/ \1: \2\3;/p' "$WORK/trained" | tr -d '\n'
}

# If nvcc cannot cope with what the host compiler knows about this processor, build for a plainer one.
part_build() {
    command -v nvcc >/dev/null || { echo "nvcc is not on PATH: install the CUDA Toolkit, or bring programs.tar.gz," \
        "which dev/gpu_check.sh prepare writes on another machine"; return 1; }
    make -j2 train_nsa build/test_device || make -j2 MARCH=x86-64-v3 train_nsa build/test_device
}
# For other machines: any x86-64 processor since 2013 where this is one, and GPUs from sm_80 on.
part_prepare() {
    local march="" here=build/carried pack=$WORK/pack/build name
    [ "$(uname -m)" != x86_64 ] || march=x86-64-v3
    make BUILD=$here MARCH=$march $here/train_nsa $here/test_device $here/cuda_tests || return 1
    mkdir -p "$pack"
    $here/cuda_tests --write-results "$pack/emulator.safetensors" || return 1
    for name in train_nsa test_device; do strip -o "$pack/$name" $here/$name || return 1; done
    mv "$pack/train_nsa" "$WORK/pack"
    tar -C "$WORK/pack" -czf programs.tar.gz train_nsa build
    echo "programs.tar.gz, $(du -h programs.tar.gz | cut -f 1): to go into the repository's root on the GPU's machine"
}
# Each group runs in a process of its own: a fault spoils the GPU for the rest of its process.
part_tests() {
    local group status=0
    for group in cuda_ attention_kernels_ ladder_; do
        ./build/test_device --list | grep "^$group" >/dev/null || { echo "there are no tests $group* here"; continue; }
        within 90 ./build/test_device --only "$group" 2>&1 | tee -a "$WORK/tests"
        [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
    done
    echo "answer: $(grep -c '^ok ' "$WORK/tests") tests passed on the device, these did not:" \
        "$(sed -n 's/^FAIL *\([^ ]*\).*/\1/p' "$WORK/tests" | tr '\n' ' ')"
    return "$status"
}
part_emulator() {
    local file=build/emulator.safetensors
    ! ./train_nsa --version | grep -x 'attention kernels: plain' || { echo "skipped: no other kernels"; return 0; }
    if [ ! -s "$file" ]; then
        file=$WORK/emulator.safetensors
        make build/cuda_tests && within 120 ./build/cuda_tests --write-results "$file" || return 1
    fi
    within 120 ./build/test_device --compare-results "$file"
}
part_shapes() {
    local batch T status=0
    : >"$WORK/trained"
    while read -r batch T; do
        train "NSA, $batch x $T" --batch "$batch" --seq-len "$T" --total-batch $((batch * T)) || status=1
    done <<<$'16 1024\n16 2048\n32 1024\n4 8192'
    echo "answer: tokens/s of$(rates)"
    return "$status"
}
# --perf marks one step for the profiler. We want the kernels' own times, with clocks and caches left alone.
part_kernels() {
    local step perf=(./build/test_device --perf --model 125m --device cuda --batch 16)
    within 60 ./train_nsa check --device cuda || return 1
    within 120 "${perf[@]}" | tee "$WORK/perf"
    [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
    step=$(sed -n 's/^a step without clocks: .* GPU was done after \([0-9.]*\) us.*/\1/p' "$WORK/perf")
    command -v ncu >/dev/null || { echo "answer: a step takes $step us; no ncu on PATH, so no kernels"; return 0; }
    OMP_WAIT_POLICY=passive timeout -k 5 240 ncu --profile-from-start off --clock-control none --cache-control none \
        --metrics gpu__time_duration.sum --print-units base --csv --log-file "$KERNELS" \
        "${perf[@]}" >"$WORK/profiled" 2>&1 || { tail -n 20 "$WORK/profiled" "$KERNELS"; return 1; }
    # The last column is the value, "1,234" or 1234, in nanoseconds.
    awk -F'","' -v step="$step" '
        /"Kernel Name"/ { for (i = 1; i <= NF; i++) if ($i ~ /Kernel Name/) column = i }
        /gpu__time_duration.sum/ {
            x = $NF; gsub(/[",]/, "", x); sum += x; n++
            name = $column; sub(/^void /, "", name); sub(/^kernels::/, "", name)
            if (name ~ />\(/) sub(/>\(.*/, ">", name); else sub(/\(.*/, "", name)
            gsub(/\(Branch\)|\(int\)|\(bool\)/, "", name)
            us[name] += x / 1e3; launches[name]++
        }
        END {
            for (name in us)
                printf "result: kernel %s | %.1f | us | %d launches of a step, %.1f %% of its kernels\n", name,
                    us[name], launches[name], 1e5 * us[name] / sum | "sort -t \"|\" -k 2 -rn"
            close("sort -t \"|\" -k 2 -rn")
            printf "answer: %d kernels take %.0f of a step'"'"'s %.0f us\n", n, sum / 1e3, step
        }' "$KERNELS"
}
# One after the other, so that clocks and temperature are the same. PyTorch's MFU uses our peak.
part_torch() {
    local T batch peak status=0 python=${PYTHON:-python3}
    "$python" -c 'import torch; assert torch.cuda.is_available()' || { echo "skipped: no PyTorch sees a GPU"; return; }
    : >"$WORK/trained"
    for T in 2048 8192 16384 32768; do
        batch=$((32768 / T))
        train "NSA, T=$T, beside PyTorch" --batch "$batch" --seq-len "$T" --total-batch 32768 || status=1
        peak=$(sed -n 's/.*MFU [0-9.]* % of \([0-9.]*\) TFLOP.*/\1/p' "$WORK/out")
        train "full attention, T=$T, beside PyTorch" --batch "$batch" --seq-len "$T" --total-batch 32768 \
            --attention full || status=1
        "$python" -u dev/bench/torch_step.py --batch "$batch" --seq-len "$T" --peak-tflops "${peak:-0}" --limit 110 |
            tee "$WORK/dense"
        [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
        grep '^result: ' "$WORK/dense" >>"$WORK/trained"
    done
    echo "answer: tokens/s of$(rates)"
    within 150 ./build/test_device --perf-attention --batch 1 --seq-len 65536 || status=1
    return "$status"
}
export WORK=$work KERNELS=${report%.md}-kernels.csv
export -f within train rates
for part in $PARTS; do export -f "part_$part"; done

if [ "$1" = prepare ]; then
    command -v nvcc >/dev/null || die "prepare needs nvcc, which is not on PATH"
    find_cublas
    part_prepare
    exit
fi
starts() { [ -x train_nsa ] && timeout -s KILL 20 build/test_device --list >/dev/null 2>&1; }
shard "$work/train.bin" 4194304
shard "$work/val.bin" 1048576
[ ! -f programs.tar.gz ] || starts || tar -xzf programs.tar.gz
for part in "$@"; do
    if [ -z "$obstacle" ] && { [ "$part" = build ] || ! starts; }; then
        find_cublas
        section build bash -c part_build || obstacle="there are no programs to run, since the build failed"
    fi
    [ "$part" != build ] || [ -n "$obstacle" ] || continue
    if [ -n "$obstacle" ]; then section "$part" bash -c "echo '$obstacle'; exit 3"
    else section "$part" bash -c "part_$part"; fi
done
echo "report: $report, all output: $whole"
exit $failed
