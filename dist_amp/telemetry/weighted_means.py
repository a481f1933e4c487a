"""The means of an evaluation: sums over all batches and ranks, divided by weights summed alike."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import DataError
from dist_amp.task import as_scalar, check_weight
from dist_amp.world import World


class WeightedMeans:
    """Sums of metrics and of their weights, float64 on the device; nothing is read on the way."""

    def __init__(self, world: World):
        self._world = world
        self._sums: dict[str, Tensor] = {}  # by metric: [2], its sum and its weight
        self._names_vary = False  # whether the names come from the task's metrics()

    def checked(self, values: Any) -> dict[str, Any]:
        """A copy of what metrics() returned. Errors: DataError unless it is a dict with equal names
        for every batch.
        """
        self._names_vary = True
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise DataError(
                f"the task's metrics() returned {kind}; return a dict of sums, or of pairs (sum, "
                "weight)"
            )
        if self._sums and {*values, "loss"} != {*self._sums, "loss"}:
            raise DataError(
                f"the task's metrics() returned {', '.join(values) or 'nothing'} for one batch and "
                f"{', '.join(self._sums)} for another; return the same names for every batch, on "
                "every rank"
            )
        return dict(values)

    def add(self, values: Mapping[str, Any], weight: float | Tensor, counts: float) -> None:
        """Add a batch's sums, or pairs of a sum and its weight, times `counts`. weight: of plain
        sums.
        """
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
            names = self._agreed_names()
        totals = self._world.sum(torch.stack([self._sums[name] for name in names])).tolist()
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(names, totals, strict=True)
            if weight or total or name == "loss"
        }

    def _agreed_names(self) -> list[str]:
        """The metrics in rank 0's order."""
        texts = self._world.gather_texts(json.dumps(list(self._sums)))
        names_of_ranks: list[list[str]] = [json.loads(text) for text in texts]
        first = names_of_ranks[0]
        for rank, names in enumerate(names_of_ranks):
            if set(names) != set(first):
                raise DataError(
                    f"the task's metrics() returned {', '.join(first)} on rank 0 and "
                    f"{', '.join(names)} on rank {rank}; return the same names on every rank"
                )
        return first
