"""The order of a large dataset is a keyed permutation: a bijection, as uniform as torch's, and
nothing is stored.
"""

import json
import math
import tracemalloc
from dataclasses import replace

import pytest
import torch
from test_data import Numbered
from tiny import Tiny, make_run, take_steps

from dist_amp.checkpoint import format as files
from dist_amp.checkpoint.format import MANIFEST, hash_text, read_manifest
from dist_amp.checkpoint.saver import save
from dist_amp.data import Batches, Padding
from dist_amp.errors import DataError
from dist_amp.loading import plan as permutation
from dist_amp.loading.plan import TABLE_LENGTH, Plan, epoch_order, shuffled_order
from dist_amp.world import World

# By chance, one comparison in 1.7 million is further off; the keys are fixed, so a test that
# passes stays so.
SIGMAS = 5


def whole_order(length, seed=0, epoch=0, order="feistel"):
    return epoch_order(order, length, seed, epoch)(torch.arange(length))


def orders(length, count, order="feistel"):
    """[count, length]: as many orders of independent keys; those of the Feistel network all at
    once.
    """
    generator = torch.Generator().manual_seed(length)
    if order == "randperm":
        return torch.stack([torch.randperm(length, generator=generator) for _ in range(count)])
    keys = torch.randint(-(2**63), 2**63 - 1, (permutation.ROUNDS, count, 1), generator=generator)
    return permutation.permute(torch.arange(length).expand(count, length), length, keys)


@pytest.mark.parametrize(
    "length",
    [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        97,
        255,
        256,
        257,
        1009,
        65535,
        65536,
        65537,
        10**6,
        1_000_003,
    ],
)
def test_every_sample_comes_once_whatever_the_length(length):
    for epoch in range(2):
        assert torch.equal(whole_order(length, 3, epoch).sort().values, torch.arange(length))


def test_positions_are_looked_up_in_any_portions_and_up_to_the_largest_length():
    order = epoch_order("feistel", 2**52, 1, 0)
    positions = torch.cat((torch.randint(0, 2**52, (1000,)), torch.tensor([0, 2**52 - 1])))
    samples = order(positions)
    assert bool(((samples >= 0) & (samples < 2**52)).all())
    assert len(samples.unique()) == len(positions.unique())
    assert torch.equal(samples, torch.cat([order(part) for part in positions.split(7)]))


def chi_square_deviation(counts, expected):
    """How far counts are from a constant, in standard deviations of what chance gives."""
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("order", ["feistel", "randperm"])  # torch's own passes the same tests
@pytest.mark.parametrize("length", [64, 101])
def test_each_sample_falls_on_each_position_equally_often(order, length):
    count = 100 * length
    drawn = orders(length, count, order)
    cells = drawn + length * torch.arange(length)  # position, sample
    assert (
        abs(
            chi_square_deviation(
                cells.flatten().bincount(minlength=length**2).double(), count / length
            )
        )
        < SIGMAS
    )


@pytest.mark.parametrize("order", ["feistel", "randperm"])
@pytest.mark.parametrize(
    ("first", "second"), [(0, 1), (0, 8), (3, 40)]
)  # one digit, the other, both
def test_pairs_of_positions_get_every_pair_of_samples_equally_often(order, first, second):
    length = 64
    drawn = orders(length, 20_000, order)
    pairs = drawn[:, first] * length + drawn[:, second]
    counts = pairs.bincount(minlength=length**2).double().reshape(length, length)
    assert counts.diagonal().sum() == 0
    others = counts[~torch.eye(length, dtype=torch.bool)]
    assert abs(chi_square_deviation(others, len(drawn) / len(others))) < SIGMAS


@pytest.mark.parametrize("length", [101, 1009])
def test_neighbours_fixed_points_and_distances_are_those_of_chance(length):
    count = 4000
    drawn = orders(length, count)
    differences = drawn.diff(dim=1)
    # Both counts are Poisson with mean 1 for a uniform permutation, up to 1 / length.
    for found in (
        (drawn == torch.arange(length)).sum(1).double(),
        (differences == 1).sum(1).double(),
    ):
        assert abs(found.mean().item() - 1) < SIGMAS / math.sqrt(count) + 2 / length
        assert (
            abs(found.var().item() - 1) < SIGMAS * math.sqrt(3 / count) + 4 / length
        )  # fourth moment 4, less 1
    # |p(i + 1) - p(i)| is (length + 1) / 3 on average; neighbours in a row of digits would be nearer.
    mean, spread = (length + 1) / 3, length / math.sqrt(18)
    assert abs(differences.abs().double().mean().item() - mean) < SIGMAS * spread * math.sqrt(
        2 / (count * length)
    )


@pytest.mark.parametrize("length", [TABLE_LENGTH + 1, 10**6])
def test_epochs_seeds_and_positions_are_uncorrelated(length):
    positions = torch.arange(length).double()
    drawn = [
        whole_order(length, *key).double() for key in ((0, 0), (0, 1), (0, 2), (1, 0), (2**62, 0))
    ]
    every = [positions, *drawn, *(one.roll(1) for one in drawn)]
    correlation = torch.corrcoef(torch.stack(every)) - torch.eye(len(every), dtype=torch.float64)
    assert correlation.abs().max() < SIGMAS / math.sqrt(length)


def test_the_first_steps_of_a_large_dataset_come_from_all_of_it():
    length = 10**9
    samples = epoch_order("feistel", length, 0, 0)(torch.arange(100_000))
    counts = (samples * 1000 // length).bincount(minlength=1000).double()
    assert abs(chi_square_deviation(counts, 100)) < SIGMAS
    # As many low digits as high ones.
    assert (
        abs(chi_square_deviation((samples % 1000).bincount(minlength=1000).double(), 100)) < SIGMAS
    )


def test_a_billion_samples_take_no_memory_and_a_late_position_is_reached_at_once():
    length, ranks = 10**9 + 7, 1024
    plan = Plan(length, ranks * 32, 8, ranks, 5, 0, shuffled_order(length))
    tracemalloc.start()
    steps = plan.steps(7 * length + 999_999_000)
    taken = [next(steps) for _ in range(200)]  # crosses into the next epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22, "4 MiB; a table of the order would be 8 GB"
    assert taken[0][0] == 8 * length, "the epoch's last samples"
    assert taken[1][0] == 8 * length + ranks * 32
    assert all(len(shard.indices) == 8 for _, shards in taken[1:] for shard in shards)


def of_all_ranks(ranks, micro_batch, accumulation, order, steps, position=0):
    length = 700
    sets = []
    for rank in range(ranks):
        plan = Plan(length, ranks * micro_batch * accumulation, micro_batch, ranks, rank, 0, order)
        one = Batches(Numbered().build_dataset(length), Numbered(), plan, 0, torch.device("cpu"))
        one.position = position
        sets.append(
            [[b["index"] for b in next(one) if not isinstance(b, Padding)] for _ in range(steps)]
        )
    return [
        sorted(torch.cat([b for rank in sets for b in rank[step]]).tolist())
        for step in range(steps)
    ]


@pytest.mark.parametrize("order", ["feistel", "randperm", "dataset"])
def test_a_step_takes_the_same_samples_at_every_world_size_in_every_order(order):
    expected = of_all_ranks(1, 24, 1, order, steps=40)
    for ranks, micro_batch, accumulation in [(1, 4, 6), (2, 4, 3), (8, 3, 1)]:
        assert of_all_ranks(ranks, micro_batch, accumulation, order, steps=40) == expected
    assert of_all_ranks(4, 3, 2, order, 20, position=20 * 24) == expected[20:]


LENGTH = TABLE_LENGTH + 500


def a_run(folder, *words):
    return make_run(
        World(), Tiny(samples=LENGTH), "--run.dir", folder, "--run.resume", "auto", *words
    )


def samples_of(run, steps):
    seen = []
    for _ in range(steps):
        take_steps(run, 1)
        seen.append([indices for _, indices in run.data.last_step])
    return seen


def test_a_checkpoint_made_in_the_old_order_goes_on_in_it_and_so_do_those_after_it(
    tmp_path, capsys
):
    old = a_run(tmp_path)
    assert old.data.plan.order == "feistel"
    old.data.plan = replace(old.data.plan, order="randperm")  # as every run had it
    samples_of(old, 3)
    folder = save(old)
    assert "order" not in json.loads((folder / MANIFEST).read_text()), (
        "as the first versions wrote it"
    )
    expected = samples_of(old, 6)
    capsys.readouterr()
    resumed = a_run(tmp_path)
    assert (
        capsys.readouterr().out.count(
            f"data order: randperm, as in {folder}, which takes 1 MiB on every rank"
        )
        == 1
    )
    assert samples_of(resumed, 3) == expected[:3]
    assert read_manifest(save(resumed)).order == "randperm"
    assert samples_of(a_run(tmp_path), 3) == expected[3:]


def test_a_checkpoint_of_the_new_order_names_it_and_goes_on_without_a_word(tmp_path, capsys):
    run = a_run(tmp_path)
    samples_of(run, 2)
    assert read_manifest(save(run)).order == "feistel"
    expected = samples_of(run, 3)
    assert samples_of(a_run(tmp_path), 3) == expected
    assert "data order" not in capsys.readouterr().out


def test_small_datasets_keep_the_order_that_they_always_had(tmp_path):
    assert make_run(World(), Tiny()).data.plan.order == shuffled_order(TABLE_LENGTH) == "randperm"
    assert make_run(World(), Tiny(), "--data.shuffle", "false").data.plan.order == "dataset"


@pytest.mark.bad_input(
    "a checkpoint of a newer version, whose order of the samples this one does not know"
)
def test_an_order_that_this_version_does_not_know_is_refused_by_name(tmp_path):
    run = a_run(tmp_path)
    folder = save(run)
    content = json.loads((folder / MANIFEST).read_text())
    del content["xxh3"]
    content["order"] = "spiral"
    (folder / MANIFEST).write_text(
        json.dumps({**content, "xxh3": hash_text(json.dumps(content))}, indent=1) + "\n"
    )
    assert not files.integrity_error(folder)
    with pytest.raises(
        DataError, match="takes its samples in the order 'spiral', this run in 'feistel'"
    ) as error:
        a_run(tmp_path)
    assert error.value.exit_code == 65


def test_steps_are_looked_up_together_where_they_are_small(monkeypatch):
    calls = []
    real = permutation.permute
    monkeypatch.setattr(
        permutation,
        "permute",
        lambda positions, **own: calls.append(len(positions)) or real(positions, **own),
    )
    steps = Plan(10**6, 8, 8, 1, 0, 0, "feistel").steps(0)
    for _ in range(500):
        next(steps)
    assert calls == [8, 4096]
