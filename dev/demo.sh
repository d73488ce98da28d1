#!/usr/bin/env bash
# demo.sh: `make demo TEXT=book.txt`: from one text to a model of one's own: vocabulary, shards, training, report, sample.
# Without TEXT it learns the sources of this project. STEPS=1000 trains longer (200). Prints each command before it
# runs; everything goes into build/demo, anew each time. PROGRAM=./train_nsa is the program that it takes.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.."
out=${OUT:-build/demo}
# Only what an earlier demo wrote is removed, whatever else lies there now.
if [ -n "$(ls -A "$out" 2>/dev/null)" ] && [ ! -e "$out/.made_by_demo" ]; then
    echo "demo: $out is not empty and was not made by the demo: name another folder in OUT, or remove this one" >&2
    exit 1
fi
rm -rf "$out"/{vocabulary,run,report.html,sources.txt,my_train_*.bin,my_val_*.bin}
mkdir -p "$out"
touch "$out/.made_by_demo"
if [ -n "${TEXT:-}" ]; then
    text=(--in "$TEXT")
else
    # NUL stands between two files, and so between two documents.
    find README.md CHANGELOG.md ./*.h ./*.cu ./*.cuh lib dev -type f \
        \( -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.md' -o -name '*.sh' -o -name '*.py' \) |
        LC_ALL=C sort | while read -r file; do
            cat "$file"
            printf '\0'
        done >"$out/sources.txt"
    text=(--in "$out/sources.txt" --split-documents '\0')
fi
run() {
    local word quote="'" line="${PROGRAM:-./train_nsa}"
    for word; do
        case $word in *[!-A-Za-z0-9_./]*) line="$line '${word//$quote/$quote\\$quote$quote}'" ;; *) line="$line $word" ;; esac
    done
    printf '\n$ %s\n' "$line"
    "${PROGRAM:-./train_nsa}" "$@"
}
vocabulary=(--tokenizer gpt2 --vocab-dir "$out/vocabulary")
run vocabulary "${text[@]}" --size 2048 --out "$out/vocabulary"
run tokenize "${text[@]}" --out "$out/my" "${vocabulary[@]}" --val-fraction 0.05
run train --model 2m --data "$out/my_train_*.bin" --val-data "$out/my_val_*.bin" "${vocabulary[@]}" --seq-len 512 \
    --total-batch 8192 --warmup 200K --steps "${STEPS:-200}" --sample-tokens 0 --out "$out/run"
run report --from "$out/run" --html "$out/report.html"
run sample --from "$out/run" --tokens 200
printf '\nEverything is in %s; the curves are in %s/report.html.\n' "$out" "$out"
printf 'The same with a text of your own, for longer: make demo TEXT=book.txt STEPS=3000\n'
