"""Sums over log intervals and evaluations, accumulated without waiting for the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_amp.config.validate import check_scalar, check_weight
from dist_amp.errors import DataError
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World, as_scalar

# {sum: its initial value}: what a checkpoint holds of an unfinished interval, in this order. There
# are no times among them, so that equal steps give equal checkpoints.
SAVED = {
    "loss_sum": 0.0,
    "weight_sum": 0.0,
    "min_weight": math.inf,
    "tokens_seen": 0.0,  # by this rank from step 0 to the start of this interval
    "applied_in_interval": 0.0,
    "skipped_in_interval": 0.0,
    "clipped_in_interval": 0.0,  # applied steps whose norm was above the limit
}


class Interval:
    """The steps since the last log step. sums: {metric: sum over the steps read so far}; reports:
    of the steps not read yet. saved: the sums in the checkpoint from which the interval continues.
    """

    def __init__(self, max_norm: float, saved: Sequence[float] = tuple(SAVED.values())):
        self.sums = dict(zip(SAVED, saved, strict=True), steps=0.0, grad_norm=0.0)
        self._max_norm = max_norm  # above it, gradients are clipped
        self.reports: list[StepReport] = []
        # The copy in progress: (values, event of their arrival, losses per step, names of `extra`).
        self._copy: tuple[list[Tensor], Any, list[int], list[str]] | None = None

    def start_copy(self, extra: Mapping[str, Tensor]) -> None:
        """Start copying the reports' scalars, and the `extra` ones, from the device to the host.

        Their order: losses and weight of each step; each step's norm; each `applied`; `extra`.
        """
        reports = self.reports
        self.reports = []
        parts = [
            [x for report in reports for x in (*report.losses, report.weight)],
            [report.norm for report in reports],  # on the host under CPU offload
            [report.applied for report in reports],
            [value.float() for value in extra.values()],
        ]
        stacked = [torch.stack(part).float() for part in parts if part]
        if not stacked:
            return
        values = [part.to("cpu", non_blocking=True) for part in stacked]  # into pinned memory
        arrived = None
        if any(part.is_cuda for part in stacked):  # else `values` is there already
            arrived = torch.cuda.Event()
            arrived.record()
        losses_per_step = [len(report.losses) for report in reports]
        self._copy = (values, arrived, losses_per_step, list(extra))

    def read(self) -> dict[str, float]:
        """Wait for the copy and add its steps to the sums; returns {name: value} of `extra`."""
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
        # nan < x is False, but a nan must reach the check of weights.
        if math.isnan(weight) or weight < sums["min_weight"]:
            sums["min_weight"] = weight
        if not applied:  # its loss may be inf or nan, which would spoil the interval's mean
            sums["skipped_in_interval"] += 1
            return
        sums["loss_sum"] += loss
        sums["weight_sum"] += weight
        sums["applied_in_interval"] += 1
        sums["clipped_in_interval"] += norm > self._max_norm


class WeightedMeans:
    """Weighted means of an evaluation's metrics, from float64 sums on the device."""

    def __init__(self, world: World, exact: bool = False):
        """exact: give the same bits on any number of ranks, by summing all batches on the host."""
        self._world = world
        self._exact = exact
        self._sums: dict[str, list[Tensor]] = {}  # {metric: [sum, weight] of each batch}

    def add(self, values: Mapping[str, Any], weight: float | Tensor, counts: float) -> None:
        """Add a batch's {metric: sum, or (sum, its own weight)}. counts: 1, or 0 for padding."""
        check_weight(weight)
        weight = as_scalar(weight, self._world.device)
        for name, value in values.items():
            total, own_weight = value if isinstance(value, tuple) else (value, weight)
            check_scalar(total, f"metrics()[{name!r}] is")
            check_weight(own_weight, f"metrics()[{name!r}] has the weight")
            scalars = [as_scalar(x, self._world.device) for x in (total, own_weight)]
            sums = torch.stack([scalar.detach().double() for scalar in scalars])
            self._sums.setdefault(name, []).append(sums * counts)

    def over_all_ranks(self) -> dict[str, float]:
        """{metric: its mean}, equal on every rank; every rank calls it.

        With a total weight of 0, the loss is nan, and any other metric whose sum is 0 is left out.
        Raises DataError, on every rank, if batches or ranks have different metrics.
        """
        # In the same order on every rank, with the loss first.
        names = sorted(self._sums, key=lambda name: (name != "loss", name))
        counts = self._world.gather({name: len(self._sums[name]) for name in names})
        for rank, counts_of_rank in enumerate(counts):
            if counts_of_rank != counts[0] or len(set(counts_of_rank.values())) > 1:
                raise DataError(
                    "the task's metrics() must return the same names for every batch on every rank;"
                    f" batches by name: {counts[0]} on rank 0 and {counts_of_rank} on rank {rank}"
                )
        rows = torch.stack([torch.stack(self._sums[name]) for name in names])
        if self._exact:
            totals = []
            for batches in self._world.stack(rows).transpose(0, 1):
                pairs = batches.flatten(0, 1).tolist()  # [sum, weight] of all ranks' batches
                totals.append([math.fsum(column) for column in zip(*pairs, strict=True)])
        else:
            totals = self._world.sum(rows.sum(1)).tolist()
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, totals, strict=True)
            if weight or total or name == "loss"
        }
