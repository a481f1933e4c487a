"""The order of an epoch's samples as a function of their position: nothing is stored that grows
with the dataset.

Up to TABLE_LENGTH samples the order is torch.randperm's, exactly uniform. Above, where a table
would take 8 bytes per sample on every rank, it is a keyed permutation: a Feistel network over pairs
of digits, whose rare results beyond the last sample are permuted again ("cycle walking"). Source:
Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

Order = Literal["dataset", "randperm", "feistel"]

TABLE_LENGTH = 2**16  # half a MiB per rank, made in under a millisecond (measured)

# Each changes one of the two digits. Standards for small domains use 8 (FF3) and 10 (FF1): NIST SP
# 800-38G.
ROUNDS = 10

_LOW_32_BITS = 0xFFFF_FFFF


def shuffled_order(length: int) -> Order:
    """How a new run shuffles a dataset of this length."""
    return "randperm" if length <= TABLE_LENGTH else "feistel"


def epoch_order(order: str, length: int, seed: int, epoch: int) -> Callable[[Tensor], Tensor]:
    """positions in an epoch, int64 in [0, length) -> the samples there, of the same shape: a
    bijection.
    """
    if order == "dataset":
        return torch.clone
    if order == "randperm":
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(length, generator=generator).__getitem__
    return partial(permute, length=length, keys=epoch_keys(seed, epoch))


def epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """The keys of an epoch's permutation."""
    digest = hashlib.shake_128(struct.pack("<2Q", seed, epoch)).digest(8 * ROUNDS)
    return struct.unpack(f"<{ROUNDS}q", digest)


def permute(positions: Tensor, length: int, keys: Sequence[int]) -> Tensor:
    """A permutation of [0, length) that depends on `keys`, evaluated at `positions`; length is at
    most 2^62.
    """
    # A position is high * low_base + low, with digits of nearly equal range.
    low_base = math.isqrt(length - 1) + 1
    high_base = (length - 1) // low_base + 1
    samples = _feistel(positions, low_base, high_base, keys)
    while (outside := samples >= length).any():  # fewer than one in sqrt(length)
        samples[outside] = _feistel(samples[outside], low_base, high_base, keys)
    return samples


def permute_each(positions: Tensor, lengths: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """As `permute`, with a length, at most 2^52, and keys for each position: all int64 of one shape
    [n].
    """
    # The root of an integer is rounded alike on every machine.
    low_bases = lengths.double().sqrt().ceil().long()
    high_bases = (lengths - 1) // low_bases + 1
    samples = _feistel(positions, low_bases, high_bases, keys)
    while len(outside := (samples >= lengths).nonzero()[:, 0]):
        samples[outside] = _feistel(
            samples[outside],
            low_bases[outside],
            high_bases[outside],
            [key[outside] for key in keys],
        )
    return samples


def _feistel(
    values: Tensor, low_base: int | Tensor, high_base: int | Tensor, keys: Sequence[int | Tensor]
) -> Tensor:
    """A permutation of [0, low_base * high_base)."""
    high = values // low_base
    low = values - high * low_base
    for number, key in enumerate(keys):
        if number % 2:
            high = _add(high, _hash_below(low, key, high_base), high_base)
        else:
            low = _add(low, _hash_below(high, key, low_base), low_base)
    return high * low_base + low


def _add(digit: Tensor, other: Tensor, base: int | Tensor) -> Tensor:
    """(digit + other) modulo base, of two numbers below it; cheaper than a division."""
    total = digit + other
    return torch.where(total < base, total, total - base)


def _hash_below(digit: Tensor, key: int | Tensor, base: int | Tensor) -> Tensor:
    """A number in [0, base) for each digit, by a 64-bit key; int64 products wrap around.

    Two rounds of multiply and xorshift, with the factors of MurmurHash3's finaliser.
    """
    mixed = (digit + key).mul_(-0xAE502812AA7333)  # 0xff51afd7ed558ccd
    mixed.bitwise_xor_(mixed >> 32).mul_(-0x3B314601E57A13AD)  # 0xc4ceb9fe1a85ec53
    # base is at most 2^31, so that the product with 32 bits stays positive.
    return (mixed >> 32).bitwise_and_(_LOW_32_BITS).mul_(base) >> 32
