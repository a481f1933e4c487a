"""Counts the collectives of a step, and compares their bytes with the formulas of dist_amp.plan.

torchrun --nproc_per_node=2 -m benchmarks.collectives --config configs/fsdp_bf16.toml

`python -m dist_amp.plan` prints what a step of each strategy sends, on any number of ranks.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import on_a_run
from dist_amp.commands.estimates import Collective, Setup, of_a_step
from dist_amp.config.memory import tensor_bytes
from dist_amp.errors import ConfigError, Failure
from dist_amp.run import Run
from dist_amp.step import train_step

KINDS = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}


class Counting(TorchDispatchMode):
    """Counts collectives, those of DDP's C++ reducer too, but not those in groups of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[Collective] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_dtensors = function.namespace == "_c10d_functional"
        if is_dtensors and function._opname == "all_gather_into_tensor":
            ranks = args[1]
            size = tensor_bytes([args[0]])
            self._add("all_gather", ranks, size, ranks * size)
        if function.namespace == "c10d":
            group = next(value for value in args if isinstance(value, torch.ScriptObject))
            ranks = torch.distributed.ProcessGroup.unbox(group).size()
            sizes = []
            for value in args:
                if isinstance(value, Tensor | list):
                    sizes.append(
                        tensor_bytes(t for t in tree_leaves(value) if isinstance(t, Tensor))
                    )
            sizes = [size for size in sizes if size]  # outputs come first
            if ranks > 1:
                kind = KINDS.get(function._opname, function._opname)
                self._add(kind, ranks, sizes[-1], sizes[0])
        return function(*args, **(kwargs or {}))

    def _add(self, kind: str, ranks: int, bytes_in: int, bytes_out: int) -> None:
        if ranks > 1:
            self.collectives[Collective(kind, ranks, bytes_in, bytes_out)] += 1


def measure(run: Run) -> tuple[Counter[Collective], Counter[Collective]]:
    """What one step calls by the formula, and as counted in the third step from here."""
    for _ in range(2):
        train_step(run, next(run.data))
    micro_batches = next(run.data)
    with Counting() as counting:
        train_step(run, micro_batches)
    setup = Setup(
        run.config,
        run.parallel.strategy,
        run.world,
        run.task,
        run.parallel.module,
        run.precision,
    )
    return of_a_step(setup), counting.collectives


def check(run: Run) -> None:
    """Print a step's collectives. Errors: Failure if the bytes differ from the formula's."""
    if run.config.parallel.bit_exact:
        raise ConfigError(
            "parallel.bit_exact=true reduces by other calls, which send as much as the formula's; "
            "torchrun -m benchmarks.bit_exact counts them"
        )
    expected, counted = measure(run)
    world = run.world
    world.say(
        f"{run.parallel.strategy} on {world.world_size} x {world.device.type}, "
        f"{run.precision.name}: bytes that a rank puts into a step's collectives"
    )
    by_formula = bytes_in(expected)
    by_count = bytes_in(counted)
    world.say(f"counted     {by_count}\nby formula  {by_formula}")
    if by_formula != by_count:
        raise Failure("they differ: the formula leaves out frozen modules and repeated calls")


def bytes_in(step: Counter[Collective]) -> dict[str, int]:
    """What a rank puts in, by kind and size of the group."""
    total: Counter[str] = Counter()
    for one, times in step.items():
        total[f"{one.kind} of {one.ranks}"] += times * one.bytes_in
    return dict(total)


main = on_a_run(check)


if __name__ == "__main__":
    sys.exit(main())
