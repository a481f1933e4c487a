"""Consistency: what must hold on every rank for training to mean anything, looked at while it runs.

A loop that is subtly wrong still learns. These checks stop it with the rank and the cause instead: at the start, at
every log step by figures that are on the host anyway, and every `debug.check_every` steps by a hash of each tensor's
bits. They only look: a run takes the very same steps without them. To delete: this file and its lines in train.py.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from dist_amp.errors import DataError, NumericsError
from dist_amp.fast.fused import local
from dist_amp.optim import learning_rate
from dist_amp.run import Run
from dist_amp.telemetry.metrics import LogRow

WATCHED_STEPS = 16  # in a row, whose samples are compared between ranks

# Equal on all ranks, because each is computed from sums over all ranks.
OF_THE_WORLD = (
    "loss_scale", "applied_steps", "skipped_steps", "skips_in_a_row", "lr", "weight_sum", "least_weight", "grad_norm",
)  # fmt: skip

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CHUNK = 2**20  # elements that are hashed at a time, which bounds the memory it takes

SAMPLED = 2**16  # elements of a batch's tensor that are hashed, evenly spread


class Consistency:
    """Stands beside the loop: `after_step` with every step's micro-batches, `look` at every log step.

    Errors: NumericsError where the ranks' models, optimizers or scales have parted; DataError for the data.
    """

    def __init__(self, run: Run):
        self._run = run
        self._every = run.config.debug.check_every
        self._next_check = run.step + 1  # the first at the first log step
        self._samples: list[Tensor] = []  # what each watched step was fed, as one number
        if self._every == "off":
            return
        at_start(run)
        self._generators = generator_states(run)
        self._begin = (run.scaler.scale_tensor.item(), *run.schedule.counters.tolist()[:2])

    def after_step(self, micro_batches: Iterable[Any]) -> None:
        """Note what the first steps of an interval were fed; reads nothing."""
        if self._every != "off" and len(self._samples) < WATCHED_STEPS:
            self._samples.append(samples_hash(micro_batches, self._run.world.device))

    def on_log(self, row: LogRow) -> None:
        """The figures of this log step; and, where it is time, the state itself."""
        if self._every == "off":
            return
        run, last_step = self._run, self._run.config.train.steps
        world_agrees(row)
        schedule_follows_applied_steps(run, row)
        scale_follows_the_counts(run, row, *self._begin)
        if row.step >= min(self._next_check, last_step):
            self._next_check = row.step + self._every
            ranks_read_different_samples(run, self._samples)
            if len(self._samples) == WATCHED_STEPS:
                self._samples = []
            before, self._generators = self._generators, generator_states(run)
            ranks_draw_different_numbers(before, self._generators)
            check_state(run)

    def after_averaging(self) -> None:
        """After an evaluation or a checkpoint, before which batch statistics were made equal: whether they are."""
        if self._every != "off" and (fault := disagreement(self._run, averaged=True)):
            raise NumericsError(fault)


def at_start(run: Run) -> None:
    """What must hold before the first step."""
    held_out = run.validation.plan.length if run.validation else 0
    lengths = run.world.gather_texts(f"{run.data.plan.length} + {held_out}")
    if len(set(lengths)) > 1:
        counts = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
        raise DataError(
            f"the datasets, to train and to evaluate on, have not equally many samples on all ranks ({counts}); "
            "build_dataset must return the whole dataset on each, dist_amp deals it out"
        )
    check_state(run)


def check_state(run: Run) -> None:
    """Parameters, optimizer and buffers as they are now; every rank raises if one has a fault."""
    own = run.world.gather_texts(one_mesh(run) or optimizer_owns_live_parameters(run))
    if fault := next((f"rank {rank}: {text}" for rank, text in enumerate(own) if text), disagreement(run)):
        raise NumericsError(fault)


def optimizer_owns_live_parameters(run: Run) -> str:
    """Which parameter a step would not move, because the optimizer holds other tensors; "" if none."""
    owned = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    lost = [name for name, p in run.parallel.module.named_parameters() if p.requires_grad and id(p) not in owned]
    if not lost:
        return ""
    return (
        f"the optimizer does not hold the model's parameter {lost[0]} ({len(lost)} such): it was built before the "
        "model was sharded, moved or changed; build it afterwards"
    )


def one_mesh(run: Run) -> str:
    """Which parameters live on two meshes, so that their norm and their skips would part; "" if all are on one."""
    meshes: dict[str, str] = {}
    for name, parameter in run.parallel.module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        meshes.setdefault("no mesh" if mesh is None else f"{mesh} of ranks {mesh.mesh.tolist()}", name)
    if len(meshes) < 2:
        return ""
    (one, first), (other, second) = list(meshes.items())[:2]
    return (
        f"the parameters live on two meshes: {first} on {one}, {second} on {other}; the gradient norm and the decision "
        "to skip need all on one: shard all of the model over the same mesh"
    )


def generator_states(run: Run) -> list[str]:
    """Each rank's generator as a hash: the one of the device, which draws dropout's masks."""
    state = torch.cuda.get_rng_state(run.world.device) if run.world.device.type == "cuda" else torch.get_rng_state()
    return run.world.gather_texts(hashlib.sha256(state.numpy().tobytes()).hexdigest())


def ranks_draw_different_numbers(before: list[str], now: list[str]) -> None:
    """Errors: NumericsError where two ranks' generators stood alike, and drew, and stand alike again."""
    moved = [
        f"{a} {b}" if a != b else f"rank {rank} draws nothing"
        for rank, (a, b) in enumerate(zip(before, now, strict=True))
    ]
    if pair := _equal_pair(moved):
        raise NumericsError(
            f"ranks {pair[0]} and {pair[1]} draw the same random numbers, hence the same dropout masks; seed each with "
            "its rank, as build_run does after the model is built"
        )


def ranks_read_different_samples(run: Run, samples: list[Tensor]) -> None:
    """Errors: DataError where two ranks were fed the same in every step, and chance can't have done it."""
    if not samples or run.world.world_size == 1:
        return
    rows = run.world.gather(torch.stack(samples)).tolist()
    kinds, pairs = len({value for row in rows for value in row}), math.comb(len(rows), 2)
    by_chance = pairs * float(kinds) ** -len(samples)  # small data, or a label alone, are alike now and then
    pair = _equal_pair([str(row) for row in rows])
    if pair and by_chance < 1e-6:
        raise DataError(
            f"ranks {pair[0]} and {pair[1]} were fed the same samples up to step {run.step}: each sample counts twice "
            "and others never; the dataset must be whole on every rank, and sharded only by data.py"
        )


def world_agrees(row: LogRow) -> None:
    """Errors: NumericsError for a figure of the world that is not the same on all ranks."""
    for name in OF_THE_WORLD:
        values = [str(rank[name]) for rank in row.ranks]
        if len(set(values)) > 1:
            rank = next(r for r, value in enumerate(values) if value != values[0])
            raise NumericsError(
                f"step {row.step}: {name} is {values[rank]} on rank {rank} and {values[0]} on rank 0; one decision "
                "must hold for the world: from sums over all ranks, never from one rank's gradients"
            )


def schedule_follows_applied_steps(run: Run, row: LogRow) -> None:
    """Errors: NumericsError for a learning rate that is not that of the applied steps, or steps that do not add up."""
    applied, skipped = int(row["applied_steps"]), int(row["skipped_steps"])
    if applied + skipped != row.step:
        raise NumericsError(
            f"step {row.step}: {applied} applied and {skipped} skipped steps do not make {row.step} on any rank; the "
            "optimizer must be applied once per step"
        )
    before = applied - (row["skips_in_a_row"] == 0)
    expected = learning_rate(run.config.optim, max(before, 0), run.config.train.steps)
    if abs(row["lr"] - expected) > 1e-6 * run.config.optim.lr:  # the table is float32
        raise NumericsError(
            f"step {row.step}: the learning rate on all ranks is {row['lr']:.6g}, not {expected:.6g} as after {before} "
            f"applied steps ({skipped} were skipped); the schedule moved on a skipped step, or was stepped twice"
        )


def scale_follows_the_counts(run: Run, row: LogRow, scale: float, applied: int, skipped: int) -> None:
    """Errors: NumericsError for a scale that this run's applied and skipped steps can't have led to.

    scale, applied, skipped: where they stood when the run began.
    """
    if not run.scaler.scales:
        return
    knobs = run.config.precision.scaler
    backed_off = row["skipped_steps"] - skipped
    # One growth may have been nearly due when the run began.
    most = (row["applied_steps"] - applied) // knobs.growth_interval + 1
    grown = (
        math.log(row["loss_scale"] / scale) - backed_off * math.log(knobs.backoff_factor) if row["loss_scale"] else 0
    )
    growths = round(grown / math.log(knobs.growth_factor))
    if not 0 <= growths <= most or abs(grown - growths * math.log(knobs.growth_factor)) > 1e-3:
        raise NumericsError(
            f"step {row.step}: a loss scale of {row['loss_scale']:g} (on all ranks) does not follow from {scale:g} by "
            f"{row['applied_steps'] - applied:.0f} applied and {backed_off:.0f} skipped steps; the scaler's update() "
            "must run exactly once per step"
        )


def disagreement(run: Run, averaged: bool = False) -> str:
    """Which parameter or buffer is not the same on ranks that hold copies of it; "" if none. Every rank calls it.

    averaged: whether batch statistics have just been, and are looked at too.
    """
    if run.world.world_size == 1:
        return ""
    parameters = dict(run.parallel.module.named_parameters())
    buffers = dict(_state_buffers(run.parallel.module, averaged))
    own = " ".join([*parameters, *buffers])
    digests = run.world.gather_texts(hashlib.sha256(own.encode()).hexdigest())
    names = run.world.gather_texts(own) if len(set(digests)) > 1 else [own]  # long, where there are many ranks
    if other := next((rank for rank, text in enumerate(names) if text != names[0]), 0):
        odd = sorted(set(names[0].split()) ^ set(names[other].split()))
        return f"ranks 0 and {other} do not have the same parameters and buffers: {odd[0] if odd else 'their order'}"
    fault = _differing(run, "parameter", parameters, _replica_group(run)) if run.parallel.replicas > 1 else ""
    return fault or _differing(run, "buffer", buffers, None)


def _state_buffers(module: nn.Module, averaged: bool) -> Iterator[tuple[str, Tensor]]:
    """Those that belong to the model's state; the others are caches, and may hold what each rank came across."""
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            statistic = isinstance(part, _NormBase) and name in ("running_mean", "running_var")
            if name not in part._non_persistent_buffers_set and (averaged or not statistic) and _plain(buffer):
                yield f"{path}.{name}".lstrip("."), buffer


def _plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _replica_group(run: Run) -> dist.ProcessGroup | None:
    """The ranks that hold the same shards; None: all ranks, each with a whole copy."""
    parameters = run.parallel.module.parameters()
    mesh = next((p.device_mesh for p in parameters if hasattr(p, "device_mesh")), None)
    return None if mesh is None else mesh.get_group(0)


@torch.no_grad()
def _differing(run: Run, kind: str, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> str:
    if not tensors:
        return ""
    mine = torch.stack([tensor_hash(local(tensor)).to(run.world.device) for tensor in tensors.values()])
    bounds = torch.stack([mine, -mine])  # least and greatest in one collective
    dist.all_reduce(bounds, dist.ReduceOp.MIN, group=group)
    apart = (bounds[0] != -bounds[1]).float()
    dist.all_reduce(apart, dist.ReduceOp.MAX)  # other replicas' shards are theirs to compare, ours to know of
    if not apart.any():
        return ""
    index = int(apart.nonzero()[0])
    ranks = run.world.gather(mine[index]).tolist()
    peers = dist.get_process_group_ranks(group) if group is not None else range(run.world.world_size)
    other = next((rank for rank in peers if ranks[rank] != ranks[peers[0]]), None)
    texts = run.world.gather_texts("" if other is None else f"ranks {peers[0]} and {other}")
    where = next(text for text in texts if text)
    mend = (
        "every rank must begin with the same weights and apply the same update"
        if kind == "parameter"
        else "a buffer that is updated from a rank's own batch must be reduced over the ranks"
    )
    return f"the {kind} {list(tensors)[index]} is not the same on {where} after step {run.step}; {mend}"


def tensor_hash(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits and their places: scalar int64 on its device; by chance equal for 1 pair in 2^63."""
    values = tensor.detach().resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.reshape(-1).view(BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    place = torch.arange(1, min(CHUNK, bits.numel()) + 1, device=bits.device) * 0x5851F42D4C957F2D
    for chunk in bits.split(CHUNK):
        total = total * 0x14057B7EF767814F + (chunk * place[: len(chunk)]).sum()
    return total


def samples_hash(micro_batches: Iterable[Any], device: torch.device) -> Tensor:
    """What a step was fed, as one number: scalar int64 on the device; padding counts for nothing."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in tree_leaves(list(micro_batches)):
        if isinstance(leaf, Tensor) and _plain(leaf):
            flat = leaf.reshape(-1)
            total += tensor_hash(flat[:: max(1, flat.numel() // SAMPLED)]).to(device)
    return total


def _equal_pair(values: list[str]) -> tuple[int, int] | None:
    """The first two ranks with the same value."""
    first: dict[str, int] = {}
    for rank, value in enumerate(values):
        if value in first:
            return first[value], rank
        first[value] = rank
    return None
