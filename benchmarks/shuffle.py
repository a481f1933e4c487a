"""How close the Parquet view's order comes to a full shuffle, and how long a late resume takes.

python -m benchmarks shuffle

Rows are sorted by label, the worst case for an order that reads whole row groups. `variance` is the
variance of a step's mean label, relative to a full shuffle; `correlation` is the correlation
between the means of consecutive steps, which is 0 in a full shuffle.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import command
from dist_amp.loading.plan import Plan, epoch_order
from dist_amp.sources.parquet import stream_order
from dist_amp.supervise.command_line import Parser

ROWS, GROUPS, LABELS, EPOCHS = 2**20, 2**14, 10, 4
STREAMS, WINDOWS, BATCHES = 64, (1, 2, 4, 8, 16), (64, 256)
LARGE, LARGE_GROUPS = 10**9, (10**4, 10**5, 10**6)


@command
def main(words: Sequence[str]) -> None:
    Parser("python -m benchmarks shuffle", __doc__).parse_args(words)
    print(f"{ROWS:,} rows of {LABELS} labels in {GROUPS:,} row groups, {STREAMS} streams")
    print("global batch size     " + "".join(f"{size:>24}" for size in BATCHES))
    print("shuffle_groups        " + "   variance  correlation" * len(BATCHES))
    for window in (*WINDOWS, 0):
        qualities = [quality(order_by(window), size) for size in BATCHES]
        cells = "".join("{:>11.2f}{:>13.2f}".format(*each) for each in qualities)
        print(f"{window or 'full shuffle':<22}{cells}")
    print(f"\n{LARGE:,} rows, one of 8 ranks: until the first step at position {LARGE // 2:,}")
    for groups in LARGE_GROUPS:
        print(f"{groups:>13,} row groups{1e3 * first_step_seconds(groups):>14.0f} ms")


def order_by(window: int) -> Callable[[int], Tensor]:
    """A function from an epoch to its order of rows. window 0: a full shuffle."""
    everything = torch.arange(ROWS)
    rows = torch.full((GROUPS,), ROWS // GROUPS)
    if window:
        return lambda epoch: stream_order(rows, STREAMS, window, 0, epoch)(everything)
    return lambda epoch: epoch_order("randperm", ROWS, 0, epoch)(everything)


def quality(order: Callable[[int], Tensor], batch_size: int) -> tuple[float, float]:
    """(relative variance of the steps' means, correlation of consecutive steps' means)."""
    labels = (torch.arange(ROWS) * LABELS // ROWS).double()
    epochs = [labels[order(epoch)].reshape(-1, batch_size).mean(1) for epoch in range(EPOCHS)]
    deviation = torch.stack(epochs) - labels.mean()
    variance = deviation.square().mean()
    expected = labels.var() / batch_size * (1 - batch_size / ROWS)  # drawn without replacement
    correlation = (deviation[:, 1:] * deviation[:, :-1]).mean() / variance
    return (variance / expected).item(), correlation.item()


def first_step_seconds(groups: int) -> float:
    """CPU time of one thread from the row groups' sizes to a rank's micro-batch at LARGE // 2."""
    torch.set_num_threads(1)
    rows = torch.full((groups,), LARGE // groups)
    started = time.thread_time()
    order = partial(stream_order, rows, STREAMS, 2)
    plan = Plan(LARGE, 8 * 32, 32, 8, 0, 0, "streams", dataset_order=order)
    next(plan.steps(LARGE // 2))
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
