"""What training holds on one rank besides activations, in bytes, by the shapes of the parameters alone.

tests/test_plan.py compares it with the tensors of real runs. A model on the meta device does.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_amp.optim import parameter_groups
from dist_amp.optimizers.groups import task_groups, task_optimizer
from dist_amp.precision import DTYPES
from dist_amp.settings import Config, OptimConfig, ParallelConfig
from dist_amp.verify.collectives import Model, units_and_root

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Memory(NamedTuple):
    """Bytes on the rank that holds most: where a first dimension does not divide, the first ranks have a row more."""

    parameters: int  # with buffers
    gradients: int  # at their most: under DDP its buckets; accumulated without reduction, in full
    moments: int  # all of the optimizer's state, without step counts
    average: int  # optim.ema
    computing: int  # weights gathered or cast for a forward and backward, and what gathers and reduces a unit

    @property
    def total(self) -> int:
        return sum(self)


def memory_of(config: Config, model: Model, shards: int, moments: Mapping[nn.Parameter, float]) -> Memory:
    """The memory of a rank. shards: over how many ranks FSDP2 spreads each parameter; 0: single and DDP spread none.

    moments: as `moments_of` gives them.
    """
    parallel, module = config.parallel, model.module
    stored = torch.bfloat16 if shards and parallel.param_dtype == "bf16" else None
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    gradients = shard_bytes(trained, shards, stored)
    if shards and parallel.accumulate_reduce == "last" and model.micro_batches > 1:
        reduced = DTYPES[parallel.reduce_dtype] if model.precision.cast_by == "policy" else None
        gradients = max(gradients, shard_bytes(trained, 0, reduced))
    return Memory(
        shard_bytes(parameters, shards, stored) + shard_bytes(module.buffers(), 0),
        gradients,
        round(sum(times * shard_bytes([p], shards, stored) for p, times in moments.items())),
        shard_bytes(trained, shards, torch.float32) if config.optim.ema != "off" else 0,
        computing(parallel, model, shards),
    )


def checkpoint_bytes(config: Config, module: nn.Module, moments: Mapping[nn.Parameter, float], sharded: bool) -> int:
    """A checkpoint: what is trained, under each of its names, and its moments and average; buffers that are saved."""
    stored = torch.bfloat16 if sharded and config.parallel.param_dtype == "bf16" else None
    named = dict(module.named_parameters(remove_duplicate=False))
    trained = [p for p in named.values() if p.requires_grad]
    averages = shard_bytes(moments, 0, torch.float32) if config.optim.ema != "off" else 0
    buffers = shard_bytes((value for name, value in module.state_dict().items() if name not in named), 0)
    of_optimizer = round(sum(times * shard_bytes([p], 0, stored) for p, times in moments.items()))
    return shard_bytes(trained, 0, stored) + buffers + of_optimizer + averages


def shard_bytes(tensors: Iterable[Tensor], shards: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of the first rank's rows of these tensors; of all rows if shards is 0. dtype: None for their own."""
    return sum(
        (math.ceil(t.shape[0] / shards) * math.prod(t.shape[1:]) if shards else t.numel()) * (dtype or t.dtype).itemsize
        for t in tensors
    )


def moments_of(config: OptimConfig, task: Any, module: nn.Module) -> dict[nn.Parameter, float]:
    """{trained parameter: how many times its size the optimizer keeps for it}.

    A task's own optimizer takes one step with gradients of zero if it has to. Errors: as building it in training, and
    whatever its step raises, for example because it reads a value of a parameter on the meta device.
    """
    groups = task_groups(task, module, config) if hasattr(task, "groups") else parameter_groups(module, config)
    if not hasattr(task, "optimizer"):
        return {p: _moments(config, group) for group in groups for p in group["params"]}
    optimizer = task_optimizer(task, groups, config.lr, module)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(optimizer.state.values()):  # most make it in their first step
        for p in trained:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    return {p: _state_bytes(optimizer.state[p]) / (p.numel() * p.dtype.itemsize) for p in trained}


def _moments(config: OptimConfig, group: dict[str, Any]) -> int:
    if config.name == "sgd":
        return int(config.momentum > 0)
    by_muon = group.get("use_muon", all(p.ndim == 2 for p in group["params"]))
    return 1 if config.name == "muon" and by_muon else 2


def _state_bytes(state: dict[str, Any]) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0]
    return sum(t.numel() * t.dtype.itemsize for t in tensors)


def computing(config: ParallelConfig, model: Model, shards: int) -> int:
    """Bytes of weights in the form in which they compute, and of what gathers and reduces them.

    autocast: a copy in half precision of each matrix, until the forward's end. FSDP2: the root, which stays gathered,
    and two units in a row, since the next one is gathered ahead; and for the largest unit the buffer it is gathered
    in, its gradient, and the buffer that is reduced. Under autocast it gathers float32.
    """
    precision = model.precision
    casts = cast_bytes(model.module, precision.dtype) if precision.cast_by == "autocast" else 0
    if not shards:
        return casts
    gathered_in: torch.dtype | None = torch.bfloat16 if config.param_dtype == "bf16" else None
    reduced_in: torch.dtype | None = gathered_in
    if precision.cast_by == "policy":
        gathered_in, reduced_in = precision.dtype, DTYPES[config.reduce_dtype]
    units, root = units_and_root(model)
    sizes = [shard_bytes(unit, 0, gathered_in) for unit in units]
    largest = max([*units, root], key=lambda unit: shard_bytes(unit, 0), default=[])
    buffers = 2 * shard_bytes(largest, 0, gathered_in) + shard_bytes(largest, 0, reduced_in)
    return casts + gathered_at_once(sizes, shard_bytes(root, 0, gathered_in)) + buffers


def gathered_at_once(units: list[int], root: int) -> int:
    """The most that is gathered at a time. units: of each, in the order of the forward."""
    return root + max((sum(pair) for pair in pairwise(units)), default=sum(units))


def cast_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of what autocast casts: linear layers and convolutions, and all other matrices but embeddings."""
    cast = {
        p
        for part in module.modules()
        for p in part.parameters(recurse=False)
        if isinstance(part, PRODUCTS) or (p.ndim > 1 and not isinstance(part, nn.Embedding | nn.EmbeddingBag))
    }
    return shard_bytes((p for p in cast if p.dtype == torch.float32), 0, dtype)
