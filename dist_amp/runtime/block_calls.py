"""Every rank must call every block of a sharded model in each forward, because a call gathers the block's shards."""

from collections.abc import Collection
from typing import Any

from torch import nn

from dist_amp.errors import DataError


class BlockCalls:
    """Checks it after each forward of the model, on this rank alone, before the ranks wait for each other in vain."""

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module], rank: int):
        """blocks: the sharded ones."""
        self._names = {part: name for name, part in model.named_modules() if part in blocks}
        self._rank = rank
        self._missing = set(self._names)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._check)
        for block in self._names:
            block.register_forward_pre_hook(self._note)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._missing = set(self._names)

    def _note(self, block: nn.Module, inputs: Any) -> None:
        self._missing.discard(block)

    def _check(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._missing:
            name = next(name for block, name in self._names.items() if block in self._missing)
            raise DataError(
                f"rank {self._rank}: the model's forward did not call its block {name} ({len(self._missing)} of "
                f"{len(self._names)} such), whose shards all ranks gather at once; give the task a blocks(model) "
                "and units(model) without it, so that it is part of a larger unit, or use parallel.strategy=ddp"
            )
