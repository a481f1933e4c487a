"""Bit-exact runs: their bits in other layouts, what can't be exact, and `verify --bit_exact`."""

import re

import pytest
import test_verify
import torch
from bit_exact_models import Blocks, Crossed
from messages import message_of
from optimizer_runs import MAKERS
from ranks import on_ranks
from test_bit_exact import BF16, FP32, SETTINGS, compare, hashes_of
from test_step_with_features import student_and_teacher
from tiny import Tiny, log_row, make_run, take_steps, variant
from torch import nn

from dist_amp.bit_exact import exact_config
from dist_amp.settings import Config
from dist_amp.world import World

verify = test_verify.verify  # a fixture


@pytest.mark.parametrize("precision", [BF16, FP32])
def test_gradients_of_several_uses_are_added_in_one_order_on_one_and_two_ranks(precision):
    compare(Crossed(), [(1, "single"), (2, "ddp"), (2, "fsdp")], 3, *precision)


def continued(world, strategy, folder, steps, *words):
    """Resume from the folder's newest checkpoint, train up to `steps`, and save there."""
    more = ["--run.dir", folder, "--run.resume", "auto", "--checkpoint.every", 1000, *words]
    more += ["--train.steps", 24, "--parallel.strategy", strategy]
    run = make_run(world, Blocks(), *SETTINGS, *more)
    logged = []
    while run.step < steps:
        run.metrics.after_step(*take_steps(run, 1))
        if run.step % 4 == 0:  # what is checkpointed in between is part of an interval
            row = log_row(run)
            logged.append((run.step, row.loss.hex(), row["grad_norm"].hex(), row["lr"].hex()))
    run.save()
    hashes = hashes_of(run)
    run.close()
    return logged, hashes


# The fifth step ends an epoch, with a partial batch.
SHORT = [(2, "ddp", 2), (2, "fsdp", 5), (1, "single", 6)]
LONG = [(4, "ddp", 5), (2, "fsdp", 10), (1, "single", 15), (4, "hsdp", 19), (2, "ddp", 24)]
# The scale falls at first, so that steps are skipped, and grows later.
FP16 = ["--precision.scaler.init_scale", 2.0**40, "--precision.scaler.growth_interval", 3]
FP16 += ["--precision.dtype", "fp16", "--train.max_skips_in_a_row", 60]


@pytest.mark.parametrize(
    ("words", "parts"),
    [(BF16, SHORT), pytest.param(FP16, LONG, marks=pytest.mark.slow)],
    ids=["bf16", "fp16"],
)
def test_a_run_that_changes_ranks_and_strategy_ends_with_the_undisturbed_runs_bits(
    tmp_path, words, parts
):
    alone = continued(World(), "single", tmp_path / "alone", parts[-1][-1], *words)
    logged, hashes = [], {}
    for ranks, strategy, steps in parts:
        run = continued, strategy, tmp_path / "changing", steps, *words
        more, hashes = on_ranks(ranks, *run)[0]
        logged += more
    assert (logged, hashes) == alone


class Normed(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.bad_input("`parallel.bit_exact` with ranks, settings or a task that can't be exact")
@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), ["--train.global_batch_size", "auto"], "use train.global_batch_size=2 or"),
        (Tiny(), ["--parallel.comm_dtype", "fp16"], r"parallel.comm_dtype=fp16: .*; use off"),
        (Tiny(), ["--compile.mode", "max-autotune"], "compile.mode=max-autotune: .*; use default"),
        (Normed(), [], r'module "1" \(BatchNorm1d\) keeps statistics of each.*; use GroupNorm'),
        (variant(couples_samples=True), [], "the task has couples_samples=True"),
        (variant(optimizer=MAKERS["fused adamw"]), [], "the task's optimizer is fused"),
        (variant(build_model=student_and_teacher), [], "forward changes teacher.weight in each"),
    ],
)
def test_what_cannot_be_exact_is_rejected_by_name(task, words, said):
    def two_steps():
        take_steps(make_run(World(), task, *SETTINGS, "--data.drop_last", "true", *words), 2)

    assert re.search(said, message_of(64, two_steps))


def test_three_ranks_are_refused():
    said = "a power of two of ranks, not 3: gradients are added in pairs; use 2 or 4 ranks"
    assert said in message_of(64, exact_config, Config(), World(world_size=3))


BITS = "--bit_exact --train.micro_batch_size 2 --precisions fp32 --world_sizes 1,2 --task.target "


@pytest.mark.bad_input("`verify` with words that leave nothing to compare")
def test_strategies_that_take_none_of_the_numbers_of_ranks_are_refused(verify):
    status, output, errors = verify("--strategies single --world_sizes 2")
    assert (status, output) == (64, ""), output + errors
    assert "to compare: single needs --world_sizes 1" in errors
    assert len(errors.splitlines()) == 1


def test_dtypes_prints_what_autocast_makes_of_each_module(verify):
    status, output, errors = verify("--dtypes --precision.dtype bf16 --task.target tiny:Tiny")
    assert status == 0, errors
    assert "autocast to bf16 on cpu" in output


class Faulty(Blocks):
    """One layer draws from a generator of its own, which knows nothing of micro-batches."""

    def build_model(self):
        model = super().build_model()
        generator = torch.Generator().manual_seed(0)
        model.first[1].out.register_forward_hook(
            lambda module, inputs, output: output + torch.rand((), generator=generator)
        )
        return model


LEAKS = "2 ddp fp32:\n    the output of first.1.out (Linear) of micro-batch 1 differs first, in st"
STATISTICS = 'parallel.bit_exact=true is impossible: module "1" (BatchNorm1d'
HERE = "test_bit_exact_with_others"


@pytest.mark.bad_input("`verify --bit_exact` of a task that bit-exact training rejects")
@pytest.mark.parametrize(
    ("task", "strategies", "results", "outcome", "cause"),
    [
        ("bit_exact_models:Blocks", "ddp,hsdp", "first pass pass", "passed: 2 of 3", ""),
        (f"{HERE}:Faulty", "ddp", "first FAIL", "failed: 0 of 2", LEAKS),
        (f"{HERE}:Normed", "ddp", "refused refused", "failed: 0 of 2", STATISTICS),
    ],
)
def test_verify_says_for_each_way_of_running_whether_its_bits_are_the_same_or_why_not(
    verify, task, strategies, results, outcome, cause
):
    status, output, _ = verify(f"{BITS} {task} --strategies single,{strategies}")
    assert status == outcome.startswith("failed"), output
    found = re.findall(r"^ +\d+  \w+ +fp32 .* (\w+)$", output, re.MULTILINE)
    assert found == results.split(), output
    assert f"\n{outcome} have the bits of the first in their precision" in output
    assert cause in output
