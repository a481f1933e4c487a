"""The end of DDP's gradient reduction: missing gradients, the order of its buckets, time waited.

Without private names of torch's engine the waits count as backward.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_amp.clock import PhaseClock

MISSING = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")

ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def call_after_backward(call: Callable[[], object]) -> None:
    """Call it when the backward that is running ends; never, if torch's engine has other names."""
    if hasattr(ENGINE, "queue_callback"):
        ENGINE.queue_callback(call)  # type: ignore[union-attr]


class ZerosForUnused(AbstractContextManager[Any]):
    """A context around DDP's forward and backward of the micro-batch that synchronises gradients.

    DDP waits until each parameter has had its backward, and which ones have none may differ between
    ranks. They get one of zeros here.
    """

    def __init__(self, model: DistributedDataParallel):
        self._model: Any = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if kind is not None:
            return
        try:  # 0.3 us; DDP's find_unused_parameters walks the graph in every forward
            self._model._check_reducer_finalized()
        except RuntimeError as unfinished:
            listed = MISSING.findall(str(unfinished))
            if not listed:
                raise
            missing = [self._parameters[int(index)] for index in listed[-1].split()]
            torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])


def fix_buckets(model: DistributedDataParallel) -> None:
    """Let DDP rebuild its buckets now, in the parameters' order from the last one to the first.

    Otherwise it takes the order of its first backward, which differs after a resume: three or more
    ranks would sum in another order.
    """
    reducer: Any = model.reducer
    parameters = [p for p in model.parameters() if p.requires_grad]
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
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

    # The last parameter has its gradient early, so this call is queued ahead of DDP's.
    last = [p for p in model.parameters() if p.requires_grad][-1]
    last.register_post_accumulate_grad_hook(begin)
