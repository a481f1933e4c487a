"""Activation checkpointing: blocks keep a part of their activations, and recompute the rest.

Docs: docs/recipes.md
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from dist_amp.errors import ConfigError

Forward = Callable[..., Any]

Copies = dict[tuple[nn.Module, str], Tensor]  # by the module and the name of a buffer

# What "selective" keeps besides attention: operations that take long for their results' bytes. Not
# batched products: attention's scores, where they are one, have many bytes for little arithmetic
# (Korthikanti et al. 2022, arXiv:2205.05198). torchtitan chooses alike.
PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::convolution",
    "torch_attn::_varlen_attn",  # attention without dropout, whatever its scale
}


def checkpoint_activations(checkpointing: int | str, blocks: Sequence[nn.Module]) -> None:
    """Recompute every n-th block ("full", "selective": all) in backward, from the first one on."""
    every = 1
    if isinstance(checkpointing, int):
        every = checkpointing
    name = f"parallel.activation_checkpointing={checkpointing}"
    if not blocks:
        raise ConfigError(
            f"{name}: the model has no blocks; add `def blocks(self, model)` to the task, or use "
            "none"
        )
    if every > len(blocks):
        raise ConfigError(
            f"{name} is more than the model's {len(blocks)} blocks; use 1 to {len(blocks)}, or none"
        )
    for block in blocks[::every]:
        block.forward = recomputed(block, selective=checkpointing == "selective")


def recomputed(block: nn.Module, selective: bool = False) -> Forward:
    """The block's forward, run again in backward with the same random numbers and buffers."""
    forward: Forward = block.forward
    buffers = Buffers(block)
    options: dict[str, Any] = {"use_reentrant": False}
    contexts: Callable[[], Any] = noop_context_fn
    if selective:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        options["context_fn"] = contexts

    def with_buffers(copies: Copies) -> tuple[Any, Any]:
        first, again = contexts()
        return first, buffers.second_run(copies, again)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations anyway
            return forward(*args, **kwargs)
        # Compiled code updates buffers once, and takes only torch's contexts.
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **options, **kwargs)
        copies, others = buffers.before()
        around = partial(with_buffers, copies)
        outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=around, **kwargs)
        buffers.note_written(copies, others)
        return outputs

    return call


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What "selective" keeps: results of attention without dropout, products and convolutions."""
    name: str = operation.name()
    keep = name in PRODUCTS
    if "attention" in name or "flash_attn" in name:
        # In all of these the first float is the dropout's.
        floats = (value for value in args if isinstance(value, float))
        keep = not kwargs.get("dropout_p", next(floats, 0.0))
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Buffers:
    """A block's buffers: its second run finds them as the first one did, and does not change them.

    Which of them a forward writes to is taken from the first forward of a mode (training or not):
    comparing values reads the device. Later ones only compare torch's counts of writes in place.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._places = [
            (owner, name)
            for owner in block.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._written: dict[bool, list[tuple[nn.Module, str]]] = {}  # by the mode

    def before(self) -> tuple[Copies, dict[Any, tuple[Tensor, int]]]:
        """Copies of those that a forward may write to; the others, each with its write count."""
        places = self._written.get(self._block.training, self._places)
        copies = {(owner, name): getattr(owner, name).clone() for owner, name in places}
        others = {place: getattr(*place) for place in self._places if place not in copies}
        return copies, {place: (tensor, tensor._version) for place, tensor in others.items()}

    def note_written(self, copies: Copies, others: dict[Any, tuple[Tensor, int]]) -> None:
        """After a forward: the second run takes what it replaced; the first of a mode notes writes.

        Errors: ConfigError for a write in place that the first had not made.
        """
        for (owner, name), (tensor, version) in others.items():
            if getattr(owner, name) is not tensor:
                copies[owner, name] = tensor
            if tensor._version != version:
                raise ConfigError(
                    f"parallel.activation_checkpointing: {type(owner).__name__}.{name} is written "
                    "in place, but not in the first forward; assign a new tensor, or use none"
                )
        if self._block.training not in self._written:
            self._written[self._block.training] = [
                (owner, name)
                for (owner, name), copy in copies.items()
                if not torch.equal(getattr(owner, name), copy)
            ]

    @contextmanager
    def second_run(self, copies: Copies, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """With the buffers as they were, in copies. Errors: ConfigError for writes in place."""
        current = {(owner, name): getattr(owner, name) for owner, name in self._places}
        try:
            for (owner, name), tensor in current.items():
                setattr(owner, name, copies.get((owner, name), tensor).clone())
            with inner:
                yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise ConfigError(
                "parallel.activation_checkpointing=selective: a block changes the result of a "
                "matrix product, convolution or attention in place, as nn.ReLU(inplace=True) does; "
                "use inplace=False, or full"
            ) from error
        finally:
            for (owner, name), tensor in current.items():
                setattr(owner, name, tensor)
