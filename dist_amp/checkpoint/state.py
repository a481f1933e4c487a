"""What a checkpoint contains, taken from a run and restored into one; any strategy reads any other's checkpoints."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from dist_amp.checkpoint.compatibility import check_data, check_fit, config_hash, order_to_continue
from dist_amp.checkpoint.fingerprint import fingerprint
from dist_amp.checkpoint.format import Manifest, checkpoint_folder
from dist_amp.checkpoint.frozen import FrozenBase, frozen_names, saved_checksums
from dist_amp.checkpoint.reader import Reader, read_into, rejection_as_data_error
from dist_amp.checkpoint.staging import Staging
from dist_amp.checkpoint.writer import Snapshot
from dist_amp.data import Batches
from dist_amp.optim import Schedule
from dist_amp.optimizers.groups import check_options
from dist_amp.parallel import LossNormalizer, Parallel
from dist_amp.precision import Precision, Scaler
from dist_amp.runtime.batch_statistics import averaged_statistics, batch_statistics, set_statistics
from dist_amp.runtime.random_state import random_state, seed_all, set_random_state
from dist_amp.settings import Config
from dist_amp.task import Task
from dist_amp.telemetry.metrics import Metrics
from dist_amp.world import World


class Resumable(Protocol):
    """The parts of a run that are saved and restored; `dist_amp.run.Run` has them."""

    config: Config
    world: World
    folder: Path
    task: Task
    precision: Precision
    parallel: Parallel
    frozen: FrozenBase
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


def take_snapshot(run: Resumable, staging: Staging | None) -> Snapshot:
    """The current state of the run; every rank calls it. staging: where to copy it, so that training may continue."""
    check_options(run.optimizer, run.schedule.options_at_start)
    state = _state(run, with_frozen=run.frozen.notice_change())
    state["model"] |= averaged_statistics(run.parallel.module, run.world)
    state["interval"] = run.world.gather(run.metrics.unfinished(run.data))
    state = _without_replicas(state, run.world)
    if staging is not None:
        state = staging.copy(state)
    world, plan, config = run.world, run.data.plan, run.config_text
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
        optimizer=_group_sizes(run),
        config_hash=config_hash(config),
        evaluation=run.metrics.evaluation,
        evaluated_step=run.metrics.evaluated_step,
        best=run.metrics.best,
        order=plan.order,
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
    )
    folder = checkpoint_folder(run.folder, run.step)
    return Snapshot(folder, state, manifest, config, run.config.checkpoint.keep, on_host=staging is not None)


def _without_replicas(state: dict[str, Any], world: World) -> dict[str, Any]:
    """The state without the replicas that another rank writes; one copy of each is enough.

    They are spread over the ranks by their sizes: of an ordinary tensor, one rank keeps it; of a DTensor with replicas,
    as under HSDP, one replica of the mesh does. The entries under "ranks" differ, so each rank keeps its own.
    """
    bytes_of: dict[int, list[int]] = {}  # {replicas: bytes that each of them keeps}

    def is_own(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return True
        replica, replicas = _replica(value) if isinstance(value, DTensor) else (world.rank, world.world_size)
        kept = bytes_of.setdefault(replicas, [0] * replicas)
        keeper = kept.index(min(kept))
        kept[keeper] += value.numel() * value.element_size()
        return keeper == replica

    def own(part: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in part.items():
            if isinstance(value, dict):
                kept[name] = own(value)
            elif is_own(value):
                kept[name] = value
        return kept

    ranks = state.pop("ranks")
    return {**own(state), "ranks": ranks}


def _replica(value: DTensor) -> tuple[int, int]:
    """(which replica of the tensor this rank has a shard of, how many there are)."""
    replica, replicas = 0, 1
    for size, coordinate, placement in zip(
        value.device_mesh.shape, value.device_mesh.get_coordinate() or [], value.placements, strict=True
    ):
        if placement.is_replicate():
            replica, replicas = replica * size + coordinate, replicas * size
    return replica, replicas


def load(run: Resumable, path: Path) -> None:
    """Restore the run from a checkpoint of any world size and strategy; every rank calls it.

    Errors: DataError if the checkpoint is rejected, or does not fit the run's data, model or optimizer.
    """
    world = run.world
    with rejection_as_data_error(path):
        reader = Reader(path)
        manifest, metadata = reader.manifest, reader.read_metadata()
        allowed, plan = run.config.run.allow_config_change, run.data.plan
        check_data(path, manifest, plan.length, fingerprint(run.data, run.world), allowed, world)
        run.data.plan = replace(plan, order=order_to_continue(path, manifest, plan, allowed, world))
        if manifest.step:  # DDP has not rebuilt its buckets before the first step
            _rebuild_ddp_buckets(run)
        for own in run.optimizer.state.values():
            if isinstance(own.get("step"), Tensor):  # fused AdamW may share one between all, but they are loaded singly
                own["step"] = own["step"].clone()
        saved = {name.partition(".")[0] for name in metadata.state_dict_metadata}
        frozen = saved_checksums(run.parallel.module, metadata, path)
        state = _state(run, with_frozen=not frozen, with_moments="optimizer" in saved) | frozen
        same_world = (manifest.world_size, manifest.device) == (world.world_size, world.device.type)
        if not same_world:
            del state["ranks"]
        if manifest.precision != "fp16":
            del state["scaler"]
        if "expected_weights" not in metadata.state_dict_metadata:  # added after the first checkpoints
            del state["expected_weights"]
        if "ema" in state and "ema" not in saved:
            del state["ema"]
        size: Any = metadata.state_dict_metadata["interval"]  # with fewer columns in older checkpoints
        state["interval"] = torch.zeros(size.size, dtype=torch.float64)
        check_fit(path, manifest, metadata, state, _group_sizes(run))
        read_into(state, reader, world)
    if "frozen" in state:
        run.frozen.check(state["frozen"], path)
    _set_state(run, manifest, state, same_world)


def _set_state(run: Resumable, manifest: Manifest, state: dict[str, Any], same_world: bool) -> None:
    options = StateDictOptions(strict="frozen" not in state)
    set_model_state_dict(run.model, state["model"], options=options)
    if state["optimizer"]:
        groups = get_optimizer_state_dict(run.model, run.optimizer)["param_groups"]
        moments: dict[str, Any] = {"state": state["optimizer"], "param_groups": groups}
        set_optimizer_state_dict(run.model, run.optimizer, moments, options=options)
    if run.parallel.ema is not None and "ema" not in state:
        run.parallel.ema.restart()
        run.world.say(f"optim.ema starts at step {manifest.step}: the checkpoint has no average")
    run.schedule.load_counters(state["counters"])
    if "scaler" in state:
        run.scaler.load_state_dict(state["scaler"])
    if "expected_weights" in state:
        run.normalizer.load_state_dict({"weights": state["expected_weights"]})
    run.step, run.data.position = manifest.step, manifest.samples
    run.metrics.evaluation, run.metrics.best = manifest.evaluation, manifest.best
    run.metrics.evaluated_step = manifest.evaluated_step
    run.metrics.resume_unfinished(state["interval"], same_world)
    if same_world:
        own = state["ranks"][str(run.world.rank)]
        set_statistics(run.parallel.module, own["statistics"])
        set_random_state(own["random"], run.world.device)
    else:  # no saved generators for these ranks; the seed of the start would repeat dropout's first masks
        seed_all((run.config.run.seed + 1 + run.world.rank + 1_000_003 * run.step) % 2**63)


def _state(run: Resumable, with_frozen: bool, with_moments: bool = False) -> dict[str, Any]:
    """Everything that a step depends on, as tensors: what a checkpoint saves, and what a load fills in place.

    with_frozen: with the values of frozen parameters, else with their checksums. with_moments: let torch make moments
    where the optimizer has none, for a load to replace. They are never saved: torch makes them by a step of its own,
    which leaves counts of 1 and decayed weights in them. Most optimizers have none before their first applied step.
    """
    omitted = set() if with_frozen else frozen_names(run.parallel.module)
    optimizer: dict[str, Any] = {}
    if with_moments or any(run.optimizer.state.values()):
        if not any(run.optimizer.state.values()):
            run.optimizer.state.clear()  # of empty entries, by which torch would take it for filled
        optimizer = get_optimizer_state_dict(run.model, run.optimizer)["state"]  # type: ignore[assignment]
    # This rank's own; the model's entries are averaged over ranks when they are saved.
    statistics = {name: own.clone() for name, own in batch_statistics(run.parallel.module).items()}
    own = {"random": random_state(run.world.device), "statistics": statistics}
    return {
        "model": {name: value for name, value in get_model_state_dict(run.model).items() if name not in omitted},
        **({"frozen": run.frozen.checksums().clone()} if omitted else {}),
        "optimizer": optimizer,  # without the groups' hyperparameters, which come from the config
        "counters": run.schedule.counters,
        "expected_weights": run.normalizer.state_dict()["weights"],
        "scaler": run.scaler.state_dict(),
        "ranks": {str(run.world.rank): own},
    } | ({"ema": run.parallel.ema.averages} if run.parallel.ema is not None else {})


def _group_sizes(run: Resumable) -> dict[str, int]:
    groups = run.optimizer.param_groups
    name = type(run.optimizer).__name__ if hasattr(run.task, "optimizer") else run.config.optim.name
    return {f"{name} {group['name']}": len(group["params"]) for group in groups}


def _rebuild_ddp_buckets(run: Resumable) -> None:
    """Give DDP the bucket layout that it has after its first step.

    DDP rebuilds its buckets after the first backward, and three or more ranks sum in another order then: without this,
    a resumed run's first step would differ from the uninterrupted run's in the last bit.
    """
    if run.parallel.strategy != "ddp" or run.world.world_size < 3:
        return
    with no_side_effects(run):
        *others, (batch, _) = run.data.at(0)  # the first one whose gradients were synchronised
        if others:  # micro-batches add to the buckets, which DDP divides in other bits than gradients it copies there
            with run.parallel.gradient_sync(False):
                pass
        batch = getattr(batch, "batch", batch)
        for _ in range(2):
            with run.parallel.gradient_sync(True):
                with run.precision.autocast():
                    loss = run.task.loss_sum(run.model, batch)
                if (carrier := run.parallel.carrier) is not None:  # it is in a bucket too
                    loss = loss + carrier
                run.scaler.scale(loss).backward()


def restore_point(run: Resumable) -> Callable[[], None]:
    """Record the random generators and the model's buffers; calling the result restores them."""
    random_numbers = random_state(run.world.device)
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in run.parallel.module.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer)
            # An expanded buffer can't be written to, so it needs no restoring.
            if buffer.layout == torch.strided and not torch.equal(buffer, value):
                buffer.copy_(value)
        set_random_state(random_numbers, run.world.device)

    return restore


@contextmanager
def no_side_effects(run: Resumable) -> Iterator[None]:
    """Restore the random generators and buffers afterwards, and clear the gradients."""
    restore = restore_point(run)
    try:
        yield
    finally:
        run.optimizer.zero_grad(set_to_none=True)
        if run.parallel.carrier is not None:
            run.parallel.carrier.grad = None
        restore()
