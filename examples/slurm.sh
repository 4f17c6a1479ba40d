#!/bin/bash
# Several nodes under SLURM: one torchrun on each, which meet on the first node of the job.
#
#   sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh examples/train_gpt.py --steps 1000
#
# RANKS_PER_NODE is the number of GPUs of a node unless set, PORT where the nodes meet, PYTHON which one runs.
# Without SLURM the same torchrun line on every node does: torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d \
#   --rdzv-id any-name --rdzv-endpoint first-node:29500 examples/train_gpt.py
#SBATCH --job-name=zhooks
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.out
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch [options of sbatch] $0 SCRIPT [options of the script]" >&2
    exit 2
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-$ranks} / ranks > 0 ? ${SLURM_CPUS_PER_TASK:-$ranks} / ranks : 1))}

# One task a node: torchrun starts the node's ranks, and a node that fails takes the others with it.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$ranks" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:${PORT:-29500}" \
    "$@"
