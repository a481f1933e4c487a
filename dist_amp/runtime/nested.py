"""Nested containers, as samples and batches come: the leaves of dicts, lists and tuples, and their device."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested dicts, lists and tuples, in order. Other classes, also those derived from dict, are leaves."""
    if type(value) in (dict, OrderedDict, defaultdict):
        value = list(value.values())
    if type(value) in (list, tuple, deque) or hasattr(value, "_fields"):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors in nested dicts, lists and tuples moved to the device; from pinned memory without waiting."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
