#!/usr/bin/env bash
# The program for machines that are not here, in parts:
#     aarch64   Linux: built by Debian's cross compiler, run by qemu-user, `check` and six steps, whose losses are
#               compared with those of this machine's ./train_nsa
#     clang     by zig's clang: macOS on Apple's processors, compiled and linked; musl (Alpine), which runs here
#     amd       AMD's GPUs, of waves of 32 lanes and of 64: compiled by hipcc with the device tests; a step without a
#               GPU; counts the kernels in it
#     dev/other_machines_check.sh [PART...]        BUILD=build GPU_ARCH=gfx1030,gfx90a; all parts without a word
# As root it installs what it needs with apt-get; zig comes from PyPI into a temporary folder. What cannot be had is
# said and left out. Ends with "N passed, N failed".
set -uo pipefail
. "$(dirname "$0")/checks.sh"
# shellcheck disable=SC2317  # a part is called by its name
build=${BUILD:-build} arch=${GPU_ARCH:-gfx1030,gfx90a} llvm=${LLVM:-/usr/lib/llvm-15/bin}
# build FOLDER SETTING...: the plain CPU program in a folder of its own.
build() {
    build_once "$@" NO_CUDA=1 NO_MPI=1 "$1/train_nsa"
}

aarch64() {
    if ! have aarch64-linux-gnu-g++ g++-aarch64-linux-gnu || ! have qemu-aarch64 qemu-user; then
        skipped "no aarch64-linux-gnu-g++ and qemu-aarch64, so nothing was tried for aarch64"
        return
    fi
    local there=(env QEMU_LD_PREFIX=/usr/aarch64-linux-gnu qemu-aarch64 "$build/aarch64/train_nsa")
    local small=(--model tiny --seq-len 128 --total-batch 256 --batch 1 --threads 1 --sample-tokens 0 --eval-batches 1
        --steps 6)
    good "aarch64: builds" build "$build/aarch64" CXX=aarch64-linux-gnu-g++ MARCH= || return
    good "aarch64: check" "${there[@]}" check
    good "aarch64: six steps" "${there[@]}" "${small[@]}" --out "$work/aarch64"
    good "this machine: six steps" ./train_nsa --device cpu "${small[@]}" --out "$work/here"
    good "aarch64 learns what this machine does" same_losses 6 "$work/here" "$work/aarch64"
}

clang() {
    local zig=$work/zig/bin/python3
    if ! python3 -m venv "$work/zig" >/dev/null 2>&1 || ! "$zig" -m pip -q install ziglang >/dev/null 2>&1; then
        skipped "no ziglang, so nothing was tried for macOS and musl"
        return
    fi
    good "macOS: compiles and links" build "$build/macos" CXX="$zig -m ziglang c++ -target aarch64-macos" MARCH= \
        NO_OMP=1
    good "macOS: a program for it" [ "$(head -c 4 "$build/macos/train_nsa" | od -An -tx4)" = " feedfacf" ]
    good "musl: builds" build "$build/musl" CXX="$zig -m ziglang c++ -target x86_64-linux-musl" MARCH= NO_OMP=1 &&
        good "musl: check" "$build/musl/train_nsa" check
    rm -f a.o a.out  # which zig leaves where a probe links to /dev/null
}

# Each kernel has a descriptor, NAME.kd, in the code objects within the program, of which there is one for each GPU.
has_kernels() {
    local each
    objcopy --dump-section ".hip_fatbin=$work/fatbin" "$build/hip/train_nsa" /dev/null || return
    for each in ${arch//,/ }; do
        "$llvm/clang-offload-bundler" --unbundle --type=o --targets="hipv4-amdgcn-amd-amdhsa--$each" \
            --input="$work/fatbin" --output="$work/code_object" &&
            "$llvm/llvm-readelf" --dyn-syms --wide "$work/code_object" | grep '\.kd$' || return
    done
}
amd() {
    have hipcc hipcc || { skipped "no hipcc, so nothing was built for AMD's GPUs" && return; }
    # Not in one piece: g++ compiles some of it, hipcc the rest, and both have to agree on what they share.
    good "$arch: builds" env MAKEFLAGS= make -s WERROR=1 BUILD="$build/hip" GPU=hip GPU_ARCH="$arch" \
        "$build/hip/train_nsa" "$build/hip/test_device" || return
    good "$arch: a step on the processor, and a checkpoint" "$build/hip/train_nsa" --device cpu --model tiny \
        --seq-len 64 --total-batch 64 --batch 1 --steps 1 --sample-tokens 0 --eval-batches 1 --out "$work/hip"
    good "$arch: the program holds kernels for it" has_kernels && echo "     $(wc -l <"$work/output") of them"
}

[ $# -gt 0 ] || set -- aarch64 clang amd
for part; do
    case $part in
    aarch64 | clang | amd) "$part" ;;
    *)
        echo "other_machines_check.sh: $part: expected aarch64, clang or amd" >&2
        exit 2
        ;;
    esac
done
finish
