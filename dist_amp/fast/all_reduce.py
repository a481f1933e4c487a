"""A blocking all-reduce of a small tensor with as little Python around it as possible.

`torch.distributed.all_reduce` checks and logs for longer than a tiny step's arithmetic takes: calling the process group
itself saves 15 us per step on a CPU (`python -m dist_amp.bench overhead`).
"""

import torch.distributed as dist
from torch import Tensor

_default_group = getattr(dist.distributed_c10d, "_get_default_group", None)


class AllReduce:
    """Sums over all ranks of the default group, in place. Make one once the group is there."""

    def __init__(self) -> None:
        self._group = _default_group() if _default_group is not None and dist.is_initialized() else None
        self._options = dist.AllreduceOptions() if self._group is not None else None
        if self._options is not None:
            self._options.asyncOp = False

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor, which now holds the sum; on a GPU it is queued, not waited for."""
        if self._group is None:
            dist.all_reduce(tensor)
        elif (work := self._group.allreduce([tensor], self._options)) is not None:
            work.wait()
        return tensor
