"""An exponential moving average of the trained parameters, for evaluation, export and sampling.

Stored in float32 and sharded like the parameters. Source: Polyak & Juditsky 1992; decay as in
Karras et al. 2024, arXiv:2312.02696.

Docs: docs/recipes.md
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dist_amp.world import local


class Ema:
    """Observer. tensors: {parameter name: average}, float32, sharded like the parameter."""

    section = "ema"  # of a checkpoint

    @torch.no_grad()
    def __init__(self, module: nn.Module, decay: float, say: Callable[[str], object] = print):
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._fsdp_units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.tensors = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._averages = [local(average) for average in self.tensors.values()]
        self._say = say
        self._weight = torch.tensor(1 - decay, device=self._averages[0].device)

    def _local_parameters(self) -> list[Tensor]:
        return [local(p.detach()) for p in self._parameters.values()]

    @torch.no_grad()
    def after_step(self, report: Any, micro_batches: Sequence[Any]) -> None:
        """Move the averages towards the parameters if the step was applied.

        No host-device synchronisation; temporarily allocates as much as the averages take.
        """
        moves = torch._foreach_sub(self._local_parameters(), self._averages)
        torch._foreach_mul_(moves, self._weight * report.applied)
        torch._foreach_add_(self._averages, moves)

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """state: `tensors`, which was filled in place; empty if the checkpoint has no average."""
        if not state:
            self._write(self._averages, self._local_parameters())
            self._say("optim.ema starts here: the checkpoint has no average")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the parameters hold the averages; their own values return on exit."""
        parameters = self._local_parameters()
        originals = [parameter.clone() for parameter in parameters]
        self._write(parameters, self._averages)
        try:
            yield
        finally:
            self._write(parameters, originals)

    @torch.no_grad()
    def _write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        if targets[0].is_pinned():  # CPU offload: the device may still be reading the targets
            torch.cuda.synchronize()
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        for unit in self._fsdp_units:  # a unit that is still gathered holds the old values
            unit.reshard()
