"""The order of rows in groups: a bijection, the same at every world size, local to a rank, computed
and not stored.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.loading.plan import LOOKED_UP, Plan, permute
from dist_amp.sources.parquet import stream_order


def uneven(groups, seed=0, most=50):
    """Sizes of groups, from 1 row to `most`."""
    return torch.randint(1, most + 1, (groups,), generator=torch.Generator().manual_seed(seed))


def whole_order(rows, streams, shuffle_groups, seed=0, epoch=0):
    return stream_order(rows, streams, shuffle_groups, seed, epoch)(torch.arange(int(rows.sum())))


def groups_of(rows, numbers):
    """The groups that rows lie in."""
    return torch.searchsorted(rows.cumsum(0), numbers.contiguous(), right=True)


GROUPED = {
    "one_row": torch.tensor([1]),
    "one_group": torch.tensor([10]),
    "as_many_as_streams": uneven(64),
    "even": torch.full((128,), 25),
    "uneven": uneven(333),
    "one_giant": torch.cat((uneven(40), torch.tensor([10_000]), uneven(40))),
    "one_row_among_thousands": torch.tensor([10_000, 1, 10_000, 10_000]),
    "all_of_one_row": torch.ones(97, dtype=torch.int64),
}


@pytest.mark.parametrize("name", GROUPED)
def test_every_row_comes_once_per_epoch_in_another_order_each(name):
    rows = GROUPED[name]
    everything = torch.arange(int(rows.sum()))
    for streams in {1, 2, 3, 6, 8, 64, len(rows)}:
        if streams > len(rows):
            continue
        for window in (1, 2, 5, 1000):
            epochs = [whole_order(rows, streams, window, epoch=epoch) for epoch in range(2)]
            assert all(torch.equal(epoch.sort().values, everything) for epoch in epochs)
            assert len(everything) < 20 or not torch.equal(*epochs)


def test_another_seed_gives_another_order_and_any_portion_of_it_is_the_same():
    rows = uneven(100)
    order = stream_order(rows, 8, 2, 0, 0)
    everything = torch.arange(int(rows.sum()))
    assert not torch.equal(order(everything), stream_order(rows, 8, 2, 1, 0)(everything))
    for size in (1, 7, 1000):
        assert torch.equal(
            order(everything), torch.cat([order(part) for part in everything.split(size)])
        )


def own_groups(rows, streams, ranks, seed=0):
    """The groups that each rank reads in an epoch."""
    order = whole_order(rows, streams, 2, seed)
    return [set(groups_of(rows, order[rank::ranks]).tolist()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_rank_reads_only_its_own_groups(ranks):
    aligned = own_groups(torch.full((64,), 30), streams=16, ranks=ranks)
    assert sum(map(len, aligned)) == 64, (
        "no two ranks read the same group where streams end with a group"
    )
    for seed in range(5):
        cut = own_groups(uneven(100, seed), streams=16, ranks=ranks, seed=seed)
        assert set.union(*cut) == set(range(100))
        assert sum(map(len, cut)) <= 100 + ranks - 1, (
            "only a group between two ranks is read by both"
        )


def test_other_world_sizes_read_at_most_a_group_more_per_stream():
    assert sum(map(len, own_groups(uneven(100), streams=24, ranks=3))) <= 100 + 24 - 1


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_stream_has_as_many_groups_open_as_its_window(window):
    rows, streams = uneven(100), 8
    order = whole_order(rows, streams, window)
    for stream in range(streams):
        groups = groups_of(rows, order[stream::streams]).tolist()
        first = {group: place for place, group in reversed(list(enumerate(groups)))}
        last = {group: place for place, group in enumerate(groups)}
        open_at = [
            sum(first[group] <= place <= last[group] for group in first)
            for place in range(len(groups))
        ]
        assert max(open_at) <= window
        assert max(open_at) == window, "the window is used"


def test_rows_are_permuted_for_each_length_at_once():
    lengths = [1, 2, 3, 4, 5, 17, 100, 1000, 65537]
    keys = torch.randint(
        -(2**63), 2**63 - 1, (10, len(lengths)), generator=torch.Generator().manual_seed(0)
    )
    each = torch.cat([torch.full((length,), length) for length in lengths])
    own_keys = [
        torch.cat([torch.full((length,), key) for length, key in zip(lengths, row, strict=True)])
        for row in keys.tolist()
    ]
    drawn = permute(torch.cat([torch.arange(length) for length in lengths]), each, own_keys)
    for length, part in zip(lengths, drawn.split(lengths), strict=True):
        assert torch.equal(part.sort().values, torch.arange(length))


def test_each_row_of_a_window_comes_at_each_place_equally_often():
    length = 16
    windows = 100 * length
    rows = torch.full((windows,), length)
    order = whole_order(rows, streams=1, shuffle_groups=1)
    cells = order % length + length * torch.arange(length).repeat(windows)
    counts = cells.bincount(minlength=length**2).double()
    chi_square = ((counts - 100) ** 2 / 100).sum().item()
    freedom = (length - 1) ** 2  # the counts of each row and of each place add up by construction
    # By chance one in 1.7 million is 5 sigma off; the keys are fixed, so a test that passes stays
    # so.
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


class Largest(TorchDispatchMode):
    """Notes the most elements that a tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


def planned(rows, position, seen):
    """The first step from `position` on, of a rank of 8; `seen` notes how many positions are looked
    up at a time.
    """

    def noted(seed, epoch):
        order = stream_order(rows, 64, 2, seed, epoch)
        return lambda positions: (seen.append(len(positions)), order(positions))[1]

    plan = Plan(int(rows.sum()), 8 * 32, 32, 8, 3, 0, "streams", dataset_order=noted)
    return next(plan.steps(position))


def test_a_thousand_million_rows_take_the_memory_of_a_million_in_as_many_groups():
    largest = []
    for per_group in (100, 100_000):
        rows = torch.full((10_000,), per_group)
        with Largest() as mode:
            planned(rows, int(rows.sum()) // 2, seen=[])
        largest.append(mode.elements)
    assert largest == [10_000, 10_000]


def test_the_first_step_at_a_late_position_looks_up_no_more_rows_than_at_the_start():
    rows = torch.full((10_000,), 100_000)
    looked_up = []
    for position in (0, 8 * 32, 999_999_744, 10**9 + 8 * 32, 123 * 10**9):
        planned(rows, position, seen := [])
        looked_up.append(sum(seen))
    assert looked_up == [32] * 5, "its own micro-batch, whatever was taken before"
    assert max(looked_up) <= LOOKED_UP
