"""Python's garbage collection at fixed steps, the same ones on all ranks."""

import gc
from collections.abc import Sequence
from typing import Any, Self

from dist_amp.run import Run
from dist_amp.telemetry.step_report import Observer, StepReport

EVERY = 50  # steps; assumed


class ScheduledGarbage(Observer):
    """Turns automatic collection off, and collects every so many steps.

    Automatic collections happen at different steps on each rank, and each one makes all other ranks
    wait. Objects that exist at the start (mostly modules) are frozen, because scanning them too
    made a full collection take 127 ms. Evaluations have no steps, and collect automatically.
    """

    def __init__(self, run: Run):
        self._run = run
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> Self:
        if self._was_enabled:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._was_enabled and self._run.step % EVERY == 0:
            gc.collect()

    def before_evaluation(self) -> None:
        if self._was_enabled:
            gc.enable()

    def after_evaluation(self) -> None:
        if self._was_enabled:
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._was_enabled:
            gc.enable()
            gc.unfreeze()
