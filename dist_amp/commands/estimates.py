"""What each rank holds and sends under a strategy, from the shapes of the parameters alone.

docs/collectives.md has the formulas. tests/test_plan.py and tests/test_scale.py compare them with
the tensors and the collectives of real runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dist_amp.config.auto import replicas_of
from dist_amp.config.memory import moments_per_parameter, tensor_bytes
from dist_amp.optim import parameter_groups
from dist_amp.optimizers.groups import task_groups, task_optimizer
from dist_amp.precision import DTYPES, Precision
from dist_amp.scaling.blocks import blocks_of, units_of
from dist_amp.settings import Config, OptimConfig, Strategy
from dist_amp.task import Task
from dist_amp.world import World

# DDP's buckets, in bytes. Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20
# Bytes of each scalar that a step sums: the weight; if sharded, the gradients' squared norm too.
STEP_SUM = 4

AUTOCAST_LAYERS = (nn.Linear, _ConvNd)  # their biases are cast too
Moments = Mapping[nn.Parameter, float]  # how many times its size the optimizer keeps for each


class Model(NamedTuple):
    """What is trained, before or after `build_parallel`."""

    task: Task
    module: nn.Module
    precision: Precision
    micro_batches: int


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most, without activations."""

    parameters: int  # with buffers
    gradients: int  # at their most: under DDP with its buckets; accumulated unreduced, in full
    moments: int  # all of the optimizer's state, without step counts
    average: int  # optim.ema
    computing: int  # weights gathered or cast to compute with, and buffers to gather and reduce

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments + self.average + self.computing


class Dtypes(NamedTuple):
    """In which dtypes parameters are stored, gathered and reduced; None: in their own, float32."""

    stored: torch.dtype | None = None
    gathered: torch.dtype | None = None
    reduced: torch.dtype | None = None


class Collective(NamedTuple):
    """One collective as a rank sees it: the ranks of its group, and the bytes in and out."""

    kind: str
    ranks: int
    bytes_in: int
    bytes_out: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring. Source: doi:10.1016/j.jpdc.2008.09.002."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * max(self.bytes_in, self.bytes_out)


Step = Counter[Collective]  # how often a rank calls each


def sharded_dtypes(config: Config, precision: Precision) -> Dtypes:
    """The dtypes under fsdp and hsdp."""
    stored = torch.bfloat16 if config.parallel.param_dtype == "bf16" else None
    if precision.cast_by == "policy":
        return Dtypes(stored, precision.dtype, DTYPES[config.parallel.reduce_dtype])
    return Dtypes(stored, stored, stored)


def replicas_and_shards(config: Config, strategy: Strategy, world: World) -> tuple[int, int]:
    """(copies of each parameter, ranks over which one is spread; 0 where none are sharded)."""
    if strategy == "fsdp":
        return 1, world.world_size
    if strategy == "hsdp":
        replicas = replicas_of(config.parallel, world)
        return replicas, world.world_size // replicas
    return world.world_size, 0


def units_and_root(model: Model) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """(parameters of each FSDP2 unit, in the model's order; those of the root: all others)."""
    blocks = blocks_of(model.task, model.module)
    units = [list(unit.parameters()) for unit in units_of(model.task, model.module, blocks)]
    inside = {p for unit in units for p in unit}
    return units, [p for p in model.module.parameters() if p not in inside]


# --- memory


def memory_of(
    config: Config,
    strategy: Strategy,
    model: Model,
    world: World,
    moments: Moments,
) -> Memory:
    """The memory of a rank: of the first, where ranks don't divide a first dimension."""
    _, shards = replicas_and_shards(config, strategy, world)
    module = model.module
    dtypes = Dtypes()
    if shards:
        dtypes = sharded_dtypes(config, model.precision)
    trained = [p for p in module.parameters() if p.requires_grad]
    gradients = tensor_bytes(trained, shards, dtypes.stored)
    if model.micro_batches > 1:
        if strategy == "ddp":  # they add up beside DDP's buckets
            gradients *= 2
        elif shards and config.parallel.accumulate_reduce == "last":
            unsharded_in = None  # in the parameters' own dtype
            if model.precision.cast_by == "policy":
                unsharded_in = dtypes.reduced
            gradients = max(gradients, tensor_bytes(trained, dtype=unsharded_in))
    average = 0
    if config.optim.ema != "off":
        average = tensor_bytes(trained, shards, torch.float32)
    return Memory(
        parameters=tensor_bytes(module.parameters(), shards, dtypes.stored)
        + tensor_bytes(module.buffers()),
        gradients=gradients,
        moments=moment_bytes(moments, shards, dtypes.stored),
        average=average,
        computing=computing_bytes(model, shards, dtypes),
    )


def computing_bytes(model: Model, shards: int, dtypes: Dtypes) -> int:
    """Bytes of weights in the form in which they compute, and of what gathers and reduces them.

    autocast: a copy in half precision of each matrix, until the forward's end. FSDP2: the root, two
    units in a row, since the next one is gathered ahead, and for the largest unit the buffer it is
    gathered in, its gradient, and the buffer that is reduced; under autocast in float32.
    """
    casts = 0
    if model.precision.cast_by == "autocast":
        casts = cast_bytes(model.module, model.precision.dtype)
    if not shards:
        return casts
    units, root = units_and_root(model)
    largest = max([*units, root], key=tensor_bytes, default=[])
    sizes = [tensor_bytes(unit, dtype=dtypes.gathered) for unit in units]
    gathered = gathered_at_once(sizes, tensor_bytes(root, dtype=dtypes.gathered))
    buffers = 2 * tensor_bytes(largest, dtype=dtypes.gathered)
    return casts + gathered + buffers + tensor_bytes(largest, dtype=dtypes.reduced)


def gathered_at_once(units: Sequence[int], root: int) -> int:
    """The most that is gathered at a time. units: bytes of each, in the order of the forward."""
    return root + max((sum(pair) for pair in pairwise(units)), default=sum(units))


def cast_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of autocast's copies: linear layers, convolutions, other matrices but embeddings."""
    cast = set()
    for part in module.modules():
        for p in part.parameters(recurse=False):
            is_matrix = p.ndim > 1 and not isinstance(part, nn.Embedding | nn.EmbeddingBag)
            if p.dtype == torch.float32 and (is_matrix or isinstance(part, AUTOCAST_LAYERS)):
                cast.add(p)
    return tensor_bytes(cast, dtype=dtype)


def checkpoint_bytes(config: Config, module: nn.Module, moments: Moments, sharded: bool) -> int:
    """A checkpoint: trained parameters under each of their names, moments, averages, buffers."""
    stored = torch.bfloat16 if sharded and config.parallel.param_dtype == "bf16" else None
    named = dict(module.named_parameters(remove_duplicate=False))
    total = tensor_bytes((p for p in named.values() if p.requires_grad), dtype=stored)
    total += tensor_bytes(v for name, v in module.state_dict().items() if name not in named)
    if config.optim.ema != "off":
        total += tensor_bytes(moments, dtype=torch.float32)
    return total + moment_bytes(moments, 0, stored)


def moment_bytes(moments: Moments, shards: int, dtype: torch.dtype | None) -> int:
    return round(sum(times * tensor_bytes([p], shards, dtype) for p, times in moments.items()))


def moments_of(config: OptimConfig, task: Any, module: nn.Module) -> Moments:
    """What the optimizer keeps; a task's own takes a step with gradients of zero if it has to.

    Errors: as building it in training, and whatever its step raises, for example because it reads
    a value of a parameter on the meta device.
    """
    groups = groups_of(config, task, module)
    if not hasattr(task, "optimizer"):
        kept: dict[nn.Parameter, float] = {}
        for group in groups:
            times = moments_per_parameter(config)
            if config.name == "muon" and not takes_muon(group):
                times = 2  # AdamW's
            kept |= dict.fromkeys(group["params"], times)
        return kept
    optimizer = task_optimizer(task, groups, config.lr, module)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(optimizer.state.values()):  # most make it in their first step
        for p in trained:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    moments = {}
    for p in trained:
        values = optimizer.state[p].values()
        state = [value for value in values if isinstance(value, Tensor) and value.ndim > 0]
        moments[p] = tensor_bytes(state) / tensor_bytes([p])
    return moments


def groups_of(config: OptimConfig, task: Any, module: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups, the task's own if it makes some."""
    if hasattr(task, "groups"):
        return task_groups(task, module, config)
    return parameter_groups(module, config)


def takes_muon(group: Mapping[str, Any]) -> bool:
    """Whether optim.name=muon updates this group by Muon."""
    return bool(group.get("use_muon", all(p.ndim == 2 for p in group["params"])))


# --- collectives


def of_a_step(config: Config, strategy: Strategy, model: Model, world: World) -> Step:
    """How often a rank calls each collective in one `train_step`.

    It holds from the third step on: in the first two DDP rebuilds its buckets. Collectives of a
    task's own optimizer are left out.
    """
    if strategy == "single":
        return Counter()
    if strategy == "ddp":
        counted = of_ddp(config, list(model.module.parameters()), world.world_size)
    else:
        counted = of_sharded(config, strategy, model, world)
    scalars = 1 if strategy == "ddp" else 2
    counted[Collective("all_reduce", world.world_size, STEP_SUM, STEP_SUM)] += scalars
    return counted


def of_ddp(config: Config, parameters: Sequence[Tensor], ranks: int) -> Step:
    """One all-reduce per bucket; the gradient that fills a bucket closes it.

    Gradients are assumed to become ready in the reverse order of the parameters; another order
    changes the sizes of buckets, not their total.
    """
    sent_in = None
    if config.parallel.comm_dtype != "off":
        sent_in = DTYPES[config.parallel.comm_dtype]
    buckets = [0]
    held = 0
    for p in reversed([p for p in parameters if p.requires_grad]):
        limit = FIRST_BUCKET if len(buckets) == 1 else BUCKET
        if held >= limit:
            buckets.append(0)
            held = 0
        held += tensor_bytes([p])
        buckets[-1] += tensor_bytes([p], dtype=sent_in)
    return Counter(Collective("all_reduce", ranks, size, size) for size in buckets)


def of_sharded(config: Config, strategy: Strategy, model: Model, world: World) -> Step:
    """FSDP2 or HSDP, for a model whose blocks are all trained and are called once each."""
    replicas, shards = replicas_and_shards(config, strategy, world)
    micro_batches = model.micro_batches
    reductions = micro_batches if config.parallel.accumulate_reduce == "every" else 1
    dtypes = sharded_dtypes(config, model.precision)
    units, root = units_and_root(model)
    counted: Step = Counter()
    for number, parameters in enumerate([*units, root]):
        trained = [p for p in parameters if p.requires_grad]
        # FSDP2 pads each first dimension to a multiple of the shards.
        gathered = tensor_bytes(parameters, shards, dtypes.gathered)
        reduced = tensor_bytes(trained, shards, dtypes.reduced)
        gathers = 2 * micro_batches
        if number >= len(units) - 1:  # the last unit and the root stay gathered until backward
            gathers = micro_batches
        # In backward FSDP2 prefetches in the order of all forwards since the last step; without a
        # root, the last prefetch of a step is of the last unit, and is not used.
        if number == len(units) - 1 and not root and micro_batches > 1:
            gathers += 1
        counted[Collective("all_gather", shards, gathered, shards * gathered)] += gathers
        counted[Collective("reduce_scatter", shards, shards * reduced, reduced)] += reductions
        counted[Collective("all_reduce", replicas, reduced, reduced)] += 1
    if config.optim.name == "muon" and not hasattr(model.task, "optimizer"):
        for group in groups_of(config.optim, model.task, model.module):
            if not takes_muon(group):
                continue
            for matrix in group["params"]:
                gathered = tensor_bytes([matrix], shards, torch.bfloat16)  # of its update
                counted[Collective("all_gather", shards, gathered, shards * gathered)] += 1
    return Counter({one: times for one, times in counted.items() if one.bytes_in and one.ranks > 1})
