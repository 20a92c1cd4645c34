#!/usr/bin/env bash
# Trains on nodes of four GH200 superchips under SLURM, as JUPITER has them:
#
#   sbatch examples/slurm_jupiter.sh                              # the 952-billion-parameter shape on 384 GPUs
#   RUN=runs/try sbatch --nodes 2 examples/slurm_jupiter.sh --preset tiny --seq-len 256    # flags of its `train`
#
# Submitted again with the same RUN it goes on from the last complete state, on any number of nodes.
# It has not been run: neither it nor the package has met a GPU yet. Take it as a list of what has to be decided.

#SBATCH --job-name=functional-moe
#SBATCH --nodes=96
# One task a node: torchrun, which starts one process for each of the node's GPUs and watches them.
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
# All 4 x 72 Grace cores: the processes share them as --numa-binding says below.
#SBATCH --cpus-per-task=288
#SBATCH --exclusive
#SBATCH --time=06:00:00
# Five minutes before the end every process gets SIGTERM: the run finishes its step, saves, and can be resumed.
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.out

set -euo pipefail

# On a file system that all nodes share: checkpoints are written there by all processes.
run=${RUN:-$PWD/runs/jupiter-952b}
# Tokenised before (`functional-moe tokenize`), because all processes would wait for the first to do it.
data=${DATA:-$PWD/tokens.bin}

gpus_per_node=4
# Experts are exchanged for every layer and token: inside a node, over NVLink.
ep=$gpus_per_node
# All other parameters are split over what is left; with 96 x 4 = 384 GPUs each has one whole expert of every layer,
# and Muon needs no communication for experts.
fsdp=$((SLURM_JOB_NUM_NODES * gpus_per_node / ep))

# SLURM passes --cpus-per-task on to srun only by this variable.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-288}
# Threads of a process on the host; the rest of its 72 cores serve copies and checkpoints.
export OMP_NUM_THREADS=32
# Rendezvous, gloo (settings, checkpoints) and NCCL's first contact go over the InfiniBand network's IP interface;
# NCCL finds the four adapters for its data itself.
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
# Wait longer for an acknowledgement, 2^22 x 4 microseconds = 17 s: links of a large machine come and go.
export NCCL_IB_TIMEOUT=22
# Parameters are gathered into buffers of changing sizes: segments that grow fragment less.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# The processes find each other at the job's first node. On JUPITER's sister machines the name with an "i" appended is
# the address on InfiniBand; set RENDEZVOUS_SUFFIX= where it is not.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
rendezvous=$first_node${RENDEZVOUS_SUFFIX-i}:29500

arguments=(--out "$run" --fsdp "$fsdp" --ep "$ep")
if [[ -e $run/settings.json ]]; then
    arguments+=(--resume)
else
    # One sequence a GPU and step. Later flags win over these.
    arguments+=(--preset jupiter-952b --data "$data" --batch-size "$((fsdp * ep))" --seq-len 4096)
fi

launcher=(
    torchrun
    --nnodes "$SLURM_JOB_NUM_NODES"
    --nproc-per-node "$gpus_per_node"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-backend c10d
    --rdzv-endpoint "$rendezvous"
    # A process that fails ends the job; the state on disk is what a new job starts from.
    --max-restarts 0
    # Each process on the cores and the memory beside its GPU.
    --numa-binding node
    # How long torchrun waits for a step and its save after SIGTERM, before it kills.
    --shutdown-timeout 270
)
# A node that fails ends the others at once, which would otherwise wait for NCCL's time-out.
srun --kill-on-bad-exit=1 --cpu-bind=none "${launcher[@]}" -m functional_moe train "${arguments[@]}" "$@"
