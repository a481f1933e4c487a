"""Ending a DataLoader's worker processes at a chosen moment; torch itself ends them when its iterator is collected.

Not about speed: these are private methods, and this is their place. Without them the workers end with their iterator.
"""

from contextlib import suppress
from typing import Any


def shut_down(iterator: Any) -> None:
    """Let the workers finish, and wait for them."""
    with suppress(RuntimeError):  # a worker has died already
        getattr(iterator, "_shutdown_workers", lambda: None)()


def kill(iterator: Any) -> None:
    """End workers that do not react to `shut_down`."""
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()
