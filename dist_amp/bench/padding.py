"""The share of padding in batches that are padded to their longest sample, in plain order and by data.group_by_length.

The lengths are log-normal with a median of 200 tokens and a mean of 330, at most 2,048: about those of a set of chats.

python -m dist_amp.bench padding
"""

import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy
import torch

from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.runtime.permutation import shuffled_order
from dist_amp.runtime.plan import Plan
from dist_amp.sources.length_groups import LengthGroups

SAMPLES, RANKS, STEPS = 200_000, 8, 100
BATCHES = ((4, 1), (8, 4), (32, 1), (32, 4))  # micro-batch size, micro-batches per step
GROUPS = (0, 1, 10, 100)  # data.group_by_length; 0: plain order


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Print a line per batch size and setting."""
    Parser("python -m dist_amp.bench padding", __doc__).parse_args(words)
    torch.set_num_threads(1)
    drawn = numpy.random.default_rng(0).lognormal(numpy.log(200), 1.0, SAMPLES)
    lengths = drawn.clip(1, 2048).astype(numpy.int64)
    print(f"{RANKS} ranks, {STEPS} steps, {SAMPLES:,} samples of {lengths.mean():.0f} tokens on average")
    print("micro-batch  per step  group_by_length  padding  slowest rank  step-to-step spread  CPU per step")
    for size, count in BATCHES:
        for steps in GROUPS:
            padding, slowest, spread, seconds = measure(lengths, size, count, steps)
            print(
                f"{size:>11}  {count:>8}  {steps or 'off':>15}  {padding:>7.1%}  {slowest:>11.2f}x  {spread:>19.1%}"
                f"  {1e6 * seconds:>9.0f} us"
            )


def measure(lengths: Any, size: int, count: int, steps: int) -> tuple[float, float, float, float]:
    """How 100 steps of 8 ranks go, with `lengths` int64 [samples].

    Padding's share of all tokens; what the slowest rank computes over a rank's share of the real tokens; the standard
    deviation of a step's mean length over its mean; seconds of CPU time per planned step.
    """
    batch = size * count * RANKS
    order: tuple[str, Any] = (shuffled_order(len(lengths)), None)
    if steps:
        order = LengthGroups(range(len(lengths)), steps, lengths).shuffled(batch, RANKS)
    plans = [Plan(len(lengths), batch, size, RANKS, rank, 0, order[0], False, order[1]) for rank in range(RANKS)]
    started = time.thread_time()
    shards = [[micro_batches for _, micro_batches in islice(plan.steps(0), STEPS)] for plan in plans]
    seconds = (time.thread_time() - started) / RANKS / STEPS
    # [rank, step, micro-batch, sample]
    taken = lengths[numpy.array([[[one.indices for one in step] for step in rank] for rank in shards])]
    padded = size * taken.max(-1).sum(-1)  # tokens of [rank, step]
    means = taken.mean((0, 2, 3))
    slowest = padded.max(0).sum() * RANKS / taken.sum()
    return 1 - taken.sum() / padded.sum(), slowest, means.std() / means.mean(), seconds


if __name__ == "__main__":
    sys.exit(main())
