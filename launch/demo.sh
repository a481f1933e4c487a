#!/usr/bin/env bash
# Train with configs/demo.toml, on all GPUs of this machine, or in two CPU processes. Arguments go to dist_amp.train:
#   bash launch/demo.sh --train.steps 50 --precision.dtype fp16
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ -f "$root/dist_amp/commands/demo.py" ] && [ -f "$root/dist_amp/commands/launch.py" ]; then
    exec "$PYTHON" -m dist_amp.demo "$@"
fi
# A project may have been made without these two features: then torchrun starts the ranks.
ranks="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node="$ranks" \
    -m dist_amp.train --config "$root/configs/demo.toml" "$@"
