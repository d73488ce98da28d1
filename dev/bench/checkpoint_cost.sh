#!/usr/bin/env bash
# Measures what a checkpoint in the background costs the training loop: trains `tiny` with a checkpoint every 20 steps,
# and prints by how much the three steps after each are longer than three median steps, and as a control the same for
# three steps halfway between two checkpoints. All in one run, so that a machine whose speed drifts does not matter.
#   dev/bench/checkpoint_cost.sh [OPTION OF TRAIN]...      ./train_nsa must be built
# The project's own limit is 5 % at one checkpoint per 100 steps.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
./train_nsa --steps 225 --save-every 20 --eval-every 0 --eval-batches 1 --sample-tokens 0 --stats-every 0 \
    --out "$folder/run" "$@" >"$folder/out"
# Seconds of each step, including the pauses between steps, by the heartbeat's clock.
sed -E 's/^\{"time":([0-9.]+),.*/\1/' "$folder/run/heartbeat_rank0.jsonl" |
    awk 'NR > 1 { printf "%d %.3f\n", NR, $1 - last } { last = $1 }' >"$folder/steps"
median() { sort -n | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'; }
step=$(awk '{ print $2 }' "$folder/steps" | median)
extra() {
    awk -v step="$step" -v first="$1" '{
        k = ($1 - 1) % 20
        if ($1 > 20 && k >= first && k < first + 3) sum += $2 - step
        if ($1 > 20 && k == first + 2) { print sum; sum = 0 }
    }' "$folder/steps" | median
}
awk -v step="$step" -v cost="$(extra 0)" -v control="$(extra 10)" 'BEGIN {
    printf "median step %.3f s; a checkpoint costs %.3f s, which is %.2f %% of 100 steps (control: %.3f s)\n",
        step, cost, cost / step, control
}'
