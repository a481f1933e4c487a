"""Batch norm's running statistics, which differ between ranks, and their averages over ranks."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.config.auto import batch_statistics
from dist_amp.world import World


@torch.no_grad()
def averaged_statistics(module: nn.Module, world: World) -> dict[str, Tensor]:
    """{name: statistic averaged over ranks}, one collective per dtype; the module is unchanged."""
    averaged: dict[str, Tensor] = {}
    by_kind: dict[Any, dict[str, Tensor]] = defaultdict(dict)
    for name, statistic in batch_statistics(module).items():
        by_kind[statistic.dtype, statistic.device][name] = statistic
    for statistics in by_kind.values():
        flat = torch.cat([statistic.reshape(-1) for statistic in statistics.values()])
        mean = world.sum(flat) / world.world_size
        parts = mean.split([statistic.numel() for statistic in statistics.values()])
        for (name, statistic), part in zip(statistics.items(), parts, strict=True):
            averaged[name] = part.view(statistic.size())
    return averaged


@torch.no_grad()
def set_statistics(module: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    for name, statistic in batch_statistics(module).items():
        statistic.copy_(statistics[name])


def first_batch_norm(module: nn.Module) -> str:
    """The path of the first batch norm that normalises each micro-batch by its own statistics; ""
    if there is none.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return next(
        (
            path
            for path, part in module.named_modules()
            if isinstance(part, kinds) and part.training
        ),
        "",
    )
