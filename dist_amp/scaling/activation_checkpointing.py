"""Activation checkpointing: blocks keep some activations, and recompute the rest in backward.

The recomputation must repeat the first forward. torch restores the random state; this file restores
the buffers, which a forward may change (as batch norm does), and keeps them from changing twice.

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
BufferKey = tuple[nn.Module, str]  # a module and the name of its buffer
SMALL = 2**22  # buffers of up to this many elements are copied for the recomputation

# Operations whose results "selective" keeps, besides attention: slow to recompute, small to keep.
# Batched products are left out, because those of attention scores are large and fast to recompute
# (Korthikanti et al. 2022, arXiv:2205.05198). torchtitan makes a similar choice.
PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::convolution",
    "torch_attn::_varlen_attn",  # has no dropout; its float argument is a scale
}


def checkpoint_activations(checkpointing: int | str, blocks: Sequence[nn.Module]) -> None:
    """Checkpoint every n-th block from the first on; all blocks for "full" and "selective"."""
    every = checkpointing if isinstance(checkpointing, int) else 1
    if every > len(blocks):
        raise ConfigError(
            f"parallel.activation_checkpointing={checkpointing} needs {every} or more blocks, and "
            f"the model has {len(blocks)}; use a lower number or none, or return the blocks from "
            "`def blocks(self, model)` in the task"
        )
    for block in blocks[::every]:
        block.forward = recomputed(block, selective=checkpointing == "selective")


def recomputed(block: nn.Module, selective: bool = False) -> Forward:
    """The block's forward, wrapped so that backward recomputes it; see the top of this file."""
    forward: Forward = block.forward
    buffers = [
        (owner, name) for owner in block.modules() for name, _ in owner.named_buffers(recurse=False)
    ]
    inner_contexts: Callable[[], Any] = noop_context_fn
    if selective:
        inner_contexts = partial(create_selective_checkpoint_contexts, policy)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations anyway
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        # Compiled code updates buffers only once, and torch.compile accepts only torch's contexts.
        if torch.compiler.is_compiling():
            if selective:
                options["context_fn"] = inner_contexts
            return checkpoint(forward, *args, **options, **kwargs)
        saved = save_buffers(buffers)

        def contexts() -> tuple[Any, Any]:
            in_forward, in_recomputation = inner_contexts()
            return in_forward, restored_buffers(saved, in_recomputation)

        return checkpoint(forward, *args, context_fn=contexts, **options, **kwargs)

    return call


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """For "selective": keep the results of PRODUCTS, and of attention without dropout."""
    name: str = operation.name()
    keep = name in PRODUCTS
    if "attention" in name or "flash_attn" in name:
        # The first float argument is the dropout probability. Attention with dropout is recomputed:
        # keeping its result would skip its random draws, and later draws would differ.
        floats = (value for value in args if isinstance(value, float))
        keep = not kwargs.get("dropout_p", next(floats, 0.0))
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def save_buffers(buffers: Sequence[BufferKey]) -> dict[BufferKey, tuple[Tensor, int]]:
    """Each buffer's tensor before the block runs, and its version (torch's count of writes).

    Buffers of up to SMALL elements are copied, because the count misses some writes, such as those
    of batch norm's kernel. Larger buffers (tables) may be replaced, but not written in place.
    """
    saved = {}
    for key in buffers:
        tensor = getattr(*key)
        if tensor.numel() <= SMALL:
            tensor = tensor.clone()
        saved[key] = (tensor, tensor._version)
    return saved


@contextmanager
def restored_buffers(
    saved: dict[BufferKey, tuple[Tensor, int]], inner: AbstractContextManager[Any]
) -> Iterator[None]:
    """Context in which the module has the saved buffers; on exit, it has its current ones again.

    Raises ConfigError if the forward has written to a large buffer in place.
    """
    current = {key: getattr(*key) for key in saved}
    try:
        for (owner, name), (tensor, version) in saved.items():
            if tensor._version != version:
                raise ConfigError(
                    f"parallel.activation_checkpointing: {type(owner).__name__}.{name}, a buffer "
                    f"of {tensor.numel():,} elements, is written in place, but only smaller ones "
                    "are copied for the recomputation; assign a new tensor to it, or use none"
                )
            # A copy of the copy: the recomputation may write to it, and backward may run twice.
            setattr(owner, name, tensor.clone() if tensor.numel() <= SMALL else tensor)
        with inner:
            yield
    finally:
        for key, tensor in current.items():
            setattr(*key, tensor)
