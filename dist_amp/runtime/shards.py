"""A step's samples, split over ranks and micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
