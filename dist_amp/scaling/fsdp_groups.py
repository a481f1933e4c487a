"""FSDP2's parameter groups, which it keeps under private names."""

from typing import Any

from torch.distributed.fsdp import FSDPModule


def fsdp_units(model: Any) -> list[Any]:
    """The units of an FSDP2 model, the root first; none if torch's private names have changed."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    if all(hasattr(unit, "_get_fsdp_state") for unit in units):
        return units
    return []


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of a unit; one at most before torch 2.13."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if state._fsdp_param_group is None:
        return []
    return [state._fsdp_param_group]
