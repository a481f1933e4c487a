"""Consistency checks: what must be equal, or must differ, between the ranks for training to be correct.

A loop that is subtly wrong still learns. These checks stop it with the rank and the cause: at the start, at every log
step by metrics that are on the host anyway, and every `debug.check_every` steps by a hash of each tensor's bits.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_amp.data import Padding
from dist_amp.errors import DataError, NumericsError
from dist_amp.fast.fused import local
from dist_amp.optim import learning_rate
from dist_amp.run import Run
from dist_amp.runtime.batch_statistics import batch_statistics
from dist_amp.runtime.nested import tensors
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.telemetry.log_row import GLOBAL, GLOBAL_METRICS, LogRow
from dist_amp.telemetry.observer import Observer

SAMPLED_STEPS = 16  # consecutive steps whose samples are compared between ranks

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNK = 2**20  # elements hashed at a time, which bounds the memory it takes

SAMPLED_ELEMENTS = 2**16  # of a batch's tensor that are hashed, evenly spread


class Consistency(Observer):
    """Runs the checks; off with debug.check_every=off.

    Errors: NumericsError if the ranks' models, optimizers or loss scales have diverged; DataError for the data.
    """

    def __init__(self, run: Run):
        self._run = run
        self._every = run.config.debug.check_every
        self._next_check = run.step + 1  # at the first log step
        self._samples: list[Tensor] = []  # a hash of each sampled step's micro-batches
        if self._every == "off":
            return
        check_start(run)
        self._generators = generator_hashes(run)
        self._start = (run.scaler.scale_tensor.item(), *run.schedule.counters.tolist()[:2])

    def after_step(self, report: StepReport, micro_batches: Sequence[Any]) -> None:
        if self._every != "off" and len(self._samples) < SAMPLED_STEPS:
            self._samples.append(hash_samples(micro_batches, self._run.world.device))

    def on_log(self, row: LogRow) -> None:
        """Check this log step's metrics and, every `debug.check_every` steps, the state itself."""
        if self._every == "off":
            return
        run = self._run
        check_metrics_agree(row)
        check_schedule(run, row)
        check_loss_scale(run, row, *self._start)
        if row.step < min(self._next_check, run.config.train.steps):
            return
        self._next_check = row.step + self._every
        check_samples_differ(run, self._samples)
        if len(self._samples) == SAMPLED_STEPS:
            self._samples = []
        before, self._generators = self._generators, generator_hashes(run)
        check_random_numbers_differ(before, self._generators)
        check_state(run)

    def after_evaluation(self) -> None:
        if self._every != "off" and (mismatch := find_mismatch(self._run, with_batch_statistics=True)):
            raise NumericsError(mismatch)


def check_start(run: Run) -> None:
    """Check what must hold before the first step. Errors: DataError, NumericsError."""
    held_out = run.validation.plan.length if run.validation else 0
    lengths = [f"{own:.0f} + {other:.0f}" for own, other in run.world.gather_numbers([run.data.plan.length, held_out])]
    if len(set(lengths)) > 1:
        counts = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
        raise DataError(
            f"the training + validation datasets have different lengths on the ranks ({counts}); build_dataset must "
            "return the full dataset on every rank, dist_amp shards it"
        )
    check_state(run)


def check_state(run: Run) -> None:
    """Check parameters, optimizer and buffers as they are now. Errors: NumericsError, the same on every rank."""
    texts = run.world.gather_texts(find_second_mesh(run) or find_unowned_parameter(run))
    if fault := next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "") or find_mismatch(run):
        raise NumericsError(fault)


def find_unowned_parameter(run: Run) -> str:
    """Which parameter a step would not update, because the optimizer holds other tensors; "" if none."""
    owned = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    lost = [name for name, p in run.parallel.module.named_parameters() if p.requires_grad and id(p) not in owned]
    if not lost:
        return ""
    return (
        f"the optimizer does not hold the model's parameter {lost[0]} ({len(lost)} in all): it was built before the "
        "model was sharded, moved or changed; build it afterwards"
    )


def find_second_mesh(run: Run) -> str:
    """Which parameters are on two meshes, where norms and skips would differ between ranks; "" if all are on one."""
    meshes: dict[str, str] = {}
    for name, parameter in run.parallel.module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        meshes.setdefault("no mesh" if mesh is None else f"{mesh} of ranks {mesh.mesh.tolist()}", name)
    if len(meshes) < 2:
        return ""
    (mesh, first), (other_mesh, second) = list(meshes.items())[:2]
    return (
        f"the parameters are on two meshes: {first} on {mesh}, {second} on {other_mesh}; the gradient norm and the "
        "decision to skip need one mesh: shard the whole model over the same one"
    )


def generator_hashes(run: Run) -> list[str]:
    """Each rank's generator state as a hash; that of the device, which draws the dropout masks."""
    state = torch.cuda.get_rng_state(run.world.device) if run.world.device.type == "cuda" else torch.get_rng_state()
    return run.world.gather_texts(hashlib.sha256(state.numpy().tobytes()).hexdigest())


def check_random_numbers_differ(before: list[str], now: list[str]) -> None:
    """Errors: NumericsError if two ranks' generators were equal, have drawn numbers since, and are equal again."""
    drawing = [(old, new) if new != old else rank for rank, (old, new) in enumerate(zip(before, now, strict=True))]
    if pair := _equal_pair(drawing):
        raise NumericsError(
            f"ranks {pair[0]} and {pair[1]} draw the same random numbers, and so the same dropout masks; seed each "
            "with its rank, as build_run does after the model is built"
        )


def check_samples_differ(run: Run, samples: list[Tensor]) -> None:
    """Errors: DataError if two ranks got the same samples in every step, and that can't be by chance."""
    if not samples or run.world.world_size == 1:
        return
    rows = run.world.gather(torch.stack(samples)).tolist()
    kinds, pairs = len({value for row in rows for value in row}), math.comb(len(rows), 2)
    by_chance = pairs * float(kinds) ** -len(samples)  # few distinct batches, as of small data, coincide now and then
    pair = _equal_pair(map(tuple, rows))
    if pair and by_chance < 1e-6:
        raise DataError(
            f"ranks {pair[0]} and {pair[1]} were fed the same samples up to step {run.step}: some samples count twice, "
            "others never; build_dataset must return the full dataset on every rank, only data.py shards it"
        )


def check_metrics_agree(row: LogRow) -> None:
    """Errors: NumericsError for a global metric that is not the same on all ranks."""
    values = row.table[:, GLOBAL]
    differs = values != values[0]
    if not differs.any():
        return
    differs &= ~(np.isnan(values) & np.isnan(values[0]))
    for name, own, odd in zip(GLOBAL_METRICS, values.T, differs.T, strict=True):
        if odd.any():
            rank = int(odd.argmax())
            raise NumericsError(
                f"step {row.step}: {name} is {own[rank]} on rank {rank} and {own[0]} on rank 0; all ranks must take "
                "one decision: from sums over all ranks, never from one rank's gradients"
            )


def check_schedule(run: Run, row: LogRow) -> None:
    """Errors: NumericsError if the step counts don't add up, or the learning rate is not that of the applied steps."""
    applied, skipped = int(row["applied_steps"]), int(row["skipped_steps"])
    if applied + skipped != row.step:
        raise NumericsError(
            f"step {row.step}: {applied} applied and {skipped} skipped steps do not make {row.step} on any rank; the "
            "optimizer must be applied once per step"
        )
    before = max(applied - (row["skips_in_a_row"] == 0), 0)
    expected = learning_rate(run.config.optim, before, run.config.train.steps, run.task)
    if abs(row["lr"] - expected) > 1e-6 * run.config.optim.lr:  # the table is float32
        raise NumericsError(
            f"step {row.step}: the learning rate on all ranks is {row['lr']:.6g}, not {expected:.6g} as after {before} "
            f"applied steps ({skipped} were skipped); the schedule moved on a skipped step, or was stepped twice"
        )


def check_loss_scale(run: Run, row: LogRow, scale: float, applied: int, skipped: int) -> None:
    """Errors: NumericsError for a loss scale that can't result from this run's applied and skipped steps.

    scale, applied, skipped: their values when the run started.
    """
    if not run.scaler.scales:
        return
    scaler = run.config.precision.scaler
    applied_since, skipped_since = row["applied_steps"] - applied, row["skipped_steps"] - skipped
    most = applied_since // scaler.growth_interval + 1  # one growth may have been nearly due at the start
    growth = math.log(scaler.growth_factor)
    # In logarithms: thousands of skips would overflow a product.
    grown = 0.0
    if row["loss_scale"]:
        grown = math.log(row["loss_scale"] / scale) - skipped_since * math.log(scaler.backoff_factor)
    growths = round(grown / growth)
    if not 0 <= growths <= most or abs(grown - growths * growth) > 1e-3:
        raise NumericsError(
            f"step {row.step}: a loss scale of {row['loss_scale']:g} (on all ranks) does not follow from {scale:g} by "
            f"{applied_since:.0f} applied and {skipped_since:.0f} skipped steps; the scaler's update() must run "
            "exactly once per step"
        )


def find_mismatch(run: Run, with_batch_statistics: bool = False) -> str:
    """Which parameter or buffer differs between ranks that should hold equal copies; "" if none. Every rank calls it.

    with_batch_statistics: whether running means and variances were just averaged, and are compared too.
    """
    world, module = run.world, run.parallel.module
    if world.world_size == 1:
        return ""
    persistent = module.state_dict().keys()  # other buffers are caches, and may depend on a rank's own batches
    left_out = {} if with_batch_statistics else batch_statistics(run.parallel.module)
    parameters = dict(module.named_parameters())
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in persistent and name not in left_out and _is_strided(buffer)
    }
    names = " ".join([*parameters, *buffers])
    names_hash = int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], signed=True)
    parameter_hashes, buffer_hashes = hash_each(parameters, world.device), hash_each(buffers, world.device)
    own = [torch.tensor(names_hash, device=world.device), hash_tensor(parameter_hashes), hash_tensor(buffer_hashes)]
    rows = world.gather(torch.stack(own)).tolist()  # the same on every rank, and so is the verdict

    stride = world.world_size // run.parallel.replicas  # between ranks that hold the same shards
    for rank, (its_names, its_parameters, its_buffers) in enumerate(rows):
        if its_names != rows[0][0]:
            texts = world.gather_texts(names)
            odd = sorted(set(texts[0].split()) ^ set(texts[rank].split()))
            return f"ranks 0 and {rank} do not have the same parameters and buffers: {odd[0] if odd else 'their order'}"
        if its_parameters != rows[rank % stride][1]:
            name = list(parameters)[_first_difference(run, parameter_hashes, rank % stride, rank)]
            return (
                f"the parameter {name} is not the same on ranks {rank % stride} and {rank} after step {run.step}; "
                "every rank must start with the same weights and apply the same update"
            )
        if its_buffers != rows[0][2]:
            name = list(buffers)[_first_difference(run, buffer_hashes, 0, rank)]
            return (
                f"the buffer {name} is not the same on ranks 0 and {rank} after step {run.step}; a buffer that is "
                "updated from a rank's own batch must be reduced over the ranks"
            )
    return ""


def _first_difference(run: Run, hashes: Tensor, rank: int, other: int) -> int:
    rows = run.world.gather(hashes)
    return int((rows[rank] != rows[other]).nonzero()[0])


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def hash_each(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """[len(tensors)] int64 on `device`: the hash of this rank's part of each tensor."""
    hashes = [hash_tensor(local(tensor)).to(device) for tensor in tensors.values()]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def hash_tensor(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits and their order: scalar int64 on its device; equal by chance for 1 pair in 2^63."""
    values = tensor.detach().resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.reshape(-1).view(BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = torch.arange(1, min(CHUNK, bits.numel()) + 1, device=bits.device) * 0x5851F42D4C957F2D
    for chunk in bits.split(CHUNK):
        total = total * 0x14057B7EF767814F + (chunk * factors[: len(chunk)]).sum()
    return total


def hash_samples(micro_batches: Iterable[Any], device: torch.device) -> Tensor:
    """A hash of what a step was fed: scalar int64 on the device, without waiting for it; padding is left out."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tensors([batch for batch in micro_batches if not isinstance(batch, Padding)]):
        if _is_strided(leaf):
            flat = leaf.reshape(-1)
            total += hash_tensor(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]).to(device)
    return total


def _equal_pair(values: Iterable[object]) -> tuple[int, int] | None:
    """The first two ranks with the same value."""
    first: dict[object, int] = {}
    for rank, value in enumerate(values):
        if first.setdefault(value, rank) != rank:
            return first[value], rank
    return None
