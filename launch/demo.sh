#!/usr/bin/env bash
# Train on the embedded dataset, on all GPUs of this machine, or on two CPU processes. Arguments go to dist_amp.train:
#   bash launch/demo.sh --train.steps 50 --precision.dtype fp16
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# This machine's native precision, unless "$@" or the environment choose one: emulated bf16 makes the demo 10 times slower.
ask='import sys; from dist_amp.config.native_precision import suggestion; print(suggestion(sys.argv[1:]))'
answer="$("$PYTHON" -c "$ask" "$@")"
read -r dtype reason <<<"$answer"
precision=()
case "$dtype" in
fp32) precision=(--use_amp false) dtype=float32 ;;
fp16) precision=(--precision.dtype fp16) ;;
esac
[ -z "$dtype" ] || echo "precision  $dtype: $reason; choose with --precision.dtype bf16|fp16 or --use_amp false" >&2

exec "$PYTHON" -m dist_amp.launch --config "$root/configs/demo.toml" "${precision[@]}" "$@"
