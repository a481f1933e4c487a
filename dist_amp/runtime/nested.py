"""Nested structures, as samples and batches come: their tensors, and the same on a device or in pinned memory.

A batch may hold dicts and other mappings, lists, tuples, named tuples, dataclasses, and objects that move themselves
(transformers' BatchEncoding, torch's PackedSequence, graphs): whatever has a `to(device)`.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import DataError, in_one_line

PLAIN = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, torch.Size)


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested dicts, lists and tuples, in order. Other classes, also those derived from dict, are leaves."""
    if type(value) in (dict, OrderedDict, defaultdict):
        value = list(value.values())
    if type(value) in (list, tuple, deque) or hasattr(value, "_fields"):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in a nested structure, in order, also those that objects hold as attributes; each object once."""
    seen = set() if seen is None else seen  # objects may refer to one another
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, PLAIN) and id(value) not in seen:
        seen.add(id(value))
        for _, part in _parts(value):
            yield from tensors(part, seen)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; from pinned memory without waiting.

    Errors: DataError for an object that holds tensors elsewhere and can't be moved.
    """
    return _with_tensors(batch, "to", partial(_move, device=device))


def pinned(batch: Any) -> Any:
    """The same structure with its tensors in page-locked memory, from which copies to a GPU need not be waited for."""
    return _with_tensors(batch, "pin_memory", _pin)


def plain_mappings(value: Any) -> Any:
    """The same with plain dicts in place of other mappings, whose classes could not be unpickled safely."""
    if isinstance(value, Mapping):
        return {key: plain_mappings(part) for key, part in value.items()}
    return type(value)(map(plain_mappings, value)) if type(value) in (list, tuple) else value


def _with_tensors(value: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """The structure with `change(part)` for tensors, objects that have the method, and what is no container.

    Containers keep their class.
    """
    if isinstance(value, (Tensor, *PLAIN)) or callable(getattr(value, method, None)):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _with_tensors(part, method, change) for key, part in value.items()}
        return changed if type(value) is dict else _of_same_class(value, changed)
    if isinstance(value, list | tuple | deque):
        parts = [_with_tensors(part, method, change) for part in value]
        return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if is_dataclass(value):
        other = copy.copy(value)
        for one in fields(value):
            if hasattr(value, one.name):  # set past the class, which may be frozen
                object.__setattr__(other, one.name, _with_tensors(getattr(value, one.name), method, change))
        return other
    return change(value)


def _of_same_class(mapping: Any, items: dict[Any, Any]) -> Any:
    """A copy of a dict's subclass or another mapping with other values; a dict where it can't be changed."""
    try:
        changed = copy.copy(mapping)
        for key, value in items.items():
            changed[key] = value
    except TypeError:
        return items
    return changed


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    if isinstance(leaf, PLAIN):
        return leaf
    if not hasattr(leaf, "to"):
        if device.type != "cpu":
            _check_holds_no_tensor_elsewhere(leaf, device)
        return leaf
    try:
        try:
            moved = leaf.to(device, non_blocking=True)
        except TypeError:  # a `to` without that argument
            moved = leaf.to(device)
    except Exception as error:
        raise DataError(
            f"a batch holds a {type(leaf).__name__} whose to({str(device)!r}) failed: {in_one_line(error)}; fix it, or "
            "return its tensors in a dict or dataclass from collate(samples)"
        ) from error
    return leaf if moved is None else moved  # None: it has moved in place


def _check_holds_no_tensor_elsewhere(value: Any, device: torch.device) -> None:
    """Errors: DataError, since the task would get it with some tensors on the host."""
    for name, part in _parts(value):
        if any(tensor.device.type != device.type for tensor in tensors(part)):
            raise DataError(
                f"a batch holds a {type(value).__name__} whose {name} has a tensor that can't be moved to {device}; "
                "give the class a method to(device), or make it a dataclass"
            )


def _pin(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and (leaf.device.type != "cpu" or leaf.layout != torch.strided):
        return leaf
    return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a container or object holds."""
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from ((str(number), part) for number, part in enumerate(value))
    else:
        slots = (name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()))
        for name in dict.fromkeys((*getattr(value, "__dict__", ()), *slots)):
            if hasattr(value, name):
                yield name, getattr(value, name)
