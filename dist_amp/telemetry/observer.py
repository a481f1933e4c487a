"""The interface of what watches a run; train.py holds an ordered tuple of observers and calls them around each step."""

from collections.abc import Sequence
from typing import Any, Self

from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.log_row import LogRow


class Observer:
    """Watches a run from outside the step; each method is called on every rank, at the same step, in the tuple's order.

    Deleting an observer's file and its entry in train.py deletes the feature; a run takes the same steps without it.
    """

    reads_before_step = False
    """Whether pending metrics must be read and passed to `on_log` before `before_step`, because the observer writes
    lines of its own to metrics.jsonl, which is ordered by step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def before_step(self, micro_batches: Sequence[Any]) -> None:
        """Before a step on `micro_batches`; `run.step` is still the number of steps taken before it."""

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        """After a step, before any evaluation or checkpoint; `run.step` counts this step."""

    def on_log(self, row: LogRow) -> None:
        """The metrics of a log interval, of all ranks; read one step after the log step, or at it."""

    def after_evaluation(self) -> None:
        """After an evaluation, which averaged the batch statistics over the ranks."""
