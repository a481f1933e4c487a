"""What a run may be resumed from: whole checkpoints, of the same training, on the same data."""

import json
from collections.abc import Sequence
from pathlib import Path

from dist_amp.checkpoint.format import MANIFEST, all_checkpoints, fault_of
from dist_amp.errors import DataError
from dist_amp.runtime.process import attempt
from dist_amp.world import World


def to_resume(resume: str, run_folder: Path, world: World) -> Path | None:
    """The newest whole checkpoint of those that `run.resume` asks for; None where a run starts afresh.

    Every rank calls it, and reads its share of the files. Errors: DataError where a path was given that is not a
    checkpoint, and where there are checkpoints but none is whole.
    """
    mend = "restore one from a copy, or start afresh in another --run.dir"
    return newest_whole(_agreed_candidates(resume, run_folder, world), world, "resuming from", mend)


def newest_whole(paths: Sequence[Path], world: World, use: str, mend: str) -> Path | None:
    """The last of these checkpoints that is whole, with a warning for each that is not; None if there are none.

    Every rank calls it, and reads its share of the files. use, mend: what the messages say is done with a checkpoint,
    and where none is whole. Errors: DataError then.
    """
    refused: list[str] = []
    for path in reversed(paths):
        why = _fault(path, world)
        if not why:
            for text in refused:
                world.warn(f"checkpoint {text}; {use} {path.name} instead")
            return path
        refused.append(f"{path}: {why}")
    if refused:
        none = "none of the checkpoints is" if len(refused) > 1 else "the checkpoint is not"
        raise DataError(f"{none} whole: {'; '.join(refused)}; {mend}")
    return None


def _agreed_candidates(resume: str, run_folder: Path, world: World) -> list[Path]:
    """Those that rank 0 sees: a network disk may show others to another rank for a while."""
    told = ""
    if world.is_main:
        try:
            told = json.dumps([str(path) for path in _candidates(resume, run_folder)])
        except DataError as error:
            told = str(error)
    told = world.from_main(told)
    if not told.startswith("["):
        raise DataError(told)
    return [Path(path) for path in json.loads(told)]


def _candidates(resume: str, run_folder: Path) -> list[Path]:
    """The checkpoints to try, the best one last."""
    own, path = all_checkpoints(run_folder), Path(resume)
    if resume == "never" and not attempt():  # what torchrun starts again goes on
        return []
    if resume in ("auto", "never") or (own and path.resolve() not in [checkpoint.resolve() for checkpoint in own]):
        return own  # what this run has done since it began from `path` counts for more
    if own and path.resolve() != own[-1].resolve():
        raise DataError(f"run.resume={resume} is older than {own[-1].name} beside it; go on from it in a new --run.dir")
    give = "give RUN/checkpoints/step_N, a run's folder, auto or never"
    if not path.exists():
        raise DataError(f"run.resume={resume} does not exist; {give}")
    if inside := all_checkpoints(path):  # a run's folder stands for its newest checkpoint
        return inside
    if not (path / MANIFEST).exists() and not (path / ".metadata").exists():
        raise DataError(f"run.resume={resume} is not a checkpoint; {give}")
    return [path]


def _fault(path: Path, world: World) -> str:
    """Why a checkpoint is not whole; "" if it is. The same on every rank."""
    mine = fault_of(path, world.rank, world.world_size)
    world.wait_long()  # files that one rank reads may be many
    return next(filter(None, world.gather_texts(mine)), "")
