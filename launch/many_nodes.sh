#!/usr/bin/env bash
# Train on several machines: the same command on each, except for NODE_RANK. Arguments go to dist_amp.train:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash launch/many_nodes.sh --config hsdp_bf16 --run.dir /shared/mine
# All machines need the same code, packages and settings, and run.dir on a shared disk. If a rank dies or a machine
# loses the network, all ranks restart from the last checkpoint. If a machine is not back after RDZV_TIMEOUT seconds,
# the run ends.
# Docs: docs/launching.md
#
# Change, here or in the environment:
#   NNODES              number of machines, or MIN:MAX if machines may join and leave
#   NODE_RANK           number of this machine, from 0
#   MASTER_ADDR         an address of machine 0 that all machines can reach
#   MASTER_PORT         a free port on machine 0 (29500)
#   NPROC_PER_NODE      ranks per machine (its GPUs; required without GPUs)
#   MAX_RESTARTS        maximum number of restarts (3)
#   RDZV_TIMEOUT        seconds for the machines to connect, at the start and after each restart (300)
#   OMP_NUM_THREADS     CPU threads per rank (cores divided by ranks)
#   PYTORCH_ALLOC_CONF  torch's GPU allocator (expandable_segments:True)
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT   seconds for saving after a signal (120; torch 2.11: always 30)
set -euo pipefail

fail() { echo "error: $1" >&2 && exit "${2:-64}"; }
answers() { timeout 5 bash -c ": >/dev/tcp/$1/$MASTER_PORT" 2>/dev/null; }

NNODES="${NNODES:-${SLURM_NNODES:-}}" NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}" RDZV_TIMEOUT="${RDZV_TIMEOUT:-300}"
MASTER_ADDR="${MASTER_ADDR:-}" MASTER_PORT="${MASTER_PORT:-29500}" at="$MASTER_ADDR:$MASTER_PORT"
command -v torchrun >/dev/null || fail "torchrun is not on the PATH; activate the environment that has torch"
command -v ip >/dev/null || fail "ip is missing; install iproute2"
[[ "$NNODES" =~ ^([1-9][0-9]*:)?[1-9][0-9]*$ ]] || fail "NNODES=$NNODES must be the number of machines, the same on all"
[[ "$NODE_RANK" =~ ^[0-9]+$ && "$NODE_RANK" -lt "${NNODES#*:}" ]] ||
    fail "NODE_RANK=$NODE_RANK must be this machine's number, from 0 to NNODES-1=$((${NNODES#*:} - 1))"
# Find this machine's address and network interface, those of its route to machine 0. Machines exchange addresses, as a
# host name may not resolve on the others; on machine 0 it may resolve to 127.0.1.1 (Debian), hence `hostname -I`.
head="$(getent ahosts "$MASTER_ADDR" | awk 'NR == 1 {print $1}')" || true
[[ "$NODE_RANK $head" != "0 127."* || "$MASTER_ADDR" == 127.* ]] || head="$(hostname -I | awk '{print $1}')"
here="$(ip -o route get "$head" | sed 's/.* src \([^ ]*\).*/\1/')" ||
    fail "MASTER_ADDR=$MASTER_ADDR must be an address of machine 0; from here there is no way to it" 1
GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(ip -o address show to "$here" | awk 'NR == 1 {print $2}')}"
((NODE_RANK > 0)) || ! answers "$head" || fail "MASTER_PORT=$MASTER_PORT on $MASTER_ADDR is in use; choose another" 1
python3 -m dist_amp.train --print_config "$@" >/dev/null || exit # reject bad settings here, not in each restart
SECONDS=0
echo "machine $NODE_RANK of $NNODES ($here): waits at most $RDZV_TIMEOUT s for the others at $at"
until ((NODE_RANK == 0)) || answers "$head"; do
    ((SECONDS < RDZV_TIMEOUT)) || fail "nothing answers at $at in $RDZV_TIMEOUT s; start machine 0, or open the port" 1
    sleep 1
done
export GLOO_SOCKET_IFNAME
conf="is_host=$((NODE_RANK == 0)),join_timeout=$RDZV_TIMEOUT"
exec python3 -m dist_amp.launch --nnodes="$NNODES" ${NPROC_PER_NODE:+--nproc-per-node="$NPROC_PER_NODE"} \
    --max-restarts="${MAX_RESTARTS:-3}" --local-addr="$here" --rdzv-backend=c10d --rdzv-endpoint="$at" \
    --rdzv-id="${RDZV_ID:-dist_amp}" --rdzv-conf="$conf" "$@"
