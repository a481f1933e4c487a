"""Activation checkpointing: blocks that keep a part of their activations, and compute the rest
again in backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, NamedTuple

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

# What "selective" keeps besides attention: operations that take long for the bytes of their
# results.
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
    """Recompute every n-th block ("full", "selective": all; "none": none) in backward.

    Counted from the first block: backward needs the last one's activations at once. Errors:
    ConfigError if there are fewer than n blocks.
    """
    if checkpointing == "none":
        return
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
    """The block's forward, run again in backward with the same random numbers, autocast and
    buffers.
    """
    forward: Forward = block.forward
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    buffers = Buffers(block)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations anyway
            return forward(*args, **kwargs)
        # Compiled code updates buffers once, and takes only torch's contexts.
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
        before = buffers.copies()
        contexts = partial(_contexts, selective, before)
        outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        buffers.keep_written(before)
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
        keep = left.shape[2] > LARGEST_HEAD or left.shape[2] >= min(left.shape[1], right.shape[2])
    elif "attention" in name or "flash_attn" in name:
        # In all of these the first float is the dropout's.
        keep = not kwargs.get(
            "dropout_p", next((value for value in args if isinstance(value, float)), 0.0)
        )
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Buffer(NamedTuple):
    """A buffer as it was before a forward."""

    owner: nn.Module
    name: str
    is_training: bool
    tensor: Tensor
    version: int
    copy: Tensor | None  # None: the forward is known to leave it as it is

    @property
    def current(self) -> Tensor:
        return getattr(self.owner, self.name)


class Buffers:
    """A block's buffers. Its forward may write to them, as batch norm does, and its second run must
    not do so again.
    """

    def __init__(self, block: nn.Module):
        self._places = [
            (owner, name)
            for owner in block.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        # Whether a forward writes to it, in training mode or not.
        self._writes: dict[tuple[nn.Module, str, bool], bool] = {}

    def copies(self) -> list[Buffer]:
        """All of them, with copies of those that a forward may write to."""
        buffers = []
        for owner, name in self._places:
            tensor = getattr(owner, name)
            copy = None
            if self._writes.get((owner, name, owner.training), True):
                copy = tensor.clone()
            buffers.append(Buffer(owner, name, owner.training, tensor, version_of(tensor), copy))
        return buffers

    def keep_written(self, before: list[Buffer]) -> None:
        """After a forward: keep in the list, with copies, those that it has written to.

        A mode's first forward compares values, which reads the device: batch norm's kernels write
        without torch's noticing. A buffer first written to later has no copy of its old value, and
        the second run gets the new one.
        """
        written = []
        for buffer in before:
            place = (buffer.owner, buffer.name, buffer.is_training)
            current = buffer.current
            changed = current is not buffer.tensor or version_of(current) != buffer.version
            if place not in self._writes:
                changed = changed or buffer.copy is None or not torch.equal(current, buffer.copy)
            self._writes[place] = self._writes.get(place, False) or changed
            if self._writes[place]:
                if buffer.copy is None:
                    buffer = buffer._replace(copy=current.clone())
                written.append(buffer)
        before[:] = written


def _contexts(
    selective: bool, before: list[Buffer]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the forward, and around its second run in backward."""
    if selective:
        first, again = create_selective_checkpoint_contexts(policy)
        return first, _second_run(again, before)
    return nullcontext(), _second_run(nullcontext(), before)


@contextmanager
def _second_run(inner: AbstractContextManager[Any], before: list[Buffer]) -> Iterator[None]:
    """With copies of the buffers, which the forward has updated already. Errors: ConfigError for
    writes in place.
    """
    current = [buffer.current for buffer in before]
    try:
        for buffer in before:
            setattr(buffer.owner, buffer.name, buffer.copy)
        with inner:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise ConfigError(
            "parallel.activation_checkpointing=selective: a block changes the result of a matrix "
            "product, convolution or attention in place, as nn.ReLU(inplace=True) does; use "
            "inplace=False, or full"
        ) from error
    finally:
        for buffer, tensor in zip(before, current, strict=True):
            setattr(buffer.owner, buffer.name, tensor)


def version_of(tensor: Tensor) -> int:
    """Rises with each write in place; always 0 if this torch, or an inference tensor, has none."""
    with suppress(RuntimeError):
        return getattr(tensor, "_version", 0)
    return 0
