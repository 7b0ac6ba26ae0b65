#!/bin/bash
# Train on several machines of a SLURM cluster: sbatch examples/slurm.sh
#
# One launcher a machine, one process a GPU. The run folder and the cache must be on a file system
# that all machines see. Not tried on a cluster yet.

#SBATCH --job-name=deepenough
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@120  # tells this script two minutes before the time is up
#SBATCH --requeue            # after a machine has failed, SLURM starts the job again
#SBATCH --open-mode=append

export OMP_NUM_THREADS=4     # cores of a machine / processes on it
export XDG_CACHE_HOME=$SLURM_SUBMIT_DIR/cache
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else restarts meet the addresses of lost processes
first_machine=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# SIGTERM makes the processes stop with a checkpoint.
time_is_up=
trap 'time_is_up=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# A lost process restarts all of them, up to three times; --resume goes on from the last checkpoint,
# and begins where there is none. The batch size counts the streams of all eight processes.
srun torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 4 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_machine:29500" \
  -m deepenough par train --data mytext.txt --out runs/cluster \
  --batch_size 64 --parallel fsdp --resume &
wait $!
status=$?

if [ -n "$time_is_up" ]; then
  wait                                # for the checkpoint
  scontrol requeue "$SLURM_JOB_ID"    # and go on in the next allocation
fi
exit "$status"
