"""What each rank holds and sends under a strategy, from the shapes of the parameters alone.

docs/collectives.md has the formulas. tests/features/test_plan.py and tests/together/test_scale.py
compare them with the tensors and the collectives of real runs.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from dist_amp.config.auto import SHARDED, accumulation_steps, replicas_of
from dist_amp.config.memory import moments_per_parameter, tensor_bytes
from dist_amp.optim import parameter_groups
from dist_amp.optimizers.groups import task_groups
from dist_amp.precision import DTYPES, Precision
from dist_amp.scaling.blocks import blocks_of, is_embedding, units_of
from dist_amp.settings import Config, Strategy
from dist_amp.task import Task
from dist_amp.world import World

# DDP's buckets, in bytes. Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20
# Bytes of each scalar that a step sums: the weight; if sharded, the gradients' squared norm too.
STEP_SUM = 4


@dataclass(frozen=True)
class Setup:
    """What is trained, by which strategy, and on how many ranks."""

    config: Config
    strategy: Strategy
    world: World
    task: Task
    module: nn.Module  # before or after `build_parallel`
    precision: Precision

    @property
    def micro_batches(self) -> int:
        return accumulation_steps(self.config.train, self.world.world_size)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def replicas(self) -> int:
        """How many copies of each parameter there are."""
        if self.strategy == "fsdp":
            return 1
        if self.strategy == "hsdp":
            return replicas_of(self.config.parallel, self.world)
        return self.world.world_size

    @property
    def shards(self) -> int:
        """Over how many ranks a parameter is spread; 0 if it is not sharded."""
        if self.strategy not in SHARDED:
            return 0
        return self.world.world_size // self.replicas

    # In which dtypes parameters are stored, gathered and reduced; None: in their own, float32.

    @property
    def stored(self) -> torch.dtype | None:
        if self.shards and self.config.parallel.param_dtype == "bf16":
            return torch.bfloat16
        return None

    @property
    def gathered(self) -> torch.dtype | None:
        if self.precision.cast_by == "policy":
            return self.precision.dtype
        return None

    @property
    def reduced(self) -> torch.dtype | None:
        if self.precision.cast_by == "policy":
            return DTYPES[self.config.parallel.reduce_dtype]
        return None

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, the task's if it has `groups`."""
        if hasattr(self.task, "groups"):
            return task_groups(self.task, self.module, self.config.optim)
        return parameter_groups(self.module, self.config.optim)


@dataclass(frozen=True)
class Memory:
    """Bytes of the state on the rank that holds most."""

    parameters: int  # with buffers
    gradients: int  # at their most: under DDP with its buckets; accumulated unreduced, in full
    moments: int  # all of the optimizer's state, without step counts
    average: int  # optim.ema

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments + self.average


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


# --- memory


def memory_of(setup: Setup) -> Memory:
    """The memory of a rank: of the first, where ranks don't divide a first dimension."""
    trained = setup.trained
    shards = setup.shards
    parameters = tensor_bytes(setup.module.parameters(), shards, setup.stored)
    gradients = tensor_bytes(trained, shards, setup.stored)
    if setup.config.parallel.bit_exact:  # and the sums of 1, 2, 4, ... micro-batches
        gradients *= setup.micro_batches.bit_length()
    elif setup.micro_batches > 1:
        if setup.strategy == "ddp":  # they add up beside DDP's buckets
            gradients *= 2
        elif shards and setup.config.parallel.accumulate_reduce != "every":
            gradients = max(gradients, tensor_bytes(trained, dtype=setup.reduced))
    average = 0
    if setup.config.optim.ema != "off":
        average = tensor_bytes(trained, shards, torch.float32)
    return Memory(
        parameters=parameters + tensor_bytes(setup.module.buffers()),
        gradients=gradients,
        moments=moment_bytes(setup, shards),
        average=average,
    )


def checkpoint_bytes(setup: Setup) -> int:
    """A checkpoint: trained parameters under each of their names, moments, averages, buffers."""
    named = dict(setup.module.named_parameters(remove_duplicate=False))
    trained = (p for p in named.values() if p.requires_grad)
    buffers = (v for name, v in setup.module.state_dict().items() if name not in named)
    total = tensor_bytes(trained, dtype=setup.stored) + tensor_bytes(buffers)
    if setup.config.optim.ema != "off":
        total += tensor_bytes(setup.trained, dtype=torch.float32)
    return total + moment_bytes(setup, 0)


def moment_bytes(setup: Setup, shards: int) -> int:
    """Bytes of the optimizer's state; a task's optimizer is assumed to keep as much as AdamW."""
    total = 0
    for group in setup.groups():
        times = moments_per_parameter(setup.config.optim)
        is_muon = setup.config.optim.name == "muon"
        if hasattr(setup.task, "optimizer") or (is_muon and not takes_muon(group)):
            times = 2  # AdamW's
        total += times * tensor_bytes(group["params"], shards, setup.stored)
    return total


def takes_muon(group: Mapping[str, Any]) -> bool:
    """Whether optim.name=muon updates this group by Muon."""
    return bool(group.get("use_muon", all(p.ndim == 2 for p in group["params"])))


# --- collectives


def of_a_step(setup: Setup) -> Step:
    """How often a rank calls each collective in one `train_step`.

    It holds from the third step on: in the first two DDP rebuilds its buckets. Collectives of a
    task's optimizer are left out.
    """
    if setup.strategy == "single":
        return Counter()
    scalars = 1
    if setup.strategy == "ddp":
        counted = of_ddp(setup)
    else:
        counted = of_sharded(setup)
        scalars = 2
    if setup.config.parallel.bit_exact:
        add_exact(counted, setup)
    counted[Collective("all_reduce", setup.world.world_size, STEP_SUM, STEP_SUM)] += scalars
    if setup.config.optim.name == "muon" and not hasattr(setup.task, "optimizer"):
        add_muon(counted, setup)
    return Counter({one: times for one, times in counted.items() if one.bytes_in and one.ranks > 1})


def add_muon(counted: Step, setup: Setup) -> None:
    """Count the exchanges of matrices' updates, in two bytes per element."""
    from dist_amp.optimizers.muon import deal

    shards = max(1, setup.shards)
    matrices = [p for group in filter(takes_muon, setup.groups()) for p in group["params"]]
    for places in deal(matrices, shards, setup.replicas):
        size = 2 * shards * max(place.stop for place in places)
        counted[Collective("all_to_all", shards, size, size)] += 2
        counted[Collective("all_gather", setup.replicas, size, setup.replicas * size)] += 1


def add_exact(counted: Step, setup: Setup) -> None:
    """Count the reductions after each micro-batch by ordinary calls, which send as much.

    An all-to-all sends what a reduce-scatter does; with an all-gather, what an all-reduce does.
    """
    for one in [one for one in counted if one.kind == "all_reduce"]:
        counted[one] *= setup.micro_batches
        if setup.shards and one.ranks > 2:  # FSDP2 all-reduces what is summed already
            counted[one._replace(kind="all_to_all")] = counted[one]


def of_ddp(setup: Setup) -> Step:
    """One all-reduce per bucket; the gradient that fills a bucket closes it.

    Gradients are assumed to become ready in the reverse order of the parameters; another order
    changes the sizes of buckets, not their total.
    """
    sent_in = DTYPES.get(setup.config.parallel.comm_dtype)
    buckets = [0]
    held = 0
    limit = FIRST_BUCKET
    for p in reversed(setup.trained):
        if held >= limit:
            buckets.append(0)
            held = 0
            limit = BUCKET
        held += tensor_bytes([p])
        buckets[-1] += tensor_bytes([p], dtype=sent_in)
    ranks = setup.world.world_size
    return Counter(Collective("all_reduce", ranks, size, size) for size in buckets)


def of_sharded(setup: Setup) -> Step:
    """FSDP2 or HSDP, for a model whose blocks are all trained and are called once each."""
    shards = setup.shards
    micro_batches = setup.micro_batches
    reductions = 1
    if setup.config.parallel.accumulate_reduce == "every":
        reductions = micro_batches
    # FSDP2's units, in the model's order; the root has all other parameters.
    units = units_of(setup.task, setup.module, blocks_of(setup.task, setup.module))
    inside = {p for unit in units for p in unit.parameters()}
    root = [p for p in setup.module.parameters() if p not in inside]
    counted: Step = Counter()
    for number, parameters in enumerate([*(list(unit.parameters()) for unit in units), root]):
        trained = [p for p in parameters if p.requires_grad]
        # FSDP2 pads each first dimension to a multiple of the shards.
        gathered = tensor_bytes(parameters, shards, setup.gathered)
        reduced = tensor_bytes(trained, shards, setup.reduced)
        gathers = 2 * micro_batches
        # The last unit and the root stay gathered until backward.
        if number >= len(units) - 1 or is_embedding(units[number]):
            gathers = micro_batches
        # In backward FSDP2 prefetches in the order of all forwards since the last step; without a
        # root, the last prefetch of a step is of the last unit, and is not used.
        if number == len(units) - 1 and not root and micro_batches > 1:
            gathers += 1
        counted[Collective("all_gather", shards, gathered, shards * gathered)] += gathers
        counted[Collective("reduce_scatter", shards, shards * reduced, reduced)] += reductions
        counted[Collective("all_reduce", setup.replicas, reduced, reduced)] += 1
    return counted
