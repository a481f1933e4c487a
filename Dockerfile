# dist_amp in an image: CUDA by default, since torch's wheels bring CUDA's libraries; the host needs the driver alone.
#   docker build -t dist_amp .
#   docker run --rm --gpus all --shm-size 8g -v dist_amp_runs:/app/runs dist_amp                 # the demo
#   docker run --rm -p 127.0.0.1:6006:6006 -v dist_amp_runs:/app/runs dist_amp tensorboard --logdir runs --host 0.0.0.0
# To change: BASE is any image with Python 3.11 or newer and its venv module. The default is pinned to a build of October
# 2026; `docker buildx imagetools inspect python:3.12-slim` shows the newest one's digest, with Debian's fixes since.
# TORCH_INDEX is where torch comes from, if not from pip's own index: pytorch.org's install page names one for ROCm and
# one for the CPU alone (a small image).
#   docker build --build-arg TORCH_INDEX=... -t dist_amp .
ARG BASE=python:3.12.15-slim-trixie@sha256:29113dcae7aad06daa8e95260fa09f27d62be33b9687ea3774f771d601a02256
FROM ${BASE}
RUN python3 -c 'import sys; found = sys.version.split()[0]; sys.version_info >= (3, 11) or \
    sys.exit(f"error: BASE has Python {found}, and dist_amp needs 3.11 or newer; give another by --build-arg BASE=")' \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app
# iproute2: launch/many_nodes.sh needs `ip`. gcc, libc6-dev: Triton compiles with them when compile.blocks=true runs on a
# GPU. numactl: torchrun binds ranks by it. git: for `dist_amp new`, and for work in a dev container. The others: NCCL's
# way to InfiniBand and RoCE; without them it uses TCP, at a fraction of the rate. Of any version, for Debian's fixes. A
# BASE without apt must bring them, or do without.
# hadolint ignore=DL3008
RUN if command -v apt-get; then apt-get update && apt-get install -y --no-install-recommends \
    iproute2 gcc libc6-dev numactl git rdma-core libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*; fi

# From what seldom changes to what often does: an edited source file builds the last layer alone.
COPY launch/constraints.txt launch/
ARG TORCH_INDEX=
RUN torch="$(grep '^torch==' launch/constraints.txt)" \
    && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c launch/constraints.txt "$torch"
COPY pyproject.toml ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = project["optional-dependencies"]; \
    wanted = sum((extras.get(name, []) for name in ("hf", "images", "float8", "plot", "test")), project["dependencies"]); \
    print(*(one for one in wanted if not one.startswith(project["name"] + "[")), sep="\n")' >/tmp/wanted.txt \
    && pip install --no-cache-dir -c launch/constraints.txt -r /tmp/wanted.txt && rm /tmp/wanted.txt

# Who trains is not root, and owns nothing here but runs/: a volume that is mounted there for the first time is theirs.
# A number, so that Kubernetes' runAsNonRoot can tell; Ubuntu has a user of that number already.
RUN { getent passwd 1000 || useradd --uid 1000 --create-home trainer; } && install -d -o 1000 -g 1000 runs
COPY . .
USER 1000
# DIST_AMP_PYTHON: demo.sh and test.sh use this Python and install nothing.
ENV PYTHONPATH=/app DIST_AMP_PYTHON=/opt/venv/bin/python
CMD ["bash", "launch/demo.sh"]
