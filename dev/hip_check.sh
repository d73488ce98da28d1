#!/usr/bin/env bash
# Do the program and the tests of the device still build for AMD's GPUs? Compiles and links them with hipcc (make
# GPU=hip), and counts the program's kernels in the machine code for the GPU. Nothing runs.
#     dev/hip_check.sh        GPU_ARCH=gfx1030 BUILD=build/hip
# Ends with "N passed, N failed".
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/.." || exit 2
build=${BUILD:-build/hip} arch=${GPU_ARCH:-gfx1030} llvm=${LLVM:-/usr/lib/llvm-15/bin}
if ! command -v hipcc >/dev/null; then
    echo "skipped: hip_check.sh, as hipcc is not there"
    echo "0 passed, 0 failed"
    exit 0
fi
MAKEFLAGS='' make -s GPU=hip GPU_ARCH="$arch" BUILD="$build" "$build/train_nsa" "$build/test_device" || {
    echo "0 passed, 1 failed"
    exit 1
}
# Each kernel has a descriptor, NAME.kd, in the code object within the program.
objcopy --dump-section ".hip_fatbin=$build/fatbin" "$build/train_nsa" /dev/null &&
    "$llvm/clang-offload-bundler" --unbundle --type=o --targets="hipv4-amdgcn-amd-amdhsa--$arch" \
        --input="$build/fatbin" --output="$build/code_object" &&
    kernels=$("$llvm/llvm-readelf" --dyn-syms --wide "$build/code_object" | grep -c '\.kd$')
echo "$arch: ${kernels:-0} kernels in $build/train_nsa"
if [ "${kernels:-0}" -eq 0 ]; then
    echo "0 passed, 1 failed"
    exit 1
fi
echo "1 passed, 0 failed"
