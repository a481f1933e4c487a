"""Writes one checkpoint from all ranks together: complete or not at all, with the same outcome on every rank."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from dist_amp.checkpoint.format import CONFIG, Manifest, hash_files, publish, reason, remove_old_checkpoints
from dist_amp.checkpoint.plans import SavePlanner, Writer
from dist_amp.checkpoint.reader import silence_single_process_warning
from dist_amp.errors import Failure
from dist_amp.runtime.files import appears, sync_folder, write_synced
from dist_amp.world import World


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step: what to write, and where."""

    folder: Path  # RUN/checkpoints/step_N
    state: dict[str, Any]
    manifest: Manifest
    config: str
    keep: int
    on_host: bool  # copied to host memory, so that training may continue while it is written


def write(snapshot: Snapshot, world: World, planner: SavePlanner) -> None:
    """Write and publish a checkpoint; every rank calls it, from any thread, and all ranks raise if one fails.

    planner: that of the saves before, whose plan is used again if it fits.

    Errors: Failure with the rank and the reason. Earlier checkpoints are left as they are.
    """
    final, run_folder = snapshot.folder, snapshot.folder.parent.parent
    temporary = final.with_name(f".{final.name}.writing")

    def make_folder() -> None:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while it wrote
            temporary.mkdir(parents=True)
            sync_folder(run_folder)
            write_synced(temporary / CONFIG, snapshot.config)

    def find_folder_and_plan() -> bool:
        if not appears(temporary):
            raise Failure("run.dir is not on a disk that all ranks share; put it on one")
        return planner.has_plan_for(snapshot.state)

    def write_shards() -> None:
        silence_single_process_warning()
        write_tensors(
            snapshot.state,
            storage_writer=Writer(temporary, planner, per_thread_copy_ahead=0 if snapshot.on_host else 10_000_000),
            planner=planner,
            process_group=world.background,
            no_dist=world.world_size == 1,
        )

    def hash_own_files() -> dict[str, dict[str, Any]]:
        shared = [CONFIG, ".metadata"] if world.is_main else []
        return hash_files([*temporary.glob(f"__{world.rank}_*"), *(temporary / name for name in shared)])

    def finish() -> None:
        if world.is_main:
            publish(temporary, final, replace(snapshot.manifest, files=files))
            for problem in remove_old_checkpoints(run_folder, snapshot.keep):
                world.warn(problem)

    try:
        # A stage may fail on one rank only: all ranks agree on its outcome before the next collective stage.
        _on_all_ranks(world, make_folder)
        planner.reuse = all(_on_all_ranks(world, find_folder_and_plan))
        _on_all_ranks(world, write_shards)
        files = {name: entry for part in _on_all_ranks(world, hash_own_files) for name, entry in part.items()}
        _on_all_ranks(world, finish)
    except Failure as error:
        if world.is_main and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)  # the partial files may be what fills the disk
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(run_folder).free:,} bytes are free)"
        raise Failure(f"checkpoint {final} could not be written: {error}{free}; the previous one is kept") from error


def _on_all_ranks(world: World, work: Callable[[], Any]) -> list[Any]:
    """Call `work` on every rank; return all results in rank order. Errors: Failure on all ranks if one fails."""
    try:
        own = work(), ""
    except CheckpointException as error:  # not an Exception; raised on all ranks for what failed on one
        own = None, f"rank {next(iter(error.failures), world.rank)}: {reason(error)}"
    except Exception as error:
        own = None, f"rank {world.rank}: {reason(error)}"
    outcomes = [own] * world.world_size
    if world.background is not None:
        dist.all_gather_object(outcomes, own, group=world.background)
    if failed := [error for _, error in outcomes if error]:
        raise Failure(failed[0])
    return [result for result, _ in outcomes]
