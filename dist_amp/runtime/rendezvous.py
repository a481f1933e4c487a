"""The rendezvous at MASTER_ADDR and MASTER_PORT: connect all ranks to one store, and name a rank that does not join."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from dist_amp.errors import ConfigError, Failure
from dist_amp.fast.process_group import collective_timeout
from dist_amp.runtime.environment import Place, environment_number

T = TypeVar("T")


def join(place: Place, timeout_seconds: float) -> None:
    """Make the default process group of all ranks: gloo, and NCCL on GPUs. Errors: those of `rendezvous`."""
    on_gpu = place.device.type == "cuda"
    store = rendezvous(place.rank, place.world_size, timeout_seconds)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=collective_timeout(on_gpu, timeout_seconds),
        device_id=place.device if on_gpu else None,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
    )
    store.delete_key(joined(place.rank))  # all have joined; torchrun may keep the store for its next attempt


def join_until_exit(place: Place, timeout_seconds: float) -> None:
    """`join`, and leave when this process ends, together with the others unless it ends by an error."""
    join(place, timeout_seconds)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        with suppress(Exception):
            if not hasattr(sys, "last_value"):  # FSDP2 over gloo aborts if another rank is still in a collective
                dist.barrier()
        dist.destroy_process_group()


def rendezvous(rank: int, world_size: int, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
    """Connect to the store at MASTER_ADDR and MASTER_PORT, and wait until every rank has.

    Errors: ConfigError for a missing variable; Failure with the address, or with the ranks that did not join. torch's
    own rendezvous names neither, and takes up to three times the timeout.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), environment_number("MASTER_PORT", 0)
    if not (host and 0 < port < 2**16):
        name, what = ("MASTER_PORT", "port") if host else ("MASTER_ADDR", "address")
        raise ConfigError(
            f"{name}={os.environ.get(name, '')!r} must be the {what} of rank 0, since WORLD_SIZE={world_size}; start "
            "with torchrun, or set it on every rank"
        )
    deadline = time.monotonic() + timeout_seconds
    within = f"{host}:{port} within run.timeout_seconds={timeout_seconds:g}"
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent is
    if not is_server:
        _wait_for_listener(host, port, deadline, within)

    def connect() -> dist.Store:  # type: ignore[name-defined]
        tcp = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return dist.PrefixStore("default_pg", tcp)  # type: ignore[attr-defined]  # torch's own prefix

    try:
        store = in_time(timeout_seconds, connect)  # torch would wait forever for a listener that does not answer
        store.set(joined(rank), str(world_size))
    except (RuntimeError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise Failure(f"MASTER_PORT={port} on {host} is in use; choose another") from error
        why = next(iter(str(error).splitlines()), "the listener there does not answer")
        raise Failure(f"no rank 0 at {within} ({why}); MASTER_ADDR and MASTER_PORT must be those of rank 0") from error
    try:
        left = max(deadline - time.monotonic(), 1.0)
        store.wait([joined(other) for other in range(world_size)], timedelta(seconds=left))
    except RuntimeError as error:
        try:
            missing = [other for other in range(world_size) if not store.check([joined(other)])]
        except RuntimeError:
            raise Failure(f"rank 0 at {host}:{port} left before all had joined; see its output") from error
        if missing:  # else the last one joined just now
            shown = ", ".join(map(str, missing[:16])) + ", ..." * (len(missing) > 16)
            who = f"rank {shown} of {world_size} has" if len(missing) == 1 else f"ranks {shown} have"
            raise Failure(f"{who} not joined at {within}; start it, or check its machine") from error
    for other, size in enumerate(map(int, store.multi_get([joined(other) for other in range(world_size)]))):
        if size != world_size:
            raise Failure(
                f"rank {rank} was started with WORLD_SIZE={world_size}, but rank {other} at the same rendezvous "
                f"{host}:{port} with {size}; start all nodes with the same number of nodes and processes"
            )
    return store


def joined(rank: int) -> str:
    """The store's key that a rank sets when it joins."""
    return f"dist_amp/joined/{rank}"


def _wait_for_listener(host: str, port: int, deadline: float, within: str) -> None:
    """Wait until something listens there: rank 0 may start last, and its host name may not resolve yet."""
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            return in_time(left, partial(socket.create_connection, (host, port), left)).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or "no answer"
                raise Failure(
                    f"no rank 0 at {within} ({why}); start it, or set MASTER_ADDR and MASTER_PORT to its address"
                ) from error
            time.sleep(0.1)


def in_time(seconds: float, call: Callable[[], T]) -> T:
    """Run call() in a thread; return or raise what it does.

    Errors: TimeoutError after so many seconds; the thread goes on in the background.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
