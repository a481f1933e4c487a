"""The ranks of a job: this process's rank, device and process groups.

rank, local_rank and world_size are as torchrun defines them.
"""

import atexit
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_amp.clock import PhaseClock
from dist_amp.distributed.process import configure_logging, place_of
from dist_amp.distributed.process_group import (
    A_DAY,
    abort_process_groups,
    join,
    set_timeout,
    timeout_of,
    without_timeout,
)
from dist_amp.errors import masked
from dist_amp.settings import RunConfig

T = TypeVar("T")

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class World:
    """This process's rank, device and process groups; immutable."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")
    # A gloo group for values on the host (stop, paths), so that no exchange waits for the device.
    control: dist.ProcessGroup | None = field(default=None, compare=False)
    # A gloo group for the thread that saves checkpoints, and for nothing else: on a shared group
    # that thread and the training loop would wait for each other.
    background: dist.ProcessGroup | None = field(default=None, compare=False)
    _meshes: dict[Any, DeviceMesh] = field(default_factory=dict, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @cached_property
    def clock(self) -> PhaseClock:
        return PhaseClock(self.device)

    def say(self, text: str) -> None:
        if self.is_main:
            print(masked(text), flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on rank 0 only, on standard error."""
        if self.is_main:
            print("warning:", masked(text), file=sys.stderr, flush=True)

    def barrier(self) -> None:
        if self.control is not None:
            with self.clock.phase("communication"):
                dist.barrier(group=self.control)

    def from_main(self, value: T) -> T:
        """Rank 0's value, any picklable object, on every rank."""
        box = [value]
        if self.control is not None:
            with self.clock.phase("communication"):
                dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, any picklable object, on every rank, in the order of the ranks."""
        values = [value] * self.world_size
        if self.control is not None:
            with self.clock.phase("communication"):
                dist.all_gather_object(values, value, group=self.control)
        return values

    def raise_first(self, problem: Exception | None) -> None:
        """Raise the problem of the first rank that has one, on every rank; every rank calls it."""
        for first in filter(None, self.gather(problem)):
            raise first

    def stack(self, row: Tensor) -> Tensor:
        """All-gather: [...] on each rank -> [world_size, ...] on all ranks, on the row's device."""
        if self.control is None or not row.numel():
            return row.expand(self.world_size, *row.shape).clone()
        rows = row.new_empty(self.world_size, *row.shape)
        group: dist.ProcessGroup | None = self.control
        if row.is_cuda:
            group = None
        with self.clock.phase("communication"):
            all_gather_single(rows.view(-1), row.reshape(-1), group=group)
        return rows

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the device, on every rank, as a new tensor."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        with self.clock.phase("communication"):
            dist.all_reduce(total)
        return total

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A device mesh of all ranks; made once per shape: its groups take threads and sockets."""
        if (shape, names) not in self._meshes:
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            for group in mesh.get_all_groups():  # torch's default timeout is 10 minutes
                set_timeout(group, timeout_of(dist.group.WORLD))
            self._meshes[shape, names] = mesh
        return self._meshes[shape, names]

    def wait_long(self) -> None:
        """A barrier without the usual timeout: one rank may take hours, as to fill a cache."""
        if self.control is not None:
            with without_timeout(self.control):
                self.barrier()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; an ordinary tensor unchanged."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor


def as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """A number, or a scalar tensor, as a scalar tensor on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.full((), float(value), device=device)


def locate(config: RunConfig) -> World:
    """This process's World, for scripts; every rank calls it.

    Uses an existing process group; without one, a script under torchrun joins one until it exits.
    """
    context = joined(config)
    world = context.__enter__()
    if world.world_size > 1:
        atexit.register(_leave, context)
    return world


def _leave(context: AbstractContextManager[World]) -> None:
    # Pass on the error that ended the script, if any: `joined` then waits for no other rank.
    error = [getattr(sys, name, None) for name in ("last_type", "last_value", "last_traceback")]
    with suppress(BaseException):
        context.__exit__(*error)


@contextmanager
def start(config: RunConfig) -> Iterator[World]:
    """As `joined`, and show the log of rank 0 only."""
    with joined(config) as world:
        configure_logging(world.rank)
        yield world


@contextmanager
def joined(config: RunConfig) -> Iterator[World]:
    """Join the other ranks' process groups for a with-block; leave them at its end.

    A single process has no groups. A default group that exists already is used, and not destroyed.
    """
    world = World(*place_of(config))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield world
        return
    owns_groups = not dist.is_initialized()
    failed = True
    try:
        with ExitStack() as joining:
            connect_timeout = timeout = timedelta(seconds=config.timeout_seconds)
            if owns_groups:
                place = (world.rank, world.world_size, world.device)
                timeout = joining.enter_context(join(*place, config.timeout_seconds))
            control = dist.new_group(backend="gloo", timeout=connect_timeout, group_desc="control")
            set_timeout(control, timeout)
            # In effect no timeout: the slowest rank may take long to write a large checkpoint.
            background = dist.new_group(backend="gloo", timeout=A_DAY)
        world = replace(world, control=control, background=background)
        yield world
        if owns_groups:
            # FSDP2 over gloo aborts at exit if a rank destroys its groups while another is still in
            # a collective: 8 of 24 two-rank runs without this barrier, and none with it.
            world.barrier()
        failed = False
    finally:
        owns_groups = owns_groups and dist.is_initialized()
        if owns_groups and failed and world.device.type == "cuda":
            abort_process_groups()  # destroying would wait for collectives that never end
        elif owns_groups:
            dist.destroy_process_group()
