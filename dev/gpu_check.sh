#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU: builds, tests on the device, runs compute-sanitizer, times every operation, trains, and writes one
# report, dev/results/<gpu>-<date>.md. Parts can be run one by one, each in under ten minutes; a part's section of today's report is replaced.
#     dev/gpu_check.sh [build|tests|sanitizer|perf|train]...        all of them without arguments
# OUT=FOLDER puts the report elsewhere. Exit status 1 if any part failed; the report says which.
set -uo pipefail
cd "$(dirname "$0")/.."

die() { echo "gpu_check.sh: $1" >&2; exit 2; }
command -v nvcc >/dev/null || die "nvcc is not on PATH: install the CUDA Toolkit, or add its bin folder to PATH"
command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU || die "nvidia-smi shows no GPU on this machine"
for part in "$@"; do
    case $part in build | tests | sanitizer | perf | train) ;; *) die "unknown part '$part'; there are build, tests, sanitizer, perf, train" ;; esac
done
[ $# -gt 0 ] || set -- build tests sanitizer perf train

gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
folder=${OUT:-dev/results}
mkdir -p "$folder"
report=$folder/$(echo "$gpu" | tr ' /' '__')-$(date +%Y-%m-%d).md
sections=$(mktemp -d)
trap 'rm -rf "$sections"' EXIT
failed=0

# section NAME COMMAND...: the command's output (its last 80 lines), status and seconds become the report's section of that name.
section() {
    local name=$1 begin=$SECONDS status
    shift
    echo "== $name: $*"
    "$@" >"$sections/log" 2>&1 </dev/null
    status=$?
    [ $status -eq 0 ] || failed=1
    {
        echo "## $name"
        echo
        echo "\`$*\`: exit status $status after $((SECONDS - begin)) s"
        echo
        echo '```'
        tail -n 80 "$sections/log"
        echo '```'
        echo
    } >"$sections/text"
    if [ -f "$report" ]; then  # without an earlier section of this name
        awk -v head="## $name" '/^## /{skip = ($0 == head)} !skip' "$report" >"$sections/kept" && mv "$sections/kept" "$report"
    else
        {
            echo "# $gpu, $(date +%Y-%m-%d)"
            echo
            echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0), $(nvcc --version | sed -n 's/.*release \([^,]*\),.*/CUDA \1/p')," \
                "SM clock now/max $(nvidia-smi --query-gpu=clocks.sm,clocks.max.sm --format=csv,noheader -i 0), $(nvidia-smi --query-gpu=memory.total --format=csv,noheader -i 0), $(uname -m), $(nproc) CPU cores"
            echo
        } >"$report"
    fi
    cat "$sections/text" >>"$report"
    tail -n 3 "$sections/log"
}

for part in "$@"; do
    case $part in
        build) section build make train_nsa test_nsa ;;
        tests) section "tests on the device" ./test_nsa ;;
        sanitizer)
            for tool in memcheck racecheck initcheck; do
                section "compute-sanitizer $tool" timeout 280 compute-sanitizer --tool $tool --error-exitcode 1 \
                    ./train_nsa --device cuda --layers 1 --dim 384 --head-dim 64 --heads 6 --kv-groups 1 --cmp-block 32 --cmp-stride 16 --slc-block 64 --slc-count 4 --window 100 \
                    --seq-len 400 --batch 1 --total-batch 400 --steps 1 --eval-batches 1 --sample-tokens 0 --out "$sections/sanitized"
            done ;;
        perf)
            section "operations, 16 x 2048" ./test_nsa --perf --model 125m --device cuda
            section "operations, full attention, 16 x 2048" ./test_nsa --perf --model 125m --device cuda --attention full
            section "operations, 1 x 32768" ./test_nsa --perf --model 125m --device cuda --batch 1 --seq-len 32768 --recompute 1 ;;
        train)
            section "50 steps of 125m at T=2048" ./train_nsa --model 125m --device cuda --total-batch 65536 --steps 50 --eval-every 0 --eval-batches 1 --sample-tokens 0 --out "$sections/trained" ;;
    esac
done
echo "report: $report"
exit $failed
