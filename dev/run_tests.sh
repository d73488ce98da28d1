#!/usr/bin/env bash
# Runs test programs side by side, one for each core, and adds up their closing lines: run_tests.sh 'PROGRAM
# [ARGUMENT]...' ... What a program prints appears in one piece when it has ended. JOBS: how many at a time. At the end
# stands once more what failed, since much may have been printed behind it. The last line is "N passed, N failed"; a
# program that dies or closes without such a line counts as one failure. Exit status 1 on any failure.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# For programs built with SAN=address; others do not read it. What LeakSanitizer reports although nothing leaks: MPICH's
# transport (UCX) keeps memory if a process ends without MPI_Finalize, as ours do after an error; the emulator keeps
# destroyed streams and events, so that it can name one that is used later. It gives each CUDA thread a stack of its own,
# which AddressSanitizer's second stack for locals (its search for use after return) would mix up.
printf 'leak:%s\n' libucs.so libuct.so libucp.so libmpich.so cudaEventCreateWithFlags cudaStreamCreateWithFlags \
    >"$work/leaks"
export LSAN_OPTIONS="suppressions='$work/leaks':print_suppressions=0${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
export ASAN_OPTIONS="detect_stack_use_after_return=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"

# The output of program number $1, and its exit status in $work/$1.status.
run() {
    local start=$SECONDS
    timeout 1800 bash -c "exec $2" </dev/null >"$work/$1.log" 2>&1
    echo "$? $((SECONDS - start))" >"$work/$1.ended"
    mv "$work/$1.ended" "$work/$1.status"
}

passed=0 failed=0
: >"$work/failures"
report() {
    local status seconds p f
    read -r status seconds <"$work/$1.status"
    echo "== $2 (${seconds} s)"
    cat "$work/$1.log"
    grep -a -B 8 -A 12 '^FAIL' "$work/$1.log" >"$work/failure"
    read -r p f < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$work/$1.log" | tail -1)
    if [ -n "${f:-}" ]; then
        passed=$((passed + p)) failed=$((failed + f))
        if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
            echo "exit status $status" >>"$work/failure"
            failed=$((failed + 1))
        fi
    else
        { tail -n 20 "$work/$1.log" && echo "exit status $status without a closing line"; } >"$work/failure"
        failed=$((failed + 1))
    fi
    [ ! -s "$work/failure" ] || { echo "== failed: $2" && cat "$work/failure"; } >>"$work/failures"
    rm "$work/$1.log" "$work/$1.status"
}

commands=("$@") next=0 left=$# running=0
while [ "$left" -gt 0 ]; do
    while [ "$next" -lt $# ] && [ "$running" -lt "${JOBS:-$(nproc)}" ]; do
        run "$next" "${commands[$next]}" &
        next=$((next + 1)) running=$((running + 1))
    done
    wait -n
    for ((i = 0; i < next; i++)); do
        [ -f "$work/$i.status" ] || continue
        report "$i" "${commands[$i]}"
        left=$((left - 1)) running=$((running - 1))
    done
done
cat "$work/failures"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
