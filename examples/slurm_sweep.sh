#!/bin/bash
# Workers of a sweep as a Slurm job array: sbatch --array=0-15 slurm_sweep.sh sweep.toml [options of both verbs below]
#SBATCH --job-name=paredown
#SBATCH --array=0-15
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --gpus=1
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=paredown-%A_%a.log
set -euo pipefail
: "${PAREDOWN_STORE:?Set PAREDOWN_STORE to the PostgreSQL URL of the store}"
sweep="$(realpath "$1")"
shift
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="$OMP_NUM_THREADS" # srun does not take --cpus-per-task from sbatch
if [ "${SLURM_ARRAY_TASK_ID}" -eq "${SLURM_ARRAY_TASK_MIN}" ]; then
    exec srun paredown sweep run "$sweep" "$@" # adds the trials, then works on them
fi
exec srun paredown worker --tasks "$(dirname "$sweep")" --wait 12h "$@"
