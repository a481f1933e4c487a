#!/usr/bin/env bash
# Train the default task, on all GPUs of this machine, or on two CPU processes. Arguments go to dist_amp.train:
#   bash launch/demo.sh --train.steps 50 --precision.dtype fp16
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec "$PYTHON" -m dist_amp.demo "$@"
