"""data.on_bad_sample=skip: the rest of a step is exact, on any number of ranks, after any stop."""

import json
import re
from collections import Counter

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tiny import Rows, Tiny, log, make_run, parameters_of, save, take_steps

from dist_amp.data import Padding
from dist_amp.files import read_rows
from dist_amp.supervise.lifecycle import open_run
from dist_amp.train import main
from dist_amp.world import World

SKIP = ["--data.on_bad_sample", "skip", "--train.micro_batch_size", 2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Lists are written into the run's folder, which may be below the current one."""
    monkeypatch.chdir(tmp_path)


class Holed(Rows):
    """Rows of which some can't be read, and some have a longer x."""

    unreadable = odd = ()

    def __getitem__(self, index):
        if index in self.unreadable:
            raise OSError("bad sector")
        sample = super().__getitem__(index)
        return {**sample, "x": torch.zeros(9)} if index in self.odd else sample


class Torn(Tiny):
    """A dataset with bad samples in both splits; or, sound, with all of them, which count 0."""

    def __init__(self, samples=16, unreadable=(3, 4, 5, 11), odd=(8,), sound=False):
        super().__init__(samples=samples)
        self.unreadable, self.odd, self.sound = unreadable, odd, sound

    def build_dataset(self, split):
        rows = Holed(**super().build_dataset(split).columns)
        if self.sound:
            rows.columns["counts"][[*self.unreadable, *self.odd]] = 0.0
        else:
            rows.unreadable, rows.odd = self.unreadable, self.odd
        return rows


def opened(world, task, *words):
    run = make_run(world, task, *words)
    run.folder.mkdir(exist_ok=True)
    open_run(run)
    return run


def listed(folder):
    paths = sorted((folder / "bad_samples").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def last_row(folder):
    return [row for row in read_rows(folder / "metrics.jsonl")[0] if "train/loss" in row][-1]


def parameters_after_an_epoch(world, task, words):
    run = opened(world, task, *words)
    take_steps(run, 3)
    log(run)
    return parameters_of(run)


@pytest.mark.bad_input("a sample that can't be read, or does not fit the others, to be skipped")
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 0), ("fsdp", 1)])
def test_a_step_without_its_bad_samples_is_as_if_they_counted_0(strategy, workers, tmp_path):
    text = f"--parallel.strategy {strategy} --train.micro_batch_size 4 --train.accumulation_steps 1"
    text += f" --data.workers {workers} --use_amp false --data.shuffle false --optim.name sgd"
    words = [*SKIP, *text.split(), "--run.dir", tmp_path]
    # In the last step rank 1 has only padding: two of rank 0's three samples, one of them bad.
    bad = {"samples": 19, "unreadable": (3, 4, 5, 11, 16)}
    found, _ = on_ranks(2, parameters_after_an_epoch, Torn(**bad), words)
    words = [*words[2:], "--run.dir", tmp_path / "weighted"]
    expected, _ = on_ranks(2, parameters_after_an_epoch, Torn(**bad, sound=True), words)
    # Sums of other sizes: a few units in the last place.
    torch.testing.assert_close(found, expected)
    entries = {entry["sample"]: entry for entry in listed(tmp_path)}
    assert entries.keys() == {3, 4, 5, 8, 11, 16}
    assert {entry["rank"] for entry in entries.values()} == {0, 1}
    assert "OSError: bad sector" in entries[3]["error"]
    assert "x is Tensor [9] in sample 8" in entries[8]["error"]
    assert last_row(tmp_path)["train/skipped_samples"] == 6


def test_a_micro_batch_without_a_good_sample_is_padding():
    task = Torn(unreadable=(3, 4, 5), odd=())
    run = make_run(World(), task, *SKIP, "--data.shuffle", "false")
    take_steps(run, 3)
    assert run.data.bad_samples.seen == {("training", 0, index) for index in (3, 4, 5)}
    (batch, indices), *_ = run.data.last_step
    assert isinstance(batch, Padding)
    assert len(indices) == 2
    assert run.data.items == 3, "those that count"
    (again, other), *_ = run.data.at(4)
    assert (type(again), other) == (Padding, indices)


def test_a_sample_that_can_be_read_again_is_kept():
    task = Torn(unreadable=(), odd=())
    run = make_run(World(), task, *SKIP, "--data.shuffle", "false")
    errors = [OSError("timed out")] * 2  # of the batch, and of the search for the sample

    def read(dataset, index):
        if index == 3 and errors:
            raise errors.pop()
        return Rows.__getitem__(dataset, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holed, "__getitem__", read)
        take_steps(run, 3)
    assert not errors
    assert not run.data.bad_samples.seen
    assert run.data.items == 6


def test_a_resumed_run_lists_each_sample_once_and_ends_equal(tmp_path):
    words = [*SKIP, "--checkpoint.every", 3, "--run.dir"]
    whole = opened(World(), Torn(), *words, tmp_path / "whole")
    take_steps(whole, 12)
    folder = tmp_path / "run"
    run = opened(World(), Torn(), *words, folder)
    take_steps(run, 3)
    save(run)
    take_steps(run, 4)
    killed = listed(folder)
    with (folder / "bad_samples/rank00000.jsonl").open("a") as file:
        file.write('{"split": "trai')  # a torn line
    of_a_lost_rank = {**killed[0], "rank": 3, "sample": 99, "samples_seen": 1}
    (folder / "bad_samples/rank00003.jsonl").write_text(json.dumps(of_a_lost_rank) + "\n")
    resumed = opened(World(), Torn(), *words, folder, "--run.resume", "auto")
    take_steps(resumed, 9)
    torch.testing.assert_close(parameters_of(resumed), parameters_of(whole), rtol=0, atol=0)
    places = sorted((entry["epoch"], entry["sample"]) for entry in listed(folder))
    expected = {(entry["epoch"], entry["sample"]) for entry in listed(tmp_path / "whole")}
    assert places == sorted(expected | {(0, 99)})
    log(resumed)
    assert last_row(folder)["train/skipped_samples"] == len(places)


def message_of_run(world, task, most, folder):
    words = ["--data.on_bad_sample", most, "--data.shuffle", "false", "--run.dir", folder]
    run = opened(world, task, *SKIP, *words)
    # The log step counts what all ranks have skipped.
    return message_of(65, lambda: (take_steps(run, 3), log(run)))


FIVE = Torn(unreadable=(0, 3, 4, 8, 11), odd=())
SAID = "of the 16 samples of the training split are bad in one epoch, more than"


@pytest.mark.bad_input("more bad samples in an epoch than `data.on_bad_sample` allows")
@pytest.mark.bad_input("a dataset of which no sample can be used, with skip")
@pytest.mark.parametrize(
    ("ranks", "task", "most", "said"),
    [
        (1, FIVE, "0.15", f"3 {SAID} 0.15; "),
        (1, FIVE, "1", f"2 {SAID} 1; "),
        (2, FIVE, "4", f"5 {SAID} 4; "),
        (1, Torn(unreadable=range(16)), "skip", "rank 0: no sample can be used: .*bad sector"),
    ],
)
def test_too_many_bad_samples_end_the_run_with_both_numbers_or_the_cause(
    ranks, task, most, said, tmp_path
):
    for message in on_ranks(ranks, message_of_run, task, most, tmp_path):
        assert re.match(said, message)


def test_a_run_by_the_command_line_skips_held_out_samples_too_and_warns_once(tmp_path, capsys):
    words = [*map(str, SKIP), "--task.target", "test_bad_samples:Torn", "--run.dir", "run"]
    words += ["--train.steps", "8", "--train.micro_batch_size", "8", "--metrics.log_every", "2"]
    assert main([*words, "--eval.every", "4"]) == 0
    assert capsys.readouterr().err.count("warning: bad samples are skipped; ") == 1
    samples = Counter((entry["split"], entry["sample"]) for entry in listed(tmp_path / "run"))
    # Each once per epoch; an evaluation takes the same ones each time.
    epochs = {"training": 4, "validation": 1}
    assert samples == {(split, n): epochs[split] for split in epochs for n in (3, 4, 5, 8, 11)}
    assert last_row(tmp_path / "run")["train/skipped_samples"] == 20
