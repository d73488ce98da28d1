#!/usr/bin/env bash
# Makes the GPU table of dev/BENCHMARKS.md from a report of dev/gpu_check.sh: from its head line, and from its lines
# "result: what | figure | unit | conditions", wherever they are.
#     dev/results_table.sh REPORT.md                       prints the table
#     dev/results_table.sh REPORT.md dev/BENCHMARKS.md     puts it between that page's lines <!-- gpu table -->
#                                                          and <!-- end of gpu table -->
# It marks figures of a part that failed or was stopped elsewhere. Several reports may be joined into one file.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
die() { echo "results_table.sh: $1" >&2; exit 2; }
[ $# -eq 1 ] || [ $# -eq 2 ] || die "usage: dev/results_table.sh REPORT.md [dev/BENCHMARKS.md]"
[ -f "$1" ] || die "$1: there is no such file; dev/gpu_check.sh writes it under dev/results"

table=$(awk '
    NR == 1 { sub(/^# /, ""); title = $0 }
    /^driver / && !machine { machine = $0 }
    /^## / { section = substr($0, 4); commit = "" }
    /: exit status [0-9]/ {
        commit = match($0, /(unknown )?commit[^;]*/) ? substr($0, RSTART, RLENGTH) : "unknown commit"
        good = /: exit status 0 /
        if (!good) bad = bad (bad ? ", " : "") section
    }
    /^result: / && commit {
        split(substr($0, 9), field, / *[|] */)
        rows = rows "| " field[1] " | " field[2] " | " field[3] " | " field[4] "; " commit \
            (good ? "" : "; **its part failed elsewhere**") " |\n"
    }
    END {
        printf "%s. %s.\n\n", title, machine
        if (rows) printf "| what | figure | unit | conditions |\n|---|---|---|---|\n%s", rows
        else print "not measured"
        if (bad) printf "\nParts that failed: %s.\n", bad
    }' "$1")
if [ $# -eq 1 ]; then
    echo "$table"
    exit 0
fi
[ "$(grep -c -e '^<!-- gpu table -->$' -e '^<!-- end of gpu table -->$' "$2")" = 2 ] ||
    die "$2: there are no lines <!-- gpu table --> and <!-- end of gpu table --> to put the table between"
new=$(mktemp)
trap 'rm -f "$new"' EXIT
TABLE=$table awk '
    /^<!-- end of gpu table -->$/ { inside = 0 }
    !inside
    /^<!-- gpu table -->$/ { inside = 1; print ENVIRON["TABLE"] }' "$2" >"$new"
cat "$new" >"$2"
