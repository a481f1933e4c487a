#!/usr/bin/env bash
# Train the default task, on all GPUs of this machine, or on two CPU processes. Arguments go to dist_amp.train:
#   bash launch/demo.sh --train.steps 50 --precision.dtype fp16
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

export DIST_AMP_COMMAND="bash $0 ${*@Q}" # for the line that says how a stopped run continues
exec "$PYTHON" -m dist_amp.demo "$@"
