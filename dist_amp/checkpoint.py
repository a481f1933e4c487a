"""Save and resume all that is stateful, with torch.distributed.checkpoint: any strategy reads any other's.

A checkpoint is a folder `step_00000100`, complete or absent: written beside under another name, then renamed.
It holds tensors and one JSON file.
"""

import json
import math
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from dist_amp.config import Failure, Range
from dist_amp.runtime import DataError, World

if TYPE_CHECKING:
    from dist_amp.run import Run

ABOUT = "about.json"  # step, samples, world size, strategy: what is known of a checkpoint without loading it


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, Range(low=1)] | Literal["off"] = 100
    """Steps between checkpoints; there is one at the end, and one when a signal stops the run. off: none at all."""
    keep: Annotated[int, Range(low=2)] = 2
    """How many of the newest checkpoints stay."""


def complete_checkpoints(run_folder: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    return sorted(path.parent for path in run_folder.glob(f"checkpoints/step_*/{ABOUT}"))


def to_resume(resume: str, run_folder: Path) -> Path | None:
    """The checkpoint that `run.resume` asks for; None where a run starts afresh.

    Errors: DataError where a path was given that is not a checkpoint.
    """
    if resume == "never":
        return None
    own = complete_checkpoints(run_folder)
    path = Path(resume)
    if resume == "auto" or (own and path.resolve() not in [checkpoint.resolve() for checkpoint in own]):
        return own[-1] if own else None  # what this run has done since it began from `path` counts for more
    if own and path.resolve() != own[-1].resolve():
        raise DataError(f"run.resume={resume} is older than {own[-1].name} beside it; go on from it in a new --run.dir")
    inside = complete_checkpoints(path)
    if inside:  # a run's folder stands for its newest checkpoint
        return inside[-1]
    if not (path / ABOUT).is_file():
        what = "is not a checkpoint" if path.exists() else "does not exist"
        raise DataError(f"run.resume={resume} {what}; give RUN/checkpoints/step_N, a run's folder, auto or never")
    return path


def save(run: "Run") -> Path:
    """Write a checkpoint of the run as it stands after `run.step` steps; every rank calls it."""
    final = run.folder / "checkpoints" / f"step_{run.step:08d}"
    if final.exists():
        return final
    fresh = final.with_name(f".{final.name}.writing")
    if run.world.is_main:
        shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed while it wrote
        fresh.mkdir(parents=True)
    run.world.barrier()
    if not fresh.is_dir():
        raise Failure(f"run.dir={run.folder} is not on a disk that all ranks share; put it on one")
    run.parallel.average_buffers()
    with quiet_when_alone():
        write_tensors(_state(run), checkpoint_id=fresh, no_dist=run.world.world_size == 1)
    if run.world.is_main:
        about = {"step": run.step, "samples": run.data.position, "world_size": run.world.world_size,
                 "strategy": run.parallel.strategy, "precision": run.precision.name,
                 "device": run.world.device.type}  # fmt: skip
        (fresh / ABOUT).write_text(json.dumps(about))
        os.replace(fresh, final)
        for old in complete_checkpoints(run.folder)[: -run.config.checkpoint.keep]:
            shutil.rmtree(old)
    run.world.barrier()
    return final


def load(run: "Run", path: Path) -> None:
    """Set the run to the state that `save` wrote to `path`, from any world size and strategy; every rank calls it."""
    about = json.loads((path / ABOUT).read_text())
    state = _state(run)
    if (about["world_size"], about["device"]) != (run.world.world_size, run.world.device.type):
        del state["random"]  # in another world the ranks have no past: they stay as seeded
    if about["precision"] != "fp16":
        del state["scaler"]
    try:
        with quiet_when_alone():
            read_tensors(state, checkpoint_id=path, no_dist=run.world.world_size == 1)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise DataError(f"checkpoint {path} does not fit this model and optimizer: {why.strip()}") from error
    groups = get_optimizer_state_dict(run.model, run.optimizer.torch_optimizer)["param_groups"]
    set_state_dict(
        run.model,
        run.optimizer.torch_optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
    run.optimizer.bind_learning_rate()
    if "scaler" in state:
        run.precision.load_state_dict(state["scaler"])
    run.step, run.data.position = about["step"], about["samples"]
    if "random" in state:
        set_random_state(state["random"][str(run.world.rank)], run.world)


def _state(run: "Run") -> dict[str, Any]:
    """All that a step depends on, as tensors: the state to save, or the places that a load fills."""
    model, optimizer = get_state_dict(run.model, run.optimizer.torch_optimizer)
    return {
        "model": model,
        "optimizer": optimizer["state"],  # its groups' settings come from the config
        "counters": run.optimizer.counters,
        "scaler": run.precision.state_dict(),
        "random": {str(run.world.rank): random_state(run.world)},
    }


@contextmanager
def quiet_when_alone() -> Iterator[None]:
    """One process without a process group is a way to run, not a reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@contextmanager
def as_it_was(run: "Run") -> Iterator[None]:
    """Whatever is run inside, generators and buffers are afterwards as they were, and there are no gradients."""
    random_numbers = random_state(run.world)
    modules = run.parallel.module.modules()
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        run.optimizer.torch_optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                written = buffer.layout == torch.strided and not torch.equal(buffer, value)
                if written:  # an expanded buffer can't be, and was not
                    buffer.copy_(value)
        set_random_state(random_numbers, run.world)


def random_state(world: World) -> dict[str, Tensor]:
    """The states of the generators of Python, NumPy, torch and the device, as tensors."""
    _, numbers, gauss = random.getstate()
    twister: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002 (a task may draw from it)
    _, keys, position, has_gauss, cached = twister
    state = {
        "python": torch.tensor(numbers),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def set_random_state(state: dict[str, Tensor], world: World) -> None:
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached = state["numpy_gauss"].tolist()
    keys = state["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
