"""What the order of samples costs: a keyed permutation, and a table made by randperm.

python -m benchmarks order
"""

import sys
import time
from collections.abc import Sequence
from itertools import islice

import torch

from benchmarks.harness import command
from dist_amp.loading.plan import LOOKED_UP, Order, Plan, epoch_order
from dist_amp.supervise.command_line import Parser

LENGTHS = (10**5, 10**7, 10**9)
RANKS, MICRO_BATCH, ACCUMULATION = 8, 32, 4
STEPS = 300


@command
def main(words: Sequence[str]) -> None:
    """Print a line per length and order, in CPU time of one thread."""
    Parser("python -m benchmarks order", __doc__).parse_args(words)
    torch.set_num_threads(1)
    print(f"one rank of {RANKS} x {MICRO_BATCH} samples x {ACCUMULATION} micro-batches")
    print("      samples  order      first step   further steps    1 million indices")
    for length in LENGTHS:
        for order in ("randperm", "feistel"):
            name = f"{length:>13,}  {order:<9}"
            if order == "randperm" and length == max(LENGTHS):
                print(f"{name} (not measured: a table of {8 * length / 2**30:.1f} GiB per rank)")
                continue
            first, further, million = measure(order, length)
            print(
                f"{name}{1e3 * first:>10.2f} ms{1e6 * further:>13.0f} us{1e3 * million:>18.0f} ms"
            )


def measure(order: Order, length: int) -> tuple[float, float, float]:
    """Seconds until the first step is planned, per further step, and for a million positions."""
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
