"""What test_bit_exact.py tests, with other features."""

import re
from collections import Counter

import pytest
import torch
from bit_exact_models import Blocks, Crossed
from ranks import on_ranks
from test_bit_exact import (
    SETTINGS,
    compare,
    sha1,
    threads,  # noqa: F401
)
from tiny import Tiny, log_row, make_run, moments_of, parameters_of, take_steps
from torch import nn

from benchmarks.bit_exact import kept_bytes
from benchmarks.collectives import Counting
from dist_amp.bit_exact import exact_config
from dist_amp.config.load import load_config
from dist_amp.config.memory import tensor_bytes
from dist_amp.errors import ConfigError
from dist_amp.step import train_step
from dist_amp.world import World, local

# ---- what it costs


def sent_by(world, strategy, micro_batches, exact):
    """{(kind, ranks of its group): bytes that this rank sends} of a step and its record."""
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
    return sent


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "ddp"),
        (2, "fsdp"),
        pytest.param(4, "hsdp", marks=pytest.mark.slow),
        pytest.param(8, "hsdp replicas=4", marks=pytest.mark.slow),
    ],
)
def test_a_micro_batch_sends_what_an_ordinary_step_does_and_a_few_scalars(ranks, strategy):
    micro_batches = 3
    ordinary = on_ranks(ranks, sent_by, strategy, 1, "false")[0]
    sent = on_ranks(ranks, sent_by, strategy, micro_batches, "true")[0]
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


def kept_by(world, strategy, counts):
    """With so many micro-batches: the most bytes that sums take after one of them, over those of
    this rank's gradients.
    """
    kept = []
    for micro_batches in counts:
        size = 2 * world.world_size * micro_batches
        words = ["--train.global_batch_size", size, "--parallel.strategy", strategy]
        run = make_run(world, Blocks(samples=2 * size), *SETTINGS, *words, "--train.steps", 2)
        of_gradients = tensor_bytes(map(local, run.parallel.parameters))
        kept.append(kept_bytes(run, run.parallel) / of_gradients)
    return kept


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sums_take_one_copy_of_a_ranks_gradients_per_power_of_two(strategy):
    assert on_ranks(2, kept_by, strategy, (1, 2, 3, 4)) == [[0, 1, 1, 2]] * 2


# The fifth step ends an epoch. Crossed has gradients with several uses, added in one order.
@pytest.mark.parametrize("precision", ["--use_amp false", "--precision.dtype bf16"])
@pytest.mark.parametrize(("task", "steps"), [(Blocks(), 6), (Crossed(), 3)])
def test_runs_of_one_and_two_ranks_have_the_same_bits(task, steps, precision):
    compare(task, [(1, "single"), (2, "ddp"), (2, "fsdp")], steps, *precision.split())


def continued(world, strategy, folder, steps, *words):
    """Resume from the folder's newest checkpoint, train up to `steps`, and save there."""
    more = ["--run.dir", folder, "--run.resume", "auto", "--checkpoint.every", 1000, *words]
    more += ["--train.steps", 24, "--parallel.strategy", strategy]
    run = make_run(world, Blocks(), *SETTINGS, *more)
    logged = []
    while run.step < steps:
        run.metrics.record(*take_steps(run, 1))
        if run.step % 4 == 0:  # what is checkpointed in between is part of an interval
            row = log_row(run)
            logged.append((run.step, row.loss.hex(), row["grad_norm"].hex(), row["lr"].hex()))
    run.save()
    hashes = sha1(parameters_of(run).values()), sha1(moments_of(run))
    run.close()
    return logged, hashes


SHORT = [(4, "ddp", 2), (2, "fsdp", 5), (1, "single", 6)]
LONG = [(4, "ddp", 5), (2, "fsdp", 10), (1, "single", 15), (4, "hsdp", 19), (2, "ddp", 24)]


@pytest.mark.parametrize(
    ("dtype", "parts"),
    [
        ("bf16", SHORT),
        pytest.param("bf16", LONG, marks=pytest.mark.slow),
        pytest.param("fp16", LONG, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_changes_ranks_and_strategy_ends_with_the_undisturbed_runs_bits(
    tmp_path, dtype, parts
):
    # The scale falls at first, so that steps are skipped, and grows later.
    words = ["--precision.dtype", dtype]
    if dtype == "fp16":
        words += ["--precision.scaler.init_scale", 2.0**40]
        words += ["--precision.scaler.growth_interval", 3, "--train.max_skips_in_a_row", 60]
    alone = on_ranks(1, continued, "single", str(tmp_path / "alone"), parts[-1][-1], *words)[0]
    logged, hashes = [], ()
    for ranks, strategy, steps in parts:
        changing = str(tmp_path / "changing")
        more, hashes = on_ranks(ranks, continued, strategy, changing, steps, *words)[0]
        logged += more
    assert (logged, hashes) == alone


@pytest.mark.bad_input("`parallel.bit_exact` with a number of ranks that is no power of two")
@pytest.mark.bad_input("`parallel.bit_exact` without `train.global_batch_size`")
@pytest.mark.bad_input("`parallel.bit_exact` with a setting whose sums can't be exact")
@pytest.mark.parametrize(
    ("ranks", "words", "error"),
    [
        (3, [], "needs a power of two of ranks, not 3: .*; use 2 or 4 ranks"),
        (2, ["--train.global_batch_size", "auto"], "use train.global_batch_size=16 or"),
        (2, ["--parallel.comm_dtype", "fp16"], r"parallel.comm_dtype=fp16: .*; use off"),
        (2, ["--compile.mode", "max-autotune"], "compile.mode=max-autotune: .*; use default"),
    ],
)
def test_settings_that_cannot_be_exact_are_rejected_by_name(ranks, words, error):
    words = ["--train.global_batch_size", 96, "--parallel.bit_exact", "true", *words]
    config = load_config([str(word) for word in words], environ={})
    with pytest.raises(ConfigError, match=error):
        exact_config(config, World(world_size=ranks))


class Normed(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Coupled(Tiny):
    couples_samples = True


class Fused(Tiny):
    def optimizer(self, groups, lr):
        return torch.optim.AdamW(groups, lr=lr, fused=True)


@pytest.mark.bad_input("`parallel.bit_exact` with batch norm, coupled samples or a fused optimizer")
@pytest.mark.parametrize(
    ("task", "error"),
    [
        (Normed(), r'module "1" \(BatchNorm1d\) keeps statistics of each rank.*; use GroupNorm'),
        (Coupled(), "the task has couples_samples=True"),
        (Fused(), "the task's optimizer is fused"),
    ],
)
def test_what_a_task_does_that_cannot_be_exact_is_rejected_by_name(task, error):
    words = [*SETTINGS, "--data.drop_last", "true"]
    with pytest.raises(ConfigError, match=error):
        make_run(World(), task, *words)


class Follows(Tiny):
    """A teacher that moves in each forward: twice as often with twice the micro-batches."""

    def build_model(self):
        return Follower()


class Follower(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(8, 1)
        self.teacher = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) - self.teacher(x)


@pytest.mark.bad_input("`parallel.bit_exact` with a model whose forward changes a state")
def test_a_state_that_the_forward_changes_is_named():
    run = make_run(World(), Follows(), *SETTINGS)
    with pytest.raises(ConfigError, match="forward changes teacher.weight, once per micro-batch"):
        take_steps(run, 1)


def test_the_bench_compares_time_bytes_and_memory_with_the_ordinary_step(launch):
    words = ["--task.target", "tiny:Tiny", "--train.global_batch_size", "8"]
    words += ["--train.micro_batch_size", "2", "--train.steps", "1000", "--use_amp", "false"]
    done = launch.module("benchmarks.bit_exact", *words)
    assert done.returncode == 0, done.stderr
    assert "single on 1 x cpu, fp32, 4 micro-batches per rank" in done.stdout
    assert re.search(r"^processor ms +[\d.]+ +[\d.]+  [\d.]+ \[", done.stdout, re.MULTILINE)
    assert re.search(r"^bytes made in a step +\d+ +\d+  [\d.]+$", done.stdout, re.MULTILINE)
    assert re.search(r"^bytes kept for sums +0 +\d+ +2.00 x the", done.stdout, re.MULTILINE)
