"""Resumes a run from the newest valid checkpoint among those that `run.resume` allows.

With auto, these are the checkpoints in the run's folder; with a path, those at the path, until the
run has saved one itself; with never, none. The ranks share the work of verifying the newest one's
hashes. If it is damaged, a warning says so, and the previous one is tried. Then its settings must
fit the run's (compatibility.py), and its state is restored (state.py).
"""

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_amp.checkpoint.compatibility import check_config
from dist_amp.checkpoint.format import (
    CONFIG,
    MANIFEST,
    all_checkpoints,
    fetched_manifest,
    integrity_error,
)
from dist_amp.checkpoint.state import load
from dist_amp.config.task_class import find_task
from dist_amp.distributed.process import attempt
from dist_amp.errors import CheckpointRejected, DataError
from dist_amp.files import present
from dist_amp.settings import Config
from dist_amp.step import Run
from dist_amp.task import Task
from dist_amp.world import World


def resume(run: Run) -> Path | None:
    """Restore the checkpoint to resume, if any, and return its path; every rank calls it."""
    checkpoint = checkpoint_to_resume(run.config, run.folder, run.world, run.task)
    if checkpoint is not None:
        load(run, checkpoint)
    return checkpoint


def checkpoint_to_resume(
    config: Config, run_folder: Path, world: World, task: Task | None = None
) -> Path | None:
    """The newest valid checkpoint that `run.resume` allows, or None; every rank calls it.
    task: an object, used instead of task.target. Raises DataError if run.resume is a path without
    a checkpoint, or no candidate is valid; ConfigError if the settings don't fit.
    """
    paths: list[Path] = []
    problem: DataError | None = None
    # Only rank 0 looks, because on a network disk the ranks may see different files for a while.
    if world.is_main:
        try:
            paths = _candidates(config.run.resume, run_folder)
        except DataError as error:
            problem = error
    world.raise_first(problem)
    checkpoint = newest_valid(world.from_main(paths), world)
    if checkpoint is not None:
        check_config(checkpoint, config, task or find_task(config.task.target), world)
    return checkpoint


def with_dtype(config: Config, run_folder: Path, world: World) -> Config:
    """The config with precision.dtype=auto resolved; every rank calls it. A resumed run keeps its
    checkpoint's dtype; a new run takes bf16, or float32 on a CPU that only emulates bf16.
    """
    precision = config.precision
    if precision.dtype != "auto":
        return config
    name = precision.name
    if world.is_main and precision.use_amp:
        name = _saved_dtype(config.run.resume, run_folder) or _native_dtype(world)
    name = world.from_main(name)
    dtype: Any = "bf16" if name == "fp32" else name
    return replace(config, precision=replace(precision, use_amp=name != "fp32", dtype=dtype))


def _saved_dtype(resume: str, run_folder: Path) -> str:
    """The dtype of the newest undamaged checkpoint to resume; "" if there is none."""
    with suppress(DataError):
        for checkpoint in reversed(_candidates(resume, run_folder)):
            with suppress(CheckpointRejected, LookupError, OSError, ValueError):
                fetched_manifest(checkpoint)
                saved = tomllib.loads((checkpoint / CONFIG).read_text())["precision"]
                return saved["dtype"] if saved["use_amp"] else "fp32"
    return ""


def _native_dtype(world: World) -> str:
    """bf16; or fp32 on a CPU that only emulates bf16, or whose instructions are not known."""
    if world.device.type != "cpu":
        return "bf16"
    if present("distributed.machine"):
        from dist_amp.distributed.machine import is_native

        if is_native("bf16", world.device):
            return "bf16"
        world.say(
            "precision.dtype=auto: float32, because this CPU only emulates bf16; --use_amp true "
            "computes in bf16 all the same"
        )
    return "fp32"


def newest_valid(paths: Sequence[Path], world: World) -> Path | None:
    """The last valid one of `paths`; None if there are no paths. Every rank verifies its share.
    Warns of the damaged ones after it. Raises DataError if all are damaged.
    """
    rejected: list[str] = []
    for path in reversed(paths):
        error = integrity_error(path, world.rank, world.world_size)
        world.wait_long()  # one rank's files may take longer than a collective's timeout
        error = next(filter(None, world.gather(error)), "")  # the first rank's that has one
        if not error:
            for text in rejected:
                world.warn(f"checkpoint {text}; using {path.name} instead")
            return path
        rejected.append(f"{path}: {error}")
    if rejected:
        raise DataError(
            f"none of the checkpoints is valid: {'; '.join(rejected)}; restore one from a backup, "
            "or start a new run in another --run.dir"
        )
    return None


def checkpoints_at(path: Path, name: str, accepted: str) -> list[Path]:
    """[path] if it is a checkpoint, or those of the run there, oldest first. Raises DataError."""
    if not path.exists():
        raise DataError(f"{name} does not exist; give {accepted}")
    checkpoints = all_checkpoints(path)
    if checkpoints:
        return checkpoints
    if not any((path / file).exists() for file in (MANIFEST, ".metadata")):
        raise DataError(f"{name} is not a checkpoint and holds none; give {accepted}")
    return [path]


def _candidates(resume: str, run_folder: Path) -> list[Path]:
    """The checkpoints to try, the last one first."""
    if resume == "never" and not attempt():  # a restart by torchrun resumes nevertheless
        return []
    saved = all_checkpoints(run_folder)
    if resume in ("auto", "never"):
        return saved
    path = Path(resume)
    if saved:
        if path.resolve() not in [checkpoint.resolve() for checkpoint in saved]:
            return saved  # the run has made progress since it started from `path`
        if path.resolve() != saved[-1].resolve():
            raise DataError(
                f"run.resume={resume} is older than {saved[-1].name} next to it; resume it in a "
                "new --run.dir"
            )
    accepted = "RUN/checkpoints/step_N, a run's folder, auto or never"
    return checkpoints_at(path, f"run.resume={resume}", accepted)
