"""What is added up without waiting for the device: log intervals and evaluations."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import DataError
from dist_amp.task import as_scalar, check_weight
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World

MAX_STEPS_ON_DEVICE = 64  # before their results are copied to the host


@dataclass
class Interval:
    """The steps since the last log step.

    Sums are float64, added step by step, so they are the same wherever a checkpoint cuts them.
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
    # On their way to the host: (values, when they have arrived, losses of each step).
    _copies: list[tuple[Tensor, Any, list[int]]] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Record a step's results without reading them."""
        self._reports.append(report)
        self.steps += 1
        if len(self._reports) == MAX_STEPS_ON_DEVICE:
            self.start_copy()

    def start_copy(self, *more: Tensor) -> None:
        """Start copying to the host what is still on the device, and more 1-dimensional tensors.

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
        self._copies.append((values, arrived, [len(report.losses) for report in reports]))

    def read(self) -> list[float]:
        """Add the copied steps to the sums, waiting for them; return the last copy's `more`."""
        copies = self._copies
        self._copies = []
        rest: list[float] = []
        for copied, arrived, losses_per_step in copies:
            if arrived is not None:
                arrived.synchronize()
            values = iter(copied.tolist())
            steps = []
            for count in losses_per_step:
                losses = [next(values) for _ in range(count)]
                steps.append((sum(losses), next(values), next(values)))
            for step in steps:
                self._add(*step, applied=bool(next(values)))
            rest = list(values)
        return rest

    def _add(self, loss: float, weight: float, norm: float, applied: bool) -> None:
        self.norm = norm
        # A nan must not hide behind a smaller number.
        self.min_weight = weight if math.isnan(weight) else min(self.min_weight, weight)
        if not applied:  # its loss is often not finite, and would spoil the interval's mean
            self.skipped += 1
            return
        self.loss += loss
        self.weight += weight
        self.applied += 1
        self.clipped += norm > self.max_norm


class WeightedMeans:
    """An evaluation's sums of metrics and of their weights: float64 on the device."""

    def __init__(self, world: World):
        self._world = world
        self._sums: dict[str, Tensor] = {}  # by metric: [2], its sum and its weight
        self._names_vary = False  # whether the names come from the task's metrics()

    def checked(self, values: Any) -> dict[str, Any]:
        """A copy of what metrics() returned. Errors: DataError unless names are equal."""
        self._names_vary = True
        if not isinstance(values, Mapping):
            raise DataError(
                f"the task's metrics() returned {type(values).__name__}; return a dict of sums, or "
                "of pairs (sum, weight)"
            )
        if self._sums and {*values, "loss"} != {*self._sums, "loss"}:
            raise DataError(
                f"the task's metrics() returned {', '.join(values) or 'nothing'} for one batch and "
                f"{', '.join(self._sums)} for another; return the same names for every batch, on "
                "every rank"
            )
        return dict(values)

    def add(self, values: Mapping[str, Any], weight: float | Tensor, counts: float) -> None:
        """Add a batch's sums (of this weight) or pairs of a sum and its weight, times `counts`."""
        weight = as_scalar(check_weight(weight), "weight() returned", self._world.device)
        for name, value in values.items():
            pair = value if isinstance(value, tuple) else (value, weight)
            if len(pair) != 2:
                raise DataError(
                    f"the task's metrics() gave {name} {len(pair)} values; return a sum, or a pair "
                    "(sum, weight)"
                )
            pair = (pair[0], check_weight(pair[1], f"metrics() gave {name} the weight"))
            scalars = [as_scalar(x, f"metrics() gave {name}", self._world.device) for x in pair]
            sums = torch.stack([scalar.detach().double() for scalar in scalars])
            self._sums[name] = self._sums.get(name, 0.0) + sums * counts

    def over_all_ranks(self) -> dict[str, float]:
        """{metric: its mean}, equal on every rank; one all-reduce.

        With a total weight of 0 the loss is nan, and any other metric is left out: an evaluation of
        a few batches may meet no token of one source. Errors: DataError, on every rank, if ranks
        have other metrics than rank 0.
        """
        names = list(self._sums)
        if self._names_vary:
            texts = self._world.gather_texts(json.dumps(names))
            names = json.loads(texts[0])
            for rank, text in enumerate(texts):
                if set(json.loads(text)) != set(names):
                    raise DataError(
                        f"the task's metrics() returned {', '.join(names)} on rank 0 and "
                        f"{', '.join(json.loads(text))} on rank {rank}; return the same names on "
                        "every rank"
                    )
        totals = self._world.sum(torch.stack([self._sums[name] for name in names])).tolist()
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, totals, strict=True)
            if weight or total or name == "loss"
        }
