"""Length bucketing: an order that is a pure function of seed, epoch and position."""

from itertools import pairwise

import numpy
import pytest
import torch
from tiny import Rows

from dist_amp.data import build_batches
from dist_amp.errors import Failure
from dist_amp.loading.length_groups import LengthGroups, grouped
from dist_amp.loading.plan import LOOKED_UP, TABLE_LENGTH, epoch_order, shuffled_order
from dist_amp.settings import Config, DataConfig, TrainConfig
from dist_amp.world import World

BATCH = 12


def lengths_of(samples):
    return numpy.random.default_rng(0).lognormal(4, 1, samples).astype(numpy.int64) + 1


def grouping(samples, steps):
    return LengthGroups(Rows(index=torch.arange(samples)), steps, lengths_of(samples))


def order_of(samples, steps, seed=0, epoch=0):
    """The samples of an epoch in the order in which steps take them."""
    _, order = grouping(samples, steps).shuffled(BATCH, 1)
    return order(seed, epoch)(torch.arange(samples))


@pytest.mark.parametrize(
    ("samples", "steps"),
    [(5 * BATCH + 5, 1), (6 * BATCH, 4), (BATCH - 1, 3), (TABLE_LENGTH + 100, 3)],
)
def test_each_window_has_the_samples_of_the_plain_order_sorted_and_cut_into_steps(samples, steps):
    order = order_of(samples, steps)
    plain = epoch_order(shuffled_order(samples), samples, 0, 0)(torch.arange(samples))
    lengths = torch.from_numpy(lengths_of(samples))[order]
    assert sorted(order.tolist()) == list(range(samples))
    assert all((step.diff() >= 0).all() for step in lengths.split(BATCH))
    full = samples - samples % BATCH
    for start in range(0, full, BATCH * steps):
        window = slice(start, min(start + BATCH * steps, full))
        assert sorted(order[window].tolist()) == sorted(plain[window].tolist())
        ranges = sorted((step[0].item(), step[-1].item()) for step in lengths[window].split(BATCH))
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    left_over = sorted(order[full:].tolist()), sorted(plain[full:].tolist())
    assert left_over[0] == left_over[1], "what drop_last would leave out"


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    samples = 3 * LOOKED_UP
    whole = order_of(samples, 7)
    _, again = grouping(samples, 7).shuffled(BATCH, world_size=4)
    some = torch.randperm(samples)[:999]
    assert torch.equal(again(0, 0)(some), whole[some]), "positions are looked up in any order"
    for other in ({"seed": 1}, {"epoch": 1}):
        assert not torch.equal(order_of(samples, 7, **other), whole)
    firsts = []
    for epoch in range(2):
        lengths = torch.from_numpy(lengths_of(40 * BATCH))[order_of(40 * BATCH, 20, epoch=epoch)]
        firsts += [tuple(window[::BATCH].argsort().tolist()) for window in lengths.split(240)]
    assert len({*firsts, tuple(range(20))}) == 5, "short before long would be a curriculum"


def test_a_run_takes_its_samples_in_this_order_by_the_name_that_checkpoints_have():
    train = TrainConfig(micro_batch_size=4, global_batch_size=BATCH)
    config = Config(data=DataConfig(group_by_length=3), train=train)
    rows = Rows(index=torch.arange(100))
    rows.lengths = lengths_of(100)
    data = build_batches(config, object(), rows, World())
    assert data.plan.order == "randperm, sorted by length over 3 steps of 12"
    for step in order_of(100, 3).split(BATCH)[:8]:
        taken = torch.cat([batch["index"] for batch in next(data)])
        assert torch.equal(taken.sort().values, step.sort().values)


FIVE = Rows(index=torch.arange(5))
BY_ROW_GROUP = Rows(index=torch.arange(5))
BY_ROW_GROUP.shuffled = None


@pytest.mark.bad_input("`data.group_by_length` without lengths or shuffling")
@pytest.mark.parametrize(
    ("dataset", "lengths", "settings", "fragment"),
    [
        (FIVE, None, {}, " needs each sample's length, and a Rows has no `lengths`; write its"),
        (FIVE, lengths_of(4), {}, ": there are 4 lengths for 5 samples"),
        (FIVE, lengths_of(5), {"shuffle": False}, " changes the order that data.shuffle=false"),
        (BY_ROW_GROUP, lengths_of(5), {}, ": the data is read by row group, in an order of its"),
    ],
)
def test_what_can_not_be_grouped_is_refused_with_the_reason(dataset, lengths, settings, fragment):
    with pytest.raises(Failure) as error:
        grouped(DataConfig(group_by_length=5, **settings), dataset, lengths)
    assert f"data.group_by_length=5{fragment}" in str(error.value)
    by_setting = grouped(DataConfig(group_by_length=5), FIVE, torch.from_numpy(lengths_of(5)))
    assert by_setting.steps == 5
    assert grouped(DataConfig(group_by_length=5), by_setting) is by_setting
    assert grouped(DataConfig(), FIVE) is FIVE
