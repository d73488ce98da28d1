#!/usr/bin/env bash
# Runs test programs one after another and adds up their closing lines: run_tests.sh 'PROGRAM [ARGUMENT]...' ...
# The last line is "N passed, N failed"; a program that dies or closes without such a line counts as one failure. Exit status 1 on any failure.
set -uo pipefail
# For programs built with SAN=address; others do not read it. What is no leak of this program is listed in dev/leaks.supp. The emulator gives each CUDA
# thread a stack of its own, between which AddressSanitizer's second stack for locals (its search for use after return) would be mixed up.
export LSAN_OPTIONS="suppressions='$(dirname "$(realpath "$0")")/leaks.supp':print_suppressions=0${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
export ASAN_OPTIONS="detect_stack_use_after_return=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
passed=0 failed=0
for command in "$@"; do
    echo "== $command"
    log=$(mktemp)
    timeout 1800 bash -c "exec $command" </dev/null 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    if read -r p f < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p' "$log" | tail -1) && [ -n "${f:-}" ]; then
        passed=$((passed + p)) failed=$((failed + f))
        if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then echo "$command: exit status $status"; failed=$((failed + 1)); fi
    else
        echo "$command: exit status $status without a closing line"
        failed=$((failed + 1))
    fi
    rm -f "$log"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
