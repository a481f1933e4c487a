#!/usr/bin/env bash
# Train on the embedded dataset, on all GPUs of this machine, or on two CPU processes. Arguments go to dist_amp.train:
#   bash launch/demo.sh --train.steps 50 --precision.dtype fp16
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Asks for the number of GPUs, and for this machine's native precision unless "$@" or the environment choose one:
# emulated bf16 makes the demo 10 times slower. One process for both, since importing torch takes seconds.
ask='import sys, torch; from dist_amp.runtime.native_precision import suggestion
print(torch.cuda.device_count(), suggestion(sys.argv[1:]))'
answer="$("$PYTHON" -c "$ask" "$@")"
read -r gpus dtype reason <<<"$answer"
precision=()
case "$dtype" in
fp32) precision=(--use_amp false) dtype=float32 ;;
fp16) precision=(--precision.dtype fp16) ;;
esac
[ -z "$dtype" ] || echo "precision  $dtype: $reason; choose with --precision.dtype bf16|fp16 or --use_amp false" >&2

processes=$((gpus > 0 ? gpus : 2))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(nproc) > processes ? $(nproc) / processes : 1))}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}" # seconds for saving after a signal
alloc="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-${PYTORCH_HIP_ALLOC_CONF:-expandable_segments:True}}}"
export PYTORCH_ALLOC_CONF="$alloc" # unless the environment has another: GPU memory fragments less

# --local-addr, because --standalone hangs without a message if the host name does not resolve.
# --signals-to-handle forwards the signals to the ranks, which save and exit; SIGUSR1 would otherwise end only torchrun.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node="$processes" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    -m dist_amp.train --config "$root/configs/demo.toml" "${precision[@]}" "$@"
