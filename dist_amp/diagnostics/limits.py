"""Limits that stop a run that can't learn."""

import math
from collections.abc import Callable

from dist_amp.errors import DataError, NumericsError
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow

MIN_SCALE = 1.0  # of the loss: what is still not finite at this scale has another cause


class Limits(Observer):
    """Stops a run that can't recover. Errors: DataError, NumericsError."""

    def __init__(self, run: Run, where: Callable[[LogRow], str] = lambda row: ""):
        """where: the place where the skips up to a log step began, or ""."""
        self._config = run.config
        self._where = where

    def on_log(self, row: LogRow) -> None:
        precision = self._config.precision
        # The least total weight of a step, inf if there was none; a weight of inf is in the sum.
        weight = math.inf if row["weight_sum"] == math.inf else row["min_weight"]
        if row["weight_sum"] == math.inf or not weight > 0:
            raise DataError(
                f"in the steps up to {row.step} a total weight was {weight:g}; the task's "
                "weight(batch) is what the loss is divided by, and must be finite and above 0; if "
                "it is 0, leave out the samples without a label in build_dataset and resume with "
                "--run.allow_config_change true, or return max(1, weight) there, which makes a "
                "step without labels one of loss 0"
            )
        if precision.name == "fp16" and row["loss_scale"] < MIN_SCALE:
            raise NumericsError(
                f"the loss scale fell to {row['loss_scale']:g} up to step {row.step}, below "
                f"{MIN_SCALE:g}: gradients stay infinite or nan at any scale; try "
                "precision.dtype=bf16, a lower optim.lr or --use_amp false, or fix the module that "
                f"is reported as the first non-finite one{self._where(row)}"
            )
        limit = self._config.train.max_skips_in_a_row
        if row["skips_in_a_row"] >= limit:
            raise NumericsError(
                f"{row['skips_in_a_row']:.0f} steps in a row were not finite and were skipped, up "
                f"to step {row.step} (loss {row.loss:g}); the limit is "
                f"train.max_skips_in_a_row={limit}; try a lower optim.lr or --use_amp false, or "
                f"check the data{self._where(row)}"
            )
