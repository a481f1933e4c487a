"""Checks that all ranks agree, and ends the run if they don't.

Before the run is built, ranks compare code, versions and settings; when it starts, samples, tensors
in the task's attributes, parameters and buffers. At log steps, they compare metrics already on the
host and, every CHECK_EVERY steps, hashes of parameters and buffers. Nothing runs inside a step.

Docs: docs/verification.md
"""

import hashlib
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_amp.checkpoint.task_state import digest
from dist_amp.config.auto import batch_statistics
from dist_amp.config.task_class import GIVEN, find_task
from dist_amp.config.text import flat
from dist_amp.diagnostics.trace import hash_tensor
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import ConfigError, DataError, NumericsError, some_of
from dist_amp.loading.samples import call_in_worker, sample_bytes, spread
from dist_amp.run import Run
from dist_amp.task import attributes_of
from dist_amp.telemetry.observer import Observer
from dist_amp.telemetry.step_report import GLOBAL, GLOBAL_METRICS, LogRow
from dist_amp.world import World, local

# The only settings that may differ between machines. Others, even those that may change on resume
# (settings.FREE_TO_CHANGE), affect which collectives run or how much data there is.
PER_MACHINE = ("data.path", "data.workers")

CHECK_EVERY = 100  # steps; assumes that hashing all parameters takes less time than a step
COMPARED_SAMPLES = 5  # per split, at the start


# ---- before there is a run: code, versions and settings ----


def check_ranks_agree(target: str, config_text: str, world: World) -> None:
    """Raises ConfigError if code, versions or settings differ from rank 0's."""
    if world.world_size == 1:
        return
    settings = flat(config_text)
    settings |= {key: "set" for key in PER_MACHINE if settings[key] != "off"}
    python = ".".join(platform.python_version_tuple()[:2])
    actual = {"python": python, "torch": torch.__version__, **code_hashes(target), **settings}
    expected = world.from_main(actual)
    differences = [
        f"{name} is {actual.get(name, 'absent')}, but {expected.get(name, 'absent')} on rank 0"
        for name in expected | actual
        if actual.get(name) != expected.get(name)
    ]
    problem = ConfigError(
        f"the ranks differ: on rank {world.rank} ({platform.node()}): {'; '.join(differences[:8])};"
        " start all ranks with the same code, versions and settings (environment, config files)"
    )
    world.raise_first(problem if differences else None)


def code_hashes(target: str) -> dict[str, str]:
    """{file name: hash} of the task's and the package's source, without editors' hidden files."""
    package = Path(__file__).parent.parent
    module = "__main__" if target.startswith(GIVEN) else find_task(target).__module__
    task_file = Path(getattr(sys.modules[module], "__file__", None) or __file__)
    hashes = {}
    for path in (task_file, *sorted(package.rglob("*.py"))):
        name = path.name
        if path.is_relative_to(package):
            name = f"dist_amp/{path.relative_to(package).as_posix()}"
        if "/." not in name:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return hashes


# ---- while it runs ----


class Consistency(Observer):
    """Raises DataError if the ranks' inputs differ, NumericsError if their state has diverged."""

    def __init__(self, run: Run):
        self._run = run
        self._next_check = run.step + 1  # at the first log step
        check_inputs_equal(run)
        check_state_equal(run)

    def on_log(self, row: LogRow) -> None:
        """Check this log step's metrics and, every CHECK_EVERY steps, the state itself."""
        run = self._run
        check_metrics_agree(row)
        if hasattr(run.task, "schedule"):
            from dist_amp.optimizers.groups import check_formula

            check_formula(run.schedule, int(row["applied_steps"]))
        if row.step < min(self._next_check, run.config.train.steps):  # always check the last step
            return
        self._next_check = row.step + CHECK_EVERY
        check_state_equal(run)

    def after_evaluation(self) -> None:
        check_state_equal(self._run, with_batch_statistics=True)


def repeatable_hash(dataset: Any, index: int) -> str:
    """Hash of a sample; "" if it can't be read, or if two reads differ (random augmentation)."""
    try:
        first, second = [sample_bytes(dataset, index) for _ in range(2)]
    except Exception:  # the step that needs the sample raises the error
        return ""
    return hashlib.sha256(first).hexdigest() if first == second else ""


def check_inputs_equal(run: Run) -> None:
    """Raises DataError if samples, or tensors in the task's attributes, differ from rank 0's."""
    world = run.world
    if world.world_size == 1:
        return
    state = random_state(world.device)  # reading samples may draw random numbers
    inputs: dict[str, Any] = {}
    for data in filter(None, (run.data, run.validation)):
        inputs[f"the length of the {data.split} split"] = data.plan.length
        fingerprint = getattr(data.fetch.dataset, "fingerprint", None)
        if isinstance(fingerprint, str):
            inputs[f"the {data.split} split"] = fingerprint
            continue
        indices = spread(data.plan.length, COMPARED_SAMPLES)
        hashes = call_in_worker(repeatable_hash, data, indices)
        for index, value in zip(indices, hashes, strict=True):
            inputs[f"sample {index} of the {data.split} split"] = value
    set_random_state(state, world.device)
    for name, leaves in attributes_of(run.task, run.parallel.module).items():
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs[f"the task's attribute {name}"] = [digest(tensor) for tensor in tensors]
    inputs_by_rank = world.gather(inputs)
    for name in dict.fromkeys(name for each in inputs_by_rank for name in each):
        values = [each.get(name) for each in inputs_by_rank]
        differing = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if differing and "" not in values:  # "": not repeatable, so not comparable
            raise DataError(
                f"{name} is not the same on rank {some_of(differing)} as on rank 0; build_dataset "
                "must return the full dataset on every rank, because dist_amp shards it; random "
                "values that the task stores must come from a fixed seed, or be drawn in its "
                "constructor or build_model from the global generators of torch, NumPy or Python"
            )


def check_state_equal(run: Run, with_batch_statistics: bool = False) -> None:
    """Check parameters and buffers now. Raises the same NumericsError on all ranks."""
    if mismatch := find_mismatch(run, with_batch_statistics):
        raise NumericsError(mismatch)


def find_mismatch(run: Run, with_batch_statistics: bool = False) -> str:
    """Describes the first parameter or buffer that differs between ranks, or "". A collective."""
    world = run.world
    if world.world_size == 1:
        return ""
    parameters = dict(run.parallel.module.named_parameters())
    buffers = compared_buffers(run, with_batch_statistics)
    names = [*parameters, *buffers]
    tensors = [*parameters.values(), *buffers.values()]
    hashes_here = [hash_tensor(local(tensor)).to(world.device) for tensor in tensors]
    hashes = world.stack(torch.stack(hashes_here).cpu()).numpy()  # [ranks, tensors]
    # Ranks i and i + stride hold the same shards; buffers are whole on every rank.
    stride = world.world_size // run.parallel.replicas
    expected = hashes[np.arange(len(hashes)) % stride]
    expected[:, len(parameters) :] = hashes[0, len(parameters) :]
    different_ranks, columns = np.nonzero(hashes != expected)
    if not len(columns):
        return ""
    rank, column = different_ranks[0], columns[0]
    text = f"{names[column]} is not the same on ranks"
    if column < len(parameters):
        return (
            f"the parameter {text} {rank % stride} and {rank} after step {run.step}; every rank "
            "must start with the same weights and apply the same update"
        )
    return (
        f"the buffer {text} 0 and {rank} after step {run.step}; if forward updates it from the "
        "batch, average it over the ranks there or in on_step(run, report)"
    )


def compared_buffers(run: Run, with_batch_statistics: bool = False) -> dict[str, Tensor]:
    """Buffers that must be equal on all ranks: batch statistics only after they were averaged.

    Non-persistent buffers, such as caches, are left out: they may depend on a rank's own batches.
    """
    module = run.parallel.module
    left_out = {} if with_batch_statistics else batch_statistics(module)
    saved = module.state_dict().keys() - left_out.keys()
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and buffer.layout == torch.strided and not buffer.is_nested
    }


def check_metrics_agree(row: LogRow) -> None:
    """Raises NumericsError if a global metric differs between ranks."""
    values = row.table[:, GLOBAL]
    both_nan = np.isnan(values) & np.isnan(values[0])
    ranks, columns = np.nonzero((values != values[0]) & ~both_nan)
    if not len(ranks):
        return
    first = columns.argmin()  # the first of GLOBAL_METRICS that differs
    rank, column = ranks[first], columns[first]
    raise NumericsError(
        f"step {row.step}: {GLOBAL_METRICS[column]} is {values[rank, column]} on rank {rank} and "
        f"{values[0, column]} on rank 0; all ranks must make the same decision, from sums over all "
        "ranks and never from one rank's gradients"
    )
