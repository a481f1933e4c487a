#!/usr/bin/env bash
# Install what the slow tests run the files of launch/ on: Debian's packages, and the extra `engines` into .venv.
# On another system, or without root, it says what it leaves out; the tests that need it are skipped then, and say so.
#   bash tests/engines.sh
# Only if asked, a CUDA build of torch (5 GB) in .venv-cuda, for the stand-in for a GPU (tests/gpu_stand_in/):
#   DIST_AMP_FAKE_GPU=1 bash tests/engines.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"

packages=(
    iproute2 procps                    # network namespaces: two hosts on one machine; pgrep, sysctl
    slurm-wlm munge                    # slurmctld and slurmd
    buildah mmdebstrap ca-certificates # the container: builds the Dockerfile, on a base of Debian's own packages
    chromium                           # the browser that looks at TensorBoard
)
missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
        missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
    echo "there already: ${packages[*]}"
elif [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "left out, for want of root on Debian: ${missing[*]}"
else
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "${missing[@]}"
fi

if [ -n "${DIST_AMP_PYTHON:-}" ]; then
    echo "left out, since DIST_AMP_PYTHON is used as it stands: the extra engines"
else
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$root/launch/constraints.txt" -e "${root}[test,engines]"
fi

if [ -n "${DIST_AMP_FAKE_GPU:-}" ]; then
    # The stand-in has what this release calls.
    cuda=(torch==2.14.1 nvidia-cuda-crt)
    [ -x "$root/.venv-cuda/bin/python" ] || python3 -m venv "$root/.venv-cuda"
    "$root/.venv-cuda/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c <(grep -v '^torch==' "$root/launch/constraints.txt") -e "${root}[test]" "${cuda[@]}"
fi
