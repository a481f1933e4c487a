"""What one step sends: how many collectives, and bytes, by the formulas of docs/collectives.md; counted where it runs.

python -m dist_amp.bench.collectives --config configs/gpt_124m.toml [--world_size 8]
torchrun --nproc_per_node=2 -m dist_amp.bench.collectives --config configs/fsdp_bf16.toml

One process compares the strategies for the config's model on so many ranks, eight to a machine. Several take steps of
the config's own strategy, and hold what they counted against the formula. MB are 10^6 bytes, as in a network's GB/s.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.bench.harness import on_a_run
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.auto import find_blocks
from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.config.validate import accumulation_steps, replicas_of
from dist_amp.errors import ConfigError, Failure
from dist_amp.precision import DTYPES, Precision, build_precision
from dist_amp.run import Run
from dist_amp.runtime.environment import environment_number
from dist_amp.settings import Config, ParallelConfig, Strategy
from dist_amp.step import train_step
from dist_amp.task import Task
from dist_amp.world import World

RANKS_PER_MACHINE = 8  # of a world that is only imagined
# DDP's buckets, in bytes. Source: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
# How many float32 numbers each all-reduce of the step's own takes: the weight, and the squared norm.
STEP_SUMS = (2,)
KINDS = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}


@dataclass(frozen=True)
class Collective:
    """One collective as a rank sees it: among how many ranks, and the bytes that it puts in and gets out."""

    kind: str
    ranks: int
    bytes_in: int
    bytes_out: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring. Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * max(self.bytes_in, self.bytes_out)


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers and reduces as one: a block, or what is left in the root."""

    parameters: Sequence[Tensor]
    is_root: bool = False
    stays: bool = False  # whole from its forward to its backward: gathered once, not once for each

    def bytes(self, shards: int, dtype: torch.dtype | None, trained_only: bool = False) -> int:
        """Of all shards together: each parameter's first dimension is padded to a multiple of their number.

        dtype: what it travels in; None: as it is.
        """
        return sum(
            math.ceil(p.shape[0] / shards) * shards * math.prod(p.shape[1:]) * (dtype or p.dtype).itemsize
            for p in self.parameters
            if p.requires_grad or not trained_only
        )


def units_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """The blocks, and what is left in the root, in the order in which their forwards end."""
    units = [Unit(list(block.parameters()), stays=block is blocks[-1]) for block in blocks]
    inside = {id(p) for unit in units for p in unit.parameters}
    units.append(Unit([p for p in module.parameters() if id(p) not in inside], is_root=True, stays=True))
    return [unit for unit in units if unit.parameters]


def of_step_sums(ranks: int) -> Counter[Collective]:
    """The step's own: what the loss is divided by, and the gradients' squared norm."""
    return Counter(Collective("all_reduce", ranks, 4 * numbers, 4 * numbers) for numbers in STEP_SUMS)


def of_ddp(parameters: Iterable[Tensor], ranks: int, dtype: torch.dtype | None) -> Counter[Collective]:
    """One all-reduce per bucket, whatever the number of micro-batches: a gradient that fills a bucket closes it.

    Gradients are taken to become ready in the reverse order of the parameters: another order makes buckets of other
    sizes, and not more bytes. dtype: what they travel in; None: their own.
    """
    buckets, held = [0], 0
    for p in reversed([p for p in parameters if p.requires_grad]):
        if held >= (FIRST_BUCKET if len(buckets) == 1 else BUCKET):
            buckets.append(0)
            held = 0
        held += p.numel() * p.dtype.itemsize
        buckets[-1] += p.numel() * (dtype or p.dtype).itemsize
    return Counter(Collective("all_reduce", ranks, size, size) for size in buckets)


def of_sharded(
    units: Sequence[Unit],
    shards: int,
    replicas: int,
    micro_batches: int,
    reduce_every: bool,
    gathered_in: torch.dtype | None,
    reduced_in: torch.dtype | None,
) -> Counter[Collective]:
    """FSDP2, or HSDP where there are replicas: of a model each of whose blocks is trained, and called once."""
    counted: Counter[Collective] = Counter()
    for unit in units:
        gathered = unit.bytes(shards, gathered_in)
        reduced = unit.bytes(shards, reduced_in, trained_only=True)
        # In backward FSDP2 fetches ahead by the order of all forwards since the last step: from the first block on to
        # what came last in the micro-batch before, in vain at the step's end, unless that is the root, still whole.
        in_vain = unit is units[-1] and not unit.is_root and micro_batches > 1
        gathers = micro_batches * (1 if unit.stays else 2) + in_vain
        counted[Collective("all_gather", shards, gathered // shards, gathered)] += gathers
        reductions = micro_batches if reduce_every else 1
        counted[Collective("reduce_scatter", shards, reduced, reduced // shards)] += reductions
        if replicas > 1:
            counted[Collective("all_reduce", replicas, reduced // shards, reduced // shards)] += 1
    return Counter({one: times for one, times in counted.items() if one.bytes_in and one.ranks > 1})


def of_a_step(
    config: ParallelConfig,
    strategy: Strategy,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    precision: Precision,
    world: World,
    micro_batches: int,
) -> Counter[Collective]:
    """How often a rank calls each collective in one `train_step`, from the third on; before, DDP lays out its buckets.

    module, blocks: as `build_parallel` gets them, or has left them. precision: of the sharded strategies.
    """
    if strategy == "single":
        return Counter()
    own = of_step_sums(world.world_size)
    if strategy == "ddp":
        dtype = None if config.comm_dtype == "off" else DTYPES[config.comm_dtype]
        return own + of_ddp(module.parameters(), world.world_size, dtype)
    replicas = replicas_of(config, world) if strategy == "hsdp" else 1
    casts = precision.cast_by == "policy"
    return own + of_sharded(
        units_of(module, blocks),
        world.world_size // replicas,
        replicas,
        micro_batches,
        config.accumulate_reduce == "every",
        precision.dtype if casts else None,
        DTYPES[config.reduce_dtype] if casts else None,
    )


class Counting(TorchDispatchMode):
    """Counts what is called inside, by DDP's reducer in C++ too; not where a rank is alone, and nothing travels."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[Collective] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            kind = KINDS.get(function._opname, function._opname)
            group = next(value for value in args if isinstance(value, torch.ScriptObject))
            sizes = [_bytes(value) for value in args if isinstance(value, Tensor | list) and _bytes(value)]
            ranks = torch.distributed.ProcessGroup.unbox(group).size()
            if ranks > 1:
                self.collectives[Collective(kind, ranks, sizes[-1], sizes[0])] += 1  # outputs stand first
        return function(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


def main(argv: Sequence[str] | None = None) -> int:
    """The command: compares the strategies, or counts one. Exit status 1 if count and formula differ."""
    return exit_status(count_or_compare, argv)


def count_or_compare(words: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.bench.collectives", __doc__)
    parser.add_argument("--world_size", type=int, default=8, help="ranks to compare the strategies on; default 8")
    options, words = parser.parse_known_args(words)
    if environment_number("WORLD_SIZE", 1) > 1:
        return on_a_run(tell, words)
    if options.world_size < 2:
        raise ConfigError(f"--world_size={options.world_size} sends nothing; use 2 or more")
    config = load_config(words)
    task = build_task(config.task, config.data)
    print("\n".join(compare(config, task, task.build_model(), options.world_size)))
    return 0


def compare(config: Config, task: Task, module: nn.Module, ranks: int) -> list[str]:
    """JsonlWriter: what a step of each strategy sends on so many ranks; of hsdp where its replicas divide them.

    Without the step's own sums, which are a few bytes.
    """
    world = World(world_size=ranks, local_world_size=min(ranks, RANKS_PER_MACHINE))
    micro_batches = accumulation_steps(config.train, ranks)
    precision = build_precision(config.precision, True, world)
    replicas = replicas_of(config.parallel, world)
    last, every = (replace(config.parallel, accumulate_reduce=when) for when in ("last", "every"))
    ways: list[tuple[str, Strategy, ParallelConfig]] = [("ddp", "ddp", config.parallel)]
    ways += [("fsdp, last", "fsdp", last), ("fsdp, every", "fsdp", every)]
    if ranks % replicas == 0:
        ways += [(f"hsdp of {replicas}, last", "hsdp", last), (f"hsdp of {replicas}, every", "hsdp", every)]
    rows = []
    for name, strategy, parallel in ways:
        step = of_a_step(parallel, strategy, module, blocks_of(task, module), precision, world, micro_batches)
        rows.append(row(name, step - of_step_sums(ranks)))
    parameters = sum(p.numel() for p in module.parameters())
    return [
        f"{parameters:,} parameters, {ranks} ranks, {precision.name}, a step of {micro_batches} micro-batches",
        "",
        *table(rows),
    ]


def tell(run: Run) -> None:
    """Errors: Failure where a step's collectives take other bytes than by the formula."""
    expected, counted = measure(run)
    run.world.say(
        f"{run.parallel.strategy} on {run.world.world_size} x {run.world.device.type}, {run.precision.name}\n"
    )
    run.world.say("\n".join(table([row("formula", expected), row("counted", counted)])))
    if (other := volume(counted)) != (own := volume(expected)):
        raise Failure(
            f"rank {run.world.rank} put {dict(other)} bytes into collectives, by the formula {dict(own)}; modules that "
            "are frozen, or called more than once, are not in it"
        )


def measure(run: Run) -> tuple[Counter[Collective], Counter[Collective]]:
    """What one step calls by the formula, and as counted in the third step from here."""
    for _ in range(2):
        train_step(run, next(run.data))
    micro_batches = next(run.data)
    with Counting() as counting:
        train_step(run, micro_batches)
    config, parallel, module = run.config.parallel, run.parallel, run.parallel.module
    blocks = blocks_of(run.task, module)
    expected = of_a_step(config, parallel.strategy, module, blocks, run.precision, run.world, len(micro_batches))
    return expected, counting.collectives


def blocks_of(task: Task, module: nn.Module) -> Sequence[nn.Module]:
    return list(task.blocks(module) if hasattr(task, "blocks") else find_blocks(module))


def volume(step: Counter[Collective]) -> Counter[str]:
    """Bytes that a rank puts into the collectives of each kind."""
    total: Counter[str] = Counter()
    for one, times in step.items():
        total[f"{one.kind} of {one.ranks}"] += times * one.bytes_in
    return total


def row(name: str, step: Counter[Collective]) -> list[str]:
    """Cells: how many of each kind, and the bytes of their larger side, in or out; at last what a rank sends."""
    cells = [name]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        of_kind = {one: times for one, times in step.items() if one.kind == kind}
        size = sum(times * max(one.bytes_in, one.bytes_out) for one, times in of_kind.items())
        cells.append(f"{sum(of_kind.values())} x, {size / 1e6:,.1f} MB" if of_kind else "-")
    return [*cells, f"{sum(times * one.sent for one, times in step.items()) / 1e6:,.1f} MB"]


def table(rows: list[list[str]]) -> list[str]:
    rows = [["", "all_gather", "reduce_scatter", "all_reduce", "each rank sends"], *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip() for cells in rows]


if __name__ == "__main__":
    sys.exit(main())
