#!/bin/sh
# Everything that wants a GPU, on a machine that has one: under eight minutes, into gpu.json (or what --out says).
# With --dry the same on the CPU at toy sizes, in less than a minute. The torch that is there serves, from 2.11 on.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8  # without it cuBLAS is not deterministic
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
