"""A sharded model that stays whole between forwards, and is sharded again as before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dist_amp.fast.missing_gradients import groups_of


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather each unit of FSDP2 and keep it whole: a sample calls the model once per token.

    So the block has no collectives, and may fail on one rank alone. Afterwards units reshard as before; the caller
    reshards what is whole. Without torch's private record of how a unit reshards, each forward gathers anew.
    """
    found = [(unit, _reshards(unit)) for unit in module.modules() if isinstance(unit, FSDPModule)]
    units = [(unit, reshards) for unit, reshards in found if reshards is not None]
    try:
        for unit, _ in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit, reshards in units:
            unit.set_reshard_after_forward(reshards, recurse=False)


def _reshards(unit: Any) -> bool | None:
    """Whether a unit is resharded after its forward; None if it has no parameters, or torch does not say."""
    try:
        groups = groups_of(unit)
        return any(group.post_forward_mesh_info is not None for group in groups) if groups else None
    except AttributeError:
        return None
