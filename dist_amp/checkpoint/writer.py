"""One checkpoint, written by all ranks together: whole, or not at all, and then all of them know why."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from dist_amp.checkpoint.format import CONFIG, Manifest, hash_files, make_valid, reason, remove_all_but
from dist_amp.checkpoint.reader import be_quiet_when_alone
from dist_amp.errors import Failure
from dist_amp.runtime.files import appears, sync_folder, write_synced
from dist_amp.world import World


@dataclass(frozen=True)
class Snapshot:
    """A run as it stood after a step: what is to be written, and where."""

    run_folder: Path
    state: dict[str, Any]
    manifest: Manifest
    config: str
    keep: int
    on_host: bool  # copied, so that training may go on

    @property
    def folder(self) -> Path:
        return self.run_folder / "checkpoints" / f"step_{self.manifest.step:08d}"


def write(snapshot: Snapshot, world: World) -> None:
    """Write and make valid; every rank calls it, in a thread of its own or not, and raises alike if any rank fails.

    Errors: Failure naming the rank and the reason. What was there before stands.
    """
    final = snapshot.folder
    fresh = final.with_name(f".{final.name}.writing")

    def make_folder() -> None:
        if world.is_main:
            shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed while it wrote
            fresh.mkdir(parents=True)
            sync_folder(snapshot.run_folder)
            write_synced(fresh / CONFIG, snapshot.config)

    def find_folder() -> None:
        if not appears(fresh):
            raise Failure("run.dir is not on a disk that all ranks share; put it on one")

    def write_shards() -> None:
        be_quiet_when_alone()
        write_tensors(
            snapshot.state,
            storage_writer=FileSystemWriter(fresh, per_thread_copy_ahead=0 if snapshot.on_host else 10_000_000),
            process_group=world.background,
            no_dist=world.world_size == 1,
        )

    def hash_own() -> dict[str, dict[str, Any]]:
        mine = [CONFIG, ".metadata"] if world.is_main else []
        return hash_files([*fresh.glob(f"__{world.rank}_*"), *(fresh / name for name in mine)])

    def finish() -> None:
        if world.is_main:
            make_valid(fresh, final, replace(snapshot.manifest, files=files))
            for trouble in remove_all_but(snapshot.run_folder, snapshot.keep):
                world.warn(trouble)

    try:
        # What can fail on one rank alone is agreed on before the next thing that all must take part in.
        for step in (make_folder, find_folder, write_shards):
            _together(world, step)
        files = {name: entry for part in _together(world, hash_own) for name, entry in part.items()}
        _together(world, finish)
    except Failure as error:
        if world.is_main and fresh.exists():
            shutil.rmtree(fresh, ignore_errors=True)  # what there is of it may be what fills the disk
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(snapshot.run_folder).free:,} bytes are free)"
        raise Failure(f"checkpoint {final} could not be written: {error}{free}; the one before it stands") from error


def _together(world: World, work: Callable[[], Any]) -> list[Any]:
    """Do `work` on every rank; return all results in the order of the ranks. Errors: Failure on all if one fails."""
    try:
        mine = work(), ""
    except CheckpointException as error:  # no Exception, and raised on all ranks for what befell one
        mine = None, f"rank {next(iter(error.failures), world.rank)}: {reason(error)}"
    except Exception as error:
        mine = None, f"rank {world.rank}: {reason(error)}"
    everyone = [mine] * world.world_size
    if world.background is not None:
        dist.all_gather_object(everyone, mine, group=world.background)
    if failed := [why for _, why in everyone if why]:
        raise Failure(failed[0])
    return [result for result, _ in everyone]
