"""The state in a checkpoint: taken from a run, restored into a run of any strategy and world size.

    model, optimizer      parameters and moments, by name, sharded as the run shards them
    counters, scaler      applied and skipped steps; the loss scale
    ranks.N               each rank's random generators and batch statistics
    interval              metrics since the latest log step, a row per rank
    ema, frozen, ...      tensors of the observers that have a `section`
    task.N, observer X.N  other states, packed as bytes by each rank (packed.py)

Python values, such as the step and the position in the data, are in the manifest. A load builds the
same dict from the new run, lets DCP (torch.distributed.checkpoint) fill its tensors in place, which
reshards them, and then sets them in the run.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dist_amp import __version__
from dist_amp.checkpoint.compatibility import check_tensors, continue_data, fingerprint
from dist_amp.checkpoint.format import (
    Manifest,
    Reader,
    State,
    read_into,
    rejection_as_data_error,
)
from dist_amp.config.auto import batch_statistics
from dist_amp.distributed.process import random_state, seed_all, set_random_state
from dist_amp.errors import CheckpointRejected, DataError
from dist_amp.parallel import averaged_statistics, set_statistics
from dist_amp.step import Run


def take_snapshot(run: Run) -> tuple[State, Manifest]:
    """The run's state, as references to its tensors, and its manifest; every rank calls it."""
    from dist_amp.checkpoint.packed import packed_states

    state = state_of(run)
    state["model"] |= averaged_statistics(run.parallel.module, run.world)
    state["interval"] = run.world.stack(run.metrics.unfinished_sums(run.data))
    if "frozen" in state:  # checksums are saved in place of the frozen parameters
        from dist_amp.scaling.frozen import put_checksums

        put_checksums(state, run.parallel.module, state["frozen"])
    state |= packed_states(run)
    manifest = Manifest(
        step=run.step,
        samples=run.data.position,
        world_size=run.world.world_size,
        strategy=run.parallel.strategy,
        precision=run.precision.name,
        device=run.world.device.type,
        seed=run.config.run.seed,
        global_batch_size=run.data.plan.global_batch_size,
        data_length=run.data.plan.length,
        data_fingerprint=fingerprint(run.data, run.world),
        optimizer=group_sizes(run),
        evaluation=run.metrics.evaluation,
        evaluated_step=run.metrics.evaluated_step,
        best=run.metrics.best,
        order=run.data.plan.order,
        lr_factor=run.schedule.factor,
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "dist_amp": __version__,
        },
    )
    return state, manifest


def load(run: Run, path: Path) -> None:
    """Restore the run from a checkpoint; every rank calls it. Raises DataError if it can't be."""
    with rejection_as_data_error(path):
        reader = Reader(path)
        continue_data(run, reader.folder, reader.manifest)
        state = read_state(run, reader)
        set_state(run, reader.manifest, state)
    if run.schedule.factor != 1:
        run.world.say(f"lr     times {run.schedule.factor:g}, as set before the checkpoint")
    run.resumed_from_step = run.step
    run.resumed_from = path


def read_state(run: Run, reader: Reader) -> State:
    """The checkpoint's state, sharded like the run's; only the sections that both of them have."""
    from dist_amp.checkpoint.packed import expected_states

    manifest = reader.manifest
    metadata = reader.read_metadata()
    saved = {name.partition(".")[0] for name in metadata.state_dict_metadata}  # sections
    state = state_of(run, with_moments="optimizer" in saved)
    if manifest.precision != "fp16":  # only fp16 has a loss scale to restore
        del state["scaler"]
    if (manifest.world_size, manifest.device) != (run.world.world_size, run.world.device.type):
        del state["ranks"]  # the states of other ranks, or of another device, do not fit
    for name in sections(run).keys() - saved:
        state.pop(name, None)
    if "ema" in saved and "ema" not in state:
        run.world.warn(
            f"the average of the weights in {reader.folder} is dropped, since optim.ema=off"
        )
    # Its size comes from the checkpoint: those of earlier versions have fewer columns.
    size: Any = getattr(metadata.state_dict_metadata.get("interval"), "size", ())
    if len(size) != 2 or size[0] != manifest.world_size or size[1] < 3:
        raise CheckpointRejected(f".metadata has interval of {list(size)}, not a row per rank")
    state["interval"] = torch.zeros(size, dtype=torch.float64)
    if "frozen" in saved or any(not p.requires_grad for p in run.parallel.module.parameters()):
        from dist_amp.scaling.frozen import expect_checksums

        expect_checksums(state, run.parallel.module, metadata, reader.folder)
    check_tensors(reader.folder, metadata, "model", state["model"])
    if manifest.optimizer != group_sizes(run):
        raise DataError(
            f"checkpoint {reader.folder} does not fit this optimizer: its groups and their "
            f"parameters are {manifest.optimizer}, here {group_sizes(run)}"
        )
    # There is no "optimizer" section if no step was applied before the save.
    for section in (state.keys() & saved) - {"model", "ranks"}:
        check_tensors(reader.folder, metadata, section, state[section])
    state |= expected_states(run, metadata.state_dict_metadata, manifest.world_size)
    read_into(state, reader, run.world)
    return state


def set_state(run: Run, manifest: Manifest, state: State) -> None:
    from dist_amp.checkpoint.packed import load_packed

    options = StateDictOptions(strict="frozen" not in state)  # frozen parameters are not in it
    set_model_state_dict(run.parallel.module, state["model"], options=options)
    if state["optimizer"]:  # hyperparameters come from this run's config
        groups = get_optimizer_state_dict(run.parallel.module, run.optimizer)["param_groups"]
        moments: State = {"state": state["optimizer"], "param_groups": groups}
        set_optimizer_state_dict(run.parallel.module, run.optimizer, moments, options=options)
    for section, observer in sections(run).items():
        observer.load_state_dict(state.get(section, {}))
    load_packed(run, state, manifest.world_size)
    run.schedule.load(state["counters"], manifest.lr_factor)
    if "scaler" in state:
        run.scaler.load_state_dict(state["scaler"])
    run.step = manifest.step
    run.data.position = manifest.samples
    run.metrics.evaluation = manifest.evaluation
    run.metrics.best = manifest.best
    run.metrics.evaluated_step = manifest.evaluated_step
    run.metrics.resume_unfinished(state["interval"], same_world="ranks" in state)
    if "ranks" in state:
        rank_state = state["ranks"][str(run.world.rank)]
        set_statistics(run.parallel.module, rank_state["statistics"])
        set_random_state(rank_state["random"], run.world.device)
    else:
        # The seed depends on the step, or dropout would repeat the masks of the first steps.
        seed_all((run.config.run.seed + 1 + run.world.rank + 1_000_003 * run.step) % 2**63)


def state_of(run: Run, with_moments: bool = False) -> State:
    """Everything that a step depends on, as tensors: to be saved, or to be overwritten by a load.

    with_moments: create the optimizer's moments if there are none; torch takes a step for that.
    """
    optimizer: Any = {}
    has_moments = any(run.optimizer.state.values())
    if with_moments and not has_moments:
        run.optimizer.state.clear()  # torch creates moments only if it is empty
    if has_moments or with_moments:
        optimizer = get_optimizer_state_dict(run.parallel.module, run.optimizer)["state"]
    # Of this rank's batches; in "model" a checkpoint has their average over the ranks.
    statistics = batch_statistics(run.parallel.module)
    rank_state = {
        "random": random_state(run.world.device),
        "statistics": {name: value.clone() for name, value in statistics.items()},
    }
    state = {
        "model": get_model_state_dict(run.parallel.module),
        "optimizer": optimizer,  # without hyperparameters, which come from the config
        "counters": run.schedule.counters,
        "scaler": run.scaler.state_dict(),
        "ranks": {str(run.world.rank): rank_state},
    }
    for section, observer in sections(run).items():
        if (tensors := observer.state_dict()) is not None:
            state[section] = tensors
    return state


def sections(run: Run) -> dict[str, Any]:
    """{section of a checkpoint: the observer that saves its tensors there}."""
    observers = [observer for observer in run.observers if hasattr(observer, "section")]
    return {observer.section: observer for observer in observers}


def group_sizes(run: Run) -> dict[str, int]:
    """{"OPTIMIZER GROUP": number of the group's parameters}."""
    name: str = run.config.optim.name
    if hasattr(run.task, "optimizer"):
        name = type(run.optimizer).__name__
    return {f"{name} {group['name']}": len(group["params"]) for group in run.optimizer.param_groups}
