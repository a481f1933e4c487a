"""Saves checkpoints: all ranks write one together, and the disk has all of it or nothing.

1. `take_snapshot` (state.py) collects the state while training waits.
2. With checkpoint.async_save, the state is copied to host memory and training continues. A save
   that the caller waits for, such as the last one of a run, is written without a copy.
3. A thread of each rank writes its shards (background.py), into a folder with a temporary name.
   Rank 0 adds the manifest and renames the folder. An error on one rank ends the save on all.
4. At a log step, or before the next save, `finish` waits for the threads and reports the outcome.
   A failed save is only a warning, unless the caller waits for the save.
A save is stuck if no rank has finished a stage or started a tensor for run.timeout_seconds. A
stuck save ends the run, because its threads can't be ended.
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
    """Saves checkpoints of a run, one at a time. pending: the unfinished `Save`, or None."""

    def __init__(self, run: Run):
        self.pending: Any = None
        self._run = run
        self._planner: Any = None  # made by the first save, for all, like the staging
        self._staging: Any = None
        self._unsaved = Unsaved(run)
        self._written: Path | None = None  # folder of the latest checkpoint written by this process

    def save(self, wait: bool) -> None:
        """Save the state; every rank calls it. wait: return when it is written. Raises Failure."""
        from dist_amp.checkpoint.background import Planner, Save, Staging

        run = self._run
        with run.world.clock.hold("checkpoint"):
            self.finish()
            self._unsaved.compare()  # warns of state that no checkpoint contains
            folder = checkpoint_folder(run.folder, run.step)
            # This step's checkpoint may exist: written here, or the one that the run resumed from.
            is_saved = folder == self._written or run.step == run.resumed_from_step
            if not is_saved or not run.world.from_main((folder / MANIFEST).exists()):
                staging = None
                if run.config.checkpoint.async_save and not wait:
                    staging = self._staging = self._staging or Staging(run.world.device)
                self._planner = self._planner or Planner()
                self.pending = Save(run, *take_snapshot(run), self._planner, staging)
                if staging is None:
                    self.finish(must_succeed=wait)
            best = getattr(run.task, "best_metric", "loss")  # checked once there is an evaluation
            metrics = run.metrics.evaluation
            is_new = metrics and run.metrics.evaluated_step == run.step != run.resumed_from_step
            if is_new and metric_name(best) not in metrics:
                self.finish(must_succeed=True)
                raise ConfigError(
                    f"the task's best_metric={best!r} is not in the evaluation after step "
                    f"{run.step}, whose checkpoint is saved: name one of {', '.join(metrics)}"
                )

    def is_done(self) -> bool:
        return self.pending is None or bool(self.pending.future.done())

    def on_log(self, row: LogRow) -> None:
        """Finish the pending save if it has ended on all ranks."""
        if self.pending is not None and row.column("save_done").all():
            self.finish()

    def finish(self, must_succeed: bool = False) -> None:
        """Wait for the pending save; every rank calls it.

        Raises Failure if the save is stuck, or if it has failed and `must_succeed` is true.
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
            self._run.world.warn(f"{error}; the run tries again at the next save")
        finally:
            if not pending.is_stuck:  # a stuck save's threads may still write: start no other save
                self.pending = None

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the pending save, which needs all ranks; not for ever, as they may be gone."""
        if self.pending is None or self.pending.is_stuck:
            return
        seconds = 5.0
        if error is None or isinstance(error, Failure):
            # Half the timeout, because after this rank's own Failure the other ranks wait for it.
            seconds = self._run.config.run.timeout_seconds / 2
        wait([self.pending.future], seconds)
