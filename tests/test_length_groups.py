"""Length bucketing: an order that is a pure function of seed, epoch and position."""

import json
from itertools import pairwise

import numpy
import pytest
import torch
from tiny import Rows

from dist_amp.data import Padding, build_batches
from dist_amp.errors import ConfigError, DataError
from dist_amp.loading.length_groups import LengthGroups, grouped
from dist_amp.loading.plan import LOOKED_UP, TABLE_LENGTH, epoch_order, shuffled_order
from dist_amp.settings import DataConfig
from dist_amp.world import World

BATCH = 12


def lengths_of(samples):
    return numpy.random.default_rng(0).lognormal(4, 1, samples).astype(numpy.int64) + 1


def grouping(samples, steps):
    return LengthGroups(Rows(index=torch.arange(samples)), steps, lengths_of(samples))


def order_of(samples, steps, seed=0, epoch=0, batch=BATCH):
    """The samples of an epoch in the order in which steps take them."""
    _, order = grouping(samples, steps).shuffled(batch, 1)
    return order(seed, epoch)(torch.arange(samples))


def plain_order(samples, seed=0, epoch=0):
    return epoch_order(shuffled_order(samples), samples, seed, epoch)(torch.arange(samples))


# Sizes with and without a step that is not full, a block that is not, a single step, and more than
# one look-up.
SIZES = [
    (5 * BATCH, 1),
    (5 * BATCH + 5, 2),
    (6 * BATCH, 4),
    (BATCH - 1, 3),
    (BATCH, 1),
    (3 * LOOKED_UP + 7, 10),
    (TABLE_LENGTH + 100, 3),
    (2 * LOOKED_UP, 1000),
]


@pytest.mark.parametrize(("samples", "steps"), SIZES)
def test_every_sample_is_taken_once_per_epoch_and_every_block_has_the_samples_of_the_plain_order(
    samples, steps
):
    order, plain = order_of(samples, steps), plain_order(samples)
    assert sorted(order.tolist()) == list(range(samples))
    full = samples - samples % BATCH
    for start in range(0, full, BATCH * steps):
        block = slice(start, min(start + BATCH * steps, full))
        assert sorted(order[block].tolist()) == sorted(plain[block].tolist())
    assert sorted(order[full:].tolist()) == sorted(plain[full:].tolist()), (
        "what drop_last would leave out"
    )


@pytest.mark.parametrize(("samples", "steps"), SIZES)
def test_a_blocks_samples_are_sorted_and_cut_into_steps(samples, steps):
    lengths = torch.from_numpy(lengths_of(samples))[order_of(samples, steps)]
    assert all((step.diff() >= 0).all() for step in lengths.split(BATCH))
    full = samples - samples % BATCH
    for start in range(0, full, BATCH * steps):
        block = lengths[start : min(start + BATCH * steps, full)]
        ranges = sorted((step[0].item(), step[-1].item()) for step in block.split(BATCH))
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))


def test_steps_take_place_in_another_order_in_every_block_and_epoch():
    firsts = []
    for epoch in range(2):
        lengths = torch.from_numpy(lengths_of(40 * BATCH))[order_of(40 * BATCH, 20, epoch=epoch)]
        firsts += [tuple(block[::BATCH].argsort().tolist()) for block in lengths.split(20 * BATCH)]
    assert len(set(firsts)) == 4
    assert tuple(range(20)) not in firsts, "short before long would be a curriculum"


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    samples = 3 * LOOKED_UP
    whole = order_of(samples, 7)
    _, again = grouping(samples, 7).shuffled(BATCH, world_size=4)
    order = again(0, 0)
    some = torch.randperm(samples)[:999]
    assert torch.equal(order(some), whole[some]), "positions are looked up in any order"
    for other in ({"seed": 1}, {"epoch": 1}):
        assert not torch.equal(order_of(samples, 7, **other), whole)


def test_one_step_at_a_time_keeps_each_steps_set_of_samples():
    # group_by_length=1 gives the gradients of the plain order, and micro-batches of similar length.
    for ours, theirs in zip(
        order_of(100, 1).split(BATCH), plain_order(100).split(BATCH), strict=True
    ):
        assert sorted(ours.tolist()) == sorted(theirs.tolist())


def batches(dataset, ranks, rank, micro_batch):
    accumulation = BATCH // (ranks * micro_batch)
    return build_batches(
        DataConfig(),
        object(),
        dataset,
        World(rank, 0, ranks),
        micro_batch_size=micro_batch,
        accumulation_steps=accumulation,
        seed=0,
    )


def steps_of(ranks, micro_batch, position, steps):
    """([step] -> its sorted samples, over all ranks; the position after them)."""
    of_ranks = [batches(grouping(100, 3), ranks, rank, micro_batch) for rank in range(ranks)]
    for data in of_ranks:
        data.position = position
    found = []
    for _ in range(steps):
        parts = [
            batch["index"]
            for data in of_ranks
            for batch in next(data)
            if not isinstance(batch, Padding)
        ]
        found.append(sorted(torch.cat(parts).tolist()))
    return found, of_ranks[0].position


@pytest.mark.parametrize(
    ("before", "after", "stop"), [((2, 3), (4, 1), 5), ((4, 3), (1, 6), 9), ((1, 12), (2, 2), 13)]
)
def test_a_run_goes_on_with_the_same_steps_at_another_world_size(before, after, stop):
    expected, _ = steps_of(1, BATCH, 0, 20)
    first, position = steps_of(*before, 0, stop)
    rest, _ = steps_of(*after, position, 20 - stop)
    assert first + rest == expected


def test_the_order_is_written_into_the_checkpoint_with_what_it_depends_on():
    assert (
        batches(grouping(100, 3), 2, 0, 3).plan.order
        == "randperm, sorted by length over 3 steps of 12"
    )


def test_there_is_less_padding_the_more_steps_are_sorted_together():
    samples = 12_000
    shares = []
    for steps in (1, 10, 100):
        lengths = torch.from_numpy(lengths_of(samples))[order_of(samples, steps)].view(-1, 4)
        shares.append(1 - lengths.sum().item() / (4 * lengths.amax(1).sum().item()))
    plain = torch.from_numpy(lengths_of(samples))[plain_order(samples)].view(-1, 4)
    assert (
        1 - plain.sum().item() / (4 * plain.amax(1).sum().item())
        > shares[0]
        > 2 * shares[1]
        > 4 * shares[2]
    )


@pytest.mark.parametrize("lengths", [[3, 1, 2], torch.tensor([3, 1, 2]), numpy.array([3, 1, 2])])
def test_lengths_may_be_a_list_a_tensor_or_an_array(lengths):
    _, order = LengthGroups(["aaa", "b", "cc"], 1, lengths).shuffled(3, 1)
    assert order(0, 0)(torch.arange(3)).tolist() == [1, 2, 0]


def test_samples_and_fingerprint_are_the_datasets_own():
    class Own(Rows):
        fingerprint = "abc"
        lengths = numpy.arange(1, 6)

    dataset = LengthGroups(Own(index=torch.arange(5)), 1)
    assert (len(dataset), dataset.fingerprint, dataset[3]["index"].item()) == (5, "abc", 3)
    assert [sample["index"].item() for sample in dataset.__getitems__([4, 0])] == [4, 0]
    assert grouping(5, 1).fingerprint is None, "without one, samples are hashed"


def test_the_setting_groups_a_dataset_once_and_off_leaves_it_alone():
    dataset = grouping(50, 3)
    assert grouped(DataConfig(), dataset.dataset) is dataset.dataset
    config = DataConfig(group_by_length=5)
    assert grouped(config, dataset) is dataset
    assert grouped(config, dataset.dataset, lengths_of(50)).steps == 5


# What can't be grouped.


def refused(error, *args, **settings):
    with pytest.raises(error) as caught:
        grouped(DataConfig(group_by_length=5, **settings), *args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.bad_input(
    "`data.group_by_length` without lengths, or with as many as there are not samples"
)
def test_a_dataset_without_lengths_is_refused_with_what_to_do():
    message = refused(ConfigError, Rows(index=torch.arange(5)))
    assert message.startswith(
        "data.group_by_length=5 needs each sample's length, and a Rows has no `lengths`; write"
    )
    assert "python -m dist_amp.tokenize" in message
    assert "LengthGroups(dataset, steps, lengths)" in message


@pytest.mark.bad_input(
    "`data.group_by_length` where there is no padding to save: packed rows, a single length"
)
@pytest.mark.parametrize("pack", ["cut", "best_fit"])
def test_packed_rows_are_refused_and_both_settings_named(pack):
    message = refused(ConfigError, Rows(index=torch.arange(5)), lengths_of(5), pack=pack)
    assert f"data.group_by_length=5 has no padding to save with data.pack={pack}" in message


@pytest.mark.parametrize("last", [7, 8])
def test_samples_of_a_single_length_are_refused(last):
    lengths = numpy.full(99, 7)
    lengths[-1] = last
    arguments = (range(len(lengths)), lengths)
    if last == 7:
        assert "all 99 samples have the length 7" in refused(ConfigError, *arguments)
    else:
        assert len(grouped(DataConfig(group_by_length=5), *arguments)) == 99


def test_a_dataset_with_an_order_of_its_own_is_refused():
    class ByRowGroup(Rows):
        def shuffled(self, global_batch_size, world_size): ...

    message = refused(ConfigError, ByRowGroup(index=torch.arange(5)), lengths_of(5))
    assert "read by row group, in an order of its own; use data.view=map" in message


@pytest.mark.bad_input(
    "`data.group_by_length` with `data.shuffle=false`, or with an order of the dataset's own"
)
def test_grouping_without_a_shuffle_is_refused():
    message = refused(ConfigError, grouping(5, 1).dataset, lengths_of(5), shuffle=False)
    assert "data.group_by_length=5 changes the order, which data.shuffle=false keeps" in message


def test_another_number_of_lengths_than_samples_is_refused():
    message = refused(DataError, Rows(index=torch.arange(5)), lengths_of(4))
    assert "there are 4 lengths for 5 samples" in message


def test_a_classifier_of_texts_groups_them_by_their_characters(tmp_path):
    from dist_amp.tasks.hf_classification import HFClassification

    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": "a" * (n + 1), "label": 0}) for n in range(40))
    )
    task = HFClassification.__new__(
        HFClassification
    )  # of what it needs to read rows, and without a model
    task.data, task.of = DataConfig(path=str(tmp_path / "rows.jsonl"), group_by_length=2), "text"
    rows = task.build_dataset("train")
    order = rows.shuffled(4, 1)[1](0, 0)(torch.arange(len(rows)))
    for step in order.split(4):
        lengths = [len(rows[number]["text"]) for number in step.tolist()]
        assert lengths == sorted(lengths)
    assert not hasattr(task.build_dataset("validation"), "shuffled")
    task.of = "image"
    assert "needs each sample's length" in refused(ConfigError, task.build_dataset("validation"))
