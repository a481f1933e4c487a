"""The ranks of a job: who this process is, its device, the process groups, and what the hosts tell each other.

Words as torchrun defines them: rank, local_rank, world_size. Nothing here knows about models or data.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dist_amp.fast.process_group import A_DAY, abort_process_groups, all_gather_single, make_mesh, without_timeout
from dist_amp.runtime.clock import PhaseClock, waits_for_ranks
from dist_amp.runtime.environment import place_of
from dist_amp.runtime.process import configure_logging, raise_open_files
from dist_amp.runtime.rendezvous import join, join_until_exit
from dist_amp.runtime.terminal import in_colour
from dist_amp.settings import RunConfig


@dataclass(frozen=True)
class World:
    """This process's place among the ranks: fixed for its life."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")
    # A gloo group for what the hosts agree on (stop, paths): it never waits for the device.
    control: dist.ProcessGroup | None = field(default=None, compare=False)
    # A gloo group for the thread that saves while training continues, and for no other: on a shared one the two would
    # wait for each other.
    background: dist.ProcessGroup | None = field(default=None, compare=False)
    _meshes: dict[Any, DeviceMesh] = field(default_factory=dict, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @cached_property
    def clock(self) -> PhaseClock:
        """What this rank spends its time on."""
        return PhaseClock(self.device)

    def say(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on rank 0 only, on standard error."""
        if self.is_main:
            print(in_colour("warning:", "yellow", sys.stderr), text, file=sys.stderr, flush=True)

    @waits_for_ranks
    def barrier(self) -> None:
        if self.control is not None:
            dist.barrier(group=self.control)

    @waits_for_ranks
    def from_main(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    @waits_for_ranks
    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, on every rank, in the order of the ranks."""
        texts = [text] * self.world_size
        if self.control is not None:
            dist.all_gather_object(texts, text, group=self.control)
        return texts

    def gather_numbers(self, row: list[float]) -> list[list[float]]:
        """Each rank's numbers, on the host of every rank, in the order of the ranks; all give equally many."""
        return self.gather(torch.tensor(row, dtype=torch.float64)).numpy().tolist()

    @waits_for_ranks
    def gather(self, row: Tensor) -> Tensor:
        """[...] on each rank -> [world_size, ...] on every rank, on the device or the host as the row is."""
        rows = row.new_empty(self.world_size, *row.shape)
        if self.control is None or not row.numel():
            return rows.copy_(row)
        all_gather_single(rows.view(-1), row.reshape(-1), group=None if row.is_cuda else self.control)
        return rows

    @waits_for_ranks
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the device, on every rank; the tensor itself is left as it is."""
        if self.world_size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """All ranks in a grid; made once per shape, since its groups cost threads and sockets."""
        if (shape, names) not in self._meshes:
            self._meshes[shape, names] = make_mesh(self.device.type, shape, names)
        return self._meshes[shape, names]

    def wait_long(self) -> None:
        """A barrier without the timeout of a collective: making a cache may take hours."""
        with without_timeout(self.control):
            self.barrier()


def locate(config: RunConfig) -> World:
    """This process's World: alone, or in the process group that exists already; every rank calls it."""
    world = World(*place_of(config))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        return world
    if not dist.is_initialized():  # a script under torchrun
        join_until_exit(place_of(config), config.timeout_seconds)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_seconds), group_desc="control")
    # No timeout: a large checkpoint takes the slowest rank as long as it takes.
    return replace(world, control=control, background=dist.new_group(backend="gloo", timeout=A_DAY))


@contextmanager
def start(config: RunConfig) -> Iterator[World]:
    """Join the other ranks for the length of a with-block; whatever happens in it, leave nothing running.

    One process needs no process group and gets none; one that exists already is used and left as it was.
    """
    place = place_of(config)
    configure_logging(place.rank)
    raise_open_files(place.world_size)
    on_gpu, ours = place.device.type == "cuda", not dist.is_initialized() and place.world_size > 1
    if ours:
        join(place, config.timeout_seconds)
    try:
        world = locate(config)
        yield world
        # FSDP2 over gloo aborts at exit if a rank tears down while another is still in a collective.
        # Measured without the barrier: 8 of 24 two-rank runs; with it: none.
        world.barrier()
    except BaseException:
        if ours and on_gpu:
            abort_process_groups()  # destroying would wait for collectives that never end
            ours = False
        raise
    finally:
        if ours:
            dist.destroy_process_group()
