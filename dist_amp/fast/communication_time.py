"""Counts as waiting for other ranks what a step waits inside of DDP's and FSDP2's own calls.

Both hide their waits in hooks with private names. Without those, the waits count as forward and backward: steps are the
same, and a slow rank is not found. Measured per step: two queued calls of 1 us under DDP, and under FSDP2 2 us for each
unit that is gathered or reduced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dist_amp.fast.missing_gradients import groups_of
from dist_amp.runtime.clock import PhaseClock

# A group's methods that gather its parameters, wait for them, reduce its gradients, and wait for those.
WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
# On a GPU the first only queues work, which runs beside the computation.
WAITS_ON_GPU = WAITS[1:]


def time_reduction(model: DistributedDataParallel, parameter: nn.Parameter, clock: PhaseClock) -> None:
    """Count the end of each backward, in which DDP waits for its all-reduces, as communication.

    parameter: has its gradient early in the backward; from there this call is queued, ahead of DDP's own.
    """
    queue = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)

    def begin(_: Any) -> None:
        if queue is not None and model.require_backward_grad_sync:
            queue(partial(clock.enter, "communication"))

    parameter.register_post_accumulate_grad_hook(begin)


def time_gathers(model: FSDPModule, clock: PhaseClock) -> None:
    """Count what FSDP2's units wait as communication; on a CPU their collectives too, which block there."""
    units: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]  # type: ignore[attr-defined]
    if not all(hasattr(unit, "_get_fsdp_state") for unit in units):
        return
    for group in (group for unit in units for group in groups_of(unit)):
        for name in WAITS_ON_GPU if clock.on_gpu else WAITS:
            if hasattr(group, name):
                setattr(group, name, partial(_timed, clock, getattr(group, name)))


def _timed(clock: PhaseClock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = clock.enter("communication")
    try:
        return method(*args, **kwargs)
    finally:
        clock.enter(before)
