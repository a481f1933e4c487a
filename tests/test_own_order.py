"""A dataset may bring its own shuffle, and a task its own augmentation: functions of seed, epoch
and position.
"""

import pytest
import torch
from tiny import Rows, Tiny, make_run, take_steps

from dist_amp.checkpoint.format import read_manifest
from dist_amp.checkpoint.saver import save
from dist_amp.errors import DataError
from dist_amp.world import World

STEP = ["--train.micro_batch_size", 4]


class Backwards(Rows):
    """Each epoch in reverse, from a start that depends on the seed and the epoch."""

    asked: tuple[int, int] = (0, 0)
    name = "backwards"

    def shuffled(self, global_batch_size, world_size):
        type(self).asked = (global_batch_size, world_size)
        return (
            self.name,
            lambda seed, epoch: lambda positions: (seed + 3 * epoch - positions) % len(self),
        )


class Turns(Backwards):
    name = "turns"


class OwnOrder(Tiny):
    dataset = Backwards

    def build_dataset(self, split):
        return self.dataset(**super().build_dataset(split).columns)


class OtherOwnOrder(OwnOrder):
    dataset = Turns


def a_run(task, *words):
    return make_run(World(), task, *STEP, *words)


def handed_out(run, steps):
    seen = []
    for _ in range(steps):
        take_steps(run, 1)
        seen.append(run.data.last_step[0][1])
    return seen


def test_a_dataset_with_its_own_shuffle_is_read_in_it():
    run = a_run(OwnOrder(samples=8), "--run.seed", 5)
    assert handed_out(run, 3) == [(5, 4, 3, 2), (1, 0, 7, 6), (0, 7, 6, 5)]
    assert Backwards.asked == (4, 1)
    assert run.data.plan.order == "backwards"


def test_without_shuffling_it_is_read_in_its_stored_order():
    run = a_run(OwnOrder(samples=8), "--data.shuffle", "false")
    assert handed_out(run, 1) == [(0, 1, 2, 3)]


def test_a_checkpoint_names_the_datasets_order_and_a_resumed_run_goes_on_in_it(tmp_path):
    words = ["--run.dir", tmp_path, "--run.resume", "auto"]
    run = a_run(OwnOrder(), *words)
    handed_out(run, 3)
    assert read_manifest(save(run)).order == "backwards"
    assert handed_out(a_run(OwnOrder(), *words), 2) == handed_out(run, 2)


@pytest.mark.bad_input(
    "a checkpoint whose samples were taken in another order: other `data.view`, `data.streams`, "
    "or `data.group_by_length`"
)
@pytest.mark.parametrize("task", [Tiny, OtherOwnOrder])
def test_a_run_in_another_order_is_refused_with_both_names(task, tmp_path, capsys):
    words = ["--run.dir", tmp_path, "--run.resume", "auto"]
    run = a_run(OwnOrder(), *words)
    handed_out(run, 3)
    save(run)
    ours = {Tiny: "randperm", OtherOwnOrder: "turns"}[task]
    text = f"takes its samples in the order 'backwards', this run in '{ours}'"
    with pytest.raises(DataError, match=text) as refused:
        a_run(task(), *words)
    assert "--run.allow_config_change true" in str(refused.value)
    resumed = a_run(task(), *words, "--run.allow_config_change", "true")
    assert text in capsys.readouterr().err
    assert resumed.data.plan.order == ours


class Noisy(Tiny):
    """Each training sample gets noise of its own."""

    def augment(self, sample, rng):
        return {**sample, "x": sample["x"] + torch.randn(8, generator=rng)}


def by_sample(run, steps):
    """{(step, sample): its augmented x}"""
    seen = {}
    for step in range(steps):
        for batch in next(run.data):
            (_, indices) = next(entry for entry in run.data.last_step if entry[0] is batch)
            seen |= {
                (step, index): tuple(x.tolist())
                for index, x in zip(indices, batch["x"], strict=True)
            }
    run.data.close()
    return seen


def test_a_samples_augmentation_does_not_depend_on_workers_or_micro_batches_or_the_steps_before():
    expected = by_sample(make_run(World(), Noisy(samples=16), "--train.micro_batch_size", 8), 4)
    others = make_run(
        World(),
        Noisy(samples=16),
        "--train.micro_batch_size",
        2,
        "--train.accumulation_steps",
        4,
        "--data.workers",
        2,
    )
    assert by_sample(others, 4) == expected
    late = make_run(World(), Noisy(samples=16), "--train.micro_batch_size", 8)
    late.data.position = 24
    assert by_sample(late, 1) == {
        (0, index): x for (step, index), x in expected.items() if step == 3
    }


def test_a_samples_augmentation_differs_from_epoch_to_epoch_and_from_seed_to_seed():
    run = make_run(World(), Noisy(samples=8), "--train.micro_batch_size", 8)
    drawn = by_sample(run, 2)
    other = by_sample(
        make_run(World(), Noisy(samples=8), "--train.micro_batch_size", 8, "--run.seed", 1), 1
    )
    assert all(drawn[0, index] != drawn[1, index] for index in range(8))
    assert all(drawn[0, index] != other[0, index] for index in range(8))


def test_held_out_samples_are_not_augmented():
    run = make_run(World(), Noisy(samples=8), "--train.micro_batch_size", 8, "--eval.every", 1)
    (batch,) = next(run.validation.one_epoch("all"))
    assert torch.equal(batch["x"], Noisy(samples=8).build_dataset("validation").columns["x"])


@pytest.mark.bad_input("a task's `augment` that fails")
def test_an_augmentation_that_fails_names_the_sample():
    class Broken(Tiny):
        def augment(self, sample, rng):
            return sample["pixels"]

    run = make_run(World(), Broken(), *STEP, "--data.shuffle", "false")
    with pytest.raises(
        DataError, match=r"augment\(sample, rng\) failed on sample 0: KeyError: 'pixels'"
    ):
        next(run.data)
