"""The order of samples is a pure function of seed and position, the same set per step at every
world size.
"""

import multiprocessing
import time
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from tiny import EmptyDataset, Rows, Tiny, make_run, take_steps
from torch import nn

from dist_amp.data import Batches, Padding
from dist_amp.errors import DataError
from dist_amp.loading import loader
from dist_amp.loading.nested import to_device
from dist_amp.loading.plan import Plan, epoch_order, shard_step
from dist_amp.supervise.lifecycle import open_run
from dist_amp.world import World


class Numbered:
    """Samples that are their own index, so that a batch tells which ones it holds."""

    def build_dataset(self, length):
        return Rows(index=torch.arange(length))


def plan(length=23, ranks=1, rank=0, micro_batch=2, accumulation=1, seed=0, order="randperm"):
    return Plan(length, ranks * micro_batch * accumulation, micro_batch, ranks, rank, seed, order)


def batches(plan, workers=0):
    return Batches(
        Numbered().build_dataset(plan.length), Numbered(), plan, workers, torch.device("cpu")
    )


def samples_of_steps(ranks, micro_batch, accumulation, steps):
    """The sorted samples that count, step by step, over all ranks."""
    per_rank = [
        batches(plan(64 + 23, ranks, rank, micro_batch, accumulation)) for rank in range(ranks)
    ]
    taken = []
    for _ in range(steps):
        parts = [
            batch["index"]
            for one in per_rank
            for batch in next(one)
            if not isinstance(batch, Padding)
        ]
        taken.append(sorted(torch.cat(parts).tolist()))
    return taken


def test_a_step_takes_the_same_samples_at_every_world_size():
    expected = samples_of_steps(ranks=1, micro_batch=24, accumulation=1, steps=9)
    for ranks, micro_batch, accumulation in [(1, 4, 6), (2, 4, 3), (3, 8, 1), (4, 3, 2), (8, 3, 1)]:
        assert samples_of_steps(ranks, micro_batch, accumulation, 9) == expected


def test_every_epoch_takes_every_sample_once_in_another_order():
    length = 23
    one = batches(plan(length, micro_batch=5))
    epochs = [
        torch.cat([batch["index"] for _ in range(5) for batch in next(one)]) for _ in range(2)
    ]
    assert all(sorted(epoch.tolist()) == list(range(length)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert one.position == 2 * length


def test_another_seed_gives_another_order_and_no_shuffle_the_datasets_own():
    everywhere = torch.arange(50)
    for order in ("randperm", "feistel"):
        assert not torch.equal(
            epoch_order(order, 50, 0, 0)(everywhere), epoch_order(order, 50, 1, 0)(everywhere)
        )
    assert torch.equal(epoch_order("dataset", 50, 1, 3)(everywhere), everywhere)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_all_that_it_takes_to_go_on(workers):
    through = batches(plan(), workers)
    seen = [[batch["index"].tolist() for batch in next(through)] for _ in range(30)]
    resumed = batches(plan(), workers)
    resumed.position = 2 * 11 + 1 + 2 * 3  # one epoch of 23, then three steps
    assert [[batch["index"].tolist() for batch in next(resumed)] for _ in range(10)] == seen[15:25]
    through.close()
    resumed.close()


def sizes(length, ranks, micro_batch):
    """[rank][micro-batch] -> its number of samples; 0: padding."""
    shares = [shard_step(range(length), ranks, micro_batch, rank) for rank in range(ranks)]
    return [[len(share.indices) * share.counts for share in rank] for rank in shares]


def test_the_end_of_an_epoch_is_split_evenly_and_padded_where_a_rank_has_none():
    assert sizes(7, ranks=4, micro_batch=2) == [[2], [2], [2], [1]]
    assert sizes(5, ranks=4, micro_batch=8) == [[3], [2], [0], [0]]
    assert sizes(2, ranks=4, micro_batch=2) == [[2], [0], [0], [0]]
    assert sizes(9, ranks=2, micro_batch=4) == [[2, 3], [2, 2]]
    padding = shard_step(range(10, 13), 4, 4, rank=3)
    assert [(share.indices, share.counts) for share in padding] == [((10, 11), False)], (
        "batch norm takes it too"
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_micro_batch_has_one_sample_where_samples_can_be_split_otherwise(ranks):
    for micro_batch in range(1, 9):
        for length in range(1, 3 * ranks * micro_batch + 1):
            shares = [shard_step(range(length), ranks, micro_batch, rank) for rank in range(ranks)]
            assert len({len(rank) for rank in shares}) == 1, "every rank takes part equally often"
            taken = [
                index
                for rank in shares
                for share in rank
                if share.counts
                for index in share.indices
            ]
            assert sorted(taken) == list(range(length))
            counts = [len(share.indices) for rank in shares for share in rank]
            assert max(counts) <= micro_batch
            single = [count for rank in sizes(length, ranks, micro_batch) for count in rank].count(
                1
            )
            possible = length > 1 and micro_batch > 1 and not (micro_batch == 2 and length % 2)
            assert not (single and possible)
            assert not (1 in counts and possible), "nor has the padding"


def test_full_micro_batches_are_split_round_robin():
    for ranks, micro_batch, count in [(1, 3, 2), (2, 1, 1), (2, 4, 3), (3, 2, 1), (8, 5, 2)]:
        window, size = list(range(100, 100 + ranks * micro_batch * count)), ranks * micro_batch
        for rank in range(ranks):
            shares = shard_step(window, ranks, micro_batch, rank)
            expected = [
                tuple(window[start : start + size][rank::ranks])
                for start in range(0, len(window), size)
            ]
            assert [share.indices for share in shares] == expected
            assert all(share.counts for share in shares)


def dropping(ranks, rank, micro_batch, accumulation, position=0):
    whole = plan(23, ranks, rank, micro_batch, accumulation)
    one = batches(replace(whole, drop_last=True))
    one.position = position
    return one


def test_drop_last_leaves_out_what_does_not_fill_a_step_and_nothing_else():
    one, whole = dropping(1, 0, 8, 1), batches(plan(23, 1, 0, 8, 1))
    steps = [next(one)[0]["index"].tolist() for _ in range(4)]
    assert [len(step) for step in steps] == [8] * 4
    assert steps == [
        step for step in (next(whole)[0]["index"].tolist() for _ in range(6)) if len(step) == 8
    ]
    assert one.position == 23 + 16


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_run_that_drops_last_goes_on_from_any_position_on_any_number_of_ranks(steps):
    through = dropping(1, 0, 8, 1)
    seen = [sorted(next(through)[0]["index"].tolist()) for _ in range(7)]
    stopped = dropping(2, 0, 2, 2)
    for _ in range(steps):
        next(stopped)
    resumed = [dropping(4, rank, 2, 1, stopped.position) for rank in range(4)]
    for expected in seen[steps:]:
        assert sorted(torch.cat([next(one)[0]["index"] for one in resumed]).tolist()) == expected


class BatchNormed(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def norms_of_an_epoch(world, samples, words):
    run = make_run(
        world,
        BatchNormed(samples=samples),
        "--use_amp",
        "false",
        "--train.micro_batch_size",
        4,
        *words,
    )
    return len([report.norm.item() for report in take_steps(run, 3)])


def test_batch_norm_trains_through_a_remainder_that_has_a_sample_for_each_rank():
    # Two samples for two ranks: one of them takes both.
    assert on_ranks(2, norms_of_an_epoch, 18, ["--parallel.strategy", "ddp"]) == [3, 3]


def test_batch_norm_trains_through_a_remainder_of_one_sample_if_it_is_dropped():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        norms_of_an_epoch(World(), 9, [])
    assert norms_of_an_epoch(World(), 9, ["--data.drop_last", "true"]) == 3


@pytest.mark.bad_input("batch norm and an epoch whose last step is not full")
@pytest.mark.parametrize(
    ("samples", "words", "said"),
    [
        (17, [], "1 of 8 samples, so batch norm (1) gets micro-batches of 1 in place of 4, and a single sample may "
         "have no variance; use data.drop_last=true"),
        (22, [], "6 of 8 samples, so batch norm (1) gets micro-batches of 3 in place of 4; use data.drop_last=true"),
        (20, [], ""),
        (17, ["--data.drop_last", "true"], ""),
        (17, ["--train.steps", 2], ""),
    ],
    ids=["one_sample", "fewer", "full_micro_batches", "dropped", "never_reached"],
)  # fmt: skip
def test_batch_norm_at_the_end_of_an_epoch_is_warned_about_with_the_numbers(
    samples, words, said, capsys, tmp_path
):
    sizes = ["--train.micro_batch_size", 4, "--train.accumulation_steps", 2, "--run.dir", tmp_path]
    open_run(make_run(World(), BatchNormed(samples=samples), *sizes, *words))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "batch norm" in line]
    assert len(warnings) == bool(said)
    assert all(said in line for line in warnings)
    open_run(make_run(World(), Tiny(samples=samples), *sizes, *words))
    assert "batch norm" not in capsys.readouterr().err


def test_one_epoch_is_the_same_each_time_and_leaves_nothing_out():
    held_out = batches(plan(length=23, micro_batch=4))
    first = [batch["index"] for step in held_out.one_epoch("all") for batch in step]
    second = [batch["index"] for step in held_out.one_epoch("all") for batch in step]
    assert sorted(torch.cat(first).tolist()) == list(range(23))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(list(held_out.one_epoch(2))) == 2


class Augmented(Tiny):
    """Adds random numbers while it loads."""

    def collate(self, samples):
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "x": batch["x"] + torch.rand(batch["x"].shape)}


def test_random_numbers_drawn_by_loader_workers_do_not_depend_on_how_many_there_are():
    draws = []
    for workers in (1, 2, 3):
        run = make_run(World(), Augmented(), "--data.workers", workers)
        draws.append([next(run.data)[0]["x"] for _ in range(6)])
        run.data.close()
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[2], strict=True))


def test_an_empty_dataset_is_refused():
    with pytest.raises(DataError, match="the training dataset is empty") as error:
        make_run(World(), EmptyDataset())
    assert error.value.exit_code == 65


@pytest.mark.bad_input("dataset empty, absent, or smaller than a global batch")
def test_a_dataset_smaller_than_one_global_batch_is_refused_with_both_sizes():
    with pytest.raises(
        DataError,
        match=r"has 20 samples, fewer than one global batch of 24 = micro_batch_size 8 x 1 ",
    ):
        make_run(World(), Tiny(samples=20), "--train.accumulation_steps", 3)


@pytest.mark.bad_input(
    "`data.path`, `data.name` or another setting of what to read, for a task that does not take "
    "the `data` section"
)
def test_settings_of_data_that_the_task_does_not_take_are_warned_of_by_name(tmp_path, capsys):
    words = [
        "--data.path",
        "rows.jsonl",
        "--data.sources.wiki.weight",
        2,
        "--data.workers",
        0,
        "--run.dir",
        tmp_path,
    ]
    open_run(make_run(World(), Tiny(), *words))
    assert (
        "warning: data.path=rows.jsonl, data.sources.wiki: nothing reads this, because Tiny's "
        "constructor has no parameter `data`; add one"
    ) in capsys.readouterr().err
    open_run(make_run(World(), Tiny(), "--data.drop_last", "true", "--run.dir", tmp_path))
    assert "nothing reads this" not in capsys.readouterr().err


def test_a_dataset_that_only_streams_is_refused():
    class Streaming(Tiny):
        def build_dataset(self, split):
            return iter(range(10))

    with pytest.raises(
        DataError,
        match=r"build_dataset\('train'\) returned a range_iterator, not samples by number; return a",
    ):
        make_run(World(), Streaming())


def padded_step(world):
    """A window of one micro-batch in a world of two: rank 1 has nothing of its own."""
    run = make_run(
        world, Tiny(samples=9), "--train.micro_batch_size", 4, "--parallel.strategy", "fsdp"
    )
    next(run.data)
    last = next(run.data)
    return [isinstance(batch, Padding) for batch in last], run.data.items


def test_padding_counts_for_no_item():
    assert on_ranks(2, padded_step) == [([False], 5), ([True], 4)]


def test_batches_of_any_mapping_are_moved():
    from collections import UserDict

    moved = to_device(
        UserDict(x=torch.zeros(2), names=["a"], pair=(torch.ones(1), 3)), torch.device("meta")
    )
    assert moved["x"].device.type == moved["pair"][0].device.type == "meta"
    assert (moved["names"], moved["pair"][1]) == (["a"], 3)


def test_random_augmentations_differ_from_epoch_to_epoch():
    run = make_run(World(), Augmented(samples=8), "--data.workers", 1, "--data.shuffle", "false")
    first, second = (next(run.data)[0]["x"] for _ in range(2))
    assert not torch.equal(first, second)
    run.data.close()


@pytest.mark.bad_input("loader workers that do not start")
@pytest.mark.parametrize("stuck", [1, 9])
def test_a_loader_worker_that_is_stuck_in_its_fork_is_forked_again(monkeypatch, stuck):
    real, semaphore, attempts = loader._start_worker, multiprocessing.Semaphore, []

    def begin(value):  # an attempt to start the workers
        attempts.append(value)
        # Not a moment too short for one that does start.
        monkeypatch.setattr(loader, "START_SECONDS", 0.5 if len(attempts) <= stuck else 300.0)
        return semaphore(value)

    def start(up, worker):
        if len(attempts) <= stuck:
            time.sleep(3600)
        real(up, worker)

    monkeypatch.setattr(multiprocessing, "Semaphore", begin)
    monkeypatch.setattr(loader, "_start_worker", start)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    run = make_run(World(), Tiny(), "--data.workers", 1)
    if stuck > 3:
        with pytest.raises(
            DataError, match="rank 0: the loader workers do not start; use data.workers=0"
        ):
            next(run.data)
        assert len(attempts) == 3
    else:
        expected = next(run.data.plan.requests(0, 1)).indices
        assert len(next(run.data)) == 1
        assert [indices for _, indices in run.data.last_step] == [expected]
        first = make_run(World(), Tiny(), "--data.workers", 0)
        assert torch.equal(run.data.last_step[0][0]["x"], next(first.data)[0]["x"]), (
            "no sample was lost with the attempt"
        )
        assert len(attempts) == 2
        run.data.close()


@pytest.mark.bad_input("a `build_dataset` that returns a text or a dict (of splits)")
@pytest.mark.parametrize("dataset", ["a text", {"train": [1, 2]}])
def test_a_dataset_that_is_a_text_or_a_dict_is_refused(dataset):
    class Wrong(Tiny):
        def build_dataset(self, split):
            return dataset

    with pytest.raises(
        DataError,
        match=f"returned a {type(dataset).__name__}, not samples by number; return a map-style",
    ):
        make_run(World(), Wrong())
