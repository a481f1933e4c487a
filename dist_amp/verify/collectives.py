"""What one step sends: number and bytes of its collectives, by the formulas of docs/collectives.md, and counted.

python -m dist_amp.verify.collectives --config configs/gpt_124m.toml [--world_size 8]
torchrun --nproc_per_node=2 -m dist_amp.verify.collectives --config configs/fsdp_bf16.toml

In one process it compares the strategies for the config's model on so many ranks, eight to a machine. On several ranks
it takes steps with the config's own strategy and compares the counted bytes with the formula. MB are 10^6 bytes.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.bench.harness import on_a_run
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.auto import blocks_of, pick_cast, units_of
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import accumulation_steps, replicas_of
from dist_amp.errors import ConfigError, Failure
from dist_amp.optim import parameter_groups
from dist_amp.optimizers.groups import task_groups
from dist_amp.optimizers.muon import Muon
from dist_amp.precision import DTYPES, Precision, build_precision
from dist_amp.run import Run
from dist_amp.runtime.environment import environment_number
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.step import train_step
from dist_amp.task import Task
from dist_amp.world import World

RANKS_PER_MACHINE = 8  # assumed where no ranks were launched
# DDP's buckets, in bytes. Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
STEP_SUMS = 8  # bytes of the step's own all-reduce: the weight and the squared gradient norm, in float32
KINDS = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}


class Collective(NamedTuple):
    """One collective as a rank sees it: the size of its group, and the bytes that the rank puts in and gets out."""

    kind: str
    ranks: int
    bytes_in: int
    bytes_out: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring. Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * max(self.bytes_in, self.bytes_out)


class Model(NamedTuple):
    """What is trained, before or after `build_parallel`."""

    task: Task
    module: nn.Module
    precision: Precision
    micro_batches: int


# --- by the formulas


def of_ddp(parameters: Sequence[Tensor], ranks: int, dtype: torch.dtype | None) -> Counter[Collective]:
    """One all-reduce per bucket, for any number of micro-batches; the gradient that fills a bucket closes it.

    Gradients are assumed to become ready in the reverse order of the parameters; another order changes the sizes of
    buckets, not their total. dtype: in which gradients are sent; None: their own.
    """
    # The first gradient to arrive is this rank's weight, a float32 scalar; not where gradients are compressed.
    buckets, held = ([4], 4) if dtype is None else ([0], 0)
    for p in reversed([p for p in parameters if p.requires_grad]):
        if held >= (FIRST_BUCKET if len(buckets) == 1 else BUCKET):
            buckets.append(0)
            held = 0
        held += p.numel() * p.dtype.itemsize
        buckets[-1] += p.numel() * (dtype or p.dtype).itemsize
    return Counter(Collective("all_reduce", ranks, size, size) for size in buckets)


def padded_bytes(parameters: Iterable[Tensor], shards: int, dtype: torch.dtype | None) -> int:
    """Bytes of all shards together: FSDP2 pads each first dimension to a multiple of their number. dtype: as sent."""
    padded = ((math.ceil(p.shape[0] / shards) * shards * math.prod(p.shape[1:]), dtype or p.dtype) for p in parameters)
    return sum(size * sent_as.itemsize for size, sent_as in padded)


def units_and_root(model: Model) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """(the parameters of each unit: the blocks and the task's own, in the model's order; the root's, all others)."""
    blocks = blocks_of(model.task, model.module)
    units = [list(unit.parameters()) for unit in units_of(model.task, model.module, blocks)]
    inside = {p for unit in units for p in unit}
    return units, [p for p in model.module.parameters() if p not in inside]


def of_sharded(config: ParallelConfig, model: Model, world: World, replicas: int) -> Counter[Collective]:
    """FSDP2, or HSDP with replicas, of a model whose blocks are all trained and are called once each."""
    shards, precision, micro_batches = world.world_size // replicas, model.precision, model.micro_batches
    casts = precision.cast_by == "policy"
    gathered_in, reduced_in = (precision.dtype, DTYPES[config.reduce_dtype]) if casts else (None, None)
    units, root = units_and_root(model)
    counted: Counter[Collective] = Counter()
    for number, parameters in enumerate([*units, root]):
        gathered = padded_bytes(parameters, shards, gathered_in)
        reduced = padded_bytes((p for p in parameters if p.requires_grad), shards, reduced_in)
        # The last unit and the root are not resharded between forward and backward: one gather instead of two. In
        # backward FSDP2 prefetches in the order of all forwards since the last step; without a root, the last prefetch
        # of a step is of the last unit, and is not used.
        stays = number >= len(units) - 1
        unused = number == len(units) - 1 and not root and micro_batches > 1
        gathers = micro_batches * (1 if stays else 2) + unused
        counted[Collective("all_gather", shards, gathered // shards, gathered)] += gathers
        reductions = micro_batches if config.accumulate_reduce == "every" else 1
        counted[Collective("reduce_scatter", shards, reduced, reduced // shards)] += reductions
        counted[Collective("all_reduce", replicas, reduced // shards, reduced // shards)] += 1
    return Counter({one: times for one, times in counted.items() if one.bytes_in and one.ranks > 1})


def of_muon(groups: Iterable[Mapping[str, Any]], shards: int) -> Counter[Collective]:
    """optimizers/muon.py gathers the update of each matrix of its own groups, in bfloat16, where it is sharded."""
    matrices = [p for group in groups if group.get("use_muon") for p in group["params"]]
    gathered = [padded_bytes([p], shards, torch.bfloat16) for p in matrices]
    return Counter(Collective("all_gather", shards, size // shards, size) for size in gathered if shards > 1)


def groups_of_muon(config: Config, task: Any, module: nn.Module) -> list[dict[str, Any]]:
    """The groups of optim.name=muon; none for another optimizer."""
    if config.optim.name != "muon" or hasattr(task, "optimizer"):
        return []
    own = hasattr(task, "groups")
    groups = task_groups(task, module, config.optim) if own else parameter_groups(module, config.optim)
    return [{"use_muon": all(p.ndim == 2 for p in group["params"]), **group} for group in groups]


def of_a_step(config: ParallelConfig, strategy: Strategy, model: Model, world: World) -> Counter[Collective]:
    """How often a rank calls each collective in one `train_step` without the step's own all-reduce.

    It holds from the third step on: in the first two DDP rebuilds its buckets.
    """
    if strategy == "single":
        return Counter()
    if strategy == "ddp":
        dtype = None if config.comm_dtype == "off" else DTYPES[config.comm_dtype]
        return of_ddp(list(model.module.parameters()), world.world_size, dtype)
    return of_sharded(config, model, world, replicas_of(config, world) if strategy == "hsdp" else 1)


# --- counted


class Counting(TorchDispatchMode):
    """Counts collectives, those of DDP's C++ reducer too, but not those in groups of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[Collective] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "_c10d_functional" and function._opname == "all_gather_into_tensor":  # DTensor's
            part, ranks = args[0].numel() * args[0].element_size(), args[1]
            if ranks > 1:
                self.collectives[Collective("all_gather", ranks, part, ranks * part)] += 1
        if function.namespace == "c10d":
            kind = KINDS.get(function._opname, function._opname)
            group = next(value for value in args if isinstance(value, torch.ScriptObject))
            tensors = [tree_leaves(value) for value in args if isinstance(value, Tensor | list)]
            sizes = [sum(t.numel() * t.element_size() for t in each if isinstance(t, Tensor)) for each in tensors]
            sizes = [size for size in sizes if size]
            ranks = torch.distributed.ProcessGroup.unbox(group).size()
            if ranks > 1:
                self.collectives[Collective(kind, ranks, sizes[-1], sizes[0])] += 1  # outputs come first
        return function(*args, **(kwargs or {}))


def measure(run: Run) -> tuple[Counter[Collective], Counter[Collective]]:
    """What one step calls by the formula, and as counted in the third step from here."""
    for _ in range(2):
        train_step(run, next(run.data))
    micro_batches = next(run.data)
    with Counting() as counting:
        train_step(run, micro_batches)
    parallel, world = run.parallel, run.world
    model = Model(run.task, parallel.module, run.precision, len(micro_batches))
    expected = of_a_step(run.config.parallel, parallel.strategy, model, world)
    if parallel.sharded and isinstance(run.optimizer, Muon):
        expected += of_muon(run.optimizer.param_groups, world.world_size // parallel.replicas)
    if parallel.strategy != "single" and parallel.carrier is None:
        expected[Collective("all_reduce", world.world_size, STEP_SUMS, STEP_SUMS)] += 1
    return expected, counting.collectives


# --- the command


def main(argv: Sequence[str] | None = None) -> int:
    """The command: compares the strategies, or counts one. Exit status 1 if count and formula differ."""
    return exit_status(compare_or_check, argv)


def compare_or_check(words: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.verify.collectives", __doc__)
    parser.add_argument("--world_size", type=int, default=8, help="ranks to compare the strategies on; default: 8")
    options, words = parser.parse_known_args(words)
    if environment_number("WORLD_SIZE", 1) > 1:
        return on_a_run(check, words)
    if options.world_size < 2:
        raise ConfigError(f"--world_size={options.world_size} sends nothing; use 2 or more")
    config = load_config(words)
    task = build_task(config.task, config.data)
    print("\n".join(compare(config, task, task.build_model(), options.world_size)))
    return 0


def compare(config: Config, task: Task, module: nn.Module, ranks: int) -> list[str]:
    """Lines: what a step of each strategy sends on so many ranks, without the step's own all-reduce of a few bytes."""
    world = World(world_size=ranks, local_world_size=min(ranks, RANKS_PER_MACHINE))
    replicas, micro_batches = replicas_of(config.parallel, world), accumulation_steps(config.train, ranks)
    cast = pick_cast(config.precision, "fsdp", module, world)
    model = Model(task, module, build_precision(cast, True, world), micro_batches)
    groups = groups_of_muon(config, task, module)
    steps = {"ddp": of_a_step(config.parallel, "ddp", model, world)}
    strategies: dict[str, Strategy] = {"fsdp": "fsdp", f"hsdp of {replicas}": "hsdp"}
    for name, strategy in strategies.items():
        for when in ("last", "every") if strategy == "fsdp" or ranks % replicas == 0 else ():
            parallel = replace(config.parallel, accumulate_reduce=when)
            steps[f"{name}, {when}"] = of_a_step(parallel, strategy, model, world)
            steps[f"{name}, {when}"] += of_muon(groups, ranks // (replicas if strategy == "hsdp" else 1))
    parameters = sum(p.numel() for p in module.parameters())
    head = f"{parameters:,} parameters, {ranks} ranks, {model.precision.name}, a step of {micro_batches} micro-batches"
    return [head, "", *table(steps)]


def check(run: Run) -> None:
    """Print a step's collectives. Errors: Failure if the bytes differ from the formula's."""
    expected, counted = measure(run)
    ranks, device = run.world.world_size, run.world.device.type
    head = f"{run.parallel.strategy} on {ranks} x {device}, {run.precision.name}"
    run.world.say("\n".join([head, "", *table({"formula": expected, "counted": counted})]))
    by_formula, by_count = bytes_in(expected), bytes_in(counted)
    if by_formula != by_count:
        raise Failure(
            f"rank {run.world.rank} put {by_count} bytes into collectives, by the formula {by_formula}; the formula "
            "does not cover modules that are frozen or called more than once"
        )


def bytes_in(step: Counter[Collective]) -> dict[str, int]:
    """What a rank puts in, by kind and size of the group."""
    total: Counter[str] = Counter()
    for one, times in step.items():
        total[f"{one.kind} of {one.ranks}"] += times * one.bytes_in
    return dict(total)


def table(steps: dict[str, Counter[Collective]]) -> list[str]:
    """Lines: how many of each kind with the bytes of their larger side, in or out; and what each rank sends."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    rows = []
    for name, step in steps.items():
        cells = [name]
        for kind in kinds:
            of_kind = {one: times for one, times in step.items() if one.kind == kind}
            size = sum(times * max(one.bytes_in, one.bytes_out) for one, times in of_kind.items())
            cells.append(f"{sum(of_kind.values())} x, {size / 1e6:,.1f} MB" if of_kind else "-")
        rows.append([*cells, f"{sum(times * one.sent for one, times in step.items()) / 1e6:,.1f} MB"])
    head, align = ["", *kinds, "each rank sends"], ["left", *["right"] * 4]
    return tabulate(rows, head, "plain", disable_numparse=True, colalign=align).splitlines()


if __name__ == "__main__":
    sys.exit(main())
