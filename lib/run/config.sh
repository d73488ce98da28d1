#!/usr/bin/env bash
# config.sh: what train_nsa can be built with here, found out by compiling and linking probes. Prints variables, which
# the Makefile keeps in BUILD/config.mk and reads. Settings come from the environment, by the Makefile's names.
set -u
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
NVCC=${NVCC:-nvcc}

# links HEADER FLAGS...: whether a program with them links. What the variables of flags hold is split into words.
links() {
    local header=$1
    shift
    # shellcheck disable=SC2086
    echo 'int main() { return 0; }' | $CXX $CPPFLAGS $CXXFLAGS -x c++ - -include "$header" "$@" $LDFLAGS \
        -o "$work/probe" 2>/dev/null
}
# accepted FLAG...: those of the flags that the compiler knows.
accepted() {
    local flag
    # shellcheck disable=SC2086
    for flag; do
        $CXX ${MARCH:+-march=$MARCH} -Werror "$flag" -x c++ -fsyntax-only /dev/null 2>/dev/null && printf '%s ' "$flag"
    done
}
wanted() { [ -z "${!1:-}" ]; } # wanted NO_X

echo "HAVE_COMPILER := $($CXX --version 2>/dev/null | head -1)"
# On processors with AVX-512, GCC takes 256-bit vectors by default; and it compiles the micro-kernel a second time for
# operands without gaps, with its sums in memory: half the speed in bf16. clang reports `omp simd` loops that it cannot
# vectorise; they are right all the same. Tuned for AMD's Zen, and from 14 on for nearly all of x86-64, GCC leaves
# a*b + c apart where it sees a long chain of sums: in one instance of the micro-kernel and not in the next, so that
# decoding would have other bits than the forward pass.
pass_failed=$(accepted -Wpass-failed)
flags=(-mprefer-vector-width=512 -fno-version-loops-for-strides --param=avoid-fma-max-bits=0)
echo "ACCEPTED := $(accepted "${flags[@]}")${pass_failed:+-Wno-pass-failed}"

# Apple's clang needs Homebrew's libomp. hipcc's clang and g++ have an OpenMP each; that program then has none.
omp=
if wanted NO_OMP && [ "$GPU" != hip ]; then
    libomp=$(brew --prefix libomp 2>/dev/null)
    if links omp.h -fopenmp; then
        printf 'HAVE_OMP := yes\nOMP_FLAGS := -fopenmp\n'
        omp=yes
    elif [ -n "$libomp" ] && links omp.h -Xpreprocessor -fopenmp -I"$libomp/include" -L"$libomp/lib" -lomp; then
        echo "HAVE_OMP := yes"
        echo "OMP_FLAGS := -Xpreprocessor -fopenmp -I$libomp/include"
        echo "OMP_LIBS := -L$libomp/lib -lomp"
        omp=yes
    fi
fi

# The compiler wrappers of MPICH and Open MPI both print what they would run. All behind the compiler, which may be two
# words (ccache g++), is used: an MPI outside /usr says by -Wl,-rpath where its library lies. Intel's puts paths in
# quotes, as for a shell.
if wanted NO_MPI && shown=$($MPICXX -show 2>/dev/null); then
    words=() compile='' link='' before=''
    while read -r word; do
        [[ ${#words[@]} -gt 0 || $word == -* ]] || continue
        words+=("$word")
        case $word in *[!a-zA-Z0-9_./,:=+@%-]*) quoted=$(printf %q "$word") ;; *) quoted=$word ;; esac
        quoted=${quoted//$/\$\$} # for make
        case $before$word in
        -[ID]* | -isystem*) compile="$compile $quoted" ;;
        -O* | -g | -flto* | -ffat-lto-objects) ;; # of the MPI's own compilation, as Ubuntu 26.04 shows them
        *) link="$link $quoted" ;;
        esac
        case $word in -[ID] | -isystem) before=$word ;; *) before='' ;; esac
    done < <(xargs -n 1 printf '%s\n' <<<"$shown")
    if links mpi.h "${words[@]}"; then
        printf 'HAVE_MPI := yes\nMPI_FLAGS :=%s\nMPI_LIBS :=%s\n' "$compile" "$link"
    fi
fi

nvcc=$(wanted NO_CUDA && [ "$GPU" = cuda ] && command -v "$NVCC")
if [ -n "$nvcc" ]; then
    echo "HAVE_CUDA := $nvcc"
    echo "CUDA_VERSION := $("$NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
    # Of the newest GPU here, such as 90. What nvcc is too old or too new for runs PTX, if anything.
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
        sed -n 's/^\([0-9]*\)\.\([0-9]*\)$/\1\2/p' | sort -n | tail -1)
    "$NVCC" --list-gpu-arch | grep -qx "compute_$found" && echo "GPU_FOUND := $found" || echo "GPU_UNKNOWN := $found"
    # nvcc compiles the kernels of one PTX on several cores, where it can: 12.4 knows the option and its own compiler
    # does not. So a kernel is compiled, and nothing may be complained of.
    echo '__global__ void kernel() {}' >"$work/probe.cu"
    [ -z "$("$NVCC" -ccbin "$CXX" --split-compile 0 -arch=sm_80 -cubin "$work/probe.cu" -o "$work/probe" 2>&1)" ] &&
        echo "SPLIT_COMPILE := --split-compile 0"
    toolkit=$(dirname "$nvcc")/..
    wanted NO_NCCL && links nccl.h -I"$toolkit/include" -L"$toolkit/lib64" -lnccl && echo "HAVE_NCCL := yes"
fi
exit 0
