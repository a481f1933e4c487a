"""What test_verify.py tests, with other features; and `verify --bit_exact`."""

import re

import pytest
import test_verify
import torch
import torch.distributed as dist
from bit_exact_models import Blocks
from conftest import ROOT
from test_bit_exact import threads  # noqa: F401
from tiny import Tiny

from dist_amp.errors import DataError

# Fixtures.
verify = test_verify.verify

SINUSOID = (
    f"--task.target {ROOT}/examples/sinusoid.py:Sinusoid --task.args.crop 8 --task.args.width 16"
)
BITS = "--bit_exact --train.micro_batch_size 2 --precisions fp32 --world_sizes 1,2"


def test_dtypes_prints_what_autocast_makes_of_each_module(verify):
    status, output, errors = verify(f"--dtypes {SINUSOID}")
    assert status == 0, errors
    assert "autocast to bf16 on cpu" in output
    assert "Conv2d" in output


@pytest.mark.bad_input("`verify --bit_exact` with a number of ranks that is no power of two")
@pytest.mark.bad_input("`verify --bit_exact` with one way of running")
@pytest.mark.bad_input("`verify --bit_exact` with `--parallel.bit_exact false`")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--world_sizes two", "--world_sizes=two must be whole numbers above 0"),
        ("--world_sizes 0", "--world_sizes=0 must be whole numbers above 0"),
        ("--precisions fp64", "--precisions=fp64: 'fp64' is none of fp32, bf16, fp16"),
        ("--strategies ddp,fsdb", "'fsdb' is none of single, ddp, fsdp, hsdp"),
        ("--strategies single --world_sizes 2", "to compare: single takes --world_sizes 1"),
        ("--world_sizes", "expected one argument; see python -m dist_amp.verify --help"),
        ("--task.taget x:Y", "task.target"),
        ("--task.target nowhere:Task", "task.target=nowhere:Task"),
        (f"{BITS} --world_sizes 1,3", "a power of two of ranks, not 3: .*; use 2 or 4 ranks"),
        (f"{BITS} --world_sizes 1", "nothing to compare: .*; use --world_sizes 1,2"),
        (f"{BITS} --strategies single", "nothing to compare: .* with all --strategies"),
        (f"{BITS} --parallel.bit_exact false", "remove --parallel.bit_exact false"),
    ],
)
def test_a_mistake_on_its_command_line_is_rejected(verify, words, error):
    status, output, errors = verify(f"{SINUSOID} {words}")
    assert (status, output) == (64, ""), output + errors
    assert re.search(error, errors)
    assert len(errors.splitlines()) == 1


def test_verify_compares_the_users_task_bit_for_bit(verify):
    status, output, _ = verify(f"{BITS} --task.target bit_exact_models:Blocks")
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


NOTHING = "; nothing was compared in fp32"


@pytest.mark.bad_input("`verify --bit_exact` of a task that bit-exact training rejects")
@pytest.mark.parametrize(
    ("task", "row", "outcome"),
    [
        (
            "test_verify_with_others:Leaky",
            "FAIL: the output of first.1.out (Linear) of micro-batch 1 differs first, in step 1",
            "1 of 2 have the same bits in their precision (",
        ),
        (
            "test_bit_exact_with_others:Normed",
            'refused: parallel.bit_exact=true can\'t hold: module "1" (BatchNorm1d) keeps',
            f"0 of 2 have the same bits in their precision, 2 refused, as in training{NOTHING}",
        ),
        (
            "test_verify_with_others:RefusedOnRanks",
            "refused: the data are on one machine",
            f"1 of 2 have the same bits in their precision, 1 refused, as in training{NOTHING}",
        ),
        ("test_verify_with_others:BreaksOnRanks", "FAIL: rank 1: RuntimeError: no kernel", NOTHING),
    ],
)
def test_verify_says_what_differs_first_or_why_nothing_was_compared(verify, task, row, outcome):
    words = f"{BITS} --task.target {task} --strategies single,ddp"
    status, output, _ = verify(words)
    assert status == 1, output
    # Which of the ranks is first to fail is up to chance.
    assert f"  {row}" in output.replace("rank 0: Runtime", "rank 1: Runtime")
    assert "\nfailed: " in output
    assert outcome in output
    assert ("What draws\nfrom a generator of its own (torch.Generator," in output) == (
        "FAIL" in row
    )
