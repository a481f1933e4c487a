"""What a checkpoint contains, taken from a run and restored into one; any strategy reads any other's checkpoints."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from dist_amp.checkpoint.compatibility import check_data, check_fit, config_hash
from dist_amp.checkpoint.format import Manifest, checkpoint_folder
from dist_amp.checkpoint.reader import Reader, read_into, rejection_as_data_error
from dist_amp.checkpoint.writer import Snapshot
from dist_amp.data import Batches
from dist_amp.optim import Optimizer
from dist_amp.parallel import Parallel
from dist_amp.precision import Precision
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
    optimizer: Optimizer
    data: Batches
    metrics: Metrics
    step: int

    @property
    def config_text(self) -> str: ...

    @property
    def model(self) -> nn.Module: ...


def take_snapshot(run: Resumable, copy: bool) -> Snapshot:
    """The current state of the run; every rank calls it. copy: to host memory, so that training may continue."""
    state = _state(run)
    state["model"] |= run.parallel.averaged_statistics()
    state["interval"] = run.world.gather(run.metrics.interval)
    state = _without_replicas(state, run.world)
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
        data_fingerprint=_fingerprint(run),
        optimizer=_group_sizes(run),
        config_hash=config_hash(run.config_text),
        evaluation=run.metrics.evaluation,
        evaluated_step=run.metrics.evaluated_step,
        best=run.metrics.best,
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
    )
    folder = checkpoint_folder(run.folder, run.step)
    return Snapshot(folder, state, manifest, run.config_text, run.config.checkpoint.keep, on_host=copy)


def _without_replicas(state: dict[str, Any], world: World) -> dict[str, Any]:
    """The state without the replicated tensors that another rank writes; one copy of each is enough.

    They are spread over the ranks by their sizes. The shards of a DTensor and the entries under "ranks" differ between
    ranks, so each rank keeps its own.
    """
    rank_bytes = [0] * world.world_size

    def is_own(value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return True
        rank = rank_bytes.index(min(rank_bytes))
        rank_bytes[rank] += value.numel() * value.element_size()
        return rank == world.rank

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


def load(run: Resumable, path: Path) -> None:
    """Restore the run from a checkpoint of any world size and strategy; every rank calls it.

    Errors: DataError if the checkpoint is rejected, or does not fit the run's data, model or optimizer.
    """
    world = run.world
    with rejection_as_data_error(path):
        reader = Reader(path)
        manifest, metadata = reader.manifest, reader.read_metadata()
        check_data(path, manifest, run.data.plan.length, _fingerprint(run), run.config.run.allow_config_change, world)
        if manifest.step:  # DDP has not rebuilt its buckets before the first step
            _rebuild_ddp_buckets(run)
        for own in run.optimizer.torch_optimizer.state.values():
            if "step" in own:  # fused AdamW may share one tensor between all parameters, but they are loaded one by one
                own["step"] = own["step"].clone()
        state = _state(run)
        same_world = (manifest.world_size, manifest.device) == (world.world_size, world.device.type)
        if not same_world:
            del state["ranks"]
        if manifest.precision != "fp16":
            del state["scaler"]
        if "expected_weights" not in metadata.state_dict_metadata:  # added after the first checkpoints
            del state["expected_weights"]
        state["interval"] = torch.zeros(manifest.world_size, len(run.metrics.interval), dtype=torch.float64)
        check_fit(path, manifest, metadata, state, _group_sizes(run))
        read_into(state, reader, alone=world.world_size == 1)
    _set_state(run, manifest, state, same_world)


def _set_state(run: Resumable, manifest: Manifest, state: dict[str, Any], same_world: bool) -> None:
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
    if (weights := state.get("expected_weights")) is not None and torch.fmax(*weights) > 0:
        run.parallel.expect(weights)
    run.step, run.data.position = manifest.step, manifest.samples
    run.metrics.evaluation, run.metrics.best = manifest.evaluation, manifest.best
    run.metrics.evaluated_step = manifest.evaluated_step
    run.metrics.resume_interval(state["interval"], same_world)
    if same_world:
        own = state["ranks"][str(run.world.rank)]
        with torch.no_grad():
            for name, statistic in run.parallel.batch_statistics().items():
                statistic.copy_(own["statistics"][name])
        set_random_state(own["random"], run.world.device)
    else:  # no saved generators for these ranks; the seed of the start would repeat dropout's first masks
        seed_all((run.config.run.seed + 1 + run.world.rank + 1_000_003 * run.step) % 2**63)


def _state(run: Resumable) -> dict[str, Any]:
    """Everything that a step depends on, as tensors: what a checkpoint saves, and what a load fills in place."""
    model, optimizer = get_state_dict(run.model, run.optimizer.torch_optimizer)
    # This rank's own; the model's entries are averaged over ranks when they are saved.
    statistics = {name: own.clone() for name, own in run.parallel.batch_statistics().items()}
    own = {"random": random_state(run.world.device), "statistics": statistics}
    return {
        "model": model,
        "optimizer": optimizer["state"],  # without the groups' hyperparameters, which come from the config
        "counters": run.optimizer.counters,
        "expected_weights": run.parallel.weights,
        "scaler": run.precision.state_dict(),
        "ranks": {str(run.world.rank): own},
    }


def _fingerprint(run: Resumable) -> str:
    """Rank 0's fingerprint of the data, on every rank; computed once, without drawing from the generators."""
    if not run.data.agreed_fingerprint:
        random_numbers = random_state(run.world.device)
        run.data.agreed_fingerprint = run.world.from_main(run.data.fingerprint() if run.world.is_main else "")
        set_random_state(random_numbers, run.world.device)
    return run.data.agreed_fingerprint


def _group_sizes(run: Resumable) -> dict[str, int]:
    groups = run.optimizer.torch_optimizer.param_groups
    return {f"{run.optimizer.config.name} {group['name']}": len(group["params"]) for group in groups}


def _rebuild_ddp_buckets(run: Resumable) -> None:
    """Give DDP the bucket layout that it has after its first step.

    DDP rebuilds its buckets after the first backward, and three or more ranks sum in another order then: without this,
    a resumed run's first step would differ from the uninterrupted run's in the last bit.
    """
    if run.parallel.strategy != "ddp" or run.world.world_size < 3:
        return
    with no_side_effects(run):
        (batch, _), *_ = run.data.at(0)
        batch = getattr(batch, "batch", batch)
        for _ in range(2):
            with run.precision.autocast():
                loss = run.task.loss_sum(run.model, batch)
            run.precision.backward(loss)


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
        run.optimizer.torch_optimizer.zero_grad(set_to_none=True)
        restore()
