#!/usr/bin/env bash
# usage: gpu_day.sh SHARDS WORK [OPTION of run.py]...
#
# The comparison for a day or two on one GPU: 125m with GPT-2's vocabulary on FineWeb-Edu, T = 8192, 2.5 G tokens a run;
# NSA, full attention, and with as many keys as NSA a window in three layers of four and a window in all; equal
# parameters within 2 %; rates 3, 6, 12e-4 on seed 0 at a quarter of the tokens, the best, its half and its double with
# all of them on seed 1, seeds 2 and 3 at each arm's best; losses by the number of tokens in sight.
# Never run on a GPU yet: what is tested is the protocol, with a small model on a CPU.
#
#   data/fetch_shards.sh --dir SHARDS      gets the shards (25 for training, 200 MB each, and one for validation)
#   TFLOPS=300                             what the prediction assumes of the GPU; the default is 30 % of an H100's peak
#
# It says first what it will cost, and goes on where it was interrupted when it is started again. --predict 300 as the
# OPTION says the costs and ends. Results are in WORK/results, one JSON a run, and the tables at the end of the output.
set -euo pipefail

if [ $# -lt 2 ] || [ "$1" = --help ]; then
    sed -n '/^# usage/,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    [ "${1:-}" = --help ] && exit 0
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
shards=$1
work=$2
shift 2
common=(--cache "$shards" --work "$work" --results "$work/results" --jobs 1)
common+=(--setting "$here/gpu_day.json" --plan "$here/gpu_day.txt")
python3 "$here/run.py" "${common[@]}" --predict "${TFLOPS:-300}" "$@"
case " $* " in *" --predict "*) exit 0 ;; esac
python3 "$here/run.py" "${common[@]}" "$@"
python3 "$here/table.py" --results "$work/results"
