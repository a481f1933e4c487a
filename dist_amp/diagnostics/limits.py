"""Ends a run that can't recover: invalid total weight, collapsed loss scale, too many skips."""

import math
from collections.abc import Callable

from dist_amp.errors import DataError, NumericsError
from dist_amp.run import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow

MIN_SCALE = 1.0  # if gradients overflow even at this loss scale, the scale is not the cause


class Limits(Observer):
    """Checks at each log step. Raises DataError for an invalid weight, otherwise NumericsError."""

    def __init__(self, run: Run, start_of_skips: Callable[[LogRow], str] = lambda row: ""):
        """start_of_skips: returns where the latest skips began, to end an error message; or ""."""
        self._config = run.config
        self._start_of_skips = start_of_skips

    def on_log(self, row: LogRow) -> None:
        # An infinite weight shows only in the sum: in an interval without steps, min_weight is inf.
        weight = math.inf if row["weight_sum"] == math.inf else row["min_weight"]
        if row["weight_sum"] == math.inf or not weight > 0:
            raise DataError(
                f"a step had a total weight of {weight:g} (up to step {row.step}); the loss is "
                "divided by the sum of weight(batch), which must be finite and above 0; if it is "
                "0, leave out the samples without a label in build_dataset and resume with "
                "--run.allow_config_change true, or return max(1, weight) from weight(batch), so "
                "that a step without labels has loss 0"
            )
        if self._config.precision.name == "fp16" and row["loss_scale"] < MIN_SCALE:
            raise NumericsError(
                f"the loss scale fell to {row['loss_scale']:g} by step {row.step}, below "
                f"{MIN_SCALE:g}: gradients are infinite or nan at any scale; try "
                "precision.dtype=bf16, a lower optim.lr or --use_amp false, or fix the module that "
                f"is reported as the first non-finite one{self._start_of_skips(row)}"
            )
        limit = self._config.train.max_skips_in_a_row
        if row["skips_in_a_row"] >= limit:
            raise NumericsError(
                f"{row['skips_in_a_row']:.0f} steps in a row were not finite and were skipped, up "
                f"to step {row.step} (loss {row.loss:g}); the limit is "
                f"train.max_skips_in_a_row={limit}; try a lower optim.lr or --use_amp false, or "
                f"check the data{self._start_of_skips(row)}"
            )
