"""Counts the bytes that a rank sends in a step's collectives.

torchrun --nproc_per_node=2 -m benchmarks.collectives --config configs/fsdp_bf16.toml

`python -m dist_amp.plan` prints what a step of each strategy sends, on any number of ranks.
"""

import sys
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import on_a_run
from dist_amp.commands.imagined import Collective, collective_of
from dist_amp.run import Run
from dist_amp.step import train_step


class Counting(TorchDispatchMode):
    """Counts collectives, including those of DDP's C++ reducer but not those in groups of one."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[Collective] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if collective := collective_of(function, args):
            self.collectives[collective] += 1
        return function(*args, **(kwargs or {}))


def measure(run: Run) -> Counter[Collective]:
    """The collectives of a step, after two others."""
    for _ in range(2):
        train_step(run, next(run.data))
    micro_batches = next(run.data)
    with Counting() as counting:
        train_step(run, micro_batches)
    return counting.collectives


def sent_bytes(step: Counter[Collective]) -> dict[str, int]:
    """Bytes that a rank sends, by kind of collective and size of its group."""
    total: Counter[str] = Counter()
    for each, times in step.items():
        total[f"{each.kind} of {each.ranks}"] += round(times * each.sent)
    return dict(total)


def show(run: Run) -> None:
    world = run.world
    world.say(
        f"{run.parallel.strategy} on {world.world_size} x {world.device.type}, "
        f"{run.precision.name}: bytes that a rank sends in a step's collectives"
    )
    world.say(str(sent_bytes(measure(run))))


main = on_a_run(show)


if __name__ == "__main__":
    sys.exit(main())
