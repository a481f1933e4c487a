#!/usr/bin/env bash
# Run the tests. Arguments go to pytest:
#   bash launch/test.sh -k accumulation
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

cd "$root"
exec "$PYTHON" -m pytest "$@"
