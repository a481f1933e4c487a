"""When to stop a run: too many skipped steps in a row, a collapsed loss scale, a total weight that is not positive."""

import math

from dist_amp.diagnostics.replay import NonfiniteReplay
from dist_amp.errors import DataError, NumericsError
from dist_amp.run import Run
from dist_amp.telemetry.log_row import LogRow
from dist_amp.telemetry.observer import Observer


class Limits(Observer):
    """Stops a run that can't recover; comes after `nonfinite`, which knows the first non-finite module.

    Errors: DataError for a total weight that is not a positive number, NumericsError for a collapsed loss scale or too
    many skipped steps.
    """

    def __init__(self, run: Run, nonfinite: NonfiniteReplay):
        self._config = run.config
        self._nonfinite = nonfinite

    def on_log(self, row: LogRow) -> None:
        train, precision = self._config.train, self._config.precision
        infinite = row["weight_sum"] == math.inf
        if infinite or not row["min_weight"] > 0:
            raise DataError(
                f"in the steps up to {row.step} a total weight was {math.inf if infinite else row['min_weight']:g}; "
                "the task's weight(batch) is what the loss is divided by, and must be above 0"
            )
        first = self._nonfinite.where(row)
        min_scale = precision.scaler.min_scale
        if precision.name == "fp16" and row["loss_scale"] < min_scale:
            raise NumericsError(
                f"the loss scale fell to {row['loss_scale']:g} up to step {row.step}, below "
                f"precision.scaler.min_scale={min_scale:g}: gradients stay infinite or nan at any scale; try "
                "precision.dtype=bf16, a lower optim.lr or --use_amp false, or fix the module that is reported as the "
                f"first non-finite one{first}"
            )
        if row["skips_in_a_row"] >= train.max_skips_in_a_row:
            advice = "a lower optim.lr, or --use_amp false" if precision.name != "fp32" else "a lower optim.lr"
            raise NumericsError(
                f"{row['skips_in_a_row']:.0f} steps in a row were not finite and were skipped, up to step {row.step} "
                f"(loss {row.loss:g}); the limit is train.max_skips_in_a_row={train.max_skips_in_a_row}; try {advice}, "
                f"or check the data{first}"
            )
