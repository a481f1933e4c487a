"""Saves checkpoints: all ranks write one together, complete or not at all, with one outcome.

A save has three parts. `take_snapshot` collects the state of all ranks while training waits. With
checkpoint.async_save it is then copied to host memory (background.py), and training continues. A
thread of each rank writes it, by `write`, in stages: a folder with a temporary name, this rank's
shards and their hashes, the manifest, the rename, the removal of old checkpoints. After each stage
all ranks exchange how it went, over a process group of their own, so that one that fails ends the
save on all.

The outcome is known at a log step, or when the next save begins. A save that fails costs a
checkpoint and not the run, unless it is the last one. If no rank ends a stage, or comes to its next
tensor, for run.timeout_seconds, the save is stuck: nothing can end its threads, so the run ends.
"""

import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from dist_amp.checkpoint.format import (
    CONFIG,
    MANIFEST,
    Entry,
    checkpoint_folder,
    hash_files,
    metric_name,
    publish,
    quarantine_after,
    reason,
    remove_old_checkpoints,
)
from dist_amp.checkpoint.state import Snapshot, take_snapshot
from dist_amp.checkpoint.task_state import Unsaved
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import appears, run_dir, sync_folder, write_synced
from dist_amp.step import Run
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import LogRow
from dist_amp.world import World

Enter = Callable[[str], object]  # is told the stage that this rank works on, or "" if it waits


class Saver(Observer):
    """Saves checkpoints of a run, one at a time, with checkpoint.async_save in the background.

    pending: one that is being written.
    """

    def __init__(self, run: Run):
        self.pending: Any = None
        self._run = run
        # One planner for all saves plans only what has changed: planning takes rank 0 86 to 101 us
        # per shard of any rank (measured for 64 to 1,024 ranks).
        self._planner = Planner(enable_plan_caching=True)
        self._planner._cached_plans_key = uuid4().hex  # torch's is shared by all runs of a process
        self._staging: Any = None
        self._unsaved = Unsaved(run)
        self._written: Path | None = None  # the folder of the latest that was written

    def save(self, wait: bool) -> None:
        """Save the state; every rank calls it. wait: until it is written. Errors: Failure."""
        from dist_amp.checkpoint.background import Save, Staging

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
                work = partial(write, world=run.world, planner=self._planner)
                self.pending = Save(run, take_snapshot(run), work, staging)
                if staging is None:
                    self.finish(must_succeed=wait)
            if problem := best_metric_problem(run):
                self.finish(must_succeed=True)
                raise ConfigError(problem)

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


def best_metric_problem(run: Run) -> str:
    """Why the task's best_metric is not in the evaluation just made; "" if it is, or none was."""
    best = getattr(run.task, "best_metric", "loss")
    names = run.metrics.evaluation
    is_new = names and run.metrics.evaluated_step == run.step != run.resumed_from_step
    if not is_new or metric_name(best) in names:
        return ""
    return (
        f"the task's best_metric={best!r} is not in the evaluation after step {run.step}, whose "
        f"checkpoint is saved: name one of {', '.join(names)}"
    )


class Planner(DefaultSavePlanner):
    """torch's, which calls `progress` before each tensor that is written."""

    progress: Callable[[], object]

    def resolve_data(self, write_item: Any) -> Any:
        self.progress()
        return super().resolve_data(write_item)


def write(snapshot: Snapshot, world: World, planner: Planner, enter: Enter) -> None:
    """Write and publish a checkpoint; every rank calls it. Errors: Failure on all if one fails."""
    final = snapshot.folder
    run_folder = final.parent.parent
    temporary = final.with_name(f".{final.name}.writing")
    leads = world.is_main
    if "://" in run_dir(run_folder):  # each node has a folder of its own
        leads = world.local_rank == 0

    def make_folder() -> None:
        if world.is_main:
            for path in quarantine_after(run_folder, snapshot.manifest.step - 1):
                world.warn(f"{path} is damaged, or of another run: it keeps this name")
        elif leads:
            shutil.rmtree(final, ignore_errors=True)
        if leads:
            # What a run that was killed while it wrote has left.
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            sync_folder(run_folder)
            write_synced(temporary / CONFIG, snapshot.config)

    def find_folder() -> None:
        if not appears(temporary):
            raise Failure("run.dir is not on a disk that all ranks share; put it on one")

    def write_shards() -> dict[str, Entry]:
        # No process group is fine here. Set for good, because threads share warning filters.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        planner.progress = partial(enter, write_shards.__name__)
        write_tensors(
            snapshot.state,
            storage_writer=FileSystemWriter(temporary),
            planner=planner,
            process_group=world.background,
            no_dist=world.world_size == 1,
        )
        paths = list(temporary.glob(f"__{world.rank}_*"))
        if world.is_main:
            paths += [temporary / CONFIG, temporary / ".metadata"]
        return hash_files(paths)

    def finish() -> None:
        if leads:
            publish(temporary, final, replace(snapshot.manifest, files=files))
            for problem in remove_old_checkpoints(run_folder, snapshot.keep, snapshot.best_metric):
                world.warn(problem)

    try:
        on_all_ranks(world, enter, make_folder)
        on_all_ranks(world, enter, find_folder)
        files: dict[str, Entry] = {}
        for entries in on_all_ranks(world, enter, write_shards):
            files |= entries
        on_all_ranks(world, enter, finish)
    except Failure as error:
        if leads:
            # The partial files may be what fills the disk.
            shutil.rmtree(temporary, ignore_errors=True)
        raise Failure(
            f"checkpoint {final} could not be written: {error}; the previous one is kept"
        ) from error


def on_all_ranks(world: World, enter: Enter, stage: Callable[[], Any]) -> list[Any]:
    """All ranks' results of a stage, in rank order. Errors: Failure on all ranks if one fails."""
    result = None
    failure = ""
    enter(stage.__name__)
    try:
        result = stage()
    except CheckpointException as error:  # raised on all ranks for what failed on one
        failure = f"rank {next(iter(error.failures), world.rank)}: {reason(error)}"
    except Exception as error:
        failure = f"rank {world.rank}: {reason(error)}"
    enter("")
    outcomes = [(result, failure)] * world.world_size
    if world.background is not None:
        dist.all_gather_object(outcomes, (result, failure), group=world.background)
    for _, failure in outcomes:
        if failure:
            raise Failure(failure)
    return [result for result, _ in outcomes]
