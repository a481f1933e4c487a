"""Which samples this rank takes, step after step: a pure function of the seed and the position in
the data.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from dist_amp.loading.order import epoch_order

# Positions at a time: a look-up is 200 tensor operations, and takes for 8 positions half of the
# time for 4,096 (measured).
LOOKED_UP = 4096


class Request(NamedTuple):
    """What a loader is asked for: one micro-batch."""

    seed: int  # of the random numbers that a loader worker draws
    indices: tuple[int, ...]  # of its samples
    augmentation: int = 0  # of the epoch: with a sample's index the seed of its augmentation


@dataclass(frozen=True)
class Shard:
    """One micro-batch of one rank, by its samples' indices."""

    indices: tuple[int, ...]
    counts: bool = True  # False: padding


@dataclass(frozen=True)
class Plan:
    """Which samples this rank takes, step after step."""

    length: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    rank: int
    seed: int
    order: str  # a name: see order.py, or the dataset's own
    drop_last: bool = False  # leave out the last step of an epoch if it is not full
    # The dataset's own epoch_order(seed, epoch).
    dataset_order: Callable[[int, int], Callable[[Tensor], Tensor]] | None = None

    def steps(self, position: int) -> Iterator[tuple[int, list[Shard]]]:
        """(samples consumed after the step, micro-batches) from `position` on, epoch after epoch
        without end.
        """
        epoch, offset = divmod(position, self.length)
        size = self.global_batch_size
        end = self.length
        if self.drop_last:
            end = self.length - size + 1
        while True:
            starts = range(offset, end, size)
            windows = (range(start, min(start + size, self.length)) for start in starts)
            steps = (
                shard_step(one, self.world_size, self.micro_batch_size, self.rank)
                for one in windows
            )
            for start, shards in zip(starts, look_up(self._order_of(epoch), steps), strict=True):
                yield epoch * self.length + min(start + size, self.length), shards
            epoch += 1
            offset = 0

    def _order_of(self, epoch: int) -> Callable[[Tensor], Tensor]:
        if self.dataset_order is not None:
            return self.dataset_order(self.seed, epoch)
        return epoch_order(self.order, self.length, self.seed, epoch)

    def requests(self, position: int, limit: int | None) -> Iterator[Request]:
        """Each micro-batch of the next `limit` steps."""
        for consumed, shards in islice(self.steps(position), limit):
            augmentation = hash((self.seed, (consumed - 1) // self.length)) % 2**63
            for number, shard in enumerate(shards):
                seed = hash((self.seed, consumed, number, self.rank)) % 2**63
                yield Request(seed, shard.indices, augmentation)


def shard_step(
    window: Sequence[int], world_size: int, micro_batch_size: int, rank: int
) -> list[Shard]:
    """One step's samples, or positions -> this rank's micro-batches: the same number on every rank.

    None has a single sample, on which batch norm fails, if they can be split otherwise; some ranks
    get padding instead.
    """
    length = len(window)
    padding = Shard(tuple(window[: min(2, micro_batch_size)]), counts=False)
    count = math.ceil(length / (world_size * micro_batch_size))
    # The micro-batches of all ranks that hold samples.
    used = max(min(count * world_size, length // 2), math.ceil(length / micro_batch_size))
    shards = []
    for first in range(0, count * world_size, world_size):
        last = min(first + world_size, used)
        share = window[first * length // used : last * length // used]
        indices: tuple[int, ...] = ()
        if rank < last - first:
            indices = tuple(share[rank :: last - first])
        shards.append(Shard(indices) if indices else padding)
    return shards


def look_up(
    order: Callable[[Tensor], Tensor], steps: Iterable[list[Shard]]
) -> Iterator[list[Shard]]:
    """The steps with samples in place of positions; many steps at a time where they are small."""
    steps = iter(steps)
    count = 1
    while chunk := list(islice(steps, count)):
        flat = array("q", (i for shards in chunk for shard in shards for i in shard.indices))
        samples = order(torch.frombuffer(flat, dtype=torch.int64)).tolist()
        start = 0
        for shards in chunk:
            looked_up = []
            for shard in shards:
                end = start + len(shard.indices)
                looked_up.append(Shard(tuple(samples[start:end]), shard.counts))
                start = end
            yield looked_up
        count = max(1, LOOKED_UP * len(chunk) // len(flat))
