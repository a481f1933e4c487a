"""Nested structures, as samples and batches come: their tensors, and the same on a device or in
pinned memory.

A batch may hold what torch's pytrees know (dicts, lists, tuples, named tuples), other mappings,
dataclasses, and objects that move themselves (transformers' BatchEncoding, torch's PackedSequence,
graphs): whatever has a `to(device)`.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dist_amp.errors import DataError, in_one_line

NO_TENSORS = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device)


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in a nested structure, in order, also those that objects hold as attributes; each
    object once.
    """
    if seen is None:
        seen = set()  # objects may refer to one another
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, NO_TENSORS) and id(value) not in seen:
        seen.add(id(value))
        for _, part in _parts(value):
            yield from tensors(part, seen)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; from pinned memory without waiting.

    Errors: DataError for an object that holds tensors elsewhere and can't be moved.
    """
    return _changed(batch, "to", partial(_move, device=device))


def pinned(batch: Any) -> Any:
    """The same structure with its tensors in page-locked memory, from which copies to a GPU need
    not be waited for.
    """
    return _changed(batch, "pin_memory", _pin)


def plain_mappings(value: Any) -> Any:
    """The same with plain dicts in place of other mappings, whose classes could not be unpickled
    safely.
    """
    if isinstance(value, Mapping):
        return {key: plain_mappings(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_mappings, value))
    return value


def _changed(value: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """The structure with `change(part)` for tensors, objects that have the method, and what holds
    nothing. Containers keep their class.
    """

    def has_method(part: Any) -> bool:  # also of a named tuple, as torch's PackedSequence is
        return callable(getattr(part, method, None))

    def changed(part: Any) -> Any:
        if has_method(part):
            return change(part)
        if isinstance(part, Mapping):
            return _with_items(part, {key: inside(item) for key, item in part.items()})
        if is_dataclass(part) and not isinstance(part, type):
            other = copy.copy(part)
            for one in fields(part):
                if hasattr(part, one.name):  # set past the class, which may be frozen
                    object.__setattr__(other, one.name, inside(getattr(part, one.name)))
            return other
        return change(part)

    def inside(part: Any) -> Any:
        return tree_map(changed, part, is_leaf=has_method)

    return inside(value)


def _with_items(mapping: Any, items: dict[Any, Any]) -> Any:
    """A copy of a mapping with other values; a dict where it can't be changed."""
    try:
        other = copy.copy(mapping)
        for key, value in items.items():
            other[key] = value
    except TypeError:
        return items
    return other


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    if isinstance(leaf, NO_TENSORS):
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
            f"a batch holds a {type(leaf).__name__} whose to({str(device)!r}) failed: "
            f"{in_one_line(error)}; fix it, or return its tensors in a dict or dataclass from "
            "collate(samples)"
        ) from error
    if moved is None:  # it has moved in place
        return leaf
    return moved


def _check_holds_no_tensor_elsewhere(value: Any, device: torch.device) -> None:
    """Errors: DataError, since the task would get it with some tensors on the host."""
    for name, part in _parts(value):
        if any(tensor.device.type != device.type for tensor in tensors(part)):
            raise DataError(
                f"a batch holds a {type(value).__name__} whose {name} has a tensor that can't be "
                f"moved to {device}; give the class a method to(device), or make it a dataclass"
            )


def _pin(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        can_be_pinned = leaf.device.type == "cpu" and leaf.layout == torch.strided
    else:
        can_be_pinned = callable(getattr(leaf, "pin_memory", None))
    if can_be_pinned:
        return leaf.pin_memory()
    return leaf


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
