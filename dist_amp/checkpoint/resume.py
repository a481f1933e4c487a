"""Finds the checkpoint to resume from: the newest valid one of those that `run.resume` allows."""

import json
from collections.abc import Sequence
from pathlib import Path

from dist_amp.checkpoint.format import MANIFEST, all_checkpoints, integrity_error
from dist_amp.errors import DataError
from dist_amp.runtime.process import attempt
from dist_amp.world import World


def checkpoint_to_resume(resume: str, run_folder: Path, world: World) -> Path | None:
    """The newest valid checkpoint that `run.resume` allows, or None to start at step 0.

    Every rank calls it and verifies its share of the files. Errors: DataError if a given path is not a checkpoint, and
    if there are checkpoints but none is valid.
    """
    candidates = _agreed_candidates(resume, run_folder, world)
    return newest_valid(candidates, world, "restore one from a backup, or start a new run in another --run.dir")


def newest_valid(paths: Sequence[Path], world: World, fix: str = "restore one from a backup") -> Path | None:
    """The last of these checkpoints that is valid, with a warning for each that is not; None if there are none.

    Every rank calls it and verifies its share of the files. Errors: DataError if none is valid, ending with `fix`.
    """
    rejected: list[str] = []
    for path in reversed(paths):
        error = _agreed_integrity_error(path, world)
        if not error:
            for text in rejected:
                world.warn(f"checkpoint {text}; using {path.name} instead")
            return path
        rejected.append(f"{path}: {error}")
    if rejected:
        none = "none of the checkpoints is" if len(rejected) > 1 else "the checkpoint is not"
        raise DataError(f"{none} valid: {'; '.join(rejected)}; {fix}")
    return None


def checkpoints_at(path: Path, name: str, accepted: str) -> list[Path]:
    """The checkpoint at `path`, or those of the run there, oldest first.

    Errors: DataError if there is none, with the path's `name` and what is `accepted`.
    """
    if not path.exists():
        raise DataError(f"{name} does not exist; give {accepted}")
    found = all_checkpoints(path)
    if not found and not any((path / file).exists() for file in (MANIFEST, ".metadata")):
        raise DataError(f"{name} is not a checkpoint and holds none; give {accepted}")
    return found or [path]


def _agreed_candidates(resume: str, run_folder: Path, world: World) -> list[Path]:
    """What rank 0 sees, because a network disk may show another rank other files for a while."""
    found: list[str] | str = []
    if world.is_main:
        try:
            found = [str(path) for path in _candidates(resume, run_folder)]
        except DataError as error:
            found = str(error)
    found = json.loads(world.from_main(json.dumps(found)))
    if isinstance(found, str):
        raise DataError(found)
    return [Path(path) for path in found]


def _candidates(resume: str, run_folder: Path) -> list[Path]:
    """The checkpoints to try, in ascending order of preference."""
    own, path = all_checkpoints(run_folder), Path(resume)
    if resume == "never" and not attempt():  # a restart by torchrun resumes all the same
        return []
    if resume in ("auto", "never") or (own and path.resolve() not in [checkpoint.resolve() for checkpoint in own]):
        return own  # this run's own progress since it started from `path` takes precedence
    if own and path.resolve() != own[-1].resolve():
        raise DataError(f"run.resume={resume} is older than {own[-1].name} next to it; resume it in a new --run.dir")
    return checkpoints_at(path, f"run.resume={resume}", "RUN/checkpoints/step_N, a run's folder, auto or never")


def _agreed_integrity_error(path: Path, world: World) -> str:
    """Why a checkpoint is not valid, or ""; the same on every rank, each of which verifies a share of the files."""
    own = integrity_error(path, world.rank, world.world_size)
    world.wait_long()  # one rank's share of the files may take longer than a collective's timeout
    return next(filter(None, world.gather_texts(own)), "")
