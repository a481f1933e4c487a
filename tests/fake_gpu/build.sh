#!/usr/bin/env bash
# Build the stand-in for a GPU against the CUDA headers of an environment whose torch is a CUDA build.
#   bash tests/fake_gpu/build.sh [.venv-cuda]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
environment="${1:-../../.venv-cuda}"

headers=("$environment"/lib/python3*/site-packages/nvidia/cu13/include)
mkdir -p build
# One file is all of them: whoever opens the driver by its name gets what is preloaded already.
gcc -std=gnu17 -shared -fPIC -O1 -w -Wl,-soname,libcuda.so.1 -o build/libcuda.so.1 fake_gpu.c \
    -I"${headers[0]}" -lpthread
ln -sf libcuda.so.1 build/libcuda.so # Triton links its launchers with it
