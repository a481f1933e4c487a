"""Saves checkpoints: all ranks write one together, complete or not at all, with one outcome.

A save has three parts. `take_snapshot` collects the state of all ranks while training waits. With
checkpoint.async_save it is then copied to host memory (background.py), and training continues. A
thread of each rank writes it in stages: a folder with a temporary name, this rank's shards and
their hashes, the manifest, the rename, the removal of old checkpoints. After each stage all ranks
exchange how it went, over a process group of their own, so that one that fails ends the save on
all.

The outcome is known at a log step, or when the next save begins. A save that fails costs a
checkpoint and not the run, unless it is the last one. If no rank ends a stage, or comes to its next
tensor, for run.timeout_seconds, the save is stuck: nothing can end its threads, so the run ends.
"""

from concurrent.futures import wait
from pathlib import Path
from typing import Any

from dist_amp.checkpoint.format import MANIFEST, checkpoint_folder, metric_name
from dist_amp.checkpoint.state import take_snapshot
from dist_amp.checkpoint.task_state import Unsaved
from dist_amp.errors import ConfigError, Failure
from dist_amp.step import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow


class Saver(Observer):
    """Saves checkpoints of a run, one at a time, with checkpoint.async_save in the background.

    pending: one that is being written.
    """

    def __init__(self, run: Run):
        self.pending: Any = None
        self._run = run
        self._planner: Any = None
        self._staging: Any = None
        self._unsaved = Unsaved(run)
        self._written: Path | None = None  # the folder of the latest that was written

    def save(self, wait: bool) -> None:
        """Save the state; every rank calls it. wait: until it is written. Errors: Failure."""
        from dist_amp.checkpoint.background import Planner, Save, Staging

        run = self._run
        with run.world.clock.hold("checkpoint"):
            self.finish()
            self._unsaved.compare()
            folder = checkpoint_folder(run.folder, run.step)
            is_there = folder == self._written or run.step == run.resumed_from_step
            if not is_there or not run.world.from_main((folder / MANIFEST).exists()):
                staging = None
                if run.config.checkpoint.async_save and not wait:
                    staging = self._staging = self._staging or Staging(run.world.device)
                self._planner = self._planner or Planner()
                self.pending = Save(run, *take_snapshot(run), self._planner, staging)
                if staging is None:
                    self.finish(must_succeed=wait)
            best = getattr(run.task, "best_metric", "loss")
            names = run.metrics.evaluation
            is_new = names and run.metrics.evaluated_step == run.step != run.resumed_from_step
            if is_new and metric_name(best) not in names:
                self.finish(must_succeed=True)
                raise ConfigError(
                    f"the task's best_metric={best!r} is not in the evaluation after step "
                    f"{run.step}, whose checkpoint is saved: name one of {', '.join(names)}"
                )

    def is_done(self) -> bool:
        """Whether nothing is being written by this rank."""
        return self.pending is None or bool(self.pending.future.done())

    def on_log(self, row: LogRow) -> None:
        """Check whether the background save has ended, and how: the same on every rank."""
        if self.pending is not None and row.column("save_done").all():
            self.finish()

    def finish(self, must_succeed: bool = False) -> None:
        """Wait for the pending save; every rank calls it.

        Errors: Failure if it is stuck, or fails and must not.
        """
        pending = self.pending
        if pending is None:
            return
        try:
            pending.wait()
            self._written = pending.folder
        except Failure as error:
            if must_succeed or pending.is_stuck:
                raise
            self._run.world.warn(f"{error}; the run tries again at the next one")
        finally:
            if not pending.is_stuck:  # else its threads may write yet: no other save may begin
                self.pending = None

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the pending save; only briefly if ranks may have diverged: writing needs all."""
        if self.pending is None or self.pending.is_stuck:
            return
        seconds = 5.0
        if error is None or isinstance(error, Failure):
            # A Failure may be this rank's alone: half of the timeout of the others' collectives.
            seconds = self._run.config.run.timeout_seconds / 2
        wait([self.pending.future], seconds)
