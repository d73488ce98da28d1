#!/usr/bin/env bash
# The program for machines that are not here. aarch64 Linux: built by Debian's cross compiler, run by qemu-user, `check`
# and twenty steps, whose losses are compared with this machine's ./train_nsa. macOS: compiled and linked
# by zig's clang for Apple's own processors, nothing runs. musl (Alpine): built by zig, run here.
#     dev/other_machines_check.sh        BUILD=build
# As root it installs what it needs with apt-get; zig comes from PyPI into a temporary folder. What cannot be had is
# said and left out. Ends with "N passed, N failed".
set -uo pipefail
. "$(dirname "$0")/checks.sh"
build=${BUILD:-build}
# build FOLDER SETTING...: the plain CPU program in a folder of its own.
build() {
    local folder=$1
    shift
    MAKEFLAGS='' make -s BUILD="$folder" NO_CUDA=1 NO_MPI=1 WERROR=1 "$@" "$folder/train_nsa"
}

small=(--model tiny --seq-len 128 --total-batch 256 --batch 1 --threads 1 --sample-tokens 0 --eval-batches 1 --steps 20)

# ---- aarch64

if have aarch64-linux-gnu-g++ g++-aarch64-linux-gnu && have qemu-aarch64 qemu-user; then
    emulated=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
    if good "aarch64: builds" build "$build/aarch64" CXX=aarch64-linux-gnu-g++ MARCH=; then
        good "aarch64: check" "${emulated[@]}" "$build/aarch64/train_nsa" check
        good "aarch64: twenty steps" "${emulated[@]}" "$build/aarch64/train_nsa" "${small[@]}" --out "$work/aarch64"
        good "this machine: twenty steps" ./train_nsa --device cpu "${small[@]}" --out "$work/here"
        good "aarch64 learns what this machine does" same_losses 20 "$work/here" "$work/aarch64"
    fi
else
    skipped "no aarch64-linux-gnu-g++ and qemu-aarch64, so nothing was tried for aarch64"
fi

# ---- macOS

zig=$work/zig/bin/python3
if python3 -m venv "$work/zig" >/dev/null 2>&1 && "$zig" -m pip -q install ziglang >/dev/null 2>&1; then
    good "macOS: compiles and links" build "$build/macos" CXX="$zig -m ziglang c++ -target aarch64-macos" MARCH= \
        NO_OMP=1
    rm -f a.o a.out  # which zig leaves where a probe links to /dev/null
    good "macOS: a program for it" [ "$(head -c 4 "$build/macos/train_nsa" | od -An -tx4)" = " feedfacf" ]
    if good "musl: builds" build "$build/musl" CXX="$zig -m ziglang c++ -target x86_64-linux-musl" MARCH= NO_OMP=1; then
        good "musl: check" "$build/musl/train_nsa" check
    fi
    rm -f a.o a.out
else
    skipped "no ziglang, so nothing was tried for macOS and musl"
fi
finish
