#!/usr/bin/env bash
# Run the tests. Arguments go to pytest:
#   bash launch/test.sh -k accumulation
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Two processes share the test files. One process is used for a debugger, for a single test, and with -m, which selects
# tests that need the machine for themselves.
parallel=(-n 2 --dist loadfile)
for word in "$@"; do
    case "$word" in
    -n* | --numprocesses* | -m* | -s | --capture* | --pdb* | --trace | --co | --collect-only | *::*) parallel=() ;;
    esac
done
"$PYTHON" -c 'import xdist' 2>/dev/null || parallel=() # DIST_AMP_PYTHON may lack it

cd "$root"
exec "$PYTHON" -m pytest "${parallel[@]}" "$@"
