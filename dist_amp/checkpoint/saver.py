"""Saves the run's checkpoints: one at a time, in the background if checkpoint.async_save is set."""

from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

import torch

from dist_amp.checkpoint.format import checkpoint_folder, integrity_error, quarantine
from dist_amp.checkpoint.plans import SavePlanner
from dist_amp.checkpoint.staging import Staging
from dist_amp.checkpoint.state import Resumable, take_snapshot
from dist_amp.checkpoint.writer import Snapshot, write
from dist_amp.errors import Failure
from dist_amp.telemetry.log_row import LogRow
from dist_amp.telemetry.observer import Observer
from dist_amp.world import World


def save(run: Resumable) -> Path:
    """Write a checkpoint of the run's current state and wait for it; every rank calls it. Errors: Failure."""
    Saver(run).save(wait=True)
    return checkpoint_folder(run.folder, run.step)


class Saver(Observer):
    """Saves checkpoints of a run, one at a time; as a context manager it waits for the last one."""

    def __init__(self, run: Resumable):
        self._run = run
        self._pending: Future[None] | None = None
        self._staging = Staging(run.world.device)
        self._planner = SavePlanner()

    def save(self, wait: bool) -> None:
        """Save the current state; every rank calls it. wait: until it is written, and raise Failure if it can't be."""
        with self._run.world.clock.hold("checkpoint"):
            self._finish()
            if not self._is_saved():
                self._save(wait)

    def _save(self, wait: bool) -> None:
        in_background = self._run.config.checkpoint.async_save and not wait
        snapshot = take_snapshot(self._run, staging=self._staging if in_background else None)
        self._pending = self._run.metrics.save = Future()
        if in_background:
            # Not a thread pool: Python joins its threads at exit, even after a crash.
            work = (snapshot, self._run.world, self._planner, self._pending)
            Thread(target=_write, args=work, daemon=True).start()
        else:
            _write(snapshot, self._run.world, self._planner, self._pending)
            self._finish(must_succeed=wait)

    def on_log(self, row: LogRow) -> None:
        """Check whether the background save has ended, and how; every rank calls it and gets the same answer."""
        if self._pending is not None and row.column("save_done").all():
            self._finish()

    def _is_saved(self) -> bool:
        """Whether this step has a valid checkpoint, as right after a resume; a damaged one is quarantined."""
        world, valid = self._run.world, False
        folder = checkpoint_folder(self._run.folder, self._run.step)
        if world.is_main and folder.exists():
            valid = not integrity_error(folder)
            if not valid:
                quarantine(folder)
        return world.from_main(str(valid)) == "True"

    def _finish(self, must_succeed: bool = False) -> None:
        """Wait for the pending save. Errors: Failure if it failed and the run is configured to stop then."""
        # Also that of another Saver, as of a callback's save(run): two threads would use one group.
        pending, self._pending = self._pending or self._run.metrics.save, None
        self._run.metrics.save = None
        try:
            if pending is not None:
                pending.result()
        except Failure as error:
            if must_succeed or self._run.config.checkpoint.on_failure == "stop":
                raise
            self._run.world.warn(f"{error}; checkpoint.on_failure=go_on tries again at the next one")

    def __exit__(self, *error: object) -> None:
        """Wait for the pending save, but only briefly if the ranks may have diverged: writing needs all of them."""
        if self._pending is not None:
            # A Failure may be this rank's alone: wait half of the timeout of the others' collectives.
            in_step = error[0] is None or isinstance(error[1], Failure)
            with suppress(Exception):
                self._pending.result(timeout=self._run.config.run.timeout_seconds / 2 if in_step else 5.0)


def _write(snapshot: Snapshot, world: World, planner: SavePlanner, outcome: "Future[None]") -> None:
    try:
        if world.device.type == "cuda":  # a new thread's current device is the first one
            torch.cuda.set_device(world.device)
        write(snapshot, world, planner)
        outcome.set_result(None)
    except BaseException as error:
        outcome.set_exception(error)
