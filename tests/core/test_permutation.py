"""The order of a large dataset is a keyed permutation: a bijection that is never stored."""

import json
import tracemalloc
from dataclasses import replace

import pytest
import torch
from tiny import Tiny, make_run, save, take_steps

from dist_amp.checkpoint import format as files
from dist_amp.checkpoint.format import MANIFEST, read_manifest, signed_text
from dist_amp.errors import DataError
from dist_amp.loading.plan import TABLE_LENGTH, Plan, epoch_order, shuffled_order
from dist_amp.world import World


# By chance, one comparison in 1.7 million is further off; the keys are fixed, so a test that
# passes stays so.
def whole_order(length, seed=0, epoch=0):
    return epoch_order("feistel", length, seed, epoch)(torch.arange(length))


def test_every_sample_comes_once_whatever_the_length():
    around_powers = [15, 16, 17, 255, 256, 257, 65535, 65536, 65537]
    for length in [*range(1, 10), *around_powers, 1009, 100_003]:
        assert torch.equal(whole_order(length, seed=3).sort().values, torch.arange(length))


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


# ---- in checkpoints ----


def make(folder):
    words = ["--run.dir", folder, "--run.resume", "auto"]
    return make_run(World(), Tiny(samples=TABLE_LENGTH + 500), *words)


def samples_of(run, steps):
    seen = []
    for _ in range(steps):
        take_steps(run, 1)
        seen.append([indices for _, indices in run.data.last_step])
    return seen


def test_a_checkpoint_in_the_first_versions_order_is_continued_in_it(tmp_path, capsys):
    old = make(tmp_path)
    old.data.plan = replace(old.data.plan, order="randperm")
    samples_of(old, 3)
    folder = save(old)
    content = json.loads((folder / MANIFEST).read_text())
    assert not {"order", "lr_factor"} & content.keys(), "as they wrote it"
    expected = samples_of(old, 6)
    resumed = make(tmp_path)
    said = f"data order: randperm, as in {folder}; a new run would use feistel"
    assert capsys.readouterr().out.count(said) == 1
    assert samples_of(resumed, 3) == expected[:3]
    assert read_manifest(save(resumed)).order == "randperm"
    assert samples_of(make(tmp_path), 3) == expected[3:]


@pytest.mark.parametrize(
    ("order", "length", "seed", "epoch", "samples"),
    [
        ("randperm", 100, 7, 3, [22, 60, 57, 79, 32]),
        ("feistel", 100_000, 7, 3, [7884, 12043, 7257, 77035, 73072]),
        (
            "feistel",
            2**40,
            *(0, 0),
            [1505508858, 286666981141, 824338406735, 269729921969, 464283961869],
        ),
    ],
)
def test_the_order_of_a_dataset_never_changes_or_a_resume_reads_other_samples(
    order, length, seed, epoch, samples
):
    positions = torch.tensor([0, 1, 2, length // 2, length - 1])
    assert epoch_order(order, length, seed, epoch)(positions).tolist() == samples
    assert make_run(World(), Tiny()).data.plan.order == shuffled_order(TABLE_LENGTH) == "randperm"
    assert make_run(World(), Tiny(), "--data.shuffle", "false").data.plan.order == "dataset"


@pytest.mark.bad_input(
    "a checkpoint of a newer version, whose order of the samples this one does not know"
)
def test_a_checkpoint_names_its_order_and_one_that_is_not_known_is_refused(tmp_path, capsys):
    run = make(tmp_path)
    samples_of(run, 2)
    folder = save(run)
    assert read_manifest(folder).order == "feistel"
    assert samples_of(make(tmp_path), 3) == samples_of(run, 3)
    assert "data order" not in capsys.readouterr().out
    content = json.loads((folder / MANIFEST).read_text())
    del content["xxh3"]
    content["order"] = "spiral"
    (folder / MANIFEST).write_text(signed_text(content))
    assert not files.integrity_error(folder)
    text = "takes its samples in the order 'spiral', this run in 'feistel'"
    with pytest.raises(DataError, match=text):
        make(tmp_path)
