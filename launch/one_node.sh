#!/usr/bin/env bash
# Train on all GPUs of this machine, or in two CPU processes. Arguments go to dist_amp.train:
#   source .venv/bin/activate
#   bash launch/one_node.sh --config configs/ddp_fp16.toml --run.dir runs/mine
# If a rank dies, all ranks restart from the last checkpoint. SIGTERM, SIGUSR1 and Ctrl-C save and stop, with exit
# status 75; the same command with the same --run.dir continues. It runs `python3 -m dist_amp.launch`, which also
# takes torchrun's options; its --help says more.
# Docs: docs/launching.md
#
# Change, here or in the environment:
#   NPROC_PER_NODE    ranks (number of GPUs, or 2)
#   MAX_RESTARTS      maximum number of restarts (3)
#   OMP_NUM_THREADS   CPU threads per rank (cores divided by ranks)
#   PYTORCH_ALLOC_CONF   torch's GPU allocator (expandable_segments:True)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds for saving after a signal (120; torch 2.11: always 30)
set -euo pipefail

command -v torchrun >/dev/null || {
    echo "error: torchrun is not on the PATH; activate the environment that has torch" >&2
    exit 64
}
exec python3 -m dist_amp.launch ${NPROC_PER_NODE:+--nproc-per-node="$NPROC_PER_NODE"} \
    --max-restarts="${MAX_RESTARTS:-3}" "$@"
