"""Batch norm's running statistics, which each rank gathers from its own batches: found, and averaged over the ranks."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dist_amp.world import World


def batch_statistics(module: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of batch norm, and of what works like it, by their names in the state."""
    return {
        f"{path}.{name}".lstrip("."): statistic
        for path, part in module.named_modules()
        for name in ("running_mean", "running_var")
        if (statistic := dict(part.named_buffers(recurse=False)).get(name)) is not None
    }


@torch.no_grad()
def averaged_statistics(module: nn.Module, world: World) -> dict[str, Tensor]:
    """The same, averaged over all ranks in one collective per dtype; the module's own are left alone."""
    averaged: dict[str, Tensor] = {}
    kinds: dict[Any, dict[str, Tensor]] = defaultdict(dict)
    for name, own in batch_statistics(module).items():
        kinds[own.dtype, own.device][name] = own
    for same in kinds.values():
        flat = world.sum(torch.cat([own.reshape(-1) for own in same.values()])) / world.world_size
        parts = flat.split([own.numel() for own in same.values()])
        averaged |= {name: part.view(own.size()) for (name, own), part in zip(same.items(), parts, strict=True)}
    return averaged


@torch.no_grad()
def set_statistics(module: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    for name, own in batch_statistics(module).items():
        own.copy_(statistics[name])


def first_batch_norm(module: nn.Module) -> str:
    """The path of the first batch norm that normalises each micro-batch by its own statistics; "" if there is none."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return next((path for path, part in module.named_modules() if isinstance(part, kinds) and part.training), "")
