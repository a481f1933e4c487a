"""Activation checkpointing: blocks keep a part of their activations, and recompute the rest."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dist_amp.errors import ConfigError
from dist_amp.settings import Checkpointing

Forward = Callable[..., Any]

Copies = dict[tuple[nn.Module, str], Tensor]  # by the module and the name of a buffer

# What "selective" keeps besides attention: operations that take long for their results' bytes.
PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::convolution",
}
BATCHED_PRODUCTS = {"aten::bmm", "aten::baddbmm"}
LARGEST_HEAD = 256  # the widest head of FlashAttention's kernels (Dao 2023, arXiv:2307.08691)


def checkpoint_activations(checkpointing: Checkpointing, blocks: Sequence[nn.Module]) -> None:
    """Recompute every n-th block ("full", "selective": all) in backward, from the first one on.

    Errors: ConfigError if there are fewer than n blocks.
    """
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
    selected = partial(create_selective_checkpoint_contexts, policy)
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = selected
    buffers = Buffers(block)

    def contexts(copies: Copies) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if selective:
            first, again = selected()
        return first, buffers.second_run(copies, again)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations anyway
            return forward(*args, **kwargs)
        # Compiled code updates buffers once, and takes only torch's contexts.
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
        copies = buffers.copies()
        around = partial(contexts, copies)
        outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=around, **kwargs)
        buffers.drop_unwritten(copies)
        return outputs

    return call


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What "selective" keeps: results of attention, matrix products and convolutions.

    It recomputes attention's scores where they are a product of their own (Korthikanti et al. 2022,
    arXiv:2205.05198: many bytes, little arithmetic), and attention with dropout: skipping it would
    shift all later random numbers.
    """
    name: str = operation.name()
    keep = name in PRODUCTS
    if name in BATCHED_PRODUCTS:
        left, right = args[-2:]  # [B, M, K], [B, K, N]; baddbmm has a bias before them
        inner = left.shape[2]
        smaller = min(left.shape[1], right.shape[2])
        keep = inner > LARGEST_HEAD or inner >= smaller
    elif "attention" in name or "flash_attn" in name:
        # In all of these the first float is the dropout's.
        keep = not kwargs.get(
            "dropout_p", next((value for value in args if isinstance(value, float)), 0.0)
        )
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Buffers:
    """A block's buffers: its second run finds them as the first one did, and does not change them.

    Which of them a forward writes to, as batch norm does, is what the first forward of a mode
    (training or not) writes to: comparing values reads the device. Where another one is written to
    later, the second run finds the new value.
    """

    def __init__(self, block: nn.Module):
        self._places = [
            (owner, name)
            for owner in block.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._is_written: dict[tuple[nn.Module, str, bool], bool] = {}

    def copies(self) -> Copies:
        """Copies of those that a forward may write to."""
        return {
            (owner, name): getattr(owner, name).clone()
            for owner, name in self._places
            if self._is_written.get((owner, name, owner.training), True)
        }

    def drop_unwritten(self, copies: Copies) -> None:
        """After a forward: drop the copies of those that it left as they were."""
        for (owner, name), copy in list(copies.items()):
            key = (owner, name, owner.training)
            if key not in self._is_written:
                self._is_written[key] = not torch.equal(getattr(owner, name), copy)
            if not self._is_written[key]:
                del copies[owner, name]

    @contextmanager
    def second_run(self, copies: Copies, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """With the buffers as they were, in copies. Errors: ConfigError for writes in place."""
        current = {(owner, name): getattr(owner, name) for owner, name in self._places}
        try:
            for (owner, name), tensor in current.items():
                copy = copies.get((owner, name))
                setattr(owner, name, tensor.clone() if copy is None else copy)
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
