"""Counts as communication what a step waits for other ranks inside of DDP and FSDP2.

Both wait in hooks with private names. Without those, the waits count as forward and backward: steps
are the same, and a slow rank is not found. Measured per step: two queued calls of 1 us under DDP,
and under FSDP2 2 us for each unit that is gathered or reduced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_amp.clock import PhaseClock
from dist_amp.scaling.fsdp_groups import fsdp_units, groups_of

# A group's methods that gather its parameters, wait for them, reduce its gradients, and wait for
# those.
WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


def time_reduction(model: DistributedDataParallel, clock: PhaseClock) -> None:
    """Count the end of each backward, in which DDP waits for its all-reduces, as communication."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if not hasattr(engine, "queue_callback"):
        return

    def begin(_: Any) -> None:
        if model.require_backward_grad_sync:
            engine.queue_callback(partial(clock.enter, "communication"))  # type: ignore[union-attr]

    # The last parameter has its gradient early, so this call is queued ahead of DDP's.
    last = [p for p in model.parameters() if p.requires_grad][-1]
    last.register_post_accumulate_grad_hook(begin)


def time_gathers(model: Any, clock: PhaseClock) -> None:
    """Count what FSDP2's units wait as communication; on a CPU their collectives too."""
    names = list(WAITS)
    if clock.on_gpu:
        names.remove("unshard")  # only queues work there, which runs beside the computation
    for unit in fsdp_units(model):
        for group in groups_of(unit):
            for name in names:
                if hasattr(group, name):
                    setattr(group, name, partial(_timed, clock, getattr(group, name)))


def _timed(clock: PhaseClock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = clock.enter("communication")
    try:
        return method(*args, **kwargs)
    finally:
        clock.enter(before)
