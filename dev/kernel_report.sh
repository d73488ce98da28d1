#!/usr/bin/env bash
# What the kernels cost according to ptxas: registers, shared memory, spills; on every generation of GPUs that
# lib/cuda/attention_kernels.h has, or on ARCHS. A kernel that spills fails, and so does a row of the table of attention
# kernels there for which not every head dimension and branch has code. So does whatever else ptxas says of wgmma (C75xx:
# that it serializes them), but for C7519, a fence that it adds, which is counted. And so does, from sm_90 on, a kernel
# that touches device memory, branches or ends before it waits for earlier kernels: launch<> in lib/cuda/common.cuh says
# why.
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
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
# ROW CAPABILITY NAME FUNCTION HOW_MANY for each attention kernel, ARCH sm_N for each generation.
"${CXX:-g++}" -std=c++17 -I. -x c++ - -o "$log.program" <<'EOF' && "$log.program" >"$log.rows" || exit 1
#include <bitset>
#include <cstdio>
#include "lib/cuda/attention_kernels.h"
int main() {
    for (const Generation& g : GENERATIONS) {
        bool exact = false;  // whether a row is for this generation alone
        for (const AttentionKernel& row : ATTENTION_KERNELS) exact |= row.exact && row.capability == g.capability;
        std::printf("ARCH sm_%d%s\n", g.capability, exact ? "a" : "");
    }
    for (const AttentionKernel& row : ATTENTION_KERNELS) {
        const size_t compiled = std::bitset<32>(row.head_dimensions).count() * std::bitset<32>(row.branches).count();
        std::printf("ROW %d%s %s %s %zu\n", row.capability, row.exact ? "a" : "", row.name, row.forward,
                    compiled ? compiled : 1);
    }
}
EOF
archs=${ARCHS:-$(awk '$1 == "ARCH" { print $2 }' "$log.rows")}
failed=0 passed=0
for arch in $archs; do
    # An older nvcc does not know the latest; none lists sm_90a beside sm_90.
    "${NVCC:-nvcc}" --list-gpu-code | grep -x "${arch%a}" >/dev/null || continue
    if ! "${NVCC:-nvcc}" -x cu -std=c++17 -O3 -gencode="arch=compute_${arch#sm_},code=$arch" -diag-suppress 1675 \
        -Werror all-warnings -Xptxas -v -Xcompiler -w -DUSE_CUDA -DNSA_WITHOUT_MAIN -cubin -o "$work/cubin" \
        -keep -keep-dir "$work" "$source" >"$log" 2>&1; then
        cat "$log"
        echo "$source does not compile for $arch"
        failed=$((failed + 1))
        continue
    fi
    sed -n '/(C75[0-9]*)/ { s/.*(\(C75[0-9]*\)).*function .\([^ ]*\)[^ ]$/\1 \2/p; t; s/.*(\(C75[0-9]*\)).*/\1 ?/p }' "$log" |
        c++filt | sed 's/void //; s/(Branch)\|(int)//g; s/>(.*/>/' | sort | uniq -c |
        awk -v arch="$arch" '{ n = $1; code = $2; sub(/^ *[0-9]+ [^ ]+ /, "")
            printf "%s %s %s: %s of wgmma in %d places\n", code == "C7519" ? "ok  " : "FAIL", arch, $0, code, n }' \
            >"$log.wgmma"
    # In PTX, where a compiler that moved a load before the wait would show it. Arguments are param, not device memory.
    : >"$log.waits"
    if [ "$(tr -dc 0-9 <<<"$arch")" -ge 90 ]; then
        cat "$work"/*.ptx | c++filt | awk -v arch="$arch" '
            /\.entry / { name = $0; sub(/.*\.entry (void )?/, "", name); sub(/\(.*/, "", name); first = "" }
            /^}/ && name != "" {
                if (first == "griddepcontrol.wait") waiting++
                else { printf "FAIL %s %s: %s before it waits for earlier kernels\n", arch, name, first; failed++ }
                name = ""
            }
            name != "" && first == "" {
                op = $1 ~ /^@/ ? $2 : $1; sub(/;.*/, "", op)
                if (op ~ /^(griddepcontrol|ld|ldu|st|atom|red|cp|prefetch|bra|brx|call|ret|exit)/ &&
                    op !~ /^(ld|st)\.(volatile\.)?(param|shared|local|const)/) first = op
            }
            END {
                printf "%s %s: %d kernels wait for earlier kernels first\n", failed || !waiting ? "FAIL" : "ok  ", arch, waiting
            }' >"$log.waits"
        rm "$work"/*.ptx
    fi
    # ptxas reports each kernel in three lines: its name, its spills, its registers and shared memory.
    c++filt <"$log" | awk -v arch="$arch" '
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
        sort -u >"$log.kernels"
    awk -v arch="$arch" '
        FILENAME == ARGV[1] { name = $3; sub(/<.*/, "", name); count[name]++; next }
        $1 == "ROW" && ($2 ~ /a$/ ? "sm_" $2 == arch : $2 <= substr(arch, 4) + 0) {
            printf "%s %s %s: %d of %d kernels %s\n", count[$4] == $5 ? "ok  " : "FAIL", arch, $3, count[$4], $5, $4
        }' "$log.kernels" "$log.rows" | cat "$log.kernels" "$log.wgmma" "$log.waits" - >"$log.table"
    cat "$log.table"
    passed=$((passed + $(grep -c '^ok' "$log.table"))) failed=$((failed + $(grep -c '^FAIL' "$log.table")))
done
if [ $((passed + failed)) -eq 0 ]; then
    echo "no kernel was counted: nvcc knows none of ${archs//$'\n'/ }, or $source has none"
    failed=1
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
