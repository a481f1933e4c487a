"""Nested containers, as samples and batches come: the leaves of dicts, lists and tuples."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested dicts, lists and tuples, in order. Other classes, also those derived from dict, are leaves."""
    if type(value) in (dict, OrderedDict, defaultdict):
        value = list(value.values())
    if type(value) in (list, tuple, deque) or hasattr(value, "_fields"):
        for part in value:
            yield from leaves(part)
    else:
        yield value
