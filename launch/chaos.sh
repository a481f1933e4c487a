#!/usr/bin/env bash
# Break real runs in every known way, check that nothing is lost, and print a table. About twenty minutes on 2 cores:
#   bash launch/chaos.sh                 # all trials
#   bash launch/chaos.sh --quick hangs   # fewer trials, or only some of them
#   bash launch/chaos.sh --any_world     # bit-exact runs, killed and continued on other ranks by other strategies
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cd "$root"
exec env PYTHONPATH="$root/tests${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" tests/chaos.py "$@"
