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

Place = tuple[nn.Module, str]  # a module and the name of its buffer

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
    every = checkpointing if isinstance(checkpointing, int) else 1
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
    contexts: Callable[[], Any] = noop_context_fn
    if selective:
        contexts = partial(create_selective_checkpoint_contexts, policy)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations anyway
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        # Compiled code updates buffers once, and takes only torch's contexts.
        if torch.compiler.is_compiling():
            if selective:
                options["context_fn"] = contexts
            return checkpoint(forward, *args, **options, **kwargs)
        copies, versions = buffers.before()

        def both_runs() -> tuple[Any, Any]:
            first, again = contexts()
            return first, buffers.second_run(copies, again)

        outputs = checkpoint(forward, *args, context_fn=both_runs, **options, **kwargs)
        buffers.note_written(copies, versions)
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

    The first forward in training mode, and the first in evaluation mode, are compared by value with
    copies of all buffers, which reads the device. Later ones copy only what that one changed, and
    look at torch's counts of writes in place for the rest.
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._places: list[Place] = [
            (owner, name)
            for owner in block.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._written: dict[bool, list[Place]] = {}  # by the mode

    def before(self) -> tuple[dict[Place, Tensor], dict[Place, tuple[Tensor, int]]]:
        """Copies of the buffers that a forward may change; the rest, each with its write count."""
        places = self._written.get(self._block.training, self._places)
        copies = {place: getattr(*place).clone() for place in places}
        others = {place: getattr(*place) for place in self._places if place not in copies}
        return copies, {place: (tensor, tensor._version) for place, tensor in others.items()}

    def note_written(
        self, copies: dict[Place, Tensor], versions: dict[Place, tuple[Tensor, int]]
    ) -> None:
        """Add to `copies` what a forward replaced; after the first of a mode, note what it changed.

        Errors: ConfigError for a write in place that the first had not made.
        """
        for (owner, name), (tensor, version) in versions.items():
            if getattr(owner, name) is not tensor:
                copies[owner, name] = tensor
            if tensor._version != version:
                raise ConfigError(
                    f"parallel.activation_checkpointing: {type(owner).__name__}.{name} is written "
                    "in place, but not in the first forward; assign a new tensor, or use none"
                )
        if self._block.training not in self._written:
            changed = [
                place for place, copy in copies.items() if not torch.equal(getattr(*place), copy)
            ]
            self._written[self._block.training] = changed

    @contextmanager
    def second_run(
        self, copies: dict[Place, Tensor], inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """With the buffers as in `copies`. ConfigError for a changed kept result."""
        current = {place: getattr(*place) for place in self._places}
        try:
            for place, tensor in current.items():
                setattr(*place, copies.get(place, tensor).clone())
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
            for place, tensor in current.items():
                setattr(*place, tensor)
