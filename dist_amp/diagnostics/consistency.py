"""Consistency checks: what must be equal, or must differ, between the ranks.

At the start, at every log step by metrics that are on the host anyway, and every CHECK_EVERY steps
by a hash of each tensor's bits.

Docs: docs/verification.md
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_amp.checkpoint.task_state import digest
from dist_amp.config.auto import batch_statistics
from dist_amp.data import Padding
from dist_amp.diagnostics.trace import hash_tensor
from dist_amp.distributed.process import random_state, set_random_state
from dist_amp.errors import DataError, NumericsError, some_of
from dist_amp.loading.loader import load
from dist_amp.loading.nested import tensors
from dist_amp.loading.samples import sample_bytes, spread
from dist_amp.run import Run
from dist_amp.task import kept_by
from dist_amp.telemetry.step_report import GLOBAL, GLOBAL_METRICS, LogRow, Observer, StepReport
from dist_amp.world import local

CHECK_EVERY = 100  # steps; assumed: it hashes all parameters, in less than a step's time
SAMPLED_STEPS = 16  # consecutive steps whose samples are compared between ranks
SAMPLED_ELEMENTS = 2**16  # of a batch's tensor that are hashed, evenly spread
COMPARED_SAMPLES = 5  # of each split, at the start


class Consistency(Observer):
    """Errors: NumericsError if models, optimizers or loss scales have diverged; DataError."""

    def __init__(self, run: Run):
        self._run = run
        self._next_check = run.step + 1  # at the first log step
        self._samples: list[Tensor] = []  # a hash of each sampled step's micro-batches
        check_start(run)
        self._generators = generator_hashes(run)
        self._has_warned = False  # of a buffer that is not saved

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if len(self._samples) < SAMPLED_STEPS:
            self._samples.append(hash_samples(micro_batches, self._run.world.device))

    def on_log(self, row: LogRow) -> None:
        """Check this log step's metrics and, every CHECK_EVERY steps, the state itself."""
        run = self._run
        check_metrics_agree(row)
        check_schedule(run, row)
        if row.step < min(self._next_check, run.config.train.steps):
            return
        self._next_check = row.step + CHECK_EVERY
        check_samples_differ(run, self._samples)
        if len(self._samples) == SAMPLED_STEPS:
            self._samples = []
        before = self._generators
        self._generators = generator_hashes(run)
        check_random_numbers_differ(before, self._generators)
        check_state(run)
        self._has_warned = self._has_warned or warn_of_unsaved_buffer(run)

    def after_evaluation(self) -> None:
        if mismatch := find_mismatch(self._run, with_batch_statistics=True):
            raise NumericsError(mismatch)


# ---- the state: at the start, and every CHECK_EVERY steps ----


def check_start(run: Run) -> None:
    """Check what must hold before the first step. Errors: DataError, NumericsError."""
    validation = run.validation.plan.length if run.validation else 0
    rows = run.world.gather([run.data.plan.length, validation])
    lengths = [f"{train} + {validation}" for train, validation in rows]
    if len(set(lengths)) > 1:
        counts = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
        raise DataError(
            f"the training + validation datasets have different lengths on the ranks ({counts}); "
            "build_dataset must return the full dataset on every rank, dist_amp shards it"
        )
    if run.world.world_size > 1:
        check_samples_equal(run)
    check_kept(run)
    check_state(run)


class SampleHashes:
    """Map-style view of a dataset; "" for a sample that can't be read twice with the same result,
    such as a random one.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, index: int) -> str:
        try:
            first, again = [sample_bytes(self.dataset, index) for _ in range(2)]
        except Exception:  # the step that needs the sample raises the error
            return ""
        return hashlib.sha256(first).hexdigest() if first == again else ""


def check_samples_equal(run: Run) -> None:
    """Errors: DataError if a rank has other samples than rank 0, as with a shard of its own."""
    world = run.world
    before = random_state(world.device)
    hashes: dict[str, str] = {}
    for data in filter(None, (run.data, run.validation)):
        known = getattr(data.fetch.dataset, "fingerprint", None)
        if isinstance(known, str):
            hashes[f"the {data.split} split"] = known
            continue
        indices = spread(data.plan.length, COMPARED_SAMPLES)
        # In a worker if there are any: a file that is open before they fork would be shared.
        workers = min(1, run.config.data.workers)
        fetch = SampleHashes(data.fetch.dataset)
        read, close = load(
            fetch, indices.__iter__, workers=workers, pin_memory=False, rank=world.rank
        )
        for index in indices:
            hashes[f"sample {index} of the {data.split} split"] = next(read)
        close()
    set_random_state(before, world.device)
    of_ranks = world.gather(hashes)
    for name in hashes:
        values = [of_rank.get(name) for of_rank in of_ranks]
        differing = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if differing and all(values):
            raise DataError(
                f"{name} is not the same on rank {some_of(differing)} as on rank 0; build_dataset "
                "must return the full dataset on every rank, dist_amp shards it"
            )


def check_kept(run: Run) -> None:
    """Errors: DataError for a tensor that the task keeps and that differs between ranks."""
    kept = kept_by(run.task, run.parallel.module)
    hashes = {
        name: [digest(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        for name, leaves in kept.items()
    }
    first, *others = run.world.gather(hashes)
    for rank, other in enumerate(others, start=1):
        for name, value in other.items():
            if value != first.get(name):
                raise DataError(
                    f"the task's attribute {name} is not the same on ranks 0 and {rank}; draw it "
                    "with a fixed seed, or from the generators of torch, NumPy and Python, which "
                    "have the same seed on every rank in its constructor and build_model"
                )


def check_state(run: Run) -> None:
    """Check parameters, optimizer and buffers now. Errors: NumericsError, the same on all ranks."""
    fault = find_misplaced_parameter(run)
    run.world.raise_first(NumericsError(f"rank {run.world.rank}: {fault}") if fault else None)
    if mismatch := find_mismatch(run):
        raise NumericsError(mismatch)


def find_misplaced_parameter(run: Run) -> str:
    """Which parameters are on two meshes, or not held by the optimizer; "" if none."""
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    lost = []
    first_of_mesh: dict[str, str] = {}
    for name, parameter in run.parallel.module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        text = f"{mesh} of ranks {mesh.mesh.tolist()}" if mesh else "no mesh"
        first_of_mesh.setdefault(text, name)
        if parameter.requires_grad and id(parameter) not in held:
            lost.append(name)
    if len(first_of_mesh) > 1:
        places = [f"{name} on {mesh}" for mesh, name in first_of_mesh.items()]
        return (
            f"the parameters are on two meshes: {places[0]}, {places[1]}; the gradient norm and "
            "the decision to skip need one mesh: shard the whole model over the same one"
        )
    if lost:
        return (
            f"the optimizer does not hold the model's parameter {lost[0]} ({len(lost)} in all): it "
            "was built before the model was sharded, moved or changed; build it afterwards"
        )
    return ""


def find_mismatch(run: Run, with_batch_statistics: bool = False) -> str:
    """Which parameter or buffer differs between equal copies; "" if none. Every rank calls it."""
    world = run.world
    if world.world_size == 1:
        return ""
    parameters = dict(run.parallel.module.named_parameters())
    buffers = compared_buffers(run, with_batch_statistics)
    names = [*parameters, *buffers]
    digest = hashlib.sha256(" ".join(names).encode()).digest()
    digests = world.stack(torch.tensor(int.from_bytes(digest[:8], signed=True))).tolist()
    for rank, other in enumerate(digests):
        if other != digests[0]:
            texts = world.gather(" ".join(names))
            different = sorted(set(texts[0].split()) ^ set(texts[rank].split()))
            which = (*different, "their order")[0]
            return f"ranks 0 and {rank} do not have the same parameters and buffers: {which}"
    compared = [*parameters.values(), *buffers.values()]
    hashes_here = [hash_tensor(local(tensor)).to(world.device) for tensor in compared]
    hashes = world.stack(torch.stack(hashes_here).cpu()).numpy()  # [ranks, tensors]
    # Ranks that hold the same shards are `stride` apart; buffers are whole on every rank.
    stride = world.world_size // run.parallel.replicas
    expected = hashes[np.arange(len(hashes)) % stride]
    expected[:, len(parameters) :] = hashes[0, len(parameters) :]
    different_ranks, columns = np.nonzero(hashes != expected)
    if not len(columns):
        return ""
    rank, column = different_ranks[0], columns[0]
    first = rank % stride
    what = "parameter"
    rule = "every rank must start with the same weights and apply the same update"
    if column >= len(parameters):
        first = 0
        what = "buffer"
        rule = "if forward updates it from its batch, average it there or in on_step(run, report)"
    where = f"on ranks {first} and {rank} after step {run.step}"
    return f"the {what} {names[column]} is not the same {where}; {rule}"


def compared_buffers(run: Run, with_batch_statistics: bool) -> dict[str, Tensor]:
    """Persistent buffers: others are caches, and may depend on a rank's own batches."""
    module = run.parallel.module
    left_out = {} if with_batch_statistics else batch_statistics(module)
    persistent = module.state_dict().keys() - left_out.keys()
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in persistent and _is_strided(buffer)
    }


def warn_of_unsaved_buffer(run: Run) -> bool:
    """Whether an unsaved buffer differs between ranks in values, not in shape; warns of it."""
    module = run.parallel.module
    saved = module.state_dict().keys()
    hashes = {
        f"{name} {list(buffer.shape)}": int(hash_tensor(buffer))
        for name, buffer in module.named_buffers()
        if name not in saved and _is_strided(buffer)
    }
    rows = run.world.gather(hashes)
    for name, first in rows[0].items():
        for rank, row in enumerate(rows):
            if row.get(name, first) != first:
                run.world.warn(
                    f"the buffer {name}, which no checkpoint has (persistent=False), is not the "
                    f"same on ranks 0 and {rank}; unless it is a cache, save it, and average it "
                    "over the ranks in forward or on_step(run, report)"
                )
                return True
    return False


# ---- random numbers and samples ----


def generator_hashes(run: Run) -> list[str]:
    """Each rank's generator state as a hash; that of the device, which draws the dropout masks."""
    state = torch.get_rng_state()
    if run.world.device.type == "cuda":
        state = torch.cuda.get_rng_state(run.world.device)
    return run.world.gather(hashlib.sha256(state.numpy().tobytes()).hexdigest())


def check_random_numbers_differ(before: list[str], now: list[str]) -> None:
    """Errors: NumericsError if two generators were equal, have drawn since, and are equal again."""
    pairs = enumerate(zip(before, now, strict=True))
    if pair := _equal_pair({rank: states for rank, states in pairs if states[0] != states[1]}):
        raise NumericsError(
            f"ranks {pair[0]} and {pair[1]} draw the same random numbers, and so the same dropout "
            "masks; seed each with its rank, as build_run does after the model is built"
        )


def check_samples_differ(run: Run, samples: list[Tensor]) -> None:
    """Errors: DataError if two ranks got the same samples in every step, too often for chance."""
    if not samples or run.world.world_size == 1:
        return
    rows = run.world.stack(torch.stack(samples)).tolist()
    # Few distinct batches, as with little data, coincide now and then.
    kinds = len({value for row in rows for value in row})
    by_chance = math.comb(len(rows), 2) * float(kinds) ** -len(samples)
    pair = _equal_pair({rank: tuple(row) for rank, row in enumerate(rows)})
    if pair and by_chance < 1e-6:
        raise DataError(
            f"ranks {pair[0]} and {pair[1]} were fed the same samples up to step {run.step}: some "
            "samples count twice, others never; build_dataset must return the full dataset on "
            "every rank, only data.py shards it"
        )


def _equal_pair(values: Mapping[int, object]) -> tuple[int, int] | None:
    """The first two ranks with the same value; values: by rank."""
    first: dict[object, int] = {}
    for rank, value in values.items():
        if first.setdefault(value, rank) != rank:
            return first[value], rank
    return None


# ---- the metrics of a log step ----


def check_metrics_agree(row: LogRow) -> None:
    """Errors: NumericsError for a global metric that is not the same on all ranks."""
    values = row.table[:, GLOBAL]
    both_nan = np.isnan(values) & np.isnan(values[0])
    ranks, columns = np.nonzero((values != values[0]) & ~both_nan)
    if not len(ranks):
        return
    first = columns.argmin()
    rank, column = ranks[first], columns[first]
    raise NumericsError(
        f"step {row.step}: {GLOBAL_METRICS[column]} is {values[rank, column]} on rank {rank} and "
        f"{values[0, column]} on rank 0; all ranks must take one decision: from sums over all "
        "ranks, never from one rank's gradients"
    )


def check_schedule(run: Run, row: LogRow) -> None:
    """Errors: NumericsError if the steps, or the learning rate, don't follow the applied steps."""
    applied = int(row["applied_steps"])
    skipped = int(row["skipped_steps"])
    if applied + skipped != row.step:
        raise NumericsError(
            f"step {row.step}: {applied} applied and {skipped} skipped steps do not make "
            f"{row.step} on any rank; the optimizer must be applied once per step"
        )
    # The rate is that of the last step, which counts if it was applied.
    before = max(applied - (row["skips_in_a_row"] == 0), 0)
    if hasattr(run.task, "schedule"):
        from dist_amp.optimizers.groups import check_formula

        check_formula(run.schedule, before)
    expected = run.schedule.formula(before) * row["lr_factor"]
    if abs(row["lr"] - expected) > 1e-6 * max(run.config.optim.lr, expected):  # it is float32
        raise NumericsError(
            f"step {row.step}: the learning rate on all ranks is {row['lr']:.6g}, not "
            f"{expected:.6g} as after {before} applied steps ({skipped} were skipped); the "
            "schedule moved on a skipped step, was stepped twice, or the optimizer's rate was set "
            "by something else: change run.schedule.factor instead"
        )


# ---- hashes ----


def hash_samples(micro_batches: Iterable[Any], device: torch.device) -> Tensor:
    """A hash of what a step was fed, without padding: scalar int64 on the device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensors([batch for batch in micro_batches if not isinstance(batch, Padding)]):
        if _is_strided(leaf):
            flat = leaf.reshape(-1)
            total += hash_tensor(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]).to(device)
    return total


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
