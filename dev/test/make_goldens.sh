#!/usr/bin/env bash
# make_goldens.sh: makes dev/test/golden_<name>.safetensors again, from the trainer's parameters and the arithmetic of
# dev/reference.py. Run it when the model, the initialisation or the synthetic data have changed on purpose, and review
# what changed before committing.
#     dev/test/make_goldens.sh [NAME ...]        all, or the named ones
# Needs ./train_nsa (make) and Python with PyTorch and NumPy; PYTHON=/path/to/python3 chooses another interpreter.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../.."

fail() {
    echo "make_goldens.sh: $1" >&2
    exit 1
}

# Each has a few hundred thousand parameters or fewer, so that test_nsa repeats a step in well under a second.
declare -A configs=(
    # h = 3; blocks in the paper's proportions; T > w, not a multiple of any block; a choice of blocks from token 64 on
    [nsa]="--seed 2 --batch 2 --seq-len 200 --total-batch 400 --attention nsa --layers 2 --dim 96 --heads 6
           --kv-groups 2 --head-dim 16 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 24
           --phi-hidden 24 --mlp-hidden 384"
    # the paper's own blocks 32/16/64, one group of 6 heads; a choice of blocks from token 256 on
    [nsa_paper]="--seed 2 --batch 1 --seq-len 520 --total-batch 520 --attention nsa --layers 2 --dim 64 --heads 6
           --kv-groups 1 --head-dim 16 --cmp-block 32 --cmp-stride 16 --slc-block 64 --slc-count 4 --window 128
           --phi-hidden 16 --mlp-hidden 256"
    # every head its own group; compression blocks side by side
    [nsa_h1]="--seed 3 --batch 2 --seq-len 150 --total-batch 300 --attention nsa --layers 2 --dim 64 --heads 4
           --kv-groups 4 --head-dim 16 --cmp-block 8 --cmp-stride 8 --slc-block 16 --slc-count 5 --window 24
           --phi-hidden 16 --mlp-hidden 256"
    # what changes the model at either end of the layers and in between
    [options]="--seed 2 --batch 2 --seq-len 100 --total-batch 200 --attention nsa --layers 2 --dim 64 --heads 4
           --kv-groups 2 --head-dim 16 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 24
           --phi-hidden 16 --mlp-hidden 128 --smear --head untied"
    # the dense baseline
    [full]="--seed 4 --batch 3 --seq-len 97 --total-batch 291 --attention full --layers 2 --dim 64 --heads 4
           --kv-groups 2 --head-dim 16 --mlp-hidden 256"
    # --qk-norm and another base of RoPE
    [qk_norm]="--seed 5 --batch 2 --seq-len 130 --total-batch 260 --attention nsa --layers 2 --dim 64 --heads 6
           --kv-groups 2 --head-dim 16 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 24
           --phi-hidden 16 --mlp-hidden 128 --qk-norm --rope-base 500"
    # layers in turn; the last one begins the pattern again
    [pattern]="--seed 6 --batch 2 --seq-len 100 --total-batch 200 --attention window,nsa,full --layers 4 --dim 48
           --heads 4 --kv-groups 2 --head-dim 8 --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 4 --window 24
           --phi-hidden 8 --mlp-hidden 64 --qk-norm"
)
limit=150000  # bytes of a golden file

python=${PYTHON:-python3}
[ -x ./train_nsa ] || fail "./train_nsa is missing; run make first"
"$python" -c 'import torch, numpy' 2>/dev/null ||
    fail "$python cannot import torch and numpy; pip install torch numpy, or set PYTHON"

names=("$@")
[ $# -gt 0 ] || names=(nsa nsa_paper nsa_h1 options full qk_norm pattern)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for name in "${names[@]}"; do
    [ -n "${configs[$name]:-}" ] || fail "no configuration '$name'; there are: ${!configs[*]}"
    read -r -d '' -a options <<<"${configs[$name]}" || true  # read returns 1 at the end of the text
    state=$folder/$name.safetensors golden=dev/test/golden_$name.safetensors
    echo "== $name"
    ./train_nsa --steps 1 --init random --device cpu --data synthetic --tokenizer bytes "${options[@]}" \
        --dump-state "$state" >"$folder/log" 2>&1 ||
        { cat "$folder/log" >&2; fail "train_nsa failed for '$name'; its output is above"; }
    "$python" dev/reference.py golden "$state" "$folder/golden"
    size=$(wc -c <"$folder/golden")
    [ "$size" -le $limit ] || fail "golden '$name' has $size bytes, more than $limit; make its configuration smaller"
    mv "$folder/golden" "$golden"
done
