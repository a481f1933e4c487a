"""The results of a log interval's steps, copied from the device to the host without waiting for them."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_STEPS_ON_DEVICE = 64  # before their results are copied to the host


@dataclass(frozen=True)
class StepReport:
    """One step's results: scalar tensors on the device, not read before the next log step."""

    losses: list[Tensor]  # this rank's loss sums, one per micro-batch
    weight: Tensor  # of all ranks: what the loss sum is divided by
    norm: Tensor  # of the unscaled gradients, before clipping
    applied: Tensor  # bool; False if the step was skipped because the norm was not finite

    @property
    def loss_sum(self) -> Tensor:
        """Of this rank's micro-batches."""
        return torch.stack(self.losses).sum()


@dataclass(frozen=True)
class AsyncCopy:
    """Values on their way to the host; `read` waits for them."""

    values: Tensor  # float32 on the host
    arrived: torch.cuda.Event | None
    losses_per_step: list[int]

    def read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


@dataclass
class Interval:
    """The steps since the last log step; its sums are float64, added step by step, wherever a checkpoint cuts it."""

    loss: float = 0.0
    weight: float = 0.0
    min_weight: float = math.inf
    norm: float = 0.0  # of the last step
    steps: int = 0
    applied: int = 0
    skipped: int = 0
    clipped: int = 0  # of the applied ones, by their norm
    max_norm: float = math.inf  # above it, gradients are clipped
    _reports: list[StepReport] = field(default_factory=list)
    _copies: list[AsyncCopy] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Record a step's results without reading them."""
        self._reports.append(report)
        self.steps += 1
        if len(self._reports) == MAX_STEPS_ON_DEVICE:
            self.start_copy()

    def start_copy(self, *more: Tensor) -> None:
        """Start one copy to the host of what is still on the device, and of further 1-dimensional tensors.

        The values in order: losses, weight and norm of each step, each step's `applied` flag, then `more`.
        Each operation has a fixed cost whatever its size: three for all steps are cheaper than one per step.
        """
        reports, self._reports, parts = self._reports, [], list(more)
        if reports:
            floats = [value for report in reports for value in (*report.losses, report.weight, report.norm)]
            flags = [report.applied for report in reports]
            parts = [torch.stack(floats), torch.stack(flags), *more]
        if not parts:
            return
        values, arrived = torch.cat([part.float() for part in parts]), None
        if values.is_cuda:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values, arrived = on_host.copy_(values, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._copies.append(AsyncCopy(values, arrived, [len(report.losses) for report in reports]))

    def read(self) -> list[float]:
        """Add the copied steps to the sums; return the `more` values of the last copy. Waits for the copies."""
        copies, self._copies, more = self._copies, [], []
        for copy in copies:
            more = self._add(copy)
        return more

    def _add(self, copy: AsyncCopy) -> list[float]:
        values = iter(copy.read())
        steps = [([next(values) for _ in range(count)], next(values), next(values)) for count in copy.losses_per_step]
        for losses, weight, norm in steps:
            applied, self.norm = next(values), norm
            self.min_weight = weight if math.isnan(weight) else min(self.min_weight, weight)
            if applied:  # a skipped step's loss is often not finite, and would spoil the interval's mean
                self.loss += sum(losses)
                self.weight += weight
                self.applied += 1
                self.clipped += norm > self.max_norm
            else:
                self.skipped += 1
        return list(values)
