"""Which of a sharded model's units a forward calls: a call gathers the unit's shards, so all ranks have to make it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dist_amp.errors import DataError
from dist_amp.fast.missing_gradients import ReduceEveryBlock


class BlockCalls:
    """Checks after each forward, on this rank alone, that it called every block: before ranks wait for each other.

    blocks, ends: the units. The ends, an embedding and a head, need not be called: their weight may be used
    directly, or by chunks of the batch. Those that each rank calls once in its first training forward are released to
    be gathered and reduced like blocks, and must be called from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        rank: int,
        ends: Sequence[nn.Module] = (),
        reduction: ReduceEveryBlock | None = None,
        gather: Callable[[list[float]], list[list[float]]] = lambda row: [row],
    ):
        """reduction: what releases the ends. gather: each rank's row of numbers, to agree on them."""
        names = {part: name for name, part in model.named_modules()}
        self._names = {block: names[block] for block in blocks}
        self._rank = rank
        self._undecided = {end: names[end] for end in ends}
        self._reduction = reduction
        self._gather = gather
        self._calls: Counter[nn.Module] = Counter()
        self._trained = False  # whether the calls are those of a training forward
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._check)
        for unit in (*self._names, *self._undecided):
            unit.register_forward_pre_hook(self._note)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if self._undecided and self._trained and torch.is_grad_enabled():
            self._decide()
        self._calls.clear()
        self._trained = torch.is_grad_enabled()

    def _decide(self) -> None:
        once = [float(self._calls[end] == 1) for end in self._undecided]
        for (end, name), *ranks in zip(self._undecided.items(), *self._gather(once), strict=True):
            if all(ranks) and self._reduction is not None:
                self._reduction.release(end)
                self._names[end] = name
        self._undecided = {}

    def _note(self, unit: nn.Module, inputs: Any) -> None:
        self._calls[unit] += 1

    def _check(self, model: nn.Module, inputs: Any, output: Any) -> None:
        missing = [name for block, name in self._names.items() if not self._calls[block]]
        if missing:
            raise DataError(
                f"rank {self._rank}: the model's forward did not call its block {missing[0]} ({len(missing)} of "
                f"{len(self._names)} such), whose shards all ranks gather at once; give the task a blocks(model) "
                "without it, so that it is part of a larger unit, or use parallel.strategy=ddp"
            )
