"""Background saves (checkpoint.async_save): training waits only for a copy on the host.

The memory, pinned with a GPU, is filled again by each save: fresh memory costs more than the copy.
torch's DefaultStager (2.13.0) fails on tensors that are made of others, on sparse ones, and where
memory can't be pinned.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
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
from dist_amp.world import World


class Background:
    """Copies snapshots, and writes them in a thread while training continues."""

    def __init__(self, world: World):
        self._world = world
        self._staging = Staging(world.device)

    def start(self, snapshot: Snapshot, write: Callable[[Snapshot], None]) -> "Future[None]":
        """Copy the snapshot, without what another rank writes, and write the copy in a thread."""
        state = without_replicas(snapshot.state, self._world)
        copy = replace(snapshot, state=self._staging.copy(state))

        def work() -> None:
            if self._world.device.type == "cuda":  # a new thread's device is the first one
                torch.cuda.set_device(self._world.device)
            write(copy)

        return in_thread(work, "checkpoint writer")


class Staging:
    """Host memory for one copy of this rank's part of the state; it stays for the run."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pins = device.type == "cuda"
        self._kept: dict[tuple[Any, ...], Tensor] = {}  # by path in the state, and layout

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """The state with every tensor in this memory, in place of the copy before."""
        copy: State = tree_map_with_path(self._staged, state)
        if self._device.type == "cuda":
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
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return leaf.detach().to("cpu", copy=True)
        layout = (leaf.dtype, leaf.size(), leaf.stride())
        target = self._kept.get((path, layout))
        if target is None:
            target = self._kept[path, layout] = self._empty_like(leaf)
        return target.copy_(leaf, non_blocking=True)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        """Host memory for it, pinned if there is a GPU and the system allows it."""
        if self._pins:
            try:
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError as error:
                text = (
                    f"warning: {tensor.nbytes:,} bytes of host memory can't be pinned for "
                    f"background saves ({str(error).splitlines()[0]}), which take longer; give the "
                    "job more host memory"
                )
                print(text, file=sys.stderr, flush=True)
                self._pins = False
        return torch.empty_like(tensor, device="cpu")


def without_replicas(state: State, world: World) -> State:
    """The state without the replicas that another rank writes; they are spread over ranks by size.

    Of an ordinary tensor one rank keeps it, of a DTensor one replica of the mesh. The entries under
    "ranks" differ, so each rank keeps its own.
    """
    bytes_of: dict[int, list[int]] = {}  # {replicas: bytes that each of them keeps}

    def keeps(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return True
        replica, replicas = _replica(value, world)
        kept = bytes_of.setdefault(replicas, [0] * replicas)
        keeper = kept.index(min(kept))
        kept[keeper] += value.numel() * value.element_size()
        return keeper == replica

    def part_of(section: State) -> State:
        kept = {}
        for name, value in section.items():
            if isinstance(value, dict):
                kept[name] = part_of(value)
            elif keeps(value):
                kept[name] = value
        return kept

    shared = {name: section for name, section in state.items() if name != "ranks"}
    return {**part_of(shared), "ranks": state["ranks"]}


def _replica(value: Tensor, world: World) -> tuple[int, int]:
    """(which replica of the tensor this rank has or has a shard of, how many there are)."""
    if not isinstance(value, DTensor):
        return world.rank, world.world_size
    replica = 0
    replicas = 1
    mesh = value.device_mesh
    coordinates: Any = mesh.get_coordinate()
    for size, coordinate, placement in zip(mesh.shape, coordinates, value.placements, strict=True):
        if placement.is_replicate():
            replica = replica * size + coordinate
            replicas *= size
    return replica, replicas
