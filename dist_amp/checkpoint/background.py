"""Saves by a thread: with checkpoint.async_save training waits only for a copy on the host.

The memory of the copy, pinned with a GPU, is filled again by each save: fresh memory costs more
than the copy. Of what several ranks have alike, one rank makes the copy and writes it. torch's
DefaultStager (2.13.0) fails on tensors that are made of others, on sparse ones, and where memory
can't be pinned.
"""

import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_with_path

from dist_amp.checkpoint.format import State
from dist_amp.checkpoint.state import Snapshot
from dist_amp.distributed.process import in_thread
from dist_amp.errors import Transient, some_of
from dist_amp.step import Run
from dist_amp.world import World

# Each rank has its own entries there, which no other rank writes.
OF_EACH_RANK = ("ranks", "task", "observer")


class Save:
    """A checkpoint that a thread of each rank writes.

    future: of this rank's thread. is_stuck: whether the ranks have given up waiting for it.
    """

    def __init__(self, run: Run, snapshot: Snapshot, write: Callable[..., None], staging: Any):
        """staging: write a copy made by it, without what another rank writes."""
        self.folder = snapshot.folder
        self.is_stuck = False
        self._world = run.world
        self._timeout = run.config.run.timeout_seconds
        self._enter("")
        if staging is not None:
            state = without_replicas(snapshot.state, run.world)
            snapshot = replace(snapshot, state=staging.copy(state))

        def work() -> None:
            if run.world.device.type == "cuda":  # a new thread's device is the first one
                torch.cuda.set_device(run.world.device)
            write(snapshot, enter=self._enter)

        self.future = in_thread(work, "checkpoint writer")

    def _enter(self, stage: str) -> None:
        """This rank begins a stage, or the next tensor in it; "": it waits for the other ranks."""
        self._progress = (time.monotonic(), stage)

    def wait(self) -> None:
        """Wait until it ends; every rank calls it.

        Errors: Failure if it fails; Transient if no rank makes progress for run.timeout_seconds.
        """
        while True:
            wait([self.future], min(1.0, self._timeout / 10))
            since, stage = self._progress
            own = (self.future.done(), time.monotonic() - since, stage)
            ranks = self._world.gather(own)
            if all(is_done for is_done, _, _ in ranks):
                self.is_stuck = False
                return self.future.result()
            seconds = min(idle for is_done, idle, _ in ranks if not is_done)
            self.is_stuck = seconds >= self._timeout
            if self.is_stuck:
                places = [f"rank {n} in {stage}" for n, (_, _, stage) in enumerate(ranks) if stage]
                raise Transient(
                    f"{self.folder} could not be written: it has made no progress for "
                    f"run.timeout_seconds={self._timeout:g} ({some_of(places)}); check the file "
                    "system"
                )


class Staging:
    """Host memory for one copy of this rank's part of the state; it stays for the run."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._kept: dict[tuple[Any, ...], Tensor] = {}  # by path in the state, and layout

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """The state with every tensor in this memory, in place of the copy before."""
        copy: State = tree_map_with_path(self._staged, state)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return copy

    def _staged(self, path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if is_traceable_wrapper_subclass(leaf):  # a DTensor, torchao's 8-bit moments
            names, context = leaf.__tensor_flatten__()
            parts = {name: self._staged((*path, name), getattr(leaf, name)) for name in names}
            kind: Any = type(leaf)
            return kind.__tensor_unflatten__(parts, context, leaf.size(), leaf.stride())
        if leaf.layout is not torch.strided:
            return leaf.detach().to("cpu", copy=True)
        key = (path, leaf.dtype, leaf.size(), leaf.stride())
        if key not in self._kept:
            try:
                self._kept[key] = torch.empty_like(leaf, device="cpu", pin_memory=self._on_gpu)
            except RuntimeError:  # the system pins no more: the copy takes longer
                self._kept[key] = torch.empty_like(leaf, device="cpu")
        return self._kept[key].copy_(leaf, non_blocking=True)


def without_replicas(state: State, world: World) -> State:
    """The state without what another rank writes of several ranks' equal tensors.

    Ordinary tensors are spread over the ranks by size; of a DTensor the first replica is kept.
    """
    bytes_of = [0] * world.world_size

    def is_kept(value: Any) -> bool:
        if isinstance(value, DTensor):
            coordinates: Any = value.device_mesh.get_coordinate()
            at = zip(coordinates, value.placements, strict=True)
            return not any(place for place, placement in at if placement.is_replicate())
        if not isinstance(value, Tensor):
            return True
        keeper = bytes_of.index(min(bytes_of))
        bytes_of[keeper] += value.numel() * value.element_size()
        return keeper == world.rank

    def part_of(section: State) -> State:
        part = {}
        for name, value in section.items():
            if isinstance(value, dict):
                part[name] = part_of(value)
            elif is_kept(value):
                part[name] = value
        return part

    own = {name: state[name] for name in state if name.partition(" ")[0] in OF_EACH_RANK}
    return part_of({name: state[name] for name in state if name not in own}) | own
