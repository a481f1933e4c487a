"""Sums that are made without waiting for the device: log intervals and evaluations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_amp.config.validate import check_scalar, check_weight
from dist_amp.errors import DataError
from dist_amp.task import as_scalar
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World

# What a checkpoint saves of an unfinished interval, in this order, and each one's start.
SAVED = {
    "loss_sum": 0.0,
    "weight_sum": 0.0,
    "min_weight": math.inf,
    "tokens_seen": 0.0,  # by this rank since step 0, before this interval
    "applied_in_interval": 0.0,
    "skipped_in_interval": 0.0,
    "clipped_in_interval": 0.0,  # of the applied ones, by their norm
}


class Interval:
    """The steps since the last log step. sums: of RANK_METRICS, in float64, added step by step.
    saved: those of an interval that a checkpoint cut. reports: of steps that are not in them yet.
    """

    def __init__(self, max_norm: float, saved: Sequence[float] = tuple(SAVED.values())):
        self.sums = dict(zip(SAVED, saved, strict=True), steps=0.0, grad_norm=0.0)
        self._max_norm = max_norm  # above it, gradients are clipped
        self.reports: list[StepReport] = []
        # On its way to the host: (values, when they have arrived, losses of each step, names of
        # the rest).
        self._copy: tuple[list[Tensor], Any, list[int], list[str]] | None = None

    def start_copy(self, more: Mapping[str, Tensor]) -> None:
        """Start copying to the host what is still on the device, and more scalars of it.

        In order: losses and weight of each step, each one's norm, its `applied` flag, then `more`.
        """
        reports = self.reports
        self.reports = []
        parts = [
            [x for report in reports for x in (*report.losses, report.weight)],
            [report.norm for report in reports],  # under CPU offload on the host
            [report.applied for report in reports],
            [value.float() for value in more.values()],
        ]
        stacked = [torch.stack(part).float() for part in parts if part]
        if not stacked:
            return
        values = [part.to("cpu", non_blocking=True) for part in stacked]  # into pinned memory
        arrived = None
        if any(part.is_cuda for part in stacked):
            arrived = torch.cuda.Event()
            arrived.record()
        losses_per_step = [len(report.losses) for report in reports]
        self._copy = (values, arrived, losses_per_step, list(more))

    def read(self) -> dict[str, float]:
        """Add the copied steps to the sums, waiting for them; return the copy's `more`."""
        if self._copy is None:
            return {}
        copied, arrived, losses_per_step, names = self._copy
        self._copy = None
        if arrived is not None:
            arrived.synchronize()
        values = iter(torch.cat(copied).tolist())
        steps = []
        for count in losses_per_step:
            losses = [next(values) for _ in range(count)]
            steps.append((sum(losses), next(values)))
        norms = [next(values) for _ in steps]
        for step, norm in zip(steps, norms, strict=True):
            self._add(*step, norm, applied=bool(next(values)))
        return dict(zip(names, values, strict=True))

    def _add(self, loss: float, weight: float, norm: float, applied: bool) -> None:
        sums = self.sums
        sums["steps"] += 1
        sums["grad_norm"] = norm  # the last step's
        # A nan must not hide behind a smaller number.
        if math.isnan(weight) or weight < sums["min_weight"]:
            sums["min_weight"] = weight
        if not applied:  # its loss is often not finite, and would spoil the interval's mean
            sums["skipped_in_interval"] += 1
            return
        sums["loss_sum"] += loss
        sums["weight_sum"] += weight
        sums["applied_in_interval"] += 1
        sums["clipped_in_interval"] += norm > self._max_norm


class WeightedMeans:
    """An evaluation's sums of metrics and of their weights: float64 on the device."""

    def __init__(self, world: World, exact: bool = False):
        """exact: the same bits on any number of ranks, for one host read per evaluation."""
        self._world = world
        self._exact = exact
        self._sums: dict[str, list[Tensor]] = {}  # by metric, of each batch: [2], sum and weight

    def add(self, values: Mapping[str, Any], weight: float | Tensor, counts: float) -> None:
        """Add a batch's sums (of this weight) or pairs of a sum and its weight, times `counts`."""
        check_weight(weight)
        weight = as_scalar(weight, self._world.device)
        for name, value in values.items():
            total, own_weight = value if isinstance(value, tuple) else (value, weight)
            check_scalar(total, f"metrics() gave {name}")
            check_weight(own_weight, f"metrics() gave {name} the weight")
            scalars = [as_scalar(x, self._world.device) for x in (total, own_weight)]
            sums = torch.stack([scalar.detach().double() for scalar in scalars])
            self._sums.setdefault(name, []).append(sums * counts)

    def over_all_ranks(self) -> dict[str, float]:
        """{metric: its mean}, equal on every rank; one all-reduce.

        With a total weight of 0 the loss is nan, and any other metric is left out. Errors:
        DataError, on every rank, if batches or ranks have other metrics than the first.
        """
        # Ranks may have them in another order.
        names = sorted(self._sums, key=lambda name: (name != "loss", name))
        counts = self._world.gather({name: len(self._sums[name]) for name in names})
        for rank, of_rank in enumerate(counts):
            if of_rank != counts[0] or len(set(of_rank.values())) > 1:
                raise DataError(
                    "the task's metrics() did not return the same names for every batch on every "
                    f"rank; the batches that had each are {counts[0]} on rank 0 and {of_rank} on "
                    f"rank {rank}"
                )
        rows = torch.stack([torch.stack(self._sums[name]) for name in names])
        if self._exact:
            totals = []
            for batches in self._world.stack(rows).transpose(0, 1):
                pairs = batches.flatten(0, 1).tolist()  # of all ranks
                totals.append([math.fsum(column) for column in zip(*pairs, strict=True)])
        else:
            totals = self._world.sum(rows.sum(1)).tolist()
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, totals, strict=True)
            if weight or total or name == "loss"
        }
