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

# Runs the program $1, prints its output and adds its numbers to $work/counts.
run() {
    local log status p='' f=''
    log=$(mktemp -p "$work")
    timeout 1800 bash -c "exec $1" </dev/null >"$log" 2>&1
    status=$?
    read -r p f < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log" | tail -1)
    {
        flock 9  # one at a time from here on
        echo "== $1 ($SECONDS s)"
        cat "$log"
        grep -a -B 8 -A 12 '^FAIL' "$log" >"$log.failure"
        if [ -z "$f" ]; then
            f=1
            { tail -n 20 "$log" && echo "exit status $status without a closing line"; } >"$log.failure"
        elif [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
            f=1
            echo "exit status $status" >>"$log.failure"
        fi
        echo "$((p)) $f" >>"$work/counts"
        [ ! -s "$log.failure" ] || { echo "== failed: $1" && cat "$log.failure"; } >>"$work/failures"
        rm "$log"
    } 9>"$work/lock"
}
export -f run
export work
: >"$work/failures"
# shellcheck disable=SC2016  # $1 is the inner bash's
printf '%s\0' "$@" | xargs -0 -n 1 -P "${JOBS:-$(nproc)}" bash -c 'run "$1"' -
cat "$work/failures"
awk '{ passed += $1; failed += $2 } END { print passed + 0 " passed, " failed + 0 " failed"; exit failed > 0 }' "$work/counts"
