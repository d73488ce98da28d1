#!/usr/bin/env bash
# Does a test notice? The files dev/test/mutants/ROOM.txt hold faults of a line or a few, each with its name and the
# lines in which it differs. Before it stand the tests that must then fail and its file, for all that follow too:
#     tests: WORD... --only TEST
#     file: PATH
#     mutant: NAME
#     -a line as it is, which stands there once; where it does not, with lines around it, each behind a space
#     +the line with the fault
# The words are headers of dev/test, which become a program of their own, so that it compiles in seconds; those of cuda/
# run in the emulator, for heads of 64 alone, or with the word 128 for heads of 128. The word train_nsa: the tests start
# ./train_nsa, which is built too.
#     dev/test/mutants.sh [NAME...]         those, or all
#     dev/test/mutants.sh --sample 5        five, drawn at random
# The tree is copied, and what is named must pass there first without a fault. A fault that does not compile counts as
# one that no test noticed, and so does one, drawn or not, whose lines are not in its file. Needs git, g++ and make.
# Ends with "N passed, N failed".
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
faults=$work/faults names=("$@")
mkdir "$faults"
awk -v to="$faults" '/^tests: /{tests = $0; next} /^file: /{file = $0; next}
    /^mutant: /{name = to "/" $2; print tests "\n" file >name; next} !/^$/{print >name}' dev/test/mutants/*.txt
if [ "${1:-}" = --sample ]; then
    mapfile -t names < <(cd "$faults" && printf '%s\n' * | shuf -n "${2:?--sample N: how many}")
elif [ $# = 0 ]; then
    mapfile -t names < <(cd "$faults" && printf '%s\n' *)
fi
mkdir "$work/tree" "$work/sound"
git ls-files -z | tar --null --files-from=- --create --ignore-failed-read 2>"$work/log" | tar --extract -C "$work/tree"
cd "$work/tree" || exit 1
# Kernels for heads of one dimension alone compile in a fourth of the time.
sed -i 's/^    constexpr unsigned all = ATTENTION_KERNELS.TENSOR_CORES_KERNEL..head_dimensions/& \& TESTED_HEADS/' \
    lib/cuda/attention_tiles.cuh
passed=0 failed=0
good() { passed=$((passed + 1)); printf 'ok   %s\n' "$*"; }
bad() { failed=$((failed + 1)); printf 'FAIL %s\n' "$*"; }

# The headers that the words of a line of tests name, and what the test program is called.
headers_of() { tr ' ' '\n' <<<"${1%% --only*}" | grep '\.h$'; }
program_of() { tr ' /' '+_' <<<"${1%% --only*}"; }
build_tests() { # WORDS PROGRAM
    local flags=(-std=c++17 -w -pthread -fno-math-errno -fno-trapping-math) source=dev/test/planted.cpp start="" headers
    mapfile -t headers < <(headers_of "$1")
    case $1 in
    *cuda/*)
        flags+=(-O1 -Idev/emulator -DUSE_CUDA -DUSE_NCCL -fstack-clash-protection)
        case $1 in *' 128 --only'*) flags+=(-DTESTED_HEADS=128) ;; *) flags+=(-DTESTED_HEADS=64) ;; esac
        start='emu::machine.rough = true;'
        ;;
    *) flags+=(-O0 -fopenmp) ;;
    esac
    printf '#include "%s"\n' harness.h "${headers[@]}" >$source
    printf 'int main(int argc, char** argv) { %s return run_tests(argc, argv); }\n' "$start" >>$source
    "${CXX:-g++}" "${flags[@]}" $source -o "$2"
}
build() { # WORDS PROGRAM, of the tree as it is
    case $1 in train_nsa*) make -s APART= LEVEL=-O1 NO_CUDA=1 NO_MPI=1 CXXFLAGS=-w train_nsa || return ;; esac
    build_tests "$1" "$2"
}
# The last line about what is wrong, without where in a kernel's grid it was.
said() {
    { echo "the test died"; grep -avE '^(ok|FAIL) |: worst error|^[0-9]+ passed|mutants.sh: line|^$' "$work/log"; } |
        tail -1 | sed -E 's/^ +//; s/^cuda_on_cpu: (kernel .*), block .* seed [0-9]+: /\1: /; s,dev/test/(\w*/)?\.\./\.\./,,g' | cut -c1-150
}
# The file with the fault. Its lines must stand there once: then nobody needs their numbers.
plant() { # FAULT FILE
    awk 'NR == FNR {
             if (FNR > 2 && !/^\+/) right = right substr($0, 2) "\n"
             if (FNR > 2 && !/^-/) wrong = wrong substr($0, 2) "\n"
             next
         }
         { text = text "\n" $0 }
         END {
             text = text "\n"
             at = index(text, "\n" right)
             if (!at || index(substr(text, at + 1), "\n" right)) exit 1
             printf "%s", substr(text, 2, at - 1) wrong substr(text, at + 1 + length(right))
         }' "$1" "$2"
}
declare -A lost
for fault in "$faults"/*; do
    file=$(sed -n '2s/^file: //p' "$fault")
    if [ ! -f "$file" ]; then bad "${fault##*/}: no 'file: PATH' is before it"
    elif ! plant "$fault" "$file" >/dev/null; then
        bad "${fault##*/}: its lines do not stand in '$file' exactly once"
    else continue; fi
    lost[${fault##*/}]=yes
done
run_tests() { timeout 600 "$2" --only "${1##*--only }"; } # WORDS PROGRAM

# What is right must pass, else a failure with a fault says nothing.
declare -A sound
for name in "${names[@]}"; do
    [ -z "${lost[$name]:-}" ] || continue
    [ -f "$faults/$name" ] || { bad "$name: there is none in dev/test/mutants"; continue; }
    tests=$(sed -n '1s/^tests: //p' "$faults/$name") program=
    [ -n "$tests" ] || { bad "$name: no 'tests: HEADER... --only TEST' is before it"; continue; }
    [ -z "${sound[$tests]:-}" ] || continue
    program=$work/sound/$(program_of "$tests")
    sound[$tests]=no
    if ! { [ -x "$program" ] || build "$tests" "$program"; } >"$work/log" 2>&1; then
        head -20 "$work/log"
        bad "$tests does not compile"
    elif ! run_tests "$tests" "$program" >"$work/log" 2>&1; then
        tail -20 "$work/log"
        bad "$tests fails without any fault"
    else sound[$tests]=yes; fi
done

for name in "${names[@]}"; do
    fault=$faults/$name
    tests=$(sed -n '1s/^tests: //p' "$fault" 2>/dev/null)
    file=$(sed -n '2s/^file: //p' "$fault" 2>/dev/null)
    [ "${sound[${tests:-none}]:-no}" = yes ] && [ -z "${lost[$name]:-}" ] || continue
    cp "$file" "$work/right"
    plant "$fault" "$work/right" >"$file"
    if ! build "$tests" "$work/planted" >"$work/log" 2>&1; then
        head -5 "$work/log"
        bad "$name does not compile"
    elif run_tests "$tests" "$work/planted" >"$work/log" 2>&1; then bad "$name: no test of '$tests' notices"
    else good "$name: $(said)"; fi
    cp "$work/right" "$file"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
