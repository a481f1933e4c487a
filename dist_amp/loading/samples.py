"""Read the content of a few samples, in a loader worker, to compare datasets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_amp.distributed.process import seed_all
from dist_amp.loading.loader import load, read
from dist_amp.task import PLAIN


def spread(length: int, count: int) -> list[int]:
    """Up to `count` indices below `length`: the first, the last, and others evenly between them."""
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def sample_bytes(dataset: Any, index: int) -> bytes:
    """The content of a sample; random transforms in the dataset do the same each time."""
    seed_all(index)
    content = []
    for leaf in tree_leaves(read(dataset, (index,))):
        if isinstance(leaf, Tensor):
            leaf = leaf.cpu().reshape(-1).view(torch.uint8).numpy()
        if hasattr(leaf, "tobytes"):  # arrays and images
            content.append(leaf.tobytes())
        elif isinstance(leaf, PLAIN):
            content.append(repr(leaf).encode())
        else:
            content.append(type(leaf).__name__.encode())
    return b"".join(content)


@dataclass
class Calls:
    """A dataset for a loader: its samples are the results of a function."""

    function: Callable[[Any], Any]

    def __getitem__(self, request: Any) -> Any:
        return self.function(request)


def call_in_worker(function: Callable[..., Any], data: Any, requests: Sequence[Any]) -> list[Any]:
    """function(dataset, request) for each request, in a loader worker if the run has any: workers
    that are forked later would share a file that the dataset opens in this process.
    """
    calls = Calls(partial(function, data.fetch.dataset))
    workers = min(1, data.workers)
    results, close = load(calls, requests.__iter__, workers=workers, rank=data.plan.rank)
    values = [next(results) for _ in requests]
    close()
    return values
