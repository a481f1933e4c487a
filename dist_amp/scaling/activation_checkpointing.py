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
SMALL = 2**22  # elements of a buffer that is copied for the second run

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
        copies, large = buffers.before()

        def both_runs() -> tuple[Any, Any]:
            first, again = contexts()
            return first, buffers.second_run(copies, again)

        outputs = checkpoint(forward, *args, context_fn=both_runs, **options, **kwargs)
        buffers.add_replaced(copies, large)
        return outputs

    return call


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """ "selective" keeps results of attention without dropout, of products and convolutions."""
    name: str = operation.name()
    keep = name in PRODUCTS
    if "attention" in name or "flash_attn" in name:
        # In all of these the first float is the dropout's.
        floats = (value for value in args if isinstance(value, float))
        keep = not kwargs.get("dropout_p", next(floats, 0.0))
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Buffers:
    """A block's buffers: its second run finds them as the first one did, and does not change them.

    Those of up to SMALL elements are copied before each forward, as it may write to them without a
    trace: torch does not count what batch norm's kernel writes. Larger ones are tables, which may
    be replaced, but not written to in place.
    """

    def __init__(self, block: nn.Module):
        self._places: list[Place] = [
            (owner, name)
            for owner in block.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]

    def before(self) -> tuple[dict[Place, Tensor], dict[Place, tuple[Tensor, int]]]:
        """Copies of the small buffers; the large ones, each with torch's count of its writes."""
        tensors = {place: getattr(*place) for place in self._places}
        copies = {place: t.clone() for place, t in tensors.items() if t.numel() <= SMALL}
        return copies, {p: (t, t._version) for p, t in tensors.items() if p not in copies}

    def add_replaced(
        self, copies: dict[Place, Tensor], large: dict[Place, tuple[Tensor, int]]
    ) -> None:
        """Add the large buffers that a forward has replaced. Errors: ConfigError."""
        for (owner, name), (tensor, version) in large.items():
            if tensor._version != version:
                raise ConfigError(
                    f"parallel.activation_checkpointing: {type(owner).__name__}.{name}, of "
                    f"{tensor.numel():,} elements, is written in place, and only smaller ones are "
                    "copied for the second run; assign a new tensor, or use none"
                )
            copies[owner, name] = tensor

    @contextmanager
    def second_run(
        self, copies: dict[Place, Tensor], inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """Set the buffers as in `copies`. Errors: ConfigError for a changed kept result."""
        current = {place: getattr(*place) for place in self._places}
        try:
            for place, tensor in copies.items():
                # A second run may write to it, and there may be a third.
                setattr(*place, tensor.clone() if tensor.numel() <= SMALL else tensor)
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
