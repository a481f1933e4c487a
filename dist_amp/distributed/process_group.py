"""Process groups: joining, timeouts and abort, with private functions of torch if it has them."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_amp.files import present

A_DAY = timedelta(days=1)  # in effect no timeout, where one rank may take hours

# The backend's timeout, which does not say which rank is missing, comes this much later than the
# watchdog's. Assumed: the watchdog needs at most 15 s for its report.
MARGIN_SECONDS = 60.0


@contextmanager
def join(
    rank: int, world_size: int, device: torch.device, timeout_seconds: float
) -> Iterator[timedelta]:
    """Create the default process group: gloo, and NCCL on GPUs. Yields its timeout from then on."""
    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        device_id = device
    timeout = timedelta(seconds=timeout_seconds)
    once_connected = timeout
    if present("supervise.watchdog"):
        once_connected = watched_timeout(timeout_seconds)
    # Without rendezvous.py, store is None, and torch does the rendezvous at MASTER_ADDR.
    connected: AbstractContextManager[Any] = nullcontext()
    if present("distributed.rendezvous"):
        # Errors then say which ranks are missing or hang, or which address does not answer.
        from dist_amp.distributed.rendezvous import connecting

        connected = connecting(rank, world_size, timeout_seconds, 2 * timeout)
    with connected as store:
        dist.init_process_group(
            backend,
            timeout=timeout,
            device_id=device_id,
            store=store,
            rank=rank,
            world_size=world_size,
        )
        set_timeout(None, once_connected)
        yield once_connected


def watched_timeout(timeout_seconds: float) -> timedelta:
    """The process groups' timeout: after the watchdog's, and before torch's own watchdog.

    Sets torch's environment variables for this, unless they are set.
    """
    seconds = timeout_seconds + MARGIN_SECONDS
    # Have torch record collectives, for the watchdog; 2,000 are 1 MB as JSON. Recording takes 4 to
    # 5 us per collective (measured on one gloo rank).
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # torch's own watchdog ends a process whose NCCL threads are silent for 480 s (2.11 to 2.13).
    last = max(480, int(seconds) + 60)
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(last))
    return timedelta(seconds=seconds)


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of the group's collectives; None if torch does not tell it."""
    for device in getattr(group, "_device_types", ()):
        with suppress(Exception):  # a backend without options, such as torch's fake one
            return timedelta(seconds=group._get_backend(device).options._timeout.total_seconds())
    return None


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
    """Set the timeout of collectives that start from now on, if this version of torch can."""
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    change = getattr(dist, "set_timeout", change)  # public from torch 2.14 on
    if timeout is not None and change is not None:
        change(timeout, group)


@contextmanager
def without_timeout(group: dist.ProcessGroup | None) -> Iterator[None]:
    """No timeout in a with-block, as one rank may take hours to fill a cache or to read a shard."""
    before = timeout_of(group)
    if before is not None:
        set_timeout(group, A_DAY)
    try:
        yield
    finally:
        set_timeout(group, before)


def abort_process_groups() -> None:
    """Abort all NCCL groups, or at least the default one. To destroy them would wait for ranks."""
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort_all is not None:
        abort_all()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
