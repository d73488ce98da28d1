#!/usr/bin/env bash
# deps.sh: `make deps`: installs what train_nsa needs and the machine lacks: a C++ compiler and an MPI (MPICH, whose
# mpirun works as root too; on Ubuntu 24.04, whose MPICH starts every rank alone, Open MPI). Prints what it does. On
# systems without apt-get it prints what to install.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

mpi=(mpich libmpich-dev)
grep -qs '_CODENAME=noble' /etc/os-release && mpi=(openmpi-bin libopenmpi-dev)
missing=()
command -v g++ >/dev/null || missing+=(g++)
if ! command -v mpicxx >/dev/null || ! command -v mpirun >/dev/null; then
    missing+=("${mpi[@]}")
elif [ "${mpi[0]}" != mpich ] && [[ $(mpicxx -show 2>/dev/null) == */usr/include/*mpich* ]]; then
    # The package's own; one that was built by hand is not in /usr.
    echo "deps: the MPICH of Ubuntu 24.04, which is installed, starts every rank alone; Open MPI, which is installed" \
        "beside it, becomes the system's mpicxx (if not: make MPICXX=mpicxx.openmpi, mpirun.openmpi)"
    missing+=("${mpi[@]}")
fi

if [ ${#missing[@]} -eq 0 ]; then
    echo "deps: nothing is missing (g++ and mpicxx are there)"
    exit 0
fi
if [ "$(uname)" = Darwin ]; then
    echo "deps: on macOS: xcode-select --install && brew install libomp open-mpi; one process needs neither of" \
        "the two" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "deps: this system has no apt-get; install by hand what these Debian packages hold: ${missing[*]}" >&2
    exit 1
fi
sudo=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || {
        echo "deps: missing: ${missing[*]}; not root and no sudo; as root: apt-get install ${missing[*]}" >&2
        exit 1
    }
    sudo=(sudo)
fi
echo "deps: installing ${missing[*]} with apt-get"
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
echo "deps: installed ${missing[*]}"
