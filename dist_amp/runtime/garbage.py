"""Python's garbage collection on a schedule, on all ranks at once."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def scheduled_garbage(every: int | Literal["off"]) -> Iterator[Callable[[int], None]]:
    """What collects garbage at every so many steps, and keeps Python from doing so in between.

    Python's own collections come at other times on each rank, and the others wait for it. What is there at the start,
    modules above all, is not looked at again: with it, a full collection took 127 ms.
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
