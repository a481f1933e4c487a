"""What parallel.bit_exact costs: time, bytes sent and memory of its step next to the ordinary one.

torchrun --nproc_per_node=2 -m benchmarks.bit_exact --train.global_batch_size 64 --parallel.strategy
fsdp

The two take turns in blocks of BLOCK steps. On CPUs read the processor time: wall time contains the
other ranks' turns. Target on GPUs over NCCL: at most 5 % of a step. Arguments: those of
dist_amp.train, with train.global_batch_size and without parallel.bit_exact.
"""

import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.collectives import Counting, bytes_in
from benchmarks.harness import in_turns, on_a_run, timed
from dist_amp.bit_exact import ExactParallel
from dist_amp.config.memory import tensor_bytes
from dist_amp.run import Run, build_run
from dist_amp.step import train_step

BLOCK = 5
ROUNDS = 8
LINE = "{:<22}  {:>10}  {:>10}  {:>7}"


@on_a_run
def main(run: Run) -> None:
    """Time both steps of the config, and count what they send and keep."""
    world = run.world
    config = replace(run.config, parallel=replace(run.config.parallel, bit_exact=True))
    exact = build_run(config, world)
    runs: dict[str, Run] = {"ordinary": run, "exact": exact}
    for one in runs.values():
        steps(one, 2)
    blocks = in_turns(runs, lambda name: block(runs[name]), ROUNDS)
    micro_batches = run.config.train.global_batch_size // (  # type: ignore[operator]
        run.config.train.micro_batch_size * world.world_size
    )
    world.say(
        f"{run.parallel.strategy} on {world.world_size} x {world.device.type}, "
        f"{run.precision.name}, {micro_batches} micro-batches per rank; medians of {ROUNDS} "
        f"blocks of {BLOCK} steps"
    )
    world.say(LINE.format("", "ordinary", "exact", "ratio"))
    for number, what in enumerate(("wall ms", "processor ms")):
        ordinary, ours = ([one[number] for one in blocks[name]] for name in runs)
        ratios = sorted(ours[i] / ordinary[i] for i in range(ROUNDS))
        spread = f"{statistics.median(ratios):.2f}"
        medians = [f"{1e3 * statistics.median(times):.1f}" for times in (ordinary, ours)]
        world.say(LINE.format(what, *medians, spread) + f"  [{ratios[1]:.2f}, {ratios[-2]:.2f}]")
    sent = {name: bytes_of_a_step(one) for name, one in runs.items()}
    for kind in sorted(sent["ordinary"] | sent["exact"]):
        world.say(LINE.format(kind, sent["ordinary"].get(kind, 0), sent["exact"].get(kind, 0), ""))
    assert isinstance(exact.parallel, ExactParallel)
    kept = kept_bytes(exact, exact.parallel)
    gradients = tensor_bytes(
        p.to_local() if hasattr(p, "to_local") else p for p in exact.parallel.parameters
    )
    ratio = f"{kept / gradients:.2f}"
    world.say(LINE.format("bytes kept for sums", 0, kept, "") + f"  {ratio} x the gradients")
    exact.data.close()


def steps(run: Run, count: int) -> None:
    for _ in range(count):
        train_step(run, next(run.data))


def block(run: Run) -> tuple[float, float]:
    """(wall, processor) seconds per step."""
    began = time.process_time()
    wall = timed(run.world, partial(steps, run, BLOCK))
    return wall / BLOCK, (time.process_time() - began) / BLOCK


def bytes_of_a_step(run: Run) -> dict[str, int]:
    """What this rank puts into a step's collectives, by kind and size of the group."""
    micro_batches = next(run.data)
    with Counting() as counting:
        train_step(run, micro_batches)
    counted: Counter[Any] = counting.collectives
    return bytes_in(counted)


def kept_bytes(run: Run, parallel: ExactParallel) -> int:
    """The most that the sums of earlier micro-batches take in a step."""
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
