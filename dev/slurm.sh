#!/usr/bin/env bash
# Trains on the GPUs of several nodes under Slurm and survives the end of its time: sbatch dev/slurm.sh
# Two minutes before the limit Slurm sends SIGUSR1 to the ranks; they finish their step, write a checkpoint and exit
# with 75, and the job is queued again. The same happens on preemption (SIGTERM). --resume starts a new run where there
# is nothing to resume. With NCCL neither PMI nor PMIx is needed: ranks find each other by Slurm's own variables, at the
# first node's name. Ranks on CPUs need MPI: start them with mpirun in place of srun. The run's folder (--out) has to be
# on a file system that all nodes see.
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
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0 ;; esac

srun --kill-on-bad-exit=1 ./train_nsa --model 125m --vocab-dir data/gpt2 \
    --data 'data/fineweb_edu_train_*.bin' --val-data 'data/fineweb_edu_val_*.bin' \
    --out runs/fineweb_edu --save-every 500 --keep 3 --resume "$@"
status=$?
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
