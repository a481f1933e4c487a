"""Activation checkpointing: blocks that keep only their inputs and run again in backward."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_amp.errors import ConfigError
from dist_amp.settings import Checkpointing

Forward = Callable[..., Any]


def _chosen(checkpointing: Checkpointing, blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Every n-th block, from the first on: the last one's activations are needed again at once."""
    every = 1 if checkpointing == "full" else int(checkpointing)
    name = f"parallel.activation_checkpointing={checkpointing}"
    if not blocks:
        raise ConfigError(f"{name}: the model has no blocks; add `def blocks(self, model)` to the task, or use none")
    if every > len(blocks):
        raise ConfigError(f"{name} is more than the model's {len(blocks)} blocks; use 1 to {len(blocks)}, or none")
    return blocks[::every]


def recomputed(forward: Forward) -> Forward:
    """A forward that keeps its inputs alone, and runs again in backward with the same random numbers and autocast."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps nothing anyway
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call
