"""The rendezvous at MASTER_ADDR and MASTER_PORT, which reports the ranks that are missing.

Each rank sets its own key in the store when it joins, and deletes the key once its process groups
are connected. A rank whose wait times out reads the keys of all ranks. While ranks join, a rank
without a key is missing. While process groups connect, a rank that has not deleted its key, though
it has timed out too, hangs or has died.

Docs: docs/launching.md
"""

import faulthandler
import os
import platform
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from dist_amp.distributed.process import environment_number, in_time
from dist_amp.errors import ConfigError, Transient, first_line, some_of

LOOPBACK = ("localhost", "127.0.0.1", "::1")
JOINED = "dist_amp/joined/"  # followed by a rank: the key that it sets when it joins


@contextmanager
def connecting(
    rank: int, world_size: int, timeout_seconds: float, end_after: timedelta
) -> Iterator[dist.Store]:  # type: ignore[name-defined]
    """Join the other ranks; yields the store to a with-block that connects the process groups.

    If the block takes longer than `end_after`, the process prints its stacks and exits. Errors:
    ConfigError; Transient with the ranks that are missing or hang.
    """
    store = rendezvous(rank, world_size, timeout_seconds)
    start = time.monotonic()
    faulthandler.dump_traceback_later(end_after.total_seconds(), exit=True, file=2)
    try:
        yield store
    except RuntimeError as error:
        timed_out = time.monotonic() - start > 0.9 * timeout_seconds  # else another error
        if timed_out and (hanging := _hanging_ranks(store, rank, world_size, timeout_seconds)):
            raise Transient(
                f"{hanging}, but not connected within run.timeout_seconds={timeout_seconds:g}: it "
                f"hangs, is stopped or has died; see its output (rank {rank} got: "
                f"{first_line(error)})"
            ) from error
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    store.delete_key(f"{JOINED}{rank}")  # also since restarted ranks may get the same store


def _hanging_ranks(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Text with the ranks that have joined, but do not delete their keys after a timeout; or ""."""
    seconds = min(5.0, timeout_seconds / 4)  # other ranks may time out this much later
    keys = [f"{JOINED}{member}" for member in range(world_size)]
    with suppress(RuntimeError):  # rank 0 has exited, and the store with it
        store.delete_key(keys[rank])
        time.sleep(seconds)
        hanging = [member for member, key in enumerate(keys) if store.check([key])]
        processes = [store.get(keys[member]).decode() for member in hanging]
        time.sleep(seconds * (rank == 0))  # rank 0 serves the store while other ranks read it
        if hanging:
            return f"{_ranks_have(hanging, world_size)} joined ({some_of(processes)})"
    return ""


def rendezvous(rank: int, world_size: int, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
    """Connect to the store, which rank 0 or torchrun's agent serves, and wait for all ranks.

    Raises ConfigError for a missing variable; Transient, with the address or the missing ranks.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port = environment_number("MASTER_PORT", 0)
    if not host or not 0 < port < 2**16:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port} must be the address and the port of rank "
            f"0, since WORLD_SIZE={world_size}; start with torchrun, or set both on every rank"
        )
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # gloo needs three sockets per other rank: allow many
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    if host in LOOPBACK:  # else gloo listens on the interface of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + timeout_seconds
    within = f"{host}:{port} within run.timeout_seconds={timeout_seconds:g}"
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    connect = partial(
        dist.TCPStore,  # type: ignore[attr-defined]
        host,
        port,
        world_size,
        is_master=is_server,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=loopback_listener(host, port)[1] if is_server else None,
    )
    try:
        # in_time, because torch retries after its timeout, and waits forever if nobody answers.
        store = dist.PrefixStore("default_pg", in_time(timeout_seconds, connect))  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        if "EADDRINUSE" in str(error):
            raise Transient(f"MASTER_PORT={port} on {host} is in use; choose another") from error
        raise Transient(
            f"no rank 0 at {within} ({first_line(error) or 'no answer'}); start it, or set "
            "MASTER_ADDR and MASTER_PORT to its address"
        ) from error
    keys = [f"{JOINED}{member}" for member in range(world_size)]
    store.set(keys[rank], f"process {os.getpid()} on {platform.node()}")
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
    except RuntimeError as error:
        try:
            missing = [member for member, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            left = f"rank 0 at {host}:{port} left before all had joined; see its output"
            raise Transient(left) from error
        if missing:  # else the last ranks have joined in the meantime
            raise Transient(
                f"{_ranks_have(missing, world_size)} not joined at {within}; start it, or check "
                "its machine"
            ) from error
    return store


def _ranks_have(ranks: list[int], world_size: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world_size} has"
    return f"ranks {some_of([*map(str, ranks)], 16)} have"


def loopback_listener(host: str, port: int) -> tuple[int, int | None]:
    """Returns (port, master_listen_fd) for a TCPStore that only this machine can reach. None: the
    TCPStore listens itself, on all interfaces; that is a risk, as torchrun unpickles its content.
    """
    if host not in LOOPBACK:
        return port, None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError:  # in use: torch shares a store of this process, and raises for another's
        return port, None
    return listener.getsockname()[1], listener.detach()
