"""Nested structures, such as samples and batches: find their tensors, move them to a device.

Structures are torch's pytrees (dicts, lists, ...), and may contain objects with a `to(device)`.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

WITHOUT_TENSORS = (str, bytes, int, float, type)  # not searched: a class has many attributes


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in a nested structure, in order, attributes of objects included."""
    if seen is None:
        seen = set()  # objects may refer to one another
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, WITHOUT_TENSORS) and id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value).values():
            yield from tensors(part, seen)


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return dict(enumerate(value))
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    names = [*getattr(value, "__dict__", ()), *slots]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; a GPU copies them from pinned memory.

    Other objects are moved by their method `to`, or stay where they are.
    """

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            # The host does not wait for a copy from pinned memory. A tensor that the loader has
            # pinned is not copied again.
            if device.type == "cuda" and part.device.type == "cpu" and part.layout == torch.strided:
                part = part.pin_memory()
            return part.to(device, non_blocking=True)
        if not _moves_itself(part):
            return part
        try:
            at_device = part.to(device, non_blocking=True)
        except TypeError:  # a `to` without that argument
            at_device = part.to(device)
        return part if at_device is None else at_device  # None: `to` works in place

    return tree_map(moved, batch, is_leaf=_moves_itself)


def _moves_itself(part: Any) -> bool:
    return callable(getattr(part, "to", None))


class CopyStream:
    """Copies a step's micro-batches to the GPU on its own stream; the host does not wait for it.

    Kernels that are queued on the current stream after the call wait for the copy on the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._last_call: Any = None  # an event on the compute stream, recorded by each call

    def __call__(self, batches: list[Any]) -> list[Any]:
        compute = torch.cuda.current_stream(self.device)
        if self._last_call is not None:
            # Wait for the kernels before the last call: at most two steps' batches are on the GPU.
            self._last_call.synchronize()
        # blocking: its synchronize() sleeps, and takes no CPU time from other threads.
        self._last_call = torch.cuda.Event(blocking=True)
        self._last_call.record(compute)
        with torch.cuda.stream(self._stream):
            moved = [to_device(batch, self.device) for batch in batches]
        compute.wait_stream(self._stream)
        for tensor in tensors(moved):
            if tensor.device.type == self.device.type:
                # Else the allocator could give its memory to a copy while kernels still read it.
                tensor.record_stream(compute)
        return moved
