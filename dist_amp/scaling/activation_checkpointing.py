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
    if every > len(blocks):
        raise ConfigError(
            f"parallel.activation_checkpointing={checkpointing} needs {every} or more blocks, and "
            f"the model has {len(blocks)}; use a lower number or none, or name the blocks by "
            "`def blocks(self, model)` in the task"
        )
    for block in blocks[::every]:
        block.forward = recomputed(block, selective=checkpointing == "selective")


def recomputed(block: nn.Module, selective: bool = False) -> Forward:
    """The block's forward, run again in backward with the same random numbers and buffers."""
    forward: Forward = block.forward
    places = [
        (owner, name) for owner in block.modules() for name, _ in owner.named_buffers(recurse=False)
    ]
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
        before = contents_of(places)

        def both_runs() -> tuple[Any, Any]:
            first, again = contexts()
            return first, second_run(before, again)

        return checkpoint(forward, *args, context_fn=both_runs, **options, **kwargs)

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


def contents_of(places: Sequence[Place]) -> dict[Place, tuple[Tensor, int]]:
    """What a block is about to read in its buffers, each with torch's count of writes to it.

    Those of up to SMALL elements are copied, as the block may write to them without a trace: torch
    does not count what batch norm's kernel writes. Larger ones are tables, which may be replaced,
    but not written to in place.
    """
    contents = {}
    for place in places:
        tensor = getattr(*place)
        if tensor.numel() <= SMALL:
            tensor = tensor.clone()
        contents[place] = (tensor, tensor._version)
    return contents


@contextmanager
def second_run(
    contents: dict[Place, tuple[Tensor, int]], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    """The block's second run finds its buffers as the first one did, and does not change them.

    Errors: ConfigError for a large buffer that was written to since.
    """
    current = {place: getattr(*place) for place in contents}
    try:
        for (owner, name), (tensor, version) in contents.items():
            if tensor._version != version:
                raise ConfigError(
                    f"parallel.activation_checkpointing: {type(owner).__name__}.{name}, of "
                    f"{tensor.numel():,} elements, is written in place, and only smaller ones are "
                    "copied for the second run; assign a new tensor, or use none"
                )
            # A second run may write to it, and there may be a third.
            setattr(owner, name, tensor.clone() if tensor.numel() <= SMALL else tensor)
        with inner:
            yield
    finally:
        for place, tensor in current.items():
            setattr(*place, tensor)
