"""What test_bit_exact.py tests, with other features."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from bit_exact_models import Blocks
from ranks import on_ranks
from test_bit_exact import (
    SETTINGS,
    threads,  # noqa: F401
)
from tiny import Tiny, make_run, take_steps

from benchmarks.bit_exact import Made, kept_bytes, made_bytes
from benchmarks.collectives import Counting
from benchmarks.collectives import check as check_collectives
from dist_amp.bit_exact import AllReduce, ReduceScatter, exact_config
from dist_amp.commands.estimates import Setup, of_a_step
from dist_amp.config.memory import tensor_bytes
from dist_amp.errors import ConfigError
from dist_amp.step import train_step
from dist_amp.world import World, local

# ---- what it costs


def sent_by(world, strategy, micro_batches, exact):
    """({(kind, ranks of its group): bytes that this rank sends} of a step and its record, plan)."""
    name, *replicas = strategy.split(" replicas=")
    size = 2 * world.world_size * micro_batches
    words = [*SETTINGS, "--use_amp", "false", "--train.steps", 4, "--parallel.strategy", name]
    words += ["--train.global_batch_size", size, "--parallel.bit_exact", exact]
    if replicas:
        words += ["--parallel.replicas", *replicas]
    run = make_run(world, Blocks(samples=4 * size), *words)
    take_steps(run, 2)
    batches = next(run.data)
    with Counting() as counting:
        run.metrics.record(train_step(run, batches))
    run.close()
    sent = Counter()
    for one, times in counting.collectives.items():
        sent[one.kind, one.ranks] += times * one.sent
    config = run.config
    if exact == "true":
        config = exact_config(config, world)
    setup = Setup(config, name, world, run.task, run.parallel.module, run.precision)
    return sent, sum(times * one.sent for one, times in of_a_step(setup).items())


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "ddp"),
        (2, "fsdp"),
        (4, "hsdp"),
        pytest.param(8, "hsdp replicas=4", marks=pytest.mark.slow),
    ],
)
def test_a_micro_batch_sends_what_an_ordinary_step_does_and_a_few_scalars(ranks, strategy):
    micro_batches = 3
    ordinary, _ = on_ranks(ranks, sent_by, strategy, 1, "false")[0]
    sent, planned = on_ranks(ranks, sent_by, strategy, micro_batches, "true")[0]
    # All ranks sum each micro-batch's weight and loss, and the square of each row.
    ring = 2 * (ranks - 1) / ranks
    scalars = 2 * ranks * micro_batches
    if strategy != "ddp":
        scalars += sum(p.shape[:1].numel() for p in Blocks().build_model().parameters())
    assert sent.pop(("all_reduce", ranks)) == 4 * scalars * ring
    ordinary_scalars = 4 * ring  # the weight, and the norm
    if strategy != "ddp":
        ordinary_scalars *= 2
    expected = sum(ordinary.values()) - ordinary_scalars
    if strategy.endswith("replicas=4"):  # summed by an all-to-all, and again by FSDP2
        expected += ordinary["all_reduce", 4] / 2
    # Each bucket or part of a unit is padded to a multiple of the ranks.
    padding = 4 * ranks * len(list(Blocks().build_model().modules()))
    assert 0 <= sum(sent.values()) - micro_batches * expected <= micro_batches * padding
    assert 0 <= sum(sent.values()) - (planned - ordinary_scalars) <= micro_batches * padding


@pytest.mark.bad_input("`benchmarks.collectives` of a bit-exact run")
def test_the_bench_of_collectives_names_the_one_of_a_bit_exact_run():
    with pytest.raises(ConfigError, match="torchrun -m benchmarks.bit_exact counts them"):
        check_collectives(make_run(World(), Tiny(), *SETTINGS))


def kept_by(world, strategy, micro_batches):
    """The most bytes that sums take after a micro-batch, over those of this rank's gradients."""
    size = 2 * world.world_size * micro_batches
    words = ["--train.global_batch_size", size, "--parallel.strategy", strategy]
    run = make_run(world, Blocks(samples=2 * size), *SETTINGS, *words, "--train.steps", 2)
    return kept_bytes(run, run.parallel) / tensor_bytes(map(local, run.parallel.parameters))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("micro_batches", "copies"), [(1, 0), (2, 1), (3, 1), (4, 2), (6, 2), (8, 3)]
)
def test_sums_take_one_copy_of_a_ranks_gradients_per_power_of_two(strategy, micro_batches, copies):
    assert on_ranks(2, kept_by, strategy, micro_batches) == [copies, copies]


def made_by(world, strategy, micro_batches):
    """(most bytes alive at once of what a step makes, bytes of this rank's gradients)."""
    size = 2 * world.world_size * micro_batches
    words = ["--train.global_batch_size", size, "--parallel.strategy", strategy]
    words += ["--use_amp", "false", "--train.steps", 4]
    run = make_run(world, Blocks(samples=4 * size), *SETTINGS, *words)
    take_steps(run, 2)
    made = made_bytes(run)
    run.close()
    return made, tensor_bytes(map(local, run.parallel.parameters))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_twice_the_micro_batches_take_one_more_copy_of_a_ranks_gradients(strategy):
    steps = [on_ranks(2, made_by, strategy, micro_batches) for micro_batches in (2, 4, 8)]
    for fewer, more in pairwise(steps):
        for (before, gradients), (after, _) in zip(fewer, more, strict=True):
            assert after - before in range(gradients, gradients + 200)  # and losses, weights


def all_to_all_of_equals(output, given, group):
    """Of ranks that give the same; gloo's own holds on to its output for a while."""
    output.copy_(given)


@patch("torch.distributed.all_to_all_single", all_to_all_of_equals)
def exchange_by(world, elements):
    """Bytes that an exchange of gradients takes besides them, over theirs: DDP's, FSDP2's."""
    gradients = torch.ones(elements)
    bucket = SimpleNamespace(buffer=lambda: gradients)
    with Made() as of_ddp:
        AllReduce(world).hook(bucket)
    part = torch.empty(elements // world.world_size)
    unsharded = torch.ones(len(part) * world.world_size)  # FSDP2 pads it
    with Made() as of_fsdp:
        ReduceScatter(SimpleNamespace(strategy="fsdp"))(part, unsharded, dist.group.WORLD, None)
    return of_ddp.most / (4 * elements), of_fsdp.most / (4 * elements)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exchange_takes_one_and_a_half_buckets_or_units(ranks):
    # What is received, and the first sum of pairs.
    assert on_ranks(ranks, exchange_by, 400) == [(1.5, 1.5)] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_a_bucket_that_ranks_do_not_divide_is_copied(ranks):
    elements = 401
    whole = (elements + ranks - 1) // ranks * ranks
    for of_ddp, _ in on_ranks(ranks, exchange_by, elements):
        assert of_ddp == 2.5 * whole / elements
