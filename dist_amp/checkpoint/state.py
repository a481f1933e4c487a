"""Save and resume all that is stateful, with torch.distributed.checkpoint: any strategy reads any other's.

A checkpoint is taken by the training loop, which copies the state to the host's memory, and written in the background
while training goes on. What makes the files trustworthy, and safe to read, is in checkpoint_files.py.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from dist_amp.checkpoint.compatibility import check_data, check_fit, config_hash
from dist_amp.checkpoint.fingerprint import fingerprint
from dist_amp.checkpoint.format import Manifest, Refused, fault_of, quarantine, read_manifest, reason
from dist_amp.checkpoint.reader import Reader, read_into
from dist_amp.checkpoint.writer import Snapshot, write
from dist_amp.data import Batches
from dist_amp.errors import DataError
from dist_amp.optim import Schedule
from dist_amp.parallel import LossNormalizer, Parallel
from dist_amp.precision import Precision, Scaler
from dist_amp.runtime.batch_statistics import averaged_statistics, batch_statistics, set_statistics
from dist_amp.runtime.random_state import random_state, seed_all, set_random_state
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.telemetry.metrics import Metrics
from dist_amp.world import World


class Resumable(Protocol):
    """What of a run is saved and restored; `dist_amp.run.Run` is one."""

    config: Config
    world: World
    folder: Path
    task: Task
    precision: Precision
    parallel: Parallel
    normalizer: LossNormalizer
    scaler: Scaler
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    data: Batches
    metrics: Metrics
    step: int

    @property
    def config_text(self) -> str: ...

    @property
    def model(self) -> nn.Module: ...


def save(run: Resumable) -> Path:
    """Write a checkpoint of the run as it stands after `run.step` steps; every rank calls it, and waits for it."""
    snapshot = take(run, copy=False)
    if not _is_there(snapshot, run.world):
        write(snapshot, run.world)
    return snapshot.folder


def _is_there(snapshot: Snapshot, world: World) -> bool:
    """Whether the step is saved already, as where a run stops right after it was resumed; what is damaged is not."""
    there = False
    if world.is_main and snapshot.folder.exists():
        there = not fault_of(snapshot.folder)
        if not there:
            quarantine(snapshot.folder)
    return world.from_main(str(there)) == "True"


def take(run: Resumable, copy: bool) -> Snapshot:
    """The state of the run now; every rank calls it. copy: into the host's memory, so that training may go on."""
    state = _state(run)
    state["model"] |= averaged_statistics(run.parallel.module, run.world)
    state["interval"] = run.world.gather(run.metrics.interval)
    state = _my_share(state, run.world)
    if copy:
        state = FileSystemWriter(run.folder).stage(state)
    world, plan = run.world, run.data.plan
    manifest = Manifest(
        step=run.step,
        samples=run.data.position,
        world_size=world.world_size,
        strategy=run.parallel.strategy,
        precision=run.precision.name,
        device=world.device.type,
        seed=run.config.run.seed,
        global_batch_size=plan.global_batch_size,
        data_length=plan.length,
        data_fingerprint=fingerprint(run.data, run.world),
        optimizer=_groups(run),
        config_hash=config_hash(run.config_text),
        evaluation=run.metrics.evaluation,
        evaluated_step=run.metrics.evaluated_step,
        best=run.metrics.best,
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
    )
    return Snapshot(run.folder, state, manifest, run.config_text, run.config.checkpoint.keep, on_host=copy)


def _my_share(state: dict[str, Any], world: World) -> dict[str, Any]:
    """The state without the whole tensors that are another rank's to write: of equal copies one is enough.

    A rank's own part stands under its number, and parts of a sharded tensor are all different.
    """
    bytes_of = [0] * world.world_size

    def keep(value: Any) -> bool:
        if not isinstance(value, Tensor) or hasattr(value, "to_local"):
            return True
        lightest = bytes_of.index(min(bytes_of))
        bytes_of[lightest] += value.numel() * value.element_size()
        return lightest == world.rank

    def share(part: dict[str, Any]) -> dict[str, Any]:
        split = {name: share(value) if isinstance(value, dict) else value for name, value in part.items()}
        return {name: value for name, value in split.items() if keep(value)}

    return {name: part if name == "ranks" else share({name: part}).get(name, {}) for name, part in state.items()}


def load(run: Resumable, path: Path) -> None:
    """Set the run to the state that `save` wrote to `path`, from any world size and strategy; every rank calls it."""
    world = run.world
    try:
        manifest = read_manifest(path)
        reader = Reader(path, manifest.files)
        metadata = reader.read_metadata()
        check_data(
            path,
            manifest,
            run.data.plan.length,
            fingerprint(run.data, run.world),
            run.config.run.allow_config_change,
            world,
        )
        if manifest.step:  # before its first step, a run's buckets are not yet settled either
            _settle_buckets(run)
        for own in run.optimizer.state.values():
            if "step" in own:  # AdamW's may be one tensor for all parameters, and is read for each
                own["step"] = own["step"].clone()
        state = _state(run)
        same_world = (manifest.world_size, manifest.device) == (world.world_size, world.device.type)
        if not same_world:
            del state["ranks"]
        if manifest.precision != "fp16":
            del state["scaler"]
        if "expected_weights" not in metadata.state_dict_metadata:  # of before there were any
            del state["expected_weights"]
        state["interval"] = torch.zeros(manifest.world_size, len(run.metrics.interval), dtype=torch.float64)
        check_fit(path, manifest, metadata, state, _groups(run))
        read_into(state, reader, alone=world.world_size == 1)
    except Refused as error:
        raise DataError(f"checkpoint {path} is refused: {error}") from None
    except CheckpointException as error:
        raise DataError(f"checkpoint {path} can't be loaded: {reason(error)}") from error
    _set_state(run, manifest, state, same_world)


def _set_state(run: Resumable, manifest: Manifest, state: dict[str, Any], same_world: bool) -> None:
    groups = get_optimizer_state_dict(run.model, run.optimizer)["param_groups"]
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
    run.schedule.load_counters(state["counters"])
    if "scaler" in state:
        run.scaler.load_state_dict(state["scaler"])
    if "expected_weights" in state:
        run.normalizer.load_state_dict({"weights": state["expected_weights"]})
    run.step, run.data.position = manifest.step, manifest.samples
    run.metrics.resume(manifest.evaluation, manifest.evaluated_step, manifest.best, state["interval"], same_world)
    if same_world:
        own = state["ranks"][str(run.world.rank)]
        set_statistics(run.parallel.module, own["statistics"])
        set_random_state(own["random"], run.world.device)
    else:  # ranks without a past: not seeded as at the start, or dropout would draw its first masks again
        seed_all((run.config.run.seed + 1 + run.world.rank + 1_000_003 * run.step) % 2**63)


def _groups(run: Resumable) -> dict[str, int]:
    groups = run.optimizer.param_groups
    return {f"{run.config.optim.name} {group['name']}": len(group["params"]) for group in groups}


def _settle_buckets(run: Resumable) -> None:
    """Give DDP the bucket layout that it has after its first step.

    It lays its buckets out anew after its first backward, and three ranks or more sum in another order then: without
    this a resumed run's first step would differ from the uninterrupted one's in the last bit.
    """
    if run.parallel.strategy != "ddp" or run.world.world_size < 3:
        return
    with as_it_was(run):
        (batch, _), *_ = run.data.at(0)
        batch = getattr(batch, "batch", batch)
        for _ in range(2):
            with run.precision.autocast():
                loss = run.task.loss_sum(run.model, batch)
            if (carrier := run.parallel.carrier) is not None:  # it is in a bucket too
                loss = loss + carrier
            run.scaler.scale(loss).backward()


def _state(run: Resumable) -> dict[str, Any]:
    """All that a step depends on, as tensors: the state to save, or the places that a load fills."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    statistics = {
        name: own.clone() for name, own in batch_statistics(run.parallel.module).items()
    }  # the model's are averages
    own = {"random": random_state(run.world.device), "statistics": statistics}
    return {
        "model": model,
        "optimizer": optimizer["state"],  # its groups' settings come from the config
        "counters": run.schedule.counters,
        "expected_weights": run.normalizer.state_dict()["weights"],
        "scaler": run.scaler.state_dict(),
        "ranks": {str(run.world.rank): own},
    }


def rewind_point(run: Resumable) -> Callable[[], None]:
    """Note the generators and batch statistics; what is returned puts them back."""
    random_numbers = random_state(run.world.device)
    statistics = {name: own.clone() for name, own in batch_statistics(run.parallel.module).items()}

    def rewind() -> None:
        set_statistics(run.parallel.module, statistics)
        set_random_state(random_numbers, run.world.device)

    return rewind


@contextmanager
def as_it_was(run: Resumable) -> Iterator[None]:
    """Whatever is run inside, generators and buffers are afterwards as they were, and there are no gradients."""
    random_numbers = random_state(run.world.device)
    modules = run.parallel.module.modules()
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        run.optimizer.zero_grad(set_to_none=True)
        if run.parallel.carrier is not None:
            run.parallel.carrier.grad = None
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                written = buffer.layout == torch.strided and not torch.equal(buffer, value)
                if written:  # an expanded buffer can't be, and was not
                    buffer.copy_(value)
        set_random_state(random_numbers, run.world.device)
