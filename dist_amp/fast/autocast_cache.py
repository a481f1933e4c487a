"""Autocast's cache of cast weights, kept over all micro-batches of a step.

torch empties the cache when the outermost autocast context ends, so a step of K micro-batches casts each weight K
times. Raising the nesting level, as torch.autocast itself does, keeps the cache. Measured for two layers of 64 in bf16
and 4 micro-batches on one CPU core: 0.97 of the step's time (median of 40 pairs). Without the two functions each
micro-batch casts again, with the same results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_raise: Callable[[], int] | None = getattr(torch, "autocast_increment_nesting", None)
_lower: Callable[[], int] | None = getattr(torch, "autocast_decrement_nesting", None)


@contextmanager
def keep_autocast_cache() -> Iterator[None]:
    """Inside, autocast casts each weight at its first use only; the weights must not change meanwhile.

    Autocast itself stays off outside of its own contexts, in backward above all. On a GPU, activation checkpointing
    enters autocast in another thread and empties the cache when it leaves: weights are cast more often then.
    """
    if _raise is None or _lower is None:
        yield
        return
    _raise()
    try:
        yield
    finally:
        if _lower() == 0:
            torch.clear_autocast_cache()
