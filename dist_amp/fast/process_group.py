"""The default process group, called directly: its store, an all-reduce without torch's Python wrapper, and its abort.

Only the abort uses a private name of torch's. `dist.group.WORLD` and its methods are public in torch 2.11 and 2.13.
"""

import torch.distributed as dist
from torch import Tensor

# torch's name for it before 2.13, which warns there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def shared_store() -> dist.Store:  # type: ignore[name-defined]
    """The key-value store of the default process group, which works where collectives do not."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def reduce_options() -> dist.AllreduceOptions:
    """What `all_reduce_sum` takes; make them once, since that costs 2 us."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def all_reduce_sum(tensor: Tensor, options: dist.AllreduceOptions) -> None:
    """Sum a tensor over all ranks, in place: `dist.all_reduce` without the checks that it makes in Python.

    Measured for 2 numbers on one gloo rank: 14 us, against 19 us by dist.all_reduce, which any release has.
    """
    allreduce = getattr(dist.group.WORLD, "allreduce", None)
    if allreduce is None:
        dist.all_reduce(tensor)
        return
    work = allreduce([tensor], options)
    if work is not None:
        work.wait()


def abort_process_groups() -> None:
    """Abort the collectives of all NCCL groups, because destroying the groups would wait for them.

    Without the private function, the default group alone is aborted: others, as of a mesh, end with the process, and
    torch warns that they were not destroyed.
    """
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort_all is not None:
        abort_all()
    elif dist.group.WORLD is not None:
        dist.group.WORLD.abort()
