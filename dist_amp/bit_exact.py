"""Bit-exact training: the same bits on 1, 2, 4, 8, ... ranks, under every strategy.

A sum of floats depends on the order of its terms, so that order is fixed here. A step runs in
rounds of one micro-batch per rank. The micro-batch number `round * world_size + rank` has the same
samples and random numbers on whichever rank it is computed. Gradients are summed in one binary tree
over these numbers: over the ranks of a round by an all-to-all and sums of pairs; over the rounds by
merging partial sums of equal size, as a binary counter carries. Missing micro-batches add zeros.

Docs: docs/bit_exact.md
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from dist_amp.config.auto import batch_statistics
from dist_amp.distributed.process import seed_all
from dist_amp.errors import ConfigError
from dist_amp.loading.plan import Shard
from dist_amp.parallel import Parallel, SumOverRanks
from dist_amp.precision import takes_grad_scale
from dist_amp.settings import Config
from dist_amp.step import Run
from dist_amp.telemetry.metrics import Metrics
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World, all_gather_single, as_scalar, local

CHUNK = 2**22  # elements of a gradient that are squared at a time

# (section, key, values that can be exact, why other values can't)
EXACT = (
    ("parallel", "comm_dtype", ("off",), "compressed gradients are rounded once per rank"),
    ("parallel", "param_dtype", ("fp32",), "other strategies store float32 parameters"),
    ("parallel", "reduce_dtype", ("fp32",), "other strategies reduce in float32"),
    ("parallel", "cpu_offload", (False,), "the CPU rounds differently from the GPU"),
    ("precision", "cast_by", ("auto", "autocast"), "only sharded runs have a policy"),
    ("compile", "mode", ("default", "reduce-overhead"), "it picks kernels by timing them"),
    ("precision", "dtype", ("auto", "bf16", "fp16"), "float8 has one scale per whole tensor"),
)


# ---- the config, and what can't be exact


def exact_config(config: Config, world: World) -> Config:
    """The config, changed as bit-exact training needs. Raises ConfigError if it can't be exact.

    On a CPU it also limits torch to one thread: the order of a sum depends on how many there are.
    """
    ranks = world.world_size
    if ranks & (ranks - 1):
        lower = 2 ** (ranks.bit_length() - 1)
        raise ConfigError(
            f"parallel.bit_exact=true needs a power of two of ranks, not {ranks}: gradients are "
            f"added in pairs; use {lower} or {2 * lower} ranks"
        )
    for section, key, exact, reason in EXACT:
        value = getattr(getattr(config, section), key)
        if value not in exact:
            raise ConfigError(
                f"parallel.bit_exact=true does not allow {section}.{key}={str(value).lower()}: "
                f"{reason}; use {str(exact[0]).lower()}"
            )
    if config.train.global_batch_size == "auto":
        size = config.train.micro_batch_size * ranks
        raise ConfigError(
            "parallel.bit_exact=true needs train.global_batch_size: auto depends on the ranks; "
            f"use train.global_batch_size={size} or another multiple of micro_batch_size"
        )
    on_cpu = world.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    cast_by = "autocast" if config.precision.use_amp else config.precision.cast_by
    return replace(
        config,
        run=replace(config.run, deterministic=config.run.deterministic or not on_cpu),
        precision=replace(config.precision, cast_by=cast_by),
        parallel=replace(config.parallel, accumulate_reduce="every"),
        # A fused kernel on a CPU rounds a shard's tail differently from its body.
        optim=replace(config.optim, fused=config.optim.fused and not on_cpu),
    )


def exact_parallel(run: Run) -> "ExactParallel":
    """Make a new run's gradient reductions bit-exact; returns its new `parallel`.

    Raises ConfigError for a model, task or optimizer whose steps can't be exact.
    """
    module = run.parallel.module
    layers = [name.rpartition(".")[0] for name in batch_statistics(module)]
    reason = ""
    if training := [layer for layer in layers if module.get_submodule(layer).training]:
        layer = f'module "{training[0]}" ({type(module.get_submodule(training[0])).__name__})'
        reason = f"{layer} keeps statistics of each rank's batches; use GroupNorm"
    elif getattr(run.task, "couples_samples", False):
        reason = "the task has couples_samples=True: ranks change its loss; use a loss per sample"
    elif run.world.device.type == "cpu" and takes_grad_scale(run.optimizer):
        reason = "the task's optimizer is fused: a CPU rounds shards differently; use fused=False"
    elif run.parallel.sharded and run.parallel.replicas == run.world.world_size > 2:
        reason = f"parallel.replicas={run.parallel.replicas} shards nothing; use strategy ddp"
    if reason:
        raise ConfigError(f"parallel.bit_exact=true is impossible: {reason}, or bit_exact=false")
    if isinstance(run.parallel.model, DistributedDataParallel):
        run.parallel.model.register_comm_hook(run.world, all_reduce)
    elif run.parallel.sharded:
        reduce_scatter: Any = ReduceScatter(run.parallel)
        for unit in run.parallel.model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
                unit.set_custom_reduce_scatter(reduce_scatter)
    if hasattr(run.optimizer, "take_one_at_a_time"):  # Muon: a batched product rounds differently
        run.optimizer.take_one_at_a_time()
    run.world.say("exact  bit for bit on 1, 2, 4, ... ranks; reduces after every micro-batch")
    return ExactParallel(run)


# ---- micro-batches


def deal_in_order(window: Sequence[int], world_size: int, size: int, rank: int) -> list[Shard]:
    """One step's samples -> this rank's micro-batches, of `size` consecutive samples each."""
    batches = [tuple(window[first : first + size]) for first in range(0, len(window), size)]
    rounds = math.ceil(len(batches) / world_size)
    shards = [Shard(batch) for batch in batches]
    shards += [Shard(batches[0], counts=False)] * (rounds * world_size - len(batches))
    return shards[rank::world_size]


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seed all generators of this process for a micro-batch, by its number, of step `step` + 1."""
    seed_all(hash((seed, step, micro_batch)) % 2**63)


def join_inputs(units: Sequence[nn.Module]) -> None:
    """Sum the gradients of a tensor that several blocks read as FSDP2 does: in each block first.

    FSDP2 passes a block's inputs through one node of the autograd graph, and so does this.
    """
    for unit in units:
        unit.register_forward_pre_hook(with_joined_inputs, prepend=True, with_kwargs=True)


def with_joined_inputs(unit: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if not places or not torch.is_grad_enabled():
        return args, kwargs
    for place, tensor in zip(places, Joined.apply(*(leaves[i] for i in places)), strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, spec)


class Joined(torch.autograd.Function):
    """The identity of several tensors, as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


# ---- sums in a fixed order


def tree_sum(values: Tensor) -> Tensor:
    """The sum over the first dimension, added in pairs of neighbours: [n, ...] -> [...]."""
    while len(values) > 1:
        if len(values) % 2:
            values = torch.cat([values, torch.zeros_like(values[:1])])
        values = values[0::2] + values[1::2]
    return values[0]


def row_squares(gradient: Tensor) -> Tensor:
    """Sum of squares per row: [rows, ...] -> [rows] float32; a shard of rows gives the same bits.

    Uses elementwise additions only: a reduction kernel's order depends on the number of rows.
    """
    rows = gradient.reshape(len(gradient) if gradient.ndim else 1, -1)
    sums = []
    for part in rows.split(max(1, CHUNK // max(1, rows.shape[1]))):
        squares = part.float().square()
        while (width := squares.shape[1]) > 1:
            half = (width + 1) // 2
            squares[:, : width - half] += squares[:, half:]
            squares = squares[:, :half]
        sums.append(squares[:, 0])
    return torch.cat(sums)


def exchanged(flat: Tensor, ranks: int, group: Any = None) -> Tensor:
    """All-to-all: this rank's chunk of every rank's tensor, [n] -> [ranks, n / ranks]."""
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    return received.view(ranks, -1)


class ReduceScatter:
    """FSDP2's reduce-scatter in the order of the tree; under HSDP also the sum over replicas.

    Afterwards FSDP2 sums over the replicas by itself, in any order. So each replica returns another
    part of the finished sum, and zeros elsewhere. Two replicas have only one order.
    """

    def __init__(self, parallel: Parallel):
        self._replicas = 1
        if parallel.strategy == "hsdp" and parallel.replicas > 2:
            self._replicas = parallel.replicas
            shards = parallel.world.world_size // parallel.replicas
            mesh = parallel.world.mesh((parallel.replicas, shards), ("replicate", "shard"))
            self._group = mesh.get_group("replicate")

    def allocate(self, size: Sequence[int], *, dtype: Any, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(tree_sum(exchanged(input_tensor, group.size(), group)))
        if self._replicas == 1:
            return
        padded = F.pad(output_tensor, (0, -len(output_tensor) % self._replicas))
        part = tree_sum(exchanged(padded, self._replicas, self._group))
        padded.zero_().view(self._replicas, -1)[dist.get_rank(self._group)] = part
        output_tensor.copy_(padded[: len(output_tensor)])


def all_reduce(world: World, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """DDP's all-reduce in the order of the tree; sends as many bytes as a ring all-reduce."""
    buffer = bucket.buffer()
    padded = F.pad(buffer, (0, -len(buffer) % world.world_size))
    all_gather_single(padded, tree_sum(exchanged(padded, world.world_size)))
    buffer.copy_(padded[: len(buffer)])
    devices: list[Any] = [world.device] if buffer.is_cuda else []
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    done.set_result(buffer)
    return done


class ExactSum(SumOverRanks):
    """A sum over all micro-batches in the order of the tree. `mean`, by which losses are divided,
    is the total here, because bit-exact gradients are summed over the ranks, not averaged.
    """

    def mean(self) -> Tensor:
        super().mean()
        if self.total.ndim:
            self.total = tree_sum(self.total)
        return self.total


def by_micro_batch(values: Tensor, world: World) -> Tensor:
    """This rank's [rounds] -> [rounds * world_size] by micro-batch, zero for other ranks'."""
    table = values.new_zeros(len(values), world.world_size)
    table[:, world.rank] = values
    return table.flatten()


# ---- the step


class ExactParallel(Parallel):
    """Parallel with gradients that are summed, not averaged, in one order."""

    def __init__(self, run: Run):
        vars(self).update(vars(run.parallel))  # a copy with the same model; methods differ
        self._run = run
        self._synchronise = self.gradient_sync
        self.gradient_sync = self._micro_batch
        self._round = 0
        self._sums: list[list[Tensor]] = []  # partial sums of 2^n rounds each, the largest first

    @contextmanager
    def _micro_batch(self, is_last: bool) -> Iterator[None]:
        """The context of a micro-batch; at its end, gradients are reduced and added to `_sums`."""
        number = self._round * self.world.world_size + self.world.rank
        seed_micro_batch(self._run.config.run.seed, self._run.step, number)
        versions = self._versions()
        with self._synchronise(True):
            yield
        for name, version in self._versions().items():
            if version != versions.get(name, version):
                raise ConfigError(
                    f"parallel.bit_exact=true is impossible: the model's forward changes {name} in "
                    "each micro-batch, of which ranks have different numbers; change it in "
                    "on_step(run, report), or use bit_exact=false"
                )
        self._round += 1
        self._add(is_last)

    def _versions(self) -> dict[str, int]:
        """{buffer or frozen parameter: torch's count of the writes to it}."""
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor._version for name, tensor in state if not tensor.requires_grad}

    @torch.no_grad()
    def _add(self, is_last: bool) -> None:
        total = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            total.append(local(parameter.grad))
        rounds = self._round
        if rounds % 2 and not is_last:
            total = [gradient.clone() for gradient in total]  # DDP reuses the memory: its buckets
        while self._sums and (is_last or rounds % 2 == 0):  # carry, as a binary counter does
            earlier = self._sums.pop()
            for gradient, later in zip(earlier, total, strict=True):
                gradient.add_(later)
            total = earlier
            rounds //= 2
        if not is_last:
            self._sums.append(total)
            super().zero_grad()
            return
        for parameter, gradient in zip(self.parameters, total, strict=True):
            assert parameter.grad is not None
            # + 0.0 turns -0.0 into 0.0, as padding does on other numbers of ranks.
            torch.add(gradient, 0.0, out=local(parameter.grad))
        self._round = 0

    def zero_grad(self) -> None:
        super().zero_grad()
        self._round = 0
        self._sums = []

    def sum_over_ranks(self, values: Sequence[float | Tensor]) -> SumOverRanks:
        rows = torch.stack([as_scalar(value, self.world.device).float() for value in values])
        return ExactSum(by_micro_batch(rows, self.world), self.world)

    @torch.no_grad()
    def global_grad_norm(self) -> Tensor:
        """The norm as in Parallel, but by sums over rows, because sharding never splits a row."""
        shards = self.world.world_size // self.replicas
        parts = []
        for parameter in self.parameters:
            rows = torch.zeros(len(parameter) if parameter.ndim else 1, device=self.world.device)
            assert parameter.grad is not None
            gradient = local(parameter.grad)
            # Under HSDP only the first replica adds its rows: the other replicas have equal ones.
            if gradient.numel() and (self.world.rank < shards or not self.sharded):
                first = self.world.rank % shards * math.ceil(len(rows) / shards)
                squares = row_squares(gradient)
                rows[first : first + len(squares)] = squares
            parts.append(rows)
        squares = torch.cat(parts)
        if self.sharded:
            squares = self.world.sum(squares)
        return squares.double().sum().sqrt().float()


class ExactMetrics(Metrics):
    """Metrics whose loss sums are added over the ranks in each step, in the order of the tree."""

    def after_step(self, report: StepReport, micro_batches: Any = None) -> None:
        """Rank 0 records the sum of all ranks' losses, the other ranks zero."""
        losses = by_micro_batch(torch.stack(report.losses), self.world)
        total = tree_sum(self.world.sum(losses))
        if not self.world.is_main:
            total = torch.zeros_like(total)
        super().after_step(replace(report, losses=[total]))
