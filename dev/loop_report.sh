#!/usr/bin/env bash
# What the inner loops of the tensor-core kernels consist of on sm_80 and sm_90a, counted in the machine code:
# instructions per mma (m16n8k16; a wgmma counts as those that each of its warps would need: 8 for 64 columns), ldmatrix,
# exponentials, branches. Every instruction of the loop counts, also those that most passes jump over, such as masks. A
# loop with an integer division (some 20 instructions) or with a register in memory fails.
#     dev/loop_report.sh [SOURCE]        default train_nsa.cu
# Needs nvcc, and cuobjdump, which comes with it (if it is elsewhere: CUOBJDUMP=). Ends with "N passed, N failed".
#
# How to read the figures: a multiprocessor has four schedulers, each of which issues one instruction a cycle. An mma
# keeps a scheduler's tensor core busy for 8 cycles on sm_80 and for about 6.5 on sm_90 (4 through wgmma), an
# exponential (MUFU) takes 8, and an ldmatrix.x4 takes 4 cycles of the shared memory of all four. So a loop is near the
# limit of the tensor cores if it has at most 6 instructions per mma, and fewer than 2 ldmatrix per 5 mma. A loop with
# wgmma works at 64 keys for the 16 rows of a warp.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.." || exit 2
source=${1:-train_nsa.cu} nvcc=${NVCC:-nvcc} cuobjdump=${CUOBJDUMP:-cuobjdump}
for tool in "$nvcc" "$cuobjdump"; do
    command -v "$tool" >/dev/null && continue
    echo "skipped: loop_report.sh, as $tool is not there"
    echo "0 passed, 0 failed"
    exit 0
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0 passed=0
for arch in sm_80 sm_90a; do
    if ! "$nvcc" -x cu -std=c++17 -O3 -gencode="arch=compute_${arch#sm_},code=$arch" -diag-suppress 1675 \
        -Xcompiler -w -DUSE_CUDA -DNSA_WITHOUT_MAIN -cubin -o "$work/cubin" "$source" >"$work/log" 2>&1; then
        cat "$work/log"
        echo "$source does not compile for $arch"
        failed=$((failed + 1))
        continue
    fi
    "$cuobjdump" -sass "$work/cubin" | c++filt | awk -v arch=$arch '
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
            gsub(/\(Branch\)|\(int\)|\(bool\)/, "", name); sub(/\(.*/, "", name)
            sub(/<0, /, "<CMP, ", name); sub(/<1, /, "<SLC, ", name); sub(/<2, /, "<WIN, ", name)
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
        END { report() }' >"$work/table"
    sort -u "$work/table"
    passed=$((passed + $(grep -c '^ok' "$work/table"))) failed=$((failed + $(grep -c '^FAIL' "$work/table")))
done
if [ $((passed + failed)) -eq 0 ]; then
    echo "no loop with mma was found: does $cuobjdump print another form of machine code?"
    failed=1
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
