"""data.on_bad_sample=skip: the rest of a step is exact, on any number of ranks, after any stop."""

import json

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tiny import Rows, Tiny, log, make_run, parameters_of, save, take_steps

from dist_amp.data import Padding
from dist_amp.errors import DataError
from dist_amp.loading.bad_samples import SkippingFetch
from dist_amp.loading.plan import Shard
from dist_amp.step import evaluate
from dist_amp.supervise.lifecycle import open_run
from dist_amp.world import World


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Lists are written into the run's folder, which may be below the current one."""
    monkeypatch.chdir(tmp_path)


SKIP = ["--data.on_bad_sample", "skip", "--train.micro_batch_size", 2]


class Holed(Rows):
    """Rows of which some can't be read, and some have a longer x."""

    def __init__(self, rows, unreadable=(), odd=()):
        super().__init__(**rows.columns)
        self.unreadable = unreadable
        self.odd = odd

    def __getitem__(self, index):
        if index in self.unreadable:
            raise OSError("bad sector")
        sample = super().__getitem__(index)
        if index in self.odd:
            sample["x"] = torch.zeros(9)
        return sample


class Torn(Tiny):
    """A dataset with bad samples in both splits, or the same one without them."""

    def __init__(self, samples=16, unreadable=(), odd=(), counts_bad=True):
        super().__init__(samples=samples)
        self.bad = {"unreadable": unreadable, "odd": odd}
        self.counts_bad = counts_bad

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        if not self.counts_bad:
            for bad in self.bad.values():
                rows.columns["counts"][list(bad)] = 0.0
            return rows
        return Holed(rows, **self.bad)


BAD = {"unreadable": (3, 4, 5, 11), "odd": (8,)}


def parameters_after_an_epoch(world, task, words):
    run = make_run(world, task, *words)
    open_run(run)
    take_steps(run, 4)
    log(run)
    return {name: value.numpy() for name, value in parameters_of(run).items()}


@pytest.mark.bad_input("a sample that can't be read, or does not fit the others, to be skipped")
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 0), ("fsdp", 1)])
def test_a_step_without_its_bad_samples_is_that_in_which_they_do_not_count(
    strategy, workers, tmp_path
):
    words = [*SKIP, "--parallel.strategy", strategy, "--train.accumulation_steps", 1]
    words += ["--data.workers", workers, "--precision.use_amp", "false", "--run.dir", tmp_path]
    words += ["--data.shuffle", "false", "--optim.name", "sgd"]
    task = Torn(**BAD)
    found, _ = on_ranks(2, parameters_after_an_epoch, task, words)
    weighted = Torn(**BAD, counts_bad=False)
    elsewhere = [*words[2:], "--run.dir", tmp_path / "weighted"]
    expected, _ = on_ranks(2, parameters_after_an_epoch, weighted, elsewhere)
    for name, value in expected.items():
        # Sums of other sizes: a few units in the last place.
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), msg=name)
    entries = listed(tmp_path)
    assert {entry["sample"] for entry in entries} == {3, 4, 5, 8, 11}
    assert {entry["rank"] for entry in entries} == {0, 1}
    assert "OSError: bad sector" in next(e["error"] for e in entries if e["sample"] == 3)
    assert "x is Tensor [9] in sample 8" in next(e["error"] for e in entries if e["sample"] == 8)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["train/skipped_samples"] == 5


def listed(folder):
    paths = sorted((folder / "bad_samples").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_a_micro_batch_without_a_good_sample_is_padding():
    fetch = SkippingFetch(Torn(unreadable=(3, 4, 5)).build_dataset("train"), Tiny(), "training")
    rest = fetch[Shard((3, 5))]
    assert rest.shard == Shard((7, 7), counts=False), "3 + 1 and 3 + 2 are bad too"
    assert rest.batch["x"].shape == (2, 8)
    assert rest.errors.keys() == {3, 5}
    assert fetch[Shard((3, 6))].shard == Shard((6,))
    assert fetch[Shard((6, 7))]["x"].shape == (2, 8), "without a Rest"
    run = make_run(World(), Torn(unreadable=(3, 4, 5)), *SKIP, "--data.shuffle", "false")
    take_steps(run, 3)
    assert run.data.bad_samples.seen == {("training", 0, index) for index in (3, 4, 5)}
    (batch, indices), *_ = run.data.last_step
    assert isinstance(batch, Padding)
    assert run.data.items == 3, "those that count"
    (again, other), *_ = run.data.at(4)
    assert isinstance(again, Padding)
    assert other == indices


@pytest.mark.parametrize("place", [0, 1])
def test_of_two_samples_that_do_not_fit_together_the_one_unlike_the_others_is_bad(place):
    fetch = SkippingFetch(Torn(odd=(place,)).build_dataset("train"), Tiny(), "training")
    rest = fetch[Shard((0, 1))]
    assert rest.errors.keys() == {place}
    assert rest.shard.indices == (1 - place,)


def test_a_resumed_run_lists_each_sample_once_and_ends_equal(tmp_path):
    for name in "run", "whole":
        (tmp_path / name).mkdir()
    words = [*SKIP, "--checkpoint.every", 3, "--run.dir", tmp_path / "run"]
    whole = make_run(World(), Torn(**BAD), *words[:-1], tmp_path / "whole")
    open_run(whole)
    take_steps(whole, 12)
    run = make_run(World(), Torn(**BAD), *words)
    open_run(run)
    take_steps(run, 3)
    save(run)
    take_steps(run, 4)
    run.metrics.close_files()
    killed = listed(tmp_path / "run")
    with (tmp_path / "run/bad_samples/rank00000.jsonl").open("a") as file:
        file.write('{"split": "trai')  # a torn line
    (tmp_path / "run/bad_samples/rank00003.jsonl").write_text(
        json.dumps({**killed[0], "rank": 3, "sample": 99, "samples_seen": 1}) + "\n"
    )
    resumed = make_run(World(), Torn(**BAD), *words, "--run.resume", "auto")
    open_run(resumed)
    take_steps(resumed, 9)
    for name, value in parameters_of(whole).items():
        assert torch.equal(value, parameters_of(resumed)[name]), name
    places = [(entry["epoch"], entry["sample"]) for entry in listed(tmp_path / "run")]
    expected = {(entry["epoch"], entry["sample"]) for entry in listed(tmp_path / "whole")}
    assert len(places) == len(set(places))
    assert set(places) == expected | {(0, 99)}
    assert log(resumed) is not None
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["train/skipped_samples"] == len(expected) + 1, "a lost rank's too"


@pytest.mark.bad_input("more bad samples in an epoch than `data.on_bad_sample` allows")
@pytest.mark.parametrize(("most", "limit"), [("2", 3), ("0.15", 3), ("1", 2)])
def test_more_bad_samples_than_allowed_end_the_run_with_both_numbers(most, limit, tmp_path):
    words = [*SKIP, "--data.on_bad_sample", most, "--run.dir", tmp_path]
    run = make_run(World(), Torn(**BAD), *words)
    open_run(run)
    message = message_of(65, take_steps, run, 8)
    assert message.startswith(
        f"{limit} of the 16 samples of the training split are bad in one epoch, more than "
        f"{most}; fix or remove them, or give data.on_bad_sample a higher number: sample"
    )
    assert len(listed(tmp_path)) == limit


def limit_of_ranks(world, folder):
    words = [*SKIP, "--data.on_bad_sample", 4, "--data.shuffle", "false", "--run.dir", folder]
    run = make_run(world, Torn(unreadable=(0, 1, 4, 5, 8)), *words)
    open_run(run)
    take_steps(run, 3)
    return message_of(65, log, run)[:83]


def test_the_limit_is_of_all_ranks_together(tmp_path):
    fragment = "5 of the 16 samples of the training split are bad in one epoch, more than 4; fix or"
    assert on_ranks(2, limit_of_ranks, tmp_path) == [fragment, fragment]


@pytest.mark.bad_input("a dataset or `collate` of which no sample can be used, with skip")
def test_a_dataset_without_a_good_sample_ends_the_run_at_once():
    run = make_run(World(), Torn(unreadable=range(16)), *SKIP)
    message = message_of(65, take_steps, run, 1)
    assert message.startswith("rank 0: no sample can be used, the last because: sample")

    class Faulty(Tiny):
        def collate(self, samples):
            return samples[0]["z"]

    message = message_of(65, take_steps, make_run(World(), Faulty(), *SKIP), 1)
    assert "KeyError: 'z'" in message


def test_held_out_samples_are_skipped_too_and_listed_once(tmp_path):
    words = [*SKIP, "--eval.every", 1, "--run.dir", tmp_path]
    run = make_run(World(), Torn(unreadable=(2, 3), samples=8), *words)
    open_run(run)
    first = evaluate(run)
    assert evaluate(run) == first
    assert [(e["split"], e["sample"]) for e in listed(tmp_path)] == [
        ("validation", 2),
        ("validation", 3),
    ]
    log(run)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["train/skipped_samples"] == 0


def test_a_run_by_the_command_line_skips_and_warns_each_time_the_number_doubles(launch, tmp_path):
    task = "class Task(Torn):\n    def __init__(self):\n        super().__init__(**BAD)\n"
    (tmp_path / "torn.py").write_text(f"from test_bad_samples import BAD, Torn\n\n\n{task}")
    words = [*SKIP, "--task.target", "torn:Task", "--run.dir", "run", "--train.steps", 8]
    words += ["--train.micro_batch_size", 8, "--metrics.log_every", 2]
    run = launch(0, *map(str, words))
    assert run.returncode == 0, run.stderr
    assert 1 <= run.stderr.count("warning: bad samples skipped since step 0: ") <= 4, run.stderr
    assert "; run/bad_samples lists them" in run.stderr
    assert {e["sample"] for e in listed(tmp_path / "run")} == {3, 4, 5, 8, 11}


def test_a_bad_sample_stops_the_run_unless_it_is_to_be_skipped():
    run = make_run(World(), Torn(**BAD))
    assert not isinstance(run.data.fetch, SkippingFetch)
    with pytest.raises(DataError):
        take_steps(run, 2)
