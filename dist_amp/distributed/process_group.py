"""Process groups: the store, timeouts, meshes and the abort.

Without torch's private names, collectives keep the timeout that their group began with, and the
default group alone is aborted.
"""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_amp.distributed.environment import Place

A_DAY = timedelta(days=1)  # for collectives whose slowest rank takes as long as it takes

# NCCL's timeout names no rank, so the watchdog, which does, comes first. Assumed: it takes 15 s.
NCCL_MARGIN_SECONDS = 60.0

# torch's own default; 1 MB as JSON. Measured on one gloo rank: 4 to 5 us per collective.
RECORDED_COLLECTIVES = 2000

# torch ends a process whose NCCL threads give no sign for this long; its default in 2.11 to 2.13.
HEARTBEAT_SECONDS = 480


def shared_store() -> dist.Store:  # type: ignore[name-defined]
    """The key-value store of the default process group, which works where collectives do not."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def join(place: Place, timeout_seconds: float) -> None:
    """Make the default process group of all ranks: gloo, and NCCL on GPUs."""
    backend = "gloo"
    device = None
    if place.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        device = place.device
    store = None  # torch's own rendezvous at MASTER_ADDR and MASTER_PORT
    # Ours names the ranks that do not join, and an address at which nobody answers.
    from dist_amp.distributed.rendezvous import joined, rendezvous

    store = rendezvous(place.rank, place.world_size, timeout_seconds)
    dist.init_process_group(
        backend,
        timeout=collective_timeout(device is not None, timeout_seconds),
        device_id=device,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
    )
    # All have joined; torchrun may keep the store for its next attempt.
    store.delete_key(joined(place.rank))


def join_until_exit(place: Place, timeout_seconds: float) -> None:
    """`join`, and leave at exit: together with the other ranks, unless by an error."""
    join(place, timeout_seconds)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        # After an error the others may be gone. FSDP2 over gloo aborts if another rank is still in
        # a collective.
        if not hasattr(sys, "last_value"):
            with suppress(Exception):
                dist.barrier()
        dist.destroy_process_group()


def collective_timeout(on_gpu: bool, timeout_seconds: float) -> timedelta:
    """How long a collective of the model may take; sets up torch's own supervision accordingly."""
    seconds = timeout_seconds
    if on_gpu:
        seconds += NCCL_MARGIN_SECONDS
    # Variables that are set stay. What torch records of collectives is read by the watchdog, and
    # its check of NCCL's threads, which ends the process, has to come last.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
    last = max(HEARTBEAT_SECONDS, int(seconds) + 60)
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(last))
    return timedelta(seconds=seconds)


def timeout_of(group: Any) -> timedelta | None:
    """How long the group's collectives may take; None if there is none, or torch does not say."""
    for device in getattr(group, "_device_types", ()):
        with suppress(Exception):  # a backend without options, such as torch's fake one
            return timedelta(seconds=group._get_backend(device).options._timeout.total_seconds())
    return None


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
    """Set the timeout of collectives that are started from now on, if torch can do that."""
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    change = getattr(dist, "set_timeout", change)  # public from torch 2.14 on
    if timeout is not None and change is not None:
        change(timeout, group)


@contextmanager
def without_timeout(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Lift the group's timeout inside: a rank may take hours to fill a cache or to read a shard."""
    before = timeout_of(group)
    if before is not None:
        set_timeout(group, A_DAY)
    try:
        yield
    finally:
        set_timeout(group, before)


def make_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks in a grid; its groups get the default group's timeout, not torch's 10 minutes."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    assert dist.group.WORLD is not None
    for group in mesh.get_all_groups():
        set_timeout(group, timeout_of(dist.group.WORLD))
    return mesh


def abort_process_groups() -> None:
    """Abort the collectives of all NCCL groups, because destroying the groups would wait for them.

    Without the private function, groups other than the default one end with the process.
    """
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort_all is not None:
        abort_all()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
