"""What the order of the samples costs: the keyed permutation of large datasets, compared with a table by randperm.

python -m dist_amp.bench order
"""

import sys
import time
from collections.abc import Sequence
from itertools import islice

import torch

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.runtime.permutation import Order, epoch_order
from dist_amp.runtime.plan import LOOKED_UP, Plan

LENGTHS = (10**5, 10**7, 10**9)
RANKS, MICRO_BATCH, ACCUMULATION = 8, 32, 4
STEPS = 300


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Print a line per length and order, in CPU time of one thread."""
    Parser("python -m dist_amp.bench order", __doc__).parse_args(words)
    torch.set_num_threads(1)
    print(f"a step of {RANKS} ranks x {MICRO_BATCH} samples x {ACCUMULATION} micro-batches, on one rank")
    print("      samples  order      first step   further steps    1 million indices    table per rank")
    for length in LENGTHS:
        for order in ("randperm", "feistel"):
            if order == "randperm" and length == max(LENGTHS):
                print(f"{length:>13,}  {order:<9}  (not measured)    {8 * length / 2**20:>50,.0f} MiB")
                continue
            first, further, million = measure(order, length)
            table = 8 * length / 2**20 if order == "randperm" else 0
            print(
                f"{length:>13,}  {order:<9} {1e3 * first:>8.2f} ms {1e6 * further:>12.0f} us {1e3 * million:>17.0f} ms "
                f"{table:>13,.1f} MiB"
            )


def measure(order: Order, length: int) -> tuple[float, float, float]:
    """Seconds of CPU time until the first step is planned, per further step, and for a million positions alone."""
    started = time.thread_time()
    plan = Plan(length, RANKS * MICRO_BATCH * ACCUMULATION, MICRO_BATCH, RANKS, 0, 0, order)
    steps = plan.steps(length // 2)
    next(steps)
    first = time.thread_time()
    taken = len(list(islice(steps, min(STEPS, length // (4 * plan.global_batch_size)))))
    further = time.thread_time()
    at = epoch_order(order, length, 0, 0)
    made = time.thread_time()
    for positions in torch.randint(0, length, (2**20,)).split(LOOKED_UP):
        at(positions)
    return first - started, (further - first) / taken, time.thread_time() - made


if __name__ == "__main__":
    sys.exit(main())
