"""Copies of micro-batches to a GPU that overlap its work: on a stream of their own, one step ahead at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dist_amp.runtime.nested import tensors, to_device
from dist_amp.runtime.plan import Shard


@dataclass(frozen=True)
class Copied:
    """A step's micro-batches that are on the device, or on their way there until `arrived`."""

    batches: list[Any]
    arrived: Any = None  # a CUDA event; None on a CPU


@dataclass(frozen=True)
class Fetched:
    """One step of this rank, with what `data.Batches` counts once it is handed out."""

    position: int
    shards: list[Shard]
    copied: Copied
    items: int
    tokens: int


class Copies:
    """Copies micro-batches to the device; on a CPU it only moves what is elsewhere.

    `start` a step's copy, then `hand_out` before its use, in turn. Starting waits until the device has finished the
    step before the one handed out last, so that no more than two steps' micro-batches are in its memory, however far
    the host could run ahead. cuda: torch.cuda, or what stands in for it in a test.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self._device = device
        self._cuda = cuda
        self._stream: Any = None
        self._handed_out: Any = None  # an event on the compute stream, before the kernels of the step handed out last

    def start(self, batches: Sequence[Any]) -> Copied:
        """Queue the copies of a step's micro-batches. Errors: DataError for what can't be moved."""
        if self._device.type == "cpu":
            return Copied([to_device(batch, self._device) for batch in batches])
        self._stream = self._stream or self._cuda.Stream(self._device)
        if self._handed_out is not None:
            self._handed_out.synchronize()
        with self._cuda.stream(self._stream):
            moved = [to_device(batch, self._device) for batch in batches]
            arrived = self._cuda.Event()
            arrived.record(self._stream)
        return Copied(moved, arrived)

    def hand_out(self, copied: Copied) -> list[Any]:
        """The micro-batches, for use on the current stream, whose kernels from here on wait for the copies."""
        if copied.arrived is None:
            return copied.batches
        compute = self._cuda.current_stream(self._device)
        self._handed_out = self._cuda.Event(blocking=True)  # waiting for it takes no CPU time from other threads
        self._handed_out.record(compute)
        compute.wait_event(copied.arrived)
        for tensor in tensors(copied.batches):
            if tensor.device.type == self._device.type:
                tensor.record_stream(compute)  # else the next copy could be given its memory while kernels read it
        return copied.batches
