#!/usr/bin/env bash
# What the kernels cost according to ptxas: registers, shared memory, spills; on every generation of GPUs that
# lib/cuda/attention_kernels.h has, or on ARCHS. A kernel that spills fails, and so does a row of the table of attention
# kernels there for which not every head dimension and branch has code. So does whatever else ptxas says of wgmma (C75xx:
# that it serializes them), but for C7519, a fence that it adds, which is counted. And so does, from sm_90 on, a kernel
# that touches device memory, branches or ends before it waits for earlier kernels: launch<> in lib/cuda/common.cuh says
# why.
#     dev/kernel_report.sh [SOURCE]        default train_nsa.cu, which instantiates every kernel that it launches
# Needs nvcc, and cuobjdump, which comes with it (if it is elsewhere: CUOBJDUMP=). Ends with "N passed, N failed".
#
# On sm_80 and sm_90a also what the inner loops of the tensor-core kernels consist of, counted in the machine code:
# instructions per mma (m16n8k16; a wgmma counts as those that each of its warps would need: 8 for 64 columns), ldmatrix,
# exponentials, branches. Every instruction of the loop counts, also those that most passes jump over, such as masks. A
# loop with an integer division (some 20 instructions) or with a register in memory fails.
#
# How to read these figures: a multiprocessor has four schedulers, each of which issues one instruction a cycle. An mma
# keeps a scheduler's tensor core busy for 8 cycles on sm_80 and for about 6.5 on sm_90 (4 through wgmma), an
# exponential (MUFU) takes 8, and an ldmatrix.x4 takes 4 cycles of the shared memory of all four. So a loop is near the
# limit of the tensor cores if it has at most 6 instructions per mma, and fewer than 2 ldmatrix per 5 mma. A loop with
# wgmma works at 64 keys for the 16 rows of a warp.
set -uo pipefail
# shellcheck source=dev/checks.sh
. "$(dirname "$0")/checks.sh"
source=${1:-train_nsa.cu} cuobjdump=${CUOBJDUMP:-cuobjdump} log=$work/log
if ! command -v "${NVCC:-nvcc}" >/dev/null; then
    skipped "kernel_report.sh, as nvcc is not there"
    finish
fi
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
        // By tiles there is one for the compressed branch, and one for the others.
        const size_t compiled =
            std::bitset<32>(row.head_dimensions).count() * (row.branches == EVERY_BRANCH ? 2 : 1);
        std::printf("ROW %d%s %s %s %zu\n", row.capability, row.exact ? "a" : "", row.name, row.forward,
                    compiled ? compiled : 1);
    }
}
EOF
# The loops in the machine code of $work/cubin, a line each.
count_loops() {
    "$cuobjdump" -sass "$work/cubin" | c++filt | awk -v arch="$arch" '
        # A loop goes from the target of a backward branch to the branch. Of loops that share an mma the shortest
        # counts: the others surround it, or return from rare code behind it.
        function report(   b, i, first, count, j, start, end, shorter) {
            for (b = 1; b <= branches; b++) {
                first = place[target[b]]
                if (!mma(first, from[b])) continue
                shorter = 0
                for (j = 1; j <= branches; j++) {
                    start = place[target[j]] > first ? place[target[j]] : first
                    end = from[j] < from[b] ? from[j] : from[b]
                    if (from[j] - place[target[j]] < from[b] - first && mma(start, end)) shorter = 1
                }
                if (shorter) continue
                split("", count)
                products = 0
                for (i = first; i <= from[b]; i++) {
                    count[kind[i]]++
                    products += kind[i] == "HMMA" ? 1 : kind[i] == "HGMMA" ? columns[i] / 8 : 0
                }
                bad = (count["divide"] ? " INTEGER DIVISION" : "") (count["local"] ? " LOCAL MEMORY" : "")
                printf "%s %s %-44s %4d instructions for %3d mma: %4.1f each; ",
                    bad ? "FAIL" : "ok  ", arch, name, from[b] - first + 1, products,
                    (from[b] - first + 1) / products
                if (count["HGMMA"]) printf "by %2d wgmma, ", count["HGMMA"]
                printf "ldmatrix %2d, exponentials %2d, branches %d%s\n", count["LDSM"], count["exp"], count["BRA"], bad
            }
        }
        function mma(first, last,   i, n) { for (i = first; i <= last; i++) n += kind[i] ~ /^HG?MMA$/; return n }
        /Function : / {
            report()
            name = $0; sub(/.*Function : (void )?/, "", name)
            gsub(/\(Branch\)|\(int\)|\(bool\)/, "", name); sub(/\(Multiplier\)0/, "WARP", name)
            sub(/\(Multiplier\)1/, "WARPGROUP", name); sub(/\(.*/, "", name)
            sub(/<0, /, "<CMP, ", name); sub(/<1, /, "<SLC, ", name); sub(/<2, /, "<WIN, ", name)
            sub(/<1u, /, "<COMPRESSED, ", name); sub(/<6u, /, "<OTHERS, ", name)
            lines = branches = 0; split("", place); split("", kind)
        }
        match($0, /\/\*[0-9a-f]+\*\/ +[@A-Z]/) {
            at = $1; gsub(/[\/*]/, "", at); sub(/^0+/, "", at)
            line = $0; sub(/^[^@A-Z]*/, "", line); sub(/ *;.*/, "", line); sub(/^@!?U?P[T0-9]+ /, "", line)
            place[at] = ++lines; op = line; sub(/[ .].*/, "", op)
            if (match(line, /^HGMMA\.64x[0-9]+/)) columns[lines] = substr(line, 10, RLENGTH - 9)
            kind[lines] = line ~ /^I2F.*RP/ ? "divide" : line ~ /^MUFU.EX2/ ? "exp" : op ~ /^(LDL|STL)$/ ? "local" : op
            if (op == "BRA" && match(line, /0x[0-9a-f]+/)) {
                to = substr(line, RSTART + 2, RLENGTH - 2); sub(/^0+/, "", to)
                if (to in place && to != at) { target[++branches] = to; from[branches] = lines }
            }
        }
        END { report() }' | sort -u
}

archs=${ARCHS:-$(awk '$1 == "ARCH" { print $2 }' "$log.rows")}
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
            gsub(/\(Branch\)|\(int\)|\(bool\)/, "", name); sub(/\(Multiplier\)0/, "WARP", name)
            sub(/\(Multiplier\)1/, "WARPGROUP", name); sub(/\(.*/, "", name); sub(/^void /, "", name)
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
        FILENAME == ARGV[1] { name = $3; sub(/<.*/, "", name); count[name (/, WARPGROUP>/ ? "<WARPGROUP>" : "")]++; next }
        $1 == "ROW" && ($2 ~ /a$/ ? "sm_" $2 == arch : $2 <= substr(arch, 4) + 0) {
            printf "%s %s %s: %d of %d kernels %s\n", count[$4] == $5 ? "ok  " : "FAIL", arch, $3, count[$4], $5, $4
        }' "$log.kernels" "$log.rows" | cat "$log.kernels" "$log.wgmma" "$log.waits" - >"$log.table"
    case $arch in sm_80 | sm_90a)
        if ! command -v "$cuobjdump" >/dev/null; then echo "skipped: loops of $arch, as $cuobjdump is not there"
        elif count_loops >"$log.loops" && [ -s "$log.loops" ]; then cat "$log.loops"
        else echo "FAIL $arch: no loop with mma: does $cuobjdump print another form of machine code?"; fi ;;
    esac >>"$log.table"
    cat "$log.table"
    passed=$((passed + $(grep -c '^ok' "$log.table"))) failed=$((failed + $(grep -c '^FAIL' "$log.table")))
done
if [ $((passed + failed)) -eq 0 ]; then
    echo "no kernel was counted: nvcc knows none of ${archs//$'\n'/ }, or $source has none"
    failed=1
fi
finish
