"""The samples that this rank takes in each step: a pure function of the seed and the position.

`epoch_order` maps the positions in an epoch to samples: by a table, or for long datasets by a
computed permutation (`permute`). `shard_step` divides a step over ranks and micro-batches.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

Order = Literal["dataset", "randperm", "feistel"]
EpochOrder = Callable[[Tensor], Tensor]  # positions in an epoch -> indices of samples
OrderOf = Callable[[int, int], EpochOrder]  # (seed, epoch) -> the epoch's order
Deal = Callable[[Sequence[int], int, int, int], list["Shard"]]  # a function like shard_step

TABLE_LENGTH = 2**16  # half a MiB per rank, made in under a millisecond (measured)
ROUNDS = 10  # of the Feistel network. NIST SP 800-38G has 8 (FF3) and 10 (FF1) for small domains.
LOOKED_UP = 4096  # positions permuted at a time: even 8 take half the time of 4,096 (measured)


@dataclass(frozen=True)
class Shard:
    """One micro-batch of one rank, by its samples' indices."""

    indices: tuple[int, ...]
    counts: bool = True  # False: padding, whose loss has weight 0
    seed: int = 0  # of a loader worker's random numbers
    augmentation: int = 0  # with a sample's index, the seed of its augmentation in this epoch


@dataclass(frozen=True)
class Plan:
    """The samples that this rank takes in each step of a dataset of `length` samples."""

    length: int
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    rank: int
    seed: int
    order: str  # an Order, or the name of `dataset_order`
    drop_last: bool = False  # leave out an incomplete last step of an epoch
    dataset_order: OrderOf | None = None
    deal: Deal | None = None  # used instead of shard_step

    def steps(self, position: int) -> Iterator[tuple[int, list[Shard]]]:
        """Yields (samples consumed after the step, micro-batches) from `position` on, forever."""
        order_of = self.dataset_order or partial(epoch_order, self.order, self.length)
        size = self.global_batch_size
        end = self.length
        if self.drop_last:
            end = self.length - size + 1
        at_once = max(1, LOOKED_UP * self.world_size // size)  # steps that are permuted together
        epoch, offset = divmod(position, self.length)
        while True:
            order = order_of(self.seed, epoch)
            starts = range(offset, end, size)
            for first in range(0, len(starts), at_once):
                yield from self._steps(epoch, order, starts[first : first + at_once])
            epoch += 1
            offset = 0

    def _steps(
        self, epoch: int, order: EpochOrder, starts: range
    ) -> Iterator[tuple[int, list[Shard]]]:
        windows = [range(i, min(i + self.global_batch_size, self.length)) for i in starts]
        deal = self.deal or shard_step
        steps = [
            deal(window, self.world_size, self.micro_batch_size, self.rank) for window in windows
        ]
        positions = [i for shards in steps for shard in shards for i in shard.indices]
        samples = iter(order(torch.tensor(positions)).tolist())
        augmentation = hash((self.seed, epoch)) % 2**63
        for window, shards in zip(windows, steps, strict=True):
            consumed = epoch * self.length + window.stop
            step = []
            for number, shard in enumerate(shards):
                indices = tuple(islice(samples, len(shard.indices)))
                micro_batch = number * self.world_size + self.rank  # its number among all ranks'
                seed = hash((self.seed, consumed, micro_batch)) % 2**63
                step.append(Shard(indices, shard.counts, seed, augmentation))
            yield consumed, step

    def micro_batches(self, position: int, limit: int | None) -> Iterator[Shard]:
        for _, shards in islice(self.steps(position), limit):
            yield from shards


def shard_step(
    window: Sequence[int], world_size: int, micro_batch_size: int, rank: int
) -> list[Shard]:
    """Positions (or samples) of a step -> this rank's micro-batches, as many as on each other rank.
    Where possible, none has a single sample, on which batch norm fails; some are padding instead.
    """
    length = len(window)
    padding = Shard(tuple(window[: min(2, micro_batch_size)]), counts=False)  # the first samples
    count = math.ceil(length / (world_size * micro_batch_size))
    # The number of micro-batches, over all ranks, that hold samples; the others are padding.
    filled = max(min(count * world_size, length // 2), math.ceil(length / micro_batch_size))
    shards = []
    for first in range(0, count * world_size, world_size):
        last = min(first + world_size, filled)
        share = window[first * length // filled : last * length // filled]
        if rank < last - first:
            shards.append(Shard(tuple(share[rank :: last - first])))
        else:
            shards.append(padding)
    return shards


def shuffled_order(length: int) -> Order:
    """The shuffled order in which a new run reads a dataset of this length."""
    if length > TABLE_LENGTH:
        return "feistel"
    return "randperm"


def epoch_order(order: str, length: int, seed: int, epoch: int) -> EpochOrder:
    """The function from positions in an epoch, int64 in [0, length), to samples: a bijection."""
    if order == "dataset":
        return torch.clone
    if order == "feistel":
        return partial(permute, length=length, keys=epoch_keys(seed, epoch))
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(length, generator=generator).__getitem__


def epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.shake_128(struct.pack("<2Q", seed, epoch)).digest(8 * ROUNDS)
    return struct.unpack(f"<{ROUNDS}q", digest)


def permute(
    positions: Tensor, length: int | Tensor, keys: Sequence[int] | Sequence[Tensor]
) -> Tensor:
    """A permutation of [0, length), computed at `positions`, int64 of any shape.

    `length`, at most 2^52, and each of the ROUNDS keys are one number, or one per position. A
    Feistel network permutes [0, low_base * high_base); its rare results beyond the last sample are
    permuted again ("cycle walking"). Source: Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9.
    """
    lengths = torch.as_tensor(length).expand_as(positions)
    keys_of = [torch.as_tensor(key).expand_as(positions) for key in keys]
    # A position is high * low_base + low, with digits of nearly equal range.
    low_bases = lengths.double().sqrt().ceil().long()  # by IEEE 754, the same on every machine
    high_bases = (lengths - 1) // low_bases + 1
    samples = _feistel(positions, low_bases, high_bases, keys_of)
    while (outside := samples >= lengths).any():  # fewer than one in sqrt(length)
        samples[outside] = _feistel(
            samples[outside],
            low_bases[outside],
            high_bases[outside],
            [key[outside] for key in keys_of],
        )
    return samples


def _feistel(values: Tensor, low_base: Tensor, high_base: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """A permutation of [0, low_base * high_base): rounds add a hash of one digit to the other."""
    high = values // low_base
    low = values - high * low_base
    for number, key in enumerate(keys):
        if number % 2:
            high = _add_below(high, _hash_below(low, key, high_base), high_base)
        else:
            low = _add_below(low, _hash_below(high, key, low_base), low_base)
    return high * low_base + low


def _add_below(digit: Tensor, other: Tensor, base: Tensor) -> Tensor:
    """(digit + other) modulo base, for two numbers below base, without a division."""
    total = digit + other
    return torch.where(total < base, total, total - base)


def _hash_below(digit: Tensor, key: Tensor, base: Tensor) -> Tensor:
    """A hash in [0, base) of each digit and a 64-bit key. Source: MurmurHash3's finaliser."""
    mixed = (digit + key).mul_(-0xAE502812AA7333)  # 0xff51afd7ed558ccd
    mixed.bitwise_xor_(mixed >> 32).mul_(-0x3B314601E57A13AD)  # 0xc4ceb9fe1a85ec53
    # base is at most 2^31, so that the product with 32 bits stays positive.
    return (mixed >> 32).bitwise_and_(0xFFFF_FFFF).mul_(base) >> 32
