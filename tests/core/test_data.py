"""Samples and their augmentation are the same at every world size and after any stop."""

import json
import multiprocessing
import time
import tracemalloc
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from conftest import needs
from messages import message_of
from tiny import EndsItsReader, Rows, Tiny, WithNoise, make_run, save, take_steps, variant

from dist_amp.checkpoint.format import MANIFEST, read_manifest
from dist_amp.config.load import load_config
from dist_amp.data import Batches, Padding
from dist_amp.errors import DataError
from dist_amp.loading import workers as processes
from dist_amp.loading.plan import TABLE_LENGTH, Plan, epoch_order, shard_step, shuffled_order
from dist_amp.supervise.lifecycle import open_run
from dist_amp.world import World

STEP = ["--train.micro_batch_size", 4]


def plan(length=23, ranks=1, rank=0, micro_batch=2, accumulation=1, order="randperm"):
    return Plan(length, ranks * micro_batch * accumulation, micro_batch, ranks, rank, 0, order)


def batches(plan, workers=0, position=0):
    """Samples that are their own index, so that a batch tells which ones it holds."""
    task = SimpleNamespace(tokens=lambda batch: 10 * len(batch["index"]))
    data = Batches(Rows(index=torch.arange(plan.length)), task, plan, workers, World())
    data.position = position
    return data


def samples_of_steps(ranks, sizes, steps, position=0, length=87, **options):
    """The sorted samples that count, step by step, over the plans of all ranks."""
    plans = [plan(length, ranks, rank, *sizes) for rank in range(ranks)]
    of_ranks = [batches(replace(each, **options), position=position) for each in plans]
    taken = []
    for _ in range(steps):
        parts = [b["index"] for one in of_ranks for b in next(one) if not isinstance(b, Padding)]
        taken.append(sorted(torch.cat(parts).tolist()))
    return taken


@pytest.mark.parametrize("order", ["feistel", "randperm", "dataset"])
def test_a_step_takes_the_same_samples_at_every_world_size_in_every_order(order):
    expected = samples_of_steps(1, (24, 1, order), 9)
    for ranks, *sizes in [(1, 4, 6), (2, 4, 3), (3, 8, 1), (8, 3, 1)]:
        assert samples_of_steps(ranks, (*sizes, order), 9) == expected
    assert samples_of_steps(4, (3, 2, order), 4, position=87 + 24) == expected[5:]
    epochs = expected[:4], expected[4:8]
    assert all(sorted(chain(*epoch)) == list(range(87)) for epoch in epochs), "each sample once"
    assert (epochs[0] == epochs[1]) == (order == "dataset")


@pytest.mark.parametrize(
    ("length", "ranks", "micro_batch", "expected"),
    [(7, 4, 2, [[2], [2], [2], [1]]), (5, 4, 8, [[3], [2], [0], [0]]), (9, 2, 4, [[2, 3], [2, 2]])],
)
def test_the_end_of_an_epoch_is_split_evenly_over_the_ranks(length, ranks, micro_batch, expected):
    shares = [shard_step(range(length), ranks, micro_batch, rank) for rank in range(ranks)]
    assert [[len(s.indices) * s.counts for s in rank] for rank in shares] == expected


def test_the_items_and_tokens_of_steps_are_counted_without_padding():
    one = batches(plan(40, accumulation=2, order="dataset"))
    for expected in ([(0, 1), (2, 3)], [(4, 5), (6, 7)]):
        next(one)
        assert [indices for _, indices in one.last_step] == expected
    assert (one.position, one.items, one.tokens) == (8, 8, 80)
    other = batches(plan(2, ranks=2, rank=1))
    (padding,) = next(other)
    assert isinstance(padding, Padding)
    assert (other.items, other.tokens) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_micro_batch_has_one_sample_where_samples_can_be_split_otherwise(ranks):
    for micro_batch in range(1, 9):
        for length in range(1, 3 * ranks * micro_batch + 1):
            of_ranks = [
                shard_step(range(length), ranks, micro_batch, rank) for rank in range(ranks)
            ]
            assert len({len(shares) for shares in of_ranks}) == 1, "all ranks run the same steps"
            shares = [share for shares in of_ranks for share in shares]
            taken = [index for share in shares if share.counts for index in share.indices]
            assert sorted(taken) == list(range(length))
            counts = [len(share.indices) for share in shares]  # of the padding, too
            assert max(counts) <= micro_batch
            avoidable = length > 1 and micro_batch > 1 and not (micro_batch == 2 and length % 2)
            assert not (1 in counts and avoidable)


def test_drop_last_leaves_out_what_does_not_fill_a_step_on_any_number_of_ranks():
    steps = samples_of_steps(1, (8,), 7, length=23, drop_last=True)
    whole = samples_of_steps(1, (8,), 10, length=23)
    assert steps == [step for step in whole if len(step) == 8]
    first = batches(replace(plan(23, 2, 0, 2, 2), drop_last=True))
    for stopped in range(1, 5):
        next(first)
        resumed = samples_of_steps(4, (2,), 7 - stopped, first.position, 23, drop_last=True)
        assert resumed == steps[stopped:]


@pytest.mark.bad_input("dataset empty, absent, or smaller than a global batch")
@pytest.mark.bad_input("a `build_dataset` that returns a text or a dict (of splits)")
@pytest.mark.parametrize(
    ("dataset", "words", "said"),
    [
        (Rows(x=torch.zeros(0, 8)), "", "the training dataset is empty"),
        (range(20), "--train.accumulation_steps 3", "fewer than one global batch of 24 ="),
        (range(3), "--data.drop_last true", "fewer than one global batch of 8 = micro_batch_size"),
        (iter(range(9)), "", "('train') returned a range_iterator, not a map-style dataset;"),
        ({"train": [1]}, "", "returned a dict, not a map-style dataset; return one, with"),
    ],
    ids=["empty", "small", "smaller than the default", "stream", "dict"],
)
def test_a_dataset_that_can_not_be_trained_on_is_refused(dataset, words, said):
    task = variant(build_dataset=lambda split: dataset)
    assert said in message_of(65, make_run, World(), task, *words.split())


def test_a_dataset_smaller_than_the_default_batch_is_a_step_per_epoch():
    run = make_run(World(), Tiny(samples=3))
    for _ in range(2):
        next(run.data)
        ((_, indices),) = run.data.last_step
        assert sorted(indices) == [0, 1, 2]


@pytest.mark.bad_input(
    "`data.path`, `data.name` or another setting of what to read, for a task that does not take "
    "the `data` section"
)
def test_settings_of_data_that_the_task_does_not_take_are_warned_of_by_name(tmp_path, capsys):
    read = "--data.drop_last true --data.workers 0"
    unread = f"{read} --data.path a --data.streams 8 --data.sources.wiki.weight 2"
    for words, said in ((read, ""), (unread, "data.path=a, data.streams=8, data.sources.wiki: ")):
        open_run(make_run(World(), Tiny(), *words.split(), "--run.dir", tmp_path))
        warned = capsys.readouterr().err
        assert warned.count("nothing reads this") == bool(said)
        assert said in warned


@pytest.fixture
def start_method(request):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(
    ("start_method", "on_bad_sample"),
    [
        ("fork", "stop"),
        pytest.param("forkserver", "skip", marks=needs("loading.bad_samples")),
        pytest.param("spawn", "stop", marks=pytest.mark.slow),
    ],
    indirect=["start_method"],
)
def test_workers_of_each_start_method_give_the_same_batches_from_a_position_also_when_closed(
    start_method, on_bad_sample
):
    words = ["--data.workers", 2, "--data.on_bad_sample", on_bad_sample, "--train.micro_batch_size"]
    config = load_config(["--task.target", "tiny:WithNoise", *map(str, [*words, 4])], {})
    run = make_run(World(), WithNoise(config.data), *words, 4)
    expected = [run.data.at(start)[0][0]["x"] for start in (28, 32, 36)]
    run.data.position = 28  # one epoch of 24, then a step
    before = set(multiprocessing.active_children())
    for part in (expected[:1], expected[1:]):
        assert all(torch.equal(next(run.data)[0]["x"], x) for x in part)
        assert len(set(multiprocessing.active_children()) - before) == 2
        run.data.close()
        assert set(multiprocessing.active_children()) <= before


@pytest.mark.bad_input("a dataset that the loader workers' start method can't pickle")
@pytest.mark.bad_input("a dataset that a loader worker can't unpickle, as of a notebook's class")
@pytest.mark.parametrize("start_method", ["forkserver"], indirect=True)
def test_a_dataset_that_does_not_reach_the_workers_is_one_line(start_method):
    class Local(Rows):
        pass

    pickling = r"rank 0: the start method forkserver pickles .*\.Local.*use data.workers=0"
    unpickling = "rank 0: a loader worker ended .* not in a notebook"
    for kind, said in ((Local, pickling), (EndsItsReader, unpickling)):
        data = batches(plan(), workers=1)
        data.fetch.dataset = kind(index=torch.arange(23))
        with pytest.raises(DataError, match=said):
            next(data)


@pytest.mark.bad_input("loader workers that do not start")
@pytest.mark.parametrize("stuck", [1, 9])
def test_a_loader_worker_that_is_stuck_in_its_fork_is_forked_again(monkeypatch, stuck):
    real, semaphore, attempts = processes._start_worker, multiprocessing.Semaphore, []

    def begin(value):  # an attempt to start the workers
        attempts.append(value)
        # Not a moment too short for one that does start.
        monkeypatch.setattr(processes, "START_SECONDS", 0.05 if len(attempts) <= stuck else 300.0)
        return semaphore(value)

    def start(up, worker):
        if len(attempts) <= stuck:
            time.sleep(3600)
        real(up, worker)

    monkeypatch.setattr(multiprocessing, "Semaphore", begin)
    monkeypatch.setattr(processes, "_start_worker", start)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.05)
    data = batches(plan(), workers=1)
    if stuck > 3:
        assert "rank 0: the loader workers do not start; use data." in message_of(65, next, data)
        assert len(attempts) == 3
    else:
        first = next(batches(plan()))[0]["index"]
        assert torch.equal(next(data)[0]["index"], first), "no sample was lost with the attempt"
        assert len(attempts) == 2
        data.close()


class Backwards(Rows):
    """Each epoch in reverse, from a start that depends on the seed and the epoch."""

    name = "backwards"

    def shuffled(self, global_batch_size, world_size):
        assert (global_batch_size, world_size) == (4, 1)
        return self.name, lambda seed, epoch: lambda at: (seed + 3 * epoch - at) % len(self)


class OwnOrder(Tiny):
    rows = Backwards


def samples_taken(run, steps):
    seen = []
    for _ in range(steps):
        take_steps(run, 1)
        seen.append(run.data.last_step[0][1])
    return seen


@pytest.mark.bad_input("another `data.streams` or `data.view` than the checkpoint's")
@pytest.mark.bad_input(
    "a checkpoint whose samples were taken in another order: other `data.view`, `data.streams`, "
    "or `data.group_by_length`"
)
def test_a_dataset_is_read_in_its_own_order_also_resumed_and_another_order_is_refused(
    tmp_path, capsys, monkeypatch
):
    words = [*STEP, "--run.dir", tmp_path, "--run.resume", "auto", "--run.seed", 5]
    run = make_run(World(), OwnOrder(samples=8), *words)
    assert samples_taken(run, 3) == [(5, 4, 3, 2), (1, 0, 7, 6), (0, 7, 6, 5)]
    assert read_manifest(save(run)).order == "backwards"
    again = make_run(World(), OwnOrder(samples=8), *words)
    assert samples_taken(again, 2) == [(4, 3, 2, 1), (3, 2, 1, 0)]
    monkeypatch.setattr(Backwards, "name", "turns")
    for task, order in ((Tiny(samples=8), "randperm"), (OwnOrder(samples=8), "turns")):
        text = f"takes its samples in the order 'backwards', this run in '{order}'"
        with pytest.raises(DataError, match=f"{text}: use the old data.view, data.streams"):
            make_run(World(), task, *words)
        resumed = make_run(World(), task, *words, "--run.allow_config_change", "true")
        assert text in capsys.readouterr().err
        assert resumed.data.plan.order == order
    stored = make_run(World(), OwnOrder(samples=8), *STEP, "--data.shuffle", "false")
    assert samples_taken(stored, 1) == [(0, 1, 2, 3)]


def test_every_sample_of_a_large_dataset_comes_once_up_to_the_largest_length():
    around_powers = [15, 16, 17, 255, 256, 257, 65535, 65536, 65537]
    for length in [*range(1, 10), *around_powers, 1009, 100_003]:
        everything = torch.arange(length)
        order = epoch_order("feistel", length, 3, 0)
        assert torch.equal(order(everything).sort().values, everything)
    order = epoch_order("feistel", 2**52, 1, 0)
    positions = torch.cat((torch.randint(0, 2**52, (1000,)), torch.tensor([0, 2**52 - 1])))
    samples = order(positions)
    assert bool(((samples >= 0) & (samples < 2**52)).all())
    assert len(samples.unique()) == len(positions.unique())


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


@pytest.mark.parametrize("order", ["randperm", "feistel"])
def test_a_run_is_continued_in_its_checkpoints_order_also_the_first_versions(
    tmp_path, capsys, order
):
    words = [*STEP, "--run.dir", tmp_path, "--run.resume", "auto"]
    task = Tiny(samples=TABLE_LENGTH + 500)
    run = make_run(World(), task, *words)
    run.data.plan = replace(run.data.plan, order=order)
    samples_taken(run, 3)
    folder = save(run)
    assert json.loads((folder / MANIFEST).read_text())["order"] == order
    expected = samples_taken(run, 6)
    resumed = make_run(World(), task, *words)
    said = f"data order: randperm, as in {folder}; a new run would use feistel"
    assert capsys.readouterr().out.count(said) == (order == "randperm")
    assert samples_taken(resumed, 3) == expected[:3]
    assert read_manifest(save(resumed)).order == order
    assert samples_taken(make_run(World(), task, *words), 3) == expected[3:]


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


def test_each_micro_batch_draws_from_a_seed_of_its_own_that_does_not_depend_on_the_world_size():
    def seeds(ranks, accumulation):
        plans = [plan(64, ranks, rank, 2, accumulation) for rank in range(ranks)]
        return {shard.seed for each in plans for shard in each.micro_batches(0, 6)}

    expected = seeds(1, 8)
    assert len(expected) == 6 * 8, "also in the next epoch, which begins after four steps"
    assert seeds(2, 4) == seeds(4, 2) == expected


class Noisy(Tiny):
    def augment(self, sample, rng):
        return {**sample, "x": sample["x"] + torch.randn(8, generator=rng)}


def noisy(steps, *words, position=0):
    """{(step, sample): its augmented x} of epochs of 16 samples, two steps each."""
    run = make_run(World(), Noisy(samples=16), "--train.global_batch_size", 8, *words)
    run.data.position = position
    seen = {}
    for step in range(steps):
        next(run.data)
        for batch, indices in run.data.last_step:
            for index, x in zip(indices, batch["x"], strict=True):
                seen[step, index] = tuple(x.tolist())
    run.data.close()
    return seen


def test_a_training_samples_augmentation_depends_on_nothing_but_seed_and_epoch():
    expected = noisy(4, "--train.micro_batch_size", 8)
    assert noisy(4, "--train.micro_batch_size", 2, "--data.workers", 2) == expected
    late = noisy(1, "--train.micro_batch_size", 8, position=24)
    assert late == {(0, index): x for (step, index), x in expected.items() if step == 3}
    other_seed = noisy(4, "--train.micro_batch_size", 8, "--run.seed", 1)
    assert len({*expected.values(), *other_seed.values()}) == 2 * 2 * 16
    run = make_run(World(), Noisy(samples=8), "--eval.every", 1)
    (batch,) = next(run.validation.one_epoch("all"))
    assert torch.equal(batch["x"], Tiny(samples=8).build_dataset("validation").columns["x"])


@pytest.mark.bad_input("a task's `augment` that fails")
def test_an_augmentation_that_fails_names_the_sample():
    task = variant(augment=lambda sample, rng: sample["pixels"])
    run = make_run(World(), task, *STEP, "--data.shuffle", "false")
    said = "augment(sample, rng) failed on sample 0: KeyError: 'pixels'"
    assert said in message_of(65, next, run.data)
