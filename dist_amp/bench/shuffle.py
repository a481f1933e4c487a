"""How near the Parquet view's order comes to a full shuffle, and how soon the first step of a resumed run is found.

python -m dist_amp.bench shuffle

Rows are sorted by label, the worst case for an order that reads whole row groups. `variance` is that of the mean label
of a step's rows, relative to a full shuffle's; `correlation` is that of consecutive steps' means, 0 in a full shuffle.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.runtime.permutation import epoch_order
from dist_amp.runtime.plan import Plan
from dist_amp.sources.streams import shuffled, stream_order

ROWS, GROUPS, LABELS, EPOCHS = 2**20, 2**14, 10, 4
STREAMS, WINDOWS, BATCHES = 64, (1, 2, 4, 8, 16), (64, 256)
LARGE, LARGE_GROUPS = 10**9, (10**4, 10**5, 10**6)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Print a line per order, then one per number of row groups."""
    Parser("python -m dist_amp.bench shuffle", __doc__).parse_args(words)
    print(f"{ROWS:,} rows of {LABELS} labels in {GROUPS:,} row groups, {STREAMS} streams, mean of {EPOCHS} epochs")
    print("global batch size     " + "".join(f"{size:>24}" for size in BATCHES))
    print("shuffle_groups        " + "   variance  correlation" * len(BATCHES))
    for window in (*WINDOWS, 0):
        cells = "".join("{:>11.2f}{:>13.2f}".format(*quality(order_by(window), size)) for size in BATCHES)
        print(f"{window or 'full shuffle':<22}{cells}")
    print(f"\n{LARGE:,} rows, one of 8 ranks   row groups   until the first step at position {LARGE // 2:,}")
    for groups in LARGE_GROUPS:
        print(f"{groups:>44,}{1e3 * first_step_seconds(groups):>14.0f} ms")


def order_by(window: int) -> Callable[[int], Tensor]:
    """epoch -> its whole order; window 0: a full shuffle."""
    rows, everything = torch.full((GROUPS,), ROWS // GROUPS), torch.arange(ROWS)
    if window:
        return lambda epoch: stream_order(rows, STREAMS, window, 0, epoch)(everything)
    return lambda epoch: epoch_order("randperm", ROWS, 0, epoch)(everything)


def quality(order: Callable[[int], Tensor], batch_size: int) -> tuple[float, float]:
    """(variance of the steps' means relative to a full shuffle's, correlation of consecutive steps' means)."""
    labels = (torch.arange(ROWS) * LABELS // ROWS).double()
    means = torch.stack([labels[order(epoch)].reshape(-1, batch_size).mean(1) for epoch in range(EPOCHS)])
    off = means - labels.mean()
    expected = labels.var() / batch_size * (1 - batch_size / ROWS)  # drawn without putting back
    return (off.square().mean() / expected).item(), ((off[:, 1:] * off[:, :-1]).mean() / off.square().mean()).item()


def first_step_seconds(groups: int) -> float:
    """CPU time of one thread from the row groups' sizes to the rows of a rank's first micro-batch."""
    torch.set_num_threads(1)
    rows = torch.full((groups,), LARGE // groups)
    started = time.thread_time()
    name, own_order = shuffled(rows, STREAMS, 2)
    plan = Plan(LARGE, 8 * 32, 32, 8, 0, 0, name, own_order=own_order)
    next(plan.steps(LARGE // 2))
    return time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
