"""The order of a large dataset is a keyed permutation: a bijection that is never stored."""

import json
import tracemalloc
from dataclasses import replace

import pytest
import torch
from tiny import Tiny, make_run, save, take_steps

from dist_amp.checkpoint.format import MANIFEST, read_manifest
from dist_amp.loading.plan import TABLE_LENGTH, Plan, epoch_order, shuffled_order
from dist_amp.world import World


def test_every_sample_comes_once_whatever_the_length():
    around_powers = [15, 16, 17, 255, 256, 257, 65535, 65536, 65537]
    for length in [*range(1, 10), *around_powers, 1009, 100_003]:
        everything = torch.arange(length)
        order = epoch_order("feistel", length, 3, 0)
        assert torch.equal(order(everything).sort().values, everything)


def test_positions_are_looked_up_in_any_portions_and_up_to_the_largest_length():
    order = epoch_order("feistel", 2**52, 1, 0)
    positions = torch.cat((torch.randint(0, 2**52, (1000,)), torch.tensor([0, 2**52 - 1])))
    samples = order(positions)
    assert bool(((samples >= 0) & (samples < 2**52)).all())
    assert len(samples.unique()) == len(positions.unique())
    assert torch.equal(samples, torch.cat([order(part) for part in positions.split(7)]))


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


def make(folder):
    words = ["--run.dir", folder, "--run.resume", "auto"]
    return make_run(World(), Tiny(samples=TABLE_LENGTH + 500), *words)


def samples_of(run, steps):
    seen = []
    for _ in range(steps):
        take_steps(run, 1)
        seen.append([indices for _, indices in run.data.last_step])
    return seen


@pytest.mark.parametrize("order", ["randperm", "feistel"])
def test_a_run_is_continued_in_its_checkpoints_order_also_the_first_versions(
    tmp_path, capsys, order
):
    run = make(tmp_path)
    run.data.plan = replace(run.data.plan, order=order)
    samples_of(run, 3)
    folder = save(run)
    is_old = order == "randperm"
    content = json.loads((folder / MANIFEST).read_text())
    assert ("order" in content or "lr_factor" in content) != is_old, (
        "as the first versions wrote it"
    )
    expected = samples_of(run, 6)
    resumed = make(tmp_path)
    said = f"data order: randperm, as in {folder}; a new run would use feistel"
    assert capsys.readouterr().out.count(said) == is_old
    assert samples_of(resumed, 3) == expected[:3]
    assert read_manifest(save(resumed)).order == order
    assert samples_of(make(tmp_path), 3) == expected[3:]


@pytest.mark.parametrize(
    ("order", "length", "seed", "epoch", "samples"),
    [
        ("randperm", 100, 7, 3, [22, 60, 57, 32]),
        ("feistel", 100_000, 7, 3, [7884, 12043, 7257, 73072]),
        ("feistel", 2**40, 0, 0, [1505508858, 286666981141, 824338406735, 464283961869]),
    ],
)
def test_the_order_of_a_dataset_never_changes_or_a_resume_reads_other_samples(
    order, length, seed, epoch, samples
):
    positions = torch.tensor([0, 1, 2, length - 1])
    assert epoch_order(order, length, seed, epoch)(positions).tolist() == samples
    assert make_run(World(), Tiny()).data.plan.order == shuffled_order(TABLE_LENGTH) == "randperm"
    assert make_run(World(), Tiny(), "--data.shuffle", "false").data.plan.order == "dataset"
