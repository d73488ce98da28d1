#!/usr/bin/env bash
# What checkpoints cost the training loop: `tiny`, 300 steps, a checkpoint every 100 steps against none, taking turns.
#   dev/bench/checkpoint_cost.sh [PAIRS]      4 pairs of runs by default; ./train_nsa must be built
# The limit that the project sets itself is 5 %.
set -euo pipefail
pairs=${1:-4}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Seconds from the end of the first step to the end of the last, by the heartbeat's clock: what happens between steps counts.
seconds() {
    local out="$folder/run$RANDOM"
    ./train_nsa --steps 300 --eval-every 0 --eval-batches 1 --sample-tokens 0 --stats-every 0 --out "$out" "$@" >/dev/null
    sed -E 's/^\{"time":([0-9.]+),.*/\1/' "$out/heartbeat_rank0.jsonl" | awk 'NR == 1 { first = $1 } { last = $1 } END { printf "%.3f\n", last - first }'
    rm -rf "$out"
}
echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
for i in $(seq "$pairs"); do  # every second pair the other way round: a machine that slows down meanwhile favours neither
    if [ $((i % 2)) -eq 1 ]; then without=$(seconds --save-every 0) with=$(seconds --save-every 100)
    else with=$(seconds --save-every 100) without=$(seconds --save-every 0); fi
    echo "$without $with" | tee -a "$folder/pairs"
done
awk '{ a += log($2 / $1) } END { printf "seconds without and with checkpoints above; geometric mean of the ratios of %d pairs: %.4f\n", NR, exp(a / NR) }' "$folder/pairs"
