"""Whether what was read from a checkpoint has the types that were written."""

from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def fits(value: Any, hint: Any) -> bool:
    """Whether what was read from a file has this type, and a dataclass's fields have theirs."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if kind is Any:
        return True
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if is_dataclass(kind):
        hints = _hints_of(kind)  # type: ignore[arg-type]
        known = type(value) is kind and vars(value).keys() <= hints.keys()
        # A field that is missing has no type.
        return known and all(fits(getattr(value, name, ...), hints[name]) for name in hints)
    if kind in (dict, list):
        if type(value) is not kind:
            return False
        items = value.items() if kind is dict else zip(value)
        return all(all(map(fits, item, parts)) for item in items)
    is_large = isinstance(value, int) and abs(value) >= 2**63
    return isinstance(value, (int, float) if kind is float else kind) and not is_large


_hints_of = cache(get_type_hints)
