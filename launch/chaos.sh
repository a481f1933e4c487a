#!/usr/bin/env bash
# Break real runs in every way we know, and see that nothing is lost; a table at the end. Some twenty minutes on 2 cores:
#   bash launch/chaos.sh                 # all of it
#   bash launch/chaos.sh --quick hangs   # a few trials, or some of them
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cd "$root"
exec env PYTHONPATH="$root/tests${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" tests/chaos.py "$@"
