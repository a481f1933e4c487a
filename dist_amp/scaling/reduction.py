"""DDP's gradient reduction: missing gradients, the order of its buckets, and the time it waits.

If torch renames its autograd engine's private `queue_callback`, waits count as backward time.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_amp.clock import PhaseClock

MISSING_GRADIENTS = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")

ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def call_after_backward(call: Callable[[], object]) -> None:
    """Run `call` when the current backward ends; never if torch has renamed `queue_callback`."""
    if hasattr(ENGINE, "queue_callback"):
        ENGINE.queue_callback(call)  # type: ignore[union-attr]


class ZerosForUnused(AbstractContextManager[Any]):
    """Context around DDP's forward and backward of the micro-batch that synchronises gradients.

    DDP waits until each parameter has a gradient, but some parameters may be unused, and not the
    same ones on every rank. On exit, unused parameters get a gradient of zeros.
    """

    def __init__(self, model: DistributedDataParallel):
        self._model: Any = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if kind is not None:
            return
        try:  # 0.3 us; DDP's own find_unused_parameters would walk the graph in every forward
            self._model._check_reducer_finalized()
        except RuntimeError as unfinished:
            indices = MISSING_GRADIENTS.findall(str(unfinished))
            if not indices:
                raise
            missing = [self._parameters[int(index)] for index in indices[-1].split()]
            torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])


def fix_buckets(model: DistributedDataParallel) -> None:
    """Make DDP rebuild its buckets now, with the parameters in reverse order.

    Otherwise DDP takes the order of its first backward, which differs after a resume: three or more
    ranks would then sum gradients in another order.
    """
    reducer: Any = model.reducer
    parameters = [p for p in model.parameters() if p.requires_grad]
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    # The reducer orders its buckets by the order in which it gets gradients.
    for parameter in reversed(parameters):
        torch.autograd.backward(parameter, torch.zeros_like(parameter))
    reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None


def time_reduction(model: DistributedDataParallel, clock: PhaseClock) -> None:
    """Count the end of each backward, in which DDP waits for its all-reduces, as communication."""

    def begin(_: Any) -> None:
        if model.require_backward_grad_sync:
            call_after_backward(partial(clock.enter, "communication"))

    # Backward reaches the last parameter early, so this callback is queued before DDP's own.
    last = [p for p in model.parameters() if p.requires_grad][-1]
    last.register_post_accumulate_grad_hook(begin)
