#!/usr/bin/env bash
# Train on all GPUs of this machine, or on two CPU processes. Arguments go to dist_amp.train:
#   source .venv/bin/activate
#   bash launch/one_node.sh --config configs/ddp_fp16.toml --run.dir runs/mine
# If a rank dies, all restart from the last checkpoint. SIGTERM, SIGUSR1 and Ctrl-C save and stop; the same command
# continues.
#
# Change, here or in the environment:
#   NPROC_PER_NODE    ranks (number of GPUs, or 2)
#   MAX_RESTARTS      maximum number of restarts (3)
#   OMP_NUM_THREADS   CPU threads per rank (cores divided by ranks)
#   PYTORCH_ALLOC_CONF   torch's GPU allocator (expandable_segments:True)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds for saving after a signal (120; torch 2.11: always 30)
set -euo pipefail

fail() { echo "error: $1" >&2 && exit 64; }

command -v torchrun >/dev/null || fail "torchrun is not on the PATH; activate the environment that has torch"
python3 -m dist_amp.train --print_config "$@" >/dev/null || exit # reject bad settings here, not in each restart
answer="$(python3 -m dist_amp.commands.local_gpus "$@")" # how many, and the option that keeps ranks near them
read -r gpus numa <<<"$answer"
processes="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 2))}" cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
alloc="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-${PYTORCH_HIP_ALLOC_CONF:-expandable_segments:True}}}"
export PYTORCH_ALLOC_CONF="$alloc" # unless the environment has another: GPU memory fragments less
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # otherwise restarted ranks read the addresses of dead ones
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"

# --local-addr, because --standalone hangs without a message if the host name does not resolve.
exec torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node="$processes" --max-restarts="${MAX_RESTARTS:-3}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 ${numa:+"$numa"} -m dist_amp.train "$@"
