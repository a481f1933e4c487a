"""The rendezvous at MASTER_ADDR and MASTER_PORT, which names a rank that does not join.

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

import torch.distributed as dist

from dist_amp.distributed.process import environment_number, in_time
from dist_amp.errors import ConfigError, Transient, first_line, some_of

# Open files besides gloo's sockets: libraries, loader workers' pipes, TensorBoard, a checkpoint's
# shards. Measured for two ranks on the CPU: 18, and 7 per loader worker. Assumed: a GPU and NCCL's
# own sockets add no more than 100.
OTHER_FILES = 200

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def rendezvous(rank: int, world_size: int, timeout_seconds: float) -> dist.Store:  # type: ignore[name-defined]
    """Connect to the store at MASTER_ADDR and MASTER_PORT, and wait until every rank has.

    Errors: ConfigError for a missing variable; Transient with the address or the missing ranks.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port = environment_number("MASTER_PORT", 0)
    right = {"MASTER_ADDR": host != "", "MASTER_PORT": 0 < port < 2**16}
    for name, what in (("MASTER_ADDR", "address"), ("MASTER_PORT", "port")):
        if not right[name]:
            raise ConfigError(
                f"{name}={os.environ.get(name, '')!r} must be the {what} of rank 0, since "
                f"WORLD_SIZE={world_size}; start with torchrun, or set it on every rank"
            )
    if host in LOOPBACK:  # gloo would listen on the interface of the host's name
        names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", (names or ["lo"])[0])
    deadline = time.monotonic() + timeout_seconds
    within = f"{host}:{port} within run.timeout_seconds={timeout_seconds:g}"
    store = _connected(rank, world_size, (host, port), timeout_seconds, within)
    store.set(joined(rank), f"{world_size} process {os.getpid()} on {platform.node()}")
    everyone = [joined(other) for other in range(world_size)]
    try:
        store.wait(everyone, timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
    except RuntimeError as error:
        left = f"rank 0 at {host}:{port} left before all had joined; see its output"
        try:
            missing = [other for other in range(world_size) if not store.check([joined(other)])]
        except RuntimeError:
            raise Transient(left) from error
        if missing:  # else the last one joined just now
            raise Transient(
                f"{_ranks_have(missing, world_size)} not joined at {within}; start it, or check "
                "its machine"
            ) from error
    for other, text in enumerate(store.multi_get(everyone)):
        size = int(text.split()[0])
        if size != world_size:
            raise Transient(
                f"rank {rank} was started with WORLD_SIZE={world_size}, but rank {other} at the "
                f"same rendezvous {host}:{port} with {size}; start all nodes with the same number "
                "of nodes and processes"
            )
    return store


@contextmanager
def connecting(
    rank: int, world_size: int, timeout_seconds: float, end_after: timedelta
) -> Iterator[dist.Store]:  # type: ignore[name-defined]
    """The store, in which a rank has a key until it leaves the block or gives up on another one.

    A block that hangs ends the process, with its stacks. Errors: Transient, with the missing ranks.
    """
    store = rendezvous(rank, world_size, timeout_seconds)
    start = time.monotonic()
    faulthandler.dump_traceback_later(end_after.total_seconds(), exit=True, file=2)
    try:
        yield store
    except RuntimeError as error:
        got = f"(rank {rank} got: {first_line(error)})"
        missing = []
        try:
            store.delete_key(joined(rank))
            if time.monotonic() - start > 0.9 * timeout_seconds:  # no error of this rank
                seconds = min(5.0, timeout_seconds / 4)  # by which the others may be later
                time.sleep(seconds)
                missing = [other for other in range(world_size) if store.check([joined(other)])]
                texts = [store.get(joined(other)).decode().partition(" ")[2] for other in missing]
                time.sleep(seconds * (rank == 0))  # the others still ask its store
        except RuntimeError:
            raise Transient(f"rank 0 left before all had connected; see its output {got}") from None
        if not missing:
            raise
        raise Transient(
            f"{_ranks_have(missing, world_size)} joined ({some_of(texts)}), but not connected "
            f"within run.timeout_seconds={timeout_seconds:g}: it hangs, is stopped or has died; "
            f"see its output {got}"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    store.delete_key(joined(rank))  # torchrun may keep the store for its next attempt


def _connected(
    rank: int, world_size: int, address: tuple[str, int], timeout_seconds: float, within: str
) -> dist.Store:  # type: ignore[name-defined]
    """The store at an address, of which rank 0 is the server unless torchrun's agent is."""
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_server:
        _wait_for_listener(*address, time.monotonic() + timeout_seconds, within)

    listener = None
    if is_server:
        _, listener = loopback_listener(*address)

    def connect() -> dist.Store:  # type: ignore[name-defined]
        tcp = dist.TCPStore(  # type: ignore[attr-defined]
            *address,
            world_size,
            master_listen_fd=listener,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return dist.PrefixStore("default_pg", tcp)  # type: ignore[attr-defined]  # torch's own prefix

    try:
        # torch would wait forever for a listener that does not answer.
        return in_time(timeout_seconds, connect)
    except (RuntimeError, TimeoutError) as error:
        host, port = address
        if "EADDRINUSE" in str(error):
            raise Transient(f"MASTER_PORT={port} on {host} is in use; choose another") from error
        why = first_line(error) or "the listener there does not answer"
        raise Transient(
            f"no rank 0 at {within} ({why}); MASTER_ADDR and MASTER_PORT must be those of rank 0"
        ) from error


def loopback_listener(host: str, port: int) -> tuple[int, int | None]:
    """(port, TCPStore's master_listen_fd) of a store at a loopback address, for this machine alone.

    TCPStore listens on all interfaces otherwise, and torchrun loads pickles from it.
    """
    if host not in LOOPBACK:
        return port, None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError:  # in use: by this process, which shares it, or torch says so
        return port, None
    return listener.getsockname()[1], listener.detach()


def _ranks_have(ranks: list[int], world_size: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world_size} has"
    return f"ranks {some_of([*map(str, ranks)], 16)} have"


def joined(rank: int) -> str:
    """The store's key that a rank sets when it joins."""
    return f"dist_amp/joined/{rank}"


def _wait_for_listener(host: str, port: int, deadline: float, within: str) -> None:
    """Wait until something listens: rank 0 may start last, and its name may not resolve yet."""
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            return in_time(left, partial(socket.create_connection, (host, port), left)).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or "no answer"
                raise Transient(
                    f"no rank 0 at {within} ({why}); start it, or set MASTER_ADDR and MASTER_PORT "
                    "to its address"
                ) from error
            time.sleep(0.1)


def raise_open_files(world_size: int) -> None:
    """Let this process open as many files as it may. Errors: ConfigError if the ranks need more.

    Each of three gloo groups connects every rank to every other; hsdp's mesh adds at most half.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses more than its kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    sockets = 3 * (world_size - 1) + world_size // 2
    if not unlimited and soft < sockets + OTHER_FILES:
        raise ConfigError(
            f"{world_size} ranks need {sockets} sockets and {OTHER_FILES} other open files per "
            f"process, and the limit is {soft}; raise it: ulimit -Hn {sockets + OTHER_FILES} "
            "before the launch, LimitNOFILE= of the service, docker run --ulimit "
            f"nofile={sockets + OTHER_FILES}"
        )
