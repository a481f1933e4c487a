"""The content of a few samples, by which datasets are compared."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_amp.distributed.process import seed_all
from dist_amp.loading.loader import read
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
