"""Replay a micro-batch that was not finite in a run: python -m dist_amp.verify --replay FILE."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.checkpoint.weights import load_weights
from dist_amp.config.load import load_saved
from dist_amp.config.task_class import build_task
from dist_amp.diagnostics.nonfinite import NonFinite, find_nonfinite
from dist_amp.distributed.process import seed_all, set_random_state
from dist_amp.errors import ConfigError, DataError
from dist_amp.loading.nested import to_device
from dist_amp.precision import build_precision
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config
from dist_amp.storage.reading import fetched
from dist_amp.world import locate


def replay_file(path: str | Path, argv: Sequence[str] = ()) -> int:
    """Replay a saved micro-batch in this process by autocast; return 0 if it is not finite again,
    else 1. argv: settings over those of the run. Errors: DataError, ConfigError.
    """
    path = fetched(str(path))
    kept = read_kept(path)
    report = NonFinite.from_json(kept["report"])
    config = _config_of(kept["config"], path, argv)
    world = locate(config.run)
    try:
        task = build_task(config)
    except ConfigError as error:
        fix = "start where the run was, or give --task.target"
        raise ConfigError(f"{path} needs its task: {error}; {fix}") from error
    seed_all(config.run.seed)
    model = build_whole(task, torch.device("cpu"), frozen_too=not config.precision.use_amp)
    loaded = _set_weights(model, kept["weights"], path)
    world.say(f"replaying step {report.step} of {path} with {loaded}")
    model = model.to(world.device)
    precision = build_precision(replace(config.precision, cast_by="auto"), False, world)
    random = dict(kept["random"])
    if world.device.type == "cpu":
        random.pop("cuda", None)
    set_random_state(random, world.device)
    batch = to_device(kept["batch"], world.device)
    share = torch.tensor(kept["share"], device=world.device)
    fault = find_nonfinite(task, model, batch, share, precision)
    if fault is None:
        where = f"in {precision.name} on {world.device.type}"
        world.say(f"not reproduced: all is finite {where}; in the run it was on {report}")
        return 1
    place = {name: getattr(report, name) for name in ("step", "rank", "micro_batch", "samples")}
    world.say(f"not finite: on {replace(fault, **place)}")
    return 0


def read_kept(path: Path) -> dict[str, Any]:
    """The file's content: only plain data and tensors are unpickled. Errors: DataError."""
    fix = "give a file of RUN/nonfinite"
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        _, refused, rest = str(error).partition("GLOBAL ")  # the type that torch does not load
        if refused:
            raise DataError(
                f"--replay {path} holds more than tensors, numbers and text ({rest.split()[0]}), "
                "and loading that could run code; let the task's collate return tensors in dicts, "
                "lists or tuples"
            ) from error
        raise DataError(f"--replay {path} can't be read ({type(error).__name__}); {fix}") from error
    if not isinstance(kept, Mapping) or kept.get("dist_amp") != "nonfinite":
        raise DataError(f"--replay {path} is not a kept micro-batch; {fix}")
    return dict(kept)


def _config_of(text: str, path: Path, argv: Sequence[str]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(text)
        try:
            return load_saved(file, argv, path.parent)
        except ConfigError as error:
            why = str(error).replace(str(file), "its config")
            fix = "start it where the run was started"
            raise ConfigError(f"--replay {path}: {why}; {fix}") from error


def _set_weights(model: nn.Module, weights: Mapping[str, Any] | None, path: Path) -> str:
    """Load the saved weights, else those of the run's newest checkpoint; return which, in words."""
    if weights is not None:
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            why = str(error).strip().splitlines()[-1].strip()
            rule = "does not fit the task's model"
            raise DataError(f"--replay {path} {rule}: {why}; use the task as it was") from error
        return "the weights that it keeps"
    checkpoints = all_checkpoints(path.parent.parent)
    if not checkpoints:
        return "initial weights: it keeps none, and the run's folder holds no checkpoint"
    try:
        load_weights(model, checkpoints[-1])
    except DataError as error:
        needs = f"needs the weights of {checkpoints[-1]}"
        raise DataError(f"--replay {path} {needs}: {error}") from None
    return f"the weights of {checkpoints[-1].name}"
