#!/usr/bin/env bash
# The engine of dev/ports/opencl on this machine's processor, by PoCL: builds with GPU=opencl, runs the tests of every
# operation and of the model, and trains fifty steps, which have to be the CPU engine's; full attention, two ranks and a
# resume for ten; samples, inspects, and compares a dump of the first batch with dev/reference.py.
#     dev/opencl_check.sh        BUILD=build PYTHON=python3
# As root it installs what it needs with apt-get. What cannot be had is said and left out. Ends with "N passed, N
# failed".
set -uo pipefail
. "$(dirname "$0")/checks.sh"
build=${BUILD:-build}/opencl python=${PYTHON:-python3}
has_opencl() { [ -n "$(ls /etc/OpenCL/vendors/*.icd 2>/dev/null)" ] && [ -e /usr/include/CL/cl.h ]; }
# refuses WORDS COMMAND...: the command ends with status 2 and an error that has the words.
refuses() {
    local words=$1
    shift
    "$@"
    [ $? -eq 2 ] && grep -q -- "$words" "$work/output"
}

has_opencl || install_as_root pocl-opencl-icd opencl-headers ocl-icd-opencl-dev
if ! has_opencl; then
    skipped "no pocl-opencl-icd and opencl-headers, so nothing was tried with OpenCL"
    finish
fi
good "builds" build_once "$build" GPU=opencl "$build/train_nsa" "$build/test_device" ||
    finish
good "tests of the operations and of the model" timeout 300 "$build/test_device"
good "test_nsa builds" build_once "$build" GPU=opencl test_nsa
good "test_nsa" ./test_nsa
rm -f test_nsa  # that of this engine

small=(--model tiny --seq-len 128 --total-batch 256 --batch 1 --threads 1 --sample-tokens 0 --eval-batches 1)
# train ENGINE FOLDER OPTION...
train() { "$build/train_nsa" "${small[@]}" --device "$1" --out "$work/$2" "${@:3}"; }
# same_numbers FILE FILE: of JSON, whose importances and gates have three or four digits.
same_numbers() {
    paste -d' ' <(tr -s ' ,:[]{}' '\n' <"$work/$1") <(tr -s ' ,:[]{}' '\n' <"$work/$2") | awk '
        $1 != $2 { d = $1 - $2; if ($1 !~ /^[0-9.]+$/ || d * d > 1.1e-6) { print; bad = 1 } }
        END { exit bad || NR < 1000 }'
}

good "check" "$build/train_nsa" check --device opencl
good "fifty steps" train opencl nsa --steps 50
good "fifty steps of the CPU engine" train cpu nsa_cpu --steps 50
good "they are the same" same_losses 50 "$work/nsa" "$work/nsa_cpu"
good "full attention" train opencl full --steps 10 --attention full
good "full attention of the CPU engine" train cpu full_cpu --steps 10 --attention full
good "they are the same" same_losses 10 "$work/full" "$work/full_cpu"
good "five steps" train opencl parts --steps 5 --schedule constant
good "and five more" "$build/train_nsa" --resume --out "$work/parts" --steps 10
good "ten steps at once" train opencl whole --steps 10 --schedule constant
good "they are the same" cmp <(losses "$work/parts") <(losses "$work/whole")
if command -v mpirun >/dev/null; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    for zero in 0 1; do
        good "two ranks, --zero $zero" mpirun -np 2 "$build/train_nsa" "${small[@]}" --device opencl --steps 10 \
            --schedule constant --zero $zero --out "$work/ranks$zero"
        good "they learn what one learns" same_losses 10 "$work/ranks$zero" "$work/whole"
    done
else
    skipped "no mpirun, so two ranks were not tried"
fi
good "samples" "$build/train_nsa" sample --from "$work/nsa" --device opencl --prompt "To be" --tokens 20
head -c 100 README.md >"$work/text"
for engine in opencl cpu; do
    good "inspects by $engine" "$build/train_nsa" inspect --from "$work/nsa" --device $engine --text "$work/text" \
        --json "$work/$engine.json"
done
good "they select the same" same_numbers opencl.json cpu.json
good "refuses bf16 by name" refuses "--cpu-dtype bf16" train opencl no --steps 1 --cpu-dtype bf16
if "$python" -c 'import torch' 2>/dev/null; then
    good "a dump" "$build/train_nsa" --device opencl --model tiny --init random --batch 2 --seq-len 200 \
        --total-batch 400 --out "$work/dump" --dump-state "$work/state.safetensors" &&
        good "is what reference.py computes" "$python" dev/reference.py compare "$work/state.safetensors"
else
    skipped "no PyTorch for $python, so no dump was compared with dev/reference.py"
fi
finish
