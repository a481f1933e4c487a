"""The order of rows stored in groups: nearly a full shuffle of few groups at a time.

In each epoch the groups are put in a random order, and the sequence of their rows is cut into
`streams` of equal length. Position p takes the next row of stream p mod streams, so that a rank,
which takes the positions of one remainder modulo the world size, owns whole streams. Inside a
stream, windows of `shuffle_groups` groups are shuffled by row. All of it is computed from the
groups' sizes; what is kept takes 40 bytes per group, whatever the number of rows.

A group that is cut belongs to two neighbouring streams. One rank's streams lie side by side, and
every other stream runs backwards, so that neighbours reach the group at the same time and it is
read once. Over all ranks this makes groups + ranks - 1 reads at most, if the world size is a
product of the first prime factors of `streams`, as any power of two is of 64; for other world sizes
groups + streams - 1.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dist_amp.loading.order import epoch_keys, epoch_order, permute_each

# 2^64 / the golden ratio: its multiples lie far apart, and so do the keys of two windows.
GOLDEN = -0x61C8864680B583EB


def stream_order(
    rows: Tensor, streams: int, shuffle_groups: int, seed: int, epoch: int
) -> Callable[[Tensor], Tensor]:
    """Positions in an epoch, int64 in [0, sum of rows) -> the rows there, of the same shape: a
    bijection.

    rows: int64 [R], those of each group in the order in which they are numbered; none is 0. R is at
    least `streams`.
    """
    total = int(rows.sum())
    window = shuffle_groups
    groups = epoch_order("randperm", len(rows), seed, epoch)(torch.arange(len(rows)))
    sizes = rows[groups]
    ends = sizes.cumsum(0)  # of each group in the epoch's sequence of rows
    starts = ends - sizes
    first_rows = (rows.cumsum(0) - rows)[groups]
    shift = first_rows - starts  # from a place in the sequence to a row's number
    stream_of_slot = digits_reversed(streams)
    slots = torch.arange(streams)
    lengths = torch.empty(streams, dtype=torch.int64)
    lengths[stream_of_slot] = (total - slots + streams - 1) // streams
    stream_ends = lengths.cumsum(0)
    stream_starts = stream_ends - lengths
    first_groups = torch.searchsorted(ends, stream_starts, right=True)
    keys = epoch_keys(seed, epoch)

    def rows_at(positions: Tensor) -> Tensor:
        stream = stream_of_slot[positions % streams]
        offset = positions // streams
        start = stream_starts[stream]
        end = stream_ends[stream]
        place = torch.where(stream % 2 == 0, start + offset, end - 1 - offset)
        behind = torch.searchsorted(ends, place, right=True) - first_groups[stream]
        first = first_groups[stream] + behind // window * window
        low = torch.maximum(starts[first], start)
        high = torch.minimum(ends[(first + window - 1).clamp_(max=len(ends) - 1)], end)
        window_keys = [low * GOLDEN + key for key in keys]
        place = low + permute_each(place - low, high - low, window_keys)
        return place + shift[torch.searchsorted(ends, place, right=True)]

    return rows_at


def shuffled(
    rows: Tensor, streams: int, shuffle_groups: int
) -> tuple[str, partial[Callable[[Tensor], Tensor]]]:
    """(the order's name, its function of seed and epoch): see a dataset's `shuffled`."""
    name = f"parquet {streams=} {shuffle_groups=}"  # stored in checkpoints
    return name, partial(stream_order, rows, streams, shuffle_groups)


def digits_reversed(count: int) -> Tensor:
    """A permutation of [0, count), int64: each number's digits reversed.

    The base is count's prime factors. Numbers of one remainder modulo a product of the first
    factors, smallest first, become neighbours.
    """
    factors = []
    rest = count
    factor = 2
    while rest > 1:
        if rest % factor:
            factor += 1
        else:
            factors.append(factor)
            rest //= factor
    # The number as an array of its digits, the last one first; transposed, it is read from the
    # other end.
    numbers = torch.arange(count).reshape(factors[::-1] or [1])
    reversed_ = torch.empty(count, dtype=torch.int64)
    reversed_[numbers.permute(*reversed(range(numbers.dim()))).flatten()] = torch.arange(count)
    return reversed_
