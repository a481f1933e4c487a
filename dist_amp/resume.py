"""What a run may be resumed from: whole checkpoints, of the same training, on the same data."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_amp.checkpoint_files import CONFIG, MANIFEST, Manifest, all_checkpoints, fault_of, read_manifest, text_hash
from dist_amp.config import ConfigError
from dist_amp.runtime import DataError, World, attempt

# A run may go on with other values of these: they change where and how fast it computes, not what.
FREE_TO_CHANGE = (
    "run.", "eval.", "checkpoint.", "metrics.", "debug.", "data.workers", "data.name", "data.path", "data.split",
    "data.validation_split", "data.validation_fraction", "data.text_column", "parallel.strategy", "parallel.replicas",
    "parallel.accumulate_reduce", "parallel.activation_checkpointing", "parallel.cpu_offload", "compile.",
    "train.steps", "train.micro_batch_size", "train.accumulation_steps", "train.global_batch_size",
    "train.max_skips_in_a_row", "train.gc_every", "optim.fused",
)  # fmt: skip


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


def check_config(path: Path, config_text: str, global_batch_size: int, world: World, defaults: str = "") -> None:
    """Refuse to resume from `path` with another training than the one that it is of.

    config_text: the run's config as TOML; defaults: the same with nothing set, for settings that `path` is too old to
    know. Errors: ConfigError with each key and both values; DataError for another seed or global batch.
    """
    manifest = read_manifest(path)
    ours, theirs = flat(config_text), flat((path / CONFIG).read_text())
    another_task = theirs.get("task.target") != ours["task.target"]  # whose arguments have no defaults here
    known = {key: value for key, value in flat(defaults).items() if not (another_task and key.startswith("task."))}
    theirs = known | theirs
    allowed = "or go on all the same with --run.allow_config_change true"
    keys = [key for key in sorted({**_mathematics(theirs), **_mathematics(ours)}) if theirs.get(key) != ours.get(key)]
    changes = [f"{key}={theirs.get(key, 'unset')}, now {ours.get(key, 'unset')}" for key in keys]
    seed, old_batch = ours["run.seed"], manifest.global_batch_size
    if ours["run.allow_config_change"]:
        others = [f"run.seed={manifest.seed}, now {seed}"] * (seed != manifest.seed)
        others += [f"global batch {old_batch}, now {global_batch_size}"] * (global_batch_size != old_batch)
        if changes or others:
            world.warn(f"going on from {path} with another config: {'; '.join(changes + others)}")
        return
    if changes:
        raise ConfigError(f"{path} was made with {'; '.join(changes)}: take the old, {allowed}")
    if seed != manifest.seed:
        raise DataError(f"{path} was made with run.seed={manifest.seed}, not {seed}: take the old, {allowed}")
    if global_batch_size != old_batch:
        raise DataError(
            f"{path} was made with {old_batch} samples in a step, not {global_batch_size}: use "
            f"train.global_batch_size={old_batch}, {allowed}"
        )
    steps = ours["train.steps"]
    if steps != theirs["train.steps"] and steps > manifest.step and ours["optim.schedule"] != "constant":
        world.warn(
            f"train.steps was {theirs['train.steps']} and is {steps}: from step {manifest.step} on, the learning rate "
            f"follows the {ours['optim.schedule']} schedule of {steps} steps"
        )


def flat(toml: str) -> dict[str, Any]:
    """The settings of a config as TOML by their dotted keys."""

    def walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            yield from walk(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    return dict(walk(tomllib.loads(toml), ""))


def config_hash(config_text: str) -> str:
    """Of all settings that change the mathematics."""
    return text_hash(json.dumps(_mathematics(flat(config_text))))


def _mathematics(flat: Mapping[str, Any]) -> dict[str, Any]:
    scales = flat["precision.use_amp"] and flat["precision.dtype"] == "fp16"
    free = FREE_TO_CHANGE if scales else (*FREE_TO_CHANGE, "precision.scaler.")
    return {key: flat[key] for key in sorted(flat) if not key.startswith(free)}


def check_data(path: Path, manifest: Manifest, length: int, fingerprint: str, allowed: bool, world: World) -> None:
    """Errors: DataError where the data are not those that the checkpoint's position counts in."""
    if (manifest.data_length, manifest.data_fingerprint) == (length, fingerprint):
        return
    text = (
        f"{path} was made with {manifest.data_length:,} samples of fingerprint {manifest.data_fingerprint}, now there "
        f"are {length:,} of {fingerprint}"
    )
    if not allowed:
        raise DataError(f"{text}: take the old data, or go on all the same with --run.allow_config_change true")
    world.warn(f"{text}; going on after as many samples of the new data")


def check_fit(
    path: Path, manifest: Manifest, metadata: Metadata, state: Mapping[str, Any], groups: Mapping[str, int]
) -> None:
    """Errors: DataError for the first parameter or moment that is not in both, with one shape and dtype."""
    check_tensors(path, metadata, "model", state["model"])
    if manifest.optimizer != groups:
        raise DataError(
            f"checkpoint {path} does not fit this optimizer: its groups and their parameters are "
            f"{manifest.optimizer}, here {groups}"
        )
    check_tensors(path, metadata, "optimizer", state["optimizer"])


def check_tensors(path: Path, metadata: Metadata, section: str, state: Mapping[str, Any]) -> None:
    """Errors: DataError for the first tensor of a section, "model" or "optimizer", that the two do not have alike."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from leaves(part, f"{name}.{key}")
        elif isinstance(value, Tensor):
            yield name, f"{list(value.shape)} {value.dtype}"

    ours = dict(leaves(state, section))
    theirs = {
        name: f"{list(entry.size)} {entry.properties.dtype}"
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(f"{section}.") and isinstance(entry, TensorStorageMetadata)
    }
    odd = [name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)]
    if odd:
        there, here = theirs.get(odd[0], "missing"), ours.get(odd[0], "missing")
        raise DataError(
            f"checkpoint {path} does not fit this {section}: {odd[0]} is {there} there and {here} here "
            f"({len(set(odd))} such)"
        )
