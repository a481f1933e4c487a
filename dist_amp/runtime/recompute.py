"""Activation checkpointing: blocks that keep only their inputs and run their forward again in backward."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_amp.errors import ConfigError
from dist_amp.settings import Checkpointing

Forward = Callable[..., Any]


def checkpoint_activations(checkpointing: Checkpointing, blocks: Sequence[nn.Module]) -> None:
    """Recompute every n-th block ("full": all; "none": none) in backward.

    Counted from the first block: backward needs the last one's activations at once. Errors: ConfigError if there are
    fewer than n blocks.
    """
    if checkpointing == "none":
        return
    every = 1 if checkpointing == "full" else int(checkpointing)
    name = f"parallel.activation_checkpointing={checkpointing}"
    if not blocks:
        raise ConfigError(f"{name}: the model has no blocks; add `def blocks(self, model)` to the task, or use none")
    if every > len(blocks):
        raise ConfigError(f"{name} is more than the model's {len(blocks)} blocks; use 1 to {len(blocks)}, or none")
    for block in blocks[::every]:
        block.forward = recomputed(block.forward)


def recomputed(forward: Forward) -> Forward:
    """A forward that is run again in backward, with the same random numbers and autocast."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations anyway
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call
