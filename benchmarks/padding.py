"""The share of padding in batches that are padded to their longest sample, with and without
data.group_by_length.

The lengths are log-normal, about those of a set of chats: median 200 tokens, mean 330, at most
2,048.

python -m benchmarks padding
"""

import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy
import torch

from benchmarks.harness import command
from dist_amp.loading.length_groups import LengthGroups
from dist_amp.loading.plan import Plan, shuffled_order
from dist_amp.supervise.command_line import Parser

SAMPLES, RANKS, STEPS = 200_000, 8, 100
BATCHES = ((4, 1), (8, 4), (32, 1), (32, 4))  # micro-batch size, micro-batches per step
GROUPS = (0, 1, 10, 100)  # data.group_by_length; 0: off


@command
def main(words: Sequence[str]) -> None:
    Parser("python -m benchmarks padding", __doc__).parse_args(words)
    torch.set_num_threads(1)
    drawn = numpy.random.default_rng(0).lognormal(numpy.log(200), 1.0, SAMPLES)
    lengths = drawn.clip(1, 2048).astype(numpy.int64)
    print(f"{RANKS} ranks, {STEPS} steps, {SAMPLES:,} samples")
    print("micro-batch  per step  group_by_length  padding  slowest rank  CPU per step")
    for size, count in BATCHES:
        for steps in GROUPS:
            padding, slowest, seconds = measure(lengths, size, count, steps)
            print(
                f"{size:>11}  {count:>8}  {steps or 'off':>15}  {padding:>7.1%}  {slowest:>11.2f}x "
                f" {1e6 * seconds:>9.0f} us"
            )


def measure(lengths: Any, size: int, count: int, steps: int) -> tuple[float, float, float]:
    """Padding's share of tokens; slowest rank's tokens over the mean; CPU seconds per step."""
    batch = size * count * RANKS
    order: tuple[str, Any] = (shuffled_order(len(lengths)), None)
    if steps:
        order = LengthGroups(range(len(lengths)), steps, lengths).shuffled(batch, RANKS)
    started = time.thread_time()
    shards = []
    for rank in range(RANKS):
        plan = Plan(len(lengths), batch, size, RANKS, rank, 0, order[0], False, order[1])
        shards.append([[part.indices for part in step] for _, step in islice(plan.steps(0), STEPS)])
    seconds = (time.thread_time() - started) / RANKS / STEPS
    tokens = lengths[numpy.array(shards)]  # [rank, step, micro-batch, sample]
    padded = size * tokens.max(-1).sum(-1)  # [rank, step]
    slowest = padded.max(0).sum() * RANKS / tokens.sum()
    return 1 - tokens.sum() / padded.sum(), slowest, seconds


if __name__ == "__main__":
    sys.exit(main())
