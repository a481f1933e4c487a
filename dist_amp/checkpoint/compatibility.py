"""Checks that a checkpoint fits a run: its config, data, parameters and optimizer."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_amp.checkpoint.format import CONFIG, Manifest, hash_text, read_manifest
from dist_amp.errors import ConfigError, DataError
from dist_amp.runtime.permutation import Order
from dist_amp.runtime.plan import Plan
from dist_amp.world import World

# Settings that may differ after a resume: they change where and how fast a run computes, not what.
FREE_TO_CHANGE = (
    "run.", "eval.", "checkpoint.", "metrics.", "debug.", "data.workers", "data.name", "data.revision", "data.path",
    "data.format", "data.split", "data.validation_split", "data.validation_fraction",
    "data.tokenizer", "data.view", "data.map_up_to_gib", "data.streams", "data.shuffle_groups", "parallel.strategy",
    "parallel.replicas", "parallel.accumulate_reduce", "parallel.activation_checkpointing", "parallel.cpu_offload",
    "compile.", "train.steps", "train.micro_batch_size", "train.accumulation_steps", "train.global_batch_size",
    "train.max_skips_in_a_row", "train.gc_every", "optim.fused", "optim.ema",
)  # fmt: skip

OR_ALLOW = "or continue anyway with --run.allow_config_change true"


def check_config(
    path: Path, config_text: str, global_batch_size: int, world: World, defaults: str = "", own_schedule: bool = False
) -> None:
    """Check that the run computes the same training as the one that wrote the checkpoint.

    config_text: the run's config as TOML. defaults: the default config as TOML, for settings that the checkpoint is too
    old to have. own_schedule: whether the task's schedule takes the place of optim.schedule. Errors: ConfigError with
    each key and both values; DataError for another seed or global batch size.
    """
    manifest = read_manifest(path)
    ours, theirs = flat(config_text), flat((path / CONFIG).read_text())
    other_task = theirs.get("task.target") != ours["task.target"]  # the defaults of its arguments are not known
    unknown = ("data.sources.", "task.") if other_task else ("data.sources.",)  # a source that was not there has none
    known = {key: value for key, value in flat(defaults).items() if not key.startswith(unknown)}
    theirs = known | theirs
    changes = [
        f"{key}={theirs.get(key, 'unset')}, now {ours.get(key, 'unset')}"
        for key in sorted(_training_settings(theirs) | _training_settings(ours))
        if theirs.get(key) != ours.get(key)
    ]
    others = {"run.seed": (manifest.seed, ours["run.seed"])}
    others["train.global_batch_size"] = (manifest.global_batch_size, global_batch_size)
    differences = changes + [f"{key}={old}, now {new}" for key, (old, new) in others.items() if old != new]
    if differences and ours["run.allow_config_change"]:
        world.warn(f"resuming from {path} with another config: {'; '.join(differences)}")
    elif differences:
        error = ConfigError if changes else DataError
        options = " ".join(f"--{key} {old}" for key, (old, new) in others.items() if old != new)
        use = f"use {options}" if options and not changes else "use the old values"
        raise error(f"{path} was made with {'; '.join(differences)}: {use}, {OR_ALLOW}")
    steps = ours["train.steps"]
    if (
        steps != theirs["train.steps"]
        and steps > manifest.step
        and ours["optim.schedule"] != "constant"
        and not own_schedule
    ):
        world.warn(
            f"train.steps was {theirs['train.steps']} and is {steps}: from step {manifest.step} on, the learning rate "
            f"follows the {ours['optim.schedule']} schedule of {steps} steps"
        )


def flat(toml: str) -> dict[str, Any]:
    """{dotted key: value} of a config in TOML."""

    def walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            yield from walk(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    return dict(walk(tomllib.loads(toml), ""))


def config_hash(config_text: str) -> str:
    """Hash of all settings that change what is computed."""
    return hash_text(json.dumps(_training_settings(flat(config_text))))


def _training_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that change what is computed, sorted by key."""
    scales = settings["precision.use_amp"] and settings["precision.dtype"] == "fp16"
    free = FREE_TO_CHANGE if scales else (*FREE_TO_CHANGE, "precision.scaler.")
    of_source = re.compile(r"data\.sources\.\w+\.")  # its keys are free to change as those of the data section are
    return {key: settings[key] for key in sorted(settings) if not of_source.sub("data.", key).startswith(free)}


def check_data(path: Path, manifest: Manifest, length: int, fingerprint: str, allowed: bool, world: World) -> None:
    """Errors: DataError if the dataset differs from the one that the checkpoint's position counts in."""
    if (manifest.data_length, manifest.data_fingerprint) == (length, fingerprint):
        return
    text = (
        f"{path} was made with {manifest.data_length:,} samples of fingerprint {manifest.data_fingerprint}, now there "
        f"are {length:,} of {fingerprint}"
    )
    if not allowed:
        raise DataError(f"{text}: use the old data, {OR_ALLOW}")
    world.warn(f"{text}; resuming after as many samples of the new data")


def order_to_continue(path: Path, manifest: Manifest, plan: Plan, allowed: bool, world: World) -> str:
    """The order in which the run takes its samples from here on: the checkpoint's, in which its position counts.

    The run's own if there is nothing to continue: data of another length, or another data.shuffle. Errors: DataError
    for a dataset's own order that is not the checkpoint's, unless it is `allowed`.
    """
    theirs, known = manifest.order, get_args(Order)
    if theirs == plan.order or manifest.data_length != plan.length:
        return plan.order
    if plan.own_order is not None or theirs not in known:
        text = f"{path} takes its samples in the order {theirs!r}, this run in {plan.order!r}"
        if not allowed:
            names = "data.view, data.streams, data.shuffle_groups and data.group_by_length"
            raise DataError(f"{text}: use the old {names}, or a newer dist_amp, {OR_ALLOW}")
        world.warn(f"{text}; some samples of this epoch come twice or not at all")
        return plan.order
    if "dataset" in (theirs, plan.order):
        return plan.order
    table = f", which takes {plan.length / 2**17:,.0f} MiB on every rank" if theirs == "randperm" else ""
    world.say(f"data order: {theirs}, as in {path}{table}; a new run would use {plan.order}")
    return theirs


def check_fit(
    path: Path, manifest: Manifest, metadata: Metadata, state: Mapping[str, Any], groups: Mapping[str, int]
) -> None:
    """Errors: DataError for the first parameter or moment that differs in presence, shape or dtype."""
    check_tensors(path, metadata, "model", state["model"])
    if manifest.optimizer != groups:
        raise DataError(
            f"checkpoint {path} does not fit this optimizer: its groups and their parameters are "
            f"{manifest.optimizer}, here {groups}"
        )
    if state["optimizer"] and any(name.startswith("optimizer.") for name in metadata.state_dict_metadata):
        check_tensors(path, metadata, "optimizer", state["optimizer"])  # else no step was applied before it was saved
    if "ema" in state:
        check_tensors(path, metadata, "ema", state["ema"])


def check_tensors(path: Path, metadata: Metadata, section: str, state: Mapping[str, Any]) -> None:
    """Errors: DataError for the first tensor of a section, "model" or "optimizer", that differs."""

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
    differing = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        raise DataError(
            f"checkpoint {path} does not fit this {section}: {name} is {theirs.get(name, 'missing')} there and "
            f"{ours.get(name, 'missing')} here ({len(differing)} such)"
        )
