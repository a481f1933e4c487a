"""The files of a checkpoint: how they are published, verified and read.

    manifest.json        step, position in the data, ...; size and hash of each file; its own hash
    config.toml          the run's settings
    .metadata, *.distcp  the tensors, in the format of torch.distributed.checkpoint (DCP)

A checkpoint is complete or absent: its folder is written under a temporary name, the manifest last,
and one rename publishes it. DCP does not detect a flipped bit, so all hashes are verified before a
run resumes. A run that has to resume from an older checkpoint renames the later ones to
refused_step_N. Nothing in a checkpoint is executed (allow_list.py).
"""

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors

from dist_amp.checkpoint.allow_list import Planner, read_metadata
from dist_amp.distributed.process_group import without_timeout
from dist_amp.errors import CheckpointRejected, DataError
from dist_amp.files import entry_of, run_dir, sync_folder, write_synced
from dist_amp.world import World

FORMAT = 1  # version of the folder's layout; newer versions are rejected

MANIFEST = "manifest.json"
CONFIG = "config.toml"

State = dict[str, Any]
Entry = dict[str, Any]  # describes a file: {"bytes": size, "xxh3": hash}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without its tensors; stored as JSON (`hashed_text`)."""

    step: int
    samples: int  # consumed so far, which is the position in the data
    world_size: int
    strategy: str
    precision: str
    device: str
    seed: int
    global_batch_size: int
    data_length: int
    data_fingerprint: str = ""
    optimizer: dict[str, int]  # number of parameters per group
    evaluation: dict[str, float]  # metrics of the latest evaluation
    evaluated_step: int
    best: dict[str, float]  # the lowest validation loss so far, with its "step"
    versions: dict[str, str]
    order: str = "randperm"  # of the samples, see loading/plan.py
    lr_factor: float = 1.0  # multiplies the learning rate: Schedule.factor
    files: dict[str, Entry] = field(default_factory=dict)
    format: int = FORMAT

    def to_text(self) -> str:
        return hashed_text(asdict(self))


MANIFEST_TYPE = TypeAdapter(Manifest)


def hashed_text(content: State) -> str:
    """The content as JSON, with the content's hash as a last key."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    return json.dumps({**content, "xxh3": digest}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointRejected if it is damaged, newer, or lists files outside the folder."""
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        content = json.loads(text)
        del content["xxh3"]
        # Compare the whole text: the hash alone would miss a flipped bit in JSON's whitespace.
        is_intact = hashed_text(content) == text
        if is_intact and content["format"] > FORMAT:
            raise CheckpointRejected(
                f"its format is {content['format']}, this version reads up to {FORMAT}; use a "
                "newer dist_amp"
            )
        manifest = MANIFEST_TYPE.validate_json(text, strict=True)
    except OSError as error:
        raise CheckpointRejected(f"{MANIFEST} can't be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise CheckpointRejected(f"{MANIFEST} is damaged")
    for name in manifest.files:
        if name in ("", ".", "..") or Path(name).name != name:
            raise CheckpointRejected(
                f"{MANIFEST} lists {name!r}, which is not the name of a file in this folder"
            )
    return manifest


def integrity_error(folder: Path, part: int = 0, parts: int = 1) -> str:
    """Why the checkpoint is invalid, or "". Ranks share the work: this call does `part` of `parts`.

    Rank 3 verifies what rank 3 wrote, such as __3_0.distcp, which its node may have in memory.
    """
    try:
        files = fetched_manifest(folder).files
    except CheckpointRejected as error:
        return str(error)
    for name in files:
        path = folder / name
        writer = re.match(r"__(\d+)_", name)
        if (int(writer[1]) if writer else 0) % parts != part:
            continue
        try:
            if entry_of(path) != files[name]:
                return f"{name} is damaged: its size or hash differs from the manifest's"
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
    return ""


def fetched_manifest(folder: Path) -> Manifest:
    """The checkpoint's manifest; downloads its other files first if they are on object storage.

    Raises CheckpointRejected.
    """
    manifest = read_manifest(folder)
    if "://" in run_dir(folder.parent.parent):
        from dist_amp.storage.mirror import fetch

        fetch(folder, manifest.files)
    return manifest


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:08d}"


def all_checkpoints(run_folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first; unverified, see `integrity_error`."""
    paths = sorted(run_folder.glob("checkpoints/step_*"))
    return [path for path in paths if path.name.removeprefix("step_").isdigit()]


def step_of(path: Path) -> int:
    """The step number in a checkpoint's or an earlier config's file name."""
    return int(path.stem.rpartition("_")[2])


def config_at(run_folder: Path, step: int) -> Path:
    """The config file in force at a step: config.toml, or the one of the run's earlier start."""
    earlier = sorted(run_folder.glob("config_until_step_*.toml"))
    return next((path for path in earlier if step_of(path) >= step), run_folder / CONFIG)


def hash_files(paths: Iterable[Path]) -> dict[str, Entry]:
    return {path.name: entry_of(path) for path in paths}


def publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest, then rename the folder: a power cut leaves all of it or nothing."""
    write_synced(temporary / MANIFEST, manifest.to_text())
    sync_folder(temporary)
    os.rename(temporary, final)
    sync_folder(final.parent)


def remove_old_checkpoints(run_folder: Path, keep: int, best_metric: str) -> list[str]:
    """Keep the newest `keep` and the one with the best evaluation; returns errors, as texts."""
    paths = all_checkpoints(run_folder)
    scores = {path: _score(path, best_metric) for path in paths}
    best = min(paths, key=scores.__getitem__)
    failures = []
    for path in paths[:-keep]:
        if path == best and scores[path] < math.inf:
            continue
        try:
            # The manifest first: without it, a half-removed folder does not count as a checkpoint.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
        except OSError as error:
            failures.append(f"{path} can't be removed ({error.strerror})")
    return failures


def _score(checkpoint: Path, best_metric: str) -> float:
    """The best_metric at the checkpoint's step, so that lower is better; inf without evaluation."""
    with suppress(CheckpointRejected):
        manifest = read_manifest(checkpoint)
        value = manifest.evaluation.get(metric_name(best_metric), math.inf)
        if manifest.evaluated_step == manifest.step and not math.isnan(value):
            return -value if best_metric.startswith("max:") else value
    return math.inf


def metric_name(best_metric: str) -> str:
    """The metric that the task's best_metric names: accuracy for "max:accuracy"."""
    return best_metric.removeprefix("min:").removeprefix("max:")


def quarantine_after(run_folder: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps, and remove half-written ones; returns the new paths."""
    for leftover in run_folder.glob("checkpoints/.step_*.writing"):
        shutil.rmtree(leftover, ignore_errors=True)
    renamed = []
    for path in all_checkpoints(run_folder):
        if path > checkpoint_folder(run_folder, step):
            target = path.with_name(f"refused_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            renamed.append(path.rename(target))
    return renamed


def reason(error: BaseException) -> str:
    """The error's cause in one line; torch wraps a rank's error in a CheckpointException."""
    if isinstance(error, CheckpointException) and error.failures:
        return reason(next(inner for inner, _ in error.failures.values()))
    if "unexpected pos" in str(error):  # torch's zip writer, if a write was cut short
        return "no space is left on the disk"
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return getattr(error, "strerror", None) or text


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's folder, with an allow-list for the metadata."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.manifest = fetched_manifest(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self.folder, self.manifest.files)


def read_into(state: State, reader: Reader, world: World | None = None) -> None:
    """Fill the tensors of `state` in place; every rank calls it. Raises CheckpointException."""
    world = world or World()
    # torch warns if there is no process group. All threads share filters, so this one stays.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    with without_timeout(world.control):  # one rank's disk may be slow
        read_tensors(
            state,
            storage_reader=reader,
            planner=Planner(),
            process_group=world.control,
            no_dist=world.world_size == 1,
        )


@contextmanager
def rejection_as_data_error(path: Path) -> Iterator[None]:
    """In a with-block, turn errors of reading a checkpoint into a DataError with its path."""
    try:
        yield
    except CheckpointRejected as error:
        raise DataError(f"checkpoint {path} is rejected: {error}") from None
    except CheckpointException as error:
        raise DataError(f"checkpoint {path} can't be loaded: {reason(error)}") from error
