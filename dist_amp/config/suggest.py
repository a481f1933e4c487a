"""Did you mean: the known name that is most like a mistyped one."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name most similar to `name`, at least `cutoff` of 1, or an empty string."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
