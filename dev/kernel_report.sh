#!/usr/bin/env bash
# What the kernels cost on sm_80, sm_90, sm_100 and sm_120 (or ARCHS) according to ptxas: registers, shared memory,
# spills. A kernel that spills fails.
#     dev/kernel_report.sh [SOURCE]        default train_nsa.cu, which instantiates every kernel that it launches
# Ends with "N passed, N failed".
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.." || exit 2
source=${1:-train_nsa.cu}
if ! command -v "${NVCC:-nvcc}" >/dev/null; then
    echo "skipped: kernel_report.sh, as nvcc is not there"
    echo "0 passed, 0 failed"
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0 passed=0
for arch in ${ARCHS:-sm_80 sm_90 sm_100 sm_120}; do
    # an older nvcc does not know the latest
    "${NVCC:-nvcc}" --list-gpu-code | grep -qx "$arch" || continue
    if ! "${NVCC:-nvcc}" -x cu -std=c++17 -O3 -arch=$arch -diag-suppress 1675 -Werror all-warnings -Xptxas -v \
        -Xcompiler -w -DUSE_CUDA -DNSA_WITHOUT_MAIN -cubin -o /dev/null "$source" >"$log" 2>&1; then
        cat "$log"
        echo "$source does not compile for $arch"
        failed=$((failed + 1))
        continue
    fi
    # ptxas reports each kernel in three lines: its name, its spills, its registers and shared memory.
    c++filt <"$log" | awk -v arch=$arch '
        /Compiling entry function/ {
            name = $0; sub(/.*function ./, "", name); sub(/. for .sm.*/, "", name)
            gsub(/\(Branch\)|\(int\)|\(bool\)/, "", name); sub(/\(.*/, "", name); sub(/^void /, "", name)
        }
        /bytes stack frame/ { spills = $5 + $9 }
        /Used [0-9]+ registers/ {
            registers = $0; sub(/.*Used /, "", registers); sub(/ registers.*/, "", registers)
            shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH) + 0 : 0
            printf "%s %s %-100s %3d registers, %5d bytes static shared memory, %d bytes spilled\n",
                spills ? "FAIL" : "ok  ", arch, name, registers, shared, spills
        }' |
        sort -u >"$log.table"
    cat "$log.table"
    passed=$((passed + $(grep -c '^ok' "$log.table"))) failed=$((failed + $(grep -c '^FAIL' "$log.table")))
    rm -f "$log.table"
done
if [ $((passed + failed)) -eq 0 ]; then
    echo "no kernel was counted: nvcc knows none of ${ARCHS:-sm_80 sm_90 sm_100 sm_120}, or $source has none"
    failed=1
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
