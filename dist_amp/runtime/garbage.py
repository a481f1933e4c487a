"""Python's garbage collection at fixed steps, the same ones on all ranks."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def scheduled_garbage(every: int | Literal["off"]) -> Iterator[Callable[[int], None]]:
    """Turn automatic collection off; yield collect(step), which collects every so many steps.

    Automatic collections happen at different steps on each rank, and each one makes all other ranks wait. Objects that
    exist at the start (mostly modules) are frozen, because scanning them too made a full collection take 127 ms.
    """
    if every == "off" or not gc.isenabled():
        yield lambda step: None
        return

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
