# checks.sh: what dev/*_check.sh and dev/kernel_report.sh share, which source it first: --help prints the comment at
# their head, and they go on in the root folder, with a folder $work for the time of the check.
# shellcheck shell=bash
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.." || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# good NAME COMMAND...: counts the command's success; what it printed is shown where it fails.
good() {
    local name=$1
    shift
    if "$@" >"$work/output" 2>&1; then
        echo "ok   $name"
        passed=$((passed + 1))
    else
        echo "FAIL $name: $*"
        sed 's/^/    /' "$work/output" | tail -30
        failed=$((failed + 1))
        return 1
    fi
}
skipped() { echo "skipped: $*"; }
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

# install_as_root PACKAGE...: of Debian's; waits for another check that installs.
install_as_root() {
    [ "$(id -u)" -eq 0 ] &&
        DEBIAN_FRONTEND=noninteractive apt-get install -o DPkg::Lock::Timeout=300 -y -qq --no-install-recommends "$@" \
            >/dev/null 2>&1
}
# have COMMAND PACKAGE: whether the command is there, if need be after the package was installed.
have() { command -v "$1" >/dev/null || { install_as_root "$2" && command -v "$1" >/dev/null; }; }

# build_once FOLDER SETTING... GOAL...: what is built for a check alone, in a folder of its own, at the least cost.
build_once() { MAKEFLAGS='' make -s APART= LEVEL=-O1 WERROR=1 BUILD="$1" "${@:2}"; }

# Steps and losses of the run in a folder.
losses() { sed -nE 's/.*"step": ?([0-9]+),.*"loss": ?([0-9.]+).*/\1 \2/p' "$1/log.jsonl"; }
# same_losses STEPS FOLDER FOLDER: another engine, compiler or number of ranks adds in another order, which is 2^-24 of
# a sum; steps as few as these keep that far below one in ten thousand.
same_losses() {
    paste -d' ' <(losses "$2") <(losses "$3") | awk -v steps="$1" '
        { print; n++; d = $2 - $4; if ($1 != $3 || !(d * d <= 1e-8 * $2 * $2)) bad = 1 }
        END { if (n != steps || bad) { print n " steps compared, not the same losses"; exit 1 } }'
}
