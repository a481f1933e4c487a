"""What test_bit_exact.py tests, with verify."""

import re

import forked
import pytest
import torch.distributed as dist
from test_bit_exact import (
    threads,  # noqa: F401
)
from test_bit_exact_with_others import Follows
from tiny import Tiny

from dist_amp.errors import DataError
from dist_amp.verify import __main__ as verify_main
from dist_amp.verify import cells


class FollowsInBuffer(Follows):
    def __init__(self):
        super().__init__(buffer=True)


# ---- verify --bit_exact


OWN_GENERATOR = """
import torch
from bit_exact_models import Blocks

class Leaky(Blocks):
    '''One layer draws from a generator of its own, which knows nothing of micro-batches.'''

    def build_model(self):
        model = super().build_model()
        generator = torch.Generator().manual_seed(0)
        model.first[1].out.register_forward_hook(
            lambda module, inputs, output: output + torch.rand((), generator=generator)
        )
        return model
"""


@pytest.fixture
def verify_bits(monkeypatch, capfd):
    """verify_bits(words): (status, output, errors) of the command here; its ranks are forked."""
    monkeypatch.setattr(cells.multiprocessing, "get_context", lambda method: forked.context)

    def run(words):
        capfd.readouterr()
        words = f"--bit_exact --train.micro_batch_size 2 --precisions fp32 {words}"
        return verify_main.main(words.split()), *capfd.readouterr()

    return run


def test_verify_compares_the_users_task_bit_for_bit(verify_bits):
    status, output, _ = verify_bits("--task.target bit_exact_models:Blocks --world_sizes 1,2")
    assert status == 0, output
    assert output.count("  same\n") == 4
    assert "passed: 4 of 4 have the same bits" in output


def test_verify_names_the_first_module_that_differs(verify_bits, tmp_path, monkeypatch):
    (tmp_path / "own_generator.py").write_text(OWN_GENERATOR)
    monkeypatch.syspath_prepend(tmp_path)
    words = "--task.target own_generator:Leaky --world_sizes 1,2 --strategies single,ddp"
    status, output, _ = verify_bits(words)
    assert status == 1
    first = "FAIL: the output of first.1.out (Linear) of micro-batch 1 differs first, in step 1"
    assert first in output
    assert "What draws\nfrom a generator of its own (torch.Generator," in output


@pytest.mark.bad_input("`verify --bit_exact` of a task that bit-exact training rejects")
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("test_bit_exact_with_others:Normed", 'module "1" (BatchNorm1d) keeps'),
        (
            "test_verify_bit_exact:FollowsInBuffer",
            "the model's forward changes mean, once per micro-batch",
        ),
    ],
)
def test_verify_says_why_a_task_cannot_be_bit_exact(verify_bits, task, reason):
    words = f"--task.target {task} --world_sizes 1,2 --strategies single,ddp"
    status, output, _ = verify_bits(words)
    assert status == 1
    assert output.count(f"  refused: parallel.bit_exact=true can't hold: {reason}") == 2
    counts = "failed: 0 of 2 have the same bits in their precision, 2 refused, as in training"
    assert f"{counts}; nothing was compared in fp32" in output


class RefusedOnRanks(Tiny):
    """A model that only one process can train."""

    def build_model(self):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise DataError("the data are on one machine")
        return super().build_model()


def test_verify_fails_where_all_ways_but_one_are_refused(verify_bits):
    words = "--task.target test_verify_bit_exact:RefusedOnRanks --world_sizes 1,2 "
    words += "--strategies single,ddp"
    status, output, _ = verify_bits(words)
    assert status == 1
    assert "  refused: the data are on one machine\n" in output
    assert "1 of 2 have the same bits in their precision, 1 refused, as in training" in output
    assert "; nothing was compared in fp32" in output


class BreaksOnRanks(Tiny):
    def loss_sum(self, model, batch):
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("no kernel")
        return super().loss_sum(model, batch)


def test_verify_fails_where_a_rank_ends_with_an_error(verify_bits):
    words = "--task.target test_verify_bit_exact:BreaksOnRanks --world_sizes 1,2 "
    words += "--strategies single,ddp"
    status, output, _ = verify_bits(words)
    assert status == 1
    assert re.search(r"  FAIL: rank \d: RuntimeError: no kernel", output)
    assert "nothing was compared in fp32" in output


@pytest.mark.bad_input("`verify --bit_exact` with a number of ranks that is no power of two")
@pytest.mark.bad_input("`verify --bit_exact` with one way of running")
@pytest.mark.bad_input("`verify --bit_exact` with `--parallel.bit_exact false`")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--world_sizes 1,3", "a power of two of ranks, not 3: .*; use 2 or 4 ranks"),
        ("--world_sizes 1", "nothing to compare: .*; use --world_sizes 1,2"),
        ("--strategies single", "nothing to compare: .* with all --strategies"),
        ("--parallel.bit_exact false", "remove --parallel.bit_exact false"),
    ],
)
def test_verify_refuses_what_compares_nothing_before_anything_starts(verify_bits, words, error):
    status, output, errors = verify_bits(f"--task.target tiny:Tiny {words}")
    assert (status, output) == (64, "")
    assert re.search(error, errors)
