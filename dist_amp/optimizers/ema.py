"""An exponential moving average of the trained parameters (optim.ema), for evaluation, export and sample.

Float32, laid out over the ranks as the parameters are, so it costs 4 bytes per parameter of this rank's shards. It
starts as a copy of the parameters. Source: Polyak & Juditsky 1992; decay as in Karras et al. 2024, arXiv:2312.02696.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dist_amp.fast.fused import local
from dist_amp.fast.kernels import lerp_all


class Ema:
    """averages: {name of the parameter: its average}, float32, sharded as the parameter is."""

    @torch.no_grad()
    def __init__(self, module: nn.Module, decay: float):
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._shards = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.averages = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._weight = torch.tensor(1 - decay, device=next(iter(self._local_averages())).device)

    def _local_averages(self) -> list[Tensor]:
        return [local(average) for average in self.averages.values()]

    def _local_parameters(self) -> list[Tensor]:
        return [local(p.detach()) for p in self._parameters.values()]

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Move towards the parameters if the step was applied, a scalar bool on the device; nothing is read."""
        lerp_all(self._local_averages(), self._local_parameters(), self._weight * applied.to(self._weight.device))

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the parameters."""
        for average, parameter in zip(self._local_averages(), self._local_parameters(), strict=True):
            average.copy_(parameter)

    @contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Inside, the parameters hold the averages. Their own values are kept aside, in place of the gradients."""
        parameters = self._local_parameters()
        kept = [parameter.clone() for parameter in parameters]
        self._write(parameters, self._local_averages())
        try:
            yield
        finally:
            self._write(parameters, kept)

    @torch.no_grad()
    def _write(self, parameters: list[Tensor], values: list[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        for part in self._shards:  # a unit that stays gathered after its forward would keep the old values
            part.reshard()
