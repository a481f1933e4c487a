"""Refuses a step in which ranks of an FSDP2 model might use different blocks.

A call of a block gathers its shards, and its backward reduces its gradients: collectives in which
all ranks take part. A rank that leaves one out would wait for the others in vain, or reduce other
blocks with them. Each rank checks itself, before it calls a collective that is out of order.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_amp.errors import DataError


class BlockCalls:
    """Checks after each forward that every block was called, and in backward that each is reached.

    Autograd takes blocks in the reverse order of their calls: where it reaches one, it has passed
    those that were called later.
    """

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], rank: int, in_order: bool):
        """blocks: the sharded ones. in_order: whether to check the backward too."""
        self._names = {part: name for name, part in model.named_modules() if part in blocks}
        self._rank = rank
        self._in_order = in_order
        self._missing = set(self._names)
        self._called: list[nn.Module] = []  # until their backward
        self._in_forward = False  # false while a block is recomputed
        model.register_forward_pre_hook(self._begin)
        # First, so that the hooks of an output's gradient come before FSDP2's.
        model.register_forward_hook(self._end, prepend=True)
        for block in self._names:
            block.register_forward_hook(self._note, prepend=True)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._missing = set(self._names)
        self._called = []
        self._in_forward = True

    def _note(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._missing.discard(block)
        trained = trained_tensors(output)
        if self._in_order and trained:
            self._called.append(block)
            for tensor in trained:
                tensor.register_hook(partial(self._reach, block))

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._in_forward = False
        if self._missing:
            name = next(name for block, name in self._names.items() if block in self._missing)
            raise DataError(
                f"rank {self._rank}: the model's forward did not call its block {name} "
                f"({len(self._missing)} of {len(self._names)} such), whose shards all ranks gather "
                "at once; give the task a blocks(model) and units(model) without it, so that it is "
                "part of a larger unit, or use parallel.strategy=ddp"
            )
        if self._called:
            for tensor in trained_tensors(output):
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        if hasattr(engine, "queue_callback"):  # private; without it, the first block goes unchecked
            engine.queue_callback(self._check_none_left)  # type: ignore[union-attr]

    def _reach(self, block: nn.Module, gradient: Tensor) -> None:
        if block in self._called:
            last = self._called.pop()
            if last is not block:
                self._refuse(last)

    def _check_none_left(self) -> None:
        if self._called:
            self._refuse(self._called[-1])

    def _refuse(self, block: nn.Module) -> None:
        raise DataError(
            f"rank {self._rank}: the loss does not depend on the block {self._names[block]}, "
            "whose gradients all ranks reduce at once; give the task ranks_skip_blocks = True, "
            "or use parallel.strategy=ddp"
        )


def trained_tensors(output: Any) -> list[Tensor]:
    """The tensors of a block's output that depend on anything that is trained."""
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
