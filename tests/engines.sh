#!/usr/bin/env bash
# Install from Debian the engines that the slow tests launch runs on; the tests start and stop them. .ci/run calls it.
# Where it can't install, those tests are skipped, and say what they lack. To add one: a line.
set -euo pipefail

packages=(
    iproute2         # network namespaces: two hosts on one machine
    slurm-wlm munge  # slurmctld and slurmd
)

missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
        missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then exit; fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "engines: ${missing[*]} can't be installed here: it takes root on Debian"
    exit
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}"
