#!/usr/bin/env bash
# Do the program and the tests of the device still build for AMD's GPUs? Compiles and links them with hipcc (make
# GPU=hip), and counts the program's kernels in the machine code for the GPU. Nothing runs.
#     dev/hip_check.sh        GPU_ARCH=gfx1030 BUILD=build/hip
# As root it installs hipcc with apt-get; without it nothing is tried. Ends with "N passed, N failed".
set -uo pipefail
. "$(dirname "$0")/checks.sh"
build=${BUILD:-build/hip} arch=${GPU_ARCH:-gfx1030} llvm=${LLVM:-/usr/lib/llvm-15/bin}
if ! have hipcc hipcc; then
    skipped "no hipcc, so nothing was built for AMD's GPUs"
    finish
fi
good "$arch: builds" env MAKEFLAGS='' make -s GPU=hip GPU_ARCH="$arch" BUILD="$build" "$build/train_nsa" \
    "$build/test_device" || finish

# Each kernel has a descriptor, NAME.kd, in the code object within the program.
has_kernels() {
    objcopy --dump-section ".hip_fatbin=$work/fatbin" "$build/train_nsa" /dev/null &&
        "$llvm/clang-offload-bundler" --unbundle --type=o --targets="hipv4-amdgcn-amd-amdhsa--$arch" \
            --input="$work/fatbin" --output="$work/code_object" &&
        "$llvm/llvm-readelf" --dyn-syms --wide "$work/code_object" | grep '\.kd$'
}
good "$arch: the program holds kernels for it" has_kernels && echo "     $(wc -l <"$work/output") of them"
finish
