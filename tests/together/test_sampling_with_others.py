"""What test_sampling.py tests, with other features."""

import io
import random
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import numpy
import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, moments_of, parameters_of, take_steps
from torch import nn

from benchmarks.collectives import Counting
from dist_amp.supervise import sampling
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import train


class Sampled(Tiny):
    def sample(self, model):
        out = [model(torch.full((1, 8), float(n))).item() for n in range(10)]
        return " ".join(f"{value:.4f}" for value in out)


def gathers_of(call):
    """How many collectives of the call gather parameters."""
    with Counting() as counting:
        call()
    found = counting.collectives.items()
    return sum(times for one, times in found if one.kind == "all_gather" and one.bytes_in > 8)


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
    assert "python -m dist_amp.sample unused makes one on one device" in output


class Restless(Tiny):
    """Its sample draws from every generator, trains batch statistics and leaves its mode."""

    samples_taken = 0

    def build_model(self):
        layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)]
        return nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 1))

    def sample(self, model):
        self.samples_taken += 1
        random.random(), numpy.random.rand()  # noqa: NPY002
        model.train()
        return f"{model(torch.randn(4, 8)).sum().item():.3f}"


class Quiet(Restless):
    sample = property()  # hasattr says no


def trained(world, task, strategy):
    words = "--train.steps 4 --train.micro_batch_size 4 --eval.every 2 --optim.ema 0.9".split()
    run = make_run(world, task, "--parallel.strategy", strategy, *words)
    with redirect_stdout(io.StringIO()), AgreedStop(world) as stop:
        train(run, stop)
    state = [*parameters_of(run).values(), *moments_of(run), *run.parallel.module.buffers()]
    state.append(torch.get_rng_state())
    return getattr(task, "samples_taken", 0), [tensor.numpy().tobytes() for tensor in state]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_run_with_samples_ends_bit_identical_to_one_without(ranks, strategy):
    with_samples = on_ranks(ranks, trained, Restless(), strategy)
    without = on_ranks(ranks, trained, Quiet(), strategy)
    assert [taken for taken, _ in with_samples + without] == [2] * ranks + [0] * ranks
    assert [state for _, state in with_samples] == [state for _, state in without]
