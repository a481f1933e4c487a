"""A tensor's version: torch's count of the writes to it in place. Without it, only values and identities can tell."""

from contextlib import suppress

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Rises with each write in place; always 0 if this torch, or an inference tensor, has none."""
    with suppress(RuntimeError):
        return getattr(tensor, "_version", 0)
    return 0
