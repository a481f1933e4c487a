"""Saves by a thread: with checkpoint.async_save training waits only for a copy on the host.

Its memory, pinned with a GPU, is filled again by each save: fresh memory costs more than the copy.
torch's DefaultStager (2.13.0) fails on tensors that are made of others, on sparse ones, and where
memory can't be pinned.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


class Save:
    """A checkpoint that each rank's thread writes: stuck once all are idle for run.timeout_seconds.

    Idle is a thread that uses no processor: a call blocks, or it waits for other ranks. Nothing can
    end it, so a stuck save stays the saver's `pending`, and no other starts: they share a process
    group.
    """

    def __init__(self, run: Run, snapshot: Snapshot, write: Callable[..., None], staging: Any):
        """staging: write a copy made by it, without what another rank writes. Errors: Failure."""
        self.why = ""  # it is stuck, as all ranks have agreed
        self._run = run
        self._folder = snapshot.folder
        self._live_state = snapshot.state if staging is None else {}  # not a copy
        self._timeout = run.config.run.timeout_seconds
        self._thread = 0
        self._clock = time.CLOCK_MONOTONIC  # the thread's processor time, once it has started
        self._used = 0.0
        self._idle_since = 0.0
        if staging is not None:
            state = without_replicas(snapshot.state, run.world)
            snapshot = replace(snapshot, state=staging.copy(state))

        def work() -> None:
            self._thread = threading.get_ident()
            self._clock = time.pthread_getcpuclockid(self._thread)
            if run.world.device.type == "cuda":  # a new thread's device is the first one
                torch.cuda.set_device(run.world.device)
            write(snapshot)

        self.future = in_thread(work, "checkpoint writer")

    def done(self) -> bool:
        """Whether it has ended on this rank, or has been idle for too long and nobody knows."""
        return self.future.done() or (self._idle_seconds() >= self._timeout and not self.why)

    def result(self) -> None:
        """Wait until it ends or is stuck; every rank calls it. Errors: Failure, if stuck once."""
        was_stuck = self.why
        self.why = ""
        idle = [0.0]  # seconds, of the ranks whose part has not ended
        while idle and min(idle) < self._timeout:
            wait([self.future], 0 if was_stuck else min(1.0, self._timeout / 10))
            mine = (self.future.done(), self._idle_seconds())
            ranks = self._run.world.gather(mine)
            idle = [seconds for has_ended, seconds in ranks if not has_ended]
        if not idle:
            self.future.result()
            return
        self._live_state.clear()  # the next step changes its tensors: they are no checkpoint
        texts = enumerate(self._run.world.gather(self._place()))
        places = [f"rank {rank} {place}" for rank, place in texts if place]
        self.why = (
            f"{self._folder.name} has made no progress for {min(idle):.0f} s, of "
            f"run.timeout_seconds={self._timeout:g} ({some_of(places)}); check the file system"
        )
        if not was_stuck:
            raise Transient(f"{self._folder} could not be written: {self.why}")

    def _idle_seconds(self) -> float:
        """How long this rank's thread has used no processor, as far as this was called."""
        with suppress(OSError):  # it has ended
            used = time.clock_gettime(self._clock)
            if used != self._used:
                self._idle_since = time.monotonic()
            self._used = used
        return time.monotonic() - self._idle_since

    def _place(self) -> str:
        """Such as "in publish: sync_folder (files.py, line 78)"; "" if it waits or has ended."""
        frame = sys._current_frames().get(self._thread)
        places = traceback.extract_stack(frame) if frame is not None else []
        files = [place.filename for place in places]
        if not files or dist.distributed_c10d.__file__ in files:
            return ""
        folder = str(Path(__file__).parent)
        stages = [place.name for place in places if place.filename.startswith(folder)]
        name = Path(files[-1]).name
        return f"in {stages[-1]}: {places[-1].name} ({name}, line {places[-1].lineno})"


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

    Of an ordinary tensor one rank keeps it, of a DTensor one replica of the mesh. Each rank keeps
    its own entries under "ranks", "task" and "observer", which the others don't have.
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

    per_rank = {
        name: part
        for name, part in state.items()
        if name.partition(" ")[0] in ("ranks", "task", "observer")
    }
    shared = {name: section for name, section in state.items() if name not in per_rank}
    return {**part_of(shared), **per_rank}


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
