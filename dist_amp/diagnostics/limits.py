"""When to give up: too many skipped steps, a collapsed loss scale, nothing that counts."""

import math

from dist_amp.errors import DataError, NumericsError
from dist_amp.settings import Config
from dist_amp.telemetry.metrics import LogRow


def stop_if_hopeless(row: LogRow, config: Config, first: str = "") -> None:
    """Errors: DataError where nothing in a step counts; NumericsError for a collapsed scale or too many skips.

    first: where the skips began, if it is known.
    """
    least, endless = row["least_weight"], row["weight_sum"] == math.inf
    if endless or not least > 0:
        raise DataError(
            f"in the steps up to {row.step} a total weight was {math.inf if endless else least:g}; the task's "
            "weight(batch) is what the loss is divided by, and must be above 0"
        )
    if config.precision.name == "fp16" and row["loss_scale"] < config.precision.scaler.min_scale:
        raise NumericsError(
            f"the loss scale fell to {row['loss_scale']:g} up to step {row.step}, below "
            f"precision.scaler.min_scale={config.precision.scaler.min_scale:g}: gradients stay infinite or nan "
            "whatever the scale; try precision.dtype=bf16, a lower optim.lr or --use_amp false, or mend the module "
            f"that is reported as first not finite{first}"
        )
    if row["skips_in_a_row"] >= config.train.max_skips_in_a_row:
        advice = "a lower optim.lr, or --use_amp false" if config.precision.name != "fp32" else "a lower optim.lr"
        raise NumericsError(
            f"{row['skips_in_a_row']:.0f} steps in a row were not finite and were skipped, up to step {row.step} "
            f"(loss {row.loss:g}); the limit is train.max_skips_in_a_row={config.train.max_skips_in_a_row}; "
            f"try {advice}, or look at the data{first}"
        )
