"""What test_sampling.py tests, with other features."""

import io
from contextlib import redirect_stderr
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from benchmarks.collectives import Counting
from dist_amp.supervise import sampling


class Sampled(Tiny):
    def sample(self, model):
        out = [model(torch.full((1, 8), float(n))).item() for n in range(10)]
        return " ".join(f"{value:.4f}" for value in out)


def gathers_of(call):
    """How many collectives of the call gather parameters."""
    with Counting() as counting:
        call()
    found = counting.collectives.items()
    return sum(times for one, times in found if one.kind == "allgather" and one.nbytes > 16)


def sampled(world, strategy, free=1e12):
    """(the sample, how many gathers it took, what was printed as warnings)."""
    words = ("--use_amp", "false", "--optim.ema", 0.5, "--train.global_batch_size", 16)
    run = make_run(world, Sampled(), "--parallel.strategy", strategy, *words)
    take_steps(run, 2)
    found = []
    run.metrics.write_sample = lambda step, sample, about: found.append(sample)
    before = gathers_of(lambda: take_steps(run, 1))
    has_room = patch.object(sampling, "capacity_of", lambda world: (free, 0))
    with has_room, redirect_stderr(io.StringIO()) as output:
        gathers = gathers_of(sampling.Sampling(run).after_evaluation)
    assert gathers_of(lambda: take_steps(run, 1)) == before, "units reshard as before"
    return found, gathers, output.getvalue()


@pytest.mark.bad_input("a `sample(model)` of a sharded model that does not fit on one device")
def test_a_sharded_model_is_gathered_once_per_sample_unless_it_does_not_fit():
    ((expected, _, _),) = on_ranks(1, sampled, "single")
    for found, gathers, _ in on_ranks(2, sampled, "fsdp"):
        assert found == expected
        assert gathers == 4  # two blocks, the head, and the ranks' free memory; ten tokens
    (found, gathers, output), _ = on_ranks(2, sampled, "fsdp", 100.0)
    assert (found, gathers) == ([], 1)
    assert "the whole model takes 612 bytes beside its shards, and " in output
    assert "; python -m dist_amp.sample unused tries again" in output
