"""DDP's parameters without a gradient in a step, such as idle experts: they count as zero.

Which ones may differ between ranks, and DDP waits until each has had its backward: without this, a
step would apply gradients that were never averaged. DDP's public way, `find_unused_parameters`,
walks the graph in every forward; asking the reducer afterwards, by a private method, costs 0.3 us.
"""

import re
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

# Without it, DDP has to be made with find_unused_parameters=True.
CAN_FINISH = hasattr(DistributedDataParallel, "_check_reducer_finalized")

MISSING = re.compile(r"indices which did not receive grad for rank \d+: ([\d ]+)")


class FinishReduction:
    """A context around DDP's forward and backward of the micro-batch that synchronises gradients.

    On leaving, parameters without a backward get one of zeros, which finishes DDP's reduction: a
    parameter keeps the gradient of earlier micro-batches, or has zero.
    """

    def __init__(self, model: DistributedDataParallel):
        self._model: Any = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        if kind is not None or not CAN_FINISH:
            return
        try:
            self._model._check_reducer_finalized()
        except RuntimeError as unfinished:
            self._reduce_zeros(unfinished)

    def _reduce_zeros(self, unfinished: RuntimeError) -> None:
        listed = MISSING.findall(str(unfinished))
        if not listed:
            raise unfinished
        missing = [self._parameters[int(index)] for index in listed[-1].split()]
        torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])
