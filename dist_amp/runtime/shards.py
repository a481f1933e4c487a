"""A step's samples, split over ranks and micro-batches: by their positions first, of which a rank looks up its own."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

LOOKED_UP = 4096  # positions at a time: a look-up is 200 tensor operations, half as long for 8 as for 4,096 (measured)


@dataclass(frozen=True)
class Shard:
    """One micro-batch of one rank, by its samples' indices."""

    indices: tuple[int, ...]
    counts: bool = True  # False: padding


def shard_step(window: Sequence[int], world_size: int, micro_batch_size: int, rank: int) -> list[Shard]:
    """One step's samples, or positions -> this rank's micro-batches: the same number on every rank.

    None has a single sample, on which batch norm fails, if they can be split otherwise; some ranks get padding instead.
    """
    length, padding = len(window), tuple(window[: min(2, micro_batch_size)])
    count = math.ceil(length / (world_size * micro_batch_size))
    used = max(min(count * world_size, length // 2), math.ceil(length / micro_batch_size))  # of count * world_size
    shards = []
    for first in range(0, count * world_size, world_size):
        last = min(first + world_size, used)
        share = window[first * length // used : last * length // used]
        mine = tuple(share[rank :: last - first]) if rank < last - first else ()
        shards.append(Shard(mine) if mine else Shard(padding, counts=False))
    return shards


def look_up(order: Callable[[Tensor], Tensor], steps: Iterable[list[Shard]]) -> Iterator[list[Shard]]:
    """The steps with samples in place of positions; many steps at a time where they are small."""
    steps, count = iter(steps), 1
    while chunk := list(islice(steps, count)):
        flat = array("q", (position for shards in chunk for shard in shards for position in shard.indices))
        samples, start = order(torch.frombuffer(flat, dtype=torch.int64)).tolist(), 0
        for shards in chunk:
            looked_up = []
            for shard in shards:
                end = start + len(shard.indices)
                looked_up.append(Shard(tuple(samples[start:end]), shard.counts))
                start = end
            yield looked_up
        count = max(1, LOOKED_UP * len(chunk) // len(flat))
