"""What watches a run changes none of its steps."""

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, make_run, moments_of, parameters_of
from torch import nn

from dist_amp.supervise.observers import add_observers
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import train


class Residual(nn.Module):
    """With an in-place module, batch statistics and dropout."""

    def __init__(self):
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Linear(8, 8), relu, nn.BatchNorm1d(8), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.inner(x)


class Restless(Overflow):
    """Sample 5 is infinite, so that some steps are skipped."""

    def __init__(self):
        super().__init__(bad=(5,), samples=32)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), Residual(), nn.Linear(8, 1))


OFF = ["--debug.nonfinite", "off"]
WATCHED = ["--debug.nonfinite", "step", "--debug.numerics", "true", "--debug.profile", 2]


def final_states(world, words):
    """What runs end with that are not watched, by default, and by everything."""
    states = []
    for more in (OFF, [], WATCHED):
        run = make_run(world, Restless(), *words, *more)
        with AgreedStop(world) as stop:
            assert train(run, stop) == "completed"
        run.data.close()
        tensors = [*parameters_of(run).values(), *moments_of(run), *run.parallel.module.buffers()]
        tensors += [run.scaler.scale_tensor, run.schedule.counters, torch.get_rng_state()]
        states.append([run.data.position, *(tensor.numpy().tobytes() for tensor in tensors)])
        assert all(p.grad is None for p in run.parallel.parameters)
    return states


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "single"), (2, "fsdp"), pytest.param(2, "ddp", marks=pytest.mark.slow)],
)
def test_a_run_that_is_watched_ends_bit_for_bit_as_one_that_is_not(tmp_path, ranks, strategy):
    words = ["--parallel.strategy", strategy, "--precision.dtype", "fp16", "--run.dir", tmp_path]
    words += ["--precision.cast_by", "autocast", "--precision.scaler.init_scale", 256]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2]
    words += ["--data.shuffle", "false", "--train.steps", 4, "--metrics.log_every", 2]
    for plain, default, watched in on_ranks(ranks, final_states, words):
        assert default == plain
        assert watched == plain
    assert (tmp_path / "nonfinite/reports.jsonl").exists()
    assert len(list((tmp_path / "profile").glob("*.gz"))) == ranks


@pytest.mark.parametrize(("param_dtype", "expected"), [("bf16", True), ("fp32", False)])
def test_parameters_in_bf16_and_only_they_have_their_updates_measured(param_dtype, expected):
    assert on_ranks(2, watches_numerics, param_dtype) == [expected] * 2


def watches_numerics(world, param_dtype):
    words = ["--parallel.strategy", "fsdp", "--parallel.param_dtype", param_dtype]
    run = make_run(world, Tiny(), *words)
    add_observers(run, AgreedStop(world))
    return "Numerics" in [type(observer).__name__ for observer in run.observers]
