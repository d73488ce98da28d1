#!/usr/bin/env bash
# Times the CPU engine on this machine, and beside it those of its competitors that are installed: make bench, or
#   dev/bench/cpu.sh build/bench_cpu [--python PYTHON] [--rounds N] [--llmc FOLDER] [--longest T]
#   --python    an interpreter that imports torch (default: python3, if it does); without one PyTorch is left out
#   --rounds    how often the contenders take turns (default 2); a turn is two steps of warm-up and three that count
#   --longest   of NSA beside full attention, from 1024 tokens on (default 65536, where a step of full attention takes
#               minutes)
#   --llmc      a checkout of llm.c whose CPU trainer and starter files are ready (./train_gpt2, gpt2_124M.bin)
# A timing counts only on a quiet machine, so each part prints the load of other processes. Nothing is downloaded.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ $# -gt 0 ] || { echo "cpu.sh: build/bench_cpu is missing (--help says more)" >&2; exit 2; }
bench=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
python=python3 rounds=2 llmc='' longest=65536
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || { echo "cpu.sh: $1 needs a value (--help says more)" >&2; exit 2; }
    case $1 in
        --python) python=$2 ;;
        --rounds) rounds=$2 ;;
        --llmc) llmc=$2 ;;
        --longest) longest=$2 ;;
        *) echo "cpu.sh: unknown option $1 (--help lists them)" >&2; exit 2 ;;
    esac
    shift 2
done
rates=$(mktemp)
trap 'rm -f "$rates"' EXIT
contend() { "$@" | sed "s/^rate [^ ]*/&$as/" | tee -a "$rates"; }  # keeps its lines "rate NAME VALUE"
as=''  # what it adds to their names
median() {
    awk -v name="$1" '$1 == "rate" && $2 == name { print $3 }' "$rates" | sort -n |
        awk '{ x[NR] = $1 } END { if (NR) print (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2 }'
}

compare() {  # fp32 or bf16, then the names of the others
    local dtype=$1 ours theirs other
    shift
    ours=$(median "ours-$dtype$as")
    echo "ours, $dtype: $ours tokens/s"
    for other; do
        theirs=$(median "$other-$dtype$as")
        [ -z "$theirs" ] || awk -v a="$ours" -v b="$theirs" -v name="$other-$dtype" 'BEGIN {
            printf "    %-26s %8.1f tokens/s; ours is %.2f times that\n", name, b, a / b
        }'
    done
}

date -u '+# %Y-%m-%d %H:%M UTC'
"$bench" conditions | tee -a "$rates"
dtypes='fp32 bf16'
grep -q '^# no bf16' "$rates" && dtypes=fp32
echo; echo "== decoding"
"$bench" decode
for dtype in $dtypes; do
    echo; echo "== one training step of 125m, T 2048, B 1, --cpu-dtype $dtype"
    "$bench" step --cpu-dtype $dtype
done

has_torch=$("$python" -c 'import torch' 2>/dev/null && echo yes || true)
[ -n "$has_torch" ] || echo "# $python has no torch: PyTorch is left out (--python PYTHON)"
echo; echo "== NSA beside full attention, one layer of 125m"
for ((T = 1024; T <= longest; T *= 2)); do
    "$bench" full --seq-len "$T" | tee -a "$rates"
    [ -z "$has_torch" ] || "$python" "$here/torch_cpu.py" sdpa --seq-len "$T"
done
# Between the last length at which full attention is faster and the next, on a line of log T over the ratio's logarithm.
for row in step forward attention-forward attention-backward attention; do
    awk -v row="$row" '
        match($0, /, T [0-9]+;/) { T = substr($0, RSTART + 4, RLENGTH - 5) }
        $1 == row && NF == 5 {
            if (last < 1 && $4 >= 1 && before)
                at = exp(log(before) + log(T / before) * log(1 / last) / log($4 / last))
            last = $4; before = T
        }
        END { if (at) printf "%s: NSA is faster from T = %.0f on\n", row, at; else print row ": no crossover here" }
    ' "$rates"
done

echo; echo "== tokens/s of whole training steps, T 2048, B 1; the contenders take turns"
for round in $(seq "$rounds"); do
    echo "# round $round"
    for dtype in $dtypes; do
        contend "$bench" rate ours-$dtype 3 --cpu-dtype $dtype
        [ -z "$has_torch" ] || for model in nsa dense; do
            contend "$python" "$here/torch_cpu.py" $model --dtype $dtype
            contend "$python" "$here/torch_cpu.py" $model --dtype $dtype --compile ||
                echo "# torch.compile cannot run it here"
        done
    done
    if [ -n "$llmc" ]; then
        (cd "$llmc" && OMP_NUM_THREADS=$(nproc) timeout 120 stdbuf -oL ./train_gpt2 || true) |
            awk 'match($0, /took [0-9.]+ ms/) {
                print "rate llm.c-fp32", 256000 / substr($0, RSTART + 5, RLENGTH - 8)
            }' |
            contend awk 'NR > 1 && NR <= 6'  # its batch is 4 x 64 tokens
    fi
done
echo; echo "== medians"
for dtype in $dtypes; do
    compare "$dtype" torch-nsa torch-nsa-compiled torch-dense torch-dense-compiled llm.c
done

# Whole steps of small models, where every loop is short. PyTorch's models have the same sizes.
small() {  # NAME, options of ours alone, and those that both take
    local as=-$1 ours_too=$2 round model
    shift 2
    echo; echo "== $*: tokens/s of whole training steps, fp32; the contenders take turns"
    for round in $(seq "$rounds"); do
        contend "$bench" rate ours-fp32 10 "$@" $ours_too
        [ -z "$has_torch" ] || for model in nsa dense; do
            contend "$python" "$here/torch_cpu.py" $model --steps 10 "$@"
        done
    done
    compare fp32 torch-nsa torch-dense
}
small tiny "" --model tiny --seq-len 256 --batch 8
small 4x192 "--head-dim 32 --mlp-hidden 768" --model tiny --layers 4 --dim 192 --heads 6 --seq-len 1024 --batch 4
