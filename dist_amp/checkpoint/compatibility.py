"""Checks that a checkpoint fits a run: its settings, data (by fingerprint), model and optimizer.

Settings that change what is computed must equal those in the checkpoint's config.toml, unless
run.allow_config_change is true; those in FREE_TO_CHANGE may always differ. If another version of
dist_amp wrote the file, settings that it lacks count as their defaults, and settings that no longer
exist are ignored. Names, shapes and dtypes of the tensors must be equal in any case.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_amp.checkpoint.format import CONFIG, Manifest, read_manifest
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.task_class import GIVEN, new_target
from dist_amp.config.text import flat, read_flat, to_toml
from dist_amp.data import Batches
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import ConfigError, DataError
from dist_amp.loading.plan import Order
from dist_amp.loading.samples import call_in_worker, sample_bytes, spread
from dist_amp.settings import FREE_TO_CHANGE, Config, TaskConfig
from dist_amp.step import Run
from dist_amp.world import World

# Settings that no longer exist but change what is computed: {key: the value that now always holds}.
FIXED = {"data.mix_by": "rows", "data.long_documents": "auto", "optim.decay_ratio": 0.2}

OR_ALLOW = "or continue anyway with --run.allow_config_change true"


def check_config(path: Path, config: Config, task: Any, world: World) -> None:
    """Compare the settings. task: an object or a class. Raises ConfigError if they don't fit."""
    manifest = read_manifest(path)
    now = flat(to_toml(config))
    before = settings_of(path, config)
    # A task object's module and arguments may be unknown; then task.* is not compared.
    if might_match(str(before.get("task.target")), config.task.target, task):
        before = {key: before[key] for key in before if not key.startswith("task.")}
        before |= {key: now[key] for key in now if key.startswith("task.")}
    # The config may say auto here; the manifest has the value that the run used.
    micro_batches = accumulation_steps(config.train, world.world_size)
    now["train.global_batch_size"] = (
        config.train.micro_batch_size * micro_batches * world.world_size
    )
    before["train.global_batch_size"] = manifest.global_batch_size
    before["run.seed"] = manifest.seed
    changes = [
        f"{key}={before.get(key, 'unset')}, now {now.get(key, 'unset')}"
        for key in sorted(before | now)
        if changes_training(key, now) and before.get(key) != now.get(key)
    ]
    text = f"{path} was made with {'; '.join(changes)}"
    if changes and not config.run.allow_config_change:
        raise ConfigError(f"{text}: use the old values, {OR_ALLOW}")
    if changes:
        world.warn(f"resuming with another config: {text}")
    if config.parallel.bit_exact and not before["parallel.bit_exact"]:
        world.say(f"exact  from step {manifest.step} on: the steps before were not bit-exact")
    steps = config.train.steps
    follows_schedule = config.optim.schedule != "constant" and not hasattr(task, "schedule")
    if steps != before["train.steps"] and steps > manifest.step and follows_schedule:
        world.warn(
            f"train.steps was {before['train.steps']} and is {steps}: from step {manifest.step} "
            f"on, the learning rate follows the {config.optim.schedule} schedule of {steps} steps"
        )


def might_match(before: str, now: str, task: Any) -> bool:
    """Whether two different targets may mean the same task: if it is or was given as an object,
    only the class's name is compared. Earlier versions recorded the default target for objects.
    """
    if before == now:
        return False
    is_object = not isinstance(task, type)
    if is_object and TaskConfig.target in (before, now):
        return True
    same_name = re.split("[:.]", before)[-1] == re.split("[:.]", now)[-1]
    return same_name and (is_object or GIVEN in before or GIVEN in now)


def settings_of(path: Path, config: Config) -> dict[str, Any]:
    """{key: value} of the checkpoint's config, with defaults for settings that it lacks.

    Settings that no longer exist are left out, except for values that differ from FIXED.
    """
    saved = read_flat(path / CONFIG)
    saved["task.target"] = new_target(saved.get("task.target", ""))
    if saved.pop("precision.matmul", "auto") == "fp8":  # a setting of an earlier version
        saved["precision.dtype"] = "fp8"
    named_by_user: tuple[str, ...] = ("data.sources.", "task.")
    known = flat(to_toml(config)).keys()
    for key in saved.keys() - known:
        if not key.startswith(named_by_user) and saved[key] == FIXED.get(key, saved[key]):
            del saved[key]
    if saved["task.target"] == config.task.target:
        named_by_user = ("data.sources.",)  # the same task: its arguments' defaults are known
    try:
        args = type(config.task.args)()
        defaults = flat(to_toml(Config(task=TaskConfig(args=args))))
    except TypeError:  # the task has required arguments
        defaults = flat(to_toml(Config()))
    return {key: defaults[key] for key in defaults if not key.startswith(named_by_user)} | saved


def changes_training(key: str, settings: Mapping[str, Any]) -> bool:
    if key in ("run.seed", "train.global_batch_size"):
        return True
    # A source's settings may change if the same settings of the data section may.
    key = re.sub(r"data\.sources\.\w+\.", "data.", key)
    is_fp16 = settings["precision.use_amp"] and settings["precision.dtype"] == "fp16"
    return not key.startswith(FREE_TO_CHANGE) and (
        is_fp16 or not key.startswith("precision.scaler.")
    )


def continue_data(run: Run, path: Path, manifest: Manifest) -> None:
    """Check that the run has the checkpoint's data, and adopt the checkpoint's order of samples.
    The run keeps its own order if the data has another length, or if data.shuffle differs. Errors:
    DataError for other data or an order that can't be adopted, unless run.allow_config_change.
    """
    plan = run.data.plan
    saved = manifest.order
    allowed = run.config.run.allow_config_change
    now = (plan.length, fingerprint(run.data, run.world))
    if (manifest.data_length, manifest.data_fingerprint) != now:
        text = f"{path} was made with {manifest.data_length:,} samples of fingerprint "
        text += f"{manifest.data_fingerprint}, now there are {plan.length:,} of {now[1]}"
        if not allowed:
            hint = "data.validation_split=shuffled if an older version made it"
            raise DataError(f"{text}: use the old data, {hint}, {OR_ALLOW}")
        run.world.warn(f"{text}; resuming after as many samples of the new data")
    if saved == plan.order or manifest.data_length != plan.length:
        return
    if plan.dataset_order is not None or saved not in get_args(Order):
        text = f"{path} takes its samples in the order {saved!r}, this run in {plan.order!r}"
        if not allowed:
            names = "data.view, data.streams and data.group_by_length"
            raise DataError(f"{text}: use the old {names}, or a newer dist_amp, {OR_ALLOW}")
        run.world.warn(f"{text}; some samples of this epoch come twice or not at all")
    elif "dataset" not in (saved, plan.order):
        run.world.say(f"data order: {saved}, as in {path}; a new run would use {plan.order}")
        run.data.plan = replace(plan, order=saved)


def check_tensors(path: Path, metadata: Metadata, section: str, state: Any) -> None:
    """Compare names, shapes and dtypes in a section, such as "model". Raises DataError."""

    def tensors(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping):
            for key, part in value.items():
                yield from tensors(part, f"{name}.{key}")
        elif isinstance(value, Tensor):
            yield name, f"{list(value.shape)} {value.dtype}"

    here = dict(tensors(state, section))
    there = {
        name: f"{list(entry.size)} {entry.properties.dtype}"
        for name, entry in metadata.state_dict_metadata.items()
        if f"{name}.".startswith(f"{section}.") and isinstance(entry, TensorStorageMetadata)
    }
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    if differing:
        name = differing[0]
        raise DataError(
            f"checkpoint {path} does not fit this {section}: {name} is "
            f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here "
            f"({len(differing)} such)"
        )


def fingerprint(data: Batches, world: World) -> str:
    """Rank 0's hash of the data, computed once; every rank calls it. Random states don't change."""
    if not data.fingerprint:
        before = random_state(world.device)
        data.fingerprint = world.from_main(dataset_hash(data) if world.is_main else "")
        set_random_state(before, world.device)
    return data.fingerprint


def dataset_hash(data: Batches) -> str:
    """The dataset's own `fingerprint`; else a hash of 64 samples, evenly spread over it."""
    known = getattr(data.fetch.dataset, "fingerprint", None)
    if isinstance(known, str):
        return known
    indices = spread(data.plan.length, 64)
    (digest,) = call_in_worker(content_hash, data, [indices])
    return str(digest)


def content_hash(dataset: Any, indices: list[int]) -> str:
    digest = hashlib.sha256()
    for index in indices:
        try:
            digest.update(sample_bytes(dataset, index))
        except Exception:  # the step that needs the sample raises the error
            digest.update(repr("can't be read").encode())
    return digest.hexdigest()[:16]
