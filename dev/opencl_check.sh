#!/usr/bin/env bash
# The engine of dev/ports/opencl on this machine's processor, by PoCL: builds with GPU=opencl, runs the tests of every
# operation and of the model, and trains fifty steps, which have to be the CPU engine's; full attention, two ranks and a
# resume for ten; samples, inspects, and compares a dump of the first batch with dev/reference.py.
#     dev/opencl_check.sh        BUILD=build PYTHON=python3
# As root it installs what it needs with apt-get. What cannot be had is said and left out. Ends with "N passed, N
# failed".
# shellcheck disable=SC2317  # good calls the functions
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.." || exit 2
build=${BUILD:-build}/opencl python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# good NAME COMMAND...: counts the command's success; what it printed is shown where it fails.
good() {
    local name=$1
    shift
    if "$@" >"$work/output" 2>&1; then
        echo "ok   $name"
        passed=$((passed + 1))
    else
        echo "FAIL $name: $*"
        sed 's/^/    /' "$work/output" | tail -30
        failed=$((failed + 1))
        return 1
    fi
}
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}
has_opencl() { [ -n "$(ls /etc/OpenCL/vendors/*.icd 2>/dev/null)" ] && [ -e /usr/include/CL/cl.h ]; }
# refuses WORDS COMMAND...: the command ends with status 2 and an error that has the words.
refuses() {
    local words=$1
    shift
    "$@"
    [ $? -eq 2 ] && grep -q -- "$words" "$work/output"
}

if ! has_opencl && [ "$(id -u)" -eq 0 ]; then
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pocl-opencl-icd opencl-headers \
        ocl-icd-opencl-dev >/dev/null 2>&1
fi
if ! has_opencl; then
    echo "skipped: no pocl-opencl-icd and opencl-headers, so nothing was tried with OpenCL"
    finish
fi
good "builds" env MAKEFLAGS='' make -s GPU=opencl WERROR=1 BUILD="$build" "$build/train_nsa" "$build/test_device" ||
    finish
good "tests of the operations and of the model" timeout 300 "$build/test_device"
good "test_nsa builds" env MAKEFLAGS='' make -s GPU=opencl WERROR=1 BUILD="$build" test_nsa
good "test_nsa" ./test_nsa
rm -f test_nsa  # that of this engine

small=(--model tiny --seq-len 128 --total-batch 256 --batch 1 --threads 1 --sample-tokens 0 --eval-batches 1)
# train ENGINE FOLDER OPTION...
train() { "$build/train_nsa" "${small[@]}" --device "$1" --out "$work/$2" "${@:3}"; }
losses() { sed -nE 's/.*"step": ?([0-9]+),.*"loss": ?([0-9.]+).*/\1 \2/p' "$work/$1/log.jsonl"; }
# same_losses STEPS FOLDER FOLDER: sums in another order, 2^-24 of each, keep far below one in ten thousand.
same_losses() {
    paste -d' ' <(losses "$2") <(losses "$3") | tee /dev/stderr | awk -v steps="$1" '
        { n++; d = $2 - $4; if ($1 != $3 || !(d * d <= 1e-8 * $2 * $2)) bad = 1 }
        END { if (n != steps || bad) { print n " steps compared, not the same losses"; exit 1 } }'
}

# same_numbers FILE FILE: of JSON, whose importances and gates have three or four digits.
same_numbers() {
    paste -d' ' <(tr -s ' ,:[]{}' '\n' <"$work/$1") <(tr -s ' ,:[]{}' '\n' <"$work/$2") | awk '
        $1 != $2 { d = $1 - $2; if ($1 !~ /^[0-9.]+$/ || d * d > 1.1e-6) { print; bad = 1 } }
        END { exit bad || NR < 1000 }'
}

good "check" "$build/train_nsa" check --device opencl
good "fifty steps" train opencl nsa --steps 50
good "fifty steps of the CPU engine" train cpu nsa_cpu --steps 50
good "they are the same" same_losses 50 nsa nsa_cpu
good "full attention" train opencl full --steps 10 --attention full
good "full attention of the CPU engine" train cpu full_cpu --steps 10 --attention full
good "they are the same" same_losses 10 full full_cpu
good "five steps" train opencl parts --steps 5 --schedule constant
good "and five more" "$build/train_nsa" --resume --out "$work/parts" --steps 10
good "ten steps at once" train opencl whole --steps 10 --schedule constant
good "they are the same" cmp <(losses parts) <(losses whole)
if command -v mpirun >/dev/null; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    for zero in 0 1; do
        good "two ranks, --zero $zero" mpirun -np 2 "$build/train_nsa" "${small[@]}" --device opencl --steps 10 \
            --schedule constant --zero $zero --out "$work/ranks$zero"
        good "they learn what one learns" same_losses 10 ranks$zero whole
    done
else
    echo "skipped: no mpirun, so two ranks were not tried"
fi
good "samples" "$build/train_nsa" sample --from "$work/nsa" --device opencl --prompt "To be" --tokens 20 --stats
head -c 100 README.md >"$work/text"
for engine in opencl cpu; do
    good "inspects by $engine" "$build/train_nsa" inspect --from "$work/nsa" --device $engine --text "$work/text" \
        --json "$work/$engine.json"
done
good "they select the same" same_numbers opencl.json cpu.json
good "refuses bf16 by name" refuses "--cpu-dtype bf16" train opencl no --steps 1 --cpu-dtype bf16
good "refuses a profiler by name" refuses "--profile-steps 1-2: the OpenCL" train opencl no --profile-steps 1-2
if "$python" -c 'import torch' 2>/dev/null; then
    good "a dump" "$build/train_nsa" --device opencl --model tiny --init random --batch 2 --seq-len 200 \
        --total-batch 400 --out "$work/dump" --dump-state "$work/state.safetensors" &&
        good "is what reference.py computes" "$python" dev/reference.py compare "$work/state.safetensors"
else
    echo "skipped: no PyTorch for $python, so no dump was compared with dev/reference.py"
fi
finish
