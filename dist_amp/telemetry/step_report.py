"""What a step reports, its copy from the device to the host without waiting, and the interface of
what watches a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from dist_amp.telemetry.log_row import LogRow

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


class Observer:
    """Watches a run from outside the step; each method is called on every rank, at the same step,
    in the order of train.py's list. A run takes the same steps without it.
    """

    # Whether pending metrics must be read before `before_step`: the observer writes lines to
    # metrics.jsonl, which is ordered by step.
    reads_before_step = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        """Before a step on `micro_batches`; `run.step` counts the steps before it."""

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        """After a step, before any evaluation or checkpoint; `run.step` counts this step."""

    def on_log(self, row: LogRow) -> None:
        """Given the metrics of a log interval, of all ranks; at the log step or one step later."""

    def before_evaluation(self) -> None:
        """Before an evaluation, which changes nothing in the run."""

    def after_evaluation(self) -> None:
        """After an evaluation, which averaged the batch statistics over the ranks."""


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
    """The steps since the last log step. Sums are float64, added step by step, so they are the same
    wherever a checkpoint cuts them.
    """

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
        """Start copying to the host what is still on the device, and further 1-dimensional tensors.

        The values in order: losses, weight and norm of each step, each step's `applied` flag, then
        `more`. Three operations for all steps: each has a fixed cost whatever its size.
        """
        reports = self._reports
        self._reports = []
        parts = list(more)
        if reports:
            floats = [x for report in reports for x in (*report.losses, report.weight, report.norm)]
            flags = [report.applied for report in reports]
            parts = [torch.stack(floats), torch.stack(flags), *more]
        if not parts:
            return
        values = torch.cat([part.float() for part in parts])
        arrived = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._copies.append(AsyncCopy(values, arrived, [len(report.losses) for report in reports]))

    def read(self) -> list[float]:
        """Add the copied steps to the sums, waiting for them; return the last copy's `more`."""
        copies = self._copies
        self._copies = []
        more: list[float] = []
        for copy in copies:
            more = self._add(copy)
        return more

    def _add(self, copy: AsyncCopy) -> list[float]:
        values = iter(copy.read())
        steps = []
        for count in copy.losses_per_step:
            losses = [next(values) for _ in range(count)]
            steps.append((sum(losses), next(values), next(values)))
        for loss, weight, norm in steps:
            self.norm = norm
            # A nan must not hide behind a smaller number.
            self.min_weight = weight if math.isnan(weight) else min(self.min_weight, weight)
            if not next(values):
                self.skipped += 1
                continue
            # A skipped step's loss is often not finite, and would spoil the interval's mean.
            self.loss += loss
            self.weight += weight
            self.applied += 1
            if norm > self.max_norm:
                self.clipped += 1
        return list(values)
