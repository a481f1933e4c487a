"""Process groups, called directly: the store, an all-reduce without torch's Python wrapper, timeouts, and the abort.

Only timeouts and abort use private names of torch's. `dist.group.WORLD` and its methods are public in torch 2.11 and
2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_amp.fast import flight_recorder

A_DAY = timedelta(days=1)  # for collectives whose slowest rank takes as long as it takes

# NCCL's timeout ends the process and names no rank, so the watchdog, which does, has so long before it. Assumed: it
# needs some 15 s to ask all ranks and to end them.
NCCL_MARGIN_SECONDS = 60.0

# torch's name for it before 2.13, which warns there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def shared_store() -> dist.Store:  # type: ignore[name-defined]
    """The key-value store of the default process group, which works where collectives do not."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def reduce_options() -> dist.AllreduceOptions:
    """What `all_reduce_sum` takes; make them once, since that costs 2 us."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def all_reduce_sum(tensor: Tensor, options: dist.AllreduceOptions) -> None:
    """Sum a tensor over all ranks, in place: `dist.all_reduce` without the checks that it makes in Python.

    Measured for 2 numbers on one gloo rank: 14 us, against 19 us by dist.all_reduce, which any release has.
    """
    allreduce = getattr(dist.group.WORLD, "allreduce", None)
    if allreduce is None:
        dist.all_reduce(tensor)
        return
    work = allreduce([tensor], options)
    if work is not None:
        work.wait()


def collective_timeout(on_gpu: bool, timeout_seconds: float) -> timedelta:
    """How long a collective of the model may take; on a GPU it also sets up torch's own supervision accordingly."""
    seconds = timeout_seconds + (NCCL_MARGIN_SECONDS if on_gpu else 0.0)
    flight_recorder.configure(seconds)
    return timedelta(seconds=seconds)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group's collectives may take; None if torch does not say."""
    for device in getattr(group, "_device_types", ()):
        with suppress(Exception):  # a backend without options, as in tests with one rank of an imagined world
            return timedelta(seconds=group._get_backend(device).options._timeout.total_seconds())
    return None


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give the collectives that are started from now on so much time, if torch can do that."""
    # set_timeout is public from torch 2.14 on.
    change = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if timeout_of(group) is not None and change is not None:
        change(timeout, group)


@contextmanager
def without_timeout(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Lift the group's timeout inside: a rank may take hours to fill a cache, or to read its part of a checkpoint."""
    before = timeout_of(group) if group is not None else None
    if group is None or before is None:
        yield
        return
    set_timeout(group, A_DAY)
    try:
        yield
    finally:
        set_timeout(group, before)


def make_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks in a grid, whose groups have the default group's timeout: torch gives new ones 10 or 30 minutes."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    assert dist.group.WORLD is not None
    timeout = timeout_of(dist.group.WORLD)
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, timeout)
    return mesh


def abort_process_groups() -> None:
    """Abort the collectives of all NCCL groups, because destroying the groups would wait for them.

    Without the private function, the default group alone is aborted: others, as of a mesh, end with the process, and
    torch warns that they were not destroyed.
    """
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort_all is not None:
        abort_all()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
