"""The main job's checkpoints: one at a time, in the background."""

from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

import torch
import torch.distributed as dist

from dist_amp.checkpoint.state import Resumable, _is_there, take
from dist_amp.checkpoint.writer import Snapshot, write
from dist_amp.errors import Failure
from dist_amp.telemetry.metrics import LogRow
from dist_amp.telemetry.observer import Observer
from dist_amp.world import World


class Saver(Observer):
    """The main job's checkpoints: one at a time, in the background if checkpoint.async_save says so."""

    def __init__(self, run: Resumable):
        self._run = run
        self._pending: Future[None] | None = None

    def save(self, wait: bool) -> None:
        """Save the run as it stands; every rank calls it. wait: until it is written, and fail if it can't be."""
        with self._run.metrics.off_the_clock():
            self._save(wait)

    def _save(self, wait: bool) -> None:
        self._finish()
        in_background = self._run.config.checkpoint.async_save and not wait
        snapshot = take(self._run, copy=in_background)
        if _is_there(snapshot, self._run.world):
            return
        self._pending = Future()
        if in_background:
            # Not a pool's thread: Python would wait for that at its exit, however badly the run has ended.
            Thread(target=_write, args=(snapshot, self._run.world, self._pending), daemon=True).start()
        else:
            _write(snapshot, self._run.world, self._pending)
            self._finish(must=wait)

    def on_log(self, row: LogRow) -> None:
        """At a log step: whether a save has ended, and how; every rank calls it, and learns the same."""
        if self._pending is None:
            return
        done = torch.tensor(float(self._pending.done()))
        if self._run.world.control is not None:
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._run.world.control)
        if done:
            self._finish()

    def _finish(self, must: bool = False) -> None:
        """Wait for the save that is under way. Errors: Failure where it failed and the run is not to go on."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except Failure as error:
            if must or self._run.config.checkpoint.on_failure == "stop":
                raise
            self._run.world.warn(f"{error}; checkpoint.on_failure=go_on tries again at the next one")

    def __exit__(self, *error: object) -> None:
        """Let a save that is under way end; not for long where ranks may have parted, since all must take part."""
        kind = error[0]
        if self._pending is not None:
            # Half of what the others' collectives wait for this rank, if it alone has failed.
            together = kind is None or (isinstance(kind, type) and issubclass(kind, Failure))
            with suppress(Exception):
                self._pending.result(timeout=self._run.config.run.timeout_seconds / 2 if together else 5.0)


def _write(snapshot: Snapshot, world: World, outcome: "Future[None]") -> None:
    try:
        if world.device.type == "cuda":  # a thread begins with the first
            torch.cuda.set_device(world.device)
        write(snapshot, world)
        outcome.set_result(None)
    except BaseException as error:
        outcome.set_exception(error)
