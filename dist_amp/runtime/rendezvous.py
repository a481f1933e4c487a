"""Where the ranks of a world meet: the store at MASTER_ADDR and MASTER_PORT; a rank that does not come is named."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from dist_amp.errors import ConfigError, Failure
from dist_amp.runtime.environment import environment_number

T = TypeVar("T")


def rendezvous(rank: int, world_size: int, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
    """The store of the world at MASTER_ADDR and MASTER_PORT, as soon as every rank has come there.

    Errors: ConfigError for a variable that is missing; Failure with the address, or with the ranks that have not come.
    torch alone names neither, and takes up to three times the timeout.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), environment_number("MASTER_PORT", 0)
    if not (host and 0 < port < 2**16):
        name = "MASTER_PORT" if host else "MASTER_ADDR"
        raise ConfigError(
            f"{name}={os.environ.get(name, '')!r} must be the {'port' if host else 'address'} of rank 0, since "
            f"WORLD_SIZE={world_size}; start with torchrun, or set it on every rank"
        )
    deadline = time.monotonic() + timeout_seconds
    within = f"{host}:{port} within run.timeout_seconds={timeout_seconds:g}"
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
    if not serves:
        _wait_for_listener(host, port, deadline, within)

    def connect() -> dist.Store:  # type: ignore[name-defined]
        tcp = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return dist.PrefixStore("default_pg", tcp)  # type: ignore[attr-defined]  # as torch has it

    try:
        store = in_time(timeout_seconds, connect)  # torch would wait for ever for a listener that says nothing
        store.set(joined(rank), str(world_size))
    except (RuntimeError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise Failure(f"MASTER_PORT={port} on {host} is in use; choose another") from error
        why = next(iter(str(error).splitlines()), "what listens there does not answer")
        raise Failure(f"no rank 0 at {within} ({why}); MASTER_ADDR and MASTER_PORT must be those of rank 0") from error
    try:
        left = max(deadline - time.monotonic(), 1.0)
        store.wait([joined(rank) for rank in range(world_size)], timedelta(seconds=left))
    except RuntimeError as error:
        try:
            missing = [rank for rank in range(world_size) if not store.check([joined(rank)])]
        except RuntimeError:
            raise Failure(f"rank 0 at {host}:{port} left before all had joined; see what it said") from error
        if missing:  # else the last one came this very moment
            shown = ", ".join(map(str, missing[:16])) + ", ..." * (len(missing) > 16)
            who = f"rank {shown} of {world_size} has" if len(missing) == 1 else f"ranks {shown} have"
            raise Failure(f"{who} not joined at {within}; start it, or look at its machine") from error
    sizes = store.multi_get([joined(other) for other in range(world_size)])
    for other, size in enumerate(sizes):
        if int(size) != world_size:
            raise Failure(
                f"rank {rank} was started with WORLD_SIZE={world_size}, and rank {other}, which met it at "
                f"{host}:{port}, with {int(size)}; start all nodes with the same counts of nodes and processes"
            )
    return store


def joined(rank: int) -> str:
    return f"dist_amp/joined/{rank}"


def _wait_for_listener(host: str, port: int, deadline: float, within: str) -> None:
    """Until somebody listens there: rank 0 may start last, and its name may not be known yet."""
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            return in_time(left, partial(socket.create_connection, (host, port), left)).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or "no answer"
                raise Failure(
                    f"no rank 0 at {within} ({why}); start it, or set MASTER_ADDR and MASTER_PORT to where it is"
                ) from error
            time.sleep(0.1)


def in_time(seconds: float, call: Callable[[], T]) -> T:
    """What call() returns or raises. Errors: TimeoutError after so many seconds; it is left behind in a thread."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
