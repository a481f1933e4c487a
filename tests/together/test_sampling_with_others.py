"""What test_sampling.py tests, with other features."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from benchmarks.collectives import Counting
from dist_amp.supervise import sampling

WORDS = ["--use_amp", "false", "--optim.ema", 0.5, "--train.global_batch_size", 16]


class Sampled(Tiny):
    def sample(self, model):
        out = [model(torch.full((1, 8), float(n))).item() for n in range(10)]
        return " ".join(f"{value:.4f}" for value in out)


def sampled(world, strategy, free=None):
    """(the sample, how many gathers it took, what was printed as warnings)."""
    run = make_run(world, Sampled(), "--parallel.strategy", strategy, *WORDS)
    take_steps(run, 2)
    found = []
    run.metrics.write_sample = lambda step, sample, about: found.append(sample)
    old = sampling.capacity_of
    if free is not None:
        sampling.capacity_of = lambda world: (free, 0)
    before = gathers_of(lambda: take_steps(run, 1))
    try:
        with redirect_stderr(io.StringIO()) as output:
            gathers = gathers_of(sampling.Sampling(run).after_evaluation)
    finally:
        sampling.capacity_of = old
    assert gathers_of(lambda: take_steps(run, 1)) == before, "units reshard as before"
    return found, gathers, output.getvalue()


def gathers_of(call):
    """How many collectives of the call gather parameters."""
    with Counting() as counting:
        call()
    found = counting.collectives.items()
    return sum(times for one, times in found if one.kind == "all_gather" and one.bytes_in > 8)


def test_a_sharded_model_is_gathered_once_per_sample_and_not_once_per_token():
    ((expected, _, _),) = on_ranks(1, sampled, "single")
    for found, gathers, _ in on_ranks(2, sampled, "fsdp"):
        assert found == expected
        assert gathers == 3  # two blocks and the head; ten tokens


@pytest.mark.bad_input("a `sample(model)` of a sharded model that does not fit on one device")
def test_a_sample_of_a_model_that_does_not_fit_is_skipped_and_the_command_that_makes_it_is_named():
    (found, gathers, output), _ = on_ranks(2, sampled, "fsdp", 100.0)
    assert (found, gathers) == ([], 0)
    assert f"python -m dist_amp.sample {Path('unused')} makes one on one device" in output
