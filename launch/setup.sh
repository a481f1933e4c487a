# Sourced by demo.sh and test.sh: sets $PYTHON to an interpreter that has dist_amp and its dependencies. It makes .venv,
# and installs again if pyproject.toml or constraints.txt has changed since: .venv/installed keeps their checksum.
# With DIST_AMP_PYTHON=PATH it uses that interpreter, such as a GPU image's with its own torch, and installs nothing.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "error: $1" >&2
    exit 64
}

if [ -n "${DIST_AMP_PYTHON:-}" ]; then
    PYTHON="$DIST_AMP_PYTHON"
    "$PYTHON" -c 'import torch, tensorboard, pydantic, tomli_w' ||
        fail "DIST_AMP_PYTHON=$DIST_AMP_PYTHON lacks a module, shown above; install it there, or unset the variable"
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
else
    PYTHON="$root/.venv/bin/python"
    stamp="$root/.venv/installed"
    checksum="$(cat "$root/pyproject.toml" "$root/launch/constraints.txt" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$checksum" ]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "python3 is missing or older than 3.11 ($(python3 --version 2>&1)); install a newer one"
        python3 -c 'import venv, ensurepip' 2>/dev/null ||
            fail "python3 has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
        echo "setting up $root/.venv (once; takes some minutes)"
        [ -x "$PYTHON" ] || python3 -m venv "$root/.venv"
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip >/dev/null # uv makes .venv without pip
        "$PYTHON" -m pip install --quiet --disable-pip-version-check \
            -c "$root/launch/constraints.txt" -e "${root}[test]" ||
            fail "pip could not install the pinned packages; the lines above say why"
        echo "$checksum" >"$stamp"
    fi
fi
