"""Bit-exact runs: what they cost, their bits in other layouts, and `verify --bit_exact`."""

import re

import pytest
import test_verify
import torch
import torch.distributed as dist
from bit_exact_models import Blocks, Crossed
from messages import message_of
from ranks import on_ranks
from test_bit_exact import (
    SETTINGS,
    compare,
    sha1,
    threads,  # noqa: F401
)
from tiny import Tiny, log_row, make_run, moments_of, parameters_of, take_steps
from torch import nn

from dist_amp.errors import DataError
from dist_amp.world import World

# Fixtures.
verify = test_verify.verify


# The fifth step ends an epoch. Crossed has gradients with several uses, added in one order.
@pytest.mark.parametrize(
    ("task", "steps", "precision"),
    [
        (Blocks(), 6, ["--precision.dtype", "bf16"]),
        (Crossed(), 3, ["--precision.dtype", "bf16"]),
        (Crossed(), 3, ["--use_amp", "false"]),
    ],
)
def test_runs_of_one_and_two_ranks_have_the_same_bits(task, steps, precision):
    compare(task, [(1, "single"), (2, "ddp"), (2, "fsdp")], steps, *precision)


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
# The scale falls at first, so that steps are skipped, and grows later.
FP16 = ["--precision.scaler.init_scale", 2.0**40, "--precision.scaler.growth_interval", 3]
FP16 += ["--precision.dtype", "fp16", "--train.max_skips_in_a_row", 60]


@pytest.mark.parametrize(
    ("words", "parts"),
    [(["--precision.dtype", "bf16"], SHORT), pytest.param(FP16, LONG, marks=pytest.mark.slow)],
    ids=["bf16", "fp16"],
)
def test_a_run_that_changes_ranks_and_strategy_ends_with_the_undisturbed_runs_bits(
    tmp_path, words, parts
):
    alone = on_ranks(1, continued, "single", str(tmp_path / "alone"), parts[-1][-1], *words)[0]
    logged, hashes = [], ()
    for ranks, strategy, steps in parts:
        changing = str(tmp_path / "changing")
        more, hashes = on_ranks(ranks, continued, strategy, changing, steps, *words)[0]
        logged += more
    assert (logged, hashes) == alone


class Normed(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Coupled(Tiny):
    couples_samples = True


class Fused(Tiny):
    def optimizer(self, groups, lr):
        return torch.optim.AdamW(groups, lr=lr, fused=True)


class Follower(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(8, 1)
        self.teacher = nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) - self.teacher(x)


class Follows(Tiny):
    """A teacher that moves in each forward: twice as often with twice the micro-batches."""

    def build_model(self):
        return Follower()


@pytest.mark.bad_input("`parallel.bit_exact` with ranks, settings or a task that can't be exact")
@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        (Tiny(), ["--train.global_batch_size", "auto"], "use train.global_batch_size=2 or"),
        (Tiny(), ["--parallel.comm_dtype", "fp16"], r"parallel.comm_dtype=fp16: .*; use off"),
        (Tiny(), ["--compile.mode", "max-autotune"], "compile.mode=max-autotune: .*; use default"),
        (Normed(), [], r'module "1" \(BatchNorm1d\) keeps statistics of each.*; use GroupNorm'),
        (Coupled(), [], "the task has couples_samples=True"),
        (Fused(), [], "the task's optimizer is fused"),
        (Follows(), [], "forward changes teacher.weight, once per micro-batch"),
    ],
)
def test_what_cannot_be_exact_is_rejected_by_name(task, words, said):
    def two_steps():
        take_steps(make_run(World(), task, *SETTINGS, "--data.drop_last", "true", *words), 2)

    assert re.search(said, message_of(64, two_steps))


# ---- verify --bit_exact

BITS = "--bit_exact --train.micro_batch_size 2 --precisions fp32 --world_sizes 1,2 --task.target "


@pytest.mark.bad_input("`verify` with words that leave nothing to compare, or that can't be exact")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--strategies single --world_sizes 2", "to compare: single takes --world_sizes 1"),
        ("--task.taget x:Y", "task.target"),
        (f"{BITS} tiny:Tiny --world_sizes 1,3", "a power of two of ranks, not 3: .*; use 2 or 4"),
        (f"{BITS} tiny:Tiny --world_sizes 1", "nothing to compare: .*; use --world_sizes 1,2"),
        (f"{BITS} tiny:Tiny --parallel.bit_exact false", "remove --parallel.bit_exact false"),
    ],
)
def test_a_mistake_on_verifys_command_line_is_rejected(verify, words, error):
    status, output, errors = verify(words)
    assert (status, output) == (64, ""), output + errors
    assert re.search(error, errors)
    assert len(errors.splitlines()) == 1


def test_dtypes_prints_what_autocast_makes_of_each_module(verify):
    status, output, errors = verify("--dtypes --task.target tiny:Tiny")
    assert status == 0, errors
    assert "autocast to bf16 on cpu" in output
    assert "Linear" in output


def test_verify_compares_the_users_task_bit_for_bit(verify):
    status, output, _ = verify(f"{BITS} bit_exact_models:Blocks")
    assert status == 0, output
    assert output.count("  same\n") == 4
    assert "passed: 4 of 4 have the same bits" in output


class Leaky(Blocks):
    """One layer draws from a generator of its own, which knows nothing of micro-batches."""

    def build_model(self):
        model = super().build_model()
        generator = torch.Generator().manual_seed(0)
        model.first[1].out.register_forward_hook(
            lambda module, inputs, output: output + torch.rand((), generator=generator)
        )
        return model


class RefusedOnRanks(Tiny):
    """A model that only one process can train."""

    def build_model(self):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise DataError("the data are on one machine")
        return super().build_model()


class BreaksOnRanks(Tiny):
    def loss_sum(self, model, batch):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("no kernel")
        return super().loss_sum(model, batch)


SAME = "have the same bits in their precision"


@pytest.mark.bad_input("`verify --bit_exact` of a task that bit-exact training rejects")
@pytest.mark.parametrize(
    ("task", "row", "outcome"),
    [
        (
            "Leaky",
            "FAIL: the output of first.1.out (Linear) of micro-batch 1 differs first, in step 1",
            f"1 of 2 {SAME} (",
        ),
        ("Normed", 'refused: parallel.bit_exact=true can\'t hold: module "1" (BatchNorm1d', "0 of"),
        (
            "RefusedOnRanks",
            "refused: the data are on one machine",
            f"1 of 2 {SAME}, 1 refused, as in training; nothing was compared in fp32",
        ),
        (
            "BreaksOnRanks",
            "FAIL: rank 1: RuntimeError: no kernel",
            "; nothing was compared in fp32",
        ),
    ],
)
def test_verify_says_what_differs_first_or_why_nothing_was_compared(verify, task, row, outcome):
    words = f"{BITS} test_bit_exact_with_others:{task} --strategies single,ddp"
    status, output, _ = verify(words)
    assert status == 1, output
    # Which of the ranks is first to fail is up to chance.
    assert f"  {row}" in output.replace("rank 0: Runtime", "rank 1: Runtime")
    assert "\nfailed: " in output
    assert outcome in output
    advice = "What draws\nfrom a generator of its own (torch.Generator,"
    assert (advice in output) == ("FAIL" in row)
