"""What the steps of a log interval came to, and its way from the device to the host, which nobody waits for."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOST_STEPS = 64  # that are kept on the device before their outcomes are sent to the host


@dataclass(frozen=True)
class StepReport:
    """One step's outcome: scalar tensors on the device, read by nobody until the next log step."""

    losses: list[Tensor]  # this rank's loss sums, one per micro-batch
    weight: Tensor  # all ranks', what the loss sum is divided by
    norm: Tensor  # of the unscaled gradients, before clipping
    applied: Tensor  # bool; False: skipped, because the norm was not finite

    @property
    def loss_sum(self) -> Tensor:
        """This rank's, over its micro-batches."""
        return torch.stack(self.losses).sum()


@dataclass(frozen=True)
class AsyncCopy:
    """Figures on their way to the host: `read` waits for them."""

    values: Tensor  # float32 in the host's memory
    arrived: torch.cuda.Event | None
    losses: list[int]  # how many each step has

    def read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


def send(reports: Sequence[StepReport], *more: Tensor) -> AsyncCopy:
    """Pack steps' outcomes, and what is to come with them, and send them off: all at once, in one copy.

    Each operation has its price, whatever its size: three for all steps are cheaper than one for each.
    """
    parts = []
    if reports:
        floats = [value for report in reports for value in (*report.losses, report.weight)]
        parts = [torch.stack([*floats, reports[-1].norm]), torch.stack([report.applied for report in reports])]
    values, arrived = torch.cat([part.float() for part in (*parts, *more)]), None
    if values.is_cuda:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        values, arrived = copy.copy_(values, non_blocking=True), torch.cuda.Event()
        arrived.record()
    return AsyncCopy(values, arrived, [len(report.losses) for report in reports])


@dataclass
class Sums:
    """An interval's sums on the host, one step after the other: the same wherever a checkpoint cuts the interval."""

    loss: float = 0.0
    weight: float = 0.0
    least_weight: float = math.inf
    norm: float = 0.0  # of the last step

    def add(self, parcel: AsyncCopy) -> list[float]:
        """Add the steps of a parcel; return what came with them."""
        values, steps = parcel.read(), len(parcel.losses)
        if not steps:
            return values
        at, flags = 0, sum(parcel.losses) + steps + 1
        self.norm = values[flags - 1]
        for count, applied in zip(parcel.losses, values[flags : flags + steps], strict=True):
            *losses, weight = values[at : at + count + 1]
            at += count + 1
            self.least_weight = min(self.least_weight, weight) if weight == weight else weight
            if applied:  # a skipped step's loss is often not finite, and would be the whole interval's
                self.loss += sum(losses)
                self.weight += weight
        return values[flags + steps :]


@dataclass
class Interval:
    """The steps since the last log step."""

    sums: Sums = field(default_factory=Sums)
    steps: int = 0
    _reports: list[StepReport] = field(default_factory=list)
    _parcels: list[AsyncCopy] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Note a step's outcome; reads nothing."""
        self._reports.append(report)
        self.steps += 1
        if len(self._reports) == MOST_STEPS:
            self.send()

    def send(self, *more: Tensor) -> None:
        """Send off what is on the device, and 1-dimensional tensors with it."""
        if self._reports or more:
            self._parcels.append(send(self._reports, *more))
            self._reports = []

    def read(self) -> list[float]:
        """Bring `sums` up to date; returns what came with the last parcel. Waits for the device."""
        parcels, self._parcels, more = self._parcels, [], []
        for parcel in parcels:
            more = self.sums.add(parcel)
        return more


class Clock:
    """Time that the device spends, as a stopwatch: on a GPU by events in its stream, which nobody waits for."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._since: Any = self._now()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def pause(self) -> None:
        self._spans.append((self._since, self._now()))

    def go_on(self) -> None:
        self._since = self._now()

    def lap(self) -> list[tuple[Any, Any]]:
        """The spans since the last lap, for `seconds` once the device has reached their ends."""
        self.pause()
        spans, self._spans = self._spans, []
        self._since = spans[-1][1]
        return spans

    def seconds(self, spans: list[tuple[Any, Any]]) -> float:
        if self._on_gpu:
            return sum(begin.elapsed_time(end) for begin, end in spans) / 1000
        return float(sum(end - begin for begin, end in spans))
