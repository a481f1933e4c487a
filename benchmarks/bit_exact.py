"""The cost of parallel.bit_exact: time, bytes sent and memory of a step, with and without it.

torchrun --nproc_per_node=2 -m benchmarks.bit_exact --train.global_batch_size 64 --parallel.strategy
fsdp

The two take turns in blocks of BLOCK steps; on CPUs, each rank has one thread. Ratios are taken in
each round; printed are their median and its 95 % interval. Times are the slowest rank's. On CPUs,
read the processor time: wall time contains the other ranks' turns. Target on GPUs over NCCL: at
most 5 % of a step. Arguments: those of dist_amp.train, with train.global_batch_size and without
parallel.bit_exact.

bytes kept for sums   peak of the gradient sums of earlier micro-batches
bytes made in a step  peak of what a step allocates: activations, gradients, sums, buffers
"""

import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor

from benchmarks.activations import Kept
from benchmarks.collectives import Counting, sent_bytes
from benchmarks.harness import in_turns, on_a_run, timed
from benchmarks.report import interval, median
from dist_amp.bit_exact import ExactParallel
from dist_amp.config.memory import tensor_bytes
from dist_amp.run import Run, build_run
from dist_amp.step import train_step
from dist_amp.world import local

BLOCK = 5
ROUNDS = 12
GOAL = 1.05  # times the ordinary step's wall time, on GPUs
LINE = "{:<22}  {:>12}  {:>12}  {}"


@on_a_run
def main(run: Run) -> None:
    world = run.world
    config = replace(run.config, parallel=replace(run.config.parallel, bit_exact=True))
    exact = build_run(config, world)
    runs: dict[str, Run] = {"ordinary": run, "exact": exact}
    for each_run in runs.values():
        steps(each_run, 2)
    blocks = in_turns(runs, lambda name: block(runs[name]), ROUNDS)
    micro_batches = run.config.train.global_batch_size // (  # type: ignore[operator]
        run.config.train.micro_batch_size * world.world_size
    )
    world.say(
        f"{run.parallel.strategy} on {world.world_size} x {world.device.type}, "
        f"{run.precision.name}, {micro_batches} micro-batches per rank; medians of {ROUNDS} "
        f"rounds of {BLOCK} steps each"
    )
    world.say(LINE.format("", "ordinary", "exact", "ratio"))
    by_rank = world.gather(blocks)
    for number, what in enumerate(("wall ms", "processor ms")):
        times = {}  # the slowest rank's, in each round
        for name in runs:
            rounds = zip(*(rank[name] for rank in by_rank), strict=True)
            times[name] = [max(block[number] for block in ranks) for ranks in rounds]
        ratios = [b / a for a, b in zip(times["ordinary"], times["exact"], strict=True)]
        medians = [f"{1e3 * median(times[name]):.1f}" for name in runs]
        world.say(LINE.format(what, *medians, interval(ratios)))
        if world.device.type == "cuda" and what == "wall ms":
            verdict = "met" if median(ratios) <= GOAL else "missed"
            world.say(f"{median(ratios) - 1:.1%} of a step; goal {GOAL - 1:.0%}: {verdict}")
    sent = {name: bytes_of_a_step(each_run) for name, each_run in runs.items()}
    for kind in sorted(sent["ordinary"] | sent["exact"]):
        world.say(LINE.format(kind, sent["ordinary"].get(kind, 0), sent["exact"].get(kind, 0), ""))
    assert isinstance(exact.parallel, ExactParallel)
    kept = kept_bytes(exact, exact.parallel)
    ratio = f"{kept / tensor_bytes(map(local, exact.parallel.parameters)):.2f}"
    world.say(LINE.format("bytes kept for sums", 0, kept, f"{ratio} x the gradients"))
    made = [made_bytes(each_run) for each_run in runs.values()]
    world.say(LINE.format("bytes made in a step", *made, f"{made[1] / made[0]:.3f}"))
    exact.data.close()


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        step(run, next(run.data))


def step(run: Run, micro_batches: list[Any]) -> None:
    """Take a step and record its loss, which an exact step sums over the ranks."""
    run.metrics.after_step(train_step(run, micro_batches))


def block(run: Run) -> tuple[float, float]:
    """(wall, processor) seconds per step."""
    began = time.process_time()
    wall = timed(run.world, partial(steps, run, BLOCK))
    return wall / BLOCK, (time.process_time() - began) / BLOCK


def bytes_of_a_step(run: Run) -> dict[str, int]:
    """What this rank sends in a step, by kind of collective and size of its group."""
    micro_batches = next(run.data)
    with Counting() as counting:
        step(run, micro_batches)
    counted: Counter[Any] = counting.collectives
    return sent_bytes(counted)


class Made(Kept):
    """Context whose `most` is the peak of the bytes of the tensors created in it."""

    most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again on its local tensors
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.most = max(self.most, self.live_bytes())
        return out


def made_bytes(run: Run) -> int:
    micro_batches = next(run.data)
    with Made() as made:
        step(run, micro_batches)
    return made.most


def kept_bytes(run: Run, parallel: ExactParallel) -> int:
    """The peak size of the sums of earlier micro-batches in a step."""
    most = 0
    add = parallel._add

    def measured(is_last: bool) -> None:
        nonlocal most
        add(is_last)
        most = max(most, sum(tensor_bytes(part) for part in parallel._sums))

    parallel._add = measured  # type: ignore[method-assign]
    steps(run, 1)
    parallel._add = add  # type: ignore[method-assign]
    return most


if __name__ == "__main__":
    sys.exit(main())
