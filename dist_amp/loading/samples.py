"""The content of a few samples, by which datasets are compared."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_amp.distributed.process import seed_all
from dist_amp.loading.loader import load, read
from dist_amp.task import PLAIN


def spread(length: int, count: int) -> list[int]:
    """The first index below `length`, the last, and others evenly between them."""
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def sample_bytes(dataset: Any, index: int) -> bytes:
    """The content of a sample, with the same random augmentations every time."""
    seed_all(index)
    content = []
    for leaf in tree_leaves(read(dataset, (index,))):
        if isinstance(leaf, Tensor):
            leaf = leaf.cpu().reshape(-1).view(torch.uint8).numpy()
        if hasattr(leaf, "tobytes"):  # arrays and pictures
            content.append(leaf.tobytes())
        elif isinstance(leaf, PLAIN):
            content.append(repr(leaf).encode())
        else:
            content.append(type(leaf).__name__.encode())
    return b"".join(content)


class Calls:
    """What a loader reads from in place of a dataset: the function's results."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __getitem__(self, request: Any) -> Any:
        return self.function(request)


def call_in_worker(
    function: Callable[[Any], Any], requests: Sequence[Any], workers: int, rank: int
) -> list[Any]:
    """function(request) for each request, in a loader worker if the run has any.

    A file that the dataset opens at its first read would otherwise be open when the run's workers
    fork, which would then share its position in the file.
    """
    results, close = load(
        Calls(function), requests.__iter__, workers=min(1, workers), pin_memory=False, rank=rank
    )
    try:
        return [next(results) for _ in requests]
    finally:
        close()
