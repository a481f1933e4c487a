"""Lets an optimizer that was written for whole tensors step on sharded ones.

DTensor computes most of an optimizer's operations by itself. It refuses to change a tensor in place
where the result would be laid out in another way: a norm that is still to be summed over the ranks,
or a state that is sharded and moves towards a value that is not, as in torch.optim.Adafactor.
"""

import re
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dist_amp.errors import ConfigError, first_line


class _Permissive(TorchFunctionMode):
    """Sums partial results over the ranks at once, and does out of place what can't be done in
    place.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            out = function(*args, **kwargs)
        except RuntimeError as error:  # before anything was changed: the layouts alone decide
            name = getattr(function, "__name__", "")
            if "placement" not in str(error) or not name.endswith("_") or name.endswith("__"):
                raise
            target, value = args[0], getattr(Tensor, name[:-1])(*args, **kwargs)
            return target.copy_(value.redistribute(placements=target.placements))
        if isinstance(out, DTensor) and any(placement.is_partial() for placement in out.placements):
            out = out.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in out.placements]
            )
        return out


# What DTensor says of an operation that it can't compute on shards, in torch 2.11 to 2.13.
_NOT_ON_SHARDS = re.compile(r"sharding strategy|placement|Sharding propagation|DTensor")


def step_on_shards(optimizer: Optimizer) -> None:
    """Change the optimizer's step for sharded parameters, if it has any.

    The step raises ConfigError if DTensor can't compute it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DTensor) for p in parameters):
        return
    step = optimizer.step
    name = type(optimizer).__name__

    @wraps(step)
    def permissive(*args: Any, **kwargs: Any) -> Any:
        try:
            with _Permissive():
                return step(*args, **kwargs)
        except RuntimeError as error:
            if not _NOT_ON_SHARDS.search(str(error)):
                raise
            raise ConfigError(
                f"the task's optimizer {name} does not work on sharded parameters, as torch says: "
                f"{first_line(error).partition('. ')[0].rstrip('.')}; use parallel.strategy=ddp, "
                "or another optimizer"
            ) from error

    optimizer.step = permissive  # type: ignore[method-assign]
