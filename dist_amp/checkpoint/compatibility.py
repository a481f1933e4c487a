"""Whether a checkpoint fits this run: its config, data, parameters and optimizer."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_amp.checkpoint.format import CONFIG, Manifest, read_manifest, text_hash
from dist_amp.errors import ConfigError, DataError
from dist_amp.world import World

# A run may go on with other values of these: they change where and how fast it computes, not what.
FREE_TO_CHANGE = (
    "run.", "eval.", "checkpoint.", "metrics.", "debug.", "data.workers", "data.name", "data.path", "data.split",
    "data.validation_split", "data.validation_fraction", "data.text_column", "parallel.strategy", "parallel.replicas",
    "parallel.accumulate_reduce", "parallel.activation_checkpointing", "parallel.cpu_offload", "compile.",
    "train.steps", "train.micro_batch_size", "train.accumulation_steps", "train.global_batch_size",
    "train.max_skips_in_a_row", "train.gc_every", "optim.fused",
)  # fmt: skip


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
