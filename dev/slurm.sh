#!/usr/bin/env bash
# Trains on the GPUs of several nodes under Slurm and survives the end of its time:
#     sbatch dev/slurm.sh                                  125M parameters on FineWeb-Edu
#     sbatch dev/slurm.sh --model 125m --out runs/a ...    these options instead
# Two minutes before the limit Slurm sends SIGUSR1 to the ranks; they finish their step, write a checkpoint and exit
# with 75, and the job is queued again. The same happens on preemption (SIGTERM). --resume, which is added, starts a new
# run where there is nothing to resume. Ranks find each other by MPI where the program was built with one, else by NCCL
# at the first node's name. The run's folder (--out) has to be on a file system that all nodes see.
#SBATCH --job-name=train_nsa
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;; esac

options=("$@")
if [ $# -eq 0 ]; then
    options=(--model 125m --vocab-dir data/gpt2 --data 'data/fineweb_edu/fineweb_edu_train_*.bin'
        --val-data 'data/fineweb_edu/fineweb_edu_val_*.bin' --out runs/fineweb_edu --save-every 500 --keep 3)
fi
MASTER_ADDR=$(scontrol show hostnames | sed -n 1p)
export MASTER_ADDR SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # which srun does not take from sbatch itself
# What this program's MPI needs of srun: pmi2 for MPICH, pmix for Open MPI.
pmi=$(./train_nsa --version | sed -n 's/.*srun --mpi=//p')
srun --mpi="${pmi:-none}" --kill-on-bad-exit=1 ./train_nsa "${options[@]}" --resume &
# `scancel --signal=USR1 --batch` reaches this shell alone, and --full the shell and the ranks: it passes the wish on,
# and lives. An error of one rank is 137 here where srun had to kill the others.
step=$!
trap 'kill -USR1 "$step"' USR1 TERM
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    status=$?
done
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
