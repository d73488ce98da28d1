#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: builds, tests on the device, runs compute-sanitizer, times every operation, trains, compares with PyTorch where it is
# installed, and writes one report, dev/results/<gpu>-<date>.md. Every part runs alone and is stopped after ten minutes; a part's section of today's report is replaced.
#     dev/gpu_check.sh [PART]...        all of them without arguments, in this order:
#       build       train_nsa and test_nsa for this GPU
#       tests       the tests of test_nsa that run on the device: operations, kernels, whole training steps (make test has the others)
#       sanitizer   compute-sanitizer's memcheck, racecheck and initcheck on one small training step
#       perf        every operation of a training step against the ceilings of this GPU, at 16 x 2048, with full attention, and at 1 x 32768
#       attention   attention alone, every branch and both sets of selected kernels, T from 2048 to 65536 at 65536 tokens
#       train       125m for 50 steps; the time to its first step; the same 5 steps twice, bit for bit; one sequence a step, without and with --cuda-graph 1
#       batches     tokens/s as the micro-batch grows
#       long        125m at T = 65536
#       ranks       two GPUs over NCCL against one, bit for bit with --deterministic, and what the reductions cost (skipped where there is one GPU)
#       torch       PyTorch's attention and a compiled dense model of the same size, side by side with ours (skipped where there is no PyTorch with CUDA)
# OUT=FOLDER puts the report elsewhere, PYTHON=python3 names the Python with PyTorch, COMMIT=... the commit, where the sources are no git checkout. Exit status 1 if any part failed or was stopped; the report says which.
# Figures to be quoted stand in the report as lines "result: what | figure | unit | conditions"; dev/results_table.sh makes README's table from them.
# DRY_RUN=1 prints the commands of the parts and runs none.
# shellcheck disable=SC2317  # the parts are called by a bash of their own
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

readonly PARTS="build tests sanitizer perf attention train batches long ranks torch"
readonly LIMIT=580  # seconds of one part
die() { echo "gpu_check.sh: $1" >&2; exit 2; }
for part in "$@"; do
    case " $PARTS " in *" $part "*) ;; *) die "unknown part '$part'; there are: $PARTS" ;; esac
done
# shellcheck disable=SC2086  # a list of words
[ $# -gt 0 ] || set -- $PARTS
dry=${DRY_RUN:-}
if [ -z "$dry" ]; then
    command -v nvcc >/dev/null || die "nvcc is not on PATH: install the CUDA Toolkit, or add its bin folder to PATH"
    nvidia-smi -L 2>/dev/null | grep -q GPU || die "nvidia-smi shows no GPU on this machine"
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
else
    gpu="no GPU"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=${OUT:-dev/results}
[ -n "$dry" ] && folder=$work
mkdir -p "$folder"
report=$folder/$(echo "$gpu" | tr ' /' '__')-$(date +%Y-%m-%d).md
failed=0
if [ -n "${COMMIT:-}" ]; then commit="commit $COMMIT"
elif commit=$(git rev-parse --short HEAD 2>/dev/null); then commit="commit $commit$(git diff --quiet HEAD || echo ' with changes')"
else commit="unknown commit"; fi

head_of_report() {
    echo "# $gpu, $(date +%Y-%m-%d)"
    echo
    echo "driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0)," \
        "$(nvcc --version | sed -n 's/.*release \([^,]*\),.*/CUDA \1/p'), SM clock at most $(nvidia-smi --query-gpu=clocks.max.sm --format=csv,noheader -i 0)," \
        "power limit $(nvidia-smi --query-gpu=power.limit --format=csv,noheader -i 0), $(nvidia-smi --query-gpu=memory.total --format=csv,noheader -i 0), $(uname -m), $(nproc) CPU cores"
    echo
}
# The least and largest SM clock, temperature and power that nvidia-smi saw meanwhile.
clock_range() { awk -F', *' 'NR == 1 { a = b = $1; t = $2; p = $3 } { if ($1 < a) a = $1; if ($1 > b) b = $1; if ($2 > t) t = $2; if ($3 > p) p = $3 }
    END { if (NR) printf "SM clock %d to %d MHz, at most %d C and %d W, seen every 2 s", a, b, t, p }' "$1"; }

# section NAME COMMAND...: the command's output (its last 150 lines, and all results), status, seconds and clocks become the report's section of that name.
section() {
    local name=$1 begin=$SECONDS status watcher
    shift
    if [ -n "$dry" ]; then
        echo "$name: $*"
        return
    fi
    echo "== $name: $*"
    nvidia-smi --query-gpu=clocks.sm,temperature.gpu,power.draw --format=csv,noheader,nounits -i 0 -l 2 >"$work/clocks" 2>/dev/null &
    watcher=$!
    timeout --kill-after=10 "$LIMIT" "$@" >"$work/log" 2>&1 </dev/null
    status=$?
    kill "$watcher" 2>/dev/null
    wait "$watcher" 2>/dev/null
    [ $status -eq 0 ] || failed=1
    {
        echo "## $name"
        echo
        echo "\`$*\`: exit status $status$([ $status -eq 124 ] && echo " (stopped after $LIMIT s)") after $((SECONDS - begin)) s; $commit; $(clock_range "$work/clocks")"
        echo
        echo '```'
        head -n -150 "$work/log" | grep '^result: '
        tail -n 150 "$work/log"
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
}

# ---- what the parts run; each is a function, so that it can be stopped as a whole (by a bash of its own, see `part`)

# train NAME OPTIONS...: trains into a fresh folder and prints the run's lines, the seconds until the first step's line, and the median of tokens/s without the first 5 steps.
train() {
    local name=$1 begin=$EPOCHREALTIME first="" line status
    shift
    ./train_nsa --model 125m --device cuda --eval-every 0 --eval-batches 1 --sample-tokens 0 --save-every 0 --out "$WORK/$name" "$@" >"$WORK/$name.out" 2>&1 &
    local job=$!
    while kill -0 "$job" 2>/dev/null; do
        if grep -q '^step 0001 ' "$WORK/$name.out" 2>/dev/null; then
            first=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')
            break
        fi
        sleep 0.05
    done
    wait "$job"
    status=$?
    cat "$WORK/$name.out"
    [ "$status" -eq 0 ] || { echo "training ended with status $status"; return 1; }
    [ -z "$first" ] || echo "seconds from the start to the first step: $first"
    line=$(sed -n 's/^step 0*\([0-9]*\) .* toks\/s \([0-9]*\) .*/\1 \2/p' "$WORK/$name.out" | awk '$1 > 5 { print $2 }' | sort -n | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)] }')
    [ -n "$line" ] || return 0
    echo "result: $name | $line | tokens/s | median of the steps after the 5th$(sed -n 's/.*\(, MFU [0-9.]* % of [0-9.]* TFLOP.s\).*/\1/p' "$WORK/$name.out"); $*"
}
part_tests() {
    local group status=0
    for group in cuda_ attention_kernels_ ladder_; do ./test_nsa --only "$group" || status=1; done
    return "$status"
}
part_sanitizer() {
    local tool
    for tool in memcheck racecheck initcheck; do
        rm -rf "$WORK/sanitized"
        echo "-- $tool"
        timeout 190 compute-sanitizer --tool "$tool" --error-exitcode 1 ./train_nsa --device cuda --layers 1 --dim 384 --head-dim 64 --heads 6 --kv-groups 1 --cmp-block 32 --cmp-stride 16 \
            --slc-block 64 --slc-count 3 --window 100 --seq-len 520 --batch 1 --total-batch 520 --steps 1 --eval-batches 1 --sample-tokens 0 --out "$WORK/sanitized" || return 1
    done
}
part_perf() {
    ./test_nsa --perf --model 125m --device cuda && ./test_nsa --perf --model 125m --device cuda --attention full &&
        ./test_nsa --perf --model 125m --device cuda --batch 1 --seq-len 32768 --recompute 1
}
part_attention() { ./test_nsa --perf-attention --batch 1 --seq-len 65536; }
# same_digits WHAT RUN RUN: did both runs log the same losses and norms?
same_digits() {
    if cmp "$WORK/$2/main.log" "$WORK/$3/main.log"; then echo "$1: the same losses and norms, digit for digit"
    else echo "$1: DIFFERENT"; return 1; fi
}
part_train() {
    local one="NSA, T=2048, one sequence a step"
    train "NSA, T=2048" --batch 16 --total-batch 65536 --steps 50 && train "full attention, T=2048" --batch 16 --total-batch 65536 --steps 50 --attention full &&
        train "first" --batch 16 --total-batch 32768 --steps 5 && train "second" --batch 16 --total-batch 32768 --steps 5 && same_digits "the same 5 steps twice" first second &&
        train "$one" --batch 1 --total-batch 2048 --steps 50 && train "$one, CUDA graphs" --batch 1 --total-batch 2048 --steps 50 --cuda-graph 1 &&
        same_digits "with and without CUDA graphs" "$one" "$one, CUDA graphs"
}
part_batches() {
    local batch
    for batch in 1 2 4 8 16 32; do train "NSA, T=2048, micro-batch $batch" --batch "$batch" --total-batch 65536 --steps 15 || return 1; done
}
part_long() {
    local T
    for T in 4096 8192 16384; do
        train "NSA, T=$T" --batch 1 --seq-len "$T" --total-batch 65536 --steps 12 && train "full attention, T=$T" --batch 1 --seq-len "$T" --total-batch 65536 --steps 12 --attention full || return 1
    done
    train "NSA, T=65536, --recompute 1" --batch 1 --seq-len 65536 --total-batch 65536 --recompute 1 --steps 10 && train "NSA, T=65536, --recompute 2" --batch 1 --seq-len 65536 --total-batch 65536 --recompute 2 --steps 10
}
part_ranks() {
    if [ "$(nvidia-smi -L | grep -c GPU)" -lt 2 ] || ! command -v mpirun >/dev/null; then
        echo "skipped: it needs two GPUs and mpirun"
        return 0
    fi
    local job="--device cuda --steps 20 --eval-batches 1 --sample-tokens 0 --deterministic" zero
    # shellcheck disable=SC2086  # a list of words
    ./train_nsa $job --out "$WORK/one" || return 1
    for zero in 0 1; do
        # shellcheck disable=SC2086
        mpirun -np 2 ./train_nsa $job --zero $zero --bucket-mb 0.5 --out "$WORK/two$zero" || return 1
        if cmp "$WORK/one/step_00000020/model.safetensors" "$WORK/two$zero/step_00000020/model.safetensors"; then echo "1 and 2 GPUs, --zero $zero: the same bits"
        else echo "1 and 2 GPUs, --zero $zero: DIFFERENT"; return 1; fi
    done
    for zero in 0 1; do
        mpirun -np 2 ./train_nsa --model 125m --device cuda --eval-every 0 --eval-batches 1 --sample-tokens 0 --save-every 0 --batch 16 --total-batch 131072 --steps 25 --zero "$zero" --out "$WORK/pair$zero" || return 1
    done
}
part_torch() {
    if ! "${PYTHON:-python3}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        echo "skipped: ${PYTHON:-python3} has no PyTorch that sees a GPU"
        return 0
    fi
    # In one run, one after the other, so that clocks and temperature are the same for all. PyTorch's MFU is of the same peak as ours.
    local ours="NSA, T=2048, beside PyTorch" peak
    train "$ours" --batch 16 --total-batch 32768 --steps 25 && train "full attention, T=2048, beside PyTorch" --batch 16 --total-batch 32768 --steps 25 --attention full || return 1
    peak=$(sed -n 's/.*MFU [0-9.]* % of \([0-9.]*\) TFLOP.*/\1/p' "$WORK/$ours.out")
    "${PYTHON:-python3}" dev/bench/torch_step.py --batch 16 --seq-len 2048 --peak-tflops "${peak:-0}" && "${PYTHON:-python3}" dev/bench/torch_attention.py --tokens 65536 --lengths 2048,8192,65536
}
export WORK=$work
export -f train same_digits part_tests part_sanitizer part_perf part_attention part_train part_batches part_long part_ranks part_torch

for part in "$@"; do
    case $part in
        build) section build make train_nsa test_nsa ;;
        tests) section "tests on the device" bash -c part_tests ;;
        *) section "$part" bash -c "part_$part" ;;
    esac
done
[ -n "$dry" ] || echo "report: $report"
exit $failed
